"""Requantization: how hop.scaled goes from an exact integer sum to the codes of its output.

With the sum n of the products of codes, each less its zero point, the scales s_lhs and s_rhs of the operands, and the
scale s and zero point z of the output,

    codes = clamp(round(n · s_lhs · s_rhs / s) + z, low, high)

and what differs between runtimes is how the quotient is computed and rounded. A convention is a frozen value, a field
of hop.scale_rules.Static:

    Division          in float32, by the scale, as quantize does after dequantize; ties to even
    Reciprocal        in float32, by the reciprocal of the scale, as PyTorch's own quantize operators do; ties to even
    FloatMultiplier   in float32, by one multiplier M = s_lhs · s_rhs / s; ties to even
    FixedPoint        in integers, by a mantissa of 31 bits and a shift; five ways to round
    DoubleMultiplier  in float64, by one multiplier; ties away from zero
    WideFixedPoint    in integers, by a mantissa of 15 bits and a shift, of sums of 64 bits

`low` and `high` are the range of a fused activation in real numbers, (0, None) for relu; they are quantized as any
number is, and clamp the codes.

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
    "Convention",
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
_TWICE = {"gemmlowp": "away", "ruy": "tflite"}  # and how the second time rounds ties
MULTIPLIERS = ("float64", "float32_product", "float32")
_INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, eq=False, repr=False)
class Convention(Value):
    """How hop.scaled finds the codes of an output, of products (Requantization) or of other functions
    (hop.integer_functions); what all share is the range of a fused activation."""

    low: float | None = None
    high: float | None = None

    exact: ClassVar[bool] = True  # whether it takes the sum itself, and not the float that it stands for

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, spelling.real(value, f"{type(self).__name__}: {name}"))
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"{type(self).__name__}: low must not be above high, got {self.low} and {self.high}; swap them"
            )

    def bounded(self, y: Tensor) -> Tensor:
        """y within the range of the activation that is fused into it."""
        return y if self.low is None and self.high is None else y.clamp(self.low, self.high)

    def clamp(self, codes: Tensor, scale: Tensor, zero_point: Tensor | int, format: Integer) -> Tensor:
        """`codes` brought into the range of the format and of the activation."""
        codes = codes.clamp(format.low, format.high)
        for bound, limit in ((self.low, torch.maximum), (self.high, torch.minimum)):
            if bound is not None:
                step = (torch.full_like(scale, bound) / scale).round() + zero_point
                codes = limit(codes, step.clamp(format.low, format.high).to(codes.dtype))
        return codes


@dataclass(frozen=True, eq=False, repr=False)
class Requantization(Convention):
    """What the conventions of products share: from the sum and its scales to codes."""

    def codes(
        self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor, zero_point: Tensor | int, format: Integer
    ) -> Tensor:
        """The codes of the sum `total`, int32; scales and zero point in shapes that broadcast with it."""
        steps = self.steps(total, lhs, rhs, scale)
        return self.clamp(steps + zero_point, scale, zero_point, format).to(format.dtype)

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        """round(total · lhs · rhs / scale), in an integer-valued tensor that holds any result and a zero point."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Division(Requantization):
    """round(y / scale), y the result in float32: what quantize gives for the result of the operator."""

    exact = False


@dataclass(frozen=True, eq=False, repr=False)
class Reciprocal(Requantization):
    """round(y · (1 / scale)), y the result in float32, the reciprocal rounded to float32. A quantizer that requantizes
    so quantizes so, too."""

    exact = False


@dataclass(frozen=True, eq=False, repr=False)
class FloatMultiplier(Requantization):
    """round(float32(total) · M), M = (s_lhs · s_rhs) / scale, each operation rounded to float32; ties to even."""

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        # Beyond 2^30 all codes are clamped, and float32 holds larger ones less well than a zero point beside them.
        steps = (total.to(torch.float32) * ((lhs * rhs) / scale)).round().clamp(-(2.0**30), 2.0**30)
        return torch.where(steps == steps, steps, 0.0).to(torch.int32)


@dataclass(frozen=True, eq=False, repr=False)
class FixedPoint(Requantization):
    """total · M, M = mantissa · 2^(shift - 31) with a mantissa of 31 bits, 2^30 up to 2^31 - 1.

    The mantissa and the shift are those of M = (s_lhs · s_rhs) / scale in float64, to the nearest, ties away from zero;
    a shift below -31 makes M 0, and one above 30 the largest M with a shift of 30.

    rounding is one of

        "gemmlowp"   twice: total · 2^shift · mantissa / 2^31 to the nearest, ties up, and the quotient by 2^-shift, if
                     the shift is negative, to the nearest, ties away from zero; total · 2^shift saturates. TFLite's
                     default too
        "tflite"     once, ties up: TFLite where it is built with TFLITE_SINGLE_ROUNDING
        "away"       once, ties away from zero
        "even"       once, ties to even
        "ruy"        as "gemmlowp", and ties up the second time, too: the library ruy, which multiplies in LiteRT's
                     optimized kernels

    multiplier says in which dtype M is found: "float64"; "float32_product", s_lhs · s_rhs in float32 and the quotient
    in float64, as TFLite does for a fully connected layer with one scale; or "float32", as TFLite does for a product of
    two tensors, element by element.
    """

    rounding: str = "away"
    multiplier: str = "float64"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"FixedPoint: rounding must be one of {ROUNDINGS}, got {shown(self.rounding)}; take one of them"
            )
        if self.multiplier not in MULTIPLIERS:
            raise ValueError(
                f"FixedPoint: multiplier must be one of {MULTIPLIERS}, got {shown(self.multiplier)}; take one of them"
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
        """M, in float64."""
        wide = torch.float64
        if self.multiplier == "float32":
            return (lhs * rhs / scale).to(wide)
        product = (lhs * rhs).to(wide) if self.multiplier == "float32_product" else lhs.to(wide) * rhs.to(wide)
        return product / scale.to(wide)


@dataclass(frozen=True, eq=False, repr=False)
class DoubleMultiplier(Requantization):
    """round(float64(total) · M), M = (s_lhs · s_rhs) / scale in float64; ties away from zero. LiteRT's fully connected
    layers of activations of 16 bits."""

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        wide = torch.float64
        y = total.to(wide) * (lhs.to(wide) * rhs.to(wide) / scale.to(wide))
        y = torch.where(y == y, y, 0.0).clamp(-(2.0**30), 2.0**30)  # beyond which all codes are clamped
        down = y.trunc()
        up = (y - down).abs() >= 0.5  # exactly, where y + 0.5 may be rounded
        return (down + torch.where(up, y.sign(), 0.0)).to(torch.int64)


@dataclass(frozen=True, eq=False, repr=False)
class WideFixedPoint(Requantization):
    """total · M of a sum of 64 bits, M = mantissa · 2^(shift - 15) with a mantissa of 15 bits, once, ties up: TFLite's
    activations of 16 bits. |total| is below 2^47.

    The mantissa is that of FixedPoint, (31 bits + 2^15) / 2^16 rounded down, 2^15 - 1 at most; the shift is its, too.
    Source: TFLite, kernels/internal/common.cc, MultiplyByQuantizedMultiplier of int64.
    """

    def steps(self, total: Tensor, lhs: Tensor, rhs: Tensor, scale: Tensor) -> Tensor:
        mantissa, shift = fixed_point(lhs.to(torch.float64) * rhs.to(torch.float64) / scale.to(torch.float64))
        reduced = torch.where(mantissa < 0x7FFF0000, floor_quotient(mantissa + 2**15, 2**16), 2**15 - 1)
        return nearest(total.to(torch.int64) * reduced, power_of_two(15 - shift), "tflite")


GEMMLOWP = FixedPoint(rounding="gemmlowp")
TFLITE = FixedPoint(rounding="tflite")


def fixed_point(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """The mantissa (2^30 to 2^31 - 1, or 0) and the shift, int64, of positive numbers, float64, which they are as
    mantissa · 2^(shift - 31).

    Read from the bits of the number; in a decomposition, found by a logarithm, which every runtime has, and products
    with powers of two, which are exact: where a runtime rounds the logarithm across an integer, the rest says so."""
    if not is_lowering():
        bits = multiplier.view(torch.int64)
        mantissa = ((bits & (2**52 - 1)) + 2**52 + 2**21) >> 22
        shift = ((bits >> 52) & 2047) - 1022
    else:
        low, high = -_MANTISSA_BITS - 3, 33  # what is beyond is 0, or the largest
        near = torch.where(multiplier > 2.0**low, multiplier, 2.0**low).clamp(max=2.0**high)  # NaN is not
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
    """2^exponent, for exponents of 0 to `most`, int64. Of a table that is no longer, bounds of sums are the nearer."""
    return lookup([2.0**i for i in range(most + 1)], exponent).to(torch.int64)


def floor_quotient(x: Tensor, by: Tensor | int) -> Tensor:
    return torch.div(x, by, rounding_mode="floor")


def _nearest_product(n: Tensor, mantissa: Tensor, bits: Tensor, ties: str) -> Tensor:
    """n · mantissa / 2^bits to the nearest, where the product takes more than 64 bits: |n| below 2^54, a mantissa of 31
    bits. It is n's upper part times the mantissa, and a rest below 2^24, of which only whether it is 0 counts."""
    upper = floor_quotient(n, 2**24)
    lower = (n - upper * 2**24) * mantissa
    high = upper * mantissa + floor_quotient(lower, 2**24)
    rest = (lower.remainder(2**24) != 0).to(torch.int64)
    # One bit below holds the rest: it lies off a tie, and does not reach the next number.
    long = nearest(high * 2 + rest, power_of_two((bits - 23).clamp(min=0)), ties)
    short = nearest(n.clamp(-(2**31), 2**31) * mantissa, power_of_two(bits), ties)  # n beyond is beyond all codes
    return torch.where(bits > 24, long, short)


def nearest(x: Tensor, by: Tensor, ties: str) -> Tensor:
    """x / by to the nearest, `by` a power of two."""
    down = floor_quotient(x, by)
    twice = (x - down * by) * 2
    if ties == "tflite":
        up = twice >= by
    elif ties == "away":
        up = (twice > by) | ((twice == by) & (x >= 0))
    else:
        up = (twice > by) | ((twice == by) & (down % 2 != 0))
    return torch.where(by == 1, x, torch.where(up, down + 1, down))
