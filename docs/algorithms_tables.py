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
TIMED = "int4 in 128"
SAMPLES = 10_000  # of the bootstrap


def cells() -> dict[str, Any]:
    return results("algorithms")["cells"]


def interval(values: list[float], others: list[float] | None = None) -> tuple[float, float]:
    """A 95 % bootstrap interval of the mean; with `others`, of 1 - the ratio to the mean of others."""
    chosen = np.random.default_rng(0).integers(len(values), size=(SAMPLES, len(values)))
    means = np.asarray(values)[chosen].mean(1)
    if others is not None:
        means = 1 - means / np.asarray(others)[chosen].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def table() -> str:
    """The loss of each format by each algorithm, with the change from rounding to nearest, and the seconds taken."""
    header = ["", *("SmoothQuant, AWQ" if a == "factors" else a for a in ALGORITHMS)]
    losses = [[name, *(_loss(cells()[name], algorithm) for algorithm in ALGORITHMS)] for name in FORMATS]
    timed = cells()[TIMED]
    seconds = [f"{statistics.median(timed[a]['seconds']):.1f}" if a in timed else "" for a in ALGORITHMS]
    return pages.table([header, *losses, [f"seconds, {TIMED}", *seconds]])


def _loss(own: dict[str, Any], algorithm: str) -> str:
    """A mean loss, and its change from the nearest codes on the draws that both have; empty where not measured."""
    after = own.get(algorithm, {"losses": []})["losses"]
    if not after:
        return ""
    mean = statistics.mean(after)
    if algorithm == NEAREST:
        return f"{mean:.4f}"
    before = statistics.mean(own[NEAREST]["losses"][: len(after)])
    return f"{mean:.4f} ({round(100 * (mean / before - 1)):+d}\u00a0%)"


def cost() -> str:
    """Time and memory of GPTQ in new processes, as a sentence."""
    found = results("algorithms")["cost"]["rows"]
    seconds, growth = [row["seconds"] for row in found], [row["growth"] / 1e6 for row in found]
    model = found[0]["model"] / 1e6
    return (
        f"{len(found)} runs took {min(seconds):.0f} to {max(seconds):.0f} s and {min(growth):.0f} to {max(growth):.0f} "
        f"MB on top of the loaded model's {model:.0f} MB.\n"
    )


def draw() -> bytes:
    """A PNG of the mean loss of each format by each algorithm, with intervals."""
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


TABLES = {": algorithms": table, ": cost": cost}
