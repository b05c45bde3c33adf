"""The Hopper kernels on the CPU: their host code and their PTX, as the CuTe DSL compiles them, in tests.ptx."""

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cutlass_kernels import checks, hopper
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from tests.ptx import Habits, Report
from tests.ptx.host import Host
from tests.support import cubin


class Compiled:
    """The host code, the PTX and the machine code of a variant."""

    def __init__(self, variant: Variant) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = hopper.build(variant, f"--keep-ptx --keep-cubin --dump-dir {folder}")
            self.cubin = next(Path(folder).glob("*.cubin")).read_bytes()
            self.made, self.ptx = made, made.artifacts.PTX

    @functools.cached_property
    def host(self) -> Host:
        return Host(self.made, registers=cubin.usage(self.cubin).registers)


compiled = functools.lru_cache(maxsize=32)(Compiled)


def run(p: Product, tile: Tile, **options: Any) -> Tensor:
    """The product by the kernel with a tile, on a GPU of few multiprocessors, so that blocks have several tiles."""
    return run_and_report(p, tile, **options)[0]


def run_and_report(p: Product, tile: Tile, **options: Any) -> tuple[Tensor, Report]:
    checks.check(p)
    variant = hopper.variant_of(p, tile)
    assert isinstance(variant, Variant), variant
    host = compiled(variant).host
    return launched(host, p, tile, **options), host.reports[-1]


def launched(
    host: Host, p: Product, tile: Tile, *, multiprocessors: int = 2, seed: int = 0, habits: Habits | None = None
) -> Tensor:
    """The product by a kernel that has been compiled for it."""
    host.seed, host.habits = seed, habits

    def kernel(lhs: Tensor, rhs: Tensor, out: Tensor, *others: Any) -> None:
        out.untyped_storage().copy_(torch.full((out.nbytes,), 0xA5, dtype=torch.uint8).untyped_storage())  # poison
        host(lhs, rhs, out, *others[:-1], multiprocessors)

    fused = {name: value for name, value in vars(p).items() if name not in ("lhs", "rhs", "out")}
    with mock.patch.object(hopper, "compiled", lambda _: kernel):
        return hopper.plan(p, tile)(p.lhs, p.rhs, p.out, **fused)
