# pyright: strict, reportUnnecessaryIsInstance=false, reportUnknownMemberType=false, reportPrivateImportUsage=false
"""The memory of tensors, looked at before code that trusts an address reads it or writes to it.

A tensor's sizes, strides and offset say which elements it has; its storage, which may have been resized, freed or
swapped since, says how many bytes there are. PyTorch looks at both where a view is made, and at freed storages where an
operator reads them; at storages that became shorter it does not.
"""

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.eager import has_storage
from hop.compat.handles import handle
from hop.kernels import native, native_structures

PLAIN = frozenset({Tensor, torch.nn.Parameter})


def holds(x: Tensor) -> bool:
    """Whether the storage of x, a plain tensor, holds all elements of x; True of what has no storage, such as a batch
    of gradients that autograd takes at once. 0.4 µs."""
    if not eager.has_storage(x):
        return True
    last = x.numel() - 1 if x.is_contiguous() else sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.itemsize <= x.untyped_storage().nbytes() or x.numel() == 0


def check(tensors: Iterable[Any]) -> None:
    """Raise RuntimeError unless the storage of each dense tensor of PyTorch's own class holds all of its elements; in
    eager mode, as tensors that are traced have no memory. 1.2 µs for one tensor, 1.6 for three."""
    if eager.is_plain_eager():
        own = [x for x in tensors if type(x) in PLAIN and has_storage(x)]
        if own and not _all_fit(None, own):
            for x in own:  # one of them may be of a dtype that only Python knows
                if not holds(x):
                    raise _short(x)


class Form:
    """What tensors must be: dense, on the CPU, of shapes and dtypes that are given with their names."""

    def __init__(self, described: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self.described: Sequence[Any] = described
        forms = [native_structures.form_of(shape, dtype) for _, shape, dtype in described]
        self._forms = None if None in forms else (native_structures.Form * len(forms))(*forms)
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


def _short(x: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a tensor of {x.dtype} and shape {tuple(x.shape)}, with strides {x.stride()} and offset {x.storage_offset()}, "
        f"has a storage of {x.untyped_storage().nbytes()} bytes, which does not hold it: it was resized, freed or "
        "replaced after the tensor was made; make the tensor anew"
    )


def address(x: Tensor | None) -> int | None:
    """Where a tensor lies, of which `check` has been asked since anybody else had it; None for None."""
    return None if x is None else x.data_ptr()
