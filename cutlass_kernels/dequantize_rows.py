"""The kernel that gives the numbers of codes: one pass over memory, a thread a chunk of 16 codes at a time."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import chunks, codes, scales
from cutlass_kernels.epilogue import mul, select
from cutlass_kernels.frame_sm90 import follow
from cutlass_kernels.quantize_rows import addresses
from cutlass_kernels.quantizing import CHUNK, Numbers


class Dequantize:
    """The kernel of a variant."""

    def __init__(self, variant: Numbers) -> None:
        self.variant = variant

    @cute.jit
    def __call__(self, out: cute.Tensor, buffers: Any, shift: Int32, stream: Any):
        """out (rows, columns), contiguous; the codes, scales, and codes of zero or the outer amax, contiguous."""
        v = self.variant
        at = addresses(out.iterator.toint(), buffers, None)
        sizes = (cute.size(out, mode=[0]), cute.size(out, mode=[1]))
        tiles = cute.ceil_div(sizes[1], (Int32(1) << shift) * (CHUNK * v.held))
        blocks = cute.ceil_div(sizes[0], Int32(v.threads) >> shift) * tiles
        self.kernel(at, sizes, shift, tiles).launch(
            grid=(blocks, 1, 1), block=[v.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, at: Any, sizes: Any, shift: Int32, tiles: Int32):
        v = self.variant
        follow()
        rows, columns = sizes
        thread, across = cute.arch.thread_idx()[0], Int32(1) << shift
        block, tile = cute.arch.block_idx()[0] // tiles, cute.arch.block_idx()[0] % tiles
        row = Int64(block) * (Int32(v.threads) >> shift) + (thread >> shift)
        place = tile * (across * v.held) + (thread & (across - 1))
        columns_here = select(row < rows, columns, Int32(0))
        width = cute.ceil_div(columns, v.format.per_byte)
        words = [cute.make_rmem_tensor(CHUNK // v.format.per_word, Uint32) for _ in range(v.held)]
        starts = [(place + across * j) * CHUNK for j in range(v.held)]
        for j in cutlass.range_constexpr(v.held):
            address = at.codes + row * width + starts[j] // v.format.per_byte
            chunks.load_codes(v, address, columns_here - starts[j], words[j])
        for j in cutlass.range_constexpr(v.held):
            left = columns_here - starts[j]
            if left > 0:
                values = self.numbers(at, words[j], (row, starts[j], columns))
                address = at.x + (row * columns + starts[j]) * chunks.ITEM[v.memory]
                chunks.store_numbers(v, address, left, codes.narrowed(v.memory, values))

    @cute.jit
    def numbers(self, at: Any, words: Any, where: Any) -> Any:
        """The values of a chunk, in float32."""
        v = self.variant
        row, start, columns = where
        across = cute.ceil_div(columns, v.span) if const_expr(v.span > 0) else Int32(1)
        index = Int64(0)
        if const_expr(v.down > 0):
            index = row // v.down * across
        if const_expr(v.span > 0):
            index = index + start // v.span
        zero = None
        if const_expr(v.scale == "mx"):
            step = scales.decode_power(chunks.load(at.scale + index, 1).to(Uint32))
        elif const_expr(v.scale == "two_level"):
            small = codes.decode_e4m3(chunks.load(at.scale + index, 1).to(Uint32))
            amax = codes.number(chunks.load(at.second, 4))
            step = mul(mul(small, amax), Float32(1 / (448.0 * v.format.top)))
        else:
            step = codes.number(chunks.load(at.scale + index * 4, 4))
            if const_expr(v.zero):
                zero = chunks.load_zero(v.format, at.second + index)
        known = [words[i] for i in range(cute.size(words))]
        return [mul(value, step) for value in codes.decode(v.format, known, zero)]
