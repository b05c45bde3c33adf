"""Number formats: which numbers an element of a quantized tensor can be, and the code of each.

A format is a frozen value; adding one is adding a constant at the end of this file. `encode` takes float32 to the code
of the nearest number and saturates; `decode` gives back float32, exactly. There is one code per element; hop.packing
puts several into a byte. Everything is core ATen, so that it lowers to any runtime.

A float format with sign s, exponent e of E bits and mantissa m of M bits, bias b:

    e > 0:  (-1)^s · 2^(e - b) · (1 + m / 2^M)          e = 0:  (-1)^s · 2^(1 - b) · m / 2^M

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hop import spelling
from hop.spelling import Value

NOISE_BITS = 8


@dataclass(frozen=True, eq=False, repr=False)
class Format(Value):
    """What all formats share: a name, the bits of a code, and the dtype of a tensor of codes."""

    name: str
    bits: int
    dtype: torch.dtype

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The codes of x (float32, any shape): nearest, or stochastic with `noise` (x's shape, integers r uniform in
        0..255), which adds r / 256 of a gap to the magnitude and rounds toward zero."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers of `codes`, in float32."""
        raise NotImplementedError

    def inside(self, x: Tensor) -> Tensor:
        """Whether x becomes the nearest number and is not clipped to the largest or smallest; false for NaN."""
        low, high = self.numbers[:2], self.numbers[-2:]
        return (x >= low[0] - (low[1] - low[0]) / 2) & (x <= high[1] + (high[1] - high[0]) / 2)

    @property
    def numbers(self) -> tuple[float, ...]:
        """All finite numbers, ascending, zero once."""
        raise NotImplementedError

    @property
    def zero(self) -> int:
        """The code of 0 where no zero point says otherwise: the middle of an integer format's codes."""
        return 0

    @property
    def max(self) -> float:
        """The largest number."""
        return self.numbers[-1]

    @property
    def min(self) -> float:
        """The smallest number."""
        return self.numbers[0]


@dataclass(frozen=True, eq=False, repr=False)
class Integer(Format):
    """The integers from `low` to `high`; ties to even, NaN to 0."""

    low: int
    high: int

    def encode(self, x: Tensor, noise: Tensor | None = None, zero: Tensor | int = 0) -> Tensor:
        """As Format.encode, with `zero` for the code of 0."""
        if noise is None:
            steps = x.round()
        else:
            magnitude = (x.abs() + noise.to(torch.float32) / 2**NOISE_BITS).floor()
            steps = torch.where(x < 0, -magnitude, magnitude)
        return (torch.where(x.isnan(), 0.0, steps) + zero).clamp(self.low, self.high).to(self.dtype)

    def decode(self, codes: Tensor, zero: Tensor | int = 0) -> Tensor:
        """As Format.decode, with `zero` for the code of 0."""
        return codes.to(torch.float32) - zero

    def inside(self, x: Tensor, zero: Tensor | int = 0) -> Tensor:
        """As Format.inside, with `zero` for the code of 0."""
        code = x.round() + zero
        return (code >= self.low) & (code <= self.high)

    @property
    def zero(self) -> int:
        return (self.low + self.high + 1) // 2

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(float(n) for n in range(self.low, self.high + 1))


@dataclass(frozen=True, eq=False, repr=False)
class Float(Format):
    """Floating-point numbers with a sign; ties to even. NaN stays NaN where the format has one, else becomes `max`."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int  # the code of the largest number: above it are infinity and NaN, if any

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None and self.dtype.is_floating_point:  # ATen has it
            return x.clamp(self.min, self.max).to(self.dtype)
        magnitude = x.abs()
        if noise is not None:
            gap = _lookup(self._gaps, _search(magnitude, self._magnitudes))
            magnitude = magnitude + noise.to(torch.float32) / 2**NOISE_BITS * gap
        code = _search(magnitude, self._thresholds if noise is None else self._magnitudes)
        code = torch.where(x.isnan(), self.largest, code)
        negative = (x < 0) | (x.reciprocal() < 0)  # -0.0 is not below 0
        if self.dtype.is_floating_point:
            number = _lookup(self._magnitudes, code)
            return torch.where(x.isnan(), x, torch.where(negative, -number, number)).to(self.dtype)
        return torch.where(negative, code + 2 ** (self.bits - 1), code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return codes.to(torch.float32)
        return _lookup((*self._magnitudes, *(-v for v in self._magnitudes)), codes.to(torch.int64))

    @property
    def numbers(self) -> tuple[float, ...]:
        return (*(-v for v in reversed(self._magnitudes[1:])), *self._magnitudes)

    @functools.cached_property
    def _magnitudes(self) -> tuple[float, ...]:
        """The numbers from 0 up: their codes count up with them."""
        return tuple(self._magnitude(code) for code in range(self.largest + 1))

    def _magnitude(self, code: int) -> float:
        e, m = divmod(code, 2**self.mantissa_bits)
        return math.ldexp(m + (2**self.mantissa_bits if e else 0), max(e, 1) - self.bias - self.mantissa_bits)

    @functools.cached_property
    def _thresholds(self) -> tuple[float, ...]:
        return _halfway(self._magnitudes, lambda lower: lower % 2 == 1)

    @functools.cached_property
    def _gaps(self) -> tuple[float, ...]:
        """From each number to the next, at the last one to nothing: it saturates."""
        return (*(b - a for a, b in itertools.pairwise(self._magnitudes)), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Codebook(Format):
    """Any ascending numbers; ties go up, NaN to the number nearest to 0."""

    book: tuple[float, ...] = field(repr=False)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is not None:
            raise ValueError(f"{self.name}: a codebook has no stochastic rounding")
        zero = min(range(len(self.book)), key=lambda i: abs(self.book[i]))
        code = _search(x, self._thresholds)
        return torch.where(x.isnan(), zero, code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return _lookup(self.book, codes.to(torch.int64))

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.book

    @functools.cached_property
    def _thresholds(self) -> tuple[float, ...]:
        return _halfway(self.book, lambda lower: True)


@dataclass(frozen=True, eq=False, repr=False)
class PowerOfTwo(Format):
    """Powers of two, for scales: code e is 2^(e - bias), and the last code NaN. Numbers above 0 are rounded up."""

    bias: int

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is not None:
            raise ValueError(f"{self.name}: scales are not rounded stochastically")
        code = _search(x, self._thresholds)
        return torch.where(x.isnan(), 2**self.bits - 1, code).to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return _lookup((*self.numbers, math.nan), codes.to(torch.int64))

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(math.ldexp(1.0, e - self.bias) for e in range(2**self.bits - 1))

    @functools.cached_property
    def _thresholds(self) -> tuple[float, ...]:
        return (-math.inf, *(_after(v) for v in self.numbers[:-1]))


# ---- tables


def _halfway(numbers: Sequence[float], tie_goes_up: Callable[[int], bool]) -> tuple[float, ...]:
    """For each number the least float32 that is rounded to it or to a larger one."""
    found = [-math.inf]
    for lower, (a, b) in enumerate(itertools.pairwise(numbers)):
        middle = (a + b) / 2  # exact: float64 has 29 bits to spare
        least = _float32(middle)
        reached = least >= middle if tie_goes_up(lower) else least > middle
        found.append(least if reached else _after(least))
    return tuple(found)


def _float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def _after(x: float) -> float:
    """The next float32."""
    return torch.nextafter(torch.tensor(x, dtype=torch.float32), torch.tensor(math.inf)).item()


def _lookup(table: Sequence[float], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=index.device)[index]


def _search(x: Tensor, table: Sequence[float]) -> Tensor:
    """For each element the position of the last entry of the ascending `table` that it reaches, else 0; int64."""
    size = 1 << (len(table) - 1).bit_length()
    entries = torch.tensor([*table, *[math.nan] * (size - len(table))], dtype=torch.float32, device=x.device)
    found = torch.zeros_like(x, dtype=torch.int64)
    step = size // 2
    while step:
        found = torch.where(x >= entries[found + step], found + step, found)
        step //= 2
    return found


# ---- the formats

INT8 = Integer("int8", 8, torch.int8, -128, 127)
UINT8 = Integer("uint8", 8, torch.uint8, 0, 255)
INT4 = Integer("int4", 4, torch.int8, -8, 7)
UINT4 = Integer("uint4", 4, torch.uint8, 0, 15)
TERNARY = Integer("ternary", 2, torch.int8, -1, 1)

E4M3 = Float("e4m3", 8, torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E)
E5M2 = Float("e5m2", 8, torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15, largest=0x7B)
E2M1 = Float("e2m1", 4, torch.uint8, exponent_bits=2, mantissa_bits=1, bias=1, largest=0x7)

E8M0 = PowerOfTwo("e8m0", 8, torch.uint8, bias=127)

FORMATS = (INT8, UINT8, INT4, UINT4, TERNARY, E4M3, E5M2, E2M1, E8M0)

for _format in FORMATS:
    spelling.register_constant(_format.name, _format)
