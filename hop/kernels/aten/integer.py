"""Exact integer matrix products of int8, uint8 and int16 operands of any strides, on `torch._int_mm` or GPU kernels.

`torch._int_mm` multiplies (M, K) int8 or uint8 by (K, N) int8 into int32, exactly, modulo 2^32. Everything else is
brought to that form by writing an operand x as int8 bytes and a constant,

    uint8:  x = b0 + 128                      b0 = the byte of x ^ 0x80
    int16:  x = b0 + 256 b1 + 128             b0, b1 = the low and high byte of x ^ 0x0080
            x = b0 + c                        if max(x) - min(x) < 256, as where a zero point was taken from 8 bits

so that with A = Σ 256^i A_i + α and B = Σ 256^j B_j + β, all modulo 2^32,

    A @ B = Σ_ij 256^(i+j) A_i @ B_j + β · rowsum(A - α) + α · colsum(B).

The bytes of A are stacked along M and those of B along N, so that one product serves them all.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.patches import unsigned_products
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.kernels.gpu import product as gpu

OPERANDS = frozenset({torch.int8, torch.uint8, torch.int16})
# Tensors with values to look at and strides to rely on; while tracing, operands are of other types.
_REAL = (Tensor, torch.nn.Parameter)
_LARGEST = {torch.int8: 2**7, torch.uint8: 2**8 - 1, torch.int16: 2**15}

# A float32 sum of products of bytes is exact while no partial sum can exceed 2^24: up to this many terms.
_FLOAT32_TERMS = 2**24 // (2**8 * 2**7)
# From this many multiply-adds per matrix an int8 product for each beats one batched float32 product (2 cores, AMX).
_LARGE = 2**20
# From this many multiply-adds, and rows, the native kernels end before torch._int_mm.
MANY, MANY_ROWS = 2**30, 256
# While tracing, a batch is written out as one product per matrix up to this size.
_UNROLL = 16


def largest_product(a: torch.dtype, b: torch.dtype) -> int:
    """The largest magnitude of a product of two operands."""
    return _LARGEST[a] * _LARGEST[b]


def mm(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """(M, K) @ (K, N) -> (M, N) int32, modulo 2^32; plus `row` (N,) int32."""
    return _product(a, b, row, _byte_mm)


def bmm(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """(B, M, K) @ (B, K, N) -> (B, M, N) int32, modulo 2^32; plus `row` (N,) int32."""
    return _product(a, b, row, _byte_bmm)


def bmm_declines(a: Tensor, b: Tensor) -> str | None:
    """Why `bmm` cannot be traced for these operands, or None."""
    if not isinstance(a.shape[0], int) and not isinstance(a.shape[2], int):
        return f"the batch {a.shape[0]} and K {a.shape[2]} are both symbolic"
    return None


def _product(a: Tensor, b: Tensor, row: Tensor | None, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if b.dtype == torch.int8 and (a.dtype == torch.int8 or (a.dtype == torch.uint8 and not unsigned_products.active)):
        product = multiply(a, b)
        return product if row is None else product + row
    lead, m, k, n = a.shape[:-2], a.shape[-2], a.shape[-1], b.shape[-1]
    lhs_bytes, alpha = ([a], 0) if a.dtype == torch.uint8 and not unsigned_products.active else _bytes(a)
    transposed = b.mT.is_contiguous()
    rhs_bytes, beta = _bytes(b.mT if transposed else b)
    rows = m * len(lhs_bytes)
    if alpha:  # a row of ones, whose product is the sum of each column of B
        lhs_bytes.append(lhs_bytes[0].new_ones((*lead, 1, k)))
    lhs = _cat(lhs_bytes, -2)
    rhs = _cat(rhs_bytes, -2).mT if transposed else _cat(rhs_bytes, -1)
    products = multiply(lhs, rhs)
    total = _weigh(_weigh(products.narrow(-2, 0, rows), -2, m), -1, n)
    if beta:
        sums = multiply(lhs, rhs_bytes[0].new_ones((*lead, k, 1)))
        total = torch.add(total, _weigh(sums.narrow(-2, 0, rows), -2, m), alpha=beta)
    if alpha:
        sums = _weigh(products.narrow(-2, rows, 1), -1, n)
        sums = sums + beta * k if beta else sums
        row = sums * alpha if row is None else torch.add(row, sums, alpha=alpha)
    return total if row is None else total + row


def _bytes(x: Tensor) -> tuple[list[Tensor], int]:
    """The int8 bytes of x, the low ones first, and the constant to add to them."""
    if x.dtype == torch.int8:
        return [x], 0
    if x.dtype == torch.uint8:
        return [(x ^ 0x80).view(torch.int8)], 128
    if type(x) in _REAL and x.is_cpu and x.numel():  # there are values to look at, and looking costs little
        low, high = (int(v) for v in torch.aminmax(x))
        if low >= -128 and high < 128:
            return [x.to(torch.int8)], 0
        if high - low < 256:
            center = min(low + 128, 2**15 - 1)
            return [x.to(torch.int8).sub_((center + 128) % 256 - 128)], center
    return [(x ^ 0x80).to(torch.int8), (x >> 8).to(torch.int8)], 128


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _weigh(parts: Tensor, dim: int, size: int) -> Tensor:
    """Σ 256^i parts[i], for one or two parts of `size` that lie behind each other along `dim`."""
    if parts.shape[dim] == size:
        return parts
    return torch.add(parts.narrow(dim, 0, size), parts.narrow(dim, size, size), alpha=256)


def _byte_mm(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) int8 or uint8 @ (K, N) int8."""
    if a.shape[0] >= MANY_ROWS and a.numel() * b.shape[1] >= MANY and _is_native(a):
        return native_product.int_mm(a, b)
    if a.is_cpu and not eager.int_mm_is_exact():
        return native_product.int_mm(a, b) if _is_native(a) else _by_floats(a, b)
    a, b = _readable(a, b)
    if a.is_cpu and type(a) in _REAL:
        return eager.int_mm(a, b)
    if gpu.takes(a):
        return gpu.mm(a, b, torch.int32)
    (m, k), n = a.shape, b.shape[1]
    if a.is_cuda:  # torch._int_mm wants more than 16 rows there, and K and N that are multiples of 8
        if m == 0 or k == 0 or n == 0:
            return a.new_zeros((m, n), dtype=torch.int32)
        rows, inner, columns = max(17 - m, 0), -k % 8, -n % 8
    else:  # Inductor gives views stride 0 in dimensions of size 1, whatever the strides were while tracing
        rows, inner, columns = (int(isinstance(size, int) and size == 1) for size in (m, k, n))
    a = torch.nn.functional.pad(a, (0, inner, 0, rows)) if rows or inner else a
    b = torch.nn.functional.pad(b, (0, columns, 0, inner)) if inner or columns else b
    out = eager.int_mm(a, b)
    return row_major(out[:m, :n]) if rows or columns else out


def _is_native(a: Tensor) -> bool:
    """Whether the native kernels take a product of real tensors; they read any strides."""
    return type(a) in _REAL and a.is_cpu and eager.is_plain_eager() and native.library().declines() is None


# On CPU torch._int_mm reads wrong elements where strides do not say which dimension is the inner one: stride 0
# (pytorch #195066), and any other stride than the usual one in a dimension of size 1, which torch calls contiguous.


def _readable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if b.stride() != (1, b.shape[0]) or b.shape[0] == 1:  # not column-major, or to be mistaken for row-major
        b = row_major(b)
    return row_major(a), b


def row_major(x: Tensor) -> Tensor:
    """A matrix with exactly the strides (columns, 1)."""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def _byte_bmm(a: Tensor, b: Tensor) -> Tensor:
    """(B, M, K) int8 or uint8 @ (B, K, N) int8."""
    if _is_native(a):
        return native_product.int_mm(a, b)
    if gpu.takes(a):
        return gpu.mm(a, b, torch.int32)
    batch, m, k = a.shape
    n = b.shape[2]
    real = type(a) in _REAL
    if real:
        one_by_one = k > _FLOAT32_TERMS or m * n * k >= _LARGE
    else:  # tracing: sizes may be symbols, which must not be compared with numbers
        one_by_one = isinstance(batch, int) and (batch <= _UNROLL or not isinstance(k, int))
    if one_by_one and batch and (not a.is_cpu or eager.int_mm_is_exact()):
        pairs = zip(a.unbind(), b.unbind(), strict=True)
        if not (real and a.is_cpu):
            return torch.stack([_byte_mm(x, y) for x, y in pairs])
        out = a.new_empty((batch, m, n), dtype=torch.int32)
        for (x, y), z in zip(pairs, out.unbind(), strict=True):
            eager.int_mm(*_readable(x, y), out=z)
        return out
    return _by_floats(a, b)


def _by_floats(a: Tensor, b: Tensor) -> Tensor:
    """Matrices, or batches of them, in pieces of K whose sums float32 holds."""
    if not isinstance(a.shape[-1], int):  # a symbol, which cannot be cut into pieces: float64 holds 2^38 terms
        return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64).to(torch.int32)
    terms = max(1, min(a.shape[-1], _FLOAT32_TERMS))
    pieces = [
        torch.matmul(x.to(torch.float32), y.to(torch.float32)).to(torch.int32)
        for x, y in zip(a.split(terms, -1), b.split(terms, -2), strict=True)
    ]
    return torch.stack(pieces).sum(0, dtype=torch.int32) if len(pieces) > 1 else pieces[0]
