"""A folder of compiled kernels for a machine that has Python and torch alone; cutlass_kernels.prebuilt loads it.

It is made on any machine that has the CuTe DSL and a linker. It holds parts of NVIDIA's libraries and of tvm-ffi: it is
for the machines of who made it, and not to be passed on.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cutlass_kernels import cache, hopper, prebuilt
from cutlass_kernels.prebuilt import KERNELS, LAUNCHER, LIBRARY, MANIFEST, RUNTIME, Pack

_LINKERS = ("cc", "gcc", "clang")
_PYTHON = re.compile(r"3\.\d+")


def write(variants: Sequence[Any], folder: Path, python: str, groups: Sequence[str]) -> Iterator[str]:
    """Link kernels that cache.keep has on disk, and pack them with what loads them; gives each name as it is done.

    Args:
        folder: what is made; an older one is replaced, once the new one is whole.
        python: the version that it is for, as 3.12.
        groups: what it is called by; a note in the manifest.

    Raises:
        FileExistsError: `folder` is there, and is no such folder. FileNotFoundError: no linker is there, or a kernel is
            not on disk. RuntimeError: tvm_ffi for that Python cannot be fetched, or the linker fails.
    """
    check(folder, python)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        for name in (KERNELS, RUNTIME):
            (made / name).mkdir(parents=True, mode=0o755)
        runtime = dict(_runtime(made / RUNTIME, python))
        kernels = {}
        for v in variants:
            kernels[v.name] = prebuilt.digest_of(_linked(v, made).read_bytes())
            yield v.name
        _describe(Pack(made, hopper.TARGET, python, *_here(), list(groups), kernels, runtime))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)


def check(folder: Path, python: str) -> None:
    """Raise what `write` would raise of its arguments."""
    if not _PYTHON.fullmatch(python):
        raise ValueError(f"python must be a version such as 3.12, got {python!r}")
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there, and holds no kernels; name another folder, or remove it")
    _linker()


def archive(folder: Path) -> Path:
    """The folder as one file, FOLDER.tar.gz, which `tar -xzf` unpacks; its files are root's where root unpacks it."""
    path = folder.with_name(f"{folder.name}.tar.gz")

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode &= 0o755
        return None if "__pycache__" in entry.name else entry

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
        made = Path(temporary) / path.name
        with tarfile.open(made, "w:gz", compresslevel=6) as file:
            file.add(folder, folder.name, filter=owned)
        os.replace(made, path)
    return path


def _describe(pack: Pack) -> None:
    fields = {name: value for name, value in vars(pack).items() if name != "folder"}
    text = json.dumps({"format": prebuilt.FORMAT, **fields}, indent=1)
    (pack.folder / MANIFEST).write_text(text + "\n")
    for path in (pack.folder, *pack.folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)


def _here() -> tuple[str, str, dict[str, str]]:
    """The processor, the digest of the sources, and the versions of what makes kernels."""
    return platform.machine(), prebuilt.sources(), {name: prebuilt.installed(name) for name in prebuilt.PACKAGES}


# ---- kernels


def _linker() -> str:
    found = next(filter(None, map(shutil.which, _LINKERS)), None)
    if found is None:
        raise FileNotFoundError(f"kernels are linked by one of {', '.join(_LINKERS)}, and none is there; install gcc")
    return found


def _linked(v: Any, made: Path) -> Path:
    """A kernel's library, out of its object file."""
    kept = cache.file_of(v.name, v.target)
    if kept is None:
        raise FileNotFoundError(f"the kernel {v.name} is not compiled; run hop kernels build {v.name}")
    path = made / KERNELS / f"{v.name}.so"
    command = [_linker(), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-o", str(path), str(kept)]
    command += [str(made / RUNTIME / LIBRARY), str(_launcher_library())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the linker fails on {v.name}: {done.stderr.strip()}")
    return path


def _launcher_library() -> Path:
    """libtvm_ffi.so, of any Python's."""
    import tvm_ffi

    return Path(tvm_ffi.libinfo.find_libtvm_ffi())


# ---- the runtime


def _runtime(folder: Path, python: str) -> Iterator[tuple[str, str]]:
    """Copy the runtime; gives the path of each file, and its digest."""
    import cutlass

    library = next(p for p in map(Path, cutlass.runtime.find_runtime_libraries()) if p.name == LIBRARY)
    for name, content in ((LIBRARY, library.read_bytes()), *_launcher(python)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        yield name, prebuilt.digest_of(content)


def _launcher(python: str) -> Iterable[tuple[str, bytes]]:
    """The files of tvm_ffi for a version of Python: those that are installed, or else of its wheel."""
    if python == prebuilt.python():
        files = importlib.metadata.files(LAUNCHER) or ()
        yield from ((str(f), Path(str(f.locate())).read_bytes()) for f in files if _is_needed(str(f)))
        return
    wanted = f"{LAUNCHER}=={prebuilt.installed(LAUNCHER)}"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            why = " ".join(done.stderr.split())[-300:]
            raise RuntimeError(
                f"pip finds no wheel of {wanted} for Python {python}, which the kernels need there: {why}"
            )
        with zipfile.ZipFile(wheel) as content:
            yield from ((name, content.read(name)) for name in content.namelist() if _is_needed(name))


def _is_needed(name: str) -> bool:
    """Whether it is code of tvm_ffi; the wheel has headers and sources besides."""
    return name.startswith("tvm_ffi/") and name.endswith((".py", ".so"))
