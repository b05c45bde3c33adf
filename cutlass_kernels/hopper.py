"""Products on Hopper by our own kernel: which variant, how its arguments are brought into form, and its launch."""

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import cache as kept
from cutlass_kernels import measured, missing, nibble_kernel, prebuilt, tiles, transposing
from cutlass_kernels.product import BLOCK, FLOATS, INTEGERS, Product
from cutlass_kernels.variants import MOST_GROUPS, TARGET, Tile, Variant, longest


def declines(p: Product) -> str | None:
    """Why the kernel does not take a product, or None."""
    types = {p.lhs.dtype, p.rhs.dtype}
    if not (types <= {*INTEGERS} or types <= {*FLOATS}):
        return (
            f"multiplies two of int8 and uint8, or of float8_e4m3fn and float8_e5m2, not {p.lhs.dtype} by {p.rhs.dtype}"
        )
    if p.is_integer and p.k > longest(p.lhs.dtype, p.rhs.dtype):
        return (
            f"K = {p.k}: from K = {longest(p.lhs.dtype, p.rhs.dtype) + 1} on, sums could saturate where they must wrap"
        )
    if max(p.m, p.n, p.k) >= 2**31:
        return f"sizes must be below 2^31, got {(p.m, p.n, p.k)}"
    if p.offs is not None and not 0 < p.count <= MOST_GROUPS:
        return f"1 to {MOST_GROUPS} groups, got {p.count}"
    if p.global_scale is not None or p.scaling == "group":
        return "Hopper multiplies no groups with scales of their own"
    if missing() is None or prebuilt.pack() is None:
        return None
    found = variant_of(p)  # of those that were built ahead, one must fit
    return found if isinstance(found, str) else None


def variant_of(p: Product, tile: Any = None, device: torch.device | None = None) -> Variant | str:
    """The variant for a product, with a given tile or the one that suits its shape on a device, its own by default; or
    why there is none."""
    blockwise = p.scaling in ("block", "1x128")

    def made(tile: Any) -> Variant:
        return Variant(
            lhs=p.lhs.dtype,
            rhs=p.rhs.dtype,
            out=p.out,
            tile=tile,
            batched=p.lhs.dim() == 3 and p.offs is None,
            groups=p.groups,
            scales=p.scaling,
            **{
                name: t.dtype
                for name in ("lhs_zero", "rhs_zero", "bias", "out_zero")
                if (t := getattr(p, name)) is not None
            },
            requantize=p.requantize,
            bounded=p.low is not None or p.high is not None,
            promoted=not p.is_integer and not blockwise and not p.fast and p.k > BLOCK,
            tma=not tile.swap and p.n * p.out.itemsize % 16 == 0,
        )

    if tile is not None:
        found = made(tile)
        return found.declines() or found
    fitting = [v for v in map(made, tiles.TILES) if v.declines() is None]
    there = available(fitting)
    if not there:
        wanted, folder = fitting[0].name, os.environ.get(prebuilt.FOLDER)
        return f"{folder} has no kernel for it, as {wanted}, and it cannot be compiled here: {missing()}"
    m, n, k, count = tiles.sizes(p)
    return measured.measured(there, p) or tiles.best(there, m, n, k, multiprocessors(device or p.lhs.device), count)


def available(variants: Sequence[Variant]) -> list[Variant]:
    """The prebuilt variants if no compiler is installed, otherwise all."""
    pack = None if missing() is None else prebuilt.pack()
    return [v for v in variants if pack is None or pack.has(v.name, TARGET)]


# ---- compiling


def build(variant: Variant, options: str = "") -> Any:
    """Compile a variant; no GPU is needed."""
    import cutlass.cute as cute

    from cutlass_kernels.gemm_sm90 import Gemm
    from cutlass_kernels.grouped_sm90 import GroupedGemm

    if variant.group:
        return nibble_kernel.build(variant, options)
    gemm = GroupedGemm(variant) if variant.groups else Gemm(variant)
    return cute.compile(gemm, *_described(variant), options=f"--gpu-arch {TARGET} --enable-tvm-ffi {options}")


def compiled(variant: Variant) -> Callable[..., None]:
    return kept.kernel(variant.name, TARGET, lambda: build(variant))


def _described(v: Variant) -> tuple[Any, ...]:
    """The arguments of a kernel without their data: dtypes, strides, alignments, and which sizes are alike."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels.frame_sm90 import TYPES

    m, n, k, batch = (cute.sym_int32() for _ in range(4))

    def matrix(dtype: torch.dtype, shape: tuple[Any, Any], inner: int, aligned: bool, of_all: str) -> Any:
        size, align = dtype.itemsize, 16 if aligned else dtype.itemsize
        strides: list[Any] = [cute.sym_int64(divisibility=align // size)] * 2
        strides[inner] = 1
        is_stack = v.batched or v.groups == of_all
        lead, own = ((batch,), (cute.sym_int64(divisibility=align // size),)) if is_stack else ((), ())
        return make_fake_tensor(TYPES[dtype], (*lead, *shape), (*own, *strides), assumed_align=align)

    def beside(name: str) -> Any:
        dtype = v.dtype_of(name)
        if v.in_blocks(name):
            shape, strides = ([new() for _ in range(2 + v.stacked)] for new in (cute.sym_int32, cute.sym_int64))
            return make_fake_tensor(TYPES[dtype], (*shape,), (*strides,), assumed_align=4)
        lead, own = ((cute.sym_int32(),), (cute.sym_int64(),)) if v.stacked else ((), ())
        shape, strides = (*lead, cute.sym_int32()), (*own, 1)
        return make_fake_tensor(TYPES[dtype], shape, strides, assumed_align=dtype.itemsize)

    offs = (make_fake_tensor(cutlass.Int32, (cute.sym_int32(),), (1,), assumed_align=4),) if v.groups else ()

    return (
        matrix(v.lhs, (m, k), 1, True, "columns"),
        matrix(v.rhs, (k, n), 0, True, "rows"),
        matrix(v.out, (m, n), 1, v.tma, "k"),
        tuple(beside(name) for name in v.vectors) or None,
        (cutlass.Float32(0), cutlass.Float32(0)) if v.bounded else None,
        *offs,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


# ---- a call


def run(p: Product) -> Tensor:
    """The product, on its device and the current stream."""
    out = p.out
    fused = {f.name: value for f in fields(p)[3:] if (value := getattr(p, f.name)) != f.default}
    return plan(p)(p.lhs, p.rhs, out, **fused)


def plan(
    p: Product, tile: Tile | None = None, load: Callable[[Variant], Callable[..., None]] | None = None
) -> Callable[..., Tensor]:
    """A function that runs products with the dtypes, shapes and strides of `p`. `load` replaces `compiled`."""
    variant = variant_of(p, tile)
    if isinstance(variant, str):
        raise NotImplementedError(f"no Hopper kernel takes this product: {variant}")
    kernel, shape, count = (load or compiled)(variant), p.shape, multiprocessors(p.lhs.device)
    readers = [_reader(variant, name, p) for name in variant.vectors]
    bounds = None
    if variant.bounded:
        bounds = (-math.inf if p.low is None else p.low, math.inf if p.high is None else p.high)
    lhs_is_ready, rhs_is_ready = is_ready(p.lhs), is_ready(p.rhs.mT)

    def run(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, offs: Tensor | None = None, **fused: Any) -> Tensor:
        out = lhs.new_empty(shape, dtype=out_dtype)
        vectors = tuple([read(lhs, rhs, fused) for read in readers]) or None
        a = lhs if lhs_is_ready and lhs.data_ptr() % 16 == 0 else ready(lhs)
        b = rhs if rhs_is_ready and rhs.data_ptr() % 16 == 0 else ready(rhs.mT).mT
        if offs is None:
            kernel(a, b, out, vectors, bounds, count)
        else:
            kernel(a, b, out, vectors, bounds, offs.contiguous(), count)
        return out

    return run


def is_ready(x: Tensor) -> bool:
    """Whether the copy engine takes a factor as its strides are: K innermost, the others in steps of 16 bytes."""
    k, (*others, last) = x.shape[-1], x.stride()
    return last == 1 and k % 16 == 0 and k > 0 and all(s % 16 == 0 and s > 0 for s in others) and others[-1] >= k


def ready(x: Tensor) -> Tensor:
    """A factor in the form of `is_ready`, at an address in steps of 16 bytes; what is not is copied.

    K is filled up with zeros, which add nothing to a sum."""
    k = x.shape[-1]
    if x.is_cuda and transposing.declines(x) is None:
        return transposing.run(x)
    if k % 16 or k == 0:
        return torch.nn.functional.pad(x, (0, 16 - k % 16))
    copied = x.clone(memory_format=torch.contiguous_format)
    return copied.as_strided(x.shape, [math.prod(x.shape[i + 1 :]) for i in range(x.dim())])


def _reader(variant: Variant, name: str, p: Product) -> Callable[[Tensor, Tensor, dict[str, Any]], Tensor]:
    """A function that finds a kernel's vector among the arguments of a product like `p`."""
    if variant.in_blocks(name):
        if not variant.stacked:
            return lambda lhs, rhs, fused: fused[name]
        return lambda lhs, rhs, fused: x if (x := fused[name]).dim() == 3 else x.unsqueeze(0)
    form = functools.partial(_rows, own=p.has_own(name)) if variant.stacked else _flat
    if name == "rhs_sum":
        return lambda lhs, rhs, fused: form(column_sums(rhs) if fused.get(name) is None else fused[name])
    if name == "lhs_rest":
        return lambda lhs, rhs, fused: form(row_rests(lhs, fused.get("lhs_zero")))
    if not variant.stacked and not name.startswith("lhs"):
        form = _kept_flat()
    return lambda lhs, rhs, fused: form(fused[name])


def _flat(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x if x.dim() == 1 else x.view(-1)
    return x.reshape(-1).contiguous()


def _kept_flat() -> Callable[[Tensor], Tensor]:
    """`_flat` for what a weight has: mostly the tensor of the call before, whose view need not be made again."""
    last: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def flat(x: Tensor) -> Tensor:
        if x.dim() == 1 or not x.is_contiguous():
            return _flat(x)
        if last:
            of, view = last[0]
            if of() is x and view.data_ptr() == x.data_ptr() and view.numel() == x.numel():
                return view
        view = _flat(x)  # returned as it is: another thread may put its own in `last` meanwhile
        last[:] = [(weakref.ref(x), view)]
        return view

    return flat


def _rows(x: Tensor, own: bool) -> Tensor:
    """A row of values for each product, or one row for all."""
    count = x.shape[0] if own and x.dim() > 1 else 1
    return x.reshape(count, x.numel() // count).contiguous()


def column_sums(rhs: Tensor) -> Tensor:
    """([B,] N) int32, Σ_k rhs."""
    return rhs.sum(-2, dtype=torch.int32)


def row_rests(lhs: Tensor, lhs_zero: Tensor | None) -> Tensor:
    """([B,] M) int32, Σ_k (lhs - lhs_zero)."""
    sums = lhs.sum(-1, dtype=torch.int32)
    if lhs_zero is None:
        return sums
    zero = lhs_zero.reshape(-1) if lhs.dim() == 2 or lhs_zero.dim() < 2 else lhs_zero.reshape(lhs_zero.shape[0], -1)
    return sums - lhs.shape[-1] * zero.to(torch.int32)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; an H200's if there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
