"""Compiled kernels: made at first use, kept in memory, and on disk for the next process. Those that were built ahead
(cutlass_kernels.prebuilt) go before.

A file holds one object for all sizes; its name says what it is, and the digest of its content, so that a file that was
cut short or changed is not loaded. Files appear whole, by renaming. They hold machine code, so the folder must be the
user's alone.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cutlass_kernels import missing, prebuilt
from cutlass_kernels.prebuilt import FUNCTION

FOLDER = "HOP_CACHE_DIR"  # the environment variable that names the folder; empty: nothing is kept on disk

_loaded: dict[tuple[str, str], Callable[..., None]] = {}
_lock = threading.RLock()


class NotBuilt(RuntimeError):
    """A kernel is not among those that were built ahead, and cannot be compiled here."""


def folder() -> Path | None:
    """The folder of compiled kernels, made if need be; None if nothing is to be kept.

    Raises:
        PermissionError: it is another user's, or others may write or read it.
    """
    named = os.environ.get(FOLDER)
    if named == "":
        return None
    try:
        path = (
            Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hop", "kernels")
        )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no home, or none that can be written
        if named:
            raise
        warnings.warn(f"compiled kernels are not kept: {error}; name a folder in {FOLDER}", stacklevel=2)
        return None
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or mode & 0o077):
        raise PermissionError(
            f"the folder of compiled kernels, {path}, has owner {found.st_uid} and mode {mode:o}; it must be yours "
            f"({os.getuid()}) with mode 700, as machine code is loaded from it. Run chmod 700 on it, remove it, or "
            f"name another one in {FOLDER}"
        )
    return path


def kernel(name: str, target: str, build: Callable[[], Any]) -> Callable[..., None]:
    """The kernel `name` for a target as sm_90a: from memory, built ahead, from disk, or compiled by `build`, which
    gives what cute.compile gives.

    Raises:
        NotBuilt: it was not built ahead, and nothing is there to compile it. RuntimeError, PermissionError: the folder
            of those that were is damaged, or others may write it.
    """
    key = (name, target)
    found = _loaded.get(key)
    if found is None:
        with _lock:
            found = _loaded.get(key) or _loaded.setdefault(key, _made(name, target, build))
    return found


def declines(*kernels: Any) -> str | None:
    """Why kernels can neither be compiled here nor were all built ahead, or None. A kernel has a name and a target."""
    if (reason := missing()) is None:
        return None
    pack = prebuilt.pack()
    if pack is None:
        return reason
    gone = [k.name for k in kernels if not pack.has(k.name, k.target)]
    return f"{pack.folder} has no kernel {', '.join(gone)}, and it cannot be compiled here: {reason}" if gone else None


def _made(name: str, target: str, build: Callable[[], Any]) -> Callable[..., None]:
    pack = prebuilt.pack()
    if pack is not None and pack.has(name, target):
        return pack.load(name)
    if pack is not None and (reason := missing()) is not None:
        raise NotBuilt(f"{pack.folder} has no kernel {name} for {target}, and it cannot be compiled here: {reason}")
    return _found(name, target) or _built(name, target, build)


def is_kept(name: str, target: str) -> bool:
    """Whether a kernel is on disk."""
    return file_of(name, target) is not None


def file_of(name: str, target: str) -> Path | None:
    """The object file of a kernel that is on disk."""
    return next(_files(name, target), None)


def keep(name: str, target: str, compiled: Any) -> Path | None:
    """Write a compiled kernel to disk; its file, or None where none is kept."""
    path = folder()
    if path is None:
        return None
    handle, temporary = tempfile.mkstemp(dir=path, suffix=".o")
    os.close(handle)
    try:
        compiled.export_to_c(temporary, function_name=FUNCTION)
        content = Path(temporary).read_bytes()
        final = path / f"{_stem(name, target)}.{_digest(content)}.o"
        os.replace(temporary, final)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return final


def _built(name: str, target: str, build: Callable[[], Any]) -> Callable[..., None]:
    """Read a compiled kernel back, because the compiler's object runs only on the GPU found at compile time."""
    compiled = build()
    path = keep(name, target, compiled)
    if path is not None:
        return _read(path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=FUNCTION)
        return _read(path)


def _found(name: str, target: str) -> Callable[..., None] | None:
    path = file_of(name, target)
    return None if path is None else _read(path)


def _read(path: Path) -> Callable[..., None]:
    import cutlass

    return getattr(cutlass.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)


def identity(name: str, target: str) -> str:
    """The digest of what decides on a kernel's machine code: of its file where it was built ahead, else of the sources
    and the compiler."""
    pack = prebuilt.pack()
    return pack.kernels[name][:32] if pack is not None and pack.has(name, target) else _version()


def identities(name: str) -> set[str]:
    """The digests that a kernel may have here, for any target."""
    pack = prebuilt.pack()
    return {_version(), *([pack.kernels[name][:32]] if pack is not None and name in pack.kernels else [])}


def _files(name: str, target: str) -> Any:
    """The whole files of a kernel."""
    path = folder()
    if path is not None:
        for file in sorted(path.glob(f"{_stem(name, target)}.*.o")):
            with contextlib.suppress(FileNotFoundError):  # another process cleans up
                if _digest(file.read_bytes()) == file.suffixes[-2][1:]:
                    yield file


def _stem(name: str, target: str) -> str:
    return f"{name}.{target}.{_version()}"


@cache
def _version() -> str:
    """A digest of what decides on the code of a kernel: the sources of this package, and the compiler."""
    digest = hashlib.sha256(prebuilt.sources().encode())
    for package, version in versions().items():
        digest.update(f"{package} {version}\0".encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The versions of the packages that compile kernels, "none" for a missing one."""
    return {package: prebuilt.installed(package) for package in (*prebuilt.PACKAGES, "nvidia-cutlass-operators")}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
