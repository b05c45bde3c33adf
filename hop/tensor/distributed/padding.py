"""Pad a quantized tensor with zeros at its end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.numerics import blocks
from hop.numerics.quantizer import Quantizer
from hop.tensor import units
from hop.tensor.quantized import QuantizedTensor
from hop.tensor.rules import quantized_like
from hop.tensor.table import IndivisibleError, implements, is_moving


@implements(torch.ops.aten.constant_pad_nd.default)
def constant_pad(op: OpOverload, t: QuantizedTensor, pad: Sequence[int], value: object = 0) -> QuantizedTensor:
    """zeros at the end of dimensions, with the scale of a block that they complete; otherwise dequantized"""
    behind = [0] * t.dim()
    for i, n in enumerate(pad):
        if i % 2 == 1:
            behind[-1 - i // 2] = n
        elif n != 0:
            raise IndivisibleError("padding in front moves the blocks")
    if value != 0 or any(n < 0 for n in behind):
        raise IndivisibleError(f"padding of {list(pad)} with {value}, where only zeros are added")
    return padded(t, [n + more for n, more in zip(t.shape, behind, strict=True)])


def padded(t: QuantizedTensor, shape: Sequence[int]) -> Any:
    """A tensor of `shape` with t in its first corner and zeros elsewhere. Not a view."""
    t.check()
    q, grown = t.quantizer, [d for d, n in enumerate(shape) if n != t.shape[d]]
    if not grown:
        return t.clone()
    if q.flat and any(n != 1 for n in shape[: grown[-1]]):
        raise IndivisibleError("its blocks run over the flattened tensor")
    if not q.flat:
        units.of_buffers(q, t.usages, t.dim())  # raises IndivisibleError for other forms of codes
    if q.layout is not None and q.layout.stored(q.format):
        plain = padded(t.rebuilt(q.packed(t.buffers(), t.shape, None), quantizer=q.plain), shape)
        return plain.rebuilt(q.plain.packed(plain.buffers(), shape, q.layout), quantizer=q)
    old, new = q.rows(t.shape), q.rows(shape)
    no_zero = 0.0 not in q.format.numbers or q.scale.has_offset()
    if no_zero and not is_moving() and _completes(q, old, new):
        what = "a block with an offset" if q.scale.has_offset() else q.format.name
        raise IndivisibleError(f"{what} has no zero, and the padding completes a block")
    buffers = quantized_like(t, torch.zeros(shape, dtype=t.dtype, device=t.device)).buffers()
    for name in q.stored():
        buffers[name] = _cornered(buffers[name], getattr(t, name))
    codes = _unpacked(q, buffers["codes"], new)
    if q.scale.has_zero_point() and q.layout is None:
        codes = q.spread(buffers["zero_point"], shape).to(codes.dtype)
    codes = _cornered(codes, _unpacked(q, t.codes, old))
    buffers["codes"] = q.format.pack(codes) if q.per_byte() > 1 else codes.reshape(list(shape))
    return t.rebuilt(buffers, shape=shape)


def _completes(q: Quantizer, old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether padding makes an incomplete block longer."""
    return any(
        n != m and (b == -1 or n % b != 0)
        for _, block in q.stored().values()
        for n, m, b in zip(old, new, blocks.per_dimension(block, len(new)), strict=True)
    )


def _unpacked(q: Quantizer, codes: Tensor, rows: Sequence[int]) -> Tensor:
    codes = q.format.unpack(codes, rows[-1]) if q.per_byte() > 1 else codes
    return codes.reshape(list(rows))


def _cornered(whole: Tensor, corner: Tensor) -> Tensor:
    """`whole` with `corner` in its first corner, copied as bytes, because some operators do
    not support 8-bit floats.
    """
    bits = torch.uint8 if whole.itemsize == 1 else whole.dtype
    whole = whole.contiguous().clone()
    whole.view(bits)[tuple(slice(0, n) for n in corner.shape)] = corner.contiguous().view(bits)
    return whole
