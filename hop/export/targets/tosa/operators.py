"""Converters of operator families to TOSA's operators: each reads a call and sets its result's codes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.dispatch import operators as families
from hop.dispatch.operators import aten
from hop.export.targets.integer.arguments import bias_codes, pair, window_of
from hop.export.targets.integer.rows import TWO_DIMENSIONAL, write_as_two_dimensional
from hop.export.targets.integer.steps import Step, Weight
from hop.export.targets.integer.values import LAST, Codes, Order, common_order, tensor
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.functions import function, softmax
from hop.export.targets.tosa.resizes import interpolated, repeated
from hop.export.targets.tosa.scales import Scale, accumulator_name, finished, plain, rescaled, same, sums
from hop.export.targets.tosa.views import reshaped, sliced, viewed
from hop.numerics.integer.functions import IntegerFunction, TosaAdd, TosaAveragePool, TosaMean
from hop.numerics.spelling import JsonObject


def _float32(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def _float64(x: float) -> Tensor:
    return _float32(x).to(torch.float64)


def _largest(x: Codes) -> int:
    """The largest distance of a code from its zero point."""
    info = torch.iinfo(x.dtype)
    return max(abs(info.min - x.zero), abs(info.max - x.zero))


def _convention(step: Step, kind: type[IntegerFunction]) -> Any:
    if not isinstance(step.convention, kind):
        raise NotImplementedError(
            f"its convention is {step.convention}; TOSA's operators compute {kind.__name__}: use the target TOSA_1_0"
        )
    return step.convention


# ---- products


def _scale(step: Step, x: Codes, scales: Tensor) -> Scale:
    return Scale.of(step.convention, _float32(x.scale), scales, _float32(step.result.scale))


def _product(step: Step, op: str, inputs: list[str], shape: Sequence[int], **attributes: Any) -> str:
    """A product of codes with its zero points, as sums."""
    x, file = step.arg(0), step.file
    inputs = [*inputs, file.constant([x.zero], x.dtype), file.constant([0], torch.int8)]
    name = f"{step.result.name}_sums"
    return file.made(op, inputs, name, shape, sums(x.dtype), acc_type=accumulator_name(x.dtype), **attributes)


def _biased(step: Step, x: Codes, weight: Weight, channels: int) -> tuple[Tensor, Tensor]:
    """The bias in units of the sum, and the largest magnitude of a sum, per channel."""
    dim = 1 if step.op is aten.conv_transpose2d.input else 0
    bias = bias_codes(x, weight, step.arg(2), dim)
    rows = weight.codes.to(torch.int64).abs().movedim(dim, 0).reshape(channels, -1)
    return bias, rows.sum(1) * _largest(x) + bias.to(torch.int64).abs()


def _matrix(step: Step) -> None:
    x, weight = step.arg(0), step.arg(1)
    if step.op is aten.bmm.default:
        _matmul(step, x, weight)
        return
    if step.op is not aten.linear.default or not isinstance(weight, Weight):
        raise NotImplementedError("a fully connected layer needs a constant weight; products of activations need bmm")
    (channels, width), file = weight.codes.shape, step.file
    rows = max(1, torch.Size(x.shape[:-1]).numel())
    bias, most = _biased(step, x, weight, channels)
    name = step.result.name
    inputs = [
        reshaped(file, tensor(file, x), (rows, 1, 1, width)),
        file.tensor(weight.name, (channels, 1, 1, width), torch.int8, data=weight.codes),
        file.tensor(f"{name}_bias", (channels,), bias.dtype, data=bias),
    ]
    whole = {"pad": [0, 0, 0, 0], "stride": [1, 1], "dilation": [1, 1], "local_bound": False}
    total = _product(step, "CONV2D", inputs, (rows, 1, 1, channels), **whole)
    finished(step, total, step.result.plain, _scale(step, x, weight.scales), most)


def _matmul(step: Step, x: Codes, other: Codes | Weight) -> None:
    file, shape = step.file, step.result.shape
    if isinstance(other, Weight):
        if other.scales.numel() != 1:
            raise NotImplementedError("the second operand of a product of activations must have one scale")
        second = file.tensor(other.name, other.codes.shape, torch.int8, data=other.codes)
        other = Codes(other.name, tuple(other.codes.shape), float(other.scales), 0)
        other.tensors[other.plain] = second
    if x.dtype != other.dtype:
        raise NotImplementedError("MATMUL needs codes of the same width")
    zeros = [file.constant([v.zero], v.dtype) for v in (x, other)]
    inputs = [tensor(file, x), tensor(file, other), *zeros]
    total = file.made("MATMUL", inputs, f"{step.result.name}_sums", shape, sums(x.dtype))
    most = x.shape[-1] * _largest(x) * _largest(other)
    finished(step, total, step.result.plain, _scale(step, x, _float32(other.scale)), most)


def _window(
    file: File, x: str, sizes: Sequence[int], reach: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> tuple[str, list[int]]:
    """The image that windows slide over, cropped because TOSA's windows must cover it exactly, and its padding on each
    side.
    """
    pads, shape = [], list(file.sizes[x])
    for d, out in enumerate(sizes):
        after = (out - 1) * stride[d] + reach[d] - shape[d + 1] - pad[d]
        shape[d + 1] += min(after, 0)
        pads += [pad[d], max(after, 0)]
    return sliced(file, x, [0, 0, 0, 0], shape), pads


def _in_layout(file: File, x: str, codes: Codes, order: Order) -> str:
    return reshaped(file, x, tuple(codes.shape[d] for d in order))


def _convolution(step: Step) -> None:
    if step.op in TWO_DIMENSIONAL:
        write_as_two_dimensional(step, _convolution, _in_layout)
        return
    x, weight = step.arg(0), step.arg(1)
    known = (aten.conv2d.default, aten.conv_transpose2d.input)
    if step.op not in known or not isinstance(weight, Weight) or len(x.shape) != 4:
        raise NotImplementedError(
            "only batched one- or two-dimensional convolutions with a constant weight are supported"
        )
    if step.op is aten.conv_transpose2d.input:
        _transposed(step, x, weight)
        return
    stride, pad, dilation = pair(step.arg(3)), pair(step.arg(4), 0), pair(step.arg(5))
    groups, (out, per_group, *kernel), file = step.arg(6, 1), weight.codes.shape, step.file
    reach = (dilation[0] * (kernel[0] - 1) + 1, dilation[1] * (kernel[1] - 1) + 1)
    image, pads = _window(file, tensor(file, x, LAST), step.result.shape[2:], reach, stride, pad)
    attributes = {"pad": pads, "stride": list(stride), "dilation": list(dilation), "local_bound": False}
    bias, most = _biased(step, x, weight, out)
    shape = [step.result.shape[d] for d in LAST]
    if groups > 1 and per_group == 1:
        codes = weight.codes.reshape(groups, out // groups, *kernel).permute(2, 3, 0, 1)
        inputs = [
            image,
            file.tensor(weight.name, codes.shape, torch.int8, data=codes),
            file.tensor(f"{step.result.name}_bias", (out,), bias.dtype, data=bias),
        ]
        total = _product(step, "DEPTHWISE_CONV2D", inputs, shape, **attributes)
    else:
        codes, parts, (n, h, w, _) = weight.codes.permute(0, 2, 3, 1), [], file.sizes[image]
        for g in range(groups):
            rows = slice(g * out // groups, (g + 1) * out // groups)
            inputs = [
                sliced(file, image, [0, 0, 0, g * per_group], [n, h, w, per_group]),
                file.tensor(weight.name, codes[rows].shape, torch.int8, data=codes[rows]),
                file.tensor(f"{step.result.name}_bias", (out // groups,), bias.dtype, data=bias[rows]),
            ]
            parts.append(_product(step, "CONV2D", inputs, [*shape[:3], out // groups], **attributes))
        total = parts[0]
        if groups > 1:
            if x.dtype == torch.int16:
                raise NotImplementedError("grouped int16 convolutions are not supported: CONCAT has no 48-bit type")
            total = file.made("CONCAT", parts, f"{step.result.name}_sums", shape, sums(x.dtype), axis=3)
    finished(step, total, LAST, _scale(step, x, weight.scales), most)


def _transposed(step: Step, x: Codes, weight: Weight) -> None:
    stride, pad, more = pair(step.arg(3)), pair(step.arg(4), 0), pair(step.arg(5), 0)
    if step.arg(6, 1) != 1 or pair(step.arg(7)) != (1, 1):
        raise NotImplementedError("transposed convolutions with groups or dilation are not supported")
    file, out = step.file, weight.codes.shape[1]
    codes = weight.codes.permute(1, 2, 3, 0)
    bias, most = _biased(step, x, weight, out)
    inputs = [
        tensor(file, x, LAST),
        file.tensor(weight.name, codes.shape, torch.int8, data=codes),
        file.tensor(f"{step.result.name}_bias", (out,), bias.dtype, data=bias),
    ]
    around = [n for d in range(2) for n in (-pad[d], more[d] - pad[d])]
    shape = [step.result.shape[d] for d in LAST]
    total = _product(step, "TRANSPOSE_CONV2D", inputs, shape, out_pad=around, stride=list(stride), local_bound=False)
    finished(step, total, LAST, _scale(step, x, weight.scales), most)


# ---- two operands


def _both(step: Step) -> tuple[list[str], Order]:
    """Both operands with a common layout and rank, and the layout of the result."""
    a, b = step.arg(0), step.arg(1)
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        raise NotImplementedError("both operands must be quantized: float operands are not supported")
    if len(a.shape) == len(b.shape):
        order = common_order([a, b])
        return [tensor(step.file, v, order) for v in (a, b)], order
    rank = len(step.result.shape)
    shapes = [(*[1] * (rank - len(v.shape)), *v.shape) for v in (a, b)]
    operands = [reshaped(step.file, tensor(step.file, v), s) for v, s in zip((a, b), shapes, strict=True)]
    return operands, step.result.plain


def _sum(step: Step) -> None:
    (x, y), order = _both(step)
    a, b, file = step.arg(0), step.arg(1), step.file
    rule, out = _convention(step, TosaAdd), _float64(step.result.scale)
    *inner, last = (Scale.number(m) for m in rule.multipliers(_float64(a.scale), _float64(b.scale), out, a.dtype))
    terms, most = [], 0
    for v, codes, scale in zip((x, y), (a, b), inner, strict=True):
        term = file.tensor(f"{step.result.name}_term", file.sizes[v], torch.int32)
        terms.append(rescaled(file, v, term, scale, (codes.zero, 0), _largest(codes)))
        most += (_largest(codes) * scale.mantissa[0] >> scale.right[0]) + 1
    op = "SUB" if step.op.overloadpacket is aten.sub else "ADD"
    total = file.made(op, terms, f"{step.result.name}_sums", [step.result.shape[d] for d in order])
    finished(step, total, order, last, most)


def _elementwise_product(step: Step) -> None:
    (x, y), order = _both(step)
    a, b, file = step.arg(0), step.arg(1), step.file
    inputs = [plain(file, x, a.zero), plain(file, y, b.zero), file.constant([0], torch.int8)]
    shape = [step.result.shape[d] for d in order]
    total = file.made("MUL", inputs, f"{step.result.name}_sums", shape)
    scale = Scale.of(step.convention, _float32(a.scale), _float32(b.scale), _float32(step.result.scale))
    finished(step, total, order, scale, _largest(a) * _largest(b))


def _concatenation(step: Step) -> None:
    parts, dim, file = step.arg(0), step.arg(1, 0) % len(step.result.shape), step.file
    order, inputs = common_order(parts), []
    for i, part in enumerate(parts):
        name = tensor(file, part, order)
        if not part.is_alike(step.result):
            part_scale = _float32(part.scale)
            scale = Scale.of(step.convention, part_scale, torch.ones_like(part_scale), _float32(step.result.scale))
            like = file.tensor(f"{step.result.name}_part{i}", file.sizes[name], part.dtype)
            name = rescaled(file, name, like, scale, (part.zero, step.result.zero))
        inputs.append(name)
    shape = [step.result.shape[d] for d in order]
    joined = file.made("CONCAT", inputs, f"{step.result.name}_joined", shape, step.result.dtype, axis=order.index(dim))
    same(step, joined, step.result, order)


# ---- means and pools


def _mean(step: Step) -> None:
    x, file = step.arg(0), step.file
    if step.op is not aten.mean.dim:
        _pool(step)
        return
    rule = _convention(step, TosaMean)
    dims = [d % len(x.shape) for d in step.arg(1) or range(len(x.shape))]
    keeps, count = bool(step.arg(2, False)), torch.Size([x.shape[d] for d in dims]).numel()
    most = _largest(x) * count
    if most >= 2**31:
        raise NotImplementedError(f"the sum of {count} codes of {x.dtype} does not fit int32")
    order = LAST if LAST in x.tensors and (keeps or sorted(dims) == [2, 3]) else x.plain
    total = plain(file, tensor(file, x, order), x.zero)
    for d in dims:
        shape = [1 if order[i] == d else n for i, n in enumerate(file.sizes[total])]
        total = file.made("REDUCE_SUM", [total], f"{step.result.name}_sums", shape, axis=order.index(d))
    multiplier = rule.multiplier(_float64(x.scale), _float64(step.result.scale), torch.tensor(count))
    finished(step, total, order if keeps else step.result.plain, Scale.number(multiplier), most)


def _pool(step: Step) -> None:
    """One- or two-dimensional average and maximum pools."""
    if step.op in TWO_DIMENSIONAL:
        write_as_two_dimensional(step, _pool, _in_layout)
        return
    x, file = step.arg(0), step.file
    is_maximum, kernel, stride, pad, _ = window_of(step, "TOSA")
    image, pads = _window(file, tensor(file, x, LAST), step.result.shape[2:], kernel, stride, pad)
    attributes: JsonObject = {"kernel": list(kernel), "stride": list(stride), "pad": pads}
    shape, inputs = [step.result.shape[d] for d in LAST], [image]
    if is_maximum:
        attributes["nan_mode"] = "PROPAGATE"
    else:
        _convention(step, TosaAveragePool)
        inputs += [file.constant([x.zero], x.dtype)] * 2
        attributes["acc_type"] = "INT32"
    op = "MAX_POOL2D" if is_maximum else "AVG_POOL2D"
    pooled = file.made(op, inputs, f"{step.result.name}_pooled", shape, x.dtype, **attributes)
    same(step, pooled, x, LAST)


def _relu(step: Step) -> None:
    if step.op is not aten.relu.default:
        raise NotImplementedError(f"a separate {step.op} is not supported; relu is")
    x, order = step.arg(0), common_order([step.arg(0)])
    same(step, tensor(step.file, x, order), x, order, step.result.zero)


WRITTEN: dict[families.Family, Callable[[Step], None]] = {
    families.MATRIX: _matrix,
    families.CONVOLUTION: _convolution,
    families.ADD: _sum,
    families.MULTIPLY: _elementwise_product,
    families.CONCATENATE: _concatenation,
    families.MEAN: _mean,
    families.MAXIMUM: _pool,
    families.INTERPOLATE: interpolated,
    families.NEAREST: repeated,
    families.SOFTMAX: softmax,
    families.FUNCTION: function,
    families.BOUND: _relu,
    families.VIEW: viewed,
}
"""The converter of each family. It raises NotImplementedError for a call that TOSA does not support."""
