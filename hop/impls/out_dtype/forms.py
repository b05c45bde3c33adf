"""Normal forms of matrix products and convolutions, shared by kernels, gradients and batching."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args
from hop.dispatch.operators import CONVOLUTION, aten, of, within
from hop.kernels.aten.convolution import Convolution

_View = Callable[[Tensor], Tensor]
Sizes = int | Sequence[int]
"""A size for each dimension, or one for all."""


def _same(x: Tensor) -> Tensor:
    return x


class Product(NamedTuple):
    """`finish(lhs @ rhs + row)` for lhs (M, K), rhs (K, N), or both with one batch dimension.

    lhs and rhs are views of two arguments of the operator. `finish` takes the product in any dtype, adds what the
    operator adds, and restores the operator's shape.
    """

    lhs: Tensor
    rhs: Tensor
    finish: _View = _same
    row: Tensor | None = None  # (N,); not part of `finish`, because a kernel may add it at lower cost
    operands: tuple[int, int] = (0, 1)  # the positions of lhs and rhs among the arguments
    # from gradients of lhs and rhs to the arguments' shapes, or broadcast ones
    restore: tuple[_View, _View] = (_same, _same)
    added: int | None = None  # the position of the summand
    alpha: complex = 1  # factor of the product
    beta: complex = 1  # factor of the summand

    @property
    def is_whole(self) -> bool:
        """Whether the product is the operator itself on two 2-D matrices, without views or summand."""
        views = (self.finish, *self.restore)
        return all(view is _same for view in views) and self.row is None and self.lhs.dim() == 2

    def complete(self, product: Tensor) -> Tensor:
        """The operator's result for the product lhs @ rhs."""
        return self.finish(product if self.row is None else product + self.row.to(product.dtype))


def as_product(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Product | None:
    """The matrix product that `op` computes; None if it is not one or the operands do not match."""
    form = _PRODUCTS.get(op)
    product = form(*args, **kwargs) if form is not None else None
    if product is None or not _fits(product.lhs, product.rhs):
        return None
    return product


def _fits(lhs: Tensor, rhs: Tensor) -> bool:
    return lhs.dim() == rhs.dim() and lhs.shape[-1] == rhs.shape[-2] and lhs.shape[:-2] == rhs.shape[:-2]


def _mm(lhs: Tensor, rhs: Tensor) -> Product | None:
    return Product(lhs, rhs) if lhs.dim() == rhs.dim() == 2 else None


def _bmm(lhs: Tensor, rhs: Tensor) -> Product | None:
    return Product(lhs, rhs) if lhs.dim() == rhs.dim() == 3 else None


def _addmm(self: Tensor, lhs: Tensor, rhs: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Product | None:
    shape = (*lhs.shape[:-1], rhs.shape[-1])
    if lhs.dim() != rhs.dim() or not _expands(self, shape):
        return None

    if self.dim() == 1 and alpha == 1 and beta == 1 and self.shape[0] == shape[-1]:
        return Product(lhs, rhs, row=self, operands=(1, 2), added=0)

    def finish(product: Tensor) -> Tensor:
        scaled = product if alpha == 1 else product * alpha
        if beta == 0:
            return scaled
        term = self.to(product.dtype)
        return scaled + (term if beta == 1 else term * beta)

    return Product(lhs, rhs, finish, operands=(1, 2), added=0, alpha=alpha, beta=beta)


def _expands(x: Tensor, shape: tuple[int, ...]) -> bool:
    if x.dim() > len(shape):
        return False
    return all(s in (1, t) for s, t in zip(reversed(x.shape), reversed(shape), strict=False))


def _addmm_2d(self: Tensor, lhs: Tensor, rhs: Tensor, **scale: complex) -> Product | None:
    return _addmm(self, lhs, rhs, **scale) if lhs.dim() == rhs.dim() == 2 else None


def _baddbmm(self: Tensor, lhs: Tensor, rhs: Tensor, **scale: complex) -> Product | None:
    return _addmm(self, lhs, rhs, **scale) if lhs.dim() == rhs.dim() == 3 else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None

    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    finish: _View = _same if x.dim() == 2 else lambda product: product.view(*x.shape[:-1], weight.shape[0])
    added = None if bias is None else 2
    return Product(rows, weight.t(), finish, bias, restore=(lambda d: d.view(x.shape), torch.t), added=added)


def _matmul(lhs: Tensor, rhs: Tensor) -> Product | None:
    if lhs.dim() == 0 or rhs.dim() == 0:
        return None
    a = lhs.unsqueeze(0) if lhs.dim() == 1 else lhs
    b = rhs.unsqueeze(1) if rhs.dim() == 1 else rhs
    if a.shape[-1] != b.shape[-2]:
        return None
    matrix_shape: tuple[int, ...]
    if b.dim() == 2:
        matrix_shape = (*a.shape[:-1], b.shape[-1])
        a = a.flatten(0, -2) if a.dim() > 2 else a
    else:
        try:
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            return None  # the reference raises PyTorch's error
        matrix_shape = (*lead, a.shape[-2], b.shape[-1])
        a = a.expand(*lead, *a.shape[-2:]).flatten(0, -3)
        b = b.expand(*lead, *b.shape[-2:]).flatten(0, -3)

    def finish(product: Tensor) -> Tensor:
        out = product.view(matrix_shape)
        out = out.squeeze(-1) if rhs.dim() == 1 else out
        return out.squeeze(-2 if rhs.dim() > 1 else -1) if lhs.dim() == 1 else out

    def restore_lhs(d: Tensor) -> Tensor:
        return d.view(*matrix_shape[:-1], a.shape[-1]).squeeze(-2) if lhs.dim() == 1 else d.view(*matrix_shape[:-1], -1)

    def restore_rhs(d: Tensor) -> Tensor:
        d = d.view(*matrix_shape[:-2], *b.shape[-2:]) if b.dim() > 2 else d
        return d.squeeze(-1) if rhs.dim() == 1 else d

    return Product(a, b, finish, restore=(restore_lhs, restore_rhs))


def _mv(matrix: Tensor, vector: Tensor) -> Product | None:
    if matrix.dim() != 2 or vector.dim() != 1:
        return None
    return Product(matrix, vector.unsqueeze(1), lambda y: y.squeeze(1), restore=(_same, lambda d: d.squeeze(1)))


def _dot(lhs: Tensor, rhs: Tensor) -> Product | None:
    if lhs.dim() != 1 or rhs.dim() != 1:
        return None
    restore: tuple[_View, _View] = (lambda d: d.squeeze(0), lambda d: d.squeeze(1))
    return Product(lhs.unsqueeze(0), rhs.unsqueeze(1), lambda y: y.view(()), restore=restore)


_PRODUCTS: dict[OpOverload, Callable[..., Product | None]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm_2d,
    aten.baddbmm.default: _baddbmm,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
}


class BiasedConvolution(NamedTuple):
    """A convolution, its bias, and whether the input has no batch dimension."""

    conv: Convolution
    bias: Tensor | None
    unbatched: bool


def as_convolution(op: OpOverload, args: Args) -> BiasedConvolution | None:
    """The convolution that `op` computes; None if it is not one, or padding is a string."""
    form = _CONVOLUTIONS.get(op)
    if form is None or args[0].dim() not in (args[1].dim(), args[1].dim() - 1):
        return None
    if (spatial := of(op).spatial) and args[1].dim() != spatial + 2:
        return None
    return form(*args)


def expand(value: Sizes, length: int) -> list[int]:
    """A size for each of `length` dimensions, from one for each or one for all."""
    if type(value) is list and len(value) == length:
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * length if len(values) == 1 else values


def _biased(
    x: Tensor, weight: Tensor, bias: Tensor | None, lists: Sequence[Sizes], transposed: bool, groups: int
) -> BiasedConvolution:
    spatial = weight.dim() - 2
    stride, padding, dilation, output_padding = (expand(v, spatial) for v in lists)
    unbatched = x.dim() == weight.dim() - 1
    x = x.unsqueeze(0) if unbatched else x
    conv = Convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return BiasedConvolution(conv, bias, unbatched)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> BiasedConvolution:
    return _biased(x, weight, bias, [stride, padding, dilation, output_padding], transposed, groups)


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> BiasedConvolution:
    return _biased(x, weight, bias, [stride, padding, dilation, 0], False, groups)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> BiasedConvolution:
    return _biased(x, weight, bias, [stride, padding, dilation, output_padding], True, groups)


_CONVOLUTIONS: dict[OpOverload, Callable[..., BiasedConvolution]] = {
    aten.convolution.default: _convolution,
    aten.conv1d.default: _conv,
    aten.conv2d.default: _conv,
    aten.conv3d.default: _conv,
    aten.conv_transpose1d.default: _conv_transpose,
    aten.conv_transpose2d.input: _conv_transpose,
    aten.conv_transpose3d.input: _conv_transpose,
}
# All overloads, including those that take padding as a string.
CONVOLUTIONS = frozenset(op.overloadpacket for op in within(CONVOLUTION))


def convolution_arguments(conv: Convolution, bias: Tensor | None = None) -> Args:
    """The arguments of aten.convolution.default for a convolution."""
    lists = (list(conv.stride), list(conv.padding), list(conv.dilation))
    return conv.x, conv.weight, bias, *lists, conv.transposed, list(conv.output_padding), conv.groups
