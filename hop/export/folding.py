"""What of a program depends on no input, computed once."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from hop.export.program import graph_of, rebuilt

SMALL = 2**16  # bytes


def folded(program: ExportedProgram) -> ExportedProgram:
    """The program of core ATen with constants in place of what it makes of parameters and constants alone, such as the
    multipliers of requantization. What would be larger than the tensors that it is made of, as int8 weights in int32
    are, and larger than 64 KiB, is left."""
    graph, signature = graph_of(program), copy.deepcopy(program.graph_signature)
    held = _held(program)
    own = [spec.arg.name for spec in signature.input_specs]  # type: ignore[union-attr]
    placeholders = dict(zip(own, graph.find_nodes(op="placeholder"), strict=True))
    known: dict[Node, Tensor] = {placeholders[name]: x for name, x in held.items()}
    sizes = {n: x.nbytes for n, x in known.items()}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not all(n in known for n in node.all_input_nodes) or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        args, kwargs = tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
        with torch.no_grad():
            made = node.target(*args, **kwargs)
        size = max([SMALL, *(sizes[n] for n in node.all_input_nodes)])
        if made.nbytes <= size:
            known[node], sizes[node] = made, size
    constants = dict(program.constants)
    users = [placeholders[name] for name in signature.user_inputs if name in placeholders]
    first = next(n for n in graph.nodes if n in users or n.op != "placeholder")
    specs = dict(zip(placeholders.values(), signature.input_specs, strict=True))
    for node in [n for n in known if n.op == "call_function" and any(u not in known for u in n.users)]:
        with graph.inserting_before(first):
            held_by = graph.placeholder(f"c_folded_{node.name}")
        held_by.meta["val"] = _dense(node.meta["val"])
        target = f"folded_{node.name}"
        constants[target] = _dense(known[node])
        specs[held_by] = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(held_by.name), target)
        node.replace_all_uses_with(held_by)
    for node in reversed([n for n in known if n.op == "call_function"]):
        if not node.users:
            graph.erase_node(node)
    signature.input_specs = [specs[n] for n in graph.find_nodes(op="placeholder")]
    return rebuilt(program, graph, signature, constants=constants)


def _dense(x: Tensor) -> Tensor:
    """A copy, whose strides are none of 0."""
    return x.clone(memory_format=torch.contiguous_format if 0 in x.stride() else torch.preserve_format)


def _held(program: ExportedProgram) -> dict[str, Tensor]:
    """The tensors that the program holds and never writes to, by the names of their placeholders."""
    signature = program.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    held: dict[str, Any] = {
        name: program.state_dict[target] if target in program.state_dict else program.constants[target]
        for name, target in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()
        if target not in written
    }
    constants = signature.inputs_to_lifted_tensor_constants
    held |= {name: program.constants[target] for name, target in constants.items()}
    return {name: x.detach() for name, x in held.items()}
