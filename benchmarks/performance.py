"""Write docs/performance.md, docs/which_scheme.md and docs/performance_tables.md from the results on disk."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import highlights
from benchmarks.reasons import REASONS, reason
from benchmarks.roofline import ROOT, file_of
from benchmarks.running import ratio, time_of
from benchmarks.timing import Row
from examples.common import json_rows
from hop.kernels.cpu.native import LEVELS
from hop.nn.models import speeds
from tests.support import pages

PAGE = ROOT / "docs" / "performance.md"
GUIDE = ROOT / "docs" / "which_scheme.md"
TABLES = ROOT / "docs" / "performance_tables.md"
PICTURE = ROOT / "docs" / "performance.svg"
COMMAND = "python -m benchmarks"


def results() -> list[dict[str, Any]]:
    """The results on disk, highest level first."""
    return [json.loads(file_of(level).read_text()) for level in reversed(LEVELS) if file_of(level).exists()]


def page(text: str) -> str:
    """The page, with its tables filled from the results on disk."""
    text = pages.filled(text, f"{COMMAND}: models", highlights.models(results()))
    return pages.filled(text, f"{COMMAND}: ten rows", highlights.table(results()))


def guide(text: str) -> str:
    """The page on schemes, with its table of times filled from the results on disk."""
    return pages.filled(text, f"{COMMAND}: schemes", highlights.schemes(results()))


def appendix(text: str) -> str:
    """The page of all rows, filled from the results on disk."""
    text = pages.filled(text, f"{COMMAND}: reasons", reasons())
    return pages.filled(text, COMMAND, "\n".join(level(held) for held in results()))


def reasons() -> str:
    """Why rows miss their targets: one list for each group of levels."""
    found: dict[tuple[str, ...], list[str]] = {}
    for letter, why in REASONS.items():
        found.setdefault(why.levels, []).append(f"* **{letter}** {why.why}\n")
    spelled = {levels: ", ".join(f"`{level}`" for level in levels) for levels in found}
    return "\n".join(f"At level {spelled[levels]}:\n\n{''.join(lines)}" for levels, lines in found.items())


def level(held: Mapping[str, Any]) -> str:
    """All rows of one level: a folded table for each group."""
    rows = [Row(**r) for r in held["rows"]]
    forced = held["machine"] != held["level"]
    where = f", forced on a machine with level `{held['machine']}`" if forced else ""
    threads = f"{held['threads']} thread{'s' * (held['threads'] > 1)}"
    measured = f"{threads}, torch {held['torch']}{where}"
    groups = dict.fromkeys(row.group for row in rows)
    tables = [folded(held["level"], group, [row for row in rows if row.group == group]) for group in groups]
    return f"## CPU level `{held['level']}`\n\n{measured[0].upper() + measured[1:]}.\n\n{''.join(tables)}"


def folded(of_level: str, group: str, rows: Sequence[Row]) -> str:
    """The rows of a group, folded below a summary."""
    targets = [row.met for row in rows if row.met is not None]
    count = f"{len(rows)} row{'s' * (len(rows) > 1)}"
    summary = f"{count}, {sum(targets)} of {len(targets)} targets met" if targets else count
    return f"<details><summary>{group}: {summary}</summary>\n\n{table(of_level, rows)}\n</details>\n\n"


def table(of_level: str, rows: Sequence[Row]) -> str:
    header = ["case", "ours", "peer", "peer's time", "ours / peer", "target"]
    cells = [[r.case, time_of(r.ours_ms), r.peer, time_of(r.peer_ms), ratio(r), verdict(of_level, r)] for r in rows]
    return pages.table([header, *cells])


def verdict(of_level: str, row: Row) -> str:
    """The target, and whether it is met; if not, the letter of the reason."""
    if row.met is None:
        return ""
    letter = reason(of_level, row)
    return f"{row.target} " + ("met" if row.met else f"missed: {letter}" if letter else "missed")


def write() -> None:
    """Write the pages, the picture and hop.nn's table of speeds from the results on disk."""
    PAGE.write_text(page(PAGE.read_text()))
    GUIDE.write_text(guide(GUIDE.read_text()))
    TABLES.write_text(appendix(TABLES.read_text()))
    PICTURE.write_text(highlights.draw(results()))
    speeds.FILE.write_text(json_rows(highlights.speeds(results())) + "\n")
    print(f"wrote {PICTURE.relative_to(ROOT)} and the tables of {PAGE.name}, {GUIDE.name} and {TABLES.name}")
