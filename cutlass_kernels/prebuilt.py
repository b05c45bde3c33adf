"""Kernels that were compiled on another machine, out of the folder that HOP_KERNELS names. They need no compiler.

    manifest.json       what they are for, and the SHA-256 of every other file
    kernels/NAME.so     a kernel each
    runtime/            the library that they are linked with, and tvm_ffi, which calls them, for one version of Python

The folder holds machine code. So it is the user's or root's, nobody else may write it, and a file is loaded after its
digest was found right. cutlass_kernels.packing writes it.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = "HOP_KERNELS"  # the environment variable that names the folder
FORMAT = 1  # of the folder
FUNCTION = "hop_kernel"  # what a kernel is called in its library
MANIFEST, KERNELS, RUNTIME = "manifest.json", "kernels", "runtime"
LIBRARY = "libcute_dsl_runtime.so"
LAUNCHER = "apache-tvm-ffi"
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", LAUNCHER)  # which make these kernels


@dataclass(frozen=True)
class Pack:
    """A folder of kernels.

    `target` is the GPU that they are for, as sm_90a; `python` a version such as 3.12; `machine` a processor's name;
    `sources` the digest of this package's files; `versions` those of the packages that made the kernels; `groups` what
    was asked for; `kernels` and `runtime` the SHA-256 of each kernel by name, and of each file by its path in runtime/.
    """

    folder: Path
    target: str
    python: str
    machine: str
    sources: str
    versions: dict[str, str]
    groups: list[str]
    kernels: dict[str, str]
    runtime: dict[str, str]

    def has(self, name: str, target: str) -> bool:
        return target == self.target and name in self.kernels

    def load(self, name: str) -> Callable[..., None]:
        """A kernel, by name.

        Raises:
            PermissionError: others may write its file. RuntimeError: the file was changed, or does not load.
        """
        launcher = _launchers.get(self.folder) or _launchers.setdefault(self.folder, self.start())
        path = self._checked(f"{KERNELS}/{name}.so", self.kernels[name])
        try:
            return getattr(launcher.load_module(str(path)), FUNCTION)
        except (AttributeError, RuntimeError, OSError) as error:
            raise self._unusable(f"{path} does not load: {error}") from error

    def start(self) -> Any:
        """tvm_ffi, once every file of the runtime was checked, and its library loaded."""
        for name, digest in self.runtime.items():
            self._checked(f"{RUNTIME}/{name}", digest)
        folder = self.folder / RUNTIME
        try:
            ctypes.CDLL(str(folder / LIBRARY))  # kernels find it by its name, and nobody else sees its symbols
            if importlib.util.find_spec("tvm_ffi") is None:
                sys.path.append(str(folder))
            launcher = importlib.import_module("tvm_ffi")
        except (ImportError, OSError) as error:
            raise self._unusable(f"its runtime does not load: {error}") from error
        if launcher.__version__ != self.versions[LAUNCHER]:
            raise self._unusable(
                f"it is for {LAUNCHER} {self.versions[LAUNCHER]}, and {launcher.__version__} is installed in "
                f"{Path(str(launcher.__file__)).parent}; uninstall that"
            )
        return launcher

    def check(self) -> None:
        """Raise RuntimeError if the kernels are for another Python, processor, or version of this package, or if a
        package that made them is installed here in another version, whose libraries would be taken for theirs."""
        here = {"python": python(), "machine": platform.machine(), "sources": sources()}
        words = {"python": "Python", "machine": "a processor", "sources": "sources of cutlass_kernels with digest"}
        for name, found in here.items():
            if (wanted := getattr(self, name)) != found:
                raise self._unusable(f"it is for {words[name]} {wanted}, and here is {found}")
        for package, version in self.versions.items():
            if (found := installed(package)) not in (version, "none"):
                raise self._unusable(f"it was made by {package} {version}, and {found} is installed here")

    def _checked(self, name: str, digest: str) -> Path:
        """The path of a file that only its owner may write, and that is as it was made."""
        path = self.folder
        for part in Path(name).parts:
            if part == "..":
                raise self._unusable(f"its {MANIFEST} names {name}, which lies outside")
            path = path / part
            _check_owner(path)
        if (found := digest_of(path.read_bytes())) != digest:
            raise self._unusable(f"{path} has the SHA-256 {found}, and the manifest says {digest}")
        return path

    def _unusable(self, why: str) -> RuntimeError:
        return _unusable(self.folder, why)


def pack() -> Pack | None:
    """The checked folder that HOP_KERNELS names; None if it is empty or not set.

    Raises:
        FileNotFoundError: there is no such folder. PermissionError: others may write it. RuntimeError: it is damaged,
            or for another Python, processor, or version of this package.
    """
    named = os.environ.get(FOLDER)
    return _opened(named) if named else None


def described(folder: Path) -> Pack:
    """The contents of a folder according to its manifest, for any Python and processor."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no kernels: there is no {MANIFEST} in it. {_remedy()}")
    _check_owner(folder)
    _check_owner(path)
    try:
        content = json.loads(path.read_bytes())
        if (found := content.pop("format")) != FORMAT:
            raise _unusable(folder, f"it has the format {found}, and this version reads {FORMAT}")
        made = Pack(folder, **content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unusable(folder, f"its {MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    if (odd := _odd(made)) is not None:
        raise _unusable(folder, f"its {MANIFEST} is damaged: {odd} is {getattr(made, odd)!r}")
    return made


def _odd(made: Pack) -> str | None:
    """A field of a manifest that holds something else than it should, or None."""
    tables = ("versions", "kernels", "runtime")
    for name in tables:
        table = getattr(made, name)
        if not isinstance(table, dict) or not all(isinstance(s, str) for s in (*table, *table.values())):
            return name
    if LIBRARY not in made.runtime:
        return "runtime"
    return "versions" if LAUNCHER not in made.versions else None


@cache
def _opened(named: str) -> Pack:
    found = described(Path(named).resolve())
    found.check()
    return found


_launchers: dict[Path, Any] = {}  # tvm_ffi, by folders whose runtime was checked and loaded


def _unusable(folder: Path, why: str) -> RuntimeError:
    return RuntimeError(f"the kernels in {folder}, which {FOLDER} names, cannot be used: {why}. {_remedy()}")


def _remedy() -> str:
    return (
        f"Build it with `hop kernels build --out DIR --python {python()}` on a machine that has the CuTe DSL and these "
        f"sources, copy it whole, or unset {FOLDER}"
    )


def _check_owner(path: Path) -> None:
    """Raise PermissionError unless a file or folder is the user's or root's, and nobody else may write it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise _unusable(path.parent, f"{path} is missing") from None
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode) or found.st_uid not in (0, os.getuid()) or mode & 0o022:
        kind = "is a link" if stat.S_ISLNK(found.st_mode) else f"has owner {found.st_uid} and mode {mode:o}"
        raise PermissionError(
            f"{path} {kind}; machine code is loaded from it, so that it must be a file or folder of yours "
            f"({os.getuid()}) or root's, which nobody else may write. Run chmod -R go-w and chown -R on the folder "
            f"that {FOLDER} names"
        )


# ---- what kernels depend on


def python() -> str:
    """The version of Python, as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@cache
def sources() -> str:
    """A digest of the files of this package, which decide on the code of a kernel and on how it is called."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def installed(package: str) -> str:
    """The version of a package that is installed, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
