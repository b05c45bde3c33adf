"""The forms that tensors must have, compared by one call of the native library (native/torch/tensors.cpp)."""

import ctypes
import functools
import struct
from collections.abc import Sequence
from ctypes import c_int32, c_int64
from typing import Any

import torch
from torch import Tensor

from hop.compat import memory
from hop.compat.handles import handle
from hop.compat.subclasses import contiguous_strides
from hop.kernels.cpu import native

_DIMENSIONS = 8


class _Form(ctypes.Structure):
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


def _form_of(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> _Form | None:
    """The form of tensors on the CPU of this shape, dtype and strides, by default contiguous ones; None where it has no
    room."""
    if len(shape) > _DIMENSIONS or dtype not in _NUMBERS:
        return None
    strides = contiguous_strides(shape) if strides is None else strides
    result = _Form(_NUMBERS[dtype], 0, dtype.itemsize, 0, len(shape))
    result.sizes[: len(shape)], result.strides[: len(shape)] = shape, strides
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    result.extent = (last + 1) * dtype.itemsize if 0 not in shape else 0
    return result


class Form:
    """What tensors must be: dense, on the CPU, of shapes and dtypes that are given with their names."""

    def __init__(self, described: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self.described: Sequence[Any] = described
        forms = [_form_of(shape, dtype) for _, shape, dtype in described]
        self._forms = None if None in forms else (_Form * len(forms))(*forms)
        self._address = None if self._forms is None else ctypes.addressof(self._forms)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors are known to be so, and to lie in their storages."""
        return self._address is not None and _all_fit(self._address, tensors)


def _all_fit(forms: int | None, tensors: Sequence[Tensor]) -> bool:
    """Whether all are known to lie in their storages, and to have those forms."""
    count = len(tensors)
    if count >= len(_PACKED) or (function := _function()) is None:
        return False
    return function(count, forms, _PACKED[count](*map(handle, tensors))) != 0


_PACKED = [struct.Struct(f"{n}P").pack for n in range(16)]


@functools.cache
def _function() -> Any:
    functions = native.library().functions
    if functions is None:
        return None
    functions.hop_all_fit.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p]
    return functions.hop_all_fit


def _in_storages(tensors: Sequence[Tensor]) -> bool:
    return _all_fit(None, tensors)


memory.use(_in_storages)
