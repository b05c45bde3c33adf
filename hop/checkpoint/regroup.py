"""Quantize parts of a flat-quantized tensor again when shard boundaries have changed.

Optimizer states are quantized in blocks over each process's part (`Quantizer.flat`). If new boundaries cut those
blocks, the saved codes cannot be used. The saved pieces are dequantized instead, and the values of each new part are
quantized in blocks of that part, so that they equal the saved ones up to one rounding.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hop.checkpoint.entries import entry_name, parse_region
from hop.checkpoint.shards import Chunk, Part
from hop.numerics import copies
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.operators import dequantize_operator

Range = tuple[int, int]


class Piece:
    """A range of the whole tensor that was saved separately. Its buffers are allocated when the first is read."""

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
        """The overlap with the part, per dimension: as a slice of the part and a slice of the piece. Empty if there is
        none.
        """
        result: list[tuple[slice, slice]] = []
        for (start, end), offset, size in zip(self.ranges, self.part.offsets, self.part.tensor.shape, strict=True):
            low, high = max(start, offset), min(end, offset + size)
            if low >= high:
                return []
            result.append((slice(low - offset, high - offset), slice(low - start, high - start)))
        return result

    def write(self, out: Tensor) -> None:
        """Write the values of the overlap into the values of the part."""
        t = self.part.tensor
        names = {b.name: self.buffers[entry] for entry, b in self.described.items()}
        values = dequantize_operator(QuantizedTensor(names, t.quantizer, self.shape, t.dtype), out.dtype)
        within, own = zip(*self.overlap(), strict=True)
        out[within] = values[own]
        self.buffers = {}


class Regrouped:
    """A part, and the pieces that contain its values.

    Args:
        fqn: the tensor's name.
        part: the part to load.
        regions: of all saved pieces, such as "0:32,0:64"; None if the tensor was saved whole.

    Raises:
        ValueError: the pieces do not cover the part.
    """

    def __init__(self, fqn: str, part: Part, regions: list[str] | None) -> None:
        self.part = part
        whole = tuple((0, n) for n in part.shape)
        given = [(whole, None)] if regions is None else [(parse_region(region), region) for region in regions]
        pieces = [Piece(fqn, part, ranges, region) for ranges, region in given]
        self.pieces = [piece for piece in pieces if piece.overlap()]
        covered = sum(math.prod(own.stop - own.start for _, own in piece.overlap()) for piece in self.pieces)
        if covered != part.tensor.numel():
            raise ValueError(
                f"{fqn!r}: the checkpoint holds {covered} of the {part.tensor.numel()} elements of the part "
                f"{part.region()}"
            )
        self.by_entry = {entry: piece for piece in self.pieces for entry in piece.described}
        self.values: Tensor | None = None

    def chunks(self) -> Mapping[str, Chunk]:
        """The chunks to read, on the meta device so that they take no memory yet."""
        return {
            entry: Chunk(torch.empty(b.shape, dtype=b.dtype, device="meta"), (0,) * len(b.shape), b.shape)
            for piece in self.pieces
            for entry, b in piece.described.items()
        }

    def buffer(self, entry: str) -> Tensor:
        """The buffer to read `entry` into."""
        return self.by_entry[entry].buffer(entry)

    def commit(self, entry: str, count: int) -> None:
        """Record that `count` elements of `entry` have been read; quantize the part once all are there."""
        piece, t = self.by_entry[entry], self.part.tensor
        piece.left -= count
        if piece.left:
            return
        if self.values is None:
            self.values = torch.empty(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)
        piece.write(self.values)
        self.pieces.remove(piece)
        if not self.pieces:
            t.detach().copy_(self.values)
            self.values = None
