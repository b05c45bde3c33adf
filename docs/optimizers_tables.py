"""The tables and the picture of docs/optimizers.md, from the results of examples/optimizers.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from docs.drawing import DATA, GROUPED, INK, RULER, STYLE, WHOLE, png, pyplot
from docs.training_tables import WINDOW, smoothed
from tests.support import pages

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "optimizers.json"
PLAIN = "float32"
DIVERGED = 10.0  # the least loss, or relative difference, that counts as diverged
TITLES = {"digits": "Digits", "minilm": "Fine-tuning all-MiniLM-L6-v2"}
LIMITS = {"digits": (-15, 75), "minilm": (-1, 8)}  # percent, beyond which nothing is drawn
LOOKS: dict[str, tuple[str, float, Any]] = {  # colour, width, dashes: the lines overlap
    PLAIN: (RULER, 6.0, "-"),
    "AdamW8bit": (GROUPED, 1.8, "-"),
    "AdamWFp8": (WHOLE, 1.6, (0, (4, 3))),
    "BITS8_FP8": (INK, 1.4, (0, (1, 2))),
    "AdamW4bit": ("#15803d", 1.6, "-"),
}


def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())["tasks"]


def table(task: str) -> str:
    """The results of each optimizer, averaged over the seeds."""
    header = ["", "final loss", "against float32", "by seed, %", "held-out loss", "held-out accuracy", "states, MB"]
    rows = [
        [
            name if name.startswith(PLAIN) else f"`{name}`",
            number(r["final_loss"]),
            "" if name == PLAIN else difference(r["differs"], " %"),
            "" if name == PLAIN else ", ".join(map(difference, r["differs_by_seed"])),
            number(r["held_out_loss"]),
            f"{r['held_out_accuracy']:.1f} %",
            f"{r['state_bytes'] / 1e6:.3g}",
        ]
        for name, r in results()[task].items()
    ]
    return pages.table([header, *rows])


def number(loss: float) -> str:
    return f"{loss:.4f}" if loss < DIVERGED else "diverged"


def difference(off: float, unit: str = "") -> str:
    """A relative difference in percent; NaN counts as diverged."""
    return f"{100 * off:+.2f}{unit}" if off < DIVERGED else "diverged"


def draw() -> bytes:
    """A PNG of the loss with each optimizer, averaged over the seeds, and its distance from float32's."""
    plot = pyplot()
    with plot.rc_context(STYLE):
        figure = plot.figure(figsize=(8, 5), dpi=120, layout="constrained")
        panels = figure.subplots(2, len(TITLES), sharex="col", height_ratios=(3, 2))
        for (task, title), above, below in zip(TITLES.items(), *panels, strict=True):
            draw_task(task, above, below)
            above.set_title(title, fontsize=10, fontweight="bold")
        panels[0, 0].set_ylabel(f"loss, mean of {WINDOW} steps")
        panels[1, 0].set_ylabel("against float32, %")
        panels[0, 1].legend(frameon=False, handlelength=2.4)
        picture = png(figure)
        plot.close(figure)
    return picture


def draw_task(task: str, above: Any, below: Any) -> None:
    curves = {name: smoothed(row["losses"]) for name, row in results()[task].items()}
    plain = curves[PLAIN]
    steps = np.arange(len(plain)) + WINDOW
    for name, (color, width, dashes) in LOOKS.items():
        above.plot(steps, curves[name], color=color, linewidth=width, linestyle=dashes, label=name)
        if name != PLAIN:
            off = 100 * (curves[name] / plain - 1)
            below.plot(steps, off, color=color, linewidth=1.2, linestyle=dashes)
    below.axhline(0, color=INK, linewidth=0.9)
    above.set(yscale="log", ylim=(plain.min() / 1.2, 1.2 * plain.max()))
    ticks = [x for x in (0.1, 0.2, 0.5, 1, 1.5, 2, 2.5) if plain.min() / 1.2 < x < 1.2 * plain.max()]
    above.set_yticks(ticks, [f"{x:g}" for x in ticks])
    above.minorticks_off()
    below.set(xlabel="step", ylim=LIMITS[task])
    for axes in (above, below):
        axes.grid(color=DATA, linewidth=0.6)


TABLES = {": minilm": lambda: table("minilm")}
