"""Helpers for tests of hop.nn."""

from typing import Any

import torch
from torch import Tensor, nn

import hop
from hop.numerics.schemes import Scheme


def converted(model: nn.Module, scheme: Scheme) -> Any:
    return hop.nn.convert(model, scheme)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
