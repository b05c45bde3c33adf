"""Attention of int8 by the native kernels: scores of a block of rows stay in the cache (native/attention/)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.plan import Plan
from hop.impls.scaled.attention_options import options
from hop.impls.scaled.calls import Call
from hop.impls.scaled.operands import block_of, plain, spread
from hop.impls.scaled.outputs import finish
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.rows import FLOATS
from hop.numerics import copies
from hop.numerics.formats import INT8

_MOST_WIDTH = 65793  # 255 · 128 times as many are below 2^31


def _declines(call: Call) -> str | None:
    if (reason := native.declines_here(call.device)) is not None:
        return reason
    operands = call.args[:3]
    for name, x in zip(("query", "key", "value"), operands, strict=True):
        if not isinstance(x, Operand) or x.quantizer.format != INT8 or x.quantizer.scale.has_zero_point():
            return f"for int8 without zero points, and {name} is {x.dtype if isinstance(x, Tensor) else x.quantizer}"
        along = block_of(x, copies.ROWWISE)
        if along[-1] != -1 and not (name == "value" and along[-2] == -1):
            return f"for a scale for each token, and {name} is {x.quantizer}"
        if (reason := native.declines_tensor(name, x.tensors[0])) is not None:
            return reason
    shapes = [tracing.hints(x.shape) for x in operands]
    if any(s is None or 0 in s or not 2 <= len(s) <= 4 for s in shapes):
        return "for two to four dimensions of known sizes, none of them 0"
    q, k, v = (tuple(s) for s in shapes if s is not None)
    if q[-1] > _MOST_WIDTH:
        return f"for heads of at most {_MOST_WIDTH} elements, not {q[-1]}"
    of_heads = slice(0, -3) if options(call).grouped else slice(0, -2)
    if not (q[of_heads] == k[of_heads] == v[of_heads]):
        return f"for leading dimensions that are the same, not those of {q}, {k} and {v}"
    mask = options(call).mask
    if mask is not None and (reason := native.declines_tensor("attn_mask", mask)) is not None:
        return reason
    return None


def _in_four(t: Tensor) -> Tensor:
    """t with leading dimensions of size 1, so that it has four."""
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def _scale_sizes(x: Operand, per_channel: bool = False) -> list[int]:
    """The sizes of scales, one for each token or channel."""
    return [*x.shape[:-2], 1, x.shape[-1]] if per_channel else [*x.shape[:-1], 1]


def _mask(mask: Tensor | None, sizes: list[int]) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask.to(torch.float32)
    return _in_four(mask.expand(sizes))


class _Described(NamedTuple):
    """What calls have in common whose operands have the same shapes and quantizers."""

    scale_sizes: list[list[int]]
    mask_sizes: list[int]
    sizes: list[int]
    numbers: tuple[float, bool, str]


def _described(call: Call) -> _Described:
    q, k, v = call.args[:3]
    asked, per_channel = options(call), block_of(v, copies.ROWWISE)[-2] == -1
    output = call.output if call.output in FLOATS else torch.float32
    words = f"1 result={str(output).removeprefix('torch.')} per={'channel' if per_channel else 'token'}"
    scales = [_scale_sizes(q), _scale_sizes(k), _scale_sizes(v, per_channel)]
    leading = [*q.shape[:-1]]
    return _Described(scales, [*leading, k.shape[-2]], [*leading, v.shape[-1]], (asked.scale, asked.is_causal, words))


def _run(call: Call) -> Any:
    form, codes = _described(call), []
    for x, sizes in zip(call.args[:3], form.scale_sizes, strict=True):
        operand = plain(x, copies.ROWWISE)
        scale = spread(operand.scale, operand.block, operand.shape).expand(sizes)
        codes += [_in_four(operand.codes), _in_four(scale)]
    y = native_operators.attention(*codes, _mask(options(call).mask, form.mask_sizes), *form.numbers)
    y = y.reshape(form.sizes)
    return y if y.dtype == call.output else finish(call, y)


def _planned(call: Call, general: Plan) -> Plan | None:
    """For codes that are stored as they are read, and a result in floats."""
    if call.output not in FLOATS or not all(_is_stored(x) for x in call.args[:3]):
        return None
    form, compute, below = _described(call), torch.ops.hop_native.attention.default, eager.below_autograd
    masked = options(call).mask is not None

    def run(*given: Any) -> Any:
        q, k, v = given[:3]
        if not (q.fits() and k.fits() and v.fits()):
            return general(*given)
        codes = [
            _in_four(t) for x, n in zip((q, k, v), form.scale_sizes, strict=True) for t in (x.codes, x.scale.expand(n))
        ]
        mask = _mask(given[3], form.mask_sizes) if masked else None
        try:
            with below():
                y = compute(*codes, mask, *form.numbers)
        except RuntimeError:  # which `general` gives the reason of
            return general(*given)
        return y.reshape(form.sizes)

    return run


def _is_stored(x: Operand) -> bool:
    """Whether codes and scales are those of the buffers."""
    operand = plain(x, copies.ROWWISE)
    if x.usages != (copies.ROWWISE,) or operand.codes is not x.codes or operand.scale is not x.scale:
        return False
    return all(b in (-1, 1) or n == 1 for b, n in zip(operand.block, operand.scale.shape, strict=True))


ATTENTION = Kernel("native attention", _declines, _run, _planned, native=True)
"""Attention of int8 on the CPU, in C++."""
