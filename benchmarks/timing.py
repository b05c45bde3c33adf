"""Timing two or more functions in one run, in turns, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Function = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against a peer, and the target that the ratio is held to."""

    group: str
    case: str
    ours_ms: float
    peer: str
    peer_ms: float
    target: str = ""  # ">= 0.95" for peer_ms / ours_ms, "<= 2 µs" for ours_ms - peer_ms
    note: str = ""

    @property
    def speedup(self) -> float:
        return self.peer_ms / self.ours_ms

    @property
    def over_us(self) -> float:
        return (self.ours_ms - self.peer_ms) * 1e3

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if not self.target:
            return None
        sign, number, *unit = self.target.split()
        value = {"": self.speedup, "µs": self.over_us, "ms": self.over_us / 1e3, "s": self.over_us / 1e6}["".join(unit)]
        return value >= float(number) if sign == ">=" else value <= float(number)


def interleaved(functions: Sequence[Function], rounds: int = 25, budget_s: float = 4.0) -> list[float]:
    """Median milliseconds of each function over at most `rounds` rounds.

    In each round each function runs twice and the second time counts: the first one brings its operands back into the
    caches, whatever ran before it."""
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < rounds and (len(times[0]) < 3 or time.perf_counter() - start < budget_s):
        for f, seen in zip(functions, times, strict=True):
            f()
            begin = time.perf_counter()
            f()
            seen.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(seen) for seen in times]


def per_call(functions: Sequence[Function], calls: int = 2000, rounds: int = 21) -> list[float]:
    """Median milliseconds of a call, for functions too short to be timed one by one."""

    def loop(f: Function) -> Function:
        def run() -> None:
            for _ in range(calls):
                f()

        return run

    return [ms / calls for ms in interleaved([loop(f) for f in functions], rounds, budget_s=20.0)]
