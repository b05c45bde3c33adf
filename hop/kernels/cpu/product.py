"""Describe matrix products for hop_native::product.

Each factor is described as a matrix of rows along which the product sums, (rows, k): the left one as it is, the right
one as the weight of a linear layer, or with "columns" as the right factor of mm.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.compat.memory import address
from hop.dispatch.kernel import Declined, decline
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.numerics import blocks
from hop.numerics.blocks import Block
from hop.numerics.formats import E2M1, E4M3, E5M2, E8M0, Format
from hop.numerics.layouts import Tiled
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention, Division, FixedPoint, FloatMultiplier, Reciprocal

_FLOATS = {E2M1: "e2m1", E4M3: "e4m3", E5M2: "e5m2", E8M0: "e8m0"}
_BYTES = (torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BIASES = (*FLOATS, torch.int32)


class Described(NamedTuple):
    """Description of a quantized factor for native code (native/torch/factor.h), and the buffers it reads."""

    words: str
    names: tuple[str | None, ...]  # of codes, scale, zero point and block scale
    sums: str | None = None  # the buffer of code sums, read by products with integers: "sums" in the words


@functools.lru_cache(maxsize=4096)
def describe(q: Quantizer, columns: bool) -> Described:
    """Describe a factor with row-wise buffers; `columns` if the product sums along its second-to-last dimension.

    Raises Declined if it is not supported.
    """
    format = format_word(q.format)
    if format is None or q.flat:
        raise Declined(f"for 8- and 4-bit integers, E4M3, E5M2 and E2M1 in blocks of dimensions, not {q}")
    if not q.scale.scale_is_told:
        raise Declined(f"for scales stored in the standard way, not {q}, whose rule overrides scale_of")
    words = [format]
    if q.tiles is not None:
        if q.tiles.columns != columns:
            raise Declined(f"{q.layout} is laid out for a sum along the other dimension")
        words.append("tiled")
    elif q.layout is not None:
        raise Declined(f"for plain codes or tiles, not layout={q.layout}")
    if columns:
        words.append("columns")
    zero = None
    if q.scale.has_zero_point():
        zero = "zero_point"
        words.append("zero=stored")
    elif q.format.zero:
        words.append(f"zero={q.format.zero}")
    scale, block_scale = q.scale.outer_scale_name, "scale" if q.scale.has_block_scale() else None
    if q.scale.outer_block is not None:
        words.append(f"factor={_bits(q.scale.outer_scale_factor(q.format))}")
    if scale is not None:
        words.append(f"scale={_blocks(q.given_block)}")
    if block_scale is not None:
        of_scale = q.scale.block_scale_format
        fold_format = "float32" if of_scale is None else _FLOATS.get(of_scale)
        if fold_format is None:
            raise Declined(f"for scales of E4M3 and E8M0, not {of_scale}")
        if fold_format == "e4m3" and format != "e2m1":
            raise Declined(f"{q.format.name} times a scale of E4M3 has more bits than bfloat16")
        words.append(f"block_scale={fold_format}:{_blocks(q.block)}")
    sums = "code_sums" if q.tiles is not None and q.tiles.sums else None
    return Described(" ".join(words), ("codes", scale, zero, block_scale), sums)


def format_word(format: Format) -> str | None:
    """The name of a code format in descriptions; None for formats that no product reads."""
    if format.is_integer:
        if format.bits not in (4, 8) or (format.bits == 8 and format.dtype not in _BYTES):
            return None
        return f"{'int' if format.dtype.is_signed else 'uint'}{format.bits}"
    return None if format == E8M0 else _FLOATS.get(format)  # type: ignore[arg-type]


def plain(dtype: torch.dtype) -> Described:
    """Describe a plain tensor as a factor: bfloat16, or the integers of int8 and uint8."""
    return Described(str(dtype).removeprefix("torch."), ("codes", None, None, None))


def _blocks(block: Block) -> str:
    return ",".join(map(str, block))


def _bits(x: float) -> int:
    """The bits of x as float32."""
    return struct.unpack("I", struct.pack("f", x))[0]


# ---- calls


class NativeProduct(NamedTuple):
    """A product that native code supports."""

    lhs: tuple[str | None, ...]  # the buffers to read of each factor; for a plain one only codes
    rhs: tuple[str | None, ...]
    rhs_sums: str | None  # the buffer of code sums
    gives_codes: bool
    description: str


def describe_output(q: Quantizer) -> str:
    """Describe codes as a result (native/torch/output.h). Raises Declined if they are not supported."""
    rule, format = q.scale, q.format
    requantization = rule.requantization
    if requantization is None or not format.is_integer or format.bits != 8:
        raise Declined(f"returns 8-bit integers with a given scale, not {q}")
    if q.layout is not None or q.flat or q.stochastic or q.hadamard is not None:
        raise Declined(f"returns plain codes, rounded to nearest, not {q}")
    number = _convention(requantization)
    if number is None:
        raise Declined(f"does not support the requantization {requantization}")
    words = [f"requantize={number} low={format.min:.0f} high={format.max:.0f} scale={_blocks(q.block)}"]
    words.append("zero=stored" if rule.has_zero_point() else f"zero={format.zero}")
    for name, bound in (("lower", requantization.low), ("upper", requantization.high)):
        if bound is not None:
            words.append(f"{name}={_bits(bound)}")
    return " ".join(words)


def one_line(shape: Sequence[int], q: Quantizer) -> bool:
    """Whether a result of (rows, columns) has one scale for all, per row, or per column."""
    (m, n), (rows, columns) = shape, blocks.counts(shape, q.block)
    return rows in (1, m) and columns in (1, n) and 1 in (rows, columns)


_ROUNDINGS = {"gemmlowp": 2, "tflite": 3, "away": 4, "even": 5}
_CONVENTIONS: dict[type, Callable[[Any], int | None]] = {
    Division: lambda r: 0,
    FloatMultiplier: lambda r: 1,
    FixedPoint: lambda r: _ROUNDINGS.get(r.rounding) if r.multiplier == "float64" else None,
    Reciprocal: lambda r: 6,
}


def _convention(r: Convention) -> int | None:
    """The convention's number in native code; None if it is not supported there."""
    describe_rule = _CONVENTIONS.get(type(r))
    return None if describe_rule is None else describe_rule(r)


def check_bias(bias: Tensor, n: int) -> None:
    """Raise Declined unless the bias has n elements in a supported dtype."""
    if tracing.hints(bias.shape) != (n,) or bias.dtype not in BIASES:
        dtypes = "float32, bfloat16, float16 or int32"
        raise Declined(f"for a bias of shape ({n},) in {dtypes}, not {tuple(bias.shape)} in {bias.dtype}")


def check(description: str, lhs: Sequence[int], rhs: Sequence[int], bias: torch.dtype | None) -> None:
    """Raise Declined unless native code supports a product of factors of these shapes."""
    left, right = ((ctypes.c_int64 * len(shape))(*shape) for shape in (lhs, rhs))
    of_bias = (0 if bias is None else _NUMBERS[bias], bias is not None)
    ask = _library().hop_described_product_declines
    reason = ask(description.encode(), len(lhs), left, len(rhs), right, *of_bias)
    decline(None if reason is None else reason.decode())


# ---- sums of bytes, and tiles


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) @ (..., K, N) -> (..., M, N) int32, modulo 2^32.

    The operands are int8 or uint8 of any strides, with at most one batch dimension.
    """
    return _sums(a, b, b.shape[-1], _described_sums(a, b))


def _described_sums(a: Tensor, b: Tensor) -> str:
    return f"1 lhs {name(a)} rhs {name(b)} columns output int32"


def planned_int_mm(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that computes `int_mm` for matrices with the shapes and dtypes of a and b."""
    multiply, n, description = native_operators.product, b.shape[1], _described_sums(a, b)
    return lambda a, b: multiply(a, None, None, None, b, None, None, None, None, None, None, n, description)


def int_mm_tiled(a: Tensor, held: Tensor, n: int) -> Tensor:
    """int_mm of (M, K) and n rows stored in tiles (`tiles`) of int8."""
    return _sums(a, held, n, f"1 lhs {name(a)} rhs int8 tiled output int32")


def _sums(a: Tensor, b: Tensor, n: int, description: str) -> Tensor:
    none = (None, None, None)
    return native_operators.product(a, *none, b, *none, *none, n, description)


def name(x: Tensor | torch.dtype) -> str:
    """The name of a dtype, or of a tensor's dtype."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def peak() -> float:
    """Peak tera-operations per second of the int8 matrix unit, with PyTorch's number of
    threads; 0 without such a unit.
    """
    function = _library().hop_peak
    function.restype = ctypes.c_double
    return function(torch.get_num_threads()) / 1e12


def bandwidth(data: Tensor) -> float:
    """Gigabytes per second at which the memory of `data` can be read."""
    function = _library().hop_bandwidth
    function.restype, function.argtypes = ctypes.c_double, [c_int, c_void_p, c_int64]
    return function(torch.get_num_threads(), address(data), data.nbytes) / 1e9


def tiles(codes: Tensor, code_format: Format, layout: Tiled) -> Tensor:
    """Pack plain codes into `layout`: a matrix of (rows, size), or (size, rows) with columns.

    Codes that share bytes must do so along the summed dimension.
    """
    format = format_word(code_format)
    assert format is not None
    return native_operators.pack(codes, f"1 lhs int8 rhs {format}{' columns' if layout.columns else ''}")


_NUMBERS = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""Dtype numbers of PyTorch's C interface."""


@functools.cache
def _library() -> ctypes.CDLL:
    functions = native.library().functions
    assert functions is not None
    function, text, size = functions.hop_described_product_declines, ctypes.c_char_p, ctypes.POINTER(c_int64)
    function.argtypes = [text, c_int, size, c_int, size, c_int, c_int]
    function.restype = text
    return functions
