"""Draw docs/roofline.svg: the products in benchmarks/results/cpu_amx.json under the two limits of their machine.

python -m benchmarks.roofline

The model is that of Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures": with i operations per byte moved, a product reaches at most min(peak, i * bandwidth)
operations per second.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import Row
from docs.drawing import DATA, GROUPED, INK, RULER, STYLE, WHOLE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DRAWN = "amx"  # the CPU level with a known peak, that of its matrix unit
PICTURE = ROOT / "docs" / "roofline.svg"
COLORS = {"int8 linear": WHOLE, "decoded": GROUPED}  # colours of the groups that are drawn
MARKERS = "osD^v"  # markers of the peers
COLUMNS = 3  # columns of names below the picture
LABEL, POINT = (11.0, 9.0), 7.0  # printed sizes of a number and of a point, in points of 1/72 inch


def file_of(level: str) -> Path:
    """The results file of a CPU level."""
    return RESULTS / f"cpu_{level}.json"


class Point(NamedTuple):
    """A product: its name, operations per byte moved, and tera-operations per second."""

    name: str
    intensity: float
    tops: float


def ours(rows: Iterable[Row], group: str) -> list[Point]:
    return _fastest(
        Point(row.case.removesuffix(", packed"), row.operations / row.bytes, row.operations / row.ours_ms / 1e9)
        for row in rows
        if row.group == group and row.bytes
    )


def peers(rows: Iterable[Row]) -> list[Point]:
    """The peers' products, without our own in another format."""
    return _fastest(
        Point(row.peer, row.operations / row.peer_bytes, row.operations / row.peer_ms / 1e9)
        for row in rows
        if row.group in COLORS and row.peer_bytes and not row.peer.startswith("ours")
    )


def _fastest(points: Iterable[Point]) -> list[Point]:
    """One point per name and intensity, because a product is timed again with each peer."""
    found: dict[tuple[str, float], Point] = {}
    for point in points:
        key = point.name, point.intensity
        found[key] = max(found.get(key, point), point)
    return list(found.values())


# ---- drawing


def draw(results: Mapping[str, Any]) -> bytes:
    """The picture of the results, as a deterministic SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [Row(**row) for row in results["rows"]]
    peak, bandwidth = results.get("peak_tops", 0.0), results.get("bandwidth_gbs", 0.0) / 1e3  # bytes in TB
    with pyplot.rc_context(STYLE | {"svg.hashsalt": PICTURE.name, "svg.fonttype": "none"}):
        figure = pyplot.figure(figsize=(8.6, 6.6), facecolor="white")
        if peak and bandwidth and peers(rows):
            axes = figure.add_axes((0.08, 0.35, 0.9, 0.63))
            limits(axes, peak, bandwidth)
            products(axes, rows)
        else:
            text = "The results hold no limits of the machine or no sizes of products:\nmake bench measures them."
            figure.text(0.5, 0.5, text, ha="center")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return file.getvalue()


def limits(axes: Any, peak: float, bandwidth: float) -> None:
    """Draw the two limits, in tera-operations and terabytes per second."""
    left, right = 0.5, 4000.0
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bandwidth / 4, 2 * peak))
    axes.set_xlabel("operations for each byte of factors and result")
    axes.set_ylabel("tera-operations a second")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color=DATA, linewidth=0.6)
    begin = 1.15 * left  # left edge of the text
    units = [(peak, f"matrix unit, int8: {peak:.3g} TOPS", "-"), (peak / 2, "bfloat16: half of that", (0, (4, 3)))]
    for tops, text, style in units:
        axes.plot([left, tops / bandwidth], [tops, tops], color=RULER, linewidth=0.6)
        axes.plot([tops / bandwidth, right], [tops, tops], color=INK, linewidth=1.4, linestyle=style)
        axes.text(begin, 1.12 * tops, text)
    axes.plot([left, peak / bandwidth], [left * bandwidth, peak], color=INK, linewidth=1.4)
    (x0, y0), (x1, y1) = axes.transData.transform([(1.0, bandwidth), (10.0, 10 * bandwidth)])
    transposed = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
    axes.text(begin, 1.25 * begin * bandwidth, f"memory: {bandwidth * 1e3:.3g} GB/s", **transposed)


def products(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a point per product, ours filled and numbered, peers hollow."""
    numbered: list[tuple[Point, str]] = []
    for group, color in COLORS.items():
        found = ours(rows, group)
        numbered += [(point, color) for point in found]
        _marks(axes, found, "o", color=color, label=f"ours, {group}")
    others = peers(rows)
    names = dict.fromkeys(point.name for point in others)
    for name, marker in zip(names, MARKERS, strict=False):
        same = [point for point in others if point.name == name]
        _marks(axes, same, marker, color=INK, markerfacecolor="none", label=name)
    axes.legend(loc="lower right", frameon=False)
    points = [_on_paper(axes, point) for point in (*others, *(point for point, _ in numbered))]
    spots = free_spots(points, points[len(others) :])
    line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 7}
    for number, ((point, color), spot) in enumerate(zip(numbered, spots, strict=True), 1):
        place: Any = {"xytext": spot, "textcoords": "offset points", "ha": "center", "va": "center"}
        arrow = {"arrowprops": line | {"color": color}}
        axes.annotate(str(number), point[1:], color=color, fontsize=8, fontweight="bold", **place, **arrow)
    names_below(axes.figure, numbered)


def _marks(axes: Any, points: Sequence[Point], marker: str, **style: Any) -> None:
    axes.plot([p.intensity for p in points], [p.tops for p in points], marker, markersize=6, **style)


def _on_paper(axes: Any, point: Point) -> tuple[float, float]:
    """The printed position of a point, in points of 1/72 inch."""
    x, y = axes.transData.transform((point.intensity, point.tops)) * 72 / axes.figure.dpi
    return x, y


def names_below(figure: Any, numbered: Sequence[tuple[Point, str]]) -> None:
    """Draw the names of the numbered points, with their colours, in columns."""
    height = math.ceil(len(numbered) / COLUMNS)
    for i, (point, color) in enumerate(numbered):
        column, row = divmod(i, height)
        x, y = 0.03 + 0.33 * column, 0.25 - min(0.026, 0.24 / height) * row
        figure.text(x, y, str(i + 1), color=color, fontsize=8, fontweight="bold", ha="right")
        figure.text(x + 0.01, y, point.name, fontsize=8)


def free_spots(
    points: Sequence[tuple[float, float]], labelled: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """For each label, from top to bottom, the nearest offset at which it covers neither a point nor another label, in
    points of 1/72 inch.
    """
    taken = [(x, y, (LABEL[0] + POINT) / 2, (LABEL[1] + POINT) / 2) for x, y in points]
    offsets = [
        (radius * math.cos(turn * math.pi / 8), radius * math.sin(turn * math.pi / 8))
        for radius in range(10, 60, 3)
        for turn in (0, 8, 14, 10, 12, *range(1, 8))
    ]
    found: dict[tuple[float, float], tuple[float, float]] = {}
    for x, y in sorted(labelled, key=lambda point: -point[1]):
        found[x, y] = next(
            (dx, dy)
            for dx, dy in offsets
            if all(abs(x + dx - a) >= width or abs(y + dy - b) >= height for a, b, width, height in taken)
        )
        taken.append((x + found[x, y][0], y + found[x, y][1], *LABEL))
    return [found[point] for point in labelled]


def main() -> None:
    PICTURE.write_bytes(draw(json.loads(file_of(DRAWN).read_text())))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
