"""Chunks of 16 neighbouring elements of a row, which are a thread's share: loads, stores, and what is known of them.

In the vector form rows begin and end at whole chunks, and memory is read and written 16 bytes at a time; else each
element by itself. Addresses are integers.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from cutlass_kernels.codes import (
    bits,
    larger,
    larger_or_nan,
    magnitude,
    number,
    prmt,
    smaller,
    widened,
)
from cutlass_kernels.epilogue import ptx, select
from cutlass_kernels.quantizing import CHUNK

ITEM = {"f32": 4, "bf16": 2, "f16": 2}  # bytes


def words_in(memory: str) -> int:
    """The number of words in a chunk."""
    return CHUNK * ITEM[memory] // 4


# ---- global memory


def load16(address: Any, offset: int = 0) -> Any:
    """Four words at an address that is a multiple of 16; not by the way for memory that nobody writes while a kernel is
    there, as a launch is programmatic."""
    text = f"ld.global.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address])


def load(address: Any, size: int) -> Any:
    """One number of 1, 2, 4 or 8 bytes, as an unsigned integer."""
    kind = {1: Uint8, 2: Uint16, 4: Uint32, 8: cutlass.Uint64}[size]
    if size == 1:  # no register has 8 bits
        return ptx("ld.global.u8 {$w0}, [{$r0}];", Uint16, address)
    return ptx(f"ld.global.b{8 * size} {{$w0}}, [{{$r0}}];", kind, address)


def store(address: Any, words: Sequence[Any]) -> None:
    """One, two or four words."""
    named = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    shape = f".v{len(words)}" if len(words) > 1 else ""
    listed = f"{{{named}}}" if len(words) > 1 else named
    cute.arch.inline_ptx(f"st.global{shape}.b32 [{{$r0}}], {listed};", read_only_args=[address, *words])


def share(memory: Any, index: Any, words: Any) -> None:
    """Words of a fragment into shared memory, from a multiple of their count on, four or two at a time."""
    count = cute.size(words)
    width = min(count, 4)
    for i in range(0, count, width):
        named = ", ".join(f"{{$r{j + 1}}}" for j in range(width))
        own = [words[i + j] for j in range(width)]
        address = (memory + index + i).toint()
        cute.arch.inline_ptx(f"st.shared.v{width}.b32 [{{$r0}}], {{{named}}};", read_only_args=[address, *own])


def store1(address: Any, value: Any) -> None:
    """A byte: the low one of a Uint32."""
    cute.arch.inline_ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[address, value.to(Uint16)])


@cute.jit
def load_chunk(v: cutlass.Constexpr, address: Any, left: Any, raw: Any) -> None:
    """A chunk's words into a fragment; of `left` elements that are left of the row those after are zeros."""
    for i in cutlass.range_constexpr(words_in(v.memory)):
        raw[i] = Uint32(0)
    if const_expr(v.vector):
        if left > 0:
            for i in cutlass.range_constexpr(words_in(v.memory) // 4):
                found = load16(address, 16 * i)
                for j in cutlass.range_constexpr(4):
                    raw[4 * i + j] = found[j]
    else:
        size = ITEM[v.memory]
        for i in cutlass.range_constexpr(CHUNK):
            if left > i:
                own = load(address + size * i, size).to(Uint32)
                raw[i * size // 4] = raw[i * size // 4] | (own << (8 * (i * size % 4)))


@cute.jit
def load_bytes(address: Any, left: Any, vector: cutlass.Constexpr) -> Any:
    """16 bytes in four words, of `left` that are there."""
    words = cute.make_rmem_tensor(4, Uint32)
    if const_expr(vector):
        found = load16(address)
        for i in cutlass.range_constexpr(4):
            words[i] = found[i]
    else:
        for i in cutlass.range_constexpr(4):
            words[i] = Uint32(0)
        for i in cutlass.range_constexpr(CHUNK):
            if left > i:
                words[i // 4] = words[i // 4] | (load(address + i, 1).to(Uint32) << (8 * (i % 4)))
    return [words[i] for i in range(4)]


def raise_to(address: Any, value: Any) -> None:
    """Memory becomes the larger of itself and an unsigned integer."""
    cute.arch.inline_ptx("red.global.max.u32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_chunk(v: cutlass.Constexpr, address: Any, left: Any, words: Any) -> None:
    """A chunk's codes."""
    f = v.format
    if const_expr(v.vector):
        if left > 0:
            store(address, [words[i] for i in range(CHUNK // f.per_word)])
    else:
        for i in cutlass.range_constexpr(CHUNK // f.per_byte):
            byte = words[i // 4] >> (8 * (i % 4))
            if const_expr(f.bits == 4):
                byte = select(left == 2 * i + 1, byte & Uint32(15), byte)
            if left > i * f.per_byte:
                store1(address + i, byte)


@cute.jit
def load_codes(v: cutlass.Constexpr, address: Any, left: Any, words: Any) -> None:
    """A chunk's codes into a fragment; what is not there is 0."""
    count = CHUNK // v.format.per_word
    for i in cutlass.range_constexpr(count):
        words[i] = Uint32(0)
    if const_expr(v.vector):
        if left > 0:
            found = load16(address) if const_expr(count == 4) else load8(address)
            for i in cutlass.range_constexpr(count):
                words[i] = found[i]
    else:
        for i in cutlass.range_constexpr(CHUNK // v.format.per_byte):
            if left > i * v.format.per_byte:
                words[i // 4] = words[i // 4] | (load(address + i, 1).to(Uint32) << (8 * (i % 4)))


def load8(address: Any) -> Any:
    text = "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[address])


def load_zero(f: Any, address: Any) -> Any:
    """The code of zero that is there, as a number."""
    code = load(address, 1).to(Int32)
    if f.low < 0:
        sign = Int32(1 << 7)
        code = (code ^ sign) - sign
    return code.to(Float32)


@cute.jit
def store_numbers(v: cutlass.Constexpr, address: Any, left: Any, words: Any) -> None:
    """A chunk's numbers."""
    if const_expr(v.vector):
        for i in cutlass.range_constexpr(len(words) // 4):
            store(address + 16 * i, words[4 * i : 4 * i + 4])
    else:
        size = ITEM[v.memory]
        for i in cutlass.range_constexpr(CHUNK):
            if left > i:
                if const_expr(size == 4):
                    store(address + 4 * i, [words[i]])
                else:
                    store2(address + 2 * i, words[i // 2] >> (16 * (i % 2)))


def store2(address: Any, value: Any) -> None:
    """Two bytes: the low ones of a Uint32."""
    cute.arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[address, value.to(Uint16)])


# ---- what is known of a chunk


def _each(text: str, words: Sequence[Any]) -> Any:
    found = words[0]
    for w in words[1:]:
        found = ptx(text, Uint32, found, w)
    return found


def _halves(memory: str, word: Any) -> tuple[Any, Any]:
    low, high = widened(memory, [word])
    return low, high


def largest(memory: str, words: Sequence[Any], nan: bool) -> Any:
    """The largest magnitude; NaN counts for nothing, or, with `nan`, is what is found if it is there."""
    combine = larger_or_nan if nan else larger
    if memory == "f32":
        found = magnitude(number(words[0]))
        for w in words[1:]:
            found = combine(found, magnitude(number(w)))
        return found if nan else larger(found, number(Uint32(0)))
    sizes = [w & Uint32(0x7FFF7FFF) for w in words]
    found = _each(f"max{'.NaN' * nan}.{memory}x2 {{$w0}}, {{$r0}}, {{$r1}};", sizes)
    low, high = _halves(memory, found)
    return combine(low, high) if nan else larger(larger(low, high), number(Uint32(0)))


def ends(memory: str, words: Sequence[Any]) -> tuple[Any, Any]:
    """The largest number above 0, and the magnitude of the least below 0; NaN counts for nothing. Neither is -0, whose
    bits are above all others, though of 0 and -0 either may be the larger one."""
    zero = number(Uint32(0))
    if memory == "f32":
        high, low = zero, zero
        for w in words:
            high, low = larger(high, number(w)), smaller(low, number(w))
        return magnitude(high), magnitude(low)
    high, low = (_each(f"{which}.{memory}x2 {{$w0}}, {{$r0}}, {{$r1}};", words) for which in ("max", "min"))
    tops, bottoms = _halves(memory, high), _halves(memory, low)
    return magnitude(larger(larger(*tops), zero)), magnitude(smaller(smaller(*bottoms), zero))


# ---- over threads


def over_lanes(x: Any, count: int) -> Any:
    """The largest of numbers that are not negative, of `count` neighbouring lanes; NaN counts most."""
    own = bits(x)
    step = 1
    while step < count:
        own = cutlass.max(own, cute.arch.shuffle_sync_bfly(own, step))
        step *= 2
    return number(own)


def over_warp(x: Any) -> Any:
    return number(ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", Uint32, bits(x)))


@cute.jit
def over_row(x: Any, warps: Any, shared: Any) -> Any:
    """Reduce a row that `warps` neighbouring warps share, a power of two; every thread of the block must call this."""
    found = over_warp(x)
    if warps > 1:
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if lane == 0:
            shared[warp] = bits(found)
        cute.arch.sync_threads()
        found = over_warp(number(shared[(warp & ~(warps - 1)) + (lane & (warps - 1))]))
    return found


# ---- random bits


def philox(seed: Any, stream: Any, block: Any) -> list[Any]:
    """The 16 bytes number `block` of a seed, as four words (hop.noise): Philox4x32-10, by Salmon et al. 2011."""
    words = [block.to(Uint32), (block >> 32).to(Uint32), stream, Uint32(0)]
    key = [seed.to(Uint32), (seed >> 32).to(Uint32)]
    for _ in range(10):
        products = [_wide(words[0], 0xD2511F53), _wide(words[2], 0xCD9E8D57)]
        (low0, high0), (low1, high1) = products
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [key[0] + Uint32(0x9E3779B9), key[1] + Uint32(0xBB67AE85)]
    return words


def _wide(x: Any, by: int) -> tuple[Any, Any]:
    product = x.to(cutlass.Uint64) * cutlass.Uint64(by)
    return product.to(Uint32), (product >> 32).to(Uint32)


def noise_at(seed: Any, stream: Any, place: Any, vector: bool) -> list[Any]:
    """The integers of 24 bits of 16 elements from number `place` on."""
    numbers = _wide_noise(philox(seed, stream, place >> 4))
    if vector:
        return numbers
    numbers = numbers + _wide_noise(philox(seed, stream, (place >> 4) + Int64(1)))
    offset = place.to(Uint32) & Uint32(15)
    for step in (8, 4, 2, 1):
        far = (offset & Uint32(step)) != Uint32(0)
        numbers = [select(far, numbers[i + step], numbers[i]) for i in range(15 + step)]
    return numbers


def _wide_noise(words: Sequence[Any]) -> list[Any]:
    """Combine each of 16 bytes with the bytes 4 and 9 places later, the first one highest (hop.noise)."""
    found = []
    for k in range(16):
        second, third = (k + 4) % 16, (k + 9) % 16
        low = prmt(words[third // 4], words[second // 4], (third % 4) << 4 | (4 + second % 4) << 8)
        found.append(prmt(low, words[k // 4], 0x0210 | (4 + k % 4) << 12) >> 8)
    return found


@cute.jit
def load_noise(address: Any, left: Any, wide: cutlass.Constexpr, vector: cutlass.Constexpr) -> Any:
    """The noise of a chunk as integers of 24 bits: words with `wide`, else the upper bytes."""
    if const_expr(wide):
        found = [load_bytes(address + 16 * i, 4 * left - 16 * i, vector) for i in range(4)]
        return [word for four in found for word in four]
    return [prmt(word, Uint32(0), 0x4044 | i << 8) for word in load_bytes(address, left, vector) for i in range(4)]
