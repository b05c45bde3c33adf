"""Global memory of registered arrays and the shared memory of a block, where each access is checked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

RESERVED = 1024  # the first bytes of a block's shared memory, which are the system's
SHARED_LIMIT = RESERVED + 227 * 1024
POISON = 0xFF  # NaN in every float format, -1 in every integer
WINDOW = 1 << 32
# Where the windows of the generic address space lie.
SHARED, PARAM, LOCAL = 0x7F00 << 32, 0x7E00 << 32, 0x7D00 << 32
# Where a block of a cluster lies in the shared window; the block's own memory also lies at 0.
RANK_SHIFT = 24


class Fault(Exception):
    """An action that a kernel must not take."""


class Deadlock(Fault):
    """Nobody can run."""


@dataclass(frozen=True)
class Buffer:
    name: str
    base: int
    data: Bytes
    writable: bool

    def offsets(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.int64] | None:
        """The offsets in the buffer of accesses of `size` bytes; None if one is outside."""
        offsets = addresses - self.base
        return offsets if offsets.min() >= 0 and offsets.max() + size <= self.data.size else None


class Memory:
    """Global memory: numpy arrays at addresses that no other array is near."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next = 1 << 36

    def add(self, array: NDArray, name: str = "", *, address: int | None = None, writable: bool = True) -> int:
        """Registers a contiguous array, which stores change in place; returns its address, a multiple of 4096."""
        if not array.flags.c_contiguous:
            raise ValueError(f"Memory.add: {name or 'an array'} is not contiguous")
        data = array.reshape(-1).view(np.uint8)
        base = self._next if address is None else address
        self._next += (data.size // 4096 + 2) * 4096
        self.buffers.append(Buffer(name or f"buffer {len(self.buffers)}", base, data, writable))
        return base

    def find(self, addresses: NDArray[np.int64], size: int, *, write: bool = False) -> tuple[Buffer, NDArray[np.int64]]:
        """The one buffer that all accesses of `size` bytes lie in, and where; a fault if there is none."""
        for buffer in self.buffers:
            offsets = buffer.offsets(addresses, size)
            if offsets is not None:
                if write and not buffer.writable:
                    raise Fault(f"a store to {buffer.name}, which is read only")
                return buffer, offsets
        raise Fault(self._outside(addresses, size))

    def _outside(self, addresses: NDArray[np.int64], size: int) -> str:
        for i, address in enumerate(addresses.ravel()):
            if not any(b.offsets(np.array([address]), size) is not None for b in self.buffers):
                near = min(self.buffers, key=lambda b: abs(int(address) - b.base), default=None)
                where = f"{int(address) - near.base} of {near.data.size} of {near.name}" if near else "no buffer"
                return f"access {i} of {size} bytes at {int(address):#x} is out of bounds: byte {where}"
        return "one instruction accesses several buffers"

    def load(self, addresses: NDArray[np.int64], size: int) -> Bytes:
        """(n,) addresses -> (n, size) bytes."""
        try:
            buffer, offsets = self.find(addresses, size)
        except Fault:
            if len(addresses) == 1:
                raise
            return np.concatenate([self.load(addresses[i : i + 1], size) for i in range(len(addresses))])
        return buffer.data[offsets[:, None] + np.arange(size)]

    def store(self, addresses: NDArray[np.int64], values: Bytes) -> None:
        try:
            buffer, offsets = self.find(addresses, values.shape[1], write=True)
        except Fault:
            if len(addresses) == 1:
                raise
            for i in range(len(addresses)):
                self.store(addresses[i : i + 1], values[i : i + 1])
            return
        buffer.data[offsets[:, None] + np.arange(values.shape[1])] = values


class Shared:
    """The shared memory of one block: bytes, and which warp wrote each by the generic proxy without a fence since."""

    def __init__(self, size: int) -> None:
        if size > SHARED_LIMIT:
            raise Fault(f"{size - RESERVED} bytes of shared memory; a block has {SHARED_LIMIT - RESERVED}")
        self.data = np.full(size, POISON, np.uint8)
        self.writer = np.zeros(size, np.uint8)  # 1 + warp; 0: nobody
        self.barrier = np.zeros(size, bool)  # where mbarriers live
        self.touched = RESERVED

    def check(self, offsets: NDArray[np.int64], size: int = 1) -> None:
        low, high = int(offsets.min()), int(offsets.max()) + size
        if low < RESERVED or high > self.data.size:
            raise Fault(f"shared memory at {low}..{high} is out of bounds {RESERVED}..{self.data.size}")
        self.touched = max(self.touched, high)

    def load(self, offsets: NDArray[np.int64], size: int) -> Bytes:
        self.check(offsets, size)
        return self.data[offsets[:, None] + np.arange(size)]

    def store(self, offsets: NDArray[np.int64], values: Bytes, warp: int) -> None:
        """Store through the generic proxy, from a warp of the block (0 and up)."""
        self.check(offsets, values.shape[1])
        where = offsets[:, None] + np.arange(values.shape[1])
        if self.barrier[where].any():
            raise Fault("a store to an mbarrier")
        self.data[where] = values
        self.writer[where] = warp + 1

    def fence(self, warp: int) -> None:
        """Make the warp's writes visible to the async proxy."""
        self.writer[self.writer == warp + 1] = 0

    def check_async(self, offsets: NDArray[np.int64], what: str) -> None:
        """Before the async proxy reads or writes."""
        self.check(offsets)
        writers = self.writer[offsets]
        if writers.any():
            raise Fault(f"{what} shared memory that warp {writers.max() - 1} wrote without fence.proxy.async")

    def write_async(self, offsets: NDArray[np.int64], values: Bytes | int) -> None:
        self.check_async(offsets, "an asynchronous copy writes")
        if self.barrier[offsets].any():
            raise Fault("an asynchronous copy writes to an mbarrier")
        self.data[offsets] = values

    def write_abroad(self, offsets: NDArray[np.int64], values: Bytes | int) -> None:
        """Store through another block's generic proxy; no fence of this block makes it visible to the async proxy."""
        self.check(offsets)
        if self.barrier[offsets].any():
            raise Fault("a store of another block to an mbarrier")
        self.data[offsets], self.writer[offsets] = values, 255


def aligned(addresses: NDArray[np.int64], size: int) -> None:
    if (addresses % size).any():
        raise Fault(f"an access of {size} bytes at {int(addresses[(addresses % size) != 0][0]):#x} is misaligned")
