"""RMS norm and layer norm of rows before they are quantized: the kernel of quantize_rows.py, one read of memory.

A row lies in the registers of its threads. Its sums are of integers, so that no order of threads shows in them: with
2^E the power of two below the largest magnitude, each number is rounded to a multiple of 2^(E - 40), and each square
to one of 2^(2E - 40) after its own rounding to float32 (hop.numerics.row_sums). An integer of more digits than a float
has is found in two parts, each by adding a number that leaves it in the low bits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import chunks
from cutlass_kernels import doubles as d
from cutlass_kernels.codes import (
    INFINITY,
    WHOLE,
    WHOLE_BITS,
    bits,
    larger_bits,
    larger_or_nan,
    magnitude,
    number,
    widened,
)
from cutlass_kernels.epilogue import add, fma, mul, ptx, select
from cutlass_kernels.quantize_rows import Memory, Quantize
from cutlass_kernels.quantizing import CHUNK

BITS = 40  # below the largest magnitude of a row
LOW = 21  # of an integer, in its lower part


class Norm(Quantize):
    """The kernel of a variant with a norm."""

    shared_words = 256

    def computed(
        self, at: Any, shape: Any, numbers: Any, row: Any, places: Any, columns: Any, raws: Any, shared: Any
    ) -> Any:
        """The results of the norm as words of float32."""
        rows = [cute.make_rmem_tensor(CHUNK, Float32) for _ in raws]
        self.norm(at, shape, numbers, places, columns, raws, rows, shared)
        found = [cute.make_rmem_tensor(CHUNK, Uint32) for _ in raws]
        for row, words in zip(rows, found, strict=True):
            for i in range(CHUNK):
                words[i] = bits(row[i])
        return found

    @cute.jit
    def norm(
        self, at: Any, shape: Any, numbers: Any, places: Any, columns: Any, raws: Any, rows: Any, shared: Any
    ) -> None:
        v = self.variant
        warps = cutlass.max(Int32(1) << shape.shift, 32) >> 5
        count = shape.columns
        most = Float32(0.0)
        for j in cutlass.range_constexpr(len(raws)):
            words = [raws[j][i] for i in range(cute.size(raws[j]))]
            most = larger_bits(most, chunks.largest(v.memory, words, True))
            for i, x in enumerate(widened(v.memory, words)):
                rows[j][i] = x
        amax = chunks.over_row(most, warps, shared + 64)
        if const_expr(v.operation == "layer_norm"):
            total = row_total(rows, power(Int32(BITS) - exponent_below(amax)), False, warps, shared + 96)
            mean = over(total, exponent_below(amax) - BITS, count)
            mean = select(bits(amax) < Uint32(INFINITY), d.narrow(mean), number(Uint32(0x7FC00000)))
            most = Float32(0.0)
            for j in cutlass.range_constexpr(len(rows)):
                left = columns - places[j] * CHUNK
                for i in cutlass.range_constexpr(CHUNK):
                    rows[j][i] = select(left > i, add(rows[j][i], -mean), Float32(0.0))
                    most = larger_or_nan(most, magnitude(rows[j][i]))
            amax = chunks.over_row(most, warps, shared + 160)
        total = row_total(rows, power(Int32(BITS // 2) - exponent_below(amax)), True, warps, shared + 192)
        factor = reciprocal_root(over(total, exponent_below(amax) * 2 - BITS, count), numbers[2])
        factor = select(bits(amax) < Uint32(INFINITY), factor, number(Uint32(0x7FC00000)))
        for j in cutlass.range_constexpr(len(rows)):
            self.scale(at, places[j], columns, factor, rows[j])

    @cute.jit
    def scale(self, at: Any, place: Any, columns: Any, factor: Any, row: Any) -> None:
        """A chunk times the factor of its row and the weight, plus the bias."""
        v = self.variant
        for i in cutlass.range_constexpr(CHUNK):
            row[i] = mul(row[i], factor)
        if const_expr(v.weight != ""):
            weight = vector_chunk(Memory(v.weight, v.vector), at.weight, place, columns)
            for i in cutlass.range_constexpr(CHUNK):
                row[i] = mul(row[i], weight[i])
        if const_expr(v.bias != ""):
            bias = vector_chunk(Memory(v.bias, v.vector), at.bias, place, columns)
            for i in cutlass.range_constexpr(CHUNK):
                row[i] = add(row[i], bias[i])


def vector_chunk(v: Memory, address: Any, place: Any, columns: Any) -> list[Any]:
    """The numbers of a chunk of a vector, zeros behind its end."""
    words = cute.make_rmem_tensor(chunks.words_in(v.memory), Uint32)
    chunks.load_chunk(v, address + Int64(place) * (CHUNK * chunks.ITEM[v.memory]), columns - place * CHUNK, words)
    return widened(v.memory, [words[i] for i in range(cute.size(words))])


# ---- powers of two


class Power(NamedTuple):
    """2^exponent as two factors, of which the first is 1 where float32 holds the product."""

    first: Any
    second: Any


def exponent_below(amax: Any) -> Any:
    """The exponent of the power of two below a magnitude, at least -126."""
    return cutlass.max((bits(amax) >> 23).to(Int32), Int32(1)) - 127


def power(exponent: Any) -> Power:
    """From -126 on."""
    beyond = exponent > 127
    own = select(beyond, exponent - 64, exponent)
    return Power(select(beyond, Float32(2.0**64), Float32(1.0)), number((own + 127).to(Uint32) << 23))


# ---- sums of a row


@cute.jit
def row_total(rows: Any, by: Any, squares: cutlass.Constexpr, warps: Any, shared: Any) -> Any:
    """Int64: Σ rint(x · by), of the numbers of a row or their squares, over its threads. No term is above 2^42, and no
    number that is not squared above 2^41."""
    high, low = Uint32(0), Uint32(0)
    scaled = cute.make_rmem_tensor(CHUNK, Float32)
    for row in rows:
        times(row, by, scaled)
        for i in cutlass.range_constexpr(CHUNK):
            x = mul(scaled[i], scaled[i]) if const_expr(squares) else scaled[i]
            whole = fma(x, Float32(2.0**-LOW), Float32(WHOLE))
            rest = fma(add(whole, Float32(-WHOLE)), Float32(-(2.0**LOW)), x)
            high = high + bits(whole)
            low = low + bits(add(rest, Float32(WHOLE)))
    count = Uint32(len(rows) * CHUNK * WHOLE_BITS % 2**32)
    return over_threads(high - count, low - count, squares, warps, shared)


@cute.jit
def times(row: Any, by: Any, scaled: Any) -> None:
    if by.first == Float32(1.0):
        for i in cutlass.range_constexpr(CHUNK):
            scaled[i] = mul(row[i], by.second)
    else:
        for i in cutlass.range_constexpr(CHUNK):
            scaled[i] = mul(mul(row[i], by.first), by.second)


@cute.jit
def over_threads(high: Any, low: Any, positive: cutlass.Constexpr, warps: Any, shared: Any) -> Any:
    """high · 2^21 + low, of the row that `warps` neighbouring warps have, a power of two; all threads of the block are
    here. A warp's sum is below 2^52: it goes through shared memory in two parts, whose sums fit into 32 bits."""
    kind = Uint32 if const_expr(positive) else Int32
    total = (added(high).to(kind).to(Int64) << LOW) + added(low).to(Int32).to(Int64)
    if warps > 1:
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if lane == 0:
            shared[2 * warp] = total.to(Uint32) & Uint32((1 << 26) - 1)
            shared[2 * warp + 1] = (total >> 26).to(Uint32)
        cute.arch.sync_threads()
        index = 2 * ((warp & ~(warps - 1)) + (lane & (warps - 1)))
        parts = [select(lane < warps, shared[index + k], Uint32(0)) for k in range(2)]
        total = added(parts[0]).to(Int64) + (added(parts[1]).to(kind).to(Int64) << 26)
    return total


def added(x: Any) -> Any:
    """The sum over a warp, modulo 2^32."""
    return ptx("redux.sync.add.u32 {$w0}, {$r0}, 0xffffffff;", Uint32, x)


# ---- in float64


def over(total: Any, exponent: Any, count: Any) -> Any:
    """total · 2^exponent / count, of which both steps are rounded, as float64."""
    return d.div(d.mul(d.of_integer(total), d.power_of_two(exponent)), d.of_integer(count))


def reciprocal_root(x: Any, eps: Any) -> Any:
    """float32(1 / sqrt(x + eps)), each step rounded in float64."""
    return d.narrow(d.reciprocal(d.root(d.add(x, eps))))
