"""The constants and structures of native/hop.h of tensors."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64

import torch

from hop.compat.subclasses import contiguous_strides

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
