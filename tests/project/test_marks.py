"""Marks of tests whose cases parameterized makes."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# A decorator, with the lines that continue it, above parameterized.expand.
LOST = re.compile(r"^( *)@(?!parameterized\.expand).*\n(?:\1[ )\]}#].*\n)*\1@parameterized\.expand\b", re.MULTILINE)


def test_marks_are_below_the_parameters():
    """`parameterized.expand` makes new functions of the one below it, and drops what is above it."""
    found = {path: LOST.search(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))}
    lost = [f"{path}: {match.group().strip()}" for path, match in found.items() if match]
    assert not lost, lost
    assert LOST.search("class A:\n    @mark(\n        1\n    )\n    @parameterized.expand([1])\n")
