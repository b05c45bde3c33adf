"""Which node of one program a node of another one comes from.

torch.export writes into `meta["from_node"]` of each node that it makes of another the name of that one. A node's
ancestry is these names, from the first program on, and its own last: ("linear", "linear", "mm") for an mm that a
decomposition put into the place of a linear. A node that a pass made anew has no ancestors, however far its program is
from the first one; their places hold None, so that all nodes of a program have ancestries of one length.
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
    while sources and len(sources) == 1:  # of several, none is the one
        names.append(sources[0].name)
        sources = sources[0].from_node
    return tuple(reversed(names))


def descendants(a: Graph, b: Graph) -> list[tuple[Node, list[Node]]]:
    """Each call of `a`, and those of `b` that come from it, or are it: where both have as many ancestors, the one of
    the same name. `b` is as far from the first program as `a`, or farther; none comes from another otherwise."""
    of_a, of_b = ancestries(a), ancestries(b)
    depth = len(next(iter(of_a.values()), ()))
    groups: dict[Ancestry, list[Node]] = {}
    for node, names in of_b.items():
        if len(names) >= depth:
            groups.setdefault(names[:depth], []).append(node)
    return [(node, groups.get(names, [])) for node, names in of_a.items()]


def relatives(a: Graph, b: Graph) -> Iterator[tuple[list[Node], list[Node]]]:
    """What became of one node in `a` and in `b`, which took it apart each in its own way: of each such node those that
    others read, nodes of the last programs first."""
    of_a, of_b = ancestries(a), ancestries(b)
    for length in range(min(depth(a), depth(b)) - 1, 0, -1):
        in_a, in_b = (_by_ancestor(names, length) for names in (of_a, of_b))
        for ancestor, group in in_a.items():
            yield results(group), results(in_b.get(ancestor, []))


def _by_ancestor(ancestries: dict[Node, Ancestry], length: int) -> dict[Ancestry, list[Node]]:
    groups: dict[Ancestry, list[Node]] = {}
    for node, names in ancestries.items():
        if names[length - 1] is not None:
            groups.setdefault(names[:length], []).append(node)
    return groups


def depth(graph: Graph) -> int:
    """How many programs its nodes went through."""
    return len(next(iter(ancestries(graph).values()), ()))


def results(group: list[Node]) -> list[Node]:
    """Those of them that others read."""
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
