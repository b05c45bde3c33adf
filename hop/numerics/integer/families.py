"""Families of integer functions: the operators they compute, and the options of `compute` as one value.

A subclass defines `combined` for a function of two tensors, or `reduced` for a mean, pool or resize.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.integer.convention import Codes, IntegerFunction, Units
from hop.numerics.requantization import FixedPoint

_aten = torch.ops.aten
FIXED_POOLS = (_aten.avg_pool1d.default, _aten.avg_pool2d.default, _aten.avg_pool3d.default)
ADAPTIVE_POOLS = (_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default)


class Second(NamedTuple):
    """The second operand of a function of two tensors."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | int
    subtracts: bool


class OfTwo(IntegerFunction):
    """A sum or difference of two tensors, which broadcast."""

    operators: ClassVar[tuple[OpOverload, ...]] = (_aten.add.Tensor, _aten.sub.Tensor)

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in self.operators and kwargs.get("alpha", 1) == 1

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
        return self.combined(x, units, Second(other, other_scale, other_zero_point, subtracts))

    def combined(self, x: Tensor, units: Units, other: Second) -> Tensor:
        """The codes of x + other, or of x - other if it subtracts."""
        raise NotImplementedError


class Reduction(NamedTuple):
    """The call op(x, *arguments), which reduces or resizes `dims`."""

    op: OpOverload
    arguments: Sequence[Any]
    dims: Sequence[int]

    @property
    def keeps(self) -> bool:
        """Whether a mean keeps the reduced dimensions."""
        return len(self.arguments) > 1 and bool(self.arguments[1])


class Reducing(IntegerFunction):
    """A mean, a pool or a resize."""

    operators: ClassVar[tuple[OpOverload, ...]]

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        return op in self.operators

    def compute(
        self,
        x: Tensor,
        units: Units,
        codes: Codes,
        *,
        op: OpOverload = _aten.mean.dim,
        rest: Sequence[object] = (),
        dims: Sequence[int] = (),
    ) -> Tensor:
        return self.reduced(x, units, Reduction(op, rest, dims))

    def reduced(self, x: Tensor, units: Units, call: Reduction) -> Tensor:
        """The codes of the result."""
        raise NotImplementedError


class Mean(Reducing):
    """A mean of n elements."""

    operators = (_aten.mean.dim, _aten.mean.default)


class AveragePool(Reducing):
    """An average pool of one or two dimensions."""

    operators = (*FIXED_POOLS[:2], *ADAPTIVE_POOLS)


class Concatenation(IntegerFunction):
    """A concatenation of operands that `rule` requantizes to the output's scale."""

    rule: ClassVar[FixedPoint]

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
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
        """Concatenate the codes of x and of `others`, each with its scale and zero point, along `dim`."""
        operands = ((x, *units[:2]), *others)
        parts = [requantized(t, units._replace(scale=s, zero_point=z), self.rule) for t, s, z in operands]
        return torch.cat([p.clamp(codes.low, codes.high) for p in parts], dim)


def exact_sum(x: Tensor, units: Units, call: Reduction) -> tuple[Tensor, Tensor]:
    """The exact sum of a mean's codes minus their zero points, and their number, both int64."""
    zero = units.zeros(x, torch.int64)[0]
    count = torch.ones_like(zero)
    for d in call.dims:
        count = count * x.shape[d]
    return x.to(torch.int64).sum(list(call.dims), keepdim=call.keeps) - zero * count, count


def requantized(x: Tensor, units: Units, rule: FixedPoint) -> Tensor:
    """Convert codes to the output's scale and zero point, int64, before clamping."""
    scale, output_scale = units.scales(x, torch.float32)
    zero, output_zero = units.zeros(x, torch.int64)
    return rule.steps(x.to(torch.int64) - zero, scale, torch.ones_like(scale), output_scale) + output_zero
