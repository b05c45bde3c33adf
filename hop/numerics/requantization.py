"""Requantization: how hop.scaled converts an exact integer sum to codes of its output.

With the sum n of products of codes minus zero points, the operands' scales s_lhs and s_rhs, and the output's scale s
and zero point z,

    codes = clamp(round(n · s_lhs · s_rhs / s) + z, low, high)

Runtimes differ in how they compute and round the quotient. A convention is a frozen value, a field of
hop.scale_rules.Static:

    Division          in float32, by the scale, as quantize after dequantize; ties to even
    Reciprocal        in float32, by the reciprocal of the scale, as PyTorch's quantize operators; ties to even
    FloatMultiplier   in float32, by one multiplier M = s_lhs · s_rhs / s; ties to even
    FixedPoint        in integers, by a mantissa of 31 bits and a shift; five rounding modes
    DoubleMultiplier  in float64, by one multiplier; ties away from zero
    WideFixedPoint    in integers, by a mantissa of 15 bits and a shift, for 64-bit sums

`low` and `high` are the range of a fused activation in real values, (0, None) for relu; they are quantized like any
value, and clamp the codes.

Sources: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", and gemmlowp's fixed-point routines for FixedPoint; QNNPACK and XNNPACK for FloatMultiplier.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat.export import is_lowering
from hop.numerics import spelling
from hop.numerics.formats import Integer
from hop.numerics.spelling import Value, shown
from hop.numerics.tables import lookup

__all__ = [
    "GEMMLOWP",
    "TFLITE",
    "Division",
    "DoubleMultiplier",
    "FixedPoint",
    "FloatMultiplier",
    "Reciprocal",
    "Requantization",
    "WideFixedPoint",
]

_MANTISSA_BITS = 31
ROUNDINGS = ("gemmlowp", "tflite", "away", "even", "ruy")
_TWICE = {"gemmlowp": "away", "ruy": "tflite"}  # rounds a second time, with this rule for ties
MULTIPLIERS = ("float64", "float32_product", "float32")
_INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, eq=False, repr=False)
class Convention(Value):
    """The arithmetic by which hop.scaled computes an output's codes.

    Subclasses are for products (Requantization) or other functions (hop.integer_functions). This base class has the
    range of a fused activation.
    """

    low: float | None = None
    high: float | None = None

    exact: ClassVar[bool] = True  # whether it is computed from the integer sum rather than from its float value

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, spelling.real(value, f"{type(self).__name__}: {name}"))
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"{type(self).__name__}: low must not be above high, got {self.low} and {self.high}; swap them"
            )

    def bounded(self, y: Tensor) -> Tensor:
        """y clamped to the range of the fused activation."""
        return y if self.low is None and self.high is None else y.clamp(self.low, self.high)

    def clamp(self, codes: Tensor, scale: Tensor, zero_point: Tensor | int, format: Integer) -> Tensor:
        """`codes` clamped to the range of the format and of the activation."""
        codes = codes.clamp(format.low, format.high)
        for bound, limit in ((self.low, torch.maximum), (self.high, torch.minimum)):
            if bound is not None:
                step = (torch.full_like(scale, bound) / scale).round() + zero_point
                codes = limit(codes, step.clamp(format.low, format.high).to(codes.dtype))
        return codes


@dataclass(frozen=True, eq=False, repr=False)
class Requantization(Convention):
    """Base class of conventions for products: from the sum and its scales to codes."""

    def codes(
        self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor, zero_point: Tensor | int, format: Integer
    ) -> Tensor:
        """The codes of the int32 sum `total`; scales and zero point have shapes that broadcast with it."""
        steps = self.steps(total, lhs, rhs, scale)
        return self.clamp(steps + zero_point, scale, zero_point, format).to(format.dtype)

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        """round(total · lhs · rhs / scale), in an integer-valued tensor that can represent the result plus a zero
        point.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Division(Requantization):
    """round(y / scale), with y the float32 result: equal to quantizing the operator's float result."""

    exact = False


@dataclass(frozen=True, eq=False, repr=False)
class Reciprocal(Requantization):
    """round(y · (1 / scale)), with y the float32 result and the reciprocal rounded to float32.

    A quantizer with this convention quantizes floats in the same way.
    """

    exact = False


@dataclass(frozen=True, eq=False, repr=False)
class FloatMultiplier(Requantization):
    """round(float32(total) · M), M = (s_lhs · s_rhs) / scale, each operation rounded to float32; ties to even."""

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        # Beyond 2^30 all codes are clamped, and float32 is too coarse to add a zero point.
        steps = (total.to(torch.float32) * ((lhs * rhs) / scale)).round().clamp(-(2.0**30), 2.0**30)
        return torch.where(steps == steps, steps, 0.0).to(torch.int32)


@dataclass(frozen=True, eq=False, repr=False)
class FixedPoint(Requantization):
    """total · M, M = mantissa · 2^(shift - 31) with a mantissa of 31 bits, 2^30 up to 2^31 - 1.

    Mantissa and shift are those of M = (s_lhs · s_rhs) / scale in float64, rounded to nearest, ties away from zero. A
    shift below -31 makes M 0, and one above 30 makes it the largest M with a shift of 30.

    `rounding` is one of

        "gemmlowp"   twice: total · 2^shift · mantissa / 2^31 to nearest, ties up, then the quotient by 2^-shift, if
                     the shift is negative, to nearest, ties away from zero; total · 2^shift saturates. TFLite's default
        "tflite"     once, ties up: TFLite built with TFLITE_SINGLE_ROUNDING
        "away"       once, ties away from zero
        "even"       once, ties to even
        "ruy"        as "gemmlowp", with ties up the second time too: the library ruy, used by LiteRT's optimized
                     kernels

    `multiplier` is the dtype in which M is computed: "float64"; "float32_product", s_lhs · s_rhs in float32 and the
    quotient in float64, as in TFLite's fully connected layers with one scale; or "float32", as in TFLite's elementwise
    product of two tensors.
    """

    rounding: str = "away"
    multiplier: str = "float64"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"FixedPoint: rounding must be one of {ROUNDINGS}, got {shown(self.rounding)}; use one of them"
            )
        if self.multiplier not in MULTIPLIERS:
            raise ValueError(
                f"FixedPoint: multiplier must be one of {MULTIPLIERS}, got {shown(self.multiplier)}; use one of them"
            )

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        mantissa, shift = fixed_point(self.quotient(lhs, rhs, scale))
        n = total.to(torch.int64)
        if (ties := _TWICE.get(self.rounding)) is not None:
            left = (n * power_of_two(shift.clamp(min=0))).clamp(*_INT32)
            high = floor_quotient((left * mantissa + 2 ** (_MANTISSA_BITS - 1)), 2**_MANTISSA_BITS)
            high = high.clamp(*_INT32)
            return nearest(high, power_of_two((-shift).clamp(min=0)), ties)
        if total.dtype == torch.int64:
            return _nearest_product(n, mantissa, _MANTISSA_BITS - shift, self.rounding)
        return nearest(n * mantissa, power_of_two(_MANTISSA_BITS - shift), self.rounding)

    def quotient(self, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        """The multiplier M, in float64."""
        wide = torch.float64
        if self.multiplier == "float32":
            return (lhs * rhs / scale).to(wide)
        product = (lhs * rhs).to(wide) if self.multiplier == "float32_product" else lhs.to(wide) * rhs.to(wide)
        return product / scale.to(wide)


@dataclass(frozen=True, eq=False, repr=False)
class DoubleMultiplier(Requantization):
    """round(float64(total) · M), M = (s_lhs · s_rhs) / scale in float64; ties away from zero.

    Used by LiteRT's fully connected layers with 16-bit activations.
    """

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        wide = torch.float64
        y = total.to(wide) * (lhs.to(wide) * rhs.to(wide) / scale.to(wide))
        y = torch.where(y == y, y, 0.0).clamp(-(2.0**30), 2.0**30)  # all codes are clamped beyond this range
        down = y.trunc()
        up = (y - down).abs() >= 0.5  # exact, whereas y + 0.5 may be rounded
        return (down + torch.where(up, y.sign(), 0.0)).to(torch.int64)


@dataclass(frozen=True, eq=False, repr=False)
class WideFixedPoint(Requantization):
    """total · M for a 64-bit sum, M = mantissa · 2^(shift - 15) with a mantissa of 15 bits, rounded once, ties up.

    Used by TFLite for 16-bit activations; |total| is below 2^47. The mantissa is that of FixedPoint, (31 bits + 2^15) /
    2^16 rounded down, at most 2^15 - 1; the shift is the same.

    Source: TFLite, kernels/internal/common.cc, MultiplyByQuantizedMultiplier of int64.
    """

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        mantissa, shift = fixed_point(lhs.to(torch.float64) * rhs.to(torch.float64) / scale.to(torch.float64))
        reduced = torch.where(mantissa < 0x7FFF0000, floor_quotient(mantissa + 2**15, 2**16), 2**15 - 1)
        return nearest(total.to(torch.int64) * reduced, power_of_two(15 - shift), "tflite")


GEMMLOWP = FixedPoint(rounding="gemmlowp")
TFLITE = FixedPoint(rounding="tflite")


def fixed_point(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """The mantissa (2^30 to 2^31 - 1, or 0) and shift of positive float64 numbers mantissa · 2^(shift - 31), as int64.

    Read from the bits of the number. In a decomposition, computed with a logarithm, which every runtime has, and exact
    products with powers of two; the remainder corrects a logarithm that was rounded across an integer.
    """
    if not is_lowering():
        bits = multiplier.view(torch.int64)
        mantissa = ((bits & (2**52 - 1)) + 2**52 + 2**21) >> 22
        shift = ((bits >> 52) & 2047) - 1022
    else:
        low, high = -_MANTISSA_BITS - 3, 33  # beyond this range M is 0, or the largest
        near = torch.where(multiplier > 2.0**low, multiplier, 2.0**low).clamp(max=2.0**high)  # maps NaN to 2^low, too
        shift = torch.log2(near).floor().to(torch.int64).clamp(low, high)
        rest = near * lookup([2.0**-i for i in range(low, high + 1)], shift - low)
        shift = shift + (rest >= 2).to(torch.int64) - (rest < 1).to(torch.int64) + 1
        rest = torch.where(rest >= 2, rest * 0.5, torch.where(rest < 1, rest * 2, rest))
        mantissa = (rest * 2.0 ** (_MANTISSA_BITS - 1) + 0.5).floor().to(torch.int64)
    full = mantissa == 2**_MANTISSA_BITS
    mantissa, shift = torch.where(full, 2 ** (_MANTISSA_BITS - 1), mantissa), torch.where(full, shift + 1, shift)
    known = (multiplier > 0) & (multiplier < math.inf) & (shift >= -_MANTISSA_BITS)
    mantissa = torch.where(known, torch.where(shift > 30, 2**_MANTISSA_BITS - 1, mantissa), 0)
    return mantissa, torch.where(known, shift.clamp(max=30), 0)


def power_of_two(exponent: Tensor, most: int = 62) -> Tensor:
    """2^exponent as int64, for exponents from 0 to `most`. A shorter table gives tighter bounds of sums."""
    return lookup([2.0**i for i in range(most + 1)], exponent).to(torch.int64)


def floor_quotient(x: Tensor, by: Tensor | int) -> Tensor:
    return torch.div(x, by, rounding_mode="floor")


def _nearest_product(n: Tensor, mantissa: Tensor, bits: Tensor, ties: str) -> Tensor:
    """n · mantissa / 2^bits to nearest, where the product exceeds 64 bits: |n| below 2^54, a mantissa of 31 bits.

    Computed from n's upper part times the mantissa, and a remainder below 2^24, of which only matters whether it is 0.
    """
    upper = floor_quotient(n, 2**24)
    lower = (n - upper * 2**24) * mantissa
    high = upper * mantissa + floor_quotient(lower, 2**24)
    rest = (lower.remainder(2**24) != 0).to(torch.int64)
    # One bit below represents the remainder: it breaks ties, and does not reach the next integer.
    long = nearest(high * 2 + rest, power_of_two((bits - 23).clamp(min=0)), ties)
    short = nearest(n.clamp(-(2**31), 2**31) * mantissa, power_of_two(bits), ties)  # a larger n is beyond all codes
    return torch.where(bits > 24, long, short)


def nearest(x: Tensor, by: Tensor, ties: str) -> Tensor:
    """x / by to nearest, for `by` a power of two."""
    down = floor_quotient(x, by)
    twice = (x - down * by) * 2
    if ties == "tflite":
        up = twice >= by
    elif ties == "away":
        up = (twice > by) | ((twice == by) & (x >= 0))
    else:
        up = (twice > by) | ((twice == by) & (down % 2 != 0))
    return torch.where(by == 1, x, torch.where(up, down + 1, down))
