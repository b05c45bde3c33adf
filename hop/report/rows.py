"""The rows of a report, one per value that a program computes, and of a sweep, one per scheme."""

import math
from dataclasses import dataclass

from hop.report.spread import Spread
from hop.report.values import FLOAT, INTEGER, LOW_BIT, Type

PRODUCT, QUANTIZE, MOVE, OTHER, INPUT = "product", "quantize", "move", "other", "input"


@dataclass(frozen=True)
class Source:
    """A tensor that a node reads.

    Attributes:
        name: the name of its node; for a parameter, its path in the model.
        type: its element type; None for a list whose first item is not a tensor.
        row: index of the row that computes it; None for a parameter or a constant.
    """

    name: str
    type: Type | None
    row: int | None

    @property
    def is_parameter(self) -> bool:
        return self.row is None


@dataclass(frozen=True)
class Error:
    """Differences between the values of a node and those of the reference.

    Attributes:
        reference: the name of the reference's node.
        elements, differing: number of elements compared, and number that differ.
        sqnr: 10 log10(Σ r² / Σ (r - x)²) in decibels, with r the reference's values: inf if nothing differs, None for
            integers.
        largest: the largest absolute difference.
        before: the lowest SQNR among the inputs, looking through rows without one; inf if no error came in.
        spread: the histogram of x - r; None for integers.
    """

    reference: str
    elements: int
    differing: int
    sqnr: float | None
    largest: int | float
    before: float
    spread: Spread | None

    @property
    def added(self) -> float:
        """The noise that this node adds: its noise over signal minus that of its noisiest operand, and at least 0."""
        if self.sqnr is None:
            return 0.0
        return max(0.0, _ratio(self.sqnr) - _ratio(self.before))


def _ratio(decibels: float) -> float:
    return math.inf if decibels == -math.inf else 10 ** (-decibels / 10)


@dataclass(frozen=True)
class Row:
    """One node of a program.

    Attributes:
        name: the node's name.
        path, module: the path and the class of the submodule that the node belongs to; empty if the program does not
            record them.
        operator: the operator that the node calls, followed by the inner one for operators on operators.
        sort: "product" (matrix products, convolutions, embeddings), "quantize" (a change of format), "move" (views,
            copies), "input", or "other".
        operands: the tensors that it reads.
        computes: the types of a product's two factors; for other operators, the type of the result.
        result: the type of the result.
        shape: the shape of the result for the first inputs.
        output: index among the outputs of the program; None for an intermediate value.
        kernel: the implementation that ran.
        reasons: why each implementation tried before it declined.
        parameter_bytes: bytes of the parameters and constants that it reads, scales included.
        seconds: the median over runs; None for an input.
        error: differences from the reference; None without a reference or a corresponding node.
        values: the histogram of the result; None for integers.
        weights: the histogram of its largest parameter; None without one.
        inexact: why the result may depend on the route, the CPU or the batch, and what to use instead; "" if it is
            exact (hop.export.check_exact).
    """

    name: str
    path: str
    module: str
    operator: str
    sort: str
    operands: tuple[Source, ...]
    computes: tuple[Type, ...]
    result: Type
    shape: tuple[int, ...]
    output: int | None
    kernel: str
    reasons: tuple[str, ...]
    parameter_bytes: int
    seconds: float | None
    error: Error | None
    values: Spread | None
    weights: Spread | None
    inexact: str = ""

    @property
    def formats(self) -> str:
        """The formats of `computes` as text, such as "int8 × int8"."""
        return " × ".join(t.format for t in self.computes)

    @property
    def kind(self) -> str:
        """The kind that it computes in: "low-bit" if any of the types in `computes` is, else "integer" if any is, else
        "float".
        """
        kinds = {t.kind for t in self.computes}
        return LOW_BIT if LOW_BIT in kinds else INTEGER if INTEGER in kinds else FLOAT

    @property
    def is_float(self) -> bool:
        """Whether it computes in floats only."""
        return self.kind == FLOAT

    @property
    def quantizes_inside(self) -> bool:
        """Whether it is a product that quantizes one of its float operands itself."""
        given = sum(o.type is not None and o.type.kind == LOW_BIT for o in self.operands)
        return self.sort == PRODUCT and sum(t.kind == LOW_BIT for t in self.computes) > given

    @property
    def changes(self) -> tuple[tuple[Type, Type], ...]:
        """The pairs of types (operand, result) whose formats differ, for operands that another row computes.

        Integer operands such as masks and indices count only for casts and dequantization.
        """
        if self.operator == "getitem":  # a list has a type for each item
            return ()
        read = [o.type for o in self.operands if o.row is not None and o.type is not None]
        read = [t for t in read if t.kind != INTEGER or self.sort == QUANTIZE]
        return tuple((t, self.result) for t in read if t.format != self.result.format)


@dataclass(frozen=True)
class Candidate:
    """Measurements of one scheme.

    Attributes:
        name, scheme: the candidate's name and the scheme's text; "float" and "" for the float model.
        sqnr: SQNR in decibels of the outputs against the float model; inf if they are equal.
        cosine: mean cosine similarity with the float model's outputs, over their last dimension.
        loss: the value of the loss function; None without one.
        parameter_bytes: bytes of all parameters and constants that the program reads, scales included.
        seconds, float_seconds: median time of one run on the first arguments, and of the float model's interleaved
            runs.
        rewritten, left: number of operators converted to the scheme, and number that could not be.
    """

    name: str
    scheme: str
    sqnr: float
    cosine: float
    loss: float | None
    parameter_bytes: int
    seconds: float
    float_seconds: float
    rewritten: int
    left: int

    @property
    def quality(self) -> float:
        """The quality used for the Pareto front, higher is better: the negative loss, or the SQNR if there is no loss
        function.
        """
        return self.sqnr if self.loss is None else -self.loss

    @property
    def slowdown(self) -> float:
        """Its time divided by that of the float model, measured in turns."""
        return self.seconds / self.float_seconds
