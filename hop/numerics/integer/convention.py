"""Base class of integer functions: supported operators, options and checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics.formats import Integer
from hop.numerics.requantization import Convention
from hop.numerics.spelling import shown


class Codes(NamedTuple):
    """The range and dtype of a function's codes."""

    low: int
    high: int
    dtype: torch.dtype


class Units(NamedTuple):
    """The scale and zero point of the operand and of the output, one number each."""

    scale: Tensor
    zero_point: Tensor | int
    output_scale: Tensor
    output_zero_point: Tensor | int

    def scales(self, x: Tensor, dtype: torch.dtype, *more: Tensor) -> list[Tensor]:
        """The scales of the operand, of further operands, and of the output, as 0-d tensors on x's device."""
        return [scalar(s, x, dtype) for s in (self.scale, *more, self.output_scale)]

    def zeros(self, x: Tensor, dtype: torch.dtype, *more: Tensor | int) -> list[Tensor]:
        """The same for zero points."""
        return [scalar(z, x, dtype) for z in (self.zero_point, *more, self.output_zero_point)]


@dataclass(frozen=True, eq=False, repr=False)
class IntegerFunction(Convention):
    """A function from codes to codes. `low` and `high` clamp its result, as for a product.

    Subclasses define `takes`, and `compute(x, units, codes, **options)`, which returns codes in int64, or in a float
    dtype that represents them, including the zero point and before clamping. x are the operand's codes, `units` the
    scales and zero points, `codes` the requested range and dtype. Options are `other`, `other_scale` and
    `other_zero_point` of a second operand; `op`, `rest` (the arguments after x) and `dims` (the reduced dimensions) of
    a mean or pool; `others` and `dim` of a concatenation; `dim` of softmax; `weight` and `bias` of a norm.
    """

    exact: ClassVar[bool] = False
    inputs: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.uint8)
    compute: ClassVar[Callable[..., Tensor]]

    def codes(
        self,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | int,
        output_scale: Tensor,
        output_zero_point: Tensor | int,
        format: Integer | torch.dtype,
        **options: Any,
    ) -> Tensor:
        """The codes of the function of x in `format`: an integer format, or torch.int16 for its full range.

        Args:
            x: codes with a dtype of `inputs`, of any shape.
            scale, zero_point: those of x, one number each.
            output_scale, output_zero_point: those of the result.
            options: further arguments of `compute`.

        Raises:
            TypeError: x has another dtype, or format is invalid.
            ValueError: a scale has several numbers, or the function does not support these output codes.
        """
        codes = self.check(x, scale, output_scale, format)
        if "other" in options:
            self.check(options["other"], options["other_scale"], output_scale, format)
        units = Units(scale, zero_point, output_scale, output_zero_point)
        return self.finished(self.compute(x, units, codes, **options), units, codes)

    def takes(self, op: OpOverload, kwargs: Mapping[str, object] = {}) -> bool:
        """Whether it computes `op`, called with `kwargs`."""
        raise NotImplementedError

    def output_units(self, format: Integer | torch.dtype) -> tuple[float, int] | None:
        """The only scale and zero point that its codes can have; None if any are supported."""
        return None

    def check(self, x: Tensor, scale: Tensor, output_scale: Tensor, format: Integer | torch.dtype) -> Codes:
        """The range and dtype of codes in `format`. Raises for unsupported arguments."""
        name = type(self).__name__
        if x.dtype not in self.inputs:
            known = " or ".join(map(str, self.inputs))
            raise TypeError(f"{name}: codes must be {known}, got {x.dtype}; give codes of such a dtype")
        for which, given in (("scale", scale), ("output_scale", output_scale)):
            if given.numel() != 1:
                raise ValueError(
                    f"{name}: {which} must be one number of the whole tensor, got shape {tuple(given.shape)}; quantize "
                    "with the block (-1, ...)"
                )
        if isinstance(format, torch.dtype):
            info = torch.iinfo(format)
            return Codes(info.min, info.max, format)
        if not isinstance(format, Integer):
            raise TypeError(
                f"{name}: format must be a format of integers or torch.int16, got {shown(format)}; give one "
                "such as hop.formats.INT8"
            )
        return Codes(format.low, format.high, format.dtype)

    def whole(self, codes: Codes, *allowed: torch.dtype) -> None:
        """Raise ValueError unless `codes` is the full range of one of the dtypes."""
        info = torch.iinfo(codes.dtype)
        if codes.dtype not in allowed or (codes.low, codes.high) != (info.min, info.max):
            raise ValueError(
                f"{type(self).__name__}: format must have all codes of {' or '.join(map(str, allowed))}, got "
                f"{codes.low} to {codes.high} of {codes.dtype}; give such a format"
            )

    def finished(self, y: Tensor, units: Units, codes: Codes) -> Tensor:
        """Clamp the result of `compute` to the range of the codes and of the activation."""
        return self.clamp(y, units.output_scale, units.output_zero_point, codes).to(codes.dtype)  # type: ignore[arg-type]


def one_of(value: object, allowed: Sequence[object], what: str) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {tuple(allowed)}, got {shown(value)}; use one of them")


def scalar(x: Tensor | int | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A number, or a tensor with one element, as a 0-d tensor."""
    if isinstance(x, Tensor):
        return x.reshape(()).to(dtype)
    return torch.full((), x, dtype=dtype, device=like.device)
