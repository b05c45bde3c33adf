"""Sums of rows in fixed point: exact integers, so the order of addition does not matter.

With 2^E the largest power of two that is at most the largest magnitude of a row,

    sum             q_i = rint(x_i · 2^(40 - E)),                Σ q_i · 2^(E - 40)
    sum of squares  q_i = rint(float32((x_i · 2^(20 - E))²)),    Σ q_i · 2^(2E - 40)

where each q is an int64. Parts below 2^-41 of the largest magnitude are rounded away: for n elements at most n · 2^-41
of it. A tree of float32 sums would give the same bits everywhere as well, but needs as many operations in a graph as
levels, whose number a symbolic length does not fix.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat.export import is_lowering
from hop.compat.tracing import is_describing

BITS = 40
"""Bits below the largest magnitude of a row."""

MOST = 2**22
"""The largest number of elements in a row for which an int64 cannot overflow."""

_LEAST = 2.0**-126


def check(caller: str, op: object, sizes: Sequence[int]) -> None:
    """Raise ValueError for rows with more elements than can be summed; `sizes` are those of the summed dimensions."""
    n = math.prod(sizes)
    if isinstance(n, int) and n > MOST:
        raise ValueError(
            f"{caller}: {op} sums rows of at most 2^22 elements in fixed point, got {n}; run it in float64, or outside "
            "of hop.scaled"
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


def _bits(sizes: Sequence[int]) -> int:
    n = math.prod(sizes)
    return min(BITS, 62 - (n - 1).bit_length()) if isinstance(n, int) else BITS


def row_sum_of_squares(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Σ x², under the rules of `row_sum`."""
    if is_describing():
        return _described(x, dims)
    unit = _unit(x, dims)
    scaled = (x.to(torch.float64) * (2.0 ** (BITS // 2) / unit)).to(torch.float32)
    return _added((scaled * scaled).to(torch.float64), dims, unit * unit)


def sum_of_fractions(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Σ x for values from 0 to 1 with 40 fractional bits, under the rules of `row_sum`. NaN
    gives an arbitrary result.
    """
    return _described(x, dims) if is_describing() else _added(x.to(torch.float64) * 2.0**BITS, dims)


def _described(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A meta-like tensor with the shape and dtype of such a sum."""
    return x.sum(list(dims), keepdim=True, dtype=torch.float64)


def _added(scaled: Tensor, dims: Sequence[int], unit: Tensor | None = None, bits: int = BITS) -> Tensor:
    return _restored(scaled.round().to(torch.int64).sum(list(dims), keepdim=True), unit, bits)


def _restored(total: Tensor, unit: Tensor | None, bits: int) -> Tensor:
    wide = total.to(torch.float64) * 2.0**-bits
    return wide if unit is None else torch.where(unit.isfinite(), wide * unit, math.nan)


def _unit(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest power of two at most the largest magnitude, at least 2^-126, float64; not finite if an element is
    not.
    """
    amax = x.abs().amax(list(dims), keepdim=True)
    if not is_lowering():
        power = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)  # infinity for NaN
        return power.to(torch.float64).clamp(min=_LEAST)
    # The unit in the first place: Rump, Ogita and Oishi 2008, "Accurate floating-point summation, part I".
    product = amax.to(torch.float64) * (2.0**52 + 1)
    return (product - (product - product * 2.0**-53)).clamp(min=_LEAST)
