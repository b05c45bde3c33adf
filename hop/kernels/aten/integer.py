"""Exact products of integer matrices of any strides: (M, K) @ (K, N) -> (M, N) int32, modulo 2^32.

`route` chooses one of five ways to multiply, from the table of this CPU level (`choices`):

    native  native kernels, which read int8 and uint8 of any strides
    GPU     cutlass_kernels, int8 or uint8 by int8
    int_mm  torch._int_mm, int8 or uint8 by int8
    floats  float32 products over chunks of K, each converted to int32 and added; int8, uint8 and int16
    int32   an int32 product of any of these

A sum of integer products is exact in float32 while it cannot exceed 2^24: 1,024 terms of int8 by int8, 514 of uint8 by
int8, in any order, with or without FMA, and also with operands rounded to TF32 or bfloat16, which represent 8-bit
integers exactly. This requires float32 sums and results: an autocast that returns bfloat16 breaks it. For int16, whose
products leave float32 few terms, "floats" uses float64, which is exact for 2^23 terms and more.

Operands of a dtype that a way does not read are written as int8 bytes and a constant,

    uint8:  x = b0 + 128                        b0 = the byte of x ^ 0x80
    int16:  x = b0 + 256 b1 + 128               b0, b1 = the low and high byte of x ^ 0x0080
            x = b0 + c                          if max(x) - min(x) < 256, as for 8-bit codes minus a zero point

so that with A = Σ 256^i A_i + α and B = Σ 256^j B_j + β, all modulo 2^32,

    A @ B = Σ_ij 256^(i+j) A_i @ B_j + β · rowsum(A - α) + α · colsum(B).

The bytes of A are stacked along M and those of B along N, so that one product computes all of them.
"""

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.patches import unsigned_products
from hop.kernels.aten import bounds, choices
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.kernels.gpu import product as gpu

OPERANDS = frozenset({torch.int8, torch.uint8, torch.int16})
_BYTES = frozenset({torch.int8, torch.uint8})
# Tensor types whose values can be read and whose strides are final; tracing uses other types.
_REAL = (Tensor, torch.nn.Parameter)
_LARGEST = {torch.int8: 2**7, torch.uint8: 2**8 - 1, torch.int16: 2**15}

# Chunks of fewer terms are slower than one float64 product.
_FEW_TERMS = 64
# While tracing, batches of up to this size are written out as one torch._int_mm per matrix.
_UNROLL = 16


def largest_product(a: torch.dtype, b: torch.dtype) -> int:
    """The largest magnitude of a product of two operands."""
    return _LARGEST[a] * _LARGEST[b]


def float32_terms(largest: int) -> int:
    """The number of products of magnitude `largest` whose sum is exact in float32 in any order."""
    return 2**24 // largest


def mm(a: Tensor, b: Tensor, row: Tensor | None = None, way: str | None = None) -> Tensor:
    """(M, K) @ (K, N) -> (M, N) int32, modulo 2^32, plus `row` (N,) int32. `way` overrides `route`."""
    return _product(a, b, row, way)


def bmm(a: Tensor, b: Tensor, row: Tensor | None = None, way: str | None = None) -> Tensor:
    """(B, M, K) @ (B, K, N) -> (B, M, N) int32, modulo 2^32, plus `row` (N,) int32. `way` overrides `route`."""
    return _product(a, b, row, way)


def route(a: Tensor, b: Tensor) -> str:
    """The method of `mm` or `bmm` for these operands: "native", "GPU", "int_mm", "floats" or "int32"."""
    if a.dtype not in OPERANDS or b.dtype not in OPERANDS:
        return "int32"
    if gpu.takes(a):
        return "GPU"
    if not a.is_cpu:
        return "int_mm" if a.is_cuda else "floats"
    is_native = native.declines_here(a.device) is None and native.declines_tensor("a", a) is None
    has_int_mm = eager.has_int_mm()
    if not has_int_mm and not is_native:
        return "floats"
    fastest = choices.fastest(native.library().path if is_native else "off", a, b)
    if fastest == "native" or (fastest == "int_mm" and not has_int_mm):
        return "native" if is_native else "int_mm"
    return fastest


def _product(a: Tensor, b: Tensor, row: Tensor | None, way: str | None) -> Tensor:
    (a, alpha), (b, beta) = _narrowed(a), _narrowed(b)
    way = way or route(a, b)
    lead, m, k, n = a.shape[:-2], a.shape[-2], a.shape[-1], b.shape[-1]
    lhs_bytes, alpha = [a], alpha
    if not _reads(way, a, 0):
        lhs_bytes, alpha = _bytes(a)
    transposed = b.mT.is_contiguous()
    rhs_bytes = [b.mT if transposed else b]
    if not _reads(way, b, 1):
        rhs_bytes, beta = _bytes(rhs_bytes[0])
    rows = m * len(lhs_bytes)
    if alpha:  # a row of ones, whose product is the column sums of B
        lhs_bytes.append(lhs_bytes[0].new_ones((*lead, 1, k)))
    lhs = _cat(lhs_bytes, -2)
    rhs = _cat(rhs_bytes, -2).mT if transposed else _cat(rhs_bytes, -1)
    products = _multiply(lhs, rhs, way)
    total = _weigh(_weigh(products.narrow(-2, 0, rows) if alpha else products, -2, m), -1, n)
    if beta:
        sums = _multiply(lhs, rhs_bytes[0].new_ones((*lead, k, 1)), way)
        total = torch.add(total, _weigh(sums.narrow(-2, 0, rows), -2, m), alpha=beta)
    if alpha:
        sums = _weigh(products.narrow(-2, rows, 1), -1, n)
        sums = sums + beta * k if beta else sums
        row = sums * alpha if row is None else torch.add(row, sums, alpha=alpha)
    return total if row is None else total + row


def _narrowed(x: Tensor) -> tuple[Tensor, int]:
    """x as int8 and the constant to add to it, if x is int16 and its values allow; else x and 0."""
    if x.dtype is not torch.int16 or type(x) not in _REAL or not x.is_cpu or not x.numel():
        return x, 0  # values do not exist, or reading them is expensive
    low, high = (int(v) for v in torch.aminmax(x))
    if low >= -128 and high < 128:
        return x.to(torch.int8), 0
    if high - low >= 256:
        return x, 0
    center = min(low + 128, 2**15 - 1)
    return x.to(torch.int8).sub_((center + 128) % 256 - 128), center


def _reads(way: str, x: Tensor, side: int) -> bool:
    """Whether a way to multiply reads the dtype of x, the left factor (side 0) or the right one (side 1)."""
    if way == "native":
        return x.dtype in _BYTES
    if way in ("floats", "int32") or x.dtype is torch.int8:
        return True
    return side == 0 and x.dtype is torch.uint8 and not unsigned_products.active


def _bytes(x: Tensor) -> tuple[list[Tensor], int]:
    """The int8 bytes of x, low bytes first, and the constant to add to them."""
    if x.dtype == torch.uint8:
        return [(x ^ 0x80).view(torch.int8)], 128
    return [(x ^ 0x80).to(torch.int8), (x >> 8).to(torch.int8)], 128


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _weigh(parts: Tensor, dim: int, size: int) -> Tensor:
    """Σ 256^i parts[i], for one or two parts of `size` concatenated along `dim`."""
    if parts.shape[dim] == size:
        return parts
    return torch.add(parts.narrow(dim, 0, size), parts.narrow(dim, size, size), alpha=256)


def _multiply(a: Tensor, b: Tensor, way: str) -> Tensor:
    """Multiply two matrices, or batches of them, whose dtypes the way reads."""
    if way == "int32":
        return torch.matmul(a.to(torch.int32), b.to(torch.int32))
    if way == "native":
        return native_product.int_mm(a, b)
    if way == "GPU":
        return gpu.mm(a, b, torch.int32)
    if way == "floats":
        return by_floats(a, b)
    return _int_mm(a, b) if a.dim() == 2 else _int_bmm(a, b)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) int8 or uint8 @ (K, N) int8, with torch._int_mm."""
    a, b = _readable(a, b)
    if a.is_cpu and type(a) in _REAL:
        return eager.int_mm(a, b)
    (m, k), n = a.shape, b.shape[1]
    if a.is_cuda:  # CUDA's torch._int_mm requires more than 16 rows, and K and N that are multiples of 8
        if m == 0 or k == 0 or n == 0:
            return a.new_zeros((m, n), dtype=torch.int32)
        rows, inner, columns = max(17 - m, 0), -k % 8, -n % 8
    else:  # Inductor gives views stride 0 in dimensions of size 1, unlike during tracing
        rows, inner, columns = (int(isinstance(size, int) and size == 1) for size in (m, k, n))
    a = torch.nn.functional.pad(a, (0, inner, 0, rows)) if rows or inner else a
    b = torch.nn.functional.pad(b, (0, columns, 0, inner)) if inner or columns else b
    out = eager.int_mm(a, b)
    return row_major(out[:m, :n]) if rows or columns else out


# CPU's torch._int_mm reads wrong elements if the strides do not tell which dimension is contiguous: stride 0 (pytorch
# #195066), or an unusual stride in a dimension of size 1, which is_contiguous() accepts.


def _readable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if b.stride() != (1, b.shape[0]) or b.shape[0] == 1:  # not column-major, or ambiguous
        b = row_major(b)
    return row_major(a), b


def row_major(x: Tensor) -> Tensor:
    """A matrix with strides (columns, 1)."""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def _int_bmm(a: Tensor, b: Tensor) -> Tensor:
    """(B, M, K) int8 or uint8 @ (B, K, N) int8, with one torch._int_mm per matrix."""
    batch, m, k = a.shape
    real = type(a) in _REAL
    if not real and not (isinstance(batch, int) and (batch <= _UNROLL or not isinstance(k, int))):
        return by_floats(a, b)
    pairs = zip(a.unbind(), b.unbind(), strict=True)
    if not (real and a.is_cpu):
        return torch.stack([_int_mm(x, y) for x, y in pairs]) if batch else by_floats(a, b)
    out = a.new_empty((batch, m, b.shape[2]), dtype=torch.int32)
    for (x, y), z in zip(pairs, out.unbind(), strict=True):
        eager.int_mm(*_readable(x, y), out=z)
    return out


def by_floats(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them, as float32 products over chunks of K.

    Uses float64 if float32 chunks would be short, and a single float64 product, exact to 2^53 / largest terms, for a
    symbolic K, which cannot be split. In a traced program, the operators that computed a and b bound their elements.
    """
    k, largest = a.shape[-1], bounds.largest(a) * bounds.largest(b)
    if not isinstance(k, int):
        return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64).to(torch.int32)
    terms, dtype = float32_terms(largest), torch.float32
    if terms < min(k, _FEW_TERMS):
        terms, dtype = 2**53 // largest, torch.float64
    chunks = [(a, b)] if k <= terms else zip(a.split(terms, -1), b.split(terms, -2), strict=True)
    total: Tensor | None = None
    for x, y in chunks:
        part = torch.matmul(x.to(dtype), y.to(dtype))
        part = part.to(torch.int32) if dtype is torch.float32 else part.to(torch.int64).to(torch.int32)
        total = part if total is None else total.add_(part) if eager.is_plain_eager() else total + part
    assert total is not None
    return total
