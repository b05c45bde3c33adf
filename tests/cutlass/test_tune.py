"""Tiles that were measured: kept, found again by another process, and never believed blindly."""

import json
import multiprocessing
import os
import unittest
from dataclasses import replace
from unittest import mock

import pytest
import torch
from parameterized import parameterized

from cutlass_kernels import cache, hopper, measured, missing, tiles, tune
from cutlass_kernels.forms import FORMS, MAIN
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from tests.support.contexts import enter
from tests.support.files import InFolder

PLAN = hopper.plan


def product(m=100, n=4096, k=512, out=torch.int32, **fused):
    lhs, rhs = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8).T
    return Product(lhs, rhs, out, **fused)


def timer(favourite):
    """A timer for which the tile at an index of those that fit is the fastest."""
    return lambda calls: [1.0 if i == favourite else 2.0 + i for i in range(len(calls))]


def fitting(p):
    return [v for t in tiles.TILES if not isinstance(v := hopper.variant_of(p, t), str)]


def found(p):
    """As on a GPU; here the products lie on the CPU."""
    return measured._kept(measured.key(fitting(p)[0], p))


def tune_in_process(folder, favourite, m):
    os.environ[cache.FOLDER] = folder
    with mock.patch.object(hopper, "plan", lambda p, tile: lambda *args, **fused: None):
        tune.tune(product(m), timer(favourite))


class TestTune(InFolder):
    def setUp(self):
        super().setUp()
        enter(
            self,
            mock.patch.dict(os.environ, {cache.FOLDER: str(self.folder)}),
            mock.patch.object(hopper, "plan", lambda p, tile: lambda *args, **fused: None),  # nothing is compiled
        )

    def test_the_fastest_is_kept(self):
        p = product()
        assert found(p) is None
        assert tune.tune(p, timer(5)) == fitting(p)[5].tile == found(p)
        assert tune.tune(p, timer(2)) == fitting(p)[2].tile == found(p)  # the later measurement counts
        assert [f.suffixes for f in self.folder.iterdir()] == [[".tile", ".json"]]

    def test_goes_before_the_model(self):
        p = product()
        variants = fitting(p)
        model = hopper.variant_of(p)
        other = next(i for i, v in enumerate(variants) if v != model)
        tune.tune(p, timer(other))
        assert hopper.variant_of(p) == model, "nothing is measured on a CPU"
        with mock.patch.object(measured, "measured", lambda fit, p: next(v for v in fit if v.tile == found(p))):
            assert hopper.variant_of(p) == variants[other]

    def test_is_for_products_alike(self):
        tune.tune(product(100), timer(3))
        assert found(product(65)) == found(product(128)) == found(product(100)) is not None
        scales = {"lhs_scale": torch.ones(100, 1), "rhs_scale": torch.ones(1, 4096)}
        others = (product(64), product(129), product(n=4112), product(k=528), product(out=torch.bfloat16, **scales))
        assert [found(p) for p in others] == [None] * len(others)
        with mock.patch.object(measured, "_device_name", lambda device: "another GPU"):
            assert found(product(100)) is None

    def test_only_tiles_that_fit_are_timed(self):
        lhs, rhs = (torch.zeros(256, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
        p = Product(lhs, rhs.mT, torch.bfloat16, lhs_scale=torch.ones(256, 2), rhs_scale=torch.ones(2, 2))
        seen = []
        tune.tune(p, lambda calls: seen.append(len(calls)) or timer(0)(calls))
        assert seen == [len(fitting(p))] and 0 < seen[0] < len(tiles.TILES)

    def test_no_kernel_takes_it(self):
        for wrong, error, words in (
            (product(out=torch.bfloat16), TypeError, "mm: out_dtype must be"),
            (product(16, 16, 2**17), NotImplementedError, "no Hopper kernel takes this product: .* saturate"),
        ):
            with self.assertRaisesRegex(error, words):
                tune.tune(wrong, timer(0))

    def test_those_who_keep_plans_are_told(self):
        told = []
        with mock.patch.object(measured, "changed", [lambda: told.append(1)]):
            tune.tune(product(), timer(0))
        assert told == [1]

    @parameterized.expand(
        [
            ("cut_short", lambda text: text[: len(text) // 2]),
            ("empty", lambda text: ""),
            ("no_object", lambda text: "[1, 2]"),
            ("no_text", lambda text: "\x00\xff"),
            ("another_key", lambda text: json.dumps(json.loads(text) | {"key": "another"})),
            ("no_tile_of_ours", lambda text: json.dumps(json.loads(text) | {"tile": "1024x8x128"})),
            ("tile_of_another_type", lambda text: json.dumps(json.loads(text) | {"tile": [64, 8]})),
        ]
    )
    def test_what_names_no_tile_is_not_used(self, _name, change):
        p = product()
        tune.tune(p, timer(3))
        (file,) = self.folder.iterdir()
        file.write_text(change(file.read_text()))
        with pytest.warns(UserWarning, match="names no tile"):
            assert found(p) is None
        tune.tune(p, timer(1))
        assert found(p) == fitting(p)[1].tile

    def test_nothing_is_kept_without_a_folder(self):
        with mock.patch.dict(os.environ, {cache.FOLDER: ""}):
            assert tune.tune(product(), timer(1)) == fitting(product())[1].tile
            assert found(product()) is None

    @pytest.mark.full
    def test_processes_do_not_disturb_each_other(self):
        context = multiprocessing.get_context("spawn")
        sizes = [100, 100, 2000, 4000]
        processes = [context.Process(target=tune_in_process, args=(str(self.folder), 4, m)) for m in sizes]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert [found(product(m)) == fitting(product(m))[4].tile for m in sizes] == [True] * 4
        assert len(list(self.folder.iterdir())) == 3

    @unittest.skipIf(missing() is not None, str(missing()))
    @unittest.skipUnless(torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0), "no Hopper GPU")
    def test_on_a_gpu(self):
        lhs, rhs = (torch.ones(size, 256, dtype=torch.int8, device="cuda") for size in (64, 128))
        p = Product(lhs, rhs.mT, torch.int32)
        with mock.patch.object(hopper, "plan", PLAN):
            tile = tune.tune(p)
        variant = hopper.variant_of(p)
        assert not isinstance(variant, str) and variant.tile == tile


GROUPED = tuple(next(f for f in FORMS if f.groups == groups and f.promoted) for groups in ("columns", "k"))
# The tile of each form, and of N, K and M rows on an H200, that the model finds faster than every other one.
FASTEST = (
    (Tile(64, 8, swap=True), MAIN[4], 3328, 16384, 1),
    (Tile(64, 16, swap=True), MAIN[4], 8704, 1152, 16),
    (Tile(64, 32, swap=True), MAIN[3], 4480, 15872, 32),
    (Tile(64, 64, swap=True), MAIN[4], 2176, 15488, 128),
    (Tile(64, 16, swap=True, split=2), MAIN[1], 640, 4352, 16),
    (Tile(64, 128, split=4), MAIN[1], 2688, 16000, 64),
    (Tile(64, 128, pingpong=True), MAIN[2], 25984, 256, 192),
    (Tile(64, 256, pingpong=True), MAIN[1], 10880, 1152, 192),
    (Tile(128, 64), GROUPED[1], 672, 4864, 384),
    (Tile(128, 128), GROUPED[0], 25376, 1152, 96),
    (Tile(128, 128, split=2), MAIN[1], 3968, 3840, 256),
    (Tile(128, 128, split=4), MAIN[1], 1408, 15104, 384),
    (Tile(128, 128, cluster=(2, 1)), MAIN[2], 4224, 15232, 1024),
    (Tile(128, 128, cluster=(1, 2)), MAIN[3], 5632, 16128, 384),
    (Tile(128, 128, pingpong=True), MAIN[3], 13056, 640, 384),
    (Tile(128, 128, cluster=(2, 1), pingpong=True), MAIN[0], 4224, 2048, 1024),
    (Tile(128, 160), MAIN[2], 13568, 640, 384),
    (Tile(128, 192), MAIN[4], 7296, 15744, 384),
    (Tile(128, 192, cluster=(2, 1)), MAIN[2], 18944, 16128, 512),
    (Tile(128, 192, cluster=(2, 1), pingpong=True), MAIN[3], 18816, 1408, 512),
    (Tile(128, 256), MAIN[3], 8576, 16384, 384),
    (Tile(128, 256, split=2), MAIN[0], 4736, 16128, 384),
    (Tile(128, 256, cluster=(2, 1)), MAIN[3], 16768, 16256, 1024),
    (Tile(256, 128, cluster=(1, 2)), MAIN[4], 8448, 16128, 512),
)


class TestModel(unittest.TestCase):
    FORM = Variant(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, Tile(128, 192), scales="vector")

    def test_steps_by_hand(self):
        """Bytes of shared memory: of two consumers' products in 4 instructions, and what the copy engine writes."""
        read = 2 * 4 * (64 + 192) * 32
        step = tiles.step_of(replace(self.FORM, promoted=True))
        self.assertEqual(step[:3], (768, (read + (128 + 192) * 128) / 128, (128 + 192) * 128 / 48))
        self.assertEqual((step.slots, step.chain, step.limit), (2 * (96 + 40), 384 + 100 + 96, "load"))
        self.assertEqual(tiles.step_of(replace(self.FORM, tile=Tile(128, 256, cluster=(2, 1)))).limit, "multiply")

    def test_larger_tiles_are_faster_where_there_are_many_rows(self):
        for form in (replace(self.FORM, promoted=True), replace(self.FORM, scales="block")):
            small, large = (replace(form, tile=Tile(128, n, cluster=(2, 1))) for n in (128, 192))
            times = [tiles.cycles(v, 8192, 8192, 8192, 132) for v in (small, large)]
            self.assertGreater(times[0], 1.1 * times[1])

    def test_each_tile_is_the_fastest_somewhere(self):
        self.assertEqual([tile for tile, *_ in FASTEST], list(tiles.TILES))
        for tile, form, n, k, m in FASTEST:
            with self.subTest(str(tile)):
                made = [replace(form, tile=t, tma=not t.swap) for t in tiles.TILES]
                batch = 4 if form.groups == "k" else 1
                times = {v.tile: tiles.cycles(v, m, n, k, 132, batch) for v in made if v.declines() is None}
                others = [time for own, time in times.items() if own != tile]
                self.assertLess(times[tile], min(others))

    def test_no_product_is_faster_than_its_parts(self):
        for tile in tiles.TILES:
            v = replace(self.FORM, tile=tile, tma=not tile.swap)
            for m, n, k in ((1, 4096, 4096), (300, 200, 4096), (8192, 8192, 8192)):
                self.assertGreater(tiles.cycles(v, m, n, k, 132), m * n * k / tiles.HOPPER.products / 132)
                self.assertGreater(tiles.cycles(v, m, n, k, 132), (m * k + n * k) / tiles.HOPPER.memory)
