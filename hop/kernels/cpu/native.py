"""The native library: C++ behind a C interface, loaded if it was built.

The best CPU level is detected at run time, and can be restricted: the environment variable HOP_NATIVE, or `use`, sets
"off" (only PyTorch's own operators) or a lower level. Each level includes those before it, except that avx_vnni may be
missing:

    portable     any CPU
    avx2         AVX2 and FMA
    avx_vnni     dot products of bytes (AVX-VNNI); otherwise the kernels of avx2
    avx512       AVX-512 F, BW, DQ and VL: wider products and convolutions; otherwise the kernels of avx2
    avx512_vnni  VNNI and VBMI; the float products of avx512
    avx512_bf16  bfloat16 products; otherwise the kernels of avx512_vnni
    amx          matrix tiles of int8 and bfloat16

On AArch64, by the names of Arm's features:

    portable     plain loops
    neon         available on all of them
    neon_dotprod dot products of four bytes (FEAT_DotProd)
    neon_i8mm    matrix products of int8 (FEAT_I8MM)
    neon_bf16    matrix products of bfloat16 (FEAT_BF16)
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hop.compat import eager, inductor, tracing, values
from hop.dispatch import plan
from hop.dispatch.kernel import Declined
from hop.kernels.cpu import operators as native_operators

_logger = logging.getLogger("hop")
_PLAIN = (Tensor, torch.nn.Parameter)
_VERSION = 15  # of the C interface
LEVELS_OF = {
    "x86_64": ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    "aarch64": ("portable", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16"),
}
"""Levels by architecture, numbered as in native/common/cpu.h."""


def levels_of(machine: str) -> tuple[str, ...]:
    """The levels of an architecture, named as by platform.machine(); those of x86-64 if it has none."""
    return LEVELS_OF["aarch64" if machine in ("aarch64", "arm64") else "x86_64"]


LEVELS = levels_of(platform.machine())
_OFF = "off"
_REORDER = "HOP_REORDER_FEW_ROWS"


class Library:
    """The native library, and the level that may be used."""

    def __init__(self) -> None:
        self.functions, self.missing = load(Path(__file__).parents[2])
        self.best = None if self.functions is None else LEVELS[self.functions.hop_best_level()]
        self.off, self.path = False, _OFF
        self.file: str | None = None if self.functions is None else self.functions._name
        if self.functions is not None:
            if self.functions.hop_lacks_avx512():
                _logger.warning(
                    "the native kernels were built without AVX-512, which this CPU has, so the best level here is %s; "
                    "for faster kernels, install hop again",
                    self.best,
                )
            asked = os.environ.get("HOP_NATIVE") or LEVELS[self.functions.hop_best_level()]
            self.set(self.checked(asked, "environment variable HOP_NATIVE"))
            said = os.environ.get(_REORDER, "0")
            if said not in ("0", "1"):
                raise ValueError(f"environment variable {_REORDER} must be 0 or 1, got {said!r}")
            self.functions.hop_reorder_few_rows(int(said))

    def set(self, path: str) -> None:
        """Use `path`, one of LEVELS or "off"."""
        self.off = path == _OFF
        if self.functions is not None and not self.off:
            self.functions.hop_use_level(LEVELS.index(path))
        self.path = path
        plan.forget()

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the library's file; empty without one."""
        return "" if self.file is None else hashlib.sha256(Path(self.file).read_bytes()).hexdigest()[:32]

    def declines(self) -> str | None:
        """Why native kernels must not be used; None if they may."""
        return self.missing or ("native kernels are switched off" if self.off else None)

    def checked(self, path: str, what: str) -> str:
        """Return `path` if it is "off" or a level of this CPU, else raise ValueError. Without a library any level is
        valid.
        """
        if path not in (*LEVELS, _OFF):
            raise ValueError(f"{what} must be one of {(*LEVELS, _OFF)}, got {path!r}")
        if self.best is not None and path != _OFF and path not in self.levels():
            raise ValueError(
                f"{what} is {path!r}, which this CPU or build does not have: its level is {self.best!r}; use one of "
                f"{(*self.levels(), _OFF)}"
            )
        return path

    def levels(self) -> tuple[str, ...]:
        """The levels of this CPU, the best one last; empty without a library."""
        has = None if self.functions is None else self.functions.hop_has_level
        return () if has is None else tuple(level for i, level in enumerate(LEVELS) if has(i))


def load(folder: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """Load the native library in a folder. Returns the library, or None and the reason."""
    libraries = sorted(folder.glob("_native*.so"))
    if not libraries:
        why = folder / "_native.txt"  # written by native/build.cmake
        unsaid = "they are for Linux and macOS" if os.name == "nt" else "no build log was found"
        said = _errors(why.read_text("utf-8")) if why.exists() else unsaid
        return None, f"the native kernels were not built ({said}): install hop where there is a C++ compiler"
    try:
        functions = ctypes.CDLL(str(libraries[0]))
        version = functions.hop_version()
        if version == _VERSION:
            native_operators.load(str(libraries[0]))
    except (OSError, AttributeError) as e:
        return None, f"the native kernels cannot be loaded: {e}"
    if version != _VERSION:
        return None, f"the native kernels have version {version}, not {_VERSION}: install hop again"
    return functions, None


def _errors(output: str) -> str:
    """The first errors in the output of CMake and the compiler, in one line."""
    configuring = re.search(r"^CMake Error(?: at [^\n]*)?:\s*(.*?)(?=\n\S|\Z)", output, re.DOTALL | re.MULTILINE)
    if configuring:
        # what follows is advice for authors of CMake files
        return " ".join(configuring[1].split()).partition(". ")[0][:300]
    lines = output.splitlines()
    errors = [line for line in lines if re.search(r"\berror:|undefined", line)] or lines[-3:]
    return "; ".join(line[:300] for line in errors[:3])


@functools.cache
def library() -> Library:
    """The library, loaded once."""
    return Library()


values.STATE.append(lambda: f"native {library().path} {library().best} {library().digest}")


@contextlib.contextmanager
def use(path: str) -> Iterator[None]:
    """Context manager that restricts kernels to a CPU level, in all threads of this process.

    Args:
        path: "off", or one of LEVELS.

    Raises:
        ValueError: path is invalid, or a level above the CPU's own.
    """
    one = library()
    one.checked(path, "path")
    before = one.path if one.functions is not None else _OFF
    one.set(path)
    try:
        yield
    finally:
        one.set(before)


@contextlib.contextmanager
def reordering_few_rows() -> Iterator[None]:
    """Context manager that allows another summation order for one or two rows of floats times a packed weight.

    This is faster at level amx; other levels have only one order. It applies to all threads of this process. The
    environment variable HOP_REORDER_FEW_ROWS=1 sets the default; it is 0 unless set.
    """
    functions = library().functions
    before = 0 if functions is None else functions.hop_reorder_few_rows(1)
    try:
        yield
    finally:
        if functions is not None:
            functions.hop_reorder_few_rows(before)


def declines_here(device: torch.device | None = None) -> str | None:
    """Why native kernels must not be used for a call made or traced now, with operands on
    `device`; None if they may.
    """
    if (reason := library().declines()) is not None:
        return reason
    if not inductor.may_be_native():
        return "for eager mode, programs compiled for this process, and those that keep native operators"
    return None if device is None or device.type == "cpu" else f"for the CPU, but the operands are on {device}"


def sizes(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """A shape with numbers in place of symbols. Raises Declined if one is unknown."""
    known = tracing.hints(shape)
    if known is None:
        raise Declined(f"the sizes {tuple(shape)} are unknown")
    return known


def declines_tensor(name: str, x: Tensor) -> str | None:
    """Why native kernels cannot read `x`; None if they can."""
    known = type(x) in _PLAIN or not eager.is_plain_eager()
    if not known or not x.is_cpu or x.layout != torch.strided or x.is_neg():
        return f"for plain tensors on the CPU, but {name} is a {type(x).__name__} on {x.device}"
    return None
