"""Helpers shared by the examples."""

import json
import os
import shutil
import sys
import warnings
from typing import Any

_LINE = 400  # characters; a longer row is written over several lines unless it is a list of scalars

# torch.export raises this warning about its own code, in every copy of an exported program.
_OF_EXPORT = r"`isinstance\(treespec, LeafSpec\)`"


def require(condition: bool, text: str) -> None:
    """Exit with code 1 and a message unless `condition` is true."""
    if not condition:
        sys.exit(f"FAILED: {text}")


def find_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    return next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)


def ignore_warnings_of_export() -> None:
    warnings.filterwarnings("ignore", message=_OF_EXPORT, category=FutureWarning)


def json_rows(content: Any, margin: str = "") -> str:
    """`content` as JSON, one row a line: only containers that hold long rows are written over several lines."""
    line = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, dict | list):
        return line
    is_flat = not any(isinstance(v, dict | list) for v in (content.values() if isinstance(content, dict) else content))
    if is_flat or (margin and len(line) <= _LINE):
        return line
    inner = margin + " "
    if isinstance(content, dict):
        begin, end, lines = "{", "}", [f"{json.dumps(k)}: {json_rows(v, inner)}" for k, v in content.items()]
    else:
        begin, end, lines = "[", "]", [json_rows(v, inner) for v in content]
    separator = f",\n{inner}"
    return f"{begin}\n{inner}{separator.join(lines)}\n{margin}{end}"
