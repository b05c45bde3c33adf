"""Products: exact integer sums with their scales, group by group, or float products; then the bias."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.compat.eager import OpOverload
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, CONVOLUTION, LHS, RHS, aten
from hop.impls.out_dtype import out_dtype_operator as out_dtype
from hop.impls.scaled.calls import (
    Call,
    compute_dtype,
    has_stored_sums,
    is_integer,
    usage,
    values,
)
from hop.impls.scaled.operands import centered, in_integers, plain, spread, unsqueezed
from hop.kernels.aten.convolution import lay_out


class Sum(NamedTuple):
    """The exact integer sums of a group, and the scales they are multiplied by."""

    total: Tensor  # int32; int64 for 16-bit codes
    lhs: Tensor  # float32, broadcastable to `total`
    rhs: Tensor
    rows: Tensor | None = None  # sums of the left codes, if the right factor has offsets
    offset: Tensor | None = None

    def real(self) -> Tensor:
        """(float32(total) · lhs) · rhs, minus (float32(rows) · lhs) · offset."""
        if tracing.is_describing():
            return self.total.to(torch.float32)
        product = self.total.to(torch.float32) * self.lhs * self.rhs
        if self.rows is None or self.offset is None:
            return product
        return product - self.rows.to(torch.float32) * self.lhs * self.offset


def real_product(call: Call) -> Tensor:
    lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
    if is_integer(lhs) and is_integer(rhs):
        terms = sums(call)
        if bias is not None and not bias.is_floating_point():
            (one,) = terms
            terms, bias = [one._replace(total=one.total + aligned(call, bias))], None
        y = in_order(terms)
    elif has_stored_sums(call):
        y = in_order(sums(call))
    else:
        dtype = compute_dtype(call)
        sides = [
            values(x, dtype, usage(call, role) if isinstance(x, Operand) else "")
            for x, role in ((lhs, LHS), (rhs, RHS))
        ]
        y = product(call, *sides)
        if call.roles.family is CONVOLUTION:
            y = lay_out(y, *sides)
    return biased(call, y, bias)


def one_sum(call: Call) -> Sum:
    """The sum of an integer product with one group of scales, including its bias."""
    (term,) = sums(call)
    return with_bias(call, term)


def declines_one_sum(call: Call) -> str | None:
    """The reason why a product is not a single integer sum; None if it is."""
    if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
        return f"alpha and beta are {call.kwargs}"
    return None if all(is_integer(call.find(role)) for role in (LHS, RHS)) else "one factor is not quantized"


def in_order(terms: Sequence[Sum]) -> Tensor:
    """The sum of all groups, in order."""
    return added([one.real() for one in terms])


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, from first to last."""
    y = terms[0]
    for term in terms[1:]:
        y = y + term
    return y


def biased(call: Call, y: Tensor, bias: Tensor | None) -> Tensor:
    """y · alpha + bias · beta."""
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    if alpha != 1:
        y = y * alpha
    if bias is None or beta == 0:
        return y
    bias = aligned(call, bias.to(y.dtype))
    return y + (bias if beta == 1 else bias * beta)


def with_bias(call: Call, term: Sum) -> Sum:
    """Add the bias to the sum. A float bias is rounded to the sum's unit, and the result saturates."""
    bias = call.find(BIAS)
    if bias is None or call.kwargs.get("beta", 1) == 0:
        return term
    bias = aligned(call, bias)
    if not bias.is_floating_point():
        return term._replace(total=term.total + bias)
    if term.total.dtype == torch.int64:
        return term._replace(total=term.total + bias_steps(term, bias, 2.0**46))
    total = (term.total.to(torch.int64) + bias_steps(term, bias)).clamp(-(2**31), 2**31 - 1)
    return term._replace(total=total.to(torch.int32))


def bias_steps(term: Sum, bias: Tensor, most: float = 2.0**32) -> Tensor:
    """An aligned float bias in units of the sum, int64, limited to ±`most`."""
    unit = term.lhs.to(torch.float64) * term.rhs.to(torch.float64)
    return (bias.to(torch.float64) / unit).round().clamp(-most, most).to(torch.int64)


def aligned(call: Call, bias: Tensor) -> Tensor:
    """Reshape the bias so that it broadcasts to the result."""
    if call.roles.family is not CONVOLUTION:
        return bias
    return bias.view(-1, *[1] * (call.find(RHS).dim() - 2))


def product(call: Call, lhs: Tensor, rhs: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
    """Run the operator without bias on other factors, with `run` if given."""
    op = call.roles.product
    assert op is not None
    rest = call.args[2:]
    arguments = (lhs, rhs, None, *rest[1:]) if call.roles.family is CONVOLUTION else (lhs, rhs)
    return op(*arguments) if run is None else run(op, *arguments)


def _exactly(op: OpOverload, *args: object) -> Tensor:
    return out_dtype(op, torch.int32, *args)


def _exactly_wide(op: OpOverload, *args: object) -> Tensor:
    return out_dtype(op, torch.int64, *args)


def has_wide_sums(*operands: Operand) -> bool:
    """Whether sums of products need 64 bits, because codes have 16."""
    return any(x.quantizer.format.bits > 8 for x in operands)


def sums(call: Call) -> list[Sum]:
    """The sums of a product of integer operands, one per group.

    While describing meta tensors, only one sum is returned, with scales of arbitrary shape.
    """
    lhs, rhs = (plain(in_integers(call.find(role), usage(call, role)), usage(call, role)) for role in (LHS, RHS))
    exactly = _exactly_wide if has_wide_sums(lhs, rhs) else _exactly
    if call.roles.family is CONVOLUTION:
        total = product(call, centered(lhs), centered(rhs), exactly)
        if tracing.is_describing():
            return [Sum(total, lhs.scale, rhs.scale)]
        return [Sum(total, batch_scale(lhs), channel_scale(call, rhs))]
    takes_vectors = call.op in (aten.matmul.default, aten.linear.default)
    row, column = (takes_vectors and g.dim() == 1 for g in (lhs, rhs))
    lhs = unsqueezed(lhs, 0) if row else lhs
    if column:
        rhs = unsqueezed(rhs, -1 if call.roles.rhs_sums == -2 else 0)
    terms = []
    a, b, along = centered(lhs), centered(rhs), call.roles.rhs_sums
    if min(a.dim(), b.dim()) < 2:
        product(call, a, b, exactly)  # raises PyTorch's own error
    if tracing.is_describing():
        return [_without(Sum(product(call, a, b, exactly), lhs.scale, rhs.scale), row, column)]
    for start, length, of_lhs, of_rhs in groups(lhs, rhs, along):
        part = cut(a, -1, start, length)
        terms.append(
            Sum(
                product(call, part, cut(b, along, start, length), exactly),
                group_scale(lhs, -1, of_lhs),
                _of_columns(rhs, along, of_rhs),
                part.sum(-1, keepdim=True, dtype=torch.int32) if rhs.quantizer.scale.has_offset() else None,
                _of_columns(rhs, along, of_rhs, "offset") if rhs.quantizer.scale.has_offset() else None,
            )
        )
    return [_without(s, row, column) for s in terms] if row or column else terms


def cut(x: Tensor, dim: int, start: int, length: int | None) -> Tensor:
    return x if length is None else x.narrow(dim, start, length)


def groups(lhs: Operand, rhs: Operand, along: int) -> list[tuple[int, int | None, int, int]]:
    """The groups of the summed dimension: start, length (None for all), and block index in each operand."""
    size = lhs.shape[-1]
    a, b = (along_sum(g, dim) for g, dim in ((lhs, -1), (rhs, along)))
    if a is None and b is None:
        return [(0, None, 0, 0)]
    n = int(size)  # a traced graph has one product per group
    if n == 0:
        return [(0, None, 0, 0)]
    edges = sorted({e for step in (a, b) if step is not None for e in range(0, n, step)} | {n})
    return [
        (start, end - start, start // a if a else 0, start // b if b else 0) for start, end in itertools.pairwise(edges)
    ]


def along_sum(operand: Operand, dim: int) -> int | None:
    """The block size along the summed dimension; None if one block spans it."""
    b = operand.block[dim]
    return None if b == -1 or tracing.known_equal(operand.scale.shape[dim], 1) else b


def _of_columns(rhs: Operand, along: int, group: int, name: str = "scale") -> Tensor:
    scale = group_scale(rhs, along, group, name)
    return scale.squeeze(-1) if along == -1 else scale


def group_scale(operand: Operand, along: int, group: int, name: str = "scale") -> Tensor:
    """The scale (or offset) of each row or column in a group, broadcastable to the result."""
    dim = len(operand.block) + along
    step = operand.buffers[name]
    if tracing.known_equal(step.shape[dim], 0):  # an empty sum
        step = step.new_ones([*step.shape[:dim], 1, *step.shape[dim + 1 :]])
    step = step.narrow(dim, group, 1)
    block = tuple(-1 if d == dim else b for d, b in enumerate(operand.block))
    return spread(step, block, operand.shape)


def zeros(operand: Operand, along: int) -> Tensor | int:
    """The zero point of each row or column, as an int32 column or row; 0 if there is none."""
    if isinstance(operand.zero, int):
        return operand.zero
    dim = len(operand.block) + along
    block = tuple(-1 if d == dim else b for d, b in enumerate(operand.block))
    zero = spread(operand.zero, block, operand.shape).to(torch.int32)
    if is_one(zero):
        return zero.reshape(1, 1)
    return zero if zero.dim() == 2 else zero.expand([*operand.shape[:-1], 1]).reshape(-1, 1)


def is_one(x: Tensor) -> bool:
    return all(tracing.known_equal(n, 1) for n in x.shape)


def batch_scale(x: Operand) -> Tensor:
    """The scale of a convolution's input, at most one per example."""
    return spread(x.scale, x.block, x.shape)


def channel_scale(call: Call, weight: Operand) -> Tensor:
    """The scale of a convolution's weight, at most one per output channel, broadcastable to the result."""
    transposed, groups = is_transposed(call)
    step = spread(weight.scale, weight.block, weight.shape)
    scale = step.transpose(0, 1) if transposed else step
    channels = scale.reshape(-1)
    if transposed and groups > 1 and not tracing.known_equal(channels.shape[0], 1):
        channels = channels.repeat(groups)
    return channels.view(-1, *[1] * (weight.dim() - 2))


def is_transposed(call: Call) -> tuple[bool, int]:
    """Whether a convolution is transposed, and its number of groups."""
    named = {"groups": 1, "transposed": "transpose" in call.op._schema.name}
    for argument, value in zip(call.op._schema.arguments, call.args, strict=False):
        named[argument.name] = value
    return named["transposed"], named["groups"]


def _without(s: Sum, row: bool, column: bool) -> Sum:
    """Remove the dimensions added for vectors."""

    def shaped(x: Tensor) -> Tensor:
        x = x.squeeze(-1) if column and x.dim() > 0 else x
        return x.squeeze(-1 if column else -2) if row and x.dim() > (not column) else x

    return Sum(*(None if x is None else shaped(x) for x in s))  # type: ignore[arg-type]
