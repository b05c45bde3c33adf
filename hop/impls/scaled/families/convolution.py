"""Convolutions in scaled."""

from torch import Tensor

from hop.dispatch.operand import Operand
from hop.dispatch.operators import CONVOLUTION, LHS, RHS
from hop.impls.scaled.calls import Call
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.native_convolution import NATIVE_CONVOLUTION
from hop.impls.scaled.products import declines_one_sum, one_sum, real_product


def _places(call: Call, ndim: int) -> dict[int, Places]:
    batched = call.find(LHS).dim() == call.find(RHS).dim()
    operands = {i: call.roles.role(i) for i, x in enumerate(call.args) if isinstance(x, Tensor | Operand)}
    return {i: {0: 0} if batched and role == LHS else {} for i, role in operands.items()}


MEANINGS = {CONVOLUTION: Meaning(real_product, one_sum, declines_one_sum, _places, (NATIVE_CONVOLUTION,))}
