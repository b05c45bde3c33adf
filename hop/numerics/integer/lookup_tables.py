"""Lookup tables for functions of int16 codes: 513 entries with linear interpolation (TFLite, internal/common.h)."""

from collections.abc import Callable

import torch
from torch import Tensor

from hop.numerics.requantization import floor_quotient


def half_away(x: Tensor) -> Tensor:
    """Round x to the nearest integer, ties away from zero, in its dtype.

    Computed in float64, because in float32 the sum with one half would itself be rounded.
    """
    wide = x.to(torch.float64)
    return (wide.sign() * (wide.abs() + 0.5).floor()).to(x.dtype)


def table_513(
    function: Callable[[Tensor], Tensor], scale: Tensor, zero: Tensor | int, out_scale: Tensor, out_zero: Tensor | int
) -> Tensor:
    """Table entries for int16 codes at -32768, -32640, ... 32768, as int64.

    Each entry deviates from the function by half of the interpolation error in the middle of its interval. Computed in
    the dtype of the scales, as in TFLite's LUTPopulate<int16_t>.
    """
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
    """Interpolate a table of 513 entries at int16 codes; all tensors are int64."""
    at = floor_quotient(codes, 128)
    rest = codes - at * 128
    low, high = (table.index_select(0, (at + 256 + d).reshape(-1)).reshape(codes.shape) for d in (0, 1))
    return _in_16_bits(low + floor_quotient(_in_16_bits(high - low) * rest + 64, 128))


def _in_16_bits(x: Tensor) -> Tensor:
    """Wrap x to 16 bits: TFLite's int16 overflows where a table changes by half of the code range or more."""
    return (x + 32768).remainder(65536) - 32768
