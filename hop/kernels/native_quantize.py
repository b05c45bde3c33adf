"""Quantizing and dequantizing on the CPU, in C++: bit for bit what the reference gives (native/quantize/).

`quantize_native` and `dequantize_native` are the calls; the kernels say for which arguments, by shapes and dtypes.
"""

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hop import blocks, copies, memory_format
from hop.compat import tracing
from hop.formats import Format
from hop.kernels import Kernel, native
from hop.kernels.memory import address
from hop.kernels.native_quantizers import Cut, cut, plan
from hop.quantizer import Quantizer
from hop.scaling import AbsMean, TwoLevel

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def _functions() -> Any:
    library: Any = native.library().functions
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    of_quantize = [pointer, pointer, number, pointer, pointer, number, *[pointer] * 5, number]
    of_product = [pointer, pointer, number, pointer, number, pointer, pointer, ctypes.c_uint32, *[pointer] * 4, number]
    library.hop_quantize.argtypes, library.hop_quantize_product.argtypes = of_quantize, of_product
    library.hop_dequantize.argtypes = [pointer, pointer, number, *[pointer] * 4, number]
    library.hop_transpose.argtypes = [size, size, size, number, pointer, pointer, number]
    return library


def _check(result: int) -> None:
    if result != 0:
        raise MemoryError("the native kernels found no memory") if result == 1 else RuntimeError(f"result {result}")


# ---- calls


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


def _contiguous(x: Tensor) -> Tensor:
    """x in contiguous memory: matrices that lie transposed are turned in lines of the cache, which takes about half of
    the time of PyTorch's copy."""
    if not memory_format.is_turned(x):
        return x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, cols = x.shape[:-3:-1]  # as they lie
    sizes = math.prod(x.shape[:-2]), rows, cols, x.element_size()
    _check(_functions().hop_transpose(*sizes, address(x), address(out), torch.get_num_threads()))
    return out


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


@functools.lru_cache(maxsize=4096)
def _channels_last(quantizer: str, shape: tuple[int, ...]) -> str | None:
    """The quantizer that makes of (N, *S, C) what `quantizer` makes of (N, C, *S); None if there is none here."""
    q = Quantizer.parse(quantizer)
    if not q.keeps_memory_format() or isinstance(
        q.scale, AbsMean | TwoLevel
    ):  # whose sums have an order, or two blocks
        return None
    n, channels, *size = shape
    of_examples, of_channels, *block = blocks.per_dimension(q.block, len(shape))
    last = str(replace(q, block=(of_examples, *block, of_channels)))
    return None if isinstance(cut(last, (n, *size, channels)), str) else last


def _quantize_rows(
    quantizer: str, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, noise: Tensor | None
) -> list[Tensor]:
    made = plan(quantizer)
    stride = None
    if not x.is_contiguous():
        stride = None if made.quantizer.flat else _row_stride(x)  # type: ignore[union-attr]
        if stride is None:
            x = _contiguous(x)
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
        _functions().hop_quantize(
            made.address,
            found.address,
            _DTYPES[x.dtype],
            address(x),
            address(given),
            codes,
            address(zero),
            address(bits),
            address(out[0]),
            address(out[1]),
            address(out[2]) if len(out) > 2 else None,
            torch.get_num_threads(),
        )
    )
    return out


_GATHERED = 2**14  # columns: of longer rows that lie as columns a thread's cache holds too few


def _quantize_product(
    quantizer: str, x: Tensor, noise: Tensor | None, factor: Tensor, stream: int | None = None
) -> list[Tensor]:
    """The buffers of the row-wise copy of x times a factor, with noise that is given, or found from its seed."""
    cols = x.shape[-1]
    turned = x.dim() == 2 and cols <= _GATHERED and memory_format.is_turned(x)
    x = x if turned else _contiguous(x)
    made, found = plan(quantizer), cut(quantizer, x.shape, cols)
    assert not isinstance(made, str) and not isinstance(found, str)
    factor, noise = factor.contiguous(), None if noise is None else noise.contiguous()
    given = address(noise)
    out = [torch.empty(shape, dtype=dtype) for shape, dtype in found.buffers]
    _check(
        _functions().hop_quantize_product(
            made.address,
            found.address,
            _DTYPES[x.dtype],
            address(x),
            turned,
            address(factor),
            None if stream is None else given,
            stream or 0,
            given if stream is None else None,
            address(out[0]),
            address(out[1]),
            address(out[2]) if len(out) > 2 else None,
            torch.get_num_threads(),
        )
    )
    return out


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


def _dequantize_rows(quantizer: str, buffers: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made, found = plan(quantizer), cut(quantizer, shape)
    assert not isinstance(made, str) and not isinstance(found, str)
    own = [b if b.is_contiguous() else b.contiguous() for b in buffers]
    out = own[0].new_empty(shape, dtype=dtype)
    _check(
        _functions().hop_dequantize(
            made.address,
            found.address,
            _DTYPES[dtype],
            address(own[0]),
            address(own[1]),
            address(own[2]) if len(own) > 2 else None,
            address(out),
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
        found = cut(quantizer, shape if usage == copies.ROWWISE else tuple(copies.columns(shape)))
        if isinstance(found, str):
            return found
        if usage == copies.ROWWISE and (reason := _declines_given(quantizer, found, x, scale, zero_point, noise)):
            return reason
    return None


def _declines_product(call: tuple[Any, ...], shape: tuple[int, ...]) -> str | None:
    quantizer, x, scale, _, noise, usages, factor, *rest = call
    seeded = bool(rest) and rest[0] is not None
    if scale is not None or tuple(usages) != (copies.ROWWISE,) or x.dim() not in (2, 3):
        return f"for the row-wise copy of matrices times a factor, with scales that are found; not {tuple(usages)}"
    q, found = Quantizer.parse(quantizer), cut(quantizer, shape, shape[-1])
    if isinstance(found, str):
        return found
    if found.structure.tile_rows != 1 or isinstance(q.scale, TwoLevel) or q.scale.missing() is not None or q.flat:
        return f"for blocks within rows, and a rule that finds one scale for each, of x times a factor; not {quantizer}"
    own = tracing.hints(factor.shape)
    if factor.dtype != torch.float32 or own is None or own[-1:] != shape[-1:] or any(n != 1 for n in own[:-1]):
        return f"for a factor in float32 of each column of {shape}, not {factor.dtype} of {tuple(factor.shape)}"
    if noise is not None and not seeded and (noise.dtype != torch.uint8 or noise.shape != x.shape):
        return f"for noise in uint8 of x's shape, not {noise.dtype} of {tuple(noise.shape)}"
    return native.declines_tensor("factor", factor)


def _declines_given(quantizer: str, found: Cut, x: Tensor, scale: Any, zero_point: Any, noise: Any) -> str | None:
    made = plan(quantizer)
    assert not isinstance(made, str)
    if noise is not None and (noise.dtype != torch.uint8 or noise.shape != x.shape):
        return f"for noise in uint8 of x's shape, not {noise.dtype} of {tuple(noise.shape)}"
    if (scale is None) != (zero_point is None) and made.structure.affine:
        return "scale and zero_point are not both given"
    if scale is None:
        return "needs a scale" if made.quantizer.scale.missing() is not None else None
    shape, dtype = found.buffers[-1 if isinstance(made.quantizer.scale, TwoLevel) else 1]
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
    found = cut(quantizer, tuple(shape) if copies.ROWWISE in usages else tuple(copies.columns(shape)))
    if isinstance(found, str):
        return found
    own = buffers[: len(found.buffers)] if copies.ROWWISE in usages else buffers
    if [(tracing.hints(b.shape), b.dtype) for b in own] != list(found.buffers):
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


QUANTIZE = Kernel("native", _declines_quantize, _quantize, leaf=True)
DEQUANTIZE = Kernel("native", _declines_dequantize, _dequantize, leaf=True)
FAKE_QUANTIZE = Kernel("native", _declines_fake, _fake_quantize, leaf=True)
