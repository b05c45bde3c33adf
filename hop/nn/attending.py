"""Attention in low precision, of modules that stay what they are: which have a scheme, and what they compute then.

Who knows modules that attend enters a Kind in KINDS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hop.impls.quantize import quantize
from hop.impls.scaled import scaled
from hop.nn.contexts import asks_for_floats
from hop.numerics import presets
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.hadamard import SIZES, largest_size
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

aten = torch.ops.aten

_OWN = "hop_attention"  # the attribute of a module


class Kind(NamedTuple):
    """Modules that attend."""

    knows: Callable[[nn.Module], bool]  # whether a module is one
    declines: Callable[[nn.Module], str | None]  # why its attention stays in floats
    install: Callable[[nn.Module, AttentionScheme], None]  # makes it ask for its scheme when it is called


KINDS: list[Kind] = []


def own_scheme(module: nn.Module) -> AttentionScheme | None:
    """In which a module attends; None for floats."""
    return module.__dict__.get(_OWN)


def scheme_of(module: nn.Module) -> AttentionScheme | None:
    """In which a module attends now; None for floats."""
    return None if asks_for_floats() else own_scheme(module)


def take(module: nn.Module, scheme: AttentionScheme | None) -> None:
    """Let a module attend in a scheme; None for floats."""
    if scheme is None:
        module.__dict__.pop(_OWN, None)
    else:
        module.__dict__[_OWN] = scheme


def attend(
    scheme: AttentionScheme | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    rotated: bool | None = None,
) -> Tensor:
    """Attention in a scheme, its result in the dtype of the query.

    Args:
        scheme: None where key and value are quantized: the query is then quantized too, by hop.presets.INT8_ROW beside
            integers, by FP8_ROW beside floats.
        query: (N, H, L, E), float.
        key, value: (N, G, S, E) and (N, G, S, V), of G heads that divide H, float or quantized.
        mask, is_causal, scale: as ATen's.
        rotated: whether a key that comes quantized was rotated before, so that the query is to be; None for as the
            scheme says.
    """
    rotates = (scheme is not None and scheme.rotated) if rotated is None else rotated
    if scheme is None:
        assert isinstance(key, QuantizedTensor)
        quantizers = (presets.INT8_ROW if key.quantizer.format.is_integer else presets.FP8_ROW, None, None)
    else:
        quantizers = (scheme.query, scheme.key, scheme.value)
    each = zip(quantizers, (query, key, value), (rotates, rotates, False), strict=True)
    given = [x if isinstance(x, QuantizedTensor) else prepared(q, x, rotates) for q, x, rotates in each]
    op, grouped = aten.scaled_dot_product_attention.default, query.shape[1] != key.shape[1]
    return scaled(op, query.dtype, *given, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)  # type: ignore[return-value]


def prepared(q: Quantizer | None, x: Tensor, rotated: bool = False) -> Tensor:
    """x (..., width) as attention takes it: by a quantizer, in floats of its dtype where there is none; transformed
    before, in float32, if it is to be rotated.

    Raises:
        ValueError: no transform is of this width.
    """
    if not rotated:
        return x if q is None else quantize(q, x)
    return scaled(torch.ops.hop.hadamard.default, x.dtype if q is None else q, x, rotated_size(x.shape[-1]))


def rotated_size(width: int) -> int:
    """How many elements of a head of `width` are transformed together. Raises ValueError where none are."""
    size = largest_size(width)
    if size is None:
        raise ValueError(
            f"attention: rotated=True transforms {', '.join(map(str, SIZES))} elements of a head together, and none of "
            f"these divides its width, {width}; take a scheme with rotated=False"
        )
    return size
