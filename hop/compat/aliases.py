"""Other names of modules: `hop.formats` for hop.numerics.formats, and the names of earlier versions, which warn."""

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

RENAMED = {  # since 0.1; they go with 0.3
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("blocks", "copies", "memory_format", "packing", "spelling")},
    "hop.scaling": "hop.numerics.scale_rules",
    "hop.proto": "hop.tensor.proto",
    "hop.kernels.native": "hop.kernels.cpu.native",
}


NAMES = {  # in modules, likewise: their places now
    "hop.numerics.scale_rules": {"Given": "hop.scale_rules.Static"},
    "hop.numerics.schemes": {
        "INT4_W": "hop.schemes.INT4_WEIGHT_32",
        "TERNARY_WEIGHT": "hop.schemes.INT8_DA_TERNARY_W",
        **{name: f"hop.recipes.{name}" for name in ("INT8_TRAINING", "FP8_HYBRID", "FP8_DELAYED", "FP8_BLOCKWISE")},
        **{name: f"hop.recipes.{name}_TRAINING" for name in ("MXFP8", "NVFP4")},
    },
}


def module(name: str, stacklevel: int = 3) -> ModuleType | None:
    """The module that has another name, by it; None for a name that none has. Warns who is `stacklevel` calls up."""
    new = PUBLIC.get(name) or RENAMED.get(name)
    if name in RENAMED:
        shown = "hop.scale_rules" if name == "hop.scaling" else new
        warnings.warn(f"{name} is now {shown}, and goes with hop 0.3", DeprecationWarning, stacklevel)
    return None if new is None else importlib.import_module(new)


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its other name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        known = fullname in PUBLIC or fullname in RENAMED
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        original = module(spec.name)  # called by an import statement: Python leaves its own frames out
        assert original is not None
        spec.loader_state = original.__spec__
        return original

    def exec_module(self, module: ModuleType) -> None:
        """It has run; importlib has just given it the other name's spec."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Aliases())  # before what may lie about from an earlier version


def install() -> None:
    """Let modules that are imported have their other names as attributes too."""
    parents = {name.rpartition(".")[0] for name in (*PUBLIC, *RENAMED)} - {"hop", "hop.export"}
    for parent in parents | set(NAMES) | set(PUBLIC.values()) & set(sys.modules):
        vars(sys.modules[parent])["__getattr__"] = functools.partial(_named, parent)


def _named(parent: str, name: str) -> Any:
    new = NAMES.get(parent, {}).get(name)
    if new is not None:
        old = f"{parent.replace('.numerics', '')}.{name}"
        warnings.warn(f"{old} is now {new}, and goes with hop 0.3", DeprecationWarning, stacklevel=2)
        of, _, own = new.rpartition(".")
        return getattr(importlib.import_module(of), own)
    if (renamed := module(f"{parent}.{name}")) is None:
        raise no_attribute(parent, name)
    return renamed


def no_attribute(parent: str, name: str) -> AttributeError:
    """What a module says of a name that it has not: the name that is nearest, if one is near."""
    shown = next((public for public, own in PUBLIC.items() if own == parent), parent)
    message = f"module {shown!r} has no attribute {name!r}"
    if name.startswith("_"):  # asked of every module, by Python itself
        return AttributeError(message)
    known = {own.lower(): own for own in dir(sys.modules[parent]) if not own.startswith("_")}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return AttributeError(f"{message}; {f'take {known[near[0]]}' if near else f'call dir({shown}) for its names'}")
