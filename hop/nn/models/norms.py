"""Run the RMS norms of other packages as one native operator in eager inference.

Their classes compute x · rsqrt(mean(x²) + eps) · w, or · (1 + w), with six operators of PyTorch. Where nothing traces,
observes or differentiates the call, hop.scaled computes it in one, with sums that do not depend on the order; elsewhere
the class's own forward runs. Results differ in their last bits.
"""

import functools
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.impls.scaled.native_rows import rms_norm
from hop.kernels.cpu import native
from hop.nn.models.subclassing import subclass

_is_unwatched, _is_grad_enabled = eager.is_unwatched, torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def speed_up_norms(model: nn.Module) -> int:
    """Let the RMS norms of a model run as one operator in eager inference, in float32 on the CPU.

    A norm is a module whose class is called ...RMSNorm, with a weight and an eps, and whose forward computes that on an
    example. Returns their number.
    """
    if native.library().file is None:
        return 0
    with torch.no_grad():
        found = [(m, shift) for m in model.modules() if (shift := _shift(m)) is not None]
    for module, shift in found:
        module.__dict__.update(_hop_factor=_Factor(shift), _hop_eps=_eps(module))
        module.__class__ = _fast_class(type(module))
    return len(found)


class _Fast:
    """The mark of classes that `speed_up_norms` makes."""


class _Factor:
    """The factor of a norm: its weight plus a number, computed again when the weight has changed."""

    def __init__(self, shift: float) -> None:
        self.shift = shift
        self._last: tuple[Any, int, Tensor] | None = None  # the weight, its version, and the factor

    def __reduce__(self) -> Any:
        return _Factor, (self.shift,)

    def of(self, weight: Tensor) -> Tensor:
        """The factor of this weight."""
        if not self.shift:
            return weight.detach()
        if weight.is_inference():  # PyTorch counts no changes of it
            return weight.detach() + self.shift
        last, version = self._last, weight._version
        if last is None or last[0] is not weight or last[1] != version:
            self._last = last = (weight, version, weight.detach() + self.shift)
        return last[2]


@functools.cache
def _fast_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not _is_grad_enabled() and not _is_compiling() and _is_unwatched():
            own, x, weight = self.__dict__, args[0], self._parameters["weight"]
            plain = type(x) in PLAIN and type(weight) in PLAIN and not eager.ignored.modes
            plain = plain and x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu
            if plain and x.shape[-1:] == weight.shape and x.numel():
                y = rms_norm(x, own["_hop_factor"].of(weight), own[own["_hop_eps"]])
                if y is not None:
                    return y
        return cls.forward(self, *args, **kwargs)

    return subclass(_fast_class, cls, _Fast, forward)


def _shift(module: nn.Module) -> float | None:
    """The number that an RMS norm of another package adds to its weight, 0 or 1; None for any other module."""
    weight, name = module._parameters.get("weight"), _eps(module)
    named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm | _Fast)
    if (
        not named
        or len(module._parameters) != 1
        or module._modules
        or len(signature(type(module).forward).parameters) != 2
    ):
        return None
    if weight is None or weight.dim() != 1 or weight.is_meta or type(weight) not in PLAIN or name is None:
        return None
    eps: float = module.__dict__[name]
    rows = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [eps**0.5]])
    x, factor = rows.to(weight.device), weight.detach().float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    y = module(x).float()
    return next((shift for shift in (0.0, 1.0) if torch.allclose(y, normed * (factor + shift), 1e-2, 1e-4)), None)


def _eps(module: nn.Module) -> str | None:
    """The name of the attribute with the number that a norm adds to the mean; None if it has none."""
    numbers = {name: module.__dict__.get(name) for name in ("eps", "variance_epsilon")}
    return next((name for name, eps in numbers.items() if isinstance(eps, float) and eps > 0), None)
