"""Compiling the kernels of weights of 4 bits (nibbles_sm90.py)."""

from typing import Any

import torch

from cutlass_kernels.variants import TARGET, Variant


def build(v: Variant, options: str = "") -> Any:
    """Compile a variant; no GPU is needed."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels.frame_sm90 import TYPES
    from cutlass_kernels.nibbles_sm90 import NibbleGemm

    m, n, k, half, steps = (cute.sym_int32() for _ in range(5))

    def matrix(dtype: torch.dtype, shape: tuple[Any, Any], align: int) -> Any:
        strides = (cute.sym_int64(divisibility=align // dtype.itemsize), 1)
        return make_fake_tensor(TYPES[dtype], shape, strides, assumed_align=align)

    def vector(name: str) -> Any:
        dtype, size = v.dtype_of(name), n if name == "bias" else cute.sym_int32()
        return make_fake_tensor(TYPES[dtype], (size,), (1,), assumed_align=dtype.itemsize)

    arguments = (
        matrix(v.lhs, (m, k), 16),
        matrix(torch.uint8, (n, half), 16),
        matrix(torch.float32, (n, steps), 4),
        matrix(torch.uint8, (n, steps), 1) if v.affine else None,
        matrix(v.out, (m, n), v.out.itemsize),
        tuple(vector(name) for name in v.vectors) or None,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(NibbleGemm(v), *arguments, options=f"--gpu-arch {TARGET} --enable-tvm-ffi {options}")
