"""Products of matrices, batches of matrices, and vectors."""

from torch import Tensor

from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, MATRIX, RHS
from hop.impls.scaled import kernels
from hop.impls.scaled.calls import Call, usage
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.operands import block_of
from hop.impls.scaled.products import declines_one_sum, one_sum, real_product


def _declines_sum(call: Call) -> str | None:
    if (reason := declines_one_sum(call)) is not None:
        return reason
    lhs, rhs = call.find(LHS), call.find(RHS)
    sides = ((lhs, LHS, -1), (rhs, RHS, -1 if rhs.dim() == 1 else call.roles.rhs_sums))
    if any(block_of(x, usage(call, role))[dim] != -1 for x, role, dim in sides):
        return "its scales come in groups, each with a separate sum"
    return None


def _places(call: Call, ndim: int) -> dict[int, Places] | None:
    """Rows of the result are sharded like those of lhs, columns like those of rhs."""
    dims = {i: x.dim() for i, x in enumerate(call.args) if isinstance(x, Tensor | Operand)}
    roles = {call.roles.role(i): i for i in dims}
    lhs, rhs = dims[roles[LHS]], dims[roles[RHS]]
    if min(lhs, rhs) < 2:
        return None
    maps = {roles[LHS]: {ndim - 1 - d: lhs - 1 - d for d in range(1, lhs)}}
    if call.roles.rhs_sums == -1:
        maps[roles[RHS]] = {ndim - 1: 0}
    else:
        maps[roles[RHS]] = {ndim - 1 - d: rhs - 1 - d for d in range(rhs) if d != 1}
    if BIAS in roles:
        n = dims[roles[BIAS]]
        maps[roles[BIAS]] = {ndim - 1 - d: n - 1 - d for d in range(n)}
    return maps


MEANINGS = {MATRIX: Meaning(real_product, one_sum, _declines_sum, _places, kernels.TABLE)}
