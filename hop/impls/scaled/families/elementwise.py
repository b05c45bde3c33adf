"""Elementwise operators with two operands: sums, products, quotients, choices and slopes by channel."""

import math

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.dispatch.operators import ADD, CHOICE, DIVIDE, MULTIPLY, PRELU, aten
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


def _prelu(call: Call) -> Tensor:
    x, slope = (values(x, compute_dtype(call)) for x in call.args[:2])
    return torch.where(x > 0, x, x * _of_channels(call, slope))


def _of_channels(call: Call, slope: Tensor) -> Tensor:
    """Slopes, one or one for each index of dimension 1, as a tensor that broadcasts."""
    ndim = call.args[0].dim()
    return slope.reshape([-1 if d == min(1, ndim - 1) else 1 for d in range(ndim)])


def _prelu_codes(call: Call) -> list[Tensor] | None:
    """The codes computed in integers; None without an integer convention."""
    if integer_function(call.output) is None:
        return None
    other = plain(call.args[1], copies.ROWWISE)
    return by_integers(
        call, other=_of_channels(call, other.codes), other_scale=other.scale, other_zero_point=other.zero
    )


def _check_prelu(call: Call) -> None:
    x, slope = call.args[:2]
    size = x.shape[1] if x.dim() > 1 else 1
    if slope.dim() > 1 or not any(tracing.known_equal(math.prod(slope.shape), n) for n in (1, size)):
        raise ValueError(
            f"scaled: argument 'weight' of {call.op} must have one number, or one for each of the {size} channels in "
            f"dimension 1, got shape {tuple(slope.shape)}; give such slopes"
        )


MEANINGS = {
    MULTIPLY: Meaning(_multiply, _exact_product, _declines_product, elementwise, buffers=_codes),
    ADD: Meaning(_add, places=elementwise, buffers=_codes),
    DIVIDE: Meaning(_divide, places=elementwise),
    CHOICE: Meaning(_choose, places=elementwise),
    PRELU: Meaning(_prelu, check=_check_prelu, buffers=_prelu_codes),
}
