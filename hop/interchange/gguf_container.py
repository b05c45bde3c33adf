"""The header of a GGUF file: metadata, and the location of each tensor. Little-endian, versions 2 and 3.

    "GGUF"  version u32  tensors u64  keys u64
    keys times      key: string, type: u32, value
    tensors times   name: string, dimensions: u32, sizes: u64 each, type: u32, offset: u64
    padding to a multiple of general.alignment, then the data, to which offsets are relative

A string is its length, u64, and UTF-8. Sizes are in reverse order, the last dimension first. The file is not trusted:
each length is compared with the remaining bytes before anything of that length is read, and tensors must not overlap,
so that memory and time stay proportional to the file's size. Source: docs/gguf.md of ggml.
"""

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hop.interchange.gguf_types import OTHERS, PLAIN, TYPES
from hop.numerics.spelling import JsonObject, shown

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_LEAST_KEY, _LEAST_TENSOR = 13, 24  # smallest sizes in bytes
_DEEPEST = 4  # most levels of nested arrays
MOST_DIMENSIONS = 4
_LARGEST = 2**63 - 1


class GGUFEntry(NamedTuple):
    """The location of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int  # offset in the file
    bytes: int  # 0 for an unknown type


class Header(NamedTuple):
    metadata: JsonObject
    entries: dict[str, GGUFEntry]
    places: dict[str, tuple[int, int]]  # the file's byte range of each key's type and value


def read_header(path: Path) -> Header:
    """Read the metadata and the tensor locations of a file.

    Raises ValueError, with the path and, where it applies, the tensor's name, if the file is not a complete GGUF file.
    """
    size = os.path.getsize(path)
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has {size} bytes, fewer than a header")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).header()


def is_alignment(value: object) -> bool:
    """Whether `value` is a valid alignment."""
    return type(value) is int and 1 <= value <= 2**20 and value & (value - 1) == 0


def type_name(number: int) -> str:
    """The name of a type number."""
    if number in TYPES:
        return TYPES[number].name
    return str(PLAIN[number]) if number in PLAIN else OTHERS.get(number, f"number {number}")


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.what = "the header"

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {self.what}: {message}")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.error(f"needs {count} bytes at byte {self.at}, and the file has {len(self.data)} in all")
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8, before byte {self.at}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth == _DEEPEST:
            raise self.error(f"has a value of type {kind}, {depth} arrays deep, which no GGUF file has")
        inner, count = self.scalar("I"), self.scalar("Q")
        code = SCALARS.get(inner)
        least = struct.calcsize(f"<{code}") if code else 8 if inner == STRING else 12
        self.check_count(count, least)
        if code:
            return list(struct.unpack(f"<{count}{code}", self.take(count * least)))
        if inner == STRING:
            return self.strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """Read `count` texts. A loop without calls of `string`, because vocabularies have hundreds of thousands."""
        data, at, end, strings = self.data, self.at, len(self.data), list[str]()
        size_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + size_at(data, at)[0] if start <= end else end + 1
                if at > end:
                    raise self.error(f"needs more bytes for a text than the file has, {end} in all")
                strings.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8, before byte {at}") from error
        self.at = at
        return strings

    def check_count(self, count: int, least: int) -> None:
        """Raise if the rest of the file cannot contain `count` items of at least `least` bytes."""
        if count * least > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise self.error(f"counts {count} items of {least} bytes and more, and {left} bytes are left")

    def header(self) -> Header:
        if self.take(4) != b"GGUF":
            raise self.error("does not begin with GGUF")
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.error(f"is of version {version:#x}; versions 2 and 3 are read, in little-endian order")
        tensors, keys = self.scalar("Q"), self.scalar("Q")
        self.check_count(keys, _LEAST_KEY)
        metadata: dict[str, object] = {}
        places: dict[str, tuple[int, int]] = {}
        for i in range(keys):
            self.what = f"key {i} of the metadata"
            key = self.string()
            self.what = f"key {shown(key)} of the metadata"
            if key in metadata:
                raise self.error("is there twice")
            start = self.at
            metadata[key] = self.value(self.scalar("I"))
            places[key] = start, self.at
        self.what = "the list of tensors"
        self.check_count(tensors, _LEAST_TENSOR)
        entries = [self.tensor(i) for i in range(tensors)]
        return Header(metadata, self.locate(entries, metadata.get("general.alignment", 32)), places)

    def tensor(self, i: int) -> GGUFEntry:
        """Read a tensor's entry, with its start relative to the data and its size still unknown."""
        self.what = f"tensor {i}"
        name = self.string()
        self.what = f"tensor {shown(name)}"
        ndim = self.scalar("I")
        if ndim > MOST_DIMENSIONS:
            raise self.error(f"has {ndim} dimensions; {MOST_DIMENSIONS} is the most")
        shape = tuple(self.scalar("Q") for _ in range(ndim))[::-1]
        if math.prod(max(n, 1) for n in shape) > _LARGEST:
            raise self.error(f"has sizes {shape}, more elements than 63 bits count")
        return GGUFEntry(name, shape, self.scalar("I"), self.scalar("Q"), 0)

    def locate(self, relative: list[GGUFEntry], alignment: Any) -> dict[str, GGUFEntry]:
        """The tensors by name, with their locations in the file."""
        self.what = "key 'general.alignment' of the metadata"
        if not is_alignment(alignment):
            raise self.error(f"must be a power of two up to 2^20, got {shown(alignment)}")
        data = -(-self.at // alignment) * alignment
        entries: dict[str, GGUFEntry] = {}
        for entry in relative:
            self.what = f"tensor {shown(entry.name)}"
            if entry.name in entries:
                raise self.error("is there twice")
            if entry.start % alignment:
                raise self.error(f"begins at {entry.start}, which is not a multiple of the alignment, {alignment}")
            count = self.size(entry)
            start = data + entry.start
            if start + count > max(len(self.data), data):
                raise self.error(
                    f"of sizes {entry.shape} and type {type_name(entry.type)} is at bytes {start} to "
                    f"{start + count}, and the file ends at {len(self.data)}"
                )
            entries[entry.name] = entry._replace(start=start, bytes=count)
        self.check_overlap(list(entries.values()))
        return entries

    def check_overlap(self, entries: list[GGUFEntry]) -> None:
        """Raise if tensors overlap: otherwise a small file could expand to many tensors of its size."""
        end, before = 0, ""
        for entry in sorted((e for e in entries if e.bytes), key=lambda e: e.start):
            self.what = f"tensor {shown(entry.name)}"
            if entry.start < end:
                raise self.error(f"begins at byte {entry.start}, within tensor {shown(before)}, which ends at {end}")
            end, before = entry.start + entry.bytes, entry.name

    def size(self, entry: GGUFEntry) -> int:
        """The bytes of a tensor; 0 for an unknown type."""
        count = math.prod(entry.shape)
        if entry.type in PLAIN:
            return count * PLAIN[entry.type].itemsize
        known = TYPES.get(entry.type)
        if known is None:
            return 0
        if not entry.shape or entry.shape[-1] % known.elements:
            raise self.error(f"of type {known.name} has sizes {entry.shape}; rows are multiples of {known.elements}")
        return count // known.elements * known.bytes
