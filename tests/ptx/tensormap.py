"""Tensor maps: which bytes of global memory a box is, and where they lie in shared memory."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.ptx.memory import Bytes, Fault, Memory

# The 64 bytes that the copy engine reads, found by comparing those of known tensors: address; version, rank, type and
# swizzle; four strides in 16 bytes; five dimensions less 1; nothing; five sides of the box less 1.
LAYOUT = struct.Struct("<Q I 4I 4x 5I 3x 5B 4x")
ALWAYS = 0x40002  # bits of the second word that all have
LARGE = 0x200000  # a bit that tensors of at least 128 KiB have
SWIZZLES = (0, 32, 64, 128)
SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 10: 2}  # bytes of an element, by its type
TYPES = {1: 0, 2: 1, 4: 2, 8: 4}  # unsigned integers, by bytes


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves; the innermost dimension comes first."""

    address: int
    item: int  # bytes of an element
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of the dimensions after the first
    box: tuple[int, ...]
    swizzle: int = 0  # bytes: 0, 32, 64, 128

    def __post_init__(self) -> None:
        """The rules of the driver's cuTensorMapEncodeTiled."""
        rank = len(self.dims)
        inner = self.box[0] * self.item
        rules = {
            f"rank {rank}": 1 <= rank <= 5 and len(self.strides) == rank - 1 and len(self.box) == rank,
            f"address {self.address:#x} is no multiple of 16": self.address % 16 == 0,
            f"dims {self.dims}": all(1 <= d <= 1 << 32 for d in self.dims),
            f"strides {self.strides}: multiples of 16 below 2^40": all(
                s % 16 == 0 and s < 1 << 40 for s in self.strides
            ),
            f"box {self.box}: 1 to 256": all(1 <= b <= 256 for b in self.box),
            f"the box's rows have {inner} bytes: no multiple of 16": inner % 16 == 0,
            f"swizzle {self.swizzle}": self.swizzle in SWIZZLES,
            f"the box's rows have {inner} bytes, more than the swizzle {self.swizzle}": inner
            <= (self.swizzle or inner),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(f"TensorMap: {'; '.join(broken)}")
        if self.swizzle and inner != self.swizzle:
            raise NotImplementedError(f"TensorMap: rows of {inner} bytes in a swizzle of {self.swizzle}")

    @property
    def size(self) -> int:
        """Bytes of one box, which is what an mbarrier counts."""
        return int(np.prod(self.box)) * self.item

    def encode(self) -> bytes:
        """128 bytes that stand where a kernel expects a tensor map."""
        rank = len(self.dims)
        word = ALWAYS | (rank - 1) << 4 | TYPES[self.item] << 7 | SWIZZLES.index(self.swizzle) << 13
        strides = [*(s >> 4 for s in self.strides), *[0] * (5 - rank)]
        dims, box = ([*(x - 1 for x in of), *[0] * (5 - rank)] for of in (self.dims, self.box))
        return LAYOUT.pack(self.address, word, *strides, *dims, *box).ljust(128, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> "TensorMap":
        address, word, *rest = LAYOUT.unpack_from(data)
        rank, kind, swizzle = (word >> 4 & 7) + 1, word >> 7 & 15, SWIZZLES[word >> 13 & 3]
        known = 7 << 4 | 15 << 7 | 3 << 13 | LARGE
        unknown = rest[rank - 1 : 4] + rest[4 + rank : 9] + rest[9 + rank :]
        if word & ~known != ALWAYS or kind not in SIZES or rank > 5 or any(unknown) or any(data[28:32] + data[52:55]):
            raise Fault(f"no tensor map that is known here: {data[:64].hex(' ', 4)}")
        strides = tuple(s << 4 for s in rest[: rank - 1])
        dims, box = (tuple(x + 1 for x in rest[at : at + rank]) for at in (4, 9))
        return cls(address, SIZES[kind], dims, strides, box, swizzle)

    def rows(self, start: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_], slice]:
        """For each row of the box at `start`: its address, whether it is in the tensor, and which of its bytes are."""
        addresses, valid = np.array([self.address + start[0] * self.item]), np.array([True])
        for first, side, dim, stride in zip(start[1:], self.box[1:], self.dims[1:], self.strides, strict=True):
            index = first + np.arange(side)
            addresses = (index[:, None] * stride + addresses).reshape(-1)
            valid = (((index >= 0) & (index < dim))[:, None] & valid).reshape(-1)
        low, high = max(0, -start[0]), min(self.box[0], self.dims[0] - start[0])
        return addresses, valid & (low < high), slice(low * self.item, max(low, high) * self.item)

    def load(self, memory: Memory, start: tuple[int, ...]) -> Bytes:
        """The bytes of a box, row after row; zeros outside the tensor."""
        addresses, valid, inside = self.rows(start)
        box = np.zeros((len(addresses), self.box[0] * self.item), np.uint8)
        if valid.any():
            box[valid, inside] = memory.load(addresses[valid] + inside.start, inside.stop - inside.start)
        return box.reshape(-1)

    def store(self, memory: Memory, start: tuple[int, ...], box: Bytes) -> None:
        """The part of a box that is in the tensor."""
        addresses, valid, inside = self.rows(start)
        if valid.any():
            memory.store(addresses[valid] + inside.start, box.reshape(len(addresses), -1)[valid, inside])

    def shared_offsets(self, base: int) -> NDArray[np.int64]:
        """The offsets in shared memory of the bytes of a box at `base`."""
        return swizzled(base + np.arange(self.size), self.swizzle)


def swizzled(offsets: NDArray[np.int64], swizzle: int) -> NDArray[np.int64]:
    """Exchanges 16-byte chunks by the number of the 128-byte line, as `swizzle` (0, 32, 64, 128) says."""
    chunks = max(swizzle // 16, 1) - 1
    return offsets ^ (((offsets >> 7) & chunks) << 4)
