"""from_torch, to_torch: convert nodes of PyTorch's out_dtype to ours and back."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from hop.compat import stock
from hop.compat.pytree import Args, tree_map_only
from hop.dispatch.operators import CONVOLUTION, DIVIDE, MULTIPLY, aten, of, within
from hop.export.rewrite.program import check_program, copy_graph, value, with_graph
from hop.impls.out_dtype import out_dtype_operator
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.promotion import common_dtype, is_integer

_ELEMENTWISE = within(MULTIPLY, DIVIDE)
# dtypes that PyTorch and hop promote alike, in any combination; a fast check for every call under patch_torch
_SAME = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)

# From a node to its new arguments, or to the reason why there are none.
_Exchange = Callable[[Node], tuple[Any, ...] | str]


def from_torch(program: ExportedProgram, *, strict: bool = True) -> ExportedProgram:
    """Replace `torch.ops.higher_order.out_dtype` by `hop.out_dtype`, including nested graphs.

    Results are the same: integers bit for bit, floats up to the order of summation. Names of nodes, parameters, inputs
    and outputs are kept.

    Args:
        program: an exported program; it is not changed.
        strict: whether to raise if a node has another meaning in hop; otherwise such nodes are left.

    Raises:
        TypeError: `program` is not an ExportedProgram.
        ValueError: nodes cannot be converted and `strict` is set; the message lists them with reasons.
    """
    return _convert("from_torch", program, stock.stock_out_dtype, out_dtype_operator, _to_ours, strict)


def to_torch(program: ExportedProgram, *, strict: bool = True) -> ExportedProgram:
    """Replace `hop.out_dtype` by `torch.ops.higher_order.out_dtype`, including nested graphs: the reverse of
    `from_torch`.

    Other operators of hop have no such form and are left.

    Args:
        program: an exported program; it is not changed.
        strict: whether to raise if PyTorch's operator cannot express a node; otherwise such nodes are left.

    Raises:
        TypeError: `program` is not an ExportedProgram.
        ValueError: nodes cannot be converted and `strict` is set; the message lists them with reasons.
    """
    return _convert("to_torch", program, out_dtype_operator, stock.stock_out_dtype, _to_stock, strict)


def difference(op: object, output_dtype: torch.dtype, args: tuple[object, ...]) -> str | None:
    """The reason why PyTorch's out_dtype and ours differ for a call of one of PyTorch's eight operators; None if they
    agree.
    """
    divides = of(op).family is DIVIDE and torch.get_default_dtype() is not torch.float32
    dtypes = {output_dtype, *(x.dtype for x in args if isinstance(x, torch.Tensor))}
    if dtypes <= _SAME and not divides:
        return None
    our_dtype = common_dtype(describe(op), output_dtype, args, {})
    theirs = stock.stock_common_dtype(output_dtype, args)
    if theirs is None:
        return f"PyTorch does not promote {', '.join(sorted(map(str, dtypes)))}"
    if theirs != our_dtype:
        return f"PyTorch computes it in {theirs}, hop in {our_dtype}"
    if output_dtype is torch.bool and is_integer(our_dtype) and op not in _ELEMENTWISE:
        return f"as torch.bool, PyTorch's result comes from sums in {our_dtype}, which wrap, and hop's from exact sums"
    if divides and is_integer(our_dtype):
        return f"PyTorch divides integers in the default dtype, now {torch.get_default_dtype()}, hop in torch.float32"
    return None


def _to_ours(node: Node) -> tuple[Any, ...] | str:
    op, output_dtype, args, _ = _call(node)
    return difference(op, output_dtype, _values(args)) or (op, output_dtype, *args)


def _to_stock(node: Node) -> tuple[Any, ...] | str:
    op, output_dtype, args, _ = _call(node)
    if op not in stock.stock_operators:
        names = ", ".join(sorted(map(str, stock.stock_operators)))
        return f"PyTorch's operator supports {names}; hop.export.lower converts any other to core ATen"
    known = _values(args)
    return difference(op, output_dtype, known) or _without_kernel(op, output_dtype, known) or (op, output_dtype, *args)


def _call(node: Node) -> tuple[Any, Any, Args, dict[str, Any]]:
    """The operator of a node, its output dtype, and its arguments in canonical form."""
    op, output_dtype, *given = node.args
    return op, output_dtype, *describe(op).bind(tuple(given), dict(node.kwargs))  # type: ignore[arg-type]


def _without_kernel(op: Any, output_dtype: torch.dtype, args: Any) -> str | None:
    """The reason why ATen on CPU cannot run `op` in the dtype that PyTorch's out_dtype uses; None if it can."""
    if op in _ELEMENTWISE:
        return None
    common = common_dtype(describe(op), output_dtype, args, {})
    missing = f"PyTorch computes it in {common}, for which ATen has no such"
    if common in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        return f"{missing} product on CPU"
    if of(op).family is CONVOLUTION and is_integer(common) and common is not torch.int64:
        dilation = args[5] if len(args) > 5 else [1]
        transposed = op is aten.convolution.default and args[6]
        if transposed or any(n != 1 for n in dilation):
            return f"{missing} convolution on CPU, {'transposed' if transposed else f'dilated by {list(dilation)}'}"
    return None


def _values(args: Any) -> tuple[Any, ...]:
    return tree_map_only(Node, value, tuple(args))


def _convert(
    name: str, program: ExportedProgram, old: Any, new: object, exchange: _Exchange, strict: bool
) -> ExportedProgram:
    check_program(program, f"hop.export.{name}")
    kept: list[str] = []

    def edit(graph: Graph) -> Graph:
        for node in graph.find_nodes(op="call_function", target=old):
            args = exchange(node)
            if isinstance(args, str):
                kept.append(f"{node.name} ({node.args[0]} to {node.args[1]}): {args}")
            else:
                node.target, node.args, node.kwargs = new, args, {}
        return graph

    def nested(module: GraphModule) -> GraphModule:
        edited = GraphModule(module, edit(copy.deepcopy(module.graph)))
        edited.meta.update(module.meta)
        return with_nested(edited, module)

    def with_nested(edited: GraphModule, module: GraphModule) -> GraphModule:
        for child_name, child in module.named_children():
            if isinstance(child, GraphModule):
                setattr(edited, child_name, nested(child))
        return edited

    result = with_graph(program, edit(copy_graph(program)))
    with_nested(result.graph_module, program.graph_module)
    if kept and strict:
        raise ValueError(
            f"hop.export.{name}: these nodes cannot be converted; strict=False leaves them:\n" + "\n".join(kept)
        )
    return result
