"""Low-precision attention for modules that keep their class: the scheme of each, and the computation.

A package that defines attention modules registers a Kind in KINDS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hop.compat.eager import past_ignored_modes
from hop.impls.quantize import quantize
from hop.impls.scaled import scaled
from hop.nn.contexts import asks_for_floats
from hop.numerics import presets
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.hadamard import SIZES, largest_size
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

aten = torch.ops.aten

_OWN = "hop_attention"  # the module attribute with its scheme


class Kind(NamedTuple):
    """A kind of attention modules."""

    knows: Callable[[nn.Module], bool]  # whether a module is of this kind
    declines: Callable[[nn.Module], str | None]  # why its attention stays in floats; None if it can be quantized
    install: Callable[[nn.Module, AttentionScheme], None]  # makes the module read its scheme when called


KINDS: list[Kind] = []


def own_scheme(module: nn.Module) -> AttentionScheme | None:
    """The attention scheme set on a module; None for floats."""
    return module.__dict__.get(_OWN)


def scheme_of(module: nn.Module) -> AttentionScheme | None:
    """The attention scheme active for a module now; None for floats."""
    return None if asks_for_floats() else own_scheme(module)


def take(module: nn.Module, scheme: AttentionScheme | None) -> None:
    """Set the attention scheme of a module; None for floats."""
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
    """Compute attention in a scheme, with the result in the dtype of the query.

    Args:
        scheme: None if key and value are already quantized. The query is then quantized by hop.presets.INT8_ROW for
            integer keys and by FP8_ROW for float keys.
        query: (N, H, L, E), float.
        key, value: (N, G, S, E) and (N, G, S, V), where G divides H; float or quantized.
        mask, is_causal, scale: as for aten.scaled_dot_product_attention.
        rotated: whether a quantized key was rotated before, so that the query must be too; None: as the scheme says.
    """
    given = (scheme, query, key, value, mask, is_causal, scale, rotated)
    return _attended(*given) if torch.compiler.is_compiling() else past_ignored_modes(_attended, *given)


def _attended(
    scheme: AttentionScheme | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    rotated: bool | None,
) -> Tensor:
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
    """Quantize x (..., width) for attention, after a Hadamard transform in float32 if `rotated`.

    With q=None the result is a float tensor of x's dtype.

    Raises:
        ValueError: no transform fits this width.
    """
    if not rotated:
        return x if q is None else quantize(q, x)
    return scaled(torch.ops.hop.hadamard.default, x.dtype if q is None else q, x, rotated_size(x.shape[-1]))


def rotated_size(width: int) -> int:
    """The number of elements of a head that are transformed together. Raises ValueError if no size divides `width`."""
    size = largest_size(width)
    if size is None:
        raise ValueError(
            f"attention: rotated=True transforms {', '.join(map(str, SIZES))} elements of a head at once, and none of "
            f"these divides its width, {width}; use a scheme with rotated=False"
        )
    return size
