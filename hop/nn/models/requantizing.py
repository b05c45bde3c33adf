"""Quantize the frozen weights of a model again, by other quantizers, a part of one weight at a time."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from hop.impls.pack import unpack
from hop.impls.quantize import dequantize, quantize, quantize_weight
from hop.nn.layers.base import Layer
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor
from hop.tensor.table import IndivisibleError
from hop.tensor.units import of_buffers

_AT_ONCE = 2**22  # elements that are in floats at a time, unless a row or a scale covers more


def requantize_(layers: Sequence[tuple[Layer, Scheme]], search: bool) -> None:
    """Quantize the weights of frozen layers by the schemes that the layers get, in place.

    With `search`, the new scales have least squared error.

    Layers that share a weight and get the same quantizer share the new weight. The old weight of each group is released
    before the next one is quantized.
    """
    groups: dict[tuple[int, str], list[tuple[Layer, Scheme]]] = {}
    for layer, scheme in layers:
        q = None if scheme.rhs is None else layer.weight_quantizer(scheme.rhs)
        if layer.frozen and q is not None and q.scale.missing() is None and q != layer.codes().quantizer.plain:
            groups.setdefault((id(layer.weight), str(q)), []).append((layer, scheme))
    for group in groups.values():
        first, scheme = group[0]
        assert scheme.rhs is not None
        q = first.weight_quantizer(scheme.rhs)
        signed = all(scheme.signed_scales() for _, scheme in group)
        weight = nn.Parameter(requantized(q, first.codes(), search, signed), requires_grad=False)
        for layer, scheme in group:
            layer.weight, layer.packs = weight, False
            layer.scheme = scheme


@torch.no_grad()
def requantized(q: Quantizer, weight: QuantizedTensor, search: bool, signed: bool = False) -> QuantizedTensor:
    """hop.quantize(q, hop.dequantize(weight)), or hop.quantize_weight, computed some rows at a time."""
    made = functools.partial(quantize_weight, signed=signed) if search else quantize
    if weight.quantizer.is_tiled():
        weight = unpack(weight)
    rows = max(_AT_ONCE // max(weight[:1].numel(), 1), 1)
    if len(weight) <= rows or not (_has_own_rows(q, weight.dim()) and _has_own_rows(weight.quantizer, weight.dim())):
        return made(q, dequantize(weight))  # type: ignore[return-value]
    described = q.buffers(tuple(weight.shape))
    buffers = {
        name: torch.empty(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in described.items()
    }
    old = weight.buffers()
    for start in range(0, len(weight), rows):
        cut = slice(start, min(start + rows, len(weight)))
        shape = (cut.stop - start, *weight.shape[1:])
        part = weight.rebuilt({name: b[cut] for name, b in old.items()}, shape=shape)
        new: QuantizedTensor = made(q, dequantize(part))  # type: ignore[assignment]
        for name, b in new.buffers().items():
            buffers[name][cut] = b
    return QuantizedTensor.fitting(buffers, q, tuple(weight.shape), weight.dtype)


def _has_own_rows(q: Quantizer, ndim: int) -> bool:
    """Whether each row of a tensor has its own codes and scales."""
    try:
        return all(units[0] == 1 for units in of_buffers(q, (copies.ROWWISE,), ndim).values())
    except IndivisibleError:
        return False
