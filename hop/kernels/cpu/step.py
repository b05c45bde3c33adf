"""An optimizer step on the CPU, in C++ and in place, with the bits of hop.optim (native/update/run.h)."""

import functools
from typing import Any

import torch

from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.quantizers import bits, describe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_BLOCK, _MOST_BLOCK = 16, 2048


@functools.lru_cache(maxsize=1024)
def _check_state(quantizer: str) -> None:
    """Raise Declined unless native code supports states with this quantizer."""
    result = describe(quantizer)
    q = result.quantizer
    if not q.flat or not result.by_amax or q.stochastic:
        raise Declined(f"for flat blocks with one scale each, rounded to the nearest; not {quantizer}")
    (block,) = q.block
    if not _LEAST_BLOCK <= block <= _MOST_BLOCK or _MOST_BLOCK % block:
        raise Declined(f"for blocks from {_LEAST_BLOCK} elements that divide {_MOST_BLOCK}, not of {block}")


def _prepare(call: tuple[Any, ...]) -> Plan:
    _, _, _, _, p, grad, quantizers, buffers, _ = call
    decline(native.declines_here())
    if p.numel() == 0:
        raise Declined("for non-empty parameters")
    floats, at = [p, grad], 0
    for q in quantizers:
        if q:
            _check_state(q)
        else:
            floats.append(buffers[at])
        at += 2 if q else 1
    for x in floats:
        if x.dtype not in _DTYPES:
            raise Declined(f"for float32, bfloat16 and float16, not {x.dtype}")
    for x in (p, grad, *buffers):
        decline(native.declines_tensor("an operand", x))
    return _step_


def _step_(*call: Any) -> None:
    """Run the step of one parameter in place.

    The call is (rule, numbers, seed, stream, p, grad, quantizers, buffers, least): the seed and stream of stochastic
    rounding, the parameter and its gradient, and for its states the quantizers ("" for floats), the buffers, and the
    smallest value above 0 as a fraction of its block's largest.
    """
    rule, numbers, seed, stream, p, grad, quantizers, buffers, least = call
    # Tensors that are not contiguous are copied, and written back.
    written = [p, *buffers]
    own = [x if x.is_contiguous() else x.contiguous() for x in written]
    words = _describe(rule + " stochastic" * (seed is not None), tuple(quantizers), tuple(least))
    key = 0 if seed is None else (seed + 2**63) % 2**64 - 2**63  # as int64
    native_operators.step_(own[0], grad.contiguous(), own[1:], numbers, key, stream, words)
    for x, y in zip(written, own, strict=True):
        if x is y:
            torch.autograd.graph.increment_version(x)
        else:
            x.copy_(y)


@functools.lru_cache(maxsize=1024)
def _describe(rule: str, quantizers: tuple[str, ...], least: tuple[float, ...]) -> str:
    """Describe a step for native code (native/torch/update.cpp)."""
    states = [describe(q).words if q else "" for q in quantizers]
    return ";".join([f"1 {rule} least={','.join(str(bits(x)) for x in least)}", *states])


STEP = Kernel("native", _prepare)
