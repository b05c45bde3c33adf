"""Batches of products, and groups whose sizes lie on the device: what each product of them is, by itself.

This is what they mean. It reads the sizes on the host; kernels do not.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_kernels.product import BLOCK, Product


class Part(NamedTuple):
    """One of the products, without elements where `product` is None, and where its result lies in that of all."""

    product: Product | None
    place: tuple[Any, ...]


def ends(offs: Tensor, size: int) -> Tensor:
    """(G,) int32: where each group ends. Offsets outside of 0 to `size` are brought there, and a group whose offset is
    less than one before it is empty."""
    return offs.clamp(0, size).cummax(0).values.to(torch.int32)


def is_stack(p: Product) -> bool:
    """Whether it is several products with scales, zero points or a bias of their own, or groups."""
    vectors = ("lhs_scale", "lhs_zero", "rhs_zero", "rhs_sum", "bias", "out_scale", "out_zero")
    return p.offs is not None or (p.lhs.dim() == 3 and any(getattr(p, name) is not None for name in vectors))


def run(p: Product, multiply: Callable[[Product], Tensor]) -> Tensor:
    """The products one after another, each by `multiply`."""
    out = torch.zeros(p.shape, dtype=p.out, device=p.lhs.device)
    for part in parts(p):
        if part.product is not None:
            out[part.place] = multiply(part.product)
    return out


def parts(p: Product) -> Iterator[Part]:
    """Each product by itself, of two matrices."""
    if p.offs is None:
        for i in range(p.count):
            yield Part(_of(p, i, p.lhs[i], p.rhs[i]), (i,))
        return
    start = 0
    for i, end in enumerate(ends(p.offs, p.extent).tolist()):
        own = slice(start, end)
        if p.groups == "rows":
            yield Part(_of(p, i, p.lhs[own], p.rhs[i], rows=own) if end > start else None, (own,))
        elif p.groups == "columns":
            yield Part(_of(p, i, p.lhs[i], p.rhs[:, own], columns=own) if end > start else None, (slice(None), own))
        else:
            yield Part(_of_depth(p, i, own), (i,))
        start = end


_ALL = slice(None)


def _of(p: Product, i: int, lhs: Tensor, rhs: Tensor, rows: slice = _ALL, columns: slice = _ALL) -> Product:
    """Product i, and the rows or columns of the vectors that run along all groups."""
    found: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "offs": None}
    for name in ("lhs_scale", "rhs_scale", "lhs_zero", "rhs_zero", "rhs_sum", "bias", "out_scale", "out_zero"):
        x = getattr(p, name)
        if x is None:
            continue
        runs = rows if name.startswith("lhs") else columns
        if p.scaling in ("block", "1x128") and name in ("lhs_scale", "rhs_scale"):
            found[name] = _block_scale(name, x, i, runs)
        elif runs == _ALL:
            found[name] = _vector(x, i)
        else:
            flat = x.reshape(-1)
            found[name] = flat if flat.numel() == 1 else flat[runs]
    return replace(p, **found)


def _vector(x: Tensor, i: int) -> Tensor:
    """The vector of product i, one-dimensional."""
    if x.dim() < 2:
        return x.reshape(-1)
    return x[i if x.shape[0] > 1 else 0].reshape(-1)


def _block_scale(name: str, x: Tensor, i: int, runs: slice) -> Tensor:
    """The rows of the left one, or the columns of one of 1 x 128 on the right, that a group has."""
    if x.dim() == 3:
        return x[i if x.shape[0] > 1 else 0]
    return x[runs] if name == "lhs_scale" else x[:, runs]


def _of_depth(p: Product, i: int, own: slice) -> Product:
    """The product of a part of K. Blocks of scales are those of all of K: zeros stand for what is not of the group."""
    if p.scaling != "1x128":
        return _of(p, i, p.lhs[:, own], p.rhs[own])
    assert p.lhs_scale is not None and p.rhs_scale is not None
    first, last = own.start // BLOCK, -(-own.stop // BLOCK) if own.stop > own.start else own.start // BLOCK
    inside = torch.zeros(p.k, dtype=torch.bool, device=p.lhs.device)
    inside[own] = True
    codes = slice(first * BLOCK, last * BLOCK)
    lhs, rhs = (
        x.view(torch.uint8).masked_fill(~w, 0).view(x.dtype) for x, w in ((p.lhs, inside), (p.rhs, inside[:, None]))
    )
    scales = {"lhs_scale": p.lhs_scale[:, first:last], "rhs_scale": p.rhs_scale[first:last]}
    return replace(p, lhs=lhs[:, codes], rhs=rhs[codes], offs=None, **scales)
