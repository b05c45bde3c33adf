"""out_dtype on DTensors: each process computes its part with the same kernels, in the same arithmetic.

Placements are those that DTensor's own strategy for the inner operator chooses. A sum that is still spread over
processes (Partial) does not commute with a cast that rounds or widens, so

* a Partial operand is reduced before it is promoted, unless it has the common dtype already;
* a Partial result is left as it is, or reduced in the dtype it was computed in and cast afterwards, unless the cast
  between integers, which keeps sums modulo 2^bits, narrows it.
"""

from typing import Any

import torch
from torch import Tensor

from hop import _compile
from hop._compile import OpOverload
from hop.impls.out_dtype import meaning
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import as_product
from hop.impls.out_dtype.promotion import common_dtype, is_integer

aten = torch.ops.aten


def shard(op: OpOverload, output_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """out_dtype for operands of which at least one is a DTensor: a DTensor of `output_dtype`."""
    common = common_dtype(describe(op), output_dtype, args, kwargs)
    args = tuple(_reduce(x, common) for x in args)
    sharding = _compile.propagate_sharding(op, args, kwargs, common)
    if sharding is None:
        return _without_strategy(op, output_dtype, common, args, kwargs)
    return _local(op, output_dtype, common, args, kwargs, sharding)


def _reduce(x: Any, common: torch.dtype) -> Any:
    """A Partial operand of another dtype, summed up."""
    if not _compile.is_dtensor(x) or x.dtype == common:
        return x
    return _replicate_partials(x)


def _replicate_partials(x: Any) -> Any:
    placements = [_compile.replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements) if placements != list(x.placements) else x


def _commutes(common: torch.dtype, output_dtype: torch.dtype) -> bool:
    """Whether summing and casting may change places."""
    if common == output_dtype:
        return True
    return is_integer(common) and is_integer(output_dtype) and output_dtype.itemsize <= common.itemsize


def _local(
    op: OpOverload, output_dtype: torch.dtype, common: torch.dtype, args: Any, kwargs: Any, sharding: _compile.Sharding
) -> Tensor:
    from hop.impls.out_dtype import operator

    local_args = tuple(
        x.redistribute(placements=wanted).to_local() if wanted is not None and _compile.is_dtensor(x) else x
        for x, wanted in zip(args, sharding.inputs, strict=True)
    )
    partial = any(p.is_partial() for p in sharding.output)
    summed = all(p.is_partial("sum") for p in sharding.output if p.is_partial())
    cast_first = not partial or (summed and _commutes(common, output_dtype))
    out = operator(op, output_dtype if cast_first else common, *local_args, **kwargs)
    wrapped = _compile.make_dtensor(out, sharding)
    return wrapped if cast_first else _replicate_partials(wrapped).to(output_dtype)


def _without_strategy(op: OpOverload, output_dtype: torch.dtype, common: torch.dtype, args: Any, kwargs: Any) -> Tensor:
    """Composite products become mm or bmm; anything else runs its reference on the DTensors."""
    from hop.impls.out_dtype import operator

    product = as_product(op, args, kwargs)
    if product is None:
        inner_args, inner_kwargs = describe(op).cast(args, kwargs, meaning.run_dtype(op, common, args))
        out = op(*inner_args, **inner_kwargs)
        if not _commutes(common, output_dtype):
            out = _replicate_partials(out)
        return out.to(output_dtype)
    multiply = aten.mm.default if product.lhs.dim() == 2 else aten.bmm.default
    out = operator(multiply, common if product.added is not None else output_dtype, product.lhs, product.rhs)
    if product.added is not None:
        out = _replicate_partials(out)
    return product.finish(out).to(output_dtype)
