"""Measured times of a linear layer by scheme and CPU level, relative to floats, to warn of schemes that are slower.

speeds.json has an entry per level: the float dtype compared with, and for each scheme [1 row, 128 rows] of a product
with a packed 4096x4096 weight. `python -m benchmarks` writes it from benchmarks/results.
"""

import functools
import json
from pathlib import Path

from hop.kernels.cpu import native
from hop.numerics.schemes import Scheme, named
from hop.numerics.spelling import JsonObject

FILE = Path(__file__).with_name("speeds.json")
_ROWS = ("1 row", "128 rows")


@functools.cache
def table() -> JsonObject:
    """The entries of the file, by level."""
    return json.loads(FILE.read_text("utf-8"))


def slower(scheme: Scheme) -> str | None:
    """A sentence about a scheme whose layers take longer than floats on this CPU, with the fastest scheme instead.

    None if it is not slower, or if it or the CPU's level has not been measured.
    """
    entry = table().get(native.library().path, {"schemes": {}})
    times = next((times for name, times in entry["schemes"].items() if named(name) == scheme), [])
    parts = []
    for i, (rows, time) in enumerate(zip(_ROWS, times, strict=False)):
        if time > 1:
            best, least = min(((name, own[i]) for name, own in entry["schemes"].items()), key=lambda pair: pair[1])
            parts.append(f"{time:.2f} of {entry['float']}'s time with {rows}, {best!r} takes {least:.2f}")
    return f"at CPU level {native.library().path} a layer takes {'; '.join(parts)}" if parts else None
