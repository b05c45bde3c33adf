"""Memory formats: channels_last or contiguous; and transposed matrices.

(N, C, *S) is channels_last if (N, *S, C) is contiguous and it is not contiguous itself. PyTorch's own queries and
copies of memory formats are not available under vmap; these are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat import subclasses

_DIMENSIONS = (4, 5)  # dimensions with a PyTorch name: torch.channels_last, torch.channels_last_3d


def is_channels_last(x: Tensor) -> bool:
    """Whether x, of four or five dimensions, is channels_last."""
    return x.dim() in _DIMENSIONS and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def is_transposed(x: Tensor) -> bool:
    """Whether the matrices are transposes of contiguous ones."""
    return x.dim() > 1 and not x.is_contiguous() and x.mT.is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x itself if it is channels_last, else made contiguous."""
    return x if is_channels_last(x) else x.contiguous()


def like(x: Tensor, other: Tensor) -> Tensor:
    """x in the memory format of `other`, which has the same shape: channels_last or contiguous."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last(other) else x.contiguous()


def strides(shape: Sequence[int], other: Tensor) -> tuple[int, ...]:
    """The strides of a tensor of `shape` in the memory format of `other`: channels_last or contiguous."""
    if not is_channels_last(other):
        return subclasses.contiguous_strides(shape)
    n, channels, *size = shape
    first, *inner, last = subclasses.contiguous_strides((n, *size, channels))
    return (first, last, *inner)


def empty(shape: Sequence[int], other: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor of `shape` with these strides, on the device of `other`."""
    return torch.empty_strided(tuple(shape), strides(shape, other), dtype=dtype, device=other.device)
