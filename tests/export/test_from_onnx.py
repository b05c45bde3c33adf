"""ONNX files as programs: the integers of onnxruntime, and errors that name the node."""

import itertools
import platform
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import nn

import hop
from hop.export.targets import ONNX_INTEGER, ONNX_QDQ, PT2E

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere onnxruntime has other kernels")

from tests.support.onnx_models import MODELS, Graph, dynamic, exported, quantized, run  # noqa: E402

KINDS = onnx.TensorProto
UNITS = (0.05, 3), (0.04, -7), (0.11, 5)  # scales and zero points of int8; uint8 has 128 more


def calls(program: Any, of: str = "hop_scaled_buffers") -> list[str]:
    """The operators that run on codes."""
    return [str(n.args[0]) for n in program.graph.nodes if of in str(n.target)]


class Codes(Graph):
    """A file in which two float inputs are quantized."""

    def __init__(self, *shapes: tuple[int, ...], signed: bool = True, opset: int = 21) -> None:
        super().__init__(opset)
        self.dtype, self.offset = (torch.int8, 0) if signed else (torch.uint8, 128)
        self.shapes = shapes
        self.read = [self.quantize(self.input(f"x{i}", s), *UNITS[i]) for i, s in enumerate(shapes)]

    def units(self, scale: float, zero: int) -> tuple[str, str]:
        scales = self.constant(torch.tensor(scale))
        return scales, self.constant(torch.tensor(zero + self.offset, dtype=self.dtype))

    def quantize(self, x: str, scale: float, zero: int) -> str:
        return self.node("QuantizeLinear", x, *self.units(scale, zero))

    def ends(self, value: int) -> str:
        return self.constant(torch.tensor([value]))

    def operand(self, i: int) -> tuple[str, str, str]:
        return self.read[i], *self.units(*UNITS[i])

    def weight(self, *shape: int, channels: int | None = None) -> tuple[str, str, str]:
        """Random codes with their scale, or one for each index of a dimension, and zero point."""
        generator = torch.Generator().manual_seed(len(self.constants))
        codes = torch.randint(-64, 64, shape, generator=generator).to(torch.int8)
        count = [] if channels is None else [shape[channels]]
        scales = torch.rand(count, generator=generator) * 0.01 + 0.01
        zeros = torch.zeros(count, dtype=torch.int8)
        return self.constant(codes), self.constant(scales), self.constant(zeros)

    def result(self, op: str, *inputs: str, out: tuple[float, int] = (0.2, 3), **attributes: Any) -> str:
        """The codes that an operator returns, dequantized; its last inputs are their scale and zero point."""
        more = attributes.pop("bias", None)
        given = (*inputs, *self.units(*out), *([more] if more else []))
        return self.node("DequantizeLinear", self.node(op, *given, **attributes), *self.units(*out))

    def check(self, *outputs: str, **options: Any) -> Any:
        """Compare outputs with onnxruntime's; returns the program."""
        model = self.model(*outputs)
        program = hop.export.from_onnx(model, **options)
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(s, generator=generator) * 2 for s in self.shapes]
        results = program.module()(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        for name, own, its in zip(outputs, results, run(model, *inputs), strict=True):
            assert torch.equal(own, its), (name, (own - its).abs().max())
            assert len(torch.unique(own)) > 2, name
        return program


class TestOperators(unittest.TestCase):
    """Each operator of codes, signed and unsigned."""

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_convolutions(self, signed: bool) -> None:
        g = Codes((2, 4, 9, 8), signed=signed)
        bias = g.constant(torch.arange(-300, 300, 100, dtype=torch.int32))
        ways = (
            {"pads": [1, 0, 1, 0], "group": 2},
            {"pads": [0, 1, 2, 1]},
            {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        )
        shapes = (6, 2, 3, 3), (6, 4, 3, 3), (6, 4, 3, 2)
        ys = [
            g.result("QLinearConv", *g.operand(0), *g.weight(*shape, channels=c), out=(0.3, 4), bias=bias, **way)
            for way, shape in zip(ways, shapes, strict=True)
            for c in (0, None)
        ]
        program = g.check(*ys)
        assert calls(program) == ["aten.conv2d.default"] * 6
        assert torch.int32 in [b.dtype for b in program.buffers()], "the bias stays an integer"

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_matrix_products(self, signed: bool) -> None:
        g = Codes((2, 5, 16), (3, 1, 5, 16), (2, 16, 4), signed=signed)
        ys = [g.result("QLinearMatMul", *g.operand(0), *g.weight(16, 6, channels=c)) for c in (None, 1)]
        ys.append(g.result("QLinearMatMul", *g.operand(1), *g.operand(2)))
        assert calls(g.check(*ys)) == ["aten.linear.default"] * 2 + ["aten.bmm.default"]

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_gemm(self, signed: bool) -> None:
        g = Codes((5, 16), signed=signed)
        bias = g.constant(torch.arange(-300, 300, 100, dtype=torch.int32))
        w, v = g.weight(6, 16, channels=0), g.weight(16, 6)
        ys = [
            g.result("com.microsoft.QGemm", *g.operand(0), *w, bias, transB=1),
            g.result("com.microsoft.QGemm", *g.operand(0), *v, ""),
        ]
        assert calls(g.check(*ys)) == ["aten.linear.default"] * 2

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_elementwise(self, signed: bool) -> None:
        g = Codes((3, 4, 50), (4, 1), signed=signed)
        ys = [
            g.result(f"com.microsoft.{n}", *g.operand(0), *g.operand(1), out=UNITS[2])
            for n in ("QLinearAdd", "QLinearMul")
        ]
        assert calls(g.check(*ys)) == ["aten.add.Tensor", "aten.mul.Tensor"]

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_of_one(self, signed: bool) -> None:
        cases: tuple[tuple[str, dict[str, Any], tuple[float, int]], ...] = (
            ("QLinearAveragePool", {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}, (0.03, 5)),
            ("QLinearAveragePool", {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}, (0.03, 5)),
            ("QLinearGlobalAveragePool", {}, (0.02, 5)),
            ("QLinearSigmoid", {}, (1 / 256, -128)),
            ("QLinearLeakyRelu", {"alpha": 0.3}, (0.04, -60)),
            ("QLinearSoftmax", {"axis": -1, "opset": 13}, (1 / 256, -128)),
        )
        g = Codes((2, 3, 8, 9), signed=signed)
        ys = [g.result(f"com.microsoft.{op}", *g.operand(0), out=out, **options) for op, options, out in cases]
        assert len(calls(g.check(*ys))) == len(cases)

    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_moves(self, signed: bool) -> None:
        g = Codes((2, 4, 8, 9), (2, 4, 4, 4), signed=signed)
        pooled = g.node("MaxPool", g.read[0], kernel_shape=[2, 3], strides=[2, 2])
        moved = g.node("Transpose", g.node("Slice", pooled, *map(g.ends, (0, 3, 1))), perm=[0, 1, 3, 2])
        back = g.node("Transpose", moved, perm=[0, 1, 3, 2])
        whole = g.node("Concat", back, g.node("Slice", pooled, *map(g.ends, (3, 9, 1))), axis=1)
        parts = (whole, *g.units(*UNITS[0])), (g.read[1], *g.units(*UNITS[1]))
        y = g.node("com.microsoft.QLinearConcat", *g.units(*UNITS[2]), *parts[0], *parts[1], axis=1)
        g.check(g.node("DequantizeLinear", y, *g.units(*UNITS[2])))


class TestProductsOfCodes(unittest.TestCase):
    """Integer products without scales."""

    @parameterized.expand(itertools.product(("UINT8", "INT8"), ("one", "each", "none")))
    @pytest.mark.quick(3)
    def test_matmul(self, kind: str, zeros: str) -> None:
        dtype = getattr(torch, kind.lower())
        g = Graph()
        x = g.input("x", (3, 5, 8), getattr(KINDS, kind))
        w = torch.randint(-64, 64, (8, 6), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        given = [x, g.constant(w)]
        if zeros != "none":
            given += [g.constant(torch.tensor(7, dtype=dtype))]
            given += [g.constant(torch.tensor(-3 if zeros == "one" else list(range(-3, 3)), dtype=torch.int8))]
        model = g.model(g.node("MatMulInteger", *given), kinds=[KINDS.INT32])
        program = hop.export.from_onnx(model)
        codes = torch.randint(0, 128, (3, 5, 8), generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(program.module()(codes), run(model, codes)[0])
        assert calls(program, "hop_out_dtype") == ["aten.linear.default"]

    def test_convolution(self) -> None:
        g = Graph()
        x = g.input("x", (2, 3, 7, 7), KINDS.UINT8)
        w = torch.randint(0, 255, (4, 3, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        zeros = [g.constant(torch.tensor(z, dtype=torch.uint8)) for z in (9, 120)]
        y = g.node("ConvInteger", x, g.constant(w), *zeros, pads=[1, 1, 1, 1], strides=[2, 1])
        model = g.model(y, kinds=[KINDS.INT32])
        codes = torch.randint(0, 255, (2, 3, 7, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        assert torch.equal(hop.export.from_onnx(model).module()(codes), run(model, codes)[0])

    def test_dynamic_scales(self) -> None:
        g = Graph()
        codes, scale, zero = g.node("DynamicQuantizeLinear", g.input("x", ("rows", 8)), count=3)
        model = g.model(codes, scale, zero, kinds=[KINDS.UINT8, KINDS.FLOAT, KINDS.UINT8])
        program = hop.export.from_onnx(model)
        for x in (torch.randn(5, 8), torch.rand(2, 8) + 1, -torch.rand(7, 8) - 1, torch.zeros(3, 8)):
            for own, its in zip(program.module()(x), run(model, x), strict=True):
                assert torch.equal(own, its.reshape(own.shape)) and own.dtype == its.dtype

    def test_half_bytes(self) -> None:
        """Weights of 4 bits, by blocks and by columns."""
        generator = torch.Generator().manual_seed(0)
        codes, x = torch.randint(-8, 8, (32, 6), generator=generator), torch.randn(3, 32, generator=generator)
        for options, shape in (({"axis": 0, "block_size": 16}, (2, 6)), ({"axis": 1}, (6,))):
            g = Graph()
            scales = torch.rand(shape, generator=generator) + 0.1
            w = g.node("DequantizeLinear", g.constant(codes, KINDS.INT4), g.constant(scales), **options)
            model = g.model(g.node("MatMul", g.input("x", (3, 32)), w))
            program = hop.export.from_onnx(model)
            theirs = run(model, x, optimized=False)[0]  # by default with activations of 8 bits
            torch.testing.assert_close(program.module()(x), theirs, rtol=1e-5, atol=1e-4)
            assert calls(program) == ["aten.linear.default"]

    @pytest.mark.full
    def test_blocks_larger_than_the_weight(self) -> None:
        """Memory depends on the weight, not on the size of blocks that the file states."""
        codes, scale, x = torch.arange(-6, 6).reshape(4, 3), torch.rand(4, 1) + 0.1, torch.randn(2, 4)
        g = Graph()
        w = g.node("DequantizeLinear", g.constant(codes, KINDS.INT8), g.constant(scale), axis=1, block_size=2**33)
        program = hop.export.from_onnx(g.model(g.node("MatMul", g.input("x", (2, 4)), w)))
        torch.testing.assert_close(program.module()(x), x @ (codes * scale))


class TestModels(unittest.TestCase):
    """What onnxruntime's quantizer writes."""

    def check(self, name: str, **options: Any) -> Any:
        model, shape = MODELS[name]
        torch.manual_seed(3)
        file = quantized(exported(model(), torch.randn(shape)), shape, **options)
        program = hop.export.from_onnx(file)
        x = torch.randn(shape)
        own, (its,) = program.module()(x), run(file, x)
        if name == "encoder":  # layer norm and gelu are floats, whose last bits may differ
            assert (own - its).abs().max() <= 0.06 and ((own - its).abs() > 1e-6).float().mean() < 0.02
        else:
            assert torch.equal(own, its), (own - its).abs().max()
        return program

    @pytest.mark.full
    def test_pictures(self) -> None:
        program = self.check("pictures")
        assert {"aten.conv2d.default", "aten.linear.default", "aten.max_pool2d.default"} <= set(calls(program))
        assert not [n for n in program.graph.nodes if n.target is torch.ops.aten.conv2d.default]

    @parameterized.expand(
        itertools.product(MODELS, ("QDQ", "QOperator"), (("QUInt8", "QInt8"), ("QInt8", "QInt8"), ("QUInt8", "QUInt8")))
    )
    @pytest.mark.full
    def test_all(self, name: str, format: str, dtypes: tuple[str, str]) -> None:
        for per_channel in (True, False):
            given = dict(zip(("activations", "weights"), dtypes, strict=True))
            assert calls(self.check(name, format=format, per_channel=per_channel, **given))

    @parameterized.expand(["perceptron", "encoder"])
    @pytest.mark.full
    def test_dynamic(self, name: str) -> None:
        model, shape = MODELS[name]
        torch.manual_seed(3)
        file = dynamic(exported(model(), torch.randn(shape)))
        x = torch.randn(shape)
        torch.testing.assert_close(hop.export.from_onnx(file).module()(x), run(file, x)[0], rtol=1e-5, atol=1e-5)


class TestRoundTrip(unittest.TestCase):
    def test_qoperator(self) -> None:
        """Codes in, codes out, as to_qoperator writes them."""
        g = Codes((2, 4, 8, 8), signed=False)
        y = g.node("QLinearConv", *g.operand(0), *g.weight(6, 4, 3, 3, channels=0), *g.units(0.3, 4))
        y = g.result("com.microsoft.QLinearGlobalAveragePool", y, *g.units(0.3, 4), out=(0.05, 1))
        program = g.check(y, target=ONNX_INTEGER)
        file = hop.export.to_qoperator(program)
        x = torch.randn(2, 4, 8, 8)
        assert hop.export.verify(program, file, (x,)).first is None
        back = hop.export.from_onnx(file, target=ONNX_INTEGER)
        scale, zero = UNITS[0]
        codes = ((x / scale).round() + zero + 128).clamp(0, 255).to(torch.uint8)
        result = (back.module()(codes).to(torch.float32) - 129) * 0.05
        assert torch.equal(result, program.module()(x))

    @parameterized.expand([(None,), (torch.uint8,)])
    @pytest.mark.quick(2)
    def test_onnx(self, weights: Any) -> None:
        """Standard operators, and a branch that a constant product chooses."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
        hop.quantize_(model, "int8", pack=False)
        x = torch.randn(5, 64)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        file = hop.export.to_onnx(program, weights=weights)
        back = hop.export.from_onnx(file)
        for given in (x, torch.randn(9, 64)):
            assert torch.equal(back.module()(given), model(given))

    @pytest.mark.full
    def test_form(self) -> None:
        """Another target, saving, and the form of a program."""
        g = Codes((3, 16), signed=True)
        file = g.model(g.result("QLinearMatMul", *g.operand(0), *g.weight(16, 6)))
        outside = onnx.ModelProto()
        outside.CopyFrom(file)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save_model(outside, str(path), save_as_external_data=True, size_threshold=0, location="weights.bin")
            program = hop.export.from_onnx(path)
            torch.export.save(program, Path(folder) / "model.pt2")
            loaded = torch.export.load(Path(folder) / "model.pt2")
        x = torch.randn(3, 16)
        assert torch.equal(loaded.module()(x), run(file, x)[0])
        assert torch.equal(hop.export.lower(program).module()(x), run(file, x)[0])
        other = hop.export.from_onnx(file, target=PT2E)
        assert [n for n in other.graph.nodes if "Reciprocal" in str(n.args[1:2])]
        assert torch.equal(hop.export.from_onnx(file, target=ONNX_QDQ).module()(x), run(file, x, optimized=False)[0])
        assert [n.name for n in program.graph.nodes if n.op == "placeholder"][-1] == "x0"
        assert next((row.bits, row.status) for row in hop.export.ranges(program).products)[1] == "proven"


class TestFloats(unittest.TestCase):
    def test_float_model(self) -> None:
        """A model without codes is a float program, which to_scheme can quantize."""
        g = Graph()
        x = g.input("x", ("batch", 4, 6, 6))
        generator = torch.Generator().manual_seed(0)
        w, v = (torch.randn(s, generator=generator) for s in ((8, 4, 3, 3), (8, 5)))
        y = g.node("Relu", g.node("Conv", x, g.constant(w), pads=[1, 1, 1, 1]))
        y = g.node("ReduceMean", y, g.constant(torch.tensor([2, 3])), keepdims=0)
        sizes = g.node(
            "Concat", g.node("Slice", g.node("Shape", y), *map(g.constant, ([0], [1]))), g.constant([-1]), axis=0
        )
        y = g.node("Softmax", g.node("MatMul", g.node("Reshape", y, sizes), g.constant(v)))
        model = g.model(y)
        program = hop.export.from_onnx(model)
        for n in (1, 3):
            x = torch.randn(n, 4, 6, 6)
            torch.testing.assert_close(program.module()(x), run(model, x)[0], rtol=1e-5, atol=1e-6)
        fixed = hop.export.from_onnx(model, sizes={"batch": 3})
        assert torch.equal(fixed.module()(x), program.module()(x))
        changed, report = hop.export.to_scheme(fixed, hop.schemes.INT8_DYNAMIC)
        assert report.rewritten and changed.module()(x).shape == (3, 5)

    @parameterized.expand(
        [
            ("Resize", {"mode": "linear"}, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
            ("Resize", {"mode": "nearest"}, lambda x: F.interpolate(x, scale_factor=2.0)),
        ]
    )
    @pytest.mark.quick(2)
    def test_resize(self, op: str, options: Any, function: Any) -> None:
        g = Graph()
        x = torch.randn(1, 2, 3, 4)
        model = g.model(g.node(op, g.input("x", x.shape), "", g.constant([1.0, 1.0, 2.0, 2.0]), **options))
        y = hop.export.from_onnx(model).module()(x)
        torch.testing.assert_close(y, run(model, x)[0])
        torch.testing.assert_close(y, function(x))


class TestErrors(unittest.TestCase):
    def refused(self, g: Graph, y: str, error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            hop.export.from_onnx(g.model(y), **options)

    def test_arguments(self) -> None:
        with pytest.raises(TypeError, match="from_onnx: model must be the path of an ONNX file, its bytes"):
            hop.export.from_onnx(3)
        with pytest.raises(TypeError, match=r"from_onnx: target must be a .*Target or None, got 'ONNX'"):
            hop.export.from_onnx(b"", target="ONNX")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="from_onnx: sizes must be a dict of sizes by the names of dimensions"):
            hop.export.from_onnx(b"", sizes=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="from_onnx: model is not an ONNX file"):
            hop.export.from_onnx(b"nothing of the kind")
        with pytest.raises(FileNotFoundError):
            hop.export.from_onnx("no.onnx")
        g = Graph()
        y = g.node("Relu", g.input("x", ("batch", 3)))
        self.refused(
            g, y, ValueError, r"sizes has 'time', and the dynamic dimensions of model are 'batch'", sizes={"time": 3}
        )
        self.refused(g, y, ValueError, r"sizes\['batch'\] must be a whole number from 1, got 0", sizes={"batch": 0})

    def test_nodes(self) -> None:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("NonZero", {}, "node 0 NonZero 'nonzero_0' is not supported: its operator is unknown here"),
            ("Softmax", {"axes": 3}, "node 0 Softmax 'softmax_0' is not supported: its attribute 'axes' is not supp"),
            ("Softmax", {"axis": 3}, "node 0 Softmax 'softmax_0' is invalid: its axis is 3, and must be from -2 to 1"),
            ("Softmax", {"axis": "1"}, "is not supported: its attribute axis is '1', and must be of the type int"),
            ("com.other.Relu", {}, "node 0 com.other.Relu 'relu_0' is not supported"),
            ("MaxPool", {"kernel_shape": [2, 2]}, "its input has 2 dimensions, and must have 3 to 5"),
        ]
        for op, options, message in cases:
            g = Graph()
            self.refused(g, g.node(op, g.input("x", (2, 3)), **options), (NotImplementedError, ValueError), message)  # type: ignore[arg-type]

    def test_quantization(self) -> None:
        g = Codes((2, 3))
        y = g.node("DequantizeLinear", g.read[0], *g.units(-0.5, 3))
        self.refused(g, y, ValueError, "DequantizeLinear .* is invalid: its scale is -0.5, and must be positive")
        g = Graph()
        x = g.input("x", (2, 3))
        y = g.node("QuantizeLinear", x, g.constant(torch.tensor(0.1)), g.constant(torch.tensor(0, dtype=torch.int32)))
        y = g.node("DequantizeLinear", y, g.constant(torch.tensor(0.1)))
        message = "quantizing to INT32 is not supported; use one of INT8, UINT8, INT16, UINT16"
        self.refused(g, y, NotImplementedError, message)
        g = Codes((2, 3))
        y = g.node("Sqrt", g.node("DequantizeLinear", *g.operand(0)))
        self.refused(g, y, ValueError, "from_onnx: model: .*would stay in floats", target=ONNX_INTEGER)

    def test_dimensions(self) -> None:
        g = Graph()
        y = g.node("Reshape", g.input("x", ("n", 4)), g.constant([8]))
        self.refused(g, y, ValueError, "the dimensions n cannot all stay dynamic; give sizes, such as")

    def test_structure(self) -> None:
        g = Graph()
        g.node("Relu", g.input("x", (2, 3)))
        model = g.model("relu_0")
        changes = (
            (lambda m: m.graph.node[0].input.__setitem__(0, "y"), ValueError, "reads 'y', which no node before it"),
            (lambda m: m.graph.node.append(m.graph.node[0]), ValueError, "returns 'relu_0', which already has a value"),
            (lambda m: m.graph.output[0].__setattr__("name", "z"), ValueError, "returns 'z', which no node computes"),
            (lambda m: m.opset_import[0].__setattr__("version", 99), NotImplementedError, "has opset 99; supported"),
            (lambda m: m.functions.add(), NotImplementedError, "has functions; inline them"),
            (
                lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"),
                NotImplementedError,
                "input 'x' is not a",
            ),
        )
        for change, error, message in changes:
            broken = onnx.ModelProto()
            broken.CopyFrom(model)
            change(broken)
            with pytest.raises(error, match=message):
                hop.export.from_onnx(broken)


class TestHostile(unittest.TestCase):
    def model(self, **external: str) -> Any:
        g = Graph()
        y = g.node("Add", g.input("x", (4,)), g.constant(torch.zeros(4)))
        model = g.model(y)
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = KINDS.EXTERNAL
        for key, value in external.items():
            tensor.external_data.add(key=key, value=value)
        return model

    @parameterized.expand(
        [
            ({"location": "../secret.bin"}, "not inside the model's folder"),
            ({"location": "/etc/hostname"}, "not inside the model's folder"),
            ({"location": "link.bin"}, "not inside the model's folder"),
            ({"location": ""}, "not inside the model's folder"),
            ({"location": "data.bin", "offset": "8"}, "takes 16 bytes, and has 16 from byte 8 of 'data.bin'"),
            ({"location": "data.bin", "length": "9999999999"}, "takes 16 bytes, and has 9999999999 from byte 0"),
            ({"location": "data.bin", "offset": "-4"}, "must be whole numbers from 0"),
        ]
    )
    @pytest.mark.quick(3)
    def test_external_data(self, external: dict[str, str], message: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "secret.bin").write_bytes(bytes(16))
            inner = Path(folder) / "model"
            inner.mkdir()
            (inner / "data.bin").write_bytes(bytes(16))
            (inner / "link.bin").symlink_to(Path(folder) / "secret.bin")
            path = inner / "model.onnx"
            path.write_bytes(self.model(**external).SerializeToString())
            with pytest.raises(ValueError, match=message):
                hop.export.from_onnx(path)
            path.write_bytes(self.model(location="data.bin").SerializeToString())
            assert torch.equal(hop.export.from_onnx(path).module()(torch.ones(4)), torch.ones(4))
        with pytest.raises(NotImplementedError, match="give the path of the model's file"):
            hop.export.from_onnx(self.model(location="data.bin"))

    def test_sizes(self) -> None:
        """A shape that the data does not have."""
        for dims in ([5], [-1], [2**40, 2**40], [4, 2**31]):
            model = self.model()
            tensor = model.graph.initializer[0]
            tensor.data_location = KINDS.DEFAULT
            tensor.raw_data = bytes(16)
            tensor.dims[:] = dims
            with pytest.raises(ValueError, match="from_onnx: model is damaged: constant 'c0' has "):
                hop.export.from_onnx(model)

    def test_growth(self) -> None:
        """Small files that describe huge values: an error, or nothing allocated."""
        g = Graph()
        y = g.constant([2**20, 2**20])
        with pytest.raises((NotImplementedError, ValueError), match="from_onnx: model: node"):
            hop.export.from_onnx(g.model(g.node("Add", g.input("x", (1,)), g.node("Expand", g.input("z", (2,)), y))))
        g = Graph()
        y = g.constant([3])
        for _ in range(100):
            y = g.node("Mul", y, y)
        with pytest.raises(ValueError, match=r"Mul '.*' is invalid: its result does not fit int64"):
            hop.export.from_onnx(g.model(g.node("Reshape", g.input("x", (3,)), y)))

    def test_damaged(self) -> None:
        """Bytes changed or left out: an error that names the place, or another model."""
        from hop.export.targets.onnx_import.reading import read_graph

        g = Codes((2, 4, 8, 8))
        data = g.model(g.result("QLinearConv", *g.operand(0), *g.weight(6, 4, 3, 3))).SerializeToString()
        generator, read = torch.Generator().manual_seed(0), 0
        for trial in range(400):
            broken = bytearray(data)
            for _ in range(1 + trial % 3):
                place = int(torch.randint(0, len(data), (), generator=generator))
                broken[place] = int(torch.randint(0, 256, (), generator=generator))
            cut = int(torch.randint(0, len(data), (), generator=generator)) if trial % 4 == 1 else len(data)
            try:
                read_graph("from_onnx", bytes(broken[:cut]))
                read += 1
            except (ValueError, NotImplementedError) as error:
                assert str(error).startswith("from_onnx: model"), error
        assert 0 < read < 400


def test_constants_are_not_executed() -> None:
    """An If whose condition depends on an input is refused."""
    g = Graph()
    x = g.input("x", (), KINDS.BOOL)
    inner = Graph()
    y = inner.node("Constant", value_floats=[1.0])
    branch = inner.model(y).graph
    other = Graph().model().graph
    other.CopyFrom(branch)
    other.node[0].output[0] = other.output[0].name = "other"
    y = g.node("If", x, then_branch=branch, else_branch=other)
    with pytest.raises(NotImplementedError, match="its condition depends on inputs; export the model without"):
        hop.export.from_onnx(g.model(y))
