"""Tables of docs/export.md: the operators of graphs, and how many nodes of core ATen they lower to."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hop
from hop import presets, schemes
from hop.impls.decompositions import operators_named
from tests.support import pages

aten = torch.ops.aten
_FUNCTIONS = (
    *(hop.out_dtype, hop.quantize, hop.dequantize, hop.scaled, hop.quantized, hop.fake_quantize, hop.noise, hop.pack),
)


def names() -> str:
    """The operators that our functions put into graphs."""
    rows = []
    for function in _FUNCTIONS:
        targets = " ".join(f"`{hop_.name()}`" for hop_ in operators_named(function))
        rows.append([f"`hop.{function.__name__}`", targets])
    return pages.table([["function", "operators in torch.ops.higher_order"], *rows])


def _codes(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.int8)


def _linear(left: Any, right: Any) -> Callable[..., Any]:
    return lambda x, w: hop.scaled(aten.linear.default, torch.float32, *(
        v if q is None else hop.quantize(q, v) for q, v in ((left, x), (right, w))
    ))  # fmt: skip


X, W = (4, 64), (32, 64)
# By label: the function, and its operands or their sizes.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "`out_dtype`: mm, int8 to int32": (
        lambda a, b: hop.out_dtype(aten.mm.default, torch.int32, a, b), (_codes(4, 64), _codes(64, 32)),
    ),
    "`out_dtype`: conv2d, int8 to int32": (
        lambda a, b: hop.out_dtype(aten.conv2d.default, torch.int32, a, b), (_codes(1, 8, 9, 9), _codes(8, 8, 3, 3)),
    ),
    "`dequantize(quantize)`: `INT8_TENSOR`": (lambda x: hop.dequantize(hop.quantize(presets.INT8_TENSOR, x)), (X,)),
    "`dequantize(quantize)`: `INT8_ROW_AFFINE`": (
        lambda x: hop.dequantize(hop.quantize(presets.INT8_ROW_AFFINE, x)), (X,),
    ),
    "`dequantize(quantize)`: `INT4_32`": (lambda x: hop.dequantize(hop.quantize(presets.INT4_32, x)), (X,)),
    "`dequantize(quantize)`: `MXFP8`": (lambda x: hop.dequantize(hop.quantize(presets.MXFP8, x)), (X,)),
    "`dequantize(quantize)`: `NVFP4`": (lambda x: hop.dequantize(hop.quantize(presets.NVFP4, x)), (X,)),
    "`scaled`: linear, `INT8_ROW` × `INT8_ROW`, quantized in the program": (
        _linear(presets.INT8_ROW, presets.INT8_ROW), (X, W),
    ),
    "`scaled`: linear, `INT8_ROW_AFFINE` × `INT4_32`": (
        _linear(presets.INT8_ROW_AFFINE, presets.INT4_32), (X, W),
    ),
    "`scaled`: linear, floats × `INT4_32`": (_linear(None, presets.INT4_32), (X, W)),
    "`scaled`: linear, `MXFP8` × `MXFP8`": (_linear(presets.MXFP8, presets.MXFP8), (X, W)),
    "`quantized`: linear, `INT8_DYNAMIC`": (
        lambda x, w: hop.quantized(aten.linear.default, schemes.INT8_DYNAMIC, x, w), (X, W),
    ),
    "`fake_quantize`: `INT8_ROW`": (lambda x: hop.fake_quantize(presets.INT8_ROW, x), (X,)),
}  # fmt: skip


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _operators(program: torch.export.ExportedProgram) -> list[str]:
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return [str(n.target) for n in nodes]


def becomes() -> str:
    """The number of nodes after run_decompositions(hop.decompositions())."""
    rows = []
    for what, (function, operands) in CALLS.items():
        args = tuple(x if isinstance(x, torch.Tensor) else torch.ones(x) for x in operands)
        program = torch.export.export(_Call(function), args).run_decompositions({})
        lowered = _operators(program.run_decompositions(hop.decompositions()))
        ours = sum(name.startswith("hop_") for name in _operators(program))
        rows.append([what, str(ours), str(len(lowered))])
    return pages.table([["call", "nodes of hop", "nodes of core ATen"], *rows])


TABLES: dict[str, Callable[[], str]] = {": names": names, ": becomes": becomes}
