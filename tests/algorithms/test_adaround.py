"""adaround against every rounding that there is; distillation against its formulas."""

import copy
import itertools
import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.algorithms import AdaRound, adaround, distillation_loss, teacher_of
from hop.algorithms.adarounding import adaround_codes, gradient, neighbours
from hop.algorithms.grid import Grid
from tests.algorithms.test_gptq import BATCHES, QUANTIZERS, correlated, mlp
from tests.support.layers import randn


class TestNeighbours(unittest.TestCase):
    @parameterized.expand([*QUANTIZERS.items()])
    def test_are_the_numbers_around(self, _name, q):
        weight = randn(32, 64, seed=4)
        grid = Grid.of(q, q.quantize(weight), weight.shape)
        below, above = neighbours(weight, grid)
        nearest = q.fake_quantize(weight)
        assert bool(
            ((nearest - below).abs() <= 1e-6 * nearest.abs())
            .logical_or((nearest - above).abs() <= 1e-6 * nearest.abs())
            .all()
        )
        inside = (below <= weight) & (weight <= above)
        assert float(inside.float().mean()) > 0.3 and bool((below < above).all())
        for numbers in (below, above):  # they are numbers of the format
            assert torch.allclose(grid.decode(grid.encode(numbers)), numbers, rtol=1e-6, atol=1e-9)


class TestAdaRound(unittest.TestCase):
    @pytest.mark.full
    def test_between_the_nearest_and_the_best_of_all_roundings(self):
        """Of the 2^10 roundings of each row of ten elements; in the mean a good part of the way."""
        q, parts = presets.INT4_32, []
        for seed in range(6):
            weight, x = randn(4, 10, seed=seed), correlated(100, 12, seed)[:, :10].double()
            hessian = x.t() @ x
            grid = Grid.of(q, q.quantize(weight), weight.shape)
            below, above = neighbours(weight, grid)
            codes = adaround_codes(weight, grid, hessian, 500, 0.02, 10.0)

            def lost(numbers: Tensor, weight: Tensor = weight, hessian: Tensor = hessian) -> Tensor:
                d = (numbers - weight).double()
                return ((d @ hessian) * d).sum(-1)

            choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=10)))
            every = below + choices.unsqueeze(1) * (above - below)
            best = float(lost(every).amin(0).sum())
            nearest, found = float(lost(q.fake_quantize(weight)).sum()), float(lost(grid.decode(codes)).sum())
            assert best <= found * (1 + 1e-9) and found <= nearest
            parts.append((nearest - found) / (nearest - best))
        assert sum(parts) / len(parts) > 0.5, parts

    @parameterized.expand([*QUANTIZERS.items()])
    @pytest.mark.quick(6)
    def test_any_quantizer(self, _name, q):
        """Scales stay, errors fall, and are what the report says."""
        nearest = hop.quantize_(mlp(), q, pack=False, weights="rule")
        model = adaround(mlp(), q, BATCHES, settings=AdaRound(steps=200), pack=False)
        x, float_model = torch.cat(BATCHES).double(), mlp()
        codes: Any = model[0].weight
        assert codes.quantizer == q
        for name, buffer in codes.buffers().items():
            if name != "codes":
                assert torch.equal(buffer.view(torch.uint8), nearest[0].weight.buffers()[name].view(torch.uint8))
        w = float_model[0].weight.detach().double()
        row = model.adaround_report[0]
        lost = (x @ (w - hop.dequantize(codes)).t()).square().sum() / (x @ w.t()).square().sum()
        assert row.error == pytest.approx(float(lost), rel=1e-3) and row.error < row.nearest
        assert all(r.error <= r.nearest for r in model.adaround_report)

    @parameterized.expand([("first", None), ("second", 3.0)])
    def test_slope_is_that_of_autograd(self, _name, beta):
        """In float64, of the formula as the paper has it."""
        v = (6 * randn(6, 8)).double().requires_grad_()
        over, gap, half = randn(6, 8, seed=1).double(), randn(6, 8, seed=2).double().abs(), randn(8, 8, seed=3).double()
        matrix = half @ half.t()
        h = (torch.sigmoid(v) * 1.2 - 0.1).clamp(0, 1)
        difference = over - h * gap
        loss = torch.trace(difference @ matrix @ difference.t())
        if beta is not None:
            loss = loss + 0.7 * (1 - (2 * h - 1).abs() ** beta).mean()
        loss.backward()
        assert torch.allclose(gradient(v.detach(), over, gap, matrix, (0.7, beta)), v.grad)  # type: ignore[arg-type]

    def test_the_same_again(self):
        one, other = (adaround(mlp(), "int4", BATCHES, settings=AdaRound(steps=20)) for _ in range(2))
        assert torch.equal(hop.dequantize(one[0].weight), hop.dequantize(other[0].weight))

    def test_fallbacks_and_errors(self):
        model = mlp()
        model.other = nn.Linear(64, 8)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        rows = {r.name: r.note for r in adaround(model, "int4", BATCHES, settings=AdaRound(steps=5)).adaround_report}
        assert "no batch reaches it" in rows["other"]
        (row, _) = adaround(mlp(), "int4", [torch.zeros(4, 64)], settings=AdaRound(steps=5)).adaround_report
        assert "as good or better" in row.note
        for call, error, said in (
            (lambda: adaround(mlp(), "int4", []), ValueError, "adaround: batches is empty"),
            (lambda: adaround(mlp(), "int4", BATCHES, settings=3), TypeError, "settings must be"),
            (lambda: adaround(mlp(), "int4", [BATCHES[0] * math.nan]), ValueError, "adaround: the input of layer '0'"),
            (lambda: AdaRound(steps=0), ValueError, "steps must be"),
            (lambda: AdaRound(rate=0), ValueError, "rate must be"),
            (lambda: AdaRound(weighting=math.inf), ValueError, "weighting must be"),
            (lambda: AdaRound(sequential=1), TypeError, "sequential must be"),
        ):
            with pytest.raises(error, match=said):
                call()


class TestDistillation(unittest.TestCase):
    def test_losses(self):
        a, b = randn(4, 5, seed=1).requires_grad_(), randn(4, 5, seed=2)
        got = distillation_loss({"y": a, "n": torch.arange(3)}, {"y": b, "n": torch.arange(3)})
        assert torch.allclose(got.double(), (a.double() - b.double()).square().mean())
        p, q = (torch.softmax(t.detach().double() / 3, -1) for t in (b, a))
        wanted = 9 * (p * (p / q).log()).sum(-1).mean()
        got = distillation_loss(a, b, temperature=3)
        assert torch.allclose(got.double(), wanted, rtol=1e-5)
        got.backward()
        assert torch.allclose(a.grad.double(), 3 * (q - p) / 4, rtol=1e-4, atol=1e-6)
        assert float(distillation_loss(a, a).detach()) == 0

    def test_two_lines(self):
        """The student comes nearer to its teacher, which stays."""
        floats = mlp()
        x = torch.cat(BATCHES)
        wanted = floats(x).detach()
        model = hop.nn.convert(floats, presets.TERNARY_ROW).train()
        teacher = teacher_of(model)
        assert torch.equal(teacher(x), wanted) and not teacher(x).requires_grad
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        losses = []
        for _ in range(40):
            loss = distillation_loss(model(x), teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(teacher(x), wanted)
        assert not teacher.train().training and not any(p.requires_grad for p in teacher.parameters())

    def test_shares_what_is_not_trained(self):
        model: Any = mlp()
        model[0].requires_grad_(False)
        for student in (model, hop.nn.convert(copy.deepcopy(model), "int8")):
            teacher: Any = teacher_of(student)
            assert teacher.model[0].weight is student[0].weight
            assert teacher.model[2].weight is not student[2].weight
            assert torch.equal(teacher.model[2].weight, student[2].weight) and student[2].weight.requires_grad
            assert type(teacher.model[0]) is nn.Linear

    def test_errors(self):
        frozen = hop.quantize_(mlp(), "int8")
        for call, error, said in (
            (lambda: teacher_of(3), TypeError, "must be a torch.nn.Module"),
            (lambda: teacher_of(frozen), ValueError, "layer '0' is frozen"),
            (lambda: distillation_loss(torch.ones(2), torch.ones(3)), ValueError, "of the same shapes"),
            (lambda: distillation_loss(1, 2), ValueError, "of the same shapes"),
            (lambda: distillation_loss(torch.ones(2), torch.ones(2), temperature=0), ValueError, "temperature must be"),
        ):
            with pytest.raises(error, match=said):
                call()
