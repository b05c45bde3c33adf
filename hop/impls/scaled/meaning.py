"""The meaning of scaled, in plain ATen.

Integer operands. The products of codes, each less its zero point, are summed exactly, modulo 2^32, over each group of
the summed dimension in which no scale changes; then, in float32, each operation rounded by itself,

    y = Σ_groups (float32(sum) · s_lhs) · s_rhs          in the order of the groups
    y = y · alpha + bias · beta                          where there are alpha, beta and bias

A bias of int32 is added to the sum instead. Other operands are dequantized to float32, float64 if one of them has that
dtype, and the operator runs in it. Means are taken in float64 and rounded to float32.

The result is cast once to a dtype, or quantized once, as hop.quantize does or as hop.requantization says.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hop.buffers.operators import quantize_buffers
from hop.compat import tracing
from hop.dispatch.operators import (
    ADD,
    BOUND,
    CONCATENATE,
    CONVOLUTION,
    EMBEDDING,
    MATRIX,
    MAXIMUM,
    MEAN,
    MULTIPLY,
    NEAREST,
    VIEW,
    aten,
)
from hop.impls.scaled.calls import Call, by_sum, compute_dtype, fitted, is_integer, values
from hop.impls.scaled.exact import exact, requantized
from hop.impls.scaled.operands import grid, spread
from hop.impls.scaled.products import real_product
from hop.numerics import copies


def reference(call: Call) -> Any:
    """What scaled returns: a tensor, or the buffers of a quantized one."""
    if by_sum(call.output):
        return requantized(call, exact(call))
    return finish(call, real(call))


def real(call: Call) -> Tensor:
    """The result before it is cast or quantized."""
    return _REAL[call.roles.family](call)


def finish(call: Call, y: Tensor) -> Any:
    """`y` as the output wants it."""
    if isinstance(call.output, torch.dtype):
        return y.to(call.output)
    y = activated(call, y)
    scale, zero_point = fitted(call, y.shape)
    return quantize_buffers(str(call.output), y.to(torch.float32), scale, zero_point, None, [copies.ROWWISE])


def activated(call: Call, y: Tensor) -> Tensor:
    """`y` within the range of the output's fused activation."""
    convention = call.output.scale.requantization  # type: ignore[union-attr]
    return y if convention is None else convention.bounded(y)


def _embedding(call: Call) -> Tensor:
    weight, *rest = call.args
    return call.op(values(weight, torch.float32), *rest)


def _multiply(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    return a * b


def _add(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
    b = b if alpha == 1 else b * alpha  # by itself: ATen's own kernels would round once
    return a - b if call.op.overloadpacket is aten.sub else a + b


def _value(call: Call) -> Tensor:
    args = [values(x, compute_dtype(call)) for x in call.args]
    return call.op(*args, **call.kwargs)


def _mean(call: Call) -> Tensor:
    x, *rest = call.args
    dtype, wide = compute_dtype(call), torch.float64
    kwargs = {name: v for name, v in call.kwargs.items() if name != "dtype"}
    if not is_integer(x) or copies.ROWWISE not in x.usages:
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    own = grid(x, copies.ROWWISE)
    reduced = _reduced(call, x.dim())
    if not all(own.block[d] == -1 or tracing.known_equal(own.scale.shape[d], 1) for d in reduced):
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    y = call.op(own.centered().to(wide), *rest, **kwargs).to(dtype)
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


_REAL: dict[Any, Callable[[Call], Tensor]] = {
    MATRIX: real_product,
    CONVOLUTION: real_product,
    EMBEDDING: _embedding,
    MULTIPLY: _multiply,
    ADD: _add,
    MEAN: _mean,
    **dict.fromkeys((CONCATENATE, BOUND, MAXIMUM, NEAREST, VIEW), _value),
}
