"""StoredWeight: the form of a layer's weight: packed for the kernels of its device, plain in files."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import Self

from hop.compat import dtensor
from hop.compat.pytree import StateDict
from hop.impls.pack import layout_for, pack_operator
from hop.impls.quantize import dequantize, quantize
from hop.nn.contexts import WEIGHT
from hop.nn.weights import master
from hop.nn.weights.loading import check_loaded
from hop.numerics.layouts import Layout
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor


class StoredWeight(nn.Module):
    """A module whose weight may be quantized and packed."""

    weight: Tensor
    scales: Any  # an nn.ModuleDict if there are any
    frozen: bool  # whether the weight is quantized
    packs: bool  # whether to keep codes in the layout that products read fastest, on any device

    def transformed(self, x: Tensor) -> Tensor:
        """The part of an input that is quantized."""
        return x

    def float_weight(self, weight: Tensor) -> Tensor:
        """The float layer's weight for `weight`."""
        return weight

    def codes(self) -> QuantizedTensor:
        """The weight of a frozen module."""
        weight = self.weight
        assert isinstance(weight, QuantizedTensor)
        return weight

    def frozen_quantizer(self) -> Quantizer | None:
        """The quantizer that freezing uses for the weight; None if it stays in floats."""
        raise NotImplementedError

    def take_frozen(self, weight: nn.Parameter, packs: bool) -> None:
        """Compute with a quantized weight from now on."""
        raise NotImplementedError

    def reads_sums(self) -> bool:
        """Whether the weight's factors may have zero points, so that products need sums of its codes."""
        return False

    def laid_out(self, weight: QuantizedTensor, packs: bool) -> QuantizedTensor:
        """A quantized weight in the layout that this layer's products read fastest on its device if `packs`, else
        plain.
        """
        if weight.quantizer.is_dense():
            return weight  # no product reads it faster than packed bytes, and the plain form is larger
        layout = _layout(weight, self.reads_sums()) if packs else None
        if weight.quantizer.layout == layout:
            return weight
        return pack_operator(weight, "" if layout is None else str(layout))

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.save_plain(destination, f"{prefix}{WEIGHT}")

    def save_plain(self, destination: StateDict, key: str) -> None:
        """Convert the weight in a state_dict to the plain form."""
        weight = destination.get(key)
        if self.packs and isinstance(weight, QuantizedTensor):
            destination[key] = self.laid_out(weight, False)

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, local_metadata: Mapping[str, object], *args: object, **kwargs: object
    ) -> None:
        if not any(
            key.startswith(f"{prefix}scales.") for key in state_dict
        ):  # a float layer's state_dict: scales keep their values
            state = nn.ModuleDict(self.scales).state_dict()
            state_dict.update({f"{prefix}scales.{k}": t.detach() for k, t in state.items()})
        assigns = bool(local_metadata.get("assign_to_params_buffers", False))
        self.prepare_loading(state_dict, f"{prefix}{WEIGHT}", assigns)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self.finish_loading(assigns)

    def prepare_loading(self, state_dict: StateDict, key: str, assigns: bool) -> None:
        """Convert the weight in a state_dict to the form of the layer's weight."""
        if key in state_dict:
            self.check_loaded(key, state_dict[key], assigns)
            state_dict[key] = self._loaded(master.gathered_like(self.weight, state_dict[key]), assigns)

    def check_loaded(self, key: str, new: object, assigns: bool) -> None:
        """Raise RuntimeError for a state_dict's weight that is not quantized like the layer's."""
        q = dtensor.own_part(self.weight).quantizer.plain if self.frozen else self.frozen_quantizer()
        check_loaded(key, self.frozen, q, new, assigns)

    def finish_loading(self, assigns: bool) -> None:
        """Mark the layer as frozen if a quantized weight was assigned."""
        if assigns and isinstance(self.weight, QuantizedTensor) and not self.frozen:
            self.take_frozen(cast(nn.Parameter, self.weight.requires_grad_(False)), self.packs)

    def _loaded(self, weight: Tensor, assigns: bool) -> Tensor:
        """Convert a loaded weight to the form of the layer's weight."""
        if self.frozen and assigns and getattr(weight, "quantizer", None) != (own := self.codes().quantizer.plain):
            numbers = dequantize(weight) if isinstance(weight, QuantizedTensor) else weight
            weight = quantize(own, numbers)
        if self.packs and isinstance(weight, QuantizedTensor):
            return self.laid_out(weight, True)
        return weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.lay_out()
        return self

    def __setstate__(self, state: Mapping[str, object]) -> None:
        super().__setstate__(state)
        self.lay_out()

    def lay_out(self) -> None:
        """Convert the weight to the layout for its current device."""
        if self.packs and isinstance(self.weight, QuantizedTensor):
            packed = self.laid_out(self.weight, True)
            if packed is not self.weight:
                self.weight = nn.Parameter(packed, requires_grad=False)


def _layout(weight: QuantizedTensor, sums: bool) -> Layout | None:
    layout = layout_for(weight.quantizer.plain, weight.dim(), weight.device.type)
    if layout is None or layout.is_decoded:
        return None  # plain codes could not be restored
    return layout if sums or not layout.has_plain_codes else None
