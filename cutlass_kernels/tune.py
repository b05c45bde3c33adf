"""Measuring tiles on the GPU at hand; the fastest is kept (measured.py)."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from cutlass_kernels import checks, hopper, measured, tiles, trust
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant

Indexed = Callable[[int], object]  # a call, by number, so that it can take other inputs each time
Timer = Callable[[Sequence[Indexed]], list[float]]
_LARGEST_GRAPH = 512  # calls
_MOST_COPIES = 2**30  # bytes of inputs that are read in turns


def tune(p: Product, timer: Timer | None = None) -> Tile:
    """Time a product with every tile that can compute it, and keep the fastest for products like it.

    Args:
        p: a product on a GPU of compute capability 9.0.
        timer: gives the microseconds of a call of each of several functions; CUDA events by default.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or device that Product does not describe.
        NotImplementedError: no kernel computes it, or may be used (cutlass_kernels.trust), or, where nothing can be
            compiled, was built ahead.
    """
    checks.check(p)
    if (reason := hopper.declines(p)) is not None:
        raise NotImplementedError(f"no Hopper kernel takes this product: {reason}")
    fitting = [v for tile in tiles.TILES if isinstance(v := hopper.variant_of(p, tile), Variant)]
    variants = hopper.available(fitting)
    if p.lhs.is_cuda and trust.mode() != "all":
        trust.check(variants, p.lhs.device)
        variants = [v for v in variants if trust.declines(v, p.lhs.device) is None]
    if not variants:
        reason = trust.declines(fitting[0], p.lhs.device)
        raise NotImplementedError(f"no Hopper kernel of this product may be used: {reason}")
    fused = {f.name: value for f in fields(p)[3:] if (value := getattr(p, f.name)) != f.default}
    weights = in_turns(p.rhs)
    runs = [hopper.plan(p, v.tile) for v in variants]
    calls = [lambda i, run=run: run(p.lhs, weights[i % len(weights)], p.out, **fused) for run in runs]
    times = (timer or microseconds)(calls)
    fastest = variants[min(range(len(times)), key=times.__getitem__)]
    measured.keep(measured.key(fastest, p), {str(v.tile): us for v, us in zip(variants, times, strict=True)})
    return fastest.tile


def in_turns(x: Tensor) -> list[Tensor]:
    """Copies of a factor, with its strides, that together do not fit in the L2 cache: read in turns, they come from
    memory."""
    size = max(1, x.numel() * x.element_size())
    cached = torch.cuda.get_device_properties(x.device).L2_cache_size if x.is_cuda else 0
    return [x, *(x.clone() for _ in range(min(3 * cached, _MOST_COPIES) // size))]


def microseconds(calls: Sequence[Indexed], rounds: int = 9, least_ms: float = 1.5) -> list[float]:
    """Median time of a call of each on the GPU, without the host's: graphs of many calls, replayed in turns.

    Every other round goes backwards, so that none always comes first; a replay before the timed one warms up."""
    graphs = [_graph(call, least_ms) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for i in range(len(calls)) if turn % 2 else reversed(range(len(calls))):
            graph, count = graphs[i]
            graph.replay()
            times[i].append(_elapsed(graph.replay) * 1e3 / count)
    return [statistics.median(seen) for seen in times]


def _graph(call: Indexed, least_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of as many calls as take `least_ms`, and their count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):  # what is compiled or allocated at first use must not be captured
            call(i)
        once = min(_elapsed(lambda i=i: call(i)) for i in range(3))  # the host's time may be in it
        graph, count = _captured(call, math.ceil(least_ms / once))
        took = min(_elapsed(graph.replay) for _ in range(2))
        if took < least_ms / 2 and count < _LARGEST_GRAPH:
            graph, count = _captured(call, math.ceil(count * least_ms / took))
    torch.cuda.current_stream().wait_stream(stream)
    return graph, count


def _captured(call: Indexed, count: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """Without torch.cuda.graph, which empties the cache of memory, and may collect garbage, each time."""
    count = min(count, _LARGEST_GRAPH)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        for i in range(count):
            call(i)
    finally:
        graph.capture_end()
    return graph, count


def _elapsed(run: Callable[[], object]) -> float:
    """Milliseconds between two events around a call, on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
