"""Sentences from the docstrings of the standard library, each with the module that it documents.

They depend only on the Python version: the files are read, not imported.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "asyncio difflib email http importlib inspect ipaddress logging multiprocessing statistics tarfile threading "
    "typing unittest urllib xml"
).split()
WORDS = range(5, 41)  # in a sentence
HELD_OUT = 4  # one in this many docstrings is held out
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The training and the held-out sentences, each with the index of its module in MODULES.

    All sentences of a docstring are on the same side, and none occurs twice.

    Raises:
        FileNotFoundError: this Python installation lacks a module's source.
    """
    train: list[tuple[str, int]] = []
    held_out: list[tuple[str, int]] = []
    known: set[str] = set()
    for label, module in enumerate(MODULES):
        for i, text in enumerate(_docstrings(module)):
            side = train if i % HELD_OUT else held_out
            for sentence in _sentences(text):
                if sentence not in known:
                    known.add(sentence)
                    side.append((sentence, label))
    return train, held_out


def _docstrings(module: str) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{module}.py", *sorted((root / module).rglob("*.py"))]
    files = [file for file in files if file.exists() and not {"test", "tests"} & set(file.parts[len(root.parts) :])]
    if not files:
        raise FileNotFoundError(f"{root} has no source of the module {module}; take a Python with its standard library")
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text


def _sentences(text: str) -> Iterator[str]:
    """The prose of a docstring: paragraphs without interpreter examples, split at full stops."""
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph:
            continue
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if len(sentence.split()) in WORDS:
                yield sentence
