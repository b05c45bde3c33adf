"""What the library shows: `__all__` of each public module, its docstrings, its pages, and nothing besides."""

import importlib
import inspect
import re
import unittest
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from parameterized import parameterized

import hop

ROOT = Path(__file__).parents[2]
MODULES = [name for name in hop.__all__ if isinstance(getattr(hop, name), ModuleType)]
PUBLIC = ["hop", *(f"hop.{name}" for name in MODULES if name != "integrations")]  # whose names need other packages
EACH = parameterized.expand([(name,) for name in PUBLIC])
LISTS = (
    "ATTENTION_SCHEMES",
    "PRESETS",
    "RECIPES",
    "SCHEMES",
)  # constants by their names, which stand in `__all__` in the same order
API = "".join(p.read_text() for p in ROOT.glob("docs/api/*.md"))
DOCUMENTED = set(re.findall(r"^\.\. auto\w+:: (\S+)$", API, re.M))
OPTIONAL = set(re.findall(r"^\.\. py:function:: hop\.(?:integrations\.)?(\w+)", API, re.M))  # which need transformers


def values(module: ModuleType) -> dict[str, Any]:
    """What the module shows without underscore, but other modules."""
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, ModuleType)}


def described(module: ModuleType) -> dict[str, Any]:
    """The functions and classes of its `__all__`."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in found.items() if isinstance(value, type) or callable(value)}


def is_ours(value: Any) -> bool:
    """Whether it is a value of a type of ours, or a list of such."""
    inside = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    if inside:
        return all(map(is_ours, inside))
    return not isinstance(value, type | FunctionType) and type(value).__module__.split(".")[0] == "hop"


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions and modules; 3 before 16."""
    natural = re.sub(r"\d+", lambda digits: digits.group().zfill(4), name)
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), natural


class TestPublicNames(unittest.TestCase):
    @EACH
    def test_all_exists_in_order(self, name):
        module = importlib.import_module(name)
        lists = [getattr(module, each) for each in LISTS if each in module.__all__]
        listed = [key for each in lists for key in each]
        own = module.__all__[: len(module.__all__) - len(listed)]
        assert len(set(module.__all__)) == len(module.__all__)
        assert module.__all__ == [*sorted(own, key=order), *listed]
        assert all(hasattr(module, key) for key in module.__all__)

    @EACH
    def test_star_gives_these(self, name):
        found: dict[str, Any] = {}
        exec(f"from {name} import *", found)
        assert {key for key in found if key != "__builtins__"} == set(importlib.import_module(name).__all__)

    @EACH
    def test_docstrings(self, name):
        for key, value in described(importlib.import_module(name)).items():
            own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
            assert own and not own.startswith(f"{key}("), f"{name}.{key} has no docstring of its own"  # a dataclass's

    @EACH
    def test_no_constant_leaks(self, name):
        """A constant that came along with an import looks like one of the module's: schemes.INT8 was a format."""
        module = importlib.import_module(name)
        leaked = {key for key, value in values(module).items() if is_ours(value)} - set(module.__all__)
        assert not leaked, f"{name} shows {sorted(leaked)}, which are not in its __all__"

    @EACH
    def test_pages_have_the_same(self, name):
        module = importlib.import_module(name)
        documented = {full.rpartition(".")[2] for full in DOCUMENTED if full.rpartition(".")[0] == name}
        assert documented <= set(module.__all__), f"documented, and not in {name}.__all__"
        elsewhere = {id(_object(full)) for full in DOCUMENTED}
        missing = {key for key, value in described(module).items() if id(value) not in elsewhere} - OPTIONAL
        assert not missing, f"{name} has {sorted(missing)}, which docs/api does not document"

    @EACH
    def test_pages_name_each_constant(self, name):
        module = importlib.import_module(name)
        text = "".join(p.read_text() for p in ROOT.glob("docs/**/*.md"))
        named = set(re.findall(r"[A-Z][A-Z0-9_]+", " ".join(re.findall(r"`[^`\n]+`", text))))
        assert {key for key in module.__all__ if key.isupper()} <= named

    def test_what_would_fail(self):
        """The check of constants sees values, lists of them, and no classes."""
        from hop import formats, optim, presets

        assert is_ours(formats.INT8) and is_ours(presets.PRESETS) and is_ours(formats.FORMATS) and is_ours(optim.BITS8)
        assert not is_ours(formats.Integer) and not is_ours("ste") and not is_ours(()) and not is_ours(1.0)
        assert not hasattr(presets, "INT8")
        with pytest.raises(ImportError):
            exec("from hop.schemes import INT8", {})


def _object(full: str) -> Any:
    parent, _, own = full.rpartition(".")
    return inspect.getattr_static(importlib.import_module(parent), own, None) or getattr(
        importlib.import_module(parent), own
    )
