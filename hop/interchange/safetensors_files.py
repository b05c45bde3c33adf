"""Read and write safetensors files in pieces; the package itself handles whole tensors only.

    length u64, little-endian; JSON of that length: {name: {"dtype", "shape", "data_offsets"}, "__metadata__"}; data

The package opens each file first, which validates its header. Source: the format's README.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat.files import WholeFile, whole_file
from hop.interchange.files import memory_of
from hop.numerics.spelling import JsonObject, shown

DTYPES = {
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE = 2**24  # bytes to copy at a time


class Entry(NamedTuple):
    """A tensor of a file: its bytes `start` to `end`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Header(NamedTuple):
    """A file and its tensors."""

    path: Path
    entries: Mapping[str, Entry]  # in the order of the data

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries.values())

    def names(self) -> Iterator[str]:
        """The tensors, in the order to read them."""
        return iter(self.entries)

    def rows(self, entry: Entry, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor."""
        row = entry.bytes // max(entry.shape[0], 1)
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        self._read(entry.start + first * row, data)
        return data.view(entry.dtype).reshape(last - first, *entry.shape[1:])

    def raw(self, entry: Entry) -> Iterator[tuple[int, Tensor]]:
        """The bytes of a tensor, a piece at a time, each with its offset in the tensor."""
        for start in range(0, entry.bytes, _PIECE):
            data = torch.empty(min(_PIECE, entry.bytes - start), dtype=torch.uint8)
            self._read(entry.start + start, data)
            yield start, data

    def _read(self, start: int, into: Tensor) -> None:
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            view, at = memory_of(into), 0
            while at < len(view):
                count = file.readinto(view[at:])
                if not count:
                    raise ValueError(f"{self.path} ends at byte {start + at}, within a tensor; copy it again")
                at += count


def read_header(path: Path) -> Header:
    """Read the tensor entries of a file. Raises ValueError if it is not complete."""
    import safetensors

    try:
        with safetensors.safe_open(str(path), "np"):  # "np" maps the file read-only, "pt" does not
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {shown(error)}") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: JsonObject = json.loads(file.read(length))
    entries: list[Entry] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {shown(name)} is of dtype {shown(entry['dtype'])}, which is not read")
        start, end = (8 + length + at for at in entry["data_offsets"])
        entries.append(Entry(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), start, end))
    return Header(path, {e.name: e for e in sorted(entries, key=lambda e: e.start)})


class Writer(NamedTuple):
    """Writes the tensors of an open file, in any order."""

    file: WholeFile
    entries: Mapping[str, Entry]

    def write(self, name: str, start: int, data: Tensor) -> None:
        """Write bytes of a tensor, from its byte `start` on."""
        self.file.seek(self.entries[name].start + start)
        self.file.write(memory_of(data))

    def write_rows(self, name: str, first: int, data: Tensor) -> None:
        """Write rows of a tensor, from row `first` on."""
        entry = self.entries[name]
        row = entry.bytes // max(entry.shape[0], 1) if entry.shape else entry.bytes
        if data.numel():
            self.write(name, first * row, data.detach().cpu().contiguous().flatten().view(torch.uint8))


@contextmanager
def writer(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Yield a Writer of a file with these tensors, which appears atomically (hop.compat.files.whole_file).

    Args:
        path: the file.
        entries: names, dtypes and shapes.
        metadata: texts.
    """
    header: JsonObject = {"__metadata__": dict(metadata)}
    at = 0
    for e in sorted(entries, key=lambda e: -e.dtype.itemsize):  # so that each is aligned to its element size
        header[e.name] = {
            "dtype": NAMES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [at, at + e.bytes],
        }
        at += e.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield Writer(file, {e.name: e._replace(start=begin + header[e.name]["data_offsets"][0]) for e in entries})
        file.truncate(begin + at)
