"""The epilogue of sums: zero points, scales, bias and requantization, in the order of hop's reference.

Each operation on float32 is an instruction that rounds by itself: none may be contracted to a fused one, so that
results equal those of other devices bit for bit.

A wgmma leaves the sums of 64 rows with the 128 threads of a warpgroup, in pairs of neighbouring columns:

    row = 16 · warp + lane / 4 + 8 · (pair % 2)         column = 8 · (pair / 2) + 2 · (lane % 4)
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, Uint64, const_expr

from cutlass_kernels.product import BLOCK
from cutlass_kernels.variants import WARPGROUP, Variant

BITS: dict[int, Any] = {1: Uint8, 2: Uint16, 4: Uint32}  # an element of the result, by its size in bytes
PAIRS: dict[int, Any] = {1: Uint16, 2: Uint32, 4: Uint64}  # two neighbours
PART = 3  # the first of the named barriers at which a consumer waits for itself; one for each


class Place(NamedTuple):
    """Where a consumer is: the first row, column and batch of its tile, the thread in its warpgroup, which consumer it
    is; the rows and columns of the result."""

    first: Any
    thread: Any
    consumer: Any
    shape: Any


class Fused(NamedTuple):
    """Operands of the epilogue: vectors in the order of Variant.vectors, bounds of a requantized result, and shared
    memory with the columns' vectors and the column scales of two steps."""

    vectors: Any
    bounds: Any
    sV: Any
    sS: Any = None


class Sums(NamedTuple):
    """The sums of a tile, where they are, and the values of the vectors of a thread's rows."""

    at: Place
    tCrC: Any
    ahead: Any
    fused: Fused


def place_of(thread: Any, pair: int) -> tuple[Any, Any]:
    """The row and the first column of a thread's pair of sums, of 64 rows."""
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4 + 8 * (pair % 2), 8 * (pair // 2) + 2 * (lane % 4)


def is_real(v: Variant, name: str) -> bool:
    return v.dtype_of(name).is_floating_point


# ---- vectors beside the sums


def fetch(v: Variant, at: Place, fused: Fused) -> Any:
    """A thread's part of each vector, asked for before the products, so that they hide the wait: the values of its
    rows; of the columns, every 128th value, for `share`.

    A vector of one value serves all, and rows and columns beyond the result read the last value."""
    named = dict(zip(v.vectors, fused.vectors or (), strict=True))
    ahead = {}
    for name in v.by_row:
        places = [at.first[0] + 64 * m + place_of(at.thread, h)[0] for m in range(v.tile.rows // 64) for h in range(2)]
        ahead[name] = [value(v, name, named[name], place, at.first[2]) for place in places]
    for name in v.by_column:
        places = [at.first[1] + cutlass.min(at.thread + first, v.tile.n - 1) for first in range(0, v.tile.n, WARPGROUP)]
        ahead[name] = [value(v, name, named[name], place, at.first[2]) for place in places]
    return ahead


def value(v: Variant, name: str, vector: Any, place: Any, batch: Any) -> Any:
    """An element of the one for all products, or of that of one of them, as Float32 or Int32."""
    if v.stacked:
        element = vector[(cutlass.min(batch, vector.shape[0] - 1), cutlass.min(place, vector.shape[1] - 1))]
    else:
        element = vector[cutlass.min(place, vector.shape[0] - 1)]
    return element.to(Float32) if is_real(v, name) else element.to(Int32)


@cute.jit
def share(v: cutlass.Constexpr, at: Any, ahead: Any, sV: Any):
    """Put the columns' values in shared memory, once all have read those of the tile before."""
    if const_expr(len(v.by_column) > 0):
        cute.arch.barrier(barrier_id=PART + at.consumer, number_of_threads=WARPGROUP)
        for j, name in enumerate(v.by_column):
            for i, element in enumerate(ahead[name]):
                column = at.thread + i * WARPGROUP
                if column < v.tile.n:
                    sV[(column, j, at.consumer)] = element.bitcast(Int32) if const_expr(is_real(v, name)) else element
        cute.arch.barrier(barrier_id=PART + at.consumer, number_of_threads=WARPGROUP)


def block_of(v: Variant, i: int) -> int:
    """The index of the block scale that applies to a thread's sum `i`."""
    within = i % (v.tile.n // 2)
    if v.tile.swap and v.scales == "block":  # one for each of its columns
        return 2 * (within // 4) + within % 2
    row = 2 * (i // (v.tile.n // 2)) + within // 2 % 2  # one for each of its rows
    if v.scales == "1x128":
        return row
    return row * (v.tile.n // v.piece) + 8 * (within // 4) // v.piece  # and each piece of the columns


def fetch_blocks(v: Variant, at: Place, fused: Fused, step: Int32) -> Any:
    """The products of the scales of the blocks of both factors, for the rows or columns of a thread; of blocks of
    1 x 128 on both sides those of its rows, and then of some columns, for `share_blocks`. None without."""
    if not v.in_blocks("lhs_scale"):
        return None
    lhs, rhs = (
        x[(cutlass.min(at.first[2], x.shape[0] - 1), None, None)] if v.stacked else x for x in fused.vectors[:2]
    )
    row, column, _ = at.first
    rows = [row + 64 * m + place_of(at.thread, h)[0] for m in range(v.tile.rows // 64) for h in range(2)]
    if const_expr(v.scales == "1x128"):
        columns = [column + cutlass.min(at.thread + first, v.tile.n - 1) for first in range(0, v.tile.n, WARPGROUP)]
        of_rows, of_columns = (
            (lambda place: lhs[(cutlass.min(place, lhs.shape[0] - 1), step)]),
            (lambda place: rhs[(step, cutlass.min(place, rhs.shape[1] - 1))]),
        )
        if v.tile.swap:
            of_rows, of_columns = of_columns, of_rows
        return filled([*map(of_rows, rows), *map(of_columns, columns)])

    def of_rhs(place: Any) -> Any:
        return rhs[(step, cutlass.min(place // BLOCK, rhs.shape[1] - 1))]

    if const_expr(v.tile.swap):
        of_columns = [of_rhs(row)]
        places = [column + 8 * (i // 2) + 2 * (at.thread % 4) + i % 2 for i in range(v.tile.n // 4)]
    else:
        of_columns = [of_rhs(column + first) for first in range(0, v.tile.n, v.piece)]
        places = rows
    of_rows = [lhs[(cutlass.min(place, lhs.shape[0] - 1), step)] for place in places]
    return filled([mul(a, b) for a, b in itertools.product(of_rows, of_columns)])


def filled(values: list[Any]) -> cute.Tensor:
    """Numbers in registers."""
    found = cute.make_rmem_tensor(len(values), Float32)
    for i, x in enumerate(values):
        found[i] = x
    return found


def begin_blocks(v: Variant, at: Place) -> None:
    """Wait until all have read the scales of the columns of the tile before."""
    if v.scales == "1x128":
        cute.arch.barrier(barrier_id=PART + at.consumer, number_of_threads=WARPGROUP)


def share_blocks(v: Variant, at: Place, fused: Fused, step: Any, scales: Any) -> None:
    """Put the scales of a step's columns in shared memory, in turns in two places, so that one barrier suffices: who
    writes to a place has passed the barrier of the step between, before which all have read it."""
    if v.scales == "1x128":
        count = 2 * (v.tile.rows // 64)
        for i, first in enumerate(range(0, v.tile.n, WARPGROUP)):
            column = at.thread + first
            if const_expr(first + WARPGROUP <= v.tile.n):
                fused.sS[(column, step % 2, at.consumer)] = scales[count + i]
            else:
                put_below(v, fused.sS, column, (step % 2, at.consumer), scales[count + i])
        cute.arch.barrier(barrier_id=PART + at.consumer, number_of_threads=WARPGROUP)


@cute.jit
def put_below(v: cutlass.Constexpr, sS: cute.Tensor, column: Any, where: Any, scale: Any):
    if column < v.tile.n:
        sS[(column, *where)] = scale


def promote(v: Variant, sums: Any, scales: Any, step: Any, m: int) -> None:
    """Add the products of a step to the sums of the m-th 64 rows in float32, times the scales of its blocks, if any.
    `sums` are the sums, the products, the place, and what is fused."""
    tCrC, tCrP, at, fused = sums
    first = m * cute.size(tCrP)
    shared: dict[int, Any] = {}  # the scales of a thread's columns
    for i in range(first, first + cute.size(tCrP)):
        if v.scales == "1x128":
            column = 8 * ((i - first) // 4) + i % 2  # beside the first of the thread's
            if column not in shared:
                shared[column] = fused.sS[(column + place_of(at.thread, 0)[1], step % 2, at.consumer)]
            tCrC[i] = fma(tCrP[i - first], mul(scales[block_of(v, i)], shared[column]), tCrC[i])
        elif v.scales == "block":
            tCrC[i] = fma(tCrP[i - first], scales[block_of(v, i)], tCrC[i])
        else:
            tCrC[i] = add(tCrC[i], tCrP[i - first])


def replace(scales: Any, ahead: Any) -> None:
    """Replace the block scales by those of the next step."""
    if scales is not None:
        for i in range(cute.size(scales)):
            scales[i] = ahead[i]


# ---- from sums to results


def finisher(v: Variant, sums: Sums, m: int, n: int) -> Callable[[int], tuple[Any, Any]]:
    """A function that returns the bits of two neighbouring elements of the result, for a thread's pair of sums in row
    `m` and column `n` of a part. It loads the values of a column once for both of the thread's rows."""
    at, first = sums.at, m * v.tile.n // 2 + n * v.part[1] // 2
    seen: dict[Any, Any] = {}

    def once(key: Any, find: Callable[[], Any]) -> Any:
        if key not in seen:
            seen[key] = find()
        return seen[key]

    def shared(name: str, pair: int, j: int) -> Any:
        column = n * v.part[1] + place_of(at.thread, pair)[1] + j
        found = sums.fused.sV[(column, v.by_column.index(name), at.consumer)]
        return found.bitcast(Float32) if is_real(v, name) else found

    def element(pair: int, j: int) -> Any:
        def of(name: str) -> Any:
            if name in v.by_row:
                return sums.ahead[name][2 * m + pair % 2]
            return once((name, pair // 2, j), lambda: shared(name, pair, j))

        def ends() -> Any:
            alone = "out_scale" in v.by_row
            key = ("ends", pair % 2) if alone else ("ends", pair // 2, j)
            return once(key, lambda: [stepped(v, b, of) for b in sums.fused.bounds])

        return result(v, sums.tCrC[first + 2 * pair + j], of, ends, sums.fused.bounds)

    return lambda pair: bits(v, element(pair, 0), element(pair, 1))


def result(v: Variant, total: Any, of: Any, ends: Any, bounds: Any) -> Any:
    """An element of the result from its sum, as Int32 or Float32; `of` gives the values of the vectors, and `ends` the
    codes of the bounds."""
    if v.lhs_zero is not None and not v.group:
        total = total - of("lhs_zero") * of("rhs_sum")
    if v.rhs_zero is not None:
        total = total - of("lhs_rest") * of("rhs_zero")
    if v.bias == torch.int32:
        total = total + of("bias")
    if v.requantize == "multiplier":
        found = code(v, mul(total.to(Float32), div(mul(of("lhs_scale"), of("rhs_scale")), of("out_scale"))), of)
        return clamped(found, *ends()) if v.bounded else found
    if v.scales == "vector":
        total = mul(mul(total.to(Float32), of("lhs_scale")), of("rhs_scale"))
    if v.bias is not None and v.bias != torch.int32:
        total = add(total, of("bias"))
    if v.requantize == "division":
        return code(v, div(clamped(total, *bounds) if v.bounded else total, of("out_scale")), of)
    return total


def stepped(v: Variant, bound: Any, of: Any) -> Any:
    """The code of a real number."""
    return code(v, div(bound, of("out_scale")), of)


def code(v: Variant, steps: Any, of: Any) -> Any:
    """round(steps) + zero point, in the range of the result; NaN is the zero point."""
    zero = Int32(0) if v.out_zero is None else of("out_zero")
    return clamped(whole(steps) + zero, Int32(torch.iinfo(v.out).min), Int32(torch.iinfo(v.out).max))


def whole(x: Any) -> Any:
    """The nearest integer, ties to even, within 2^30 of zero; 0 for NaN."""
    near = ptx("cvt.rni.f32.f32 {$w0}, {$r0};", Float32, x)
    return ptx("cvt.rzi.s32.f32 {$w0}, {$r0};", Int32, clamped(near, Float32(-(2.0**30)), Float32(2.0**30)))


def clamped(x: Any, low: Any, high: Any) -> Any:
    """x between low and high; NaN stays."""
    x = select(x < low, low, x)
    return select(x > high, high, x)


def select(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; both of one type."""
    return type(b)(cutlass.select_(condition, a, b))


def bits(v: Variant, a: Any, b: Any) -> tuple[Any, Any]:
    """Two results as the bits of their elements, those of PyTorch's casts, beyond a format's range too."""
    if v.out.itemsize == 4:
        return tuple(x.bitcast(Uint32) for x in (a, b))  # type: ignore[return-value]
    if v.requantize:
        return tuple(x.to(Uint8) for x in (a, b))  # type: ignore[return-value]
    pair = ptx(_CONVERT[v.out], Uint16 if v.out.itemsize == 1 else Uint32, b, a)
    size = 8 * v.out.itemsize
    low, high = (x.to(BITS[v.out.itemsize]) for x in (pair, pair >> size))
    if v.out == torch.float8_e5m2:
        low, high = overflowing(low, a), overflowing(high, b)
    return low, high


_CONVERT = {
    torch.bfloat16: "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
    torch.float16: "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};",
    torch.float8_e4m3fn: "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
    torch.float8_e5m2: "cvt.rn.satfinite.e5m2x2.f32 {$w0}, {$r0}, {$r1};",
}


def overflowing(code: Any, x: Any) -> Any:
    """The e5m2 code of x, of which `code` is the saturated one: a cast gives infinity from half a step beyond the
    largest number on."""
    sign = (x.bitcast(Uint32) >> 24).to(Uint8) & Uint8(0x80)
    magnitude = (x.bitcast(Uint32) & Uint32(0x7FFFFFFF)).bitcast(Float32)
    return select(magnitude >= Float32(61440.0), Uint8(0x7C) | sign, code)


def joined(v: Variant, values: tuple[Any, Any]) -> Any:
    """Two neighbours as one element of twice the size."""
    wide = PAIRS[v.out.itemsize]
    return wide(wide(values[0]) | (wide(values[1]) << (8 * v.out.itemsize)))


# ---- operations that round by themselves


def ptx(code: str, gives: Any, *args: Any) -> Any:
    return cute.arch.inline_ptx(code, write_only_types=[gives], read_only_args=list(args))


def mul(a: Any, b: Any) -> Any:
    return ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def add(a: Any, b: Any) -> Any:
    return ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def div(a: Any, b: Any) -> Any:
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def fma(a: Any, b: Any, c: Any) -> Any:
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)
