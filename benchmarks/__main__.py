"""Run the benchmarks and print a table; without names, also write it to benchmarks/results, a file for each level of
CPU, and to docs/performance.md, and draw docs/roofline.svg; with --update, put the rows of the named groups in the
place of those that are there.

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
from benchmarks import native, roofline, running
from benchmarks.roofline import DRAWN, ROOT, file_of
from benchmarks.running import here, line, ratio, time_of, verdict
from benchmarks.timing import Row, keep_freed_memory
from hop.kernels.cpu.native import LEVELS
from tests.support import pages

PAGE = ROOT / "docs" / "performance.md"


def table(rows: Sequence[Row]) -> str:
    """Rows as a table of the page."""
    header = ["", "case", "ours", "peer", "its time", "ratio", "target"]
    cells = [[r.group, r.case, time_of(r.ours_ms), r.peer, time_of(r.peer_ms), ratio(r), verdict(r)] for r in rows]
    return pages.table([header, *cells])


def page(text: str) -> str:
    """The page on performance with the results that are on disk: a table for each level of CPU, the highest first."""
    tables = []
    for level in reversed(LEVELS):
        if file_of(level).exists():
            held = json.loads(file_of(level).read_text())
            measured = f"**CPU level `{level}`**, {held['threads']} threads, torch {held['torch']}:"
            tables.append(f"{measured}\n\n{table([Row(**r) for r in held['rows']])}")
    return pages.filled(text, "python -m benchmarks", "\n".join(tables))


def updated(results: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Results, with rows in the place of those of the same case and peer, or at their end. Raises ValueError for
    results that were measured under other conditions."""
    for name, value in here().items():
        if results[name] != value:
            raise ValueError(f"--update: the results on disk are those of {name} {results[name]}, and here is {value}")
    new = {(r.group, r.case, r.peer): asdict(r) for r in rows}
    found = [new.pop((r["group"], r["case"], r["peer"]), r) for r in results["rows"]]
    return results | {"rows": [*found, *new.values()]}


def write(results: dict[str, Any]) -> None:
    """Results, and the page and the picture of them."""
    path = file_of(results["level"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {path.relative_to(ROOT)} and the tables of {PAGE.relative_to(ROOT)}")
    if results["level"] == DRAWN:
        roofline.main()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*running.NAMES, []], help="which to run; all without names")
    parser.add_argument("--update", action="store_true", help="write the rows of the named groups over those on disk")
    arguments = parser.parse_args()
    keep_freed_memory()
    print(f"hop {hop.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(running.HEADER)
    rows = []
    for group in running.chosen(arguments.groups):
        for row in group():
            rows.append(row)
            print(line(row), flush=True)
    if set(arguments.groups) in (set(), set(running.NAMES)):
        write({**here(), **native.limits(), **running.results(rows)})
    elif arguments.update:
        path = file_of(here()["level"])
        if not path.exists():
            raise SystemExit(f"--update: there is no {path.relative_to(ROOT)}; run all groups at this level first")
        write(updated(json.loads(path.read_text()), rows))
    print(running.summary(rows))


if __name__ == "__main__":
    main()
