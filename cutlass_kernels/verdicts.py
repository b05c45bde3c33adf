"""Verdicts on kernels, kept in the cache folder: which kernels gave right results on a kind of GPU, and which did not.

A file holds the verdicts for one kind of GPU: its compute capability and multiprocessors, the driver and PyTorch. Each
verdict has the digest of the kernel that it is about, so that a kernel which changed is checked again. Files appear
whole, by renaming; a lock file beside them lets one process check at a time while the others wait for its verdicts.
Content that is not exactly such a file is ignored, with a warning.
"""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cutlass_kernels import cache

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RIGHT = "right"
STATES = (RIGHT, "wrong", "hung", "died")  # kept on disk
UNCHECKED = "unchecked"  # there is no verdict; never kept on disk
LONGEST = 600  # characters of a reason
_LARGEST = 2**22  # bytes of a file
_POLL = 0.05  # seconds between attempts to lock


class Verdict(NamedTuple):
    """The state of a kernel, one of STATES or UNCHECKED; the reason unless it is right; the kernel's digest."""

    state: str
    reason: str = ""
    digest: str = ""

    @property
    def is_right(self) -> bool:
        return self.state == RIGHT


@dataclass(frozen=True)
class Kind:
    """A kind of GPU, with the software that runs kernels on it."""

    capability: str
    multiprocessors: int
    driver: str
    torch: str

    @property
    def path(self) -> Path | None:
        """The file of its verdicts; None if nothing is kept on disk."""
        folder = cache.folder()
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return None if folder is None else folder / f"verdicts_{self.capability}_{digest}.json"


def kind_of(device: torch.device) -> Kind:
    """The kind of a GPU."""
    gpu = torch.cuda.get_device_properties(device)
    return Kind(f"{gpu.major}.{gpu.minor}", gpu.multi_processor_count, _driver(), torch.__version__)


def _driver() -> str:
    """The CUDA version of the driver, and on Linux the version of its kernel module."""
    with contextlib.suppress(OSError):
        return f"{torch._C._cuda_getDriverVersion()} {Path('/sys/module/nvidia/version').read_text().strip()[:64]}"
    return str(torch._C._cuda_getDriverVersion())


def read(kind: Kind) -> dict[str, Verdict]:
    """The verdicts on disk, by kernel; none, with a warning, if the file is not one of these."""
    path = kind.path
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        return _parsed(content, kind)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} holds no verdicts on GPU kernels ({error}) and is not used; remove it", stacklevel=2)
        return {}


def _parsed(content: bytes, kind: Kind) -> dict[str, Verdict]:
    """The verdicts in the content of a file.

    Raises:
        ValueError: it is something else.
    """
    if len(content) > _LARGEST:
        raise ValueError(f"more than {_LARGEST} bytes")
    found: Any = json.loads(content)
    if not isinstance(found, dict) or found.get("kind") != asdict(kind) or not isinstance(found.get("kernels"), dict):
        raise ValueError("another kind of GPU, or other fields")
    verdicts = {}
    for name, entry in found["kernels"].items():
        is_entry = isinstance(entry, list) and len(entry) == 3 and all(isinstance(word, str) for word in entry)
        if not is_entry or entry[0] not in STATES or len(entry[1]) > LONGEST:
            raise ValueError(f"no verdict: {str(entry)[:80]}")
        verdicts[name] = Verdict(*entry)
    return verdicts


def add(kind: Kind, verdicts: Mapping[str, Verdict]) -> None:
    """Keep verdicts on disk, beside those of other kernels. Call it with the kind locked."""
    path = kind.path
    kept = {name: v for name, v in verdicts.items() if v.state in STATES}
    if path is None or not kept:
        return
    every = read(kind) | kept
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"kind": asdict(kind), "kernels": {name: list(v) for name, v in sorted(every.items())}}, file)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def forget(kind: Kind) -> None:
    """Remove the verdicts for a kind of GPU from disk."""
    if (path := kind.path) is not None:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(kind: Kind, seconds: float) -> Iterator[bool]:
    """Hold the lock of a kind's file; gives False if another process has it for all these seconds.

    The system releases the lock of a process that ends. Without a folder, and on file systems without locks, each
    process checks for itself.
    """
    path = kind.path
    if path is None or fcntl is None:
        yield True
        return
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
    try:
        yield _lock(descriptor, time.monotonic() + seconds)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> bool:
    assert fcntl is not None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return True  # no locks here
            if time.monotonic() > deadline:
                return False
        time.sleep(_POLL)
