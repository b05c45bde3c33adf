"""Bounds of integers in a program that is traced, from the operators that computed them.

Codes of 8 bits minus their zero point are 9 bits of an int16, and codes of 4 bits are unpacked into an int8: float32
holds sums of more of their products than the dtypes allow (hop.kernels.aten.integer).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from hop.compat.eager import OpOverload, node_in_trace
from hop.compat.pytree import Args

aten = torch.ops.aten
Bounds = tuple[int, int]

DEEPEST = 24
"""Operators between an integer and the node that gives its bounds."""

# What gives some of the integers of its first operand, in another shape.
_SAME = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.t.default),
        *(aten.transpose.int, aten.slice.Tensor, aten.select.int, aten.expand.default, aten.clone.default),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten._to_copy.default),
        *(aten.as_strided.default, aten.index_select.default, aten.gather.default, aten.alias.default),
    }
)


def largest(x: Tensor) -> int:
    """The largest magnitude that an element of x, an integer tensor, can have."""
    node = node_in_trace(x)
    low, high = _of_dtype(x.dtype) if node is None else _bounds(node, DEEPEST)
    return max(-low, high)


def _of_dtype(dtype: torch.dtype) -> Bounds:
    info = torch.iinfo(dtype)
    return info.min, info.max


def _bounds(x: object, depth: int) -> Bounds:
    """The bounds of a node or a number. Raises ValueError if even the dtype is unknown."""
    if isinstance(x, int) or (isinstance(x, float) and x.is_integer()):
        return int(x), int(x)
    if not isinstance(x, Node):
        raise ValueError
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise ValueError
    widest = _of_dtype(value.dtype)
    if depth == 0 or not isinstance(x.target, OpOverload) or any(map(_may_write, x.users)):
        return widest
    try:
        low, high = _computed(x.target, x.args, x.kwargs, depth - 1)
    except ValueError:
        return widest
    return (low, high) if widest[0] <= low and high <= widest[1] else widest  # beyond, integers wrap


def _may_write(user: Node) -> bool:
    return isinstance(user.target, OpOverload) and user.target._schema.is_mutable


def _computed(op: OpOverload, args: Args, kwargs: Mapping[str, object], depth: int) -> Bounds:
    """The bounds of an operator's result before it wraps. Raises ValueError for unknown operators."""
    if op in _SAME:
        return _bounds(args[0], depth)
    if op in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar) and len(args) == 2 and not kwargs:
        (a, b), (c, d) = (_bounds(x, depth) for x in args)
        return (a + c, b + d) if op in (aten.add.Tensor, aten.add.Scalar) else (a - d, b - c)
    if op in (aten.remainder.Scalar, aten.bitwise_and.Scalar) and isinstance(args[1], int) and args[1] > 0:
        return 0, args[1] - (op is aten.remainder.Scalar)
    if op is aten.where.self:
        return _union(args[1:], depth)
    if op is aten.cat.default:
        return _union(args[0], depth)
    if op is aten.constant_pad_nd.default:
        return _union((args[0], args[2] if len(args) > 2 else 0), depth)
    raise ValueError


def _union(parts: Sequence[object], depth: int) -> Bounds:
    lows, highs = zip(*(_bounds(part, depth) for part in parts), strict=True)
    return min(lows), max(highs)
