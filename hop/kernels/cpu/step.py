"""A step of an optimizer on the CPU, in C++ and in place: bit for bit what hop.optim says (native/update/run.h)."""

import functools
from typing import Any

import torch

from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.quantizers import Description, bits, describe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_BLOCK, _MOST_BLOCK = 16, 2048


@functools.lru_cache(maxsize=1024)
def _block(quantizer: str) -> int | str:
    """The elements of a block, or why there is no kernel."""
    result = describe(quantizer)
    if isinstance(result, str):
        return result
    q = result.quantizer
    if not q.flat or not result.by_amax or q.stochastic:
        return f"for flat blocks with one scale each, rounded to the nearest; not {quantizer}"
    (block,) = q.block
    if not _LEAST_BLOCK <= block <= _MOST_BLOCK or _MOST_BLOCK % block:
        return f"for blocks from {_LEAST_BLOCK} elements that divide {_MOST_BLOCK}, not of {block}"
    return block


def declines(call: tuple[Any, ...]) -> str | None:
    """Why there is no kernel for a step, or None."""
    _, _, _, _, p, grad, quantizers, buffers, _ = call
    if (reason := native.declines_here()) is not None:
        return reason
    if p.numel() == 0:
        return "for parameters that are not empty"
    floats, at = [p, grad], 0
    for q in quantizers:
        if not q:
            floats.append(buffers[at])
        elif isinstance(result := _block(q), str):
            return result
        at += 2 if q else 1
    for x in floats:
        if x.dtype not in _DTYPES:
            return f"for float32, bfloat16 and float16, not {x.dtype}"
    for x in (p, grad, *buffers):
        if (reason := native.declines_tensor("an operand", x)) is not None:
            return reason
    return None


def step_(call: tuple[Any, ...]) -> None:
    """A step of one parameter, in place: its rule, its numbers, the seed and the stream of its rounding, itself, its
    gradient, and of its states the quantizers ("" for floats), the buffers, and what part of its block's largest a
    number above 0 is at least."""
    rule, numbers, seed, stream, p, grad, quantizers, buffers, least = call
    # What does not lie row by row is brought so, and brought back.
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
    """The words of a step (native/torch/update.cpp)."""
    states = []
    for q in quantizers:
        made = describe(q) if q else ""
        states.append(made.words if isinstance(made, Description) else "")
    return ";".join([f"1 {rule} least={','.join(str(bits(x)) for x in least)}", *states])
