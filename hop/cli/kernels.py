"""hop kernels: list, compile and check the GPU kernels."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cutlass_kernels import ahead, packing, prebuilt, trust
from hop.cli.bench import benchmarks
from hop.cli.output import Bar, show, show_json, working

Pattern = Annotated[str, typer.Argument(help="Kernel names; * and ? are wildcards.", show_default="all")]
Architecture = Annotated[str, typer.Option("--arch", help="The GPU to compile for.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Number of compiler processes.", show_default="one per core")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GROUP", help="Groups of checks and benchmarks; * and ? are wildcards; repeatable."),
]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Pack the kernels here for another machine.")]
Python = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="The Python version of that machine.", show_default="the running one"),
]


def list_(
    pattern: Pattern = "*",
    arch: Architecture = "sm_90a",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the kernels that can be compiled ahead of time, and which of them are compiled.

    Exit status: 0, or 1 if no kernel has such a name.

    Examples:
        hop kernels list
        hop kernels list 's8_s8_bf16_*'    int8 by int8 to bfloat16
    """
    _check(arch)
    variants = ahead.matching(pattern)
    if as_json:
        show_json([{"name": v.name, "compiled": ahead.is_built(v)} for v in variants])
        return 0 if variants else 1
    if not variants:
        raise _none(pattern)
    for variant in variants:
        show(f"{'compiled' if ahead.is_built(variant) else '-':10}{variant.name}")
    return 0


def build(
    pattern: Pattern = "*",
    arch: Architecture = "sm_90a",
    processes: Processes = None,
    only: Only = None,
    out: Out = None,
    python: Python = None,
) -> int:
    """Compile the kernels that are not compiled yet. No GPU is needed; an interrupted build keeps the finished kernels.

    --out packs them, with the libraries that load them, for a machine that has only Python and PyTorch: as a folder,
    and as one file, FOLDER.tar.gz. There, HOP_KERNELS=FOLDER loads them. The pack contains parts of NVIDIA's libraries,
    so use it on your own machines only. It has the kernels of all checks and benchmarks, or of the groups in --only,
    which needs the source tree.

    Exit status: 0, or 1 if a kernel fails to compile or none has such a name.

    Examples:
        hop kernels build                       all
        hop kernels build 's8_*' --processes 2
        hop kernels build --out build/kernels --python 3.12
        hop kernels build --out build/fp8 --only fp8 --only 'fp8_*'
    """
    _check(arch)
    if python is not None and out is None:
        raise typer.BadParameter(f"needs --out; got {python!r}", param_hint="'--python'")
    if out is not None:
        python = python or prebuilt.python()
        packing.check(out, python)
    variants = ahead.matching(pattern) if out is None and not only else _kernels_of_groups(only, pattern)
    if not variants:
        raise _none(pattern)
    rest, failed = sum(not ahead.is_built(v) for v in variants), 0
    show(f"{len(variants) - rest} of {len(variants)} kernels are compiled; compiling {rest}")
    with Bar(rest, "compile") as bar:
        for i, (variant, error) in enumerate(ahead.build(variants, processes), 1):
            bar.step()
            bar.show(f"{i}/{rest} {variant.name}{f': {error}' if error else ''}", style="red" if error else None)
            failed += error is not None
    if out is not None and python is not None and not failed:
        _pack(variants, out, python, only or ["all"])
    return 1 if failed else 0


def _kernels_of_groups(only: list[str] | None, pattern: str) -> list[Any]:
    """The kernels of the given groups, or of all groups, whose names match."""
    groups = benchmarks("gpu_groups")
    variants = groups.chosen(only) if only else groups.variants()
    return [v for v in variants if fnmatch.fnmatch(v.name, pattern)]


def _pack(variants: Sequence[object], out: Path, python: str, groups: list[str]) -> None:
    with Bar(len(variants), "link") as bar:
        for _ in packing.write(variants, out, python, groups):
            bar.step()
    with working("packing"):
        archive = packing.archive(out)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    show(f"{out}: {len(variants)} kernels for Python {python}, {size / 1e6:.0f} MB")
    show(f"{archive}: the same in one file, {archive.stat().st_size / 1e6:.0f} MB")


def check(
    pattern: Pattern = "*",
    again: Annotated[bool, typer.Option("--again", help="Check those that have a verdict too.")] = False,
    seconds: Annotated[float, typer.Option(min=20, help="Time for all of them.")] = 1800.0,
) -> int:
    """Check kernels on each GPU, in a separate process, as they are before their first use; verdicts are kept.

    Kernels that are not compiled yet are compiled. Those that give wrong results, or never end, are not used.

    Exit status: 0 if all are right, otherwise 1.

    Examples:
        hop kernels check                  all
        hop kernels check 's8_s8_bf16_*'
        hop kernels check --again          after a change of the machine that no version shows
    """
    if not torch.cuda.is_available():
        raise LookupError("PyTorch finds no GPU here to check kernels on")
    variants, bad = ahead.matching(pattern), 0
    if not variants:
        raise _none(pattern)
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
            show(
                f"{torch.cuda.get_device_name(device)}: these kernels are for compute capability 9.0, not {capability}"
            )
            continue
        if again:
            trust.forget(device)
        with working(f"checking {len(variants)} kernels on {torch.cuda.get_device_name(device)}"):
            found = trust.check(variants, device, seconds)
        for name, verdict in found.items():
            show(f"{verdict.state:10}{name}{f': {verdict.reason}' if verdict.reason else ''}")
            bad += not verdict.is_right
    return 1 if bad else 0


COMMANDS = (list_, build, check)


def _check(arch: str) -> None:
    if arch not in ahead.ARCHITECTURES:
        raise typer.BadParameter(
            f"must be one of {', '.join(ahead.ARCHITECTURES)}, got {arch!r}", param_hint="'--arch'"
        )


def _none(pattern: str) -> LookupError:
    return LookupError(f"no kernel is named {pattern!r}; run hop kernels list to see all")
