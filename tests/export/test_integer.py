"""Quantized and dequantized floats as exact integers: hop.export.to_integer.

The oracle is the program that was rewritten: PyTorch's own quantize and dequantize operators around float operators.
"""

import copy
import io
import platform
import unittest
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torchao.quantization as torchao
from parameterized import parameterized
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers quantized_decomposed
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torchao.kernel import intmm
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.utils import torch_version_at_least

import hop
from hop import export
from hop.compat.patches import unsigned_products
from hop.export.targets import PT2E, TFLITE
from hop.numerics.requantization import Division, FixedPoint, FloatMultiplier
from tests.support.files import reloaded

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
    Case("linear_view", ((8, 64, 96),), lambda *a: F.linear(*a).view(8, 64, 4, 64).transpose(1, 2), (256, 96), bias=256),  # noqa: E501
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
    Case("conv2d_of_padded", (PIXELS,), lambda x, *a: F.conv2d(F.pad(x, (1, 2, 0, 3)), *a), (16, 8, 3, 3), bias=16),
    Case("conv3d", ((2, 4, 9, 24, 24),), lambda *a: F.conv3d(*a, stride=(2, 1, 1), padding=1), (16, 4, 3, 3, 3), bias=16),  # noqa: E501
    Case("conv_transpose1d", ((8, 12, 515),), lambda *a: F.conv_transpose1d(*a, stride=2), (12, 16, 3), 1, bias=16),
    Case(
        "conv_transpose2d", ((2, 8, 40, 40),),
        lambda *a: F.conv_transpose2d(*a, stride=2, padding=1, output_padding=1), (8, 16, 3, 3), 1, bias=16,
    ),
    Case("conv_transpose3d", ((2, 4, 6, 16, 16),), lambda *a: F.conv_transpose3d(*a, stride=2), (4, 8, 2, 2, 2), 1, bias=8),  # noqa: E501
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
    Case("relu6", (PIXELS,), F.relu6),
    Case("upsample_nearest1d", ((8, 8, 300),), lambda a: F.interpolate(a, scale_factor=2)),
    Case("upsample_nearest2d", (PIXELS,), lambda a: F.interpolate(a, size=(50, 81))),
    Case("upsample_nearest3d", ((2, 4, 6, 8, 8),), lambda a: F.interpolate(a, scale_factor=(1, 2, 3))),
    Case("upsample_linear1d", ((8, 8, 300),), lambda a: F.interpolate(a, 777, None, "linear"), alike=False),
    Case("upsample_bilinear2d", (PIXELS,), lambda a: F.interpolate(a, (50, 87), None, "bilinear"), alike=False),
    Case("upsample_bilinear2d_twice", (PIXELS,), lambda a: F.interpolate(a, None, 2, "bilinear"), alike=False),
    Case("trilinear", ((2, 4, 6, 8, 8),), lambda a: F.interpolate(a, (9, 8, 9), mode="trilinear"), alike=False),
    Case("max_pool2d", (PIXELS,), lambda a: F.max_pool2d(a, 3, 1, 1)),
    Case("max_pool1d", ((8, 8, 1600),), lambda a: F.max_pool1d(a, 3, 1, 1)),
    Case("avg_pool2d", (PIXELS,), lambda a: F.avg_pool2d(a, 3, 1, 1), alike=False),
    Case("adaptive_avg_pool2d", ((8, 512, 8, 8),), lambda a: F.adaptive_avg_pool2d(a, (4, 4)), alike=False),
    Case("avg_pool1d", ((8, 8, 1600),), lambda a: F.avg_pool1d(a, 4, 2, 1), alike=False),
    Case("mean", ((64, 1024, 9),), lambda a: a.mean(-1), alike=False),
    Case("mean_of_pixels", ((64, 1024, 3, 3),), lambda a: a.mean((2, 3)), alike=False),
    Case("mean_of_channels", ((16, 6, 40, 40),), lambda a: a.mean(1), alike=False),
    Case("permute", (PIXELS,), lambda a: a.permute(0, 2, 3, 1)),
    Case("flatten", (PIXELS,), lambda a: a.flatten(1)),
    Case("pad", (PIXELS,), lambda a: F.pad(a, (1, 0, 2, 3))),
    Case("pad_by_less", (PIXELS,), lambda a: F.pad(a, (-1, 2))),
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
        zero = int(torch.randint(low, high + 1, (), generator=generator)) if draw != 2 else 0
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
    @pytest.mark.sampled(4)
    def test_a_million(self, name):
        counts = [self.check(BY_NAME[name], draw) for draw in range(3)]
        differ, outputs = (sum(n) for n in zip(*counts, strict=True))
        while outputs < 1_000_000:
            counts.append(self.check(BY_NAME[name], 0 if len(counts) % 2 else 2))
            differ, outputs = (sum(n) for n in zip(*counts, strict=True))
        assert differ <= 0.001 * outputs, (name, differ, outputs)

    @parameterized.expand([("linear_relu",), ("conv2d_groups",), ("add",), ("cat",), ("mean",)])
    @pytest.mark.full
    def test_quick(self, name):
        differ, outputs = self.check(BY_NAME[name], 0)
        assert differ <= 0.001 * outputs


IN_ONE_SCALE = {  # where the result has the operand's scale, and one in n lies halfway between two codes
    "avg_pool2d": ((2, 4, 130, 130), lambda a: F.avg_pool2d(a, 2)),
    "avg_pool2d_padded": ((2, 4, 66, 67), lambda a: F.avg_pool2d(a, 4, 1, 2, ceil_mode=True)),
    "adaptive_avg_pool2d": ((16, 16, 56, 56), lambda a: F.adaptive_avg_pool2d(a, 14)),
    "global_pool": ((64, 256, 8, 8), lambda a: F.adaptive_avg_pool2d(a, 1)),
    "mean_of_pixels": ((64, 256, 14, 14), lambda a: a.mean((2, 3))),
    "mean_of_4": ((64, 256, 4), lambda a: a.mean(-1)),
    "mean_of_100": ((64, 256, 100), lambda a: a.mean(-1, True)),
    "mean_of_tokens": ((64, 12, 384), lambda a: a.mean(1)),
    "mean_of_batches": ((40, 30, 385), lambda a: a.mean(0)),
}


class OneScale(nn.Module):
    def __init__(self, function: Callable[..., Tensor], own: Static) -> None:
        super().__init__()
        self.function, self.own = function, own

    def forward(self, x: Tensor) -> Tensor:
        return self.own.quantize(self.function(self.own.dequantize(self.own.quantize(x))))


def in_one_scale(name: str, scale: float, zero: int) -> tuple[ExportedProgram, Tensor]:
    """A program, and an input of all codes. The scale is one of float32, as observers find it."""
    shape, function = IN_ONE_SCALE[name]
    own = Static(float(torch.tensor(scale)), zero)
    x = (torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(1)) - zero) * own.scale
    return exported(OneScale(function, own), x), x


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the order of sums is that of x86's kernels")
class TestTies(unittest.TestCase):
    """Means and pools whose results lie halfway between two codes, which the roundings of the float sum decide."""

    def test_targets_made_of_it(self) -> None:
        """The order is asked of the convention, not of the target's name: dimensions apart have no known order."""
        own = Static(0.25, 3)
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2)) * 20
        program = exported(OneScale(lambda a: a.mean((0, 2)), own), x)
        rewritten, report = export.to_integer(program, target=replace(PT2E, name="own"))
        assert not report.left, str(report)
        found = rewritten.module()
        assert ((found(x) - program.module()(x)).abs() <= own.scale).all()

    def check(self, name: str, scale: float, zero: int) -> None:
        program, x = in_one_scale(name, scale, zero)
        found, report = export.to_integer(program)
        assert not report.left, str(report)
        want, got = program.module()(x), found.module()(x)
        differ = int((want != got).sum())
        if name == "mean_of_batches":  # whose columns that fill no block depend on the number of threads
            assert differ <= 0.001 * want.numel(), (differ, want.numel())
        else:
            assert not differ
        assert torch.equal(export.lower(found).module()(x), got)

    @parameterized.expand(IN_ONE_SCALE)
    @pytest.mark.full
    def test_all_equal(self, name):
        self.check(name, 0.0137, 3)

    @parameterized.expand(IN_ONE_SCALE)
    @pytest.mark.full
    def test_all_equal_in_another_scale(self, name):
        self.check(name, 0.0521, -20)


QUARTERS = Static(0.25, 3)


class TestPadding(unittest.TestCase):
    """Floats padded by a number are codes padded by its code, if it has one."""

    def found(self, function: Callable[[Tensor], Tensor], own: Static = QUARTERS) -> tuple[Any, bool]:
        """The report, and whether the program's results are those of the graph."""
        x = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(2)) * 9
        program = exported(OneScale(function, own), x)
        made = export.to_integer(program)
        return made, torch.equal(made.program.module()(x), program.module()(x))

    @pytest.mark.full
    def test_of_a_code(self) -> None:
        for number in (0.0, 2.5, -32.75, 31.0):
            made, is_equal = self.found(lambda x, n=number: F.pad(x, (1, 2, 0, 3), value=n))
            assert is_equal and not made.report.left, (number, str(made.report))
            (pad,) = [n for n in made.program.graph.nodes if n.target is aten.constant_pad_nd.default]
            assert pad.args[2] == number / 0.25 + 3 and pad.meta["val"].dtype == torch.int8

    @pytest.mark.full
    def test_of_uint8(self) -> None:
        for zero in (0, 128, 200):
            made, is_equal = self.found(lambda x: F.pad(x, (1, 2)), Static(0.25, zero, torch.uint8))
            assert is_equal and not made.report.left
            (pad,) = [n for n in made.program.graph.nodes if n.target is aten.constant_pad_nd.default]
            assert (*pad.args, 0)[2] == zero  # 0 is the default

    @pytest.mark.full
    def test_of_no_code(self) -> None:
        """It stays in floats, and the report says why; a target of integers alone raises."""
        for number in (0.1, 32.0, -33.0):
            made, is_equal = self.found(lambda x, n=number: F.pad(x, (1, 2), value=n))
            (left,) = made.report.left
            assert (
                is_equal and f"no code of scale 0.25 and zero point 3 in int8 has the value {number}" in left.detail
            ), left
        program = exported(OneScale(lambda x: F.pad(x, (1, 2), value=0.1), QUARTERS), torch.randn(2, 3, 5, 6))
        with pytest.raises(ValueError, match=r"to_integer: node 'pad' .*would stay in floats.*: no code of"):
            export.to_integer(program, target=TFLITE)

    def test_other_modes(self) -> None:
        made, is_equal = self.found(lambda x: F.pad(x, (1, 2, 1, 0), mode="circular"))
        assert is_equal, str(made.report)


# ---- what quantizers of models make


def linear_layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval().to(dtype)


TORCHAO = {
    "int8_dynamic": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int8_weight_only": lambda: torchao.Int8WeightOnlyConfig(),
    "int4_weight_only": lambda: torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
    "8da4w": lambda: torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(32)),
}


class TestTorchao(unittest.TestCase):
    """quantize_, exported with its subclasses."""

    @parameterized.expand([(f"{name}_{dtype}", name, dtype) for name in TORCHAO for dtype in ("float32", "bfloat16")])
    @pytest.mark.full
    def test_quantize_(self, _name, name, dtype):
        model = linear_layers(getattr(torch, dtype))
        torchao.quantize_(model, TORCHAO[name]())
        x = torch.randn(4, 3, 64).to(getattr(torch, dtype))
        program = exported(model, x, dynamic=({0: Dim("batch", min=1)},))
        found, report = export.to_integer(program)
        assert_integers_only(found)
        assert len(report.rewritten) == 2 and not report.left, str(report)
        kinds = {row.detail.split(" -> ")[0] for row in report.rewritten}
        assert all("× int8" in kind for kind in kinds), kinds
        assert all(("int8[" in k.split(" × ")[0]) == (name in ("int8_dynamic", "8da4w")) for k in kinds), kinds
        x = torch.randn(70, 3, 64).to(x.dtype)
        want, got = model(x), found.module()(x)
        assert got.dtype == want.dtype == x.dtype
        if name == "int8_dynamic":
            assert torch.equal(got, want)  # an exact sum, scaled by the same numbers in the same order
        else:
            assert (got - want).abs().max() <= (1e-6 if dtype == "float32" else 2e-2) * want.abs().max()
        lowered = export.lower(found).module()(x)
        if name in ("int8_dynamic", "8da4w"):
            assert torch.equal(lowered, got)  # sums of integers
        else:
            # Sums of float32 in another order: a few units in their last place; a bfloat16 may become its neighbour.
            units = 8 if dtype == "float32" else 1
            assert (lowered - got).abs().max() <= units * torch.finfo(got.dtype).eps * got.abs().max()


CPUS = {  # what torchao asks a CPU, by the form that it then writes
    "u8s8": {"_cpu_is_amx_tile_supported": False, "_cpu_is_vnni_supported": True},
    "s8s8_amx": {"_cpu_is_amx_tile_supported": True, "_cpu_is_vnni_supported": True},
    "s8s8_plain": {"_cpu_is_amx_tile_supported": False, "_cpu_is_vnni_supported": False},
}


def scaled_product(x: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return intmm.int_scaled_matmul(x, w, rows) * columns


def wide_product(x: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """What safe_int_mm does on CPUs where nothing is traced."""
    return torch.matmul(x.to(torch.int32), w.to(torch.int32)).to(torch.float32) * rows * columns


def safe_product(x: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return intmm.safe_int_mm(x, w).to(torch.float32) * rows * columns


def traced_product(x: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """What safe_int_mm writes for other devices than CPUs."""
    return out_dtype(aten.mm.default, torch.int32, x, w).to(torch.float32) * rows * columns


def moved(x: Tensor, by: int = 128, dtype: torch.dtype = torch.uint8) -> Tensor:
    return (x.to(torch.int32) + by).to(dtype)


def columns_of(w: Tensor, by: int = 128, dim: int = 0) -> Tensor:
    return w.sum(dim=dim, keepdim=True, dtype=torch.int32) * by


UNLIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # near torchao's u8s8, and of another meaning
    "moved_alone": lambda x, w: torch._int_mm(moved(x), w),
    "taken_off_alone": lambda x, w: torch._int_mm(x, w) - columns_of(w),
    "another_move": lambda x, w: torch._int_mm(moved(x, 127), w) - columns_of(w),
    "another_factor": lambda x, w: torch._int_mm(moved(x), w) - columns_of(w, 127),
    "another_weight": lambda x, w: torch._int_mm(moved(x), w) - columns_of(w.flip(1)),
    "other_sums": lambda x, w: torch._int_mm(moved(x), w) - columns_of(w[:, :32], dim=1)[:16],
    "an_alpha": lambda x, w: torch.sub(torch._int_mm(moved(x), w), columns_of(w), alpha=2),
    "added": lambda x, w: torch._int_mm(moved(x), w) + columns_of(w),
}


class Factors(nn.Module):
    """Codes that are multiplied, and scaled by rows and columns."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("w", torch.randint(-128, 128, (64, 32), generator=generator, dtype=torch.int8).t())
        self.register_buffer("columns", torch.rand(64, generator=generator))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.function(x, self.w, rows, self.columns)


def _exact_mm(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(torch.int32)


class TestProductsOfTorchao(unittest.TestCase):
    """Each form that torchao gives a product of integers, on whichever CPU the test runs."""

    def check(self, program: ExportedProgram, *args: Tensor) -> Any:
        found, report = export.to_integer(program)
        want = self.exact(program)(*args)
        assert torch.equal(self.exact(found)(*args), want), str(report)
        assert torch.equal(self.exact(export.lower(found))(*args), want)
        return found, report

    def exact(self, program: ExportedProgram) -> Any:
        """The program with exact products of integers, which torch._int_mm's are not on CPUs without VNNI."""
        module: Any = program.module()
        for node in module.graph.nodes:
            if node.target is aten._int_mm.default:
                node.target = _exact_mm
        module.recompile()
        return module

    @parameterized.expand([(cpu,) for cpu in CPUS])
    @pytest.mark.full
    def test_quantize_(self, cpu):
        self.check_quantized(cpu, torch.float32)

    @parameterized.expand([(cpu,) for cpu in CPUS])
    @pytest.mark.full
    def test_quantize_in_bfloat16(self, cpu):
        self.check_quantized(cpu, torch.bfloat16)

    def check_quantized(self, cpu: str, dtype: torch.dtype) -> None:
        model = linear_layers(dtype)
        torchao.quantize_(model, TORCHAO["int8_dynamic"]())
        x = torch.randn(4, 3, 64).to(dtype)
        with mock.patch.multiple(intmm, **{name: lambda v=v: v for name, v in CPUS[cpu].items()}):
            program = exported(model, x, dynamic=({0: Dim("batch", min=1)},))
        own = operators(program.run_decompositions({}))
        is_moved = cpu == "u8s8" and ("sub.Tensor" in " ".join(own))
        assert is_moved == (cpu == "u8s8" and torch_version_at_least("2.12.0.dev")), own
        found, report = self.check(program, torch.randn(70, 3, 64).to(x.dtype))
        assert len(report.rewritten) == 2 and not report.left, str(report)
        assert "aten._int_mm.default" not in operators(found) and "aten.sum.dim_IntList" not in operators(found)

    @parameterized.expand(
        [(f"{f.__name__}_{cpu}", f, cpu) for f in (scaled_product, safe_product) for cpu in CPUS]
        + [(f.__name__, f, "u8s8") for f in (wide_product, traced_product)]
    )
    @pytest.mark.quick(8)
    def test_product(self, _name, function, cpu):
        x, rows = torch.randint(-128, 128, (5, 32), dtype=torch.int8), torch.rand(5, 1)
        x[0], x[1] = -128, 127
        with mock.patch.multiple(intmm, **{name: lambda v=v: v for name, v in CPUS[cpu].items()}):
            program = exported(Factors(function), x, rows)
        found, report = self.check(program, x, rows)
        assert len(report.rewritten) == 1 and not report.left, str(report)
        assert [n for n in operators(found) if "hop" in n] == ["hop_scaled_buffers"], str(found.graph)

    @parameterized.expand(UNLIKE)
    @pytest.mark.full
    @unittest.skipIf(unsigned_products.is_needed, "torch._int_mm of this version takes no uint8, nor torchao's form")
    def test_of_another_meaning(self, name):
        """What is not undone as a whole is not undone at all."""
        product = UNLIKE[name]
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(-128, 128, (16, 32), generator=generator, dtype=torch.int8)
        rows = torch.rand(16, 1, generator=generator)
        program = exported(
            Factors(lambda x, w, rows, columns: product(x, w).to(torch.float32) * rows * columns), x, rows
        )
        _, report = self.check(program, x, rows)
        if name == "moved_alone":  # the product of the uint8 codes as they are
            assert len(report.rewritten) == 1 and "uint8[" in report.rewritten[0].detail, str(report)
        else:
            assert not report.rewritten and "stay int32" in report.left[0].detail, str(report)


def pt2e(quantizer: Any, model: nn.Module, *batches: Any, dynamic: Any = None) -> ExportedProgram:
    prepared = prepare_pt2e(torch.export.export(model, batches[0], dynamic_shapes=dynamic).module(), quantizer)
    for batch in batches:
        prepared(*batch)
    return torch.export.export(convert_pt2e(prepared), batches[0], dynamic_shapes=dynamic)


def x86(dynamic: bool = False) -> Any:
    module = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    configured = module.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
    return module.X86InductorQuantizer().set_global(configured)


def xnnpack(dynamic: bool = False, per_channel: bool = True) -> Any:
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    configured = module.get_symmetric_quantization_config(is_dynamic=dynamic, is_per_channel=per_channel)
    return module.XNNPACKQuantizer().set_global(configured)


class Pictures(nn.Module):
    """A small convolutional network with a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.third = nn.Conv2d(16, 32, 3, stride=2)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(F.relu(x + self.second(x)), 2)
        return self.last(F.relu(self.third(x)).mean((2, 3)))


QUANTIZERS = {
    "x86": x86,
    "x86_dynamic": lambda: x86(dynamic=True),
    "xnnpack": xnnpack,
    "xnnpack_dynamic": lambda: xnnpack(dynamic=True),
    "xnnpack_tensor": lambda: xnnpack(per_channel=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
class TestPT2E(unittest.TestCase):
    """convert_pt2e of torchao, with its own quantizer and ExecuTorch's."""

    @parameterized.expand(QUANTIZERS)
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_digits(self, name):
        """On real pictures."""
        digits = pytest.importorskip("sklearn.datasets").load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        model = Pictures()
        for _ in range(3):
            model(images)  # statistics of the norm
        batch = Dim("batch", min=1, max=4096)
        program = pt2e(QUANTIZERS[name](), model.eval(), (images[:64],), (images[64:128],), dynamic=({0: batch},))
        found, report = export.to_integer(program)
        assert_integers_only(found)
        products = [row for row in report.rows if row.operator in ("aten.linear.default", "aten.conv2d.default")]
        expected = {"xnnpack_dynamic": 2}.get(name, 4)  # it leaves convolutions, but the last one of a chain
        assert sum(row.is_rewritten for row in products) == expected, str(report)
        with torch.no_grad():
            want, got = program.module()(images), found.module()(images)
        assert float(F.cosine_similarity(want, got).mean()) >= 0.999
        assert float((want.argmax(1) == got.argmax(1)).float().mean()) >= 0.999
        with torch.no_grad():
            lowered = export.lower(found).module()(images)
        assert float(F.cosine_similarity(lowered, got).mean()) >= 0.9999


class Layers(nn.Module):
    """The layers of an encoder, on what its embeddings are."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.layers = bert.encoder.layer

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


class InFloat64(torch.fx.Interpreter):
    """What a program of floats means: its linear layers in float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.linear.default:
            return target(*(x.double() for x in args)).float()
        return super().call_function(target, args, kwargs)


def in_float64(program: ExportedProgram, *args: Tensor) -> Tensor:
    given, held = iter(args), {**program.state_dict, **program.constants}
    specs = program.graph_signature.input_specs
    inputs = [next(given) if s.kind.name == "USER_INPUT" else held[s.target] for s in specs]
    return InFloat64(program.graph_module).run(*inputs)[0]


class TestMiniLM(unittest.TestCase):
    """A real encoder and real text: cosines of the embeddings of sentences."""

    @parameterized.expand([("x86", 36), ("xnnpack", 36)])
    @pytest.mark.full
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
    @torch.no_grad()
    def test_embeddings(self, name, layers):
        from examples import quantized_bert

        bert, batches = quantized_bert.load()
        inputs = [(bert.embeddings(ids), (1.0 - mask[:, None, None].float()) * -1e4) for ids, mask in batches]
        if name == "x86":  # the inputs of the linear layers
            quantizer = x86()
            configured = quantizer.global_config
            quantizer = type(quantizer)().set_module_type_qconfig(nn.Linear, configured)
        else:  # their inputs and outputs, and what lies between them
            quantizer = xnnpack()
            quantizer = type(quantizer)().set_module_type(nn.Linear, quantizer.global_config)
        rows, tokens = Dim("rows", min=2, max=1024), Dim("tokens", min=2, max=128)
        program = pt2e(
            quantizer, Layers(bert).eval(), *inputs[:4], dynamic=({0: rows, 1: tokens}, {0: rows, 3: tokens})
        )
        found, report = export.to_integer(program)
        assert sum(row.operator == "aten.linear.default" for row in report.rewritten) == layers, str(report)
        found_cosines: dict[str, list[Tensor]] = {}
        plain, integer = program.module(), found.module()
        for args, (_, mask) in zip(inputs, batches, strict=True):
            own, ours, meant = plain(*args), integer(*args), in_float64(program, *args)
            for what, pair in {"floats": (ours, own), "meant": (ours, meant), "own": (own, meant)}.items():
                means = [(x * mask[..., None]).sum(1) for x in pair]
                found_cosines.setdefault(what, []).append(F.cosine_similarity(*means))
        cosines = {what: float(torch.cat(parts).mean()) for what, parts in found_cosines.items()}
        assert cosines["meant"] >= 0.999 and cosines["meant"] >= cosines["own"] - 1e-4, cosines
        assert cosines["floats"] >= (0.999 if name == "x86" else 0.99), cosines  # as far as it is from what it means


CHOICES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "tensor": lambda x: qd.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8),
    "tensor_symmetric": lambda x: qd.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, torch.int8),
    "token": lambda x: qd.choose_qparams_per_token_asymmetric(x, torch.int8),
    "token_symmetric": lambda x: qd.choose_qparams_per_token(x, torch.int8),
}


class TestDynamic(unittest.TestCase):
    """Scales that are found when the program runs: the same, and the same codes."""

    @parameterized.expand(CHOICES)
    @pytest.mark.full
    def test_codes(self, name):
        kind = "per_token" if name.startswith("token") else "per_tensor"
        quantize = getattr(qd, f"quantize_{kind}") if kind == "per_token" else qd.quantize_per_tensor.tensor
        dequantize = getattr(qd, f"dequantize_{kind}") if kind == "per_token" else qd.dequantize_per_tensor.tensor
        last = (torch.float32,) if kind == "per_token" else ()

        def function(m: Any, x: Tensor) -> Any:
            scale, zero = CHOICES[name](x)
            codes = quantize(x, scale, zero, -128, 127, torch.int8)
            return codes, linear(m, dequantize(codes, scale, zero, -128, 127, torch.int8, *last))

        x = torch.randn(6, 32)
        program = exported(Holding(function), x, dynamic=({0: Dim("batch", min=1)},))
        found, report = export.to_integer(program)
        assert len(report.rewritten) == 1 and not report.left, str(report)
        assert_integers_only(found)
        for x in (
            torch.randn(6, 32),
            torch.arange(-32.0, 32).view(2, 32),
            torch.full((3, 32), 1e-9),
            torch.rand(99, 32) + 1,
        ):
            (codes, y), (got, z) = program.module()(x), found.module()(x)
            assert torch.equal(got, codes)
            torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-5)
            assert all(map(torch.equal, export.lower(found).module()(x), (got, z)))


class TestOurs(unittest.TestCase):
    """Programs of hop's own modules and operators."""

    @pytest.mark.full
    def test_module(self):
        model = linear_layers()
        hop.nn.convert(model, hop.schemes.INT8_DYNAMIC)
        x = torch.randn(5, 64)
        program = exported(model, x)
        found, _ = export.to_integer(program)
        assert torch.equal(found.module()(x), model(x))
        assert len([t for t in targets(found) if "linear" in t]) == 2, str(found.graph)
        assert torch.equal(export.lower(found).module()(x), model(x))

    @pytest.mark.full
    def test_conventions(self):
        """How sums become codes is the caller's choice: integers as runtimes compute them."""
        case = BY_NAME["linear_relu"]
        model, xs = made(case, 0)
        program = exported(model, *xs)
        want = program.module()(*xs).int()
        for rule in (Division(), FixedPoint(), FloatMultiplier()):
            found, _ = export.to_integer(program, requantize=rule)
            assert type(rule).__name__ in next(str(n.args[1]) for n in found.graph.nodes if "scaled" in str(n.target))
            assert (found.module()(*xs).int() - want).abs().max() <= 1


# ---- graphs that are not what one hopes for


def quantized(x: Tensor, scale: float, zero: int = 0) -> Tensor:
    return qd.quantize_per_tensor.default(x, scale, zero, -128, 127, torch.int8)


def dequantized(codes: Tensor, scale: float, zero: int = 0) -> Tensor:
    return qd.dequantize_per_tensor.default(codes, scale, zero, -128, 127, torch.int8)


def both(x: Tensor, scale: float, zero: int = 0) -> Tensor:
    return dequantized(quantized(x, scale, zero), scale, zero)


class Holding(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.register_buffer("codes", torch.randint(-127, 128, (16, 32), generator=generator, dtype=torch.int8))
        self.register_buffer("real", torch.randn(16, 32, generator=generator))
        self.register_buffer("wide", torch.randint(-500, 500, (16,), generator=generator, dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear(m: Any, x: Tensor, *bias: Tensor) -> Tensor:
    return F.linear(x, dequantized(m.codes, 0.01), *bias)


def wide(m: Any) -> Tensor:
    return qd.dequantize_per_tensor.default(m.wide, 0.001, 0, -(2**31), 2**31 - 1, torch.int32)


ODD: dict[str, tuple[Callable[..., Any], int, int]] = {  # the program, and how many nodes are rewritten and left
    "unknown_operator": (lambda m, x: quantized(torch.tan(both(x, 0.1)), 0.01), 0, 1),
    "shared_weight": (lambda m, x: (quantized(linear(m, both(x, 0.1)), 0.2), linear(m, both(x, 0.05))), 2, 0),
    "several_outputs": (
        lambda m, x: (lambda y: (quantized(y, 0.2), quantized(y, 0.1, 3), y))(linear(m, both(x, 0.1))), 1, 0,
    ),
    "two_codes_of_one": (
        lambda m, x: (lambda y: (quantized(y, 0.2), quantized(F.relu(y), 0.1, 3)))(linear(m, both(x, 0.1))), 1, 0,
    ),
    "quantize_alone": (lambda m, x: quantized(x, 0.1, 5), 0, 0),
    "dequantize_alone": (lambda m, x: dequantized(m.codes, 0.1) * x.sum(), 0, 1),
    "other_scale": (lambda m, x: quantized(linear(m, dequantized(quantized(x, 0.1), 0.3, 5)), 0.2), 1, 0),
    "requantized": (lambda m, x: quantized(both(x, 0.1), 0.25, 3), 0, 0),
    "mismatched_add": (lambda m, x: quantized(both(x, 0.1) + both(x * 2, 0.25, 7), 0.3), 1, 0),
    "mismatched_cat": (lambda m, x: quantized(torch.cat([both(x, 0.1), both(x * 2, 0.25, 7)]), 0.3), 1, 0),
    "constant": (lambda m, x: quantized(both(x, 0.1) * both(torch.ones(32), 0.01), 0.2), 1, 0),
    "weight_from_floats": (lambda m, x: quantized(F.linear(both(x, 0.1), both(m.real, 0.01)), 0.2), 1, 0),
    "bias_of_int32": (lambda m, x: quantized(linear(m, both(x, 0.1), wide(m)), 0.2), 1, 0),
    "views": (lambda m, x: quantized(linear(m, both(x, 0.1).view(-1, 2, 32)).flatten(0, 1), 0.2), 1, 0),
    "clamps": (lambda m, x: quantized(F.relu(linear(m, both(x, 0.1)).clamp(-1, 2.5)), 0.02), 1, 0),
    "float_in_between": (lambda m, x: torch.relu(linear(m, both(x, 0.1))) + 1, 1, 0),
    "nested": (
        lambda m, x: quantized(linear(m, both(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), 0.1)), 0.2), 1, 0,
    ),
    "attention": (
        lambda m, x: quantized(
            F.scaled_dot_product_attention(*[both(x.view(1, -1, 2, 16).transpose(1, 2), 0.1)] * 3)
            .transpose(1, 2).reshape(-1, 32), 0.02,
        ), 0, 1,
    ),
}  # fmt: skip


class TestOddGraphs(unittest.TestCase):
    """Whatever is left is as it was: never a wrong graph."""

    @parameterized.expand([(f"{name}_{kind}", name, kind) for name in ODD for kind in ("static", "dynamic")])
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_odd(self, _name, name, kind):
        function, rewritten, left = ODD[name]
        model, x = Holding(function), torch.randn(6, 32)
        batch = 2 * Dim("half", min=1, max=512)
        program = exported(model, x, dynamic=({0: batch},) if kind == "dynamic" else None)
        found, report = export.to_integer(program)
        assert (len(report.rewritten), len(report.left)) == (rewritten, left), str(report)
        assert_integers_only(found)
        x = torch.randn(14 if kind == "dynamic" else 6, 32) * 3
        want, got = (tree_leaves(p.module()(x)) for p in (program, found))
        for w, g in zip(want, got, strict=True):
            assert w.dtype == g.dtype and w.shape == g.shape
            if w.dtype == torch.int8:
                off = (w.int() - g.int()).abs()
                assert off.max() <= 1 and (off > 0).sum() <= 1, (name, int((off > 0).sum()))
            else:
                torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
        lowered = export.lower(found)
        assert_integers_only(lowered)
        again = reloaded(found)
        for p in (lowered, again):
            for g, a in zip(got, tree_leaves(p.module()(x)), strict=True):
                assert torch.equal(g, a)

    def test_zero_size(self):
        program = exported(Holding(lambda m, x: quantized(linear(m, both(x, 0.1)), 0.2)), torch.randn(0, 32))
        found, _ = export.to_integer(program)
        assert found.module()(torch.randn(0, 32)).shape == (0, 16)

    def test_unused_weights_are_dropped(self):
        """PT2E keeps the float weights beside the folded codes."""

        def function(m: Any, x: Tensor) -> Tensor:
            return quantized(linear(m, both(x, 0.1)), 0.2)

        found, _ = export.to_integer(exported(Holding(function), torch.randn(6, 32)))
        assert set(found.state_dict) == {"codes"}

    @pytest.mark.full
    def test_state_that_is_written(self):
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls.add_(1)
                calls: Any = self.calls
                return quantized(both(x, 0.1) + both(x, 0.2), 0.3) + calls.to(torch.int8)

        x = torch.randn(4, 8)
        found, report = export.to_integer(exported(Counting(), x))
        assert len(report.rewritten) == 1
        module = found.module()
        first, second = module(x), module(x)
        assert torch.equal(first + 1, second)

    @pytest.mark.full
    def test_a_zero_point_that_is_written(self):
        """A buffer that a program writes is no constant, whatever it holds now; one that it only writes is kept."""

        class Learning(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.tensor(0.1))
                self.register_buffer("zero", torch.tensor(0))
                self.register_buffer("last", torch.tensor(0.0))

            def forward(self, x: Tensor) -> Tensor:
                codes = qd.quantize_per_tensor.tensor(x, self.scale, self.zero, -128, 127, torch.int8)
                y = qd.dequantize_per_tensor.tensor(codes, self.scale, self.zero, -128, 127, torch.int8)
                zero: Any = self.zero
                zero.add_(1)
                last: Any = self.last
                last.copy_(x.sum())
                return quantized(y + y, 0.3)

        x = torch.randn(4, 8)
        program = exported(Learning(), x)
        found, _ = export.to_integer(copy.deepcopy(program))
        plain, integer = program.module(), found.module()
        for _ in range(3):
            assert torch.equal(plain(x), integer(x))
        state = dict(integer.named_buffers())
        assert int(state["zero"]) == 3 and float(state["last"]) == float(x.sum())

    def test_what_is_no_program(self):
        for name in "to_integer to_qdq to_onnx to_executorch to_torch from_torch lower follow_dtype ranges".split():
            for bad in (nn.Linear(2, 2), None, "model.pt2"):
                with self.assertRaisesRegex(TypeError, f"{name}: program must be a torch.export.ExportedProgram, got "):
                    getattr(export, name)(bad)

    @pytest.mark.full
    def test_another_version_of_ours(self):
        """A program whose quantizers are spelled as another version spelled them."""
        case = BY_NAME["relu"]
        model, xs = made(case, 0)
        found, _ = export.to_integer(exported(model, *xs))
        for node in found.graph.nodes:
            node.args = torch.fx.map_arg(node.args, lambda n: n)
            node.args = tuple(a.replace("hop1:", "hop9:") if isinstance(a, str) else a for a in node.args)
        found.graph_module.recompile()
        for use in (lambda: found.module()(*xs), lambda: export.lower(found)):
            with self.assertRaisesRegex(ValueError, "hop9"):
                use()

    def test_a_damaged_file(self):
        model, xs = made(BY_NAME["relu"], 0)
        file = io.BytesIO()
        torch.export.save(export.to_integer(exported(model, *xs)).program, file)
        whole = file.getvalue()
        for cut in (0, 10, len(whole) // 2, len(whole) - 30):
            with self.assertRaises(Exception) as raised, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.export.load(io.BytesIO(whole[:cut]))
            assert str(raised.exception)


class TestReport(unittest.TestCase):
    def test_text(self):
        _, report = export.to_integer(exported(Holding(ODD["unknown_operator"][0]), torch.randn(6, 32)))
        text = str(report)
        assert (
            text.startswith("0 rewritten, 1 left\nnode")
            and "tan" in text
            and "hop.scaled does not support aten.tan.default: it still runs on dequantized floats" in text
        )

    @pytest.mark.full
    def test_functions_of_floats(self):
        """What hop.scaled has not stays, by its name."""
        for function in (torch.tan, torch.asinh, F.elu):
            program = exported(Holding(lambda m, x, f=function: quantized(f(both(x, 0.1)), 0.01)), torch.randn(6, 32))
            found, report = export.to_integer(program)
            (row,) = report.left
            assert row.detail == f"hop.scaled does not support {row.operator}: it still runs on dequantized floats"
            assert function.__name__ in row.operator
            x = torch.randn(6, 32)
            assert torch.equal(found.module()(x), program.module()(x))

    @parameterized.expand(
        [
            *((f.__name__, f) for f in (F.hardswish, torch.sigmoid, F.silu, F.gelu, torch.tanh)),
            ("softmax", lambda y: torch.softmax(y, -1)),
        ]
    )
    @pytest.mark.quick(6)
    def test_functions_of_codes(self, _name, function):
        """Between codes they are tables: the float program's codes, but where its own function rounds otherwise."""
        x = torch.randn(64, 32)
        program = exported(Holding(lambda m, x: quantized(function(both(x, 0.1)), 0.01)), x)
        found, report = export.to_integer(program)
        assert len(report.rewritten) == 1 and not report.left, str(report)
        got, lowered, want = found.module()(x), export.lower(found).module()(x), program.module()(x)
        assert torch.equal(got, lowered)
        assert (got.int() - want.int()).abs().max() <= 1 and (got != want).float().mean() < 1e-3

    @pytest.mark.full
    def test_clamps_and_repeats_alone(self):
        """relu6 and upsample_nearest between other scales, and with a float result: codes move."""
        for function in (F.relu6, lambda x: F.interpolate(x[None, None], scale_factor=2)):
            program = exported(
                Holding(lambda m, x, f=function: quantized(f(both(x, 0.1)), 0.05, 3)), torch.randn(6, 32) * 4
            )
            found, report = export.to_integer(program)
            assert len(report.rewritten) == 1 and not report.left, str(report)
            x = torch.randn(6, 32) * 4
            assert torch.equal(found.module()(x), program.module()(x))
            assert torch.equal(export.lower(found).module()(x), program.module()(x))
            to_floats = exported(Holding(lambda m, x, f=function: f(both(x, 0.1))), x)
            found, report = export.to_integer(to_floats)
            assert not report.left, str(report)
            assert torch.equal(found.module()(x), to_floats.module()(x))
