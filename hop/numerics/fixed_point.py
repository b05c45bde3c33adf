"""Fixed-point numbers as in gemmlowp: int64 tensors with the raw int32 values.

A number with i integer bits is raw · 2^(i - 31). Products are rounded to nearest, ties up; quotients by powers of two
to nearest, ties away from zero.

Source: gemmlowp, fixedpoint/fixedpoint.h: SaturatingRoundingDoublingHighMul, RoundingDivideByPOT,
exp_on_negative_values, one_over_one_plus_x_for_x_in_0_1. CountLeadingZeros and
log_x_for_x_greater_than_or_equal_to_1 are those of TFLite, kernels/internal/common.h.
"""

import torch
from torch import Tensor

from hop.numerics.requantization import floor_quotient, nearest, power_of_two

INT32_MAX = 2**31 - 1
ONE_THIRD, EXP_EIGHTH = 715827883, 1895147668  # 1 / 3 and exp(-1 / 8), no integer bits
EXPONENTIALS = {  # exp(-2^k), no integer bits
    -2: 1672461947,
    -1: 1302514674,
    0: 790015084,
    1: 290630308,
    2: 39332535,
    3: 720401,
    4: 242,
}
# two integer bits: initial value of Newton's division
FORTY_EIGHT_17THS, MINUS_THIRTY_TWO_17THS = 1515870810, -1010580540


def high_product(a: Tensor, b: Tensor | int) -> Tensor:
    """a · b / 2^31 to nearest, ties up; the only product that overflows int32 saturates."""
    return floor_quotient(a * b + 2**30, 2**31).clamp(max=INT32_MAX)


def shifted_right(x: Tensor, bits: Tensor | int) -> Tensor:
    """x / 2^bits to nearest, ties away from zero."""
    by = power_of_two(bits) if isinstance(bits, Tensor) else torch.full_like(x, 2**bits)
    return nearest(x, by, "away")


def bit_length(x: Tensor) -> Tensor:
    """The least n with x < 2^n, for x from 0 to 2^62: 32 minus the leading zeros of a 32-bit number."""
    n = torch.zeros_like(x)
    for step in (32, 16, 8, 4, 2, 1):
        large = x >= 2**step
        x = torch.where(large, floor_quotient(x, 2**step), x)
        n = torch.where(large, n + step, n)
    return n + (x > 0).to(torch.int64)


def exp_of_negative(x: Tensor) -> Tensor:
    """exp(x) without integer bits, for x from -32 to 0 with five integer bits."""
    quarter = 2**24
    rest = x.remainder(quarter) - quarter  # from -1/4 to below 0
    result = _exp_from_minus_a_quarter(rest * 32)
    whole = rest - x
    for power, factor in EXPONENTIALS.items():
        has = floor_quotient(whole, 2 ** (26 + power)).remainder(2) != 0
        result = torch.where(has, high_product(result, factor), result)
    return torch.where(x == 0, INT32_MAX, result)


def _exp_from_minus_a_quarter(x: Tensor) -> Tensor:
    """Taylor polynomial of degree 4 around -1/8; no integer bits."""
    x = x + 2**28
    x2 = high_product(x, x)
    x3, x4 = high_product(x2, x), high_product(x2, x2)
    upper = shifted_right(high_product(shifted_right(x4, 2) + x3, ONE_THIRD) + x2, 1)
    return EXP_EIGHTH + high_product(x + upper, EXP_EIGHTH)


def reciprocal_of_sum(x: Tensor) -> Tensor:
    """1 / (1 + x) for x from 0 to 1, both without integer bits: three Newton steps with two integer bits."""
    half = floor_quotient(x + 2**31, 2)
    y = FORTY_EIGHT_17THS + high_product(half, MINUS_THIRTY_TWO_17THS)
    for _ in range(3):
        rest = 2**29 - high_product(half, y)
        y = y + (high_product(y, rest) * 4).clamp(-(2**31), INT32_MAX)
    return (y * 2).clamp(max=INT32_MAX)


LOG_2, SQRT_HALF, FOURTH_ROOT_HALF = 1488522236, 1518500250, 1805811301  # log 2, 2^-1/2, 2^-1/4; no integer bits
# Coefficients of the rational function, with r = 2^1/4: 11/240 r, 1/20 r, 2/r - r, 1/4 r; no integer bits
_NUMERATOR, _SQUARE, _CONSTANT, _SLOPE = 117049297, 127690142, 1057819769, 638450708


def log_above_one(x: Tensor) -> Tensor:
    """log(x) with five integer bits, for x from 1 on with twelve: x = r · 2^k with r near 2^-1/4, which k · log 2 and
    a rational function of r give.
    """
    zeros = 32 - bit_length(x)
    small = high_product(x * power_of_two((zeros - 1).clamp(min=0), 31), SQRT_HALF)
    halves = high_product(x, SQRT_HALF)
    room = 31 - bit_length(halves)
    r = torch.minimum((small * 2).clamp(max=INT32_MAX), (x * power_of_two(room.clamp(min=0), 31)).clamp(max=INT32_MAX))
    power = torch.maximum((12 - zeros) * 2**25 + 2**23, (12 - room) * 2**25 - 2**23)
    p, q = floor_quotient(r + FOURTH_ROOT_HALF + 1, 2), (r - FOURTH_ROOT_HALF) * 2
    square = high_product(q, q)
    numerator = high_product(q, r) + high_product(high_product(q, square), _NUMERATOR)
    denominator = high_product(p, _CONSTANT + q + high_product(square, _SQUARE)) + high_product(q, _SLOPE)
    quotient = high_product(shifted_right(numerator, 6), reciprocal_of_sum(denominator))
    return ((high_product(power, LOG_2) + quotient) * 2).clamp(-(2**31), INT32_MAX)
