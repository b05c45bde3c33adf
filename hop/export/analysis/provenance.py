"""Find the node of one program that a node of another program comes from.

When torch.export replaces a node, it stores the old node's name in `meta["from_node"]` of the new ones. A node's
ancestry is the list of these names, from the first program to its own: ("linear", "linear", "mm") for an mm that a
decomposition put in place of a linear. A node that a pass created has no ancestors, however many programs came before;
None fills their positions, so that all nodes of a program have ancestries of the same length.
"""

import os
import re
import sys
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

Ancestry = tuple[str | None, ...]


def ancestries(graph: Graph) -> dict[Node, Ancestry]:
    """The ancestry of each call in a graph, in order."""
    ancestors = {node: _names(node) for node in graph.nodes if node.op == "call_function"}
    depth = max(map(len, ancestors.values()), default=1)
    return {node: (None,) * (depth - len(names)) + names for node, names in ancestors.items()}


def _names(node: Node) -> tuple[str, ...]:
    names, sources = [node.name], node.meta.get("from_node")
    while sources and len(sources) == 1:  # several sources are ambiguous
        names.append(sources[0].name)
        sources = sources[0].from_node
    return tuple(reversed(names))


def descendants(a: Graph, b: Graph) -> list[tuple[Node, list[Node]]]:
    """Each call of `a`, with the calls of `b` that come from it, or that have its name if the graphs are equally deep.

    `b` must be as deep as `a` or deeper; otherwise the lists are empty.
    """
    ancestries_a, ancestries_b = ancestries(a), ancestries(b)
    depth = len(next(iter(ancestries_a.values()), ()))
    groups: dict[Ancestry, list[Node]] = {}
    for node, names in ancestries_b.items():
        if len(names) >= depth:
            groups.setdefault(names[:depth], []).append(node)
    return [(node, groups.get(names, [])) for node, names in ancestries_a.items()]


def relatives(a: Graph, b: Graph) -> Iterator[tuple[list[Node], list[Node]]]:
    """For each node that both programs decomposed differently, the results of its descendants in `a` and in `b`.

    Nodes of later programs come first.
    """
    both = ancestries(a), ancestries(b)
    for length in range(min(depth(a), depth(b)) - 1, 0, -1):
        in_a, in_b = (_by_ancestor(names, length) for names in both)
        for ancestor, group in in_a.items():
            yield results(group), results(in_b.get(ancestor, []))


def _by_ancestor(ancestries: dict[Node, Ancestry], length: int) -> dict[Ancestry, list[Node]]:
    groups: dict[Ancestry, list[Node]] = {}
    for node, names in ancestries.items():
        if names[length - 1] is not None:
            groups.setdefault(names[:length], []).append(node)
    return groups


def depth(graph: Graph) -> int:
    """The number of programs in the ancestry of its nodes."""
    return len(next(iter(ancestries(graph).values()), ()))


def results(group: list[Node]) -> list[Node]:
    """The nodes of a group that are read outside it."""
    own = set(group)
    return [node for node in group if not own.issuperset(node.users)]


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)')
LIBRARIES = tuple(
    os.path.dirname(package.__file__ or "") + os.sep for package in (torch, sys.modules[__name__.partition(".")[0]])
)


def source_line(node: Node) -> str:
    """The innermost line of the model that a node comes from, "file:line, in function: code"; a line of torch or of
    this library where there is no other, "" if torch.export recorded none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    user_frames = [frame for frame in frames if not frame[0].startswith(LIBRARIES)]
    file, line, function, code = (user_frames or frames)[-1]
    return f"{file}:{line}, in {function}: {code.strip()}"
