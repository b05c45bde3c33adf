"""What a report says of values: their types, where their numbers lie, and what a graph does with them."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hop.export.analysis.correspondence import kind
from hop.impls.quantize import dequantize
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

FLOAT, INTEGER, LOW_BIT = "float", "integer", "low-bit"
KINDS = (FLOAT, INTEGER, LOW_BIT)

_BINS = 64  # of a histogram: even, so that a range doubles by joining pairs of bins


@dataclass(frozen=True)
class Type:
    """How the elements of a value are held.

    Attributes:
        name: the dtype of a plain tensor; the format of a quantized one, and the block that shares a scale.
        kind: "float"; "integer", booleans included; or "low-bit", a quantized tensor or one of 8-bit floats.
        bits: of one element, without scales.
    """

    name: str
    kind: str
    bits: int

    @property
    def format(self) -> str:
        """The name without the block."""
        return self.name.split(" ", 1)[0]


def type_of(x: Any) -> Type | None:
    """None of what is no tensor and no list that begins with one."""
    if isinstance(x, list | tuple) and x:
        return type_of(x[0])
    if isinstance(x, QuantizedTensor):
        return of_quantizer(x.quantizer)
    return of_dtype(x.dtype) if isinstance(x, Tensor) else None


def of_quantizer(q: Quantizer) -> Type:
    whole = all(size == -1 for size in q.block)
    block = "by tensor" if whole else "by " + "×".join("all" if size == -1 else str(size) for size in q.block)
    return Type(f"{q.format.name} {block}", LOW_BIT, q.format.bits)


def of_dtype(dtype: torch.dtype) -> Type:
    is_float = dtype.is_floating_point or dtype.is_complex
    group = (FLOAT if dtype.itemsize > 1 else LOW_BIT) if is_float else INTEGER
    return Type(str(dtype).removeprefix("torch."), group, 8 * dtype.itemsize)


def numbers(x: Any) -> Tensor | None:
    """What a tensor stands for, in float32; None of integers and of what is no tensor."""
    if isinstance(x, QuantizedTensor):
        return dequantize(x, torch.float32)
    if kind(x) != "float":
        return None
    return torch.view_as_real(x).float() if x.is_complex() else x.float()


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
