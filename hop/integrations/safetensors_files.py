"""Files of safetensors read and written in pieces: what the package itself does with whole tensors.

    length u64, little-endian; JSON of that length: {name: {"dtype", "shape", "data_offsets"}, "__metadata__"}; data

The package opens each file first, and so checks its header. Source: the format's README.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE = 2**24  # bytes that are copied at once


class Entry(NamedTuple):
    """A tensor of a file: bytes from `start` to `end` of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Header(NamedTuple):
    """What a file has."""

    path: Path
    entries: Mapping[str, Entry]  # in the order of the data

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries.values())

    def rows(self, entry: Entry, first: int, last: int) -> Tensor:
        """Some rows of a tensor."""
        row = entry.bytes // max(entry.shape[0], 1)
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        self._read(entry.start + first * row, data)
        return data.view(entry.dtype).reshape(last - first, *entry.shape[1:])

    def raw(self, entry: Entry) -> Iterator[tuple[int, Tensor]]:
        """The bytes of a tensor, and where in it they begin, a piece at a time."""
        for start in range(0, entry.bytes, _PIECE):
            data = torch.empty(min(_PIECE, entry.bytes - start), dtype=torch.uint8)
            self._read(entry.start + start, data)
            yield start, data

    def _read(self, start: int, into: Tensor) -> None:
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            view, at = _bytes(into), 0
            while at < len(view):
                count = file.readinto(view[at:])
                if not count:
                    raise ValueError(f"{self.path} ends at byte {start + at}, within a tensor; copy it again")
                at += count


def read_header(path: Path) -> Header:
    """The tensors of a file. Raises ValueError for one that is not whole."""
    try:
        with safetensors.safe_open(str(path), "pt"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no whole file of safetensors: {error}") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        held: dict[str, Any] = json.loads(file.read(length))
    entries: list[Entry] = []
    for name, own in held.items():
        if name == "__metadata__":
            continue
        if own["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: tensor {name!r} is of dtype {own['dtype']}, which is not read")
        start, end = (8 + length + at for at in own["data_offsets"])
        entries.append(Entry(name, _DTYPES[own["dtype"]], tuple(own["shape"]), start, end))
    return Header(path, {e.name: e for e in sorted(entries, key=lambda e: e.start)})


class Writer:
    """Writes a file whose tensors are known, in any order: beside it until it is whole, and then in its place.

    Args:
        path: of the file.
        entries: names, dtypes and shapes.
        metadata: texts.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        for e in sorted(entries, key=lambda e: -e.dtype.itemsize):  # each then begins at a multiple of its size
            header[e.name] = {
                "dtype": _NAMES[e.dtype],
                "shape": list(e.shape),
                "data_offsets": [at, at + e.bytes],
            }
            at += e.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._entries = {e.name: e._replace(start=8 + len(text) + header[e.name]["data_offsets"][0]) for e in entries}
        self._begin, self._size = len(text).to_bytes(8, "little") + text, 8 + len(text) + at

    def __enter__(self) -> "Writer":
        self._file = open(self._part, "wb", buffering=0)
        self._write(0, torch.frombuffer(bytearray(self._begin), dtype=torch.uint8))
        return self

    def write(self, name: str, start: int, data: Tensor) -> None:
        """Bytes of a tensor, from byte `start` of it."""
        self._write(self._entries[name].start + start, data)

    def write_rows(self, name: str, first: int, data: Tensor) -> None:
        """Rows of a tensor, from row `first`."""
        entry = self._entries[name]
        row = entry.bytes // max(entry.shape[0], 1)
        if data.numel():
            self.write(name, first * row, data.detach().contiguous().flatten().view(torch.uint8))

    def _write(self, at: int, data: Tensor) -> None:
        self._file.seek(at)
        view = _bytes(data)
        while len(view):
            view = view[self._file.write(view) :]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self._file.truncate(self._size)
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            os.replace(self._part, self._path)


def _bytes(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
