"""onnxruntime's arithmetic of codes: our conventions give what its operators give, one at a time."""

import platform
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

from hop.numerics.formats import INT8, UINT8
from hop.numerics.integer.functions import OrtAdd, OrtAveragePool, OrtMean, OrtMultiply, OrtSoftmax

onnx = pytest.importorskip("onnx", reason="needs onnx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere onnxruntime has other kernels")

aten = torch.ops.aten
FORMATS = {np.int8: INT8, np.uint8: UINT8}
KINDS = [("int8", np.int8), ("uint8", np.uint8)]
Units = tuple[Any, Any]


def run(op: str, operands: Sequence[tuple[Any, bool]], **attributes: Any) -> np.ndarray:
    """A node of one of onnxruntime's operators, on arrays; of each, whether it is a constant."""
    names = [f"x{i}" for i in range(len(operands))]
    kinds = [onnx.helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype) for x, _ in operands]
    node = onnx.helper.make_node(op, names, ["y"], domain="com.microsoft", **attributes)
    given = {n: np.asarray(x) for n, (x, constant) in zip(names, operands, strict=True) if not constant}
    inputs = [
        onnx.helper.make_tensor_value_info(n, k, given[n].shape)
        for n, k in zip(names, kinds, strict=True)
        if n in given
    ]
    constants = [
        onnx.numpy_helper.from_array(np.asarray(x), n)
        for n, (x, _) in zip(names, operands, strict=True)
        if n not in given
    ]
    kind = next(k for k, (x, c) in zip(kinds, operands, strict=True) if not c)
    outputs = [onnx.helper.make_tensor_value_info("y", kind, None)]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs, constants)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]


class Draws:
    """Random codes and units: scales of all sizes, and powers of two, by which many results lie between two codes."""

    def __init__(self, kind: Any, seed: int) -> None:
        self.rng, self.kind = np.random.default_rng(seed), kind

    def codes(self, *shape: int) -> np.ndarray:
        info = np.iinfo(self.kind)
        return self.rng.integers(info.min, info.max + 1, shape).astype(self.kind)

    def scale(self, about: float = 0.06) -> Any:
        if self.rng.random() < 0.4:
            return np.float32(2.0 ** round(np.log2(about) + self.rng.integers(-2, 3)))
        return np.float32(about * np.exp(self.rng.uniform(-3, 3)))

    def units(self, about: float = 0.06) -> Units:
        return self.scale(about), self.codes(1)[0]


def constant(units: Units) -> list[tuple[Any, bool]]:
    return [(np.asarray(units[0]), True), (np.asarray(units[1]), True)]


def ours(x: np.ndarray, own: Units, out: Units) -> tuple[Any, ...]:
    """The first arguments of a convention."""
    return torch.from_numpy(x), *_tensors(own), *_tensors(out), FORMATS[x.dtype.type]


def _tensors(units: Units) -> tuple[Tensor, int]:
    return torch.tensor(float(units[0])), int(units[1])


PAIRS = {
    "alike": ((8, 16, 33), (8, 16, 33)),
    "row": ((8, 16, 33), (33,)),
    "column": ((8, 16, 33), (16, 1)),
    "column before": ((16, 1), (8, 16, 33)),
    "number": ((8, 16, 33), (1,)),
    "number before": ((1,), (8, 16, 33)),
    "both": ((8, 1, 33), (16, 1)),
    "ones": ((8, 16, 1), (8, 16, 1)),
    "one": ((1,), (1,)),
}
TWO = [(f"{n}_{k}".replace(" ", "_"), t, s) for n, s in PAIRS.items() for k, t in KINDS]


class TestTwoOperands(unittest.TestCase):
    def check(self, op: str, rule: Any, kind: Any, shapes: Any, about: Callable[[Any, Any], float]) -> None:
        draws = Draws(kind, 1)
        for _ in range(60):
            a, b = draws.codes(*shapes[0]), draws.codes(*shapes[1])
            first, second = draws.units(), draws.units()
            out = draws.units(about(first[0], second[0]))
            theirs = run(op, [(a, False), *constant(first), (b, False), *constant(second), *constant(out)])
            its = dict(zip(("other_scale", "other_zero_point"), _tensors(second), strict=True))
            found = rule.codes(*ours(a, first, out), other=torch.from_numpy(b), **its)
            np.testing.assert_array_equal(found.numpy(), theirs)

    @parameterized.expand(TWO)
    @pytest.mark.quick(8)
    def test_add(self, _name: str, kind: Any, shapes: Any) -> None:
        self.check("QLinearAdd", OrtAdd(), kind, shapes, lambda a, b: float(max(a, b)))

    @parameterized.expand(TWO)
    @pytest.mark.quick(6)
    def test_multiply(self, _name: str, kind: Any, shapes: Any) -> None:
        self.check("QLinearMul", OrtMultiply(), kind, shapes, lambda a, b: float(a * b) * 60)


class TestReductions(unittest.TestCase):
    @parameterized.expand(KINDS)
    def test_mean(self, _name: str, kind: Any) -> None:
        draws = Draws(kind, 2)
        for _ in range(60):
            n, m = draws.rng.integers(1, 12, 2)
            x, own = draws.codes(3, 33, n, m), draws.units()
            out = draws.units(float(own[0]) / 2)
            theirs = run("QLinearGlobalAveragePool", [(x, False), *constant(own), *constant(out)], channels_last=0)
            found = OrtMean().codes(*ours(x, own, out), rest=((2, 3), True), dims=(2, 3))
            np.testing.assert_array_equal(found.numpy(), theirs)

    @parameterized.expand(KINDS)
    @pytest.mark.quick(2)
    def test_average_pool(self, _name: str, kind: Any) -> None:
        draws = Draws(kind, 3)
        for i in range(80):
            x, own = draws.codes(2, 5, *draws.rng.integers(4, 12, 2)), draws.units()
            out = own if i % 3 == 0 else draws.units(float(own[0]))
            kernel = [int(n) for n in draws.rng.integers(1, 5, 2)] if i % 5 else list(x.shape[2:])
            stride, pad = (
                [int(n) for n in draws.rng.integers(1, 4, 2)],
                [int(draws.rng.integers(0, k // 2 + 1)) for k in kernel],
            )
            counts = bool(i % 2)
            theirs = run(
                "QLinearAveragePool",
                [(x, False), *constant(own), *constant(out)],
                kernel_shape=kernel,
                strides=stride,
                pads=[*pad, *pad],
                count_include_pad=int(counts),
                channels_last=0,
            )
            rest = (kernel, stride, pad, False, counts)
            found = OrtAveragePool().codes(*ours(x, own, out), op=aten.avg_pool2d.default, rest=rest, dims=(2, 3))
            np.testing.assert_array_equal(found.numpy(), theirs)

    @parameterized.expand(KINDS)
    @pytest.mark.quick(2)
    def test_softmax(self, _name: str, kind: Any) -> None:
        """Also of shares that are no code, which saturate."""
        draws = Draws(kind, 4)
        for i in range(60):
            x, own = draws.codes(20, int(draws.rng.integers(2, 300))), draws.units()
            out = (np.float32(1 / 256), np.iinfo(kind).min) if i % 2 else draws.units(0.004)
            out = out[0], kind(out[1])
            theirs = run("QLinearSoftmax", [(x, False), *constant(own), *constant(out)], axis=1, opset=13)
            found = OrtSoftmax().codes(*ours(x, own, out), dim=1)
            np.testing.assert_array_equal(found.numpy(), theirs)


class TestErrors(unittest.TestCase):
    def test_refused(self) -> None:
        x, one = torch.zeros(4, 1, dtype=torch.int8), torch.ones(())
        with pytest.raises(ValueError, match=r"OrtSoftmax: dimension -1 must have 2 to 1024 elements, got 1"):
            OrtSoftmax().codes(x, one, 0, one, 0, INT8)
        with pytest.raises(ValueError, match=r"OrtAdd: subtracts must be False"):
            OrtAdd().codes(x, one, 0, one, 0, INT8, other=x, other_scale=one, other_zero_point=0, subtracts=True)
        with pytest.raises(TypeError, match=r"OrtMean: codes must be torch.int8 or torch.uint8, got torch.int16"):
            OrtMean().codes(x.to(torch.int16), one, 0, one, 0, INT8, dims=(0,))
        with pytest.raises(ValueError, match=r"OrtAveragePool: output_size must divide \(5, 4\), got \[2, 2\]"):
            picture = torch.zeros(1, 1, 5, 4, dtype=torch.int8)
            op = aten.adaptive_avg_pool2d.default
            OrtAveragePool().codes(picture, one, 0, one, 0, INT8, op=op, rest=([2, 2],), dims=(2, 3))
