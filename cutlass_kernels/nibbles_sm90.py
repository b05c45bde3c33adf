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
from cutlass.cute.nvgpu import warpgroup

from cutlass_kernels import epilogue, schedule
from cutlass_kernels.frame_sm90 import Frame
from cutlass_kernels.results import Store

DEPTH = 16  # of K, that one wgmma multiplies
BIASED = 0x43004300  # two times 128 in bfloat16, whose last bits are ones
SUBTRACT = "{ .reg .b32 by; mov.b32 by, {$r1}; sub.bf16x2 {$w0}, {$r0}, by; }"  # which takes no constants
SIGNED = 0x43084308  # and 8 more: a signed code with its highest bit flipped is the code + 8


class NibbleGemm(Frame):
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
        mA, mB, mD = self.operands(x, cute.make_tensor(codes.iterator, cute.select(codes.layout, [1, 0])), out)
        a, b = self.factor(mA, tile.m, tile.k // 2), self.factor(mB, tile.n, tile.k)
        mma = self.products(self.b_type, warpgroup.OperandSource.RMEM)
        counts = (cute.ceil_div(cute.size(mA, mode=[0]), tile.m), cute.ceil_div(cute.size(mB, mode=[0]), tile.n), 1)
        self.kernel(a, b, mD, mma, counts, scale, zero, vectors).launch(
            grid=(1, 1, cutlass.max(cutlass.min(schedule.total(counts), multiprocessors), 1)),
            block=[tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a: Any,
        b: Any,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        counts: Any,
        scale: cute.Tensor,
        zero: Any,
        vectors: Any,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.begin(warp, a, b, (None, None, None))
        self.meet()
        group = self.warpgroup()
        steps = cute.ceil_div(cute.size(b[1], mode=[1]), self.tile.k)
        store, fused = Store(None, None, None, None, mD), epilogue.Fused(vectors, None, shared.sV)
        loading = (shared.loaded, (*a[:2], shared.sA), (*b[:2], shared.sB))
        multiplying = (shared.loaded, (mma, shared.sA, shared.sB), store, fused)
        self.divide(group, warp, (counts, steps, scale, zero), loading, multiplying)

    @cute.jit
    def produce(self, work: Any, loaded: Any, a: Any, b: Any):
        """Load the tiles of both factors, as far ahead of the consumers as there are stages."""
        tile, (counts, steps, _, _) = self.tile, work
        (tma_a, tA, sA), (tma_b, tB, sB) = a, b
        gA = cute.local_tile(tA, (tile.m, tile.k // 2), (None, None, None))
        gB = cute.local_tile(tB, (tile.n, tile.k), (None, None, None))
        tAsA, tAgA = self.partitioned(tma_a, sA, gA)
        tBsB, tBgB = self.partitioned(tma_b, sB, gB)
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
    def consume(self, work: Any, loaded: Any, factors: Any, store: Any, fused: Any):
        """Multiply the tiles that are loaded, and write their results: 64 rows of the weight."""
        v, tile, (counts, steps, *groups), (mma, sA, sB) = self.variant, self.tile, work, factors
        consumer, thread = self.who()
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        tCrA = cute.make_rmem_tensor(mma.partition_shape_A((64, tile.k)), BFloat16)
        tCrC, tCrP = (cute.make_rmem_tensor(mma.partition_shape_C((64, tile.n)), Float32) for _ in range(2))
        words = cute.recast_tensor(sA, Uint8)
        plain = cute.make_tensor(cute.recast_ptr(words.iterator, None), words.layout)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, _ = schedule.at(counts, index)
            first = (row * tile.m + consumer * 64, column * tile.n, 0)
            at = epilogue.Place(first, thread, consumer, store.mD.shape[:2])
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
