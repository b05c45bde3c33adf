"""Run the benchmarks; print a table and write benchmarks/results/NAME.json.

python -m benchmarks [GROUP ...]    all groups without names
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

import hop
from benchmarks.cases import GROUPS
from benchmarks.timing import Row

RESULTS = Path(__file__).parent / "results"
HEADER = f"{'':12}{'case':38}{'ours':>11}  {'peer':24}{'':>11}{'ratio':>9}  target"


def line(row: Row) -> str:
    if row.target.endswith("s"):
        unit = row.target.split()[-1]
        over = {"µs": row.over_us, "ms": row.over_us / 1e3, "s": row.over_us / 1e6}[unit]
        ratio = f"+{over:.2f} {unit}"
    else:
        ratio = f"{row.speedup:.2f}" if row.speedup < 100 else f"{row.speedup:.0f}"
    verdict = "" if row.met is None else f"{row.target} {'met' if row.met else 'NOT MET'}"
    ours, peer = f"{row.case:38}{_time(row.ours_ms):>11}", f"{row.peer:24}{_time(row.peer_ms):>11}"
    return f"{row.group:12}{ours}  {peer}{ratio:>9}  {verdict}"


def _time(ms: float) -> str:
    return f"{ms * 1e3:.2f} µs" if ms < 0.1 else f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"


def main() -> None:
    names = [g.__name__ for g in GROUPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*names, []], help="which to run; all without names")
    chosen = parser.parse_args().groups or names
    print(f"hop {hop.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(HEADER)
    rows = []
    for group in GROUPS:
        if group.__name__ not in chosen:
            continue
        for row in group():
            rows.append(row)
            print(line(row), flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "out_dtype.json"
    if chosen == names:
        content = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "rows": [asdict(r) | {"speedup": r.speedup, "met": r.met} for r in rows],
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    missed = [r for r in rows if r.met is False]
    print(f"{sum(r.met is True for r in rows)} targets met, {len(missed)} missed")


if __name__ == "__main__":
    main()
