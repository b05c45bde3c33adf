"""Optimizer steps on the CPU, in C++ and in place, with the bits of hop.optim (native/update/run.h)."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.forms import Form
from hop.kernels.cpu.quantizers import bits, describe
from hop.numerics import copies
from hop.numerics.copies import Buffer
from hop.numerics.quantizer import Quantizer

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


def _prepare(call: Args) -> Plan:
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
    return lambda *call: steps_([call])


def is_usable() -> bool:
    """Whether native kernels may run in eager mode now, on plain tensors."""
    return eager.is_plain_eager() and native.declines_here() is None


def fits(p: Tensor, grad: Tensor, quantizers: Sequence[str], buffers: Sequence[Tensor]) -> bool:
    """Whether a parameter, its gradient and its states certainly have the form that the kernel supports.

    Fast, and right only where `is_usable()`; `STEP.match` gives reasons.
    """
    form = _form(tuple(quantizers), p.shape, p.dtype)
    tensors = (p, grad, *buffers)
    plain = all(type(x) in PLAIN and x.is_contiguous() and not x.is_neg() for x in tensors)
    return plain and form is not None and len(tensors) == len(form.described) and form.fits(tensors)


@functools.lru_cache(maxsize=4096)
def _form(quantizers: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Form | None:
    """The form of a parameter, its gradient and its states, floats in its dtype; None if the kernel does not run it."""
    if dtype not in _DTYPES or 0 in shape:
        return None
    described: list[Buffer] = [Buffer("p", tuple(shape), dtype), Buffer("grad", tuple(shape), dtype)]
    for q in quantizers:
        if not q:
            described.append(Buffer("state", tuple(shape), dtype))
            continue
        try:
            _check_state(q)
        except Declined:
            return None
        described += copies.describe(Quantizer.parse(q), shape, (copies.ROWWISE,))
    return Form(described)


def steps_(calls: Sequence[Args]) -> None:
    """Run the steps of parameters in place, with one native call for those that share a description and a seed.

    Each call is (rule, numbers, seed, stream, p, grad, quantizers, buffers, least): the seed and stream of stochastic
    rounding, the parameter and its gradient, and for its states the quantizers ("" for floats), the buffers, and the
    smallest value above 0 as a fraction of its block's largest.
    """
    groups: dict[tuple[str, int | None, tuple[str, ...], tuple[float, ...]], list[Args]] = {}
    for call in calls:
        rule, _, seed, _, _, _, quantizers, _, least = call
        groups.setdefault((rule, seed, tuple(quantizers), tuple(least)), []).append(call)
    for (rule, seed, quantizers, least), own in groups.items():
        key = 0 if seed is None else (seed + 2**63) % 2**64 - 2**63  # as int64
        words = _describe(rule + " stochastic" * (seed is not None), quantizers, least)
        params, grads, buffers, numbers, streams, written = [], [], [], [], [], []
        for _, constants, _, stream, p, grad, _, states, _ in own:
            # Tensors that are not contiguous are copied, and written back.
            copied = [x if x.is_contiguous() else x.contiguous() for x in (p, *states)]
            written += zip((p, *states), copied, strict=True)
            params.append(copied[0])
            grads.append(grad.contiguous())
            buffers += copied[1:]
            numbers += constants
            streams.append(stream)
        native_operators.step_(params, grads, buffers, numbers, key, streams, words)
        torch.autograd.graph.increment_version([x for x, y in written if x is y])
        for x, y in written:
            if x is not y:
                x.copy_(y)


@functools.lru_cache(maxsize=1024)
def _describe(rule: str, quantizers: tuple[str, ...], least: tuple[float, ...]) -> str:
    """Describe a step for native code (native/torch/update.cpp)."""
    states = [describe(q).words if q else "" for q in quantizers]
    return ";".join([f"1 {rule} least={','.join(str(bits(x)) for x in least)}", *states])


STEP = Kernel("native", _prepare)
