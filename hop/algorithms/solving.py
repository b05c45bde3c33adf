"""The codes of one weight by GPTQ, from the second moments of what it is multiplied by.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv
2210.17323). With H = Σ x xᵀ over the inputs x and U the upper Cholesky factor of its inverse, H⁻¹ = Uᵀ U, columns are
rounded one after another, and what the rounding of column j costs is made good by those that follow:

    e = (w_j - ŵ_j) / U_jj        w_k ← w_k - e U_jk for k > j
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hop.algorithms.grid import Grid

TRIES = 3
"""How often damping is raised tenfold where a Hessian is singular."""


class Solved(NamedTuple):
    """What `solve` found."""

    codes: Tensor | None  # None: the Hessian stayed singular
    damping: float  # what it took


def solve(weight: Tensor, grid: Grid, hessian: Tensor, damping: float, order: bool, block: int) -> Solved:
    """The codes of `weight` (M, K), whose elements lie on `grid`, for a Hessian (K, K) in float64.

    Computes in float64. The diagonal grows by `damping` times its mean; where that is not positive definite, by ten
    times as much, TRIES times. A column that no input reaches is rounded to the nearest.

    Args:
        order: whether columns go by their diagonal element, the largest first, or as they lie.
        block: how many columns are rounded before those behind them are brought up to date."""
    diagonal = hessian.diagonal()
    as_they_lie = torch.arange(len(hessian), device=weight.device)
    places = diagonal.argsort(descending=True, stable=True) if order else as_they_lie
    factor, damping = _factor(hessian, places, damping)
    if factor is None:
        return Solved(None, damping)
    columns = weight.to(torch.float64).t()[places].contiguous()  # a column of the weight is a row here
    codes = _rounded(columns, grid.map(lambda t: t.t()[places].contiguous()), factor, block)
    back = torch.empty_like(places)
    back[places] = as_they_lie
    return Solved(codes[back].t().contiguous(), damping)


def _factor(hessian: Tensor, places: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """U of the columns in the order of `places`, and the damping that it took. At most two matrices beside the Hessian
    are held at a time: they are what the algorithm takes most memory for."""
    diagonal = hessian.diagonal()[places]
    added = damping * float(hessian.diagonal().mean())
    alive = torch.where(diagonal == 0, diagonal + 1, diagonal)  # a column that no input reaches is by itself
    for tried in range(1 + TRIES):
        if tried:
            added, damping = 10 * added, 10 * damping
        ordered = hessian[places.unsqueeze(1), places]
        ordered.diagonal().copy_(alive + added)
        lower, failed = torch.linalg.cholesky_ex(ordered)
        del ordered
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if not failed and bool(upper.isfinite().all()):
                return upper, damping
    return None, damping


def _rounded(columns: Tensor, grid: Grid, factor: Tensor, block: int) -> Tensor:
    """The codes of columns (K, M), which are used up."""
    count = len(columns)
    codes: list[Tensor] = []
    for start in range(0, count, block):
        end = min(start + block, count)
        errors = torch.empty_like(columns[start:end])
        for j in range(start, end):
            column_grid = grid[j]
            codes.append(column_grid.encode(columns[j]))
            errors[j - start] = (columns[j] - column_grid.decode(codes[-1])) / factor[j, j]
            columns[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return torch.stack(codes)


def error(difference: Tensor, hessian: Tensor) -> float:
    """Σ |difference · x|² over the inputs x that the Hessian was summed of."""
    wide = difference.to(torch.float64)
    return float(((wide @ hessian) * wide).sum())
