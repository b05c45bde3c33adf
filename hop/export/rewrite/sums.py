"""Products of codes that are scaled afterwards, in the forms that they have in graphs.

    mm, linear, matmul   of codes cast to floats, or to wider integers
    _int_mm              of the codes themselves
    torch's out_dtype    of mm or linear to int32, of codes or of their casts

torchao writes each of them: _int_mm where a quantized tensor runs, out_dtype in its `safe_int_mm` while that is traced.
On CPUs with VNNI and without AMX, where a product of uint8 by int8 is the fast one, it moves int8 codes by 128 first,

    _int_mm((a.to(int32) + 128).to(uint8), b) - b.sum(0, keepdim=True, dtype=int32) · 128

which are the sums of a by b, modulo 2^32 too.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.compat.stock import stock_out_dtype
from hop.dispatch.operators import aten
from hop.export.rewrite.program import tensors_of, value

_PLAIN = (aten.mm.default, aten.linear.default)


class SumsOfCasts(NamedTuple):
    """A node that holds the sums of lhs · rhs, as they stand in the graph."""

    op: OpOverload  # mm or linear
    lhs: Node
    rhs: Node  # codes
    sums: Node
    has_codes: bool  # whether lhs holds codes; floats otherwise


def product_of(node: Node, cast: Mapping[Node, Node]) -> SumsOfCasts | None:
    """What a node multiplies, if one factor or both are codes; `cast` has the codes of nodes that cast them."""
    op, args = node.target, node.args
    if op is stock_out_dtype and args[1] == torch.int32:
        op, args = args[0], args[2:]
    if op is aten._int_mm.default:
        a, b = tensors_of(node)
        codes, sums = _unmoved(node, a, b)
        return SumsOfCasts(aten.mm.default, codes, b, sums, True)
    if op not in (*_PLAIN, aten.matmul.default) or len(args) > 2:
        return None
    a, b = tensors_of(node)
    if op is aten.matmul.default:
        if value(a).dim() != 2 or value(b).dim() != 2:
            return None
        op = aten.mm.default
    direct = (torch.int8, torch.uint8) if node.target is stock_out_dtype else ()
    lhs, rhs = (x if value(x).dtype in direct else cast.get(x) for x in (a, b))
    if rhs is None or (lhs is None and value(a).dtype not in (torch.float32, torch.bfloat16)):
        return None
    return SumsOfCasts(op, a if lhs is None else lhs, rhs, node, lhs is not None)  # type: ignore[arg-type]


def _unmoved(sums: Node, a: Node, b: Node) -> tuple[Node, Node]:
    """The codes that `a` holds moved by 128, and the node where that is taken off the sums again; `a` and `sums` where
    one of the two is not so."""
    codes, readers = _before_moved(a), list(sums.users)
    return (
        (codes, readers[0])
        if codes is not None and len(readers) == 1 and _less_columns(readers[0], sums, b)
        else (a, sums)
    )


def _before_moved(x: Node) -> Node | None:
    """The int8 codes c of (c.to(int32) + 128).to(uint8)."""
    if x.target is not aten._to_copy.default or value(x).dtype != torch.uint8:
        return None
    moved: Any = x.args[0]
    if moved.target not in (aten.add.Tensor, aten.add.Scalar) or moved.args[1] != 128 or _more(moved):
        return None
    wide: Any = moved.args[0]
    if not isinstance(wide, Node) or wide.target is not aten._to_copy.default or value(wide).dtype != torch.int32:
        return None
    codes: Any = wide.args[0]
    return codes if value(codes).dtype == torch.int8 else None


def _less_columns(node: Node, sums: Node, b: Node) -> bool:
    """Whether a node is sums - b.sum(0, keepdim=True, dtype=int32) · 128."""
    if node.target is not aten.sub.Tensor or node.args[0] is not sums or _more(node):
        return False
    taken: Any = node.args[1]
    if not isinstance(taken, Node) or taken.target not in (aten.mul.Tensor, aten.mul.Scalar) or taken.args[1] != 128:
        return False
    columns: Any = taken.args[0]
    if not isinstance(columns, Node) or columns.target is not aten.sum.dim_IntList or columns.args[0] is not b:
        return False
    dims: Any
    dims, keepdim = (*columns.args[1:], *(columns.kwargs.get("keepdim", False),))[:2]
    return list(dims) in ([0], [-2]) and keepdim is True and value(columns).dtype == torch.int32


def _more(node: Node) -> bool:
    """Whether a sum or a difference has an alpha."""
    return len(node.args) > 2 or bool(node.kwargs)
