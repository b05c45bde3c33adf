"""Pad values represented by codes, with the code of the padding value."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.dispatch.operators import MAXIMUM, aten, of
from hop.export.rewrite.code_floats import Held
from hop.export.rewrite.program import constant


def padding_of(node: Node) -> tuple[Node, list[int], float] | None:
    """The operand, the padding of each side and the padding value of a constant padding; None for other nodes."""
    args: list[Any] = [*node.args, *(None, None)]
    if node.target is aten.pad.default:
        mode = node.kwargs.get("mode", args[2] or "constant")
        number: Any = node.kwargs.get("value", args[3])
        return (args[0], list(args[1]), number or 0.0) if mode == "constant" else None
    if node.target is aten.constant_pad_nd.default:
        return args[0], list(args[1]), args[2] or 0.0
    return None


def fill_code(program: ExportedProgram, operand: Held, node: Node, number: float) -> int:
    """The code of the padding value of `node`: for -inf in front of maximum pools the lowest code, which never changes
    a maximum. Raises NotImplementedError if no code has that value, or if the scale is dynamic.
    """
    if number == -math.inf and node.users and all(_is_maximum_within(user, node) for user in node.users):
        return operand.quantizer.format.low  # type: ignore[attr-defined]
    given = [constant(program, x) if isinstance(x, Node) else torch.tensor(x) for x in operand.given]
    if not operand.is_whole() or any(x is None for x in given):
        raise NotImplementedError("padding needs a single static scale")
    format, (scale, *zeros) = operand.quantizer.format, [float(x) for x in given if x is not None]
    zero = int(zeros[0]) if zeros else format.zero
    steps = number / scale
    code = round(steps) + zero
    if steps != round(steps) or not format.low <= code <= format.high:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"no code of scale {scale:.9g} and zero point {zero} in {format.name} has the value {number}; pad with 0, "
            "or quantize after padding"
        )
    return code


def _is_maximum_within(user: Node, node: Node) -> bool:
    """Whether a node is a maximum pool of `node`, each of whose windows has more than its padding."""
    if of(user.target).family is not MAXIMUM or user.args[0] is not node:
        return False
    _, sides, _ = padding_of(node) or (None, [0], 0)
    kernel: Any = user.args[1]
    return max(sides) < min(kernel if isinstance(kernel, list | tuple) else [kernel])


def run_pad(codes: Tensor, sides: Sequence[int], fill: int) -> Tensor:
    return aten.constant_pad_nd.default(codes, list(sides), fill)
