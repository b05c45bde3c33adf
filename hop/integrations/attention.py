"""Attention of transformers in low precision, through its AttentionInterface.

A module that takes its attention from there, by the name in the model's config, gets "hop" as that name. What it
computes in is said by the module, so that one model may have several schemes, and some modules none: those compute as
transformers' "sdpa". The masks are those of "sdpa" too, registered under the same name: for a name that it does not
know transformers builds no mask.

"hop_rotated" is the same of a model whose schemes rotate queries and keys. A cache goes by this name, and so does the
attention that reads its keys: so both do, or neither.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hop.nn.attending import KINDS, Kind, attend, scheme_of
from hop.numerics.attention_schemes import AttentionScheme
from hop.tensor import QuantizedTensor

IMPLEMENTATION, ROTATED = "hop", "hop_rotated"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # where a module's forward looks for the interface's functions
_ATTRIBUTES = {  # of modules whose attention has more to it, and what that is
    "attn_logit_softcapping": "caps its scores (softcapping)",
    "softcap": "caps its scores (softcapping)",
    "sinks": "has scores that belong to no key (attention sinks)",
}
_ARGUMENTS = {  # of the interface's functions, likewise
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
    """Attention as transformers calls it.

    Args:
        module: whose scheme it is.
        query: (N, H, L, E), float.
        key, value: (N, G, S, E) and (N, G, S, V), of G heads that divide H; float, or quantized, as a cache gives them.
        attention_mask: (N or 1, H or 1, L, S), booleans, True where a key is seen; or floats that are added to scores.
        position_bias: floats that are added to scores, of such a shape.

    Returns:
        (N, L, H, V), in the dtype of the query, and None for the weights.

    Raises:
        ValueError: dropout, or an argument that says more than the operator takes.
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
            f"hop's attention: dropout={dropout} of {type(module).__name__} drops scores in training, and attention in "
            "a scheme drops none; set the config's attention dropout to 0, or call eval()"
        )
    length = query.shape[2]
    asks = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = length > 1 and attention_mask is None and asks
    mask = attention_mask
    if position_bias is not None:
        mask, causal = _with_bias(attention_mask, position_bias, causal, key), False
    y = attend(scheme, query, key, value, mask, bool(causal), scale=scaling, rotated=rotated)
    return y.transpose(1, 2).contiguous(), None


def _with_bias(mask: Tensor | None, bias: Tensor, causal: Any, key: Tensor) -> Tensor:
    """What is added to scores."""
    if causal:
        length, keys = bias.shape[-2], key.shape[-2]
        mask = bias.new_ones(length, keys).tril().bool()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -float("inf")) if not mask.is_floating_point() else bias + mask


# ---- which modules attend so


def _knows(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _REGISTRY in code.co_names and hasattr(module, "config")


def _declines(module: Any) -> str | None:
    for name, what in _ATTRIBUTES.items():
        if getattr(module, name, None) is not None:
            return f"its attention {what}, which hop's has not"
    return None


def _install(module: Any, scheme: AttentionScheme) -> None:
    module.config._attn_implementation = ROTATED if scheme.rotated else IMPLEMENTATION


def is_rotated(config: Any) -> bool:
    """Whether the keys that a cache gives a model's attention are rotated."""
    return config._attn_implementation == ROTATED


KINDS.append(Kind(_knows, _declines, _install))
for _name in (IMPLEMENTATION, ROTATED):
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, sdpa_mask)
