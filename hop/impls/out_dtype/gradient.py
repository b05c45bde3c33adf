"""The gradient of out_dtype, composed of out_dtype calls.

For y = cast(op(x_1, ..., x_n), output_dtype) and the gradient G of y, the gradient of x_i is computed in the common
dtype and cast once, to the dtype of x_i. The casts have gradient 1, as in `Tensor.to`.

    product       dL = G @ Rᵀ, dR = Lᵀ @ G
    convolution   dx is the transposed convolution of G; dw is a convolution of x by G with batch and channels
                  exchanged, and stride and dilation exchanged (as in torch.nn.grad)
    others        one rule each below; an operator without a rule is differentiated through its reference by
                  PyTorch's formulas
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, tree_flatten, tree_leaves, tree_unflatten
from hop.impls.out_dtype import meaning
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import (
    BiasedConvolution,
    Product,
    as_convolution,
    as_product,
    convolution_arguments,
)
from hop.impls.out_dtype.meaning import call
from hop.impls.out_dtype.promotion import common_dtype
from hop.kernels.aten.convolution import Convolution

aten = torch.ops.aten

# The result of a rule: gradients by argument position, in any dtype.
Gradients = dict[int, Tensor]
Rule = Callable[..., Gradients]


def gradient(
    grad: Tensor,
    needed: Sequence[bool],
    op: OpOverload,
    output_dtype: torch.dtype,
    args: Args,
    kwargs: Mapping[str, object],
) -> list[Tensor | None]:
    """Gradients of the leaves of ((op, output_dtype, *args), kwargs) that need one, each in the leaf's dtype."""
    common = common_dtype(describe(op), output_dtype, args, kwargs)
    starts = [2]
    for arg in args:
        starts.append(starts[-1] + len(tree_leaves(arg)))
    wanted = {i for i, arg in enumerate(args) if isinstance(arg, Tensor) and needed[starts[i]]}
    by_position = None if common.is_complex else by_rule(grad, wanted, common, op, args, kwargs)
    if by_position is None:
        return _through_reference(grad, needed, op, output_dtype, args, kwargs)
    grads: list[Tensor | None] = [None] * len(needed)
    for i in wanted:
        grads[starts[i]] = by_position[i].to(args[i].dtype)
    return grads


def by_rule(
    grad: Tensor, wanted: set[int], common: torch.dtype, op: OpOverload, args: Args, kwargs: Mapping[str, object]
) -> Gradients | None:
    """Gradients by argument position; None if `op` has no rule here."""
    product = as_product(op, args, kwargs)
    if product is not None:
        return _product(grad, wanted, common, product, args)
    convolution = as_convolution(op, args)
    if convolution is not None:
        return _convolution(grad, wanted, common, convolution)
    rule = _RULES.get(op)
    return rule(grad, wanted, common, *args, **kwargs) if rule is not None else None


def _through_reference(
    grad: Tensor,
    needed: Sequence[bool],
    op: OpOverload,
    output_dtype: torch.dtype,
    args: Args,
    kwargs: Mapping[str, object],
) -> list[Tensor | None]:
    leaves, spec = tree_flatten(((op, output_dtype, *args), kwargs))
    positions = [i for i, need in enumerate(needed) if need]

    def function(*values: Tensor) -> Tensor:
        inner = list(leaves)
        for i, value in zip(positions, values, strict=True):
            inner[i] = value
        inner_args, inner_kwargs = tree_unflatten(inner, spec)
        return meaning.reference(*inner_args, **inner_kwargs)

    pullback = torch.func.vjp(function, *(leaves[i] for i in positions))[1]
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, value in zip(positions, pullback(grad), strict=True):
        grads[i] = value
    return grads


# ---- products


def _product(grad: Tensor, wanted: set[int], common: torch.dtype, product: Product, args: Args) -> Gradients:
    lhs, rhs = product.lhs, product.rhs
    multiply = aten.mm.default if lhs.dim() == 2 else aten.bmm.default
    plain = grad.reshape(*lhs.shape[:-1], rhs.shape[-1])
    scaled = plain if product.alpha == 1 else call(aten.mul.Scalar, common, plain, product.alpha)
    (left, right), restore = product.operands, product.restore
    grads = {}
    if left in wanted:
        d = call(multiply, _narrowest(args[left], lhs, common), scaled, rhs.mT)
        grads[left] = restore[0](d).sum_to_size(args[left].shape)
    if right in wanted:
        d = call(multiply, _narrowest(args[right], rhs, common), lhs.mT, scaled)
        grads[right] = restore[1](d).sum_to_size(args[right].shape)
    if product.added in wanted:
        grads[product.added] = _sum_to(grad.to(common) * product.beta, args[product.added])
    return grads


def _narrowest(argument: Tensor, operand: Tensor, common: torch.dtype) -> torch.dtype:
    """The argument's dtype, or the common dtype if the gradient of a broadcast argument still has to be summed."""
    return argument.dtype if argument.numel() == operand.numel() else common


def _sum_to(x: Tensor, like: object) -> Tensor:
    """The gradient of an argument that was broadcast; a number has none."""
    assert isinstance(like, Tensor)
    return x.sum_to_size(like.shape)


# ---- convolutions


def _convolution(grad: Tensor, wanted: set[int], common: torch.dtype, form: BiasedConvolution) -> Gradients:
    conv = form.conv
    g = grad.unsqueeze(0) if form.unbatched else grad
    grads = {}
    if 0 in wanted:
        d = call(aten.convolution.default, conv.x.dtype, *convolution_arguments(adjoint(conv, g)))
        grads[0] = input_of(conv, d).squeeze(0) if form.unbatched else input_of(conv, d)
    if 1 in wanted:
        grads[1] = _filter_gradient(conv, *((g, conv.x) if conv.transposed else (conv.x, g)))
    if 2 in wanted:
        grads[2] = g.to(common).sum([0, *range(2, g.dim())])
    return grads


def adjoint(conv: Convolution, grad: Tensor) -> Convolution:
    """The convolution that maps the result's gradient to the input's."""
    extra = [0] * len(conv.stride)
    if not conv.transposed:
        extra = [
            s - ((t - 1) * st - 2 * p + d * (k - 1) + 1)
            for s, t, st, p, d, k in zip(
                conv.x.shape[2:],
                grad.shape[2:],
                conv.stride,
                conv.padding,
                conv.dilation,
                conv.weight.shape[2:],
                strict=True,
            )
        ]
    lists = (conv.stride, conv.padding, conv.dilation)
    return Convolution(grad, conv.weight, *lists, not conv.transposed, extra, conv.groups)


def input_of(conv: Convolution, d: Tensor) -> Tensor:
    """The input's gradient, cut out of the result of `adjoint`."""
    for dim, size in enumerate(conv.x.shape[2:] if conv.transposed else (), start=2):
        d = d.narrow(dim, 0, size)  # an output padding of at least the stride leaves terms past the input
    return d


def _filter_gradient(conv: Convolution, wide: Tensor, narrow: Tensor) -> Tensor:
    d = call(aten.convolution.default, conv.weight.dtype, *convolution_arguments(filter_adjoint(conv, wide, narrow)))
    return filter_of(conv, d)


def filter_adjoint(conv: Convolution, wide: Tensor, narrow: Tensor) -> Convolution:
    """The convolution whose result contains the weight's gradient.

    `wide` is the side that the kernel slides over, `narrow` the other side; both are (N, C, *S).
    """
    n, channels, *size = wide.shape
    x = wide.transpose(0, 1)
    if conv.groups > 1:
        per_group = channels // conv.groups
        x = wide.reshape(n, conv.groups, per_group, *size).transpose(0, 2).reshape(per_group, conv.groups * n, *size)
    lists = (conv.dilation, conv.padding, conv.stride)
    return Convolution(x, narrow.transpose(0, 1), *lists, False, [0] * len(conv.stride), conv.groups)


def filter_of(conv: Convolution, d: Tensor) -> Tensor:
    """The weight's gradient, cut out of the result of `filter_adjoint`."""
    for dim, size in enumerate(conv.weight.shape[2:], start=2):
        d = d.narrow(dim, 0, size)  # a remainder of the stride leaves terms past the kernel
    return d.transpose(0, 1)


# ---- others: rule(grad, wanted, common, *args, **kwargs)


def _add(grad: Tensor, wanted: set[int], common: torch.dtype, x: object, y: object, alpha: object = 1) -> Gradients:
    grads = {}
    if 0 in wanted:
        grads[0] = _sum_to(grad.to(common), x)
    if 1 in wanted:
        grads[1] = _sum_to(call(aten.mul.Scalar, common, grad, alpha), y)
    return grads


def _sub(grad: Tensor, wanted: set[int], common: torch.dtype, x: object, y: object, alpha: complex = 1) -> Gradients:
    return _add(grad, wanted, common, x, y, -alpha)


def _mul(grad: Tensor, wanted: set[int], common: torch.dtype, x: object, y: object) -> Gradients:
    factors = {0: y, 1: x}
    return {i: _sum_to(call(aten.mul.Tensor, common, grad, factors[i]), (x, y)[i]) for i in wanted}


def _div(grad: Tensor, wanted: set[int], common: torch.dtype, x: object, y: object) -> Gradients:
    over_y = call(aten.div.Tensor, common, grad, y)
    grads = {}
    if 0 in wanted:
        grads[0] = _sum_to(over_y, x)
    if 1 in wanted:
        quotient = call(aten.div.Tensor, common, x, y)
        grads[1] = _sum_to(call(aten.mul.Tensor, common, over_y, quotient).neg(), y)
    return grads


def _sum(
    grad: Tensor,
    wanted: set[int],
    common: torch.dtype,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **_: object,
):
    return {0: _spread(grad, x, dim, keepdim)}


def _mean(
    grad: Tensor,
    wanted: set[int],
    common: torch.dtype,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **_: object,
):
    spread = _spread(grad, x, dim, keepdim)
    return {0: call(aten.div.Scalar, common, spread, x.numel() // max(grad.numel(), 1))}


def _spread(grad: Tensor, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    dims = [dim] if isinstance(dim, int) else dim
    if dims and not keepdim and x.dim():
        for d in sorted(d % x.dim() for d in dims):
            grad = grad.unsqueeze(d)
    return grad.expand(x.shape)


def _cumsum(grad: Tensor, wanted: set[int], common: torch.dtype, x: Tensor, dim: int, **_: object) -> Gradients:
    if x.dim() == 0:
        return {0: grad}
    return {0: call(aten.cumsum.default, common, grad.flip(dim), dim).flip(dim)}


def _clamp(
    grad: Tensor, wanted: set[int], common: torch.dtype, x: Tensor, low: float | None = None, high: float | None = None
) -> Gradients:
    return {0: call(aten.where.ScalarOther, x.dtype, _kept(x, common, low, high), grad, 0)}


def _kept(x: Tensor, common: torch.dtype, low: float | None = None, high: float | None = None) -> Tensor:
    """Mask of elements that clamp keeps, including the bounds.

    PyTorch's own gradient at the bounds is 1 up to version 2.13, and 0 since (pytorch#195931).
    """
    value = x.detach().to(common)
    kept = torch.ones_like(value, dtype=torch.bool)
    kept = kept if low is None else kept & (value >= low)
    return kept if high is None else kept & (value <= high)


def forward_mode(op: OpOverload, output_dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Tensor:
    """The value of `meaning.reference`, from operators whose derivatives agree with the rules above."""
    y = meaning.reference(op, output_dtype, *args, **kwargs)
    if op != aten.clamp.default:
        return y
    common = common_dtype(describe(op), output_dtype, args, kwargs)
    x, *bounds = args
    return torch.where(_kept(x, common, *bounds), x.to(meaning.run_dtype(op, common)).to(output_dtype), y)


def _avg_pool2d(grad: Tensor, wanted: set[int], common: torch.dtype, x: Tensor, *args: object) -> Gradients:
    kernel, stride, padding, ceil, include_pad, divisor = (*args, *(_AVG_POOL2D_DEFAULTS[len(args) :]))
    return {
        0: call(aten.avg_pool2d_backward.default, x.dtype, grad, x, kernel, stride, padding, ceil, include_pad, divisor)
    }


_AVG_POOL2D_DEFAULTS = (None, [], [0, 0], False, True, None)


def _embedding(
    grad: Tensor,
    wanted: set[int],
    common: torch.dtype,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Gradients:
    rows = weight.shape[0]
    return {
        0: call(
            aten.embedding_dense_backward.default, weight.dtype, grad, indices, rows, padding_idx, scale_grad_by_freq
        )
    }


_RULES: dict[OpOverload, Rule] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.cumsum.default: _cumsum,
    aten.clamp.default: _clamp,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.embedding.default: _embedding,
}
