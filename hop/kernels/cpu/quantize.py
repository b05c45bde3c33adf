"""Quantize and dequantize on the CPU in C++, with the bits of the reference (native/quantize/).

`quantize_native` and `dequantize_native` make the calls; the kernels check arguments by shapes and dtypes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.quantizers import check_shape, describe
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
    """The buffers of the row-wise copy of x, for arguments that passed `_check_quantize`."""
    if not memory_format.is_channels_last(x):
        return _quantize_rows(quantizer, x, scale, zero_point, noise)
    last = _channels_last(quantizer, x.shape)
    if last is None:
        codes, *rest = _quantize_rows(quantizer, x, scale, zero_point, noise)
        return [memory_format.like(codes, x) if _keeps(quantizer) else codes, *rest]
    moved = [None if t is None else t.movedim(1, -1) for t in (scale, zero_point, noise)]
    codes, *rest = (t.movedim(-1, 1) for t in _quantize_rows(last, x.movedim(1, -1), *moved))
    return [codes, *(t.reshape(-1).view(t.shape) for t in rest)]  # these are contiguous


def _keeps(quantizer: str) -> bool:
    return Quantizer.parse(quantizer).keeps_memory_format()


def _channels_last(quantizer: str, shape: Sequence[int]) -> str | None:
    """The quantizer that treats (N, *S, C) as `quantizer` treats (N, C, *S); None if native code has none."""
    q = Quantizer.parse(quantizer)
    # the order of a sum would change
    if not q.keeps_memory_format() or q.scale.is_sum or q.scale.outer_block is not None:
        return None
    known = tracing.hints(shape)
    if known is None:
        return None
    n, channels, *size = known
    of_examples, of_channels, *block = blocks.per_dimension(q.block, len(known))
    last = str(replace(q, block=(of_examples, *block, of_channels)))
    try:
        check_shape(last, (n, *size, channels))
    except Declined:
        return None
    return last


def _quantize_rows(
    quantizer: str, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, noise: Tensor | None
) -> list[Tensor]:
    description = describe(quantizer)
    zero = None if zero_point is None else _zero_codes(zero_point, description.quantizer.format)
    return native_operators.quantize(x, scale, zero, noise, description.words)


def _quantize_product(
    quantizer: str, x: Tensor, noise: Tensor | None, factor: Tensor, stream: int | None = None
) -> list[Tensor]:
    """The buffers of the row-wise copy of x times a factor, with given noise, or noise from a seed."""
    description = describe(quantizer)
    stream = -1 if stream is None or noise is None else stream
    return native_operators.quantize_product(x, factor, noise, stream, description.words)


def _zero_codes(zero_point: Tensor, format: Format) -> Tensor:
    codes = zero_point.round() if zero_point.is_floating_point() else zero_point
    return codes.clamp(format.min, format.max).to(format.dtype)


def dequantize_native(quantizer: str, buffers: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Dequantize the row-wise copy, for arguments that passed `_check_dequantize`."""
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


def _dequantize_rows(quantizer: str, buffers: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    description = describe(quantizer)
    codes, scale, second = (*buffers, None)[:3]
    return native_operators.dequantize(codes, scale, second, list(shape), description.back(dtype))


@dataclass(frozen=True, eq=False, repr=False)
class _NativeQuantizer(Quantizer):
    """A quantizer that hop.numerics.copies uses to compute copies natively."""

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


def _check_quantize(call: Args) -> None:
    """Raise Declined unless native code supports the call."""
    quantizer, x, scale, zero_point, noise, usages, *product = call
    decline(native.declines_here())
    shape = native.sizes(x.shape)
    if x.dtype not in _DTYPES or 0 in shape:
        given = f"{x.dtype} of {tuple(x.shape)}"
        raise Declined(f"for non-empty float32, bfloat16 and float16 tensors, not {given}")
    for name, t in (("x", x), ("scale", scale), ("zero_point", zero_point), ("noise", noise)):
        if t is not None:
            decline(native.declines_tensor(name, t))
    if product:
        _check_product(call, shape)
        return
    for usage in usages:
        check_shape(quantizer, shape if usage == copies.ROWWISE else tuple(copies.columns(shape)))
        if usage == copies.ROWWISE:
            _check_given(quantizer, shape, x, scale, zero_point, noise)


def _check_product(call: Args, shape: tuple[int, ...]) -> None:
    quantizer, x, scale, _, noise, usages, factor, *rest = call
    seeded = bool(rest) and rest[0] is not None
    if scale is not None or tuple(usages) != (copies.ROWWISE,) or x.dim() not in (2, 3):
        what = "the row-wise copy of matrices times a factor, with scales from a rule"
        raise Declined(f"for {what}; not {tuple(usages)}")
    q = Quantizer.parse(quantizer)
    check_shape(quantizer, shape, shape[-1])
    lead = list(zip(blocks.per_dimension(q.block, len(shape)), shape, strict=True))[:-1]
    of_rows = all(1 in pair for pair in lead)
    if not of_rows or q.scale.outer_block is not None or q.scale.missing() is not None or q.flat:
        what = "blocks within rows and a rule that finds one scale for each, of x times a factor"
        raise Declined(f"for {what}; not {quantizer}")
    sizes = tracing.hints(factor.shape)
    if factor.dtype != torch.float32 or sizes is None or sizes[-1:] != shape[-1:] or any(n != 1 for n in sizes[:-1]):
        given = f"{factor.dtype} of {tuple(factor.shape)}"
        raise Declined(f"for a float32 factor per column of {shape}, not {given}")
    if noise is not None and not seeded:
        _check_noise(x, noise)
    decline(native.declines_tensor("factor", factor))


def _check_noise(x: Tensor, noise: Tensor) -> None:
    if noise.dtype not in _NOISE or noise.shape != x.shape:
        raise Declined(f"for noise in uint8 or int32 of x's shape, not {noise.dtype} of {tuple(noise.shape)}")


def _check_given(
    quantizer: str,
    sizes: tuple[int, ...],
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    noise: Tensor | None,
) -> None:
    q = Quantizer.parse(quantizer)
    if noise is not None:
        _check_noise(x, noise)
    if (scale is None) != (zero_point is None) and q.scale.has_zero_point():
        raise Declined("scale and zero_point are not both given")
    if scale is None:
        if q.scale.missing() is not None:
            raise Declined("needs a scale")
        return
    shape, dtype = q.buffers(sizes)[q.scale.given_name]
    if tracing.hints(scale.shape) != shape or scale.dtype not in (torch.float32, dtype):
        given = f"{scale.dtype} of {tuple(scale.shape)}"
        raise Declined(f"for a scale in float32 or {dtype} of shape {shape}, not {given}")
    if zero_point is not None and tracing.hints(zero_point.shape) != shape:
        raise Declined(f"for a zero_point of shape {shape}, not {tuple(zero_point.shape)}")


def _prepare_quantize(call: Args) -> Plan:
    _check_quantize(call)
    quantizer, x, _, zero_point, noise, usages = call[:6]
    if len(call) > 6 or noise is not None or tuple(usages) != (copies.ROWWISE,) or memory_format.is_channels_last(x):
        return lambda *call: _quantize(call)
    description, quantize, below = describe(quantizer), torch.ops.hop_native.quantize.default, eager.below_autograd
    if zero_point is not None and not _is_code(zero_point, description.quantizer.format):
        return lambda *call: _quantize(call)
    words = description.words

    def run(quantizer: str, x: Tensor, scale: object, zero_point: object, noise: None, usages: object) -> list[Tensor]:
        with below():
            return quantize(x, scale, zero_point, None, words)

    return run


def _is_code(zero_point: Tensor, format: Format) -> bool:
    """Whether every value of the zero point's dtype is a code of the format."""
    if zero_point.dtype != format.dtype:
        return False
    info = torch.iinfo(format.dtype)
    return (info.min, info.max) == (format.min, format.max)


def _quantize(call: Args) -> list[Tensor]:
    quantizer, x, scale, zero_point, noise, usages, *product = call
    if product:
        return _quantize_product(quantizer, x, noise, *product)
    if tuple(usages) == (copies.ROWWISE,):
        return quantize_native(quantizer, x, scale, zero_point, noise)
    return list(copies.quantize(_native(quantizer), x, tuple(usages), scale, zero_point, noise).values())


def _prepare_dequantize(call: Args) -> Plan:
    quantizer, buffers, usages, sizes, dtype = call
    decline(native.declines_here())
    shape = native.sizes(sizes)
    if dtype not in _DTYPES or 0 in shape:
        given = f"{dtype} of {tuple(shape)}"
        raise Declined(f"to float32, bfloat16 and float16, for non-empty tensors; not {given}")
    for buffer in buffers:
        decline(native.declines_tensor("a buffer", buffer))
    shape = tuple(shape) if copies.ROWWISE in usages else tuple(copies.columns(shape))
    check_shape(quantizer, shape)
    described = list(Quantizer.parse(quantizer).buffers(shape).values())
    own = buffers[: len(described)] if copies.ROWWISE in usages else buffers
    if [(tracing.hints(b.shape), b.dtype) for b in own] != described:
        raise Declined("the buffers do not match the quantizer")
    if tuple(usages) != (copies.ROWWISE,) or memory_format.is_channels_last(buffers[0]):
        return lambda *call: _dequantize(call)
    dequantize, below = torch.ops.hop_native.dequantize.default, eager.below_autograd
    words, has_second = describe(quantizer).back(dtype), len(buffers) > 2

    def run(quantizer: str, buffers: Sequence[Tensor], usages: object, shape: Sequence[int], dtype: object) -> Tensor:
        with below():
            return dequantize(buffers[0], buffers[1], buffers[2] if has_second else None, shape, words)

    return run


def _dequantize(call: Args) -> Tensor:
    quantizer, buffers, usages, shape, dtype = call
    if copies.ROWWISE in usages:
        count = 3 if len(describe(quantizer).quantizer.stored()) > 1 else 2
        return dequantize_native(quantizer, buffers[:count], tuple(shape), dtype)
    names = copies.names(Quantizer.parse(quantizer), tuple(usages))
    return copies.dequantize(_native(quantizer), dict(zip(names, buffers, strict=True)), shape).to(dtype)


def _prepare_fake(call: Args) -> Plan:
    quantizer, x, scale, zero_point, noise, _ = call
    if Quantizer.parse(quantizer).adds_noise():
        raise Declined("noise instead of rounding")
    _check_quantize((quantizer, x, scale, zero_point, noise, (copies.ROWWISE,)))
    return _fake_quantize


def _fake_quantize(
    quantizer: str,
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    noise: Tensor | None,
    gradient: str,
) -> Tensor:
    return dequantize_native(quantizer, quantize_native(quantizer, x, scale, zero_point, noise), x.shape, x.dtype)


QUANTIZE = Kernel("native", _prepare_quantize, native=True)
DEQUANTIZE = Kernel("native", _prepare_dequantize, native=True)
FAKE_QUANTIZE = Kernel("native", _prepare_fake, native=True)
