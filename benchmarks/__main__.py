"""Run the benchmarks and print a table.

Without names, also write the results of this CPU level to benchmarks/results, fill docs/performance.md,
docs/which_scheme.md and docs/performance_tables.md, and draw docs/performance.svg and docs/roofline.svg. With --update,
replace the rows of the named groups in the results, or write a new file.

python -m benchmarks [--update] [--level LEVEL] [GROUP ...]
python -m benchmarks --page      # the pages and pictures again, from the results on disk
python -m benchmarks tune        # the table of the fastest integer products, see benchmarks/tune.py
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import hop
from benchmarks import native, performance, roofline, running, tune
from benchmarks.roofline import DRAWN, ROOT, file_of
from benchmarks.running import here, line
from benchmarks.timing import Row, keep_freed_memory
from examples.common import json_rows
from hop.kernels.cpu.native import LEVELS
from tests import levels


def updated(results: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The results with rows replaced by those of the same case and peer, or added at the end.

    Raises ValueError for results that were measured under other conditions.
    """
    for name, value in here().items():
        if results[name] != value:
            raise ValueError(f"--update: the results on disk are those of {name} {results[name]}, and here is {value}")
    new = {(r.group, r.case, r.peer): asdict(r) for r in rows}
    found = [new.pop((r["group"], r["case"], r["peer"]), r) for r in results["rows"]]
    return results | {"rows": [*found, *new.values()]}


def write(results: dict[str, Any]) -> None:
    """Write results, and the page and pictures that show them."""
    path = file_of(results["level"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(json_rows(results) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
    show()


def show() -> None:
    """Write the page and pictures of the results on disk."""
    performance.write()
    if file_of(DRAWN).exists():
        roofline.main()


def is_held_to(level: str) -> bool:
    """Whether this process uses that CPU level, also for PyTorch and oneDNN if the CPU's own level is higher."""
    is_own = level == levels.BEST
    return here()["level"] == level and (is_own or levels.environment(level) == dict(os.environ))


def forced(level: str) -> int:
    """Rerun this command in a process with a lower CPU level, also for PyTorch and oneDNN; returns its exit status.

    Raises SystemExit for a level that the CPU does not have.
    """
    if level not in levels.HERE:
        raise SystemExit(f"--level: needs the CPU level {level}, and this CPU's is {levels.BEST}")
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    return subprocess.run(command, env=levels.environment(level), check=False).returncode


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*running.NAMES, []], help="which to run; all without names")
    parser.add_argument("--update", action="store_true", help="write the rows of the named groups over those on disk")
    parser.add_argument("--level", choices=LEVELS, help="take the CPU for one of this level")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page from the results on disk")
    return parser.parse_args()


def measured(groups: Sequence[str]) -> list[Row]:
    """The rows of the groups, printed as they are measured."""
    keep_freed_memory()
    of = ", ".join(f"{name} {value}" for name, value in here().items())
    print(f"hop {hop.__version__}, {of}, {platform.machine()}\n{running.HEADER}")
    rows = []
    for group in running.chosen(groups):
        for row in group():
            rows.append(row)
            print(line(row), flush=True)
    return rows


def main() -> None:
    if sys.argv[1:2] == ["tune"]:
        tune.main(sys.argv[2:])
        return
    given = arguments()
    if given.page:
        show()
        return
    if given.level and not is_held_to(given.level):
        sys.exit(forced(given.level))
    path = file_of(here()["level"])
    rows = measured(given.groups)
    if set(given.groups) in (set(), set(running.NAMES)) or (given.update and not path.exists()):
        write({**here(), **native.limits(), **running.results(rows)})
    elif given.update:
        write(updated(json.loads(path.read_text()), rows))
    print(running.summary(rows))


if __name__ == "__main__":
    main()
