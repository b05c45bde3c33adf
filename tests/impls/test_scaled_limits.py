"""hop.scaled of integers at the limits: sums that wrap, scales of all sizes, empty shapes, strides; random cases."""

import itertools
import math
import unittest
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import Tensor

import hop
from hop import presets
from hop.numerics.formats import INT4, INT8, TERNARY, UINT4, UINT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, MinMax
from tests.support import numerics, scaled_oracles
from tests.support.scaled_checks import (
    BOTH,
    COLUMNS,
    DTYPES,
    INTEGERS,
    aten,
    check,
    constant,
    extremes,
    generator,
    plain,
)
from tests.support.scaled_oracles import Geometry, Pair, array, assert_bits, cast, f32


def hostile_scales(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Scales of all sizes: subnormal, overflowing, zero, infinite, NaN."""
    ends = np.array([1e-45, 1e-38, 1e-30, 1e-5, 1, 7e4, 1e30, 3e38, np.inf, np.nan, 0, 2.0**-149, 2.0**127], f32)
    return np.where(rng.integers(0, 2, shape) == 0, ends[rng.integers(0, len(ends), shape)], random_scale(shape, rng))


def random_scale(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    return np.exp2(rng.uniform(-140, 127, shape)).astype(f32)


class TestLimits(unittest.TestCase):
    """Sums that wrap, extreme codes, scales of all sizes, sizes of 0 and 1, and strides of all kinds."""

    def products(self, x: Pair, w: Pair, bias: Tensor | None = None) -> None:
        """linear, mm and matmul of x (M, K) and w (N, K)."""
        with np.errstate(all="ignore"):
            y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
            biased = y if bias is None else scaled_oracles.biased(y, array(bias))
        for dtype in DTYPES:
            check(aten.linear.default, dtype, biased, x, w, bias)
        if w.t.quantizer.format.bits == 8:
            check(aten.mm.default, torch.float32, y, x, w.mT)
            check(aten.matmul.default, torch.float32, y, x, w.mT)

    @parameterized.expand(
        [
            ("int8", presets.INT8_ROW, -128, 0, presets.INT8_ROW, -128, 0, 140_000),
            ("both_signs", presets.INT8_ROW, 127, 0, presets.INT8_ROW, -128, 0, 140_001),
            ("uint8", presets.UINT8_TENSOR_AFFINE, 255, 0, presets.INT8_ROW, -128, 0, 70_001),
            ("zero_points", presets.UINT8_ROW_AFFINE, 255, 0, presets.UINT8_ROW_AFFINE, 255, 0, 40_000),
            ("against_zero_points", presets.INT8_ROW_AFFINE, -128, 127, presets.INT8_ROW_AFFINE, 127, -128, 40_003),
        ]
    )
    @pytest.mark.quick(4)
    def test_wrap(self, _name, lhs, a, zero_a, rhs, b, zero_b, k):
        self.wrap(lhs, a, zero_a, rhs, b, zero_b, k)

    @pytest.mark.full
    def test_wrap_of_int4(self):
        self.wrap(presets.INT8_TENSOR, -128, 0, Quantizer(INT4, (1, -1)), -8, 0, 2_200_001)

    def wrap(self, lhs: Quantizer, a: int, zero_a: int, rhs: Quantizer, b: int, zero_b: int, k: int) -> None:
        """Sums beyond 2^31 are what is left of them in 32 bits, whatever the zero points."""
        rng = generator(0)
        x = scaled_oracles.make(lhs, (2, k), rng, codes=constant(a))
        w = scaled_oracles.make(rhs, (2, k), rng, codes=constant(b))
        x, w = (self.with_zero_point(p, z) for p, z in ((x, zero_a), (w, zero_b)))
        total = x.e.n @ w.e.n.T
        assert (np.abs(total) >= 2**31).all(), total
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        check(aten.linear.default, torch.float32, y, x, w)

    def with_zero_point(self, p: Pair, zero_point: int) -> Pair:
        if numerics.has_zero_point(p.t.quantizer):
            p.t.zero_point.fill_(zero_point)
        return Pair(p.t, scaled_oracles.read(p.t))

    def test_many_rows(self):
        """A result larger than what a kernel takes at once, with a last part that is smaller."""
        rng = generator(15)
        for left, right in [
            (presets.INT8_ROW_AFFINE, presets.INT4_32),
            (Quantizer(INT8, (1, 32)), presets.UINT4_32_AFFINE),
            (presets.UINT8_ROW_AFFINE, presets.INT8_ROW_AFFINE),
        ]:
            x, w = scaled_oracles.make(left, (700, 70), rng), scaled_oracles.make(right, (600, 70), rng)
            check(aten.linear.default, torch.float32, scaled_oracles.matmul(x.e, w.e.map(np.transpose)), x, w)

    def test_wrap_in_a_convolution(self):
        rng = generator(1)
        for channels, inputs in [(140_000, presets.INT8_TENSOR), (70_000, presets.INT8_TENSOR_AFFINE)]:
            x = scaled_oracles.make(inputs, (1, channels, 1), rng, codes=constant(-128))
            x = self.with_zero_point(x, 127)
            w = scaled_oracles.make(Quantizer(INT8, (1, -1, -1)), (2, channels, 1), rng, codes=constant(-128))
            assert (np.abs(np.einsum("ncl,ock->no", x.e.n, w.e.n)) >= 2**31).all()
            y = scaled_oracles.convolution(x.e, w.e, Geometry([1], [0], [1], False, [0], 1))
            check(aten.conv1d.default, torch.float32, y, x, w, None, [1], [0], [1], 1)

    def test_wrap_with_a_bias(self):
        """A sum that fits and a bias that brings it beyond."""
        rng = generator(2)
        x = scaled_oracles.make(presets.INT8_TENSOR, (3, 64), rng, codes=constant(-128))
        w = scaled_oracles.make(presets.INT8_ROW, (5, 64), rng, codes=constant(-128))
        bias = np.array([2**31 - 1, 2**31 - 64 * 2**14, 2**31 - 64 * 2**14 - 1, 0, -(2**31)], np.int32)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose), bias)
        assert (y[:, :2] < 0).all()
        assert (y[:, 2:4] > 0).all()
        check(aten.linear.default, torch.float32, y, x, w, torch.from_numpy(bias))

    @parameterized.expand(
        [
            ("int8", presets.INT8_ROW, -128, presets.INT8_ROW, -128),
            ("signs", presets.INT8_ROW, 127, presets.INT8_ROW, -128),
            ("uint8", presets.UINT8_TENSOR, 255, presets.INT8_ROW, -128),
            ("uint8_right", presets.INT8_ROW, -128, presets.UINT8_TENSOR, 255),
            ("affine", presets.UINT8_ROW_AFFINE, 255, presets.INT8_ROW_AFFINE, -128),
            ("int4", presets.INT8_ROW_AFFINE, -128, presets.INT4_32, -8),
            ("uint4", presets.UINT8_ROW_AFFINE, 0, presets.UINT4_32_AFFINE, 15),
        ]
    )
    @pytest.mark.quick(3)
    def test_extreme_codes(self, _name, lhs, a, rhs, b):
        """Nothing saturates on the way to int32."""
        rng = generator(3)
        for k in (1, 2, 3, 63, 64, 65, 130):
            x = scaled_oracles.make(lhs, (3, k), rng, codes=constant(a))
            w = scaled_oracles.make(rhs, (17, k), rng, codes=constant(b))
            for zero_point in (x.t.quantizer.format.low, x.t.quantizer.format.high):
                self.products(self.with_zero_point(x, zero_point), w)

    @parameterized.expand(
        [
            (f"{a}_{b}", a, b)
            for a, b in itertools.product(["int8", "int8_affine", "uint8_affine"], ["int8", "uint8_affine", "int4"])
        ]
    )
    @pytest.mark.quick(5)
    def test_large_groups(self, _name, a, b):
        """Sums of a group beyond 2^24, which float32 would round on the way, up and down."""
        rng = generator(14)
        formats = {"int8": INT8, "int8_affine": INT8, "uint8_affine": UINT8, "int4": INT4}
        left, right = formats[a], formats[b]
        for size in (256, 258, 300, 500, 1031):
            for of_lhs, of_rhs in [
                ((1, -1), (1, size)),
                ((1, size), (1, size)),
                ((1, size), (1, -1)),
                ((1, size), (2, 200)),
            ]:
                x = scaled_oracles.make(
                    Quantizer(left, of_lhs, MinMax() if "affine" in a else Amax()),
                    (20, 2 * size + 1),
                    rng,
                    codes=extremes(left.high - 1, left.high),
                )
                w = scaled_oracles.make(
                    Quantizer(right, of_rhs, MinMax() if "affine" in b else Amax()),
                    (36, 2 * size + 1),
                    rng,
                    codes=extremes(right.high, right.high - 1),
                )
                x, w = self.with_zero_point(x, left.low), self.with_zero_point(w, right.low)
                y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
                with self.subTest(f"{size} {of_lhs} {of_rhs}"):
                    check(aten.linear.default, torch.float32, y, x, w)

    @parameterized.expand(
        [
            ("symmetric", presets.INT8_ROW, presets.INT8_ROW),
            ("tensor", presets.INT8_TENSOR, presets.INT8_TENSOR),
            ("affine", presets.UINT8_ROW_AFFINE, presets.INT8_ROW_AFFINE),
            ("groups", presets.INT8_ROW, presets.INT4_32),
            ("both_in_groups", Quantizer(INT8, (1, 20)), presets.UINT4_32_AFFINE),
        ]
    )
    @pytest.mark.quick(3)
    def test_hostile_scales(self, name, lhs, rhs):
        """Overflow, underflow, infinities and NaN come out as float32 has them, operation by operation."""
        seen = set()
        for seed in range(12):
            rng = generator(4, seed)
            x = scaled_oracles.make(lhs, (6, 70), rng, scales=hostile_scales)
            w = scaled_oracles.make(rhs, (8, 70), rng, scales=hostile_scales)
            self.products(x, w, plain((8,), rng) if seed % 2 else None)
            with np.errstate(all="ignore"):
                y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
            kinds = {"nan": np.isnan(y), "inf": np.isinf(y), "subnormal": (y != 0) & (np.abs(y) < 2.0**-126)}
            seen |= {name for name, where in kinds.items() if where.any()}
        assert seen >= {"nan", "inf"} and ("subnormal" in seen or "groups" in name), seen

    def test_hostile_scales_of_convolutions(self):
        for seed in range(8):
            rng = generator(5, seed)
            x = scaled_oracles.make(Quantizer(UINT8, (1, -1, -1), MinMax()), (4, 3, 9), rng, scales=hostile_scales)
            w = scaled_oracles.make(Quantizer(INT8, (1, -1, -1)), (5, 3, 3), rng, scales=hostile_scales)
            with np.errstate(all="ignore"):
                y = scaled_oracles.convolution(x.e, w.e, Geometry([1], [1], [1], False, [0], 1))
            check(aten.conv1d.default, torch.float32, y, x, w, None, [1], [1], [1], 1)

    def test_overflow_of_the_cast(self):
        """Beyond 65504 a float16 is infinite, also where float32 is not; nothing is infinite on the way."""
        one = np.ones((1, 1), f32)
        x = hop.QuantizedTensor(
            {"codes": torch.full((1, 4), 127, dtype=torch.int8), "scale": torch.from_numpy(one * f32(3e38))},
            presets.INT8_TENSOR,
            (1, 4),
            torch.float32,
        )
        w = x.rebuilt({"codes": x.codes, "scale": torch.from_numpy(one * f32(1e-38))})
        (got,) = hop.scaled(aten.linear.default, torch.float32, x, w).flatten().tolist()
        assert got == math.inf  # (sum · 3e38) · 1e-38: in this order
        (got,) = hop.scaled(aten.linear.default, torch.float32, w, x).flatten().tolist()
        assert abs(got - 4 * 127**2 * 3) < 1, got
        (got,) = hop.scaled(aten.linear.default, torch.float16, w, x).flatten().tolist()
        assert got == math.inf

    @parameterized.expand([(f"{m}_{k}_{n}", m, k, n) for m, k, n in itertools.product((0, 1), (0, 1, 3), (0, 1))])
    @pytest.mark.quick(9)
    def test_small_sizes(self, _name, m, k, n):
        rng = generator(6)
        names = [
            "int8_tensor",
            "int8_row_affine",
            "uint8_tensor_affine",
            "int8_groups_20",
            "int4_row",
            "int4_groups_32",
        ]
        for lhs, rhs in itertools.product(names, names):
            with self.subTest(f"{lhs} {rhs}"):
                x, w = scaled_oracles.make(INTEGERS[lhs], (m, k), rng), scaled_oracles.make(INTEGERS[rhs], (n, k), rng)
                self.products(x, w, plain((n,), rng))

    def test_small_batches(self):
        rng = generator(7)
        for b, m, k, n in itertools.product((0, 1, 2), repeat=4):
            with self.subTest(f"{b, m, k, n}"):
                for lhs, rhs in [
                    (Quantizer(INT8), Quantizer(INT8)),
                    (Quantizer(UINT8, (1, -1), MinMax()), Quantizer(INT8)),
                ]:
                    x, w = scaled_oracles.make(lhs, (b, m, k), rng), scaled_oracles.make(rhs, (b, k, n), rng)
                    check(aten.bmm.default, torch.float32, scaled_oracles.matmul(x.e, w.e), x, w)

    def test_no_examples(self):
        rng = generator(8)
        w = scaled_oracles.make(presets.INT8_CONV, (4, 3, 3, 3), rng)
        for example in (Quantizer(INT8), Quantizer(INT8, (1, -1, -1, -1), MinMax())):
            x = scaled_oracles.make(example, (0, 3, 6, 5), rng)
            got = hop.scaled(aten.conv2d.default, torch.bfloat16, x.t, w.t)
            assert (got.shape, got.dtype) == ((0, 4, 4, 3), torch.bfloat16)

    def strided(self, q: Quantizer, rng: np.random.Generator) -> dict[str, Pair]:
        """(6, 40), laid out in every way."""
        make = scaled_oracles.make
        found = {
            "sliced": make(q, (12, 40), rng).view(lambda t: t[::2], lambda a: a[::2]),
            "offset": make(q, (9, 40), rng).view(lambda t: t[3:], lambda a: a[3:]),
            "selected": make(q, (3, 6, 40), rng).view(lambda t: t[1], lambda a: a[1]),
            "reshaped": make(q, (2, 3, 40), rng).view(lambda t: t.view(6, 40), lambda a: a.reshape(6, 40)),
            "expanded_rows": make(q, (1, 40), rng).view(
                lambda t: t.expand(6, 40), lambda a: np.broadcast_to(a, (6, 40))
            ),
        }
        if q.format.bits == 8:
            found["turned"] = make(q, (6, 40), rng)
            buffers = found["turned"].t.buffers()
            buffers["codes"] = buffers["codes"].t().contiguous().t()
            as_columns = hop.QuantizedTensor(buffers, q, (6, 40), torch.float32)
            found["turned"] = Pair(as_columns, found["turned"].e)
        buffers = {
            name: torch.cat([b, b], -1)[..., : b.shape[-1]] for name, b in make(q, (6, 40), rng).t.buffers().items()
        }
        wide = hop.QuantizedTensor(buffers, q, (6, 40), torch.float32)
        found["wide"] = Pair(wide, scaled_oracles.read(wide))
        return found

    @parameterized.expand(
        ["int8_tensor", "int8_row", "int8_row_affine", "uint8_tensor_affine", "int8_groups_20", "int4_groups_32"]
    )
    @pytest.mark.quick(3)
    def test_strides(self, name):
        """Operands that are views of others, with their scales."""
        rng = generator(9)
        others = {
            "row": scaled_oracles.make(presets.INT8_ROW, (6, 40), rng),
            "affine": scaled_oracles.make(presets.UINT8_ROW_AFFINE, (6, 40), rng),
        }
        for (kind, x), (other, y) in itertools.product(self.strided(INTEGERS[name], rng).items(), others.items()):
            with self.subTest(f"{kind} {other}"):
                self.products(x, y)
                self.products(y, x)
                first = hop.scaled(aten.linear.default, torch.float32, y.t, x.t)  # a plan of other strides is known
                clone = x.t.clone()
                assert_bits(hop.scaled(aten.linear.default, torch.float32, y.t, clone), array(first))

    def test_expanded_columns(self):
        """Codes of stride 0 along the summed dimension, and in a whole matrix."""
        rng = generator(10)
        w = scaled_oracles.make(presets.INT8_ROW_AFFINE, (5, 40), rng)
        for q in (presets.INT8_TENSOR, presets.INT8_ROW, presets.UINT8_TENSOR_AFFINE, presets.UINT8_ROW_AFFINE):
            column = scaled_oracles.make(q, (6, 1), rng)
            if column.t.quantizer.block[-1] == -1:
                x = column.view(lambda t: t.expand(6, 40), lambda a: np.broadcast_to(a, (6, 40)))
                with self.subTest(f"{q} {x.t.stride()}"):
                    self.products(x, w)
                    self.products(w, x)
            one = scaled_oracles.make(Quantizer(q.format, scale=q.scale), (1, 1), rng)
            x = one.view(lambda t: t.expand(6, 40), lambda a: np.broadcast_to(a, (6, 40)))
            self.products(x, w)

    def test_batches_of_strides(self):
        rng = generator(11)
        w = scaled_oracles.make(Quantizer(INT8, (-1, 1)), (40, 5), rng)
        for q in (Quantizer(INT8), Quantizer(INT8, (1, -1)), Quantizer(UINT8, (1, -1), MinMax())):
            base = scaled_oracles.make(q, (1, 3, 40), rng)
            x = base.view(lambda t: t.expand(4, 3, 40), lambda a: np.broadcast_to(a, (4, 3, 40)))
            check(aten.matmul.default, torch.float32, scaled_oracles.matmul(x.e, w.e), x, w)
            right = w.view(lambda t: t.unsqueeze(0).expand(4, 40, 5), lambda a: np.broadcast_to(a, (4, 40, 5)))
            check(aten.bmm.default, torch.float32, scaled_oracles.matmul(x.e, right.e), x, right)
            moved = scaled_oracles.make(q, (3, 4, 40), rng).view(
                lambda t: t.transpose(0, 1), lambda a: a.swapaxes(0, 1)
            )
            check(aten.matmul.default, torch.float32, scaled_oracles.matmul(moved.e, w.e), moved, w)
            check(aten.bmm.default, torch.float32, scaled_oracles.matmul(moved.e, right.e), moved, right)

    def test_scales_that_negate_what_they_view(self):
        """z.conj().imag has the bits of z.imag, which kernels would read."""
        x, w = hop.quantize(presets.INT8_ROW, torch.randn(8, 64)), hop.quantize(presets.INT8_ROW, torch.randn(16, 64))
        want = hop.scaled(aten.linear.default, torch.float32, x, w)
        negated = torch.complex(torch.zeros_like(w.scale), -w.scale).conj().imag
        assert negated.is_neg() and torch.equal(negated, w.scale)
        w.scale = negated
        for _ in range(2):
            assert torch.equal(hop.scaled(aten.linear.default, torch.float32, x, w), want)

    def test_plans_are_not_taken_for_others(self):
        """Calls that differ in one thing alone, one after the other, twice: each has its own result."""
        rng = generator(12)
        make = scaled_oracles.make
        lefts = [
            make(presets.INT8_TENSOR, (4, 32), rng),
            make(presets.INT8_ROW, (4, 32), rng),
            make(presets.INT8_ROW_AFFINE, (4, 32), rng),
            make(presets.UINT8_ROW_AFFINE, (4, 32), rng),
            make(presets.INT8_ROW, (5, 32), rng),
            make(presets.INT8_ROW, (4, 32), rng, BOTH),
            make(presets.INT8_ROW, (4, 32), rng, dtype=torch.float64),
            make(presets.INT8_ROW, (2, 4, 32), rng),
        ]
        rights = [
            make(presets.INT8_ROW, (32, 32), rng),
            make(presets.INT8_ROW, (32, 32), rng).view(lambda t: t.t().t(), lambda a: a),
            make(presets.INT8_COLUMN, (32, 32), rng).mT,
            make(presets.INT8_TENSOR, (32, 32), rng),
            make(presets.INT8_TENSOR, (32, 32), rng).mT,
            make(presets.INT4_32, (32, 32), rng),
        ]
        biases = [None, plain((32,), rng), plain((32,), rng, torch.bfloat16), plain((32,), rng, torch.float64)]
        for _, x, w, bias, dtype in itertools.product(range(2), lefts, rights, biases, DTYPES[:2]):
            y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
            y = y if bias is None else scaled_oracles.biased(y, array(bias))
            got = hop.scaled(aten.linear.default, dtype, x.t, w.t, bias)
            assert_bits(got, cast(y, dtype), f"{x.t.quantizer} {x.t.shape} {w.t.quantizer} {w.t.stride()}")

    def test_arguments_stay(self):
        """No buffer and no bias is written to, and no result shares memory with one."""
        rng = generator(13)
        x, w = scaled_oracles.make(presets.INT8_ROW, (4, 32), rng), scaled_oracles.make(presets.INT8_ROW, (8, 32), rng)
        bias = plain((8,), rng)
        held = [t.clone() for t in (*x.t.buffers().values(), *w.t.buffers().values(), bias)]
        for op, args in [(aten.linear.default, (x.t, w.t, bias)), (aten.addmm.default, (bias, x.t, w.t.t()))]:
            for dtype in DTYPES:
                for _ in range(2):
                    hop.scaled(op, dtype, *args).zero_()
        for before, after in zip(held, (*x.t.buffers().values(), *w.t.buffers().values(), bias), strict=True):
            assert_bits(after, array(before))


BLOCKS = st.sampled_from([(-1, -1), (1, -1), (1, 8), (1, 12), (2, 8), (3, -1), (-1, 5), (1, 100)])


class TestRandomCases(unittest.TestCase):
    """Any blocks, formats and sizes that go together."""

    @given(
        formats=st.tuples(*[st.sampled_from([INT8, UINT8, INT4, UINT4, TERNARY])] * 2),
        blocks=st.tuples(BLOCKS, BLOCKS),
        affine=st.tuples(st.booleans(), st.booleans()),
        size=st.tuples(*[st.integers(1, 9), st.integers(1, 40), st.integers(1, 9)]),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**31),
        how=st.sampled_from(["linear", "mm", "addmm", "columnwise", "batch"]),
    )
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @pytest.mark.full
    def test_products(self, formats, blocks, affine, size, dtype, seed, how):
        rng = generator(seed)
        (m, k, n), make = size, scaled_oracles.make
        left, right = (
            Quantizer(f, b, MinMax() if z else Amax()) for f, b, z in zip(formats, blocks, affine, strict=True)
        )
        x = make(left, (m, k), rng)
        if how == "columnwise":
            w = make(right, (k, n), rng, COLUMNS)
            check(aten.mm.default, dtype, scaled_oracles.matmul(x.e, w.e), x, w)
            return
        w = make(right, (n, k), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        if how == "linear" or right.format.bits < 8:
            check(aten.linear.default, dtype, y, x, w)
        elif how == "mm":
            check(aten.mm.default, dtype, y, x, w.mT)
        elif how == "addmm":
            bias = plain((n,), rng)
            want = scaled_oracles.biased(y, array(bias), 0.3, 2)
            check(aten.addmm.default, dtype, want, bias, x, w.mT, alpha=0.3, beta=2)
        else:
            x = make(left, (3, m, k), rng)
            w = make(right, (3, n, k), rng).mT
            check(aten.bmm.default, dtype, scaled_oracles.matmul(x.e, w.e), x, w)
