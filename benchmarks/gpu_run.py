"""One run on a GPU: its results, the remaining time, and its phases."""

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_report, isolated
from benchmarks.gpu_journal import Journal, is_left
from benchmarks.isolated import Outcome
from examples.common import json_rows

NOTHING_RAN = 3  # the exit status
BUILT, CHECKED, WRITTEN = (
    0.3,
    0.6,
    0.97,
)  # fractions of the time: ends of building kernels, starting checks, starting timings
WEIGHTS = {"limits": 1.0, "host": 1.0, "int8": 6.0, "int8_to_bf16": 5.0, "fp8": 5.0, "fp8_blocks": 4.0}
WEIGHTS |= {"groups": 2.0, "nibbles": 1.0, "by_tile": 3.0, "step_times": 1.0}
LEAST = 25.0  # seconds for a group, including the start of its process
SHOWN = 30  # printed failures; all are in the results
EVERY = 2.0  # seconds after which results are written again
SIDE_BY_SIDE = 4  # groups of checks to run in parallel


class Run:
    """The results of a run so far, and the remaining time."""

    def __init__(self, seconds: float, output: Path | None) -> None:
        self.begin, self.seconds, self.output = time.monotonic(), seconds, output
        self.results: dict[str, Any] = {"checks": {"passed": 0, "worst": {}}, "failed": [], "skipped": [], "rows": []}
        self.counts: Counter[str] = Counter()  # number of cases by outcome
        self.stage = ""
        self.journal: Journal | None = None
        self.written = -math.inf  # when the results were written

    def cases(
        self, groups: Sequence[str], deadline: float, *, workers: int = 1, patience: float = 60.0
    ) -> Iterator[Outcome]:
        """The outcomes of groups: those in the journal, then those of the cases that are left, which are kept there."""
        journal = self.journal
        if journal is None:
            yield from isolated.together(groups, deadline, workers=workers, patience=patience)
            return
        for group in groups:
            yield from journal.of(group)
        rest = [group for group in groups if group not in journal.closed]
        unfinished: set[str] = set()
        for o in isolated.together(rest, deadline, workers=workers, patience=patience, done=journal.names):
            journal.add(o)
            if is_left(o) or o.case == isolated.START:
                unfinished.add(o.group)
            yield o
            if time.monotonic() - self.written > EVERY:
                self.write()
        for group in rest:
            if group not in unfinished:
                journal.close(group)

    @property
    def ran(self) -> int:
        """The number of cases that ran, whatever the outcome."""
        return sum(count for state, count in self.counts.items() if state != "skipped")

    @property
    def status(self) -> int:
        """The exit status: 1 if something failed, NOTHING_RAN if nothing ran, else 0."""
        return 1 if self.results["failed"] else 0 if self.ran else NOTHING_RAN

    def until(self, share: float) -> float:
        """The time at which a fraction of the run's time is spent."""
        return self.begin + share * self.seconds

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def write(self, is_complete: bool = False) -> None:
        self.results |= {"seconds": round(time.monotonic() - self.begin), "complete": is_complete}
        self.results["goals"] = gpu_report.goals(self.results)
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.output.with_suffix(".part")
            temporary.write_text(json_rows(self.results) + "\n")
            os.replace(temporary, self.output)
        self.written = time.monotonic()

    def good(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        """The outcomes that passed; others are recorded and printed."""
        for o in outcomes:
            self.counts[o.state] += 1
            if o.state == "passed":
                yield o
                continue
            kept = self.results["failed" if o.is_bad else "skipped"]
            entry = {"group": o.group, "case": o.case, "state": o.state, "error": o.error}
            kept.append(entry | ({"stage": self.stage} if self.stage else {}))
            if len(kept) <= SHOWN:
                error = o.error[:400] if o.state == "failed" else o.error[-400:]  # for a process, the end of its output
                self.say(f"{o.state.upper()} {o.group.split('.')[-1]}, {o.case}: {error}")


# ---- phases


def describe(run: Run) -> dict[str, Any]:
    outcomes = isolated.run("benchmarks.gpu_machine:describe", run.until(1.0), patience=120.0)
    found = next((o.value for o in run.good(outcomes)), {})
    run.counts.clear()  # building neither checks nor times anything
    run.results["versions"] = found
    run.say(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def build(run: Run, processes: int, share: float = BUILT) -> None:
    begin, parts = time.monotonic(), [f"benchmarks.gpu_groups:build:{i}:{processes}" for i in range(processes)]
    outcomes = list(run.good(isolated.together(parts, run.until(share), workers=processes, patience=90.0)))
    seconds = [o.value for o in outcomes if o.value is not None]
    loaded = run.good(isolated.run("benchmarks.gpu_groups:load", run.until(share) + 20))
    milliseconds = [o.value for o in loaded if o.value is not None]
    found = {"kernels": len(outcomes), "compiled": len(seconds), "processes": processes}
    found |= {"seconds": round(time.monotonic() - begin, 1), "seconds_each": statistics.median(seconds or [0.0])}
    found |= {"most_seconds": max(seconds, default=0.0), "load_ms": statistics.median(milliseconds or [0.0])}
    run.results["build"] = found
    run.say(", ".join(f"{name} {value}" for name, value in found.items()))


def check(run: Run, groups: Sequence[str], workers: int = SIDE_BY_SIDE, last: float = CHECKED) -> None:
    checks, begin = run.results["checks"], time.monotonic()
    for o in run.good(run.cases(groups, run.until(last), workers=workers, patience=90.0)):
        checks["passed"] += 1
        if isinstance(o.value, float) and o.value > 0:
            form = o.case.rsplit(", ", 4)[0]
            checks["worst"][form] = max(checks["worst"].get(form, 0.0), o.value)
        if checks["passed"] % 200 == 0:
            run.say(f"{checks['passed']} checks passed")
    run.say(f"{checks['passed']} checks passed in {time.monotonic() - begin:.0f} s")
    run.say(f"largest errors of float sums, relative to the allowed errors: {checks['worst']}")


def measure(run: Run, groups: Sequence[str], last: float = WRITTEN) -> None:
    """Give each group its share of the remaining time, and at least LEAST."""
    weights = [WEIGHTS.get(_name(group), 1.0) for group in groups]
    for i, group in enumerate(groups):
        now = time.monotonic()
        share = (run.until(last) - now) * weights[i] / sum(weights[i:])
        deadline = min(run.until(last), now + max(LEAST, share))
        for o in run.good(run.cases([group], deadline)):
            _record(run, _name(group), o.value)
        run.write()


def _name(group: str) -> str:
    return group.split(":")[1]


def _record(run: Run, name: str, found: dict[str, Any]) -> None:
    """Store and print the results of a group of timings."""
    if name == "limits":
        run.results.setdefault(name, {})[found["name"]] = found["per_s"]
        run.say(f"{found['name']}: {found['per_s'] / 1e12:.2f} T a second")
    elif name.startswith("host"):
        run.results.setdefault(name, {})[found["name"]] = found["us"]
        run.say(f"host, {found['name']}: {found['us']:.2f} µs a call, at least {found['least_us']:.2f}")
    elif name == "by_tile":
        run.results.setdefault(name, []).append(found)
        run.say(gpu_report.tile_line(found))
    elif name == "step_times":
        run.results.setdefault("steps", []).append(found)
        run.say(gpu_report.step_line(found, run.results))
    else:
        key = [found[name] for name in ("group", "m", "n", "k")]
        rows = run.results["rows"]
        rows[:] = [row for row in rows if [row[name] for name in ("group", "m", "n", "k")] != key] + [found]
        run.say(gpu_report.line(found, run.results))


def finish(run: Run) -> int:
    run.write(is_complete=True)
    failed, skipped = run.results["failed"], run.results["skipped"]
    for group, count in Counter(entry["group"] for entry in failed).items():
        run.say(f"FAILED: {count} cases of {group.split('.')[-1]}")
    for entry in skipped:
        run.say(f"skipped: {entry['group'].split('.')[-1]}, {entry['case']}: {entry['error']}")
    if run.results["rows"]:
        print(gpu_report.table(run.results))
        for goal in run.results["goals"]:
            print(gpu_report.goal_line(goal))
    if run.output is not None:
        run.say(f"wrote {run.output}")
    run.say(f"{run.results['checks']['passed']} checks passed, {len(failed)} cases failed")
    return run.status
