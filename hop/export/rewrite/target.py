"""Target: the integer arithmetic of a runtime, operator by operator.

A target is a frozen value: a row for each kind of operator that the runtime has, with the convention that computes its
codes (hop.requantization, hop.integer_functions) and the source of that arithmetic. `to_integer(program, target=...)`
rewrites each operator with the convention of its row.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hop.compat.eager import OpOverload
from hop.compat.files import write_whole
from hop.dispatch.operators import SCALED
from hop.export.table import table
from hop.numerics import spelling
from hop.numerics.requantization import Convention
from hop.numerics.spelling import JsonObject, shown

NAMES = tuple(sorted({str(op).removeprefix("aten.") for op in SCALED}))


@dataclass(frozen=True)
class Limits:
    """Restrictions of a kernel beyond its convention; None where there is none.

    units: the fixed scale and zero point of its codes, which ignore those of the result.
    rank: the most dimensions of operands and result.
    operands: the most tensors that it accepts.
    multiplier: an exclusive upper bound of the product of both operands' scales divided by the result's.
    """

    units: tuple[float, int] | None = None
    rank: int | None = None
    operands: int | None = None
    multiplier: float | None = None

    def __post_init__(self) -> None:
        if self.units is not None:
            scale, zero = self.units
            spelling.integer(zero, "Limits: the zero point of units")
            if not spelling.finite(scale, "Limits: the scale of units"):
                raise ValueError(f"Limits: the scale of units must be above 0, got {scale}; give such a number")
            object.__setattr__(self, "units", (float(scale), zero))
        for name in ("rank", "operands"):
            if (given := getattr(self, name)) is not None:
                spelling.integer(given, f"Limits: {name}")
        if self.multiplier is not None:
            object.__setattr__(self, "multiplier", spelling.finite(self.multiplier, "Limits: multiplier"))


@dataclass(frozen=True)
class Row:
    """The arithmetic of a target for some operators.

    operators: names of overloads of torch.ops.aten that hop.scaled supports, such as "conv2d.default".
    convention: how their codes are computed.
    source: the reference for that arithmetic: file and function, or paragraph.
    per_tensor: the convention for products whose weight has one scale per tensor, if different.
    limits: restrictions of the kernel; to_integer does not rewrite calls that violate them.
    """

    operators: tuple[str, ...]
    convention: Convention
    source: str = ""
    per_tensor: Convention | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        wrong = [name for name in self.operators if name not in NAMES]
        if wrong or not self.operators:
            near = get_close_matches(str(wrong[0]), NAMES, 3, 0.4) if wrong else NAMES[:3]
            raise ValueError(
                f"Row: operators must be names of operators that hop.scaled supports, got {shown(self.operators)}; "
                f"use one such as {', '.join(near)}"
            )
        for name in ("convention", "per_tensor"):
            given = getattr(self, name)
            if not isinstance(given, Convention) and not (name == "per_tensor" and given is None):
                raise TypeError(
                    f"Row: {name} must be a value of hop.requantization or hop.integer_functions, got {shown(given)}; "
                    "give one such as GEMMLOWP"
                )


@dataclass(frozen=True)
class Target:
    """The conventions of a runtime.

    name: of the target, for messages and tables.
    rows: one for each kind of operator; an operator may be in at most one row.
    integer_only: whether `to_integer` raises for an operator without a row, instead of leaving it in floats.
    dtypes: the names of the supported dtypes of codes.
    """

    name: str
    rows: tuple[Row, ...]
    integer_only: bool = True
    dtypes: tuple[str, ...] = ("int8",)

    def __post_init__(self) -> None:
        counted = Counter(name for row in self.rows for name in row.operators)
        twice = sorted(name for name, count in counted.items() if count > 1)
        if twice:
            raise ValueError(
                f"Target: an operator must be in one row, got {shown(twice)} in several of {shown(self.name)}"
            )

    def __getitem__(self, op: OpOverload | str) -> Row:
        """The row of an operator. Raises KeyError, suggesting similar operators."""
        name = str(op).removeprefix("aten.")
        for row in self.rows:
            if name in row.operators:
                return row
        raise KeyError(self.missing(name))

    def missing(self, name: str) -> str:
        """The error message for an operator without a row."""
        known = [n for row in self.rows for n in row.operators]
        near = get_close_matches(name.removeprefix("aten."), known, 3, 0.0)
        return f"target {self.name} has no row for {name}; the nearest are {', '.join(near) or 'none'}"

    def __contains__(self, op: OpOverload | str) -> bool:
        return any(str(op).removeprefix("aten.") in row.operators for row in self.rows)

    def table(self) -> str:
        """Format the conventions as a table: operators, convention, source."""
        cells = [(", ".join(_short(row.operators)), *_conventions(row), row.source) for row in self.rows]
        head = (
            f"{self.name}: {', '.join(self.dtypes)}; {'integers only' if self.integer_only else 'others stay floats'}"
        )
        return f"{head}\n{table(('operators', 'convention', 'weight with one scale', 'source'), cells, right=4)}"

    def diff(self, other: "Target") -> str:
        """Compare with another target: a line for each operator that differs; empty if none does."""
        own, its = ({n: row for row in t.rows for n in row.operators} for t in (self, other))
        cells: list[tuple[str, ...]] = []
        for name in sorted({*own, *its}):
            pair = [
                " / ".join(filter(None, _conventions(rows[name]))) if name in rows else "none" for rows in (own, its)
            ]
            if pair[0] != pair[1]:
                cells.append((name, *pair))
        return table(("operator", self.name, other.name), cells, right=3) if cells else ""

    def save(self, path: str | Path) -> None:
        """Write the target as JSON."""
        write_whole(path, json.dumps(self.to_json_dict(), indent=2) + "\n")

    def to_json_dict(self) -> JsonObject:
        """The target as numbers, text and lists; conventions as their text."""
        rows = [
            {
                "operators": list(row.operators),
                "convention": str(row.convention),
                "source": row.source,
                "per_tensor": None if row.per_tensor is None else str(row.per_tensor),
                **({} if row.limits == Limits() else {"limits": asdict(row.limits)}),
            }
            for row in self.rows
        ]
        fields = {"name": self.name, "integer_only": self.integer_only, "dtypes": list(self.dtypes)}
        return {"hop_target": 1, **fields, "rows": rows}

    @classmethod
    def load(cls, path: str | Path) -> "Target":
        """Read a file that `save` wrote. Raises ValueError, with the location, for anything else."""
        try:
            return cls.from_json_dict(spelling.from_json(Path(path).read_bytes(), "the file"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"Target.load: {path} is not a file written by Target.save: {error}") from error

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> "Target":
        """The target from the result of `to_json_dict`."""
        if data.get("hop_target") != 1:
            raise ValueError(f"hop_target must be 1, got {shown(data.get('hop_target'))}")
        rows = []
        for i, row in enumerate(data["rows"]):
            try:
                own, whole = (
                    None if row[n] is None else spelling.read(row[n], Convention) for n in ("convention", "per_tensor")
                )
                rows.append(Row(tuple(row["operators"]), own, row["source"], whole, _limits(row)))  # type: ignore[arg-type]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"row {i}: {error}") from error
        return cls(data["name"], tuple(rows), bool(data["integer_only"]), tuple(data["dtypes"]))


def _limits(row: Mapping[str, Any]) -> Limits:
    given = dict(row.get("limits", {}))
    units = given.pop("units", None)
    return Limits(None if units is None else tuple(units), **given)


def _short(operators: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in operators))


def _conventions(row: Row) -> tuple[str, str]:
    plain = [None if c is None else str(c).partition(":")[2] for c in (row.convention, row.per_tensor)]
    return plain[0] or "", plain[1] or ""
