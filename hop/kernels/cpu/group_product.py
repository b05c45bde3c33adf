"""Describe products with weights as stored in model files, for hop_native::group_product (native/torch/groups.cpp)."""

import functools
import struct
from typing import NamedTuple

import torch

from hop.dispatch.kernel import Declined
from hop.numerics import blocks, packing
from hop.numerics.formats import INT8, Format, Integer
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.stored_scales import StoredScales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("codes", "high_codes", "scale", "offset", "outer_scale", "outer_offset")
_SCALES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, torch.int8, torch.uint8)}
_SCALES |= {torch.float8_e4m3fn: "e4m3"}


class Described(NamedTuple):
    """Description of a weight for the native kernels."""

    words: str
    names: tuple[str | None, ...]  # the buffers they read; None where there is none


@functools.lru_cache(maxsize=4096)
def describe(q: Quantizer) -> Described:
    """Describe a weight with row-wise buffers. Raises Declined if it is not supported."""
    rule, format = q.scale, q.format
    if type(rule) is not StoredScales or q.flat:
        raise Declined(f"for StoredScales, the scales of quantized model files, not {q}")
    if q.layout is not None and not q.is_dense():
        raise Declined(f"for plain codes or planes, not layout={q.layout}")
    stored = rule.stored(format, q.block)
    words = [_codes(q)]
    for name in ("scale", "outer_scale"):
        if name not in stored:
            continue
        dtype, block = stored[name]
        size = 0 if name == "outer_scale" and set(block) == {-1} else _along(block)
        if dtype not in _SCALES or size is None:
            raise Declined(f"for float or one-byte scales of parts of a row, not {rule} with blocks of {q.block}")
        words.append(f"{name.removesuffix('_scale')}={_SCALES[dtype]}:{size}")
    if isinstance(rule.scale, Format) and not rule.scale.is_integer:
        if rule.scale.bits > 8:
            raise Declined(f"for float or one-byte scales of parts of a row, not {rule}")
        words.append(f"scale_numbers={_listed(_scale_numbers(rule.scale))}")
    words += ["divided"] if rule.divided else []
    words += ["offset"] if rule.offset else []
    buffers = {"codes", *q.stored()}
    return Described(" ".join(words), tuple(name if name in buffers else None for name in _NAMES))


@functools.lru_cache(maxsize=4096)
def group_of_codes(q: Quantizer, ndim: int) -> int:
    """The number of elements per scale (0: a row) of a left factor that is multiplied as codes.

    Raises Declined if it is not supported.
    """
    is_plain = q.layout is None and not q.flat and q.hadamard is None
    if q.format != INT8 or not is_plain or q.scale.has_zero_point() or q.scale.is_compound:
        raise Declined(f"for plain int8 codes without zero points, not {q}")
    if q.scale.stored(q.format, q.block)["scale"][0] not in FLOATS or not is_float_scale(q):
        raise Declined(f"for int8 codes with float scales, not {q}")
    *lead, group = blocks.per_dimension(q.block, ndim)
    if any(size != 1 for size in lead) or (group != -1 and group % 32):
        raise Declined(f"for int8 codes with a scale per row or per multiple of 32 elements, not blocks of {q.block}")
    return max(group, 0)


def is_float_scale(q: Quantizer) -> bool:
    """Whether the scale is stored as its value, in a float dtype."""
    rule = q.scale
    return rule.scale_is_stored or (type(rule) is StoredScales and isinstance(rule.scale, torch.dtype))


def _codes(q: Quantizer) -> str:
    """Describe the codes."""
    format = q.format
    zero = q.scale.zero(format) if isinstance(format, Integer) else 0
    if format.bits in (2, 4) and q.layout is None:
        count = 2**format.bits
        packed = packing.pack(torch.arange(count), format.bits)
        codes = packing.unpack(packed, format.bits, count, format.dtype)
        values = format.decode(codes, zero) if isinstance(format, Integer) else format.decode(codes)
        return f"codes=bits{format.bits} numbers={_listed(values.tolist() * (16 // count))}"
    if format == INT8 and q.layout is None:
        return "codes=int8"
    if format.is_integer and isinstance(q.layout, Planes) and zero == 0:
        return f"codes={'int' if format.dtype.is_signed else 'uint'}{format.bits}"
    raise Declined(f"for int8, codes of 2 or 4 bits, and integers of 3, 5 or 6 bits in planes, not {format.name}")


def _scale_numbers(format: Format) -> list[float]:
    """The values of all 256 bytes as scales; NaN for bytes that are not codes."""
    count = 2**format.bits
    codes = torch.arange(count, dtype=torch.int16).to(torch.uint8).view(format.dtype)
    return format.decode(codes).tolist() + [float("nan")] * (256 - count)


def _listed(values: list[float]) -> str:
    """The bits of float32 values, separated by commas."""
    return ",".join(str(struct.unpack("I", struct.pack("f", x))[0]) for x in values)


def _along(block: blocks.Block) -> int | None:
    """The size of a matrix's block if it is part of one row, else None."""
    rows, size = blocks.per_dimension(block, 2)
    return size if rows == 1 and size != -1 else None


def check_shape(described: Described, k: int, own: int | None = None) -> None:
    """Raise Declined unless rows of k elements are supported. `own` is the group size of a left factor of codes."""
    sizes = {word.partition("=")[0]: int(word.rpartition(":")[2]) for word in described.words.split() if ":" in word}
    group = sizes["scale"]
    if group != 16 and group % 32:
        raise Declined(f"for groups of 16, 32 or multiples of 32 elements, not of {group}")
    if sizes.get("outer", 0) % group:
        raise Declined("for outer scales over whole groups")
    if k == 0 or k % 32 or k % group:
        raise Declined(f"for rows of whole groups and a multiple of 32 elements, not of {k}")
    small, large = sorted((k if own is None or not 0 < own < k else own, group))
    if own is not None and large < k and large % small:
        raise Declined(f"for group sizes of which one divides the other, not {own} and {group}")
