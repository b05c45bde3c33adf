"""Check paths of input files, and access the memory of tensors to write."""

import os
from pathlib import Path
from typing import cast

from torch import Tensor

from hop.numerics.spelling import shown


def checked_path(caller: str, path: object, example: str, folders: bool = True) -> Path:
    """Return an existing file, or with `folders` also a folder, as a Path.

    Raises:
        TypeError: `path` is not a path.
        FileNotFoundError: nothing exists there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{caller}: path must be text or a Path, got {shown(path)}; give one such as {example!r}")
    place = Path(cast("str | os.PathLike[str]", path))
    if not (place.exists() if folders else place.is_file()):
        kind = "file or folder" if folders else "file"
        raise FileNotFoundError(f"{caller}: path must be an existing {kind}, got {str(path)!r}; download it first")
    return place


def memory_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array = data.numpy()
    return memoryview(array)  # type: ignore[arg-type]
