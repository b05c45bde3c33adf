"""Rewrite hop.out_dtype as products of 8- or 16-bit codes minus their zero points."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.export.targets.onnx.operators import BYTES, CONVOLUTION, MATMUL
from hop.impls.out_dtype import meaning
from hop.impls.out_dtype.forms import as_convolution, as_product
from hop.kernels.aten.convolution import Convolution, as_plain

aten = torch.ops.aten
_CODES = (*BYTES, torch.int16)


def product(op: OpOverload, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Tensor:
    """out_dtype(op, dtype, *args): one of our products if its factors are integers, else the reference."""
    result = None
    if dtype == torch.int32:
        result = _as_matmul(op, args, kwargs)
        if result is None and not kwargs:
            result = _as_convolution(op, args)
    return meaning.reference(op, dtype, *args, **kwargs) if result is None else result


def _are_codes(*operands: object) -> bool:
    return all(isinstance(x, Tensor) and x.dtype in _CODES for x in operands)


def _as_matmul(op: OpOverload, args: Args, kwargs: Kwargs) -> Tensor | None:
    if op is aten.linear.default and _are_codes(*args[:2]) and args[0].dim() > 1 and args[1].dim() == 2:
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else None
        y = MATMUL(x, weight.permute(1, 0), None, None)  # supports any number of dimensions, unlike aten.mm
        return y if bias is None else y + bias.to(torch.int32)
    product = as_product(op, args, kwargs)
    if product is None or not _are_codes(product.lhs, product.rhs):
        return None
    return product.complete(MATMUL(product.lhs, product.rhs, None, None))


def _as_convolution(op: OpOverload, args: Args) -> Tensor | None:
    if len(args) < 2 or not _are_codes(*args[:2]):
        return None
    pads = None
    if len(args) > 4 and isinstance(args[4], str):  # conv2d.padding
        op, args, pads = _with_numbers(op, args)
    form = as_convolution(op, args)
    if form is None:
        return None
    conv = as_plain(form.conv) if form.conv.transposed else form.conv
    y = CONVOLUTION(*conv[:2], None, None, list(conv.stride), pads or _both(conv), list(conv.dilation), conv.groups)
    if form.bias is not None:
        y = y + form.bias.to(torch.int32).view(-1, *[1] * len(conv.stride))
    return y.squeeze(0) if form.unbatched else y


def _both(conv: Convolution) -> list[int]:
    return [*conv.padding, *conv.padding]


def _with_numbers(op: OpOverload, args: Sequence[Any]) -> tuple[OpOverload, Args, list[int]]:
    """A convolution with padding "same" or "valid", rewritten without padding, and the padding of both ends."""
    kernel = args[1].shape[2:]
    dilation = args[5] if len(args) > 5 else 1
    dilation = (
        [dilation] * len(kernel) if isinstance(dilation, int) else list(dilation) * (len(kernel) // len(dilation))
    )
    total = [d * (int(k) - 1) if args[4] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    start = [t // 2 for t in total]
    plain = op.overloadpacket.default
    return plain, (*args[:4], 0, *args[5:]), [*start, *(t - s for t, s in zip(total, start, strict=True))]
