"""Other names of modules: `hop.formats` for hop.numerics.formats, and the names of earlier versions, which warn."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PUBLIC = {
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("calibration", "formats", "hadamard", "layouts", "presets")},
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("quantizer", "requantization", "scale_rules", "schemes")},
    "hop.storage": "hop.tensor.storage",
    "hop.export.onnx": "hop.export.targets.onnx",
}

RENAMED = {  # since 0.1; they go with 0.3
    **{f"hop.{name}": f"hop.numerics.{name}" for name in ("blocks", "copies", "memory_format", "packing", "spelling")},
    "hop.scaling": "hop.numerics.scale_rules",
    "hop.proto": "hop.tensor.proto",
    "hop.kernels.native": "hop.kernels.cpu.native",
}


NAMES = {"hop.numerics.scale_rules": {"Given": "Static"}}  # in modules, likewise


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its other name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        known = fullname in PUBLIC or fullname in RENAMED
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(PUBLIC.get(spec.name) or RENAMED[spec.name])
        spec.loader_state = module.__spec__
        if spec.name in RENAMED:
            new = "hop.scale_rules" if spec.name == "hop.scaling" else module.__name__
            warnings.warn(f"{spec.name} is now {new}, and goes with hop 0.3", DeprecationWarning, stacklevel=2)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; importlib has just given it the other name's spec."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Aliases())  # before what may lie about from an earlier version


def install() -> None:
    """Let modules that are imported have their names of earlier versions too."""
    for module, names in NAMES.items():

        def named(name: str, module: str = module, names: dict[str, str] = names) -> Any:
            if name not in names:
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
            message = f"{module}.{name} is now {names[name]}, and goes with hop 0.3"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[module], names[name])

        vars(sys.modules[module])["__getattr__"] = named
