"""The goals and tables of benchmarks/results/gpu.json.

A product with few rows is limited by reading its weights, and compared with the bandwidth of a copy; one with more than
64 rows is compared with the peak of the matrix unit.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.support import pages

PEAK = 1979e12  # 8-bit operations per second of an H100 or H200, from its data sheet
FEW = 64  # up to this number of rows, memory is the limit
Row = Mapping[str, Any]
Results = Mapping[str, Any]


class Goal(NamedTuple):
    """A target for the geometric mean of a value over rows."""

    name: str
    target: float
    unit: str
    rows: Callable[[Row], bool]
    value: Callable[[Row, Results], float | None]


def _ratio(ours: str, peer: str) -> Callable[[Row, Results], float | None]:
    return lambda row, _: row["us"][peer] / row["us"][ours] if {ours, peer} <= row["us"].keys() else None


def tops(row: Row, ours: str = "ours") -> float:
    """Tera-operations per second."""
    return 2 * row["m"] * row["n"] * row["k"] / row["us"][ours] / 1e6


def of_memory(row: Row, results: Results, ours: str = "ours") -> float | None:
    """Percent of the bandwidth of a copy."""
    limit = results.get("limits", {}).get("copy")
    return 100 * row["bytes"] / row["us"][ours] * 1e6 / limit if limit else None


def _tops(row: Row, _: Results) -> float:
    return tops(row)


def _is(group: str, rows: Callable[[int], bool] = lambda m: True) -> Callable[[Row], bool]:
    return lambda row: row["group"] == group and rows(row["m"])


GOALS = (
    Goal("int8 to int32, times torch._int_mm", 1.0, "", _is("int8"), _ratio("ours", "_int_mm")),
    Goal("int8 to int32, M >= 4096", 1200, "TOPS", _is("int8", lambda m: m >= 4096), _tops),
    Goal(
        "int8 to bf16, times torch._int_mm and Inductor",
        1.3,
        "",
        _is("int8 to bf16"),
        _ratio("ours", "_int_mm + Inductor"),
    ),
    Goal("fp8 by rows, times torch._scaled_mm", 1.05, "", _is("fp8"), _ratio("ours", "_scaled_mm")),
    Goal("fp8 by rows, fast sums", 1.05, "", _is("fp8"), _ratio("ours fast", "_scaled_mm fast")),
    Goal("fp8 in blocks, M = 4096", 1200, "TFLOP/s", _is("fp8 blocks", lambda m: m == 4096), _tops),
    Goal(
        "64 groups, fp8, M = 16384, times one product of as many rows",
        0.9,
        "",
        _is("64 groups, fp8", lambda m: m == 16384),
        _ratio("ours", "one product"),
    ),
    *(
        Goal(f"{group}, M <= 32, of memory bandwidth", 70, "%", _is(group, lambda m: m <= 32), of_memory)
        for group in ("int8", "int8 to bf16", "fp8", "fp8 blocks")
    ),
)
HOST_US = 8.0  # target of microseconds per call


def goals(results: Results) -> list[dict[str, Any]]:
    """Each goal with its geometric mean, its lowest row, and whether it is met; None if nothing was measured."""
    found = []
    for goal in GOALS:
        rows = [(goal.value(row, results), row) for row in results.get("rows", []) if goal.rows(row)]
        values = [(value, row) for value, row in rows if value is not None]
        mean = geometric_mean(value for value, _ in values)
        lowest, at = min(values, key=lambda pair: pair[0], default=(None, {}))
        met = None if mean is None else mean >= goal.target
        shape = [at[name] for name in "mnk"] if at else None
        found.append(
            {"name": goal.name, "target": goal.target, "unit": goal.unit, "mean": mean, "rows": len(values)}
            | {"lowest": lowest, "lowest_at": shape, "met": met}
        )
    spent = results.get("host", {}).get("ours, scaled")
    met = None if spent is None else spent <= HOST_US
    host = {"name": "host time of a call, at most", "target": HOST_US, "unit": "µs", "mean": spent, "met": met}
    return [*found, host | {"rows": int(spent is not None), "lowest": None, "lowest_at": None}]


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def goal_line(goal: Mapping[str, Any]) -> str:
    verdict = {None: "not measured", True: "met", False: "NOT MET"}[goal["met"]]
    lowest = f", lowest {_short(goal['lowest'])} at {goal['lowest_at']}" if goal["lowest"] is not None else ""
    unit = f" {goal['unit']}".rstrip()
    return f"{goal['name']}: {_short(goal['mean'])}{unit} for {goal['target']:g}{unit}{lowest}: {verdict}"


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 20 else f"{value:.0f}"


# ---- the machine, and cases that did not run


_MACHINE = ("device", "capability", "driver", "torch", "python")


def machine(versions: Mapping[str, Any]) -> tuple[Any, ...]:
    """The versions that two runs must share to be comparable."""
    return tuple(versions.get(name) for name in _MACHINE)


def stages(results: Results) -> str:
    """Markdown with the machine, a line per stage, and the cases that did not run or failed."""
    versions = ", ".join(f"{name} {value}" for name, value in results.get("versions", {}).items())
    lines = [["stage", "passed", "failed", "skipped", "seconds", "SM clock before, after (MHz)"]]
    for name, found in results.get("stages", {}).items():
        bad = sum(found.get(state, 0) for state in ("failed", "hung", "died"))
        at = [found.get("clocks", {}).get(when, {}).get("clocks.sm", "–") for when in ("before", "after")]
        counts = (found.get("passed", 0), bad, found.get("skipped", 0), found.get("seconds", "–"))
        lines.append([name, *map(str, counts), ", ".join(at)])
    entries = [(kind, e) for kind in ("failed", "skipped") for e in results.get(kind, [])]
    named = [f"* {kind}: {e.get('stage', e['group'])}, {e['case']}: {_first_line(e['error'])}\n" for kind, e in entries]
    return "\n".join(filter(None, (f"On {versions}.\n", pages.table(lines), "".join(named))))


def _first_line(text: str, most: int = 200) -> str:
    return (text.strip().split("\n") or [""])[0][:most]


# ---- tables


def line(row: Row, results: Results) -> str:
    """A row as printed while it is measured."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    limit = of_limit(row, results)
    failed = "".join(f"; {name}: {why}" for name, why in row["failed"].items())
    return (
        f"{row['group']:13}{row['m']:5} {row['n']:6} {row['k']:6}  {tops(row):6.0f} T {limit:>7}  µs: {times}{failed}"
    )


def tile_line(row: Row) -> str:
    """The chosen tile, and the fastest one."""
    fastest, chosen = min(row["us"], key=row["us"].__getitem__), row["chosen"]
    lost = (
        f"{row['us'][chosen] / row['us'][fastest]:.2f} times the time of {fastest}" if fastest != chosen else "fastest"
    )
    return f"{row['form']:13}{row['m']:5} {row['n']:6} {row['k']:6}  {chosen} {row['us'][chosen]:.1f} µs: {lost}"


def step_line(row: Row, results: Results) -> str:
    """A step of an optimizer."""
    times, limit = ", ".join(f"{name} {us:.0f}" for name, us in row["us"].items()), of_memory(row, results)
    share = "" if limit is None else f", {limit:.0f} % of memory's bandwidth"
    return f"step, {row['kind']}, {row['elements'] / 1e6:.0f} million parameters: µs: {times}{share}"


def of_limit(row: Row, results: Results, ours: str = "ours") -> str:
    """Percent of the memory bandwidth up to FEW rows, and of the matrix unit's peak above."""
    share = of_memory(row, results, ours) if row["m"] <= FEW else 100 * tops(row, ours) * 1e12 / PEAK
    return "–" if share is None else f"{share:.0f} %"


def table(results: Results) -> str:
    """Markdown with a line per kind of product and number of rows: geometric means over the shapes (N, K)."""
    lines = [["", "M", "tera-operations a second", "of the limit", "times as fast as"]]
    for group in dict.fromkeys(row["group"] for row in results["rows"]):
        own = [row for row in results["rows"] if row["group"] == group]
        for m in sorted({row["m"] for row in own}):
            rows = [row for row in own if row["m"] == m]
            lines += [_line(group, ours, m, rows, results) for ours in ("ours", "ours fast") if ours in rows[0]["us"]]
    return pages.table(lines)


def _line(group: str, ours: str, m: int, rows: Sequence[Row], results: Results) -> list[str]:
    shares = [of_memory(r, results, ours) if m <= FEW else 100 * tops(r, ours) * 1e12 / PEAK for r in rows]
    share = geometric_mean(s for s in shares if s is not None)
    peers = dict.fromkeys(name for row in rows for name in row["us"] if not name.startswith("ours"))
    ratios = {peer: geometric_mean(r["us"][peer] / r["us"][ours] for r in rows if peer in r["us"]) for peer in peers}
    named = ", ".join(
        f"{_short(ratio)} {peer}" for peer, ratio in ratios.items() if ("fast" in ours) == ("fast" in peer)
    )
    limit = "–" if share is None else f"{share:.0f} % of {'memory' if m <= FEW else 'peak'}"
    name = group + ours.removeprefix("ours")
    return [name, str(m), _short(geometric_mean(tops(r, ours) for r in rows)), limit, named or "–"]


def markdown(results: Results) -> str:
    """The goals and the table."""
    header = ["goal", "at least", "geometric mean", "lowest", ""]
    verdicts = {None: "not measured", True: "met", False: "not met"}
    cells = [
        [g["name"], f"{g['target']:g} {g['unit']}".strip(), _short(g["mean"]), _short(g["lowest"]), verdicts[g["met"]]]
        for g in results["goals"]
    ]
    return pages.table([header, *cells]) + "\n" + table(results)
