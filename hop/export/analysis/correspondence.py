"""Find the corresponding nodes of two programs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from hop.export.analysis import provenance
from hop.export.rewrite.program import value
from hop.tensor import QuantizedTensor


def corresponding_nodes(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """The pairs of corresponding nodes, in the order of `a`."""
    is_older = provenance.depth(a) <= provenance.depth(b)
    pairs = _descended(a, b) if is_older else [(x, y) for y, x in _descended(b, a)]
    for nodes_a, nodes_b in provenance.relatives(a, b):
        used = {node for pair in pairs for node in pair}
        fits = [(x, y) for x in nodes_a for y in nodes_b if not {x, y} & used and _fit(x, y, same_dtype=True)]
        times = Counter(node for pair in fits for node in pair)
        pairs += [(x, y) for x, y in fits if times[x] == times[y] == 1]
    order = {node: i for i, node in enumerate(a.nodes)}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def _descended(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """Nodes of `a`, each with the node that replaced it in `b`, a later version of the program."""
    result = []
    for node, group in provenance.descendants(a, b):
        if len(group) == 1 and _fit(node, group[0], same_dtype=False):
            result.append((node, group[0]))
        elif len(group) > 1:
            fitting = [other for other in provenance.results(group) if _fit(node, other, same_dtype=True)]
            result += [(node, other) for other in fitting if len(fitting) == 1]
    return result


def lone_calls(graph: Graph, used: Sequence[object]) -> int:
    """The number of calls with a tensor result that are not in `used`."""
    calls = {node for node in graph.nodes if node.op == "call_function" and kind(value(node)) is not None}
    return len(calls.difference(used))


def _fit(a: Node, b: Node, *, same_dtype: bool) -> bool:
    """Whether two nodes have comparable values: the same kind and, as far as known, shape."""
    x, y = value(a), value(b)
    if kind(x) is None or kind(y) is None:
        return False
    if (kind(x) == "quantized") != (kind(y) == "quantized"):
        x, y = codes_or_self(x), codes_or_self(y)
    return kind(x) == kind(y) and not (same_dtype and x.dtype != y.dtype) and same_shape(x, y)


def same_shape(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape, as far as their sizes are known."""
    if len(x.shape) != len(y.shape):
        return False
    sizes = zip(x.shape, y.shape, strict=True)
    return all(not (isinstance(m, int) and isinstance(n, int)) or m == n for m, n in sizes)


def kind(x: object) -> str | None:
    """ "quantized", "float", "integer", or the dtype's name for bool and uint64; None if `x` is not a tensor."""
    if not isinstance(x, Tensor):
        return None
    if isinstance(x, QuantizedTensor):
        return "quantized"
    if x.dtype in (torch.bool, torch.uint64):  # uint64 does not fit int64
        return str(x.dtype)
    return "float" if x.is_floating_point() or x.is_complex() else "integer"


def parts_of(node: object) -> list[tuple[object, str | None]]:
    """The node with each of its buffers if its value is quantized, else the node with None."""
    x = value(node) if isinstance(node, Node) else None
    return [(node, name) for name in x.buffers()] if isinstance(x, QuantizedTensor) else [(node, None)]


def codes_or_self(x: object) -> Any:
    return x.codes if isinstance(x, QuantizedTensor) else x
