"""Run the RMS norms of other packages as torch.rms_norm in eager inference.

Their classes compute x · rsqrt(mean(x²) + eps) · w, or · (1 + w), with seven to nine calls from Python. In float32 on
the CPU, torch.rms_norm runs the same operators in the same order in C++: the same bits in half of the time. Where
something traces, observes or differentiates the call, and for other dtypes and devices, the class's own forward runs.
"""

import functools
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.nn.models.subclassing import subclass

_is_unwatched, _is_grad_enabled = eager.is_unwatched, torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_FORM = "_hop_norm"  # the attribute with a norm's _Form


def speed_up_norms(model: nn.Module) -> int:
    """Let the RMS norms of a model run as one call in eager inference, in float32 on the CPU. Returns their number.

    A norm is a module whose class is called ...RMSNorm, with a weight and an eps, and whose forward returns the bits of
    torch.rms_norm on examples.
    """
    with torch.no_grad():
        found = [(m, form) for m in model.modules() if (form := _form(m)) is not None]
    for module, form in found:
        module.__dict__[_FORM] = form
        module.__class__ = _fast_class(type(module))
    return len(found)


class _Fast:
    """The mark of classes that `speed_up_norms` makes."""


class _Form(NamedTuple):
    """What a norm computes.

    Attributes:
        shift: the number that is added to the weight, 0 or 1.
        eps: the name of the attribute with the number that is added to the mean.
    """

    shift: float
    eps: str

    def computed(self, module: nn.Module, x: Tensor) -> Tensor:
        """The norm of x. The shifted weight is not kept, because changes of `weight.data` are not counted."""
        weight = module._parameters["weight"]
        assert weight is not None
        factor = self.shift + weight if self.shift else weight
        return torch.rms_norm(x, weight.shape, factor, module.__dict__[self.eps])


@functools.cache
def _fast_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not _is_grad_enabled() and not _is_compiling() and _is_unwatched():
            x, weight = args[0], self._parameters["weight"]
            if not eager.ignored.modes and _is_plain(x) and _is_plain(weight) and x.shape[-1:] == weight.shape:
                return self.__dict__[_FORM].computed(self, x)
        return cls.forward(self, *args, **kwargs)

    return subclass(_fast_class, cls, _Fast, forward)


def _is_plain(x: Any) -> bool:
    """Whether x is an ordinary tensor of the form for which both computations agree."""
    return type(x) in PLAIN and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def _form(module: nn.Module) -> _Form | None:
    """What an RMS norm of another package computes; None for any other module."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    is_named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm | _Fast)
    if not is_named or len(module._parameters) != 1 or module._modules or "forward" in module.__dict__:
        return None
    if weight is None or weight.dim() != 1 or eps is None or not _is_plain(weight) or not weight.numel():
        return None
    if len(signature(type(module).forward).parameters) != 2:
        return None
    generator, number = torch.Generator().manual_seed(0), module.__dict__[eps]
    many = torch.randn(3, len(weight), generator=generator) * torch.tensor([[1.0], [number**0.5], [100.0]])
    own = [(x, module(x)) for x in (many, many[:1].reshape(1, 1, -1))]
    forms = (_Form(0.0, eps), _Form(1.0, eps))
    return next((form for form in forms if all(torch.equal(y, form.computed(module, x)) for x, y in own)), None)


def _eps(module: nn.Module) -> str | None:
    """The name of the attribute with the number that a norm adds to the mean; None if it has none."""
    numbers = {name: module.__dict__.get(name) for name in ("eps", "variance_epsilon")}
    return next((name for name, eps in numbers.items() if isinstance(eps, float) and eps > 0), None)
