# pyright: reportMissingImports=false
"""Biases that the integer sum of a product does not hold: a larger scale of the weight, or an error that says where."""

import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import ONNX_INTEGER, PT2E, TFLITE, TFLITE_16X8, TFLITE_MICRO, TOSA_1_0, TOSA_1_0_INT16
from hop.export.targets.integer.arguments import bias_codes
from hop.export.targets.integer.steps import Weight
from hop.export.targets.integer.values import Codes
from tests.support.tflite_models import both, qd, wide

INTEGERS = {t.name: t for t in (TFLITE, TFLITE_MICRO, TOSA_1_0, ONNX_INTEGER)}
OF_16_BITS = {t.name: t for t in (TFLITE_16X8, TOSA_1_0_INT16)}
OUT = 0.05


class Product(nn.Module):
    """A product of codes with a bias, in int8 or, with `points=wide`, in int16."""

    def __init__(self, function: Any, codes: Any, scales: Any, bias: Any, *, dim: int = 0, scale: float = 0.02) -> None:
        super().__init__()
        self.function, self.dim, self.scale, self.is_wide = function, dim, scale, False
        self.codes = nn.Buffer(torch.as_tensor(codes, dtype=torch.int8))
        self.scales = scales if isinstance(scales, float) else nn.Buffer(torch.tensor(scales))
        self.zeros = nn.Buffer(torch.zeros(self.codes.shape[dim], dtype=torch.int64))
        self.bias = nn.Buffer(torch.as_tensor(bias, dtype=torch.float32))

    def weight(self) -> Tensor:
        if isinstance(self.scales, float):
            return qd.dequantize_per_tensor(self.codes, self.scales, 0, -127, 127, torch.int8)
        return qd.dequantize_per_channel(self.codes, self.scales, self.zeros, self.dim, -127, 127, torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x, self.scale) if self.is_wide else both(x, self.scale, 3)
        y = self.function(x, self.weight(), self.bias)
        return wide(y, OUT / 256) if self.is_wide else both(y, OUT, 0)


def program_of(model: nn.Module, x: Tensor, **given: Any) -> Any:
    return hop.export.to_integer(torch.export.export(model.eval(), (x,)), **given)


def steps_apart(model: Product, x: Tensor, target: Any) -> float:
    """How far the program is from the floats that it comes from, in steps of the result."""
    return steps_between(program_of(model, x, target=target).program.module()(x), model, x)


def steps_between(got: Tensor, model: Product, x: Tensor) -> float:
    return float(((got - model(x)).abs() / (OUT / 256 if model.is_wide else OUT)).max())


def dead(shape: tuple[int, ...], dim: int, generator: torch.Generator) -> Tensor:
    """Codes of a weight whose channel 1 is zero."""
    codes = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    codes.select(dim, 1).zero_()
    return codes


CALLS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], int]] = {
    "linear": (F.linear, (5, 8), (4, 8), 0),
    "conv2d": (F.conv2d, (2, 3, 6, 6), (4, 3, 3, 3), 0),
    "depthwise": (lambda *a: F.conv2d(*a, groups=4), (2, 4, 6, 6), (4, 1, 3, 3), 0),
    "conv1d": (F.conv1d, (2, 3, 9), (4, 3, 3), 0),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 5, 5), (3, 4, 3, 3), 1),
}


class TestDeadChannels(unittest.TestCase):
    @parameterized.expand([(name, target) for name in CALLS for target in INTEGERS])
    @pytest.mark.quick(24)
    def test_keep_their_bias(self, name: str, target: str) -> None:
        if name == "conv_transpose2d" and target == "ONNX_INTEGER":
            self.skipTest("onnxruntime has no transposed convolution of integers")
        function, of_x, shape, dim = CALLS[name]
        generator = torch.Generator().manual_seed(5)
        x, codes = torch.randn(of_x, generator=generator), dead(shape, dim, generator)
        for scale in (1e-3, 2.0**-23, 1e-9, 1e-30, 1e-38):
            model = Product(function, codes, [1e-3, scale, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0], dim=dim)
            y = program_of(model, x, target=INTEGERS[target]).program.module()(x)
            assert steps_between(y, model, x) < 1.01, scale
            assert torch.equal(y.select(1, 1), torch.full_like(y.select(1, 1), 3.0)), scale

    @parameterized.expand([(name,) for name in OF_16_BITS])
    @pytest.mark.full
    def test_of_16_bits(self, name: str) -> None:
        for function, of_x, shape, dim in (CALLS["linear"], CALLS["conv2d"]):
            generator = torch.Generator().manual_seed(5)
            x, codes = torch.randn(of_x, generator=generator), dead(shape, dim, generator)
            model = Product(function, codes, [1e-3, 1e-30, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0], scale=1e-4)
            model.is_wide = True
            assert steps_apart(model, x, OF_16_BITS[name]) < 1.01

    @pytest.mark.full
    def test_all_channels_by_one_scale(self) -> None:
        x = torch.randn(5, 8)
        for target in INTEGERS.values():
            model = Product(F.linear, torch.zeros(4, 8), 1e-12, [1.0, 3.0, -2.0, 0.0])
            assert torch.equal(program_of(model, x, target=target).program.module()(x), model(x))

    def test_addmm_by_a_convention(self) -> None:
        def addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.addmm(bias, x, weight.t())

        x, codes = torch.randn(5, 8), dead((4, 8), 0, torch.Generator().manual_seed(1))
        model = Product(addmm, codes, [1e-3, 1e-12, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0])
        got = program_of(model, x, requantize=hop.requantization.TFLITE).program.module()(x)
        assert float((got - model(x)).abs().max()) <= OUT + 1e-6

    @pytest.mark.full
    def test_report(self) -> None:
        x, codes = torch.randn(5, 8), dead((4, 8), 0, torch.Generator().manual_seed(1))
        rows = []
        for scale in (1e-3, 1e-12):
            model = Product(F.linear, codes, [1e-3, scale, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0])
            rows += program_of(model, x, target=TFLITE).report.rows
        assert [row.detail.endswith("a larger scale, for the bias") for row in rows] == [False, True]

    def test_two_results_of_one_product(self) -> None:
        class Two(Product):
            def forward(self, x: Tensor) -> Any:
                y = F.linear(both(x, self.scale, 3), self.weight(), self.bias)
                return both(y, OUT, 0), both(y, OUT * 2, 5)

        x, codes = torch.randn(5, 8), dead((4, 8), 0, torch.Generator().manual_seed(1))
        model = Two(F.linear, codes, [1e-3, 1e-12, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0])
        got = program_of(model, x, target=TFLITE).program.module()(x)
        for own, want, step in zip(got, model(x), (OUT, OUT * 2), strict=True):
            assert float((own - want).abs().max()) <= step + 1e-6


class TestTinyChannels(unittest.TestCase):
    def test_divisible_codes_change_nothing(self) -> None:
        """Codes of 64 and -64 stay the same numbers by a larger scale, however large they are."""
        x = torch.randn(64, 4)
        model = Product(F.linear, [[64, -64, 0, 64]] * 2, [1e-3, 1e-3], [1e5, -1.0])
        result = program_of(model, x, target=TFLITE)
        assert result.report.rows[0].detail.endswith("for the bias")
        held = [t for t in result.program.constants.values() if isinstance(t, Tensor) and t.dtype == torch.int8]
        scales = [t for t in result.program.constants.values() if isinstance(t, Tensor) and t.shape == (2,)]
        (codes,), (scales,) = held, [s for s in scales if s.dtype == torch.float32 and float(s.max()) < 1]
        assert torch.equal(codes * scales[:, None], model.weight()) and scales[0] > scales[1]
        assert torch.equal(result.program.module()(x), model(x))

    @pytest.mark.full
    def test_weights_far_below_a_step(self) -> None:
        x, generator = torch.randn(64, 32), torch.Generator().manual_seed(2)
        codes = torch.randint(-127, 128, (2, 32), dtype=torch.int8, generator=generator)
        model = Product(F.linear, codes, [1e-3, 2.0**-23], [0.5, 6.0])
        assert steps_apart(model, x, TFLITE) < 1.01
        assert torch.equal(program_of(model, x, target=TFLITE).program.module()(x)[:, 1], model(x)[:, 1])

    @pytest.mark.full
    def test_up_to_the_last_unit(self) -> None:
        """A sum that int32 just holds leaves the weight alone; with 127 more it does not fit."""
        unit, reach = 2.0**-16, 131 * (127 + 1)  # codes of the input are at most 131 off their zero point 3
        for more, is_larger in ((0, False), (127, True)):
            steps = 2**31 - 1 - reach + more  # float32 does not hold it: rounded down to a multiple of 128
            bias = torch.tensor(float(steps // 128 * 128) * unit)
            model = Product(F.linear, [[127, 1], [1, 1]], [2.0**-8] * 2, [float(bias), 0.0], scale=2.0**-8)
            changed = program_or_error(model, torch.randn(3, 2))
            assert isinstance(changed, str) == is_larger, (more, changed)


def program_or_error(model: nn.Module, x: Tensor) -> Any:
    try:
        return program_of(model, x, target=TFLITE)
    except ValueError as error:
        return str(error)


class TestRefused(unittest.TestCase):
    @parameterized.expand([(name,) for name in INTEGERS])
    @pytest.mark.quick(4)
    def test_names_what_is_wrong(self, name: str) -> None:
        codes = torch.randint(100, 128, (3, 8), dtype=torch.int8)
        codes[0, 0] = 101
        x, target = torch.randn(5, 8), INTEGERS[name]
        model = Product(F.linear, codes, [1e-3, 1e-3, 1e-3], [0.0, 1.0, -1e6])
        words = (
            rf"node 'linear' \(aten.linear.default\).*{name}.*the bias -1e\+06 of channel 2 is 5e\+10 units.*"
            r"2147\d{6} fit.*the input's scale 0.02 times the weight's 0.001.*larger scale.*bias of 4.295e\+04 at most"
        )
        with self.assertRaisesRegex(ValueError, words):
            program_of(model, x, target=target)
        assert program_of(model, x, target=PT2E).program.module()(x)[0, 2] == model(x)[0, 2]

    @parameterized.expand([(float("nan"),), (float("inf"),)])
    @pytest.mark.quick(2)
    def test_no_number(self, bias: float) -> None:
        model = Product(F.linear, [[0, 0], [1, 2]], [1e-3, 1e-3], [bias, 0.0])
        with self.assertRaisesRegex(ValueError, f"the bias {bias} of channel 0"):
            program_of(model, torch.randn(3, 2), target=TFLITE)

    def test_writers_clip_nothing(self) -> None:
        """Of a program that to_integer did not write."""
        codes, weight = Codes("x", (3, 4), 0.1, 0), Weight("w", torch.ones(2, 4, dtype=torch.int8), torch.tensor([0.1]))
        assert bias_codes(codes, weight, torch.tensor([0.04, -1e7]))[0] == 4
        with self.assertRaisesRegex(NotImplementedError, "the bias 1e\\+08 of channel 1 is"):
            bias_codes(codes, weight, torch.tensor([0.0, 1e8]))

    @pytest.mark.full
    def test_vectors_keep_every_step(self) -> None:
        """A bias beside codes of 16 bits may have more steps than int32 holds."""
        model = Product(F.linear, [[1, 2], [0, 0]], [1e-3, 2.0**-23], [1.0, 3.0], scale=1e-4)
        model.is_wide = True
        program = program_of(model, torch.randn(3, 2), target=TFLITE_16X8).program
        with tempfile.TemporaryDirectory() as folder:
            hop.export.vectors(program, folder, (torch.randn(3, 2),))
            steps = [a["bias.steps"] for f in Path(folder).glob("*.npz") if "bias.steps" in (a := np.load(f))]
        unit = float(torch.tensor(1e-4)) * 2.0**-23
        assert [int(n.max()) for n in steps] == [round(3.0 / unit)]


class TestRuntimes(unittest.TestCase):
    """What the runtimes compute of a dead channel."""

    def setUp(self) -> None:
        self.x, codes = torch.randn(5, 8), dead((4, 8), 0, torch.Generator().manual_seed(1))
        self.model = Product(F.linear, codes, [1e-3, 1e-12, 2e-3, 1e-3], [1.0, 3.0, -2.0, 0.0])

    @parameterized.expand([("reference",), ("micro",)])
    @pytest.mark.quick(2)
    def test_tflite(self, kernels: str) -> None:
        pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
        if kernels == "micro":
            pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        target = TFLITE_MICRO if kernels == "micro" else TFLITE
        program = program_of(self.model, self.x, target=target).program
        found = hop.export.verify(program, hop.export.to_tflite(program), (self.x,), kernels=kernels)
        assert found.first is None, str(found)

    def test_onnxruntime(self) -> None:
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
        program = program_of(self.model, self.x, target=ONNX_INTEGER).program
        model = hop.export.to_qoperator(program, weights=torch.int8)
        found = hop.export.verify(program, model, (self.x,))
        assert found.first is None, str(found)
