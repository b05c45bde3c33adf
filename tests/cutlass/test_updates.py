"""Which kernels there are for steps of optimizers, and their tables of codebooks: values alone."""

import dataclasses
import unittest

import numpy as np
import torch
from parameterized import parameterized

from cutlass_kernels import updates
from cutlass_kernels.books import Book
from hop import presets
from hop.dispatch.kernel import Declined
from hop.kernels.gpu import step as gpu
from hop.numerics import formats
from tests.ptx.rounding import fma

BOOKS = ("DYNAMIC8", "DYNAMIC8_UNSIGNED", "DYNAMIC4", "LINEAR4_UNSIGNED", "LINEAR4_UNSIGNED_ZERO", "IQ4_NL")
F32, BF16 = torch.float32, torch.bfloat16


def book(name: str, raised: bool) -> Book:
    f = getattr(formats, name)
    return Book(f.bits, f.book, f._thresholds, f._zero_code, raised)


class TestBooks(unittest.TestCase):
    @parameterized.expand([(name, raised) for name in BOOKS for raised in (False, True)])
    def test_tables_give_the_codes_of_the_format(self, name, raised):
        """Near each threshold, and anywhere; what is raised has the code of the least number above 0 at least."""
        own, f = book(name, raised), getattr(formats, name)
        assert own.declines() is None
        near = np.array(own.thresholds[1:], np.float32).view(np.int32)
        near = (near[:, None] + np.arange(-3, 4)).astype(np.int32).view(np.float32).ravel()
        top = max(map(abs, own.numbers))
        anywhere = np.random.default_rng(0).uniform(-30, 0, 4000)
        anywhere = (2**anywhere * top).astype(np.float32)
        y = np.concatenate([near, anywhere, -anywhere, np.array([0, -0.0, top, -top, 2**-149], np.float32)])
        y = y[np.abs(y) <= top]
        wanted = f.encode(torch.from_numpy(y)).numpy().astype(int)
        if raised:
            wanted = np.where(y > 0, np.maximum(wanted, sum(n <= 0 for n in own.numbers)), wanted)
        assert np.array_equal(looked_up(own, y), wanted)

    def test_declines(self):
        for numbers, bits, words in (
            ((-1.0, 1.0), 8, "further than 2"),
            ((-1.0, 0.0), 8, "a number above 0"),
            ((1.0, 2.0), 2, "4 or 8 bits"),
            ((1.0, *(2 + 2.0**-22 * i for i in range(200))), 8, "4096 buckets"),
        ):
            f = formats.Codebook("f", bits, torch.uint8, numbers)
            assert words in (Book(bits, f.book, f._thresholds, 0).declines() or ""), words


def looked_up(own: Book, y: np.ndarray) -> np.ndarray:
    """As cutlass_kernels.update_elements.look_up has it."""
    layout, table = own.layout, np.array(own.table(), np.int64).astype(np.int32)
    thresholds = table[layout.size : 2 * layout.size + 1].view(np.float32)
    index = table[2 * layout.size + 1 :].view(np.uint8)
    edge = np.array(layout.edge, np.uint32).view(np.float32)
    magnitude = np.maximum(np.abs(y) if layout.signed else y, edge)
    place = (magnitude.view(np.uint32) >> layout.shift).astype(int) - (layout.edge >> layout.shift)
    assert place.min() >= 0 and place.max() < layout.buckets
    code = index[place + np.where(layout.signed & (y < 0), layout.buckets, 0)].astype(int)
    return code + (y >= thresholds[code + 1])


class TestQuotients(unittest.TestCase):
    def test_by_reciprocals_they_are_rounded_once(self):
        """As cutlass_kernels.codes.quotient has it, by all scales that it is given; mantissas near all ones too."""
        rng, count = np.random.default_rng(0), 200_000
        mantissas = rng.integers(0, 2**23, (2, count))
        mantissas[:, ::4] = 2**23 - 1 - rng.integers(0, 5, (2, count // 4))
        mantissas[:, 1::4] = rng.integers(0, 5, (2, count // 4))
        exponents = np.stack([rng.integers(127 - 90, 127, count), rng.integers(127 - 70, 127, count)])
        x, by = ((exponents << 23) + mantissas).astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / by
            q = x * inverse
            for _ in range(2):
                q = fma(fma(-q, by, x), inverse, q)
            wanted = x / by
        assert np.array_equal(q[np.isfinite(wanted)], wanted[np.isfinite(wanted)])

    def test_no_number_above_0_becomes_0(self):
        by = np.linspace(2.0**-20, 1, 2000).astype(np.float32)[:, None]
        x = np.arange(1, 500, dtype=np.uint32).view(np.float32)
        inverse = np.float32(1) / by
        q = x * inverse
        for _ in range(2):
            q = fma(fma(-q, by + 0 * q, x + 0 * q), inverse + 0 * q, q)
        assert (q > 0).all()


class TestKinds(unittest.TestCase):
    def test_declines(self):
        codes = updates.Codes(torch.float8_e4m3fn, 256)
        for update, words in (
            (updates.Update("adam", (updates.Kind(BF16, BF16, (codes,)),)), "2 to 3 states"),
            (updates.Update("lion", (updates.Kind(torch.float64, F32, (F32,)),)), "not torch.float64"),
            (updates.Update("lion", (updates.Kind(F32, F32, (dataclasses.replace(codes, block=512),)),)), "16 to 256"),
            (updates.Update("lion", (updates.Kind(F32, F32, (codes,)),), target="sm_80"), "from compute capability"),
        ):
            assert words in (update.declines() or ""), update
        assert updates.Update("lion", (updates.Kind(F32, F32, (codes,)),)).declines() is None

    def test_quantizers_that_no_kernel_has(self):
        for q, words in (
            (presets.INT8_ROW, "for flat blocks"),
            (dataclasses.replace(presets.STATE8, block=(512,)), "at most 256"),
            (dataclasses.replace(presets.STATE8, format=formats.INT8), "codebooks and e4m3"),
        ):
            with self.assertRaisesRegex(Declined, words):
                gpu._described(str(q), 0.0)

    def test_copies_of_tables_fill_the_shared_memory_that_there_is(self):
        layouts = (book("DYNAMIC8", False).layout, book("DYNAMIC8_UNSIGNED", True).layout)
        for target, copies in (("sm_90a", 32), ("sm_86", 8), ("sm_120a", 8), ("sm_100a", 32)):
            update = updates.Update("adam", (), layouts, target=target)
            assert update.copies == copies and update.shared_bytes <= 227 * 1024
