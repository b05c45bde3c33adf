"""freeze: replace the weights of quantized layers by codes."""

from collections.abc import Collection, Sequence

from torch import nn

from hop.compat.pytree import Kwargs
from hop.impls.quantize import quantize, quantize_weight
from hop.nn.contexts import WEIGHT
from hop.nn.layers.base import Layer, check_unsharded, modules_of, not_a_model
from hop.nn.scales.delayed import AmaxHistory
from hop.nn.scales.static import StaticScale
from hop.nn.weights.holders import Holder, holders_of
from hop.nn.weights.recomputed import check_plain, settle
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor


def freeze(model: nn.Module, pack: bool = False, *, trained: Collection[nn.Module] | None = None) -> nn.Module:
    """Replace the weights of quantized layers by QuantizedTensors without gradients, in place.

    The forward gives the same bits as in eval mode, with less memory. Each weight is quantized by the active scheme,
    which becomes the layer's own; stochastic rounding becomes rounding to nearest, so the layer draws no random bits
    any more.

    Layers whose scheme leaves the weight in floats are not changed. Layers that share a weight, a quantizer and a scale
    share the frozen weight. Float weights are replaced one at a time, the smallest first, so peak memory hardly grows.
    Weights that torch.nn.utils.prune, weight_norm, spectral_norm or parametrize compute are quantized as computed in
    eval mode, and are not recomputed any more.

    Args:
        pack: whether to convert weights to the layout that products read fastest on this machine (hop.pack), which
            saves that conversion in each call. Layers that are frozen already are converted too. state_dicts contain
            the plain form in any case, and a layer packs what it loads for the machine it runs on. Embeddings stay
            plain, except those that share their weight with a product: they look up rows of the packed one.
        trained: the layers whose weights get the scales of their rule; those of others have least squared error
            (hop.quantize_weight), so the forward changes. None for all.

    Returns:
        model.

    Raises:
        ValueError: there is no quantized layer, a static scale is not set, or an unknown hook computes a weight. No
            layer is changed then.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("freeze", model)
    if not isinstance(pack, bool):
        raise TypeError(f"freeze: pack must be True or False, got {pack!r}; give one of them")
    holders = list(holders_of(model))
    if not holders and not any(isinstance(m, Layer) for m in model.modules()):
        raise ValueError(
            f"freeze: model={type(model).__name__} has no quantized layers; call hop.nn.convert(model, scheme) first"
        )
    layers = [m for m in model.modules() if isinstance(m, Layer) and (m.plan().quantizes_weight or m.frozen)]
    _check_computed(model, layers, holders)
    unfrozen = [*(m for m in layers if not m.frozen), *(h.module for h in holders if not h.frozen)]
    check_unsharded("freeze", model, unfrozen)
    for layer in layers:
        layer.prepare()
        if not layer.frozen:
            _check_scale(layer)
    for owner in [*(layer.weight_owner()[0] for layer in layers), *layers, *(holder.module for holder in holders)]:
        settle(owner)
    products = {_identity(layer) for layer in layers if layer.is_packable}
    # keyed by what they depend on; the model keeps these objects alive, so ids stay unique
    frozen: dict[object, nn.Parameter] = {}
    positive = {_identity(layer) for layer in layers if not layer.signed_scales()}
    for layer in sorted(layers, key=lambda layer: layer.weight.numel()):
        identity = _identity(layer)
        packs = pack and (layer.is_packable or (layer.reads_packed and identity in products))
        key = (*identity, packs)
        if key not in frozen:
            searches = trained is not None and layer not in trained
            weight = layer.codes() if layer.frozen else quantized_weight(layer, searches, identity not in positive)
            frozen[key] = nn.Parameter(layer.laid_out(weight, packs), requires_grad=False)
        layer.take_frozen(frozen[key], packs)
    for holder in holders:
        holder.freeze(pack, trained is not None and holder.module not in trained)
    return model


def _check_computed(model: nn.Module, layers: Sequence[Layer], holders: Sequence[Holder]) -> None:
    """Raise for weights that are recomputed in each call and either cannot become Parameters or are frozen already."""
    own = {layer: layer.frozen for layer in layers} | {holder.module: holder.frozen for holder in holders}
    own |= {layer.weight_owner()[0]: layer.frozen for layer in layers}
    for name, module in modules_of(model):
        if module in own:
            check_plain("freeze", [(name, module)], unknown=not own[module])


def _quantizer(layer: Layer) -> Quantizer:
    q = layer.frozen_quantizer()
    assert q is not None
    return q


def _state(layer: Layer) -> nn.Module | None:
    """The state with the weight's scale; None if the scale is found from the weight."""
    return layer.scales[WEIGHT] if _quantizer(layer).scale.missing() is not None else None


def _check_scale(layer: Layer) -> None:
    state = _state(layer)
    if isinstance(state, StaticScale) and not state.ready:
        raise ValueError(
            f"freeze: the static scale of a weight ({_quantizer(layer)}) is not set; call hop.nn.calibrate before"
        )


def _identity(layer: Layer) -> tuple[object, ...]:
    """Key of a frozen weight: layers with equal keys share it."""
    if layer.frozen:
        return (id(layer.weight),)
    state = _state(layer)
    others = (None if x is None else id(x) for x in (state, layer.norm))
    return id(layer.weight), str(_quantizer(layer)), *others


def quantized_weight(layer: Layer, searches: bool, signed: bool) -> QuantizedTensor:
    """The frozen weight of a layer: a QuantizedTensor, rounded to nearest, with scales of least squared error if it
    `searches`, which may be negative if `signed`.
    """
    given: Kwargs = {}
    state = _state(layer)
    if isinstance(state, AmaxHistory):
        given = {"scale": state.amax}
    elif isinstance(state, StaticScale):
        given = {"scale": state.scale.detach()}
        if state.zero_point is not None:
            given["zero_point"] = state.zero_point.detach()
    if searches and not given:
        return quantize_weight(_quantizer(layer), layer.folded_weight().detach(), signed=signed)
    return quantize(_quantizer(layer), layer.folded_weight().detach(), **given)
