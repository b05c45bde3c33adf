"""The Hadamard transform of blocks of the last dimension.

Sums and differences are in float32, in the order of hop::hadamard (hop/dispatch/own_operators.py), with 1 / √size
last. In float64 if the operand has that dtype.
"""

from torch import Tensor

from hop.dispatch.operators import TRANSFORM
from hop.impls.scaled.calls import Call, compute_dtype, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.native_rows import ROWS
from hop.numerics.hadamard import check_size


def _check(call: Call) -> None:
    x, size = call.args
    check_size(size, x.shape, f"scaled: argument 'size' of {call.op}")


def _transformed(call: Call) -> Tensor:
    x, size = call.args
    return call.op(values(x, compute_dtype(call)), size)


def _places(call: Call, ndim: int) -> dict[int, Places]:
    return {0: {d: d for d in range(ndim - 1)}}


MEANINGS = {TRANSFORM: Meaning(_transformed, places=_places, check=_check, kernels=(ROWS,))}
