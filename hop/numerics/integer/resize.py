"""Bilinear resizes of codes: by TFLite's reference kernels, by TOSA's RESIZE, and by PyTorch's upsample_bilinear2d
between quantize and dequantize nodes.

Sources: TFLite, kernels/internal/reference/resize_bilinear.h (ResizeBilinearInteger,
ComputeInterpolationValuesInteger); the TOSA specification 1.0, RESIZE; PyTorch,
aten/src/ATen/native/cpu/UpSampleKernel.cpp (cpu_upsample_linear_channels_last, upsample_generic_Nd_kernel_impl), as gcc
compiles it for x86 with AVX2: which products are fused with sums was found by comparing bits with torch 2.13.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.integer.convention import Units
from hop.numerics.integer.families import Reducing, Reduction, requantized
from hop.numerics.integer.onnxruntime import fma
from hop.numerics.integer.pt2e import OfFloats, floats
from hop.numerics.integer.tosa import rescaled
from hop.numerics.interpolation import BILINEAR, resize
from hop.numerics.requantization import GEMMLOWP, FixedPoint, WideFixedPoint, floor_quotient
from hop.numerics.requantization import TFLITE as SINGLE

_BITS = 10  # bits of TFLite's position between two pixels
_LANES = 8  # channels that PyTorch interpolates at once
_FEW = 128  # up to this sum of rows and columns PyTorch uses its channels_last kernel


class _Bilinear(Reducing):
    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8, torch.int16)
    operators: ClassVar[tuple[OpOverload, ...]] = tuple(BILINEAR)


class Between(NamedTuple):
    """The elements before and after each result along one dimension, and its distance from the first, in parts of a
    step.
    """

    low: Tensor
    high: Tensor
    far: Tensor
    parts: Any


def _weighted(x: Tensor, places: Sequence[Between], dims: Sequence[int]) -> Tensor:
    """The int64 sum of neighbors weighted by their distance to the other one, one dimension after the other."""
    x = x.to(torch.int64)
    for d, (low, high, far, parts) in zip(dims, places, strict=True):
        far = far.reshape([-1, *[1] * (x.dim() - 1 - d)])
        x = x.index_select(d, low) * (parts - far) + x.index_select(d, high) * far
    return x


def sizes_of(op: OpOverload, rest: Sequence[object], before: Sequence[int], name: str) -> tuple[list[Any], bool]:
    """The sizes of a call, and whether corners are aligned. Raises ValueError if a factor does not match the sizes."""
    sizes, align_corners, factors = resize(op, rest, before)
    if any(f is not None and n * f != size for f, n, size in zip(factors, before, sizes, strict=True)):
        raise ValueError(
            f"{name}: scale_factors must be those of the sizes, got {factors} from {list(before)} to {sizes}; give "
            "output_size instead"
        )
    return sizes, align_corners


class _OfCodes(_Bilinear):
    """A resize that computes codes in its operand's units, which `rule` then requantizes, as a following operator
    would.

    Subclasses define `mean`: the int64 codes before requantization, with the requested sizes.
    """

    mean: ClassVar[Callable[..., Tensor]]
    rule: ClassVar[FixedPoint]

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        op, arguments, dims = call
        sizes, align_corners = sizes_of(op, arguments, [x.shape[d] for d in dims], type(self).__name__)
        return requantized(self.mean(x, sizes, align_corners, dims), units, self.rule)


@dataclass(frozen=True, eq=False, repr=False)
class TfliteResizeBilinear(_OfCodes):
    """A bilinear resize with the scale n / size rounded to parts of 1024, and positions in the same parts of a pixel.

    The sum of the four products is rounded to nearest, ties away from zero. Zero points count as codes. If the output
    has another scale, the codes are then requantized by requantization.GEMMLOWP, as by a following operator.
    """

    rule: ClassVar[FixedPoint] = GEMMLOWP

    def mean(self, x: Tensor, sizes: Sequence[object], align_corners: bool, dims: Sequence[int]) -> Tensor:
        each = zip(dims, sizes, strict=True)
        places = [_in_1024(x.shape[d], size, align_corners, x.device) for d, size in each]
        total, half = _weighted(x, places, dims), 2 ** (2 * _BITS - 1)
        down = floor_quotient(half - total, 2 * half)
        return torch.where(total > 0, floor_quotient(total + half, 2 * half), -down)


def _in_1024(n: Any, size: Any, align_corners: bool, device: torch.device) -> Between:
    one = 2**_BITS
    inner, outer = (n - 1, size - 1) if align_corners and size > 1 else (n, size)
    scale = (one * inner + outer // 2) // outer
    start = 0 if align_corners else scale // 2 - one // 2
    last = (size - 1) * scale + start
    if last // one >= n:
        raise ValueError(
            f"TfliteResizeBilinear: output_size must not lead beyond the tensor, got {size} of {n} elements, because "
            f"the last one would lie outside, as a step of {scale} / 1024 is rounded up; use a smaller size"
        )
    places = torch.arange(size, device=device) * scale + start
    low = floor_quotient(places, one).clamp(min=0)
    high = floor_quotient(places + one - 1, one).clamp(max=n - 1)
    return Between(low, high, places - low * one, one)


@dataclass(frozen=True, eq=False, repr=False)
class TosaResizeBilinear(_OfCodes):
    """RESIZE in mode BILINEAR, which weights neighbors by integers, and a RESCALE by one over the weights' product.

    If the output has another scale, a RESCALE that rounds once follows.
    """

    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.int16)
    rule: ClassVar[FixedPoint] = SINGLE

    def mean(self, x: Tensor, sizes: Sequence[int], align_corners: bool, dims: Sequence[int]) -> Tensor:
        places, parts = [], 1
        for d, size in zip(dims, sizes, strict=True):
            step = TosaStep.of(x.shape[d], size, align_corners)
            places.append(step.between(x.shape[d], size, x.device))
            parts = parts * step.parts
        total = _weighted(x, places, dims)
        by = torch.full((), parts, dtype=torch.float64, device=x.device)
        one = torch.ones_like(by)
        mean = WideFixedPoint().steps(total, one, one, by) if x.dtype == torch.int16 else rescaled(total, one / by)
        info = torch.iinfo(x.dtype)  # 15 bits of a reciprocal may exceed the range
        return mean.clamp(info.min, info.max)


class TosaStep(NamedTuple):
    """The elements that RESIZE reads along a dimension: element i at (i · step + offset) / parts."""

    parts: int
    step: int
    offset: int

    @classmethod
    def of(cls, n: int, size: int, align_corners: bool) -> "TosaStep":
        """The step from n elements to `size`, with the fewest parts."""
        if align_corners and size > 1 and n > 1:
            ratio = Fraction(n - 1, size - 1)
            return cls(ratio.denominator, ratio.numerator, 0)
        if align_corners:  # one of both is the first
            return cls(1, 1, 0) if size == 1 else cls(2 * size, 2, 1 - size)
        # Half a step from the first position to the first element, in whole parts.
        ratio = Fraction(n, size)
        parts, step = ratio.denominator, ratio.numerator
        more = 1 if (step - parts) % 2 == 0 else 2
        return cls(parts * more, step * more, (step - parts) * more // 2)

    def border(self, n: int, size: int) -> int:
        """The distance of the last position from the last element, in parts."""
        return self.step * (size - 1) + self.offset - self.parts * (n - 1)

    def between(self, n: int, size: int, device: torch.device) -> Between:
        places = torch.arange(size, device=device) * self.step + self.offset
        low = floor_quotient(places, self.parts)
        far = places - low * self.parts
        return Between(low.clamp(min=0), (low + 1).clamp(max=n - 1), far, self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Pt2eResizeBilinear(OfFloats, _Bilinear):
    """A bilinear resize in float32, including positions and weights, with the sums of PyTorch on CPUs.

    For results of up to 128 rows plus columns, and for channels_last results with more than three channels, the four
    products are added one after another, each rounded with its sum: for channels in blocks of eight starting with the
    third product, for remaining channels with the second. For other results columns are interpolated first, as PyTorch
    does with several threads. With a single thread PyTorch computes such results with three channels differently, where
    one code in thousands differs.
    """

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        sizes, align_corners, factors = resize(call.op, call.arguments, x.shape[2:])
        each = zip(x.shape[2:], sizes, factors, strict=True)
        rows, columns = (_in_floats(*three, align_corners, x.device) for three in each)
        values, weights = [], []
        for i, over in ((rows.low, 1 - rows.far), (rows.high, rows.far)):
            for j, along in ((columns.low, 1 - columns.far), (columns.high, columns.far)):
                values.append(floats(x, units).index_select(2, i).index_select(3, j))
                weights.append((over.unsqueeze(1), along))
        channels = x.shape[1]
        is_last = channels > 3 and x.is_contiguous(memory_format=torch.channels_last)
        if not is_last and sum(sizes) > _FEW:
            upper, lower = (fma(a, weights[0][1], b * weights[1][1]) for a, b in (values[:2], values[2:]))
            return fma(upper, weights[0][0], lower * weights[2][0])
        flat = [over * along for over, along in weights]
        whole = channels - channels % _LANES
        parts = [(0, whole, (2, 3, 1, 0)), (whole, channels - whole, (1, 0, 2, 3))]
        return torch.cat([_added(values, flat, *part) for part in parts if part[1]], 1)


def _added(values: list[Tensor], weights: list[Tensor], start: int, count: int, order: Sequence[int]) -> Tensor:
    """The sum of four products for some channels, in this order."""
    parts = [values[i].narrow(1, start, count) for i in order]
    total = parts[0] * weights[order[0]]
    for value, i in zip(parts[1:], order[1:], strict=True):
        total = fma(value, weights[i], total)
    return total


def _in_floats(n: int, size: int, factor: float | None, align_corners: bool, device: torch.device) -> Between:
    i = torch.arange(size, device=device, dtype=torch.float32)
    if n == size:
        ratio = 1.0
    elif align_corners:
        ratio = (n - 1) / (size - 1) if size > 1 else 0.0
    else:
        ratio = n / size if factor is None else 1.0 / factor
    scale = torch.full((), ratio, dtype=torch.float32, device=device)
    place = scale * i if align_corners else fma(scale, i + 0.5, torch.full_like(i, -0.5)).clamp(min=0)
    low = place.floor().clamp(max=n - 1)
    far = (place - low).clamp(max=1)
    low = low.to(torch.int64)
    return Between(low, (low + 1).clamp(max=n - 1), far, 1)
