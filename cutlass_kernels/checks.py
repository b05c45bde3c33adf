"""What a product may be: dtypes, shapes and devices, the same for tensors with and without data."""

from typing import Any

import torch
from torch import Tensor

from cutlass_kernels.product import BLOCK, FLOAT4, FLOATS, GROUPS, INTEGERS, REALS, Product, is_vector

_INTEGRAL = (torch.int32, torch.int8, torch.uint8)


def check(p: Product) -> None:
    """Raise TypeError or ValueError, naming the argument, if `p` is no product that Product describes."""
    _check_factors(p)
    _check_scales(p)
    _check_integers(p)
    _check_bias(p)
    _check_output(p)
    for name, x in _tensors(p).items():
        if x.device != p.lhs.device:
            raise ValueError(f"mm: {name} is on {x.device} and lhs on {p.lhs.device}; they must be on one device")


def _tensors(p: Product) -> dict[str, Tensor]:
    return {name: x for name, x in vars(p).items() if isinstance(x, Tensor)}


def _check_factors(p: Product) -> None:
    groups = (INTEGERS, FLOATS, (FLOAT4,))
    if not any(p.lhs.dtype in g and p.rhs.dtype in g for g in groups):
        raise TypeError(
            "mm: lhs and rhs must be two of int8 and uint8, of float8_e4m3fn and float8_e5m2, or of float4_e2m1fn_x2; "
            f"got {p.lhs.dtype} and {p.rhs.dtype}"
        )
    lhs, rhs = p.lhs.shape, p.rhs.shape
    if len(lhs) != len(rhs) or len(lhs) not in (2, 3):
        raise ValueError(
            f"mm: lhs and rhs must be two matrices, or two batches of them; got {tuple(lhs)}, {tuple(rhs)}"
        )
    if lhs[-1] != rhs[-2] or (len(lhs) == 3 and lhs[0] != rhs[0]):
        raise ValueError(f"mm: lhs and rhs must be ([B,] M, K) and ([B,] K, N); got {tuple(lhs)} and {tuple(rhs)}")


def _check_scales(p: Product) -> None:
    if (p.lhs_scale is None) != (p.rhs_scale is None):
        raise ValueError(
            f"mm: lhs_scale and rhs_scale come together; {'rhs' if p.lhs_scale is not None else 'lhs'}_scale is None"
        )
    if p.lhs_scale is None or p.rhs_scale is None:
        if p.lhs.dtype == FLOAT4:
            raise ValueError("mm: factors of float4_e2m1fn_x2 need lhs_scale and rhs_scale")
        return
    if p.lhs_scale.dtype != p.rhs_scale.dtype:
        raise TypeError(
            f"mm: lhs_scale and rhs_scale must have one dtype, got {p.lhs_scale.dtype} and {p.rhs_scale.dtype}"
        )
    size = GROUPS.get(p.lhs_scale.dtype)
    if size is None:
        _check_wide_scales(p, p.lhs_scale, p.rhs_scale)
        return
    if p.is_integer or (size == 16 and p.lhs.dtype != FLOAT4) or p.lhs.dim() == 3:
        raise TypeError(
            "mm: lhs_scale and rhs_scale of float8_e8m0fnu are for two matrices of floats, and those of float8_e4m3fn "
            f"for two of float4_e2m1fn_x2; got {p.lhs_scale.dtype} for {p.lhs.dtype} of {p.lhs.dim()} dimensions"
        )
    steps = -(-p.depth // size)
    for name, x, shape in (("lhs_scale", p.lhs_scale, (p.m, steps)), ("rhs_scale", p.rhs_scale, (steps, p.n))):
        if tuple(x.shape) != shape:
            raise ValueError(f"mm: {name} must have shape {shape} for groups of {size}, got {tuple(x.shape)}")


def _check_wide_scales(p: Product, lhs: Tensor, rhs: Tensor) -> None:
    """Those in float32."""
    if lhs.dtype != torch.float32 or p.lhs.dtype == FLOAT4:
        raise TypeError(
            "mm: lhs_scale and rhs_scale must be float32, or float8_e8m0fnu or float8_e4m3fn for groups along K, which "
            f"float4_e2m1fn_x2 needs; got {lhs.dtype} for {p.lhs.dtype}"
        )
    steps, columns = -(-p.k // BLOCK), -(-p.n // BLOCK)
    shapes = (tuple(lhs.shape), tuple(rhs.shape))
    if p.scaling == "block" and (shapes != ((p.m, steps), (steps, columns)) or p.is_integer or p.lhs.dim() == 3):
        raise ValueError(
            f"mm: lhs_scale and rhs_scale must hold one value, or one for each of {p.m} rows and {p.n} columns; "
            f"matrices of floats may have shapes {(p.m, steps)} and {(steps, columns)} for blocks of {BLOCK}; got "
            f"{shapes}"
        )


def _check_vector(name: str, x: Tensor, size: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """One value, or one for each of `size`, in one dimension or beside others of size 1."""
    if x.dtype not in dtypes:
        raise TypeError(f"mm: {name} must be of {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if not is_vector(x, size):
        raise ValueError(f"mm: {name} must hold one value, or one for each of {size}; got shape {tuple(x.shape)}")


def _check_integers(p: Product) -> None:
    vectors = (("lhs_zero", p.lhs_zero, p.m), ("rhs_zero", p.rhs_zero, p.n), ("rhs_sum", p.rhs_sum, p.n))
    for name, x, size in vectors:
        if x is None:
            continue
        if not p.is_integer or p.lhs.dim() == 3:
            raise ValueError(
                f"mm: {name} is for two matrices of integers, got {p.lhs.dtype} of {p.lhs.dim()} dimensions"
            )
        _check_vector(name, x, size, (torch.int32,) if name == "rhs_sum" else _INTEGRAL)
    if p.rhs_sum is not None and p.rhs_sum.numel() != p.n:
        raise ValueError(f"mm: rhs_sum must hold one value for each of {p.n} columns, got {p.rhs_sum.numel()}")


def _check_bias(p: Product) -> None:
    if p.bias is None:
        return
    allowed = (torch.int32, *REALS) if p.is_integer and p.lhs_scale is not None else (torch.int32,)
    allowed = allowed if p.is_integer else REALS
    _check_vector("bias", p.bias, p.n, allowed)
    if p.bias.numel() != p.n or p.lhs.dim() == 3:
        raise ValueError(
            f"mm: bias must hold one value for each of {p.n} columns of one product, got {tuple(p.bias.shape)}"
        )


def _check_output(p: Product) -> None:
    if p.requantize not in ("", "division", "multiplier"):
        raise ValueError(f'mm: requantize must be "", "division" or "multiplier", got {p.requantize!r}')
    if (p.requantize != "") != (p.out_scale is not None):
        raise ValueError("mm: out_scale is for requantize, which needs it; give both or neither")
    if p.requantize:
        allowed: tuple[torch.dtype, ...] = INTEGERS
        if not p.is_integer or p.lhs_scale is None:
            raise ValueError("mm: requantize is for factors of integers with scales")
        if p.requantize == "multiplier" and p.bias is not None and p.bias.dtype != torch.int32:
            raise TypeError(f'mm: bias must be int32 with requantize="multiplier", got {p.bias.dtype}')
        assert p.out_scale is not None
        _check_vector("out_scale", p.out_scale, p.n, (torch.float32,))
        if p.out_zero is not None:
            _check_vector("out_zero", p.out_zero, p.n, _INTEGRAL)
    elif p.out_zero is not None or p.low is not None or p.high is not None:
        raise ValueError("mm: out_zero, low and high are for requantize")
    else:
        allowed = (
            (torch.int32,) if p.is_integer and p.lhs_scale is None else (*REALS, *(() if p.is_integer else FLOATS))
        )
    if p.out not in allowed:
        raise TypeError(f"mm: out_dtype must be of {' or '.join(map(str, allowed))} here, got {p.out}")
