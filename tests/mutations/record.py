"""Kernels with a mistake: the PTX of one that is right, with one synchronization deleted or changed.

Each stands for a fault that hardware would show now and then, or on another GPU. The emulator must show it always,
under the habits that a mutation names."""

import functools
import re
from dataclasses import dataclass, fields, replace

import torch

from cutlass_kernels import plain
from cutlass_kernels.forms import FORMS
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from tests.mutations.patterns import WRONG
from tests.ptx import Fault, habits
from tests.ptx.host import Host
from tests.support import emulated
from tests.support.kernel_products import product

FORM = FORMS[5]  # int8 by rows and columns, in bfloat16


@dataclass(frozen=True)
class Short(Variant):
    """A product with two stages, so that each is used many times."""

    @property
    def stages(self) -> int:
        return 2


@dataclass(frozen=True)
class Kernel:
    """A kernel and a product for it, of several tiles for each block and several rounds through the stages."""

    tile: Tile
    m: int
    n: int
    k: int = 400
    form: Variant = FORM

    @functools.cached_property
    def host(self) -> Host:
        variant = replace(self.form, tile=self.tile, tma=not self.tile.swap)
        return emulated.compiled(Short(**{f.name: getattr(variant, f.name) for f in fields(variant)})).host

    @functools.cached_property
    def product(self) -> Product:
        if self.form.groups or self.form.scales == "1x128":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return product(self.form, self.m, self.n, self.k)
        generator = torch.Generator().manual_seed(0)

        def codes(rows: int) -> torch.Tensor:
            found = torch.randint(-128, 128, (rows, self.k), generator=generator).to(torch.int8)
            return found if self.form.is_integer else found.to(self.form.lhs)

        scales = [torch.rand(size, generator=generator) + 0.5 for size in (self.m, self.n)]
        return Product(codes(self.m), codes(self.n).mT, self.form.out, scales[0][:, None], scales[1][None])

    @functools.cached_property
    def right(self) -> torch.Tensor:
        """The product; of floats, whose sums are rounded, what the kernel makes of it where everything happens at once.
        That it is right is for tests/cutlass/test_kernels.py."""
        if self.form.is_integer:
            return plain.reference(self.product)
        return emulated.launched(self.host, self.product, self.tile, habits=habits("prompt"))

    def outcome(self, host: Host, *names: str) -> str:
        """The outcome of the product under the named habits: "" if it is right."""
        right = self.right
        try:
            got = emulated.launched(host, self.product, self.tile, habits=habits(*names))
        except Fault as fault:
            return str(fault)
        return "" if torch.equal(got, right) else WRONG


def form_of(**fields: object) -> Variant:
    """The first form that has these."""
    return next(f for f in FORMS if all(getattr(f, name) == value for name, value in fields.items()))


# Two consumers that share a tile; two with a tile each; blocks that load for each other; results stored by threads;
# sums in float32, to which the products of each step are added, those of 128 rows in two halves; two blocks that share
# each sum; groups of rows, and of K; scales of 1 x 128 on both sides.
KERNELS = {
    "cooperative": Kernel(Tile(128, 64), 300, 72),
    "pingpong": Kernel(Tile(64, 64, pingpong=True), 300, 72),
    "cluster": Kernel(Tile(64, 64, cluster=(2, 1)), 260, 72),
    "swapped": Kernel(Tile(64, 16, swap=True), 36, 130, 200),
    "promoted": Kernel(Tile(64, 64), 140, 72, form=FORMS[23]),
    "rows": Kernel(Tile(128, 64), 300, 72, form=form_of(groups="rows", bias=None)),
    "k": Kernel(Tile(128, 64), 140, 72, 600, form_of(groups="k")),
    "lines": Kernel(Tile(64, 16, swap=True), 36, 130, 272, form_of(groups="", scales="1x128")),
    "split": Kernel(Tile(64, 64, split=2), 140, 72),
    "halves": Kernel(Tile(256, 64), 300, 72, form=FORMS[23]),
}


@dataclass(frozen=True)
class Edit:
    """A change to the text of a kernel: of the matches of `pattern`, whole lines, in a part of it, those of `which`."""

    pattern: str
    by: str = ""
    part: str = ""  # "start", "producer", "consumers", or all
    which: tuple[int | None, ...] = (None,)  # as of a slice

    def apply(self, ptx: str) -> str:
        """Raises LookupError where there is nothing to change."""
        first, last = self._bounds(ptx)
        found = list(re.compile(self.pattern, re.MULTILINE).finditer(ptx, first, last))[slice(*self.which)]
        for match in reversed(found):
            ptx = ptx[: match.start()] + match.expand(self.by) + ptx[match.end() :]
        if not found:
            raise LookupError(f"nothing matches {self.pattern!r} in the kernel's {self.part or 'text'}")
        return ptx

    def _bounds(self, ptx: str) -> tuple[int, int]:
        producer, consumers = ptx.index("\tsetmaxnreg.dec"), ptx.index("\tsetmaxnreg.inc")
        bounds = {"start": (0, producer), "producer": (producer, consumers), "consumers": (consumers, len(ptx))}
        return bounds.get(self.part, (0, len(ptx)))


@dataclass(frozen=True)
class Mutation:
    """A change to a kernel, the fault of hardware that it stands for, what the emulator says, and under which habits.

    Without habits it is harmless, and `fault` says why."""

    kernel: str
    fault: str
    edits: tuple[Edit, ...]
    shows: str = ""  # a regular expression for Kernel.outcome
    caught_by: tuple[str, ...] = ()

    @functools.cached_property
    def host(self) -> Host:
        host = KERNELS[self.kernel].host
        return host.with_ptx(functools.reduce(lambda ptx, edit: edit.apply(ptx), self.edits, host.ptx))

    def outcome(self, *names: str) -> str:
        return KERNELS[self.kernel].outcome(self.host, *names)
