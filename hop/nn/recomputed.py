"""Weights that are computed anew in each call: by the hooks of torch.nn.utils.prune, weight_norm and spectral_norm, by
torch.nn.utils.parametrize, or by hooks that are not known here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from hop.compat import modules


@dataclass(frozen=True)
class Recomputed:
    """A tensor of a module that is computed anew in each call."""

    name: str
    by: str  # what computes it
    remedy: str  # how to make a Parameter of it
    remove: Callable[[], Any] | None  # the same as a function, None where it is not known


def recomputed(module: nn.Module) -> list[Recomputed]:
    """The tensors of `module` itself that are computed anew, in the order in which they become Parameters again."""
    result: list[Recomputed] = []
    for hook in modules.forward_pre_hooks(module):
        if isinstance(hook, prune.BasePruningMethod):
            result.append(_by(module, modules.pruned_name(hook), "torch.nn.utils.prune", "prune.remove", prune.remove))
        elif isinstance(hook, WeightNorm):
            result.append(
                _by(module, hook.name, "torch.nn.utils.weight_norm", "remove_weight_norm", remove_weight_norm)
            )
        elif isinstance(hook, SpectralNorm):
            name = "torch.nn.utils.spectral_norm"
            result.append(_by(module, hook.name, name, "remove_spectral_norm", _remove_spectral_norm))
    for name in getattr(module, "parametrizations", {}) if parametrize.is_parametrized(module) else ():
        by = f"parametrizations ({', '.join(type(p).__name__ for p in module.parametrizations[name])})"  # type: ignore[index]
        result.append(_by(module, name, by, "parametrize.remove_parametrizations", parametrize.remove_parametrizations))
    known = {each.name for each in result}
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor) and name in _PARAMETERS and name not in known:
            remedy = f"remove the hook, and set module.{name} to a torch.nn.Parameter"
            result.append(Recomputed(name, "a hook that is not known, or is a plain tensor", remedy, None))
    # a hook on "weight_v" before the one that makes "weight" of it
    return sorted(result, key=lambda each: -len(each.name))


_PARAMETERS = {"weight", "bias", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


def _by(module: nn.Module, name: str, by: str, function: str, remove: Callable[[Any, str], Any]) -> Recomputed:
    return Recomputed(name, by, f"call torch.nn.utils.{function}(module, {name!r})", lambda: remove(module, name))


def _remove_spectral_norm(module: nn.Module, name: str) -> None:
    """As PyTorch's function, which leaves the hook that looks for the parts of the weight in a state_dict."""
    remove_spectral_norm(module, name)
    modules.remove_load_hooks(
        module, lambda hook: isinstance(hook, SpectralNormLoadStateDictPreHook) and hook.fn.name == name
    )


def remedied(each: Recomputed) -> str:
    """What is computed, by what, and what to do."""
    return f"its {each.name} is computed in each call by {each.by}; {each.remedy} before"


def check_plain(caller: str, modules: Iterable[tuple[str, nn.Module]], unknown: bool = False) -> None:
    """Raise ValueError for a recomputed tensor, or for those alone that `settle` leaves."""
    for name, module in modules:
        for each in recomputed(module):
            if each.remove is None or not unknown:
                raise ValueError(f"{caller}: layer {name!r}: {remedied(each)}")


def settle(module: nn.Module) -> None:
    """Make Parameters of the recomputed tensors of `module` itself, of the values that they have in eval mode. Their
    parts, which other modules may share, keep their values. Those that hooks compute which are not known stay."""
    for each in recomputed(module):
        if each.remove is None:
            continue
        parametrized = parametrize.is_parametrized(module, each.name)
        parts: Any = module.parametrizations[each.name] if parametrized else None  # type: ignore[index]
        for owner, name in ((module, f"{each.name}_orig"), (parts, "original")):
            if owner is not None and (own := owner._parameters.get(name)) is not None:  # which the removal writes to
                owner._parameters[name] = nn.Parameter(own.detach().clone(), own.requires_grad)
        inner = [] if parts is None else [(m, m.training) for m in parts.modules()]
        for m, _ in inner:
            m.training = False
        with torch.enable_grad():  # without which it would become a buffer
            each.remove()
        for m, mode in inner:
            m.training = mode
        value = getattr(module, each.name)
        if not isinstance(value, nn.Parameter):  # its parts need no gradient
            module._buffers.pop(each.name)
            module.register_parameter(each.name, nn.Parameter(value.detach(), requires_grad=False))
