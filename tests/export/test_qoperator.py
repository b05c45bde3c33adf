"""Programs as ONNX files of onnxruntime's operators of integers: it gives the program's codes, tensor by tensor."""

import contextlib
import io
import json
import platform
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
from hop import cli
from hop.export.targets import ONNX_INTEGER, PT2E, TFLITE
from tests.support.tflite_chains import Chain
from tests.support.tflite_models import (
    Head,
    Layer,
    Network,
    Point,
    Step,
    Weights,
    both,
    networks,
    of_uint8,
    transformer,
)

onnx = pytest.importorskip("onnx", reason="needs onnx")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere onnxruntime has other kernels")

qd = torch.ops.quantized_decomposed
NAMES = ["digits", "residual", "separable", "mobilenet", "transformer"]


def is_exact(dtype: type[np.int8] | type[np.uint8]) -> bool:
    """Whether onnxruntime multiplies `dtype` by int8 exactly: without VNNI it may saturate sums of two products."""
    limit = int(np.iinfo(dtype).max)
    x, w = np.full((1, 4), limit, dtype), np.full((4, 1), 127, np.int8)
    values = {
        "w": w,
        "w_zero": np.int8(0),
        "zero": dtype(0),
        "one": np.float32(1),
        "scale": np.float32(limit * 127 / 25),
    }
    node = onnx.helper.make_node("QLinearMatMul", ["x", "one", "zero", "w", "one", "w_zero", "scale", "zero"], ["y"])
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = [onnx.helper.make_tensor_value_info(n, element, None) for n in "xy"]
    constants = [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in values.items()]
    graph = onnx.helper.make_graph([node], "one", infos[:1], infos[1:], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].item() == 100


needs_exact_int8, needs_exact_uint8 = (
    pytest.mark.skipif(not is_exact(dtype), reason=f"onnxruntime saturates products of {dtype.__name__} by int8 here")
    for dtype in (np.int8, np.uint8)
)


def exported(model: nn.Module, *inputs: Tensor, target: Any = ONNX_INTEGER) -> Any:
    """The integer program of a model, whose ranges are found on the inputs first."""
    with torch.no_grad():
        model(*inputs)
    found = hop.export.to_integer(torch.export.export(model.eval(), inputs), target=target)
    assert not found.report.left, found.report
    return found.program


def compared(program: Any, *inputs: Tensor, **options: Any) -> int:
    """How many codes were compared, none of which differs; each call that gives codes has its tensor."""
    found = hop.export.verify(program, hop.export.to_qoperator(program, **options), inputs)
    assert found.first is None and not found.trials and not found.units, str(found)
    rows = {name for row in found.rows for name in (row.a, row.b)}  # an output has the name of its alias in a
    calls = [n for n in program.graph.nodes if "hop_scaled_buffers" in str(n.target)]
    missing = [n for n in calls if n.name not in rows]
    assert not missing, missing
    return sum(row.elements for row in found.rows)


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    return networks()[name]


class TestNetworks(unittest.TestCase):
    def check(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = model_of(name)
        x = torch.randn(shape)
        assert compared(exported(model, x), x) > 60_000

    @parameterized.expand(["residual", "transformer"])
    @needs_exact_int8
    @pytest.mark.quick(2)
    def test_every_tensor(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["digits", "separable", "mobilenet"])
    @needs_exact_int8
    @pytest.mark.full
    def test_every_tensor_of_others(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(NAMES)
    @pytest.mark.full
    def test_activations_of_uint8(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = model_of(name)
        x = torch.randn(shape)
        assert compared(exported(of_uint8(model), x), x) > 60_000

    @needs_exact_uint8
    def test_weights_of_int8(self) -> None:
        """Beside activations of uint8: as fast as they get."""
        torch.manual_seed(3)
        model, shape = model_of("residual")
        x = torch.randn(shape)
        program = exported(of_uint8(model), x)
        assert compared(program, x, weights=torch.int8) > 60_000
        kinds = [
            {t.name: t.data_type for t in onnx.load_from_string(made.buffer).graph.initializer}
            for made in (hop.export.to_qoperator(program, weights=d) for d in (torch.int8, torch.uint8))
        ]
        named = [[k for n, k in each.items() if each[n] in (2, 3) and "weight" in n] for each in kinds]
        assert set(named[0]) == {onnx.TensorProto.INT8} and set(named[1]) == {onnx.TensorProto.UINT8}

    @pytest.mark.exhaustive
    def test_ten_million_codes(self) -> None:
        total = 0
        for name in NAMES:
            model, shape = model_of(name)
            torch.manual_seed(len(name))
            x = torch.randn(16 * shape[0], *shape[1:])
            total += compared(exported(of_uint8(model), x), x)
        self.assertGreater(total, 10_000_000)


class TestRandom(unittest.TestCase):
    """Programs of random operators, the same as for TFLite; onnxruntime has no softmax of one element and bounds the
    factors of means."""

    def check(self, seeds: range) -> int:
        total = left = 0
        for seed in seeds:
            chain = Chain(seed)
            x = torch.randn(chain.shape) * 2
            with self.subTest(seed=seed):
                try:
                    program = exported(of_uint8(chain), x)
                    hop.export.to_qoperator(program)
                except (NotImplementedError, ValueError) as error:
                    assert "must have 2 to 1024 elements, got 1" in str(error) or "outside 2^-32 to 2^8" in str(error)
                    left += 1
                    continue
                total += compared(program, x)
        self.assertLess(left, 0.2 * len(seeds) + 1)
        return total

    @pytest.mark.full
    def test_three(self) -> None:
        self.assertGreater(self.check(range(3)), 1_000)

    @pytest.mark.full
    def test_up_to_ten(self) -> None:
        self.assertGreater(self.check(range(3, 10)), 3_000)

    @pytest.mark.exhaustive
    def test_thousand(self) -> None:
        self.assertGreater(self.check(range(10, 1010)), 1_000_000)


PICTURE = (2, 6, 8, 9)
STEPS: dict[str, Any] = {
    "sub": (torch.sub, [(3, 5, 7), (5, 1)], (0.05, -9)),
    "relu of another scale": (torch.relu, [PICTURE], (0.02, -100)),
    "relu6": (F.relu6, [PICTURE], (0.02, -128)),
    "clamp": (lambda x: x.clamp(-0.5, 0.7), [PICTURE], (0.01, 3)),
    "sigmoid": (torch.sigmoid, [PICTURE], (1 / 256, -128)),
    "gelu": (F.gelu, [PICTURE], (0.02, -100)),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [PICTURE], (0.02, -100)),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.2), [PICTURE], (0.02, -60)),
    "log of negative numbers": (torch.log, [PICTURE], (0.05, 0)),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), [(2, 3), (2, 4)], (0.04, 1)),
    "maximum pool, padded": (lambda x: F.max_pool2d(x, 3, 2, 1), [PICTURE], (0.03, 5)),
    "maximum pool, dilated": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), [PICTURE], (0.04, 0)),
    "average pool, padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), [PICTURE], (0.03, 5)),
    "average pool, pads left out": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [PICTURE], (0.02, 5)),
    "average pool of the whole": (lambda x: F.avg_pool2d(x, (8, 9)), [PICTURE], (0.01, 5)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), [PICTURE], (0.02, 5)),
    "adaptive to one": (lambda x: F.adaptive_avg_pool2d(x, 1), [PICTURE], (0.01, 5)),
    "mean of the middle": (lambda x: x.mean(1), [(4, 5, 6)], (0.01, 3)),
    "mean of all": (lambda x: x.mean((0, 1, 2), True), [(4, 5, 6)], (0.001, 3)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [PICTURE], (0.03, 5)),
    "slice by steps": (lambda x: x[:, 1:6:2], [PICTURE], (0.03, 5)),
    "select of another scale": (lambda x: x.select(1, -1), [PICTURE], (0.05, 5)),
    "padded": (lambda x: F.pad(x, (1, 0, 2, 3)), [PICTURE], (0.03, 5)),
    "permute": (lambda x: x.permute(0, 2, 3, 1), [PICTURE], (0.05, 5)),
    "two changes of scale": (lambda x: both(both(x.flatten(1), 0.11, 0).reshape(-1), 0.04, 7), [PICTURE], (0.02, -3)),
    "softmax of the first": (lambda x: x.softmax(0), [(7, 5)], (1 / 256, -128)),
}  # fmt: skip
WEIGHTED: dict[str, Any] = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), (2, 4, 11), (6, 4, 3), (0.05, 3)),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), (1, 2, 4, 5, 6), (3, 2, 3, 3, 3), (0.05, 3)),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2, dilation=2), PICTURE, (4, 3, 2, 2), (0.05, 3)),
    "linear of four dimensions": (F.linear, (2, 3, 4, 8), (5, 8), (0.05, 3)),
    "linear of one": (F.linear, (8,), (5, 8), (0.05, 3)),
    "linear with relu": (lambda x, w, b: F.linear(x, w, b).relu(), (3, 8), (5, 8), (0.02, -128)),
}


class TestOperators(unittest.TestCase):
    @parameterized.expand([(n.replace(" ", "_"), s) for n, s in STEPS.items()])
    @pytest.mark.quick(4)
    def test_step(self, _name: str, step: Any) -> None:
        function, shapes, out = step
        torch.manual_seed(1)
        inputs = [torch.randn(s) * 2 for s in shapes]
        assert compared(exported(Step(function, out), *inputs), *inputs) > 0

    @parameterized.expand([(n.replace(" ", "_"), s) for n, s in WEIGHTED.items()])
    @needs_exact_int8
    @pytest.mark.quick(4)
    def test_with_a_weight(self, _name: str, step: Any) -> None:
        function, shape, size, out = step
        for per_channel in (True, False):
            torch.manual_seed(2)
            x = torch.randn(shape) * 2
            assert compared(exported(Step(function, out, Weights(size, per_channel)), x), x) > 0

    @needs_exact_int8
    def test_products_of_activations(self) -> None:
        torch.manual_seed(4)
        a, b = torch.randn(3, 4, 16), torch.randn(3, 16, 5)
        assert compared(exported(Step(torch.bmm, (0.2, 3)), a, b), a, b) > 0


class TestFile(unittest.TestCase):
    def test_what_it_says(self) -> None:
        """Codes come in and go out; scales and zero points stand beside tensors; no constant is there for nothing."""
        torch.manual_seed(3)
        model, x = Network(Layer(1, 8, high=0.0), Head(8)), torch.randn(4, 1, 8, 8)
        made = hop.export.to_qoperator(exported(of_uint8(model), x))
        graph = onnx.load_from_string(made.buffer).graph
        assert [i.type.tensor_type.elem_type for i in (*graph.input, *graph.output)] == [onnx.TensorProto.UINT8] * 2
        ops = [n.op_type for n in graph.node]
        assert ops.count("QLinearConv") == 1 and ops.count("QGemm") == 1 and "Clip" not in ops[:1], ops
        assert not {"DequantizeLinear", "QuantizeLinear", "Cast"} & set(ops)
        read = {n for node in graph.node for n in node.input}
        assert {t.name for t in graph.initializer} <= read
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        notes = {
            note.tensor_name: {e.key: constants[e.value] for e in note.quant_parameter_tensor_names}
            for note in graph.quantization_annotation
        }
        point = next(m for m in model.modules() if isinstance(m, Point))
        own = notes[graph.input[0].name]
        assert float(own["SCALE_TENSOR"]) == point.scale and int(own["ZERO_POINT_TENSOR"]) == point.zero + 128
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            made.save(path)
            assert path.read_bytes() == made.buffer

    def test_an_output_that_is_an_input(self) -> None:
        x = torch.randn(3, 4)
        program = exported(Step(lambda x: x, (0.03, 5)), x)
        assert compared(program, x) > 0


class TestErrors(unittest.TestCase):
    def test_arguments(self) -> None:
        x = torch.randn(3, 4)
        program = exported(Step(torch.relu, (0.02, -128)), x)
        with pytest.raises(TypeError, match="to_qoperator: program must be"):
            hop.export.to_qoperator(nn.Linear(2, 2))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"weights must be torch.uint8 or torch.int8, got torch.int16"):
            hop.export.to_qoperator(program, weights=torch.int16)
        with pytest.raises(TypeError, match=r"to_tflite, to_tosa, to_qoperator, .* the path of such a file"):
            hop.export.verify(program, 3, (x,))
        with pytest.raises(ValueError, match="model is not an ONNX file"):
            hop.export.verify(program, b"nothing of the kind", (x,))
        with pytest.raises(FileNotFoundError):
            hop.export.verify(program, "no.onnx", (x,))

    def test_damaged(self) -> None:
        x = torch.randn(3, 4)
        program = exported(Step(torch.relu, (0.02, -128)), x)
        model = onnx.load_from_string(hop.export.to_qoperator(program).buffer)
        model.graph.node[0].op_type = "Clop"
        with pytest.raises(ValueError, match="onnxruntime does not accept model"):
            hop.export.verify(program, model.SerializeToString(), (x,))

    def test_programs(self) -> None:
        """What is not written is named, with the reason."""
        x = torch.randn(2, 3, 8, 9)
        cases: list[tuple[Any, tuple[Any, ...], Any, str]] = [
            (F.avg_pool2d, (x, 3), TFLITE, r"its convention is .*TfliteAveragePool.* use the target ONNX_INTEGER"),
            (torch.add, (x, x), PT2E, r"its convention is .*Reciprocal.* use the target ONNX_INTEGER"),
            (F.max_pool2d, (x, 3, 2, 0, 1, True), ONNX_INTEGER, "ceil_mode is not supported"),
        ]
        for function, (first, *rest), target, why in cases:
            more = [r for r in rest if not isinstance(r, Tensor)]
            step = Step(lambda *given, f=function, m=more: f(*given, *m), (0.02, -128))
            inputs = (first, *(r for r in rest if isinstance(r, Tensor)))
            program = exported(step, *inputs, target=target)
            with pytest.raises(NotImplementedError, match=rf"node '.*' \(aten.*\) cannot be converted: {why}"):
                hop.export.to_qoperator(program)

    def test_no_row(self) -> None:
        x = torch.randn(2, 3) ** 2 + 1
        with pytest.raises(ValueError, match=r"target ONNX_INTEGER has no row for aten.div.Tensor"):
            exported(Step(torch.div, (0.03, 5)), x, x)

    def test_what_differs(self) -> None:
        """A program of another convention: the first node, and which convention would have made it equal."""
        torch.manual_seed(0)
        model, x = Step(torch.add, (0.06, 5)), [torch.randn(64, 64), torch.randn(64, 64)]
        ours, theirs = (exported(model, *x, target=t) for t in (ONNX_INTEGER, TFLITE))
        found = hop.export.verify(theirs, hop.export.to_qoperator(ours), tuple(x))
        assert found.first is not None and found.equal_with[0].targets == ("ONNX_INTEGER",)


class TestCommand(unittest.TestCase):
    def test_verify(self) -> None:
        x = torch.randn(5, 6)
        program = exported(Step(torch.relu, (0.02, -128)), x)
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, n)) for n in ("model.pt2", "model.onnx")]
            torch.export.save(program, paths[0])
            hop.export.to_qoperator(program).save(paths[1])
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert cli.main(["verify", *paths, "--json"]) == 0
            found = json.loads(out.getvalue())
            assert found["holds"] and found["first"] is None and len(found["rows"]) == 1


@pytest.mark.full
def test_transformers_functions() -> None:
    """Softmax and GELU among the rest: shares by onnxruntime's softmax, GELU by a table."""
    names = {str(n.args[0]) for n in _calls(transformer())}
    assert {"aten.softmax.int", "aten.gelu.default", "aten.bmm.default"} <= names


def _calls(model: nn.Module) -> list[Any]:
    program = exported(model, torch.randn(2, 12, 32))
    return [n for n in program.graph.nodes if "hop_scaled_buffers" in str(n.target)]
