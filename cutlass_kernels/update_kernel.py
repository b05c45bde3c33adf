"""A step of an optimizer for all parameters in one launch, on codes and floats, for NVIDIA GPUs from Ampere on.

A grid stays on the GPU. A warp takes units of 1,024 elements, each of one parameter, and of these 256 at a time, a
thread 8: they are read, decoded, updated, the scales of their blocks found, encoded and written, in registers. Vectors
of up to 16 bytes are read and written where addresses are multiples of 16 and no tail is cut, else single elements.

Nothing is contracted: the bits are the CPU's. Most elements go the quick way, in which quotients come from a
reciprocal; where one of 256 is not finite, a scale is odd, or they are not whole, they go the other one.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from cutlass_kernels import update_elements as elements
from cutlass_kernels.books import Layout
from cutlass_kernels.elements import LARGEST
from cutlass_kernels.epilogue import clamped, div, fma, mul, select
from cutlass_kernels.update_rules import updated
from cutlass_kernels.updates import COUNT, FIRST, KIND, LANE, PIECE, STREAM, UNIT, WARP, WARPS, WHOLE, Codes, P, Update

THREADS = WARPS * WARP
# In between all steps of a quotient by a reciprocal are exact; up to 1 no number above 0 becomes 0.
LEAST_SCALE, MOST_SCALE = 2.0**-70, 1.0


class Book(NamedTuple):
    """The tables of a codebook in shared memory, as a thread reads them: of each code the number, and the threshold of
    the next; of each bucket the first code."""

    layout: Layout
    numbers: Any
    following: Any
    index: Any


class Launch(NamedTuple):
    """What all parameters share: the numbers of the step, the key of random numbers, what scales are found by, and the
    codebooks."""

    numbers: Any
    key: Any
    scales: Any
    books: Any


class Parameter(NamedTuple):
    """How many elements it has, its stream of random numbers, and its addresses: its own, its gradient's, and those of
    codes or floats and of scales of its states."""

    count: Any
    stream: Any
    addresses: Any


class Piece(NamedTuple):
    """256 elements: those of a thread begin `at`, and are `left`, 8 at most; whether all are there and aligned; how
    many the parameter has; the thread of the warp."""

    at: Any
    left: Any
    whole: Any
    count: Any
    lane: Any


class Kernel:
    """The kernel of one update."""

    def __init__(self, update: Update) -> None:
        self.update = update

    @cute.jit
    def __call__(
        self,
        records: cute.Tensor,
        tables: cute.Tensor,
        numbers: Any,
        key: Any,
        scales: Any,
        units: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """records (parameters + 1, updates.RECORD) int64; tables (words,) int32 of the codebooks; the numbers of the
        step; two words; for each state in codes, kind by kind, what its scales are found by: the least largest
        magnitude, the range of codes, what part of the largest a number above 0 is at least, and the code of NaN."""
        self.kernel(records, tables, numbers, key, scales, units).launch(
            grid=(blocks, 1, 1), block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, records: cute.Tensor, tables: cute.Tensor, numbers: Any, key: Any, scales: Any, units: Int32):
        launch = Launch(numbers, key, scales if const_expr(scales is not None) else (), self.fill(tables))
        kinds, lane = self.update.kinds, cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        which = Int32(0)
        for unit in range(warp, units, cute.arch.grid_dim()[0] * WARPS):
            while unit >= records[which + 1, FIRST].to(Int32):
                which += 1
            for i in cutlass.range_constexpr(len(kinds)):
                if records[which, KIND].to(Int32) == i:
                    self.unit(i, records, which, unit, lane, launch)

    @cute.jit
    def fill(self, tables: cute.Tensor) -> Any:
        """The codebooks in shared memory."""
        smem = cutlass.memory.SmemAllocator()
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        found, start = [], 0
        for layout in self.update.books:
            copies = self.update.copies if layout.bits == 8 else 1
            held = []
            for size in (layout.size, layout.size + 1):
                table = smem.allocate_tensor(Float32, cute.make_layout((size, copies), stride=(copies, 1)), 16)
                for i in range(thread, size * copies, THREADS):
                    table[i // copies, i % copies] = tables[start + i // copies].bitcast(Float32)
                # A thread has its own copy; that of a threshold which nobody asks for is left out.
                own = cute.make_layout(layout.size, stride=copies)
                held.append(cute.make_tensor(table.iterator + (lane % copies + copies * (size - layout.size)), own))
                start += size
            index = smem.allocate_tensor(Int32, cute.make_layout(layout.index_bytes // 4), 16)
            for i in range(thread, layout.index_bytes // 4, THREADS):
                index[i] = tables[start + i]
            start += layout.index_bytes // 4
            codes = cute.make_tensor(cute.recast_ptr(index.iterator, dtype=Uint8), cute.make_layout(layout.index_bytes))
            found.append(Book(layout, held[0], held[1], codes))
        cute.arch.sync_threads()
        return found

    @cute.jit
    def unit(self, kind: cutlass.Constexpr, records: cute.Tensor, which: Int32, unit: Int32, lane: Int32, launch: Any):
        """1,024 elements of one parameter, or what is left of it."""
        count = records[which, COUNT]
        addresses = [records[which, P + i] for i in range(2 + 2 * len(self.update.kinds[kind].states))]
        parameter = Parameter(count, records[which, STREAM].to(Uint32), addresses)
        is_aligned = records[which, WHOLE].to(Int32) != 0
        begin = (unit - records[which, FIRST].to(Int32)).to(Int64) * UNIT
        pieces = cutlass.min((count - begin + (PIECE - 1)) // PIECE, Int64(UNIT // PIECE)).to(Int32)
        for i in cutlass.range(pieces, unroll=1):
            first = begin + i.to(Int64) * PIECE
            at = first + lane.to(Int64) * LANE
            left = cutlass.max(cutlass.min(count - at, Int64(LANE)), Int64(0)).to(Int32)
            whole = is_aligned and first + PIECE <= count
            self.piece(kind, parameter, Piece(at, left, whole, count, lane), launch)

    @cute.jit
    def piece(self, number: cutlass.Constexpr, parameter: Any, piece: Any, launch: Any):
        """Read, update and write 256 elements."""
        kind = self.update.kinds[number]
        dtypes, own = [kind.p, kind.grad, *kind.states], parameter.addresses
        places = [own[0], own[1], *own[2::2]]
        words = [cute.make_rmem_tensor(elements.words_of(t), Uint32) for t in dtypes]
        if piece.whole:
            for held, t, address in zip(words, dtypes, places, strict=True):
                elements.load(held, t, address + elements.offset(t, piece.at))
        else:
            for held, t, address in zip(words, dtypes, places, strict=True):
                elements.load_some(held, t, address + elements.offset(t, piece.at), piece.left)
        x = [cute.make_rmem_tensor(LANE, Float32) for _ in dtypes]
        for i, t in enumerate(dtypes):
            if const_expr(isinstance(t, Codes)):
                scale = elements.load_float(elements.scale_address(own[2 * i - 1], t, piece))
                elements.decode(x[i], words[i], t, scale, launch.books)
            else:
                elements.widen(x[i], words[i], t)
        for i in range(LANE):
            p, g, *states = [held[i] for held in x]
            for held, value in zip((x[0], *x[2:]), updated(self.update, launch.numbers, p, g, states), strict=True):
                held[i] = value
        del places[1], dtypes[1], words[1], x[1]
        self.write(number, parameter, piece, launch, words, x)
        if piece.whole:
            for held, t, address in zip(words, dtypes, places, strict=True):
                elements.store(held, t, address + elements.offset(t, piece.at))
        else:
            for held, t, address in zip(words, dtypes, places, strict=True):
                elements.store_some(held, t, address + elements.offset(t, piece.at), piece.left)

    @cute.jit
    def write(self, number: cutlass.Constexpr, parameter: Any, piece: Any, launch: Any, words: Any, x: Any):
        """The words of the new elements and states; scales, to memory."""
        kind = self.update.kinds[number]
        before = sum(isinstance(s, Codes) for k in self.update.kinds[:number] for s in k.states)
        if not piece.whole:
            for held in x[1:]:
                for i in range(LANE):
                    held[i] = select(i < piece.left, held[i], Float32(0))
        found, quick, rest = [], piece.whole, list(launch.scales[before:])
        for s, held in zip(kind.states, x[1:], strict=True):
            if const_expr(isinstance(s, Codes)):
                floor, extent, part, zero = rest.pop(0)
                amax = clamped(elements.largest(held, s.block // LANE), floor, Float32(LARGEST))
                scale = div(amax, extent)
                scale = select(scale == Float32(0), Float32(1), scale)
                quick = quick and scale >= Float32(LEAST_SCALE) and scale <= Float32(MOST_SCALE)
                found.append((scale, mul(amax, part), zero))
            else:
                found.append(None)
        odd = Float32(0)  # or NaN, if a number is not finite; Lion's elements are where its state is not
        for held in x[:2] if self.update.rule == "lion" else x[:1]:
            for i in range(LANE):
                odd = fma(held[i], Float32(0), odd)
        noise = None
        if const_expr(self.update.stochastic and kind.p == torch.bfloat16):
            noise = elements.random_words(launch.key, parameter.stream, piece.at)
        if cute.arch.vote_all_sync(quick and odd == Float32(0)):
            elements.narrow(words[0], x[0], kind.p, noise, True)
            for held, own, s, known in zip(words[1:], x[1:], kind.states, found, strict=True):
                if const_expr(isinstance(s, Codes)):
                    elements.encode(held, own, s, known[0], launch.books)
                else:
                    elements.narrow(held, own, s, None, True)
        else:
            elements.narrow(words[0], x[0], kind.p, noise, False)
            for held, own, s, known in zip(words[1:], x[1:], kind.states, found, strict=True):
                if const_expr(isinstance(s, Codes)):
                    elements.encode_any(held, own, s, known, launch.books, piece)
                else:
                    elements.narrow(held, own, s, None, False)
        for i, (s, known) in enumerate(zip(kind.states, found, strict=True)):
            if const_expr(isinstance(s, Codes)):  # noqa: SIM102 - one is decided when the kernel is compiled
                if piece.left > 0 and piece.lane % (s.block // LANE) == 0:
                    elements.store_float(elements.scale_address(parameter.addresses[3 + 2 * i], s, piece), known[0])
