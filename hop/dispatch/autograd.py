"""The gradient of a call of ours as an autograd.Function."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hop.compat import eager, functorch
from hop.compat.pytree import Args, ArgsKwargs, TreeSpec, tree_flatten, tree_unflatten


class Differentiable(Protocol):
    """An operator with a gradient: hop.dispatch.hop.Hop."""

    def __call__(self, /, *args: object, **kwargs: object) -> Any: ...

    def gradient(
        self, grad: Tensor, needed: Sequence[bool], /, *args: object, **kwargs: object
    ) -> Sequence[Tensor | None]: ...


class BareCall:
    """One call without its tensors: a context that outlives the call keeps none of them alive."""

    def __init__(self, hop: Differentiable, leaves: Sequence[object], spec: TreeSpec) -> None:
        self.hop, self.spec = hop, spec
        self.positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.rest = [None if isinstance(x, Tensor) else x for x in leaves]

    @classmethod
    def take(
        cls, hop: Differentiable, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple["BareCall", list[Tensor]]:
        leaves, spec = tree_flatten((args, kwargs))
        call = cls(hop, leaves, spec)
        return call, [leaves[i] for i in call.positions]

    def arguments(self, tensors: Sequence[Tensor]) -> ArgsKwargs:
        leaves = list(self.rest)
        for i, x in zip(self.positions, tensors, strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, self.spec)

    def run(self, *tensors: Tensor) -> Tensor:
        args, kwargs = self.arguments(tensors)
        return self.hop(*args, **kwargs)


class _Context(BackwardCFunction):
    call: BareCall


class Gradient:
    """The gradient of a call, for torch.autograd.Function: the inputs are the BareCall, then its tensors."""

    @staticmethod
    def setup_context(ctx: _Context, inputs: Args, output: Tensor) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        if not (output.is_floating_point() or output.is_complex()):
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: _Context, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), call = grad_outputs, ctx.call
        needed = [False] * len(call.rest)
        for i, need in zip(call.positions, ctx.needs_input_grad[1:], strict=True):
            needed[i] = need
        # torch.func.vjp returns functions that run after their level has ended
        args, kwargs = call.arguments([functorch.unwrap_if_dead(x) for x in ctx.saved_tensors])
        grads = call.hop.gradient(grad, needed, *args, **kwargs)
        return None, *(grads[i] for i in call.positions)


class AutogradRule(Gradient, torch.autograd.Function):
    @staticmethod
    def forward(call: BareCall, *tensors: Tensor) -> Tensor:
        with eager.below_autograd():
            return call.run(*tensors)
