"""What DCP is to write and to read of quantized tensors.

A quantized tensor is taken apart into its buffers, which DCP writes, cuts and reads in place as any other tensor:

    "weight"  ->  "weight.codes", "weight.scale", ...            entries of the shapes that the whole tensor's buffers have
              ->  "weight.codes[0:32,0:64]", ...                 in pieces, if boundaries of shards cut a block

The checkpoint's metadata says of "weight" which quantizer, shape, dtype and usages it has, and why it is in pieces, if
it is; a piece is read by the shard with the same boundaries alone. All of it is compared with the tensors of the state
dict before the first byte is read.
"""

import ctypes
import dataclasses
import hashlib
import io
import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hop import _compile
from hop.checkpoint.shards import Chunk, Part, part_of
from hop.tensor.table import Cut

_KEY = "hop.quantized"  # in Metadata.planner_data, beside the paths of entries


class _Record(NamedTuple):
    """What a process tells the coordinator of its part of a quantized tensor."""

    described: dict[str, Any]
    path: tuple[Any, ...]
    region: str
    buffers: tuple[str, ...]
    cut: str | None  # why it has no ranges of the whole tensor's buffers
    digests: dict[tuple[str, tuple[int, ...]], str]  # of the ranges that other parts must have too: buffer, offsets


class SavePlanner(DefaultSavePlanner):
    """A planner for dcp.save and dcp.async_save, of state dicts with plain and quantized tensors and DTensors.

    Args:
        dedup_save_to_lowest_rank: as DefaultSavePlanner has it.

    Raises (from dcp.save, inside its CheckpointException):
        ValueError: two entries of one name; a DTensor of partial sums; processes with different quantizers for one
            tensor; a value that torch.load(weights_only=True) would not read back.
    """

    def __init__(self, dedup_save_to_lowest_rank: bool = False) -> None:
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self.parts = _taken_apart(self.state_dict)
        self.buffers: dict[str, Tensor] = {}
        for fqn, part in self.parts.items():
            for name, buffer in part.tensor.buffers().items():
                entry = _entry(fqn, name)
                if entry in self.state_dict or entry in self.buffers:
                    raise ValueError(f"state_dict: {entry!r} is a buffer of {fqn!r} and another entry; rename one")
                self.buffers[entry] = self.buffers[_entry(fqn, name, part.region())] = buffer.detach()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        records, items = {}, list(plan.items)
        for fqn, part in self.parts.items():
            if not part.is_empty():
                records[fqn], own = _write(fqn, part, self.mappings[fqn])
                items += own
        paths = {fqn: path for fqn, path in self.mappings.items() if fqn not in self.parts}
        return dataclasses.replace(plan, items=items, planner_data={**paths, _KEY: records})

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        records: dict[str, list[_Record]] = {}
        for plan in all_plans:
            for fqn, record in plan.planner_data[_KEY].items():
                records.setdefault(fqn, []).append(record)
        described = {fqn: _agreed(fqn, own) for fqn, own in records.items()}
        plans = [_settled(plan, described) for plan in all_plans]
        plans[0].planner_data[_KEY] = described
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.buffers[index.fqn] if index.fqn in self.buffers else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                torch.load(io.BytesIO(found.getbuffer()), weights_only=True)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"state_dict: {write_item.index.fqn!r} holds {type(object).__name__}, which could not be loaded "
                    f"again: {error}"
                ) from error
        return found


class LoadPlanner(DefaultLoadPlanner):
    """A planner for dcp.load, of what SavePlanner, or DCP's own planner, has planned.

    Args:
        allow_partial_load: whether entries that the checkpoint lacks stay as they are.

    Raises (from dcp.load, inside its CheckpointException), before anything is written:
        ValueError: an entry has another quantizer, shape, dtype or usages than its tensor, is quantized where the
            tensor is not, or the other way round; boundaries of shards cut a block or a byte; entries do not cover it.
        RuntimeError: an entry is missing.
    """

    def __init__(self, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict, parts = _taken_apart(self.state_dict)
        described = (metadata.planner_data or {}).get(_KEY, {})
        self.chunks: dict[str, Chunk] = {}
        for fqn, value in self.state_dict.items():
            if fqn in described:
                raise ValueError(
                    f"{fqn!r}: the checkpoint holds it quantized by {described[fqn]['quantizer']}, and the state dict "
                    "plain; quantize the model in the same way before it is loaded"
                )
            _check_plain(fqn, value, metadata.state_dict_metadata.get(fqn))
        for fqn, part in parts.items():
            if fqn not in described and self.allow_partial_load and fqn not in metadata.state_dict_metadata:
                continue
            saved = _checked(fqn, part, described.get(fqn), metadata)
            if not part.is_empty():
                self.chunks |= _read(fqn, part, saved, metadata)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        entries = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        for entry, chunk in self.chunks.items():
            own = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.buffer.shape)
            plan.items += create_read_items_for_chunk_list(entry, entries[entry], [own])  # type: ignore[arg-type]
        read: dict[str, int] = {}
        for item in plan.items:
            fqn = item.dest_index.fqn
            read[fqn] = read.get(fqn, 0) + math.prod(item.lengths)
        wanted = {entry: chunk.buffer.numel() for entry, chunk in self.chunks.items()}
        for fqn, value in self.state_dict.items():
            if isinstance(value, Tensor) and fqn in entries:
                wanted[fqn] = (_compile.local_range(value)[0] if _compile.is_dtensor(value) else value).numel()
        for fqn, count in wanted.items():
            if read.get(fqn, 0) != count:
                raise ValueError(f"{fqn!r}: the checkpoint holds {read.get(fqn, 0)} of the {count} elements of it here")
        return plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # as DCP's own planner, which unpickles anything, and makes keys of dicts that are numbers texts
        *path, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in path:
            container = container[_own_key(container, key)]
        container[_own_key(container, last)] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunk = self.chunks.get(index.fqn)
        return super().lookup_tensor(index) if chunk is None else chunk.buffer.detach()


def _taken_apart(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The plain entries of a flat state dict, and this process's parts of the quantized ones."""
    parts: dict[str, Part] = {}
    for fqn, value in state_dict.items():
        if _compile.is_dtensor(value) and not _compile.is_on_mesh(value):
            continue  # of other processes; DCP leaves it out
        try:
            part = part_of(value)
        except ValueError as error:
            raise ValueError(f"state_dict: {fqn!r}: {error}") from error
        if part is not None:
            parts[fqn] = part
    return {fqn: value for fqn, value in state_dict.items() if fqn not in parts}, parts


def _entry(fqn: str, name: str, region: str | None = None) -> str:
    return f"{fqn}.{name}" if region is None else f"{fqn}.{name}[{region}]"


def _described(part: Part) -> dict[str, Any]:
    t = part.tensor
    return {
        "quantizer": str(t.quantizer),
        "shape": part.shape,
        "dtype": str(t.dtype),
        "usages": t.usages,
    }


# ---- saving


def _write(fqn: str, part: Part, path: tuple[Any, ...]) -> tuple[_Record, list[WriteItem]]:
    buffers, cut = part.tensor.buffers(), None
    try:
        chunks = part.chunks()
    except Cut as reason:  # the coordinator makes pieces of all parts
        chunks, cut = {name: Chunk(b, (0,) * b.dim(), tuple(b.shape)) for name, b in buffers.items()}, str(reason)
    digests = {(name, c.offsets): _digest(c.buffer) for name, c in chunks.items() if c.is_shared}
    items = [
        _item(_entry(fqn, name), c.offsets, c.size, c.buffer.shape, TensorProperties.create_from_tensor(c.buffer))
        for name, c in chunks.items()
    ]
    return _Record(_described(part), path, part.region(), tuple(buffers), cut, digests), items


def _item(entry: str, offsets: Any, size: Any, sizes: Any, properties: TensorProperties) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, dataclasses.replace(properties, requires_grad=False), torch.Size(size))
    return WriteItem(MetadataIndex(entry, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _digest(buffer: Tensor) -> str:
    data = buffer.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()


def _agreed(fqn: str, records: list[_Record]) -> dict[str, Any]:
    """What the checkpoint says of a quantized tensor, from what all processes say."""
    first = records[0].described
    other = next((r.described for r in records if r.described != first), None)
    if other is not None:
        raise ValueError(f"state_dict: {fqn!r} must be quantized alike in all processes; got {first} and {other}")
    pieces = next((r.cut for r in records if r.cut is not None), None)
    held: dict[Any, str] = {}
    for (name, offsets), digest in (item for r in records for item in r.digests.items()):
        if held.setdefault((name, offsets), digest) != digest and pieces is None:
            pieces = f"its {name} serves a whole dimension, and the parts of it had different ones"
    return {**first, "pieces": pieces}


def _settled(plan: SavePlan, described: Mapping[str, Any]) -> SavePlan:
    """The plan of one process, with the entries of tensors in pieces renamed."""
    paths = dict(plan.planner_data)
    renamed = {}
    for fqn, record in paths.pop(_KEY).items():
        in_pieces = described[fqn]["pieces"] is not None
        for name in record.buffers:
            entry = _entry(fqn, name, record.region if in_pieces else None)
            paths[entry] = (*record.path, entry.removeprefix(f"{fqn}."))
            if in_pieces:
                renamed[_entry(fqn, name)] = entry
    items = [_as_piece(item, renamed[item.index.fqn]) if item.index.fqn in renamed else item for item in plan.items]
    return dataclasses.replace(plan, items=items, planner_data=paths)


def _as_piece(item: WriteItem, entry: str) -> WriteItem:
    data: Any = item.tensor_data
    sizes = data.chunk.sizes
    return _item(entry, (0,) * len(sizes), sizes, sizes, data.properties)


# ---- loading


def _check_plain(fqn: str, value: Any, saved: Any) -> None:
    if not isinstance(value, Tensor) or saved is None:  # DCP's own planner refuses the rest
        return
    if isinstance(saved, BytesStorageMetadata):
        raise ValueError(f"{fqn!r}: the checkpoint holds no tensor, and the state dict one of shape {value.shape}")
    if saved.properties.dtype != value.dtype:
        raise ValueError(
            f"{fqn!r}: the checkpoint holds {saved.properties.dtype}, and the state dict {value.dtype}; convert one to "
            "the dtype of the other, since loading does not round"
        )


def _checked(fqn: str, part: Part, saved: Any, metadata: Any) -> Mapping[str, Any]:
    """What the checkpoint says of the tensor, if that is what the tensor is."""
    own = _described(part)
    if saved is None and fqn in metadata.state_dict_metadata:
        raise ValueError(
            f"{fqn!r}: the checkpoint holds it plain, and the state dict quantized by {own['quantizer']}; load it into "
            "the plain tensor, and quantize that"
        )
    if saved is None:
        raise RuntimeError(f"{fqn!r} is missing in the checkpoint")
    different = [field for field in own if saved.get(field) != own[field]]
    if different:
        has, wants = ({field: d.get(field) for field in different} for d in (saved, own))
        raise ValueError(
            f"{fqn!r}: the checkpoint holds {has}, and the state dict {wants}; make the tensor as it was saved, load "
            "it, and convert it then"
        )
    return saved


def _read(fqn: str, part: Part, saved: Mapping[str, Any], metadata: Any) -> dict[str, Chunk]:
    """The entries that this process reads, and where to."""
    entries = metadata.state_dict_metadata
    if saved["pieces"] is not None:
        region = part.region()
        chunks = {
            _entry(fqn, name, region): Chunk(b, (0,) * b.dim(), tuple(b.shape))
            for name, b in part.tensor.buffers().items()
        }
        if any(entry not in entries for entry in chunks):
            raise ValueError(
                f"{fqn!r}: the part {region} was not saved as such, and no other one will do: {saved['pieces']}; load "
                "it with the placements it was saved with"
            )
    else:
        try:
            chunks = {_entry(fqn, name): chunk for name, chunk in part.chunks().items()}
        except Cut as error:
            raise ValueError(f"{fqn!r}: the part {part.region()} cannot be loaded: {error}") from error
    for entry, chunk in chunks.items():
        held = entries.get(entry)
        wanted = (tuple(chunk.size), chunk.buffer.dtype)
        has = (tuple(held.size), held.properties.dtype) if isinstance(held, TensorStorageMetadata) else None
        if has != wanted:
            raise ValueError(f"{entry!r} must be {wanted} in the checkpoint, got {has or 'no tensor'}")
    return chunks


def _own_key(container: Any, key: Any) -> Any:
    """The key of `container` that the path of an entry spells `key`."""
    return key if isinstance(container, list) else next((k for k in container if str(k) == key), key)
