"""Factors that lie along their rows, brought along K: by a kernel of our own on Hopper (transpose_sm90.py)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutlass_kernels import cache, trust
from cutlass_kernels.variants import TARGET


@dataclass(frozen=True)
class Transposition:
    """The kernel: of bytes, of any sizes."""

    name: ClassVar[str] = "transpose_8"
    target: ClassVar[str] = TARGET


KERNEL = Transposition()


def declines(x: Tensor) -> str | None:
    """Why the kernel does not transpose (..., rows, K) of bytes, or None."""
    *others, step = (s for i, s in enumerate(x.stride()) if i != x.dim() - 2)
    if x.element_size() != 1 or x.dim() not in (2, 3) or 0 in x.shape:
        return f"for a matrix of bytes, or a batch of them, got {tuple(x.shape)} of {x.dtype}"
    if x.stride(-2) != 1 or x.shape[-2] % 4 or step % 4 or step < x.shape[-2] or any(s % 4 or s < 1 for s in others):
        return f"for rows in whole words that are innermost, got {tuple(x.shape)} of strides {x.stride()}"
    if x.data_ptr() % 4:
        return f"for an address of whole words, got {x.data_ptr()}"
    if max(math.prod(x.shape[:-2]), -(-x.shape[-1] // 128)) >= 2**16:
        return f"for fewer than 65,536 tiles in a row of them, got {tuple(x.shape)}"
    return cache.declines(KERNEL) or (trust.declines(KERNEL, x.device) if x.is_cuda else None)


def run(x: Tensor) -> Tensor:
    """(..., rows, K) with K innermost, filled up with zeros to 16 bytes."""
    *lead, rows, k = x.shape
    out = torch.empty((*lead, rows, -(-k // 16) * 16), dtype=x.dtype, device=x.device)
    source, target = (t if t.dim() == 3 else t.unsqueeze(0) for t in (x.mT, out))
    compiled()(*(t.view(torch.uint8).view(torch.int32) for t in (source, target)))
    return out


def build(kernel: Transposition = KERNEL, options: str = "") -> Any:
    """Compile the kernel; no GPU is needed."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels.transpose_sm90 import Transpose

    def words() -> Any:
        shape = [cute.sym_int32() for _ in range(3)]
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(cutlass.Uint32, (*shape,), strides, assumed_align=4)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Transpose(), words(), words(), stream, options=f"--gpu-arch {kernel.target} --enable-tvm-ffi {options}"
    )


def compiled(kernel: Transposition = KERNEL) -> Callable[..., None]:
    return cache.kernel(kernel.name, kernel.target, build)
