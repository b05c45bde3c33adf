"""Operators that select elements: views, bounds, maxima, minima, nearest neighbors and concatenation.

If the operand has one scale, so has the result.
"""

import torch
from torch import Tensor

from hop.compat.export import is_lowering
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BOUND, CONCATENATE, EXTREME, MAXIMUM, NEAREST, VIEW
from hop.impls.scaled.calls import Call, compute_dtype, integer_function, tensors, values
from hop.impls.scaled.family import Meaning, Places, elementwise, gathered
from hop.impls.scaled.operands import centered, plain
from hop.impls.scaled.outputs import by_integers
from hop.impls.scaled.products import Sum
from hop.numerics import blocks, copies


def _chosen(call: Call) -> Tensor:
    args = [values(x, compute_dtype(call)) for x in call.args]
    return call.op(*args, **call.kwargs)


def _declines(call: Call) -> str | None:
    operands = [x for x in tensors(call.args) if isinstance(x, Operand)]
    (x,) = operands if len(operands) == 1 else (None,)
    whole = x is not None and all(b == -1 for b in blocks.per_dimension(x.quantizer.block, x.dim()))
    return None if whole else "it takes one operand with one scale"


def _declines_bound(call: Call) -> str | None:
    return _declines(call) if call.roles.bounds == (0.0, None) else f"{call.op} is none"


def _exactly(call: Call) -> Sum:
    operand = plain(call.args[0], call.args[0].usages[0])
    # PyTorch cannot pool integers on GPUs, nor in one dimension unless the program is lowered, nor repeat them.
    family = call.roles.family
    pools = family is MAXIMUM and not (is_lowering() and call.device.type == "cpu")
    chosen = centered(operand).to(torch.float32 if pools or family is NEAREST else torch.int32)
    total = call.op(chosen, *call.args[1:], **call.kwargs).to(torch.int32)
    step = operand.scale.reshape(())
    return Sum(total, step, torch.ones_like(step))


def _where_elements_stay(call: Call, ndim: int) -> dict[int, Places] | None:
    return (elementwise if call.roles.stays else gathered)(call, ndim)


def _joined_codes(call: Call) -> list[Tensor] | None:
    """The codes of a concatenation, each operand rescaled to the result in integers; None without an integer
    convention.
    """
    if integer_function(call.output) is None:
        return None
    operands = [plain(x, copies.ROWWISE) for x in call.args[0]]
    dim = call.args[1] if len(call.args) > 1 else 0
    return by_integers(call, others=[(x.codes, x.scale, x.zero) for x in operands[1:]], dim=dim)


MEANINGS = {
    VIEW: Meaning(_chosen, _exactly, _declines, _where_elements_stay),
    BOUND: Meaning(_chosen, _exactly, _declines_bound, elementwise),
    CONCATENATE: Meaning(_chosen, buffers=_joined_codes),
    **dict.fromkeys((EXTREME, MAXIMUM, NEAREST), Meaning(_chosen, _exactly, _declines)),
}
