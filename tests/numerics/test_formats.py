"""The formats against independent implementations of them, number by number, and over all that rounding can meet."""

import dataclasses
import itertools
import math
import pickle
import unittest

import ml_dtypes
import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop import formats
from hop.numerics import packing, tables
from hop.numerics.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, INT4, INT8, TERNARY, UINT4, UINT8, Codebook, Float

OF_ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
# Two that the library does not have, made here by a constant each.
E3M2 = Float("e3m2", 6, torch.uint8, exponent_bits=3, mantissa_bits=2, bias=3, largest=0x1F)
E2M3 = Float("e2m3", 6, torch.uint8, exponent_bits=2, mantissa_bits=3, bias=1, largest=0x1F)
NEW = {"e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn}
FLOATS = [E4M3, E5M2, E2M1, E3M2, E2M3]


def inputs(fmt: formats.Format) -> torch.Tensor:
    """Numbers, halfway points and their neighbours, all bfloat16 bit patterns, and a million floats of all sizes."""
    numbers = torch.tensor(fmt.numbers)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    exact = torch.cat([numbers, halfway])
    up, down = (torch.nextafter(exact, torch.tensor(end)) for end in (math.inf, -math.inf))
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(10**6, generator=generator) * 60 - 40)
    return torch.cat([exact, up, down, patterns, torch.randn(10**6, generator=generator) * sizes])


def bits_of(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy()


class TestFloats(unittest.TestCase):
    @parameterized.expand([(f.name, f) for f in FLOATS])
    def test_numbers(self, name, fmt):
        """Each code is the number that ml_dtypes says."""
        kind = {**OF_ML_DTYPES, **NEW}[name]
        want = np.arange(2**fmt.bits, dtype=np.uint8).view(kind).astype(np.float32)
        codes = torch.arange(2**fmt.bits).to(torch.uint8).view(fmt.dtype)
        np.testing.assert_array_equal(fmt.decode(codes).numpy(), want)
        assert set(fmt.numbers) == {float(v) for v in want if math.isfinite(v)}

    @parameterized.expand([(f.name, f) for f in FLOATS])
    def test_encode(self, name, fmt):
        """Nearest, ties to even, saturating, the sign of zero kept: as ml_dtypes casts what does not overflow."""
        x = inputs(fmt)
        x = x[~x.isnan()]
        got = bits_of(fmt.encode(x))
        want = x.clamp(fmt.min, fmt.max).numpy().astype({**OF_ML_DTYPES, **NEW}[name]).view(np.uint8)
        np.testing.assert_array_equal(got, want)

    def test_nan(self):
        nan = torch.tensor([math.nan, -math.nan])
        assert E4M3.decode(E4M3.encode(nan)).isnan().all() and E5M2.decode(E5M2.encode(nan)).isnan().all()
        assert E2M1.decode(E2M1.encode(nan)).abs().tolist() == [6.0, 6.0]

    @parameterized.expand([(f.name, f) for f in (E4M3, E5M2)])
    def test_search_agrees_with_the_cast(self, _name, fmt):
        """The two ways to a code that the library has."""
        x = inputs(fmt)
        x = x[~x.isnan()]
        by_search = tables.search(x.abs(), fmt._thresholds).to(torch.uint8)
        np.testing.assert_array_equal(by_search.numpy(), bits_of(fmt.encode(x)) & 0x7F)


class TestScales(unittest.TestCase):
    def test_numbers(self):
        want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        np.testing.assert_array_equal(E8M0.decode(torch.arange(256).to(torch.uint8)).numpy(), want)

    def test_rounds_up(self):
        """Against exact powers of two, in Python's arithmetic."""
        x = inputs(E8M0)
        x = x[x > 0][::7]
        got = E8M0.encode(x).tolist()
        for v, code in zip(x.tolist(), got, strict=True):
            assert code == (254 if math.isinf(v) else min(max(math.ceil(_log2(v)) + 127, 0), 254)), v

    def test_edges(self):
        edges = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 3e38, math.inf, math.nan])
        assert E8M0.encode(edges).tolist() == [0, 0, 0, 1, 127, 254, 254, 255]


def _log2(x: float) -> float:
    """Exact for powers of two, and never on the wrong side of an integer."""
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent - 0.5


class TestIntegers(unittest.TestCase):
    @parameterized.expand([(f.name, f) for f in (INT8, UINT8, INT4, UINT4, TERNARY)])
    def test_encode(self, _name, fmt):
        x = inputs(fmt)
        want = np.clip(np.rint(x.nan_to_num(0.0, math.inf, -math.inf).numpy()), fmt.low, fmt.high)
        got = fmt.encode(x)
        assert got.dtype == fmt.dtype
        np.testing.assert_array_equal(got.numpy(), want.astype(np.int64))
        np.testing.assert_array_equal(fmt.decode(got).numpy(), want)


class TestCodebooks(unittest.TestCase):
    def test_nearest_and_ties_up(self):
        book = Codebook("book", 2, torch.uint8, (-1.0, -0.25, 0.0, 1.0))
        x = torch.tensor([-9.0, -0.625, -0.6251, -0.125, -0.13, 0.5, 0.499, math.nan, math.inf])
        assert book.encode(x).tolist() == [0, 1, 0, 2, 1, 3, 2, 2, 3]
        assert book.decode(book.encode(x)).tolist() == [book.book[i] for i in book.encode(x).tolist()]

    def test_random_books(self):
        """Against the distance to each entry, in float64."""
        rng = np.random.default_rng(0)
        for size in (2, 3, 16, 255, 256):
            numbers = np.unique(rng.normal(size=size).astype(np.float32))
            book = Codebook("book", 8, torch.uint8, tuple(float(v) for v in numbers))
            x = torch.from_numpy(rng.normal(size=4000).astype(np.float32))
            distance = np.abs(x.numpy().astype(np.float64)[:, None] - numbers.astype(np.float64))
            got = distance[np.arange(len(x)), book.encode(x).numpy()]
            np.testing.assert_array_equal(got, distance.min(1))


class TestStochastic(unittest.TestCase):
    @parameterized.expand([(f.name, f) for f in (E2M1, E4M3, INT8)])
    def test_all_noise(self, _name, fmt):
        """Over all 256 values of the noise a number goes up as often as its remainder says, and a number of the format
        stays."""
        generator = torch.Generator().manual_seed(1)
        numbers = torch.tensor(fmt.numbers)
        low = torch.randint(0, len(numbers) - 1, (2000,), generator=generator)
        share = torch.randint(0, 257, (2000,), generator=generator)
        x = numbers[low] + (numbers[low + 1] - numbers[low]) * share / 256
        noise = torch.arange(256, dtype=torch.uint8).expand(2000, 256)
        got = fmt.decode(fmt.encode(x[:, None].expand(2000, 256), noise))
        ups = (got == numbers[low + 1][:, None]).sum(1)
        downs = (got == numbers[low][:, None]).sum(1)
        assert torch.equal(ups, share) and torch.equal(ups + downs, torch.full_like(ups, 256))

    def test_saturates(self):
        noise = torch.full((4,), 255, dtype=torch.uint8)
        assert E2M1.decode(E2M1.encode(torch.tensor([6.0, 7.0, math.inf, -9.0]), noise)).tolist() == [
            6.0,
            6.0,
            6.0,
            -6.0,
        ]

    def test_refused_where_it_means_nothing(self):
        with self.assertRaisesRegex(ValueError, "e8m0"):
            E8M0.encode(torch.ones(1), torch.zeros(1, dtype=torch.uint8))


class TestValues(unittest.TestCase):
    def test_equal_fields_are_equal(self):
        for fmt in FORMATS:
            assert pickle.loads(pickle.dumps(fmt)) == fmt == dataclasses.replace(fmt)
            assert hash(dataclasses.replace(fmt)) == hash(fmt)
        assert len(set(FORMATS)) == len({f.name for f in FORMATS}) == len(FORMATS)

    def test_dtypes_that_hold_no_codes(self):
        for format in (formats.E4M3, formats.E2M1, formats.DYNAMIC8):
            with self.assertRaisesRegex(ValueError, f"{format.name}: dtype of .* must be uint8.* got torch.int8"):
                dataclasses.replace(format, dtype=torch.int8)

    def test_frozen(self):
        with self.assertRaises(dataclasses.FrozenInstanceError):
            INT8.low = 0

    @parameterized.expand([(f.name, f) for f in FORMATS])
    def test_round_trip(self, _name, fmt):
        numbers = torch.tensor(fmt.numbers)
        assert torch.equal(fmt.decode(fmt.encode(numbers)), numbers)
        assert (fmt.min, fmt.max) == (numbers.min(), numbers.max())

    @parameterized.expand([(f.name, f) for f in FORMATS])
    @pytest.mark.full
    def test_lowers_to_core_aten(self, _name, fmt):
        class Model(torch.nn.Module):
            def forward(self, x):
                codes = fmt.encode(x)
                return codes, fmt.decode(codes)

        x = torch.randn(3, 5) * 4
        low = torch.export.export(Model(), (x,)).run_decompositions(hop.decompositions())
        targets = {n.target for n in low.graph.nodes if n.op == "call_function"}
        outside = [t for t in targets if torch.Tag.core not in t.tags and "assert" not in str(t)]
        assert outside == []
        for got, want in zip(low.module()(x), Model()(x), strict=True):
            assert got.dtype == want.dtype and torch.equal(got.float(), want.float())


class TestPacking(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{bits}_{size}_{dtype}".replace("torch.", ""), bits, size, dtype)
            for bits, size, dtype in itertools.product((1, 2, 4), (0, 1, 2, 3, 7, 8, 33), (torch.int8, torch.uint8))
        ]
    )
    def test_round_trip(self, _name, bits, size, dtype):
        low = -(2 ** (bits - 1)) if dtype.is_signed else 0
        codes = torch.randint(low, low + 2**bits, (2, 3, size), generator=torch.Generator().manual_seed(0)).to(dtype)
        packed = packing.pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (2, 3, math.ceil(size * bits / 8))
        assert torch.equal(packing.unpack(packed, bits, size, dtype), codes)
        want = np.zeros((*packed.shape[:-1], packed.shape[-1] * (8 // bits)), dtype=np.int64)
        want[..., :size] = codes.numpy().astype(np.int64) % 2**bits
        shifts = np.arange(8 // bits) * bits
        want = (want.reshape(*packed.shape, 8 // bits) << shifts).sum(-1)
        np.testing.assert_array_equal(packed.numpy(), want)

    def test_first_in_the_low_bits(self):
        assert packing.pack(torch.tensor([1, -2, 3], dtype=torch.int8), 4).tolist() == [0xE1, 0x03]

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "got 3"):
            packing.pack(torch.zeros(4, dtype=torch.uint8), 3)
        with self.assertRaisesRegex(ValueError, r"uint8 of \(\)"):
            packing.pack(torch.tensor(1, dtype=torch.uint8), 4)
        with self.assertRaisesRegex(ValueError, "float32 of"):
            packing.pack(torch.zeros(4), 4)
        with self.assertRaisesRegex(ValueError, "int8 of"):
            packing.unpack(torch.zeros(4, dtype=torch.int8), 4, 8, torch.int8)
        with self.assertRaisesRegex(ValueError, "-2 codes of 4 bits"):
            packing.unpack(torch.zeros(2, dtype=torch.uint8), 4, -2, torch.int8)
        with self.assertRaisesRegex(ValueError, "5 codes of 4 bits take 3 bytes, but packed has 2"):
            packing.unpack(torch.zeros(2, dtype=torch.uint8), 4, 5, torch.uint8)
