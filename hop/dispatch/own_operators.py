"""Operators that ATen lacks, which run ATen's operators, with their derivatives, on plain tensors.

    hop::silu_mul(a, b)                      silu(a) · b, of SwiGLU layers
    hop::gelu_mul(a, b, *, approximate)      gelu(a) · b, of GEGLU layers
    hop::hadamard(x, size)                   x · H / √size of each block of the last dimension, for the Hadamard matrix
                                             H in Sylvester's order
    hop::attention(query, key, value, ...)   PyTorch's attention with derivatives of all orders

hop.scaled computes the first three in a single pass.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hop.numerics.hadamard import check_size
from hop.numerics.tables import float32

_library = torch.library.Library("hop", "FRAGMENT")
_library.define("silu_mul(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pointwise, torch.Tag.flexible_layout))
_library.define(
    'gelu_mul(Tensor a, Tensor b, *, str approximate="none") -> Tensor',
    tags=(torch.Tag.pointwise, torch.Tag.flexible_layout),
)


def _silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(a) * b


def _gelu_mul(a: Tensor, b: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(a, approximate=approximate) * b


_library.define("hadamard(Tensor x, int size) -> Tensor", tags=(torch.Tag.flexible_layout,))


def _hadamard(x: Tensor, size: int) -> Tensor:
    """H is the product of log2(size) sparse matrices, and the transform is computed as that many stages.

    A stage replaces two elements a and b that are half a block apart by the adjacent elements a + b and a - b, each
    rounded. After the last stage the block is in order. So the order of summation is fixed for any number of rows. The
    product with 1 / √size comes last. H / √size is symmetric and orthogonal: the transform is its own inverse and its
    own derivative.
    """
    check_size(size, x.shape, "hop::hadamard: size")
    y = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        a, b = y.chunk(2, -1)
        y = torch.stack((a + b, a - b), -1).flatten(-2)
    factor = size**-0.5
    return (y * (factor if x.dtype == torch.float64 else float32(factor))).flatten(-2)


_library.define(  # the kernels of aten.scaled_dot_product_attention have no second derivative and no forward mode
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """ATen's plain version computes the same result, and has derivatives of all orders."""
    plain = torch.ops.aten._scaled_dot_product_attention_math.default
    return plain(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


# with only the first, PyTorch 2.15 loops under vmap, and warns
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _library.impl("silu_mul", _silu_mul, _key)
    _library.impl("gelu_mul", _gelu_mul, _key)
    _library.impl("hadamard", _hadamard, _key)
_library.impl("attention", _attention, "CompositeImplicitAutograd")

SILU_MUL, GELU_MUL = torch.ops.hop.silu_mul.default, torch.ops.hop.gelu_mul.default
HADAMARD, ATTENTION = torch.ops.hop.hadamard.default, torch.ops.hop.attention.default
