"""Marks of tests whose cases parameterized makes."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_marks_are_below_the_parameters():
    """`parameterized.expand` makes new functions of the one below it, and drops what is above it."""
    lost = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [ast.unparse(d).partition("(")[0] for d in getattr(node, "decorator_list", [])]
            if "parameterized.expand" in names[1:]:
                lost.append(f"{path}:{node.lineno}")
    assert not lost
