"""Memory formats: channels last, or contiguous; and matrices that lie transposed.

    (N, C, *S) lies channels last if (N, *S, C) is contiguous, and it is not so itself.

PyTorch's own questions after a memory format, and its copies into one, are not to be had under vmap; these are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import subclasses

_DIMENSIONS = (4, 5)  # of the tensors that PyTorch has a name for: torch.channels_last, torch.channels_last_3d


def is_channels_last(x: Tensor) -> bool:
    """Whether x, of four or five dimensions, lies channels last."""
    return x.dim() in _DIMENSIONS and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def is_transposed(x: Tensor) -> bool:
    """Whether matrices lie as their transposes."""
    return x.dim() > 1 and not x.is_contiguous() and x.mT.is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x, as it is where it lies channels last, else contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(x: Tensor, other: Tensor) -> Tensor:
    """x, of the shape of `other`: channels last where `other` lies so, else contiguous."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last(other) else x.contiguous()


def strides(shape: Sequence[Any], other: Tensor) -> tuple[Any, ...]:
    """The strides of a tensor of `shape` that is channels last where `other` is, else contiguous."""
    if not is_channels_last(other):
        return subclasses.contiguous_strides(shape)
    n, channels, *size = shape
    first, *inner, last = subclasses.contiguous_strides((n, *size, channels))
    return (first, last, *inner)


def empty(shape: Sequence[Any], other: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` without values, on the device of `other`, with those strides."""
    return torch.empty_strided(tuple(shape), strides(shape, other), dtype=dtype, device=other.device)
