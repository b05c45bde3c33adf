"""Run ONNX files of integer operators in onnxruntime, and return the tensors of codes."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hop.export.targets.integer.graph import FileGraph, FileOperator, FileTensor, Quantization
from hop.numerics.spelling import shown

if TYPE_CHECKING:
    from onnx import ModelProto

_KINDS = {"FLOAT": "FLOAT32"}  # ONNX's dtype names that differ from those of .tflite files
_CODES = ("INT8", "UINT8")


class OnnxRuntime:
    """Runs an ONNX file, with each tensor of codes as an additional output.

    Raises:
        ImportError: onnx or onnxruntime is not installed.
        ValueError: the file is not an ONNX file, or onnxruntime rejects it.
        NotImplementedError: the file has dynamic sizes.
    """

    def __init__(self, caller: str, data: bytes, what: str) -> None:
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise ImportError(f"{caller} needs onnx and onnxruntime: pip install 'torch-hop[onnx]'") from error
        try:
            its = onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
        except Exception as error:  # protobuf's exception classes depend on its version
            raise ValueError(f"{caller}: {what} is not an ONNX file: {shown(error)}") from error
        self.graph = _graph(caller, its)
        outputs_shown = [o.name for o in its.graph.output]
        infos = {i.name: i for i in its.graph.value_info}
        outputs = [n for node in its.graph.node for n in node.output if n in infos and n not in outputs_shown]
        codes = {t.name for t in self.graph.tensors if t.kind in _CODES}
        self.shown = [*outputs_shown, *(n for n in outputs if n in codes)]
        its.graph.output.extend(infos[n] for n in self.shown[len(outputs_shown) :])
        try:
            self.session: Any = onnxruntime.InferenceSession(
                its.SerializeToString(), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ValueError(f"{caller}: onnxruntime does not accept {what}: {error}") from error
        self.found: dict[str, Tensor] = {}

    def run(self, inputs: Sequence[Tensor]) -> None:
        names = list(self.graph.inputs)
        given = dict(zip(names, inputs, strict=True))
        fed = {n: x.contiguous().numpy() for n, x in given.items()}
        outputs = self.session.run(self.shown, fed)
        self.found = {**given, **{n: torch.from_numpy(y) for n, y in zip(self.shown, outputs, strict=True)}}

    def value(self, tensor: FileTensor) -> Tensor:
        return self.found[tensor.name]


def _graph(caller: str, model: "ModelProto") -> FileGraph:
    """The tensors and nodes of a file."""
    from onnx import TensorProto, numpy_helper

    constants = {t.name: t for t in model.graph.initializer}

    @functools.cache
    def numbers(name: str) -> tuple[Any, ...]:
        """The elements of a constant; cached because many tensors share their scales."""
        return tuple(numpy_helper.to_array(constants[name]).reshape(-1).tolist())

    units: dict[str, Quantization] = {}
    for note in model.graph.quantization_annotation:
        parameters = {e.key: e.value for e in note.quant_parameter_tensor_names if e.value in constants}
        scale, zero = parameters.get("SCALE_TENSOR"), parameters.get("ZERO_POINT_TENSOR")
        if scale is not None and zero is not None:
            units[note.tensor_name] = Quantization(numbers(scale), numbers(zero), 0)
    infos = {i.name: i for i in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    tensors: list[FileTensor] = []
    for i, (name, info) in enumerate(infos.items()):
        its = info.type.tensor_type
        if not all(d.HasField("dim_value") for d in its.shape.dim):
            raise NotImplementedError(f"{caller}: tensor {shown(name)} has dynamic sizes; export with static ones")
        sizes = tuple(d.dim_value for d in its.shape.dim)
        kind = TensorProto.DataType.Name(its.elem_type)
        tensors.append(FileTensor(i, name, sizes, _KINDS.get(kind, kind), units.get(name), None))
    places = {t.name: t.index for t in tensors}
    operators = tuple(
        FileOperator(
            i,
            node.op_type,
            tuple(places.get(n) for n in node.input),
            tuple(places[n] for n in node.output if n in places),
            lambda name, default: default,
        )
        for i, node in enumerate(model.graph.node)
    )
    inputs, outputs = (
        {v.name: places[v.name] for v in parameters} for parameters in (model.graph.input, model.graph.output)
    )
    return FileGraph(tuple(tensors), operators, inputs, outputs)
