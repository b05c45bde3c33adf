"""Batches whose products have vectors of their own, and groups whose sizes lie on the device: what they mean, and the
Hopper kernels of groups in the emulator of tests.ptx."""

import unittest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import Tensor

import cutlass_kernels
from cutlass_kernels import checks, hopper, operators, plain, public, registry
from cutlass_kernels.product import Product
from cutlass_kernels.tiles import TILES
from cutlass_kernels.variants import MOST_GROUPS, Tile, Variant
from tests.support import emulated
from tests.support.kernel_products import check, fitting, integers, operand

S8, E4M3, BF16, F32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32
needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
KINDS = ("rows", "columns", "k")


def grouped(kind: str, offs: list[int], dtype: torch.dtype, m: int, n: int, k: int, **fused: Any) -> Product:
    """Groups with scales of rows and columns, each group's own where a factor or the result has groups."""
    count = len(offs)
    of_lhs, of_rhs = ((count,) if kind == name else () for name in ("columns", "rows"))
    rows, columns = (((count,) if kind == "k" else lead) for lead in (of_lhs, of_rhs))
    small = 1e-2 / max(k, 1) if dtype == S8 else 1.0
    scales = {"lhs_scale": (torch.rand(*rows, m) + 0.5) * small, "rhs_scale": torch.rand(*columns, n) + 0.5}
    lhs, rhs = operand(dtype, *of_lhs, m, k), operand(dtype, *of_rhs, n, k).mT
    out = F32 if kind == "k" else BF16
    return Product(lhs, rhs, out, offs=torch.tensor(offs, dtype=torch.int32), **scales | fused)


def by_element(p: Product) -> Tensor:
    """The result of integers with scales, by a loop over the rows, columns or steps that each group has."""
    assert p.offs is not None and p.lhs_scale is not None and p.rhs_scale is not None
    lhs, rhs = (x.numpy().astype(np.int64) for x in (p.lhs, p.rhs))
    out, owner, highest = torch.zeros(p.shape), np.full(p.extent, -1), 0
    for i, end in enumerate(p.offs.tolist()):
        for j in range(highest, min(end, p.extent)):
            owner[j] = i
        highest = max(highest, min(end, p.extent))
    for j, i in enumerate(owner):
        if p.groups == "rows" and i >= 0:
            total = torch.from_numpy(lhs[j] @ rhs[i]).to(F32)
            out[j] = total * p.lhs_scale[j] * p.rhs_scale[i]
        elif p.groups == "columns" and i >= 0:
            total = torch.from_numpy(lhs[i] @ rhs[:, j]).to(F32)
            out[:, j] = total * p.lhs_scale[i] * p.rhs_scale[j]
    for i in range(p.count if p.groups == "k" else 0):
        own = owner == i
        total = torch.from_numpy(lhs[:, own] @ rhs[own]).to(F32)
        out[i] = total * p.lhs_scale[i][:, None] * p.rhs_scale[i]
    return out.to(p.out)


class TestMeaning(unittest.TestCase):
    @given(st.sampled_from(KINDS), st.lists(st.integers(-5, 30), min_size=1, max_size=6), st.integers(0, 2**20))
    @settings(max_examples=60, deadline=None)
    def test_groups_of_any_offsets(self, kind, offs, seed):
        torch.manual_seed(seed)
        p = grouped(
            kind, offs, S8, *((20, 7, 9) if kind == "rows" else (7, 20, 9) if kind == "columns" else (5, 7, 20))
        )
        checks.check(p)
        wanted = by_element(p)
        assert torch.equal(plain.reference(p), wanted) and torch.equal(public.run(p, (0, 0)), wanted)

    @parameterized.expand([("each", (3, 5), (3, 1, 6)), ("one", (3, 1), (1, 6)), ("all", (5,), (1,))])
    def test_vectors_of_a_batch(self, _, rows, columns):
        lhs, rhs = integers(S8, 3, 5, 9), integers(S8, 3, 9, 6)
        vectors = {"lhs_scale": torch.rand(rows), "rhs_scale": torch.rand(columns), "bias": torch.rand(3, 6)}
        zero = torch.randint(-9, 9, rows, dtype=torch.int32)
        p = Product(lhs, rhs, F32, lhs_zero=zero, **vectors)
        checks.check(p)
        of_rows = [x if x.dim() == 1 else x.reshape(x.shape[0], -1).expand(3, -1) for x in (p.lhs_scale, zero)]
        scale, zeros = (x.unsqueeze(-1) for x in of_rows)
        of_columns = p.rhs_scale.reshape(-1, p.rhs_scale.shape[-1]).unsqueeze(1)
        total = ((lhs.long() - zeros) @ rhs.long()).to(F32)
        wanted = total * scale * of_columns + vectors["bias"].unsqueeze(1)
        assert torch.equal(plain.reference(p), wanted) and torch.equal(public.run(p, (0, 0)), wanted)

    def test_blocks_of_a_part_of_k_are_those_of_all(self):
        scales = {"lhs_scale": torch.rand(4, 3) + 0.5, "rhs_scale": torch.rand(3, 6) + 0.5}
        p = replace(grouped("k", [100, 100, 300], E4M3, 4, 6, 300), **scales)
        assert p.scaling == "1x128"
        checks.check(p)
        of_lhs, of_rhs = (
            x.repeat_interleave(128, d).narrow(d, 0, 300)
            for x, d in ((scales["lhs_scale"], 1), (scales["rhs_scale"], 0))
        )
        lhs, rhs = p.lhs.double() * of_lhs, p.rhs.double() * of_rhs
        wanted = torch.stack([lhs[:, a:b] @ rhs[a:b] for a, b in ((0, 100), (100, 100), (100, 300))])
        torch.testing.assert_close(plain.reference(p).double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(public.run(p, (0, 0)).double(), wanted, rtol=1e-5, atol=1e-5)

    @parameterized.expand(
        [
            ({"offs": torch.zeros(2)}, TypeError, "offs must be int32"),
            ({"offs": torch.zeros(3, dtype=torch.int32)}, ValueError, "the end of each of 2 groups, got 3"),
            ({"lhs": torch.zeros(2, 20, 9, dtype=S8)}, ValueError, "with offs, lhs and rhs must be"),
            ({"lhs": torch.zeros(20, 8, dtype=S8)}, ValueError, r"\(B,\] K, N\)|K, N"),
            ({"rhs_scale": torch.ones(3, 7)}, ValueError, "each of 2 products"),
            ({"rhs_scale": torch.ones(14)}, ValueError, "each of 2 products"),
            ({"bias": torch.ones(2, 6)}, ValueError, "one for each of 7, of each of 2 products"),
        ]
    )
    def test_wrong_ones(self, change, error, words):
        p = replace(grouped("rows", [5, 9], S8, 20, 7, 9), **change)
        with self.assertRaisesRegex(error, words):
            checks.check(p)

    def test_zero_points_have_no_parts_of_k(self):
        p = grouped("k", [5, 9], S8, 4, 7, 9, rhs_zero=torch.ones(7, dtype=S8))
        with self.assertRaisesRegex(ValueError, "whose K is not in groups"):
            checks.check(p)

    def test_routes(self):
        for p in (grouped("rows", [5, 9], S8, 20, 7, 9), grouped("k", [5, 9], E4M3, 4, 7, 256)):
            assert hopper.declines(p) is None and registry.declines(p, (10, 0)) is not None
            assert operators.routes(p, (8, 0))[-1] == ("public", None)
        most = grouped("rows", [5] * (MOST_GROUPS + 1), S8, 8, 7, 9)
        assert f"1 to {MOST_GROUPS} groups" in (hopper.declines(most) or "")


# ---- in the emulator

# Groups of one tile, of several, none; more than a warp has lanes; in any order, and beyond both ends.
OFFS = {
    "rows": ([70, 70, 150, 190], [-7, 230, 3, 90], [0, 0, 0, 0]),
    "columns": ([70, 70, 150, 190], [200, 0, 0, 0], [-1, -1, 5, 6]),
    "k": ([100, 100, 256, 390], [-7, 500, 3, 90], [3, 5, 128, 129]),
}
SIZES = {"rows": (200, 72, 272), "columns": (72, 200, 272), "k": (140, 72, 400)}


def takes(kind: str, tile: Tile) -> bool:
    return fitting(Variant(S8, S8, BF16, TILES[0], scales="vector", groups=kind), tile) is not None


SOME = (Tile(64, 64), Tile(128, 64), Tile(64, 16, swap=True), Tile(64, 64, pingpong=True))


@needs_dsl
class TestEmulated(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(f"{kind}_{t}", kind, t) for kind in KINDS for t in TILES if takes(kind, t)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_tile(self, _, kind, tile):
        for offs in OFFS[kind]:
            check(grouped(kind, offs, S8, *SIZES[kind]), tile, multiprocessors=2)

    @parameterized.expand([(f"{kind}_{t}", kind, t) for kind in KINDS for t in SOME])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_floats(self, _, kind, tile):
        for offs in OFFS[kind]:
            check(grouped(kind, offs, E4M3, *SIZES[kind]), tile, seed=1)

    @pytest.mark.full
    def test_more_groups_than_lanes(self):
        offs = sorted(torch.randint(0, 200, (70,)).tolist())
        check(grouped("rows", offs, S8, 200, 64, 128), Tile(64, 16, swap=True))

    @pytest.mark.full
    def test_as_many_groups_as_a_block_keeps(self):
        check(grouped("rows", [i // 4 for i in range(MOST_GROUPS)], S8, 130, 16, 16), Tile(64, 8, swap=True))

    @pytest.mark.full
    def test_what_neighbours_have_is_not_multiplied(self):
        """NaN and infinity times zero are NaN."""
        for tile in SOME:
            p = grouped("k", [100, 200, 300], E4M3, 70, 80, 400)
            for x in (p.lhs, p.rhs.mT):
                x[:, 100:200] = float("nan")
            got = emulated.run(p, tile)
            assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
            check(replace(p, lhs=_without_nan(p.lhs), rhs=_without_nan(p.rhs)), tile)

    @pytest.mark.full
    def test_scales_of_what_is_in_no_group_do_not_matter(self):
        p = grouped("rows", [50, 90], E4M3, 100, 64, 272)
        assert p.lhs_scale is not None
        p.lhs_scale[90:] = float("nan")
        for tile in SOME:
            got = emulated.run(p, tile)
            assert torch.equal(got[90:], torch.zeros_like(got[90:])) and got.isfinite().all()


def _without_nan(x: Tensor) -> Tensor:
    return x.float().nan_to_num(1.0).to(x.dtype)
