"""PEFT's LoRA on quantized layers: adapters that merge into floats, and unmerge without a trace."""

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from hop.nn.layers.base import Layer
from hop.nn.layers.convolutions import Conv1d, Conv2d
from hop.nn.layers.linear import Embedding, Linear

_layer: Any = importlib.import_module("peft.tuners.lora.layer")  # dynamic because type checkers may not find peft
_LoraConfig: Any = importlib.import_module("peft").LoraConfig


class _FloatMerge:
    """Merges adapters into a float copy of the base layer: in codes, changes smaller than half a step would be lost."""

    base_layer: Any
    merged_adapters: list[str]
    _quantized: tuple[Layer, ...] = ()  # the base while adapters are merged; in a tuple so that it is no submodule

    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        """Merge adapters, replacing the base layer with a float one."""
        base = self.base_layer
        if isinstance(base, Layer):
            floats: Any = base.to_float()
            floats.weight.requires_grad_(False)
            if getattr(floats, "bias", None) is not None:  # a copy, because an adapter's bias is added to it
                floats.bias = nn.Parameter(floats.bias.detach().clone(), requires_grad=False)
            self._quantized, self.base_layer = (base,), floats
        try:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
        finally:
            if not self.merged_adapters:
                self._restore_base()

    def unmerge(self) -> None:
        """Restore the quantized base layer."""
        if not self.merged_adapters:
            super().unmerge()  # type: ignore[misc]  # which warns
            return
        self.merged_adapters.clear()
        self._restore_base()

    def _restore_base(self) -> None:
        if self._quantized:
            (self.base_layer,), self._quantized = self._quantized, ()


class LoraLinear(_FloatMerge, _layer.Linear):
    """A LoRA layer for hop.nn.Linear."""


class _Convolution(_FloatMerge):
    """Lets PEFT choose the adapter from the class of the float convolution."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        base = self.base_layer
        self.base_layer = base.to_float() if isinstance(base, Layer) else base
        try:
            super().update_layer(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.base_layer = base


class LoraConv1d(_Convolution, _layer.Conv1d):
    """A LoRA layer for hop.nn.Conv1d."""


class LoraConv2d(_Convolution, _layer.Conv2d):
    """A LoRA layer for hop.nn.Conv2d."""


class LoraEmbedding(_FloatMerge, _layer.Embedding):
    """A LoRA layer for hop.nn.Embedding."""


_CLASSES = {Linear: LoraLinear, Conv1d: LoraConv1d, Conv2d: LoraConv2d, Embedding: LoraEmbedding}


def register_lora(config: Any) -> Any:
    """Make adapters on quantized layers merge into floats.

    A merged layer is a float layer whose weight is the dequantized weight plus the adapter's full change. Without this,
    PEFT adds the change to the codes, and loses whatever is smaller than half a step of the format. Training and
    inference do not differ. `unmerge` restores the quantized layer.

    Args:
        config: a peft.LoraConfig, before get_peft_model or PeftModel.from_pretrained(..., config=config). PEFT does not
            save this registration.

    Returns:
        config.

    Raises:
        TypeError: config is not a peft.LoraConfig.
    """
    if not isinstance(config, _LoraConfig):
        raise TypeError(f"register_lora: config must be a peft.LoraConfig, got {type(config).__name__}")
    config._register_custom_module(_CLASSES)
    return config
