"""What may be asked of quantize and fake_quantize, brought to one form."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, memory, tracing
from hop.compat.memory import PLAIN
from hop.numerics import copies
from hop.numerics.formats import NOISE_BITS
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST

GRADIENTS = ("clipped", "plain")


def checked(
    name: str,
    q: Quantizer,
    x: Any,
    scale: Any,
    zero_point: Any,
    noise: Any,
    usages: Sequence[str],
    gradient: str,
) -> tuple[Tensor | None, Tensor | None]:
    """The scale and zero point in the shapes of their buffers. Raises for what breaks a rule."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
    if x.dtype not in copies.APPEARANCES:
        raise TypeError(f"{name}: x must be float16, bfloat16, float32 or float64, got {x.dtype}; cast it first")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: x must be dense, got one of layout {x.layout}; use x.to_dense()")
    if gradient not in GRADIENTS:
        raise ValueError(f"{name}: gradient must be one of {GRADIENTS}, got {gradient!r}")
    if q.layout is not None:
        q.layout.check_shape(x.shape)
    _check_noise(name, q, x, noise)
    if copies.COLUMNWISE in usages and q.hadamard is not None:
        rows, n = copies.columns(x.shape)[1], len(q.hadamard.signs)
        if rows % n:
            raise ValueError(
                f"{name}: {q} transforms columns in blocks of {n}, so x's rows must be a multiple; got {rows}"
            )
    if scale is not None and not q.shares_scale() and copies.COLUMNWISE in usages:
        raise ValueError(f"{name}: scale is that of one copy, but usages are {usages}; quantize them one by one")
    return fitting_scales(name, "", q, x.shape, x.device, scale, zero_point)


def fitting_scales(
    name: str, prefix: str, q: Quantizer, shape: Sequence[int] | None, device: torch.device, scale: Any, zero_point: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The given scale and zero point in the shapes of their buffers for a tensor of `shape`, if that is known; errors
    put a prefix before their names."""
    if scale is None:
        if zero_point is not None:
            raise ValueError(f"{name}: {prefix}zero_point is given without {prefix}scale; give both, or neither")
        if (missing := q.scale.missing(prefix)) is not None:
            raise ValueError(f"{name}: {missing}")
        return None, None
    memory.check((scale, zero_point))
    described: dict[str, Any] = {n: (None, dtype) for n, (dtype, _) in q.stored().items()}
    if shape is not None:
        described = q.buffers(shape)
    scale = _fitting(name, f"{prefix}scale", scale, device, *described[q.scale.given_name])
    if q.scale.has_zero_point() != (zero_point is not None):
        needs = f"needs {prefix}zero_point beside {prefix}scale"
        rule = needs if q.scale.has_zero_point() else "has no zero point; use scale=MinMax()"
        raise ValueError(f"{name}: {q} {rule}")
    if zero_point is not None:
        zero_point = _fitting(name, f"{prefix}zero_point", zero_point, device, *described["zero_point"])
    _check_numbers(name, prefix, q, scale, zero_point)
    return scale, zero_point


def check_values(name: str, prefix: str, q: Quantizer, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise ValueError for numbers that are no scale or no zero point, of given tensors whose numbers are at hand:
    plain ones on the CPU, in eager mode. A graph has none, and one would have to wait for those of a GPU."""
    memory.check((scale, zero_point))
    _check_numbers(name, prefix, q, scale, zero_point)


def _check_numbers(name: str, prefix: str, q: Quantizer, scale: Tensor, zero_point: Tensor | None) -> None:
    if not eager.is_plain_eager():
        return
    least, ends = (0.0, True) if q.scale.takes_ends else (_LEAST, False)
    if (found := _outside(scale, least, math.inf if ends else LARGEST)) is not None:
        rule = "0 or more" if ends else "above 0 and finite"
        raise ValueError(f"{name}: {prefix}scale must be {rule} for {q}; got {found}")
    if zero_point is not None and (found := _outside(zero_point, -LARGEST, LARGEST)) is not None:
        raise ValueError(f"{name}: {prefix}zero_point must be finite; got {found}")


_LEAST = 2.0**-149  # above 0, in float32


def _outside(x: Tensor, least: float, most: float) -> float | None:
    """A number of x that is not from `least` to `most`; None if there is none, or none can be looked at."""
    if type(x) not in PLAIN or not x.is_floating_point() or not x.is_cpu or x.dtype.itemsize == 1:
        return None
    if x.numel() == 1:
        n = x.item()
        return None if least <= n <= most else n
    inside = (x >= least) & (x <= most)
    return None if bool(inside.all()) else x.detach()[~inside][0].item()


def _check_noise(name: str, q: Quantizer, x: Tensor, noise: Any) -> None:
    if (noise is not None) == q.stochastic:
        if noise is not None and (noise.shape != x.shape or noise.dtype != torch.uint8 or noise.device != x.device):
            raise ValueError(
                f"{name}: noise must be uint8 of x's shape {tuple(x.shape)} on {x.device}, got {noise.dtype} of "
                f"{tuple(noise.shape)} on {noise.device}"
            )
        return
    if noise is not None:
        raise ValueError(f"{name}: noise is given, but {q} rounds to the nearest; use stochastic=True, or no noise")
    raise ValueError(
        f"{name}: {q} rounds at random; pass noise=torch.randint(0, {2**NOISE_BITS}, x.shape, dtype=torch.uint8), or "
        "generator= in eager mode"
    )


def _fitting(
    name: str, which: str, given: Any, device: torch.device, shape: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: {which} must be a tensor, got {type(given).__name__}")
    if given.device != device:
        raise ValueError(f"{name}: {which} is on {given.device} and the operands on {device}; move one of them")
    if not given.is_floating_point() and given.dtype != dtype:
        raise TypeError(f"{name}: {which} must be floating point or {dtype}, got {given.dtype}")
    if given.is_floating_point() and given.dtype != torch.float32:
        given = given.to(torch.float32)
    if shape is None or (given.dim() == len(shape) and all(map(tracing.known_equal, given.shape, shape))):
        return given
    try:
        return given.expand(tuple(shape))
    except RuntimeError as error:
        raise ValueError(
            f"{name}: {which} must have a shape that broadcasts to {tuple(shape)}, one number for each block; got "
            f"{tuple(given.shape)}"
        ) from error
