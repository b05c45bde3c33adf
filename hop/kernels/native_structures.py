"""The constants and structures of native/hop.h that products and convolutions share."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64

import torch

from hop.compat.subclasses import contiguous_strides

NONE, INT8, UINT8, INT4, UINT4, E2M1, E4M3, E5M2, E8M0, FLOAT32, BFLOAT16, FLOAT16, INT32 = range(13)
STRIDED, TILED = range(2)
WHOLE = 2**62

PLAIN = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int32: INT32}
ITEMS = {FLOAT32: 4, INT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, UINT8: 1}
BYTES = {torch.int8: INT8, torch.uint8: UINT8}


class Scale(ctypes.Structure):
    """hop_scale"""

    _fields_ = [
        ("format", c_int32),
        ("factor", c_float),
        ("rows", c_int64),
        ("ks", c_int64),
        ("row_stride", c_int64),
        ("k_stride", c_int64),
    ]


class Factor(ctypes.Structure):
    """hop_operand"""

    _fields_ = [
        ("format", c_int32),
        ("layout", c_int32),
        ("row_stride", c_int64),
        ("k_stride", c_int64),
        ("zero", c_int32),
        ("zero_format", c_int32),
        ("scale", Scale),
        ("fold", Scale),
    ]


class Output(ctypes.Structure):
    """hop_output"""

    _fields_ = [
        ("format", c_int32),
        ("bias_format", c_int32),
        ("row_stride", c_int64),
        ("requantize", c_int32),
        ("low", c_int32),
        ("high", c_int32),
        ("zero", c_int32),
        ("zero_format", c_int32),
        ("bounded", c_int32),
        ("bounds", c_float * 2),
        ("scale_row_stride", c_int64),
        ("scale_column_stride", c_int64),
    ]


class Steps(ctypes.Structure):
    """hop_steps"""

    _fields_ = [
        ("codes", c_int64),
        ("scale", c_int64),
        ("zero", c_int64),
        ("fold", c_int64),
    ]


class Product(ctypes.Structure):
    """hop_product"""

    _fields_ = [
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("lhs", Factor),
        ("rhs", Factor),
        ("output", Output),
        ("batch", c_int64),
        ("lhs_step", Steps),
        ("rhs_step", Steps),
        ("output_step", c_int64),
    ]


_DIMENSIONS = 8


class Form(ctypes.Structure):
    """hop_form"""

    _fields_ = [
        ("dtype", c_int32),
        ("device", c_int32),
        ("item", c_int64),
        ("extent", c_int64),
        ("dim", c_int64),
        ("sizes", c_int64 * _DIMENSIONS),
        ("strides", c_int64 * _DIMENSIONS),
    ]


_NUMBERS = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
_NUMBERS |= {torch.float8_e5m2: 23, torch.float8_e4m3fn: 24}  # as PyTorch's C interface counts its dtypes


def form_of(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Form | None:
    """The form of tensors on the CPU of this shape, dtype and strides, by default contiguous ones; None where it has no
    room."""
    if len(shape) > _DIMENSIONS or dtype not in _NUMBERS:
        return None
    strides = contiguous_strides(shape) if strides is None else strides
    made = Form(_NUMBERS[dtype], 0, dtype.itemsize, 0, len(shape))
    made.sizes[: len(shape)], made.strides[: len(shape)] = shape, strides
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    made.extent = (last + 1) * dtype.itemsize if 0 not in shape else 0
    return made


def no_scale() -> Scale:
    return Scale(NONE, 1.0, WHOLE, WHOLE, 0, 0)
