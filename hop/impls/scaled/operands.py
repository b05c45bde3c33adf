"""The integers of an operand, cut into blocks: codes less their zero points, and one scale for each block."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.numerics import blocks, copies
from hop.numerics.blocks import Block
from hop.numerics.formats import Format


class Grid(NamedTuple):
    """An operand of an integer format: (codes - zero) · step, step and zero with one element for each block."""

    codes: Tensor  # one for each element of the operand
    scale: Tensor  # float32
    zero: Tensor | int
    block: Block  # its size along each dimension, -1 for a whole one

    def centered(self) -> Tensor:
        """codes - zero, exactly: int8, uint8 or int16."""
        if isinstance(self.zero, int):
            return self.codes if self.zero == 0 else self.codes.to(torch.int16) - self.zero
        return self.codes.to(torch.int16) - spread(self.zero, self.block, self.codes.shape)

    def permute(self, dims: list[int]) -> "Grid":
        """The operand with its dimensions in another order."""
        zero = self.zero if isinstance(self.zero, int) else self.zero.permute(dims)
        return Grid(self.codes.permute(dims), self.scale.permute(dims), zero, tuple(self.block[d] for d in dims))

    def unsqueeze(self, dim: int) -> "Grid":
        """The operand with a dimension of size 1 more, `dim` from the end."""
        zero = self.zero if isinstance(self.zero, int) else self.zero.unsqueeze(dim)
        block = (*self.block, 1) if dim == -1 else (1, *self.block)
        return Grid(self.codes.unsqueeze(dim), self.scale.unsqueeze(dim), zero, block)


def grid(operand: Operand, usage: str, format: Format | None = None) -> Grid:
    """An operand of an integer format, read from one of its copies; `format` unpacks as the quantizer's own does."""
    quantizer: Any = operand.quantizer
    own, read = operand.of(usage), format or quantizer.format
    codes, *stored = own.tensors
    shape = list(operand.shape) if usage == copies.ROWWISE else copies.columns(operand.shape)
    if quantizer.is_tiled():
        codes = quantizer.layout.restore(codes, shape, read)
    elif quantizer.per_byte() > 1:
        codes = read.unpack(codes, shape[-1] if shape else 1).reshape(shape)
    zero = stored[1] if quantizer.scale.has_zero_point() else read.zero
    scale = quantizer.scale.scale_of(stored, read)
    result = Grid(codes, scale, zero, blocks.per_dimension(quantizer.block, len(shape)))
    if usage == copies.ROWWISE:
        return result
    transposed = result.permute([1, 0])
    return transposed if operand.dim() == 2 else _unflattened(transposed, list(operand.shape))


def _unflattened(rows: Grid, shape: list[int]) -> Grid:
    """A matrix of rows with the leading dimensions that were flattened to them."""
    of_rows, along = rows.block
    if of_rows not in (-1, 1):
        rows = rows._replace(scale=spread(rows.scale, (of_rows, -1), rows.codes.shape), zero=_of_each_row(rows))

    def unflattened(t: Tensor) -> Tensor:
        return t.reshape([*(shape[:-1] if of_rows != -1 else [1] * (len(shape) - 1)), t.shape[-1]])

    zero = rows.zero if isinstance(rows.zero, int) else unflattened(rows.zero)
    block = (-1 if of_rows == -1 else 1,) * (len(shape) - 1) + (along,)
    return Grid(rows.codes.reshape(shape), unflattened(rows.scale), zero, block)


def _of_each_row(rows: Grid) -> Tensor | int:
    return rows.zero if isinstance(rows.zero, int) else spread(rows.zero, (rows.block[0], -1), rows.codes.shape)


def block_of(operand: Operand, usage: str) -> Block:
    """The size of its blocks along each dimension, -1 for a whole one, in one of its copies."""
    q, shape = operand.quantizer, operand.shape
    transposed = usage == copies.COLUMNWISE
    sizes = blocks.per_dimension(q.block, 2 if transposed else len(shape))
    block = sizes[::-1] if transposed else sizes
    if len(block) != len(shape):  # the leading dimensions were flattened to rows
        block = (-1 if block[0] == -1 else 1,) * (len(shape) - 1) + block[-1:]
    return tuple(-1 if b != -1 and tracing.known_equal(n, b) else b for n, b in zip(shape, block, strict=True))


def spread(scale: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """`scale`, of one element for each block, in a shape that broadcasts to `shape`."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        count = scale.shape[dim]
        if b in (-1, 1) or tracing.known_equal(count, 1):
            continue
        sizes = [*scale.shape[: dim + 1], b, *scale.shape[dim + 1 :]]
        scale = scale.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)
        if not tracing.known_equal(count * b, n):
            scale = scale.narrow(dim, 0, n)
    return scale
