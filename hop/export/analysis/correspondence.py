"""Which nodes of two programs correspond."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from hop.export.analysis import provenance
from hop.export.rewrite.program import value
from hop.tensor import QuantizedTensor


def pairs_of(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """The nodes that correspond, in the order of `a`."""
    is_older = provenance.depth(a) <= provenance.depth(b)
    pairs = _descended(a, b) if is_older else [(x, y) for y, x in _descended(b, a)]
    for of_a, of_b in provenance.relatives(a, b):
        used = {node for pair in pairs for node in pair}
        fits = [(x, y) for x in of_a for y in of_b if not {x, y} & used and _fit(x, y, same_dtype=True)]
        times = Counter(node for pair in fits for node in pair)
        pairs += [(x, y) for x, y in fits if times[x] == times[y] == 1]
    order = {node: i for i, node in enumerate(a.nodes)}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def _descended(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """Nodes of `a`, and what they are in `b`, which is as far from the first program, or farther."""
    result = []
    for node, group in provenance.descendants(a, b):
        if len(group) == 1 and _fit(node, group[0], same_dtype=False):
            result.append((node, group[0]))
        elif len(group) > 1:
            fitting = [other for other in provenance.results(group) if _fit(node, other, same_dtype=True)]
            result += [(node, other) for other in fitting if len(fitting) == 1]
    return result


def lone_calls(graph: Graph, used: list[Any]) -> int:
    """How many calls with a tensor as value are none of those."""
    calls = {node for node in graph.nodes if node.op == "call_function" and kind(value(node)) is not None}
    return len(calls.difference(used))


def _fit(a: Node, b: Node, *, same_dtype: bool) -> bool:
    """Whether the values of two nodes can be compared, as far as the graphs say: they are of one kind and shape."""
    x, y = value(a), value(b)
    if kind(x) is None or kind(y) is None:
        return False
    if (kind(x) == "quantized") != (kind(y) == "quantized"):
        x, y = held(x), held(y)
    return kind(x) == kind(y) and not (same_dtype and x.dtype != y.dtype) and same_shape(x, y)


def same_shape(x: Any, y: Any) -> bool:
    """Whether two tensors have one shape, as far as their sizes are known."""
    if len(x.shape) != len(y.shape):
        return False
    sizes = zip(x.shape, y.shape, strict=True)
    return all(not (isinstance(m, int) and isinstance(n, int)) or m == n for m, n in sizes)


def kind(x: Any) -> str | None:
    """Of a tensor; None for what is none."""
    if not isinstance(x, Tensor):
        return None
    if isinstance(x, QuantizedTensor):
        return "quantized"
    if x.dtype in (torch.bool, torch.uint64):  # which int64 does not hold
        return str(x.dtype)
    return "float" if x.is_floating_point() or x.is_complex() else "integer"


def parts_of(node: Any) -> list[tuple[Any, str | None]]:
    """A node, and each buffer of it, if its value is quantized."""
    x = value(node) if isinstance(node, Node) else None
    return [(node, name) for name in x.buffers()] if isinstance(x, QuantizedTensor) else [(node, None)]


def held(x: Any) -> Any:
    return x.codes if isinstance(x, QuantizedTensor) else x
