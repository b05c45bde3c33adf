"""scaled by the native kernels: matrix products of any formats that they decode."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop import copies, memory_format
from hop.compat import eager, inductor, tracing
from hop.impls.scaled import meaning
from hop.impls.scaled.calls import Call, by_sum, misfit, usage
from hop.impls.scaled.exact import given_buffers
from hop.impls.scaled.operands import Operand
from hop.impls.scaled.roles import BIAS, LHS, MATRIX, RHS
from hop.kernels import Kernel, native, native_product, native_structures
from hop.kernels.native_product import Described
from hop.quantizer import Quantizer


def _declines(call: Call) -> str | None:
    if (reason := native.library().declines()) is not None:
        return reason
    if call.roles.family is not MATRIX:
        return f"for matrix products, not {call.roles.family.name}"
    if not (eager.is_plain_eager() or inductor.is_compiling_for_here()):
        return "for eager mode, and programs that are compiled for this process"
    if call.device.type != "cpu":
        return f"for the CPU, and the operands are on {call.device}"
    if call.kwargs:
        return f"alpha and beta are {call.kwargs}"
    lhs, rhs = call.find(LHS), call.find(RHS)
    ranks = (lhs.dim(), rhs.dim())
    if min(ranks) < 2 or (rhs.dim() > 2 and (ranks != (3, 3) or lhs.shape[0] != rhs.shape[0])):
        return "for two matrices, or two batches of as many"
    found = product(call)
    return found if isinstance(found, str) else None


def product(call: Call, turned: bool = False) -> "native_product.Call | str":
    """What the kernels are told of the call, or why they do not take it; `turned` if the codes of the right factor
    lie as those of the transposed matrix."""
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
    return _product(call.output, kind, left, rhs.quantizer, right, usage(call, RHS), along, of_bias, turned)


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
    turned: bool,
) -> "native_product.Call | str":
    batched = len(right) == 3
    describe = native_product.describe_batch if batched else native_product.describe
    batch, m = (right[0], left[1]) if batched else (1, math.prod(left[:-1]))
    if isinstance(lhs, Quantizer):
        a = describe(lhs, left, False)
    elif lhs == torch.bfloat16:
        a = Described(native_product.plain(lhs, left[-1], 1), ("codes", None, None, None), (2 * m * left[-1], 0, 0, 0))
    else:
        return f"for bfloat16 beside quantized numbers, not {lhs}"
    by_columns = usage == copies.COLUMNWISE
    b = describe(rhs, copies.columns(right) if by_columns else right, along == -2 and not by_columns, turned)
    n = right[-2 if along == -1 else -1]
    found = _output(output, m, n, batched)
    for reason in (a, b, found):
        if isinstance(reason, str):
            return reason
    if bias is not None and bias not in native_structures.PLAIN:
        return f"for a bias in float32, bfloat16, float16 or int32, not {bias}"
    return native_product.product(a, b, (batch, m, n, left[-1]), found, bias)  # type: ignore[arg-type]


def _output(output: Any, m: int, n: int, batched: bool) -> "native_structures.Output | str":
    if isinstance(output, torch.dtype):
        return native_product.plain_output(output, n)
    found = native_product.output_of(output, m, n) if not batched else "gives no codes of batches"
    if isinstance(found, str) and not by_sum(output):
        return native_product.plain_output(torch.float32, n)  # to be quantized
    return found


def _run(call: Call) -> Any:
    lhs, rhs = call.find(LHS), call.find(RHS)
    turned = can_turn(rhs.quantizer) and memory_format.is_turned(rhs.of(usage(call, RHS)).tensors[0])
    made = product(call, turned)
    assert not isinstance(made, str)
    shape = [*lhs.shape[:-1], rhs.shape[-2 if call.roles.rhs_sums == -1 else -1]]
    is_plain = isinstance(lhs, Tensor)
    left = [lhs.contiguous(), None, None, None] if is_plain else _buffers(lhs, made.lhs, usage(call, LHS))
    right = _buffers(rhs, made.rhs, usage(call, RHS), turned)
    bias = call.find(BIAS)
    bias = None if bias is None else bias.contiguous()
    if native_product.gives_codes(made):
        stored = given_buffers(call, shape)
        codes = torch.empty(shape, dtype=call.output.format.dtype)  # type: ignore[union-attr]
        native_product.run(made, left, right, bias, codes, *stored)
        return [codes, *stored]
    y = torch.empty(shape, dtype=call.output if isinstance(call.output, torch.dtype) else torch.float32)
    return meaning.finish(call, native_product.run(made, left, right, bias, y))


def can_turn(q: Quantizer) -> bool:
    """Whether the codes of a factor may lie as those of the transposed matrix: where each has a byte of its own."""
    return q.layout is None and q.per_byte() == 1


def _buffers(x: Operand, names: Sequence[str | None], usage: str, turned: bool = False) -> list[Tensor | None]:
    own = dict(zip(("codes", *x.quantizer.stored()), x.of(usage).tensors, strict=True))
    return [
        None if name is None else own[name] if turned and name == "codes" else own[name].contiguous() for name in names
    ]


NATIVE = Kernel("native product", _declines, _run, leaf=True)
