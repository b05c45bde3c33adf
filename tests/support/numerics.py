"""Quantizers in numpy, block by block, each operation rounded to float32 as the rules specify.

Written from the rules of each format, and independent of the library: a quantizer is read for its fields alone.
Elements are those of ml_dtypes, and the nearest of a table in float64 where that has none.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hop.numerics.quantizer import Quantizer

f32 = np.float32
LARGEST = np.finfo(f32).max
FLOATS: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
MAX = {name: f32(ml_dtypes.finfo(kind).max) for name, kind in FLOATS.items()}
# Name: the least and the largest code, the code of 0 where no zero point says otherwise, bits, dtype of a code.
INTEGERS: dict[str, tuple[int, int, int, int, Any]] = {
    "int8": (-128, 127, 0, 8, np.int8),
    "uint8": (0, 255, 128, 8, np.uint8),
    "int4": (-8, 7, 0, 4, np.int8),
    "uint4": (0, 15, 8, 4, np.uint8),
    "ternary": (-1, 1, 0, 2, np.int8),
}


class Scaled(NamedTuple):
    """What a rule finds for a block: the stored scale, the zero point, and the elements in units of the format."""

    scale: Any
    y: np.ndarray
    zero_point: int | None = None


# ---- blocks


def sizes(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """The size of a block in each dimension, -1 for a whole one."""
    lead = -1 if block[0] == -1 else 1
    full = [lead] * (len(shape) - len(block)) + list(block)
    return full[len(full) - len(shape) :]


def grid(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """How many blocks each dimension has."""
    return [1 if b == -1 else math.ceil(n / b) for n, b in zip(shape, sizes(shape, block), strict=True)]


def blocks(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The index of each block and where its elements are."""
    for index in itertools.product(*(range(n) for n in grid(shape, block))):
        yield (
            index,
            tuple(
                slice(None) if b == -1 else slice(i * b, i * b + b)
                for i, b in zip(index, sizes(shape, block), strict=True)
            ),
        )


def amax(x: np.ndarray) -> Any:
    """The largest magnitude, of the elements that are not NaN."""
    return np.abs(x[~np.isnan(x)]).max(initial=f32(0))


def has_nan(x: np.ndarray, fmt: str) -> bool:
    """Whether the scale of a block is NaN as an element is, which no code of the format can be."""
    return bool(np.isnan(x).any()) and fmt not in ("e4m3", "e5m2")


# ---- scale rules: of one block


def by_amax(x: np.ndarray, fmt: str, floor: float) -> Scaled:
    largest = largest_of(fmt)
    scale = max(amax(x), f32(floor)) / largest
    if np.isinf(scale) or has_nan(x, fmt):
        scale = f32(np.nan)
    scale = f32(1) if scale == 0 else scale
    return Scaled(scale, x / scale)


def by_range(x: np.ndarray, fmt: str) -> Scaled:
    low, high, *_ = INTEGERS[fmt]
    if not np.isfinite(x).all():
        return Scaled(f32(np.nan), np.full_like(x, np.nan), low)
    below, above = x.min(initial=f32(0)), x.max(initial=f32(0))
    scale = min(above - below, LARGEST) / f32(high - low)
    scale = f32(1) if scale == 0 else scale
    zero_point = min(max(f32(low) - np.rint(below / scale), low), high)
    return Scaled(scale, x / scale, int(zero_point))


def by_mean(x: np.ndarray) -> Scaled:
    known = np.minimum(np.abs(x[~np.isnan(x)]), LARGEST)
    scale = f32(math.fsum(known.tolist()) / max(known.size, 1))
    scale = f32(1) if scale == 0 else scale
    return Scaled(scale, x / scale)


def by_current(x: np.ndarray, fmt: str, power_of_two: bool, eps: float, most: Any) -> Scaled:
    a = max(amax(x), f32(eps))
    factor = f32(1)
    if np.isinf(a) or has_nan(x, fmt):
        return Scaled(f32(np.nan), np.full_like(x, np.nan))
    if a != 0:
        factor = MAX[fmt] / a
        if np.isinf(factor):
            factor = f32(most)
    if power_of_two:
        factor = (factor.view(np.uint32) & np.uint32(0xFF800000)).view(f32)
    return Scaled(f32(1) / factor, x * factor)


def by_exponent(x: np.ndarray, fmt: str, given: Any = None, rounding: str = "rceil") -> Scaled:
    if given is None and rounding != "rceil":
        return by_power(x, fmt, rounding)
    if given is None:
        given = f32(np.nan) if has_nan(x, fmt) else amax(x) * (f32(1) / MAX[fmt])
    code = given if isinstance(given, np.uint8) else round_up(given)
    if code == 255:
        return Scaled(code, np.full_like(x, np.nan))
    return Scaled(code, x * f32(math.ldexp(1.0, 127 - int(code))))


def by_power(x: np.ndarray, fmt: str, rounding: str) -> Scaled:
    """Of amax alone, in units of the largest power of two of the format."""
    if np.isnan(x).any():
        return Scaled(np.uint8(255), x / f32(np.inf))
    mantissa, exponent = math.frexp(float(amax(x)))  # the mantissa is in [0.5, 1), or 0
    if np.isinf(amax(x)):
        mantissa, exponent = 0.5, 129
    if rounding == "even":
        bits = ml_dtypes.finfo(FLOATS[fmt]).nmant + 1
        exponent += mantissa and math.floor(mantissa * 2**bits + 0.5) == 2**bits
    exponent -= not (rounding == "ceil" and mantissa > 0.5)
    code = exponent - math.floor(math.log2(MAX[fmt])) + 127 if mantissa else 0
    code = min(max(code, 0), 254)
    return Scaled(np.uint8(code), x / f32(math.ldexp(1.0, max(code, 1) - 127)))


def round_up(v: Any) -> Any:
    """The e8m0 code of v rounded up to a power of two."""
    if np.isnan(v):
        return np.uint8(255)
    if np.isinf(v):
        return np.uint8(254 if v > 0 else 0)
    if v <= 2.0**-127:
        return np.uint8(0)
    mantissa, exponent = math.frexp(float(v))  # the mantissa is in [0.5, 1)
    return np.uint8(min(exponent - (mantissa == 0.5) + 127, 254))


def by_two_levels(x: np.ndarray, fmt: str, global_amax: Any) -> Scaled:
    factor = two_level_factor(fmt, global_amax)
    scale = saturated(amax(x) * (factor * (f32(1) / MAX[fmt])), "e4m3")
    if has_nan(x, fmt):
        scale = np.array(f32(np.nan)).astype(FLOATS["e4m3"])
    inverse = min(f32(1) / (f32(scale) * (f32(1) / factor)), LARGEST)
    return Scaled(scale, x * inverse)


def two_level_factor(fmt: str, global_amax: Any) -> Any:
    factor = min(f32(448) * MAX[fmt] / global_amax, LARGEST)
    return f32(1) if global_amax == 0 or factor == 0 else factor


# ---- elements


def largest_of(fmt: str) -> Any:
    """The largest number above zero."""
    if fmt in INTEGERS:
        _, high, zero, *_ = INTEGERS[fmt]
        return f32(high - zero)
    return MAX.get(fmt, f32(1))  # a codebook ends in 1


def saturated(y: Any, fmt: str) -> Any:
    """y as ml_dtypes casts it, to the nearest, ties to even."""
    return np.clip(y, -MAX[fmt], MAX[fmt]).astype(FLOATS[fmt])


def encode(y: np.ndarray, fmt: str, book: Sequence[float], zero: int, noise: np.ndarray | None) -> np.ndarray:
    """The codes of y, one in each element: integers, or bits of a float."""
    if fmt in INTEGERS:
        low, high, _, _, dtype = INTEGERS[fmt]
        if noise is None:
            steps = np.rint(y)
        else:
            steps = np.copysign(stochastic_steps(np.abs(y), noise), y)
        return np.clip(np.where(np.isnan(steps), f32(0), steps) + f32(zero), low, high).astype(dtype)
    if fmt in FLOATS:
        codes = saturated(y, fmt).view(np.uint8) if noise is None else stochastic(y, fmt, noise)
        nan = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x07}[fmt]
        return np.where(np.isnan(y), np.uint8(nan), codes)
    wide = np.array(book, np.float64)
    codes = np.searchsorted((wide[1:] + wide[:-1]) / 2, y.astype(np.float64), side="right")  # a tie goes up
    return np.where(np.isnan(y), np.argmin(np.abs(wide)), codes).astype(np.uint8)


def stochastic_steps(steps: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """floor(steps + noise), the fractions of both in 24 bits; in float64, which has room for all of it."""
    whole = np.floor(steps.astype(np.float64))
    with np.errstate(invalid="ignore"):
        part = np.floor((steps - whole) * 2.0**24) / 2.0**24
    r = noise / 2.0**8 if noise.dtype == np.uint8 else noise / 2.0**24
    return np.where(np.isfinite(steps), np.floor(whole + part + r), steps).astype(f32)


def stochastic(y: np.ndarray, fmt: str, noise: np.ndarray) -> np.ndarray:
    """The magnitude in gaps above the next smaller number of the format, rounded stochastically."""
    numbers = np.arange(128, dtype=np.uint8) if fmt != "e2m1" else np.arange(8, dtype=np.uint8)
    numbers = numbers.view(FLOATS[fmt]).astype(f32)
    numbers = numbers[np.isfinite(numbers)]
    magnitude = np.abs(y)
    if fmt == "e2m1":
        gap = np.where(magnitude < 2, f32(0.5), np.where(magnitude < 4, f32(1), f32(2)))
    else:
        gap = np.append(numbers[1:] - numbers[:-1], f32(0))[np.searchsorted(numbers, magnitude, side="right") - 1]
    code = np.searchsorted(numbers, magnitude, side="right") - 1
    above = np.where(magnitude < numbers[-1], (magnitude - numbers[code]) / np.where(gap > 0, gap, 1), 0)
    code = code + stochastic_steps(above, noise).astype(np.int64)
    return (code + np.signbit(y) * (8 if fmt == "e2m1" else 128)).astype(np.uint8)


def decode(codes: np.ndarray, fmt: str, book: Sequence[float], zero: Any) -> np.ndarray:
    if fmt in INTEGERS:
        return codes.astype(f32) - f32(zero)
    if fmt in FLOATS:
        return codes.view(np.uint8).view(FLOATS[fmt]).astype(f32)
    return np.array(book, f32)[codes]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Along the last dimension, the first code in the lowest bits; zeros beyond the last."""
    n = 8 // bits
    fields = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // n) * n), np.uint8)
    fields[..., : codes.shape[-1]] = codes.view(np.uint8) & (2**bits - 1)
    packed = np.zeros((*codes.shape[:-1], fields.shape[-1] // n), np.uint8)
    for i in range(n):
        packed |= fields[..., i::n] << (i * bits)
    return packed


def unpack(packed: np.ndarray, bits: int, size: int, dtype: Any) -> np.ndarray:
    n = 8 // bits
    fields = np.zeros((*packed.shape[:-1], packed.shape[-1] * n), np.uint8)
    for i in range(n):
        fields[..., i::n] = (packed >> (i * bits)) & (2**bits - 1)
    codes = fields[..., :size]
    if np.dtype(dtype) != np.int8:
        return codes
    return np.where(codes >= 2 ** (bits - 1), codes.astype(np.int16) - 2**bits, codes).astype(np.int8)


# ---- quantizers


def quantize(
    q: Quantizer,
    x: np.ndarray,
    noise: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    zero_point: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The buffers of x, a float array of any dtype. A given scale has the shape of the buffer that it becomes."""
    with np.errstate(all="ignore"):
        shape = (x.size,) if q.flat else x.shape
        most = min(float(ml_dtypes.finfo(x.dtype).max), float(LARGEST))
        wide = x.astype(f32).reshape(shape)
        fmt, rule = q.format.name, type(q.scale).__name__
        bits = np.zeros(shape, INTEGERS[fmt][4] if fmt in INTEGERS else np.uint8)
        scales = np.zeros(grid(shape, q.block), {"Microscaling": np.uint8, "TwoLevel": FLOATS["e4m3"]}.get(rule, f32))
        zeros = np.zeros(grid(shape, q.block), bits.dtype)
        outer = global_amax(q, wide, scale) if rule == "TwoLevel" else None
        for index, where in blocks(shape, q.block):
            own = None if scale is None or outer is not None else scale[index]
            top = None if outer is None else outer[belongs(q, shape, index)]
            found = scaled(q, wide[where], own, top, most)
            zero = found.zero_point
            if zero_point is not None:
                zero = int(np.clip(np.rint(zero_point[index]), *INTEGERS[fmt][:2]))
            if zero is not None:
                zeros[index] = zero
            elif fmt in INTEGERS:
                zero = INTEGERS[fmt][2]
            random = None if noise is None else noise.reshape(shape)[where]
            bits[where] = encode(found.y, fmt, getattr(q.format, "book", ()), zero or 0, random)
            scales[index] = found.scale
        codes: np.ndarray = bits
        if q.format.bits in (2, 4):
            codes = pack(bits.reshape(shape or (1,)), q.format.bits)
        else:
            codes = (bits.view(FLOATS[fmt]) if fmt in FLOATS else bits).reshape(x.shape)
        made = {"codes": codes, "scale": scales}
        if has_zero_point(q):
            made["zero_point"] = zeros
        return made if outer is None else made | {"global_amax": outer}


def has_zero_point(q: Quantizer) -> bool:
    return type(q.scale).__name__ == "MinMax" or bool(getattr(q.scale, "affine", False))


def scaled(q: Quantizer, x: np.ndarray, given: Any, outer: Any, most: float) -> Scaled:
    fmt, rule = q.format.name, q.scale
    match type(rule).__name__:
        case "TwoLevel":
            return by_two_levels(x, fmt, outer)
        case "Microscaling":
            return by_exponent(x, fmt, given, rule.rounding)  # type: ignore[attr-defined]
        case _ if given is not None:
            if getattr(rule, "power_of_two", False):  # of 1 / scale, down
                given = f32(1) / f32(2.0 ** np.floor(np.log2(np.float64(f32(1) / given))))
            return Scaled(given, x / given)
        case "Amax":
            return by_amax(x, fmt, rule.floor)  # type: ignore[attr-defined]
        case "MinMax":
            return by_range(x, fmt)
        case "AbsMean":
            return by_mean(x)
        case "CurrentScaling":
            return by_current(x, fmt, rule.power_of_two, rule.eps, LARGEST)  # type: ignore[attr-defined]
        case "BlockScaling":
            return by_current(x, fmt, rule.power_of_two, rule.eps, most)  # type: ignore[attr-defined]
        case name:
            raise NotImplementedError(name)


def global_amax(q: Quantizer, x: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    block = q.scale.outer  # type: ignore[attr-defined]
    found = np.zeros(grid(x.shape, block), f32)
    for index, where in blocks(x.shape, block):
        found[index] = amax(x[where]) if given is None else given[index]
    return found


def belongs(q: Quantizer, shape: Sequence[int], index: tuple[int, ...]) -> tuple[int, ...]:
    """The outer block of a block."""
    outer = sizes(shape, q.scale.outer)  # type: ignore[attr-defined]
    return tuple(0 if b == -1 else i for i, b in zip(index, outer, strict=True))


def dequantize(q: Quantizer, buffers: dict[str, np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """The numbers, in float32."""
    with np.errstate(all="ignore"):
        rows = (math.prod(shape),) if q.flat else tuple(shape)
        fmt = q.format.name
        codes = buffers["codes"]
        if q.format.bits in (2, 4):
            dtype = INTEGERS[fmt][4] if fmt in INTEGERS else np.uint8
            codes = unpack(codes, q.format.bits, rows[-1] if rows else 1, dtype)
        codes = codes.reshape(rows)
        found = np.zeros(rows, f32)
        for index, where in blocks(rows, q.block):
            step = buffers["scale"][index]
            match type(q.scale).__name__:
                case "Microscaling":
                    step = f32(np.nan if step == 255 else math.ldexp(1.0, int(step) - 127))
                case "TwoLevel":
                    top = buffers["global_amax"][belongs(q, rows, index)]
                    step = f32(step) * top * (f32(1) / (f32(448) * MAX[fmt]))
            zero = INTEGERS[fmt][2] if fmt in INTEGERS else 0
            if has_zero_point(q):
                zero = buffers["zero_point"][index]
            found[where] = decode(codes[where], fmt, getattr(q.format, "book", ()), zero) * step
        return found.reshape(shape)
