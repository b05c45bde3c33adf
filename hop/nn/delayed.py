"""AmaxHistory: the state of delayed scaling, hop.scale_rules.Delayed.

Within a step all calls are quantized by the amax in use, and record the largest magnitude that they saw, in the forward
or, of gradients, in the backward. Recording it twice changes nothing, so activation checkpointing may compute a layer
again, and a step may have several microbatches. `advance` ends the step.

Source: NVIDIA Transformer Engine, delayed scaling.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from hop.compat import dtensor, dynamo, process_groups, tracing
from hop.nn.static import Float32State
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed


class AmaxHistory(Float32State):
    """The amaxes of the last steps, for one role of a layer.

    Args:
        quantizer: whose rule is hop.scale_rules.Delayed.
        device: where the buffers lie.

    Buffers, float32: `history`, of which 0 is the current step and 1 the one before; and `amax`, of shape (), the one
    in use, at first such that the factor S is 1. With the attribute `frozen` neither changes (hop.nn.Schedule).
    """

    history: Tensor
    amax: Tensor

    def __init__(self, quantizer: Quantizer, device: torch.device) -> None:
        super().__init__()
        rule = quantizer.scale
        assert isinstance(rule, Delayed)
        self.spelling, self.most_recent, self.frozen = str(quantizer), rule.most_recent, False
        self.register_buffer("history", torch.zeros(rule.history, device=device))
        self.register_buffer("amax", torch.tensor(rule.top(quantizer.format), device=device))

    def forward(self, x: Tensor | None) -> Tensor:
        """The amax in use; that of x is recorded in training, where gradients are."""
        if x is not None and self.records():
            _record(self.history, x.detach())
        return self.amax.clone()  # a backward may come after `advance`

    def watch(self, y: Tensor) -> Tensor:
        """y, the amax of whose gradient is recorded in the backward."""
        return _watched(y, self.history) if self.records() else y

    def records(self) -> bool:
        """Whether a call counts."""
        return self.training and torch.is_grad_enabled() and not self.frozen

    @torch.no_grad()
    def advance(self) -> None:
        """End the step: use the largest of the history, or the most recent, unless it is 0, infinite or NaN; and make
        room for the next. Where it is frozen, nothing changes."""
        if self.frozen:
            return
        amax = self.history[0] if self.most_recent else self.history.amax()
        self.amax.copy_(torch.where((amax > 0) & amax.isfinite(), amax, self.amax))
        self.history.copy_(self.history.roll(1))
        self.history[0].zero_()

    def extra_repr(self) -> str:
        return self.spelling


def advance(model: nn.Module, group: Any = None) -> None:
    """End the step of delayed scaling in all layers of `model`. To be called once after each optimizer step.

    Args:
        group: the process group, or mesh of one dimension, of the processes that train on parts of a batch: the amaxes
            of the step become the largest that one of them saw, by one collective for all layers. None for one process;
            what tensor parallelism spreads over processes is combined by the layers themselves.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"advance: model must be a torch.nn.Module, got {model!r}; give the model first")
    histories = [module for module in model.modules() if isinstance(module, AmaxHistory)]
    if group is not None and histories:
        _combine([dtensor.own_part(h.history) for h in histories], group)
    for history in histories:
        history.advance()


def advance_after(optimizer: torch.optim.Optimizer, model: nn.Module, group: Any = None) -> Any:
    """Call `advance(model, group)` after each step of `optimizer`. Returns a handle, whose remove() ends it."""

    def hook(*_: Any) -> None:
        advance(model, group)

    return optimizer.register_step_post_hook(hook)


@torch.no_grad()
def _combine(histories: list[Tensor], group: Any) -> None:
    """The largest current amax of a group of processes for each history."""
    seen = torch.stack([h[0] for h in histories])
    for history, amax in zip(histories, process_groups.combined_over(seen, "max", group), strict=True):
        history[0].copy_(amax)


def _record(history: Tensor, x: Tensor) -> None:
    """history[0] = max(history[0], largest |x|), NaN ignored."""
    if tracing.known_equal(x.numel(), 0):
        return
    magnitude = x.abs()
    largest = torch.where(magnitude == magnitude, magnitude, 0.0).amax().to(torch.float32)
    first = history[0]
    first.copy_(torch.maximum(first, dtensor.alike(largest, first)))


class _Watch(torch.autograd.Function):
    """The identity, whose backward records the gradient."""

    @staticmethod
    def forward(y: Tensor, history: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.history = inputs[1]  # not saved: another backward of the same step may write to it before

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.no_grad():
            _record(ctx.history, grad.detach())
        return grad, None


def _watched(y: Tensor, history: Tensor) -> Tensor:
    return cast(Tensor, _Watch.apply(y, history))


dynamo.allow_in_graph(_watched)
