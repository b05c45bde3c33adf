"""Exported programs, copied and edited."""

import copy
from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map, tree_map_only

from hop import _compile


def graph_of(program: ExportedProgram) -> Graph:
    """A copy of the program's graph, to be edited. What its nodes know of their values, `meta["val"]`, is shared."""
    return copy.deepcopy(program.graph)


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
    for node, spec in zip(graph.find_nodes(op="placeholder"), own.input_specs, strict=True):
        if getattr(spec.arg, "name", None) is not None:
            spec.arg.name = node.name  # a copied graph names one anew that is called as a builtin is, such as `input`
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


def _outputs(graph: Graph) -> list[Any]:
    return [x.name if isinstance(x, Node) else x for x in graph.output_node().args[0]]  # type: ignore[union-attr]


def value(x: Any) -> Any:
    """What is known of the value of a node: a fake tensor, a symbolic number, or a list of them. Others as they are."""
    return x.meta["val"] if isinstance(x, Node) else x


def emit(before: Node, function: Callable[..., Any], *operands: Any) -> Any:
    """Put what `function(*operands)` does into the graph, before a node. Operands are nodes, for which the function has
    tensors, and constants; both may stand in lists. Returns its result with nodes for tensors."""
    flat: list[Node] = []
    tree_map_only(Node, flat.append, operands)
    nodes = list(dict.fromkeys(flat))

    def of_nodes(*values: Any) -> Any:
        known = dict(zip(nodes, values, strict=True))
        return function(*tree_map_only(Node, lambda node: known[node], operands))

    traced = _compile.traced(of_nodes, [value(node) for node in nodes])
    copies: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    graph = before.graph
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "output":
                return tree_map(lambda x: copies[x] if isinstance(x, Node) else x, node.args[0])
            if node.op == "get_attr":
                raise RuntimeError(f"a tensor made while tracing would become a constant: {node.target}")
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, lambda x: copies[x])
                copies[node].meta |= {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace")}
    raise AssertionError("a graph ends with its output")
