"""The update rules: the constants of a step, and its computation on tensors in float32, or all in float64.

The constants are computed as Python floats, in float64, and rounded to the dtype of the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Number = Any  # a float, or a tensor of shape ()

_FLAGS = ("coupled", "nesterov", "maximize")


@dataclass(frozen=True)
class UpdateRule:
    """A kind of step, without its constants.

    Args:
        name: "adam", "sgd" or "lion".
        coupled: whether weight decay is added to the gradient; otherwise it shrinks the parameter.
        nesterov: Nesterov momentum, for "sgd".
        maximize: whether the gradient is negated.
    """

    name: str
    coupled: bool = False
    nesterov: bool = False
    maximize: bool = False

    means: ClassVar = 1
    """The number of states, counted from the first, that are means of gradients; later ones
    are means of their squares.
    """

    def __str__(self) -> str:
        return " ".join([self.name, *(f for f in _FLAGS if getattr(self, f))])

    @classmethod
    def parse(cls, text: str) -> "UpdateRule":
        name, *flags = text.split()
        return cls(name, **dict.fromkeys(flags, True))

    def numbers(self, step: float, lr: float, options: Sequence[float]) -> tuple[float, ...]:
        """Compute the constants of step `step`, counted from 1, from the rule's options."""
        return _NUMBERS[self.name](self, step, lr, *options)

    def update(
        self, numbers: Sequence[Number], p: Tensor, grad: Tensor, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the parameter and its states after a step."""
        return _UPDATES[self.name](self, numbers, p, -grad if self.maximize else grad, states)


def _adam_numbers(
    rule: UpdateRule, step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    decay = 1.0 if rule.coupled else 1 - lr * weight_decay
    rate, scale = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    return decay, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, rate, scale, eps


def adam(
    rule: UpdateRule, numbers: Sequence[Number], p: Tensor, grad: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Adam (Kingma and Ba 2015), with decoupled weight decay AdamW (Loshchilov and Hutter 2019).

        m = β₁ m + (1 - β₁) g        v = β₂ v + (1 - β₂) g²        p = decay p - rate m / (√v scale + ε)

    rate = lr / (1 - β₁ᵗ), scale = 1 / √(1 - β₂ᵗ), decay = 1 - lr λ. If coupled, decay = 1, and g + λ p replaces g. If
    there is a third state, the largest v replaces v (Reddi et al. 2018).

    Options: β₁, β₂, ε, λ. Numbers: decay, λ, β₁, 1 - β₁, β₂, 1 - β₂, rate, scale, ε. States: m, v, the largest v.
    """
    decay, weight_decay, beta1, rest1, beta2, rest2, rate, scale, eps = numbers
    mean, square, *largest = states
    if rule.coupled:
        grad = grad + p * weight_decay
    mean = mean * beta1 + grad * rest1
    square = square * beta2 + grad * grad * rest2
    largest = [torch.maximum(x, square) for x in largest]
    top = largest[0] if largest else square
    return p * decay - mean / (_root(top) * scale + eps) * rate, [mean, square, *largest]


def _root(x: Tensor) -> Tensor:
    """√x, correctly rounded to float32: PyTorch's CPU kernel is sometimes off by one unit."""
    return x.to(torch.float64).sqrt().to(x.dtype) if x.is_cpu else x.sqrt()


def _sgd_numbers(
    rule: UpdateRule, step: float, lr: float, momentum: float, dampening: float, weight_decay: float
) -> tuple[float, ...]:
    return weight_decay, momentum, 1 - dampening, lr, float(step == 1)


def sgd(
    rule: UpdateRule, numbers: Sequence[Number], p: Tensor, grad: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Stochastic gradient descent, with momentum μ as in torch.optim.SGD.

    b = μ b + (1 - dampening) g, in the first step b = g, and p = p - lr b. With Nesterov momentum p = p - lr (g + μ b).
    If coupled, λ p is added to g.

    Options: μ, dampening, λ. Numbers: λ, μ, 1 - dampening, lr, and 1 in the first step, otherwise 0. States: b, or
    none.
    """
    weight_decay, momentum, rest, lr, first = numbers
    if rule.coupled:
        grad = grad + p * weight_decay
    if not states:
        return p - grad * lr, []
    is_first = torch.as_tensor(first, device=p.device) != 0
    buffer = torch.where(is_first, grad, states[0] * momentum + grad * rest)
    return p - (grad + buffer * momentum if rule.nesterov else buffer) * lr, [buffer]


def _lion_numbers(
    rule: UpdateRule, step: float, lr: float, beta1: float, beta2: float, weight_decay: float
) -> tuple[float, ...]:
    return 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr


def lion(
    rule: UpdateRule, numbers: Sequence[Number], p: Tensor, grad: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Lion (Chen et al. 2023): p = (1 - lr λ) p - lr sign(β₁ m + (1 - β₁) g), then m = β₂ m + (1 - β₂) g.

    Options: β₁, β₂, λ. Numbers: 1 - lr λ, β₁, 1 - β₁, β₂, 1 - β₂, lr. States: m.
    """
    decay, beta1, rest1, beta2, rest2, lr = numbers
    (mean,) = states
    return p * decay - (mean * beta1 + grad * rest1).sign() * lr, [mean * beta2 + grad * rest2]


_NUMBERS = {"adam": _adam_numbers, "sgd": _sgd_numbers, "lion": _lion_numbers}
_UPDATES = {"adam": adam, "sgd": sgd, "lion": lion}
