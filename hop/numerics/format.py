"""Format: the base class of number formats."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import packing, spelling
from hop.numerics.spelling import Value, shown

NOISE_BITS = 24  # bits of the random integers of stochastic rounding; one-byte noise has the upper 8 of them
_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False, repr=False)
class Format(Value):
    """Base class of number formats.

    Args:
        name: the name in messages and reports.
        bits: bits per code.
        dtype: the dtype of a tensor of codes, with one element per code.

    Attributes:
        numbers: all finite values, ascending, with a single zero.
        max, min: the largest and smallest value.
    """

    name: str
    bits: int
    dtype: torch.dtype
    numbers: tuple[float, ...] = field(init=False)
    max: float = field(init=False)
    min: float = field(init=False)

    # The kind of format, set by subclasses. Values of integer formats are codes minus the code of 0.
    is_integer: ClassVar[bool] = False
    is_float: ClassVar[bool] = False
    is_codebook: ClassVar[bool] = False
    is_for_scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise TypeError(f"{type(self).__name__} defines no values; use Integer, Float or Codebook")

    def _check(self, *integers: str) -> None:
        """Raise ValueError for an invalid name, bits or dtype, or if one of the fields `integers` is not an integer."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"{type(self).__name__}: name must be text, got {shown(self.name)}; give one such as 'int8'"
            )
        for which in ("bits", *integers):
            spelling.integer(getattr(self, which), f"{self.name}: {which}")
        if self.bits not in range(1, 9) and not (self.bits == 16 and self.dtype == torch.int16):
            raise ValueError(f"{self.name}: bits must be 1 to 8, got {self.bits}; give such a number")
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.name}: dtype must be one of {_DTYPES}, got {self.dtype}; use one of them")

    def _derive(self, numbers: Sequence[float], **tables: Sequence[float]) -> None:
        for name, value in {"numbers": numbers, "max": numbers[-1], "min": numbers[0], **tables}.items():
            object.__setattr__(self, name, tuple(value) if isinstance(value, Sequence) else value)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode x (float32, any shape) by rounding to nearest, or stochastically with `noise`.

        Noise has random integers of x's shape. It rounds a magnitude up if `rounds_up` is true for its position in the
        gap, and toward zero otherwise.
        """
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Decode `codes` to their float32 values."""
        raise NotImplementedError

    def nearest(self, x: Tensor, zero: int = 0) -> Tensor:
        """x rounded to the format's values, with `zero` as the code of 0 of an integer format."""
        return self.decode(self.encode(x))

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes (..., K) that share bytes to (..., bytes) (hop.numerics.packing)."""
        return packing.pack(codes, self.bits)

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        """The inverse of `pack`, to shape (..., size)."""
        return packing.unpack(packed, self.bits, size, self.dtype)

    def inside(self, x: Tensor) -> Tensor:
        """Whether x is within half a gap of the format's range, so that encoding does not clip it; false for NaN."""
        (a, b), (c, d) = self.numbers[:2], self.numbers[-2:]
        return (x >= a - (b - a) / 2) & (x <= d + (d - c) / 2)

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN, which NaN is encoded to."""
        return self.dtype.is_floating_point

    @property
    def zero(self) -> int:
        """The code of 0 without a zero point."""
        return 0

    @property
    def parts(self) -> tuple[int, ...]:
        """The bits of each part of a code: sign, exponent and mantissa for a float."""
        return (self.bits,)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether all values are integers; if codes differ from values, 8-bit integers."""
        return self.is_integer or all(x.is_integer() and -128 <= x <= 127 for x in map(float, self.numbers))


def is_equal(a: Format, b: Format) -> bool:
    """Whether two formats are equal except for their names."""
    own = [f.name for f in fields(a) if f.init and f.name != "name"]
    return type(a) is type(b) and all(getattr(a, name) == getattr(b, name) for name in own)


def rounds_up(part: Tensor, noise: Tensor) -> Tensor:
    """Whether stochastic rounding takes a value to the next one, given its position `part` in the gap, in [0, 1).

    Args:
        part: float32.
        noise: of the same shape. int32, of which the low 24 bits are used: if they are uniform, a value is rounded up
            with probability `part`, rounded down to a multiple of 2^-24. Or uint8, the upper 8 of these bits: a
            multiple of 2^-8.
    """
    r = noise.to(torch.int32)
    r = r * 2 ** (NOISE_BITS - 8) if noise.dtype == torch.uint8 else torch.bitwise_and(r, 2**NOISE_BITS - 1)
    return (part * 2**NOISE_BITS).to(torch.int32) + r >= 2**NOISE_BITS
