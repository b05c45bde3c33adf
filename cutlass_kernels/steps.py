"""A step of an optimizer on a GPU: which kernel, its tables, and its launch."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_kernels import cache as kept
from cutlass_kernels.books import Book, joined
from cutlass_kernels.hopper import multiprocessors
from cutlass_kernels.updates import FIRST, NUMBERS, RECORD, UNIT, WARPS, Codes, Update

_ALIGNMENT = 16


class Parameter(NamedTuple):
    """A parameter of a step: which of the update's kinds it is, and its stream of random numbers.

    `states` has a tensor for each state of floats, and the codes and the scales of each in codes. All lie densely, on
    one GPU."""

    kind: int
    stream: int
    p: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]


class Scales(NamedTuple):
    """How a state in codes finds the scale of a block: from its largest magnitude, `floor` at least, over `extent`;
    what part of it a number above 0 is at least; the code of NaN."""

    floor: float
    extent: float
    part: float
    zero: int


class Step(NamedTuple):
    """A kernel, its codebooks, in the order of its layouts, and what finds the scales of the states in codes, kind by
    kind."""

    update: Update
    books: tuple[Book, ...] = ()
    scales: tuple[Scales, ...] = ()


_records: OrderedDict[Any, tuple[Tensor, int]] = OrderedDict()
_MOST = 64  # sets of parameters whose records are kept


def run(step: Step, parameters: Sequence[Parameter], numbers: Sequence[float], seed: int = 0) -> None:
    """One step of parameters on their GPU, none of them empty, on the current stream.

    Args:
        numbers: those of updates.NUMBERS, which become float32.
        seed: of random numbers, modulo 2^64.
    """
    device = parameters[0].p.device
    made, units = _recorded(step.update, device, tuple(_row(step.update, q) for q in parameters))
    blocks = min(multiprocessors(device), -(-units // WARPS))
    key = (seed % 2**32, (seed >> 32) % 2**32)
    kernel = compiled(step.update)
    kernel(made, tables(step.books, device), tuple(map(float, numbers)), key, step.scales or None, units, blocks)


def _row(update: Update, q: Parameter) -> tuple[int, ...]:
    """All that a record says of a parameter, but where its units begin."""
    own, states = [q.p.data_ptr(), q.grad.data_ptr()], iter(q.states)
    for state in update.kinds[q.kind].states:
        own += [next(states).data_ptr(), next(states).data_ptr() if isinstance(state, Codes) else 0]
    return q.p.numel(), q.kind, int(not any(a % _ALIGNMENT for a in own)), q.stream, *own


def _recorded(update: Update, device: torch.device, rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int]:
    """The records of parameters on a GPU, (parameters + 1, RECORD) int64, and the count of their units. Where nothing
    has moved they are those of the step before; what lies at the same place in the same form has the same record. Each
    stream has records of its own, so that none are read before they are written, or after they are freed."""
    key = device, rows, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _records.pop(key, None)
    if found is None:
        made, units = torch.zeros(len(rows) + 1, RECORD, dtype=torch.int64), 0
        filled = [(*row, *[0] * (RECORD - 1 - len(row))) for row in rows]
        made[:-1, 1:] = torch.tensor(filled, dtype=torch.int64)
        for i, row in enumerate(rows):
            made[i, FIRST] = units
            units += -(-row[0] // UNIT)
        made[-1, FIRST] = units
        found = (made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made), units
    _records[key] = found
    if len(_records) > _MOST:
        _records.popitem(last=False)
    return found


@cache
def tables(books: tuple[Book, ...], device: torch.device) -> Tensor:
    """The words of codebooks, on a GPU; one that nobody reads where there are none."""
    return torch.tensor(joined(books) or [0], dtype=torch.int32, device=device)


def build(update: Update, options: str = "") -> Any:
    """Compile an update; no GPU is needed."""
    import cutlass.cute as cute

    from cutlass_kernels.update_kernel import Kernel

    options = f"--gpu-arch {update.target} --enable-tvm-ffi {options}"
    return cute.compile(Kernel(update), *_described(update), options=options)


def declines(update: Update) -> str | None:
    """Why there is no kernel for an update, or None."""
    return update.declines() or kept.declines(update)


def compiled(update: Update) -> Callable[..., None]:
    return kept.kernel(update.name, update.target, lambda: build(update))


def _described(u: Update) -> tuple[Any, ...]:
    """The arguments of a kernel without their data."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Uint32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    records = make_fake_tensor(cutlass.Int64, (cute.sym_int32(), RECORD), (RECORD, 1), assumed_align=16)
    tables = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    scale = (Float32(0), Float32(0), Float32(0), Int32(0))
    scales = tuple(scale for k in u.kinds for s in k.states if isinstance(s, Codes)) or None
    numbers = tuple(Float32(0) for _ in NUMBERS[u.rule])
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return records, tables, numbers, (Uint32(0), Uint32(0)), scales, Int32(0), Int32(1), stream
