"""Check that tensors are within their storages, before code that trusts an address reads or writes it.

Sizes, strides and offset of a tensor say which elements it has; its storage, which may have been resized, freed or
swapped since, says how many bytes there are. PyTorch compares the two when it creates a view, and detects freed
storages when an operator reads them, but it does not detect storages that became shorter.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.eager import has_storage

handle = operator.attrgetter("_cdata")
"""The address of a tensor's implementation; the C interface takes a pointer to it. 0.06 µs."""

PLAIN = frozenset({Tensor, torch.nn.Parameter})
_looks: list[Callable[[Sequence[Tensor]], bool]] = [lambda tensors: False]


def use(look: Callable[[Sequence[Tensor]], bool]) -> None:
    """Register a faster test for `check`: whether some tensors are all known to be within their storages."""
    _looks.append(look)


def holds(x: Tensor) -> bool:
    """Whether the storage of x, a plain tensor, contains all elements of x.

    True for tensors without storage, such as a batch of gradients of autograd. Takes 0.4 µs.
    """
    if not eager.has_storage(x):
        return True
    last = x.numel() - 1 if x.is_contiguous() else sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.itemsize <= x.untyped_storage().nbytes() or x.numel() == 0


def check(tensors: Iterable[Any]) -> None:
    """Raise RuntimeError unless the storage of each plain, dense tensor contains all of its elements.

    Does nothing outside eager mode, since traced tensors have no memory. 1.2 µs for one tensor, 1.6 for three.
    """
    if eager.is_plain_eager():
        plain_tensors = [x for x in tensors if type(x) in PLAIN and has_storage(x)]
        if plain_tensors and not _looks[-1](plain_tensors):
            for x in plain_tensors:  # one of them may be of a dtype that only Python knows
                if not holds(x):
                    raise short(x)


def short(x: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a tensor of {x.dtype} and shape {tuple(x.shape)}, with strides {x.stride()} and offset {x.storage_offset()}, "
        f"has a storage of {x.untyped_storage().nbytes()} bytes, which is too small for it: it was resized, freed or "
        "replaced after the tensor was created; create the tensor again"
    )


def address(x: Tensor | None) -> int | None:
    """The address of a tensor that nobody has changed since `check`; None for None."""
    return None if x is None else x.data_ptr()
