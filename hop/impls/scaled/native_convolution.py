"""scaled with native kernels: convolutions of integers."""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.eager import OpOverload
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS, aten
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.forms import as_convolution, expand
from hop.impls.scaled import calls
from hop.impls.scaled.calls import Call, Result, changed, is_integer, size_of
from hop.impls.scaled.operands import plain
from hop.impls.scaled.outputs import finish, given_buffers, output_words, stored, with_stored
from hop.impls.scaled.products import is_transposed
from hop.kernels.aten.convolution import channels_last
from hop.kernels.aten.quantize import fast_format
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu import product as native_product
from hop.numerics import blocks, copies, memory_format
from hop.numerics.formats import INT8, Integer
from hop.numerics.quantizer import Quantizer


class Geometry(NamedTuple):
    """The sizes of a convolution: x (N, C, *S), weight (O, C / groups, *kernel), and lists with one entry per dimension
    of S.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first element
    padding_after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels_last: bool  # of the result

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the result; sizes are below 1 if the kernel is larger than the input."""
        sizes = zip(
            self.x[2:], self.weight[2:], self.stride, self.padding, self.padding_after, self.dilation, strict=True
        )
        spatial = ((n + before + after - d * (k - 1) - 1) // s + 1 for n, k, s, before, after, d in sizes)
        return (self.x[0], self.weight[0], *spatial)

    def words(self) -> str:
        """Describe everything except the sizes of the input."""
        lists = {
            "kernel": self.weight[2:],
            "stride": self.stride,
            "before": self.padding,
            "after": self.padding_after,
            "dilation": self.dilation,
        }
        words = [f"{name}={','.join(map(str, sizes))}" for name, sizes in lists.items()]
        return " ".join([*words, f"groups={self.groups}", *["channels_last"] * self.channels_last])


class NativeConvolution(NamedTuple):
    """A convolution that native code supports."""

    gives_codes: bool
    description: str
    shape: tuple[int, ...]  # of the result; sizes are known


def convolution(call: Call) -> NativeConvolution:
    """Describe the call for native code. Raises Declined if it is not supported."""
    decline(native.declines_here(call.device))
    if is_transposed(call)[0]:
        raise Declined("the convolution is transposed")
    x, weight, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if not (is_integer(x) and is_integer(weight)):
        raise Declined("for two integer operands")
    if x.usages != (copies.ROWWISE,) or weight.usages != (copies.ROWWISE,):
        raise Declined("for row-wise copies")
    if x.quantizer.layout is not None:
        raise Declined(f"for codes in plain layout, not layout={x.quantizer.layout}")
    _check_weight(weight.quantizer)
    geometry = _geometry(call.op, _meta(x), _meta(weight), [_numbers(v) for v in call.args[3:]])
    _, channels, *spatial = geometry.output
    if min(spatial) < 1 or channels % geometry.groups or geometry.x[1] != geometry.weight[1] * geometry.groups:
        raise Declined(f"shapes {tuple(x.shape)} and {tuple(weight.shape)} do not fit together")
    if bias is not None:
        native_product.check_bias(bias, channels)
    unbatched = x.dim() < weight.dim()
    by_example = _has_many(x.quantizer, geometry.x[1:] if unbatched else geometry.x)
    if _has_many(weight.quantizer, geometry.weight) is None or by_example is None or (by_example and unbatched):
        raise Declined("for one scale for all, per example or per output channel")
    if geometry.x[1] == 0:
        raise Declined("there are no channels")
    of_output, codes = output_words(call.output, lambda q: _codes(q, geometry.output, unbatched))
    of_x, of_weight, tiled = x.quantizer, weight.quantizer, weight.quantizer.is_tiled()
    zero = "zero=stored" if of_x.scale.has_zero_point() else f"zero={of_x.format.zero}"
    right = f"{_name(of_weight)} tiled" if tiled else "int8"
    words = f"1 x {_name(of_x)} {zero} weight {right} {geometry.words()} {of_output}"
    return NativeConvolution(codes, words, geometry.output)


def _numbers(value: Any) -> Any:
    """An argument of the convolution with numbers in place of symbols."""
    if isinstance(value, list | tuple):
        return native.sizes(value)
    return native.sizes([value])[0] if isinstance(value, torch.SymInt) else value


def _name(q: Quantizer) -> str:
    format = q.format
    return f"{'int' if format.dtype.is_signed else 'uint'}{4 if q.layout is not None and format.bits == 4 else 8}"


def _check_weight(q: Quantizer) -> None:
    tiled = q.is_tiled()
    assert isinstance(q.format, Integer)
    if q.layout is not None and not tiled:
        raise Declined(f"for plain codes or tiles, not layout={q.layout}")
    if q.scale.has_zero_point() or q.format.zero != 0:
        raise Declined("the weight has a zero point")
    if q.format.high > INT8.high or (tiled and not q.format.dtype.is_signed):
        raise Declined(f"for a weight of signed integers, not {q.format.name}")


def _meta(x: Operand) -> Tensor:
    """A meta tensor with the strides of an operand's codes, which are contiguous once unpacked."""
    shape = native.sizes(x.shape)
    if x.quantizer.layout is not None or x.quantizer.per_byte() > 1:
        return torch.empty(shape, dtype=torch.int8, device="meta")
    return torch.empty_strided(shape, native.sizes(x.tensors[0].stride()), dtype=torch.int8, device="meta")


def _geometry(op: OpOverload, x: Tensor, weight: Tensor, lists: list[Any]) -> Geometry:
    after: list[int] | None = None
    if op in _PADDED and len(lists) > 1 and isinstance(lists[1], str):
        if x.dim() not in (weight.dim(), weight.dim() - 1):
            raise Declined("shapes do not fit together")
        spatial = weight.dim() - 2
        before, after = _padding(lists[1], weight, expand(lists[2] if len(lists) > 2 else 1, spatial))
        if lists[1] == "same" and any(s != 1 for s in expand(lists[0], spatial)):
            raise Declined("padding='same' needs strides of 1")
        op, lists = _PADDED[op], [lists[0], before, *lists[2:]]
    form = as_convolution(op, (x, weight, None, *(list(v) if isinstance(v, tuple) else v for v in lists)))
    if form is None:
        raise Declined("it does not have one, two or three dimensions")
    c, spatial = form.conv, weight.dim() - 2
    if any(len(v) != spatial for v in (c.stride, c.padding, c.dilation)):
        raise Declined(f"for lists of {spatial}")
    if min(*c.stride, *c.dilation, c.groups) < 1 or min(c.padding) < 0 or min(weight.shape[2:]) < 1:
        raise Declined("for positive sizes, strides and dilations")
    return Geometry(
        x=tuple(c.x.shape),
        weight=tuple(weight.shape),
        stride=tuple(map(int, c.stride)),  # int(): True must be spelled 1
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


def _padding(name: str, weight: Tensor, dilation: list[int]) -> tuple[list[int], list[int]]:
    """The padding before and after each dimension."""
    total = [d * (k - 1) if name == "same" else 0 for k, d in zip(weight.shape[2:], dilation, strict=False)]
    before = [n // 2 for n in total]
    return before, [n - b for n, b in zip(total, before, strict=True)]


def _has_many(q: Quantizer, shape: tuple[int, ...]) -> bool | None:
    """Whether there is a scale per element of the first dimension (True) or one for all (False); None if neither."""
    counts = blocks.counts(shape, q.block)
    if any(n != 1 for n in counts[1:]) or counts[0] not in (1, shape[0]):
        return None
    return counts[0] != 1


def _codes(q: Quantizer, shape: tuple[int, ...], unbatched: bool) -> str:
    """Describe a result in codes for native code."""
    counts = (1, *blocks.counts(shape[1:], q.block)) if unbatched else tuple(blocks.counts(shape, q.block))
    by_example, by_channel = (c == n != 1 for c, n in zip(counts, shape[:2], strict=False))
    if (by_example and by_channel) or math.prod(counts) != (shape[0] if by_example else shape[1] if by_channel else 1):
        raise Declined(f"for one scale for all, per example or per channel of the result, not blocks of {q.block}")
    return native_product.describe_output(q)


def _buffers(x: Operand) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, packed or unpacked, with scales and zero points."""
    q = x.quantizer
    if q.layout is not None:
        codes, *stored = x.tensors
        return codes, q.scale.scale_of(stored, q.format), None
    operand = plain(x, copies.ROWWISE, fast_format(q.format))
    return operand.codes, operand.scale, operand.zero if isinstance(operand.zero, Tensor) else None


def _prepare(call: Call) -> Plan:
    x, weight, form = call.find(LHS), call.find(RHS), convolution(call)
    simple = all(x.quantizer.scale.scale_is_stored and x.quantizer.per_byte() == 1 for x in (x, weight))
    if isinstance(call.output, Quantizer):
        simple = simple and form.gives_codes and x.dim() > 3 and eager.is_plain_eager()
    if not simple or x.dim() != weight.dim():
        return call.plan(functools.partial(_computed, form))
    affine, biased = x.quantizer.scale.has_zero_point(), call.find(BIAS) is not None
    find, convolve = stored(call, form.shape) if form.gives_codes else None, native_operators.convolution
    n, size, description = weight.shape[0], size_of(form.shape), form.description

    def run(*given: Any) -> Result:
        """Convolve batches of plain one-byte codes."""
        x, weight = given[0], given[1]
        zero_point, bias = x.zero_point if affine else None, given[2] if biased else None
        scales = (None, None) if find is None else find(given)
        y = convolve(x.codes, x.scale, zero_point, weight.codes, weight.scale, bias, *scales, n, description)
        if size is not None and (y.shape != size or not y.is_cpu):
            raise changed()
        return y if find is None else with_stored(y, scales)

    return run


def _computed(form: NativeConvolution, call: Call) -> Result:
    x, weight, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
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


NATIVE_CONVOLUTION = Kernel("native convolution", _prepare, native=True)
