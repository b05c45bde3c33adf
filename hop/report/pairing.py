"""Match the nodes of a program with those of the reference.

Programs derived from one another share node names, or record the nodes that they replaced
(hop.export.analysis.correspondence). Programs exported separately, such as a quantized module and the float one, share
only the paths of their submodules:

* operators of the same kind and rank in a submodule correspond in order, if both programs have equally many there;
* nodes that hop.export.verify would pair correspond, unless they belong to different submodules;
* then a submodule's result, if it is a single tensor of the same shape in both.

One of our operators counts as the operator it runs, so that a quantized product corresponds with the float one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable

from torch.fx import Graph, Node

from hop.export.analysis.correspondence import corresponding_nodes, kind, same_shape
from hop.export.rewrite.program import value
from hop.report.nodes import inner_operator, path_of, paths_of

_NUMBERS = ("float", "quantized")


def pairs(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """The pairs of corresponding nodes, in the order of `a`."""
    paired: dict[Node, Node] = {}

    def take(x: Node, y: Node) -> None:
        if x not in paired and y not in taken and _comparable(x, y):
            paired[x] = y
            taken.add(y)

    taken: set[Node] = set()
    for x, y in _in_order(a, b, _ordinal_key):
        take(x, y)
    for x, y in corresponding_nodes(a, b):
        if path_of(x) == path_of(y) or not (path_of(x) and path_of(y)):
            take(x, y)
    results = [_results(graph) for graph in (a, b)]
    for path, nodes in results[0].items():
        others = results[1].get(path, [])
        if len(nodes) == len(others) == 1:
            take(nodes[0], others[0])
    return [(node, paired[node]) for node in a.nodes if node in paired]


def _ordinal_key(node: Node) -> Hashable | None:
    """The key that corresponding operators share, or None."""
    path = path_of(node)
    return (path, inner_operator(node), len(value(node).shape)) if path else None


def _in_order(a: Graph, b: Graph, place: Callable[[Node], Hashable | None]) -> list[tuple[Node, Node]]:
    groups: list[defaultdict[Hashable, list[Node]]] = []
    for graph in (a, b):
        group: defaultdict[Hashable, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and kind(value(node)) is not None and (key := place(node)) is not None:
                group[key].append(node)
        groups.append(group)
    both = [(nodes, groups[1].get(key, [])) for key, nodes in groups[0].items()]
    return [pair for x, y in both if len(x) == len(y) for pair in zip(x, y, strict=True)]


def _results(graph: Graph) -> dict[str, list[Node]]:
    """The tensors of each submodule that nodes outside it read."""
    inside: defaultdict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and kind(value(node)) is not None:
            for path in paths_of(node):
                inside[path].append(node)
    return {path: [n for n in nodes if not set(nodes).issuperset(n.users)] for path, nodes in inside.items()}


def _comparable(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    one = kind(x) == kind(y) or (kind(x) in _NUMBERS and kind(y) in _NUMBERS)
    return kind(x) is not None and one and same_shape(x, y)
