"""Eight neighbouring elements of a thread: from memory to float32, and back. A dtype is one of floats, or Codes.

In memory they are words of 4 bytes, the first element in the lowest bits: eight, four, two or one.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cutlass_kernels import codes as numbers
from cutlass_kernels.codes import INFINITY, MAGNITUDE, Divisor, bits, is_nan, larger, magnitude
from cutlass_kernels.elements import E4M3
from cutlass_kernels.epilogue import div, mul, ptx, select
from cutlass_kernels.updates import LANE, WARP, Codes
from cutlass_kernels.variants import short

LEAST_E4M3 = 2.0**-9
_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def bits_of(t: Any) -> int:
    """The bits of an element in memory."""
    return t.bits if isinstance(t, Codes) else 8 * t.itemsize


def words_of(t: Any) -> int:
    return LANE * bits_of(t) // 32


def offset(t: Any, at: Any) -> Any:
    """The offset in bytes of an element at a multiple of 8."""
    return at >> 1 if bits_of(t) == 4 else at * (bits_of(t) // 8)


# ---- memory


def load(words: Any, t: Any, address: Any) -> None:
    """All elements, whose address is a multiple of their bytes, or of 16."""
    count = words_of(t)
    for i in range(0, count, 4):
        size = min(count - i, 4)
        names = ", ".join(f"{{$w{k}}}" for k in range(size))
        into, kind = (names, "b32") if size == 1 else (f"{{{names}}}", f"v{size}.b32")
        code = f"ld.global.L1::no_allocate.{kind} {into}, [{{$r0}}];"
        found = cute.arch.inline_ptx(code, write_only_types=[Uint32] * size, read_only_args=[address + 4 * i])
        for k, word in enumerate(found if size > 1 else (found,)):
            words[i + k] = word


def store(words: Any, t: Any, address: Any) -> None:
    count = words_of(t)
    for i in range(0, count, 4):
        size = min(count - i, 4)
        names = ", ".join(f"{{$r{k + 1}}}" for k in range(size))
        from_, kind = (names, "b32") if size == 1 else (f"{{{names}}}", f"v{size}.b32")
        code = f"st.global.{kind} [{{$r0}}], {from_};"
        cute.arch.inline_ptx(code, read_only_args=[address + 4 * i, *(words[i + k] for k in range(size))])


@cute.jit
def load_some(words: Any, t: cutlass.Constexpr, address: Int64, left: Int32):
    """The first elements, `left` of them, and zeros."""
    size = max(bits_of(t), 8)
    each = size // bits_of(t)  # elements that are read at once
    for i in range(words_of(t)):
        words[i] = Uint32(0)
    for i in range(LANE // each):
        if i * each < left:
            code = f"ld.global.{'b' if size > 8 else 'u'}{size} {{$w0}}, [{{$r0}}];"
            place = address + i * size // 8
            if const_expr(size == 16):
                code = "{.reg .b16 h; ld.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h;}"
            word = cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[place])
            words[i * size // 32] = words[i * size // 32] | (word << (i * size % 32))


@cute.jit
def store_some(words: Any, t: cutlass.Constexpr, address: Int64, left: Int32):
    size = max(bits_of(t), 8)
    each = size // bits_of(t)
    for i in range(LANE // each):
        if i * each < left:
            word = words[i * size // 32] >> (i * size % 32)
            code = f"st.global.{'b' if size > 8 else 'u'}{size} [{{$r0}}], {{$r1}};"
            if const_expr(size == 16):
                code = "{.reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.b16 [{$r0}], h;}"
            cute.arch.inline_ptx(code, read_only_args=[address + i * size // 8, word])


def load_float(address: Any) -> Any:
    return ptx("ld.global.f32 {$w0}, [{$r0}];", Float32, address)


def store_float(address: Any, x: Any) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def scale_address(address: Any, codes: Codes, piece: Any) -> Any:
    """The address of the scale of a thread's block, or of the last one."""
    return address + ((cutlass.min(piece.at, piece.count - 1) >> (codes.block.bit_length() - 1)) << 2)


# ---- to float32


def widen(x: Any, words: Any, dtype: torch.dtype) -> None:
    found = numbers.widened(short(dtype), [words[i] for i in range(words_of(dtype))])
    for i, value in enumerate(found):
        x[i] = value


def code_of(words: Any, i: int, size: int) -> Any:
    """The code of element i."""
    return (words[i * size // 32] >> (i * size % 32)) & Uint32((1 << size) - 1)


def decode(x: Any, words: Any, codes: Codes, scale: Any, books: Any) -> None:
    """Elements times the scale of their block."""
    if codes.format == torch.float8_e4m3fn:
        for i, value in enumerate(numbers.decode(E4M3, [words[0], words[1]])):
            x[i] = mul(value, scale)
        return
    book = books[codes.book]
    for i in range(LANE):
        code = code_of(words, i, codes.bits).to(Int32)
        x[i] = mul(book.numbers[code], scale)


# ---- the largest of a block


def largest(x: Any, lanes: int) -> Any:
    """The largest magnitude of the elements of `lanes` neighbouring threads; NaN counts for nothing."""
    most = Float32(0)
    for i in range(LANE):
        most = larger(most, magnitude(x[i]))
    if lanes == WARP:
        return Uint32(cute.arch.warp_redux_sync(bits(most), "max")).bitcast(Float32)
    step = 1
    while step < lanes:
        most = larger(most, cute.arch.shuffle_sync_bfly(most, offset=step))
        step *= 2
    return most


# ---- to codes


def look_up(y: Any, book: Any, bounded: bool) -> Any:
    """The code of y, which is not NaN; without `bounded` no further from 0 than the numbers of the codebook."""
    layout = book.layout
    size = larger(magnitude(y) if layout.signed else y, Uint32(layout.edge).bitcast(Float32))
    place = (bits(size) >> layout.shift).to(Int32) - (layout.edge >> layout.shift)
    if bounded:
        place = cutlass.min(place, layout.buckets - 1)
    if layout.signed:
        place = select(y < Float32(0), place + layout.buckets, place)
    code = book.index[place].to(Int32) & 255  # which is read as a signed one
    return select(y >= book.following[code], code + 1, code)


def encode(words: Any, x: Any, codes: Codes, scale: Any, books: Any) -> None:
    """Finite elements, in a block whose scale is from 2^-70 to 1: quotients by its reciprocal are rounded once where a
    code may change, and none of a number above 0 is 0."""
    by = Divisor(scale, numbers.reciprocal(scale), None)
    y = [numbers.quotient(x[i], by) for i in range(LANE)]
    if codes.format == torch.float8_e4m3fn:
        if codes.raised:
            y = [select(y[i] > Float32(0), at_least(y[i], Float32(LEAST_E4M3)), y[i]) for i in range(LANE)]
        words[0], words[1] = numbers.encode(E4M3, y)
        return
    found = [look_up(each, books[codes.book], False) for each in y]
    put_codes(words, found, codes.bits)


def encode_any(words: Any, x: Any, codes: Codes, known: Any, books: Any, piece: Any) -> None:
    """Any elements; known of their block are its scale, what numbers above 0 are raised to, and the code of NaN."""
    scale, lowest, zero = known
    own = [x[i] for i in range(LANE)]
    if codes.raised:
        own = [select(v > Float32(0), at_least(v, lowest), v) for v in own]
    y = [div(v, scale) for v in own]
    if codes.format == torch.float8_e4m3fn:
        words[0], words[1] = numbers.encode(E4M3, y)
        return
    found = [select(is_nan(v), zero, look_up(select(is_nan(v), Float32(0), v), books[codes.book], True)) for v in y]
    put_codes(words, [select(i < piece.left, code, Int32(0)) for i, code in enumerate(found)], codes.bits)


def at_least(x: Any, low: Any) -> Any:
    return select(x < low, low, x)


def put_codes(words: Any, codes: Any, size: int) -> None:
    per = 32 // size
    for i in range(0, LANE, per):
        word = codes[i].to(Uint32)
        for k in range(1, per):
            word = word | (codes[i + k].to(Uint32) << (size * k))
        words[i // per] = word


# ---- to floats


def narrow(words: Any, x: Any, dtype: torch.dtype, noise: Any, finite: bool) -> None:
    """Floats to the nearest, or by random words; `finite` says that all are."""
    values = [x[i] for i in range(LANE)]
    if noise is not None:
        up = [(word >> (16 * k)) & Uint32(0xFFFF) for word in noise for k in range(2)]
        whole = [_carried(v, u, finite) for v, u in zip(values, up, strict=True)]
        found = [(low >> 16) | (high & Uint32(0xFFFF0000)) for low, high in zip(whole[::2], whole[1::2], strict=True)]
    else:
        found = numbers.narrowed(short(dtype), values)
        if not finite and dtype != torch.float32:
            found = [_with_nan(w, a, b, dtype) for w, a, b in zip(found, values[::2], values[1::2], strict=True)]
    for i, word in enumerate(found):
        words[i] = word


def _with_nan(word: Any, low: Any, high: Any, dtype: torch.dtype) -> Any:
    """Two elements, whose NaN have the bits of PyTorch's."""
    nan = Uint32(_NAN[dtype])
    return select(is_nan(low), nan, word & Uint32(0xFFFF)) | (select(is_nan(high), nan, word >> 16) << 16)


def _carried(x: Any, noise: Any, finite: bool) -> Any:
    """Bits of x whose upper half is x rounded up with the probability of the lower half."""
    own = bits(x)
    if finite:
        return own + noise
    found = select((own & Uint32(MAGNITUDE)) < Uint32(INFINITY), own + noise, own)
    return select(is_nan(x), Uint32(0x7FC00000), found)


# ---- random numbers

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def random_words(key: Any, stream: Any, at: Any) -> Any:
    """Philox4x32-10 (Salmon et al. 2011) of the block of 16 bytes that the eight elements from `at` on take, 16 bits
    each; a block has the number at / 8."""
    block = at // LANE
    words = [(block & 0xFFFFFFFF).to(Uint32), (block >> 32).to(Uint32), stream, Uint32(0)]
    keys = list(key)
    for _ in range(10):
        highs = [
            ptx("mul.hi.u32 {$w0}, {$r0}, {$r1};", Uint32, w, Uint32(m))
            for w, m in zip(words[::2], _MULTIPLIERS, strict=True)
        ]
        lows = [w * Uint32(m) for w, m in zip(words[::2], _MULTIPLIERS, strict=True)]
        words = [highs[1] ^ words[1] ^ keys[0], lows[1], highs[0] ^ words[3] ^ keys[1], lows[0]]
        keys = [k + Uint32(w) for k, w in zip(keys, _WEYL, strict=True)]
    return words
