"""Float values that represent codes, and the functions of tensors that `emit` traces when a graph is edited."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.compat.pytree import Kwargs
from hop.dispatch.operators import VIEW, aten, of
from hop.export.rewrite.encodings import FORMATS, sizes_of
from hop.export.rewrite.program import value
from hop.impls.quantize import dequantize, quantize
from hop.impls.scaled import scaled
from hop.numerics import blocks
from hop.numerics.blocks import Block
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.tensor import QuantizedTensor

Views = Sequence[tuple[Any, list[Any], Kwargs]]
"""Operators that only move elements, with their other arguments."""


class Held(NamedTuple):
    """A float value represented by codes: nodes of a graph, or tensors inside a traced function.

    A scale and a zero point may be numbers, or have other shapes than their buffers.
    """

    quantizer: Quantizer
    codes: Any
    given: list[Any]  # the scale, and the zero point if there is one
    dtype: torch.dtype

    def tensor(self) -> QuantizedTensor:
        described = self.quantizer.buffers(self.codes.shape)
        buffers = [self.codes, *parameters(self.quantizer, self.codes, self.given)]
        named = dict(zip(described, buffers, strict=True))
        return QuantizedTensor.fitting(named, self.quantizer, self.codes.shape, self.dtype)

    def is_whole(self) -> bool:
        """Whether one scale applies to the whole tensor."""
        return all(b == -1 for b in self.quantizer.block)


def kind_of(x: object) -> str:
    """The format and block of a value, or its dtype, for reports."""
    if isinstance(x, Held):
        return f"{x.quantizer.format.name}[{sizes_of(x.quantizer.block)}]"
    return short(value(x).dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parameters(quantizer: Quantizer, codes: Tensor, given: Sequence[Any]) -> list[Tensor]:
    """Scales and zero points in the shapes and dtypes of their buffers."""
    described = list(quantizer.buffers(codes.shape).values())[1:]
    return [
        x.to(dtype).reshape(shape) if isinstance(x, Tensor) else torch.full(shape, x, dtype=dtype, device=codes.device)
        for x, (shape, dtype) in zip(given, described, strict=True)
    ]


def unit(codes: Node, factor: object, block: Block) -> Held:
    """Codes as their integer values, times `factor`."""
    scale, block = (1.0, (-1,)) if factor is None else (factor, block)
    format = FORMATS[value(codes).dtype]
    quantizer = Quantizer(format, block, Static(affine=format.zero != 0))
    return Held(quantizer, codes, [scale, 0][: 1 + (format.zero != 0)], torch.float32)


def real(x: object) -> object:
    if isinstance(x, Held):
        return x.tensor()
    return [real(v) for v in x] if isinstance(x, list | tuple) else x


def run_scaled(
    op: OpOverload, output: torch.dtype | Quantizer, args: list[object], kwargs: Kwargs, **options: Any
) -> Any:
    return scaled(op, output, *(real(x) for x in args), **kwargs, **options)


def run_requantized(
    op: OpOverload,
    output: Quantizer,
    args: list[object],
    kwargs: Kwargs,
    given: list[Any],
    bounds: tuple[int, int] | None,
    views: Views,
) -> Tensor:
    operands = [real(x) for x in args]
    device = next(x.device for x in flat(operands) if isinstance(x, Tensor))
    dtypes = [torch.float32, output.format.dtype]
    scale, *zero = [
        x.to(t) if isinstance(x, Tensor) else torch.full((), x, dtype=t, device=device)
        for x, t in zip(given, dtypes, strict=False)
    ]
    options = {"output_scale": scale} | ({"output_zero_point": zero[0]} if zero else {})
    return codes_within(scaled(op, output, *operands, **kwargs, **options).codes, bounds, views)  # type: ignore[attr-defined]


def codes_within(codes: Tensor, bounds: tuple[int, int] | None, views: Views) -> Tensor:
    """Clamp codes and apply views."""
    codes = codes if bounds is None else codes.clamp(*bounds)
    for view, rest, options in views:
        op = (
            aten.reshape.default if view is aten.view.default else view
        )  # codes may have other strides than the floats had
        codes = op(codes, *rest, **options)
    return codes


def run_view(
    seen: list[Quantizer], op: OpOverload, operand: Held, rest: Sequence[object], kwargs: Mapping[str, object]
) -> list[Tensor]:
    tensor = operand.tensor()
    if of(op).family is VIEW:
        op = aten.reshape.default if op is aten.view.default else op
        result = op(tensor, *rest, **kwargs)
    else:
        scale, *zero = parameters(operand.quantizer, operand.codes, operand.given)
        options = {"output_scale": scale} | ({"output_zero_point": zero[0]} if zero else {})
        result = scaled(op, operand.quantizer, tensor, *rest, **kwargs, **options)
    if not isinstance(result, QuantizedTensor):
        raise TypeError(f"{op} of blocks of {operand.quantizer.block} does not preserve blocks")
    seen.append(result.quantizer)
    return list(result.buffers().values())


def run_quantize(quantizer: Quantizer, x: Tensor, given: Sequence[object], bounds: tuple[int, int] | None) -> Tensor:
    scale, *zero = parameters(quantizer, x, given)
    codes = quantize(quantizer, x, scale=scale, zero_point=zero[0] if zero else None).codes
    return codes if bounds is None else codes.clamp(*bounds)


def run_dequantize(operand: Held) -> Tensor:
    return dequantize(operand.tensor())


def dequantize_by_hand(
    codes: Tensor, scale: Tensor | float, zero_point: Tensor | int | None, block: Block, dtype: torch.dtype
) -> Tensor:
    """Dequantize codes that none of our formats has."""
    scale, zero = (
        _broadcastable(codes, block, scale),
        _broadcastable(codes, block, 0 if zero_point is None else zero_point),
    )
    return ((codes.to(torch.float32) - zero) * scale).to(dtype)


def _broadcastable(x: Tensor, block: Block, given: Tensor | float) -> Tensor | float:
    """A scale or zero point shaped to broadcast with x; blocks are single elements or whole dimensions."""
    if not isinstance(given, Tensor):
        return given
    sizes = blocks.counts(x.shape, block)
    if any(b not in (1, -1) for b in block):
        raise NotImplementedError(f"blocks of {block} of codes in {x.dtype}")
    return given.reshape(sizes)


def quantize_by_hand(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None,
    block: Block,
    bounds: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    scale, zero = _broadcastable(x, block, scale), _broadcastable(x, block, 0 if zero_point is None else zero_point)
    return ((x.to(torch.float32) * (1.0 / scale)).round() + zero).clamp(*bounds).to(dtype)


def flat(x: object) -> list[object]:
    return [v for y in x for v in flat(y)] if isinstance(x, list | tuple) else [x]
