"""Elementwise functions: activations, and gated products, which multiply the activation by another tensor.

In float32 each function is rounded once (hop.numerics.functions), so every correctly rounded implementation gives the
same bits. On 8-bit codes with one scale a function becomes a table of its results: of floats, or of codes if the output
has one scale too. Every runtime reads such tables in the same way.
"""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import FUNCTION, GATED, aten
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, Result, compute_dtype, is_integer, values
from hop.impls.scaled.family import Meaning, elementwise
from hop.impls.scaled.gpu_rows import GPU_ROWS
from hop.impls.scaled.native_rows import ROWS, function_of
from hop.impls.scaled.operands import plain
from hop.impls.scaled.outputs import by_integers, finish, given_buffers
from hop.numerics import copies, functions, memory_format
from hop.numerics.formats import Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static


def _applied(call: Call, x: Tensor) -> Tensor:
    name = function_of(call)
    return functions.apply(name, x) if name in functions.NAMES else _PIECEWISE[name](x, *call.args[1:])


def _applied_here(call: Call, x: Tensor) -> Tensor:
    """Apply the function, or the runtime's own operator if a program is being lowered for that runtime."""
    if not functions.are_of_runtime():
        return _applied(call, x)
    if call.op is aten.exp2.default:
        return torch.pow(2.0, x)  # core ATen has no exp2
    own = {torch.ops.hop.silu_mul.default: aten.silu.default, torch.ops.hop.gelu_mul.default: aten.gelu.default}
    rest = () if call.op in own else call.args[1:]
    return own.get(call.op, call.op)(x, *rest, **call.kwargs)


def _hardsigmoid(x: Tensor) -> Tensor:
    return (x + 3).clamp(0, 6) / _six(x)


def _hardswish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / _six(x)


def _six(x: Tensor) -> Tensor:
    return torch.full_like(x, 6)  # tensor / number may become a product with 1 / number


def _leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * slope)


_PIECEWISE: dict[str, Callable[..., Tensor]] = {
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "leaky_relu": _leaky_relu,
}


def _function(call: Call) -> Tensor:
    small = _of_all_codes(call)
    if small is None:
        return _applied_here(call, values(call.args[0], compute_dtype(call)))
    return _taken(_applied(small, values(small.args[0], torch.float32)), call)


def _gated(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    return _applied_here(call, a) * b


# ---- tables


def _buffers(call: Call) -> list[Tensor] | None:
    """The codes of the result, computed in integers, or by a table if both sides have one scale; else None."""
    if (buffers := by_integers(call, **_slope(call))) is not None:
        return buffers
    q, small = call.output, _of_all_codes(call)
    if small is None or not _has_one_scale(q) or q.per_byte() > 1 or type(q.scale) is not Static:
        return None
    scales = [None if t is None else t.reshape(1) for t in (call.output_scale, call.output_zero_point)]
    if any(t is not None and t.numel() != 1 for t in (call.output_scale, call.output_zero_point)):
        return None
    small = small._replace(output_scale=scales[0], output_zero_point=scales[1])
    table = finish(small, _applied(small, values(small.args[0], torch.float32)))[0]
    codes = _taken(table, call)
    codes = memory_format.dense(codes) if q.keeps_memory_format() else codes.contiguous()
    return [codes, *given_buffers(call, list(codes.shape))]


def _slope(call: Call) -> dict[str, float]:
    """The slope of a leaky relu below 0, for integer conventions."""
    if call.op is not aten.leaky_relu.default:
        return {}
    return {"slope": float([*call.args, call.kwargs.get("negative_slope", 0.01)][1])}


def _of_all_codes(call: Call) -> Call | None:
    """The call on an operand with every code once, in order; None if a table cannot be used."""
    if not _is_table(call):
        return None
    operand = plain(call.args[0], copies.ROWWISE)
    codes, *stored = operand.tensors
    format = operand.quantizer.format
    assert isinstance(format, Integer)
    every = torch.arange(format.low, format.high + 1, device=codes.device, dtype=torch.int32).to(codes.dtype)
    one = Operand(
        Quantizer(format, (-1,), operand.quantizer.scale),
        (every, *(t.reshape(1) for t in stored)),
        (copies.ROWWISE,),
        tuple(every.shape),
    )
    return call._replace(args=(one, *call.args[1:]))


def _is_table(call: Call) -> bool:
    x = call.args[0]
    if not is_integer(x) or copies.ROWWISE not in x.usages or not _has_one_scale(x.quantizer):
        return False
    return compute_dtype(call) == torch.float32 and not any(tracing.known_equal(n, 0) for n in x.shape)


def _has_one_scale(q: object) -> TypeGuard[Quantizer]:
    return isinstance(q, Quantizer) and not q.flat and all(b == -1 for b in q.block)


def _taken(table: Tensor, call: Call) -> Tensor:
    """Look up each code's entry in the table."""
    operand = plain(call.args[0], copies.ROWWISE)
    format = operand.quantizer.format
    assert isinstance(format, Integer)
    places = operand.codes.to(torch.int32) - format.low
    return table.index_select(0, places.reshape(-1)).reshape(places.shape)


def _reference(call: Call) -> Result:
    known = _buffers(call)
    return finish(call, _function(call)) if known is None else known


def _prepare_table(call: Call) -> Plan:
    if not _is_table(call):
        raise Declined("for integers with one scale")
    return call.plan(_reference)


TABLE = Kernel("table of codes", _prepare_table)

MEANINGS = {
    FUNCTION: Meaning(_function, places=elementwise, buffers=_buffers, kernels=(TABLE, ROWS, GPU_ROWS)),
    GATED: Meaning(_gated, places=elementwise, kernels=(ROWS, GPU_ROWS)),
}
