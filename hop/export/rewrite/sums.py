"""Recognize products of codes that are scaled afterwards, in their various graph forms.

    mm, linear, matmul   of codes cast to floats, or to wider integers
    _int_mm              of the codes
    torch's out_dtype    of mm or linear to int32, of codes or of their casts

torchao produces all of them: _int_mm when a quantized tensor runs, out_dtype when its `safe_int_mm` is traced. On CPUs
with VNNI and without AMX, where uint8 by int8 products are the fast ones, it shifts int8 codes by 128 first,

    _int_mm((a.to(int32) + 128).to(uint8), b) - b.sum(0, keepdim=True, dtype=int32) · 128

which equals the sums of a by b, also modulo 2^32.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.compat.stock import stock_out_dtype
from hop.dispatch.operators import aten
from hop.export.rewrite.program import tensor_arguments, value

_PLAIN = (aten.mm.default, aten.linear.default)


class SumsOfCasts(NamedTuple):
    """A node with the sums of lhs · rhs."""

    op: OpOverload  # mm or linear
    lhs: Node
    rhs: Node  # codes
    sums: Node
    has_codes: bool  # whether lhs is codes rather than floats


def product_of(node: Node, cast: Mapping[Node, Node]) -> SumsOfCasts | None:
    """The product that a node computes, if at least its right factor is codes; `cast` maps casts to their codes."""
    op, args = node.target, node.args
    if op is stock_out_dtype and args[1] == torch.int32:
        op, args = args[0], args[2:]
    if op is aten._int_mm.default:
        a, b = tensor_arguments(node)
        codes, sums = _without_shift(node, a, b)
        return SumsOfCasts(aten.mm.default, codes, b, sums, True)
    if op not in (*_PLAIN, aten.matmul.default) or len(args) > 2:
        return None
    a, b = tensor_arguments(node)
    if op is aten.matmul.default:
        if value(a).dim() != 2 or value(b).dim() != 2:
            return None
        op = aten.mm.default
    direct = (torch.int8, torch.uint8) if node.target is stock_out_dtype else ()
    lhs, rhs = (x if value(x).dtype in direct else cast.get(x) for x in (a, b))
    if rhs is None or (lhs is None and value(a).dtype not in (torch.float32, torch.bfloat16)):
        return None
    return SumsOfCasts(op, a if lhs is None else lhs, rhs, node, lhs is not None)  # type: ignore[arg-type]


def _without_shift(sums: Node, a: Node, b: Node) -> tuple[Node, Node]:
    """The codes that `a` contains shifted by 128, and the node that corrects the sums for it.

    `a` and `sums` themselves if there is no such shift.
    """
    codes, readers = _unshifted_codes(a), list(sums.users)
    return (
        (codes, readers[0])
        if codes is not None and len(readers) == 1 and _subtracts_column_sums(readers[0], sums, b)
        else (a, sums)
    )


def _unshifted_codes(x: Node) -> Node | None:
    """The int8 codes c in (c.to(int32) + 128).to(uint8); None for other nodes."""
    if x.target is not aten._to_copy.default or value(x).dtype != torch.uint8:
        return None
    shifted: Any = x.args[0]
    if shifted.target not in (aten.add.Tensor, aten.add.Scalar) or shifted.args[1] != 128 or _has_alpha(shifted):
        return None
    cast: Any = shifted.args[0]
    if not isinstance(cast, Node) or cast.target is not aten._to_copy.default or value(cast).dtype != torch.int32:
        return None
    codes: Any = cast.args[0]
    return codes if value(codes).dtype == torch.int8 else None


def _subtracts_column_sums(node: Node, sums: Node, b: Node) -> bool:
    """Whether a node is sums - b.sum(0, keepdim=True, dtype=int32) · 128."""
    if node.target is not aten.sub.Tensor or node.args[0] is not sums or _has_alpha(node):
        return False
    product = node.args[1]
    if not isinstance(product, Node) or product.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return False
    if product.args[1] != 128:
        return False
    columns = product.args[0]
    if not isinstance(columns, Node) or columns.target is not aten.sum.dim_IntList or columns.args[0] is not b:
        return False
    dims: Any
    dims, keepdim = (*columns.args[1:], *(columns.kwargs.get("keepdim", False),))[:2]
    return list(dims) in ([0], [-2]) and keepdim is True and value(columns).dtype == torch.int32


def _has_alpha(node: Node) -> bool:
    """Whether an addition or subtraction has an alpha."""
    return len(node.args) > 2 or bool(node.kwargs)
