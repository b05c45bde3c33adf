"""Products of DTensors whose summed dimension is sharded, as in a row-parallel linear layer.

Each process multiplies its part of the sum, and the parts are reduced before anything is rounded:

    integers with one scale along the summed dimension    int32 sums: bit for bit the result of one process
    all others                                            sums in the compute dtype, float32 or float64: the result
                                                          of one process except for the order of the sum
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hop.compat import dtensor, process_groups, tracing
from hop.dispatch.operand import Operand, encode
from hop.dispatch.operators import BIAS, LHS, MATRIX, RHS
from hop.impls.scaled.calls import Call, by_sum, compute_dtype, is_integer
from hop.impls.scaled.operands import block_of
from hop.impls.scaled.outputs import requantized
from hop.impls.scaled.products import Sum, aligned, biased, sums, with_bias
from hop.numerics import copies
from hop.tensor.buffers import sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh


def summed_dimensions(call: Call) -> dict[int, int]:
    """The dimension that a matrix product sums over, for each factor by its argument position."""
    if call.roles.family is not MATRIX:
        return {}
    places = {call.roles.role(i): i for i in range(len(call.args))}
    lhs, rhs = places[LHS], places[RHS]
    return {lhs: call.args[lhs].dim() - 1, rhs: call.args[rhs].dim() + call.roles.rhs_sums}


def is_spread(call: Call, axis: int, mesh: "DeviceMesh") -> bool:
    """Whether a factor is sharded along its summed dimension over a mesh axis, and both factors can be."""
    dims = summed_dimensions(call)
    factors = [(call.args[i], d) for i, d in dims.items()]
    codes = [x.tensors[0] if isinstance(x, Operand) else x for x, _ in factors]
    placed = [c.placements[axis].is_shard(d) for c, (_, d) in zip(codes, factors, strict=True) if dtensor.is_dtensor(c)]
    if not any(placed) or tracing.known_equal(factors[0][0].shape[-1], 1):
        return False
    return all(_has_whole_blocks(x, d, mesh.size(axis)) for x, d in factors)


def _has_whole_blocks(x: object, dim: int, size: int) -> bool:
    if not isinstance(x, Operand):
        return True
    return x.usages == (copies.ROWWISE,) and sharding.keeps_blocks(x.quantizer, x.shape, dim, size)


def product(operator: Callable[..., Any], call: Call, local: Call, mesh: "DeviceMesh", axis: int) -> Any:
    """This process's result from its parts `local` of the arguments of `call`.

    A float tensor before it is cast, or the buffers of a result that is quantized from its sum.
    """
    factors = Call(call.roles.product, compute_dtype(call), None, None, (local.find(LHS), local.find(RHS)), {})  # type: ignore[arg-type]
    bias = local.find(BIAS)
    if not _is_one_sum(call):
        y = operator(factors.op, factors.output, None, None, *encode(factors.args))
        return biased(local, process_groups.combined_over(y, "sum", mesh, axis), bias)
    (total,) = sums(factors)
    total = total._replace(total=process_groups.combined_over(total.total, "sum", mesh, axis))
    return requantized(local, with_bias(local, total)) if by_sum(local.output) else _real(local, total, bias)


def _real(call: Call, total: Sum, bias: Tensor | None) -> Tensor:
    if bias is not None and not bias.is_floating_point():
        total, bias = total._replace(total=total.total + aligned(call, bias)), None
    return biased(call, total.real(), bias)


def _is_one_sum(call: Call) -> bool:
    """Whether the factors are integers with one scale along the summed dimension."""
    factors = [(call.args[i], d) for i, d in summed_dimensions(call).items()]
    return all(is_integer(x) and block_of(x, copies.ROWWISE)[d] == -1 for x, d in factors)
