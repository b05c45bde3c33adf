"""GGUF files, as llama.cpp writes and reads them.

    for name, tensor in hop.interchange.load_gguf("model.gguf"):
        ...

A quantized tensor becomes a QuantizedTensor whose numbers are, bit for bit, those that gguf.quants.dequantize gives; a
plain one becomes a tensor. The file is mapped into memory, and a tensor is read when it is asked for, some blocks at a
time: its codes and scales are brought into our order, and its floats are never made.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.interchange.files import checked_path
from hop.interchange.gguf_container import Entry, read_header, type_name
from hop.interchange.gguf_types import PLAIN, TYPES, BlockType
from hop.numerics.packing import PACKED
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

__all__ = ["GGUFFile", "load_gguf", "open_gguf"]

_AT_ONCE = 2**20  # elements that are unpacked to bytes of their own


class GGUFFile(Mapping[str, Tensor]):
    """The tensors of a GGUF file by name, in the file's order, each read when it is asked for.

    Attributes:
        path: of the file, which must not change while this is in use.
        metadata: keys of the file and their values: numbers, texts, and lists of these.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self._entries, self._places = read_header(path)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        raw = self._data.narrow(0, entry.start, entry.bytes) if entry.bytes else self._data[:0]
        if entry.type in PLAIN:
            return _plain(raw, entry)
        known = TYPES.get(entry.type)
        if known is None:
            types = ", ".join(t.name for t in TYPES.values())
            raise ValueError(
                f"{self.path}: tensor {name!r} is of type {type_name(entry.type)}; those that are read are {types}"
            )
        return _quantized(raw, entry, known, self._release)

    def _release(self, start: int, stop: int) -> None:
        """Give back the memory of pages of the file that were read; those at the ends, which others share, stay."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return self._entries[name].shape

    def type(self, name: str) -> str:
        """The type of a tensor in ggml's words, such as "Q4_K", or its dtype; it is not read."""
        return type_name(self._entries[name].type)

    def stored_value(self, key: str) -> bytes:
        """The type and the value of a key of the metadata, as the file has them."""
        start, stop = self._places[key]
        return bytes(self._data[start:stop].numpy())

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self)} tensors)"


def open_gguf(path: str | Path) -> GGUFFile:
    """A GGUF file, whose tensors are read one by one.

    Args:
        path: of the file.

    Returns:
        A mapping from names to tensors: quantized ones as QuantizedTensors that appear in float32, plain ones in their
        dtype, in private memory that the file is mapped into. Shapes are PyTorch's, with rows last.

    Raises:
        TypeError: path is no path.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or cut off, or is no GGUF file of version 2 or 3; and, when it is asked for, a
            tensor of a type that is not read.
    """
    return GGUFFile(checked_path("open_gguf", path, "m.gguf", folders=False))


def load_gguf(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The name and the tensor of each tensor of a GGUF file, in its order, each read when it is asked for.

    Arguments, results and errors are those of `open_gguf`; the header is checked at once."""
    return iter(open_gguf(path).items())


def _plain(raw: Tensor, entry: Entry) -> Tensor:
    dtype = PLAIN[entry.type]
    aligned = entry.start % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype).reshape(entry.shape)


def _quantized(raw: Tensor, entry: Entry, known: BlockType, release: Callable[[int, int], None]) -> QuantizedTensor:
    q = known.quantizer
    buffers = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in q.buffers(entry.shape).items()}
    blocks = raw.reshape(-1, known.bytes)
    for start in range(0, len(blocks), step := max(_AT_ONCE // known.elements, 1)):
        some = blocks[start : start + step]
        for name, part in held(q, known.read(some)).items():
            rows = buffers[name].view(len(blocks), -1)
            rows[start : start + len(some)] = part.view(len(some), -1)
        release(entry.start + start * known.bytes, entry.start + (start + len(some)) * known.bytes)
    return QuantizedTensor(buffers, q, entry.shape, torch.float32)


def held(q: Quantizer, parts: dict[str, Tensor]) -> dict[str, Any]:
    """What a tensor by `q` holds of blocks, which begin and end with a byte of each buffer."""
    codes, layout = parts["codes"], q.layout
    if q.is_dense() and codes.shape[1] % 8 == 0:
        return parts | dict(zip(("codes", "high_codes"), planes(codes, q.format.bits), strict=True))
    if layout is not None:
        return parts | {"codes": layout.arrange(codes, q.format)} | layout.beside(codes, q.format)
    return parts | {"codes": q.format.pack(codes)} if q.per_byte() > 1 else parts


def planes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What the layout Planes holds of codes of 3, 5 or 6 bits, (n, m) bytes; m is a multiple of 8.

    As its `arrange` and `beside` give it, in few passes: codes are gathered inside words, in little-endian order."""
    raw = codes.contiguous().view(torch.uint8)
    low = 2 if bits == 3 else 4
    return _gathered(raw & (2**low - 1), low), _gathered((raw >> low) & (2 ** (bits - low) - 1), bits - low)


def _gathered(fields: Tensor, bits: int) -> Tensor:
    """(n, m) bytes with a field of 1, 2 or 4 bits each -> (n, m · bits / 8) bytes of fields, the first in the lowest
    bits."""
    if bits == 4:
        x = fields.view(torch.int16)
        return (x | (x >> 4)).to(torch.uint8)
    if bits == 2:
        x = fields.view(torch.int32)
        return (x | (x >> 6) | (x >> 12) | (x >> 18)).to(torch.uint8)
    # Σ bit[i] 2^(8 i) · Σ 2^(7 k), k from 1 to 8, has bit[i] at 56 + i, and nothing else there.
    return ((fields.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def unheld(codes: Tensor, high_codes: Tensor | None, bits: int, signed: bool) -> Tensor:
    """(n, m) bytes of what is held -> (n, elements and what fills the last byte) codes: the inverse of `held`, in few
    passes.

    Args:
        codes, high_codes: in the plain form, or in that of hop.layouts.Planes.
        bits, signed: of a code."""
    raw = codes.contiguous().view(torch.uint8)
    if high_codes is not None:
        low = 2 if bits == 3 else 4
        below, above = _spread(raw, low), _spread(high_codes, bits - low)
        size = min(below.shape[1], above.shape[1])  # the last byte of each may have more
        result = below[:, :size] | (above[:, :size] << low)
    else:
        result = _spread(raw, bits) if bits in PACKED else raw
    if not signed:
        return result
    result = result.view(torch.int8)
    return result if bits == 8 else (result << (8 - bits)) >> (8 - bits)


def _spread(raw: Tensor, bits: int) -> Tensor:
    """(n, m) bytes -> (n, 8 m / bits) fields, the lowest bits first."""
    return torch.stack([(raw >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 2).flatten(1)
