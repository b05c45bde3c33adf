"""The operators that scaled runs, and the role of each of their arguments.

lhs, rhs    the factors of a product; the summed dimension of each
bias        added to the result, in real numbers, or in units of the product of scales if it holds int32
other       an argument that may be quantized, of an operator that is no product
index       says where, and stays as it is
"""

from dataclasses import dataclass
from typing import Any

import torch

from hop.compat.eager import OpOverload

aten = torch.ops.aten

LHS, RHS, BIAS, OTHER, INDEX = "lhs", "rhs", "bias", "other", "index"


@dataclass(frozen=True)
class Family:
    """Operators with one meaning."""

    name: str


MATRIX = Family("matrix product")
CONVOLUTION = Family("convolution")
EMBEDDING = Family("embedding")
MULTIPLY = Family("multiplication")
MEAN = Family("mean")  # and average pooling
ADD = Family("addition")
VALUE = Family("view, maximum or clamp")  # each element of the result is one of the operand's, or a bound


@dataclass(frozen=True)
class Roles:
    """What an operator is, and what its arguments are to it."""

    family: Family
    roles: tuple[str, ...]  # of the positional arguments, as far as they are tensors
    product: OpOverload | None = None  # the same without a bias
    rhs_sums: int = -2  # the dimension of rhs that is summed over

    def role(self, position: int) -> str | None:
        return self.roles[position] if position < len(self.roles) else None

    def find(self, role: str, args: tuple[Any, ...]) -> Any:
        """The argument with `role`, None if there is none."""
        position = self.roles.index(role) if role in self.roles else len(args)
        return args[position] if position < len(args) else None


NEAREST = (
    *(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec),
    *(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default),
)
"""Elements repeated along dimensions."""

_FACTORS, _BIASED = (LHS, RHS), (LHS, RHS, BIAS)
_ONE, _TWO = (OTHER,), (OTHER, OTHER)

ROLES: dict[OpOverload, Roles] = {
    aten.mm.default: Roles(MATRIX, _FACTORS, aten.mm.default),
    aten.bmm.default: Roles(MATRIX, _FACTORS, aten.bmm.default),
    aten.addmm.default: Roles(MATRIX, (BIAS, LHS, RHS), aten.mm.default),
    aten.baddbmm.default: Roles(MATRIX, (BIAS, LHS, RHS), aten.bmm.default),
    aten.matmul.default: Roles(MATRIX, _FACTORS, aten.matmul.default),
    aten.linear.default: Roles(MATRIX, _BIASED, aten.linear.default, rhs_sums=-1),
    aten.embedding.default: Roles(EMBEDDING, (RHS, INDEX)),
    aten.mul.Tensor: Roles(MULTIPLY, _TWO),
    aten.mul.Scalar: Roles(MULTIPLY, _ONE),
    aten.add.Tensor: Roles(ADD, _TWO),
    aten.add.Scalar: Roles(ADD, _ONE),
    aten.sub.Tensor: Roles(ADD, _TWO),
    aten.sub.Scalar: Roles(ADD, _ONE),
}
for _op in (
    *(aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
):
    ROLES[_op] = Roles(CONVOLUTION, _BIASED, _op)
for _op in (
    *(aten.mean.default, aten.mean.dim, aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
    *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
):
    ROLES[_op] = Roles(MEAN, _ONE)
for _op in (
    *(aten.cat.default, aten.relu.default, aten.relu6.default, aten.clamp.default, aten.hardtanh.default),
    *(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default),
    *NEAREST,
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.permute.default),
    *(aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim),
    *(aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.narrow.default),
    *(aten.clone.default, aten.contiguous.default, aten.movedim.int, aten.movedim.intlist, aten.alias.default),
):
    ROLES[_op] = Roles(VALUE, _ONE)
