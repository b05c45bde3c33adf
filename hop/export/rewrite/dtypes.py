"""Correct the dtype that weights are dequantized to after the model was cast."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from hop.dispatch.operators import CONVOLUTION, MATRIX, of
from hop.export.rewrite.program import check_program, copy_graph, origin_of, value, with_graph

DEQUANTIZE = {"torchao.dequantize_affine.default": ("output_dtype", 2)}
"""Operators with an argument for the output dtype: its name, and the index of the scale."""


def follow_dtype(program: ExportedProgram) -> ExportedProgram:
    """Dequantize each weight to the dtype of the activations that it is multiplied with.

    `model.float()`, `.half()` and `.type()` do not change the dtype stored in a torchao tensor. Such a model can be
    exported, but the program fails at run time because a product has two dtypes. This function gives
    `torchao.dequantize_affine` the dtype of the other operand and casts its scale, as if the model had been cast before
    it was quantized. Weights of `hop` follow casts by themselves.

    Returns:
        A program with the same inputs and outputs, in which tensor subclasses are replaced by their plain tensors.

    Raises:
        TypeError: `program` is not an ExportedProgram.
    """
    check_program(program, "follow_dtype")
    program = program.run_decompositions({})
    graph = copy_graph(program)
    state: dict[str, object] = dict(program.state_dict)
    constants: dict[str, object] = dict(program.constants)
    names = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
        **program.graph_signature.inputs_to_lifted_tensor_constants,
    }
    for node in list(graph.nodes):
        if of(node.target).family not in (MATRIX, CONVOLUTION):
            continue
        operands = [x for x in node.args[:3] if isinstance(x, Node)]
        origins = [(x, origin_of(x)) for x in operands]
        weights = {origin for _, origin in origins if _is_weight(origin, names)}
        wanted = {value(x).dtype for x, origin in origins[:2] if origin not in weights}
        wanted &= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        if len(wanted) != 1:
            continue
        (dtype,) = wanted
        for x, origin in origins:
            if origin in weights and value(origin).dtype != dtype:
                _set(x, origin, dtype)
                scale = origin.args[DEQUANTIZE[str(origin.target)][1]]
                _cast(scale, dtype, names, state, constants)
    return with_graph(program, graph, state_dict=state, constants=constants)


def _is_weight(node: Node, names: dict[str, str]) -> bool:
    """Whether a node dequantizes a tensor of the program."""
    return str(node.target) in DEQUANTIZE and getattr(node.args[0], "name", None) in names


def _set(x: Node, origin: Node, dtype: torch.dtype) -> None:
    """Set the dtype of `origin` and of the nodes between it and its view `x`."""
    name, _ = DEQUANTIZE[str(origin.target)]
    schema = [argument.name for argument in origin.target._schema.arguments]  # type: ignore[union-attr]
    place = schema.index(name)
    origin.args, origin.kwargs = origin.args[:place], {**origin.kwargs, name: dtype}
    while True:
        x.meta["val"] = x.meta["val"].to(dtype)
        if x is origin:
            return
        (x, *_) = x.all_input_nodes


def _cast(
    scale: object, dtype: torch.dtype, names: dict[str, str], state: dict[str, Any], constants: dict[str, Any]
) -> None:
    if not isinstance(scale, Node) or scale.name not in names:
        return
    tensors = state if names[scale.name] in state else constants
    old = tensors[names[scale.name]]
    scale.meta["val"] = scale.meta["val"].to(dtype)
    tensor = old.detach().to(dtype)
    tensors[names[scale.name]] = (
        torch.nn.Parameter(tensor, old.requires_grad) if isinstance(old, torch.nn.Parameter) else tensor
    )
