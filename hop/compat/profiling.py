"""The profiler, FLOP counting and torch.fx symbolic tracing, which observe public functions without a dispatch mode."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.autograd import profiler
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves

from hop.compat.eager import ranges
from hop.compat.patches import Changes, apply_needed, changing
from hop.compat.pytree import Args, Kwargs

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

R = TypeVar("R")
NAMES: list[Callable[[str, Args], str]] = []
"""Functions that name a call's profiler range from the name of its function and its arguments; the last one is used."""


class Counts(NamedTuple):
    """FLOPs of our calls by name, and their share in the FLOPs of each PyTorch operator that `counter` counts."""

    counter: "FlopCounterMode"
    calls: dict[str, int]
    operators: dict[object, int]

    def now(self) -> dict[object, int]:
        return dict(self.counter.get_flop_counts().get("Global", {}))

    def add(self, name: str, before: dict[object, int]) -> None:
        for op, flops in self.now().items():
            more = flops - before.get(op, 0)
            self.operators[op] = self.operators.get(op, 0) + more
            self.calls[name] = self.calls.get(name, 0) + more


class _Counting(threading.local):
    counts: Counts | None = None


_counting = _Counting()


def is_watched(is_eager: bool = True) -> bool:
    """Whether a call has to report to the profiler or to a FLOP count by name; False inside another such call.

    The profiler observes only eager calls. Takes 0.05 µs.
    """
    return not ranges.inside and ((is_eager and profiler._is_profiler_enabled) or _counting.counts is not None)


@contextlib.contextmanager
def counting(counter: "FlopCounterMode") -> Iterator[Counts]:
    """Count FLOPs by the names of calls, of those that `counter` counts in this block, in this thread."""
    _counting.counts = counts = Counts(counter, {}, {})
    try:
        yield counts
    finally:
        _counting.counts = None


@contextlib.contextmanager
def ranged(function: str, args: tuple[object, ...]) -> Iterator[None]:
    """A profiler range named after a call, in which no further ranges of ours are opened."""
    name, counts = NAMES[-1](function, args), _counting.counts
    before = {} if counts is None else counts.now()
    ranges.inside = True
    try:
        with torch.profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext():
            yield
    finally:
        ranges.inside = False
    if counts is not None:
        counts.add(name, before)


def observed(function: Callable[..., R], args: Args, kwargs: Kwargs) -> R | None:
    """Run a call in a profiler range, or record it as a node of torch.fx; None if nothing observes it."""
    if is_watched():
        with ranged(function.__name__, args):
            return function(*args, **kwargs)
    proxy: Any = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Proxy)), None)
    return None if proxy is None else proxy.tracer.create_proxy("call_function", function, args, kwargs)


LAYERS: list[type] = []
"""Classes of modules that symbolic traces record as calls."""


@changing(
    "torch.fx._symbolic_trace",
    "torch.fx.symbolic_trace keeps only layers of torch.nn as calls, and traces into ours, which Proxies cannot pass",
)
def layers_of_traces() -> Changes:
    from torch.fx import _symbolic_trace

    cls = _symbolic_trace.Tracer
    is_leaf = cls.is_leaf_module

    @functools.wraps(is_leaf)
    def is_layer(self: torch.fx.Tracer, module: torch.nn.Module, qualified_name: str) -> bool:
        return isinstance(module, tuple(LAYERS)) or is_leaf(self, module, qualified_name)

    yield cls, "is_leaf_module", is_layer


apply_needed()
