"""Norms: layer_norm and rms_norm of rows, and batch_norm with running statistics.

    layer_norm    μ = float32(Σ x / n),  d = x - μ,  y = d · r · w + b,   r = float32(1 / sqrt(Σ d² / n + eps))
    rms_norm      y = x · r · w                                           r = float32(1 / sqrt(Σ x² / n + eps))
    batch_norm    y = (x - mean) · (r · w) + b                            r = float32(1 / sqrt(var + eps))

Operations are in float32, each rounded separately, from left to right. Sums are in fixed point (hop.numerics.row_sums),
and everything from a sum up to r is in float64. For float64 operands ATen's operators are used.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operators import NORM, aten
from hop.impls.scaled.calls import Call, compute_dtype, integer_function, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.gpu_rows import GPU_ROWS
from hop.impls.scaled.native_rows import ROWS
from hop.impls.scaled.outputs import by_integers
from hop.numerics import functions, row_sums


def is_batch_norm(call: Call) -> bool:
    return call.op is aten.batch_norm.default


def _check(call: Call) -> None:
    x = call.args[0]
    if is_batch_norm(call):
        mean, var, training = call.args[3:6]
        if training or mean is None or var is None:
            given = "training=True" if training else "no running_mean or no running_var"
            raise ValueError(
                f"scaled: {call.op} is supported only with running statistics, got {given}; give both, and training="
                "False, or fold the norm into its layer"
            )
        if x.dim() < 2:
            raise RuntimeError(f"scaled: {call.op} takes (N, C, *) operands, got {tuple(x.shape)}")
        return
    sizes = list(call.args[1])
    if not sizes or len(sizes) > x.dim() or not all(map(tracing.known_equal, sizes, x.shape[-len(sizes) :])):
        raise RuntimeError(
            f"scaled: argument 'normalized_shape' of {call.op} must be the last sizes of an operand of "
            f"{tuple(x.shape)}, got {sizes}"
        )
    row_sums.check("scaled", call.op, sizes)
    if integer_function(call.output) is not None and len(sizes) != 1:
        raise ValueError(
            f"scaled: output {call.output} supports norms of the last dimension only, got normalized_shape={sizes}; "
            "flatten the last dimensions"
        )


def _norm(call: Call) -> Tensor:
    dtype = compute_dtype(call)
    args = [values(x, dtype) for x in call.args]
    if dtype != torch.float32 or functions.are_of_runtime() or tracing.known_equal(args[0].numel(), 0):
        return call.op(*args, **call.kwargs)
    if is_batch_norm(call):
        return _by_channel(*args)
    return _of_rows(call, *args)


def _of_rows(
    call: Call,
    x: Tensor,
    sizes: Sequence[int],
    weight: Tensor | None = None,
    second: Any = None,
    eps: float = 1e-5,
    _: bool = True,
) -> Tensor:
    dims, n = list(range(-len(sizes), 0)), math.prod(sizes)
    if call.op is aten.rms_norm.default:
        bias, eps = None, torch.finfo(torch.float32).eps if second is None else second
    else:
        bias = second
        x = x - (row_sums.row_sum(x, dims) / n).to(torch.float32)
    y = x * _reciprocal_root(row_sums.row_sum_of_squares(x, dims) / n, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _by_channel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Tensor:
    factor = _reciprocal_root(var.to(torch.float64), eps)
    factor = factor if weight is None else factor * weight
    sizes = [-1, *[1] * (x.dim() - 2)]
    y = (x - mean.reshape(sizes)) * factor.reshape(sizes)
    return y if bias is None else y + bias.reshape(sizes)


def _reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """float32(1 / sqrt(x + eps)) for float64 x: correctly rounded on all platforms, given x + eps."""
    return (x + eps).sqrt().reciprocal().to(torch.float32)


def _places(call: Call, ndim: int) -> dict[int, Places]:
    if is_batch_norm(call):
        places: Places = {d: d for d in range(ndim)}
        return {0: places} | {i: {1: 0} for i in range(1, 5) if isinstance(call.args[i], Tensor)}
    return {0: {d: d for d in range(ndim - len(call.args[1]))}}


def _buffers(call: Call) -> list[Tensor] | None:
    weight, bias = (*call.args[2:4], None, None)[:2]
    return by_integers(call, weight=weight, bias=bias)


MEANINGS = {NORM: Meaning(_norm, places=_places, check=_check, buffers=_buffers, kernels=(ROWS, GPU_ROWS))}
