"""Meaning: the definition of a family of operators for scaled."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.impls.scaled.calls import Call
from hop.impls.scaled.products import Sum

Places = dict[int, int]
"""From dimensions of the result to dimensions of an argument."""


def gathered(call: Call, ndim: int) -> dict[int, Places] | None:
    """Unknown correspondence of dimensions: DTensor operands are gathered."""
    return None


def elementwise(call: Call, ndim: int) -> dict[int, Places]:
    """Operands broadcast to the result, aligned at their last dimensions."""
    dims = {i: x.dim() for i, x in enumerate(call.args) if isinstance(x, Tensor | Operand)}
    return {i: {ndim - 1 - d: n - 1 - d for d in range(n)} for i, n in dims.items()}


@dataclass(frozen=True)
class Meaning:
    """The definition of a family of operators for scaled.

    The files of hop/impls/scaled/families/ create them; the family's row in hop/dispatch/operators.py names the file.
    Only `real` is required; the other fields make the family exact or fast.

    Args:
        real: the result before it is cast or quantized, in `calls.compute_dtype`.
        sum: the result as one integer sum with its unit, including the bias. Required by outputs that are computed from
            the integer sum (Requantization.exact).
        declines_sum: why a call whose quantized operands are all integers is not one such sum; None if it is.
        places: for each argument, the correspondence of the result's dimensions (their number is given) to its own.
            Along
            these dimensions a DTensor stays sharded. None if unknown.
        kernels: fast implementations, in matching order.
        check: raises for calls that this family does not accept.
        buffers: the buffers of a quantized result that is not computed from `real`, with the same bits; else None.
    """

    real: Callable[[Call], Tensor]
    sum: Callable[[Call], Sum] | None = None
    declines_sum: Callable[[Call], str | None] = lambda call: f"{call.op} is not an integer sum"
    places: Callable[[Call, int], dict[int, Places] | None] = gathered
    kernels: tuple[Kernel, ...] = ()
    check: Callable[[Call], None] = lambda call: None
    buffers: Callable[[Call], list[Tensor] | None] = lambda call: None
