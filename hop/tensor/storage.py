"""Quantized tensors in safetensors files: the buffers as tensors, and what they are in the file's metadata.

    "name:codes", "name:scale", ...    the buffers of the quantized tensor "name"
    metadata["hop"]                    JSON: {"name": {"quantizer": ..., "shape": ..., "dtype": ..., "usages": ...}}

Nothing in a file is run. Limits: a tensor comes back contiguous and without requires_grad, a Parameter as a tensor; two
names may not share memory, not even a scale, so clone one of them or leave it out and tie it again after loading.

Needs the package `safetensors`: pip install 'torch-hop[safetensors]'.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hop.numerics import spelling
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor
from hop.tensor.proto import TensorProto

_KEY = "hop"


def save_file(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`, plain and quantized, such as a module's state_dict, and `metadata` of your own.

    Raises:
        ValueError: a name that a buffer's name collides with, or the key "hop" in `metadata`.
        RuntimeError: tensors that share memory; from safetensors, with their names.
    """
    if _KEY in (metadata or {}):
        raise ValueError(f"save_file: the key {_KEY!r} of the metadata is taken by the library")
    flat, described = flattened(tensors)
    _safetensors().torch.save_file(flat, str(path), {**(metadata or {}), **described})


def flattened(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a file holds: plain tensors, among them the buffers of quantized ones, and the metadata that describe these.

    Raises as `save_file`."""
    flat: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"save_file: tensors[{name!r}] must be a Tensor, got {type(tensor).__name__}")
        parts: dict[str, Tensor] = {name: tensor}
        if isinstance(tensor, QuantizedTensor):
            parts = {f"{name}:{buffer}": data for buffer, data in tensor.buffers().items()}
            described[name] = {
                "quantizer": str(tensor.quantizer),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "usages": list(tensor.usages),
            }
        for key, data in parts.items():
            if key in flat:
                raise ValueError(f"save_file: two tensors would be called {key!r}; rename {name!r}")
            flat[key] = data.detach().contiguous()
    return flat, {_KEY: json.dumps(described)}


def load_file(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors that `save_file` wrote, on `device`. A file without quantized tensors is read as it is.

    Raises:
        ValueError: the file does not hold what its metadata describes.
    """
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(str(path), "pt", device=str(device)) as file:
            held: dict[str, str] = file.metadata() or {}
            text = held.get(_KEY, "{}")
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    except safetensors.SafetensorError as error:
        raise ValueError(f"load_file: {path} is no whole file of safetensors: {error}") from error
    try:
        described: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load_file: {path}: its metadata is no JSON: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"load_file: {path}: its metadata is no JSON object")
    found: dict[str, Tensor] = {}
    for name, entry in cast(dict[str, Any], described).items():
        try:
            found[name] = _built(name, entry, flat, device)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"load_file: {path}: {name!r} is not what the metadata says: {error}") from error
    return {**flat, **found}


def _built(name: str, entry: Any, flat: dict[str, Tensor], device: str | torch.device) -> Any:
    """The tensor that `entry` describes, of buffers that are taken out of `flat`."""
    fields = {"quantizer", "shape", "dtype", "usages"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise ValueError(f"its entry must have the fields {sorted(fields)}, got {entry!r}")
    entry = cast(dict[str, Any], entry)
    shape: Any = entry["shape"]
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in cast(list[Any], shape)):
        raise ValueError(f"shape must be a list of sizes, got {shape!r}")
    proto = TensorProto(
        tuple(cast(list[int], shape)),
        spelling.dtype(entry["dtype"]),
        device,
        quantizer=Quantizer.parse(entry["quantizer"]),
        usages=tuple(entry["usages"]),
    )
    keys = [f"{name}:{b.name}" for b in proto.buffers()]
    missing = [key for key in keys if key not in flat]
    if missing or name in flat:
        raise ValueError(f"the file lacks {missing}" if missing else "the file has a plain tensor of that name")
    return proto.create_tensor([flat.pop(key) for key in keys])


def _safetensors() -> Any:
    try:
        import safetensors.torch  # pyright: ignore[reportUnusedImport]  it becomes an attribute
    except ImportError as error:
        raise ImportError("hop.storage needs the package safetensors: pip install 'torch-hop[safetensors]'") from error
    return safetensors
