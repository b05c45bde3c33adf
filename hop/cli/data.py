"""Tensors from files that hold numbers alone: nothing in them is run."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hop import storage


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file, by their names.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package that reads it is not installed.
        ValueError: it is a file of another kind, or holds something else than numbers.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: data are read from {' and '.join(_READERS)}, and not from {path.suffix or 'others'}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return reader(path)


def _npz(path: Path) -> Mapping[str, Tensor]:
    try:
        from hop.export.golden.files.hop_vectors import arrays
    except ImportError as error:
        raise ImportError(f"{path}: arrays of numpy need numpy: pip install numpy, or use .safetensors") from error
    try:
        return {name: torch.from_numpy(array) for name, array in arrays(path, compressed=True).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of numpy's arrays of numbers: {error}") from error


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ImportError(f"{path}: its format needs safetensors: pip install 'torch-hop[safetensors]'") from error
    try:
        return storage.load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of safetensors: {error}") from error


_READERS: dict[str, Callable[[Path], Mapping[str, Tensor]]] = {".npz": _npz, ".safetensors": _safetensors}
