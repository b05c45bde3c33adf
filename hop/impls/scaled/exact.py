"""Requantization from the exact sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.export import is_lowering
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, BOUND, CONVOLUTION, LHS, MATRIX, MAXIMUM, MULTIPLY, NEAREST, RHS, VIEW, aten
from hop.impls.scaled.calls import Call, fitted, is_integer, tensors, usage
from hop.impls.scaled.operands import block_of, grid, spread
from hop.impls.scaled.products import Sum, aligned, sums
from hop.numerics import blocks, memory_format


def exact_declines(call: Call) -> str | None:
    """Why a call is not one exact sum, or None."""
    family = call.roles.family
    operands = [x for x in tensors(call.args) if isinstance(x, Operand)]
    if not all(is_integer(x) for x in operands):
        return "its operands are no integers"
    if family in (MATRIX, CONVOLUTION):
        if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
            return f"alpha and beta are {call.kwargs}"
        if not all(is_integer(call.find(role)) for role in (LHS, RHS)):
            return "one factor is plain"
        if family is MATRIX:
            lhs, rhs = call.find(LHS), call.find(RHS)
            sides = ((lhs, LHS, -1), (rhs, RHS, -1 if rhs.dim() == 1 else call.roles.rhs_sums))
            if any(block_of(x, usage(call, role))[dim] != -1 for x, role, dim in sides):
                return "its scales come in groups, each with a sum of its own"
        return None
    if family is MULTIPLY:
        return None if call.op is aten.mul.Tensor and len(operands) == 2 else "one factor is plain"
    if family in _CHOSEN or (family is BOUND and call.roles.bounds == (0.0, None)):
        (x,) = operands if len(operands) == 1 else (None,)
        whole = x is not None and all(b == -1 for b in blocks.per_dimension(x.quantizer.block, x.dim()))
        return None if whole else "it takes one operand with one scale"
    return f"{call.op} is none"


_CHOSEN = (VIEW, MAXIMUM, NEAREST)  # each element of the result is one of the operand's


def exact(call: Call) -> Sum:
    """The one sum of a call, its bias included."""
    family = call.roles.family
    if family is MULTIPLY:
        a, b = (grid(x, x.usages[0]) for x in call.args[:2])
        total = a.centered().to(torch.int32) * b.centered().to(torch.int32)
        return Sum(total, *(spread(g.scale, g.block, g.codes.shape) for g in (a, b)))
    if family in (*_CHOSEN, BOUND):
        own = grid(call.args[0], call.args[0].usages[0])
        # PyTorch pools no integers on GPUs, nor, but for what is lowered, in one dimension, and repeats none.
        pools = family is MAXIMUM and not (is_lowering() and call.device.type == "cpu")
        chosen = own.centered().to(torch.float32 if pools or family is NEAREST else torch.int32)
        total = call.op(chosen, *call.args[1:], **call.kwargs).to(torch.int32)
        step = own.scale.reshape(())
        return Sum(total, step, torch.ones_like(step))
    (found,) = sums(call)
    return with_bias(call, found)


def with_bias(call: Call, found: Sum) -> Sum:
    """The sum with its bias. One of floats is rounded to the unit of the sum, and the two saturate."""
    bias = call.find(BIAS)
    if bias is None or call.kwargs.get("beta", 1) == 0:
        return found
    bias = aligned(call, bias)
    if not bias.is_floating_point():
        return found._replace(total=found.total + bias)
    unit = found.lhs.to(torch.float64) * found.rhs.to(torch.float64)
    steps = (bias.to(torch.float64) / unit).round().clamp(-(2.0**32), 2.0**32).to(torch.int64)
    total = (found.total.to(torch.int64) + steps).clamp(-(2**31), 2**31 - 1)
    return found._replace(total=total.to(torch.int32))


def requantized(call: Call, found: Sum) -> list[Tensor]:
    """The buffers of the output, by its convention."""
    q: Any = call.output
    shape = list(found.total.shape)
    block = blocks.per_dimension(q.block, len(shape))
    stored = given_buffers(call, shape)
    scale, zero = spread(stored[0], block, shape), q.format.zero
    if len(stored) > 1:
        zero = spread(stored[1], block, shape).to(torch.int32)
    codes = q.scale.requantization.codes(found.total, found.lhs, found.rhs, scale, zero, q.format)
    if q.keeps_memory_format():
        return [memory_format.dense(codes), *stored]
    codes = codes.contiguous()
    return [q.format.pack(codes.reshape(shape or [1])) if q.per_byte() > 1 else codes, *stored]


def given_buffers(call: Call, shape: list[int]) -> list[Tensor]:
    """Scale and zero point of the output as its buffers, for a result of `shape`."""
    q: Any = call.output
    scale, zero_point = fitted(call, shape)
    assert scale is not None
    stored = [scale]
    if zero_point is not None:
        zero_point = zero_point.round() if zero_point.is_floating_point() else zero_point
        stored.append(zero_point.clamp(q.format.low, q.format.high).to(q.format.dtype))
    return [t.clone(memory_format=torch.contiguous_format) for t in stored]


def are_buffers(call: Call, shape: Sequence[int]) -> bool:
    """Whether scale and zero point of the output have the shapes and dtypes of their buffers, for a result of `shape`,
    and every number of that dtype is a code."""
    q: Any = call.output
    stored = [t for t in (call.output_scale, call.output_zero_point) if t is not None]
    pairs = zip(stored, given_buffers(call, list(shape)), strict=True)
    same = all(t.shape == own.shape and t.dtype == own.dtype for t, own in pairs)
    info = torch.iinfo(q.format.dtype)
    return same and (q.format.low, q.format.high) == (info.min, info.max)
