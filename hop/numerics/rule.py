"""Rule: the base class of scale rules, and the blocks they read.

A rule is a frozen value; to add one, add a subclass. x is float32, split into blocks; reductions run over a block and
keep its dimensions. max is the format's largest value above its zero. A rule returns the stored tensors and y, the
elements that the format encodes; `scale_of` is the s of

    x ≈ (decode(codes) - zero_point) · s            minus an offset m, if the rule has one

A format with a code for NaN keeps the NaN of each element, and its rules compute amax without them. In other formats a
block with a NaN has the scale NaN (`Blocks.amax_for`), so all of its values are NaN.

Code elsewhere only uses a rule's properties and methods, so new rules need no changes there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.numerics.blocks import Block
from hop.numerics.formats import E8M0, Format
from hop.numerics.requantization import Convention
from hop.numerics.spelling import Value
from hop.numerics.weight_search import Search

LARGEST = torch.finfo(torch.float32).max


def nan_beyond(amax: Tensor) -> Tensor:
    """An amax, NaN where it is infinite."""
    return torch.where(amax <= LARGEST, amax, math.nan)


_TOLD = ("scale_of", "block_scale_format")


@dataclass(frozen=True)
class Blocks:
    """A tensor split into blocks, as by hop.numerics.blocks.split."""

    x: Tensor  # float32, padded with the rule's padding
    dims: list[int]  # dimensions that run over a block
    places: list[int]  # dimensions that count blocks, for each dimension of the tensor
    dtype: torch.dtype  # dtype of the tensor before it was converted to float32
    block: Block  # block sizes as in hop.numerics.blocks

    def magnitude(self) -> Tensor:
        """|x|, with NaN as 0."""
        magnitude = self.x.abs()
        return torch.where(magnitude == magnitude, magnitude, 0.0)  # Inductor does not vectorize isnan

    def amax(self) -> Tensor:
        """The largest magnitude of each block, NaN left out."""
        return self.combined(self.own_amax(), "max")

    def own_amax(self) -> Tensor:
        """The largest magnitude of each block in this process's data."""
        return self.magnitude().amax(self.dims, keepdim=True)

    def amax_or_nan(self) -> Tensor:
        """The largest magnitude of each block, NaN if it has a NaN; for a rule whose padding is 0."""
        return self.combined(self.x.abs().amax(self.dims, keepdim=True), "max")

    def amax_for(self, format: Format) -> Tensor:
        """`amax` if the format has a code for NaN, otherwise `amax_or_nan`."""
        return self.amax() if format.has_nan else self.amax_or_nan()

    def range(self) -> tuple[Tensor, Tensor]:
        """The largest value above 0 of each block, and the magnitude of the least one below 0; both NaN if the block
        has a NaN. For a rule whose padding is 0.
        """
        above = self.x.amax(self.dims, keepdim=True).clamp(min=0.0)
        below = (-self.x).amax(self.dims, keepdim=True).clamp(min=0.0)
        return self.combined(above, "max"), self.combined(below, "max")

    def combined(self, values: Tensor, op: str, block: Block | None = None) -> Tensor:
        """Combine a per-block statistic with those of other processes that have elements of the same block.

        `op` is "max", "min" or "sum"; see hop.tensor.buffers.sharding. `block` is given if the blocks are not those of
        x. Values of a "max" are non-negative or NaN, which is the largest.
        """
        return values

    def floor_power_of_two(self, x: Tensor) -> Tensor:
        """The largest power of two, at least 2^-128, that is at most x > 0."""
        up = E8M0.decode(E8M0.encode(x))
        return torch.where(up > x, up / 2, up)

    def by_part(self, compute: Callable[["Blocks"], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(self), whose results have one element per block, possibly from some blocks at a time."""
        return compute(self)

    def once(self, scale: Tensor) -> Tensor:
        """Mark `scale` to be computed once per block, not again for each element."""
        return scale


class Found(NamedTuple):
    """The stored tensors, in the order of `Rule.stored`, and the values to encode."""

    tensors: tuple[Tensor, ...]
    y: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Rule(Value):
    """Base class of scale rules: one float32 scale per block, which divides the elements if the caller gives it."""

    takes_ends: ClassVar[bool] = False
    """Whether a given scale may be 0 or infinite, because it is an amax."""

    given_name: ClassVar[str] = "scale"
    """The name of the stored tensor that a caller's scale becomes."""

    is_static: ClassVar[bool] = False
    """Whether the caller always gives the scale, found beforehand."""

    is_delayed: ClassVar[bool] = False
    """Whether the caller passes the amax of earlier steps (Delayed)."""

    is_sum: ClassVar[bool] = False
    """Whether a scale is computed from a sum over its block, whose order matters."""

    @property
    def outer_block(self) -> Block | None:
        """The block of elements that share a caller's scale, if it is larger than a block; else None."""
        return None

    def of_blocks(self, change: Callable[[Block], Block]) -> "Rule":
        """The rule with `change` applied to each of its own blocks."""
        return self

    @property
    def requantization(self) -> Convention | None:
        """The convention by which hop.scaled converts an exact sum to codes, if the scale is given; else None."""
        return None

    @property
    def amax_floor(self) -> float | None:
        """The lower bound of amax if the scale is amax / max; None for other rules."""
        return None

    @property
    def scale_is_stored(self) -> bool:
        """Whether the scale s is the first stored tensor itself."""
        return type(self).scale_of is Rule.scale_of

    def of_ends(self) -> "Rule":
        """The rule that finds a scale from the minimum and maximum of a block, taking all values into account."""
        return self

    def padding(self) -> float:
        """The padding of incomplete blocks, which must not affect the result."""
        return 0.0

    def has_zero_point(self) -> bool:
        """Whether a zero point is stored."""
        return False

    def zero(self, format: Format) -> int:
        """The code of 0 in an integer format, if no zero point is stored."""
        return format.zero

    def has_offset(self) -> bool:
        """Whether a float offset is subtracted from each element of a block: x ≈ (decode(codes) - zero) · s - m."""
        return False

    @property
    def is_compound(self) -> bool:
        """Whether there is an offset, or s is computed from tensors with other blocks.

        Codes and the first stored tensor then do not determine the values.
        """
        return False

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        """The name of each stored tensor, its dtype, and the block of elements that one of its elements serves."""
        scale: dict[str, tuple[torch.dtype, Block]] = {"scale": (torch.float32, block)}
        return scale | ({"zero_point": (format.dtype, block)} if self.has_zero_point() else {})

    def check(self, format: Format, block: Block) -> None:
        """Raise ValueError if the rule does not support a format or block."""

    def find(self, parts: Blocks, format: Format) -> Found:
        """Find the scales of blocks, and scale the elements."""
        raise NotImplementedError

    def weight_search(self, format: Format, signed: bool = False) -> Search | None:
        """How hop.quantize_weight searches for scales of less squared error, which may be negative if `signed`; None if
        it keeps those of `find`.
        """
        return None

    def missing(self, prefix: str = "") -> str | None:
        """The error text for a missing scale; None if the rule finds one."""
        return None

    def refuses_scale(self, prefix: str = "") -> str | None:
        """The error text for a given scale; None if the rule accepts one."""
        return None

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        """The stored tensors and values to encode for a given scale."""
        tensors = (scale,) if zero_point is None else (scale, zero_point)
        return Found(tensors, parts.x / parts.once(self.scale_of(tensors, format)))

    def given_of(self, scale: Tensor, format: Format) -> Tensor:
        """The scale that a caller must pass so that `scale` is stored."""
        return scale

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        """The scale s, in float32."""
        return tensors[0]

    def offset_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """m, in float32; None if the rule has no offset."""
        return None

    def has_block_scale(self) -> bool:
        """Whether part or all of s is a per-block number of few bits, `block_scale_of`.

        `outer_scale_of` is the remaining factor.
        """
        return False

    def block_scale_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part of s whose product with every value of a float format is exact in bfloat16, except for subnormal
        results.
        """
        raise NotImplementedError

    def outer_scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor | None:
        """s without the block scale; None for 1."""
        return None if self.outer_scale_is_one() else self.scale_of(tensors, format)

    def outer_scale_is_one(self) -> bool:
        """Whether the block scale is all of s."""
        return False

    @property
    def block_scale_format(self) -> Format | None:
        """The format in which the block scale is stored as codes; None if it is stored as its value."""
        return None

    @property
    def outer_scale_name(self) -> str | None:
        """The stored tensor that contributes to s besides the block scale; None if there is none."""
        return None if self.has_block_scale() else "scale"

    def outer_scale_factor(self, format: Format) -> float:
        """The factor between that tensor and the outer scale."""
        return 1.0

    @property
    def scale_is_told(self) -> bool:
        """Whether `block_scale_format`, `outer_scale_name` and `outer_scale_factor` describe what `scale_of` computes.

        This is not the case if a subclass overrides `scale_of` without `block_scale_format`.
        """
        first = {name: next(i for i, c in enumerate(type(self).__mro__) if name in vars(c)) for name in _TOLD}
        return first["scale_of"] >= first["block_scale_format"]

    def clips(self) -> bool:
        """Whether the rule's scale may leave elements beyond the largest value."""
        return False

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        """The derivative of s with respect to the caller's scale, from the amax of each block and that scale."""
        return 1.0
