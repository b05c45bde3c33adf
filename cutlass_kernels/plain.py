"""The reference of a product in plain torch, and the epilogue for kernels that fuse none.

Integers: the sum of products is exact, modulo 2^32. It becomes float32, and each operation of the epilogue then rounds
to float32, in the order in which `scaled` and `requantized` write them.
"""

import torch
from torch import Tensor

from cutlass_kernels import groups
from cutlass_kernels.product import BLOCK, FLOAT4, GROUPS, Product

_FAR = 2.0**30  # beyond it all codes are clamped, and a zero point still fits beside it
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ---- from sums to results


def signed(x: Tensor) -> Tensor:
    """int8 as it is, and uint8 less 128, as int8."""
    return x if x.dtype == torch.int8 else (x ^ 0x80).view(torch.int8)


def from_signed(p: Product, lhs: Tensor, total: Tensor) -> Tensor:
    """Σ_k lhs · rhs from the sum of the `signed` factors, whose left one is `lhs`; int32, modulo 2^32.

    With p.lhs = a + 128 α and p.rhs = b + 128 β it is Σ a b + 128 α Σ p.rhs + 128 β Σ a."""
    if p.lhs.dtype == torch.uint8:
        total = total + 128 * column_sums(p)
    if p.rhs.dtype == torch.uint8:
        total = total + 128 * lhs.sum(-1, keepdim=True, dtype=torch.int32)
    return total


def along_rows(vector: Tensor) -> Tensor:
    """(M,), (M, 1) or one -> (M, 1)."""
    return vector.reshape(-1, 1)


def along_columns(vector: Tensor) -> Tensor:
    """(N,), (1, N) or one -> (1, N)."""
    return vector.reshape(1, -1)


def corrected(p: Product, total: Tensor) -> Tensor:
    """Σ_k lhs · rhs -> Σ_k (lhs - lhs_zero) (rhs - rhs_zero) + the bias if it is int32; int32, modulo 2^32."""
    if p.lhs_zero is not None:
        total = total - along_rows(p.lhs_zero.to(torch.int32)) * column_sums(p)
    if p.rhs_zero is not None:
        sums = p.lhs.sum(-1, keepdim=True, dtype=torch.int32)
        if p.lhs_zero is not None:
            sums = sums - p.k * along_rows(p.lhs_zero.to(torch.int32))
        total = total - sums * along_columns(p.rhs_zero.to(torch.int32))
    if p.bias is not None and p.bias.dtype == torch.int32:
        total = total + along_columns(p.bias)
    return total


def column_sums(p: Product) -> Tensor:
    """Σ_k rhs, ([B,] 1, N) int32."""
    if p.rhs_sum is not None and p.rhs_sum.numel() == p.n:
        return along_columns(p.rhs_sum)
    return p.rhs.sum(-2, keepdim=True, dtype=torch.int32)


def of_nothing(p: Product) -> Tensor:
    """The result where M, N, K or the batch is 0."""
    dtype = torch.int32 if p.is_integer else torch.float32
    total = torch.zeros((*p.lhs.shape[:-1], p.n), dtype=dtype, device=p.lhs.device)
    return finish(p, corrected(p, total))


def finish(p: Product, total: Tensor) -> Tensor:
    """The result of a corrected sum of integers, or of a float32 sum in which the scales of blocks are."""
    if p.requantize:
        return requantized(p, total)
    if p.out == torch.int32:
        return total
    y = scaled(p, total)
    if p.out == torch.float8_e4m3fn:  # a cast saturates from PyTorch 2.12 on only
        largest = torch.finfo(p.out).max
        y = y.clamp(-largest, largest)
    return y.to(p.out)


def scaled(p: Product, total: Tensor) -> Tensor:
    """total · lhs_scale · rhs_scale · global_scale + bias, in float32."""
    y = total.to(torch.float32)
    if p.scaling == "vector":
        assert p.lhs_scale is not None and p.rhs_scale is not None
        y = y * along_rows(p.lhs_scale) * along_columns(p.rhs_scale)
    if p.global_scale is not None:
        y = y * p.global_scale.reshape(1, 1)
    if p.bias is not None and p.bias.dtype != torch.int32:
        y = y + along_columns(p.bias.to(torch.float32))
    return y


def requantized(p: Product, total: Tensor) -> Tensor:
    """Codes: round(y / out_scale) or round(total · M), + out_zero, in the ranges of the dtype and of low and high."""
    assert p.lhs_scale is not None and p.rhs_scale is not None and p.out_scale is not None
    step, zero = along_columns(p.out_scale), 0 if p.out_zero is None else along_columns(p.out_zero.to(torch.int32))
    bounds = [(torch.maximum, p.low), (torch.minimum, p.high)]
    if p.requantize == "division":
        y = scaled(p, total)
        for limit, bound in bounds:
            y = y if bound is None else limit(y, torch.full_like(y, bound))
        return _codes(y / step, zero, p.out).to(p.out)
    multiplier = along_rows(p.lhs_scale) * along_columns(p.rhs_scale) / step
    codes = _codes(total.to(torch.float32) * multiplier, zero, p.out)
    for limit, bound in bounds:
        if bound is not None:
            codes = limit(codes, _codes(torch.full_like(step, bound) / step, zero, p.out))
    return codes.to(p.out)


def _codes(steps: Tensor, zero: Tensor | int, dtype: torch.dtype) -> Tensor:
    """round(steps) + zero, ties to even, in the range of the dtype; int32. NaN is the zero point."""
    steps = steps.round().clamp(-_FAR, _FAR)
    whole = torch.where(steps == steps, steps, 0.0).to(torch.int32)
    return (whole + zero).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


# ---- the reference


def decoded(codes: Tensor, dtype: torch.dtype, along: int = -1) -> Tensor:
    """The numbers of float codes; fp4 has two along dimension `along`, the first in the low bits."""
    if codes.dtype != FLOAT4:
        return codes.to(dtype)
    halves = codes.view(torch.uint8)
    nibbles = torch.stack((halves & 15, halves >> 4), dim=along)
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=dtype, device=codes.device)[nibbles.to(torch.int64)]
    shape = list(codes.shape)
    shape[along] *= 2
    return values.reshape(shape)


def dequantized(p: Product, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors as numbers, the scales of blocks and groups in them."""
    lhs, rhs = decoded(p.lhs, dtype, -1), decoded(p.rhs, dtype, -2)
    if p.scaling not in ("block", "1x128", "group"):
        return lhs, rhs
    assert p.lhs_scale is not None and p.rhs_scale is not None
    inner = GROUPS.get(p.lhs_scale.dtype, BLOCK)
    outer = BLOCK if p.scaling == "block" else 1
    by_row = p.lhs_scale.to(dtype).repeat_interleave(inner, 1)[:, : lhs.shape[1]]
    by_column = p.rhs_scale.to(dtype).repeat_interleave(inner, 0)[: rhs.shape[0]]
    return lhs * by_row, rhs * by_column.repeat_interleave(outer, 1)[:, : rhs.shape[1]]


def reference(p: Product) -> Tensor:
    """The result, on any device: sums in float64, exact for integers, whose sums stay below 2^53."""
    if groups.is_stack(p):
        return groups.run(p, reference)
    if not p.is_integer:
        lhs, rhs = dequantized(p, torch.float64)
        return finish(p, (lhs @ rhs).to(torch.float32))
    total = (p.lhs.to(torch.float64) @ p.rhs.to(torch.float64)).to(torch.int64)
    return finish(p, corrected(p, total.to(torch.int32)))
