"""The expected results of products: integers exactly, floats from sums in float64 with an error bound."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from cutlass_kernels import groups
from cutlass_kernels.product import BLOCK, INTEGERS, Product


def compare(result: Tensor, p: Product, exact: bool) -> float:
    """Fail unless a result is right; returns its largest error relative to the bound."""
    assert result.dtype == p.out and result.shape == p.shape and result.is_contiguous()
    expected, slack = _expected(p)
    found, wanted = result.to(torch.float64), _cast(expected, p.out).to(torch.float64)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if not exact:
        info = torch.finfo(p.out)
        slack = slack + expected.abs() * info.eps + info.smallest_normal * info.eps
        near = (found - expected.to(torch.float64)).abs() <= slack
        same = same | near
    if not bool(same.all()):
        where = (~same).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{len(where)} of {same.numel()} elements are wrong, the first at {first}: {found[first].item()} and not "
            f"{wanted[first].item()}; the last at {tuple(where[-1].tolist())}"
        )
    off = ((found - expected.to(torch.float64)).abs() / slack).nan_to_num(0.0, 0.0, 0.0) if not exact else found[:0]
    return round(off.max().item(), 4) if off.numel() else 0.0


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, saturating at e4m3's largest value."""
    return x.clamp(-448.0, 448.0).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def _expected(p: Product) -> tuple[Tensor, Tensor]:
    """The result before its last cast, and the error that the summation of floats may cause in it, in float64."""
    if groups.is_stack(p):
        found = torch.zeros(p.shape, dtype=torch.float64, device=p.lhs.device)
        slack = torch.zeros_like(found)
        for part in groups.parts(p):
            if part.product is not None:
                found[part.place], slack[part.place] = _expected(part.product)
        return found, slack
    lhs, rhs = p.lhs.to(torch.float64), p.rhs.to(torch.float64)
    if p.lhs.dtype in INTEGERS:
        total = _wrapped(lhs @ rhs)  # exact: below 2^53
        return _finished(p, total), torch.zeros((), dtype=torch.float64, device=lhs.device)
    promised = 2.0**-8 if p.fast else 2.0**-10  # relative to the sum of magnitudes; the matrix unit keeps 14 bits
    if _is_block(p):
        assert p.lhs_scale is not None and p.rhs_scale is not None
        lhs = lhs * _spread(p.lhs_scale.to(torch.float64), 1)[:, : p.k]
        scale = _spread(p.rhs_scale.to(torch.float64), 0)[: p.k]
        rhs = rhs * (scale if scale.shape[1] == p.n else _spread(scale, 1)[:, : p.n])
        p = replace(p, lhs_scale=None, rhs_scale=None)
    magnitude = lhs.abs() @ rhs.abs()
    scale = 1.0
    if p.lhs_scale is not None and p.rhs_scale is not None:
        scale = p.lhs_scale.reshape(-1, 1).to(torch.float64) * p.rhs_scale.reshape(1, -1).to(torch.float64)
    return _finished(p, (lhs @ rhs).to(torch.float32)), magnitude * scale * promised


def _is_block(p: Product) -> bool:
    return p.lhs_scale is not None and p.lhs_scale.dim() == 2 and p.lhs_scale.shape[1] != 1


def _spread(x: Tensor, dim: int) -> Tensor:
    return x.repeat_interleave(BLOCK, dim)


def _wrapped(x: Tensor) -> Tensor:
    """Integers modulo 2^32, as int32."""
    return x.to(torch.int64).to(torch.int32)


def _finished(p: Product, total: Tensor) -> Tensor:
    """The epilogue: integers modulo 2^32, then float32, each operation rounded separately."""
    if p.lhs_zero is not None or p.rhs_zero is not None:
        a, b = p.lhs.to(torch.float64), p.rhs.to(torch.float64)
        a = a if p.lhs_zero is None else a - p.lhs_zero.reshape(-1, 1)
        b = b if p.rhs_zero is None else b - p.rhs_zero.reshape(1, -1)
        total = _wrapped(a @ b)
    if p.bias is not None and p.bias.dtype == torch.int32:
        total = total + p.bias.reshape(1, -1)
    if p.lhs_scale is None or p.rhs_scale is None:
        return (
            total if p.bias is None or p.bias.dtype == torch.int32 else total + p.bias.to(torch.float32).reshape(1, -1)
        )
    row, column = p.lhs_scale.reshape(-1, 1), p.rhs_scale.reshape(1, -1)
    low, high = (math.inf * sign if b is None else b for b, sign in ((p.low, -1), (p.high, 1)))
    if p.requantize == "multiplier":
        assert p.out_scale is not None
        codes = _code(p, total.to(torch.float32) * (row * column / p.out_scale))
        ends = [_code(p, torch.full_like(p.out_scale, bound) / p.out_scale) for bound in (low, high)]
        return codes.clamp(ends[0], ends[1])
    y = total.to(torch.float32) * row * column
    if p.bias is not None and p.bias.dtype != torch.int32:
        y = y + p.bias.to(torch.float32).reshape(1, -1)
    return y if p.out_scale is None else _code(p, y.clamp(low, high) / p.out_scale)


def _code(p: Product, steps: Tensor) -> Tensor:
    info = torch.iinfo(p.out)
    zero = 0 if p.out_zero is None else p.out_zero.to(torch.int32)
    return (steps.round().clamp(-(2.0**30), 2.0**30).to(torch.int32) + zero).clamp(info.min, info.max)
