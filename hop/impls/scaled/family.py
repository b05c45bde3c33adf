"""Meaning: what scaled makes of a family of operators."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.impls.scaled.calls import Call
from hop.impls.scaled.products import Sum

Places = dict[int, int]
"""Which dimension of an argument each dimension of the result is."""


def gathered(call: Call, ndim: int) -> dict[int, Places] | None:
    """Nothing is known of dimensions: operands on several processes are gathered."""
    return None


def elementwise(call: Call, ndim: int) -> dict[int, Places]:
    """Operands broadcast to the result, from their last dimensions on."""
    dims = {i: x.dim() for i, x in enumerate(call.args) if isinstance(x, Tensor | Operand)}
    return {i: {ndim - 1 - d: n - 1 - d for d in range(n)} for i, n in dims.items()}


@dataclass(frozen=True)
class Meaning:
    """What a family of operators means to scaled. A file of hop/impls/scaled/families/ has it; the row of the family in
    hop/dispatch/operators.py names the file. `real` is enough: what else there is makes it exact, or fast.

    real: the result before it is cast or quantized, in `calls.compute_dtype`.
    sum: the result as one sum of integers and its unit, bias included, where it is one; outputs that are found from the
        integer sum (Requantization.exact) take it.
    declines_sum: why a call whose quantized operands are all integers is no such sum, None if it is one.
    places: for each argument, which of its dimensions is which of the result, of so many dimensions: along these a
        DTensor stays sharded. None where that is not known.
    kernels: faster ways, in the order in which they are matched.
    check: raises for a call that breaks a rule of the family's own.
    buffers: the buffers of a quantized result where they are found otherwise than from `real`, bit for bit the same;
        None where they are not.
    """

    real: Callable[[Call], Tensor]
    sum: Callable[[Call], Sum] | None = None
    declines_sum: Callable[[Call], str | None] = lambda call: f"{call.op} is none"
    places: Callable[[Call, int], dict[int, Places] | None] = gathered
    kernels: tuple[Kernel, ...] = ()
    check: Callable[[Call], None] = lambda call: None
    buffers: Callable[[Call], list[Tensor] | None] = lambda call: None
