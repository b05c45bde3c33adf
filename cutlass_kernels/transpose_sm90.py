"""A matrix of bytes, transposed at the speed of memory: for factors that do not lie along K, as wgmma reads 8-bit ones.

A block has 128 x 128 bytes. A warp reads four rows of 128, a word a lane; 4 x 4 bytes are transposed in registers, by
eight permutations; the words pass through shared memory, where word i of a row of the result, found by lane j, lies at
i xor j, so that neither writing nor reading meets a bank twice.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cutlass_kernels import epilogue
from cutlass_kernels.frame_sm90 import follow

SIDE = 128  # bytes of a tile
WORDS = SIDE // 4
WARPS = 8


class Transpose:
    """(b, r, c) bytes, c innermost -> (b, c, r), r innermost, its rows filled up with zeros to words."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: Any):
        """x (b, r, c / 4) and out (b, c, r' / 4) as words, with r <= r' < r + 16."""
        self.kernel(x, out).launch(
            grid=(
                cute.ceil_div(cute.size(x, mode=[2]), WORDS),
                cute.ceil_div(cute.size(out, mode=[2]), WORDS),
                cute.size(x, mode=[0]),
            ),
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        across, down, batch = cute.arch.block_idx()
        follow()
        smem = cutlass.memory.SmemAllocator()
        tile = smem.allocate_tensor(Uint32, cute.make_layout((WORDS, SIDE)), 16)  # (word, row) of the result
        for k in cutlass.range_constexpr(WORDS // WARPS):
            i = warp + k * WARPS
            rows = [self.word(x, batch, down * SIDE + 4 * i + t, across * WORDS + lane) for t in range(4)]
            for t, word in enumerate(transposed(rows)):
                tile[(i ^ lane, 4 * lane + t)] = word
        cute.arch.barrier()
        for k in cutlass.range_constexpr(SIDE // WARPS):
            row = warp + k * WARPS
            self.put(out, (batch, across * SIDE + row, down * WORDS + lane), tile[(lane ^ (row // 4), row)])

    @cute.jit
    def word(self, x: Any, batch: Int32, row: Int32, column: Int32) -> Uint32:
        """Four bytes; zeros outside."""
        found = Uint32(0)
        if row < x.shape[1] and column < x.shape[2]:
            found = x[(batch, row, column)]
        return found

    @cute.jit
    def put(self, out: Any, at: Any, word: Uint32):
        if at[1] < out.shape[1] and at[2] < out.shape[2]:
            out[at] = word


def transposed(rows: list[Any]) -> list[Any]:
    """4 x 4 bytes, a row a word, and the first byte in the low bits -> their columns."""
    pick = "prmt.b32 {$w0}, {$r0}, {$r1}, %s;"
    low = [epilogue.ptx(pick % "0x5140", Uint32, *rows[i : i + 2]) for i in (0, 2)]  # bytes 0, 0, 1, 1
    high = [epilogue.ptx(pick % "0x7362", Uint32, *rows[i : i + 2]) for i in (0, 2)]  # bytes 2, 2, 3, 3
    return [epilogue.ptx(pick % which, Uint32, *pair) for pair in (low, high) for which in ("0x5410", "0x7632")]
