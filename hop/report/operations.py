"""A table of the time and FLOPs of each operation that a function calls, PyTorch's and ours."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from hop.compat.profiling import counting


@dataclass(frozen=True)
class Operation:
    """One operation, named as in a profile: hop::scaled[linear, int8 x int8 -> bfloat16, 128x4096x4096], aten::mm."""

    name: str
    calls: int
    seconds: float
    """Of all calls together, including the operations they call."""
    flops: int
    """Of all calls together; 0 if torch.utils.flop_counter does not count the operation."""


def operations(function: Callable[..., object], /, *args: object, **kwargs: object) -> list[Operation]:
    """Return the operations of a call that have FLOPs, and all of ours, slowest first.

    The function runs twice, because torch.profiler counts the FLOPs of a fixed list of operators only: times come from
    the profiler, FLOPs from torch.utils.flop_counter.

    Args:
        function: called in eager mode; our operators do not appear in compiled programs.
        args, kwargs: the arguments of the call.
    """
    with FlopCounterMode(display=False) as counter, counting(counter) as ours:
        function(*args, **kwargs)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as measured:
        function(*args, **kwargs)
    counted = {str(op).replace(".", "::", 1): flops - ours.operators.get(op, 0) for op, flops in ours.now().items()}
    rows = [
        Operation(e.key, e.count, e.cpu_time_total * 1e-6, ours.calls.get(e.key, counted.get(e.key, 0)))
        for e in measured.key_averages()
        if e.key.startswith("hop::") or counted.get(e.key)
    ]
    return sorted(rows, key=lambda o: -o.seconds)


def table(rows: list[Operation]) -> str:
    """Format the operations as text, one per line."""
    lines = [f"{'operation':<64} {'calls':>6} {'ms':>9} {'GFLOP':>9} {'GFLOP/s':>9}"]
    for o in rows:
        rate = o.flops / o.seconds * 1e-9 if o.seconds else 0.0
        lines.append(f"{o.name:<64} {o.calls:>6} {o.seconds * 1e3:>9.3f} {o.flops * 1e-9:>9.3f} {rate:>9.1f}")
    return "\n".join(lines)
