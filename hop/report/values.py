"""Element types and float values of tensors, for reports."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hop.export.analysis.correspondence import kind
from hop.impls.quantize import dequantize
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

FLOAT, INTEGER, LOW_BIT = "float", "integer", "low-bit"
KINDS = (FLOAT, INTEGER, LOW_BIT)


@dataclass(frozen=True)
class Type:
    """The element type of a value.

    Attributes:
        name: the dtype of a plain tensor; the format and block of a quantized one.
        kind: "float"; "integer", including booleans; or "low-bit", a quantized tensor or an 8-bit float one.
        bits: bits per element, without scales.
    """

    name: str
    kind: str
    bits: int

    @property
    def format(self) -> str:
        """The name without the block."""
        return self.name.split(" ", 1)[0]


def type_of(x: object) -> Type | None:
    """The type of a tensor, or of a list's first tensor; None for anything else."""
    if isinstance(x, list | tuple) and x:
        return type_of(x[0])
    if isinstance(x, QuantizedTensor):
        return type_from_quantizer(x.quantizer)
    return type_from_dtype(x.dtype) if isinstance(x, Tensor) else None


def type_from_quantizer(q: Quantizer) -> Type:
    whole = all(size == -1 for size in q.block)
    block = "by tensor" if whole else "by " + "×".join("all" if size == -1 else str(size) for size in q.block)
    return Type(f"{q.format.name} {block}", LOW_BIT, q.format.bits)


def type_from_dtype(dtype: torch.dtype) -> Type:
    is_float = dtype.is_floating_point or dtype.is_complex
    group = (FLOAT if dtype.itemsize > 1 else LOW_BIT) if is_float else INTEGER
    return Type(str(dtype).removeprefix("torch."), group, 8 * dtype.itemsize)


def float_values(x: Any) -> Tensor | None:
    """The values of a float or quantized tensor in float32; None for anything else."""
    if isinstance(x, QuantizedTensor):
        return dequantize(x, torch.float32)
    if kind(x) != "float":
        return None
    return torch.view_as_real(x).float() if x.is_complex() else x.float()


def to_json_value(x: Any) -> Any:
    """Return `x` with infinities and NaN as the strings "inf", "-inf" and "nan", and tuples as lists."""
    if isinstance(x, dict):
        return {key: to_json_value(v) for key, v in cast(dict[Any, Any], x).items()}
    if isinstance(x, list | tuple):
        return [to_json_value(v) for v in cast(Iterable[Any], x)]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
