"""Quantizing and dequantizing on the CPU, in C++: bit for bit what the reference gives (native/quantize.h).

A quantizer becomes a C structure once, and so does a shape cut into its blocks; a call passes their addresses. Any
blocks are seen as those of a tensor (batch, rows, cols), cut into tiles, so that neighbouring dimensions are merged:

    (1, 32) of (8, 4, 64)       -> (1, 1, 2048) in tiles of (1, 32)
    (-1, 1) of (8, 4, 64)       -> (1, 32, 64) in tiles of (32, 1)
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hop import _compile, blocks, copies
from hop.formats import E4M3, E5M2, E8M0, Codebook, Float, Format, Integer, float32
from hop.kernels import Kernel, native
from hop.quantizer import Quantizer
from hop.scaling import AbsMean, Amax, BlockScaling, CurrentScaling, Given, Microscaling, MinMax, Rule, TwoLevel

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES = {Given: 0, Amax: 1, MinMax: 2, AbsMean: 3, CurrentScaling: 4, BlockScaling: 4, Microscaling: 5, TwoLevel: 6}
_FORMATS = {Integer: 0, Float: 1, Codebook: 2}
_INDEX_SIZE = 65536
_COLUMNS = 1024  # blocks up to so many columns begin at whole bytes, as several are taken at a time
_PLAIN = (Tensor, torch.nn.Parameter)


class _Quantizer(ctypes.Structure):
    """hop_quantizer of native/hop.h."""

    _names = (
        "format bits rule low high zero mantissa_bits bias largest keeps_nan size zero_code affine power_of_two "
        "most_of_dtype outer_rows"
    )
    _fields_ = (
        *((name, ctypes.c_int32) for name in _names.split()),
        *((name, ctypes.c_float) for name in ("floor", "range", "inverse", "top", "inverse_top")),
        *((name, ctypes.c_void_p) for name in ("thresholds", "numbers", "index")),
    )


class _Blocks(ctypes.Structure):
    """hop_blocks of native/hop.h."""

    _fields_ = tuple((n, ctypes.c_int64) for n in ("batch", "rows", "cols", "tile_rows", "tile_cols", "row_stride"))


@functools.cache
def _functions() -> tuple[Any, Any]:
    library: Any = native.library().functions
    quantize, dequantize = library.hop_quantize, library.hop_dequantize
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    quantize.argtypes = [pointer, pointer, number, pointer, pointer, number, *[pointer] * 5, number]
    dequantize.argtypes = [pointer, pointer, number, *[pointer] * 4, number]
    return quantize, dequantize


def _check(result: int) -> None:
    if result != 0:
        raise MemoryError("the native kernels found no memory") if result == 1 else RuntimeError(f"result {result}")


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
        s.index = ctypes.addressof(kept[2]) if len(kept) > 2 else None
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
    if isinstance(rule, TwoLevel):
        s.top, s.inverse_top = rule.inner.max * format.max, float32(1 / (rule.inner.max * format.max))
        s.outer_rows = rule.outer == (1, -1)


def _tables(format: Codebook) -> tuple[Any, ...]:
    """Thresholds, numbers, and the index if there is one; NaN where there is no code."""
    size = 272
    thresholds, numbers = ((ctypes.c_float * size)(*[float("nan")] * size) for _ in range(2))
    thresholds[: len(format.book)] = list(format._thresholds)
    numbers[: len(format.book)] = list(format.book)
    index = (ctypes.c_uint8 * (_INDEX_SIZE + 4))()  # four bytes are read at a time
    library: Any = native.library().functions
    if len(format.book) > 16 and library.hop_codebook_index(thresholds, len(format.book), index) == 0:
        return thresholds, numbers, index
    return thresholds, numbers


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


def _row_stride(x: Tensor) -> int | None:
    """How far apart the rows of a tensor that is not contiguous lie, if they are evenly spaced."""
    if x.dim() < 2 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return None
    found, extent = None, 1
    for n, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if n == 1:
            continue
        if found is None:
            found = stride
        elif stride != found * extent:
            return None
        extent *= n
    return found


# ---- calls


def quantize_native(
    quantizer: str,
    x: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    noise: Tensor | None = None,
) -> list[Tensor]:
    """The buffers of the row-wise copy of x, which `declines` has let through."""
    made = plan(quantizer)
    stride = None
    if not x.is_contiguous():
        stride = None if made.quantizer.flat else _row_stride(x)  # type: ignore[union-attr]
        if stride is None:
            x = x.contiguous()
    found = cut(quantizer, x.shape, stride)
    assert not isinstance(made, str) and not isinstance(found, str)
    given, codes, zero, bits = None, 0, None, None
    if scale is not None:
        given, codes = scale.contiguous(), scale.dtype == torch.uint8
    if zero_point is not None:
        zero = _zero_codes(zero_point, made.quantizer.format).contiguous()
    if noise is not None:
        bits = noise.contiguous()
    out = [x.new_empty(shape, dtype=dtype) for shape, dtype in found.buffers]
    _check(
        _functions()[0](
            made.address,
            found.address,
            _DTYPES[x.dtype],
            x.data_ptr(),
            None if given is None else given.data_ptr(),
            codes,
            None if zero is None else zero.data_ptr(),
            None if bits is None else bits.data_ptr(),
            out[0].data_ptr(),
            out[1].data_ptr(),
            out[2].data_ptr() if len(out) > 2 else None,
            torch.get_num_threads(),
        )
    )
    return out


def _zero_codes(zero_point: Tensor, format: Format) -> Tensor:
    codes = zero_point.round() if zero_point.is_floating_point() else zero_point
    return codes.clamp(format.min, format.max).to(format.dtype)


def dequantize_native(quantizer: str, buffers: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers of the row-wise copy, which `declines` has let through."""
    made, found = plan(quantizer), cut(quantizer, shape)
    assert not isinstance(made, str) and not isinstance(found, str)
    own = [b if b.is_contiguous() else b.contiguous() for b in buffers]
    out = own[0].new_empty(shape, dtype=dtype)
    _check(
        _functions()[1](
            made.address,
            found.address,
            _DTYPES[dtype],
            own[0].data_ptr(),
            own[1].data_ptr(),
            own[2].data_ptr() if len(own) > 2 else None,
            out.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return out


@dataclass(frozen=True, eq=False, repr=False)
class _NativeQuantizer(Quantizer):
    """A quantizer whose copies are made here, for hop.copies."""

    def quantize(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        made = quantize_native(self.spelling, x, scale, zero_point, noise)
        return dict(zip(("codes", *self.stored()), made, strict=True))

    def dequantize(self, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        own = [buffers[name] for name in ("codes", *self.stored())]
        return dequantize_native(self.spelling, own, tuple(shape), torch.float32)

    @functools.cached_property
    def spelling(self) -> str:
        return str(Quantizer(**{f.name: getattr(self, f.name) for f in fields(Quantizer)}))


@functools.lru_cache(maxsize=1024)
def _native(quantizer: str) -> Quantizer:
    parsed = Quantizer.parse(quantizer)
    return _NativeQuantizer(**{f.name: getattr(parsed, f.name) for f in fields(Quantizer)})


# ---- the kernels


@functools.cache
def _absent() -> str | None:
    found = hasattr(native.library().functions, "hop_dequantize")
    return None if found else "the native kernels were built without these: install hop again"


def _declines_any() -> str | None:
    if (reason := native.library().declines()) is not None or (reason := _absent()) is not None:
        return reason
    return None if _compile.is_plain_eager() else "writes into memory, so for eager mode only"


def _declines_tensor(name: str, x: Tensor) -> str | None:
    if type(x) not in _PLAIN or not x.is_cpu or x.layout != torch.strided or x.is_neg():
        return f"for plain tensors on the CPU, and {name} is a {type(x).__name__} on {x.device}"
    return None


def _declines_quantize(call: tuple[Any, ...]) -> str | None:
    quantizer, x, scale, zero_point, noise, usages = call
    if (reason := _declines_any()) is not None:
        return reason
    if x.dtype not in _DTYPES or x.numel() == 0:
        return f"for float32, bfloat16 and float16 tensors that are not empty, not {x.dtype} of {tuple(x.shape)}"
    given = {"x": x, "scale": scale, "zero_point": zero_point, "noise": noise}
    for name, t in given.items():
        if t is not None and (reason := _declines_tensor(name, t)) is not None:
            return reason
    for usage in usages:
        found = cut(quantizer, x.shape if usage == copies.ROWWISE else tuple(copies.columns(x.shape)))
        if isinstance(found, str):
            return found
        if usage == copies.ROWWISE and (reason := _declines_given(quantizer, found, x, scale, zero_point, noise)):
            return reason
    return None


def _declines_given(quantizer: str, found: Cut, x: Tensor, scale: Any, zero_point: Any, noise: Any) -> str | None:
    made = plan(quantizer)
    assert not isinstance(made, str)
    if noise is not None and (noise.dtype != torch.uint8 or noise.shape != x.shape):
        return f"for noise in uint8 of x's shape, not {noise.dtype} of {tuple(noise.shape)}"
    if (scale is None) != (zero_point is None) and made.structure.affine:
        return "scale and zero_point are not both given"
    if scale is None:
        return "needs a scale" if made.structure.rule == _RULES[Given] else None
    shape, dtype = found.buffers[-1 if isinstance(made.quantizer.scale, TwoLevel) else 1]
    if scale.shape != shape or scale.dtype not in (torch.float32, dtype):
        return f"for a scale in float32 or {dtype} of {shape}, not {scale.dtype} of {tuple(scale.shape)}"
    if zero_point is not None and zero_point.shape != shape:
        return f"for a zero_point of {shape}, not {tuple(zero_point.shape)}"
    return None


def _quantize(call: tuple[Any, ...]) -> list[Tensor]:
    quantizer, x, scale, zero_point, noise, usages = call
    if tuple(usages) == (copies.ROWWISE,):
        return quantize_native(quantizer, x, scale, zero_point, noise)
    return list(copies.quantize(_native(quantizer), x, tuple(usages), scale, zero_point, noise).values())


def _declines_dequantize(call: tuple[Any, ...]) -> str | None:
    quantizer, buffers, usages, shape, dtype = call
    if (reason := _declines_any()) is not None:
        return reason
    if dtype not in _DTYPES or 0 in shape:
        return f"to float32, bfloat16 and float16, for tensors that are not empty; not {dtype} of {tuple(shape)}"
    for buffer in buffers:
        if (reason := _declines_tensor("a buffer", buffer)) is not None:
            return reason
    found = cut(quantizer, tuple(shape) if copies.ROWWISE in usages else tuple(copies.columns(shape)))
    if isinstance(found, str):
        return found
    own = buffers[: len(found.buffers)] if copies.ROWWISE in usages else buffers
    if [(b.shape, b.dtype) for b in own] != list(found.buffers):
        return "for the buffers that the quantizer describes"
    return None


def _dequantize(call: tuple[Any, ...]) -> Tensor:
    quantizer, buffers, usages, shape, dtype = call
    if copies.ROWWISE in usages:
        count = 3 if len(plan(quantizer).quantizer.stored()) > 1 else 2  # type: ignore[union-attr]
        return dequantize_native(quantizer, buffers[:count], tuple(shape), dtype)
    names = [b.name for b in copies.describe(Quantizer.parse(quantizer), shape, tuple(usages))]
    return copies.dequantize(_native(quantizer), dict(zip(names, buffers, strict=True)), shape).to(dtype)


def _declines_fake(call: tuple[Any, ...]) -> str | None:
    quantizer, x, scale, zero_point, noise, _ = call
    return _declines_quantize((quantizer, x, scale, zero_point, noise, (copies.ROWWISE,)))


def _fake_quantize(call: tuple[Any, ...]) -> Tensor:
    quantizer, x, scale, zero_point, noise, _ = call
    return dequantize_native(quantizer, quantize_native(quantizer, x, scale, zero_point, noise), x.shape, x.dtype)


QUANTIZE = Kernel("native", _declines_quantize, _quantize)
DEQUANTIZE = Kernel("native", _declines_dequantize, _dequantize)
FAKE_QUANTIZE = Kernel("native", _declines_fake, _fake_quantize)
