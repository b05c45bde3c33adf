"""Time two or more functions in one run, in turns, so that disturbances affect all of them."""

import ctypes
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Function = Callable[[], object]
WARM_MS, TIMED_MS = 10.0, 5.0
_UNITS = {"µs": 1e3, "ms": 1.0, "s": 1e-3}  # units per millisecond
_TARGET = re.compile(r"<= ([\d.]+)(?: (µs|ms|s))?")


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against a peer, and the target for the ratio."""

    group: str
    case: str
    ours_ms: float
    peer: str
    peer_ms: float
    target: str = ""  # "<= 0.95" for ours_ms / peer_ms; "<= 2 µs", ms or s for ours_ms - peer_ms
    operations: int = 0  # of the product, two per multiply-add
    bytes: int = 0  # read and written by ours: codes and scales of both factors, results
    peer_bytes: int = 0

    @property
    def times(self) -> float:
        """Our time divided by the peer's; below 1, ours is faster."""
        return self.ours_ms / self.peer_ms

    def over(self, unit: str) -> float:
        """The difference between our time and the peer's, in µs, ms or s."""
        return (self.ours_ms - self.peer_ms) * _UNITS[unit]

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one. Raises ValueError for a malformed target."""
        if not self.target:
            return None
        found = _TARGET.fullmatch(self.target)
        if not found:
            raise ValueError(f"target must be '<= NUMBER', perhaps with µs, ms or s after it; got {self.target!r}")
        most, unit = found.groups()
        return (self.over(unit) if unit else self.times) <= float(most)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory.

    By default it may return the top of the heap to the system on every call and fetch it again page by page, depending
    on the layout of the heap, which varies between processes. A call that allocates a megabyte then takes two to three
    times as long.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold, gigabyte = -1, -3, 1 << 30
        libc.mallopt(trim_threshold, gigabyte)
        libc.mallopt(mmap_threshold, gigabyte)


def interleaved(functions: Sequence[Function], rounds: int = 75, budget_s: float = 4.0) -> list[float]:
    """Median milliseconds of each function over at most `rounds` rounds: of the processor where PyTorch works with one
    thread, which leaves out what other processes take, and else of the clock on the wall.

    In each round, each function runs for WARM_MS, and then for TIMED_MS during which the median is taken. The warm-up
    is needed because after another function or a pause it takes several calls until caches and the matrix unit are back
    at full speed. Every other round runs the functions in reverse order, so that none always comes first.
    """
    times: list[list[float]] = [[] for _ in functions]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    order = range(len(functions))
    start = time.perf_counter()
    while len(times[0]) < rounds and (len(times[0]) < 3 or time.perf_counter() - start < budget_s):
        for i in order if len(times[0]) % 2 else reversed(order):
            _run_for(WARM_MS, functions[i], clock)
            times[i].append(statistics.median(_run_for(TIMED_MS, functions[i], clock)))
    return [statistics.median(seen) for seen in times]


def _run_for(ms: float, f: Function, clock: Callable[[], float]) -> list[float]:
    """Milliseconds of each call of `f`, repeated until `ms` have passed, at least once."""
    seen: list[float] = []
    start = clock()
    while not seen or clock() - start < ms / 1e3:
        begin = clock()
        f()
        seen.append((clock() - begin) * 1e3)
    return seen


def per_call(functions: Sequence[Function], calls: int = 2000, rounds: int = 21) -> list[float]:
    """Median milliseconds per call, for functions too short to time individually."""

    def loop(f: Function) -> Function:
        def run() -> None:
            for _ in range(calls):
                f()

        return run

    return [ms / calls for ms in interleaved([loop(f) for f in functions], rounds, budget_s=20.0)]
