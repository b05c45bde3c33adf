"""Programs as .tflite files: LiteRT's reference kernels give the program's codes, tensor by tensor."""

import itertools
import unittest
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export import targets
from hop.export.targets import TFLITE
from hop.export.targets.tflite import TfliteModel, to_tflite
from hop.export.targets.tflite.reading import read_graph

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from tests.support.tflite_chains import Chain
from tests.support.tflite_models import Point, Step, Weights, both, codes_of, differences, networks, run, widened


def exported(model: nn.Module, *inputs: Tensor, target: Any = TFLITE) -> Any:
    """The integer program of a model, whose ranges are found on the inputs first."""
    with torch.no_grad():
        model(*inputs)
    program = torch.export.export(model.eval(), inputs)
    return hop.export.to_integer(program, target=target).program


def compared(program: Any, *inputs: Tensor) -> tuple[TfliteModel, dict[str, tuple[int, int]]]:
    """The file of a program, and how many codes differ, node by node."""
    model, codes = to_tflite(program), codes_of(program, *inputs)
    names = [n.name for n in program.graph.nodes if n.op == "placeholder"][-len(inputs) :]
    quantized = {}
    for node in program.graph.nodes:
        if "hop_quantize_buffers" in str(node.target) and node.args[1].name in names:
            quantized[node.args[1].name] = codes[node.name]
    return model, differences(model, codes, run(model, quantized))


def assert_equal(counts: dict[str, tuple[int, int]], at_least: int = 1) -> None:
    wrong = {n: c for n, c in counts.items() if c[0]}
    assert not wrong, wrong
    assert len(counts) >= at_least and sum(size for _, size in counts.values()) > 0


class TestNetworks(unittest.TestCase):
    @parameterized.expand(["residual", "transformer"])
    @pytest.mark.quick(2)
    def test_every_tensor(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["digits", "separable", "mobilenet"])
    @pytest.mark.full
    def test_every_tensor_of_others(self, name: str) -> None:
        self.check(name)

    def check(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        program = exported(model, x)
        _, counts = compared(program, x)
        assert_equal(counts, 8)


TRANSPOSED = {  # kernel, stride, padding, output_padding: those of SAME, and those of which the middle is taken
    "valid": (3, 2, 0, 0),
    "same": (4, 2, 1, 0),
    "same of one more": (2, 2, 0, 0),
    "middle": (3, 2, 1, 1),
    "middle by sides": ((4, 5), (2, 3), (1, 2), (0, 2)),
    "stride 1": (3, 1, 1, 0),
    "gaps": (2, 3, 0, 0),
    "beyond the last window": (3, 2, 0, 1),
    "beyond, by sides": ((3, 2), (3, 2), (1, 0), (2, 1)),
}


BILINEAR: dict[str, Any] = {
    "twice": {"scale_factor": 2},
    "by_three_and_two": {"scale_factor": (3, 2)},
    "between": {"size": (10, 13)},
    "smaller": {"size": (3, 5)},
    "same": {"size": (7, 8)},
    "one_row": {"size": (1, 8)},
    "large": {"size": (40, 57)},
}


ROWS: dict[str, Any] = {
    "convolution": ((6, 4, 3), lambda x, w, b: F.conv1d(x, w, b, 2, 1)),
    "dilated": ((6, 4, 3), lambda x, w, b: F.relu6(F.conv1d(x, w, b, 1, 2, 2))),
    "depthwise": ((8, 1, 3), lambda x, w, b: F.conv1d(x, w, b, 1, 1, 1, 4)),
    "grouped": ((6, 2, 4), lambda x, w, b: F.conv1d(x, w, b, 3, 0, 1, 2)),
    "average": (None, lambda x: F.avg_pool1d(x, 3, 2)),
    "padded average": (None, lambda x: F.avg_pool1d(x, 3, 1, 1, False, False)),
    "maximum": (None, lambda x: F.max_pool1d(x, 3, 2, 1)),
    "adaptive": (None, lambda x: F.adaptive_avg_pool1d(x, 5)),
    "same": ((6, 4, 4), lambda x, w, b: F.conv1d(x, w, b, padding="same", dilation=2)),
    "counted padding": (None, lambda x: F.avg_pool1d(x, 3, 2, 1)),
    "sum": ((4, 4, 3), lambda x, w, b: both(F.conv1d(x, w, b, 1, 1), 0.05, 3) + x),
}


class Keywords(nn.Module):
    """A network of one dimension: convolutions, a sum, pools, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.ModuleList(Point() for _ in range(8))
        self.weights = nn.ModuleList(Weights(s) for s in ((8, 3, 5), (8, 1, 3), (8, 8, 1), (4, 8)))

    def forward(self, x: Tensor) -> Tensor:
        first, deep, point, head = self.weights
        x = self.points[0](x)
        x = self.points[1](F.conv1d(x, first(), first.bias, 2, 2).relu())
        y = self.points[2](F.conv1d(x, deep(), deep.bias, 1, 1, 1, 8).relu())
        x = self.points[4](x + self.points[3](F.conv1d(y, point(), point.bias)))
        x = self.points[6](self.points[5](F.max_pool1d(x, 2)).mean(-1))
        return self.points[7](F.linear(x, head(), head.bias))


class TestRows(unittest.TestCase):
    """Convolutions and pools of one dimension."""

    @parameterized.expand(ROWS)
    @pytest.mark.quick(4)
    def test_codes(self, name: str) -> None:
        torch.manual_seed(5)
        weight, function = ROWS[name]
        x = torch.randn(3, 4, 15) * 2
        made, counts = compared(program := exported(Step(function, (0.06, -9), weight and Weights(weight)), x), x)
        assert_equal(counts)
        assert torch.equal(hop.export.from_tflite(made.buffer).module()(x), program.module()(x))

    @parameterized.expand(["TFLITE", "TFLITE_MICRO", "TFLITE_16X8"])
    @pytest.mark.full
    def test_network(self, target: str) -> None:
        kernels = "micro" if target == "TFLITE_MICRO" else "reference"
        if kernels == "micro":
            pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        torch.manual_seed(6)
        model, x = Keywords(), torch.randn(4, 3, 80)
        program = exported(widened(model) if target == "TFLITE_16X8" else model, x, target=getattr(targets, target))
        found = hop.export.verify(program, to_tflite(program), (x,), kernels=kernels)
        assert found.first is None and len(found.rows) == 7, str(found)

    @pytest.mark.full
    def test_between_layouts(self) -> None:
        """Convolutions and sums that follow each other are not transposed in between."""
        torch.manual_seed(6)
        x = torch.randn(4, 3, 80)
        graph = read_graph("test", to_tflite(exported(Keywords(), x)).buffer)
        names = [operator.name for operator in graph.operators]
        assert names.count("CONV_2D") == 2 and names.count("TRANSPOSE") == 2, names

    def test_without_a_batch(self) -> None:
        with pytest.raises(NotImplementedError, match="must be batched"):
            x = torch.randn(4, 15)
            to_tflite(exported(Step(lambda x: F.avg_pool1d(x, 3), (0.06, -9)), x))


PICTURES: dict[str, Any] = {
    "same": ((4, 6, 3, 4), lambda x, w, b: F.conv2d(x, w, b, padding="same")),
    "same, dilated": ((4, 6, 2, 3), lambda x, w, b: F.conv2d(x, w, b, padding="same", dilation=(3, 2)).relu()),
    "same, depthwise": ((6, 1, 5, 3), lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=6)),
    "valid": ((4, 6, 3, 3), lambda x, w, b: F.conv2d(x, w, b, padding="valid")),
    "counted padding": (None, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "counted padding of one side": (None, lambda x: F.avg_pool2d(x, (3, 4), 1, (0, 2))),
    "pool padded on one side": (None, lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 0)), 3, 2)),
}
FUNCTIONS: dict[str, Any] = {
    "silu": F.silu,
    "hardsigmoid": F.hardsigmoid,
    "cos": torch.cos,
    "erf": torch.erf,
    "log, bounded": lambda x: torch.log(x).relu(),
}


class TestPictures(unittest.TestCase):
    """Convolutions and pools of two dimensions with padding."""

    @parameterized.expand(itertools.product(PICTURES, ("TFLITE", "TFLITE_MICRO")))
    @pytest.mark.quick(2)
    def test_codes(self, name: str, target: str) -> None:
        kernels = "micro" if target == "TFLITE_MICRO" else "reference"
        if kernels == "micro":
            pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        torch.manual_seed(5)
        weight, function = PICTURES[name]
        model, x = Step(function, (0.06, -9), weight and Weights(weight)), torch.randn(2, 6, 9, 8) * 2
        program = exported(model, x, target=getattr(targets, target))
        found = hop.export.verify(program, to_tflite(program), (x,), kernels=kernels)
        assert found.first is None and found.rows, str(found)
        assert len(torch.unique(program.module()(x))) > 2


class TestTables(unittest.TestCase):
    """Functions that LiteRT has no integer operator for."""

    @parameterized.expand(FUNCTIONS)
    @pytest.mark.quick(3)
    def test_codes(self, name: str) -> None:
        torch.manual_seed(5)
        x = torch.randn(2, 3, 5, 7) * 3
        program = exported(Step(FUNCTIONS[name], (0.03, -9)), x)
        made, counts = compared(program, x)
        assert_equal(counts)
        names = [operator.name for operator in read_graph("test", made.buffer).operators]
        assert "GATHER" in names, names
        assert len(torch.unique(program.module()(x))) > 2
        back = hop.export.from_tflite(made)
        assert torch.equal(back.module()(x), program.module()(x))
        again = read_graph("test", hop.export.to_tflite(back).buffer).operators
        assert [operator.name for operator in again] == names

    def test_refused(self) -> None:
        x = torch.randn(2, 5)
        with pytest.raises(ValueError, match=r"TFLITE_16X8 has no row for aten.silu.default"):
            exported(widened(Step(F.silu, (0.03, 0))), x, target=targets.TFLITE_16X8)


class Larger(nn.Module):
    """A function of a weight, between ranges that are found on the inputs."""

    def __init__(self, function: Any, weight: Weights) -> None:
        super().__init__()
        self.function, self.weight, self.first, self.last = function, weight, Point(), Point()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), self.weight(), self.weight.bias))


class TestLarger(unittest.TestCase):
    """Pictures that grow, written and read."""

    def check(self, function: Any, weight: Weights | None = None, out: tuple[float, int] = (0.06, -9)) -> Any:
        torch.manual_seed(5)
        x = torch.randn(2, 6, 7, 8) * 2
        program = exported(Step(function, out, weight), x)
        made, counts = compared(program, x)
        assert_equal(counts)
        back = hop.export.from_tflite(made.buffer)
        assert torch.equal(back.module()(x), program.module()(x))
        return program

    @parameterized.expand([(n.replace(" ", "_"), v) for n, v in TRANSPOSED.items()])
    @pytest.mark.quick(9)
    def test_transposed_convolution(self, _name: str, given: Any) -> None:
        kernel, stride, padding, more = given
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        for per_channel in (True, False):
            weight = Weights((6, 4, *size), per_channel, channel=1)
            program = self.check(lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, more).relu(), weight)
            assert "conv_transpose2d" in str(program.graph)

    @parameterized.expand([("micro", "TFLITE_MICRO"), ("wide", "TFLITE_16X8"), ("micro_wide", "TFLITE_MICRO_16X8")])
    @pytest.mark.full
    def test_other_targets(self, name: str, target: str) -> None:
        kernels = "micro" if name.startswith("micro") else "reference"
        if kernels == "micro":
            pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        functions = (
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
            lambda x, w, b: F.interpolate(x, scale_factor=2),
            *[lambda x, w, b: F.interpolate(x, (9, 17), mode="bilinear")] * (target != "TFLITE_MICRO_16X8"),
        )
        for function in functions:
            torch.manual_seed(6)
            model, x = Larger(function, Weights((6, 4, 3, 3), channel=1)), torch.randn(2, 6, 7, 8)
            program = exported(widened(model) if name.endswith("wide") else model, x, target=getattr(targets, target))
            found = hop.export.verify(program, to_tflite(program), (x,), kernels=kernels)
            assert found.first is None and found.rows, str(found)

    def test_nearest(self) -> None:
        self.check(lambda x: F.interpolate(x, scale_factor=(3, 2)), out=(0.03, 5))
        self.check(lambda x: F.interpolate(x, size=(14, 8)))
        with pytest.raises(NotImplementedError, match="images and integer factors"):
            self.check(lambda x: F.interpolate(x, size=(10, 8)))

    @parameterized.expand(itertools.product(BILINEAR, (False, True)))
    @pytest.mark.quick(14)
    def test_bilinear(self, name: str, align_corners: bool) -> None:
        """Between scales that differ, and such as are the same: LiteRT's operator alone."""
        for out in ((0.06, -9), (0.031, -9)):
            self.check(partial(F.interpolate, mode="bilinear", align_corners=align_corners, **BILINEAR[name]), out=out)

    def test_bilinear_refused(self) -> None:
        for given, why in (
            ({"scale_factor": 1.3}, r"scale_factors must be those of the sizes, got \[1.3, 1.3\]"),
            ({"size": (7, 5461)}, "output_size must not lead beyond the tensor, got 5461 of 8 elements"),
        ):
            with pytest.raises(ValueError, match=why):
                self.check(partial(F.interpolate, mode="bilinear", **given))


class TestRandom(unittest.TestCase):
    """Programs of random operators."""

    def check(self, seeds: range) -> int:
        compared_codes = 0
        for seed in seeds:
            chain = Chain(seed, resizes=True)
            x = torch.randn(chain.shape) * 2
            _, counts = compared(exported(chain, x), x)
            wrong = {n: c for n, c in counts.items() if c[0]}
            self.assertFalse(wrong, f"seed {seed}: {wrong}")
            compared_codes += sum(size for _, size in counts.values())
        return compared_codes

    @pytest.mark.full
    def test_three(self) -> None:
        self.assertGreater(self.check(range(3)), 1_000)

    @pytest.mark.full
    def test_up_to_thirty(self) -> None:
        self.assertGreater(self.check(range(3, 30)), 9_000)

    @pytest.mark.exhaustive
    def test_thousand(self) -> None:
        self.assertGreater(self.check(range(30, 1030)), 1_000_000)
