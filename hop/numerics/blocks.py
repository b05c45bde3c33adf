"""Blocks: which elements of a tensor share a scale.

A block is a tuple of sizes over the last dimensions, -1 for a whole dimension. Dimensions before them are cut into
single elements, or, if the first size is -1, are whole too:

    (-1, -1)  per tensor       (1, -1)  per row         (-1, 1)   per column
    (1, 32)   groups of 32     (128, 128)  tiles        (1, -1, -1, -1)  per output channel of a conv2d weight

The last block of a dimension may be cut off. A tensor with fewer dimensions than the block has is taken as having
further ones of size 1 in front. A whole dimension of size 0 counts as one block.
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
    """`block` as a tuple, if it is one."""
    sizes = tuple(block) if isinstance(block, tuple | list) else (block,)
    if not sizes or any(
        isinstance(b, bool) or not isinstance(b, int) or (b < 1 and b != -1) or b >= 2**31 for b in sizes
    ):
        raise ValueError(
            f"{what} must be a tuple of sizes over the last dimensions, each -1 or from 1 to 2^31 - 1, got "
            f"{shown(block)}; give one such as (1, -1)"
        )
    return sizes


def checked_shape(what: str, shape: Any) -> tuple[Any, ...]:
    """`shape` as a tuple, if it is one of sizes, symbolic ones included."""
    sizes = cast(Sequence[Any], shape) if isinstance(shape, tuple | list) else (None,)
    if any(isinstance(n, bool) or not isinstance(n, int | torch.SymInt) for n in sizes):
        raise TypeError(f"{what}: shape must be a tuple of integers, each 0 or more; got {shown(shape)}; {_SUCH_SHAPE}")
    if any(isinstance(n, int) and n < 0 for n in sizes):
        raise ValueError(f"{what}: shape must have sizes of 0 or more, got {shown(shape)}; {_SUCH_SHAPE}")
    return tuple(shape)


def per_dimension(block: Block, ndim: int) -> Block:
    """The size of a block in each of `ndim` dimensions."""
    missing = ndim - len(block)
    return (-1 if block[0] == -1 else 1,) * missing + block if missing >= 0 else block[-missing:] if ndim else ()


def counts(shape: Sequence[int], block: Block) -> list[int]:
    """How many blocks a tensor of `shape` has in each dimension: the shape of its scales."""
    return [1 if b == -1 else -(-n // b) for n, b in zip(shape, per_dimension(block, len(shape)), strict=True)]


def split(x: Tensor, block: Block, fill: float = 0.0) -> tuple[Tensor, list[int]]:
    """x cut into blocks, and the positions of the dimensions that run over a block: (d0, d1, ...) -> (n0, b0, n1, b1,
    ...) and those of the b's. What a cut-off block lacks is `fill`.

    Of three dimensions and more, where each size of a block is 1 or a whole dimension, nothing is to be cut: (d0, d1,
    ...) stays, and the positions are those of the whole dimensions; blocks of single elements get a last dimension of 1
    to run over."""
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
    """The inverse of split: to `shape`, contiguous."""
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
        return x.clone(memory_format=torch.contiguous_format)  # contiguous() would ask, and guard, whether n divides
    return x.contiguous()


def spread(scale: Tensor, block: Block) -> Tensor:
    """(n0, n1, ...) -> scales beside what split returns for `block`: (n0, 1, n1, 1, ...) where it cuts."""
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
    shape: Sequence[Any] | None = None,
) -> list[Tensor]:
    """Stored tensors that were spread, those that serve several of the blocks once for each.

    Args:
        tensors: beside what split returns for `block`.
        stored: the dtype and the block of each; multiples of `block`, or -1.
        places: of the blocks along each dimension.
        shape: of the first tensor that serves one block, if it is not among them."""
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
    """Where split puts the blocks along each dimension, to be counted."""
    step = 2 if _cuts(per_dimension(block, ndim)) else 1
    return [step * i for i in range(max(ndim, 1))]


def _cuts(sizes: Block) -> bool:
    """Whether a block is smaller than a dimension, or there are two at most: cutting those costs no runtime anything,
    and AOTInductor multiplies a given scale, a constant that was expanded, by tensors of as many dimensions alone."""
    return len(sizes) < 3 or any(b not in (1, -1) for b in sizes)
