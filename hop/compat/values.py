"""Frozen values of ours as constants of compiled programs, and keys for PyTorch's caches on disk."""

import functools
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._library import opaque_object
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def register_value(cls: type) -> None:
    """Let instances of `cls` be constants of compiled programs; equal ones share a program.

    torch 2.11 to 2.14 call such classes opaque types, 2.15 calls them custom classes. 2.11 requires a metaclass, which
    it uses to recognize the proxies that it traces such values as; `patches.opaque_values` makes it trace the values.
    """
    if not is_ours(cls):
        FOREIGN[cls.__qualname__] = secrets.token_hex(8)
    # A class that is defined again, as in a notebook, replaces the first one of that name.
    core: Any = torch._C
    name = f"{cls.__module__}.{cls.__qualname__}"
    if hasattr(core, "_unregister_opaque_type") and core._is_opaque_type_registered(name):
        core._unregister_opaque_type(name)
    module: Any = opaque_object
    if hasattr(module, "register_custom_class"):
        module.register_custom_class(cls, typ="constant")
        return
    asked, module.OpaqueBaseMeta = module.OpaqueBaseMeta, type
    try:
        module.register_opaque_type(cls, typ="value")
    finally:
        module.OpaqueBaseMeta = asked


PACKAGE = __name__.partition(".")[0]
FOREIGN: dict[str, str] = {}
"""A random number for each class of values that is defined outside of this package, whose code no digest covers."""
STATE: list[Callable[[], str]] = []
"""Functions that describe what the lowering of our operators depends on, other than sources, such as the CPU level.

A function of a module that `import hop` leaves out returns "" in the default state, so that keys do not depend on what
has been imported.
"""


def is_ours(cls: type) -> bool:
    """Whether a class is defined in this package."""
    return cls.__module__.partition(".")[0] == PACKAGE


def cache_key(x: object) -> str:
    """A key for AOTAutograd's cache on disk, returned by `_stable_hash_for_caching` of subclasses.

    It contains the properties of the tensor that a program may depend on.
    """
    return f"{_described(x)} {sources()}"


def program_key(lowers_values: bool = True) -> str:
    """A digest of all that compiled programs depend on besides their graphs and inputs, which PyTorch's caches hash.

    Our operators choose kernels, and our patches change Inductor, while a program is compiled. So it covers the sources
    of this package, every description in STATE, and environment variables. Programs with `lowers_values` may
    also run code of classes of values that others define; where there are any, such programs are reused within a
    process only.
    """
    names = sorted(name for name in os.environ if name.startswith("HOP_") and name not in _ELSEWHERE)
    environment = [(name, os.environ[name]) for name in names]
    state = sorted(filter(None, (describe() for describe in STATE)))
    parts = (sources(), environment, state, sorted(FOREIGN.items()) if lowers_values else [])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_ELSEWHERE = ("HOP_NATIVE", "HOP_AVX512", "HOP_CACHE_DIR")
# The CPU level and the native library are in STATE, and a folder of files changes no program.


@functools.cache
def sources() -> str:
    """A digest of the Python files of this package, and of the kernels for GPUs that come with it."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[2]
    for package in (PACKAGE, "cutlass_kernels"):
        for file in sorted((folder / package).rglob("*.py")):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _described(x: object) -> str:
    """All properties of a tensor and its inner tensors that a program may depend on.

    Programs with symbolic sizes are not cached: the cache could not check their guards.
    """
    if not isinstance(x, torch.Tensor):
        return type(x).__qualname__
    if any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())):
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache(f"{type(x).__name__} with symbolic sizes")
    plain = f"{type(x).__qualname__}{tuple(x.shape)}{tuple(x.stride())}{x.dtype}{x.device}{x.requires_grad}"
    if not is_traceable_wrapper_subclass(x):
        return plain
    names, context = x.__tensor_flatten__()
    return f"{plain}{context!r}{[(name, _described(getattr(x, name))) for name in names]}"
