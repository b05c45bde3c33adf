"""AmaxHistory: the state of delayed scaling, hop.scale_rules.Delayed.

Within a step all calls use the same amax, and record the largest magnitude they see: in the forward, or in the backward
for gradients. Recording the same tensor twice changes nothing, so activation checkpointing may recompute a layer, and a
step may have several microbatches. `advance` ends the step.

Source: NVIDIA Transformer Engine, delayed scaling.
"""

from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hop.compat import dtensor, dynamo, process_groups, tracing
from hop.nn.scales.static import Float32State
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AmaxHistory(Float32State):
    """The amax values of recent steps, for one role of a layer.

    Buffers, float32: `history`, where index 0 is the current step and 1 the one before; and `amax`, of shape (), the
    one in use. It starts with the value that makes the scale factor 1. With the attribute `frozen` neither changes
    (hop.nn.Schedule).

    Args:
        quantizer: a quantizer with the rule hop.scale_rules.Delayed.
        device: the device of the buffers.
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
        """Return the amax in use. Records the amax of x in training with gradients enabled."""
        if x is not None and self.records():
            _record(self.history, x.detach())
        return self.amax.clone()  # a copy, because a backward may run after `advance`

    def watch(self, y: Tensor) -> Tensor:
        """Return y, with the amax of its gradient recorded in the backward."""
        return _watched(y, self.history) if self.records() else y

    def records(self) -> bool:
        """Whether a call is recorded."""
        return self.training and torch.is_grad_enabled() and not self.frozen

    @torch.no_grad()
    def advance(self) -> None:
        """End the step: set `amax` from the history, and start a new entry. Does nothing if frozen.

        The new value is the largest of the history, or the most recent one, unless it is 0, infinite or NaN.
        """
        if self.frozen:
            return
        amax = self.history[0] if self.most_recent else self.history.amax()
        self.amax.copy_(torch.where((amax > 0) & amax.isfinite(), amax, self.amax))
        self.history.copy_(self.history.roll(1))
        self.history[0].zero_()

    def extra_repr(self) -> str:
        return self.spelling


def advance(model: nn.Module, group: "ProcessGroup | None" = None) -> None:
    """End the step of delayed scaling in all layers of `model`. Call it once after each optimizer step.

    Args:
        group: the process group, or one-dimensional mesh, of data-parallel processes. Each amax of the step becomes the
            largest of all processes, with one collective for all layers. None for a single process. Layers combine
            tensor-parallel shards themselves.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"advance: model must be a torch.nn.Module, got {model!r}; give the model first")
    histories = [module for module in model.modules() if isinstance(module, AmaxHistory)]
    if group is not None and histories:
        _combine([dtensor.own_part(h.history) for h in histories], group)
    for history in histories:
        history.advance()


def advance_after(
    optimizer: torch.optim.Optimizer, model: nn.Module, group: "ProcessGroup | None" = None
) -> RemovableHandle:
    """Call `advance(model, group)` after each step of `optimizer`. Returns a handle; its remove() stops that."""

    def hook(*_: object) -> None:
        advance(model, group)

    return optimizer.register_step_post_hook(hook)


@torch.no_grad()
def _combine(histories: list[Tensor], group: "ProcessGroup") -> None:
    """Replace the current amax of each history by the largest in a group of processes."""
    seen = torch.stack([h[0] for h in histories])
    for history, amax in zip(histories, process_groups.combined_over(seen, "max", group), strict=True):
        history[0].copy_(amax)


def _record(history: Tensor, x: Tensor) -> None:
    """Set history[0] to max(history[0], largest |x|), ignoring NaN."""
    if tracing.known_equal(x.numel(), 0):
        return
    magnitude = x.abs()
    largest = torch.where(magnitude == magnitude, magnitude, 0.0).amax().to(torch.float32)
    first = history[0]
    first.copy_(torch.maximum(first, dtensor.alike(largest, first)))


class _Context(Protocol):
    history: Tensor


class _Watch(torch.autograd.Function):
    """The identity; its backward records the gradient's amax."""

    @staticmethod
    def forward(y: Tensor, history: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.history = inputs[1]  # not a saved tensor, because another backward of the same step may write to it first

    @staticmethod
    def jvp(ctx: object, tangent: Tensor, _: object) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.no_grad():
            _record(ctx.history, grad.detach())
        return grad, None


def _watched(y: Tensor, history: Tensor) -> Tensor:
    return cast(Tensor, _Watch.apply(y, history))


dynamo.allow_in_graph(_watched)
