"""The kernels that quantize, on the CPU: their host code and their PTX, as the CuTe DSL compiles them, in tests.ptx."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from cutlass_kernels import dequantize, quantize
from cutlass_kernels.quantizing import Numbers
from tests.ptx import Report
from tests.ptx.host import Host
from tests.support import cubin


class Compiled:
    """The host code, the PTX and the machine code of a variant."""

    def __init__(self, variant: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            build = dequantize.build if isinstance(variant, Numbers) else quantize.build
            made = build(variant, f"--keep-ptx --keep-cubin --dump-dir {folder}")
            self.cubin = next(Path(folder).glob("*.cubin")).read_bytes()
            self.made, self.ptx = made, made.artifacts.PTX

    @functools.cached_property
    def host(self) -> Host:
        return Host(self.made, registers=cubin.usage(self.cubin).registers)


compiled = functools.lru_cache(maxsize=64)(Compiled)


@contextmanager
def here(reports: list[Report] | None = None) -> Iterator[None]:
    """Within it, cutlass_kernels runs the kernels that quantize and dequantize here, on tensors of the CPU."""

    def kernel(variant: Any) -> Callable[..., None]:
        host = compiled(variant).host

        def run(*arguments: Any) -> None:
            host(*arguments)
            if reports is not None:
                reports.append(host.reports[-1])

        return run

    with mock.patch.object(quantize, "compiled", kernel), mock.patch.object(dequantize, "compiled", kernel):
        yield
