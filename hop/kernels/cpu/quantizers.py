"""Describe quantizers for the native quantize and dequantize kernels (native/torch/quantizer.h)."""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hop.dispatch.kernel import Declined
from hop.kernels.cpu import native
from hop.numerics import scale_rules
from hop.numerics.format import is_equal
from hop.numerics.formats import E4M3, E5M2, E8M0, Codebook, Float, Format, Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Reciprocal

Words = dict[str, int | str]
"""Words of a description, written as name=value."""
_DTYPES = {torch.int8: "int8", torch.uint8: "uint8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class Description:
    """A quantizer that native code supports, with its description."""

    quantizer: Quantizer
    words: str
    by_amax: bool
    """Whether a float32 scale is computed only from the largest magnitude of its block."""

    def back(self, dtype: torch.dtype) -> str:
        """The description of dequantizing to a dtype."""
        return f"{self.words} result={str(dtype).removeprefix('torch.')}"


@functools.lru_cache(maxsize=1024)
def describe(quantizer: str) -> Description:
    """Describe a quantizer. Raises Declined if it is not supported."""
    q = Quantizer.parse(quantizer)
    if type(q) is not Quantizer:
        raise Declined(f"for Quantizer itself, not {type(q).__name__}, which may be defined differently")
    if q.layout is not None:
        raise Declined(f"for plain codes, not layout={q.layout}")
    known, rule = _FORMATS.get(type(q.format)), _RULES.get(type(q.scale))
    if known is None or rule is None:
        raise Declined(f"not for {q.format.name} by {type(q.scale).__name__}")
    known.check(q.format)
    if rule.of_floats and not q.format.is_float:
        raise Declined(f"{type(q.scale).__name__} is for float formats, but {q.format.name} is not one")
    rule.check(q.scale, q.format)
    words = [f"1 {known.name} codes={_DTYPES[q.format.dtype]} block={_list(q.block)}", *["flat"] * q.flat]
    named: Words = {"bits": q.format.bits, **known.words(q.format)}
    named |= {"rule": rule.name, "affine": int(q.scale.has_zero_point()), "range": bits(q.format.max)}
    words += [f"{name}={value}" for name, value in (named | rule.words(q.scale, q.format)).items()]
    return Description(q, " ".join(words), rule.by_amax)


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def bits(x: float) -> int:
    """The bits of x as float32."""
    return struct.unpack("I", struct.pack("f", x))[0]


# ---- formats


class _Format(NamedTuple):
    """The description of a class of formats for native code."""

    name: str
    words: Callable[[Any], Words]
    check: Callable[[Any], None] = lambda f: None


def _check_integer(f: Integer) -> None:
    if (f.dtype == torch.int8) != (f.low < 0):
        raise Declined(f"for signed integers in int8 and unsigned ones in uint8, not {f.name}")


def _check_float(f: Float) -> None:
    known = (E4M3, E5M2) if f.dtype.is_floating_point else (f,)
    is_plain = (f.dtype.is_floating_point or f.dtype == torch.uint8) and any(is_equal(f, k) for k in known)
    if f.mantissa_bits == 0 or not is_plain:
        raise Declined(f"for e4m3, e5m2, and floats in uint8 with a mantissa, not {f.name}")


def _codebook(f: Codebook) -> Words:
    lists = {"thresholds": f._thresholds, "numbers": f.book}
    return {"zero_code": f._zero_code} | {name: _list(map(bits, v)) for name, v in lists.items()}


def _bits_of_float(f: Float) -> Words:
    keeps_nan = int(f.dtype.is_floating_point)
    return {"mantissa_bits": f.mantissa_bits, "bias": f.bias, "largest": f.largest, "keeps_nan": keeps_nan}


_FORMATS: dict[type, _Format] = {
    Integer: _Format("integer", lambda f: {"low": f.low, "high": f.high, "zero": f.zero}, _check_integer),
    Float: _Format("float", _bits_of_float, _check_float),
    Codebook: _Format("codebook", _codebook),  # always uint8
}


# ---- rules


class _Rule(NamedTuple):
    """The description of a class of scale rules for native code."""

    name: str
    words: Callable[[Any, Format], Words] = lambda rule, format: {}
    check: Callable[[Any, Format], None] = lambda rule, format: None
    by_amax: bool = False
    of_floats: bool = False


def _amax(rule: scale_rules.Amax, f: Format) -> Words:
    return {"floor": bits(rule.floor), "range": bits(f.max - f.zero)}


def _current(rule: scale_rules.CurrentScaling, most_of_dtype: int) -> Words:
    return {"floor": bits(rule.eps), "power_of_two": int(rule.power_of_two), "most_of_dtype": most_of_dtype}


def _microscaling(rule: scale_rules.Microscaling, f: Format) -> Words:
    parts = {"scale": "uint8", "inverse": bits(1 / f.max), "rounding": scale_rules.MX_ROUNDINGS.index(rule.rounding)}
    return parts | {"largest_power": scale_rules.exponent_of(f)}


def _two_level(rule: scale_rules.TwoLevel, f: Format) -> Words:
    top = rule.inner.max * f.max
    parts = {"scale": "e4m3", "inverse": bits(1 / f.max), "top": bits(top), "inverse_top": bits(1 / top)}
    return parts | {"outer": _list(rule.outer)}


def _check_given(rule: scale_rules.Static, f: Format) -> None:
    if isinstance(rule.requantize, Reciprocal):
        raise Declined("divides by the scale, and does not multiply by its reciprocal")


def _check_amax(rule: scale_rules.Amax, f: Format) -> None:
    if f.max == f.zero:
        raise Declined(f"{f.name} has no value above its zero")


def _check_microscaling(rule: scale_rules.Microscaling, f: Format) -> None:
    if not is_equal(rule.exponent, E8M0):
        raise Declined(f"for exponents in e8m0, not {rule.exponent.name}")


def _check_two_level(rule: scale_rules.TwoLevel, f: Format) -> None:
    if not is_equal(rule.inner, E4M3):
        raise Declined(f"for scales in e4m3, not {rule.inner.name}")
    if any(b != -1 for b in rule.outer) and rule.outer != (1, -1):
        raise Declined(f"for an amax per tensor or per row, not of {rule.outer}")


_RULES: dict[type, _Rule] = {
    scale_rules.Static: _Rule("given", check=_check_given),
    scale_rules.Amax: _Rule("amax", _amax, _check_amax, by_amax=True),
    scale_rules.MinMax: _Rule("minmax", lambda rule, f: {"range": bits(f.max - f.min)}),
    scale_rules.AbsMean: _Rule("absmean"),
    scale_rules.CurrentScaling: _Rule("current", lambda rule, f: _current(rule, 0), by_amax=True, of_floats=True),
    scale_rules.BlockScaling: _Rule("current", lambda rule, f: _current(rule, 1), by_amax=True, of_floats=True),
    scale_rules.Microscaling: _Rule("microscaling", _microscaling, _check_microscaling, of_floats=True),
    scale_rules.TwoLevel: _Rule("two_level", _two_level, _check_two_level, of_floats=True),
}


# ---- a shape


@functools.lru_cache(maxsize=4096)
def check_shape(quantizer: str, shape: tuple[int, ...], row_stride: int = 0) -> None:
    """Raise Declined unless native code can split a tensor of `shape` into the quantizer's blocks.

    `row_stride` is the distance of rows, 0 for a contiguous tensor.
    """
    result = describe(quantizer)
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    reason = _function()(result.words.encode(), len(shape), sizes, row_stride)
    if reason is not None:
        raise Declined(f"{reason.decode()}: {result.quantizer.block} of {shape}")


@functools.cache
def _function() -> Callable[..., bytes | None]:
    functions = native.library().functions
    assert functions is not None
    function = functions.hop_described_blocks_decline
    function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    function.restype = ctypes.c_char_p
    return function
