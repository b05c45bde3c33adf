"""scaled by the kernels of rows on GPUs: norms, functions of elements and gated products, quantized in the same
pass over memory."""

from typing import Any

import torch
from torch import Tensor

from hop.dispatch.kernel import Kernel
from hop.dispatch.operators import NORM
from hop.impls.scaled.calls import Call, compute_dtype, fitted, integer_function
from hop.impls.scaled.native_rows import operation, others
from hop.kernels.gpu import rows as gpu
from hop.numerics.quantizer import Quantizer


def _asked(call: Call) -> "gpu.Rows | str":
    """What a kernel is asked for, or why it is not."""
    if not isinstance(call.output, Quantizer):
        return f"for results that are quantized, not {call.output}"
    if compute_dtype(call) != torch.float32:
        return "computes in float32, and an operand is float64"
    described = operation(call)
    if isinstance(described, str):
        return described
    if call.roles.family is NORM and described.sums != 1:
        return "for norms of the last dimension"
    if integer_function(call.output) is not None:
        return "the output is found from integers"
    x, (other, weight, bias) = call.args[0], others(call)
    if not all(t is None or isinstance(t, Tensor) for t in (x, other, weight, bias)):
        return "an operand is quantized"
    name, number = described.function or described.name, described.number
    given = fitted(call, x.shape)
    return gpu.Rows(name, number or 0.0, x, weight, bias, other, call.output, *given)


def _declines(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"for GPUs, and the operands are on {call.device}"
    asked = _asked(call)
    return asked if isinstance(asked, str) else gpu.declines(asked)


def _run(call: Call) -> Any:
    asked = _asked(call)
    assert not isinstance(asked, str)
    return gpu.run(asked)


GPU_ROWS = Kernel("GPU rows", _declines, _run)
"""Norms of rows, functions and gated products on Hopper, computed and quantized in one kernel
(cutlass_kernels/quantize_norms.py, cutlass_kernels/quantize_functions.py)."""
