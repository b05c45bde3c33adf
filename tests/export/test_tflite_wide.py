"""Activations of 16 bits beside weights of 8: sums of 64 bits, and LiteRT's codes."""

import itertools
import unittest
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE_16X8, Row, Target
from hop.numerics.requantization import FixedPoint

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from hop.export.targets.tflite.file import File
from tests.support.tflite_models import Weights, networks, wide, widened


class Step(nn.Module):
    """A function between two quantizations."""

    def __init__(self, function: Any, scale: float, weight: Weights | None = None) -> None:
        super().__init__()
        self.function, self.scale, self.weight = function, scale, weight

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x, 1e-4)
        given = () if self.weight is None else (self.weight(), self.weight.bias)
        return wide(self.function(x, *given), self.scale)


def exported(model: nn.Module, x: Tensor) -> Any:
    result = hop.export.to_integer(torch.export.export(model.eval(), (x,)), target=TFLITE_16X8)
    assert not result.report.left, result.report
    return result.program


def compare(program: Any, *inputs: Tensor) -> Any:
    file = hop.export.to_tflite(program)
    found = hop.export.verify(program, file, [(x,) for x in inputs])
    assert found.first is None and found.outputs[0].dtype == torch.int16, found
    back = hop.export.from_tflite(file)
    for x in inputs:
        assert torch.equal(back.module()(x), program.module()(x))
    return found


def image(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CONVOLUTIONS = {
    "plain": ((6, 4, 3, 3), {}),
    "padded": ((6, 4, 3, 3), {"padding": 1, "stride": 2}),
    "dilated": ((5, 4, 3, 2), {"dilation": 2}),
    "depthwise": ((8, 1, 3, 3), {"groups": 4}),
    "pointwise": ((9, 4, 1, 1), {}),
    "same": ((6, 4, 3, 2), {"padding": "same", "dilation": 2}),
}
TRANSPOSED: dict[str, Any] = {
    "more rows": {"stride": 2, "padding": 1, "output_padding": 1},
    "beyond the last window": {"stride": 3, "output_padding": (0, 2)},
    "grouped": {"stride": 2, "groups": 2},
    "dilated": {"stride": 2, "padding": 2, "dilation": (2, 1)},
}
PAIRS = {
    "add": lambda x: x + wide(x, 2.5e-4),
    "sub": lambda x: x - wide(x, 3e-4),
    "relu": lambda x: (x + wide(x, 1e-5)).relu(),
    "mul": lambda x: x * wide(x, 3e-4),
    "relu6": lambda x: F.relu6(x * wide(x, 3e-4)),
}


OTHERS: dict[str, Any] = {
    "mean": (lambda x: x.mean((2, 3)), 3e-5, (2, 5, 7, 6)),
    "mean of channels": (lambda x: x.mean(1, True), 3e-5, (2, 5, 7, 6)),
    "pool": (lambda x: F.avg_pool2d(x, 3, 2), 1e-4, (2, 5, 9, 8)),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 1), 7e-5, (2, 5, 9, 8)),
    "concatenation": (lambda x: torch.cat([x, wide(x, 2.3e-4)], 1), 1.7e-4, (2, 5, 9, 8)),
    "softmax": (lambda x: x.softmax(-1), 2.0**-15, (40, 30)),
    "sigmoid": (lambda x: x.sigmoid(), 2.0**-15, (40, 300)),
    "tanh": (lambda x: x.tanh(), 2.0**-15, (40, 300)),
    "gelu": (F.gelu, 1.1e-4, (40, 300)),
    "exp": (lambda x: x.exp(), 1e-3, (40, 300)),
    "rsqrt of squares": (lambda x: wide(x * x, 1e-4).rsqrt(), 7e-4, (40, 300)),
    "product": (lambda x: torch.bmm(x, wide(x, 2e-4).transpose(1, 2)), 1e-3, (6, 20, 50)),
    "amax": (lambda x: x.amax((1, 3)), 1.3e-4, (2, 5, 7, 6)),
    "amin": (lambda x: x.amin(-1, True).relu(), 1e-4, (40, 3)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), 1.1e-4, (40, 300)),
    "leaky_relu, bounded": (lambda x: F.leaky_relu(x, -0.7).relu(), 1e-4, (40, 300)),
    "maximum with ceil_mode": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), 1e-4, (2, 5, 8, 7)),
    "maximum padded by -inf": (
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 0), value=-torch.inf), 3, 2),
        1e-4,
        (2, 5, 8, 7),
    ),
    "counted padding": (lambda x: F.avg_pool2d(x, 3, 2, 1), 1e-4, (2, 5, 9, 8)),
    "gelu, bounded": (lambda x: F.gelu(x).relu(), 1.1e-4, (40, 300)),
    "views": (lambda x: x.permute(0, 2, 1)[:, 1:4].reshape(-1, 12), 1.3e-4, (6, 4, 5)),
}


class TestEqual(unittest.TestCase):
    @parameterized.expand(itertools.product(CONVOLUTIONS, (True, False), (True, False)))
    @pytest.mark.quick(8)
    def test_convolution(self, name: str, bias: bool, whole: bool) -> None:
        torch.manual_seed(4)
        shape, options = CONVOLUTIONS[name]
        weight = Weights(shape, not whole, bias)
        model = Step(lambda x, w, b: F.conv2d(x, w, b, **options), 2e-5, weight)
        x = image(1, 2, 4, 9, 8)
        program = exported(model, x)
        compare(program, x, x * 3)
        self.near(model, program, x)

    @parameterized.expand(itertools.product(TRANSPOSED, (True, False)))
    @pytest.mark.quick(4)
    def test_transposed_convolution(self, name: str, whole: bool) -> None:
        torch.manual_seed(4)
        options = TRANSPOSED[name]
        weight = Weights((4, 6, 3, 2), not whole, channel=1)
        weight.bias = nn.Buffer(torch.randn(6 * options.get("groups", 1)))
        model = Step(lambda x, w, b: F.conv_transpose2d(x, w, b, **options), 2e-5, weight)
        x = image(1, 2, 4, 9, 8)
        program = exported(model, x)
        compare(program, x, x * 3)
        self.near(model, program, x)

    @parameterized.expand(
        [(bias, whole, size) for bias in (True, False) for whole in (True, False) for size in (16, 700)]
    )
    @pytest.mark.quick(8)
    def test_linear(self, bias: bool, whole: bool, size: int) -> None:
        torch.manual_seed(4)
        model = Step(F.linear, 4e-5, Weights((24, size), not whole, bias))
        x = image(2, 50, size)
        program = exported(model, x)
        compare(program, x, x * 3)
        self.near(model, program, x)

    @parameterized.expand(PAIRS)
    @pytest.mark.quick(3)
    def test_two_operands(self, name: str) -> None:
        model = Step(PAIRS[name], 3e-4)
        x = image(3, 40, 30)
        program = exported(model, x)
        compare(program, x, x * 3)
        self.near(model, program, x)

    @parameterized.expand([(False,), (True,)])
    @pytest.mark.full
    def test_sums_beyond_32_bits(self, whole: bool) -> None:
        """2^15 features, nearly all of one sign, whose sums reach 2^36."""
        torch.manual_seed(4)
        model = Step(F.linear, 2e-2, Weights((6, 2**15), not whole, True))
        model.weight.codes.abs_().add_(1).clamp_(max=127)  # type: ignore[union-attr]
        x = image(2, 30, 2**15).abs() * torch.linspace(0.02, 3, 30)[:, None]
        program = exported(model, x)
        (sums,) = [x.sum() for x in [(x / 1e-4).round().clamp(max=32767)[-1:]]]
        assert sums * 32 > 2**34
        codes = compare(program, x)
        assert codes.outputs[0].elements == 180 and len(torch.unique(program.module()(x))) > 100

    @pytest.mark.full
    def test_linear_near_ties(self) -> None:
        """Sums that a multiplier of 31 bits would round otherwise: those that come nearest to half a code."""
        a, b = 2.0**-13, 2.0**-7
        out = float(np.float32(a * b / 0.0021861068628198426))
        sums = np.arange(1, 2**23)
        steps = sums * (a * b / out)
        nearest = torch.from_numpy(sums[np.argsort(np.abs(steps - np.floor(steps) - 0.5))[:2000]])
        file = File()
        x = file.tensor("x", (1, 2), torch.int16, ([a], [0], 0))
        weight = file.tensor("weight", (2000, 2), torch.int8, ([b], [0], 0), torch.zeros(2000, 2))
        bias = file.tensor("bias", (2000,), torch.int64, ([a * b], [0], 0), nearest)
        y = file.tensor("y", (1, 2000), torch.int16, ([out], [0], 0))
        file.operator("FULLY_CONNECTED", [x, weight, bias], y, "FullyConnectedOptions")
        data = file.finish({"x": x}, {"y": y})
        program = hop.export.from_tflite(data)
        assert hop.export.verify(program, data, (torch.zeros(1, 2),)).first is None
        other = hop.export.from_tflite(
            data, target=Target("other", (Row(("linear.default",), FixedPoint(rounding="away")),), dtypes=("int16",))
        )
        assert hop.export.verify(other, data, (torch.zeros(1, 2),)).first is not None

    def near(self, model: Step, program: Any, x: Tensor) -> None:
        """As the quantized floats, but for a step of an operand, and for a mantissa of 15 bits."""
        y = model(x)
        assert ((program.module()(x) - y).abs() <= model.scale * 3.01 + y.abs() * 2.0**-14).all()

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(8)
    def test_others(self, name: str) -> None:
        function, scale, shape = OTHERS[name]
        model = Step(function, scale)
        x = image(3, *shape)
        program = exported(model, x)
        compare(program, x, x * 3)

    @parameterized.expand([(bits, dtype, same) for bits in (8, 16) for dtype in ("int32", "int64") for same in (0, 1)])
    @pytest.mark.quick(8)
    def test_rows(self, bits: int, dtype: str, same: int) -> None:
        """Rows of a matrix of 8 or 16 bits, by its scale or another one, chosen by an input of integers."""
        torch.manual_seed(4)

        class Rows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.range = (-127, 127, torch.int8) if bits == 8 else (-(2**15), 2**15 - 1, torch.int16)
                self.scale, self.out = 2.0**-9, 2.0**-9 if same and bits == 16 else 3e-4
                self.codes = nn.Buffer(torch.randint(self.range[0], self.range[1], (50, 7)).to(self.range[2]))

            def forward(self, x: Tensor) -> Tensor:
                weight = torch.ops.quantized_decomposed.dequantize_per_tensor(self.codes, self.scale, 0, *self.range)
                return wide(F.embedding(x, weight), self.out)

        model, x = Rows(), torch.randint(0, 50, (4, 9)).to(getattr(torch, dtype))
        program = exported(model, x)
        found = hop.export.verify(program, file := hop.export.to_tflite(program), (x,))
        assert found.first is None and found.outputs[0].elements == 4 * 9 * 7
        assert torch.equal(hop.export.from_tflite(file).module()(x), program.module()(x))
        assert ((program.module()(x) - model(x)).abs() <= model.out).all()

    @pytest.mark.full
    def test_network(self) -> None:
        """Convolutions, a residual, a pool, a view, and a layer."""

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second = Weights((8, 3, 3, 3)), Weights((8, 1, 3, 3))
                self.last = Weights((10, 8 * 4 * 4))

            def forward(self, x: Tensor) -> Tensor:
                x = wide(x, 1e-4)
                x = wide(F.conv2d(x, self.first(), self.first.bias, padding=1).relu(), 1e-4)
                y = wide(F.conv2d(x, self.second(), self.second.bias, padding=1, groups=8), 1.3e-4)
                x = wide(F.max_pool2d(wide(x + y, 2e-4), 2), 2e-4)
                return wide(F.linear(x.flatten(1), self.last(), self.last.bias), 2e-4)

        x = image(5, 3, 3, 8, 8)
        found = compare(exported(Network(), x), x, x * 4)
        assert len(found.rows) >= 6


class TestNetworks(unittest.TestCase):
    @parameterized.expand(["digits", "residual", "separable", "mobilenet", "transformer"])
    @pytest.mark.full
    def test_every_tensor(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = image(1, *shape)
        with torch.no_grad():
            widened(model)(x)
        found = compare(exported(model, x), x)
        assert len(found.rows) >= 7


class TestSums(unittest.TestCase):
    def test_beyond_32_bits(self) -> None:
        """A sum of 2^41 is exact, and proven; so is its bias."""
        q, w = (hop.Quantizer(f, scale=hop.scale_rules.Static()) for f in (hop.formats.INT16, hop.formats.INT8))
        x = hop.quantize(q, torch.full((1, 2**19), 32767.0), scale=torch.ones(()))
        weight = hop.quantize(w, torch.full((2, 2**19), 127.0), scale=torch.ones(()))
        y = hop.scaled(torch.ops.aten.linear.default, torch.float32, x, weight)
        assert y.double().tolist() == [[float(torch.tensor(32767.0 * 127 * 2**19))] * 2]

    @pytest.mark.full
    def test_ranges(self) -> None:
        model = Step(F.linear, 1e-3, Weights((4, 3000), False, True))
        program = exported(model, image(2, 2, 3000))
        (row,) = [r for r in hop.export.ranges(program).products if "linear" in r.operator or "mm" in r.operator][:1]
        weight = model.weight.codes.long().abs().sum(1).max().item()  # type: ignore[union-attr]
        assert row.accumulator == torch.int64 and row.status == "proven"
        assert row.low is not None and -(weight * 2**15) <= row.low <= -(weight * 2**15) // 2

    def test_zero_points(self) -> None:
        with pytest.raises(ValueError, match="int16 does not support zero points"):
            hop.Quantizer(hop.formats.INT16, scale=hop.scale_rules.Static(affine=True))
