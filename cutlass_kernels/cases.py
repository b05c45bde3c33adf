"""Products to check kernels with: forms, adversarial values and strides, and results between guards.

A form is a kind of product with its fused operations; a case has a form, a tile, a shape, values and strides. The first
use of a kernel on a GPU is checked with them (cutlass_kernels.trial_products), and so are benchmarks.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import hopper
from cutlass_kernels.product import BLOCK, FLOATS, INTEGERS, Product
from cutlass_kernels.variants import Tile, Variant, short

S8, U8, S32 = torch.int8, torch.uint8, torch.int32
E4M3, E5M2 = FLOATS
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GROUPS = 5
GUARD, PATTERNS = 4096, (0xA5, 0x5A)  # guard bytes on both sides of a result, and their fill patterns


@dataclass(frozen=True)
class Form:
    """A kind of product with its fused operations.

    scales is "" for none, "vector", "one" for all, "block" or "1x128"; zeros names the factors with zero points, of
    dtype zero; groups, of which there are GROUPS, names the grouped dimension.
    """

    name: str
    lhs: torch.dtype = S8
    rhs: torch.dtype = S8
    out: torch.dtype = S32
    scales: str = ""
    zeros: str = ""
    bias: torch.dtype | None = None
    requantize: str = ""
    bounded: bool = False
    fast: bool = False
    batch: int = 0
    zero: torch.dtype = S32
    out_zero: torch.dtype | None = S32
    groups: str = ""

    @property
    def is_integer(self) -> bool:
        return self.lhs in INTEGERS


def form_of(v: Variant) -> Form:
    """The form of a kernel, ignoring its tile."""
    fused = [name for name in ("bounded", "promoted") if getattr(v, name)]
    fused += [f"groups of {v.groups}"] * bool(v.groups) + ["in batches"] * v.batched
    fused += [f"scales of {v.scales}"] * (v.scales in ("block", "1x128"))
    zeros = {name: dtype for name in ("lhs_zero", "rhs_zero", "out_zero") if (dtype := getattr(v, name))}
    fused += [f"{name} of {short(dtype)}" for name, dtype in zeros.items()]
    bias = f"bias of {short(v.bias)}" if v.bias else ""
    return Form(
        ", ".join(filter(None, (f"{short(v.lhs)} by {short(v.rhs)} -> {short(v.out)}", bias, v.requantize, *fused))),
        v.lhs,
        v.rhs,
        v.out,
        v.scales,
        " ".join(name for name in ("lhs", "rhs") if getattr(v, f"{name}_zero")),
        v.bias,
        v.requantize,
        v.bounded,
        fast=not (v.is_integer or v.adds_up),
        zero=v.lhs_zero or v.rhs_zero or S32,
        out_zero=v.out_zero if v.requantize else S32,
        batch=2 if v.batched else 0,
        groups=v.groups,
    )


@dataclass(frozen=True)
class Case:
    """A product to check.

    Values are "random" codes, "extreme" ones, "whole" small numbers, or "special": random ones with NaN and infinities.
    Strides are "ready" for the copy engine, or such that factors must be copied.
    """

    form: Form
    tile: Tile | None
    shape: tuple[int, int, int]
    values: str = "random"
    strides: str = "ready"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.form.name}, {sizes}, {self.tile or 'tile by shape'}, {self.values}, {self.strides}"

    def product(self, device: str) -> Product:
        f, (m, n, k) = self.form, self.shape
        make = _Maker(device, zlib.crc32(str(self).encode()))
        of_lhs, of_rhs = ((f.batch,) * bool(f.batch) + (GROUPS,) * (f.groups == own) for own in ("columns", "rows"))
        fused: dict[str, Any] = {"fast": f.fast}
        lhs = _laid(make.codes(f.lhs, (*of_lhs, m, k), self.values), self.strides)
        rhs = _laid(make.codes(f.rhs, (*of_rhs, n, k), self.values), self.strides).mT
        if f.groups:  # include empty groups, and ends out of range
            size = {"rows": m, "columns": n, "k": k}[f.groups]
            fused["offs"] = make.integers((GROUPS,), -size // 8, size + size // 4 + 1, S32)
        if f.scales in ("block", "1x128"):
            steps, columns = -(-k // BLOCK), n if f.scales == "1x128" else -(-n // BLOCK)
            fused |= {
                "lhs_scale": make.powers((*of_lhs, m, steps)),
                "rhs_scale": make.powers((*of_rhs, steps, columns)),
            }
        elif f.scales:
            rows, columns = (m, n) if f.scales == "vector" else (1, 1)
            size = 2.0**-6 if f.is_integer else 2.0**-3
            own = (GROUPS,) * (f.groups == "k")
            fused |= {
                "lhs_scale": make.scales((*(own or of_lhs), rows, 1), size),
                "rhs_scale": make.scales((*(own or of_rhs), 1, columns), 1.0),
            }
        for name, size in (("lhs", m), ("rhs", n)):
            if name in f.zeros:
                low, high = (-128, 256) if f.zero == S32 else (torch.iinfo(f.zero).min, torch.iinfo(f.zero).max + 1)
                fused[f"{name}_zero"] = make.integers((size,), low, high, f.zero)
        if f.bias is not None:
            fused["bias"] = make.integers((n,), -5000, 5000, f.bias)
        if f.requantize:
            fused |= {"requantize": f.requantize, "out_scale": make.scales((n,), 40.0 * math.sqrt(k))}
            fused["out_zero"] = None if f.out_zero is None else make.integers((n,), 0, 100, f.out_zero)
        if f.bounded:
            fused |= {"low": -300.0 * math.sqrt(k), "high": 900.0 * math.sqrt(k)}
        return Product(lhs, rhs, f.out, **fused)

    def variant(self) -> Variant | str:
        return hopper.variant_of(self.product("meta"), self.tile)


class _Maker:
    """Creates tensors from a seed; on the device "meta" without data."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
        made = torch.randint(low, high, shape, generator=self.generator, device=self.device)
        return made.to(dtype)

    def powers(self, shape: Sequence[int]) -> Tensor:
        return self.integers(shape, -2, 3, F32).exp2()

    def scales(self, shape: Sequence[int], size: float) -> Tensor:
        return (torch.rand(shape, generator=self.generator, device=self.device) + 0.25) * size

    def codes(self, dtype: torch.dtype, shape: Sequence[int], values: str) -> Tensor:
        if dtype in INTEGERS:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            drawn = self.integers(shape, low, high + 1, dtype)
            if values == "extreme":  # for whole rows
                which = self.integers((*shape[:-1], 1), 0, 3, S32)
                drawn = drawn.masked_fill(which == 0, low).masked_fill(which == 1, high)
            return drawn
        if values == "whole":
            return self.integers(shape, -2, 3, F32).to(dtype)
        if values == "extreme":
            return (self.integers(shape, 0, 2, F32) * 2 - 1).mul(torch.finfo(dtype).max).to(dtype)
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        if values == "special":  # in a quarter of the rows
            rare = self.integers((*shape[:-1], 1), 0, 4, S32) == 0
            at = self.integers(shape, 0, shape[-1], S32).masked_fill(~rare, -1)
            found = [math.nan] if dtype == E4M3 else [math.nan, math.inf, -math.inf]
            for i, number in enumerate(found):
                drawn = drawn.masked_fill(at == i, number)
        return drawn.to(dtype)


STRIDES = ("ready", "transposed", "sliced", "misaligned", "every other row", "one row")


def _laid(x: Tensor, strides: str) -> Tensor:
    """(..., rows, k) with other strides."""
    *lead, rows, k = x.shape
    if strides == "transposed":
        return x.mT.contiguous().mT
    if strides == "sliced":  # out of wider rows
        wide = x.new_empty((*lead, rows, -(-k // 16) * 16 + 48))
        return wide[..., 16 : 16 + k].copy_(x)
    if strides == "misaligned":
        return x.new_empty(x.numel() + 16)[1 : 1 + x.numel()].view(x.shape).copy_(x)
    if strides == "every other row":
        return x.new_empty((*lead, 2 * rows, k))[..., ::2, :].copy_(x)
    if strides == "one row":
        return x[..., :1, :].expand(x.shape)
    assert strides == "ready", strides
    return x


# ---- computing it


def guarded(p: Product, tile: Tile | None, few: int | None = None) -> Tensor:
    """The product by the Hopper kernel, computed twice with different patterns in memory, to check that all of it is
    written and nothing around it. The second time on `few` multiprocessors, so that blocks have several tiles each.
    """

    def surrounded(pattern: int, variant: Variant) -> Callable[..., None]:
        kernel = hopper.compiled(variant)

        def run(lhs: Tensor, rhs: Tensor, out: Tensor, *rest: Any) -> None:
            rest = (*rest[:-1], few) if few and pattern == PATTERNS[1] else rest
            size = out.numel() * out.element_size()
            memory = torch.full((size + 2 * GUARD,), pattern, dtype=U8, device=out.device)
            inner = memory[GUARD : GUARD + size].view(out.dtype).view(out.shape)
            kernel(lhs, rhs, inner, *rest)
            out.copy_(inner)
            guards = torch.cat((memory[:GUARD], memory[-GUARD:]))
            assert bool((guards == pattern).all()), "memory outside the result was written"

        return run

    results = []
    fused = {name: value for name, value in vars(p).items() if name not in ("lhs", "rhs", "out")}
    for pattern in PATTERNS:
        load = functools.partial(surrounded, pattern)
        results.append(hopper.plan(p, tile, load)(p.lhs, p.rhs, p.out, **fused))
    assert torch.equal(*(r.view(U8) for r in results)), "two runs differ: elements that were not written, or a race"
    return results[0]
