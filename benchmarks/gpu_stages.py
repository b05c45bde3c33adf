"""The stages of a quarter of an hour on a GPU, the most telling first: python -m benchmarks.gpu --stage NAME.

Each stage has its own time limit and adds to the results of earlier stages on the same machine. Outcomes are written as
they come, to a journal beside the results, from which a stage that was cut off goes on. It needs Python, torch and
kernels, from the CuTe DSL or prebuilt (HOP_KERNELS); no pip, no network.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import gpu_checks, gpu_first, gpu_machine, gpu_operators, gpu_profiles, gpu_report, gpu_times, isolated
from benchmarks.gpu_journal import Journal
from benchmarks.gpu_run import NOTHING_RAN, Run, check, measure
from cutlass_kernels import prebuilt

ALL = 0.97  # cases start until this fraction of a stage's time


@dataclass(frozen=True)
class Stage:
    """A stage with its time in seconds. If nothing passed in a stage with `first`, later ones are not run."""

    seconds: float
    what: str
    run: Callable[[Run], None]
    first: bool = False


def _one_by_one(groups: Sequence[str], patience: float, share: float = ALL) -> Callable[[Run], None]:
    """Run groups one after another, each in a process; values are stored under the stage's name."""

    def run(run: Run) -> None:
        values = run.results.setdefault(run.stage, {})
        for o in run.good(_said(run, run.cases(groups, run.until(share), patience=patience))):
            values[o.case] = _with_time(o)

    return run


def _first(run: Run) -> None:
    """One tile; if it is right, every tile, a kernel of each family, and times of int8 and fp8."""
    one, *others = gpu_first.names()
    _one_by_one([one], 45.0, 0.5)(run)
    if run.counts["passed"]:
        _one_by_one(others, 15.0, 0.6)(run)
        measure(run, gpu_first.timings(), last=ALL)


def _with_time(o: isolated.Outcome) -> dict[str, Any]:
    return {"value": o.value, "seconds": round(o.seconds, 2)}


def _said(run: Run, outcomes: Iterator[isolated.Outcome]) -> Iterator[isolated.Outcome]:
    for o in outcomes:
        if o.state == "passed":
            run.say(f"passed {o.case} in {o.seconds:.1f} s")
        yield o


def _checks(run: Run) -> None:
    run.results["checks"] = {"passed": 0, "worst": {}}
    check(run, [*gpu_operators.names(), *gpu_checks.names()], last=ALL)


def _timings(run: Run) -> None:
    for name in ("limits", "host", "by_tile", "steps"):
        run.results.pop(name, None)
    measure(run, gpu_times.names(), last=ALL)


_QUANTIZE = ["benchmarks.gpu_quantize:checks", "benchmarks.gpu_quantize:timings"]
STAGES = {
    "first": Stage(
        90.0,
        "every tile, a kernel of each family, and times of int8 and fp8",
        _first,
        first=True,
    ),
    "sanitizer": Stage(90.0, "compute-sanitizer", _one_by_one(["benchmarks.gpu_checks:sanitized"], 60.0)),
    "checks": Stage(
        240.0, "every form with every tile, operators, optimizer steps, compared with the CPU's bits", _checks
    ),
    "quantize": Stage(
        90.0, "quantizing, compared with the CPU's bits and timed against a copy", _one_by_one(_QUANTIZE, 30.0)
    ),
    "timings": Stage(240.0, "times of ours and of PyTorch's kernels", _timings),
    "profiles": Stage(60.0, "a profile of each kernel", _one_by_one(gpu_profiles.names(), 30.0)),
}


def run_all(run: Run, names: Sequence[str], seconds: float | None = None) -> int:
    """Run stages in order; returns the exit status."""
    chosen = [name for name in STAGES if name in names or "all" in names]
    _resume(run, chosen)
    statuses: list[int] = []
    for name in chosen:
        given_up = statuses[:1] == [1] and STAGES[chosen[0]].first and not run.results["stages"][chosen[0]]["passed"]
        statuses.append(_not_run(run, name, f"{chosen[0]} failed") if given_up else _one(run, name, seconds))
    missed = [name for name, status in zip(chosen, statuses, strict=True) if status == NOTHING_RAN]
    print(gpu_report.stages(run.results))
    if missed:
        run.say(f"nothing ran of: {', '.join(missed)}")
    if run.output is not None:
        run.say(f"wrote {run.output}")
    return 1 if 1 in statuses else NOTHING_RAN if missed == chosen else 0


def _one(run: Run, name: str, seconds: float | None) -> int:
    """Run a stage; returns 1 if something failed, NOTHING_RAN if nothing ran."""
    stage, failed = STAGES[name], len(run.results["failed"])
    run.stage, run.begin, run.seconds = name, time.monotonic(), seconds or stage.seconds
    run.counts.clear()
    run.say(f"{name}: {stage.what}, {run.seconds:.0f} s at most")
    before = gpu_machine.clocks()
    stage.run(run)
    counts = {state: run.counts[state] for state in ("passed", "failed", "hung", "died", "skipped")}
    spent = {"seconds": round(time.monotonic() - run.begin, 1), "of_seconds": run.seconds}
    run.results["stages"][name] = counts | spent | {"clocks": {"before": before, "after": gpu_machine.clocks()}}
    run.write(is_complete=True)
    run.say(f"{name}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if len(run.results["failed"]) > failed else 0 if run.ran else NOTHING_RAN


def _not_run(run: Run, name: str, why: str) -> int:
    run.results["stages"][name] = {"skipped": 1, "why": why}
    run.results["skipped"].append({"group": "", "case": name, "state": "skipped", "error": why, "stage": name})
    run.write(is_complete=True)
    run.say(f"{name}: did not run: {why}")
    return NOTHING_RAN


def _resume(run: Run, chosen: Sequence[str]) -> None:
    """Load the results of earlier stages on this machine with these sources, without those of the chosen ones, whose
    outcomes are in the journal.
    """
    versions, sources = run.results["versions"], prebuilt.sources()
    machine = {"machine": gpu_report.machine(versions), "sources": sources}
    if run.output is not None:
        run.journal = Journal(run.output.with_suffix(".jsonl"), machine)
    if run.output is not None and run.output.exists():
        found = json.loads(run.output.read_text())
        if (gpu_report.machine(found.get("versions", {})), found.get("sources")) == (machine["machine"], sources):
            run.results = run.results | found | {"versions": versions}
    run.results["sources"] = sources
    for name in chosen:
        run.results.pop(name, None)
    for kept in ("failed", "skipped"):
        run.results[kept] = [e for e in run.results[kept] if e.get("stage", chosen[0]) not in chosen]
    run.results["stages"] = {n: v for n, v in run.results.get("stages", {}).items() if n not in chosen}
