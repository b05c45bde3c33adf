"""Limits of a runtime's kernels: reasons why to_integer does not rewrite a call for that runtime."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hop.dispatch.operators import LHS, RHS, of
from hop.export.rewrite.code_floats import Held
from hop.export.rewrite.encodings import FORMATS, Encoding
from hop.export.rewrite.program import tensor_arguments, value
from hop.export.rewrite.target import Limits
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.integer.functions import TfliteAdd
from hop.numerics.requantization import Convention, fixed_point

Known = Callable[[Any], Tensor | None]


def check_sizes(node: Node, limits: Limits) -> None:
    """Raise ValueError for a call with more dimensions or operands than the kernel supports."""
    tensors = tensor_arguments(node)
    rank = max((len(value(x).shape) for x in (node, *tensors)), default=0)
    if limits.rank is not None and rank > limits.rank:
        raise ValueError(
            f"its kernel supports at most {limits.rank} dimensions, got {rank}; merge dimensions by reshape before it"
        )
    if limits.operands is not None and len(tensors) > limits.operands:
        raise ValueError(
            f"its kernel supports at most {limits.operands} operands, got {len(tensors)}; use several such operators"
        )


def check_units(
    node: Node, args: Sequence[object], rule: Convention, limits: Limits, e: Encoding, known: Known
) -> None:
    """Raise ValueError for a scale or zero point of the result that the kernel ignores or its arithmetic cannot
    represent.

    `args` are the node's arguments with values represented by codes; `known` returns the constant value of a node or
    number.
    """
    scale, zero = known(e.scale), known(FORMATS[e.codes].zero if e.zero_point is None else e.zero_point)
    if scale is None or zero is None or scale.numel() != 1:
        return
    step = scale.to(torch.float32).reshape(())
    units = limits.units
    if units is None and isinstance(rule, IntegerFunction):
        units = rule.output_units(FORMATS[e.codes])
    if units is not None and (float(step), int(zero)) != units:
        raise ValueError(
            f"its kernel always returns codes of scale 1/{1 / units[0]:.0f} and zero point {units[1]}, but the result "
            f"has {float(step):.6g} and {int(zero)}; quantize the result with the former"
        )
    roles = of(node.target)
    pair = args[:2] if isinstance(rule, TfliteAdd) else [roles.find(role, tuple(args)) for role in (LHS, RHS)]
    scales = [known(x.given[0]) for x in pair if isinstance(x, Held)]
    if len(scales) != 2 or scales[0] is None or scales[1] is None:
        return
    first, second = (float(x.to(torch.float64).amax()) for x in scales if x is not None)
    least = None
    if isinstance(rule, TfliteAdd):
        least = max(first, second) * 2 / rule.room(e.codes)
    elif limits.multiplier is not None:
        least = first * second / limits.multiplier
    if least is not None and int(fixed_point(least / step.to(torch.float64))[1]) > 0:
        raise ValueError(
            f"the scale {float(step):.6g} of its result is too small for operands with scales {first:.6g} and "
            f"{second:.6g}: its kernel needs one above {least:.6g}; quantize the result with such a scale"
        )
