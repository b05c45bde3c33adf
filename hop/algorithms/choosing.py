"""choose_bits: choose a scheme per layer to minimize the loss within a size or a time.

    minimize Σ loss[l, s] · x[l, s]    where each layer l has one scheme s: Σ_s x[l, s] = 1, x in {0, 1},
                                       and Σ size[l, s] · x[l, s] is at most `size`; likewise for seconds

solved by scipy.optimize.milp. Adding the losses of layers is exact to first order for `Fisher()` if the errors of
layers are uncorrelated; for `SQNR()` it is a heuristic.
"""

import glob
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hop.algorithms.candidates import candidates, list_batches
from hop.algorithms.sensitivity import FISHER, LayerCost, Measure, costs
from hop.nn.layers.base import spelled
from hop.nn.models.selectors import Selector
from hop.numerics.schemes import Scheme


@dataclass(frozen=True)
class ChosenLayer:
    """The scheme chosen for one layer; the loss is NaN if no batch reaches it."""

    cost: LayerCost
    note: str = ""


@dataclass(frozen=True)
class Chosen:
    """The result of `choose_bits`; str() formats it as a table.

    Attributes:
        rules: the rules to pass to `hop.quantize_`: each layer's name, as a pattern, with its scheme.
        layers: the chosen scheme and cost of each layer.
        costs: the cost of each layer in each scheme that was tried.
        left: the names of layers that support none of the schemes, with the reason.
        loss: the total loss of the layers that data reaches.
        size: total bytes of the weights' codes and scales; a shared weight counts once.
        seconds: total time of the layers' calls for the first batch; NaN without a time limit.
    """

    rules: dict[Any, Scheme | None]  # as Rules
    layers: tuple[ChosenLayer, ...]
    costs: tuple[LayerCost, ...]
    left: dict[str, str]
    loss: float
    size: int
    seconds: float

    def __str__(self) -> str:
        rows = [("layer", "bytes", "loss", "scheme")]
        for row in self.layers:
            c = row.cost
            scheme = "floats" if c.scheme is None else spelled(c.scheme)
            scheme += f"  ({row.note})" if row.note else ""
            rows.append((c.name or "(model)", f"{c.size:,}", f"{c.loss:.3g}", scheme))
        rows.append(("all", f"{self.size:,}", f"{self.loss:.3g}", ""))
        rows += [(name or "(model)", "", "", f"left: {why}") for name, why in self.left.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join(lines)

    def picture(self) -> Any:
        """Return a matplotlib Figure of each layer's chosen bits and its loss in each scheme.

        Raises ImportError without matplotlib: pip install 'torch-hop[report]'.
        """
        return _plot(self.layers, self.costs)


def choose_bits(
    model: nn.Module,
    schemes: Sequence[object],
    batches: Iterable[object],
    *,
    size: int | None = None,
    seconds: float | None = None,
    measure: Measure = FISHER,
    filter: Selector | None = None,
) -> Chosen:
    """Choose a scheme for each layer of a float model, with the least total loss within a size, a time, or both.

        chosen = choose_bits(model, [Quantizer(f, (1, 128)) for f in (INT3, INT4, INT5, INT6, INT8)], batches, size=n)
        hop.quantize_(model, chosen.rules)

    Args:
        model: the float model; it is not changed.
        schemes, batches, filter, measure: as for `sensitivity`.
        size: the most bytes that the codes and scales of the layers' weights may take in total, without padding bits:
            codes of 3, 5 and 6 bits take as much as in hop.layouts.Planes. Biases and other layers are not counted.
        seconds: the most time that the layers may take in total for the first batch, as `sensitivity(timed=True)`
            measures it on this machine.

    Returns:
        The rules and their costs. A layer that no batch reaches has no measurable loss: it gets the scheme with the
            most bytes, and its note says so.

    Raises:
        TypeError: an argument has the wrong type, or the model does not accept a batch.
        ValueError: neither size nor seconds is given; batches is empty; no layer supports any of the schemes; the
            output of a layer is not finite, in floats or in a scheme; or no choice is small or fast enough (the message
            gives the minimum).
        ImportError: scipy is not installed.
    """
    _check_limits(size, seconds)
    _milp()
    data = list_batches("choose_bits", batches)
    tried = candidates("choose_bits", model, schemes, data, filter)
    by_layer = costs("choose_bits", tried, data, measure, seconds is not None)
    groups = [_group(names, by_layer) for names in tried.sharing()]
    chosen = _solve([group.options for group in groups], size, seconds)
    place_of = {name: place for group, place in zip(groups, chosen, strict=True) for name in group.names}
    taken = [by_layer[name][place_of[name]] for name in tried.layers]
    layers = tuple(ChosenLayer(cost, _UNREACHED if math.isnan(cost.loss) else "") for cost in taken)
    options = [group.options[place] for group, place in zip(groups, chosen, strict=True)]
    return Chosen(
        {glob.escape(name): tried.schemes[place_of[name]] for name in tried.layers},
        layers,
        tuple(row for rows in by_layer.values() for row in rows.values()),
        tried.left,
        sum(option.loss for option in options),
        sum(option.size for option in options),
        sum(option.seconds for option in options),
    )


_UNREACHED = "no batch reaches it: it takes the scheme of the most bytes"


@dataclass(frozen=True)
class _Option:
    """The cost of layers that share a weight, in one scheme."""

    loss: float
    size: int
    seconds: float


@dataclass(frozen=True)
class _Group:
    names: list[str]
    options: dict[int, _Option]


def _group(names: list[str], by_layer: dict[str, dict[int, LayerCost]]) -> _Group:
    """The options of layers that share a weight, and so a scheme. Layers that no batch reaches have a single option."""
    shared = set.intersection(*(set(by_layer[name]) for name in names))
    if not shared:
        raise ValueError(
            f"choose_bits: layers {names} share a weight, and no scheme fits all of them; leave them out by filter="
        )
    options: dict[int, _Option] = {}
    for place in sorted(shared):
        rows = [by_layer[name][place] for name in names]
        reached = [row.loss for row in rows if not math.isnan(row.loss)]
        if any(math.isinf(loss) for loss in reached):
            raise ValueError(
                f"choose_bits: the loss of layer {names[0]!r} in {rows[0].scheme} is not finite; leave the scheme out, "
                "or the layer by filter="
            )
        options[place] = _Option(math.fsum(reached), rows[0].size, sum(row.seconds for row in rows))
    if all(math.isnan(by_layer[name][place].loss) for name in names for place in shared):
        largest = max(options, key=lambda place: options[place].size)
        untimed = _Option(0.0, options[largest].size, 0.0)  # the layer is never called
        options = {largest: untimed}
    return _Group(names, options)


def _solve(options: list[dict[int, _Option]], size: int | None, seconds: float | None) -> list[int]:
    """The index of the scheme that each group gets."""
    import numpy as np
    from scipy.sparse import csr_matrix

    flat = [(group, place, option) for group, by in enumerate(options) for place, option in by.items()]
    loss = np.array([option.loss for _, _, option in flat])
    loss = loss * (1e6 / max(loss.max(), 1e-300))  # the solver's tolerances are absolute
    groups = [group for group, _, _ in flat]
    one = csr_matrix((np.ones(len(flat)), (groups, range(len(flat)))))
    constraints: list[object] = [(one, 1, 1)]
    for name, limit in (("size", size), ("seconds", seconds)):
        if limit is not None:
            unit = 1 if name == "size" else limit  # bytes are integers, seconds may be small
            row = np.array([[getattr(option, name) / unit for _, _, option in flat]])
            constraints.append((row, -math.inf, limit / unit))
    answer = _milp()(
        loss, integrality=np.ones(len(flat)), bounds=(0, 1), constraints=constraints, options={"mip_rel_gap": 0}
    )
    if answer.x is None:
        least = {
            name: sum(min(getattr(option, name) for option in by.values()) for by in options)
            for name in ("size", "seconds")
        }
        raise ValueError(
            f"choose_bits: no choice has size={size} and seconds={seconds}: the least are {least['size']} bytes"
            + (f" and {least['seconds']:.3g} seconds" if seconds is not None else "")
            + "; give more, or schemes of fewer bits"
        )
    return [place for (_, place, _), x in zip(flat, answer.x, strict=True) if x > 0.5]


def _check_limits(size: Any, seconds: Any) -> None:
    if size is None and seconds is None:
        raise ValueError("choose_bits: size and seconds are None, so the most bits are best; give one of them")
    for name, limit, kind in (("size", size, int), ("seconds", seconds, int | float)):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, kind):
            raise TypeError(f"choose_bits: {name} must be a number, got {limit!r}; give one such as 1_000_000")
        if not 0 < limit < math.inf:
            raise ValueError(f"choose_bits: {name} must be above 0 and finite, got {limit!r}; give such a number")


def _milp() -> Any:
    try:
        from scipy.optimize import milp
    except ImportError as error:
        raise ImportError("choose_bits needs scipy: pip install 'torch-hop[algorithms]'") from error
    return milp


_CHOSEN, _OTHERS = "#d55e00", "0.6"


def _plot(layers: Sequence[Any], costs: Sequence[LayerCost]) -> Any:
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
