"""The planner of a save, which writes each buffer of a quantized tensor as a separate entry."""

import ctypes
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hop.checkpoint.entries import KEY, describe, entry_name, split_state_dict
from hop.checkpoint.shards import Chunk, Part
from hop.compat.pytree import StateDict
from hop.numerics.spelling import JsonObject
from hop.tensor.table import IndivisibleError


class _Record(NamedTuple):
    """A process's description, for the coordinator, of its part of a quantized tensor."""

    description: JsonObject
    path: tuple[object, ...]
    region: str
    buffers: tuple[str, ...]
    cut: str | None  # the reason if the part is not a range of the whole tensor's buffers
    digests: dict[tuple[str, tuple[int, ...]], str]  # by buffer and offsets, of ranges shared with other parts


class SavePlanner(DefaultSavePlanner):
    """A planner for dcp.save of state dicts with plain and quantized tensors and DTensors.

    Args:
        dedup_save_to_lowest_rank: see DefaultSavePlanner.

    Errors come from dcp.save, inside its CheckpointException.

    Raises:
        ValueError: two entries have the same name; a DTensor has partial sums; processes disagree on a tensor's
            quantizer; or torch.load(weights_only=True) could not read a value back.
    """

    def __init__(self, dedup_save_to_lowest_rank: bool = False) -> None:
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if KEY in self.mappings:
            raise ValueError(f"state_dict: the name {KEY!r} is reserved by the library; rename that entry")
        self.state_dict, self.parts = split_state_dict(self.state_dict)
        self.buffers: dict[str, Tensor] = {}
        for fqn, part in self.parts.items():
            for name, buffer in part.tensor.buffers().items():
                entry = entry_name(fqn, name)
                if entry in self.state_dict or entry in self.buffers:
                    raise ValueError(f"state_dict: {entry!r} is a buffer of {fqn!r} and another entry; rename one")
                self.buffers[entry] = self.buffers[entry_name(fqn, name, part.region())] = buffer.detach()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        records, items = {}, list(plan.items)
        for fqn, part in self.parts.items():
            if not part.is_empty():
                records[fqn], own = _write(fqn, part, self.mappings[fqn])
                items += own
        paths = {fqn: path for fqn, path in self.mappings.items() if fqn not in self.parts}
        return dataclasses.replace(plan, items=items, planner_data={**paths, KEY: records})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        records: dict[str, list[_Record]] = {}
        for plan in all_plans:
            for fqn, record in plan.planner_data[KEY].items():
                records.setdefault(fqn, []).append(record)
        described = {fqn: _merge_records(fqn, own) for fqn, own in records.items()}
        plans = [_with_pieces(plan, described) for plan in all_plans]
        plans[0].planner_data[KEY] = described
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> object:
        return self.buffers[index.fqn] if index.fqn in self.buffers else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: object) -> object:
        result = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                torch.load(io.BytesIO(result.getbuffer()), weights_only=True)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"state_dict: {write_item.index.fqn!r} holds {type(object).__name__}, which could not be loaded "
                    f"again: {error}"
                ) from error
        return result


def _write(fqn: str, part: Part, path: tuple[object, ...]) -> tuple[_Record, list[WriteItem]]:
    buffers, cut = part.tensor.buffers(), None
    try:
        chunks = part.chunks()
    except IndivisibleError as reason:  # the coordinator will save all parts of this tensor as pieces
        chunks, cut = {name: Chunk(b, (0,) * b.dim(), tuple(b.shape)) for name, b in buffers.items()}, str(reason)
    digests = {(name, c.offsets): _digest(c.buffer) for name, c in chunks.items() if c.is_shared}
    items = [
        _item(entry_name(fqn, name), c.offsets, c.size, c.buffer.shape, TensorProperties.create_from_tensor(c.buffer))
        for name, c in chunks.items()
    ]
    return _Record(describe(part), path, part.region(), tuple(buffers), cut, digests), items


def _item(
    entry: str, offsets: Sequence[int], size: Sequence[int], sizes: Sequence[int], properties: TensorProperties
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, dataclasses.replace(properties, requires_grad=False), torch.Size(size))
    return WriteItem(MetadataIndex(entry, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _digest(buffer: Tensor) -> str:
    data = buffer.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()


def _merge_records(fqn: str, records: list[_Record]) -> JsonObject:
    """The checkpoint's description of a quantized tensor, from the records of all processes."""
    first = records[0].description
    other = next((r.description for r in records if r.description != first), None)
    if other is not None:
        raise ValueError(f"state_dict: {fqn!r} must be quantized alike in all processes; got {first} and {other}")
    pieces = next((r.cut for r in records if r.cut is not None), None)
    owners: dict[object, str] = {}
    for (name, offsets), digest in (item for r in records for item in r.digests.items()):
        if owners.setdefault((name, offsets), digest) != digest and pieces is None:
            pieces = f"its {name} is shared along a whole dimension, but the parts had different ones"
    return {**first, "pieces": pieces}


def _with_pieces(plan: SavePlan, described: Mapping[str, JsonObject]) -> SavePlan:
    """The plan of one process, with the entries of tensors in pieces renamed."""
    paths = dict(plan.planner_data)
    renamed: dict[str, str] = {}
    for fqn, record in paths.pop(KEY).items():
        in_pieces = described[fqn]["pieces"] is not None
        for name in record.buffers:
            entry = entry_name(fqn, name, record.region if in_pieces else None)
            paths[entry] = (*record.path, entry.removeprefix(f"{fqn}."))
            if in_pieces:
                renamed[entry_name(fqn, name)] = entry
    items = [_as_piece(item, renamed[item.index.fqn]) if item.index.fqn in renamed else item for item in plan.items]
    return dataclasses.replace(plan, items=items, planner_data=paths)


def _as_piece(item: WriteItem, entry: str) -> WriteItem:
    data = item.tensor_data
    assert data is not None  # set for every item that has an index of a buffer
    sizes = data.chunk.sizes
    return _item(entry, (0,) * len(sizes), sizes, sizes, data.properties)
