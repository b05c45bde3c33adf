"""The table of ATen operators: all that the library knows about them, used by every other module.

An operator has a family, which defines its meaning, and its arguments have roles:

lhs, rhs    the factors of a product
bias        added to the result: real values, or, if int32, multiples of the product of the scales
other       an argument that may be quantized, of an operator that is not a product
index       an index tensor, passed on unchanged
condition   a boolean tensor that selects one of two operands, passed on unchanged
mask        booleans that select elements, or floats that are added
""          not a tensor

To support a family in scaled, add rows here whose operators have roles, and the file named by the family in
hop/impls/scaled/families/. tests/impls/test_operators_table.py lists the families that other modules support, and the
reasons why one of them leaves out an operator.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args
from hop.dispatch.own_operators import GELU_MUL, HADAMARD, SILU_MUL

aten = torch.ops.aten

LHS, RHS, BIAS, OTHER, INDEX, CONDITION, MASK = "lhs", "rhs", "bias", "other", "index", "condition", "mask"


@dataclass(frozen=True)
class Family:
    """Operators with one meaning."""

    name: str
    is_linear: bool = False  # sums of products: integers modulo 2^bits may be computed in any wider type
    moves: bool = False  # elements of the result are operands' elements, chosen by position only
    file: str = ""  # file in hop/impls/scaled/families/ with scaled's rule for it


MATRIX = Family("matrix product", is_linear=True, file="matrix")
VECTOR = Family("vector product", is_linear=True)
CONVOLUTION = Family("convolution", is_linear=True, file="convolution")
EMBEDDING = Family("embedding", file="embedding")
MULTIPLY = Family("multiplication", is_linear=True, file="elementwise")
ADD = Family("addition", is_linear=True, file="elementwise")
MEAN = Family("mean", file="mean")  # and average pooling
INTERPOLATE = Family("linear interpolation", file="mean")  # weighted means
CONCATENATE = Family("concatenation", moves=True, file="choices")
BOUND = Family("clamp", file="choices")
MAXIMUM = Family("maximum pooling", file="choices")
EXTREME = Family("largest or smallest element", file="choices")
NEAREST = Family("nearest neighbor", file="choices")  # elements repeated along dimensions
VIEW = Family("view", moves=True, file="choices")
MOVE = Family("copy or reordering", moves=True)
SUM = Family("sum", is_linear=True, file="sums")  # and running sums
LENGTH = Family("vector norm", file="sums")
DIVIDE = Family("division", file="elementwise")
CHOICE = Family("choice of two", file="elementwise")
PRELU = Family("leaky relu by channel", file="elementwise")
FUNCTION = Family("function of each element", file="functions")
GATED = Family("gated product", file="functions")
SOFTMAX = Family("softmax", file="softmax")
NORM = Family("norm", file="norms")
TRANSFORM = Family("Hadamard transform", file="hadamard")
OWN = (FUNCTION, GATED, SOFTMAX, NORM, TRANSFORM, SUM, LENGTH, MEAN, INTERPOLATE)  # by functions and sums of our own
ATTENTION = Family("attention", file="attention")


@dataclass(frozen=True)
class Operator:
    """An operator of the table, and the roles of its arguments."""

    family: Family
    # roles of the positional arguments up to the last tensor; empty if scaled does not run the operator
    roles: tuple[str, ...] = ()
    product: OpOverload | None = None  # the same operator without a bias
    rhs_sums: int = -2  # the dimension of rhs that is summed over
    spatial: int = 0  # number of dimensions that a convolution or pooling slides over, 0 for any number
    transposed: bool = False
    bounds: tuple[float | None, float | None] = (None, None)  # bounds of the result, if no argument gives them
    stays: bool = False  # each element of the result has the position of the operand's element

    def role(self, position: int) -> str | None:
        return self.roles[position] if position < len(self.roles) else None

    def find(self, role: str, args: Args) -> Any:
        """The argument with `role`, None if there is none."""
        position = self.roles.index(role) if role in self.roles else len(args)
        return args[position] if position < len(args) else None


_FACTORS, _BIASED = (LHS, RHS), (LHS, RHS, BIAS)
_ONE, _TWO = (OTHER,), (OTHER, OTHER)
_VIEW, _COPY, _MOVE = Operator(VIEW, _ONE), Operator(VIEW, _ONE, stays=True), Operator(MOVE)

TABLE: dict[OpOverload, Operator] = {
    aten.mm.default: Operator(MATRIX, _FACTORS, aten.mm.default),
    aten.bmm.default: Operator(MATRIX, _FACTORS, aten.bmm.default),
    aten.addmm.default: Operator(MATRIX, (BIAS, LHS, RHS), aten.mm.default),
    aten.baddbmm.default: Operator(MATRIX, (BIAS, LHS, RHS), aten.bmm.default),
    aten.matmul.default: Operator(MATRIX, _FACTORS, aten.matmul.default),
    aten.linear.default: Operator(MATRIX, _BIASED, aten.linear.default, rhs_sums=-1),
    **dict.fromkeys((aten.mv.default, aten.dot.default), Operator(VECTOR)),
    **{
        op: Operator(CONVOLUTION, _BIASED, op, spatial=spatial, transposed=transposed)
        for op, spatial, transposed in (
            (aten.convolution.default, 0, False),
            *((aten.conv1d.default, 1, False), (aten.conv1d.padding, 1, False)),
            *((aten.conv2d.default, 2, False), (aten.conv2d.padding, 2, False)),
            *((aten.conv3d.default, 3, False), (aten.conv3d.padding, 3, False)),
            *((aten.conv_transpose1d.default, 1, True), (aten.conv_transpose2d.input, 2, True)),
            (aten.conv_transpose3d.input, 3, True),
        )
    },
    aten.embedding.default: Operator(EMBEDDING, (RHS, INDEX)),
    aten.mul.Tensor: Operator(MULTIPLY, _TWO),
    aten.mul.Scalar: Operator(MULTIPLY, _ONE),
    aten.div.Tensor: Operator(DIVIDE, _TWO),
    aten.div.Scalar: Operator(DIVIDE, _ONE),
    **dict.fromkeys((aten.maximum.default, aten.minimum.default), Operator(CHOICE, _TWO)),
    aten.where.self: Operator(CHOICE, (CONDITION, OTHER, OTHER)),
    aten.prelu.default: Operator(PRELU, _TWO),
    **dict.fromkeys(
        (
            *(aten.exp.default, aten.exp2.default, aten.log.default, aten.tanh.default, aten.erf.default),
            *(aten.sigmoid.default, aten.rsqrt.default, aten.gelu.default, aten.silu.default),
            *(
                aten.hardswish.default,
                aten.hardsigmoid.default,
                aten.leaky_relu.default,
                aten.sqrt.default,
                aten.sin.default,
                aten.cos.default,
            ),
        ),
        Operator(FUNCTION, _ONE),
    ),
    **dict.fromkeys((SILU_MUL, GELU_MUL), Operator(GATED, _TWO)),
    **dict.fromkeys(
        (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default),
        Operator(SOFTMAX, _ONE),
    ),
    aten.layer_norm.default: Operator(NORM, (OTHER, "", OTHER, BIAS)),
    aten.rms_norm.default: Operator(NORM, (OTHER, "", OTHER)),
    aten.batch_norm.default: Operator(NORM, (OTHER, OTHER, BIAS, OTHER, OTHER)),
    HADAMARD: Operator(TRANSFORM, _ONE),
    aten.scaled_dot_product_attention.default: Operator(ATTENTION, (OTHER, OTHER, OTHER, MASK)),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), Operator(ADD, _TWO)),
    **dict.fromkeys((aten.add.Scalar, aten.sub.Scalar), Operator(ADD, _ONE)),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default), Operator(SUM, _ONE)),
    aten.linalg_vector_norm.default: Operator(LENGTH, _ONE),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), Operator(MEAN, _ONE)),
    **dict.fromkeys((aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default), Operator(MEAN, _ONE, spatial=1)),
    **dict.fromkeys((aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default), Operator(MEAN, _ONE, spatial=2)),
    **dict.fromkeys((aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default), Operator(MEAN, _ONE, spatial=3)),
    **dict.fromkeys(
        (aten.upsample_linear1d.default, aten.upsample_linear1d.vec), Operator(INTERPOLATE, _ONE, spatial=1)
    ),
    **dict.fromkeys(
        (aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec), Operator(INTERPOLATE, _ONE, spatial=2)
    ),
    **dict.fromkeys(
        (aten.upsample_trilinear3d.default, aten.upsample_trilinear3d.vec), Operator(INTERPOLATE, _ONE, spatial=3)
    ),
    aten.cat.default: Operator(CONCATENATE, _ONE),
    aten.stack.default: Operator(CONCATENATE),
    aten.relu.default: Operator(BOUND, _ONE, bounds=(0.0, None)),
    aten.relu6.default: Operator(BOUND, _ONE, bounds=(0.0, 6.0)),
    **dict.fromkeys((aten.clamp.default, aten.hardtanh.default), Operator(BOUND, _ONE)),
    **dict.fromkeys((aten.amax.default, aten.amin.default), Operator(EXTREME, _ONE)),
    aten.max_pool1d.default: Operator(MAXIMUM, _ONE, spatial=1),
    aten.max_pool2d.default: Operator(MAXIMUM, _ONE, spatial=2),
    aten.max_pool3d.default: Operator(MAXIMUM, _ONE, spatial=3),
    **dict.fromkeys(
        (
            *(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec),
            *(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default),
        ),
        Operator(NEAREST, _ONE),
    ),
    **dict.fromkeys(
        (
            *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int),
            *(aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim),
            *(aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.narrow.default),
            *(aten.permute.default, aten.movedim.int, aten.movedim.intlist),
        ),
        _VIEW,
    ),
    **dict.fromkeys((aten.clone.default, aten.contiguous.default, aten.alias.default), _COPY),
    **dict.fromkeys(
        (
            *(aten._unsafe_view.default, aten.detach.default, aten.lift_fresh_copy.default, aten.flip.default),
            *(aten.repeat.default, aten.index_select.default),
        ),
        _MOVE,
    ),
}

UNKNOWN = Operator(Family("unknown"))
"""The row of operators that are not in the table."""

SCALED = {op: row for op, row in TABLE.items() if row.roles}
"""The operators that scaled runs."""


def of(op: object) -> Operator:
    """The row of an operator; UNKNOWN for other operators and other targets of a node."""
    return TABLE.get(op, UNKNOWN)  # type: ignore[call-overload]


@functools.cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, cached: PyTorch creates a new list for every access."""
    return tuple(a.name for a in op._schema.arguments)


def within(*families: Family) -> frozenset[OpOverload]:
    """The operators of the given families."""
    return frozenset(op for op, row in TABLE.items() if row.family in families)
