"""The Hopper kernel for 4-bit weights times bfloat16 or 8-bit operands, which decodes codes in registers.

The weight's rows are those of a tile (swap), so that wgmma takes them from registers; x is read from shared memory. A
code less its zero point is a whole number of few bits, exact in bfloat16, int8 and e4m3 (nibble_words.py). The products
of a group are summed by the matrix unit, and multiplied by the group's scale in float32, so that no scale is rounded:

    bfloat16   y += sum · scale
    e4m3, e5m2 y += sum · scale, and at the end y / unit · x_scale: with zero points the weight is in units of 2^-9
    integers   y += (float32(sum - x_zero · sum of the codes) · x_scale) · scale, each operation rounded by itself:
               what hop's reference computes; the codes are summed while they are decoded
"""

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from cutlass_kernels import epilogue, nibble_words, schedule
from cutlass_kernels.frame_sm90 import TYPES, Frame, follow
from cutlass_kernels.results import Store


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
        """x (m, k), codes (n, k / 2) of two, scale (n, k / group), zero likewise or None, out (m, n)."""
        tile = self.tile
        mA, mB, mD = self.operands(x, cute.make_tensor(codes.iterator, cute.select(codes.layout, [1, 0])), out)
        a, b = self.factor(mA, tile.m, tile.k // 2), self.factor(mB, tile.n, tile.k)
        mma = self.products(self.variant.held, warpgroup.OperandSource.RMEM)
        counts = (cute.ceil_div(cute.size(mA, mode=[0]), tile.m), cute.ceil_div(cute.size(mB, mode=[0]), tile.n), 1)
        self.kernel(a, b, mD, mma, counts, scale, zero, vectors).launch(
            grid=(1, 1, cutlass.max(cutlass.min(schedule.total(counts), multiprocessors), 1)),
            block=[tile.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
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
        follow()
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
                a_tile, b_tile = tAgA[(None, row, step, 0)], tBgB[(None, column, step, 0)]
                self.load(loaded, state, (tma_a, a_tile, tAsA, None), (tma_b, b_tile, tBsB, None))
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(self, work: Any, loaded: Any, factors: Any, store: Any, fused: Any):
        """Multiply the tiles that are loaded, and write their results: 64 rows of the weight."""
        v, tile, (counts, steps, *groups), (mma, sA, sB) = self.variant, self.tile, work, factors
        consumer, thread = self.who()
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        tCrA = mma.make_fragment_A(mma.partition_shape_A((64, tile.k)))
        shape = mma.partition_shape_C((64, tile.n))
        tCrC, tCrP = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, TYPES[v.accumulates])
        constants = nibble_words.constants(v, thread, groups[0].shape[1])
        words = cute.recast_tensor(sA, Uint8 if const_expr(nibble_words.in_register(v) == 2) else Uint16)
        plain = cute.make_tensor(cute.recast_ptr(words.iterator, None), words.layout)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        for index in range(cute.arch.block_idx()[2], schedule.total(counts), cute.arch.grid_dim()[2]):
            row, column, _ = schedule.at(counts, index)
            first = (row * tile.m + consumer * 64, column * tile.n, 0)
            at = epilogue.Place(first, thread, consumer, store.mD.shape[:2])
            beside = epilogue.fetch(v, at, fused)
            tCrC.fill(-0.0)  # which changes no number that is added to it, not -0 either
            scales, offsets = self.fetch_groups(at, groups, Int32(0))
            epilogue.share(v, at, beside, fused.sV)
            columns = self.of_columns(at, fused)
            for step in range(steps):
                loaded.consumer_wait(state)
                totals = self.decode((plain, state.index), at, offsets, constants, tCrA)
                ahead = self.fetch_groups(at, groups, cutlass.min(step + 1, steps - 1))
                for g in cutlass.range_constexpr(tile.k // v.group):
                    self.multiply_group(mma, tCrA, tCrB, tCrP, state.index, g)
                    warpgroup.wait_group(0)
                    if const_expr(v.group == tile.k):
                        self.add(tCrC, tCrP, scales, totals, columns, g)
                    else:
                        if step * (tile.k // v.group) + g < groups[0].shape[1]:  # the last step may have fewer
                            self.add(tCrC, tCrP, scales, totals, columns, g)
                loaded.consumer_release(state)
                state.advance()
                epilogue.replace(scales, ahead[0])
                if const_expr(v.affine):
                    epilogue.replace(offsets, ahead[1])
            self.finish(tCrC, columns)
            for n in cutlass.range_constexpr(tile.n // v.part[1]):
                self.store_elements(epilogue.Sums(at, tCrC, beside, fused), store, 0, n)

    @cute.jit
    def multiply_group(self, mma: Any, tCrA: Any, tCrB: Any, tCrP: Any, stage: Int32, g: cutlass.Constexpr):
        """Ask for the products of a group."""
        count = self.variant.group // self.variant.depth
        warpgroup.fence()
        for i in cutlass.range_constexpr(count):
            mma.set(warpgroup.Field.ACCUMULATE, i > 0)
            at = g * count + i
            cute.gemm(mma, tCrP, tCrA[(None, None, at)], tCrB[(None, None, at, stage)], tCrP)
        warpgroup.commit_group()

    # ---- what belongs to a column: a row of x

    def of_columns(self, at: Any, fused: Any) -> dict[str, Any]:
        """The scales and zero points of a thread's columns, in registers."""
        v = self.variant
        found = {}
        for name in v.by_column:
            real = epilogue.is_real(v, name)
            own = cute.make_rmem_tensor(self.tile.n // 4, Float32 if real else Int32)
            for i in range(self.tile.n // 4):
                element = fused.sV[(column_of(at.thread, i), v.by_column.index(name), at.consumer)]
                own[i] = element.bitcast(Float32) if real else element
            found[name] = own
        return found

    def add(self, tCrC: Any, tCrP: Any, scales: Any, totals: Any, columns: Any, g: int) -> None:
        """Add the products of a group to the sums, times the scale of each row."""
        for i in range(cute.size(tCrP)):
            row, column = 2 * g + i // 2 % 2, 2 * (i // 4) + i % 2
            if not self.variant.is_integer:
                tCrC[i] = epilogue.fma(tCrP[i], scales[row], tCrC[i])
                continue
            total = tCrP[i] if totals is None else tCrP[i] - columns["lhs_zero"][column] * totals[row]
            term = epilogue.mul(epilogue.mul(total.to(Float32), columns["lhs_scale"][column]), scales[row])
            tCrC[i] = epilogue.add(tCrC[i], term)

    def finish(self, tCrC: Any, columns: Any) -> None:
        """Multiply the sums of 8-bit floats by their scales."""
        unit = nibble_words.unit_of(self.variant)
        if columns and not self.variant.is_integer:
            for i in range(cute.size(tCrC)):
                whole = tCrC[i] if unit == 1 else epilogue.mul(tCrC[i], Float32(1 / unit))
                tCrC[i] = epilogue.mul(whole, columns["lhs_scale"][2 * (i // 4) + i % 2])

    # ---- what belongs to a row: of the weight

    def fetch_groups(self, at: Any, groups: Any, step: Any) -> tuple[Any, Any]:
        """Load the scales of a step's groups for both rows of a thread, and the offsets of their codes."""
        scale, zero = groups
        count = self.tile.k // self.variant.group
        rows = [cutlass.min(at.first[0] + epilogue.place_of(at.thread, h)[0], scale.shape[0] - 1) for h in range(2)]
        places = [(row, cutlass.min(step * count + g, scale.shape[1] - 1)) for g in range(count) for row in rows]
        scales = epilogue.filled([scale[place] for place in places])
        if not self.variant.affine:
            return scales, None
        offsets = cute.make_rmem_tensor(len(places), Uint32)
        for i, place in enumerate(places):
            offsets[i] = nibble_words.offset_of(self.variant, zero[place])
        return scales, offsets

    def decode(self, codes: Any, at: Any, offsets: Any, constants: list[Any], tCrA: Any) -> Any:
        """A stage's codes, in the rows of a thread, as numbers; and the sums of each group's, where they are wanted.

        Of every four parts of a row a thread has one. Rows have 64 bytes, whose 16 are swizzled as the 16 are numbered;
        rows that are eight apart alike, so that four places and constants are all addresses."""
        v, (plain, stage), found = self.variant, codes, cute.recast_tensor(tCrA, Uint32)
        count = nibble_words.in_register(v)
        together = 32 // count  # parts in 16 bytes
        fixed, sums = nibble_words.offset_of(v, None), {}
        first = at.consumer * 64 + epilogue.place_of(at.thread, 0)[0]
        for c in range(4):
            place = (first, (c ^ first // 2 % 4) * together + at.thread % 4, stage)
            part = plain.iterator + cute.crd2idx(place, plain.layout)
            for h, i in itertools.product(range(2), range(c * together // 4, (c + 1) * together // 4)):
                beside = cute.crd2idx((8 * h, 4 * i % together, 0), plain.layout)
                own = cute.make_tensor(part + beside, cute.make_layout(1))[0].to(Uint32)
                group = 2 * (4 * count * i // v.group) + h
                word = nibble_words.numbers(v, own, offsets[group] if v.affine else fixed, constants)
                found[4 * (i // 2) + 2 * (i % 2) + h] = word
                if v.lhs_zero is not None:
                    sums[group] = nibble_words.added(sums.get(group, Int32(0)), word)
        return self.over_lanes(sums) if sums else None

    def over_lanes(self, sums: dict[int, Any]) -> Any:
        """Combine the values of the four threads that share a row."""
        found = cute.make_rmem_tensor(len(sums), Int32)
        for group, own in sums.items():
            pair = own + cute.arch.shuffle_sync_bfly(own, 1)
            found[group] = pair + cute.arch.shuffle_sync_bfly(pair, 2)
        return found


def column_of(thread: Any, i: int) -> Any:
    """A thread's i-th column of a tile."""
    return 8 * (i // 2) + 2 * (thread % 4) + i % 2
