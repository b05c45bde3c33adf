"""Scale rules for floats: FP8 with current, block and delayed scaling; MX; NVFP4.

Sources: NVIDIA Transformer Engine for CurrentScaling, BlockScaling, Delayed and TwoLevel; OCP Microscaling Formats
Specification 1.0 and the round-up rule of its implementations (RCEIL) for Microscaling.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat import tracing
from hop.numerics import blocks, spelling, weight_search
from hop.numerics.blocks import Block
from hop.numerics.formats import E4M3, E8M0, Float, Format, PowerOfTwo
from hop.numerics.rule import LARGEST, Blocks, Found, Rule, nan_beyond
from hop.numerics.spelling import shown
from hop.numerics.tables import float32
from hop.numerics.weight_search import Search

_SLACK = 1.5  # of weights in MX formats; measured on Gemma-3-270M and MiniLM, where 1.25 and 2 are worse
RCEIL, FLOOR, CEIL, EVEN = MX_ROUNDINGS = ("rceil", "floor", "ceil", "even")


@dataclass(frozen=True, eq=False, repr=False)
class CurrentScaling(Rule):
    """FP8 with the current amax: S = max / max(amax, eps); codes of x · S; the stored scale is 1 / S.

    S is 1 where amax is 0, NaN where it is infinite, and at most the largest float32. Unless the format has a NaN, S is
    NaN where an element is. With `power_of_two`, S is rounded down to a power of two, also for a scale given by the
    caller.
    """

    power_of_two: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "eps", spelling.finite(self.eps, f"{name}: eps"))
        spelling.flag(self.power_of_two, f"{name}: power_of_two")

    def has_block_scale(self) -> bool:
        return self.power_of_two

    def block_scale_of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def outer_scale_is_one(self) -> bool:
        return self.power_of_two

    def most(self, dtype: torch.dtype) -> float:
        """The largest S for x of `dtype`."""
        return LARGEST

    def find(self, parts: Blocks, format: Format) -> Found:
        amax = nan_beyond(parts.amax_for(format)).clamp(min=self.eps)
        quotient = torch.full_like(amax, format.max) / amax  # number / tensor would become a product with 1 / tensor
        factor = torch.where(quotient.isinf(), self.most(parts.dtype), quotient)
        factor = torch.where(amax == 0, 1.0, factor)
        if self.power_of_two:
            factor = parts.floor_power_of_two(factor)
        factor = parts.once(factor)
        return Found((factor.reciprocal(),), parts.x * factor)

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        if self.power_of_two:
            scale = parts.floor_power_of_two(scale.reciprocal()).reciprocal()
        return super().given(parts, scale, zero_point, format)


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaling(CurrentScaling):
    """FP8 in blocks: CurrentScaling with powers of two by default, and S at most the largest value of x's dtype."""

    power_of_two: bool = True

    def most(self, dtype: torch.dtype) -> float:
        return min(torch.finfo(dtype).max, LARGEST)


@dataclass(frozen=True, eq=False, repr=False)
class Delayed(Rule):
    """FP8 with the amax of earlier steps, which the caller passes as scale.

    S = (max · 2^-margin) / amax; codes of x · S; the stored scale is 1 / S. S is 1 where amax is 0 or infinite, and at
    most the largest float32. hop.nn.AmaxHistory keeps the amax of the last `history` steps, and passes the largest or
    the most recent.
    """

    margin: int = 0
    history: int = 1024
    most_recent: bool = False

    takes_ends: ClassVar[bool] = True
    is_delayed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("margin", -64), ("history", 1)):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= 2**20:
                raise ValueError(
                    f"Delayed: {name} must be an integer from {least} to 2^20, got {shown(n)}; give such a number"
                )
        spelling.flag(self.most_recent, "Delayed: most_recent")

    def check(self, format: Format, block: Block) -> None:
        if not format.is_float:
            raise ValueError(
                f"scale=Delayed() is for 8-bit floats, but {format.name} is not one; use hop.formats.E4M3 or E5M2"
            )
        if any(b != -1 for b in block):
            raise ValueError(
                f"scale=Delayed() has one amax for the whole tensor: block must be (-1, -1), got {block}; leave it out"
            )

    def find(self, parts: Blocks, format: Format) -> Found:
        raise ValueError(self.missing())

    def missing(self, prefix: str = "") -> str:
        return (
            f"{prefix}scale is None, but this quantizer needs the amax of earlier steps, which hop.nn.AmaxHistory "
            f"keeps; pass {prefix}scale="
        )

    def top(self, format: Format) -> float:
        """The value that amax is mapped to."""
        return format.max * 2.0**-self.margin

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        factor = torch.full_like(scale, self.top(format)) / scale
        factor = torch.where((scale == 0) | scale.isinf(), 1.0, factor).clamp(max=LARGEST)
        return Found((factor.reciprocal(),), parts.x * factor)

    def given_of(self, scale: Tensor, format: Format) -> Tensor:
        return scale * self.top(format)

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        return torch.where((given == 0) | given.isinf(), 0.0, 1 / self.top(format))


@dataclass(frozen=True, eq=False, repr=False)
class Microscaling(Rule):
    """MX: the scale is a power of two, stored as its exponent; codes of x / scale. `rounding` chooses the power:

        "rceil"     amax · float32(1 / max), rounded up: no element is clipped
        "floor"     amax rounded down to a power of two, divided by the format's largest one: the rule of the OCP
                    specification; elements may be clipped
        "ceil"      amax rounded up to a power of two, divided by the same
        "even"      as "floor", with amax first rounded to as many bits as the format's mantissa, ties away from zero

    The last three are torchao's, bit for bit: a block with a NaN has the scale NaN ("rceil" does that only in formats
    without a NaN), and where the scale is 2^-127, elements are divided by 2^-126.
    """

    exponent: PowerOfTwo = E8M0
    rounding: str = "rceil"

    takes_ends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.exponent, PowerOfTwo):
            raise TypeError(
                f"Microscaling: exponent must be a format of powers of two, got {shown(self.exponent)}; give "
                "one such as hop.formats.E8M0"
            )
        if self.rounding not in MX_ROUNDINGS:
            raise ValueError(
                f"Microscaling: rounding must be one of {MX_ROUNDINGS}, got {shown(self.rounding)}; use one of them"
            )

    def check(self, format: Format, block: Block) -> None:
        if self.rounding != RCEIL and not format.is_float:
            raise ValueError(f"scale={self} is for float formats, but {format.name} is not one; use rounding={RCEIL!r}")

    def clips(self) -> bool:
        return self.rounding in (FLOOR, EVEN)

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        return {"scale": (self.exponent.dtype, block)}

    def find(self, parts: Blocks, format: Format) -> Found:
        if self.rounding == RCEIL:
            return self.given(parts, parts.amax_for(format) * float32(1 / format.max), None, format)
        amax = parts.amax_or_nan()
        scale = torch.where(amax == amax, self._power(parts, amax, format), math.nan)
        tensors = (self.exponent.encode(scale),)
        step = self.scale_of(tensors, format)
        by = torch.where(step == step, step.clamp(min=2.0**-126), math.inf)
        return Found(tensors, parts.x / parts.once(by))

    def _power(self, parts: Blocks, amax: Tensor, format: Format) -> Tensor:
        """amax rounded to a power of two, divided by the format's largest one; an infinity counts as 2^128."""
        large = amax >= 1
        x = torch.where(large, amax / 2, amax).clamp(max=2.0**127)
        down = parts.floor_power_of_two(x)
        if self.rounding == CEIL:
            power = torch.where(x > down, 2 * down, down)
        elif self.rounding == EVEN:
            *_, mantissa_bits = format.parts
            power = torch.where(x >= down * (2 - 2.0 ** -(mantissa_bits + 1)), 2 * down, down)
        else:
            power = down
        largest = exponent_of(format)
        return power * torch.where(large, 2.0 ** (1 - largest), 2.0**-largest)

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        tensors = (scale if scale.dtype == self.exponent.dtype else self.exponent.encode(scale),)
        return Found(tensors, parts.x / parts.once(self.scale_of(tensors, format)))

    def weight_search(self, format: Format, signed: bool = False) -> Search | None:
        """Half the scale, which clips the largest elements, unless that makes the squared error 1.5 times as large:
        models suffer less from a few clipped elements than from steps of twice the size.
        """
        last = 2**self.exponent.bits - 2
        if self.clips():
            return weight_search.codes(format, (0, 1), last, float32(1 / _SLACK))
        return weight_search.codes(format, (0, -1), last, _SLACK)

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        return self.exponent.decode(tensors[0])

    def has_block_scale(self) -> bool:
        return True

    @property
    def block_scale_format(self) -> Format:
        return self.exponent

    def block_scale_of(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.exponent.decode(tensors[0])

    def outer_scale_is_one(self) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevel(Rule):
    """NVFP4: an e4m3 scale per block, and a float32 amax per tensor or per row.

        S = min(448 · max / global_amax, largest float32), 1 where global_amax or S is 0
        scale = e4m3(amax of the block · (S · float32(1 / max)))
        codes of x · min(1 / (scale · (1 / S)), largest float32)
        s = scale · global_amax · float32(1 / (448 · max))

    global_amax is the amax of the tensor, or of the `outer` block, and ignores NaN. The caller may pass it as scale. A
    block with a NaN has the scale NaN, unless the format has a NaN. An infinite global_amax makes every value that it
    scales NaN or infinite; from 2^128 / 448, 7.6e35, on, the product for s may overflow, which does the same.
    """

    outer: Block = (-1, -1)  # the block that shares a global_amax
    inner: Float = E4M3  # the format of the scale, with largest value 448

    takes_ends: ClassVar[bool] = True
    given_name: ClassVar[str] = "global_amax"

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer", blocks.checked(self.outer, "TwoLevel: outer"))
        if not isinstance(self.inner, Float):
            raise TypeError(
                f"TwoLevel: inner must be a format of floats, got {shown(self.inner)}; give one such as "
                "hop.formats.E4M3"
            )

    @property
    def outer_block(self) -> Block:
        return self.outer

    def of_blocks(self, change: Callable[[Block], Block]) -> Rule:
        return replace(self, outer=change(self.outer))

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        return {"scale": (self.inner.dtype, block), "global_amax": (torch.float32, self.outer)}

    def check(self, format: Format, block: Block) -> None:
        ndim = max(len(block), len(self.outer))
        sizes = zip(blocks.per_dimension(block, ndim), blocks.per_dimension(self.outer, ndim), strict=True)
        if any(o not in (-1, b) for b, o in sizes):
            raise ValueError(
                f"scale=TwoLevel(outer={self.outer}): each size must be -1 or that of the block, {block}; give such "
                "sizes"
            )

    def find(self, parts: Blocks, format: Format) -> Found:
        known = parts.once(parts.amax())  # as one NaN shall not be that of all blocks
        sizes = blocks.per_dimension(self.outer, len(parts.places))
        whole = [place for place, b in zip(parts.places, sizes, strict=True) if b == -1]
        if any(tracing.known_equal(known.shape[d], 0) for d in whole):
            outer = known.sum(whole, keepdim=True)  # empty: 0
        else:
            outer = known.amax(whole, keepdim=True) if whole else known
        outer = parts.combined(outer, "max", self.outer)
        return self._scaled(parts, known if format.has_nan else parts.once(parts.amax_or_nan()), outer, format)

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        return self._scaled(parts, parts.amax_for(format), scale, format)

    def _scaled(self, parts: Blocks, amax: Tensor, outer: Tensor, format: Format) -> Found:
        factor = (torch.full_like(outer, self.inner.max * format.max) / outer).clamp(max=LARGEST)
        factor = torch.where((outer == 0) | (factor == 0), 1.0, factor)
        inner = self.inner.encode(amax * (factor * float32(1 / format.max)))
        inverse = (self.inner.decode(inner) * factor.reciprocal()).reciprocal().clamp(max=LARGEST)
        return Found((inner, outer), parts.x * parts.once(inverse))

    def weight_search(self, format: Format, signed: bool = False) -> Search | None:
        return weight_search.codes(format, (0, -1, 1, 4, 5), self.inner.largest)

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        inner, amax = tensors
        return self.inner.decode(inner) * amax * self.outer_scale_factor(format)

    def has_block_scale(self) -> bool:
        return True

    @property
    def block_scale_format(self) -> Format:
        return self.inner

    def block_scale_of(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.inner.decode(tensors[0])

    @property
    def outer_scale_name(self) -> str:
        return "global_amax"

    def outer_scale_factor(self, format: Format) -> float:
        return float32(1 / (self.inner.max * format.max))

    def outer_scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor | None:
        return tensors[1] * self.outer_scale_factor(format)

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        """The derivative, with rounding of the inner scale treated as the identity unless it saturates."""
        exact = amax * (self.inner.max / given)
        inner = self.inner.decode(self.inner.encode(exact))
        slope = torch.where(self.inner.inside(exact), inner - exact, inner) / (self.inner.max * format.max)
        return torch.where(given == 0, 0.0, slope)


def exponent_of(format: Format) -> int:
    """The exponent of the largest power of two that is at most the format's largest value."""
    return math.frexp(format.max)[1] - 1
