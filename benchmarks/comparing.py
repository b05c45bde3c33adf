"""Compare two files of results, case by case.

A case is slower if the ratio of our time to the peer's has increased; the peer ran in turns with ours and was exposed
to the same load. If the peer has no time, our times are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.running import quotient, time_of
from benchmarks.timing import Row

SLOWER = 1.15  # ratio; runs on the same machine differ by less


@dataclass(frozen=True)
class Change:
    """A case in both results."""

    old: Row
    new: Row

    @property
    def factor(self) -> float:
        """The new ratio of our time to the peer's, divided by the old one."""
        if self.old.peer_ms > 0 and self.new.peer_ms > 0:
            return self.new.times / self.old.times
        return self.new.ours_ms / self.old.ours_ms

    def line(self, slower: float) -> str:
        """The old and new times, with the ratios of our time to the peer's."""
        old, new = (f"{time_of(r.ours_ms):>11}{_times(r):>7}" for r in (self.old, self.new))
        words = "SLOWER" if self.factor > slower else "faster" if self.factor < 1 / slower else ""
        return (
            f"{self.new.group:12}{self.new.case:42}{self.new.peer:24}{old}  {new}{self.factor:>8.2f}  {words}".rstrip()
        )


HEADER = f"{'':12}{'case':42}{'peer':24}{'old':>11}{'ratio':>7}  {'new':>11}{'ratio':>7}{'takes':>8}"


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The cases in both results, in the order of the new ones.

    Raises:
        ValueError: one is not a file of results, or they have no case in common.
    """
    first, second = (_rows(r, name) for r, name in ((old, "old"), (new, "new")))
    found = [Change(first[key], row) for key, row in second.items() if key in first]
    if not found:
        raise ValueError("the two results have no case in common")
    return found


def conditions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between the conditions of the two measurements."""
    names = ("torch", "threads", "level", "machine", "capability")
    return [f"{n} was {old.get(n)}, and is {new.get(n)}" for n in names if old.get(n) != new.get(n)]


def _rows(results: Mapping[str, Any], which: str) -> dict[tuple[str, str, str], Row]:
    try:
        rows = [Row(**r) for r in results["rows"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the {which} file holds no results of hop bench --json: {error}") from error
    return {(r.group, r.case, r.peer): r for r in rows}


def _times(row: Row) -> str:
    return quotient(row.times) if row.peer_ms > 0 else ""
