"""The command line: python -m hop.

python -m hop kernels list [PATTERN]                       the GPU kernels, and which of them are compiled
python -m hop kernels build [PATTERN] [--arch sm_90a]      compile them ahead of time; needs no GPU
"""

import argparse
import os
import sys
from collections.abc import Sequence

from hop.kernels import gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it succeeded, 1 if a part of it failed, 2 if it was not understood."""
    parser = argparse.ArgumentParser(
        prog="python -m hop", description="Mixed- and low-precision operators for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="the GPU kernels: list them, or compile them ahead of time")
    actions = kernels.add_subparsers(dest="action", required=True)
    for name, words in (("list", "names, and which are compiled"), ("build", "compile what is not compiled yet")):
        action = actions.add_parser(name, help=words)
        action.add_argument("pattern", nargs="?", default="*", help="names, as s8_s8_bf16_*; all by default")
        action.add_argument(
            "--arch", default="sm_90a", choices=gpu.ahead().ARCHITECTURES, help="the GPU to compile for"
        )
        if name == "build":
            action.add_argument(
                "--processes", type=int, help="how many compile at a time; one for each core by default"
            )
    chosen = parser.parse_args(arguments)
    try:
        return _list(chosen.pattern) if chosen.action == "list" else _build(chosen.pattern, chosen.processes)
    except (RuntimeError, PermissionError) as error:
        print(f"python -m hop: {error}", file=sys.stderr)
        return 1


def _list(pattern: str) -> int:
    ahead = gpu.ahead()
    found = ahead.matching(pattern)
    for variant in found:
        print(f"{'compiled' if ahead.is_built(variant) else '-':10}{variant.name}")
    return _none(pattern) if not found else 0


def _build(pattern: str, processes: int | None) -> int:
    ahead = gpu.ahead()
    found = ahead.matching(pattern)
    if not found:
        return _none(pattern)
    rest, failed = sum(not ahead.is_built(v) for v in found), 0
    print(f"{len(found) - rest} of {len(found)} kernels are compiled; compiling {rest}", flush=True)
    for i, (variant, error) in enumerate(ahead.build(found, processes), 1):
        print(f"{i}/{rest} {variant.name}{f': {error}' if error else ''}", flush=True)
        failed += error is not None
    return 1 if failed else 0


def _none(pattern: str) -> int:
    print(f"python -m hop: no kernel is named {pattern!r}; python -m hop kernels list shows all", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
