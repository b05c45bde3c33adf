"""Sums, means, average pools and concatenations of codes by TOSA's operators.

Sources: the TOSA specification 1.0, RESCALE and AVG_POOL2D, and its functions apply_scale_32 and reciprocal_scale. Of
which operators a sum, a mean and a concatenation are made: TensorFlow, compiler/mlir/tosa/transforms/legalize_tfl.cc
(ConvertTFLAddOp), legalize_common.cc (convertReduceOpCommon, convertConcatV2Op); here each RESCALE rounds once, which
the integer profile has without extensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.fixed_point import bit_length
from hop.numerics.integer_arithmetic import POOLS, requantized, windows
from hop.numerics.integer_convention import Codes, IntegerFunction, Units, scalar
from hop.numerics.requantization import TFLITE as SINGLE
from hop.numerics.requantization import fixed_point, floor_quotient, nearest, power_of_two

_aten = torch.ops.aten
_INPUTS = (torch.int8, torch.int16)
_HEADROOM = {torch.int8: 20, torch.int16: 15}  # bits that the operands of a sum are shifted to the left by


def rescaled(x: Tensor, multiplier: Tensor) -> Tensor:
    """x times a positive number, float64, as RESCALE computes it: by a mantissa of 31 bits, rounded once, ties up."""
    mantissa, shift = fixed_point(multiplier)
    return nearest(x * mantissa, power_of_two(31 - shift), "tflite")


@dataclass(frozen=True, eq=False, repr=False)
class TosaAdd(IntegerFunction):
    """A sum or a difference of two tensors: RESCALE of both codes, less their zero points, to 2^20 steps, or 2^15 of 16
    bits, of twice the larger scale; ADD or SUB; RESCALE to the output's scale. Each rounds once."""

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
        zeros = units.zeros(x, torch.int64, other_zero_point)
        first, second, last = self.multipliers(own, its, out, x.dtype)
        a, b = rescaled(x.to(torch.int64) - zeros[0], first), rescaled(other.to(torch.int64) - zeros[1], second)
        return rescaled(a - b if subtracts else a + b, last) + zeros[2]

    @staticmethod
    def multipliers(scale: Tensor, other: Tensor, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the first operand, the second and the sum, float64."""
        twice, room = torch.maximum(scale, other) * 2, 2.0 ** _HEADROOM[dtype]
        return scale / twice * room, other / twice * room, twice / (out * room)


@dataclass(frozen=True, eq=False, repr=False)
class TosaMean(IntegerFunction):
    """A mean over n elements: RESCALE to int32, less the zero point, REDUCE_SUM, and RESCALE by the scale over n times
    the output's, which rounds once."""

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
        return rescaled(total, self.multiplier(own, out, count)) + out_zero

    @staticmethod
    def multiplier(scale: Tensor, out: Tensor, count: Tensor) -> Tensor:
        """That of the sum, float64."""
        return scale / (out * count.clamp(min=1).to(torch.float64))


@dataclass(frozen=True, eq=False, repr=False)
class TosaAveragePool(IntegerFunction):
    """AVG_POOL2D: the sum of a window's codes, less their zero point, times the reciprocal of how many lie inside the
    tensor, in 31 bits and rounded down, ties up. Where the output has another scale, a RESCALE that rounds once
    follows. It does not count what pads the tensor."""

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
        zero = scalar(units.zero_point, x, torch.int64)
        total, count = windows(x, op, rest, list(dims), type(self).__name__)
        bits = bit_length(count - 1)
        multiplier = floor_quotient((2**30 + 1) * power_of_two(bits), count)
        mean = nearest((total - zero * count) * multiplier, power_of_two(30 + bits), "tflite") + zero
        return requantized(mean, units, SINGLE)


@dataclass(frozen=True, eq=False, repr=False)
class TosaConcatenation(IntegerFunction):
    """CONCAT of operands that RESCALE brings to the output's scale, rounded once; those that have that scale and zero
    point stay as they are."""

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
        parts = [
            requantized(part, units._replace(scale=s, zero_point=z), SINGLE)
            for part, s, z in ((x, *units[:2]), *others)
        ]
        return torch.cat([p.clamp(codes.low, codes.high) for p in parts], dim)
