"""The matrix product for Hopper (sm_90a): TMA loads, wgmma, a persistent grid of warp-specialized blocks.

One story, top to bottom: what is launched, the producer, the consumers' main loops, and the epilogue, in which scales,
zero points, bias and requantization are applied. The file is long since it is one kernel.

    mA, mB, mD     the whole factors and result, (m, k, l), (n, k, l), (m, n, l)
    gA, gB, gD     cut in tiles
    sA, sB, sD     in shared memory, in stages
    tCrA, tCrB     descriptors of shared memory that wgmma reads; tCrC the accumulators, in registers

Rows and columns are those of a tile; with tile.swap its rows are columns of the result (cutlass_kernels.variants).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cutlass_kernels import epilogue, schedule
from cutlass_kernels.variants import WARPGROUP, Variant

TYPES = {
    torch.int8: cutlass.Int8,
    torch.uint8: cutlass.Uint8,
    torch.int32: cutlass.Int32,
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
}
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of each thread; together those of a multiprocessor
TURN = 1  # the first of the named barriers at which a consumer waits for its turn to multiply; one for each
K = cute.nvgpu.common.OperandMajorMode.K


class Work(NamedTuple):
    """The counts of tiles (cutlass_kernels.schedule), the steps along k, and the place of the block in its cluster."""

    counts: Any
    steps: Any
    place: Any


class Fragments(NamedTuple):
    """What a consumer multiplies, its rows in as many parts as are multiplied one after another, and its sums."""

    mma: Any
    tCrA: Any
    tCrB: Any
    tCrC: Any


class Turn(NamedTuple):
    """The place of a tile, and whether the other of two consumers that take turns has one to multiply after it."""

    at: Any
    follows: Any


class Store(NamedTuple):
    """Where results go: by the copy engine, through shared memory whose rows are swizzled, or straight to mD."""

    tma: Any
    tD: Any
    sD: Any
    swizzle: Any
    mD: Any


class Gemm:
    """The kernel of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tile = variant.tile

    # ---- launch

    @cute.jit
    def __call__(
        self,
        lhs: cute.Tensor,
        rhs: cute.Tensor,
        out: cute.Tensor,
        vectors: Any,
        bounds: Any,
        multiprocessors: Int32,
        stream: Any,
    ):
        """lhs ([l,] m, k), rhs ([l,] k, n) with k innermost in both; out ([l,] m, n) with n innermost."""
        v, tile = self.variant, self.tile
        mL = cute.make_tensor(lhs.iterator, cute.select(with_batch(lhs).layout, [1, 2, 0]))
        mR = cute.make_tensor(rhs.iterator, cute.select(with_batch(rhs).layout, [2, 1, 0]))
        mA, mB = (mR, mL) if const_expr(tile.swap) else (mL, mR)
        mD = cute.make_tensor(
            out.iterator, cute.select(with_batch(out).layout, [2, 1, 0] if const_expr(tile.swap) else [1, 2, 0])
        )

        a_layout, b_layout = self.factor_layout(mA, tile.m), self.factor_layout(mB, tile.n)
        tma_a, tA = self.load_atom(mA, a_layout, tile.m, tile.cluster[1])
        tma_b, tB = self.load_atom(mB, b_layout, tile.n, tile.cluster[0])
        d_layout, tma_d, tD = None, None, None
        if const_expr(v.tma):
            d_layout = self.part_layout(mD)
            tma_d, tD = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), mD, cute.slice_(d_layout, (None, None, 0)), v.part
            )

        mma = hopper_helpers.make_trivial_tiled_mma(
            TYPES[self.a_type], TYPES[self.b_type], K, K, TYPES[v.accumulates], (1, 1, 1), (64, tile.n)
        )
        counts = (
            cute.ceil_div(cute.size(mA, mode=[0]), tile.m * tile.cluster[0]),
            cute.ceil_div(cute.size(mB, mode=[0]), tile.n * tile.cluster[1]),
            cute.size(mA, mode=[2]),
        )
        clusters = cutlass.min(schedule.total(counts), multiprocessors // (tile.cluster[0] * tile.cluster[1]))
        self.kernel(
            tma_a,
            tA,
            tma_b,
            tB,
            tma_d,
            tD,
            mD,
            mma,
            a_layout,
            b_layout,
            d_layout,
            counts,
            cute.size(mA, mode=[1]),
            vectors,
            bounds,
        ).launch(
            grid=(*tile.cluster, cutlass.max(clusters, 1)),
            block=[tile.threads, 1, 1],
            cluster=(*tile.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @property
    def a_type(self) -> torch.dtype:
        return self.variant.rhs if self.tile.swap else self.variant.lhs

    @property
    def b_type(self) -> torch.dtype:
        return self.variant.lhs if self.tile.swap else self.variant.rhs

    def factor_layout(self, t: cute.Tensor, rows: int) -> cute.ComposedLayout:
        """(rows, tile.k, stage), k innermost, in swizzled rows of 128 bytes."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, t.element_type)
        return cute.tile_to_shape(atom, (rows, self.tile.k, self.variant.stages), order=(0, 1, 2))

    def part_layout(self, t: cute.Tensor) -> cute.ComposedLayout:
        """(row, column, stage) of what passes through shared memory on its way to the result."""
        width = self.variant.part[1] * t.element_type.width // 8
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}.get(width, kinds.K_INTER)
        atom = warpgroup.make_smem_layout_atom(kind, t.element_type)
        stages = self.variant.part_stages * self.tile.consumers
        return cute.tile_to_shape(atom, (*self.variant.part, stages), order=(0, 1, 2))

    def load_atom(self, t: cute.Tensor, layout: cute.ComposedLayout, rows: int, copies: int) -> Any:
        op = cpasync.CopyBulkTensorTileG2SOp() if copies == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(
            op, t, cute.slice_(layout, (None, None, 0)), (rows, self.tile.k), num_multicast=copies
        )

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tA: cute.Tensor,
        tma_b: cute.CopyAtom,
        tB: cute.Tensor,
        tma_d: Any,
        tD: Any,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: Any,
        counts: Any,
        k: Int32,
        vectors: Any,
        bounds: Any,
    ):
        v, tile = self.variant, self.tile
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(v.tma):
                cpasync.prefetch_descriptor(tma_d)

        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * v.stages)
        sA = smem.allocate_tensor(TYPES[self.a_type], a_layout.outer, 1024, a_layout.inner)
        sB = smem.allocate_tensor(TYPES[self.b_type], b_layout.outer, 1024, b_layout.inner)
        sD = smem.allocate_tensor(mD.element_type, d_layout.outer, 1024, d_layout.inner) if const_expr(v.tma) else None
        sV = None
        if const_expr(len(v.by_column) > 0):
            sV = smem.allocate_tensor(Int32, cute.make_layout((tile.n, len(v.by_column), tile.consumers)), 16)
        sS = None
        if const_expr(v.scales == "1x128"):
            sS = smem.allocate_tensor(Float32, cute.make_layout((tile.n, 2, tile.consumers)), 16)

        cluster = cute.make_layout((*tile.cluster, 1))
        place = cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        copies = tile.cluster[0] + tile.cluster[1] - 1
        releasing = (1 if const_expr(tile.pingpong) else tile.consumers) * 4 * copies  # warps, once for each copy
        loaded = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=v.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releasing),
            tx_count=(tile.m + tile.n) * tile.k,
            cta_layout_vmnk=cute.make_layout((1, *tile.cluster, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=tile.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=tile.cluster)

        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        work = Work(counts, cute.ceil_div(k, tile.k), place)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(loaded, work, (tma_a, tA, sA), (tma_b, tB, sB))
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            swizzle = d_layout.inner if const_expr(v.tma) else None
            fused = epilogue.Fused(vectors, bounds, sV, sS)
            self.consume(loaded, work, (mma, sA, sB), Store(tma_d, tD, sD, swizzle, mD), fused)

    # ---- the producer: one warp

    @cute.jit
    def produce(self, loaded: Any, work: Any, a: Any, b: Any):
        """Load the tiles of both factors, as far ahead of the consumers as there are stages."""
        tile, (counts, steps, place) = self.tile, work
        cluster = cute.make_layout((*tile.cluster, 1))
        tma_a, tA, sA = a
        tma_b, tB, sB = b
        gA = cute.local_tile(tA, (tile.m, tile.k), (None, None, None))  # (m, k, tile of m, tile of k, l)
        gB = cute.local_tile(tB, (tile.n, tile.k), (None, None, None))
        # A block loads its share of a tile for all blocks of its row, or column, of the cluster.
        tAsA, tAgA = cpasync.tma_partition(
            tma_a, place[1], cute.make_layout(tile.cluster[1]), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b, place[0], cute.make_layout(tile.cluster[0]), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        a_mask = cute.make_layout_image_mask(cluster, place, mode=1) if const_expr(tile.cluster[1] > 1) else None
        b_mask = cute.make_layout_image_mask(cluster, place, mode=0) if const_expr(tile.cluster[0] > 1) else None

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.variant.stages)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, batch = schedule.at(counts, index)
            row, column = row * tile.cluster[0] + place[0], column * tile.cluster[1] + place[1]
            for step in range(steps):
                loaded.producer_acquire(state)
                barrier = loaded.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    tAgA[(None, row, step, batch)],
                    tAsA[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=a_mask,
                )
                cute.copy(
                    tma_b,
                    tBgB[(None, column, step, batch)],
                    tBsB[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=b_mask,
                )
                state.advance()
        loaded.producer_tail(state)  # no block ends while another may still signal it

    # ---- a consumer: one warpgroup

    @cute.jit
    def consume(self, loaded: Any, work: Any, factors: Any, store: Any, fused: Any):
        """Multiply the tiles that are loaded, and write their results."""
        mma, sA, sB = factors
        consumer = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        v, tile, (counts, steps, place) = self.variant, self.tile, work
        thr_mma = mma.get_slice(0)
        own = consumer * 0 if const_expr(tile.pingpong) else consumer
        height = 64 if v.adds_up else tile.rows  # of the rows that are multiplied at once
        shares = [
            cute.local_tile(sA, (height, tile.k, v.stages), (own * (tile.rows // height) + m, 0, 0))
            for m in range(tile.rows // height)
        ]
        tCrA = tuple(mma.make_fragment_A(thr_mma.partition_A(share)) for share in shares)
        tCrB = mma.make_fragment_B(thr_mma.partition_B(sB))
        tCrC = cute.make_rmem_tensor(mma.partition_shape_C((tile.rows, tile.n)), TYPES[v.accumulates])
        fragments = Fragments(mma, tCrA, tCrB, tCrC)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        first, stride = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        if const_expr(tile.pingpong):  # consumers take tiles in turns, the first one the first
            if consumer == 1:
                state.advance(steps)
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
            first, stride = first + consumer * stride, 2 * stride
        parts = Int32(0)  # of results that this consumer has stored
        for index in range(first, schedule.total(counts), stride):
            row, column, batch = schedule.at(counts, index)
            row, column = row * tile.cluster[0] + place[0], column * tile.cluster[1] + place[1]
            at = epilogue.Place(
                (row * tile.m + own * tile.rows, column * tile.n, batch), thread, consumer, store.mD.shape[:2]
            )
            ahead = epilogue.fetch(v, at, fused)
            if const_expr(tile.pingpong):
                cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
            follows = index + stride // 2 < schedule.total(counts)  # the other one has a tile to multiply
            multiply = self.multiply_promoted if const_expr(v.adds_up) else self.multiply
            state = multiply(loaded, state, steps, fragments, Turn(at, follows), fused)
            if const_expr(tile.pingpong):
                state.advance(steps)
            epilogue.share(v, at, ahead, fused.sV)
            parts = self.store(epilogue.Sums(at, tCrC, ahead, fused), store, parts)
        if const_expr(v.tma):  # noqa: SIM102 - one is decided when the kernel is compiled, the other when it runs
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def hand_over(self, turn: Any):
        """All products of a tile are asked for, and the other consumer's may follow: the matrix unit goes on."""
        if const_expr(self.tile.pingpong):  # noqa: SIM102 - one is decided when the kernel is compiled
            if turn.follows:
                other = TURN + 1 - turn.at.consumer
                cute.arch.barrier_arrive(barrier_id=other, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def multiply(self, loaded: Any, state: Any, steps: Int32, fragments: Any, turn: Any, fused: Any) -> Any:
        """tCrC = A @ B over all of k, with one step's products under way while the next are asked for."""
        mma, tCrA, tCrB, tCrC = fragments
        last = state.clone()
        loaded.consumer_wait(state)
        self.issue(mma, tCrA[0], tCrB, tCrC, state.index, True)
        state.advance()
        for _ in range(1, steps):
            loaded.consumer_wait(state)
            self.issue(mma, tCrA[0], tCrB, tCrC, state.index, False)
            warpgroup.wait_group(1)
            loaded.consumer_release(last)
            last.advance()
            state.advance()
        self.hand_over(turn)
        warpgroup.wait_group(0)
        loaded.consumer_release(last)
        return state

    @cute.jit
    def multiply_promoted(self, loaded: Any, state: Any, steps: Int32, fragments: Any, turn: Any, fused: Any) -> Any:
        """tCrC = A @ B with the products of each step, times the scales of its blocks, added up in float32.

        Those of 64 rows at a time are all that is held beside the sums."""
        v, (mma, tCrA, tCrB, tCrC), parts = self.variant, fragments, self.tile.rows // 64
        tCrP = cute.make_rmem_tensor(mma.partition_shape_C((64, self.tile.n)), Float32)
        tCrC.fill(0.0)
        scales = epilogue.fetch_blocks(v, turn.at, fused, Int32(0))
        epilogue.begin_blocks(v, turn.at)
        for step in range(steps):
            loaded.consumer_wait(state)
            ahead = scales
            for m in cutlass.range_constexpr(parts):
                self.issue(mma, tCrA[m], tCrB, tCrP, state.index, True)
                if const_expr(m == 0):
                    ahead = epilogue.fetch_blocks(v, turn.at, fused, cutlass.min(step + 1, steps - 1))
                    epilogue.share_blocks(v, turn.at, fused, step, scales)
                if const_expr(m == parts - 1):  # noqa: SIM102 - as in hand_over
                    if step == steps - 1:
                        self.hand_over(turn)
                warpgroup.wait_group(0)
                if const_expr(m == parts - 1):
                    loaded.consumer_release(state)
                epilogue.promote(v, (tCrC, tCrP, turn.at, fused), scales, step, m)
            epilogue.replace(scales, ahead)
            state.advance()
        return state

    @cute.jit
    def issue(self, mma: Any, tCrA: Any, tCrB: Any, tCrC: Any, stage: Int32, fresh: cutlass.Constexpr):
        """Ask for the products of one stage; `fresh` sums begin at zero."""
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(tCrB, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (fresh and i == 0))
            cute.gemm(mma, tCrC, tCrA[(None, None, i, stage)], tCrB[(None, None, i, stage)], tCrC)
        warpgroup.commit_group()

    # ---- results

    @cute.jit
    def store(self, sums: Any, store: Any, parts: Int32) -> Int32:
        """Finish the sums of a tile, and write them; the count of parts after it."""
        v, tile = self.variant, self.tile
        rows, columns = v.part
        for m in cutlass.range_constexpr(tile.rows // rows):
            for n in cutlass.range_constexpr(tile.n // columns):
                if const_expr(v.tma):
                    self.store_part(sums, store, parts, m, n)
                    parts = parts + 1
                else:
                    self.store_elements(sums, store, m, n)
        return parts

    @cute.jit
    def store_part(self, sums: Any, store: Any, parts: Int32, m: cutlass.Constexpr, n: cutlass.Constexpr):
        """By the copy engine, which leaves out what lies beyond the result."""
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
        """By each thread, of any strides."""
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


def with_batch(t: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(t.iterator, cute.prepend(t.layout, cute.make_layout(1), up_to_rank=3))
