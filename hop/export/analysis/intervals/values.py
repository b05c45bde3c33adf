"""Bounds of the value of a node."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**63 - 1
FEW = 2**16  # the largest number of elements that are bounded one by one


@dataclass(frozen=True)
class Known:
    value: Any


@dataclass(frozen=True)
class Integers:
    low: Tensor  # int64
    high: Tensor

    def hull(self) -> tuple[int, int]:
        if self.low.numel() == 0:
            return 0, 0
        return int(self.low.min()), int(self.high.max())

    def is_single(self) -> bool:
        """Whether all elements share one interval."""
        return self.low.numel() == 1 and self.high.numel() == 1


@dataclass(frozen=True)
class Reals:
    low: float = -math.inf
    high: float = math.inf
    nan: bool = True


class Unknown(Exception):
    """No bounds can be given; the message says why."""


@dataclass(frozen=True)
class Sum:
    """Exact bounds of an operator's result before it is converted to the result's dtype.

    `known` describes the operands in words. `is_product` is set for sums, matrix products and convolutions.
    """

    low: int
    high: int
    parts: Integers | None  # the bounds of each element; None if they are unknown or exceed int64
    known: str
    is_product: bool = False


def integers(low: int, high: int) -> Integers:
    return Integers(torch.tensor(low), torch.tensor(high))


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


class NoBounds:
    """No bounds, for symbolic numbers and for tensors that are neither integers nor real numbers."""


def dtype_bounds(x: object) -> object:
    """The bounds of a value that follow from its dtype; for a list or tuple, a tuple of them."""
    if isinstance(x, list | tuple):
        return tuple(map(dtype_bounds, x))
    if not isinstance(x, Tensor) or x.dtype.is_complex or x.dtype == torch.uint64:
        return NoBounds()
    return integers(*dtype_range(x.dtype)) if is_integer(x.dtype) else Reals()


def bounds(x: object) -> Integers | Reals:
    """The bounds of a number, tensor or Known as Integers or Reals. Raises Unknown if there are none.

    Numbers and known integers are their own bounds; known floats have their minimum and maximum.
    """
    value = x.value if isinstance(x, Known) else x
    if isinstance(value, bool | int):
        return integers(int(value), int(value)) if -LARGEST <= value <= LARGEST else Reals(float(value), float(value))
    if isinstance(value, float):
        return Reals(value, value, math.isnan(value)) if not math.isnan(value) else Reals()
    if isinstance(value, Tensor):
        if value.dtype.is_complex or value.dtype == torch.uint64:
            raise Unknown(f"values of {value.dtype}")
        if is_integer(value.dtype):
            wide = value.detach().to(torch.int64)
            return Integers(wide, wide)
        if value.numel() == 0:
            return Reals(0.0, 0.0, False)
        wide = value.detach().to(torch.float64)
        finite = wide[~wide.isnan()]
        limits = (finite.min().item(), finite.max().item()) if finite.numel() else (-math.inf, math.inf)
        return Reals(*limits, finite.numel() < wide.numel())
    if isinstance(value, Integers | Reals):
        return value
    raise Unknown("an operand without bounds")


def reals(x: object) -> Reals:
    """Bounds as floats, rounded outwards."""
    result = bounds(x)
    if isinstance(result, Reals):
        return result
    low, high = result.hull()
    return Reals(math.nextafter(float(low), -math.inf) if int(float(low)) > low else float(low), above(high), False)


def above(n: int) -> float:
    return math.nextafter(float(n), math.inf) if int(float(n)) < n else float(n)


def integer_bounds(x: object) -> Integers:
    result = bounds(int(x) if isinstance(x, float) and x.is_integer() else x)
    if not isinstance(result, Integers):
        raise Unknown("a float where an integer is expected")
    return result


def single_interval(x: Integers) -> Integers:
    return x if x.is_single() else integers(*x.hull())


def fits(*numbers: int) -> bool:
    return all(-LARGEST - 1 <= n <= LARGEST for n in numbers)


def interval(low: int, high: int) -> str:
    return f"{low:,}..{high:,}" if low != high else f"{low:,}"


def static_shape(shape: Iterable[object]) -> list[int] | None:
    """A shape as a list of ints; None if a size is symbolic."""
    sizes = list(shape)
    known = [n for n in sizes if isinstance(n, int)]
    return known if len(known) == len(sizes) else None


def constant(x: object) -> Tensor | None:
    return x.value if isinstance(x, Known) and isinstance(x.value, Tensor) else None
