"""What keeps code short enough to read: lines of files and functions, and how often a value is asked for its class."""

import ast
import re
import unittest
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
FILES = {path: path.read_text() for path in sorted(ROOT.glob("hop/**/*.py"))}
KERNELS = ROOT / "hop/kernels"
LINES, FUNCTION = 400, 60

# Classes of formats, rules and layouts, of which one asks a property instead.
CLASSES = (
    r"Format|Integer|Float|Codebook|PowerOfTwo|Rule|\w+Rule|Amax|MinMax|AbsMean|\w*Microscaling|TwoLevel|Static|Delayed"
    r"|StoredScales|Layout|Tiled|Summed|Stacked|Planes|Decoded|Hadamard"
)
ASKED = re.compile(
    rf"isinstance\([^()]*(\([^()]*\))?[^()]*,\s*\(?[^)]*\b({CLASSES})\b"
    rf"|type\([^)]*\)\s*(is|==|in|not in|is not)\s*\(?({CLASSES})\b"
)
MOST_ASKED = 20


def functions() -> Iterator[tuple[int, str]]:
    """The lines of each function, and where it stands."""
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}"


class TestSizes(unittest.TestCase):
    def test_files(self):
        """Kernels may be longer."""
        lines = {path: text.count("\n") for path, text in FILES.items()}
        assert not {str(path): n for path, n in lines.items() if n > LINES and KERNELS not in path.parents}
        assert len(FILES) > 300

    def test_functions(self):
        lengths = list(functions())
        assert not [f"{where} has {n} lines" for n, where in lengths if n > FUNCTION]
        assert median(n for n, _ in lengths) <= 6

    def test_values_are_asked_for_facts(self):
        """A format, a rule or a layout answers for itself. Arguments are checked for their class where they come in,
        and kernels have tables of the classes that they know."""
        asked = [
            f"{path.relative_to(ROOT)}: {line.strip()}"
            for path, text in FILES.items()
            if KERNELS not in path.parents
            for line in text.splitlines()
            if ASKED.search(line)
        ]
        assert len(asked) <= MOST_ASKED, "\n".join(asked)

    def test_what_is_found(self):
        for line in (
            "if isinstance(q.format, Integer | Float):",
            "x = type(rule) is not StoredScales",
            "type(r) is Amax",
        ):
            assert ASKED.search(line), line
        for line in ("if q.format.is_integer:", "isinstance(state, StaticScale)", "isinstance(x, torch.dtype)"):
            assert not ASKED.search(line), line
