"""hop::attention: PyTorch's attention with derivatives of all orders.

The kernels of aten.scaled_dot_product_attention have no second derivative and no forward mode. ATen's plain version
computes the same result and has both.
"""

import torch
from torch import Tensor

_library = torch.library.Library("hop", "FRAGMENT")
_library.define(
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
    plain = torch.ops.aten._scaled_dot_product_attention_math.default
    return plain(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


_library.impl("attention", _attention, "CompositeImplicitAutograd")

ATTENTION = torch.ops.hop.attention.default
