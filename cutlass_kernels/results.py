"""How the results of a tile leave: finished part by part, through shared memory by the copy engine, or by threads."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cutlass_kernels import epilogue
from cutlass_kernels.variants import WARPGROUP, Variant


class Store(NamedTuple):
    """Where results go: by the copy engine, through shared memory whose rows are swizzled, or straight to mD; and where
    sums come from that other blocks share."""

    tma: Any
    tD: Any
    sD: Any
    swizzle: Any
    mD: Any
    shared: Any = None


class Results:
    """Store the results of the kernel of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tile = variant.tile

    @cute.jit
    def store(self, sums: Any, store: Any, parts: Int32, owner: cutlass.Constexpr = 0) -> Int32:
        """Finish the sums of a tile in the columns of an owner, and write them; the count of parts after it."""
        v, tile = self.variant, self.tile
        rows, columns = v.part
        count = tile.n // tile.split // columns
        alike = v.tma and tile.rows // rows * count % v.part_stages == 0  # whether each tile begins at the same stage
        for m in cutlass.range_constexpr(tile.rows // rows):
            for n in cutlass.range_constexpr(owner * count, (owner + 1) * count):
                if const_expr(v.tma):
                    before = m * count + n % count if const_expr(alike) else parts  # then addresses are constants
                    self.store_part(sums, store, before, m, n)
                    parts = parts + 1
                else:
                    self.store_elements(sums, store, m, n)
        return parts

    @cute.jit
    def store_part(self, sums: Any, store: Any, parts: Any, m: cutlass.Constexpr, n: cutlass.Constexpr):
        """Store with the copy engine, which skips elements outside the result."""
        v, at = self.variant, sums.at
        rows, columns = v.part
        stage = at.consumer * v.part_stages + parts % v.part_stages
        if at.thread == 0:  # the part that was here before has been read
            cute.arch.cp_async_bulk_wait_group(v.part_stages - 1, read=True)
        cute.arch.barrier(barrier_id=epilogue.PART + at.consumer, number_of_threads=WARPGROUP)
        plain = cute.recast_tensor(store.sD, epilogue.PAIRS[v.out.itemsize])  # which forgets how rows are swizzled
        sP = cute.make_tensor(cute.recast_ptr(plain.iterator, store.swizzle), plain.layout)
        finish = epilogue.finisher(v, sums, m, n)
        for pair in cutlass.range_constexpr(rows * columns // WARPGROUP // 2):
            row, column = epilogue.place_of(at.thread, pair)
            sP[(row, column // 2, stage)] = epilogue.joined(v, finish(pair))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=epilogue.PART + at.consumer, number_of_threads=WARPGROUP)
        if at.thread == 0:
            gD = cute.local_tile(store.tD, (rows, columns), (None, None, None))
            bSG_sD, bSG_gD = cpasync.tma_partition(
                store.tma, 0, cute.make_layout(1), cute.group_modes(store.sD, 0, 2), cute.group_modes(gD, 0, 2)
            )
            first_row, first_column, batch = at.first
            place = (None, first_row // rows + m, first_column // columns + n, batch)
            cute.copy(store.tma, bSG_sD[(None, stage)], bSG_gD[place])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_elements(self, sums: Any, store: Any, m: cutlass.Constexpr, n: cutlass.Constexpr):
        """Store from each thread, with any strides."""
        v, at = self.variant, sums.at
        rows, columns = v.part
        first_row, first_column, batch = at.first
        bits = cute.recast_tensor(store.mD, epilogue.BITS[v.out.itemsize])
        finish = epilogue.finisher(v, sums, m, n)
        for pair in cutlass.range_constexpr(rows * columns // WARPGROUP // 2):
            row, column = epilogue.place_of(at.thread, pair)
            row, column = first_row + m * rows + row, first_column + n * columns + column
            values = finish(pair)
            for j in cutlass.range_constexpr(2):
                if row < at.shape[0] and column + j < at.shape[1]:
                    bits[(row, column + j, batch)] = values[j]

    @cute.jit
    def drain(self, thread: Any):
        """Wait until the copy engine has read all parts: their shared memory ends with the block."""
        if const_expr(self.variant.tma):  # noqa: SIM102 - one is decided when the kernel is compiled, the other when it runs
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
