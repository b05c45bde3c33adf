"""Figures of reports for notebooks, drawn with matplotlib."""

import math
from collections.abc import Sequence
from typing import Any

from hop.numerics.spelling import JsonObject
from hop.report.rows import Candidate, Row
from hop.report.values import FLOAT, INTEGER, LOW_BIT

COLOURS = {FLOAT: "#0072b2", INTEGER: "#009e73", LOW_BIT: "#d55e00"}  # Okabe and Ito's colour-blind-safe palette


def plot_report(name: str, rows: Sequence[Row]) -> Any:
    """Plot the SQNR along the program and the noise that each row adds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    shown = [(i, r) for i, r in enumerate(rows) if r.error and r.error.sqnr is not None]
    finite = [(i, r) for i, r in shown if r.error and r.error.sqnr is not None and math.isfinite(r.error.sqnr)]
    for kind, colour in COLOURS.items():
        points = [(i, r.error.sqnr) for i, r in finite if r.kind == kind and r.error is not None]
        if points:
            top.plot(*zip(*points, strict=True), "o", ms=4, color=colour, label=f"computed in {kind}")
    top.plot([i for i, _ in finite], [r.error.sqnr for _, r in finite if r.error], "-", lw=0.8, color="0.6", zorder=0)
    added = [(i, r.error.added) for i, r in shown if r.error and 0 < r.error.added < math.inf]
    bottom.bar([i for i, _ in added], [noise for _, noise in added], width=1.0, color=COLOURS[LOW_BIT])
    top.set_ylabel("SQNR, dB")
    bottom.set_ylabel("noise added\n(noise / signal)")
    bottom.set_xlabel("node, in the order of the program")
    top.set_title(name or "error along the program")
    if finite:
        top.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_sweep(name: str, rows: Sequence[Candidate], front: Sequence[Candidate]) -> Any:
    """Plot quality over bytes: the candidates with their times, and the Pareto front of the two."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    best = set(front)
    shown = [row for row in rows if row.scheme and math.isfinite(row.quality)]
    near = 0.04 * (max((r.quality for r in shown), default=0) - min((r.quality for r in shown), default=0))
    heights: list[float] = []  # of the labels placed right of their points
    for row in sorted(shown, key=lambda row: row.quality):
        place = (row.parameter_bytes / 1e6, row.quality)
        axes.plot(*place, "o", color=COLOURS[FLOAT] if row in best else "0.6", ms=7)
        is_left = bool(heights) and row.quality - heights[-1] < near
        words = f"{row.name}, {1e3 * row.seconds:.3g} ms"
        side: JsonObject = {"xytext": (-7, -3), "ha": "right"} if is_left else {"xytext": (7, -3)}
        axes.annotate(words, place, textcoords="offset points", fontsize=8, **side)
        heights += [] if is_left else [row.quality]
    line = [(r.parameter_bytes / 1e6, r.quality) for r in front if r in shown]
    axes.plot([x for x, _ in line], [y for _, y in line], "--", color=COLOURS[FLOAT], lw=1)
    axes.set_xlabel("parameters, MB")
    axes.set_ylabel("negative loss" if any(row.loss is not None for row in rows) else "SQNR of the outputs, dB")
    axes.set_title(name or "quality over bytes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.3, y=0.1)
    return figure
