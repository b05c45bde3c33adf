"""to_integer: rewrite programs of quantized and dequantized floats as integer programs.

    quantize -> dequantize -> float operator -> quantize      becomes      quantize -> scaled

Matching is by meaning, not by node patterns: the result of a dequantize node is a float value that is *represented by*
codes, a scale and a zero point; so are its views, and casts of codes to floats, with a scale of 1. An operator with
such an argument becomes hop.scaled of the codes. If all readers of its result quantize it, optionally after views, relu
or clamp, it returns the codes directly. Everything else is unchanged, except that the remaining quantize and dequantize
nodes are replaced by ours.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from hop.compat.pytree import tree_map_only
from hop.compat.stock import stock_out_dtype
from hop.compat.tracing import is_erased
from hop.dispatch import operators as families
from hop.dispatch.hop import Hop
from hop.dispatch.operators import BIAS, LHS, RHS, aten, of
from hop.export.rewrite import encodings
from hop.export.rewrite.biases import integer_slopes, with_larger_scale
from hop.export.rewrite.code_floats import (
    Held,
    codes_within,
    dequantize_by_hand,
    kind_of,
    quantize_by_hand,
    run_dequantize,
    run_quantize,
    run_requantized,
    run_scaled,
    run_view,
    short,
    unit,
)
from hop.export.rewrite.consumers import Consumer, factors, quantizing_consumers
from hop.export.rewrite.conventions import Conventions
from hop.export.rewrite.encodings import FORMATS, Encoding
from hop.export.rewrite.folding import KnownValues, ProgramConstants
from hop.export.rewrite.limits import check_sizes, check_units
from hop.export.rewrite.padding import fill_code, padding_of, run_pad
from hop.export.rewrite.program import (
    check_program,
    copy_graph,
    emit,
    propagate,
    share_numbers,
    simplify,
    tensor_arguments,
    value,
    with_graph,
    without_unused,
)
from hop.export.rewrite.report import Change, RewriteReport, Rewritten
from hop.export.rewrite.sums import product_of
from hop.export.rewrite.target import Target
from hop.numerics.formats import INT8
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Convention, Requantization
from hop.numerics.scale_rules import Static

_PRODUCTS = (families.MATRIX, families.CONVOLUTION)
VALUES = (
    families.VIEW,
    families.BOUND,
    families.EXTREME,
    families.MAXIMUM,
    families.NEAREST,
)  # families whose results consist of elements of the operand, or bounds
_KNOWN_CODES = f"known are {', '.join(str(t).removeprefix('torch.') for t in FORMATS)}"

_REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)  # raised by operators for unsupported calls


def to_integer(
    program: ExportedProgram, *, requantize: Requantization | None = None, target: Target | None = None
) -> Rewritten:
    """Rewrite the quantized parts of a program in exact integers; see the module docstring and docs/export.md.

    Supported are programs from torch.export of models that PT2E converted, that torchao quantized, or that consist of
    our modules and operators. Tensor subclasses among parameters are replaced by their inner tensors.

    Args:
        program: an exported program; it is not changed.
        requantize: how integer sums are requantized (hop.requantization). Default: Reciprocal(), the arithmetic of a
            quantize node: float32, multiplied by the reciprocal of the scale. Other conventions are those of
            integer-only runtimes.
        target: the conventions of a runtime, operator by operator (hop.export.targets), instead of `requantize`.

    Returns the program, and a report of what was rewritten and what was left, with reasons.

    Raises:
        TypeError: `program` is not an ExportedProgram, `requantize` not a convention, or `target` not a Target.
        ValueError: nothing in the program is quantized in a known form; `requantize` and `target` are both given; or an
            integer-only target has no row for an operator that would otherwise stay in floats.
    """
    check_program(program, "to_integer")
    return rewritten(program, Conventions.of(requantize, target))


def rewritten(program: ExportedProgram, conventions: Conventions) -> Rewritten:
    """Rewrite a program as `to_integer` does."""
    plain = program.run_decompositions({})  # makes it functional, and replaces subclasses by their inner tensors
    graph = copy_graph(plain)
    rewriter = _Rewriter(plain, graph, conventions)
    rewriter.run()
    if not rewriter.has_recognised:
        raise ValueError(encodings.unrecognised(plain))
    constants = rewriter.constants
    program = with_graph(plain, graph, constants.signature, constants=constants.tensors)
    return Rewritten(without_unused(program), RewriteReport(tuple(rewriter.rows)))


class _Rewriter:
    def __init__(self, program: ExportedProgram, graph: Graph, conventions: Conventions) -> None:
        self.program, self.graph, self.conventions = program, graph, conventions
        self.constants, self.known = ProgramConstants(program), KnownValues(program)
        self.held: dict[Node, Held] = {}
        self.cast: dict[Node, Node] = {}  # from casts to float or int32, to their codes
        self.larger: dict[Node, list[Node]] = {}  # codes and scales of weights with a larger scale, for the bias
        self.slopes: dict[Node, Held] = {}  # by prelu with float slopes
        self.rows: list[Change] = []
        self.has_recognised = False  # whether any node indicates quantization

    def run(self) -> None:
        simplify(self.graph)
        for node in list(self.graph.nodes):
            if node.op == "call_function" and not is_erased(node):
                self.visit(node)
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if node.op == "call_function" and encodings.is_encoding(node):
                self.finish(node)
        self.graph.eliminate_dead_code()
        share_numbers(self.graph)
        propagate(self.graph)

    def visit(self, node: Node) -> None:
        if encodings.is_encoding(node) or isinstance(node.target, Hop):
            self.has_recognised = True
        if encoding := encodings.dequantizing(node):
            self.check_zero_point(node, encoding)
            self.hold(node, encoding)
        elif encoding := encodings.quantizing(node):
            self.check_zero_point(node, encoding)
            self.quantized(node, encoding)
        elif choice := encodings.choosing(node):
            self.choose(node, choice)
        elif node.target is aten._to_copy.default:
            self.convert(node)
        elif node.target in families.SCALED or node.target in (aten._int_mm.default, stock_out_dtype):
            self.operate(node)
        elif (padding := padding_of(node)) and padding[0] in self.held:
            self.pad(node, *padding)
        elif isinstance(value(node), Tensor) and any(x in self.held for x in tensor_arguments(node)):
            self.leave(node, _unknown(node))

    # ---- values represented by codes

    def check_zero_point(self, node: Node, e: Encoding) -> None:
        """Raise ValueError for a zero point outside the dtype of its codes, in which hop stores it."""
        zero = None if e.zero_point is None or e.codes not in FORMATS else self.known(e.zero_point)
        if zero is None:
            return
        low, high = encodings.RANGES[e.codes]
        beyond = zero[(zero < low) | (zero > high)]
        if beyond.numel():
            raise ValueError(
                f"to_integer: node {node.name!r} ({node.target}) has the zero point {beyond[0].item()}, but codes of "
                f"{short(e.codes)} are {low} to {high}; quantize with a zero point that is a code"
            )

    def hold(self, node: Node, e: Encoding) -> None:
        format = FORMATS.get(e.codes)
        if format is None or value(node).dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return
        given = self.given(e)
        if value(e.tensor).dtype is not e.codes or (format.bits > 8 and len(given) == 2):
            return
        quantizer = Quantizer(format, e.block, Static(affine=len(given) == 2))
        self.held[node] = Held(quantizer, e.tensor, given, value(node).dtype)

    def given(self, e: Encoding) -> list[Any]:
        """The scale, and the zero point if it differs from the format's own."""
        zero, own = 0 if e.zero_point is None else e.zero_point, FORMATS[e.codes].zero
        known = self.known(zero)
        return [e.scale] if known is not None and bool((known == own).all()) else [e.scale, zero]

    def convert(self, node: Node) -> None:
        """A cast of codes to floats or int32, or from one float dtype to another."""
        (x, *_), dtype = node.args, value(node).dtype
        if not isinstance(x, Node) or dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
            return
        if value(x).dtype in FORMATS:
            self.cast[node] = x
        elif x in self.held and dtype.is_floating_point:
            self.held[node] = self.held[x]._replace(dtype=dtype)

    # ---- operators

    def operate(self, node: Node) -> None:
        if self.sums_of_casts(node):
            return
        operands = [x for x in tensor_arguments(node) if x in self.held]
        family = of(node.target).family if node.target in families.SCALED else None
        if not operands:
            if family in _PRODUCTS:
                self.leave(node, "no operand is dequantized")
            return
        if missing := self.conventions.missing(node) if family else _unknown(node):
            self.leave(node, missing)
            return
        try:
            check_sizes(node, self.conventions.limits(node))
        except ValueError as error:
            self.leave(node, str(error))
            return
        if family is families.ATTENTION:
            self.leave(node, "its probabilities would be rounded to 8 bits, which the program does not do")
            return
        reason = (
            self.requantized(node, consumers)
            if (consumers := quantizing_consumers(node))
            else "its result is not quantized by all of its readers"
        )
        if reason is None:
            return
        if family in VALUES:
            self.view(node, reason)
        elif family in (*_PRODUCTS, families.EMBEDDING) and not self.conventions.integers_only:
            self.dequantized(node)
        else:
            self.leave(node, reason)

    def requantized(self, node: Node, consumers: Sequence[Consumer]) -> str | None:
        """Make an operator return codes. Returns the reason if it cannot, else None."""
        places = {n: i for i, n in enumerate(self.graph.nodes)}
        nodes: dict[Any, Node] = {}
        for end in sorted(consumers, key=lambda end: places[end.node]):
            key = (end.encoding.parameters(), end.low, end.high, end.views)
            if key not in nodes:
                try:
                    nodes[key] = self.codes_of(node, end)
                except _REFUSALS as error:
                    return str(error)
            end.node.replace_all_uses_with(nodes[key])
            self.graph.erase_node(end.node)
        self.rows.append(self.row(node, ", ".join(dict.fromkeys(end.encoding.shown() for end in consumers))))
        return None

    def codes_of(self, node: Node, end: Consumer) -> Node:
        e = end.encoding
        given = self.given(e)
        rule = replace(self.conventions.rule(node, self.held, e.codes), low=end.low, high=end.high)
        output = Quantizer(FORMATS[e.codes], e.block, Static(affine=len(given) == 2, requantize=rule))
        bounds = None if e.is_whole_range() else (e.low, e.high)
        views = [(v.target, list(v.args[1:]), dict(v.kwargs)) for v in end.views]
        args = self.with_integer_slopes(node, rule)
        check_units(node, args, rule, self.conventions.limits(node), e, self.known)
        if rule.exact and of(node.target).family in _PRODUCTS:
            args = self.with_integer_bias(node, self.with_representable_bias(node, args, e))
        operand = args[0] if of(node.target).family is families.VIEW else None
        if isinstance(operand, Held) and end[2:4] == (None, None) and self.is_alike(operand, e):
            views = [(node.target, args[1:], dict(node.kwargs)), *views]
            return emit(end.node, codes_within, operand.codes, bounds, views)
        return emit(end.node, run_requantized, node.target, output, args, node.kwargs, given, bounds, views)

    def with_integer_slopes(self, node: Node, rule: Convention) -> list[Any]:
        """The arguments of a node, with the float slopes of a prelu as int8 codes if its kernel needs integers."""
        args = self.arguments(node)
        if of(node.target).family is not families.PRELU or not isinstance(rule, IntegerFunction):
            return args
        if isinstance(args[1], Held) or (slopes := self.known(args[1])) is None:
            return args
        if node not in self.slopes:
            codes, scale = integer_slopes(slopes)
            fake = value(node).fake_mode.from_tensor(codes, static_shapes=True)
            held = self.constants.hold(self.graph, f"slopes_{node.name}", codes, fake)
            self.slopes[node] = Held(Quantizer(INT8, (-1,), Static()), held, [scale], torch.float32)
        return [args[0], self.slopes[node], *args[2:]]

    def with_representable_bias(self, node: Node, args: list[Any], e: Encoding) -> list[Any]:
        """The arguments of a product whose integer sum includes its bias, with a larger weight scale if needed.

        Raises ValueError if no weight scale is large enough.
        """
        lhs, rhs = (of(node.target).find(role, tuple(args)) for role in (LHS, RHS))
        if not isinstance(lhs, Held) or not isinstance(rhs, Held):
            return args
        larger = with_larger_scale(node, lhs, rhs, e.scale, self.known)
        if larger is None:
            return args
        if node not in self.larger:
            mode, names = value(node).fake_mode, ("codes", "scales")
            self.larger[node] = [
                self.constants.hold(
                    self.graph, f"larger_{node.name}_{name}", x, mode.from_tensor(x, static_shapes=True)
                )
                for name, x in zip(names, larger, strict=True)
            ]
        codes, scales = self.larger[node]
        return [rhs._replace(codes=codes, given=[scales, *rhs.given[1:]]) if x is rhs else x for x in args]

    def with_integer_bias(self, node: Node, args: list[Any]) -> list[Any]:
        """The arguments of a product, with the codes of an int32 bias that has the scale of its sums."""
        roles = of(node.target)
        bias = roles.find(BIAS, node.args)
        e = encodings.dequantizing(bias) if isinstance(bias, Node) else None
        lhs, rhs = (roles.find(role, tuple(args)) for role in (LHS, RHS))
        if e is None or e.codes != torch.int32 or not isinstance(lhs, Held) or not isinstance(rhs, Held):
            return args
        own, zero, *units = (self.known(x) for x in (e.scale, e.zero_point or 0, lhs.given[0], rhs.given[0]))
        if own is None or zero is None or bool(zero.any()) or any(x is None or x.numel() > own.numel() for x in units):
            return args
        a, b = (x.reshape(-1).to(torch.float32) for x in units)  # type: ignore[union-attr]
        if not torch.equal((a * b).expand(own.numel()), own.reshape(-1).to(torch.float32)):
            return args
        return [e.tensor if x is bias else x for x in args]

    def is_alike(self, operand: Held, e: Encoding) -> bool:
        """Whether two encodings have the same scale and zero point for the whole tensor."""
        whole = operand.is_whole() and all(b == -1 for b in e.block)
        return whole and operand.quantizer.format.dtype == e.codes and operand.given == self.given(e)

    def dequantized(self, node: Node) -> None:
        """Make an operator return floats."""
        try:
            output = emit(node, run_scaled, node.target, value(node).dtype, self.arguments(node), node.kwargs)
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.rows.append(self.row(node, str(value(node).dtype).removeprefix("torch.")))
        self.replace(node, output)

    def view(self, node: Node, reason: str) -> None:
        """A view, maximum or clamp whose result is represented by codes."""
        operand = self.held.get(node.args[0]) if isinstance(node.args[0], Node) else None  # type: ignore[arg-type]
        if operand is None or not (of(node.target).family is families.VIEW or operand.is_whole()):
            self.leave(node, reason)
            return
        seen: list[Quantizer] = []
        try:
            codes, *given = emit(
                node, partial(run_view, seen), node.target, operand, list(node.args[1:]), dict(node.kwargs)
            )
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.held[node] = Held(seen[-1], codes, given, value(node).dtype)

    def pad(self, node: Node, x: Node, sides: list[int], number: float) -> None:
        operand = self.held[x]
        try:
            codes = emit(node, run_pad, operand.codes, sides, fill_code(self.program, operand, node, number))
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.held[node] = operand._replace(codes=codes)

    def arguments(self, node: Node) -> list[Any]:
        """The arguments of a node, with the codes' representation where there is one. A bias stays a float."""
        role = of(node.target).role
        return [x if role(i) == BIAS else tree_map_only(Node, self._held, x) for i, x in enumerate(node.args)]

    def _held(self, node: Node) -> Any:
        return self.held.get(node, node)

    def replace(self, node: Node, replacement: Node) -> None:
        old, new = value(node), value(replacement)
        assert old.dtype == new.dtype and len(old.shape) == len(new.shape), (node, old, new)
        node.replace_all_uses_with(replacement)

    # ---- products of casts that are scaled afterwards

    def sums_of_casts(self, node: Node) -> bool:
        """Rewrite a product of codes that is then scaled by rows and columns (hop.export.rewrite.sums) as a product of
        scaled codes.

        Returns whether the node is such a product.
        """
        product = product_of(node, self.cast)
        if product is None:
            return False
        self.has_recognised = True
        last, rows, columns = factors(product.sums, product.has_codes)
        if not value(last).dtype.is_floating_point:
            self.leave(node, f"its sums are not cast to float32: they stay {short(value(last).dtype)}")
            return True
        lhs = unit(product.lhs, rows, (1, -1)) if product.has_codes else product.lhs
        rhs = unit(product.rhs, columns, (1, -1) if product.op is aten.linear.default else (-1, 1))
        try:
            output = emit(last, run_scaled, product.op, value(last).dtype, [lhs, rhs], {})
        except _REFUSALS as error:
            self.leave(node, str(error))
            return True
        kinds = [kind_of(x) for x in (lhs, rhs)]
        self.rows.append(Change(node.name, str(product.op), f"{' × '.join(kinds)} -> {short(value(last).dtype)}", True))
        self.replace(last, output)
        return True

    # ---- nodes that stay

    def choose(self, node: Node, choice: encodings.Choice) -> None:
        """Replace a node that computes scales at run time by ATen."""
        chosen = emit(node, choice.function, *choice.arguments)
        for user in list(node.users):
            if user.target is operator.getitem:
                replacement, dtype = chosen[user.args[1]], value(user).dtype
                if not all(encodings.quantizing(n) or encodings.dequantizing(n) for n in user.users):
                    replacement = emit(node, torch.Tensor.to, replacement, dtype)
                user.replace_all_uses_with(replacement)
                self.graph.erase_node(user)

    def finish(self, node: Node) -> None:
        """Replace a remaining dequantize node by ours."""
        operand = self.held.get(node)
        floats_read = [user for user in node.users if not isinstance(user.target, Hop)]  # a bias may be int32
        if (
            operand is None
            and floats_read
            and (encoding := encodings.dequantizing(node))
            and encoding.codes not in FORMATS
        ):
            self.leave(node, f"codes of {short(encoding.codes)}: their readers stay in floats ({_KNOWN_CODES})")
        try:
            if operand is not None:
                floats = emit(node, run_dequantize, operand)
            elif encoding := encodings.dequantizing(node):
                floats = emit(node, dequantize_by_hand, *encoding[:4], value(node).dtype)
            else:
                raise NotImplementedError(f"{node.target} is not supported")
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.replace(node, floats)

    def quantized(self, node: Node, e: Encoding) -> None:
        """Replace a node that quantizes floats, or converts codes to another scale."""
        operand = self.held.get(e.tensor)
        try:
            if operand is not None and self.is_alike(operand, e):
                codes = emit(node, codes_within, operand.codes, None if e.is_whole_range() else (e.low, e.high), [])
            elif operand is not None and self.conventions.target:
                codes = self.rescaled(node, operand, e)
            else:
                codes = self.codes_of_floats(node, e)
        except _REFUSALS as error:
            self.leave(node, str(error))
            return
        self.replace(node, codes)

    def rescaled(self, node: Node, operand: Held, e: Encoding) -> Node:
        rule, given = self.conventions.rescaling_rule(e.codes), self.given(e)
        output = Quantizer(FORMATS[e.codes], e.block, Static(affine=len(given) == 2, requantize=rule))
        bounds = None if e.is_whole_range() else (e.low, e.high)
        return emit(node, run_requantized, aten.clone.default, output, [operand], {}, given, bounds, [])

    def codes_of_floats(self, node: Node, e: Encoding) -> Node:
        bounds = (e.low, e.high)
        if arithmetic := encodings.arithmetic(node):
            return emit(node, arithmetic, *node.args)
        if e.codes not in FORMATS:
            return emit(node, quantize_by_hand, *e[:4], bounds, e.codes)
        given = self.given(e)
        quantizer = Quantizer(
            FORMATS[e.codes], e.block, Static(affine=len(given) == 2, requantize=self.conventions.floats)
        )
        return emit(node, run_quantize, quantizer, e.tensor, given, None if e.is_whole_range() else bounds)

    def leave(self, node: Node, reason: str) -> None:
        self.conventions.check_left(node, reason)
        self.rows.append(Change(node.name, str(node.target), reason.split("\n")[0], False))

    def row(self, node: Node, output: str) -> Change:
        roles = of(node.target)
        tensors = [x for x in tensor_arguments(node) if value(x).dtype.is_floating_point]
        if roles.family in _PRODUCTS:
            tensors = [roles.find(role, node.args) for role in (LHS, RHS)]
        kinds = [kind_of(self.held.get(x, x)) for x in tensors]
        more = ", its weight with a larger scale, for the bias" if node in self.larger else ""
        more += ", its slopes as int8" if node in self.slopes else ""
        return Change(node.name, str(node.target), f"{' × '.join(kinds)} -> {output}{more}", True)


def _unknown(node: Node) -> str:
    return f"hop.scaled does not support {node.target}: it still runs on dequantized floats"
