"""The meaning of scaled, in plain ATen.

Integer operands. The products of codes, each less its zero point, are summed exactly, modulo 2^32, over each group of
the summed dimension in which no scale changes; then, in float32, each operation rounded by itself,

    y = Σ_groups (float32(sum) · s_lhs) · s_rhs          in the order of the groups
    y = y · alpha + bias · beta                          where there are alpha, beta and bias

A right factor whose scales come in two levels has the s_rhs that they make; of one with offsets m each term is

    (float32(sum) · s_lhs) · s_rhs - (float32(sum of lhs) · s_lhs) · m

A bias of int32 is added to the sum instead. Other operands are dequantized to float32, float64 if one of them has that
dtype, and the operator runs in it. Means are taken in float64 and rounded to float32. What a family computes otherwise
stands in its file.

The result is cast once to a dtype, or quantized once, as hop.quantize does or as hop.requantization says.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.dispatch.operators import SCALED, Family
from hop.impls.scaled.calls import Call, by_sum, is_integer, tensors
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.outputs import finish, requantized
from hop.impls.scaled.products import Sum

_FOLDER = f"{__package__}.families"

MEANINGS: dict[Family, Meaning] = {}
for _family in {row.family: None for row in SCALED.values()}:
    MEANINGS[_family] = import_module(f"{_FOLDER}.{_family.file}").MEANINGS[_family]


def of(call: Call) -> Meaning:
    """What the family of its operator means."""
    return MEANINGS[call.roles.family]


def reference(call: Call) -> Any:
    """What scaled returns: a tensor, or the buffers of a quantized one."""
    if by_sum(call.output) and not tracing.is_describing():
        return requantized(call, exact(call))
    known = of(call).buffers(call)
    return finish(call, real(call)) if known is None else known


def described(call: Call) -> Any:
    """What the reference gives, of tensors without values: from fewer operators, which leave out scales, groups and
    the arithmetic of functions. Where a size is a symbol, it is the reference itself, with the guards that it takes."""
    if not all(isinstance(n, int) for x in tensors(call.args) for n in x.shape):
        return reference(call)
    with tracing.describing():
        return reference(call)


def real(call: Call) -> Tensor:
    """The result before it is cast or quantized."""
    return of(call).real(call)


def exact(call: Call) -> Sum:
    """The one sum of a call that `exact_declines` takes, its bias included."""
    compute = of(call).sum
    assert compute is not None
    return compute(call)


def exact_declines(call: Call) -> str | None:
    """Why a call is not one exact sum, or None."""
    if not all(is_integer(x) for x in tensors(call.args) if isinstance(x, Operand)):
        return "its operands are no integers"
    return of(call).declines_sum(call)
