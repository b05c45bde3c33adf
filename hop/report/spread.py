"""Spread: where numbers lie, as a histogram."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_BINS = 64  # of a histogram: even, so that a range doubles by joining pairs of bins


@dataclass(frozen=True)
class Spread:
    """Where numbers lie: a histogram, with a linear axis.

    Attributes:
        count: how many there are.
        low, high: the least and the greatest that is finite; both 0 where none is.
        zeros: how many are 0.
        rest: how many are NaN or infinite.
        limit: the histogram goes from -limit to limit, in bins of one width.
        bins: how many lie in each of them.
    """

    count: int
    low: float
    high: float
    zeros: int
    rest: int
    limit: float
    bins: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> "Spread":
        """Of a tensor of floats."""
        flat = x.detach().reshape(-1).float()
        finite = flat[flat.isfinite()]
        rest = flat.numel() - finite.numel()
        if finite.numel() == 0:
            return Spread(flat.numel(), 0.0, 0.0, 0, rest, 0.0, (0,) * _BINS)
        low, high = (v.item() for v in torch.aminmax(finite))
        most = max(-low, high)
        limit = 2.0 ** min(math.ceil(math.log2(most)), 127) if most > 0 else 1.0
        counts: list[int] = cast(Any, torch.histc(finite.cpu(), _BINS, -limit, limit).long().tolist())
        return Spread(flat.numel(), low, high, int((finite == 0).sum()), rest, limit, tuple(counts))

    def __add__(self, other: "Spread") -> "Spread":
        if self.limit == 0 or other.limit == 0:  # one without a finite number
            known = other if self.limit == 0 else self
            count, rest = self.count + other.count, self.rest + other.rest
            return Spread(count, known.low, known.high, known.zeros, rest, known.limit, known.bins)
        limit = max(self.limit, other.limit)
        pairs = zip(self._wider(limit), other._wider(limit), strict=True)
        return Spread(
            self.count + other.count,
            min(self.low, other.low),
            max(self.high, other.high),
            self.zeros + other.zeros,
            self.rest + other.rest,
            limit,
            tuple(a + b for a, b in pairs),
        )

    def _wider(self, limit: float) -> tuple[int, ...]:
        """The bins of a range that is a power of two times as wide."""
        bins, own = self.bins, self.limit
        while own < limit:
            joined = [bins[i] + bins[i + 1] for i in range(0, _BINS, 2)]
            edge = (0,) * (_BINS // 4)
            bins, own = (*edge, *joined, *edge), own * 2
        return bins
