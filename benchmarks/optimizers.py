"""A step of optimizers with quantized states, against PyTorch's AdamW, torchao's and bitsandbytes'.

10 million parameters in 13 tensors. All optimizers have the same parameters and gradients, and have initialized their
states and compiled before timing. First steps are those of new processes that have only imported their library; if
something is compiled, with an empty cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import hop
from benchmarks.timing import Row, interleaved

SHAPES = (*[(1024, 1024)] * 8, *[(1024,)] * 2, (2048, 640), *[(512, 512)] * 2)
COUNT = sum(torch.Size(s).numel() for s in SHAPES)
_OURS = {"8 bits": hop.optim.AdamW8bit, "4 bits": hop.optim.AdamW4bit, "fp8": hop.optim.AdamWFp8}
_NAMES = {"8 bits": "AdamW8bit", "4 bits": "AdamW4bit", "fp8": "AdamWFp8"}
_AGAINST_TORCHAO = {"8 bits": "<= 0.1", "4 bits": "<= 0.1", "fp8": "<= 0.25"}
BYTES = {"8 bits": 2.04, "4 bits": 1.07, "fp8": 2.04}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(s, generator=g) * 0.02).to(dtype)) for s in SHAPES]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * 0.01).to(dtype)
    return params


def _peers() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """The peers' optimizers with the same state format, by case."""
    found: dict[str, tuple[str, Callable[[Any], Any]]] = {}
    if find_spec("torchao") is not None:
        import torchao.optim  # type: ignore[import-not-found]

        for case, name in _NAMES.items():
            found[f"torchao, {case}"] = (case, getattr(torchao.optim, name))
    else:
        print("no torchao: pip install --editable '.[dev]'")
    if find_spec("bitsandbytes") is not None:
        import bitsandbytes  # type: ignore[import-not-found]

        found["bitsandbytes, 8 bits"] = ("8 bits", lambda params: bitsandbytes.optim.AdamW8bit(params))
    else:
        print("no bitsandbytes: pip install --editable '.[bench]'")
    return found


def optimizers() -> Iterator[Row]:
    """Steps of AdamW, in bfloat16 and float32."""
    peers = _peers()
    for dtype in (torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        made = {case: make(parameters(dtype)) for case, make in _OURS.items()}
        made["foreach"] = torch.optim.AdamW(parameters(dtype), foreach=True)
        made["fused"] = torch.optim.AdamW(parameters(dtype), fused=True)
        made |= {name: make(parameters(dtype)) for name, (_, make) in peers.items()}
        for optimizer in made.values():
            optimizer.step()
            optimizer.step()
        times = interleaved([o.step for o in made.values()], rounds=21, budget_s=120.0)
        ms = dict(zip(made, times, strict=True))
        for case in _OURS:
            bytes_per = _state_bytes(made[case]) / COUNT
            assert bytes_per <= BYTES[case], f"{case}: {bytes_per:.4f} bytes of state for each parameter"
            name = f"AdamW, {case} ({bytes_per:.3f} bytes of states), {short}"
            yield Row("optimizers", name, ms[case], "torch, foreach", ms["foreach"], _foreach(case))
            yield Row("optimizers", name, ms[case], "torch, fused", ms["fused"])
            for peer, (of, _) in peers.items():
                if of == case:
                    target = _AGAINST_TORCHAO[case] if peer.startswith("torchao") else ""
                    yield Row("optimizers", name, ms[case], peer, ms[peer], target)
    yield from _first_steps()


def _foreach(case: str) -> str:
    return "<= 1" if case == "8 bits" else ""


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in states)


def _first_steps() -> Iterator[Row]:
    """First steps in new processes, against their second steps."""
    for case in _OURS:
        for compiled, target in ((False, "<= 0.5 s"), (True, "<= 10 s")):
            first, second = _in_new_process(case, compiled)
            name = f"first step, {case}, bfloat16" + ", compiled" * compiled
            yield Row("optimizers", name, first, "its second step", second, target)


def _in_new_process(case: str, compiled: bool) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.optimizers", case, *["compiled"] * compiled]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    first, second = json.loads(ended.stdout.splitlines()[-1])
    return first, second


def main(case: str, *compiled: str) -> None:
    """Print the milliseconds of the first two steps in this process."""
    optimizer = _OURS[case](parameters(torch.bfloat16))
    step = torch.compile(lambda: optimizer.step(), fullgraph=True) if compiled else optimizer.step
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps(times))


GROUPS = [optimizers]

if __name__ == "__main__":
    main(*sys.argv[1:])
