"""correct_bias and reestimate_batch_norms against means and variances in float64."""

import copy
import math
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hop
from hop import presets
from hop.algorithms import correct_bias, reestimate_batch_norms
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

BATCHES = [randn(6, 5, 32, seed=seed).relu() for seed in (1, 2, 3)]
IMAGES = [randn(6, 3, 9, 9, seed=seed).relu() for seed in (1, 2, 3)]
TERNARY = Scheme(None, presets.TERNARY_ROW)


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval().requires_grad_(False)


def network() -> Any:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
    return nn.Sequential(*layers).eval().requires_grad_(False)


class TestBias(unittest.TestCase):
    def test_means_become_those_of_floats(self):
        """Layer after layer: the second one is given what the corrected first one leaves."""
        floats = mlp()
        for scheme in (TERNARY, "int8_static"):
            model = hop.quantize_(copy.deepcopy(floats), scheme, calibrate=BATCHES)
            plain = copy.deepcopy(model)
            assert correct_bias(model, floats, BATCHES) is model
            x = torch.cat(BATCHES)
            first = plain[0](x).double().mean((0, 1)) - floats[0](x).double().mean((0, 1))
            assert torch.allclose(model[0].bias.double(), floats[0].bias.double() - first, atol=1e-6)
            second = plain[2](model[:2](x)).double().mean((0, 1)) - floats(x).double().mean((0, 1))
            assert torch.allclose(model[2].bias.double(), floats[2].bias.double() - second, atol=1e-6)
            assert torch.allclose(model(x).double().mean((0, 1)), floats(x).double().mean((0, 1)), atol=1e-6)
            for row, error, y in zip(model.bias_report, (first, second), (floats[0](x), floats(x)), strict=True):
                unit = y.double().mean((0, 1)).square().mean().sqrt()
                assert row.before == pytest.approx(float(error.square().mean().sqrt() / unit), rel=1e-3)
                assert row.after < 1e-5 and not row.note

    def test_convolutions(self):
        floats = nn.Sequential(network()[0], nn.ReLU(), network()[3])
        model = correct_bias(hop.quantize_(copy.deepcopy(floats), TERNARY), floats, IMAGES)
        x = torch.cat(IMAGES)
        assert torch.allclose(model(x).mean((0, 2, 3)), floats(x).mean((0, 2, 3)), atol=1e-5)

    def test_called_twice(self):
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(32, 32)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(self.layer(x).relu())

        floats = Model().requires_grad_(False)
        model = hop.quantize_(copy.deepcopy(floats), TERNARY)
        plain, x = copy.deepcopy(model), torch.cat(BATCHES)
        error = sum(
            (a - b).double().mean((0, 1)) / 2
            for a, b in (
                (plain.layer(x), floats.layer(x)),
                (plain.layer(plain.layer(x).relu()), floats.layer(floats.layer(x).relu())),
            )
        )
        assert torch.allclose(
            correct_bias(model, floats, BATCHES).layer.bias.double(), floats.layer.bias.double() - error, atol=1e-6
        )

    def test_notes(self):
        floats: Any = nn.ModuleDict({"a": nn.Linear(32, 8, bias=False), "b": nn.Linear(32, 8), "c": nn.Linear(32, 8)})
        floats["d"] = nn.Linear(32, 8)
        floats["e"] = nn.Linear(32, 8)
        floats["d"].bias = floats["e"].bias

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.m = copy.deepcopy(floats)

            def forward(self, x: Tensor) -> Tensor:
                return self.m["a"](x) + self.m["b"](x) + self.m["d"](x) + self.m["e"](x)

        model = hop.quantize_(Model(), TERNARY)
        notes = {row.name: row.note for row in correct_bias(model, Model(), BATCHES).bias_report}
        assert notes == {
            "m.a": "it has no bias",
            "m.b": "",
            "m.c": "no batch reaches it",
            "m.d": "layers share its bias",
            "m.e": "layers share its bias",
        }

    def test_errors(self):
        bad = mlp()
        bad[2].weight[0, 0] = math.nan
        done = hop.quantize_(mlp(), TERNARY)
        for call, error, said in (
            (lambda: correct_bias(done, mlp(), []), ValueError, "batches is empty"),
            (lambda: correct_bias(done, 3, BATCHES), TypeError, "must be a torch.nn.Module"),
            (lambda: correct_bias(mlp(), mlp(), BATCHES), ValueError, "no quantized layers"),
            (lambda: correct_bias(done, mlp()[:2], BATCHES), ValueError, "floats has no float layer '2'"),
            (lambda: correct_bias(done, done, BATCHES), ValueError, "floats has no float layer '0'"),
            (lambda: correct_bias(done, bad, BATCHES), ValueError, "layer '2' of the float model has NaN"),
            (lambda: correct_bias(done, mlp(), [(BATCHES[0], 1)]), TypeError, "correct_bias: batch 0"),
        ):
            with pytest.raises(error, match=said):
                call()
        assert torch.equal(done[0].bias, mlp()[0].bias)


class TestNorms(unittest.TestCase):
    def check(self, mean: Tensor, var: Tensor, batches: list) -> None:
        """The means over batches of means and unbiased variances, in float64."""
        flat = [b.double().movedim(1, 0).flatten(1) for b in batches]
        assert torch.allclose(mean.double(), torch.stack([b.mean(1) for b in flat]).mean(0), atol=1e-5)
        assert torch.allclose(var.double(), torch.stack([b.var(1) for b in flat]).mean(0), rtol=1e-4)

    def test_statistics_of_what_is_quantized(self):
        model = hop.quantize_(network(), Scheme(None, presets.INT4_32), filter="0")
        model = hop.quantize_(network(), "int8_weight")
        assert reestimate_batch_norms(model, IMAGES) is model
        first = [model[0](b) for b in IMAGES]
        self.check(model[1].running_mean, model[1].running_var, first)
        second = []
        for y in first:  # as the norm saw it: by the statistics of its batch
            mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, unbiased=False)
            second.append(model[3](((y - mean) / (var + model[1].eps).sqrt()).relu()))
        self.check(model[4].running_mean, model[4].running_var, second)
        assert model[4].momentum == 0.3 and model[1].momentum == 0.1 and not model[1].training

    def test_folded(self):
        """In the place of norms that layers compute."""
        torch.manual_seed(0)
        model = hop.nn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(), "int8_weight")
        hop.nn.fold_batch_norms(model)
        reestimate_batch_norms(model, IMAGES)
        with torch.no_grad():
            results = [nn.functional.conv2d(b, model[0].weight, model[0].bias) for b in IMAGES]
        flat = [b.double().movedim(1, 0).flatten(1) for b in results]
        wanted = torch.stack([b.mean(1) for b in flat]).mean(0)
        assert torch.allclose(model[1].running_mean.double(), wanted, atol=0.02)
        assert not model[0].training and int(model[1].num_batches_tracked) == 3

    def test_unreached_and_errors(self):
        model = network()
        model.add_module("other", nn.BatchNorm2d(2))
        model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
        model.other.running_mean.fill_(7)
        reestimate_batch_norms(model, IMAGES)
        assert bool((model.other.running_mean == 7).all())
        kept = copy.deepcopy(model.state_dict())
        for call, error, said in (
            (lambda: reestimate_batch_norms(model, []), ValueError, "batches is empty"),
            (lambda: reestimate_batch_norms(model, [IMAGES[0] * math.nan]), ValueError, "the input of '1' has NaN"),
            (lambda: reestimate_batch_norms(mlp(), BATCHES), ValueError, "no batch norm"),
            (lambda: reestimate_batch_norms(3, BATCHES), TypeError, "must be a torch.nn.Module"),
        ):
            with pytest.raises(error, match=said):
                call()
        assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())
        assert model[1].momentum == 0.1 and not model.training
