"""Replace rounding by noise: such operands become floats before the operator runs.

The rest of the scheme quantizes the other operands; if there are none, the operator runs in floats. So an operator in a
graph never has noise itself: hop_noise and hop_fake_quantize come before it.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat.pytree import Args
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.impls.quantize import dequantize, quantize
from hop.impls.quantized import calls, operands
from hop.impls.quantized.calls import Scales, SchemeCall
from hop.impls.scaled import activated
from hop.numerics.schemes import Scheme

_FIELDS = {LHS: "lhs", RHS: "rhs"}


class Noisy(NamedTuple):
    """A call without noise. The scheme is None if no operand is quantized any more."""

    scheme: Scheme | None
    scales: Scales
    args: Args


def with_noise(call: SchemeCall) -> Noisy:
    """Replace operands with noise by floats. Raises for an invalid call."""
    calls.check(call)
    noisy: dict[str, Tensor] = {}
    left: dict[str, object] = {}
    scales = call.scales
    for role, field in _FIELDS.items():
        q, x = call.quantizer(role) if call.place(role) is not None else None, call.find(role)
        if q is None:
            left[field] = None
        elif q.adds_noise():
            left[field] = None
            if not calls.is_quantized(x):
                noisy[role] = operands.numbers(call, role, x.dtype)
            scales = scales._replace(**{field: None, f"{field}_zero_point": None})
    args = call.replaced(noisy)
    rest = any(q is not None for q in (left.get(field, getattr(call.scheme, field)) for field in _FIELDS.values()))
    return Noisy(replace(call.scheme, **left) if rest else None, scales, args)


def in_floats(call: SchemeCall, args: tuple[object, ...]) -> Tensor:
    """The result of a call in which no operand is quantized any more."""
    q = call.scheme.output
    dtype = call.dtype if q is None else torch.float32
    call = call._replace(args=args)
    floats = {role: _floats(call.find(role), dtype) for role in (LHS, RHS, BIAS) if call.place(role) is not None}
    y = call.op(*call.replaced(floats), **call.kwargs).to(dtype)
    if q is None:
        return y
    scale, zero_point = calls.fitted(call, calls.OUTPUT, y)
    result = quantize(q, activated(y, q.scale), scale=scale, zero_point=zero_point)
    return result if result.dtype == call.dtype else result.rebuilt(result.buffers(), dtype=call.dtype)


def _floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(x).to(dtype) if calls.is_quantized(x) else x.to(dtype)
