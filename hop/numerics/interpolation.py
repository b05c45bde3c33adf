"""Linear interpolation as in PyTorch's upsample_linear1d, upsample_bilinear2d and upsample_trilinear3d.

Along a dimension of n elements with `size` results, result i is at position

    align_corners         i · (n - 1) / (size - 1), and 0 if size is 1
    otherwise             max((i + ½) · r - ½, 0), r = n / size, or 1 / factor if a factor is given

Sources: PyTorch, aten/src/ATen/native/UpSample.h (area_pixel_compute_scale, area_pixel_compute_source_index), and
aten/src/ATen/native/cpu/UpSampleKernel.cpp (compute_source_index_and_lambda): a dimension that keeps its size is
copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat.eager import OpOverload

_aten = torch.ops.aten
BILINEAR = (_aten.upsample_bilinear2d.default, _aten.upsample_bilinear2d.vec)


class Resize(NamedTuple):
    """The sizes of the resized dimensions, and the factor of each if given."""

    sizes: list[Any]
    align_corners: bool
    factors: list[float | None]


class Neighbors(NamedTuple):
    """The elements before and after each result, int64, and the weight of the second, float64."""

    low: Tensor
    high: Tensor
    weight: Tensor


def resize(op: OpOverload, rest: Sequence[Any], before: Sequence[Any]) -> Resize:
    """Parse a call: `rest` are the arguments after the tensor, `before` its sizes along the resized dimensions.

    Raises:
        ValueError: both output_size and scale_factors are given, or neither; their number does not match; or a size is
            below 1.
    """
    if str(op).endswith(".vec"):
        sizes, align_corners, factors = [*rest, *(None, False, None)[len(rest) :]]
        if (sizes is None) == (factors is None):
            raise ValueError(
                f"{op}: one of output_size and scale_factors must be given, got {sizes} and {factors}; give one of them"
            )
    else:
        sizes, align_corners, *factors = rest
        factors = [*factors, *[None] * (len(before) - len(factors))]
    if factors is None:
        factors = [None] * len(before)
    given = factors if sizes is None else sizes
    if len(given) != len(before) or len(factors) != len(before):
        raise ValueError(f"{op}: output_size or scale_factors must be {len(before)} numbers, got {given}; give as many")
    if sizes is None:
        sizes = [torch.sym_int(n * f) for n, f in zip(before, factors, strict=True)]
    if any(isinstance(n, int) and n < 1 for n in (*sizes, *before)):
        raise ValueError(
            f"{op}: sizes must be 1 or more, got {list(sizes)} of a tensor with {list(before)}; give others"
        )
    used = [None if align_corners or f is None or f <= 0 else float(f) for f in factors]
    own = [None if f is None or size == n else f for f, size, n in zip(used, sizes, before, strict=True)]
    return Resize(list(sizes), bool(align_corners), own)


def neighbors(n: Any, size: Any, align_corners: bool, factor: float | None, device: torch.device) -> Neighbors:
    """The neighbors along one dimension of n elements."""
    i = torch.arange(size, device=device).to(torch.float64)
    if factor is not None:
        place = ((i + 0.5) * (1.0 / factor) - 0.5).clamp(min=0)
        low = place.floor().clamp(max=n - 1)
        weight = (place - low).clamp(max=1)
    else:  # in integers, so that each position is rounded once
        places, parts = (
            (i * (n - 1), torch.sym_max(size - 1, 1)) if align_corners else ((2 * i + 1) * n - size, 2 * size)
        )
        places = places.clamp(min=0)
        low = (places / parts).floor()
        weight = (places - low * parts) / parts
    low = low.to(torch.int64)
    return Neighbors(low, (low + 1).clamp(max=n - 1), weight)


def interpolated(x: Tensor, op: OpOverload, rest: Sequence[object], dims: Sequence[int]) -> Tensor:
    """op(x, *rest) for float64 x, one dimension after the other."""
    sizes, align_corners, factors = resize(op, rest, [x.shape[d] for d in dims])
    for d, size, factor in zip(dims, sizes, factors, strict=True):
        low, high, weight = neighbors(x.shape[d], size, align_corners, factor, x.device)
        weight = weight.reshape([-1, *[1] * (x.dim() - 1 - d)])
        x = x.index_select(d, low) * (1 - weight) + x.index_select(d, high) * weight
    return x
