"""Format text in columns."""

from collections.abc import Sequence


def table(names: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    """Format rows under column names, with column widths that fit; columns from `right` on are right-aligned."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = []
    for row in (names, *rows):
        cells = (c.ljust(w) if i < right else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
