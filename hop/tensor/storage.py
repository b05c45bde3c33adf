"""Save quantized tensors in safetensors files: buffers as tensors, and their description in the metadata.

    "name:codes", "name:scale", ...   the buffers of the quantized tensor "name"
    metadata["hop"]                   JSON: {"name": {"quantizer": ..., "shape": ..., "dtype": ..., "usages": ...}}

Reading a file runs no code from it. Limits: tensors are loaded contiguous and without requires_grad, and Parameters as
tensors. Two names may not share memory, not even a scale: clone one of them, or leave it out and tie it again after
loading.

Requires the package `safetensors`: pip install 'torch-hop[safetensors]'.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hop.compat.files import move, named, temporary_folder
from hop.numerics import spelling
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import from_json, shown
from hop.tensor import QuantizedTensor
from hop.tensor.proto import TensorProto

if TYPE_CHECKING:
    from safetensors import safe_open

__all__ = ["load_file", "save_file"]

_KEY = "hop"
_MOST_DIMENSIONS = 64  # PyTorch's limit


def save_file(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write plain and quantized tensors, such as a module's state_dict, and optional `metadata` to a file.

    Raises:
        ValueError: a name collides with a buffer's name, or `metadata` has the key "hop".
        RuntimeError: tensors share memory (raised by safetensors, with their names).
    """
    if _KEY in (metadata or {}):
        raise ValueError(f"save_file: the key {_KEY!r} of the metadata is reserved; rename it")
    if not all(isinstance(text, str) for pair in (metadata or {}).items() for text in pair):
        raise TypeError(
            f"save_file: metadata must be a mapping from text to text, got {shown(metadata)}; give one such as "
            "{'version': '1'}"
        )
    file = _checked_path("save_file", path)
    flat, described = flattened(tensors)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"save_file: path must be in an existing folder, got {path}; create the folder first")
    safetensors = _safetensors()
    with temporary_folder(file.parent) as folder:
        try:
            safetensors.torch.save_file(flat, str(folder / file.name), {**(metadata or {}), **described})
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise named(OSError(int(number[1]), ""), file) from error
        move(folder / file.name, file)


def flattened(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The contents of a file: plain tensors, including the buffers of quantized ones, and metadata that describes
    these.

    Raises as `save_file` does.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"save_file: tensors must be a mapping from names to tensors, got {shown(tensors)}; give one such as "
            "model.state_dict()"
        )
    flat: dict[str, Tensor] = {}
    described: dict[str, object] = {}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
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
                raise ValueError(f"save_file: tensors: two tensors would be called {key!r}; rename {name!r}")
            flat[key] = data.detach().contiguous()
    return flat, {_KEY: json.dumps(described)}


def _checked_path(caller: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{caller}: path must be text or a pathlib.Path, got {shown(path)}; give one such as 'model.safetensors'"
        )
    return Path(cast("str | os.PathLike[str]", path))


def _check_tensor(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"save_file: names must be text in tensors, got {name!r}; rename it")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"save_file: tensors[{name!r}] must be a tensor, got {shown(tensor)}; make one with torch.tensor"
        )
    if tensor.is_meta:
        raise ValueError(f"save_file: tensors[{name!r}] must have data, got {shown(tensor)}; load it first")


def load_file(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read the tensors that `save_file` wrote, to `device`. Files without quantized tensors are read too.

    Raises:
        ValueError: the file does not match its metadata.
    """
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"load_file: device must be one that PyTorch knows, got {device!r}; give one such as 'cuda'"
        ) from error
    safetensors = _safetensors()
    if not _checked_path("load_file", path).is_file():
        raise FileNotFoundError(
            f"load_file: path must be an existing file, got {path}; save one with hop.storage.save_file"
        )
    try:
        with safetensors.safe_open(str(path), "pt", device=str(device)) as file:
            metadata: dict[str, str] = file.metadata() or {}
            text = metadata.get(_KEY, "{}")
            flat = {key: read_tensor(file, key, f"load_file: {path}") for key in file.keys()}  # noqa: SIM118  no mapping
    except safetensors.SafetensorError as error:
        raise ValueError(f"load_file: {path} is not a complete safetensors file: {shown(error)}") from error
    quantized: dict[str, Tensor] = {}
    for name, entry in from_json(text, f"load_file: {path}: its metadata").items():
        try:
            quantized[name] = _built(name, entry, flat, device)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"load_file: {path}: {shown(name)} does not match the metadata: {error}") from error
    return {**flat, **quantized}


def read_tensor(file: "safe_open", name: str, where: str) -> Tensor:
    """Read a tensor of an open safetensors file. Raises ValueError, prefixed by `where`, for unsupported shapes."""
    shape = file.get_slice(name).get_shape()
    if len(shape) > _MOST_DIMENSIONS or max(shape, default=0) >= 2**63:
        raise ValueError(
            f"{where}: tensor {shown(name)} has shape {shown(shape)}; PyTorch supports up to {_MOST_DIMENSIONS} sizes, "
            "each below 2^63"
        )
    try:
        return file.get_tensor(name)
    except _safetensors().SafetensorError as error:
        raise ValueError(f"{where}: tensor {shown(name)} cannot be read: {shown(error)}") from error


def _built(name: str, entry: object, flat: dict[str, Tensor], device: str | torch.device) -> Tensor:
    """The tensor that `entry` describes; removes its buffers from `flat`."""
    fields = {"quantizer", "shape", "dtype", "usages"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise ValueError(f"its entry must have the fields {sorted(fields)}, got {shown(entry)}")
    shape = entry["shape"]
    sizes: list[int] = shape if isinstance(shape, list) else [-1]
    if len(sizes) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"shape must be a list of sizes, at most {_MOST_DIMENSIONS}, got {shown(shape)}")
    proto = TensorProto(
        tuple(sizes),
        spelling.dtype(entry["dtype"]),
        device,
        quantizer=Quantizer.parse(entry["quantizer"]),
        usages=tuple(entry["usages"]),
    )
    keys = [f"{name}:{b.name}" for b in proto.buffers()]
    missing = [key for key in keys if key not in flat]
    if missing or name in flat:
        raise ValueError(f"the file lacks {shown(missing)}" if missing else "the file has a plain tensor of that name")
    return proto.create_tensor([flat.pop(key) for key in keys])


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch  # pyright: ignore[reportUnusedImport]  it becomes an attribute
    except ImportError as error:
        raise ImportError("hop.storage needs the package safetensors: pip install 'torch-hop[safetensors]'") from error
    return safetensors
