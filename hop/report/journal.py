"""A file of JSON lines to which results are added one by one, so that stopping loses none that is there."""

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop.compat.pytree import tree_leaves
from hop.export.analysis.arguments import Arguments

_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Journal:
    """The results of one sweep. `lines` are those that are there; without a path none is kept.

    The first line holds a fingerprint of what is measured. A last line that was cut off is dropped.

    Raises:
        ValueError: the file holds something else, or results of another fingerprint.
    """

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path = None if path is None else Path(path)
        self.lines: list[dict[str, Any]] = []
        if self.path is None:
            return
        if not self.path.exists() or not self.path.stat().st_size:
            self._write({"sweep": fingerprint})
            return
        head, *rest = self._read()
        if not isinstance(head, dict) or "sweep" not in head:
            raise ValueError(f"sweep: {self.path} is no journal of a sweep; name another file, or remove it")
        if head["sweep"] != fingerprint:
            raise ValueError(
                f"sweep: {self.path} holds results of another model, other data or other options; name another file, "
                "or remove it"
            )
        self.lines = [{key: _NUMBERS.get(v, v) if key != "name" else v for key, v in line.items()} for line in rest]

    def add(self, line: dict[str, Any]) -> None:
        """One result more, on the disk before this returns."""
        if self.path is not None:
            self._write({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()})

    def _read(self) -> list[Any]:
        assert self.path is not None
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # cut off while it was written
            self.path.write_text(whole, encoding="utf-8")
        try:
            entries = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise ValueError(f"sweep: {self.path} is no journal of a sweep: {error}; name another file") from error
        return entries or [None]

    def _write(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def fingerprint(program: ExportedProgram, data: Sequence[Arguments], options: Any) -> str:
    """A hash of a program, of what it holds, of its inputs and of options that change what is measured."""
    result = hashlib.sha256(f"{program.graph} {options} {torch.get_num_threads()}".encode())
    tensors = {**program.constants, **program.state_dict}
    for name in sorted(tensors):
        result.update(name.encode())
        _add(result, tensors[name])
    for x in tree_leaves([(arguments.args, dict(arguments.kwargs)) for arguments in data]):
        _add(result, x)
    return result.hexdigest()


def _add(digest: Any, x: Any) -> None:
    if not isinstance(x, Tensor):
        digest.update(repr(x).encode() if isinstance(x, bool | int | float | str | None) else type(x).__name__.encode())
        return
    parts: list[Tensor] = list(cast(Any, x).buffers().values()) if hasattr(x, "quantizer") else [x]
    for part in parts:
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        flat = part.detach().cpu().contiguous()
        digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")  # numpy may be absent
