"""scaled with 4-bit grouped weights on GPUs, decoded in registers.

The other factor is bfloat16, or has 8-bit codes with a scale per row.
"""

import torch
from torch import Tensor

from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, Result, by_sum, check_fit, usage
from hop.impls.scaled.gpu import REALS, check_device, scale_of_rows, zero_of
from hop.impls.scaled.operands import PlainForm, plain
from hop.impls.scaled.outputs import finish
from hop.kernels.gpu import product as gpu
from hop.numerics import copies
from hop.numerics.blocks import per_dimension
from hop.numerics.formats import INT4, UINT4

GROUPS = (32, 64, 128)
BYTES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def _prepare(call: Call) -> Plan:
    check_device(call)
    if not gpu.is_hopper(call.device):
        raise Declined("for GPUs of compute capability 9.0, which decode codes in registers")
    check_form(call)
    decline(gpu.nibbles_decline(*_asked(call)))
    return call.plan(computed)


def check_form(call: Call) -> None:
    """Raise Declined unless the call is such a product, on any device."""
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if call.kwargs or call.roles.rhs_sums != -1:
        raise Declined("for rows of the weight, as linear's")
    if not isinstance(rhs, Operand) or rhs.dim() != 2 or lhs.dim() < 1:
        raise Declined("for a matrix of quantized weights")
    _check_lhs(call, lhs)
    check_fit(call, lhs, rhs)
    q, form = rhs.quantizer, PlainForm.of(rhs, usage(call, RHS))
    if q.format not in (INT4, UINT4) or q.per_byte() != 2 or q.hadamard is not None:
        raise Declined(f"for plain codes of 4 bits, two to a byte, not {q}")
    if form.is_fine:
        raise Declined(f"for one scale in float32 to a group, not {q}")
    rows, group = per_dimension(q.block, 2)
    k = rhs.shape[-1]
    if rows != 1 or group not in GROUPS or k % group or form.usage != copies.ROWWISE:
        got = f"{q.block} and K = {k}"
        raise Declined(f"for groups of {GROUPS} elements of a row, of whose number K is a multiple; got {got}")
    if q.scale.has_zero_point() != (q.format == UINT4) or _buffers(rhs)[1].dtype != torch.float32:
        raise Declined("for signed codes, or unsigned ones with zero points, with scales in float32")
    if bias is not None and (bias.dim() != 1 or bias.dtype not in REALS):
        raise Declined(f"for a bias with one value for each column, in {REALS}")


def _check_lhs(call: Call, lhs: Tensor | Operand) -> None:
    """Raise Declined unless the left factor is bfloat16, or 8-bit codes with a scale per row."""
    if not isinstance(lhs, Operand):
        if lhs.dtype != torch.bfloat16:
            raise Declined(f"for bfloat16 or 8 bits times 4 bits, not {lhs.dtype}")
        return
    q, form = lhs.quantizer, PlainForm.of(lhs, usage(call, LHS))
    if q.format.dtype not in BYTES or q.per_byte() > 1 or form.usage != copies.ROWWISE or q.hadamard is not None:
        raise Declined(f"for bfloat16 or 8 bits times 4 bits, not {q}")
    form.bytes()
    if form.block[-1] != -1:
        raise Declined(f"for one scale per row on the left, not {q}")
    if by_sum(call.output):
        raise Declined("requantizes an exact sum")


def _buffers(rhs: Operand) -> list[Tensor]:
    """Codes and scales, and zero points if there are any."""
    return list(rhs.of(copies.ROWWISE).tensors)


def _asked(call: Call) -> tuple[tuple[Tensor | None, ...], int, torch.dtype]:
    """The tensors of the product, its group, and the dtype that the kernel writes."""
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    x, of_rows = lhs, (None, None)
    if isinstance(lhs, Operand):
        left = plain(lhs, copies.ROWWISE)
        x, of_rows = left.codes, (scale_of_rows(left), zero_of(left, -1))
    codes, scale, *zero = _buffers(rhs)
    out = call.output if call.output in REALS else torch.float32
    group = per_dimension(rhs.quantizer.block, 2)[1]
    args = (x.reshape(-1, x.shape[-1]), codes, scale, zero[0] if zero else None, bias, *of_rows)
    return args, group, out


def computed(call: Call) -> Result:
    """Compute the result with the kernel."""
    (args, group, out), lhs, rhs = _asked(call), call.find(LHS), call.find(RHS)
    y = gpu.nibble_mm(*args, group=group, out_dtype=out)
    y = y.reshape(*lhs.shape[:-1], rhs.shape[0])
    return y if call.output == out else finish(call, y)


NIBBLES = Kernel("GPU product of 4 bits", _prepare)
