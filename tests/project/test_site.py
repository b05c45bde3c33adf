"""The tables of the site are those that the pages hold: as many rows, and as many cells in each."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from parameterized import parameterized

from docs import rendered
from tests.support import pages

ROOT = Path(__file__).parents[2]
HEAD = "| a | b |\n| --- | --- |\n"
BROKEN = {
    "a_line_that_is_broken": "| c | d\ne |\n",
    "a_cell_too_few": "| c |\n",
    "a_cell_too_many": "| `c | d` | e |\n",
    "no_blank_line_after": "| c | d |\nand so on\n",
}


def html(text: str) -> str:
    markdown = pytest.importorskip("markdown_it", reason="needs the extra docs")
    return markdown.MarkdownIt("commonmark").enable("table").render(text)


class TestRendered(unittest.TestCase):
    @parameterized.expand(BROKEN.items())
    def test_finds(self, _name, row):
        text = HEAD + row
        assert [*rendered.faults(html(text), text)]

    def test_takes_what_is_whole(self):
        text = f"{HEAD}| c | `d \\| e` |\n\n```\n| code\n```\n\n{HEAD}| | [f](g) |\n"
        assert [*rendered.faults(html(text), text)] == []
        assert rendered.written(text) == [[2, 2], [2, 2]]

    def test_unequal_rows_of_html(self):
        rows = "<table><tr><th colspan=2>a</th></tr><tr><td>b</td></tr></table>"
        assert "a row has 1 cells, and its head 2: b" in next(rendered.faults(rows, HEAD + "| b | c |\n"))

    @parameterized.expand([("newline", "a\nb"), ("bar", "a | b")])
    def test_no_program_writes_a_broken_cell(self, _name, cell):
        with self.assertRaisesRegex(ValueError, "a cell must be one line without"):
            pages.table([["x"], [cell]])


class TestSite(unittest.TestCase):
    @pytest.mark.full
    def test_builds(self):
        """As make docs does, where warnings are errors, those of tables among them."""
        for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
            pytest.importorskip(package, reason="needs the extra docs")
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "site")
            command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", f"{folder}/doctrees", "docs"]
            done = subprocess.run([*command, str(site)], capture_output=True, text=True, cwd=ROOT, check=False)
            assert done.returncode == 0, done.stderr
            assert [*rendered.of_site(site, ROOT / "docs")] == []
            cells = rendered.Tables((site / "quantized_tensor.html").read_text()).tables
            assert max(map(len, cells)) > 30 and all(rows == [rows[0]] * len(rows) for rows in cells)
