"""Checkpoints of a run in one folder, each written atomically.

    folder/step_10/      DCP's files, and hop.json: the size and SHA-256 of each
    folder/.hop-.../     a save in progress (hop.compat.files), or one that was killed; never read

All processes write and flush their files, then one process writes hop.json and renames the folder, which is atomic. The
next save removes what a killed one left. All processes of a run must see the same folder.
"""

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Generator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hop.checkpoint.loading import LoadPlanner
from hop.checkpoint.saving import SavePlanner
from hop.checkpoint.storage import Files, Reader, Writer, file_digest, read_manifest, verify, write_manifest
from hop.compat import process_groups
from hop.compat.files import move, naming, renamed_in_errors, temporary_folder
from hop.compat.pytree import StateDict
from hop.numerics.spelling import shown


def save(
    state_dict: StateDict,
    folder: str | Path,
    *,
    step: int,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint of `state_dict` as `step`, together with all processes of the group. Returns its folder.

    Args:
        state_dict: plain and quantized tensors, DTensors of either, and values that torch.load(weights_only=True) can
            read; nested as dcp.save takes it, for example from torch.distributed.checkpoint.state_dict.get_state_dict.
        folder: of the whole run, the same for all processes; created if needed.
        step: 0 or more, and not saved yet.
        keep: number of checkpoints to keep, this one included; older ones are removed. None keeps all.
        process_group: None for all processes, or for a single process.

    Raises:
        ValueError: SavePlanner rejects an entry, or `step` or `keep` is out of range.
        FileExistsError: a checkpoint of `step` exists, perhaps saved by another run in the meantime.
        OSError: the disk is full, or a file cannot be written; nothing of the checkpoint is left.
    """
    _check("save", state_dict, folder)
    if type(step) is not int or step < 0:
        raise ValueError(f"save: step must be an integer of 0 or more, got {step!r}; give one such as 0")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"save: keep must be an integer of 1 or more, or None; got {keep!r}; give None to keep all")
    folder = Path(folder)
    result = folder / f"step_{step}"
    together = process_groups.processes(process_group)
    with contextlib.ExitStack() as stack:  # in the process that made it, removes the temporary folder
        with _first_exception():
            temporary = together.broadcast("prepare", lambda: stack.enter_context(_temporary(folder, step)))
        with renamed_in_errors(temporary, result), _first_exception():
            dcp.save(
                state_dict,
                storage_writer=Writer(temporary),
                planner=SavePlanner(),
                process_group=process_group,
            )
            names = together.broadcast("list", lambda: sorted(os.listdir(temporary)))
            mine = names[together.get_rank() :: together.get_world_size()]
            digests = together.all_gather("digest", lambda: {name: file_digest(temporary / name) for name in mine})
            files = {name: digest for own in digests for name, digest in own.items()}
            together.broadcast("publish", lambda: _publish(temporary, files, result))
            if keep is not None:
                together.broadcast("remove", lambda: _remove(folder, step, keep))
    return result


def load(
    state_dict: StateDict,
    folder: str | Path,
    *,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Read a checkpoint into the tensors of `state_dict`, in place, together with all processes of the group. Returns
    its step.

    The number of processes and the placements may differ from those of the save. Everything is checked before the first
    tensor is written, so that an exception leaves all of them unchanged.

    Args:
        state_dict: as for `save`; values other than tensors are replaced. Entries that it does not name are not read,
            but a dict or list must not be empty if the checkpoint has entries for it: use
            torch.distributed.checkpoint.state_dict.get_state_dict for an optimizer that has made no step.
        folder: as for `save`.
        step: None for the last one.
        process_group: as for `save`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file is missing, damaged, a link, or not listed in hop.json; or an entry does not fit, see
            LoadPlanner.
        pickle.UnpicklingError: the metadata are not DCP's.
        RuntimeError: an entry is missing.
    """
    _check("load", state_dict, folder)
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"load: step must be an integer of 0 or more, or None; got {step!r}; give None for the last")
    folder = Path(folder)
    together = process_groups.processes(process_group)
    with _first_exception():
        result, manifest = together.broadcast("find", lambda: _find(folder, step))
        path = folder / f"step_{result}"
        mine = sorted(manifest)[together.get_rank() :: together.get_world_size()]
        together.all_gather("verify", lambda: [verify(path / name, manifest[name]) for name in mine])
        readers: list[Reader] = []
        together.all_gather("read metadata", lambda: readers.append(Reader(path, manifest)))
        dcp.load(
            state_dict,
            storage_reader=readers[0],
            planner=LoadPlanner(),
            process_group=process_group,
        )
    return result


def steps(folder: str | Path) -> list[int]:
    """The steps with a checkpoint in `folder`, in order."""
    _check_folder("steps", folder)
    if not Path(folder).is_dir():
        return []
    matches = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in Path(folder).iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _check(caller: str, state_dict: object, folder: object) -> None:
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"{caller}: state_dict must be a dict, got {shown(state_dict)}; give one such as model.state_dict()"
        )
    _check_folder(caller, folder)


def _check_folder(caller: str, folder: object) -> None:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"{caller}: folder must be text or a pathlib.Path, got {shown(folder)}; give one such as 'checkpoints'"
        )


# ---- saving, in one process


@contextlib.contextmanager
def _temporary(folder: Path, step: int) -> Generator[Path, None, None]:
    if step in steps(folder):
        raise _exists(folder, step)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as temporary:
        yield temporary


def _exists(folder: Path, step: int) -> FileExistsError:
    return FileExistsError(f"step {step}: {folder} has a checkpoint of it; save another step, or remove that one")


def _publish(temporary: Path, files: Files, path: Path) -> None:
    write_manifest(temporary, files)
    try:
        move(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise _exists(path.parent, int(path.name.removeprefix("step_"))) from error


def _remove(folder: Path, step: int, keep: int) -> None:
    """Remove all but `step` and the last `keep` - 1 others, renaming each first so that nobody reads half of one."""
    others = [n for n in steps(folder) if n != step]
    for n in others[: max(len(others) - (keep - 1), 0)]:
        with temporary_folder(folder) as gone, contextlib.suppress(FileNotFoundError):  # removed by another run
            (folder / f"step_{n}").rename(gone / "step")


# ---- loading


def _find(folder: Path, step: int | None) -> tuple[int, Files]:
    """The step to load, and the files of its checkpoint."""
    result = max(steps(folder), default=None) if step is None else step
    if result is None or result not in steps(folder):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = (
            f"it has those of steps {steps(folder)}; take one of them"
            if steps(folder)
            else "save one first, or pass another folder"
        )
        raise FileNotFoundError(f"load: folder {folder} has {wanted}; {there}")
    try:
        return result, read_manifest(folder / f"step_{result}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; load another step of {steps(folder)}") from error


@contextlib.contextmanager
def _first_exception() -> Generator[None, None, None]:
    """Raise the exception of the lowest failing rank instead of DCP's collection, and silence DCP's single-process
    warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        rank = min(error.failures)
        raise error.failures[rank][0] from error
