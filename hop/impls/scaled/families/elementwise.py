"""Elementwise operators with two operands: sums, products, quotients and choices."""

import torch
from torch import Tensor

from hop.dispatch.operand import Operand
from hop.dispatch.operators import ADD, CHOICE, DIVIDE, MULTIPLY, aten
from hop.impls.scaled.calls import Call, compute_dtype, integer_function, values
from hop.impls.scaled.family import Meaning, elementwise
from hop.impls.scaled.operands import centered, plain, spread
from hop.impls.scaled.outputs import by_integers
from hop.impls.scaled.products import Sum
from hop.numerics import copies


def _multiply(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    return a * b


def _declines_product(call: Call) -> str | None:
    both = call.op is aten.mul.Tensor and all(isinstance(x, Operand) for x in call.args[:2])
    return None if both else "one factor is not quantized"


def _exact_product(call: Call) -> Sum:
    a, b = (plain(x, x.usages[0]) for x in call.args[:2])
    total = centered(a).to(torch.int32) * centered(b).to(torch.int32)
    return Sum(total, *(spread(g.scale, g.block, g.shape) for g in (a, b)))


def _add(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
    b = b if alpha == 1 else b * alpha  # a separate operation: ATen's kernels would round only once
    return a - b if call.op.overloadpacket is aten.sub else a + b


def _codes(call: Call) -> list[Tensor] | None:
    """The codes of a sum or product computed in integers; None without an integer convention."""
    if integer_function(call.output) is None:
        return None
    other = plain(call.args[1], copies.ROWWISE)
    options = {"other": other.codes, "other_scale": other.scale, "other_zero_point": other.zero}
    if call.roles.family is ADD:
        options["subtracts"] = call.op.overloadpacket is aten.sub
    return by_integers(call, **options)


def _divide(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    # dividing by a number may multiply by 1 / number
    return a / (b if isinstance(b, Tensor) else torch.full_like(a, b))


def _choose(call: Call) -> Tensor:
    return call.op(*(values(x, compute_dtype(call)) for x in call.args))


MEANINGS = {
    MULTIPLY: Meaning(_multiply, _exact_product, _declines_product, elementwise, buffers=_codes),
    ADD: Meaning(_add, places=elementwise, buffers=_codes),
    DIVIDE: Meaning(_divide, places=elementwise),
    CHOICE: Meaning(_choose, places=elementwise),
}
