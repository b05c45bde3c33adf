"""The site, built by Sphinx from the pages of this folder: make docs."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.util import logging  # noqa: E402

import hop  # noqa: E402
from docs import rendered  # noqa: E402

project = "hop"
author = "the authors of hop"
copyright = author  # Sphinx's name for the line at the foot
version = release = hop.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["gallery/*"]

myst_heading_anchors = 3  # links to headings are checked, too
myst_enable_extensions = ["deflist"]
suppress_warnings = ["misc.highlighting_failure"]  # spellings and shell lines are no language

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": False}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"  # as Markdown has it

html_theme = "furo"
html_title = f"hop {version}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["style"]
html_css_files = ["hop.css"]

# Docstrings are written as they read best in the code, with Markdown's backticks; here they become reStructuredText.
_CODE = re.compile(r"(`+[^`]*`+)")
_SECTION = re.compile(r"(Args|Arguments|Attributes|Examples?|Raises|Returns|Yields|Notes?):$")


_whole: dict[str, list[str]] = {}  # of properties, whose first sentence napoleon takes for a type if it has a colon


def _restore(_app: Any, what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    if what in ("property", "attribute", "data") and name in _whole:
        lines[:] = _whole[name]


def _docstring(_app: Any, _what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Marks outside of code stand for themselves; what is indented after a blank line, outside of sections, is code."""
    made: list[str] = []
    is_section = is_code = False
    for i, line in enumerate(lines):
        is_text = bool(line.strip()) and not line.startswith(" ")
        if is_text:
            is_section, is_code = bool(_SECTION.match(line)), False
        if not is_section and not is_code and line.startswith(" ") and i and not lines[i - 1].strip():
            is_code = True
            made += ["::", ""]
        parts = [line] if is_code else _CODE.split(line)
        made.append("".join(p if is_code or p.startswith("`") else re.sub(r"[*|]", r"\\\g<0>", p) for p in parts))
    lines[:] = made
    _whole[name] = list(made)


_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


def _signature(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, signature: str | None, returns: str | None):
    """Signatures without the addresses of objects, so that a site built twice is the same."""
    return (_ADDRESS.sub("", signature) if signature else signature, returns)


def _edit_source(_app: Any, name: str, source: list[str]) -> None:
    """Drop patterns of the index that match no page, and link the table of all names to their entries."""
    if name == "api/0_names":
        module, lines = "", source[0].splitlines(keepends=True)
        for i, line in enumerate(lines):
            module = line[3:].strip() if line.startswith("## ") else module
            lines[i] = re.sub(r"^\| `(\w+)` \|", rf"| {{py:obj}}`\1 <{module}.\1>` |", line)
        source[0] = "".join(lines)
    if name == "index":
        lines = source[0].splitlines(keepends=True)
        source[0] = "".join(s for s in lines if "*" not in s or any(Path(__file__).parent.glob(f"{s.strip()}.md")))


def _check_tables(app: Any, error: Exception | None) -> None:
    """Warnings of tables that came out otherwise than they were written; make docs fails by them."""
    if error is None and app.builder.name == "html":
        for page, fault in rendered.of_site(Path(app.outdir), ROOT / "docs"):
            logging.getLogger(__name__).warning("%s", fault, location=page)


def setup(app: Any) -> None:
    app.connect("build-finished", _check_tables)
    app.connect("source-read", _edit_source)
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _restore, priority=900)  # after it
    app.connect("autodoc-process-signature", _signature)
