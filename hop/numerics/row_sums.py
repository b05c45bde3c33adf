"""Sums of rows in fixed point: exact integers, so that the order in which they are added does not matter.

With 2^E the power of two below the largest magnitude of a row,

    sum             q_i = rint(x_i · 2^(40 - E)),               Σ q_i · 2^(E - 40)
    sum of squares  q_i = rint(float32((x_i · 2^(20 - E))²)),   Σ q_i · 2^(2E - 40)

each q an int64. What is below 2^-41 of the largest is rounded away: at n elements at most n · 2^-41 of it. A tree of
float32 sums would have the same bits everywhere too, but as many operations in a graph as levels, which a length that
is a symbol does not fix.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.export import is_lowering
from hop.compat.tracing import is_describing

BITS = 40
"""Below the largest magnitude of a row."""

MOST = 2**22
"""Elements of a row, whose sum an int64 holds for certain."""

_LEAST = 2.0**-126


def check(caller: str, op: Any, sizes: Sequence[Any]) -> None:
    """Raise ValueError for rows of more elements than are summed, of so many in each dimension."""
    n = math.prod(sizes)
    if isinstance(n, int) and n > MOST:
        raise ValueError(
            f"{caller}: {op} sums rows of at most 2^22 elements in fixed point, got {n}; run it in float64, or by "
            "itself"
        )


def row_sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Σ x over some dimensions, which stay with size 1; x float32, the sum float64: NaN where an element is not
    finite. Rows of more than 2^22 elements keep fewer bits below the largest magnitude."""
    if is_describing():
        return _described(x, dims)
    unit, bits = _unit(x, dims), _bits([x.shape[d] for d in dims])
    return _added(x.to(torch.float64) * (2.0**bits / unit), dims, unit, bits)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """The sums of the first 1, 2, ... elements along a dimension, as `row_sum`: x float32, the result float64."""
    if is_describing():
        return x.to(torch.float64)
    unit, bits = _unit(x, [dim]), _bits([x.shape[dim]])
    total = (x.to(torch.float64) * (2.0**bits / unit)).round().to(torch.int64).cumsum(dim)
    return _restored(total, unit, bits)


def _bits(sizes: Sequence[Any]) -> int:
    n = math.prod(sizes)
    return min(BITS, 62 - n.bit_length()) if isinstance(n, int) else BITS


def row_sum_of_squares(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Σ x², as `row_sum`."""
    if is_describing():
        return _described(x, dims)
    unit = _unit(x, dims)
    scaled = (x.to(torch.float64) * (2.0 ** (BITS // 2) / unit)).to(torch.float32)
    return _added((scaled * scaled).to(torch.float64), dims, unit * unit)


def sum_of_fractions(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Σ x, as `row_sum`, of numbers from 0 to 1, with 40 bits below 1. NaN counts as anything."""
    return _described(x, dims) if is_describing() else _added(x.to(torch.float64) * 2.0**BITS, dims)


def _described(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A tensor like such a sum, without its values."""
    return x.sum(list(dims), keepdim=True, dtype=torch.float64)


def _added(scaled: Tensor, dims: Sequence[int], unit: Tensor | None = None, bits: int = BITS) -> Tensor:
    return _restored(scaled.round().to(torch.int64).sum(list(dims), keepdim=True), unit, bits)


def _restored(total: Tensor, unit: Tensor | None, bits: int) -> Tensor:
    wide = total.to(torch.float64) * 2.0**-bits
    return wide if unit is None else torch.where(unit.isfinite(), wide * unit, math.nan)


def _unit(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The power of two below the largest magnitude, at least 2^-126, float64; not finite where an element is not."""
    amax = x.abs().amax(list(dims), keepdim=True)
    if not is_lowering():
        power = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)  # of NaN: infinity
        return power.to(torch.float64).clamp(min=_LEAST)
    # The unit in the first place: Rump, Ogita and Oishi 2008, "Accurate floating-point summation, part I".
    product = amax.to(torch.float64) * (2.0**52 + 1)
    return (product - (product - product * 2.0**-53)).clamp(min=_LEAST)
