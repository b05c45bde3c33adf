"""Bounds of sums, matrix products and convolutions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from hop.compat import tracing
from hop.export.analysis.intervals.elements import elementwise, multiply, products
from hop.export.analysis.intervals.values import (
    Integers,
    Sum,
    Unknown,
    constant,
    fits,
    integer_bounds,
    integers,
    interval,
    single_interval,
)


def _size(n: int, what: str) -> int:
    result = tracing.largest(n)
    if result is None:
        raise Unknown(f"{what} has {n} elements, a number without an upper bound")
    return result


def _sum_bounds(count: int, low: int, high: int, *, fixed: bool) -> tuple[int, int]:
    """Bounds of a sum of `count` numbers in low to high; of at most `count` unless `fixed`."""
    return (count * low, count * high) if fixed else (min(0, count * low), max(0, count * high))


def sum_rule(
    node: Node, x: object, dims: Sequence[int] | None = None, keepdim: object = False, dtype: object = None
) -> Sum:
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    reduced = [d % len(shape) for d in dims] if dims else list(range(len(shape)))
    count, fixed = 1, True
    for d in reduced:
        count *= _size(shape[d], "the summed dimension")
        fixed &= isinstance(shape[d], int)
    hull = integer_bounds(x).hull()
    return Sum(*_sum_bounds(count, *hull, fixed=fixed), None, f"{count:,} numbers of {interval(*hull)}", True)


def matmul_rule(node: Node, a: object, b: object) -> Sum:
    """Bounds of (..., M, K) by (..., K, N)."""
    places = node.args[-2:]
    size = places[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    weight = constant(b)
    if weight is not None and weight.numel():
        return _weighted_sum(weight, _bounds_along(a, -1), -2, lambda t: t.unsqueeze(-2) if t.dim() > 1 else t)
    weight = constant(a)
    if weight is not None and weight.numel():
        return _weighted_sum(weight, _bounds_along(b, -2), -1, lambda t: t.unsqueeze(-1))
    count = _size(size, "the summed dimension")
    return _sum_of_products(count, a, b, fixed=isinstance(size, int))


def _sum_of_products(count: int, a: object, b: object, *, fixed: bool, zeros: bool = False) -> Sum:
    """Bounds of a sum of `count` products of two bounded factors, of which some may be zero if `zeros`."""
    x, y = integer_bounds(a).hull(), integer_bounds(b).hull()
    limits = products(x, y) + ([0] if zeros else [])
    most = f"{count:,}" if fixed else f"{count:,} at most"
    known = f"{most} products, {interval(*x)} by {interval(*y)}"
    return Sum(*_sum_bounds(count, min(limits), max(limits), fixed=fixed), None, known, True)


def _bounds_along(x: object, dim: int) -> Integers:
    """Bounds for each index along a dimension, or one interval if the bounds do not tell indices apart."""
    values = integer_bounds(x)
    if values.is_single() or values.low.dim() < -dim or values.high.shape != values.low.shape:
        return single_interval(values)
    if values.low.shape[dim] == 1:
        return single_interval(values)
    others = [d for d in range(values.low.dim()) if d != values.low.dim() + dim]
    return Integers(values.low.amin(others), values.high.amax(others)) if others else values


def _weighted_sum(weight: Tensor, x: Integers, dim: int, shaped: Callable[[Tensor], Tensor]) -> Sum:
    """Bounds of the sum along `dim` of known weights times factors in x, which has one interval or one per index.

    Each weight multiplies the bound of its factor that makes the product largest, or smallest, so the bounds are
    attained. `shaped` gives the bounds per channel a shape that broadcasts to the result's.
    """
    low, high = x.hull()
    least, greatest = int(weight.min()), int(weight.max())
    count = weight.shape[dim]
    known = f"weights {'x'.join(map(str, weight.shape))}, factors {interval(low, high)}"
    if not fits(count * least, count * greatest, *(count * p for p in products((least, greatest), (low, high)))):
        total = _sum_of_products(count, integers(least, greatest), x, fixed=True)
        return Sum(total.low, total.high, None, known, True)
    positive, negative = weight.clamp(min=0), weight.clamp(max=0)
    if x.is_single():
        up, down = (w.sum(dim, dtype=torch.int64) for w in (positive, negative))
        parts = Integers(up * low + down * high, up * high + down * low)
    else:
        limits = [t.unsqueeze(-1) if dim == -2 else t for t in (x.low, x.high)]
        weighted = lambda a, b: (positive * a + negative * b).sum(dim)  # noqa: E731
        parts = Integers(weighted(limits[0], limits[1]), weighted(limits[1], limits[0]))
    parts = Integers(shaped(parts.low), shaped(parts.high))
    return Sum(*parts.hull(), parts, known, True)


def addmm_rule(node: Node, bias: object, a: object, b: object, beta: object = 1, alpha: object = 1) -> Sum:
    product = matmul_rule(node, a, b)
    if alpha != 1:
        raise Unknown(f"alpha={alpha}")
    return product if beta == 0 else _with_bias(product, multiply(bias, beta))


def _with_bias(total: Sum, bias: object) -> Sum:
    low, high = integer_bounds(bias).hull()
    known = f"{total.known}, bias {interval(low, high)}"
    if total.parts is None:
        return Sum(total.low + low, total.high + high, None, known, True)
    both = elementwise(lambda x, y: [x[0] + y[0], x[1] + y[1]], total.parts, bias)
    return Sum(both.low, both.high, both.parts, known, True)


def convolution_rule(
    node: Node,
    x: object,
    weight: object,
    bias: object,
    stride: object,
    padding: Sequence[int],
    dilation: object,
    transposed: bool,
    out: object,
    g: int,
) -> Sum:
    shape = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    kernel = len(shape) - 2
    pads = transposed or any(not isinstance(p, int) or p for p in padding)
    factors = single_interval(integer_bounds(x))
    if pads:  # padding multiplies by zeros or omits products
        factors = integers(min(0, factors.hull()[0]), max(0, factors.hull()[1]))
    known = constant(weight)
    if known is not None and known.numel():
        flat = known.reshape(g, known.shape[0] // g, known.shape[1], -1)
        flat = flat.transpose(1, 2) if transposed else flat  # groups, output channels, summed dimensions
        result = _weighted_sum(
            flat.reshape(flat.shape[0] * flat.shape[1], -1), factors, -1, lambda t: t.view(-1, *[1] * kernel)
        )
        text = f"weights {'x'.join(map(str, known.shape))}, factors {interval(*factors.hull())}"
        result = Sum(result.low, result.high, result.parts, text, True)
    else:
        channels = shape[0] // g if transposed else shape[1]
        count, fixed = _size(channels, "the summed dimension"), all(isinstance(n, int) for n in shape)
        for n in shape[2:]:
            count *= _size(n, "the kernel")
        result = _sum_of_products(count, factors, weight, fixed=fixed, zeros=bool(pads))
    if bias is None:
        return result
    bias_range = integer_bounds(bias)
    shaped = (
        bias_range
        if bias_range.is_single()
        else Integers(*(t.view(-1, *[1] * kernel) for t in (bias_range.low, bias_range.high)))
    )
    return _with_bias(result, shaped)
