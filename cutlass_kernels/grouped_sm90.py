"""The Hopper kernel for groups whose sizes lie on the device: the product of gemm_sm90, with another order of tiles.

Each block first finds where groups end, and how many tiles all up to each have, and keeps both in shared memory, so
that no host waits for the sizes. `offs` is not trusted: ends are brought into the tensor, and into rising order.

    rows, columns   groups of the result's rows or columns; tiles begin where a group does. A tile that ends with its
                    group is written by threads, since the copy engine would write the next one's rows. What comes after
                    the last group is one more, without products, whose result is zeros.
    k               each group has a result of its own, and some of the steps along K. In its first and its last step
                    lie numbers of its neighbours, for which consumers put zeros before they multiply.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from cutlass_kernels import epilogue
from cutlass_kernels.frame_sm90 import follow
from cutlass_kernels.gemm_sm90 import TURN, Gemm, Turn
from cutlass_kernels.group_schedule import Groups, GroupSchedule, Where
from cutlass_kernels.results import Store
from cutlass_kernels.variants import MOST_GROUPS, WARPGROUP

ZEROS = 7  # the named barrier at which the consumers of a tile wait for the zeros that they have put
CHUNK = 16  # bytes that a swizzle keeps together


class GroupedGemm(GroupSchedule, Gemm):
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
        offs: cute.Tensor,
        multiprocessors: Int32,
        stream: Any,
    ):
        """Arguments as for Gemm, and offs of shape (groups,)."""
        tile = self.tile
        mA, mB, mD = self.operands(lhs, rhs, out)
        a, b = self.factors(mA, mB)
        clusters = cutlass.min(self.most(mA, mB, offs), multiprocessors // (tile.cluster[0] * tile.cluster[1]))
        self.kernel(a, b, self.result(mD), mD, self.products(self.a_type), vectors, bounds, offs).launch(
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
        self, a: Any, b: Any, d: Any, mD: cute.Tensor, mma: cute.TiledMma, vectors: Any, bounds: Any, offs: cute.Tensor
    ):
        v, tile = self.variant, self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.begin(warp, a, b, d)
        (ends, tiles), own = shared.own
        (tma_a, tA, _), (tma_b, tB, _) = a, b
        extent = (cute.size(tA, mode=[0]), cute.size(tB, mode=[0]), cute.size(tA, mode=[1]))[self.along]
        count = cute.size(offs)
        follow()
        if warp == 0:
            self.count_groups(offs, extent, ends, tiles)
        if const_expr(tile.cluster != (1, 1)):
            cute.arch.barrier()  # for the tables; the cluster's barrier, which is relaxed, publishes mbarriers alone
        self.meet()  # without a cluster for the tables too

        steps = cute.ceil_div(cute.size(tA, mode=[1]), tile.k)
        groups = Groups(ends, tiles, count, extent, (*self.in_tiles(tA, tB), count), steps, own)
        group = self.warpgroup()
        store = Store(d[0], d[1], shared.sD, d[2].inner if const_expr(v.tma) else None, mD)
        fused = epilogue.Fused(vectors, bounds, shared.sV, shared.sS)
        loading = (shared.loaded, (tma_a, tA, shared.sA), (tma_b, tB, shared.sB))
        self.divide(group, warp, groups, loading, (shared.loaded, (mma, shared.sA, shared.sB), store, fused))

    def allocate(self, smem: Any, warp: Any) -> Any:
        """Tables of where groups end, and of their tiles, and the place of the block in its cluster."""
        tables = [smem.allocate_tensor(Int32, cute.make_layout(MOST_GROUPS + 1), 16) for _ in range(2)]
        return tables, self.place_in_cluster()

    # ---- the producer

    @cute.jit
    def produce(self, groups: Any, loaded: Any, a: Any, b: Any):
        """Load the tiles of both factors, as far ahead of the consumers as there are stages."""
        tile, place = self.tile, groups.place
        tma_a, tA, sA = a
        tma_b, tB, sB = b
        a_mask, b_mask = self.masks(place)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.variant.stages)
        group = Int32(0)
        for index in range(cute.arch.block_idx()[2], self.total(groups), cute.arch.grid_dim()[2]):
            group = self.group_of(groups, index, group)
            at = self.where(groups, index, group)
            # Of the factor that groups divide, tiles begin where the group does; the other one has a matrix for each.
            a_first, a_batch = (at.start, 0) if const_expr(self.along == 0) else (0, group)
            b_first, b_batch = (at.start, 0) if const_expr(self.along == 1) else (0, group)
            if const_expr(self.along == 2):
                a_batch, b_batch = 0, 0
            gA = cute.local_tile(cute.domain_offset((a_first, 0, 0), tA), (tile.m, tile.k), (None, None, None))
            gB = cute.local_tile(cute.domain_offset((b_first, 0, 0), tB), (tile.n, tile.k), (None, None, None))
            tAsA, tAgA = self.partitioned(tma_a, sA, gA, place[1], tile.cluster[1])
            tBsB, tBgB = self.partitioned(tma_b, sB, gB, place[0], tile.cluster[0])
            for step in range(at.first, at.first + at.steps):
                at_a, at_b = (None, at.row, step, a_batch), (None, at.column, step, b_batch)
                self.load(loaded, state, (tma_a, tAgA[at_a], tAsA, a_mask), (tma_b, tBgB[at_b], tBsB, b_mask))
                state.advance()
        loaded.producer_tail(state)

    # ---- a consumer

    @cute.jit
    def consume(self, groups: Any, loaded: Any, factors: Any, store: Any, fused: Any):
        """Multiply the tiles that are loaded, and write their results."""
        v, tile, (mma, sA, sB) = self.variant, self.tile, factors
        consumer, thread = self.who()
        own = consumer * 0 if const_expr(tile.pingpong) else consumer
        fragments = self.fragments(mma, sA, sB, own)
        tCrC = fragments.tCrC

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        total, begin, grid = self.total(groups), cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        first, stride, group, parts = begin, grid, Int32(0), Int32(0)
        if const_expr(tile.pingpong):
            if consumer == 1:
                state.advance(self.steps_of(groups, begin, total))
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
            first, stride = begin + consumer * grid, 2 * grid
        for index in range(first, total, stride):
            group = self.group_of(groups, index, group)
            where = self.where(groups, index, group)
            at = self.place(where, store, own, thread, consumer)
            ahead = epilogue.fetch(v, at, fused)
            if const_expr(tile.pingpong):
                cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
            if const_expr(self.along == 2):
                tCrC.fill(0)
            turn = Turn(at, index + grid < total)  # whether the other one has a tile to multiply
            if where.steps > 0:
                if const_expr(self.along == 2):
                    state = self.multiply_part(loaded, state, where, fragments, turn, fused, (sA, sB))
                else:
                    multiply = self.multiply_promoted if const_expr(v.adds_up) else self.multiply
                    state = multiply(loaded, state, where.steps, fragments, turn, fused)
            else:
                self.hand_over(turn)
            if const_expr(tile.pingpong):
                state.advance(self.steps_of(groups, index + grid, total))
            epilogue.share(v, at, ahead, fused.sV)
            if group < groups.count:
                parts = self.store(epilogue.Sums(at, tCrC, ahead, fused), store, parts)
            else:
                self.store_zeros(at, store)
        self.drain(thread)

    @cute.jit
    def steps_of(self, groups: Any, index: Int32, total: Int32) -> Int32:
        """The number of steps of a tile along K; 0 for an empty group."""
        steps = Int32(0)
        if index < total:
            steps = self.where(groups, index, self.group_of(groups, index, Int32(0))).steps
        return steps

    def place(self, where: Where, store: Store, own: Any, thread: Any, consumer: Any) -> epilogue.Place:
        """The place of a consumer's sums. In the dimension that groups divide, the result ends with the group."""
        tile, (rows, columns, _) = self.tile, store.mD.shape
        row, column = where.row * tile.m + own * tile.rows, where.column * tile.n
        if self.along == 0:
            row, rows = row + where.start, where.end
        elif self.along == 1:
            column, columns = column + where.start, where.end
        return epilogue.Place((row, column, where.group), thread, consumer, (rows, columns))

    @cute.jit
    def multiply_part(
        self, loaded: Any, state: Any, where: Any, fragments: Any, turn: Any, fused: Any, shared: Any
    ) -> Any:
        """tCrC += A @ B over a group's part of K: each step's products are waited for, and added up outside of the
        matrix unit if they are to be, those of 64 rows at a time."""
        v, (mma, tCrA, tCrB, tCrC), size = self.variant, fragments, self.tile.k
        tCrP = cute.make_rmem_tensor(mma.partition_shape_C((64, self.tile.n)), cutlass.Float32)
        sums, last = (tCrP if const_expr(v.adds_up) else tCrC), where.first + where.steps - 1
        scales = epilogue.fetch_blocks(v, turn.at, fused, where.first)
        epilogue.begin_blocks(v, turn.at)
        for step in range(where.first, where.first + where.steps):
            loaded.consumer_wait(state)
            if step == where.first or step == last:
                self.put_zeros(shared, state.index, where.start - step * size, where.end - step * size, turn.at)
            ahead = scales
            for m in cutlass.range_constexpr(len(tCrA)):
                self.issue(mma, tCrA[m], tCrB, sums, state.index, v.adds_up)
                if const_expr(m == 0):
                    ahead = epilogue.fetch_blocks(v, turn.at, fused, cutlass.min(step + 1, last))
                    epilogue.share_blocks(v, turn.at, fused, step, scales)
                if const_expr(m == len(tCrA) - 1):  # noqa: SIM102 - one is decided when the kernel is compiled
                    if step == last:
                        self.hand_over(turn)
                warpgroup.wait_group(0)
                if const_expr(m == len(tCrA) - 1):
                    loaded.consumer_release(state)
                if const_expr(v.adds_up):
                    epilogue.promote(v, (tCrC, tCrP, turn.at, fused), scales, step, m)
            epilogue.replace(scales, ahead)
            state.advance()
        return state

    @cute.jit
    def put_zeros(self, shared: Any, stage: Int32, start: Int32, end: Int32, at: Any):
        """Write zeros in both factors outside `start` to `end` of a stage, because NaN times 0 is NaN."""
        tile = self.tile
        sharing = 1 if const_expr(tile.pingpong) else tile.consumers
        thread = at.thread if const_expr(tile.pingpong) else at.thread + at.consumer * WARPGROUP
        if start > 0 or end < tile.k:
            for factor, rows in zip(shared, (tile.m, tile.n), strict=True):
                words = cute.recast_tensor(factor, Uint32)  # which forgets how rows are swizzled
                plain = cute.make_tensor(cute.recast_ptr(words.iterator, None), words.layout)
                for place in range(thread, rows * (tile.k // CHUNK), sharing * WARPGROUP):
                    row, chunk = place // (tile.k // CHUNK), place % (tile.k // CHUNK)
                    if chunk * CHUNK < start or (chunk + 1) * CHUNK > end:
                        for i in cutlass.range_constexpr(CHUNK // 4):
                            word = chunk * (CHUNK // 4) + i
                            column = word ^ row % 8 * (CHUNK // 4)
                            plain[(row, column, stage)] = plain[(row, column, stage)] & kept(
                                start - word * 4, end - word * 4
                            )
            cute.arch.fence_proxy("async.shared", space="cta")
            barrier = ZEROS + (at.consumer if const_expr(tile.pingpong) else 0)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=sharing * WARPGROUP)

    # ---- results

    @cute.jit
    def store(self, sums: Any, store: Any, parts: Int32) -> Int32:
        """Finish the sums of a tile, and write them: parts that lie in the group by the copy engine."""
        v, at = self.variant, sums.at
        rows, columns = v.part
        row, column, group = at.first
        batch = group if const_expr(self.along == 2) else 0
        direct = sums._replace(at=at._replace(first=(row, column, batch)))
        moved = sums._replace(at=at._replace(first=(0, 0, batch)))
        for m in cutlass.range_constexpr(self.tile.rows // rows):
            for n in cutlass.range_constexpr(self.tile.n // columns):
                if const_expr(not v.tma):
                    self.store_elements(direct, store, m, n)
                elif const_expr(self.along == 2):
                    self.store_part(sums, store, parts, m, n)
                    parts = parts + 1
                else:
                    ends = row + (m + 1) * rows if const_expr(self.along == 0) else column + (n + 1) * columns
                    if ends <= at.shape[self.along]:
                        tD = cute.domain_offset((row, column, 0), store.tD)
                        self.store_part(moved, store._replace(tD=tD), parts, m, n)
                        parts = parts + 1
                    else:
                        self.store_elements(direct, store, m, n)
        return parts

    @cute.jit
    def store_zeros(self, at: Any, store: Any):
        """Zeros for a tile that is in no group."""
        tile = self.tile
        first_row, first_column, _ = at.first
        bits = cute.recast_tensor(store.mD, epilogue.BITS[self.variant.out.itemsize])
        for place in range(at.thread, tile.rows * tile.n, WARPGROUP):
            row, column = first_row + place // tile.n, first_column + place % tile.n
            if row < at.shape[0] and column < at.shape[1]:
                bits[(row, column, 0)] = bits.element_type(0)


def kept(start: Any, end: Any) -> Any:
    """The bits of four bytes of which those from `start` to `end` are kept."""
    low, high = (cutlass.min(cutlass.max(x, 0), 4) * 8 for x in (start, end))
    below, above = (epilogue.ptx("shl.b32 {$w0}, {$r0}, {$r1};", Uint32, Uint32(0xFFFFFFFF), x) for x in (low, high))
    return below & ~above
