"""The copies of a tensor that products read: row-wise, column-wise, or both.

A product reads each operand along the dimension it sums over, and a block-scaled format has its blocks there. So a
tensor used in several products is quantized twice:

    row-wise       the tensor itself, (*lead, K)
    column-wise    the matrix (K, M), where M is the product of the leading sizes: the tensor as rows, transposed

Each copy is quantized by the same quantizer. If one scale serves the whole tensor, the copies share it. A quantizer's
Hadamard transform applies to the column-wise copy, along M.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown

ROWWISE, COLUMNWISE = "rowwise", "columnwise"
USAGES = (ROWWISE, COLUMNWISE)
_PREFIX = COLUMNWISE + "_"

Usages = tuple[str, ...]

APPEARANCES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that a quantized tensor can be created from and appear in."""


def checked(quantizer: Quantizer, usages: object) -> Usages:
    """Return `usages` as an ordered tuple, or raise ValueError unless they name copies that `quantizer` supports."""
    checked_usages = (usages,) if isinstance(usages, str) else tuple(usages) if isinstance(usages, tuple | list) else ()
    if not checked_usages or any(u not in USAGES for u in checked_usages):
        raise ValueError(f"usages must name one or both of {USAGES}, got {shown(usages)}; use one of them, or both")
    if COLUMNWISE in checked_usages and quantizer.flat:
        raise ValueError(
            f"usages {shown(usages)}: a quantizer with flat=True has no column-wise copy; use usages={ROWWISE!r}"
        )
    if COLUMNWISE in checked_usages and quantizer.is_tiled():
        raise ValueError(
            f"usages {shown(usages)}: layout={quantizer.layout} is for the row-wise copy only; use usages={ROWWISE!r}"
        )
    return tuple(u for u in USAGES if u in checked_usages)


def of(names: Sequence[str]) -> Usages:
    """The usages of a tensor whose buffers have these names."""
    return tuple(u for u, name in ((ROWWISE, "codes"), (COLUMNWISE, _PREFIX + "codes")) if name in names)


def columns(shape: Sequence[int]) -> list[int]:
    """The shape of the column-wise matrix."""
    return [shape[-1] if len(shape) else 1, math.prod(shape[:-1])]


class Buffer(NamedTuple):
    """Description of one buffer of a quantized tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=4096)
def names(quantizer: Quantizer, usages: Usages) -> tuple[str, ...]:
    """The names of the buffers, in order."""
    every = [name_of(quantizer, usage, own) for usage in usages for own in ("codes", *quantizer.stored())]
    return tuple(dict.fromkeys(every))


def describe(quantizer: Quantizer, shape: Sequence[int], usages: Usages) -> list[Buffer]:
    """Descriptions of the buffers, in order."""
    buffers: dict[str, Buffer] = {}
    for usage in usages:
        wise = shape if usage == ROWWISE else columns(shape)
        for own, (size, dtype) in quantizer.buffers(wise).items():
            name = name_of(quantizer, usage, own)
            buffers.setdefault(name, Buffer(name, size, dtype))
    return list(buffers.values())


def check(described: Sequence[Buffer], buffers: Sequence[Any], device: torch.device | None = None) -> None:
    """Raise TypeError or ValueError unless `buffers` are dense, match their descriptions, and are on one device."""
    if len(buffers) != len(described):
        raise ValueError(f"buffers must be {[b.name for b in described]}, got {len(buffers)}; give a list of these")
    for b, tensor in zip(described, buffers, strict=True):
        check_one(b, tensor, device)
        device = tensor.device


def check_one(described: Buffer, buffer: object, device: torch.device | None) -> None:
    """Raise TypeError or ValueError unless `buffer` is dense, matches its description, and is on `device` if given."""
    name, shape, dtype = described
    if not isinstance(buffer, Tensor):
        raise TypeError(f"buffer {name} must be a tensor, got {shown(buffer)}; give such a tensor")
    own = tuple(buffer.shape)
    if own != shape or buffer.dtype != dtype:
        raise ValueError(
            f"buffer {name} must be {dtype} of {shown(shape)}, got {buffer.dtype} of {own}; give such a tensor"
        )
    if buffer.layout != torch.strided:
        raise ValueError(f"buffer {name} must be dense, got one of layout {buffer.layout}; use to_dense()")
    if device is not None and buffer.device != device:
        raise ValueError(f"buffer {name} must be on {device}, got one on {buffer.device}; move it there")


def quantize(
    quantizer: Quantizer,
    x: Tensor,
    usages: Usages = (ROWWISE,),
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    noise: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the buffers that `describe` lists. A given scale serves all copies."""
    result: dict[str, Tensor] = {}
    for usage in usages:
        rows = x if usage == ROWWISE else _transposed(x)
        if usage == COLUMNWISE and quantizer.hadamard is not None:
            rows = quantizer.hadamard.apply(rows)
        own: list[Any] = [scale, zero_point, noise]
        if usage == COLUMNWISE:  # always two-dimensional; a given scale is one number
            own = [t if t is None else t.reshape(1, 1) for t in own[:2]] + [
                None if noise is None else _transposed(noise)
            ]
        for name, buffer in quantizer.quantize(rows, *own).items():
            result.setdefault(name_of(quantizer, usage, name), buffer)
    return result


def dequantize(quantizer: Quantizer, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """Dequantize a tensor of `shape` to float32, from its row-wise copy if there is one."""
    usage = of(list(buffers))[0]
    stored = {name: buffers[name_of(quantizer, usage, name)] for name in ("codes", *quantizer.stored())}
    if usage == ROWWISE:
        return quantizer.dequantize(stored, shape)
    values = quantizer.dequantize(stored, columns(shape))
    if quantizer.hadamard is not None:
        values = quantizer.hadamard.invert(values)
    return values.t().reshape(shape)


def name_of(quantizer: Quantizer, usage: str, name: str) -> str:
    """The name of one copy's buffer within the tensor."""
    shared = quantizer.shares_scale() and name != "codes"
    return name if usage == ROWWISE or shared else _PREFIX + name


def _transposed(x: Tensor) -> Tensor:
    return x.reshape(columns(x.shape)[::-1]).t()
