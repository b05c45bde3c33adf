"""Which nodes of a program correspond with which of the reference.

Programs that were made of one another keep names, or know where their nodes come from
(hop.export.analysis.correspondence). Those that were exported each on its own, a quantized module beside the float one,
share the paths of their submodules:

* the operators of one kind and shape in a submodule correspond in order, if both programs have equally many there;
* nodes that hop.export.verify would pair do, unless they stand in different submodules;
* then what a submodule returns, where it is one tensor of one shape in both.

An operator of ours counts as the one that it runs, so that a quantized product corresponds with the float one.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from torch.fx import Graph, Node

from hop.compat.eager import OpOverload
from hop.export.analysis.correspondence import kind, pairs_of, same_shape
from hop.export.rewrite.program import value

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


def path_of(node: Node) -> str:
    """The submodule in which a node stands, as "encoder.layer.0"; empty where the program does not say."""
    paths = paths_of(node)
    return paths[-1] if paths else ""


def paths_of(node: Node) -> list[str]:
    """That submodule and those around it, outermost first."""
    return [path for name, _ in _stack(node) if (path := _plain(str(name)))]


def module_of(node: Node) -> str:
    """The class of that submodule."""
    stack = _stack(node)
    if not path_of(node) or not stack:
        return ""
    kind = stack[-1][1]
    return (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _stack(node: Node) -> list[tuple[str, Any]]:
    """The names and classes of the submodules in which a node stands, outermost first."""
    modules: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return list(modules.values())


def inner_operator(node: Node) -> Any:
    """What a node calls; of an operator on operators, the inner one."""
    inner = node.args[0] if node.args else None
    return inner if isinstance(inner, OpOverload) else node.target


def _plain(name: str) -> str:
    """The path of a module as `named_modules` has it, of one call like of another."""
    if name.startswith("_empty_nn_module_stack"):
        return ""
    name = re.sub(r"^L\['self'\]\.?|^L__self___?|@\d+", "", name)
    return re.sub(r"\['?(\w+)'?\]", r".\1", name).strip(".")


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
