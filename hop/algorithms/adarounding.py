"""The codes of one weight by AdaRound: each element is rounded up or down as the results of the layer ask.

Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (arXiv 2004.10568). With l and u the
numbers below and above a weight w, which a scale makes of the format, and H = Σ x xᵀ over the inputs of the layer,

    ŵ = l + h(v) (u - l)        h(v) = clamp(1.2 sigmoid(v) - 0.1, 0, 1)
    minimize  tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr((W - W⁰) H (W - W⁰)ᵀ) + λ mean(1 - |2 h(v) - 1|^β)

by Adam, W⁰ the weights rounded to the nearest, and β from 20 to 2 after a fifth of the steps, in which λ is 0. At last
an element is u where h(v) ≥ ½. Two differences to the paper: H stands for the data, so that each step sees all of it;
and the error is relative, so that one λ fits layers of all sizes.
"""

import torch
from torch import Tensor

from hop.algorithms.grid import Grid

_HIGH, _LOW = 1.1, -0.1  # between which the sigmoid is stretched
_START = 0.2  # the part of the steps before the second term counts
_BETAS = (20.0, 2.0)


def neighbours(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The numbers below and above each element, in float32; at the ends of the format, the last two."""
    grid_points = torch.tensor(grid.format.numbers, dtype=torch.float32, device=weight.device)
    zero = 0.0 if grid.zero_point is None else grid.zero_point.to(torch.float32)
    units = torch.where(grid.scale == 0, 0.0, weight / grid.scale) + zero
    below = (torch.searchsorted(grid_points, units.contiguous(), right=True) - 1).clamp(0, len(grid_points) - 2)
    return (grid_points[below] - zero) * grid.scale, (grid_points[below + 1] - zero) * grid.scale


def adaround_codes(weight: Tensor, grid: Grid, hessian: Tensor, steps: int, rate: float, weighting: float) -> Tensor:
    """The codes of `weight` (M, K), whose elements lie on `grid`, for a Hessian (K, K).

    Args:
        steps: of Adam, with learning rate `rate`.
        weighting: λ."""
    wide, below, above = weight.to(torch.float32), *neighbours(weight.to(torch.float32), grid)
    matrix = (hessian / hessian.diagonal().mean().clamp(min=1e-300)).to(torch.float32)
    first = wide - grid.decode(grid.encode(wide))
    unit = ((first @ matrix) * first).sum().clamp(min=1e-30)
    rest = torch.where(above > below, (wide - below) / (above - below), 0.0).clamp(0.01, 0.99)
    v = torch.logit((rest - _LOW) / (_HIGH - _LOW)).requires_grad_()
    adam = torch.optim.Adam([v], rate)
    for step in range(steps):
        done = step / steps
        beta = None if done < _START else _BETAS[0] + (_BETAS[1] - _BETAS[0]) * (done - _START) / (1 - _START)
        v.grad = slope(v.detach(), wide - below, above - below, matrix / unit, (weighting, beta))
        adam.step()
    return grid.encode(torch.where(torch.sigmoid(v.detach()) >= 0.5, above, below))


def slope(v: Tensor, over: Tensor, gap: Tensor, matrix: Tensor, second: tuple[float, float | None]) -> Tensor:
    """The gradient by v of tr((over - h(v) gap) matrix (over - h(v) gap)ᵀ) + λ mean(1 - |2 h(v) - 1|^β), for a matrix
    that is symmetric: by hand, for it takes one product where autograd takes two.

    Args:
        second: λ and β; None for β leaves the second term out."""
    sigmoid = torch.sigmoid(v)
    stretched = sigmoid * (_HIGH - _LOW) + _LOW
    h = stretched.clamp(0, 1)
    by_h = ((over - h * gap) @ matrix).mul_(gap).mul_(-2)
    weighting, beta = second
    if beta is not None:
        off = 2 * h - 1
        by_h -= off.abs().pow_(beta - 1).mul_(off.sign()).mul_(2 * beta * weighting / v.numel())
    return torch.where(stretched == h, by_h * sigmoid * (1 - sigmoid) * (_HIGH - _LOW), 0.0)
