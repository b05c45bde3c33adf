"""Tables of float modules and the quantized layers that replace them."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from hop.nn.attention.multihead import MultiheadAttention, OutputProjection
from hop.nn.layers.base import Layer
from hop.nn.layers.convolutions import CONVOLUTIONS
from hop.nn.layers.functions import FUNCTIONS, Function
from hop.nn.layers.linear import Embedding, Linear, ScaledEmbedding

Kind = type[Layer] | type[MultiheadAttention]
LAYERS: dict[type[nn.Module], Kind] = {
    **{layer.float_type: layer for layer in (Linear, Embedding, OutputProjection, *CONVOLUTIONS)},
    nn.MultiheadAttention: MultiheadAttention,
}
"""From a float layer's class to the quantized one."""


def layer_of(module: nn.Module) -> Kind | None:
    """The quantized class that replaces a float layer, parametrized or not; None if there is none."""
    return ScaledEmbedding if ScaledEmbedding.takes(module) else LAYERS.get(type_before_parametrizations(module))


FUNCTION_OF: dict[type[nn.Module], type[Function]] = {function.float_type: function for function in FUNCTIONS}
"""From the class of a norm or activation to ours."""


def _rms_norm(module: Any) -> nn.Module:
    result = nn.RMSNorm(module.weight.shape, module.variance_epsilon, elementwise_affine=False)
    result.elementwise_affine, result.weight = True, module.weight
    return result


_NORMS = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2")
_NORMS += ("qwen3.modeling_qwen3.Qwen3", "phi3.modeling_phi3.Phi3", "mixtral.modeling_mixtral.Mixtral")
_SAME: dict[str, Callable[[Any], nn.Module]] = {
    "transformers.activations.GELUActivation": lambda _: nn.GELU(),
    "transformers.activations.NewGELUActivation": lambda _: nn.GELU("tanh"),
    "transformers.activations.GELUTanh": lambda _: nn.GELU("tanh"),
    "transformers.activations.PytorchGELUTanh": lambda _: nn.GELU("tanh"),
    "transformers.activations.SiLUActivation": lambda _: nn.SiLU(),
    **{f"transformers.models.{name}RMSNorm": _rms_norm for name in _NORMS},
}
"""Modules of other packages, by class name: the PyTorch module that computes the same, except for rounding."""


def function_of(module: nn.Module) -> nn.Module | None:
    """A norm or activation as a PyTorch module that FUNCTION_OF can replace; None if it is not one."""
    if type(module) in FUNCTION_OF:
        return module
    same = _SAME.get(f"{type(module).__module__}.{type(module).__qualname__}")
    return None if same is None else same(module).train(module.training)


LEFT: dict[type[nn.Module], str] = {
    nn.RNNBase: "its products are inside one operator of PyTorch for all time steps, and hop has none for it; "
    "to quantize them, write the recurrence with Linear layers",
    nn.RNNCellBase: "its products are inside one operator of PyTorch, and hop has none for it; to quantize them, write "
    "the cell with Linear layers",
}
"""Modules whose own parameters are weights of products, and the reason why they stay in floats."""
