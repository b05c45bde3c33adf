"""Experts of transformers: quantized weights of a mixture in 3-D parameters, and an implementation that computes on
codes.

transformers looks up an experts implementation by the name in the model's config. Ours is "hop": it sorts tokens by
expert, and each expert multiplies its own. Llama 4 has no such choice: its experts multiply equal numbers of rows, and
get a forward that computes on codes. The router stays the model's, in floats.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from hop.compat import dtensor
from hop.nn.layers.stacks import Stack, chain
from hop.nn.models.subclassing import subclass
from hop.nn.weights.holders import KINDS, Holder, holder_of
from hop.numerics.schemes import Scheme

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

IMPLEMENTATION = "hop"
_DECORATED = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")


class Experts(Holder):
    """The weights of a module that transformers' decorator use_experts_implementation has marked."""

    label: ClassVar[str] = "experts"

    def __init__(self, module: nn.Module, scheme: Scheme) -> None:
        super().__init__(module, scheme)
        config: Any = module.config
        config._experts_implementation = IMPLEMENTATION

    @classmethod
    def weights_of(cls, module: nn.Module) -> tuple[str, ...]:
        if not all(hasattr(module, name) for name in _DECORATED):
            return ()
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        return names if all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in names) else ()

    @classmethod
    def sums_first(cls, module: nn.Module) -> bool:
        return bool(module.is_transposed)


class Llama4Experts(Holder):
    """The weights of a Llama4TextExperts, whose inputs are (experts * T, H): all tokens for each expert."""

    label: ClassVar[str] = "experts"

    def __init__(self, module: nn.Module, scheme: Scheme) -> None:
        super().__init__(module, scheme)
        module.__class__ = _llama4_class(type(module))

    @classmethod
    def weights_of(cls, module: nn.Module) -> tuple[str, ...]:
        ours = type(module).__name__ == "Llama4TextExperts" and type(module).__module__.startswith("transformers.")
        return ("gate_up_proj", "down_proj") if ours else ()

    @classmethod
    def sums_first(cls, module: nn.Module) -> bool:
        return True


KINDS += [Experts, Llama4Experts]


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts' outputs, as transformers calls it.

    Args:
        self: the module with the experts.
        hidden_states: (T, H), float.
        top_k_index: int64 (T, k), the experts of each token. Values out of range contribute nothing.
        top_k_weights: float (T, k).

    Returns:
        (T, H), in the dtype of hidden_states. A token's output does not depend on other tokens, except for the last bit
        of functions of ATen in the gate, which differ at the end of a tensor on some CPUs.
    """
    holder = holder_of(self)
    if holder is None:  # experts left in floats, in a model with quantized ones
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    up_name, down_name = holder.names
    (up, first), (down, _) = (_part(getattr(self, name)) for name in holder.names)
    tokens, k = top_k_index.shape
    count = up.shape[0]
    local_experts = top_k_index.reshape(-1) - first
    local_experts = torch.where((local_experts < 0) | (local_experts >= count), count, local_experts)
    sorted_experts, order = torch.sort(local_experts, stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(1, count + 1, device=local_experts.device))
    stacks = [
        Stack(weight, _bias(self, name, first, count)) for weight, name in zip((up, down), holder.names, strict=True)
    ]
    gate = self._apply_gate if self.has_gate else self.act_fn
    x = _multiplied(holder, _to_local(hidden_states, getattr(self, up_name)), order // k, ends, stacks, gate)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    weights = _to_local(top_k_weights, getattr(self, up_name)).reshape(-1)[order]
    x = (x * weights.unsqueeze(1)).masked_fill((sorted_experts == count).unsqueeze(1), 0)
    x = x[torch.argsort(order)].view(tokens, k, x.shape[1])
    return _sum_over_processes(x, getattr(self, down_name)).sum(1).to(hidden_states.dtype)


def _multiplied(
    holder: Holder, x: Tensor, rows: Tensor, ends: Tensor, stacks: Sequence[Stack], gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Both products of a Holder for rows of x that are sorted by expert, with `gate` between them."""
    if not holder.quantizers:
        return chain(x, rows, ends, stacks, gate, holder.plan(), holder.columns)
    up, down = holder.names  # one product after the other, because their schemes differ
    x = chain(x, rows, ends, stacks[:1], gate, holder.plan(up), holder.columns)
    every = torch.arange(x.shape[0], device=x.device)
    return chain(gate(x), every, ends, stacks[1:], gate, holder.plan(down), holder.columns)


@functools.cache
def _llama4_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        holder, up = holder_of(self), self.gate_up_proj
        if holder is None:
            return cls.forward(self, hidden_states)
        if dtensor.is_dtensor(up):
            raise ValueError(
                f"experts: gate_up_proj of {cls.__name__} is a DTensor, but every process computes all of them; "
                "leave their parameters ordinary tensors"
            )

        def gate(both: Tensor) -> Tensor:
            gates, ups = both.chunk(2, dim=-1)
            return ups * self.act_fn(gates)

        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows, count = torch.arange(x.shape[0], device=x.device), up.shape[0]
        ends = torch.arange(1, count + 1, device=x.device) * (x.shape[0] // count)
        return _multiplied(holder, x, rows, ends, [Stack(up, None), Stack(self.down_proj, None)], gate)

    return subclass(_llama4_class, cls, forward)


# ---- expert parallelism: each process adds the outputs of its own experts, and zeros for the others


def _part(weight: Tensor) -> tuple[Tensor, int]:
    """This process's experts, and the index of the first. Raises ValueError if the placement splits an expert."""
    if not dtensor.is_dtensor(weight):
        return weight, 0
    if any(p.is_partial() or dtensor.sharded_dim(p) not in (None, 0) for p in weight.placements):
        raise ValueError(
            f"experts: a weight of shape {tuple(weight.shape)} is placed as {tuple(weight.placements)}, which cuts "
            "through experts; place it as Shard(0) or Replicate()"
        )
    _, (first, *_) = dtensor.local_range(weight)
    return weight.to_local(), first


def _bias(module: nn.Module, weight: str, first: int, count: int) -> Tensor | None:
    """The biases of this process's experts."""
    if not module.has_bias:
        return None
    bias = getattr(module, f"{weight}_bias")
    return bias.to_local() if dtensor.is_dtensor(bias) else bias[first : first + count]


def _to_local(x: Tensor, weight: Tensor) -> Tensor:
    """A tensor that all processes have, as a local one; its gradient is the sum over processes."""
    if not dtensor.is_dtensor(weight):
        return x
    whole = dtensor.as_dtensor(x, weight.device_mesh)
    whole = whole.redistribute(placements=[dtensor.replicate()] * weight.device_mesh.ndim)
    return whole.to_local(grad_placements=_sums(weight))


def _sum_over_processes(x: Tensor, weight: Tensor) -> Tensor:
    """The sum over processes, where one has the value of each element and the others zeros."""
    if not dtensor.is_dtensor(weight):
        return x
    spread = dtensor.of_parts(x, weight.device_mesh, _sums(weight))
    return spread.redistribute(placements=[dtensor.replicate()] * weight.device_mesh.ndim).to_local()


def _sums(weight: "DTensor") -> list["Placement"]:
    return [dtensor.partial() if p.is_shard() else dtensor.replicate() for p in weight.placements]


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
