"""Spread: a histogram of values."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_BINS = 64  # even, so that joining pairs of bins doubles the range


@dataclass(frozen=True)
class Spread:
    """A histogram of values, with a linear axis.

    Attributes:
        count: number of values.
        low, high: the smallest and the largest finite value; both 0 if there is none.
        zeros: number of zeros.
        rest: number of NaNs and infinities.
        limit: the histogram spans -limit to limit in bins of equal width.
        bins: number of values in each bin.
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
        """The histogram of a float tensor."""
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
        if self.limit == 0 or other.limit == 0:  # one has no finite value
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
        """The bins for a range from -limit to limit, which is a power of two times as wide."""
        bins, own = self.bins, self.limit
        while own < limit:
            joined = [bins[i] + bins[i + 1] for i in range(0, _BINS, 2)]
            edge = (0,) * (_BINS // 4)
            bins, own = (*edge, *joined, *edge), own * 2
        return bins
