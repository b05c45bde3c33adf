"""Rule: what scale rules share, and the blocks that they look at.

A rule is a frozen value; adding one is adding a subclass. x is float32, cut into blocks; reductions run over a block,
keep its dimensions. max is the largest number of the format above its zero. A rule gives what is stored and y, the
elements that the format encodes; `scale_of` is the s of

    x ≈ (decode(codes) - zero_point) · s            less an offset m, where the rule has one

A format whose codes include NaN keeps the NaN of each element, and its rules find an amax without them. In another
format a block with a NaN has the scale NaN (`Blocks.amax_for`), so that all of its numbers are NaN.

What code outside asks a rule is a property or a method here, so that a new rule answers for itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.numerics.blocks import Block
from hop.numerics.formats import E8M0, Format
from hop.numerics.requantization import Convention
from hop.numerics.spelling import Value

LARGEST = torch.finfo(torch.float32).max


def nan_beyond(amax: Tensor) -> Tensor:
    """An amax, NaN where it is infinite."""
    return torch.where(amax <= LARGEST, amax, math.nan)


_TOLD = ("scale_of", "block_scale_format")
_RENAMED = {"step": "scale_of", "fold": "block_scale_of", "folds": "has_block_scale", "rest": "outer_scale_of"}
_RENAMED |= {"rest_is_one": "outer_scale_is_one"}


@dataclass(frozen=True)
class Blocks:
    """A tensor cut into blocks, as hop.numerics.blocks.split does."""

    x: Tensor  # float32, filled up with the rule's padding
    dims: list[int]  # that run over a block
    places: list[int]  # of the blocks along each dimension of the tensor
    dtype: torch.dtype  # of the tensor before it became float32
    block: Block  # the elements of one, as hop.numerics.blocks has it

    def magnitude(self) -> Tensor:
        """|x|, 0 for NaN."""
        magnitude = self.x.abs()
        return torch.where(magnitude == magnitude, magnitude, 0.0)  # isnan is not vectorized by Inductor

    def amax(self) -> Tensor:
        """The largest magnitude of each block, NaN left out."""
        return self.combined(self.own_amax(), "max")

    def own_amax(self) -> Tensor:
        """The same, of what is at hand."""
        return self.magnitude().amax(self.dims, keepdim=True)

    def amax_or_nan(self) -> Tensor:
        """The largest magnitude of each block, NaN where it has a NaN; for a rule whose padding is 0."""
        return self.combined(self.x.abs().amax(self.dims, keepdim=True), "max")

    def amax_for(self, format: Format) -> Tensor:
        """`amax` where the format has a code for NaN, `amax_or_nan` where it has none."""
        return self.amax() if format.has_nan else self.amax_or_nan()

    def range(self) -> tuple[Tensor, Tensor]:
        """The largest number above 0 of each block, and the magnitude of the least one below 0; both are NaN where the
        block has a NaN; for a rule whose padding is 0."""
        above = self.x.amax(self.dims, keepdim=True).clamp(min=0.0)
        below = (-self.x).amax(self.dims, keepdim=True).clamp(min=0.0)
        return self.combined(above, "max"), self.combined(below, "max")

    def combined(self, values: Tensor, op: str, block: Block | None = None) -> Tensor:
        """What was found of each block, its "max", "min" or "sum" with what other processes found where they have
        elements of the same block (hop.tensor.buffers.sharding). `block` says which blocks, if not those that x is cut
        into. Of "max" all values are from 0 up, or NaN, which counts most."""
        return values

    def floor_power_of_two(self, x: Tensor) -> Tensor:
        """The largest power of two, from 2^-128, that is at most x > 0."""
        up = E8M0.decode(E8M0.encode(x))
        return torch.where(up > x, up / 2, up)

    def once(self, scale: Tensor) -> Tensor:
        """`scale`, to be computed once for each block, and not again for each element."""
        return scale


class Found(NamedTuple):
    """What is stored, in the order of `Rule.stored`, and what is encoded."""

    tensors: tuple[Tensor, ...]
    y: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Value):
    """What rules share: one float32 scale for each block, by which elements are divided where the caller gives it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a method by the name that it had in 0.1, which nothing would call."""
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if callable(vars(cls).get(old)):
                raise TypeError(f"{cls.__name__}: Rule.{old} is now Rule.{new}; name the method so")

    takes_ends: ClassVar[bool] = False
    """Whether 0 and infinity mean something where the caller gives the scale, as an amax does that can be either."""

    given_name: ClassVar[str] = "scale"
    """The stored tensor that is the scale which a caller gives."""

    is_static: ClassVar[bool] = False
    """Whether the caller always gives the scale itself, which was found before."""

    is_delayed: ClassVar[bool] = False
    """Whether the caller gives the amax of earlier steps (Delayed)."""

    is_sum: ClassVar[bool] = False
    """Whether a scale is found from a sum over its block, which has an order."""

    @property
    def outer_block(self) -> Block | None:
        """The elements that share what a caller gives as scale, if they are more than a block; else None."""
        return None

    def of_blocks(self, change: Callable[[Block], Block]) -> "Rule":
        """The rule with `change` of each block that it has itself."""
        return self

    @property
    def requantization(self) -> Convention | None:
        """How hop.scaled goes from an exact sum to codes, where the scale is given; else None."""
        return None

    @property
    def amax_floor(self) -> float | None:
        """What amax is at least, where the scale is amax / max; None for other rules."""
        return None

    @property
    def scale_is_stored(self) -> bool:
        """Whether s is the first stored tensor itself."""
        return type(self).scale_of is Rule.scale_of

    def of_ends(self) -> "Rule":
        """The rule that finds a scale from the least and the largest number of a block, where all numbers count."""
        return self

    def padding(self) -> float:
        """What fills up blocks that are cut off; it counts for nothing."""
        return 0.0

    def has_zero_point(self) -> bool:
        """Whether a zero point is stored."""
        return False

    def zero(self, format: Format) -> int:
        """The code of 0, of a format of integers, where no zero point is stored."""
        return format.zero

    def has_offset(self) -> bool:
        """Whether a number in floats is subtracted from each element of a block: x ≈ (decode(codes) - zero) · s - m."""
        return False

    @property
    def is_compound(self) -> bool:
        """Whether there is such a number, or s is made of tensors that serve other blocks: then the codes and the first
        stored tensor alone are not the tensor."""
        return False

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        """The name of each stored tensor, its dtype, and the block of elements that one of its elements serves."""
        scale: dict[str, tuple[torch.dtype, Block]] = {"scale": (torch.float32, block)}
        return scale | ({"zero_point": (format.dtype, block)} if self.has_zero_point() else {})

    def check(self, format: Format, block: Block) -> None:
        """Raise ValueError if the rule makes no sense here."""

    def find(self, parts: Blocks, format: Format) -> Found:
        """The rule."""
        raise NotImplementedError

    def missing(self, prefix: str = "") -> str | None:
        """What to say where the caller gives no scale, None if the rule finds one."""
        return None

    def refuses_scale(self, prefix: str = "") -> str | None:
        """What to say where the caller gives a scale, None if the rule takes one."""
        return None

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        """What is stored and encoded where the caller gives the scale."""
        tensors = (scale,) if zero_point is None else (scale, zero_point)
        return Found(tensors, parts.x / parts.once(self.scale_of(tensors, format)))

    def given_of(self, scale: Tensor, format: Format) -> Tensor:
        """What the caller gives for `scale` to be stored."""
        return scale

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        """s, in float32."""
        return tensors[0]

    def offset_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """m, in float32, of a rule that has one."""
        return None

    def has_block_scale(self) -> bool:
        """Whether s is in part, or all, a number of few bits for each block, `block_scale_of`; `outer_scale_of` is what
        is left."""
        return False

    def block_scale_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part of the step whose product with any number of a float format is exact in bfloat16, but for numbers
        below its least normal one."""
        raise NotImplementedError

    def outer_scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor | None:
        """s without the block scale, None for 1."""
        return None if self.outer_scale_is_one() else self.scale_of(tensors, format)

    def outer_scale_is_one(self) -> bool:
        """Whether the block scale is all of s."""
        return False

    @property
    def block_scale_format(self) -> Format | None:
        """The format of the codes that the block scale is stored as; None where it is stored as it is."""
        return None

    @property
    def outer_scale_name(self) -> str | None:
        """The stored tensor that s has besides the block scale; None if it has none."""
        return None if self.has_block_scale() else "scale"

    def outer_scale_factor(self, format: Format) -> float:
        """What that tensor is multiplied by to give the outer scale."""
        return 1.0

    @property
    def scale_is_told(self) -> bool:
        """Whether `block_scale_format`, `outer_scale_name` and `outer_scale_factor` say what `scale_of` computes. Not
        so where a subclass has a `scale_of` of its own, and no `block_scale_format` beside it."""
        first = {name: next(i for i, c in enumerate(type(self).__mro__) if name in vars(c)) for name in _TOLD}
        return first["scale_of"] >= first["block_scale_format"]

    def clips(self) -> bool:
        """Whether the scale that the rule finds leaves elements beyond the largest number."""
        return False

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        """The derivative of s by the scale that the caller gave, from it and the amax of each block."""
        return 1.0
