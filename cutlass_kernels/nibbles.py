"""Products of bfloat16 by weights of 4 bits in groups: what they mean, and their operator.

    cutlass_kernels::nibble_mm(x, codes, scale, zero, bias, group, out_dtype) -> Tensor

On Hopper codes become numbers in the kernel's registers (nibbles_sm90.py); elsewhere they are decoded to bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import cache, hopper, missing, prebuilt
from cutlass_kernels.product import REALS
from cutlass_kernels.tiles import NIBBLE_TILES
from cutlass_kernels.variants import Tile, Variant

GROUPS = (32, 64, 128)

_library = torch.library.Library("cutlass_kernels", "FRAGMENT")
_library.define(
    "nibble_mm(Tensor x, Tensor codes, Tensor scale, Tensor? zero=None, Tensor? bias=None, *, int group=128, "
    "ScalarType out_dtype=bfloat16) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x @ weight.T + bias, weight[n, k] = (code[n, k] - zero[n, k / group]) · scale[n, k / group].

    Args:
        x: (M, K), bfloat16.
        codes: (N, K / 2), uint8: two codes a byte, the first in the low bits; signed unless there are zero points.
        scale: (N, K / group) float32.
        zero: (N, K / group) uint8, 0 to 15.
        bias: (N,), bfloat16, float16 or float32.
        group: 32, 64 or 128, of which K is a multiple.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (M, N): the exact products of each group, summed in the matrix unit, times its scale, summed in float32.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """
    return torch.ops.cutlass_kernels.nibble_mm.default(x, codes, scale, zero, bias, group=group, out_dtype=out_dtype)


def check(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, bias: Any, group: int, out: torch.dtype) -> None:
    """Raise TypeError or ValueError, naming the argument, for what `mm` does not take."""
    if x.dtype != torch.bfloat16 or codes.dtype != torch.uint8 or scale.dtype != torch.float32:
        raise TypeError(
            "nibble_mm: x must be bfloat16, codes uint8 and scale float32, got "
            f"{x.dtype}, {codes.dtype} and {scale.dtype}"
        )
    if group not in GROUPS or x.dim() != 2 or x.shape[1] % group:
        raise ValueError(
            f"nibble_mm: x must be (M, K) with K a multiple of group, one of {GROUPS}; got {tuple(x.shape)}, {group}"
        )
    n, k = codes.shape[0], x.shape[1]
    wanted = {"codes": (codes, (n, k // 2)), "scale": (scale, (n, k // group)), "zero": (zero, (n, k // group))}
    for name, (t, shape) in (wanted | {"bias": (bias, (n,))}).items():
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"nibble_mm: {name} must have shape {shape}, got {tuple(t.shape)}")
        if t is not None and t.device != x.device:
            raise ValueError(f"nibble_mm: {name} is on {t.device} and x on {x.device}; they must be on one device")
    if zero is not None and zero.dtype != torch.uint8:
        raise TypeError(f"nibble_mm: zero must be uint8, got {zero.dtype}")
    if out not in REALS or (bias is not None and bias.dtype not in REALS):
        raise TypeError(
            f"nibble_mm: out_dtype and bias must be of {REALS}, got {out} and {None if bias is None else bias.dtype}"
        )


# ---- meaning


def numbers(codes: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """(N, K) float32: each code less its zero point."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(torch.float32)
    if zero is not None:
        return pairs - zero.to(torch.float32).repeat_interleave(group, 1)
    return torch.where(pairs >= 8, pairs - 16, pairs)


def reference(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, bias: Any, group: int, out: torch.dtype) -> Tensor:
    """The result, of sums in float64."""
    weight = numbers(codes, zero, group).to(torch.float64) * scale.to(torch.float64).repeat_interleave(group, 1)
    y = (x.to(torch.float64) @ weight.mT).to(torch.float32)
    return (y if bias is None else y + bias.to(torch.float32)).to(out)


def decoded(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, bias: Any, group: int, out: torch.dtype) -> Tensor:
    """The result with the weight in bfloat16, by torch.mm."""
    weight = (numbers(codes, zero, group) * scale.repeat_interleave(group, 1)).to(torch.bfloat16)
    y = torch.mm(x, weight.mT, out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().mT
    return (y if bias is None else y + bias.to(torch.float32)).to(out)


# ---- Hopper


def variant(zero: Any, bias: Any, group: int, out: torch.dtype, tile: Tile) -> Variant:
    kinds = {"bias": None if bias is None else bias.dtype, "affine": zero is not None, "group": group}
    return Variant(torch.bfloat16, torch.uint8, out, tile, tma=False, **kinds)  # type: ignore[arg-type]


def tile_for(m: int, n: int, multiprocessors: int) -> Tile:
    """The narrowest tile that takes all rows of x at once; of 128 rows where there is one for each multiprocessor."""
    columns = next((t.n for t in NIBBLE_TILES if t.n >= m), 128)
    return Tile(128 if n >= 128 * multiprocessors else 64, columns, swap=True)


def build(v: Variant, options: str = "") -> Any:
    """Compile a variant; no GPU is needed."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels.gemm_sm90 import TYPES
    from cutlass_kernels.nibbles_sm90 import NibbleGemm

    m, n, k, half, steps = (cute.sym_int32() for _ in range(5))

    def matrix(dtype: torch.dtype, shape: tuple[Any, Any], align: int) -> Any:
        strides = (cute.sym_int64(divisibility=align // dtype.itemsize), 1)
        return make_fake_tensor(TYPES[dtype], shape, strides, assumed_align=align)

    bias = None if v.bias is None else (make_fake_tensor(TYPES[v.bias], (n,), (1,), assumed_align=v.bias.itemsize),)
    arguments = (
        matrix(torch.bfloat16, (m, k), 16),
        matrix(torch.uint8, (n, half), 16),
        matrix(torch.float32, (n, steps), 4),
        matrix(torch.uint8, (n, steps), 1) if v.affine else None,
        matrix(v.out, (m, n), v.out.itemsize),
        bias,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(NibbleGemm(v), *arguments, options=f"--gpu-arch {hopper.TARGET} --enable-tvm-ffi {options}")


def compiled(v: Variant) -> Callable[..., None]:
    return cache.kernel(v.name, hopper.TARGET, lambda: build(v))


def on_hopper(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Any, bias: Any, group: int, out: torch.dtype, tile: Any = None
) -> Tensor:
    """The result by our own kernel."""
    count = hopper.multiprocessors(x.device)
    tile = tile or tile_for(x.shape[0], codes.shape[0], count)
    y = torch.empty((x.shape[0], codes.shape[0]), dtype=out, device=x.device)
    x, codes = (t if _lies_well(t) else t.clone(memory_format=torch.contiguous_format) for t in (x, codes))
    scale, zero, bias = (None if t is None else t.contiguous() for t in (scale, zero, bias))
    compiled(variant(zero, bias, group, out, tile))(x, codes, scale, zero, y, None if bias is None else (bias,), count)
    return y


def _lies_well(x: Tensor) -> bool:
    """Whether the copy engine takes it: rows in steps of 16 bytes."""
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0


# ---- registration


def _run(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Any = None, bias: Any = None, *, group: int = 128, out_dtype: Any
) -> Tensor:
    given = (x, codes, scale, zero, bias, group, out_dtype)
    check(*given)
    ours = torch.cuda.get_device_capability(x.device) == (9, 0) and 0 not in (*x.shape, codes.shape[0])
    if not ours or (missing() is not None and not _is_packed(*given)):
        return decoded(*given)
    with torch.cuda.device(x.device):
        return on_hopper(*given)


def _is_packed(x: Tensor, codes: Tensor, scale: Tensor, zero: Any, bias: Any, group: int, out: torch.dtype) -> bool:
    pack = prebuilt.pack()
    tile = tile_for(x.shape[0], codes.shape[0], hopper.multiprocessors(x.device))
    return pack is not None and pack.has(variant(zero, bias, group, out, tile).name, hopper.TARGET)


def _describe(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Any = None,
    bias: Any = None,
    *,
    group: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    check(x, codes, scale, zero, bias, group, out_dtype)
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=out_dtype)


_library.impl("nibble_mm", _run, "CUDA")
torch.library.register_fake("cutlass_kernels::nibble_mm", _describe, lib=_library)
