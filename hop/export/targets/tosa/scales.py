"""RESCALE: multipliers and shifts of conventions, and the range of an activation after it.

The specification requires a value multiplied by 31 bits to be below 2^(shift - 1). If it may exceed that, because the
multiplier is above 1, it is clamped first, which does not change the saturated result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import Codes, Order, new
from hop.export.targets.tosa.file import DTYPES, File, packed
from hop.numerics.formats import INT8, INT16
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.requantization import TFLITE as SINGLE
from hop.numerics.requantization import FixedPoint, WideFixedPoint, fixed_point, floor_quotient

FORMATS = {torch.int8: INT8, torch.int16: INT16}
_ROUNDINGS = {"tflite": "SINGLE_ROUND", "gemmlowp": "DOUBLE_ROUND"}
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Scale:
    """One multiplier, or one per channel.

    mantissa, right: a value is multiplied by mantissa / 2^right.
    rounding: the schema's rounding mode.
    wide: whether the mantissa has 31 bits, or 15 for 48-bit sums.
    """

    mantissa: tuple[int, ...]
    right: tuple[int, ...]
    rounding: str = "SINGLE_ROUND"
    wide: bool = True

    @classmethod
    def number(cls, multiplier: Tensor, rounding: str = "SINGLE_ROUND") -> "Scale":
        """The scale for positive float64 multipliers."""
        mantissa, shift = fixed_point(multiplier.reshape(-1).to(torch.float64))
        right = (31 - shift).clamp(min=2)  # with a multiplier of 2^29 or more, all codes but 0 saturate anyway
        return cls(tuple(mantissa.tolist()), tuple(right.tolist()), rounding)

    @classmethod
    def of(cls, convention: object, lhs: Tensor, rhs: Tensor, out: Tensor) -> "Scale":
        """The scale that a convention defines."""
        if isinstance(convention, IntegerFunction):  # these change scales by SINGLE
            convention = SINGLE
        if isinstance(convention, FixedPoint) and convention.rounding in _ROUNDINGS:
            return cls.number(convention.quotient(lhs, rhs, out), _ROUNDINGS[convention.rounding])
        if isinstance(convention, WideFixedPoint):
            mantissa, shift = fixed_point(lhs.to(torch.float64) * rhs.to(torch.float64) / out.to(torch.float64))
            mantissa = torch.where(mantissa < 0x7FFF0000, floor_quotient(mantissa + 2**15, 2**16), 2**15 - 1)
            right = (15 - shift).reshape(-1)
            if int(right.min()) < 2:
                raise NotImplementedError("a multiplier is 2^13 or more, which 48-bit RESCALE does not support")
            return cls(tuple(mantissa.reshape(-1).tolist()), tuple(right.tolist()), wide=False)
        raise NotImplementedError(
            f"its convention is {convention}; RESCALE rounds once, ties up, or as gemmlowp does: use the target "
            "TOSA_1_0"
        )


UNIT = Scale((2**30,), (30,))


def rescaled(
    file: File, x: str, output: str, scale: Scale, zeros: tuple[int, int] = (0, 0), most: Tensor | int | None = None
) -> str:
    """RESCALE x to `output`, whose dtype determines the result's.

    `zeros` are the zero points of both; `most` bounds |x - zero|, per channel or for all.
    """
    dtype, out = file.dtypes[x], file.dtypes[output]
    if most is None:
        info = torch.iinfo(dtype)
        most = max(abs(info.min - zeros[0]), abs(info.max - zeros[0]))
    if scale.wide:
        limits = 2 ** (torch.tensor(scale.right, dtype=torch.int64) - 1)
        if bool((torch.as_tensor(most) >= limits).any()):
            if dtype != torch.int32:
                x = plain(file, x, zeros[0])
            x, zeros = _clamped(file, x, limits), (0, zeros[1])
    elif bool((torch.as_tensor(most).to(torch.float64) * _quotient(scale) >= _INT32).any()):
        raise NotImplementedError("its sums reach 2^31 steps of the result, which 48-bit RESCALE does not support")
    inputs = [
        x,
        file.constant(scale.mantissa, torch.int32 if scale.wide else torch.int16),
        file.constant(scale.right, torch.int8),
        file.constant([zeros[0]], file.dtypes[x]),
        file.constant([zeros[1]], out),
    ]
    return file.operator(
        "RESCALE",
        inputs,
        output,
        scale32=scale.wide,
        rounding_mode=scale.rounding,
        per_channel=len(scale.mantissa) > 1,
    )


def _quotient(scale: Scale) -> Tensor:
    return torch.tensor(scale.mantissa, dtype=torch.float64) / 2.0 ** torch.tensor(scale.right)


def plain(file: File, x: str, zero: int) -> str:
    """Codes minus their zero point, int32."""
    return rescaled(file, x, file.tensor(f"{x}_int32", file.sizes[x], torch.int32), UNIT, (zero, 0))


def _clamped(file: File, x: str, limits: Tensor) -> str:
    """Clamp x, int32, to -limit .. limit - 1."""
    shape, rank = file.sizes[x], max(len(file.sizes[x]), 1)
    high = [min(n - 1, _INT32) for n in limits.tolist()]
    x = file.made("MINIMUM", [x, file.constant(high, torch.int32, rank)], f"{x}_most", shape, nan_mode="PROPAGATE")
    low = [-n - 1 for n in high]
    return file.made("MAXIMUM", [x, file.constant(low, torch.int32, rank)], f"{x}_least", shape, nan_mode="PROPAGATE")


def bounds(step: Step) -> tuple[int, int]:
    """The smallest and the largest code of the result, within the range of its fused activation."""
    format = FORMATS[step.result.dtype]
    limits = torch.tensor([format.low, format.high])
    if step.convention is not None:
        limits = step.convention.clamp(limits, torch.tensor(step.result.scale), step.result.zero, format)
    low, high = limits.tolist()
    return int(low), int(high)


def _is_clamped(step: Step, least: int | None = None) -> bool:
    format = FORMATS[step.result.dtype]
    return bounds(step) != (format.low, format.high) or (least is not None and least > format.low)


def clamped(step: Step, x: str, order: Order, least: int | None = None) -> None:
    """Set the step's result to x, which has its units, clamped to the activation's range and to `least`."""
    low, high = bounds(step)
    low, dtype = low if least is None else max(low, least), step.result.dtype
    if _is_clamped(step, least):
        output = new(step.file, step.result, order)
        attributes = {"min_val": packed(low, dtype), "max_val": packed(high, dtype), "nan_mode": "PROPAGATE"}
        x = step.file.operator("CLAMP", [x], output, **attributes)
    step.result.tensors[order] = x


def result(step: Step, order: Order, shape: Sequence[int] | None = None, least: int | None = None) -> str:
    """Add a tensor for the codes of the result before its activation."""
    sizes = [step.result.shape[d] for d in order] if shape is None else shape
    suffix = "_whole" if _is_clamped(step, least) or shape is not None else ""
    return step.file.tensor(step.result.name + suffix, sizes, step.result.dtype)


def finished(step: Step, total: str, order: Order, scale: Scale, most: Tensor | int) -> None:
    """Rescale sums, int32 or 48 bits, to the step's result, with a reshape if only the number of elements matches."""
    shape = step.file.sizes[total]
    wanted = tuple(step.result.shape[d] for d in order)
    output = rescaled(
        step.file,
        total,
        result(step, order, None if shape == wanted else shape),
        scale,
        (0, step.result.zero),
        most,
    )
    if shape != wanted:
        output = step.file.operator("RESHAPE", [output, step.file.shape(wanted)], result(step, order))
    clamped(step, output, order)


def same(step: Step, x: str, source: Codes, order: Order, least: int | None = None) -> None:
    """Set the step's result from codes with the units of `source`."""
    if not source.is_alike(step.result):
        own = torch.tensor(source.scale)
        scale = Scale.of(step.convention, own, torch.ones_like(own), torch.tensor(step.result.scale))
        x = rescaled(step.file, x, result(step, order, least=least), scale, (source.zero, step.result.zero))
    elif x not in source.tensors.values() and not _is_clamped(step, least):
        x = step.file.renamed(x, step.result.name)
    clamped(step, x, order, least)


def accumulator_name(dtype: torch.dtype) -> str:
    """The schema's name of the accumulator dtype for products of codes."""
    return DTYPES[sums(dtype)]


def sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of products of codes."""
    return torch.int64 if dtype == torch.int16 else torch.int32
