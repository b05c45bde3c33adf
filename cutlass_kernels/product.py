"""What is asked of a kernel: a matrix product with what is fused into it."""

from dataclasses import dataclass

import torch
from torch import Tensor

INTEGERS = (torch.int8, torch.uint8)
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT4 = torch.float4_e2m1fn_x2
REALS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 128  # elements that share a scale in float32: along K on the left, along K and N on the right
GROUPS = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}  # elements along K that share one of these dtypes


@dataclass(frozen=True)
class Product:
    """y = (Σ_k (lhs - lhs_zero) (rhs - rhs_zero)) · lhs_scale · rhs_scale + bias, as `out`.

    Args:
        lhs, rhs: ([B,] M, K) and ([B,] K, N): int8 and uint8, or float8_e4m3fn and float8_e5m2, in any mixture; any
            strides. Or float4_e2m1fn_x2, (M, K / 2) and (K / 2, N), two codes a byte along K.
        out: int32 for integers without scales; bfloat16, float16, float32; float8 for floats, of which e4m3
            saturates and e5m2 overflows to infinity; int8 or uint8 for integers that are requantized.
        lhs_scale, rhs_scale: float32, both or neither. One number, or one for each row, (M,) or (M, 1), and column,
            (N,) or (1, N); or in blocks, for floats: (M, K / 128) and (K / 128, N / 128), rounded up. In blocks of
            32 or 16 along K, (M, K / b) and (K / b, N): float8_e8m0fnu (MX), or float8_e4m3fn for float4 (NVFP4).
        lhs_zero, rhs_zero: the integer of each row or column that stands for zero, or one for all: int32, int8, uint8.
        rhs_sum: (N,) int32, Σ_k rhs, which lhs_zero needs; computed in each call if the caller does not have it.
        bias: (N,). int32 is added to the sum of integers; float32, bfloat16 or float16 to the scaled result.
        out_scale, out_zero: of a requantized result, float32 and an integer dtype, one or one for each column.
        requantize: how: "division", round(y / out_scale), or "multiplier", round(Σ · (lhs_scale · rhs_scale /
            out_scale)), in float32, ties to even; plus out_zero.
        low, high: between which a requantized result lies, as real numbers.
        global_scale: float32, one number, by which a product of NVFP4 is multiplied besides.
        fast: whether sums of products of floats may stay in the matrix unit, which keeps 14 bits of them on Hopper.
    """

    lhs: Tensor
    rhs: Tensor
    out: torch.dtype
    lhs_scale: Tensor | None = None
    rhs_scale: Tensor | None = None
    lhs_zero: Tensor | None = None
    rhs_zero: Tensor | None = None
    rhs_sum: Tensor | None = None
    bias: Tensor | None = None
    out_scale: Tensor | None = None
    out_zero: Tensor | None = None
    requantize: str = ""
    low: float | None = None
    high: float | None = None
    global_scale: Tensor | None = None
    fast: bool = False

    @property
    def scaling(self) -> str:
        """What shares a scale: "" nothing, "vector" all or each row and column, "block" blocks of 128 in float32,
        "group" 32 or 16 elements along K."""
        lhs, rhs = self.lhs_scale, self.rhs_scale
        if lhs is None or rhs is None:
            return ""
        if lhs.dtype in GROUPS:
            return "group"
        return "vector" if is_vector(lhs, self.m) and is_vector(rhs, self.n) else "block"

    @property
    def is_integer(self) -> bool:
        return self.lhs.dtype in INTEGERS

    @property
    def depth(self) -> int:
        """K in elements, of which a byte of float4 has two."""
        return self.k * (2 if self.lhs.dtype == FLOAT4 else 1)

    @property
    def m(self) -> int:
        return self.lhs.shape[-2]

    @property
    def n(self) -> int:
        return self.rhs.shape[-1]

    @property
    def k(self) -> int:
        return self.lhs.shape[-1]


def is_vector(x: Tensor, size: int) -> bool:
    """Whether x holds one value, or one for each of `size`, in one dimension or beside others of size 1."""
    count = x.numel()
    return (count == size or count == 1) and (x.dim() < 2 or max(x.shape) == count)
