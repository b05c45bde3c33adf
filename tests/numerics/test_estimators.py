"""Gradient estimators: each derivative against its formula in float64, on every route, trained, frozen and exported."""

import copy
import math
import unittest
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import formats, presets
from hop.numerics.estimators import EWGS, LSQ, PACT, STE, Estimator, Position, SoftRounding
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import Scheme
from tests.support.layers import randn


@dataclass(frozen=True, eq=False, repr=False)
class Triangle(Estimator):
    """One of a user's own: 2 - 4 |u - n| inside, and the scale's by half."""

    half: float = 0.5

    def of_input(self, grad: Tensor, at: Position) -> Tensor:
        return torch.where(at.inside, grad * (2 - 4 * (at.u - at.n).abs()), 0.0)

    def of_scale(self, grad: Tensor, at: Position) -> Tensor:
        return super().of_scale(grad, at) * self.half


ESTIMATORS: dict[str, Any] = {
    "STE": STE(),
    "LSQ": LSQ(),
    "PACT": PACT(),
    "EWGS": EWGS(0.3),
    "SoftRounding": SoftRounding(4.0),
    "Triangle": Triangle(),
}
EACH = parameterized.expand([*ESTIMATORS.items()])
STATIC4 = Quantizer(formats.INT4, scale=Static())
SCALE = 0.21


def formula(name: str, x: Tensor, g: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of s in float64, written out from the papers."""
    u = x.double() / s
    n = u.round().clamp(-8, 7)
    inside = (u.round() >= -8) & (u.round() <= 7)
    step = torch.where(inside, n - u, n)
    g = g.double()
    dx = torch.where(inside, g, 0.0)
    if name == "EWGS":
        dx = torch.where(inside, g * (1 + 0.3 * g.sign() * (u - n)), 0.0)
    if name == "SoftRounding":
        r = u - u.floor() - 0.5
        dx = torch.where(inside, g * 4 * (1 - torch.tanh(4 * r) ** 2) / (2 * math.tanh(2)), 0.0)
    if name == "Triangle":
        dx = torch.where(inside, g * (2 - 4 * (u - n).abs()), 0.0)
    ds = (g * step).sum()
    if name == "LSQ":
        ds = ds / math.sqrt(x.numel() * 7)
    if name == "PACT":
        ds = (g * torch.where(inside, 0.0, n)).sum()
    if name == "Triangle":
        ds = ds / 2
    return dx, ds


class TestFormulas(unittest.TestCase):
    @EACH
    @pytest.mark.quick(3)
    def test_fake_quantize_and_quantize(self, name, estimator):
        x, g = randn(40, 16), randn(40, 16, seed=1)
        wanted, of_scale = formula(name, x, g, SCALE)
        q = replace(STATIC4, gradient=estimator)
        for way in ("fake", "codes", "compiled"):
            a, s = x.clone().requires_grad_(), torch.tensor([[SCALE]], requires_grad=True)

            def run(a: Tensor, s: Tensor, way: str = way) -> Tensor:
                if way == "codes":
                    return hop.dequantize(hop.quantize(q, a, scale=s))
                return hop.fake_quantize(q, a, scale=s)

            y = (torch.compile(run, backend="aot_eager", fullgraph=True) if way == "compiled" else run)(a, s)
            assert torch.equal(y, hop.fake_quantize(STATIC4, x, scale=torch.tensor([[SCALE]])))
            y.backward(g)
            assert torch.allclose(a.grad.double(), wanted, rtol=1e-4, atol=1e-5)
            assert torch.allclose(s.grad.double().sum(), of_scale, rtol=1e-4, atol=1e-4)

    @EACH
    def test_scales_that_are_found(self, name, estimator):
        """Nothing is clipped: the gradient of x is the estimator's everywhere."""
        q, x, g = replace(presets.INT4_32, gradient=estimator), randn(8, 64), randn(8, 64, seed=1)
        a = x.clone().requires_grad_()
        hop.fake_quantize(q, a).backward(g)
        s = presets.INT4_32.quantize(x)["scale"].repeat_interleave(32, 1).double()
        u, n = x.double() / s, (presets.INT4_32.fake_quantize(x).double() / s).round()
        at = Position(u, n, torch.ones_like(u, dtype=torch.bool), 1.0, 7.0)
        assert torch.allclose(a.grad.double(), estimator.of_input(g.double(), at), rtol=1e-3, atol=1e-4)

    def test_soft_rounding_is_the_derivative_of_its_function(self):
        """By autograd in float64; and it sums to 1 over a step."""
        for t in (0.5, 5.0, 40.0):
            u = torch.linspace(-3, 3, 601, dtype=torch.float64)[1:] + 1e-3
            v = u.clone().requires_grad_()
            r = v - u.floor() - 0.5
            (u.floor() + 0.5 + torch.tanh(t * r) / (2 * math.tanh(t / 2))).sum().backward()
            at = Position(u, u.round(), torch.ones_like(u, dtype=torch.bool), 1.0, 7.0)
            got = SoftRounding(t).of_input(torch.ones_like(u), at)
            assert torch.allclose(got, v.grad, rtol=1e-9)
            assert float(got.mean()) == pytest.approx(1, abs=1e-3)


class TestLayers(unittest.TestCase):
    def model(self, estimator: Any, learn: bool = True) -> Any:
        torch.manual_seed(0)
        lhs = Quantizer(formats.INT8, scale=Static(), gradient=estimator)
        rhs = Quantizer(formats.INT4, (1, -1), scale=Static(), gradient=estimator)
        floats = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        model = hop.nn.convert(floats, Scheme(lhs, rhs), learn_scales=learn)
        return hop.nn.calibrate(model, [randn(32, 16)])

    @EACH
    @pytest.mark.quick(3)
    def test_layer_has_the_gradients_of_fake_quantization(self, name, estimator):
        """Of weight, input and scales: those of hop.fake_quantize and a product, LSQ's gradient scale where layers add
        it."""
        model = self.model(estimator)
        layer, x = model[0], randn(8, 16, seed=3).requires_grad_()
        layer(x).square().sum().backward()
        s_x, s_w = (layer.scales[role].scale.detach().clone().requires_grad_() for role in ("input", "weight"))
        a, w = x.detach().clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
        q_x, q_w = layer.scheme.lhs, layer.scheme.rhs
        product = hop.fake_quantize(q_x, a, scale=s_x) @ hop.fake_quantize(q_w, w, scale=s_w).t()
        (product + layer.bias.detach()).square().sum().backward()
        assert torch.allclose(x.grad, a.grad, rtol=1e-4, atol=1e-4)
        assert torch.allclose(layer.weight.grad, w.grad, rtol=1e-4, atol=1e-4)
        for role, own, numel, most in (("input", s_x, 16, 127), ("weight", s_w, 16, 7)):
            g = 1 / math.sqrt(numel * most) if estimator.by_layer else 1.0
            assert torch.allclose(layer.scales[role].scale.grad, own.grad * g, rtol=1e-3, atol=1e-3)

    @EACH
    @pytest.mark.quick(4)
    def test_trains_freezes_and_exports_without_a_difference(self, _name, estimator):
        """The integers of training's forward are those that are frozen and exported."""
        model, x, target = self.model(estimator), randn(64, 16, seed=5), randn(64, 4, seed=6)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(20):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        training = model(x).detach()
        frozen: Any = hop.nn.freeze(copy.deepcopy(model).eval())
        assert int((frozen(x) != training).sum()) == 0
        assert frozen[0].weight.quantizer.gradient is None
        program = torch.export.export(frozen, (x,))
        assert int((program.module()(x) != training).sum()) == 0
        assert "gradient" not in str(program.graph)
        loaded = self.model(None).eval()
        loaded.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded(x), training)

    @pytest.mark.full
    def test_digits_learn(self):
        """Two clouds of points, 2-bit weights: every estimator separates them."""
        torch.manual_seed(0)
        x, y = torch.randn(128, 8), torch.arange(128) % 2
        x = x + 2 * y.unsqueeze(1)
        for estimator in ESTIMATORS.values():
            torch.manual_seed(1)
            q = Quantizer(formats.TERNARY, (1, -1), presets.TERNARY_ROW.scale, gradient=estimator)
            model = hop.nn.convert(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), Scheme(None, q))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(60):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert float((model(x).argmax(1) == y).float().mean()) > 0.95, estimator


class TestValues(unittest.TestCase):
    @EACH
    def test_spelled_and_read(self, _name, estimator):
        q = replace(presets.INT4_32, gradient=estimator)
        assert Quantizer.parse(str(q)) == q and q != presets.INT4_32
        assert hash(Quantizer.parse(str(q))) == hash(q)
        scheme = Scheme(None, q)
        assert scheme.to_nearest() == Scheme(None, presets.INT4_32) and Scheme.parse(str(scheme)) == scheme

    def test_others_are_spelled_as_before(self):
        assert "gradient" not in str(presets.INT4_32) and STE() == STE()

    def test_unknown_name(self):
        text = str(replace(presets.INT4_32, gradient=Triangle())).replace("Triangle", "Rhombus")
        with pytest.raises(ValueError, match="Rhombus"):
            Quantizer.parse(text)

    def test_errors(self):
        q = replace(presets.INT8_ROW, gradient=EWGS())
        for call, error, said in (
            (lambda: EWGS(-1), ValueError, "delta must be"),
            (lambda: EWGS(math.nan), ValueError, "delta must be"),
            (lambda: SoftRounding(0), ValueError, "temperature must be"),
            (lambda: Quantizer(formats.INT8, gradient="ste"), TypeError, "gradient must be one of hop.estimators"),
            (lambda: Quantizer(formats.E4M3, gradient=SoftRounding()), ValueError, "are not one step apart"),
            (lambda: Scheme(q, q, grad=presets.INT8_ROW, backward="quantized"), ValueError, "use backward='ste'"),
            (
                lambda: torch.func.jvp(lambda x: hop.fake_quantize(q, x), (randn(2, 4),), (randn(2, 4),)),
                NotImplementedError,
                "forward mode does not support",
            ),
        ):
            with pytest.raises(error, match=said):
                call()
