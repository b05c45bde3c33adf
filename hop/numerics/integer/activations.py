"""Piecewise activations of codes, as in TFLite's reference kernels.

Sources: TFLite, kernels/activations.cc (HardSwishPrepare, LeakyReluPrepare, PreluPrepare) and
kernels/internal/reference/hard_swish.h, leaky_relu.h (QuantizeLeakyRelu) and prelu.h (BroadcastPrelu4DSlow).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics import fixed_point as fp
from hop.numerics.integer import families
from hop.numerics.integer.convention import Codes, IntegerFunction, Units
from hop.numerics.requantization import FixedPoint, fixed_point, floor_quotient, power_of_two

_aten = torch.ops.aten
_RULE = FixedPoint(rounding="gemmlowp", multiplier="float32")
_LOW, _HIGH = -(2**15), 2**15 - 1


@dataclass(frozen=True, eq=False, repr=False)
class TfliteLeakyRelu(IntegerFunction):
    """x, or x times a number below 0, by TFLite's LEAKY_RELU: each side has a multiplier, and is rounded twice."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16)

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _aten.leaky_relu.default

    def compute(self, x: Tensor, units: Units, codes: Codes, slope: float = 0.01) -> Tensor:
        """The codes of leaky_relu(x, slope)."""
        scale, out = units.scales(x, torch.float32)
        zero, out_zero = units.zeros(x, torch.int64)
        n = x.to(torch.int64) - zero
        above, below = (_RULE.steps(n, scale, torch.full_like(scale, s), out) for s in (1.0, abs(slope)))
        return torch.where(n >= 0, above, -below if slope < 0 else below) + out_zero


@dataclass(frozen=True, eq=False, repr=False)
class TflitePrelu(families.OfTwo):
    """x, or x times the slope of its channel below 0, by TFLite's PRELU; x and slopes are codes of one scale each."""

    operators = (_aten.prelu.default,)

    def combined(self, x: Tensor, units: Units, other: families.Second) -> Tensor:
        scale, slope, out = units.scales(x, torch.float32, other.scale)
        zero, slope_zero, out_zero = units.zeros(x, torch.int64, other.zero_point)
        n = x.to(torch.int64) - zero
        product = n * (other.codes.to(torch.int64) - slope_zero)
        above, below = _RULE.steps(n, scale, torch.ones_like(scale), out), _RULE.steps(product, scale, slope, out)
        return torch.where(n >= 0, above, below) + out_zero


@dataclass(frozen=True, eq=False, repr=False)
class TfliteHardSwish(IntegerFunction):
    """x · min(max(x + 3, 0), 6) / 6 in 16 bits, by TFLite's HARD_SWISH.

    x, times 128, is multiplied by its scale over the output's, and by a share from 0 to 1: x over 3, saturated. The
    output's scale must be above 1/128 of that of x.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8)

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _aten.hardswish.default

    def compute(self, x: Tensor, units: Units, codes: Codes) -> Tensor:
        """The codes of hardswish(x)."""
        scale, out = units.scales(x, torch.float32)
        zero, out_zero = units.zeros(x, torch.int64)
        fine = (x.to(torch.int64) - zero) * 128
        fine_scale = scale * (1.0 / 128.0)
        mantissa, shift = _of_16_bits(fine_scale / out)
        value = _high_product(fine, mantissa)
        mantissa, share_shift = _of_16_bits(fine_scale / torch.full_like(scale, 3.0 / 32768.0))
        up, right = share_shift.clamp(0, 31), (-share_shift).clamp(0, 31)
        share = (fine * power_of_two((up - 1).clamp(min=0))).clamp(_LOW, _HIGH)
        share = _high_product(share, mantissa)
        share = (share * torch.where(up > 0, 2, 1)).clamp(_LOW, _HIGH)
        share = floor_quotient(fp.shifted_right(share, right) + 2**15, 2)
        product = torch.div(share * value, 2**15, rounding_mode="trunc").clamp(max=_HIGH)
        return fp.shifted_right(product, (-shift).clamp(0, 31)) + out_zero


def _of_16_bits(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 multiplier as a mantissa of 15 bits and a shift: TFLite's DownScaleInt32ToInt16Multiplier."""
    mantissa, shift = fixed_point(multiplier.to(torch.float64))
    return floor_quotient(mantissa + 2**15, 2**16).clamp(max=_HIGH), shift


def _high_product(a: Tensor, b: Tensor) -> Tensor:
    """a · b / 2^15 of int16 to nearest, ties up."""
    return floor_quotient(a * b + 2**14, 2**15).clamp(max=_HIGH)
