"""Whether tables of a page came out as they were written. Markdown fills up short rows, cuts long ones, and takes a
line that was broken for a row of its own, all silently."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path


class Tables(HTMLParser):
    """The tables of a page as HTML: for each row of each, how many columns it fills, and whether it says anything."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.texts: list[list[str]] = []
        self._open = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
            self.texts.append([])
            self._open += 1
        elif tag == "tr" and self._open:
            self.tables[-1].append(0)
            self.texts[-1].append("")
        elif tag in ("td", "th") and self._open:
            self.tables[-1][-1] += int(dict(attrs).get("colspan") or 1)

    def handle_endtag(self, tag: str) -> None:
        self._open -= tag == "table"

    def handle_data(self, data: str) -> None:
        if self._open and self.texts[-1]:
            self.texts[-1][-1] += data


def written(text: str) -> list[list[int]]:
    """The tables of a page in Markdown: for each line of each, but for the one below its head, how many cells."""
    tables: list[list[int]] = []
    is_table = False
    for line in _outside_of_code(text):
        row = line.strip()
        if row.startswith("|"):
            if not is_table:
                tables.append([])
            if not re.fullmatch(r"[|\s:-]+", row) or not tables[-1]:
                tables[-1].append(len(re.findall(r"(?<!\\)\|", row)) - row.endswith("|"))
        is_table = row.startswith("|")
    return tables


def _outside_of_code(text: str) -> Iterator[str]:
    is_code = False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            yield line


def faults(html: str, text: str) -> Iterator[str]:
    """The faults of a page's tables, from its HTML and its Markdown."""
    shown, wanted = Tables(html), written(text)
    for number, (rows, texts) in enumerate(zip(shown.tables, shown.texts, strict=True), 1):
        for cells, row in zip(rows, texts, strict=True):
            if cells != rows[0]:
                yield f"table {number}: a row has {cells} cells, and its head {rows[0]}: {_short(row)}"
    for number, rows in enumerate(wanted, 1):
        if odd := [cells for cells in rows if cells != rows[0]]:
            yield f"table {number}: a line in Markdown has {odd[0]} cells, and its head {rows[0]}"
    sizes = [len(rows) for rows in shown.tables], [len(rows) for rows in wanted]
    if sizes[0] != sizes[1]:
        yield f"tables have {sizes[0]} rows, and {sizes[1]} lines were written: is a line broken, or none left blank?"


def _short(row: str) -> str:
    return " ".join(row.split())[:80]


def of_site(site: Path, pages: Path) -> Iterator[tuple[str, str]]:
    """The pages of a site that was built from a folder, with what is wrong with their tables."""
    for path in sorted(pages.glob("*.md")):
        text, built = path.read_text("utf-8"), site / f"{path.stem}.html"
        if built.exists() and "{include}" not in text:
            yield from ((path.stem, fault) for fault in faults(_content(built.read_text("utf-8")), text))


def _content(html: str) -> str:
    """The article of a page, without the theme around it."""
    return html[html.index("<article") : html.index("</article>")]
