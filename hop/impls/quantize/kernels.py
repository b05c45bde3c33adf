"""Plans of quantize and dequantize: one call of the native operator, or of a GPU's kernel, where they take such."""

from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import holds
from hop.dispatch.plan import Plan
from hop.kernels.cpu import quantize as native
from hop.kernels.gpu import quantize as gpu
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor


def quantizing(q: Quantizer, x: Any, general: Plan) -> Plan:
    """The plan for tensors like x, row-wise, with the scale that the rule finds; `general` where there is none."""
    words = native.words_of(q, x) if isinstance(x, Tensor) else None
    if words is None:
        return _quantizing_on_gpu(q, x, general) if isinstance(x, Tensor) else general
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
    if type(x) is not QuantizedTensor:
        return general
    words = native.words_back(x.operand, dtype or x.dtype)
    if words is None:
        return _dequantizing_on_gpu(x, dtype or x.dtype, general)
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


# ---- on GPUs: without asking the kernel, and those before it, again


def _quantizing_on_gpu(q: Quantizer, x: Tensor, general: Plan) -> Plan:
    """The plan where our own kernel takes tensors like x; `general` where it does not."""
    text, rest = str(q), (None, None, None, [copies.ROWWISE])
    if q.is_random() or q.hadamard is not None or not gpu.QUANTIZE.supports((text, x, *rest)):
        return general
    names, below, shape, dtype = copies.names(q, (copies.ROWWISE,)), eager.below_autograd, x.shape, x.dtype

    def run(x: Tensor) -> Tensor:
        if x.is_neg() or not holds(x):
            return general(x)
        with below():
            buffers: Any = gpu.QUANTIZE.run((text, x, *rest))
        return QuantizedTensor.fitting(dict(zip(names, buffers, strict=True)), q, shape, dtype)

    return run


def _dequantizing_on_gpu(x: QuantizedTensor, dtype: torch.dtype, general: Plan) -> Plan:
    """The same of making numbers of codes."""
    text, names, usages, shape = str(x.quantizer), x._names, x.usages, x.shape
    given = list(x.buffers().values())
    if x.quantizer.hadamard is not None or not gpu.DEQUANTIZE.supports((text, given, usages, shape, dtype)):
        return general

    def run(x: Any) -> Any:
        buffers = [getattr(x, name) for name in names]
        if not x.fits() or any(b.is_neg() for b in buffers):
            return general(x)
        with eager.below_autograd():
            return gpu.DEQUANTIZE.run((text, buffers, usages, shape, dtype))

    return run
