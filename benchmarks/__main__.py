"""Run the benchmarks and print a table; without names, also write it to benchmarks/results and docs/performance.md,
and draw docs/roofline.svg; with --update, put the rows of the named groups in the place of those that are there.

python -m benchmarks [--update] [GROUP ...]
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import hop
from benchmarks import cases, convolutions, minilm, native, optimizers, roofline, training
from benchmarks.roofline import RESULTS, ROOT
from benchmarks.timing import Row, keep_freed_memory
from tests import pages

GROUPS = [*cases.GROUPS, *native.GROUPS, *convolutions.GROUPS, *training.GROUPS, *optimizers.GROUPS, *minilm.GROUPS]
PAGE = ROOT / "docs" / "performance.md"
HEADER = f"{'':12}{'case':42}{'ours':>11}  {'peer':24}{'':>11}{'ratio':>9}  target"


def line(row: Row) -> str:
    ours, peer = f"{row.case:42}{_time(row.ours_ms):>11}", f"{row.peer:24}{_time(row.peer_ms):>11}"
    return f"{row.group:12}{ours}  {peer}{ratio(row):>9}  {verdict(row)}"


def ratio(row: Row) -> str:
    """How many times as fast ours is; where that is the target, how many times as long or how much longer it takes."""
    if row.target.endswith("times"):
        return f"{row.times:.1f} times" if row.times >= 2 else f"{row.times:.2f} times"
    if row.target.endswith("s"):
        unit = row.target.split()[-1]
        over = {"µs": row.over_us, "ms": row.over_us / 1e3, "s": row.over_us / 1e6}[unit]
        return f"{over:+.2f} {unit}"
    return f"{row.speedup:.2f}" if row.speedup < 10 else f"{row.speedup:.0f}"


def verdict(row: Row) -> str:
    return "" if row.met is None else f"{row.target} {'met' if row.met else 'NOT MET'}"


def table(rows: Sequence[Row]) -> str:
    """The same for the page."""
    header = ["", "case", "ours", "peer", "its time", "ratio", "target"]
    cells = [[r.group, r.case, _time(r.ours_ms), r.peer, _time(r.peer_ms), ratio(r), verdict(r)] for r in rows]
    return pages.table([header, *cells])


def page(text: str) -> str:
    """The page on performance with the results that are on disk."""
    rows = [Row(**r) for r in json.loads(RESULTS.read_text())["rows"]]
    return pages.filled(text, "python -m benchmarks", table(rows))


def _time(ms: float) -> str:
    return f"{ms * 1e3:.2f} µs" if ms < 0.1 else f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"


def _here() -> dict[str, Any]:
    """What results of one table have in common."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def updated(results: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Results, with rows in the place of those of the same case and peer, or at their end. Raises ValueError for
    results that were measured under other conditions."""
    for name, value in _here().items():
        if results[name] != value:
            raise ValueError(f"--update: the results on disk are those of {name} {results[name]}, and here is {value}")
    new = {(r.group, r.case, r.peer): asdict(r) for r in rows}
    found = [new.pop((r["group"], r["case"], r["peer"]), r) for r in results["rows"]]
    return results | {"rows": [*found, *new.values()]}


def write(results: dict[str, Any]) -> None:
    """Results, and the page and the picture of them."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {RESULTS.relative_to(ROOT)} and the table of {PAGE.relative_to(ROOT)}")
    roofline.main()


def main() -> None:
    names = [g.__name__ for g in GROUPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*names, []], help="which to run; all without names")
    parser.add_argument("--update", action="store_true", help="write the rows of the named groups over those on disk")
    arguments = parser.parse_args()
    chosen = arguments.groups or names
    keep_freed_memory()
    print(f"hop {hop.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(HEADER)
    rows = []
    for group in GROUPS:
        if group.__name__ not in chosen:
            continue
        for row in group():
            rows.append(row)
            print(line(row), flush=True)
    if chosen == names:
        write({**_here(), **native.limits(), "rows": [asdict(r) for r in rows]})
    elif arguments.update:
        write(updated(json.loads(RESULTS.read_text()), rows))
    missed = [r for r in rows if r.met is False]
    print(f"{sum(r.met is True for r in rows)} targets met, {len(missed)} missed")


if __name__ == "__main__":
    main()
