"""An emulator of AVX-VNNI for tests on CPUs without it: native/tests/emulation/avx_vnni.cpp, compiled once per user.

With it the native kernels of level avx_vnni run, each of its instructions in about a microsecond. Only a process
that loads the emulator before the native library has the level.
"""

import ctypes
import functools
import getpass
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

LEVEL = "avx_vnni"
SOURCE = Path(__file__).parents[2] / "native/tests/emulation/avx_vnni.cpp"


def lacks(levels: tuple[str, ...]) -> str | None:
    """Why the level cannot be emulated on a CPU that has `levels`; None if it can."""
    if platform.system() != "Linux" or "avx2" not in levels:
        return "AVX-VNNI is emulated on Linux, on CPUs with AVX2 and with native kernels"
    return None if _compiler() else "no C++ compiler for the emulator of AVX-VNNI"


@functools.cache
def library() -> str:
    """The path of the emulator, compiled if that has not been done."""
    compiler = _compiler()
    assert compiler is not None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"hop_emulation_{getpass.getuser()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR to another folder")
    path = folder / f"avx_vnni_{digest}.so"
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(own)], check=True)
        own.replace(path)
    return str(path)


def load(path: str) -> ctypes.CDLL:
    """Load the emulator into this process, for native libraries that are loaded later."""
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
