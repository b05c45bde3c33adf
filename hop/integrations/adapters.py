"""Adapters of PEFT, and edited tables of tokens, on layers with codes.

PEFT and transformers write to the weight of a base layer: when adapters merge, when PiSSA and similar methods take
their part out of the weight, and when a table of tokens grows. Codes would lose such changes, or cannot take them. So
these calls get a float layer in the place of the quantized one, for as long as the change exists:

    merge, unmerge      of all tuners: the base is float while adapters are merged
    update_layer        the base stays float if the method changed it, as PiSSA does; else it is restored
    modules_to_save     the copy that is trained is float
    resize_token_embeddings

Tuners are changed once they are imported.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

from torch import Tensor, nn

from hop.compat.imports import when_imported
from hop.impls.quantize import quantize_weight
from hop.nn.layers.base import Layer, of_class
from hop.nn.weights.holders import holder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Tuner(Protocol):
    """A layer of PEFT, which adds to what its base layer returns."""

    base_layer: Any  # another tuner, or the layer of the model
    merged_adapters: list[str]


Method: TypeAlias = Callable[..., object]
Wrapper: TypeAlias = Callable[[Method], Method]

_BASE = "_hop_base"  # the attribute with the quantized base of a float one; in a tuple so that it is no submodule
_requantizes: ContextVar[bool] = ContextVar("requantizes", default=False)


@contextmanager
def requantized_merge() -> Iterator[None]:
    """Context in which changed weights are quantized again by their layer's scheme, rounding the change.

        with hop.integrations.requantized_merge():
            model = model.merge_and_unload()

    It applies to merged adapters, to bases that PiSSA and similar methods change, and to resized tables of tokens.
    Outside of it such layers become float layers.
    """
    token = _requantizes.set(True)
    try:
        yield
    finally:
        _requantizes.reset(token)


# ---- layers


def _is_frozen(module: object) -> TypeGuard[Layer]:
    return isinstance(module, Layer) and module.frozen


def _float_copy(layer: Layer) -> nn.Module:
    """A float layer that does not require gradients, and shares no Parameter that is written to with `layer`."""
    result = layer.to_float()
    result.get_parameter("weight").requires_grad_(False)
    if isinstance(bias := getattr(result, "bias", None), Tensor):  # an adapter's bias is added to it
        result.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return result


def _requantized(layer: Layer, floats: nn.Module) -> Layer:
    """A copy of the quantized `layer` with the weight and bias of `floats`."""
    q = layer.frozen_quantizer()
    if q is None or "input_transform" in dict(layer.named_children()):
        raise RuntimeError(
            f"requantized_merge: {type(layer).__name__} has {'no quantizer' if q is None else 'a transformed input'}, "
            "and its weight cannot be quantized again; merge outside of it"
        )
    result = of_class(type(layer), layer)
    weight = quantize_weight(q, floats.get_parameter("weight").detach(), signed=layer.signed_scales())
    weight = result.laid_out(weight, layer.packs)
    result.take_frozen(nn.Parameter(weight, requires_grad=False), layer.packs)
    if isinstance(bias := getattr(floats, "bias", None), Tensor):
        result.bias = nn.Parameter(bias.detach(), requires_grad=False)
    for name in ("num_embeddings", "out_features"):
        if hasattr(floats, name):
            setattr(result, name, getattr(floats, name))
    return result


def _owner(tuner: _Tuner) -> _Tuner:
    """The innermost tuner layer, whose base layer is no tuner layer."""
    while hasattr(tuner.base_layer, "base_layer"):
        tuner = tuner.base_layer
    return tuner


def _restore(owner: _Tuner) -> None:
    if _BASE in owner.__dict__:
        (owner.base_layer,) = owner.__dict__.pop(_BASE)


# ---- tuners


def _merge(original: Method) -> Method:
    @functools.wraps(original)
    def merge(self: _Tuner, *args: object, **kwargs: object) -> object:
        owner = _owner(self)
        base = owner.base_layer
        if not _is_frozen(base):
            return original(self, *args, **kwargs)
        owner.base_layer = _float_copy(base)
        owner.__dict__.setdefault(_BASE, (base,))  # of the first merge, if merged weights are quantized again
        try:
            return original(self, *args, **kwargs)
        finally:
            if not self.merged_adapters:
                _restore(owner)
            elif _requantizes.get():
                owner.base_layer = _requantized(base, owner.base_layer)

    return merge


def _unmerge(original: Method) -> Method:
    @functools.wraps(original)
    def unmerge(self: _Tuner, *args: object, **kwargs: object) -> object:
        owner = _owner(self)
        if not self.merged_adapters or _BASE not in owner.__dict__:
            return original(self, *args, **kwargs)
        self.merged_adapters.clear()
        return _restore(owner)

    return unmerge


def _version(layer: nn.Module) -> tuple[nn.Parameter, int, int]:
    """A value that differs once the weight of a layer has changed."""
    weight = layer.get_parameter("weight")
    return weight, weight.data_ptr(), weight._version


def _update(original: Method) -> Method:
    @functools.wraps(original)
    def update_layer(self: _Tuner, *args: object, **kwargs: object) -> object:
        owner = _owner(self)
        base = owner.base_layer
        if not _is_frozen(base):
            return original(self, *args, **kwargs)
        floats = owner.base_layer = _float_copy(base)
        before = _version(floats)
        changed = False
        try:
            result = original(self, *args, **kwargs)
            changed = _version(floats) != before
        finally:
            if not changed:
                owner.base_layer = base
            elif _requantizes.get():
                owner.base_layer = _requantized(base, floats)
        return result

    return update_layer


def _in_floats(attribute: str, floats: Callable[[nn.Module], nn.Module]) -> Wrapper:
    """A wrapper of methods, which run while `attribute` of their object is `floats` of it."""

    def wrapper(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: object, *args: object, **kwargs: object) -> object:
            own = getattr(self, attribute)
            setattr(self, attribute, floats(own))
            try:
                return original(self, *args, **kwargs)
            finally:
                setattr(self, attribute, own)

        return method

    return wrapper


_METHODS = {
    "merge": _merge,
    "unmerge": _unmerge,
    "update_layer": _update,
    # The table with trained tokens, which PEFT assembles in each call.
    "get_merged_weights": _in_floats("base_layer", lambda base: base.to_float() if _is_frozen(base) else base),
}
_WRAPPED = "_hop_wrapped"


def _wrap(owner: type, name: str, wrapper: Wrapper) -> None:
    """Replace a function that a class defines itself, once."""
    function = vars(owner).get(name)
    if callable(function) and not hasattr(function, _WRAPPED):
        wrapped = wrapper(function)
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)


def _wrap_tuners() -> None:
    """Change the tuner layers that exist, and those that will be defined."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # type: ignore[import-not-found]  # optional

    def wrap(cls: type) -> None:
        for name, wrapper in _METHODS.items():
            _wrap(cls, name, wrapper)

    def init_subclass(cls: type[BaseTunerLayer], **kwargs: object) -> None:
        super(BaseTunerLayer, cls).__init_subclass__(**kwargs)
        wrap(cls)

    setattr(BaseTunerLayer, "__init_subclass__", classmethod(init_subclass))  # noqa: B010  for subclasses to come
    found = [*BaseTunerLayer.__subclasses__()]
    for cls in found:
        wrap(cls)
        found += [child for child in cls.__subclasses__() if child not in found]


# ---- whole modules


def _float_module(module: nn.Module) -> nn.Module:
    """The module with float layers in the place of those with codes; itself if it has none."""
    if isinstance(module, Layer) and module.frozen:
        return module.to_float()
    if not any(_is_frozen(child) or holder_of(child) for child in module.modules()):
        return module
    result = copy.deepcopy(module)
    for name, child in list(result.named_modules()):
        if holder := holder_of(child):
            holder.thaw()
        elif isinstance(child, Layer) and child.frozen:
            result.set_submodule(name, child.to_float())
    return result


def _resize(original: Method) -> Method:
    @functools.wraps(original)
    def _resize_token_embeddings(self: "PreTrainedModel", *args: object, **kwargs: object) -> object:
        quantized: dict[str, Layer] = {}
        for name in ("input_embeddings", "output_embeddings"):
            layer = getattr(self, f"get_{name}")()
            if _is_frozen(layer):
                quantized[name] = layer
                getattr(self, f"set_{name}")(_float_copy(layer))
        if quantized:
            self.tie_weights()
        result = original(self, *args, **kwargs)
        if not quantized or not _requantizes.get():
            return result
        for name, layer in quantized.items():
            getattr(self, f"set_{name}")(_requantized(layer, getattr(self, f"get_{name}")()))
        return self.get_input_embeddings()

    return _resize_token_embeddings


def _wrap_when_imported(module: str, owner: str, name: str, wrapper: Wrapper) -> None:
    when_imported(module, lambda: _wrap(getattr(sys.modules[module], owner), name, wrapper))


when_imported("peft.tuners.tuners_utils", _wrap_tuners)
_wrap_when_imported("peft.utils.other", "ModulesToSaveWrapper", "update", _in_floats("original_module", _float_module))
_wrap_when_imported("transformers.modeling_utils", "PreTrainedModel", "_resize_token_embeddings", _resize)
