"""HopQuantizer: transformers' hooks for loading and saving a model with a HopConfig."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantizer

from hop.integrations.config import METHOD, check_without_data
from hop.integrations.config import HopConfig as HopConfig
from hop.integrations.loading import Converter, Quantize, buffers_of, converter
from hop.integrations.places import check_ties, conversion_filter, restore, rules_with_any_prefix, tied, weight_of
from hop.nn.layers.base import Layer, modules_of
from hop.nn.layers.linear import Linear, ScaledEmbedding
from hop.nn.models.attention_rules import checked_attention, convert_attention
from hop.nn.models.conversion import convert, has_static_scale, rules_of
from hop.nn.models.exact import check_layers, is_exact, make_exact
from hop.nn.models.freezing import freeze
from hop.nn.models.report import Report
from hop.nn.models.selectors import matches
from hop.nn.scales.static import StaticScale
from hop.nn.weights.holders import Holder, Weight, holder_of
from hop.nn.weights.recomputed import recomputed
from hop.numerics import spelling
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.copies import Buffer
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor
from hop.tensor.proto import TensorProto
from hop.tensor.storage import flattened

_Base: Any = HfQuantizer  # Any, because its methods are annotated to return None


class HopQuantizer(_Base):
    """Quantizes weights while transformers reads them, and writes codes and scales as plain tensors.

    Args:
        quantization_config: a HopConfig.
        kwargs: pre_quantized, whether the checkpoint has codes.
    """

    requires_calibration = False
    quantization_config: HopConfig

    def __init__(self, quantization_config: HopConfig, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self.mismatched: set[str] = set()  # weights with another shape in the checkpoint
        self._buffers: dict[str, list[str]] = {}  # buffers of the quantized weights, by parameter name

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "HopConfig: device_map has 'disk', which quantized weights do not support; give their modules a device"
            )
        if not self.pre_quantized:
            check_without_data(self.quantization_config.rules)

    # ---- loading

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        if not self.pre_quantized:
            self._keep_tables(model)
        if self.pre_quantized:  # the checkpoint determines which layers have codes
            rules = rules_with_any_prefix(model, self.quantization_config.rules)
            if rules:
                convert(model, rules, filter=lambda _, module: not recomputed(module))
        else:
            config = self.quantization_config
            convert(model, config.rules, filter=conversion_filter(model, config.modules_to_not_convert))
            check_ties(model)
        self._attend(model)
        self._order(model)
        self._set_quantizers(model)
        for layer in self._layers(model).values():
            for name, weight in _weights(layer):
                known = self._buffers.setdefault(name, [])
                q = weight.frozen_quantizer()
                assert q is not None
                known += [b for b in buffers_of(q, weight.weight.shape) if b not in known]

    def _keep_tables(self, model: Any) -> None:
        """Add rules of 8 bits for embeddings and layers tied to them, if there is a single scheme of fewer."""
        config = self.quantization_config
        if not isinstance(config.scheme, str):
            return
        (selector, scheme), *others = rules_of(model, Scheme.parse(config.scheme), exact=config.exact)
        tables = [name for name, module in modules_of(model, every_name=True) if matches(selector, name, module)]
        if others and tables:
            rules = [*((name, scheme) for name in sorted(tied(model, tables))), *others]
            model.config.quantization_config = self.quantization_config = config.with_rules(rules)

    def _attend(self, model: Any) -> None:
        attention = self.quantization_config.attention
        if attention is None:
            return
        rows = convert_attention(model, checked_attention(AttentionScheme.parse(attention)))
        report = getattr(model, "hop_report", Report((), ()))
        model.hop_report = replace(report, rows=(*report.rows, *rows))

    def _order(self, model: PreTrainedModel) -> None:
        """Allocate the buffers for input orders."""
        listed, prefix = set(self.quantization_config.input_orders), f"{model.base_model_prefix}."
        for name, layer in modules_of(model, every_name=True) if listed else ():
            if listed.isdisjoint((name, prefix + name, name.removeprefix(prefix))):
                continue
            if not isinstance(layer, Linear):
                raise ValueError(
                    f"HopConfig: input_orders: {name!r} is a {type(layer).__name__}, and it must be a quantized "
                    "Linear; leave it out"
                )
            layer.input_order = torch.empty(layer.in_features, dtype=torch.int64, device=layer.weight.device)

    def _set_quantizers(self, model: PreTrainedModel) -> None:
        """Set the quantizers of single weights of experts."""
        prefix = f"{model.base_model_prefix}."
        for name, text in self.quantization_config.weight_quantizers.items():
            for own in (name, prefix + name, name.removeprefix(prefix)):
                with suppress(AttributeError):  # no module of that name
                    weight = weight_of(model, own)
                    if isinstance(weight, Weight):
                        weight.holder.quantizers[weight.name] = Quantizer.parse(text)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        return param_name not in self.mismatched and weight_of(model, param_name) is not None

    def get_quantize_ops(self) -> Quantize:
        return Quantize(self)

    def get_weight_conversions(self) -> list[Converter]:
        return [converter(*weight, self) for weight in self._buffers.items()] if self.pre_quantized else []

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        layer = weight_of(model, param_name)
        if layer is None:
            return param.element_size()
        sizes = [torch.Size(b.shape).numel() * b.dtype.itemsize for b in self._described(layer)]
        return sum(sizes) / max(param.numel(), 1)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        layers = self._layers(model)
        for layer in layers.values():
            if isinstance(layer, Holder):
                layer.take_frozen(False)
                continue
            if isinstance(layer, ScaledEmbedding):
                layer.set_scale()  # transformers' initialization only knows its own class
            weight = layer.weight
            if isinstance(weight, QuantizedTensor):
                layer.take_frozen(weight, False)  # type: ignore[arg-type]  # it is a Parameter too
        for module in model.modules():
            if isinstance(module, StaticScale):
                module.update_ready()  # transformers loads tensors one by one
        if any(isinstance(layer, Holder) for layer in layers.values()):
            model._weight_conversions = []  # save unchanged: codes cannot be converted back to a tensor per expert
        floats = [name for name, layer in layers.items() if not layer.frozen]
        restore(
            model, floats, "the checkpoint has no codes for it" if self.pre_quantized else "it is newly initialized"
        )
        if any(layer.frozen for layer in layers.values()):
            freeze(model, pack=self.quantization_config.pack)
        config = self.quantization_config
        if config.exact:
            remedy = "give them an integer scheme, and modules_to_not_convert=[]"
            check_layers("HopConfig", model, lambda name, module: isinstance(module, Layer) and module.frozen, remedy)
            make_exact(model, AttentionScheme.parse(config.attention or ""))
        return model

    @staticmethod
    def _layers(model: nn.Module) -> dict[str, Layer | Holder]:
        """The layers whose weights the scheme quantizes, and holders of such weights, under each of their names."""
        layers: dict[str, Layer | Holder] = {}
        for name, module in modules_of(model, every_name=True):
            layer = module if isinstance(module, Layer) else holder_of(module)
            if layer is not None and layer.frozen_quantizer() is not None:
                layers[name] = layer
        return layers

    @staticmethod
    def _described(layer: Layer | Weight) -> list[Buffer]:
        return TensorProto(tuple(layer.weight.shape), layer.weight.dtype, quantizer=layer.frozen_quantizer()).buffers()

    # ---- saving, and back to floats

    def get_state_dict_and_metadata(
        self, model: nn.Module, *args: object, **kwargs: object
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state_dict with codes and scales as plain tensors, tied weights only once, and its metadata for
        hop.storage.load_file.
        """
        state: dict[str, Tensor] = model.state_dict()
        for target, source in getattr(model, "all_tied_weights_keys", {}).items():
            if target in state and source in state and _is_same(state[target], state[source]):
                del state[target]
        return flattened(state)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        modules = modules_of(model, every_name=True)
        names = [name for name, m in modules if isinstance(m, Layer) or holder_of(m) is not None]
        restore(model, names, "dequantized")
        model.tie_weights()
        if isinstance(dtype, str):  # saving stores it as text in the model's config
            dtype = spelling.dtype(f"torch.{dtype}")
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained; the quantized weights are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


register_quantizer(METHOD)(HopQuantizer)


def make_serializable(model: Any, pack: bool) -> None:
    """Attach a HopQuantizer and a HopConfig to a model that hop.quantize_ quantized, so that `save_pretrained` works.

    HopConfig supports static scales of inputs alone: a model with others gets neither, and `save_pretrained` raises.
    """
    layers = [(name, layer.scheme) for name, layer in HopQuantizer._layers(model).items()]  # includes earlier calls
    attention = {row.scheme for row in model.hop_report.rows if isinstance(row.scheme, AttentionScheme)}
    others = (replace(scheme, lhs=None) for _, scheme in layers)
    if not layers or len(attention) > 1 or any(map(has_static_scale, others)):
        return
    schemes = {scheme for _, scheme in layers}
    # A layer without codes in the checkpoint is loaded in floats, so that one scheme serves all.
    rules = schemes.pop() if len(schemes) == 1 else layers
    config = HopConfig(
        rules, modules_to_not_convert=[], pack=pack, attention=next(iter(attention), None), exact=is_exact(model)
    )
    model.hf_quantizer = HopQuantizer(config, pre_quantized=False)
    model.config.quantization_config = config


def _weights(layer: Layer | Holder) -> list[tuple[str, Layer | Weight]]:
    """The quantized weights of a layer or holder, by parameter name."""
    return [(w.name, w) for w in layer.weights()] if isinstance(layer, Holder) else [("weight", layer)]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two quantized tensors are equal: a layer that packs its weight has a copy of the tied one."""
    if not isinstance(one, QuantizedTensor) or not isinstance(other, QuantizedTensor):
        return False
    return one.quantizer == other.quantizer and all(
        torch.equal(a, b) for a, b in zip(one.buffers().values(), other.buffers().values(), strict=True)
    )
