"""What each family of operators becomes in a file of onnxruntime's operators of integers: one function each, which
reads a call and fills its result's codes.

Tensors lie as in the program. A range after an operator is a Clip of codes, a change of scale a concatenation of one
part, which onnxruntime does by a table. (Between DequantizeLinear and QuantizeLinear it joins changes that follow each
other.) A function of single codes is a table that the file has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.dispatch.operators import (
    ADD,
    BOUND,
    CONCATENATE,
    CONVOLUTION,
    EMBEDDING,
    FUNCTION,
    MATRIX,
    MAXIMUM,
    MEAN,
    MULTIPLY,
    NEAREST,
    SOFTMAX,
    VIEW,
    Family,
    aten,
)
from hop.export.rewrite.code_floats import Held, run_requantized
from hop.export.targets.qoperator.file import CONTRIB, File, kind
from hop.export.targets.tflite.operators import bias_codes
from hop.export.targets.tflite.steps import Index, Step, Weight
from hop.export.targets.tflite.values import Codes, new, tensor
from hop.export.targets.tflite.views import permutation
from hop.numerics.formats import INT8, UINT8
from hop.numerics.integer_functions import OrtAdd, OrtAveragePool, OrtMean, OrtMultiply, OrtSoftmax
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention, Division, FloatMultiplier
from hop.numerics.scale_rules import Static

_CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_LEAST, _MOST = 2.0**-32, 2.0**8  # factors of means
_UNSIGNED = 128  # what is added to codes of int8 to make them uint8


# ---- how results are named, moved and bounded


def _convention(step: Step, kind: type[Convention]) -> None:
    if step.convention is not None and not isinstance(step.convention, kind):
        raise NotImplementedError(
            f"its convention is {step.convention}; onnxruntime's operator computes {kind.__name__}: take the target "
            "ONNX_INTEGER"
        )


def _units(file: File, x: Codes) -> list[str]:
    return [file.scale(x.scale), file.zero(x.zero, x.dtype)]


def _operand(file: File, x: Codes) -> list[str]:
    """A tensor, its scale and its zero point."""
    return [tensor(file, x), *_units(file, x)]


def _like(x: Codes, shape: Sequence[int], step: Step) -> Codes:
    """Codes of the units of x, and of other sizes, on the way to the result."""
    return Codes(f"{step.result.name}_of", tuple(shape), x.scale, x.zero, x.dtype)


def _give(step: Step, made: Codes, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
    """The result of a node that gives `made`: in the result's sizes and units, and within its range."""
    file, result = step.file, step.result
    low, high = _bounds(step)
    rest: list[tuple[str, Codes, list[str]]] = []
    if made.shape != result.shape:
        shape = file.numbers(result.shape, torch.int64, "sizes")
        rest.append(("Reshape", _like(made, result.shape, step), [shape]))
    if made.dtype != result.dtype:
        raise NotImplementedError(f"its codes are {result.dtype}, and what it reads {made.dtype}; take one dtype")
    if not made.is_alike(result):
        rest.append(("QLinearConcat", result, _units(file, made)))
    if low is not None or high is not None:
        bounds = ["" if n is None else file.zero(n, result.dtype) for n in (low, high)]
        rest.append(("Clip", result, bounds))
    x = file.node(op, inputs, _output(step, made, not rest), domain, **attributes)
    for i, (name, codes, more) in enumerate(rest):
        out = _output(step, codes, i == len(rest) - 1)
        if name == "QLinearConcat":
            x = file.node(name, [*_units(file, result), x, *more], out, CONTRIB, axis=0)
        else:
            x = file.node(name, [x, *more], out)
    result.tensors[result.plain] = x


def _output(step: Step, codes: Codes, is_last: bool) -> str:
    if is_last:
        return new(step.file, step.result, step.result.plain)
    return step.file.tensor(f"{step.result.name}_whole", codes.shape, codes.dtype)


def _bounds(step: Step) -> list[int | None]:
    """The range of the activation that follows, in codes."""
    info, scale = torch.iinfo(step.result.dtype), torch.tensor(step.result.scale)
    codes = [None if b is None else int((torch.tensor(b) / scale).round()) for b in (step.low, step.high)]
    return [None if n is None else min(max(n + step.result.zero, info.min), info.max) for n in codes]


def _sized(file: File, x: str, shape: Sequence[int], name: str) -> str:
    """x in other sizes."""
    if file.sizes[x] == tuple(shape):
        return x
    made = file.tensor(name, shape, file.dtypes[x])
    return file.node("Reshape", [x, file.numbers(shape, torch.int64, "sizes")], made)


# ---- products


def _weight(step: Step, x: Codes, weight: Weight, codes: Tensor) -> list[str]:
    """The codes of a weight, its scales and its zero points."""
    file, scales = step.file, weight.scales
    unsigned = x.dtype == torch.uint8 and file.weights == torch.uint8
    zero, dtype = (_UNSIGNED, torch.uint8) if unsigned else (0, torch.int8)
    made = file.tensor(weight.name, codes.shape, dtype, data=codes.to(torch.int16) + zero)
    if scales.numel() == 1:
        return [made, file.scale(scales.item()), file.zero(zero, dtype)]
    return [
        made,
        file.numbers(scales.tolist(), torch.float32, f"{weight.name}_scales"),
        file.numbers([zero] * scales.numel(), dtype, f"{weight.name}_zero_points"),
    ]


def _bias(step: Step, x: Codes, weight: Weight, channels: int) -> list[str]:
    if step.arg(2) is None:
        return []
    bias = bias_codes(x, weight, step.arg(2), channels)
    return [step.file.tensor(f"{step.result.name}_bias", bias.shape, bias.dtype, data=bias)]


def _matrix(step: Step) -> None:
    _convention(step, FloatMultiplier)
    x, weight, file = step.arg(0), step.arg(1), step.file
    if step.op is aten.bmm.default:
        _matmul(step, x, weight)
        return
    if step.op is not aten.linear.default or not isinstance(weight, Weight):
        raise NotImplementedError("a fully connected layer has a constant weight; of two activations bmm is written")
    (channels, width), rows = weight.codes.shape, torch.Size(x.shape[:-1]).numel()
    flat = _sized(file, tensor(file, x), (rows, width), f"{step.result.name}_rows")
    operands = [flat, *_units(file, x), *_weight(step, x, weight, weight.codes.t())]
    bias = _bias(step, x, weight, channels) or [""]
    made = _like(step.result, (rows, channels), step)
    _give(step, made, "QGemm", [*operands, *bias, *_units(file, step.result)], CONTRIB)


def _matmul(step: Step, x: Codes, other: Codes | Weight) -> None:
    file = step.file
    if isinstance(other, Weight):
        if other.scales.numel() != 1:
            raise NotImplementedError("the second operand of a product of activations has one scale")
        second = _weight(step, x, other, other.codes)
    else:
        second = _operand(file, other)
    _give(step, step.result, "QLinearMatMul", [*_operand(file, x), *second, *_units(file, step.result)])


def _convolution(step: Step) -> None:
    _convention(step, FloatMultiplier)
    x, weight, file = step.arg(0), step.arg(1), step.file
    n = _CONVOLUTIONS.get(step.op, 0)
    if not isinstance(weight, Weight) or len(x.shape) != n + 2:
        raise NotImplementedError("convolutions in batches, with a constant weight, are written")
    stride, pad, dilation = (_each(step.arg(i), n, d) for i, d in ((3, 1), (4, 0), (5, 1)))
    operands = [*_operand(file, x), *_weight(step, x, weight, weight.codes), *_units(file, step.result)]
    bias = _bias(step, x, weight, len(weight.codes))
    own = {"strides": stride, "pads": [*pad, *pad], "dilations": dilation, "group": step.arg(6, 1)}
    _give(step, step.result, "QLinearConv", [*operands, *bias], **own)


def _each(x: Any, n: int, default: int) -> list[int]:
    found = [x] if isinstance(x, int) else list(x or [default])
    return found * n if len(found) == 1 else found


# ---- two operands


def _both(step: Step) -> list[list[str]]:
    operands = step.arg(0), step.arg(1)
    if not all(isinstance(x, Codes) for x in operands):
        raise NotImplementedError("both operands must be quantized: an operand of floats is not written")
    return [_operand(step.file, x) for x in operands]


def _sum(step: Step) -> None:
    a, b = _both(step)
    if step.op.overloadpacket is aten.sub:
        _difference(step, a, b)
        return
    _convention(step, OrtAdd)
    _give(step, step.result, "QLinearAdd", [*a, *b, *_units(step.file, step.result)], CONTRIB)


def _difference(step: Step, a: Sequence[str], b: Sequence[str]) -> None:
    """Of floats: there is none of codes."""
    _convention(step, Division)
    if step.arg(2, 1) != 1 or step.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("a difference is written with the factor 1")
    file, name = step.file, step.result.name
    floats = [
        file.node("DequantizeLinear", own, file.tensor(f"{name}_operand", file.sizes[own[0]], torch.float32))
        for own in (a, b)
    ]
    made = file.node("Sub", floats, file.tensor(f"{name}_floats", step.result.shape, torch.float32))
    _give(step, step.result, "QuantizeLinear", [made, *_units(file, step.result)])


def _product(step: Step) -> None:
    _convention(step, OrtMultiply)
    a, b = _both(step)
    _give(step, step.result, "QLinearMul", [*a, *b, *_units(step.file, step.result)], CONTRIB)


def _concatenation(step: Step) -> None:
    _convention(step, Division)
    parts, dim = step.arg(0), step.arg(1, 0) % len(step.result.shape)
    if any(p.dtype != step.result.dtype for p in parts):
        raise NotImplementedError("QLinearConcat takes codes of one dtype, which its result has")
    operands = [name for p in parts for name in _operand(step.file, p)]
    _give(step, step.result, "QLinearConcat", [*_units(step.file, step.result), *operands], CONTRIB, axis=dim)


# ---- means, pools, softmax


def _global_mean(step: Step, x: Codes, dims: Sequence[int]) -> None:
    """A mean over dimensions, which come last then."""
    file, kept = step.file, [d for d in range(len(x.shape)) if d not in dims]
    image, by = tensor(file, x), [*kept, *dims]
    if by != sorted(by):
        shape = [x.shape[d] for d in by]
        image = file.transposed(image, by, file.tensor(f"{step.result.name}_last", shape, x.dtype))
    sizes = torch.Size([x.shape[d] for d in kept]).numel(), torch.Size([x.shape[d] for d in dims]).numel()
    if not _LEAST <= x.scale / (step.result.scale * sizes[1]) < _MOST:
        raise NotImplementedError(
            f"the scale {x.scale} over {step.result.scale} and {sizes[1]} elements is beyond 2^-32 to 2^8, which "
            "QLinearGlobalAveragePool takes"
        )
    image = _sized(file, image, (1, *sizes), f"{step.result.name}_rows")
    operands = [image, *_units(file, x), *_units(file, step.result)]
    made = _like(step.result, (1, sizes[0], 1), step)
    _give(step, made, "QLinearGlobalAveragePool", operands, CONTRIB, channels_last=0)


def _mean(step: Step) -> None:
    x = step.arg(0)
    if step.op is aten.mean.dim:
        _convention(step, OrtMean)
        dims = step.arg(1)
        _global_mean(step, x, sorted({d % len(x.shape) for d in dims} if dims else range(len(x.shape))))
        return
    _convention(step, OrtAveragePool)
    if step.op.overloadpacket is aten.adaptive_avg_pool2d:
        kernel = [n // m for n, m in zip(x.shape[2:], step.result.shape[2:], strict=True)]
        pool: dict[str, Any] = {"kernel_shape": kernel, "strides": kernel, "pads": [0] * 4}
    else:
        pool = _window(step)
        if step.arg(6) is not None or step.arg(4, False):
            raise NotImplementedError("divisor_override and ceil_mode are not written")
        pool["count_include_pad"] = int(step.arg(5, True))
    if pool["kernel_shape"] == list(x.shape[2:]) and not any(pool["pads"]):
        _global_mean(step, x, [2, 3])
        return
    operands = [*_operand(step.file, x), *_units(step.file, step.result)]
    _give(step, step.result, "QLinearAveragePool", operands, CONTRIB, channels_last=0, **pool)


def _window(step: Step) -> dict[str, Any]:
    """The window of a pool of two dimensions."""
    if len(step.arg(0).shape) != 4:
        raise NotImplementedError("pools of two dimensions, in batches, are written")
    kernel = _each(step.arg(1), 2, 1)
    stride, pad = _each(step.arg(2) or kernel, 2, 1), _each(step.arg(3, 0), 2, 0)
    return {"kernel_shape": kernel, "strides": stride, "pads": [*pad, *pad]}


def _maximum(step: Step) -> None:
    _convention(step, Division)
    if step.op is not aten.max_pool2d.default:
        raise NotImplementedError("pools of two dimensions, in batches, are written")
    if step.arg(5, False):
        raise NotImplementedError("ceil_mode is not written")
    x, pool = step.arg(0), _window(step)
    made = _like(x, step.result.shape, step)
    _give(step, made, "MaxPool", [tensor(step.file, x)], dilations=_each(step.arg(4, 1), 2, 1), **pool)


def _softmax(step: Step) -> None:
    _convention(step, OrtSoftmax)
    x = step.arg(0)
    operands = [*_operand(step.file, x), *_units(step.file, step.result)]
    axis = step.arg(1) % len(x.shape)
    _give(step, step.result, "QLinearSoftmax", operands, CONTRIB, axis=axis, opset=13)


def _function(step: Step) -> None:
    """Any function of one code, by what its convention gives for all of them."""
    x, file, rule, result = step.arg(0), step.file, step.convention, step.result
    assert rule is not None
    info = torch.iinfo(x.dtype)
    every = torch.arange(256).to(torch.uint8).view(x.dtype)  # a code below 0 is a place from the end
    format = {f.dtype: f for f in (INT8, UINT8)}
    own = Quantizer(format[x.dtype], (-1,), Static(affine=True))
    output = Quantizer(format[result.dtype], (-1,), Static(affine=True, requantize=rule))
    operand = Held(own, every, [x.scale, x.zero], torch.float32)
    table = run_requantized(
        step.op, output, [operand, *step.args[1:]], step.kwargs, [result.scale, result.zero], None, []
    )
    values = file.tensor(f"{result.name}_table", (info.max - info.min + 1,), result.dtype, data=table)
    wide = file.tensor(f"{result.name}_places", x.shape, torch.int32)
    places = file.node("Cast", [tensor(file, x)], wide, to=kind(torch.int32))
    result.tensors[result.plain] = file.node("Gather", [values, places], new(file, result, result.plain), axis=0)


# ---- codes that are moved


def _bound(step: Step) -> None:
    if step.op is not aten.relu.default:
        _function(step)
        return
    _convention(step, Division)
    x = step.arg(0)
    _give(step, _like(x, x.shape, step), "Clip", [tensor(step.file, x), step.file.zero(x.zero, x.dtype)])


def _viewed(step: Step) -> None:
    _convention(step, Division)
    x, name, file = step.arg(0), step.op._schema.name.removeprefix("aten::"), step.file
    of = tensor(file, x)
    if name in ("permute", "transpose", "t", "movedim"):
        _give(step, _like(x, step.result.shape, step), "Transpose", [of], perm=permutation(step, x))
    elif name in ("slice", "narrow", "select"):
        _slice(step, x, name)
    elif name in ("clone", "contiguous", "alias", "detach"):
        _give(step, _like(x, x.shape, step), "Identity", [of])
    else:
        sizes = file.numbers(step.result.shape, torch.int64, "sizes")
        _give(step, _like(x, step.result.shape, step), "Reshape", [of, sizes])


def _slice(step: Step, x: Codes, name: str) -> None:
    dim = step.arg(1, 0) % len(x.shape)
    size, stride = x.shape[dim], 1
    if name == "slice":
        start, stop = slice(step.arg(2) or 0, step.arg(3)).indices(size)[:2]
        stride = step.arg(4, 1)
    elif name == "narrow":
        start = step.arg(2) % max(size, 1)
        stop = start + step.arg(3)
    else:
        start = step.arg(2) % size
        stop = start + 1
    numbers = [step.file.numbers([n], torch.int64, "place") for n in (start, max(start, stop), dim, stride)]
    shape = list(x.shape)
    shape[dim] = max(0, -(-(stop - start) // stride))
    _give(step, _like(x, shape, step), "Slice", [tensor(step.file, x), *numbers])


def padded(step: Step) -> None:
    """Codes with others around them."""
    x, flat, fill = step.arg(0), list(step.arg(1)), int(step.arg(2, 0))
    sides = [(0, 0)] * (len(x.shape) - len(flat) // 2) + list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    pads = step.file.numbers([n for side in zip(*sides, strict=True) for n in side], torch.int64, "sides")
    _give(step, _like(x, step.result.shape, step), "Pad", [tensor(step.file, x), pads, step.file.zero(fill, x.dtype)])


def _nearest(step: Step) -> None:
    x = step.arg(0)
    pairs = list(zip(x.shape[2:], step.result.shape[2:], strict=True))
    if step.op is not aten.upsample_nearest2d.vec or len(x.shape) != 4 or any(out % n for n, out in pairs):
        raise NotImplementedError("nearest neighbors are written of pictures that grow by whole factors")
    sizes = step.file.numbers(step.result.shape, torch.int64, "sizes")
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    _give(step, _like(x, step.result.shape, step), "Resize", [tensor(step.file, x), "", "", sizes], **how)


def _rows(step: Step) -> None:
    """Rows of a table with one scale."""
    table, places = step.arg(0), step.arg(1)
    if isinstance(table, Weight) and table.scales.numel() == 1:
        table = step.constant(table)
    if not isinstance(table, Codes) or not isinstance(places, Index):
        raise NotImplementedError("an embedding is written of a table with one scale, at places that are an input")
    _give(step, _like(table, step.result.shape, step), "Gather", [tensor(step.file, table), places.tensor], axis=0)


WRITTEN: dict[Family, Callable[[Step], None]] = {
    MATRIX: _matrix,
    CONVOLUTION: _convolution,
    ADD: _sum,
    MULTIPLY: _product,
    CONCATENATE: _concatenation,
    MEAN: _mean,
    MAXIMUM: _maximum,
    NEAREST: _nearest,
    SOFTMAX: _softmax,
    BOUND: _bound,
    FUNCTION: _function,
    EMBEDDING: _rows,
    VIEW: _viewed,
}
"""How each family is written. A function raises NotImplementedError for a call that onnxruntime has no operator for."""
