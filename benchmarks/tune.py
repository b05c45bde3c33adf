"""Time the ways to multiply integers at one CPU level, and write its row of hop/kernels/aten/product_choices.json.

python -m benchmarks tune [--level LEVEL] [--dry]    # --dry: print the row, write nothing

For each kind of operands (`hop.kernels.aten.choices.KINDS`), at 1, 4, 64 and 512 rows and square right factors from 32
to 2048, the row names the fastest way; unless it wins by at least 5 %, the next smaller size's way is kept.
"""

import argparse
import itertools
import json
from typing import Any

import torch

from benchmarks.cases import integers
from benchmarks.timing import interleaved, keep_freed_memory
from hop.compat import eager
from hop.kernels.aten import choices, integer
from hop.kernels.cpu import native

ROWS = {1: 1, 4: 15, 64: 255, 512: None}
"""The rows that are timed, and up to how many the result is used."""
SIZES = (32, 64, 128, 256, 512, 1024, 2048)
_BATCH = 8
_LARGEST = 2**30  # multiply-adds; the fastest way at this size is used above it, too


def main(arguments: list[str]) -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    parser.add_argument("--level", default=native.library().path, choices=(*native.LEVELS, "off"))
    parser.add_argument("--dry", action="store_true", help="print the row, write nothing")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(1)  # minimizes disturbance by other processes
    with native.use(options.level):
        row = measured()
    print(json.dumps({options.level: row}))
    if not options.dry:
        write(options.level, row)


def measured() -> dict[str, Any]:
    """The row of this level."""
    where = f"one thread, machine of level {native.library().best}, torch {torch.__version__}"
    return {"measured": where} | {kind: entries(kind) for kind in choices.KINDS}


def entries(kind: str) -> list[list[Any]]:
    """The list of [rows, multiply_adds, way] for a kind of operands."""
    found: list[list[Any]] = []
    for rows, most in ROWS.items():
        won = ""
        sizes = [size for size in SIZES if rows * size**2 <= _LARGEST // (_BATCH if kind == "bmm" else 1)]
        for size, larger in itertools.zip_longest(sizes, sizes[1:]):
            times = timed(kind, rows, size)
            best = min(times, key=lambda way: times[way])
            way = won if won and times[won] <= 1.05 * times[best] else best
            print(f"{kind} {rows} x {size} x {size}: {times} -> {way}", flush=True)
            if way == won:
                found.pop()
            between = None if larger is None else rows * round(size * larger)
            found.append([most, between, way])
            won = way
    return found


def timed(kind: str, rows: int, size: int) -> dict[str, float]:
    """Milliseconds by way."""
    lead, dtype = (_BATCH,) * (kind == "bmm"), torch.int16 if kind == "int16" else torch.int8
    a, b = integers(*lead, rows, size, dtype=dtype), integers(*lead, size, size, dtype=dtype)
    b = b.mT if kind == "linear" else b
    ways = ["floats", "int32"]
    ways += ["native"] * (native.library().declines() is None) + ["int_mm"] * eager.has_int_mm()
    multiply = integer.bmm if lead else integer.mm
    functions = [lambda way=way: multiply(a, b, way=way) for way in ways]
    return dict(zip(ways, interleaved(functions, rounds=15, budget_s=1.0), strict=True))


def write(level: str, row: dict[str, Any]) -> None:
    """Write the row of a level to the file, with a line per entry."""
    table = choices.table() | {level: row}
    order = [name for name in ("off", *native.LEVELS, *table) if name in table]
    choices.FILE.write_text(
        f"{{\n{_joined(f'{json.dumps(n)}: {_spelled(table[n])}' for n in dict.fromkeys(order))}\n}}\n"
    )
    choices.table.cache_clear()
    print(f"wrote the row {level!r} of {choices.FILE.name}")


def _spelled(row: dict[str, Any]) -> str:
    return "{\n" + _joined(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in row.items()) + "\n  }"


def _joined(lines: Any) -> str:
    return ",\n".join(f"  {line}" for line in lines)
