"""Quantize and dequantize with fast operators: bit operations where the reference searches tables.

A float format's codes count up with its magnitudes, exponent above mantissa, like those of float32. So a code can be
computed from float32's bits, once the magnitude is rounded to a multiple of the gap at its exponent:

    e = max(exponent of a, least exponent of the format)        gap = 2^(e - M)
    code = round(a / gap) + (e - least) · 2^M                   for a format with M mantissa bits

The formats here have the same values and codes as the formats they replace, and a quantizer with them is an ordinary
quantizer, so hop.numerics.quantizer and hop.scale_rules define everything else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, inductor, tracing
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.plan import Plan
from hop.numerics import blocks, copies, memory_format
from hop.numerics.format import rounds_up
from hop.numerics.formats import Codebook, Float, Format, Integer, PowerOfTwo, tensor
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.rule import Blocks
from hop.numerics.scale_rules import LARGEST, Amax, Rule, exponent_of

_EXPONENT = 23  # position of float32's exponent
_BIAS = 127
_AT_ONCE = 2**17  # elements that are searched at a time


class _Packing(Format):
    """Packs pairs of codes into bytes via 16-bit integers, which are read and written at once."""

    def pack(self, codes: Tensor) -> Tensor:
        size = codes.shape[-1]
        if self.bits != 4 or not tracing.known_equal(size % 2, 0) or tracing.known_equal(size, 0):
            return super().pack(codes)
        pairs = (codes & 15).contiguous().view(torch.int16)  # little-endian: the first code is the low byte
        return ((pairs & 15) | (pairs >> 4)).to(torch.uint8)

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        if self.bits != 4 or not tracing.known_equal(size % 2, 0):
            return super().unpack(packed, size)
        wide = packed.to(torch.int16).contiguous()
        codes = ((wide & 15) | ((wide & 240) << 4)).view(torch.uint8)
        if not self.dtype.is_signed:
            return codes
        return ((codes ^ 8).to(torch.int8) - 8).to(self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class FastInteger(_Packing, Integer):
    """Integer; uses a single temporary in eager mode."""

    def encode(self, x: Tensor, noise: Tensor | None = None, zero: Tensor | int = 0) -> Tensor:
        if noise is not None or not eager.is_plain_eager():
            return super().encode(x, noise, zero)
        y = x.round().nan_to_num_(0.0, float("inf"), float("-inf"))
        if not isinstance(zero, int) or zero != 0:
            y += zero
        return y.clamp_(self.low, self.high).to(self.dtype)

    def nearest(self, x: Tensor, zero: int = 0) -> Tensor:
        if not eager.is_plain_eager():
            return super().nearest(x, zero)
        return x.round().clamp_(self.low - zero, self.high - zero)


@dataclass(frozen=True, eq=False, repr=False)
class FastFloat(_Packing, Float):
    """Float, computed from float32's bits."""

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None and self.dtype.is_floating_point:
            return super().encode(x)
        if noise is None and self.exponent_bits <= 3:
            return self._encode_by_binade(x)
        known = x == x
        magnitude = torch.where(known, x.abs(), self.max).clamp(max=self.max)
        least = 1 - self.bias + _BIAS
        exponent = (magnitude.view(torch.int32) >> _EXPONENT).clamp(min=least)
        steps = magnitude * ((2 * _BIAS + self.mantissa_bits - exponent) << _EXPONENT).view(torch.float32)
        if noise is None:
            steps = steps.round()
        else:
            whole = steps.floor()
            steps = whole + rounds_up(steps - whole, noise).to(torch.float32)
        code = steps.to(torch.int32) + ((exponent - least) << self.mantissa_bits)
        negative = known & (x.view(torch.int32) < 0)
        if not self.dtype.is_floating_point:
            return torch.where(negative, code + 2 ** (self.bits - 1), code).to(self.dtype)
        code = torch.where(negative, code + 128, code).to(torch.uint8).view(self.dtype)
        return torch.where(known, code.to(torch.float32), math.nan).to(self.dtype)

    def _encode_by_binade(self, x: Tensor) -> Tensor:
        """Encode with one comparison per exponent: Inductor vectorizes comparisons, but not bit casts."""
        magnitude = x.abs()
        magnitude = torch.where(magnitude < self.max, magnitude, self.max)  # maps NaN to max, too
        least = 1 - self.bias
        count = self.largest >> self.mantissa_bits or 1  # the number of exponents of normal numbers
        code = None
        for i in reversed(range(count)):
            steps = (magnitude * 2.0 ** (self.mantissa_bits - least - i)).round()
            binade_code = steps + (i << self.mantissa_bits) if i else steps
            code = binade_code if code is None else torch.where(magnitude < 2.0 ** (least + i + 1), binade_code, code)
        assert code is not None
        sign = torch.where(x == x, torch.copysign(torch.ones_like(x), x), 1.0)
        return torch.where(sign < 0, code + 2 ** (self.bits - 1), code).to(self.dtype)

    def nearest(self, x: Tensor, zero: int = 0) -> Tensor:
        """Round to a multiple of the gap at x's exponent."""
        power = (x.view(torch.int32) & -(2**_EXPONENT) & (2**31 - 1)).view(torch.float32)
        least, most = (2.0 ** (e - self.mantissa_bits) for e in (1 - self.bias, exponent_of(self)))
        gap = (power * 2.0**-self.mantissa_bits).clamp(least, most)
        return ((x / gap).round() * gap).clamp(self.min, self.max)

    def decode(self, codes: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return codes.to(torch.float32)
        code = codes.to(torch.int32)
        magnitude = code & (2 ** (self.bits - 1) - 1)
        exponent = magnitude >> self.mantissa_bits
        mantissa = (magnitude & (2**self.mantissa_bits - 1)) << (_EXPONENT - self.mantissa_bits)
        normal = (((exponent + (_BIAS - self.bias)) << _EXPONENT) | mantissa).view(torch.float32)
        tiny = magnitude.to(torch.float32) * 2.0 ** (1 - self.bias - self.mantissa_bits)
        number = torch.where(exponent == 0, tiny, normal)
        return torch.where(code >= 2 ** (self.bits - 1), -number, number)


@dataclass(frozen=True, eq=False, repr=False)
class FastPowerOfTwo(PowerOfTwo):
    """PowerOfTwo with float32's bias, computed from float32's bits: the exponent, plus one if there is a mantissa."""

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        bits = x.view(torch.int32)
        exponent = bits >> _EXPONENT
        mantissa = bits & (2**_EXPONENT - 1)
        # exponent 0 means subnormal numbers, of which those up to 2^-127 have code 0
        above = torch.where(exponent == 0, mantissa > 2 ** (_EXPONENT - 1), mantissa > 0)
        code = (exponent + above.to(torch.int32)).clamp(max=2**self.bits - 2)
        return torch.where(x == x, code, 2**self.bits - 1).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        code = codes.to(torch.int32)
        bits = torch.where(code == 0, 2 ** (_EXPONENT - 1), code << _EXPONENT)
        return torch.where(code == 2**self.bits - 1, float("nan"), bits.view(torch.float32))


@dataclass(frozen=True, eq=False, repr=False)
class FastCodebook(_Packing, Codebook):
    """Codebook, using torch.bucketize."""

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        table = tensor(self._thresholds[1:], x.device)
        code = torch.bucketize(x, table, right=True, out_int32=True)
        return torch.where(x == x, code, self._zero_code).to(self.dtype)

    def nearest(self, x: Tensor, zero: int = 0) -> Tensor:
        if not (self.is_whole and eager.is_plain_eager()):
            codes = torch.bucketize(x, tensor(self._thresholds[1:], x.device), right=True, out_int32=True)
            return tensor(self.book, x.device).index_select(0, codes.reshape(-1)).reshape(x.shape)
        value, reached = torch.full_like(x, self.book[0]), torch.empty_like(x)  # sums of integers, in less time
        for threshold, (a, b) in zip(self._thresholds[1:], itertools.pairwise(self.book), strict=True):
            value.add_(torch.ge(x, threshold, out=reached), alpha=b - a)
        return value


def _power_of_two(format: PowerOfTwo) -> Format | None:
    return None if format.bias != _BIAS or format.bits != 8 else _as(FastPowerOfTwo, format)


def _float(format: Float) -> Format | None:
    """The fast form of a Float; None without mantissa bits, where rounding ties to even needs one."""
    return None if format.mantissa_bits == 0 else _as(FastFloat, format)


_FAST: dict[type, Callable[[Any], Format | None]] = {
    Integer: lambda f: _as(FastInteger, f),
    Float: _float,
    PowerOfTwo: _power_of_two,
    Codebook: lambda f: _as(FastCodebook, f),
}


def _as(cls: type, format: Format) -> Format:
    return cls(**{f.name: getattr(format, f.name) for f in fields(format) if f.init})  # type: ignore[arg-type]


def fast_format(format: Format) -> Format:
    """A fast format with the same values and codes, or `format` itself."""
    make = _FAST.get(type(format))
    return (make(format) if make is not None else None) or format


@dataclass(frozen=True)
class FastBlocks(Blocks):
    """Blocks with fewer passes over memory."""

    def own_amax(self) -> Tensor:
        if not (eager.is_plain_eager() and self.x.is_cpu):
            return super().own_amax()
        amax = self.x.abs().amax(self.dims, keepdim=True)
        return amax if bool((amax == amax).all()) else super().own_amax()  # NaN is rare

    def floor_power_of_two(self, x: Tensor) -> Tensor:
        """Clear the mantissa; subnormal numbers, which are all mantissa, are handled separately."""
        power = (x.clamp(max=LARGEST).view(torch.int32) & -(2**_EXPONENT)).view(torch.float32)
        power = torch.where(power > 0, power, torch.where(x < 2.0**-127, 2.0**-128, 2.0**-127))
        return torch.where(x == x, power, x)

    def once(self, scale: Tensor) -> Tensor:
        return inductor.written(scale)

    def by_part(self, compute: Callable[["Blocks"], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Compute parts that fit a cache in eager mode on CPU, whose temporaries are then in memory in use already."""
        if not (eager.is_plain_eager() and self.x.is_cpu):
            return super().by_part(compute)
        place = next((d for d in self.places if self.x.shape[d] > 1), None)
        size = 0 if place is None else _AT_ONCE * self.x.shape[place] // max(self.x.numel(), 1)
        if place is None or size >= self.x.shape[place]:
            return super().by_part(compute)
        parts = [compute(replace(self, x=x)) for x in self.x.split(max(size, 1), place)]
        return tuple(torch.cat(columns, place) for columns in zip(*parts, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class FastHadamard(Hadamard):
    """Hadamard, with rounding to x's dtype that Inductor would drop before a conversion to float32."""

    def apply(self, x: Tensor) -> Tensor:
        return inductor.written(super().apply(x))


@dataclass(frozen=True, eq=False, repr=False)
class FastQuantizer(Quantizer):
    """A quantizer with fast formats."""

    def _blocks(self, x: Tensor, dims: list[int], ndim: int, dtype: torch.dtype) -> Blocks:
        return FastBlocks(x, dims, blocks.places(self.block, ndim), dtype, self.block)

    def _apart(self, product: Tensor) -> Tensor:
        return inductor.written(product)


@functools.lru_cache(maxsize=1024)
def fast(quantizer: str) -> Quantizer:
    """A fast quantizer with the same results as `quantizer`."""
    parsed = Quantizer.parse(quantizer)
    values = {f.name: getattr(parsed, f.name) for f in fields(parsed)}
    hadamard = FastHadamard(parsed.hadamard.signs) if type(parsed.hadamard) is Hadamard else parsed.hadamard
    faster = {"format": fast_format(parsed.format), "scale": _fast_rule(parsed.scale), "hadamard": hadamard}
    return FastQuantizer(**values | faster)


def _fast_rule(rule: Rule) -> Rule:
    values = {f.name: getattr(rule, f.name) for f in fields(rule)}  # type: ignore[arg-type]
    return replace(rule, **{name: fast_format(v) for name, v in values.items() if isinstance(v, Format)})


# ---- the kernels

_Optional = Tensor | None


def _taking(compute: Plan) -> Callable[[Args], Plan]:
    """A kernel's prepare function that returns `compute` for plain Quantizer types."""

    def prepare(call: Args) -> Plan:
        if (cls := type(Quantizer.parse(call[0]))) is not Quantizer:
            raise Declined(f"for Quantizer itself, not {cls.__name__}, which may be defined differently")
        return compute

    return prepare


def _quantize(
    quantizer: str, x: Tensor, scale: _Optional, zero_point: _Optional, noise: _Optional, usages: Sequence[str]
) -> list[Tensor]:
    return list(copies.quantize(fast(quantizer), x, tuple(usages), scale, zero_point, noise).values())


def _dequantize(
    quantizer: str, buffers: Sequence[Tensor], usages: Sequence[str], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    names = copies.names(Quantizer.parse(quantizer), tuple(usages))
    return copies.dequantize(fast(quantizer), dict(zip(names, buffers, strict=True)), shape).to(dtype)


def _fake_quantize(
    quantizer: str, x: Tensor, scale: _Optional, zero_point: _Optional, noise: _Optional, gradient: str
) -> Tensor:
    return fast(quantizer).fake_quantize(x, scale, zero_point, noise).to(x.dtype)


QUANTIZE = Kernel("bits", _taking(_quantize))
DEQUANTIZE = Kernel("bits", _taking(_dequantize))
FAKE_QUANTIZE = Kernel("bits", _taking(_fake_quantize))


# ---- int8 by amax, in place


def _prepare_in_place(call: Args) -> Plan:
    quantizer, x, scale, _, noise, usages = call
    q = Quantizer.parse(quantizer)
    _taking(_quantize)(call)
    if not eager.is_plain_eager():
        raise Declined("writes in place, so for eager mode only")
    if not x.is_cpu:
        raise Declined(f"for the CPU, but x is on {x.device}")
    if not (type(q.format) is Integer and type(q.scale) is Amax and scale is None and noise is None):
        raise Declined("for integers by amax, rounded to the nearest")
    if q.layout is not None:
        raise Declined(f"for plain codes, but the layout is {q.layout}")
    if tuple(usages) != (copies.ROWWISE,) or x.numel() == 0:
        raise Declined("for the row-wise copy of a non-empty tensor")
    return _quantize_in_place


def _quantize_in_place(quantizer: str, x: Tensor, *given: Any) -> list[Tensor]:
    """Amax and Integer.encode with one temporary tensor; the general kernel if x contains NaN or an infinity."""
    q = fast(quantizer)
    shape = q.rows(x.shape)
    cut, dims = blocks.split(x.reshape(shape), q.block)
    amax = torch.maximum(cut.amax(dims, keepdim=True), -cut.amin(dims, keepdim=True)).to(torch.float32)
    if not bool((amax <= LARGEST).all()):
        return _quantize(quantizer, x, *given)
    format = q.format
    assert isinstance(format, Integer) and isinstance(q.scale, Amax)
    scale = amax.clamp_(min=q.scale.floor) / (format.max - format.zero)
    scale = torch.where(scale == 0, 1.0, scale)
    y = cut.to(torch.float32, copy=True).div_(scale).round_()
    codes = y.clamp_(format.low - format.zero, format.high - format.zero)
    if format.zero:
        codes += format.zero
    codes = blocks.merge(codes.to(format.dtype), shape)
    codes = format.pack(codes.reshape(shape or [1])) if q.per_byte() > 1 else codes.reshape(x.shape)
    codes = memory_format.like(codes, x) if q.keeps_memory_format() else codes
    return [codes, blocks.gather(scale, len(shape))]


QUANTIZE_IN_PLACE = Kernel("in place", _prepare_in_place)
