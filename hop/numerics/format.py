"""Format: what number formats share, and what code outside asks one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import packing, spelling
from hop.numerics.spelling import Value, shown

NOISE_BITS = 24  # of the random integers of stochastic rounding; bytes are their upper 8
_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False, repr=False)
class Format(Value):
    """What all formats share.

    Args:
        name: what it is called in messages and reports.
        bits: of a code.
        dtype: of a tensor of codes, one per element.

    Attributes:
        numbers: all finite numbers, ascending, zero once.
        max, min: the largest and the smallest.
    """

    name: str
    bits: int
    dtype: torch.dtype
    numbers: tuple[float, ...] = field(init=False)
    max: float = field(init=False)
    min: float = field(init=False)

    # Its kind, which a subclass shares. The codes of integers, less that of 0, are their numbers.
    is_integer: ClassVar[bool] = False
    is_float: ClassVar[bool] = False
    is_codebook: ClassVar[bool] = False
    is_for_scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        raise TypeError(f"{type(self).__name__} has no numbers of its own; make an Integer, a Float or a Codebook")

    def _check(self, *integers: str) -> None:
        """Raise ValueError for a name, bits or a dtype that a format cannot have, or where `integers` are none."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"{type(self).__name__}: name must be text, got {shown(self.name)}; give one such as 'int8'"
            )
        for which in ("bits", *integers):
            spelling.integer(getattr(self, which), f"{self.name}: {which}")
        if self.bits not in range(1, 9) and not (self.bits == 16 and self.dtype == torch.int16):
            raise ValueError(f"{self.name}: bits must be 1 to 8, got {self.bits}; give such a number")
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.name}: dtype must be one of {_DTYPES}, got {self.dtype}; take one of them")

    def _derive(self, numbers: Sequence[float], **tables: Sequence[float]) -> None:
        for name, value in {"numbers": numbers, "max": numbers[-1], "min": numbers[0], **tables}.items():
            object.__setattr__(self, name, tuple(value) if isinstance(value, Sequence) else value)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The codes of x (float32, any shape): nearest, or stochastic with `noise`, random integers of x's shape, which
        rounds a magnitude up if `rounds_up` says so of its place in the gap, and toward zero otherwise."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers of `codes`, in float32."""
        raise NotImplementedError

    def pack(self, codes: Tensor) -> Tensor:
        """(..., K) codes -> (..., bytes), for a format whose codes share bytes (hop.numerics.packing)."""
        return packing.pack(codes, self.bits)

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        """The inverse of `pack`, to (..., size)."""
        return packing.unpack(packed, self.bits, size, self.dtype)

    def inside(self, x: Tensor) -> Tensor:
        """Whether x lies within half a gap of the numbers, so that encoding does not clip it; false for NaN."""
        (a, b), (c, d) = self.numbers[:2], self.numbers[-2:]
        return (x >= a - (b - a) / 2) & (x <= d + (d - c) / 2)

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN, which NaN is encoded to."""
        return self.dtype.is_floating_point

    @property
    def zero(self) -> int:
        """The number that stands for 0 where no zero point says otherwise."""
        return 0

    @property
    def parts(self) -> tuple[int, ...]:
        """The bits of each part of a code: of a float sign, exponent and mantissa."""
        return (self.bits,)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether its numbers are integers: where its codes are others, of 8 bits."""
        return self.is_integer or all(x.is_integer() and -128 <= x <= 127 for x in map(float, self.numbers))


def rounds_up(part: Tensor, noise: Tensor) -> Tensor:
    """Whether stochastic rounding takes a number to the next one, of which it is `part` of the way, 0 to below 1.

    Args:
        part: float32.
        noise: of its shape: int32, whose low 24 bits are taken; if they are uniform, a number goes up with the
            probability `part`, rounded down to a multiple of 2^-24. Or uint8, the upper 8 of these bits: a multiple of
            2^-8.
    """
    r = noise.to(torch.int32)
    r = r * 2 ** (NOISE_BITS - 8) if noise.dtype == torch.uint8 else torch.bitwise_and(r, 2**NOISE_BITS - 1)
    return (part * 2**NOISE_BITS).to(torch.int32) + r >= 2**NOISE_BITS
