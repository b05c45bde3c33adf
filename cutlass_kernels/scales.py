"""Scales of blocks in the CuTe DSL: from what is known of a block to what is stored and what elements are scaled by.

Each rule is computed as the CPU computes it, operation by operation; hop's page of quantizers says what they mean.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint8, Uint32

from cutlass_kernels.codes import (
    INFINITY,
    MAGNITUDE,
    WHOLE,
    bits,
    decode_e4m3,
    encode_e4m3,
    is_nan,
    larger,
    number,
    reciprocal,
    smaller,
)
from cutlass_kernels.elements import LARGEST, Format
from cutlass_kernels.epilogue import add, clamped, div, mul, select

MOST = {"f32": LARGEST, "bf16": 3.3895313892515355e38, "f16": 65504.0}  # the largest number of memory's dtypes


class Known(NamedTuple):
    """Of a block: the largest magnitude, or the largest number above 0; the magnitude of the least number below 0; and
    what blocks have in common: under "two_level" an Outer, else the least amax."""

    high: Any
    low: Any
    common: Any


class Scale(NamedTuple):
    """What is stored of a block, as Float32 or Uint8, and as code of zero; by what elements are divided or multiplied,
    and the number of the code of zero."""

    stored: Any
    second: Any
    by: Any
    zero: Any


class Outer(NamedTuple):
    """What all blocks under one amax share: amax of a block times `scaled` is its scale; the reciprocal of S."""

    scaled: Any
    inverse: Any


def divides(rule: str) -> bool:
    """Whether elements are divided by a scale, and not multiplied with what is its inverse."""
    return rule in ("amax", "minmax", "given")


def find(v: Any, known: Known) -> Scale:
    """The scale of a block by the rule of a variant (cutlass_kernels.quantizing)."""
    return _RULES[v.rule](v, known)


def outer_of(f: Format, amax: Any) -> Outer:
    """S = top / amax in range, 1 where amax or S is 0."""
    top = Float32(448.0 * f.top)
    bounded = div(top, amax)
    bounded = select(bounded > Float32(LARGEST), Float32(LARGEST), bounded)
    factor = select((amax == Float32(0.0)) | (bounded == Float32(0.0)), Float32(1.0), bounded)
    return Outer(mul(factor, Float32(1 / f.top)), reciprocal(factor))


def _amax(v: Any, known: Known) -> Scale:
    bounded = larger(known.high, known.common)
    scale = _nan_beyond(known.high, _no_zero(div(bounded, Float32(v.format.top))))
    return Scale(scale, None, scale, Float32(float(v.format.zero)))


def _minmax(v: Any, known: Known) -> Scale:
    f = v.format
    high, low = known.high, known.low
    scale = _no_zero(div(smaller(add(high, low), Float32(LARGEST)), Float32(float(f.high - f.low))))
    scale = _nan_beyond(high, _nan_beyond(low, scale))
    steps = clamped(div(-low, scale), Float32(float(f.low - f.high - 1)), Float32(0.0))
    steps = add(add(steps, Float32(WHOLE)), Float32(-WHOLE))
    zero = clamped(add(Float32(float(f.low)), -steps), Float32(float(f.low)), Float32(float(f.high)))
    zero = select(is_nan(scale), Float32(float(f.low)), zero)
    return Scale(scale, zero.to(Int32).to(Uint8), scale, zero)


def _current(v: Any, known: Known) -> Scale:
    bounded = larger(known.high, known.common)
    factor = div(Float32(v.format.top), bounded)
    most = MOST[v.memory] if v.most_of_dtype else LARGEST
    factor = select(factor > Float32(LARGEST), Float32(most), factor)
    factor = _nan_beyond(known.high, select(bounded == Float32(0.0), Float32(1.0), factor))
    if v.power_of_two:
        factor = floor_power(factor)
    return Scale(_nan_beyond(known.high, reciprocal(factor)), None, factor, None)


def floor_power(x: Any) -> Any:
    """The largest power of two, from 2^-128 to 2^127, that is at most x; NaN for NaN."""
    power = smaller(number(bits(x) & Uint32(INFINITY)), Float32(2.0**127))
    tiny = select(x < Float32(2.0**-127), Float32(2.0**-128), Float32(2.0**-127))
    return select(is_nan(x), x, select(x >= Float32(2.0**-126), power, tiny))


def _mx(v: Any, known: Known) -> Scale:
    if v.rounding == "rceil":
        code = encode_power(mul(known.high, Float32(1 / v.format.top)))
        return Scale(code.to(Uint8), None, inverse_power(code), None)
    code = _exponent(v, bits(known.high))
    by = select(code == Uint32(255), Float32(0.0), select(code > Uint32(1), inverse_power(code), Float32(2.0**126)))
    return Scale(code.to(Uint8), None, by, None)


def encode_power(x: Any) -> Any:
    """e8m0: x rounded up to a power of two, 0 for what is not above 0; as Uint32."""
    own = bits(x)
    m = own & Uint32(MAGNITUDE)
    exponent, rest = m >> 23, m & Uint32(0x7FFFFF)
    least = select(exponent == Uint32(0), Uint32(0x400000), Uint32(0))
    up = cutlass.min(select(rest > least, exponent + Uint32(1), exponent), Uint32(254))
    positive = select((own >> 31) != Uint32(0), Uint32(0), up)
    return select(m > Uint32(INFINITY), Uint32(255), positive)


def inverse_power(code: Any) -> Any:
    """1 over the power that a code of e8m0 is, exactly."""
    known = select(code == Uint32(254), Uint32(0x400000), (Uint32(254) - code) << 23)
    return number(select(code == Uint32(255), Uint32(0x7FC00000), known))


def decode_power(code: Any) -> Any:
    known = select(code == Uint32(0), Uint32(0x400000), code << 23)
    return number(select(code == Uint32(255), Uint32(0x7FC00000), known))


def _exponent(v: Any, amax: Any) -> Any:
    """The code for an amax by the roundings other than "rceil"; of NaN that of NaN."""
    rounded = amax
    if v.rounding == "ceil":
        rounded = select((amax & Uint32(0x7FFFFF)) != Uint32(0), amax + Uint32(1 << 23), amax)
    elif v.rounding == "even":
        rounded = amax + Uint32(1 << (22 - v.format.mantissa_bits))
    code = (rounded >> 23).to(Int32) - Int32(v.format.largest_power)
    return select(amax > Uint32(INFINITY), Uint32(255), cutlass.max(code, Int32(0)).to(Uint32))


def _two_level(v: Any, known: Known) -> Scale:
    code = encode_e4m3(mul(known.high, known.common.scaled))
    inverse = reciprocal(mul(decode_e4m3(code), known.common.inverse))
    return Scale(code.to(Uint8), None, smaller_or_nan(inverse, Float32(LARGEST)), None)


def smaller_or_nan(x: Any, most: Any) -> Any:
    return select(x > most, most, x)


def _nan_beyond(amax: Any, scale: Any) -> Any:
    """The scale of a block, NaN where its amax is NaN or infinite."""
    return select(amax <= Float32(LARGEST), scale, number(Uint32(0x7FC00000)))


def _no_zero(scale: Any) -> Any:
    return select(scale == Float32(0.0), Float32(1.0), scale)


_RULES = {"amax": _amax, "minmax": _minmax, "current": _current, "mx": _mx, "two_level": _two_level}
