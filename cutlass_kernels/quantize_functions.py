"""Functions of each element, and gated products, before they are quantized: the kernel of quantize_rows.py.

A function is found in float64 and rounded to float32 once, to the nearest (hop.numerics.functions). Where the float64
value lies near the middle of two float32s, one number in 2^18, or is subnormal in float32, it is found again, to
within 2^-50 of itself, and a hash of one bit moves it to the side of the middle on which the exact value lies.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float64, Uint32, const_expr

from cutlass_kernels import chunks
from cutlass_kernels import doubles as d
from cutlass_kernels.codes import bits, widened
from cutlass_kernels.epilogue import mul, select
from cutlass_kernels.function_tables import ERFC, MILLS, POWERS, SIDES
from cutlass_kernels.quantize_rows import Memory, Quantize
from cutlass_kernels.quantizing import CHUNK

TABLE = 64  # the first word of the powers in shared memory
ALLOWED, HALF = 1024, 1 << 28  # units in the last place of float64; half of one of float32


class Function(Quantize):
    """The kernel of a variant with a function."""

    shared_words = TABLE + 2 * len(POWERS)

    @cute.jit
    def begin(self, thread: Any, shared: Any) -> None:
        """The powers, into shared memory."""
        if thread == 0:
            for i, value in enumerate(POWERS):
                for k, half in enumerate(struct.unpack("<II", struct.pack("<d", value))):
                    shared[TABLE + 2 * i + k] = Uint32(half)
        cute.arch.sync_threads()

    def computed(
        self, at: Any, shape: Any, numbers: Any, row: Any, places: Any, columns: Any, raws: Any, shared: Any
    ) -> Any:
        found = [cute.make_rmem_tensor(CHUNK, Uint32) for _ in raws]
        for place, raw, words in zip(places, raws, found, strict=True):
            self.compute(at, shape, row, place, columns, raw, words, shared + TABLE)
        return found

    @cute.jit
    def compute(self, at: Any, shape: Any, row: Any, place: Any, columns: Any, raw: Any, words: Any, table: Any):
        """A chunk; zeros behind the row's end."""
        v = self.variant
        left = columns - place * CHUNK
        factors = self.factors(at, shape, row, place, left)
        for i in cutlass.range_constexpr(CHUNK):
            words[i] = Uint32(0)
        if left > 0:
            for i, x in enumerate(widened(v.memory, [raw[i] for i in range(cute.size(raw))])):
                y = rounded(v.operation, x, table)
                if const_expr(factors is not None):
                    y = mul(y, factors[i])
                words[i] = bits(y)

    def factors(self, at: Any, shape: Any, row: Any, place: Any, left: Any) -> Any:
        """The numbers of the other factor; None without one."""
        memory = self.variant.other
        if not memory:
            return None
        words = cute.make_rmem_tensor(chunks.words_in(memory), Uint32)
        address = at.other + (row * shape.other + place * CHUNK) * chunks.ITEM[memory]
        chunks.load_chunk(Memory(memory, self.variant.vector), address, left, words)
        return widened(memory, [words[i] for i in range(cute.size(words))])


@cute.jit
def rounded(name: cutlass.Constexpr, x: Any, table: Any) -> Any:
    """The function `name` of x, correctly rounded."""
    z = d.wide(x)
    y = FORMS[name](z, table)
    found = d.narrow(y)
    low, high = d.halves(y)
    near = ((low + Uint32((ALLOWED - HALF) % 2**32)) & Uint32(2 * HALF - 1)) <= Uint32(2 * ALLOWED)
    small = (high & Uint32(0x7FFFFFFF)) - Uint32((1023 - 151) << 20) < Uint32((151 - 126) << 20)
    if near | small:
        exact = EXACT[name](z, y, table)
        found = d.narrow(d.mul(exact[0], toward(name, z, exact[1])))
    return found


def toward(name: str, x: Any, off: Any) -> Any:
    """What moves a value of the function of x, which is off by that part of itself at most, to the right side of a
    middle (hop.numerics.hard_cases)."""
    split, factors = SIDES[name]
    part = d.mul(d.fraction(d.mul(x, split)), float(len(factors)))
    factor = Float64(factors[-1])
    for i in range(len(factors) - 2, -1, -1):
        factor = select(part < Float64(float(i + 1)), Float64(factors[i]), factor)
    above = d.fraction(d.mul(x, factor)) < Float64(0.5)
    return d.add(select(above, off, -off), 1.0)


def at_least(x: Any, low: float) -> Any:
    """NaN stays."""
    return select(x < Float64(low), Float64(low), x)


def at_most(x: Any, high: float) -> Any:
    return select(x > Float64(high), Float64(high), x)


# ---- forms: where a function ends in a zero, its argument does


def _silu(x: Any, table: Any) -> Any:
    x = at_least(x, -110.0)
    return d.div(x, d.add(d.exp(-at_most(x, 110.0), table), 1.0))


def _slope(x: Any) -> Any:
    """-2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    cube = d.mul(d.mul(x, x), x)
    return d.mul(d.fma(cube, 0.044715, x), float.fromhex("-0x1.9884533d43651p+0"))


def _gelu_tanh(x: Any, table: Any) -> Any:
    x = at_least(x, -14.0)
    return d.div(x, d.add(d.exp(at_least(_slope(x), -110.0), table), 1.0))


def _gelu(x: Any, table: Any) -> Any:
    """By Mills' ratio of t = |x|: the tail of the normal distribution is e^(-t²/2) p((t - 3) / (t + 3)) / (t + 3)."""
    negative = x < Float64(0.0)
    t = at_most(select(negative, -x, x), 14.5)
    inverse = d.reciprocal(d.add(t, 3.0))
    ratio = d.horner(MILLS, d.mul(d.add(t, -3.0), inverse))
    tail = d.mul(d.exp(d.mul(d.mul(t, t), -0.5), table), d.mul(ratio, inverse))
    return d.mul(at_least(x, -14.5), select(negative, tail, d.add(1.0, -tail)))


def _exact_gelu(x: Any, y: Any, table: Any) -> tuple[Any, Any]:
    """x erfc(-x / sqrt 2) / 2, with erfc(z) = t e^(p(t) - z²), t = 2 / (z + 2)."""
    v = d.mul(x, -math.sqrt(0.5))
    z = at_most(select(v < Float64(0.0), -v, v), 11.0)
    t = d.div(2.0, d.add(z, 2.0))
    u = d.mul(d.add(t, -(1 + 2 / 12.6) / 2), 2 / (1 - 2 / 12.6))
    tail = d.mul(t, d.exp(d.add(d.horner(ERFC, u), -d.mul(z, z)), table))
    twice = select(v < Float64(0.0), d.add(2.0, -tail), tail)
    below = at_least(at_most(x, 0.0), -16.0)
    off = d.mul(d.add(d.mul(below, below), 4.0), 2.0**-52)
    return d.mul(d.mul(x, twice), 0.5), off


def _exact_gelu_tanh(x: Any, y: Any, table: Any) -> tuple[Any, Any]:
    off = d.add(at_most(at_least(_slope(at_least(x, -14.0)), 0.0), 128.0), 2.0)
    return y, d.mul(off, 2.0**-51)


FORMS: dict[str, Callable[[Any, Any], Any]] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
"""Functions of float64 to within 2^-43 of themselves."""

EXACT: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "silu": lambda x, y, table: (y, Float64(2.0**-50)),
    "gelu": _exact_gelu,
    "gelu_tanh": _exact_gelu_tanh,
}
"""The same, of which y is the value, nearer, and what part of themselves they are off by at most."""
