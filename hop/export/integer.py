"""Programs of quantized and dequantized floats as programs of integers.

    quantize -> dequantize -> float operator -> quantize      becomes      quantize -> scaled

What is matched is the meaning, not a list of nodes: a node that dequantizes *holds* codes, a scale and a zero point; so
do its views, and casts of codes to floats, with a scale of 1. An operator of which an argument holds codes becomes
hop.scaled of them; where all that reads its result quantizes it, with or without views, relu or clamp in between, it
gives the codes themselves. What is left is as it was, but that each remaining quantize and dequantize is ours.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

from hop import blocks
from hop._compile import OpOverload, known_equal
from hop.blocks import Block
from hop.export import encodings
from hop.export.encodings import FORMATS, Encoding
from hop.export.program import constant, emit, graph_of, propagate, rebuilt, value, without_unused
from hop.export.report import Report, Rewritten, Row
from hop.impls.quantize import quantize
from hop.impls.scaled import scaled
from hop.impls.scaled.roles import BIAS, CONVOLUTION, EMBEDDING, LHS, MATRIX, RHS, ROLES, VALUE, aten
from hop.leaves import dequantize
from hop.quantizer import Quantizer
from hop.requantization import Reciprocal, Requantization
from hop.scaling import Given
from hop.tensor import QuantizedTensor

_PRODUCTS = (MATRIX, CONVOLUTION)
_CHANGED = (aten.relu.default, aten.clamp.default, aten.hardtanh.default, aten.relu6.default)
_SELECTED = (aten.cat.default, aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_VIEWS = tuple(op for op, r in ROLES.items() if r.family is VALUE and op not in (*_CHANGED, *_SELECTED))


_REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)  # of operators that are asked for what is not


def to_integer(program: ExportedProgram, *, requantize: Requantization | None = None) -> Rewritten:
    """The program, its quantized parts in exact integers: see the top of this file, and docs/export.md for what is
    rewritten. Works on what torch.export makes of a model that PT2E converted, that torchao quantized, or that is made
    of our modules and operators; tensor subclasses among its parameters become the tensors that they hold.

    Args:
        requantize: how integer sums become codes (hop.requantization). The default is Reciprocal(), which a quantize
            node does: float32, times the reciprocal of the scale. Others are the arithmetic of integer-only runtimes.

    Returns the program and a report of what was rewritten and what was left, with the reasons. Raises TypeError for
    what is no ExportedProgram.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(f"program must be a torch.export.ExportedProgram, got {type(program).__name__}")
    if requantize is not None and not isinstance(requantize, Requantization):
        raise TypeError(f"requantize must be a convention of hop.requantization or None, got {requantize!r}")
    plain = program.run_decompositions({})  # functional; subclasses as the tensors that they hold
    graph = graph_of(plain)
    rewriter = _Rewriter(plain, graph, requantize or Reciprocal())
    rewriter.run()
    return Rewritten(without_unused(rebuilt(plain, graph)), Report(tuple(rewriter.rows)))


class Held(NamedTuple):
    """A float that stands for codes: nodes of a graph, or, where a function runs, tensors. A scale and a zero point may
    be numbers, and have other shapes than their buffers."""

    quantizer: Quantizer
    codes: Any
    given: list[Any]  # the scale, and the zero point if there is one
    dtype: torch.dtype

    def tensor(self) -> QuantizedTensor:
        described = self.quantizer.buffers(self.codes.shape)
        buffers = [self.codes, *_parameters(self.quantizer, self.codes, self.given)]
        named = dict(zip(described, buffers, strict=True))
        return QuantizedTensor(named, self.quantizer, self.codes.shape, self.dtype)

    def is_whole(self) -> bool:
        """Whether one scale serves the tensor."""
        return all(b == -1 for b in self.quantizer.block)


class _End(NamedTuple):
    """A node that quantizes what an operator gives, and what lies in between."""

    node: Node
    encoding: Encoding
    low: float | None
    high: float | None
    views: tuple[Node, ...]


class _Rewriter:
    def __init__(self, program: ExportedProgram, graph: Graph, requantize: Requantization) -> None:
        self.program, self.graph, self.requantize = program, graph, requantize
        self.held: dict[Node, Held] = {}
        self.cast: dict[Node, Node] = {}  # from floats to the codes that they are
        self.rows: list[Row] = []

    def run(self) -> None:
        for node in self.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
            self.graph.erase_node(node)  # they hold what they assert of in the graph; its types are known
        for node in list(self.graph.nodes):
            if node.op == "call_function" and not node._erased:
                self.visit(node)
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if node.op == "call_function" and encodings.is_encoding(node):
                self.finish(node)
        self.graph.eliminate_dead_code()
        self.share_numbers()
        propagate(self.graph)

    def share_numbers(self) -> None:
        """One node for all tensors that hold the same number: scales and zero points."""
        first: dict[Any, Node] = {}
        for node in self.graph.find_nodes(op="call_function", target=aten.full.default):
            if not any(isinstance(x, Node) for x in node.all_input_nodes):
                kept = first.setdefault((str(node.args), str(node.kwargs)), node)
                if kept is not node:
                    node.replace_all_uses_with(kept)
                    self.graph.erase_node(node)

    def visit(self, node: Node) -> None:
        if found := encodings.dequantizing(node):
            self.hold(node, found)
        elif found := encodings.quantizing(node):
            self.quantized(node, found)
        elif choice := encodings.choosing(node):
            self.choose(node, choice)
        elif node.target is aten._to_copy.default:
            self.convert(node)
        elif isinstance(node.target, OpOverload) and (node.target in ROLES or node.target is aten._int_mm.default):
            self.operate(node)
        elif any(x in self.held for x in _operands(node)):
            self.leave(node, "no operator of integers means the same")

    # ---- what holds codes

    def hold(self, node: Node, e: Encoding) -> None:
        format = FORMATS.get(e.codes)
        if format is None or value(node).dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return
        zero = None if self.is_zero(e.zero_point) else e.zero_point
        quantizer = Quantizer(format, e.block, Given(affine=zero is not None))
        if value(e.tensor).dtype is not e.codes:
            return
        given = [e.scale] if zero is None else [e.scale, zero]
        self.held[node] = Held(quantizer, e.tensor, given, value(node).dtype)

    def is_zero(self, x: Any) -> bool:
        """Whether a zero point is known to be 0."""
        if isinstance(x, Node):
            known = constant(self.program, x)
            return known is not None and not bool(known.any())
        return x is None or x == 0

    def convert(self, node: Node) -> None:
        """A cast: of codes to floats, or of one float dtype to another."""
        (x, *_), dtype = node.args, value(node).dtype
        if not isinstance(x, Node) or not dtype.is_floating_point or dtype == torch.float64:
            return
        if value(x).dtype in FORMATS:
            self.cast[node] = x
        elif x in self.held:
            self.held[node] = self.held[x]._replace(dtype=dtype)

    # ---- operators

    def operate(self, node: Node) -> None:
        if self.sums_of_casts(node):
            return
        operands = [x for x in _operands(node) if x in self.held]
        if not operands:
            if ROLES.get(node.target) and ROLES[node.target].family in _PRODUCTS:  # type: ignore[index]
                self.leave(node, "no operand is dequantized")
            return
        family = ROLES[node.target].family  # type: ignore[index]
        ends = self.ends(node)
        reason = self.requantized(node, ends) if ends else "what reads its result does not quantize it"
        if reason is None:
            return
        if node.target in _VIEWS or (node.target not in _SELECTED[:1] and family is VALUE):
            self.view(node, reason)
        elif family in (*_PRODUCTS, EMBEDDING):
            self.dequantized(node)
        else:
            self.leave(node, reason)

    def ends(self, node: Node) -> list[_End] | None:
        """The nodes that quantize the result of a node, if all that reads it leads there."""
        found: list[_End] = []

        def follow(at: Node, low: float | None, high: float | None, views: tuple[Node, ...]) -> bool:
            if not at.users:
                return False
            for user in at.users:
                e = encodings.quantizing(user)
                if e is not None and e.tensor is at and at not in (e.scale, e.zero_point):
                    if e.codes not in FORMATS or (views and any(b != -1 for b in e.block)):
                        return False
                    found.append(_End(user, e, low, high, views))
                elif user.target in _CHANGED and (bounds := _bounds(user)):
                    if not follow(user, *_composed(low, high, *bounds), views):
                        return False
                elif not (user.target in _VIEWS and user.args[0] is at and follow(user, low, high, (*views, user))):
                    return False
            return True

        bounds = _bounds(node) if node.target in _CHANGED else (None, None)
        return found if follow(node, None, None, ()) and bounds else None

    def requantized(self, node: Node, ends: Sequence[_End]) -> str | None:
        """Let an operator give codes. Returns why it cannot, None where it does."""
        places = {n: i for i, n in enumerate(self.graph.nodes)}
        made: dict[Any, Node] = {}
        for end in sorted(ends, key=lambda end: places[end.node]):
            key = (end.encoding.parameters(), end.low, end.high, end.views)
            if key not in made:
                try:
                    made[key] = self.codes_of(node, end)
                except _REFUSALS as error:
                    return str(error)
            end.node.replace_all_uses_with(made[key])
            self.graph.erase_node(end.node)
        self.rows.append(self.row(node, ", ".join(dict.fromkeys(_shown(end.encoding) for end in ends))))
        return None

    def codes_of(self, node: Node, end: _End) -> Node:
        e = end.encoding
        zero = None if self.is_zero(e.zero_point) else e.zero_point
        rule = replace(self.requantize, low=end.low, high=end.high)
        if rule.exact and not _gives_sum(node, self.held):
            rule = Reciprocal(end.low, end.high)
        output = Quantizer(FORMATS[e.codes], e.block, Given(affine=zero is not None, requantize=rule))
        given = [e.scale] if zero is None else [e.scale, zero]
        bounds = None if e.is_whole_range() else (e.low, e.high)
        views = [(v.target, list(v.args[1:]), dict(v.kwargs)) for v in end.views]
        args = self.arguments(node)
        held = args[0] if node.target in _VIEWS else None
        if isinstance(held, Held) and end[2:4] == (None, None) and self.is_alike(held, e):
            views = [(node.target, args[1:], dict(node.kwargs)), *views]
            return emit(end.node, _codes, held.codes, bounds, views)
        return emit(end.node, _requantized, node.target, output, args, node.kwargs, given, bounds, views)

    def is_alike(self, held: Held, e: Encoding) -> bool:
        """Whether codes mean the same numbers, all of them by one scale."""
        zero = [] if self.is_zero(e.zero_point) else [e.zero_point]
        whole = held.is_whole() and all(b == -1 for b in e.block)
        return whole and held.quantizer.format.dtype == e.codes and held.given == [e.scale, *zero]

    def dequantized(self, node: Node) -> None:
        """Let an operator give floats."""
        try:
            made = emit(node, _scaled, node.target, value(node).dtype, self.arguments(node), node.kwargs)
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.rows.append(self.row(node, str(value(node).dtype).removeprefix("torch.")))
        self.replace(node, made)

    def view(self, node: Node, reason: str) -> None:
        """A view, a maximum or a clamp of codes holds codes."""
        held = self.held.get(node.args[0]) if isinstance(node.args[0], Node) else None  # type: ignore[arg-type]
        if held is None or not (node.target in _VIEWS or held.is_whole()):
            self.leave(node, reason)
            return
        seen: list[Quantizer] = []
        try:
            codes, *given = emit(
                node, partial(_viewed, seen), node.target, held, list(node.args[1:]), dict(node.kwargs)
            )
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.held[node] = Held(seen[-1], codes, given, value(node).dtype)

    def arguments(self, node: Node) -> list[Any]:
        """The arguments of a node, with what is held for the nodes that hold codes. A bias stays a float."""
        role = ROLES[node.target].role  # type: ignore[index]
        return [
            x if role(i) == BIAS else tree_map(lambda x: self.held.get(x, x) if isinstance(x, Node) else x, x)
            for i, x in enumerate(node.args)
        ]

    def replace(self, node: Node, made: Node) -> None:
        old, new = value(node), value(made)
        assert old.dtype == new.dtype and len(old.shape) == len(new.shape), (node, old, new)
        node.replace_all_uses_with(made)

    # ---- products of casts, which are scaled afterwards

    def sums_of_casts(self, node: Node) -> bool:
        """mm(float(a), float(b)) · rows · columns, as torchao writes it, or with the integer product of a and b:
        the product of what a and the rows, b and the columns stand for."""
        op = aten.mm.default if node.target is aten._int_mm.default else node.target
        if op not in (aten.mm.default, aten.linear.default) or len(node.args) > 2:
            return False
        a, b = node.args[:2]
        codes = [x if node.target is aten._int_mm.default else self.cast.get(x) for x in (a, b)]  # type: ignore[arg-type]
        if codes[1] is None or (codes[0] is None and value(a).dtype not in (torch.float32, torch.bfloat16)):
            return False
        last, rows, columns = self.factors(node, codes[0] is not None)
        if not value(last).dtype.is_floating_point:
            return False
        lhs = a if codes[0] is None else _unit(codes[0], rows, (1, -1))
        rhs = _unit(codes[1], columns, (1, -1) if op is aten.linear.default else (-1, 1))
        try:
            made = emit(last, _scaled, op, value(last).dtype, [lhs, rhs], {})
        except _REFUSALS as error:
            self.leave(node, str(error))
            return True
        kinds = [_kind(x) for x in (lhs, rhs)]
        self.rows.append(Row(node.name, str(op), f"{' × '.join(kinds)} -> {_plain(value(last).dtype)}", True))
        self.replace(last, made)
        return True

    def factors(self, node: Node, has_rows: bool) -> tuple[Node, Any, Any]:
        """The last node that scales a product, and the scales of its rows and columns."""
        shape = value(node).shape
        last, rows, columns = node, None, None
        while len(last.users) == 1:
            (user,) = last.users
            if user.target is aten._to_copy.default and value(user).dtype == torch.float32:
                last = user
                continue
            if user.target is not aten.mul.Tensor or value(user).dtype != torch.float32:
                break
            other = user.args[1] if user.args[0] is last else user.args[0]
            if (
                not isinstance(other, Node)
                or other is last
                or value(other).dtype not in (torch.float32, torch.bfloat16)
            ):
                break
            size = value(other).shape
            if has_rows and rows is None and len(size) == len(shape) and _same(size, (*shape[:-1], 1)):
                rows = other
            elif columns is None and (_same(size, shape[-1:]) or _same(size, (1, shape[-1]))):
                columns = other
            else:
                break
            last = user
        return last, rows, columns

    # ---- what stays

    def choose(self, node: Node, choice: encodings.Choice) -> None:
        """Scales that are found when the program runs, by ATen."""
        made = emit(node, choice.function, *choice.arguments)
        for user in list(node.users):
            if user.target is operator.getitem:
                found, dtype = made[user.args[1]], value(user).dtype
                if not all(encodings.quantizing(n) or encodings.dequantizing(n) for n in user.users):
                    found = emit(node, torch.Tensor.to, found, dtype)
                user.replace_all_uses_with(found)
                self.graph.erase_node(user)

    def finish(self, node: Node) -> None:
        """What still dequantizes, by ours."""
        held = self.held.get(node)
        try:
            if held is not None:
                made = emit(node, _dequantized, held)
            elif found := encodings.dequantizing(node):
                made = emit(node, _by_hand, *found[:4], value(node).dtype)
            else:
                raise NotImplementedError(f"{node.target} is not known here")
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.replace(node, made)

    def quantized(self, node: Node, e: Encoding) -> None:
        """What quantizes floats, or codes by another scale."""
        held = self.held.get(e.tensor)
        try:
            if held is not None and self.is_alike(held, e):
                made = emit(node, _codes, held.codes, None if e.is_whole_range() else (e.low, e.high), [])
            else:
                made = self.codes_of_floats(node, e)
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.replace(node, made)

    def codes_of_floats(self, node: Node, e: Encoding) -> Node:
        bounds = (e.low, e.high)
        if own := encodings.arithmetic(node):
            return emit(node, own, *node.args)
        if e.codes not in FORMATS:
            return emit(node, _quantized_by_hand, *e[:4], bounds, e.codes)
        zero = None if self.is_zero(e.zero_point) else e.zero_point
        quantizer = Quantizer(FORMATS[e.codes], e.block, Given(affine=zero is not None, requantize=Reciprocal()))
        given = [e.scale] if zero is None else [e.scale, zero]
        return emit(node, _quantized, quantizer, e.tensor, given, None if e.is_whole_range() else bounds)

    def leave(self, node: Node, reason: str) -> None:
        self.rows.append(Row(node.name, str(node.target), reason.split("\n")[0], False))

    def row(self, node: Node, output: str) -> Row:
        roles = ROLES[node.target]  # type: ignore[index]
        tensors = [x for x in _operands(node) if value(x).dtype.is_floating_point]
        if roles.family in _PRODUCTS:
            tensors = [roles.find(role, node.args) for role in (LHS, RHS)]
        kinds = [_kind(self.held.get(x, x)) for x in tensors]
        return Row(node.name, str(node.target), f"{' × '.join(kinds)} -> {output}", True)


# ---- what runs where the graph is edited: functions of tensors


def _parameters(quantizer: Quantizer, codes: Tensor, given: Sequence[Any]) -> list[Tensor]:
    """Scales and zero points in the shapes and dtypes of their buffers."""
    described = list(quantizer.buffers(codes.shape).values())[1:]
    return [
        x.to(dtype).reshape(shape) if isinstance(x, Tensor) else torch.full(shape, x, dtype=dtype, device=codes.device)
        for x, (shape, dtype) in zip(given, described, strict=True)
    ]


def _real(x: Any) -> Any:
    if isinstance(x, Held):
        return x.tensor()
    return [_real(v) for v in x] if isinstance(x, list | tuple) else x


def _scaled(op: OpOverload, output: Any, args: list[Any], kwargs: dict[str, Any], **options: Any) -> Any:
    return scaled(op, output, *(_real(x) for x in args), **kwargs, **options)


def _requantized(
    op: OpOverload,
    output: Quantizer,
    args: list[Any],
    kwargs: dict[str, Any],
    given: list[Any],
    bounds: tuple[int, int] | None,
    views: list[Any],
) -> Tensor:
    real = [_real(x) for x in args]
    device = next(x.device for x in _flat(real) if isinstance(x, Tensor))
    dtypes = [torch.float32, output.format.dtype]
    scale, *zero = [
        x.to(t) if isinstance(x, Tensor) else torch.full((), x, dtype=t, device=device)
        for x, t in zip(given, dtypes, strict=False)
    ]
    options = {"output_scale": scale} | ({"output_zero_point": zero[0]} if zero else {})
    return _codes(scaled(op, output, *real, **kwargs, **options).codes, bounds, views)  # type: ignore[attr-defined]


def _codes(codes: Tensor, bounds: tuple[int, int] | None, views: list[Any]) -> Tensor:
    """Codes within bounds, seen as the views do."""
    codes = codes if bounds is None else codes.clamp(*bounds)
    for view, rest, options in views:
        op = aten.reshape.default if view is aten.view.default else view  # codes may lie otherwise than floats did
        codes = op(codes, *rest, **options)
    return codes


def _viewed(seen: list[Quantizer], op: OpOverload, held: Held, rest: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    tensor = held.tensor()
    if op in _VIEWS:
        op = aten.reshape.default if op is aten.view.default else op
        made = op(tensor, *rest, **kwargs)
    else:
        scale, *zero = _parameters(held.quantizer, held.codes, held.given)
        options = {"output_scale": scale} | ({"output_zero_point": zero[0]} if zero else {})
        made = scaled(op, held.quantizer, tensor, *rest, **kwargs, **options)
    if not isinstance(made, QuantizedTensor):
        raise TypeError(f"{op} of blocks of {held.quantizer.block} leaves no blocks")
    seen.append(made.quantizer)
    return list(made.buffers().values())


def _quantized(quantizer: Quantizer, x: Tensor, given: list[Any], bounds: tuple[int, int] | None) -> Tensor:
    scale, *zero = _parameters(quantizer, x, given)
    codes = quantize(quantizer, x, scale=scale, zero_point=zero[0] if zero else None).codes
    return codes if bounds is None else codes.clamp(*bounds)


def _dequantized(held: Held) -> Tensor:
    return dequantize(held.tensor())


def _by_hand(codes: Tensor, scale: Any, zero_point: Any, block: Block, dtype: torch.dtype) -> Tensor:
    """The numbers of codes that no format of ours has."""
    scale, zero = _beside(codes, block, scale), _beside(codes, block, 0 if zero_point is None else zero_point)
    return ((codes.to(torch.float32) - zero) * scale).to(dtype)


def _beside(x: Tensor, block: Block, given: Any) -> Any:
    """One number for each block, to be broadcast with x: blocks are single elements or whole dimensions."""
    if not isinstance(given, Tensor):
        return given
    sizes = blocks.counts(x.shape, block)
    if any(b not in (1, -1) for b in block):
        raise NotImplementedError(f"blocks of {block} of codes in {x.dtype}")
    return given.reshape(sizes)


def _quantized_by_hand(
    x: Tensor, scale: Any, zero_point: Any, block: Block, bounds: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    scale, zero = _beside(x, block, scale), _beside(x, block, 0 if zero_point is None else zero_point)
    return ((x.to(torch.float32) * (1.0 / scale)).round() + zero).clamp(*bounds).to(dtype)


# ---- small questions


def _unit(codes: Node, factor: Any, block: Block) -> Held:
    """Codes as the numbers that they are, times `factor`."""
    scale, block = (1.0, (-1,)) if factor is None else (factor, block)
    return Held(Quantizer(FORMATS[value(codes).dtype], block, Given()), codes, [scale], torch.float32)


def _operands(node: Node) -> list[Node]:
    """The tensors among the arguments, those of lists included."""
    return [x for x in _flat(node.args) if isinstance(x, Node) and isinstance(value(x), Tensor)]


def _flat(x: Any) -> list[Any]:
    return [v for y in x for v in _flat(y)] if isinstance(x, list | tuple) else [x]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(known_equal(m, n) for m, n in zip(a, b, strict=True))


def _bounds(node: Node) -> tuple[float | None, float | None] | None:
    """The range of a relu or a clamp, None if it is no number."""
    if node.target is aten.relu.default:
        return 0.0, None
    if node.target is aten.relu6.default:
        return 0.0, 6.0
    defaults = [-1.0, 1.0] if node.target is aten.hardtanh.default else [None, None]
    given = [*node.args[1:], *defaults[len(node.args) - 1 :]]
    names = ("min_val", "max_val") if node.target is aten.hardtanh.default else ("min", "max")
    low, high = (node.kwargs.get(name, x) for name, x in zip(names, given, strict=True))
    if any(x is not None and not isinstance(x, int | float) for x in (low, high)):
        return None
    if low is not None and high is not None and low > high:  # type: ignore[operator]
        return None
    return low, high  # type: ignore[return-value]


def _composed(
    low: float | None, high: float | None, then_low: float | None, then_high: float | None
) -> tuple[float | None, float | None]:
    """The range of a clamp after a clamp."""

    def clamped(x: float | None, missing: float | None) -> float | None:
        if x is None:
            return missing
        x = x if then_low is None else max(x, then_low)
        return x if then_high is None else min(x, then_high)

    return clamped(low, then_low), clamped(high, then_high)


def _gives_sum(node: Node, held: dict[Node, Held]) -> bool:
    """Whether an operator is a product of codes on both sides, of which a convention can take the sum."""
    roles = ROLES[node.target]  # type: ignore[index]
    return roles.family in _PRODUCTS and all(roles.find(role, node.args) in held for role in (LHS, RHS))


def _kind(x: Any) -> str:
    if isinstance(x, Held):
        return f"{x.quantizer.format.name}[{encodings.sizes_of(x.quantizer.block)}]"
    return _plain(value(x).dtype)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(e: Encoding) -> str:
    return f"{_plain(e.codes)}[{encodings.sizes_of(e.block)}]"
