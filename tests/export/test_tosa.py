"""Programs as .tosa files: TOSA's reference model gives the program's codes, tensor by tensor."""

import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import cli
from hop.export.targets import TFLITE, TOSA_1_0, TOSA_1_0_INT16
from hop.export.targets.tosa.file import File, decode, encode
from hop.export.targets.tosa.reference_model import PLACE, ReferenceModel
from hop.export.targets.tosa.scales import Scale, rescaled
from tests.support.tflite_chains import Chain
from tests.support.tflite_models import Layer, Network, Point, Weights, both, networks, wide, widened
from tests.support.tosa import needs_reference_model

pytestmark = needs_reference_model


def exported(model: nn.Module, *inputs: Tensor, target: Any = TOSA_1_0) -> Any:
    """The integer program of a model, whose ranges are found on the inputs first."""
    with torch.no_grad():
        model(*inputs)
    found = hop.export.to_integer(torch.export.export(model.eval(), inputs), target=target)
    assert not found.report.left, found.report
    return found.program


def compared(program: Any, *inputs: Tensor) -> int:
    """How many codes were compared, none of which differs; each call that gives codes has its tensor."""
    found = hop.export.verify(program, hop.export.to_tosa(program), inputs)
    assert found.first is None and not found.trials, str(found)
    rows = {name for row in found.rows for name in (row.a, row.b)}  # an output has the name of its alias in a
    calls = [n for n in program.graph.nodes if "hop_scaled_buffers" in str(n.target)]
    missing = [n for n in calls if n.name not in rows and "permute" not in str(n.args[0])]
    assert not missing, missing
    return sum(row.elements for row in found.rows)


class TestNetworks(unittest.TestCase):
    def check(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        assert compared(exported(model, x), x) > 50_000

    @parameterized.expand(["residual", "transformer"])
    @pytest.mark.quick(2)
    def test_every_tensor(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["digits", "separable", "mobilenet"])
    @pytest.mark.full
    def test_every_tensor_of_others(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["digits", "residual", "separable", "transformer"])
    @pytest.mark.quick(4)
    def test_activations_of_16_bits(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        assert compared(exported(widened(model), x, target=TOSA_1_0_INT16), x) > 50_000

    @pytest.mark.exhaustive
    def test_ten_million_codes(self) -> None:
        total = 0
        for bits, target in ((8, TOSA_1_0), (16, TOSA_1_0_INT16)):
            for name, (model, shape) in networks().items():
                torch.manual_seed(len(name) + bits)
                x = torch.randn(8 * shape[0], *shape[1:])
                total += compared(exported(model if bits == 8 else widened(model), x, target=target), x)
        self.assertGreater(total, 10_000_000)


class TestRandom(unittest.TestCase):
    """Programs of random operators, the same as for TFLite."""

    def check(self, seeds: range, bits: int = 8) -> int:
        total = 0
        for seed in seeds:
            chain = Chain(seed, resizes=True)
            x = torch.randn(chain.shape) * 2
            if bits == 16:
                chain = widened(chain)  # type: ignore[assignment]
            with self.subTest(seed=seed, bits=bits):
                total += compared(exported(chain, x, target=TOSA_1_0 if bits == 8 else TOSA_1_0_INT16), x)
        return total

    @pytest.mark.full
    def test_one(self) -> None:
        self.assertGreater(self.check(range(1)) + self.check(range(1), 16), 0)

    @pytest.mark.full
    def test_up_to_thirty(self) -> None:
        self.assertGreater(self.check(range(1, 30)) + self.check(range(1, 30), 16), 18_000)

    @pytest.mark.exhaustive
    def test_thousand(self) -> None:
        self.assertGreater(self.check(range(30, 1030)) + self.check(range(30, 1030), 16), 2_000_000)


class Step(nn.Module):
    """A function between two quantizations, of int8 or int16."""

    def __init__(self, function: Any, out: tuple[float, int], weight: Weights | None = None, bits: int = 8) -> None:
        super().__init__()
        self.function, self.out, self.weight, self.bits = function, out, weight, bits

    def forward(self, x: Tensor) -> Tensor:
        given = () if self.weight is None else (self.weight(), self.weight.bias)
        if self.bits == 16:
            return wide(self.function(wide(x, 1e-4), *given), self.out[0])
        return both(self.function(both(x, 0.031, -9), *given), *self.out)


IMAGE, ROWS = (2, 4, 9, 11), (5, 7, 6)
STEPS = {
    "strided": (IMAGE, (6, 4, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 2, 1)),
    "dilated": (IMAGE, (6, 4, 3, 2), lambda x, w, b: F.conv2d(x, w, b, 1, (2, 0), 2)),
    "grouped": (IMAGE, (6, 2, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 2)),
    "depthwise": (IMAGE, (8, 1, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 2, 0, 1, 4)),
    "transposed": (IMAGE, (4, 6, 3, 3), lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1)),
    "linear": (ROWS, (9, 6), F.linear),
    "relu6": (ROWS, (9, 6), lambda x, w, b: F.relu6(F.linear(x, w, b))),
    "average pool": (IMAGE, None, lambda x: F.avg_pool2d(x, 3, 2)),
    "padded average pool": (IMAGE, None, lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "maximum pool": (IMAGE, None, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "adaptive pool": ((2, 4, 6, 8), None, lambda x: F.adaptive_avg_pool2d(x, (3, 2))),
    "nearest": (IMAGE, None, lambda x: F.interpolate(x, scale_factor=(2, 3))),
    "bilinear": (IMAGE, None, lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bilinear")),
    "bilinear between": (IMAGE, None, lambda x: F.interpolate(x, (13, 7), mode="bilinear")),
    "bilinear, corners": (IMAGE, None, lambda x: F.interpolate(x, (17, 21), mode="bilinear", align_corners=True)),
    "mean": (IMAGE, None, lambda x: x.mean((1, 3))),
    "mean of all": (ROWS, None, lambda x: x.mean((0, 1, 2), True)),
    "every third": (ROWS, None, lambda x: x[:, 1:6:3]),
    "select": (ROWS, None, lambda x: x[:, 2]),
    "silu": (ROWS, None, F.silu),
    "gelu": (ROWS, None, F.gelu),
    "exp": (ROWS, None, torch.exp),
    "rows": (ROWS, (9, 7, 3), lambda x, w, b: F.conv1d(x, w, b, 2, 1)),
    "depthwise rows": (ROWS, (14, 1, 3), lambda x, w, b: F.conv1d(x, w, b, 1, 0, 2, 7)),
    "maximum of rows": (ROWS, None, lambda x: F.max_pool1d(x, 3, 2, 1)),
    "average of rows": (ROWS, None, lambda x: F.avg_pool1d(x, 2)),
    "adaptive rows": (ROWS, None, lambda x: F.adaptive_avg_pool1d(x, 3)),
    "broadcast": (ROWS, None, lambda x: x + x[0, 0] * x),
}


class TestOperators(unittest.TestCase):
    @parameterized.expand([((5, 2401), "needs 2401 parts"), ((40, 2), "a step of 40"), ((90, 1), "a border")])
    @pytest.mark.quick(3)
    def test_resizes_that_it_has_not(self, sizes: tuple[int, int], why: str) -> None:
        model = Step(
            lambda x: F.interpolate(x, (4, sizes[1]), mode="bilinear", align_corners=sizes[1] == 1), (0.031, -9)
        )
        program = exported(model, torch.randn(1, 2, 4, sizes[0]))
        with pytest.raises(NotImplementedError, match=f"RESIZE from {sizes[0]} to {sizes[1]} elements .*{why}.*use"):
            hop.export.to_tosa(program)

    @parameterized.expand([(name, bits) for name in STEPS for bits in (8, 16)])
    @pytest.mark.quick(8)
    def test_codes(self, name: str, bits: int) -> None:
        if (name, bits) == ("grouped", 16):
            pytest.skip("CONCAT has no 48-bit type")
        shape, weight, function = STEPS[name]
        torch.manual_seed(1)
        weights = None if weight is None else Weights(weight, per_channel=name != "transposed")
        if name == "transposed":
            assert weights is not None
            weights.bias = nn.Buffer(torch.randn(6))
        if name == "broadcast":
            function = _product_and_sum(bits)
        model = Step(function, (0.043, 5) if bits == 8 else (1.5e-4, 0), weights, bits)
        x = torch.randn(shape) * 3
        target = TOSA_1_0 if bits == 8 else TOSA_1_0_INT16
        assert compared(exported(model, x, target=target), x) > 0

    @pytest.mark.full
    def test_large_multipliers(self) -> None:
        """A multiplier above 1 has a small shift, and what a shift does not hold saturates in either case."""
        torch.manual_seed(2)
        weight = Weights((5, 64))
        weight.scales = nn.Buffer(torch.tensor([3.0, 1e-6, 40.0, 1e3, 1e-9]))
        x = torch.randn(40, 64) * 9
        for out in (1e-4, 1e-7, 30.0):
            compared(exported(Step(F.linear, (out, 7), weight), x), x)
        for out in (1e-4, 1e-9):
            compared(exported(Step(F.relu, (out, 7)), x), x)
            compared(exported(Step(lambda x: x.mean(1), (out, 7)), x), x)

    def test_long_rows(self) -> None:
        """Rows of softmax whose sums are 512 times the largest element and more."""
        torch.manual_seed(2)
        x = torch.cat([torch.randn(4, 2000) * spread for spread in (0.01, 0.1, 1.0, 9.0)])
        assert compared(exported(Step(lambda x: x.softmax(-1), (1 / 256, -128)), x), x) == x.numel()

    def test_gemmlowp(self) -> None:
        """Products that gemmlowp's way rounds twice are DOUBLE_ROUND."""
        torch.manual_seed(4)
        x = torch.randn(300, 3, 5, 5) * 2
        program = exported(Network(Layer(3, 8)), x, target=TFLITE)
        assert compared(program, x) > 50_000
        said = str(decode("test", hop.export.to_tosa(program).buffer, "model"))
        assert "DOUBLE_ROUND" in said

    def test_padding(self) -> None:
        """Programs that were read from .tflite files pad codes by themselves."""
        pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
        torch.manual_seed(3)
        x = torch.randn(1, 3, 20, 20)
        model = Network(Layer(3, 8, 7, stride=2, high=0.0), Layer(8, 8, 5, stride=3))
        file = hop.export.to_tflite(exported(model, x, target=TFLITE))
        program = hop.export.from_tflite(file, target=TOSA_1_0)
        assert "PAD" in str(decode("test", hop.export.to_tosa(program).buffer, "model"))
        assert compared(program, x) > 1_000

    def test_refusals(self) -> None:
        x = torch.randn(2, 6, 60)
        with pytest.raises(NotImplementedError, match=r"to_tosa: node '.*' \(aten.softmax.int\) cannot be converted"):
            hop.export.to_tosa(exported(Step(lambda x: x.softmax(1), (1 / 256, -128)), x))
        with pytest.raises(NotImplementedError, match="use the target TOSA_1_0"):
            hop.export.to_tosa(exported(Step(lambda x: x.mean(-1), (0.1, 0)), x, target=TFLITE))


def _product_and_sum(bits: int) -> Any:
    quantize = (lambda x: both(x, 0.05, 2)) if bits == 8 else (lambda x: wide(x, 2e-4))
    return lambda x: x + quantize(quantize(x[0, 0]) * x)


class TestRescale(unittest.TestCase):
    def test_against_integers(self) -> None:
        """RESCALE beside the specification's arithmetic, in Python's integers, of both roundings."""
        torch.manual_seed(0)
        numbers = torch.randint(-(2**22), 2**22, (2000,), dtype=torch.int32)
        for multiplier in (0.7, 1e-4, 3.3, 900.0):
            for rounding in ("SINGLE_ROUND", "DOUBLE_ROUND"):
                file = File()
                x = file.tensor("x", numbers.shape, torch.int32)
                y = file.tensor("y", numbers.shape, torch.int16)
                scale = Scale.number(torch.tensor(multiplier, dtype=torch.float64), rounding)
                rescaled(file, x, y, scale)
                reference = ReferenceModel("test", file.finish({"x": x}, {"y": y}), "file")
                found = reference.run({"x": numbers})["y"]
                ((m,), (right,)) = scale.mantissa, scale.right
                wanted = []
                for n in numbers.tolist():
                    n = max(-(2 ** (right - 1)), min(2 ** (right - 1) - 1, n))
                    more = (2**30 if n >= 0 else -(2**30)) if rounding == "DOUBLE_ROUND" and right > 31 else 0
                    wanted.append(max(-(2**15), min(2**15 - 1, (n * m + 2 ** (right - 1) + more) >> right)))
                assert found.tolist() == wanted, (multiplier, rounding)


class TestVerify(unittest.TestCase):
    def test_convention_is_found(self) -> None:
        """A program by another convention than the file's: the first node that differs is equal by the file's."""
        torch.manual_seed(2)
        x = torch.randn(4000, 16)
        model = Step(F.linear, (0.05, 0), Weights((24, 16)))
        file = hop.export.to_tosa(exported(model, x))
        found = hop.export.verify(exported(model, x, target=TFLITE), file, (x,))
        assert found.first is None  # TFLite's fully connected layers round once, too
        rule = hop.requantization.FixedPoint(rounding="gemmlowp")
        ours = hop.export.to_integer(torch.export.export(model, (x,)), requantize=rule).program
        found = hop.export.verify(ours, file, (x,))
        assert found.first is not None and found.first.operator.endswith("linear.default")
        assert "TOSA_1_0" in found.equal_with[0].targets and "equal by" in str(found)

    def test_command_line(self) -> None:
        x = torch.randn(6, 5)
        program = exported(Step(F.relu, (0.05, 0)), x)
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder, name)) for name in ("a.pt2", "a.tosa")]
            torch.export.save(program, files[0])
            hop.export.to_tosa(program).save(files[1])
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                status = cli.main(["verify", *files, "--json"])
            assert not status and json.loads(said.getvalue())["holds"]

    def test_bad_input(self) -> None:
        program = exported(Step(F.relu, (0.05, 0)), x := torch.randn(6, 5))
        model = hop.export.to_tosa(program)
        with pytest.raises(TypeError, match=r"to_tflite, to_tosa, to_qoperator, .* the path of such a file"):
            hop.export.verify(program, 3, (x,))
        with pytest.raises(ValueError, match="not a TOSA file"):
            decode("test", b"1234ABCDabc", "model")
        for damaged in (b"1234TOSAabc", model.buffer[: len(model.buffer) // 2]):
            with pytest.raises(ValueError, match="damaged TOSA file"):
                hop.export.verify(program, damaged, (x,))
        with mock.patch.dict(os.environ, {PLACE: "/nowhere"}), pytest.raises(ImportError, match="is /nowhere"):
            hop.export.verify(program, model, (x,))
        content = decode("test", model.buffer, "model")
        content["regions"][0]["blocks"][0]["operators"].pop()
        with pytest.raises(RuntimeError, match="the reference model stopped"):
            hop.export.verify(program, encode("test", content), (x,))
        with pytest.raises(RuntimeError, match="flatc"):
            encode("test", {"version": {"no_such_field": 1}})

    def test_two_inputs(self) -> None:
        class Two(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                x, y = both(x, 0.02, 3), both(y, 0.05, -7)
                return both(x + y, 0.06, 0), both(x * y, 0.08, 1)

        given = torch.randn(4, 5), torch.randn(4, 5)
        program = exported(Two(), *given)
        found = hop.export.verify(program, hop.export.to_tosa(program), given)
        assert found.first is None and len(found.outputs) == 2


def test_points_of_networks_are_new() -> None:
    """Networks are made anew by each call: widening one leaves the others."""
    assert all(m.bits == 8 for m in networks()["digits"][0].modules() if isinstance(m, Point))
