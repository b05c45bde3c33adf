"""Which nodes of a program correspond with which of the reference.

Programs that were made of one another keep names, or know where their nodes come from
(hop.export.analysis.correspondence). Those that were exported each on its own, a quantized module beside the float one,
share the paths of their submodules:

* the operators of one kind and shape in a submodule correspond in order, if both programs have equally many there;
* nodes that hop.export.verify would pair do, unless they stand in different submodules;
* then what a submodule returns, where it is one tensor of one shape in both.

An operator of ours counts as the one that it runs, so that a quantized product corresponds with the float one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable

from torch.fx import Graph, Node

from hop.export.analysis.correspondence import kind, pairs_of, same_shape
from hop.export.rewrite.program import value
from hop.report.nodes import inner_operator, path_of, paths_of

_NUMBERS = ("float", "quantized")


def pairs(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """The nodes that correspond, in the order of `a`."""
    paired: dict[Node, Node] = {}

    def take(x: Node, y: Node) -> None:
        if x not in paired and y not in taken and _comparable(x, y):
            paired[x] = y
            taken.add(y)

    taken: set[Node] = set()
    for x, y in _in_order(a, b, _place):
        take(x, y)
    for x, y in pairs_of(a, b):
        if path_of(x) == path_of(y) or not (path_of(x) and path_of(y)):
            take(x, y)
    results = [_results(graph) for graph in (a, b)]
    for path, of_a in results[0].items():
        of_b = results[1].get(path, [])
        if len(of_a) == len(of_b) == 1:
            take(of_a[0], of_b[0])
    return [(node, paired[node]) for node in a.nodes if node in paired]


def _place(node: Node) -> Hashable | None:
    """What operators have in common that correspond in order."""
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
    both = [(of_a, groups[1].get(key, [])) for key, of_a in groups[0].items()]
    return [pair for x, y in both if len(x) == len(y) for pair in zip(x, y, strict=True)]


def _results(graph: Graph) -> dict[str, list[Node]]:
    """The tensors of each submodule that others read."""
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
