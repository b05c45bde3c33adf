"""Quantizing DTensors: each process quantizes the blocks that it has whole.

A dimension stays sharded if no block, and no byte of codes, runs along it: then the scales are sharded as the codes
are. Otherwise it is gathered first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop import _compile, blocks, copies, memory_format
from hop.quantizer import Quantizer


def is_sharded(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor."""
    return any(map(_compile.is_dtensor, tensors))


def run(
    quantizer: Quantizer,
    shape: Sequence[int],
    usages: Sequence[str],
    tensors: Sequence[Tensor | None],
    function: Callable[..., Sequence[Tensor | None]],
    shapes: Sequence[Sequence[int]],
) -> list[Any]:
    """DTensors of `shapes`, made by `function` of the parts that this process has of `tensors`.

    Args:
        shape: of the tensor that is, or was, quantized.
        tensors: of that shape, or buffers, or None; at least one is a DTensor."""
    mesh, given = next((t.device_mesh, t.placements) for t in tensors if _compile.is_dtensor(t))  # type: ignore[union-attr]
    independent = _independent(quantizer, len(shape), usages)
    placed = [p if p.is_shard() and independent[p.dim] else _compile.replicate() for p in given]
    parts = [None if t is None else _compile.local_part(_compile.as_dtensor(t, mesh), placed) for t in tensors]
    made = []
    for out, size in zip(function(*parts), shapes, strict=True):
        if out is None:
            made.append(None)
            continue
        strides = memory_format.strides(size, out)
        made.append(_compile.make_dtensor(out, _compile.Sharding([], mesh, placed, torch.Size(size), strides)))
    return made


def _independent(quantizer: Quantizer, ndim: int, usages: Sequence[str]) -> list[bool]:
    """For each dimension whether the numbers along it share nothing."""
    if quantizer.flat or tuple(usages) != (copies.ROWWISE,):
        return [False] * ndim
    grids = [blocks.per_dimension(block, ndim) for _, block in quantizer.stored().values()]
    last = ndim - 1 if quantizer.per_byte() > 1 else ndim
    return [d != last and all(grid[d] == 1 for grid in grids) for d in range(ndim)]
