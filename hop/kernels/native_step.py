"""A step of an optimizer on the CPU, in C++ and in place: bit for bit what hop.optim says (native/update/run.h)."""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hop.kernels import native
from hop.kernels.memory import address
from hop.kernels.native_quantizers import Plan, plan
from hop.scaling import Amax, CurrentScaling

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES = {"adam": 0, "sgd": 1, "lion": 2}
_FLAGS = {"coupled": 1, "nesterov": 2, "maximize": 4}
_STOCHASTIC = 8
_STATES, _NUMBERS, _LEAST_BLOCK, _MOST_BLOCK = 3, 9, 16, 2048


class _State(ctypes.Structure):
    """hop_state of native/hop.h."""

    _fields_ = (
        ("quantizer", c_void_p),
        ("block", c_int64),
        ("dtype", c_int32),
        ("least", c_float),
        ("data", c_void_p),
        ("scale", c_void_p),
    )


class _Update(ctypes.Structure):
    """hop_update of native/hop.h."""

    _fields_ = (
        *((name, c_int32) for name in "rule flags states p_dtype grad_dtype".split()),
        ("stream", c_uint32),
        ("seed", c_uint64),
        ("count", c_int64),
        ("numbers", c_float * _NUMBERS),
        ("p", c_void_p),
        ("grad", c_void_p),
        ("state", _State * _STATES),
    )


@functools.cache
def _function() -> Any:
    library: Any = native.library().functions
    library.hop_step.argtypes = [c_void_p, c_int32]
    return library.hop_step


@functools.lru_cache(maxsize=1024)
def _quantizer(words: str) -> int:
    library: Any = native.library().functions
    library.hop_described_quantizer.argtypes, library.hop_described_quantizer.restype = [ctypes.c_char_p], c_void_p
    return library.hop_described_quantizer(words.encode())


@functools.lru_cache(maxsize=1024)
def _block(quantizer: str) -> int | str:
    """The elements of a block, or why there is no kernel."""
    made = plan(quantizer)
    if isinstance(made, str):
        return made
    q = made.quantizer
    one_scale = isinstance(q.scale, Amax | CurrentScaling) and not q.scale.has_zero_point()
    if not q.flat or not one_scale or q.stochastic:
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
        elif isinstance(found := _block(q), str):
            return found
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
    name, *flags = rule.split()
    # What does not lie row by row is brought so, and brought back.
    written = [p, *buffers]
    own = [x if x.is_contiguous() else x.contiguous() for x in written]
    grad = grad.contiguous()
    u = _Update(_RULES[name], sum(_FLAGS[f] for f in flags), len(quantizers), _DTYPES[p.dtype], _DTYPES[grad.dtype])
    u.stream, u.count, u.p, u.grad = stream, p.numel(), address(own[0]), address(grad)
    if seed is not None:
        u.flags |= _STOCHASTIC
        u.seed = seed % 2**64
    u.numbers[: len(numbers)] = numbers
    _describe(u, quantizers, own[1:], least)
    result = _function()(ctypes.addressof(u), torch.get_num_threads())
    if result != 0:
        raise RuntimeError(f"hop_step: result {result}")
    for x, y in zip(written, own, strict=True):
        if x is y:
            torch.autograd.graph.increment_version(x)
        else:
            x.copy_(y)


def _describe(u: _Update, quantizers: Sequence[str], buffers: Sequence[Tensor], least: Sequence[float]) -> None:
    at = 0
    for s, q, part in zip(u.state, quantizers, least, strict=False):
        s.least, s.data = part, address(buffers[at])
        if not q:
            s.dtype = _DTYPES[buffers[at].dtype]
            at += 1
        else:
            made = plan(q)
            assert isinstance(made, Plan)
            s.quantizer, s.block, s.scale = _quantizer(made.words), _block(q), address(buffers[at + 1])
            at += 2
