"""scaled by the native kernels: matrix products of any formats that they decode."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, by_sum, misfit, usage
from hop.impls.scaled.outputs import are_buffers, finish, given_buffers
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer


def _declines(call: Call) -> str | None:
    if (reason := native.declines_here(call.device)) is not None:
        return reason
    if call.kwargs:
        return f"alpha and beta are {call.kwargs}"
    lhs, rhs = call.find(LHS), call.find(RHS)
    ranks = (lhs.dim(), rhs.dim())
    if min(ranks) < 2 or (rhs.dim() > 2 and (ranks != (3, 3) or lhs.shape[0] != rhs.shape[0])):
        return "for two matrices, or two batches of as many"
    form = product(call)
    return form if isinstance(form, str) else None


def product(call: Call) -> "native_product.NativeProduct | str":
    """What the kernels are told of the call, or why they do not take it."""
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    along = call.roles.rhs_sums
    if not isinstance(rhs, Operand):
        return "the right factor is not quantized"
    if (reason := misfit(call, lhs, rhs)) is not None:
        return reason
    left, right = tracing.hints(lhs.shape), tracing.hints(rhs.shape)
    if left is None or right is None:
        return f"nothing is known of the sizes {tuple(lhs.shape)} and {tuple(rhs.shape)}"
    n, k = right[-2:] if along == -1 else right[:-3:-1]
    if k == 0:
        return "a sum of nothing"
    if isinstance(lhs, Operand) and usage(call, LHS) != copies.ROWWISE:
        return "the left factor has no row-wise copy"
    if usage(call, RHS) != copies.ROWWISE and rhs.quantizer.hadamard is not None:
        return "the copy of the right factor is transformed"
    if bias is not None and tracing.hints(bias.shape) != (n,):
        return f"for a bias of ({n},), not of {tuple(bias.shape)}"
    of_bias = None if bias is None else bias.dtype
    kind = lhs.quantizer if isinstance(lhs, Operand) else lhs.dtype
    return _product(call.output, kind, left, rhs.quantizer, right, usage(call, RHS), along, of_bias)


@functools.lru_cache(maxsize=4096)
def _product(
    output: Any,
    lhs: Quantizer | torch.dtype,
    left: tuple[int, ...],
    rhs: Quantizer,
    right: tuple[int, ...],
    usage: str,
    along: int,
    bias: torch.dtype | None,
) -> "native_product.NativeProduct | str":
    if isinstance(lhs, Quantizer):
        if lhs.is_tiled():
            return "the left factor is packed"
        a = native_product.describe(lhs, False)
    elif lhs == torch.bfloat16:
        a = native_product.plain(lhs)
    else:
        return f"for bfloat16 beside quantized numbers, not {lhs}"
    by_columns = usage == copies.COLUMNWISE
    shape = copies.columns(right) if by_columns else right
    b = native_product.describe(rhs, along == -2 and not by_columns)
    for reason in (a, b):
        if isinstance(reason, str):
            return reason
    if bias is not None and bias not in native_product.BIASES:
        return f"for a bias in float32, bfloat16, float16 or int32, not {bias}"
    sums = b.sums if isinstance(lhs, Quantizer) and lhs.format.is_integer else None  # type: ignore[union-attr]
    right_words = f"{b.words} sums" if sums else b.words  # type: ignore[union-attr]
    words, dtype, more = f"1 lhs {a.words} rhs {right_words} output", output, ""  # type: ignore[union-attr]
    codes = False
    if isinstance(output, Quantizer):
        reason = native_product.declines_output(output)
        size = math.prod(left[:-1]), right[-2 if along == -1 else -1]
        if reason is None and not native_product.one_line(size, output):
            reason = f"one scale for all, for each row or for each column, not blocks of {output.block}"
        if reason is None and len(right) == 3:
            reason = "gives no codes of batches"
        if reason is not None and by_sum(output):
            return reason
        codes = reason is None
        dtype = output.format.dtype if codes else torch.float32  # to be quantized
        more = f" {native_product.describe_output(output)}" if codes else ""
    if dtype not in (*native_product.FLOATS, torch.int8, torch.uint8):
        return f"gives float32, bfloat16 and float16, not {dtype}"
    told = f"{words} {native_product.name(dtype)}{more}"
    form = native_product.NativeProduct(a.names, b.names, sums, codes, told)  # type: ignore[union-attr]
    return native_product.declines(form, left, shape, bias) or form


# ---- by the words of a call, on its buffers


def _multiplied(call: Call) -> Callable[..., Tensor]:
    """The product of factors like those of a call that the kernels take: a function of lhs, rhs, bias, and of scale and
    zero point of the result, to be called below autograd."""
    form, n, multiply = product(call), _columns(call), torch.ops.hop_native.product.default
    assert not isinstance(form, str)
    words = form.description
    if form.rhs_sums is not None:
        of_lhs, of_rhs = reader(call, LHS, form.lhs), reader(call, RHS, form.rhs)
        return lambda lhs, rhs, *more: multiply(*of_lhs(lhs), *of_rhs(rhs), *more, n, words, rhs.code_sums)
    if form.lhs[1:] == form.rhs[1:] == ("scale", None, None) and _is_rowwise(call):  # the same, in fewer steps
        return lambda lhs, rhs, *more: multiply(
            lhs.codes, lhs.scale, None, None, rhs.codes, rhs.scale, None, None, *more, n, words
        )
    of_lhs, of_rhs = reader(call, LHS, form.lhs), reader(call, RHS, form.rhs)
    return lambda lhs, rhs, *more: multiply(*of_lhs(lhs), *of_rhs(rhs), *more, n, words)


def _is_rowwise(call: Call) -> bool:
    return all(isinstance(x, Operand) and x.usages == (copies.ROWWISE,) for x in (call.find(LHS), call.find(RHS)))


def reader(call: Call, role: str, names: Sequence[str | None]) -> Callable[[Any], Sequence[Tensor | None]]:
    """What gives the four buffers that a product reads of a factor like that of a call, an Operand or a
    QuantizedTensor."""
    x = call.find(role)
    if not isinstance(x, Operand):
        return lambda x: (x, None, None, None)
    wanted = usage(call, role)
    buffers = [None if name is None else copies.name_of(x.quantizer, wanted, name) for name in names]
    return lambda x: [None if name is None else getattr(x, name) for name in buffers]


def _run(call: Call) -> Any:
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    stored = given_buffers(call, [*lhs.shape[:-1], _columns(call)]) if _gives_codes(call) else []
    with eager.below_autograd():
        y = _multiplied(call)(lhs, rhs, bias, *(*stored, None, None)[:2])
    return [y, *stored] if stored else finish(call, y)


def _planned(call: Call, general: Plan) -> Plan | None:
    """For results in floats, and codes whose scales are given as they are stored."""
    codes, shape = _gives_codes(call), (*call.find(LHS).shape[:-1], _columns(call))
    if isinstance(call.output, Quantizer) and not (codes and are_buffers(call, shape)):
        return None
    multiply, places, below = _multiplied(call), call.roles.roles, eager.below_autograd
    i, j = places.index(LHS), places.index(RHS)
    k = None if call.find(BIAS) is None else places.index(BIAS)

    def run(*given: Any) -> Any:
        stored = given[-2:] if codes else _NONE
        try:
            with below():
                y = multiply(given[i], given[j], None if k is None else given[k], *stored)
        except RuntimeError:  # which `general` gives the reason of, if an operand is not what it was described as
            return general(*given)
        if y.shape != shape or not y.is_cpu:
            return general(*given)
        return [y, *(t.clone() for t in stored if t is not None)] if codes else y

    return run


_NONE = (None, None)


def _columns(call: Call) -> int:
    return call.find(RHS).shape[-2 if call.roles.rhs_sums == -1 else -1]


def _gives_codes(call: Call) -> bool:
    form = product(call)
    return not isinstance(form, str) and form.gives_codes


NATIVE = Kernel("native product", _declines, _run, _planned, native=True)
