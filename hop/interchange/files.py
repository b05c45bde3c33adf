"""Files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor


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
