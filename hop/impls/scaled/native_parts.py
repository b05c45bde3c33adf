"""scaled with native kernels: float32 or float16 times quantized values.

A float32 value is exactly the sum of three bfloat16 values, and a float16 value of two. At level avx2 both are
multiplied without splitting (native/gemm/floats.cpp).
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
# Row limits: up to these a split product is not slower than one of dequantized values.
_ANY = dict.fromkeys(_PARTS, math.inf)
_MOST = {"amx": _ANY, "avx2": _ANY, "avx_vnni": _ANY, "avx512": _ANY, "avx512_bf16": _ANY | {torch.float32: 256}}
_FEW = {torch.float32: 16, torch.float16: 16}  # other levels: with few rows, reading the weight dominates


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
    most = _MOST.get(library().path, _FEW)[lhs.dtype]
    if rows > most:
        raise Declined(f"for at most {most} rows of {lhs.dtype} on a CPU of level {library().path}")
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
