"""sensitivity against its formulas in float64, choose_bits against every choice that there is."""

import copy
import itertools
import math
import sys
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import formats, presets
from hop.algorithms import SQNR, Fisher, choose_bits, sensitivity
from hop.algorithms.candidates import dense_bytes
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

BITS = [Quantizer(getattr(formats, f"INT{bits}"), (1, 16)) for bits in (3, 4, 5, 6, 8)]
BATCHES = [randn(6, 32, seed=seed) for seed in (1, 2, 3)]


def mlp() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 8)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def change(model: Any, name: str, q: Quantizer) -> Tensor:
    """Ŵ - W in float64."""
    weight = model.get_submodule(name).weight.detach()
    return (q.fake_quantize(weight) - weight).to(torch.float64)


def inputs(model: Any, name: str, batch: Tensor) -> Tensor:
    return model[: int(name)](batch).detach().to(torch.float64)


class TestSensitivity(unittest.TestCase):
    def test_noise_over_signal(self):
        model = mlp()
        rows = sensitivity(model, BITS, BATCHES, measure=SQNR())
        assert [(r.name, r.scheme.rhs) for r in rows] == [(n, q) for n in "024" for q in BITS]
        for row in rows:
            x = torch.cat([inputs(model, row.name, b) for b in BATCHES])
            layer = model.get_submodule(row.name).to(torch.float64)
            noise = (x @ change(model.float(), row.name, row.scheme.rhs).t()).square().sum()
            y = x @ layer.weight.detach().to(torch.float64).t() + layer.bias.detach()
            assert row.loss == pytest.approx(float(noise / y.square().sum()), rel=1e-3)
            assert math.isnan(row.seconds)
            model.float()

    @parameterized.expand([("few", 3), ("one", 1)])
    def test_fisher_is_its_formula(self, _name, draws):
        """½ mean of (vᵀ J e)², J from torch.func in float64, with the very v."""
        model = mlp()
        rows = {(r.name, r.scheme.rhs): r.loss for r in sensitivity(model, BITS, BATCHES, measure=Fisher(draws, 7))}
        generator = torch.Generator().manual_seed(7)
        vectors = [[torch.randn(6, 8, generator=generator).double() for _ in range(draws)] for _ in BATCHES]
        wide = copy.deepcopy(model).double()
        for (name, q), loss in rows.items():
            behind, total = wide[int(name) + 1 :], 0.0
            for batch, several in zip(BATCHES, vectors, strict=True):
                x = inputs(model, name, batch)
                y, e = wide[int(name)](x).detach(), x @ change(model, name, q).t()
                along: Any = torch.func.jvp(behind, (y,), (e,))[1]
                total += sum(float((v * along).sum()) ** 2 for v in several)
            assert loss == pytest.approx(total / (2 * draws * len(BATCHES)), rel=2e-3)

    def test_fisher_is_the_error_of_the_outputs(self):
        """With many draws, half the squared error of a batch that small errors of the layer leave."""
        model, q = mlp(), BITS[-1]
        rows = sensitivity(model, [q], BATCHES, measure=Fisher(draws=800))
        for row in rows:
            other = copy.deepcopy(model).double()
            with torch.no_grad():
                other.get_submodule(row.name).weight += change(model, row.name, q)
                lost = sum((other(b.double()) - model.double()(b.double())).square().sum() for b in BATCHES)
            model.float()
            assert row.loss == pytest.approx(float(lost) / 2 / len(BATCHES), rel=0.1)

    def test_loss_of_the_caller(self):
        """½ mean of (Σ g · e)², g the gradient of the loss by the layer's result."""
        model, targets = mlp(), {id(b): randn(6, 8, seed=9 + i) for i, b in enumerate(BATCHES)}
        measure = Fisher(loss=lambda y, batch: (y - targets[id(batch)]).square().sum())
        wide = copy.deepcopy(model).double()
        for row in sensitivity(model, BITS[:2], BATCHES, measure=measure):
            total = 0.0
            for batch in BATCHES:
                x = inputs(model, row.name, batch)
                y = wide[int(row.name)](x).detach().requires_grad_()
                (g,) = torch.autograd.grad((wide[int(row.name) + 1 :](y) - targets[id(batch)]).square().sum(), y)
                total += float((g * (x @ change(model, row.name, row.scheme.rhs).t())).sum()) ** 2
            assert row.loss == pytest.approx(total / 2 / len(BATCHES), rel=2e-3)

    def test_activations_too(self):
        """What a scheme does to activations counts, calibrated scales too; floats lose nothing."""
        model = mlp()
        rows = sensitivity(model, ["int8", "int8_static", None], BATCHES, measure=SQNR(), timed=True)
        done = hop.quantize_(copy.deepcopy(model), "int8_static", calibrate=BATCHES)
        with torch.no_grad():
            wanted = [model[0](b) for b in BATCHES]
            noise = sum((done[0](b) - y).double().square().sum() for b, y in zip(BATCHES, wanted, strict=True))
        by = {(r.name, r.scheme): r for r in rows}
        row = by["0", hop.schemes.INT8_STATIC]
        assert row.loss == pytest.approx(float(noise / sum(y.double().square().sum() for y in wanted)), rel=1e-4)
        assert by["2", None].loss == 0 and by["2", None].size == model[2].weight.nbytes
        assert all(r.seconds > 0 for r in rows)

    def test_called_twice_and_in_place(self):
        """A layer that is called twice errs in both; its result may be changed in place."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(32, 32)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"y": self.layer(self.layer(x).tanh_())}

        model = Model().requires_grad_(False)
        (row,) = sensitivity(model, [BITS[2]], BATCHES, measure=Fisher(2, 5))
        generator, total = torch.Generator().manual_seed(5), 0.0
        layer = copy.deepcopy(model.layer).double()
        delta = change(model, "layer", BITS[2])
        for batch in BATCHES:
            first = layer(batch.double())
            one: Any = torch.func.jvp(lambda y: layer(y.tanh()), (first,), (batch.double() @ delta.t(),))[1]
            along = one + first.tanh() @ delta.t()
            total += sum(float((torch.randn(6, 32, generator=generator).double() * along).sum()) ** 2 for _ in range(2))
        assert row.loss == pytest.approx(total / 2 / 6, rel=2e-3)

    def test_the_model_stays(self):
        model = mlp().train()
        before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        sensitivity(model, BITS, BATCHES)
        assert model.training and all(type(m) in (nn.Sequential, nn.Linear, nn.Tanh) for m in model.modules())
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert not any(m._forward_hooks for m in model.modules()) and all(p.grad is None for p in model.parameters())
        assert torch.equal(rng, torch.get_rng_state())


class TestSize(unittest.TestCase):
    @parameterized.expand([(f"int{bits}", q, bits) for bits, q in zip((3, 4, 5, 6, 8), BITS, strict=True)])
    def test_bits_of_codes_and_scales(self, _name, q, bits):
        assert dense_bytes(q, (24, 64)) == 24 * 64 * bits // 8 + 24 * 4 * 4

    def test_other_formats(self):
        assert dense_bytes(presets.MXFP4, (8, 64)) == 8 * 64 // 2 + 8 * 2
        assert dense_bytes(presets.NVFP4, (8, 64)) == 8 * 64 // 2 + 8 * 4 + 4
        assert dense_bytes(presets.UINT4_32_AFFINE, (8, 64)) == 8 * 64 // 2 + 8 * 2 * (4 + 1)


class TestChoice(unittest.TestCase):
    def check(self, model: Any, schemes: list, batches: list, size: int, **kwargs: Any) -> Any:
        """The least sum of losses of all choices that are small enough."""
        chosen = choose_bits(model, schemes, batches, size=size, **kwargs)
        by: dict[str, list[Any]] = {}
        for row in chosen.costs:
            by.setdefault(row.name, []).append(row)
        every = [rows for rows in itertools.product(*by.values()) if sum(r.size for r in rows) <= size]
        least = min(sum(r.loss for r in rows) for rows in every)
        assert chosen.loss == pytest.approx(least, rel=1e-9) and chosen.size <= size
        assert chosen.loss == pytest.approx(sum(r.cost.loss for r in chosen.layers))
        assert chosen.size == sum(r.cost.size for r in chosen.layers)
        assert list(chosen.rules.values()) == [r.cost.scheme for r in chosen.layers]
        return chosen

    @parameterized.expand(
        [
            (f"{measure}_{percent}", measure, percent)
            for measure in ("fisher", "sqnr")
            for percent in (0, 13, 37, 61, 88, 100)
        ]
    )
    @pytest.mark.quick(3)
    def test_is_the_best_of_all(self, _name, measure, percent):
        model = mlp()
        sizes = [[dense_bytes(q, model[i].weight.shape) for q in BITS] for i in (0, 2, 4)]
        low, high = sum(map(min, sizes)), sum(map(max, sizes))
        size = low + (high - low) * percent // 100
        chosen = self.check(model, BITS, BATCHES, size, measure=Fisher() if measure == "fisher" else SQNR())
        done = hop.quantize_(copy.deepcopy(model), chosen.rules, pack=False)
        assert [done[i].weight.quantizer for i in (0, 2, 4)] == [s.rhs for s in chosen.rules.values()]
        assert sum(dense_bytes(done[i].weight.quantizer, done[i].weight.shape) for i in (0, 2, 4)) == chosen.size

    def test_floats_are_a_choice(self):
        model = mlp()
        chosen = self.check(model, [BITS[0], None], BATCHES, 9_000)
        assert None in chosen.rules.values()
        done = hop.quantize_(model, chosen.rules)
        assert [type(done[i]) is nn.Linear for i in (0, 2, 4)] == [s is None for s in chosen.rules.values()]

    def test_schemes_that_do_not_fit(self):
        """Of a convolution, and of a filter."""
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 16), nn.Linear(16, 4)).eval()
        x = [randn(4, 3, 8, 8)]
        chosen = self.check(model, [presets.INT8_ROW, "mxfp4"], x, 10**6, filter=lambda n, m: n != "3")
        assert list(chosen.rules) == ["0", "2"]
        hop.quantize_(model, chosen.rules)
        assert type(model[3]) is nn.Linear

    def test_shared_weights(self):
        """Layers that share a weight take one scheme, counted once."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.embed, self.middle = nn.Embedding(24, 32), nn.Linear(32, 32)
                self.head = nn.Linear(32, 24, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.middle(self.embed(x)).tanh())

        model = Model()
        chosen = choose_bits(model, BITS, [torch.arange(24).view(4, 6)], size=1500)
        assert chosen.rules["embed"] == chosen.rules["head"] and chosen.size <= 1500
        assert chosen.size == sum({r.cost.name: r.cost.size for r in chosen.layers if r.cost.name != "head"}.values())

    def test_names_are_patterns(self):
        model = nn.ModuleDict({"a[0]": nn.Linear(16, 4)})
        model.forward = lambda x: model["a[0]"](x)  # type: ignore[method-assign]
        chosen = choose_bits(model, BITS, [randn(2, 16)], size=1000)
        done = hop.quantize_(model, chosen.rules)
        assert isinstance(done["a[0]"].weight, hop.QuantizedTensor)

    def test_time(self):
        """Within the times that were measured; and as much time as there is lets the best be taken."""
        model, schemes = mlp(), [BITS[0], BITS[-1]]
        chosen = choose_bits(model, schemes, BATCHES, seconds=1e3)
        assert all(s.rhs == BITS[-1] for s in chosen.rules.values()) and 0 < chosen.seconds < 1e3
        assert math.isnan(choose_bits(model, schemes, BATCHES, size=10**6).seconds)
        with pytest.raises(ValueError, match=r"the least are .* bytes and .* seconds"):
            choose_bits(model, schemes, BATCHES, seconds=1e-12)

    def test_unreached(self):
        model = mlp()
        model.other = nn.Linear(16, 64)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        chosen = choose_bits(model, BITS, BATCHES, size=6000)
        notes = {r.cost.name: r.note for r in chosen.layers}
        assert "no batch reaches it" in notes["other"] and "no batch" in notes["4"] and not notes["0"]
        assert chosen.rules["other"].rhs == BITS[-1] and math.isfinite(chosen.loss) and chosen.size <= 6000
        assert "no batch reaches it" in str(chosen)

    def test_attention_is_left(self):
        model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).eval()
        chosen = choose_bits(model, BITS, [randn(2, 5, 32)], size=10**5)
        assert list(chosen.rules) == ["linear1", "linear2"] and "self_attn" in chosen.left
        assert "left: " in str(chosen)

    def test_picture(self):
        figure = choose_bits(mlp(), BITS, BATCHES, size=2_500).picture()
        assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["0", "2", "4"]
        assert len(figure.axes[1].patches) == 3


class TestErrors(unittest.TestCase):
    def test_arguments(self):
        bad = mlp()
        with torch.no_grad():
            bad[2].weight[0, 0] = math.nan
        for call, error, said in (
            (lambda: choose_bits(mlp(), BITS, BATCHES), ValueError, "size and seconds are None"),
            (lambda: choose_bits(mlp(), BITS, BATCHES, size=-1), ValueError, "size must be above 0"),
            (lambda: choose_bits(mlp(), BITS, BATCHES, size=1.5), TypeError, "size must be a number"),
            (lambda: choose_bits(mlp(), BITS, BATCHES, seconds=math.nan), ValueError, "seconds must be above 0"),
            (lambda: choose_bits(mlp(), BITS, BATCHES, size=10), ValueError, r"no choice has size=10 .* the least are"),
            (lambda: choose_bits(mlp(), BITS, [], size=10**6), ValueError, "batches is empty"),
            (lambda: choose_bits(mlp(), BITS, BATCHES[0], size=10**6), TypeError, "got a tensor of"),
            (lambda: choose_bits(mlp(), "int8", BATCHES, size=10**6), TypeError, "schemes must be a list"),
            (lambda: choose_bits(mlp(), ["int8", "int8"], BATCHES, size=10**6), ValueError, "has a duplicate"),
            (lambda: choose_bits(mlp(), ["int9"], BATCHES, size=10**6), ValueError, "no scheme is called"),
            (lambda: choose_bits(3, BITS, BATCHES, size=10**6), TypeError, "must be a torch.nn.Module"),
            (lambda: choose_bits(nn.ReLU(), BITS, BATCHES, size=10**6), ValueError, "no layer that hop knows"),
            (lambda: choose_bits(bad, BITS, BATCHES, size=10**6), ValueError, "result of layer '2' has NaN"),
            (lambda: sensitivity(mlp(), BITS, [BATCHES[0] * math.inf]), ValueError, "result of layer '0' has NaN"),
            (lambda: sensitivity(mlp(), BITS, BATCHES, measure="sqnr"), TypeError, "measure must be"),
            (lambda: sensitivity(mlp(), BITS, BATCHES, filter=3), TypeError, "filter must be"),
            (lambda: sensitivity(mlp(), BITS, [(BATCHES[0], 1)]), TypeError, "sensitivity: batch 0 is passed as"),
            (lambda: sensitivity(mlp(), BITS, BATCHES, measure=Fisher(loss=lambda y, b: y)), ValueError, "one element"),
            (lambda: Fisher(draws=0), ValueError, "draws must be 1 or more"),
            (lambda: Fisher(seed=0.5), TypeError, "seed must be an integer"),
            (lambda: Fisher(loss=3), TypeError, "loss must be a function"),
        ):
            with pytest.raises(error, match=said):
                call()

    def test_without_scipy(self):
        with mock.patch.dict(sys.modules, {"scipy.optimize": None}), pytest.raises(ImportError, match="algorithms"):
            choose_bits(mlp(), BITS, BATCHES, size=10**6)

    def test_scheme_of_activations_alone(self):
        """Weights stay floats, of their bytes."""
        rows = sensitivity(mlp(), [Scheme(presets.INT8_ROW, None)], BATCHES, measure=SQNR())
        assert [r.size for r in rows] == [4 * 32 * 48, 4 * 48 * 16, 4 * 16 * 8] and all(0 < r.loss < 1e-3 for r in rows)
