"""Nodes of PyTorch's own out_dtype, and ours, exchanged in exported programs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from hop.compat import stock
from hop.compat.pytree import tree_map_only
from hop.dispatch.operators import CONVOLUTION, DIVIDE, MULTIPLY, aten, of, within
from hop.export.rewrite.program import check_program, graph_of, rebuilt, value
from hop.impls.out_dtype import out_dtype_operator
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.promotion import common_dtype, is_integer

_ELEMENTWISE = within(MULTIPLY, DIVIDE)
# dtypes of which PyTorch's promotion and ours say the same, in any mixture; asked in every call under patch_torch
_SAME = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)

# What an exchange makes of a node: its new arguments, or why there are none.
_Exchange = Callable[[Node], tuple[Any, ...] | str]


def from_torch(program: ExportedProgram, *, strict: bool = True) -> ExportedProgram:
    """The program with `hop.out_dtype` where it holds `torch.ops.higher_order.out_dtype`, in nested graphs too.

    Its results are the same: integers bit for bit, floats but for the order of their sums. Names of nodes, parameters,
    inputs and outputs stay; the program that is given does too.

    Args:
        program: an exported program.
        strict: raise if a node means something else in hop; else such nodes stay as they are.

    Raises:
        TypeError: `program` is no ExportedProgram.
        ValueError: nodes cannot be exchanged, and `strict`; names each of them with the reason.
    """
    return _exchanged("from_torch", program, stock.stock_out_dtype, out_dtype_operator, _to_ours, strict)


def to_torch(program: ExportedProgram, *, strict: bool = True) -> ExportedProgram:
    """The program with `torch.ops.higher_order.out_dtype` where it holds `hop.out_dtype`, in nested graphs too: the
    reverse of `from_torch`. Other operators of hop stay, and have no such form.

    Args:
        program: an exported program.
        strict: raise if PyTorch's operator cannot express a node; else such nodes stay as they are.

    Raises:
        TypeError: `program` is no ExportedProgram.
        ValueError: nodes cannot be exchanged, and `strict`; names each of them with the reason.
    """
    return _exchanged("to_torch", program, out_dtype_operator, stock.stock_out_dtype, _to_stock, strict)


def difference(op: Any, output_dtype: torch.dtype, args: tuple[Any, ...]) -> str | None:
    """Why PyTorch's out_dtype and ours differ in what they mean by a call, one of PyTorch's eight operators; None if
    they do not."""
    divides = of(op).family is DIVIDE and torch.get_default_dtype() is not torch.float32
    dtypes = {output_dtype, *(x.dtype for x in args if isinstance(x, torch.Tensor))}
    if dtypes <= _SAME and not divides:
        return None
    own = common_dtype(describe(op), output_dtype, args, {})
    theirs = stock.stock_common_dtype(output_dtype, args)
    if theirs is None:
        return f"PyTorch does not promote {', '.join(sorted(map(str, dtypes)))}"
    if theirs != own:
        return f"PyTorch computes it in {theirs}, hop in {own}"
    if output_dtype is torch.bool and is_integer(own) and op not in _ELEMENTWISE:
        return f"as torch.bool, PyTorch's result is that of sums in {own}, which wrap, and hop's that of exact sums"
    if divides and is_integer(own):
        return f"PyTorch divides integers in the default dtype, now {torch.get_default_dtype()}, hop in torch.float32"
    return None


def _to_ours(node: Node) -> tuple[Any, ...] | str:
    op, output_dtype, args, _ = _call(node)
    return difference(op, output_dtype, _values(args)) or (op, output_dtype, *args)


def _to_stock(node: Node) -> tuple[Any, ...] | str:
    op, output_dtype, args, _ = _call(node)
    if op not in stock.stock_operators:
        names = ", ".join(sorted(map(str, stock.stock_operators)))
        return f"PyTorch's operator takes {names}; hop.export.lower makes core ATen of any other"
    known = _values(args)
    return difference(op, output_dtype, known) or _without_kernel(op, output_dtype, known) or (op, output_dtype, *args)


def _call(node: Node) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """The operator of a node, its output dtype, and its arguments in canonical form."""
    op, output_dtype, *given = node.args
    return op, output_dtype, *describe(op).bind(tuple(given), dict(node.kwargs))  # type: ignore[arg-type]


def _without_kernel(op: Any, output_dtype: torch.dtype, args: Any) -> str | None:
    """Why ATen on CPU cannot run `op` in the dtype in which PyTorch's out_dtype calls it; None if it can."""
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


def _exchanged(
    name: str, program: ExportedProgram, old: Any, new: Any, exchange: _Exchange, strict: bool
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

    result = rebuilt(program, edit(graph_of(program)))
    with_nested(result.graph_module, program.graph_module)
    if kept and strict:
        raise ValueError(
            f"hop.export.{name}: these nodes cannot be exchanged; strict=False leaves them:\n" + "\n".join(kept)
        )
    return result
