"""The ten rows that matter, and their picture, docs/performance.svg."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from benchmarks.running import quotient, time_of
from benchmarks.timing import Row
from docs.diagrams import AMBER, BLUE, PAPER, SOFT, svg, text
from tests.support import pages

# What a row is called, and patterns of its group, case and peer, in each of which * stands for anything.
TEN = {
    "int8 linear layer, 1 row": ("int8 linear", "1x4096x4096,*", "bfloat16 linear"),
    "int8 linear layer, 128 rows": ("int8 linear", "128x4096x4096,*", "bfloat16 linear"),
    "int8 linear layer, 128 rows ": ("int8 linear", "128x4096x4096, affine*", "onednn.qlinear*"),
    "fp8 linear layer, 128 rows": ("decoded", "fp8 row x row, 128x*", "bfloat16 linear"),
    "weight of int4 in groups, 1 row": ("decoded", "bfloat16 x int4 groups, 1x*", "aten int4pack mm"),
    "int8 by int4 in groups, 128 rows": ("decoded", "8da4w, 128x*", "bfloat16 linear"),
    "convolutions of ResNet-50, int8": ("int8 conv2d", "ResNet-50, batch 1, to uint8", "onednn.qconv2d"),
    "MiniLM, int8 layers": ("MiniLM", "*, eager", "bfloat16, eager"),
    "training a layer in int8": ("training", "int8, backward in int8, 1024x1024x4096", "bfloat16"),
    "AdamW, states of 8 bits": ("optimizers", "AdamW, 8 bits*, bfloat16", "torch, fused"),
}
WIDTH, LEFT, LINE, HEAD = 440, 14, 42, 62  # of the picture, the bars' left, a row, and what stands above the rows


class Shown(NamedTuple):
    name: str
    row: Row


def ten(results: Mapping[str, Any]) -> list[Shown]:
    """Those of the ten that the results have. Raises ValueError where more than one row fits."""
    found = []
    for name, patterns in TEN.items():
        rows = [Row(**r) for r in results["rows"] if _fits(r, patterns)]
        if len(rows) > 1:
            raise ValueError(f"{len(rows)} rows of the results fit {patterns}, which must name one")
        found += [Shown(name.strip(), row) for row in rows]
    return found


def _fits(row: Mapping[str, Any], patterns: Sequence[str]) -> bool:
    return all(map(fnmatchcase, (row["group"], row["case"], row["peer"]), patterns))


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row, with a column for each level that has some: our time by the peer's, and the times."""
    results = [held for held in results if ten(held)]
    cells = {(s.name, s.row.peer): [""] * len(results) for held in results for s in ten(held)}
    for column, held in enumerate(results):
        for shown in ten(held):
            row = shown.row
            said = f"**{quotient(row.times)}** ({time_of(row.ours_ms)} / {time_of(row.peer_ms)})"
            cells[shown.name, row.peer][column] = said
    header = ["ours", "peer", *(f"ours / peer, level `{held['level']}`" for held in results)]
    return pages.table([header, *([*names, *found] for names, found in cells.items())])


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """The picture: a group of bars for each level, as long as our time by the peer's; a line where both are equal."""
    shown = [(f"CPU level {held['level']}", rows) for held in results if (rows := ten(held))]
    longest = max((row.times for _, rows in shown for _, row in rows), default=1.0)
    one = (WIDTH - LEFT - 50) / max(longest, 1.2)  # pixels of the ratio 1
    parts, top = [], 0
    for title, rows in shown:
        parts += _group(title, rows, top, one)
        top += HEAD + LINE * len(rows) + 14
    return svg(WIDTH, max(top, HEAD), "Our time by the peer's, of ten rows: shorter is faster", parts)


def _group(title: str, rows: Sequence[Shown], top: int, one: float) -> list[str]:
    """A level's bars, from `top` down."""
    equal = round(LEFT + one)
    parts = [
        text(LEFT, top + 24, title, size=16, weight=600, anchor="start"),
        text(LEFT, top + 48, "← ours is faster", colour=SOFT, anchor="start"),
        text(equal, top + 48, "as fast as the peer", colour=SOFT),
        text(equal + 72, top + 48, "slower →", colour=SOFT, anchor="start"),
    ]
    for i, (name, row) in enumerate(rows):
        parts += _bar(name, row, top + HEAD + LINE * i, one)
    return parts


def _bar(name: str, row: Row, top: int, one: float) -> list[str]:
    """Its name, the bar below, a piece of the line where both are equal, and the number, which covers the line."""
    edge, fill = BLUE if row.times < 1 else AMBER
    long, equal = round(one * row.times), round(LEFT + one)
    number = text(LEFT + long + 6, top + 29, quotient(row.times), size=13, weight=600, anchor="start")
    return [
        text(LEFT, top + 11, f"{name}, against {row.peer}", size=13, anchor="start"),
        f'<rect x="{LEFT}" y="{top + 17}" width="{long}" height="14" fill="{fill}" stroke="{edge}"/>',
        f'<path d="M{equal} {top + 14}v20" stroke="{SOFT}" stroke-width="1.5"/>',
        number.replace("<text ", f'<text paint-order="stroke" stroke="{PAPER}" stroke-width="5" ', 1),
    ]
