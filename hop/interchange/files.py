"""Paths to files that are read, and files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

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


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write: beside its place, as `path`.part, until the block is left; then on disk, and in its place.

    Where an exception leaves the block, what was written goes, and what was in its place stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _keep_names(path.parent)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """All of the data: a file without a buffer may take less at once."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(view):
        view = view[file.write(view) :]


def view_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array = data.numpy()
    return memoryview(array)  # type: ignore[arg-type]


def _keep_names(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
