"""scaled with native kernels: matrix products of all formats that they decode."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, Result, changed, check_fit, size_of, usage
from hop.impls.scaled.outputs import finished, output_words, stored, with_stored
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer


def described(call: Call, parts: int = 0) -> native_product.NativeProduct:
    """Describe the call for native code. Raises Declined if it is not supported.

    With `parts`, the left factor is split into that many bfloat16 parts, and the description is of the bare float32
    product.
    """
    decline(native.declines_here(call.device))
    if call.kwargs:
        raise Declined(f"alpha and beta are {call.kwargs}")
    lhs, rhs, bias, along = call.find(LHS), call.find(RHS), call.find(BIAS), call.roles.rhs_sums
    ranks = (lhs.dim(), rhs.dim())
    if min(ranks) < 2 or (rhs.dim() > 2 and (ranks != (3, 3) or lhs.shape[0] != rhs.shape[0])):
        raise Declined("for two matrices, or two batches of equal size")
    if not isinstance(rhs, Operand):
        raise Declined("the right factor is not quantized")
    check_fit(call, lhs, rhs)
    left, right = native.sizes(lhs.shape), native.sizes(rhs.shape)
    kind = lhs.quantizer if isinstance(lhs, Operand) else lhs.dtype
    wanted = call.output
    if parts:
        left, wanted, kind, bias = (*left[:-2], left[-2] * parts, left[-1]), torch.float32, torch.bfloat16, None
    n, k = right[-2:] if along == -1 else right[:-3:-1]
    if k == 0:
        raise Declined("the summed dimension is empty")
    by_columns = usage(call, RHS) == copies.COLUMNWISE
    if isinstance(lhs, Operand) and usage(call, LHS) != copies.ROWWISE:
        raise Declined("the left factor has no row-wise copy")
    if by_columns and rhs.quantizer.hadamard is not None:
        raise Declined("the right factor's copy has a Hadamard transform")
    if bias is not None:
        native_product.check_bias(bias, n)
    a, b = _left(kind), native_product.describe(rhs.quantizer, along == -2 and not by_columns)
    sums = b.sums if isinstance(lhs, Operand) and lhs.quantizer.format.is_integer else None
    output, codes = output_words(wanted, lambda q: _codes(q, math.prod(left[:-1]), n, len(right)))
    words = f"1 lhs {a.words} rhs {b.words}{' sums' if sums else ''} {output}"
    native_product.check(
        words, left, copies.columns(right) if by_columns else right, None if bias is None else bias.dtype
    )
    return native_product.NativeProduct(a.names, b.names, sums, codes, words)


def _left(kind: Quantizer | torch.dtype) -> native_product.Described:
    if isinstance(kind, Quantizer):
        if kind.is_tiled():
            raise Declined("the left factor is packed")
        return native_product.describe(kind, False)
    if kind != torch.bfloat16:
        raise Declined(f"for bfloat16 times quantized values, not {kind}")
    return native_product.plain(kind)


def _codes(q: Quantizer, rows: int, columns: int, ndim: int) -> str:
    """Describe a result in codes for native code."""
    words = native_product.describe_output(q)
    if not native_product.one_line((rows, columns), q):
        raise Declined(f"for one scale for all, per row or per column, not blocks of {q.block}")
    if ndim == 3:
        raise Declined("does not return codes of batches")
    return words


def reader(call: Call, role: str, names: Sequence[str | None]) -> Callable[[Any], Sequence[Tensor | None]]:
    """A function that returns the four buffers a product reads of such a factor, an Operand or a QuantizedTensor."""
    x = call.find(role)
    if not isinstance(x, Operand):
        return lambda x: (x, None, None, None)
    wanted = usage(call, role)
    buffers = [None if name is None else copies.name_of(x.quantizer, wanted, name) for name in names]
    return lambda x: [None if name is None else getattr(x, name) for name in buffers]


def _multiplied(call: Call, form: native_product.NativeProduct, n: int) -> Callable[..., Tensor]:
    """The product of such factors as a function of lhs, rhs, bias, and the result's scale and zero point.

    To be called below autograd.
    """
    multiply, words = torch.ops.hop_native.product.default, form.description
    rowwise = all(isinstance(x, Operand) and x.usages == (copies.ROWWISE,) for x in (call.find(LHS), call.find(RHS)))
    # fewer steps of Python
    if rowwise and form.rhs_sums is None and form.lhs[1:] == form.rhs[1:] == ("scale", None, None):
        return lambda lhs, rhs, *more: multiply(
            lhs.codes, lhs.scale, None, None, rhs.codes, rhs.scale, None, None, *more, n, words
        )
    of_lhs, of_rhs = reader(call, LHS, form.lhs), reader(call, RHS, form.rhs)
    if form.rhs_sums is not None:
        return lambda lhs, rhs, *more: multiply(*of_lhs(lhs), *of_rhs(rhs), *more, n, words, rhs.code_sums)
    return lambda lhs, rhs, *more: multiply(*of_lhs(lhs), *of_rhs(rhs), *more, n, words)


def _prepare(call: Call) -> Plan:
    form, lhs, places = described(call), call.find(LHS), call.roles.roles
    n = call.find(RHS).shape[-2 if call.roles.rhs_sums == -1 else -1]
    multiply, below = _multiplied(call, form, n), eager.below_autograd
    i, j = places.index(LHS), places.index(RHS)
    k = None if call.find(BIAS) is None else places.index(BIAS)
    shape = [*lhs.shape[:-1], n]
    size, find = size_of(shape), stored(call, shape) if form.gives_codes else None

    def run(*given: object) -> Result:
        scales = _NONE if find is None else find(given)
        with below():
            y = multiply(given[i], given[j], None if k is None else given[k], *scales)
        if size is not None and (y.shape != size or not y.is_cpu):
            raise changed()
        return y if find is None else with_stored(y, scales)

    return run if form.gives_codes else finished(call, run)


_NONE = (None, None)
NATIVE = Kernel("native product", _prepare, native=True)
