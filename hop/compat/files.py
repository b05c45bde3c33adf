"""Write files and folders completely or not at all, even with several processes at once.

A writer works in a temporary file or folder next to the destination, and renames it once its content is on disk:

    .hop-SYSTEM-RANDOM      SYSTEM: a digest of the running kernel, RANDOM: 16 hex digits; created with O_EXCL

The writer keeps a lock (flock) on it until it is done. A later writer to the same folder removes the temporary files of
killed processes: on the same system, those that are not locked. Locks of other systems may be invisible on network file
systems, and some file systems have no locks: there, only files that have not changed for a day are removed.
"""

import errno
import functools
import hashlib
import io
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_TEMPORARY = re.compile(r"\.hop-([0-9a-f]{8})-[0-9a-f]{16}")
_LOCK = ".hop-lock"  # lock file of a folder into which files are being moved
_LONGEST_MOVE = 60.0  # seconds to wait for another process that is moving files into the same folder
_DAY = 86400.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WITHOUT_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)


class WholeFile(io.FileIO):
    """A file being written, at the temporary `path`. `write` writes all of its data.

    The first OSError is kept in `failure`, because other packages replace it by errors that do not mention a full disk.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "wb")
        self.path = path
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        left = view.cast("B") if view.nbytes else memoryview(b"")
        with self._keeping_failure():
            while len(left):
                left = left[super().write(left) or 0 :]
        return view.nbytes

    def truncate(self, size: int | None = None) -> int:
        with self._keeping_failure():
            return super().truncate(size)

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


@contextmanager
def whole_file(path: str | Path, *, replace: bool = True) -> Iterator[WholeFile]:
    """Open a file for writing that appears at `path`, on disk, when the block ends.

    If the block raises an exception, the new file is removed and an existing file at `path` is unchanged. A symbolic
    link at `path` is replaced, not followed. Devices, pipes and names of open files (/dev/stdout) cannot be replaced,
    and are written directly.

    Args:
        replace: whether to replace a file at `path`. If False and several writers compete, one of them succeeds and the
            others raise FileExistsError (without hard links, only if they do not finish at the same moment).

    Raises:
        OSError: the system could not write the file. The error names `path`, not the temporary file.
    """
    path = Path(path)
    with naming(path):
        part, descriptor = _stream(path) if _is_stream(path) else _created(path.parent, _new_file(path))
    held = None if fcntl is None else os.dup(descriptor)  # keeps the lock after the file is closed, until it is renamed
    try:
        with WholeFile(descriptor, part) as file:
            try:
                yield file
            except Exception as error:
                if file.failure is not None:
                    raise named(file.failure, path) from error
                raise
            with naming(path):
                if file.failure is not None:  # swallowed by the code that wrote
                    raise file.failure
                if part != path and (held is not None or not file.closed):
                    os.fsync(file.fileno() if held is None else held)
                file.close()
        if part != path:
            with naming(path):
                _put(part, path, replace)
    finally:
        if part != path:
            part.unlink(missing_ok=True)
        if held is not None:
            os.close(held)


def write_whole(path: str | Path, content: bytes | str) -> None:
    """Write a file with `whole_file`, text in UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent`, removed with its content when the block ends, unless it has been renamed by then."""
    with naming(parent):
        path, descriptor = _created(parent, _new_folder)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # files that cannot be removed now are left to the next writer
        os.close(descriptor)


@contextmanager
def whole_folder(
    folder: Path, check: Callable[[], None] = lambda: None, *, first: Collection[str] = ()
) -> Iterator[Path]:
    """Create a temporary folder whose files are moved into `folder` when the block ends.

    If the block raises an exception, or the process is killed in it, `folder` gets none of the files. Only one of
    several writers moves its files at a time. A process that is killed while moving leaves some of the files.

    Args:
        folder: the destination; created if it does not exist.
        check: raises an exception if `folder` must not be written to. It is called at the start, and again while no
            other writer can move files into `folder`; so a folder that it rejects because of files there has all the
            files of one writer.
        first: the names of files to move before the others: those that list the others.
    """
    check()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as staged:
        with renamed_in_errors(staged, folder):
            yield staged
        with naming(folder):
            names = sorted(os.listdir(staged), key=lambda name: (name not in first, name))
            for name in names:
                flush(staged / name)
        with _alone(folder):
            check()
            with naming(folder):
                for name in names:
                    os.replace(staged / name, folder / name)
                flush(folder)


def move(source: Path, path: Path) -> None:
    """Move a file, or a folder to where none exists, on the same disk, so that the move survives a crash."""
    if _is_stream(path):
        raise FileExistsError(errno.EEXIST, "a device, a pipe or an open file is there; choose another path", str(path))
    with naming(path):
        flush(source)
        os.replace(source, path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Whether this is the name of a temporary file, temporary folder or lock file."""
    return name == _LOCK or _TEMPORARY.fullmatch(name) is not None


# ---- errors


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Re-raise OSErrors as errors about `path`."""
    try:
        yield
    except OSError as error:
        raise named(error, path) from error


@contextmanager
def renamed_in_errors(temporary: Path, path: Path) -> Iterator[None]:
    """Re-raise OSErrors about files in the folder `temporary` as errors about those in `path`."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(temporary):
            raise
        raise named(error, path / Path(error.filename).relative_to(temporary)) from error


def named(error: OSError, path: Path) -> OSError:
    """The OSError with the same number about `path`."""
    number = error.errno or errno.EIO
    remedy = "; nothing was written: free some space, or choose a path on another disk" if number in _FULL else ""
    return OSError(number, f"{os.strerror(number)}{remedy}", str(path))


# ---- creating


def _created(folder: Path, create: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Create a temporary file or folder, and return a locked descriptor. Removes files that killed writers left."""
    while True:
        path = folder / f".hop-{_system()}-{secrets.token_hex(8)}"
        descriptor = create(path)
        if descriptor is None:
            continue
        if _has_lock(path, descriptor):
            _remove_leftovers(folder, os.fstat(descriptor).st_mtime)
            return path, descriptor
        os.close(descriptor)  # another writer removed it as a leftover before it was locked


def _new_file(path: Path) -> Callable[[Path], int]:
    """A function that creates a file with the permissions of the one at `path`."""
    mode = 0o666
    with suppress(FileNotFoundError):
        replaced = os.lstat(path).st_mode
        mode = stat.S_IMODE(replaced) & 0o777 if stat.S_ISREG(replaced) else mode
    return lambda part: os.open(part, _NEW | _SAFE, mode)


def _new_folder(path: Path) -> int | None:
    os.mkdir(path)
    if fcntl is None:  # where folders cannot be opened
        return os.open(os.devnull, os.O_RDONLY)
    try:
        return os.open(path, _FOLDER | _SAFE)
    except FileNotFoundError:  # another writer removed it as a leftover
        return None


def _is_stream(path: Path) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    is_of_open_file = path.is_symlink() and os.readlink(path).startswith("/proc/")
    return is_of_open_file or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _stream(path: Path) -> tuple[Path, int]:
    return path, os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))


def _put(part: Path, path: Path, replace: bool) -> None:
    if not replace:
        try:
            os.link(part, path)
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
            replace = True
    if replace:
        os.replace(part, path)
    flush(path.parent)


# ---- locks and leftovers


@functools.cache
def _system() -> str:
    """8 hex digits, equal for processes that see each other's locks on any file system."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def lock(descriptor: int) -> bool | None:
    """Lock an open file or folder. Returns whether that succeeded; None if this file system has no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _has_lock(path: Path, descriptor: int) -> bool:
    """Lock the new file or folder at `path`. Returns whether it still exists and, where supported, is locked."""
    is_locked = lock(descriptor)
    try:
        return is_locked is None or (is_locked and os.path.samestat(os.lstat(path), os.fstat(descriptor)))
    except FileNotFoundError:
        return False


def _remove_leftovers(folder: Path, now: float) -> None:
    """Remove temporary files that killed writers left in a folder. `now` is by the clock of the file system."""
    with suppress(PermissionError):  # a folder whose names may not be read
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                with suppress(OSError):  # owned by another user, or already gone
                    _remove_if_left(folder / name, now)


def _remove_if_left(path: Path, now: float) -> None:
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    descriptor = os.open(path, (_FOLDER if stat.S_ISDIR(mode) else os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)) | _SAFE)
    try:
        is_locked = lock(descriptor)
        match = _TEMPORARY.fullmatch(path.name)
        is_known = is_locked is True and (match is None or match[1] == _system())
        if is_locked is not False and (is_known or now - _last_change(path) > _DAY):
            if stat.S_ISDIR(mode):
                shutil.rmtree(path)
            else:
                path.unlink()
    finally:
        os.close(descriptor)


def _last_change(path: Path) -> float:
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return max(os.lstat(p).st_mtime for p in paths)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context in which no other writer moves files into `folder`."""
    path, end = folder / _LOCK, time.monotonic() + _LONGEST_MOVE
    while (descriptor := _lock_file(path)) is None:
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT, "another process moves its files here; if none does, remove this file", str(path)
            )
        time.sleep(0.01)
    try:
        yield
    finally:
        path.unlink()
        os.close(descriptor)


def _lock_file(path: Path) -> int | None:
    """A descriptor of the new file `path`; None if another process has it."""
    try:
        with naming(path.parent):
            descriptor = os.open(path, _NEW | _SAFE, 0o666)
    except FileExistsError:
        with suppress(OSError):
            _remove_if_left(path, time.time())
        return None
    if _has_lock(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None
