"""Quantized tensors in safetensors files: the buffers as tensors, and what they are in the file's metadata.

Needs the package `safetensors`: pip install 'torch-hop[safetensors]'. Nothing in a file is run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop import spelling
from hop.proto import TensorProto
from hop.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_KEY = "hop"


def save_file(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`, plain and quantized, such as a module's state_dict.

    A quantized tensor `name` becomes the tensors "name:codes", "name:scale" and so on, and an entry of the metadata
    with its shape, dtype, usages and the quantizer's spelling.

    Raises ValueError for a name that a buffer's name would collide with."""
    flat: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = {name: tensor}
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
    _safetensors().save_file(flat, str(path), {**(metadata or {}), _KEY: json.dumps(described)})


def load_file(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors that `save_file` wrote, on `device`. A file without quantized tensors is read as it is.

    Raises ValueError if the buffers are not what the metadata describes."""
    package = _safetensors()
    with package.safe_open(str(path), "pt", device=str(device)) as file:
        described = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    found: dict[str, Tensor] = {}
    for name, entry in described.items():
        try:
            proto = TensorProto(
                tuple(entry["shape"]),
                spelling.dtype(entry["dtype"]),
                device,
                quantizer=Quantizer.parse(entry["quantizer"]),
                usages=tuple(entry["usages"]),
            )
            found[name] = proto.create_tensor([flat.pop(f"{name}:{b.name}") for b in proto.buffers()])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"load_file: {path} does not hold what its metadata says of {name!r}: {error!r}"
            ) from error
    return {**flat, **found}


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("hop.storage needs the package safetensors: pip install 'torch-hop[safetensors]'") from error
    return _Package(safetensors.safe_open, safetensors.torch.save_file)


class _Package:
    def __init__(self, safe_open: Any, save_file: Any) -> None:
        self.safe_open, self.save_file = safe_open, save_file
