"""The meaning of scaled, in plain ATen.

Integer operands. The products of codes, each less its zero point, are summed exactly, modulo 2^32, over each group of
the summed dimension in which no scale changes; then, in float32, each operation rounded by itself,

    y = Σ_groups (float32(sum) · s_lhs) · s_rhs          in the order of the groups
    y = y · alpha + bias · beta                          where there are alpha, beta and bias

A bias of int32 is added to the sum instead. Other operands are dequantized to float32, float64 if one of them has that
dtype, and the operator runs in it. Means are taken in float64 and rounded to float32.

The result is cast once to a dtype, or quantized once, as hop.quantize does or as hop.requantization says.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop import _compile, blocks, copies
from hop._compile import OpOverload
from hop.formats import Integer
from hop.impls.out_dtype import operator as out_dtype
from hop.impls.quantize.arguments import fitting_scales
from hop.impls.scaled.operands import Grid, Operand, block_of, grid, spread
from hop.impls.scaled.roles import (
    ADD,
    BIAS,
    CONVOLUTION,
    EMBEDDING,
    INDEX,
    LHS,
    MATRIX,
    MEAN,
    MULTIPLY,
    RHS,
    ROLES,
    VALUE,
    Roles,
    aten,
)
from hop.kernels.convolution import lay_out
from hop.leaves import quantize_buffers
from hop.quantizer import Quantizer
from hop.scaling import Given

Output = torch.dtype | Quantizer


class Call(NamedTuple):
    """A call of scaled, its quantized arguments as Operands."""

    op: OpOverload
    output: Output
    output_scale: Tensor | None
    output_zero_point: Tensor | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def roles(self) -> Roles:
        return ROLES[self.op]

    @property
    def device(self) -> torch.device:
        return tensors(self.args)[0].device

    def find(self, role: str) -> Any:
        """The argument with `role`, None if there is none."""
        return self.roles.find(role, self.args)


class Sum(NamedTuple):
    """The exact integers of a group, and the scales by which they are multiplied."""

    total: Tensor  # int32
    lhs: Tensor  # float32, broadcastable to it
    rhs: Tensor

    def real(self) -> Tensor:
        """(float32(total) · lhs) · rhs."""
        return self.total.to(torch.float32) * self.lhs * self.rhs


def reference(call: Call) -> Any:
    """What scaled returns: a tensor, or the buffers of a quantized one."""
    if by_sum(call.output):
        return requantized(call, exact(call))
    return finish(call, real(call))


def by_sum(output: Output) -> bool:
    """Whether the output is found from the integer sum, and not from the float that it stands for."""
    return isinstance(output, Quantizer) and isinstance(output.scale, Given) and output.scale.requantize.exact


def real(call: Call) -> Tensor:
    """The result before it is cast or quantized."""
    return _REAL[call.roles.family](call)


def finish(call: Call, y: Tensor) -> Any:
    """`y` as the output wants it."""
    if isinstance(call.output, torch.dtype):
        return y.to(call.output, copy=True) if y.dtype == call.output and _is_view(call) else y.to(call.output)
    y = activated(call, y)
    scale, zero_point = fitted(call, y.shape)
    return quantize_buffers(str(call.output), y.to(torch.float32), scale, zero_point, None, [copies.ROWWISE])


def activated(call: Call, y: Tensor) -> Tensor:
    """`y` within the range of the output's fused activation."""
    rule = call.output.scale  # type: ignore[union-attr]
    if not isinstance(rule, Given) or (rule.requantize.low, rule.requantize.high) == (None, None):
        return y
    return y.clamp(rule.requantize.low, rule.requantize.high)


def fitted(call: Call, shape: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    """The scale and zero point of the output in the shapes of their buffers, for a result of `shape`."""
    assert isinstance(call.output, Quantizer)
    return fitting_scales(
        "scaled", "output_", call.output, shape, call.device, call.output_scale, call.output_zero_point
    )


def _is_view(call: Call) -> bool:
    return call.roles.family is VALUE


def compute_dtype(call: Call) -> torch.dtype:
    """float64 if a plain operand has that dtype, else float32."""
    plain = [x for x in tensors(call.args) if isinstance(x, Tensor)]
    return torch.float64 if any(x.dtype == torch.float64 for x in plain) else torch.float32


def tensors(args: Sequence[Any]) -> list[Any]:
    """The tensors and Operands among arguments, those of lists included."""
    flat = [x for a in args for x in (a if isinstance(a, list | tuple) and not isinstance(a, Operand) else [a])]
    return [x for x in flat if isinstance(x, Tensor | Operand)]


def values(x: Any, dtype: torch.dtype, usage: str = "") -> Any:
    """A tensor or an Operand in real numbers; anything else as it is."""
    if isinstance(x, Operand):
        return x.values(usage).to(dtype)
    if isinstance(x, list | tuple):
        return [values(v, dtype) for v in x]
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def is_integer(x: Any) -> bool:
    """Whether x is an operand whose codes can be multiplied as integers."""
    return isinstance(x, Operand) and isinstance(x.quantizer.format, Integer) and not x.quantizer.flat


def usage(call: Call, role: str) -> str:
    """The copy of an operand that a product reads: the one whose last dimension is summed over, if there is one."""
    operand = call.find(role)
    turned = role == RHS and call.roles.family is MATRIX and call.roles.rhs_sums == -2 and operand.dim() == 2
    wanted = copies.COLUMNWISE if turned else copies.ROWWISE
    return wanted if wanted in operand.usages else operand.usages[0]


# ---- products


def _product(call: Call) -> Tensor:
    lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
    if is_integer(lhs) and is_integer(rhs):
        found = sums(call)
        if bias is not None and not bias.is_floating_point():
            (one,) = found
            found, bias = [one._replace(total=one.total + _aligned(call, bias))], None
        y = in_order(found)
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


def in_order(found: Sequence[Sum]) -> Tensor:
    """The sum of all groups."""
    return added([one.real() for one in found])


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
    bias = _aligned(call, bias.to(y.dtype))
    return y + (bias if beta == 1 else bias * beta)


def _aligned(call: Call, bias: Tensor) -> Tensor:
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


def sums(call: Call) -> list[Sum]:
    """The sums of a product of integer operands, a group after the other."""
    lhs, rhs = (grid(call.find(role), usage(call, role)) for role in (LHS, RHS))
    if call.roles.family is CONVOLUTION:
        total = product(call, lhs.centered(), rhs.centered(), _exactly)
        return [Sum(total, batch_scale(lhs), channel_scale(call, rhs))]
    takes_vectors = call.op in (aten.matmul.default, aten.linear.default)
    row, column = (takes_vectors and g.codes.dim() == 1 for g in (lhs, rhs))
    lhs = lhs.unsqueeze(0) if row else lhs
    if column:
        rhs = rhs.unsqueeze(-1 if call.roles.rhs_sums == -2 else 0)
    found = []
    a, b, along = lhs.centered(), rhs.centered(), call.roles.rhs_sums
    if min(a.dim(), b.dim()) < 2:
        product(call, a, b, _exactly)  # has PyTorch's words for it
    for start, length, of_lhs, of_rhs in groups(lhs, rhs, along):
        part = product(call, cut(a, -1, start, length), cut(b, along, start, length), _exactly)
        of_columns = group_scale(rhs, along, of_rhs)
        of_columns = of_columns.squeeze(-1) if along == -1 else of_columns
        found.append(Sum(part, group_scale(lhs, -1, of_lhs), of_columns))
    return [_without(s, row, column) for s in found] if row or column else found


def cut(x: Tensor, dim: int, start: int, length: int | None) -> Tensor:
    return x if length is None else x.narrow(dim, start, length)


def groups(lhs: Grid, rhs: Grid, along: int) -> list[tuple[int, int | None, int, int]]:
    """Where the groups of the summed dimension start, how long they are (None for all of it), and the block of each
    operand that they lie in."""
    size = lhs.codes.shape[-1]
    a, b = (_along(g, dim) for g, dim in ((lhs, -1), (rhs, along)))
    if a is None and b is None:
        return [(0, None, 0, 0)]
    n = int(size)  # a graph has so many groups
    if n == 0:
        return [(0, None, 0, 0)]
    edges = sorted({e for step in (a, b) if step is not None for e in range(0, n, step)} | {n})
    return [
        (start, end - start, start // a if a else 0, start // b if b else 0) for start, end in itertools.pairwise(edges)
    ]


def _along(operand: Grid, dim: int) -> int | None:
    """The size of a block along the summed dimension, None if one block is all of it."""
    b = operand.block[dim]
    return None if b == -1 or _compile.known_equal(operand.step.shape[dim], 1) else b


def group_scale(operand: Grid, along: int, group: int) -> Tensor:
    """The scale of each row or column in a group, in a shape that broadcasts to the result."""
    dim = len(operand.block) + along
    step = operand.step
    if _compile.known_equal(step.shape[dim], 0):  # a sum of nothing
        step = step.new_ones([*step.shape[:dim], 1, *step.shape[dim + 1 :]])
    step = step.narrow(dim, group, 1)
    block = tuple(-1 if d == dim else b for d, b in enumerate(operand.block))
    return spread(step, block, operand.codes.shape)


def batch_scale(x: Grid) -> Tensor:
    """The scale of a convolution's input, of one for each example at most."""
    return spread(x.step, x.block, x.codes.shape)


def channel_scale(call: Call, weight: Grid) -> Tensor:
    """The scale of a convolution's weight, of one for each output channel at most, beside the result."""
    transposed, groups = is_transposed(call)
    step = spread(weight.step, weight.block, weight.codes.shape)
    own = step.transpose(0, 1) if transposed else step
    channels = own.reshape(-1)
    if transposed and groups > 1 and not _compile.known_equal(channels.shape[0], 1):
        channels = channels.repeat(groups)
    return channels.view(-1, *[1] * (weight.codes.dim() - 2))


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

    return Sum(*map(shaped, s))


# ---- others


def _embedding(call: Call) -> Tensor:
    weight, *rest = call.args
    return call.op(values(weight, torch.float32), *rest)


def _multiply(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    return a * b


def _add(call: Call) -> Tensor:
    a, b = (values(x, compute_dtype(call)) for x in call.args[:2])
    alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
    b = b if alpha == 1 else b * alpha  # by itself: ATen's own kernels would round once
    return a - b if call.op.overloadpacket is aten.sub else a + b


def _value(call: Call) -> Tensor:
    args = [values(x, compute_dtype(call)) for x in call.args]
    return call.op(*args, **call.kwargs)


def _mean(call: Call) -> Tensor:
    x, *rest = call.args
    dtype, wide = compute_dtype(call), torch.float64
    kwargs = {name: v for name, v in call.kwargs.items() if name != "dtype"}
    if not is_integer(x) or copies.ROWWISE not in x.usages:
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    own = grid(x, copies.ROWWISE)
    reduced = _reduced(call, x.dim())
    if not all(own.block[d] == -1 or _compile.known_equal(own.step.shape[d], 1) for d in reduced):
        return call.op(values(x, dtype).to(wide), *rest, **kwargs).to(dtype)
    y = call.op(own.centered().to(wide), *rest, **kwargs).to(dtype)
    step = spread(own.step, own.block, x.shape)
    if call.op.overloadpacket is aten.mean:
        step = call.op(step, *rest, **kwargs)  # of single numbers
    return y * step


def _reduced(call: Call, ndim: int) -> list[int]:
    """The dimensions that a mean is taken over."""
    name = call.op._schema.name
    if call.op is aten.mean.dim and call.args[1]:
        dims = call.args[1]
        return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]
    if call.op.overloadpacket is aten.mean:
        return list(range(ndim))
    return list(range(ndim - int(name[-2]), ndim))  # ..._pool2d


_REAL: dict[Any, Callable[[Call], Tensor]] = {
    MATRIX: _product,
    CONVOLUTION: _product,
    EMBEDDING: _embedding,
    MULTIPLY: _multiply,
    ADD: _add,
    MEAN: _mean,
    VALUE: _value,
}


# ---- requantization from the exact sum


def exact_declines(call: Call) -> str | None:
    """Why a call is not one exact sum, or None."""
    family = call.roles.family
    operands = [x for x in tensors(call.args) if isinstance(x, Operand)]
    if not all(is_integer(x) for x in operands):
        return "its operands are no integers"
    if family in (MATRIX, CONVOLUTION):
        if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
            return f"alpha and beta are {call.kwargs}"
        if not all(is_integer(call.find(role)) for role in (LHS, RHS)):
            return "one factor is plain"
        if family is MATRIX:
            lhs, rhs = call.find(LHS), call.find(RHS)
            sides = ((lhs, LHS, -1), (rhs, RHS, -1 if rhs.dim() == 1 else call.roles.rhs_sums))
            if any(block_of(x, usage(call, role))[dim] != -1 for x, role, dim in sides):
                return "its scales come in groups, each with a sum of its own"
        return None
    if family is MULTIPLY:
        return None if call.op is aten.mul.Tensor and len(operands) == 2 else "one factor is plain"
    if family is VALUE and call.op not in _BOUNDED:
        (x,) = operands if len(operands) == 1 else (None,)
        whole = x is not None and all(b == -1 for b in blocks.per_dimension(x.quantizer.block, x.dim()))
        return None if whole else "it takes one operand with one scale"
    return f"{call.op} is none"


_BOUNDED = frozenset({aten.clamp.default, aten.hardtanh.default, aten.cat.default})


def exact(call: Call) -> Sum:
    """The one sum of a call, its bias included."""
    family = call.roles.family
    if family is MULTIPLY:
        a, b = (grid(x, x.usages[0]) for x in call.args[:2])
        total = a.centered().to(torch.int32) * b.centered().to(torch.int32)
        return Sum(total, *(spread(g.step, g.block, g.codes.shape) for g in (a, b)))
    if family is VALUE:
        own = grid(call.args[0], call.args[0].usages[0])
        total = call.op(own.centered().to(torch.float32), *call.args[1:], **call.kwargs).to(torch.int32)
        step = own.step.reshape(())
        return Sum(total, step, torch.ones_like(step))
    (found,) = sums(call)
    return with_bias(call, found)


def with_bias(call: Call, found: Sum) -> Sum:
    """The sum with its bias. One of floats is rounded to the unit of the sum, and the two saturate."""
    bias = call.find(BIAS)
    if bias is None or call.kwargs.get("beta", 1) == 0:
        return found
    bias = _aligned(call, bias)
    if not bias.is_floating_point():
        return found._replace(total=found.total + bias)
    unit = found.lhs.to(torch.float64) * found.rhs.to(torch.float64)
    steps = (bias.to(torch.float64) / unit).round().clamp(-(2.0**32), 2.0**32).to(torch.int64)
    total = (found.total.to(torch.int64) + steps).clamp(-(2**31), 2**31 - 1)
    return found._replace(total=total.to(torch.int32))


def requantized(call: Call, found: Sum) -> list[Tensor]:
    """The buffers of the output, by its convention."""
    q = call.output
    assert isinstance(q, Quantizer) and isinstance(q.scale, Given) and isinstance(q.format, Integer)
    shape = list(found.total.shape)
    block = blocks.per_dimension(q.block, len(shape))
    scale, zero_point = fitted(call, shape)
    assert scale is not None
    stored, zero = [scale], q.format.zero
    if zero_point is not None:
        zero_point = zero_point.round() if zero_point.is_floating_point() else zero_point
        stored.append(zero_point.clamp(q.format.low, q.format.high).to(q.format.dtype))
        zero = spread(stored[1], block, shape).to(torch.int32)
    scale = spread(scale, block, shape)
    codes = q.scale.requantize.codes(found.total, found.lhs, found.rhs, scale, zero, q.format).contiguous()
    codes = q.format.pack(codes.reshape(shape or [1])) if q.per_byte() > 1 else codes
    return [codes, *(t.clone(memory_format=torch.contiguous_format) for t in stored)]


def shape(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[int]:
    """The shape of the result, whatever the operands are quantized to."""

    def described(x: Any, role: str | None) -> Any:
        if isinstance(x, list | tuple) and not isinstance(x, Operand):
            return [described(v, role) for v in x]
        if not isinstance(x, Operand | Tensor):
            return x
        dtype = x.dtype if isinstance(x, Tensor) and role == INDEX else torch.float32
        return torch.empty(tuple(x.shape), dtype=dtype, device="meta")

    return list(op(*(described(x, ROLES[op].role(i)) for i, x in enumerate(args)), **kwargs).shape)
