"""Converters of a .tflite file's operators to ours, each from a call to its result's codes; the reverse of
operators.py.

Codes are plain int8 tensors. Images have channels last in the file, and second in PyTorch's convolutions and pools;
they are permuted if an operator needs another layout.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hop.dispatch.operators import aten
from hop.export.rewrite.code_floats import Held
from hop.export.targets.tflite.arithmetic import TFLITE
from hop.export.targets.tflite.calls import BOUNDS, FILE, SECOND, TO, Call, Value, layout_of, quantized
from hop.export.targets.tflite.tables import LOOKUP
from hop.numerics.formats import INT8
from hop.numerics.integer.functions import TfliteSoftmax, TfliteTable
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention, Division
from hop.numerics.scale_rules import Static

# ---- products


class _Weight:
    """A constant weight with its scales, whose dimension `along` in the file is dimension `channel` of ours."""

    def __init__(self, call: Call, i: int, along: int, order: tuple[int, ...], channel: int = 0) -> None:
        codes, tensor = call.inputs[i], call.tensors[i]
        if isinstance(codes, Value):
            codes = codes.at()
        if tensor is None or tensor.data is None or codes is None:
            call.refuse("its weight is not constant")
        q = tensor.quantization
        if tensor.kind != "INT8" or q is None:
            call.refuse(f"its weight is {tensor.kind}{'' if q else ' without scales'}")
        if any(q.zeros):
            call.refuse("its weight has a nonzero zero point")
        self.whole = len(q.scales) == 1
        if not self.whole and q.dimension != along:
            call.refuse(f"its weight has scales along dimension {q.dimension}, not {along}")
        codes = codes.permute(order) if order else codes
        block = (-1,) if self.whole else tuple(1 if d == channel else -1 for d in range(codes.dim()))
        scales = q.scales[0] if self.whole else torch.tensor(q.scales, dtype=torch.float32)
        self.codes = codes
        self.held = Held(Quantizer(INT8, block, Static()), codes, [scales], torch.float32)


def _bias(call: Call, i: int = 2) -> Tensor | None:
    bias = call.inputs[i] if len(call.inputs) > i else None
    if bias is None:
        return None
    wanted = torch.int64 if call.result.kind == "INT16" else torch.int32
    if not isinstance(bias, Tensor) or bias.dtype != wanted:
        call.refuse(f"its bias is not a constant of {wanted}")
    return bias.reshape(-1)


def _windows(call: Call, x: Value, kernel: list[int], stride: list[int], fill: int | None) -> tuple[Value, list[int]]:
    """The operand that windows slide over, and the padding of both sides; explicitly padded with `fill` if the sides
    differ.
    """
    padding = call.known.names["Padding"].get(call.option("Padding"))
    if padding not in ("SAME", "VALID"):
        call.refuse(f"its padding {padding} is not supported")
    if padding == "VALID":
        return x, [0, 0]
    sizes = list(x.at(SECOND).shape[2:])
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, stride, strict=True)]
    if all(t % 2 == 0 for t in totals):
        return x, [t // 2 for t in totals]
    if fill is None:
        call.refuse("its windows need different padding on opposite sides")
    sides = [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
    return Value(x.scale, x.zero, {SECOND: aten.constant_pad_nd.default(x.at(SECOND), sides, fill)}), [0, 0]


def _convolution(call: Call) -> Value:
    depthwise = call.op.name == "DEPTHWISE_CONV_2D"
    weight = _Weight(call, 1, 3, (3, 0, 1, 2)) if depthwise else _Weight(call, 1, 0, (0, 3, 1, 2))
    stride = [call.option("StrideH", 1), call.option("StrideW", 1)]
    dilation = [call.option("DilationHFactor", 1), call.option("DilationWFactor", 1)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.codes.shape[2:], strict=True)]
    x, padding = _windows(call, call.value(0), reach, stride, call.value(0).zero)
    channels = x.at(SECOND).shape[1]
    groups = channels if depthwise else channels // weight.codes.shape[1]
    args = [x.held(SECOND), weight.held, _bias(call), stride, padding, dilation, groups]
    return call.give(aten.conv2d.default, args, SECOND)


def _transposed(call: Call) -> Value:
    """A transposed convolution without padding; SAME takes the middle of its result."""
    weight, x = _Weight(call, 1, 0, (3, 0, 1, 2), channel=1), call.value(2)
    stride, sizes = [call.option("StrideH", 1), call.option("StrideW", 1)], call.numbers(0)[1:3]
    padding = call.known.names["Padding"].get(call.option("Padding"))
    each = list(zip(x.at(SECOND).shape[2:], weight.codes.shape[2:], stride, sizes, strict=True))
    whole = [(n - 1) * s + k for n, k, s, _ in each]
    wanted = [n * s for n, _, s, _ in each] if padding == "SAME" else whole
    if sizes != wanted or any(out > full for out, full in zip(sizes, whole, strict=True)):
        call.refuse(f"its result has the sizes {sizes}; with padding {padding} they must be {wanted}, up to {whole}")
    args = [x.held(SECOND), weight.held, _bias(call, 3), stride, [0, 0], [0, 0], 1, [1, 1]]
    output = call.give(aten.conv_transpose2d.input, args, SECOND)
    codes = output.at(SECOND)
    for d, (full, out) in enumerate(zip(whole, sizes, strict=True), 2):
        if full != out:
            codes = aten.slice.Tensor(codes, d, (full - out) // 2, (full - out) // 2 + out)
    return replace(output, tensors={SECOND: codes})


def _nearest(call: Call) -> Value:
    x, sizes = call.value(0), call.numbers(1)
    before = list(x.at(SECOND).shape[2:])
    if call.option("AlignCorners", False) or call.option("HalfPixelCenters", False):
        call.refuse("align_corners and half_pixel_centers are not supported")
    if any(out % n for n, out in zip(before, sizes, strict=True)):
        call.refuse(f"its image grows from {before} to {sizes}; only integer factors are supported")
    args = [x.held(SECOND), sizes, None]
    return call.give(aten.upsample_nearest2d.vec, args, SECOND, (None, None))


def _bilinear(call: Call) -> Value:
    x, sizes, align_corners = call.value(0), call.numbers(1), bool(call.option("AlignCorners", False))
    if align_corners == bool(call.option("HalfPixelCenters", False)):
        call.refuse("exactly one of align_corners and half_pixel_centers must be set")
    args = [x.held(SECOND), sizes, align_corners, None]
    return call.give(aten.upsample_bilinear2d.vec, args, SECOND, (None, None))


def _fully_connected(call: Call) -> Value:
    weight, x = _Weight(call, 1, 0, ()), call.value(0)
    if call.known.names["FullyConnectedOptionsWeightsFormat"].get(call.option("WeightsFormat")) != "DEFAULT":
        call.refuse("its weight is shuffled")
    size = weight.codes.shape[1]
    if not call.option("KeepNumDims", False):
        x = replace(x, tensors={FILE: aten.reshape.default(x.at(), [-1, size])})
    rule = call.convention(aten.linear.default, call.bounds(), weight.whole or len(weight.codes) == 1)
    return call.give(aten.linear.default, [x.held(), weight.held, _bias(call)], convention=rule)


def _batch_matmul(call: Call) -> Value:
    sides = []
    for i, name in enumerate(("AdjX", "AdjY")):
        x = call.value(i)
        codes = aten.transpose.int(x.at(), -1, -2) if call.option(name, False) else x.at()
        sides.append((x, codes))
    batch = list(sides[0][1].shape[:-2])
    if list(sides[1][1].shape[:-2]) != batch:
        call.refuse(f"its factors have the batches {batch} and {list(sides[1][1].shape[:-2])}")
    flat = [replace(x, tensors={FILE: aten.reshape.default(c, [-1, *c.shape[-2:]])}).held() for x, c in sides]
    output = call.give(aten.bmm.default, flat, bounds=(None, None))
    return replace(output, tensors={FILE: aten.reshape.default(output.at(), list(call.result.shape))})


# ---- the others


def _elementwise(call: Call) -> Value:
    op = {"ADD": aten.add.Tensor, "SUB": aten.sub.Tensor, "MUL": aten.mul.Tensor}[call.op.name]
    a, b = call.value(0), call.value(1)
    if call.result.kind == "INT16" and call.op.name != "MUL" and call.option("PotScaleInt16", True):
        call.refuse("its option pot_scale_int16 (scales as powers of two) is not supported")
    layout = layout_of(a, b)
    return call.give(op, [a.held(layout), b.held(layout)], layout)


def _concatenation(call: Call) -> Value:
    parts = [call.value(i) for i in range(len(call.inputs))]
    for x in parts:
        if (x.scale, x.zero) != call.units():
            call.refuse(f"an input has the scale and zero point {(x.scale, x.zero)}, its result {call.units()}")
    axis = call.option("Axis") % len(call.result.shape)
    layout = layout_of(*parts)
    dim = axis if layout == FILE else TO[SECOND].index(axis)
    return call.give(aten.cat.default, [[x.held(layout) for x in parts], dim], layout)


def _pool(call: Call) -> Value:
    is_maximum, x = call.op.name == "MAX_POOL_2D", call.value(0)
    stride = [call.option("StrideH", 1), call.option("StrideW", 1)]
    kernel = [call.option("FilterHeight", 1), call.option("FilterWidth", 1)]
    call.check_same(x)
    lowest = torch.iinfo(x.at().dtype).min
    given, padding = _windows(call, x, kernel, stride, lowest if is_maximum else None)
    if is_maximum:
        return call.give(aten.max_pool2d.default, [given.held(SECOND), kernel, stride, padding], SECOND)
    args = [given.held(SECOND), kernel, stride, padding, False, not any(padding)]
    return call.give(aten.avg_pool2d.default, args, SECOND)


def _reduction(call: Call) -> Value:
    x, keeps, op = call.value(0), bool(call.option("KeepDims", False)), _REDUCTIONS[call.op.name]
    rank = x.at().dim()
    dims = sorted({d % rank for d in call.numbers(1)})
    if op is not aten.mean.dim:
        call.check_same(x)
    return call.give(op, [x.held(), dims, keeps], bounds=(None, None))


def _function(call: Call) -> Value:
    op, x = _FUNCTIONS[call.op.name], call.value(0)
    layout, kwargs, rule = layout_of(x), {}, call.convention(op, (None, None))
    args = [call.option("Alpha", 0.0)] if call.op.name == "LEAKY_RELU" else []
    if call.op.name == "GELU" and call.option("Approximate", False):
        kwargs = {"approximate": "tanh"}
        rule = replace(rule, function="gelu_tanh") if isinstance(rule, TfliteTable) else rule  # type: ignore[call-arg]
    return call.give(op, [x.held(layout), *args], layout, (None, None), kwargs=kwargs, convention=rule)


def _lookup(call: Call) -> Value:
    x, function = call.value(0), call.known.functions[call.op.index]
    rule: Convention = Division(low=function.bounds[0], high=function.bounds[1])
    if call.target is not TFLITE:
        rule = call.convention(function.op, function.bounds)
    args = [x.held(layout_of(x)), *function.args]
    return call.give(function.op, args, layout_of(x), function.bounds, kwargs=dict(function.kwargs), convention=rule)


def _prelu(call: Call) -> Value:
    """Slopes by the last dimension, which becomes the second, or by the second one."""
    x, slope = call.value(0), call.value(1)
    rank, sizes = x.at().dim(), list(slope.at().shape)
    sizes = [1] * (rank - len(sizes)) + sizes
    along = [d for d, n in enumerate(sizes) if n != 1]
    if len(sizes) != rank or len(along) > 1 or (along and along[0] not in (1, rank - 1)):
        call.refuse(f"its slopes have the shape {tuple(slope.at().shape)}; they may differ along one dimension only")
    slopes = replace(slope, tensors={FILE: aten.reshape.default(slope.at(), [-1])}).held()
    if rank == 4 and along == [3]:
        return call.give(aten.prelu.default, [x.held(SECOND), slopes], SECOND, (None, None))
    if not along or along == [1]:
        layout = layout_of(x) if not along else FILE
        return call.give(aten.prelu.default, [x.held(layout), slopes], layout, (None, None))
    by = [0, rank - 1, *range(1, rank - 1)]
    moved = replace(x, tensors={FILE: aten.permute.default(x.at(), by)})
    output = call.give(aten.prelu.default, [moved.held(), slopes], bounds=(None, None))
    back = [by.index(d) for d in range(rank)]
    return replace(output, tensors={FILE: aten.permute.default(output.at(), back)})


def _gather(call: Call) -> Value:
    if call.option("Axis") or call.option("BatchDims"):
        call.refuse("only gathering rows of a whole tensor is supported")
    x, indices = call.value(0), call.inputs[1] if len(call.inputs) > 1 else None
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64) or x.at().dim() != 2:
        call.refuse("it needs a matrix and integer indices")
    return call.give(aten.embedding.default, [x.held(), indices], bounds=(None, None))


def _softmax(call: Call) -> Value:
    if call.op.name == "LOG_SOFTMAX":
        return call.give(aten.log_softmax.int, [call.value(0).held(), -1], bounds=(None, None))
    rule, beta = call.convention(aten.softmax.int, (None, None)), call.option("Beta", 1.0)
    if beta != 1.0:
        if not isinstance(rule, TfliteSoftmax):
            call.refuse(f"its beta is {beta}, which target {call.target.name} does not support")
        rule = replace(rule, beta=beta)
    return call.give(aten.softmax.int, [call.value(0).held(), -1], convention=rule, bounds=(None, None))


def _bound(call: Call) -> Value:
    # RELU_N1_TO_1 is not supported, because LiteRT clamps its int8 codes at 0.
    x, bounds = call.value(0), call.between_codes(BOUNDS[call.op.name])
    layout = layout_of(x)
    return call.give(aten.relu.default, [x.held(layout)], layout, bounds)


def _requantize(call: Call) -> Value:
    if isinstance(call.inputs[0], Tensor):  # a float input
        scale, zero = call.units()
        return Value(scale, zero, {FILE: quantized(call.result.kind, call.inputs[0], scale, zero, Division())})
    x = call.value(0)
    layout = layout_of(x)
    return call.give(aten.clone.default, [x.held(layout)], layout, (None, None))


def _reshape(call: Call) -> Value:
    return call.same(x := call.value(0), aten.reshape.default(x.at(), list(call.result.shape)))


def _transpose(call: Call) -> Value:
    x, by = call.value(0), call.numbers(1)
    return call.same(x, aten.permute.default(x.at(), by))


def _pad(call: Call) -> Value:
    x, sides = call.value(0), call.numbers(1)
    fill = x.zero
    if call.op.name == "PADV2":
        number, tensor = call.inputs[2], call.tensors[2]
        if not isinstance(number, Value) or tensor is None or len(call.known.lists.get(tensor.index, ())) != 1:
            call.refuse("its padding value is not a constant code")
        (fill,) = call.known.lists[tensor.index]
    if any(n < 0 for n in sides) or len(sides) != 2 * x.at().dim():
        call.refuse(f"its paddings are {sides}")
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    flat = [n for pair in reversed(pairs) for n in pair]
    return call.same(x, aten.constant_pad_nd.default(x.at(), flat, fill))


def _slice(call: Call) -> Value:
    x = call.value(0)
    sizes, begin, third = list(x.at().shape), call.numbers(1), call.numbers(2)
    if call.op.name == "SLICE":
        steps, drop = [1] * len(sizes), 0
        stops = [n if size == -1 else b + size for n, b, size in zip(sizes, begin, third, strict=True)]
    else:
        steps, drop, stops = call.numbers(3), call.option("ShrinkAxisMask"), third
        if call.option("EllipsisMask") or call.option("NewAxisMask") or any(s < 1 for s in steps):
            call.refuse("an ellipsis, a new dimension or a step below 1 is not supported")
        begins, masks = call.option("BeginMask"), call.option("EndMask")
        begin = [0 if begins >> i & 1 else b for i, b in enumerate(begin)]
        stops = [n if masks >> i & 1 else e for i, (n, e) in enumerate(zip(sizes, stops, strict=True))]
    codes = x.at()
    for dim, (size, start, end, step) in enumerate(zip(sizes, begin, stops, steps, strict=True)):
        if drop >> dim & 1:
            start, end, step = start % size, start % size + 1, 1
        if (start, end, step) != (0, size, 1):
            codes = aten.slice.Tensor(codes, dim, start, end, step)
    return call.same(x, aten.reshape.default(codes, list(call.result.shape)) if drop else codes)


_FUNCTIONS = {
    "LOGISTIC": aten.sigmoid.default,
    "TANH": aten.tanh.default,
    "GELU": aten.gelu.default,
    "EXP": aten.exp.default,
    "RSQRT": aten.rsqrt.default,
    "HARD_SWISH": aten.hardswish.default,
    "LEAKY_RELU": aten.leaky_relu.default,
}
_REDUCTIONS = {"MEAN": aten.mean.dim, "REDUCE_MAX": aten.amax.default, "REDUCE_MIN": aten.amin.default}
READ: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), _convolution),
    "TRANSPOSE_CONV": _transposed,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _batch_matmul,
    **dict.fromkeys(("ADD", "SUB", "MUL"), _elementwise),
    "CONCATENATION": _concatenation,
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), _pool),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "RESIZE_NEAREST_NEIGHBOR": _nearest,
    "RESIZE_BILINEAR": _bilinear,
    **dict.fromkeys(_FUNCTIONS, _function),
    "GATHER": _gather,
    LOOKUP: _lookup,
    "PRELU": _prelu,
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), _softmax),
    **dict.fromkeys(("RELU", "RELU6"), _bound),
    "QUANTIZE": _requantize,
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), _reshape),
    "TRANSPOSE": _transpose,
    **dict.fromkeys(("PAD", "PADV2"), _pad),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), _slice),
}
"""The converter of each operator. It raises NotImplementedError for an unsupported call."""
