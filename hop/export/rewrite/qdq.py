"""to_qdq: rewrite integer programs in quantize and dequantize nodes, the reverse of hop.export.to_integer.

    quantize -> scaled      becomes      quantize -> dequantize -> float operator -> quantize

The operators are torch's `quantized_decomposed`, in which backends such as XNNPACK recognize quantized layers. A call
of hop.scaled is rewritten if that form can express it; other calls, and nodes that only they read, are unchanged.
"""

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.compat.export import quantized_decomposed
from hop.dispatch.operand import Operand, decode
from hop.dispatch.operators import BIAS, CONVOLUTION, EMBEDDING, LHS, MATRIX, RHS, aten
from hop.export.rewrite import encodings
from hop.export.rewrite.editing import Editing
from hop.export.rewrite.encodings import RANGES, Encoding
from hop.export.rewrite.program import check_program, propagate, value, with_graph, without_unused
from hop.export.rewrite.report import Change, RewriteReport, Rewritten
from hop.impls.scaled import scaled_buffers
from hop.impls.scaled.calls import Call, is_integer, usage
from hop.impls.scaled.operands import centered, permuted, plain
from hop.numerics import copies
from hop.numerics.formats import INT4, INT8, Format
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import MinMax
from hop.tensor.buffers.operators import dequantize_buffers, quantize_buffers

_EXACT = 2**24  # float32 represents integers up to here exactly


def to_qdq(program: ExportedProgram, *, target: str | None = None) -> Rewritten:
    """Rewrite quantized layers as quantize -> dequantize -> float operator -> quantize, the reverse of
    hop.export.to_integer.

    Quantize and dequantize nodes are those of torch's `quantized_decomposed`. Rewritten are calls of hop.scaled for
    products with a weight (linear, mm, addmm, convolutions), additions, multiplications, means, poolings and views, of
    activations with one scale per tensor, that return codes or floats. A fused activation becomes relu, hardtanh or
    clamp. Weights become int8 with a scale per tensor or output channel, without a zero point; formats with fewer bits
    become int8 too. Rows with dynamic scales and zero points (MinMax) become `choose_qparams_per_token_asymmetric`
    before a matrix product, whose weight may then also be int4 in groups along the summed dimension. Scales and zero
    points that are constants of the program become Python numbers; others use the `.tensor` overloads.

    The form determines results only up to rounding: backends differ in how they requantize sums, and the scales of
    `choose_qparams_per_token_asymmetric` differ from MinMax's by roundings.

    Args:
        program: an exported program; it is not changed.
        target: "xnnpack" skips layers that ExecuTorch's XnnpackPartitioner does not accept in this form, so that they
            stay integer products: products of static activations that return floats, scales and biases that are not
            constants, uint8, and three-dimensional convolutions. The default, None, skips only what the form cannot
            express.

    Returns the program, and a report of what was rewritten and what was left, with reasons. Raises TypeError if
    `program` is not an ExportedProgram, and ValueError for an unknown target.
    """
    check_program(program, "to_qdq")
    if target not in (None, "xnnpack"):
        raise ValueError(f'to_qdq: target must be "xnnpack" or None, got {target!r}; take one of them')
    writer = _Writer(program.run_decompositions({}), target)
    writer.run()
    constants = writer.constants
    result = with_graph(writer.program, writer.graph, constants.signature, constants=constants.tensors)
    return Rewritten(without_unused(result), RewriteReport(tuple(writer.rows)))


class _NotRewritten(Exception):
    """The reason why a node is not rewritten."""


class _Weight(NamedTuple):
    dequantized: Node
    scale: Tensor  # float32, per tensor or per channel


class _Writer(Editing):
    def __init__(self, program: ExportedProgram, target: str | None) -> None:
        super().__init__(program, "qdq")
        self.target = target
        self.rows: list[Change] = []
        self.read: set[Node] = set()  # quantize nodes that rewritten nodes read
        self.tokens: dict[Node, list[Node]] = {}  # scale and zero point nodes of rows, by quantize node

    def run(self) -> None:
        for target, write in (
            (scaled_buffers, self.scaled),
            (quantize_buffers, self.quantized),
            (dequantize_buffers, self.dequantized),
        ):
            for node in self.graph.find_nodes(op="call_function", target=target):
                read, tokens = set(self.read), dict(self.tokens)
                try:
                    self.rows.append(Change(node.name, _name(node), write(node), True))
                except _NotRewritten as reason:
                    self.read, self.tokens = read, tokens
                    self.rows.append(Change(node.name, _name(node), str(reason), False))
        self.graph.eliminate_dead_code()
        propagate(self.graph)

    # ---- nodes

    def scaled(self, node: Node) -> str:
        op, output, scale, zero, *encoded = node.args
        output = Quantizer.parse(output) if isinstance(output, str) else output
        call = Call(op, output, scale, zero, decode(op, encoded), dict(node.kwargs))  # type: ignore[arg-type]
        codes = self.codes_of(output, scale, zero) if isinstance(output, Quantizer) else None
        result = self.operated(node, call)
        if codes is None:
            dtype = value(node).dtype
            result = result if dtype == torch.float32 else self.call(node, aten._to_copy.default, result, dtype=dtype)
            node.replace_all_uses_with(result)
            self.graph.erase_node(node)
            return str(dtype).removeprefix("torch.")
        result = self.bounded(node, result, output)  # type: ignore[arg-type]
        result = self.write(node, "quantize", self.unified(node, codes._replace(tensor=result)))
        self.replace(node, [result, scale, zero])
        return str(codes.codes).removeprefix("torch.")

    def operated(self, node: Node, call: Call) -> Node:
        """The float operator of a call, on its dequantized operands."""
        family = call.roles.family
        if family in (MATRIX, CONVOLUTION):
            return self.product(node, call)
        if family is EMBEDDING:
            raise _NotRewritten(f"{family.name} has no such form")
        args: list[object] = [
            [self.activation(node, v) for v in cast(list[Any], x)]
            if isinstance(x, list) and any(isinstance(v, Operand) for v in cast(list[Any], x))
            else self.activation(node, x)
            if isinstance(x, Operand)
            else x
            for x in call.args
        ]
        return self.call(node, call.op, *args, **call.kwargs)

    def product(self, node: Node, call: Call) -> Node:
        lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
        if call.kwargs:
            raise _NotRewritten(f"a product with {call.kwargs}")
        if not isinstance(lhs, Operand):
            raise _NotRewritten("its activations are not quantized")
        if not is_integer(rhs) or not self.known.keys() >= set(rhs.tensors):
            raise _NotRewritten("its second factor is not a constant integer weight of the program")
        if isinstance(bias, Node) and len(value(bias).shape) != 1:
            raise _NotRewritten("its bias is not a vector")
        by_rows = not _is_whole(lhs.quantizer)
        self.refuse_if(not by_rows and isinstance(call.output, torch.dtype), "it returns floats")
        self.refuse_if(isinstance(bias, Node) and bias not in self.known, "its bias is not a constant of the program")
        self.refuse_if(len(rhs.shape) > 4, "a three-dimensional convolution")
        if by_rows and call.roles.family is CONVOLUTION:
            raise _NotRewritten("a convolution of activations with more than one scale")
        encoding = self.row_encoding(lhs) if by_rows else self.encoding(lhs)
        weight = self.weight(node, call, rhs, by_rows)
        bias = self.bias(node, bias, encoding, weight)
        x = self.dequantize(node, encoding)
        if call.roles.family is MATRIX:
            given = () if bias is None else (bias,)
            return self.call(node, aten.linear.default, x, weight.dequantized, *given)
        (_, _, *rest) = call.args
        rest = [bias, *rest[1:]] if rest else []
        return self.call(node, call.op, x, weight.dequantized, *rest)

    def bounded(self, node: Node, x: Node, output: Quantizer) -> Node:
        """Apply the fused activation of the output to x."""
        rule = output.scale.requantization
        assert rule is not None
        low, high = rule.low, rule.high
        if low is None and high is None:
            return x
        if (low, high) == (0.0, None):
            return self.call(node, aten.relu.default, x)
        if low is not None and high is not None:
            return self.call(node, aten.hardtanh.default, x, low, high)
        return self.call(node, aten.clamp.default, x, low, high)

    def quantized(self, node: Node) -> str:
        if node not in self.read:
            raise _NotRewritten("no rewritten node reads it")
        q, x, scale, zero = _quantizing(node)
        x = self.float32(node, x)
        if node in self.tokens:
            scale, zero = self.tokens[node]
            codes = _row_encoding(x, scale, zero)
        else:
            codes = self.unified(node, self.codes_of(q, scale, zero)._replace(tensor=x))
        output = self.write(node, "quantize", codes)
        self.replace(node, [output, scale, zero])
        return str(codes.codes).removeprefix("torch.")

    def dequantized(self, node: Node) -> str:
        q, tensors, usages, shape, dtype = node.args
        operand = Operand(Quantizer.parse(q), tuple(tensors), tuple(usages), tuple(shape))  # type: ignore[arg-type]
        if encodings.quantizing(operand.tensors[0]) is None:  # type: ignore[arg-type]
            raise _NotRewritten("its codes do not come from a rewritten node")
        output = self.activation(node, operand)
        if dtype != torch.float32:
            output = self.call(node, aten._to_copy.default, output, dtype=dtype)
        node.replace_all_uses_with(output)
        self.graph.erase_node(node)
        return str(dtype).removeprefix("torch.")

    # ---- encodings

    def codes_of(self, q: Quantizer, scale: object, zero: object) -> Encoding:
        """The encoding of a result with one scale, whose tensor is not known yet."""
        if not (_is_plain(q) and _is_whole(q) and q.scale.is_static and not q.stochastic):
            raise _NotRewritten(f"codes of {q}: supported are 8-bit integers with one static scale")
        return self.tensor_encoding(None, q.format, scale, zero)

    def encoding(self, operand: Operand) -> Encoding:
        """The encoding of an operand with one scale."""
        q = operand.quantizer
        if not (_is_plain(q) and _is_whole(q) and operand.usages == (copies.ROWWISE,)):
            raise _NotRewritten(
                f"an activation of {q}: supported are 8-bit integers with one scale, and rows by MinMax"
            )
        node, scale, zero = (*operand.tensors, None)[:3]
        self.mark(node)
        return self.tensor_encoding(node, q.format, scale, zero)

    def tensor_encoding(self, codes: Any, format: Format, scale: Any, zero: object) -> Encoding:
        """The encoding of integers with one scale."""
        point = self.number(zero, format) if zero is not None else format.zero
        self.refuse_if(format.dtype != torch.int8, "codes of uint8")
        low, high = int(format.min), int(format.max)
        return Encoding(codes, self.number(scale), point, (-1,), format.dtype, low, high, None)

    def row_encoding(self, operand: Operand) -> Encoding:
        """The encoding of an operand with a dynamic scale per row."""
        q, node = operand.quantizer, operand.tensors[0]
        call = node.args[0] if node.target is operator.getitem else None  # type: ignore[attr-defined]
        plain = _is_plain(q) and q.format == INT8 and q.scale == MinMax() and operand.usages == (copies.ROWWISE,)
        if not plain or q.block != (1, -1) or q.stochastic:
            raise _NotRewritten(f"an activation of {q}: supported rows are int8 with block=(1, -1), scale=MinMax()")
        if not isinstance(call, Node) or call.target is not quantize_buffers:
            raise _NotRewritten("rows that no node of the program quantizes")
        _, x, scale, _ = _quantizing(call)
        if scale is not None:
            raise _NotRewritten("rows with static scales")
        if call not in self.tokens:
            x = self.float32(call, x)
            chosen = self.call(call, quantized_decomposed("choose_qparams_per_token_asymmetric"), x, torch.int8)
            self.tokens[call] = [self.call(call, operator.getitem, chosen, i) for i in range(2)]
        self.mark(node)
        return _row_encoding(node, *self.tokens[call])  # type: ignore[arg-type]

    def mark(self, codes: Any) -> None:
        """Record that a rewritten node reads the codes of a quantize node."""
        if codes.target is operator.getitem and codes.args[0].target is quantize_buffers:
            self.read.add(codes.args[0])

    def refuse_if(self, is_untaken: bool, what: str) -> None:
        if is_untaken and self.target is not None:
            raise _NotRewritten(f"XNNPACK does not support such a layer: {what}")

    def number(self, node: Any, format: Format | None = None) -> Any:
        """The value of a scale, or of a zero point of `format`, as a number if it is constant, else as the node."""
        known = self.known.get(self.source(node))
        if known is None:
            if format is not None and value(node).is_floating_point():
                raise _NotRewritten("a float zero point that is not a constant of the program")
            self.refuse_if(True, "a scale that is not a constant of the program")
            return node
        if format is not None:
            return int(known.reshape(()).round().clamp(format.min, format.max).item())
        number = float(known.to(torch.float32).reshape(()).item())
        if not torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max:
            raise _NotRewritten(f"a scale of {number}: backends need positive, normal ones")
        return number

    # ---- operands

    def activation(self, node: Node, operand: object) -> Any:
        return self.dequantize(node, self.encoding(operand)) if isinstance(operand, Operand) else operand

    def dequantize(self, node: Node, e: Encoding) -> Node:
        """A separate node for each reader, because backends take over a layer with all of its inputs."""
        return self.write(node, "dequantize", self.unified(node, e))

    def write(self, before: Node, verb: str, e: Encoding) -> Node:
        target, args = encodings.operator_call(verb, e)
        return self.call(before, target, *args)

    def unified(self, node: Node, e: Encoding) -> Encoding:
        """The encoding with its scale and zero point both as numbers or both as nodes."""
        if any(b != -1 for b in e.block) or not (isinstance(e.scale, Node) or isinstance(e.zero_point, Node)):
            return e
        nodes = []
        for x, dtype in ((e.scale, torch.float64), (e.zero_point, torch.int64)):
            x = x if isinstance(x, Node) else self.constant_node("parameter", torch.tensor([x], dtype=dtype))
            x = self.call(node, aten.reshape.default, x, [1])
            nodes.append(self.call(node, aten._to_copy.default, x, dtype=dtype))
        return e._replace(scale=nodes[0], zero_point=nodes[1])

    def weight(self, node: Node, call: Call, operand: Operand, by_rows: bool) -> _Weight:
        known = operand._replace(tensors=tuple(self.known[t] for t in operand.tensors))  # type: ignore[index]
        weight = plain(known, usage(call, RHS))
        if call.roles.family is MATRIX:
            if weight.dim() != 2:
                raise _NotRewritten("its weight is not a matrix")
            weight = permuted(weight, [1, 0]) if call.roles.rhs_sums == -2 else weight
        codes = centered(weight)
        low, high = RANGES[torch.int8]
        if codes.dtype != torch.int8 and not (low <= int(codes.min()) and int(codes.max()) <= high):
            raise _NotRewritten("codes of its weight, minus the zero point, do not fit int8")
        shape = list(codes.shape)
        block = tuple(-1 if b == n and n != 1 else b for b, n in zip(weight.block, shape, strict=True))
        groups = _groups_transposed(call)
        axis = 0 if groups is None else 1
        if groups not in (None, 1) and any(b != -1 for b in block):
            raise _NotRewritten("a transposed convolution in groups, whose weight has more than one scale")
        channel_block = tuple(1 if i == axis else -1 for i in range(len(shape)))
        is_group = by_rows and len(shape) == 2 and block[0] == 1 and block[1] > 1 and shape[1] % block[1] == 0
        if is_group and operand.quantizer.format == INT4:
            low, high = INT4.low, INT4.high
        elif not all(b == c or b == -1 for b, c in zip(block, channel_block, strict=True)):
            raise _NotRewritten(
                f"a weight with scales of blocks {weight.block}: supported are those per output channel"
            )
        elif all(b == -1 for b in block) and not by_rows:
            block = (-1,)
        else:
            block = channel_block
        step = weight.scale.to(torch.float32)
        if not bool(((step >= torch.finfo(torch.float32).tiny) & step.isfinite()).all()):
            raise _NotRewritten(
                "a scale of its weight is not a positive, normal number; hop.quantize_ gives positive ones to float "
                "weights of schemes with quantized activations"
            )
        constant = self.constant_node(f"{node.name}_codes", codes.to(torch.int8).contiguous())
        if block == (-1,):
            step = step.reshape(())
            number = float(step.item())
            e = Encoding(constant, number, 0, block, torch.int8, low, high, torch.float32)
            return _Weight(self.write(node, "dequantize", e), step)
        step = step if is_group else step.reshape(-1).expand(shape[axis]).contiguous()
        zeros = torch.zeros(step.shape, dtype=torch.int64)
        scales, zeros = (
            self.constant_node(f"{node.name}_{name}", x) for name, x in (("scales", step), ("zeros", zeros))
        )
        e = Encoding(constant, scales, zeros, block, torch.int8, low, high, torch.float32)
        return _Weight(self.write(node, "dequantize", e), step)

    def bias(self, node: Node, bias: Any, encoding: Encoding, weight: _Weight) -> Any:
        """The bias as real values, in float32."""
        if bias is None or value(bias).dtype == torch.float32:
            return bias
        known = self.known.get(bias)
        if value(bias).is_floating_point():
            if known is not None:
                return self.constant_node(f"{node.name}_bias", known.to(torch.float32))
            return self.call(node, aten._to_copy.default, bias, dtype=torch.float32)
        if known is None or isinstance(encoding.scale, Node):
            raise _NotRewritten("an integer bias that, or whose scale, is not a constant of the program")
        if bool((known.abs() > _EXACT).any()):
            raise _NotRewritten("an integer bias that float32 cannot represent")
        unit = weight.scale.to(torch.float64) * encoding.scale
        return self.constant_node(f"{node.name}_bias", (known.to(torch.float64) * unit).to(torch.float32))


def _row_encoding(x: Node, scale: object, zero: object) -> Encoding:
    """The encoding of rows with scales computed at run time."""
    low, high = RANGES[torch.int8]
    return Encoding(x, scale, zero, (1, -1), torch.int8, low, high, torch.float32)


def _groups_transposed(call: Call) -> int | None:
    """The number of groups of a transposed convolution; None for other operators."""
    if call.roles.transposed:
        return int(call.args[6]) if len(call.args) > 6 else 1
    return int(call.args[8]) if call.op is aten.convolution.default and call.args[6] else None


def _quantizing(node: Node) -> tuple[Quantizer, Node, Any, Any]:
    """The quantizer, the operand, the scale and the zero point of a quantize node."""
    q, x, scale, zero, noise, usages, *product = node.args
    if noise is not None or product or list(usages) != [copies.ROWWISE]:  # type: ignore[arg-type]
        raise _NotRewritten("it quantizes with noise, in two forms, or a product")
    return Quantizer.parse(q), x, scale, zero  # type: ignore[arg-type, return-value]


def _is_plain(q: Quantizer) -> bool:
    """Whether each code has a byte, in the position of its element."""
    return q.format.is_integer and q.format.bits == 8 and q.keeps_memory_format() and q.hadamard is None


def _is_whole(q: Quantizer) -> bool:
    return all(b == -1 for b in q.block)


def _name(node: Node) -> str:
    op = node.args[0]
    return str(op) if isinstance(op, OpOverload) else str(node.target)
