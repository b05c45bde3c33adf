"""The tables and the picture of docs/training.md, from the results of the two examples."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from docs.drawing import DATA, GROUPED, INK, RULER, STYLE, WHOLE, png, pyplot
from tests.support import pages

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WINDOW = 20  # steps averaged in the picture


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def digits() -> str:
    """Accuracy on the test images, the mean of all seeds, and what deployment changes, in total."""
    header = "float|fake-quantized|deployed|changed|largest|int8|deployed|changed".split("|")
    found = results("digits")["results"]
    mean, total = ({key: of(r[key] for r in found) for key in found[0]} for of in (statistics.mean, sum))
    total["fake_largest_change"] = max(r["fake_largest_change"] for r in found)
    row = [f"{mean['float_accuracy']:.2f}"]
    for name in ("fake", "int8"):
        row += [f"{mean[key]:.2f}" for key in (f"{name}_accuracy", f"{name}_deployed_accuracy")]
        row.append(f"{total[f'{name}_logits_changed']}, {total[f'{name}_predictions_changed']}")
    row.insert(4, f"{total['fake_largest_change']:.2g}")
    return pages.table([header, row])


def finetune() -> str:
    """The results of each fine-tuning, and the cost of its steps."""
    held = results("finetune")
    times = f"ms per step, eager (level `{held['level']}`)"
    header = ["", "final loss", "held-out loss", "held-out accuracy", times, "ms, compiled", "saved, MB"]
    rows = [
        [
            f"`{name}`" if name.isupper() else name,
            f"{r['final_loss']:.4f}",
            f"{r['held_out_loss']:.4f}",
            f"{r['held_out_accuracy']:.1f} %",
            f"{r['eager_seconds'] * 1e3:.0f}",
            f"{r['compiled_seconds'] * 1e3:.0f}",
            f"{r['saved_bytes'] / 1e6:.1f}",
        ]
        for name, r in held["runs"].items()
    ]
    return pages.table([header, *rows])


def draw() -> bytes:
    """A PNG of the loss of each fine-tuning, and its distance from float32's."""
    plot = pyplot()
    curves = {name: smoothed(run["losses"]) for name, run in results("finetune")["runs"].items()}
    plain = curves["float32"]
    steps = np.arange(len(plain)) + WINDOW
    with plot.rc_context(STYLE):
        figure = plot.figure(figsize=(8, 5), dpi=120, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        figure.suptitle("Fine-tuning all-MiniLM-L6-v2 on the same batches", fontsize=11, fontweight="bold")
        # The lines overlap: a wide one, a narrow one, dashes.
        looks = zip(curves.items(), ((RULER, 6.0, "-"), (WHOLE, 2.0, "-"), (GROUPED, 1.4, (0, (4, 4)))), strict=True)
        for (name, curve), (color, width, dashes) in looks:
            above.plot(steps, curve, color=color, linewidth=width, linestyle=dashes, label=name)
            if name != "float32":
                below.plot(steps, 100 * (curve / plain - 1), color=color, linewidth=1.2, label=name)
        below.axhline(0, color=INK, linewidth=0.9)
        above.set(ylabel=f"loss, mean of {WINDOW} steps", ylim=(0, None))
        below.set(ylabel="against float32, %", xlabel="step")
        for axes in (above, below):
            axes.grid(color=DATA, linewidth=0.6)
            axes.legend(frameon=False, handlelength=1.6)
        picture = png(figure)
        plot.close(figure)
    return picture


def smoothed(losses: list[float]) -> np.ndarray[Any, Any]:
    """Moving averages over WINDOW steps."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid")


def estimators() -> str:
    """The errors of networks with 2-bit weights, by gradient estimator."""
    rows = [["gradient of rounding", "mean error", "relative to STE", "95 % interval"]]
    for name, row in results("estimators")["ways"].items():
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        rows.append([name, f"{statistics.mean(row['errors']):.2f}%", f"{row['ratio']:.2f}", interval])
    return pages.table(rows)


TABLES = {": digits": digits, ": estimators": estimators, ": finetune": finetune}
