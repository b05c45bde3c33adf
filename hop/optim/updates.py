"""The updates of one parameter, as functions of float32 tensors, in the order of operations of torch.optim.

Each gives the new parameter and the new states. Numbers that change from step to step are Python numbers, or tensors of
shape ().
"""

from typing import Any

import torch
from torch import Tensor

Number = Any


def adam(
    p: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    step: Number,
    lr: Number,
    betas: tuple[Number, Number],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Adam (Kingma and Ba 2015), with decoupled weight decay AdamW (Loshchilov and Hutter 2019):

        m = β₁ m + (1 - β₁) g        v = β₂ v + (1 - β₂) g²        p = p - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)

    With "max_exp_avg_sq" among the states its largest v takes the place of v (Reddi et al. 2018)."""
    beta1, beta2 = betas
    if weight_decay and decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay:
        grad = grad + p * weight_decay
    mean = state["exp_avg"].lerp(grad, 1 - beta1)
    square = state["exp_avg_sq"] * beta2 + grad * grad * (1 - beta2)
    new, largest = {"exp_avg": mean, "exp_avg_sq": square}, square
    if "max_exp_avg_sq" in state:
        new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], square)
    rate = lr / (1 - beta1**step)
    denominator = largest.sqrt() / (1 - beta2**step) ** 0.5 + eps
    return p - rate * (mean / denominator), new


def sgd(
    p: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: Number,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Stochastic gradient descent, with momentum as torch.optim.SGD has it: b = momentum · b + (1 - dampening) · g, in
    the first step b = g."""
    if weight_decay:
        grad = grad + p * weight_decay
    if not momentum:
        return p - lr * grad, {}
    first = torch.as_tensor(step) == 1  # a tensor where it is one: no program for the first step alone
    buffer = torch.where(first, grad, state["momentum_buffer"] * momentum + grad * (1 - dampening))
    grad = grad + momentum * buffer if nesterov else buffer
    return p - lr * grad, {"momentum_buffer": buffer}


def lion(
    p: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: Number,
    betas: tuple[Number, Number],
    weight_decay: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Lion (Chen et al. 2023): p = p - lr · (sign(β₁ m + (1 - β₁) g) + λ p), m = β₂ m + (1 - β₂) g."""
    beta1, beta2 = betas
    mean = state["exp_avg"]
    if weight_decay:
        p = p * (1 - lr * weight_decay)
    return p - lr * mean.lerp(grad, 1 - beta1).sign(), {"exp_avg": mean.lerp(grad, 1 - beta2)}
