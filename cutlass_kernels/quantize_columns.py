"""Statistics of a matrix's columns, found in one pass before their codes.

A thread reads chunks of 16 columns of several rows, and keeps what it finds in as many words as a chunk has. Lanes with
the same columns combine theirs by shuffles, warps in shared memory, and blocks in memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import chunks, codes
from cutlass_kernels.epilogue import select
from cutlass_kernels.frame_sm90 import follow
from cutlass_kernels.quantize_rows import row_stride
from cutlass_kernels.quantizing import CHUNK, Columns

ACROSS = 8  # lanes, and chunks of columns, of a block


class FindColumns:
    """The kernel of a variant; what it writes to was 0."""

    def __init__(self, variant: Columns) -> None:
        self.variant = variant

    @cute.jit
    def __call__(self, x: cute.Tensor, found: cute.Tensor, stream: Any):
        """x (rows, columns), columns innermost; found (columns,) float32, or as many again: the magnitudes of what lies
        below 0."""
        v = self.variant
        sizes = (cute.size(x, mode=[0]), cute.size(x, mode=[1]), row_stride(x))
        tall = v.threads // ACROSS * v.rows
        across = cute.ceil_div(sizes[1], ACROSS * CHUNK)
        at = (x.iterator.toint(), found.iterator.toint())
        self.kernel(at, sizes, across).launch(
            grid=(across * cute.ceil_div(sizes[0], tall), 1, 1), block=[v.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, at: Any, sizes: Any, across: Int32):
        v = self.variant
        follow()
        rows, columns, stride = sizes
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, v.threads // 32 * ACROSS * CHUNK * 2)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        step = v.threads // ACROSS
        first = Int64(block // across * (step * v.rows) + thread // ACROSS)
        start = block % across * (ACROSS * CHUNK) + thread % ACROSS * CHUNK
        count = CHUNK
        found = cute.make_rmem_tensor(count * (2 if v.both else 1), Float32)
        for i in cutlass.range_constexpr(cute.size(found)):
            found[i] = Float32(0.0)
        raws = [cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32) for _ in range(v.rows)]
        for j in cutlass.range_constexpr(v.rows):
            row = first + step * j
            left = select(row < rows, columns - start, Int32(0))
            chunks.load_chunk(v, at[0] + (row * stride + start) * chunks.ITEM[v.memory], left, raws[j])
        for raw in raws:
            values = codes.widened(v.memory, [raw[i] for i in range(cute.size(raw))])
            for i in cutlass.range_constexpr(count):
                own = values[i] if v.both else codes.magnitude(values[i])
                found[i] = codes.larger_or_nan(found[i], own) if v.nan else codes.larger(found[i], own)
                if const_expr(v.both):
                    found[count + i] = codes.larger(found[count + i], -values[i])
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        for i in cutlass.range_constexpr(cute.size(found)):
            own = codes.bits(codes.magnitude(found[i]))  # of a zero below 0 too
            for distance in (8, 16):
                own = cutlass.max(own, cute.arch.shuffle_sync_bfly(own, distance))
            if lane < ACROSS:
                shared[(warp * cute.size(found) + i) * ACROSS + lane] = own
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(cute.size(found) * ACROSS // ACROSS // CHUNK):
            if thread < ACROSS * CHUNK:
                lane_of, element = thread // CHUNK, thread % CHUNK + CHUNK * j
                most = Uint32(0)
                for w in cutlass.range_constexpr(v.threads // 32):
                    most = cutlass.max(most, shared[(w * cute.size(found) + element) * ACROSS + lane_of])
                column = block % across * (ACROSS * CHUNK) + thread
                if column < columns:
                    chunks.raise_to(at[1] + (Int64(column) + Int64(columns) * j) * 4, most)
