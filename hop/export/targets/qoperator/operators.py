"""Converters of operator families to onnxruntime's integer operators: each reads a call and sets its result's codes.

Tensors have the program's layout. A range after an operator is a Clip of codes; a change of scale is a concatenation
with one part, which onnxruntime computes by a table. (Between DequantizeLinear and QuantizeLinear it would merge
consecutive changes.) A function of single codes is a table in the file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.dispatch import operators as families
from hop.dispatch.operators import aten
from hop.export.rewrite.code_floats import Held, run_requantized
from hop.export.targets.integer.arguments import bias_codes
from hop.export.targets.integer.steps import Index, Step, Weight
from hop.export.targets.integer.values import Codes, new, tensor
from hop.export.targets.qoperator.file import CONTRIB, kind
from hop.export.targets.qoperator.results import check_convention, give, like, operand, sized, units
from hop.export.targets.qoperator.views import viewed
from hop.numerics.formats import INT8, UINT8
from hop.numerics.integer.functions import OrtAdd, OrtAveragePool, OrtMean, OrtMultiply, OrtSoftmax
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Division, FloatMultiplier
from hop.numerics.scale_rules import Static

_CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_LEAST, _MOST = 2.0**-32, 2.0**8  # factors of means
_UNSIGNED = 128  # added to int8 codes to make them uint8


def each(x: Any, n: int, default: int) -> list[int]:
    sizes = [x] if isinstance(x, int) else list(x or [default])
    return sizes * n if len(sizes) == 1 else sizes


# ---- products


def _weight(step: Step, x: Codes, weight: Weight, codes: Tensor) -> list[str]:
    """The codes of a weight, its scales and its zero points."""
    file, scales = step.file, weight.scales
    unsigned = x.dtype == torch.uint8 and file.weights == torch.uint8
    zero, dtype = (_UNSIGNED, torch.uint8) if unsigned else (0, torch.int8)
    tensor_name = file.tensor(weight.name, codes.shape, dtype, data=codes.to(torch.int16) + zero)
    if scales.numel() == 1:
        return [tensor_name, file.scale(scales.item()), file.zero(zero, dtype)]
    return [
        tensor_name,
        file.numbers(scales.tolist(), torch.float32, f"{weight.name}_scales"),
        file.numbers([zero] * scales.numel(), dtype, f"{weight.name}_zero_points"),
    ]


def _bias(step: Step, x: Codes, weight: Weight) -> list[str]:
    if step.arg(2) is None:
        return []
    bias = bias_codes(x, weight, step.arg(2))
    return [step.file.tensor(f"{step.result.name}_bias", bias.shape, bias.dtype, data=bias)]


def _matrix(step: Step) -> None:
    check_convention(step, FloatMultiplier)
    x, weight, file = step.arg(0), step.arg(1), step.file
    if step.op is aten.bmm.default:
        _matmul(step, x, weight)
        return
    if step.op is not aten.linear.default or not isinstance(weight, Weight):
        raise NotImplementedError("a fully connected layer needs a constant weight; products of activations need bmm")
    (channels, width), rows = weight.codes.shape, torch.Size(x.shape[:-1]).numel()
    flat = sized(file, tensor(file, x), (rows, width), f"{step.result.name}_rows")
    operands = [flat, *units(file, x), *_weight(step, x, weight, weight.codes.t())]
    bias = _bias(step, x, weight) or [""]
    output = like(step.result, (rows, channels), step)
    give(step, output, "QGemm", [*operands, *bias, *units(file, step.result)], CONTRIB)


def _matmul(step: Step, x: Codes, other: Codes | Weight) -> None:
    file = step.file
    if isinstance(other, Weight):
        if other.scales.numel() != 1:
            raise NotImplementedError("the second operand of a product of activations must have one scale")
        second = _weight(step, x, other, other.codes)
    else:
        second = operand(file, other)
    give(step, step.result, "QLinearMatMul", [*operand(file, x), *second, *units(file, step.result)])


def _convolution(step: Step) -> None:
    check_convention(step, FloatMultiplier)
    x, weight, file = step.arg(0), step.arg(1), step.file
    n = _CONVOLUTIONS.get(step.op, 0)
    if not isinstance(weight, Weight) or len(x.shape) != n + 2:
        raise NotImplementedError("only batched convolutions with a constant weight are supported")
    stride, pad, dilation = (each(step.arg(i), n, d) for i, d in ((3, 1), (4, 0), (5, 1)))
    operands = [*operand(file, x), *_weight(step, x, weight, weight.codes), *units(file, step.result)]
    bias = _bias(step, x, weight)
    attributes = {"strides": stride, "pads": [*pad, *pad], "dilations": dilation, "group": step.arg(6, 1)}
    give(step, step.result, "QLinearConv", [*operands, *bias], **attributes)


# ---- two operands


def _both(step: Step) -> list[list[str]]:
    operands = step.arg(0), step.arg(1)
    if not all(isinstance(x, Codes) for x in operands):
        raise NotImplementedError("both operands must be quantized: float operands are not supported")
    return [operand(step.file, x) for x in operands]


def _sum(step: Step) -> None:
    a, b = _both(step)
    if step.op.overloadpacket is aten.sub:
        _difference(step, a, b)
        return
    check_convention(step, OrtAdd)
    give(step, step.result, "QLinearAdd", [*a, *b, *units(step.file, step.result)], CONTRIB)


def _difference(step: Step, a: Sequence[str], b: Sequence[str]) -> None:
    """Subtract in floats, because onnxruntime has no integer operator for it."""
    check_convention(step, Division)
    if step.arg(2, 1) != 1 or step.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("subtraction is supported with alpha=1 only")
    file, name = step.file, step.result.name
    floats = [
        file.node("DequantizeLinear", own, file.tensor(f"{name}operand", file.sizes[own[0]], torch.float32))
        for own in (a, b)
    ]
    difference = file.node("Sub", floats, file.tensor(f"{name}_floats", step.result.shape, torch.float32))
    give(step, step.result, "QuantizeLinear", [difference, *units(file, step.result)])


def _product(step: Step) -> None:
    check_convention(step, OrtMultiply)
    a, b = _both(step)
    give(step, step.result, "QLinearMul", [*a, *b, *units(step.file, step.result)], CONTRIB)


def _concatenation(step: Step) -> None:
    check_convention(step, Division)
    parts, dim = step.arg(0), step.arg(1, 0) % len(step.result.shape)
    if any(p.dtype != step.result.dtype for p in parts):
        raise NotImplementedError("QLinearConcat needs all codes in the dtype of its result")
    operands = [name for p in parts for name in operand(step.file, p)]
    give(step, step.result, "QLinearConcat", [*units(step.file, step.result), *operands], CONTRIB, axis=dim)


# ---- means, pools, softmax


def _global_mean(step: Step, x: Codes, dims: Sequence[int]) -> None:
    """A mean over dimensions, which are moved to the end."""
    file, kept = step.file, [d for d in range(len(x.shape)) if d not in dims]
    image, by = tensor(file, x), [*kept, *dims]
    if by != sorted(by):
        shape = [x.shape[d] for d in by]
        image = file.transposed(image, by, file.tensor(f"{step.result.name}_last", shape, x.dtype))
    sizes = torch.Size([x.shape[d] for d in kept]).numel(), torch.Size([x.shape[d] for d in dims]).numel()
    if not _LEAST <= x.scale / (step.result.scale * sizes[1]) < _MOST:
        raise NotImplementedError(
            f"the scale {x.scale} divided by {step.result.scale} and {sizes[1]} elements is outside 2^-32 to 2^8, the "
            "range of QLinearGlobalAveragePool"
        )
    image = sized(file, image, (1, *sizes), f"{step.result.name}_rows")
    operands = [image, *units(file, x), *units(file, step.result)]
    output = like(step.result, (1, sizes[0], 1), step)
    give(step, output, "QLinearGlobalAveragePool", operands, CONTRIB, channels_last=0)


def _mean(step: Step) -> None:
    x = step.arg(0)
    if step.op is aten.mean.dim:
        check_convention(step, OrtMean)
        dims = step.arg(1)
        _global_mean(step, x, sorted({d % len(x.shape) for d in dims} if dims else range(len(x.shape))))
        return
    check_convention(step, OrtAveragePool)
    if step.op.overloadpacket is aten.adaptive_avg_pool2d:
        kernel = [n // m for n, m in zip(x.shape[2:], step.result.shape[2:], strict=True)]
        pool: dict[str, Any] = {"kernel_shape": kernel, "strides": kernel, "pads": [0] * 4}
    else:
        pool = _window(step)
        if step.arg(6) is not None or step.arg(4, False):
            raise NotImplementedError("divisor_override and ceil_mode are not supported")
        pool["count_include_pad"] = int(step.arg(5, True))
    if pool["kernel_shape"] == list(x.shape[2:]) and not any(pool["pads"]):
        _global_mean(step, x, [2, 3])
        return
    operands = [*operand(step.file, x), *units(step.file, step.result)]
    give(step, step.result, "QLinearAveragePool", operands, CONTRIB, channels_last=0, **pool)


def _window(step: Step) -> dict[str, Any]:
    """The window of a two-dimensional pool."""
    if len(step.arg(0).shape) != 4:
        raise NotImplementedError("only batched two-dimensional pools are supported")
    kernel = each(step.arg(1), 2, 1)
    stride, pad = each(step.arg(2) or kernel, 2, 1), each(step.arg(3, 0), 2, 0)
    return {"kernel_shape": kernel, "strides": stride, "pads": [*pad, *pad]}


def _maximum(step: Step) -> None:
    check_convention(step, Division)
    if step.op is not aten.max_pool2d.default:
        raise NotImplementedError("only batched two-dimensional pools are supported")
    if step.arg(5, False):
        raise NotImplementedError("ceil_mode is not supported")
    x, pool = step.arg(0), _window(step)
    output = like(x, step.result.shape, step)
    give(step, output, "MaxPool", [tensor(step.file, x)], dilations=each(step.arg(4, 1), 2, 1), **pool)


def _softmax(step: Step) -> None:
    check_convention(step, OrtSoftmax)
    x = step.arg(0)
    operands = [*operand(step.file, x), *units(step.file, step.result)]
    axis = step.arg(1) % len(x.shape)
    give(step, step.result, "QLinearSoftmax", operands, CONTRIB, axis=axis, opset=13)


def _function(step: Step) -> None:
    """Any function of single codes, as a table of its convention's results for all codes."""
    x, file, rule, result = step.arg(0), step.file, step.convention, step.result
    assert rule is not None
    info = torch.iinfo(x.dtype)
    every = torch.arange(256).to(torch.uint8).view(x.dtype)  # Gather counts negative codes from the end
    format = {f.dtype: f for f in (INT8, UINT8)}
    quantizer = Quantizer(format[x.dtype], (-1,), Static(affine=True))
    output = Quantizer(format[result.dtype], (-1,), Static(affine=True, requantize=rule))
    operand = Held(quantizer, every, [x.scale, x.zero], torch.float32)
    table = run_requantized(
        step.op, output, [operand, *step.args[1:]], step.kwargs, [result.scale, result.zero], None, []
    )
    values = file.tensor(f"{result.name}_table", (info.max - info.min + 1,), result.dtype, data=table)
    cast = file.tensor(f"{result.name}_places", x.shape, torch.int32)
    places = file.node("Cast", [tensor(file, x)], cast, to=kind(torch.int32))
    result.tensors[result.plain] = file.node("Gather", [values, places], new(file, result, result.plain), axis=0)


def _bound(step: Step) -> None:
    if step.op is not aten.relu.default:
        _function(step)
        return
    check_convention(step, Division)
    x = step.arg(0)
    give(step, like(x, x.shape, step), "Clip", [tensor(step.file, x), step.file.zero(x.zero, x.dtype)])


def _rows(step: Step) -> None:
    """Rows of a table with one scale."""
    table, places = step.arg(0), step.arg(1)
    if isinstance(table, Weight) and table.scales.numel() == 1:
        table = step.constant(table)
    if not isinstance(table, Codes) or not isinstance(places, Index):
        raise NotImplementedError("an embedding needs a table with one scale, and indices that are an input")
    give(step, like(table, step.result.shape, step), "Gather", [tensor(step.file, table), places.tensor], axis=0)


def _nearest(step: Step) -> None:
    x = step.arg(0)
    pairs = list(zip(x.shape[2:], step.result.shape[2:], strict=True))
    if step.op is not aten.upsample_nearest2d.vec or len(x.shape) != 4 or any(out % n for n, out in pairs):
        raise NotImplementedError("nearest-neighbor resizing is supported for images and integer factors only")
    sizes = step.file.numbers(step.result.shape, torch.int64, "sizes")
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    give(step, like(x, step.result.shape, step), "Resize", [tensor(step.file, x), "", "", sizes], **how)


WRITTEN: dict[families.Family, Callable[[Step], None]] = {
    families.MATRIX: _matrix,
    families.CONVOLUTION: _convolution,
    families.ADD: _sum,
    families.MULTIPLY: _product,
    families.CONCATENATE: _concatenation,
    families.MEAN: _mean,
    families.MAXIMUM: _maximum,
    families.NEAREST: _nearest,
    families.SOFTMAX: _softmax,
    families.BOUND: _bound,
    families.FUNCTION: _function,
    families.EMBEDDING: _rows,
    families.VIEW: viewed,
}
"""The converter of each family. It raises NotImplementedError for a call that onnxruntime has no operator for."""
