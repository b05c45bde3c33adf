"""The list of benchmarks, and the formatting of rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import (
    attention,
    cases,
    convolutions,
    experts,
    groups,
    layers,
    minilm,
    models,
    native,
    optimizers,
    rows,
    training,
)
from benchmarks.timing import Row
from hop.kernels.cpu import native as native_kernels

Group = Callable[[], Iterator[Row]]

GROUPS: list[Group] = [
    *(*cases.GROUPS, *native.GROUPS, *convolutions.GROUPS, *training.GROUPS, *optimizers.GROUPS, *minilm.GROUPS),
    *(*experts.GROUPS, *layers.GROUPS, *rows.GROUPS, *attention.GROUPS, *groups.GROUPS),
    *models.GROUPS,
]
NAMES = [g.__name__ for g in GROUPS]
HEADER = f"{'':12}{'case':42}{'ours':>11}  {'peer':24}{'':>11}{'ours/peer':>11}  target"


def chosen(names: Sequence[str]) -> list[Group]:
    """The groups with these names, or all without names. Raises ValueError for an unknown name."""
    if odd := [n for n in names if n not in NAMES]:
        raise ValueError(f"no group of benchmarks is named {odd[0]!r}; there are {', '.join(NAMES)}")
    return [g for g in GROUPS if not names or g.__name__ in names]


def line(row: Row) -> str:
    ours, peer = f"{row.case:42}{time_of(row.ours_ms):>11}", f"{row.peer:24}{time_of(row.peer_ms):>11}"
    return f"{row.group:12}{ours}  {peer}{ratio(row):>11}  {verdict(row)}"


def ratio(row: Row) -> str:
    """Our time divided by the peer's; if the target has a unit, the difference instead."""
    if row.target.endswith("s"):
        unit = row.target.split()[-1]
        return f"{row.over(unit):+.2f} {unit}"
    return quotient(row.times)


def quotient(x: float) -> str:
    """Format a ratio of times with two decimals, or two significant digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


def verdict(row: Row) -> str:
    return "" if row.met is None else f"{row.target} {'met' if row.met else 'MISSED'}"


def time_of(ms: float) -> str:
    return f"{ms * 1e3:.2f} µs" if ms < 0.1 else f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"


def here() -> dict[str, Any]:
    """The conditions that results of one table share."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "level": native_kernels.library().path,
        "machine": (native_kernels.library().levels() or ("off",))[
            -1
        ],  # the machine's level; "level" may be forced lower
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def results(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows in the form of a results file."""
    return {**here(), "rows": [asdict(r) for r in rows]}


def summary(rows: Sequence[Row]) -> str:
    missed = [r for r in rows if r.met is False]
    return f"{sum(r.met is True for r in rows)} targets met, {len(missed)} missed"
