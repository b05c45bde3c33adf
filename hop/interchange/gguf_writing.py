"""Write tensors to a GGUF file, version 3, as llama.cpp and the package gguf read it.

    hop.interchange.save_gguf("model.gguf", tensors, {"general.architecture": "llama"})
    hop.interchange.save_gguf("model.gguf", tensors, metadata, shard_size=2**31)  # model-00001-of-00003.gguf, ...

Reading a file and writing it again, with `like` set to that file, reproduces its bytes except where several bytes
encode the same value (hop.interchange.gguf_blocks).
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hop.compat.files import WholeFile, whole_file, whole_folder
from hop.interchange.files import memory_of
from hop.interchange.gguf import MOST_FILES, GGUFFile, unpack_codes
from hop.interchange.gguf_blocks import ENCODERS
from hop.interchange.gguf_container import ARRAY, MOST_DIMENSIONS, SCALARS, STRING, is_alignment
from hop.interchange.gguf_types import PLAIN, TYPES
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import JsonObject, shown
from hop.numerics.stored_scales import StoredScales
from hop.tensor import QuantizedTensor

__all__ = ["gguf_quantizer", "save_gguf"]

_AT_ONCE = 2**20  # elements to encode at a time
_LONGEST_NAME = 63  # bytes; llama.cpp's limit
_NUMBERS = {dtype: number for number, dtype in PLAIN.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _UINT64, _INT64 = 4, 5, 6, 7, 10, 11
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.uint16: 2,
    torch.int16: 3,
    torch.uint32: _UINT32,
    torch.int32: _INT32,
    torch.float32: _FLOAT32,
    torch.bool: _BOOL,
    torch.uint64: _UINT64,
    torch.int64: _INT64,
    torch.float64: 12,
}


class _PlannedTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    bytes: int


def save_gguf(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    *,
    like: GGUFFile | None = None,
    shard_size: int | None = None,
) -> list[Path]:
    """Write tensors to a GGUF file, or to several. Codes are written as they are, never quantized again.

    A QuantizedTensor is written as the block type with its quantizer (see `gguf_quantizer`), from any layout that can
    be converted back to codes; a plain tensor keeps its dtype. Readers get the values of `hop.dequantize` bit for bit,
    except that -0 becomes 0 in MXFP4 and NVFP4. The file is written under a temporary name and renamed once it is
    complete and on disk. Each tensor is accessed twice, first to plan its storage, so that a lazy mapping such as a
    GGUFFile has one of its tensors in memory at a time.

    Args:
        path: the file, in an existing folder. A file of that name is replaced; a GGUFFile that has it open stays valid.
        tensors: tensors by their names in the file, with one to four dimensions. The last is a multiple of the block:
            32 elements, 64 for NVFP4, and 256 for the types named K, XS and TQ.
        metadata: keys and values: bool, int, float, text, lists of one of these, or tensors with at most one dimension,
            whose dtype is the type in the file. An int is stored as uint32, as int32 if negative or in a list, and with
            64 bits if needed; a float as float32. llama.cpp requires "general.architecture" and the keys of that
            architecture.
        like: a file that determines the types of its keys, and of its tensors if two types fit (TQ1_0 and TQ2_0; the
            default is the latter).
        shard_size: the most bytes of tensors in one file; a larger tensor gets a file to itself. Tensors that need more
            go to files NAME-00001-of-0000N.gguf in the place of NAME.gguf, as llama.cpp's gguf-split names them; the
            first has the metadata. They appear together once all are complete. None for a single file.

    Returns:
        The files, in order.

    Raises:
        TypeError: an argument has the wrong type.
        FileNotFoundError: the folder does not exist.
        ValueError: no GGUF type has a tensor's quantizer or allows its sizes; a name, key or value cannot be written;
            or shard_size is not above 0, or would need more than 65,535 files. Nothing is written then.
    """
    place = _checked(path, tensors, like, shard_size)
    known, own = {_meaning(t.quantizer): number for number, t in TYPES.items()}, dict(metadata or {})
    planned = [_plan_tensor(name, tensors[name], like, known) for name in tensors]  # keeps one tensor alive at a time
    alignment = own.get("general.alignment", 32)
    if not is_alignment(alignment):
        raise ValueError(
            f"save_gguf: metadata['general.alignment'] must be a power of two up to 2^20, got {alignment!r}; give 32"
        )
    parts = _parts(planned, shard_size, alignment)
    heads = [_head(part, keys, like, alignment) for part, keys in zip(parts, _keys_of_parts(parts, own), strict=True)]
    places = _places(place, len(parts))

    def write(target: Path, part: list[_PlannedTensor], head: bytes) -> None:
        with whole_file(target) as file:
            file.write(head)
            for each in part:
                _write(file, each, tensors[each.name], like, known)
                file.write(bytes(-each.bytes % alignment))

    if len(parts) == 1:
        write(place, parts[0], heads[0])
        return places
    with whole_folder(place.parent) as staged:
        for part, head, each_place in zip(parts, heads, places, strict=True):
            write(staged / each_place.name, part, head)
    return places


def gguf_quantizer(name: str) -> Quantizer:
    """Return the quantizer of a GGUF block type.

    Args:
        name: the type, such as "Q4_0" or "Q6_K".

    Raises:
        ValueError: there is no such type.
    """
    quantizers = {t.name: t.quantizer for t in TYPES.values()}
    if not isinstance(name, str) or name not in quantizers:
        raise ValueError(f"gguf_quantizer: name must be one of {', '.join(quantizers)}; got {name!r}: take one of them")
    return quantizers[name]


def _checked(path: object, tensors: object, like: object, shard_size: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save_gguf: path must be text or a Path, got {shown(path)}; give one such as 'm.gguf'")
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"save_gguf: tensors must be a mapping from names to tensors, got {shown(tensors)}; give one such as a dict"
        )
    if like is not None and not isinstance(like, GGUFFile):
        raise TypeError(f"save_gguf: like must be a GGUFFile or None, got {shown(like)}; use open_gguf")
    if shard_size is not None and type(shard_size) is not int:
        raise TypeError(
            f"save_gguf: shard_size must be an int or None, got {shown(shard_size)}; give one such as 2**31"
        )
    if shard_size is not None and shard_size < 1:
        raise ValueError(f"save_gguf: shard_size must be above 0, got {shard_size}; give one such as 2**31")
    place = Path(cast("str | os.PathLike[str]", path))
    if not place.parent.is_dir():
        raise FileNotFoundError(f"save_gguf: path must be in an existing folder, got {str(path)!r}; create it first")
    return place


# ---- the files of a split model


def _parts(planned: list[_PlannedTensor], shard_size: int | None, alignment: int) -> list[list[_PlannedTensor]]:
    """The tensors of each file, in order: as many as fit into `shard_size`, and at least one."""
    parts: list[list[_PlannedTensor]] = [[]]
    size = 0
    for each in planned:
        padded = -(-each.bytes // alignment) * alignment
        if shard_size is not None and parts[-1] and size + padded > shard_size:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += padded
    if len(parts) > MOST_FILES:
        raise ValueError(
            f"save_gguf: shard_size={shard_size} needs {len(parts)} files, and a model has at most {MOST_FILES}; give "
            "a larger one"
        )
    return parts


def _keys_of_parts(parts: list[list[_PlannedTensor]], metadata: JsonObject) -> Iterator[JsonObject]:
    """The metadata of each file: of several, the first has the model's, and each has its number."""
    if len(parts) == 1:
        yield metadata
        return
    if extra := sorted(key for key in metadata if key.startswith("split.")):
        raise ValueError(f"save_gguf: metadata[{extra[0]!r}] describes other files than shard_size gives; leave it out")
    total = torch.tensor(sum(map(len, parts)), dtype=torch.int32)
    for i in range(len(parts)):
        shared = {key: value for key, value in metadata.items() if key == "general.alignment"}
        yield (metadata if i == 0 else shared) | {
            "split.no": torch.tensor(i, dtype=torch.uint16),
            "split.count": torch.tensor(len(parts), dtype=torch.uint16),
            "split.tensors.count": total,
        }


def _places(place: Path, count: int) -> list[Path]:
    name = place.name.removesuffix(".gguf")
    return [place.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)] if count > 1 else [place]


def _head(part: list[_PlannedTensor], metadata: Mapping[str, object], like: GGUFFile | None, alignment: int) -> bytes:
    """The bytes of a file before its tensors."""
    values = b"".join(_key(name, value, like) for name, value in metadata.items())
    head, at = struct.pack("<4sIQQ", b"GGUF", 3, len(part), len(metadata)) + values, 0
    for each in part:
        sizes = struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *each.shape[::-1])
        head += _text(each.name) + sizes + struct.pack("<IQ", each.type, at)
        at += -(-each.bytes // alignment) * alignment
    return head + bytes(-len(head) % alignment)


# ---- tensors


def _meaning(q: Quantizer) -> Any:
    """The fields of a quantizer that determine the values of codes; not how scales were computed, or the layout."""
    sizes = list(q.block)
    while len(sizes) > 1 and sizes[0] == 1:
        sizes.pop(0)
    rule = replace(q.scale, search=0) if isinstance(q.scale, StoredScales) else q.scale
    return q.format, tuple(sizes), rule, q.flat, q.hadamard


def _plan_tensor(name: object, tensor: object, like: GGUFFile | None, known: Mapping[object, int]) -> _PlannedTensor:
    if not isinstance(name, str) or len(_text(name)) > 8 + _LONGEST_NAME:
        raise ValueError(
            f"save_gguf: names of tensors must be text of {_LONGEST_NAME} bytes at most, got {name!r}; shorten it"
        )
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise TypeError(f"save_gguf: tensors[{name!r}] must be a tensor with data, got {shown(tensor)}; load it first")
    shape = tuple(tensor.shape)
    if not 1 <= len(shape) <= MOST_DIMENSIONS:
        raise ValueError(
            f"save_gguf: tensors[{name!r}] has shape {shape}; a file has tensors of 1 to {MOST_DIMENSIONS} dimensions: "
            "reshape it"
        )
    number = _type(name, tensor, like, known)
    if number in PLAIN:
        return _PlannedTensor(name, shape, number, math.prod(shape) * PLAIN[number].itemsize)
    t = TYPES[number]
    if shape[-1] % t.elements:
        raise ValueError(
            f"save_gguf: tensors[{name!r}] has shape {shape}, and rows of type {t.name} are multiples of {t.elements}; "
            "fill them up, or take another type"
        )
    return _PlannedTensor(name, shape, number, math.prod(shape) // t.elements * t.bytes)


def _type(name: str, tensor: Tensor, like: GGUFFile | None, known: Mapping[object, int]) -> int:
    """The type number of a tensor."""
    if not isinstance(tensor, QuantizedTensor):
        if tensor.dtype not in _NUMBERS:
            dtypes = ", ".join(str(d) for d in _NUMBERS)
            raise ValueError(f"save_gguf: tensors[{name!r}] is {tensor.dtype}, and a file has {dtypes}; convert it")
        return _NUMBERS[tensor.dtype]
    q = tensor.quantizer
    if "rowwise" not in tensor.usages:
        raise ValueError(
            f"save_gguf: tensors[{name!r}] has no row-wise copy, which the file needs; quantize it with one"
        )
    number = known.get(_meaning(q))
    if number is None or q.is_decoded():
        why = "it holds values instead of codes" if q.is_decoded() else "no type of GGUF has such codes and scales"
        raise ValueError(
            f"save_gguf: tensors[{name!r}] is quantized by {q}: {why}; use a quantizer of "
            "hop.interchange.gguf_quantizer, or dequantize it"
        )
    if like is not None and name in like:
        preferred = next((n for n, t in TYPES.items() if t.name == like.type(name)), None)
        if preferred is not None and _meaning(TYPES[preferred].quantizer) == _meaning(q):
            return preferred
    return number


def _write(
    file: WholeFile, each: _PlannedTensor, tensor: Tensor, like: GGUFFile | None, known: Mapping[object, int]
) -> None:
    if _plan_tensor(each.name, tensor, like, known) != each:
        raise ValueError(f"save_gguf: tensors[{each.name!r}] changed between its first and its second access")
    if isinstance(tensor, QuantizedTensor):
        for part in _blocks(each.name, tensor, each.type):
            file.write(memory_of(part))
    elif tensor.numel():
        file.write(memory_of(tensor.detach().cpu().contiguous().flatten().view(torch.uint8)))


def _blocks(name: str, tensor: QuantizedTensor, number: int) -> Iterator[Tensor]:
    """The blocks of a tensor, a chunk at a time."""
    t, q, buffers = TYPES[number], tensor.quantizer, tensor.buffers()
    if q.layout not in (None, t.quantizer.layout) or q.is_dense() != t.quantizer.is_dense():
        buffers = q.packed(buffers, tuple(tensor.shape), t.quantizer.layout)
    count = tensor.numel() // t.elements
    names = ["codes", *t.quantizer.stored()]
    rows = {key: buffers[key].detach().cpu().contiguous().view(count, -1) for key in names} if count else {}
    format = t.quantizer.format
    for start in range(0, count, step := max(_AT_ONCE // t.elements, 1)):
        some = {key: data[start : start + step] for key, data in rows.items()}
        codes = unpack_codes(some["codes"], some.pop("high_codes", None), format.bits, format.dtype.is_signed)
        if t.name == "TQ1_0" and bool((codes > 2).any()):
            raise ValueError(
                f"save_gguf: tensors[{name!r}] has codes above 2, which TQ1_0 cannot store; leave like out"
            )
        yield ENCODERS[number](some | {"codes": codes})


# ---- metadata


def _text(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"save_gguf: {text!r} cannot be encoded as UTF-8; remove the surrogates") from error
    return struct.pack("<Q", len(raw)) + raw


def _key(key: object, value: object, like: GGUFFile | None) -> bytes:
    """The bytes of a key, its value's type, and the value."""
    if not isinstance(key, str):
        raise TypeError(f"save_gguf: keys of metadata must be text, got {key!r}; rename it")
    stored = like.stored_value(key) if like is not None and key in like.metadata else None
    if stored is not None and like is not None and _equal(like.metadata[key], value):
        return _text(key) + stored
    try:
        kinds = _kinds(value) if stored is None else _stored_kinds(stored)
        return _text(key) + struct.pack("<I", kinds[0]) + _value(value, kinds)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ValueError(
            f"save_gguf: metadata[{key!r}] is {shown(value)}: {error}; give numbers, text or lists of one type, or a "
            "tensor whose dtype says the type"
        ) from error


def _stored_kinds(stored: bytes) -> list[int]:
    """The types in a stored value, outermost first, without the lengths of its lists."""
    kinds = [*struct.unpack("<I", stored[:4])]
    while kinds[-1] == ARRAY:
        kinds += struct.unpack_from("<I", stored, 4 + 12 * (len(kinds) - 1))
    return kinds


def _equal(stored: object, value: object) -> bool:
    return type(stored) is type(value) and stored == value


def _kinds(value: object) -> list[int]:
    """The types of a value, outermost first: ARRAY for each level of lists, then the items' type."""
    if isinstance(value, Tensor):
        if value.dim() > 1 or value.dtype not in _DTYPES:
            raise TypeError(f"it is {value.dtype} of {tuple(value.shape)}")
        return [ARRAY, _DTYPES[value.dtype]] if value.dim() else [_DTYPES[value.dtype]]
    if not isinstance(value, list | tuple):
        return [_kind([value], _UINT32)]
    items = list(value)
    if not items:
        raise ValueError("an empty list has no type")
    if any(isinstance(item, list | tuple | Tensor) for item in items):
        kinds_of_items = [_kinds(item) for item in items]
        if any(kinds != kinds_of_items[0] for kinds in kinds_of_items):
            raise TypeError("its lists are of several types")
        return [ARRAY, *kinds_of_items[0]]
    return [ARRAY, _kind(items, _INT32)]


def _kind(items: list[Any], integer: int) -> int:
    """The type of numbers or texts. `integer` is preferred for integers if they fit."""
    types = {type(item) for item in items}
    if types == {bool}:
        return _BOOL
    if types == {str}:
        return STRING
    if types == {int}:
        low, high = min(items), max(items)
        if integer == _UINT32 and low >= 0:
            return _UINT32 if high < 2**32 else _UINT64
        return _INT32 if low >= -(2**31) and high < 2**31 else _UINT64 if low >= 0 else _INT64
    if types <= {int, float}:
        return _FLOAT32
    raise TypeError(f"it has values of {', '.join(sorted(t.__name__ for t in types))}")


def _value(value: object, kinds: list[int]) -> bytes:
    value = value.tolist() if isinstance(value, Tensor) else value
    if kinds[0] == STRING:
        if not isinstance(value, str):
            raise TypeError("it must be text")
        return _text(value)
    if kinds[0] != ARRAY:
        if isinstance(value, bool) != (kinds[0] == _BOOL):
            raise TypeError("it must be a bool where the file has one, and there alone")
        return struct.pack(f"<{SCALARS[kinds[0]]}", value)
    if not isinstance(value, list | tuple):
        raise TypeError("it must be a list")
    items = value
    head = struct.pack("<IQ", kinds[1], len(items))
    if kinds[1] in SCALARS:
        return head + struct.pack(f"<{len(items)}{SCALARS[kinds[1]]}", *items)
    return head + b"".join(_value(item, kinds[1:]) for item in items)
