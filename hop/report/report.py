"""Report: the result of compare, as text, as data, and as figures for notebooks."""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hop.compat.files import write_whole
from hop.export.table import table
from hop.numerics.spelling import JsonObject
from hop.report import page, picture, summary
from hop.report.rows import Row
from hop.report.values import to_json_value

if TYPE_CHECKING:
    from hop.report.sweep_result import Sweep


@dataclass(frozen=True)
class Report:
    """The result of hop.report.compare.

    Attributes:
        rows: one per value, in the order in which the program computes them.
        inputs: number of argument sets that the model ran on.
        has_reference: whether there was a reference; without one, no row has an error.
        parameter_bytes: bytes of all parameters and constants that the program reads, each counted once, scales
            included.
        name: the model's name.
    """

    rows: tuple[Row, ...]
    inputs: int
    has_reference: bool
    parameter_bytes: int
    name: str = ""

    @cached_property
    def summary(self) -> str:
        """Sentences: where the error enters, which rows add most to it, what is still float, where formats change, what
        may differ on other machines, what it costs.
        """
        return "\n".join(self.sentences)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences of `summary`, one by one."""
        return summary.summary(self.rows, self.has_reference, self.parameter_bytes)

    @property
    def first(self) -> Row | None:
        """The first row that differs from the reference; None if none does, or there is no reference."""
        return summary.first_error(self.rows)

    @property
    def losses(self) -> list[Row]:
        """The rows that add to the error of what they read, the greatest noise first."""
        return summary.losses(self.rows)

    def row(self, name: str) -> Row:
        """Return the row of a node. Raises KeyError if there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"report: no row is named {name!r}")

    def to_dict(self) -> JsonObject:
        """Return lists, dicts, strings, numbers and None only, as in JSON; infinities and NaN become strings."""
        rows = [_row_dict(row) for row in self.rows]
        return to_json_value(
            {
                "name": self.name,
                "summary": list(self.sentences),
                "inputs": self.inputs,
                "has_reference": self.has_reference,
                "parameter_bytes": self.parameter_bytes,
                "rows": rows,
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_dataframe(self) -> Any:
        """Return a pandas.DataFrame of the rows without histograms, indexed by name. Needs pandas."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        columns = {
            "path": [r.path for r in self.rows],
            "operator": [r.operator for r in self.rows],
            "sort": [r.sort for r in self.rows],
            "formats": [r.formats for r in self.rows],
            "result": [r.result.name for r in self.rows],
            "kind": [r.result.kind for r in self.rows],
            "shape": [r.shape for r in self.rows],
            "kernel": [r.kernel for r in self.rows],
            "sqnr": [math.nan if r.error is None or r.error.sqnr is None else r.error.sqnr for r in self.rows],
            "added": [math.nan if r.error is None else r.error.added for r in self.rows],
            "inexact": [r.inexact for r in self.rows],
            "parameter_bytes": [r.parameter_bytes for r in self.rows],
            "milliseconds": [math.nan if r.seconds is None else 1e3 * r.seconds for r in self.rows],
        }
        return pandas.DataFrame(columns, index=pandas.Index([r.name for r in self.rows], name="node"))

    def plot(self) -> Any:
        """Return a matplotlib.figure.Figure of the SQNR along the program and the noise that each row adds. Needs
        matplotlib.
        """
        return picture.plot_report(self.name, self.rows)

    def html(self, sweep: "Sweep | None" = None) -> str:
        """Return a self-contained HTML page. A sweep, if given, is shown at the top."""
        return page.html(self.to_dict(), None if sweep is None else sweep.to_dict())

    def save(self, path: str | Path, sweep: "Sweep | None" = None) -> None:
        """Write the HTML page to a file."""
        write_whole(path, self.html(sweep))

    def __str__(self) -> str:
        shown = [row for row in self.rows if row.sort not in ("move", "input")]
        names = ("node", "operator", "formats", "kernel", "SQNR dB", "bytes", "ms")
        lines = [
            (
                *(row.name, row.operator, row.formats, row.kernel),
                "" if row.error is None or row.error.sqnr is None else f"{row.error.sqnr:.1f}",
                f"{row.parameter_bytes:,}" if row.parameter_bytes else "",
                "" if row.seconds is None else f"{1e3 * row.seconds:.3f}",
            )
            for row in shown
        ]
        return f"{self.summary}\n\n{table(names, lines, right=4)}"


def _row_dict(row: Row) -> JsonObject:
    """A row as a dict, with its derived properties."""
    changes = [[asdict(of) for of in change] for change in row.changes]
    derived = {"formats": row.formats, "kind": row.kind, "changes": changes}
    return {**asdict(row), **derived, "added": None if row.error is None else row.error.added}
