"""Floating-point arithmetic and conversions with the one rounding that an instruction names."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray


def odd_sum(a: Array, b: Array) -> Array:
    """a + b of float64, rounded to odd: of the two neighbours of an inexact sum the one whose last bit is set.

    A second rounding to fewer bits cannot mistake it for a tie."""
    total, error = two_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (error != 0) & even, odd, total)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a · b + c of float32, rounded once; the product is exact in float64."""
    return odd_sum(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b of float64, and what its rounding left out."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def fma_of_doubles(a: Array, b: Array, c: Array) -> Array:
    """a · b + c of float64, rounded once (Boldo and Melquiond 2008): the product and its error, added with the last sum
    but one rounded to odd. Numbers of which these are not exact are added as fractions."""
    product, plain = a * b, a * b + c
    high_a, high_b = (x * (2.0**27 + 1) - (x * (2.0**27 + 1) - x) for x in (a, b))
    low_a, low_b = a - high_a, b - high_b
    error = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    first, first_error = two_sum(c, error)
    second, second_error = two_sum(product, first)
    found = second + odd_sum(second_error, first_error)
    sizes = np.abs(np.stack([a, b, product, c]))
    usual = ((sizes[:3] < 2.0**900) & ((sizes[:3] > 2.0**-900) | (sizes[:3] == 0))).all(0) & (sizes[3] < 2.0**900)
    usual &= (product != 0) | (a == 0) | (b == 0)
    odd = np.flatnonzero(~usual & np.isfinite(a) & np.isfinite(b) & np.isfinite(c))
    found = np.where(usual & (found != 0), found, plain)
    found = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, found)
    for i in odd:
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        found[i] = float(exact) if exact and abs(exact) < 2**1023 else plain[i]
    return found


def flush(x: Array) -> Array:
    """Subnormal float32 become zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def bf16(x: Array, mode: str = "rn") -> Array:
    """float32 -> the codes of bfloat16, to the nearest even or towards zero; NaN is 0x7fff."""
    bits = x.view(np.uint32)
    carry = ((bits >> 16) & 1) + np.uint32(0x7FFF) if mode == "rn" else np.uint32(0)
    return np.where(np.isnan(x), 0x7FFF, (bits + carry) >> 16).astype(np.uint16)


def from_bf16(codes: Array) -> Array:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def f16(x: Array) -> Array:
    """float32 -> the codes of float16, to the nearest even; NaN is 0x7fff."""
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def values(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> Array:
    """The float32 values of the 256 codes of an 8-bit format."""
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    if infinities:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code > 127, -value, value).astype(np.float32)


FLOAT8 = {"e4m3": values(4, 3, infinities=False), "e5m2": values(5, 2, infinities=True)}


def float8(x: Array, name: str) -> Array:
    """float32 -> the codes of e4m3 or e5m2: nearest even, and saturated to the largest finite; NaN is 0x7f."""
    table = FLOAT8[name][:128].astype(np.float64)
    finite = table[np.isfinite(table)]
    ties = (finite[1:] + finite[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    code = np.searchsorted(ties, size, side="left")
    tied = (code < len(ties)) & (ties[np.minimum(code, len(ties) - 1)] == size)
    code = np.where(tied & (code % 2 == 1), code + 1, code)
    return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def integer(x: Array, dtype: np.dtype, mode: str) -> Array:
    """float -> integer of `dtype`, saturated to its range; NaN is 0."""
    whole = ROUND[mode](x.astype(np.float64))
    limits = np.iinfo(dtype)
    inside = np.where(np.isnan(x) | (whole < limits.min) | (whole >= 2.0 ** (limits.bits - (limits.min < 0))), 0, whole)
    low, high = whole < limits.min, whole >= 2.0 ** (limits.bits - (limits.min < 0))
    return np.where(low, limits.min, np.where(high, limits.max, inside.astype(dtype))).astype(dtype)


def bf16_of_double(x: Array) -> Array:
    """float64 -> the codes of bfloat16, rounded once: to odd in float32, then to the nearest even."""
    near = x.astype(np.float32)
    inexact = np.isfinite(near) & (near != x) & ((near.view(np.uint32) & 1) == 0)
    odd = np.nextafter(near, np.where(x > near, np.float32(np.inf), np.float32(-np.inf)))
    return bf16(np.where(inexact, odd, near).astype(np.float32))
