"""Numbers beside float64 as constants of a program: torch.onnx and ExecuTorch write Python's numbers as float32."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.export.rewrite.folding import ProgramConstants
from hop.export.rewrite.program import graph_of, rebuilt, value

aten = torch.ops.aten

_NAMES = ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")
_BESIDE = {getattr(aten, n).Scalar: getattr(aten, n).Tensor for n in _NAMES}
_BESIDE |= {getattr(aten, n).Tensor: getattr(aten, n).Tensor for n in _NAMES}
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
"""Where the number is among the arguments; beside a tensor it is the second."""


def numbers_held(program: ExportedProgram) -> ExportedProgram:
    """The program of core ATen with a constant for each number beside float64 that is no float32."""
    graph, constants = graph_of(program), ProgramConstants(program)
    nodes: dict[float, Node] = {}
    for node in list(graph.nodes):
        target: Any = node.target
        if target not in _FILLED and target not in _BESIDE:
            continue
        like: Any = value(node if target in _FILLED else node.args[0])
        place = _FILLED.get(target, 1)
        number = node.args[place]
        if not isinstance(number, float) or like.dtype != torch.float64 or _is_float32(number):
            continue
        if number not in nodes:
            x = torch.tensor(number, dtype=torch.float64)
            val: Tensor = like.fake_mode.from_tensor(x, static_shapes=True)
            nodes[number] = constants.hold(graph, f"number_{len(nodes)}", x, val)
        if target in _BESIDE:
            node.target = _BESIDE[target]
            node.update_arg(place, nodes[number])
            continue
        with graph.inserting_before(node):
            expanded = graph.call_function(aten.expand.default, (nodes[number], list(like.shape)))
        expanded.meta.update(node.meta)
        node.replace_all_uses_with(expanded)
        graph.erase_node(node)
    return rebuilt(program, graph, constants.signature, constants=constants.tensors) if nodes else program


def _is_float32(number: float) -> bool:
    return math.isnan(number) or torch.tensor(number, dtype=torch.float32).item() == number
