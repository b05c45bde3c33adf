"""Product: a matrix product with its fused operations, as kernels receive it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

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
        offs: (G,) int32, where each of G groups ends, as torch._grouped_mm takes it: groups of rows, (M, K) and
            (G, K, N), of columns, (G, M, K) and (K, N), or of K, (M, K) and (K, N), whose result is (G, M, N). Read on
            the device: offsets outside of the tensor are brought to its ends, a group whose offset is less than one
            before it is empty, and rows and columns after the last are zeros.
        out: int32 for integers without scales; bfloat16, float16, float32; float8 for floats, of which e4m3
            saturates and e5m2 overflows to infinity; int8 or uint8 for integers that are requantized.
        lhs_scale, rhs_scale: float32, both or neither. One number, or one for each row, (M,) or (M, 1), and column,
            (N,) or (1, N); or in blocks, for floats: (M, K / 128) and (K / 128, N / 128), or (K / 128, N), rounded up.
            In blocks of 32 or 16 along K, (M, K / b) and (K / b, N): float8_e8m0fnu (MX), or float8_e4m3fn for float4
            (NVFP4). In a batch, and where a factor has groups, each product has its own: (B, M), (B, M, 1), (B, N),
            (B, 1, N), with sizes of 1 where all are alike, and blocks with B in front; so are zeros and what follows.
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
    offs: Tensor | None = None

    @property
    def groups(self) -> str:
        """The dimension that offs divides: "rows", "columns", "k", or "" for none."""
        if self.offs is None:
            return ""
        return {(2, 3): "rows", (3, 2): "columns"}.get((self.lhs.dim(), self.rhs.dim()), "k")

    @property
    def extent(self) -> int:
        """The size of the dimension that offs divides."""
        return {"rows": self.m, "columns": self.n}.get(self.groups, self.k)

    @property
    def count(self) -> int:
        """How many products there are."""
        if self.offs is not None:
            return self.offs.shape[0]
        return self.lhs.shape[0] if self.lhs.dim() == 3 else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        if self.groups in ("rows", "columns"):
            return (self.m, self.n)
        return (self.count, self.m, self.n) if self.groups == "k" or self.lhs.dim() == 3 else (self.m, self.n)

    def has_own(self, name: str) -> bool:
        """Whether each product has values of its own in a vector, which runs along rows or columns."""
        if self.groups in ("rows", "columns"):
            return name.startswith("lhs") == (self.groups == "columns")
        return self.groups == "k" or self.lhs.dim() == 3

    def is_vector(self, name: str, x: Tensor) -> bool:
        """Whether x can be the vector `name`: one value, one for each row or column, or such values of each product."""
        size, count = (self.m if name.startswith("lhs") else self.n), self.count
        if not self.has_own(name) or x.dim() < 2:
            return is_vector(x, size)
        shape = tuple(x.shape)
        if len(shape) == 3:
            if 1 not in shape[1:]:
                return False
            shape = (shape[0], shape[1] * shape[2])
        return len(shape) == 2 and shape[0] in (1, count) and shape[1] in (1, size)

    @property
    def scaling(self) -> str:
        """The elements that share a scale: "" none, "vector" all or each row and column, "block" blocks of 1 x 128 and
        128 x 128 in float32, "1x128" such blocks of rows on both sides, "group" 32 or 16 elements along K."""
        lhs, rhs = self.lhs_scale, self.rhs_scale
        if lhs is None or rhs is None:
            return ""
        if lhs.dtype in GROUPS:
            return "group"
        if self.is_vector("lhs_scale", lhs) and self.is_vector("rhs_scale", rhs):
            return "vector"
        is_row = rhs.dim() > 1 and rhs.shape[-1] == self.n and (self.n > 1 or self.groups in ("columns", "k"))
        return "1x128" if is_row else "block"

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


def described(p: Product) -> Product:
    """The product without data, on the device "meta"; symbols become the sizes that they were traced with.

    Raises:
        ValueError: a size has no such value.
    """
    return replace(p, **{name: without_data(x) for name, x in vars(p).items() if isinstance(x, Tensor)})


def without_data(x: Tensor) -> Tensor:
    """A tensor on the device "meta" with the shape and strides of x, as numbers."""
    shape, strides = ([number(s) for s in sizes] for sizes in (x.shape, x.stride()))
    with _disable_current_modes():
        return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")


def number(size: int | torch.SymInt) -> int:
    """A size, or the value that a symbol was traced with.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(size, torch.SymInt):
        return size
    if (hint := size.node.hint) is None:
        raise ValueError(f"the value of the size {size} is not known while tracing")
    return int(hint)


def is_vector(x: Tensor, size: int) -> bool:
    """Whether x holds one value, or one for each of `size`, in one dimension or beside others of size 1."""
    count = x.numel()
    return (count == size or count == 1) and (x.dim() < 2 or max(x.shape) == count)
