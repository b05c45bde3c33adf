"""Quantizers and shapes as C structures, for the native kernels of quantize and dequantize (native/hop.h).

A quantizer becomes a structure once, and so does a shape cut into its blocks. Any blocks are seen as those of a tensor
(batch, rows, cols), cut into tiles, so that neighbouring dimensions are merged:

    (1, 32) of (8, 4, 64)       -> (1, 1, 2048) in tiles of (1, 32)
    (-1, 1) of (8, 4, 64)       -> (1, 32, 64) in tiles of (32, 1)
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hop import blocks
from hop.formats import E4M3, E5M2, E8M0, Codebook, Float, Format, Integer, float32
from hop.kernels import native
from hop.quantizer import Quantizer
from hop.requantization import Reciprocal
from hop.scaling import (
    MX_ROUNDINGS,
    AbsMean,
    Amax,
    BlockScaling,
    CurrentScaling,
    Given,
    Microscaling,
    MinMax,
    Rule,
    TwoLevel,
    exponent_of,
)

_RULES = {Given: 0, Amax: 1, MinMax: 2, AbsMean: 3, CurrentScaling: 4, BlockScaling: 4, Microscaling: 5, TwoLevel: 6}
_FORMATS = {Integer: 0, Float: 1, Codebook: 2}
_INDEX_SIZE, _TABLES_SIZE = 65536, 2049
_COLUMNS = 512  # blocks up to so many columns begin at whole bytes, as several are taken at a time


class _Quantizer(ctypes.Structure):
    """hop_quantizer of native/hop.h."""

    _names = (
        "format bits rule low high zero mantissa_bits bias largest keeps_nan size zero_code affine power_of_two "
        "most_of_dtype outer_rows rounding largest_power"
    )
    _fields_ = (
        *((name, ctypes.c_int32) for name in _names.split()),
        *((name, ctypes.c_float) for name in ("floor", "range", "inverse", "top", "inverse_top")),
        *((name, ctypes.c_void_p) for name in ("thresholds", "numbers", "index", "tables")),
    )


class _Blocks(ctypes.Structure):
    """hop_blocks of native/hop.h."""

    _fields_ = tuple((n, ctypes.c_int64) for n in ("batch", "rows", "cols", "tile_rows", "tile_cols", "row_stride"))


# ---- a quantizer


@dataclass(frozen=True)
class Plan:
    """A quantizer as a C structure."""

    quantizer: Quantizer
    structure: _Quantizer
    kept: tuple[Any, ...]  # what the structure points to

    @functools.cached_property
    def address(self) -> int:
        return ctypes.addressof(self.structure)

    @property
    def outer_rows(self) -> bool:
        return bool(self.structure.outer_rows)


@functools.lru_cache(maxsize=1024)
def plan(quantizer: str) -> Plan | str:
    """The plan, or why there is none."""
    q = Quantizer.parse(quantizer)
    reason = _unsupported(q)
    if reason is not None:
        return reason
    s, format = _Quantizer(format=_FORMATS[type(q.format)], bits=q.format.bits, rule=_RULES[type(q.scale)]), q.format
    kept: tuple[Any, ...] = ()
    if isinstance(format, Integer):
        s.low, s.high, s.zero = format.low, format.high, format.zero
    elif isinstance(format, Float):
        s.mantissa_bits, s.bias, s.largest = format.mantissa_bits, format.bias, format.largest
        s.keeps_nan = format.dtype.is_floating_point
    elif isinstance(format, Codebook):
        s.size, s.zero_code = len(format.book), format._zero_code
        kept = _tables(format)
        s.thresholds, s.numbers = ctypes.addressof(kept[0]), ctypes.addressof(kept[1])
        s.tables = ctypes.addressof(kept[2])
        s.index = ctypes.addressof(kept[3]) if len(kept) > 3 else None
    s.affine = q.scale.has_zero_point()
    _describe_rule(s, q.scale, format)
    return Plan(q, s, kept)


def _describe_rule(s: _Quantizer, rule: Rule, format: Format) -> None:
    s.range = format.max
    if isinstance(rule, Amax):
        s.floor, s.range = rule.floor, format.max - format.zero
    elif isinstance(rule, MinMax):
        s.range = format.max - format.min
    elif isinstance(rule, CurrentScaling):
        s.floor, s.power_of_two = rule.eps, rule.power_of_two
        s.most_of_dtype = isinstance(rule, BlockScaling)
    elif isinstance(rule, Microscaling | TwoLevel):
        s.inverse = float32(1 / format.max)
    if isinstance(rule, Microscaling):
        s.rounding, s.largest_power = MX_ROUNDINGS.index(rule.rounding), exponent_of(format)
    if isinstance(rule, TwoLevel):
        s.top, s.inverse_top = rule.inner.max * format.max, float32(1 / (rule.inner.max * format.max))
        s.outer_rows = rule.outer == (1, -1)


def _tables(format: Codebook) -> tuple[Any, ...]:
    """Thresholds, numbers, their tables, and the index if there is one; NaN where there is no code."""
    size = 272
    thresholds, numbers = ((ctypes.c_float * size)(*[float("nan")] * size) for _ in range(2))
    thresholds[: len(format.book)] = list(format._thresholds)
    numbers[: len(format.book)] = list(format.book)
    index = (ctypes.c_uint8 * (_INDEX_SIZE + 4))()  # four bytes are read at a time
    library: Any = native.library().functions
    tables = (ctypes.c_uint8 * _TABLES_SIZE)()
    library.hop_codebook_tables(thresholds, numbers, len(format.book), tables)
    if len(format.book) > 16 and library.hop_codebook_index(thresholds, len(format.book), index) == 0:
        return thresholds, numbers, tables, index
    return thresholds, numbers, tables


def _unsupported(q: Quantizer) -> str | None:
    format, rule = q.format, q.scale
    if type(q) is not Quantizer:
        return f"for Quantizer itself, not {type(q).__name__}, which may mean another thing"
    if q.layout is not None:
        return f"for plain codes, not layout={q.layout}"
    if type(format) not in _FORMATS or type(rule) not in _RULES:
        return f"not for {format.name} by {type(rule).__name__}"
    if isinstance(format, Integer) and (format.dtype == torch.int8) != (format.low < 0):
        return f"for signed integers in int8 and others in uint8; {format.name} is otherwise"
    if isinstance(format, Float) and (format.mantissa_bits == 0 or not _is_plain_float(format)):
        return f"for e4m3, e5m2, and floats in uint8 with a mantissa; {format.name} is another"
    if isinstance(format, Codebook) and format.dtype != torch.uint8:
        return f"for codes in uint8, not {format.dtype}"
    if not isinstance(format, Float) and isinstance(rule, CurrentScaling | Microscaling | TwoLevel):
        return f"{type(rule).__name__} is for floats, and {format.name} has none"
    if isinstance(rule, Amax) and format.max == format.zero:
        return f"{format.name} has no number above its zero"
    return _unsupported_scale(rule)


def _unsupported_scale(rule: Rule) -> str | None:
    if isinstance(rule, Given) and isinstance(rule.requantize, Reciprocal):
        return "divides by the scale, and does not multiply by its reciprocal"
    if isinstance(rule, Microscaling) and not _equal(rule.exponent, E8M0):
        return f"for exponents in e8m0, not {rule.exponent.name}"
    if isinstance(rule, TwoLevel):
        if not _equal(rule.inner, E4M3):
            return f"for scales in e4m3, not {rule.inner.name}"
        if any(b != -1 for b in rule.outer) and rule.outer != (1, -1):
            return f"for an amax of the tensor or of each row, not of {rule.outer}"
    return None


def _is_plain_float(format: Float) -> bool:
    known = (E4M3, E5M2) if format.dtype.is_floating_point else (format,)
    return (format.dtype.is_floating_point or format.dtype == torch.uint8) and any(_equal(format, f) for f in known)


def _equal(a: Any, b: Any) -> bool:
    """Whether two formats differ in their names at most."""
    return type(a) is type(b) and all(
        getattr(a, f.name) == getattr(b, f.name) for f in fields(a) if f.init and f.name != "name"
    )


# ---- a shape


@dataclass(frozen=True)
class Cut:
    """A shape as a C structure, and the buffers of a tensor of it."""

    structure: _Blocks
    buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @functools.cached_property
    def address(self) -> int:
        return ctypes.addressof(self.structure)


@functools.lru_cache(maxsize=4096)
def cut(quantizer: str, shape: tuple[int, ...], row_stride: int | None = None) -> Cut | str:
    """How a tensor of `shape` is cut, or why it cannot be; rows lie `row_stride` apart, None for a contiguous one."""
    made = plan(quantizer)
    if isinstance(made, str):
        return made
    q = made.quantizer
    rows = q.rows(shape) or [1]
    sizes = blocks.per_dimension(q.block, len(rows))
    *lead, (cols, tile_cols) = [(n, n if b == -1 else min(b, n)) for n, b in zip(rows, sizes, strict=True)]
    merged = _merged(lead)
    if len(merged) > 2 or (len(merged) == 2 and merged[0][1] != 1):
        return f"for blocks of at most two dimensions, and {q.block} has more in {tuple(shape)}"
    (batch, _), (count, tile_rows) = [(1, 1), (1, 1), *merged][-2:]
    per_byte = q.per_byte()
    if row_stride is None and cols % per_byte == 0 and not made.outer_rows and count % tile_rows == 0:
        if tile_cols == cols:  # whole rows
            batch, count, cols, tile_rows, tile_cols = 1, 1, batch * count * cols, 1, tile_rows * cols
        elif tile_rows == 1 and cols % tile_cols == 0:
            batch, count, cols = 1, 1, batch * count * cols
    if tile_cols % per_byte != 0 and _COLUMNS < tile_cols < cols:
        return f"for blocks that begin at whole bytes, and {q.block} do not"
    structure = _Blocks(batch, count, cols, tile_rows, tile_cols, cols if row_stride is None else row_stride)
    return Cut(structure, tuple(q.buffers(shape).values()))


def _merged(lead: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, block) of dimensions, neighbours made one where blocks allow it."""
    found: list[tuple[int, int]] = []
    for n, b in lead:
        if n == 1:
            continue
        if found and (b == n or (found[-1][1] == 1 and n % b == 0)):
            size, block = found.pop()
            found.append((size * n, block * b))
        else:
            found.append((n, b))
    return found
