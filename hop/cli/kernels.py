"""hop kernels: the kernels for GPUs."""

import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from cutlass_kernels import ahead, packing, prebuilt
from hop.cli.bench import benchmarks
from hop.cli.output import Bar, show, show_json, working

Pattern = Annotated[str, typer.Argument(help="Names, with * and ? as in a shell.", show_default="all")]
Architecture = Annotated[str, typer.Option("--arch", help="The GPU to compile for.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="How many compile at a time.", show_default="one for each core")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GROUP", help="Groups of the checks and benchmarks, with * and ?; may be repeated."),
]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Pack them here, for another machine.")]
Python = Annotated[
    str | None, typer.Option(metavar="VERSION", help="Of Python on that machine.", show_default="the one that runs")
]


def list_(
    pattern: Pattern = "*",
    arch: Architecture = "sm_90a",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the kernels that are compiled ahead of time, and which of them are there.

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
    """Compile kernels that are not compiled yet. It needs no GPU; those that are done stay when it is interrupted.

    With --out they are packed for a machine that has Python and PyTorch alone, with the libraries that load them: as a
    folder, and as the same in one file beside it, FOLDER.tar.gz. There HOP_KERNELS=FOLDER loads them. It holds parts of
    NVIDIA's libraries, so that it is for machines of your own. Packed are the kernels of all checks and benchmarks, or
    of the groups of --only, which are in the source tree.

    Exit status: 0, or 1 if one does not compile, or no kernel has such a name.

    Examples:
        hop kernels build                       all
        hop kernels build 's8_*' --processes 2
        hop kernels build --out build/kernels --python 3.12
        hop kernels build --out build/fp8 --only fp8 --only 'fp8_*'
    """
    _check(arch)
    if python is not None and out is None:
        raise typer.BadParameter(f"is for a folder, which --out names; got {python!r}", param_hint="'--python'")
    if out is not None:
        python = python or prebuilt.python()
        packing.check(out, python)
    variants = ahead.matching(pattern) if out is None and not only else _needed(only, pattern)
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


def _needed(only: list[str] | None, pattern: str) -> list[Any]:
    """The kernels of groups, or of all, with such names."""
    groups = benchmarks("gpu_groups")
    variants = groups.chosen(only) if only else groups.variants()
    return [v for v in variants if fnmatch.fnmatch(v.name, pattern)]


def _pack(variants: list[Any], out: Path, python: str, groups: list[str]) -> None:
    with Bar(len(variants), "link") as bar:
        for _ in packing.write(variants, out, python, groups):
            bar.step()
    with working("packing"):
        archive = packing.archive(out)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    show(f"{out}: {len(variants)} kernels for Python {python}, {size / 1e6:.0f} MB")
    show(f"{archive}: the same in one file, {archive.stat().st_size / 1e6:.0f} MB")


COMMANDS = (list_, build)


def _check(arch: str) -> None:
    if arch not in ahead.ARCHITECTURES:
        raise typer.BadParameter(
            f"must be one of {', '.join(ahead.ARCHITECTURES)}, got {arch!r}", param_hint="'--arch'"
        )


def _none(pattern: str) -> LookupError:
    return LookupError(f"no kernel is named {pattern!r}; run hop kernels list for all")
