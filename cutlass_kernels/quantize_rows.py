"""The kernel that quantizes blocks within rows: a whole row, or groups of it. One pass over memory.

A thread takes chunks of 16 elements: it loads them, finds what is known of them, and combines that with the other
threads of the block's elements, by shuffles within a warp, and by shared memory for rows of several warps. Then it has
the scale, and encodes what it still holds in registers. Rows that do not fit into a block's registers are read twice,
the second time from the L2 cache.

    columns of threads     2^shift threads have a row, or a tile of one; a block has several rows where they are short
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import chunks, codes, scales
from cutlass_kernels.epilogue import mul, select
from cutlass_kernels.frame_sm90 import follow
from cutlass_kernels.quantizing import CHUNK, Largest, Rows


class Addresses(NamedTuple):
    """Addresses of the buffers; None for an absent one."""

    x: Any
    codes: Any
    scale: Any
    second: Any
    amax: Any
    noise: Any
    weight: Any = None
    bias: Any = None
    other: Any = None


def addresses(x: Any, copy: Any, known: Any) -> Addresses | None:
    """The addresses of a copy's buffers."""
    if copy is None:
        return None
    codes_at, scale_at, second_at = (None if t is None else t.iterator.toint() for t in copy)
    return Addresses(x, codes_at, scale_at, second_at, known, None)


class Shape(NamedTuple):
    """Rows and columns of x, the elements from one row to the next, the threads of a row as a power of two; the
    elements from a row to the next of the other factor."""

    rows: Any
    columns: Any
    stride: Any
    shift: Any
    other: Any = None


@dataclass(frozen=True)
class Memory:
    """The memory interface that chunks.load_chunk reads from."""

    memory: str
    vector: bool


def row_stride(x: Any) -> Any:
    return x.stride[0]


class Quantize:
    """The kernel of a variant."""

    shared_words = 64  # 32 of each number that the warps of a row exchange

    def __init__(self, variant: Rows) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, others: Any, numbers: Any, shift: Int32, stream: Any
    ):
        """x (rows, columns), columns innermost; the codes, contiguous bytes; the scales, one for each block; `others`:
        second, amax, noise, weight, bias and another factor, or None; `numbers`: the least amax, the stream of noise,
        eps of norms."""
        v = self.variant
        given = others if const_expr(others is not None) else (None,) * 6
        at = Addresses(*[None if t is None else t.iterator.toint() for t in (x, out, scale, *given)])
        other = row_stride(given[5]) if const_expr(given[5] is not None) else None
        shape = Shape(cute.size(x, mode=[0]), cute.size(x, mode=[1]), row_stride(x), shift, other)
        tiles = Int32(1)
        if const_expr(v.in_tiles):
            tiles = cute.ceil_div(shape.columns, (Int32(1) << shift) * (CHUNK * v.held))
        blocks = cute.ceil_div(shape.rows, Int32(v.threads) >> shift) * tiles
        self.kernel(at, shape, tiles, numbers).launch(
            grid=(blocks, 1, 1), block=[v.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, at: Any, shape: Any, tiles: Int32, numbers: Any):
        v = self.variant
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, self.shared_words)
        thread = cute.arch.thread_idx()[0]
        self.begin(thread, shared)
        follow()
        across = Int32(1) << shape.shift
        block, first = cute.arch.block_idx()[0], Int32(0)
        if const_expr(v.in_tiles):
            block, first = block // tiles, block % tiles * (across * v.held)
        row = Int64(block) * (Int32(v.threads) >> shape.shift) + (thread >> shape.shift)
        place = first + (thread & (across - 1))  # the thread's first chunk in the row; the next is `across` further
        # Beyond the last row threads stay, for the others to exchange with, and have nothing.
        columns = select(row < shape.rows, shape.columns, Int32(0))
        if const_expr(v.held > 0):
            self.hold(at, shape, numbers, row, place, columns, shared)
        else:
            self.read_twice(at, shape, numbers, row, place, columns, shared)

    # ---- rows that are held

    @cute.jit
    def hold(self, at: Any, shape: Any, numbers: Any, row: Any, place: Any, columns: Any, shared: Any):
        """Chunks of a row, or of a tile of it, by the threads that have them."""
        v = self.variant
        across = Int32(1) << shape.shift
        places = [place + across * j for j in range(v.held)]
        raws = [cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32) for _ in places]
        for j in cutlass.range_constexpr(v.held):
            self.load(at, shape, row, places[j], columns, raws[j])
        raws = self.computed(at, shape, numbers, row, places, columns, raws, shared)
        known = [known_of(v.encoded, raw) for raw in raws]
        common = common_of(v, at, numbers)
        if const_expr(v.span == 0):
            if const_expr(v.rule == "given"):
                own = self.given(at, Int64(0) if const_expr(v.reads) else cutlass.min(row, Int64(shape.rows - 1)))
            else:
                own = find(v.encoded, self.of_row(at, known, common, shape, shared))
                self.note(at, own, row, (place == 0) & (columns > 0))
            for j in cutlass.range_constexpr(v.held):
                self.encode(at, shape, numbers, (row, places[j], columns), (raws[j], known[j].worst), own)
        else:
            for j in cutlass.range_constexpr(v.held):
                per = v.span // CHUNK
                groups = cute.ceil_div(shape.columns, v.span)
                index = row * groups + places[j] // per
                if const_expr(v.rule == "given"):
                    last = Int64(shape.rows) * groups - Int64(1)
                    self.encode(
                        at,
                        shape,
                        numbers,
                        (row, places[j], columns),
                        (raws[j], known[j].worst),
                        self.given(at, cutlass.min(index, last)),
                    )
                    continue
                high, low = (None if x is None else chunks.over_lanes(x, v.span // CHUNK) for x in known[j][:2])
                own = find(v.encoded, scales.Known(high, low, common))
                is_first = (places[j] % per == 0) & (places[j] * CHUNK < columns)
                self.note(at, own, index, is_first)
                self.encode(at, shape, numbers, (row, places[j], columns), (raws[j], known[j].worst), own)

    @cute.jit
    def read_twice(self, at: Any, shape: Any, numbers: Any, row: Any, place: Any, columns: Any, shared: Any):
        """A row that does not fit."""
        v = self.variant
        across = Int32(1) << shape.shift
        raw = cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32)
        high, low = Float32(0.0), Float32(0.0)
        if const_expr(not v.reads):
            for i in range(0, cute.ceil_div(columns, CHUNK), across):
                self.load(at, shape, row, place + i, columns, raw)
                own = known_of(
                    v.encoded, self.computed(at, shape, numbers, row, [place + i], columns, [raw], shared)[0]
                )
                high = codes.larger_bits(high, own.high)
                if const_expr(own.low is not None):
                    low = codes.larger(low, own.low)
        common = common_of(v, at, numbers)
        whole = Chunk(high, low if const_expr(v.is_affine) else None, None)
        scale = find(v, self.of_row(at, [whole], common, shape, shared))
        self.note(at, scale, row, (place == 0) & (columns > 0))
        for i in range(0, cute.ceil_div(columns, CHUNK), across):
            self.load(at, shape, row, place + i, columns, raw)
            words = self.computed(at, shape, numbers, row, [place + i], columns, [raw], shared)[0]
            self.encode(at, shape, numbers, (row, place + i, columns), (words, known_of(v.encoded, words).worst), scale)

    # ---- steps

    def begin(self, thread: Any, shared: Any) -> None:
        """Set up the shared values of a block of threads."""

    def computed(
        self, at: Any, shape: Any, numbers: Any, row: Any, places: Any, columns: Any, raws: Any, shared: Any
    ) -> Any:
        """The words to encode: those of x, or those of float32 that are computed of it (quantize_norms.py,
        quantize_functions.py)."""
        return raws

    @cute.jit
    def load(self, at: Any, shape: Any, row: Any, place: Any, columns: Any, raw: Any):
        item = chunks.ITEM[self.variant.memory]
        address = at.x + (row * shape.stride + place * CHUNK) * item
        chunks.load_chunk(self.variant, address, columns - place * CHUNK, raw)

    @cute.jit
    def of_row(self, at: Any, known: Any, common: Any, shape: Any, shared: Any) -> Any:
        """The statistics of a whole row, or of the tensor."""
        v = self.variant
        low = None
        if const_expr(v.reads):
            high = codes.number(chunks.load(at.amax, 4))
            if const_expr(v.is_affine):
                low = codes.number(chunks.load(at.amax + 4, 4))
        else:
            warps = cutlass.max(Int32(1) << shape.shift, 32) >> 5
            high = known[0].high
            for own in known[1:]:
                high = codes.larger_bits(high, own.high)
            high = chunks.over_row(high, warps, shared)
            if const_expr(v.is_affine):
                low = known[0].low
                for own in known[1:]:
                    low = codes.larger(low, own.low)
                low = chunks.over_row(low, warps, shared + 32)
        return scales.Known(high, low, common)

    @cute.jit
    def given(self, at: Any, index: Any) -> Any:
        """The scale and the code of zero that are there."""
        v = self.variant
        f, zero = v.format, Float32(float(v.format.zero))
        if const_expr(v.zero):
            zero = chunks.load_zero(f, at.second + index)
        by = codes.divisor(codes.number(chunks.load(at.amax + index * 4, 4)))
        return scales.Scale(None, None, by, zero)

    def note(self, at: Any, scale: Any, index: Any, here: Any):
        """Store the scale of a block, by one of its threads; that of the tensor, by one of all."""
        v = self.variant
        note(v, at, scale, index, here & (index == 0) if v.reads and v.rule != "two_level" else here)

    @cute.jit
    def encode(self, at: Any, shape: Any, numbers: Any, where: Any, own: Any, scale: Any):
        """The codes of a chunk."""
        v = self.variant
        f, (row, place, columns), (raw, worst) = v.format, where, own
        left = columns - place * CHUNK
        words = cute.make_rmem_tensor(CHUNK // f.per_word, Uint32)
        if left > 0:
            random = None
            flat = row * shape.columns + place * CHUNK
            if const_expr(v.noise == "seed"):
                seed = chunks.load(at.noise, 8).to(Int64)
                random = chunks.noise_at(seed, numbers[1], flat, v.vector)
            elif const_expr(v.noise != ""):
                wide = v.noise == "words"
                random = chunks.load_noise(at.noise + flat * (4 if wide else 1), left, wide, v.vector)
            encode_values(v.encoded, raw, worst, scale, random, words)
            width = cute.ceil_div(shape.columns, f.per_byte)
            chunks.store_chunk(v, at.codes + row * width + place * (CHUNK // f.per_byte), left, words)


class FindLargest:
    """The kernel that finds the largest magnitude of a tensor, or its ends; what it writes to was 0."""

    def __init__(self, variant: Largest) -> None:
        self.variant = variant

    @cute.jit
    def __call__(self, x: cute.Tensor, found: cute.Tensor, shift: Int32, stream: Any):
        """x (rows, columns), columns innermost; found one float32, or two: of numbers above and below 0."""
        v = self.variant
        shape = Shape(cute.size(x, mode=[0]), cute.size(x, mode=[1]), row_stride(x), shift)
        tiles = cute.ceil_div(shape.columns, (Int32(1) << shift) * (CHUNK * v.held))
        blocks = cute.ceil_div(shape.rows, Int32(v.threads) >> shift) * tiles
        at = (x.iterator.toint(), found.iterator.toint())
        self.kernel(at, shape, tiles).launch(grid=(blocks, 1, 1), block=[v.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, at: Any, shape: Any, tiles: Int32):
        v = self.variant
        follow()
        shared = cutlass.memory.SmemAllocator().allocate_array(Uint32, 64)
        thread, across = cute.arch.thread_idx()[0], Int32(1) << shape.shift
        block, first = cute.arch.block_idx()[0] // tiles, cute.arch.block_idx()[0] % tiles * (across * v.held)
        row = Int64(block) * (Int32(v.threads) >> shape.shift) + (thread >> shape.shift)
        columns = select(row < shape.rows, shape.columns, Int32(0))
        place = first + (thread & (across - 1))
        raws = [cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32) for _ in range(v.held)]
        for j in cutlass.range_constexpr(v.held):
            start = (place + across * j) * CHUNK
            address = at[0] + (row * shape.stride + start) * chunks.ITEM[v.memory]
            chunks.load_chunk(v, address, columns - start, raws[j])
        words = [raw[i] for raw in raws for i in range(chunks.words_in(v.memory))]
        found = chunks.ends(v.memory, words) if const_expr(v.both) else [chunks.largest(v.memory, words, v.nan)]
        if const_expr(v.both and v.nan):
            found = or_nan(found, chunks.largest(v.memory, words, True))
        for i, own in enumerate(found):
            most = chunks.over_row(own, Int32(v.threads // 32), shared + 32 * i)
            if thread == 0:
                chunks.raise_to(at[1] + 4 * i, codes.bits(most))


def common_of(v: Any, at: Any, numbers: Any) -> Any:
    """The values that all blocks share: the least amax, or those computed from the outer amax."""
    if v.rule != "two_level":
        return numbers[0]
    return scales.outer_of(v.format, codes.number(chunks.load(at.amax, 4)))


class Chunk(NamedTuple):
    """The statistics of a chunk, as in scales.Known, and its largest magnitude; NaN if it has one."""

    high: Any
    low: Any
    worst: Any


@cute.jit
def known_of(v: cutlass.Constexpr, raw: Any) -> Any:
    """The statistics of a chunk that the rule and the format need."""
    words = [raw[i] for i in range(cute.size(raw))]
    high, low, worst = None, None, None
    if const_expr(v.format.is_integer or scales.divides(v.rule)):
        worst = chunks.largest(v.memory, words, True)
    if const_expr(v.is_affine):
        high, low = or_nan(chunks.ends(v.memory, words), worst)
    elif const_expr(worst is None):
        of_nan = not v.format.has_nan or (v.rule == "mx" and v.rounding != "rceil")
        high = chunks.largest(v.memory, words, of_nan)
    elif const_expr(not v.format.has_nan):
        high = worst
    else:
        high = worst
        if codes.is_nan(worst):
            high = chunks.largest(v.memory, words, False)
    return Chunk(high, low, worst)


def or_nan(ends: Any, worst: Any) -> tuple[Any, Any]:
    """The ends of numbers, the upper one NaN where the largest magnitude is."""
    high, low = ends
    return select(codes.is_nan(worst), worst, high), low


def find(v: Any, known: Any) -> Any:
    """The scale; with a divisor where elements are divided."""
    found = scales.find(v, known)
    return found._replace(by=codes.divisor(found.by)) if scales.divides(v.rule) else found


@cute.jit
def note(v: cutlass.Constexpr, at: Any, scale: Any, index: Any, here: Any) -> None:
    """Store the scale of a block, by one of its threads."""
    if here:
        if const_expr(scale.stored.dtype is Float32):
            chunks.store(at.scale + index * 4, [codes.bits(scale.stored)])
        else:
            chunks.store1(at.scale + index, scale.stored.to(Uint32))
        if const_expr(scale.second is not None):
            chunks.store1(at.second + index, scale.second.to(Uint32))


@cute.jit
def encode_values(v: cutlass.Constexpr, raw: Any, worst: Any, scale: Any, random: Any, words: Any) -> None:
    """The codes of the numbers of a chunk, in words."""
    f, x = v.format, cute.make_rmem_tensor(CHUNK, Float32)
    noise: Any = random
    own = [raw[i] for i in range(cute.size(raw))]
    values = codes.widened(v.memory, own)
    if const_expr(f.is_integer and random is None):
        for i in cutlass.range_constexpr(CHUNK):
            x[i] = values[i]
        codes.encode_integers(f, x, scale.by, scale.zero, worst, v.rule != "amax", words)
    else:
        if const_expr(scales.divides(v.rule)):
            codes.divide(values, scale.by, worst, x)
            values = [x[i] for i in range(CHUNK)]
        else:
            values = [mul(value, scale.by) for value in values]
        if const_expr(f.is_integer):
            pairs = zip(values, noise, strict=True)
            made = codes.words_of(f, [codes.integer_with_noise(f, y, r, scale.zero) for y, r in pairs])
        else:
            made = codes.encode(f, values) if random is None else codes.with_noise(f, values, noise)
        for i in cutlass.range_constexpr(CHUNK // f.per_word):
            words[i] = made[i]
