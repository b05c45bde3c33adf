"""The part of a quantized tensor that one process has, and its range of the whole tensor's buffers.

hop.numerics.copies.describe gives the whole tensor's buffers from its shape. One element of a buffer covers a unit of
tensor elements (hop.tensor.units), so a part has a range of each buffer if its boundaries cut no unit:

    offset of the range = offset of the part / unit        a unit that spans the dimension: the range is all of it
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hop.compat import dtensor
from hop.numerics import copies
from hop.tensor import QuantizedTensor, units
from hop.tensor.table import IndivisibleError


class Chunk(NamedTuple):
    """A range of a buffer of the whole tensor.

    Args:
        buffer: this process's view of it, sharing memory with its tensor.
        offsets: where the range begins.
        size: the size of the whole tensor's buffer.
        is_shared: whether other parts of the tensor have the same range.
    """

    buffer: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    is_shared: bool = False


class Part(NamedTuple):
    """One process's part of a quantized tensor: `tensor`, at `offsets` of the whole tensor, which has shape `shape`."""

    tensor: QuantizedTensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return tuple(self.tensor.shape) == self.shape

    def is_empty(self) -> bool:
        """Whether it has no elements although the whole tensor has some; its scales are then undefined."""
        return self.tensor.numel() == 0 and math.prod(self.shape) > 0

    def region(self) -> str:
        """The range of each dimension, such as "0:32,64:128"."""
        return ",".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.tensor.shape, strict=True))

    def chunks(self) -> dict[str, Chunk]:
        """The ranges of the whole tensor's buffers, by name. Raises IndivisibleError, with the reason, if this part is
        not a range.
        """
        t, buffers = self.tensor, self.tensor.buffers()
        if self.is_whole():
            return {name: Chunk(b, (0,) * b.dim(), tuple(b.shape)) for name, b in buffers.items()}
        ranges = _flat_ranges(self) if t.quantizer.flat else _ranges(self)
        sizes = {b.name: b.shape for b in copies.describe(t.quantizer, self.shape, t.usages)}
        return {
            name: Chunk(b, tuple(offset for offset, _ in ranges[name]), sizes[name], any(s for _, s in ranges[name]))
            for name, b in buffers.items()
        }


def part_of(x: object) -> Part | None:
    """The part that a QuantizedTensor, or a DTensor of QuantizedTensors, represents; None for anything else.

    Raises ValueError for a DTensor with partial sums, or whose parts are not ranges.
    """
    if isinstance(x, QuantizedTensor):
        return Part(x, tuple(x.shape), (0,) * x.dim())
    if isinstance(x, Tensor) and dtensor.is_dtensor(x):
        local, offsets = dtensor.local_range(x)
        if isinstance(local, QuantizedTensor):
            return Part(local, tuple(x.shape), offsets)
    return None


def _ranges(part: Part) -> dict[str, list[tuple[int, bool]]]:
    """The start of the range per buffer and dimension, and whether other parts share it."""
    t = part.tensor
    units_of = units.of_buffers(t.quantizer, t.usages, t.dim())
    along = list(zip(part.offsets, t.shape, part.shape, strict=True))
    return {
        name: [_range(name, f"dimension {d}", u[d], *along[d]) for d in range(t.dim())] for name, u in units_of.items()
    }


def _flat_ranges(part: Part) -> dict[str, list[tuple[int, bool]]]:
    """`_ranges` for blocks over the flattened tensor."""
    t, q = part.tensor, part.tensor.quantizer
    start, (block,) = _flat_offset(part.offsets, t.shape, part.shape), q.block
    along = "the flattened tensor", block, start, t.numel(), math.prod(part.shape)
    ranges = {name: [_range(name, *along)] for name in q.stored()}
    if q.per_byte() > 1:
        return ranges | {"codes": [_range("codes", along[0], q.per_byte(), *along[2:])]}
    return ranges | {"codes": [(offset, False) for offset in part.offsets]}


def _flat_offset(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> int:
    """The start of a part in the flattened tensor, where its elements must be contiguous."""
    cut = next(d for d, (n, whole) in enumerate(zip(sizes, shape, strict=True)) if n != 1 or whole != 1)
    while sizes[cut] == 1 and cut + 1 < len(shape):
        cut += 1
    if any(n != whole for n, whole in zip(sizes[cut + 1 :], shape[cut + 1 :], strict=True)):
        raise IndivisibleError(
            "its blocks run over the flattened tensor, in which the part's elements are not contiguous"
        )
    return sum(o * math.prod(shape[d + 1 :]) for d, o in enumerate(offsets))


def _range(name: str, where: str, unit: int, start: int, length: int, n: int) -> tuple[int, bool]:
    """The start, in units, of elements start : start + length of n, and whether other parts share that unit."""
    end = start + length
    if unit == -1 or (unit >= n and name != "codes"):
        return 0, length != n
    if start % unit or (end % unit and end != n):
        raise IndivisibleError(
            f"{unit} elements along {where} share a byte or a scale, and {start}:{end} of {n} cuts them"
        )
    return start // unit, False
