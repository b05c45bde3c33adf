"""Means, average pooling and linear interpolation: computed in float64 and rounded to float32."""

from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operators import INTERPOLATE, MEAN, aten
from hop.impls.scaled.calls import Call, compute_dtype, is_integer, values
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.operands import centered, plain, spread
from hop.impls.scaled.outputs import by_integers
from hop.numerics import copies
from hop.numerics.interpolation import interpolated


def _mean(call: Call) -> Tensor:
    x, dtype = call.args[0], compute_dtype(call)
    reduced = _reduced(call, x.dim())
    if not is_integer(x) or copies.ROWWISE not in x.usages:
        return _of(call, values(x, dtype), reduced).to(dtype)
    operand = plain(x, copies.ROWWISE)
    if not all(operand.block[d] == -1 or tracing.known_equal(operand.scale.shape[d], 1) for d in reduced):
        return _of(call, values(x, dtype), reduced).to(dtype)
    y = _of(call, centered(operand), reduced).to(dtype)
    step = spread(operand.scale, operand.block, x.shape)
    if call.op.overloadpacket is aten.mean:
        step = call.op(step, *call.args[1:], **_options(call))  # the mean of the scales, which equals each of them
    return y * step


def _of(call: Call, x: Tensor, dims: list[int]) -> Tensor:
    """Run the operator on x in float64."""
    wide = x.to(torch.float64)
    if call.roles.family is INTERPOLATE:
        return interpolated(wide, call.op, call.args[1:], dims)
    return call.op(wide, *call.args[1:], **_options(call))


def _options(call: Call) -> dict[str, Any]:
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


MEANINGS = dict.fromkeys((MEAN, INTERPOLATE), Meaning(_mean, buffers=_buffers))
