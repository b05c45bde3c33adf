"""One step of the parameters of a group, in place.

    hop::step_(rule, options, seed, streams, steps!, params!, grads, quantizers, buffers!, zeros, errors)

A compiled program contains one call of this operator for each group, and the call behaves as in eager mode. `rule` is
the spelling of an UpdateRule. `options` are the learning rate and the rule's own options, as tensors of one element, so
that options that change are inputs of the program. With a seed, bfloat16 parameters are rounded stochastically, each
with its own stream. `steps` are the step counts. `quantizers` are the spellings of the quantizers of each state, "" for
floats, parameter by parameter; `buffers` are the tensors of all states in the same order. The step is computed in
float32, or float64 for float64 parameters, and rounded once.

If one of `zeros` is not 0, the call raises FloatingPointError with the corresponding text from `errors`, before
anything has changed.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import dynamo, eager, memory
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined
from hop.kernels.cpu import step as native
from hop.kernels.gpu import step as gpu
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.optim.states import bounded, least_part, raised
from hop.optim.updates import UpdateRule
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.noise import noise
from hop.tensor.buffers.operators import dequantize_buffers, quantize_buffers

_USAGES = [copies.ROWWISE]

_library = torch.library.Library("hop", "FRAGMENT")
_library.define(
    "step_(str rule, Tensor[] options, int? seed, int[] streams, Tensor(a!)[] steps, Tensor(b!)[] params, "
    "Tensor[] grads, str[] quantizers, Tensor(c!)[] buffers, Tensor[] zeros, str[] errors) -> ()"
)


def step_(
    rule: str,
    options: Sequence[float | Tensor],
    seed: int | None,
    streams: Sequence[int],
    steps: Sequence[Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    zeros: Sequence[Tensor],
    errors: Sequence[str],
) -> None:
    """Take a step of parameters, given the states of all in turn. None of the tensors may be a DTensor."""
    quantizers, buffers = spelled(states)
    call = _step
    if not eager.is_plain_eager():
        call, options = torch.ops.hop.step_.default, [as_tensor(x) for x in options]
    call(rule, options, seed, streams, steps, params, grads, quantizers, buffers, zeros, errors)


dynamo.allow_in_graph(step_)


def as_tensor(x: float | Tensor) -> Tensor:
    """Convert an option of a step to a tensor. Dynamo makes the factor of a product an input if it changes."""
    return x if isinstance(x, Tensor) else torch.ones((), dtype=torch.float64) * x


def _step(
    rule: str,
    options: Sequence[float | Tensor],
    seed: int | None,
    streams: Sequence[int],
    steps: Sequence[Tensor],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    quantizers: Sequence[str],
    buffers: Sequence[Tensor],
    zeros: Sequence[Tensor],
    errors: Sequence[str],
) -> None:
    memory.check((*steps, *zeros))
    for zero, error in zip(zeros, errors, strict=True):
        if not zero.item() == 0:
            raise FloatingPointError(error)
    parsed = UpdateRule.parse(rule)
    lr, *others = (x.item() if isinstance(x, Tensor) else x for x in options)
    held = list(_each(quantizers, buffers, len(params)))
    is_native = native.is_usable()
    quick = [
        is_native and not gpu.is_here(p) and native.fits(p, grad, *own)
        for p, grad, own in zip(params, grads, held, strict=True)
    ]
    for p, grad, own, fits in zip(params, grads, held, quick, strict=True):
        if not fits:
            _check(p, grad, *own)
    gpu.check_not_captured()
    if steps:
        torch.ops.aten._foreach_add_.Scalar(list(steps), 1)
    numbers = functools.cache(lambda count: parsed.numbers(count, lr, others))
    on_gpu: list[Args] = []
    on_cpu: list[Args] = []
    for i, (p, grad, (names, own)) in enumerate(zip(params, grads, held, strict=True)):
        count = steps[i].item()
        call = (rule, numbers(count), _key(seed, count, p), streams[i], p, grad, names, own, _least(tuple(names)))
        if quick[i]:
            on_cpu.append(call)
        elif not isinstance(gpu.STEP.match(call), Declined):
            on_gpu.append(call)
        elif not isinstance(native.STEP.match(call), Declined):
            on_cpu.append(call)
        else:
            _write(call)
    if on_cpu:
        native.steps_(on_cpu)
    if on_gpu:
        gpu.steps_(on_gpu)


def _key(seed: int | None, count: float, p: Tensor) -> int | None:
    """The seed that a parameter is rounded with in this step, or None to round to the nearest value."""
    return None if seed is None or p.dtype != torch.bfloat16 else seed + int(count)


@functools.lru_cache(maxsize=1024)
def _least(quantizers: tuple[str, ...]) -> list[float]:
    """For each state, the fraction of its block's maximum that values above 0 are raised to; 0 for no raise."""
    return [least_part(name) if name and i >= UpdateRule.means else 0.0 for i, name in enumerate(quantizers)]


def explain(rule: str, seed: int | None, p: Tensor, grad: Tensor, states: Sequence[Tensor]) -> str:
    """Explain which kernel computes the step of a parameter, and why those before it declined: one line each."""
    quantizers, buffers = spelled(states)
    call = (rule, (), _key(seed, 0, p), 0, p, grad, quantizers, buffers, _least(tuple(quantizers)))
    lines = []
    for kernel in (gpu.STEP, native.STEP):
        match = kernel.match(call)
        lines.append(f"{kernel.name}: {match.reason if isinstance(match, Declined) else 'runs it'}")
        if not isinstance(match, Declined):
            return "\n".join(lines)
    return "\n".join([*lines, f"aten: runs it{', fused by Inductor' * p.is_cuda}"])


def spelled(states: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
    """The spellings of the states' quantizers, "" for floats, and the buffers of all states in turn."""
    quantizers = [str(x.quantizer) if isinstance(x, QuantizedTensor) else "" for x in states]
    return quantizers, [b for x in states for b in (x.buffers().values() if isinstance(x, QuantizedTensor) else (x,))]


_library.impl("step_", _step, "CompositeExplicitAutograd")
torch.library.register_fake("hop::step_", lambda *args: None, lib=_library)


def _each(
    quantizers: Sequence[str], buffers: Sequence[Tensor], count: int
) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
    """The quantizers and buffers of each parameter."""
    number, at = len(quantizers) // count if count else 0, 0
    for i in range(count):
        names = quantizers[i * number : (i + 1) * number]
        end = at + sum(_buffers(name) for name in names)
        yield names, buffers[at:end]
        at = end


def _check(p: Tensor, grad: Tensor, quantizers: Sequence[str], buffers: Sequence[Tensor]) -> None:
    """Raise unless the gradient and the states have the parameter's shape, and the tensors are
    within their storages.
    """
    shape, at = tuple(p.shape), 0
    for name, x in (("gradient", grad), *(("state", buffers[i]) for i in _floats(tuple(quantizers)))):
        if x.shape != p.shape:
            raise ValueError(
                f"step: a {name} of shape {tuple(x.shape)} does not fit a parameter of shape {shape}; create it again"
            )
    for q in quantizers:
        if q:
            copies.check(_form(q, shape), buffers[at : at + _buffers(q)])
        at += _buffers(q)
    memory.check((p, grad, *buffers))


@functools.lru_cache(maxsize=1024)
def _floats(quantizers: tuple[str, ...]) -> list[int]:
    """The indices of the float states among the buffers."""
    ends = itertools.accumulate((_buffers(q) for q in quantizers), initial=0)
    return [at for q, at in zip(quantizers, ends, strict=False) if not q]


@functools.lru_cache(maxsize=4096)
def _form(quantizer: str, shape: tuple[int, ...]) -> Sequence[copies.Buffer]:
    return copies.describe(Quantizer.parse(quantizer), shape, (copies.ROWWISE,))


@functools.lru_cache(maxsize=1024)
def _buffers(quantizer: str) -> int:
    """The number of buffers of a state."""
    return 1 + len(Quantizer.parse(quantizer).stored()) if quantizer else 1


def _write(call: Args) -> None:
    """Compute the step with PyTorch's operators; on a GPU fused by Inductor."""
    rule, numbers, seed, stream, p, grad, quantizers, buffers, _ = call
    key = None if seed is None else torch.tensor(seed, device=p.device)
    given = torch.tensor(numbers, dtype=_wide(p), device=p.device)
    (write_fused if p.is_cuda else write_updated)(rule, given, key, stream, p, grad, quantizers, buffers)


def write_fused(*call: Any) -> None:
    """Compile and run `write_updated`.

    Tensors of all shapes share one program if all blocks run over the flattened tensor.
    """
    rule, numbers, seed, stream, p, grad, quantizers, buffers = call
    whole = all(x.is_contiguous() for x in (p, *buffers))
    if p.numel() > 1 and whole and all(Quantizer.parse(q).flat for q in quantizers if q):
        p, grad, buffers = p.view(-1), grad.reshape(-1), [b.view(-1) for b in buffers]
    _compiled()(rule, numbers, seed, 0 if seed is None else stream, p, grad, list(quantizers), list(buffers))


@functools.cache
def _compiled() -> Callable[..., None]:
    return dynamo.compiled(write_updated)


def write_updated(*call: Any) -> None:
    """Compute `updated` for the parameter, and write the results into it and its buffers."""
    *_, p, _, _, buffers = call
    for old, x in zip((p, *buffers), updated(*call), strict=True):
        old.copy_(x)


def _wide(p: Tensor) -> torch.dtype:
    """The dtype the optimizer step is computed in."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def updated(
    rule: str,
    numbers: Tensor,
    seed: Tensor | None,
    stream: int,
    p: Tensor,
    grad: Tensor,
    quantizers: Sequence[str],
    buffers: Sequence[Tensor],
) -> list[Tensor]:
    """The parameter and the buffers of its states after a step: the reference in plain ATen.

    `numbers` are the constants of the step in the dtype that it is computed in. Without a seed the parameter is rounded
    to the nearest value.
    """
    held, at = [], 0
    for q in quantizers:
        held.append(buffers[at : at + _buffers(q)])
        at += _buffers(q)
    wide = _wide(p)
    states = [
        dequantize_buffers(q, list(own), _USAGES, list(p.shape), torch.float32).to(wide) if q else own[0].to(wide)
        for q, own in zip(quantizers, held, strict=True)
    ]
    found, states = UpdateRule.parse(rule).update(numbers.unbind(), p.to(wide), grad.to(wide), states)
    new = [found.to(p.dtype) if seed is None else rounded(found, seed, stream)]
    for i, (q, own, x) in enumerate(zip(quantizers, held, states, strict=True)):
        x = bounded(Quantizer.parse(q), x.to(torch.float32)) if q else x
        if q and i >= UpdateRule.means:
            x = raised(q, x)
        new += quantize_buffers(q, x, None, None, None, _USAGES) if q else [x.to(own[0].dtype)]
    return new


dynamo.allow_in_graph(updated)


def rounded(x: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Round a float32 tensor to bfloat16 stochastically.

    Adds 16 random bits to the 16 bits that are dropped, and keeps the carry. NaNs and infinities are not changed.
    """
    low, high = noise(seed, (*x.shape, 2), stream=stream, bits=8).to(torch.int32).unbind(-1)
    carried = (x.view(torch.int32) + (low + high * 256)) & -(2**16)
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)
