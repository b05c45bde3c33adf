"""Sweep: what schemes cost a model, and what they save, for people, for programs and for notebooks."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hop.compat.files import write_whole
from hop.export.table import table
from hop.report import page, picture
from hop.report.json_values import plain
from hop.report.rows import Candidate as Candidate
from hop.report.summary import decibels, size


@dataclass(frozen=True)
class Sweep:
    """What hop.report.sweep found: the float model, then the candidates in their order."""

    rows: tuple[Candidate, ...]
    inputs: int
    name: str = ""

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """Those than which none is as small, as fast and as good, and better in one of the three."""
        return tuple(row for row in self.rows if not any(_dominates(other, row) for other in self.rows))

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Those than which none is as small and as good, and better in one of the two; the smallest first."""
        best = [r for r in self.rows if not any(_dominates(o, r, with_time=False) for o in self.rows)]
        return tuple(sorted(best, key=lambda row: row.parameter_bytes))

    @property
    def summary(self) -> str:
        """Sentences: the smallest, the fastest and the most exact candidate."""
        return " ".join(self._sentences())

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings, numbers and None alone; infinite numbers as strings."""
        best, front = set(self.pareto), set(self.front)
        rows = [
            {**asdict(r), "slowdown": r.slowdown, "pareto": r in best, "front": r in front, "quality": r.quality}
            for r in self.rows
        ]
        result = {"name": self.name, "summary": self._sentences(), "inputs": self.inputs, "rows": rows}
        return plain({**result, "has_loss": any(row.loss is not None for row in self.rows)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame of the candidates. Needs pandas."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame([{**asdict(r), "pareto": r in self.pareto} for r in self.rows]).set_index("name")

    def plot(self) -> Any:
        """A matplotlib.figure.Figure: quality over bytes, with the Pareto front. Needs matplotlib."""
        return picture.of_sweep(self.name, self.rows, self.front)

    def html(self) -> str:
        """A page that needs nothing else."""
        return page.html(None, self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        write_whole(path, self.html())

    def __str__(self) -> str:
        names = ("scheme", "pareto", "SQNR dB", "cosine", "loss", "parameters", "ms", "× float")
        best = set(self.pareto)
        lines = [
            (
                *(r.name, "*" if r in best else "", decibels(r.sqnr).removesuffix(" dB"), f"{r.cosine:.5f}"),
                *("" if r.loss is None else f"{r.loss:.4g}", size(r.parameter_bytes), f"{1e3 * r.seconds:.2f}"),
                f"{r.slowdown:.2f}",
            )
            for r in self.rows
        ]
        return f"{table(names, lines, right=2)}\n* Pareto-optimal in quality, bytes and time"

    def _sentences(self) -> list[str]:
        tried = [row for row in self.rows if row.scheme]
        others = [row for row in tried if row.rewritten]
        if not others:
            return ["No candidate changes the model: no operator can compute so." if tried else "No candidate has run."]
        base = next((row for row in self.rows if not row.scheme), others[0])
        small = min(others, key=lambda row: (row.parameter_bytes, -row.quality))
        fast, good = min(others, key=lambda row: row.slowdown), max(others, key=lambda row: row.quality)
        return [
            f"{good.name} is nearest to the float model ({_quality(good)}), in "
            f"{100 * good.parameter_bytes / base.parameter_bytes:.0f} % of its bytes.",
            f"{small.name} is the smallest: {size(small.parameter_bytes)} instead of {size(base.parameter_bytes)}, "
            f"with {_quality(small)}.",
            f"{_speed(fast)}, with {_quality(fast)}.",
        ]


def _speed(fast: Candidate) -> str:
    """How long the fastest candidate takes, in words that fit where none is faster than the float model."""
    if fast.slowdown < 1:
        return f"{fast.name} is the fastest: it takes {fast.slowdown:.2f} times as long as the float model"
    none = "None is faster than the float model"
    return f"{none}: the least slow, {fast.name}, takes {fast.slowdown:.2f} times as long as it"


def _quality(row: Candidate) -> str:
    return f"SQNR {decibels(row.sqnr)}, cosine {row.cosine:.4f}" + (
        "" if row.loss is None else f", loss {row.loss:.4g}"
    )


def _dominates(a: Candidate, b: Candidate, *, with_time: bool = True) -> bool:
    of_a, of_b = ((-r.quality, r.parameter_bytes, r.slowdown if with_time else 0.0) for r in (a, b))
    return of_a != of_b and all(x <= y for x, y in zip(of_a, of_b, strict=True))
