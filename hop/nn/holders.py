"""Holder: the weights of a module that is no layer of ours and stays what it is, such as experts in 3-D parameters.

A weight is a stack of matrices (E, R, K), or (E, K, R) where products sum over their first dimension. Each is
quantized by itself. Who knows such modules enters a subclass in KINDS; those of other packages are looked for where the
package is imported.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from hop.compat import dtensor
from hop.impls.pack import layout_for, pack_operator
from hop.impls.quantize import dequantize, quantize
from hop.nn.contexts import SchemeNeeds, active
from hop.nn.loading import check_loaded
from hop.numerics.layouts import Stacked
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

KINDS: list[type["Holder"]] = []
_PACKAGES = {"transformers.integrations.moe": "hop.integrations.experts"}  # whose modules have weights; who knows them
_OWN = "hop_weights"  # the attribute of a module


class Holder:
    """How the weights of a module are quantized, and in which form they lie.

    Args:
        module: what has them.
        scheme: how it computes.

    Raises:
        ValueError: the scheme has scales that are not found in each call, random bits, or a quantized result.
    """

    label: ClassVar[str]

    def __init__(self, module: nn.Module, scheme: Scheme) -> None:
        self.module, self.names, self.columns = module, self.weights_of(module), self.sums_first(module)
        self.frozen, self.packs = False, False
        self.scheme = scheme
        setattr(module, _OWN, self)
        module.register_state_dict_post_hook(_saved)
        module.register_load_state_dict_pre_hook(_loading)
        module.register_load_state_dict_post_hook(_loaded)

    @classmethod
    def weights_of(cls, module: nn.Module) -> tuple[str, ...]:
        """The names of its weights; none where it is no such module."""
        raise NotImplementedError

    @classmethod
    def sums_first(cls, module: nn.Module) -> bool:
        """Whether products sum over the first dimension of the matrices."""
        raise NotImplementedError

    @property
    def scheme(self) -> Scheme:
        """How it computes outside of `with hop.nn.scheme(...)`."""
        result = self._own.scheme
        assert result is not None
        return result

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        own = SchemeNeeds.of(scheme)
        if own.needs or scheme.is_stochastic() or scheme.output is not None:
            raise ValueError(
                f"{self.label} take scales that are found in each call, no random bits and no quantizer of results; "
                f"got scheme={scheme}; take one such as 'int8'"
            )
        if self.frozen and scheme.rhs != self.scheme.rhs:
            raise ValueError(f"{self.label} are frozen, by {self.scheme.rhs}; convert the float model")
        self._own = own

    def plan(self) -> Scheme | None:
        """What it computes in now; None for floats."""
        return active(self._own).scheme

    def frozen_quantizer(self) -> Quantizer | None:
        """By which a weight is quantized: each matrix by the scheme's. None where it stays in floats."""
        q = self.scheme.rhs
        return None if q is None else (q.transposed(2) if self.columns else q).of_batch(2)

    def laid_out(self, weight: QuantizedTensor, packs: bool) -> QuantizedTensor:
        """A quantized weight as products read it fastest where it lies; or plain."""
        layout = self._layout(weight) if packs else None
        if weight.quantizer.layout == layout:
            return weight
        return pack_operator(weight, "" if layout is None else str(layout))  # type: ignore[return-value]

    def _layout(self, weight: QuantizedTensor) -> Stacked | None:
        q = self.scheme.rhs
        assert q is not None
        layout = layout_for(q.transposed(2) if self.columns else q, 2, weight.device.type)
        tiles = None if layout is None else layout.tiles
        return Stacked(self.columns) if tiles is not None and tiles.columns == self.columns else None

    def freeze(self, packs: bool) -> None:
        """Replace the weights by their codes, or bring codes to another layout."""
        q = self.frozen_quantizer()
        if q is None:
            return
        for name in self.names:
            weight: Any = getattr(self.module, name)
            part = dtensor.own_part(weight).detach()
            codes = part if isinstance(part, QuantizedTensor) else quantize(q, part)
            self._put(name, weight, self.laid_out(codes, packs))  # type: ignore[arg-type]
        self.frozen, self.packs = True, packs

    def take_frozen(self, packs: bool) -> bool:
        """Whether all weights are codes, which were put in the place of floats; the module computes with them then."""
        self.frozen = all(isinstance(dtensor.own_part(w.weight), QuantizedTensor) for w in self.weights())
        self.packs = packs
        return self.frozen

    def weights(self) -> list["Weight"]:
        """All of them."""
        return [Weight(self, name) for name in self.names]

    def thaw(self) -> None:
        """Bring back floats, the numbers that the codes stand for, and forget the scheme."""
        for name in self.names:
            weight: Any = getattr(self.module, name)
            part = dtensor.own_part(weight).detach()
            if isinstance(part, QuantizedTensor):
                self._put(name, weight, dequantize(part))
        self.frozen = False
        delattr(self.module, _OWN)

    def _put(self, name: str, own: Any, part: Tensor) -> None:
        setattr(self.module, name, nn.Parameter(_placed(part, own), requires_grad=False))


def _placed(part: Tensor, own: Any) -> Tensor:
    """The part of a weight in the form of the weight: a DTensor where that is one."""
    if not dtensor.is_dtensor(own):
        return part
    at = dtensor.Sharding([], own.device_mesh, own.placements, own.shape, own.stride())
    return dtensor.make_dtensor(part, at)


class Weight(NamedTuple):
    """One weight of a holder."""

    holder: Holder
    name: str

    @property
    def weight(self) -> Any:
        """The parameter."""
        return getattr(self.holder.module, self.name)

    def frozen_quantizer(self) -> Quantizer | None:
        """By which it is quantized; None where the scheme leaves it in floats."""
        return self.holder.frozen_quantizer()


def kind_of(module: nn.Module) -> type[Holder] | None:
    """Who knows the weights of a module that is no layer."""
    for package, ours in _PACKAGES.items():
        if package in sys.modules and ours not in sys.modules:
            importlib.import_module(ours)
    return next((kind for kind in KINDS if kind.weights_of(module)), None)


def holder_of(module: nn.Module) -> Holder | None:
    """What holds the quantized weights of a module."""
    return module.__dict__.get(_OWN)


def holders_of(model: nn.Module) -> Iterator[Holder]:
    """Those of all modules of a model."""
    return (holder for module in model.modules() if (holder := holder_of(module)) is not None)


def hold(module: nn.Module, scheme: Scheme) -> nn.Module:
    """The module, whose weights are quantized by `scheme` from now on. Raises ValueError as Holder does."""
    holder, kind = holder_of(module), kind_of(module)
    if holder is not None:
        holder.scheme = scheme
    else:
        assert kind is not None
        kind(module, scheme)
    return module


# ---- files: plain codes, which each machine lays out for itself


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    holder = holder_of(module)
    for name in () if holder is None else holder.names:
        value: Any = state.get(prefix + name)
        part = dtensor.own_part(value)
        if holder is not None and isinstance(part, QuantizedTensor) and part.quantizer.layout is not None:
            state[prefix + name] = _placed(holder.laid_out(part, False), value)


def _loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *others: Any) -> None:
    holder = holder_of(module)
    for name in () if holder is None else holder.names:
        value = state.get(prefix + name)
        q = None if holder is None else holder.frozen_quantizer()
        if holder is None or value is None or q is None or dtensor.is_dtensor(value):
            continue
        assigns = metadata.get("assign_to_params_buffers", False)
        check_loaded(prefix + name, holder.frozen, q, value, assigns)
        if holder.frozen and assigns and getattr(value, "quantizer", None) != q:
            value = quantize(q, dequantize(value) if isinstance(value, QuantizedTensor) else value)
        if holder.packs and isinstance(value, QuantizedTensor):
            value = holder.laid_out(value, True)
        state[prefix + name] = value


def _loaded(module: nn.Module, incompatible: Any) -> None:
    holder = holder_of(module)
    if holder is not None and not holder.frozen:
        holder.take_frozen(holder.packs)
