"""scaled by the native kernels: convolutions of integers."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS, aten
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.forms import as_convolution
from hop.impls.scaled import calls
from hop.impls.scaled.calls import Call, by_sum, is_integer
from hop.impls.scaled.operands import plain
from hop.impls.scaled.outputs import are_buffers, finish, given_buffers
from hop.impls.scaled.products import is_transposed
from hop.kernels.aten.convolution import channels_last
from hop.kernels.aten.quantize import fast_format
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu import product as native_product
from hop.kernels.cpu.convolution import Geometry
from hop.numerics import blocks, copies, memory_format
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer


class NativeConvolution(NamedTuple):
    """A convolution that the kernels take."""

    gives_codes: bool
    description: str
    shape: tuple[int, ...]  # of the result, where sizes are known


def _declines(call: Call) -> str | None:
    if (reason := native.declines_here(call.device)) is not None:
        return reason
    if is_transposed(call)[0]:
        return "the convolution is transposed"
    x, weight = call.find(LHS), call.find(RHS)
    if not (is_integer(x) and is_integer(weight)):
        return "for two operands of integers"
    if x.usages != (copies.ROWWISE,) or weight.usages != (copies.ROWWISE,):
        return "for row-wise copies"
    if not (isinstance(call.output, Quantizer) or call.output in native_product.FLOATS):
        return f"gives float32, bfloat16, float16 and integers, not {call.output}"
    form = convolution(call)
    return form if isinstance(form, str) else None


def convolution(call: Call) -> NativeConvolution | str:
    """What the kernels are told of the call, or why they do not take it."""
    x, weight, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if x.quantizer.layout is not None:
        return f"for codes in their plain form, not layout={x.quantizer.layout}"
    lhs, rhs = _lies(x), _lies(weight)
    lists = [_numbers(v) for v in call.args[3:]]
    if None in (lhs, rhs) or None in lists:
        return f"nothing is known of the sizes {tuple(x.shape)}, {tuple(weight.shape)} and {call.args[3:]}"
    of_bias = None if bias is None else (bias.dtype, tracing.hints(bias.shape))
    return _convolution(call.op, call.output, lhs, rhs, of_bias, tuple(lists))


def _lies(x: Operand) -> tuple[Quantizer, tuple[int, ...], tuple[int, ...]] | None:
    """The quantizer, the shape and the strides of the codes, in numbers; None if they are unknown."""
    shape, strides = tracing.hints(x.shape), tracing.hints(x.tensors[0].stride())
    return None if shape is None or strides is None else (x.quantizer, shape, strides)


def _numbers(value: Any) -> Any:
    """An argument of the convolution with numbers for symbols; None if one is unknown."""
    if isinstance(value, list | tuple):
        return tracing.hints(value)
    sizes = tracing.hints([value]) if isinstance(value, torch.SymInt) else (value,)
    return None if sizes is None else sizes[0]


@functools.lru_cache(maxsize=4096)
def _convolution(
    op: Any, output: Any, lhs: Any, rhs: Any, bias: Any, lists: tuple[Any, ...]
) -> NativeConvolution | str:
    (of_x, x_shape, x_strides), (of_weight, shape, strides) = lhs, rhs
    tiled = of_weight.is_tiled()
    if (reason := _declines_weight(of_weight, tiled)) is not None:
        return reason
    x, weight = _meta(of_x, x_shape, x_strides), _meta(of_weight, shape, strides)
    geometry = _geometry(op, x, weight, lists)
    if isinstance(geometry, str):
        return geometry
    _, channels, *spatial = geometry.output
    if min(spatial) < 1 or channels % geometry.groups or geometry.x[1] != geometry.weight[1] * geometry.groups:
        return f"shapes {x_shape} and {shape} do not fit together"
    if bias is not None and (bias[1] != (channels,) or bias[0] not in native_product.BIASES):
        return f"for a bias of ({channels},) in float32, bfloat16, float16 or int32, not {bias[0]} of {bias[1]}"
    unbatched = len(x_shape) < len(shape)
    by_example, by_channel = _by_first(of_x, x_shape), _by_first(of_weight, shape)
    if by_example is None or by_channel is None or (by_example and unbatched):
        return "one scale for all, for each example or for each output channel"
    if geometry.x[1] == 0:
        return "there are no channels"
    dtype, codes = output, False
    if isinstance(output, Quantizer):
        reason = _declines_output(output, geometry.output, unbatched)
        if reason is not None and by_sum(output):
            return reason
        codes = reason is None
        dtype = output.format.dtype if codes else torch.float32  # to be quantized
    zero = of_x.format.zero
    words = [
        f"1 x {_name(of_x)} {'zero=stored' if of_x.scale.has_zero_point() else f'zero={zero}'}",
        f"weight {_name(of_weight) if tiled else 'int8'}{' tiled' if tiled else ''} {geometry.words()}",
        f"output {native_product.name(dtype)}",
        *([native_product.describe_output(output)] if codes else []),
    ]
    return NativeConvolution(codes, " ".join(words), geometry.output)


def _name(q: Quantizer) -> str:
    format = q.format
    return f"{'int' if format.dtype.is_signed else 'uint'}{4 if q.layout is not None and format.bits == 4 else 8}"


def _declines_weight(q: Any, tiled: bool) -> str | None:
    if q.layout is not None and not tiled:
        return f"for plain codes and tiles, not layout={q.layout}"
    if q.scale.has_zero_point() or q.format.zero != 0:
        return "the weight has a zero point"
    if q.format.high > INT8.high or (tiled and not q.format.dtype.is_signed):
        return f"for a weight of signed integers, not {q.format.name}"
    return None


def _meta(q: Quantizer, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A tensor that lies as the codes of an operand do, which are contiguous once they are unpacked."""
    if q.layout is not None or q.per_byte() > 1:
        return torch.empty(shape, dtype=torch.int8, device="meta")
    return torch.empty_strided(shape, strides, dtype=torch.int8, device="meta")


def _geometry(op: Any, x: Tensor, weight: Tensor, lists: tuple[Any, ...]) -> Geometry | str:
    after: list[int] | None = None
    if op in _PADDED and len(lists) > 1 and isinstance(lists[1], str):
        if x.dim() not in (weight.dim(), weight.dim() - 1):
            return "shapes do not fit together"
        spatial = weight.dim() - 2
        before, after = _padding(lists[1], weight, _expanded(lists[2] if len(lists) > 2 else 1, spatial))
        if lists[1] == "same" and any(s != 1 for s in _expanded(lists[0], spatial)):
            return "padding the same needs strides of 1"
        op, lists = _PADDED[op], (lists[0], before, *lists[2:])
    form = as_convolution(op, (x, weight, None, *(list(v) if isinstance(v, tuple) else v for v in lists)))
    if form is None:
        return "it is none of one, two or three dimensions"
    c, spatial = form.conv, weight.dim() - 2
    if any(len(v) != spatial for v in (c.stride, c.padding, c.dilation)):
        return f"for lists of {spatial}"
    if min(*c.stride, *c.dilation, c.groups) < 1 or min(c.padding) < 0 or min(weight.shape[2:]) < 1:
        return "for positive sizes, strides and dilations"
    return Geometry(
        x=tuple(c.x.shape),
        weight=tuple(weight.shape),
        stride=tuple(map(int, c.stride)),  # in a cache, True and 1 are one key
        padding=tuple(map(int, c.padding)),
        padding_after=tuple(map(int, after or c.padding)),
        dilation=tuple(map(int, c.dilation)),
        groups=int(c.groups),
        channels_last=channels_last(c.x, weight),
    )


_PADDED = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def _expanded(value: Any, length: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * length if len(values) == 1 else values


def _padding(name: str, weight: Tensor, dilation: list[int]) -> tuple[list[int], list[int]]:
    """Before and after each dimension."""
    total = [d * (k - 1) if name == "same" else 0 for k, d in zip(weight.shape[2:], dilation, strict=False)]
    before = [n // 2 for n in total]
    return before, [n - b for n, b in zip(total, before, strict=True)]


def _by_first(q: Quantizer, shape: tuple[int, ...]) -> bool | None:
    """Whether there is a scale for each element of the first dimension, and not one for all; None if neither."""
    counts = blocks.counts(shape, q.block)
    if any(n != 1 for n in counts[1:]) or counts[0] not in (1, shape[0]):
        return None
    return counts[0] != 1


def _declines_output(q: Quantizer, shape: tuple[int, ...], unbatched: bool) -> str | None:
    counts = (1, *blocks.counts(shape[1:], q.block)) if unbatched else tuple(blocks.counts(shape, q.block))
    by_example, by_channel = (c == n != 1 for c, n in zip(counts, shape[:2], strict=False))
    if (by_example and by_channel) or math.prod(counts) != (shape[0] if by_example else shape[1] if by_channel else 1):
        return f"one scale for all, for each example or for each channel of the result, not blocks of {q.block}"
    return native_product.declines_output(replace(q, block=(-1,)))


def _run(call: Call) -> Any:
    x, weight, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    form = convolution(call)
    assert not isinstance(form, str)
    unbatched = x.dim() < weight.dim()
    of_x = (t if t is None or not unbatched else t.unsqueeze(0) for t in _buffers(x))
    operands = (*of_x, *_buffers(weight)[:2], bias)

    def run(*given: Tensor | None) -> Tensor:
        out = native_operators.convolution(*operands, *given, weight.shape[0], form.description)
        return out.squeeze(0) if unbatched else out

    if form.gives_codes:
        known = list(form.shape[1:] if unbatched else form.shape)
        shape = known if eager.is_plain_eager() else calls.shape(call.op, list(call.args), call.kwargs)
        stored = given_buffers(call, shape)
        return [memory_format.dense(run(*(*stored, None)[:2])), *stored]
    return finish(call, run(None, None))


def _buffers(x: Operand) -> tuple[Any, ...]:
    """Codes, as they lie or unpacked, scales and zero points."""
    q = x.quantizer
    if q.layout is not None:
        codes, *stored = x.tensors
        return codes, q.scale.scale_of(stored, q.format), None
    operand = plain(x, copies.ROWWISE, fast_format(q.format))
    return operand.codes, operand.scale, operand.zero if isinstance(operand.zero, Tensor) else None


def _planned(call: Call, general: Plan) -> Plan | None:
    """For batches of plain codes, a byte each."""
    x, weight, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    simple = all(x.quantizer.scale.scale_is_stored and x.quantizer.per_byte() == 1 for x in (x, weight))
    form, gives_codes = convolution(call), isinstance(call.output, Quantizer)
    if isinstance(form, str) or x.dim() != weight.dim() or not simple:
        return None
    if gives_codes and not (form.gives_codes and x.dim() > 3 and are_buffers(call, form.shape)):
        return None
    affine, biased = x.quantizer.scale.has_zero_point(), bias is not None
    n, shape, description, convolve = weight.shape[0], form.shape, form.description, native_operators.convolution

    def run(*given: Any) -> Any:
        x, weight = given[0], given[1]
        zero_point, stored = x.zero_point if affine else None, given[-2:] if gives_codes else (None, None)
        bias = given[2] if biased else None
        try:
            y = convolve(x.codes, x.scale, zero_point, weight.codes, weight.scale, bias, *stored, n, description)
        except RuntimeError:  # as in a product
            return general(*given)
        if y.shape != shape or not y.is_cpu:
            return general(*given)
        return [y, *(t.clone() for t in stored if t is not None)] if gives_codes else y

    return run


NATIVE_CONVOLUTION = Kernel("native convolution", _declines, _run, _planned, native=True)
