"""The Hopper kernels without a GPU: they compile to the instructions that they should, and compute what they should in
the emulator of tests.ptx, with copies, barriers and products in whatever order hardware may take them."""

import itertools
import unittest
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized

import cutlass_kernels
from cutlass_kernels import hopper, schedule
from cutlass_kernels.forms import FORMS, variants
from cutlass_kernels.product import FLOATS, Product
from cutlass_kernels.tiles import TILES
from cutlass_kernels.variants import SHARED_MEMORY, Tile, Variant, longest, short
from tests.support import cubin

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.ptx import HABITS, contractable, habits
from tests.support import emulated, registers
from tests.support.kernel_products import check, fitting, floats, integers, product

GEMMS = tuple(f for f in FORMS if not f.group)  # others are for tests/cutlass/test_nibbles.py
FORM = FORMS[5]  # int8 by rows and columns, in bfloat16


def cases() -> list[tuple[str, Variant]]:
    """Each form with one tile, each tile with one form."""
    mixed = [next(v for t in TILES[i % 7 :] + TILES if (v := fitting(f, t))) for i, f in enumerate(GEMMS)]
    tiles = [v for t in TILES for f in (FORM, FORMS[-3]) if (v := fitting(f, t))]
    return [(v.name, v) for v in dict.fromkeys([*mixed, *tiles])]


class TestCompile(unittest.TestCase):
    @parameterized.expand(cases())
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_instructions_and_registers(self, _, variant):
        check_code(variant)


def check_code(variant: Variant) -> None:
    made = emulated.compiled(variant)
    a, b = (variant.rhs, variant.lhs) if variant.tile.swap else (variant.lhs, variant.rhs)
    types = f"{'s32' if variant.is_integer else 'f32'}.{short(a)}.{short(b)}"
    saturated = ".satfinite" * variant.is_integer
    assert f"wgmma.mma_async.sync.aligned.m64n{variant.tile.n}k32{saturated}.{types}" in made.ptx
    assert "cp.async.bulk.tensor" in made.ptx
    assert (".multicast::cluster" in made.ptx) == (variant.tile.cluster != (1, 1))
    assert contractable(made.ptx) == []
    used = cubin.usage(made.cubin)
    assert used.stack_bytes == 0, f"{used.stack_bytes} bytes of registers are spilled"
    registers.check(variant.tile, used)


class TestVariants(unittest.TestCase):
    def test_names_are_of_one_variant(self):
        found = list(variants())
        assert len({v.name for v in found}) == len(found) > 500
        assert all(set(v.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for v in found)

    def test_shared_memory_suffices(self):
        for v in variants():
            rows, columns = v.part
            results = rows * columns * v.out.itemsize * v.part_stages * v.tile.consumers
            factors = v.stages * v.factor_bytes
            barriers = 2 * 8 * v.stages
            others = v.column_bytes + v.step_bytes + v.table_bytes + v.split_bytes + barriers + 3 * 1024
            assert factors + results + others <= SHARED_MEMORY + 2048, v.name
            assert v.stages >= 2 and v.tile.m % rows == 0 and v.tile.n % (v.tile.split * columns) == 0

    @parameterized.expand(
        [
            (replace(FORM, tile=Tile(128, 256, pingpong=True)), "accumulators"),
            (replace(FORMS[-1], tile=Tile(128, 256)), "accumulators"),
            (replace(FORMS[-1], tile=Tile(128, 64, pingpong=True)), "hidden by nothing"),
            (replace(FORM, tile=Tile(256, 128, cluster=(1, 2))), "less shared memory"),
            (replace(FORM, groups="k", tile=Tile(128, 128, split=2)), "groups have no parts"),
            (replace(FORM, groups="rows", tile=Tile(128, 128, cluster=(2, 1))), "groups do not divide"),
            (replace(FORMS[-1], tile=Tile(64, 64, split=2)), "share sums of integers"),
            (replace(FORMS[17], tile=Tile(128, 256, split=2)), "requantization take more registers"),
        ]
    )
    def test_declines(self, variant, words):
        assert words in (variant.declines() or "")


class TestSchedule(unittest.TestCase):
    def test_every_tile_comes_once(self):
        for counts in itertools.product((1, 2, 7, 8, 9, 17), (1, 3, 8), (1, 2)):
            found = [schedule.at(counts, i) for i in range(schedule.total(counts))]
            assert sorted(found) == sorted(itertools.product(*map(range, counts)))

    def test_neighbours_share_columns(self):
        assert [schedule.at((20, 3, 1), i)[:2] for i in (0, 1, 7, 8, 24, 48)] == [
            (0, 0), (1, 0), (7, 0), (0, 1), (8, 0), (16, 0)
        ]  # fmt: skip


# ---- in the emulator


class TestEmulated(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(str(t), t) for t in TILES])
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_each_tile(self, _, tile):
        """Tails in all dimensions, and several tiles for a block, so that all stages are used again."""
        rows, columns = (tile.n + 5, 5 * tile.m - 30) if tile.swap else (2 * tile.m - 20, 2 * tile.n - 48)
        check(product(FORM, rows, columns, 400), tile, multiprocessors=tile.blocks)

    @parameterized.expand([(f"{i}_{short(f.lhs)}_{short(f.out)}", i, f) for i, f in enumerate(GEMMS)])
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_each_form(self, _, i, form):
        tiles = (Tile(64, 64), Tile(64, 32, swap=True), Tile(64, 128, pingpong=True))
        tile = next(t for t in tiles[i % 3 :] + tiles if fitting(form, t))
        check(product(form, 70, 80, 272), tile)

    @parameterized.expand([(str(t), t, GEMMS[i % 10 :: 10]) for i, t in enumerate(TILES)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_tile_with_some_forms(self, _, tile, forms):
        self._check_all(forms, tile)

    @parameterized.expand([(str(t), t) for t in TILES])
    @pytest.mark.exhaustive
    def test_each_form_with_each_tile(self, _, tile):
        self._check_all(GEMMS, tile)

    def _check_all(self, forms, tile):
        for form in forms:
            if variant := fitting(form, tile):
                with self.subTest(variant.name):
                    check_code(variant)
                    check(product(form, 140, 160, 400), tile, multiprocessors=4, seed=1)

    @pytest.mark.full
    def test_blocks_that_share_a_sum(self):
        """Fewer steps along K than blocks, few columns, and all that follows a sum."""
        for tile, form, k in (
            (Tile(64, 64, split=4), FORM, 16),
            (Tile(64, 16, swap=True, split=2), FORMS[14], 272),
            (Tile(64, 32, split=4), FORMS[0], 1040),
            (Tile(128, 64, split=2), FORMS[17], 400),
        ):
            for names in ((), ("late_loads", "others_stop")):
                check(product(form, 140, 72, k), tile, multiprocessors=tile.split, habits=habits(*names))

    @given(
        st.sampled_from([(t, f) for t in TILES for f in (FORMS[0], FORM, FORMS[11], FORMS[16]) if fitting(f, t)]),
        st.tuples(st.integers(1, 140), st.integers(1, 140), st.integers(1, 300)),
        st.integers(0, 2**30),
    )
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @pytest.mark.full
    def test_any_sizes_in_any_order(self, kernel, sizes, seed):
        tile, form = kernel
        check(product(form, *sizes), tile, multiprocessors=3, seed=seed)

    @parameterized.expand([(Tile(64, 64),), (Tile(64, 16, swap=True),)])
    @pytest.mark.full
    def test_extremes_and_other_strides(self, tile):
        a, b = integers(torch.int8, 40, 640, extreme=True), integers(torch.int8, 72, 640, extreme=True)
        for lhs, rhs in (
            (a, b.mT),
            (torch.full((40, 640), -128, dtype=torch.int8), torch.full((72, 640), -128, dtype=torch.int8).mT),
            (a.mT.contiguous().mT, b.mT.contiguous()),  # M and N innermost
            (a[:, 16:528], b[:, 32:544].mT),  # rows of a wider matrix
            (a[:, 3:515], b[::2, 5:517].mT),  # at odd addresses
            (a[:1].expand(40, 640), b.mT),  # one row, many times
            (a[:, :1], b[:, :1].mT),
        ):
            check(Product(lhs, rhs, torch.int32), tile)
            check(Product(lhs, rhs, torch.bfloat16, torch.rand(1), torch.rand(1, rhs.shape[1])), tile)

    @pytest.mark.full
    def test_not_a_number_and_infinity(self):
        for dtype in FLOATS:
            lhs, rhs = floats(dtype, 70, 256), floats(dtype, 64, 256).mT
            lhs[3, 5], lhs[4, 200] = float("nan"), float("inf") if dtype == torch.float8_e5m2 else float("nan")
            for fast in (False, True):
                got = emulated.run(
                    Product(lhs, rhs, torch.bfloat16, torch.ones(1), torch.ones(1), fast=fast), Tile(64, 64)
                )
                assert got[3].isnan().all() and not got[4].isfinite().any()
                assert got[[*range(3), *range(5, 70)]].isfinite().all()

    @pytest.mark.full
    def test_results_beyond_float8(self):
        lhs, rhs = floats(torch.float8_e4m3fn, 70, 256), floats(torch.float8_e4m3fn, 64, 256).mT
        for out in FLOATS:
            for scale in (3.0, 1e3, 1e6, 1e-4):
                p = Product(lhs, rhs, out, torch.full((1,), scale), torch.ones(1))
                got, wanted = emulated.run(p, Tile(64, 64)), emulated.run(replace(p, out=torch.float32), Tile(64, 64))
                assert torch.equal(got.view(torch.uint8), wanted.to(out).view(torch.uint8))

    @pytest.mark.full
    def test_runs_are_equal_in_any_order(self):
        for form, tile in ((FORMS[-3], Tile(64, 128, pingpong=True)), (FORM, Tile(128, 128, cluster=(2, 1)))):
            p = product(form, 300, 160, 144)  # many tiles of few steps: stages and parts of results are used again
            runs = [emulated.run(p, tile, seed=seed) for seed in range(4)]
            runs += [emulated.run(p, tile, habits=habits(name)) for name in HABITS]
            assert all(torch.equal(r, runs[0]) for r in runs)

    @parameterized.expand(list(HABITS))
    @pytest.mark.full
    def test_each_habit(self, name):
        """The kernels that tests.mutations has none of: sums in float32, scales of blocks, batches, zero points."""
        for form, tile in (
            (FORMS[23], Tile(64, 64)),
            (FORMS[23], Tile(256, 64)),
            (FORMS[-3], Tile(64, 64, pingpong=True)),
            (FORMS[-3], Tile(128, 96)),
            (FORMS[-3], Tile(64, 16, swap=True)),
            (FORMS[4], Tile(128, 64, cluster=(2, 1), pingpong=True)),
            (FORMS[14], Tile(64, 64)),
        ):
            check(product(form, 140, 72, 272), tile, habits=habits(name))

    @pytest.mark.full
    def test_consumers_of_128_rows_have_scales_for_each(self):
        check(product(FORMS[-3], 300, 80, 272), Tile(256, 64))

    @parameterized.expand([(48,), (96,)])  # tiles that begin anywhere in a block, and lie in two
    @pytest.mark.full
    def test_columns_of_a_tile_have_scales_of_several_blocks(self, n):
        check(product(FORMS[-3], 70, 400, 272), Tile(64, n))

    def test_sums_of_floats_are_promoted_unless_one_step_is_all(self):
        assert hopper.variant_of(product(FORMS[19], 64, 64, 512), Tile(64, 64)).promoted
        assert not hopper.variant_of(product(FORMS[19], 64, 64, 128), Tile(64, 64)).promoted  # one step


class TestChoice(unittest.TestCase):
    def test_declines(self):
        long = longest(torch.int8, torch.int8) + 1
        with torch.device("meta"):
            for lhs, rhs, words in (
                (torch.empty(16, long, dtype=torch.int8), torch.empty(long, 16, dtype=torch.int8), "saturate"),
                (torch.empty(16, 64, dtype=torch.int16), torch.empty(64, 16, dtype=torch.int16), "multiplies two of"),
            ):
                assert words in (hopper.declines(Product(lhs, rhs, torch.int32)) or "")
            fits = Product(
                torch.empty(16, long - 1, dtype=torch.int8), torch.empty(long - 1, 16, dtype=torch.int8), torch.int32
            )
            assert hopper.declines(fits) is None

    def test_few_rows_are_not_padded(self):
        with torch.device("meta"):
            for m in (1, 8, 16, 32):
                p = Product(
                    torch.empty(m, 4096, dtype=torch.int8), torch.empty(6144, 4096, dtype=torch.int8).mT, torch.int32
                )
                assert hopper.variant_of(p).tile.swap
            p = Product(
                torch.empty(4096, 4096, dtype=torch.int8), torch.empty(6144, 4096, dtype=torch.int8).mT, torch.int32
            )
            assert not hopper.variant_of(p).tile.swap
