"""Operators with integers of LiteRT's own: slopes, extremes, logarithms of shares, grouped transposed convolutions."""

import itertools
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hop
from hop.export import targets

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from hop.export.targets.tflite.reading import read_graph
from tests.export.test_tflite import exported
from tests.support.tflite_models import Step, Weights, qd


def codes_of_slopes(*slopes: float) -> Tensor:
    codes = torch.tensor([round(s / 0.01) + 7 for s in slopes]).to(torch.int8)
    return qd.dequantize_per_tensor.default(codes, 0.01, 7, -128, 127, torch.int8)


def by_channel(x: Tensor) -> Tensor:
    return F.prelu(x, torch.linspace(-0.3, 0.9, x.shape[1]))


LOG = (1 / 16, 127)
INT8: dict[str, tuple[Callable[..., Tensor], Any, tuple[float, int], str]] = {
    "prelu": (by_channel, None, (0.025, -9), "PRELU"),
    "prelu of one slope": (lambda x: F.prelu(x, torch.tensor([0.2])), None, (0.025, -9), "PRELU"),
    "prelu of codes": (lambda x: F.prelu(x, codes_of_slopes(0.2, -0.1, 1.1, 0, 0.3, 1)), None, (0.04, 3), "PRELU"),
    "prelu, bounded": (lambda x: by_channel(x).clamp(0, 6), None, (0.03, -120), "RELU6"),
    "prelu of a matrix": (lambda x: by_channel(x.reshape(12, 72)), None, (0.03, 5), "PRELU"),
    "prelu of rows": (lambda x: by_channel(x.flatten(2)), None, (0.03, 5), "PRELU"),
    "log_softmax": (lambda x: x.log_softmax(-1), None, LOG, "LOG_SOFTMAX"),
    "log_softmax of long rows": (lambda x: x.flatten(1).log_softmax(1), None, LOG, "LOG_SOFTMAX"),
    "amax": (lambda x: x.amax(3), None, (0.03, 5), "REDUCE_MAX"),
    "amax, kept": (lambda x: x.amax((1, -2), keepdim=True), None, (0.05, -20), "REDUCE_MAX"),
    "amin": (lambda x: x.amin((-1, 1)), None, (0.03, 5), "REDUCE_MIN"),
    "amin of channels, bounded": (lambda x: x.amin(1).relu(), None, (0.02, -90), "RELU"),
    "hardswish": (F.hardswish, None, (0.02, -100), "HARD_SWISH"),
    "hardswish, bounded": (lambda x: F.hardswish(x).relu(), None, (0.02, -100), "RELU"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), None, (0.021, -60), "LEAKY_RELU"),
    "leaky_relu, falling": (lambda x: F.leaky_relu(x, -1.5), None, (0.04, 3), "LEAKY_RELU"),
    "sigmoid, bounded": (lambda x: (x.sigmoid()).clamp(0, 6), None, (1 / 256, -128), "RELU"),
    "mean, bounded": (lambda x: x.mean((2, 3)).relu(), None, (0.005, 0), "RELU"),
    "maximum with ceil_mode": (lambda x: F.max_pool2d(x, 3, 2, 0, ceil_mode=True), None, (0.03, 5), "PADV2"),
    "maximum with both": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), None, (0.05, 5), "PADV2"),
    "maximum of rows": (lambda x: F.max_pool1d(x.flatten(2), 5, 4, 1, ceil_mode=True), None, (0.03, 5), "PADV2"),
    "maximum padded by -inf": (
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 2, 1), value=-torch.inf), 3, 2),
        None,
        (0.03, 5),
        "PADV2",
    ),
    "transposed, grouped": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, groups=3).relu(),
        lambda: Weights((6, 4, 3, 2), True, channel=1),
        (0.06, -9),
        "TRANSPOSE_CONV",
    ),
    "transposed, depthwise": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, groups=6),
        lambda: Weights((6, 1, 2, 2), False, False, channel=1),
        (0.06, -9),
        "TRANSPOSE_CONV",
    ),
    "transposed rows": (
        lambda x, w, b: F.conv_transpose1d(x.flatten(2), w, b, 3, 1, 2).relu(),
        lambda: Weights((6, 4, 3), True, channel=1),
        (0.06, -9),
        "TRANSPOSE_CONV",
    ),
    "transposed rows, grouped": (
        lambda x, w, b: F.conv_transpose1d(x.flatten(2), w, b, 2, groups=3, dilation=2),
        lambda: Weights((6, 4, 3), True, channel=1),
        (0.06, -9),
        "TRANSPOSE_CONV",
    ),
    "transposed, dilated": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 0, dilation=(2, 3)),
        lambda: Weights((6, 4, 3, 2), True, channel=1),
        (0.06, -9),
        "TRANSPOSE_CONV",
    ),
}
MICRO = (
    *("prelu", "log_softmax", "hardswish", "leaky_relu", "maximum with ceil_mode", "maximum padded by -inf"),
    *("amax", "transposed, grouped", "transposed rows"),
)


def operators(file: Any) -> list[str]:
    return [operator.name for operator in read_graph("test", file.buffer).operators]


def step(name: str) -> Step:
    function, weight, out, _ = INT8[name]
    model = Step(function, out, weight and weight())
    if weight and model.weight is not None and model.weight.bias is not None:
        groups = 3 if "grouped" in name else 1
        model.weight.bias = nn.Buffer(torch.randn(model.weight.codes.shape[1] * groups))
    return model


class Steps(nn.Module):
    """Some of the calls, as one model of several outputs."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(map(step, names))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(step(x) for step in self.steps)


class TestInt8(unittest.TestCase):
    def test_each_operator(self) -> None:
        """One call that is written as each operator of LiteRT, in one file."""
        self.check([*{INT8[name][3]: name for name in INT8}.values()], "TFLITE")

    @parameterized.expand([*itertools.product(INT8, ["TFLITE"]), *itertools.product(MICRO, ["TFLITE_MICRO"])])
    @pytest.mark.quick(36)
    def test_codes(self, name: str, target: str) -> None:
        self.check([name], target)

    def check(self, names: Sequence[str], target: str) -> None:
        """Written, run by LiteRT, and read: no code differs."""
        kernels = "micro" if target == "TFLITE_MICRO" else "reference"
        if kernels == "micro":
            pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")
        torch.manual_seed(5)
        model = Steps(names)
        x = torch.randn(2, 6, 9, 8)
        program = exported(model, x, target=getattr(targets, target))
        file = hop.export.to_tflite(program)
        found = hop.export.verify(program, file, [(x,), (x * 2,)], kernels=kernels)
        assert found.first is None and found.rows, str(found)
        back = hop.export.from_tflite(file)
        results = program.module()(x)
        again = back.module()(x)
        for got, read, want, name in zip(results, tree_leaves(again), model(x), names, strict=True):
            assert torch.equal(read, got), name
            assert (got - want).abs().max() <= 2.01 * INT8[name][2][0] and len(want.unique()) > 2, name
        written, rewritten = operators(file), operators(hop.export.to_tflite(back))
        for name in names:
            operator = INT8[name][3]
            assert operator in written and rewritten.count(operator) == written.count(operator), (name, written)
