"""The consumers of an operator's result: nodes that quantize it, and nodes that scale it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from hop.compat.tracing import known_equal
from hop.dispatch.operators import BOUND, VIEW, aten, of
from hop.export.rewrite import encodings
from hop.export.rewrite.encodings import FORMATS, Encoding
from hop.export.rewrite.program import value


class Consumer(NamedTuple):
    """A node that quantizes an operator's result, and the clamps and views in between."""

    node: Node
    encoding: Encoding
    low: float | None
    high: float | None
    views: tuple[Node, ...]


def quantizing_consumers(node: Node) -> list[Consumer] | None:
    """The nodes that quantize the result of a node, or None if it is also used otherwise."""
    consumers: list[Consumer] = []

    def follow(at: Node, low: float | None, high: float | None, views: tuple[Node, ...]) -> bool:
        if not at.users:
            return False
        for user in at.users:
            e, family = encodings.quantizing(user), of(user.target).family
            if e is not None and e.tensor is at and at not in (e.scale, e.zero_point):
                if e.codes not in FORMATS or (views and any(b != -1 for b in e.block)):
                    return False
                consumers.append(Consumer(user, e, low, high, views))
            elif family is BOUND and (bounds := bounds_of(user)):
                if not follow(user, *_composed(low, high, *bounds), views):
                    return False
            elif not (family is VIEW and user.args[0] is at and follow(user, low, high, (*views, user))):
                return False
        return True

    bounds = bounds_of(node) if of(node.target).family is BOUND else (None, None)
    return consumers if follow(node, None, None, ()) and bounds else None


def bounds_of(node: Node) -> tuple[float | None, float | None] | None:
    """The range of a relu or clamp; None if its bounds are not numbers."""
    (_, *arguments), given = node.target._schema.arguments, node.args[1:]  # type: ignore[union-attr]
    if not arguments:
        return of(node.target).bounds
    low, high = (*given, *(node.kwargs.get(a.name, a.default_value) for a in arguments[len(given) :]))
    if any(x is not None and not isinstance(x, int | float) for x in (low, high)):
        return None
    if low is not None and high is not None and low > high:  # type: ignore[operator]
        return None
    return low, high  # type: ignore[return-value]


def _composed(
    low: float | None, high: float | None, then_low: float | None, then_high: float | None
) -> tuple[float | None, float | None]:
    """The range of two clamps in sequence."""

    def clamped(x: float | None, missing: float | None) -> float | None:
        if x is None:
            return missing
        x = x if then_low is None else max(x, then_low)
        return x if then_high is None else min(x, then_high)

    return clamped(low, then_low), clamped(high, then_high)


def factors(node: Node, has_rows: bool) -> tuple[Node, Any, Any]:
    """The last node that scales a product, and the scales of its rows and columns."""
    shape = value(node).shape
    last, rows, columns = node, None, None
    while len(last.users) == 1:
        (user,) = last.users
        if user.target is aten._to_copy.default and value(user).dtype == torch.float32:
            last = user
            continue
        if user.target is not aten.mul.Tensor or value(user).dtype != torch.float32:
            break
        other = user.args[1] if user.args[0] is last else user.args[0]
        if not isinstance(other, Node) or other is last or value(other).dtype not in (torch.float32, torch.bfloat16):
            break
        size = value(other).shape
        if has_rows and rows is None and len(size) == len(shape) and _same(size, (*shape[:-1], 1)):
            rows = other
        elif columns is None and (_same(size, shape[-1:]) or _same(size, (1, shape[-1]))):
            columns = other
        else:
            break
        last = user
    return last, rows, columns


def _same(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and all(known_equal(m, n) for m, n in zip(a, b, strict=True))
