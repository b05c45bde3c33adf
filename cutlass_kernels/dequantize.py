"""Dequantizing on a GPU by our own kernel: which variant, and its launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import cache as kept
from cutlass_kernels.elements import FORMATS, Format
from cutlass_kernels.hopper import TARGET
from cutlass_kernels.quantize import flat_bytes
from cutlass_kernels.quantizing import CHUNK, GROUPS, MEMORY, TILE, Numbers

_SMALL = {torch.uint8: "mx", torch.float8_e4m3fn: "two_level", torch.float32: ""}


@dataclass(frozen=True)
class Codes:
    """A matrix of codes, whose numbers are wanted.

    Args:
        codes: (R, C), or (R, C / 2) rounded up where two share a byte; contiguous, as all tensors here.
        scale: of each block: float32, uint8 (e8m0), or float8_e4m3fn under an amax.
        second: codes of zero, in the shape of scale; or the amax, float32 of (1, 1).
        format, block: as of a request to quantize; columns: C.
        dtype: of the result, (R, C): float32, bfloat16 or float16.
    """

    codes: Tensor
    scale: Tensor
    second: Tensor | None
    format: str
    block: tuple[int, ...]
    columns: int
    dtype: torch.dtype

    @property
    def elements(self) -> Format:
        return FORMATS[self.format]


def check(c: Codes) -> None:
    """Raise TypeError or ValueError, naming the argument, for what Codes does not describe."""
    if c.format not in FORMATS or c.dtype not in MEMORY or len(c.block) != 2:
        raise ValueError(
            f"dequantize: format must be one of {tuple(FORMATS)}, dtype one of {tuple(MEMORY)}, and block two sizes; "
            f"got {c.format!r}, {c.dtype} and {c.block}"
        )
    f, rows = c.elements, c.codes.shape[0]
    wanted = (rows, -(-c.columns // f.per_byte))
    dtype = torch.uint8 if f.bits < 8 else f.dtype
    counts = tuple(1 if b == -1 else -(-n // b) for n, b in zip((rows, c.columns), c.block, strict=True))
    if tuple(c.codes.shape) != wanted or c.codes.dtype != dtype:
        raise ValueError(
            f"dequantize: codes must be {dtype} of {wanted}, got {c.codes.dtype} of {tuple(c.codes.shape)}"
        )
    if tuple(c.scale.shape) != counts or c.scale.dtype not in _SMALL:
        raise ValueError(
            f"dequantize: scale must be one of {tuple(_SMALL)} of {counts}, got {c.scale.dtype} of "
            f"{tuple(c.scale.shape)}"
        )
    kind = _SMALL[c.scale.dtype]
    shape, dtype = ((1, 1), torch.float32) if kind == "two_level" else (counts, f.dtype)
    if (c.second is None and kind == "two_level") or (c.second is not None and kind == "mx"):
        raise ValueError("dequantize: second is the amax of scales in e4m3, and a zero point beside scales in float32")
    if c.second is not None and (tuple(c.second.shape) != shape or c.second.dtype != dtype):
        raise ValueError(
            f"dequantize: second must be {dtype} of {shape}, got {c.second.dtype} of {tuple(c.second.shape)}"
        )
    for name, t in (("scale", c.scale), ("second", c.second)):
        if t is not None and t.device != c.codes.device:
            raise ValueError(f"dequantize: {name} is on {t.device} and codes on {c.codes.device}; move one")


def declines(c: Codes) -> str | None:
    """Why no kernel takes codes, or None."""
    if c.codes.numel() == 0 or max(c.codes.shape[0], c.columns) >= 2**31:
        return f"for matrices with elements, and sizes below 2^31, not {(c.codes.shape[0], c.columns)}"
    if c.block not in ((-1, -1), (1, -1), (TILE, TILE), *((1, g) for g in GROUPS)):
        return f"for rows, groups of {GROUPS}, tiles of {TILE} and the whole matrix, not {c.block}"
    return None


def variant_of(c: Codes) -> Numbers:
    down, span = (0 if b == -1 else b for b in c.block)
    kind = _SMALL[c.scale.dtype]
    return Numbers(c.dtype, c.elements, kind, down, span, c.second is not None and not kind, c.columns % CHUNK == 0)


def compiled(variant: Numbers) -> Callable[..., None]:
    return kept.kernel(variant.name, TARGET, lambda: build(variant))


def build(v: Numbers, options: str = "") -> Any:
    """Compile a variant; no GPU is needed."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels.dequantize_rows import Dequantize
    from cutlass_kernels.frame_sm90 import TYPES

    def flat(kind: Any, align: int) -> Any:
        return make_fake_tensor(kind, (cute.sym_int32(),), (1,), assumed_align=align)

    align = 16 if v.vector else v.out.itemsize
    out = make_fake_tensor(
        TYPES[v.out], (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=align
    )
    scale = flat(cutlass.Uint8, 1) if v.scale else flat(cutlass.Float32, 4)
    second = flat(cutlass.Uint8, 1) if v.zero else flat(cutlass.Float32, 4) if v.scale == "two_level" else None
    arguments = (out, (flat(cutlass.Uint8, 16 if v.vector else 1), scale, second), cutlass.Int32(5))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Dequantize(v), *arguments, stream, options=f"--gpu-arch {TARGET} --enable-tvm-ffi {options}")


def run(c: Codes) -> Tensor:
    """The numbers, on the codes' device and the current stream."""
    out = torch.empty((c.codes.shape[0], c.columns), dtype=c.dtype, device=c.codes.device)
    v = variant_of(c)
    across = 1 << (-(-c.columns // (CHUNK * v.held)) - 1).bit_length()
    buffers = tuple(None if t is None else flat_bytes(t) for t in (c.codes, c.scale, c.second))
    compiled(v)(out, buffers, min(across, v.threads).bit_length() - 1)
    return out
