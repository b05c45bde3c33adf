"""Products by weights as files of quantized models hold them, by the native kernels: the words that describe one to
hop_native::group_product (native/torch/groups.cpp)."""

import functools
import struct
from typing import Any, NamedTuple

import torch

from hop.dispatch.kernel import Declined
from hop.numerics import blocks, packing
from hop.numerics.formats import INT8, Format
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.stored_scales import StoredScales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("codes", "high_codes", "scale", "offset", "outer_scale", "outer_offset")
_SCALES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, torch.int8, torch.uint8)}
_SCALES |= {torch.float8_e4m3fn: "e4m3"}


class Described(NamedTuple):
    """A weight as the kernels take it."""

    words: str
    names: tuple[str | None, ...]  # the buffers that they read, None where there is none


@functools.lru_cache(maxsize=4096)
def describe(q: Quantizer) -> Described:
    """A weight with row-wise buffers. Raises Declined if the kernels take none such."""
    rule, format = q.scale, q.format
    if type(rule) is not StoredScales or q.flat:
        raise Declined(f"for scales as files of quantized models hold them, StoredScales, not {q}")
    if q.layout is not None and not q.is_dense():
        raise Declined(f"for plain codes and those in planes, not layout={q.layout}")
    stored = rule.stored(format, q.block)
    words = [_codes(q)]
    for name in ("scale", "outer_scale"):
        if name not in stored:
            continue
        dtype, block = stored[name]
        size = 0 if name == "outer_scale" and set(block) == {-1} else _along(block)
        if dtype not in _SCALES or size is None:
            raise Declined(f"for scales of parts of a row, in floats or in a byte, not {rule} of blocks of {q.block}")
        words.append(f"{name.removesuffix('_scale')}={_SCALES[dtype]}:{size}")
    if isinstance(rule.scale, Format) and not rule.scale.is_integer:
        if rule.scale.bits > 8:
            raise Declined(f"for scales of parts of a row, in floats or in a byte, not {rule}")
        words.append(f"scale_numbers={_listed(_scale_numbers(rule.scale))}")
    words += ["divided"] if rule.divided else []
    words += ["offset"] if rule.offset else []
    buffers = {"codes", *q.stored()}
    return Described(" ".join(words), tuple(name if name in buffers else None for name in _NAMES))


@functools.lru_cache(maxsize=4096)
def group_of_codes(q: Quantizer, ndim: int) -> int:
    """How many elements share a scale, 0 for a row, of a left factor of `ndim` dimensions that is multiplied as codes.
    Raises Declined if the kernels take none such."""
    is_plain = q.layout is None and not q.flat and q.hadamard is None
    if q.format != INT8 or not is_plain or q.scale.has_zero_point() or q.scale.is_compound:
        raise Declined(f"for plain codes of int8 without zero points beside them, not {q}")
    if q.scale.stored(q.format, q.block)["scale"][0] not in FLOATS or not is_float_scale(q):
        raise Declined(f"for scales of int8 codes in floats, not {q}")
    *lead, group = blocks.per_dimension(q.block, ndim)
    if any(size != 1 for size in lead) or (group != -1 and group % 32):
        raise Declined(f"for scales of rows of int8 codes, or of multiples of 32 elements, not blocks of {q.block}")
    return max(group, 0)


def is_float_scale(q: Quantizer) -> bool:
    """Whether the scale of codes is stored as the number that it is, in a float dtype."""
    rule = q.scale
    return rule.scale_is_stored or (type(rule) is StoredScales and isinstance(rule.scale, torch.dtype))


def _codes(q: Quantizer) -> str:
    """The words of codes."""
    format: Any = q.format
    zero = q.scale.zero(format) if format.is_integer else 0
    if format.bits in (2, 4) and q.layout is None:
        count = 2**format.bits
        packed = packing.pack(torch.arange(count), format.bits)
        codes = packing.unpack(packed, format.bits, count, format.dtype)
        values = format.decode(codes, zero) if format.is_integer else format.decode(codes)
        return f"codes=bits{format.bits} numbers={_listed(values.tolist() * (16 // count))}"
    if format == INT8 and q.layout is None:
        return "codes=int8"
    if format.is_integer and isinstance(q.layout, Planes) and zero == 0:
        return f"codes={'int' if format.dtype.is_signed else 'uint'}{format.bits}"
    raise Declined(f"for int8, any codes of 2 and 4 bits, and integers of 3, 5 and 6 bits in planes, not {format.name}")


def _scale_numbers(format: Format) -> list[float]:
    """What the 256 bytes of scales stand for; those that are no codes, NaN."""
    count = 2**format.bits
    codes = torch.arange(count, dtype=torch.int16).to(torch.uint8).view(format.dtype)
    return format.decode(codes).tolist() + [float("nan")] * (256 - count)


def _listed(values: list[float]) -> str:
    """The bits of float32 numbers."""
    return ",".join(str(_bits(x)) for x in values)


def _along(block: blocks.Block) -> int | None:
    """The size of a block of a matrix that is part of one row; None for another block."""
    rows, size = blocks.per_dimension(block, 2)
    return size if rows == 1 and size != -1 else None


def _bits(x: float) -> int:
    """Those of a float32."""
    return struct.unpack("I", struct.pack("f", x))[0]


def check_shape(described: Described, k: int, own: int | None = None) -> None:
    """Raise Declined unless rows of k elements are taken; `own` is the group of a left factor of codes."""
    sizes = {word.partition("=")[0]: int(word.rpartition(":")[2]) for word in described.words.split() if ":" in word}
    group = sizes["scale"]
    if group != 16 and group % 32:
        raise Declined(f"for groups of 16, 32 or multiples of 32 elements, not of {group}")
    if sizes.get("outer", 0) % group:
        raise Declined("for floats of whole groups")
    if k == 0 or k % 32 or k % group:
        raise Declined(f"for rows of whole groups, and of a multiple of 32 elements, not of {k}")
    small, large = sorted((k if own is None or not 0 < own < k else own, group))
    if own is not None and large < k and large % small:
        raise Declined(f"for groups on one side that are whole ones of the other, not of {own} and {group}")
