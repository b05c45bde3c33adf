"""ScaleState: a layer's scales for roles whose quantizers do not find scales in each call.

    scales.input.scale, scales.input.zero_point        quantizer with the rule Static: StaticScale
    scales.weight.history, scales.weight.amax          quantizer with the rule Delayed: AmaxHistory

These state_dict entries are added to those of the float layer.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hop.impls.quantized import Scales
from hop.nn.contexts import FIELDS, INPUT, OUTPUT, ROLES, WEIGHT, SchemeNeeds
from hop.nn.scales.delayed import AmaxHistory
from hop.nn.scales.static import StaticScale
from hop.nn.weights.stored import StoredWeight
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

NO_SCALES = Scales()


class ScaleState(StoredWeight):
    """A module with a scheme, whose static and delayed scales are in `scales`, a submodule per role."""

    roles: ClassVar[tuple[str, ...]] = ROLES  # the roles of its operator
    learn_scales: bool  # whether static scales are Parameters
    example_dims: int  # dimensions of one example of its input

    def folded_weight(self) -> Tensor:
        """The weight that is quantized."""
        return self.weight

    def weight_quantizer(self, q: Quantizer) -> Quantizer:
        """The weight's quantizer for the one given in a scheme."""
        return q

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        """The shape of the result for one example of shape `one`."""
        raise NotImplementedError

    def forget_scales(self, roles: Sequence[str]) -> None:
        """Mark the static scales of `roles` as not set, because the tensors they describe have changed."""
        for role in roles:
            state = dict(self.scales).get(role)
            if isinstance(state, StaticScale):
                state.ready = False
        self.set_weight_scale()

    def set_weight_scale(self) -> None:
        """Find the weight's static scale if it has one that is not set."""
        if WEIGHT not in self.scales or self.weight.is_meta:
            return
        state = self.scales[WEIGHT]
        if isinstance(state, StaticScale) and not state.ready:
            q = self.weight_quantizer(Quantizer.parse(state.spelling))
            state.set(**calibration.amax(q, self.folded_weight().detach()))

    def _given(self, plan: SchemeNeeds, x: Tensor) -> Scales:
        """The scales and zero points for quantizers that do not find them."""
        if not plan.needs:
            return NO_SCALES
        given: dict[str, Tensor | None] = {}
        for role, _ in plan.needs:
            if not self._keeps(role):
                continue
            state, field = self.scales[role], FIELDS[role]
            if isinstance(state, AmaxHistory):
                seen = x if role == INPUT else self.folded_weight() if role == WEIGHT else None
                given[field] = state(None if isinstance(seen, QuantizedTensor) else seen)
                continue
            assert isinstance(state, StaticScale)
            if not state.ready:
                raise RuntimeError(
                    f"hop.nn: the static scale of the role {role!r} is not set; call hop.nn.calibrate(model, batches), "
                    "load a state_dict that has it, or call its set(scale, zero_point)"
                )
            given[field], zero_point = state(self._sharing(role, x) if self.learn_scales else 1)
            if zero_point is not None:
                given[f"{field}_zero_point"] = zero_point
        return Scales(**given)

    def _sharing(self, role: str, x: Tensor) -> float:
        """The number of elements that share a learned scale: elements of the weight, or features of one example."""
        if role == WEIGHT:
            state = self.scales[WEIGHT]
            return self.weight.numel() / state.scale.numel()
        one = x.shape if x.dim() <= self.example_dims else x.shape[1:]
        return math.prod(one if role == INPUT else self._output_shape(one))

    def _keeps(self, role: str) -> bool:
        """Whether `role` has state if its quantizer needs it."""
        return role in self.roles and not (role == WEIGHT and self.frozen)

    def _unbuilt(self, plan: SchemeNeeds) -> list[tuple[str, str]]:
        """The roles, with their quantizers, that have no state, or the state of another quantizer."""
        return [
            (role, text)
            for role, text in plan.needs
            if self._keeps(role) and (role not in self.scales or self.scales[role].spelling != text)
        ]

    def _build(self, plan: SchemeNeeds) -> None:
        """Create missing state. State that the plan does not use is kept for schemes that do."""
        missing = self._unbuilt(plan)
        if missing and not isinstance(self.scales, nn.ModuleDict):
            self.scales = nn.ModuleDict()  # created late: a layer without state has no submodules, like the float layer
        for role, text in missing:
            self.scales[role] = self._made(role, Quantizer.parse(text)).train(self.training)
        self.set_weight_scale()

    @property
    def _device(self) -> torch.device:
        return self.weight.device

    def _made(self, role: str, q: Quantizer) -> nn.Module:
        device = self._device
        if role == WEIGHT and not q.scale.is_delayed:
            shape = self.weight_quantizer(q).buffers(self.weight.shape)["scale"][0]
            return StaticScale(q, shape, self.learn_scales, device)
        if q.scale.is_delayed:
            if role == OUTPUT:
                raise ValueError(
                    f"hop.nn: output={q} needs the amax of unquantized results, which the operator does not return; "
                    "use a quantizer with the rule Static, or one that finds its scale"
                )
            return AmaxHistory(q, device)
        if any(size != -1 for size in q.block):
            raise ValueError(
                f"hop.nn: the static scale of the role {role!r} is one for the whole tensor, but {q} has blocks of "
                f"{q.block}; use block=(-1, -1), or a rule that finds the scales"
            )
        return StaticScale(q, (1,), self.learn_scales, device)
