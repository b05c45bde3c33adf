"""The kernel that quantizes tiles of 128 rows: blocks of 128 x 128, and groups along the columns of a transposed copy.

A block of threads loads a tile once. Threads that hold chunks of its rows find what blocks of 128 x 128 need, and
encode the row-wise copy out of registers. For the transposed copy the tile passes through shared memory, where threads
read chunks of columns; their codes pass through shared memory again, so that lines of 128 codes are written.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import chunks, codes, scales
from cutlass_kernels.epilogue import select
from cutlass_kernels.frame_sm90 import follow
from cutlass_kernels.quantize_rows import addresses, common_of, encode_values, find, known_of, note, row_stride
from cutlass_kernels.quantizing import CHUNK, TILE, Tiles

PIECES = TILE // CHUNK  # chunks of a column of a tile


class Tile(NamedTuple):
    """Rows and columns of x, the elements from one row to the next; the first row and column of the tile."""

    rows: Any
    columns: Any
    stride: Any
    row: Any
    column: Any


def of_tensor(v: Any, at: Any, numbers: Any) -> Any:
    """The amax or scale of the whole tensor."""
    high = codes.number(chunks.load(at.amax, 4))
    return scales.Known(high, codes.number(chunks.load(at.amax + 4, 4)) if v.is_affine else None, numbers[0])


def place_of(v: Any, column: Any, piece: Any) -> Any:
    """Where in shared memory the codes of a chunk of a column begin. Pieces of columns are exchanged, so that threads
    that are neighbours meet other banks."""
    return (column * PIECES + (piece ^ ((column + column // CHUNK) % PIECES))) * (CHUNK // v.format.per_word)


class QuantizeTiles:
    """The kernel of a variant."""

    def __init__(self, variant: Tiles) -> None:
        self.variant = variant

    @cute.jit
    def __call__(self, x: cute.Tensor, row_wise: Any, transposed: Any, known: Any, numbers: Any, stream: Any):
        """x (rows, columns), columns innermost; of each copy the codes, scales and codes of zero, or None; what is
        known of whole columns, or None; the least amax."""
        v = self.variant
        address = x.iterator.toint()
        ends = None if const_expr(known is None) else known.iterator.toint()
        at = [addresses(address, copy, ends) for copy in (row_wise, transposed)]
        sizes = (cute.size(x, mode=[0]), cute.size(x, mode=[1]), row_stride(x))
        across = cute.ceil_div(sizes[1], v.width)
        down = cute.ceil_div(sizes[0], TILE)
        self.kernel(address, at, sizes, across, numbers).launch(
            grid=(down * across, 1, 1), block=[v.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: Int64, at: Any, sizes: Any, across: Int32, numbers: Any):
        v = self.variant
        follow()
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_array(Uint32, 64)
        block = cute.arch.block_idx()[0]
        rows, columns, stride = sizes
        tile = Tile(rows, columns, stride, block // across * TILE, block % across * v.width)
        row_wise, transposed = at
        values, written, stats = None, None, None
        if const_expr(v.transposed):
            values = smem.allocate_array(Uint32, TILE * v.words)
            written = smem.allocate_array(Uint32, v.width * TILE // v.format.per_word)
            stats = smem.allocate_array(Float32, PIECES * v.width * 2)
        own = self.rows(x, row_wise, transposed, tile, numbers, shared, values)
        if const_expr(v.transposed):
            cute.arch.sync_threads()
            self.columns(transposed, tile, numbers, own, (values, written, stats))
            cute.arch.sync_threads()
            if const_expr(v.straight):
                self.write_straight(transposed, tile, written)
            else:
                self.write(transposed, tile, written)

    # ---- chunks of rows

    @cute.jit
    def rows(self, x: Any, at: Any, transposed: Any, tile: Any, numbers: Any, shared: Any, values: Any) -> Any:
        """Load the tile; encode its row-wise copy; the scale of a block of 128 x 128."""
        v = self.variant
        thread, per_row = cute.arch.thread_idx()[0], v.width // CHUNK
        place, step = thread % per_row, v.threads // per_row
        starts = [thread // per_row + step * j for j in range(TILE // step)]
        left = tile.columns - tile.column - place * CHUNK
        raws = [cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32) for _ in starts]
        for j in cutlass.range_constexpr(len(starts)):
            row = Int64(tile.row + starts[j])
            address = x + (row * tile.stride + tile.column + place * CHUNK) * chunks.ITEM[v.memory]
            chunks.load_chunk(v, address, select(row < tile.rows, left, Int32(0)), raws[j])
        if const_expr(v.transposed):
            for j in cutlass.range_constexpr(len(starts)):
                chunks.share(values, starts[j] * v.words + place * chunks.words_in(v.memory), raws[j])
        own, known = None, [known_of(v, raw) for raw in raws]
        if const_expr(v.reads):
            some = transposed if const_expr(at is None) else at
            own = find(v, of_tensor(v, some, numbers))
            first = (thread == 0) & (tile.row == 0) & (tile.column == 0)
            for copy in (at, transposed):
                if const_expr(copy is not None):
                    note(v, copy, own, Int64(0), first)
        elif const_expr(v.square):
            own = find(v, self.of_tile(known, numbers, shared))
            first = thread == 0
            if const_expr(at is not None):
                note(
                    v, at, own, tile.row // TILE * cute.ceil_div(tile.columns, v.width) + tile.column // v.width, first
                )
            if const_expr(transposed is not None):
                index = tile.column // v.width * cute.ceil_div(tile.rows, TILE) + tile.row // TILE
                note(v, transposed, own, index, first)
        if const_expr(at is not None):
            for j in cutlass.range_constexpr(len(starts)):
                row = Int64(tile.row + starts[j])
                here = select(row < tile.rows, left, Int32(0))
                scale = own
                if const_expr(not (v.square or v.reads)):
                    per = v.span // CHUNK
                    high, low = (None if e is None else chunks.over_lanes(e, per) for e in known[j][:2])
                    scale = find(v, scales.Known(high, low, common_of(v, at, numbers)))
                    chunk = tile.column // CHUNK + place
                    index = row * cute.ceil_div(tile.columns, v.span) + chunk // per
                    note(v, at, scale, index, (chunk % per == 0) & (here > 0))
                self.encode_row(at, tile, (row, place, here), (raws[j], known[j].worst), scale)
        return own

    @cute.jit
    def encode_row(self, at: Any, tile: Any, where: Any, own: Any, scale: Any):
        v = self.variant
        f, (row, place, left), (raw, worst) = v.format, where, own
        words = cute.make_rmem_tensor(CHUNK // f.per_word, Uint32)
        if left > 0:
            encode_values(v, raw, worst, scale, None, words)
            start = row * cute.ceil_div(tile.columns, f.per_byte) + (tile.column + place * CHUNK) // f.per_byte
            chunks.store_chunk(v, at.codes + start, left, words)

    @cute.jit
    def of_tile(self, known: Any, numbers: Any, shared: Any) -> Any:
        v = self.variant
        high, low = known[0].high, known[0].low
        for own in known[1:]:
            high = codes.larger_bits(high, own.high)
            if const_expr(v.is_affine):
                low = codes.larger(low, own.low)
        warps = Int32(v.threads // 32)
        high = chunks.over_row(high, warps, shared)
        if const_expr(v.is_affine):
            low = chunks.over_row(low, warps, shared + 32)
        return scales.Known(high, low, numbers[0])

    # ---- chunks of columns

    @cute.jit
    def columns(self, at: Any, tile: Any, numbers: Any, own: Any, memory: Any):
        """Encode the transposed copy of the tile in shared memory."""
        v = self.variant
        values, written, stats = memory
        thread = cute.arch.thread_idx()[0]
        units = [thread + v.threads * k for k in range(v.words * PIECES // v.threads)]
        per = 4 // chunks.ITEM[v.memory]  # columns of a word
        found = []
        for k in cutlass.range_constexpr(len(units)):
            word, piece = units[k] % v.words, units[k] // v.words
            read = [values[(piece * CHUNK + i) * v.words + word] for i in range(CHUNK)]
            for c in cutlass.range_constexpr(per):
                raw = cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32)
                for i in cutlass.range_constexpr(chunks.words_in(v.memory)):
                    raw[i] = read[i] if per == 1 else codes.prmt(read[2 * i], read[2 * i + 1], 0x7632 if c else 0x5410)
                mine = known_of(v, raw)
                column = word * per + c
                found.append((raw, mine, column, piece))
                if const_expr(v.span > CHUNK and not v.square):
                    stats[piece * v.width + column] = mine.high
                    if const_expr(v.is_affine):
                        stats[(PIECES + piece) * v.width + column] = mine.low
        if const_expr(v.span > CHUNK and not v.square):
            cute.arch.sync_threads()
        for raw, mine, column, piece in found:
            scale = own
            if const_expr(not (v.square or v.reads)):
                scale = self.of_column(at, tile, numbers, mine, (column, piece), stats)
            words = cute.make_rmem_tensor(CHUNK // v.format.per_word, Uint32)
            encode_values(v, raw, mine.worst, scale, None, words)
            chunks.share(written, place_of(v, column, piece), words)

    @cute.jit
    def of_column(self, at: Any, tile: Any, numbers: Any, mine: Any, where: Any, stats: Any) -> Any:
        """The scale of the group that a chunk of a column belongs to."""
        v = self.variant
        column, piece = where
        high, low = mine.high, mine.low
        inside = tile.column + column < tile.columns
        if const_expr(v.span == 0):  # all of the column
            last = cutlass.min(Int64(tile.column + column), Int64(tile.columns - 1))
            high = codes.number(chunks.load(at.amax + last * 4, 4))
            if const_expr(v.is_affine):
                low = codes.number(chunks.load(at.amax + (last + tile.columns) * 4, 4))
        elif const_expr(v.span > CHUNK):
            per = v.span // CHUNK
            first = piece // per * per
            bits = Uint32(0)
            for i in cutlass.range_constexpr(per):
                bits = cutlass.max(bits, codes.bits(stats[(first + i) * v.width + column]))
            high = codes.number(bits)
            if const_expr(v.is_affine):
                for i in cutlass.range_constexpr(per):
                    low = codes.larger(low, stats[(PIECES + first + i) * v.width + column])
        scale = find(v, scales.Known(high, low, common_of(v, at, numbers)))
        row = tile.row + piece * CHUNK
        if const_expr(v.span == 0):
            note(v, at, scale, Int64(tile.column + column), inside & (row == 0))
        else:
            index = Int64(tile.column + column) * cute.ceil_div(tile.rows, v.span) + row // v.span
            note(v, at, scale, index, inside & (row < tile.rows) & (row % v.span == 0))
        return scale

    @cute.jit
    def write(self, at: Any, tile: Any, written: Any):
        """The codes of the transposed copy, a line of 128 of a column after another."""
        v = self.variant
        f, thread = v.format, cute.arch.thread_idx()[0]
        size = CHUNK // f.per_word
        for j in cutlass.range_constexpr(v.width * PIECES // v.threads):
            unit = thread + v.threads * j
            column, piece = unit // PIECES, unit % PIECES
            words = cute.make_rmem_tensor(size, Uint32)
            for i in cutlass.range_constexpr(size):
                words[i] = written[place_of(v, column, piece) + i]
            row, own = tile.row + piece * CHUNK, Int64(tile.column + column)
            left = select(own < tile.columns, tile.rows - row, Int32(0))
            start = own * cute.ceil_div(tile.rows, f.per_byte) + row // f.per_byte
            chunks.store_chunk(v, at.codes + start, left, words)

    @cute.jit
    def write_straight(self, at: Any, tile: Any, written: Any):
        """Write the codes in the order of x, one chunk of a row after another."""
        v = self.variant
        thread, per_row = cute.arch.thread_idx()[0], v.width // CHUNK
        for j in cutlass.range_constexpr(TILE * per_row // v.threads):
            unit = thread + v.threads * j
            within, first = unit // per_row, unit % per_row * CHUNK
            words = cute.make_rmem_tensor(CHUNK // 4, Uint32)
            for i in cutlass.range_constexpr(CHUNK // 4):
                four = [
                    written[place_of(v, first + 4 * i + k, within // CHUNK) + within % CHUNK // 4] >> (within % 4 * 8)
                    for k in range(4)
                ]
                words[i] = codes.joined(four)
            row, column = Int64(tile.row + within), tile.column + first
            left = select(row < tile.rows, tile.columns - column, Int32(0))
            chunks.store_chunk(v, at.codes + row * tile.columns + column, left, words)
