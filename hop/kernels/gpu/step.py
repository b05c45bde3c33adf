"""An optimizer step on a GPU: one kernel for all parameters of a group, with the CPU's bits (cutlass_kernels.steps)."""

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_kernels import prebuilt, steps, trust
from cutlass_kernels.books import Book
from cutlass_kernels.devices import capability_of
from cutlass_kernels.updates import MOST_BLOCK, TARGETS, Codes, Kind, State, Update
from hop.compat.pytree import Args
from hop.dispatch import plan
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.numerics.formats import E4M3, Codebook
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax

Call = Args  # the arguments of hop.kernels.cpu.step._step_


trust.JUDGES["Update"] = "hop.optim.trials:updating"


class Subject(NamedTuple):
    """The description that a step's kernel is compiled for: a rule, whether it rounds stochastically, the kinds of
    parameters, and the target."""

    rule: str
    is_stochastic: bool
    kinds: tuple[Args, ...]
    target: str


class _State(NamedTuple):
    """A quantized state, in the kernel's terms."""

    format: torch.dtype | Book
    block: int
    scales: steps.Scales


@functools.cache
def target_of(device: torch.device) -> str | None:
    """The compilation target for a GPU; None if there are no kernels for it."""
    return TARGETS.get(capability_of(device))


def is_here(p: Tensor) -> bool:
    """Whether these kernels may run on a parameter's device."""
    return p.is_cuda


def _prepare(call: Call) -> Plan:
    rule, _, key, _, p, grad, _, buffers, _ = call
    if not is_here(p):
        raise Declined(f"for parameters on a GPU, not on {p.device}")
    if p.numel() == 0:
        raise Declined("for non-empty parameters")
    if (target := target_of(p.device)) is None:
        raise Declined(f"for GPUs of compute capability {', '.join(f'{a}.{b}' for a, b in TARGETS)}")
    for x in (p, grad, *buffers):
        if type(x) not in (Tensor, torch.nn.Parameter) or x.device != p.device or x.layout != torch.strided:
            raise Declined(f"for plain tensors on {p.device}, but one is a {type(x).__name__} on {x.device}")
        if x.is_neg() or x.is_complex():
            raise Declined("for real tensors that are not negated views")
    subject = Subject(rule, key is not None, (_spelled(call),), target)
    decline(_reason(subject, os.environ.get(prebuilt.FOLDER)))
    decline(_untrusted(subject, p))
    return lambda *call: steps_([call])


STEP = Kernel("gpu", _prepare)
"""The kernel for one parameter; `steps_` runs all matching parameters together."""


def check_not_captured() -> None:
    """Raise RuntimeError if the current stream is being captured in a CUDA graph, which would repeat one step's
    numbers.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step: a step of hop.optim cannot be captured in a CUDA graph, because its numbers depend on the count of "
            "steps, which is on the host; capture the forward and the backward pass, and step after the graph"
        )


def steps_(calls: Sequence[Call]) -> None:
    """Run the step of several parameters in place.

    One launch for all parameters on a GPU with the same numbers; with kernels built ahead, one for each kind of
    parameters.
    """
    groups: dict[tuple[object, ...], dict[Args, list[Call]]] = {}
    for call in calls:
        rule, numbers, _, _, p, *_ = call
        groups.setdefault((rule, tuple(map(plan.bits, numbers)), p.device), {}).setdefault(_spelled(call), []).append(
            call
        )
    for (_, _, device), kinds in groups.items():
        target = target_of(device)
        assert target is not None
        subject = subject_of(kinds, target)
        first = next(iter(kinds.values()))[0][4]
        if steps.declines(kernel_of(subject).update) is None and _untrusted(subject, first) is None:
            _run(kinds, target)
        else:
            for kind, own in kinds.items():  # each kind has a kernel, as `_prepare` found
                _run({kind: own}, target)


def _untrusted(subject: Subject, p: Tensor) -> str | None:
    """Why the kernel must not be used on the GPU of a parameter, or None."""
    return trust.declines(kernel_of(subject).update, p.device, subject) if p.is_cuda else None


def subject_of(kinds: Mapping[Args, Sequence[Call]], target: str) -> Subject:
    """The subject of the kernel for calls that share a rule."""
    calls = [call for own in kinds.values() for call in own]
    return Subject(calls[0][0], any(key is not None for _, _, key, *_ in calls), tuple(kinds), target)


def _run(kinds: Mapping[Args, Sequence[Call]], target: str) -> None:
    """Launch the kernel once."""
    launch(subject_of(kinds, target), [call for own in kinds.values() for call in own])


def launch(subject: Subject, given: Sequence[Call]) -> None:
    """Launch a kernel once, for parameters of its kinds."""
    step, numbered = kernel_of(subject), {kind: i for i, kind in enumerate(subject.kinds)}
    calls = [(numbered[_spelled(call)], call) for call in given]
    (_, numbers, _, _, first, *_) = calls[0][1]
    seed = next((key for _, (_, _, key, *_) in calls if key is not None), 0)
    written, parameters = [], []
    for kind, call in calls:
        _, _, _, stream, p, grad, _, buffers, _ = call
        # Tensors that are not contiguous are copied, and written back.
        own = [x if x.is_contiguous() else x.contiguous() for x in (p, *buffers)]
        written += zip((p, *buffers), own, strict=True)
        parameters.append(steps.Parameter(kind, stream, own[0], grad.contiguous(), tuple(own[1:])))
    with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
        steps.run(step, parameters, numbers, seed)
    torch.autograd.graph.increment_version([x for x, y in written if x is y])
    for x, y in written:
        if x is not y:
            x.copy_(y)


# ---- from calls to a kernel


def _spelled(call: Call) -> Args:
    """The properties that determine the kind of a parameter."""
    _, _, _, _, p, grad, quantizers, buffers, least = call
    floats, at = [], 0
    for q in quantizers:
        floats.append(None if q else buffers[at].dtype)
        at += 2 if q else 1
    return p.dtype, grad.dtype, tuple(quantizers), tuple(floats), tuple(least)


@functools.lru_cache(maxsize=256)
def kernel_of(subject: Subject) -> steps.Step:
    """The kernel for parameters updated by one rule."""
    rule, is_stochastic, kinds, target = subject
    books: list[Book] = []
    scales: list[steps.Scales] = []
    found = []
    for p, grad, quantizers, floats, least in kinds:
        states: list[State] = []
        for q, dtype, part in zip(quantizers, floats, least, strict=True):
            state = _described(q, part) if q else dtype
            if isinstance(state, _State):
                scales.append(state.scales)
                state = _codes(state, books, part > 0)
            states.append(state)
        found.append(Kind(p, grad, tuple(states)))
    name, *flags = rule.split()
    if is_stochastic:
        flags.append("stochastic")
    layouts = tuple(book.layout for book in books)
    update = Update(name, tuple(found), layouts, target=target, **dict.fromkeys(flags, True))
    return steps.Step(update, tuple(books), tuple(scales))


def _codes(state: _State, books: list[Book], is_raised: bool) -> Codes:
    """Describe a quantized state, and add its codebook to those of the kernel."""
    if not isinstance(state.format, Book):
        return Codes(state.format, state.block, raised=is_raised)
    if state.format not in books:
        books.append(state.format)
    return Codes(state.format.layout, state.block, books.index(state.format), is_raised)


@functools.lru_cache(maxsize=1024)
def _reason(subject: Subject, _: str | None) -> str | None:
    """Why there is no kernel for a kind of parameters, given those built ahead in a folder; None if there is one."""
    try:
        return steps.declines(kernel_of(subject).update)
    except Declined as declined:
        return declined.reason


@functools.lru_cache(maxsize=1024)
def _described(quantizer: str, least: float) -> _State:
    """Describe a state's quantizer for the kernel.

    `least` is the smallest value above 0 as a fraction of its block's largest. Raises Declined if it is not supported.
    """
    q = Quantizer.parse(quantizer)
    rule, f = q.scale, q.format
    if type(q) is not Quantizer or type(rule) is not Amax or not q.flat or q.stochastic or q.layout is not None:
        raise Declined(f"for flat blocks with the largest magnitude as scale, rounded to the nearest; not {quantizer}")
    (block,) = q.block
    if not 0 < block <= MOST_BLOCK:
        raise Declined(f"for blocks of at most {MOST_BLOCK} elements, not of {block}")
    extent = f.max - f.zero
    if extent <= 0 or f.zero != 0:
        raise Declined(f"for formats with zero code 0 and a value above it, not {f.name}")
    above = min(n for n in f.numbers if n > 0)
    if least > 0 and abs(least * extent - above) > 2.0**-20 * above:
        raise Declined(f"for formats whose smallest value above 0 is that of a block, not {f.name}")
    if f == E4M3:
        return _State(f.dtype, block, steps.Scales(rule.floor, extent, least, 0))
    if not isinstance(f, Codebook):
        raise Declined(f"for codebooks and e4m3, not {f.name}")
    book = Book(f.bits, f.book, f._thresholds, f._zero_code, least > 0)
    if (reason := book.declines()) is not None:
        raise Declined(f"for {reason}; not {f.name}")
    return _State(book, block, steps.Scales(rule.floor, extent, least, f._zero_code))
