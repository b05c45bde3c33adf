"""What all optimizers share: their states, and the way of a step."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hop.leaves import dequantize
from hop.optim.rounding import rounded
from hop.optim.states import BITS8, States, fresh, local, quantizer, spelled
from hop.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_OWN = ("state", "min_numel", "error_if_nonfinite")  # options that a state_dict does not change
_STREAMS = 2**16  # of random numbers, for each param group


class Options(TypedDict, total=False):
    """What all optimizers take by keyword."""

    maximize: bool
    state: Quantizer | States | None
    min_numel: int
    stochastic_rounding: bool
    error_if_nonfinite: bool
    seed: int | None


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer, some of whose states are quantized."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        state: Quantizer | States | None = BITS8,
        min_numel: int = 4096,
        stochastic_rounding: bool = False,
        error_if_nonfinite: bool = False,
        seed: int | None = None,
    ) -> None:
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(f"{self._name}: min_numel must be an integer of at least 0, got {min_numel!r}")
        if seed is None:
            seed = int(torch.randint(2**62, ())) if stochastic_rounding else 0
        options = {"state": state, "min_numel": min_numel, "error_if_nonfinite": error_if_nonfinite}
        options |= {"maximize": maximize, "stochastic_rounding": stochastic_rounding, "seed": seed}
        super().__init__(params, defaults | options)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["state"] = spelled(self._name, group["state"])
        for p in group["params"]:
            if not p.is_floating_point():
                raise TypeError(f"{self._name}: parameters must be floating point, got one of {p.dtype}")

    # ---- what a subclass says

    def _names(self, group: dict[str, Any]) -> Sequence[str]:
        """The names of the states of a group."""
        raise NotImplementedError

    def _update(
        self, group: dict[str, Any], step: Any, p: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The parameter and its states after a step, all in float32."""
        raise NotImplementedError

    # ---- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            FloatingPointError: with error_if_nonfinite, if a gradient has a NaN or an infinity; before any parameter
                or state has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_finite()
            for number, group in enumerate(self.param_groups):
                params: list[Tensor] = []
                self._init_group(group, params)
                places = [i for i, p in enumerate(group["params"]) if p.grad is not None]
                for place, p in zip(places, params, strict=True):
                    self._step(group, p, number * _STREAMS + place)
        return loss

    def _check_finite(self) -> None:
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"] if group["error_if_nonfinite"] else ()):
                if p.grad is not None and not bool(local(p.grad).isfinite().all()):
                    raise FloatingPointError(
                        f"{self._name}: the gradient of parameter {place} of group {number}, of shape "
                        f"{tuple(p.shape)}, has a NaN or an infinity; nothing was changed. Skip the step, or scale the "
                        "loss down"
                    )

    def _init_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Append the parameters that have a gradient, and make their states. Dynamo runs what has this name in
        optimizers, and does not trace it."""
        for p in group["params"]:
            if p.grad is None:
                continue
            params.append(p)
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in self._names(group):
                    state[name] = fresh(p, self._quantizer(group, p, name))

    def _step(self, group: dict[str, Any], p: Tensor, stream: int) -> None:
        state = self.state[p]
        state["step"] += 1
        step = state["step"] if torch.compiler.is_compiling() else state["step"].item()
        grad = self._gradient(p)
        held = {name: local(state[name]) for name in self._names(group)}
        wide = {name: _wide(x) for name, x in held.items()}
        new, states = self._update(group, step, _wide(local(p)), -grad if group["maximize"] else grad, wide)
        if group["stochastic_rounding"] and p.dtype == torch.bfloat16:
            seed = state["step"].to(torch.int64) + group["seed"]
            new = rounded(new, seed.to(new.device), stream)
        local(p).copy_(new)
        for name, x in states.items():
            held[name].copy_(x)

    def _gradient(self, p: Tensor) -> Tensor:
        grad = p.grad
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError(f"{self._name}: the gradient of a parameter is sparse; make it dense")
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(p.device_mesh, p.placements)
        return _wide(local(grad))

    def _quantizer(self, group: dict[str, Any], p: Tensor, name: str) -> Quantizer | None:
        text = group["state"].get(name)
        return None if text is None or p.numel() < group["min_numel"] else quantizer(text)

    # ---- saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states and options: of this optimizer, or of one of torch.optim with the same parameters. What the
        states hold is quantized as this optimizer says, and nothing is shared with `state_dict`."""
        own = [{k: group[k] for k in _OWN} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, own, strict=True):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(kept)
            for p in group["params"]:
                if p not in self.state:
                    continue
                state = self.state[p]
                had = [name for name in self._names(group) if state.get(name) is not None]
                for name in self._names(group):
                    given = state[name] if name in had else None
                    state[name] = (
                        fresh(p, self._quantizer(group, p, name))
                        if given is None
                        else self._fitted(group, p, name, given)
                    )
                # torch.optim.SGD counts no steps: where it has a momentum, there was one.
                step = state.get("step", float(bool(had)))
                state["step"] = torch.as_tensor(step, dtype=torch.float32).clone()

    def _fitted(self, group: dict[str, Any], p: Tensor, name: str, x: Tensor) -> Tensor:
        q, held = self._quantizer(group, p, name), local(x)
        if isinstance(held, QuantizedTensor) and held.quantizer == q:
            return x.clone()
        return fresh(p, q, x)


def _wide(x: Tensor) -> Tensor:
    return dequantize(x, torch.float32) if isinstance(x, QuantizedTensor) else x.to(torch.float32)
