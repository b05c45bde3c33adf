"""hop kernels: the kernels for GPUs."""

from typing import Annotated

import typer

from hop.cli.output import Bar, show, show_json
from hop.kernels import gpu

Pattern = Annotated[str, typer.Argument(help="Names, with * and ? as in a shell.", show_default="all")]
Architecture = Annotated[str, typer.Option("--arch", help="The GPU to compile for.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="How many compile at a time.", show_default="one for each core")
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
    ahead = _ahead(arch)
    found = ahead.matching(pattern)
    if as_json:
        show_json([{"name": v.name, "compiled": ahead.is_built(v)} for v in found])
        return 0 if found else 1
    if not found:
        raise _none(pattern)
    for variant in found:
        show(f"{'compiled' if ahead.is_built(variant) else '-':10}{variant.name}")
    return 0


def build(pattern: Pattern = "*", arch: Architecture = "sm_90a", processes: Processes = None) -> int:
    """Compile kernels that are not compiled yet. It needs no GPU; those that are done stay when it is interrupted.

    Exit status: 0, or 1 if one does not compile, or no kernel has such a name.

    Examples:
        hop kernels build                       all
        hop kernels build 's8_*' --processes 2
    """
    ahead = _ahead(arch)
    found = ahead.matching(pattern)
    if not found:
        raise _none(pattern)
    rest, failed = sum(not ahead.is_built(v) for v in found), 0
    show(f"{len(found) - rest} of {len(found)} kernels are compiled; compiling {rest}")
    with Bar(rest, "compile") as bar:
        for i, (variant, error) in enumerate(ahead.build(found, processes), 1):
            bar.step()
            bar.show(f"{i}/{rest} {variant.name}{f': {error}' if error else ''}", style="red" if error else None)
            failed += error is not None
    return 1 if failed else 0


COMMANDS = (list_, build)


def _ahead(arch: str):
    ahead = gpu.ahead()
    if arch not in ahead.ARCHITECTURES:
        raise typer.BadParameter(
            f"must be one of {', '.join(ahead.ARCHITECTURES)}, got {arch!r}", param_hint="'--arch'"
        )
    return ahead


def _none(pattern: str) -> LookupError:
    return LookupError(f"no kernel is named {pattern!r}; hop kernels list shows all")
