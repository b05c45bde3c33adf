"""Rewrite products of codes minus their zero points as products of bytes."""

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Node

from hop.compat import tracing
from hop.compat.eager import OpOverload
from hop.dispatch.operators import VIEW, aten, of
from hop.export.rewrite.program import copy_graph, emit, with_graph
from hop.export.targets.integer.constants import Constants
from hop.export.targets.onnx.operators import BYTES, CONVOLUTION, MATMUL, matmul, minus_zero_point
from hop.export.targets.onnx.others import replace_others

Views = Sequence[tuple[Any, Sequence[Any]]]

_SAFE = 64  # 2 · 255 · 64 is an int16


class _Factor(NamedTuple):
    """A factor of a product: views of codes - zero_point."""

    codes: Node  # 8 bits; or, if `zero_point` is None, also 9 bits and a sign in int16
    zero_point: Node | int | None = None
    views: Views = ()  # operators with their other arguments, in order
    signed: bool = False  # whether int8 stays int8


_Values = tuple[Tensor, Tensor | int | None, Views, bool]
"""The fields of a _Factor, with tensors for its nodes."""


class _Term(NamedTuple):
    """sign · (codes - zero_point - rows), with 8-bit codes."""

    codes: Tensor
    zero_point: Tensor | None = None  # of the codes' dtype and shape (1,)
    rows: Tensor | None = None  # int32, one column
    sign: int = 1


def in_bytes(program: ExportedProgram, weights: torch.dtype) -> ExportedProgram:
    """Rewrite a program's products as products of bytes."""
    graph = copy_graph(program)
    constants = Constants(program, graph)
    for target in (MATMUL, CONVOLUTION):
        for node in graph.find_nodes(op="call_function", target=target):
            a, b, _, _, *rest = node.args
            is_matmul = target is MATMUL
            lhs = _factor(constants, a, rows=is_matmul)
            rhs = _factor(constants, b, signed=is_matmul and weights == torch.int8, safe=is_matmul)
            if lhs is None or rhs is None:
                if not is_matmul:
                    raise NotImplementedError(
                        f"to_onnx: {node.name} is a convolution of {a.meta['val'].dtype} and {b.meta['val'].dtype}; "
                        "ONNX only has integer convolutions of int8 and uint8: use 8-bit codes"
                    )
                product = emit(node, lambda x, y: matmul(x, y, None, None), a, b)
            else:
                product = emit(node, functools.partial(_products, target, rest), tuple(lhs), tuple(rhs))
            node.replace_all_uses_with(product)
            graph.erase_node(node)
    replace_others(graph)
    graph.eliminate_dead_code()
    signature = ExportGraphSignature(constants.specs, copy.deepcopy(program.graph_signature.output_specs))
    return with_graph(program, graph, signature, constants={**program.constants, **constants.added})


def _factor(
    constants: Constants, node: Node, *, signed: bool = False, safe: bool = False, rows: bool = False
) -> _Factor | None:
    """A factor of a product; None if it has more than 9 bits.

    A constant stays int8 if `signed`, or if it is small and `safe` says that sums of two of its products with a byte
    must fit 16 bits; otherwise it becomes uint8.
    """
    if (x := constants.find(node)) is not None and x.numel():
        low, high, name = int(x.min()), int(x.max()), f"{_source(node)}_codes"
        if low >= -128 and high <= 127 and (signed or (safe and max(-low, high) <= _SAFE)):
            return _Factor(constants.add(name, x.to(torch.int8)), None, (), True)
        zero = 128 if low >= -128 and high <= 127 else max(-low, 0)
        if zero <= 255 and high + zero <= 255:
            return _Factor(constants.add(name, (x.to(torch.int16) + zero).to(torch.uint8)), zero)
        return _Factor(node) if low >= -255 and high <= 255 else None
    if node.meta["val"].dtype in BYTES:
        return _Factor(node, None, (), signed)
    return _difference(node, rows)


def _source(node: Node) -> str:
    """The name of the placeholder that a constant comes from."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.name


_PAD = aten.constant_pad_nd.default


def _difference(whole: Node, rows: bool) -> _Factor | None:
    """8-bit codes minus their zero point, if `whole` is of that form.

    Only a single zero point, or with `rows` one per row, becomes the factor's zero point; others stay subtracted.
    """
    views: list[tuple[Any, Sequence[Any]]] = []
    node: Any = whole
    while of(node.target).family is VIEW or _pads_by_zero(node):
        views.insert(0, (node.target, node.args[1:]))
        node = node.args[0]
    is_padded = any(target is _PAD for target, _ in views)
    if node.target not in (aten.sub.Tensor, aten.sub.Scalar) or node.kwargs or len(node.args) > 2:
        return None
    codes, zero = (_before_cast(x) for x in node.args)
    if not isinstance(codes, Node) or codes.meta["val"].dtype not in BYTES:
        return None
    if not isinstance(zero, Node):
        return _Factor(codes, int(zero), views)
    z = zero.meta["val"]
    if z.dtype not in BYTES:
        return None
    by_row = rows and z.dim() == codes.meta["val"].dim() and tracing.known_equal(z.shape[-1], 1)
    by_row = by_row and not is_padded
    along = all(target is aten.slice.Tensor and args[0] in (-1, z.dim() - 1) for target, args in views)
    return _Factor(codes, zero, views) if _is_one(z) or (by_row and along) else _Factor(whole)


def _pads_by_zero(node: Node) -> bool:
    return node.target is _PAD and not node.kwargs and node.args[2:] in ((), (0,), (0.0,))


def _is_one(x: Tensor) -> bool:
    return all(tracing.known_equal(n, 1) for n in x.shape)


def _before_cast(x: object) -> Any:
    """The 8-bit codes before a cast to 16 bits; anything else is returned unchanged."""
    if isinstance(x, Node) and x.target is aten._to_copy.default and x.meta["val"].dtype == torch.int16:
        source: Any = x.args[0]
        return source if source.meta["val"].dtype in BYTES else x
    return x


def _products(target: OpOverload, rest: Sequence[object], lhs: _Values, rhs: _Values) -> Tensor:
    """The sum of the products of the terms of two factors."""
    total: Tensor | int = 0
    for a, b in itertools.product(_terms(*lhs), _terms(*rhs)):
        term = target(a.codes, b.codes, a.zero_point, b.zero_point, *rest)
        if a.rows is not None:
            columns = minus_zero_point(b.codes, b.zero_point, torch.int32).sum(-2, keepdim=True, dtype=torch.int32)
            term = term - a.rows * columns
        if a.sign * b.sign < 0:
            total = total - term
        else:
            total = term if isinstance(total, int) else total + term
    assert isinstance(total, Tensor)
    return total


def _padded(codes: Tensor, zero_point: Tensor | int | None, sides: Sequence[int]) -> Tensor:
    """Pad codes with their zero point, which may be computed at run time, so that their difference is padded with 0."""
    if zero_point is None:
        return _PAD(codes, sides)
    zero = zero_point.to(torch.int32) if isinstance(zero_point, Tensor) else zero_point
    return (_PAD(codes.to(torch.int32) - zero, sides) + zero).to(codes.dtype)


def _terms(codes: Tensor, zero_point: Any, views: Views, signed: bool) -> list[_Term]:
    """A factor as a sum of at most two terms.

    On most CPUs onnxruntime has no fast kernel for signed codes on the left, so these are shifted by 128.
    """
    for view, args in views:
        codes = _padded(codes, zero_point, args[0]) if view is _PAD else view(codes, *args)
    if codes.dtype == torch.int16:
        x = codes.to(torch.int32)  # _factor has checked that magnitudes are at most 255
        positive, negative = (part.clamp(0, 255).to(torch.uint8) for part in (x, x * -1))
        return [_Term(positive), _Term(negative, sign=-1)]
    rows = None
    if isinstance(zero_point, Tensor):
        zero_point = zero_point.to(torch.int32)
        if not _is_one(zero_point):
            rows, zero_point = zero_point, None
    if codes.dtype == torch.int8 and not signed:
        codes = codes.to(torch.uint8).bitwise_xor(128)
        zero_point = 128 if zero_point is None else zero_point + 128
    if isinstance(zero_point, int):
        zero_point = aten.full.default([1], zero_point, dtype=codes.dtype)
    elif zero_point is not None:
        zero_point = zero_point.reshape(1).to(codes.dtype)
    return [_Term(codes, zero_point, rows)]
