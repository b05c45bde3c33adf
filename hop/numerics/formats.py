"""Number formats: the values that an element of a quantized tensor can have, and the code of each.

A format is a frozen value; to add one, add a constant at the end of this file. `encode` converts float32 to codes and
saturates, `decode` converts codes back to float32 exactly. There is one code per element; hop.numerics.packing packs
several into a byte. Everything is core ATen, so it can be lowered to any runtime.

A float format with sign s, exponent e of E bits and mantissa m of M bits, bias b:

    e > 0:  (-1)^s · 2^(e - b) · (1 + m / 2^M)          e = 0:  (-1)^s · 2^(1 - b) · m / 2^M

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0; ggml for IQ4_NL;
Dettmers et al. 2023, QLoRA, appendix E, for NF4.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import spelling
from hop.numerics.format import NOISE_BITS as NOISE_BITS
from hop.numerics.format import Format as Format
from hop.numerics.format import rounds_up
from hop.numerics.tables import dynamic_map as dynamic_map
from hop.numerics.tables import float32, halfway, lookup, search
from hop.numerics.tables import tensor as tensor

__all__ = [
    "DYNAMIC4",
    "DYNAMIC8",
    "DYNAMIC8_UNSIGNED",
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "INT3",
    "INT4",
    "INT5",
    "INT6",
    "INT8",
    "INT16",
    "IQ4_NL",
    "LINEAR4_UNSIGNED",
    "LINEAR4_UNSIGNED_ZERO",
    "NF4",
    "TERNARY",
    "UINT2",
    "UINT4",
    "UINT5",
    "UINT6",
    "UINT8",
    "UTERNARY",
    "Codebook",
    "Float",
    "Format",
    "Integer",
    "PowerOfTwo",
]

_BEYOND = 2.0**20  # larger than every code, and small enough for float32 to have fractions


@dataclass(frozen=True, eq=False, repr=False)
class Integer(Format):
    """The integers from `low` to `high`; ties to even, NaN to 0."""

    low: int = 0
    high: int = 0

    is_integer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check("low", "high")
        if self.low >= self.high or self.high - self.low >= 2**self.bits:
            raise ValueError(
                f"{self.name}: low and high must be ascending and fit {self.bits} bits, got {self.low} to {self.high}; "
                "give such numbers"
            )
        if not self.dtype.is_floating_point and not _fits(self.dtype, self.low, self.high):
            raise ValueError(
                f"{self.name}: low and high must fit {self.dtype}, got {self.low} to {self.high}; give such numbers"
            )
        self._derive([float(n) for n in range(self.low, self.high + 1)])

    def encode(self, x: Tensor, noise: Tensor | None = None, zero: Tensor | int = 0) -> Tensor:
        """Encode as Format.encode does, with `zero` as the code of 0."""
        if noise is None:
            steps = x.round()
        else:
            magnitude = torch.where(x == x, x.abs().clamp(max=_BEYOND), 0.0)
            steps = magnitude.floor()
            steps = steps + rounds_up(magnitude - steps, noise).to(torch.float32)
            steps = torch.where(x < 0, -steps, steps)
        steps = torch.where(steps == steps, steps, 0.0)
        if not isinstance(zero, int) or zero != 0:
            steps = steps + zero
        return steps.clamp(self.low, self.high).to(self.dtype)

    def decode(self, codes: Tensor, zero: Tensor | int = 0) -> Tensor:
        """Decode as Format.decode does, with `zero` as the code of 0."""
        values = codes.to(torch.float32)
        return values if isinstance(zero, int) and zero == 0 else values - zero

    def nearest(self, x: Tensor, zero: int = 0) -> Tensor:
        return x.round().clamp(self.low - zero, self.high - zero)

    def inside(self, x: Tensor, zero: Tensor | int = 0) -> Tensor:
        """Compute Format.inside with `zero` as the code of 0; a tie beyond the last code is inside if it rounds to that
        code.
        """
        code = x.round() + zero
        return (code >= self.low) & (code <= self.high)

    @property
    def zero(self) -> int:
        """The middle of the code range."""
        return (self.low + self.high + 1) // 2


@dataclass(frozen=True, eq=False, repr=False)
class Float(Format):
    """Floating-point numbers with a sign; ties to even.

    NaN is encoded as 0x7f if `dtype` is an 8-bit float, else as `max`. `largest` is the code of the largest value;
    codes above it, if any, decode to NaN.
    """

    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    largest: int = 0
    _magnitudes: tuple[float, ...] = field(init=False)  # the values from 0 up, in the order of their codes
    _thresholds: tuple[float, ...] = field(init=False)
    _gaps: tuple[float, ...] = field(init=False)  # from each value to the next; 0 for the last, which saturates
    _decoded: tuple[float, ...] = field(init=False)

    is_float: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check("exponent_bits", "mantissa_bits", "bias", "largest")
        if self.dtype == torch.int8:
            raise ValueError(
                f"{self.name}: dtype of floats must be uint8 or an 8-bit float, got {self.dtype}; use one of these"
            )
        half = 2 ** (self.bits - 1)
        if 1 + self.exponent_bits + self.mantissa_bits != self.bits or min(self.exponent_bits, self.mantissa_bits) < 0:
            raise ValueError(
                f"{self.name}: a sign, exponent_bits and mantissa_bits must be {self.bits} bits, got "
                f"{self.exponent_bits} and {self.mantissa_bits}; give such numbers"
            )
        if not 1 <= self.largest < half or not -64 <= self.bias <= 64:
            raise ValueError(
                f"{self.name}: largest must be a code below {half}, and bias within 64 of 0; got {self.largest} and "
                f"{self.bias}; give such numbers"
            )
        magnitudes = [self._magnitude(code) for code in range(self.largest + 1)]
        above = [*magnitudes, *[math.nan] * (half - len(magnitudes))]
        self._derive(
            [*(-v for v in reversed(magnitudes[1:])), *magnitudes],
            _magnitudes=magnitudes,
            _thresholds=halfway(magnitudes, lambda lower: lower % 2 == 1),
            _gaps=[*(b - a for a, b in itertools.pairwise(magnitudes)), 0.0],
            _decoded=[*above, *(-v for v in above)],
        )

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None and self.dtype.is_floating_point:  # ATen implements this cast
            return torch.where(x == x, x.clamp(self.min, self.max), math.nan).to(self.dtype)
        magnitude = x.abs()
        code = search(magnitude, self._thresholds if noise is None else self._magnitudes)
        if noise is not None:
            # All exact: a value minus the next smaller one of the format, and gaps, which are powers of two.
            part = (magnitude - lookup(self._magnitudes, code)) / lookup(self._gaps, code)
            code = code + rounds_up(torch.where(code < self.largest, part, 0.0), noise).to(code.dtype)
        code = torch.where(x.isnan(), self.largest, code)
        negative = (x < 0) | (x.reciprocal() < 0)  # -0.0 is not less than 0
        if self.dtype.is_floating_point:
            number = lookup(self._magnitudes, code)
            return torch.where(x.isnan(), math.nan, torch.where(negative, -number, number)).to(self.dtype)
        return torch.where(negative, code + 2 ** (self.bits - 1), code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return codes.to(torch.float32)
        return lookup(self._decoded, codes.to(torch.int64))

    @property
    def parts(self) -> tuple[int, ...]:
        return (1, self.exponent_bits, self.mantissa_bits)

    def _magnitude(self, code: int) -> float:
        e, m = divmod(code, 2**self.mantissa_bits)
        return math.ldexp(m + (2**self.mantissa_bits if e else 0), max(e, 1) - self.bias - self.mantissa_bits)


@dataclass(frozen=True, eq=False, repr=False)
class Codebook(Format):
    """Any ascending values, converted to float32; ties go up, NaN to the value nearest to 0."""

    book: tuple[float, ...] = ()
    _thresholds: tuple[float, ...] = field(init=False)
    _zero_code: int = field(init=False)

    is_codebook: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check()
        values = self.book if isinstance(self.book, tuple | list) else (None,)
        if any(isinstance(v, bool | str) or not hasattr(v, "__float__") for v in values):
            raise ValueError(
                f"{self.name}: book must be a tuple of numbers, got {spelling.shown(self.book)}; give one such as "
                "(-1.0, 0.0, 1.0)"
            )
        if self.dtype != torch.uint8:
            raise ValueError(
                f"{self.name}: dtype of a codebook must be uint8, the places in it; got {self.dtype}; give torch.uint8"
            )
        book = tuple(float32(spelling.real(float(v), f"{self.name}: book")) for v in self.book)
        if not 2 <= len(book) <= 2**self.bits or any(not a < b for a, b in itertools.pairwise(book)):
            raise ValueError(
                f"{self.name}: book must be 2 to {2**self.bits} numbers, ascending in float32; got {len(book)}: "
                f"{spelling.shown(book)}; give such numbers"
            )
        object.__setattr__(self, "book", book)
        object.__setattr__(self, "_zero_code", min(range(len(book)), key=lambda i: abs(book[i])))
        self._derive(book, _thresholds=halfway(book, lambda lower: True))

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is not None:
            raise ValueError(f"{self.name}: noise must be None, as a codebook has no stochastic rounding; leave it out")
        code = search(x, self._thresholds)
        return torch.where(x.isnan(), self._zero_code, code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return lookup(self.book, codes.to(torch.int64))


@dataclass(frozen=True, eq=False, repr=False)
class PowerOfTwo(Format):
    """Powers of two, for scales: code e is 2^(e - bias), and the last code is NaN.

    Values above 0 are rounded up; others have code 0. Codes are computed by doubling and halving, which is exact, and
    needs no table of all powers.
    """

    bias: int = 0

    is_for_scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check("bias")
        low, high = -self.bias, 2**self.bits - 2 - self.bias
        if low < -127 or high > 127:
            raise ValueError(
                f"{self.name}: bits={self.bits} and bias={self.bias} give powers from 2^{low} to 2^{high}; they must "
                "be between 2^-127 and 2^127, as those of float32 do; give one such as 127"
            )
        self._derive([math.ldexp(1.0, e - self.bias) for e in range(2**self.bits - 1)])

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is not None:
            raise ValueError(f"{self.name}: scales are not rounded stochastically")
        small = x < 1
        rest = torch.where(small, x * 2.0**127, x)
        power = torch.where(small, -127, 0)  # x = rest · 2^power
        for step in (64, 32, 16, 8, 4, 2, 1):
            large = rest >= 2.0**step
            rest = torch.where(large, rest * 2.0**-step, rest)
            power = torch.where(large, power + step, power)
        power = torch.where(rest > 1, power + 1, power)
        code = (power + self.bias).clamp(0, 2**self.bits - 2)
        return torch.where(x.isnan(), 2**self.bits - 1, code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        rest = codes.to(torch.int32)
        number = torch.full_like(rest, 2.0**-self.bias, dtype=torch.float32)
        for step in (64, 64, 64, 32, 16, 8, 4, 2, 1):
            large = rest >= step
            number = torch.where(large, number * 2.0**step, number)
            rest = torch.where(large, rest - step, rest)
        return torch.where(codes == 2**self.bits - 1, math.nan, number)

    def inside(self, x: Tensor) -> Tensor:
        """Whether x is at most the largest value."""
        return x <= self.max


def _fits(dtype: torch.dtype, low: int, high: int) -> bool:
    """Whether an integer dtype can represent both bounds."""
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


# ---- the formats

INT8 = Integer("int8", 8, torch.int8, -128, 127)
UINT8 = Integer("uint8", 8, torch.uint8, 0, 255)
INT16 = Integer("int16", 16, torch.int16, -(2**15), 2**15 - 1)  # without zero points; products are summed in 64 bits
INT4 = Integer("int4", 4, torch.int8, -8, 7)
UINT4 = Integer("uint4", 4, torch.uint8, 0, 15)
TERNARY = Integer("ternary", 2, torch.int8, -1, 1)
UTERNARY = Integer("uternary", 2, torch.uint8, 0, 2)
UINT2 = Integer("uint2", 2, torch.uint8, 0, 3)
INT3 = Integer("int3", 3, torch.int8, -4, 3)
INT5 = Integer("int5", 5, torch.int8, -16, 15)
UINT5 = Integer("uint5", 5, torch.uint8, 0, 31)
INT6 = Integer("int6", 6, torch.int8, -32, 31)
UINT6 = Integer("uint6", 6, torch.uint8, 0, 63)

E4M3 = Float("e4m3", 8, torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E)
E5M2 = Float("e5m2", 8, torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15, largest=0x7B)
E2M1 = Float("e2m1", 4, torch.uint8, exponent_bits=2, mantissa_bits=1, bias=1, largest=0x7)

E8M0 = PowerOfTwo("e8m0", 8, torch.uint8, bias=127)


# State formats of low-bit optimizers: signed for the first moment, unsigned for the second.
DYNAMIC8 = Codebook("dynamic8", 8, torch.uint8, dynamic_map(7, signed=True))
DYNAMIC8_UNSIGNED = Codebook("dynamic8_unsigned", 8, torch.uint8, dynamic_map(7, signed=False))
DYNAMIC4 = Codebook("dynamic4", 4, torch.uint8, dynamic_map(3, signed=True))
LINEAR4_UNSIGNED = Codebook("linear4_unsigned", 4, torch.uint8, tuple((k + 1) / 16 for k in range(16)))
LINEAR4_UNSIGNED_ZERO = Codebook("linear4_unsigned_zero", 4, torch.uint8, tuple(float32(k / 15) for k in range(16)))
IQ4_NL = Codebook("iq4_nl", 4, torch.uint8, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))

# The 4-bit NormalFloat of bitsandbytes.
NF4 = Codebook(
    "nf4",
    4,
    torch.uint8,
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)

FORMATS = (
    *(INT8, UINT8, INT4, UINT4, TERNARY, E4M3, E5M2, E2M1, E8M0, UTERNARY, UINT2, INT3, INT5, UINT5, INT6, UINT6),
    *(IQ4_NL, NF4, DYNAMIC8, DYNAMIC8_UNSIGNED, DYNAMIC4, LINEAR4_UNSIGNED, LINEAR4_UNSIGNED_ZERO),
)

for _format in (*FORMATS, INT16):
    spelling.register_constant(_format.name, _format)
