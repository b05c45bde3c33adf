"""Tables of functions of int16 codes: 513 entries, between which one interpolates (TFLite, internal/common.h)."""

from collections.abc import Callable

import torch
from torch import Tensor

from hop.numerics.requantization import floor_quotient


def half_away(x: Tensor) -> Tensor:
    """x, of any dtype, to the nearest integer, ties away from zero, in that dtype. Found in float64: in float32 the sum
    with a half would itself be rounded."""
    wide = x.to(torch.float64)
    return (wide.sign() * (wide.abs() + 0.5).floor()).to(x.dtype)


def table_513(
    function: Callable[[Tensor], Tensor], scale: Tensor, zero: Tensor | int, out_scale: Tensor, out_zero: Tensor | int
) -> Tensor:
    """Entries of int16 codes at -32768, -32640, ... 32768, int64: each lies off the function by half of what a straight
    line to the next would be off in the middle. In the dtype of the scales, as TFLite's LUTPopulate<int16_t>."""
    dtype = scale.dtype
    zero, out_zero = (z.to(dtype) if isinstance(z, Tensor) else torch.full_like(scale, z) for z in (zero, out_zero))
    low, high = scale * (-32768 - zero), scale * (32767 - zero)
    span = out_scale * (32767 - out_zero) - out_scale * (-32768 - out_zero)
    inverse = torch.full_like(span, 65536) / span
    step = (high - low) / torch.full_like(low, 512)
    i = torch.arange(512, device=scale.device).to(dtype)
    here, middle, after = (function(p) for p in (low + i * step, low + i * step + step * 0.5, low + (i + 1) * step))
    value = half_away(here * inverse)
    error = half_away((after * inverse + value) * 0.5) - half_away(middle * inverse)
    entries = torch.cat([value - half_away(error * 0.5), half_away(function(high.reshape(1)) * inverse)])
    return torch.where(entries == entries, entries, 0.0).clamp(-32768, 32767).to(torch.int64)


def interpolated(table: Tensor, codes: Tensor) -> Tensor:
    """What a table of 513 entries gives for int16 codes, int64 tensors."""
    at = floor_quotient(codes, 128)
    rest = codes - at * 128
    low, high = (table.index_select(0, (at + 256 + d).reshape(-1)).reshape(codes.shape) for d in (0, 1))
    return _in_16_bits(low + floor_quotient(_in_16_bits(high - low) * rest + 64, 128))


def _in_16_bits(x: Tensor) -> Tensor:
    """What an int16 holds of x: of a table that falls or rises by half of the codes and more, the rest is lost."""
    return (x + 32768).remainder(65536) - 32768
