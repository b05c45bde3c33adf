"""Bound a program's integer sums, to prove that accumulators cannot overflow.

The program is lowered to core ATen, which replaces our operators by their meaning. Interval arithmetic
(hop.export.analysis.intervals) then propagates bounds from the known weights and from the ranges that formats and
clamps impose on activations. A result that may exceed its dtype is treated as unbounded from there on.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from hop.compat.eager import HigherOrderOperator, OpOverload
from hop.compat.pytree import Args, Kwargs, tree_leaves, tree_map_only
from hop.export.analysis import intervals, provenance
from hop.export.analysis.intervals import Integers, Known, Reals, Sum
from hop.export.rewrite.lowering import lower
from hop.export.rewrite.program import check_program
from hop.export.table import table
from hop.numerics.spelling import shown

aten = torch.ops.aten
PROVEN, MAY_OVERFLOW, UNKNOWN = "proven", "may overflow", "unknown"


@dataclass(frozen=True)
class SumRange:
    """Bounds of one integer sum or product.

    Attributes:
        node: the name of the program's node that it belongs to.
        inner: the name of its node in the lowered program.
        operator: the operator of that node.
        product: whether it sums many terms, as matrix products, convolutions and sums do.
        low, high: lower and upper bounds; None if unknown.
        bits: width of the two's complement integer that can represent both; None if unknown.
        accumulator: the dtype that must represent it: that of the result, or a narrower one that it is cast to
            directly.
        status: "proven" if every possible value fits the accumulator, "may overflow" if the bounds do not fit,
            "unknown" if there are none.
        known: what the bounds are based on, or why there are none.
    """

    node: str
    inner: str
    operator: str
    product: bool
    low: int | None
    high: int | None
    bits: int | None
    accumulator: torch.dtype
    status: str
    known: str


@dataclass(frozen=True)
class Ranges:
    """The result of hop.export.ranges: in order, a row for each integer sum or product that is not constant, and for
    each matrix product and convolution.
    """

    rows: tuple[SumRange, ...]

    @property
    def proven(self) -> bool:
        """Whether no sum or product of the program can overflow."""
        return all(row.status == PROVEN for row in self.rows)

    @property
    def products(self) -> tuple[SumRange, ...]:
        """The rows of matrix products, convolutions and sums."""
        return tuple(row for row in self.rows if row.product)

    def __str__(self) -> str:
        """A line for the widest product of each node, and one for each row that is not proven."""
        groups: dict[str, list[SumRange]] = {}
        for row in self.products:
            groups.setdefault(row.node, []).append(row)
        widest = {node: max(rows, key=_width) for node, rows in groups.items()}
        shown = [r for r in self.rows if r is widest.get(r.node) or (r.status != PROVEN and not r.product)]
        lines = [
            (
                *(r.node, r.operator, r.status, r.known, str(r.accumulator).removeprefix("torch.")),
                *("" if n is None else f"{n:,}" for n in (r.low, r.high, r.bits)),
                str(len(groups.get(r.node, ())) if r.product else 1),
            )
            for r in shown
        ]
        names = ("node", "operator", "status", "known", "accumulator", "low", "high", "bits", "sums")
        rest = [r for r in self.rows if not r.product]
        counts = ", ".join(
            f"{sum(r.status == status for r in rest)} {status}" for status in (PROVEN, MAY_OVERFLOW, UNKNOWN)
        )
        return f"{table(names, lines, right=5)}\nother sums and products of two integers: {counts}"


def _width(row: SumRange) -> tuple[bool, int]:
    return row.low is None, max(row.high or 0, -(row.low or 0))


def ranges(program: ExportedProgram, inputs: Mapping[str, tuple[float, float]] | None = None) -> Ranges:
    """Bound each integer sum and product of a program, and check whether its accumulator can represent it.

    Parameters, constants, and buffers that the program does not write to have their current values. Sums with known
    weights are bounded per channel by the signs of the weights; if the other factors are independent, the bounds are
    tight.

    Args:
        program: an exported program; it is lowered internally, and not changed.
        inputs: bounds of inputs by their names in the program: integers for integer inputs, numbers for floats. Other
            inputs may have any value of their dtype.

    Returns:
        A Ranges; str() formats it as a table.

    Raises:
        TypeError: `program` is not an ExportedProgram.
        ValueError: `inputs` names something other than inputs, or bounds are not two ascending numbers within the
            dtype.
    """
    check_program(program, "ranges")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(
            f"ranges: inputs must be a mapping from names to pairs, got {shown(inputs)}; give one such as "
            "{'input': (0, 1)}"
        )
    lowered = lower(program)
    owners = {node: own.name for own, group in provenance.descendants(program.graph, lowered.graph) for node in group}
    with torch.no_grad():
        return Ranges(tuple(_Analysis(lowered, owners, dict(inputs or {})).rows))


class _Analysis:
    def __init__(self, program: ExportedProgram, owners: dict[Node, str], inputs: Mapping[str, object]) -> None:
        self.graph, self.owners = program.graph, owners
        self.rows: list[SumRange] = []
        self.found: dict[Node, object] = {}
        self.narrowed: set[Node] = set()  # casts that are covered by the row of the sum before them
        self._begin(program, inputs)
        last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            last |= dict.fromkeys(node.all_input_nodes, node)
        dead: dict[Node, list[Node]] = {}
        for node, user in last.items():
            dead.setdefault(user, []).append(node)
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.found[node] = self._value(node)
            for old in dead.get(node, []):
                if isinstance(self.found.get(old), Known):
                    del self.found[old]

    # ---- inputs

    def _begin(self, program: ExportedProgram, inputs: Mapping[str, object]) -> None:
        signature = program.graph_signature
        written = {
            spec.target
            for spec in signature.output_specs
            if spec.kind in (OutputKind.BUFFER_MUTATION, *_parameter_mutation())
        }
        state, constants = program.state_dict, program.constants
        given: list[str] = []
        for node, spec in zip(self.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
            self.found[node] = intervals.dtype_bounds(node.meta.get("val"))
            if spec.kind is InputKind.USER_INPUT:
                given.append(node.name)
                if node.name in inputs:
                    self.found[node] = _input_bounds(node, inputs[node.name])
            elif spec.target not in written:
                name = spec.target or ""
                value = state[name] if name in state else constants.get(name)
                if isinstance(value, Tensor):
                    self.found[node] = Known(value.detach())
        wrong = [name for name in inputs if name not in given]
        if wrong:
            raise ValueError(
                f"ranges: inputs must name inputs of the program, got {wrong[0]!r}; take one of {', '.join(given)}"
            )

    # ---- nodes

    def _value(self, node: Node) -> object:
        value: Any = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            items = self.found.get(source)  # type: ignore[arg-type]
            if isinstance(items, Known):
                return Known(items.value[index])
            return items[index] if isinstance(items, tuple) else intervals.dtype_bounds(value)  # type: ignore[index]
        if isinstance(node.target, HigherOrderOperator):  # its subgraphs are not analyzed
            self._unknown(node, torch.int32, "no rule for this operator")
        if not isinstance(node.target, OpOverload) or node.target in intervals.UNFILLED:
            return intervals.dtype_bounds(value)
        args, kwargs = tree_map_only(Node, self._operand, (node.args, node.kwargs))
        leaves = tree_leaves((args, kwargs))
        if node.target in intervals.FILLED:
            return self._filled(node, args)
        fixed = all(isinstance(x, Known) or not isinstance(x, _UNKNOWN) for x in leaves)
        if fixed and torch.Tag.nondeterministic_seeded not in node.target.tags:
            own_args, own_kwargs = tree_map_only(Known, lambda x: x.value, (args, kwargs))
            if node.target in intervals.PRODUCTS and intervals.is_integer(value.dtype):
                self._computed(node, value, args, kwargs)
            return Known(node.target(*own_args, **own_kwargs))
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            try:
                return intervals.float_rule(node, args, kwargs)
            except intervals.Unknown:
                return Reals()
        if isinstance(value, Tensor) and value.dtype == torch.bool and node.target not in intervals.MOVES:
            return intervals.dtype_bounds(value)
        return self._computed(node, value, args, kwargs)

    def _operand(self, node: Node) -> object:
        return self.found.get(node, intervals.NoBounds())

    def _filled(self, node: Node, args: tuple[object, ...]) -> object:
        """The bounds of a tensor filled with one number."""
        value = node.meta["val"]
        number = args[1] if node.target is not aten.scalar_tensor.default else args[0]
        shape = intervals.static_shape(value.shape)
        if not isinstance(number, bool | int | float):
            return intervals.dtype_bounds(value)
        if shape is not None and value.numel() <= intervals.FEW:
            return Known(torch.full(shape, number, dtype=value.dtype))
        return intervals.bounds(torch.full([1], number, dtype=value.dtype).reshape(()))

    def _computed(self, node: Node, value: Any, args: Args, kwargs: Kwargs) -> object:
        """The bounds of an integer node; adds its row."""
        if not isinstance(value, Tensor) and node.target not in intervals.RULES:
            if any(isinstance(v, Tensor) and intervals.is_integer(v.dtype) for v in tree_leaves(value)):
                self._unknown(node, torch.int64, "no rule for this operator")
            return intervals.dtype_bounds(value)
        try:
            rest = intervals.divisor_of_remainder(node)
            result = (
                None if rest is None else intervals.remainder(self._operand(rest) if isinstance(rest, Node) else rest)
            )
            if result is None:
                rule = intervals.RULES.get(node.target)
                if rule is None:
                    raise intervals.Unknown("no rule for this operator")
                result = rule(node, *args, **kwargs)
        except intervals.Unknown as reason:
            self._unknown(node, value.dtype, str(reason))
            return intervals.dtype_bounds(value)
        if isinstance(result, Sum):
            return self._summed(node, value, result)
        if isinstance(result, Integers):
            low, high = result.hull()
            least, greatest = intervals.dtype_range(value.dtype)
            if low < least or high > greatest:
                if node not in self.narrowed:
                    self._row(node, Sum(low, high, None, "a cast"), value.dtype)
                return intervals.dtype_bounds(value)
        return result

    def _summed(self, node: Node, value: Tensor, total: Sum) -> object:
        if not intervals.is_integer(value.dtype):
            return Reals()
        cast = _cast_after(node) if total.is_product else None
        if cast is not None:
            self.narrowed.add(cast)
        accumulator = value.dtype if cast is None else cast.meta["val"].dtype
        self._row(node, total, accumulator)
        least, greatest = intervals.dtype_range(value.dtype)
        if total.low < least or total.high > greatest:
            return intervals.dtype_bounds(value)
        return total.parts or intervals.integers(total.low, total.high)

    def _row(self, node: Node, total: Sum, accumulator: torch.dtype) -> None:
        least, greatest = intervals.dtype_range(accumulator)
        status = PROVEN if least <= total.low and total.high <= greatest else MAY_OVERFLOW
        bits = 1 + max((n if n >= 0 else ~n).bit_length() for n in (total.low, total.high))
        bits -= least == 0 and total.low >= 0
        names = (self.owners.get(node, node.name), node.name, str(node.target))
        self.rows.append(
            SumRange(*names, total.is_product, total.low, total.high, bits, accumulator, status, total.known)
        )

    def _unknown(self, node: Node, dtype: torch.dtype, reason: str) -> None:
        names = (self.owners.get(node, node.name), node.name, str(node.target))
        product = node.target in intervals.PRODUCTS
        self.rows.append(SumRange(*names, product, None, None, None, dtype, UNKNOWN, reason))


_UNKNOWN = (Integers, Reals, intervals.NoBounds)


def _input_bounds(node: Node, limits: object) -> object:
    """The user's bounds of an input. Raises ValueError if they are invalid."""
    value = node.meta["val"]
    kind = int if isinstance(value, Tensor) and intervals.is_integer(value.dtype) else int | float
    limit = list(limits) if isinstance(limits, tuple | list) else []
    pair = len(limit) == 2 and all(isinstance(n, kind) for n in limit)
    if not isinstance(value, Tensor) or not pair or not limit[0] <= limit[1]:
        raise ValueError(
            f"ranges: inputs[{node.name!r}] must be a pair of ascending numbers, of integers for a tensor of "
            f"integers; got {limits!r}; give one such as (0, 1)"
        )
    if kind is not int:
        return Reals(float(limit[0]), float(limit[1]), False)
    least, greatest = intervals.dtype_range(value.dtype)
    if limit[0] < least or limit[1] > greatest:
        raise ValueError(
            f"ranges: inputs[{node.name!r}] is {limits!r}, but {value.dtype} ranges from {least} to {greatest}; give "
            "such bounds"
        )
    return intervals.integers(*limit)


def _cast_after(node: Node) -> Node | None:
    """The cast to a narrower integer that is the only reader of a node, apart from views and copies; None otherwise."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in intervals.MOVES:
            node = user
            continue
        value: Any = user.meta.get("val")
        if user.target is not aten._to_copy.default or not intervals.is_integer(value.dtype):
            return None
        narrower = value.dtype.itemsize < node.meta["val"].dtype.itemsize
        return user if narrower and value.dtype != torch.bool else None
    return None


def _parameter_mutation() -> list[OutputKind]:
    """The output kind of programs that write to parameters, if this version of torch has it."""
    kind = getattr(OutputKind, "PARAMETER_MUTATION", None)
    return [] if kind is None else [kind]
