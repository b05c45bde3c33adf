"""Turn a checkpoint's tensors into quantized weights, one at a time, as transformers reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from typing_extensions import Self

from hop.impls.quantize import quantize_weight
from hop.integrations.places import weight_of
from hop.numerics import layouts
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import JsonObject
from hop.tensor.proto import TensorProto


def buffers_of(q: Quantizer, shape: Sequence[int]) -> list[str]:
    """The names of the buffers that a checkpoint may store for a weight of `shape` by `q`, including those of dense
    codes.
    """
    dense = layouts.dense(q.format)
    return list((q if dense is None else replace(q, layout=dense)).buffers(shape))


class Reported(Protocol):
    """A quantizer that reports weights of other shapes in the checkpoint."""

    mismatched: set[str]


class _Operation(ConversionOps):
    """A conversion step between a checkpoint and a model.

    Args:
        hf_quantizer: the quantizer. If transformers finds this attribute, it leaves dtypes unchanged.
    """

    def __init__(self, hf_quantizer: Reported) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: object) -> Self:  # transformers copies it for each weight
        return self


class Quantize(_Operation):
    """Quantizes float weights."""

    @torch.no_grad()
    def convert(
        self, input_dict: Mapping[str, object], *args: object, model: object = None, **kwargs: object
    ) -> JsonObject:
        assert isinstance(model, nn.Module)
        return {name: self._quantized(model, name, _only(name, value)) for name, value in input_dict.items()}

    def _quantized(self, model: nn.Module, name: str, value: Tensor) -> Tensor:
        layer = weight_of(model, name)
        if layer is None:
            return value
        if value.shape != layer.weight.shape:
            self.hf_quantizer.mismatched.add(name)  # transformers reports it, or creates a new weight if so configured
            return value
        q = layer.frozen_quantizer()
        assert q is not None
        return nn.Parameter(quantize_weight(q, value, signed=layer.signed_scales()), requires_grad=False)


class Assemble(_Operation):
    """Assembles a quantized weight from its buffers."""

    def convert(
        self, input_dict: JsonObject, *args: object, model: object = None, full_layer_name: str = "", **kwargs: object
    ) -> JsonObject:
        assert isinstance(model, nn.Module)
        layer = weight_of(model, full_layer_name)
        if layer is None:
            raise ValueError(
                f"{full_layer_name} is quantized in the checkpoint, but no scheme of the quantization_config in "
                "config.json matches that layer"
            )
        q = layer.frozen_quantizer()
        assert q is not None
        buffers = {key.rpartition(":")[2]: _only(key, value) for key, value in input_dict.items()}
        device = next(iter(buffers.values())).device
        if buffers.keys() > q.buffers(layer.weight.shape).keys():  # the high bits are stored too
            q = replace(q, layout=layouts.dense(q.format))
        proto = TensorProto(tuple(layer.weight.shape), layer.weight.dtype, device, quantizer=q)
        names = [buffer.name for buffer in proto.buffers()]
        if buffers.keys() != set(names):
            raise ValueError(f"{full_layer_name}: the checkpoint has its {sorted(buffers)}, but {q} needs {names}")
        weight = proto.create_tensor([buffers[name] for name in names])
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


class Converter(WeightConverter):
    """Collects the buffers of one weight: "x.weight:codes", "x.weight:scale", ...

    Saving needs no reverse step, because the state_dict is flat already.
    """

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        return WeightRenaming(":codes", ":codes")


def converter(weight: str, names: Sequence[str], hf_quantizer: Reported) -> Converter:
    """The converter for weights with this name and these buffers."""
    return Converter([f"{weight}:{name}" for name in names], weight, [Assemble(hf_quantizer)])


def _only(name: str, value: object) -> Any:
    """The tensor, which transformers may wrap in a list of one."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{name}: expected one tensor of the checkpoint, got {len(value)}")
    return value[0]
