"""Plans of quantize and dequantize: calls whose kernel is known, kept by what they have in common.

Checking a call and choosing its kernel takes 20 to 30 µs; a plan leaves one call of the native operator. There are
plans for the row-wise copy of a plain tensor by a quantizer that finds its scale and rounds to the nearest, and back.
"""

from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.dispatch.hop import PLAIN
from hop.kernels.cpu import native
from hop.kernels.cpu import quantize as native_quantize
from hop.kernels.cpu.quantizers import plan as described
from hop.numerics import copies, memory_format
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor
from hop.tensor.quantized import kind_of

_MOST = 4096
_Plan = tuple[Any, str, tuple[str, ...], bool] | None
"""The operator, its description, the names of buffers, and whether each code has a byte."""
_quantize: dict[tuple[Any, ...], _Plan] = {}
_dequantize: dict[tuple[Any, ...], _Plan] = {}
native.on_change += [_quantize.clear, _dequantize.clear]
_fresh, _below_autograd = QuantizedTensor.fresh, eager.below_autograd
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize(q: Quantizer, x: Tensor) -> QuantizedTensor | None:
    """The row-wise copy of x, with the scale that the rule finds; None for a call that is none of these, or is to be
    looked at."""
    if type(x) not in PLAIN or not eager.is_plain_eager() or _is_watched(x):
        return None
    shape, dtype = x.shape, x.dtype
    key = (q, shape, dtype)
    try:
        plan = _quantize[key]
    except KeyError:
        plan = _remember(_quantize, key, _plan("quantize", _words_of(q, x), q))
    if plan is None or not x.is_cpu or (len(shape) > 3 and memory_format.is_channels_last(x)):
        return None
    operator, words, names, has_bytes = plan
    try:
        with _below_autograd():
            made = operator(x, None, None, None, words)
    except RuntimeError:  # of memory: the general way says which
        return None
    if has_bytes:
        return _fresh(names, made, q, shape, dtype)
    return QuantizedTensor.fitting(dict(zip(names, made, strict=True)), q, shape, dtype)


def dequantize(x: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The numbers of x, or None as above."""
    if type(x) is not QuantizedTensor or not eager.is_plain_eager() or _is_watched(x):
        return None
    kind, dtype = x._kind or kind_of(x), dtype or x.dtype
    key = (kind, dtype)
    try:
        plan = _dequantize[key]
    except KeyError:
        plan = _remember(_dequantize, key, _plan("dequantize", _words_back(x, dtype), x.quantizer))
    own = vars(x)
    if plan is None or type(own["codes"]) not in PLAIN:
        return None
    (operator, words, names, _), shape = plan, kind[2]
    if len(shape) > 3 and memory_format.is_channels_last(own["codes"]):
        return None
    try:
        with _below_autograd():
            y = operator(own["codes"], own["scale"], own[names[2]] if len(names) > 2 else None, shape, words)
    except RuntimeError:
        return None
    return y if y.is_cpu else None


def _is_watched(x: Tensor) -> bool:
    """Whether a derivative may be asked of what is made of x."""
    return (x.requires_grad and torch.is_grad_enabled()) or (eager.is_dual_level_open() and eager.has_tangent(x))


def _remember(plans: dict[tuple[Any, ...], _Plan], key: tuple[Any, ...], plan: _Plan) -> _Plan:
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = plan
    return plan


def _plan(name: str, words: str | None, q: Quantizer) -> _Plan:
    if words is None:
        return None
    return getattr(torch.ops.hop_native, name).default, words, ("codes", *q.stored()), q.per_byte() == 1


def _words_of(q: Quantizer, x: Tensor) -> str | None:
    """What the native operator is told of a call, or None where another kernel takes it."""
    asks = q.stochastic or q.hadamard is not None or x.dtype not in _FLOATS or q.scale.missing() is not None
    if asks or native_quantize.QUANTIZE.declines((str(q), x, None, None, None, [copies.ROWWISE])) is not None:
        return None
    return _words(q)


def _words_back(x: QuantizedTensor, dtype: torch.dtype) -> str | None:
    if x.usages != (copies.ROWWISE,) or dtype not in _FLOATS or x.quantizer.hadamard is not None:
        return None
    call = (str(x.quantizer), list(x.buffers().values()), x.usages, x.shape, dtype)
    if native_quantize.DEQUANTIZE.declines(call) is not None:
        return None
    found = described(str(x.quantizer))
    return None if isinstance(found, str) else found.back(dtype)


def _words(q: Quantizer) -> str | None:
    found = described(str(q))
    return None if isinstance(found, str) else found.words
