"""Check the arguments of quantize and fake_quantize, and bring them to one form."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, memory, tracing
from hop.compat.memory import PLAIN
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST
from hop.numerics.spelling import shown
from hop.tensor import parameters

GRADIENTS = ("clipped", "plain")
SCALES = ("scale", "zero_point")
"""The names of the arguments that replace a scale rule."""


def checked(
    name: str,
    q: Quantizer,
    x: object,
    scale: object,
    zero_point: object,
    noise: object,
    usages: Sequence[str],
    gradient: str,
) -> tuple[Tensor | None, Tensor | None]:
    """The scale and zero point in the shapes of their buffers. Raises for invalid arguments."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor, got {shown(x)}; make one with torch.tensor")
    if x.dtype not in copies.APPEARANCES:
        raise TypeError(f"{name}: x must be float16, bfloat16, float32 or float64, got {x.dtype}; cast it first")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: x must be dense, got one of layout {x.layout}; use x.to_dense()")
    if gradient not in GRADIENTS:
        raise ValueError(f"{name}: gradient must be one of {GRADIENTS}, got {gradient!r}; use one of them")
    if q.layout is not None:
        q.layout.check_shape(x.shape)
    _check_noise(name, q, x, noise)
    if copies.COLUMNWISE in usages and q.hadamard is not None:
        rows, n = copies.columns(x.shape)[1], len(q.hadamard.signs)
        if rows % n:
            raise ValueError(
                f"{name}: {q} transforms columns in blocks of {n}, of which x's rows must be a multiple; got {rows}; "
                "pad x, or use usages='rowwise'"
            )
    if scale is not None and not q.shares_scale() and copies.COLUMNWISE in usages:
        raise ValueError(f"{name}: scale belongs to one copy, but usages are {usages}; quantize each usage separately")
    return fitting_scales(name, SCALES, q, x.shape, x.device, scale, zero_point)


def fitting_scales(
    name: str,
    names: tuple[str, str],
    q: Quantizer,
    shape: Sequence[int] | None,
    device: torch.device,
    scale: Any,
    zero_point: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """The given scale and zero point, in the shapes of their buffers if `shape` is known.

    `names` are the caller's names for the two arguments.
    """
    if scale is None:
        if zero_point is not None:
            raise ValueError(f"{name}: {names[1]} must be given with {names[0]}, but {names[0]} is None; {_BOTH}")
        if (missing := q.scale.missing(names[0].removesuffix("scale"))) is not None:
            raise ValueError(f"{name}: {missing}")
        return None, None
    if (refused := q.scale.refuses_scale(names[0].removesuffix("scale"))) is not None:
        raise ValueError(f"{name}: {refused}, got {shown(scale)}")
    memory.check((scale, zero_point))
    _check_scale(name, names[0], q, scale)
    described: Mapping[str, tuple[tuple[int, ...] | None, torch.dtype]] = {
        n: (None, dtype) for n, (dtype, _) in q.stored_by_rule().items()
    }
    if shape is not None:
        described = q.buffers(shape)
    scale = _fitting(name, names[0], scale, q, device, *described[q.scale.given_name])
    if q.scale.has_zero_point() != (zero_point is not None):
        raise ValueError(f"{name}: {_zero_point_rule(names, q, zero_point)}")
    if zero_point is not None:
        zero_point = _fitting(name, names[1], zero_point, q, device, *described["zero_point"])
    _check_numbers(name, names, q, scale, zero_point)
    return scale, zero_point


def _zero_point_rule(names: tuple[str, str], q: Quantizer, zero_point: object) -> str:
    scale, own = names
    if q.scale.has_zero_point():
        return f"{own} is None, and {q} needs {own} in addition to {scale}; pass {own}="
    return f"{own} must be None, as {q} has no zero point, got {shown(zero_point)}; leave it out, or use scale=MinMax()"


def check_values(name: str, names: tuple[str, str], q: Quantizer, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise ValueError for values that are not valid scales or zero points.

    Checked only for plain CPU tensors in eager mode: a traced graph has no values, and reading a GPU's would
    synchronize.
    """
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor | None):  # numbers are checked when converted
        memory.check((scale, zero_point))
        _check_numbers(name, names, q, scale, zero_point)


def _check_numbers(name: str, names: tuple[str, str], q: Quantizer, scale: Tensor, zero_point: Tensor | None) -> None:
    if not eager.is_plain_eager():
        return
    _check_scale(name, names[0], q, scale)
    if zero_point is None:
        return
    if (wrong := _outside(zero_point, -LARGEST, LARGEST)) is not None:
        raise ValueError(f"{name}: {names[1]} must be finite; got {wrong}; {_FIND}")
    parameters.zero_point(f"{name}: {names[1]}", zero_point, q, zero_point.dtype, zero_point.device)


def _check_scale(name: str, which: str, q: Quantizer, scale: object) -> None:
    """Raise ValueError for a number, or a value that can be read, that is not a valid scale."""
    least, ends = (0.0, True) if q.scale.takes_ends else (_LEAST, False)
    if (wrong := _outside(scale, least, math.inf if ends else LARGEST)) is not None:
        rule = "0 or more" if ends else "above 0 and finite"
        raise ValueError(f"{name}: {which} must be {rule} for {q}; got {wrong}; {_FIND}")


_LEAST = 2.0**-149  # above 0, in float32
_BOTH = "give both, or neither"
_FIND = "find one with hop.calibration"


def _outside(x: Any, least: float, most: float) -> float | None:
    """A value of x outside `least` to `most`; None if there is none or the values cannot be read."""
    if parameters.is_number(x):
        return None if least <= x <= most else x
    if (
        not eager.is_plain_eager()
        or type(x) not in PLAIN
        or not x.is_floating_point()
        or not x.is_cpu
        or x.dtype.itemsize == 1
    ):
        return None
    if x.numel() == 1:
        n = x.item()
        return None if least <= n <= most else n
    inside = (x >= least) & (x <= most)
    return None if bool(inside.all()) else x.detach()[~inside][0].item()


def _check_noise(name: str, q: Quantizer, x: Tensor, noise: object) -> None:
    if noise is not None and not isinstance(noise, Tensor):
        raise TypeError(f"{name}: noise must be a tensor, got {shown(noise)}; make one with torch.tensor")
    if (noise is not None) == q.is_random():
        takes = noise is None or noise.dtype in (torch.uint8, torch.int32)
        if noise is not None and (noise.shape != x.shape or not takes or noise.device != x.device):
            raise ValueError(
                f"{name}: noise must be uint8 or int32 of x's shape {tuple(x.shape)} on {x.device}, got {noise.dtype} "
                f"of {tuple(noise.shape)} on {noise.device}; make it with hop.noise"
            )
        return
    if noise is not None:
        raise ValueError(f"{name}: {needless('noise', q, noise)}")
    raise ValueError(
        f"{name}: noise is None, and {q} rounds at random; pass noise=hop.noise(seed, x.shape), or generator= in eager "
        "mode"
    )


def needless(which: str, q: Quantizer, given: object) -> str:
    """Error text for random bits given to a quantizer that does not use them."""
    return (
        f"{which} must be None, as {q} rounds to the nearest, got {shown(given)}; leave it out, or use stochastic=True"
    )


def _fitting(
    name: str,
    which: str,
    given: object,
    q: Quantizer,
    device: torch.device,
    shape: Sequence[int] | None,
    dtype: torch.dtype,
) -> Tensor:
    if which.endswith("zero_point"):
        given = parameters.zero_point(f"{name}: {which}", given, q, dtype, device)
    elif dtype.is_floating_point:
        given = parameters.from_number(given, device)
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: {which} must be a number or a tensor, got {shown(given)}; make one with torch.tensor")
    if given.device != device:
        raise ValueError(
            f"{name}: {which} must be on the device of the operands, {device}, got one on {given.device}; move one of "
            "them"
        )
    if not given.is_floating_point() and given.dtype != dtype:
        integers = "" if dtype.is_floating_point else f" or {dtype}"
        wanted = torch.float32 if dtype.is_floating_point else dtype
        raise TypeError(
            f"{name}: {which} must be floating point{integers}, got {given.dtype}; cast it with .to({wanted})"
        )
    if given.is_floating_point() and given.dtype != torch.float32:
        given = given.to(torch.float32)
    if shape is None or (given.dim() == len(shape) and all(map(tracing.known_equal, given.shape, shape))):
        return given
    try:
        return given.expand(tuple(shape))
    except RuntimeError as error:
        raise ValueError(
            f"{name}: {which} must have a shape that broadcasts to {tuple(shape)}, got {tuple(given.shape)}; give one "
            "number for each block"
        ) from error
