"""Holder: quantized weights of a module that keeps its class, such as experts with 3-D parameters.

A weight is a stack of matrices (E, R, K), or (E, K, R) where products sum over the first matrix dimension. Each matrix
is quantized separately. A package that defines such modules registers a subclass in KINDS; integrations for other
packages are imported once the package itself is imported.
"""

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from hop.compat import dtensor
from hop.compat.pytree import StateDict
from hop.impls.pack import layout_for, pack_operator
from hop.impls.quantize import dequantize, quantize, quantize_weight
from hop.nn.contexts import SchemeNeeds, active
from hop.nn.weights.loading import check_loaded
from hop.numerics.layouts import Stacked
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

KINDS: list[type["Holder"]] = []
_PACKAGES = dict.fromkeys(  # a package: our module for it
    ("transformers.integrations.moe", "transformers.models.llama4.modeling_llama4"), "hop.integrations.experts"
)
_OWN = "hop_weights"  # the module attribute with its Holder


class Holder:
    """Quantizes the weights of a module and converts their layout.

    Args:
        module: the module with the weights.
        scheme: the scheme of its products.

    Raises:
        ValueError: the scheme needs static or delayed scales, random bits or quantized outputs.
    """

    label: ClassVar[str]

    def __init__(self, module: nn.Module, scheme: Scheme) -> None:
        self.module, self.names, self.columns = module, self.weights_of(module), self.sums_first(module)
        self.frozen, self.packs = False, False
        self.quantizers: dict[str, Quantizer] = {}  # of weights with another quantizer than the scheme's
        self.scheme = scheme
        setattr(module, _OWN, self)
        module.register_state_dict_post_hook(_saved)
        module.register_load_state_dict_pre_hook(_loading)
        module.register_load_state_dict_post_hook(_loaded)

    @classmethod
    def weights_of(cls, module: nn.Module) -> tuple[str, ...]:
        """The names of the module's weights; empty if it is of another kind."""
        raise NotImplementedError

    @classmethod
    def sums_first(cls, module: nn.Module) -> bool:
        """Whether products sum over the first dimension of each matrix."""
        raise NotImplementedError

    @property
    def scheme(self) -> Scheme:
        """The scheme used outside of `with hop.nn.scheme(...)`."""
        result = self._own.scheme
        assert result is not None
        return result

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        own = SchemeNeeds.of(scheme)
        if own.needs or scheme.is_stochastic() or scheme.output is not None:
            raise ValueError(
                f"{self.label} need scales that are found in each call, no random bits and no output quantizer; "
                f"got scheme={scheme}; use one such as 'int8'"
            )
        if self.frozen and scheme.rhs != self.scheme.rhs:
            raise ValueError(f"{self.label} are frozen with {self.scheme.rhs}; convert the float model instead")
        self._own = own

    def plan(self, name: str = "") -> Scheme | None:
        """The scheme that is active now, for the product with the weight `name`; None for floats."""
        scheme = active(self._own).scheme
        if scheme is None or scheme is not self.scheme or name not in self.quantizers:
            return scheme
        return replace(scheme, rhs=self.quantizers[name])

    def frozen_quantizer(self, name: str = "") -> Quantizer | None:
        """The quantizer of a whole weight, which applies the scheme's, or that of the weight `name`, to each matrix;
        None if it stays in floats.
        """
        q = self.quantizers.get(name, self.scheme.rhs)
        return None if q is None else (q.transposed(2) if self.columns else q).of_batch(2)

    def laid_out(self, name: str, weight: QuantizedTensor, packs: bool) -> QuantizedTensor:
        """The quantized weight `name` in the layout that products read fastest on its device if `packs`, else plain."""
        layout = self._layout(name, weight) if packs else None
        if weight.quantizer.layout == layout:
            return weight
        return pack_operator(weight, "" if layout is None else str(layout))

    def _layout(self, name: str, weight: QuantizedTensor) -> Stacked | None:
        q = self.quantizers.get(name, self.scheme.rhs)
        assert q is not None
        layout = layout_for(q.transposed(2) if self.columns else q, 2, weight.device.type)
        tiles = None if layout is None else layout.tiles
        return Stacked(self.columns) if tiles is not None and tiles.columns == self.columns else None

    def freeze(self, packs: bool, searches: bool = False) -> None:
        """Replace the weights by their codes, with scales of least squared error if it `searches`, or convert codes to
        another layout.
        """
        if self.frozen_quantizer() is None:
            return
        search = functools.partial(quantize_weight, signed=self.scheme.signed_scales())
        for name in self.names:
            q = self.frozen_quantizer(name)
            weight = getattr(self.module, name)
            part = dtensor.own_part(weight).detach()
            if isinstance(part, QuantizedTensor):
                codes = part
            else:
                codes = search(q, part) if searches else quantize(q, part)  # type: ignore[arg-type]
            self._put(name, weight, self.laid_out(name, codes, packs))  # type: ignore[arg-type]
        self.frozen, self.packs = True, packs

    def take_frozen(self, packs: bool) -> bool:
        """After loading, check whether all weights are codes. Returns that, and stores it as `frozen`."""
        self.frozen = all(isinstance(dtensor.own_part(w.weight), QuantizedTensor) for w in self.weights())
        self.packs = packs
        return self.frozen

    def weights(self) -> list["Weight"]:
        """All weights of the module."""
        return [Weight(self, name) for name in self.names]

    def thaw(self) -> None:
        """Replace codes by dequantized floats, and remove the scheme."""
        for name in self.names:
            weight = getattr(self.module, name)
            part = dtensor.own_part(weight).detach()
            if isinstance(part, QuantizedTensor):
                self._put(name, weight, dequantize(part))
        self.frozen = False
        delattr(self.module, _OWN)

    def _put(self, name: str, own: object, part: Tensor) -> None:
        setattr(self.module, name, nn.Parameter(_placed(part, own), requires_grad=False))


def _placed(part: Tensor, own: object) -> Tensor:
    """`part` in the form of the whole weight: a DTensor if `own` is one."""
    if not dtensor.is_dtensor(own):
        return part
    at = dtensor.Sharding([], own.device_mesh, own.placements, own.shape, own.stride())
    return dtensor.make_dtensor(part, at)


class Weight(NamedTuple):
    """One weight of a Holder."""

    holder: Holder
    name: str

    @property
    def weight(self) -> Tensor:
        """The Parameter, or its replacement."""
        return getattr(self.holder.module, self.name)

    def frozen_quantizer(self) -> Quantizer | None:
        """The weight's quantizer; None if the scheme leaves it in floats."""
        return self.holder.frozen_quantizer(self.name)

    def signed_scales(self) -> bool:
        """Whether the searched scales of the weight may be negative."""
        return self.holder.scheme.signed_scales()


def kind_of(module: nn.Module) -> type[Holder] | None:
    """The Holder class for a module that is not a layer of ours; None if there is none."""
    for package, ours in _PACKAGES.items():
        if package in sys.modules and ours not in sys.modules:
            importlib.import_module(ours)
    return next((kind for kind in KINDS if kind.weights_of(module)), None)


def holder_of(module: nn.Module) -> Holder | None:
    """The Holder of a module, or None."""
    return module.__dict__.get(_OWN)


def holders_of(model: nn.Module) -> Iterator[Holder]:
    """The Holders of all modules of a model."""
    return (holder for module in model.modules() if (holder := holder_of(module)) is not None)


def hold(module: nn.Module, scheme: Scheme) -> nn.Module:
    """Quantize the products of a module by `scheme` from now on, and return the module. Raises ValueError as Holder
    does.
    """
    holder, kind = holder_of(module), kind_of(module)
    if holder is not None:
        holder.scheme = scheme
    else:
        assert kind is not None
        kind(module, scheme)
    return module


# ---- files contain plain codes; each machine packs them for itself


def _saved(module: nn.Module, state: StateDict, prefix: str, metadata: object) -> None:
    holder = holder_of(module)
    for name in () if holder is None else holder.names:
        value = state.get(prefix + name)
        part = dtensor.own_part(value)
        if holder is not None and isinstance(part, QuantizedTensor) and part.quantizer.layout is not None:
            state[prefix + name] = _placed(holder.laid_out(name, part, False), value)


def _loading(module: nn.Module, state: StateDict, prefix: str, metadata: Mapping[str, object], *others: object) -> None:
    holder = holder_of(module)
    for name in () if holder is None else holder.names:
        value = state.get(prefix + name)
        q = None if holder is None else holder.frozen_quantizer(name)
        if holder is None or value is None or q is None or dtensor.is_dtensor(value):
            continue
        assigns = bool(metadata.get("assign_to_params_buffers", False))
        check_loaded(prefix + name, holder.frozen, q, value, assigns)
        if holder.frozen and assigns and getattr(value, "quantizer", None) != q:
            value = quantize(q, dequantize(value) if isinstance(value, QuantizedTensor) else value)
        if holder.packs and isinstance(value, QuantizedTensor):
            value = holder.laid_out(name, value, True)
        state[prefix + name] = value


def _loaded(module: nn.Module, incompatible: object) -> None:
    holder = holder_of(module)
    if holder is not None and not holder.frozen:
        holder.take_frozen(holder.packs)
