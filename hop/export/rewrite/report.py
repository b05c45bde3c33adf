"""Reports of rewriting."""

from dataclasses import dataclass
from typing import NamedTuple

from torch.export import ExportedProgram

from hop.export.table import table


@dataclass(frozen=True)
class Change:
    """A node, its operator, and the new form or the reason why it was left."""

    node: str
    operator: str
    detail: str
    is_rewritten: bool


@dataclass(frozen=True)
class RewriteReport:
    """The outcome of rewriting, node by node; str() formats it as a table."""

    rows: tuple[Change, ...]

    @property
    def rewritten(self) -> tuple[Change, ...]:
        return tuple(row for row in self.rows if row.is_rewritten)

    @property
    def left(self) -> tuple[Change, ...]:
        return tuple(row for row in self.rows if not row.is_rewritten)

    def __str__(self) -> str:
        head = f"{len(self.rewritten)} rewritten, {len(self.left)} left"
        cells = [(r.node, r.operator, r.detail if r.is_rewritten else f"left: {r.detail}") for r in self.rows]
        return f"{head}\n{table(('node', 'operator', 'operands -> result'), cells, right=3)}" if cells else head


class Rewritten(NamedTuple):
    """The result of `to_integer`, `to_qdq` and `to_scheme`."""

    program: ExportedProgram
    report: RewriteReport
