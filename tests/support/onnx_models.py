# pyright: reportMissingImports=false
"""Small ONNX files: float models, those that onnxruntime's quantizer makes of them, and what onnxruntime computes."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from torch import Tensor, nn

OPSET = 21
ort.set_default_logger_severity(3)


def run(model: Any, *inputs: Tensor, optimized: bool = True) -> list[Tensor]:
    """The outputs of onnxruntime's CPU operators.

    Without VNNI, sums of two products of int8 weights saturate at 16 bits, so these should be within -64 to 63.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(np.asarray(y)) for y in found]


class Graph:
    """An ONNX file by hand."""

    def __init__(self, opset: int = OPSET) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def input(self, name: str, shape: Sequence[Any], kind: int = onnx.TensorProto.FLOAT) -> str:
        self.inputs.append(onnx.helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def constant(self, x: Any, kind: int | None = None) -> str:
        """A constant; `kind` for dtypes that numpy does not have."""
        name = f"c{len(self.constants)}"
        array = (x if isinstance(x, Tensor) else torch.tensor(x)).numpy()
        if kind is None:
            self.constants.append(onnx.numpy_helper.from_array(array, name))
        else:
            self.constants.append(onnx.helper.make_tensor(name, kind, array.shape, array.reshape(-1).tolist()))
        return name

    def node(self, op: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        domain, _, kind = op.rpartition(".")
        names = [f"{kind.lower()}_{len(self.nodes)}{'' if i == 0 else f'_{i}'}" for i in range(count)]
        self.nodes.append(onnx.helper.make_node(kind, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0] if count == 1 else names

    def model(self, *outputs: str, kinds: Sequence[int] = ()) -> onnx.ModelProto:
        given = [kinds[i] if i < len(kinds) else onnx.TensorProto.FLOAT for i in range(len(outputs))]
        infos = [onnx.helper.make_tensor_value_info(n, k, None) for n, k in zip(outputs, given, strict=True)]
        graph = onnx.helper.make_graph(self.nodes, "by_hand", self.inputs, infos, self.constants)
        opsets = [onnx.helper.make_opsetid("", self.opset), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


# ---- quantized by onnxruntime


class _Batches(CalibrationDataReader):
    def __init__(self, name: str, batches: Sequence[Tensor]) -> None:
        self.left: Iterator[dict[str, Any]] = iter([{name: x.numpy()} for x in batches])

    def get_next(self) -> Any:
        return next(self.left, None)


def exported(model: nn.Module, x: Tensor) -> onnx.ModelProto:
    """A model as torch.onnx writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model.eval(), (x,), path, dynamo=False, opset_version=17)
        return onnx.load(path)


def quantized(
    model: onnx.ModelProto,
    shape: Sequence[int],
    format: str = "QDQ",
    activations: str = "QUInt8",
    weights: str = "QInt8",
    per_channel: bool = True,
) -> onnx.ModelProto:
    """A model as onnxruntime's static quantizer writes it."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(tuple(shape), generator=generator) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        source, result = (str(Path(folder) / n) for n in ("float.onnx", "codes.onnx"))
        onnx.save(model, source)
        quantize_static(
            source,
            result,
            _Batches(model.graph.input[0].name, batches),
            quant_format=QuantFormat[format],
            per_channel=per_channel,
            activation_type=QuantType[activations],
            weight_type=QuantType[weights],
            # On CPUs without VNNI, onnxruntime's sums of uint8 by int8 saturate. Scales by channel make weights int8.
            reduce_range=weights == "QInt8" or per_channel,
        )
        return onnx.load(result)


def dynamic(model: onnx.ModelProto, weights: str = "QInt8") -> onnx.ModelProto:
    """A model whose activations are quantized while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        source, result = (str(Path(folder) / n) for n in ("float.onnx", "codes.onnx"))
        onnx.save(model, source)
        quantize_dynamic(source, result, weight_type=QuantType[weights], reduce_range=weights == "QInt8")
        return onnx.load(result)


class Residual(nn.Module):
    """A sum, a product with a gate, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.gate, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x + self.first(x))
        x = torch.cat([x, self.second(x) * torch.sigmoid(self.gate(x))], 1)
        return self.last(x)


class Encoder(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = [f(x).view(n, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)]
        shares = (parts[0] @ parts[1].transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = self.first(x + self.out((shares @ parts[2]).transpose(1, 2).reshape(n, length, width)))
        return self.second(x + self.down(F.gelu(self.up(x))))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.Sigmoid(), nn.Linear(16, 8))


def pictures() -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        nn.LeakyReLU(0.1),
    )
    pools = nn.MaxPool2d(2), nn.Conv2d(8, 12, 1), nn.Hardswish(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, *pools, nn.Flatten(), nn.Linear(12, 5), nn.Softmax(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (4, 20)),
    "pictures": (pictures, (2, 3, 16, 16)),
    "residual": (Residual, (2, 4, 8, 8)),
    "encoder": (Encoder, (2, 6, 16)),
}
