"""The outcomes of cases in a file, written as they come, so that a run that is cut off goes on where it ended.

The first line names the machine and the sources; outcomes of others are dropped. Then each line is JSON: an outcome, or
the end of a group. A last line that was cut off is left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.isolated import NO_TIME, TOO_MANY, Outcome

_KEYS = ({"machine"}, {"end"}, {f.name for f in fields(Outcome)})


class Journal:
    """The outcomes in a file, by group and case."""

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, Outcome]] = {}
        self.closed: set[str] = set()
        header = {"machine": dict(machine)}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        entries = list(_entries(lines))
        if entries[:1] == [json.loads(json.dumps(header))]:
            for entry in entries[1:]:
                self._take(entry)
        else:
            entries = [header]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "end" in entry:
            self.closed.add(entry["end"])
        else:
            self.outcomes.setdefault(entry["group"], {})[entry["case"]] = Outcome(**entry)

    def of(self, group: str) -> list[Outcome]:
        return list(self.outcomes.get(group, {}).values())

    def names(self, group: str) -> list[str]:
        """The cases of a group that are done."""
        return list(self.outcomes.get(group, {}))

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, unless there was no time for its case."""
        if not is_left(outcome):
            self._append(vars(outcome))

    def close(self, group: str) -> None:
        """Keep that a group has no more cases."""
        self._append({"end": group})

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._take(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def is_left(outcome: Outcome) -> bool:
    """Whether cases were left for another run."""
    return outcome.state == "skipped" and outcome.error in (NO_TIME, TOO_MANY)


def _entries(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """The entries up to the first line that is none."""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if not isinstance(entry, dict) or entry.keys() not in _KEYS:
            return
        yield entry
