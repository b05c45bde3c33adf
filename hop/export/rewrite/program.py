"""Copy and edit exported programs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import Graph, GraphModule, Node

from hop.compat.export import traced
from hop.compat.pytree import tree_leaves, tree_map, tree_map_only
from hop.compat.subclasses import FakeTensor
from hop.dispatch.operators import VIEW, of
from hop.numerics.spelling import shown


def check_program(program: object, name: str) -> None:
    """Raise TypeError, naming the function `name`, unless `program` is an ExportedProgram."""
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"{name}: program must be a torch.export.ExportedProgram, got {shown(program)}; make one with "
            "torch.export.export, or read one with torch.export.load"
        )


def copy_graph(program: ExportedProgram) -> Graph:
    """A copy of the program's graph to edit. Fake values, `meta["val"]`, are shared."""
    graph = copy.deepcopy(program.graph)
    for node, its in zip(graph.nodes, program.graph.nodes, strict=True):
        node.name = its.name  # a copy renames nodes that have names of Python builtins, such as input
    return graph


def with_graph(
    program: ExportedProgram, graph: Graph, signature: ExportGraphSignature | None = None, **changes: Any
) -> ExportedProgram:
    """A program with `graph`, whose placeholders and outputs match the program's own in order.

    Parameters, buffers and constants are shared. `changes` replaces other arguments of ExportedProgram, such as
    `constants`. Raises the errors of torch's verifier for an invalid graph.
    """
    graph.lint()
    old = dict(zip(_outputs(program.graph), _outputs(graph), strict=True))
    new_signature = signature or copy.deepcopy(program.graph_signature)
    for spec in new_signature.output_specs:  # outputs are found by the names of their nodes
        if spec.arg is not None and getattr(spec.arg, "name", None) in old:
            spec.arg.name = old[spec.arg.name]
    given: dict[str, object] = {
        "state_dict": program.state_dict,
        "range_constraints": copy.deepcopy(program.range_constraints),
        "module_call_graph": copy.deepcopy(program.module_call_graph),
        "example_inputs": program.example_inputs,
        "constants": program.constants,
        "verifiers": program.verifiers,
    }
    return ExportedProgram(GraphModule(program.graph_module, graph), graph, new_signature, **{**given, **changes})


def propagate(graph: Graph) -> None:
    """Recompute the fake value of each node.

    A new node may have other strides than the one it replaced; a view that is then impossible becomes a reshape.
    """
    mode = next((v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)), None)
    if mode is None:
        return
    for node in list(graph.nodes):
        if node.op != "call_function" or any(x.op == "get_attr" for x in node.all_input_nodes):
            continue  # nested graphs are skipped
        args, kwargs = tree_map_only(Node, value, (node.args, node.kwargs))
        try:
            with torch.no_grad(), mode:
                output = node.target(*args, **kwargs)  # type: ignore[operator]
            node.meta["val"] = tuple(output) if isinstance(node.meta.get("val"), tuple) else output
        except (RuntimeError, ValueError):
            if node.target is not torch.ops.aten.view.default:
                raise
            reshaped = emit(node, torch.ops.aten.reshape.default, *node.args)
            node.replace_all_uses_with(reshaped)
            graph.erase_node(node)


def simplify(graph: Graph) -> None:
    """Normalize a graph: _unsafe_view becomes reshape, and assertions on tensor metadata, which are known to hold, are
    removed.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.reshape.default


def share_numbers(graph: Graph) -> None:
    """Merge full nodes that create the same tensor: scales and zero points."""
    first: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        if not any(isinstance(x, Node) for x in node.all_input_nodes):
            kept = first.setdefault((str(node.args), str(node.kwargs)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def origin_of(node: Node) -> Node:
    """The node that a node is a view of."""
    while of(node.target).family is VIEW:
        (node, *_) = node.all_input_nodes
    return node


def without_unused(program: ExportedProgram) -> ExportedProgram:
    """The program without parameters, buffers and constants that no node reads."""
    graph, old = copy_graph(program), program.graph_signature
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    specs, gone = [], set()
    for spec in old.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        is_written = spec.target in old.buffers_to_mutate.values()
        if spec.kind in _STORED and node is not None and not node.users and not is_written:
            graph.erase_node(node)
            gone.add(spec.target)
        else:
            specs.append(spec)
    gone -= {spec.target for spec in specs}  # another placeholder may still read it
    signature = copy.deepcopy(ExportGraphSignature(input_specs=specs, output_specs=old.output_specs))
    kept = [{k: v for k, v in x.items() if k not in gone} for x in (program.state_dict, program.constants)]
    return with_graph(program, graph, signature, state_dict=kept[0], constants=kept[1])


def _outputs(graph: Graph) -> list[Any]:
    return [x.name if isinstance(x, Node) else x for x in graph.output_node().args[0]]  # type: ignore[union-attr]


def value(x: object) -> Any:
    """The fake value of a node: a tensor, a symbolic number, or a list of these. Other arguments are returned
    unchanged.
    """
    return x.meta.get("val") if isinstance(x, Node) else x


def constant(program: ExportedProgram, node: Node) -> Tensor | None:
    """The value of a parameter, buffer or constant of the program that it does not write to; None for other nodes."""
    if node.op != "placeholder":
        return None
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) == node.name and spec.target is not None:
            if spec.target in program.graph_signature.buffers_to_mutate.values():
                return None
            tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            return tensor if isinstance(tensor, Tensor) else None
    return None


def tensor_arguments(node: Node) -> list[Node]:
    """The tensors among a node's arguments, including those in lists."""
    return [x for x in tree_leaves(node.args) if isinstance(x, Node) and isinstance(value(x), Tensor)]


def emit(before: Node, function: Callable[..., Any], *operands: Any) -> Any:
    """Insert the operations of `function(*operands)` into the graph, before a node.

    Operands are nodes, which the function receives as tensors, and constants; lists may contain both. Returns the
    function's result with nodes in place of tensors.
    """
    flat: list[Node] = []
    tree_map_only(Node, flat.append, operands)
    nodes = list(dict.fromkeys(flat))

    def run(*values: object) -> Any:
        known = dict(zip(nodes, values, strict=True))
        return function(*tree_map_only(Node, lambda node: known[node], operands))

    graph_module = traced(run, [value(node) for node in nodes])
    copies: dict[Node, Any] = dict(zip(graph_module.graph.find_nodes(op="placeholder"), nodes, strict=True))
    graph = before.graph
    with graph.inserting_before(before):
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return tree_map(lambda x: copies[x] if isinstance(x, Node) else x, node.args[0])
            if node.op == "get_attr":
                raise RuntimeError(f"a tensor created while tracing would become a constant: {node.target}")
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda x: copies[x])
                copies[node].meta |= {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace")}
    raise AssertionError("a graph ends with its output")
