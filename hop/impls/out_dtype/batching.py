"""vmap rules of out_dtype: compute a batched call with one call of out_dtype.

Each rule moves the batch into a dimension that another operator has: a batched mm is a bmm, a batched convolution has a
larger batch or more groups, and an elementwise operator takes any shape. Operators without a rule are batched through
their reference, by PyTorch's rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs, tree_leaves
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import CONVOLUTIONS, as_convolution, convolution_arguments
from hop.impls.out_dtype.meaning import call
from hop.impls.out_dtype.promotion import common_dtype

aten = torch.ops.aten

# An argument, and whether its first dimension is the batch.
Arg = tuple[Any, bool]


def batch(
    size: int,
    dims: Sequence[int | None],
    op: OpOverload,
    output_dtype: torch.dtype,
    args: Args,
    kwargs: Kwargs,
) -> tuple[Tensor, int] | None:
    """The batched result and its batch dimension; None without a rule. `dims` is for leaves of (args, kwargs)."""
    is_convolution = op.overloadpacket in CONVOLUTIONS
    rule = _RULES.get(op, _pointwise if torch.Tag.pointwise in op.tags else None)
    if rule is None and not is_convolution:
        return None
    batched: list[Arg] = []
    logical = []
    position = 0
    for arg in args:
        leaves = len(tree_leaves(arg))
        dim = dims[position] if isinstance(arg, Tensor) else None
        if not isinstance(arg, Tensor) and any(d is not None for d in dims[position : position + leaves]):
            return None  # a list of batched tensors
        position += leaves
        batched.append((arg, False) if dim is None else (arg.movedim(dim, 0), True))
        logical.append(arg if dim is None else arg.select(dim, 0) if size else arg.new_empty(_without(arg, dim)))
    if any(d is not None for d in dims[position:]):
        return None
    inner = describe(op)
    common = common_dtype(inner, output_dtype, tuple(logical), kwargs)
    # Zero-dimensional tensors have lower priority in promotion; with the batch dimension they would not.
    batched = [
        (x.to(common), True) if b and x.dim() == 1 and inner.promotes(a.name, x) else (x, b)
        for a, (x, b) in zip(inner.positional, batched, strict=False)
    ]
    if rule is None:
        return _convolution(size, op, output_dtype, batched, tuple(logical))
    return rule(size, op, output_dtype, batched, kwargs)


def _without(x: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(s for i, s in enumerate(x.shape) if i != dim % x.dim())


def _three(args: list[Arg]) -> tuple[Arg, Arg, Arg]:
    """The first three arguments; the third, the bias, may be missing."""
    first, second, third, *_ = *args, (None, False)
    return first, second, third


def _with_batch(size: int, arg: Arg) -> Tensor:
    x, batched = arg
    return x if batched else x.expand(size, *x.shape)


def _split(x: Tensor, dim: int, size: int) -> Tensor:
    """Move the batch from `dim` to the front.

    Tensor.unflatten has no rule under an outer vmap.
    """
    return x.reshape(*x.shape[:dim], size, x.shape[dim] // size if size else 0, *x.shape[dim + 1 :])


def _mm(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: object) -> tuple[Tensor, int]:
    lhs, (rhs, rhs_batched) = args[0][0], args[1]
    if not rhs_batched:
        return _split(call(aten.mm.default, dtype, lhs.flatten(0, 1), rhs), 0, size), 0
    return call(aten.bmm.default, dtype, _with_batch(size, args[0]), rhs), 0


def _bmm(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: object) -> tuple[Tensor, int]:
    lhs, rhs = (_with_batch(size, arg) for arg in args)
    return _split(call(aten.bmm.default, dtype, lhs.flatten(0, 1), rhs.flatten(0, 1)), 0, size), 0


def _addmm(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: Kwargs) -> tuple[Tensor, int]:
    added, lhs, rhs = args
    product = [_with_batch(size, arg) for arg in (lhs, rhs)]
    return call(aten.baddbmm.default, dtype, _align(added, 2), *product, **kwargs), 0


def _baddbmm(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: Kwargs) -> tuple[Tensor, int]:
    lhs, rhs = (_with_batch(size, arg) for arg in args[1:])
    added = _align((_with_batch(size, args[0]), True), 3).expand(size, lhs.shape[1], *[-1] * 2).flatten(0, 1)
    out = call(aten.baddbmm.default, dtype, added, lhs.flatten(0, 1), rhs.flatten(0, 1), **kwargs)
    return _split(out, 0, size), 0


def _matmul(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: object) -> tuple[Tensor, int]:
    """matmul, mv and dot: vectors become matrices of one row or column."""
    (lhs, lhs_batched), (rhs, rhs_batched) = args
    is_row, is_column = lhs.dim() - lhs_batched == 1, rhs.dim() - rhs_batched == 1
    lhs = lhs.unsqueeze(-2) if is_row else lhs
    rhs = rhs.unsqueeze(-1) if is_column else rhs
    rank = max(lhs.dim() - lhs_batched, rhs.dim() - rhs_batched)
    out = call(aten.matmul.default, dtype, _align((lhs, lhs_batched), rank), _align((rhs, rhs_batched), rank))
    out = out.squeeze(-1) if is_column else out
    return (out.squeeze(-1 if is_column else -2) if is_row else out), 0


def _linear(
    size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: object
) -> tuple[Tensor, int] | None:
    (x, x_batched), (weight, weight_batched), (bias, bias_batched) = _three(args)
    if not weight_batched and not bias_batched:
        return call(op, dtype, x, weight, bias), 0
    if weight.dim() - weight_batched != 2:
        return None
    lead = x.shape[x_batched:-1]
    rows = _with_batch(size, (x, x_batched)).reshape(size, -1, x.shape[-1])
    weights = _with_batch(size, (weight, weight_batched)).mT
    if bias is None:
        out = call(aten.bmm.default, dtype, rows, weights)
    else:
        added = bias.unsqueeze(1) if bias_batched else bias
        out = call(aten.baddbmm.default, dtype, added, rows, weights)
    return out.reshape(size, *lead, weights.shape[-1]), 0


def _align(arg: Arg, rank: int) -> Tensor:
    """Insert ones after the batch dimension, so that each member has `rank` dimensions."""
    x, batched = arg
    if not batched:
        return x
    return x.reshape(x.shape[0], *[1] * (rank + 1 - x.dim()), *x.shape[1:])


def _pointwise(size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], kwargs: Kwargs) -> tuple[Tensor, int]:
    rank = max(x.dim() - batched for x, batched in args if isinstance(x, Tensor))
    return call(op, dtype, *(_align(arg, rank) if arg[1] else arg[0] for arg in args), **kwargs), 0


def _convolution(
    size: int, op: OpOverload, dtype: torch.dtype, args: list[Arg], logical: tuple[object, ...]
) -> tuple[Tensor, int] | None:
    form = as_convolution(op, logical)
    if form is None:
        return None
    (x, x_batched), (weight, weight_batched), (bias, bias_batched) = _three(args)
    x = x.unsqueeze(int(x_batched)) if form.unbatched else x
    if not weight_batched and not bias_batched:  # merge the vmap batch into the batch dimension
        conv = form.conv._replace(x=x.flatten(0, 1))
        out = _split(call(aten.convolution.default, dtype, *convolution_arguments(conv, bias)), 0, size)
    else:  # merge the vmap batch into the groups
        x = _with_batch(size, (x, x_batched)).transpose(0, 1).flatten(1, 2)
        weight = _with_batch(size, (weight, weight_batched)).flatten(0, 1)
        bias = None if bias is None else _with_batch(size, (bias, bias_batched)).flatten(0, 1)
        conv = form.conv._replace(x=x, weight=weight, groups=size * form.conv.groups)
        out = call(aten.convolution.default, dtype, *convolution_arguments(conv, bias))
        out = _split(out, 1, size).transpose(0, 1)
    return (out.squeeze(1) if form.unbatched else out), 0


_RULES: dict[OpOverload, Callable[..., tuple[Tensor, int] | None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.matmul.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.linear.default: _linear,
}
