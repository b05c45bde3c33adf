"""Run two programs on the same inputs and compare corresponding nodes.

Both run side by side; each value is compared as soon as both have it, and then dropped. These correspond:

* outputs, by position;
* nodes with the same name, kind and shape, in programs derived from one another, because edits keep the names of nodes
that they do not touch;
* a node and the result of its decomposition (hop.export.analysis.provenance), if there is exactly one of that kind and
shape; for a quantized tensor, the result is its codes;
* if both programs decomposed a node differently, results of a kind and shape that each of them has exactly once.
"""

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from hop.export.analysis.arguments import Data, parse
from hop.export.analysis.correspondence import corresponding_nodes, lone_calls, parts_of
from hop.export.analysis.metrics import Difference, Figures
from hop.export.analysis.running import Runner, compare, figures_of_outputs
from hop.export.table import table
from hop.numerics.requantization import Convention

_MAX_SHOWN, _SHOWN_TRIALS = 12, 6


@dataclass(frozen=True)
class Trial:
    """The outcome of one convention for a node.

    convention: how codes are computed.
    differing: number of codes that differ from the runtime's.
    targets: names of the targets with this convention for the node's operator.
    """

    convention: Convention
    differing: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The result of hop.export.verify.

    Attributes:
        rows: one per pair of nodes, or of a node and a tensor of the file, in the order of the first program, followed
            by outputs that are in no pair.
        only_a, only_b: number of calls with a tensor result that have no counterpart.
        inputs: number of inputs that both ran on.
        trials: for a file, the first node that differs, computed from its operands in the program by each convention
            known for its operator, nearest to the runtime's codes first. Empty if nothing differs, or if that node has
            no convention.
        units: nodes whose codes have another scale or zero point in the file: name, the program's units, the file's
            units. Empty for TOSA files, which have no scales.
    """

    rows: tuple[Difference, ...]
    only_a: int
    only_b: int
    inputs: int
    trials: tuple[Trial, ...] = ()
    units: tuple[tuple[str, tuple[float, int], tuple[float, int]], ...] = ()

    @property
    def first(self) -> Difference | None:
        """The first pair that differs; None if all are equal."""
        return next((row for row in self.rows if row.differing), None)

    @property
    def outputs(self) -> tuple[Difference, ...]:
        """The rows of the outputs, by position."""
        rows = [row for row in self.rows if row.output is not None]
        return tuple(sorted(rows, key=lambda row: row.output or 0))

    @property
    def equal_with(self) -> tuple[Trial, ...]:
        """The trials that reproduce the runtime's codes."""
        return tuple(t for t in self.trials if t.differing == 0)

    def __str__(self) -> str:
        different = [row for row in self.rows if row.differing]
        head = f"{len(self.rows)} pairs on {_count(self.inputs, 'input')}, {len(self.rows) - len(different)} equal; "
        head += f"without a counterpart: {self.only_a} and {self.only_b}"
        shown = [row for row in self.rows if row.output is not None or row in different[:_MAX_SHOWN]]
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
        text += [
            f"{name}: scale {own[0]:.9g} and zero point {own[1]}, in the file {its[0]:.9g} and {its[1]}"
            for name, own, its in self.units
        ]
        if self.first is not None and self.trials:
            equal = self.equal_with
            text.append(
                f"the first is {self.first.a}; " + ("equal by" if equal else "no convention makes it equal; nearest")
            )
            cells = [
                (str(t.convention).partition(":")[2], ", ".join(t.targets), f"{t.differing:,}")
                for t in (equal or self.trials)[:_SHOWN_TRIALS]
            ]
            text.append(table(("convention", "that of", "differ"), cells, right=2))
        return "\n".join(text)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def compare_programs(
    program: ExportedProgram | GraphModule, other: ExportedProgram | GraphModule, inputs: Data
) -> Comparison:
    """Compare two programs for hop.export.verify."""
    given = parse("verify", "inputs", inputs)
    a, b = Runner(program, "program"), Runner(other, "model")
    if len(a.outputs) != len(b.outputs):  # a decomposition splits quantized outputs into buffers
        a.outputs, b.outputs = ([part for node, _ in r.outputs for part in parts_of(node)] for r in (a, b))
    if len(a.outputs) != len(b.outputs):
        raise ValueError(
            f"verify: outputs correspond by position, but program has {len(a.outputs)} and model {len(b.outputs)}"
        )
    figures = [Figures(x, y) for x, y in corresponding_nodes(a.graph, b.graph)]
    output_figures = figures_of_outputs(a, b, figures)
    with torch.no_grad():
        for arguments in given:
            compare(a, b, arguments, figures, output_figures)
    kept = [f for f in figures if f.elements is not None]
    rows = tuple(f.row() for f in [*kept, *(f for f in output_figures if f.elements is not None and f not in kept)])
    lone = (lone_calls(r.graph, used) for r, used in ((a, [f.a for f in kept]), (b, [f.b for f in kept])))
    return Comparison(rows, next(lone), next(lone), len(given))
