"""scaled by the native kernels, of floats and of int8 codes beside weights as files of quantized models hold them:
codes of 2 to 8 bits in rows, scales of groups in 16 bits or in two levels, with offsets.

Beside floats the weight's numbers are those of dequantize, bit for bit, found in registers, or in a strip that stays in
the cache; sums are in float32. Beside codes sums are those of integers, exact, and what is done in floats is what the
meaning says, operation by operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, has_stored_sums, is_integer, misfit, usage
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import group_product, native
from hop.kernels.cpu.group_product import FLOATS, Described
from hop.numerics import copies


def _declines(call: Call) -> str | None:
    if (reason := native.declines_here(call.device)) is not None:
        return reason
    if call.kwargs:
        return f"alpha and beta are {call.kwargs}"
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    own: int | str | None = None
    if not isinstance(rhs, Operand):
        return "the right factor is not quantized"
    if isinstance(lhs, Operand):
        if usage(call, LHS) != copies.ROWWISE:
            return "the left factor has no row-wise copy"
        if _has_codes(call) and isinstance(own := group_product.group_of_codes(lhs.quantizer, lhs.dim()), str):
            return own
    elif lhs.dtype not in FLOATS:
        return f"for float32, bfloat16 and float16 beside quantized numbers, not {lhs.dtype}"
    if call.roles.rhs_sums != -1 or rhs.dim() != 2 or lhs.dim() < 1:
        return "for a matrix that is summed along its rows, as linear's weight is"
    if rhs.usages != (copies.ROWWISE,):
        return "the right factor has a column-wise copy"
    if (reason := misfit(call, lhs, rhs)) is not None:
        return reason
    described = group_product.describe(rhs.quantizer)
    if isinstance(described, str):
        return described
    shape = tracing.hints(rhs.shape)
    if shape is None:
        return f"nothing is known of the sizes {tuple(rhs.shape)}"
    if bias is not None and (bias.dtype not in FLOATS or tracing.hints(bias.shape) != shape[:1]):
        return f"for a bias of ({shape[0]},) in floats, not of {tuple(bias.shape)} in {bias.dtype}"
    return group_product.declines_shape(described, shape[1], own)


def _has_codes(call: Call) -> bool:
    """Whether the meaning is that of sums of integers."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    return is_integer(lhs) and (is_integer(rhs) or has_stored_sums(call))


def _multiplied(call: Call, result: torch.dtype) -> Callable[..., Tensor]:
    """The product of factors like those of a call: a function of lhs, rhs and bias, to be called below autograd."""
    described = group_product.describe(call.find(RHS).quantizer)
    assert isinstance(described, Described)
    names, multiply = described.names, torch.ops.hop_native.group_product.default
    words = f"1 {described.words} result={str(result).removeprefix('torch.')}"
    if _has_codes(call):
        lhs = call.find(LHS)
        words += f" x={group_product.group_of_codes(lhs.quantizer, lhs.dim())}"

        def run_codes(lhs: Any, rhs: Any, bias: Tensor | None) -> Tensor:
            buffers = [None if name is None else getattr(rhs, name) for name in names]
            scale = lhs.scale
            scale = scale if scale.dtype == torch.float32 else scale.to(torch.float32)
            return multiply(lhs.codes, *buffers, bias, words, scale)

        return run_codes

    def run(lhs: Tensor, rhs: Any, bias: Tensor | None) -> Tensor:
        return multiply(lhs, *(None if name is None else getattr(rhs, name) for name in names), bias, words)

    return run


def _run(call: Call) -> Any:
    result = call.output if call.output in FLOATS else torch.float32
    lhs = call.find(LHS)
    x = lhs.values(copies.ROWWISE) if isinstance(lhs, Operand) and not _has_codes(call) else lhs
    with eager.below_autograd():
        y = _multiplied(call, result)(x, call.find(RHS), call.find(BIAS))
    return y if call.output == result else finish(call, y)


def _planned(call: Call, general: Plan) -> Plan | None:
    """For plain floats and codes, and results in floats."""
    if call.output not in FLOATS or (isinstance(call.find(LHS), Operand) and not _has_codes(call)):
        return None
    multiply, places, below = _multiplied(call, call.output), call.roles.roles, eager.below_autograd
    i, j = places.index(LHS), places.index(RHS)
    k = None if call.find(BIAS) is None else places.index(BIAS)
    shape = (*call.find(LHS).shape[:-1], call.find(RHS).shape[0])

    def run(*given: Any) -> Any:
        try:
            with below():
                y = multiply(given[i], given[j], None if k is None else given[k])
        except RuntimeError:  # which `general` gives the reason of, if an operand is not what it was described as
            return general(*given)
        return y if y.shape == shape and y.is_cpu else general(*given)

    return run


GROUPS = Kernel("native group product", _declines, _run, _planned, native=True)
