"""Attention of int8 by the native kernels: scores of a block of rows stay in the cache (native/attention/)."""

from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.impls.scaled.attention_options import options
from hop.impls.scaled.calls import Call
from hop.impls.scaled.operands import block_of, plain, spread
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.rows import FLOATS
from hop.numerics import copies
from hop.numerics.formats import INT8


def _declines(call: Call) -> str | None:
    if (reason := native.declines_here()) is not None:
        return reason
    if call.device.type != "cpu":
        return f"for the CPU, and the operands are on {call.device}"
    operands = call.args[:3]
    for name, x in zip(("query", "key", "value"), operands, strict=True):
        if not isinstance(x, Operand) or x.quantizer.format != INT8 or x.quantizer.scale.has_zero_point():
            return f"for int8 without zero points, and {name} is {x.dtype if isinstance(x, Tensor) else x.quantizer}"
        if (reason := native.declines_tensor(name, x.tensors[0])) is not None:
            return reason
    shapes = [tracing.hints(x.shape) for x in operands]
    if any(s is None or 0 in s or not 2 <= len(s) <= 4 for s in shapes):
        return "for two to four dimensions of known sizes, none of them 0"
    q, k, v = (tuple(s) for s in shapes if s is not None)
    of_heads = slice(0, -3) if options(call).grouped else slice(0, -2)
    if not (q[of_heads] == k[of_heads] == v[of_heads]):
        return f"for leading dimensions that are the same, not those of {q}, {k} and {v}"
    mask = options(call).mask
    if mask is not None and (reason := native.declines_tensor("attn_mask", mask)) is not None:
        return reason
    return None


def _in_four(t: Tensor) -> Tensor:
    """t with leading dimensions of size 1, so that it has four."""
    return t[(None,) * (4 - t.dim())]


def _operand(x: Operand, last: slice) -> tuple[Tensor, Tensor]:
    """Codes and, spread to all but one of the last two dimensions, scales."""
    own = plain(x, copies.ROWWISE)
    sizes = [*own.shape]
    sizes[-2:] = [1 if i in range(*last.indices(2)) else n for i, n in enumerate(sizes[-2:])]
    return _in_four(own.codes), _in_four(spread(own.scale, own.block, own.shape).expand(sizes))


def _mask(mask: Tensor | None, call: Call) -> Tensor | None:
    if mask is None:
        return None
    q, k = call.args[:2]
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask.to(torch.float32)
    return _in_four(mask.expand([*q.shape[:-1], k.shape[-2]]))


def _run(call: Call) -> Any:
    q, k, v = call.args[:3]
    asked = options(call)
    per_token = block_of(v, copies.ROWWISE)[-2] != -1
    tokens, channels = slice(1, 2), slice(0, 1)
    output = call.output if call.output in FLOATS else torch.float32
    words = f"1 result={str(output).removeprefix('torch.')} per={'token' if per_token else 'channel'}"
    codes = (*_operand(q, tokens), *_operand(k, tokens), *_operand(v, tokens if per_token else channels))
    y = native_operators.attention(*codes, _mask(asked.mask, call), asked.scale, asked.is_causal, words)
    y = y.reshape([*q.shape[:-1], v.shape[-1]])
    return y if y.dtype == call.output else finish(call, y)


ATTENTION = Kernel("native attention", _declines, _run, native=True)
"""Attention of int8 on the CPU, in C++."""
