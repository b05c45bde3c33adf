# pyright: reportMissingImports=false
"""from_tflite: convert files to integer programs, the reverse of model.py."""

import inspect
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hop.export.rewrite.code_floats import run_dequantize
from hop.export.rewrite.program import copy_graph, share_numbers, simplify, with_graph, without_unused
from hop.export.rewrite.target import Target
from hop.export.targets.integer.graph import FileGraph, FileOperator, FileTensor
from hop.export.targets.integer.model import argument_names
from hop.export.targets.tflite.arithmetic import TFLITE, TFLITE_16X8
from hop.export.targets.tflite.calls import Call, Known, Value, quantized
from hop.export.targets.tflite.inputs import READ
from hop.export.targets.tflite.reading import content, enum_names, read_graph
from hop.export.targets.tflite.tables import LOOKUP, Function, function_of_table, joined_lookups
from hop.numerics.requantization import Reciprocal
from hop.numerics.spelling import shown

_CALLER = "from_tflite"
_MOST_ELEMENTS = 2**26  # of all inputs together, because example inputs are allocated for export
_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError, OverflowError)
_CODES = ("INT8", "INT16")
_STORED = (*_CODES, "INT32", "INT64")  # codes and biases
_PLACES = ("INT32", "INT64")
_LONGEST_LIST = 32  # elements of axes, shapes and paddings
_ENUMS = ("ActivationFunctionType", "Padding", "FullyConnectedOptionsWeightsFormat")


def from_tflite(model: object, *, target: Target | None = None) -> ExportedProgram:
    """Convert a .tflite file of int8, or of int16 activations and int8 weights, to an integer program as from
    `to_integer`.

    The program quantizes its float inputs like the file's inputs, and dequantizes the file's output codes. Its codes
    equal those of LiteRT's reference kernels. hop.export.ranges, to_qdq, lower and to_onnx accept it. Inputs and
    outputs have the names in the file's signature and the file's layout: images have channels last. Biases stay
    integers. A dimension that LiteRT may resize has the size in the file.

    Args:
        model: the path of a .tflite file, its bytes, or a TfliteModel. Nothing in it is executed.
        target: the target whose conventions compute the codes. Default: TFLITE, or TFLITE_16X8 for int16 results;
            another target converts the file's model to that runtime.

    Raises:
        ImportError: LiteRT, which has the schema, is not installed.
        TypeError: an argument has the wrong type.
        OSError: the file does not exist.
        ValueError: the file is not a .tflite file or is damaged; the message gives the place.
        NotImplementedError: an operator, named in the message, is not supported, computes floats, or has unsupported
            inputs.
    """
    if target is not None and not isinstance(target, Target):
        raise TypeError(
            f"{_CALLER}: target must be a hop.export.targets.Target or None, got {shown(target)}; give one such as "
            "hop.export.targets.TFLITE"
        )
    data, what = content(_CALLER, model)
    graph = read_graph(_CALLER, data, what)
    module = _Module(graph, target, what)
    inputs = _examples([graph.tensors[i] for i in graph.inputs.values()], what)
    try:
        program = torch.export.export(module, inputs)
    except Exception:
        if module.failure is not None:
            raise module.failure from module.failure.__cause__
        raise
    return _normalize(program.run_decompositions({}))


def _normalize(program: ExportedProgram) -> ExportedProgram:
    """Normalize the program as to_integer does: one operator for reshapes, merged constants, nothing unused."""
    graph = copy_graph(program)
    simplify(graph)
    graph.eliminate_dead_code()
    share_numbers(graph)
    return without_unused(with_graph(program, graph))


def _examples(tensors: list[FileTensor], what: str) -> tuple[Tensor, ...]:
    """Example inputs for export. Raises NotImplementedError for unsupported ones."""
    left = _MOST_ELEMENTS
    for tensor in tensors:
        if tensor.kind not in (*_CODES, *_PLACES, "FLOAT32"):
            raise NotImplementedError(
                f"{_CALLER}: {what}: the input {shown(tensor.name)} is {tensor.kind}; supported are INT8, INT16, "
                "FLOAT32 and, as indices, INT32 and INT64"
            )
        left -= math.prod(tensor.shape)
        if left < 0:
            raise NotImplementedError(
                f"{_CALLER}: {what}: the input {shown(tensor.name)} has the shape {tensor.shape}; all inputs together "
                f"may have up to {_MOST_ELEMENTS} elements"
            )
    return tuple(torch.zeros(t.shape, dtype=t.dtype if t.kind in _PLACES else torch.float32) for t in tensors)


class _Module(nn.Module):
    """A module that runs a file's operators in order."""

    def __init__(self, graph: FileGraph, target: Target | None, what: str) -> None:
        super().__init__()
        operators = joined_lookups(graph.operators, graph.tensors, list(graph.outputs.values()))
        self.graph, self.target, self.what = replace(graph, operators=operators), target, what
        self.failure: Exception | None = None
        self.numbers = {name: enum_names(name) for name in _ENUMS}
        self.held: dict[int, str] = {}
        self.lists: dict[int, list[int]] = {}
        read = {i for op in graph.operators for i in op.inputs} | set(graph.outputs.values())
        for t in graph.tensors:
            if t.data is not None and t.kind in _STORED and t.data.numel() <= _LONGEST_LIST:
                self.lists[t.index] = t.data.reshape(-1).tolist()
            if t.data is not None and t.kind in _STORED and t.index in read:
                self.held[t.index] = f"tensor_{t.index}"
                self.register_buffer(f"tensor_{t.index}", t.data)
        outputs = set(graph.outputs.values())
        for op in self.graph.operators:
            self._check(op, outputs)
        self.functions = {op.index: self._function(op) for op in self.graph.operators if op.name == LOOKUP}
        names = argument_names(graph.inputs)
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", *names)]

        def forward(self: _Module, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            return self.run(inputs)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward.__get__(self)

    def target_of(self, result: FileTensor) -> Target:
        """The target whose conventions compute a result."""
        return self.target or (TFLITE_16X8 if result.kind == "INT16" else TFLITE)

    def place(self, op: FileOperator) -> str:
        result = f" {shown(self.graph.tensors[op.outputs[0]].name)}" if op.outputs else ""
        return f"{_CALLER}: {self.what}: operator {op.index} {op.name}{result}"

    def _check(self, op: FileOperator, outputs: set[int]) -> None:
        """Raise for an unsupported operator, before anything runs."""
        is_last = op.name == "DEQUANTIZE" and set(op.outputs) <= outputs
        if op.name not in READ and not is_last:
            floats = [t for i in op.outputs if (t := self.graph.tensors[i]).kind == "FLOAT32"]
            raise NotImplementedError(
                f"{self.place(op)} {'computes floats' if floats else 'is not supported'}; supported are "
                f"{', '.join(READ)} on codes"
            )
        if len(op.outputs) != 1:
            raise NotImplementedError(f"{self.place(op)} has {len(op.outputs)} results, but must have one")
        if not is_last and (t := self.graph.tensors[op.outputs[0]]).kind not in _CODES:
            raise NotImplementedError(f"{self.place(op)} returns {t.kind}; supported are INT8 and INT16")

    def _function(self, op: FileOperator) -> Function:
        """The function whose codes a table has."""
        x, table, result = (self.graph.tensors[i] for i in (*op.inputs, *op.outputs) if i is not None)
        found = None
        if x.units is not None and result.units is not None and table.data is not None:
            found = function_of_table(table.data, x.units, result.units)
        if found is None:
            raise NotImplementedError(
                f"{self.place(op)} is not supported: its table {shown(table.name)} is not that of a function which "
                "hop.scaled has, by the scales and zero points of its input and result"
            )
        return found

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        try:
            return self._run(inputs)
        except Exception as error:
            self.failure = error
            raise

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        tensors, values = self.graph.tensors, dict[int, Value | Tensor]()
        for index, x in zip(self.graph.inputs.values(), inputs, strict=True):
            values[index] = x
            if tensors[index].kind in _CODES:
                values[index] = self._quantized(tensors[index], x)
        for op in self.graph.operators:
            values[op.outputs[0]] = self._call(op, values)
        shown = tuple(self._shown(tensors[i], values) for i in self.graph.outputs.values())
        return shown[0] if len(shown) == 1 else shown

    def _quantized(self, tensor: FileTensor, x: Tensor) -> Value:
        """The codes of an input, quantized as by PyTorch's quantize nodes."""
        if tensor.units is None or (tensor.kind == "INT16" and tensor.units[1]):
            raise NotImplementedError(
                f"{_CALLER}: {self.what}: the input {shown(tensor.name)} is {tensor.kind} with "
                f"{shown(tensor.quantization)}; it must have one scale, and zero point 0 for int16"
            )
        return Value(*tensor.units, {"file": quantized(tensor.kind, x, *tensor.units, Reciprocal())})

    def _shown(self, tensor: FileTensor, values: dict[int, Value | Tensor]) -> Tensor:
        value = values.get(tensor.index)
        if value is None:
            value = self._constant(tensor)
        if isinstance(value, Value):
            return run_dequantize(value.held())
        assert value is not None  # the reader has checked that each output is computed or constant
        return value

    def _constant(self, tensor: FileTensor) -> Value | Tensor | None:
        """A constant: a Value if it has codes with one scale, else its tensor."""
        stored = getattr(self, self.held[tensor.index]) if tensor.index in self.held else tensor.data
        if tensor.kind in _CODES and tensor.units is not None and stored is not None:
            return Value(*tensor.units, {"file": stored})
        return stored

    def _call(self, op: FileOperator, values: dict[int, Value | Tensor]) -> Value | Tensor:
        tensors = tuple(None if i is None else self.graph.tensors[i] for i in op.inputs)
        inputs = tuple(None if t is None else self._input(t, values) for t in tensors)
        result = self.graph.tensors[op.outputs[0]]
        if op.name == "DEQUANTIZE":
            if not isinstance(inputs[0], Value):
                raise NotImplementedError(f"{self.place(op)} does not read int8 or int16 codes")
            return run_dequantize(inputs[0].held())
        try:
            known = Known(self.numbers, self.lists, self.functions)
            output = READ[op.name](Call(op, inputs, tensors, result, self.target_of(result), known))
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.place(op)} is not supported: {error}") from error
        except _REFUSALS as error:
            raise ValueError(f"{self.place(op)} is invalid: {error}") from error
        shape = tuple(output.at().shape)
        if shape != result.shape:
            raise ValueError(f"{self.place(op)} returns the shape {shape}, but the file has {result.shape}")
        return output

    def _input(self, tensor: FileTensor, values: dict[int, Value | Tensor]) -> Value | Tensor | None:
        if tensor.index in values:
            return values[tensor.index]
        return self._constant(tensor)
