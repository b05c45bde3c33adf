"""What the kernels of TFLite and TensorFlow Lite Micro ignore or refuse, to_integer refuses, and names the node."""

import json
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE, TFLITE_16X8, TFLITE_MICRO, TFLITE_MICRO_16X8, Limits, Target
from hop.export.verifying import TARGETS
from tests.support.tflite_models import both, qd, wide


class Function(nn.Module):
    """A function of codes of int8, or of int16 without zero points."""

    def __init__(self, function: Any, scale: float, *result: float) -> None:
        super().__init__()
        self.function, self.scale, self.result = function, scale, result

    def forward(self, *inputs: Tensor) -> Tensor:
        if len(self.result) == 1:
            return wide(self.function(*(wide(x, self.scale) for x in inputs)), *self.result)
        return both(self.function(*(both(x, self.scale, 5) for x in inputs)), *self.result)  # type: ignore[arg-type]


def program_of(model: nn.Module, inputs: tuple[Tensor, ...], target: Target) -> Any:
    return hop.export.to_integer(torch.export.export(model.eval(), inputs), target=target).program


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


_BYTE, _TANH, _WIDE = (1 / 256, -128), (1 / 128, 0), (2.0**-15,)
FIXED: dict[str, tuple[Any, tuple[Target, ...], tuple[float, ...]]] = {
    "sigmoid": (torch.sigmoid, (TFLITE, TFLITE_MICRO), _BYTE),
    "softmax": (softmax, (TFLITE, TFLITE_MICRO), _BYTE),
    "tanh": (torch.tanh, (TFLITE_MICRO,), _TANH),
    "sigmoid of 16 bits": (torch.sigmoid, (TFLITE_16X8, TFLITE_MICRO_16X8), _WIDE),
    "tanh of 16 bits": (torch.tanh, (TFLITE_16X8, TFLITE_MICRO_16X8), _WIDE),
    "softmax of 16 bits": (softmax, (TFLITE_16X8,), _WIDE),
}


class TestUnits(unittest.TestCase):
    """Functions whose kernels give codes of one scale and zero point."""

    @parameterized.expand([(name,) for name in FIXED])
    @pytest.mark.quick(6)
    def test_only_the_kernels(self, name: str) -> None:
        function, targets, units = FIXED[name]
        x = torch.randn(3, 8)
        scale, *zero = units
        others = [(scale * 1.28, *zero), (scale / 2, *zero)] + [(scale, z + 10) for z in zero]
        for target in targets:
            program_of(Function(function, 0.03, *units), (x,), target)
            for other in others:
                unit = f"scale 1/{round(1 / scale)} and zero point"
                words = rf"node '{name.split()[0]}'.*{unit}.*but the result has {other[0]:.6g}"
                with self.assertRaisesRegex(ValueError, words):
                    program_of(Function(function, 0.03, *other), (x,), target)

    @pytest.mark.full
    def test_what_tflm_ignores(self) -> None:
        """LiteRT's TANH of int8 gives codes of any scale, TFLM's of 1/128 alone."""
        pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
        pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        x = (torch.arange(-128, 128) - 5).float()[None] * 0.03
        for units in ((1 / 128, 0), (0.01, 0), (1 / 128, 10)):
            program = program_of(Function(torch.tanh, 0.03, *units), (x,), TFLITE)
            model = hop.export.to_tflite(program)
            assert hop.export.verify(program, model, (x,), kernels="reference").first is None
            is_equal = hop.export.verify(program, model, (x,), kernels="micro").first is None
            assert is_equal == (units == (1 / 128, 0)), units


class TestScales(unittest.TestCase):
    @parameterized.expand(
        [(t.name, n) for t in (TFLITE, TFLITE_MICRO, TFLITE_16X8, TFLITE_MICRO_16X8) for n in ("add", "sub")]
    )
    @pytest.mark.quick(9)
    def test_of_sums(self, target: str, name: str) -> None:
        """The kernels check that the last multiplier, twice the larger scale over 2^20 of the result's, is below 1."""
        function = getattr(torch, name)
        of_16_bits = target.endswith("16X8")
        room, zero = (2.0**15, ()) if of_16_bits else (2.0**20, (0,))
        inputs, scale = (torch.randn(4, 8), torch.randn(4, 8)), 2.0**-4
        least = 2 * scale / room
        for finer in (least, least / 2, 2.0**-23 if not of_16_bits else 2.0**-30):
            with self.assertRaisesRegex(ValueError, rf"node '{name}'.*scale {finer:.6g} of its result is too small"):
                program_of(Function(function, scale, finer, *zero), inputs, getattr(hop.export.targets, target))
        model = Function(function, scale, float(torch.tensor(least) * (1 + 2.0**-20)), *zero)
        y = program_of(model, inputs, getattr(hop.export.targets, target)).module()(*inputs)
        assert float((y - model(*inputs)).abs().max()) <= 2 * least  # all at an end of the range, or 0

    @parameterized.expand([(TFLITE_16X8.name, 2.0**7), (TFLITE_MICRO_16X8.name, 2.0**7), ("TOSA_1_0_INT16", 2.0**13)])
    @pytest.mark.quick(3)
    def test_of_wide_products(self, target: str, most: float) -> None:
        class Convolution(nn.Module):
            def __init__(self, out: float) -> None:
                super().__init__()
                self.codes, self.out = nn.Buffer(torch.randint(-127, 128, (3, 2, 1, 1), dtype=torch.int8)), out

            def forward(self, x: Tensor) -> Tensor:
                weight = qd.dequantize_per_tensor.default(self.codes, 2.0**-7, 0, -127, 127, torch.int8)
                return wide(F.conv2d(wide(x, 2.0**-10), weight), self.out)

        x, own = torch.randn(2, 2, 3, 3), getattr(hop.export.targets, target)
        with self.assertRaisesRegex(ValueError, "node 'conv2d'.*of its result is too small"):
            program_of(Convolution(2.0**-17 / most), (x,), own)
        model = Convolution(2.0**-17 / most * 2)
        y = program_of(model, (x,), own).module()(x)
        assert float((y - model(x)).abs().max()) <= model.out


CALLS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "cat": (lambda x: torch.cat([x] * 11), (2, 3), "supports at most 10 operands, got 11"),
    "permute": (lambda x: x.permute(5, 4, 3, 2, 1, 0), (1, 2, 1, 2, 1, 3), "supports at most 5 dimensions, got 6"),
    "slice": (lambda x: x[:, :, :, :, 1:], (2, 1, 2, 1, 3), "supports at most 4 dimensions, got 5"),
    "select": (lambda x: x.select(4, 1), (2, 1, 2, 1, 3), "supports at most 4 dimensions, got 5"),
}


class TestZeroPoints(unittest.TestCase):
    @pytest.mark.full
    def test_that_are_no_codes(self) -> None:
        """PyTorch computes with them; int8, in which they are stored, would hold other numbers."""

        class Both(nn.Module):
            def __init__(self, first: int, second: int, by_nodes: bool) -> None:
                super().__init__()
                self.zeros, self.by_nodes = (first, second), by_nodes
                self.held = nn.ParameterList([nn.Parameter(torch.tensor(z), False) for z in self.zeros])
                self.scale = nn.Buffer(torch.tensor(0.1, dtype=torch.float64))

            def code(self, x: Tensor, i: int) -> Tensor:
                if not self.by_nodes:
                    return both(x, 0.1, self.zeros[i])
                given = (self.scale, self.held[i], -128, 127, torch.int8)
                return qd.dequantize_per_tensor.tensor(qd.quantize_per_tensor.tensor(x, *given), *given)

            def forward(self, x: Tensor) -> Tensor:
                return self.code(torch.relu(self.code(x, 0)), 1)

        x, words = torch.randn(3, 8), "node '(de)?quantize_per_tensor.*has the zero point (200|-129)"
        for by_nodes in (False, True):
            for zeros in ((200, 0), (0, -129)):
                program = torch.export.export(Both(*zeros, by_nodes), (x,))
                for target in (None, TFLITE):
                    with self.assertRaisesRegex(ValueError, words):
                        hop.export.to_integer(program, target=target)
            hop.export.to_integer(torch.export.export(Both(-128, 127, by_nodes), (x,)), target=TFLITE)


class TestSizes(unittest.TestCase):
    @parameterized.expand([(name,) for name in CALLS])
    @pytest.mark.quick(4)
    def test_of_tflm(self, name: str) -> None:
        function, shape, words = CALLS[name]
        x = torch.randn(shape)
        for target, result in ((TFLITE_MICRO, (0.05, 0)), (TFLITE_MICRO_16X8, (0.001,))):
            with self.assertRaisesRegex(ValueError, f"node '{name}.*{words}"):
                program_of(Function(function, 0.03, *result), (x,), target)

    @parameterized.expand([("cat",), ("slice",), ("select",)])
    @pytest.mark.quick(3)
    def test_tflm_refuses_them(self, name: str) -> None:
        pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
        pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        function, shape, _ = CALLS[name]
        x = torch.randn(shape)
        program = program_of(Function(function, 0.03, 0.05, 0), (x,), TFLITE)
        model = hop.export.to_tflite(program)
        assert hop.export.verify(program, model, (x,), kernels="reference").first is None
        with self.assertRaisesRegex(ValueError, "TFLM does not accept model"):
            hop.export.verify(program, model, (x,), kernels="micro")

    @pytest.mark.full
    def test_as_many_as_it_takes(self) -> None:
        x = torch.randn(2, 3)
        program_of(Function(lambda x: torch.cat([x] * 10), 0.03, 0.05, 0), (x,), TFLITE_MICRO)
        program_of(Function(lambda x: x[:, :, :, 1:], 0.03, 0.05, 0), (torch.randn(2, 1, 2, 3),), TFLITE_MICRO)

    def test_a_6_beyond_all_codes(self) -> None:
        """TFLM refuses a RELU6 whose 6 is no code; a RELU gives the same codes."""
        pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
        pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        x = torch.randn(2, 3, 4, 4)
        model = Function(lambda x: F.relu6(F.max_pool2d(x, 2)), 0.03, 0.02, -20)
        program = program_of(model, (x,), TFLITE_MICRO)
        found = hop.export.verify(program, hop.export.to_tflite(program), (x,), kernels="micro")
        assert found.first is None, str(found)


class TestValues(unittest.TestCase):
    def test_saved_and_loaded(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for target in TARGETS:
                target.save(Path(folder) / "target.json")
                assert Target.load(Path(folder) / "target.json") == target
            rows = json.loads((Path(folder) / "target.json").read_text())["rows"]
            assert all("limits" not in row for row in rows)  # those of ONNX_INTEGER have none: earlier versions read it

    @pytest.mark.full
    def test_of_ones_own(self) -> None:
        row = replace(TFLITE["tanh.default"], limits=Limits(units=(0.5, 1)))
        own = replace(TFLITE, name="OWN", rows=(row,))
        program_of(Function(torch.tanh, 0.03, 0.5, 1), (torch.randn(3, 8),), own)
        with self.assertRaisesRegex(
            ValueError, "target OWN does not support: its kernel always returns codes of scale 1/2"
        ):
            program_of(Function(torch.tanh, 0.03, 1 / 128, 0), (torch.randn(3, 8),), own)

    def test_no_limits(self) -> None:
        for given in (
            {"units": (0.0, 0)},
            {"units": (0.5, 1.5)},
            {"rank": 2.5},
            {"operands": True},
            {"multiplier": -1},
        ):
            with self.assertRaisesRegex(ValueError, "Limits: "):
                Limits(**given)  # type: ignore[arg-type]
