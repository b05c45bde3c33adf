"""Measure how the values of two nodes differ."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.export.analysis.correspondence import codes_or_self, kind
from hop.impls.quantize import dequantize
from hop.tensor import QuantizedTensor


@dataclass(frozen=True)
class Difference:
    """The difference between the values of two nodes, over all inputs.

    Attributes:
        a, b: the names of the nodes.
        operator: the operator that `a` calls.
        output: index among the outputs; None for an intermediate node.
        dtype: the dtype of the value of `a`, or of its codes if it is quantized.
        shape: the shape of the value of `a`, for the first inputs.
        elements, differing: number of elements compared, and number that differ. NaN equals NaN, and -0.0 equals 0.0.
        largest: the largest difference: an exact Python int between integers or codes of an integer format; otherwise
            of the values, NaN or infinite if one of the two is.
        sqnr: 10 log10(Σ a² / Σ (a - b)²) in decibels, over elements finite in both; inf if nothing differs, -inf if the
            two differ in an element that is not finite in both; None for integers.
    """

    a: str
    b: str
    operator: str
    output: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: int
    differing: int
    largest: int | float
    sqnr: float | None


@dataclass(eq=False)
class Figures:
    """Accumulated measurements of a pair of nodes."""

    a: object  # a node, or a constant output
    b: Any
    parts: tuple[str | None, str | None] = (None, None)  # the buffers to compare; None for the whole value
    output: int | None = None
    elements: int | None = None
    differing: int = 0
    largest: int | float = 0
    signal: float = 0.0
    noise: float = 0.0
    broken: bool = False  # a non-finite element differs
    has_floats: bool = False
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = field(default=())
    dropped: bool = False
    caller: str = "verify"

    def row(self) -> Difference:
        sqnr = None
        if self.has_floats:
            sqnr = -math.inf if self.broken else _decibels(self.signal, self.noise)
        a, b = (_name(x, part) for x, part in zip((self.a, self.b), self.parts, strict=True))
        assert self.elements is not None
        counts = self.elements, self.differing, self.largest
        return Difference(a, b, operator_name(self.a), self.output, self.dtype, self.shape, *counts, sqnr)

    def add(self, x: Any, y: Any) -> None:
        if x is None and y is None:  # an output that is None
            return
        x, y = (
            v if part is None or v is None else v.buffers()[part] for v, part in zip((x, y), self.parts, strict=True)
        )
        x, y = (torch.as_tensor(v) if isinstance(v, bool | int | float) else v for v in (x, y))
        fits = isinstance(x, Tensor) and isinstance(y, Tensor)
        if fits and (isinstance(x, QuantizedTensor) != isinstance(y, QuantizedTensor)):
            codes = (kind(x) == "integer") or (kind(y) == "integer")
            x, y = (codes_or_self(v) if codes else _values(v) for v in (x, y))
        if not fits or x.shape != y.shape:
            if self.output is None:
                self.dropped, self.elements = True, None
                return
            shapes = " and ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in (x, y))
            raise ValueError(f"{self.caller}: output {self.output} has different shapes: {shapes}")
        if self.elements is None:
            self.elements, self.shape, self.dtype = 0, tuple(x.shape), codes_or_self(x).dtype
        self.elements += x.numel()
        whole = _integers(x, y)
        differ = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        if whole is not None:
            self.largest = max(self.largest, _steps(*whole))
            differ |= _unequal(*whole)
        if whole is None or isinstance(x, QuantizedTensor):
            values = _values(x), _values(y)
            differ |= _unequal(*values)
            self._add_floats(*values, with_largest=whole is None)
        self.differing += int(differ.sum())

    def _add_floats(self, x: Tensor, y: Tensor, *, with_largest: bool) -> None:
        self.has_floats = True
        x, y = (torch.view_as_real(v) if v.is_complex() else v for v in (x, y))
        x, y = x.to(torch.float64), y.to(torch.float64)
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
        finite = x.isfinite() & y.isfinite()
        self.broken |= bool((~finite & (gap != 0)).any())
        self.signal += torch.where(finite, x, 0.0).square().sum().item()
        self.noise += torch.where(finite, gap, 0.0).square().sum().item()
        if with_largest and gap.numel():
            worst = gap.max().item()  # NaN if any is NaN
            self.largest = math.nan if math.isnan(worst) or math.isnan(self.largest) else max(self.largest, worst)
        if with_largest:
            self.largest = float(self.largest)


def _name(x: object, part: str | None) -> str:
    name = str(getattr(x, "name", repr(x)))  # a node or a file's tensor has a name
    return name if part is None else f"{name}.{part}"


def operator_name(a: object) -> str:
    """The operator that a node calls, followed by the inner one for operators on operators; other nodes give their
    kind.
    """
    if not isinstance(a, Node) or a.op != "call_function":
        return a.op if isinstance(a, Node) else "constant"
    name = str(a.target) if isinstance(a.target, OpOverload) else getattr(a.target, "__name__", str(a.target))
    inner = a.args[0] if a.args and isinstance(a.args[0], OpOverload) else None
    return name if inner is None else f"{name} {inner}"


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def _integers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two tensors to compare exactly: integers, or the codes of quantized tensors; None for others."""
    if isinstance(x, QuantizedTensor):
        a, b = _codes(x), _codes(y)
        return None if a is None or b is None else (a, b)
    return (x, y) if kind(x) == kind(y) != "float" else None


def _values(x: Tensor) -> Tensor:
    if isinstance(x, QuantizedTensor):
        return dequantize(x, torch.float32)
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.float64)


def _codes(x: Tensor) -> Tensor | None:
    """One code per element, if the format is an integer one."""
    assert isinstance(x, QuantizedTensor)
    q = x.quantizer
    if not q.format.is_integer or q.layout is not None or "codes" not in x.buffers():
        return None
    return q.format.unpack(x.codes, x.shape[-1]).reshape(x.shape) if q.per_byte() > 1 else x.codes


def _unequal(x: Tensor, y: Tensor) -> Tensor:
    if not any(v.is_floating_point() or v.is_complex() for v in (x, y)):
        return x != y if x.dtype == y.dtype else x.to(torch.int64) != y.to(torch.int64)
    dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(dtype), y.to(dtype)
    return (x != y) & ~(x.isnan() & y.isnan())


_SIGN = -(2**63)


def _steps(x: Tensor, y: Tensor) -> int:
    """The exact largest difference of integers. For int64 it can reach 2^64 - 1, so it is computed modulo 2^64."""
    if x.numel() == 0:
        return 0
    x, y = (v.view(torch.int64) ^ _SIGN if v.dtype == torch.uint64 else v.to(torch.int64) for v in (x, y))
    apart = torch.maximum(x, y) - torch.minimum(x, y)
    return int((apart ^ _SIGN).max()) - _SIGN
