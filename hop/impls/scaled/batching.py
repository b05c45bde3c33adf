"""scaled under vmap: merge a batched left factor into a product's leading dimensions, else run member by member."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hop.compat import functorch
from hop.compat.pytree import Args, tree_flatten, tree_unflatten
from hop.dispatch.operators import LHS, TABLE, aten
from hop.impls.scaled.gradient import is_quantized
from hop.numerics import blocks, copies
from hop.tensor import QuantizedTensor


def batch(
    operator: Callable[..., Tensor],
    size: int,
    dims: Sequence[int | None],
    args: Args,
    kwargs: Mapping[str, object],
) -> tuple[Tensor, int]:
    """The batched result and its batch dimension. `dims` is for the leaves of (args, kwargs)."""
    leaves, spec = tree_flatten((args, kwargs))
    batched = [i for i, dim in enumerate(dims) if dim is not None]
    op, output, *_, lhs = args[:5]
    at = 4 + TABLE[op].roles.index(LHS) if LHS in TABLE[op].roles else None
    if isinstance(output, torch.dtype) and batched == [at] and op in _LEADING and lhs.dim() > 2:
        moved = lhs.movedim(dims[at], 0)  # type: ignore[index]
        if is_quantized(moved) == is_quantized(lhs):
            return operator(_LEADING[op], *args[1:4], moved, *args[5:], **kwargs), 0
    members = []
    for i in range(size):
        inner = [x if dim is None else _member(x, dim, i) for x, dim in zip(leaves, dims, strict=True)]
        inner_args, inner_kwargs = tree_unflatten(inner, spec)
        members.append(operator(*inner_args, **inner_kwargs))
    if not members:
        raise NotImplementedError(f"scaled: a batch of no members has no result under vmap ({op})")
    return _stacked(members), 0


# Operators whose first factor may have more leading dimensions, and the operator to use then.
_LEADING = {aten.mm.default: aten.matmul.default, aten.linear.default: aten.linear.default}


def _member(x: Tensor, dim: int, i: int) -> Tensor:
    part = x.select(dim, i)
    if is_quantized(x) and not is_quantized(part):
        quantizer = getattr(functorch.innermost(x), "quantizer", None)
        raise NotImplementedError(
            f"scaled: under vmap, {quantizer} shares blocks between the members of the batch; batch over dimensions "
            "that its blocks do not span"
        )
    return part


def _stacked(members: list[Tensor]) -> Tensor:
    first = members[0]
    if not isinstance(first, QuantizedTensor):
        if is_quantized(first):
            raise NotImplementedError("scaled: under vmap within another transform, take a dtype as output")
        return torch.stack(members)
    q = first.quantizer
    whole = replace(q, block=(1, *blocks.per_dimension(q.block, first.dim())))
    parts = [m.buffers() for m in members if isinstance(m, QuantizedTensor)]  # all of them
    buffers = {name: torch.stack([part[name] for part in parts]) for name in first.buffers()}
    shape = (len(members), *first.shape)
    copies.check(copies.describe(whole, shape, (copies.ROWWISE,)), list(buffers.values()))
    return QuantizedTensor.fitting(buffers, whole, shape, first.dtype)
