"""Read tensors from .npz and .safetensors files, neither of which can execute code."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hop import storage


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package that reads this format is not installed.
        ValueError: the file has another format, or contains something other than numbers.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: data must be in a {' or '.join(_READERS)} file, got {path.suffix or 'no suffix'}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return reader(path)


def _npz(path: Path) -> Mapping[str, Tensor]:
    try:
        from hop.export.golden.files.hop_vectors import arrays
    except ImportError as error:
        raise ImportError(f"{path}: reading .npz needs numpy: pip install numpy, or use .safetensors") from error
    try:
        return {name: torch.from_numpy(array) for name, array in arrays(path, compressed=True).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a .npz file of numeric arrays: {error}") from error


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ImportError(
            f"{path}: reading .safetensors needs safetensors: pip install 'torch-hop[safetensors]'"
        ) from error
    try:
        return storage.load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


_READERS: dict[str, Callable[[Path], Mapping[str, Tensor]]] = {".npz": _npz, ".safetensors": _safetensors}
