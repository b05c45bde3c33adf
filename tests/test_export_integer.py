"""Quantized and dequantized floats as exact integers: hop.export.to_integer.

The oracle is the program that was rewritten: PyTorch's own quantize and dequantize operators around float operators.
"""

import unittest
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchao.quantization as torchao
from parameterized import parameterized
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers quantized_decomposed
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

import hop
from hop import export, presets
from hop.requantization import Division, FixedPoint

qd = torch.ops.quantized_decomposed
aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is an Enum subclass:UserWarning", "ignore:.*is deprecated:DeprecationWarning"
)
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


class Static(NamedTuple):
    """One scale and zero point for a tensor."""

    scale: float
    zero_point: int
    dtype: torch.dtype = torch.int8
    low: int | None = None
    high: int | None = None

    def arguments(self) -> tuple[Any, ...]:
        low, high = (a if a is not None else b for a, b in zip((self.low, self.high), RANGES[self.dtype], strict=True))
        return self.scale, self.zero_point, low, high, self.dtype

    def quantize(self, x: Tensor) -> Tensor:
        return qd.quantize_per_tensor.default(x, *self.arguments())

    def dequantize(self, codes: Tensor) -> Tensor:
        return qd.dequantize_per_tensor.default(codes, *self.arguments())


class Case(NamedTuple):
    """A float operator of quantized inputs, and of a weight."""

    name: str
    inputs: tuple[tuple[int, ...], ...]
    function: Callable[..., Tensor]
    weight: tuple[int, ...] | None = None
    axis: int | str | None = 0  # of the weight's channels; None for one scale, "groups" for groups of 32
    bias: int | None = None
    alike: bool = True  # whether it is an operator whose results are the same integers, ties and all


class Model(nn.Module):
    """Inputs are quantized, the operator runs on what they stand for, its result is quantized."""

    def __init__(self, case: Case, inputs: list[Static], output: Static, generator: torch.Generator) -> None:
        super().__init__()
        self.case, self.inputs, self.output = case, inputs, output
        for name in ("weight", "scales", "zeros", "bias"):
            self.register_buffer(name, None)
        if case.weight is not None:
            size = case.weight
            self.register_buffer("weight", torch.randint(-127, 128, size, generator=generator, dtype=torch.int8))
            count = {None: (1,), "groups": (size[0], size[-1] // 32)}.get(case.axis) or (size[case.axis],)  # type: ignore[index]
            scales = torch.rand(count, generator=generator) * 0.01 + 0.001
            if all(map(is_power_of_two, inputs[0].scale.as_integer_ratio())):
                scales = 2.0 ** torch.randint(-9, -5, count, generator=generator)
            self.register_buffer("scales", scales)
            self.register_buffer("zeros", torch.zeros(count, dtype=torch.int64))
        if case.bias is not None:
            self.register_buffer("bias", torch.randn(case.bias, generator=generator))

    def real_weight(self) -> Tensor:
        if self.case.axis is None:
            return qd.dequantize_per_tensor.default(self.weight, 0.015625, 0, -127, 127, torch.int8)
        given = (self.weight, self.scales, self.zeros)
        if self.case.axis == "groups":
            return qd.dequantize_per_channel_group(*given, -127, 127, torch.int8, 32, torch.float32)
        return qd.dequantize_per_channel(*given, self.case.axis, -127, 127, torch.int8)

    def forward(self, *xs: Tensor) -> Tensor:
        args = [q.dequantize(q.quantize(x)) for q, x in zip(self.inputs, xs, strict=True)]
        if self.weight is not None:
            args.append(self.real_weight())
        if self.bias is not None:
            args.append(self.bias)
        return self.output.quantize(self.case.function(*args))


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


PIXELS = (8, 8, 40, 40)
CASES = [
    Case("linear", ((512, 96),), F.linear, (256, 96), bias=256),
    Case("linear_tensor", ((512, 96),), F.linear, (256, 96), axis=None),
    Case("linear_relu", ((512, 96),), lambda *a: F.relu(F.linear(*a)), (256, 96), bias=256),
    Case("linear_view", ((8, 64, 96),), lambda *a: F.linear(*a).view(8, 64, 4, 64).transpose(1, 2), (256, 96), bias=256),
    Case("linear_groups", ((512, 96),), F.linear, (256, 96), axis="groups"),
    Case("matmul", ((4, 128, 48), (4, 48, 256)), torch.matmul),
    Case("bmm", ((4, 128, 48), (4, 48, 256)), torch.bmm),
    Case("mm_turned", ((512, 96), (256, 96)), lambda x, y: x @ y.t()),
    Case("addmm", ((512, 96),), lambda x, w, b: torch.addmm(b, x, w.t()), (256, 96), bias=256),
    Case("conv1d", ((8, 12, 1030),), lambda *a: F.conv1d(*a, stride=2, padding=3), (32, 12, 5), bias=32),
    Case("conv2d", (PIXELS,), lambda *a: F.conv2d(*a, padding=1), (16, 8, 3, 3), bias=16),
    Case("conv2d_relu6", (PIXELS,), lambda *a: F.relu6(F.conv2d(*a, stride=(1, 2), padding=2)), (24, 8, 5, 3), bias=24),
    Case("conv2d_groups", (PIXELS,), lambda *a: F.conv2d(*a, dilation=2, groups=4), (16, 2, 3, 3), bias=16),
    Case("conv2d_depthwise", (PIXELS,), lambda *a: F.conv2d(*a, padding=1, groups=8), (8, 1, 3, 3), bias=8),
    Case("conv3d", ((2, 4, 9, 24, 24),), lambda *a: F.conv3d(*a, stride=(2, 1, 1), padding=1), (16, 4, 3, 3, 3), bias=16),
    Case("conv_transpose1d", ((8, 12, 515),), lambda *a: F.conv_transpose1d(*a, stride=2), (12, 16, 3), 1, bias=16),
    Case(
        "conv_transpose2d", ((2, 8, 40, 40),),
        lambda *a: F.conv_transpose2d(*a, stride=2, padding=1, output_padding=1), (8, 16, 3, 3), 1, bias=16,
    ),
    Case("conv_transpose3d", ((2, 4, 6, 16, 16),), lambda *a: F.conv_transpose3d(*a, stride=2), (4, 8, 2, 2, 2), 1, bias=8),
    Case("add", (PIXELS, PIXELS), torch.add),
    Case("add_relu", (PIXELS, (8, 1, 1)), lambda a, b: F.relu(a + b)),
    Case("add_number", (PIXELS,), lambda a: a + 1.5),
    Case("sub", (PIXELS, PIXELS), torch.sub),
    Case("mul", (PIXELS, PIXELS), torch.mul, alike=False),
    Case("mul_number", (PIXELS,), lambda a: a * 0.37, alike=False),
    Case("cat", (PIXELS, (8, 4, 40, 40)), lambda a, b: torch.cat([a, b], 1)),
    Case("relu", (PIXELS,), F.relu),
    Case("clamp", (PIXELS,), lambda a: a.clamp(-0.7, 1.1)),
    Case("hardtanh", (PIXELS,), F.hardtanh),
    Case("max_pool2d", (PIXELS,), lambda a: F.max_pool2d(a, 3, 1, 1)),
    Case("max_pool1d", ((8, 8, 1600),), lambda a: F.max_pool1d(a, 3, 1, 1)),
    Case("avg_pool2d", (PIXELS,), lambda a: F.avg_pool2d(a, 3, 1, 1), alike=False),
    Case("adaptive_avg_pool2d", ((8, 512, 8, 8),), lambda a: F.adaptive_avg_pool2d(a, (4, 4)), alike=False),
    Case("mean", ((64, 1024, 9),), lambda a: a.mean(-1), alike=False),
    Case("mean_of_pixels", ((64, 1024, 3, 3),), lambda a: a.mean((2, 3)), alike=False),
    Case("permute", (PIXELS,), lambda a: a.permute(0, 2, 3, 1)),
    Case("flatten", (PIXELS,), lambda a: a.flatten(1)),
    Case("slice", (PIXELS,), lambda a: a[:, 1::2, 3:]),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def parameters(case: Case, draw: int, generator: torch.Generator, y: Tensor | None = None) -> list[Static]:
    """Of the inputs: draw 0 and 2 are random, 1 has powers of two, so that sums are exact and many results ties."""
    found = []
    for i in range(len(case.inputs)):
        dtype = torch.uint8 if (draw + i) % 3 == 2 else torch.int8
        low, high = RANGES[dtype]
        scale = float(torch.rand((), generator=generator) * 0.05 + 0.005)
        zero = int(torch.randint(low, high + 1, (), generator=generator)) if draw != 2 else (128 if low == 0 else 0)
        found.append(Static(2.0**-5 if draw == 1 else scale, zero, dtype))
    return found


def output_of(y: Tensor, draw: int, generator: torch.Generator) -> Static:
    low, high = float(y.min()), float(y.max())
    dtype, narrow = (torch.uint8, {}) if draw == 2 else (torch.int8, {"low": -127, "high": 100} if draw == 0 else {})
    scale = max((high - low) / 230, 1e-4) * (1 + 0.1 * float(torch.rand((), generator=generator)))
    if draw == 1:
        scale = 2.0 ** torch.tensor(scale).log2().ceil().item()
    zero = RANGES[dtype][0] - round(low / scale) + 5
    return Static(scale, max(min(zero, RANGES[dtype][1]), RANGES[dtype][0]), dtype, **narrow)


def made(case: Case, draw: int) -> tuple[Model, list[Tensor]]:
    generator = torch.Generator().manual_seed(draw * 1000 + CASES.index(case))
    inputs = parameters(case, draw, generator)
    xs = []
    for size, q in zip(case.inputs, inputs, strict=True):
        low, high = RANGES[q.dtype]
        steps = torch.randint(low - 9, high + 10, size, generator=generator) - q.zero_point
        offsets = torch.rand(size, generator=generator) - 0.5 if draw != 1 else torch.randint(0, 2, size) / 2
        xs.append((steps + offsets) * q.scale)  # ties among them
    model = Model(case, inputs, Static(1.0, 0), generator)
    real = [q.dequantize(q.quantize(x)) for q, x in zip(inputs, xs, strict=True)]
    rest = [v for v in (model.real_weight() if case.weight else None, model.bias) if v is not None]
    model.output = output_of(case.function(*real, *rest), draw, generator)
    return model, xs


def exported(model: nn.Module, *args: Tensor, dynamic: Any = None) -> ExportedProgram:
    return torch.export.export(model.eval(), args, dynamic_shapes=dynamic)


def operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def targets(program: ExportedProgram) -> list[str]:
    """The operators that hop.scaled runs in a program."""
    return [str(n.args[0]) for n in program.graph.nodes if str(n.target) == "hop_scaled_buffers"]


def assert_integers_only(program: ExportedProgram) -> None:
    """No float operator is left, and nothing of PyTorch's and torchao's quantize operators."""
    for name in operators(program):
        assert "quantized_decomposed" not in name and "torchao" not in name, name


class TestAgreement(unittest.TestCase):
    """At least 99.9 % of a million codes and more are equal, and none differs by more than one."""

    def check(self, case: Case, draw: int) -> tuple[int, int]:
        model, xs = made(case, draw)
        program = exported(model, *xs)
        found, report = export.to_integer(program)
        assert not report.left and report.rewritten, str(report)
        assert_integers_only(found)
        want, got = program.module()(*xs), found.module()(*xs)
        assert got.dtype == want.dtype and got.shape == want.shape
        off = (got.int() - want.int()).abs()
        assert off.max() <= 1, (case.name, draw, off.max())
        if draw == 1 and case.alike:
            assert not off.any(), (case.name, int(off.sum()))
        return int((off > 0).sum()), off.numel()

    @parameterized.expand([(case.name,) for case in CASES])
    @pytest.mark.full
    def test_a_million(self, name):
        counts = [self.check(BY_NAME[name], draw) for draw in range(3)]
        differ, outputs = (sum(n) for n in zip(*counts, strict=True))
        while outputs < 1_000_000:
            counts.append(self.check(BY_NAME[name], 0 if len(counts) % 2 else 2))
            differ, outputs = (sum(n) for n in zip(*counts, strict=True))
        assert differ <= 0.001 * outputs, (name, differ, outputs)

    @parameterized.expand([("linear_relu",), ("conv2d_groups",), ("add",), ("cat",), ("mean",)])
    def test_quick(self, name):
        differ, outputs = self.check(BY_NAME[name], 0)
        assert differ <= 0.001 * outputs
