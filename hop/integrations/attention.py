"""Low-precision attention for transformers, through its AttentionInterface.

A model whose modules look up their attention function by the name in the config gets the name "hop". Each module then
has its scheme, so that a model may mix schemes; modules without one compute as transformers' "sdpa". The masks of
"sdpa" are registered under the same name, because transformers builds no masks for unknown names.

"hop_rotated" is the name for models whose schemes rotate queries and keys. A cache stores rotated keys exactly if the
attention that reads them has this name.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hop.nn.attention.attending import KINDS, Kind, attend, scheme_of
from hop.numerics.attention_schemes import AttentionScheme
from hop.tensor import QuantizedTensor

IMPLEMENTATION, ROTATED = "hop", "hop_rotated"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # the global through which a module's forward uses the interface
_ATTRIBUTES = {  # attributes of modules with features that hop does not support
    "attn_logit_softcapping": "caps its scores (softcapping)",
    "softcap": "caps its scores (softcapping)",
    "sinks": "has scores that belong to no key (attention sinks)",
}
_ARGUMENTS = {  # arguments of attention functions that hop does not support
    "softcap": "caps scores",
    "s_aux": "adds scores that belong to no key (attention sinks)",
    "output_attentions": "asks for the weights of all scores, which are not kept",
    "cache": "brings a paged cache",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it.

    Args:
        module: the attention module, which has the scheme.
        query: (N, H, L, E), float.
        key, value: (N, G, S, E) and (N, G, S, V), where the number of heads G divides H; float, or quantized if from a
            cache.
        attention_mask: (N or 1, H or 1, L, S), bool with True for visible keys, or floats to add to the scores.
        position_bias: floats of such a shape to add to the scores.

    Returns:
        (N, L, H, V), in the dtype of the query, and None for the weights.

    Raises:
        ValueError: dropout, or an argument that the operator does not support.
    """
    scheme = scheme_of(module)
    rotated = is_rotated(module.config) if isinstance(key, QuantizedTensor) else None
    is_cached = isinstance(key, QuantizedTensor) or isinstance(value, QuantizedTensor)
    if scheme is None and not is_cached:
        more: Any = {"position_bias": position_bias, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **more)
    for name, what in _ARGUMENTS.items():
        if kwargs.get(name):
            raise ValueError(
                f"hop's attention: {name} of {type(module).__name__} {what}; leave its attention in floats: "
                'model.set_attn_implementation("eager")'
            )
    if dropout > 0:
        raise ValueError(
            f"hop's attention: dropout={dropout} of {type(module).__name__} drops scores in training, which attention "
            "in a scheme does not support; set the config's attention dropout to 0, or call eval()"
        )
    length = query.shape[2]
    asks = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = length > 1 and attention_mask is None and asks
    mask, bias = (_narrowed(t, key) for t in (attention_mask, position_bias))
    if bias is not None:
        mask, causal = _with_bias(mask, bias, causal, key), False
    y = attend(scheme, query, key, value, mask, bool(causal), scale=scaling, rotated=rotated)
    return y.transpose(1, 2).contiguous(), None


def _narrowed(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The columns of the keys, where a cache returns only the slots in use."""
    keys = key.shape[-2]
    return mask if mask is None or mask.shape[-1] <= keys or not isinstance(key, QuantizedTensor) else mask[..., :keys]


def _with_bias(mask: Tensor | None, bias: Tensor, causal: Any, key: Tensor) -> Tensor:
    """The bias to add to the scores, including the mask."""
    if causal:
        length, keys = bias.shape[-2], key.shape[-2]
        mask = bias.new_ones(length, keys).tril().bool()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -float("inf")) if not mask.is_floating_point() else bias + mask


# ---- the modules that can use it


def _knows(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _REGISTRY in code.co_names and hasattr(module, "config")


def _declines(module: nn.Module) -> str | None:
    for name, what in _ATTRIBUTES.items():
        if getattr(module, name, None) is not None:
            return f"its attention {what}, which hop's does not support"
    return None


def _install(module: Any, scheme: AttentionScheme) -> None:
    module.config._attn_implementation = ROTATED if scheme.rotated else IMPLEMENTATION


def is_rotated(config: Any) -> bool:
    """Whether the model's attention expects rotated keys from a cache."""
    return config._attn_implementation == ROTATED


KINDS.append(Kind(_knows, _declines, _install))
for _name in (IMPLEMENTATION, ROTATED):
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, sdpa_mask)
