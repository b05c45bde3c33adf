"""Scale rules: from the elements of a block to its scale, and from the scale to what is encoded.

A rule is a frozen value; adding one is adding a class here. x is float32, cut into blocks; reductions run over a block,
keep its dimensions, and ignore NaN. max is the largest number of the format above its zero. A rule gives what is stored
and y, the elements that the format encodes; `step` is the s of

    x ≈ (decode(codes) - zero_point) · s

Sources: NVIDIA Transformer Engine for CurrentScaling, BlockScaling, Delayed and TwoLevel; OCP Microscaling Formats
Specification 1.0 and the round-up rule of its implementations (RCEIL) for Microscaling; Ma et al. 2024, "The Era of
1-bit LLMs", for AbsMean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.numerics import blocks, spelling
from hop.numerics.blocks import Block
from hop.numerics.formats import E4M3, E8M0, Float, Format, Integer, PowerOfTwo, float32
from hop.numerics.requantization import Division, Reciprocal, Requantization
from hop.numerics.spelling import Value

LARGEST = torch.finfo(torch.float32).max
RCEIL, FLOOR, CEIL, EVEN = MX_ROUNDINGS = ("rceil", "floor", "ceil", "even")


@dataclass(frozen=True)
class Blocks:
    """A tensor cut into blocks, as hop.numerics.blocks.split does."""

    x: Tensor  # float32, filled up with the rule's padding
    dims: list[int]  # that run over a block
    places: list[int]  # of the blocks along each dimension of the tensor
    dtype: torch.dtype  # of the tensor before it became float32

    def magnitude(self) -> Tensor:
        """|x|, 0 for NaN."""
        magnitude = self.x.abs()
        return torch.where(magnitude == magnitude, magnitude, 0.0)  # isnan is not vectorized by Inductor

    def amax(self) -> Tensor:
        """The largest magnitude of each block."""
        return self.combined(self.own_amax(), "max")

    def own_amax(self) -> Tensor:
        """The same, of what is at hand."""
        return self.magnitude().amax(self.dims, keepdim=True)

    def has_nan(self) -> Tensor:
        """Whether each block has a NaN, for a rule whose padding is none."""
        flags = (self.x != self.x).to(torch.float32).amax(self.dims, keepdim=True)
        return self.combined(flags, "max") > 0

    def combined(self, found: Tensor, op: str, block: Block | None = None) -> Tensor:
        """What was found of each block, its "max", "min" or "sum" with what other processes found where they have
        elements of the same block (hop.buffers.sharding). `block` says which blocks, if not those that x is cut
        into."""
        return found

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

    takes_ends: ClassVar[bool] = False
    """Whether 0 and infinity mean something where the caller gives the scale, as an amax does that can be either."""

    def padding(self) -> float:
        """What fills up blocks that are cut off; it counts for nothing."""
        return math.nan

    def has_zero_point(self) -> bool:
        """Whether a zero point is stored."""
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

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        """What is stored and encoded where the caller gives the scale."""
        tensors = (scale,) if zero_point is None else (scale, zero_point)
        return Found(tensors, parts.x / parts.once(self.step(tensors, format)))

    def given_of(self, scale: Tensor, format: Format) -> Tensor:
        """What the caller gives for `scale` to be stored."""
        return scale

    def step(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        """s, in float32."""
        return tensors[0]

    def scale_is_stored(self) -> bool:
        """Whether s is what is stored as scale."""
        return type(self).step is Rule.step

    def folds(self) -> bool:
        """Whether step is in part, or all, a number of few bits for each block, `fold`; `rest` is what is left."""
        return False

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part of the step whose product with any number of a float format is exact in bfloat16, but for numbers
        below its least normal one."""
        raise NotImplementedError

    def rest(self, tensors: Sequence[Tensor], format: Format) -> Tensor | None:
        """The step without `fold`, None for 1."""
        return None if self.rest_is_one() else self.step(tensors, format)

    def rest_is_one(self) -> bool:
        """Whether `fold` is all of the step."""
        return False

    def clips(self) -> bool:
        """Whether the scale that the rule finds leaves elements beyond the largest number."""
        return False

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        """The derivative of s by the scale that the caller gave, from it and the amax of each block."""
        return 1.0


@dataclass(frozen=True, eq=False, repr=False)
class Given(Rule):
    """No rule: the caller always gives the scale, and the zero point if the format is used with one.

    `requantize` says how hop.scaled goes from an exact integer sum to codes; quantize itself divides by the scale, or,
    for Reciprocal, multiplies by its reciprocal."""

    affine: bool = False
    requantize: Requantization = Division()

    def __post_init__(self) -> None:
        spelling.flag(self.affine, "Given: affine")
        if not isinstance(self.requantize, Requantization):
            raise TypeError(
                "Given: requantize must be a convention of hop.requantization, such as hop.requantization.Division(); "
                f"got {self.requantize!r}"
            )

    def check(self, format: Format, block: Block) -> None:
        if not isinstance(format, Integer) and self.requantize != Division():
            raise ValueError(f"Given: requantize={self.requantize} gives integers, and {format.name} has others")

    def has_zero_point(self) -> bool:
        return self.affine

    def find(self, parts: Blocks, format: Format) -> Found:
        raise ValueError(self.missing())

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        if not isinstance(self.requantize, Reciprocal):
            return super().given(parts, scale, zero_point, format)
        tensors = (scale,) if zero_point is None else (scale, zero_point)
        return Found(tensors, parts.x * parts.once(self.step(tensors, format).reciprocal()))

    def missing(self, prefix: str = "") -> str:
        needed = f"{prefix}scale= and {prefix}zero_point=" if self.affine else f"{prefix}scale="
        return f"this quantizer has no rule to find a scale; pass {needed}"


@dataclass(frozen=True, eq=False, repr=False)
class Amax(Rule):
    """scale = amax / max, 1 where that is 0; codes of x / scale.

    amax is at least `floor`. An infinity counts as the largest float32: it saturates, and the rest of its block
    becomes zeros."""

    floor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor", spelling.finite(self.floor, "Amax: floor"))

    def find(self, parts: Blocks, format: Format) -> Found:
        scale = parts.once(_no_zero(_quotient(parts.amax().clamp(self.floor, LARGEST), format.max - format.zero)))
        return Found((scale,), parts.x / scale)


@dataclass(frozen=True, eq=False, repr=False)
class MinMax(Rule):
    """The range of a block, widened to hold 0, fills the codes from low to high.

    scale = (max(x, 0) - min(x, 0)) / (high - low), 1 where that is 0
    zero_point = clamp(low - round(min(x, 0) / scale), low, high)"""

    def has_zero_point(self) -> bool:
        return True

    def check(self, format: Format, block: Block) -> None:
        if not isinstance(format, Integer):
            raise ValueError(
                f"scale=MinMax() makes a zero point, which {format.name} cannot have: use an integer format"
            )

    def find(self, parts: Blocks, format: Format) -> Found:
        known = torch.where(parts.x == parts.x, parts.x, 0.0).clamp(-LARGEST, LARGEST)
        above = parts.combined(known.amax(parts.dims, keepdim=True).clamp(min=0.0), "max")
        below = parts.combined(known.amin(parts.dims, keepdim=True).clamp(max=0.0), "min")
        scale = parts.once(_no_zero(_quotient((above - below).clamp(max=LARGEST), format.max - format.min)))
        zero_point = (format.min - (below / scale).round()).clamp(format.min, format.max)
        return Found((scale, zero_point.to(format.dtype)), parts.x / scale)


@dataclass(frozen=True, eq=False, repr=False)
class AbsMean(Rule):
    """scale = mean of |x| over the elements that are not NaN, 1 where that is 0; codes of x / scale.

    Summed in float64, so that the order of the sum does not show."""

    def clips(self) -> bool:
        return True

    def find(self, parts: Blocks, format: Format) -> Found:
        total = parts.magnitude().clamp(max=LARGEST).to(torch.float64).sum(parts.dims, keepdim=True)
        count = (parts.x == parts.x).to(torch.float64).sum(parts.dims, keepdim=True)
        total, count = (parts.combined(t, "sum") for t in (total, count))
        scale = parts.once(_no_zero((total / count.clamp(min=1.0)).to(torch.float32)))
        return Found((scale,), parts.x / scale)


@dataclass(frozen=True, eq=False, repr=False)
class CurrentScaling(Rule):
    """FP8: S = max / max(amax, eps); codes of x · S; stored is scale = 1 / S.

    S is 1 where amax is 0 or infinite, and at most the largest float32. With `power_of_two` S is then rounded down to
    a power of two, and so is that of a scale that the caller gives."""

    power_of_two: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "eps", spelling.finite(self.eps, f"{name}: eps"))
        spelling.flag(self.power_of_two, f"{name}: power_of_two")

    def folds(self) -> bool:
        return self.power_of_two

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def rest_is_one(self) -> bool:
        return self.power_of_two

    def most(self, dtype: torch.dtype) -> float:
        """The largest S, for x of `dtype`."""
        return LARGEST

    def find(self, parts: Blocks, format: Format) -> Found:
        amax = parts.amax().clamp(min=self.eps)
        quotient = torch.full_like(amax, format.max) / amax  # number / tensor would be a product with 1 / tensor
        factor = torch.where(quotient.isinf(), self.most(parts.dtype), quotient)
        factor = torch.where((amax == 0) | amax.isinf(), 1.0, factor)
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
    """FP8 in blocks: CurrentScaling, by default with powers of two, and with S at most the largest of x's dtype."""

    power_of_two: bool = True

    def most(self, dtype: torch.dtype) -> float:
        return min(torch.finfo(dtype).max, LARGEST)


@dataclass(frozen=True, eq=False, repr=False)
class Delayed(Rule):
    """FP8 by the amax of earlier steps, which the caller gives as scale: S = (max · 2^-margin) / amax; codes of x · S;
    stored is scale = 1 / S.

    S is 1 where amax is 0 or infinite, and at most the largest float32. hop.nn.AmaxHistory keeps the amax of the last
    `history` steps, and gives the largest of them, or the most recent."""

    margin: int = 0
    history: int = 1024
    most_recent: bool = False

    takes_ends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("margin", -64), ("history", 1)):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= 2**20:
                raise ValueError(f"Delayed: {name} must be an integer from {least} to 2^20, got {n!r}")
        spelling.flag(self.most_recent, "Delayed: most_recent")

    def check(self, format: Format, block: Block) -> None:
        if not isinstance(format, Float):
            raise ValueError(f"scale=Delayed() is for 8-bit floats, and {format.name} is none")
        if any(b != -1 for b in block):
            raise ValueError(f"scale=Delayed() has one amax for the whole tensor: block must be (-1, -1), got {block}")

    def find(self, parts: Blocks, format: Format) -> Found:
        raise ValueError(self.missing())

    def missing(self, prefix: str = "") -> str:
        return f"this quantizer takes the amax of earlier steps, which hop.nn.AmaxHistory keeps; pass {prefix}scale="

    def top(self, format: Format) -> float:
        """The number that amax becomes."""
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
    """MX: scale is a power of two, stored as its exponent; codes of x / scale. `rounding` says which power:

        "rceil"   amax · float32(1 / max), rounded up: no element is clipped
        "floor"   amax rounded down to a power of two, over the largest one of the format: the rule of the OCP
                  specification; elements may be clipped
        "ceil"    amax rounded up to a power of two, over that
        "even"    as "floor", of amax rounded to as many bits as the format's mantissa has, ties away from zero

    The last three are torchao's, bit for bit: a block with a NaN has the scale NaN, and where the scale is 2^-127,
    elements are divided by 2^-126."""

    exponent: PowerOfTwo = E8M0
    rounding: str = "rceil"

    takes_ends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.exponent, PowerOfTwo):
            raise TypeError(f"Microscaling: exponent must be a format of powers of two, got {self.exponent!r}")
        if self.rounding not in MX_ROUNDINGS:
            raise ValueError(f"Microscaling: rounding must be one of {MX_ROUNDINGS}, got {self.rounding!r}")

    def check(self, format: Format, block: Block) -> None:
        if self.rounding != RCEIL and not isinstance(format, Float):
            raise ValueError(
                f"scale={self} is for formats of floats, and {format.name} is none; take rounding={RCEIL!r}"
            )

    def padding(self) -> float:
        return 0.0

    def clips(self) -> bool:
        return self.rounding in (FLOOR, EVEN)

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        return {"scale": (self.exponent.dtype, block)}

    def find(self, parts: Blocks, format: Format) -> Found:
        amax = parts.amax()
        if self.rounding == RCEIL:
            return self.given(parts, amax * float32(1 / format.max), None, format)
        scale = torch.where(parts.has_nan(), math.nan, self._power(parts, amax, format))
        tensors = (self.exponent.encode(scale),)
        step = self.step(tensors, format)
        by = torch.where(step == step, step.clamp(min=2.0**-126), math.inf)
        return Found(tensors, parts.x / parts.once(by))

    def _power(self, parts: Blocks, amax: Tensor, format: Format) -> Tensor:
        """amax rounded to a power of two, over the largest of the format; an infinity counts as 2^128."""
        large = amax >= 1
        x = torch.where(large, amax / 2, amax).clamp(max=2.0**127)
        down = parts.floor_power_of_two(x)
        if self.rounding == CEIL:
            power = torch.where(x > down, 2 * down, down)
        elif self.rounding == EVEN:
            assert isinstance(format, Float)
            power = torch.where(x >= down * (2 - 2.0 ** -(format.mantissa_bits + 1)), 2 * down, down)
        else:
            power = down
        largest = exponent_of(format)
        return power * torch.where(large, 2.0 ** (1 - largest), 2.0**-largest)

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        tensors = (scale if scale.dtype == self.exponent.dtype else self.exponent.encode(scale),)
        return Found(tensors, parts.x / parts.once(self.step(tensors, format)))

    def step(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        return self.exponent.decode(tensors[0])

    def folds(self) -> bool:
        return True

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.exponent.decode(tensors[0])

    def rest_is_one(self) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class TwoLevel(Rule):
    """NVFP4: a scale in e4m3 for each block, under an amax in float32 for the tensor or for each row.

    S = min(448 · max / global_amax, largest float32), 1 where global_amax or S is 0
    scale = e4m3(amax of the block · (S · float32(1 / max)))
    codes of x · min(1 / (scale · (1 / S)), largest float32)
    s = scale · global_amax · float32(1 / (448 · max))

    global_amax is the amax of the tensor, or of the `outer` block. It is what the caller may give as scale."""

    outer: Block = (-1, -1)  # the elements that share a global_amax
    inner: Float = E4M3  # of the scale, 448 its largest number

    takes_ends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer", blocks.checked(self.outer))
        if not isinstance(self.inner, Float):
            raise TypeError(f"TwoLevel: inner must be a format of floats, such as hop.formats.E4M3; got {self.inner!r}")

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        return {"scale": (self.inner.dtype, block), "global_amax": (torch.float32, self.outer)}

    def check(self, format: Format, block: Block) -> None:
        ndim = max(len(block), len(self.outer))
        sizes = zip(blocks.per_dimension(block, ndim), blocks.per_dimension(self.outer, ndim), strict=True)
        if any(o not in (-1, b) for b, o in sizes):
            raise ValueError(f"scale=TwoLevel(outer={self.outer}): each size must be -1 or that of the block, {block}")

    def find(self, parts: Blocks, format: Format) -> Found:
        amax = parts.once(parts.amax())
        sizes = blocks.per_dimension(self.outer, len(parts.places))
        whole = [place for place, b in zip(parts.places, sizes, strict=True) if b == -1]
        if any(tracing.known_equal(amax.shape[d], 0) for d in whole):
            outer = amax.sum(whole, keepdim=True)  # of nothing: 0
        else:
            outer = amax.amax(whole, keepdim=True) if whole else amax
        outer = parts.combined(outer, "max", self.outer)
        return self._scaled(parts, amax, outer, format)

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        return self._scaled(parts, parts.amax(), scale, format)

    def _scaled(self, parts: Blocks, amax: Tensor, outer: Tensor, format: Format) -> Found:
        factor = (torch.full_like(outer, self.inner.max * format.max) / outer).clamp(max=LARGEST)
        factor = torch.where((outer == 0) | (factor == 0), 1.0, factor)
        inner = self.inner.encode(amax * (factor * float32(1 / format.max)))
        inverse = (self.inner.decode(inner) * factor.reciprocal()).reciprocal().clamp(max=LARGEST)
        return Found((inner, outer), parts.x * parts.once(inverse))

    def step(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        inner, amax = tensors
        return self.inner.decode(inner) * amax * float32(1 / (self.inner.max * format.max))

    def folds(self) -> bool:
        return True

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.inner.decode(tensors[0])

    def rest(self, tensors: Sequence[Tensor], format: Format) -> Tensor | None:
        return tensors[1] * float32(1 / (self.inner.max * format.max))

    def slope(self, amax: Tensor, given: Tensor, format: Format) -> Tensor | float:
        """With the rounding of the inner scale taken for the identity where it does not saturate."""
        exact = amax * (self.inner.max / given)
        inner = self.inner.decode(self.inner.encode(exact))
        slope = torch.where(self.inner.inside(exact), inner - exact, inner) / (self.inner.max * format.max)
        return torch.where(given == 0, 0.0, slope)


def exponent_of(format: Format) -> int:
    """The exponent of the largest power of two that is at most the largest number."""
    return math.frexp(format.max)[1] - 1


def _quotient(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded; on CUDA a plain x / number is a product with the rounded 1 / number."""
    return x / torch.full_like(x, number)


def _no_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
