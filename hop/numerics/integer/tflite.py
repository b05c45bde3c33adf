"""Integer sums, means, average pools and concatenations of codes, as in TFLite's reference kernels.

Sources: TFLite, kernels/add.cc (Prepare) and kernels/internal/reference/integer_ops/add.h (AddElementwise);
kernels/internal/reference/integer_ops/pooling.h (AveragePool); kernels/internal/reference/reduce.h
(QuantizedMeanOrSum); kernels/internal/reference/requantize.h (Requantize), which TFLite's converter inserts before a
concatenation of operands with different scales.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics.fixed_point import high_product, shifted_right
from hop.numerics.integer import families
from hop.numerics.integer.convention import Units
from hop.numerics.requantization import GEMMLOWP, FixedPoint, fixed_point, floor_quotient, power_of_two

_INPUTS = (torch.int8, torch.uint8, torch.int16)
_HEADROOM = {torch.int16: 15}  # bits by which TFLite shifts a sum's operands left
_HEADROOM_OF_BYTES = 20


def _times(x: Tensor, multiplier: Tensor) -> Tensor:
    """x times a number below 1, float64, rounded twice as in gemmlowp."""
    mantissa, shift = fixed_point(multiplier)
    return shifted_right(high_product(x, mantissa), -shift)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteAdd(families.OfTwo):
    """A sum or difference of two tensors.

    Both operands' codes minus zero points, times 2^20 (2^15 for 16 bits), are multiplied by their scale over twice the
    larger scale; the sum is multiplied by that over the output's scale. Each product is rounded twice, as in
    requantization.GEMMLOWP.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    @staticmethod
    def room(codes: torch.dtype) -> int:
        """The factor that codes are multiplied by first.

        The last multiplier is below 1, so the output's scale is above twice the larger operand's divided by this
        factor.
        """
        return 2 ** _HEADROOM.get(codes, _HEADROOM_OF_BYTES)

    def combined(self, x: Tensor, units: Units, other: families.Second) -> Tensor:
        first, second, output_scale = units.scales(x, torch.float64, other.scale)
        twice = torch.maximum(first, second) * 2
        zeros = units.zeros(x, torch.int64, other.zero_point)
        room = self.room(x.dtype)
        a = _times((x.to(torch.int64) - zeros[0]) * room, first / twice)
        b = _times((other.codes.to(torch.int64) - zeros[1]) * room, second / twice)
        total = a - b if other.subtracts else a + b
        return _times(total, twice / (output_scale * float(room))) + zeros[2]


@dataclass(frozen=True, eq=False, repr=False)
class TfliteMean(families.Mean):
    """A mean over n elements: their sum minus n zero points, times the mantissa of the scale over the output's.

    The mantissa is divided by n in integers, rounded down.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def reduced(self, x: Tensor, units: Units, call: families.Reduction) -> Tensor:
        scale, output_scale = units.scales(x, torch.float64)
        total, count = families.exact_sum(x, units, call)
        mantissa, shift = fixed_point(scale / output_scale)
        more = torch.minimum(_log2(count).clamp(max=32), shift + 31).clamp(min=0)
        mantissa = floor_quotient(mantissa * power_of_two(more), count.clamp(min=1))
        right = more - shift
        left = total * power_of_two((-right).clamp(min=0))
        return shifted_right(high_product(left, mantissa), right.clamp(min=0)) + units.zeros(x, torch.int64)[1]


def _log2(n: Tensor) -> Tensor:
    """The largest k with 2^k <= n, for n of at least 1."""
    powers = 2 ** torch.arange(1, 40, device=n.device)
    return (n.reshape(1) >= powers).to(torch.int64).sum()


@dataclass(frozen=True, eq=False, repr=False)
class TfliteAveragePool(families.AveragePool):
    """An average pool: the sum of the codes, including zero points, divided by the number of codes inside the tensor.

    Rounded to nearest, ties away from zero. Padding that is counted has the code of zero. If the output has another
    scale, the codes are then requantized by requantization.GEMMLOWP, as by a following operator.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def reduced(self, x: Tensor, units: Units, call: families.Reduction) -> Tensor:
        total, count = windows(*_explicitly_padded(x, units, call), type(self).__name__)
        half = floor_quotient(count, 2)
        y = torch.where(total > 0, floor_quotient(total + half, count), -floor_quotient(half - total, count))
        return families.requantized(y, units, GEMMLOWP)


def _explicitly_padded(x: Tensor, units: Units, call: families.Reduction) -> tuple[Tensor, families.Reduction]:
    """The codes of a pool that counts its padding, padded with the code of zero, and the pool without padding."""
    op, rest, dims = call
    if op in families.ADAPTIVE_POOLS:
        return x, call
    kernel, stride, padding, ceil, counts, divisor = [*rest, *(None, [], 0, False, True, None)[len(rest) :]]
    sides = list(padding) if isinstance(padding, list | tuple) else [padding]
    sides = sides * len(dims) if len(sides) == 1 else sides
    if not any(sides) or not counts or ceil or divisor is not None:
        return x, call
    zero = units.zeros(x, torch.int64)[0]
    flat = [side for n in reversed(sides) for side in (n, n)]
    wide = torch.ops.aten.constant_pad_nd.default(x.to(torch.int64) - zero, flat) + zero
    return wide, call._replace(arguments=(kernel, stride, 0, False, False, None))


def windows(x: Tensor, call: families.Reduction, name: str) -> tuple[Tensor, Tensor]:
    """The sum of each window, and its number of elements inside the tensor, both int64.

    Sums are exact in float64, whose mean times the size has an error far below one half. `name` is the convention's,
    for errors.
    """
    wide, window, (op, rest, dims) = x.to(torch.float64), 1, call
    if op in families.ADAPTIVE_POOLS:
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
            f"there is padding, got {ceil}, {divisor} and {counts_padding}; other options are not supported: pad before"
        )
    kernel = list(kernel) if isinstance(kernel, list | tuple) else [kernel] * len(dims)
    for n in kernel:
        window = window * n
    means = [op(t, kernel, stride, padding, False, True) * window for t in (wide, torch.ones_like(wide))]
    total, count = (m.round().to(torch.int64) for m in means)
    return total, count.clamp(min=1)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteConcatenation(families.Concatenation):
    """A concatenation: each operand's codes are requantized to the output's scale by requantization.GEMMLOWP.

    Codes that already have the output's scale and zero point are unchanged.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS
    rule: ClassVar[FixedPoint] = GEMMLOWP
