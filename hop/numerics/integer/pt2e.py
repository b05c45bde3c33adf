"""Means and average pools as PyTorch computes them between quantize and dequantize nodes: in float32, in PyTorch's
order.

If n is even, one in n means of n codes with the output's scale is halfway between two codes. Then the rounding of the
float sum decides, so the order of the sum matters. With x = (code - zero_point) · scale,

    codes = round((Σ x / n) · (1 / output_scale)) + output_zero_point        each operation rounded to float32

Sources, for contiguous tensors: PyTorch, aten/src/ATen/native/cpu/AvgPoolKernel.cpp (cpu_avg_pool2d: row by row of a
window), aten/src/ATen/native/cpu/SumKernel.cpp (cascade_sum, multi_row_sum, row_sum),
aten/src/ATen/native/ReduceOps.cpp (mean_kernel_impl: a sum, then a quotient).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.integer.convention import Codes, IntegerFunction, Units, scalar
from hop.numerics.integer.families import ADAPTIVE_POOLS, FIXED_POOLS, AveragePool, Mean, Reduction

_aten = torch.ops.aten
_INPUTS = (torch.int8, torch.uint8, torch.int16)
_LANES, _CHAINS, _STEP = 8, 4, 16  # floats per vector, vectors that are summed in parallel, and elements per chain
MOST = 1024  # elements of a sum; of longer ones, one in a thousand is halfway


def floats(x: Tensor, units: Units) -> Tensor:
    """Dequantize codes to float32."""
    zero, scale = scalar(units.zero_point, x, torch.float32), scalar(units.scale, x, torch.float32)
    return (x.to(torch.float32) - zero) * scale


@dataclass(frozen=True, eq=False, repr=False)
class OfFloats(IntegerFunction):
    """Base class of functions whose `compute` returns floats."""

    inputs: ClassVar[tuple[torch.dtype, ...]] = _INPUTS

    def finished(self, y: Tensor, units: Units, codes: Codes) -> Tensor:
        """Quantize floats to codes."""
        scale, zero = (scalar(n, y, torch.float32) for n in units[2:])
        steps = (self.bounded(y) * (torch.ones_like(scale) / scale)).round() + zero
        return steps.clamp(codes.low, codes.high).to(codes.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Pt2eMean(OfFloats, Mean):
    """A mean over adjacent dimensions, with a sum in PyTorch's order on CPUs.

    For the last dimensions, n elements: eight lanes, each in four chains that are added up, then the eight sums. For
    other dimensions: one element after another, except four chains in columns that do not fill a block of 32. A chain
    adds sixteen elements before it adds their sum to the previous ones. For more than 1024 elements the sum is exact.
    """

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _aten.mean.dim and not kwargs

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        dims = sorted(call.dims)
        if dims != list(range(dims[0], dims[-1] + 1)):
            raise ValueError(f"Pt2eMean: dims must be adjacent, got {list(call.dims)}; use Reciprocal()")
        y = _mean(floats(x, units).flatten(dims[0], dims[-1]), dims[0], dims[-1] == x.dim() - 1)
        return y.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if call.keeps else y


def _mean(x: Tensor, dim: int, is_last: bool) -> Tensor:
    n = int(x.shape[dim])
    if n > MOST or n == 0:
        return x.to(torch.float64).mean(dim).to(torch.float32)
    total = _last(x, n) if is_last else _before(x.flatten(dim + 1), dim).reshape([*x.shape[:dim], *x.shape[dim + 1 :]])
    return total / torch.full_like(total, n)


def _last(x: Tensor, n: int) -> Tensor:
    """The sum of the last dimension, of length n."""
    if n < _LANES:
        return _chained(list(x.unbind(-1)))
    whole = n - n % _LANES
    lanes = _chained(list(x.narrow(-1, 0, whole).unflatten(-1, (n // _LANES, _LANES)).unbind(-2)))
    return _one_by_one([*x.narrow(-1, whole, n - whole).unbind(-1), *lanes.unbind(-1)])


def _before(x: Tensor, dim: int) -> Tensor:
    """The sum of the second-to-last dimension: columns in blocks, and remaining ones in chains."""
    columns = int(x.shape[-1])
    block = _CHAINS * (_LANES if columns >= _LANES else 1)
    whole = columns - columns % block
    parts = [_cascade(list(x.narrow(-1, 0, whole).unbind(dim)))] if whole else []
    if whole < columns:
        parts.append(_chained(list(x.narrow(-1, whole, columns - whole).unbind(dim))))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _chained(x: list[Tensor]) -> Tensor:
    """Sum every fourth element, then add the four sums."""
    whole = len(x) - len(x) % _CHAINS
    if not whole:
        return _one_by_one(x)
    parts = [_cascade(x[i:whole:_CHAINS]) for i in range(_CHAINS)]
    parts[0] = _one_by_one([parts[0], *x[whole:]])
    return _one_by_one(parts)


def _cascade(x: list[Tensor]) -> Tensor:
    """Sum one by one, in levels of sixteen."""
    groups = [_one_by_one(x[i : i + _STEP]) for i in range(0, len(x), _STEP)]
    if len(groups) > 1 and len(x) % _STEP:  # the incomplete group is added first
        return groups[-1] + _one_by_one(groups[:-1])
    return _one_by_one(groups)


def _one_by_one(x: Sequence[Tensor]) -> Tensor:
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total


@dataclass(frozen=True, eq=False, repr=False)
class Pt2eAveragePool(OfFloats, AveragePool):
    """An average pool of one to three dimensions: the elements of a window one by one, row by row.

    For more than 1024 elements the sum is exact. Adaptive pools to a single pixel are means.
    """

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in POOLS and not kwargs

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        return pooled(floats(x, units), call.op, call.arguments, len(call.dims))


POOLS = (*FIXED_POOLS, *ADAPTIVE_POOLS)


def pooled(x: Tensor, op: OpOverload, rest: Sequence[Any], spatial: int) -> Tensor:
    """An average pool of float32 x with the given arguments: a window's elements one by one."""
    sizes = x.shape[x.dim() - spatial :]
    if op not in FIXED_POOLS:
        out = list(rest[0])
        if any(int(n) % m for n, m in zip(sizes, out, strict=True)):
            raise ValueError(f"Pt2eAveragePool: output_size must divide {tuple(sizes)}, got {out}; use Reciprocal()")
        if all(m == 1 for m in out):
            mean = _mean(x.flatten(x.dim() - spatial), x.dim() - spatial, True)
            return mean.reshape([*mean.shape, *[1] * spatial])
        rest = ([int(n) // m for n, m in zip(sizes, out, strict=True)],)
    kernel, stride, padding, ceil, counts, divisor = [*rest, *(None, [], 0, False, True, None)[len(rest) :]]
    kernel, padding = each(kernel, spatial), each(padding, spatial)
    stride = each(stride, spatial) if stride not in ([], (), None) else kernel
    wide = F.pad(x, [p for p in reversed(padding) for _ in "ab"])
    shape = FIXED_POOLS[spatial - 1](x, kernel, stride, padding, ceil).shape[x.dim() - spatial :]
    spans = [(out - 1) * s + k for out, s, k in zip(shape, stride, kernel, strict=True)]
    counted = torch.ones_like(wide if counts else x)
    count = _counted(counted, kernel, stride, [0] * spatial if counts else padding, spans)
    if divisor is not None:
        count = torch.full_like(count, divisor)
    wide = _grown(wide, spans)
    places = _places(spans, stride, kernel)
    if torch.Size(kernel).numel() > MOST:
        return (_windows(wide.to(torch.float64), places) / count).to(torch.float32)
    return _windows(wide, places) / count


def each(x: Any, n: int) -> list[int]:
    return [x] * n if isinstance(x, int) else list(x) * (n if len(x) == 1 else 1)


def _grown(x: Tensor, spans: Sequence[Any]) -> Tensor:
    """Pad x with zeros at its end, where windows reach beyond it."""
    more = [max(span - n, 0) for span, n in zip(spans, x.shape[x.dim() - len(spans) :], strict=True)]
    return F.pad(x, [n for after in reversed(more) for n in (0, after)]) if any(more) else x


def _places(spans: Sequence[Any], stride: list[int], kernel: list[int]) -> list[list[slice]]:
    """For each dimension, slices that select the first elements of all windows, the second ones, and so on."""
    each = zip(spans, stride, kernel, strict=True)
    return [[slice(i, i + span - k + 1, s) for i in range(k)] for span, s, k in each]


def _windows(x: Tensor, places: Sequence[Sequence[slice]]) -> Tensor:
    return _one_by_one([x[(..., *place)] for place in itertools.product(*places)])


def _counted(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], spans: Sequence[object]) -> Tensor:
    """The number of elements of x, which contains ones, in each window."""
    wide = _grown(F.pad(x, [p for p in reversed(padding) for _ in "ab"]), spans)
    places = _places(spans, stride, kernel)
    for d, own in enumerate(places):  # windows are products of intervals
        before, after = [slice(None)] * d, [slice(None)] * (len(places) - 1 - d)
        wide = _one_by_one([wide[(..., *before, s, *after)] for s in own])
    return wide
