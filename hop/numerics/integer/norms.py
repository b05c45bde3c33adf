"""layer_norm of codes, as in I-BERT.

Source: Kim et al. 2021, "I-BERT: Integer-only BERT Quantization", and its code, quantization/utils/quant_modules.py
(IntLayerNorm, QuantAct) and quant_utils.py (fixedpoint_mul); the square root is the paper's algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat import tracing
from hop.compat.eager import OpOverload
from hop.numerics import fixed_point as fp
from hop.numerics import spelling
from hop.numerics.integer.convention import Codes, IntegerFunction, Units, scalar
from hop.numerics.requantization import fixed_point, floor_quotient, nearest, power_of_two


@dataclass(frozen=True, eq=False, repr=False)
class IBertLayerNorm(IntegerFunction):
    """layer_norm of n codes x over the last dimension:

        y = x - round(Σ x / n)                      ties to even
        d = isqrt(Σ floor(y / 2^shift)²) · 2^shift
        y = floor(y · floor(2^31 / d) / 2) + floor(bias / weight / (√n / 2^30))

    in units of √n / 2^30 · weight, then requantized to the output's scale by a mantissa of 31 bits and a shift, ties to
    even. `shift` keeps the sum of squares within 32 bits; I-BERT finds it during calibration. 8-bit codes need none for
    up to 66,000 elements. There is no eps: a row without variance gives its bias. A channel with weight 0 gives 0,
    without its bias. The scale of x cancels.
    """

    shift: int = 0

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16, torch.int32)

    def __post_init__(self) -> None:
        super().__post_init__()
        spelling.integer(self.shift, "IBertLayerNorm: shift")
        if not 0 <= self.shift <= 31:
            raise ValueError(f"IBertLayerNorm: shift must be from 0 to 31, got {self.shift}; give such a number")

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is torch.ops.aten.layer_norm.default

    def compute(
        self, x: Tensor, units: Units, codes: Codes, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """The codes of layer_norm over the last dimension, of length n; weight and bias are floats of (n,)."""
        n = x.shape[-1]
        for name, given in (("weight", weight), ("bias", bias)):
            if given is not None and tuple(given.shape) != (n,):
                raise ValueError(
                    f"IBertLayerNorm: {name} must have shape {(n,)}, got {tuple(given.shape)}; give one number for "
                    "each code of a row"
                )
        if tracing.known_equal(n, 0):
            return x
        wide = torch.float64
        unit = torch.full((), n, dtype=wide, device=x.device).sqrt() / 2.0**30
        y = _normalized(x.to(torch.int64) - scalar(units.zero_point, x, torch.int64), n, self.shift)
        factors = torch.ones(n, dtype=wide, device=x.device) if weight is None else weight.to(wide)
        if bias is not None:
            offset = (bias.to(wide) / factors / unit).floor().clamp(-(2.0**31), 2.0**31 - 1)
            y = y + torch.where(factors == 0, 0.0, offset).to(torch.int64)
        mantissa, shift = fixed_point(factors.abs() * unit / scalar(units.output_scale, x, wide))
        product = y.clamp(-(2**31), 2**31 - 1) * torch.where(factors < 0, -mantissa, mantissa)
        y = nearest(product, power_of_two((31 - shift).clamp(0, 62)), "even")
        return y + scalar(units.output_zero_point, x, torch.int64)


def _normalized(x: Tensor, n: int, shift: int) -> Tensor:
    """x minus its mean over its deviation, times 2^30 / √n."""
    total = x.sum(-1, keepdim=True)
    mean = floor_quotient(total, n)
    twice = (total - mean * n) * 2
    up = (twice > n) | ((twice == n) & (mean.remainder(2) != 0))
    y = x - torch.where(up, mean + 1, mean)
    squares = floor_quotient(y, 2**shift) if shift else y
    deviation = square_root((squares * squares).sum(-1, keepdim=True)).clamp(min=1) * 2**shift
    return floor_quotient(y * floor_quotient(torch.full_like(deviation, 2**31), deviation), 2)


def square_root(x: Tensor) -> Tensor:
    """floor(√x) for x from 0 to 2^62, int64, by Newton's iteration from a power of two that is at least the root."""
    root = power_of_two(floor_quotient(fp.bit_length(x) + 1, 2))
    for _ in range(7):  # each step squares the relative error, which is at most 1 initially
        root = torch.minimum(root, floor_quotient(root + floor_quotient(x, root.clamp(min=1)), 2))
    return root
