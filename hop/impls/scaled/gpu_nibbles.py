"""scaled by weights of 4 bits in groups, on GPUs, of bfloat16 or of operands of 8 bits with a scale for each row: codes
become numbers in the kernel's registers."""

from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, inductor
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.impls.scaled.calls import Call, by_sum, misfit, usage
from hop.impls.scaled.gpu import scale_of_rows, zero_of
from hop.impls.scaled.operands import block_of, plain
from hop.impls.scaled.outputs import finish
from hop.kernels.gpu import product as gpu
from hop.numerics import copies
from hop.numerics.blocks import per_dimension
from hop.numerics.formats import INT4, UINT4

GROUPS = (32, 64, 128)
REALS = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def _declines(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"for GPUs, and the operands are on {call.device}"
    if not (eager.is_plain_eager() or inductor.is_compiling_for_here()):
        return "for eager mode, and programs that are compiled for this process"
    if not gpu.is_hopper(call.device):
        return "codes are decoded in registers on GPUs of compute capability 9.0"
    return form_declines(call)


def form_declines(call: Call) -> str | None:
    """Why a call is no such product, wherever its operands lie."""
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if call.kwargs or call.roles.rhs_sums != -1:
        return "for rows of the weight, as linear's"
    if not isinstance(rhs, Operand) or rhs.dim() != 2 or lhs.dim() < 1:
        return "for a matrix of quantized weights"
    if (reason := _declines_lhs(call, lhs) or misfit(call, lhs, rhs)) is not None:
        return reason
    q = rhs.quantizer
    if q.format not in (INT4, UINT4) or q.per_byte() != 2 or q.layout is not None or q.flat or q.hadamard is not None:
        return f"for plain codes of 4 bits, two to a byte, not {q}"
    if q.scale.is_compound or q.scale.block_scale_format is not None or q.scale.has_offset():
        return f"for one scale in float32 to a group, not {q}"
    rows, group = per_dimension(q.block, 2)
    k = rhs.shape[-1]
    if rows != 1 or group not in GROUPS or k % group or usage(call, RHS) != copies.ROWWISE:
        return f"for groups of {GROUPS} elements of a row, of whose number K is a multiple; got {q.block} and K = {k}"
    if q.scale.has_zero_point() != (q.format == UINT4) or _buffers(rhs)[1].dtype != torch.float32:
        return "for signed codes, and unsigned ones with zero points, with scales in float32"
    if bias is not None and (bias.dim() != 1 or bias.dtype not in REALS):
        return f"for a bias with one value for each column, in {REALS}"
    return None


def _declines_lhs(call: Call, lhs: Any) -> str | None:
    """Why a left factor is neither numbers in bfloat16 nor codes of 8 bits with a scale for each row, or None."""
    if not isinstance(lhs, Operand):
        return None if lhs.dtype == torch.bfloat16 else f"for bfloat16 or 8 bits beside 4 bits, not {lhs.dtype}"
    q = lhs.quantizer
    if q.format.dtype not in BYTES or q.per_byte() > 1 or not (q.format.is_integer or q.format.is_float):
        return f"for bfloat16 or 8 bits beside 4 bits, not {q}"
    if q.flat or q.layout is not None or q.hadamard is not None or usage(call, LHS) != copies.ROWWISE:
        return f"for the plain form of blocks of a tensor's dimensions, not {q}"
    if q.scale.is_compound or q.scale.block_scale_format is not None or q.scale.has_offset():
        return f"for scales in float32, not {q}"
    if block_of(lhs, copies.ROWWISE)[-1] != -1:
        return f"for a scale of whole rows on the left, not {q}"
    return "requantizes an exact sum" if by_sum(call.output) else None


def _buffers(rhs: Operand) -> list[Tensor]:
    """Codes and scales, and zero points if there are any."""
    return list(rhs.of(copies.ROWWISE).tensors)


def _run(call: Call) -> Any:
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    x, beside = lhs, (None, None)
    if isinstance(lhs, Operand):
        left = plain(lhs, copies.ROWWISE)
        x, beside = left.codes, (scale_of_rows(left), zero_of(left, -1))
    codes, scale, *zero = _buffers(rhs)
    out = call.output if call.output in REALS else torch.float32
    group = per_dimension(rhs.quantizer.block, 2)[1]
    args = (x.reshape(-1, x.shape[-1]), codes, scale, zero[0] if zero else None, bias, *beside)
    y = gpu.nibble_mm(*args, group=group, out_dtype=out)
    y = y.reshape(*lhs.shape[:-1], rhs.shape[0])
    return y if call.output == out else finish(call, y)


NIBBLES = Kernel("GPU product of 4 bits", _declines, _run)
