"""The tables of ten cases (docs/performance.md) and of schemes (docs/which_scheme.md), and docs/performance.svg."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from benchmarks.peers import float_name
from benchmarks.running import quotient, time_of
from benchmarks.timing import Row
from docs.diagrams import AMBER, BLUE, PAPER, SOFT, svg, text
from docs.gallery_tables import bits_per_element
from hop.numerics.schemes import named
from tests.support import pages

# The name of each case, and the (group, case, peer) patterns of its row, where * matches anything and {float} is the
# dtype of the level's peers.
TEN = {
    "int8 linear layer, 1 row": ("int8 linear", "1x4096x4096,*", "{float} linear"),
    "int8 linear layer, 128 rows": ("int8 linear", "128x4096x4096,*", "{float} linear"),
    "int8 linear layer, 128 rows ": ("int8 linear", "128x4096x4096, affine*", "onednn.qlinear*"),
    "fp8 linear layer, 128 rows": ("decoded", "fp8 row x row, 128x*", "{float} linear"),
    "int4 weight in groups, 1 row": ("decoded", "{float} x int4 groups, 1x*", "aten int4pack mm"),
    "int8 × int4 in groups, 128 rows": ("decoded", "8da4w, 128x*", "{float} linear"),
    "ResNet-50's convolutions, int8": ("int8 conv2d", "ResNet-50, batch 1, to uint8", "onednn.qconv2d"),
    "MiniLM, int8 layers": ("MiniLM", "*, eager", "{float}, eager"),
    "training a layer in int8": ("training", "int8, backward in int8, 1024x1024x4096", "{float}"),
    "AdamW, 8-bit states": ("optimizers", "AdamW, 8 bits*, {float}", "torch, fused"),
}
WIDTH, LEFT, LINE, HEAD = 440, 14, 42, 62  # pixels: picture, left margin, row, header


class Measured(NamedTuple):
    """Measurements of a scheme that are not in the results on disk.

    cosine: mean cosine to float32's embeddings, all-MiniLM-L6-v2, 32 sentences, by `hop report --sweep`.
    products: (group, case) patterns of its product with {m} rows, 4096x4096.
    """

    cosine: float
    products: tuple[str, str]


SCHEMES = {
    "int8": Measured(0.997, ("int8 linear", "{m}x4096x4096, affine*")),
    "int8_weight": Measured(0.999, ("decoded", "{float} x int8, {m}x4096x4096*")),
    "8da4w": Measured(0.947, ("decoded", "8da4w, {m}x4096x4096*")),
    "int4": Measured(0.948, ("decoded", "{float} x int4 groups, {m}x4096x4096*")),
    "fp8": Measured(0.998, ("decoded", "fp8 row x row, {m}x4096x4096*")),
    "mxfp8": Measured(0.997, ("decoded", "MXFP8, {m}x4096x4096*")),
    "nvfp4": Measured(0.961, ("decoded", "NVFP4, {m}x4096x4096*")),
}


def schemes(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each scheme: bits of a weight, accuracy, and time / the peer's at each level."""
    results = [held for held in results if any(row["group"] == "decoded" for row in held["rows"])]
    levels = [f"`{held['level']}`: 1 row, 128 rows" for held in results]
    lines = [["scheme", "bits per weight", "cosine", *levels]]
    for name, measured in SCHEMES.items():
        weight = named(name).rhs
        assert weight is not None, name
        group, case = measured.products
        cells = []
        for held in results:
            rows = [_one(held, (group, case.replace("{m}", str(m)), "{float} linear")) for m in (1, 128)]
            cells.append(", ".join(quotient(row.times) for row in rows))
        bits = f"{bits_per_element(weight):.3g}"
        lines.append([f'`"{name}"`', bits, f"{measured.cosine:.3f}", *cells])
    return pages.table(lines)


def speeds(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of hop.nn.models.speeds: times of schemes / those of floats with 1 and with 128 rows, by level."""
    found = {}
    for held in results:
        if not any(row["group"] == "decoded" for row in held["rows"]):
            continue
        times = {
            name: [round(_one(held, (group, case.replace("{m}", m), "{float} linear")).times, 2) for m in ("1", "128")]
            for name, (_, (group, case)) in SCHEMES.items()
        }
        found[held["level"]] = {"float": float_name(held["level"]), "schemes": times}
    return found


def _one(results: Mapping[str, Any], patterns: Sequence[str]) -> Row:
    (row,) = _rows(results, patterns)
    return row


class Shown(NamedTuple):
    name: str
    row: Row


def ten(results: Mapping[str, Any]) -> list[Shown]:
    """The rows of TEN that the results have. Raises ValueError if a pattern matches more than one row."""
    found = []
    for name, patterns in TEN.items():
        rows = _rows(results, patterns)
        if len(rows) > 1:
            raise ValueError(f"{patterns} must match one row of the results, and matches {len(rows)}")
        found += [Shown(name.strip(), row) for row in rows]
    return found


def _rows(results: Mapping[str, Any], patterns: Sequence[str]) -> list[Row]:
    """The rows that match the patterns of their group, case and peer."""
    name = float_name(results["level"])
    patterns = [pattern.replace("{float}", name) for pattern in patterns]
    rows = [Row(**r) for r in results["rows"]]
    return [row for row in rows if all(map(fnmatchcase, (row.group, row.case, row.peer), patterns))]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each case, one column for each level: our time / the peer's."""
    results = [held for held in results if ten(held)]
    cells: dict[tuple[str, str], list[str]] = {}
    for column, held in enumerate(results):
        for name, row in ten(held):
            peer = row.peer.replace(float_name(held["level"]), "float")
            line = cells.setdefault((name, peer), [""] * len(results))
            line[column] = f"**{quotient(row.times)}** ({time_of(row.ours_ms)})"
    header = ["ours", "peer", *(f"`{held['level']}` (our time)" for held in results)]
    return pages.table([header, *([*names, *found] for names, found in cells.items())])


def models(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each row of whole models, at each level that has such rows."""
    lines = [["level", "model", "ours", "peer", "peer's time", "ours / peer"]]
    for held in results:
        rows = [Row(**r) for r in held["rows"] if r["group"] == "models"]
        for row in rows:
            own, other = time_of(row.ours_ms), time_of(row.peer_ms)
            lines.append([f"`{held['level']}`", row.case, own, row.peer, other, f"**{quotient(row.times)}**"])
    return pages.table(lines)


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """The picture: a bar of length ours / peer for each case, grouped by level, and a line at 1."""
    shown = [(f"CPU level {held['level']}", rows) for held in results if (rows := ten(held))]
    longest = max((row.times for _, rows in shown for _, row in rows), default=1.0)
    one = (WIDTH - LEFT - 50) / max(longest, 1.2)  # pixels of ratio 1
    parts, top = [], 0
    for title, rows in shown:
        parts += _group(title, rows, top, one)
        top += HEAD + LINE * len(rows) + 14
    return svg(WIDTH, max(top, HEAD), "Our time / the peer's, ten cases: shorter is faster", parts)


def _group(title: str, rows: Sequence[Shown], top: int, one: float) -> list[str]:
    """The bars of one level, from `top` down."""
    parts = [
        text(LEFT, top + 24, title, size=16, weight=600, anchor="start"),
        text(LEFT, top + 48, "our time / the peer's: shorter is faster, | is 1", colour=SOFT, anchor="start"),
    ]
    for i, (name, row) in enumerate(rows):
        parts += _bar(name, row, top + HEAD + LINE * i, one)
    return parts


def _bar(name: str, row: Row, top: int, one: float) -> list[str]:
    """One case: its name, its bar, a tick at 1, and the ratio."""
    edge, fill = BLUE if row.times < 1 else AMBER
    long, equal = round(one * row.times), round(LEFT + one)
    number = text(LEFT + long + 6, top + 29, quotient(row.times), size=13, weight=600, anchor="start")
    return [
        text(LEFT, top + 11, f"{name}, vs {row.peer}", size=13, anchor="start"),
        f'<rect x="{LEFT}" y="{top + 17}" width="{long}" height="14" fill="{fill}" stroke="{edge}"/>',
        f'<path d="M{equal} {top + 14}v20" stroke="{SOFT}" stroke-width="1.5"/>',
        number.replace("<text ", f'<text paint-order="stroke" stroke="{PAPER}" stroke-width="5" ', 1),
    ]
