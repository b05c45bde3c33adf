"""The tables and the picture of docs/algorithms.md, from the results of benchmarks.algorithms and its peer."""

import statistics
from typing import Any

import numpy as np

from docs.drawing import DATA, GROUPED, INK, RULER, STYLE, WHOLE, png, pyplot
from docs.training_tables import results
from tests.support import pages

NEAREST, GPTQ, ADAROUND = "nearest", "GPTQ", "AdaRound"
ALGORITHMS = (NEAREST, GPTQ, "factors", "rotation", "rotation, GPTQ", ADAROUND, "bias correction")
FORMATS = ("int8 static", "fp8", "MXFP8", "int4 in 128", "NVFP4", "MXFP4", "ternary")
COLOURS = (RULER, WHOLE, "#15803d", "#a855f7", GROUPED, "#ca8a04", INK)
SAMPLES = 10_000  # of the bootstrap
# The format, the algorithm, that it is compared with, and the least part of the loss that it is to take away.
TARGETS: dict[str, tuple[str, str, float | None]] = {
    "int4 weights in groups of 128: nearest → GPTQ": ("int4 in 128", GPTQ, 0.50),
    "MXFP4: nearest → rotation, GPTQ": ("MXFP4", "rotation, GPTQ", 0.30),
    "NVFP4: nearest → GPTQ": ("NVFP4", GPTQ, 0.15),
    "NVFP4: nearest → rotation everywhere": ("NVFP4", "rotation everywhere", None),
    "NVFP4: nearest → rotation everywhere, GPTQ": ("NVFP4", "rotation everywhere, GPTQ", None),
    "static int8: nearest → SmoothQuant": ("int8 static", "factors", 0.40),
    "3, 4, 5, 6, 8 bits in the bytes of int5: int5 → bits chosen": ("int5 in 128", "bits chosen, Fisher", 0.20),
}


def cells() -> dict[str, Any]:
    return results("algorithms")["cells"]


def interval(values: list[float], others: list[float] | None = None) -> tuple[float, float]:
    """95 % of the means over samples of draws; of 1 - the ratio to the mean of others, of the same draws."""
    chosen = np.random.default_rng(0).integers(len(values), size=(SAMPLES, len(values)))
    means = np.asarray(values)[chosen].mean(1)
    if others is not None:
        means = 1 - means / np.asarray(others)[chosen].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def table() -> str:
    """Each format and algorithm: the loss, what it is less by, the time and the size."""
    rows = [["format", "algorithm", "loss", "less by", "draws", "s", "MB"]]
    for name in FORMATS:
        own = cells().get(name, {})
        for algorithm in ALGORITHMS:
            row = own.get(algorithm, {"losses": []})
            if not row["losses"]:
                continue
            rows.append([name, named(name, algorithm), loss(row["losses"]), less(own, algorithm), *_costs(row)])
    return pages.table(rows)


def named(format: str, algorithm: str) -> str:
    if algorithm != "factors":
        return algorithm
    return "AWQ" if format in ("int4 in 128", "ternary") else "SmoothQuant"


def loss(losses: list[float]) -> str:
    mean = f"{statistics.mean(losses):.5f}"
    if len(losses) == 1:
        return mean
    low, high = interval(losses)
    return f"{mean} ({low:.5f} to {high:.5f})"


def less(own: dict[str, Any], algorithm: str) -> str:
    """By how much its loss is less than that of rounding to the nearest, in the draws that both have."""
    if algorithm == NEAREST:
        return ""
    mean, low, high = saved(own, algorithm)
    return f"{mean:.0%}" if len(own[algorithm]["losses"]) == 1 else f"{mean:.0%} ({low:.0%} to {high:.0%})"


def saved(own: dict[str, Any], algorithm: str) -> tuple[float, float, float]:
    after = own[algorithm]["losses"]
    before = own[NEAREST]["losses"][: len(after)]
    after = after[: len(before)]
    return (1 - statistics.mean(after) / statistics.mean(before), *interval(after, before))


def _costs(row: dict[str, Any]) -> list[str]:
    return [str(len(row["losses"])), f"{statistics.median(row['seconds']):.1f}", f"{row['bytes'] / 1e6:.2f}"]


def targets() -> str:
    rows = [["", "target", "found", "interval, 95 %", "draws"]]
    for name, (format, algorithm, least) in TARGETS.items():
        own = cells().get(format, {})
        if not own.get(algorithm, {"losses": []})["losses"]:
            continue
        mean, low, high = saved(own, algorithm)
        draws = len(own[algorithm]["losses"])
        wanted = "its sign" if least is None else f"≥ {least:.0%}"
        rows.append([name, wanted, f"{mean:.1%}", f"{low:.1%} to {high:.1%}", str(draws)])
    return pages.table(rows)


def cost() -> str:
    """What GPTQ takes in processes of its own."""
    found = results("algorithms")["cost"]
    rows = [["draw", "seconds", "memory beside the model, MB", "together, by the model"]]
    for draw, row in enumerate(found["rows"]):
        growth, model = row["growth"], row["model"]
        rows.append([str(draw), f"{row['seconds']:.1f}", f"{growth / 1e6:.0f}", f"{1 + growth / model:.2f}"])
    return pages.table(rows)


def peer() -> str:
    """The objective of each layer by gptqmodel and by ours."""
    rows = [["layer", "columns", "nearest", "gptqmodel", "ours", "ours by theirs", "ours, own scales"]]
    for row in results("peer_gptq")["rows"]:
        for order in ("as they lie", "act order"):
            f = row[order]
            ratio = f["ours"] / f["theirs"]
            numbers = [f"{f[key]:.6f}" for key in ("nearest", "theirs", "ours")]
            rows.append([row["layer"], order, *numbers, f"{ratio:.4f}", f"{f['ours, own scales']:.6f}"])
    return pages.table(rows)


def draw() -> bytes:
    """The loss of each format by each algorithm, a mean over the draws with its interval, as a PNG file."""
    plot = pyplot()
    with plot.rc_context(STYLE):
        figure = plot.figure(figsize=(8, 4), dpi=120, layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(ALGORITHMS)
        for i, (algorithm, colour) in enumerate(zip(ALGORITHMS, COLOURS, strict=True)):
            found = [
                (place, own[algorithm]["losses"])
                for place, name in enumerate(FORMATS)
                if (own := cells().get(name, {})).get(algorithm, {"losses": []})["losses"]
            ]
            if not found:
                continue
            places = [place + (i - (len(ALGORITHMS) - 1) / 2) * width for place, _ in found]
            means = [statistics.mean(losses) for _, losses in found]
            ends = np.abs(np.array([interval(losses) for _, losses in found]).T - np.array(means))
            label = "SmoothQuant, AWQ" if algorithm == "factors" else algorithm
            axes.bar(places, means, width, color=colour, label=label)
            axes.errorbar(places, means, ends, fmt="none", ecolor=INK, elinewidth=0.8)
        axes.set(yscale="log", ylabel="loss, 1 - mean cosine")
        axes.set_xticks(range(len(FORMATS)), FORMATS)
        axes.grid(axis="y", color=DATA, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, ncols=2, fontsize=8)
        picture = png(figure)
        plot.close(figure)
    return picture


TABLES = {": algorithms": table, ": cost": cost, ": peer": peer, ": targets": targets}
