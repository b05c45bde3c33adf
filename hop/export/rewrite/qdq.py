"""Programs of exact integers as programs of quantized and dequantized floats: the reverse of hop.export.to_integer.

    quantize -> scaled      becomes      quantize -> dequantize -> float operator -> quantize

in operators of torch's `quantized_decomposed`, the form in which backends such as XNNPACK look for quantized layers.
A node of hop.scaled is written if that form says what it computes; others, and what only they read, stay.
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
from hop.export.rewrite.program import check_program, propagate, rebuilt, value, without_unused
from hop.export.rewrite.report import Change, Report, Rewritten
from hop.impls.scaled import scaled_buffers
from hop.impls.scaled.calls import Call, is_integer, usage
from hop.impls.scaled.operands import centered, permuted, plain
from hop.numerics import copies
from hop.numerics.formats import INT4, INT8, Format
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import MinMax
from hop.tensor.buffers.operators import dequantize_buffers, quantize_buffers

_EXACT = 2**24  # integers up to here are float32 numbers


def to_qdq(program: ExportedProgram, *, target: str | None = None) -> Rewritten:
    """The program with quantized layers in the form quantize -> dequantize -> float operator -> quantize, by operators
    of torch's `quantized_decomposed`. hop.export.to_integer is the reverse.

    Written are products with a weight (linear, mm, addmm, convolutions), additions, multiplications, means, poolings
    and views of hop.scaled, of activations with one scale for the tensor, with codes or floats as the result; the range
    of a fused activation becomes relu, hardtanh or clamp. Weights are int8 with a scale for the tensor or for each
    output channel, without a zero point; formats of fewer bits become int8. Rows that hop.quantize finds the scales of,
    with zero points (MinMax), become `choose_qparams_per_token_asymmetric` in front of a matrix product, whose weight
    may also be int4 in groups along the summed dimension. Scales and zero points that the program holds become Python
    numbers; others are given by the `.tensor` overloads.

    The form says what is computed but for roundings: backends differ in how they go from sums to codes, and
    `choose_qparams_per_token_asymmetric` finds other scales than MinMax by roundings.

    Args:
        target: "xnnpack" leaves what ExecuTorch's XnnpackPartitioner does not take over in this form, so that it stays
            a product of integers: products of static activations that give floats, scales and biases that the program
            does not hold, uint8, convolutions of three dimensions. The default, None, leaves only what the form
            cannot say.

    Returns the program and a report of what was written and what was left, with the reasons. Raises TypeError for what
    is no ExportedProgram, ValueError for an unknown target.
    """
    check_program(program, "to_qdq")
    if target not in (None, "xnnpack"):
        raise ValueError(f'to_qdq: target must be "xnnpack" or None, got {target!r}; take one of them')
    writer = _Writer(program.run_decompositions({}), target)
    writer.run()
    constants = writer.constants
    result = rebuilt(writer.program, writer.graph, constants.signature, constants=constants.tensors)
    return Rewritten(without_unused(result), Report(tuple(writer.rows)))


class _Left(Exception):
    """Why a node stays as it is."""


class _Weight(NamedTuple):
    dequantized: Node
    scale: Tensor  # its scales, float32: of the tensor, or of each channel


class _Writer(Editing):
    def __init__(self, program: ExportedProgram, target: str | None) -> None:
        super().__init__(program, "qdq")
        self.target = target
        self.rows: list[Change] = []
        self.read: set[Node] = set()  # nodes that quantize for what was written
        self.tokens: dict[Node, list[Node]] = {}  # the scales and zero points of rows, of nodes that quantize

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
                except _Left as reason:
                    self.read, self.tokens = read, tokens
                    self.rows.append(Change(node.name, _name(node), str(reason), False))
        self.graph.eliminate_dead_code()
        propagate(self.graph)

    # ---- what is written

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
        result = self.write(node, "quantize", self.beside(node, codes._replace(tensor=result)))
        self.replace(node, [result, scale, zero])
        return str(codes.codes).removeprefix("torch.")

    def operated(self, node: Node, call: Call) -> Node:
        """The float operator of a call, on what its operands stand for."""
        family = call.roles.family
        if family in (MATRIX, CONVOLUTION):
            return self.product(node, call)
        if family is EMBEDDING:
            raise _Left(f"{family.name} has no such form")
        args: list[Any] = [
            [self.activation(node, v) for v in cast(list[Any], x)]
            if isinstance(x, list) and _has_operands(cast(list[Any], x))
            else self.activation(node, x)
            if isinstance(x, Operand)
            else x
            for x in call.args
        ]
        return self.call(node, call.op, *args, **call.kwargs)

    def product(self, node: Node, call: Call) -> Node:
        lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
        if call.kwargs:
            raise _Left(f"a product with {call.kwargs}")
        if not isinstance(lhs, Operand):
            raise _Left("its activations are not quantized")
        if not is_integer(rhs) or not all(t in self.known for t in rhs.tensors):
            raise _Left("its second factor is no weight of integers that the program holds")
        if isinstance(bias, Node) and len(value(bias).shape) != 1:
            raise _Left("its bias is no vector")
        by_rows = not _is_whole(lhs.quantizer)
        self.refuse_if(not by_rows and isinstance(call.output, torch.dtype), "it gives floats")
        self.refuse_if(isinstance(bias, Node) and bias not in self.known, "the program does not hold its bias")
        self.refuse_if(len(rhs.shape) > 4, "a convolution of three dimensions")
        if by_rows and call.roles.family is CONVOLUTION:
            raise _Left("a convolution of activations with more than one scale")
        encoding = self.rows_of(lhs) if by_rows else self.encoding(lhs)
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
        """What the fused activation of the output makes of x."""
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
            raise _Left("nothing that was written reads it")
        q, x, scale, zero = _quantizing(node)
        x = self.float32(node, x)
        if node in self.tokens:
            scale, zero = self.tokens[node]
            codes = _of_rows(x, scale, zero)
        else:
            codes = self.beside(node, self.codes_of(q, scale, zero)._replace(tensor=x))
        output = self.write(node, "quantize", codes)
        self.replace(node, [output, scale, zero])
        return str(codes.codes).removeprefix("torch.")

    def dequantized(self, node: Node) -> str:
        q, tensors, usages, shape, dtype = node.args
        operand = Operand(Quantizer.parse(q), tuple(tensors), tuple(usages), tuple(shape))  # type: ignore[arg-type]
        if encodings.quantizing(operand.tensors[0]) is None:  # type: ignore[arg-type]
            raise _Left("nothing that was written makes its codes")
        output = self.activation(node, operand)
        if dtype != torch.float32:
            output = self.call(node, aten._to_copy.default, output, dtype=dtype)
        node.replace_all_uses_with(output)
        self.graph.erase_node(node)
        return str(dtype).removeprefix("torch.")

    # ---- encodings

    def codes_of(self, q: Quantizer, scale: Any, zero: Any) -> Encoding:
        """How the codes of a tensor with one scale stand for numbers; of no tensor yet."""
        if not (_is_plain(q) and _is_whole(q) and q.scale.is_static and not q.stochastic):
            raise _Left(f"codes of {q}: written are integers of 8 bits with one scale that the caller gives")
        return self.of_tensor(None, q.format, scale, zero)

    def encoding(self, operand: Operand) -> Encoding:
        """How an operand with one scale stands for numbers."""
        q = operand.quantizer
        if not (_is_plain(q) and _is_whole(q) and operand.usages == (copies.ROWWISE,)):
            raise _Left(f"an activation of {q}: written are integers of 8 bits with one scale, and rows by MinMax")
        node, scale, zero = (*operand.tensors, None)[:3]
        self.mark(node)
        return self.of_tensor(node, q.format, scale, zero)

    def of_tensor(self, codes: Any, format: Format, scale: Any, zero: Any) -> Encoding:
        """The encoding of integers with one scale."""
        point = self.number(zero, format) if zero is not None else format.zero
        self.refuse_if(format.dtype != torch.int8, "codes of uint8")
        low, high = int(format.min), int(format.max)
        return Encoding(codes, self.number(scale), point, (-1,), format.dtype, low, high, None)

    def rows_of(self, operand: Operand) -> Encoding:
        """How an operand with a scale for each row, which its quantizer finds, stands for numbers."""
        q, node = operand.quantizer, operand.tensors[0]
        of = node.args[0] if node.target is operator.getitem else None  # type: ignore[attr-defined]
        plain = _is_plain(q) and q.format == INT8 and q.scale == MinMax() and operand.usages == (copies.ROWWISE,)
        if not plain or q.block != (1, -1) or q.stochastic:
            raise _Left(f"an activation of {q}: rows are written of int8 with block=(1, -1), scale=MinMax()")
        if not isinstance(of, Node) or of.target is not quantize_buffers:
            raise _Left("rows that no node of the program quantizes")
        _, x, scale, _ = _quantizing(of)
        if scale is not None:
            raise _Left("rows with given scales")
        if of not in self.tokens:
            x = self.float32(of, x)
            chosen = self.call(of, quantized_decomposed("choose_qparams_per_token_asymmetric"), x, torch.int8)
            self.tokens[of] = [self.call(of, operator.getitem, chosen, i) for i in range(2)]
        self.mark(node)
        return _of_rows(node, *self.tokens[of])  # type: ignore[arg-type]

    def mark(self, codes: Any) -> None:
        """Codes are read by what is written: so is what quantizes them."""
        if codes.target is operator.getitem and codes.args[0].target is quantize_buffers:
            self.read.add(codes.args[0])

    def refuse_if(self, is_untaken: bool, what: str) -> None:
        if is_untaken and self.target is not None:
            raise _Left(f"XNNPACK takes no such layer: {what}")

    def number(self, node: Any, format: Format | None = None) -> Any:
        """The scale, or the zero point of a format, that a node is: a number if it is known, else the node."""
        known = self.known.get(self.source(node))
        if known is None:
            if format is not None and value(node).is_floating_point():
                raise _Left("a zero point of floats that the program does not hold")
            self.refuse_if(True, "a scale that the program does not hold")
            return node
        if format is not None:
            return int(known.reshape(()).round().clamp(format.min, format.max).item())
        number = float(known.to(torch.float32).reshape(()).item())
        if not torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max:
            raise _Left(f"a scale of {number}: backends take positive, normal ones")
        return number

    # ---- operands

    def activation(self, node: Node, operand: Any) -> Any:
        return self.dequantize(node, self.encoding(operand)) if isinstance(operand, Operand) else operand

    def dequantize(self, node: Node, e: Encoding) -> Node:
        """A node for each reader: backends take over a layer with all that it reads."""
        return self.write(node, "dequantize", self.beside(node, e))

    def write(self, before: Node, verb: str, e: Encoding) -> Node:
        target, args = encodings.written(verb, e)
        return self.call(before, target, *args)

    def beside(self, node: Node, e: Encoding) -> Encoding:
        """With both the scale and the zero point of a tensor as numbers, or both as nodes."""
        if not _is_whole_block(e) or not (isinstance(e.scale, Node) or isinstance(e.zero_point, Node)):
            return e
        nodes = []
        for x, dtype in ((e.scale, torch.float64), (e.zero_point, torch.int64)):
            x = x if isinstance(x, Node) else self.held("parameter", torch.tensor([x], dtype=dtype))
            x = self.call(node, aten.reshape.default, x, [1])
            nodes.append(self.call(node, aten._to_copy.default, x, dtype=dtype))
        return e._replace(scale=nodes[0], zero_point=nodes[1])

    def weight(self, node: Node, call: Call, operand: Operand, by_rows: bool) -> _Weight:
        known = operand._replace(tensors=tuple(self.known[t] for t in operand.tensors))  # type: ignore[index]
        weight = plain(known, usage(call, RHS))
        if call.roles.family is MATRIX:
            if weight.dim() != 2:
                raise _Left("its weight is no matrix")
            weight = permuted(weight, [1, 0]) if call.roles.rhs_sums == -2 else weight
        codes = centered(weight)
        low, high = RANGES[torch.int8]
        if codes.dtype != torch.int8 and not (low <= int(codes.min()) and int(codes.max()) <= high):
            raise _Left("codes of its weight, less the zero point, are beyond int8")
        shape = list(codes.shape)
        block = tuple(-1 if b == n and n != 1 else b for b, n in zip(weight.block, shape, strict=True))
        groups = _groups_transposed(call)
        axis = 0 if groups is None else 1
        if groups not in (None, 1) and any(b != -1 for b in block):
            raise _Left("a transposed convolution in groups, whose weight has more than one scale")
        of_channel = tuple(1 if i == axis else -1 for i in range(len(shape)))
        is_group = by_rows and len(shape) == 2 and block[0] == 1 and block[1] > 1 and shape[1] % block[1] == 0
        if is_group and operand.quantizer.format == INT4:
            low, high = INT4.low, INT4.high
        elif not all(b == c or b == -1 for b, c in zip(block, of_channel, strict=True)):
            raise _Left(f"a weight with scales of blocks {weight.block}: written are those of output channels")
        elif all(b == -1 for b in block) and not by_rows:
            block = (-1,)
        else:
            block = of_channel
        step = weight.scale.to(torch.float32)
        if not bool(((step >= torch.finfo(torch.float32).tiny) & step.isfinite()).all()):
            raise _Left("a scale of its weight is 0, or not normal")
        constant = self.held(f"{node.name}_codes", codes.to(torch.int8).contiguous())
        if block == (-1,):
            step = step.reshape(())
            number = float(step.item())
            e = Encoding(constant, number, 0, block, torch.int8, low, high, torch.float32)
            return _Weight(self.write(node, "dequantize", e), step)
        step = step if is_group else step.reshape(-1).expand(shape[axis]).contiguous()
        zeros = torch.zeros(step.shape, dtype=torch.int64)
        scales, zeros = (self.held(f"{node.name}_{name}", x) for name, x in (("scales", step), ("zeros", zeros)))
        e = Encoding(constant, scales, zeros, block, torch.int8, low, high, torch.float32)
        return _Weight(self.write(node, "dequantize", e), step)

    def bias(self, node: Node, bias: Any, encoding: Encoding, weight: _Weight) -> Any:
        """A bias in real numbers, float32."""
        if bias is None or value(bias).dtype == torch.float32:
            return bias
        known = self.known.get(bias)
        if value(bias).is_floating_point():
            if known is not None:
                return self.held(f"{node.name}_bias", known.to(torch.float32))
            return self.call(node, aten._to_copy.default, bias, dtype=torch.float32)
        if known is None or isinstance(encoding.scale, Node):
            raise _Left("a bias of integers, which, or the scale of which, the program does not hold")
        if bool((known.abs() > _EXACT).any()):
            raise _Left("a bias of integers beyond those of float32")
        unit = weight.scale.to(torch.float64) * encoding.scale
        return self.held(f"{node.name}_bias", (known.to(torch.float64) * unit).to(torch.float32))


def _of_rows(x: Node, scale: Any, zero: Any) -> Encoding:
    """The encoding of rows whose scales are found while running."""
    low, high = RANGES[torch.int8]
    return Encoding(x, scale, zero, (1, -1), torch.int8, low, high, torch.float32)


def _groups_transposed(call: Call) -> int | None:
    """The groups of a transposed convolution, None of other operators."""
    if call.roles.transposed:
        return int(call.args[6]) if len(call.args) > 6 else 1
    return int(call.args[8]) if call.op is aten.convolution.default and call.args[6] else None


def _quantizing(node: Node) -> tuple[Quantizer, Node, Any, Any]:
    """The quantizer of a node, what it quantizes, the scale and the zero point."""
    q, x, scale, zero, noise, usages, *product = node.args
    if noise is not None or product or list(usages) != [copies.ROWWISE]:  # type: ignore[arg-type]
        raise _Left("it quantizes with noise, in two forms, or a product")
    return Quantizer.parse(q), x, scale, zero  # type: ignore[arg-type, return-value]


def _is_plain(q: Quantizer) -> bool:
    """Whether a code has a byte of its own, in the place of its element."""
    return q.format.is_integer and q.format.bits == 8 and q.keeps_memory_format() and q.hadamard is None


def _is_whole(q: Quantizer) -> bool:
    return all(b == -1 for b in q.block)


def _is_whole_block(e: Encoding) -> bool:
    return all(b == -1 for b in e.block)


def _has_operands(x: list[Any]) -> bool:
    return any(isinstance(v, Operand) for v in x)


def _name(node: Node) -> str:
    op = node.args[0]
    return str(op) if isinstance(op, OpOverload) else str(node.target)
