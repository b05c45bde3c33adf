"""scaled with native kernels: floats or int8 codes times weights as stored in files of quantized models.

Such weights have codes of 2 to 8 bits in rows, and 16-bit or two-level scales of groups, with or without offsets. For
floats, the weight's values are those of dequantize, bit for bit, computed in registers or in a strip that stays in the
cache; sums are in float32. For codes, integer sums are exact, and float operations are those of the reference, one by
one.
"""

from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, changed, check_fit, has_stored_sums, is_integer, size_of, usage
from hop.impls.scaled.outputs import finished
from hop.kernels.cpu import group_product, native
from hop.kernels.cpu import product as native_product
from hop.kernels.cpu.group_product import FLOATS
from hop.numerics import copies
from hop.tensor.quantized import operand


def _prepare(call: Call) -> Plan:
    decline(native.declines_here(call.device))
    if call.kwargs:
        raise Declined(f"alpha and beta are {call.kwargs}")
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if not isinstance(rhs, Operand):
        raise Declined("the right factor is not quantized")
    own, by_codes = None, _has_codes(call)
    if isinstance(lhs, Operand):
        if usage(call, LHS) != copies.ROWWISE:
            raise Declined("the left factor has no row-wise copy")
        own = group_product.group_of_codes(lhs.quantizer, lhs.dim()) if by_codes else None
    elif lhs.dtype not in FLOATS:
        raise Declined(f"for float32, bfloat16 and float16 times quantized values, not {lhs.dtype}")
    if call.roles.rhs_sums != -1 or rhs.dim() != 2 or lhs.dim() < 1:
        raise Declined("for a matrix summed along its rows, like linear's weight")
    if rhs.usages != (copies.ROWWISE,):
        raise Declined("the right factor has a column-wise copy")
    check_fit(call, lhs, rhs)
    described = group_product.describe(rhs.quantizer)
    shape = native.sizes(rhs.shape)
    if bias is not None and (bias.dtype not in FLOATS or tracing.hints(bias.shape) != shape[:1]):
        raise Declined(f"for a float bias of shape ({shape[0]},), not {tuple(bias.shape)} in {bias.dtype}")
    group_product.check_shape(described, shape[1], own)

    names, multiply, below = described.names, torch.ops.hop_native.group_product.default, eager.below_autograd
    places, result = call.roles.roles, call.output if call.output in FLOATS else torch.float32
    i, j, k = places.index(LHS), places.index(RHS), None if bias is None else places.index(BIAS)
    words = f"1 {described.words} result={native_product.name(result)}{'' if own is None else f' x={own}'}"
    dequantizes, size = isinstance(lhs, Operand) and not by_codes, size_of([*lhs.shape[:-1], rhs.shape[0]])

    def run(*given: Any) -> Tensor:
        x, rhs = given[i], given[j]
        buffers = [None if name is None else getattr(rhs, name) for name in names]
        of_codes = ()
        if by_codes:
            scale = x.scale
            x, of_codes = x.codes, (scale if scale.dtype == torch.float32 else scale.to(torch.float32),)
        elif dequantizes:
            x = operand(x).values(copies.ROWWISE)
        with below():
            y = multiply(x, *buffers, None if k is None else given[k], words, *of_codes)
        if size is not None and (y.shape != size or not y.is_cpu):
            raise changed()
        return y

    return finished(call, run)


def _has_codes(call: Call) -> bool:
    """Whether the reference sums integers."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    return is_integer(lhs) and (is_integer(rhs) or has_stored_sums(call))


GROUPS = Kernel("native group product", _prepare, native=True)
