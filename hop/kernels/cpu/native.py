"""The native kernels: C++ behind a C interface, loaded if they were built.

What they may use is found at run time, and can be set to less: by the environment variable HOP_NATIVE, or by `use`, to
"off", PyTorch's own operators alone, or to a level of CPU. Each level has all that those before it have:

    portable       what any CPU has
    avx2           AVX2 and FMA
    avx512         AVX-512 F, BW, DQ and VL: the kernels are those of avx2
    avx512_vnni    with VNNI and VBMI
    avx512_bf16    with products of bfloat16: floats have kernels of their own, all else those of avx512_vnni
    amx            with matrix tiles of int8 and bfloat16

and on AArch64, by the names that Arm gives what each adds:

    portable       plain loops
    neon           what all of them have
    neon_dotprod   with dot products of four bytes (FEAT_DotProd)
    neon_i8mm      with matrix products of int8 (FEAT_I8MM)
    neon_bf16      with matrix products of bfloat16 (FEAT_BF16)
"""

import contextlib
import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, inductor, tracing
from hop.dispatch import plan
from hop.dispatch.kernel import Declined
from hop.kernels.cpu import operators as native_operators

_PLAIN = (Tensor, torch.nn.Parameter)
_VERSION = 12  # of the C interface
LEVELS_OF = {
    "x86_64": ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    "aarch64": ("portable", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16"),
}
"""By architecture, as native/common/cpu.h counts them."""


def levels_of(machine: str) -> tuple[str, ...]:
    """The levels of an architecture, as platform.machine() names it; of x86-64 where it has none of its own."""
    return LEVELS_OF["aarch64" if machine in ("aarch64", "arm64") else "x86_64"]


LEVELS = levels_of(platform.machine())
_OFF = "off"
_REORDER = "HOP_REORDER_FEW_ROWS"


class Library:
    """The native library, and what may be used of it."""

    def __init__(self) -> None:
        self.functions, self.missing = load(Path(__file__).parents[2])
        self.best = None if self.functions is None else LEVELS[self.functions.hop_best_level()]
        self.off, self.path = False, _OFF
        self.file: str | None = None if self.functions is None else self.functions._name
        if self.functions is not None:
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

    def declines(self) -> str | None:
        """Why native kernels are not to be used, or None."""
        return self.missing or ("native kernels are switched off" if self.off else None)

    def checked(self, path: str, what: str) -> str:
        """`path`, if it is "off" or a level that this CPU has. Without a library any level will do."""
        if path not in (*LEVELS, _OFF):
            raise ValueError(f"{what} must be one of {(*LEVELS, _OFF)}, got {path!r}")
        if self.best is not None and path != _OFF and path not in self.levels():
            raise ValueError(
                f"{what} is {path!r}, which this CPU does not have: its level is {self.best!r}; take one of "
                f"{(*self.levels(), _OFF)}"
            )
        return path

    def levels(self) -> tuple[str, ...]:
        """The levels that this CPU has, the best one last; none where there is no library."""
        return () if self.best is None else LEVELS[: LEVELS.index(self.best) + 1]


def load(folder: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """The native library in a folder, or why there is none."""
    libraries = sorted(folder.glob("_native*.so"))
    if not libraries:
        why = folder / "_native.txt"  # native/build.cmake wrote it
        unsaid = "they are for Linux and macOS" if os.name == "nt" else "nothing says why"
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
        return " ".join(configuring[1].split()).partition(". ")[0][:300]  # then comes advice for those who write CMake
    lines = output.splitlines()
    errors = [line for line in lines if re.search(r"\berror:|undefined", line)] or lines[-3:]
    return "; ".join(line[:300] for line in errors[:3])


@functools.cache
def library() -> Library:
    """The one library."""
    return Library()


@contextlib.contextmanager
def use(path: str) -> Iterator[None]:
    """Within it, kernels take this CPU for one of the level named, in all threads of this process.

    Args:
        path: "off", or one of LEVELS.

    Raises:
        ValueError: path is none of these, or a level above the CPU's own."""
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
    """Within it, one or two rows of floats by a packed weight may be summed in another order than more rows, in all
    threads of this process: at level amx, where it is faster. Other levels have no such order. Elsewhere the
    environment variable HOP_REORDER_FEW_ROWS says so, by 1; it is 0 unless set."""
    functions = library().functions
    before = 0 if functions is None else functions.hop_reorder_few_rows(1)
    try:
        yield
    finally:
        if functions is not None:
            functions.hop_reorder_few_rows(before)


def declines_here(device: torch.device | None = None) -> str | None:
    """Why native kernels are not to be used for a call that is made or traced now, of operands on `device`, or None."""
    if (reason := library().declines()) is not None:
        return reason
    if not inductor.may_be_native():
        return "for eager mode, programs that are compiled for this process, and those that keep native operators"
    return None if device is None or device.type == "cpu" else f"for the CPU, and the operands are on {device}"


def sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape with numbers for symbols. Raises Declined where one is unknown."""
    known = tracing.hints(shape)
    if known is None:
        raise Declined(f"nothing is known of the sizes {tuple(shape)}")
    return known


def declines_tensor(name: str, x: Tensor) -> str | None:
    """Why they cannot take `x`, or None."""
    known = type(x) in _PLAIN or not eager.is_plain_eager()
    if not known or not x.is_cpu or x.layout != torch.strided or x.is_neg():
        return f"for plain tensors on the CPU, and {name} is a {type(x).__name__} on {x.device}"
    return None
