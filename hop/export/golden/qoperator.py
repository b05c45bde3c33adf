"""verify_qoperator: compare a program with an ONNX file of integer operators, run by onnxruntime, node by node."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop.export.analysis.arguments import Data, parse
from hop.export.golden.tflite import FileRunner, TfliteComparison, run_comparison
from hop.export.rewrite.program import check_program
from hop.export.targets.models import content
from hop.export.targets.qoperator.model import QOperatorModel
from hop.export.targets.tflite.reading import FileGraph, FileOperator, FileTensor, Quantization
from hop.numerics.spelling import shown

_CALLER = "verify_qoperator"
_KINDS = {"FLOAT": "FLOAT32"}  # ONNX's dtype names that differ from those of .tflite files
_CODES = ("INT8", "UINT8")


@dataclass(frozen=True)
class QOperatorComparison(TfliteComparison):
    """The result of `hop.export.verify_qoperator`: as TfliteComparison, with nodes (`a`) and the ONNX file's tensors
    (`b`).
    """


def verify_qoperator(program: ExportedProgram, model: Any, inputs: Data) -> QOperatorComparison:
    """Run a program here and an ONNX file of integer operators in onnxruntime, and compare the codes of corresponding
    nodes.

    The file gets the codes that the program computes from its inputs. Nodes and tensors correspond as in
    `verify_tflite`. For the first node that differs, it is determined which convention of hop.requantization and
    hop.integer_functions reproduces the runtime's codes.

    Args:
        program: a program from `to_integer(program, target=hop.export.targets.ONNX_INTEGER)`, or with quantize and
            dequantize nodes.
        model: a QOperatorModel, the path of an ONNX file, or its bytes. onnxruntime runs it in this process, so pass
            only files that you trust.
        inputs: as for `verify_tflite`.

    Raises:
        ImportError: onnx or onnxruntime is not installed.
        TypeError: an argument has the wrong type.
        OSError: the file does not exist.
        ValueError: the file is not an ONNX file, or onnxruntime rejects it; the inputs do not fit; or the two differ in
            the number or shapes of inputs or outputs.
        NotImplementedError: the file has dynamic sizes.
    """
    check_program(program, _CALLER)
    given = parse(_CALLER, "inputs", inputs)
    comparison = run_comparison(_FileComparison(program, _Runtime(model), _CALLER), given)
    assert isinstance(comparison, QOperatorComparison)
    return comparison


class _FileComparison(FileRunner):
    kind = QOperatorComparison


class _Runtime:
    """Runs the file for `FileRunner`, with each tensor of codes as an additional output."""

    def __init__(self, model: Any) -> None:
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise ImportError(f"{_CALLER} needs onnx and onnxruntime: pip install 'torch-hop[onnx]'") from error
        data, what = content(_CALLER, model, QOperatorModel, "an ONNX file")
        try:
            its = onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
        except Exception as error:  # protobuf's exception classes depend on its version
            raise ValueError(f"{_CALLER}: {what} is not an ONNX file: {shown(error)}") from error
        self.graph = _graph(its)
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
            raise ValueError(f"{_CALLER}: onnxruntime does not accept {what}: {error}") from error
        self.found: dict[str, Tensor] = {}

    def run(self, inputs: Sequence[Tensor]) -> None:
        names = list(self.graph.inputs)
        given = dict(zip(names, inputs, strict=True))
        fed = {n: x.contiguous().numpy() for n, x in given.items()}
        outputs = self.session.run(self.shown, fed)
        self.found = {**given, **{n: torch.from_numpy(y) for n, y in zip(self.shown, outputs, strict=True)}}

    def value(self, tensor: FileTensor) -> Tensor:
        return self.found[tensor.name]


def _graph(model: Any) -> FileGraph:
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
            raise NotImplementedError(f"{_CALLER}: tensor {shown(name)} has dynamic sizes; export with static ones")
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
