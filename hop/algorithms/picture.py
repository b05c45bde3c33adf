"""The matplotlib figure of chosen bits."""

from collections.abc import Sequence
from typing import Any

from hop.algorithms.sensitivity import LayerCost

_CHOSEN, _OTHERS = "#d55e00", "0.6"


def plot_chosen(layers: Sequence[Any], costs: Sequence[LayerCost]) -> Any:
    """Plot the bits of each layer, and its loss in each scheme with the chosen one marked."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("picture needs matplotlib: pip install 'torch-hop[report]'") from error
    figure = Figure(figsize=(max(6.0, 0.22 * len(layers) + 2), 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    place = {row.cost.name: i for i, row in enumerate(layers)}
    others = [(place[c.name], c.loss) for c in costs if c.loss > 0]
    chosen = [(i, row.cost.loss) for i, row in enumerate(layers) if row.cost.loss > 0]
    for points, colour, label in ((others, _OTHERS, "in each scheme"), (chosen, _CHOSEN, "chosen")):
        if points:
            top.plot(*zip(*points, strict=True), "o", ms=4, color=colour, label=label)
    if others:
        top.set_yscale("log")
        top.legend(frameon=False)
    top.set_ylabel("loss")
    bottom.bar(range(len(layers)), [_bits(row.cost) for row in layers], color=_CHOSEN)
    bottom.set_ylabel("bits of the weight")
    bottom.set_xticks(range(len(layers)), [row.cost.name or "(model)" for row in layers], rotation=90, fontsize=6)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bits(cost: LayerCost) -> int:
    scheme = cost.scheme
    return 32 if scheme is None or scheme.rhs is None else scheme.rhs.format.bits
