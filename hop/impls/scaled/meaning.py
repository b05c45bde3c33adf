"""The reference of scaled in plain ATen.

Integer operands: the products of codes minus zero points are summed exactly, modulo 2^32, over each group of the summed
dimension in which no scale changes. Then in float32, each operation rounded separately,

    y = Σ_groups (float32(sum) · s_lhs) · s_rhs            in the order of the groups
    y = y · alpha + bias · beta                            where there are alpha, beta and bias

If the right factor has two-level scales, s_rhs is their product; if it has offsets m, each term is

    (float32(sum) · s_lhs) · s_rhs - (float32(sum of lhs) · s_lhs) · m

An int32 bias is added to the sum instead. Other operands are dequantized to float32, or to float64 if one of them has
that dtype, and the operator runs in that dtype. Means are computed in float64 and rounded to float32. Each family's
file describes what it computes differently.

The result is cast once to a dtype, or quantized once, as by hop.quantize or as hop.requantization specifies.
"""

from importlib import import_module

from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.dispatch.operators import SCALED, Family
from hop.impls.scaled.calls import Call, Result, by_sum, is_integer, tensors
from hop.impls.scaled.family import Meaning
from hop.impls.scaled.outputs import finish, requantized
from hop.impls.scaled.products import Sum

_FOLDER = f"{__package__}.families"

MEANINGS: dict[Family, Meaning] = {}
for _family in {row.family: None for row in SCALED.values()}:
    MEANINGS[_family] = import_module(f"{_FOLDER}.{_family.file}").MEANINGS[_family]


def of(call: Call) -> Meaning:
    """The Meaning of the operator's family."""
    return MEANINGS[call.roles.family]


def reference(call: Call) -> Result:
    """The result of scaled: a tensor, or the buffers of a quantized one."""
    if by_sum(call.output) and not tracing.is_describing():
        return requantized(call, exact(call))
    known = of(call).buffers(call)
    return finish(call, real(call)) if known is None else known


def described(call: Call) -> Result:
    """The reference for meta tensors: fewer operators, without scales, groups and function arithmetic.

    With symbolic sizes it is the reference itself, including its guards.
    """
    if not all(isinstance(n, int) for x in tensors(call.args) for n in x.shape):
        return reference(call)
    with tracing.describing():
        return reference(call)


def real(call: Call) -> Tensor:
    """The result before it is cast or quantized."""
    return of(call).real(call)


def exact(call: Call) -> Sum:
    """The exact sum of a call for which `exact_declines` returns None, including its bias."""
    compute = of(call).sum
    assert compute is not None
    return compute(call)


def exact_declines(call: Call) -> str | None:
    """The reason why a call is not one exact sum; None if it is."""
    if not all(is_integer(x) for x in tensors(call.args) if isinstance(x, Operand)):
        return "its operands are not integers"
    return of(call).declines_sum(call)
