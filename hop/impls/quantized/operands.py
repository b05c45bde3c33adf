"""Quantize the operands of a call, as rows that the operator sums over."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, functorch
from hop.dispatch.operators import LHS
from hop.impls.pack import unpack
from hop.impls.quantize import dequantize, fake_quantize_operator, quantize_operator
from hop.impls.quantize import quantize as found_scales
from hop.impls.quantized.calls import SchemeCall, is_quantized
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.noise import noise
from hop.tensor.buffers.operators import quantize_buffers

LHS_STREAM, RHS_STREAM, TRANSPOSED_LHS_STREAM, TRANSPOSED_RHS_STREAM, ROWS_STREAM, COLUMNS_STREAM = range(6)
"""The random streams that a call derives from its seed.

They are for the operands, their transposed copies, and the gradient in the products for lhs and for rhs.
"""


def quantize(
    q: Quantizer,
    x: Tensor,
    seed: Tensor | None,
    stream: int,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> QuantizedTensor:
    """Call hop.quantize with random bits derived from a seed."""
    bits = bits_of(q, x, seed, stream)
    if bits is None and scale is None and zero_point is None:
        return found_scales(q, x)
    return quantize_operator(str(q), x, scale, zero_point, bits, [copies.ROWWISE], "clipped")


def quantize_product(q: Quantizer, x: Tensor, factor: Tensor, seed: Tensor | None, stream: int) -> QuantizedTensor:
    """Quantize x times a factor, computed in float32, below autograd."""
    names = copies.names(q, (copies.ROWWISE,))
    random = (seed, stream) if q.stochastic else (None, None)
    buffers = quantize_buffers(str(q), x, None, None, random[0], [copies.ROWWISE], factor, random[1])
    return QuantizedTensor.fitting(dict(zip(names, buffers, strict=True)), q, x.shape, torch.float32)


def bits_of(q: Quantizer, x: Tensor, seed: Tensor | None, stream: int) -> Tensor | None:
    """The random bits for x; None if q rounds to nearest."""
    return noise(seed, x.shape, stream=stream) if q.is_random() and seed is not None else None


def plain_rows(call: SchemeCall, role: str) -> Tensor:
    """The float argument with `role`, as rows that the operator sums over."""
    x = call.find(role)
    return x.mT if call.is_transposed(role) else x


def rows(call: SchemeCall, role: str) -> Any:
    """The rows of the argument with `role`, quantized if the scheme says so."""
    q = call.quantizer(role)
    if q is None:
        return plain_rows(call, role)
    return quantize(q, plain_rows(call, role), call.seed, stream(role), *call.given(role))


def stream(role: str) -> int:
    """The random stream of an operand."""
    return LHS_STREAM if role == LHS else RHS_STREAM


def quantized_rows(call: SchemeCall, role: str) -> QuantizedTensor:
    """The quantized rows of an argument that may be quantized already."""
    x = call.find(role)
    if not is_quantized(x):
        return rows(call, role)
    inner: Any = functorch.innermost(x)
    if inner.quantizer.layout is not None:
        x = unpack(x)
    if not call.is_transposed(role):
        return x
    return swapped_codes(x) if copies.ROWWISE in x.usages else rows_of_columns(x)


def rows_of_columns(x: QuantizedTensor) -> QuantizedTensor:
    """The column-wise copy of x as row-wise copy of the transposed matrix."""
    q, shape = replace(x.quantizer, hadamard=None), copies.columns(x.shape)
    columns = copies.names(x.quantizer, (copies.COLUMNWISE,))
    rows = copies.names(q, (copies.ROWWISE,))
    buffers = x.buffers()
    return x.rebuilt({r: buffers[c] for r, c in zip(rows, columns, strict=True)}, quantizer=q, shape=shape)


def argument(call: SchemeCall, role: str) -> Any:
    """The argument with `role` for hop.scaled."""
    x = call.find(role)
    if x is None or is_quantized(x) or call.quantizer(role) is None:
        return x
    codes = rows(call, role)
    return transposed(codes) if call.is_transposed(role) else codes


def numbers(call: SchemeCall, role: str, dtype: torch.dtype) -> Tensor:
    """The dequantized value of the argument with `role`, with straight-through derivatives."""
    x = call.find(role)
    if is_quantized(x):
        return dequantize(x).to(dtype)
    q = call.quantizer(role)
    if q is None:
        return x.to(dtype)
    x = plain_rows(call, role)
    bits = bits_of(q, x, call.seed, stream(role))
    values = fake_quantize_operator(str(q), x, *call.given(role), bits, call.gradient).to(dtype)
    return values.mT if call.is_transposed(role) else values


def numbers_of_codes(call: SchemeCall, role: str, dtype: torch.dtype) -> Tensor:
    """The result of `numbers`, computed from the forward's codes, so that a compiled program finds them once for both.

    Falls back to one operator under torch.func transforms or with tangents.
    """
    x = call.find(role)
    plain = not is_quantized(x) and functorch.innermost(x) is x and not eager.is_forward_ad_active()
    if not plain or call.quantizer(role) is None:
        return numbers(call, role, dtype)
    values = dequantize(rows(call, role)).to(dtype)
    return values.mT if call.is_transposed(role) else values


def transposed(t: QuantizedTensor) -> QuantizedTensor:
    """The transposed matrices, sharing codes and scales."""
    buffers, shape = t.buffers(), (*t.shape[:-2], t.shape[-1], t.shape[-2])
    if t.dim() == 2:  # rows of one are columns of the other
        q = replace(t.quantizer, hadamard=None)
        names = copies.names(q, (copies.COLUMNWISE,))
        return t.rebuilt(dict(zip(names, buffers.values(), strict=True)), quantizer=q, shape=shape)
    return swapped_codes(t)


def swapped_codes(t: QuantizedTensor) -> QuantizedTensor:
    """The transposed matrices as a row-wise copy."""
    q, shape = t.quantizer, (*t.shape[:-2], t.shape[-1], t.shape[-2])
    codes = t.codes.mT if q.per_byte() == 1 else q.format.pack(q.format.unpack(t.codes, t.shape[-1]).mT)
    buffers = {name: b.mT for name, b in t.buffers().items()} | {"codes": codes}
    return t.rebuilt(buffers, quantizer=q.transposed(t.dim()), shape=shape)


def without_scale(t: QuantizedTensor) -> QuantizedTensor:
    """The codes of t without scale: as values with a scale of 1, minus their zero point."""
    affine = t.quantizer.scale.has_zero_point()
    q = replace(
        t.quantizer, block=(-1,) * max(t.dim(), 1), scale=Static(affine=affine), stochastic=False, hadamard=None
    )
    return t.rebuilt(t.buffers() | {"scale": torch.ones([1] * t.dim(), device=t.codes.device)}, quantizer=q)
