"""Check the Hopper kernels on a GPU, time them against PyTorch's, and write benchmarks/results/gpu.json.

python -m benchmarks.gpu [--seconds 480] [--only WORD ...] [--output FILE]
python -m benchmarks.gpu --stage NAME     one stage, or several, or all: see benchmarks.gpu_stages
python -m benchmarks.gpu --emulated       a few small products on the CPU, and the host's time without a launch
python -m benchmarks.gpu --build          compile all kernels, which needs no GPU

Needs the CuTe DSL, or prebuilt kernels in the folder HOP_KERNELS. Checks run first, then timings in order of
importance; whatever does not fit into the time is skipped and listed. Each group of cases runs in a separate process
(benchmarks.isolated). Results are written after each phase. The exit status is 0 if everything that ran passed, 1 if
something failed, 3 if nothing ran.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import gpu_checks, gpu_stages, gpu_times
from benchmarks.gpu_run import NOTHING_RAN, Run, build, check, describe, finish, measure
from cutlass_kernels import missing, prebuilt, trust

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "gpu.json"
SECONDS = 480.0


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    os.environ.setdefault(trust.VARIABLE, "all")  # the checks here are the trial of kernels
    if (reason := _unable(chosen)) is not None:
        print(f"nothing to run: {reason}")
        return NOTHING_RAN
    run = Run(chosen.seconds or SECONDS, None if chosen.emulated or chosen.build else chosen.output)
    if chosen.emulated:
        check(run, ["benchmarks.gpu_checks:emulated"])
        measure(run, ["benchmarks.gpu_times:host_stubbed"])
        return finish(run)
    if chosen.build:
        build(run, chosen.processes, share=1.0)
        return finish(run)
    versions = describe(run)
    if versions.get("capability") != "9.0":
        run.say(f"nothing to run: the kernels are for compute capability 9.0, not {versions.get('capability')}")
        return run.status
    if chosen.stage:
        return gpu_stages.run_all(run, chosen.stage, chosen.seconds)

    def wanted(names: Sequence[str]) -> list[str]:
        return [name for name in names if not chosen.only or any(word in name for word in chosen.only)]

    if missing() is None:
        build(run, chosen.processes)
        run.counts.clear()  # compiling does not count as running
    run.write()
    check(run, wanted(gpu_checks.names()))
    run.write()
    measure(run, wanted(gpu_times.names()))
    return finish(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, help=f"for all of it, {SECONDS:.0f} by default; or for each stage")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the results go")
    parser.add_argument("--only", nargs="*", default=[], help="groups whose names contain one of these")
    parser.add_argument("--stage", nargs="+", choices=[*gpu_stages.STAGES, "all"], help="which stages to run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--emulated", action="store_true", help="small products on the CPU, nothing is written")
    parser.add_argument("--build", action="store_true", help="compile all kernels and end")
    return parser


def _unable(chosen: argparse.Namespace) -> str | None:
    """The reason why nothing can run here, or None."""
    reason = missing()
    if reason is not None and not (chosen.emulated or chosen.build):
        try:
            reason = None if prebuilt.pack() is not None else f"{reason}; or name kernels in {prebuilt.FOLDER}"
        except (OSError, RuntimeError) as error:
            reason = str(error)
    if reason is None and not (chosen.emulated or chosen.build or torch.cuda.is_available()):
        return "PyTorch finds no CUDA device here; --emulated runs small products on the CPU"
    return reason


if __name__ == "__main__":
    sys.exit(main())
