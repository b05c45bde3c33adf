"""softmax and log_softmax.

With m = max x, e = exp(x - m) and S = Σ e in fixed point (hop.numerics.row_sums),

    softmax       e · float32(1 / S)
    log_softmax   (x - m) - log(float32(S))

in float32, each operation rounded separately, exp and log correctly rounded. For float64 operands ATen's operators are
used.
"""

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operators import SOFTMAX, aten
from hop.impls.scaled.calls import Call, compute_dtype, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.native_rows import ROWS
from hop.impls.scaled.outputs import by_integers
from hop.numerics import functions, row_sums

_LOG = (aten.log_softmax.int, aten._log_softmax.default)


def is_log(call: Call) -> bool:
    return call.op in _LOG


def dimension(call: Call) -> int:
    """The dimension that is normalized."""
    return call.args[1] % max(call.args[0].dim(), 1)


def _check(call: Call) -> None:
    ndim, dim = call.args[0].dim(), call.args[1]
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(
            f"scaled: argument 'dim' of {call.op} must be from {-max(ndim, 1)} to {max(ndim, 1) - 1} for an operand of "
            f"{ndim} dimensions, got {dim}"
        )
    row_sums.check("scaled", call.op, [call.args[0].shape[dim]] if ndim else [])


def _softmax(call: Call) -> Tensor:
    x, dim = values(call.args[0], compute_dtype(call)), dimension(call)
    if x.dtype != torch.float32 or functions.are_of_runtime() or tracing.known_equal(x.numel(), 0):
        return call.op(x, dim, *([False] if call.op.name().startswith("aten::_") else []))
    if x.dim() == 0:
        return _rows(call, x.reshape(1), 0).reshape(())
    return _rows(call, x, dim)


def _rows(call: Call, x: Tensor, dim: int) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    e = functions.apply("exp", shifted)
    total, invalid = row_sums.sum_of_fractions(e, [dim]), e.isnan().any(dim, keepdim=True)
    if is_log(call):  # where separates two casts, of which Inductor in torch 2.11 would drop the first
        return shifted - functions.apply("log", torch.where(invalid, torch.nan, total.to(torch.float32)))
    return e * torch.where(invalid, torch.nan, total).reciprocal().to(torch.float32)


def _places(call: Call, ndim: int) -> dict[int, Places]:
    return {0: {d: d for d in range(ndim) if d != dimension(call)}}


def _buffers(call: Call) -> list[Tensor] | None:
    return by_integers(call, dim=call.args[1])


MEANINGS = {SOFTMAX: Meaning(_softmax, places=_places, check=_check, buffers=_buffers, kernels=(ROWS,))}
