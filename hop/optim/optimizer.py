"""The base class of the optimizers: states, steps, and saved state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hop.compat import eager
from hop.compat.pytree import StateDict
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import flag, integer, shown
from hop.optim.loading import check_group, check_state, check_whole
from hop.optim.states import BITS8, States, fresh, is_placed, local, quantizer, spelled
from hop.optim.step import as_tensor, step_
from hop.optim.step import explain as explain_step
from hop.optim.updates import UpdateRule
from hop.tensor import QuantizedTensor
from hop.tensor.table import training_error

_OWN = (
    "state",
    "min_numel",
    "error_if_nonfinite",
    "decoupled_weight_decay",
)  # options that load_state_dict keeps from this optimizer
# how torch.optim computes a step; the result is the same
_OF_TORCH = ("foreach", "fused", "capturable", "differentiable")
_PARAMETERS = "pass for example model.parameters()"
_TAKEN = ("lr", "betas", "eps", "momentum", "dampening", "weight_decay")  # options that every compatible state_dict has
_STREAMS = 2**16  # random streams for each param group, one per parameter


class Keywords(TypedDict, total=False):
    """Keyword arguments that all optimizers have."""

    maximize: bool
    state: Quantizer | States | None
    min_numel: int
    stochastic_rounding: bool
    error_if_nonfinite: bool
    seed: int | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


_Loss = TypeVar("_Loss")
ParamGroup: TypeAlias = dict[str, Any]
"""The parameters and options of a param group of torch.optim."""


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer with quantized states."""

    def __init__(
        self,
        params: object,
        defaults: ParamGroup,
        *,
        maximize: bool = False,
        state: Quantizer | States | None = BITS8,
        min_numel: int = 4096,
        stochastic_rounding: bool = False,
        error_if_nonfinite: bool = False,
        seed: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        if differentiable:
            raise ValueError(
                f"{self._name}: differentiable must be False, because codes have no gradient, got True; omit it"
            )
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(
                f"{self._name}: min_numel must be an integer of at least 0, got {min_numel!r}; use for example 4096"
            )
        flags = {"maximize": maximize, "stochastic_rounding": stochastic_rounding}
        for which, value in (flags | {"error_if_nonfinite": error_if_nonfinite}).items():
            flag(value, f"{self._name}: {which}")
        if seed is not None:
            integer(seed, f"{self._name}: seed")
        else:
            seed = int(torch.randint(2**62, ())) if stochastic_rounding else 0
        options = {"state": state, "min_numel": min_numel, "error_if_nonfinite": error_if_nonfinite}
        super().__init__(self._checked(params), defaults | options | flags | {"seed": seed})

    def _checked(self, params: object) -> list[Any]:
        """Check the parameters or param groups that an optimizer is created with, and list them."""
        if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
            raise TypeError(
                f"{self._name}: params must be an iterable of parameters, got {shown(params)}; {_PARAMETERS}"
            )
        listed = list(params)
        if not listed:
            raise ValueError(f"{self._name}: params must contain at least one parameter, got []; {_PARAMETERS}")
        return listed

    @property
    def _name(self) -> str:
        return type(self).__name__

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["state"] = spelled(self._name, group["state"])
        for p in group["params"]:
            if not p.is_floating_point():
                raise TypeError(
                    f"{self._name}: params: parameters must be floating point, got one of {p.dtype} and shape "
                    f"{tuple(p.shape)}; pass only trainable parameters"
                )

    # ---- implemented by subclasses

    def _names(self, group: ParamGroup) -> Sequence[str]:
        """The names of the states of a group."""
        raise NotImplementedError

    def _rule(self, group: ParamGroup) -> UpdateRule:
        """The update rule of a group."""
        raise NotImplementedError

    def _options(self, group: ParamGroup) -> Sequence[float | Tensor]:
        """The options of the rule, except lr."""
        raise NotImplementedError

    # ---- a step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...
    def step(self, closure: Callable[[], object] | None = None) -> object:  # type: ignore[override]
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss that `closure` returns, or None.

        Raises:
            FloatingPointError: with error_if_nonfinite, if a gradient contains a NaN or an infinity. No parameter and
                no state has changed then.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(f"{self._name}.step: closure must be a function, got {closure!r}; omit it")
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            zeros, errors = self._zeros()
            for number, group in enumerate(self.param_groups):
                params: list[Tensor] = []
                self._init_group(group, params)
                places = [i for i, p in enumerate(group["params"]) if p.grad is not None]
                step_(
                    str(self._rule(group)),
                    self._numbers(group),
                    group["seed"] if group["stochastic_rounding"] else None,
                    [number * _STREAMS + i for i in places],
                    [self.state[p]["step"] for p in params],
                    [local(p) for p in params],
                    [self._gradient(p) for p in params],
                    [local(self.state[p][name]) for p in params for name in self._names(group)],
                    zeros,
                    errors,
                )
        return loss

    def explain(self) -> str:
        """Explain which kernel runs the step of each parameter, and why the kernels before it declined.

        Covers parameters that have a gradient and have taken a step.
        """
        found: dict[str, list[str]] = {}
        for number, group in enumerate(self.param_groups):
            seed = group["seed"] if group["stochastic_rounding"] else None
            for place, p in enumerate(group["params"]):
                if p.grad is not None and self.state[p]:
                    states = [local(self.state[p][name]) for name in self._names(group)]
                    why = explain_step(str(self._rule(group)), seed, local(p), self._gradient(p), states)
                    found.setdefault(why, []).append(f"{number}.{place}")
        return "\n".join(f"parameters {', '.join(places)}\n{why}" for why, places in found.items())

    def _numbers(self, group: ParamGroup) -> list[float | Tensor]:
        """The options of a step, lr first; tensors in a compiled program, where constants would cause recompilation."""
        options = [group["lr"], *self._options(group)]
        return [as_tensor(x) for x in options] if torch.compiler.is_compiling() else options

    def _zeros(self) -> tuple[list[Tensor], list[str]]:
        """A scalar for each gradient that must be finite, 0 if it is finite on all processes, and the error message
        otherwise.
        """
        zeros: list[Tensor] = []
        errors: list[str] = []
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"] if group["error_if_nonfinite"] else ()):
                if p.grad is not None:
                    total = (p.grad * 0).sum()
                    zeros.append(total.full_tensor() if isinstance(total, DTensor) else total)
                    errors.append(
                        f"{self._name}: the gradient of parameter {place} of group {number}, of shape "
                        f"{tuple(p.shape)}, contains a NaN or an infinity, but must be finite; nothing was changed; "
                        "skip the step, or scale the loss down"
                    )
        return zeros, errors

    def _init_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        """Append the parameters that have a gradient to `params`, and create missing states.

        The call for the first group creates the states of all groups: Dynamo runs the method of this name of an
        optimizer instead of tracing it, and does not see states that the first call does not create.
        """
        groups = self.param_groups if group is self.param_groups[0] else (group,)
        for p in (p for other in groups for p in other["params"] if p.grad is not None):
            if isinstance(local(p), QuantizedTensor):
                raise training_error(f"{self._name}.step", local(p))
        for other in groups:
            for p in other["params"]:
                state = None if p.grad is None else self.state[p]
                if state is not None and not state:
                    made = {name: fresh(p, self._quantizer(other, p, name)) for name in self._names(other)}
                    # in one go, so that an interrupt leaves all of it or nothing
                    state.update({"step": torch.tensor(0.0), **made})
        params += [p for p in group["params"] if p.grad is not None]

    def _gradient(self, p: Tensor) -> Tensor:
        grad = p.grad
        assert grad is not None
        if eager.is_dual_level_open() and any(map(eager.has_tangent, (p, grad, *self._option_tensors()))):
            raise NotImplementedError(
                f"{self._name}: a parameter of shape {tuple(p.shape)}, its gradient or an option carries a tangent of "
                "forward mode, which a step would lose; call step outside the dual level, or use primals"
            )
        if grad.is_sparse:
            raise RuntimeError(
                f"{self._name}: the gradient of a parameter of shape {tuple(p.shape)} is sparse, and it must be dense; "
                "create its layer with sparse=False, or use torch.optim.SparseAdam"
            )
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(p.device_mesh, p.placements)
        return local(grad)

    def _option_tensors(self) -> list[Tensor]:
        return [x for g in self.param_groups for x in (g["lr"], *self._options(g)) if isinstance(x, Tensor)]

    def _quantizer(self, group: ParamGroup, p: Tensor, name: str) -> Quantizer | None:
        text = group["state"].get(name)
        return None if text is None or p.numel() < group["min_numel"] else quantizer(text)

    # ---- saving and loading

    def load_state_dict(self, state_dict: StateDict, *, requantize: bool = False) -> None:
        """Load states and options, of this optimizer or of one of torch.optim with the same parameters.

        Float states are quantized with this optimizer's quantizers. Nothing is shared with `state_dict`.

        Args:
            state_dict: what state_dict() of such an optimizer returns.
            requantize: whether to requantize states whose quantizers differ from this optimizer's, which loses
                precision;
                otherwise they are an error. An optimizer without quantizers loads any states.

        Raises:
            TypeError, ValueError: `state_dict` is from another kind of optimizer, or has states with other quantizers.
                Nothing has changed then.

        The states may be placed differently from the parameters: whole where the parameters are DTensors, or vice
        versa. They are then requantized, and all processes of the mesh must call this function. hop.checkpoint.save and
        load, with torch.distributed.checkpoint.state_dict, do the same with files, for any number of processes.
        """
        flag(requantize, f"{self._name}: requantize")
        self._check_state_dict(state_dict, requantize)
        own = [{k: group[k] for k in _OWN if k in group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, own, strict=True):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for name in _OF_TORCH:
                group.pop(name, None)
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
                # torch.optim.SGD does not count steps: a saved momentum means that there was at least one.
                step = state.get("step", float(bool(had)))
                state["step"] = torch.as_tensor(step, dtype=torch.float32).clone()

    def _check_state_dict(self, state_dict: StateDict, requantize: bool) -> None:
        """Raise if `state_dict` is not one of this optimizer. torch compares the numbers of groups and parameters."""
        check_whole(self._name, state_dict)
        options = [key for key in self.defaults if key in _TAKEN]
        for number, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            check_group(self._name, number, saved, options)
            own = {**self.defaults, **saved, **{k: group[k] for k in _OWN if k in group}}
            for index, p in zip(saved["params"], group["params"], strict=False):
                if state := state_dict["state"].get(index):
                    quantizers = {name: self._quantizer(own, p, name) for name in self._names(own)}
                    check_state(self._name, index, p, state, quantizers, requantize)

    def _fitted(self, group: ParamGroup, p: Tensor, name: str, x: Tensor) -> Tensor:
        q, held = self._quantizer(group, p, name), local(x)
        if isinstance(held, QuantizedTensor) and held.quantizer == q and is_placed(x, p):
            return x.clone()
        return fresh(p, q, x)
