"""The table of every public name in docs/api/0_names.md, from `__all__` and the first sentences of docstrings."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hop
from tests.support import pages

INTEGRATIONS = Path(hop.__file__).parent / "integrations"
_LONGEST = 110  # characters of a constant's value that are shown


def modules() -> list[str]:
    """The public modules: hop, then those in its `__all__`."""
    return ["hop", *(f"hop.{name}" for name in hop.__all__ if isinstance(getattr(hop, name), ModuleType))]


def public(module: str) -> dict[str, str]:
    """A line for each public name of a module except modules, in the order of its `__all__`."""
    found, lines = importlib.import_module(module), {}
    optional = _docstrings() if module in ("hop", "hop.integrations") else {}
    for name in found.__all__:
        if name in optional:
            lines[name] = _sentence(optional[name])
        elif not isinstance(value := getattr(found, name), ModuleType):
            lines[name] = _line(value)
    return lines


def _docstrings() -> dict[str, str]:
    """The docstrings in hop.integrations, read from the files: importing them needs transformers."""
    nodes = [node for path in INTEGRATIONS.glob("*.py") for node in ast.parse(path.read_text()).body]
    found = {n.name: ast.get_docstring(n) or "" for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    return {name: text for name, text in found.items() if name in {*hop.__all__, *hop.integrations.__all__}}


def names() -> str:
    """A table for each public module, below the number of names."""
    found = {module: public(module) for module in modules()}
    every = [name for lines in found.values() for name in lines]
    constants = sum(map(str.isupper, every))
    kinds = f"{len(every) - constants} functions and classes, {constants} constants"
    parts = [f"{len(every)} names in {len(found)} modules: {kinds}.", ""]
    for module, lines in found.items():
        rows = [[f"`{name}`", line] for name, line in lines.items()]
        parts += [f"## {module}", "", pages.table([["name", "what it is"], *rows])]
    return "\n".join(parts)


def _line(value: Any) -> str:
    """The first sentence of a function's or a class's docstring; the value of a constant."""
    if not isinstance(value, type) and not callable(value):
        text = repr(value).removeprefix("hop1:")
        short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
        return f"`{short}`"
    return _sentence(inspect.getdoc(value) or "")


def _sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s", paragraph, maxsplit=1)[0].replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {": names": names}
