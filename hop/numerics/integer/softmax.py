"""softmax of codes, by three conventions. Sums are exact, so they do not depend on an order.

Sources: TFLite, kernels/internal/reference/softmax.h (Softmax, SoftmaxInt16), kernels/internal/common.h
(GetReciprocal), kernels/internal/quantization_util.cc (PreprocessSoftmaxScaling, PreprocessLogSoftmaxScalingExp,
CalculateInputRadius), kernels/internal/reference/integer_ops/log_softmax.h (LogSoftmax) and
kernels/internal/quantization_util.h (log_x_for_x_greater_than_or_equal_to_1_impl), kernels/activations.cc
(SoftmaxPrepare, LogSoftmaxPrepare). TensorFlow, compiler/mlir/tosa/transforms/legalize_common.cc
(convertSoftmaxOp), legalize_utils.cc (getTosaConst32bitSoftmaxExpTable), and the TOSA specification for MUL, TABLE and
ARITHMETIC_RIGHT_SHIFT. Kim et al. 2021, "I-BERT: Integer-only BERT Quantization", and its code,
quantization/utils/quant_modules.py (IntSoftmax).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics import fixed_point as fp
from hop.numerics import spelling
from hop.numerics.formats import Integer
from hop.numerics.integer import lookup_tables
from hop.numerics.integer.convention import Codes, IntegerFunction, Units, scalar
from hop.numerics.requantization import fixed_point, floor_quotient, nearest, power_of_two

_LOG_OPERATORS = (torch.ops.aten.log_softmax.int, torch.ops.aten._log_softmax.default)
_OPERATORS = (torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)
_BITS = {torch.int8: 8, torch.uint8: 8, torch.int16: 16}
_LONGEST = 4096  # 8-bit rows: for longer ones TFLite's and TOSA's sums do not fit 32 bits


@dataclass(frozen=True, eq=False, repr=False)
class Softmax(IntegerFunction):
    """Base class of softmax conventions."""

    longest: ClassVar[int | None] = None

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in _OPERATORS

    def check(self, x: Tensor, scale: Tensor, output_scale: Tensor, format: Integer | torch.dtype) -> Codes:
        codes = super().check(x, scale, output_scale, format)
        self.check_codes(x.dtype, codes)
        if isinstance(format, Integer) and format.bits > 8 and x.dtype != torch.int16:
            raise ValueError(
                f"{type(self).__name__}: format must have a zero point of -32768 for shares of 16 bits of codes of "
                f"{x.dtype}, but {format.name} has none; give an 8-bit format"
            )
        return codes

    def compute(self, x: Tensor, units: Units, codes: Codes, dim: int = -1) -> Tensor:
        """Softmax along `dim`. The zero point of x cancels.

        Runtimes store results in fixed units, which the output must have: see `output_units`.
        """
        size = x.shape[dim] if x.dim() else 1
        if self.longest is not None and x.dtype != torch.int16 and isinstance(size, int) and size > self.longest:
            raise ValueError(
                f"{type(self).__name__}: dimension {dim} must have at most {self.longest} elements, whose sum fits 32 "
                f"bits; got {size}; use IBertSoftmax or Division()"
            )
        wide = x.to(torch.int64)
        steps = wide - wide.amax(dim, keepdim=True) if x.numel() else wide  # at most 0
        shares = self.shares(steps, scalar(units.scale, x, torch.float32), dim, x.dtype, codes.dtype)
        low, _ = _units(codes.dtype)
        return shares + low

    def check_codes(self, dtype: torch.dtype, codes: Codes) -> None:
        self.whole(codes, torch.int8, torch.uint8)

    def shares(self, steps: Tensor, scale: Tensor, dim: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """Results in units of the output, from 0 up, for int64 codes minus the largest of their row."""
        raise NotImplementedError

    def output_units(self, format: Integer | torch.dtype) -> tuple[float, int]:
        """The scale and zero point of the result for 8-bit codes; 2^-15 and 0 for 16 bits, the only ones of
        formats.INT16.
        """
        if isinstance(format, Integer) and format.bits > 8:
            return 2.0**-15, 0
        low, bits = _units(format if isinstance(format, torch.dtype) else format.dtype)
        return 2.0**-bits, low


def _units(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, _BITS[dtype]


@dataclass(frozen=True, eq=False, repr=False)
class TfliteSoftmax(Softmax):
    """softmax of `beta` · x as in TFLite's reference kernels.

    8 bits, to 8 or 16: x minus the largest of its row in fixed point with five integer bits, its exp with none, the sum
    with twelve, and the reciprocal by Newton's division; scale 1/256 and zero point -128 (0 for uint8), or 1/65536 and
    -32768. 16 bits: exp and 1/(1 + x) by tables of 513 entries, scale 1/32768, zero point 0.

    TFLite aborts if an 8-bit row sums to at least 512 times its largest element, or if beta · scale is at most 2^-26.
    Here such sums continue in the same way, for rows of up to 4096, and such scales count as 2^-26.
    """

    beta: float = 1.0

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16)
    longest: ClassVar[int | None] = _LONGEST

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "beta", spelling.real(self.beta, "TfliteSoftmax: beta"))
        if self.beta <= 0:
            raise ValueError(f"TfliteSoftmax: beta must be above 0, got {self.beta}; give such a number")

    def check_codes(self, dtype: torch.dtype, codes: Codes) -> None:
        if dtype == torch.int16:
            self.whole(codes, torch.int16)
        else:
            self.whole(codes, dtype, torch.int16)

    def shares(self, steps: Tensor, scale: Tensor, dim: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        beta = scalar(self.beta, scale, torch.float32)
        if dtype == torch.int16:
            return self._of_16_bits(steps, scale * beta, dim) - torch.iinfo(torch.int16).min
        exp = exponentials(beta.to(torch.float64) * scale.to(torch.float64))
        rounded = fp.shifted_right(exp, 12)
        exp, rounded = (_taken(t, -steps) for t in (exp, rounded))
        total = rounded.sum(dim, keepdim=True)
        length = fp.bit_length(total)  # 32 minus the leading zeros
        fraction = total * power_of_two(32 - length) - 2**31
        product = fp.high_product(exp, fp.reciprocal_of_sum(fraction))
        return fp.shifted_right(product, length + 11 - _BITS[out])

    def _of_16_bits(self, steps: Tensor, scale: Tensor, dim: int) -> Tensor:
        exp_table, reciprocal_table = tables_of_16_bits(scale)
        mantissa, shift = fixed_point(scale.to(torch.float64) / (10.0 / 65535.0))
        left = (steps * power_of_two(shift.clamp(min=0))).clamp(-(2**31), 2**31 - 1)
        scaled = fp.shifted_right(fp.high_product(left, mantissa), (-shift).clamp(min=0))
        exp = lookup_tables.interpolated(exp_table, (scaled + 32767).clamp(-32768, 32767))
        total = exp.sum(dim, keepdim=True)
        length = fp.bit_length(total).clamp(15, 40)  # always in this range: the largest of a row has 2^15 - 2
        place = floor_quotient(total * power_of_two(31 - length.clamp(max=31), 16) + 2**13, 2**14) - (2**15 + 2**16)
        reciprocal = lookup_tables.interpolated(reciprocal_table, place.clamp(-32768, 32767))
        half = power_of_two(length - 2, 38)
        return floor_quotient(exp * reciprocal + half, half * 2).clamp(0, 32767)


def tables_of_16_bits(like: Tensor) -> tuple[Tensor, Tensor]:
    """exp for -10 to 0, and 1 / (1 + x) for 0 to 1, in units of 2^-15."""
    tenth, whole, unit = (scalar(v / 65535.0, like, torch.float64) for v in (10.0, 1.0, 2.0))
    exp = lookup_tables.table_513(torch.exp, tenth, 32767, unit, 0)
    return exp, lookup_tables.table_513(lambda x: torch.ones_like(x) / (1 + x), whole, -32768, unit, 0)


def exponentials(scale: Tensor) -> Tensor:
    """exp(-n · scale) in fixed point without integer bits, for n from 0 to 255; 0 where n · scale is above 31."""
    x, is_near = _steps(scale)
    return torch.where(is_near, fp.exp_of_negative(x), 0)


def _steps(scale: Tensor) -> tuple[Tensor, Tensor]:
    """-n · scale with five integer bits, for n from 0 to 255, and whether n · scale is at most 31."""
    mantissa, shift = fixed_point((scale * 2.0**26).clamp(1.0, 2.0**31 - 1))
    n = torch.arange(256, device=scale.device)
    largest = floor_quotient(torch.full_like(shift, 31 * 2**26), power_of_two(shift))
    return fp.high_product(-torch.minimum(n, largest) * power_of_two(shift), mantissa), n <= largest


def _taken(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1)).reshape(index.shape)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteLogSoftmax(Softmax):
    """log_softmax of int8 as in TFLite's reference kernel, with scale 1/16 and zero point 127.

    The sum of exp is that of TfliteSoftmax; its logarithm is a rational function in fixed point.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8,)
    longest: ClassVar[int | None] = _LONGEST - 1

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in _LOG_OPERATORS

    def check_codes(self, dtype: torch.dtype, codes: Codes) -> None:
        self.whole(codes, torch.int8)

    def output_units(self, format: Integer | torch.dtype) -> tuple[float, int]:
        return 1 / 16, 127

    def shares(self, steps: Tensor, scale: Tensor, dim: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        x, is_near = _steps(scale.to(torch.float64))
        exp = _taken(torch.where(is_near, fp.shifted_right(fp.exp_of_negative(x), 12), 0), -steps)
        log = fp.log_above_one(exp.sum(dim, keepdim=True))
        # The least difference from the largest element that is not the lowest code.
        mantissa, shift = fixed_point((scale.to(torch.float64) * 2.0**26).clamp(1.0, 2.0**31 - 1))
        reverse, right = fixed_point(
            torch.full_like(scale, 2.0**31, dtype=torch.float64) / (mantissa * power_of_two(shift))
        )
        least = fp.shifted_right(fp.high_product(log - 2**31, reverse), (-right).clamp(min=0))
        least = torch.maximum(least, -is_near.to(torch.int64).sum())
        y = fp.shifted_right(_taken(x, -steps) - log, 22) + 255
        return torch.where(steps > least, y.clamp(0, 255), 0)


@dataclass(frozen=True, eq=False, repr=False)
class TosaSoftmax(Softmax):
    """softmax of int8, of `beta` · x, as in TensorFlow's legalization to TOSA.

    exp by TABLE, built with the same arithmetic as in TFLite; REDUCE_SUM of its upper 20 bits, CLZ, the reciprocal by
    Newton's division with MUL, and ARITHMETIC_RIGHT_SHIFT, both of which round ties up. Scale 1/256, zero point -128.

    The result differs from TFLite's by at most one code. Sums of at least 512 times the largest element, for which
    TOSA's shift is undefined, continue in the same way.
    """

    beta: float = 1.0

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8,)
    longest: ClassVar[int | None] = _LONGEST - 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "beta", spelling.real(self.beta, "TosaSoftmax: beta"))
        if self.beta <= 0:
            raise ValueError(f"TosaSoftmax: beta must be above 0, got {self.beta}; give such a number")

    def check_codes(self, dtype: torch.dtype, codes: Codes) -> None:
        self.whole(codes, torch.int8)

    def shares(self, steps: Tensor, scale: Tensor, dim: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        table = exponentials(scalar(self.beta, scale, torch.float64) * scale.to(torch.float64))
        exp, upper = (_taken(t, -steps) for t in (table, floor_quotient(table + 2**11, 2**12)))
        total = upper.sum(dim, keepdim=True)
        length = fp.bit_length(total)
        half = total * power_of_two(31 - length)
        y = _mul(half, fp.MINUS_THIRTY_TWO_17THS, 31) + fp.FORTY_EIGHT_17THS
        for _ in range(3):
            y = y + _mul(y, 2**29 - _mul(y, half, 31), 31) * 4
        return nearest(_mul(exp, y, 30), power_of_two(length + 3), "tflite")  # ARITHMETIC_RIGHT_SHIFT


def _mul(a: Tensor, b: Tensor | int, shift: int) -> Tensor:
    """TOSA's MUL of int32."""
    return floor_quotient(a * b + 2 ** (shift - 1), 2**shift)


@dataclass(frozen=True, eq=False, repr=False)
class IBertSoftmax(Softmax):
    """softmax as in I-BERT.

    With q = floor(x / -ln 2) halvings and the remainder r, exp is a polynomial of degree two in r, shifted by q. It is
    requantized to 16 bits, whose largest code is `exp_max`; the result is exp · floor(2^32 / sum) in units of 1/256,
    rounded down.

    In the paper's code a model in evaluation mode stores `exp_max`, found during calibration; it is near 1, which is
    exp(0). The polynomial's coefficients are those of the code. Integers are exact here, where that code simulates them
    in float32 and float64. Scales below 2^-14, for which the polynomial does not fit 32 bits, count as 2^-14.
    """

    exp_max: float = 1.0

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16, torch.int32)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "exp_max", spelling.real(self.exp_max, "IBertSoftmax: exp_max"))
        if self.exp_max <= 0:
            raise ValueError(f"IBertSoftmax: exp_max must be above 0, got {self.exp_max}; give such a number")

    def shares(self, steps: Tensor, scale: Tensor, dim: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        a, b, c = 0.35815147, 0.96963238 / 0.35815147, 1.0 / 0.35815147
        scale = scale.to(torch.float64).clamp(min=2.0**-14)
        ln2, linear, constant = (
            (torch.full_like(scale, v) / by).floor().to(torch.int64)
            for v, by in ((-0.6931, scale), (b, scale), (c, scale * scale))
        )
        x = torch.maximum(steps, ln2 * 30)
        halvings = floor_quotient(-x, -ln2)
        rest = x - ln2 * halvings
        polynomial = ((rest + linear) * rest + constant).clamp(min=0)
        # polynomial · 2^(30 - halvings) has the unit a · scale^2 / 2^30, where 2^30 cancels
        mantissa, shift = fixed_point(scale * scale * a * 32767 / scalar(self.exp_max, scale, torch.float64))
        right = halvings + 31 - shift
        exp = nearest(polynomial * mantissa, power_of_two(right.clamp(0, 62)), "even")
        exp = torch.where(right > 62, 0, exp.clamp(max=32767))
        total = exp.sum(dim, keepdim=True).clamp(min=1)
        factor = floor_quotient(torch.full_like(total, 2**32), total)
        return floor_quotient(exp * factor, 2**24)
