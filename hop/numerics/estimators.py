"""Gradient estimators: what stands for the derivative of rounding, as values.

With u = x / s, n the number that u is rounded to, from the zero point if there is one, and x̂ = n · s, a class says

    of_input    the gradient of x,        from that of x̂, g
    of_scale    the gradient of s, element by element: it is summed over those that share the scale

Where u lies beyond the largest or the least number it is clipped. A Quantizer has one as its field `gradient`; None and
`STE()` are the same. Layers compute by it in training; eval mode and frozen layers need none.

Most leave the numbers as they are. Those with `adds_noise` put a float in the place of n in training, and their
derivatives are those of what they put there:

    number      what stands for u, from n, how far the numbers around u are apart, and a random number

Sources: Bengio et al. 2013 (arXiv 1308.3432) for STE; Esser et al. 2020, "Learned Step Size Quantization" (arXiv
1902.08153); Choi et al. 2018, "PACT" (arXiv 1805.06085); Lee et al. 2021, "EWGS" (arXiv 2104.00903); Gong et al. 2019,
"Differentiable Soft Quantization" (arXiv 1908.05033), for soft rounding; Défossez et al. 2021, "Differentiable Model
Compression via Pseudo Quantization Noise" (arXiv 2104.09987), for noise injection; Fan et al. 2020, "Training with
Quantization Noise for Extreme Model Compression" (arXiv 2004.07320), for Quant-Noise.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.numerics.formats import Format
from hop.numerics.spelling import Value, shown
from hop.numerics.tables import lookup, search

__all__ = [
    "EWGS",
    "LSQ",
    "PACT",
    "STE",
    "Derivatives",
    "Estimator",
    "NoiseInjection",
    "Position",
    "QuantNoise",
    "SoftRounding",
]


class Derivatives(NamedTuple):
    """Of x̂ = fake_quantize(x) with the rounding taken for the identity, element by element:

    inside       ∂x̂/∂x: true unless the code was clipped
    scale        ∂x̂/∂s = (codes - zero_point) - x / s inside, (codes - zero_point) where clipped
    zero_point   ∂x̂/∂zero_point = 0 inside, -s where clipped
    units        x / s

    Sources: Esser et al. 2020, "Learned Step Size Quantization", without its gradient scale, for s; Bhalgat et al. 2020
    "LSQ+: Improving low-bit quantization", for the zero point."""

    inside: Tensor
    scale: Tensor
    zero_point: Tensor
    units: Tensor


class Position(NamedTuple):
    """Where the elements of x lie, each of x's shape, in float32.

    Attributes:
        u: x / s, 0 where it is NaN.
        n: what u was rounded to, or what noise put in its place.
        inside: whether it was not clipped.
        sharing: how many elements share a scale.
        most: the largest number of the format.
    """

    u: Tensor
    n: Tensor
    inside: Tensor
    sharing: float
    most: float


@dataclass(frozen=True, eq=False, repr=False)
class Estimator(Value):
    """The base of gradient estimators, and the straight-through one: a subclass is a frozen dataclass that replaces one
    of its two gradients, or both; one that adds noise, `number` too. It stands in spellings by its module and name."""

    by_layer: ClassVar[bool] = True
    """Whether layers multiply the gradients of scales that learn by LSQ's 1 / √(N · max)."""

    adds_noise: ClassVar[bool] = False
    """Whether training computes with `number`, which takes random bits, in the place of codes."""

    def check(self, format: Format) -> None:
        """Raise ValueError for a format that it has no derivative for."""

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        """The gradient of x: g where x was not clipped, and 0 where it was."""
        return torch.where(at.inside, grad, 0.0)

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        """The gradient of s: g · (n - u) where x was not clipped, and g · n where it was."""
        return grad * (at.n - torch.where(at.inside, at.u, 0.0))

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        """What stands for u in training where `adds_noise`; n for what is clipped, whatever this says.

        Args:
            u: x / s, float32.
            n: the number of the format that is nearest to it.
            width: how far the two numbers that u lies between are apart: 1 in integers.
            random: independent and uniform, in the middles of 256 equal parts of 0 to 1."""
        return n


@dataclass(frozen=True, eq=False, repr=False)
class STE(Estimator):
    """Straight through: as though rounding were the identity."""


@dataclass(frozen=True, eq=False, repr=False)
class LSQ(Estimator):
    """Straight through, with the gradient of s by 1 / √(N · max), N how many elements share it.

    For a scale that a caller gives to hop.quantize or hop.fake_quantize. Layers with scales that learn do so anyway,
    with N the features of one example."""

    by_layer: ClassVar[bool] = False

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        return super().of_scale(grad, at) / math.sqrt(at.sharing * at.most)


@dataclass(frozen=True, eq=False, repr=False)
class PACT(Estimator):
    """A learned clipping: with α = s · max, the gradient of α is g where x is clipped at α, and 0 elsewhere; that of s
    is g · n where x is clipped, and 0 inside."""

    by_layer: ClassVar[bool] = False

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        return torch.where(at.inside, 0.0, grad * at.n)


@dataclass(frozen=True, eq=False, repr=False)
class EWGS(Estimator):
    """Element-wise gradient scaling: g · (1 + δ · sign(g) · (u - n)), so that elements which a step moves across the
    boundary of their code get a larger one.

    Args:
        delta: δ, 0 or more.

    Raises:
        ValueError: it is negative or not finite.
    """

    delta: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.delta, bool) or not isinstance(self.delta, int | float) or not 0 <= self.delta < math.inf:
            raise ValueError(f"EWGS: delta must be a finite number of 0 or more, got {shown(self.delta)}; give 0.2")

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        scaled = grad * (1 + self.delta * grad.sign() * (at.u - at.n))
        return torch.where(at.inside, scaled, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class SoftRounding(Estimator):
    """The derivative of ⌊u⌋ + ½ + tanh(t · r) / (2 tanh(t / 2)), r = u - ⌊u⌋ - ½, which is near 1 for a small t, and a
    peak at the boundaries between codes for a large one: t (1 - tanh²(t · r)) / (2 tanh(t / 2)).

    For integers. Each temperature is another quantizer: a compiled program is compiled anew for it.

    Args:
        temperature: t, above 0.

    Raises:
        ValueError: it is not above 0 and finite.
    """

    temperature: float = 5.0

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, int | float) or not 0 < t < math.inf:
            raise ValueError(f"SoftRounding: temperature must be above 0 and finite, got {shown(t)}; give 5.0")

    def check(self, format: Format) -> None:
        if not format.is_integer:
            raise ValueError(
                f"SoftRounding: the codes of {format.name} are not one step apart; take an integer format, or EWGS()"
            )

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        t = float(self.temperature)
        r = at.u - at.u.floor() - 0.5
        slope = t * (1 - torch.tanh(t * r).square()) / (2 * math.tanh(t / 2))
        return torch.where(at.inside, grad * slope, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class NoiseInjection(Estimator):
    """Noise in the place of rounding: x̂ = s · (u + w · (r - ½)) in training, with r uniform in 0 to 1 and w how far the
    numbers around u are apart: noise as wide as a code, so that weights learn to bear their rounding (Défossez et al.
    2021). What is clipped gets none.

    Nothing is rounded, so the gradients are the derivatives themselves: of x 1 inside, of s w · (r - ½) inside and n
    where clipped. In eval mode, once frozen, and in a stage with another gradient the numbers are those of codes."""

    adds_noise: ClassVar[bool] = True

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        return u + width * (random - 0.5)


@dataclass(frozen=True, eq=False, repr=False)
class QuantNoise(Estimator):
    """A random part of the elements is rounded in training, straight through, and the others stay floats (Fan et al.
    2020): x̂ = s · n with probability `rate`, x otherwise, drawn anew in each call. What is clipped is always rounded.

    Args:
        rate: above 0, at most 1, in steps of 1/256.

    Raises:
        ValueError: it is none.
    """

    rate: float = 0.5

    adds_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 < self.rate <= 1:
            raise ValueError(f"QuantNoise: rate must be above 0 and at most 1, got {shown(self.rate)}; give 0.5")

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        return torch.where(random < self.rate, n, u)


def check(gradient: Estimator, format: Format, stochastic: bool) -> None:
    """Raise for a gradient that a quantizer of `format` cannot have."""
    if not isinstance(gradient, Estimator):
        raise TypeError(
            f"gradient must be one of hop.estimators, or None; got {shown(gradient)}; give one such as "
            "hop.estimators.EWGS()"
        )
    if stochastic and gradient.adds_noise:
        raise ValueError(
            f"gradient={gradient} adds noise in the place of rounding, which stochastic=True does at random; take "
            "stochastic=False"
        )
    gradient.check(format)


def with_noise(
    gradient: Estimator | None, format: Format, u: Tensor, noise: Tensor, zero: Sequence[Tensor | int]
) -> Tensor:
    """What u, in units of a format, becomes in training; of `noise`, random integers, whose low 8
    bits are taken."""
    assert gradient is not None
    n = format.decode(format.encode(u, None, *zero), *zero)
    random = (torch.bitwise_and(noise.to(torch.int32), 255).to(torch.float32) + 0.5) / 256
    number = gradient.number(u, n, _widths(format, u), random)
    return torch.where(format.inside(u, *zero), number, n)


def _widths(format: Format, u: Tensor) -> Tensor:
    """How far the numbers around u are apart; beyond the ends, the last two."""
    if format.is_integer:
        return torch.ones_like(u)
    gaps = [b - a for a, b in itertools.pairwise(format.numbers)]
    return lookup(gaps, search(u, format.numbers[:-1]))
