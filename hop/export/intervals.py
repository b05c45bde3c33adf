"""Interval arithmetic on core ATen: from what is known of the operands of a node to bounds of its value.

    Known      the value itself, as of parameters and of all that is made of them
    Integers   bounds of an integer or a boolean, for the whole tensor or for parts of it: they broadcast to its shape
    Reals      bounds of floats, and whether there may be a NaN

Bounds of integers are exact: they are computed in int64 where that holds every number on the way, and with Python's
integers otherwise. Bounds of floats are what the operator itself gives for the bounds of its operands, in their dtypes;
as rounding keeps order, no rounded result lies outside of them. What has no rule has no bounds but those of its dtype.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from hop import _compile

aten = torch.ops.aten
_LARGEST = 2**63 - 1
FEW = 2**16  # elements, up to which each one has bounds of its own


@dataclass(frozen=True)
class Known:
    value: Any


@dataclass(frozen=True)
class Integers:
    low: Tensor  # int64
    high: Tensor

    def hull(self) -> tuple[int, int]:
        if self.low.numel() == 0:
            return 0, 0
        return int(self.low.min()), int(self.high.max())

    def one(self) -> bool:
        """Whether there is one interval for all elements."""
        return self.low.numel() == 1 and self.high.numel() == 1


@dataclass(frozen=True)
class Reals:
    low: float = -math.inf
    high: float = math.inf
    nan: bool = True


class Unknown(Exception):
    """Why nothing is known."""


@dataclass(frozen=True)
class Sum:
    """What an operator computes before it is brought to the dtype of its result: exact bounds, and what they are made
    of."""

    low: int
    high: int
    parts: Integers | None  # the same element by element, if int64 holds them
    known: str
    is_product: bool = False


def integers(low: int, high: int) -> Integers:
    return Integers(torch.tensor(low), torch.tensor(high))


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


class Nothing:
    """Of a symbolic number, or of a tensor that is neither of integers nor of real numbers."""


def anything(x: Any) -> Any:
    """What the dtype of a value says of it."""
    if isinstance(x, list | tuple):
        return tuple(map(anything, x))
    if not isinstance(x, Tensor) or x.dtype.is_complex or x.dtype == torch.uint64:
        return Nothing()
    return integers(*dtype_range(x.dtype)) if is_integer(x.dtype) else Reals()


def bounds(x: Any) -> Any:
    """Integers or Reals; a number, or one that is known, has itself as both bounds."""
    value = x.value if isinstance(x, Known) else x
    if isinstance(value, bool | int):
        return integers(int(value), int(value)) if -_LARGEST <= value <= _LARGEST else Reals(float(value), float(value))
    if isinstance(value, float):
        return Reals(value, value, math.isnan(value)) if not math.isnan(value) else Reals()
    if isinstance(value, Tensor):
        if value.dtype.is_complex or value.dtype == torch.uint64:
            raise Unknown(f"values of {value.dtype}")
        if is_integer(value.dtype):
            wide = value.detach().to(torch.int64)
            return Integers(wide, wide)
        if value.numel() == 0:
            return Reals(0.0, 0.0, False)
        wide = value.detach().to(torch.float64)
        numbers = wide[~wide.isnan()]
        ends = (numbers.min().item(), numbers.max().item()) if numbers.numel() else (-math.inf, math.inf)
        return Reals(*ends, numbers.numel() < wide.numel())
    if isinstance(value, Integers | Reals):
        return value
    raise Unknown("an operand of which nothing is known")


def reals(x: Any) -> Reals:
    """Bounds as floats that hold them."""
    found = bounds(x)
    if isinstance(found, Reals):
        return found
    low, high = found.hull()
    return Reals(math.nextafter(float(low), -math.inf) if int(float(low)) > low else float(low), _above(high), False)


def _above(n: int) -> float:
    return math.nextafter(float(n), math.inf) if int(float(n)) < n else float(n)


def _whole(x: Any) -> Integers:
    found = bounds(int(x) if isinstance(x, float) and x.is_integer() else x)
    if not isinstance(found, Integers):
        raise Unknown("a float where an integer is expected")
    return found


def _one(x: Integers) -> Integers:
    return x if x.one() else integers(*x.hull())


def _fits(*numbers: int) -> bool:
    return all(-_LARGEST - 1 <= n <= _LARGEST for n in numbers)


def _interval(low: int, high: int) -> str:
    return f"{low:,}..{high:,}" if low != high else f"{low:,}"


def concrete(shape: Iterable[Any]) -> list[int] | None:
    """A shape without symbols."""
    found = list(shape)
    return found if all(isinstance(n, int) for n in found) else None


# ---- element by element


def _elementwise(corners: Callable[..., list[Any]], *operands: Any) -> Sum:
    """Of an operator whose extremes are at bounds of its operands: `corners(*intervals)` computes it there."""
    given = [_whole(x) for x in operands]
    known = " and ".join(_interval(*x.hull()) for x in given)
    ends = corners(*(x.hull() for x in given))
    low, high = min(ends), max(ends)
    if not _fits(*ends):
        return Sum(low, high, None, known)
    shape = torch.broadcast_shapes(*(t.shape for x in given for t in (x.low, x.high)))
    if math.prod(shape) > max(FEW, *(x.low.numel() for x in given)):
        return Sum(low, high, integers(low, high), known)
    found = torch.broadcast_tensors(*(torch.as_tensor(t) for t in corners(*((x.low, x.high) for x in given))))
    parts = Integers(*(_extreme(found, f) for f in (torch.minimum, torch.maximum)))
    return Sum(*parts.hull(), parts, known)


def _extreme(tensors: Iterable[Tensor], function: Callable[..., Tensor]) -> Tensor:
    first, *rest = tensors
    for t in rest:
        first = function(first, t)
    return first


def _products(a: Any, b: Any) -> list[Any]:
    return [x * y for x, y in product(a, b)]


def _scaled(x: Any, by: Any) -> Any:
    if by == 1:
        return x
    if not isinstance(by, int):
        raise Unknown(f"a factor of {by}")
    found = _elementwise(_products, x, by)
    if found.parts is None:
        raise Unknown(f"{by} times an operand exceeds 64 bits")
    return found.parts


def _add(node: Node, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _elementwise(lambda x, y: [x[0] + y[0], x[1] + y[1]], a, _scaled(b, alpha))


def _sub(node: Node, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _elementwise(lambda x, y: [x[0] - y[1], x[1] - y[0]], a, _scaled(b, alpha))


def divisor_of_remainder(node: Node) -> Any:
    """n, if a node is x - floor(x / n) * n: a remainder, of which bounds of x and of the product say little. Otherwise
    None."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x, taken = node.args
    if not (isinstance(taken, Node) and taken.target is aten.mul.Tensor):
        return None
    for quotient, by in (taken.args, taken.args[::-1]):
        floor = isinstance(quotient, Node) and quotient.target is aten.div.Tensor_mode
        if floor and quotient.kwargs == {"rounding_mode": "floor"} and quotient.args == (x, by):  # type: ignore[union-attr]
            return by
    return None


def remainder(by: Any) -> Integers | None:
    """What remains after a division by a positive number."""
    divisor = bounds(by)
    if not isinstance(divisor, Integers) or divisor.hull()[0] <= 0:
        return None
    return Integers(torch.zeros_like(divisor.high), divisor.high - 1)


def _mul(node: Node, a: Any, b: Any) -> Any:
    if node.args[0] is node.args[1]:  # a square
        low, high = _whole(a).hull()
        ends = [low * low, high * high] + ([0] if low < 0 < high else [])
        return Sum(min(ends), max(ends), None, f"the square of {_interval(low, high)}")
    return _elementwise(_products, a, b)


def _neg(node: Node, a: Any) -> Any:
    return _elementwise(lambda x: [-x[0], -x[1]], a)


def _abs(node: Node, a: Any) -> Any:
    low, high = _whole(a).hull()
    ends = [abs(low), abs(high)]
    return Sum(0 if low <= 0 <= high else min(ends), max(ends), None, _interval(low, high))


def _floor_divide(node: Node, a: Any, b: Any, rounding_mode: Any = None) -> Any:
    divisor = _whole(b)
    low, high = divisor.hull()
    if rounding_mode not in ("floor", "trunc") or low <= 0 <= high:
        raise Unknown("a quotient by a number that may be 0" if low <= 0 <= high else f"rounding {rounding_mode}")

    def quotient(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return torch.div(x, y, rounding_mode=rounding_mode)
        down = x // y
        return down + 1 if rounding_mode == "trunc" and down < 0 and down * y != x else down

    return _elementwise(lambda x, y: [quotient(*ends) for ends in product(x, y)], a, divisor)


def _remainder(node: Node, a: Any, b: Any) -> Any:
    found = remainder(b)
    if found is None:
        raise Unknown("a remainder by a number that may not be positive")
    return found


def _bitwise_and(node: Node, a: Any, b: Any) -> Any:
    ends = [x.hull() for x in (_whole(a), _whole(b))]
    positive = [high for low, high in ends if low >= 0]
    if not positive:
        raise Unknown("bits of two numbers that may be negative")
    return integers(0, min(positive))


def _clamp(node: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    found = _whole(x)
    for limit, function in ((low, torch.maximum), (high, torch.minimum)):
        if limit is not None:
            found = _limited(found, _whole(limit), function)
    return found


def _limited(a: Integers, b: Integers, function: Callable[..., Tensor]) -> Integers:
    if math.prod(torch.broadcast_shapes(a.low.shape, b.low.shape, a.high.shape, b.high.shape)) > max(
        FEW, a.low.numel(), b.low.numel()
    ):
        a, b = _one(a), _one(b)
    return Integers(function(a.low, b.low), function(a.high, b.high))


def _maximum(node: Node, a: Any, b: Any) -> Any:
    return _limited(_whole(a), _whole(b), torch.maximum)


def _minimum(node: Node, a: Any, b: Any) -> Any:
    return _limited(_whole(a), _whole(b), torch.minimum)


def _relu(node: Node, x: Any) -> Any:
    return _limited(_whole(x), integers(0, 0), torch.maximum)


def _where(node: Node, condition: Any, a: Any, b: Any) -> Any:
    x, y, known = _whole(a), _whole(b), _constant(condition)
    if known is not None and known.numel() and (known.all() or not known.any()):
        return x if known.all() else y
    return Integers(_limited(x, y, torch.minimum).low, _limited(x, y, torch.maximum).high)


# ---- what moves or chooses among elements


def _chosen(node: Node, x: Any, *rest: Any, **kwargs: Any) -> Any:
    """Values among those of x."""
    given = list(map(_whole, x)) if isinstance(x, list | tuple) else [_whole(x)]
    if all(g.one() for g in given) and len({g.hull() for g in given}) == 1:
        return _one(given[0])
    first = node.args[0]
    nodes: Any = first if isinstance(first, list | tuple) else [first]
    shapes = [shape for n in nodes if (shape := concrete(n.meta["val"].shape)) is not None]
    others = tree_leaves((rest, kwargs))
    if len(shapes) == len(given) and all(math.prod(s) <= FEW for s in shapes) and all(_is_plain(o) for o in others):

        def moved(tensors: list[Tensor]) -> Any:
            spread = [t.expand(s) for t, s in zip(tensors, shapes, strict=True)]
            operand = spread if isinstance(first, list | tuple) else spread[0]
            given_rest = tree_map(lambda o: o.value if isinstance(o, Known) else o, (rest, kwargs))
            return node.target(operand, *given_rest[0], **given_rest[1])  # type: ignore[operator]

        return Integers(moved([g.low for g in given]), moved([g.high for g in given]))
    if node.target in _KEEP_LAST and given[0].low.dim() <= 1 and given[0].high.dim() <= 1:
        sizes = (first.meta["val"].shape[-1:], node.meta["val"].shape[-1:])  # type: ignore[union-attr]
        if len(sizes[1]) == 1 and _compile.known_equal(sizes[0][0], sizes[1][0]):
            return given[0]
    hulls = [g.hull() for g in given]
    return integers(min(h[0] for h in hulls), max(h[1] for h in hulls))


def _is_plain(x: Any) -> bool:
    numbers = bool | int | float | None
    return isinstance(x, Known | numbers | torch.dtype | torch.memory_format | torch.layout | torch.device)


def _hull_of(node: Node, x: Any, *rest: Any, **kwargs: Any) -> Any:
    return _one(_whole(x))


def _hull_and_index(node: Node, x: Any, *rest: Any, **kwargs: Any) -> Any:
    value = node.meta["val"]
    own = _one(_whole(x)) if is_integer(value[0].dtype) else bounds(x)
    return (own, *(anything(v) for v in value[1:]))


def _padded(node: Node, x: Any, pad: Any, value: Any = 0) -> Any:
    (low, high), (a, b) = _whole(x).hull(), _whole(value).hull()
    return integers(min(low, a), max(high, b))


# ---- sums


def _size(n: Any, what: str) -> int:
    found = _compile.largest(n)
    if found is None:
        raise Unknown(f"{what} has {n} elements, a number without an upper bound")
    return found


def _times(count: int, low: int, high: int, *, fixed: bool) -> tuple[int, int]:
    """Bounds of a sum of `count` numbers, or of up to as many."""
    return (count * low, count * high) if fixed else (min(0, count * low), max(0, count * high))


def _sum(node: Node, x: Any, dims: Any = None, keepdim: Any = False, dtype: Any = None) -> Any:
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    reduced = [d % len(shape) for d in dims] if dims else list(range(len(shape)))
    count, fixed = 1, True
    for d in reduced:
        count *= _size(shape[d], "the summed dimension")
        fixed &= isinstance(shape[d], int)
    own = _whole(x).hull()
    return Sum(*_times(count, *own, fixed=fixed), None, f"{count:,} numbers of {_interval(*own)}", True)


def _constant(x: Any) -> Tensor | None:
    return x.value if isinstance(x, Known) and isinstance(x.value, Tensor) else None


def _matmul(node: Node, a: Any, b: Any) -> Sum:
    """(..., M, K) by (..., K, N)."""
    places = node.args[-2:]
    size = places[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    weight = _constant(b)
    if weight is not None and weight.numel():
        return _by_weights(weight, _along(a, -1), -2, lambda t: t.unsqueeze(-2) if t.dim() > 1 else t)
    weight = _constant(a)
    if weight is not None and weight.numel():
        return _by_weights(weight, _along(b, -2), -1, lambda t: t.unsqueeze(-1))
    count = _size(size, "the summed dimension")
    return _of_factors(count, a, b, fixed=isinstance(size, int))


def _of_factors(count: int, a: Any, b: Any, *, fixed: bool, zeros: bool = False) -> Sum:
    """The sum of so many products of two factors of which nothing but bounds is known."""
    x, y = _whole(a).hull(), _whole(b).hull()
    ends = _products(x, y) + ([0] if zeros else [])
    most = f"{count:,}" if fixed else f"{count:,} at most"
    known = f"{most} products, {_interval(*x)} by {_interval(*y)}"
    return Sum(*_times(count, min(ends), max(ends), fixed=fixed), None, known, True)


def _along(x: Any, dim: int) -> Integers:
    """Bounds for each place along a dimension, or for all of them."""
    found = _whole(x)
    if found.one() or found.low.dim() < -dim or found.high.shape != found.low.shape:
        return _one(found)
    if found.low.shape[dim] == 1:
        return _one(found)
    others = [d for d in range(found.low.dim()) if d != found.low.dim() + dim]
    return Integers(found.low.amin(others), found.high.amax(others)) if others else found


def _by_weights(weight: Tensor, x: Integers, dim: int, shaped: Callable[[Tensor], Tensor]) -> Sum:
    """The sum along `dim` of known weights times factors in x, one interval for all or one for each place. Each weight
    meets the bound of its factor that makes the product large, or small: these sums are reached."""
    low, high = x.hull()
    least, greatest = int(weight.min()), int(weight.max())
    count = weight.shape[dim]
    known = f"weights {'x'.join(map(str, weight.shape))}, factors {_interval(low, high)}"
    if not _fits(count * least, count * greatest, *(count * p for p in _products((least, greatest), (low, high)))):
        found = _of_factors(count, integers(least, greatest), x, fixed=True)
        return Sum(found.low, found.high, None, known, True)
    positive, negative = weight.clamp(min=0), weight.clamp(max=0)
    if x.one():
        up, down = (w.sum(dim, dtype=torch.int64) for w in (positive, negative))
        parts = Integers(up * low + down * high, up * high + down * low)
    else:
        ends = [t.unsqueeze(-1) if dim == -2 else t for t in (x.low, x.high)]
        of_bounds = lambda a, b: (positive * a + negative * b).sum(dim)  # noqa: E731
        parts = Integers(of_bounds(ends[0], ends[1]), of_bounds(ends[1], ends[0]))
    parts = Integers(shaped(parts.low), shaped(parts.high))
    return Sum(*parts.hull(), parts, known, True)


def _addmm(node: Node, bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Sum:
    found = _matmul(node, a, b)
    if alpha != 1:
        raise Unknown(f"alpha={alpha}")
    return found if beta == 0 else _with_bias(found, _scaled(bias, beta))


def _with_bias(found: Sum, bias: Any) -> Sum:
    low, high = _whole(bias).hull()
    known = f"{found.known}, bias {_interval(low, high)}"
    if found.parts is None:
        return Sum(found.low + low, found.high + high, None, known, True)
    both = _elementwise(lambda x, y: [x[0] + y[0], x[1] + y[1]], found.parts, bias)
    return Sum(both.low, both.high, both.parts, known, True)


def _convolution(
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    out: Any,
    g: Any,
) -> Sum:
    shape = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    kernel = len(shape) - 2
    pads = transposed or any(not isinstance(p, int) or p for p in padding)
    factors = _one(_whole(x))
    if pads:  # some products are with zeros, or left out
        factors = integers(min(0, factors.hull()[0]), max(0, factors.hull()[1]))
    known = _constant(weight)
    if known is not None and known.numel():
        flat = known.reshape(g, known.shape[0] // g, known.shape[1], -1)
        flat = flat.transpose(1, 2) if transposed else flat  # groups, channels of the result, and what is summed
        found = _by_weights(
            flat.reshape(flat.shape[0] * flat.shape[1], -1), factors, -1, lambda t: t.view(-1, *[1] * kernel)
        )
        text = f"weights {'x'.join(map(str, known.shape))}, factors {_interval(*factors.hull())}"
        found = Sum(found.low, found.high, found.parts, text, True)
    else:
        channels = shape[0] // g if transposed else shape[1]
        count, fixed = _size(channels, "the summed dimension"), all(isinstance(n, int) for n in shape)
        for n in shape[2:]:
            count *= _size(n, "the kernel")
        found = _of_factors(count, factors, weight, fixed=fixed, zeros=bool(pads))
    if bias is None:
        return found
    own = _whole(bias)
    shaped = own if own.one() else Integers(*(t.view(-1, *[1] * kernel) for t in (own.low, own.high)))
    return _with_bias(found, shaped)


# ---- casts


def _cast(node: Node, x: Any, **kwargs: Any) -> Any:
    dtype = node.meta["val"].dtype
    found = bounds(x)
    low, high = dtype_range(dtype)
    if dtype == torch.bool:
        return integers(low, high)
    if isinstance(found, Integers):
        return found
    if found.nan or not (low <= found.low and found.high <= high):
        return integers(low, high)  # of what the dtype does not hold, any number of it is made
    return integers(math.trunc(found.low), math.trunc(found.high))


_MOVES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
    *(aten.unsqueeze.default, aten.clone.default, aten.alias.default, aten.cat.default, aten.index_select.default),
    *(aten.flip.default, aten.repeat.default, aten.detach.default, aten.lift_fresh_copy.default, aten.t.default),
    *(aten.transpose.int, aten.contiguous.default, aten.stack.default),
)
_KEEP_LAST = frozenset({aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.expand.default})
_CHOOSE = (
    *(aten.gather.default, aten.index.Tensor, aten.embedding.default, aten.amax.default, aten.amin.default),
    *(aten.as_strided.default,),
)
PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default),
        *(aten.sum.dim_IntList, aten.sum.default, aten._int_mm.default),
    }
)
MOVES = frozenset(_MOVES)
UNFILLED = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
)
FILLED = frozenset({aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default})

RULES: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.neg.default: _neg,
    aten.abs.default: _abs,
    aten.div.Tensor_mode: _floor_divide,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.bitwise_and.Tensor: _bitwise_and,
    aten.bitwise_and.Scalar: _bitwise_and,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.relu.default: _relu,
    aten.where.self: _where,
    **dict.fromkeys(_MOVES, _chosen),
    **dict.fromkeys(_CHOOSE, _hull_of),
    aten.max_pool2d_with_indices.default: _hull_and_index,
    aten.max_pool3d_with_indices.default: _hull_and_index,
    aten.max.dim: _hull_and_index,
    aten.min.dim: _hull_and_index,
    aten.constant_pad_nd.default: _padded,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mm.default: _matmul,
    aten._int_mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten._to_copy.default: _cast,
}


# ---- floats


def float_rule(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reals:
    """Bounds of a float."""
    target = node.target
    if target in MOVES or target in _CHOOSE:
        given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        found = [reals(x) for x in given]
        return Reals(min(r.low for r in found), max(r.high for r in found), any(r.nan for r in found))
    if target is aten.where.self:
        a, b = reals(args[1]), reals(args[2])
        if _tests_for_nan(node):
            a = Reals(a.low, a.high, nan=False)
        return Reals(min(a.low, b.low), max(a.high, b.high), a.nan or b.nan)
    if target not in _MONOTONE:
        return Reals()
    operands = [reals(x) for x in args if not isinstance(x, type(None))]
    if target in _FACTORS and (kwargs or any(math.isinf(e) for r in operands for e in (r.low, r.high))):
        return Reals()  # zero times infinity
    if target is aten.div.Tensor and operands[1].low <= 0 <= operands[1].high:
        return Reals()
    places = [i for i, (n, x) in enumerate(zip(node.args, args, strict=False)) if isinstance(n, Node)]
    ends = []
    for corner in product(*(_ends(node.args[i], args[i]) for i in places)):
        given = [x.value if isinstance(x, Known) else x for x in args]
        for i, end in zip(places, corner, strict=True):
            given[i] = end
        ends.append(target(*given, **kwargs).to(torch.float64).item())  # type: ignore[operator]
    if any(map(math.isnan, ends)):
        return Reals()
    return Reals(min(ends), max(ends), any(r.nan for r in operands))


def _ends(operand: Any, x: Any) -> list[Tensor]:
    """The bounds of an operand as tensors of one element, of its dtype, and without a dimension where it has none."""
    like, found = operand.meta["val"], bounds(x)
    ends = found.hull() if isinstance(found, Integers) else (found.low, found.high)
    return [torch.full([1] * min(like.dim(), 1), end, dtype=like.dtype) for end in ends]


def _tests_for_nan(node: Node) -> bool:
    """Whether a node is where(x == x, x, ...)."""
    condition, x = node.args[:2]
    return isinstance(condition, Node) and condition.target is aten.eq.Tensor and condition.args[:2] == (x, x)


_FACTORS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor})
_MONOTONE = _FACTORS | {  # in each operand
    *(aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.round.default, aten.floor.default, aten.ceil.default),
    *(aten.trunc.default, aten.clamp.default, aten.clamp.Tensor, aten.maximum.default, aten.minimum.default),
    *(aten.relu.default, aten._to_copy.default),
}
