"""Functions of single codes, by tables.

Sources: TFLite, kernels/internal/common.h (LUTPopulate, LUTLookup, sigmoid_table_uint16), kernels/activations.cc
(TanhPrepare, SigmoidPrepare, GeluPrepare, EluPrepare), kernels/elementwise.cc (exp, rsqrt of 16 bits),
kernels/internal/reference/gelu.h (GeluTransform, GeluTransformApproximate), and
kernels/internal/reference/integer_ops/logistic.h and tanh.h for 16 bits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.formats import Integer
from hop.numerics.integer import lookup_tables
from hop.numerics.integer.convention import Codes, IntegerFunction, Units, one_of, scalar
from hop.numerics.requantization import floor_quotient, power_of_two
from hop.numerics.tables import float32

_aten = torch.ops.aten


def _rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of float32, computed in float64 and rounded once."""
    return lambda x: function(x.to(torch.float64)).to(x.dtype)


_exp, _tanh, _expm1 = (_rounded(f) for f in (torch.exp, torch.tanh, torch.expm1))
_erfc = _rounded(torch.special.erfc)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.ones_like(x) / (1 + _exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * _erfc(x * float32(-math.sqrt(0.5)))


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = x + x * float32(0.044715) * x * x
    return x * 0.5 * (1 + _tanh(inner * float32(math.sqrt(2 / math.pi))))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.where(x < 0, _expm1(x), x),
    "exp": _exp,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": _tanh,
}
"""The functions that TfliteTable supports, by name: from float32 to float32 tensors, each operation rounded. Functions
added here are supported too.
"""

_OPERATORS = {
    "elu": _aten.elu.default,
    "exp": _aten.exp.default,
    "gelu": _aten.gelu.default,
    "gelu_tanh": _aten.gelu.default,
    "sigmoid": _aten.sigmoid.default,
    "silu": _aten.silu.default,
    "tanh": _aten.tanh.default,
}


@dataclass(frozen=True, eq=False, repr=False)
class TfliteTable(IntegerFunction):
    """`function`, a name in FUNCTIONS, by the tables that TFLite builds while preparing.

    8 bits: of all 256 codes, each dequantized, passed through the function and multiplied by the reciprocal of the
    output's scale in float32, and rounded to nearest, ties away from zero. 16 bits: of 513 codes, 128 apart, with
    linear interpolation. TFLite uses them for elu, exp, gelu, sigmoid and tanh with 8 bits, and for exp and gelu with
    16; sigmoid and tanh with 16 bits are TfliteSigmoid. Input and output codes have the same dtype.
    """

    function: str = "gelu"

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.function, tuple(FUNCTIONS), "TfliteTable: function")

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        if op is _aten.gelu.default:
            return self.function == ("gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu")
        return op is _OPERATORS.get(self.function)

    def compute(self, x: Tensor, units: Units, codes: Codes) -> Tensor:
        """The codes of the function of x."""
        scale, out = units.scales(x, torch.float32)
        zero, out_zero = units.zeros(x, torch.float32)
        function, index = FUNCTIONS[self.function], x.to(torch.int64)
        if x.dtype == torch.int16:
            self.whole(codes, torch.int16)
            return lookup_tables.interpolated(lookup_tables.table_513(function, scale, zero, out, out_zero), index)
        low = torch.iinfo(x.dtype).min
        every = torch.arange(low, low + 256, device=x.device).to(torch.float32)
        y = lookup_tables.half_away(function(scale * (every - zero)) * (torch.ones_like(out) / out)) + out_zero
        table = torch.where(y == y, y, codes.low).clamp(codes.low, codes.high).to(torch.int64)
        return table.index_select(0, (index - low).reshape(-1)).reshape(x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteRsqrt(IntegerFunction):
    """1 / √x of int16 codes, by TFLite's table of 513 entries, 128 codes apart, with linear interpolation.

    At 0 and below, where TFLite aborts, the result is the output's largest value. Zero points are 0.

    Linear interpolation has a relative error of (3/32) · (128 / n)² at code n: a tenth at 112, 1/1000 at 1,240. Choose
    the scale of x so that relevant values are above that.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int16,)

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _aten.rsqrt.default

    def compute(self, x: Tensor, units: Units, codes: Codes) -> Tensor:
        """The codes of 1 / √x."""
        self.whole(codes, torch.int16)
        scale, out = units.scales(x, torch.float32)
        zero, out_zero = units.zeros(x, torch.float32)
        most = out * (32767 - out_zero)

        def function(x: Tensor) -> Tensor:
            return torch.where(x > 0, torch.ones_like(x) / torch.where(x > 0, x, 1.0).sqrt(), most)

        return lookup_tables.interpolated(
            lookup_tables.table_513(function, scale, zero, out, out_zero), x.to(torch.int64)
        )


# fmt: off
_RAISED = (  # entries of TFLite's table that are one above the nearest value
    4, 8, 12, 14, 15, 16, 17, 19, 20, 21, 22, 25, 27, 28, 29, 30, 31, 33, 34, 35, 37, 39, 40, 41, 43, 44, 45, 46, 49,
    50, 54, 62, 63, 64, 66, 82, 86, 93, 100, 103, 112, 116, 135, 255,
)
# fmt: on


@dataclass(frozen=True, eq=False, repr=False)
class TfliteSigmoid(IntegerFunction):
    """sigmoid or tanh of int16 codes, by linear interpolation between entries of one table.

    The table is sigmoid(n / 24) for n from 0 to 255, in units of 2^-16; 44 entries are one above the nearest value, as
    in TFLite's table. Zero points are 0, and the output's scale is 2^-15.
    """

    function: str = "sigmoid"

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int16,)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.function, ("sigmoid", "tanh"), "TfliteSigmoid: function")

    def output_units(self, format: Integer | torch.dtype) -> tuple[float, int]:
        return 2.0**-15, 0

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _OPERATORS[self.function]

    def compute(self, x: Tensor, units: Units, codes: Codes) -> Tensor:
        """The codes of the function of x, which has zero point 0, in units of 2^-15."""
        self.whole(codes, torch.int16)
        multiplier, shift = _multiplier(scalar(units.scale, x, torch.float32))
        half = torch.where(shift > 0, floor_quotient(power_of_two(shift), 2), 0)
        n = floor_quotient(x.to(torch.int64) * multiplier + half, power_of_two(shift))
        bits = 9 if self.function == "sigmoid" else 8
        table = _sigmoid_table(x.device)
        at = floor_quotient(n.abs(), 2**bits)
        low, high = (table.index_select(0, (at + d).clamp(max=255).reshape(-1)).reshape(x.shape) for d in (0, 1))
        y = low * 2**bits + n.abs().remainder(2**bits) * (high - low)
        if self.function == "sigmoid":
            y = torch.where(at >= 255, 0x7FFF * 2**10, y)
            y = floor_quotient(torch.where(n >= 0, y + 2**9, 2**25 - y + 2**9 - 1), 2**10)
        else:
            y = torch.where(at >= 255, 0xFFFF * 2**8, y)
            y = floor_quotient(torch.where(n >= 0, y - 2**23 + 2**7, 2**23 - y + 2**7 - 1), 2**8)
        return y


def _multiplier(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The multiplier from codes to units of 1 / (3 · 4096), as a 15-bit number and a shift.

    It is exact, 3 and 6, for scales of 2^-12 and 2^-11.
    """
    wide = scale.to(torch.float64) * (4096.0 * 3.0)
    shift = torch.zeros_like(wide, dtype=torch.int64)
    for _ in range(31):
        small = wide <= 32767.0 / 2.0
        wide, shift = torch.where(small, wide * 2, wide), torch.where(small, shift + 1, shift)
    return wide.floor().clamp(max=32767.0 * 65536).to(torch.int64), shift


def _sigmoid_table(device: torch.device) -> Tensor:
    n = torch.arange(256, device=device)
    nearest = ((n.to(torch.float64) / 24).sigmoid() * 65536 + 0.5).floor().to(torch.int64)
    for raised in _RAISED:
        nearest = nearest + (n == raised).to(torch.int64)
    return nearest
