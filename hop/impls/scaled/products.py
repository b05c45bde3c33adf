"""Products: exact sums of integers and their scales, group by group, or products of real numbers; then the bias."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """The exact integers of a group, and the scales by which they are multiplied."""

    total: Tensor  # int32; int64 of codes of 16 bits
    lhs: Tensor  # float32, broadcastable to it
    rhs: Tensor
    rows: Tensor | None = None  # the sums of the left codes, where the right factor has offsets
    offset: Tensor | None = None

    def real(self) -> Tensor:
        """(float32(total) · lhs) · rhs, less (float32(rows) · lhs) · offset."""
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
    """The sum of a product of integers whose scales come in one group, its bias included."""
    (term,) = sums(call)
    return with_bias(call, term)


def declines_one_sum(call: Call) -> str | None:
    """Why a product is not one of integers alone, or None."""
    if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
        return f"alpha and beta are {call.kwargs}"
    return None if all(is_integer(call.find(role)) for role in (LHS, RHS)) else "one factor is plain"


def in_order(terms: Sequence[Sum]) -> Tensor:
    """The sum of all groups."""
    return added([one.real() for one in terms])


def added(terms: Sequence[Tensor]) -> Tensor:
    """Their sum, from the first to the last."""
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
    """The sum with its bias. One of floats is rounded to the unit of the sum, and the two saturate."""
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
    """An aligned bias of floats in units of the sum, int64, at most `most`."""
    unit = term.lhs.to(torch.float64) * term.rhs.to(torch.float64)
    return (bias.to(torch.float64) / unit).round().clamp(-most, most).to(torch.int64)


def aligned(call: Call, bias: Tensor) -> Tensor:
    """The bias in a shape that broadcasts to the result."""
    if call.roles.family is not CONVOLUTION:
        return bias
    return bias.view(-1, *[1] * (call.find(RHS).dim() - 2))


def product(call: Call, lhs: Tensor, rhs: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
    """The operator without its bias, of other factors, by `run` or by itself."""
    op = call.roles.product
    assert op is not None
    rest = call.args[2:]
    arguments = (lhs, rhs, None, *rest[1:]) if call.roles.family is CONVOLUTION else (lhs, rhs)
    return op(*arguments) if run is None else run(op, *arguments)


def _exactly(op: OpOverload, *args: Any) -> Tensor:
    return out_dtype(op, torch.int32, *args)


def _exactly_wide(op: OpOverload, *args: Any) -> Tensor:
    return out_dtype(op, torch.int64, *args)


def has_wide_sums(*operands: Operand) -> bool:
    """Whether a sum of products takes 64 bits: one of codes of 16."""
    return any(x.quantizer.format.bits > 8 for x in operands)


def sums(call: Call) -> list[Sum]:
    """The sums of a product of integer operands, a group after the other. Those that are described are one, whose
    scales have no form yet."""
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
        product(call, a, b, exactly)  # has PyTorch's words for it
    if tracing.is_describing():
        return [_without(Sum(product(call, a, b, exactly), lhs.scale, rhs.scale), row, column)]
    for start, length, of_lhs, of_rhs in groups(lhs, rhs, along):
        own = cut(a, -1, start, length)
        terms.append(
            Sum(
                product(call, own, cut(b, along, start, length), exactly),
                group_scale(lhs, -1, of_lhs),
                _of_columns(rhs, along, of_rhs),
                own.sum(-1, keepdim=True, dtype=torch.int32) if rhs.quantizer.scale.has_offset() else None,
                _of_columns(rhs, along, of_rhs, "offset") if rhs.quantizer.scale.has_offset() else None,
            )
        )
    return [_without(s, row, column) for s in terms] if row or column else terms


def cut(x: Tensor, dim: int, start: int, length: int | None) -> Tensor:
    return x if length is None else x.narrow(dim, start, length)


def groups(lhs: Operand, rhs: Operand, along: int) -> list[tuple[int, int | None, int, int]]:
    """Where the groups of the summed dimension start, how long they are (None for all of it), and the block of each
    operand that they lie in."""
    size = lhs.shape[-1]
    a, b = (along_sum(g, dim) for g, dim in ((lhs, -1), (rhs, along)))
    if a is None and b is None:
        return [(0, None, 0, 0)]
    n = int(size)  # a graph has so many groups
    if n == 0:
        return [(0, None, 0, 0)]
    edges = sorted({e for step in (a, b) if step is not None for e in range(0, n, step)} | {n})
    return [
        (start, end - start, start // a if a else 0, start // b if b else 0) for start, end in itertools.pairwise(edges)
    ]


def along_sum(operand: Operand, dim: int) -> int | None:
    """The size of a block along the summed dimension, None if one block is all of it."""
    b = operand.block[dim]
    return None if b == -1 or tracing.known_equal(operand.scale.shape[dim], 1) else b


def _of_columns(rhs: Operand, along: int, group: int, name: str = "scale") -> Tensor:
    scale = group_scale(rhs, along, group, name)
    return scale.squeeze(-1) if along == -1 else scale


def group_scale(operand: Operand, along: int, group: int, name: str = "scale") -> Tensor:
    """The scale of each row or column in a group, or its offset, in a shape that broadcasts to the result."""
    dim = len(operand.block) + along
    step = operand.buffers[name]
    if tracing.known_equal(step.shape[dim], 0):  # a sum of nothing
        step = step.new_ones([*step.shape[:dim], 1, *step.shape[dim + 1 :]])
    step = step.narrow(dim, group, 1)
    block = tuple(-1 if d == dim else b for d, b in enumerate(operand.block))
    return spread(step, block, operand.shape)


def zeros(operand: Operand, along: int) -> Tensor | int:
    """The zero point of each row or column, as a column or a row of int32; 0 if there is none."""
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
    """The scale of a convolution's input, of one for each example at most."""
    return spread(x.scale, x.block, x.shape)


def channel_scale(call: Call, weight: Operand) -> Tensor:
    """The scale of a convolution's weight, of one for each output channel at most, beside the result."""
    transposed, groups = is_transposed(call)
    step = spread(weight.scale, weight.block, weight.shape)
    own = step.transpose(0, 1) if transposed else step
    channels = own.reshape(-1)
    if transposed and groups > 1 and not tracing.known_equal(channels.shape[0], 1):
        channels = channels.repeat(groups)
    return channels.view(-1, *[1] * (weight.dim() - 2))


def is_transposed(call: Call) -> tuple[bool, int]:
    """Whether a convolution is transposed, and its groups."""
    named = {"groups": 1, "transposed": "transpose" in call.op._schema.name}
    for argument, value in zip(call.op._schema.arguments, call.args, strict=False):
        named[argument.name] = value
    return named["transposed"], named["groups"]


def _without(s: Sum, row: bool, column: bool) -> Sum:
    """A product with vectors has no dimensions for them."""

    def shaped(x: Tensor) -> Tensor:
        x = x.squeeze(-1) if column and x.dim() > 0 else x
        return x.squeeze(-1 if column else -2) if row and x.dim() > (not column) else x

    return Sum(*(None if x is None else shaped(x) for x in s))  # type: ignore[arg-type]
