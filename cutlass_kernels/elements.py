"""Formats of elements: what a kernel must know of one. Values only; nothing here needs the CuTe DSL or a GPU."""

from dataclasses import dataclass

import torch

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    """The numbers that a code can be.

    Attributes:
        name: as in an instruction.
        bits: of a code: 8, or 4, of which a byte holds two, the first in its low bits.
        dtype: of a tensor of codes.
        low, high: of integers, the least and the largest code; (0, 0) for floats.
        top: the largest number; of integers, above the code of 0.
        mantissa_bits: of floats.
    """

    name: str
    bits: int
    dtype: torch.dtype
    top: float
    low: int = 0
    high: int = 0
    mantissa_bits: int = 0

    @property
    def is_integer(self) -> bool:
        return self.high > self.low

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN."""
        return self.dtype.is_floating_point

    @property
    def zero(self) -> int:
        """The code of 0 where no zero point says otherwise: the middle of the codes."""
        return (self.low + self.high + 1) // 2

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def per_word(self) -> int:
        """Codes in 32 bits."""
        return 32 // self.bits

    @property
    def largest_power(self) -> int:
        """The exponent of the largest power of two that is at most `top`."""
        return {"e4m3": 8, "e5m2": 15, "e2m1": 2}[self.name]


def _integer(name: str, bits: int, low: int, high: int) -> Format:
    dtype = torch.uint8 if low == 0 or bits < 8 else torch.int8
    return Format(name, bits, dtype, float(high - (low + high + 1) // 2), low, high)


S8, U8 = _integer("s8", 8, -128, 127), _integer("u8", 8, 0, 255)
S4, U4 = _integer("s4", 4, -8, 7), _integer("u4", 4, 0, 15)
E4M3 = Format("e4m3", 8, torch.float8_e4m3fn, 448.0, mantissa_bits=3)
E5M2 = Format("e5m2", 8, torch.float8_e5m2, 57344.0, mantissa_bits=2)
E2M1 = Format("e2m1", 4, torch.uint8, 6.0, mantissa_bits=1)

FORMATS = {f.name: f for f in (S8, U8, S4, U4, E4M3, E5M2, E2M1)}
