"""scaled by the native kernels: matrix products of any formats that they decode."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop import _compile, copies
from hop.impls.scaled import meaning
from hop.impls.scaled.calls import Call, by_sum, usage
from hop.impls.scaled.exact import given_buffers
from hop.impls.scaled.operands import Operand
from hop.impls.scaled.roles import BIAS, LHS, MATRIX, RHS
from hop.kernels import Kernel, native, native_product
from hop.kernels.native_product import Described
from hop.quantizer import Quantizer


def _declines(call: Call) -> str | None:
    if (reason := native.library().declines()) is not None:
        return reason
    if call.roles.family is not MATRIX:
        return f"for matrix products, not {call.roles.family.name}"
    if not _compile.is_plain_eager():
        return "for eager mode"
    if call.device.type != "cpu":
        return f"for the CPU, and the operands are on {call.device}"
    if call.kwargs:
        return f"alpha and beta are {call.kwargs}"
    lhs, rhs = call.find(LHS), call.find(RHS)
    if min(lhs.dim(), rhs.dim()) < 2 or rhs.dim() > 2:
        return "for two matrices"
    found = product(call)
    return found if isinstance(found, str) else None


def product(call: Call) -> "native_product.Call | str":
    """What the kernels are told of the call, or why they do not take it."""
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    along = call.roles.rhs_sums
    if lhs.shape[-1] != rhs.shape[along]:
        return f"shapes {tuple(lhs.shape)} and {tuple(rhs.shape)} do not fit together"
    if not isinstance(rhs, Operand):
        return "the right factor is not quantized"
    if isinstance(lhs, Operand):
        if usage(call, LHS) != copies.ROWWISE:
            return "the left factor has no row-wise copy"
        left = _described(lhs.quantizer, tuple(lhs.shape), False)
    elif lhs.dtype == torch.bfloat16:
        left = Described(native_product.plain(lhs.dtype, lhs.shape[-1], 1), ("codes", None, None, None))
    else:
        return f"for bfloat16 beside quantized numbers, not {lhs.dtype}"
    if usage(call, RHS) == copies.ROWWISE:
        right = _described(rhs.quantizer, tuple(rhs.shape), along == -2)
    else:
        right = _described(rhs.quantizer, tuple(copies.columns(rhs.shape)), False)
    for found in (left, right):
        if isinstance(found, str):
            return found
    n = rhs.shape[0 if along == -1 else 1]
    m, k = math.prod(lhs.shape[:-1]), lhs.shape[-1]
    output = _output(call, m, n)
    if isinstance(output, str):
        return output
    if bias is not None and (bias.dtype not in native_product.PLAIN or tuple(bias.shape) != (n,)):
        return f"for a bias of ({n},) in float32, bfloat16, float16 or int32, not {bias.dtype} of {tuple(bias.shape)}"
    return native_product.product(left, right, (m, n, k), output, None if bias is None else bias.dtype)  # type: ignore[arg-type]


def _output(call: Call, m: int, n: int) -> "native_product.Output | str":
    if isinstance(call.output, torch.dtype):
        return native_product.plain_output(call.output, n)
    found = native_product.output_of(call.output, m, n)
    if isinstance(found, str) and not by_sum(call.output):
        return native_product.plain_output(torch.float32, n)  # to be quantized
    return found


@functools.lru_cache(maxsize=1024)
def _described(q: Quantizer, shape: tuple[int, ...], columns: bool) -> Described | str:
    return native_product.describe(q, shape, columns)


def _run(call: Call) -> Any:
    lhs, rhs = call.find(LHS), call.find(RHS)
    made = product(call)
    assert not isinstance(made, str)
    shape = [*lhs.shape[:-1], rhs.shape[0 if call.roles.rhs_sums == -1 else 1]]
    is_plain = isinstance(lhs, Tensor)
    left = [lhs.contiguous(), None, None, None] if is_plain else _buffers(lhs, made.lhs, usage(call, LHS))
    right = _buffers(rhs, made.rhs, usage(call, RHS))
    bias = call.find(BIAS)
    bias = None if bias is None else bias.contiguous()
    if native_product.gives_codes(made):
        stored = given_buffers(call, shape)
        codes = torch.empty(shape, dtype=call.output.format.dtype)  # type: ignore[union-attr]
        native_product.run(made, left, right, bias, codes, *stored)
        return [codes, *stored]
    y = torch.empty(shape, dtype=call.output if isinstance(call.output, torch.dtype) else torch.float32)
    return meaning.finish(call, native_product.run(made, left, right, bias, y))


def _buffers(x: Operand, names: Sequence[str | None], usage: str) -> list[Tensor | None]:
    own = dict(zip(("codes", *x.quantizer.stored()), x.of(usage).tensors, strict=True))
    return [None if name is None else own[name].contiguous() for name in names]


NATIVE = Kernel("native product", _declines, _run)
