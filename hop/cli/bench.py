"""hop bench: run the benchmarks of the source tree."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import hop
from hop.cli.output import Bar, as_json, say, show
from hop.compat.files import write_whole
from hop.numerics.spelling import JsonObject

_STDOUT = Path("-")

File = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file; - is stdout.")
]
Compare = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Compare with these results.")
]
Results = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Use these results; run nothing.")
]


def bench(
    group: Annotated[list[str] | None, typer.Argument(help="The groups to run.", show_default="all")] = None,
    json_file: File = None,
    compare: Compare = None,
    results: Results = None,
    slower: Annotated[float, typer.Option(min=1.0, help="Report a case as slower from this ratio on.")] = 1.15,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the groups and exit.")] = False,
) -> int:
    """Run the benchmarks: ours and a peer's in one process, in turns. They are part of the source tree, next to hop/.

    ours/peer is our time divided by the peer's: below 1, ours is faster. --compare shows each case with its old and its
    new time and the change of ours/peer, so that results from differently loaded machines compare. An interrupted run
    writes the results that it has.

    Exit status: 0; 1 if a case has become slower than --slower allows; 2 if there is no such group.

    Examples:
        hop bench --list
        hop bench mm overhead --json before.json
        hop bench mm overhead --compare before.json
        hop bench --results after.json --compare before.json --slower 1.05
    """
    running = benchmarks("running")
    if list_:
        show("\n".join(running.NAMES))
        return 0
    try:
        groups = running.chosen(group or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="GROUP") from error
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="'--json'")
    old = None if compare is None else _read(compare)
    new = _measured(groups, json_file) if results is None else _read(results)
    return 0 if old is None else _compared(old, new, slower, say if json_file == _STDOUT else show)


def _measured(groups: list[Any], file: Path | None) -> JsonObject:
    """The results of groups; rows are shown as they come, and written when the last one is there, or no more come."""
    running, timing = benchmarks("running"), benchmarks("timing")
    timing.keep_freed_memory()
    tell = say if file == _STDOUT else show  # JSON alone is on stdout
    tell(running.HEADER, style="bold")
    rows = []
    try:
        with Bar(len(groups), "", ticks=False) as bar:  # no ticking thread disturbs the timings
            above = bar.say if file == _STDOUT else bar.show
            for one in groups:
                bar.doing(one.__name__)
                for row in one():
                    rows.append(row)
                    above(running.line(row), style="red" if row.met is False else None)
                bar.step()
    finally:
        result = running.results(rows)
        if rows:
            _write(result, file)
    tell(running.summary(rows))
    return result


def _write(results: Mapping[str, object], file: Path | None) -> None:
    if file == _STDOUT:
        print(as_json(results), flush=True)
    elif file is not None:
        write_whole(file, as_json(results) + "\n")


def _compared(old: Mapping[str, object], new: Mapping[str, object], slower: float, tell: Callable[..., None]) -> int:
    comparing = benchmarks("comparing")
    changes = comparing.compared(old, new)
    for difference in comparing.conditions(old, new):
        say(f"measured under other conditions: {difference}", style="yellow")
    tell(comparing.HEADER, style="bold")
    for change in changes:
        tell(change.line(slower), style="red" if change.factor > slower else None)
    worse = sum(change.factor > slower for change in changes)
    tell(f"{worse} of {len(changes)} cases take more than {slower:g} times as long", style="red" if worse else "green")
    return 1 if worse else 0


def _read(path: Path) -> JsonObject:
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or "rows" not in result:
        raise ValueError(f"{path} has no results of hop bench --json: 'rows' is missing")
    return result


def benchmarks(name: str) -> Any:
    """Import a module of the source tree's benchmarks."""
    root = Path(hop.__file__).resolve().parents[1]
    if not (root / "benchmarks" / f"{name}.py").is_file():
        raise FileNotFoundError(
            f"the benchmarks are part of the source tree, and {root} has none: run hop from a checkout that "
            "is installed in place (pip install --editable .)"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
