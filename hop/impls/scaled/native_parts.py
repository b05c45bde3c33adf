"""scaled by the native kernels, of plain floats with more bits than bfloat16 beside quantized numbers.

A float32 number is the sum of three bfloat16 numbers, exactly, and one of float16 that of two; at level avx2 both are
multiplied as they are (native/gemm/floats.cpp).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled import native
from hop.impls.scaled.calls import Call
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import product as native_product
from hop.kernels.cpu.native import library

_PARTS = {torch.float32: 3, torch.float16: 2}
# The most rows that are taken: as many as cost no more than a product of dequantized numbers.
_ANY = dict.fromkeys(_PARTS, math.inf)
_MOST = {"amx": _ANY, "avx2": _ANY, "avx512": _ANY, "avx512_bf16": _ANY | {torch.float32: 256}}
_FEW = {torch.float32: 16, torch.float16: 16}  # elsewhere: reading the weight takes longest, and the products less


def _declines(call: Call) -> str | None:
    lhs = call.find(LHS)
    if isinstance(lhs, Operand):
        return "the left factor is quantized"
    if lhs.dtype not in _PARTS:
        return f"for float32 and float16 beside quantized numbers, not {lhs.dtype}"
    if lhs.dim() < 2:
        return "one operand is a vector"
    reason = native.NATIVE.declines(_of_parts(call, _shaped(lhs, _PARTS[lhs.dtype])))
    if reason is not None:
        return reason
    rows = math.prod(tracing.hints(lhs.shape[:-1]))  # type: ignore[arg-type]
    if rows == 0 or 0 in call.find(RHS).shape:
        return "the result is empty"
    most = _MOST.get(library().path, _FEW)[lhs.dtype]
    if rows > most:
        return f"for at most {most} rows of {lhs.dtype} on a CPU of level {library().path}"
    return None


def _shaped(lhs: Tensor, parts: int) -> Tensor:
    """What has the shape and dtype of its parts, and no memory."""
    *lead, m, k = lhs.shape
    return lhs.new_empty((1,) * lhs.dim(), dtype=torch.bfloat16).expand([*lead, m * parts, k])


def _of_parts(call: Call, parts: Tensor) -> Call:
    """The product alone, of these parts, in float32."""
    role = call.roles.role
    args = tuple(parts if role(i) == LHS else None if role(i) == BIAS else x for i, x in enumerate(call.args))
    return call._replace(output=torch.float32, output_scale=None, output_zero_point=None, args=args)


def _multiplied(call: Call) -> Callable[..., Tensor]:
    """The product of factors like those of a call, without its bias: a function of lhs and rhs, for below autograd."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    form = native.product(_of_parts(call, _shaped(lhs, _PARTS[lhs.dtype])))
    assert not isinstance(form, str)
    read, n = native.reader(call, RHS, form.rhs), rhs.shape[-2 if call.roles.rhs_sums == -1 else -1]
    words = form.description.replace("lhs bfloat16", f"lhs {native_product.name(lhs)}", 1)
    multiply, none = torch.ops.hop_native.product.default, (None, None, None)
    return lambda lhs, rhs: multiply(lhs, *none, *read(rhs), *none, n, words)


def _run(call: Call) -> Any:
    bias = call.find(BIAS)
    with eager.below_autograd():
        y = _multiplied(call)(call.find(LHS), call.find(RHS))
    return finish(call, y if bias is None else y + bias)


def _planned(call: Call, general: Plan) -> Plan | None:
    """For results in floats."""
    if not isinstance(call.output, torch.dtype):
        return None
    multiply, places, below, output = _multiplied(call), call.roles.roles, eager.below_autograd, call.output
    i, j = places.index(LHS), places.index(RHS)
    k = None if call.find(BIAS) is None else places.index(BIAS)
    shape = (*call.find(LHS).shape[:-1], call.find(RHS).shape[-2 if call.roles.rhs_sums == -1 else -1])

    def run(*given: Any) -> Any:
        try:
            with below():
                y = multiply(given[i], given[j])
        except RuntimeError:  # which `general` gives the reason of, if an operand is not what it was described as
            return general(*given)
        if y.shape != shape or not y.is_cpu:
            return general(*given)
        return (y if k is None else y + given[k]).to(output)

    return run


PARTS = Kernel("native product in parts", _declines, _run, _planned, native=True)
