"""Biases of products of integers: whether the integers of a sum hold them, and a larger scale of the weight where not.

An integer runtime adds a bias to the sum of products, in units of the input's scale times the weight's. Of a channel
whose weights are zero, or nearly, that unit is tiny, and int32 may not hold the bias. A larger scale makes the unit
larger; the weight's codes become smaller by the same factor, which changes nothing where they are zero or divisible by
it, and next to nothing where the channel's weights are far below a step of the result.
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
"""The most that a sum with its bias may reach; beside codes of 16 bits runtimes keep 47 bits and a sign, or more."""
_TOLERANCE = 2.0**-6  # steps of the result by which a larger scale of the weight may move it


@dataclass(frozen=True)
class Channels:
    """The channels of a product with a constant weight and bias.

    codes: of the weight, less its zero points: a row of integers for each channel.
    scales: of the weight, one for each channel, or one for all.
    bias: a number for each channel; the largest where a channel has several.
    input_scale: of the input's codes; the smallest where there are several.
    reach: the most that a code of the input is off its zero point.
    most: that the sum may reach (`MOST`).
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor
    input_scale: float
    reach: int
    most: int

    def totals(self) -> Tensor:
        """The most that the sum of each channel reaches with its bias, in units of the sum, float64."""
        units = self.input_scale * self.scales.to(torch.float64)
        products = self.codes.abs().sum(1, dtype=torch.int64) * self.reach
        return self.bias.to(torch.float64).abs() / units + products

    def fits(self) -> Tensor:
        """Whether the sum of each channel fits."""
        return (self.totals() <= self.most) & self.scales.isfinite()

    def check(self) -> None:
        """Raise ValueError, which names the channel, where a sum with its bias does not fit."""
        if not bool((fits := self.fits()).all()):
            raise ValueError(self.refusal(int((~fits).to(torch.int8).argmax())))

    def raised(self, step: float | None) -> "Channels":
        """With larger scales, by powers of two, and smaller codes where sums do not fit. `step` is the scale of the
        result, None if it is not known.

        Raises ValueError, which names a channel whose codes do not allow that.
        """
        is_zero = self.scales == 0  # such weights are 0 by any scale
        start = replace(
            self,
            codes=torch.where(is_zero.reshape(-1, 1), 0, self.codes),
            scales=torch.where(is_zero, torch.finfo(torch.float32).tiny, self.scales),
        )
        excess = start.totals() / self.most
        excess = excess.amax().reshape(1) if self.scales.numel() == 1 else excess
        exponent = torch.log2(excess.clamp(min=1.0)).ceil()
        fits = start.times(exponent).fits()
        fits = fits.all() if self.scales.numel() == 1 else fits
        raised = start.times(torch.where(fits, exponent, exponent + 1))  # as codes may have been rounded up
        moved = (raised.weights() - start.weights()).abs().sum(1) * self.input_scale * self.reach
        is_wrong = ~(raised.fits() & (moved <= (0.0 if step is None else step * _TOLERANCE))) & ~(excess <= 1.0)
        if bool(is_wrong.any()):
            place = self.totals() if self.scales.numel() == 1 else is_wrong.to(torch.int8)
            raise ValueError(self.refusal(int(place.argmax())))
        return raised

    def times(self, exponent: Tensor) -> "Channels":
        """With scales times 2^exponent, and codes as near as they come to the same numbers."""
        factor = torch.exp2(exponent)
        codes = (self.codes / factor.reshape(-1, 1)).round().to(self.codes.dtype)
        return replace(self, codes=codes, scales=(self.scales.to(torch.float64) * factor).to(torch.float32))

    def weights(self) -> Tensor:
        return self.codes * self.scales.to(torch.float64).reshape(-1, 1)

    def refusal(self, channel: int) -> str:
        """What to say of a channel whose bias does not fit."""
        scale = float(self.scales[channel if self.scales.numel() > 1 else 0])
        unit, bias = self.input_scale * scale, float(self.bias[channel])
        left = self.most - int(self.codes[channel].abs().sum(dtype=torch.int64)) * self.reach
        steps = abs(bias) / unit if unit else math.inf
        return (
            f"the bias {bias:.6g} of channel {channel} is {steps:.4g} units of its sum, and beside its products {left} "
            f"fit; a unit is {unit:.4g}, the input's scale {self.input_scale:.6g} times the weight's {scale:.6g}: "
            "quantize the channel's weight or the input by a larger scale, or take a bias of "
            f"{max(left, 0) * unit:.4g} at most"
        )


def rows_of(codes: Tensor, dim: int) -> Tensor:
    """Codes with a row for each channel, which are along `dim`."""
    return codes.movedim(dim, 0).reshape(codes.shape[dim], -1)


def with_larger_scale(
    node: Node, lhs: Held, rhs: Held, step: Any, known: Callable[[Any], Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Codes and scales of a product's weight by which its sums hold its bias; None where the present ones do, or no
    constants say it: an operator whose scale or bias is found while it runs is of no runtime of integers alone. `step`
    is the scale of the result; `known` gives what a node or a number of the program always has.

    Raises ValueError where the codes of a channel allow no such scale.
    """
    roles, sizes = of(node.target), value(rhs.codes).shape
    bias = roles.find(BIAS, node.args)
    if not isinstance(bias, Node) or not value(bias).dtype.is_floating_point:
        return None
    dim = len(sizes) - 3 - roles.rhs_sums if roles.family is MATRIX else int(_is_transposed(node))
    count = sizes[dim]
    numbers, scales, input_scale, zero, offset = (
        known(x) for x in (bias, rhs.given[0], lhs.given[0], _zero(rhs), _zero(lhs))
    )
    if numbers is None or scales is None or input_scale is None or zero is None or offset is None:
        return None
    is_by_channel = list(rhs.quantizer.block) == [1 if d == dim else -1 for d in range(len(sizes))]
    if not (rhs.is_whole() or is_by_channel) or (numbers.numel() % count and numbers.numel() != 1):
        return None
    every = (numbers.expand(count) if numbers.numel() == 1 else numbers).reshape(-1, count)
    format: Any = lhs.quantizer.format
    is_wide = max(format.bits, rhs.quantizer.format.bits) > 8
    channels = Channels(
        torch.full((count, 1), 2**rhs.quantizer.format.bits * math.prod(sizes) // count),  # at most
        scales.reshape(count if is_by_channel else 1),
        every.gather(0, every.abs().argmax(0, keepdim=True))[0],
        float(input_scale.min()),
        int(max(format.high - offset.min(), offset.max() - format.low)),
        MOST[torch.int64 if is_wide else torch.int32],
    )
    if bool(channels.fits().all()) or (codes := known(rhs.codes)) is None:
        return None
    zero = zero.to(torch.int32).reshape(1 if zero.numel() == 1 else count, 1)
    channels = replace(channels, codes=rows_of(codes, dim).to(torch.int32) - zero)
    if bool(channels.fits().all()):
        return None
    raised = channels.raised(None if (of_result := known(step)) is None else float(of_result.min()))
    shape = [count, *(n for d, n in enumerate(sizes) if d != dim)]
    new = (raised.codes + zero).to(codes.dtype).reshape(shape).movedim(0, dim).contiguous()
    return new, raised.scales.to(scales.dtype).reshape(scales.shape)


def _zero(held: Held) -> Any:
    return held.given[1] if len(held.given) > 1 else held.quantizer.format.zero


def _is_transposed(node: Node) -> bool:
    """Whether a convolution is transposed, so that the second dimension of its weight has the channels."""
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    return bool(named.get("transposed", "transpose" in node.target._schema.name))  # type: ignore[union-attr]
