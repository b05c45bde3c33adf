"""Searches for the scale, and the offset, with which a block's codes have the least squared error.

Each search rounds the block with several scales around the one that maps its range to all codes. It compares them by
sums of products that are exact in float32: elements, divided by the block's range, are rounded to a multiple of a power
of two for which no partial sum needs more than 24 bits. So the order of a sum has no effect.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hop.numerics.blocks import Block
from hop.numerics.formats import Format
from hop.numerics.rule import LARGEST, Blocks, nan_beyond
from hop.numerics.tables import lookup, search

_REACH = 0.8  # how far, in steps between values, the range's end is moved from the last value
_MOST = 2**20  # of elements times the square of the largest value: the search needs 4 bits below a value's units


def check(format: Format, zero: int, block: Block) -> None:
    """Raise ValueError unless blocks of this size can be searched."""
    if not format.is_whole:
        raise ValueError(
            f"StoredScales: search is for formats of integers, but {format.name} has other values; use search=0"
        )
    if -1 in block or math.prod(block) * _largest_value(format, zero) ** 2 > _MOST:
        raise ValueError(
            f"StoredScales: search is for {format.name} in blocks of up to "
            f"{int(_MOST // _largest_value(format, zero) ** 2)} elements, got block {block}; use a smaller block, or "
            "search=0"
        )


def least_error_scale(parts: Blocks, format: Format, count: int, signed: bool) -> Tensor:
    """The scale of each block, for codes without an offset.

    With e the block's element of largest magnitude and L the format's value of largest magnitude, or its largest one
    unless `signed`, it rounds x · (L + c) / e to values q for `count` numbers c. The scale of the rounding with the
    least squared error is returned; that is Σxq / Σq².
    """
    zero = format.zero
    low, high = format.min - zero, format.max - zero
    last, step = high, format.numbers[-1] - format.numbers[-2]
    if signed and -low > high:
        last, step = low, format.numbers[0] - format.numbers[1]
    above, below = (nan_beyond(end) for end in parts.range())
    extreme = torch.maximum(above, below)
    if last < 0:
        extreme = torch.where(below == extreme, -extreme, extreme)
    units, unit = _units(parts, parts.x, extreme, format, zero)
    scale, best = torch.where(extreme == 0, 0.0, _over(extreme, last)), None
    for c in _shifts(count):
        q = format.nearest(units * ((last + c * step) * 2.0 ** -_bits(parts, format, zero)), zero)
        xq, qq = _sum(parts, units * q), _sum(parts, q * q)
        fitted = xq / qq
        scale, best = _better(scale, unit * fitted, fitted * xq, best)
    return scale


def least_error_range(parts: Blocks, format: Format, count: int, has_zero: bool) -> tuple[Tensor, Tensor]:
    """The scale and the offset m of each block, for integer codes from 0: x ≈ s · code - m.

    With low and high the ends of the block, or of the block and 0 if `has_zero`, it rounds (x - low) · (L + c) / (high
    - low) to codes up to L for `count` numbers c. s and m of the rounding with the least squared error are returned;
    they are those of least squares, and m is not negative if `has_zero`.
    """
    low, high = _ends(parts, has_zero)
    width = (high - low).clamp(max=LARGEST)
    units, unit = _units(parts, parts.x - parts.once(low), width, format, 0)
    n, x = _count(parts, width), _sum(parts, units)
    most = -low / unit
    scale, offset, best = _over(width, format.max), -low, None
    for c in _shifts(count):
        q = format.nearest(units * ((format.max + c) * 2.0 ** -_bits(parts, format, 0)))
        sq, xq, qq = _sum(parts, q), _sum(parts, units * q), _sum(parts, q * q)
        spread = n * qq - sq * sq
        slope, start = (n * xq - x * sq) / spread, (qq * x - sq * xq) / spread  # units ≈ slope · q + start
        if has_zero:
            slope = torch.where(start > most, (xq - most * sq) / qq, slope)
            start = torch.minimum(start, most)
        gain = slope * (2 * xq - slope * qq - 2 * start * sq) + start * (2 * x - n * start)
        scale, _ = _better(scale, unit * slope, gain, best)
        offset, best = _better(offset, -(low + unit * start), gain, best)
    return scale, offset


def least_error_offset(parts: Blocks, format: Format, scale: Tensor, offset: Tensor) -> Tensor:
    """The offset of least squares, not negative, for a rounded scale and the codes that it gives with `offset`."""
    y = (parts.x + parts.once(offset)) / parts.once(torch.where(scale == 0, 1.0, scale))
    excess = 8.0  # more codes than an element can be clipped by
    unit = 2.0 ** math.floor(24 - math.log2(math.prod(parts.block) * excess))
    off = ((format.nearest(y) - y).clamp(-excess, excess) * unit).round()
    mean = _sum(parts, off) / (_count(parts, scale) * unit)
    return (offset + scale * mean).to(torch.float32).clamp(min=0.0)


def least_error_code(parts: Blocks, format: Format, count: int, stored: Format) -> Tensor:
    """The scale of each block with the least squared error, of the `count` values of `stored` nearest to amax / max."""
    zero = format.zero
    amax = nan_beyond(parts.amax_for(format))
    units, unit = _units(parts, parts.x, amax, format, zero)
    scale = stored.decode(stored.encode(_over(amax, format.max - zero)))
    numbers = [v for v in stored.numbers if v >= 0]
    at, best = search(scale, numbers), None
    for step in sorted(range(-(count // 2), count // 2 + 1), key=abs):
        s = lookup(numbers, (at + step).clamp(0, len(numbers) - 1)) if step else scale
        q = format.nearest(parts.x / parts.once(torch.where(s == 0, 1.0, s)), zero)
        part = s / unit
        gain = part * (2 * _sum(parts, units * q) - part * _sum(parts, q * q))
        scale, best = _better(scale, s, gain, best)
    return scale


def _units(parts: Blocks, x: Tensor, size: Tensor, format: Format, zero: int) -> tuple[Tensor, Tensor]:
    """x rounded to integers in a unit of its block, float64, of which `size` has 2^bits; their sums are exact."""
    unit = size * 2.0 ** -_bits(parts, format, zero)
    return (x / parts.once(torch.where(unit == 0, 1.0, unit))).round(), unit.to(torch.float64)


def _bits(parts: Blocks, format: Format, zero: int) -> int:
    """The bits of elements whose products with values of the format have sums over a block below 2^24."""
    return math.floor(24 - math.log2(math.prod(parts.block) * _largest_value(format, zero)))


def _better(kept: Tensor, other: Tensor, gain: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor]:
    """`other` where `gain` is more than `best`, elsewhere `kept`; and the larger gain. A NaN is no gain."""
    before = torch.full_like(gain, -math.inf) if best is None else best
    return torch.where(gain > before, other.to(kept.dtype), kept), torch.where(gain > before, gain, before)


def _shifts(count: int) -> Sequence[float]:
    """`count` numbers from -_REACH to _REACH, 0 first, so that it is preferred among equals."""
    half = count // 2
    return [_REACH * i / max(half, 1) for i in sorted(range(-half, half + 1), key=abs)]


def _largest_value(format: Format, zero: int) -> float:
    """The largest magnitude of the format's values."""
    return max(format.max - zero, zero - format.min)


def _over(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded."""
    return x / torch.full_like(x, number)


def _sum(parts: Blocks, x: Tensor) -> Tensor:
    """The sum over each block, float64."""
    return parts.combined(x.sum(parts.dims, keepdim=True).to(torch.float64), "sum")


def _count(parts: Blocks, like: Tensor) -> Tensor:
    """The number of elements of each block, padding included."""
    n = math.prod(parts.x.shape[d] for d in parts.dims)
    return parts.combined(torch.full_like(like, n, dtype=torch.float64), "sum")


def _ends(parts: Blocks, has_zero: bool) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each block, or of the block and 0; both NaN beyond finite numbers."""
    above, below = (nan_beyond(end) for end in parts.range())
    if has_zero:
        return -below, above
    # a block whose elements have one sign ends at the one nearest to 0
    nearest = parts.combined(parts.x.abs().amin(parts.dims, keepdim=True), "min")
    return torch.where(below == 0, nearest, -below), torch.where(above == 0, -nearest, above)
