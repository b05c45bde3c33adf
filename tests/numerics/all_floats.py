"""Elementary functions of all 2^32 float32: the reference and the native kernels of each level, by checksums.

    python -m tests.numerics.all_floats [NAME ...]            every level that the CPU has; about 20 s for each
    python -m tests.numerics.all_floats --reference [NAME ...]   the reference too, and writes the checksums that differ

all_floats.txt holds a checksum of the results of all inputs in their order, NaNs as one, as the reference gave them;
its undecided inputs are settled by hard_cases.py. So a level that gives the same has 0 of 2^32 results wrong.
"""

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hop.numerics import functions
from tests.levels import OWN_HERE, environment

FILE = Path(__file__).with_suffix(".txt")
_PIECE = 1 << 20
_NAN = np.uint32(0x7FC00000)


def checksum(function: Callable[[Tensor], Tensor]) -> str:
    """A checksum of the results of all float32, a quarter of them at a time."""

    def part(start: int) -> int:
        found = 0
        for first in range(start, start + 2**30, _PIECE):
            x = torch.from_numpy(np.arange(first, first + _PIECE, dtype=np.uint32).view(np.float32))
            y = function(x).numpy()
            words = y.view(np.uint32)
            words[np.isnan(y)] = _NAN
            found = zlib.crc32(words, found)
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return " ".join(f"{crc:08x}" for crc in pool.map(part, range(0, 2**32, 2**30)))


def known() -> dict[str, str]:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return dict(line.split(" ", 1) for line in lines)


def check_here(names: list[str]) -> bool:
    """Whether the native kernels, at the level that is asked for, give the checksums."""
    from hop.kernels.cpu import native, operators

    assert native.declines_here() is None, native.declines_here()
    good, want = True, known()
    for name in names:
        start = time.perf_counter()
        equal = checksum(lambda x, name=name: operators.function(x, name)) == want[name]
        good &= equal
        said = "0 of 2^32 differ" if equal else "DIFFERS from the reference"
        print(f"{name:10} {os.environ['HOP_NATIVE']:12} {said}, {time.perf_counter() - start:.0f} s", flush=True)
    return good


def main() -> None:
    arguments = sys.argv[1:]
    names = [a for a in arguments if not a.startswith("-")] or sorted({*functions.NAMES} - {*functions.WITHOUT_KERNEL})
    torch.set_num_threads(1)
    if "--here" in arguments:
        sys.exit(not check_here(names))
    if "--reference" in arguments:
        sums = known()
        for name in names:
            sums[name] = checksum(lambda x, name=name: functions.apply(name, x))
            print(name, sums[name], flush=True)
            FILE.write_text("".join(f"{n} {c}\n" for n, c in sums.items()))
    failed = False
    for level in OWN_HERE:
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--here", *names]
        failed |= subprocess.run(command, env=environment(level)).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
