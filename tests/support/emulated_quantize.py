"""The kernels that quantize, on the CPU: their host code and their PTX, as the CuTe DSL compiles them, in tests.ptx."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cutlass_kernels import quantize
from tests.ptx import Report
from tests.ptx.host import Host
from tests.support import cubin


class Compiled:
    """The host code, the PTX and the machine code of a variant."""

    def __init__(self, variant: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = quantize.build(variant, f"--keep-ptx --keep-cubin --dump-dir {folder}")
            self.cubin = next(Path(folder).glob("*.cubin")).read_bytes()
            self.made, self.ptx = made, made.artifacts.PTX

    @functools.cached_property
    def host(self) -> Host:
        return Host(self.made, registers=cubin.usage(self.cubin).registers)


compiled = functools.lru_cache(maxsize=64)(Compiled)


def poison(*tensors: Any) -> None:
    """Fill results, so that what a kernel does not write shows."""
    for t in tensors:
        if isinstance(t, Tensor):
            t.untyped_storage().copy_(
                torch.full((t.untyped_storage().nbytes(),), 0xA5, dtype=torch.uint8).untyped_storage()
            )


@contextmanager
def here(reports: list[Report] | None = None) -> Iterator[None]:
    """Within it, cutlass_kernels.quantize runs its kernels here, on tensors of the CPU."""

    def kernel(variant: Any) -> Callable[..., None]:
        host = compiled(variant).host

        def run(*arguments: Any) -> None:
            host(*arguments)
            if reports is not None:
                reports.append(host.reports[-1])

        return run

    with mock.patch.object(quantize, "compiled", kernel):
        yield
