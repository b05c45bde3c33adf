"""A disk of this process alone that is full: a tmpfs in a mount namespace of its own, which goes with the process."""

import ctypes
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x00020000, 0x10000000, 0x4000, 0x40000


def mount(folder: Path, size: int) -> None:
    """Mount a tmpfs of `size` bytes at `folder`, seen by this process alone, which must have no threads.

    Raises:
        OSError: the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    _check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode()))


def fill(folder: Path, free: int) -> Path:
    """Write a file that leaves about `free` bytes of the disk of `folder`."""
    path = folder / "filler"
    status = os.statvfs(folder)
    path.write_bytes(bytes(max(status.f_bavail * status.f_frsize - free, 0)))
    return path


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
