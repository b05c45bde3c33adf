"""The rows of a report, one for each value that a program computes, and of a sweep, one for each scheme."""

import math
from dataclasses import dataclass

from hop.report.spread import Spread
from hop.report.values import FLOAT, INTEGER, LOW_BIT, Type

PRODUCT, QUANTIZE, MOVE, OTHER, INPUT = "product", "quantize", "move", "other", "input"


@dataclass(frozen=True)
class Source:
    """A tensor that a node reads.

    Attributes:
        name: of its node; of a parameter, its path in the model.
        type: how its elements are held; None of a list whose first item is no tensor.
        row: the place of the row that computes it; None for a parameter or a constant.
    """

    name: str
    type: Type | None
    row: int | None

    @property
    def is_parameter(self) -> bool:
        return self.row is None


@dataclass(frozen=True)
class Error:
    """How the values of a node differ from those of the reference.

    Attributes:
        reference: the name of the node that it is compared with.
        elements, differing: how many were compared, and how many differ.
        sqnr: 10 log10(Σ r² / Σ (r - x)²) in decibels, of the reference's numbers r: inf if nothing differs, None for
            integers.
        largest: the largest difference.
        before: the least SQNR of the rows that it depends on, through those that have none: what came in. inf if
            nothing came in.
        spread: of x - r; None for integers.
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
        """The noise that came in here: noise over signal, less that of the noisiest operand, and at least 0."""
        if self.sqnr is None:
            return 0.0
        return max(0.0, _ratio(self.sqnr) - _ratio(self.before))


def _ratio(decibels: float) -> float:
    return math.inf if decibels == -math.inf else 10 ** (-decibels / 10)


@dataclass(frozen=True)
class Row:
    """One node of a program.

    Attributes:
        name: of the node.
        path, module: the submodule that the node stands in, and its class; empty where the program does not say.
        operator: what the node calls; of operators on operators, the inner one too.
        sort: "product" (matrix products, convolutions, embeddings), "quantize" (a change of format), "move" (views,
            copies), "input", or "other".
        operands: the tensors that it reads.
        computes: the types that it computes in: of the two factors of a product, else of the result.
        result: the type of the result; shape: for the first inputs.
        output: the position among the outputs of the program, None for a value between.
        kernel: the implementation that ran; reasons: those that were asked before it, and why each declined.
        parameter_bytes: of the parameters and constants that it reads, with their scales.
        seconds: the median over runs; None for an input.
        error: against the reference; None without one, and where nothing corresponds.
        values: where the numbers of the result lie; None for integers.
        weights: where those of its largest parameter lie; None without one.
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

    @property
    def formats(self) -> str:
        """The same in words, such as "int8 × int8"."""
        return " × ".join(t.format for t in self.computes)

    @property
    def kind(self) -> str:
        """The kind that it computes in: low-bit if one of the factors is, integer if one is."""
        kinds = {t.kind for t in self.computes}
        return LOW_BIT if LOW_BIT in kinds else INTEGER if INTEGER in kinds else FLOAT

    @property
    def is_float(self) -> bool:
        """Whether it computes with floats alone."""
        return self.kind == FLOAT

    @property
    def quantizes_inside(self) -> bool:
        """Whether it is a product of low-bit factors that takes a float one and quantizes it itself."""
        given = sum(o.type is not None and o.type.kind == LOW_BIT for o in self.operands)
        return self.sort == PRODUCT and sum(t.kind == LOW_BIT for t in self.computes) > given

    @property
    def changes(self) -> tuple[tuple[Type, Type], ...]:
        """Where a format changes: from an operand that another row computes, to the result. Masks, indices and the
        other integers beside floats are no such operands, but for those that a cast or a dequantization reads."""
        if self.operator == "getitem":  # a list has a type for each item
            return ()
        read = [o.type for o in self.operands if o.row is not None and o.type is not None]
        read = [t for t in read if t.kind != INTEGER or self.sort == QUANTIZE]
        return tuple((t, self.result) for t in read if t.format != self.result.format)


@dataclass(frozen=True)
class Candidate:
    """One scheme.

    Attributes:
        name, scheme: its name, and its spelling; of the float model, "float" and "".
        sqnr: of the outputs against the float model, in decibels; inf if they are equal.
        cosine: the mean cosine between the outputs and the float model's, over their last dimension.
        loss: the mean of the loss function, None without one.
        parameter_bytes: of all parameters and constants that the program reads, with their scales.
        seconds, float_seconds: of one run on the first arguments, and of the float model between these runs: medians.
        rewritten, left: how many operators compute in the scheme, and how many could not.
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
        """What the Pareto front compares: the loss with its sign turned, else the SQNR. Greater is better."""
        return self.sqnr if self.loss is None else -self.loss

    @property
    def slowdown(self) -> float:
        """Its time over that of the float model, in the same minutes."""
        return self.seconds / self.float_seconds
