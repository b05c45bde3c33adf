"""Converters of nodes that quantize, dequantize, or compute on codes.

An operator on codes becomes dequantize, float operator, quantize, as the format QDQ has it; hop.export.rewrite makes
integers of both. Products of codes without scales become hop.out_dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hop.compat.export import quantized_decomposed
from hop.dispatch.operators import aten
from hop.export.targets.onnx_import import products
from hop.export.targets.onnx_import.calls import SHIFT, Call, Converter, Shifted
from hop.export.targets.onnx_import.reading import DTYPES
from hop.impls.out_dtype import out_dtype
from hop.numerics.tables import float32

RANGES = {
    "INT8": (-128, 127),
    "UINT8": (0, 255),
    "INT16": (-(2**15), 2**15 - 1),
    "UINT16": (0, 2**16 - 1),
    "INT32": (-(2**31), 2**31 - 1),
    "INT4": (-8, 7),
    "UINT4": (0, 15),
}
_QUANTIZED = ("INT8", "UINT8", "INT16", "UINT16")
_WIDE = ("INT16", "UINT16")
_SCALES = ("FLOAT", "FLOAT16", "BFLOAT16")  # onnxruntime computes with the latter two in float32
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name in ("INT8", "UINT8", *_WIDE, "INT32")}

# ---- quantize, dequantize


def _kind(call: Call, i: int) -> str:
    """The dtype of an input of codes, in ONNX's names."""
    known = call.known[i] if i < len(call.known) else None
    if known is not None:
        return known.kind
    if i < len(call.inputs) and isinstance(call.inputs[i], Shifted):
        return "UINT16"
    dtype = call.tensor(i).dtype
    return _NAMES.get(dtype) or call.refuse(f"its input {i} is {dtype}; codes are INT8, UINT8, INT16, UINT16 or INT32")


def _bounds(kind: str, call: Call) -> tuple[int, int, torch.dtype]:
    if kind not in RANGES:
        call.refuse(f"codes of {kind} are not supported; use one of {', '.join(RANGES)}")
    return *RANGES[kind], DTYPES[kind]


def _parameters(call: Call, scale: int, zero: int) -> tuple[Any, Any]:
    """A scale and a zero point: numbers if they are constants with one element, else tensors."""
    known = call.known[scale] if scale < len(call.known) else None
    if known is not None and known.kind not in _SCALES:
        call.refuse(f"its scale is {known.kind}; use one of {', '.join(_SCALES)}")
    zeros = call.known[zero] if zero < len(call.known) else None
    if known is not None and known.elements is not None and len(known.elements) == 1:
        call.mark_read(scale, zero)
        if zeros is not None and zeros.elements is not None and len(zeros.elements) == 1:
            return float(known.elements[0]), int(zeros.elements[0])
        if not call.has(zero):
            return float(known.elements[0]), 0
    s, z = call.tensor(scale), call.optional(zero)
    if not s.dtype.is_floating_point or s.dtype == torch.float64:
        call.refuse(f"its scale is {s.dtype}; use one of {', '.join(_SCALES)}")
    s = s.to(torch.float32)
    if z is not None and z.shape != s.shape and z.numel() != 1:
        raise ValueError(f"its zero points have the shape {tuple(z.shape)}, its scales {tuple(s.shape)}")
    return s, torch.zeros_like(s, dtype=torch.int64) if z is None else z.to(torch.int64).expand(s.shape)


def _checked(call: Call, scale: float) -> float:
    if isinstance(scale, float) and not 0 < scale < float("inf"):
        raise ValueError(f"its scale is {scale}, and must be positive and finite")
    return scale


def dequantized(call: Call, i: int, scale: int, zero: int, axis: int | None = None, block: int = 0) -> Tensor:
    """The values of an input of codes, whose scale and zero point are other inputs."""
    kind = _kind(call, i)
    codes, bounds = call.tensor(i), _bounds(kind, call)
    s, z = _parameters(call, scale, zero)
    if kind == "UINT16":
        given = call.inputs[i]
        codes, z = (given if isinstance(given, Shifted) else Shifted.of(codes)).codes, z - SHIFT
        bounds = _bounds("INT16", call)
    if kind in _WIDE and isinstance(s, float) and z:  # 16-bit codes with a zero point, which stay in floats
        return (codes.to(torch.float32) - float(z)) * _checked(call, s)
    call.is_quantized = True
    if isinstance(s, float):
        return quantized_decomposed("dequantize_per_tensor")(codes, _checked(call, s), z, *bounds)
    if s.numel() == 1 and not block:
        return quantized_decomposed("dequantize_per_tensor.tensor")(codes, s.reshape(()), z.reshape(()), *bounds)
    axis = call.axis(1 if axis is None else axis, codes.dim())
    if block:
        return _by_blocks(call, codes, (s, z), axis, block, bounds)
    if s.dim() != 1 or s.shape[0] != codes.shape[axis]:
        raise ValueError(f"its scales have the shape {tuple(s.shape)}, its codes {tuple(codes.shape)}, axis {axis}")
    return quantized_decomposed("dequantize_per_channel")(codes, s, z, axis, *bounds)


def _by_blocks(
    call: Call, codes: Tensor, given: tuple[Tensor, Tensor], axis: int, block: int, bounds: tuple[int, int, torch.dtype]
) -> Tensor:
    """Dequantize with a scale for each block of elements along an axis of a matrix."""
    scale = given[0]
    size = codes.shape[axis]
    wanted = [-(-n // max(block, 1)) if d == axis else n for d, n in enumerate(codes.shape)]
    if block < 1 or list(scale.shape) != wanted or codes.dim() != 2:
        call.refuse(
            f"blocks of {block} along axis {axis} of {tuple(codes.shape)} with scales of {tuple(scale.shape)} are not "
            f"supported; the codes must be a matrix, and the scales have the shape {tuple(wanted)}"
        )
    if size % block:  # quantizers need full blocks, so dequantize the weight here
        block = min(block, size)
        call.is_quantized = False
        scale, zero = (x.repeat_interleave(block, axis).narrow(axis, 0, size) for x in given)
        return (codes.to(torch.float32) - zero) * scale
    rows = [x.t() if axis == 0 else x for x in (codes, *given)]
    values = quantized_decomposed("dequantize_per_channel_group")(*rows, *bounds, block, torch.float32)
    return values.t() if axis == 0 else values


def quantized(call: Call, x: Tensor, scale: int, zero: int, axis: int = 1, kind: str | None = None) -> Tensor | Shifted:
    """The codes of x, with a scale and zero point that are inputs of the call; uint8 by default."""
    kind = kind or (_kind(call, zero) if call.has(zero) else "UINT8")
    if kind not in _QUANTIZED:
        call.refuse(f"quantizing to {kind} is not supported; use one of {', '.join(_QUANTIZED)}")
    low, high, dtype = _bounds("INT16" if kind == "UINT16" else kind, call)
    s, z = _parameters(call, scale, zero)
    if kind == "UINT16":
        codes = _quantized(call, x, (s, z - SHIFT), axis, (low, high, dtype))
        return codes.to(torch.int32).add(SHIFT).to(torch.uint16) if call.folds else Shifted(codes)
    return _quantized(call, x, (s, z), axis, (low, high, dtype))


def _quantized(
    call: Call, x: Tensor, units: tuple[Any, Any], axis: int, bounds: tuple[int, int, torch.dtype]
) -> Tensor:
    (s, z), (low, high, dtype) = units, bounds
    if not isinstance(s, float) and s.numel() == 1:
        s, z = s.reshape(()), z.reshape(())
    if isinstance(s, float):
        call.result_units = _checked(call, s), z
    stays = dtype == torch.int16 and isinstance(s, float) and z  # 16-bit codes with a zero point stay in floats
    call.is_quantized = not stays
    if call.folds or stays:
        if not isinstance(s, float) and s.dim():
            sizes = [-1 if d == call.axis(axis, x.dim()) else 1 for d in range(x.dim())]
            s, z = s.reshape(sizes), z.reshape(sizes)
        return ((x / s).round() + z).clamp(low, high).to(dtype)
    if isinstance(s, float):
        return quantized_decomposed("quantize_per_tensor")(x, s, z, low, high, dtype)
    if not s.dim():
        return quantized_decomposed("quantize_per_tensor.tensor")(x, s, z, low, high, dtype)
    return quantized_decomposed("quantize_per_channel")(x, s, z, call.axis(axis, x.dim()), low, high, dtype)


def _quantize(call: Call) -> Tensor | Shifted:
    x, axis = call.tensor(0), call.attribute("axis", 1)
    call.only("block_size", 0)
    call.attribute("saturate", 1)  # of 8-bit floats
    call.only("precision", 0, 1)
    number = call.attribute("output_dtype", 0)
    kind = next((name for name, k in _NUMBERS.items() if k == number), None)
    if number and kind is None:
        call.refuse(f"its output_dtype is {number}; supported are {', '.join(_NUMBERS)}")
    return quantized(call, x.to(torch.float32), 1, 2, axis, None if call.has(2) else kind)


def _dequantize(call: Call) -> Tensor:
    call.only("output_dtype", 0, 1)
    values = dequantized(call, 0, 1, 2, call.attribute("axis", 1), call.attribute("block_size", 0))
    scale = call.tensor(1).dtype
    return values if scale == torch.float32 or call.attribute("output_dtype", 0) else values.to(scale)


_NUMBERS = {"UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5}


def _dynamic(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes of the range from the least to the greatest element, extended to include 0."""
    x = call.tensor(0)
    low, high = (f(x).clamp(*bounds) for f, bounds in ((torch.amin, (None, 0.0)), (torch.amax, (0.0, None))))
    scale = (high - low) / 255.0
    scale = torch.where(high == low, 1.0, scale)
    zero = (0.0 - low / scale).clamp(0.0, 255.0).round()
    call.is_quantized = True
    if call.folds:
        codes = ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8)
    else:
        op = quantized_decomposed("quantize_per_tensor.tensor")
        codes = op(x, scale, zero.to(torch.int64), 0, 255, torch.uint8)
    return codes, scale, zero.to(torch.uint8)


# ---- operators on codes


def _bias(call: Call, i: int, x_scale: int, w_scale: int) -> Tensor | None:
    """An integer bias in units of the product of two scales, as values."""
    if (codes := call.optional(i)) is None:
        return None
    if codes.dtype != torch.int32 or codes.dim() != 1:
        call.refuse(f"its bias is {codes.dtype} of {tuple(codes.shape)}, and must be int32 with one dimension")
    (s, _), (own, _) = (_parameters(call, j, len(call.inputs)) for j in (x_scale, w_scale))
    bounds = _bounds("INT32", call)
    if isinstance(s, float) and isinstance(own, float):
        return quantized_decomposed("dequantize_per_tensor")(codes, float32(s * own), 0, *bounds)
    scales = own * s
    scales = scales if isinstance(scales, Tensor) and scales.numel() > 1 else scales.reshape(1).expand(codes.shape)
    zeros = torch.zeros_like(codes, dtype=torch.int64)
    return quantized_decomposed("dequantize_per_channel")(codes, scales, zeros, 0, *bounds)


def _convolution(call: Call) -> Tensor | Shifted:
    x, w = dequantized(call, 0, 1, 2), dequantized(call, 3, 4, 5, 0)
    return quantized(call, products.convolution(call, x, w, _bias(call, 8, 1, 4)), 6, 7)


def _matmul(call: Call) -> Tensor | Shifted:
    a, b = dequantized(call, 0, 1, 2, -2), dequantized(call, 3, 4, 5, -1)
    return quantized(call, products.matmul(a, b), 6, 7)


def _gemm(call: Call) -> Tensor | Shifted:
    if call.attribute("alpha", 1.0) != 1.0:
        call.refuse("its alpha is not 1")
    transposed = call.attribute("transA", 0), call.attribute("transB", 0)
    a = dequantized(call, 0, 1, 2)
    b = dequantized(call, 3, 4, 5, 0 if transposed[1] else 1)
    y = products.gemm(a, b, _bias(call, 6, 1, 4), *transposed)
    return quantized(call, y, 7, 8) if call.has(7) else y


def _binary(op: Callable[[Tensor, Tensor], Tensor]) -> Converter:
    return lambda call: quantized(call, op(dequantized(call, 0, 1, 2), dequantized(call, 3, 4, 5)), 6, 7)


def _unary(function: Callable[[Call, Tensor], Tensor]) -> Converter:
    def convert(call: Call) -> Tensor | Shifted:
        x = dequantized(call, 0, 1, 2)
        kind = None if call.has(4) else _kind(call, 0)
        return quantized(call, function(call, x), 3, 4, kind=kind)

    return convert


def _softmax(call: Call, x: Tensor) -> Tensor:
    axis, opset = call.attribute("axis", -1), call.attribute("opset", 13)
    if opset < 13 and call.axis(axis, x.dim()) != x.dim() - 1:
        call.refuse(f"its axis is {axis}; before opset 13, only the last one is supported")
    return aten.softmax.int(x, axis)


def _average_pool(call: Call, x: Tensor) -> Tensor:
    call.only("channels_last", 0)
    return products.average_pool(call, x)


def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    call.only("channels_last", 0)
    return products.global_average_pool(call, x)


def _concatenate(call: Call) -> Tensor | Shifted:
    parts = [dequantized(call, i, i + 1, i + 2) for i in range(2, len(call.inputs), 3)]
    return quantized(call, torch.cat(parts, call.attribute("axis", None)), 0, 1)


def _where(call: Call) -> Tensor | Shifted:
    a, b = dequantized(call, 1, 2, 3), dequantized(call, 4, 5, 6)
    return quantized(call, torch.where(call.tensor(0), a, b), 7, 8)


def _maximum_pool(call: Call) -> Tensor:
    """The maximum of floats, or of codes, which keep their scale."""
    x = call.tensor(0)
    if x.dtype not in (torch.int8, torch.uint8) or call.folds:
        return products.maximum_pool(call, x.to(torch.float32)).to(x.dtype)
    (scale, zero), bounds = call.units[0] or (1.0, 0), _bounds(_kind(call, 0), call)
    call.is_quantized, call.result_units = True, (scale, zero)
    values = quantized_decomposed("dequantize_per_tensor")(x, scale, zero, *bounds)
    return quantized_decomposed("quantize_per_tensor")(products.maximum_pool(call, values), scale, zero, *bounds)


# ---- products of codes without scales


def _difference(call: Call, i: int, zero: int, dim: int) -> Tensor:
    """Codes minus their zero points, of which there may be one for each index of a dimension."""
    x = call.tensor(i)
    if x.dtype not in (torch.int8, torch.uint8):
        call.refuse(f"its input {i} is {x.dtype}, and must be int8 or uint8")
    known = call.known[zero] if zero < len(call.known) else None
    if not call.has(zero) or (known is not None and known.elements is not None and not any(known.elements)):
        return x
    z = call.tensor(zero).to(torch.int16)
    if z.dim() == 1 and z.shape[0] != 1:
        z = z.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    elif z.numel() == 1:
        z = z.reshape(())
    return x.to(torch.int16) - z


def _matmul_integer(call: Call) -> Tensor:
    a, b = _difference(call, 0, 2, -2), _difference(call, 1, 3, -1)
    return products.matmul(a, b, lambda op, *args: out_dtype(op, torch.int32, *args))


def _convolution_integer(call: Call) -> Tensor:
    x, w = _difference(call, 0, 2, 0), _difference(call, 1, 3, 0)
    return products.convolution(call, x, w, None, lambda op, *args: out_dtype(op, torch.int32, *args))


def _matmul_to_float(call: Call) -> Tensor:
    """A product of codes with scales, as values."""
    y = products.matmul(dequantized(call, 0, 2, 4, -2), dequantized(call, 1, 3, 5, -1))
    return y + call.tensor(6) if call.has(6) else y


def _dynamic_matmul(call: Call) -> Tensor:
    """A product of floats, quantized by their range, with a constant weight of codes."""
    codes, scale, zero = _dynamic(call)
    bounds = _bounds("UINT8", call)
    x = quantized_decomposed("dequantize_per_tensor.tensor")(codes, scale, zero.to(torch.int64), *bounds)
    y = products.matmul(x, dequantized(call, 1, 2, 3, -1))
    return y + call.tensor(4) if call.has(4) else y


CODES: dict[str, Converter] = {
    **dict.fromkeys(("QuantizeLinear", "com.microsoft.QuantizeLinear"), _quantize),
    **dict.fromkeys(("DequantizeLinear", "com.microsoft.DequantizeLinear"), _dequantize),
    "DynamicQuantizeLinear": _dynamic,
    "MaxPool": _maximum_pool,
    "QLinearConv": _convolution,
    "QLinearMatMul": _matmul,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _convolution_integer,
    "com.microsoft.QGemm": _gemm,
    "com.microsoft.QLinearAdd": _binary(torch.add),
    "com.microsoft.QLinearMul": _binary(torch.mul),
    "com.microsoft.QLinearSigmoid": _unary(lambda call, x: torch.sigmoid(x)),
    "com.microsoft.QLinearLeakyRelu": _unary(lambda call, x: aten.leaky_relu.default(x, call.attribute("alpha", 0.01))),
    "com.microsoft.QLinearSoftmax": _unary(_softmax),
    "com.microsoft.QLinearAveragePool": _unary(_average_pool),
    "com.microsoft.QLinearGlobalAveragePool": _unary(_global_average_pool),
    "com.microsoft.QLinearConcat": _concatenate,
    "com.microsoft.QLinearWhere": _where,
    "com.microsoft.MatMulIntegerToFloat": _matmul_to_float,
    "com.microsoft.DynamicQuantizeMatMul": _dynamic_matmul,
}
"""The converter of each operator; it raises NotImplementedError for an unsupported call."""
