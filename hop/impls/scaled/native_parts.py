"""scaled by the native kernels, of plain floats with more bits than bfloat16 beside quantized numbers.

A float32 number is the sum of three bfloat16 numbers, exactly, and one of float16 that of two (native/gemm/floats.cpp).
"""

import math
from typing import Any

import torch

from hop.compat import tracing
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled import native
from hop.impls.scaled.calls import Call
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu import product as native_product
from hop.kernels.cpu.native import library

_PARTS = {torch.float32: 3, torch.float16: 2}
# The most rows that are taken: as many as cost no more than a product of dequantized numbers.
_MOST = {
    "amx": {torch.float32: math.inf, torch.float16: math.inf},
    "avx512_bf16": {torch.float32: 256, torch.float16: math.inf},
}
_FEW = {torch.float32: 16, torch.float16: 16}  # elsewhere: reading the weight takes longest, and the products less


def _prepare(call: Call) -> Plan:
    lhs = call.find(LHS)
    if isinstance(lhs, Operand):
        raise Declined("the left factor is quantized")
    if lhs.dtype not in _PARTS:
        raise Declined(f"for float32 and float16 beside quantized numbers, not {lhs.dtype}")
    if lhs.dim() < 2:
        raise Declined("one operand is a vector")
    form = native.described(call, _PARTS[lhs.dtype])
    rows = math.prod(tracing.hints(lhs.shape[:-1]))  # type: ignore[arg-type]
    if rows == 0 or 0 in call.find(RHS).shape:
        raise Declined("the result is empty")
    most = _MOST.get(library().path, _FEW)[lhs.dtype]
    if rows > most:
        raise Declined(f"for at most {most} rows of {lhs.dtype} on a CPU of level {library().path}")
    right, along = native.reader(call, RHS, form.rhs), -2 if call.roles.rhs_sums == -1 else -1
    words = form.description.replace("lhs bfloat16", f"lhs {native_product.name(lhs)}", 1)

    def compute(call: Call) -> Any:
        lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
        none = (None, None, None)
        y = native_operators.product(lhs, *none, *right(rhs), *none, rhs.shape[along], words)
        return finish(call, y if bias is None else y + bias)

    return call.plan(compute)


PARTS = Kernel("native product in parts", _prepare, native=True)
