"""Sums of integers that the blocks of a cluster share: each multiplies a part of K, and all add up.

Each block owns as many columns of the tile. Every other block sends its sums of those columns into the owner's shared
memory, asynchronously, and the owner adds them to its own and finishes the columns. No memory beside
that is needed, and none is left in a state: a launch may be captured, repeated, or killed. Sums of integers are exact
in any order.

    gathered    an mbarrier of an owner: the bytes of all others have come
    taken       one of each block: all have read what was sent, and the next tile's sums may follow
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cutlass_kernels.variants import WARPGROUP, Variant


class Split(NamedTuple):
    """The sums that others send, (4, thread, fours, consumer, sender); both barriers of each consumer; the rank of the
    block in its cluster."""

    sums: Any
    gathered: Any
    taken: Any
    rank: Any


def fours(v: Variant) -> int:
    """How many times four sums of a thread belong to an owner."""
    return v.tile.rows * v.tile.n // v.tile.split // WARPGROUP // 4


def index(v: Variant, owner: int, i: int) -> int:
    """The first of a thread's four sums in the columns of an owner: those of 64 rows come after each other."""
    of_64_rows = v.tile.n // 8 // v.tile.split
    return i // of_64_rows * (v.tile.n // 2) + 4 * (owner * of_64_rows + i % of_64_rows)


def allocate(v: cutlass.Constexpr, smem: Any) -> Any:
    """The shared memory for it; None where nothing is split."""
    if v.tile.split == 1:
        return None
    barriers = smem.allocate_array(cutlass.Int64, 2 * v.tile.consumers)
    shape = (4, WARPGROUP, fours(v), v.tile.consumers, v.tile.split - 1)
    sums = smem.allocate_tensor(Int32, cute.make_layout(shape), 16)
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return Split(sums, barriers, barriers + v.tile.consumers, rank)


@cute.jit
def begin(v: cutlass.Constexpr, split: Any, warp: Any):
    """Initialize the barriers, before the cluster meets."""
    if const_expr(v.tile.split > 1):  # noqa: SIM102 - one is decided when the kernel is compiled
        if warp == 0:
            with cute.arch.elect_one():
                for consumer in range(v.tile.consumers):
                    cute.arch.mbarrier_init(split.gathered + consumer, 1)
                    cute.arch.mbarrier_init(split.taken + consumer, WARPGROUP)


@cute.jit
def send(v: cutlass.Constexpr, at: Any, tCrC: cute.Tensor, split: Any, phase: Any):
    """Send each owner the sums of its columns, once it has read those of the previous tile."""
    cute.arch.mbarrier_wait(split.taken + at.consumer, phase ^ 1)
    for owner in cutlass.range_constexpr(v.tile.split):
        if split.rank != owner:
            sender = cutlass.select_(split.rank < owner, split.rank, split.rank - 1)
            for i in cutlass.range_constexpr(fours(v)):
                first = index(v, owner, i)
                cute.arch.store_async_dsmem(
                    split.sums[(None, at.thread, i, at.consumer, sender)].iterator,
                    tuple(tCrC[first + j] for j in range(4)),
                    split.gathered + at.consumer,
                    Int32(owner),
                )


@cute.jit
def receive(v: cutlass.Constexpr, at: Any, tCrC: cute.Tensor, split: Any, phase: Any, owner: cutlass.Constexpr):
    """Add the sums from the other blocks to an owner's columns, and signal that they were read."""
    gathered = split.gathered + at.consumer
    if at.thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(gathered, (v.tile.split - 1) * fours(v) * 16 * WARPGROUP)
    cute.arch.mbarrier_wait(gathered, phase)
    for sender in cutlass.range_constexpr(v.tile.split - 1):
        for i in cutlass.range_constexpr(fours(v)):
            found = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(split.sums[(None, at.thread, i, at.consumer, sender)], found)
            first = index(v, owner, i)
            for j in cutlass.range_constexpr(4):
                tCrC[first + j] = tCrC[first + j] + found[j]
    cute.arch.mbarrier_arrive(split.taken + at.consumer, at.thread % v.tile.split)  # each block hears of its share


@cute.jit
def end(v: cutlass.Constexpr, at_consumer: Any, split: Any, phase: Any):
    """Wait for the owners' signals of the last tile, because a block that has ended must not be signalled."""
    if const_expr(v.tile.split > 1):
        cute.arch.mbarrier_wait(split.taken + at_consumer, phase ^ 1)
