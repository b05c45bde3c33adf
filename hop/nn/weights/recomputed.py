"""Find weights that are recomputed in each call.

Known sources are hooks of torch.nn.utils.prune, weight_norm and spectral_norm, and torch.nn.utils.parametrize.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from hop.compat import modules


@dataclass(frozen=True)
class Recomputed:
    """A tensor of a module that is recomputed in each call."""

    name: str
    by: str  # the name of what computes it
    remedy: str  # how to turn it into a Parameter
    remove: Callable[[], object] | None  # does the same; None if unknown


def recomputed(module: nn.Module) -> list[Recomputed]:
    """The recomputed tensors of `module` itself, in the order in which they must become Parameters."""
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
            result.append(Recomputed(name, "an unknown hook, or is a plain tensor", remedy, None))
    # A hook on "weight_v" comes before the one that computes "weight" from it.
    return sorted(result, key=lambda each: -len(each.name))


_PARAMETERS = {"weight", "bias", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


def _by(module: nn.Module, name: str, by: str, function: str, remove: Callable[[nn.Module, str], object]) -> Recomputed:
    return Recomputed(name, by, f"call torch.nn.utils.{function}(module, {name!r})", lambda: remove(module, name))


def _remove_spectral_norm(module: nn.Module, name: str) -> None:
    """Remove spectral norm as PyTorch does, and the hook that looks for the weight's parts in a state_dict."""
    remove_spectral_norm(module, name)
    modules.remove_load_hooks(
        module, lambda hook: isinstance(hook, SpectralNormLoadStateDictPreHook) and hook.fn.name == name
    )


def remedied(each: Recomputed) -> str:
    """Error text: the tensor, what computes it, and the remedy."""
    return f"its {each.name} is computed in each call by {each.by}; {each.remedy} before"


def check_plain(caller: str, modules: Iterable[tuple[str, nn.Module]], unknown: bool = False) -> None:
    """Raise ValueError for a recomputed tensor; with `unknown`, only for one that `settle` cannot handle."""
    for name, module in modules:
        for each in recomputed(module):
            if each.remove is None or not unknown:
                raise ValueError(f"{caller}: layer {name!r}: {remedied(each)}")


def settle(module: nn.Module) -> None:
    """Make Parameters of the recomputed tensors of `module` itself, with their values of eval mode.

    Their source tensors, which other modules may share, keep their values. Tensors computed by unknown hooks are left
    alone.
    """
    for each in recomputed(module):
        if each.remove is None:
            continue
        parametrized = parametrize.is_parametrized(module, each.name)
        parts: nn.Module | None = module.parametrizations[each.name] if parametrized else None  # type: ignore[index]
        for owner, name in ((module, f"{each.name}_orig"), (parts, "original")):
            if owner is not None and (own := owner._parameters.get(name)) is not None:  # the removal would write to it
                owner._parameters[name] = nn.Parameter(own.detach().clone(), own.requires_grad)
        inner = [] if parts is None else [(m, m.training) for m in parts.modules()]
        for m, _ in inner:
            m.training = False
        with torch.enable_grad():  # without gradients it would become a buffer
            each.remove()
        for m, mode in inner:
            m.training = mode
        value = getattr(module, each.name)
        if not isinstance(value, nn.Parameter):  # no source tensor requires a gradient
            module._buffers.pop(each.name)
            module.register_parameter(each.name, nn.Parameter(value.detach(), requires_grad=False))
