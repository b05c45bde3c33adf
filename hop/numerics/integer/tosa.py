"""Sums, means, average pools and concatenations of codes by TOSA's operators.

Sources: the TOSA specification 1.0, RESCALE and AVG_POOL2D, and its functions apply_scale_32 and reciprocal_scale. The
operators that make up a sum, a mean and a concatenation: TensorFlow, compiler/mlir/tosa/transforms/legalize_tfl.cc
(ConvertTFLAddOp), legalize_common.cc (convertReduceOpCommon, convertConcatV2Op). Here each RESCALE rounds once, which
the integer profile supports without extensions.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics.fixed_point import bit_length
from hop.numerics.integer import families
from hop.numerics.integer.convention import Units, scalar
from hop.numerics.integer.tflite import windows
from hop.numerics.requantization import TFLITE as SINGLE
from hop.numerics.requantization import FixedPoint, fixed_point, floor_quotient, nearest, power_of_two

_INPUTS = (torch.int8, torch.int16)
_HEADROOM = {torch.int8: 20, torch.int16: 15}  # bits by which the operands of a sum are shifted left


def rescaled(x: Tensor, multiplier: Tensor) -> Tensor:
    """x times a positive float64 number, as in RESCALE: by a mantissa of 31 bits, rounded once, ties up."""
    mantissa, shift = fixed_point(multiplier)
    return nearest(x * mantissa, power_of_two(31 - shift), "tflite")


@dataclass(frozen=True, eq=False, repr=False)
class TosaAdd(families.OfTwo):
    """A sum or difference of two tensors.

    RESCALE of both codes minus zero points to 2^20 steps (2^15 for 16 bits) of twice the larger scale; ADD or SUB;
    RESCALE to the output's scale. Each rounds once.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def combined(self, x: Tensor, units: Units, other: families.Second) -> Tensor:
        zeros = units.zeros(x, torch.int64, other.zero_point)
        scale, other_scale, output_scale = units.scales(x, torch.float64, other.scale)
        first, second, last = self.multipliers(scale, other_scale, output_scale, x.dtype)
        a, b = rescaled(x.to(torch.int64) - zeros[0], first), rescaled(other.codes.to(torch.int64) - zeros[1], second)
        return rescaled(a - b if other.subtracts else a + b, last) + zeros[2]

    @staticmethod
    def multipliers(scale: Tensor, other: Tensor, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The float64 multipliers of the first operand, the second and the sum."""
        twice, room = torch.maximum(scale, other) * 2, 2.0 ** _HEADROOM[dtype]
        return scale / twice * room, other / twice * room, twice / (out * room)


@dataclass(frozen=True, eq=False, repr=False)
class TosaMean(families.Mean):
    """A mean over n elements: RESCALE to int32 minus the zero point, REDUCE_SUM, and RESCALE to the output's scale.

    The last multiplier is the scale over n times the output's; it rounds once.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def reduced(self, x: Tensor, units: Units, call: families.Reduction) -> Tensor:
        total, count = families.exact_sum(x, units, call)
        scale, output_scale = units.scales(x, torch.float64)
        return rescaled(total, self.multiplier(scale, output_scale, count)) + units.zeros(x, torch.int64)[1]

    @staticmethod
    def multiplier(scale: Tensor, out: Tensor, count: Tensor) -> Tensor:
        """The float64 multiplier of the sum."""
        return scale / (out * count.clamp(min=1).to(torch.float64))


@dataclass(frozen=True, eq=False, repr=False)
class TosaAveragePool(families.AveragePool):
    """AVG_POOL2D: the sum of a window's codes minus zero points, times the reciprocal of their number inside the
    tensor.

    The reciprocal has 31 bits and is rounded down; the product rounds ties up. If the output has another scale, a
    RESCALE that rounds once follows. Padding is not counted.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def reduced(self, x: Tensor, units: Units, call: families.Reduction) -> Tensor:
        zero = scalar(units.zero_point, x, torch.int64)
        total, count = windows(x, call, type(self).__name__)
        bits = bit_length(count - 1)
        multiplier = floor_quotient((2**30 + 1) * power_of_two(bits), count)
        mean = nearest((total - zero * count) * multiplier, power_of_two(30 + bits), "tflite") + zero
        return families.requantized(mean, units, SINGLE)


@dataclass(frozen=True, eq=False, repr=False)
class TosaConcatenation(families.Concatenation):
    """CONCAT of operands that RESCALE converts to the output's scale, rounded once.

    Operands that already have the output's scale and zero point are unchanged.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS
    rule: ClassVar[FixedPoint] = SINGLE
