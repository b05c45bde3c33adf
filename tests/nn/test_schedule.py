"""Training in stages: what begins when, what stays, and how often a program is compiled."""

import copy
import unittest
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import hop
from hop import estimators, formats, recipes, schemes
from hop.nn import Schedule, Stage
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

WHOLE = (-1, -1)
ESTIMATORS = {
    "STE": estimators.STE(),
    "LSQ": estimators.LSQ(),
    "PACT": estimators.PACT(),
    "EWGS": estimators.EWGS(),
    "SoftRounding": estimators.SoftRounding(4.0),
}


def learned(bits: int, affine: bool = False) -> Scheme:
    """Static scales, of activations and of rows of weights."""
    format = {8: formats.INT8, 4: formats.INT4}[bits]
    return Scheme(Quantizer(format, WHOLE, Static(affine=affine)), Quantizer(format, (1, -1), Static()))


def made(scheme: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    return hop.nn.convert(model, scheme, **kwargs), randn(64, 24)


def train(model: Any, x: Tensor, schedule: Schedule, steps: int, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.mse_loss(model(x), x[:, :8]).backward()
        optimizer.step()
        schedule.step()


class TestSchedule(unittest.TestCase):
    def test_floats_then_codes(self):
        model, x = made(schemes.INT8_DYNAMIC)
        floats = copy.deepcopy(model)
        schedule = Schedule(model, [Stage(0, quantize=False), Stage(2, quantize=True)])
        plain = [nn.Linear(24, 32), nn.Linear(32, 8)]
        for own, layer in zip(plain, (floats[0], floats[2]), strict=True):
            own.load_state_dict(layer.state_dict())
        assert torch.equal(model(x), plain[1](plain[0](x).relu()))
        assert not schedule.step() and torch.equal(model(x), plain[1](plain[0](x).relu()))
        assert schedule.step() and torch.equal(model(x), floats(x))
        assert not schedule.step() and schedule.stage.step == 2

    def test_calibrating_leaves_floats_as_they_were(self):
        model, x = made(learned(8))
        Schedule(model, [Stage(0, quantize=False)])
        want = model(x)
        hop.nn.calibrate(model, [x], progress=False)
        assert torch.equal(model(x), want)

    def test_scales_are_calibrated_when_a_stage_begins(self):
        model, x = made(learned(8))
        schedule = Schedule(model, [Stage(0, quantize=False), Stage(1, quantize=True, calibrate=[x])])
        want = copy.deepcopy(model)
        train(model, x, schedule, 1)
        want.load_state_dict(model.state_dict())
        hop.nn.calibrate(want, [x], progress=False)
        for layer, other in ((model[0], want[0]), (model[2], want[2])):
            layer_scale, other_scale = layer.scales.input.scale, other.scales.input.scale
            assert torch.equal(layer_scale, other_scale) and layer_scale > 0

    @parameterized.expand([(False,), (True,)])
    def test_fewer_bits_keep_ranges_and_parameters(self, affine):
        model, x = made(learned(8, affine), learn_scales=True)
        hop.nn.calibrate(model, [x.abs() if affine else x], progress=False)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
        schedule = Schedule(model, [Stage(1, rules=learned(4, affine))])
        schedule.step()
        assert {name: id(p) for name, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
        own = dict(model.named_parameters())
        for name, p in own.items():
            old, zero = before[name][1], name.removesuffix("scale") + "zero_point"
            if name.endswith("input.scale") and affine:
                for end, other in ((-128, -8), (127, 7)):
                    torch.testing.assert_close((other - own[zero]) * p, (end - before[zero][1]) * old)
            elif name.endswith(".scale"):
                torch.testing.assert_close(p * 7, old * 127)
            elif not name.endswith("zero_point"):
                assert torch.equal(p, old)
        train(model, x, schedule, 3, optimizer)
        assert not torch.equal(model[0].scales.input.scale, before["0.scales.input.scale"][1] * 127 / 7)

    def test_selectors(self):
        model, _ = made(learned(8))
        Schedule(model, [Stage(0, rules={"2": learned(4)})])
        assert model[0].scheme == learned(8) and model[2].scheme == learned(4)

    def test_estimators_of_stages(self):
        model, x = made(learned(8), learn_scales=True)
        hop.nn.calibrate(model, [x], progress=False)
        ways = [estimators.SoftRounding(t) for t in (1.0, 4.0)]
        stages = [*(Stage(i, gradient=way) for i, way in enumerate(ways)), Stage(2, gradient=estimators.STE())]
        plain, schedule = copy.deepcopy(model), Schedule(model, stages)
        for way in (*ways, None):
            assert model[0].scheme.rhs.gradient == way and model[2].scheme.lhs.gradient == way
            assert torch.equal(model(x), plain(x))
            schedule.step()
        assert model[0].scheme == plain[0].scheme

    def test_scales_that_are_frozen(self):
        model, x = made(learned(8), learn_scales=True)
        hop.nn.calibrate(model, [x], progress=False)
        schedule = Schedule(model, [Stage(2, freeze_scales=True)])
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        first = model[0].scales.input.scale.detach().clone()
        train(model, x, schedule, 2, optimizer)
        then, weight = model[0].scales.input.scale.detach().clone(), model[0].weight.detach().clone()
        assert not torch.equal(first, then)
        train(model, x, schedule, 3, optimizer)
        assert torch.equal(model[0].scales.input.scale, then) and not torch.equal(model[0].weight, weight)

    def test_delayed_scales_that_are_frozen(self):
        model, x = made(recipes.FP8_DELAYED)
        schedule = Schedule(model, [Stage(2, freeze_scales=True)])
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        hop.nn.advance_after(optimizer, model)
        train(model, x, schedule, 2, optimizer)
        before = {name: b.clone() for name, b in model.named_buffers()}
        assert any(b.any() for b in before.values())
        train(model, 3 * x, schedule, 3, optimizer)
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())

    def test_statistics_that_are_frozen(self):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        model = hop.nn.convert(model, schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(model)
        x, schedule = randn(64, 24), Schedule(model, [Stage(2, freeze_statistics=True)])
        train(model, x, schedule, 2)
        mean = model[1].running_mean.clone()
        train(model, 2 * x, schedule, 2)
        assert mean.any() and torch.equal(model[1].running_mean, mean)
        assert torch.equal(model(x), copy.deepcopy(model).eval()(x))

    @pytest.mark.full
    def test_a_stage_compiles_once(self):
        model, x = made(learned(8), learn_scales=True)
        stages = [
            Stage(0, quantize=False),
            Stage(3, quantize=True, calibrate=[x], gradient=estimators.SoftRounding(2.0)),
            Stage(6, gradient=estimators.SoftRounding(8.0)),
            Stage(9, rules=learned(4)),
            Stage(12, freeze_scales=True),
        ]
        schedule, counter = Schedule(model, stages), CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
        seen = []
        for _ in range(15):
            compiled(x).sum().backward()
            seen.append(counter.frame_count)
            schedule.step()
        of_stages = [set(seen[first : first + 3]) for first in range(0, 15, 3)]
        assert all(len(counts) == 1 for counts in of_stages), seen  # the first step of a stage compiles, if one does
        assert (seen[0], seen[-1]) == (1, 5), seen

    @parameterized.expand([*ESTIMATORS.items()])
    @pytest.mark.full
    def test_trained_frozen_and_exported(self, _, estimator):
        """The integers of the program are those of the last training forward."""
        model, x = made(learned(8), learn_scales=True)
        stages = [
            Stage(0, quantize=False),
            Stage(3, quantize=True, calibrate=[x], gradient=estimator),
            Stage(6, rules={"2": learned(4)}),
            Stage(9, freeze_scales=True),
        ]
        schedule = Schedule(model, stages)
        train(model, x, schedule, 12, torch.optim.Adam(model.parameters(), 1e-4))
        want = model(x).detach()
        hop.nn.freeze(model.eval())
        program = torch.export.export(model, (x,)).run_decompositions(hop.decompositions())
        assert torch.equal(program.module()(x), want)

    def test_is_saved_and_goes_on(self):
        stages = [
            Stage(0, quantize=False),
            Stage(2, quantize=True),
            Stage(4, rules=learned(4)),
            Stage(7, freeze_scales=True),
        ]

        def begun() -> tuple[Any, Tensor, Schedule, Any]:
            model, x = made(learned(8), learn_scales=True)
            own = [stages[0], replace(stages[1], calibrate=[x]), *stages[2:]]
            schedule = Schedule(model, own)
            return model, x, schedule, torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

        model, x, schedule, optimizer = begun()
        train(model, x, schedule, 5, optimizer)
        saved = copy.deepcopy([of.state_dict() for of in (schedule, model, optimizer)])
        other, _, second, restored = begun()
        for of, state in zip((second, other, restored), saved, strict=True):
            of.load_state_dict(state)
        for own in ((model, x, schedule, 4, optimizer), (other, x, second, 4, restored)):
            train(*own)
        assert torch.equal(model(x), other(x)) and other[0].scheme == learned(4)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_what_is_no_schedule(self):
        model, x = made(schemes.INT8_DYNAMIC)
        wrong: list[tuple[Any, str]] = [
            (lambda: Stage(-1), "step must be an int, 0 or more"),
            (lambda: Stage(0, quantize="no"), "quantize must be True or False"),  # type: ignore[arg-type]
            (lambda: Stage(0, gradient="ste"), "gradient must be an Estimator"),  # type: ignore[arg-type]
            (lambda: Stage(0, rules={"0": None}), "cannot return to float layers"),
            (lambda: Stage(0, rules="int9"), "int9"),
            (lambda: Schedule(model, []), "must not be empty"),
            (lambda: Schedule(model, [Stage(3), Stage(3)]), "must rise"),
            (lambda: Schedule(model, [0]), "Stage values"),  # type: ignore[list-item]
            (lambda: Schedule(x, [Stage(0)]), "must be a torch.nn.Module"),  # type: ignore[arg-type]
            (lambda: Schedule(nn.Linear(2, 2), [Stage(0)]), "no quantized layers"),
            (lambda: Schedule(model, [Stage(5, freeze_statistics=True)]), "step 5 freezes statistics"),
            (lambda: Schedule(model, [Stage(5, rules={"1": "int8"})]), "no quantized layer matches '1'"),
        ]
        for make, message in wrong:
            with pytest.raises((TypeError, ValueError), match=message):
                make()
        learning, _ = made(schemes.INT8_DYNAMIC, learn_scales=False)
        for layer in (learning[0], learning[2]):
            layer.learn_scales = True
        with pytest.raises(ValueError, match=r"stage of step 1: layer '0' would learn scales that no optimizer has"):
            Schedule(learning, [Stage(1, rules=learned(8))]).step()
        frozen, _ = made(schemes.INT8_DYNAMIC)
        schedule = Schedule(hop.nn.freeze(frozen), [Stage(1, rules="int4_weight_32")])
        with pytest.raises(ValueError, match="is frozen; end the schedule before"):
            schedule.step()
        with pytest.raises(ValueError, match="steps must be an int of at least 1"):
            schedule.load_state_dict({"steps": 0})
