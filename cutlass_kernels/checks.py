"""Check a product's dtypes, shapes and devices, for tensors with and without data."""

import math

import torch
from torch import Tensor

from cutlass_kernels.product import BLOCK, FLOAT4, FLOATS, GROUPS, INTEGERS, REALS, Product

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
    if p.offs is not None:
        _check_offs(p, p.offs)
    elif len(lhs) != len(rhs) or len(lhs) not in (2, 3):
        raise ValueError(
            f"mm: lhs and rhs must be two matrices, or two batches of them; got {tuple(lhs)}, {tuple(rhs)}"
        )
    elif len(lhs) == 3 and lhs[0] != rhs[0]:
        raise ValueError(f"mm: lhs and rhs must be ([B,] M, K) and ([B,] K, N); got {tuple(lhs)} and {tuple(rhs)}")
    if lhs[-1] != rhs[-2]:
        raise ValueError(f"mm: lhs and rhs must be ([B,] M, K) and ([B,] K, N); got {tuple(lhs)} and {tuple(rhs)}")


def _check_offs(p: Product, offs: Tensor) -> None:
    lhs, rhs = p.lhs.shape, p.rhs.shape
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TypeError(f"mm: offs must be int32 of one dimension, got {offs.dtype} of shape {tuple(offs.shape)}")
    if (len(lhs), len(rhs)) not in ((2, 3), (3, 2), (2, 2)) or p.lhs.dtype == FLOAT4:
        raise ValueError(
            "mm: with offs, lhs and rhs must be (M, K) and (G, K, N), (G, M, K) and (K, N), or (M, K) and (K, N), of 8 "
            f"bits; got {tuple(lhs)} and {tuple(rhs)} of {p.lhs.dtype}"
        )
    groups = rhs[0] if len(rhs) == 3 else lhs[0] if len(lhs) == 3 else offs.shape[0]
    if offs.shape[0] != groups:
        raise ValueError(f"mm: offs must hold the end of each of {groups} groups, got {offs.shape[0]}")
    for name in ("lhs_zero", "rhs_zero", "rhs_sum"):
        if p.groups == "k" and getattr(p, name) is not None:
            raise ValueError(f"mm: {name} is for products whose K is not in groups")


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
    if p.is_integer or (size == 16 and p.lhs.dtype != FLOAT4) or p.lhs.dim() == 3 or p.offs is not None:
        raise TypeError(
            "mm: lhs_scale and rhs_scale of float8_e8m0fnu are for two matrices of floats, and those of float8_e4m3fn "
            f"for two of float4_e2m1fn_x2; got {p.lhs_scale.dtype} for {p.lhs.dtype} of {p.lhs.dim()} dimensions"
        )
    steps = -(-p.depth // size)
    for name, x, shape in (("lhs_scale", p.lhs_scale, (p.m, steps)), ("rhs_scale", p.rhs_scale, (steps, p.n))):
        if tuple(x.shape) != shape:
            raise ValueError(f"mm: {name} must have shape {shape} for groups of {size}, got {tuple(x.shape)}")


def _check_wide_scales(p: Product, lhs: Tensor, rhs: Tensor) -> None:
    """Check scales in float32."""
    if lhs.dtype != torch.float32 or p.lhs.dtype == FLOAT4:
        raise TypeError(
            "mm: lhs_scale and rhs_scale must be float32, or float8_e8m0fnu or float8_e4m3fn for groups along K, which "
            f"float4_e2m1fn_x2 needs; got {lhs.dtype} for {p.lhs.dtype}"
        )
    if p.scaling == "vector":
        return
    steps, rows = -(-p.k // BLOCK), p.scaling == "1x128"
    columns = p.n if rows else -(-p.n // BLOCK)
    lead = {name: (p.count,) if p.has_own(name) and p.groups != "k" else () for name in ("lhs_scale", "rhs_scale")}
    wanted = ((*lead["lhs_scale"], p.m, steps), (*lead["rhs_scale"], steps, columns))
    shapes = (tuple(lhs.shape), tuple(rhs.shape))
    if shapes != wanted or p.is_integer or (p.groups in ("columns", "k") and not rows):
        blocks = "1 x 128 of rhs" if rows else "128 x 128 of rhs"
        raise ValueError(
            f"mm: lhs_scale and rhs_scale must hold one value, or one for each of {p.m} rows and {p.n} columns"
            f"{_each(p)}; factors of floats may have shapes {wanted[0]} and {wanted[1]} for blocks of {BLOCK}, of "
            f"{blocks}, which is 1 x {BLOCK} where columns or K have groups; got {shapes}"
        )


def _each(p: Product) -> str:
    return f", of each of {p.count} products" if p.offs is not None or p.lhs.dim() == 3 else ""


def _check_vector(p: Product, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check for one value, or one per row or column, in one dimension or next to dimensions of size 1."""
    if x.dtype not in dtypes:
        raise TypeError(f"mm: {name} must be of {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if not p.is_vector(name, x):
        size = p.m if name.startswith("lhs") else p.n
        raise ValueError(
            f"mm: {name} must hold one value, or one for each of {size}{_each(p)}; got shape {tuple(x.shape)}"
        )


def _is_full(p: Product, name: str, x: Tensor) -> bool:
    """Whether a vector of columns holds a value for each."""
    own = p.has_own(name) and x.dim() > 1
    return math.prod(x.shape[1:] if own else x.shape) == p.n


def _check_integers(p: Product) -> None:
    for name, x in (("lhs_zero", p.lhs_zero), ("rhs_zero", p.rhs_zero), ("rhs_sum", p.rhs_sum)):
        if x is None:
            continue
        if not p.is_integer:
            raise ValueError(f"mm: {name} is for factors of integers, got {p.lhs.dtype}")
        _check_vector(p, name, x, (torch.int32,) if name == "rhs_sum" else _INTEGRAL)
    if p.rhs_sum is not None and not _is_full(p, "rhs_sum", p.rhs_sum):
        raise ValueError(f"mm: rhs_sum must hold one value for each of {p.n} columns, got {tuple(p.rhs_sum.shape)}")


def _check_bias(p: Product) -> None:
    if p.bias is None:
        return
    allowed = (torch.int32, *REALS) if p.is_integer and p.lhs_scale is not None else (torch.int32,)
    allowed = allowed if p.is_integer else REALS
    _check_vector(p, "bias", p.bias, allowed)
    if not _is_full(p, "bias", p.bias):
        raise ValueError(f"mm: bias must hold one value for each of {p.n} columns, got {tuple(p.bias.shape)}")


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
        _check_vector(p, "out_scale", p.out_scale, (torch.float32,))
        if p.out_zero is not None:
            _check_vector(p, "out_zero", p.out_zero, _INTEGRAL)
    elif p.out_zero is not None or p.low is not None or p.high is not None:
        raise ValueError("mm: out_zero, low and high are for requantize")
    else:
        allowed = (
            (torch.int32,) if p.is_integer and p.lhs_scale is None else (*REALS, *(() if p.is_integer else FLOATS))
        )
    if p.out not in allowed:
        raise TypeError(f"mm: out_dtype must be of {' or '.join(map(str, allowed))} here, got {p.out}")
