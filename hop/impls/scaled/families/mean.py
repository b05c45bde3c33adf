"""Means, average pooling and linear interpolation.

A mean of float32 numbers over whole dimensions is float32(Σ x / n), the sum in fixed point (hop.numerics.row_sums), so
that its order is free. Other windows, and integers, are taken in float64, windows in the order of hop.numerics.pooling,
and rounded to float32.
"""

import math

import torch
from torch import Tensor

from hop.compat import tracing
from hop.compat.pytree import Kwargs
from hop.dispatch.operators import INTERPOLATE, MEAN, aten
from hop.impls.scaled.calls import Call, compute_dtype, is_integer, keeps_dims, shape, values
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.operands import centered, plain, spread
from hop.impls.scaled.outputs import by_integers
from hop.numerics import copies, functions, pooling, row_sums
from hop.numerics.interpolation import interpolated


def _mean(call: Call) -> Tensor:
    x, dtype = call.args[0], compute_dtype(call)
    reduced = _reduced(call, x.dim())
    if not is_integer(x) or copies.ROWWISE not in x.usages:
        return _of_floats(call, values(x, dtype), reduced)
    operand = plain(x, copies.ROWWISE)
    if not all(operand.block[d] == -1 or tracing.known_equal(operand.scale.shape[d], 1) for d in reduced):
        return _of_floats(call, values(x, dtype), reduced)
    y = _of(call, centered(operand), reduced).to(dtype)
    step = spread(operand.scale, operand.block, x.shape)
    if call.op.overloadpacket is aten.mean:
        step = call.op(step, *call.args[1:], **_options(call))  # the mean of the scales, which equals each of them
    return y * step


def _of_floats(call: Call, x: Tensor, dims: list[int]) -> Tensor:
    """A mean over whole dimensions by a sum in fixed point, whose order is free; other windows in float64."""
    is_adaptive = call.op in pooling.ADAPTIVE
    is_whole = call.op.overloadpacket is aten.mean or (
        is_adaptive and all(n == 1 for n in pooling.sizes(call.args[1], len(dims)))
    )
    if not is_whole or not dims or x.dtype != torch.float32 or functions.are_of_runtime():
        return _of(call, x, dims).to(x.dtype)
    if tracing.known_equal(x.numel(), 0):
        return _of(call, x, dims).to(x.dtype)
    y = (row_sums.row_sum(x, dims) / math.prod(x.shape[d] for d in dims)).to(torch.float32)
    keeps = is_adaptive or (call.op is aten.mean.dim and keeps_dims(call, 2))
    return y if keeps else y.squeeze(dims)


def _of(call: Call, x: Tensor, dims: list[int]) -> Tensor:
    """Run the operator on x in float64."""
    wide, options = x.to(torch.float64), _options(call)
    if call.roles.family is INTERPOLATE:
        return interpolated(wide, call.op, call.args[1:], dims)
    is_mean = call.op.overloadpacket is aten.mean
    if is_mean or x.dtype == torch.float64 or functions.are_of_runtime() or tracing.is_describing():
        return call.op(wide, *call.args[1:], **options)
    return pooling.averaged(wide, call.op, call.args[1:], options, dims)


def _options(call: Call) -> Kwargs:
    return {name: v for name, v in call.kwargs.items() if name != "dtype"}


def _reduced(call: Call, ndim: int) -> list[int]:
    """The dimensions that are reduced or interpolated."""
    if call.op is aten.mean.dim and call.args[1]:
        dims = call.args[1]
        return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]
    return list(range(ndim - (call.roles.spatial or ndim), ndim))


def _buffers(call: Call) -> list[Tensor] | None:
    """The codes computed in integers; None without an integer convention."""
    ndim = call.args[0].dim()
    return by_integers(call, op=call.op, rest=call.args[1:], dims=_reduced(call, ndim))


def _check_windows(call: Call) -> None:
    if call.roles.family is MEAN and call.roles.spatial:
        shape(call.op, call.args, _options(call))  # raises PyTorch's errors


MEANINGS = dict.fromkeys((MEAN, INTERPOLATE), Meaning(_mean, check=_check_windows, buffers=_buffers))
