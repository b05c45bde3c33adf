"""Sweep: the result of sweep, as text, as data, and as figures for notebooks."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hop.compat.files import write_whole
from hop.export.table import table
from hop.numerics.spelling import JsonObject
from hop.report import page, picture
from hop.report.rows import Candidate as Candidate
from hop.report.summary import decibels, size
from hop.report.values import to_json_value


@dataclass(frozen=True)
class Sweep:
    """The result of hop.report.sweep: the float model, then the candidates in order."""

    rows: tuple[Candidate, ...]
    inputs: int
    name: str = ""

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """The Pareto front of size, time and quality."""
        return tuple(row for row in self.rows if not any(_dominates(other, row) for other in self.rows))

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of size and quality, smallest first."""
        best = [r for r in self.rows if not any(_dominates(o, r, with_time=False) for o in self.rows)]
        return tuple(sorted(best, key=lambda row: row.parameter_bytes))

    @property
    def summary(self) -> str:
        """Sentences: the most accurate, the smallest and the fastest candidate."""
        return " ".join(self._sentences())

    def to_dict(self) -> JsonObject:
        """Return lists, dicts, strings, numbers and None only; infinities and NaN become strings."""
        best, front = set(self.pareto), set(self.front)
        rows = [
            {**asdict(r), "slowdown": r.slowdown, "pareto": r in best, "front": r in front, "quality": r.quality}
            for r in self.rows
        ]
        result = {"name": self.name, "summary": self._sentences(), "inputs": self.inputs, "rows": rows}
        return to_json_value({**result, "has_loss": any(row.loss is not None for row in self.rows)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_dataframe(self) -> Any:
        """Return a pandas.DataFrame of the candidates. Needs pandas."""
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame([{**asdict(r), "pareto": r in self.pareto} for r in self.rows]).set_index("name")

    def plot(self) -> Any:
        """Return a matplotlib.figure.Figure of quality over bytes, with the Pareto front. Needs matplotlib."""
        return picture.plot_sweep(self.name, self.rows, self.front)

    def html(self) -> str:
        """Return a self-contained HTML page."""
        return page.html(None, self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the HTML page to a file."""
        write_whole(path, self.html())

    def __str__(self) -> str:
        names = ("scheme", "pareto", "SQNR dB", "cosine", "loss", "parameters", "ms", "float ms", "× float")
        best = set(self.pareto)
        lines = [
            (
                *(r.name, "*" if r in best else "", decibels(r.sqnr).removesuffix(" dB"), f"{r.cosine:.5f}"),
                *("" if r.loss is None else f"{r.loss:.4g}", size(r.parameter_bytes)),
                *(f"{1e3 * r.seconds:.4g}", f"{1e3 * r.float_seconds:.4g}", f"{r.slowdown:.2f}"),
            )
            for r in self.rows
        ]
        return f"{table(names, lines, right=2)}\n* Pareto-optimal in quality, bytes and time"

    def _sentences(self) -> list[str]:
        tried = [row for row in self.rows if row.scheme]
        others = [row for row in tried if row.rewritten]
        if not others:
            return [
                "No candidate changes the model: none of its operators supports these schemes."
                if tried
                else "No candidate has run."
            ]
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
    """The sentence about the fastest candidate, even if none is faster than the float model."""
    if fast.slowdown < 1:
        return f"{fast.name} is the fastest: it takes {fast.slowdown:.2f} times as long as the float model"
    none = "None is faster than the float model"
    return f"{none}: the fastest, {fast.name}, takes {fast.slowdown:.2f} times as long"


def _quality(row: Candidate) -> str:
    return f"SQNR {decibels(row.sqnr)}, cosine {row.cosine:.4f}" + (
        "" if row.loss is None else f", loss {row.loss:.4g}"
    )


def _dominates(a: Candidate, b: Candidate, *, with_time: bool = True) -> bool:
    """Whether `a` is at least as good as `b` in size, quality and (optionally) time, and better in one of them."""
    a_key, b_key = ((-r.quality, r.parameter_bytes, r.slowdown if with_time else 0.0) for r in (a, b))
    return a_key != b_key and all(x <= y for x, y in zip(a_key, b_key, strict=True))
