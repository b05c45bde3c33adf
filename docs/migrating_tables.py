"""The tables of docs/migrating.md, from the rows that tests run."""

from collections.abc import Callable

from tests.support import pages
from tests.support.migrating import LIBRARIES
from tests.support.migrating.row import NONE, Library


def written(library: Library) -> str:
    """Their call, ours, and the difference, one row for each call."""
    rows = [[_code(row.theirs), NONE if row.ours == NONE else _code(row.ours), row.differs] for row in library.rows]
    return pages.table([[library.name.split(":")[0], "hop", "differences"], *rows])


def _code(text: str) -> str:
    """Each statement on a line of the cell."""
    return "<br>".join(f"`{line}`" for part in text.split("; ") for line in part.split("\n"))


TABLES: dict[str, Callable[[], str]] = {f": {each.name}": lambda each=each: written(each) for each in LIBRARIES}
