"""Other names of modules: `hop.formats` for hop.numerics.formats, and deprecated names of earlier versions."""

import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PUBLIC = {
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("calibration", "estimators", "formats", "hadamard")},
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("layouts", "presets", "quantizer", "recipes")},
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("requantization", "scale_rules")},
    "hop.attention_schemes": "hop.numerics.attention_schemes",
    "hop.distributed": "hop.nn.distributed",
    "hop.integer_functions": "hop.numerics.integer_functions",
    "hop.schemes": "hop.numerics.schemes",
    "hop.storage": "hop.tensor.storage",
    "hop.export.onnx": "hop.export.targets.onnx",
}

RENAMED = {  # since 0.1, removed in 0.3
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("blocks", "copies", "memory_format", "packing", "spelling")},
    "hop.scaling": "hop.numerics.scale_rules",
    "hop.proto": "hop.tensor.proto",
    "hop.kernels.native": "hop.kernels.cpu.native",
}


NAMES = {  # likewise names in modules: their current places
    "hop.numerics.scale_rules": {"Given": "hop.scale_rules.Static"},
    "hop.numerics.schemes": {
        "INT4_W": "hop.schemes.INT4_WEIGHT_32",
        "TERNARY_WEIGHT": "hop.schemes.INT8_DA_TERNARY_W",
        **{name: f"hop.recipes.{name}" for name in ("INT8_TRAINING", "FP8_HYBRID", "FP8_DELAYED", "FP8_BLOCKWISE")},
        **{name: f"hop.recipes.{name}_TRAINING" for name in ("MXFP8", "NVFP4")},
    },
}


def module(name: str, stacklevel: int = 3) -> ModuleType | None:
    """The module with an alias; None if there is none. Deprecated names warn, `stacklevel` calls up."""
    new = PUBLIC.get(name) or RENAMED.get(name)
    if name in RENAMED:
        shown = "hop.scale_rules" if name == "hop.scaling" else new
        warnings.warn(f"{name} is now {shown}, and will be removed in hop 0.3", DeprecationWarning, stacklevel)
    return None if new is None else importlib.import_module(new)


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that finds modules by their aliases."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        known = fullname in PUBLIC or fullname in RENAMED
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        original = module(spec.name)  # called by an import statement: Python leaves its own frames out of the warning
        assert original is not None
        spec.loader_state = original.__spec__
        return original

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec: the module has already run, and importlib has just given it the alias's spec."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Aliases())  # before files that an earlier version may have left behind


def install() -> None:
    """Add the aliases as attributes to modules that are already imported."""
    parents = {name.rpartition(".")[0] for name in (*PUBLIC, *RENAMED)} - {"hop", "hop.export"}
    for parent in parents | set(NAMES) | set(PUBLIC.values()) & set(sys.modules):
        vars(sys.modules[parent])["__getattr__"] = functools.partial(_named, parent)


def _named(parent: str, name: str) -> Any:
    new = NAMES.get(parent, {}).get(name)
    if new is not None:
        old = f"{parent.replace('.numerics', '')}.{name}"
        warnings.warn(f"{old} is now {new}, and will be removed in hop 0.3", DeprecationWarning, stacklevel=2)
        of, _, own = new.rpartition(".")
        return getattr(importlib.import_module(of), own)
    if (renamed := module(f"{parent}.{name}")) is None:
        raise no_attribute(parent, name)
    return renamed


def no_attribute(parent: str, name: str) -> AttributeError:
    """The error for a name that a module does not have; it suggests the most similar name, if there is one."""
    shown = next((public for public, own in PUBLIC.items() if own == parent), parent)
    message = f"module {shown!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python itself asks every module for such names
        return AttributeError(message)
    known = {own.lower(): own for own in dir(sys.modules[parent]) if not own.startswith("_")}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return AttributeError(f"{message}; {f'use {known[near[0]]}' if near else f'call dir({shown}) for its names'}")
