"""Check the Hopper kernels on a GPU, time them against PyTorch's, and write benchmarks/results/gpu.json.

python -m benchmarks.gpu [--seconds 480] [--only WORD ...] [--output FILE]
python -m benchmarks.gpu --emulated       a few small products on the CPU, and the host's time without a launch
python -m benchmarks.gpu --build          compile all kernels, which needs no GPU

Checks come first, timings in the order of their weight; what no time is left for is skipped, and named. Each group of
cases runs in a process of its own (benchmarks.isolated). The results are written after each phase; the exit status is
1 if anything failed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_checks, gpu_report, gpu_times, isolated
from benchmarks.isolated import Outcome
from cutlass_kernels import missing

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "gpu.json"
SECONDS = 480.0
BUILT, CHECKED, WRITTEN = 0.3, 0.6, 0.97  # of the time: until when kernels are built, checks begun, timings begun
WEIGHTS = {"limits": 1.0, "host": 1.0, "int8": 6.0, "int8_to_bf16": 5.0, "fp8": 5.0, "fp8_blocks": 4.0, "by_tile": 3.0}
LEAST = 25.0  # seconds for a group, whose process takes some to start
SHOWN = 30  # failures that are printed; all are in the results
SIDE_BY_SIDE = 4  # groups of checks


class Run:
    """One run: what was found so far, and the time that is left."""

    def __init__(self, seconds: float, output: Path | None) -> None:
        self.begin, self.seconds, self.output = time.monotonic(), seconds, output
        self.results: dict[str, Any] = {"checks": {"passed": 0, "worst": {}}, "failed": [], "skipped": [], "rows": []}

    def until(self, share: float) -> float:
        """The moment when a share of the time is spent."""
        return self.begin + share * self.seconds

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def write(self, is_complete: bool = False) -> None:
        self.results |= {"seconds": round(time.monotonic() - self.begin), "complete": is_complete}
        self.results["goals"] = gpu_report.goals(self.results)
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.output.with_suffix(".part")
            temporary.write_text(json.dumps(self.results, indent=1, ensure_ascii=False) + "\n")
            os.replace(temporary, self.output)

    def good(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        """Those that passed; the others are recorded and said."""
        for o in outcomes:
            if o.state == "passed":
                yield o
                continue
            kept = self.results["failed" if o.is_bad else "skipped"]
            kept.append({"group": o.group, "case": o.case, "state": o.state, "error": o.error})
            if len(kept) <= SHOWN:
                error = o.error[:400] if o.state == "failed" else o.error[-400:]  # of a process, how it ended
                self.say(f"{o.state.upper()} {o.group.split('.')[-1]}, {o.case}: {error}")


# ---- phases


def describe(run: Run) -> dict[str, Any]:
    outcomes = isolated.run("benchmarks.gpu_checks:describe", run.until(1.0), patience=120.0)
    found = next((o.value for o in run.good(outcomes)), {})
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


def check(run: Run, groups: Sequence[str], workers: int = SIDE_BY_SIDE) -> None:
    checks, begin = run.results["checks"], time.monotonic()
    for o in run.good(isolated.together(groups, run.until(CHECKED), workers=workers, patience=90.0)):
        checks["passed"] += 1
        if isinstance(o.value, float) and o.value > 0:
            form = o.case.rsplit(", ", 4)[0]
            checks["worst"][form] = max(checks["worst"].get(form, 0.0), o.value)
        if checks["passed"] % 200 == 0:
            run.say(f"{checks['passed']} checks passed")
    run.say(f"{checks['passed']} checks passed in {time.monotonic() - begin:.0f} s")
    run.say(f"sums of floats were off by, in parts of what they may be: {checks['worst']}")


def measure(run: Run, groups: Sequence[str], last: float = WRITTEN) -> None:
    """Each group has its share of the time that is left, and LEAST at least."""
    weights = [WEIGHTS.get(_name(group), 1.0) for group in groups]
    for i, group in enumerate(groups):
        now = time.monotonic()
        share = (run.until(last) - now) * weights[i] / sum(weights[i:])
        deadline = min(run.until(last), now + max(LEAST, share))
        for o in run.good(isolated.run(group, deadline, patience=60.0)):
            _record(run, _name(group), o.value)
        run.write()


def _name(group: str) -> str:
    return group.split(":")[1]


def _record(run: Run, name: str, found: dict[str, Any]) -> None:
    """Keep and print what a group of timings gave."""
    if name == "limits":
        run.results.setdefault(name, {})[found["name"]] = found["per_s"]
        run.say(f"{found['name']}: {found['per_s'] / 1e12:.2f} T a second")
    elif name.startswith("host"):
        run.results.setdefault(name, {})[found["name"]] = found["us"]
        run.say(f"host, {found['name']}: {found['us']:.2f} µs a call, at least {found['least_us']:.2f}")
    elif name == "by_tile":
        run.results.setdefault(name, []).append(found)
        run.say(gpu_report.tile_line(found))
    else:
        run.results["rows"].append(found)
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
    return int(bool(failed))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the results go")
    parser.add_argument("--only", nargs="*", default=[], help="groups whose names contain one of these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--emulated", action="store_true", help="small products on the CPU, nothing is written")
    parser.add_argument("--build", action="store_true", help="compile all kernels and end")
    chosen = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"nothing to run: {reason}")
        return 0
    run = Run(chosen.seconds, None if chosen.emulated or chosen.build else chosen.output)
    if chosen.emulated:
        check(run, ["benchmarks.gpu_checks:emulated"])
        measure(run, ["benchmarks.gpu_times:host_stubbed"])
        return finish(run)
    if chosen.build:
        build(run, chosen.processes, share=1.0)
        return finish(run)
    if not torch.cuda.is_available():
        print("nothing to run: PyTorch finds no CUDA device here; --emulated runs small products on the CPU")
        return 0
    versions = describe(run)
    if versions.get("capability") != "9.0":
        run.say(f"nothing to run: the kernels are for compute capability 9.0, not {versions.get('capability')}")
        return int(bool(run.results["failed"]))

    def wanted(names: Sequence[str]) -> list[str]:
        return [name for name in names if not chosen.only or any(word in name for word in chosen.only)]

    build(run, chosen.processes)
    run.write()
    check(run, wanted(gpu_checks.names()))
    run.write()
    measure(run, wanted(gpu_times.names()))
    return finish(run)


if __name__ == "__main__":
    sys.exit(main())
