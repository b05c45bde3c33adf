"""Cases for checking the Hopper kernels on a GPU or, in the emulator of tests.support.emulated, on the CPU.

Sums of integers, and of floats that are small integers, must be exact; other floats must be within a bound.
"""

import unittest
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from cutlass_kernels import cases as own
from cutlass_kernels import forms, tiles
from cutlass_kernels.cache import NotBuilt
from cutlass_kernels.cases import BF16, E4M3, E5M2, F16, F32, S8, S32, STRIDES, U8, Form, form_of, guarded
from cutlass_kernels.oracle import compare
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile

BASIC = (
    Form("s8"),
    Form("s8 -> bf16", out=BF16, scales="vector"),
    Form("e4m3 -> bf16", E4M3, E4M3, BF16, "vector"),
    Form("e4m3 -> bf16, fast", E4M3, E4M3, BF16, "vector", fast=True),
    Form("e4m3 in blocks", E4M3, E4M3, BF16, "block"),
)
OTHER = (
    Form("u8", U8, U8),
    Form("s8 by u8", S8, U8),
    Form("u8 by s8", U8, S8),
    Form("s8 in batches", batch=3),
    Form("s8, zero points", zeros="lhs rhs"),
    Form("u8 by s8, zero points -> f32", U8, S8, F32, "vector", "lhs rhs", F32),
    Form("u8 by s8, lhs_zero -> bf16", U8, S8, BF16, "vector", "lhs"),
    Form("s8 by u8, rhs_zero -> f16", S8, U8, F16, "vector", "rhs", F16),
    Form("s8, bias", bias=S32),
    Form("s8, bias of int32 -> bf16", out=BF16, scales="one", bias=S32),
    Form("s8, bias of bf16 -> bf16", out=BF16, scales="vector", bias=BF16),
    Form("s8, division -> s8", out=S8, scales="vector", bias=F32, requantize="division"),
    Form("s8, division, bounded -> u8", out=U8, scales="vector", requantize="division", bounded=True),
    Form("u8, multiplier -> u8", U8, S8, U8, "vector", "lhs", S32, "multiplier"),
    Form("s8, multiplier, bounded -> s8", out=S8, scales="one", requantize="multiplier", bounded=True),
    Form("e4m3", E4M3, E4M3, F32),
    Form("e5m2 by e4m3 -> f16", E5M2, E4M3, F16, "vector"),
    Form("e4m3 by e5m2 -> f32", E4M3, E5M2, F32, "vector", bias=F32),
    Form("e5m2, fast -> bf16", E5M2, E5M2, BF16, "one", fast=True),
    Form("e4m3, bias -> bf16", E4M3, E4M3, BF16, "vector", bias=BF16),
    Form("e4m3 -> e4m3", E4M3, E4M3, E4M3, "vector"),
    Form("e4m3 -> e5m2", E4M3, E4M3, E5M2, "vector"),
    Form("e4m3 in batches", E4M3, E4M3, BF16, batch=2),
    Form("e4m3 in blocks, bias -> f32", E4M3, E4M3, F32, "block", bias=F32),
    Form("e5m2 by e4m3 in blocks -> f16", E5M2, E4M3, F16, "block"),
)


def _alike(form: Form) -> Form:
    """The representative of forms that use the same kernel."""
    return replace(form, name="", batch=min(form.batch, 1), scales=form.scales.replace("one", "vector"))


_NAMED = {_alike(form) for form in (*BASIC, *OTHER)}
FORMS = (
    *BASIC,
    *OTHER,
    *(form for form in map(form_of, (f for f in forms.FORMS if not f.group)) if _alike(form) not in _NAMED),
)


@dataclass(frozen=True)
class Case(own.Case):
    """A product to check."""

    def check(self, device: str = "cuda") -> float:
        """Compute and compare the product; returns its error relative to the allowed one."""
        p = self.product(device)
        return compare(self._computed(p), p, exact=self.values == "whole" or self.form.is_integer)

    def check_bits(self, device: str = "cuda") -> None:
        """Compute the product, and fail unless its bits equal those of PyTorch's operators on the CPU."""
        from cutlass_kernels import plain

        p = self.product(device)
        found = self._computed(p).cpu()
        on_cpu = {name: x.cpu() for name, x in vars(p).items() if isinstance(x, Tensor)}
        wanted = plain.reference(replace(p, **on_cpu)).contiguous()
        wrong = int((found.view(U8) != wanted.view(U8)).sum())
        assert wrong == 0, f"{wrong} of {found.nbytes} bytes differ from the CPU's"

    def _computed(self, p: Product) -> Tensor:
        try:
            return guarded(p, self.tile) if p.lhs.is_cuda else _emulated(p, self.tile)
        except NotBuilt as error:
            raise unittest.SkipTest(str(error)) from error


FIRST = Case(BASIC[1], Tile(128, 64), (200, 256, 256))  # the first check to run: int8 by int8, scaled to bfloat16


def _emulated(p: Product, tile: Tile | None) -> Tensor:
    from tests.support import emulated

    assert tile is not None
    return emulated.run(p, tile)


# ---- the cases


def cases(form: Form) -> Iterator[Case]:
    """Every tile that supports a form, with sizes that end within tiles; for basic forms also with odd N, and with rare
    tiles.
    """
    for i, tile in enumerate(tiles.TILES):
        draw = zlib.crc32(f"{form.name} {tile}".encode())
        m = 1 + int(2 ** (draw % 997 / 997 * 11))  # 1 to 2,048, small ones as often as large ones
        n, k = 16 * (1 + draw // 997 % 60), 16 * (9 + draw // 59821 % 112)
        whole = "random" if form.is_integer else "whole"
        case = Case(form, tile, (m, n, k), whole)
        if isinstance(case.variant(), str) or (tile in tiles.RARE and form not in BASIC):
            continue
        yield case
        strides = STRIDES[i % len(STRIDES)]
        longer = 0 if strides in ("sliced", "every other row") else 1 + draw % 15  # others must be copied
        yield Case(form, tile, (m % 200 + 257, n, k + longer), "random", strides)
        if form in BASIC:
            yield Case(form, tile, (2 * (m // 2) + 1, n + 1, k % 500), whole)
        if form in BASIC or E5M2 in (form.lhs, form.rhs):
            yield Case(form, tile, (m % 300 + 1, n, k), "extreme" if form.is_integer else "special")
