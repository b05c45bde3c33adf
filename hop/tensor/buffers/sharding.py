"""Quantize DTensors: each process quantizes its part with the scales of the whole tensor.

A dimension stays sharded if no block and no byte of codes is split: each process has whole blocks, or one block spans
the whole dimension. In the first case scales are sharded like the codes. In the second they are replicated, and the
processes find them together: each computes the statistic that the scale rule reads (an amax, or a sum) of its part, and
then the statistics are combined. Otherwise the tensor is gathered first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hop.compat import dtensor, process_groups, tracing
from hop.kernels.aten.quantize import FastBlocks, FastQuantizer, fast
from hop.numerics import blocks, copies, memory_format
from hop.numerics.blocks import Block
from hop.numerics.quantizer import Quantizer
from hop.numerics.rule import Blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement

Reduce = Callable[[Tensor, str, Block], Tensor]
"""Combines a statistic over processes.

Its arguments are a tensor with one element per block, "max", "min" or "sum", and the block size in each dimension, -1
for a whole one.
"""


def is_sharded(tensors: Sequence[object]) -> bool:
    """Whether one of the tensors is a DTensor."""
    return any(map(dtensor.is_dtensor, tensors))


# ---- scales shared by the parts of several processes


@dataclass(frozen=True)
class _SharedBlocks(FastBlocks):
    """Blocks of which some have elements on other processes too."""

    reduce: Reduce

    def combined(self, values: Tensor, op: str, block: Block | None = None) -> Tensor:
        ndim = len(self.places)
        sizes = blocks.per_dimension(block or self.block, ndim)
        return self.reduce(blocks.gather(values, ndim), op, sizes).reshape(values.shape)

    def by_part(self, compute: Callable[[Blocks], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return compute(self)  # at once, as each process combines equally often


class _SharedQuantizer(FastQuantizer):
    """A quantizer whose scales are those of a tensor that is sharded over several processes."""

    reduce: Reduce

    def combined(self, values: Tensor, op: str, block: Block) -> Tensor:
        return self.reduce(values, op, block)

    def _blocks(self, x: Tensor, dims: list[int], ndim: int, dtype: torch.dtype) -> Blocks:
        return _SharedBlocks(x, dims, blocks.places(self.block, ndim), dtype, self.block, self.reduce)


def shared(quantizer: Quantizer, reduce: Reduce) -> Quantizer:
    """A quantizer for a part of a tensor that finds the scales of the whole; `reduce` combines statistics."""
    kernel = fast(str(quantizer))
    result = _SharedQuantizer(**{f.name: getattr(kernel, f.name) for f in fields(kernel)})
    object.__setattr__(result, "reduce", reduce)
    return result


def quantize_shared(
    quantizer: Quantizer, x: Tensor, given: Sequence[Tensor | None], usages: Sequence[str], reduce: Reduce
) -> list[Tensor]:
    """The buffers of x, this process's part of a tensor, in the order of hop.numerics.copies.describe.

    Args:
        given: the scale, the zero point and the noise, as for Quantizer.quantize.
        reduce: combines the statistics of blocks over processes; it is called equally often and in the same order on
            each of them.
    """
    return list(copies.quantize(shared(quantizer, reduce), x, tuple(usages), *given).values())


# ---- DTensors


def run(
    quantizer: Quantizer,
    shape: Sequence[int],
    usages: Sequence[str],
    tensors: Sequence[Tensor | None],
    function: Callable[..., Sequence[Tensor | None]],
    shapes: Sequence[Sequence[int]],
) -> list[Any]:
    """Apply `function` to this process's parts of `tensors`, and wrap its results as DTensors of `shapes`.

    Args:
        shape: the shape of the tensor that is, or was, quantized.
        tensors: tensors of that shape, buffers, or None; at least one is a DTensor.
        function: called as function(quantizer, *parts). If processes share blocks, its quantizer is one that finds the
            scales of the whole tensor, created by `shared`.
    """
    mesh, given = next((t.device_mesh, t.placements) for t in tensors if dtensor.is_dtensor(t))
    dims = _dimensions(quantizer, shape, usages, given, mesh)

    def placed(sizes: Sequence[int]) -> "list[Placement]":
        """The placements of a tensor of `sizes`: replicated if it has one element for the whole dimension."""
        return [
            dtensor.replicate()
            if d is None or d >= len(sizes) or tracing.known_equal(sizes[d], 1)
            else dtensor.sharded(d)
            for d in dims
        ]

    parts = [None if t is None else dtensor.local_part(dtensor.as_dtensor(t, mesh), placed(t.shape)) for t in tensors]
    if any(d is not None for d in dims):
        quantizer = shared(quantizer, reduction(mesh, dims)) if _is_cut(quantizer, len(shape), dims) else quantizer
    result = []
    for out, size in zip(function(quantizer, *parts), shapes, strict=True):
        if out is None:
            result.append(None)
            continue
        strides = memory_format.strides(size, out)
        result.append(dtensor.make_dtensor(out, dtensor.Sharding([], mesh, placed(size), torch.Size(size), strides)))
    return result


def is_shared(quantizer: Quantizer) -> bool:
    """Whether the quantizer finds scales together with other processes."""
    return isinstance(quantizer, _SharedQuantizer)


def reduction(mesh: "DeviceMesh", dims: Sequence[int | None]) -> Reduce:
    """Combine statistics over the mesh axes that shard a dimension spanned by one block.

    `dims` are the dimensions sharded over each axis, None for none.
    """

    def reduce(values: Tensor, op: str, block: Block) -> Tensor:
        for axis, d in enumerate(dims):
            if d is not None and block[d] == -1:
                values = process_groups.combined_over(values, op, mesh, axis)
        return values

    return reduce


def _is_cut(quantizer: Quantizer, ndim: int, dims: Sequence[int | None]) -> bool:
    """Whether blocks have elements on several processes."""
    grids = [blocks.per_dimension(block, ndim) for _, block in quantizer.stored().values()]
    return any(grid[d] == -1 for grid in grids for d in dims if d is not None)


def _dimensions(
    quantizer: Quantizer,
    shape: Sequence[int],
    usages: Sequence[str],
    given: "Sequence[Placement]",
    mesh: "DeviceMesh",
) -> list[int | None]:
    """For each mesh axis, the dimension that stays sharded over it; None for none."""
    result: list[int | None] = []
    for axis, dim in enumerate(map(dtensor.sharded_dim, given)):
        stays = (
            dim is not None
            and dim not in result
            and not tracing.known_equal(shape[dim], 1)
            and tuple(usages) == (copies.ROWWISE,)
            and keeps_blocks(quantizer, shape, dim, mesh.size(axis))
        )
        result.append(dim if stays else None)
    return result


def keeps_blocks(quantizer: Quantizer, shape: Sequence[int], dim: int, size: int) -> bool:
    """Whether sharding a dimension of a row-wise tensor over `size` processes keeps blocks and bytes whole.

    A block that spans the whole dimension may be split.
    """
    if quantizer.flat or quantizer.is_tiled():
        return False
    grids = [blocks.per_dimension(block, len(shape)) for _, block in quantizer.stored().values()]
    units = {grid[dim] for grid in grids} | {quantizer.per_byte() if dim == len(shape) - 1 else 1}
    if -1 in units and type(quantizer) is not Quantizer:
        return False  # subclasses may need other statistics
    if dim == len(shape) - 1 and not tracing.known_equal(shape[dim] % quantizer.per_byte(), 0):
        return False
    part = -(-shape[dim] // size)
    return all(u in (1, -1) or tracing.known_equal(part % u, 0) for u in units)
