"""The list of every module in docs/code_map.md, from the first sentences of their docstrings."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FLOORS = "cli report integrations algorithms nn optim export checkpoint interchange impls tensor kernels".split()
_FLOORS += "dispatch numerics compat".split()
FOLDERS = ("hop", *(f"hop/{name}" for name in _FLOORS), "cutlass_kernels")


def modules() -> str:
    """A table for each folder, from the top of the house down, with a row for each file."""
    return "\n".join(_table(folder) for folder in FOLDERS)


def _table(folder: str) -> str:
    top = ROOT / folder
    paths = sorted(top.glob("*.py" if folder == "hop" else "**/*.py"), key=lambda p: (p.parent.parts, p.name))
    rows = [f"| `{path.relative_to(ROOT).as_posix()}` | {_sentence(path)} |" for path in paths]
    return "\n".join([f"### {folder}/", "", "| file | what it is |", "| --- | --- |", *rows, ""])


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line."""
    said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    first = re.split(r"(?<=\.)\s", " ".join(said.split()), maxsplit=1)[0]
    return first.rstrip(":.").replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {": modules": modules}
