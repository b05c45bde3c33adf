"""out_dtype on DTensors: each process computes its shard with the same kernels and arithmetic.

Placements are those of DTensor's own strategy for the inner operator. A Partial sum does not commute with a cast that
rounds or widens, therefore

* a Partial result is reduced in the dtype it was computed in, and cast afterwards. It stays Partial only without a
cast, or if the cast narrows integers, which preserves sums modulo 2^bits.
"""

import torch
from torch import Tensor

from hop.compat import dtensor
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs, tree_map
from hop.impls.out_dtype import meaning
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import Product, as_convolution, as_product
from hop.impls.out_dtype.meaning import call, reference
from hop.impls.out_dtype.promotion import common_dtype, is_integer, run_dtype

aten = torch.ops.aten


# Collectives cannot sum these dtypes; a wider integer has the same sum, modulo 2^bits.
_REDUCED_IN = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def shard(op: OpOverload, output_dtype: torch.dtype, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute out_dtype with at least one DTensor operand. Returns a DTensor of `output_dtype`."""
    inner = describe(op)
    run = run_dtype(op, common_dtype(inner, output_dtype, args, kwargs))
    args = inner.map_promoted(args, lambda x: _reduce(x, run))
    described = inner.map_promoted(args, lambda x: dtensor.describe_dtensor(x, run) if dtensor.is_dtensor(x) else x)
    sharding = dtensor.propagate_sharding(op, described, kwargs)
    if sharding is None:
        return _without_strategy(op, output_dtype, run, args, kwargs)
    return _local(op, output_dtype, run, args, kwargs, sharding)


def _reduce(x: Tensor, run: torch.dtype) -> Tensor:
    """Reduce a Partial operand that has another dtype."""
    return _replicate_partials(x) if dtensor.is_dtensor(x) and x.dtype != run else x


def _replicate_partials(x: Tensor) -> Tensor:
    if not dtensor.is_dtensor(x):
        return x
    placements = [dtensor.replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements) if placements != list(x.placements) else x


def _commutes(run: torch.dtype, output_dtype: torch.dtype) -> bool:
    """Whether the cast may come before the sum."""
    if output_dtype in _REDUCED_IN:
        return False
    if run == output_dtype:
        return True
    return is_integer(run) and is_integer(output_dtype) and output_dtype.itemsize <= run.itemsize


def _local(
    op: OpOverload,
    output_dtype: torch.dtype,
    run: torch.dtype,
    args: Args,
    kwargs: Kwargs,
    sharding: dtensor.Sharding,
) -> Tensor:
    wanted = iter(sharding.inputs)
    local_args = tree_map(lambda x: dtensor.local_part(x, next(wanted)) if dtensor.is_dtensor(x) else x, args)
    partial = any(p.is_partial() for p in sharding.output)
    summed = all(p.is_partial("sum") for p in sharding.output if p.is_partial())
    cast_first = not partial or (summed and _commutes(run, output_dtype))
    out = call(op, output_dtype if cast_first else _REDUCED_IN.get(run, run), *local_args, **kwargs)
    wrapped = dtensor.make_dtensor(out, sharding)
    return wrapped if cast_first else _replicate_partials(wrapped).to(output_dtype)


def _without_strategy(
    op: OpOverload, output_dtype: torch.dtype, run: torch.dtype, args: Args, kwargs: Kwargs
) -> Tensor:
    """Compute an operator for which DTensor has no strategy.

    Composite products become mm or bmm, convolutions keep a sharded batch, and other operators run their reference on
    the DTensors.
    """
    product = as_product(op, args, kwargs)
    if product is not None:
        return _product(product, output_dtype, run)
    if as_convolution(op, args) is not None and all(dtensor.is_dtensor(x) for x in args[:3] if isinstance(x, Tensor)):
        return _convolution(op, output_dtype, args)
    out = meaning.run(describe(op), run, args, kwargs)
    return (out if _commutes(run, output_dtype) else _replicate_partials(out)).to(output_dtype)


def _product(product: Product, output_dtype: torch.dtype, run: torch.dtype) -> Tensor:
    multiply = aten.mm.default if product.lhs.dim() == 2 else aten.bmm.default
    out = call(multiply, output_dtype if product.added is None else run, product.lhs, product.rhs)
    if product.added is not None:
        out = _replicate_partials(out)
    return product.complete(out).to(output_dtype)


def _convolution(op: OpOverload, output_dtype: torch.dtype, args: Args) -> Tensor:
    """Convolve whole examples in each process, with the weight replicated."""
    x, weight = args[:2]
    everywhere = [dtensor.replicate()] * x.device_mesh.ndim
    batched = x.dim() == weight.dim()
    placed = [p if batched and p.is_shard(0) else r for p, r in zip(x.placements, everywhere, strict=True)]
    local_x = dtensor.local_part(x, placed)
    rest = [dtensor.local_part(a, everywhere) if dtensor.is_dtensor(a) else a for a in args[1:]]
    whole = [a.to("meta") if isinstance(a, Tensor) else a for a in rest]
    result = reference(op, output_dtype, torch.empty(x.shape, dtype=x.dtype, device="meta"), *whole)
    sharding = dtensor.Sharding([], x.device_mesh, placed, result.shape, result.stride())
    return dtensor.make_dtensor(call(op, output_dtype, local_x, *rest), sharding)
