"""Entries of a checkpoint: how quantized tensors are split into the plain tensors that DCP writes and reads.

DCP writes, shards and reads each buffer of a quantized tensor as any other tensor:

    "weight"  ->  "weight.codes", "weight.scale", ...      with the shape of the whole tensor's buffer
              ->  "weight.codes[0:32,0:64]", ...           in pieces, if shard boundaries cut a block

The checkpoint's metadata record the quantizer, shape, dtype and usages of "weight", and the reason if it is in pieces.
A piece can only be read by a shard with the same boundaries or, if blocks run over each shard separately, by shards
that quantize its values again.
"""

from collections.abc import Mapping

from hop.checkpoint.shards import Part, part_of
from hop.compat import dtensor
from hop.compat.pytree import StateDict
from hop.numerics.spelling import JsonObject

KEY = "hop.quantized"
"""The key of these descriptions in Metadata.planner_data, which also has the paths of entries."""


def split_state_dict(state_dict: Mapping[str, object]) -> tuple[StateDict, dict[str, Part]]:
    """Split a flat state dict into plain entries and this process's parts of quantized tensors."""
    plain: dict[str, object] = {}
    parts: dict[str, Part] = {}
    for fqn, value in state_dict.items():
        if dtensor.is_dtensor(value) and not dtensor.is_on_mesh(value):
            continue  # belongs to other processes
        try:
            part = part_of(value)
        except ValueError as error:
            raise ValueError(f"state_dict: {fqn!r}: {error}") from error
        if part is None:
            plain[fqn] = value
        else:
            parts[fqn] = part
    return plain, parts


def entry_name(fqn: str, name: str, region: str | None = None) -> str:
    """The entry name of a buffer, or of a piece of it."""
    return f"{fqn}.{name}" if region is None else f"{fqn}.{name}[{region}]"


def regions(entries: Mapping[str, object]) -> dict[str, list[str]]:
    """The regions of all pieces in a checkpoint, by entry name."""
    result: dict[str, list[str]] = {}
    for entry in entries:
        if entry.endswith("]"):
            name, region = entry[:-1].rsplit("[", 1)
            result.setdefault(name, []).append(region)
    return result


def parse_region(region: str) -> tuple[tuple[int, int], ...]:
    """Parse the region of a piece into (start, end) per dimension."""
    pairs = (part.split(":") for part in region.split(","))
    return tuple((int(start), int(end)) for start, end in pairs)


def describe(part: Part) -> JsonObject:
    """The metadata of a quantized tensor."""
    t = part.tensor
    return {
        "quantizer": str(t.quantizer),
        "shape": part.shape,
        "dtype": str(t.dtype),
        "usages": t.usages,
    }
