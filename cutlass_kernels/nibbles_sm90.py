"""The Hopper kernel for weights of 4 bits beside numbers in bfloat16: codes become bfloat16 in registers.

The weight's rows are those of a tile (swap), so that wgmma takes them from registers; x is read from shared memory. A
code less its zero point is a whole number of few bits, exact in bfloat16. The products of a group's codes are summed by
the matrix unit, and multiplied by the group's scale in float32, so that no scale is rounded.

A thread's part of 16 codes along K, of one row, are two bytes, 4 bytes apart, each of two neighbours:

    byte · 4097 -> a code in the low bits of each half   & 000f000f, ^ 4308 4308 -> 128 + 8 + code   - 136 -> code
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cutlass_kernels import epilogue, schedule
from cutlass_kernels.gemm_sm90 import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Gemm, K, Store, with_batch
from cutlass_kernels.variants import WARPGROUP

DEPTH = 16  # of K, that one wgmma multiplies
BIASED = 0x43004300  # two times 128 in bfloat16, whose last bits are ones
SUBTRACT = "{ .reg .b32 by; mov.b32 by, {$r1}; sub.bf16x2 {$w0}, {$r0}, by; }"  # which takes no constants
SIGNED = 0x43084308  # and 8 more: a signed code with its highest bit flipped is the code + 8


class NibbleGemm(Gemm):
    """The kernel of one variant."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        scale: cute.Tensor,
        zero: Any,
        out: cute.Tensor,
        vectors: Any,
        multiprocessors: Int32,
        stream: Any,
    ):
        """x (m, k) bfloat16, codes (n, k / 2) of two, scale (n, k / group), zero likewise or None, out (m, n)."""
        tile = self.tile
        mA, mB = with_batch(codes), with_batch(x)
        mA, mB = (cute.make_tensor(t.iterator, cute.select(t.layout, [1, 2, 0])) for t in (mA, mB))
        mD = cute.make_tensor(out.iterator, cute.select(with_batch(out).layout, [2, 1, 0]))
        kinds = warpgroup.SmemLayoutAtomKind
        a_layout = self.layout_of(mA, kinds.K_SW64, tile.m, tile.k // 2)
        b_layout = self.layout_of(mB, kinds.K_SW128, tile.n, tile.k)
        op = cpasync.CopyBulkTensorTileG2SOp()
        tma_a, tA = cpasync.make_tiled_tma_atom(
            op, mA, cute.slice_(a_layout, (None, None, 0)), (tile.m, tile.k // 2), num_multicast=1
        )
        tma_b, tB = cpasync.make_tiled_tma_atom(
            op, mB, cute.slice_(b_layout, (None, None, 0)), (tile.n, tile.k), num_multicast=1
        )
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, K, K, Float32, (1, 1, 1), (64, tile.n), warpgroup.OperandSource.RMEM
        )
        counts = (cute.ceil_div(cute.size(mA, mode=[0]), tile.m), cute.ceil_div(cute.size(mB, mode=[0]), tile.n), 1)
        self.kernel(tma_a, tA, tma_b, tB, mD, mma, a_layout, b_layout, counts, scale, zero, vectors).launch(
            grid=(1, 1, cutlass.max(cutlass.min(schedule.total(counts), multiprocessors), 1)),
            block=[tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def layout_of(self, t: cute.Tensor, kind: Any, rows: int, columns: int) -> cute.ComposedLayout:
        atom = warpgroup.make_smem_layout_atom(kind, t.element_type)
        return cute.tile_to_shape(atom, (rows, columns, self.variant.stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        tA: cute.Tensor,
        tma_b: cute.CopyAtom,
        tB: cute.Tensor,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        counts: Any,
        scale: cute.Tensor,
        zero: Any,
        vectors: Any,
    ):
        v, tile = self.variant, self.tile
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * v.stages)
        sA = smem.allocate_tensor(Uint8, a_layout.outer, 1024, a_layout.inner)
        sB = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, b_layout.inner)
        loaded = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=v.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, tile.consumers * 4),  # warps
            tx_count=v.factor_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        steps = cute.ceil_div(cute.size(tB, mode=[1]), tile.k)
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load(loaded, (counts, steps), (tma_a, tA, sA), (tma_b, tB, sB))
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.compute(loaded, (counts, steps), (mma, sA, sB), mD, (scale, zero), vectors)

    @cute.jit
    def load(self, loaded: Any, work: Any, a: Any, b: Any):
        """The producer: tiles of both factors, as far ahead of the consumers as there are stages."""
        tile, (counts, steps) = self.tile, work
        (tma_a, tA, sA), (tma_b, tB, sB) = a, b
        gA = cute.local_tile(tA, (tile.m, tile.k // 2), (None, None, None))
        gB = cute.local_tile(tB, (tile.n, tile.k), (None, None, None))
        one = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.variant.stages)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, _ = schedule.at(counts, index)
            for step in range(steps):
                loaded.producer_acquire(state)
                barrier = loaded.producer_get_barrier(state)
                stage = (None, state.index)
                cute.copy(tma_a, tAgA[(None, row, step, 0)], tAsA[stage], tma_bar_ptr=barrier)
                cute.copy(tma_b, tBgB[(None, column, step, 0)], tBsB[stage], tma_bar_ptr=barrier)
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def compute(self, loaded: Any, work: Any, factors: Any, mD: Any, groups: Any, vectors: Any):
        """A consumer: 64 rows of the weight."""
        v, tile, (counts, steps), (mma, sA, sB) = self.variant, self.tile, work, factors
        consumer = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        tCrA = cute.make_rmem_tensor(mma.partition_shape_A((64, tile.k)), BFloat16)
        tCrC, tCrP = (cute.make_rmem_tensor(mma.partition_shape_C((64, tile.n)), Float32) for _ in range(2))
        words = cute.recast_tensor(sA, Uint8)
        plain = cute.make_tensor(cute.recast_ptr(words.iterator, None), words.layout)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        store = Store(None, None, None, None, mD)
        fused = epilogue.Fused(vectors, None, None)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, _ = schedule.at(counts, index)
            first = (row * tile.m + consumer * 64, column * tile.n, 0)
            at = epilogue.Place(first, thread, consumer, mD.shape[:2])
            beside = epilogue.fetch(v, at, fused)
            tCrC.fill(0.0)
            scales, offsets = self.fetch_groups(at, groups, Int32(0))
            for step in range(steps):
                loaded.consumer_wait(state)
                self.decode(plain, state.index, at, offsets, tCrA)
                ahead = self.fetch_groups(at, groups, cutlass.min(step + 1, steps - 1))
                for g in cutlass.range_constexpr(tile.k // v.group):
                    self.multiply_group(mma, tCrA, tCrB, tCrP, state.index, g)
                    warpgroup.wait_group(0)
                    self.add(tCrC, tCrP, scales, g)
                loaded.consumer_release(state)
                state.advance()
                epilogue.replace(scales, ahead[0])
                if const_expr(v.affine):
                    epilogue.replace(offsets, ahead[1])
            epilogue.share(v, at, beside, None)
            for n in cutlass.range_constexpr(tile.n // v.part[1]):
                self.store_elements(epilogue.Sums(at, tCrC, beside, fused), store, 0, n)

    @cute.jit
    def multiply_group(self, mma: Any, tCrA: Any, tCrB: Any, tCrP: Any, stage: Int32, g: cutlass.Constexpr):
        """Ask for the products of a group."""
        warpgroup.fence()
        for i in cutlass.range_constexpr(self.variant.group // DEPTH):
            mma.set(warpgroup.Field.ACCUMULATE, i > 0)
            at = g * (self.variant.group // DEPTH) + i
            cute.gemm(mma, tCrP, tCrA[(None, None, at)], tCrB[(None, None, at, stage)], tCrP)
        warpgroup.commit_group()

    def add(self, tCrC: Any, tCrP: Any, scales: Any, g: int) -> None:
        """Add the products of a group to the sums, times the scale of each row."""
        for i in range(cute.size(tCrP)):
            tCrC[i] = epilogue.fma(tCrP[i], scales[2 * g + i // 2 % 2], tCrC[i])

    def fetch_groups(self, at: Any, groups: Any, step: Any) -> tuple[Any, Any]:
        """The scales of a step's groups, of both rows of a thread; and what is to be taken off their codes."""
        scale, zero = groups
        count = self.tile.k // self.variant.group
        rows = [cutlass.min(at.first[0] + epilogue.place_of(at.thread, h)[0], scale.shape[0] - 1) for h in range(2)]
        places = [(row, cutlass.min(step * count + g, scale.shape[1] - 1)) for g in range(count) for row in rows]
        scales = epilogue.filled([scale[place] for place in places])
        if not self.variant.affine:
            return scales, None
        offsets = cute.make_rmem_tensor(len(places), Uint32)
        for i, place in enumerate(places):
            offsets[i] = (zero[place].to(Uint32) & Uint32(0x7F)) * Uint32(0x10001) + Uint32(BIASED)
        return scales, offsets

    def decode(self, plain: Any, stage: Any, at: Any, offsets: Any, tCrA: Any) -> None:
        """A stage's codes, in the rows of a thread, as two bfloat16 a register."""
        found = cute.recast_tensor(tCrA, Uint32)
        for h in range(2):
            row = at.consumer * 64 + epilogue.place_of(at.thread, h)[0]
            swizzle = row // 2 % 4 * 16  # of rows of 64 bytes
            for i in range(self.tile.k // 8):  # bytes 4 · i + thread % 4, in halves of 16 codes
                byte = plain[(row, (4 * i + at.thread % 4) ^ swizzle, stage)].to(Uint32)
                flipped = Uint32(BIASED if self.variant.affine else SIGNED)
                biased = (byte * Uint32(0x1001) & Uint32(0x000F000F)) ^ flipped
                offset = offsets[2 * (8 * i // self.variant.group) + h] if self.variant.affine else Uint32(SIGNED)
                found[4 * (i // 2) + 2 * (i % 2) + h] = epilogue.ptx(SUBTRACT, Uint32, biased, offset)
