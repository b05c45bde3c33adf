"""Biases of integer products: check that sums can represent them, and enlarge the weight's scale if they cannot.

An integer runtime adds a bias to the sum of products, in units of the input's scale times the weight's. If a channel's
weights are all (nearly) zero, this unit is tiny, and the bias may overflow int32. A larger weight scale makes the unit
larger and divides the weight's codes by the same factor. That is exact if the codes are zero or divisible by it, and
negligible if the channel's weights are far below a step of the result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hop.dispatch.operators import BIAS, MATRIX, of
from hop.export.rewrite.code_floats import Held
from hop.export.rewrite.program import value

MOST = {torch.int32: 2**31 - 1, torch.int64: 2**46}
"""The largest magnitude of a sum with its bias; for 16-bit codes, runtimes have at least 47 bits and a sign."""
_TOLERANCE = 2.0**-6  # most steps of the result by which a larger weight scale may change it


@dataclass(frozen=True)
class Channels:
    """The channels of a product with a constant weight and bias.

    codes: of the weight minus its zero points: a row of integers per channel.
    scales: of the weight, one per channel or one for all.
    bias: one value per channel; the largest if a channel has several.
    input_scale: of the input's codes; the smallest if there are several.
    reach: the largest distance of an input code from its zero point.
    most: the largest magnitude of a sum (`MOST`).
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    input_scale: float
    reach: int
    most: int

    def totals(self) -> Tensor:
        """The largest magnitude of each channel's sum with its bias, in units of the sum, float64."""
        units = self.input_scale * self.scales.to(torch.float64)
        products = self.codes.abs().sum(1, dtype=torch.int64) * self.reach
        return self.bias.to(torch.float64).abs() / units + products

    def fits(self) -> Tensor:
        """Whether the sum of each channel fits."""
        return (self.totals() <= self.most) & self.scales.isfinite()

    def check(self) -> None:
        """Raise ValueError, naming the channel, if a sum with its bias does not fit."""
        if not bool((fits := self.fits()).all()):
            raise ValueError(self.error_message(int((~fits).to(torch.int8).argmax())))

    def raised(self, step: float | None) -> "Channels":
        """The channels with scales multiplied by powers of two, and codes divided, where sums do not fit.

        `step` is the scale of the result, or None if unknown. Raises ValueError, naming the channel, if its codes do
        not allow it.
        """
        is_zero = self.scales == 0  # such weights are 0 with any scale
        start = replace(
            self,
            codes=torch.where(is_zero.reshape(-1, 1), 0, self.codes),
            scales=torch.where(is_zero, torch.finfo(torch.float32).tiny, self.scales),
        )
        excess = start.totals() / self.most
        excess = excess.amax().reshape(1) if self.scales.numel() == 1 else excess
        exponent = torch.log2(excess.clamp(min=1.0)).ceil()
        fits = start.scaled_by(exponent).fits()
        fits = fits.all() if self.scales.numel() == 1 else fits
        raised = start.scaled_by(torch.where(fits, exponent, exponent + 1))  # rounding codes up may need one more
        moved = (raised.weights() - start.weights()).abs().sum(1) * self.input_scale * self.reach
        is_wrong = ~(raised.fits() & (moved <= (0.0 if step is None else step * _TOLERANCE))) & ~(excess <= 1.0)
        if bool(is_wrong.any()):
            place = self.totals() if self.scales.numel() == 1 else is_wrong.to(torch.int8)
            raise ValueError(self.error_message(int(place.argmax())))
        return raised

    def scaled_by(self, exponent: Tensor) -> "Channels":
        """The channels with scales times 2^exponent and codes rounded to the nearest equivalent."""
        factor = torch.exp2(exponent)
        codes = (self.codes / factor.reshape(-1, 1)).round().to(self.codes.dtype)
        return replace(self, codes=codes, scales=(self.scales.to(torch.float64) * factor).to(torch.float32))

    def weights(self) -> Tensor:
        return self.codes * self.scales.to(torch.float64).reshape(-1, 1)

    def error_message(self, channel: int) -> str:
        """The error message for a channel whose bias does not fit."""
        scale = float(self.scales[channel if self.scales.numel() > 1 else 0])
        unit, bias = self.input_scale * scale, float(self.bias[channel])
        left = self.most - int(self.codes[channel].abs().sum(dtype=torch.int64)) * self.reach
        steps = abs(bias) / unit if unit else math.inf
        return (
            f"the bias {bias:.6g} of channel {channel} is {steps:.4g} units of its sum, and only {left} fit in "
            f"addition to its products; a unit is {unit:.4g}, the input's scale {self.input_scale:.6g} times the "
            f"weight's {scale:.6g}: quantize the channel's weight or the input with a larger scale, or use a bias of "
            f"{max(left, 0) * unit:.4g} at most"
        )


def channel_rows(codes: Tensor, dim: int) -> Tensor:
    """Codes as a matrix with a row per channel; channels are along `dim`."""
    return codes.movedim(dim, 0).reshape(codes.shape[dim], -1)


def with_larger_scale(
    node: Node, lhs: Held, rhs: Held, step: Any, known: Callable[[Any], Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """New codes and scales of a product's weight with which its sums can represent the bias.

    None if the present ones can, or if the values involved are not constant: no integer-only runtime supports scales or
    biases computed at run time. `step` is the scale of the result; `known` returns the constant value of a node or
    number. Raises ValueError if a channel's codes do not allow a larger scale.
    """
    roles, sizes = of(node.target), value(rhs.codes).shape
    bias = roles.find(BIAS, node.args)
    if not isinstance(bias, Node) or not value(bias).dtype.is_floating_point:
        return None
    dim = len(sizes) - 3 - roles.rhs_sums if roles.family is MATRIX else int(_is_transposed(node))
    count = sizes[dim]
    biases, scales, input_scale, zero, offset = (
        known(x) for x in (bias, rhs.given[0], lhs.given[0], _zero(rhs), _zero(lhs))
    )
    if biases is None or scales is None or input_scale is None or zero is None or offset is None:
        return None
    is_by_channel = list(rhs.quantizer.block) == [1 if d == dim else -1 for d in range(len(sizes))]
    if not (rhs.is_whole() or is_by_channel) or (biases.numel() % count and biases.numel() != 1):
        return None
    every = (biases.expand(count) if biases.numel() == 1 else biases).reshape(-1, count)
    format: Any = lhs.quantizer.format
    is_wide = max(format.bits, rhs.quantizer.format.bits) > 8
    channels = Channels(
        torch.full((count, 1), 2**rhs.quantizer.format.bits * math.prod(sizes) // count),  # upper bounds
        scales.reshape(count if is_by_channel else 1),
        every.gather(0, every.abs().argmax(0, keepdim=True))[0],
        float(input_scale.min()),
        int(max(format.high - offset.min(), offset.max() - format.low)),
        MOST[torch.int64 if is_wide else torch.int32],
    )
    if bool(channels.fits().all()) or (codes := known(rhs.codes)) is None:
        return None
    zero = zero.to(torch.int32).reshape(1 if zero.numel() == 1 else count, 1)
    channels = replace(channels, codes=channel_rows(codes, dim).to(torch.int32) - zero)
    if bool(channels.fits().all()):
        return None
    raised = channels.raised(None if (result_scale := known(step)) is None else float(result_scale.min()))
    shape = [count, *(n for d, n in enumerate(sizes) if d != dim)]
    new = (raised.codes + zero).to(codes.dtype).reshape(shape).movedim(0, dim).contiguous()
    return new, raised.scales.to(scales.dtype).reshape(scales.shape)


def _zero(held: Held) -> Any:
    return held.given[1] if len(held.given) > 1 else held.quantizer.format.zero


def _is_transposed(node: Node) -> bool:
    """Whether a convolution is transposed, so that its weight has channels in the second dimension."""
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    return bool(named.get("transposed", "transpose" in node.target._schema.name))  # type: ignore[union-attr]


def integer_slopes(slopes: Tensor) -> tuple[Tensor, float]:
    """The slopes of a prelu as int8 codes, and their scale. Raises ValueError unless they are finite."""
    if not bool(slopes.isfinite().all()):
        raise ValueError("its slopes are not all finite")
    scale = float(slopes.abs().amax().to(torch.float32) / 127) or 1.0
    return (slopes.to(torch.float64) / scale).round().clamp(-127, 127).to(torch.int8), scale
