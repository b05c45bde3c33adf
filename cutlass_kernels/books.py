"""Codebooks: any ascending numbers as the codes 0, 1, ..., and the tables by which a kernel reads and writes codes.

A number y has the code k of the last threshold t[k] that it reaches. The upper bits of y name a bucket, in which there
is one threshold at most; its first code is looked up, and y compared with the threshold after it.
"""

import bisect
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_MOST = 4096  # buckets of a table
_LEAST = 2.0**-30  # of a threshold's magnitude: below it, a quotient could be subnormal where it is compared
_TINY = 2.0**-149
_MANTISSA = 23


@dataclass(frozen=True)
class Layout:
    """The layout of a codebook in a kernel, without its values.

    A bucket has the numbers of one sign whose magnitudes, or `edge` where they are below, are alike in the bits above
    `shift`. There are `buckets` of each sign: of both, those of numbers below 0 last, or of one if no number is below
    0."""

    bits: int
    shift: int
    edge: int
    buckets: int
    signed: bool

    @property
    def name(self) -> str:
        return f"b{self.bits}{'s' if self.signed else 'u'}-{self.shift}-{self.edge >> self.shift}-{self.buckets}"

    @property
    def size(self) -> int:
        """How many codes."""
        return 1 << self.bits

    @property
    def index_bytes(self) -> int:
        """The bytes for the first code of each bucket, a multiple of 4."""
        return -(-self.buckets * (2 if self.signed else 1) // 4) * 4

    @property
    def words(self) -> int:
        """The number of 4-byte words of the tables: values, thresholds, first codes."""
        return 2 * self.size + 1 + self.index_bytes // 4


@dataclass(frozen=True)
class Book:
    """A codebook.

    Args:
        bits: of a code, 4 or 8.
        numbers: 2 to 2^bits float32, ascending.
        thresholds: of each code the least float32 that has it, or a larger one; of the first, -infinity.
        zero: the code of NaN.
        raised: whether numbers above 0 have the code of the least number above 0 at least.
    """

    bits: int
    numbers: tuple[float, ...]
    thresholds: tuple[float, ...]
    zero: int
    raised: bool = False

    def declines(self) -> str | None:
        """Why no kernel reads it, or None."""
        if self.bits not in (4, 8):
            return f"codes of 4 or 8 bits, not of {self.bits}"
        if any(abs(t) < _LEAST for t in self.thresholds):
            return "codebooks that change codes further than 2^-30 from 0"
        if self.numbers[-1] <= 0:
            return "codebooks with a number above 0"
        return None if self._layout is not None else f"codebooks that {_MOST} buckets tell apart"

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ValueError(f"a codebook of {len(self.numbers)} numbers: {self.declines()}")
        return self._layout

    @cached_property
    def steps(self) -> list[float]:
        """The thresholds, with that of numbers that are raised."""
        found = list(self.thresholds)
        least = bisect.bisect_right(self.numbers, 0.0)
        if self.raised and least > 0 and found[least] > 0:
            found[least] = _TINY
        return found

    @cached_property
    def _layout(self) -> Layout | None:
        known = [abs(t) for t in self.steps[1:] if abs(t) != _TINY]
        most = max(map(abs, self.numbers)) * (1 + 2.0**-10)
        signed = self.numbers[0] < 0
        for shift in range(_MANTISSA, 8, -1):
            lowest = _bits(min(known, default=most)) >> shift
            for first in (lowest, lowest - 1):
                made = Layout(self.bits, shift, first << shift, (_bits(most) >> shift) - first + 1, signed)
                if first > 0 and made.buckets * (1 + signed) <= _MOST and self._firsts(made) is not None:
                    return made
        return None

    def _firsts(self, layout: Layout) -> list[int] | None:
        """The first code of each bucket, or None if one has two thresholds."""
        found = []
        for sign in (1.0, -1.0)[: 1 + layout.signed]:
            for i in range(layout.buckets):
                low = 0.0 if i == 0 else _float(layout.edge + (i << layout.shift))
                high = _float(layout.edge + ((i + 1) << layout.shift) - 1)
                least, most = (low, high) if sign > 0 else (-high, -low)
                first, last = (bisect.bisect_right(self.steps, y) - 1 for y in (least, most))
                if last > first + 1:
                    return None
                found.append(max(first, 0))
        return found

    def table(self) -> list[int]:
        """The words of the tables as int32: numbers, thresholds with one that nothing reaches, first codes."""
        layout = self.layout
        firsts = self._firsts(layout)
        assert firsts is not None
        more = layout.size - len(self.numbers)
        floats = [*self.numbers, *[self.numbers[-1]] * more, *self.steps, *[math.nan] * (more + 1)]
        codes = bytes(firsts) + bytes(layout.index_bytes - len(firsts))
        return [*struct.unpack(f"<{len(floats)}i", struct.pack(f"<{len(floats)}f", *floats)),
                *struct.unpack(f"<{len(codes) // 4}i", codes)]  # fmt: skip


def joined(books: Sequence[Book]) -> list[int]:
    """The tables of several codebooks, one after another."""
    return [word for book in books for word in book.table()]


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
