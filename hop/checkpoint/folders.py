"""Checkpoints of a run in one folder, each there as a whole or not at all.

    folder/step_10/                  DCP's files, and hop.json: the size and SHA-256 of each
    folder/.step_20.tmp/             being written, or left by a save that was interrupted; nobody reads it

All processes write and flush their files, then one writes hop.json and renames the folder, which is atomic. The next
save removes what an interrupted one left. One run at a time may write to a folder, which all of its processes share.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp

from hop.checkpoint.loading import LoadPlanner
from hop.checkpoint.saving import SavePlanner
from hop.compat import process_groups
from hop.numerics.spelling import shown

_MANIFEST = "hop.json"
_METADATA = ".metadata"  # DCP's, which are pickled
_VERSION = 1
_FIELDS = {"bytes", "sha256"}  # of a file in the manifest


def save(
    state_dict: dict[str, Any], folder: str | Path, *, step: int, keep: int | None = None, process_group: Any = None
) -> Path:
    """Write a checkpoint of `state_dict` as `step`, together with all processes of the group. Returns its folder.

    Args:
        state_dict: plain and quantized tensors, DTensors of either, and what torch.load(weights_only=True) reads back;
            nested as dcp.save takes it, such as what torch.distributed.checkpoint.state_dict.get_state_dict returns.
        folder: of the whole run, the same for all processes; made if it is not there.
        step: 0 or more, and not saved yet.
        keep: how many checkpoints, those of the last steps and this one, stay; None for all.
        process_group: None for all processes, and for a process without others.

    Raises:
        ValueError: what SavePlanner refuses; `step` or `keep` out of range.
        FileExistsError: there is a checkpoint of `step`."""
    _check("save", state_dict, folder)
    if type(step) is not int or step < 0:
        raise ValueError(f"save: step must be an integer of 0 or more, got {step!r}; give one such as 0")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"save: keep must be an integer of 1 or more, or None; got {keep!r}; give None to keep all")
    folder = Path(folder)
    temporary = folder / f".step_{step}.tmp"
    together = process_groups.processes(process_group)
    with _own_exceptions():
        together.broadcast("prepare", lambda: _prepare(folder, step, temporary))
        dcp.save(
            state_dict,
            storage_writer=_Writer(temporary),
            planner=SavePlanner(),
            process_group=process_group,
        )
        names = together.broadcast("list", lambda: sorted(path.name for path in temporary.iterdir()))
        mine = names[together.get_rank() :: together.get_world_size()]
        digests = together.all_gather("digest", lambda: {name: _digest(temporary / name) for name in mine})
        files = {name: digest for own in digests for name, digest in own.items()}
        together.broadcast("publish", lambda: _publish(folder, step, temporary, files))
        if keep is not None:
            together.broadcast("remove", lambda: _remove(folder, step, keep))
    return folder / f"step_{step}"


def load(state_dict: dict[str, Any], folder: str | Path, *, step: int | None = None, process_group: Any = None) -> int:
    """Read a checkpoint into the tensors of `state_dict`, in place, together with all processes of the group. Returns
    its step.

    The number of processes and the placements may differ from those that it was saved with. Everything is checked
    before the first tensor is written, so that an exception leaves all of them as they were.

    Args:
        state_dict: as for `save`; values that are no tensors are replaced. What it does not name is not read, but a
            dict or a list in it must not be empty where the checkpoint has entries: an optimizer that has made no step
            gets its states by torch.distributed.checkpoint.state_dict.get_state_dict.
        step: None for the last one.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file is missing, or not what was saved; an entry does not fit, as LoadPlanner says.
        pickle.UnpicklingError: metadata that are not DCP's.
        RuntimeError: an entry is missing."""
    _check("load", state_dict, folder)
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"load: step must be an integer of 0 or more, or None; got {step!r}; give None for the last")
    folder = Path(folder)
    together = process_groups.processes(process_group)
    with _own_exceptions():
        result, manifest = together.broadcast("find", lambda: _find(folder, step))
        path = folder / f"step_{result}"
        mine = sorted(manifest)[together.get_rank() :: together.get_world_size()]
        together.all_gather("verify", lambda: [_verify(path / name, manifest[name]) for name in mine])
        dcp.load(
            state_dict,
            storage_reader=dcp.FileSystemReader(path),
            planner=LoadPlanner(),
            process_group=process_group,
        )
    return result


def steps(folder: str | Path) -> list[int]:
    """The steps of which `folder` has checkpoints, in order."""
    _check_folder("steps", folder)
    if not Path(folder).is_dir():
        return []
    matches = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in Path(folder).iterdir())
    return sorted(int(match[1]) for match in matches if match)


def latest(folder: str | Path) -> int | None:
    """The last of `steps`, None if there is none."""
    return max(steps(folder), default=None)


def _check(caller: str, state_dict: Any, folder: Any) -> None:
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"{caller}: state_dict must be a dict, got {shown(state_dict)}; give one such as model.state_dict()"
        )
    _check_folder(caller, folder)


def _check_folder(caller: str, folder: Any) -> None:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"{caller}: folder must be text or a pathlib.Path, got {shown(folder)}; give one such as 'checkpoints'"
        )


# ---- saving, in one of the processes


def _prepare(folder: Path, step: int, temporary: Path) -> None:
    if step in steps(folder):
        raise FileExistsError(f"step {step}: {folder} has a checkpoint of it; save another step, or remove that one")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step_*.tmp"):
        shutil.rmtree(left)
    temporary.mkdir()


def _publish(folder: Path, step: int, temporary: Path, files: dict[str, Any]) -> None:
    with (temporary / _MANIFEST).open("w") as file:
        json.dump({"version": _VERSION, "files": files}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _flush(temporary)
    temporary.rename(folder / f"step_{step}")
    _flush(folder)


def _remove(folder: Path, step: int, keep: int) -> None:
    """All but `step` and the last others. A checkpoint is out of sight before it is removed."""
    others = [n for n in steps(folder) if n != step]
    for n in others[: max(len(others) - (keep - 1), 0)]:
        gone = (folder / f"step_{n}").rename(folder / f".step_{n}.tmp")
        shutil.rmtree(gone)


def _flush(folder: Path) -> None:
    """Names in a folder outlive a loss of power only once it is flushed itself."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return {"bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


# ---- loading


def _find(folder: Path, step: int | None) -> tuple[int, dict[str, Any]]:
    """The step, and the files of its checkpoint."""
    result = latest(folder) if step is None else step
    if result is None or result not in steps(folder):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = (
            f"it has those of steps {steps(folder)}; take one of them"
            if steps(folder)
            else "save one first, or name its folder"
        )
        raise FileNotFoundError(f"load: folder {folder} has {wanted}; {there}")
    path = folder / f"step_{result}" / _MANIFEST
    try:
        manifest: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; load another step of {steps(folder)}") from error
    known = cast(dict[str, Any], manifest) if isinstance(manifest, dict) else {}
    files = known.get("files") if known.get("version") == _VERSION else None
    described = cast(dict[str, Any], files) if isinstance(files, dict) else {}
    if _METADATA not in described or any(set(f) != _FIELDS for f in described.values()):
        raise ValueError(f"{path} is no manifest of version {_VERSION}; load another step of {steps(folder)}")
    return result, described


class _Writer(dcp.FileSystemWriter):
    """Writes the name of its folder as text: a path would be read by the Pythons alone that keep its class in the same
    module, which 3.13 has moved."""

    @property
    def checkpoint_id(self) -> str:
        return str(cast(Any, self.path))


def _verify(path: Path, saved: dict[str, Any]) -> None:
    if not path.is_file() or path.stat().st_size != saved["bytes"]:
        has = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        raise ValueError(f"{path}: {saved['bytes']} bytes were saved, and there is {has}; load another step")
    if _digest(path) != saved:
        raise ValueError(f"{path}: its bytes are not those that were saved, by their SHA-256; load another step")
    if path.name == _METADATA:
        with path.open("rb") as file:
            _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    """Reads metadata that hold DCP's own classes, sizes and dtypes; others could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        result = super().find_class(module, name) if module.split(".")[0] in ("torch", "pathlib") else None
        own = module.startswith("torch.distributed.checkpoint.") and isinstance(result, type)
        if own or result is torch.Size or isinstance(result, torch.dtype) or (module, name) in _HARMLESS:
            return result
        raise pickle.UnpicklingError(f"metadata of a checkpoint hold no {module}.{name}")


_HARMLESS = {
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


@contextlib.contextmanager
def _own_exceptions() -> Generator[None, None, None]:
    """The exception of the first process that had one, instead of DCP's collection of them, and no warning that there
    is one process only."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        rank = min(error.failures)
        raise error.failures[rank][0] from error
