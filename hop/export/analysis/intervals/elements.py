"""Bounds of element-wise operators, and of operators that move or select elements."""

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from hop.compat import tracing
from hop.compat.pytree import tree_leaves, tree_map
from hop.export.analysis.intervals.values import (
    FEW,
    Integers,
    Known,
    Sum,
    Unknown,
    bounds,
    constant,
    dtype_bounds,
    fits,
    integer_bounds,
    integers,
    interval,
    is_integer,
    single_interval,
    static_shape,
)

aten = torch.ops.aten
_N = TypeVar("_N", int, Tensor)
_KEEP_LAST = frozenset({aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.expand.default})


def elementwise(corners: Callable[..., list[Any]], *operands: object) -> Sum:
    """Bounds of an operator that is extreme where its operands are: `corners(*intervals)` computes it there."""
    given = [integer_bounds(x) for x in operands]
    known = " and ".join(interval(*x.hull()) for x in given)
    limits = corners(*(x.hull() for x in given))
    low, high = min(limits), max(limits)
    if not fits(*limits):
        return Sum(low, high, None, known)
    shape = torch.broadcast_shapes(*(t.shape for x in given for t in (x.low, x.high)))
    if math.prod(shape) > max(FEW, *(x.low.numel() for x in given)):
        return Sum(low, high, integers(low, high), known)
    values = torch.broadcast_tensors(*(torch.as_tensor(t) for t in corners(*((x.low, x.high) for x in given))))
    parts = Integers(*(_extreme(values, f) for f in (torch.minimum, torch.maximum)))
    return Sum(*parts.hull(), parts, known)


def _extreme(tensors: Iterable[Tensor], function: Callable[..., Tensor]) -> Tensor:
    first, *rest = tensors
    for t in rest:
        first = function(first, t)
    return first


def products(a: tuple[_N, _N], b: tuple[_N, _N]) -> list[_N]:
    return [x * y for x, y in product(a, b)]


def multiply(x: object, by: object) -> object:
    if by == 1:
        return x
    if not isinstance(by, int):
        raise Unknown(f"a factor of {by}")
    result = elementwise(products, x, by)
    if result.parts is None:
        raise Unknown(f"{by} times an operand exceeds 64 bits")
    return result.parts


def add_rule(node: Node, a: object, b: object, alpha: object = 1) -> Sum:
    return elementwise(lambda x, y: [x[0] + y[0], x[1] + y[1]], a, multiply(b, alpha))


def sub_rule(node: Node, a: object, b: object, alpha: object = 1) -> Sum:
    return elementwise(lambda x, y: [x[0] - y[1], x[1] - y[0]], a, multiply(b, alpha))


def divisor_of_remainder(node: Node) -> Argument:
    """n if a node is x - floor(x / n) * n, otherwise None.

    Interval arithmetic on the subtraction would give far wider bounds than 0 to n - 1.
    """
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x, taken = node.args
    if not (isinstance(taken, Node) and taken.target is aten.mul.Tensor):
        return None
    for quotient, by in (taken.args, taken.args[::-1]):
        floor = isinstance(quotient, Node) and quotient.target is aten.div.Tensor_mode
        if floor and quotient.kwargs == {"rounding_mode": "floor"} and quotient.args == (x, by):  # type: ignore[union-attr]
            return by
    return None


def remainder(by: object) -> Integers | None:
    """Bounds of a remainder by an integer; None if that may be 0 or negative."""
    divisor = bounds(by)
    if not isinstance(divisor, Integers) or divisor.hull()[0] <= 0:
        return None
    return Integers(torch.zeros_like(divisor.high), divisor.high - 1)


def mul_rule(node: Node, a: object, b: object) -> Sum:
    if node.args[0] is node.args[1]:  # a square
        low, high = integer_bounds(a).hull()
        limits = [low * low, high * high] + ([0] if low < 0 < high else [])
        return Sum(min(limits), max(limits), None, f"the square of {interval(low, high)}")
    return elementwise(products, a, b)


def neg_rule(node: Node, a: object) -> Sum:
    return elementwise(lambda x: [-x[0], -x[1]], a)


def abs_rule(node: Node, a: object) -> Sum:
    low, high = integer_bounds(a).hull()
    limits = [abs(low), abs(high)]
    return Sum(0 if low <= 0 <= high else min(limits), max(limits), None, interval(low, high))


def floor_divide_rule(node: Node, a: object, b: object, rounding_mode: str | None = None) -> Sum:
    divisor = integer_bounds(b)
    low, high = divisor.hull()
    if rounding_mode not in ("floor", "trunc") or low <= 0 <= high:
        raise Unknown("a quotient by a number that may be 0" if low <= 0 <= high else f"rounding {rounding_mode}")

    def quotient(x: int | Tensor, y: int | Tensor) -> int | Tensor:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return torch.div(x, y, rounding_mode=rounding_mode)
        down = x // y
        return down + 1 if rounding_mode == "trunc" and down < 0 and down * y != x else down

    return elementwise(lambda x, y: [quotient(*limits) for limits in product(x, y)], a, divisor)


def remainder_rule(node: Node, a: object, b: object) -> Integers:
    result = remainder(b)
    if result is None:
        raise Unknown("a remainder by a number that may not be positive")
    return result


def bitwise_and_rule(node: Node, a: object, b: object) -> Integers:
    limits = [x.hull() for x in (integer_bounds(a), integer_bounds(b))]
    positive = [high for low, high in limits if low >= 0]
    if not positive:
        raise Unknown("bits of two numbers that may be negative")
    return integers(0, min(positive))


def clamp_rule(node: Node, x: object, low: object = None, high: object = None) -> Integers:
    result = integer_bounds(x)
    for limit, function in ((low, torch.maximum), (high, torch.minimum)):
        if limit is not None:
            result = _limited(result, integer_bounds(limit), function)
    return result


def _limited(a: Integers, b: Integers, function: Callable[..., Tensor]) -> Integers:
    if math.prod(torch.broadcast_shapes(a.low.shape, b.low.shape, a.high.shape, b.high.shape)) > max(
        FEW, a.low.numel(), b.low.numel()
    ):
        a, b = single_interval(a), single_interval(b)
    return Integers(function(a.low, b.low), function(a.high, b.high))


def maximum_rule(node: Node, a: object, b: object) -> Integers:
    return _limited(integer_bounds(a), integer_bounds(b), torch.maximum)


def minimum_rule(node: Node, a: object, b: object) -> Integers:
    return _limited(integer_bounds(a), integer_bounds(b), torch.minimum)


def relu_rule(node: Node, x: object) -> Integers:
    return _limited(integer_bounds(x), integers(0, 0), torch.maximum)


def where_rule(node: Node, condition: object, a: object, b: object) -> Integers:
    x, y, known = integer_bounds(a), integer_bounds(b), constant(condition)
    if known is not None and known.numel() and (known.all() or not known.any()):
        return x if known.all() else y
    return Integers(_limited(x, y, torch.minimum).low, _limited(x, y, torch.maximum).high)


# ---- operators that move or select elements


def chosen_rule(node: Node, x: object, *rest: object, **kwargs: object) -> Integers:
    """Bounds of an operator whose results are elements of x."""
    given = list(map(integer_bounds, x)) if isinstance(x, list | tuple) else [integer_bounds(x)]
    if all(g.is_single() for g in given) and len({g.hull() for g in given}) == 1:
        return single_interval(given[0])
    first = node.args[0]
    nodes: Any = first if isinstance(first, list | tuple) else [first]
    shapes = [shape for n in nodes if (shape := static_shape(n.meta["val"].shape)) is not None]
    others = tree_leaves((rest, kwargs))
    if len(shapes) == len(given) and all(math.prod(s) <= FEW for s in shapes) and all(_is_plain(o) for o in others):

        def moved(tensors: list[Tensor]) -> Tensor:
            spread = [t.expand(s) for t, s in zip(tensors, shapes, strict=True)]
            operand = spread if isinstance(first, list | tuple) else spread[0]
            given_rest = tree_map(lambda o: o.value if isinstance(o, Known) else o, (rest, kwargs))
            # A view of the tensor may be impossible for its bounds, whose strides differ.
            op: Any = aten.reshape.default if node.target is aten.view.default else node.target
            return op(operand, *given_rest[0], **given_rest[1])

        return Integers(moved([g.low for g in given]), moved([g.high for g in given]))
    if node.target in _KEEP_LAST and given[0].low.dim() <= 1 and given[0].high.dim() <= 1:
        sizes = (first.meta["val"].shape[-1:], node.meta["val"].shape[-1:])  # type: ignore[union-attr]
        if len(sizes[1]) == 1 and tracing.known_equal(sizes[0][0], sizes[1][0]):
            return given[0]
    hulls = [g.hull() for g in given]
    return integers(min(h[0] for h in hulls), max(h[1] for h in hulls))


def _is_plain(x: object) -> bool:
    numbers = bool | int | float | None
    return isinstance(x, Known | numbers | torch.dtype | torch.memory_format | torch.layout | torch.device)


def hull_of_rule(node: Node, x: object, *rest: object, **kwargs: object) -> Integers:
    return single_interval(integer_bounds(x))


def hull_and_index_rule(node: Node, x: object, *rest: object, **kwargs: object) -> tuple[object, ...]:
    value = node.meta["val"]
    interval_of = single_interval(integer_bounds(x)) if is_integer(value[0].dtype) else bounds(x)
    return (interval_of, *(dtype_bounds(v) for v in value[1:]))


def padded_rule(node: Node, x: object, pad: object, value: object = 0) -> Integers:
    (low, high), (a, b) = integer_bounds(x).hull(), integer_bounds(value).hull()
    return integers(min(low, a), max(high, b))
