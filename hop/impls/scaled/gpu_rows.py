"""scaled by the kernels of rows on GPUs: norms, functions of elements and gated products, quantized in the same
pass over memory."""

import torch
from torch import Tensor

from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operators import NORM
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, compute_dtype, fitted, integer_function
from hop.impls.scaled.native_rows import operation, others
from hop.kernels.gpu import rows as gpu
from hop.numerics.quantizer import Quantizer


def _asked(call: Call) -> gpu.Rows:
    """What a kernel is asked for. Raises Declined if it is not."""
    if not isinstance(call.output, Quantizer):
        raise Declined(f"for results that are quantized, not {call.output}")
    if compute_dtype(call) != torch.float32:
        raise Declined("computes in float32, and an operand is float64")
    described = operation(call)
    if call.roles.family is NORM and described.sums != 1:
        raise Declined("for norms of the last dimension")
    if integer_function(call.output) is not None:
        raise Declined("the output is found from integers")
    x, (other, weight, bias) = call.args[0], others(call)
    if not all(t is None or isinstance(t, Tensor) for t in (x, other, weight, bias)):
        raise Declined("an operand is quantized")
    name, number = described.function or described.name, described.number
    return gpu.Rows(name, number or 0.0, x, weight, bias, other, call.output, *fitted(call, x.shape))


def _prepare(call: Call) -> Plan:
    if call.device.type != "cuda":
        raise Declined(f"for GPUs, and the operands are on {call.device}")
    gpu.check_rows(_asked(call))
    return call.plan(computed)


def computed(call: Call) -> list[Tensor]:
    """The buffers of the result, by the kernel."""
    return gpu.run(_asked(call))


GPU_ROWS = Kernel("GPU rows", _prepare)
"""Norms of rows, functions and gated products on Hopper, computed and quantized in one kernel
(cutlass_kernels/quantize_norms.py, cutlass_kernels/quantize_functions.py)."""
