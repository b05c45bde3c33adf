"""Build the rows of a report from measurements."""

import math
import operator

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.dispatch.operand import Operand, decode
from hop.dispatch.operators import CONVOLUTION, EMBEDDING, LHS, MATRIX, RHS, aten, of, within
from hop.export.analysis.exactness import inexact
from hop.export.analysis.metrics import operator_name
from hop.export.rewrite.program import value
from hop.impls.out_dtype import out_dtype_operator as out_dtype_operator
from hop.impls.pack import pack_operator
from hop.impls.quantize import fake_quantize_operator, quantize_operator
from hop.impls.quantized import quantized_operator
from hop.impls.quantized.calls import Scales
from hop.impls.scaled import scaled_buffers, scaled_operator
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.report.measuring import Meter, Pair
from hop.report.nodes import inner_operator, module_of, path_of
from hop.report.rows import INPUT, MOVE, OTHER, PRODUCT, QUANTIZE, Error, Row, Source
from hop.report.spread import Spread
from hop.report.values import Type, float_values, type_from_quantizer
from hop.tensor.buffers.operators import buffers_operator, dequantize_buffers, dequantize_operator, quantize_buffers

_ATTENTION = aten.scaled_dot_product_attention.default  # its first two arguments are the factors
_PRODUCTS = within(MATRIX, CONVOLUTION, EMBEDDING) | {_ATTENTION}
_MOVES = {aten.dropout.default, aten._to_copy.default}  # in addition to those that the operator table lists
_FORMATS = {
    *(quantize_operator, fake_quantize_operator, dequantize_operator, pack_operator),
    *(quantize_buffers, dequantize_buffers, buffers_operator),
}
_ARGUMENTS = {  # position of the inner operator's first argument
    out_dtype_operator: 2,
    scaled_operator: 4,
    scaled_buffers: 4,
    quantized_operator: 4 + len(Scales._fields),
}


def rows_of(meter: Meter, node_pairs: list[Pair]) -> tuple[Row, ...]:
    """One row for each input and for each tensor that the program computes."""
    return tuple(_Listing(meter, node_pairs).rows)


class _Listing:
    def __init__(self, meter: Meter, node_pairs: list[Pair]) -> None:
        self.meter = meter
        self.rows: list[Row] = []
        self.pairs = {pair.a: pair for pair in node_pairs if pair.elements is not None}
        self.outputs = {node: i for i, (node, _) in reversed(list(enumerate(meter.outputs)))}
        self.stored = _stored_tensors(meter)
        self.places: dict[Node, int] = {}
        self.ratios: dict[Node, float] = {}  # the SQNR of a node's value, else the lowest SQNR of its inputs
        for node in meter.graph.nodes:
            is_row = node in meter.inputs or node.op == "call_function"
            if is_row and meter.seen[node].type is not None:
                self.places[node] = len(self.rows)
                self.rows.append(self._row(node))
            else:
                self.ratios[node] = self._before(node)

    def _row(self, node: Node) -> Row:
        seen = self.meter.seen[node]
        operands = tuple(self._operand(n) for n in node.all_input_nodes if self.meter.seen[n].type is not None)
        result = _buffers_type(node) or seen.type
        assert result is not None
        lines = seen.explained.splitlines()
        kernel = lines[-1].removesuffix(": chosen") if lines else "" if node.op == "placeholder" else "PyTorch"
        constants = [self.stored[n][1] for n in node.all_input_nodes if n in self.stored]
        return Row(
            name=node.name,
            path=path_of(node),
            module=module_of(node),
            operator="input" if node.op == "placeholder" else operator_name(node),
            sort=_sort(node, operands, result),
            operands=operands,
            computes=self._factors(node) or (result,),
            result=result,
            shape=seen.shape,
            output=self.outputs.get(node),
            kernel=kernel,
            reasons=tuple(lines[:-1]),
            parameter_bytes=sum(x.nbytes for x in constants),
            seconds=self.meter.seconds(node) if node.op == "call_function" else None,
            error=self._error(node),
            values=seen.values,
            weights=_spread(max(constants, key=Tensor.numel)) if constants else None,
            inexact=_inexact(node),
        )

    def _operand(self, node: Node) -> Source:
        name = self.stored[node][0] if node in self.stored else node.name
        return Source(name, _buffers_type(node) or self.meter.seen[node].type, self.places.get(node))

    def _factors(self, node: Node) -> tuple[Type, ...]:
        """The types of a product's two factors; for an embedding, the type of its weight."""
        op = inner_operator(node)
        if op not in _PRODUCTS:
            return ()
        start = _ARGUMENTS.get(node.target, 0)  # type: ignore[call-overload]
        args = node.args[start:]
        if node.target is scaled_buffers:
            args = decode(op, args)
        if op is _ATTENTION:
            factors = [args[0], args[1]]
        else:
            factors = [of(op).find(role, tuple(args)) for role in (LHS, RHS)]
        types = [self._type(x) for x in factors]
        if node.target is quantized_operator:
            scheme = Scheme.parse(str(node.args[1]))
            for i, q in enumerate((scheme.lhs, scheme.rhs)):
                if q is not None and types[i] is not None:
                    types[i] = type_from_quantizer(q)
        return tuple(t for t in types if t is not None)

    def _type(self, x: object) -> Type | None:
        if isinstance(x, Operand):
            return type_from_quantizer(x.quantizer)
        return (_buffers_type(x) or self.meter.seen[x].type) if isinstance(x, Node) else None

    def _before(self, node: Node) -> float:
        return min((self.ratios[n] for n in node.all_input_nodes), default=math.inf)

    def _error(self, node: Node) -> Error | None:
        before = self._before(node)
        pair = self.pairs.get(node)
        self.ratios[node] = before
        if pair is None:
            return None
        figures = pair.row()
        if figures.sqnr is not None:
            self.ratios[node] = figures.sqnr
        counts = figures.elements, figures.differing
        return Error(pair.b.name, *counts, figures.sqnr, figures.largest, before, pair.spread)


def _inexact(node: Node) -> str:
    found = inexact(node) if node.op == "call_function" and node.target is not operator.getitem else None
    return "" if found is None else f"{found.reason}; use {found.remedy}"


def _sort(node: Node, operands: tuple[Source, ...], result: Type) -> str:
    if node.op == "placeholder":
        return INPUT
    op = inner_operator(node)
    if op in _PRODUCTS:
        return PRODUCT
    is_move = not isinstance(op, OpOverload) or op.is_view or of(op).family.moves or op in _MOVES
    changes = bool(operands) and all(o.type is not None and o.type.format != result.format for o in operands)
    if node.target in _FORMATS or (is_move and changes and node.target is not operator.getitem):
        return QUANTIZE
    return MOVE if is_move and operands else OTHER


def _buffers_type(node: object) -> Type | None:
    """The type of a list of buffers, from the quantizer among the node's arguments; None for other nodes."""
    if not isinstance(node, Node) or not isinstance(value(node), list | tuple):
        return None
    at = {quantize_buffers: 0, scaled_buffers: 1}.get(node.target)  # type: ignore[call-overload]
    return None if at is None else type_from_quantizer(Quantizer.parse(str(node.args[at])))


def _stored_tensors(meter: Meter) -> dict[Node, tuple[str, Tensor]]:
    """Map the nodes of the program's parameters, buffers and constants to their names in the model and values."""
    result: dict[Node, tuple[str, Tensor]] = {}
    if isinstance(meter.program, ExportedProgram):
        specs = meter.program.graph_signature.input_specs
        tensors = {**meter.program.constants, **meter.program.state_dict}
        for node, spec in zip(meter.graph.find_nodes(op="placeholder"), specs, strict=True):
            x = tensors.get(spec.target or "")
            if spec.kind is not InputKind.USER_INPUT and isinstance(x, Tensor):
                result[node] = (str(spec.target), x)
        return result
    for node in meter.graph.find_nodes(op="get_attr"):
        x = meter.module
        for part in str(node.target).split("."):
            x = getattr(x, part)
        if isinstance(x, Tensor):
            result[node] = (str(node.target), x)
    return result


def parameter_bytes(meter: Meter) -> int:
    """The total bytes of the tensors that the program stores and reads, each counted once."""
    parameters = {id(x): x.nbytes for node, (_, x) in _stored_tensors(meter).items() if node.users}
    return sum(parameters.values())


def _spread(x: Tensor) -> Spread | None:
    given = float_values(x.detach())
    return None if given is None else Spread.of(given)
