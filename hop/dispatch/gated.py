"""Gated products, operators that ATen lacks: hop.scaled computes one in a single pass.

    hop::silu_mul(a, b)                      silu(a) · b, of SwiGLU layers
    hop::gelu_mul(a, b, *, approximate)      gelu(a) · b, of GEGLU layers

On plain tensors they run ATen's operators, with their derivatives.
"""

import torch
from torch import Tensor
from torch.nn import functional

_library = torch.library.Library("hop", "FRAGMENT")
_TAGS = (torch.Tag.pointwise, torch.Tag.flexible_layout)
_library.define("silu_mul(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_library.define('gelu_mul(Tensor a, Tensor b, *, str approximate="none") -> Tensor', tags=_TAGS)


def _silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(a) * b


def _gelu_mul(a: Tensor, b: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(a, approximate=approximate) * b


# with only the first, PyTorch 2.15 loops under vmap, and warns
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _library.impl("silu_mul", _silu_mul, _key)
    _library.impl("gelu_mul", _gelu_mul, _key)

SILU_MUL, GELU_MUL = torch.ops.hop.silu_mul.default, torch.ops.hop.gelu_mul.default
