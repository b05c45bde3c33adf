"""The gradient of scaled: that of the operator on dequantized operands, straight through every rounding.

For y = op(x̂_1, ..., x̂_n), where each x̂ is a dequantized operand, and the gradient G of y:

    The gradient of x_i is the operator's gradient at x̂, computed in float32 (float64 if an operand has it) by the
    rules of out_dtype, and cast to the appearance dtype of x_i.
    If y is quantized, G first passes through quantize; see hop.numerics.quantizer.Derivatives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import functorch
from hop.compat.eager import OpOverload
from hop.compat.pytree import tree_flatten, tree_map_only
from hop.dispatch.operand import Operand
from hop.dispatch.own_operators import ATTENTION
from hop.impls.out_dtype import gradient as of_out_dtype
from hop.impls.out_dtype import out_dtype_operator as out_dtype
from hop.impls.out_dtype.arguments import describe
from hop.impls.quantize import dequantize
from hop.numerics import copies

aten = torch.ops.aten

_SMOOTH = {aten.scaled_dot_product_attention.default: ATTENTION}
"""Operators that replace one whose own derivatives are not the same on all routes."""


def through_operator(
    grad: Tensor, needed: Sequence[bool], op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Tensor | None]:
    """The gradient of each leaf of (args, kwargs) for which `needed` is true; a quantized tensor is one leaf."""
    wide, op = wide_dtype(args), _SMOOTH.get(op, op)
    real, inner = tree_map_only(Tensor, lambda x: numbers(x, wide), (list(args), kwargs))
    bound, inner = describe(op).bind(tuple(real), inner)
    flags = [False, False, *needed]
    flags += [False] * (len(tree_flatten(((op, wide, *bound), inner))[0]) - len(flags))
    gradients = of_out_dtype.gradient(grad.to(wide), flags, op, wide, bound, inner)[2:]
    leaves, _ = tree_flatten((list(args), kwargs))
    return [
        g.to(x.dtype) if g is not None and isinstance(x, Tensor) else None
        for g, x in zip(gradients, leaves, strict=False)
    ]


def linearized(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """The operator on dequantized operands, which has the derivatives of scaled."""
    wide, op = wide_dtype(args), _SMOOTH.get(op, op)
    real, inner = tree_map_only(Tensor, lambda x: numbers(x, wide), (list(args), kwargs))
    return out_dtype(op, wide, *real, **inner)


def wide_dtype(args: Sequence[object]) -> torch.dtype:
    """float64 if a plain operand has that dtype, else float32."""
    plain = [x for x in tree_flatten(list(args))[0] if isinstance(x, Tensor) and not is_quantized(x)]
    return torch.float64 if any(x.dtype == torch.float64 for x in plain) else torch.float32


def is_quantized(x: Tensor) -> bool:
    """Whether x is a quantized tensor, at any level of torch.func."""
    return hasattr(functorch.innermost(x), "quantizer")


def numbers(x: Any, dtype: torch.dtype) -> Any:
    """x dequantized, or cast to `dtype`; gradients pass through unchanged."""
    if is_quantized(x):
        return dequantize(x, torch.float32).to(dtype)
    return x.to(dtype) if x.is_floating_point() else x


def of_buffers(operand: Operand) -> Tensor:
    """Dequantize an operand to float32, with derivatives with respect to its scales."""
    return copies.dequantize(operand.quantizer, operand.buffers, operand.shape)


def pulled_back(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The gradients of `inputs` by PyTorch's own rules."""
    return list(torch.func.vjp(function, *inputs)[1](grad))  # type: ignore[operator]


def with_derivatives(value: Tensor, linear: Tensor) -> Tensor:
    """`value`, with the derivatives of `linear`."""
    zero = torch.where(linear.detach().isfinite(), linear - linear.detach(), 0.0)
    return value + zero.to(value.dtype)
