"""Integer products and a division as operators that run in PyTorch and exist in ONNX."""

import torch
from torch import Tensor

aten = torch.ops.aten
BYTES = (torch.int8, torch.uint8)

_library = torch.library.Library("hop_onnx", "DEF")
_library.define("matmul(Tensor a, Tensor b, Tensor? a_zero_point, Tensor? b_zero_point) -> Tensor")
_library.define(
    "convolution(Tensor x, Tensor w, Tensor? x_zero_point, Tensor? w_zero_point, int[] strides, int[] pads, "
    "int[] dilations, int group) -> Tensor"
)
_library.define("floor_divide(Tensor a, Tensor b) -> Tensor")


def minus_zero_point(x: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if zero_point is None else x.to(dtype) - zero_point.to(dtype)


def matmul(a: Tensor, b: Tensor, a_zero_point: Tensor | None, b_zero_point: Tensor | None) -> Tensor:
    return torch.matmul(minus_zero_point(a, a_zero_point, torch.int32), minus_zero_point(b, b_zero_point, torch.int32))


def _convolution(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None,
    w_zero_point: Tensor | None,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    group: int,
) -> Tensor:
    dtype = torch.float64  # exact: products of bytes are below 2^16
    x, w = minus_zero_point(x, x_zero_point, dtype), minus_zero_point(w, w_zero_point, dtype)
    n = x.dim() - 2
    sides = [p for d in reversed(range(n)) for p in (pads[d], pads[n + d])]
    x = torch.nn.functional.pad(x, sides)
    zeros = [0] * n
    y = aten.convolution.default(x, w, None, strides, zeros, dilations, False, zeros, group)
    return y.to(torch.int64).to(torch.int32).contiguous()


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


for _name, _function in (("matmul", matmul), ("convolution", _convolution), ("floor_divide", _floor_divide)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hop_onnx::{_name}", _function, lib=_library)

MATMUL, CONVOLUTION = torch.ops.hop_onnx.matmul.default, torch.ops.hop_onnx.convolution.default
FLOOR_DIVIDE = torch.ops.hop_onnx.floor_divide.default
