"""Products of random numbers for the kernels, and what the emulated ones must give."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import plain
from cutlass_kernels.product import INTEGERS, Product
from cutlass_kernels.variants import Tile, Variant
from tests.support import emulated


def fitting(form: Variant, tile: Tile) -> Variant | None:
    found = replace(form, tile=tile, tma=not tile.swap)
    return found if found.declines() is None else None


def integers(dtype: torch.dtype, *shape: int, extreme: bool = False) -> Tensor:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    found = torch.randint(low, high + 1, shape, dtype=torch.int16)
    return torch.where(found > (low + high) // 2, high, low).to(dtype) if extreme else found.to(dtype)


def floats(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def operand(dtype: torch.dtype, *shape: int) -> Tensor:
    return integers(dtype, *shape) if dtype in INTEGERS else floats(dtype, *shape)


def product(form: Variant, m: int, n: int, k: int, batch: int = 2) -> Product:
    """A product of a form, of random numbers. Groups are three, of which the second is empty, and end before the last
    rows, columns or steps of K."""
    size = {"rows": m, "columns": n, "k": k}.get(form.groups)
    count = batch if size is None else 3
    of_lhs, of_rhs = ((count,) if form.batched or form.groups == name else () for name in ("columns", "rows"))
    rows, columns = (((count,) if form.groups == "k" else lead) for lead in (of_lhs, of_rhs))  # of vectors
    fused: dict[str, Tensor | str | float | None] = {"requantize": form.requantize}
    if size is not None:
        fused["offs"] = torch.tensor([size // 2 + 3, size // 2, size - 7]).to(torch.int32)
    if form.scales in ("block", "1x128"):
        fused |= {
            "lhs_scale": torch.rand(*of_lhs, m, -(-k // 128)) + 0.5,
            "rhs_scale": torch.rand(*of_rhs, -(-k // 128), n if form.scales == "1x128" else -(-n // 128)) + 0.5,
        }
    elif form.scales:
        small = 1e-2 / k if form.is_integer else 1.0
        fused |= {"lhs_scale": (torch.rand(*rows, m, 1) + 0.5) * small, "rhs_scale": torch.rand(*columns, 1, n) + 0.5}
    if form.lhs_zero is not None:
        fused["lhs_zero"] = integers(form.lhs, m).to(form.lhs_zero)
    if form.rhs_zero is not None:
        fused["rhs_zero"] = integers(form.rhs, n).to(form.rhs_zero)
    if form.bias is not None:
        fused["bias"] = torch.randint(-1000, 1000, (n,)).to(form.bias)
    if form.requantize:
        fused |= {
            "out_scale": torch.rand(n) * 0.1 + 0.01,
            "out_zero": None if form.out_zero is None else integers(form.out, n).to(form.out_zero),
        }
    if form.bounded:
        fused |= {"low": -0.3, "high": 1.0}
    lhs, rhs = operand(form.lhs, *of_lhs, m, k), operand(form.rhs, *of_rhs, n, k).mT
    return Product(lhs, rhs, form.out, fast=not form.promoted, **fused)  # type: ignore[arg-type]


def check(p: Product, tile: Tile, **kwargs: Any) -> None:
    """The emulated kernel's result is exact for integers, and rounded as float32 is for floats."""
    got, wanted = emulated.run(p, tile, **kwargs), plain.reference(p)
    assert got.dtype == p.out and got.shape == wanted.shape
    if p.lhs.dtype in INTEGERS:
        assert torch.equal(got, wanted), f"{(got != wanted).sum()} of {got.numel()} differ"
        return
    bare = replace(p, out=torch.float32)
    exact = plain.reference(bare).double()
    absolute = replace(
        bare, lhs=p.lhs.float().abs().to(p.lhs.dtype), rhs=p.rhs.float().abs().to(p.rhs.dtype), bias=None
    )
    magnitude = plain.reference(absolute).double() + (0 if p.bias is None else p.bias.double().abs())
    error = (got.double() - exact).abs()
    # One rounding for each addition in float32, which the sums of magnitudes bound; then half a step of the result.
    half = torch.finfo(p.out).eps / 2
    least = torch.finfo(p.out).smallest_normal * half
    known = ~(exact.abs() > torch.finfo(p.out).max)
    of_result = torch.maximum(exact.abs(), got.double().abs()) * half + least
    assert (error <= magnitude * (p.k / 128 + 8) * 2.0**-23 + of_result)[known].all(), error.max()
