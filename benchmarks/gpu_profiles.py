"""Our kernels in PyTorch's profiler: registers, shared memory, blocks, occupancy, and times."""

import json
import statistics
import tempfile
import unittest
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cases as g
from benchmarks.gpu_times import FORMS, ours
from benchmarks.isolated import Cases

SHAPES = ((16, 4096, 4096), (256, 4096, 4096), (4096, 4096, 4096))
TIMES = 20
_FIELDS = {
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    "grid": "grid",
    "block": "block",
    "est. achieved occupancy %": "occupancy_percent",
}


def names() -> list[str]:
    return ["benchmarks.gpu_profiles:profiles"]


def profiles() -> Cases:
    for form in FORMS:
        for shape in SHAPES:
            yield f"{form}, {shape}", lambda form=form, shape=shape: profiled(form, shape)


def profiled(form: str, shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """The kernels of a product that runs TIMES times."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise unittest.SkipTest("PyTorch finds no CUDA device here")
    p = g.Case(FORMS[form], None, shape).product("cuda")
    call = ours(p)
    call(p.lhs, p.rhs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(TIMES):
            call(p.lhs, p.rhs)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found = kernels(json.loads(path.read_text())["traceEvents"])
    assert found, "the profiler saw no kernel"
    return found


def kernels(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The kernels in the events of a trace, by name: number of runs, median time, and resources."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            by_name.setdefault(event["name"], []).append(event)
    found = []
    for name, own in by_name.items():
        took = {short: own[0]["args"][long] for long, short in _FIELDS.items() if long in own[0].get("args", {})}
        us = round(statistics.median(event["dur"] for event in own), 3)
        found.append({"name": name[:120], "times": len(own), "us": us, **took})
    return found
