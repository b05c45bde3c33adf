"""The matrix product for Hopper (sm_90a): TMA loads, wgmma, a persistent grid of warp-specialized blocks.

One story, top to bottom: what is launched, the producer, the consumers' main loops, and the epilogue, in which scales,
zero points, bias and requantization are applied. What it shares with other kernels, and the names of tensors, are in
frame_sm90.py.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from cutlass_kernels import epilogue, schedule, split
from cutlass_kernels.frame_sm90 import Frame, follow
from cutlass_kernels.results import Store
from cutlass_kernels.variants import WARPGROUP

TURN = 1  # the first of the named barriers at which a consumer waits for its turn to multiply; one for each


class Work(NamedTuple):
    """The counts of tiles (cutlass_kernels.schedule), the steps along k of a block and the first of them, and the place
    of the block in its cluster."""

    counts: Any
    steps: Any
    first: Any
    place: Any


class Turn(NamedTuple):
    """The place of a tile, and whether the other of two consumers that take turns has one to multiply after it."""

    at: Any
    follows: Any


class Gemm(Frame):
    """The kernel of one variant."""

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
        tile = self.tile
        mA, mB, mD = self.operands(lhs, rhs, out)
        a, b = self.factors(mA, mB)
        counts = (
            cute.ceil_div(cute.size(mA, mode=[0]), tile.m * tile.cluster[0]),
            cute.ceil_div(cute.size(mB, mode=[0]), tile.n * tile.cluster[1]),
            cute.size(mA, mode=[2]),
        )
        clusters = cutlass.min(schedule.total(counts), multiprocessors // tile.blocks)
        k = cute.size(mA, mode=[1])
        self.kernel(a, b, self.result(mD), mD, self.products(self.a_type), counts, k, vectors, bounds).launch(
            grid=(*self.blocks, cutlass.max(clusters, 1)),
            block=[tile.threads, 1, 1],
            cluster=(*self.blocks, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        a: Any,
        b: Any,
        d: Any,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        counts: Any,
        k: Int32,
        vectors: Any,
        bounds: Any,
    ):
        v, tile = self.variant, self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.begin(warp, a, b, d)
        sums, place = shared.own
        self.meet()
        follow()

        group = self.warpgroup()
        steps = cute.ceil_div(k, tile.k * tile.split)  # what they load beyond k are zeros
        work = Work(counts, steps, sums.rank * steps if const_expr(tile.split > 1) else Int32(0), place)
        store = Store(d[0], d[1], shared.sD, d[2].inner if const_expr(v.tma) else None, mD, sums)
        fused = epilogue.Fused(vectors, bounds, shared.sV, shared.sS)
        loading = (shared.loaded, (*a[:2], shared.sA), (*b[:2], shared.sB))
        self.divide(group, warp, work, loading, (shared.loaded, (mma, shared.sA, shared.sB), store, fused))

    def allocate(self, smem: Any, warp: Any) -> Any:
        """The memory for sums that blocks share, and the place of the block in its cluster."""
        sums = split.allocate(self.variant, smem)
        split.begin(self.variant, sums, warp)
        place = self.place_in_cluster()
        return sums, place if self.tile.split == 1 else (Int32(0), Int32(0))

    # ---- the producer: one warp

    @cute.jit
    def produce(self, work: Any, loaded: Any, a: Any, b: Any):
        """Load the tiles of both factors, as far ahead of the consumers as there are stages."""
        tile, (counts, steps, first, place) = self.tile, work
        tma_a, tA, sA = a
        tma_b, tB, sB = b
        gA = cute.local_tile(tA, (tile.m, tile.k), (None, None, None))  # (m, k, tile of m, tile of k, l)
        gB = cute.local_tile(tB, (tile.n, tile.k), (None, None, None))
        tAsA, tAgA = self.partitioned(tma_a, sA, gA, place[1], tile.cluster[1])
        tBsB, tBgB = self.partitioned(tma_b, sB, gB, place[0], tile.cluster[0])
        a_mask, b_mask = self.masks(place)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.variant.stages)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, batch = schedule.at(counts, index)
            row, column = row * tile.cluster[0] + place[0], column * tile.cluster[1] + place[1]
            for step in range(steps):
                at_a, at_b = (None, row, first + step, batch), (None, column, first + step, batch)
                self.load(loaded, state, (tma_a, tAgA[at_a], tAsA, a_mask), (tma_b, tBgB[at_b], tBsB, b_mask))
                state.advance()
        loaded.producer_tail(state)  # no block ends while another may still signal it

    # ---- a consumer: one warpgroup

    @cute.jit
    def consume(self, work: Any, loaded: Any, factors: Any, store: Any, fused: Any):
        """Multiply the tiles that are loaded, and write their results."""
        v, tile, (counts, steps, _, place) = self.variant, self.tile, work
        consumer, thread = self.who()
        own = consumer * 0 if const_expr(tile.pingpong) else consumer
        mma, sA, sB = factors
        fragments = self.fragments(mma, sA, sB, own)
        tCrC = fragments.tCrC

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        first, stride = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        if const_expr(tile.pingpong):  # consumers take tiles in turns, the first one the first
            if consumer == 1:
                state.advance(steps)
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
            first, stride = first + consumer * stride, 2 * stride
        parts, phase = Int32(0), Int32(0)  # of results that this consumer has stored; of the sums that blocks share
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
            sums = epilogue.Sums(at, tCrC, ahead, fused)
            if const_expr(tile.split == 1):
                parts = self.store(sums, store, parts, 0)
            else:
                split.send(v, at, tCrC, store.shared, phase)
                for owner in cutlass.range_constexpr(tile.split):
                    if store.shared.rank == owner:
                        split.receive(v, at, tCrC, store.shared, phase, owner)
                        parts = self.store(sums, store, parts, owner)
                phase = phase ^ 1
        split.end(v, consumer, store.shared, phase)
        self.drain(thread)

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
