"""Sums, running sums and Euclidean norms, in fixed point (hop.numerics.row_sums): exact integers, whose order is free.

    sum, cumsum             float32(Σ x)
    linalg_vector_norm      float32(sqrt(Σ x²))

Of integers with one scale for all that is added, the sum of `code - zero` is exact, and the scale multiplies it once.
In float64 they are ATen's.
"""

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operators import LENGTH, SUM, aten
from hop.impls.scaled.calls import Call, compute_dtype, is_integer, keeps_dims, values
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.operands import centered, plain, spread
from hop.numerics import copies, functions, row_sums


def _dims(call: Call, position: int = 1) -> list[int]:
    ndim = call.args[0].dim()
    given = call.args[position] if len(call.args) > position else call.kwargs.get("dim")
    if call.op is aten.sum.default or given is None or given == []:
        return list(range(ndim))
    return [d % max(ndim, 1) for d in ([given] if isinstance(given, int) else given)]


def _check(call: Call) -> None:
    if call.kwargs.get("dtype") is not None:
        raise ValueError(
            f"scaled: argument 'dtype' of {call.op} must be left out, got {call.kwargs['dtype']}; output is the dtype"
        )
    if call.roles.family is not LENGTH:
        return
    order = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", 2)
    if order != 2:
        raise ValueError(f"scaled: argument 'ord' of {call.op} must be 2, got {order!r}; use {call.op} itself")


def _sum(call: Call) -> Tensor:
    x, dtype = call.args[0], compute_dtype(call)
    dims = _dims(call)
    if is_integer(x) and copies.ROWWISE in x.usages:
        operand = plain(x, copies.ROWWISE)
        if all(operand.block[d] == -1 or tracing.known_equal(operand.scale.shape[d], 1) for d in dims):
            step = spread(operand.scale, operand.block, x.shape)
            step = step.amax(dims, keepdim=True) if dims else step  # all are one number
            return _with_dims(call, _integers(call, centered(operand), dims).to(dtype) * step, dims)
    real = values(x, dtype)
    if dtype != torch.float32 or functions.are_of_runtime() or tracing.known_equal(real.numel(), 0):
        return call.op(real, *call.args[1:], **call.kwargs)
    if not dims:
        return real.clone()
    if call.op is aten.cumsum.default:
        return row_sums.running_sum(real, dims[0]).to(dtype)
    return _with_dims(call, row_sums.row_sum(real, dims).to(dtype), dims)


def _integers(call: Call, codes: Tensor, dims: list[int]) -> Tensor:
    wide = codes.to(torch.int64)
    if call.op is aten.cumsum.default:
        return wide.cumsum(dims[0]) if dims else wide
    return wide.sum(dims, keepdim=True) if dims else wide


def _with_dims(call: Call, y: Tensor, dims: list[int], position: int = 2) -> Tensor:
    """y without the dimensions that were summed over, unless the call keeps them."""
    keeps = call.op is aten.cumsum.default or (call.op is not aten.sum.default and keeps_dims(call, position))
    return y if keeps or not dims else y.squeeze(dims)


def _length(call: Call) -> Tensor:
    x, dims = values(call.args[0], compute_dtype(call)), _dims(call, 2)
    if x.dtype != torch.float32 or functions.are_of_runtime() or tracing.known_equal(x.numel(), 0):
        return call.op(x, *call.args[1:], **call.kwargs)
    if not dims:
        return x.abs()
    return _with_dims(call, row_sums.row_sum_of_squares(x, dims).sqrt().to(torch.float32), dims, 3)


MEANINGS = {SUM: Meaning(_sum, check=_check), LENGTH: Meaning(_length, check=_check)}
