"""Which layer takes the place of which."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from hop.nn.attention import MultiheadAttention, OutputProjection
from hop.nn.convolutions import CONVOLUTIONS
from hop.nn.functions import FUNCTIONS
from hop.nn.layers import Embedding, Linear, ScaledEmbedding

LAYERS: dict[type[nn.Module], Any] = {
    **{layer.float_type: layer for layer in (Linear, Embedding, OutputProjection, *CONVOLUTIONS)},
    nn.MultiheadAttention: MultiheadAttention,
}
"""From a float layer to the quantized one."""


def layer_of(module: nn.Module) -> Any:
    """The class of the quantized layer that takes the place of a float one, parametrized or not; None if there is
    none."""
    return ScaledEmbedding if ScaledEmbedding.takes(module) else LAYERS.get(type_before_parametrizations(module))


FUNCTION_OF: dict[type[nn.Module], Any] = {function.float_type: function for function in FUNCTIONS}
"""From a norm or an activation to ours."""


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
"""Modules of other packages, by their class, as those of PyTorch that compute the same but for roundings."""


def function_of(module: nn.Module) -> nn.Module | None:
    """A norm or an activation as the module of PyTorch of which we have one of our own; None for any other."""
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
"""Modules whose own parameters are weights of products, and why they stay in floats."""
