"""Read the tensors of a file that torch.save wrote, such as llm-awq's, with the interface of safetensors.

Unpickling is limited to tensors and plain containers (weights_only), and storages are mapped from the file. The result
is checked: plain contiguous tensors, each no larger than the file.
"""

import zipfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hop.interchange.safetensors_files import NAMES
from hop.numerics.spelling import shown

SUFFIXES = (".pt", ".pth")


class TorchFile:
    """The tensors of a file by name, as safetensors.safe_open has them."""

    def __init__(self, path: Path) -> None:
        self._tensors = _read(path)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> "TorchSlice":
        """The shape and dtype of a tensor."""
        return TorchSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, whose memory is a private copy-on-write mapping of the file."""
        return self._tensors[name]

    def metadata(self) -> None:
        """None: these files have no metadata."""


class TorchSlice:
    """The shape and dtype of a tensor, in the names of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """The sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The name of the dtype in safetensors."""
        return NAMES[self._tensor.dtype]


def _read(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a complete file of torch.save in its format since PyTorch 1.6; save it again")
    try:
        state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # the unpickler raises many classes for damaged files
        raise ValueError(
            f"{path} cannot be read with torch.load(weights_only=True), which takes tensors by name alone: "
            f"{shown(str(error))}"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} must have a dict of tensors by name, got {shown(type(state).__name__)}")
    size = path.stat().st_size
    for name, tensor in state.items():
        _check(path, name, tensor, size)
    return {name: tensor.detach() for name, tensor in cast("dict[str, Tensor]", state).items()}


def _check(path: Path, name: object, tensor: Any, size: int) -> None:
    """Raise ValueError for anything but a plain tensor with memory of the file."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    if not isinstance(name, str) or not is_plain or tensor.dtype not in NAMES:
        raise ValueError(f"{path}: {shown(name)} must name a plain tensor, got {shown(tensor)}")
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() > size:
        raise ValueError(
            f"{path}: tensor {shown(name)} of shape {shown(tuple(tensor.shape))} and stride "
            f"{shown(tuple(tensor.stride()))} must be contiguous and within the file; save it again"
        )
