"""Gradient estimators: replacements for the derivative of rounding, as values.

With u = x / s, n the value that u is rounded to (minus the zero point, if any), and x̂ = n · s, an estimator defines

    of_input    the gradient of x, from the gradient g of x̂
    of_scale    the gradient of s per element, to be summed over the elements that share the scale

u is clipped if it is outside of the format's range. A Quantizer has an estimator in its field `gradient`; None is the
same as `STE()`. Layers use it in training; eval mode and frozen layers do not need one.

Most estimators do not change the forward pass. Those with `adds_noise` replace n by a float in training, and their
derivatives are those of that float:

    number      the replacement, from u, n, the distance of the format's values around u, and a random number

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
    "Estimator",
    "NoiseInjection",
    "QuantNoise",
    "SoftRounding",
]


class Derivatives(NamedTuple):
    """Elementwise derivatives of x̂ = fake_quantize(x), treating rounding as the identity.

        inside       ∂x̂/∂x: true unless the code was clipped
        scale        ∂x̂/∂s = (codes - zero_point) - x / s inside, (codes - zero_point) where clipped
        zero_point   ∂x̂/∂zero_point = 0 inside, -s where clipped
        units        x / s

    Sources: Esser et al. 2020, "Learned Step Size Quantization", without its gradient scale, for s; Bhalgat et al. 2020
    "LSQ+: Improving low-bit quantization", for the zero point.
    """

    inside: Tensor
    scale: Tensor
    zero_point: Tensor
    units: Tensor


class Position(NamedTuple):
    """The elements of x relative to their format; tensors have x's shape and are float32.

    Attributes:
        u: x / s, 0 where it is NaN.
        n: the rounded value of u, or the value with noise.
        inside: whether the element was not clipped.
        sharing: the number of elements that share a scale.
        most: the largest value of the format.
    """

    u: Tensor
    n: Tensor
    inside: Tensor
    sharing: float
    most: float


@dataclass(frozen=True, eq=False, repr=False)
class Estimator(Value):
    """Base class of gradient estimators; its gradients are straight-through.

    A subclass is a frozen dataclass that overrides one or both gradients, and `number` if it adds noise. Text spells it
    by module and name.
    """

    by_layer: ClassVar[bool] = True
    """Whether layers multiply the gradients of learned scales by LSQ's 1 / √(N · max)."""

    adds_noise: ClassVar[bool] = False
    """Whether training replaces codes by `number`, which needs random bits."""

    def check(self, format: Format) -> None:
        """Raise ValueError if the estimator does not support a format."""

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        """The gradient of x: g where x was not clipped, else 0."""
        return torch.where(at.inside, grad, 0.0)

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        """The gradient of s: g · (n - u) where x was not clipped, else g · n."""
        return grad * (at.n - torch.where(at.inside, at.u, 0.0))

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        """The value that replaces u in training if `adds_noise`. Clipped elements always use n.

        Args:
            u: x / s, float32.
            n: the nearest value of the format.
            width: the distance of the two format values around u; 1 for integers.
            random: independent and uniform, in the middles of 256 equal parts of [0, 1].
        """
        return n


@dataclass(frozen=True, eq=False, repr=False)
class STE(Estimator):
    """Straight-through estimator: treats rounding as the identity."""


@dataclass(frozen=True, eq=False, repr=False)
class LSQ(Estimator):
    """Straight-through, with the gradient of s divided by √(N · max), where N elements share it.

    For scales passed to hop.quantize or hop.fake_quantize. Layers with learned scales do this anyway, with N the number
    of features of one example.
    """

    by_layer: ClassVar[bool] = False

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        return super().of_scale(grad, at) / math.sqrt(at.sharing * at.most)


@dataclass(frozen=True, eq=False, repr=False)
class PACT(Estimator):
    """Learned clipping: with α = s · max, the gradient of α is g where x is clipped at α, else 0.

    The gradient of s is therefore g · n where x is clipped, and 0 inside.
    """

    by_layer: ClassVar[bool] = False

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        return torch.where(at.inside, 0.0, grad * at.n)


@dataclass(frozen=True, eq=False, repr=False)
class EWGS(Estimator):
    """Element-wise gradient scaling: g · (1 + δ · sign(g) · (u - n)).

    Elements that a step would move across their code's boundary get a larger gradient.

    Args:
        delta: δ, at least 0.

    Raises:
        ValueError: delta is negative or not finite.
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
    """Soft rounding: the derivative of ⌊u⌋ + ½ + tanh(t · r) / (2 tanh(t / 2)), with r = u - ⌊u⌋ - ½.

    The derivative, t (1 - tanh²(t · r)) / (2 tanh(t / 2)), is near 1 for small t, and peaks at the boundaries between
    codes for large t. For integer formats. Each temperature is a different quantizer, for which compiled programs
    recompile.

    Args:
        temperature: t, above 0.

    Raises:
        ValueError: temperature is not above 0 and finite.
    """

    temperature: float = 5.0

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, int | float) or not 0 < t < math.inf:
            raise ValueError(f"SoftRounding: temperature must be above 0 and finite, got {shown(t)}; give 5.0")

    def check(self, format: Format) -> None:
        if not format.is_integer:
            raise ValueError(
                f"SoftRounding: the codes of {format.name} are not one step apart; use an integer format, or EWGS()"
            )

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        t = float(self.temperature)
        r = at.u - at.u.floor() - 0.5
        slope = t * (1 - torch.tanh(t * r).square()) / (2 * math.tanh(t / 2))
        return torch.where(at.inside, grad * slope, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class NoiseInjection(Estimator):
    """Noise instead of rounding in training: x̂ = s · (u + w · (r - ½)).

    r is uniform in [0, 1], and w the distance of the format's values around u, so the noise is as wide as a code and
    weights learn to tolerate rounding (Défossez et al. 2021). Clipped elements get no noise.

    Nothing is rounded, so the gradients are exact: 1 for x inside; for s w · (r - ½) inside and n where clipped. In
    eval mode, once frozen, and in a stage with another gradient, values are rounded to codes.
    """

    adds_noise: ClassVar[bool] = True

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        return u + width * (random - 0.5)


@dataclass(frozen=True, eq=False, repr=False)
class QuantNoise(Estimator):
    """Round a random subset of elements in training, straight-through, and keep the others in floats (Fan et al. 2020).

    x̂ = s · n with probability `rate`, else x, drawn anew in each call. Clipped elements are always rounded.

    Args:
        rate: above 0, at most 1, in steps of 1/256.

    Raises:
        ValueError: rate is out of range.
    """

    rate: float = 0.5

    adds_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 < self.rate <= 1:
            raise ValueError(f"QuantNoise: rate must be above 0 and at most 1, got {shown(self.rate)}; give 0.5")

    def number(self, u: Tensor, n: Tensor, width: Tensor, random: Tensor) -> Tensor:
        return torch.where(random < self.rate, n, u)


def check(gradient: Estimator, format: Format, stochastic: bool) -> None:
    """Raise if a quantizer of `format` cannot have this gradient."""
    if not isinstance(gradient, Estimator):
        raise TypeError(
            f"gradient must be one of hop.estimators, or None; got {shown(gradient)}; give one such as "
            "hop.estimators.EWGS()"
        )
    if stochastic and gradient.adds_noise:
        raise ValueError(
            f"gradient={gradient} adds noise instead of rounding, which conflicts with stochastic=True; use "
            "stochastic=False"
        )
    gradient.check(format)


def with_noise(
    gradient: Estimator | None, format: Format, u: Tensor, noise: Tensor, zero: Sequence[Tensor | int]
) -> Tensor:
    """The value of u (in units of the format) in training with noise, from the low 8 bits of the random integers
    `noise`.
    """
    assert gradient is not None
    n = format.decode(format.encode(u, None, *zero), *zero)
    random = (torch.bitwise_and(noise.to(torch.int32), 255).to(torch.float32) + 0.5) / 256
    number = gradient.number(u, n, _widths(format, u), random)
    return torch.where(format.inside(u, *zero), number, n)


def _widths(format: Format, u: Tensor) -> Tensor:
    """The distance of the format's values around u; beyond the range, that of the outermost two."""
    if format.is_integer:
        return torch.ones_like(u)
    gaps = [b - a for a, b in itertools.pairwise(format.numbers)]
    return lookup(gaps, search(u, format.numbers[:-1]))
