"""Read GGUF files, as llama.cpp writes and reads them.

    for name, tensor in hop.interchange.load_gguf("model.gguf"):
        ...

A quantized tensor becomes a QuantizedTensor whose values equal those of gguf.quants.dequantize bit for bit; a plain one
becomes a tensor. The file is memory-mapped, and a tensor is read on access, some blocks at a time: codes and scales are
rearranged into our layout without materializing floats.
"""

import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.interchange.files import checked_path
from hop.interchange.gguf_container import GGUFEntry, Header, read_header, type_name
from hop.interchange.gguf_types import PLAIN, TYPES, BlockType
from hop.numerics.packing import PACKED
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

__all__ = ["GGUFFile", "load_gguf", "open_gguf"]

_AT_ONCE = 2**20  # elements that are unpacked to bytes at a time
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # llama.cpp's names of a split model's files
MOST_FILES = 2**16 - 1  # the largest value of split.count, which has 16 bits


class _Shard:
    """A memory-mapped file."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def release(self, start: int, stop: int) -> None:
        """Release the memory of pages that have been read, except those at the ends, which other tensors may share."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < last:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)


class GGUFFile(Mapping[str, Tensor]):
    """The tensors of a GGUF file by name, in the file's order, each read on access.

    Attributes:
        path: the file, or the first of several; it must not change while this object is in use.
        files: all of them.
        metadata: the file's keys and values: numbers, texts, and lists of these. For a split model, those of the first
            file without the keys of the split.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        shards = [_Shard(place, header) for place, header in _headers(path)]
        self.files = [shard.path for shard in shards]
        self._places = shards[0].header.places
        self._first = shards[0].data
        self.metadata = shards[0].header.metadata
        if len(shards) > 1:
            self.metadata = {key: value for key, value in self.metadata.items() if not key.startswith("split.")}
        self._entries = {name: (shard, entry) for shard in shards for name, entry in shard.header.entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        shard, entry = self._entries[name]
        raw = shard.data.narrow(0, entry.start, entry.bytes) if entry.bytes else shard.data[:0]
        if entry.type in PLAIN:
            return _plain(raw, entry)
        known = TYPES.get(entry.type)
        if known is None:
            types = ", ".join(t.name for t in TYPES.values())
            raise ValueError(
                f"{shard.path}: tensor {shown(name)} is of type {type_name(entry.type)}; those that are read are "
                f"{types}"
            )
        return _quantized(raw, entry, known, shard.release)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._entries[name][1].shape

    def type(self, name: str) -> str:
        """The type of a tensor, in ggml's terms such as "Q4_K", or its dtype, without reading it."""
        return type_name(self._entries[name][1].type)

    def stored_value(self, key: str) -> bytes:
        """The bytes of a metadata key's type and value in the file."""
        start, stop = self._places[key]
        return bytes(self._first[start:stop].numpy())

    def __contains__(self, name: object) -> bool:  # Mapping's version reads the tensor
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self)} tensors)"


def _headers(path: Path) -> list[tuple[Path, Header]]:
    """The files of a model and their headers: a single file, or all of a split, given the first."""
    first = read_header(path)
    count, number = (first.metadata.get(f"split.{key}", 0) for key in ("count", "no"))
    if type(count) is not int or type(number) is not int or not 0 <= number < max(count, 1) <= MOST_FILES:
        raise ValueError(f"{path}: split.no is {shown(number)} and split.count {shown(count)}; split the model again")
    if count <= 1:
        return [(path, first)]
    match = _SPLIT.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise ValueError(
            f"{path} is file {number + 1} of {count} of a model, and must be called "
            f"NAME-{number + 1:05}-of-{count:05}.gguf, so that the others are found; rename it"
        )
    names = [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if number:
        raise ValueError(f"{path} is file {number + 1} of {count} of a model; open the first, {names[0]!r}")
    result = [(path, first)]
    for i, name in enumerate(names[1:], 1):
        place = path.with_name(name)
        if not place.is_file():
            raise ValueError(f"{path} is the first of {count} files of a model, and {name!r} is missing; download it")
        header = read_header(place)
        found = tuple(header.metadata.get(f"split.{key}") for key in ("no", "count"))
        if found != (i, count):
            raise ValueError(
                f"{place}: split.no and split.count are {shown(found)}, not {(i, count)} next to {path.name!r}; "
                "download the files of one model"
            )
        result.append((place, header))
    _check_tensors(path, result)
    return result


def _check_tensors(path: Path, files: list[tuple[Path, Header]]) -> None:
    """Raise ValueError if a tensor is in two files, or if their number differs from the first file's count."""
    places: dict[str, Path] = {}
    for place, header in files:
        for name in header.entries:
            if name in places:
                raise ValueError(
                    f"{place}: tensor {shown(name)} is in {places[name].name!r} too; split the model again"
                )
            places[name] = place
    wanted = files[0][1].metadata.get("split.tensors.count")
    if wanted is not None and wanted != len(places):
        raise ValueError(
            f"{path}: split.tensors.count is {shown(wanted)}, and the {len(files)} files have {len(places)} tensors; "
            "download the files of one model"
        )


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, or a model split into several, whose tensors are read one by one.

    Args:
        path: the file; for a split model the first, NAME-00001-of-0000N.gguf, with the others in the same folder.

    Returns:
        A mapping from names to tensors: quantized ones as QuantizedTensors that appear in float32, plain ones in their
            dtype, in private copy-on-write memory. Shapes are in PyTorch's order, with rows last.

    Raises:
        TypeError: path is not a path.
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or truncated, or is not a GGUF file of version 2 or 3; it is not the first of
            several, or one of them is missing; or, on access, a tensor has an unsupported type.
    """
    return GGUFFile(checked_path("open_gguf", path, "m.gguf", folders=False))


def load_gguf(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and tensors of a GGUF file, in its order; each tensor is read when it is reached.

    Arguments and errors are those of `open_gguf`; the header is checked immediately.
    """
    return iter(open_gguf(path).items())


def _plain(raw: Tensor, entry: GGUFEntry) -> Tensor:
    dtype = PLAIN[entry.type]
    aligned = entry.start % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype).reshape(entry.shape)


def _quantized(raw: Tensor, entry: GGUFEntry, known: BlockType, release: Callable[[int, int], None]) -> QuantizedTensor:
    q = known.quantizer
    buffers = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in q.buffers(entry.shape).items()}
    blocks = raw.reshape(-1, known.bytes)
    for start in range(0, len(blocks), step := max(_AT_ONCE // known.elements, 1)):
        some = blocks[start : start + step]
        for name, part in buffers_from_parts(q, known.read(some)).items():
            rows = buffers[name].view(len(blocks), -1)
            rows[start : start + len(some)] = part.view(len(some), -1)
        release(entry.start + start * known.bytes, entry.start + (start + len(some)) * known.bytes)
    return QuantizedTensor(buffers, q, entry.shape, torch.float32)


def buffers_from_parts(q: Quantizer, parts: dict[str, Tensor]) -> dict[str, Any]:
    """The buffers of a tensor by `q`, from blocks that fill whole bytes of each buffer."""
    codes, layout = parts["codes"], q.layout
    if q.is_dense() and codes.shape[1] % 8 == 0:
        return parts | dict(zip(("codes", "high_codes"), planes(codes, q.format.bits), strict=True))
    if layout is not None:
        return parts | {"codes": layout.arrange(codes, q.format)} | layout.additional(codes, q.format)
    return parts | {"codes": q.format.pack(codes)} if q.per_byte() > 1 else parts


def planes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The buffers of codes of 3, 5 or 6 bits in the layout Planes; (n, m) bytes, with m a multiple of 8.

    The result equals that of the layout's `arrange` and `additional`, in fewer passes: codes are gathered within words,
    in little-endian order.
    """
    raw = codes.contiguous().view(torch.uint8)
    low = 2 if bits == 3 else 4
    return _pack_fields(raw & (2**low - 1), low), _pack_fields((raw >> low) & (2 ** (bits - low) - 1), bits - low)


def _pack_fields(fields: Tensor, bits: int) -> Tensor:
    """Pack (n, m) bytes with one field of 1, 2 or 4 bits each into (n, m · bits / 8) bytes, the first field in the low
    bits.
    """
    if bits == 4:
        x = fields.view(torch.int16)
        return (x | (x >> 4)).to(torch.uint8)
    if bits == 2:
        x = fields.view(torch.int32)
        return (x | (x >> 6) | (x >> 12) | (x >> 18)).to(torch.uint8)
    # Σ bit[i] 2^(8 i) · Σ 2^(7 k), k from 1 to 8, has bit[i] at position 56 + i, and nothing else from 56 up.
    return ((fields.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_codes(codes: Tensor, high_codes: Tensor | None, bits: int, signed: bool) -> Tensor:
    """Unpack (n, m) bytes of buffers into (n, elements and padding of the last byte) codes, the inverse of
    `buffers_from_parts`, in few passes.

    Args:
        codes, high_codes: in the plain layout, or in hop.layouts.Planes.
        bits, signed: of a code.
    """
    raw = codes.contiguous().view(torch.uint8)
    if high_codes is not None:
        low = 2 if bits == 3 else 4
        below, above = _unpack_fields(raw, low), _unpack_fields(high_codes, bits - low)
        size = min(below.shape[1], above.shape[1])  # their last bytes may have different padding
        result = below[:, :size] | (above[:, :size] << low)
    else:
        result = _unpack_fields(raw, bits) if bits in PACKED else raw
    if not signed:
        return result
    result = result.view(torch.int8)
    return result if bits == 8 else (result << (8 - bits)) >> (8 - bits)


def _unpack_fields(raw: Tensor, bits: int) -> Tensor:
    """Unpack (n, m) bytes into (n, 8 m / bits) fields, the low bits first."""
    return torch.stack([(raw >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 2).flatten(1)
