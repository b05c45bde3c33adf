"""AdaRound for one weight: round each element up or down to minimize the error of the layer's output.

Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (arXiv 2004.10568). With l and u the
representable values below and above a weight w, and H = Σ x xᵀ over the inputs of the layer, Adam solves

    ŵ = l + h(v) (u - l)        h(v) = clamp(1.2 sigmoid(v) - 0.1, 0, 1)
    minimize  tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr((W - W⁰) H (W - W⁰)ᵀ) + λ mean(1 - |2 h(v) - 1|^β)

where W⁰ are the weights rounded to nearest. λ is 0 for the first fifth of the steps, then β decreases from 20 to 2.
Finally an element becomes u where h(v) ≥ ½. Two differences from the paper: H replaces the data, so that each step sees
all of it; and the error is relative, so that one λ fits layers of all sizes.
"""

import torch
from torch import Tensor

from hop.algorithms.grid import Grid

_HIGH, _LOW = 1.1, -0.1  # range of the stretched sigmoid
_START = 0.2  # fraction of the steps without the second term
_BETAS = (20.0, 2.0)


def neighbours(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The representable values below and above each element, in float32; the outermost two outside the range."""
    grid_points = torch.tensor(grid.format.numbers, dtype=torch.float32, device=weight.device)
    zero = 0.0 if grid.zero_point is None else grid.zero_point.to(torch.float32)
    units = torch.where(grid.scale == 0, 0.0, weight / grid.scale) + zero
    below = (torch.searchsorted(grid_points, units.contiguous(), right=True) - 1).clamp(0, len(grid_points) - 2)
    return (grid_points[below] - zero) * grid.scale, (grid_points[below + 1] - zero) * grid.scale


def adaround_codes(weight: Tensor, grid: Grid, hessian: Tensor, steps: int, rate: float, weighting: float) -> Tensor:
    """The codes of `weight` (M, K) on `grid`, for a Hessian (K, K).

    Args:
        steps: number of steps of Adam, with learning rate `rate`.
        weighting: λ.
    """
    target, below, above = weight.to(torch.float32), *neighbours(weight.to(torch.float32), grid)
    matrix = (hessian / hessian.diagonal().mean().clamp(min=1e-300)).to(torch.float32)
    first = target - grid.decode(grid.encode(target))
    unit = ((first @ matrix) * first).sum().clamp(min=1e-30)
    fraction = torch.where(above > below, (target - below) / (above - below), 0.0).clamp(0.01, 0.99)
    v = torch.logit((fraction - _LOW) / (_HIGH - _LOW)).requires_grad_()
    adam = torch.optim.Adam([v], rate)
    for step in range(steps):
        done = step / steps
        beta = None if done < _START else _BETAS[0] + (_BETAS[1] - _BETAS[0]) * (done - _START) / (1 - _START)
        v.grad = gradient(v.detach(), target - below, above - below, matrix / unit, (weighting, beta))
        adam.step()
    return grid.encode(torch.where(torch.sigmoid(v.detach()) >= 0.5, above, below))


def gradient(v: Tensor, over: Tensor, gap: Tensor, matrix: Tensor, second: tuple[float, float | None]) -> Tensor:
    """The gradient of tr((over - h(v) gap) matrix (over - h(v) gap)ᵀ) + λ mean(1 - |2 h(v) - 1|^β) with respect to v,
    for a symmetric matrix. Written by hand because it takes one matrix product where autograd takes two.

    Args:
        second: λ and β; the second term is left out if β is None.
    """
    sigmoid = torch.sigmoid(v)
    stretched = sigmoid * (_HIGH - _LOW) + _LOW
    h = stretched.clamp(0, 1)
    by_h = ((over - h * gap) @ matrix).mul_(gap).mul_(-2)
    weighting, beta = second
    if beta is not None:
        off = 2 * h - 1
        by_h -= off.abs().pow_(beta - 1).mul_(off.sign()).mul_(2 * beta * weighting / v.numel())
    return torch.where(stretched == h, by_h * sigmoid * (1 - sigmoid) * (_HIGH - _LOW), 0.0)
