"""Elementary functions of float32: computed in float64, by forms that lose no digits, and rounded once.

So the result is the float32 next to the exact one, but where that lies within some 2^-50 of itself from the middle of
two. float64 stays in float64, by PyTorch's own functions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _gelu(x: Tensor) -> Tensor:
    """x · Φ(x), by erfc, which keeps its digits far below 0."""
    return x * torch.special.erfc(x * -math.sqrt(0.5)) / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    """x · (1 + tanh(u)) / 2 = x / (1 + exp(-2u))."""
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "rsqrt": lambda x: x.sqrt().reciprocal(),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}

_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "rsqrt": torch.rsqrt,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}

_AT_MINUS_INFINITY = {"gelu", "gelu_tanh", "silu"}  # whose form gives NaN where the limit is -0

NAMES = tuple(_WIDE)


def apply(name: str, x: Tensor) -> Tensor:
    """The function `name`, one of NAMES, of each element of x, float32 or float64; the result has x's dtype."""
    if x.dtype == torch.float64:
        return _OWN.get(name, _WIDE[name])(x)
    y = _WIDE[name](x.to(torch.float64)).to(torch.float32)
    return torch.where(x == -math.inf, -0.0, y) if name in _AT_MINUS_INFINITY else y
