"""LoRA of PEFT on quantized layers: adapters that merge into floats, and leave again without a trace."""

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from hop.nn.convolutions import Conv1d, Conv2d
from hop.nn.layer import Layer
from hop.nn.layers import Embedding, Linear

_layer: Any = importlib.import_module("peft.tuners.lora.layer")  # which type checkers may not find
_LoraConfig: Any = importlib.import_module("peft").LoraConfig


class _Exact:
    """What merges an adapter into a float layer, of the numbers that the codes stand for: in codes again, a change
    smaller than half a step would be lost."""

    base_layer: Any
    merged_adapters: list[str]
    _quantized: tuple[Layer, ...] = ()  # the base, while adapters are merged; in a tuple, which is no submodule

    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        """Merge adapters: the base layer becomes a float one."""
        base = self.base_layer
        if isinstance(base, Layer):
            floats: Any = base.to_float()
            floats.weight.requires_grad_(False)
            if getattr(floats, "bias", None) is not None:  # a copy: adapters may have a bias, which is added to it
                floats.bias = nn.Parameter(floats.bias.detach().clone(), requires_grad=False)
            self._quantized, self.base_layer = (base,), floats
        try:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
        finally:
            if not self.merged_adapters:
                self._bring_back()

    def unmerge(self) -> None:
        """Bring the quantized base layer back, as it was."""
        if not self.merged_adapters:
            super().unmerge()  # type: ignore[misc]  # which warns
            return
        self.merged_adapters.clear()
        self._bring_back()

    def _bring_back(self) -> None:
        if self._quantized:
            (self.base_layer,), self._quantized = self._quantized, ()


class LoraLinear(_Exact, _layer.Linear):
    """Of hop.nn.Linear."""


class _Convolution(_Exact):
    """PEFT makes adapters of a convolution by the class of its base layer, which is to be the float one."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        base = self.base_layer
        self.base_layer = base.to_float() if isinstance(base, Layer) else base
        try:
            super().update_layer(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.base_layer = base


class LoraConv1d(_Convolution, _layer.Conv1d):
    """Of hop.nn.Conv1d."""


class LoraConv2d(_Convolution, _layer.Conv2d):
    """Of hop.nn.Conv2d."""


class LoraEmbedding(_Exact, _layer.Embedding):
    """Of hop.nn.Embedding."""


_CLASSES = {Linear: LoraLinear, Conv1d: LoraConv1d, Conv2d: LoraConv2d, Embedding: LoraEmbedding}


def register_lora(config: Any) -> Any:
    """Let adapters on quantized layers merge into floats.

    A merged layer is a float one: its weight is the numbers that the codes stand for, and the change that the adapter
    learned, both in full. Without this, PEFT adds the change to the codes, and what is smaller than half a step of the
    format is lost. Training and inference are the same either way. `unmerge` brings back the quantized layer as it was.

    Args:
        config: a peft.LoraConfig, before get_peft_model or PeftModel.from_pretrained(..., config=config). PEFT does not
            save what is registered.

    Returns:
        config.

    Raises:
        TypeError: config is none.
    """
    if not isinstance(config, _LoraConfig):
        raise TypeError(f"register_lora: config must be a peft.LoraConfig, got {type(config).__name__}")
    config._register_custom_module(_CLASSES)
    return config
