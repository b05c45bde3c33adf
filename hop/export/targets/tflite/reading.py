# pyright: reportMissingImports=false
"""Read and validate a .tflite file: tensors, operators, the signature.

Nothing is executed, and no allocation trusts the file. Because several places of a file may refer to one table, a small
file could have many long names and lists. Lists and constants together may therefore not be longer than the file, each
counted as often as it is read; texts may be four times as long; and the numbers of tensors and operators are limited.
"""

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from hop.export.targets.integer import model as models
from hop.export.targets.integer.graph import DTYPES, FileGraph, FileOperator, FileTensor, Quantization
from hop.export.targets.tflite.model import TfliteModel
from hop.numerics.spelling import shown

_IDENTIFIER = b"TFL3"  # at byte 4
_DAMAGED = (struct.error, IndexError, ValueError, TypeError, AttributeError, UnicodeDecodeError, OverflowError)
_MOST_ELEMENTS = 2**40
_MOST_DIMENSIONS = 64  # PyTorch's limit
_LONGEST_CODE = 100  # characters of the name of a custom operator
_RANGES = {"INT8": (-(2**7), 2**7 - 1), "UINT8": (0, 2**8 - 1), "INT16": (-(2**15), 2**15 - 1)}  # of zero points
_TEXTS = 4  # limit of the total length of texts, which places may share, relative to the file
_MOST_ITEMS = 2**17  # limit of tensors and of operators, which take a kilobyte each here and 4 bytes in a file


def content(caller: str, model: object) -> tuple[bytes, str]:
    """The bytes of a model (a TfliteModel, bytes, or the path of a file), and a name for error messages.

    Raises:
        TypeError: the model has another type.
        OSError: the file does not exist, or cannot be read.
        ValueError: the bytes are not a .tflite file.
    """
    data, what = models.content(caller, model, TfliteModel, "a .tflite file")
    if data[4:8] != _IDENTIFIER:
        raise ValueError(
            f"{caller}: {what} must be a .tflite file, whose bytes 4 to 7 are {_IDENTIFIER!r}, got {data[4:8]!r}"
        )
    return data, what


@functools.cache
def enum_names(kind: str) -> dict[int, str]:
    """The names in an enumeration of the schema, by number."""
    from ai_edge_litert import schema_py_generated as schema

    return {v: n for n, v in vars(getattr(schema, kind)).items() if isinstance(v, int)}


def read_graph(caller: str, data: bytes, what: str = "model") -> FileGraph:
    """Read the content of a file from its bytes; `what` is a name for error messages.

    Raises:
        ImportError: LiteRT, which has the schema, is not installed.
        ValueError: the file is damaged; the message gives the place.
        NotImplementedError: the file has several subgraphs.
    """
    try:
        from ai_edge_litert import schema_py_generated as schema
    except ImportError as error:
        raise ImportError(f"{caller} needs LiteRT: pip install 'torch-hop[litert]'") from error
    return _Reader(caller, what, data, schema).graph()


class _Reader:
    def __init__(self, caller: str, what: str, data: bytes, schema: Any) -> None:
        self.caller, self.what, self.data, self.schema = caller, what, data, schema
        self.place = "the head"
        self.left = len(data)  # budget of list elements, which take at least a byte each
        self.bytes_left = len(data)
        self.text_left = _TEXTS * len(data)
        self.constants: dict[int, Tensor] = {}  # by buffer

    def graph(self) -> FileGraph:
        try:
            return self._graph()
        except _DAMAGED as error:
            if isinstance(error, _DamagedFile):
                raise
            self.wrong(f"cannot be read: {error or type(error).__name__}")

    def wrong(self, what: str) -> NoReturn:
        raise _DamagedFile(f"{self.caller}: {self.what} is damaged: {self.place} {what}")

    def refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{self.caller}: {self.what}: {self.place} {what}")

    def _graph(self) -> FileGraph:
        model = self.schema.Model.GetRootAs(self.data, 0)
        if (count := model.SubgraphsLength()) != 1:
            self.place = "the model"
            self.refuse(f"has {count} subgraphs, but must have one, without control flow")
        names = enum_names("BuiltinOperator")
        codes: list[str] = []
        for i in self.over("operator codes", model.OperatorCodesLength()):
            code = model.OperatorCodes(i)
            number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
            name = names.get(number, f"operator {number}")
            custom = self.text(code.CustomCode()) if name == "CUSTOM" else ""
            codes.append(f"CUSTOM {custom[:_LONGEST_CODE]}" if custom else name)
        graph = model.Subgraphs(0)
        for what, count in (("tensors", graph.TensorsLength()), ("operators", graph.OperatorsLength())):
            if count > _MOST_ITEMS:
                self.place = "the graph"
                self.refuse(f"has {count} {what}; up to {_MOST_ITEMS} are supported")
        tensors = tuple(self.tensor(model, graph, i) for i in self.over("tensors", graph.TensorsLength()))
        operators = tuple(
            self.operator(graph.Operators(i), i, codes, len(tensors))
            for i in self.over("operators", graph.OperatorsLength())
        )
        ends = [self.integers(f"the graph's {n}s", graph, n) for n in ("Input", "Output")]
        for end in ends:
            self.check(end, len(tensors))
        named: list[dict[str, int]] = [{tensors[i].name: i for i in end} for end in ends]
        if model.SignatureDefsLength() == 1:
            signature = model.SignatureDefs(0)
            named = [self.signed(signature, n, end) for n, end in zip(("Input", "Output"), ends, strict=True)]
        for end, its in zip(ends, named, strict=True):
            if sorted(its.values()) != sorted(end):
                self.wrong(f"names {shown(sorted(its))} for the tensors {shown(end)}")
        self.order(tensors, operators, ends)
        return FileGraph(tensors, operators, *named)

    def tensor(self, model: Any, graph: Any, index: int) -> FileTensor:
        its = graph.Tensors(index)
        self.place = f"tensor {index}"
        name = self.text(its.Name())
        self.place = f"tensor {index} {shown(name)}"
        if its.ShapeLength() > _MOST_DIMENSIONS:
            self.wrong(f"has {its.ShapeLength()} dimensions; at most {_MOST_DIMENSIONS} are supported")
        shape = self.integers(self.place, its, "Shape")
        if any(n < 0 for n in shape) or math.prod(shape) > _MOST_ELEMENTS:
            self.wrong(f"has shape {shown(shape)}")
        kind = enum_names("TensorType").get(its.Type(), f"type {its.Type()}")
        if its.Sparsity() is not None:
            self.refuse("is sparse; only dense tensors are supported")
        data = self.constant(model, its, shape, kind)
        return FileTensor(index, name, shape, kind, self.quantization(its, shape, kind), data)

    def quantization(self, tensor: Any, shape: Sequence[int], kind: str) -> Quantization | None:
        its = tensor.Quantization()
        if its is None or not its.ScaleLength():
            return None
        scales = self.numbers("its scales", its.ScaleLength(), its.ScaleAsNumpy)
        zeros = self.numbers("its zero points", its.ZeroPointLength(), its.ZeroPointAsNumpy) or (0,) * len(scales)
        dimension = its.QuantizedDimension()
        if len(scales) != len(zeros) or not all(math.isfinite(s) and s > 0 for s in scales):
            self.wrong(f"has the scales {scales[:3]} and the zero points {zeros[:3]}")
        low, high = _RANGES.get(kind, (0, 0))
        if not all(low <= z <= high for z in zeros):
            self.wrong(f"has the zero points {zeros[:3]}, but those of {kind} are {low} to {high}")
        if len(scales) > 1 and not (0 <= dimension < len(shape) and shape[dimension] == len(scales)):
            self.wrong(f"has {len(scales)} scales along dimension {dimension} of {shown(tuple(shape))}")
        return Quantization(tuple(map(float, scales)), tuple(map(int, zeros)), dimension)

    def constant(self, model: Any, tensor: Any, shape: Sequence[int], kind: str) -> Tensor | None:
        if not 0 <= tensor.Buffer() < model.BuffersLength():
            self.wrong(f"has buffer {tensor.Buffer()} of {model.BuffersLength()}")
        buffer = model.Buffers(tensor.Buffer())
        if buffer.Offset() > 1:
            self.refuse("has data after the file's tables, as in files above 2 GB")
        if not buffer.DataLength():
            return None
        dtype = DTYPES.get(kind)
        if dtype is None:
            return torch.empty(0)  # no supported operator reads this kind
        wanted = math.prod(shape) * dtype.itemsize
        if buffer.DataLength() != wanted:
            self.wrong(f"has {buffer.DataLength()} bytes, and {kind} of shape {tuple(shape)} takes {wanted}")
        if tensor.Buffer() not in self.constants:
            self.bytes_left -= wanted
            if self.bytes_left < 0:
                self.wrong("shares its data with other tensors, more than the file's size allows")
            self.constants[tensor.Buffer()] = torch.from_numpy(buffer.DataAsNumpy().copy())
        return self.constants[tensor.Buffer()].view(dtype).reshape(tuple(shape))

    def operator(self, its: Any, index: int, codes: list[str], count: int) -> FileOperator:
        self.place = f"operator {index}"
        if not 0 <= its.OpcodeIndex() < len(codes):
            self.wrong(f"has code {its.OpcodeIndex()} of {len(codes)}")
        name = codes[its.OpcodeIndex()]
        self.place = f"operator {index} {name}"
        inputs = tuple(None if i == -1 else i for i in self.integers(self.place, its, "Inputs"))
        outputs = self.integers(self.place, its, "Outputs")
        self.check([i for i in (*inputs, *outputs) if i is not None], count)
        return FileOperator(index, name, inputs, outputs, self.options(its, self.place))

    def options(self, its: Any, place: str) -> Callable[[str, object], object]:
        kind = enum_names("BuiltinOptions").get(its.BuiltinOptionsType(), "NONE")
        table = its.BuiltinOptions()
        options: Any = None
        if kind != "NONE" and table is not None and hasattr(self.schema, kind):
            options = getattr(self.schema, kind)()
            options.Init(table.Bytes, table.Pos)

        def option(name: str, default: object) -> object:
            if options is None or not hasattr(options, name):
                return default
            try:
                return getattr(options, name)()
            except _DAMAGED as error:
                self.place = place
                self.wrong(f"has no readable {name}: {error}")

        return option

    def signed(self, signature: Any, which: str, end: Sequence[int]) -> dict[str, int]:
        self.place = f"the signature's {which.lower()}s"
        indices: dict[str, int] = {}
        for i in self.over(self.place, getattr(signature, f"{which}sLength")()):
            its = getattr(signature, f"{which}s")(i)
            indices[self.text(its.Name())] = its.TensorIndex()
        places = {tensor: i for i, tensor in reversed(list(enumerate(end)))}
        if not places.keys() >= set(indices.values()):
            self.wrong(f"names {shown(sorted(indices))} for the tensors {shown(tuple(end))}")
        return {name: indices[name] for name in sorted(indices, key=lambda n: places[indices[n]])}

    def order(
        self, tensors: Sequence[FileTensor], operators: Sequence[FileOperator], ends: Sequence[Sequence[int]]
    ) -> None:
        """Raise unless each tensor is written once, before it is read."""
        there = {*ends[0], *(t.index for t in tensors if t.data is not None or 0 in t.shape)}
        for op in operators:
            self.place = f"operator {op.index} {op.name}"
            for i in op.inputs:
                if i is not None and i not in there:
                    self.wrong(f"reads tensor {i} {shown(tensors[i].name)}, which nothing has written")
            for i in op.outputs:
                if i in there:
                    self.wrong(f"writes tensor {i} {shown(tensors[i].name)}, which already has a value")
                there.add(i)
        self.place = "the graph"
        for i in ends[1]:
            if i not in there:
                self.wrong(f"returns tensor {i} {shown(tensors[i].name)}, which nothing has written")

    # ---- lists

    def over(self, place: str, count: int) -> range:
        self.place = place
        self.left -= count
        if not 0 <= count <= len(self.data) or self.left < 0:
            self.wrong(f"has {count} elements, more than {len(self.data)} bytes can store")
        return range(count)

    def numbers(self, place: str, count: int, read: Callable[[], Any]) -> tuple[Any, ...]:
        own = self.place
        self.over(f"{own}, {place}," if own != place else place, count)
        values = tuple(read().tolist()) if count else ()
        self.place = own
        return values

    def integers(self, place: str, its: Any, field: str) -> tuple[int, ...]:
        field = field if hasattr(its, f"{field}Length") else f"{field}s"
        return self.numbers(place, getattr(its, f"{field}Length")(), getattr(its, f"{field}AsNumpy"))

    def check(self, indices: Sequence[int], count: int) -> None:
        for i in indices:
            if not 0 <= i < count:
                self.wrong(f"names tensor {i} of {count}")

    def text(self, raw: bytes | None) -> str:
        """Decode a text and deduct its length from the budget."""
        self.text_left -= len(raw or b"")
        if self.text_left < 0:
            self.wrong(
                f"has a text of {len(raw or b'')} bytes, which the file refers to more often than its size allows"
            )
        return (raw or b"").decode()


class _DamagedFile(ValueError):
    """A damaged file; the message is complete."""
