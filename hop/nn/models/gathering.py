"""gather_as_codes: let FSDP2 send the weights of layers as codes and scales."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from hop.compat import dtensor
from hop.nn.contexts import WEIGHT
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.layers.linear import Linear
from hop.nn.scales.static import StaticScale
from hop.nn.weights.master import Gathering, MasterWeight, parameter_like
from hop.nn.weights.recomputed import recomputed, remedied
from hop.numerics import schemes
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import ORIGINAL, QUANTIZED
from hop.tensor.buffers.sharding import keeps_blocks
from hop.tensor.distributed import fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def gather_as_codes(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of quantized layers as codes and scales.

    Call it after parallelize_module and before fully_shard. The weights stay float Parameters for optimizers and
    checkpoints. When fully_shard gathers one, each process quantizes its shard by the layer's scheme, with the scales
    of the whole weight: the codes are those of a single process that quantizes in the Parameter's dtype. The gathered
    weight and its gradient have the param_dtype of the MixedPrecisionPolicy. With backward="quantized" and blocks along
    rows that are not square (MX formats), the column-wise copy that the backward reads is gathered too.

    Returns:
        The names of the layers. Frozen layers, and those whose scheme leaves weights in floats, are left alone.

    Raises:
        ValueError: a scheme needs more than the codes of the weight, or a layer shares its weight with a module that is
            not quantized in the same way. No layer is changed then.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("gather_as_codes", model)
    layers = {
        name: layer
        for name, layer in modules_of(model)
        if isinstance(layer, Layer) and layer.plan().quantizes_weight and not layer.frozen
    }
    masters: dict[int, tuple[Quantizer, nn.Parameter]] = {}
    for name, layer in layers.items():
        layer.prepare()
        q = _quantizer(name, layer)
        known = masters.get(id(layer.weight))
        if known is None:
            masters[id(layer.weight)] = (q, _master(name, layer, q))
        elif known[0] != q or q.scale.missing() is not None:
            raise ValueError(
                f"gather_as_codes: layer {name!r} shares its weight with another layer, which uses {known[0]}, "
                f"while it uses {q}; give both one scheme, whose weight quantizer finds its scale"
            )
    owners = [layer.weight_owner() for layer in layers.values()]
    for name, module in modules_of(model):
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in masters and (module, own) not in owners:
                raise ValueError(
                    f"gather_as_codes: {type(module).__name__} {name!r} shares its {own} with a quantized layer, but "
                    "would get codes; convert it too, or give it a Parameter of its own"
                )
    for layer in layers.values():
        layer.weight = masters[id(layer.weight)][1]
    return list(layers)


def bytes_gathered(layer: Layer, processes: int) -> int:
    """Total bytes that all processes of a group send when FSDP2 gathers the layer's weight once.

    Raises:
        ValueError: gather_as_codes has not prepared the weight.
    """
    weight = layer.weight
    local = dtensor.own_part(weight)
    if not isinstance(local, MasterWeight):
        raise ValueError(
            f"bytes_gathered: layer must be one that gather_as_codes has prepared, got {layer}; call "
            "hop.nn.gather_as_codes before"
        )
    gathering = local.gathering
    return sum(fsdp.bytes_sent(q, gathering.shape, processes) for q in gathering.quantizers())


def _quantizer(name: str, layer: Layer) -> Quantizer:
    """The quantizer of the weight. Raises ValueError if the layer needs more than the weight's codes."""
    scheme = layer.plan().scheme
    assert scheme is not None and scheme.rhs is not None
    q, why = layer.weight_quantizer(scheme.rhs), None
    state = layer.scales[WEIGHT] if q.scale.missing() is not None else None
    if scheme.backward == ORIGINAL:
        why = 'backward="original" reads the unquantized weight; use "ste" or "quantized"'
    elif q.stochastic:
        why = f"its weight is rounded at random ({q}); use a quantizer that rounds to nearest"
    elif q.gradient is not None:
        why = f"gradient={q.gradient} reads the unquantized weight; use a quantizer with gradient=None"
    elif type(q) is not Quantizer:
        why = f"{type(q).__name__} may need statistics that processes do not combine; use a hop.Quantizer"
    elif isinstance(state, StaticScale) and state.learn:
        why = "a learned weight scale needs the unquantized weight; use learn_scales=False"
    elif isinstance(layer, Linear) and layer.save_original:
        why = "save_original=True needs the unquantized weight; use save_original=False"
    elif isinstance(layer.weight, MasterWeight):
        why = "it is prepared already; call gather_as_codes once"
    elif layer.norm is not None:
        why = "it quantizes its weight with a batch norm folded in; call fully_shard without gather_as_codes"
    elif computed := recomputed(layer.weight_owner()[0]):
        why = remedied(computed[0])
    elif layer.weight.dim() < 2:
        why = f"its weight must have two or more dimensions, got {tuple(layer.weight.shape)}"
    if why is not None:
        raise ValueError(f"gather_as_codes: layer {name!r}: {why}")
    return q


def _master(name: str, layer: Layer, q: Quantizer) -> nn.Parameter:
    weight, scheme = layer.weight, layer.plan().scheme
    assert scheme is not None
    as_columns = scheme.backward == QUANTIZED and isinstance(layer, Linear)
    as_columns = as_columns and not schemes.rows_share_scales(q) and not schemes.turns_exactly(q)
    needs_scale = q.scale.missing() is not None
    if as_columns and needs_scale:
        raise ValueError(f"gather_as_codes: layer {name!r}: the column-wise copy has no scale of its own ({q})")
    masks = scheme.backward != QUANTIZED and (needs_scale or q.scale.clips())
    local, outer = weight.detach(), None
    if dtensor.is_dtensor(weight):
        local = dtensor.own_part(weight).detach()
        outer = (weight.device_mesh, _cut_dimensions(name, [q, q.transposed(2)] if as_columns else [q], weight))
        if isinstance(state := layer.scales[WEIGHT] if needs_scale else None, StaticScale) and state.scale.numel() > 1:
            raise ValueError(
                f"gather_as_codes: layer {name!r}: its static scale, one per block ({q}), is not sharded like its "
                "weight, a DTensor; use one scale for the tensor, or a quantizer that finds its scales"
            )
    gathering = Gathering(q, tuple(local.shape), as_columns, outer, weakref.ref(layer), masks)
    master = MasterWeight(local, gathering)
    if dtensor.is_dtensor(weight):
        at = dtensor.Sharding([], weight.device_mesh, weight.placements, weight.shape, weight.stride())
        master = dtensor.make_dtensor(master, at)
    return parameter_like(weight, master)  # type: ignore[return-value]


def _cut_dimensions(name: str, quantizers: Sequence[Quantizer], weight: "DTensor") -> tuple[int | None, ...]:
    """For each mesh axis of a DTensor weight, the dimension it shards; None if it is replicated."""
    result = tuple(dtensor.sharded_dim(p) for p in weight.placements)
    for axis, (p, d) in enumerate(zip(weight.placements, result, strict=True)):
        size = weight.device_mesh.size(axis)
        whole = d is None or weight.shape[d] % size == 0
        whole = whole and (d is None or all(keeps_blocks(q, weight.shape, d, size) for q in quantizers))
        if p.is_partial() or not whole:
            raise ValueError(
                f"gather_as_codes: layer {name!r}: its weight {tuple(weight.shape)} is placed as {p} over {size} "
                f"processes, which gives no equal shards of whole blocks ({quantizers[0]}); change the size or scheme"
            )
    return result
