"""The pages that a program writes are those of today's code, and what they promise of new formats holds."""

import io
import unittest
from collections.abc import Callable

import numpy as np
import pytest
import torch
from parameterized import parameterized
from PIL import Image

import hop
from docs import algorithms_tables, diagrams, gallery_tables, make, optimizers_tables, training_tables
from hop import formats, scale_rules
from hop.numerics.quantizer import Quantizer

E3M2 = formats.Float("e3m2", 6, torch.uint8, exponent_bits=3, mantissa_bits=2, bias=3, largest=0x1F)
INT3 = formats.Integer("int3", 3, torch.int8, -4, 3)
THIRDS = formats.Codebook("thirds", 2, torch.uint8, (-1.0, -1 / 3, 1 / 3, 1.0))


class TestTables(unittest.TestCase):
    @parameterized.expand([(name,) for name in make.TABLES if name != "gallery.md"])
    @pytest.mark.quick(3)
    def test_page_is_up_to_date(self, name):
        assert (make.DOCS / name).read_text() == make.page(name), "run make tables"

    @parameterized.expand(diagrams.DIAGRAMS.items())
    def test_diagram_is_up_to_date(self, name, draw):
        assert (make.DOCS / name).read_text() == draw(), "run make tables"

    def test_every_rule_says_what_it_does(self):
        from hop.tensor.table import rules

        assert all(rule.__doc__ for rule in rules().values())


class TestGallery(unittest.TestCase):
    def test_one_picture_for_each_format(self):
        names = {f.name for f in formats.FORMATS if not isinstance(f, formats.PowerOfTwo)}
        found = {path.stem for path in (make.DOCS / "gallery").glob("*.png")}
        assert names < found == set(gallery_tables.subjects()), "run make tables"

    def test_pictures_are_small_and_shown(self):
        page = (make.DOCS / "gallery.md").read_text()
        for path in (make.DOCS / "gallery").glob("*.png"):
            assert path.stat().st_size < 40_000 and f"(gallery/{path.name})" in page
            with Image.open(path) as picture:
                assert 800 <= picture.width <= 1200

    def test_errors_in_the_table(self):
        """One row, measured again."""
        page = (make.DOCS / "gallery.md").read_text()
        ratios = [f"{ratio:.1f}" for _, _, _, _, ratio in gallery_tables.errors(gallery_tables.subjects()["nvfp4"])]
        assert f"| [nvfp4](#nvfp4) | blocks of 1×16 | {ratios[0]} | {ratios[1]} |" in page, "run make tables"

    @pytest.mark.full
    def test_drawn_alike(self):
        """From the same numbers, the same picture; of a format that the library does not have, too."""
        subject = gallery_tables.of_format(E3M2)
        picture = gallery_tables.draw(subject)
        assert picture == gallery_tables.draw(subject) and picture.startswith(b"\x89PNG") and len(picture) < 40_000


def assert_shown(draw: Callable[[], bytes], name: str, page: str) -> None:
    """The picture is the same each time, small, and on the page."""
    picture, path = draw(), make.DOCS / name
    assert picture == draw() and max(len(picture), path.stat().st_size) < 60_000
    assert f"({name})" in (make.DOCS / page).read_text()
    with Image.open(path) as shown, Image.open(io.BytesIO(picture)) as drawn:
        assert shown.size == drawn.size


class TestTraining(unittest.TestCase):
    def test_smoothed(self):
        losses = [float(i) for i in range(training_tables.WINDOW + 2)]
        middle = (training_tables.WINDOW - 1) / 2
        np.testing.assert_allclose(training_tables.smoothed(losses), [middle, middle + 1, middle + 2])

    @pytest.mark.full
    def test_picture(self):
        assert_shown(training_tables.draw, "finetune.png", "training.md")


class TestOptimizers(unittest.TestCase):
    def test_diverged(self):
        assert optimizers_tables.difference(0.0123, " %") == "+1.23 %" and optimizers_tables.number(0.5) == "0.5000"
        for off in (float("nan"), float("inf"), 1e9):
            assert optimizers_tables.difference(off) == optimizers_tables.number(off) == "diverged"

    @pytest.mark.full
    def test_picture(self):
        assert_shown(optimizers_tables.draw, "optimizers.png", "optimizers.md")


class TestAlgorithms(unittest.TestCase):
    def test_intervals(self):
        assert algorithms_tables.interval([2.0, 2.0], [4.0, 4.0]) == (0.5, 0.5)
        low, high = algorithms_tables.interval([1.0, 2.0, 3.0, 4.0, 5.0])
        assert 1.0 < low < 3.0 < high < 5.0

    @pytest.mark.full
    def test_picture(self):
        assert_shown(algorithms_tables.draw, "algorithms.png", "algorithms.md")


class TestANewFormat(unittest.TestCase):
    """Formats made here, by one constant each, meet everything that the library does with its own."""

    @parameterized.expand([(f.name, f) for f in (E3M2, INT3, THIRDS)])
    @pytest.mark.quick(2)
    def test_everything(self, _name, fmt):
        x = torch.randn(6, 72, requires_grad=True)
        for q in (
            Quantizer(fmt, (1, 32)),
            Quantizer(fmt, scale=scale_rules.CurrentScaling()),
            Quantizer(fmt, (1, 32), scale_rules.Microscaling()),
            Quantizer(fmt, (1, 16), scale_rules.TwoLevel()),
        ):
            t = hop.quantize(q, x)
            numbers = hop.dequantize(t)
            step = q.spread(q.scale.scale_of([t.buffers()[n] for n in q.stored()], fmt), x.shape)
            choices = torch.tensor(fmt.numbers)[:, None, None] * step  # all numbers that an element could be
            torch.testing.assert_close((numbers - x).abs(), (choices - x).abs().amin(0))
            assert torch.equal(torch.autograd.grad(numbers.sum(), x)[0], torch.ones_like(x))
            assert Quantizer.parse(str(q)) == q
            assert t.codes.shape == ((6, 18) if fmt.bits == 2 else (6, 72))
            compiled = torch.compile(lambda x, q=q: hop.fake_quantize(q, x), backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x), numbers)
            assert torch.equal(hop.fake_quantize(q, x), numbers)
            assert [tuple(b) for b in hop.TensorProto(x.shape, quantizer=q).buffers()] == [
                (name, tuple(b.shape), b.dtype) for name, b in t.buffers().items()
            ]
            assert t[:3].quantizer == q and t.to(torch.float16).dtype == torch.float16
