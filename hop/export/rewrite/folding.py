"""What of a program depends on no input, computed once."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node

from hop.compat.eager import OpOverload
from hop.compat.pytree import tree_map_only
from hop.export.rewrite.program import graph_of, rebuilt

SMALL = 2**16  # bytes


def folded(program: ExportedProgram) -> ExportedProgram:
    """The program of core ATen with constants in place of what it makes of parameters and constants alone, such as the
    multipliers of requantization. What would be larger than the tensors that it is made of, as int8 weights in int32
    are, and larger than 64 KiB, is left."""
    graph, constants = graph_of(program), ProgramConstants(program)
    known = known_tensors(program, graph)
    for node in [n for n in known if n.op == "call_function" and any(u not in known for u in n.users)]:
        held_by = constants.hold(graph, f"folded_{node.name}", _dense(known[node]), _dense(node.meta["val"]))
        node.replace_all_uses_with(held_by)
    for node in reversed([n for n in known if n.op == "call_function"]):
        if not node.users:
            graph.erase_node(node)
    return rebuilt(program, graph, constants.signature, constants=constants.tensors)


def known_tensors(program: ExportedProgram, graph: Graph) -> dict[Node, Tensor]:
    """The tensors that nodes of `graph`, a copy of the program's, have whatever the inputs are, as far as they are not
    larger than what they are made of, or than 64 KiB."""
    placeholders = dict(zip(_names(program.graph_signature), graph.find_nodes(op="placeholder"), strict=True))
    known: dict[Node, Tensor] = {placeholders[name]: x for name, x in _held(program).items()}
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
    """What nodes of `graph`, a copy of the program's, have whatever the inputs are, found when it is asked for."""

    def __init__(self, program: ExportedProgram) -> None:
        self.found: dict[str, Tensor | None] = dict(_held(program))

    def __call__(self, x: Any) -> Tensor | None:
        """The value of a node, None if it depends on an input; of a number, a tensor of it."""
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
    """The constants of a program, and more of them: `tensors`, and the `signature` that goes with them."""

    def __init__(self, program: ExportedProgram) -> None:
        self.signature, self.tensors = copy.deepcopy(program.graph_signature), dict(program.constants)

    def hold(self, graph: Graph, name: str, x: Tensor, val: Tensor) -> Node:
        """A placeholder, in front of the inputs of the graph, for a constant more. `val` is what is known of it."""
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
    """A copy, whose strides are none of 0."""
    return x.clone(memory_format=torch.contiguous_format if 0 in x.stride() else torch.preserve_format)


def _held(program: ExportedProgram) -> dict[str, Tensor]:
    """The tensors that the program holds and never writes to, by the names of their placeholders."""
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
