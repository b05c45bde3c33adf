"""Convert a result to the output: cast, quantized, or requantized from the exact sum."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.dispatch.kernel import Declined
from hop.dispatch.operand import Operand
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import OUTPUT_NAMES, Call, Output, Result, by_sum, fitted, integer_function, tensors
from hop.impls.scaled.operands import plain, spread
from hop.impls.scaled.products import Sum
from hop.numerics import blocks, copies, memory_format
from hop.numerics.formats import Integer
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Requantization
from hop.tensor.buffers.operators import quantize_buffers

_T = TypeVar("_T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def finish(call: Call, y: Tensor) -> Result:
    """Cast or quantize `y` to the output."""
    if isinstance(call.output, torch.dtype):
        return y.to(call.output)
    y = activated(call, y)
    scale, zero_point = fitted(call, y.shape)
    return quantize_buffers(str(call.output), y.to(torch.float32), scale, zero_point, None, [copies.ROWWISE])


def activated(call: Call, y: Tensor) -> Tensor:
    """Clamp `y` to the range of the output's fused activation."""
    convention = call.quantizer.scale.requantization
    return y if convention is None else convention.bounded(y)


def requantized(call: Call, total: Sum) -> list[Tensor]:
    """The buffers of the output, requantized by its convention."""
    q = call.quantizer
    convention = q.scale.requantization
    assert isinstance(convention, Requantization) and isinstance(q.format, Integer)
    shape = list(total.total.shape)
    block = blocks.per_dimension(q.block, len(shape))
    stored = given_buffers(call, shape)
    scale, zero = spread(stored[0], block, shape), q.format.zero
    if len(stored) > 1:
        zero = spread(stored[1], block, shape).to(torch.int32)
    codes = convention.codes(total.total, total.lhs, total.rhs, scale, zero, q.format)
    return [_laid_out(q, codes, shape), *stored]


def _laid_out(q: Quantizer, codes: Tensor, shape: list[int]) -> Tensor:
    """Codes of a result of `shape` in the memory layout of `q`'s buffer."""
    if q.keeps_memory_format():
        return memory_format.dense(codes)
    codes = codes.contiguous()
    return q.format.pack(codes.reshape(shape or [1])) if q.per_byte() > 1 else codes


def by_integers(call: Call, **options: Any) -> list[Tensor] | None:
    """The buffers of a function computed on codes by the output's integer convention; None if it has none.

    `options` are further arguments of the function.
    """
    convention = integer_function(call.output)
    if convention is None:
        return None
    q, first = call.quantizer, tensors(call.args)[0]
    assert isinstance(first, Operand) and isinstance(q.format, Integer)
    operand = plain(first, copies.ROWWISE)
    stored = given_buffers(call, list(operand.shape))
    zero = stored[1] if len(stored) > 1 else q.format.zero
    units = (_number(t) for t in (operand.scale, operand.zero, stored[0], zero))
    codes = convention.codes(operand.codes, *units, q.format, **options)  # type: ignore[attr-defined]
    _check_units(call, convention, stored[0], zero)
    return [_laid_out(q, codes, list(codes.shape)), *given_buffers(call, list(codes.shape))]


def _number(x: Tensor | int) -> Tensor | int:
    """A one-element tensor as a zero-dimensional one, which does not add dimensions to a result."""
    return x.reshape(()) if isinstance(x, Tensor) and x.numel() == 1 else x


def _check_units(call: Call, convention: IntegerFunction, scale: Tensor, zero: Tensor | int) -> None:
    """Raise ValueError unless the output's scale and zero point are the convention's. Skipped in tracing."""
    q = call.quantizer
    assert isinstance(q.format, Integer)
    units = convention.output_units(q.format)
    given = [t for t in (scale, zero) if isinstance(t, Tensor)]
    if units is None or not eager.is_plain_eager():
        return
    if not all(type(t) in PLAIN and t.is_cpu and t.numel() == 1 for t in given):
        return
    asked = tuple(t.item() if isinstance(t, Tensor) else t for t in (scale, zero))
    if asked != units:
        rule = "" if q.scale.has_zero_point() or not units[1] else " by Static(affine=True, ...)"
        raise ValueError(
            f"scaled: {' and '.join(OUTPUT_NAMES)} of {q} must be {units[0]} and {units[1]}, the units of "
            f"{type(convention).__name__} codes, got {asked[0]} and {asked[1]}; give these{rule}"
        )


def given_buffers(call: Call, shape: Sequence[int]) -> list[Tensor]:
    """Scale and zero point of the output as new buffers, for a result of `shape`."""
    return [t.clone(memory_format=torch.contiguous_format) for t in _stored(call, shape)]


def _stored(call: Call, shape: Sequence[int]) -> list[Tensor]:
    """Scale and zero point of the output; they may share the caller's memory."""
    format = call.quantizer.format
    scale, zero_point = fitted(call, shape)
    assert scale is not None
    if zero_point is None:
        return [scale]
    assert isinstance(format, Integer)
    zero_point = zero_point.round() if zero_point.is_floating_point() else zero_point
    return [scale, zero_point.clamp(format.low, format.high).to(format.dtype)]


def stored(call: Call, shape: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Tensor | None]]:
    """A function that returns scale and zero point buffers for a plan's arguments; they may share its memory."""
    q = call.quantizer
    assert isinstance(q.format, Integer)
    info = torch.iinfo(q.format.dtype)
    # while tracing, sizes may be symbolic
    if eager.is_plain_eager() and (q.format.low, q.format.high) == (info.min, info.max):
        own = [t for t in (call.output_scale, call.output_zero_point) if t is not None]
        (scale, dtype), *rest = list(q.buffers(shape).values())[1:]
        if [t.dtype for t in own] == [dtype, *(dtype for _, dtype in rest)]:
            fitted(call, shape)  # raises unless they broadcast
            if not rest:
                return lambda given: (given[-2].expand(scale), None)
            return lambda given: (given[-2].expand(scale), given[-1].expand(rest[0][0]))
    bare = call.bare()
    return lambda given: (*_stored(bare.of(given), shape), None)[:2]


def with_stored(y: Tensor, stored: Sequence[Tensor | None]) -> list[Tensor]:
    """Codes, and copies of the scale and zero point buffers."""
    return [y, *(t.clone(memory_format=torch.contiguous_format) for t in stored if t is not None)]


def of_codes(output: Output, describe: Callable[[], _T]) -> _T | None:
    """The result of `describe` for codes; None if it declines and the float result can be quantized instead."""
    try:
        return describe()
    except Declined:
        if by_sum(output):
            raise
        return None


def output_words(output: Output, codes: Callable[[Quantizer], str]) -> tuple[str, bool]:
    """Describe a native product's output, and return whether the result is codes, described by `codes`.

    Otherwise the result is floats, to be quantized afterwards if the output is a quantizer. Raises Declined for other
    dtypes.
    """
    dtype, words = output, None
    if isinstance(output, Quantizer):
        q = output
        words = of_codes(output, lambda: codes(q))
        dtype = torch.float32 if words is None else output.format.dtype
    elif output not in FLOATS:
        raise Declined(f"returns float32, bfloat16 and float16, not {output}")
    return " ".join(["output", str(dtype).removeprefix("torch."), *([] if words is None else [words])]), bool(words)


def finished(call: Call, compute: Plan) -> Plan:
    """Wrap a plan whose result has the output's dtype if that is one of FLOATS, else float32, to return the output."""
    output = call.output
    if output in FLOATS:
        return compute
    if isinstance(output, torch.dtype):
        return lambda *given: compute(*given).to(output)
    bare = call.bare()
    return lambda *given: finish(bare.of(given), compute(*given))
