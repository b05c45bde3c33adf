"""Means, and average pooling: taken in float64 and rounded to float32."""

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operators import MEAN, aten
from hop.impls.scaled.calls import Call, compute_dtype, is_integer, values
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.operands import centered, plain, spread
from hop.impls.scaled.outputs import by_integers
from hop.numerics import copies


def _mean(call: Call) -> Tensor:
    x, *rest = call.args
    dtype, wide = compute_dtype(call), torch.float64
    kwargs = {name: v for name, v in call.kwargs.items() if name != "dtype"}
    if not is_integer(x) or copies.ROWWISE not in x.usages:
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    own = plain(x, copies.ROWWISE)
    reduced = _reduced(call, x.dim())
    if not all(own.block[d] == -1 or tracing.known_equal(own.scale.shape[d], 1) for d in reduced):
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    y = call.op(centered(own).to(wide), *rest, **kwargs).to(dtype)
    step = spread(own.scale, own.block, x.shape)
    if call.op.overloadpacket is aten.mean:
        step = call.op(step, *rest, **kwargs)  # of single numbers
    return y * step


def _reduced(call: Call, ndim: int) -> list[int]:
    """The dimensions that a mean is taken over."""
    if call.op is aten.mean.dim and call.args[1]:
        dims = call.args[1]
        return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]
    return list(range(ndim - (call.roles.spatial or ndim), ndim))


def _buffers(call: Call) -> list[Tensor] | None:
    """The codes of the mean by integers, where the output says so."""
    ndim = call.args[0].dim()
    return by_integers(call, op=call.op, rest=call.args[1:], dims=_reduced(call, ndim))


MEANINGS = {MEAN: Meaning(_mean, buffers=_buffers)}
