"""Schedule: quantization-aware training in stages: floats, then codes, then fewer bits, then fixed scales.

A stage changes the state of the model's layers. Compiled programs guard on it: they recompile for each stage and never
within one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from hop.nn.contexts import FIELDS, SchemeNeeds
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.layers.folded import FoldedBatchNorm
from hop.nn.models.calibration import calibrate
from hop.nn.models.conversion import Rules, checked
from hop.nn.models.selectors import matches
from hop.nn.scales.delayed import AmaxHistory
from hop.nn.scales.static import StaticScale
from hop.numerics import calibration
from hop.numerics.estimators import STE, Estimator
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class Stage:
    """A change at one step, which stays in effect. Fields that are None or False change nothing.

    Args:
        step: the training step before which the stage begins, counted from 0.
        quantize: False: quantized layers compute in floats; True: they compute in their schemes.
        rules: schemes for layers, as for hop.nn.convert; only for layers that are quantized already. Static scales are
            converted to another format with the same blocks: ranges and Parameters stay.
        gradient: the estimator of all quantizers of activations and weights, such as hop.estimators.SoftRounding(10.0)
            or hop.estimators.NoiseInjection(); hop.estimators.STE() restores the default. NoiseInjection is not applied
            to outputs, which are passed on as codes.
        freeze_scales: whether scales stop changing: learned ones get no gradient, and delayed ones record no amax.
        freeze_statistics: whether batch norms folded into layers keep their running statistics
            (`hop.nn.freeze_statistics_`).
        calibrate: batches of inputs from which all static activation scales are found anew when the stage begins
            (hop.nn.calibrate).
        method: the calibration method, a function of hop.calibration.
    """

    step: int
    quantize: bool | None = None
    rules: Rules | None = None
    gradient: Estimator | None = None
    freeze_scales: bool = False
    freeze_statistics: bool = False
    calibrate: Iterable[object] | None = None
    method: Callable[..., dict[str, Tensor]] = calibration.amax

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise ValueError(
                f"Stage: step must be an int, 0 or more, got {self.step!r}; give the step at which it begins"
            )
        for name in ("quantize", "freeze_scales", "freeze_statistics"):
            flag = getattr(self, name)
            if not isinstance(flag, bool) and not (name == "quantize" and flag is None):
                raise TypeError(f"Stage: {name} must be True or False, got {flag!r}; give one of them")
        if self.gradient is not None and not isinstance(self.gradient, Estimator):
            raise TypeError(
                f"Stage: gradient must be an Estimator, got {self.gradient!r}; give one such as hop.estimators.STE()"
            )
        if self.rules is not None and any(scheme is None for _, scheme in checked(self.rules)):
            raise ValueError(
                "Stage: rules: a scheme is None, but layers cannot return to float layers in training; name only the "
                "layers that change"
            )


class Schedule:
    """The stages of a training run. Call `step` after each optimizer step, like a learning-rate scheduler.

        schedule = hop.nn.Schedule(model, [Stage(0, quantize=False), Stage(1000, quantize=True), ...])
        for x, y in data:
            ...
            optimizer.step()
            schedule.step()

    Args:
        model: a model with quantized layers (hop.nn.convert). Layers that share an input's codes keep sharing them.
        stages: in order of rising steps. A stage of step 0 begins immediately.

    Raises:
        TypeError: model is not a module, or a stage is not a Stage.
        ValueError: there is no stage, steps do not rise, the model has no quantized layers, or a stage needs something
            the model does not have. An error while a stage begins names its step; changes made before the error stay.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        if not isinstance(model, nn.Module):
            raise not_a_model("Schedule", model)
        if not all(isinstance(stage, Stage) for stage in stages):
            raise TypeError(f"Schedule: stages must be hop.nn.Stage values, got {stages!r}; give one such as Stage(0)")
        steps = [stage.step for stage in stages]
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise ValueError(f"Schedule: stages must not be empty, and their steps must rise; got {steps}; sort them")
        if not any(isinstance(m, Layer) for m in model.modules()):
            raise ValueError(
                f"Schedule: model={type(model).__name__} has no quantized layers; call hop.nn.convert(model, scheme) "
                "before"
            )
        self.model, self.stages, self.steps = model, tuple(stages), 0
        for stage in self.stages:
            self._check(stage)
        self._begin_all(0, 0)

    @property
    def stage(self) -> Stage | None:
        """The current stage; None before the first one."""
        begun = [stage for stage in self.stages if stage.step <= self.steps]
        return begun[-1] if begun else None

    def step(self) -> bool:
        """Count a step, and return whether a stage begins with the next one."""
        self.steps += 1
        return self._begin_all(self.steps, self.steps)

    def state_dict(self) -> dict[str, int]:
        """The number of steps counted, as {"steps": int}."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the step of a state_dict: begin all stages up to it, without calibrating.

        Scales come from the model's own state_dict, so load the schedule first, then the model, then the optimizer.

        Raises:
            ValueError: state_dict is invalid, or this schedule is already further.
        """
        steps = state_dict.get("steps")
        if not isinstance(steps, int) or steps < self.steps:
            raise ValueError(
                f"Schedule.load_state_dict: steps must be an int of at least {self.steps}, got {steps!r}; load into a "
                "new schedule, of a model as it was before training"
            )
        first, self.steps = self.steps + 1, steps
        self._begin_all(first, steps, calibrates=False)

    # ---- beginning a stage

    def _layers(self) -> list[tuple[str, Layer]]:
        return [(name, module) for name, module in modules_of(self.model) if isinstance(module, Layer)]

    def _check(self, stage: Stage) -> None:
        if stage.freeze_statistics and not any(isinstance(m, FoldedBatchNorm) for m in self.model.modules()):
            raise ValueError(
                f"Schedule: the stage of step {stage.step} freezes statistics, but no batch norm is folded into a "
                "layer of the model; call hop.nn.fold_batch_norms(model) before, or leave it out"
            )
        for selector, _ in [] if stage.rules is None else checked(stage.rules):
            if not any(matches(selector, name, layer) for name, layer in self._layers()):
                known = ", ".join(name or "(model)" for name, _ in self._layers())
                raise ValueError(
                    f"Schedule: the stage of step {stage.step}: no quantized layer matches {selector!r}; those of the "
                    f"model are {known}"
                )

    def _begin_all(self, first: int, last: int, calibrates: bool = True) -> bool:
        due = [stage for stage in self.stages if first <= stage.step <= last]
        for stage in due:
            try:
                self._begin(stage, calibrates)
            except (TypeError, ValueError, RuntimeError) as error:
                raise type(error)(f"Schedule: the stage of step {stage.step}: {error}") from error
        return bool(due)

    def _begin(self, stage: Stage, calibrates: bool) -> None:
        for name, layer in self._layers():
            self._change(stage, name, layer)
        if stage.calibrate is not None and calibrates:
            calibrate(self.model, stage.calibrate, stage.method)
        for _, layer in self._layers():
            if stage.quantize is not None:
                layer.in_floats = not stage.quantize
            if stage.freeze_scales:
                _freeze_scales(layer)
        for module in self.model.modules():
            if stage.freeze_statistics and isinstance(module, FoldedBatchNorm):
                module.freeze_statistics_()

    def _change(self, stage: Stage, name: str, layer: Layer) -> None:
        """Apply a stage's scheme to a layer."""
        scheme = layer.scheme
        if stage.rules is not None:
            schemes = (own for selector, own in checked(stage.rules) if matches(selector, name, layer))
            scheme = next(schemes, scheme) or scheme
        if stage.gradient is not None:
            scheme = _with_gradient(scheme, stage.gradient)
        if scheme == layer.scheme:
            return
        if layer.frozen:
            raise ValueError(f"the weight of layer {name!r} is frozen; end the schedule before hop.nn.freeze")
        states = dict(layer.scales)
        for role, text in SchemeNeeds.of(scheme).needs:
            if isinstance(state := states.get(role), StaticScale) and state.spelling != text:
                state.become(cast(Quantizer, getattr(scheme, FIELDS[role])))
        before = {id(p) for p in layer.parameters()}
        layer.scheme = scheme
        if any(id(p) not in before for p in layer.parameters()):
            raise ValueError(
                f"layer {name!r} would learn scales that no optimizer has, because its previous scheme has none of "
                "their form; begin with a scheme whose quantizers have the same rule and blocks"
            )


def _with_gradient(scheme: Scheme, gradient: Estimator) -> Scheme:
    own = None if type(gradient) in (Estimator, STE) else gradient
    # Outputs are passed on as codes, to which no noise can be added.
    fields = ("lhs", "rhs") if gradient.adds_noise else ("lhs", "rhs", "output")
    changed = {field: replace(q, gradient=own) for field in fields if (q := getattr(scheme, field)) is not None}
    return replace(scheme, **changed)


def _freeze_scales(layer: Layer) -> None:
    for state in dict(layer.scales).values():
        if isinstance(state, AmaxHistory):
            state.frozen = True
        for parameter in state.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None


__all__ = ["Schedule", "Stage"]
