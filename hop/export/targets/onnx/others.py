"""Replace operators that torch.onnx or onnxruntime computes differently from PyTorch, or not at all."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from hop.compat.eager import OpOverload
from hop.export.rewrite.program import emit, value
from hop.export.targets.onnx.operators import FLOOR_DIVIDE

aten = torch.ops.aten

_MAXIMA = frozenset({aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default})
_MEANS = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}


def replace_others(graph: Graph) -> None:
    for node in list(graph.nodes):
        new = _replacement(node)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _replacement(node: Any) -> Node | None:
    x: Any = node.args[0] if node.args else None
    integer = isinstance(v := value(x), Tensor) and not v.is_floating_point()
    if node.target is aten.div.Tensor_mode and node.kwargs["rounding_mode"] == "floor" and integer:
        return emit(node, _floor_divided, *node.args)  # torch.onnx divides float32
    is_maximum = node.target is operator.getitem and x.target in _MAXIMA and node.args[1] == 0
    if is_maximum and not value(x.args[0]).is_floating_point():  # ONNX only has it for floats and bytes
        return emit(node, functools.partial(_maximum, x.target), *x.args)
    if node.target in _MEANS and value(x).dtype == torch.float64:
        return emit(node, functools.partial(_mean, _MEANS[node.target]), *node.args)
    return None


def _floor_divided(a: Tensor, b: object) -> Tensor:
    return FLOOR_DIVIDE(a, b if isinstance(b, Tensor) else aten.full.default([1], b, dtype=a.dtype))


def _maximum(op: OpOverload, x: Tensor, *args: object) -> Tensor:
    return op(x.to(torch.float64), *args)[0].to(x.dtype)


def _mean(
    n: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Average pooling from slices, in PyTorch's order of summation; onnxruntime only pools float32."""
    if ceil_mode:
        raise NotImplementedError("to_onnx: average pooling of integers with ceil_mode=True does not exist in ONNX")
    kernel, stride, padding = ([*v] * (n // len(v)) for v in (kernel, stride or kernel, padding))
    pads = [p for size in reversed(padding) for p in (size, size)]

    def summed(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, pads) if any(pads) else x
        total = None
        for offset in itertools.product(*map(range, kernel)):
            part = x
            for dim, (start, k, step) in enumerate(zip(offset, kernel, stride, strict=True), start=x.dim() - n):
                end = start + x.shape[dim] - (k - 1)
                part = aten.slice.Tensor(part, dim, start, end, step)
            total = part if total is None else total + part
        assert total is not None
        return total

    if divisor is not None or count_include_pad:
        return summed(x) / (divisor or math.prod(kernel))
    return summed(x) / summed(torch.ones_like(x))
