"""gptq: one weight against a plain float64 reference, then models."""

import copy
import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop import presets
from hop.algorithms import GPTQ, gptq
from hop.algorithms.grid import Grid
from hop.algorithms.inputs import input_rows
from hop.algorithms.solving import solve
from hop.numerics.formats import DYNAMIC4
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

CODEBOOK = Quantizer(DYNAMIC4, (1, 32), Amax())
QUANTIZERS = {
    **{name: presets.PRESETS[name] for name in ("INT8_ROW", "INT4_32", "UINT4_32_AFFINE", "INT8_TENSOR", "FP8_ROW")},
    **{name: presets.PRESETS[name] for name in ("TERNARY_ROW", "MXFP8", "MXFP4", "NVFP4", "NVFP4_16X16")},
    "CODEBOOK": CODEBOOK,
}


def steps_of(q: Quantizer, weight: Tensor) -> Tensor:
    """The scale of each element, by the definition of each rule."""
    buffers = q.quantize(weight)
    scale = buffers["scale"]
    if q.scale.outer_block is not None:
        scale = scale.to(torch.float32) * buffers["global_amax"] * torch.tensor(1 / (448 * 6), dtype=torch.float32)
    elif scale.dtype != torch.float32:
        scale = 2.0 ** (scale.view(torch.uint8).to(torch.float32) - 127)
    rows, columns = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1).to(torch.float64)


def reference(q: Quantizer, weight: Tensor, hessian: Tensor, damping: float, order: bool) -> Tensor:
    """The numbers by optimal brain quantization, column by column, with the inverse Hessian of the columns that are
    left, in float64 (Frantar et al. 2022, equations 2 and 3): no Cholesky factor and no blocks. What an element can be
    is a product that is rounded to float32, as `dequantize` gives it."""
    w, steps = weight.to(torch.float64).clone(), steps_of(q, weight)
    zero = torch.zeros_like(w)
    if q.scale.has_zero_point():
        zero = q.quantize(weight)["zero_point"].repeat_interleave(q.block[1], 1).to(torch.float64)
    numbers = torch.tensor(q.format.numbers, dtype=torch.float64)
    diagonal = hessian.diagonal()
    inverse = torch.linalg.inv(hessian + damping * diagonal.mean() * torch.eye(len(hessian), dtype=torch.float64))
    result = torch.empty_like(w)
    for j in sorted(range(len(hessian)), key=lambda k: -float(diagonal[k])) if order else range(len(hessian)):
        every = ((numbers - zero[:, j, None]) * steps[:, j, None]).to(torch.float32).to(torch.float64)
        result[:, j] = every.gather(1, (every - w[:, j, None]).abs().argmin(1, keepdim=True)).squeeze(1)
        w -= torch.outer((w[:, j] - result[:, j]) / inverse[j, j], inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return result


def correlated(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs of a few directions and some noise, with channels of different sizes."""
    mixed = randn(rows, columns // 4, seed=seed) @ randn(columns // 4, columns, seed=seed + 1)
    return (mixed / 4 + 0.3 * randn(rows, columns, seed=seed + 2)) * torch.linspace(0.3, 3, columns)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()


BATCHES = [correlated(40, 64, seed) for seed in (10, 20, 30)]


class TestSolve(unittest.TestCase):
    @parameterized.expand([(f"{name}_{order}", q, order) for name, q in QUANTIZERS.items() for order in (True, False)])
    @pytest.mark.quick(2)
    def test_is_the_reference(self, _name, q, order):
        x = correlated(200, 64).to(torch.float64)
        weight, hessian = randn(32, 64, seed=4), x.t() @ x
        wanted = reference(q, weight, hessian, 0.01, order)
        grid = Grid.of(q, q.quantize(weight), weight.shape)
        for block in (1, 7, 64):
            codes, damping = solve(weight, grid, hessian, 0.01, order, block)
            assert damping == 0.01
            assert torch.allclose(grid.decode(codes).to(torch.float64), wanted, rtol=1e-6, atol=1e-9)
        nearest = q.fake_quantize(weight)
        assert (x @ (weight - wanted).t()).square().sum() < 0.9 * (
            x @ (weight - nearest).to(x.dtype).t()
        ).square().sum()

    def test_inputs_without_correlation_round_to_the_nearest(self):
        q, weight = presets.INT4_32, randn(16, 64)
        grid = Grid.of(q, q.quantize(weight), weight.shape)
        codes, _ = solve(weight, grid, torch.diag(torch.linspace(1, 9, 64, dtype=torch.float64)), 0.0, True, 16)
        assert torch.equal(grid.decode(codes), q.fake_quantize(weight))

    def test_columns_without_inputs(self):
        q, weight, x = presets.INT4_32, randn(16, 64), correlated(200, 64).to(torch.float64)
        x[:, 10:20] = 0
        grid = Grid.of(q, q.quantize(weight), weight.shape)
        codes, _ = solve(weight, grid, x.t() @ x, 0.01, True, 16)
        assert torch.equal(grid.decode(codes)[:, 10:20], q.fake_quantize(weight)[:, 10:20])

    def test_singular(self):
        q, weight, x = presets.INT4_32, randn(16, 64), correlated(8, 64).to(torch.float64)
        grid = Grid.of(q, q.quantize(weight), weight.shape)
        assert solve(weight, grid, x.t() @ x, 0.0, True, 16).codes is None
        codes, damping = solve(weight, grid, x.t() @ x, 1e-20, True, 16)
        assert codes is None and damping == pytest.approx(1e-17)
        assert solve(weight, grid, x.t() @ x, 0.01, True, 16).codes is not None


class TestModels(unittest.TestCase):
    @parameterized.expand([*QUANTIZERS.items()])
    @pytest.mark.quick(2)
    def test_frozen_to_ordinary_tensors(self, _name, q):
        """Scales are those of freeze; each layer's error is less, and is what the report says."""
        float_model: Any = mlp()
        nearest = hop.quantize_(copy.deepcopy(float_model), q, pack=False, weights="rule")
        model = gptq(copy.deepcopy(float_model), q, BATCHES, pack=False)
        x = torch.cat(BATCHES)
        for i in (0, 2):
            codes: hop.QuantizedTensor = model[i].weight
            assert codes.quantizer == q and model[i].frozen
            for name, buffer in codes.buffers().items():
                same = torch.equal(buffer.view(torch.uint8), nearest[i].weight.buffers()[name].view(torch.uint8))
                assert same == (name != "codes")
            row, wide = model.gptq_report[i // 2], x.detach().to(torch.float64)
            w = float_model[i].weight.detach().to(torch.float64)
            for said, got in ((row.error, codes), (row.nearest, nearest[i].weight)):
                lost = (wide @ (w - hop.dequantize(got)).t()).square().sum() / (wide.detach() @ w.t()).square().sum()
                assert said == pytest.approx(float(lost), rel=1e-4)
            assert row.error < row.nearest and row.rows == 120 and row.name == str(i) and not row.note
            x = functional.relu(model[0](x)) if i == 0 else x  # the second is given what the frozen first one leaves
        wanted = functional.linear(x, hop.dequantize(model[2].weight), model[2].bias)
        assert torch.allclose(model(torch.cat(BATCHES)), wanted, rtol=1e-5, atol=1e-5)

    def test_one_run_for_all(self):
        """Without `sequential` the second layer's Hessian is that of the float model."""
        model = gptq(mlp(), "int4", BATCHES, settings=GPTQ(sequential=False))
        floats: Any = mlp().requires_grad_(False)
        x = floats[:2](torch.cat(BATCHES)).to(torch.float64)
        w = floats[2].weight.to(torch.float64)
        lost = (x @ (w - hop.dequantize(model[2].weight)).t()).square().sum() / (x @ w.t()).square().sum()
        assert model.gptq_report[1].error == pytest.approx(float(lost), rel=1e-4)

    def test_activations_too(self):
        """Schemes that quantize activations, static ones calibrated; packed and plain give the same numbers."""
        for scheme in ("int8", "8da4w", "int8_static", "nvfp4"):
            model = gptq(mlp(), scheme, BATCHES, pack=True)
            plain = gptq(mlp(), scheme, BATCHES, pack=False)
            for i in (0, 2):
                assert torch.equal(hop.dequantize(model[i].weight), hop.dequantize(plain[i].weight))
            got = hop.quantize_(mlp(), scheme, calibrate=BATCHES)(BATCHES[0]) - mlp()(BATCHES[0])
            assert (model(BATCHES[0]) - mlp()(BATCHES[0])).norm() < 1.05 * got.norm()

    def test_inputs_in_common(self):
        """Layers that read one input share its Hessian and its run; a layer that is called twice sees both inputs."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.q, self.k, self.out = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 32)

            def forward(self, x: Tensor) -> Tensor:
                return self.out(self.out(self.q(x) * self.k(x)))

        model, calls = Model(), []
        model.k.register_forward_hook(lambda *_: calls.append(1))
        rows = {row.name: row for row in gptq(model, "int4", BATCHES).gptq_report}
        assert [rows[n].rows for n in ("q", "k", "out")] == [120, 120, 240]
        assert len(calls) == 6  # the survey's run and that of `out`; the run for q and k stops before k is computed

    @parameterized.expand(
        [
            ("plain", nn.Conv2d(3, 8, 3)),
            ("strided", nn.Conv2d(3, 8, (3, 2), stride=2, padding=(1, 2), dilation=(1, 2))),
            ("same", nn.Conv2d(3, 8, (2, 3), padding="same")),
            ("reflected", nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")),
        ]
    )
    def test_convolutions(self, _name, conv):
        """Patches by the flattened weight are the convolution; and its error falls."""
        x = randn(4, 3, 12, 12)
        wanted = conv(x) - conv.bias[:, None, None]
        layer = hop.nn.Conv2d.from_float(conv, Scheme(None, presets.INT4_32))
        got = input_rows(layer, x) @ conv.weight.flatten(1).t()
        assert torch.allclose(got, wanted.permute(0, 2, 3, 1).reshape(-1, 8), atol=1e-5)
        assert torch.equal(input_rows(layer, x[0]), input_rows(layer, x[:1]))
        smooth = functional.avg_pool2d(randn(4, 3, 18, 18, seed=2), 5, 1)
        model = gptq(nn.Sequential(copy.deepcopy(conv)), Quantizer(hop.formats.INT4, (1, -1, -1, -1)), [smooth])
        (row,) = model.gptq_report
        assert row.error < 0.7 * row.nearest

    def test_saved_and_loaded(self):
        model = gptq(mlp(), "mxfp4", BATCHES)
        other = hop.quantize_(mlp(), "mxfp4")
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(BATCHES[0]), model(BATCHES[0]))

    def test_training_and_gradients_stay_as_they_were(self):
        model = mlp().train()
        gptq(model, "int4", BATCHES)
        assert model.training and torch.is_grad_enabled()
        assert not any(layer.in_floats for layer in (model[0], model[2]))


class TestFallbacks(unittest.TestCase):
    """What GPTQ cannot do is rounded to the nearest, and its row says why."""

    def check(self, model: nn.Module, batches: list, name: str, note: str, **settings: float) -> None:
        wanted = hop.quantize_(copy.deepcopy(model), "int4", pack=False, weights="rule").get_submodule(name).weight
        done = gptq(model, "int4", batches, settings=GPTQ(**settings), pack=False)
        row = next(row for row in done.gptq_report if row.name == name)
        assert row.note.startswith("rounded to the nearest") and note in row.note, row
        codes = done.get_submodule(name).weight
        assert isinstance(codes, hop.QuantizedTensor) and torch.equal(codes.codes, wanted.codes)

    def test_unreached(self):
        model = mlp()
        model.other = nn.Linear(64, 8)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        self.check(model, BATCHES, "other", "no batch reaches it")

    def test_singular(self):
        self.check(mlp(), [BATCHES[0][:4]], "0", "singular", damping=0.0)

    def test_zeros(self):
        self.check(mlp(), [torch.zeros(4, 64)], "0", "as good or better")

    def test_raised_damping_is_told(self):
        row, _ = gptq(mlp(), "int4", [BATCHES[0][:4]], settings=GPTQ(damping=1e-9)).gptq_report
        assert "the damping was raised to" in row.note and row.damping > 1e-9 and row.error < row.nearest

    def test_tied(self):
        model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8, bias=False))
        model[1].weight = model[0].weight
        self.check(model, [torch.arange(8)], "1", "2 layers share its weight")
        self.check(nn.Sequential(nn.Embedding(8, 64)), [torch.arange(8)], "0", "Embedding is neither")

    def test_groups_of_a_convolution(self):
        self.check(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), [randn(1, 4, 8, 8)], "0", "cut into 2 groups")

    def test_weights_that_are_not_finite(self):
        model: Any = mlp()
        with torch.no_grad():
            model[2].weight[0, 0] = math.inf
        self.check(model, BATCHES, "2", "NaN or an infinity")


class TestCalibration:
    @pytest.mark.parametrize("scheme", ["int4", "nvfp4", "8da4w", "int8_static"])
    @pytest.mark.quick(2)
    def test_in_one_argument(self, scheme):
        """quantize_(weights="gptq") is GPTQ with searched scales, and its results are nearer to the floats."""
        torch.manual_seed(0)
        floats = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
        mixed = torch.randn(32, 128)
        batches, x = [torch.randn(32, 32) @ mixed for _ in range(2)], torch.randn(64, 32) @ mixed
        model = hop.quantize_(copy.deepcopy(floats), scheme, calibrate=iter(batches), weights="gptq")
        same = gptq(copy.deepcopy(floats), scheme, batches, settings=GPTQ(search=True))
        assert torch.equal(model(x), same(x)) and model.gptq_report == same.gptq_report
        assert [row.name for row in model.gptq_report] == ["0", "2"]
        without = hop.quantize_(copy.deepcopy(floats), scheme, calibrate=batches)
        assert (model(x) - floats(x)).norm() < (without(x) - floats(x)).norm()

    def test_functions_that_return_batches(self):
        """They are called only if the batches are needed."""
        torch.manual_seed(0)
        floats, batches, calls = (
            nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)),
            [torch.randn(64, 32)],
            [],
        )

        def load() -> Any:
            calls.append(1)
            return iter(batches)

        for scheme, weights, count in (("int4", "search", 0), ("int8_static", "search", 1), ("int8_static", "gptq", 1)):
            calls.clear()
            model = hop.quantize_(copy.deepcopy(floats), scheme, calibrate=load, weights=weights)
            same = hop.quantize_(copy.deepcopy(floats), scheme, calibrate=batches, weights=weights)
            assert len(calls) == count and torch.equal(model(batches[0]), same(batches[0]))
            assert hasattr(model, "gptq_report") == (weights == "gptq")

    def test_data(self):
        for weights, error, match in (
            ("gptq", ValueError, r"calibrate=None, but weights='gptq' chooses codes from data; pass calibrate=batches"),
            ("awq", ValueError, "weights must be one of 'search', 'rule', 'gptq', got 'awq'"),
            (True, TypeError, "weights must be one of 'search', 'rule', 'gptq', got True"),
        ):
            with pytest.raises(error, match=match):
                hop.quantize_(nn.Linear(32, 32), "int4", weights=weights)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"quantize_: batches must be an iterable of batches, got a tensor of \(4, 32"
        ):
            hop.quantize_(nn.Linear(32, 32), "int4", calibrate=torch.ones(4, 32), weights="gptq")
        with pytest.raises(ValueError, match=r"quantize_: .*batches"):
            hop.quantize_(nn.Linear(32, 32), "int4", calibrate=[], weights="gptq")
        with pytest.raises(TypeError, match="search must be True or False"):
            GPTQ(search=1)  # type: ignore[arg-type]


class TestErrors(unittest.TestCase):
    def test_data(self):
        for batches, error, said in (
            ([], ValueError, "batches is empty"),
            (BATCHES[0], TypeError, "batches must be an iterable of batches, got a tensor"),
            (None, TypeError, "got None"),
            ([(BATCHES[0], BATCHES[0])], TypeError, "gptq: batch 0 is passed as"),
            ([BATCHES[0] * math.nan], ValueError, "the input of layer '0' has NaN"),
            ([BATCHES[0], BATCHES[1] * math.inf], ValueError, "the input of layer '0' has NaN"),
        ):
            model = mlp()
            with pytest.raises(error, match=said):
                gptq(model, "int4", batches)
            for i in (0, 2):
                assert torch.equal(model[i].weight, mlp()[i].weight)

    def test_arguments(self):
        for call, error, said in (
            (lambda: gptq(3, "int4", BATCHES), TypeError, "model must be a torch.nn.Module"),
            (lambda: gptq(mlp(), "int4", BATCHES, settings=0.01), TypeError, "settings must be"),
            (lambda: gptq(mlp(), "int5", BATCHES), ValueError, "no scheme is called"),
            (lambda: GPTQ(damping=-1), ValueError, "damping must be"),
            (lambda: GPTQ(damping=math.nan), ValueError, "damping must be"),
            (lambda: GPTQ(block=0), ValueError, "block must be"),
            (lambda: GPTQ(order=1), TypeError, "order must be"),
        ):
            with pytest.raises(error, match=said):
                call()
