"""Make numbers in float64 operations constants of the program, because torch.onnx and ExecuTorch write Python numbers
as float32.
"""

import math

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.export.rewrite.folding import ProgramConstants
from hop.export.rewrite.program import copy_graph, value, with_graph

aten = torch.ops.aten

_NAMES = ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")
_BINARY = {getattr(aten, n).Scalar: getattr(aten, n).Tensor for n in _NAMES}
_BINARY |= {getattr(aten, n).Tensor: getattr(aten, n).Tensor for n in _NAMES}
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
"""The index of the number among the arguments; for binary operators it is 1."""


def float64_numbers_as_constants(program: ExportedProgram) -> ExportedProgram:
    """Replace numbers in float64 operations of a core ATen program by constants, unless float32 represents them
    exactly.
    """
    graph, constants = copy_graph(program), ProgramConstants(program)
    nodes: dict[float, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if target not in _FILLED and target not in _BINARY:
            continue
        like = value(node if target in _FILLED else node.args[0])
        place = _FILLED.get(target, 1)
        number = node.args[place]
        if not isinstance(number, float) or like.dtype != torch.float64 or _is_float32(number):
            continue
        if number not in nodes:
            x = torch.tensor(number, dtype=torch.float64)
            val: Tensor = like.fake_mode.from_tensor(x, static_shapes=True)
            nodes[number] = constants.hold(graph, f"number_{len(nodes)}", x, val)
        if target in _BINARY:
            node.target = _BINARY[target]
            node.update_arg(place, nodes[number])
            continue
        with graph.inserting_before(node):
            expanded = graph.call_function(aten.expand.default, (nodes[number], list(like.shape)))
        expanded.meta.update(node.meta)
        node.replace_all_uses_with(expanded)
        graph.erase_node(node)
    return with_graph(program, graph, constants.signature, constants=constants.tensors) if nodes else program


def _is_float32(number: float) -> bool:
    return math.isnan(number) or torch.tensor(number, dtype=torch.float32).item() == number
