"""scaled with native kernels: float32 or float16 times quantized values.

Levels avx2 to avx512_bf16 multiply in float32. Others split a float32 value into three bfloat16 values that add up to
it exactly, and a float16 value into two (native/gemm/floats.cpp).
"""

import math
from typing import Any

import torch

from hop.compat import eager, memory, tracing
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled import native
from hop.impls.scaled.calls import Call, Result, changed, size_of
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import product as native_product
from hop.kernels.cpu.native import library

_PARTS = {torch.float32: 3, torch.float16: 2}
_FAST = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Levels at which this product is not slower than one of dequantized values, whatever the number of rows."""
_FEW = 16  # rows up to which this is so at other levels, as reading the weight dominates


def _prepare(call: Call) -> Plan:
    lhs = call.find(LHS)
    if isinstance(lhs, Operand):
        raise Declined("the left factor is quantized")
    if lhs.dtype not in _PARTS:
        raise Declined(f"for float32 and float16 times quantized values, not {lhs.dtype}")
    if lhs.dim() < 2:
        raise Declined("one operand is a vector")
    form, along = native.described(call, _PARTS[lhs.dtype]), -2 if call.roles.rhs_sums == -1 else -1
    rows = math.prod(tracing.hints(lhs.shape[:-1]))  # type: ignore[arg-type]
    if rows == 0 or 0 in call.find(RHS).shape:
        raise Declined("the result is empty")
    if rows > _FEW and library().path not in _FAST:
        raise Declined(f"for at most {_FEW} rows of {lhs.dtype} on a CPU of level {library().path}")
    words = form.description.replace("lhs bfloat16", f"lhs {native_product.name(lhs)}", 1)
    right, places, n = native.reader(call, RHS, form.rhs), call.roles.roles, call.find(RHS).shape[along]
    i, j = places.index(LHS), places.index(RHS)
    k = None if call.find(BIAS) is None else places.index(BIAS)
    output, bare, size = call.output, call.bare(), size_of([*lhs.shape[:-1], n])
    multiply, below, none = torch.ops.hop_native.product.default, eager.below_autograd, (None, None, None)

    def run(*given: Any) -> Result:
        with below():
            y = multiply(given[i], *none, *right(given[j]), *none, n, words)
        if size is not None and (y.shape != size or not y.is_cpu):
            raise changed()
        if k is not None:
            memory.check(given[k : k + 1])
            y = y + given[k]
        return y.to(output) if isinstance(output, torch.dtype) else finish(bare.of(given), y)

    return run


PARTS = Kernel("native product in parts", _prepare, native=True)
