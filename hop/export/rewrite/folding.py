"""Constant folding: compute what does not depend on inputs once."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node

from hop.compat.eager import OpOverload
from hop.compat.pytree import tree_map_only
from hop.export.rewrite.program import copy_graph, with_graph

SMALL = 2**16  # bytes


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """Replace what a core ATen program computes from parameters and constants only, such as requantization multipliers,
    by constants.

    Results are not folded if they are larger than 64 KiB and than the tensors they are computed from, such as int8
    weights converted to int32.
    """
    graph, constants = copy_graph(program), ProgramConstants(program)
    known = known_tensors(program, graph)
    for node in [n for n in known if n.op == "call_function" and any(u not in known for u in n.users)]:
        replacement = constants.hold(graph, f"folded_{node.name}", _dense(known[node]), _dense(node.meta["val"]))
        node.replace_all_uses_with(replacement)
    for node in reversed([n for n in known if n.op == "call_function"]):
        if not node.users:
            graph.erase_node(node)
    return with_graph(program, graph, constants.signature, constants=constants.tensors)


def known_tensors(program: ExportedProgram, graph: Graph) -> dict[Node, Tensor]:
    """The constant values of nodes of `graph`, a copy of the program's graph, with the size limit of fold_constants."""
    placeholders = dict(zip(_names(program.graph_signature), graph.find_nodes(op="placeholder"), strict=True))
    known: dict[Node, Tensor] = {placeholders[name]: x for name, x in _stored_tensors(program).items()}
    sizes = {n: x.nbytes for n, x in known.items()}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if not all(n in known for n in node.all_input_nodes) or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        args, kwargs = tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
        with torch.no_grad():
            output = node.target(*args, **kwargs)
        size = max([SMALL, *(sizes[n] for n in node.all_input_nodes)])
        if output.nbytes <= size:
            known[node], sizes[node] = output, size
    return known


class KnownValues:
    """The constant values of nodes of a program, computed on demand."""

    def __init__(self, program: ExportedProgram) -> None:
        self.found: dict[str, Tensor | None] = dict(_stored_tensors(program))

    def __call__(self, x: object) -> Tensor | None:
        """The value of a node, or None if it depends on an input; a number becomes a tensor."""
        if not isinstance(x, Node):
            return torch.tensor(x)
        if x.name not in self.found:
            self.found[x.name] = self._computed(x)
        return self.found[x.name]

    def _computed(self, node: Node) -> Tensor | None:
        op = node.target
        if node.op != "call_function" or not isinstance(op, OpOverload) or op._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in op.tags:
            return None
        values = {n: self(n) for n in node.all_input_nodes}
        if any(x is None for x in values.values()):
            return None
        args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
        with torch.no_grad():
            result = op(*args, **kwargs)
        return result if isinstance(result, Tensor) else None


class ProgramConstants:
    """The constants of a program while more are added: `tensors`, and the matching `signature`."""

    def __init__(self, program: ExportedProgram) -> None:
        self.signature, self.tensors = copy.deepcopy(program.graph_signature), dict(program.constants)

    def hold(self, graph: Graph, name: str, x: Tensor, val: Tensor) -> Node:
        """Add a constant: a placeholder in front of the graph's inputs, with the value `x` and the fake value `val`."""
        specs, placeholders = self.signature.input_specs, graph.find_nodes(op="placeholder")
        at = next((i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
        first = placeholders[at] if at < len(specs) else next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            node = graph.placeholder(f"c_{name}")
        node.meta["val"] = val
        self.tensors[name] = x
        specs.insert(at, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name))
        return node


def _names(signature: ExportGraphSignature) -> list[str]:
    return [spec.arg.name for spec in signature.input_specs]  # type: ignore[union-attr]


def _dense(x: Tensor) -> Tensor:
    """A copy without strides of 0."""
    return x.clone(memory_format=torch.contiguous_format if 0 in x.stride() else torch.preserve_format)


def _stored_tensors(program: ExportedProgram) -> dict[str, Tensor]:
    """The tensors of the program that it never writes to, by the names of their placeholders."""
    signature = program.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    tensors: dict[str, Any] = {
        name: program.state_dict[target] if target in program.state_dict else program.constants[target]
        for name, target in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()
        if target not in written
    }
    constants = signature.inputs_to_lifted_tensor_constants
    tensors |= {name: program.constants[target] for name, target in constants.items()}
    return {name: x.detach() for name, x in tensors.items()}
