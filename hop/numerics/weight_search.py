"""Searches for the scales, and zero points, with which the codes of a weight have the least squared error.

A search starts from what the quantizer's rule finds, and tries several candidates for each block:

    scale    x is rounded to q, the nearest values of x · level / amax for each level; the scale is Σxq / Σq², which
             is negative for a negative level
    affine   likewise with the range of the block, extended to include 0, in place of amax, and the zero point of each
    code     the scale is a code: the rule's, and those a few codes away

The candidate with the least Σ (x - s · q)² is chosen, the first among equals, or the rule's scale if it is as good
within 2^-20 of Σx², as where a weight has only values that codes represent. `slack` weighs that error: with 1.5,
another scale is chosen if its error is less than 1.5 times the rule's. A block that has NaN, an infinity or no element
of at least 2^-100 keeps the rule's scale. Elements are compared as integers of `unit` = amax · 2^-bits, of so
few bits that every sum of products is exact in float32; divisions are in float64. So the order of a sum has no effect,
and native/search/code.h gives the same bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hop.numerics.formats import Format

SCALE, AFFINE, CODE = "scale", "affine", "code"
MOST_BITS = 20  # of a unit
MOST_ELEMENTS = 1024  # of a block
_LARGEST = torch.finfo(torch.float32).max
_LEAST = 2.0**-100  # units of smaller elements would be subnormal
_MARGIN = 1 + 2.0**-20  # by which another scale must be better than the rule's
_MOST = 2**20  # of elements times the square of the largest value: units need 4 bits more than a value


@dataclass(frozen=True)
class Search:
    """The kind of a search and its candidates: levels that the largest element is mapped to, or distances of codes."""

    kind: str
    candidates: tuple[float, ...]
    last: int = 0
    """The largest code of a scale."""
    slack: float = 1.0
    """How many times the rule's squared error the error of another code may be."""


def symmetric(format: Format, signed: bool = False) -> Search | None:
    """The search for formats whose scale is amax / max: that level, and others from half a code below to half a code
    above the largest magnitude. None for formats without integers, or of more than 6 bits.

    If `signed`, and the format has one more negative code, the others map the largest element to that code, or half a
    code beyond it, with a scale of either sign.
    """
    if not format.is_integer or format.bits > 6 or format.zero != 0:
        return None
    if signed and -format.min > format.max:
        return Search(SCALE, (format.max, *(s * (format.min + c) for c in (0.0, -0.5) for s in (-1, 1))))
    last = int(2 * max(format.max, -format.min)) + 1
    levels = (level / 2 for level in range(max(int(2 * format.max) - 1, 1), last + 1))
    return Search(SCALE, (format.max, *(level for level in levels if level != format.max)))


def affine(format: Format) -> Search | None:
    """The search for formats with a zero point: the number of steps in the range of a block, or 1 or 2 fewer, or 1
    more.
    """
    if not format.is_integer or format.bits > 6:
        return None
    steps = format.max - format.min
    return Search(AFFINE, (steps, *(steps + n for n in (-1, 1, -2) if steps + n > 0)))


def codes(format: Format, steps: Sequence[int], last: int, slack: float = 1.0) -> Search | None:
    """The search for scales that are codes up to `last`; 0 must be the first of `steps`. None for formats of more than
    6 bits, and codebooks.
    """
    return Search(CODE, tuple(map(float, steps)), last, slack) if format.bits <= 6 and not format.is_codebook else None


def bits_of_units(format: Format, elements: int, steps: int = 0) -> int | None:
    """The bits of a unit for blocks of so many elements; None if sums would not be exact.

    `steps` is the largest value of an affine format.
    """
    values = [abs(v) for v in format.numbers if v != 0]
    least = min(values)
    if any(v % least for v in values):
        return None
    largest = (steps or max(values)) / least
    if elements > MOST_ELEMENTS or elements * largest**2 > _MOST:
        return None
    return min(math.floor(24 - math.log2(elements * largest)), MOST_BITS)


@dataclass(frozen=True)
class Units:
    """The elements of blocks as integers, float32: x ≈ u · unit; unit is NaN for blocks that are not searched."""

    u: Tensor
    unit: Tensor
    dims: list[int]

    @staticmethod
    def of(x: Tensor, dims: list[int], bits: int, is_affine: bool) -> "Units":
        above = x.amax(dims, keepdim=True).clamp(min=0.0)
        below = (-x).amax(dims, keepdim=True).clamp(min=0.0)
        size = above + below if is_affine else torch.maximum(above, below)
        unit = torch.where((size >= _LEAST) & (size <= _LARGEST), size * 2.0**-bits, math.nan)
        return Units((x * unit.reciprocal()).round(), unit, dims)

    def parts(self, scale: Tensor) -> Tensor:
        """A scale in units, float64."""
        return scale.to(torch.float64) / self.unit.to(torch.float64)

    def sums(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Σ u q and Σ q², exact."""
        xq, qq = (p.sum(self.dims, keepdim=True).to(torch.float64) for p in (self.u * q, q * q))
        return xq, qq

    def squares(self) -> Tensor:
        """Σ u², exact, float64."""
        return self.u.to(torch.float64).square().sum(self.dims, keepdim=True)


def gain_of(part: Tensor, xq: Tensor, qq: Tensor) -> Tensor:
    """Σx² - Σ(x - s · q)² in units, for s = part units."""
    return part * (2 * xq - part * qq)


def fit(search: Search, units: Units, bits: int, format: Format, scale: Tensor, zero: Tensor | None) -> list[Tensor]:
    """The scale that fits the codes of the best level, and the zero point, float32, if there is one.

    scale and zero are the rule's, per block.
    """
    best: Tensor | None = None
    rule = units.parts(scale)
    below = (-units.u).amax(units.dims, keepdim=True).clamp(min=0.0)
    for level in search.candidates:
        by = level * 2.0**-bits
        at = None if zero is None else (format.min + (below * by).round()).clamp(format.min, format.max)
        q = (units.u * by).round()
        q = q.clamp(format.min, format.max) if at is None else q.clamp(format.min - at, format.max - at)
        xq, qq = units.sums(q)
        gain = xq * xq / qq
        best = gain_of(rule, xq, qq) * _MARGIN if best is None else best
        better = gain > best  # a NaN is not
        best = torch.where(better, gain, best)
        scale = torch.where(better, (units.unit.to(torch.float64) * (xq / qq)).to(torch.float32), scale)
        zero = None if zero is None or at is None else torch.where(better, at, zero)
    return [scale] if zero is None else [scale, zero]


def choose(search: Search, units: Units, format: Format, code: Tensor, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The best of the codes of scales near `code`, int32; scale_of converts them to float32."""
    best, chosen = torch.zeros_like(units.unit, dtype=torch.float64), code
    extra = search.slack - 1  # errors are Σx² less the gain
    for step in search.candidates:
        moved = (code + int(step)).clamp(0, search.last)
        scale = scale_of(moved)
        by = units.unit / scale
        valid = (scale > 0) & (by <= _LARGEST) & (code <= search.last)
        xq, qq = units.sums(format.nearest(units.u * torch.where(valid, by, math.nan)))
        gain = torch.where(valid, gain_of(units.parts(scale), xq, qq), math.nan)
        if step == 0:
            best = torch.where(gain > 0, gain * (_MARGIN + extra) - extra * units.squares(), 0.0)
            continue
        better = gain > best
        best, chosen = torch.where(better, gain, best), torch.where(better, moved, chosen)
    return chosen
