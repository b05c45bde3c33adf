"""Converters of operator families to TFLite's operators: each reads a call and sets its result's codes.

If TFLite's operator returns codes with its operand's scale, a QUANTIZE follows that changes the scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hop.compat.pytree import Kwargs
from hop.dispatch import operators as families
from hop.dispatch.operators import aten
from hop.export.targets.integer.arguments import bias_codes, no_ceil_mode, pair, window_of
from hop.export.targets.integer.rows import TWO_DIMENSIONAL, write_as_two_dimensional
from hop.export.targets.integer.steps import Index, Step, Weight
from hop.export.targets.integer.values import LAST, Codes, common_order, new, tensor
from hop.export.targets.tflite.tables import write_table
from hop.export.targets.tflite.views import padded, reshaped, viewed
from hop.numerics.integer.resize import sizes_of
from hop.numerics.interpolation import BILINEAR
from hop.numerics.requantization import Division

_FUNCTIONS = {
    aten.sigmoid.default: ("LOGISTIC", ""),
    aten.tanh.default: ("TANH", ""),
    aten.gelu.default: ("GELU", "GeluOptions"),
    aten.exp.default: ("EXP", "ExpOptions"),
    aten.rsqrt.default: ("RSQRT", ""),
    aten.hardswish.default: ("HARD_SWISH", ""),
    aten.leaky_relu.default: ("LEAKY_RELU", "LeakyReluOptions"),
}
_LOWEST = -128


# ---- products


def _bias(step: Step, x: Codes, weight: Weight, bias: Tensor | None, dim: int = 0) -> int:
    bias = bias_codes(x, weight, bias, dim)
    scales = (torch.tensor(x.scale) * weight.scales).tolist()
    quantization = (scales, [0] * len(scales), 0)
    return step.file.tensor(f"{step.result.name}_bias", bias.shape, bias.dtype, quantization, bias)


def _filter(step: Step, weight: Weight, codes: Tensor, along: int) -> int:
    scales = weight.scales.tolist()
    return step.file.tensor(weight.name, codes.shape, torch.int8, (scales, [0] * len(scales), along), codes)


def _linear(step: Step) -> None:
    x, weight, bias = step.arg(0), step.arg(1), step.arg(2)
    if step.op is aten.bmm.default and isinstance(weight, Codes):
        inputs = [tensor(step.file, x), tensor(step.file, weight)]
        step.write_own("BATCH_MATMUL", inputs, step.result.plain, "BatchMatMulOptions")
        return
    if not isinstance(weight, Weight):
        raise NotImplementedError("a fully connected layer needs a constant weight; products of activations need bmm")
    inputs = [tensor(step.file, x), _filter(step, weight, weight.codes, 0), _bias(step, x, weight, bias)]
    options = {"fusedActivationFunction": step.activation(), "keepNumDims": len(x.shape) != 2}
    step.write("FULLY_CONNECTED", inputs, step.result.plain, "FullyConnectedOptions", **options)


def _is_same(size: int, kernel: int, stride: int, pad: int) -> bool:
    """Whether TFLite's padding SAME equals `pad` on both sides, as far as windows read it."""
    count = -(-size // stride)
    total = max((count - 1) * stride + kernel - size, 0)
    return (size + 2 * pad - kernel) // stride + 1 == count and total // 2 == pad


def _padded(
    step: Step, x: Codes, kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int], fill: int | None
) -> tuple[int, int]:
    """The tensor that windows slide over, and TFLite's padding mode; explicitly padded with `fill` if the mode is
    neither.
    """
    index, sizes = tensor(step.file, x, LAST), x.shape[2:]
    if pad == (0, 0):
        return index, step.file.padding("VALID")
    if all(_is_same(*four) for four in zip(sizes, kernel, stride, pad, strict=True)):
        return index, step.file.padding("SAME")
    if fill is None:
        raise NotImplementedError(
            f"TFLite's average pools do not support a padding of {pad} on all sides for windows {kernel} unless it is "
            "counted; use count_include_pad=True"
        )
    return _explicitly_padded(step, x, pad, fill)


def _explicitly_padded(
    step: Step, x: Codes, pad: tuple[int, int], fill: int, more: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """The tensor padded on both sides, and with `more` at the end; and TFLite's padding mode VALID."""
    after = [p + m for p, m in zip(pad, more, strict=True)]
    shape = (*x.shape[:2], *(n + sum(sides) for n, *sides in zip(x.shape[2:], pad, after, strict=True)))
    large = replace(x, name=f"{step.result.name}_padded", shape=shape, tensors={})
    padded(Step(step.file, aten.constant_pad_nd.default, (x, [pad[1], after[1], pad[0], after[0]], fill), {}, large))
    return tensor(step.file, large, LAST), step.file.padding("VALID")


def _transposed(step: Step, x: Codes, weight: Weight) -> None:
    """A transposed convolution: as SAME or VALID, or as VALID followed by a slice of the middle."""
    stride, pad, more = pair(step.arg(3)), pair(step.arg(4), 0), pair(step.arg(5), 0)
    file, result, sizes, kernel = step.file, step.result, step.result.shape[2:], weight.codes.shape[2:]
    whole = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], stride, kernel, strict=True)]
    each = zip(x.shape[2:], sizes, whole, stride, pad, strict=True)
    is_same = all(out == n * s and max(full - out, 0) // 2 == p for n, out, full, s, p in each)
    beyond = [max(m - p, 0) for m, p in zip(more, pad, strict=True)]
    if not is_same and any(beyond):
        x, whole = _longer(step, x, [-(-n // s) for n, s in zip(beyond, stride, strict=True)], stride, kernel)
    is_whole = is_same or list(sizes) == whole
    shape = result.shape if is_whole else (*result.shape[:2], *whole)
    output = result if is_whole else replace(result, name=f"{result.name}_whole", shape=shape, tensors={})
    inputs = [
        file.integers(f"{result.name}_sizes", [shape[d] for d in LAST]),
        _filter(step, weight, weight.codes.permute(1, 2, 3, 0), 0),
        tensor(file, x, LAST),
        _bias(step, x, weight, step.arg(2), dim=1),
    ]
    options = {"padding": file.padding("SAME" if is_same else "VALID"), "strideH": stride[0], "strideW": stride[1]}
    options["fusedActivationFunction"] = step.activation()
    index = file.operator("TRANSPOSE_CONV", inputs, new(file, output, LAST), "TransposeConvOptions", options)
    if is_whole:
        result.tensors[LAST] = index
        return
    ranges = [(0, shape[0]), *((p, p + n) for p, n in zip(pad, sizes, strict=True)), (0, shape[1])]
    places = [
        file.integers(f"{result.name}_{what}", n)
        for what, n in zip(("begin", "end"), zip(*ranges, strict=True), strict=True)
    ]
    places.append(file.integers(f"{result.name}_strides", [1] * 4))
    step.write("STRIDED_SLICE", [index, *places], LAST, "StridedSliceOptions")


def _spread(weight: Weight, dilation: tuple[int, int]) -> Weight:
    """A weight with zeros between its elements, whose convolution without dilation is the dilated one."""
    sizes = [d * (k - 1) + 1 for d, k in zip(dilation, weight.codes.shape[2:], strict=True)]
    codes = weight.codes.new_zeros([*weight.codes.shape[:2], *sizes])
    codes[:, :, :: dilation[0], :: dilation[1]] = weight.codes
    return replace(weight, codes=codes)


def _by_groups(step: Step, x: Codes, weight: Weight, groups: int) -> None:
    """A transposed convolution of each group of channels, and their concatenation."""
    ends, result, parts = (x.shape[1] // groups, step.result.shape[1] // groups), step.result, list[Codes]()
    tensor(step.file, x, LAST)
    for g in range(groups):
        own, its = (slice(g * n, (g + 1) * n) for n in ends)
        part, output = (
            replace(codes, name=f"{result.name}_{what}{g}", shape=(codes.shape[0], n, *codes.shape[2:]), tensors={})
            for codes, what, n in zip((x, result), ("input", "group"), ends, strict=True)
        )
        viewed(Step(step.file, aten.slice.Tensor, (x, 1, own.start, own.stop), {}, part))
        bias = None if step.arg(2) is None else step.arg(2)[its]
        group = replace(weight, name=f"{weight.name}_{g}", codes=weight.codes[own])
        _transposed(replace(step, args=(part, group, bias, *step.args[3:6]), result=output), part, group)
        parts.append(output)
    _concatenation(Step(step.file, aten.cat.default, (parts, 1), {}, result))


def _longer(
    step: Step, x: Codes, rows: list[int], stride: tuple[int, int], kernel: Sequence[int]
) -> tuple[Codes, list[int]]:
    """The operand of a transposed convolution with zeros at the end of each dimension, and the sizes of its whole
    result, which then reaches beyond the last window.
    """
    shape = (*x.shape[:2], *(n + r for n, r in zip(x.shape[2:], rows, strict=True)))
    large = replace(x, name=f"{step.result.name}_longer", shape=shape, tensors={})
    padded(Step(step.file, aten.constant_pad_nd.default, (x, [0, rows[1], 0, rows[0]], x.zero), {}, large))
    return large, [(n - 1) * s + k for n, s, k in zip(shape[2:], stride, kernel, strict=True)]


def _convolution(step: Step) -> None:
    if step.op in TWO_DIMENSIONAL:
        write_as_two_dimensional(step, _convolution, reshaped)
        return
    x, weight, bias = step.arg(0), step.arg(1), step.arg(2)
    if step.op is aten.conv_transpose2d.input and isinstance(weight, Weight) and len(x.shape) == 4:
        weight = weight if pair(step.arg(7)) == (1, 1) else _spread(weight, pair(step.arg(7)))
        if step.arg(6, 1) == 1:
            _transposed(step, x, weight)
        else:
            _by_groups(step, x, weight, step.arg(6))
        return
    named = step.op is aten.conv2d.padding  # "same" or "valid", as TFLite has them
    if not (named or step.op is aten.conv2d.default) or not isinstance(weight, Weight) or len(x.shape) != 4:
        raise NotImplementedError(
            "only batched one- or two-dimensional convolutions with a constant weight are supported"
        )
    stride, dilation = pair(step.arg(3)), pair(step.arg(5))
    groups, (out, per_group, *kernel) = step.arg(6, 1), weight.codes.shape
    reach = (dilation[0] * (kernel[0] - 1) + 1, dilation[1] * (kernel[1] - 1) + 1)
    if named:
        index, padding = tensor(step.file, x, LAST), step.file.padding(step.arg(4, "valid").upper())
    else:
        index, padding = _padded(step, x, reach, stride, pair(step.arg(4), 0), x.zero)
    options = {"padding": padding, "strideH": stride[0], "strideW": stride[1], "dilationHFactor": dilation[0]}
    options |= {"dilationWFactor": dilation[1], "fusedActivationFunction": step.activation()}
    if groups > 1 and per_group == 1:
        codes = weight.codes.permute(1, 2, 3, 0)
        inputs = [index, _filter(step, weight, codes, 3), _bias(step, x, weight, bias)]
        options["depthMultiplier"] = out // groups
        step.write("DEPTHWISE_CONV_2D", inputs, LAST, "DepthwiseConv2DOptions", **options)
        return
    inputs = [index, _filter(step, weight, weight.codes.permute(0, 2, 3, 1), 0), _bias(step, x, weight, bias)]
    step.write("CONV_2D", inputs, LAST, "Conv2DOptions", **options)


# ---- two operands


def _elementwise(step: Step) -> None:
    a, b = step.arg(0), step.arg(1)
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        raise NotImplementedError("both operands must be quantized: float operands are not supported")
    names = {"add": ("ADD", "AddOptions"), "sub": ("SUB", "SubOptions"), "mul": ("MUL", "MulOptions")}
    name, kind = names[step.op._schema.name.removeprefix("aten::")]
    order = common_order([a, b])
    inputs = [tensor(step.file, v, order if len(v.shape) == len(order) else None) for v in (a, b)]
    order = order if len(order) == len(step.result.shape) else step.result.plain
    more = {"potScaleInt16": False} if name != "MUL" and step.result.dtype == torch.int16 else {}
    step.write(name, inputs, order, kind, fusedActivationFunction=step.activation(), **more)


def _concatenation(step: Step) -> None:
    parts, dim = step.arg(0), step.arg(1, 0) % len(step.result.shape)
    order = common_order(parts)
    inputs = []
    for i, part in enumerate(parts):
        index = tensor(step.file, part, order)
        if not part.is_alike(step.result):
            like = replace(step.result, name=f"{step.result.name}_part{i}", shape=part.shape, tensors={})
            index = step.file.operator("QUANTIZE", [index], new(step.file, like, order), "QuantizeOptions")
        inputs.append(index)
    options = {"axis": order.index(dim), "fusedActivationFunction": step.file.activation("NONE")}
    step.write_alike(step.result, "CONCATENATION", inputs, order, "ConcatenationOptions", **options)


# ---- means and pools


_REDUCED = {aten.mean.dim: "MEAN", aten.amax.default: "REDUCE_MAX", aten.amin.default: "REDUCE_MIN"}


def _reduction(step: Step) -> None:
    """A mean, maximum or minimum over dimensions, or a pool."""
    x = step.arg(0)
    if step.op not in _REDUCED:
        _pool(step)
        return
    given = step.arg(1) or list(range(len(x.shape)))
    dims, keeps = [d % len(x.shape) for d in given], bool(step.arg(2, False))
    keeps_order = LAST in x.tensors and (keeps or sorted(dims) == [2, 3])
    order = LAST if keeps_order else x.plain
    axes = step.file.integers(f"{step.result.name}_axes", [order.index(d) for d in dims])
    result = order if keeps else step.result.plain
    source = step.result if step.op is aten.mean.dim else x  # a maximum keeps the scale
    inputs = [tensor(step.file, x, order), axes]
    step.write_alike(source, _REDUCED[step.op], inputs, result, "ReducerOptions", keepDims=keeps)


def _pool(step: Step) -> None:
    """One- or two-dimensional average and maximum pools."""
    if step.op in TWO_DIMENSIONAL:
        write_as_two_dimensional(step, _pool, reshaped)
        return
    x = step.arg(0)
    is_maximum, kernel, stride, pad, more = window_of(step)
    if any(more):
        if not is_maximum:
            raise NotImplementedError(no_ceil_mode("TFLite", "average pools"))
        index, padding = _explicitly_padded(step, x, pad, torch.iinfo(x.dtype).min, more)
    elif any(pad) and not is_maximum and step.arg(5, True):  # TFLite's own padding is not counted
        index, padding = _explicitly_padded(step, x, pad, x.zero)
    else:
        fill = torch.iinfo(x.dtype).min if is_maximum else None  # the smallest code never changes a maximum
        index, padding = _padded(step, x, kernel, stride, pad, fill)
    options = {"filterHeight": kernel[0], "filterWidth": kernel[1], "strideH": stride[0], "strideW": stride[1]}
    options |= {"padding": padding, "fusedActivationFunction": step.file.activation("NONE")}
    name = "MAX_POOL_2D" if is_maximum else "AVERAGE_POOL_2D"
    step.write_alike(x, name, [index], LAST, "Pool2DOptions", **options)


# ---- one operand


def _nearest(step: Step) -> None:
    x = step.arg(0)
    grows = len(x.shape) == 4 and not any(out % n for n, out in zip(x.shape[2:], step.result.shape[2:], strict=True))
    if step.op not in (aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec) or not grows:
        raise NotImplementedError("nearest-neighbor resizing is supported for images and integer factors only")
    sizes = step.file.integers(f"{step.result.name}_sizes", step.result.shape[2:])
    options = {"alignCorners": False, "halfPixelCenters": False}
    inputs = [tensor(step.file, x, LAST), sizes]
    step.write_alike(x, "RESIZE_NEAREST_NEIGHBOR", inputs, LAST, "ResizeNearestNeighborOptions", **options)


def _bilinear(step: Step) -> None:
    x = step.arg(0)
    if step.op not in BILINEAR:
        raise NotImplementedError("linear interpolation is supported for images (bilinear) only")
    sizes, align_corners = sizes_of(step.op, step.args[1:], x.shape[2:], "RESIZE_BILINEAR")
    inputs = [tensor(step.file, x, LAST), step.file.integers(f"{step.result.name}_sizes", sizes)]
    options = {"alignCorners": align_corners, "halfPixelCenters": not align_corners}
    step.write_alike(x, "RESIZE_BILINEAR", inputs, LAST, "ResizeBilinearOptions", **options)


def _softmax(step: Step) -> None:
    x, dim, is_log = step.arg(0), step.arg(1), "log" in step.op._schema.name
    name, kind, options = ("LOG_SOFTMAX", "LogSoftmax", {}) if is_log else ("SOFTMAX", "Softmax", {"beta": 1.0})
    if dim % len(x.shape) != len(x.shape) - 1:
        raise NotImplementedError(f"TFLite's {name} needs the last dimension, got {dim}; transpose before it")
    step.write_own(name, [tensor(step.file, x)], x.plain, f"{kind}Options", **options)


def _function(step: Step) -> None:
    if isinstance(step.convention, Division):
        write_table(step)
        return
    x, order = step.arg(0), common_order([step.arg(0)])
    if step.op not in _FUNCTIONS:
        raise NotImplementedError(f"{step.op} is not supported")
    name, kind = _FUNCTIONS[step.op]
    units = (1 / 256, _LOWEST) if x.dtype == torch.int8 else (2.0**-15, 0)
    fixed = name == "LOGISTIC" or (name == "TANH" and x.dtype == torch.int16)
    if fixed and (step.result.scale, step.result.zero) != units:
        raise NotImplementedError(
            f"TFLite's {name} returns codes of scale 1/{1 / units[0]:.0f} and zero point {units[1]}; quantize with "
            "these"
        )
    options: Kwargs = {}
    if name == "GELU":
        options["approximate"] = step.kwargs.get("approximate") == "tanh"
    elif name == "LEAKY_RELU":
        options["alpha"] = float(step.arg(1, 0.01))
    elif name == "HARD_SWISH" and step.result.scale <= x.scale / 128:
        raise NotImplementedError(
            f"TFLite's HARD_SWISH needs a scale of its result above {x.scale / 128:.6g}, got {step.result.scale:.6g}; "
            "quantize the result with such a scale"
        )
    step.write_own(name, [tensor(step.file, x, order)], order, kind, **options)


def _prelu(step: Step) -> None:
    """Slopes are constant codes, with a dimension for each one of x but the first."""
    x, slope = step.arg(0), step.arg(1)
    if isinstance(slope, Weight) and slope.scales.numel() == 1:
        slope = step.constant(slope)
    if not isinstance(slope, Codes):
        raise NotImplementedError("TFLite's PRELU needs slopes with one scale; quantize them with one")
    order, sizes = common_order([x]), [*slope.shape, 1][:1]
    shape = tuple(sizes[0] if d == 1 else 1 for d in order[1:])
    flat = tensor(step.file, slope)
    aligned = replace(slope, name=f"{step.result.name}_slope", shape=shape, tensors={})
    inputs = [tensor(step.file, x, order), reshaped(step.file, flat, aligned, aligned.plain)]
    step.write_own("PRELU", inputs, order)


def _gather(step: Step) -> None:
    """Rows of a constant matrix; the indices are an input of the file."""
    weight, indices = step.arg(0), step.arg(1)
    if isinstance(weight, Weight):
        if weight.scales.numel() != 1:
            raise NotImplementedError("TFLite's GATHER needs a matrix with one scale; quantize it with one")
        weight = step.constant(weight)
    if not isinstance(indices, Index) or len(step.args) > 2 or step.kwargs:
        raise NotImplementedError("GATHER needs a matrix, and integer indices that are an input of the program")
    step.write_alike(weight, "GATHER", [tensor(step.file, weight), indices.tensor], step.result.plain, "GatherOptions")


def _relu(step: Step) -> None:
    x, order = step.arg(0), common_order([step.arg(0)])
    index = tensor(step.file, x, order)
    if not x.is_alike(step.result):
        name = f"{step.result.name}_same"
        like = replace(step.result, name=name, tensors={})
        index = step.file.operator("QUANTIZE", [index], new(step.file, like, order), "QuantizeOptions")
    if step.op is not aten.relu.default:
        raise NotImplementedError(f"a separate {step.op} is not supported; relu is")
    step.result.tensors[order] = replace(step, low=max(step.low or 0.0, 0.0)).bounded(index, order)


WRITTEN: dict[families.Family, Callable[[Step], None]] = {
    families.MATRIX: _linear,
    families.CONVOLUTION: _convolution,
    families.ADD: _elementwise,
    families.MULTIPLY: _elementwise,
    families.CONCATENATE: _concatenation,
    families.MEAN: _reduction,
    families.EXTREME: _reduction,
    families.PRELU: _prelu,
    families.MAXIMUM: _pool,
    families.INTERPOLATE: _bilinear,
    families.NEAREST: _nearest,
    families.SOFTMAX: _softmax,
    families.FUNCTION: _function,
    families.EMBEDDING: _gather,
    families.BOUND: _relu,
    families.VIEW: viewed,
}
"""The converter of each family. It raises NotImplementedError for a call that TFLite does not support."""
