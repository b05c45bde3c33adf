"""Names and folder of compiled programs on disk, so that later processes find them.

A name is a digest of everything that a program depends on: the classes of the model's modules and quantizers with
their source files, their settings, the form of each tensor, the configuration, versions and CPU. Tensor values are not
part of it.
"""

import functools
import hashlib
import inspect
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hop.compat import packages, subclasses, values
from hop.compat.modules import has_hooks
from hop.numerics.spelling import Value

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Attributes of every module, which are excluded: tensors and submodules are described separately, forward hooks prevent
# reuse altogether, and loading hooks, whose ids count up within a process, do not affect programs.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_COVERED = frozenset({"torch", values.PACKAGE, *sys.stdlib_module_names})  # by versions, and by program_key


def folder(given: str | Path | None) -> Path:
    """The folder of programs, created if needed: the given one, or one in Inductor's cache folder.

    Raises:
        PermissionError: the folder belongs to another user, or others may write to it: machine code is loaded from it.
    """
    path = packages.cache_folder() / "hop_decode" if given is None else Path(given)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or mode & 0o022):
        raise PermissionError(
            f"compile_decode: the folder of programs, {path}, has owner {status.st_uid} and mode {mode:o}; it must be "
            f"yours ({os.getuid()}), and no one else may write to it, as machine code is loaded from it; give "
            "another one"
        )
    return path


def digest(step: nn.Module, rest: Sequence[object], ignored: Sequence[str] = ()) -> str | None:
    """The name of a module's program.

    Args:
        step: the module.
        rest: further values that the program depends on.
        ignored: the names of settings that it does not depend on.

    Returns:
        The name; None if the program depends on something that cannot be digested: hooks, or an instance that overrides
        forward.
    """
    modules = list(step.named_modules())
    if any(has_hooks(m) or "forward" in m.__dict__ for _, m in modules):
        return None
    left_out = {*_OWN, *ignored}
    parts = [str(value) for value in (torch.__version__, transformers.__version__, *rest)]
    for name, module in modules:
        settings = {k: _describe_setting(v) for k, v in sorted(module.__dict__.items()) if k not in left_out}
        parts.append(f"{name} {_name(type(module))} {settings} {getattr(module, 'scheme', None)}")
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        parts += [f"{own} {values.cache_key(t)}" for own, t in tensors]
    parts += [values.program_key(lowers_values=False), *sorted(map(_code, _classes(step)))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def is_lasting(step: nn.Module) -> bool:
    """Whether later processes give the module's program the same name: its classes have source files."""
    return all(map(_source, _classes(step)))


def _classes(step: nn.Module) -> set[type]:
    """The classes whose code a program may run: of modules and values, with their bases, without PyTorch's and ours."""
    found: set[type] = set()
    for module in step.modules():
        found.add(type(module))
        _add_classes_of([*module.__dict__.values(), getattr(module, "scheme", None)], found)
        _add_classes_of([*module.parameters(recurse=False), *module.buffers(recurse=False)], found)
    bases = {base for cls in found for base in cls.__mro__}
    return {cls for cls in bases if cls.__module__.partition(".")[0] not in _COVERED}


def _add_classes_of(x: object, found: set[type]) -> None:
    """Add the classes of all values in x."""
    if isinstance(x, Value):
        found.add(type(x))
        _add_classes_of(vars(x), found)
    elif isinstance(x, list | tuple):
        for item in x:
            _add_classes_of(item, found)
    elif isinstance(x, dict):
        for item in x.values():
            _add_classes_of(item, found)
    elif isinstance(x, Tensor):
        _add_classes_of([subclasses.context(x), *subclasses.parts(x)], found)


def _describe_setting(x: object) -> Any:
    """A hashable description of a module's setting; objects are described by their class name only."""
    if isinstance(x, _PLAIN):
        return str(x)
    if isinstance(x, list | tuple):
        return [_describe_setting(v) for v in x]
    if isinstance(x, dict):
        return {str(k): _describe_setting(v) for k, v in x.items()}
    if isinstance(x, transformers.PreTrainedConfig):
        return {**_describe_setting(x.to_dict()), "attention": x._attn_implementation}
    return repr(x) if isinstance(x, Value) else type(x).__qualname__


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.cache
def _code(cls: type) -> str:
    """A class's name and a hash of its source file; a random number if there is none, as for classes of a notebook."""
    return f"{_name(cls)} {_source(cls) or secrets.token_hex(8)}"


@functools.cache
def _source(cls: type) -> str | None:
    try:
        return _file(inspect.getsourcefile(cls) or "")
    except (OSError, TypeError):
        return None


@functools.cache
def _file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
