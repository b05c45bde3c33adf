"""Rows that are sorted by group, times the matrix of their group, on GPUs: one kernel, which reads the sizes itself."""

from typing import Any

import torch
from torch import Tensor

from hop.dispatch.operand import Operand
from hop.impls.scaled.operands import block_of, plain
from hop.impls.scaled.products import group_scale, zeros
from hop.kernels.gpu import product as gpu
from hop.numerics import copies

BLOCK = 128  # of the scales of blocks that kernels take
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def asked(
    x: Operand, weight: Operand, ends: Tensor, bias: Tensor | None, dtype: torch.dtype, columns: bool
) -> "Any | str":
    """A product of cutlass_kernels, or why it is none.

    Args:
        x: (S, K), the rows. Those after the last end are in no group, and give zeros.
        weight: (E, R, K), the matrices; where products sum over their first dimension (E, K, R).
        ends: (E,), where each group ends.
        bias: (E, R).
        dtype: of the result, (S, R).
        columns: whether products sum over the first dimension of the matrices.
    """
    for operand in (x, weight):
        if (reason := _unread(operand)) is not None:
            return reason
    along = -2 if columns else -1
    left, right = plain(x, copies.ROWWISE), plain(weight, copies.ROWWISE)
    if not isinstance(right.zero, int) or right.zero != 0:
        return "the matrices have zero points"
    sides = _scales(left, right, block_of(x, copies.ROWWISE), block_of(weight, copies.ROWWISE), along)
    if isinstance(sides, str):
        return sides
    zero = zeros(left, -1)
    if isinstance(zero, Tensor):
        sides["lhs_zero"] = zero.reshape(-1)
    elif zero:
        sides["lhs_zero"] = torch.full((1,), zero, dtype=torch.int32, device=left.codes.device)
    if bias is not None:
        sides["bias"] = bias
    codes = right.codes if columns else right.codes.mT
    return gpu.product(left.codes, codes, dtype, offs=ends.to(torch.int32), **sides)


def asked_in_depth(
    lhs: Tensor, rhs: Tensor, ends: Tensor, dtype: torch.dtype, lhs_scale: Tensor, rhs_scale: Tensor
) -> Any:
    """A product of cutlass_kernels for each group of what is summed: (E, R, K).

    Args:
        lhs, rhs: (S, R) and (S, K), codes of 8 bits.
        ends: (E,), where each group ends.
        lhs_scale, rhs_scale: of each group (E, R) and (E, K), with sizes of 1 where all are alike; or in blocks of 128
            of what is summed, (R, S / 128) and (S / 128, K).
    """
    return gpu.product(lhs.mT, rhs, dtype, offs=ends.to(torch.int32), lhs_scale=lhs_scale, rhs_scale=rhs_scale)


def _unread(x: Operand) -> str | None:
    """Why kernels do not read the codes of an operand as they lie, or None."""
    q = x.quantizer
    if q.flat or q.layout is not None or q.scale.is_compound or q.hadamard is not None or q.per_byte() > 1:
        return f"for codes of 8 bits in plain blocks of a tensor's dimensions, not {q}"
    if q.scale.block_scale_format is not None or q.scale.has_offset() or x.usages != (copies.ROWWISE,):
        return f"for scales in float32, in rows alone, not {q}"
    if not q.format.is_integer and q.format.dtype not in _FLOAT8:
        return f"for int8, uint8 and 8-bit floats, not {q.format.name}"
    return None


def _scales(left: Operand, right: Operand, of_rows: Any, of_matrix: Any, along: int) -> "dict[str, Any] | str":
    if left.quantizer.format.is_integer != right.quantizer.format.is_integer:
        return "for two factors of integers or of floats"
    each, *rest = of_matrix
    if each != 1 and right.shape[0] != 1:
        return "a scale of several matrices"
    if of_rows[-1] == -1 and of_matrix[along] == -1:
        scale = group_scale(right, along, 0)
        return {"lhs_scale": group_scale(left, -1, 0).reshape(-1), "rhs_scale": scale.reshape(scale.shape[0], -1)}
    if not left.quantizer.format.is_integer and of_rows == (1, BLOCK) and rest == [BLOCK, BLOCK]:
        return {"lhs_scale": left.scale, "rhs_scale": right.scale if along == -2 else right.scale.mT}
    return f"for scales of rows, and of blocks of 1 x {BLOCK} and {BLOCK} x {BLOCK}, not {of_rows} and {of_matrix}"
