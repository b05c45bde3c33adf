"""Tables that a program writes into a page, between two comments."""

import re
from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, whose first row is its header. Raises ValueError for a cell that would break it."""
    header, *rest = rows
    for cell in (cell for row in (header, *rest) for cell in row):
        if re.search(r"\n|(?<!\\)\|", cell):
            raise ValueError(f"a cell must be one line without a |, or with \\| in its place; got {cell!r}")
    lines = [header, ["---"] * len(header), *rest]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def filled(text: str, command: str, content: str) -> str:
    """`text` with `content` between the comments that name `command`, which writes it."""
    begin, end = f"<!-- written by {command} -->\n", f"<!-- end of {command} -->"
    before, rest = text.split(begin)
    return before + begin + content + end + rest.split(end)[1]
