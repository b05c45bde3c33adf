"""Plans of quantize and dequantize that call the native operator or a GPU kernel."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat.memory import holds
from hop.compat.pytree import Args
from hop.dispatch import plan
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.plan import Plan
from hop.kernels.cpu import quantize as native
from hop.kernels.gpu import quantize as gpu
from hop.numerics import copies, memory_format
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_ROWWISE, _NONE = [copies.ROWWISE], (None, None)


def quantizing(
    q: Quantizer,
    x: object,
    general: Plan,
    scales: Sequence[Tensor | float | None] = (),
    fitted: Sequence[Tensor | None] = (None, None),
) -> Plan:
    """The plan for row-wise quantizing of tensors like x; `general` if no kernel matches.

    Args:
        q: the quantizer.
        x: the first tensor.
        general: the plan that describes each call again.
        scales: the scale and zero point that replace the rule, numbers or tensors; empty if the rule applies.
        fitted: these in the dtypes and shapes of their buffers.
    """
    if not isinstance(x, Tensor) or q.is_random() or memory_format.is_channels_last(x):
        return general
    if any(
        isinstance(t, Tensor) and t.dtype != own.dtype
        for t, own in zip(scales, fitted, strict=False)
        if own is not None
    ):
        return general
    text = str(q)
    compute, is_native = _matched((native.QUANTIZE, gpu.QUANTIZE), (text, x, *fitted, None, _ROWWISE))
    if isinstance(compute, Declined):
        return general
    names, fresh, shape, dtype = copies.names(q, (copies.ROWWISE,)), QuantizedTensor.fresh, x.shape, x.dtype
    is_fresh = is_native and q.per_byte() == 1
    kept = [None if isinstance(t, Tensor) else own for t, own in zip(scales, fitted, strict=False)]  # of numbers
    shapes = [() if t is None else t.shape for t in fitted]

    def run(x: Tensor, *given: Any) -> Tensor:
        if not is_native and (x.is_neg() or not holds(x)):
            return general(x, *given)
        scale, zero_point = (
            [
                t.expand(size) if own is None and t is not None else own
                for t, own, size in zip(given, kept, shapes, strict=True)
            ]
            if given
            else _NONE
        )
        try:
            buffers = compute(text, x, scale, zero_point, None, _ROWWISE)
        except RuntimeError:  # a memory error, which the general plan explains
            return general(x, *given)
        if is_fresh:
            return fresh(names, buffers, q, shape, dtype)
        return QuantizedTensor.fitting(dict(zip(names, buffers, strict=True)), q, shape, dtype)

    return run


def row_buffers(q: Quantizer, x: Tensor) -> list[Tensor] | None:
    """The buffers of hop.quantize(q, x), without the tensor around them; None if native code does not compute them.

    The caller must have checked that no mode, hook or autograd observes the call.
    """
    known = (row_buffers, q, x.dtype, x.shape, x.device)
    try:
        return (plan.find(known) or plan.remember(known, _row_buffers(q, x)))(x)
    except RuntimeError:  # a memory error, which hop.quantize explains
        return None


def _row_buffers(q: Quantizer, x: Tensor) -> Plan:
    text = str(q)
    compute = Declined("random") if q.is_random() else native.QUANTIZE.match((text, x, None, None, None, _ROWWISE))
    if isinstance(compute, Declined):
        return lambda x: None
    return lambda x: compute(text, x, None, None, None, _ROWWISE)


def dequantizing(x: Tensor, dtype: torch.dtype | None, general: Plan) -> Plan:
    """The plan for dequantizing tensors like x; `general` if no kernel matches."""
    if type(x) is not QuantizedTensor or x.usages != (copies.ROWWISE,) or memory_format.is_channels_last(x.codes):
        return general
    text, usages, shape, result = str(x.quantizer), x.usages, x.shape, dtype or x.dtype
    found = operator.itemgetter(*x._names)
    compute, is_native = _matched((native.DEQUANTIZE, gpu.DEQUANTIZE), (text, found(vars(x)), usages, shape, result))
    if isinstance(compute, Declined):
        return general

    def run(x: QuantizedTensor) -> Tensor:
        buffers = found(vars(x))
        if not is_native and (not x.fits() or any(b.is_neg() for b in buffers)):
            return general(x)
        try:
            y = compute(text, buffers, usages, shape, result)
        except RuntimeError:
            return general(x)
        return y if y.is_cpu or not is_native else general(x)

    return run


def _matched(kernels: tuple[Kernel, Kernel], call: Args) -> tuple[Plan | Declined, bool]:
    """The plan of the first kernel, the native one, or else of the second; and whether it is the first's."""
    of_cpu, of_gpu = kernels
    plan = of_cpu.match(call)
    return (of_gpu.match(call), False) if isinstance(plan, Declined) else (plan, True)
