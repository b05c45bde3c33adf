"""The judge of GPU kernels of optimizer steps for cutlass_kernels.trials: results that a trusted kernel computes."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import steps
from cutlass_kernels.trials import Judged
from hop.kernels.gpu import step as gpu
from hop.optim import step
from hop.optim.updates import UpdateRule
from hop.tensor.buffers.operators import quantize_buffers

_OPTIONS = {"adam": (0.9, 0.99, 1e-8, 0.1), "sgd": (0.9, 0.2, 0.1), "lion": (0.9, 0.99, 0.1)}  # of each rule
_SHAPES = ((4, 1031), (5000,), (7,))  # whole units, and units that end within blocks and bytes
_ODD = (0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -3e-39, 3e38)
_SEED, _COUNT, _RATE = 2**62 - 3, 3, 1e-2


def updating(subject: gpu.Subject, device: torch.device) -> Judged:
    """The judge of the kernel for kinds of parameters."""
    update = gpu.kernel_of(subject).update
    checks = (functools.partial(_compared, subject, is_odd, device) for is_odd in (False, True))
    return Judged(lambda: steps.compiled(update), checks)


def _compared(subject: gpu.Subject, is_odd: bool, device: torch.device) -> None:
    """Compare a step of parameters of all kinds with the reference in plain ATen on the CPU."""
    given = list(_parameters(subject, is_odd))
    calls = [_call(subject, kind, p, grad, buffers, device) for kind, p, grad, buffers in given]
    gpu.launch(subject, calls)
    for i, ((kind, p, grad, buffers), call) in enumerate(zip(given, calls, strict=True)):
        numbers = torch.tensor(call[1], dtype=torch.float32)
        key = None if call[2] is None else torch.tensor(call[2])
        wanted = step.updated(subject.rule, numbers, key, 0, p, grad, kind[2], buffers)
        for name, a, b in zip(("parameter", *["state"] * len(buffers)), (call[4], *call[7]), wanted, strict=True):
            _same(a.cpu(), b, f"{name} of {tuple(p.shape)}, parameter {i} of {subject.rule}")


def _parameters(subject: gpu.Subject, is_odd: bool) -> Iterator[tuple[Any, Tensor, Tensor, list[Tensor]]]:
    """Parameters with gradients and the buffers of their states, of each kind and shape."""
    g = torch.Generator().manual_seed(int(is_odd))
    for kind in subject.kinds:
        dtype, of_grad, quantizers, floats, _ = kind
        for shape in _SHAPES:
            grad = torch.randn(shape, generator=g) * 0.01
            if is_odd:
                grad *= torch.exp2(torch.randint(-140, 60, (*shape[:-1], 1), generator=g).float())
                which = torch.randint(0, 400, shape, generator=g)
                for i, number in enumerate(_ODD):
                    grad = torch.where(which == i, number, grad)
            buffers: list[Tensor] = []
            for i, (q, own) in enumerate(zip(quantizers, floats, strict=True)):
                x = torch.randn(shape, generator=g) * 0.01
                x = x if i < UpdateRule.means else x * x
                buffers += quantize_buffers(q, x, None, None, None, ["rowwise"]) if q else [x.to(own)]
            yield kind, torch.randn(shape, generator=g).to(dtype), grad.to(of_grad), buffers


def _call(subject: gpu.Subject, kind: Any, p: Tensor, grad: Tensor, buffers: list[Tensor], device: torch.device) -> Any:
    """The arguments of a step on a device."""
    dtype, _, quantizers, _, least = kind
    rule = UpdateRule.parse(subject.rule)
    numbers = rule.numbers(_COUNT, _RATE, _OPTIONS[rule.name])
    key = _SEED if subject.is_stochastic and dtype == torch.bfloat16 else None
    moved = [x.to(device, copy=True) for x in (p, grad, *buffers)]
    return subject.rule, numbers, key, 0, moved[0], moved[1], list(quantizers), moved[2:], list(least)


def _same(a: Tensor, b: Tensor, what: str) -> None:
    """Fail unless bits are equal; NaN equals NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[b.element_size()]
    differ = a.contiguous().view(words) != b.contiguous().view(words)
    if b.is_floating_point():
        differ &= ~(a.float().isnan() & b.float().isnan())
    assert not bool(differ.any()), f"{what}: {int(differ.sum())} of {differ.numel()} elements differ"
