"""Steps of optimizers by the kernels for GPUs, on the CPU: their host code and their PTX, in tests.ptx."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from cutlass_kernels import steps
from cutlass_kernels.updates import Update
from hop.kernels.gpu import step as gpu
from tests.ptx import Habits, Report
from tests.ptx.host import Host
from tests.support import cubin


class Compiled:
    """The host code, the PTX and the machine code of an update."""

    def __init__(self, update: Update) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = steps.build(update, f"--keep-ptx --keep-cubin --dump-dir {folder}")
            self.cubin = next(Path(folder).glob("*.cubin")).read_bytes()
        self.made, self.ptx = made, made.artifacts.PTX

    @functools.cached_property
    def host(self) -> Host:
        return Host(self.made, registers=cubin.usage(self.cubin).registers)


compiled = functools.lru_cache(maxsize=64)(Compiled)


@contextlib.contextmanager
def on_gpu(
    target: str = "sm_90a", multiprocessors: int = 2, seed: int = 0, habits: Habits | None = None
) -> Iterator[list[Report]]:
    """Steps of tensors on the CPU, as if they lay on a GPU of few multiprocessors; gives a report for each launch."""
    own, reports = steps.run, []

    def run(step: steps.Step, parameters: Sequence[steps.Parameter], numbers: Sequence[float], key: int) -> None:
        host = compiled(step.update).host
        host.seed, host.habits = seed, habits
        host.beside = [x for q in parameters for x in (q.p.detach(), q.grad, *q.states)]
        own(step, parameters, numbers, key)
        reports.append(host.reports.pop())

    with (
        mock.patch.object(gpu, "is_here", lambda p: True),
        mock.patch.object(gpu, "target_of", lambda device: target),
        mock.patch.object(steps, "run", run),
        mock.patch.object(steps, "compiled", lambda update: compiled(update).host),
        mock.patch.object(steps, "multiprocessors", lambda device: multiprocessors),
        torch.no_grad(),
    ):
        yield reports
