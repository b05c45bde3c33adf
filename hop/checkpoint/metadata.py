"""Read the metadata of a checkpoint, which DCP pickles, without unpickling them.

An unpickler calls whatever the file names. This reader goes through the pickle's opcodes (pickletools.genops) and
records imports as names and calls as values: nothing is imported or called, and no opcode allocates more than the size
of the file. DCP's objects are then built field by field, and each field is checked.
"""

import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar, cast, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hop.checkpoint.entries import KEY
from hop.numerics.spelling import JsonObject

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_METADATA, "_MEM_FORMAT_ENCODING"), (_FILES, "_StorageInfo")),
    *(("torch", name) for name in ("Size", *_DTYPES)),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # some versions of Python pickle members of _MEM_FORMAT_ENCODING with it
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""The (module, name) pairs that the metadata may import."""

_T = TypeVar("_T")
_U = TypeVar("_U")


class StoredFile(TypedDict):
    """The size and the digest of a file."""

    bytes: int
    sha256: str


Files = Mapping[str, StoredFile]
"""The files of a checkpoint by name."""


class StoredRange(NamedTuple):
    """The location of an entry: a range of bytes in a file, with the fields that dcp.FileSystemReader reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(data: bytes, files: Files) -> Metadata:
    """Parse the metadata that dcp.FileSystemWriter pickled.

    Args:
        data: the pickle.
        files: the checkpoint's files.

    Raises:
        pickle.UnpicklingError: the data are not DCP's metadata.
        ValueError: an entry is in no such file, or beyond its end.
    """
    try:
        return _MetadataBuilder(files).metadata(_Pickle().value(data))
    except (IndexError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise pickle.UnpicklingError(f"metadata of a checkpoint are damaged: {error!r}") from error


def _cut(value: object) -> str:
    return value[:100] if isinstance(value, str) else type(value).__name__


# ---- the pickle


class _Name(NamedTuple):
    """A class or function that the pickle imports."""

    module: str
    name: str


class _Object:
    """A call that the pickle makes, and the state that it sets on the result."""

    def __init__(self, function: object, arguments: object) -> None:
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("metadata of a checkpoint call a value that is not an imported name")
        self.function = function
        self.arguments: tuple[object, ...] = arguments
        self.state: object = None


class _Pickle:
    """A pickle machine: the stack, the marks and the memo that opcodes work on."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._marks: list[list[object]] = []  # the stacks below each mark
        self._memo: list[object] = []

    def value(self, data: bytes) -> object:
        """Run a whole pickle and return its value."""
        try:
            for operation, argument, _ in pickletools.genops(data):
                run = _OPERATIONS.get(operation.name)
                if run is None:
                    raise pickle.UnpicklingError(f"metadata of a checkpoint hold no {operation.name}")
                run(self, argument)
        except ValueError as error:  # truncated, or not a pickle
            raise pickle.UnpicklingError(f"metadata of a checkpoint are not a pickle: {error}") from error
        return self._stack.pop()

    def push(self, value: object) -> None:
        self._stack.append(value)

    def memoize(self, _: object) -> None:
        self._memo.append(self._stack[-1])

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def mark(self, _: object) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def above_mark(self) -> list[object]:
        above, self._stack = self._stack, self._marks.pop()
        return above

    def last(self, count: int) -> list[object]:
        return [self._stack.pop() for _ in range(count)][::-1]

    def set_items(self, items: list[object]) -> None:
        target = self._expected(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | _Object):  # hashing a deeply nested tuple overflows Python's stack
                raise pickle.UnpicklingError(f"metadata of a checkpoint have a key of type {type(key).__name__}")
            target[key] = value

    def append_items(self, items: list[object]) -> None:
        self._expected(list).extend(items)

    def name(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str or (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"metadata of a checkpoint hold no {_cut(module)}.{_cut(name)}")
        self.push(_Name(module, name))

    def call(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self.push(_Object(function, arguments))

    def build(self, _: object) -> None:
        state = self._stack.pop()
        self._expected(_Object).state = state

    def _expected(self, kind: type[_T]) -> _T:
        """The value on top of the stack. Raises UnpicklingError if it has another type."""
        top = self._stack[-1]
        if not _has_type(top, kind):
            raise pickle.UnpicklingError(f"metadata of a checkpoint change a {type(top).__name__}")
        return top


_OPERATIONS: dict[str, Callable[[_Pickle, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda p, _: None),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Pickle.push),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Pickle.get),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Pickle.call),
    "NONE": lambda p, _: p.push(None),
    "NEWTRUE": lambda p, _: p.push(True),
    "NEWFALSE": lambda p, _: p.push(False),
    "EMPTY_TUPLE": lambda p, _: p.push(()),
    "EMPTY_LIST": lambda p, _: p.push([]),
    "EMPTY_DICT": lambda p, _: p.push({}),
    "MEMOIZE": _Pickle.memoize,
    "MARK": _Pickle.mark,
    "TUPLE": lambda p, _: p.push(tuple(p.above_mark())),
    "TUPLE1": lambda p, _: p.push(tuple(p.last(1))),
    "TUPLE2": lambda p, _: p.push(tuple(p.last(2))),
    "TUPLE3": lambda p, _: p.push(tuple(p.last(3))),
    "SETITEM": lambda p, _: p.set_items(p.last(2)),
    "SETITEMS": lambda p, _: p.set_items(p.above_mark()),
    "APPEND": lambda p, _: p.append_items(p.last(1)),
    "APPENDS": lambda p, _: p.append_items(p.above_mark()),
    "STACK_GLOBAL": _Pickle.name,
    "BUILD": _Pickle.build,
}
"""The opcodes in DCP's metadata, in pickle protocols 4 and 5."""


# ---- DCP's objects


class _MetadataBuilder:
    """Builds DCP's objects. An object that the pickle refers to several times is built once, so that time and memory
    stay proportional to the size of the file.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._made: dict[tuple[str, int], object] = {}

    def metadata(self, value: object) -> Metadata:
        fields = _state(value, _METADATA, "Metadata")
        entries, stored = _typed(fields["state_dict_metadata"], dict), _typed(fields["storage_data"], dict)
        ranges: dict[MetadataIndex, StoredRange] = {}
        for index, where in stored.items():
            made = self._index(index)
            ranges[made] = self._range(made.fqn, where)
        return Metadata(
            {_typed(name, str): self._once("entry", self._entry, entry) for name, entry in entries.items()},
            {_typed(name, str): _path(name, path) for name, path in _typed(fields["planner_data"], dict).items()},
            ranges,  # dcp.FileSystemReader only reads their fields
            StorageMeta(),
            _typed(fields.get("version"), str, type(None)),
        )

    def _once(self, kind: str, make: Callable[[object], _T], value: object) -> _T:
        key = (kind, id(value))
        if key not in self._made:
            self._made[key] = make(value)
        return cast(_T, self._made[key])

    def _entry(self, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(value, _Object) and value.function == (_METADATA, "BytesStorageMetadata"):
            return BytesStorageMetadata()
        fields = _state(value, _METADATA, "TensorStorageMetadata")
        return TensorStorageMetadata(
            self._once("properties", _properties, fields["properties"]),
            self._once("size", _size, fields["size"]),
            self._once("chunks", self._chunks, fields["chunks"]),
        )

    def _chunks(self, value: object) -> list[ChunkStorageMetadata]:
        return [self._once("chunk", self._chunk, chunk) for chunk in _typed(value, list)]

    def _chunk(self, value: object) -> ChunkStorageMetadata:
        fields = _state(value, _METADATA, "ChunkStorageMetadata")
        return ChunkStorageMetadata(
            self._once("size", _size, fields["offsets"]), self._once("size", _size, fields["sizes"])
        )

    def _index(self, value: object) -> MetadataIndex:
        fields = _state(value, _METADATA, "MetadataIndex")
        offset = fields.get("offset")
        return MetadataIndex(
            _typed(fields["fqn"], str),
            None if offset is None else self._once("size", _size, offset),
            _typed(fields.get("index"), int, type(None)),
        )

    def _range(self, name: str, value: object) -> StoredRange:
        fields = _state(value, _FILES, "_StorageInfo")
        file, offset, length = (
            _typed(fields["relative_path"], str),
            _number(fields["offset"]),
            _number(fields["length"]),
        )
        if file not in self._files:
            raise ValueError(
                f"entry {_cut(name)!r} is in the file {_cut(file)!r}, which the checkpoint's manifest does not "
                "list; load another step"
            )
        if offset + length > self._files[file]["bytes"]:
            raise ValueError(f"entry {_cut(name)!r} ends beyond the end of the file {file!r}; load another step")
        if fields.get("transform_descriptors"):
            raise ValueError(f"entry {_cut(name)!r} is transformed, which is not supported; save it without extensions")
        return StoredRange(file, offset, length)


def _path(name: str, value: object) -> object:
    """The path of an entry in the state dict; for the entry KEY, the descriptions of quantized tensors."""
    if name != KEY:
        return tuple(_typed(part, str, int) for part in _typed(value, tuple))
    return {_typed(name, str): _description(fields) for name, fields in _typed(value, dict).items()}


def _description(value: object) -> JsonObject:
    fields = _typed(value, dict)
    return {
        "quantizer": _typed(fields["quantizer"], str),
        "shape": tuple(map(_number, _typed(fields["shape"], tuple))),
        "dtype": _typed(fields["dtype"], str),
        "usages": tuple(_typed(usage, str) for usage in _typed(fields["usages"], tuple)),
        "pieces": _typed(fields["pieces"], str, type(None)),
    }


def _properties(value: object) -> TensorProperties:
    if not isinstance(value, _Object) or value.function != (_METADATA, "TensorProperties"):
        raise pickle.UnpicklingError("metadata of a checkpoint have a tensor without properties")
    dtype = _typed(value.state, tuple)[0]
    if not isinstance(dtype, _Name) or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise pickle.UnpicklingError("metadata of a checkpoint have a tensor without a dtype")
    return TensorProperties(_DTYPES[dtype.name])  # the other properties are not used


def _size(value: object) -> torch.Size:
    if not isinstance(value, _Object) or value.function != ("torch", "Size"):
        raise pickle.UnpicklingError("metadata of a checkpoint have a tensor without a size")
    (numbers,) = value.arguments
    return torch.Size(map(_number, _typed(numbers, tuple)))


def _number(value: object) -> int:
    number = _typed(value, int)
    if not 0 <= number < 2**63:
        raise pickle.UnpicklingError("metadata of a checkpoint have a size outside 0 to 2^63 - 1")
    return number


def _state(value: object, module: str, name: str) -> dict[str, object]:
    """The fields of an object, which must be an instance of `name`."""
    if not isinstance(value, _Object) or value.function != (module, name):
        raise pickle.UnpicklingError(f"metadata of a checkpoint lack a {name} where DCP has one")
    return _typed(value.state, dict)


def _has_type(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether `value` is an instance of `kind` itself, not of a subclass: False is not an int."""
    return type(value) is kind


@overload
def _typed(value: object, kind: type[_T], /) -> _T: ...
@overload
def _typed(value: object, kind: type[_T], other: type[_U], /) -> _T | _U: ...
def _typed(value: object, *kinds: type) -> object:
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise pickle.UnpicklingError(f"metadata of a checkpoint have a {type(value).__name__} in place of a {wanted}")
    return value
