"""scaled with row kernels on GPUs: norms, functions and gated products, quantized in the same pass."""

import torch
from torch import Tensor

from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import NORM
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, compute_dtype, fitted, integer_function
from hop.impls.scaled.native_rows import operation, others
from hop.kernels.gpu import rows as gpu
from hop.numerics.quantizer import Quantizer


def asked(call: Call) -> gpu.Rows:
    """Describe the call for a kernel. Raises Declined if it is not supported."""
    if not isinstance(call.output, Quantizer):
        raise Declined(f"for quantized results, not {call.output}")
    if compute_dtype(call) != torch.float32:
        raise Declined("computes in float32, but an operand is float64")
    described = operation(call)
    if call.roles.family is NORM and described.sums != 1:
        raise Declined("for norms of the last dimension")
    if integer_function(call.output) is not None:
        raise Declined("the output is computed from integers")
    x, (other, weight, bias) = call.args[0], others(call)
    if isinstance(x, Operand) or isinstance(other, Operand) or isinstance(weight, Operand) or isinstance(bias, Operand):
        raise Declined("an operand is quantized")
    name, number = described.function or described.name, described.number
    return gpu.Rows(name, number or 0.0, x, weight, bias, other, call.output, *fitted(call, x.shape))


def _prepare(call: Call) -> Plan:
    if call.device.type != "cuda":
        raise Declined(f"for GPUs, but the operands are on {call.device}")
    gpu.check_rows(asked(call))
    return call.plan(computed)


def computed(call: Call) -> list[Tensor]:
    """Compute the result's buffers with the kernel."""
    return gpu.run(asked(call))


GPU_ROWS = Kernel("GPU rows", _prepare)
"""Norms of rows, functions and gated products on Hopper, computed and quantized in one kernel.

See cutlass_kernels/quantize_norms.py and cutlass_kernels/quantize_functions.py.
"""
