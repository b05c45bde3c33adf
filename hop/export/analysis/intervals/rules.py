"""The rule of each operator: a table for integers, and one function for floats."""

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hop.dispatch.operators import ADD, BOUND, DIVIDE, MULTIPLY, TABLE, aten, of, within
from hop.export.analysis.intervals import elements, sums
from hop.export.analysis.intervals.values import Integers, Known, Reals, bounds, dtype_range, integers, reals


def cast_rule(node: Node, x: object, **kwargs: object) -> Integers:
    dtype = node.meta["val"].dtype
    result = bounds(x)
    low, high = dtype_range(dtype)
    if dtype == torch.bool:
        return integers(low, high)
    if isinstance(result, Integers):
        return result
    if result.nan or not (low <= result.low and result.high <= high):
        return integers(low, high)  # values outside the dtype may become any of its values
    return integers(math.trunc(result.low), math.trunc(result.high))


MOVES = frozenset(op for op, row in TABLE.items() if row.family.moves)
_CHOOSE = (
    *(aten.gather.default, aten.index.Tensor, aten.embedding.default, aten.amax.default, aten.amin.default),
    *(aten.as_strided.default,),
)
UNFILLED = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
)
FILLED = frozenset({aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default})

RULES: dict[object, Callable[..., object]] = {
    aten.add.Tensor: elements.add_rule,
    aten.add.Scalar: elements.add_rule,
    aten.sub.Tensor: elements.sub_rule,
    aten.sub.Scalar: elements.sub_rule,
    aten.mul.Tensor: elements.mul_rule,
    aten.mul.Scalar: elements.mul_rule,
    aten.neg.default: elements.neg_rule,
    aten.abs.default: elements.abs_rule,
    aten.div.Tensor_mode: elements.floor_divide_rule,
    aten.remainder.Tensor: elements.remainder_rule,
    aten.remainder.Scalar: elements.remainder_rule,
    aten.bitwise_and.Tensor: elements.bitwise_and_rule,
    aten.bitwise_and.Scalar: elements.bitwise_and_rule,
    aten.clamp.default: elements.clamp_rule,
    aten.clamp.Tensor: elements.clamp_rule,
    aten.maximum.default: elements.maximum_rule,
    aten.minimum.default: elements.minimum_rule,
    aten.relu.default: elements.relu_rule,
    aten.where.self: elements.where_rule,
    **dict.fromkeys(MOVES, elements.chosen_rule),
    **dict.fromkeys(_CHOOSE, elements.hull_of_rule),
    aten.max_pool2d_with_indices.default: elements.hull_and_index_rule,
    aten.max_pool3d_with_indices.default: elements.hull_and_index_rule,
    aten.max.dim: elements.hull_and_index_rule,
    aten.min.dim: elements.hull_and_index_rule,
    aten.constant_pad_nd.default: elements.padded_rule,
    aten.sum.dim_IntList: sums.sum_rule,
    aten.sum.default: sums.sum_rule,
    aten.mm.default: sums.matmul_rule,
    aten._int_mm.default: sums.matmul_rule,
    aten.bmm.default: sums.matmul_rule,
    aten.addmm.default: sums.addmm_rule,
    aten.baddbmm.default: sums.addmm_rule,
    aten.convolution.default: sums.convolution_rule,
    aten._to_copy.default: cast_rule,
}
PRODUCTS = frozenset(op for op, rule in RULES.items() if rule.__module__ == sums.__name__)


# ---- floats


def float_rule(node: Node, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Reals:
    """The bounds of a node whose value is floats."""
    target = node.target
    if target in MOVES or target in _CHOOSE:
        given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        ranges = [reals(x) for x in given]
        return Reals(min(r.low for r in ranges), max(r.high for r in ranges), any(r.nan for r in ranges))
    if target is aten.where.self:
        a, b = reals(args[1]), reals(args[2])
        if _tests_for_nan(node):
            a = Reals(a.low, a.high, nan=False)
        return Reals(min(a.low, b.low), max(a.high, b.high), a.nan or b.nan)
    if target not in _MONOTONE:
        return Reals()
    operands = [reals(x) for x in args if not isinstance(x, type(None))]
    if target in _FACTORS and (kwargs or any(math.isinf(e) for r in operands for e in (r.low, r.high))):
        return Reals()  # zero times infinity
    if of(target).family is DIVIDE and operands[1].low <= 0 <= operands[1].high:
        return Reals()
    places = [i for i, (n, x) in enumerate(zip(node.args, args, strict=False)) if isinstance(n, Node)]
    limits = []
    for corner in product(*(_ends(node.args[i], args[i]) for i in places)):
        given = [x.value if isinstance(x, Known) else x for x in args]
        for i, end in zip(places, corner, strict=True):
            given[i] = end
        limits.append(target(*given, **kwargs).to(torch.float64).item())  # type: ignore[operator]
    if any(map(math.isnan, limits)):
        return Reals()
    return Reals(min(limits), max(limits), any(r.nan for r in operands))


def _ends(operand: Any, x: object) -> list[Tensor]:
    """The bounds of an operand as tensors of one element: 0-d if the operand is, otherwise 1-d, in its dtype."""
    like, interval = operand.meta["val"], bounds(x)
    limits = interval.hull() if isinstance(interval, Integers) else (interval.low, interval.high)
    return [torch.full([1] * min(like.dim(), 1), end, dtype=like.dtype) for end in limits]


def _tests_for_nan(node: Node) -> bool:
    """Whether a node is where(x == x, x, ...)."""
    condition, x = node.args[:2]
    return isinstance(condition, Node) and condition.target is aten.eq.Tensor and condition.args[:2] == (x, x)


_FACTORS = within(MULTIPLY, DIVIDE)
_MONOTONE = within(MULTIPLY, DIVIDE, ADD, BOUND) | {  # in each operand
    *(aten.neg.default, aten.round.default, aten.floor.default, aten.ceil.default),
    *(aten.trunc.default, aten.clamp.Tensor, aten.maximum.default, aten.minimum.default),
    *(aten._to_copy.default, aten.log2.default),
}
