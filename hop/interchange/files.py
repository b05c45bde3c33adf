"""Paths to files that are read, and the memory of tensors that are written."""

import os
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from hop.numerics.spelling import shown


def checked_path(caller: str, path: Any, example: str, folders: bool = True) -> Path:
    """A path to a file that is there, or with `folders` a folder.

    Raises:
        TypeError: it is no path.
        FileNotFoundError: nothing is there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{caller}: path must be text or a Path, got {shown(path)}; give one such as {example!r}")
    place = Path(cast("str | os.PathLike[str]", path))
    if not (place.exists() if folders else place.is_file()):
        kind = "file or folder" if folders else "file"
        raise FileNotFoundError(f"{caller}: path must be a {kind} that is there, got {str(path)!r}; download it first")
    return place


def view_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array = data.numpy()
    return memoryview(array)  # type: ignore[arg-type]
