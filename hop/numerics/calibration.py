"""Find a static scale from data, as scale= and zero_point= of `hop.quantize`.

    found = hop.calibration.percentile(q, *batches, percent=99.9)
    y = hop.quantize(q, x, **found)

Every method reads all batches. Their shapes must split into the same number of blocks: blocks at the same position,
such as a tensor or a channel, are combined. NaN is ignored, and an infinity counts as the largest float32.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import memory
from hop.numerics import blocks, spelling
from hop.numerics.quantizer import Quantizer
from hop.numerics.rule import Blocks
from hop.numerics.scale_rules import LARGEST, Amax

__all__ = ["amax", "entropy", "moving_average", "mse", "percentile"]

_EMPTY = 1e-4  # p̂ of a bin that contains only clipped values, so that its logarithm is finite
_ONE_BY_ONE = "give them one by one, as in amax(q, *batches)"


def amax(q: Quantizer, *batches: Tensor) -> dict[str, Tensor]:
    """The scale that represents every value: that of q's own rule for all of `batches`.

    Args:
        q: the quantizer. Without a rule (Static) the scale is amax / max, or with a zero point that of MinMax.
        batches: float tensors, at least one.

    Returns:
        {"scale": ...}, and for a quantizer with zero points {"zero_point": ...}, in the shapes of these buffers.
    """
    _check("amax", q, batches)
    return _from_range(q, *_range(q, batches))


def moving_average(q: Quantizer, *batches: Tensor, momentum: float = 0.1) -> dict[str, Tensor]:
    """The scale for a moving average of the ranges of batches, which limits the effect of a single outlier.

    For the range (l, h) of a batch's block, extended to include 0: (a, b) ← (1 - momentum) (a, b) + momentum (l, h),
    starting with the first batch's.

    Arguments and result are those of `amax`; momentum must be above 0 and at most 1, which uses only the last batch.
    """
    _check("moving_average", q, batches)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 < momentum <= 1:
        raise ValueError(f"moving_average: momentum must be above 0 and at most 1, got {momentum!r}; give 0.1")
    low, high = _range(q, batches[:1])
    low, high = low.clamp(max=0), high.clamp(min=0)
    for x in batches[1:]:
        of_x = _range(q, (x,))
        low, high = low + momentum * (of_x[0].clamp(max=0) - low), high + momentum * (of_x[1].clamp(min=0) - high)
    return _from_range(q, low, high)


def entropy(q: Quantizer, *batches: Tensor, bins: int = 2048, steps: int = 64, least: float = 0.1) -> dict[str, Tensor]:
    """The scale that loses the least information about each block's distribution.

    Tries ratios from `least` to 1 of the range, in `steps` steps, and chooses the least Kullback-Leibler divergence Σ p
    log(p / p̂). Values of a block are counted in `bins` over its range. p has these counts, with clipped values counted
    in the outermost unclipped bins. p̂ has the counts within the range, where bins with the same code share their
    counts evenly among the non-empty ones, and 1e-4 instead of 0. Migacz 2017, "8-bit Inference with TensorRT".

    Arguments and result are those of `amax`; q must not have two-level scales.
    """
    _check("entropy", q, batches)
    for name, given, rule in (("bins", bins, 16), ("steps", steps, 2)):
        if isinstance(given, bool) or not isinstance(given, int) or given < rule:
            raise ValueError(
                f"entropy: {name} must be an integer of {rule} or more, got {given!r}; give one such as 64"
            )
    if not isinstance(least, int | float) or not 0 < least < 1:
        raise ValueError(f"entropy: least must be between 0 and 1, got {least!r}; give one such as 0.1")
    if q.scale.outer_block is not None:
        raise ValueError(f"entropy: q={q} has scales in two levels, which no distribution has; take mse")
    low, high = _range(q, batches)
    rows = _rows(q, batches, lambda x: x)
    limits = torch.stack([low.flatten(), high.flatten()])
    width = ((limits[1] - limits[0]) / bins).clamp(min=2.0**-126).unsqueeze(1)
    known = rows == rows
    place = ((rows.nan_to_num(0.0) - limits[0].unsqueeze(1)) / width).floor().clamp(0, bins - 1).to(torch.int64)
    counts = torch.zeros(len(rows), bins, dtype=torch.float64, device=rows.device)
    counts.scatter_add_(1, place, known.to(torch.float64))
    centres = limits[0].unsqueeze(1) + (torch.arange(bins, device=rows.device) + 0.5) * width
    if not q.scale.has_zero_point():  # symmetric around 0
        most = torch.maximum(limits[1], -limits[0])
        limits = torch.stack([most * (q.format.min / q.format.max), most])
    best: dict[str, Tensor] = {}
    lost: Tensor | None = None
    for i in range(steps):
        ratio = 1 - (1 - least) * i / (steps - 1)
        scales = _from_range(q, low * ratio, high * ratio)
        divergence = _divergence(q, counts, centres, limits * ratio, scales).reshape(low.shape)
        if lost is None:
            best, lost = scales, divergence
        else:
            best = {name: torch.where(divergence < lost, value, best[name]) for name, value in scales.items()}
            lost = torch.minimum(divergence, lost)
    return best


def _divergence(q: Quantizer, counts: Tensor, centres: Tensor, limits: Tensor, scales: dict[str, Tensor]) -> Tensor:
    """The divergence of each row of counts (rows, bins), clipped to the ends (2, rows)."""
    by_row = replace(q, block=(1, -1), flat=False, stochastic=False, layout=None)
    by_rows = {name: value.reshape(-1, 1) for name, value in scales.items()}
    values = by_row.fake_quantize(centres, by_rows["scale"], by_rows.get("zero_point"))
    inside = (centres >= limits[0].unsqueeze(1)) & (centres <= limits[1].unsqueeze(1))
    kept = torch.where(inside, counts, 0.0)
    places = torch.arange(counts.shape[1], device=counts.device).expand_as(counts)
    first = torch.where(inside, places, counts.shape[1]).amin(1, keepdim=True).clamp(max=counts.shape[1] - 1)
    last = torch.where(inside, places, -1).amax(1, keepdim=True).clamp(min=0)
    p = kept.scatter_add(1, first, torch.where(places < first, counts, 0.0).sum(1, keepdim=True))
    p = p.scatter_add(1, last, torch.where(places > last, counts, 0.0).sum(1, keepdim=True))
    code = torch.nn.functional.pad((values.diff(dim=1) != 0).to(torch.int64).cumsum(1), (1, 0))
    filled = (kept > 0).to(kept.dtype)
    sums, sizes = (torch.zeros_like(kept).scatter_add(1, code, t).gather(1, code) for t in (kept, filled))
    spread = torch.where(kept > 0, sums / sizes.clamp(min=1), 0.0)
    p, spread = (t / t.sum(1, keepdim=True).clamp(min=1e-300) for t in (p, spread))
    known = torch.where(spread > 0, spread, _EMPTY)
    return torch.where(p > 0, p * (p / known).clamp(min=1e-300).log(), 0.0).sum(1)


def percentile(q: Quantizer, *batches: Tensor, percent: float = 99.9) -> dict[str, Tensor]:
    """The scale that represents `percent` of the magnitudes of each block; with zero points, of the values at either
    end.

    Arguments and result are those of `amax`; percent is from 1 to 100.
    """
    _check("percentile", q, batches)
    if not isinstance(percent, int | float) or not 1 <= percent <= 100:
        is_part = isinstance(percent, int | float) and 0 < percent < 1
        such = f"give percent={100 * percent:g}" if is_part else "give one such as 99.9"
        raise ValueError(f"percentile: percent must be from 1 to 100, got {percent!r}; {such}")
    if not q.scale.has_zero_point():
        high = _joined(q, batches, lambda x: x.abs(), percent)
        return _from_range(q, -high, high)
    return _from_range(q, -_joined(q, batches, torch.neg, percent), _joined(q, batches, lambda x: x, percent))


def mse(q: Quantizer, *batches: Tensor, steps: int = 80, least: float = 0.2) -> dict[str, Tensor]:
    """The scale with the least mean squared error among ratios from `least` to 1 of the range, in `steps` steps.

    Arguments and result are those of `amax`.
    """
    _check("mse", q, batches)
    if not isinstance(steps, int) or steps < 2:
        raise ValueError(f"mse: steps must be an integer of 2 or more, got {steps!r}; give one such as 80")
    if not isinstance(least, int | float) or not 0 < least < 1:
        raise ValueError(f"mse: least must be between 0 and 1, got {least!r}; give one such as 0.2")
    low, high = _range(q, batches)
    best: dict[str, Tensor] = {}
    least_error: Tensor | None = None
    for i in range(steps):
        ratio = 1 - (1 - least) * i / (steps - 1)
        scales = _from_range(q, low * ratio, high * ratio)
        error = torch.stack([_error(q, x, scales) for x in batches]).sum(0)
        if least_error is None:
            best, least_error = scales, error
        else:
            better = error < least_error
            best = {name: torch.where(better, value, best[name]) for name, value in scales.items()}
            least_error = torch.minimum(error, least_error)
    return best


def _error(q: Quantizer, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
    """The squared error of each block that has a separate scale."""
    wide = x.to(torch.float32)
    noise = torch.full(x.shape, 128, dtype=torch.uint8, device=x.device) if q.stochastic else None
    rounded = q.fake_quantize(wide, scales["scale"], scales.get("zero_point"), noise)
    return _served(q).per_block((rounded - wide).nan_to_num(0.0).square())


def _range(q: Quantizer, batches: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each block, with NaN as 0."""
    known = [x.to(torch.float32).nan_to_num(0.0, LARGEST, -LARGEST) for x in batches]
    low = [_served(q).per_block(x, torch.amin) for x in known]
    high = [_served(q).per_block(x, torch.amax) for x in known]
    return torch.stack(low).amin(0), torch.stack(high).amax(0)


def _joined(q: Quantizer, batches: tuple[Tensor, ...], change: Callable[[Tensor], Tensor], percent: float) -> Tensor:
    """The percentile of change(x) in each block over all batches; 0 for blocks without values."""
    rows = _rows(q, batches, change)
    joined = rows.sort(-1).values  # NaN, which also pads incomplete blocks, sorts last
    count = (joined == joined).sum(-1, keepdim=True).to(torch.float64)
    place = (count * percent / 100).round().clamp(min=1) - 1
    quantiles = joined.gather(-1, place.to(torch.int64)).squeeze(-1).nan_to_num(0.0)
    served = _served(q)
    return quantiles.reshape(tuple(blocks.counts(served.rows(batches[0].shape), served.block)))


def _rows(q: Quantizer, batches: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    """change(x) of all batches by block, (blocks, values), padded with NaN."""
    served = _served(q)
    rows: list[Tensor] = []
    for x in batches:
        changed = change(x.to(torch.float32)).clamp(-LARGEST, LARGEST)
        cut, dims = blocks.split(changed.reshape(served.rows(x.shape)), served.block, fill=math.nan)
        kept = [d for d in range(cut.dim()) if d not in dims]
        blocks_as_rows = cut.permute(*kept, *dims).flatten(len(kept))
        rows.append(blocks_as_rows.reshape(-1, blocks_as_rows.shape[-1]))
    return torch.cat(rows, -1)


def _served(q: Quantizer) -> Quantizer:
    """A quantizer with the blocks of the scale that a caller passes to q."""
    return q if q.scale.outer_block is None else replace(q, block=q.scale.outer_block, scale=Amax())


def _from_range(q: Quantizer, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """The scale that q's rule finds for blocks with this range."""
    if q.scale.outer_block is not None:
        return {"scale": torch.maximum(high, -low)}
    rule = q.scale.of_ends()
    limits = torch.stack([low, high], -1)
    parts = Blocks(limits, [limits.dim() - 1], list(range(limits.dim() - 1)), torch.float32, q.block)
    tensors = rule.find(parts, q.format).tensors
    return {name: t.squeeze(-1) for name, t in zip(rule.stored(q.format, q.block), tensors, strict=True)}


def _check(name: str, q: Any, batches: tuple[Any, ...]) -> None:
    if not isinstance(q, Quantizer):
        raise TypeError(
            f"{name}: q must be a Quantizer, got {spelling.shown(q)}; give one such as hop.presets.INT8_ROW"
        )
    if (refused := q.scale.refuses_scale()) is not None:
        raise ValueError(f"{name}: q={q} takes no scale from a caller: {refused}; calibrate another quantizer")
    if not batches:
        raise ValueError(f"{name}: batches must contain at least one tensor, got none; {_ONE_BY_ONE}")
    for x in batches:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: batches must be floating-point tensors, got {spelling.shown(x)}; {_ONE_BY_ONE}")
    if len(devices := {str(x.device) for x in batches}) > 1:
        raise ValueError(f"{name}: batches must be on one device, got {', '.join(sorted(devices))}; move them to one")
    memory.check(batches)
    served = _served(q)
    if len({tuple(blocks.counts(served.rows(x.shape), served.block)) for x in batches}) > 1:
        shapes = [tuple(x.shape) for x in batches]
        raise ValueError(
            f"{name}: batches must split into the same number of blocks of {served.block}, got shapes {shapes}; give "
            "batches of one shape"
        )
