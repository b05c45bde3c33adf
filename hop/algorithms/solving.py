"""GPTQ for one weight, from the second moments of its inputs.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (arXiv
2210.17323). With H = Σ x xᵀ over the inputs x and U the upper Cholesky factor of its inverse, H⁻¹ = Uᵀ U, columns are
rounded one after another, and the remaining columns compensate the rounding error of column j:

    e = (w_j - ŵ_j) / U_jj        w_k ← w_k - e U_jk for k > j
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hop.algorithms.grid import Grid

TRIES = 3
"""The number of times that damping is raised tenfold if a Hessian is singular."""


class Solved(NamedTuple):
    """The result of `solve`."""

    codes: Tensor | None  # None if the Hessian stayed singular
    damping: float  # the damping that was used


def solve(weight: Tensor, grid: Grid, hessian: Tensor, damping: float, order: bool, block: int) -> Solved:
    """The codes of `weight` (M, K) on `grid`, for a Hessian (K, K) in float64.

    Computes in float64. The diagonal grows by `damping` times its mean, and by ten times as much up to TRIES times if
    the matrix is not positive definite. A column that no input reaches is rounded to nearest.

    Args:
        order: whether to round columns in order of decreasing diagonal elements, or in their own order.
        block: number of columns to round before the remaining ones are updated.
    """
    diagonal = hessian.diagonal()
    identity = torch.arange(len(hessian), device=weight.device)
    places = diagonal.argsort(descending=True, stable=True) if order else identity
    factor, damping = _factor(hessian, places, damping)
    if factor is None:
        return Solved(None, damping)
    columns = weight.to(torch.float64).t()[places].contiguous()  # a column of the weight is a row here
    codes = _round_columns(columns, grid.map(lambda t: t.t()[places].contiguous()), factor, block)
    back = torch.empty_like(places)
    back[places] = identity
    return Solved(codes[back].t().contiguous(), damping)


def _factor(hessian: Tensor, places: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """U of the columns in the order of `places`, and the damping that was used.

    At most two matrices besides the Hessian are alive at a time, because they dominate the algorithm's memory.
    """
    diagonal = hessian.diagonal()[places]
    added = damping * float(hessian.diagonal().mean())
    alive = torch.where(diagonal == 0, diagonal + 1, diagonal)  # decouples columns that no input reaches
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


def _round_columns(columns: Tensor, grid: Grid, factor: Tensor, block: int) -> Tensor:
    """The codes of columns (K, M), which are overwritten."""
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
    """Σ |difference · x|² over the inputs x in the Hessian."""
    d = difference.to(torch.float64)
    return float(((d @ hessian) * d).sum())
