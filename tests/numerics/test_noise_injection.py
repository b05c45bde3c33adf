"""Noise in the place of rounding: its numbers and derivatives against their formulas, on every route, trained, frozen
and exported."""

import copy
import math
import unittest
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import formats, presets
from hop.numerics.estimators import STE, NoiseInjection, QuantNoise
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

EACH = parameterized.expand([("NoiseInjection", NoiseInjection()), ("QuantNoise", QuantNoise(0.3))])
STATIC4 = Quantizer(formats.INT4, scale=Static())
SCALE = 0.21
ATEN = torch.ops.aten
SEED = torch.tensor(12345)


def bits(shape: Any, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def formula(name: str, u: Tensor, low: float, high: float, noise: Tensor, width: Any = 1.0) -> Tensor:
    """What stands for u, in float64, written out from the papers."""
    r = (noise.double() + 0.5) / 256
    n = u.round().clamp(low, high)
    number = u + width * (r - 0.5) if name == "NoiseInjection" else torch.where(r < 0.3, n, u)
    return torch.where((u.round() >= low) & (u.round() <= high), number, n)


class TestFormulas(unittest.TestCase):
    @EACH
    @pytest.mark.quick(2)
    def test_numbers_and_gradients(self, name, estimator):
        """By autograd of the formula in float64: of noise they are derivatives, of QuantNoise straight through."""
        x, g, noise = randn(40, 16), randn(40, 16, seed=1), bits((40, 16))
        q = replace(STATIC4, gradient=estimator)
        a, b = x.double().requires_grad_(), torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)
        u = a / b
        number = formula(name, u, -8, 7, noise)
        if name == "QuantNoise":  # its rounded ones straight through
            number = number + torch.where((number != u) & (u.round() >= -8) & (u.round() <= 7), u - u.detach(), 0.0)
        wanted = number * b
        wanted.backward(g.double())
        for way in ("eager", "compiled"):
            y, s = x.clone().requires_grad_(), torch.tensor([[SCALE]], requires_grad=True)

            def run(x: Tensor, s: Tensor) -> Tensor:
                return hop.fake_quantize(q, x, scale=s, noise=noise)

            run = torch.compile(run, backend="aot_eager", fullgraph=True) if way == "compiled" else run
            got = run(y, s)
            assert torch.allclose(got.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
            got.backward(g)
            assert torch.allclose(y.grad.double(), a.grad, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
            assert torch.allclose(s.grad.double().sum(), b.grad, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]

    def test_is_uniform_as_wide_as_a_code(self):
        q = replace(STATIC4, gradient=NoiseInjection())
        x = torch.full((1 << 16,), 0.3 * SCALE)
        error = (hop.fake_quantize(q, x, scale=torch.tensor([SCALE]), noise=bits(x.shape)) - x).double() / SCALE
        assert float(error.abs().max()) < 0.5 and abs(float(error.mean())) < 0.005
        assert float(error.var()) == pytest.approx(1 / 12, rel=0.02)

    @parameterized.expand([("MXFP4",), ("NVFP4",), ("FP8_ROW",), ("UINT4_32_AFFINE",), ("STATE8",), ("TERNARY_ROW",)])
    @pytest.mark.quick(3)
    def test_any_quantizer(self, name):
        """The numbers around u are as far apart as the format says, here found one by one."""
        base = presets.PRESETS[name]
        q, x = replace(base, gradient=NoiseInjection()), randn(4, 256)
        got = hop.fake_quantize(q, x, noise=bits(x.shape))
        codes = base.quantize(x)
        scale, zero = base.scales_of_elements(codes, x.shape)
        plain, numbers = base.fake_quantize(x), torch.tensor(base.format.numbers, dtype=torch.float64)
        u = x.double() / scale.double()
        shift = 0.0 if zero is None else zero.double()
        r = (bits(x.shape).double() + 0.5) / 256 - 0.5
        for i in range(0, x.numel(), 7):
            own = float(u.flatten()[i] + (shift.flatten()[i] if zero is not None else 0.0))
            below = max([j for j in range(len(numbers) - 1) if numbers[j] <= own], default=0)
            width = float(numbers[below + 1] - numbers[below])
            inside = bool(base.format.inside(torch.tensor(own, dtype=torch.float32)))
            wanted = float(x.flatten()[i]) + width * float(r.flatten()[i]) * float(scale.flatten()[i])
            wanted = wanted if inside else float(plain.flatten()[i])
            assert float(got.flatten()[i]) == pytest.approx(wanted, rel=1e-4, abs=1e-5), (i, own)

    def test_what_is_not_finite(self):
        q = replace(STATIC4, gradient=NoiseInjection())
        x = torch.tensor([math.nan, math.inf, -math.inf])
        got = hop.fake_quantize(q, x, scale=torch.tensor([SCALE]), noise=bits(x.shape))
        assert torch.equal(got, hop.fake_quantize(STATIC4, x, scale=torch.tensor([SCALE])))


SCHEMES = [
    ("weights", Scheme(presets.INT8_ROW, replace(presets.INT4_32, gradient=NoiseInjection()))),
    ("weights_alone", Scheme(None, replace(presets.INT4_32, gradient=NoiseInjection()))),
    ("both", Scheme(*[replace(presets.MXFP4, gradient=NoiseInjection())] * 2)),
    ("inputs", Scheme(replace(presets.INT8_ROW, gradient=QuantNoise(0.5)), presets.INT8_ROW)),
]


class TestProducts(unittest.TestCase):
    @parameterized.expand(SCHEMES)
    @pytest.mark.quick(4)
    def test_are_of_floats_with_the_noise_of_the_seed(self, _name, scheme):
        self.check(scheme, "eager", "aot_eager")

    @parameterized.expand(SCHEMES)
    @pytest.mark.compiler
    @pytest.mark.full
    def test_compiled_by_inductor(self, _name, scheme):
        self.check(scheme, "inductor")

    def check(self, scheme: Scheme, *ways: str) -> None:
        """Against the product of fake-quantized operands, with the random bits that stochastic rounding takes."""
        x, w = randn(8, 64).requires_grad_(), randn(16, 64, seed=1).requires_grad_()
        a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        made = []
        for stream, (q, t) in enumerate(((scheme.lhs, a), (scheme.rhs, b))):
            noise = hop.noise(SEED, t.shape, stream=stream) if q is not None and q.adds_noise() else None
            made.append(t if q is None else hop.fake_quantize(q, t, noise=noise))
        wanted = made[0] @ made[1].t()
        g = randn(8, 16, seed=2)
        wanted.backward(g)

        def run(x: Tensor, w: Tensor, seed: Tensor) -> Tensor:
            return hop.quantized(ATEN.linear.default, scheme, x, w, seed=seed)

        first = run(x, w, SEED)
        for way in ways:
            x.grad = w.grad = None
            y = (run if way == "eager" else torch.compile(run, backend=way, fullgraph=True))(x, w, SEED)
            y.backward(g)
            assert torch.equal(y, first) if way != "inductor" else torch.allclose(y, first, rtol=1e-5, atol=1e-5)
            assert torch.allclose(y, wanted, rtol=1e-4, atol=1e-4)
            for got, own in ((x, a), (w, b)):
                assert torch.allclose(got.grad, own.grad, rtol=1e-3, atol=1e-3)  # type: ignore[arg-type]
        assert not torch.equal(run(x, w, SEED + 1), first)

    def test_embedding_convolution_and_output(self):
        noisy = Quantizer(formats.INT4, (1, -1), gradient=NoiseInjection())
        table, places = randn(10, 16), torch.tensor([1, 3])
        rows = hop.quantized(ATEN.embedding.default, Scheme(None, noisy), table, places, -1, False)
        assert float((rows - table[places]).abs().max()) > 0
        scheme = Scheme(None, noisy)
        image, weight = randn(2, 4, 6, 6), randn(3, 4, 3, 3)
        y = hop.quantized(ATEN.conv2d.default, scheme, image, weight, None, seed=SEED)
        flat = weight.flatten(1)
        own = hop.noise(SEED, weight.shape, stream=1)
        made = hop.fake_quantize(noisy, flat, noise=own.flatten(1)).reshape(weight.shape)
        assert torch.allclose(y, nn.functional.conv2d(image, made), atol=1e-4)
        output = Quantizer(formats.INT8, scale=Static())
        scales = hop.Scales(output=torch.tensor([0.5]))
        x = randn(4, 16)
        codes = hop.quantized(ATEN.linear.default, Scheme(None, noisy, output), x, table, scales=scales, seed=SEED)
        plain = hop.quantized(ATEN.linear.default, Scheme(None, noisy), x, table, seed=SEED)
        assert torch.equal(codes.codes, hop.quantize(output, plain, scale=torch.tensor([0.5])).codes)


class TestLayers(unittest.TestCase):
    def model(self, estimator: Any) -> Any:
        torch.manual_seed(0)
        lhs = Quantizer(formats.INT8, scale=Static(), gradient=estimator)
        rhs = Quantizer(formats.INT4, (1, -1), scale=Static(), gradient=estimator)
        floats = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        return hop.nn.calibrate(hop.nn.convert(floats, Scheme(lhs, rhs), learn_scales=True), [randn(32, 16)])

    @EACH
    @pytest.mark.quick(2)
    def test_trains_freezes_and_exports_without_a_difference(self, _name, estimator):
        """A stage of a schedule turns the noise off; from then on training's integers are those that are exported."""
        model, x, target = self.model(estimator), randn(64, 16, seed=5), randn(64, 4, seed=6)
        schedule = hop.nn.Schedule(model, [hop.nn.Stage(0, gradient=estimator), hop.nn.Stage(12, gradient=STE())])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(20):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        assert sum(losses[-5:]) < sum(losses[:5])
        training = model(x).detach()
        assert torch.equal(training, model(x))
        frozen: Any = hop.nn.freeze(copy.deepcopy(model).eval())
        assert int((frozen(x) != training).sum()) == 0
        program = torch.export.export(frozen, (x,))
        assert int((program.module()(x) != training).sum()) == 0
        assert not any(word in str(program.graph) for word in ("Noise", "hop_noise"))

    @EACH
    def test_eval_has_no_noise(self, _name, estimator):
        """Eval mode and frozen layers compute in codes, whatever stage training is in."""
        model, x = self.model(estimator), randn(8, 16)
        assert not torch.equal(model(x), model(x))
        model.eval()
        plain = self.model(None).eval()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)) and torch.equal(hop.nn.freeze(model)(x), plain(x))

    @pytest.mark.full
    def test_compiles_once_for_each_stage(self):
        model, x = self.model(NoiseInjection()), randn(8, 16)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        run = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(3):
            run(x).sum().backward()
        assert counter.frame_count == 1

    def test_main_grad_and_held_weights(self):
        q = Quantizer(formats.INT4, (1, -1), gradient=NoiseInjection())
        layer: Any = hop.nn.Linear(16, 8, scheme=Scheme(None, q))
        with hop.nn.hold_weights(layer):
            assert not torch.equal(layer(randn(2, 16)), layer(randn(2, 16)))
        layer.weight.main_grad = torch.zeros(8, 16)
        with pytest.raises(RuntimeError, match="the weight with its noise"):
            layer(randn(2, 16))


class TestValues(unittest.TestCase):
    @EACH
    def test_spelled_and_read(self, _name, estimator):
        q = replace(presets.INT4_32, gradient=estimator)
        assert Quantizer.parse(str(q)) == q and Scheme.parse(str(Scheme(None, q))) == Scheme(None, q)
        assert q.is_random() and q.adds_noise() and Scheme(None, q).is_stochastic()
        assert Scheme(None, q).to_nearest() == Scheme(None, presets.INT4_32)
        text = str(q).replace(type(estimator).__name__, "Buzz")
        with pytest.raises(ValueError, match="Buzz"):
            Quantizer.parse(text)

    def test_errors(self):
        q, x = replace(presets.INT4_32, gradient=NoiseInjection()), randn(2, 32)
        linear = ATEN.linear.default
        for call, error, said in (
            (lambda: QuantNoise(0), ValueError, "rate must be above 0"),
            (lambda: QuantNoise(True), ValueError, "rate must be above 0"),
            (lambda: replace(q, stochastic=True), ValueError, "use stochastic=False"),
            (lambda: hop.quantize(q, x), ValueError, "produces floats instead of codes"),
            (lambda: hop.fake_quantize(q, x), ValueError, "noise is None"),
            (
                lambda: hop.fake_quantize(q, x, noise=bits((2, 16))),
                ValueError,
                "noise must be uint8 or int32 of x's shape",
            ),
            (lambda: Scheme(q, None, q), ValueError, "output=.* adds noise"),
            (lambda: Scheme(None, q, backward="original"), ValueError, "use backward='ste'"),
            (lambda: hop.quantized(linear, Scheme(None, q), x, randn(8, 16)), RuntimeError, "must be equal"),
        ):
            with pytest.raises(error, match=said):
                call()
