"""Quantizers in words, for the native kernels of quantize and dequantize (native/torch/quantizer.h)."""

import ctypes
import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from hop.kernels.cpu import native
from hop.numerics.formats import E4M3, E5M2, E8M0, Codebook, Float, Format, Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Reciprocal
from hop.numerics.scale_rules import (
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

_RULES = {
    Given: "given",
    Amax: "amax",
    MinMax: "minmax",
    AbsMean: "absmean",
    CurrentScaling: "current",
    BlockScaling: "current",
    Microscaling: "microscaling",
    TwoLevel: "two_level",
}
_FORMATS = {Integer: "integer", Float: "float", Codebook: "codebook"}
_DTYPES = {torch.int8: "int8", torch.uint8: "uint8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class Plan:
    """A quantizer that the kernels take, and its description."""

    quantizer: Quantizer
    words: str

    def back(self, dtype: torch.dtype) -> str:
        """The description of dequantizing to a dtype."""
        return f"{self.words} result={str(dtype).removeprefix('torch.')}"


@functools.lru_cache(maxsize=1024)
def plan(quantizer: str) -> Plan | str:
    """The plan, or why there is none."""
    q = Quantizer.parse(quantizer)
    reason = _unsupported(q)
    if reason is not None:
        return reason
    words = [f"1 {_FORMATS[type(q.format)]} codes={_DTYPES[q.format.dtype]} block={_list(q.block)}"]
    words += ["flat"] * q.flat
    words += [f"{name}={value}" for name, value in (_of_format(q.format) | _of_rule(q.scale, q.format)).items()]
    return Plan(q, " ".join(words))


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def bits(x: float) -> int:
    """Those of a float32."""
    return struct.unpack("I", struct.pack("f", x))[0]


def _of_format(format: Format) -> dict[str, Any]:
    found: dict[str, Any] = {"bits": format.bits}
    if isinstance(format, Integer):
        return found | {"low": format.low, "high": format.high, "zero": format.zero}
    if isinstance(format, Float):
        found |= {"mantissa_bits": format.mantissa_bits, "bias": format.bias, "largest": format.largest}
        return found | {"keeps_nan": int(format.dtype.is_floating_point)}
    assert isinstance(format, Codebook)
    lists = {"thresholds": format._thresholds, "numbers": format.book}
    return found | {"zero_code": format._zero_code} | {name: _list(map(bits, v)) for name, v in lists.items()}


def _of_rule(rule: Rule, format: Format) -> dict[str, Any]:
    found: dict[str, Any] = {"rule": _RULES[type(rule)], "affine": int(rule.has_zero_point())}
    found["range"] = bits(format.max)
    if isinstance(rule, Amax):
        found |= {"floor": bits(rule.floor), "range": bits(format.max - format.zero)}
    elif isinstance(rule, MinMax):
        found["range"] = bits(format.max - format.min)
    elif isinstance(rule, CurrentScaling):
        found |= {"floor": bits(rule.eps), "power_of_two": int(rule.power_of_two)}
        found["most_of_dtype"] = int(isinstance(rule, BlockScaling))
    elif isinstance(rule, Microscaling):
        found |= {"scale": "uint8", "inverse": bits(1 / format.max), "rounding": MX_ROUNDINGS.index(rule.rounding)}
        found["largest_power"] = exponent_of(format)
    elif isinstance(rule, TwoLevel):
        top = rule.inner.max * format.max
        found |= {"scale": "e4m3", "inverse": bits(1 / format.max), "top": bits(top), "inverse_top": bits(1 / top)}
        found["outer"] = _list(rule.outer)
    return found


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


@functools.lru_cache(maxsize=4096)
def declines_shape(quantizer: str, shape: tuple[int, ...], row_stride: int = 0) -> str | None:
    """Why the kernels do not cut a tensor of `shape` into the blocks of a quantizer, or None; rows lie `row_stride`
    apart, 0 for a contiguous one."""
    made = plan(quantizer)
    if isinstance(made, str):
        return made
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    reason = _function()(made.words.encode(), len(shape), sizes, row_stride)
    return None if reason is None else f"{reason.decode()}: {made.quantizer.block} of {shape}"


@functools.cache
def _function() -> Any:
    functions = native.library().functions
    assert functions is not None
    function = functions.hop_described_blocks_decline
    function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    function.restype = ctypes.c_char_p
    return function
