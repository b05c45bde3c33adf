"""Rules to find a static scale from data: what `hop.quantize` then takes as scale= and zero_point=.

    found = hop.calibration.percentile(q, *batches, percent=99.9)
    y = hop.quantize(q, x, **found)

Each looks at all batches, whose shapes must cut into the same number of blocks: a block of a later batch belongs to the
one at its place in the first, as for a whole tensor or a channel. NaN is ignored, and an infinity counts as the largest
float32.
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
from hop.numerics.scale_rules import LARGEST, Amax, Blocks

__all__ = ["amax", "entropy", "moving_average", "mse", "percentile"]

_EMPTY = 1e-4  # p̂ of a bin that has nothing but what is clipped, whose logarithm is to be finite
_ONE_BY_ONE = "give them one by one, as in amax(q, *batches)"


def amax(q: Quantizer, *batches: Tensor) -> dict[str, Tensor]:
    """The scale that holds every number: what q's own rule finds for the whole of `batches`.

    Args:
        q: the quantizer; one without a rule (Static) is given amax / max, or with a zero point the range of MinMax.
        batches: float tensors, at least one.

    Returns:
        {"scale": ...} and, for a quantizer with zero points, {"zero_point": ...}, of the shapes of those buffers.
    """
    _check("amax", q, batches)
    return _from_range(q, *_range(q, batches))


def moving_average(q: Quantizer, *batches: Tensor, momentum: float = 0.1) -> dict[str, Tensor]:
    """The scale that holds a moving average of the ranges of batches, in which a single large one counts little: with
    (l, h) that of a block of a batch and of 0, (a, b) ← (1 - momentum) (a, b) + momentum (l, h), from the first on.

    Args and returns: as `amax`; momentum above 0, and 1 at most, which takes the last batch's."""
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
    """The scale that loses the least information of each block's distribution: with the least Kullback-Leibler
    divergence Σ p log(p / p̂), of those for `least` to 1 times the range, in `steps` steps.

    The numbers of a block are counted in `bins` between the ends of its range. p is what is counted, in which what is
    clipped counts at the last bin that is not; p̂ that of the numbers within the range, where the counts of bins that
    become one code are spread evenly over those that are not empty, and 1e-4 where it would be 0. Migacz 2017, "8-bit
    Inference with TensorRT".

    Args and returns: as `amax`; q has no scales in two levels."""
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
    if not q.scale.has_zero_point():  # which holds as much at both ends
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
    """Of each row of counts (rows, bins), clipped to its ends (2, rows)."""
    by_row = replace(q, block=(1, -1), flat=False, stochastic=False, layout=None)
    own = {name: value.reshape(-1, 1) for name, value in scales.items()}
    values = by_row.fake_quantize(centres, own["scale"], own.get("zero_point"))
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
    """The scale that holds `percent` of the magnitudes of each block; with zero points, of the numbers at either end.

    Args and returns: as `amax`; percent of 1 to 100."""
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
    """The scale with the least mean squared error, of those for `least` to 1 times the range, in `steps` steps.

    Args and returns: as `amax`."""
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
    """The squared error of each block that has a scale of its own."""
    wide = x.to(torch.float32)
    noise = torch.full(x.shape, 128, dtype=torch.uint8, device=x.device) if q.stochastic else None
    rounded = q.fake_quantize(wide, scales["scale"], scales.get("zero_point"), noise)
    return _served(q).per_block((rounded - wide).nan_to_num(0.0).square())


def _range(q: Quantizer, batches: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each block; 0 for NaN."""
    known = [_known(x) for x in batches]
    low = [_served(q).per_block(x, torch.amin) for x in known]
    high = [_served(q).per_block(x, torch.amax) for x in known]
    return torch.stack(low).amin(0), torch.stack(high).amax(0)


def _joined(q: Quantizer, batches: tuple[Tensor, ...], change: Callable[[Tensor], Tensor], percent: float) -> Tensor:
    """The percentile of change(x) in each block of all batches; 0 where there is no number."""
    rows = _rows(q, batches, change)
    joined = rows.sort(-1).values  # NaN, which is also what a cut-off block lacks, comes last
    count = (joined == joined).sum(-1, keepdim=True).to(torch.float64)
    place = (count * percent / 100).round().clamp(min=1) - 1
    quantiles = joined.gather(-1, place.to(torch.int64)).squeeze(-1).nan_to_num(0.0)
    own = _served(q)
    return quantiles.reshape(tuple(blocks.counts(own.rows(batches[0].shape), own.block)))


def _rows(q: Quantizer, batches: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    """The numbers of change(x) of all batches, (blocks, numbers); NaN where a block has none."""
    own = _served(q)
    rows: list[Tensor] = []
    for x in batches:
        changed = change(x.to(torch.float32)).clamp(-LARGEST, LARGEST)
        cut, dims = blocks.split(changed.reshape(own.rows(x.shape)), own.block, fill=math.nan)
        kept = [d for d in range(cut.dim()) if d not in dims]
        blocks_as_rows = cut.permute(*kept, *dims).flatten(len(kept))
        rows.append(blocks_as_rows.reshape(-1, blocks_as_rows.shape[-1]))
    return torch.cat(rows, -1)


def _known(x: Tensor) -> Tensor:
    return x.to(torch.float32).nan_to_num(0.0, LARGEST, -LARGEST)


def _served(q: Quantizer) -> Quantizer:
    """A quantizer with the blocks that the scale which a caller gives to q serves."""
    return q if q.scale.outer_block is None else replace(q, block=q.scale.outer_block, scale=Amax())


def _from_range(q: Quantizer, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """What q's rule finds for a tensor whose blocks have this range."""
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
        raise ValueError(f"{name}: batches must hold one tensor or more, got none; {_ONE_BY_ONE}")
    for x in batches:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: batches must be floating-point tensors, got {spelling.shown(x)}; {_ONE_BY_ONE}")
    if len(devices := {str(x.device) for x in batches}) > 1:
        raise ValueError(f"{name}: batches must be on one device, got {', '.join(sorted(devices))}; move them to one")
    memory.check(batches)
    own = _served(q)
    if len({tuple(blocks.counts(own.rows(x.shape), own.block)) for x in batches}) > 1:
        shapes = [tuple(x.shape) for x in batches]
        raise ValueError(
            f"{name}: batches must cut into the same number of blocks of {own.block}, got shapes {shapes}; give "
            "batches of one shape"
        )
