"""Matrix products by the native kernels: a description of a call, found once, and the pointers of each.

A factor is taken as a matrix of rows that are summed along, (rows, k): the left one as it is, the right one as the
weight of a linear layer. See native/hop.h.
"""

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop import blocks
from hop.blocks import Block
from hop.formats import E2M1, E4M3, E5M2, E8M0, Format, Integer, float32
from hop.kernels import native
from hop.kernels import native_structures as c
from hop.kernels.memory import address
from hop.layouts import Tiled
from hop.packing import PACKED
from hop.quantizer import Quantizer
from hop.requantization import Division, FixedPoint, FloatMultiplier, Reciprocal
from hop.scaling import Given, TwoLevel

_FLOATS = {E2M1: c.E2M1, E4M3: c.E4M3, E5M2: c.E5M2, E8M0: c.E8M0}


class Described(NamedTuple):
    """A quantized factor as the kernels take it: its description, and which of its buffers they read."""

    factor: c.Factor
    names: tuple[str | None, ...]  # of codes, scale, zero point and fold
    steps: tuple[int, ...] = (0, 0, 0, 0)  # bytes between the members of a batch


def describe(q: Quantizer, shape: Sequence[int], columns: bool, turned: bool = False) -> Described | str:
    """A factor with row-wise buffers, contiguous, of `shape`; `columns` if it is summed along its last dimension but
    one, `turned` if its codes lie as those of the transposed matrix. A string if there is none, which says why."""
    format = _format(q.format)
    if format is None or q.flat:
        return f"for integers of 8 and 4 bits, E4M3, E5M2 and E2M1 in blocks of dimensions, not {q}"
    narrow = q.format.bits in PACKED
    layout = c.STRIDED
    if isinstance(q.layout, Tiled):
        if q.layout.columns != columns or len(shape) != 2:
            return f"{q.layout} is laid out for a sum along the other dimension"
        layout = c.TILED
    elif q.layout is not None:
        return f"for codes, and layout={q.layout} holds numbers"
    elif narrow and (columns or turned or shape[-1] % 2):
        return "codes of 4 bits share their bytes along the dimension that is summed, an even number of them"
    factor = c.Factor(format, layout, shape[-1], 1, 0, c.NONE, c.no_scale(), c.no_scale())
    if turned:
        factor.row_stride, factor.k_stride = (shape[-2], 1) if columns else (1, shape[-2])
    elif columns:
        factor.row_stride, factor.k_stride = 1, shape[-1]
    zero = None
    if q.scale.has_zero_point():
        zero, factor.zero_format = "zero_point", c.BYTES[q.format.dtype]
    else:
        factor.zero = q.format.zero
    stored = {name: (scale_format, block) for name, (scale_format, block) in q.stored().items()}
    scale, fold = "scale", None
    block = stored["scale"][1]
    if isinstance(q.scale, TwoLevel):
        scale, fold, block = "global_amax", "scale", q.scale.outer
    elif q.scale.folds():
        scale, fold = None, "scale"
    try:
        if scale is not None:
            factor.scale = _scale(block, shape, columns, c.FLOAT32)
        if fold is not None:
            of_scale = q.scale.inner if isinstance(q.scale, TwoLevel) else getattr(q.scale, "exponent", None)
            fold_format = c.FLOAT32 if of_scale is None else _FLOATS.get(of_scale)
            if fold_format is None:
                return f"for scales of E4M3 and E8M0, not {of_scale}"
            if fold_format == c.E4M3 and format != c.E2M1:
                return f"{q.format.name} times a scale of E4M3 has more bits than bfloat16"
            factor.fold = _scale(q.block, shape, columns, fold_format)
    except _Uneven as reason:
        return str(reason)
    if isinstance(q.scale, TwoLevel):
        factor.scale.factor = float32(1 / (q.scale.inner.max * q.format.max))
    return Described(factor, ("codes", scale, zero, fold))


def describe_batch(q: Quantizer, shape: Sequence[int], columns: bool, turned: bool = False) -> Described | str:
    """The factors of a batch, (batch, ...)."""
    held = q.stored()
    for name, (_, block) in held.items():
        if blocks.counts(shape, block)[0] not in (1, shape[0]):
            return f"{name} is shared by some members of a batch"

    def of_member(block: Block) -> Block:
        return blocks.per_dimension(block, len(shape))[1:]

    rule = replace(q.scale, outer=of_member(q.scale.outer)) if isinstance(q.scale, TwoLevel) else q.scale
    one = describe(replace(q, block=of_member(q.block), scale=rule), shape[1:], columns, turned)
    if isinstance(one, str):
        return one
    bits = {"codes": math.prod(shape[1:]) * q.format.bits}
    for name, (dtype, block) in held.items():
        first, *rest = blocks.counts(shape, block)
        bits[name] = math.prod(rest) * dtype.itemsize * 8 if first == shape[0] else 0
    return one._replace(steps=tuple(0 if name is None else bits[name] // 8 for name in one.names))


def _format(format: Format) -> int | None:
    if isinstance(format, Integer):
        if format.bits == 8:
            return c.BYTES[format.dtype]
        return (c.INT4 if format.dtype.is_signed else c.UINT4) if format.bits == 4 else None
    return None if format == E8M0 else _FLOATS.get(format)  # type: ignore[arg-type]


def plain(dtype: torch.dtype, row_stride: int, k_stride: int) -> c.Factor:
    """A plain tensor as a factor: bfloat16, or the integers of int8 and uint8."""
    return c.Factor(
        c.PLAIN.get(dtype) or c.BYTES[dtype], c.STRIDED, row_stride, k_stride, 0, c.NONE, c.no_scale(), c.no_scale()
    )


class _Uneven(Exception):
    """Blocks that are no blocks of the matrix's rows; its text says why."""


def _scale(block: Block, shape: Sequence[int], columns: bool, format: int) -> c.Scale:
    """Scales in contiguous memory, of blocks of a tensor of `shape`."""
    sizes, counts = blocks.per_dimension(block, len(shape)), blocks.counts(shape, block)
    if columns:
        return _strided(format, (sizes[1], counts[1], 1), (sizes[0], counts[0], counts[1]))
    rows = [(b, n) for b, n, size in zip(sizes[:-1], counts[:-1], shape[:-1], strict=True) if size != 1]
    if all(n == 1 for _, n in rows):
        of_rows, count = -1, 1
    elif all(b == 1 for b, _ in rows):
        of_rows, count = 1, math.prod(n for _, n in rows)
    elif len(rows) == 1:
        ((of_rows, count),) = rows
    else:
        raise _Uneven(f"blocks of {block} are none of the rows of a tensor of {tuple(shape)}")
    return _strided(format, (of_rows, count, counts[-1]), (sizes[-1], counts[-1], 1))


def _strided(format: int, of_rows: tuple[int, int, int], along: tuple[int, int, int]) -> c.Scale:
    """From the size of a block, the count of blocks and the stride along rows, and along k."""
    (rows, row_stride), (ks, k_stride) = (
        (c.WHOLE, 0) if n == 1 or size == -1 else (size, stride) for size, n, stride in (of_rows, along)
    )
    return c.Scale(format, 1.0, rows, ks, row_stride, k_stride)


# ---- calls


class Call(NamedTuple):
    """A product that the kernels take."""

    product: c.Product
    lhs: tuple[str | None, ...]  # the buffers that they read of each factor; for a plain one, codes alone
    rhs: tuple[str | None, ...]


def output_of(q: Quantizer, m: int, n: int) -> c.Output | str:
    """An output of (m, n) codes, or why the kernels do not give them."""
    rule, format = q.scale, q.format
    if not (isinstance(rule, Given) and isinstance(format, Integer) and format.bits == 8):
        return f"gives integers of 8 bits with a given scale, not {q}"
    if q.layout is not None or q.flat or q.stochastic or q.hadamard is not None:
        return f"gives plain codes, rounded to the nearest, not {q}"
    convention = _CONVENTIONS.get(type(rule.requantize))
    if convention is None:
        return f"knows no requantization {rule.requantize}"
    rows, columns = blocks.counts((m, n), q.block)
    if (rows not in (1, m)) or columns not in (1, n) or (rows > 1 and columns > 1):
        return f"one scale for all, for each row or for each column, not blocks of {q.block}"
    made = c.Output(c.BYTES[format.dtype], c.NONE, n, convention(rule.requantize), format.low, format.high, format.zero)
    made.zero_format = c.BYTES[format.dtype] if rule.has_zero_point() else c.NONE
    for bit, bound in enumerate((rule.requantize.low, rule.requantize.high)):
        if bound is not None:
            made.bounded |= 1 << bit
            made.bounds[bit] = bound
    made.scale_row_stride, made.scale_column_stride = int(rows > 1), int(columns > 1)
    return made


_ROUNDINGS = {"gemmlowp": 2, "tflite": 3, "away": 4, "even": 5}
_CONVENTIONS: dict[type, Callable[[Any], int]] = {
    Division: lambda r: 0,
    FloatMultiplier: lambda r: 1,
    FixedPoint: lambda r: _ROUNDINGS[r.rounding],
    Reciprocal: lambda r: 6,
}


def plain_output(dtype: torch.dtype, n: int) -> c.Output | str:
    """An output of (m, n) numbers."""
    if dtype not in c.PLAIN:
        return f"gives float32, bfloat16 and float16, not {dtype}"
    return c.Output(c.PLAIN[dtype], c.NONE, n)


def product(
    lhs: Described, rhs: Described, sizes: tuple[int, int, int, int], output: c.Output, bias: torch.dtype | None
) -> Call | str:
    """The call for (batch, m, n, k), or why there is none."""
    batch, m, n, k = sizes
    made = c.Product(m, n, k, lhs.factor, rhs.factor, output, batch, c.Steps(*lhs.steps), c.Steps(*rhs.steps))
    made.output_step = m * n * c.ITEMS[output.format]
    made.output.bias_format = c.NONE if bias is None else c.PLAIN[bias]
    reason = _library().hop_product_declines(ctypes.byref(made))
    if reason is not None:
        return reason.decode()
    return Call(made, lhs.names, rhs.names)


def gives_codes(call: Call) -> bool:
    """Whether it writes codes."""
    return call.product.output.format in c.BYTES.values()


MISFIT = 3


def multiply_tensors(call: Call) -> tuple[Any, int]:
    """hop_multiply_tensors, and its first argument for this call, which has to live as long."""
    return _library().hop_multiply_tensors, ctypes.addressof(call.product)


def failed(result: int) -> MemoryError:
    """What to raise for a result of the kernels that is not 0."""
    return MemoryError("the native kernels found no memory for their tiles" if result == 1 else f"result {result}")


def run(
    call: Call,
    lhs: Sequence[Tensor | None],
    rhs: Sequence[Tensor | None],
    bias: Tensor | None,
    out: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Write to `out` the product of factors whose buffers are given in the order of the call's names; `scale` and
    `zero_point` are those of codes."""
    if out.numel() == 0:
        return out
    result = _library().hop_multiply(
        ctypes.addressof(call.product),
        torch.get_num_threads(),
        *map(address, lhs),
        *map(address, rhs),
        address(bias),
        address(scale),
        address(zero_point),
        address(out),
    )
    if result:
        raise failed(result)
    return out


# ---- sums of bytes, and tiles


@functools.lru_cache(maxsize=4096)
def _of_bytes(lhs: torch.dtype, rhs: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> c.Product:
    """The product of plain bytes, of (batch, m, n, k), from the strides of lhs along (batch, k) and of rhs along
    (batch, n, k); lhs is contiguous along k."""
    batch, m, n, k = sizes
    lhs_batch, lhs_row, rhs_batch, rhs_row, rhs_k = strides
    made = c.Product(m, n, k, plain(lhs, lhs_row, 1), plain(rhs, rhs_row, rhs_k), c.Output(c.INT32, c.NONE, n), batch)
    made.lhs_step.codes, made.rhs_step.codes, made.output_step = lhs_batch, rhs_batch, 4 * m * n
    return made


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) @ (..., K, N) -> (..., M, N) int32, modulo 2^32, of int8 and uint8, with one batch dimension or none,
    of any strides."""
    if a.stride(-1) != 1:
        a = a.contiguous()
    batch = a.shape[0] if a.dim() == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    out = torch.empty((*a.shape[:-1], n), dtype=torch.int32)
    if out.numel() == 0:
        return out
    of_batch = (a.stride(0), b.stride(0)) if a.dim() == 3 else (0, 0)
    strides = (of_batch[0], a.stride(-2), of_batch[1], b.stride(-1), b.stride(-2))
    made = _of_bytes(a.dtype, b.dtype, (batch, m, n, k), strides)
    run(Call(made, (), ()), (a, None, None, None), (b, None, None, None), None, out)
    return out


def int_mm_tiled(a: Tensor, held: Tensor, n: int) -> Tensor:
    """int_mm of (M, K) and the n rows that are held in tiles (`tiles`) of int8."""
    m, k = a.shape
    out = torch.empty((m, n), dtype=torch.int32)
    made = _of_tiles(a.dtype, m, n, k)
    return run(Call(made, (), ()), (a.contiguous(), None, None, None), (held, None, None, None), None, out)


@functools.lru_cache(maxsize=4096)
def _of_tiles(lhs: torch.dtype, m: int, n: int, k: int) -> c.Product:
    made = c.Product(m, n, k, plain(lhs, k, 1), plain(torch.int8, k, 1), c.Output(c.INT32, c.NONE, n), 1)
    made.rhs.layout = c.TILED
    return made


def peak() -> float:
    """Tera-operations a second that the matrix unit does on int8, on as many threads as PyTorch uses; 0 if there is
    none."""
    function = _library().hop_peak
    function.restype = ctypes.c_double
    return function(torch.get_num_threads()) / 1e12


def bandwidth(data: Tensor) -> float:
    """Gigabytes a second at which that memory is read."""
    function = _library().hop_bandwidth
    function.restype, function.argtypes = ctypes.c_double, [c_int, c_void_p, c_int64]
    return function(torch.get_num_threads(), address(data), data.nbytes) / 1e9


_HUGE = 2**21  # bytes of a huge page


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor, on huge pages if it is large: those of memory that was used before stay small."""
    size = math.prod(shape)
    bytes = size * dtype.itemsize
    if bytes < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, bytes + _HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=bytes, offset=start).view(dtype).view(shape)


def tiles(codes: Tensor, matrix: tuple[int, int], code_format: Format, layout: Tiled) -> Tensor:
    """What `layout` holds of plain codes, a contiguous matrix of (rows, size) or its transpose; those that share bytes
    do so along what is summed."""
    rows, size = matrix
    shape, dtype = layout.held(matrix[::-1] if layout.columns else matrix, code_format)
    out = _fresh(shape, dtype)
    format = _format(code_format)
    assert format is not None
    factor = c.Factor(format, c.STRIDED, size, 1, 0, c.NONE, c.no_scale(), c.no_scale())
    if layout.columns:
        factor.row_stride, factor.k_stride = 1, rows
    if out.numel():
        pointers = address(codes), address(out)
        _library().hop_pack(ctypes.byref(factor), rows, size, torch.get_num_threads(), *pointers)
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    functions = native.library().functions
    assert functions is not None
    functions.hop_product_declines.argtypes = [c_void_p]
    functions.hop_product_declines.restype = ctypes.c_char_p
    functions.hop_multiply.argtypes = [c_void_p, c_int, *[c_void_p] * 12]
    functions.hop_multiply_tensors.argtypes = [c_void_p, c_void_p, c_int, *[c_void_p] * 10]
    functions.hop_pack.argtypes = [c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p]
    return functions
