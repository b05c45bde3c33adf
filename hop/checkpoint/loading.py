"""The planner of a load, which checks everything against the state dict's tensors before the first byte is read."""

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hop.checkpoint import regroup
from hop.checkpoint.entries import KEY, describe, entry_name, regions, split_state_dict
from hop.checkpoint.shards import Chunk, Part
from hop.compat import dtensor
from hop.compat.pytree import StateDict
from hop.numerics.spelling import JsonObject
from hop.tensor.table import IndivisibleError


class LoadPlanner(DefaultLoadPlanner):
    """A planner for dcp.load of checkpoints that SavePlanner, or DCP's own planner, wrote.

    Codes and scales are read as they were saved, with one exception: if a tensor's blocks run over each part separately
    (Quantizer.flat, used by optimizer states) and the new boundaries cut the saved blocks, its values are quantized
    again in blocks over each new part (hop.checkpoint.regroup).

    Args:
        allow_partial_load: whether to leave entries that the checkpoint lacks, and empty containers, unchanged.

    Errors come from dcp.load, inside its CheckpointException, before anything is written.

    Raises:
        ValueError: an entry's quantizer, shape, dtype or usages differ from its tensor's; only one of the two is
            quantized; shard boundaries cut a block or a byte of a tensor that is not flat; entries do not cover a
            tensor; or a dict or a list is empty although the checkpoint has entries for it.
        RuntimeError: an entry is missing.
    """

    def __init__(self, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)

    def set_up_planner(
        self, state_dict: StateDict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None  # the reader always has them
        if not self.allow_partial_load:
            _check_empty(state_dict, metadata.state_dict_metadata)
        self.state_dict, parts = split_state_dict(self.state_dict)
        described: Mapping[str, JsonObject] = (metadata.planner_data or {}).get(KEY, {})
        self.chunks: dict[str, Chunk] = {}
        self.regrouped: dict[str, regroup.Regrouped] = {}  # by entry
        pieces = regions(metadata.state_dict_metadata)
        for fqn, value in self.state_dict.items():
            if fqn in described:
                raise ValueError(
                    f"{fqn!r}: the checkpoint holds it quantized by {described[fqn]['quantizer']}, but it is plain in "
                    "the state dict; quantize the model in the same way before loading"
                )
            _check_plain(fqn, value, metadata.state_dict_metadata.get(fqn))
        for fqn, part in parts.items():
            if fqn not in described and self.allow_partial_load and fqn not in metadata.state_dict_metadata:
                continue
            saved = _matching_description(fqn, part, described.get(fqn), metadata)
            if part.is_empty():
                continue
            if part.tensor.quantizer.flat and not _fits(fqn, part, saved, metadata):
                own = regroup.Regrouped(fqn, part, pieces.get(entry_name(fqn, "codes")) if saved["pieces"] else None)
                self.regrouped |= dict.fromkeys(own.by_entry, own)
                self.chunks |= _checked_sizes(own.chunks(), metadata)
            else:
                self.chunks |= _chunks_to_read(fqn, part, saved, metadata)

    def create_local_plan(self) -> LoadPlan:
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
                wanted[fqn] = (dtensor.local_range(value)[0] if dtensor.is_dtensor(value) else value).numel()
        for fqn, count in wanted.items():
            if read.get(fqn, 0) != count:
                raise ValueError(f"{fqn!r}: the checkpoint holds {read.get(fqn, 0)} of the {count} elements of it here")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # like DCP's planner, except that it unpickles anything and turns integer keys of dicts into strings
        *path, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in path:
            container = container[_original_key(container, key)]
        container[_original_key(container, last)] = torch.load(value, weights_only=True)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        entry = read_item.dest_index.fqn
        if entry in self.regrouped:
            self.regrouped[entry].commit(entry, tensor.numel())

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self.regrouped:
            return self.regrouped[index.fqn].buffer(index.fqn)
        chunk = self.chunks.get(index.fqn)
        return super().lookup_tensor(index) if chunk is None else chunk.buffer.detach()


def _check_empty(container: object, entries: Mapping[str, object], path: tuple[object, ...] = ()) -> None:
    """Raise ValueError for an empty container that the checkpoint has entries for, such as the states of a fresh
    optimizer.
    """
    if not isinstance(container, dict | list):
        return
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        _check_empty(value, entries, (*path, key))
    start = "".join(f"{key}." for key in path)
    saved = [] if container else [name for name in entries if name.startswith(start)]
    if saved:
        raise ValueError(
            f"{'.'.join(map(str, path)) or 'state_dict'!r} is empty, and the checkpoint has {len(saved)} entries for "
            f"it, such as {saved[0]!r}; fill it first, as torch.distributed.checkpoint.state_dict.get_state_dict does "
            "with the states of an optimizer that has made no step"
        )


def _check_plain(fqn: str, value: object, saved: TensorStorageMetadata | BytesStorageMetadata | None) -> None:
    if not isinstance(value, Tensor) or saved is None:  # DCP's planner checks these
        return
    if isinstance(saved, BytesStorageMetadata):
        raise ValueError(f"{fqn!r}: the checkpoint holds no tensor, but the state dict has one of shape {value.shape}")
    if saved.properties.dtype != value.dtype:
        raise ValueError(
            f"{fqn!r}: the checkpoint holds {saved.properties.dtype}, but the state dict {value.dtype}; convert one to "
            "the dtype of the other, since loading does not round"
        )


def _matching_description(fqn: str, part: Part, saved: JsonObject | None, metadata: Metadata) -> JsonObject:
    """The checkpoint's description of a quantized tensor. Raises if it does not match the tensor."""
    described = describe(part)
    if saved is None and fqn in metadata.state_dict_metadata:
        raise ValueError(
            f"{fqn!r}: the checkpoint holds it plain, but it is quantized by {described['quantizer']} in the state "
            "dict; load it into a plain tensor, then quantize that"
        )
    if saved is None:
        raise RuntimeError(f"{fqn!r} is missing in the checkpoint")
    different = [field for field in described if saved.get(field) != described[field]]
    if different:
        has, wants = ({field: d.get(field) for field in different} for d in (saved, described))
        raise ValueError(
            f"{fqn!r}: the checkpoint holds {has}, but the state dict {wants}; create the tensor as it was saved, load "
            "it, then convert it"
        )
    return saved


def _fits(fqn: str, part: Part, saved: Mapping[str, object], metadata: Metadata) -> bool:
    """Whether the checkpoint has the codes of exactly this part."""
    if saved["pieces"] is not None:
        return entry_name(fqn, "codes", part.region()) in metadata.state_dict_metadata
    try:
        part.chunks()
    except IndivisibleError:
        return False
    return True


def _chunks_to_read(fqn: str, part: Part, saved: Mapping[str, object], metadata: Metadata) -> dict[str, Chunk]:
    """The entries that this process reads, and the buffers to read them into."""
    entries = metadata.state_dict_metadata
    if saved["pieces"] is not None:
        region = part.region()
        chunks = {
            entry_name(fqn, name, region): Chunk(b, (0,) * b.dim(), tuple(b.shape))
            for name, b in part.tensor.buffers().items()
        }
        if any(entry not in entries for entry in chunks):
            raise ValueError(
                f"{fqn!r}: the part {region} was not saved as one piece, and pieces cannot be cut: {saved['pieces']}; "
                "load it with the placements it was saved with"
            )
    else:
        try:
            chunks = {entry_name(fqn, name): chunk for name, chunk in part.chunks().items()}
        except IndivisibleError as error:
            raise ValueError(f"{fqn!r}: the part {part.region()} cannot be loaded: {error}") from error
    return _checked_sizes(chunks, metadata)


def _checked_sizes(chunks: Mapping[str, Chunk], metadata: Metadata) -> dict[str, Chunk]:
    for entry, chunk in chunks.items():
        saved = metadata.state_dict_metadata.get(entry)
        wanted = (tuple(chunk.size), chunk.buffer.dtype)
        has = (tuple(saved.size), saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None
        if has != wanted:
            raise ValueError(f"{entry!r} must be {wanted} in the checkpoint, got {has or 'no tensor'}")
    return dict(chunks)


def _original_key(container: Mapping[object, object] | list[object], key: object) -> object:
    """The key of `container` whose text is `key`."""
    return key if isinstance(container, list) else next((k for k in container if str(k) == key), key)
