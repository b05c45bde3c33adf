"""Optimizer steps of hop.optim by their GPU kernels: compared with the CPU's bits, and timed against torch.optim.

python -m benchmarks.gpu_steps     # instructions and bytes of a step: benchmarks/results/gpu_steps.json; needs no GPU

They run on a GPU, or in the emulator of tests.ptx, where `around` makes a step's CPU tensors pass as GPU tensors.
"""

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hop
from benchmarks.isolated import Cases
from cutlass_kernels import cache, steps, tune
from cutlass_kernels.updates import UNIT, WARPS, Update
from examples.common import json_rows
from hop import presets
from hop.kernels.gpu import step as gpu
from tests.support import pages

OUTPUT = Path(__file__).with_name("results") / "gpu_steps.json"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MIXED = {"exp_avg": presets.STATE4, "exp_avg_sq": presets.STATE8_UNSIGNED}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw8": lambda p: hop.optim.AdamW8bit(p, lr=1e-2),
    "adamw4": lambda p: hop.optim.AdamW4bit(p, lr=1e-2),
    "adamw_fp8": lambda p: hop.optim.AdamWFp8(p, lr=1e-2),
    "coupled": lambda p: hop.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "amsgrad": lambda p: hop.optim.AdamW8bit(p, lr=1e-2, amsgrad=True),
    "mixed": lambda p: hop.optim.AdamW(p, lr=1e-2, state=MIXED),
    "signed_squares": lambda p: hop.optim.AdamW(p, lr=1e-2, state=presets.STATE8),
    "floats": lambda p: hop.optim.AdamW(p, lr=1e-2, amsgrad=True, state=None),
    "blocks_of_16": lambda p: hop.optim.AdamW(p, lr=1e-2, state=dataclasses.replace(presets.STATE8, block=(16,))),
    "sgd": lambda p: hop.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: hop.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: hop.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, state=hop.optim.FP8),
    "lion": lambda p: hop.optim.Lion(p, lr=1e-2, weight_decay=0.1),
    "stochastic": lambda p: hop.optim.AdamW8bit(p, lr=1e-3, stochastic_rounding=True, seed=2**62 - 3),
}
# Whole units, and units that end within 256 elements, within a block, and within a byte; small ones have float states.
SHAPES = ((4, 1031), (2048, 3), (5000,), (7,), (3, 300), (1,))
LARGE = ((4096, 4097), (1000, 1003), (300,))
TIMED = ("adamw8", "adamw4", "adamw_fp8")
COUNTED = {  # optimizers in the table, with their names
    "adamw8": "`AdamW8bit`",
    "adamw4": "`AdamW4bit`",
    "adamw_fp8": "`AdamWFp8`",
    "lion": "`Lion`, 8 bits",
    "momentum": "`SGD` with momentum, 8 bits",
}
LAYER = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
)  # of Llama 3 with 8 billion parameters
LAYERS = 4


def names() -> list[str]:
    return ["benchmarks.gpu_steps:checks"]


# ---- against the CPU


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def give_gradients(params: Sequence[nn.Parameter], step: int, nasty: bool = False) -> None:
    """Set random gradients; `nasty` ones have all magnitudes, and some are not finite."""
    g = torch.Generator().manual_seed(step)
    for p in params:
        x = torch.randn(p.shape, generator=g) * 0.01
        if nasty:
            x = x * torch.exp2(torch.randint(-140, 60, (*p.shape[:-1], 1), generator=g).float())
            which = torch.randint(0, 400, p.shape, generator=g)
            for i, number in enumerate((0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -3e-39, 3e38)):
                x = torch.where(which == i, number, x)
            x = torch.where(torch.randint(0, 3, (*p.shape[:-1], 1), generator=g) == 0, 0.0, x)
        p.grad = x.to(p.dtype)


def assert_same(wanted: Tensor, got: Tensor, what: str) -> None:
    """Check that bits are equal; NaNs match, except that in bfloat16 their bits must be equal too."""
    if isinstance(wanted, hop.QuantizedTensor):
        assert isinstance(got, hop.QuantizedTensor)
        for name, buffer in wanted.buffers().items():
            assert_same(buffer, got.buffers()[name], f"{what}.{name}")
        return
    wanted, got = wanted.detach().contiguous(), got.detach().cpu().contiguous()
    assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape), what
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
    differ = wanted.view(whole) != got.view(whole)
    if wanted.is_floating_point() and wanted.dtype != BF16:
        differ &= ~(wanted.float().isnan() & got.float().isnan())
    assert not bool(differ.any()), f"{what}: {int(differ.sum())} of {differ.numel()} elements have other bits"


def compare(
    kind: str,
    dtype: torch.dtype,
    *,
    nasty: bool,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    device: str = "cuda",
    around: Callable[[], Any] = contextlib.nullcontext,
    count: int = 2,
) -> int:
    """Compare steps of the kernel and the CPU, each starting from the CPU's values, after one CPU step. Returns the
    number of launched kernels.
    """
    params, launches = drawn(shapes, dtype), 0
    optimizer = OPTIMIZERS[kind](params)
    give_gradients(params, 0)
    optimizer.step()
    for i in range(1, 1 + count):
        give_gradients(params, i, nasty)
        others = [nn.Parameter(p.detach().to(device, copy=True)) for p in params]
        for p, other in zip(params, others, strict=True):
            assert p.grad is not None
            other.grad = p.grad.to(device, copy=True)
        theirs = OPTIMIZERS[kind](others)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with around(), counted() as seen:
            theirs.step()
        optimizer.step()
        assert len(seen) == 1, f"{len(seen)} launches"
        launches += len(seen)
        for p, other in zip(params, others, strict=True):
            assert_same(p, other, f"parameter {tuple(p.shape)} of step {i}")
            for name, state in optimizer.state[p].items():
                assert_same(state, theirs.state[other][name], f"{name} of {tuple(p.shape)} of step {i}")
    return launches


@contextlib.contextmanager
def counted() -> Iterator[list[Update]]:
    """Record the launched kernels."""
    own, seen = steps.run, []

    def run(step: steps.Step, *rest: Any) -> None:
        seen.append(step.update)
        own(step, *rest)

    with mock.patch.object(steps, "run", run):
        yield seen


def checks(device: str = "cuda") -> Cases:
    for kind in OPTIMIZERS:
        for dtype in (BF16, F32):
            for nasty in (False, True):
                name = f"step, {kind}, {dtype}, {'nasty' if nasty else 'random'}"
                yield name, lambda k=kind, d=dtype, n=nasty: compare(k, d, nasty=n, device=device)
    for kind in TIMED:
        yield (
            f"step, {kind}, large",
            lambda k=kind: compare(k, BF16, nasty=True, shapes=LARGE, device=device, count=1),
        )


# ---- prebuilt kernels


@functools.cache
def updates(target: str = "sm_90a") -> tuple[Update, ...]:
    """All kernels that checks and timings launch: for all kinds of parameters at once, and for each alone."""
    found: dict[str, Update] = {}
    for kind in OPTIMIZERS:
        for dtype in (BF16, F32):
            for update in kernels_of(kind, dtype, target):
                found.setdefault(update.name, update)
    return tuple(found.values())


def kernels_of(kind: str, dtype: torch.dtype, target: str) -> list[Update]:
    return [gpu.kernel_of(subject).update for subject in _subjects(kind, dtype, target)]


def subject_of(kind: str, dtype: torch.dtype, target: str) -> gpu.Subject:
    """The kernel description for all parameters of an optimizer."""
    return _subjects(kind, dtype, target)[0]


def _subjects(kind: str, dtype: torch.dtype, target: str) -> list[gpu.Subject]:
    """Descriptions of the kernel for all parameters at once, then of those for each kind."""
    params = drawn(((64, 80), (7,)), dtype)
    optimizer = OPTIMIZERS[kind](params)
    made: list[gpu.Subject] = []

    def note(kinds: Any, target: str) -> None:
        made.extend(gpu.subject_of(some, target) for some in (kinds, *({k: own} for k, own in kinds.items())))

    give_gradients(params, 0)
    with (
        mock.patch.object(gpu, "is_here", lambda p: True),
        mock.patch.object(gpu, "target_of", lambda device: target),
        mock.patch.object(gpu, "_run", note),
        mock.patch.object(steps, "declines", lambda update: update.declines()),
    ):
        optimizer.step()
    return made


# ---- timings


def step_times() -> Cases:
    """Microseconds of a bfloat16 step of some layers, and of torch.optim.AdamW's fused step."""
    for kind in TIMED:
        yield kind, lambda kind=kind: measured(kind)


def measured(kind: str) -> dict[str, Any]:
    params = [nn.Parameter(torch.randn(shape, device="cuda", dtype=BF16)) for shape in LAYER * LAYERS]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer, calls = OPTIMIZERS[kind](params), []
    optimizer.step()
    own = steps.run
    with mock.patch.object(steps, "run", lambda *call: (calls.append(call), own(*call))):
        optimizer.step()
    theirs = torch.optim.AdamW(params, fused=True, capturable=True)
    theirs.step()
    us = tune.microseconds([lambda i: own(*calls[0]), lambda i: theirs.step()], rounds=7)
    count = sum(p.numel() for p in params)
    states = [x for p in params for name, x in optimizer.state[p].items() if name != "step"]
    state = sum(b.nbytes for x in states for b in _buffers(x))
    times = {name: round(t, 3) for name, t in zip(("ours", "torch fused"), us, strict=True)}
    return {"kind": kind, "elements": count, "bytes": 6 * count + 2 * state, "us": times}


def _buffers(state: Any) -> list[Tensor]:
    return list(state.buffers().values()) if isinstance(state, hop.QuantizedTensor) else [state]


# ---- instructions, counted in the emulator

_FREE = ("mov", "abs", "neg")  # become operands of other machine instructions
_LONG = {"div.rn.f32": 9, "sqrt.rn.f32": 8, "rcp.rn.f32": 7}  # approximate machine instructions of each
ISSUED = 132 * 4 * 1.755e9  # warp instructions per second, at 1.755 GHz
COPIED = 4.3e12  # bytes per second that a large copy moves on an H200
BUSY = 0.8  # fraction of issue slots that a kernel fills if other warps hide its latencies
MOST = 0.9  # fraction of a copy's bandwidth for a kernel that reads more than it writes


def instructions(kind: str) -> float:
    """Approximate machine instructions of warps per 64 bfloat16 elements, from the PTX that the emulator executes.

    Divisions and roots count as the instructions that they expand to.
    """
    one, both = (_executed(kind, UNIT * WARPS * n) for n in (2, 3))
    total = sum(_cost(name) * (count - one[name]) for name, count in both.items())
    return total / (UNIT * WARPS) * 64


def _cost(name: str) -> int:
    return 0 if name.split(".")[0] in _FREE else _LONG.get(name, 1)


def _executed(kind: str, count: int) -> Counter[str]:
    """The instructions of all warps in a step of one parameter."""
    from tests.support import emulated_steps

    params = drawn(((count,),), BF16)
    optimizer = OPTIMIZERS[kind](params)
    give_gradients(params, 0)
    optimizer.step()
    with emulated_steps.on_gpu(multiprocessors=1) as reports:
        optimizer.step()
    return reports[0].instructions


def bytes_of(kind: str) -> float:
    """Bytes read and written per element in bfloat16."""
    params = drawn(((UNIT,),), BF16)
    optimizer = OPTIMIZERS[kind]([{"params": params, "min_numel": 0}])
    give_gradients(params, 0)
    optimizer.step()
    states = [x for name, x in optimizer.state[params[0]].items() if name != "step"]
    return 6 + 2 * sum(b.nbytes for x in states for b in _buffers(x)) / UNIT


def predicted(instructions: float, bytes: float) -> tuple[float, float]:
    """The predicted fractions of a copy's bandwidth on an H200, with BUSY and with all of the issue slots."""
    issue = ISSUED / (instructions / 64) * bytes / COPIED
    return min(MOST, BUSY * issue), min(MOST, issue)


def counted_step(kind: str) -> dict[str, Any]:
    """A row: machine instructions of warps per 64 elements, and bytes read and written per element, in bfloat16."""
    return {"kind": kind, "instructions": instructions(kind), "bytes": bytes_of(kind)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["", "instructions per 64 elements", "bytes per element", "share of a copy's bandwidth", "ms per step"]]
    for row in rows:
        count, size = row["instructions"], row["bytes"]
        shares = predicted(count, size)
        of_copy = _range(*(f"{100 * share:.0f}" for share in shares))
        ms = _range(*(f"{size * 1e9 / COPIED / share * 1e3:.1f}" for share in reversed(shares)))
        lines.append([COUNTED[row["kind"]], f"{count:.0f}", f"{size:.2f}", f"{of_copy} %", ms])
    return pages.table(lines)


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def main() -> None:
    rows = []
    for kind in COUNTED:
        rows.append(counted_step(kind))
        print(rows[-1], flush=True)
    OUTPUT.write_text(json_rows({"versions": cache.versions(), "rows": rows}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
