"""A file of JSON lines that a sweep appends each result to, so that an interrupted sweep can resume."""

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop.compat.files import lock, naming
from hop.compat.pytree import tree_leaves
from hop.export.analysis.arguments import Arguments
from hop.numerics.spelling import JsonObject, from_json

_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Journal:
    """The results of one sweep, as a context manager. `lines` are those already in the file; without a path, nothing is
    saved.

    The first line is a fingerprint of the measurement. A truncated last line is dropped. The file is locked until the
    journal is closed, where the file system supports locks, so that two sweeps cannot mix their lines.

    Raises:
        ValueError: the file is not a journal, its fingerprint differs, or another sweep is writing to it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path = None if path is None else Path(path)
        self.lines: list[JsonObject] = []
        self._stack = ExitStack()
        if self.path is None:
            return
        with naming(self.path):
            self._file = self._stack.enter_context(self.path.open("a+b", buffering=0))
        try:
            self._begin(self.path, fingerprint)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, line: Mapping[str, object]) -> None:
        """Append one result and sync it to disk."""
        if self.path is not None:
            self._write({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()})

    def _begin(self, path: Path, fingerprint: str) -> None:
        if lock(self._file.fileno()) is False:
            raise ValueError(f"sweep: another sweep writes to {path}; wait for it, or name another file")
        content = path.read_bytes()
        if not content:
            try:
                self._write({"sweep": fingerprint})
            except OSError:
                path.unlink(missing_ok=True)
                raise
            return
        whole = content[: content.rfind(b"\n") + 1]
        try:
            entries: list[Any] = [from_json(line, "a line") for line in whole.decode().splitlines()]
            head, *rest = entries or [None]
        except ValueError as error:
            raise ValueError(f"sweep: {path} is not a sweep journal: {error}; name another file") from error
        if not isinstance(head, dict) or "sweep" not in head:
            raise ValueError(f"sweep: {path} is not a sweep journal; name another file, or remove it")
        if head["sweep"] != fingerprint:
            raise ValueError(
                f"sweep: {path} has results of another model, other data or other options; name another file, or "
                "remove it"
            )
        if whole != content:  # the last write was interrupted
            self._file.truncate(len(whole))
        self.lines = [{key: _NUMBERS.get(v, v) if key != "name" else v for key, v in line.items()} for line in rest]

    def _write(self, line: Mapping[str, object]) -> None:
        assert self.path is not None
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        with naming(self.path):
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)  # leave no partial line
                raise


def fingerprint(program: ExportedProgram, data: Sequence[Arguments], options: object) -> str:
    """A SHA-256 hash of a program, its tensors, its inputs and the options that affect measurements."""
    result = hashlib.sha256(f"{program.graph} {options} {torch.get_num_threads()}".encode())
    tensors = {**program.constants, **program.state_dict}
    for name in sorted(tensors):
        result.update(name.encode())
        _add(result, tensors[name])
    for x in tree_leaves([(arguments.args, dict(arguments.kwargs)) for arguments in data]):
        _add(result, x)
    return result.hexdigest()


def _add(digest: "hashlib._Hash", x: Any) -> None:
    if not isinstance(x, Tensor):
        digest.update(repr(x).encode() if isinstance(x, bool | int | float | str | None) else type(x).__name__.encode())
        return
    parts: list[Tensor] = list(cast(Any, x).buffers().values()) if hasattr(x, "quantizer") else [x]
    for part in parts:
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        flat = part.detach().cpu().contiguous()
        digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")  # numpy may be absent
