"""Checks that kernels of products must pass to be trusted: judges for cutlass_kernels.trials.

Integers are compared bit for bit with the public route, PyTorch's own operators on the same GPU; sums of floats with
float64, within the bound of `oracle`. Sizes end within tiles, within chunks of K, and span several tiles of a block.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from cutlass_kernels import hopper, nibbles, plain, public, registry, transposing
from cutlass_kernels.cases import Case, Form, form_of, guarded
from cutlass_kernels.oracle import compare
from cutlass_kernels.product import FLOAT4, GROUPS, Product
from cutlass_kernels.trials import Judged
from cutlass_kernels.variants import Variant

FEW = 8  # multiprocessors of the second run of a kernel, so that a block has several tiles


# ---- Hopper


def product(v: Variant, device: torch.device) -> Judged:
    """The judge of our products."""
    if v.group:
        return Judged(lambda: hopper.compiled(v), (functools.partial(_nibbles, v, *c, device) for c in _sizes(v)))
    found = list(cases(v))
    return Judged(lambda: hopper.compiled(v), (functools.partial(_checked, case, v, device) for case in found))


def _sizes(v: Variant) -> Iterator[tuple[int, int, int]]:
    """M, N and K: less than a tile; a tile and a part, with one chunk of K and a part; tiles, and many chunks.

    K is a multiple of the 4-bit groups, or of 16.
    """
    rows, columns = (v.tile.n, v.tile.m) if v.tile.swap else (v.tile.m, v.tile.n)
    down, across = v.tile.cluster
    step = v.group or 16
    ragged = 16 // v.out.itemsize if v.tma else 7  # columns that the copy engine can write
    yield 1, 16 if v.tma else 9, step
    yield rows // 2 + 1, columns - ragged, 128 if step == 128 else 128 + step
    yield rows + 3, columns + ragged, 128
    yield 2 * rows * down + 5, 2 * columns * across + 3 * ragged, 1152 if step == 128 else 1152 + step


def cases(v: Variant) -> Iterator[Case]:
    """Products that a variant computes, with extreme values, and with NaN and infinities for floats."""
    form = form_of(v)
    for shape in _sizes(v):
        for values in ("random", "extreme") if form.is_integer else ("whole", "special"):
            for k in (shape[2], 256, 272):  # sums of floats are promoted from more than one chunk on
                case = Case(form, v.tile, (*shape[:2], k), values)
                if case.variant() == v:
                    yield case
                    break


def _checked(case: Case, v: Variant, device: torch.device) -> None:
    p = case.product(str(device))
    found = guarded(p, v.tile, few=max(FEW, v.tile.blocks))
    compare(found, p, exact=case.values == "whole" or case.form.is_integer)
    if p.is_integer:
        _same(found, public.run(p), f"{case}")


def _same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Fail unless bits are equal."""
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (found, wanted))
    wrong = int((a != b).sum()) if a.shape == b.shape else -1
    assert wrong == 0, f"{what}: {wrong} of {len(a)} bytes differ from PyTorch's operators"


def _nibbles(v: Variant, m: int, n: int, k: int, device: torch.device) -> None:
    """Small integers and powers of two, whose sums are exact."""
    g = torch.Generator(device).manual_seed(m + n + k)

    def drawn(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=g, device=device)

    whole = torch.iinfo(v.lhs) if v.is_integer else None
    rows = drawn(-1, 2, m, k) if whole is None else drawn(whole.min, whole.max + 1, m, k)
    a = nibbles.Asked(
        rows.to(v.lhs),
        drawn(0, 256, n, k // 2).to(torch.uint8),
        drawn(-2, 3, n, k // v.group).to(torch.float32).exp2(),
        drawn(0, 16, n, k // v.group).to(torch.uint8) if v.affine else None,
        None if v.bias is None else drawn(-64, 65, n).to(v.bias),
        drawn(-2, 3, m).to(torch.float32).exp2() if v.scales else None,
        None if v.lhs_zero is None else drawn(-128, 128, m).to(v.lhs_zero),
        v.group,
        v.out,
    )
    nibbles.check(a)
    _same(nibbles.on_hopper(a, v.tile), nibbles.reference(a), f"{v.name}, {m}x{n}x{k}")


def transposition(kernel: transposing.Transposition, device: torch.device) -> Judged:
    """The judge of the kernel that transposes bytes."""

    def check(*shape: int) -> None:
        x = torch.randint(0, 256, shape, device=device, dtype=torch.uint8).mT
        assert (reason := transposing.declines(x)) is None, reason
        found, k = transposing.run(x), x.shape[-1]
        _same(found[..., :k], x, f"transposed {tuple(x.shape)}")
        assert not bool(found[..., k:].any()), "what fills up K is not zero"

    shapes = ((1, 4), (130, 516), (37, 128), (3, 257, 132))
    return Judged(lambda: transposing.compiled(kernel), (functools.partial(check, *shape) for shape in shapes))


# ---- NVIDIA's registry


def registry_product(r: registry.Registered, device: torch.device) -> Judged:
    """The judge of a kernel of NVIDIA's registry."""
    return Judged(lambda: registry.compiled(r), (functools.partial(_by_registry, r, p) for p in _products(r, device)))


def _products(r: registry.Registered, device: torch.device) -> Iterator[Product]:
    """Products for which the route chooses a kernel: of few rows, with ragged edges, and of many tiles."""
    c = r.case
    for m, n, k in ((3, 40, 96), (64, 72, 160), (65, 200, 1152), (200, 328, 288), (4100, 2120, 160), (8200, 4240, 96)):
        form = Form(
            c.name,
            c.lhs,
            c.rhs,
            c.out,
            "vector" if c.scaled else "",
            bias=torch.float32 if c.biased else None,
            batch=2 if c.batched else 0,
        )
        p = _in_groups(c, m, n, k, device) if c.group else Case(form, None, (m, n, k), "random").product(str(device))
        if registry.kernel_of(p, r.multiprocessors, r.target) == r:
            yield p


def _by_registry(r: registry.Registered, p: Product) -> None:
    call = registry.prepared(p, r.multiprocessors)
    registry.launch(registry.compiled(r), call, torch.cuda.current_stream(p.lhs.device).cuda_stream)
    found = registry.finished(p, call)
    if p.is_integer:
        _same(found, public.run(p), r.name)
    elif not r.case.group:
        compare(found.contiguous(), p, exact=False)
    else:
        lhs, rhs = (x.to(torch.float64) for x in plain.dequantized(p, torch.float32))
        slack = (lhs.abs() @ rhs.abs()) * 2.0**-10 + torch.finfo(p.out).eps * (lhs @ rhs).abs()
        off = (found.to(torch.float64) - lhs @ rhs).abs()
        assert bool((off <= slack).all()), (
            f"{r.name}: {int((~(off <= slack)).sum())} of {off.numel()} elements are wrong"
        )


def _in_groups(c: registry.Case, m: int, n: int, k: int, device: torch.device) -> Product:
    """A product with scales of groups along K, of random codes."""
    g = torch.Generator(device).manual_seed(m)

    def codes(dtype: torch.dtype, rows: int, size: int) -> Tensor:
        drawn = torch.randint(0, 256, (rows, size), generator=g, device=device).to(torch.uint8)
        return drawn.view(dtype) if dtype == FLOAT4 else (drawn % 96).view(dtype)  # no NaN, and magnitudes that fit

    dtype = next(dtype for dtype, group in GROUPS.items() if group == c.group)
    steps = -(-k // c.group)
    size = k // 2 if c.lhs == FLOAT4 else k
    lhs_scale, rhs_scale = (
        torch.randint(120, 132, shape, generator=g, device=device).to(torch.uint8).view(dtype)
        if dtype == torch.float8_e8m0fnu
        else torch.randint(32, 64, shape, generator=g, device=device).to(torch.uint8).view(dtype)
        for shape in ((m, steps), (steps, n))
    )
    return Product(codes(c.lhs, m, size), codes(c.rhs, n, size).mT, c.out, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
