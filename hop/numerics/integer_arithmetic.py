"""Sums, means, average pools and concatenations of codes by integers, as TFLite's reference kernels compute them.

Sources: TFLite, kernels/add.cc (Prepare) and kernels/internal/reference/integer_ops/add.h (AddElementwise);
kernels/internal/reference/integer_ops/pooling.h (AveragePool); kernels/internal/reference/reduce.h
(QuantizedMeanOrSum); kernels/internal/reference/requantize.h (Requantize), which TFLite's converter writes before a
concatenation of operands with scales of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.fixed_point import high_product, shifted_right
from hop.numerics.integer_convention import Codes, IntegerFunction, Units
from hop.numerics.requantization import GEMMLOWP, FixedPoint, fixed_point, floor_quotient, power_of_two

_aten = torch.ops.aten
_ADAPTIVE = (_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default)
POOLS = (_aten.avg_pool1d.default, _aten.avg_pool2d.default, *_ADAPTIVE)
_INPUTS = (torch.int8, torch.uint8, torch.int16)
_HEADROOM = {torch.int16: 15}  # bits by which TFLite shifts the operands of a sum to the left; else
_HEADROOM_OF_BYTES = 20


def _times(x: Tensor, multiplier: Tensor) -> Tensor:
    """x times a number below 1, float64, as gemmlowp rounds it: twice."""
    mantissa, shift = fixed_point(multiplier)
    return shifted_right(high_product(x, mantissa), -shift)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteAdd(IntegerFunction):
    """A sum or a difference of two tensors: both codes, less their zero points, times 2^20, or 2^15 of 16 bits, each
    times its scale over twice the larger of the two; their sum times that over the output's scale. Each product is
    rounded twice, as requantization.GEMMLOWP does."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def takes(self, op: OpOverload, kwargs: Mapping[str, Any] = {}) -> bool:
        return op in (_aten.add.Tensor, _aten.sub.Tensor) and kwargs.get("alpha", 1) == 1

    def compute(
        self,
        x: Tensor,
        units: Units,
        codes: Codes,
        *,
        other: Tensor,
        other_scale: Tensor,
        other_zero_point: Tensor | int,
        subtracts: bool = False,
    ) -> Tensor:
        """The codes of x + other, or of x - other; the two broadcast."""
        own, its, out = units.scales(x, torch.float64, other_scale)
        twice = torch.maximum(own, its) * 2
        zeros = units.zeros(x, torch.int64, other_zero_point)
        room = 2 ** _HEADROOM.get(x.dtype, _HEADROOM_OF_BYTES)
        a = _times((x.to(torch.int64) - zeros[0]) * room, own / twice)
        b = _times((other.to(torch.int64) - zeros[1]) * room, its / twice)
        total = a - b if subtracts else a + b
        return _times(total, twice / (out * float(room))) + zeros[2]


@dataclass(frozen=True, eq=False, repr=False)
class TfliteMean(IntegerFunction):
    """A mean over n elements: their sum, less n zero points, times the mantissa of the scale over the output's, which
    was divided by n in integers, rounded down."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def takes(self, op: OpOverload, kwargs: Mapping[str, Any] = {}) -> bool:
        return op in (_aten.mean.dim, _aten.mean.default)

    def compute(
        self,
        x: Tensor,
        units: Units,
        codes: Codes,
        *,
        op: OpOverload = _aten.mean.dim,
        rest: Sequence[Any] = (),
        dims: Sequence[int],
    ) -> Tensor:
        """The codes of the mean of x over `dims`; the second of `rest` says whether they are kept."""
        keeps = len(rest) > 1 and bool(rest[1])
        own, out = units.scales(x, torch.float64)
        zero, out_zero = units.zeros(x, torch.int64)
        count = torch.ones_like(zero)
        for d in dims:
            count = count * x.shape[d]
        total = x.to(torch.int64).sum(list(dims), keepdim=keeps) - zero * count
        mantissa, shift = fixed_point(own / out)
        more = torch.minimum(_log2(count).clamp(max=32), shift + 31).clamp(min=0)
        mantissa = floor_quotient(mantissa * power_of_two(more), count.clamp(min=1))
        right = more - shift
        left = total * power_of_two((-right).clamp(min=0))
        return shifted_right(high_product(left, mantissa), right.clamp(min=0)) + out_zero


def _log2(n: Tensor) -> Tensor:
    """The largest k with 2^k <= n, n from 1 on."""
    powers = 2 ** torch.arange(1, 40, device=n.device)
    return (n.reshape(1) >= powers).to(torch.int64).sum()


@dataclass(frozen=True, eq=False, repr=False)
class TfliteAveragePool(IntegerFunction):
    """An average pool: the sum of the codes, zero points included, by how many of them lie inside the tensor, to the
    nearest, ties away from zero. Where the output has another scale, these codes are then requantized by
    requantization.GEMMLOWP, as by an operator that follows. It does not count what pads the tensor."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def takes(self, op: OpOverload, kwargs: Mapping[str, Any] = {}) -> bool:
        return op in POOLS

    def compute(
        self,
        x: Tensor,
        units: Units,
        codes: Codes,
        *,
        op: OpOverload,
        rest: Sequence[Any] = (),
        dims: Sequence[int] = (),
    ) -> Tensor:
        """The codes of op(x, *rest), `op` an average pool of PyTorch's."""
        total, count = windows(x, op, rest, list(dims), type(self).__name__)
        half = floor_quotient(count, 2)
        y = torch.where(total > 0, floor_quotient(total + half, count), -floor_quotient(half - total, count))
        return requantized(y, units)


def windows(x: Tensor, op: OpOverload, rest: Sequence[Any], dims: list[int], name: str) -> tuple[Tensor, Tensor]:
    """The sum of each window and how many elements of the tensor it has, int64. Sums are exact in float64, which holds
    the mean times the size to far less than a half. `name` is the convention's, for errors."""
    wide, window = x.to(torch.float64), 1
    if op in _ADAPTIVE:
        sizes = [(x.shape[d], n) for d, n in zip(dims, rest[0], strict=True)]
        if any(size % n for size, n in sizes):
            raise ValueError(
                f"{name}: output_size must divide the size {tuple(x.shape)} of the tensor, got {rest[0]}; "
                "its windows have one size"
            )
        for size, n in sizes:
            window = window * (size // n)
        mean = op(wide, *rest)
        return (mean * window).round().to(torch.int64), torch.full_like(mean, window, dtype=torch.int64)
    kernel, stride, padding, ceil, counts_padding, divisor = [*rest, *(None, [], 0, False, True, None)[len(rest) :]]
    pads = any(padding) if isinstance(padding, list | tuple) else bool(padding)
    if ceil or divisor is not None or (pads and counts_padding):
        raise ValueError(
            f"{name}: ceil_mode must be False, divisor_override None, and count_include_pad False where "
            f"there is padding, got {ceil}, {divisor} and {counts_padding}; it has no others: pad before"
        )
    kernel = list(kernel) if isinstance(kernel, list | tuple) else [kernel] * len(dims)
    for n in kernel:
        window = window * n
    means = [op(t, kernel, stride, padding, False, True) * window for t in (wide, torch.ones_like(wide))]
    total, count = (m.round().to(torch.int64) for m in means)
    return total, count.clamp(min=1)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteConcatenation(IntegerFunction):
    """A concatenation: each operand's codes requantized to the output's scale by requantization.GEMMLOWP; those that
    have that scale and zero point stay as they are."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def takes(self, op: OpOverload, kwargs: Mapping[str, Any] = {}) -> bool:
        return op is _aten.cat.default

    def compute(
        self,
        x: Tensor,
        units: Units,
        codes: Codes,
        *,
        others: Sequence[tuple[Tensor, Tensor, Tensor | int]] = (),
        dim: int = 0,
    ) -> Tensor:
        """The codes of x and of `others`, each with its scale and zero point, along `dim`."""
        parts = [requantized(part, units._replace(scale=s, zero_point=z)) for part, s, z in ((x, *units[:2]), *others)]
        return torch.cat([p.clamp(codes.low, codes.high) for p in parts], dim)


def requantized(x: Tensor, units: Units, rule: FixedPoint = GEMMLOWP) -> Tensor:
    """Codes of one scale and zero point as those of another, int64, not yet clamped."""
    own, out = units.scales(x, torch.float32)
    zero, out_zero = units.zeros(x, torch.int64)
    return rule.steps(x.to(torch.int64) - zero, own, torch.ones_like(own), out) + out_zero
