"""Changes inside NVIDIA's packages while they compile: one record for each, applied only here.

A record names the fault, the package and its versions that have it, and is the context manager that changes it: in
other versions it changes nothing. Its test runs without it, and fails once the package no longer needs it.
"""

import contextlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Version = tuple[int, ...]

TESTED: dict[str, tuple[Version, ...]] = {
    "nvidia-cutlass-operators": ((0, 3, 0),),
    "nvidia-cutlass-dsl": ((4, 8, 1),),
}
"""The versions of each package that the kernels are compiled with in tests."""


@dataclass
class Patch:
    """A change to a package for as long as a `with` block runs."""

    name: str
    package: str
    fault: str
    """The behaviour of the package without this patch."""
    change: Callable[..., AbstractContextManager[None]]
    since: Version | None = None
    """The first tested version of the package that has the fault; None for the first of all."""
    until: Version | None = None
    """The first tested version of the package that does without it."""
    active: bool = True
    """False in the test of the fault."""

    def has_fault(self, version: Version) -> bool:
        """Whether that version of the package has the fault."""
        return (self.since is None or version >= self.since) and (self.until is None or version < self.until)

    @property
    def is_needed(self) -> bool:
        """Whether the installed version has the fault."""
        return self.has_fault(installed(self.package))

    def __call__(self, *args: Any) -> AbstractContextManager[None]:
        return self.change(*args) if self.active and self.is_needed else contextlib.nullcontext()


PATCHES: dict[str, Patch] = {}
"""All of them by name."""


def installed(package: str) -> Version:
    """The version of an installed package as a tuple, such as (4, 8, 1)."""
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(package))[:3]))


def _changing(
    package: str, fault: str, *, since: Version | None = None, until: Version | None = None
) -> Callable[[Callable[..., Iterator[None]]], Patch]:
    """The record of a change, named as the function that makes it and takes it back."""

    def enter(change: Callable[..., Iterator[None]]) -> Patch:
        name = change.__name__
        made = PATCHES[name] = Patch(name, package, fault, contextlib.contextmanager(change), since, until)
        return made

    return enter


@_changing(
    "nvidia-cutlass-operators",
    "kernels with a fused epilogue or scales of groups ask the device, when they are compiled, how many clusters it "
    "can run: without a GPU they do not compile, and beside another GPU they hold that one's number",
)
def multiprocessors(count: int) -> Iterator[None]:
    """The answer follows from the count of multiprocessors that is given, one block on each."""
    import cutlass.utils

    class Hardware:
        def get_max_active_clusters(self, size: int) -> int:
            return count // size

    own = cutlass.utils.HardwareInfo
    setattr(cutlass.utils, "HardwareInfo", Hardware)  # noqa: B010, of another type
    try:
        yield
    finally:
        setattr(cutlass.utils, "HardwareInfo", own)  # noqa: B010


@_changing(
    "nvidia-cutlass-operators",
    "kernels without a fused epilogue use schedulers of tiles of which nvidia-cutlass-dsl warns that they will move",
)
def moved_schedulers() -> Iterator[None]:
    """Hide the warning, which callers of a product cannot act on."""
    with _unheeded("Migrated to examples/CuTeDSL"):
        yield


@_changing(
    "nvidia-cutlass-operators",
    "kernels with a fused epilogue or scales of groups divide by a class of which nvidia-cutlass-dsl warns that it is "
    "superseded",
)
def superseded_divisors() -> Iterator[None]:
    """Hide the warning, which callers of a product cannot act on."""
    with _unheeded("FastDivmodDivisor is deprecated"):
        yield


@contextlib.contextmanager
def _unheeded(beginning: str) -> Iterator[None]:
    """Leaves out the warnings of what is deprecated that begin so, and no others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", beginning, DeprecationWarning)
        yield
