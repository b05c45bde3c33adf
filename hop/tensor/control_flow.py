"""QuantizedTensor in PyTorch's control flow operators: how it is split and reassembled.

hop_tensor(quantizer, buffers, usages, shape, dtype) -> tensor        in exported programs, from its own buffers
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import control_flow, eager, tracing
from hop.compat.pytree import ArgsKwargs
from hop.dispatch.composite import Composite
from hop.numerics import blocks, copies
from hop.numerics.quantizer import Quantizer
from hop.tensor import table
from hop.tensor.buffers.operators import buffers_operator
from hop.tensor.quantized import QuantizedTensor


class Together(Composite[QuantizedTensor]):
    """The operator hop_tensor."""

    parts = buffers_operator

    def check(self, /, *args: Any) -> ArgsKwargs:
        return args, {}

    def reference(self, quantizer: str, buffers: Sequence[Tensor], /, *rest: Any) -> QuantizedTensor:
        parsed, (usages, shape, dtype) = Quantizer.parse(quantizer), rest
        named = zip(copies.names(parsed, tuple(usages)), buffers, strict=True)
        return QuantizedTensor.fitting(dict(named), parsed, shape, dtype)


together_operator = Together("hop_tensor")


class Size(NamedTuple):
    """An unknown size, as a multiple of a buffer's size."""

    buffer: int
    dim: int
    factor: int


class Form(NamedTuple):
    """Description of a tensor without its buffers."""

    names: tuple[str, ...]
    quantizer: Quantizer
    shape: tuple[Any, ...]  # ints, and Sizes
    dtype: torch.dtype


def apart(t: QuantizedTensor) -> list[Tensor]:
    return list(buffers_operator(t.detach()))


def form(t: QuantizedTensor) -> Form:
    buffers = list(t.buffers().values())
    per_byte = t.quantizer.per_byte()
    shape = tuple(n if isinstance(n, int) else _size(n, buffers, per_byte) for n in t.shape)
    return Form(tuple(t.buffers()), t.quantizer, shape, t.dtype)


def _size(n: torch.SymInt, buffers: Sequence[Tensor], per_byte: int) -> "Size | int":
    """Find a symbolic size among the buffers; if it is not found, specialize the program to its value."""
    for i, buffer in enumerate(buffers):
        for dim, size in enumerate(buffer.shape):
            for factor in {1, per_byte}:
                if tracing.known_equal(size * factor, n):
                    return Size(i, dim, factor)
    return int(n)


def together(parts: Sequence[Tensor], form: Form) -> QuantizedTensor:
    shape = [n if isinstance(n, int) else parts[n.buffer].shape[n.dim] * n.factor for n in form.shape]
    if tracing.is_exporting():  # ATen operators would only record what the graph knows
        usages = list(copies.of(form.names))
        return together_operator(str(form.quantizer), list(parts), usages, shape, form.dtype)
    return QuantizedTensor.fitting(dict(zip(form.names, parts, strict=True)), form.quantizer, shape, form.dtype)


def slices(t: QuantizedTensor) -> tuple[list[Tensor], Form]:
    """The buffers of all slices along the first dimension, stacked, and the form of one slice."""
    first, n = _first(t), t.shape[0]
    parts = []
    for own, buffer in zip(first.buffers().values(), apart(t), strict=True):
        if tuple(buffer.shape[1:]) != tuple(own.shape):
            raise _cut(t, "its buffers do not")
        parts.append(buffer if tracing.known_equal(buffer.shape[0], n) else buffer.expand(n, *own.shape))
    return parts, form(first)


def _first(t: QuantizedTensor) -> QuantizedTensor:
    """The first slice, without data."""
    sizes = [int(n) for n in t.shape]
    with eager.no_modes():
        held = {
            name: torch.empty([int(n) for n in b.shape], dtype=b.dtype, device="meta")
            for name, b in t.buffers().items()
        }
        described = QuantizedTensor.fitting(held, t.quantizer, sizes, t.dtype)
        try:
            first = table.rules()[torch.ops.aten.select.int](torch.ops.aten.select.int, described, 0, 0)
        except table.IndivisibleError as cut:
            raise _cut(t, str(cut)) from cut
    assert isinstance(first, QuantizedTensor)
    return first


def _cut(t: QuantizedTensor, why: str) -> ValueError:
    return ValueError(
        f"a QuantizedTensor of shape {tuple(t.shape)} and {t.quantizer} has no slices along its first dimension, which "
        f"a loop runs over: {why}. Quantize it by blocks of one element along that dimension, or hop.dequantize it"
    )


def stacked(form: Form, n: int) -> Form:
    block = (1, *blocks.per_dimension(form.quantizer.block, len(form.shape)))
    sizes = [n if isinstance(n, int) else n._replace(dim=n.dim + 1) for n in form.shape]
    length = n if isinstance(n, int) else Size(0, 0, 1)
    return form._replace(quantizer=replace(form.quantizer, block=block), shape=(length, *sizes))


control_flow.RULES[QuantizedTensor] = control_flow.Rules(apart, together, form, slices, stacked)
