"""Two programs on the same inputs, node by node where they correspond.

Both run side by side, each value is compared as soon as both have it, and none is kept. What corresponds:

* outputs, by their position;
* nodes of the same name, in programs that were made of one another by edits, which leave the names of what they do not
  touch: a float, an integer or a quantized tensor beside one of its kind, of the same shape;
* a node, and of those that a decomposition put into its place (hop.export.provenance) the one that others read, if it
  is the only one of this kind and shape. Beside a quantized tensor these are its codes;
* where both programs took a node apart, each in its own way, those of the results of one kind and shape that each has
  once.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves

from hop._compile import OpOverload
from hop.export import provenance
from hop.export.table import table
from hop.formats import Integer
from hop.leaves import dequantize
from hop.tensor import QuantizedTensor

_SHOWN = 12


@dataclass(frozen=True)
class Row:
    """How the values of two nodes differ, over all inputs.

    Attributes:
        a, b: the names of the nodes.
        operator: what `a` calls.
        output: the position among the outputs, None for a node between.
        dtype: of the value of `a`; of the codes, if it is quantized.
        shape: of the value of `a`, for the first inputs.
        elements, differing: how many were compared, and how many of them differ. NaN equals NaN, and -0.0 equals 0.0.
        largest: the largest difference: in steps, a Python int, between integers and between codes of an integer
            format; otherwise of the numbers, NaN or infinite if one of the two is.
        sqnr: 10 log10(Σ a² / Σ (a - b)²) in decibels, over what is finite in both; inf if nothing differs, -inf if one
            of the two numbers is not finite; None for integers.
    """

    a: str
    b: str
    operator: str
    output: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: int
    differing: int
    largest: int | float
    sqnr: float | None


@dataclass(frozen=True)
class Comparison:
    """What hop.export.verify found.

    Attributes:
        rows: of each pair, in the order of the first program; outputs that are no node of such a pair come last.
        only_a, only_b: how many calls with a tensor as value have no counterpart.
        inputs: how many inputs both programs ran on.
    """

    rows: tuple[Row, ...]
    only_a: int
    only_b: int
    inputs: int

    @property
    def first(self) -> Row | None:
        """The first pair that differs; None if all are equal."""
        return next((row for row in self.rows if row.differing), None)

    @property
    def outputs(self) -> tuple[Row, ...]:
        """Those of the outputs, by position."""
        found = [row for row in self.rows if row.output is not None]
        return tuple(sorted(found, key=lambda row: row.output or 0))

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


def verify(
    program_a: ExportedProgram | GraphModule,
    program_b: ExportedProgram | GraphModule,
    inputs: tuple[Any, ...] | Sequence[tuple[Any, ...]],
) -> Comparison:
    """Run two programs on the same inputs and compare what corresponds, node by node.

    Neither program is changed, nor the buffers that it writes to: each input finds them as they are now. Without
    gradients.

    Args:
        program_a, program_b: exported programs, or their modules (`program.module()`).
        inputs: the positional arguments of both programs, or a list of them, over which figures are summed.

    Returns:
        A Comparison. `str()` of it is a table of outputs and of what differs.

    Raises:
        TypeError: a program is none of these, or `inputs` no tuple and no list of tuples.
        ValueError: no inputs; inputs that do not fit a program; or programs with different numbers or shapes of
            outputs.
    """
    given = [inputs] if isinstance(inputs, tuple) else inputs
    if not isinstance(given, list) or not all(isinstance(x, tuple) for x in given):
        raise TypeError(
            "verify: inputs must be the tuple of a program's positional arguments, or a list of such tuples; got "
            f"{type(inputs).__name__}"
        )
    if not given:
        raise ValueError("verify: inputs is an empty list; pass at least one tuple of arguments")
    a, b = _Runner(program_a, "program_a"), _Runner(program_b, "program_b")
    if len(a.outputs) != len(b.outputs):  # a decomposition takes quantized outputs apart
        a.outputs, b.outputs = ([part for node, _ in r.outputs for part in _parts(node)] for r in (a, b))
    if len(a.outputs) != len(b.outputs):
        raise ValueError(
            f"verify: outputs correspond by position, and program_a has {len(a.outputs)}, program_b {len(b.outputs)}"
        )
    pairs = _pairs(a.graph, b.graph)
    found = [_Figures(x, y) for x, y in pairs]
    of_outputs = _outputs(a, b, found)
    with torch.no_grad():
        for arguments in given:
            _compare(a, b, arguments, found, of_outputs)
    kept = [f for f in found if f.elements is not None]
    rows = tuple(f.row() for f in [*kept, *(f for f in of_outputs if f.elements is not None and f not in kept)])
    lone = (_lone(r.graph, used) for r, used in ((a, [f.a for f in kept]), (b, [f.b for f in kept])))
    return Comparison(rows, next(lone), next(lone), len(given))


# ---- what corresponds


def _pairs(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """The nodes that correspond, in the order of `a`."""
    is_older = provenance.depth(a) <= provenance.depth(b)
    found = _descended(a, b) if is_older else [(x, y) for y, x in _descended(b, a)]
    for of_a, of_b in provenance.relatives(a, b):
        used = {node for pair in found for node in pair}
        fits = [(x, y) for x in of_a for y in of_b if not {x, y} & used and _fit(x, y, same_dtype=True)]
        times = Counter(node for pair in fits for node in pair)
        found += [(x, y) for x, y in fits if times[x] == times[y] == 1]
    order = {node: i for i, node in enumerate(a.nodes)}
    return sorted(found, key=lambda pair: order[pair[0]])


def _descended(a: Graph, b: Graph) -> list[tuple[Node, Node]]:
    """Nodes of `a`, and what they are in `b`, which is as far from the first program, or farther."""
    found = []
    for node, group in provenance.descendants(a, b):
        if len(group) == 1 and _fit(node, group[0], same_dtype=False):
            found.append((node, group[0]))
        elif len(group) > 1:
            fitting = [other for other in provenance.results(group) if _fit(node, other, same_dtype=True)]
            found += [(node, other) for other in fitting if len(fitting) == 1]
    return found


def _lone(graph: Graph, used: list[Any]) -> int:
    """How many calls with a tensor as value are none of those."""
    calls = {node for node in graph.nodes if node.op == "call_function" and _kind(_value(node)) is not None}
    return len(calls.difference(used))


def _fit(a: Node, b: Node, *, same_dtype: bool) -> bool:
    """Whether the values of two nodes can be compared, as far as the graphs say: they are of one kind and shape."""
    x, y = _value(a), _value(b)
    if _kind(x) is None or _kind(y) is None:
        return False
    if (_kind(x) == "quantized") != (_kind(y) == "quantized"):
        x, y = _held(x), _held(y)
    if _kind(x) != _kind(y) or (same_dtype and x.dtype != y.dtype) or len(x.shape) != len(y.shape):
        return False
    sizes = zip(x.shape, y.shape, strict=True)
    return all(not (isinstance(m, int) and isinstance(n, int)) or m == n for m, n in sizes)


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _kind(x: Any) -> str | None:
    """Of a tensor; None for what is none."""
    if not isinstance(x, Tensor):
        return None
    if isinstance(x, QuantizedTensor):
        return "quantized"
    if x.dtype in (torch.bool, torch.uint64):  # which int64 does not hold
        return str(x.dtype)
    return "float" if x.is_floating_point() or x.is_complex() else "integer"


def _parts(node: Any) -> list[tuple[Any, str | None]]:
    """A node, and each buffer of it, if its value is quantized."""
    value = _value(node) if isinstance(node, Node) else None
    return [(node, name) for name in value.buffers()] if isinstance(value, QuantizedTensor) else [(node, None)]


def _held(x: Any) -> Any:
    return x.codes if isinstance(x, QuantizedTensor) else x


# ---- running


class _Runner:
    """A program whose nodes run one at a time."""

    def __init__(self, program: Any, name: str) -> None:
        if not isinstance(program, ExportedProgram | GraphModule):
            raise TypeError(
                f"verify: {name} must be a torch.export.ExportedProgram or its module(), got {type(program).__name__}"
            )
        self.program, self.name = program, name
        self.module = program.graph_module if isinstance(program, ExportedProgram) else program
        self.graph = self.module.graph
        self.writes = any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in self.graph.nodes)
        results = tree_leaves(self.graph.output_node().args[0])
        if isinstance(program, ExportedProgram):
            specs = program.graph_signature.output_specs
            results = [x for x, spec in zip(results, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
        self.outputs: list[tuple[Any, str | None]] = [(x, None) for x in results]  # a node, and one of its buffers
        last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            last |= dict.fromkeys(node.all_input_nodes, node)
        self.done_after: dict[Node, list[Node]] = {}
        for node, user in last.items():
            self.done_after.setdefault(user, []).append(node)

    def steps(self, arguments: tuple[Any, ...]) -> Iterator[tuple[Node, Any]]:
        """Each node and its value, in order; a value is dropped after the last node that reads it."""
        interpreter = fx.Interpreter(self.module)
        interpreter.env = self._given(arguments)
        for node in self.graph.nodes:
            if node.op == "output":
                return
            if node.op != "placeholder":
                found = interpreter.run_node(node)
                interpreter.env[node] = self._own(found) if node.op == "get_attr" else found
            yield node, interpreter.env[node]
            for dead in self.done_after.get(node, []):
                del interpreter.env[dead]

    def _given(self, arguments: tuple[Any, ...]) -> dict[Node, Any]:
        placeholders = self.graph.find_nodes(op="placeholder")
        if not isinstance(self.program, ExportedProgram):
            values: Any = self.graph.process_inputs(*arguments)
            self._check(len(placeholders), len(values))
            return dict(zip(placeholders, map(self._own, values), strict=True))
        leaves, spec = tree_flatten((arguments, {}))
        specs = self.program.graph_signature.input_specs
        wanted = sum(s.kind is InputKind.USER_INPUT for s in specs)
        self._check(wanted, len(leaves))
        if self.program.call_spec.in_spec not in (None, spec):
            raise ValueError(
                f"verify: the inputs are nested as {spec}, and {self.name} was exported for "
                f"{self.program.call_spec.in_spec}"
            )
        rest, state, constants = iter(leaves), self.program.state_dict, self.program.constants
        env: dict[Node, Any] = {}
        for node, s in zip(placeholders, specs, strict=True):
            if s.kind is InputKind.USER_INPUT:
                value = next(rest)
                value = s.arg.value if isinstance(s.arg, ConstantArgument) else value
            elif s.target in state:
                value = state[s.target]
            elif s.target in constants:
                value = constants[s.target]
            else:
                raise ValueError(
                    f"verify: {self.name} has an input of kind {s.kind.name}, {node.name}, without a value"
                )
            env[node] = self._own(value)
        return env

    def _check(self, wanted: int, got: int) -> None:
        if wanted != got:
            raise ValueError(f"verify: {self.name} takes {wanted} tensors or numbers, and inputs have {got}")

    def _own(self, x: Any) -> Any:
        """x, which the program may write to."""
        return x.detach().clone() if self.writes and isinstance(x, Tensor) else x


def _compare(
    a: _Runner, b: _Runner, arguments: tuple[Any, ...], found: list["_Figures"], of_outputs: list["_Figures"]
) -> None:
    """Add the figures of one input."""
    waiting = [f for f in dict.fromkeys([*found, *of_outputs]) if not f.dropped]
    by_a: dict[Any, list[_Figures]] = {}
    by_b: dict[Any, list[_Figures]] = {}
    for f in waiting:
        by_a.setdefault(f.a, []).append(f)
        by_b.setdefault(f.b, []).append(f)
    left: dict[_Figures, Any] = {}
    right: dict[_Figures, Any] = {}
    other = b.steps(arguments)

    def kept(runner: _Runner, value: Any) -> Any:
        """A value that the program may write to later."""
        return value.clone() if runner.writes and isinstance(value, Tensor) else value

    def read_b(until: "_Figures") -> None:
        while until not in right:
            node, value = next(other)
            for f in by_b.get(node, ()):
                right[f] = kept(b, value)

    for node, value in a.steps(arguments):
        for f in by_a.get(node, []):
            if isinstance(f.b, Node):
                left[f] = kept(a, value)
                read_b(f)
                f.add(left.pop(f), right.pop(f))
            else:
                f.add(value, f.b)
    for f in waiting:
        if not isinstance(f.a, Node):
            if isinstance(f.b, Node):
                read_b(f)
            f.add(f.a, right.pop(f, f.b))


def _outputs(a: _Runner, b: _Runner, found: list["_Figures"]) -> list["_Figures"]:
    """The figures of the outputs, which are those of a pair where both are its nodes."""
    known = {(f.a, f.b): f for f in found}
    made = []
    for i, ((x, of_x), (y, of_y)) in enumerate(zip(a.outputs, b.outputs, strict=True)):
        nodes = isinstance(x, Node) and isinstance(y, Node) and of_x is None and of_y is None
        f = known.get((x, y)) if nodes else None
        if f is None or f.output is not None:
            f = _Figures(x, y, (of_x, of_y))
        f.output = i
        made.append(f)
    return made


# ---- figures


@dataclass(eq=False)
class _Figures:
    """What is known so far of a pair."""

    a: Any  # a node, or a constant among the outputs
    b: Any
    parts: tuple[str | None, str | None] = (None, None)  # the buffers of theirs that are compared
    output: int | None = None
    elements: int | None = None
    differing: int = 0
    largest: int | float = 0
    signal: float = 0.0
    noise: float = 0.0
    broken: bool = False  # a number is finite in one of the two alone
    has_numbers: bool = False
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = field(default=())
    dropped: bool = False

    def row(self) -> Row:
        sqnr = None
        if self.has_numbers:
            sqnr = -math.inf if self.broken else _decibels(self.signal, self.noise)
        a, b = (_name(x, part) for x, part in zip((self.a, self.b), self.parts, strict=True))
        assert self.elements is not None
        counts = self.elements, self.differing, self.largest
        return Row(a, b, _operator(self.a), self.output, self.dtype, self.shape, *counts, sqnr)

    def add(self, x: Any, y: Any) -> None:
        if x is None and y is None:  # an output that is none
            return
        x, y = (
            v if part is None or v is None else v.buffers()[part] for v, part in zip((x, y), self.parts, strict=True)
        )
        x, y = (torch.as_tensor(v) if isinstance(v, bool | int | float) else v for v in (x, y))
        fits = isinstance(x, Tensor) and isinstance(y, Tensor)
        if fits and (isinstance(x, QuantizedTensor) != isinstance(y, QuantizedTensor)):
            codes = (_kind(x) == "integer") or (_kind(y) == "integer")
            x, y = (_held(v) if codes else _numbers(v) for v in (x, y))
        if not fits or x.shape != y.shape:
            if self.output is None:
                self.dropped, self.elements = True, None
                return
            shapes = " and ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in (x, y))
            raise ValueError(f"verify: output {self.output} has different shapes: {shapes}")
        if self.elements is None:
            self.elements, self.shape, self.dtype = 0, tuple(x.shape), _held(x).dtype
        self.elements += x.numel()
        whole = _integers(x, y)
        differ = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        if whole is not None:
            self.largest = max(self.largest, _steps(*whole))
            differ |= _unequal(*whole)
        if whole is None or isinstance(x, QuantizedTensor):
            numbers = _numbers(x), _numbers(y)
            differ |= _unequal(*numbers)
            self._add_numbers(*numbers, with_largest=whole is None)
        self.differing += int(differ.sum())

    def _add_numbers(self, x: Tensor, y: Tensor, *, with_largest: bool) -> None:
        self.has_numbers = True
        x, y = (torch.view_as_real(v) if v.is_complex() else v for v in (x, y))
        x, y = x.to(torch.float64), y.to(torch.float64)
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
        finite = x.isfinite() & y.isfinite()
        self.broken |= bool((~finite & (gap != 0)).any())
        self.signal += torch.where(finite, x, 0.0).square().sum().item()
        self.noise += torch.where(finite, gap, 0.0).square().sum().item()
        if with_largest and gap.numel():
            worst = gap.max().item()  # NaN if one is
            self.largest = math.nan if math.isnan(worst) or math.isnan(self.largest) else max(self.largest, worst)
        if with_largest:
            self.largest = float(self.largest)


def _name(x: Any, part: str | None) -> str:
    name = x.name if isinstance(x, Node) else repr(x)
    return name if part is None else f"{name}.{part}"


def _operator(a: Any) -> str:
    if not isinstance(a, Node) or a.op != "call_function":
        return a.op if isinstance(a, Node) else "constant"
    name = str(a.target) if isinstance(a.target, OpOverload) else getattr(a.target, "__name__", str(a.target))
    inner = a.args[0] if a.args and isinstance(a.args[0], OpOverload) else None
    return name if inner is None else f"{name} {inner}"


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def _integers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two tensors whose differences are steps: integers, or the codes of quantized ones."""
    if isinstance(x, QuantizedTensor):
        a, b = _codes(x), _codes(y)
        return None if a is None or b is None else (a, b)
    return (x, y) if _kind(x) == _kind(y) != "float" else None


def _numbers(x: Tensor) -> Tensor:
    if isinstance(x, QuantizedTensor):
        return dequantize(x, torch.float32)
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.float64)


def _codes(x: Any) -> Tensor | None:
    """One code for each element, if they are integers."""
    q = x.quantizer
    if not isinstance(q.format, Integer) or q.layout is not None or "codes" not in x.buffers():
        return None
    return q.format.unpack(x.codes, x.shape[-1]).reshape(x.shape) if q.per_byte() > 1 else x.codes


def _unequal(x: Tensor, y: Tensor) -> Tensor:
    if not any(v.is_floating_point() or v.is_complex() for v in (x, y)):
        return x != y if x.dtype == y.dtype else x.to(torch.int64) != y.to(torch.int64)
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    return (x != y) & ~(x.isnan() & y.isnan())


_SIGN = -(2**63)


def _steps(x: Tensor, y: Tensor) -> int:
    """The largest difference of integers, exactly: of int64 it may be as large as 2^64 - 1, and is computed modulo
    that."""
    if x.numel() == 0:
        return 0
    x, y = (v.view(torch.int64) ^ _SIGN if v.dtype == torch.uint64 else v.to(torch.int64) for v in (x, y))
    apart = torch.maximum(x, y) - torch.minimum(x, y)
    return int((apart ^ _SIGN).max()) - _SIGN
