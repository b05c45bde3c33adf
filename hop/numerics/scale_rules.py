"""Scale rules: from the elements of a block to its scale, and from the scale to the values to encode.

The base class is in hop.numerics.rule, rules for floats in hop.numerics.float_rules; this module has those for all
formats, and exports all.

Source of AbsMean: Ma et al. 2024, "The Era of 1-bit LLMs".
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import spelling, weight_search
from hop.numerics.blocks import Block
from hop.numerics.float_rules import MX_ROUNDINGS as MX_ROUNDINGS
from hop.numerics.float_rules import BlockScaling as BlockScaling
from hop.numerics.float_rules import CurrentScaling as CurrentScaling
from hop.numerics.float_rules import Delayed as Delayed
from hop.numerics.float_rules import Microscaling as Microscaling
from hop.numerics.float_rules import TwoLevel as TwoLevel
from hop.numerics.float_rules import exponent_of as exponent_of
from hop.numerics.formats import Format
from hop.numerics.requantization import Convention, Division, Reciprocal
from hop.numerics.rule import LARGEST as LARGEST
from hop.numerics.rule import Blocks, Found, nan_beyond
from hop.numerics.rule import Rule as Rule
from hop.numerics.stored_scales import StoredScales as StoredScales
from hop.numerics.weight_search import Search

__all__ = [
    "AbsMean",
    "Amax",
    "BlockScaling",
    "CurrentScaling",
    "Delayed",
    "Microscaling",
    "MinMax",
    "Rule",
    "Static",
    "StoredScales",
    "TwoLevel",
]


@dataclass(frozen=True, eq=False, repr=False)
class Static(Rule):
    """No rule: the caller always gives the scale, and the zero point if affine=True.

    `requantize` is how hop.scaled converts an exact integer sum to codes (hop.requantization), or codes to those of a
    function (hop.integer_functions). quantize divides by the scale, or multiplies by its reciprocal for Reciprocal.
    """

    affine: bool = False
    requantize: Convention = Division()

    is_static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        spelling.flag(self.affine, "Static: affine")
        if not isinstance(self.requantize, Convention):
            raise TypeError(
                f"Static: requantize must be a convention of hop.requantization, got {spelling.shown(self.requantize)}"
                "; give one such as hop.requantization.TFLITE"
            )

    def check(self, format: Format, block: Block) -> None:
        if not format.is_integer and self.requantize != Division():
            raise ValueError(
                f"Static: requantize={self.requantize} returns integers, but {format.name} has none; use Division()"
            )

    def has_zero_point(self) -> bool:
        return self.affine

    @property
    def requantization(self) -> Convention:
        return self.requantize

    def of_ends(self) -> Rule:
        return MinMax() if self.affine else Amax()

    def find(self, parts: Blocks, format: Format) -> Found:
        raise ValueError(self.missing())

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        if not isinstance(self.requantize, Reciprocal):
            return super().given(parts, scale, zero_point, format)
        tensors = (scale,) if zero_point is None else (scale, zero_point)
        return Found(tensors, parts.x * parts.once(self.scale_of(tensors, format).reciprocal()))

    def missing(self, prefix: str = "") -> str:
        names = [f"{prefix}scale", *[f"{prefix}zero_point"] * self.affine]
        lacks = f"{' and '.join(names)} {'are' if self.affine else 'is'} None"
        return f"{lacks}, but this quantizer has no rule to find a scale; pass {'= and '.join(names)}="


@dataclass(frozen=True, eq=False, repr=False)
class Amax(Rule):
    """scale = amax / max, 1 where that is 0; codes of x / scale.

    amax is at least `floor`. The scale is NaN if amax is infinite, and, unless the format has a NaN, if an element is
    NaN.
    """

    floor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor", spelling.finite(self.floor, "Amax: floor"))

    @property
    def amax_floor(self) -> float:
        return self.floor

    def find(self, parts: Blocks, format: Format) -> Found:
        amax = nan_beyond(parts.amax_for(format)).clamp(min=self.floor)
        scale = parts.once(_no_zero(_quotient(amax, format.max - format.zero)))
        return Found((scale,), parts.x / scale)

    def weight_search(self, format: Format, signed: bool = False) -> Search | None:
        return weight_search.symmetric(format, signed) if self.floor == 0 else None


@dataclass(frozen=True, eq=False, repr=False)
class MinMax(Rule):
    """The range of a block, extended to include 0, is mapped to all codes.

    scale = (max(x, 0) - min(x, 0)) / (high - low), 1 where that is 0
    zero_point = clamp(low - round(min(x, 0) / scale), low, high)

    If an element is NaN or infinite, the scale is NaN and the zero point low.
    """

    def has_zero_point(self) -> bool:
        return True

    def check(self, format: Format, block: Block) -> None:
        if not format.is_integer:
            raise ValueError(
                f"scale=MinMax() makes a zero point, which {format.name} cannot have: use an integer format"
            )

    def find(self, parts: Blocks, format: Format) -> Found:
        above, below = (nan_beyond(end) for end in parts.range())
        scale = parts.once(_no_zero(_quotient((above + below).clamp(max=LARGEST), format.max - format.min)))
        zero_point = (format.min + (below / scale).round()).clamp(format.min, format.max)
        zero_point = torch.where(scale == scale, zero_point, format.min)
        return Found((scale, zero_point.to(format.dtype)), parts.x / scale)

    def weight_search(self, format: Format, signed: bool = False) -> Search | None:
        return weight_search.affine(format)


@dataclass(frozen=True, eq=False, repr=False)
class AbsMean(Rule):
    """scale = mean of |x| over elements that are not NaN, 1 where that is 0; codes of x / scale.

    Summed in float64, so that the order of the sum has no effect. A NaN becomes 0; an infinity counts as the largest
    float32.
    """

    is_sum: ClassVar[bool] = True

    def clips(self) -> bool:
        return True

    def padding(self) -> float:
        return math.nan  # which is not counted

    def of_ends(self) -> Rule:
        return Amax()

    def find(self, parts: Blocks, format: Format) -> Found:
        total = parts.magnitude().clamp(max=LARGEST).to(torch.float64).sum(parts.dims, keepdim=True)
        count = (parts.x == parts.x).to(torch.float64).sum(parts.dims, keepdim=True)
        total, count = (parts.combined(t, "sum") for t in (total, count))
        scale = parts.once(_no_zero((total / count.clamp(min=1.0)).to(torch.float32)))
        return Found((scale,), parts.x / scale)


def _quotient(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded; on CUDA, x / number is a product with the rounded reciprocal."""
    return x / torch.full_like(x, number)


def _no_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
