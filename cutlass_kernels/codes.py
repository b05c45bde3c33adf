"""Codes of elements in the CuTe DSL: from numbers to codes and back, each operation rounded as the CPU rounds it.

Numbers are lists of Float32. Codes are words of 32 bits, of four codes, or eight of 4 bits, the first in the low bits.

    words = encode(E4M3, y)                             y in units of the format, to the nearest
    encode_integers(S8, x, by, zero, amax, True, words) of x / by.scale
    x = decode(E4M3, words)

A quotient by the scale of a block costs a few products: see Divisor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint16, Uint32

from cutlass_kernels.elements import E2M1, E4M3, Format
from cutlass_kernels.epilogue import add, clamped, div, fma, mul, ptx, select

WHOLE = 12582912.0  # 1.5 · 2^23: adding it rounds to an integer, which the low bits then are
WHOLE_BITS = 0x4B400000
ABOVE, BELOW = 1 + 2.0**-22, 1 - 2.0**-22  # further from 1 than three roundings
INFINITY, MAGNITUDE = 0x7F800000, 0x7FFFFFFF


# ---- bits


def bits(x: Any) -> Any:
    return x.bitcast(Uint32)


def number(x: Any) -> Any:
    return Uint32(x).bitcast(Float32)


def prmt(a: Any, b: Any, selector: int) -> Any:
    """Four of the eight bytes of (a, b), the lowest nibble of the selector naming the lowest byte."""
    return ptx(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", Uint32, a, b)


def larger(a: Any, b: Any) -> Any:
    """The larger number; of a number and NaN the number."""
    return ptx("max.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def smaller(a: Any, b: Any) -> Any:
    return ptx("min.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def larger_or_nan(x: Any, y: Any) -> Any:
    """The larger number; NaN where one is."""
    return ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, x, y)


def larger_bits(a: Any, b: Any) -> Any:
    """The larger of numbers that are not negative; NaN counts most."""
    return number(cutlass.max(bits(a), bits(b)))


def magnitude(x: Any) -> Any:
    return ptx("abs.f32 {$w0}, {$r0};", Float32, x)


def reciprocal(x: Any) -> Any:
    """1 / x, correctly rounded."""
    return ptx("rcp.rn.f32 {$w0}, {$r0};", Float32, x)


def is_nan(x: Any) -> Any:
    return (bits(x) & Uint32(MAGNITUDE)) > Uint32(INFINITY)


def joined(parts: Sequence[Any]) -> Any:
    """Four numbers of which the low bytes matter, as one word."""
    return prmt(prmt(parts[0], parts[1], 0x0040), prmt(parts[2], parts[3], 0x0040), 0x5410)


def paired(word: Any, other: Any) -> Any:
    """Two words of four codes of 4 bits in a byte each, as one of eight."""
    halves = [w | (w >> 4) for w in (word & Uint32(0x0F0F0F0F), other & Uint32(0x0F0F0F0F))]
    return prmt(halves[0], halves[1], 0x6420)


# ---- memory's numbers


def widened(kind: str, words: Sequence[Any]) -> list[Any]:
    """The numbers of words of "f32", "bf16" or "f16", two of which share a word."""
    if kind == "f32":
        return [number(w) for w in words]
    if kind == "bf16":
        return [number(part) for w in words for part in (w << 16, w & Uint32(0xFFFF0000))]
    halves = [part for w in words for part in (w & Uint32(0xFFFF), w >> 16)]
    return [ptx("cvt.f32.f16 {$w0}, {$r0};", Float32, h.to(Uint16)) for h in halves]


_NARROW = {
    "bf16": "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
    "f16": "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};",
}


def narrowed(kind: str, values: Sequence[Any]) -> list[Any]:
    """The inverse, rounded to the nearest."""
    if kind == "f32":
        return [bits(v) for v in values]
    pairs = zip(values[::2], values[1::2], strict=True)
    return [ptx(_NARROW[kind], Uint32, high, low) for low, high in pairs]


# ---- floats

_CONVERT = {
    "e4m3": "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
    "e5m2": "cvt.rn.satfinite.e5m2x2.f32 {$w0}, {$r0}, {$r1};",
}


def encode(f: Format, y: Sequence[Any]) -> list[Any]:
    """The codes of floats y, to the nearest, ties to even, saturated; of each NaN the same."""
    if f == E2M1:
        return [_eights([_e2m1(v) for v in y[i : i + 8]]) for i in range(0, len(y), 8)]
    words = []
    for i in range(0, len(y), 4):
        low, high = (ptx(_CONVERT[f.name], Uint16, y[j + 1], y[j]).to(Uint32) for j in (i, i + 2))
        words.append(low | (high << 16))
    return words


def _e2m1(y: Any) -> Any:
    """The code of y; of NaN the largest number's. Adding 2^22 times its power of two to a magnitude leaves in the low
    bits how many gaps it has."""
    m = smaller(magnitude(y), Float32(6.0))
    power = cutlass.max(bits(m) & Uint32(INFINITY), Uint32(0x3F800000))
    steps = bits(fma(number(power), Float32(2.0**22), m)) - power - Uint32((22 << 23) + 254)
    return (power >> 22) + steps + ((bits(y) >> 28) & Uint32(8))


def _eights(codes: Sequence[Any]) -> Any:
    word = codes[0]
    for i, code in enumerate(codes[1:], 1):
        word = word + (code << (4 * i))
    return word


def with_noise(f: Format, y: Sequence[Any], noise: Sequence[Any]) -> list[Any]:
    """Encode with stochastic rounding, from a 24-bit integer for each element."""
    codes = [_noisy(f, v, r) for v, r in zip(y, noise, strict=True)]
    if f == E2M1:
        return [_eights(codes[i : i + 8]) for i in range(0, len(codes), 8)]
    return words_of(f, codes)


def whole_steps(steps: Any, noise: Any) -> Any:
    """How many whole steps a number of them is after stochastic rounding (hop.numerics.format.rounds_up)."""
    whole = _truncated(steps)
    part = _truncated(mul(add(steps, -whole.to(Float32)), Float32(2.0**24)))
    return whole + ((part + (noise & Uint32(0xFFFFFF))) >> 24)


def _truncated(x: Any) -> Any:
    return ptx("cvt.rzi.u32.f32 {$w0}, {$r0};", Uint32, x)


_LEAST = {"e4m3": -6, "e5m2": -14, "e2m1": 0}  # exponents of the least normal numbers
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7}


def _noisy(f: Format, y: Any, noise: Any) -> Any:
    shift, least = 23 - f.mantissa_bits, (_LEAST[f.name] + 127) << 23
    m = smaller(magnitude(y), Float32(f.top))
    power = cutlass.max(bits(m) & Uint32(INFINITY), Uint32(least))
    per_gap = number(Uint32((254 + f.mantissa_bits) << 23) - power)
    code = (whole_steps(mul(m, per_gap), noise) + ((power - Uint32(least)) >> shift)) | (
        (bits(y) >> (32 - f.bits)) & Uint32(1 << (f.bits - 1))
    )
    return select(is_nan(y), Uint32(_NAN[f.name]), code)


# ---- integers


class Divisor(NamedTuple):
    """The scale of a block, and what makes quotients by it cheap.

    Rounding x / scale to an integer needs no division: with a and b a little above and below 1 / scale, the rounded
    quotient lies between the rounded x · a and x · b. Where those differ, near a tie, it is divided after all, by two
    corrections of a first guess: exactly rounded for quotients of 2^-20 and more (Markstein 1990).

    `usual` says whether the scale is far from float32's ends, so that all this holds.
    """

    scale: Any
    inverse: Any
    usual: Any


def divisor(scale: Any) -> Divisor:
    size = magnitude(scale)
    usual = (size > Float32(2.0**-100)) & (size < Float32(2.0**100))
    return Divisor(scale, reciprocal(scale), usual)


def quotient(x: Any, by: Divisor) -> Any:
    """x / scale, correctly rounded, of finite x by a usual scale."""
    minus = -by.scale
    guess = mul(x, by.inverse)
    guess = fma(fma(guess, minus, x), by.inverse, guess)
    return fma(fma(guess, minus, x), by.inverse, guess)


def fits(by: Divisor, amax: Any) -> Any:
    """Whether numbers up to `amax` may be divided so, and their codes fit into 16 bits; not where it is NaN."""
    return by.usual & (mul(amax, magnitude(by.inverse)) < Float32(32000.0))


@cute.jit
def divide(x: Any, by: Any, amax: Any, y: Any) -> None:
    """y = x / by.scale, correctly rounded where that shows in a code; of numbers up to `amax`, or NaN if one is."""
    if by.usual & (mul(amax, magnitude(by.inverse)) < Float32(2.0**100)):
        for i in cutlass.range_constexpr(len(x)):
            sign = bits(x[i]) & Uint32(0x80000000)  # which the corrections take from -0.0
            y[i] = number(bits(quotient(x[i], by)) | sign)
    else:
        for i in cutlass.range_constexpr(len(x)):
            y[i] = div(x[i], by.scale)


@cute.jit
def encode_integers(
    f: cutlass.Constexpr, x: Any, by: Any, zero: Any, amax: Any, bounded: cutlass.Constexpr, words: Any
) -> None:
    """The codes of x / by.scale + zero, to the nearest, ties of the quotient to even; NaN has that of 0.

    x is a fragment of numbers up to `amax`, or NaN if one of them is, `words` that of the codes. zero is a Float32.
    `bounded` says whether codes may lie beyond f's."""
    whole = add(zero, Float32(WHOLE))
    fours = cute.make_rmem_tensor(cute.size(x) // 4, Uint32)
    if fits(by, amax):
        above, below = mul(by.inverse, Float32(ABOVE)), mul(by.inverse, Float32(BELOW))
        for i in cutlass.range_constexpr(cute.size(x) // 4):
            own = [x[4 * i + j] for j in range(4)]
            found = [bits(fma(value, above, whole)) for value in own]
            others = [bits(fma(value, below, whole)) for value in own]
            fours[i] = _four(f, found, bounded)
            if _differ(found, others):
                raised = bits(whole) - Uint32(WHOLE_BITS)
                exact = [bits(add(quotient(value, by), Float32(WHOLE))) + raised for value in own]
                fours[i] = _four(f, exact, bounded)
    else:
        for i in cutlass.range_constexpr(cute.size(x) // 4):
            fours[i] = joined([_exactly(f, x[4 * i + j], by.scale, zero) for j in range(4)])
    for i, word in enumerate(_together(f, [fours[i] for i in range(cute.size(x) // 4)])):
        words[i] = word


_ALSO = "{ .reg .b32 own; xor.b32 own, {$r0}, {$r1}; or.b32 {$w0}, own, {$r2}; }"


def _differ(found: Sequence[Any], others: Sequence[Any]) -> Any:
    differences = found[0] ^ others[0]
    for a, b in zip(found[1:], others[1:], strict=True):
        differences = ptx(_ALSO, Uint32, a, b, differences)
    return differences != Uint32(0)


def _exactly(f: Format, x: Any, scale: Any, zero: Any) -> Any:
    y = div(x, scale)
    y = select(is_nan(y), Float32(0.0), y)
    low, high = (add(Float32(float(end)), -zero) for end in (f.low, f.high))
    return bits(add(clamped(y, low, high), Float32(WHOLE))) + bits(add(zero, Float32(WHOLE))) - Uint32(WHOLE_BITS)


def words_of(f: Format, found: Sequence[Any]) -> list[Any]:
    """Words of codes that are in the low bits of `found`."""
    return _together(f, [joined(found[i : i + 4]) for i in range(0, len(found), 4)])


def _together(f: Format, fours: Sequence[Any]) -> list[Any]:
    """Words of codes, from four of them in the bytes of a word."""
    return list(fours) if f.bits == 8 else [paired(*fours[i : i + 2]) for i in range(0, len(fours), 2)]


def _four(f: Format, found: Sequence[Any], bounded: bool) -> Any:
    """Four codes in the low 16 bits of numbers, in the bytes of a word; with `bounded` brought between f's ends."""
    if not bounded:
        return joined(found)
    low, high = ((end & 0xFFFF) * 0x10001 for end in (f.low, f.high))
    pairs = [prmt(found[i], found[i + 1], 0x5410) for i in (0, 2)]
    for which, end in (("max", low), ("min", high)):
        text = f"{{ .reg .b32 end; mov.b32 end, {end:#x}; {which}.s16x2 {{$w0}}, {{$r0}}, end; }}"
        pairs = [ptx(text, Uint32, p) for p in pairs]
    return prmt(pairs[0], pairs[1], 0x6420)


def integer_with_noise(f: Format, y: Any, noise: Any, zero: Any) -> Any:
    """The code of the quotient y, rounded stochastically."""
    size = select(is_nan(y), Float32(0.0), smaller(magnitude(y), Float32(2.0**20)))
    steps = whole_steps(size, noise).to(Float32)
    steps = select(y < Float32(0.0), -steps, steps)
    low, high = (add(Float32(float(end)), -zero) for end in (f.low, f.high))
    return bits(add(clamped(steps, low, high), Float32(WHOLE))) + bits(add(zero, Float32(WHOLE))) - Uint32(WHOLE_BITS)


# ---- from codes to numbers


def decode(f: Format, words: Sequence[Any], zero: Any = None) -> list[Any]:
    """The numbers of the codes; of integers less `zero`, a Float32, or less the code of 0."""
    if f.is_integer:
        return _decode_integers(f, words, zero)
    if f == E2M1:
        return [_decode_e2m1(w >> (4 * i)) for w in words for i in range(8)]
    return [v for w in words for half in (w, w >> 16) for v in _decode_pair(f, half.to(Uint16))]


def _decode_e2m1(code: Any) -> Any:
    """Decode through the bits of float32 and correct the exponent; exact."""
    small = number(((code & Uint32(7)) << 22) | ((code & Uint32(8)) << 28))
    return mul(small, Float32(2.0**126))


def _decode_pair(f: Format, pair: Any) -> list[Any]:
    halves = ptx(f"cvt.rn.f16x2.{f.name}x2 {{$w0}}, {{$r0}};", Uint32, pair)
    return widened("f16", [halves])


def _decode_integers(f: Format, words: Sequence[Any], zero: Any) -> list[Any]:
    """Decode a nonnegative integer through the bits of 2^23."""
    raised = 0 if f.low == 0 else 1 << (f.bits - 1)  # makes codes of signed integers count up from 0
    less = add(Float32(float(f.zero)) if zero is None else zero, Float32(2.0**23 + raised))
    found = []
    for w in words:
        up = w ^ Uint32(raised * (0x01010101 if f.bits == 8 else 0x11111111))
        for i in range(f.per_word):
            if f.bits == 8:
                whole = prmt(up, Uint32(0x4B000000), 0x7650 | i)
            else:
                whole = ((up >> (4 * i)) & Uint32(15)) | Uint32(0x4B000000)
            found.append(add(number(whole), -less))
    return found


def decode_e4m3(code: Any) -> Any:
    """The number of one code, of 32 bits."""
    return _decode_pair(E4M3, code.to(Uint16))[0]


def encode_e4m3(y: Any) -> Any:
    """The code of one number, in 32 bits; of NaN 0x7f."""
    return ptx(_CONVERT["e4m3"], Uint16, Float32(0.0), y).to(Uint32)
