"""Integer functions once more, in Python's own integers, one number at a time; and floats of numpy where a runtime
prepares.

Written from what TFLite, TensorFlow's legalization to TOSA, gemmlowp and I-BERT publish; hop is not asked how.
"""

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import numpy as np

f32, f64 = np.float32, np.float64
MOST, LEAST = 2**31 - 1, -(2**31)


def within(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


# ---- gemmlowp's int32


def c_divide(a: int, b: int) -> int:
    """C's quotient, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def doubling_high_product(a: int, b: int) -> int:
    if a == b == LEAST:
        return MOST
    product = a * b
    return c_divide(product + (1 << 30 if product >= 0 else 1 - (1 << 30)), 1 << 31)


def divide_by_power(x: int, exponent: int) -> int:
    mask = (1 << exponent) - 1
    return (x >> exponent) + ((x & mask) > (mask >> 1) + (x < 0))


def quantize_multiplier(real: float) -> tuple[int, int]:
    fraction, shift = math.frexp(real)
    fixed = math.floor(Fraction(fraction) * 2**31 + Fraction(1, 2))
    if fixed == 2**31:
        fixed, shift = fixed // 2, shift + 1
    return fixed, shift


def exp_on_negative(a: int) -> int:
    """Q5.26 to Q0.31."""
    if a == 0:
        return MOST
    quarter = 1 << 24
    fraction = (a & (quarter - 1)) - quarter
    x = (fraction << 5) + (1 << 28)
    x2 = doubling_high_product(x, x)
    x3 = doubling_high_product(x2, x)
    x4 = doubling_high_product(x2, x2)
    third = doubling_high_product(divide_by_power(x4, 2) + x3, round(2**31 / 3))
    start = 1895147668
    result = start + doubling_high_product(start, x + divide_by_power(third + x2, 1))
    remainder = fraction - a
    for exponent in range(-2, 5):
        if remainder & (1 << (26 + exponent)):
            result = doubling_high_product(result, math.floor(math.exp(-(2.0**exponent)) * 2**31 + 0.5))
    return result


def one_over_one_plus(a: int) -> int:
    half = (a + MOST + 1) // 2
    x = 1515870810 + doubling_high_product(half, -1010580540)
    for _ in range(3):
        rest = (1 << 29) - doubling_high_product(half, x)
        x += within(doubling_high_product(x, rest) << 2, LEAST, MOST)
    return within(x << 1, LEAST, MOST)


# ---- softmax of TFLite


def exp_table(scale: float, beta: float) -> list[int]:
    """exp of -n codes, Q0.31, n from 0 to 255."""
    fixed, shift = quantize_multiplier(min(max(float(f32(beta)) * float(f32(scale)) * 2.0**26, 1.0), 2.0**31 - 1.0))
    radius = math.floor(31 * 2**26 / 2**shift)
    return [exp_on_negative(doubling_high_product(-n << shift, fixed)) if n <= radius else 0 for n in range(256)]


def tflite_8(
    row: Sequence[int], scale: float, beta: float, low: int, bits: int, table: list[int] | None = None
) -> list[int]:
    table = table or exp_table(scale, beta)
    exp = [table[max(row) - x] for x in row]
    total = sum(divide_by_power(e, 12) for e in exp)
    zeros = 32 - total.bit_length()
    over = 12 - zeros
    reciprocal = one_over_one_plus((total << zeros) - 2**31)
    shares = [divide_by_power(doubling_high_product(reciprocal, e), over + 31 - bits) for e in exp]
    return [within(s + low, low, low + 2**bits - 1) for s in shares]


def round_away(x: float) -> float:
    return math.copysign(math.floor(abs(x)) + (abs(x) - math.floor(abs(x)) >= 0.5), x) if math.isfinite(x) else x


def lut_513(
    function: Callable, scale: float, zero: int, out_scale: float, out_zero: int, dtype: type = f32
) -> list[int]:
    scale, out_scale = dtype(scale), dtype(out_scale)
    with np.errstate(all="ignore"):
        low, high = scale * dtype(-32768 - zero), scale * dtype(32767 - zero)
        inverse = dtype(65536) / (out_scale * dtype(32767 - out_zero) - out_scale * dtype(-32768 - out_zero))
        step = (high - low) / dtype(512)
        table = []
        for i in range(513):
            if i == 512:
                table.append(round_away(float(function(high) * inverse)))
                continue
            value = dtype(round_away(float(function(low + dtype(i) * step) * inverse)))
            middle = dtype(round_away(float(function(low + dtype(i) * step + step / dtype(2)) * inverse)))
            line = (function(low + dtype(i + 1) * step) * inverse + value) / dtype(2)
            bias = round_away(float((dtype(round_away(float(line))) - middle) / dtype(2)))
            table.append(float(value - dtype(bias)))
    return [int(within(t, -32768, 32767)) if t == t else 0 for t in table]


def lut_lookup(table: Sequence[int], code: int) -> int:
    at, rest = 256 + (code >> 7), code & 127
    slope = table[at + 1] - table[at]
    return int16(table[at] + ((int16(slope) * rest + 64) >> 7))


def int16(x: int) -> int:
    return (x + 32768) % 65536 - 32768


EXP_16 = lut_513(lambda x: f64(math.exp(x)), 10.0 / 65535, 32767, 2.0 / 65535, 0, f64)
RECIPROCAL_16 = lut_513(lambda x: 1 / (1 + x), 1.0 / 65535, -32768, 2.0 / 65535, 0, f64)


def tflite_16(row: Sequence[int], scale: float, beta: float) -> list[int]:
    fixed, shift = quantize_multiplier(float(f32(scale) * f32(beta)) / (10.0 / 65535.0))
    most, exp = max(row), []
    for x in row:
        left = within((x - most) << max(shift, 0), LEAST, MOST)
        scaled = divide_by_power(doubling_high_product(left, fixed), max(-shift, 0)) if shift >= -31 else 0
        exp.append(lut_lookup(EXP_16, within(scaled + 32767, -32768, 32767)))
    total = sum(exp)
    zeros = 32 - total.bit_length()
    place = (((total << (zeros - 1)) + (1 << 13)) >> 14) - (1 << 15) - (1 << 16)
    reciprocal = lut_lookup(RECIPROCAL_16, within(place, -32768, 32767))
    right = 31 - zeros
    return [within((e * reciprocal + (1 << (right - 1))) >> right, 0, 32767) for e in exp]


# ---- softmax of TOSA


def tosa_multiply(a: int, b: int, shift: int) -> int:
    return (a * b + (1 << (shift - 1))) >> shift


def tosa_shift(x: int, by: int) -> int:
    return (x >> by) + ((x >> (by - 1)) & 1)


def tosa_8(row: Sequence[int], scale: float, beta: float, table: list[int] | None = None) -> list[int]:
    table = table or exp_table(scale, beta)
    groups = [[(table[max(row) - x] >> g) & 255 for g in (24, 16, 8, 0)] for x in row]
    looked = [[g << 7 for g in group] for group in groups]  # TABLE gives seven bits for interpolation
    exp = [(a << 17) + (b << 9) + (c << 1) + tosa_shift(d, 7) for a, b, c, d in looked]
    total = sum(tosa_shift(e, 12) for e in exp)
    zeros = 32 - total.bit_length()
    half = total << (zeros - 1)
    x = tosa_multiply(half, -1010580540, 31) + 1515870810
    for _ in range(3):
        rest = (1 << 29) - tosa_multiply(x, half, 31)
        x += tosa_multiply(x, rest, 31) * 4
    shares = [tosa_shift(tosa_multiply(e, x, 30), 12 + 31 - 8 - zeros) for e in exp]
    return [within(s - 128, -128, 127) for s in shares]


# ---- sums, means and pools of TOSA


def tosa_scale(value: int, multiplier: int, shift: int) -> int:
    """apply_scale_32, which rounds once."""
    return (value * multiplier + (1 << (shift - 1))) >> shift


def tosa_multiplier(real: float) -> tuple[int, int]:
    """The multiplier and shift of RESCALE for a real number."""
    mantissa, shift = quantize_multiplier(real)
    return mantissa, 31 - shift


def tosa_add(a: int, b: int, scales: Sequence[float], room: int) -> int:
    """Codes less their zero points; the scales of both and of the result."""
    own, its, out = scales
    twice = 2 * max(own, its)
    terms = [tosa_scale(n, *tosa_multiplier(s / twice * 2**room)) for n, s in ((a, own), (b, its))]
    return tosa_scale(sum(terms), *tosa_multiplier(twice / (out * 2**room)))


def tosa_average(values: Sequence[int]) -> int:
    """AVG_POOL2D of codes less their zero points: reciprocal_scale and apply_scale_32."""
    k = (len(values) - 1).bit_length()
    return tosa_scale(sum(values), (((1 << 30) + 1) << k) // len(values), 30 + k)


# ---- softmax of I-BERT


def frexp_31(x: float) -> tuple[int, int]:
    """A mantissa of 31 bits and how far a product with it is shifted to the right."""
    mantissa, exponent = math.frexp(x)
    return int((Decimal(mantissa) * 2**31).quantize(Decimal(1), rounding=ROUND_HALF_UP)), 31 - exponent


def rescaled(x: int, multiplier: float) -> int:
    mantissa, right = frexp_31(multiplier)
    return round(Fraction(x * mantissa) / Fraction(2) ** right)


def ibert_8(row: Sequence[int], scale: float, exp_max: float, low: int) -> list[int]:
    s = max(float(f32(scale)), 2.0**-14)
    a, b, c = 0.35815147, 0.96963238 / 0.35815147, 1.0 / 0.35815147
    ln2, b_int, c_int = math.floor(-0.6931 / s), math.floor(b / s), math.floor(c / (s * s))
    exp = []
    for x in row:
        x = max(x - max(row), 30 * ln2)
        q = x // ln2
        r = x - ln2 * q
        whole = max((r * (r + b_int) + c_int) * 2 ** (30 - q), 0)
        exp.append(within(rescaled(whole, a * s * s / 2**30 / (exp_max / 32767)), -32768, 32767))
    factor = 2**32 // max(sum(exp), 1)
    return [within(e * factor // 2**24 + low, low, low + 255) for e in exp]


# ---- functions by tables


def rounded(function: Callable[[float], float]) -> Callable:
    def result(x: f32) -> f32:
        try:
            return f32(function(float(x)))
        except OverflowError:
            return f32(math.inf)

    return result


_exp, _tanh, _erfc, _expm1 = (rounded(f) for f in (math.exp, math.tanh, math.erfc, math.expm1))
FUNCTIONS: dict[str, Callable] = {
    "elu": lambda x: _expm1(x) if x < 0 else x,
    "exp": _exp,
    "gelu": lambda x: f32(0.5) * x * _erfc(x * f32(-math.sqrt(0.5))),
    "gelu_tanh": lambda x: (
        f32(0.5) * x * (f32(1) + _tanh(f32(math.sqrt(2 / math.pi)) * (x + f32(0.044715) * x * x * x)))
    ),
    "sigmoid": lambda x: f32(1) / (f32(1) + _exp(-x)),
    "silu": lambda x: x * (f32(1) / (f32(1) + _exp(-x))),
    "tanh": _tanh,
}


def table_256(name: str, scale: float, zero: int, out_scale: float, out_zero: int, low: int) -> list[int]:
    """Of the codes from low to low + 255, codes of the same range."""
    result = []
    with np.errstate(all="ignore"):
        for code in range(low, low + 256):
            y = FUNCTIONS[name](f32(scale) * f32(code - zero)) * (f32(1) / f32(out_scale))
            y = float(f32(round_away(float(y))) + f32(out_zero))
            result.append(low if y != y else int(within(y, low, low + 255)))
    return result


def table_512(name: str, scale: float, zero: int, out_scale: float, out_zero: int) -> list[int]:
    return lut_513(FUNCTIONS[name], scale, zero, out_scale, out_zero)


# fmt: off
ABOVE = {  # places of TFLite's table with one more than the nearest
    4, 8, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 27, 28, 29, 30, 31, 33, 34, 35, 37, 39, 40, 41, 43, 44, 45,
    46, 49, 50, 54, 62, 63, 64, 66, 82, 86, 93, 100, 103, 112, 116, 135
}
# fmt: on
SIGMOIDS = [min(round(65536 / (1 + math.exp(-i / 24))) + (i in ABOVE), 65535) for i in range(255)] + [65535]
SIGMOIDS_CRC = 3092212404  # of the published table, as little-endian uint16


def sigmoid_16(name: str, code: int, scale: float) -> int:
    multiplier, shift = float(f32(scale)) * 4096.0 * 3.0, 0
    while multiplier <= 32767.0 / 2.0 and shift <= 30:
        multiplier, shift = multiplier * 2, shift + 1
    n = (code * int(multiplier) + (1 << (shift - 1) if shift else 0)) >> shift
    table = SIGMOIDS
    if name == "sigmoid":
        at, rest = abs(n) >> 9, abs(n) & 511
        y = 0x7FFF << 10 if at >= 255 else (table[at] << 9) + rest * (table[at + 1] - table[at])
        return (y + 512 if n >= 0 else (1 << 25) - y + 511) >> 10
    at, rest = abs(n) >> 8, abs(n) & 255
    y = 0xFFFF << 8 if at >= 255 else (table[at] << 8) + rest * (table[at + 1] - table[at])
    return (y - (1 << 23) + 128 if n >= 0 else -y + (1 << 23) + 127) >> 8


# ---- layer norm of I-BERT


def ibert_norm(
    row: Sequence[int],
    zero: int,
    weight: Sequence[float],
    bias: Sequence[float],
    out_scale: float,
    out_zero: int,
    low: int,
    high: int,
    shift: int = 0,
) -> list[int]:
    n = len(row)
    x = [v - zero for v in row]
    mean = round(Fraction(sum(x), n))
    y = [v - mean for v in x]
    deviation = max(math.isqrt(sum((v >> shift) ** 2 for v in y)), 1) << shift
    unit, result = math.sqrt(n) / 2**30, []
    for v, w, b in zip(y, weight, bias, strict=True):
        if w == 0:
            result.append(within(out_zero, low, high))
            continue
        v = (v * (2**31 // deviation)) >> 1
        v = within(v + int(within(math.floor(b / w / unit), LEAST, MOST)), LEAST, MOST)
        step = rescaled(v, abs(w) * unit / float(f32(out_scale)))
        result.append(within((step if w > 0 else -step) + out_zero, low, high))
    return result
