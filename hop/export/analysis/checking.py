"""Check that a program contains only given operators and dtypes."""

import operator
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from hop.compat.eager import HigherOrderOperator, OpOverload, OpOverloadPacket
from hop.compat.pytree import tree_leaves
from hop.export.analysis.provenance import source_line
from hop.export.rewrite.program import check_program, value
from hop.impls.decompositions import operators_named


def check(
    program: ExportedProgram,
    *,
    operators: Collection[object] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
) -> None:
    """Raise unless the program contains only these operators and dtypes, including in nested graphs.

    Args:
        program: an exported program.
        operators: the allowed operators: overloads, such as torch.ops.aten.mm.default; packets, such as
            torch.ops.aten.mm, for all their overloads; higher-order operators, such as torch.ops.higher_order.cond;
            functions of hop, such as hop.scaled, for their operators; or names of these, such as "aten.mm" and
            "hop_scaled_buffers". None allows all. Nodes that only index a list or compute a size are ignored.
        dtypes: the allowed dtypes of tensors, including inputs and parameters. None allows all.

    Raises:
        TypeError: `program` is not an ExportedProgram, or an operator or dtype has the wrong type.
        ValueError: some nodes have another operator or dtype (each is listed with the model's source line), or neither
            `operators` nor `dtypes` is given.
    """
    check_program(program, "check")
    if operators is None and dtypes is None:
        raise ValueError("check: operators and dtypes are both None, which allows everything: give one of them")
    names = None if operators is None else {name for x in _collection("operators", operators) for name in _names(x)}
    kinds = None if dtypes is None else _collection("dtypes", dtypes)
    for kind in kinds or ():
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"check: dtypes must be of torch.dtype, got {kind!r}; give one such as torch.float32")
    failures = [(node, reason) for node in _nodes(program) if (reason := _reason(node, names, kinds))]
    if failures:
        lines = "\n".join("; ".join(filter(None, (f"  {n.name}: {why}", source_line(n)))) for n, why in failures)
        what = "node is" if len(failures) == 1 else "nodes are"
        raise ValueError(f"check: {len(failures)} {what} not allowed in the program\n{lines}")


def _collection(name: str, given: object) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Collection):
        raise TypeError(f"check: {name} must be a list, a tuple or a set, got {given!r}; give a list of one for one")
    return list(cast(Collection[Any], given))


def _names(x: object) -> list[str]:
    if isinstance(x, str):
        return [x, *(h.name() for h in operators_named(x))]
    if isinstance(x, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return [str(cast(Any, x))]
    if ours := operators_named(x):
        return [h.name() for h in ours]
    raise TypeError(
        f"check: operators must be operators of torch.ops, functions of hop, or their names, got {x!r}; give one such "
        "as torch.ops.aten.mm.default"
    )


def _nodes(program: ExportedProgram) -> Iterator[Node]:
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (n for n in module.graph.nodes if n.op in ("placeholder", "call_function"))


def _reason(node: Node, names: set[str] | None, dtypes: Collection[torch.dtype] | None) -> str | None:
    tensors = [x for x in tree_leaves(value(node)) if isinstance(x, Tensor)]
    if not tensors or node.target is operator.getitem:
        return None
    target = cast(Any, node.target)
    called = node.op == "call_function"
    if called and names is not None and str(target) not in names:
        packet = str(getattr(target, "overloadpacket", None))
        if packet not in names:
            return f"{target} is not among the operators"
    others = [] if dtypes is None else [str(x.dtype) for x in tensors if x.dtype not in dtypes]
    what = str(target) if called else "an input"
    return f"{what} is of {', '.join(dict.fromkeys(others))}, not among the dtypes" if others else None
