"""float64 in the CuTe DSL, each operation rounded by itself; and e^x."""

import struct
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Uint32

from cutlass_kernels.epilogue import ptx
from cutlass_kernels.function_tables import EXP, POWERS

_MAGIC = 1.5 * 2.0**52  # adding it rounds to an integer, which the low bits then are
_PER_STEP = float.fromhex("0x1.71547652b82fep+4")  # 16 / ln 2
_STEP = (float.fromhex("0x1.62e42fefa39efp-5"), float.fromhex("0x1.abc9e3b39803fp-60"))  # ln 2 / 16, in two parts


def wide(x: Any) -> Any:
    return ptx("cvt.f64.f32 {$w0}, {$r0};", Float64, x)


def narrow(x: Any) -> Any:
    """To float32, to the nearest."""
    return ptx("cvt.rn.f32.f64 {$w0}, {$r0};", Float32, x)


def of_integer(x: Any) -> Any:
    """Convert Int32 or Int64 to float64, rounded to nearest."""
    return ptx(f"cvt.rn.f64.s{x.width} {{$w0}}, {{$r0}};", Float64, x)


def _operation(name: str, *args: Any) -> Any:
    """One instruction on registers and on constants, which are floats in its text."""
    spelled = [f"0d{struct.pack('>d', a).hex().upper()}" if isinstance(a, float) else "" for a in args]
    registers = [a for a in args if not isinstance(a, float)]
    places = iter(range(len(registers)))
    listed = ", ".join(text or f"{{$r{next(places)}}}" for text in spelled)
    return ptx(f"{name} {{$w0}}, {listed};", Float64, *registers)


def add(a: Any, b: Any) -> Any:
    return _operation("add.rn.f64", a, b)


def mul(a: Any, b: Any) -> Any:
    return _operation("mul.rn.f64", a, b)


def div(a: Any, b: Any) -> Any:
    return _operation("div.rn.f64", a, b)


def fma(a: Any, b: Any, c: Any) -> Any:
    return _operation("fma.rn.f64", a, b, c)


def root(x: Any) -> Any:
    return _operation("sqrt.rn.f64", x)


def reciprocal(x: Any) -> Any:
    return _operation("rcp.rn.f64", x)


def fraction(x: Any) -> Any:
    """x less the next integer below."""
    return add(x, -ptx("cvt.rmi.f64.f64 {$w0}, {$r0};", Float64, x))


def halves(x: Any) -> tuple[Any, Any]:
    """The low and the high 32 bits."""
    return cute.arch.inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Uint32] * 2, read_only_args=[x])


def joined(low: Any, high: Any) -> Any:
    return ptx("mov.b64 {$w0}, {{$r0}, {$r1}};", Float64, low, high)


def power_of_two(exponent: Any) -> Any:
    """From -1022 to 1023."""
    return joined(Uint32(0), ((exponent + 1023) << 20).to(Uint32))


def horner(c: Sequence[float], x: Any) -> Any:
    """The polynomial with coefficients c, the lowest first."""
    y = fma(x, c[-1], c[-2])
    for v in c[-3::-1]:
        y = fma(y, x, v)
    return y


def exp(x: Any, table: Any) -> Any:
    """e^x to within 2^-51 of itself, x between -600 and 600, NaN for NaN. `table` has the words of POWERS, in shared
    memory.

    x = n ln 2 / 16 + r; e^x = 2^(n / 16) (1 + r + r^2 p(r))."""
    t = fma(x, _PER_STEP, _MAGIC)
    n = add(t, -_MAGIC)
    r = fma(n, -_STEP[1], fma(n, -_STEP[0], x))
    steps = halves(t)[0].to(Int32)
    place = (steps & 15) * 2
    two = joined(table[place], table[place + 1] + ((steps >> 4) << 20).to(Uint32))
    square = mul(r, r)
    low, high = fma(r, EXP[1], EXP[0]), fma(r, EXP[3], EXP[2])
    tail = fma(fma(square, EXP[4], high), square, low)
    return fma(two, fma(tail, square, r), two)


assert (len(EXP), len(POWERS)) == (5, 16)
