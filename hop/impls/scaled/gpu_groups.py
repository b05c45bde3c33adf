"""Grouped products on GPUs: rows sorted by group, times their group's matrix, in one kernel that reads the sizes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hop.dispatch.kernel import Declined
from hop.dispatch.operand import Operand
from hop.impls.scaled.gpu import BLOCK, zero_of
from hop.impls.scaled.operands import PlainForm
from hop.impls.scaled.products import group_scale
from hop.kernels.gpu import product as gpu
from hop.numerics import copies
from hop.numerics.blocks import Block

if TYPE_CHECKING:
    from cutlass_kernels.product import Product


def asked(
    x: Operand, weight: Operand, ends: Tensor, bias: Tensor | None, dtype: torch.dtype, columns: bool
) -> "Product":
    """Describe the product for cutlass_kernels. Raises Declined if it is not supported.

    Args:
        x: (S, K), the rows. Rows after the last end are in no group and give zeros.
        weight: (E, R, K), the matrices; (E, K, R) if products sum over their first dimension.
        ends: (E,), the end of each group.
        bias: (E, R).
        dtype: the dtype of the result, (S, R).
        columns: whether products sum over the first dimension of each matrix.
    """
    for operand in (x, weight):
        if operand.quantizer.per_byte() > 1 or operand.usages != (copies.ROWWISE,):
            raise Declined(f"for codes of 8 bits, in rows alone, not {operand.quantizer} with usages {operand.usages}")
    along = -2 if columns else -1
    of_rows, of_matrix = PlainForm.of(x, copies.ROWWISE), PlainForm.of(weight, copies.ROWWISE)
    left, right = of_rows.bytes(), of_matrix.bytes()
    if not isinstance(right.zero, int) or right.zero != 0:
        raise Declined("the matrices have zero points")
    scales = _scales(left, right, of_rows.block, of_matrix.block, along)
    codes = right.codes if columns else right.codes.mT
    others = {"lhs_zero": zero_of(left, -1), "bias": bias}
    named = {name: t for name, t in others.items() if t is not None}
    return gpu.product(left.codes, codes, dtype, offs=ends.to(torch.int32), **scales, **named)


def asked_in_depth(
    lhs: Tensor, rhs: Tensor, ends: Tensor, dtype: torch.dtype, lhs_scale: Tensor, rhs_scale: Tensor
) -> "Product":
    """Describe a product for each group of the summed dimension, (E, R, K), for cutlass_kernels.

    Args:
        lhs, rhs: (S, R) and (S, K), codes of 8 bits.
        ends: (E,), the end of each group.
        lhs_scale, rhs_scale: (E, R) and (E, K), with sizes of 1 where all are equal; or in blocks of 128 along the
            summed dimension, (R, S / 128) and (S / 128, K).
    """
    return gpu.product(lhs.mT, rhs, dtype, offs=ends.to(torch.int32), lhs_scale=lhs_scale, rhs_scale=rhs_scale)


def _scales(left: Operand, right: Operand, of_rows: Block, of_matrix: Block, along: int) -> dict[str, Tensor]:
    if left.quantizer.format.is_integer != right.quantizer.format.is_integer:
        raise Declined("for two factors of integers or of floats")
    each, *rest = of_matrix
    if each != 1 and right.shape[0] != 1:
        raise Declined("a scale of several matrices")
    if of_rows[-1] == -1 and of_matrix[along] == -1:
        scale = group_scale(right, along, 0)
        return {"lhs_scale": group_scale(left, -1, 0).reshape(-1), "rhs_scale": scale.reshape(scale.shape[0], -1)}
    if left.quantizer.format.is_integer or of_rows != (1, BLOCK) or rest != [BLOCK, BLOCK]:
        wanted = f"scales of rows, and of blocks of 1 x {BLOCK} and {BLOCK} x {BLOCK}"
        raise Declined(f"for {wanted}, not {of_rows} and {of_matrix}")
    return {"lhs_scale": left.scale, "rhs_scale": right.scale if along == -2 else right.scale.mT}
