"""The files of one checkpoint: written atomically with plain names, and listed in a manifest."""

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from hop.checkpoint.metadata import Files, StoredFile, read_metadata
from hop.compat.files import whole_file, write_whole
from hop.numerics.spelling import from_json

MANIFEST = "hop.json"
_METADATA = ".metadata"  # DCP's pickled metadata
_VERSION = 1
_NAME = re.compile(r"\.?\w[\w.-]*")


class Writer(dcp.FileSystemWriter):
    """Writes the files of a checkpoint to a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _FileSystem()

    @property
    def checkpoint_id(self) -> str:
        """The folder as a string: a pickled Path cannot be read across Python 3.13, which moved its class to another
        module.
        """
        return str(self.path)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint from a folder after verifying its files.

    Raises:
        pickle.UnpicklingError: the metadata are not DCP's.
        ValueError: an entry is in a file that is not among `files`.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        super().__init__(folder)
        self.fs = _FileSystem()
        self._folder, self._files = folder, files
        self._metadata = self._read_metadata()  # here, because DCP catches the exceptions of read_metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata

    def _read_metadata(self) -> Metadata:
        with opened(self._folder / _METADATA) as file:
            data = file.read(self._files[_METADATA]["bytes"] + 1)
        if hashlib.sha256(data).hexdigest() != self._files[_METADATA]["sha256"]:
            raise ValueError(f"{self._folder / _METADATA} has changed since it was verified; load again")
        try:
            return read_metadata(data, self._files)
        except ValueError as error:
            raise ValueError(f"{self._folder}: {error}") from error


class _FileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with whole_file(Path(path)) if mode == "wb" else opened(Path(path)) as file:
            yield file


@contextmanager
def opened(path: Path) -> Generator[io.BufferedReader, None, None]:
    """Open a regular file for reading, in binary mode.

    Raises:
        ValueError: the file is missing, a link, or not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path} must be a regular file, not a link or anything else; load another step")
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; load another step") from error
    with os.fdopen(descriptor, "rb") as file:
        yield file


# ---- the manifest


def write_manifest(folder: Path, files: Files) -> None:
    """Write the manifest of a checkpoint."""
    write_whole(folder / MANIFEST, json.dumps({"version": _VERSION, "files": files}, indent=1, sort_keys=True))


def read_manifest(folder: Path) -> dict[str, StoredFile]:
    """The files of a checkpoint.

    Raises:
        ValueError: the manifest is missing or damaged, or a file name in it contains a path.
    """
    path = folder / MANIFEST
    with opened(path) as file:
        manifest = from_json(file.read(), str(path))
    files = manifest.get("files") if manifest.get("version") == _VERSION else None
    if not _lists_files(files):
        raise ValueError(f"{path} is not a manifest of version {_VERSION}")
    for name in files:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{path}: files must have plain names, such as '__0_0.distcp', got {name[:100]!r}")
    return files


def _lists_files(files: object) -> TypeGuard[dict[str, StoredFile]]:
    return isinstance(files, dict) and _METADATA in files and all(map(_is_described, files.values()))


def _is_described(file: object) -> bool:
    return (
        isinstance(file, dict)
        and file.keys() == {"bytes", "sha256"}
        and type(file["bytes"]) is int
        and isinstance(file["sha256"], str)
    )


def file_digest(path: Path) -> StoredFile:
    """The size and the digest of a file."""
    sha256 = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(1 << 20):
            sha256.update(block)
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256.hexdigest()}


def verify(path: Path, saved: StoredFile) -> None:
    """Raise ValueError if a file differs from what was saved."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != saved["bytes"]:
        raise ValueError(f"{path}: {saved['bytes']} bytes were saved, but there are {size}; load another step")
    if file_digest(path) != saved:
        raise ValueError(f"{path}: its SHA-256 differs from that of the saved file; load another step")
