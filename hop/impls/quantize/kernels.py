"""Plans of quantize and dequantize: one call of the native operator, where it takes such calls."""

from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.dispatch.plan import Plan
from hop.kernels.cpu import quantize as native
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor


def quantizing(q: Quantizer, x: Any, general: Plan) -> Plan:
    """The plan for tensors like x, row-wise, with the scale that the rule finds; `general` where there is none."""
    words = native.words_of(q, x) if isinstance(x, Tensor) else None
    if words is None:
        return general
    operator, names, per_byte = torch.ops.hop_native.quantize.default, copies.names(q, (copies.ROWWISE,)), q.per_byte()
    below, fresh, shape, dtype = eager.below_autograd, QuantizedTensor.fresh, x.shape, x.dtype

    def run(x: Tensor) -> Tensor:
        try:
            with below():
                buffers = operator(x, None, None, None, words)
        except RuntimeError:  # of memory: the general way says which
            return general(x)
        if per_byte == 1:
            return fresh(names, buffers, q, shape, dtype)
        return QuantizedTensor.fitting(dict(zip(names, buffers, strict=True)), q, shape, dtype)

    return run


def dequantizing(x: Any, dtype: torch.dtype | None, general: Plan) -> Plan:
    """The plan for tensors like x; `general` where there is none."""
    words = native.words_back(x.operand, dtype or x.dtype) if type(x) is QuantizedTensor else None
    if words is None:
        return general
    operator, below, shape = torch.ops.hop_native.dequantize.default, eager.below_autograd, x.shape
    _, scale, second = (*x._names, None)[:3]

    def run(x: Any) -> Tensor:
        own = vars(x)
        try:
            with below():
                y = operator(own["codes"], own[scale], None if second is None else own[second], shape, words)
        except RuntimeError:
            return general(x)
        return y if y.is_cpu else general(x)

    return run
