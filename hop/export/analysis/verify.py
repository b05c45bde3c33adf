"""Two programs on the same inputs, node by node where they correspond.

Both run side by side, each value is compared as soon as both have it, and none is kept. What corresponds:

* outputs, by their position;
* nodes of the same name, in programs that were made of one another by edits, which leave the names of what they do not
  touch: a float, an integer or a quantized tensor beside one of its kind, of the same shape;
* a node, and of those that a decomposition put into its place (hop.export.analysis.provenance) the one that others
  read, if it is the only one of this kind and shape. Beside a quantized tensor these are its codes;
* where both programs took a node apart, each in its own way, those of the results of one kind and shape that each has
  once.
"""

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from hop.export.analysis.arguments import Data, parse
from hop.export.analysis.correspondence import lone_calls, pairs_of, parts_of
from hop.export.analysis.metrics import Difference, Figures
from hop.export.analysis.running import Runner, compare, outputs_of
from hop.export.table import table

_SHOWN = 12


@dataclass(frozen=True)
class Comparison:
    """What hop.export.verify found.

    Attributes:
        rows: of each pair, in the order of the first program; outputs that are no node of such a pair come last.
        only_a, only_b: how many calls with a tensor as value have no counterpart.
        inputs: how many inputs both programs ran on.
    """

    rows: tuple[Difference, ...]
    only_a: int
    only_b: int
    inputs: int

    @property
    def first(self) -> Difference | None:
        """The first pair that differs; None if all are equal."""
        return next((row for row in self.rows if row.differing), None)

    @property
    def outputs(self) -> tuple[Difference, ...]:
        """Those of the outputs, by position."""
        rows = [row for row in self.rows if row.output is not None]
        return tuple(sorted(rows, key=lambda row: row.output or 0))

    def __str__(self) -> str:
        different = [row for row in self.rows if row.differing]
        head = f"{len(self.rows)} pairs on {_count(self.inputs, 'input')}, {len(self.rows) - len(different)} equal; "
        head += f"without a counterpart: {self.only_a} and {self.only_b}"
        shown = [row for row in self.rows if row.output is not None or row in different[:_SHOWN]]
        lines = [
            (
                row.a if row.output is None else f"{row.a} (output {row.output})",
                *(row.b, row.operator, str(row.dtype).removeprefix("torch.")),
                "x".join(map(str, row.shape)) or "1",
                f"{row.elements:,}",
                f"{row.differing:,}",
                f"{row.largest:,}" if isinstance(row.largest, int) else f"{row.largest:.3g}",
                "" if row.sqnr is None else f"{row.sqnr:.1f}",
            )
            for row in shown
        ]
        names = ("node", "other node", "operator", "dtype", "shape", "elements", "differ", "largest", "SQNR dB")
        hidden = len([row for row in different if row not in shown])
        text = [head, table(names, lines, right=5)]
        if hidden:
            text.append(f"{_count(hidden, 'pair')} more differ")
        return "\n".join(text)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def compare_programs(
    program: ExportedProgram | GraphModule, other: ExportedProgram | GraphModule, inputs: Data
) -> Comparison:
    """What hop.export.verify does with two programs."""
    given = parse("verify", "inputs", inputs)
    a, b = Runner(program, "program"), Runner(other, "model")
    if len(a.outputs) != len(b.outputs):  # a decomposition takes quantized outputs apart
        a.outputs, b.outputs = ([part for node, _ in r.outputs for part in parts_of(node)] for r in (a, b))
    if len(a.outputs) != len(b.outputs):
        raise ValueError(
            f"verify: outputs correspond by position, and program has {len(a.outputs)}, model {len(b.outputs)}"
        )
    figures = [Figures(x, y) for x, y in pairs_of(a.graph, b.graph)]
    of_outputs = outputs_of(a, b, figures)
    with torch.no_grad():
        for arguments in given:
            compare(a, b, arguments, figures, of_outputs)
    kept = [f for f in figures if f.elements is not None]
    rows = tuple(f.row() for f in [*kept, *(f for f in of_outputs if f.elements is not None and f not in kept)])
    lone = (lone_calls(r.graph, used) for r, used in ((a, [f.a for f in kept]), (b, [f.b for f in kept])))
    return Comparison(rows, next(lone), next(lone), len(given))
