"""Sums, products, means, average pools and softmax of codes by onnxruntime's integer operators, on x86 CPUs with AVX2.

They compute codes in float32, each in its own order. Some fuse a product with a sum, as `fma` here, and round once.

Sources: onnxruntime 1.32, onnxruntime/core/mlas/lib/intrinsics/avx2/qladd_avx2.cpp (MlasQLinearAddKernelAvx2Helper, as
gcc compiles it), qlmul.cpp (MlasQLinearMulKernel), qlgavgpool.cpp (MlasQLinearGlobalAveragePool);
onnxruntime/contrib_ops/cpu/quantization/qlinear_pool.cc (QLinearPool2DTask), qlinear_softmax.cc (QlinearSoftmaxCPU).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.integer.convention import Codes, IntegerFunction, Units, scalar
from hop.numerics.integer.families import FIXED_POOLS, AveragePool, Mean, OfTwo, Reduction, Second, exact_sum
from hop.numerics.integer.pt2e import MOST, POOLS, each, floats, pooled
from hop.numerics.tables import float32

_aten = torch.ops.aten
_LARGEST = float(torch.finfo(torch.float32).max)
_RESERVE = 5  # the sum of softmax stays below the largest float32 by this many powers of e


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in float32, rounded once; a has integers of at most 20 bits.

    In float64 the product is exact, and so is the sum unless c is 2^20 times as large.
    """
    wide = torch.float64
    return (a.to(wide) * b.to(wide) + c.to(wide)).to(torch.float32)


class _Ort(IntegerFunction):
    """Base class: the last step rounds to nearest, ties to even."""

    def finished(self, y: Tensor, units: Units, codes: Codes) -> Tensor:
        return super().finished(y.round(), units, codes)


@dataclass(frozen=True, eq=False, repr=False)
class OrtAdd(_Ort, OfTwo):
    """A sum of two tensors. With M1 and M2 the scales over the output's,

        codes = round(fma(x, M1, fma(other, M2, zero - fma(zero1, M1, zero2 · M2))))

    If x is a single number along the last dimension in which the two differ, they are swapped.
    """

    operators: ClassVar[tuple[OpOverload, ...]] = (_aten.add.Tensor,)

    def combined(self, x: Tensor, units: Units, other: Second) -> Tensor:
        if other.subtracts:
            raise ValueError("OrtAdd: subtracts must be False; onnxruntime cannot subtract codes")
        if _is_repeated(x.shape, other.codes.shape):
            swapped = units._replace(scale=other.scale, zero_point=other.zero_point)
            x, units, other = other.codes, swapped, Second(x, units.scale, units.zero_point, False)
        scale, other_scale, output_scale = units.scales(x, torch.float32, other.scale)
        zero, other_zero, output_zero = units.zeros(x, torch.float32, other.zero_point)
        first, second = scale / output_scale, other_scale / output_scale
        fixed = output_zero - fma(zero, first, other_zero * second)
        return fma(x, first, fma(other.codes, second, fixed))


def _is_repeated(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether a tensor of sizes `a` is one number along the last dimension in which `a` and `b` differ."""
    n = max(len(a), len(b))
    wide = zip((*[1] * (n - len(a)), *a), (*[1] * (n - len(b)), *b), strict=True)
    for own, its in reversed(list(wide)):
        if own != 1 or its != 1:
            return own == 1
    return False


@dataclass(frozen=True, eq=False, repr=False)
class OrtMultiply(_Ort, OfTwo):
    """An elementwise product of two tensors: round(float32(n) · M + zero).

    n is the exact product of codes minus zero points, M = (s1 · s2) / scale, and each operation is rounded to float32.
    """

    operators: ClassVar[tuple[OpOverload, ...]] = (_aten.mul.Tensor,)

    def combined(self, x: Tensor, units: Units, other: Second) -> Tensor:
        """The codes of x · other."""
        scale, other_scale, output_scale = units.scales(x, torch.float32, other.scale)
        zero, other_zero, output_zero = units.zeros(x, torch.int32, other.zero_point)
        total = (x.to(torch.int32) - zero) * (other.codes.to(torch.int32) - other_zero)
        return total.to(torch.float32) * ((scale * other_scale) / output_scale) + output_zero.to(torch.float32)


def _mean(x: Tensor, units: Units, call: Reduction) -> Tensor:
    """The codes of a mean in float32, before clamping: the sum times s / (scale · n), for n elements."""
    scale, output_scale = units.scales(x, torch.float32)
    total, count = exact_sum(x, units, call)
    steps = total.to(torch.float32) * (scale / (output_scale * count.to(torch.float32)))
    return steps.round() + units.zeros(x, torch.float32)[1]


@dataclass(frozen=True, eq=False, repr=False)
class OrtMean(_Ort, Mean):
    """A mean over n elements with an exact sum: round(float32(sum) · (s / (scale · n))) + zero.

    Each operation is rounded to float32.
    """

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op is _aten.mean.dim and not kwargs

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        return _mean(x, units, call)


@dataclass(frozen=True, eq=False, repr=False)
class OrtAveragePool(_Ort, AveragePool):
    """An average pool: (code - zero) · s, summed in float32 one by one, row by row of a window, divided by their
    number.

    The result is round(y / scale + zero). A single window that covers the whole input is a mean, computed as in
    OrtMean.
    """

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in POOLS and not kwargs

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        op, rest, dims = call
        sizes = [int(x.shape[d]) for d in dims]
        if op not in FIXED_POOLS:
            if any(n % m for n, m in zip(sizes, rest[0], strict=True)):
                raise ValueError(
                    f"OrtAveragePool: output_size must divide {tuple(sizes)}, got {list(rest[0])}; its windows have "
                    "one size"
                )
            rest = ([n // m for n, m in zip(sizes, rest[0], strict=True)],)
        kernel, _, padding, _, _, divisor = [*rest, *(None, [], 0, False, True, None)[len(rest) :]]
        if each(kernel, len(sizes)) == sizes and not any(each(padding, len(sizes))) and divisor is None:
            return _mean(x, units, call._replace(arguments=(dims, True)))
        y = pooled(floats(x, units), FIXED_POOLS[len(dims) - 1], rest, len(dims))
        return y / units.scales(x, torch.float32)[1] + units.zeros(x, torch.float32)[1]


@dataclass(frozen=True, eq=False, repr=False)
class OrtSoftmax(_Ort):
    """Softmax over a dimension of n elements, from 2 to 1024.

    A table has e^((code - largest) · s) in float32, times a factor that keeps its sum in range. The sum is computed one
    by one; the result is round(e · floor(1 / scale) / sum) + zero.
    """

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in (_aten.softmax.int, _aten._softmax.default) and not kwargs

    def compute(self, x: Tensor, units: Units, codes: Codes, *, dim: int = -1) -> Tensor:
        """The codes of softmax over `dim`; zero_point is not used."""
        n = int(x.shape[dim])
        if not 1 < n <= MOST:
            raise ValueError(f"OrtSoftmax: dimension {dim} must have 2 to {MOST} elements, got {n}; use Division()")
        scale, out = scalar(units.scale, x, torch.float64), scalar(units.output_scale, x, torch.float32)
        room = torch.full_like(scale, max(0.0, math.log(float32(_LARGEST / n)) - _RESERVE))
        below = torch.arange(-255, 1, dtype=torch.float64, device=x.device)
        table = ((below + room / scale) * scale).exp().to(torch.float32)
        wide = x.to(torch.int64)
        e = table[wide - wide.amax(dim, keepdim=True) + 255]
        total = e.select(dim, 0)
        for i in range(1, n):
            total = total + e.select(dim, i)
        steps = (e * (1.0 / out).floor()) / total.unsqueeze(dim)
        return steps.round() + scalar(units.output_zero_point, x, torch.float32)
