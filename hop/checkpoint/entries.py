"""Entries of a checkpoint: what DCP is to write and to read of quantized tensors.

A quantized tensor is taken apart into its buffers, which DCP writes, cuts and reads in place as any other tensor:

    "weight"  ->  "weight.codes", "weight.scale", ...      each of the shape that this buffer of the whole tensor has
              ->  "weight.codes[0:32,0:64]", ...           in pieces, if boundaries of shards cut a block

The checkpoint's metadata say of "weight" which quantizer, shape, dtype and usages it has, and why it is in pieces, if
it is; a piece is read by the shard with the same boundaries alone, or, where blocks run over each shard, by those that
quantize its numbers anew.
"""

from collections.abc import Mapping
from typing import Any

from hop.checkpoint.shards import Part, part_of
from hop.compat import dtensor

KEY = "hop.quantized"
"""Where Metadata.planner_data says it, beside the paths of entries."""


def taken_apart(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
    """The plain entries of a flat state dict, and this process's parts of the quantized ones."""
    plain: dict[str, Any] = {}
    parts: dict[str, Part] = {}
    for fqn, value in state_dict.items():
        if dtensor.is_dtensor(value) and not dtensor.is_on_mesh(value):
            continue  # of other processes
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
    """The entry of a buffer, or of a piece of it."""
    return f"{fqn}.{name}" if region is None else f"{fqn}.{name}[{region}]"


def regions(entries: Mapping[str, Any]) -> dict[str, list[str]]:
    """The regions of all pieces in a checkpoint, by the name of the entry before them."""
    result: dict[str, list[str]] = {}
    for entry in entries:
        if entry.endswith("]"):
            name, region = entry[:-1].rsplit("[", 1)
            result.setdefault(name, []).append(region)
    return result


def ranges_of(region: str) -> tuple[tuple[int, int], ...]:
    """Where the region of a piece begins and ends, along each dimension."""
    pairs = (part.split(":") for part in region.split(","))
    return tuple((int(start), int(end)) for start, end in pairs)


def describe(part: Part) -> dict[str, Any]:
    """What the metadata say of the tensor that `part` is of."""
    t = part.tensor
    return {
        "quantizer": str(t.quantizer),
        "shape": part.shape,
        "dtype": str(t.dtype),
        "usages": t.usages,
    }
