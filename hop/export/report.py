"""What became of the nodes of a program."""

from dataclasses import dataclass
from typing import NamedTuple

from torch.export import ExportedProgram


@dataclass(frozen=True)
class Row:
    """A node: its operator, what it became or why it was left, and which of the two."""

    node: str
    operator: str
    detail: str
    is_rewritten: bool


@dataclass(frozen=True)
class Report:
    """What a rewriting did, node by node. `str` shows it as a table."""

    rows: tuple[Row, ...]

    @property
    def rewritten(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.is_rewritten)

    @property
    def left(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.is_rewritten)

    def __str__(self) -> str:
        lines = [f"{len(self.rewritten)} rewritten, {len(self.left)} left"]
        widths = [max((len(getattr(row, name)) for row in self.rows), default=0) for name in ("node", "operator")]
        for row in self.rows:
            verb = "" if row.is_rewritten else "left: "
            lines.append(f"{row.node:<{widths[0]}}  {row.operator:<{widths[1]}}  {verb}{row.detail}")
        return "\n".join(lines)


class Rewritten(NamedTuple):
    """What `to_integer` and `to_qdq` give."""

    program: ExportedProgram
    report: Report
