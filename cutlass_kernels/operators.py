"""The leaf operator: a matrix product on a GPU, with scales, zero points, bias and requantization fused into it.

    cutlass_kernels::mm(lhs, rhs, out_dtype, ...) -> Tensor

It stands in graphs as any operator of PyTorch, has no gradient of its own, and is captured in CUDA graphs. Routes are
asked in order, and the first that takes a product runs it:

    hopper     our own kernel, on compute capability 9.0
    registry   NVIDIA's kernels from cutlass.operators, on Blackwell
    public     PyTorch's own operators, on anything
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import ahead, checks, forms, hopper, measured, missing, prebuilt, public, registry, trust
from cutlass_kernels.devices import capability_of
from cutlass_kernels.product import Product, described
from cutlass_kernels.variants import Variant

_library = torch.library.Library("cutlass_kernels", "DEF")
_library.define(
    "mm(Tensor lhs, Tensor rhs, ScalarType out_dtype, *, Tensor? lhs_scale=None, Tensor? rhs_scale=None, "
    "Tensor? lhs_zero=None, Tensor? rhs_zero=None, Tensor? rhs_sum=None, Tensor? bias=None, Tensor? out_scale=None, "
    "Tensor? out_zero=None, str requantize='', float? low=None, float? high=None, Tensor? global_scale=None, "
    "bool fast=False, Tensor? offs=None) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),  # which say whether the copy engine reads a factor where it lies
)
_NAMES = tuple(f.name for f in fields(Product))


def mm(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
    """A matrix product of 8-bit or 4-bit numbers on a GPU.

    Args:
        lhs, rhs, out_dtype, fused: the fields of `Product`, `out_dtype` being its `out`.

    Returns:
        ([B,] M, N) in `out_dtype`, or of the groups of `offs`, contiguous. Sums of integers are exact, modulo 2^32;
        what follows is computed in float32, each operation rounded by itself.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or device that Product does not describe.
    """
    return torch.ops.cutlass_kernels.mm.default(lhs, rhs, out_dtype, **fused)


# ---- routes


def routes(p: Product, capability: tuple[int, int]) -> list[tuple[str, str | None]]:
    """The routes that were asked for a product, in order, and why each declined; the last one has None."""
    asked: list[tuple[str, str | None]] = []
    for name, declines, _ in _ROUTES:
        reason = declines(p, capability)
        asked.append((name, reason))
        if reason is None:
            break
    return asked


def _hopper_declines(p: Product, capability: tuple[int, int]) -> str | None:
    if capability != (9, 0):
        return f"for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    reason = missing()
    reason = reason if reason is not None and prebuilt.pack() is None else hopper.declines(p)
    return reason or _untrusted(p, _hopper_kernel)


def _registry_declines(p: Product, capability: tuple[int, int]) -> str | None:
    return registry.declines(p, capability) or _untrusted(p, registry.chosen)


def _untrusted(p: Product, kernel_of: Callable[[Product], Any]) -> str | None:
    """Why the kernel that a route would run must not be used on the GPU of a product, or None."""
    if trust.mode() == "all" or not p.lhs.is_cuda or 0 in (*p.lhs.shape, p.n):
        return None
    try:
        kernel = kernel_of(p)
    except ValueError as error:  # an unknown size, in a trace
        return str(error)
    return kernel if isinstance(kernel, str) else trust.declines(kernel, p.lhs.device)


def _hopper_kernel(p: Product) -> Variant | str:
    """The variant for a product, whose sizes may be symbols."""
    if all(isinstance(size, int) for size in (*p.lhs.shape, p.n)):
        return hopper.variant_of(p)
    return hopper.variant_of(described(p), device=p.lhs.device)


def _compiled_already() -> list[Variant]:
    """Kernels of the products that are asked for most, as far as they are compiled."""
    chosen = [v for v in forms.variants() if replace(v, tile=forms.MAIN[0].tile, tma=True) in forms.MAIN]
    return [v for v in chosen if ((pack := prebuilt.pack()) and pack.has(v.name, v.target)) or ahead.is_built(v)]


trust.families.append(_compiled_already)


_ROUTES: tuple[tuple[str, Callable[..., str | None], Callable[[Product], Tensor]], ...] = (
    ("hopper", _hopper_declines, hopper.run),
    ("registry", _registry_declines, registry.run),
    ("public", public.declines, public.run),
)


def run(p: Product) -> Tensor:
    """A product on its GPU, by the first route that takes it."""
    capability = capability_of(p.lhs.device)
    asked = routes(p, capability)
    name, reason = asked[-1]
    if reason is not None:
        raise NotImplementedError(f"mm: no kernel takes this product: {'; '.join(f'{n}: {r}' for n, r in asked)}")
    return next(run for own, _, run in _ROUTES if own == name)(p)


# ---- registration

_plans: dict[tuple[Any, ...], Callable[..., Tensor]] = {}
_MOST = 1024  # plans that are kept
measured.changed.append(_plans.clear)  # a plan has a tile


def _mm(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
    """The product, by what was found for products of its dtypes, shapes and strides."""
    key = (
        lhs.dtype, lhs.shape, lhs.stride(), rhs.dtype, rhs.shape, rhs.stride(), out_dtype, lhs.device,
        *[(name, x.dtype, x.shape) if isinstance(x, Tensor) else (name, x) for name, x in fused.items()],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = prepared(Product(lhs, rhs, out_dtype, **fused))
        if not trust.is_capturing():  # when a kernel may have no verdict yet
            _plans[key] = plan
    return plan(lhs, rhs, out_dtype, **fused)


def prepared(p: Product) -> Callable[..., Tensor]:
    """A function that runs products with the dtypes, shapes, strides and device of `p`, with the kernel chosen once."""
    checks.check(p)
    ours = _hopper_declines(p, capability_of(p.lhs.device)) is None and math.prod(p.shape) > 0
    multiply = hopper.plan(p) if ours else _by_route
    device, current = p.lhs.device, torch.cuda.current_device

    def run(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
        if current() == device.index:
            return multiply(lhs, rhs, out_dtype, **fused)
        with torch.cuda.device(device):
            return multiply(lhs, rhs, out_dtype, **fused)

    return run


def _by_route(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
    return run(Product(lhs, rhs, out_dtype, **fused))


def _describe(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
    p = Product(lhs, rhs, out_dtype, **fused)
    checks.check(p)
    return lhs.new_empty(p.shape, dtype=out_dtype)


_library.impl("mm", _mm, "CUDA")
torch.library.register_fake("cutlass_kernels::mm", _describe, lib=_library)
