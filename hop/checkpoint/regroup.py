"""Parts of tensors whose blocks run over each part, read from a checkpoint of parts with other boundaries.

States of optimizers are quantized so: each process in blocks over what it holds (`Quantizer.flat`). Where other
boundaries cut those blocks, there are no codes to be read. The pieces that were saved are then dequantized, and what
they have of the part is quantized anew, in its own blocks: the numbers are those that were saved, up to one rounding.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hop.checkpoint.entries import entry_name, ranges_of
from hop.checkpoint.shards import Chunk, Part
from hop.numerics import copies
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.operators import dequantize_operator

Range = tuple[int, int]


class Piece:
    """A range of the whole tensor that was saved by itself. Its buffers are made when the first of them is read."""

    def __init__(self, fqn: str, part: Part, ranges: tuple[Range, ...], region: str | None) -> None:
        self.part, self.ranges = part, ranges
        self.shape = tuple(end - start for start, end in ranges)
        described = copies.describe(part.tensor.quantizer, self.shape, part.tensor.usages)
        self.described = {entry_name(fqn, b.name, region): b for b in described}
        self.left = sum(math.prod(b.shape) for b in described)
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, entry: str) -> Tensor:
        if not self.buffers:
            device = self.part.tensor.device
            self.buffers = {e: torch.empty(b.shape, dtype=b.dtype, device=device) for e, b in self.described.items()}
        return self.buffers[entry]

    def overlap(self) -> list[tuple[slice, slice]]:
        """Along each dimension the range that the part has of it: in the part, and in the piece. Empty for none."""
        result: list[tuple[slice, slice]] = []
        for (start, end), offset, size in zip(self.ranges, self.part.offsets, self.part.tensor.shape, strict=True):
            low, high = max(start, offset), min(end, offset + size)
            if low >= high:
                return []
            result.append((slice(low - offset, high - offset), slice(low - start, high - start)))
        return result

    def write(self, out: Tensor) -> None:
        """Its numbers, into those of the part."""
        t = self.part.tensor
        names = {b.name: self.buffers[entry] for entry, b in self.described.items()}
        values = dequantize_operator(QuantizedTensor(names, t.quantizer, self.shape, t.dtype), out.dtype)
        within, own = zip(*self.overlap(), strict=True)
        out[within] = values[own]
        self.buffers = {}


class Regrouped:
    """A part, and the pieces that its numbers are in.

    Args:
        regions: of all pieces that were saved, such as "0:32,0:64"; None if the whole was saved as one.

    Raises ValueError if they do not cover the part.
    """

    def __init__(self, fqn: str, part: Part, regions: list[str] | None) -> None:
        self.part = part
        whole = tuple((0, n) for n in part.shape)
        given = [(whole, None)] if regions is None else [(ranges_of(region), region) for region in regions]
        pieces = [Piece(fqn, part, ranges, region) for ranges, region in given]
        self.pieces = [piece for piece in pieces if piece.overlap()]
        covered = sum(math.prod(own.stop - own.start for _, own in piece.overlap()) for piece in self.pieces)
        if covered != part.tensor.numel():
            raise ValueError(
                f"{fqn!r}: the checkpoint holds {covered} of the {part.tensor.numel()} elements of the part "
                f"{part.region()}"
            )
        self.by_entry = {entry: piece for piece in self.pieces for entry in piece.described}
        self.numbers: Tensor | None = None

    def chunks(self) -> Mapping[str, Chunk]:
        """What is to be read, without memory yet."""
        return {
            entry: Chunk(torch.empty(b.shape, dtype=b.dtype, device="meta"), (0,) * len(b.shape), b.shape)
            for piece in self.pieces
            for entry, b in piece.described.items()
        }

    def buffer(self, entry: str) -> Tensor:
        """What `entry` is read into."""
        return self.by_entry[entry].buffer(entry)

    def commit(self, entry: str, count: int) -> None:
        """`count` elements of `entry` have been read; after the last ones the part is quantized."""
        piece, t = self.by_entry[entry], self.part.tensor
        piece.left -= count
        if piece.left:
            return
        if self.numbers is None:
            self.numbers = torch.empty(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)
        piece.write(self.numbers)
        self.pieces.remove(piece)
        if not self.pieces:
            t.detach().copy_(self.numbers)
            self.numbers = None
