"""Quantized layers: what they compute, their scales, and the schemes that they compute in."""

import copy
import threading
import unittest
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hop
from hop import presets, recipes, schemes
from hop.nn.scales.static import StaticScale
from hop.numerics.formats import E4M3, E5M2, INT8, UINT8
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed, MinMax, Static
from hop.numerics.schemes import Scheme
from tests.support.files import read_back
from tests.support.layers import converted, randn
from tests.support.schemes import EVERY

STATIC = Quantizer(INT8, scale=Static())
LEARNED = Scheme(STATIC, Quantizer(INT8, (1, -1), Static()))
SHORT = Scheme(
    Quantizer(E4M3, scale=Delayed(history=4)),
    Quantizer(E4M3, scale=Delayed(history=4, margin=1)),
    grad=Quantizer(E5M2, scale=Delayed(history=4, most_recent=True)),
    backward="quantized",
)
aten = torch.ops.aten


def linear(scheme: Scheme = schemes.INT8_DYNAMIC, **kwargs) -> Any:
    made = hop.nn.Linear(24, 8, scheme=scheme, **kwargs)
    with torch.no_grad():
        made.weight.copy_(randn(8, 24, seed=1))
        made.bias.copy_(randn(8, seed=2))
    return made


def histories(model: nn.Module) -> list[Tensor]:
    return [m.history.clone() for m in model.modules() if isinstance(m, hop.nn.AmaxHistory)]


class TestLayers(unittest.TestCase):
    def test_linear_is_quantized(self):
        layer, x = linear(), randn(5, 24)
        want = hop.quantized(aten.linear.default, schemes.INT8_DYNAMIC, x, layer.weight, layer.bias)
        assert torch.equal(layer(x), want) and not torch.equal(want, functional.linear(x, layer.weight, layer.bias))

    @pytest.mark.full
    def test_convolutions_pad_as_torch_does(self):
        """A scheme whose scales are powers of two and numbers that it holds exactly: the float layer's own bits."""
        exact = Scheme(Quantizer(UINT8, scale=MinMax()), None)
        generator = torch.Generator().manual_seed(0)
        for make, shape in ((nn.Conv1d, (2, 4, 9)), (nn.Conv2d, (2, 4, 9, 8))):
            x = torch.randint(0, 256, shape, generator=generator).float()
            x.flatten()[0], x.flatten()[1] = 0, 255
            for mode in ("zeros", "reflect", "replicate", "circular"):
                for padding in (0, 2, "same", "valid"):
                    for size in (3, 4):
                        with self.subTest(make=make.__name__, mode=mode, padding=padding, size=size):
                            plain = make(4, 6, size, padding=padding, padding_mode=mode, groups=2)
                            with torch.no_grad():
                                plain.weight.copy_(torch.randint(-8, 9, plain.weight.shape, generator=generator))
                                plain.bias.zero_()
                            made = converted(plain, exact)
                            assert torch.equal(made(x), plain(x)) and torch.equal(made(x[0]), plain(x[0]))

    def test_convolution_with_strides_and_dilation(self):
        plain = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
        layer, x = converted(plain, schemes.INT8_DYNAMIC), randn(2, 4, 9, 8)
        args = (x, plain.weight, plain.bias, [2, 1], [1, 2], [1, 2], 1)
        assert torch.equal(layer(x), hop.quantized(aten.conv2d.default, schemes.INT8_DYNAMIC, *args))

    def test_embedding(self):
        for scheme in (schemes.INT4_WEIGHT_32, schemes.INT8_STATIC, recipes.FP8_HYBRID):
            layer = hop.nn.Embedding(9, 32, padding_idx=2, scheme=scheme)
            index = torch.tensor([[1, 2], [2, 8]])
            rows = hop.dequantize(hop.quantize(scheme.rhs, layer.weight))
            assert torch.equal(layer(index), rows[index])
            layer(index).sum().backward()
            assert layer.weight.grad.sum(1).tolist() == [0, 32, 0, 0, 0, 0, 0, 0, 32]

    def test_embedding_renormalizes(self):
        plain = nn.Embedding(9, 32, max_norm=1.0)
        layer, index = converted(copy.deepcopy(plain), schemes.INT8_DYNAMIC), torch.tensor([1, 3])
        layer(index)
        plain(index)
        assert torch.equal(layer.weight, plain.weight)
        hop.nn.freeze(layer)
        with pytest.raises(RuntimeError, match="max_norm"):
            layer(index)

    def test_takes_every_argument_of_the_float_layer(self):
        layer = hop.nn.Linear(8, 4, False, dtype=torch.bfloat16, scheme=schemes.INT8_DYNAMIC)
        assert layer.bias is None and layer(randn(2, 8).bfloat16()).dtype == torch.bfloat16
        meta = hop.nn.Conv1d(4, 4, 3, device="meta", scheme=LEARNED)
        assert meta.scales.weight.scale.is_meta and not meta.scales.weight.ready

    def test_from_float_keeps_parameters_hooks_and_mode(self):
        plain, seen = nn.Linear(24, 8).eval(), []
        plain.register_forward_hook(lambda *_: seen.append(1))
        made = hop.nn.Linear.from_float(plain, SHORT)
        assert (
            made.weight is plain.weight
            and made.bias is plain.bias
            and not any(m.training for m in made.scales.values())
        )
        made(randn(2, 24))
        assert seen == [1] and "scales" not in plain._modules

    def test_errors(self):
        with pytest.raises(TypeError, match=r"must be a plain torch.nn.Linear.*got Conv1d"):
            hop.nn.Linear.from_float(nn.Conv1d(1, 1, 1), schemes.INT8_DYNAMIC)
        with pytest.raises(ValueError, match="one scale for each"):
            hop.nn.Conv2d(4, 4, 3, scheme=recipes.MXFP8_TRAINING)
        with pytest.raises(ValueError, match="looks up rows of its rhs"):
            hop.nn.Embedding(4, 4, scheme=Scheme(presets.INT8_ROW, None))
        with pytest.raises(ValueError, match="one for the whole tensor"):
            hop.nn.Linear(4, 4, scheme=Scheme(Quantizer(INT8, (1, -1), Static()), None))
        delayed = Quantizer(E4M3, scale=Delayed())
        with pytest.raises(ValueError, match="amax of unquantized results"):
            hop.nn.Linear(4, 4, scheme=Scheme(delayed, delayed, delayed))

    def test_modes_of_autograd_and_autocast(self):
        layer, x = linear(), randn(5, 24)
        with torch.no_grad():
            assert not layer(x).requires_grad
        with torch.inference_mode():
            assert torch.equal(layer(x), linear()(x))
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x).bfloat16())
        y.float().sum().backward()
        assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32

    def test_used_twice_in_one_forward(self):
        for scheme in (schemes.INT8_DYNAMIC, SHORT):
            with self.subTest(scheme=str(scheme)):
                layer, x = converted(nn.Linear(24, 24), scheme), randn(5, 24)
                y = layer(x)
                z = layer(y)
                z.backward(torch.full_like(z, 3.0))
                if scheme is SHORT:
                    assert layer.scales.input.history[0] == torch.maximum(x.abs().max(), y.abs().max())
                    assert layer.scales.gradient.history[0] >= 3

    def test_learns_scales_as_lsq_does(self):
        """Against Esser et al. in float64, where a code counts as clipped if rounding it leaves the range."""
        layer, x, g = linear(LEARNED, learn_scales=True), randn(5, 24) * 2, randn(5, 8, seed=4)
        layer.scales.input.set(torch.tensor([0.02]))
        with torch.no_grad():
            layer.scales.weight.scale.mul_(0.6)
        layer(x).backward(g)

        def fake(t: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            v = t.double() / s.double()
            codes, inside = v.round().clamp(INT8.min, INT8.max), (v.round() >= INT8.min) & (v.round() <= INT8.max)
            return codes * s.double(), torch.where(inside, codes - v, codes), inside

        s_x, s_w = layer.scales.input.scale, layer.scales.weight.scale
        (x_hat, x_step, x_in), (w_hat, w_step, w_in) = fake(x, s_x), fake(layer.weight, s_w)
        assert not x_in.all() and not w_in.all()
        d_x, d_w = g.double() @ w_hat, g.double().T @ x_hat
        want_x = (d_x * x_step).sum() / (24 * INT8.max) ** 0.5  # 24 features
        want_w = (d_w * w_step).sum(1, keepdim=True) / (24 * INT8.max) ** 0.5  # 24 weights for each scale
        torch.testing.assert_close(s_x.grad.double(), want_x[None], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(s_w.grad.double(), want_w, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.weight.grad.double(), torch.where(w_in, d_w, 0), rtol=1e-4, atol=1e-5)

    def test_learns_zero_points(self):
        affine = Quantizer(UINT8, scale=Static(affine=True))
        layer, x = linear(Scheme(affine, None), learn_scales=True), randn(3, 24) * 2
        layer.scales.input.set(torch.tensor([0.01]), torch.tensor([100.0]))
        layer(x).sum().backward()
        codes = (x.double() / 0.01).round() + 100
        clipped = (codes < 0) | (codes > 255)
        want = (torch.where(clipped, -0.01, 0.0) * layer.weight.double().sum(0)).sum() / (24 * 255) ** 0.5
        torch.testing.assert_close(layer.scales.input.zero_point.grad.double(), want[None], rtol=1e-4, atol=1e-7)

    def test_elements_that_share_a_learned_scale(self):
        out = replace(LEARNED, output=STATIC)
        wide = hop.nn.Conv2d(
            4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), scheme=out, learn_scales=True
        )
        for x in (randn(2, 4, 9, 8), randn(4, 9, 8)):
            y = functional.conv2d(x, wide.weight, None, (2, 1), (1, 2), (1, 2))
            assert wide._sharing("input", x) == 4 * 9 * 8 and wide._sharing("weight", x) == 4 * 3 * 2
            assert wide._sharing("output", x) == y.shape[-3:].numel()
        layer = linear(out, learn_scales=True)
        assert layer._sharing("output", randn(5, 3, 24)) == 3 * 8 and layer._sharing("output", randn(24)) == 8
        rows = hop.nn.Embedding(9, 32, scheme=Scheme(None, presets.INT8_ROW, STATIC), learn_scales=True)
        assert rows._sharing("output", torch.zeros(5, 3, dtype=torch.int64)) == 3 * 32

    def test_a_static_scale_serves_its_own_bits_when_learned(self):
        scale = StaticScale(STATIC, (1,), True, torch.device("cpu"))
        scale.set(torch.tensor([0.1]))
        assert torch.equal(scale(7)[0], torch.tensor([0.1]))
        with pytest.raises(ValueError, match="has no zero point"):
            scale.set(torch.ones(1), torch.ones(1))
        with pytest.raises(ValueError, match=r"must broadcast to \(1,\), got \(2,\)"):
            scale.set(torch.ones(2))

    def test_scales_stay_float32(self):
        layer = linear(SHORT).to(torch.bfloat16)
        assert layer.weight.dtype == torch.bfloat16
        assert {t.dtype for t in layer.scales.state_dict().values()} == {torch.float32}
        assert layer(randn(2, 24).bfloat16()).dtype == torch.bfloat16


class TestState(unittest.TestCase):
    def test_goes_to_and_from_the_float_layer(self):
        plain = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 4))
        made = converted(copy.deepcopy(plain), SHORT)
        made[0].scales.input.amax.fill_(3.0)
        made.load_state_dict(nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 4)).state_dict())
        assert made[0].scales.input.amax == 3 and not torch.equal(made[0].weight, plain[0].weight)
        plain.load_state_dict(hop.nn.float_state_dict(made))
        assert torch.equal(made[1].weight, plain[1].weight)
        single = linear(SHORT)
        nn.Linear(24, 8).load_state_dict(hop.nn.float_state_dict(single))

    def test_goes_to_another_strictly(self):
        for scheme, learn in ((LEARNED, True), (LEARNED, False), (SHORT, False)):
            one, two = linear(scheme, learn_scales=learn), linear(scheme, learn_scales=learn)
            if scheme is LEARNED:
                one.scales.input.set(torch.tensor([0.25]))
            two.load_state_dict(read_back(one.state_dict(), weights_only=True))
            assert torch.equal(one(randn(2, 24)), two(randn(2, 24)))
            part = {k: v for k, v in one.state_dict().items() if "input" not in k}
            with pytest.raises(RuntimeError, match=r"Missing key.*scales.input"):
                two.load_state_dict(part)

    def test_deepcopy_is_independent(self):
        one = linear(SHORT)
        two = copy.deepcopy(one)
        two(randn(2, 24))
        assert one.scales.input.history.sum() == 0 < two.scales.input.history.sum()

    def test_setting_the_scheme_rebuilds_what_differs(self):
        layer = linear(SHORT)
        weight, taken = layer.scales.weight, layer.scales.input
        layer.scheme = replace(SHORT, lhs=Quantizer(E4M3, scale=Delayed(history=2)))
        assert (
            layer.scales.weight is weight and layer.scales.input is not taken and len(layer.scales.input.history) == 2
        )


class TestDelayed(unittest.TestCase):
    def test_is_transformer_engines(self):
        """20 steps against its formulas: default_amax_compute, default_sf_compute and the rolling of the history."""
        layer = linear(SHORT)
        fields = {"input": (SHORT.lhs, 448.0), "weight": (SHORT.rhs, 448.0), "gradient": (SHORT.grad, 57344.0)}
        history = {role: torch.zeros(4) for role in fields}
        factor = {role: torch.ones(()) for role in fields}
        optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
        handle = hop.nn.advance_after(optimizer, layer)
        for step in range(20):
            x, g = randn(5, 24, seed=step) * 2.0**step, randn(5, 8, seed=50 + step) * 3.0**-step
            if step == 3:
                x.zero_()
            if step == 7:
                x[0, 0], g[0, 0] = float("inf"), float("inf")
            for role, tensor in (("input", x), ("weight", layer.weight.detach()), ("gradient", g)):
                q, top = fields[role]
                used = hop.quantize(q, tensor, scale=layer.scales[role].amax)
                assert torch.equal(used.scale.flatten(), (1 / factor[role])[None]), (step, role)
                codes = (tensor * factor[role]).clamp(-top, top).to(q.format.dtype)
                assert torch.equal(used.codes.view(torch.uint8), codes.view(torch.uint8)), (step, role)
                history[role][0] = tensor.abs().max()
            given = hop.Scales(*(None,) * 7)._replace(
                lhs=layer.scales.input.amax, rhs=layer.scales.weight.amax, grad=layer.scales.gradient.amax
            )
            want = hop.quantized(aten.linear.default, SHORT, x, layer.weight, layer.bias, scales=given)
            y = layer(x)
            assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))
            y.backward(g)
            for p in layer.parameters():
                p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
            optimizer.step()
            optimizer.zero_grad()
            for role, (q, top) in fields.items():
                amax = history[role][0] if q.scale.most_recent else history[role].max()
                found = torch.tensor(top * 2.0**-q.scale.margin) / amax
                factor[role] = torch.where((amax > 0) & found.isfinite() & amax.isfinite(), found, factor[role])
                history[role] = history[role].roll(-1)
                history[role][0] = 0
        handle.remove()
        optimizer.step()
        assert layer.scales.input.history[1] > 0

    def test_records_in_training_alone(self):
        layer, x = linear(SHORT), randn(5, 24)
        with torch.no_grad():
            layer(x)
        layer.eval()
        layer(x).sum().backward()
        assert all(h.sum() == 0 for h in histories(layer))

    def test_nan_and_nothing(self):
        layer = linear(SHORT)
        layer(torch.full((1, 24), float("nan")))
        layer(torch.zeros(0, 24)).sum().backward()
        assert layer.scales.input.history.sum() == 0
        hop.nn.advance(layer)
        assert layer.scales.input.amax == 448

    def test_a_backward_may_come_after_the_step(self):
        layer = linear(SHORT)
        y = layer(randn(5, 24))
        hop.nn.advance(layer)
        y.sum().backward()
        assert layer.weight.grad is not None

    def test_microbatches_and_checkpoints_are_one_step(self):
        x = randn(6, 24)
        for reentrant in (None, False, True):
            with self.subTest(reentrant=reentrant):
                whole, parts = linear(SHORT), linear(SHORT)
                whole(x).backward(torch.full((6, 8), 2.0))
                for part in x.clone().requires_grad_().split(2):
                    y = parts(part) if reentrant is None else checkpoint(parts, part, use_reentrant=reentrant)
                    y.backward(torch.full((2, 8), 2.0))
                for one, two in zip(histories(whole), histories(parts), strict=True):
                    assert torch.equal(one, two) and one[0] > 0 and one[1:].sum() == 0

    def _trained(self, backend: str | None, reentrant: bool | None) -> list[Tensor]:
        torch._dynamo.reset()
        model = nn.Sequential(linear(SHORT), nn.ReLU(), converted(nn.Linear(8, 8), SHORT))
        with torch.no_grad():
            model[2].weight.copy_(randn(8, 8, seed=5))
            model[2].bias.zero_()

        def run(x: Tensor) -> Tensor:
            return model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)

        called = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        hop.nn.advance_after(optimizer, model)
        for step in range(3):
            called(randn(8, 24, seed=step).requires_grad_()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [t.clone() for t in model.state_dict().values()]

    @pytest.mark.full
    def test_compiled_training_has_the_same_state(self):
        want = self._trained(None, None)
        for backend, reentrant in ((None, False), (None, True), ("aot_eager", None)):
            with self.subTest(backend=backend, reentrant=reentrant):
                got = self._trained(backend, reentrant)
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        for reentrant in (False, True):  # the graph has products of 8-bit floats in ATen, which add in another order
            with self.subTest(reentrant=reentrant):
                for a, b in zip(want, self._trained("aot_eager", reentrant), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    @pytest.mark.compiler
    @pytest.mark.full
    def test_compiled_by_inductor(self):
        for reentrant in (None, False):
            with self.subTest(reentrant=reentrant):
                want, got = self._trained(None, None), self._trained("inductor", reentrant)
                for a, b in zip(want, got, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class TestSchemes(unittest.TestCase):
    def test_nest_and_end_with_an_exception(self):
        layer, x = linear(), randn(5, 24)
        one, two, three = (linear(s)(x) for s in (schemes.INT8_DYNAMIC, schemes.INT4_WEIGHT_32, recipes.FP8_HYBRID))
        again = hop.nn.scheme(schemes.INT4_WEIGHT_32)
        with again:
            assert torch.equal(layer(x), two)
            with hop.nn.scheme(recipes.FP8_HYBRID), again:
                assert torch.equal(layer(x), two)
            with pytest.raises(KeyError), hop.nn.scheme(recipes.FP8_HYBRID):
                assert torch.equal(layer(x), three)
                raise KeyError
            assert torch.equal(layer(x), two)
        assert torch.equal(layer(x), one)

    def test_choices_by_role(self):
        layer, x = linear(), randn(5, 24)
        for choice, want in (
            ({"input": presets.INT8_ROW, "weight": presets.INT8_ROW}, schemes.INT8_DYNAMIC),
            ({"weight": presets.INT4_32}, schemes.INT4_WEIGHT_32),
            (
                {"input": presets.FP8_TENSOR, "weight": presets.FP8_TENSOR, "gradient": presets.FP8_E5M2_TENSOR},
                recipes.FP8_HYBRID,
            ),
        ):
            with hop.nn.scheme(choice.get):
                assert layer.plan().scheme == want
        with hop.nn.scheme(lambda role: None):
            assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
        rows = hop.nn.Embedding(4, 8, scheme=schemes.INT8_DYNAMIC)
        with hop.nn.scheme({"input": presets.INT8_ROW}.get):
            assert torch.equal(rows(torch.arange(4)), rows.weight)

    def test_errors(self):
        with pytest.raises(TypeError, match=r"choice\('input'\) must be a Quantizer or None, got 'int8'"):
            hop.nn.scheme(lambda role: "int8")
        bad = replace(presets.INT8_ROW, stochastic=True)
        with pytest.raises(ValueError, match="rounds at random"):
            hop.nn.scheme({"weight": presets.INT8_ROW, "output": bad}.get)

    def test_threads_have_their_own(self):
        layer, x, inside, seen = linear(), randn(5, 24), threading.Event(), []
        done = threading.Event()

        def other() -> None:
            with hop.nn.scheme(schemes.INT4_WEIGHT_32):
                inside.set()
                done.wait(30)
                seen.append(layer(x))

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(30)
        assert torch.equal(layer(x), linear()(x))
        done.set()
        thread.join()
        assert torch.equal(seen[0], linear(schemes.INT4_WEIGHT_32)(x))

    def test_state_is_built_where_quantizers_differ_and_stays(self):
        layer, x = linear(SHORT), randn(5, 24)
        layer(x)
        weight, taken = layer.scales.weight, layer.scales.input
        with hop.nn.scheme(schemes.INT8_DYNAMIC):
            layer(x)
        assert layer.scales.input is taken
        with hop.nn.scheme(replace(SHORT, lhs=Quantizer(E4M3, scale=Delayed(history=2)))):
            layer(x)
            assert len(layer.scales.input.history) == 2
        layer(x)
        assert len(layer.scales.input.history) == 4 and layer.scales.weight is weight

    def test_a_checkpoint_keeps_the_scheme(self):
        layer, x = linear(), randn(5, 24)
        for scheme in (recipes.FP8_HYBRID, schemes.INT4_WEIGHT_32):
            want, got = linear(scheme), linear()
            want(x).sum().backward()
            with hop.nn.scheme(scheme):
                y = checkpoint(got, x, use_reentrant=False, context_fn=hop.nn.same_scheme)
            y.sum().backward()
            assert torch.equal(want.weight.grad, got.weight.grad)
        assert torch.equal(layer(x), linear()(x))

    @pytest.mark.full
    def test_compiled_programs_follow(self):
        layer, x = linear(), randn(5, 24)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for scheme in (schemes.INT8_DYNAMIC, schemes.INT4_WEIGHT_32, schemes.INT8_DA_TERNARY_W, schemes.INT8_DYNAMIC):
            with hop.nn.scheme(scheme):
                assert torch.equal(compiled(x), linear(scheme)(x))
        assert torch.equal(compiled(x), layer(x))

        def inside(x: Tensor) -> Tensor:
            with hop.nn.scheme(schemes.INT4_WEIGHT_32):
                y = layer(x)
            return y + layer(x)

        got = torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(got, inside(x)) and hop.nn.contexts._here.plans == ()

    @pytest.mark.full
    def test_compiled_programs_take_state_that_is_prepared(self):
        layer, x = linear(), randn(5, 24)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with hop.nn.scheme(SHORT):
            with pytest.raises(RuntimeError, match=r"hop.nn.prepare"):
                compiled(x)
            hop.nn.prepare(layer)
            assert torch.equal(compiled(x), linear(SHORT)(x))

    @pytest.mark.full
    def test_compiled_training_is_eager_training(self):
        conv = Scheme(presets.INT8_ROW, presets.INT8_ROW)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 6))
        eager = converted(model, conv)
        other = copy.deepcopy(eager)
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        for step in range(2):
            x = randn(4, 3, 5, 5, seed=step)
            losses = [m(x).square().mean() for m in (eager, compiled)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            for a, b in zip(eager.parameters(), other.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
                with torch.no_grad():
                    a.sub_(a.grad)
                    b.sub_(b.grad)

    @pytest.mark.full
    def test_compiled_programs_take_other_sizes(self):
        for scheme, learn in ((SHORT, False), (recipes.INT8_TRAINING, False), (LEARNED, True)):
            layer = linear(scheme, learn_scales=learn)
            hop.nn.calibrate(layer, [randn(4, 24)])
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
            for n in (3, 5, 9):
                y = compiled(randn(n, 7, 24))
                y.sum().backward()
                torch.testing.assert_close(y, layer(randn(n, 7, 24)), rtol=1e-5, atol=1e-5)
            assert layer.weight.grad.isfinite().all()

    @parameterized.expand([("MXFP8_TRAINING", 2), ("NVFP4_TRAINING", 3)])
    @pytest.mark.full
    def test_programs_of_eight_batch_sizes(self, name, programs):
        """Blocks lie along the rows in the products of the backward: a program for rows that are one block at most,
        one for multiples of a block, one for others."""
        compiled = CompileCounterWithBackend("aot_eager")
        layer = torch.compile(hop.nn.Linear(64, 8, scheme=EVERY[name]), backend=compiled, dynamic=True)
        for n in (50, 64, 17, 24, 32, 48, 16, 100):
            layer(randn(n, 64)).sum().backward()
        assert compiled.frame_count <= programs

    def test_inputs_that_lie_channels_last(self):
        layer, x = linear(recipes.FP8_HYBRID), randn(2, 3, 4, 24)
        found = []
        for y in (x, x.to(memory_format=torch.channels_last)):
            layer.weight.grad = None
            layer(y).square().sum().backward()
            found.append(layer.weight.grad)
        torch.testing.assert_close(*found)

    def test_a_quantized_result_whose_gradient_is_delayed(self):
        layer, x = linear(replace(SHORT, output=presets.INT8_TENSOR_STATIC_AFFINE)), randn(5, 24)
        hop.nn.calibrate(layer, [x])
        y = layer(x)
        assert isinstance(y, hop.QuantizedTensor)
        (hop.dequantize(y) * 3).sum().backward()
        assert layer.scales.gradient.history[0] == 3

    def test_says_its_scheme(self):
        assert repr(linear()) == "Linear(in_features=24, out_features=8, bias=True, scheme=INT8_DYNAMIC)"
        static = repr(linear(schemes.INT8_STATIC))
        assert (
            "Linear(\n  in_features=24, out_features=8, bias=True, scheme=INT8_STATIC\n  (scales): ModuleDict" in static
        )

    def test_hadamard_trains(self):
        q = replace(presets.MXFP8, hadamard=Hadamard())
        layer = hop.nn.Linear(32, 16, scheme=Scheme(q, presets.MXFP8, grad=q, backward="quantized"))
        layer(randn(32, 32)).sum().backward()
        assert layer.weight.grad.isfinite().all()
