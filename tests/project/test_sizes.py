"""Upper bounds on the lines of a file and of a function, so that both stay short enough to read."""

import ast
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "hop/kernels"  # kernels may be longer
FILES = {path: path.read_text() for path in sorted(ROOT.glob("hop/**/*.py")) if KERNELS not in path.parents}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 80


class TestSizes(unittest.TestCase):
    def test_files(self):
        assert len(FILES) > 200
        assert not {str(path): n for path, text in FILES.items() if (n := text.count("\n")) > MOST_LINES}

    def test_functions(self):
        lengths = {
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
            for path, text in FILES.items()
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        }
        assert len(lengths) > 2000
        assert not {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION}
