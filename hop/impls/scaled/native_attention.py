"""int8 attention with native kernels: scores of a block of rows stay in the cache (native/attention/)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, changed
from hop.impls.scaled.operands import block_of, plain, spread
from hop.impls.scaled.outputs import finished
from hop.kernels.cpu import native
from hop.kernels.cpu.rows import FLOATS
from hop.numerics import copies
from hop.numerics.formats import INT8
from hop.tensor.quantized import operand


class Options(NamedTuple):
    """Mask, causality, scale and grouping of an attention call."""

    mask: Tensor | None  # bool (False is masked out), or float to be added
    is_causal: bool  # aligned top left
    scale: float
    grouped: bool  # several query heads share one key and value head


def options(call: Call) -> Options:
    given: Args = (*call.args[3:], *(None, 0.0, False)[len(call.args) - 3 :])
    mask, _, is_causal = given
    scale = call.kwargs.get("scale")
    return Options(
        mask,
        is_causal,
        1 / math.sqrt(int(call.args[0].shape[-1])) if scale is None else float(scale),
        bool(call.kwargs.get("enable_gqa", False)),
    )


_MOST_WIDTH = 65793  # 255 · 128 times this width is below 2^31


def _check(call: Call) -> None:
    """Raise Declined unless native code supports the call."""
    decline(native.declines_here(call.device))
    operands = call.args[:3]
    for name, x in zip(("query", "key", "value"), operands, strict=True):
        if not isinstance(x, Operand) or x.quantizer.format != INT8 or x.quantizer.scale.has_zero_point():
            what = x.dtype if isinstance(x, Tensor) else x.quantizer
            raise Declined(f"for int8 without zero points, but {name} is {what}")
        along = block_of(x, copies.ROWWISE)
        if along[-1] != -1 and not (name == "value" and along[-2] == -1):
            raise Declined(f"for one scale per token, but {name} is {x.quantizer}")
        decline(native.declines_tensor(name, x.tensors[0]))
    shapes = [tracing.hints(x.shape) for x in operands]
    if any(s is None or 0 in s or not 2 <= len(s) <= 4 for s in shapes):
        raise Declined("for two to four dimensions of known sizes, none of them 0")
    q, k, v = (tuple(s) for s in shapes if s is not None)
    if q[-1] > _MOST_WIDTH:
        raise Declined(f"for heads of at most {_MOST_WIDTH} elements, not {q[-1]}")
    of_heads = slice(0, -3) if options(call).grouped else slice(0, -2)
    if not (q[of_heads] == k[of_heads] == v[of_heads]):
        raise Declined(f"for equal leading dimensions, not those of {q}, {k} and {v}")
    if (mask := options(call).mask) is not None:
        decline(native.declines_tensor("attn_mask", mask))


def _in_four(t: Tensor) -> Tensor:
    """Add leading dimensions of size 1 to t, so that it has four."""
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def _scale_sizes(x: Operand, per_channel: bool = False) -> list[int]:
    """The sizes of scales per token or channel."""
    return [*x.shape[:-2], 1, x.shape[-1]] if per_channel else [*x.shape[:-1], 1]


def _mask(mask: Tensor | None, sizes: list[int]) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask.to(torch.float32)
    return _in_four(mask.expand(sizes))


def _prepare(call: Call) -> Plan:
    _check(call)
    q, k, v = call.args[:3]
    asked, per_channel = options(call), block_of(v, copies.ROWWISE)[-2] == -1
    result = call.output if call.output in FLOATS else torch.float32
    words = f"1 result={str(result).removeprefix('torch.')} per={'channel' if per_channel else 'token'}"
    scale_sizes = [_scale_sizes(q), _scale_sizes(k), _scale_sizes(v, per_channel)]
    mask_sizes, sizes = [*q.shape[:-1], k.shape[-2]], [*q.shape[:-1], v.shape[-1]]
    scales = [x.scale.shape if _is_stored(x) else None for x in (q, k, v)]
    numbers, masked = (asked.scale, asked.is_causal, words), asked.mask is not None
    stored, compute, below = (
        all(map(_is_stored, (q, k, v))),
        torch.ops.hop_native.attention.default,
        eager.below_autograd,
    )

    def run(*given: Any) -> Tensor:
        q, k, v = given[:3]
        if stored:  # native code checks strides, dtypes and memory
            fits = all(x.codes.shape == x.shape and x.scale.shape == s for x, s in zip((q, k, v), scales, strict=True))
        else:
            fits = q.fits() and k.fits() and v.fits()
        if not fits:
            raise changed()
        codes = []
        for x, n in zip((q, k, v), scale_sizes, strict=True):
            own, scale = (x.codes, x.scale) if stored else _plain(operand(x))
            codes += (_in_four(own), _in_four(scale.expand(n)))
        mask = _mask(given[3], mask_sizes) if masked else None
        with below():
            y = compute(*codes, mask, *numbers)
        return y.reshape(sizes)

    return finished(call, run)


def _is_stored(x: Operand) -> bool:
    """Whether the codes and scales are the operand's buffers themselves."""
    operand = plain(x, copies.ROWWISE)
    if x.usages != (copies.ROWWISE,) or operand.codes is not x.codes or operand.scale is not x.scale:
        return False
    return all(b in (-1, 1) or n == 1 for b, n in zip(operand.block, operand.scale.shape, strict=True))


def _plain(x: Operand) -> tuple[Tensor, Tensor]:
    """Codes, and scales that `expand` to one per token or channel."""
    own = plain(x, copies.ROWWISE)
    return own.codes, spread(own.scale, own.block, own.shape)


ATTENTION = Kernel("native attention", _prepare, native=True)
"""Attention of int8 on the CPU, in C++."""
