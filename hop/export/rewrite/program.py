"""Exported programs, copied and edited."""

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


def check_program(program: Any, name: str) -> None:
    """Raise TypeError for what is no exported program, in the words of the function of that name."""
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"{name}: program must be a torch.export.ExportedProgram, got {shown(program)}; make one with "
            "torch.export.export, or read one with torch.export.load"
        )


def graph_of(program: ExportedProgram) -> Graph:
    """A copy of the program's graph, to be edited. What its nodes know of their values, `meta["val"]`, is shared."""
    graph = copy.deepcopy(program.graph)
    for node, its in zip(graph.nodes, program.graph.nodes, strict=True):
        node.name = its.name  # a copy renames what Python has a name for, such as an argument called input
    return graph


def rebuilt(
    program: ExportedProgram, graph: Graph, signature: ExportGraphSignature | None = None, **changes: Any
) -> ExportedProgram:
    """A program of `graph`, which has the placeholders and the outputs of the program's own, in their order. It shares
    the parameters, buffers and constants. `changes` replaces other arguments of ExportedProgram, such as `constants`.

    Raises what torch's verifier raises if the graph is none that it takes.
    """
    graph.lint()
    old = dict(zip(_outputs(program.graph), _outputs(graph), strict=True))
    own = signature or copy.deepcopy(program.graph_signature)
    for spec in own.output_specs:  # outputs are found by the names of their nodes
        if spec.arg is not None and getattr(spec.arg, "name", None) in old:
            spec.arg.name = old[spec.arg.name]
    given: dict[str, Any] = {
        "state_dict": program.state_dict,
        "range_constraints": copy.deepcopy(program.range_constraints),
        "module_call_graph": copy.deepcopy(program.module_call_graph),
        "example_inputs": program.example_inputs,
        "constants": program.constants,
        "verifiers": program.verifiers,
    }
    return ExportedProgram(GraphModule(program.graph_module, graph), graph, own, **{**given, **changes})


def propagate(graph: Graph) -> None:
    """Find again what is known of each value. A tensor may lie otherwise than the one whose place it took; a view that
    it then does not have becomes a reshape."""
    mode = next((v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)), None)
    if mode is None:
        return
    for node in list(graph.nodes):
        if node.op != "call_function" or any(x.op == "get_attr" for x in node.all_input_nodes):
            continue  # a nested graph is not looked into
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
    """Let a graph have one operator for one thing: reshape for what is one without a name of its own, and nothing for
    assertions, which hold what they assert of, and say of types what is known."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.reshape.default


def share_numbers(graph: Graph) -> None:
    """One node for all tensors that hold the same number: scales and zero points."""
    first: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        if not any(isinstance(x, Node) for x in node.all_input_nodes):
            kept = first.setdefault((str(node.args), str(node.kwargs)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def origin_of(node: Node) -> Node:
    """What a node is a view of."""
    while of(node.target).family is VIEW:
        (node, *_) = node.all_input_nodes
    return node


def without_unused(program: ExportedProgram) -> ExportedProgram:
    """The program without the parameters, buffers and constants that nothing reads."""
    graph, old = graph_of(program), program.graph_signature
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    specs, gone = [], set()
    for spec in old.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        is_written = spec.target in old.buffers_to_mutate.values()
        if spec.kind in _HELD and node is not None and not node.users and not is_written:
            graph.erase_node(node)
            gone.add(spec.target)
        else:
            specs.append(spec)
    gone -= {spec.target for spec in specs}  # which a placeholder of another name still reads
    signature = copy.deepcopy(ExportGraphSignature(input_specs=specs, output_specs=old.output_specs))
    kept = [{k: v for k, v in x.items() if k not in gone} for x in (program.state_dict, program.constants)]
    return rebuilt(program, graph, signature, state_dict=kept[0], constants=kept[1])


def _outputs(graph: Graph) -> list[Any]:
    return [x.name if isinstance(x, Node) else x for x in graph.output_node().args[0]]  # type: ignore[union-attr]


def value(x: Any) -> Any:
    """What is known of the value of a node: a fake tensor, a symbolic number, or a list of them. Others as they are."""
    return x.meta.get("val") if isinstance(x, Node) else x


def constant(program: ExportedProgram, node: Node) -> Tensor | None:
    """The value of a placeholder that is a parameter, a buffer or a constant of the program, which the program does not
    write to; None of any other node."""
    if node.op != "placeholder":
        return None
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) == node.name and spec.target is not None:
            if spec.target in program.graph_signature.buffers_to_mutate.values():
                return None
            tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            return tensor if isinstance(tensor, Tensor) else None
    return None


def tensors_of(node: Node) -> list[Node]:
    """The tensors among the arguments, those of lists included."""
    return [x for x in tree_leaves(node.args) if isinstance(x, Node) and isinstance(value(x), Tensor)]


def emit(before: Node, function: Callable[..., Any], *operands: Any) -> Any:
    """Put what `function(*operands)` does into the graph, before a node. Operands are nodes, for which the function has
    tensors, and constants; both may stand in lists. Returns its result with nodes for tensors."""
    flat: list[Node] = []
    tree_map_only(Node, flat.append, operands)
    nodes = list(dict.fromkeys(flat))

    def of_nodes(*values: Any) -> Any:
        known = dict(zip(nodes, values, strict=True))
        return function(*tree_map_only(Node, lambda node: known[node], operands))

    graph_module = traced(of_nodes, [value(node) for node in nodes])
    copies: dict[Node, Any] = dict(zip(graph_module.graph.find_nodes(op="placeholder"), nodes, strict=True))
    graph = before.graph
    with graph.inserting_before(before):
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return tree_map(lambda x: copies[x] if isinstance(x, Node) else x, node.args[0])
            if node.op == "get_attr":
                raise RuntimeError(f"a tensor made while tracing would become a constant: {node.target}")
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda x: copies[x])
                copies[node].meta |= {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace")}
    raise AssertionError("a graph ends with its output")
