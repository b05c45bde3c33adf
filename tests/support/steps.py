"""Parameters and gradients for steps of optimizers."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


def drawn(shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(tuple(shape), generator=g).to(dtype)) for shape in shapes]


def give_gradients(params: Iterable[torch.Tensor], step: int) -> None:
    g = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
