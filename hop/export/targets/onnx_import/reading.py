# pyright: reportMissingImports=false
"""Read and validate an ONNX file: nodes, constants, inputs and outputs.

Nothing is executed, and no allocation trusts the file: a constant has as many bytes as its shape takes, and data in
other files must be inside the model's folder and inside those files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch
from torch import Tensor

from hop.export.targets.integer.model import Model
from hop.numerics.spelling import shown

LOOPS = ("Loop", "Scan", "SequenceMap")
OPSETS = range(11, 26)
CONTRIB = "com.microsoft"  # the domain of onnxruntime's additional operators
DTYPES = {
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT16": torch.int16,
    "UINT16": torch.uint16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "INT4": torch.int8,
    "UINT4": torch.uint8,
}
if TYPE_CHECKING:
    import numpy as np
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

_HALF_BYTES = ("INT4", "UINT4")  # two elements per byte in a file, one here
_FIELDS = {"FLOAT": "float_data", "DOUBLE": "double_data", "INT64": "int64_data"}  # others: int32_data
_MOST_NODES = 2**17
_MOST_ELEMENTS = 2**40
_MOST_DIMENSIONS = 64  # PyTorch's limit
_FEW = 64  # elements of axes, shapes and paddings
_DEEPEST = 8  # graphs inside graphs


_Scopes: TypeAlias = tuple[set[str], ...]
"""The names with values in a graph, after those of the graphs around it."""


@dataclass(frozen=True)
class Constant:
    """A tensor of a file, and the name of its dtype in ONNX: 4-bit codes have a byte each in `data`.

    elements: the elements if there are few.
    """

    kind: str
    data: Tensor
    elements: tuple[float, ...] | None

    @classmethod
    def of(cls, data: Tensor, kind: str | None = None) -> "Constant":
        """A constant; `kind` is that of its dtype by default."""
        elements = tuple(data.reshape(-1).tolist()) if data.numel() <= _FEW else None
        return cls(kind or next(k for k, dtype in DTYPES.items() if dtype == data.dtype), data, elements)


@dataclass(frozen=True)
class FileInput:
    """An input: dimensions are sizes, or names if they are dynamic."""

    name: str
    kind: str
    shape: tuple[int | str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]


@dataclass(frozen=True)
class FileNode:
    """A node. `op` is its type, with the domain if that is not ONNX's; an omitted input is ""."""

    place: str
    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]  # numbers, text, lists of them, a Constant, or a FileGraph

    def shown(self) -> str:
        """The node in error messages."""
        name = self.name or (self.outputs[0] if self.outputs else "")
        return f"{self.place} {self.op}{f' {shown(name)}' if name else ''}"


@dataclass(frozen=True)
class FileGraph:
    """A graph, in an order in which each value is computed before it is read."""

    nodes: tuple[FileNode, ...]
    constants: Mapping[str, Constant]
    inputs: tuple[FileInput, ...]
    outputs: tuple[str, ...]
    opset: int


def read_graph(caller: str, model: object) -> tuple[FileGraph, str]:
    """The content of a model, and a name for it in error messages.

    Args:
        model: the path of an ONNX file, its bytes, a QOperatorModel, an onnx.ModelProto or a torch.onnx.ONNXProgram.

    Raises:
        ImportError: onnx is not installed.
        TypeError: the model has another type.
        OSError: a file does not exist, or cannot be read.
        ValueError: the file is damaged; the message gives the place.
        NotImplementedError: it has a feature that is not supported; the message names it.
    """
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f"{caller} needs onnx: pip install 'torch-hop[onnx]'") from error
    folder, what, proto = None, "model", model
    if isinstance(model, str | Path):
        folder, what, proto = Path(model).parent, str(model), Path(model).read_bytes()
    elif isinstance(model, Model):
        proto = model.buffer
    elif hasattr(model, "model_proto"):
        proto = getattr(model, "model_proto", None)
    if isinstance(proto, bytes):
        data, proto = proto, onnx.ModelProto()
        try:
            proto.ParseFromString(data)
        except Exception as error:  # protobuf's exception classes depend on its version
            raise ValueError(f"{caller}: {what} is not an ONNX file: {shown(str(error))}") from error
    if not isinstance(proto, onnx.ModelProto):
        raise TypeError(
            f"{caller}: model must be the path of an ONNX file, its bytes, an onnx.ModelProto or a "
            f"torch.onnx.ONNXProgram, got {shown(model)}; save the model with onnx.save and give its path"
        )
    return _Reader(caller, what, folder).model(proto), what


class _Reader:
    def __init__(self, caller: str, what: str, folder: Path | None) -> None:
        self.caller, self.what, self.folder = caller, what, folder
        self.place, self.opset, self.count = "the model", 0, 0

    def wrong(self, what: str) -> NoReturn:
        raise ValueError(f"{self.caller}: {self.what} is damaged: {self.place} {what}")

    def refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{self.caller}: {self.what}: {self.place} {what}")

    def model(self, model: "ModelProto") -> FileGraph:
        if not model.HasField("graph"):
            self.wrong("has no graph")
        versions = {its.domain: its.version for its in model.opset_import}
        self.opset = versions.get("", versions.get("ai.onnx", 0))
        if self.opset not in OPSETS:
            self.refuse(
                f"has opset {self.opset}; supported are {OPSETS[0]} to {OPSETS[-1]}: convert it with "
                "onnx.version_converter.convert_version"
            )
        if len(model.functions):
            self.refuse("has functions; inline them with onnx.inliner.inline_local_functions")
        return self.graph(model.graph, ())

    def graph(self, graph: "GraphProto", outer: _Scopes) -> FileGraph:
        if len(graph.sparse_initializer):
            self.refuse("has sparse constants; store them densely")
        if len(outer) > _DEEPEST:
            self.refuse(f"has graphs inside graphs, more than {_DEEPEST} deep")
        self.count += len(graph.node)
        if self.count > _MOST_NODES:
            self.refuse(f"has {self.count} nodes; up to {_MOST_NODES} are supported")
        constants: dict[str, Constant] = {}
        for tensor in graph.initializer:
            self.place = f"constant {shown(tensor.name)}"
            if not tensor.name or tensor.name in constants:
                self.wrong("has the name of another constant" if tensor.name else "has no name")
            constants[tensor.name] = self.constant(tensor)
        inputs = tuple(self.input(info) for info in graph.input if info.name not in constants)
        known = {*constants, *(i.name for i in inputs)}
        nodes: list[FileNode] = []
        for i, its in enumerate(graph.node):
            nodes.append(node := self.node(its, i, (*outer, known)))
            for name in filter(None, node.outputs):
                if _is_known(name, (*outer, known)):
                    self.wrong(f"returns {shown(name)}, which already has a value")
                known.add(name)
        outputs = tuple(info.name for info in graph.output)
        self.place = "the graph"
        for name in outputs:
            if not _is_known(name, (*outer, known)):
                self.wrong(f"returns {shown(name)}, which no node computes")
        return FileGraph(tuple(nodes), constants, inputs, outputs, self.opset)

    def input(self, info: "ValueInfoProto") -> FileInput:
        self.place = f"input {shown(info.name)}"
        its = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not its.HasField("shape"):
            self.refuse("is not a tensor with a known number of dimensions; export the model with its shapes")
        kind = self.kind(its.elem_type)
        if len(its.shape.dim) > _MOST_DIMENSIONS:
            self.wrong(f"has {len(its.shape.dim)} dimensions; at most {_MOST_DIMENSIONS} are supported")
        shape: list[int | str] = []
        for i, d in enumerate(its.shape.dim):
            if d.HasField("dim_value") and not 0 <= d.dim_value <= _MOST_ELEMENTS:
                self.wrong(f"has a dimension of size {d.dim_value}")
            shape.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{info.name}_{i}")
        return FileInput(info.name, kind, tuple(shape))

    def kind(self, number: int) -> str:
        from onnx import TensorProto

        name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else f"type {number}"
        if name not in DTYPES:
            self.refuse(f"is {name}; supported are {', '.join(DTYPES)}")
        return name

    # ---- constants

    def constant(self, tensor: "TensorProto") -> Constant:
        from onnx import TensorProto, numpy_helper

        kind, shape = self.kind(tensor.data_type), list(tensor.dims)
        if len(shape) > _MOST_DIMENSIONS or any(n < 0 for n in shape) or math.prod(shape) > _MOST_ELEMENTS:
            self.wrong(f"has the shape {shown(tuple(shape))}")
        count, dtype = math.prod(shape), DTYPES[kind]
        wanted = (count + 1) // 2 if kind in _HALF_BYTES else count * dtype.itemsize
        if tensor.data_location == TensorProto.EXTERNAL:
            raw = self.external(tensor, wanted)
        elif tensor.HasField("raw_data"):
            raw = tensor.raw_data
        else:
            have = len(getattr(tensor, _FIELDS.get(kind, "int32_data")))
            if have != (wanted if kind in _HALF_BYTES else count):
                self.wrong(f"has {have} elements, and its shape {tuple(shape)} takes {count}")
            raw = None
        if raw is not None and len(raw) != wanted:
            self.wrong(f"has {len(raw)} bytes, and {kind} of shape {tuple(shape)} takes {wanted}")
        if raw is not None:
            tensor = TensorProto(dims=shape, data_type=tensor.data_type, raw_data=raw)
        return Constant.of(_torch(numpy_helper.to_array(tensor), dtype, shape), kind)

    def external(self, tensor: "TensorProto", wanted: int) -> bytes:
        """The data of a constant in another file, which must be in the model's folder."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if self.folder is None:
            self.refuse(f"has its data in the file {shown(location)}; give the path of the model's file")
        path, folder = (self.folder / location).resolve(), self.folder.resolve()
        if not location or not path.is_relative_to(folder) or path == folder:
            self.wrong(f"has its data in {shown(location)}, which is not inside the model's folder; move it there")
        numbers = [entries.get(name, default) for name, default in (("offset", "0"), ("length", str(wanted)))]
        if not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
            self.wrong(f"has the offset and length {shown(tuple(numbers))}, which must be whole numbers from 0")
        offset, length = map(int, numbers)
        size = path.stat().st_size
        if not path.is_file() or length != wanted or offset + length > size:
            self.wrong(
                f"takes {wanted} bytes, and has {length} from byte {offset} of {shown(location)}, which must be a file "
                f"and has {size} bytes"
            )
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    # ---- nodes

    def node(self, node: "NodeProto", index: int, known: _Scopes) -> FileNode:
        op = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        self.place = place = f"node {index} {op} {shown(node.name)}"
        if op in LOOPS:
            self.refuse(
                "runs its body as often as its inputs say, and programs have no loops; unroll it, or export the "
                "model without control flow"
            )
        for name in node.input:
            if name and not _is_known(name, known):
                self.wrong(f"reads {shown(name)}, which no node before it computes")
        attributes: dict[str, object] = {}
        for attribute in node.attribute:
            self.place = f"{place}, attribute {shown(attribute.name)},"
            if attribute.name in attributes:
                self.wrong("occurs twice")
            attributes[attribute.name] = self.attribute(attribute, known)
        self.place = place
        return FileNode(f"node {index}", op, node.name, tuple(node.input), tuple(node.output), attributes)

    def attribute(self, its: "AttributeProto", known: _Scopes) -> object:
        from onnx import AttributeProto

        if its.ref_attr_name:
            self.refuse("refers to an attribute of a function; inline functions with onnx.inliner")
        if its.type == AttributeProto.TENSOR:
            return self.constant(its.t)
        if its.type == AttributeProto.GRAPH:
            return self.graph(its.g, known)
        if its.type == AttributeProto.STRING:
            return its.s.decode(errors="replace")
        fields = {
            AttributeProto.INT: "i",
            AttributeProto.FLOAT: "f",
            AttributeProto.INTS: "ints",
            AttributeProto.FLOATS: "floats",
        }
        if its.type not in fields:
            self.refuse("is not a number, text, tensor or graph, nor a list of numbers; such attributes are not read")
        value = getattr(its, fields[its.type])
        return value if isinstance(value, int | float) else list(value)


def _is_known(name: str, scopes: _Scopes) -> bool:
    return any(name in names for names in scopes)


def _torch(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """A tensor with a copy of an array's elements."""
    import numpy as np

    if dtype == torch.bfloat16:
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(dtype).reshape(tuple(shape))
    kind = torch.empty((), dtype=dtype).numpy().dtype
    return torch.from_numpy(np.array(array, dtype=kind)).reshape(tuple(shape))
