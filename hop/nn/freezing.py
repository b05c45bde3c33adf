"""freeze: the weights of quantized layers as codes."""

from typing import Any

from torch import nn

from hop.impls.quantize import quantize
from hop.nn.contexts import WEIGHT
from hop.nn.delayed import AmaxHistory
from hop.nn.layer import Layer
from hop.nn.static import StaticScale


def freeze(model: nn.Module) -> None:
    """Replace the weights of quantized layers by QuantizedTensors, without gradients: the forward gives the same bits,
    in less memory. Each is quantized by the scheme that is active, and that is then the layer's own.

    Layers whose scheme leaves the weight in floats are not changed. Layers that share a weight, a quantizer and a scale
    share the frozen one.

    Raises:
        ValueError: there is no quantized layer, a scheme rounds weights at random, or a static scale is not set. No
            layer is changed then.
    """
    if not any(isinstance(m, Layer) for m in model.modules()):
        raise ValueError(
            f"freeze: model has no quantized layers, and is a {type(model).__name__}; call hop.nn.convert before"
        )
    layers = [m for m in model.modules() if isinstance(m, Layer) and m.plan().quantizes_weight and not m.frozen]
    made: dict[Any, nn.Parameter] = {}
    found = [(layer, _frozen(layer, made)) for layer in layers]
    for layer, weight in found:
        layer.take_frozen(weight)


def _frozen(layer: Layer, made: dict[Any, nn.Parameter]) -> nn.Parameter:
    layer.prepare()
    scheme = layer.plan().scheme
    assert scheme is not None and scheme.rhs is not None
    if scheme.rhs.stochastic:
        raise ValueError(
            f"freeze: rhs={scheme.rhs} of the scheme rounds at random; take one that rounds to the nearest"
        )
    q = layer.weight_quantizer(scheme.rhs)
    given: dict[str, Any] = {}
    state = layer.scales[WEIGHT] if q.scale.missing() is not None else None
    if isinstance(state, AmaxHistory):
        given = {"scale": state.amax}
    elif isinstance(state, StaticScale):
        if not state.ready:
            raise ValueError(f"freeze: the static scale of a weight ({q}) is not set; call hop.nn.calibrate before")
        given = {"scale": state.scale.detach()}
        if state.zero_point is not None:
            given["zero_point"] = state.zero_point.detach()
    key = (id(layer.weight), str(q), None if state is None else id(state))
    if key not in made:
        made[key] = nn.Parameter(quantize(q, layer.weight.detach(), **given), requires_grad=False)
    return made[key]
