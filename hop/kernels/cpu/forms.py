"""Check the forms of tensors with one call of the native library (native/torch/tensors.cpp)."""

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hop.compat import memory
from hop.compat.memory import handle
from hop.compat.subclasses import contiguous_strides
from hop.kernels.cpu import native
from hop.numerics.copies import Buffer

_DIMENSIONS = 8
_PACKED_FORM = struct.Struct(f"2i3q{2 * _DIMENSIONS}q")
"""struct hop_form: dtype, device, bytes per element, total bytes, dimensions, sizes and strides."""
_NUMBERS = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
_NUMBERS |= {torch.float8_e5m2: 23, torch.float8_e4m3fn: 24}  # dtype numbers of PyTorch's C interface


def _form_of(shape: Sequence[int], dtype: torch.dtype) -> bytes | None:
    """The packed form of contiguous CPU tensors of this shape and dtype; None if it does not fit the struct."""
    if (rest := _DIMENSIONS - len(shape)) < 0 or dtype not in _NUMBERS:
        return None
    extent, none = math.prod(shape) * dtype.itemsize, (0,) * rest
    sizes = (*shape, *none, *contiguous_strides(shape), *none)
    return _PACKED_FORM.pack(_NUMBERS[dtype], 0, dtype.itemsize, extent, len(shape), *sizes)


class Form:
    """Required form of tensors: dense, on the CPU, with given shapes and dtypes, each with a name."""

    def __init__(self, described: Sequence[Buffer]) -> None:
        self.described = described
        forms = [form for b in described if (form := _form_of(b.shape, b.dtype)) is not None]
        self._forms = ctypes.create_string_buffer(b"".join(forms)) if len(forms) == len(described) else None
        self._address = None if self._forms is None else ctypes.addressof(self._forms)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors certainly have this form and lie within their storages."""
        return self._address is not None and _all_fit(self._address, tensors)


def _all_fit(forms: int | None, tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors certainly lie within their storages and have these forms."""
    count = len(tensors)
    if count >= len(_PACKED) or (function := _function()) is None:
        return False
    return function(count, forms, _PACKED[count](*map(handle, tensors))) != 0


_PACKED = [struct.Struct(f"{n}P").pack for n in range(16)]


@functools.cache
def _function() -> Callable[..., int] | None:
    functions = native.library().functions
    if functions is None:
        return None
    functions.hop_all_fit.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p]
    return functions.hop_all_fit


def _in_storages(tensors: Sequence[Tensor]) -> bool:
    return _all_fit(None, tensors)


memory.use(_in_storages)
