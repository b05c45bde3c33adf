"""Blocks: which elements of a tensor share a scale.

A block is a tuple of sizes over the last dimensions, -1 for a whole dimension. Dimensions before them are split into
single elements, or, if the first size is -1, are whole too:

    (-1, -1)   per tensor         (1, -1)     per row       (-1, 1)         per column
    (1, 32)    groups of 32       (128, 128)  tiles         (1, -1, -1, -1) per output channel of a conv2d weight

The last block of a dimension may be incomplete. A tensor with fewer dimensions than the block is treated as having
leading dimensions of size 1. A whole dimension of size 0 counts as one block.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hop.compat import tracing
from hop.numerics.spelling import shown

Block = tuple[int, ...]
_SUCH_SHAPE = "give one such as (2, 4)"


def checked(block: Any, what: str = "block") -> Block:
    """Return `block` as a tuple, or raise ValueError if it is not a valid block."""
    sizes = tuple(block) if isinstance(block, tuple | list) else (block,)
    if not sizes or any(
        isinstance(b, bool) or not isinstance(b, int) or (b < 1 and b != -1) or b >= 2**31 for b in sizes
    ):
        raise ValueError(
            f"{what} must be a tuple of sizes over the last dimensions, each -1 or from 1 to 2^31 - 1, got "
            f"{shown(block)}; give one such as (1, -1)"
        )
    return sizes


def checked_shape(what: str, shape: Any) -> tuple[int, ...]:
    """Return `shape` as a tuple, or raise unless it consists of sizes, possibly symbolic."""
    sizes = cast(Sequence[Any], shape) if isinstance(shape, tuple | list) else (None,)
    if any(isinstance(n, bool) or not isinstance(n, int | torch.SymInt) for n in sizes):
        raise TypeError(f"{what}: shape must be a tuple of integers, each 0 or more; got {shown(shape)}; {_SUCH_SHAPE}")
    if any(isinstance(n, int) and n < 0 for n in sizes):
        raise ValueError(f"{what}: shape must have sizes of 0 or more, got {shown(shape)}; {_SUCH_SHAPE}")
    return tuple(shape)


def per_dimension(block: Block, ndim: int) -> Block:
    """The block size in each of `ndim` dimensions."""
    missing = ndim - len(block)
    return (-1 if block[0] == -1 else 1,) * missing + block if missing >= 0 else block[-missing:] if ndim else ()


def counts(shape: Sequence[int], block: Block) -> list[int]:
    """The number of blocks per dimension in a tensor of `shape`, which is the shape of its scales."""
    return [1 if b == -1 else -(-n // b) for n, b in zip(shape, per_dimension(block, len(shape)), strict=True)]


def split(x: Tensor, block: Block, fill: float = 0.0) -> tuple[Tensor, list[int]]:
    """Split x into blocks, and return the dimensions that run over a block: (d0, d1, ...) -> (n0, b0, n1, b1, ...) and
    the positions of the b's.

    Incomplete blocks are padded with `fill`. For three or more dimensions, if each block size is 1 or a whole
    dimension, x is not reshaped, and the positions are those of the whole dimensions; blocks of single elements get a
    last dimension of size 1.
    """
    sizes = per_dimension(block, x.dim())
    if not sizes:
        return x.reshape(1), [0]
    shape: list[Any] = []
    padding: list[Any] = []
    for n, b, count in zip(x.shape, sizes, counts(x.shape, block), strict=True):
        size = torch.sym_max(n, 1) if b == -1 else b
        padding = [0, size * count - n, *padding]
        shape += [count, size]
    if not all(tracing.known_equal(n, 0) for n in padding):
        x = torch.nn.functional.pad(x, padding, value=fill)
    if not _cuts(sizes):
        whole = [i for i, b in enumerate(sizes) if b == -1]
        return (x, whole) if whole else (x.unsqueeze(-1), [len(sizes)])
    return x.reshape(shape), list(range(1, 2 * len(sizes), 2))


def merge(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of split: a contiguous tensor of `shape`."""
    ndim = len(shape)
    if ndim == 0:
        return x.reshape(())
    if x.dim() == 2 * ndim:
        x = x.reshape([x.shape[i] * x.shape[i + 1] for i in range(0, x.dim(), 2)])
    elif x.dim() > ndim:
        x = x.squeeze(-1)
    for dim, n in enumerate(shape):
        if not tracing.known_equal(x.shape[dim], n):
            x = x.narrow(dim, 0, n)
    if any(isinstance(n, torch.SymInt) for n in shape):
        return x.clone(memory_format=torch.contiguous_format)  # contiguous() would guard on whether n divides
    return x.contiguous()


def spread(scale: Tensor, block: Block) -> Tensor:
    """Reshape scales (n0, n1, ...) to broadcast against the result of split: (n0, 1, n1, 1, ...) if it splits."""
    if scale.dim() == 0:
        return scale.reshape(1)
    sizes = per_dimension(block, scale.dim())
    if not _cuts(sizes):
        return scale if -1 in sizes else scale.unsqueeze(-1)
    return scale.reshape([n for count in scale.shape for n in (count, 1)])


def served(
    tensors: Sequence[Tensor],
    stored: Sequence[tuple[Any, Block]],
    block: Block,
    places: Sequence[int],
    shape: Sequence[int] | None = None,
) -> list[Tensor]:
    """Repeat spread tensors that serve several blocks, once per block.

    Args:
        tensors: tensors that broadcast against the result of split for `block`.
        stored: the dtype and block of each; block sizes are multiples of those of `block`, or -1.
        places: the positions of the blocks along each dimension.
        shape: the shape of the first tensor that serves single blocks, if it is not among them.
    """
    sizes = tensors[0].shape if shape is None else shape
    own = per_dimension(block, len(places))
    result: list[Tensor] = []
    for t, (_, outer) in zip(tensors, stored, strict=True):
        for place, b, o in zip(places, own, per_dimension(outer, len(places)), strict=True):
            if o in (-1, b):
                continue
            repeated = [*t.shape[: place + 1], o // b, *t.shape[place + 1 :]]
            t = t.unsqueeze(place + 1).expand(repeated).flatten(place, place + 1)
            if not tracing.known_equal(t.shape[place], sizes[place]):
                t = t.narrow(place, 0, sizes[place])
        result.append(t)
    return result


def gather(scale: Tensor, ndim: int) -> Tensor:
    """The inverse of spread, for a tensor of `ndim` dimensions."""
    if ndim == 0:
        return scale.reshape(())
    if scale.dim() == 2 * ndim:
        return scale.reshape(scale.shape[::2])
    return scale.squeeze(-1) if scale.dim() > ndim else scale


def places(block: Block, ndim: int) -> list[int]:
    """The dimensions of split's result that count blocks."""
    step = 2 if _cuts(per_dimension(block, ndim)) else 1
    return [step * i for i in range(max(ndim, 1))]


def _cuts(sizes: Block) -> bool:
    """Whether split reshapes: a block is smaller than a dimension, or there are at most two dimensions.

    Splitting two dimensions is free for every runtime, and AOTInductor can multiply an expanded constant scale only
    with tensors of the same number of dimensions.
    """
    return len(sizes) < 3 or any(b not in (1, -1) for b in sizes)
