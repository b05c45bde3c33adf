"""Quantizing and dequantizing on the CPU, in C++: bit for bit what the reference gives (native/quantize/).

`quantize_native` and `dequantize_native` are the calls; the kernels say for which arguments, by shapes and dtypes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.quantizers import declines_shape, describe
from hop.numerics import blocks, copies, memory_format
from hop.numerics.formats import Format
from hop.numerics.quantizer import Quantizer

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NOISE = (torch.uint8, torch.int32)


# ---- calls


def quantize_native(
    quantizer: str,
    x: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    noise: Tensor | None = None,
) -> list[Tensor]:
    """The buffers of the row-wise copy of x, which `declines` has let through."""
    if not memory_format.is_channels_last(x):
        return _quantize_rows(quantizer, x, scale, zero_point, noise)
    last = _channels_last(quantizer, x.shape)
    if last is None:
        codes, *rest = _quantize_rows(quantizer, x, scale, zero_point, noise)
        return [memory_format.like(codes, x) if _keeps(quantizer) else codes, *rest]
    moved = [None if t is None else t.movedim(1, -1) for t in (scale, zero_point, noise)]
    codes, *rest = (t.movedim(-1, 1) for t in _quantize_rows(last, x.movedim(1, -1), *moved))
    return [codes, *(t.reshape(-1).view(t.shape) for t in rest)]  # which are contiguous


def _keeps(quantizer: str) -> bool:
    return Quantizer.parse(quantizer).keeps_memory_format()


def _channels_last(quantizer: str, shape: Sequence[Any]) -> str | None:
    """The quantizer that makes of (N, *S, C) what `quantizer` makes of (N, C, *S); None if there is none here."""
    q = Quantizer.parse(quantizer)
    if not q.keeps_memory_format() or q.scale.is_sum or q.scale.outer_block is not None:  # a sum has an order
        return None
    known = tracing.hints(shape)
    if known is None:
        return None
    n, channels, *size = known
    of_examples, of_channels, *block = blocks.per_dimension(q.block, len(known))
    last = str(replace(q, block=(of_examples, *block, of_channels)))
    return None if declines_shape(last, (n, *size, channels)) else last


def _quantize_rows(
    quantizer: str, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, noise: Tensor | None
) -> list[Tensor]:
    description = describe(quantizer)
    assert not isinstance(description, str)
    zero = None if zero_point is None else _zero_codes(zero_point, description.quantizer.format)
    return native_operators.quantize(x, scale, zero, noise, description.words)


def _quantize_product(
    quantizer: str, x: Tensor, noise: Tensor | None, factor: Tensor, stream: int | None = None
) -> list[Tensor]:
    """The buffers of the row-wise copy of x times a factor, with noise that is given, or found from its seed."""
    description = describe(quantizer)
    assert not isinstance(description, str)
    stream = -1 if stream is None or noise is None else stream
    return native_operators.quantize_product(x, factor, noise, stream, description.words)


def _zero_codes(zero_point: Tensor, format: Format) -> Tensor:
    codes = zero_point.round() if zero_point.is_floating_point() else zero_point
    return codes.clamp(format.min, format.max).to(format.dtype)


def dequantize_native(quantizer: str, buffers: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers of the row-wise copy, which `declines` has let through."""
    codes = buffers[0]
    if not memory_format.is_channels_last(codes):
        return _dequantize_rows(quantizer, buffers, shape, dtype)
    last = _channels_last(quantizer, shape)
    if last is None:
        x = _dequantize_rows(quantizer, buffers, shape, dtype)
        return memory_format.like(x, codes) if _keeps(quantizer) else x
    n, channels, *size = shape
    moved = [b.movedim(1, -1) for b in buffers]
    return _dequantize_rows(last, moved, (n, *size, channels), dtype).movedim(-1, 1)


def _dequantize_rows(quantizer: str, buffers: Sequence[Tensor], shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    description = describe(quantizer)
    assert not isinstance(description, str)
    codes, scale, second = (*buffers, None)[:3]
    return native_operators.dequantize(codes, scale, second, list(shape), description.back(dtype))


@dataclass(frozen=True, eq=False, repr=False)
class _NativeQuantizer(Quantizer):
    """A quantizer whose copies are made here, for hop.numerics.copies."""

    def quantize(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        buffers = quantize_native(self.spelling, x, scale, zero_point, noise)
        return dict(zip(("codes", *self.stored()), buffers, strict=True))

    def dequantize(self, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        ordered = [buffers[name] for name in ("codes", *self.stored())]
        return dequantize_native(self.spelling, ordered, tuple(shape), torch.float32)

    @functools.cached_property
    def spelling(self) -> str:
        return str(Quantizer(**{f.name: getattr(self, f.name) for f in fields(Quantizer)}))


@functools.lru_cache(maxsize=1024)
def _native(quantizer: str) -> Quantizer:
    parsed = Quantizer.parse(quantizer)
    return _NativeQuantizer(**{f.name: getattr(parsed, f.name) for f in fields(Quantizer)})


# ---- the kernels


def _declines_quantize(call: tuple[Any, ...]) -> str | None:
    quantizer, x, scale, zero_point, noise, usages, *product = call
    if (reason := native.declines_here()) is not None:
        return reason
    shape = tracing.hints(x.shape)
    if shape is None:
        return f"nothing is known of the sizes {tuple(x.shape)}"
    if x.dtype not in _DTYPES or 0 in shape:
        return f"for float32, bfloat16 and float16 tensors that are not empty, not {x.dtype} of {tuple(x.shape)}"
    if (reason := native.declines_tensor("x", x)) is not None:
        return reason
    for name, t in (("scale", scale), ("zero_point", zero_point), ("noise", noise)):
        if t is not None and (reason := native.declines_tensor(name, t)) is not None:
            return reason
    if product:
        return _declines_product(call, shape)
    for usage in usages:
        reason = declines_shape(quantizer, shape if usage == copies.ROWWISE else tuple(copies.columns(shape)))
        if reason is None and usage == copies.ROWWISE:
            reason = _declines_given(quantizer, shape, x, scale, zero_point, noise)
        if reason is not None:
            return reason
    return None


def _declines_product(call: tuple[Any, ...], shape: tuple[int, ...]) -> str | None:
    quantizer, x, scale, _, noise, usages, factor, *rest = call
    seeded = bool(rest) and rest[0] is not None
    if scale is not None or tuple(usages) != (copies.ROWWISE,) or x.dim() not in (2, 3):
        return f"for the row-wise copy of matrices times a factor, with scales that are found; not {tuple(usages)}"
    q = Quantizer.parse(quantizer)
    if (reason := declines_shape(quantizer, shape, shape[-1])) is not None:
        return reason
    lead = list(zip(blocks.per_dimension(q.block, len(shape)), shape, strict=True))[:-1]
    of_rows = all(1 in pair for pair in lead)
    if not of_rows or q.scale.outer_block is not None or q.scale.missing() is not None or q.flat:
        return f"for blocks within rows, and a rule that finds one scale for each, of x times a factor; not {quantizer}"
    sizes = tracing.hints(factor.shape)
    if factor.dtype != torch.float32 or sizes is None or sizes[-1:] != shape[-1:] or any(n != 1 for n in sizes[:-1]):
        return f"for a factor in float32 of each column of {shape}, not {factor.dtype} of {tuple(factor.shape)}"
    if noise is not None and not seeded and (noise.dtype not in _NOISE or noise.shape != x.shape):
        return f"for noise in uint8 or int32 of x's shape, not {noise.dtype} of {tuple(noise.shape)}"
    return native.declines_tensor("factor", factor)


def _declines_given(
    quantizer: str, sizes: tuple[int, ...], x: Tensor, scale: Any, zero_point: Any, noise: Any
) -> str | None:
    q = Quantizer.parse(quantizer)
    if noise is not None and (noise.dtype not in _NOISE or noise.shape != x.shape):
        return f"for noise in uint8 or int32 of x's shape, not {noise.dtype} of {tuple(noise.shape)}"
    if (scale is None) != (zero_point is None) and q.scale.has_zero_point():
        return "scale and zero_point are not both given"
    if scale is None:
        return "needs a scale" if q.scale.missing() is not None else None
    shape, dtype = q.buffers(sizes)[q.scale.given_name]
    if tracing.hints(scale.shape) != shape or scale.dtype not in (torch.float32, dtype):
        return f"for a scale in float32 or {dtype} of {shape}, not {scale.dtype} of {tuple(scale.shape)}"
    if zero_point is not None and tracing.hints(zero_point.shape) != shape:
        return f"for a zero_point of {shape}, not {tuple(zero_point.shape)}"
    return None


def _quantize(call: tuple[Any, ...]) -> list[Tensor]:
    quantizer, x, scale, zero_point, noise, usages, *product = call
    if product:
        return _quantize_product(quantizer, x, noise, *product)
    if tuple(usages) == (copies.ROWWISE,):
        return quantize_native(quantizer, x, scale, zero_point, noise)
    return list(copies.quantize(_native(quantizer), x, tuple(usages), scale, zero_point, noise).values())


def _declines_dequantize(call: tuple[Any, ...]) -> str | None:
    quantizer, buffers, usages, sizes, dtype = call
    if (reason := native.declines_here()) is not None:
        return reason
    shape = tracing.hints(sizes)
    if shape is None:
        return f"nothing is known of the sizes {tuple(sizes)}"
    if dtype not in _DTYPES or 0 in shape:
        return f"to float32, bfloat16 and float16, for tensors that are not empty; not {dtype} of {tuple(shape)}"
    for buffer in buffers:
        if (reason := native.declines_tensor("a buffer", buffer)) is not None:
            return reason
    shape = tuple(shape) if copies.ROWWISE in usages else tuple(copies.columns(shape))
    if (reason := declines_shape(quantizer, shape)) is not None:
        return reason
    described = list(Quantizer.parse(quantizer).buffers(shape).values())
    own = buffers[: len(described)] if copies.ROWWISE in usages else buffers
    if [(tracing.hints(b.shape), b.dtype) for b in own] != described:
        return "for the buffers that the quantizer describes"
    return None


def _dequantize(call: tuple[Any, ...]) -> Tensor:
    quantizer, buffers, usages, shape, dtype = call
    if copies.ROWWISE in usages:
        count = 3 if len(describe(quantizer).quantizer.stored()) > 1 else 2  # type: ignore[union-attr]
        return dequantize_native(quantizer, buffers[:count], tuple(shape), dtype)
    names = copies.names(Quantizer.parse(quantizer), tuple(usages))
    return copies.dequantize(_native(quantizer), dict(zip(names, buffers, strict=True)), shape).to(dtype)


def _declines_fake(call: tuple[Any, ...]) -> str | None:
    quantizer, x, scale, zero_point, noise, _ = call
    if Quantizer.parse(quantizer).adds_noise():
        return "noise in the place of rounding"
    return _declines_quantize((quantizer, x, scale, zero_point, noise, (copies.ROWWISE,)))


def _fake_quantize(call: tuple[Any, ...]) -> Tensor:
    quantizer, x, scale, zero_point, noise, _ = call
    return dequantize_native(quantizer, quantize_native(quantizer, x, scale, zero_point, noise), x.shape, x.dtype)


QUANTIZE = Kernel("native", _declines_quantize, _quantize, native=True)
DEQUANTIZE = Kernel("native", _declines_dequantize, _dequantize, native=True)
FAKE_QUANTIZE = Kernel("native", _declines_fake, _fake_quantize, native=True)


# ---- for plans


def words_of(q: Quantizer, x: Tensor) -> str | None:
    """What the native operator is told to quantize x row-wise, by the scale that the rule finds; None where it does not
    take that."""
    asks = q.is_random() or q.hadamard is not None or x.dtype not in _DTYPES or q.scale.missing() is not None
    if asks or (x.dim() > 3 and memory_format.is_channels_last(x)):
        return None
    takes = QUANTIZE.supports((str(q), x, None, None, None, [copies.ROWWISE]))
    return describe(str(q)).words if takes else None  # type: ignore[union-attr]


def words_back(x: Operand, dtype: torch.dtype) -> str | None:
    """What it is told to give the numbers of x in `dtype`, likewise."""
    if x.usages != (copies.ROWWISE,) or dtype not in _DTYPES or x.quantizer.hadamard is not None:
        return None
    if len(x.shape) > 3 and memory_format.is_channels_last(x.codes):
        return None
    takes = DEQUANTIZE.supports((str(x.quantizer), list(x.tensors), x.usages, x.shape, dtype))
    return describe(str(x.quantizer)).back(dtype) if takes else None  # type: ignore[union-attr]
