"""Products by weights of 4 bits in groups, of bfloat16 or of 8 bits: what they mean, and their operator.

    cutlass_kernels::nibble_mm(x, codes, scale, zero, bias, x_scale, x_zero, group, out_dtype) -> Tensor

On Hopper codes become numbers in the kernel's registers (nibbles_sm90.py); elsewhere they are decoded to bfloat16.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_kernels import cache, hopper, nibble_kernel, product, trust
from cutlass_kernels.devices import capability_of
from cutlass_kernels.product import FLOATS, INTEGERS, REALS
from cutlass_kernels.tiles import NIBBLE_TILES
from cutlass_kernels.variants import TARGET, Tile, Variant

GROUPS = (32, 64, 128)
BYTES = (*INTEGERS, *FLOATS)

_library = torch.library.Library("cutlass_kernels", "FRAGMENT")
_library.define(
    "nibble_mm(Tensor x, Tensor codes, Tensor scale, Tensor? zero=None, Tensor? bias=None, Tensor? x_scale=None, "
    "Tensor? x_zero=None, *, int group=128, ScalarType out_dtype=bfloat16) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


class Asked(NamedTuple):
    """The arguments of a product, as in `mm`."""

    x: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    bias: Tensor | None = None
    x_scale: Tensor | None = None
    x_zero: Tensor | None = None
    group: int = 128
    out: torch.dtype = torch.bfloat16


def mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_zero: Tensor | None = None,
    *,
    group: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x @ weight.T + bias, weight[n, k] = (code[n, k] - zero[n, k / group]) · scale[n, k / group].

    Args:
        x: (M, K): bfloat16; or codes of 8 bits, which stand for (x - x_zero) · x_scale: int8, uint8, float8_e4m3fn or
            float8_e5m2.
        codes: (N, K / 2), uint8: two codes a byte, the first in the low bits; signed unless there are zero points.
        scale: (N, K / group) float32.
        zero: (N, K / group) uint8, 0 to 15.
        bias: (N,), bfloat16, float16 or float32.
        x_scale: (M,) or (1,) float32, of 8 bits.
        x_zero: (M,) or (1,) int32, of integers.
        group: 32, 64 or 128, of which K is a multiple.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (M, N). Of floats the exact products of each group, summed in the matrix unit, times its scale, summed in
        float32. Of integers Σ over the groups, in their order, of (float32(the group's exact sum) · x_scale) · scale,
        each operation rounded by itself.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """
    return torch.ops.cutlass_kernels.nibble_mm.default(
        x, codes, scale, zero, bias, x_scale, x_zero, group=group, out_dtype=out_dtype
    )


def check(a: Asked) -> None:
    """Raise TypeError or ValueError, naming the argument, for what `mm` does not take."""
    x, codes, scale, group = a.x, a.codes, a.scale, a.group
    if x.dtype not in (torch.bfloat16, *BYTES) or codes.dtype != torch.uint8 or scale.dtype != torch.float32:
        raise TypeError(
            f"nibble_mm: x must be bfloat16 or of {BYTES}, codes uint8 and scale float32, got "
            f"{x.dtype}, {codes.dtype} and {scale.dtype}"
        )
    if group not in GROUPS or x.dim() != 2 or x.shape[1] % group:
        raise ValueError(
            f"nibble_mm: x must be (M, K) with K a multiple of group, one of {GROUPS}; got {tuple(x.shape)}, {group}"
        )
    n, k = codes.shape[0], x.shape[1]
    wanted = {"codes": (codes, (n, k // 2)), "scale": (scale, (n, k // group)), "zero": (a.zero, (n, k // group))}
    for name, (t, shape) in (wanted | {"bias": (a.bias, (n,))}).items():
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"nibble_mm: {name} must have shape {shape}, got {tuple(t.shape)}")
    for name in ("codes", "scale", "zero", "bias", "x_scale", "x_zero"):
        t = getattr(a, name)
        if t is not None and t.device != x.device:
            raise ValueError(f"nibble_mm: {name} is on {t.device} and x on {x.device}; they must be on one device")
    if a.zero is not None and a.zero.dtype != torch.uint8:
        raise TypeError(f"nibble_mm: zero must be uint8, got {a.zero.dtype}")
    _check_rows(a)
    if a.out not in REALS or (a.bias is not None and a.bias.dtype not in REALS):
        raise TypeError(
            f"nibble_mm: out_dtype and bias must be of {REALS}, got {a.out} and "
            f"{None if a.bias is None else a.bias.dtype}"
        )


def _check_rows(a: Asked) -> None:
    """Check the arguments that belong to rows of x."""
    if (a.x_scale is None) != (a.x.dtype == torch.bfloat16) or (a.x_zero is not None and a.x.dtype not in INTEGERS):
        named = [name for name in ("x_scale", "x_zero") if getattr(a, name) is not None]
        raise TypeError(
            f"nibble_mm: x of 8 bits has x_scale, and of integers may have x_zero; got {a.x.dtype} with "
            f"{' and '.join(named) or 'neither'}"
        )
    for name, dtype in (("x_scale", torch.float32), ("x_zero", torch.int32)):
        t = getattr(a, name)
        if t is not None and t.dtype != dtype:
            raise TypeError(f"nibble_mm: {name} must be {dtype}, got {t.dtype}")
        if t is not None and tuple(t.shape) not in ((a.x.shape[0],), (1,)):
            raise ValueError(f"nibble_mm: {name} must have shape ({a.x.shape[0]},) or (1,), got {tuple(t.shape)}")


# ---- meaning


def numbers(codes: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """(N, K) float32: each code less its zero point."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(torch.float32)
    if zero is not None:
        return pairs - zero.to(torch.float32).repeat_interleave(group, 1)
    return torch.where(pairs >= 8, pairs - 16, pairs)


def reference(a: Asked) -> Tensor:
    """The result; of floats, of sums in float64."""
    if a.x.dtype in INTEGERS:
        return _in_groups(a, lambda x, w: (x.to(torch.float64) @ w.to(torch.float64).mT).to(torch.float32))
    weight = numbers(a.codes, a.zero, a.group).to(torch.float64) * a.scale.double().repeat_interleave(a.group, 1)
    y = a.x.to(torch.float64) @ weight.mT
    if a.x_scale is not None:
        y = y * a.x_scale.double()[:, None]
    return _biased(a, y.to(torch.float32))


def decoded(a: Asked) -> Tensor:
    """The result by torch.mm on bfloat16: with the weight rounded to it, or, of integers, exact."""
    if a.x.dtype in INTEGERS:
        return _in_groups(a, lambda x, w: _mm(x.to(torch.bfloat16), w.to(torch.bfloat16)))
    weight = (numbers(a.codes, a.zero, a.group) * a.scale.repeat_interleave(a.group, 1)).to(torch.bfloat16)
    y = _mm(a.x.to(torch.bfloat16), weight)
    return _biased(a, y if a.x_scale is None else y * a.x_scale[:, None])


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return (
        torch.mm(x, w.mT, out_dtype=torch.float32) if x.is_cuda and not torch.version.hip else x.float() @ w.float().mT
    )


def _in_groups(a: Asked, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sum over the groups of exact sums of integers times the scales, in their order."""
    assert a.x_scale is not None
    x, w = a.x.to(torch.int32), numbers(a.codes, a.zero, a.group)
    x = x if a.x_zero is None else x - a.x_zero[:, None]
    y = x.new_zeros((x.shape[0], w.shape[0]), dtype=torch.float32)
    for i in range(a.scale.shape[1]):
        own = slice(i * a.group, (i + 1) * a.group)
        term = multiply(x[:, own], w[:, own]) * a.x_scale[:, None] * a.scale[:, i]
        y = term if i == 0 else y + term
    return _biased(a, y)


def _biased(a: Asked, y: Tensor) -> Tensor:
    return (y if a.bias is None else y + a.bias.to(torch.float32)).to(a.out)


# ---- Hopper


def variant(a: Asked, tile: Tile) -> Variant:
    return Variant(
        a.x.dtype,
        torch.uint8,
        a.out,
        tile,
        scales="" if a.x_scale is None else "rows",
        lhs_zero=None if a.x_zero is None else a.x_zero.dtype,
        bias=None if a.bias is None else a.bias.dtype,
        tma=False,
        group=a.group,
        affine=a.zero is not None,
    )


def tile_for(m: int, n: int, multiprocessors: int, x: torch.dtype = torch.bfloat16) -> Tile:
    """The narrowest tile that takes all rows of x at once, or the widest; of 128 rows where there is one for each
    multiprocessor."""
    widest = 64 if x in INTEGERS else 128
    columns = next(t.n for t in NIBBLE_TILES if t.n >= min(m, widest))
    return Tile(128 if n >= 128 * multiprocessors else 64, columns, swap=True)


def compiled(v: Variant) -> Callable[..., None]:
    return cache.kernel(v.name, TARGET, lambda: nibble_kernel.build(v))


def on_hopper(a: Asked, tile: Tile | None = None) -> Tensor:
    """The result by our own kernel."""
    count = hopper.multiprocessors(a.x.device)
    v = variant(a, tile or tile_for(a.x.shape[0], a.codes.shape[0], count, a.x.dtype))
    y = torch.empty((a.x.shape[0], a.codes.shape[0]), dtype=a.out, device=a.x.device)
    x, codes = (t if _lies_well(t) else t.clone(memory_format=torch.contiguous_format) for t in (a.x, a.codes))
    zero = None if a.zero is None else a.zero.contiguous()
    beside = {"lhs_scale": a.x_scale, "lhs_zero": a.x_zero, "bias": a.bias}
    vectors = tuple(t.contiguous() for name in v.vectors if (t := beside[name]) is not None)
    compiled(v)(x, codes, a.scale.contiguous(), zero, y, vectors or None, count)
    return y


def _lies_well(x: Tensor) -> bool:
    """Whether the copy engine takes it: rows in steps of 16 bytes."""
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0


# ---- registration


def _run(*args: Any, group: int = 128, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    a = Asked(*args)._replace(group=group, out=out_dtype)
    check(a)
    if declines(a) is not None:
        return decoded(a)
    with torch.cuda.device(a.x.device):
        return on_hopper(a)


def declines(a: Asked) -> str | None:
    """Why our kernel does not compute a product on its GPU, so that codes are decoded to bfloat16; or None."""
    capability = capability_of(a.x.device)
    if capability != (9, 0):
        return f"for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    m, k, n = (product.number(size) for size in (*a.x.shape, a.codes.shape[0]))
    if 0 in (m, k, n):
        return "for products with elements"
    v = variant(a, tile_for(m, n, hopper.multiprocessors(a.x.device), a.x.dtype))
    return cache.declines(v) or trust.declines(v, a.x.device)


def _describe(*args: Any, group: int = 128, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    a = Asked(*args)._replace(group=group, out=out_dtype)
    check(a)
    return a.x.new_empty((a.x.shape[0], a.codes.shape[0]), dtype=out_dtype)


_library.impl("nibble_mm", _run, "CUDA")
torch.library.register_fake("cutlass_kernels::nibble_mm", _describe, lib=_library)
