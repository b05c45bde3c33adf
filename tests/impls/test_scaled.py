"""hop.scaled of matrices of integers against numpy, bit for bit.

Operands are made of any codes, scales and zero points, the outermost codes often (scaled_oracles.make), not of numbers
that were quantized: what a product does with them must not depend on how they came about.
"""

import itertools
import math
import unittest
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

from hop import presets
from hop.numerics.formats import INT4, INT8, TERNARY, UINT4, UINT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, MinMax
from tests.support import scaled_oracles
from tests.support.scaled_checks import BOTH, COLUMNS, DTYPES, INTEGERS, SIZES, aten, check, generator, plain, sizes
from tests.support.scaled_oracles import Pair, array

PAIRS = [(f"{a}__{b}", INTEGERS[a], INTEGERS[b]) for a, b in itertools.product(INTEGERS, INTEGERS)]


class TestLinear(unittest.TestCase):
    """linear of every two integer quantizers."""

    def check(self, lhs: Quantizer, rhs: Quantizer, lead: tuple[int, ...], k: int, n: int, dtype: Any, seed: int):
        rng = generator(seed)
        x, w = scaled_oracles.make(lhs, (*lead, k), rng), scaled_oracles.make(rhs, (n, k), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        check(aten.linear.default, dtype, y, x, w)
        bias = plain((n,), rng, DTYPES[seed % 4])
        check(aten.linear.default, dtype, scaled_oracles.biased(y, array(bias)), x, w, bias)

    @parameterized.expand(PAIRS)
    @pytest.mark.quick(4)
    def test_pairs(self, name, lhs, rhs):
        i = [p[0] for p in PAIRS].index(name)
        m, k, n = sizes(i)
        self.check(lhs, rhs, (m,), k, n, DTYPES[i // 6 % 4], i)

    @parameterized.expand(PAIRS)
    @pytest.mark.full
    @pytest.mark.sampled(8)
    def test_all_pairs(self, _name, lhs, rhs):
        for i, ((m, k, n), dtype) in enumerate(itertools.product([*SIZES, (40, 200, 33)], DTYPES)):
            with self.subTest(f"{m, k, n} {dtype}"):
                self.check(lhs, rhs, (m,), k, n, dtype, i)

    @parameterized.expand([("vector", ()), ("three", (2, 3)), ("four", (2, 1, 4)), ("one", (1, 1)), ("none", (0, 4))])
    def test_leading_dimensions(self, _name, lead):
        for i, (lhs, rhs) in enumerate(
            [
                ("int8_tensor", "int8_row"),
                ("int8_row", "int4_groups_32"),
                ("int8_row_affine", "int8_tensor_affine"),
                ("uint8_row_affine", "int8_row"),
                ("uint8_tensor", "uint4_groups_32_affine"),
                ("int8_groups_32_affine", "int8_row_affine"),
                ("int8_groups_20", "ternary_tensor"),
                ("int8_tiles", "int8_tiles"),
            ]
        ):
            with self.subTest(f"{lhs} {rhs}"):
                self.check(INTEGERS[lhs], INTEGERS[rhs], lead, 70, 6, DTYPES[i % 4], i)

    def test_scales_of_leading_dimensions(self):
        """One scale for each matrix of a batch, and one for each position over the whole batch."""
        rng = generator(0)
        w = scaled_oracles.make(presets.INT8_ROW_AFFINE, (6, 40), rng)
        for block in [(1, -1, -1), (-1, 1, -1), (2, 1, -1), (1, 2, 20), (-1, -1, 20), (2, -1, -1)]:
            for scale in (Amax(), MinMax()):
                with self.subTest(f"{block} {scale}"):
                    x = scaled_oracles.make(Quantizer(INT8, block, scale), (3, 5, 40), rng)
                    y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
                    check(aten.linear.default, torch.float32, y, x, w)

    def test_int32_bias(self):
        """It is added to the sum, modulo 2^32, before any rounding."""
        rng = generator(1)
        for lhs, rhs in [
            ("int8_tensor", "int8_row"),
            ("uint8_row_affine", "int8_row_affine"),
            ("int8_row", "int4_row"),
        ]:
            x, w = scaled_oracles.make(INTEGERS[lhs], (4, 50), rng), scaled_oracles.make(INTEGERS[rhs], (7, 50), rng)
            for bias in (
                rng.integers(-(2**31), 2**31, 7).astype(np.int32),
                np.full(7, 2**31 - 1, np.int32),
                rng.integers(-9, 9, 7).astype(np.int32),
            ):
                for dtype in DTYPES:
                    y = scaled_oracles.matmul(x.e, w.e.map(np.transpose), bias)
                    check(aten.linear.default, dtype, y, x, w, torch.from_numpy(bias))

    def test_usages(self):
        """x and the weight as they come from a training step: with a copy for each product, or only the other one."""
        rng = generator(2)
        for q, usages, usage in [
            (presets.INT8_ROW, BOTH, "rowwise"),
            (presets.INT8_TENSOR, BOTH, "rowwise"),
            (presets.INT8_TENSOR, COLUMNS, "columnwise"),
            (presets.INT8_TENSOR_AFFINE, BOTH, "rowwise"),
            (presets.INT8_TENSOR_AFFINE, COLUMNS, "columnwise"),
            (presets.INT8_COLUMN, COLUMNS, "columnwise"),
        ]:
            with self.subTest(f"{q} {usages}"):
                x = scaled_oracles.make(q, (4, 32), rng, usages, usage=usage)
                w = scaled_oracles.make(q, (6, 32), rng, usages, usage=usage)
                y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
                check(aten.linear.default, torch.float32, y, x, w)

    @parameterized.expand([("tensor", presets.INT8_TENSOR), ("affine", presets.UINT8_TENSOR_AFFINE)])
    def test_columns_of_a_batch(self, _name, q):
        """A column-wise copy of three dimensions is one matrix."""
        rng = generator(3)
        x = scaled_oracles.make(q, (2, 3, 16), rng, COLUMNS)
        w = scaled_oracles.make(presets.INT8_ROW, (6, 16), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        check(aten.linear.default, torch.float32, y, x, w)

    def test_vector_weight(self):
        """As torch.nn.functional.linear has it, a weight of one dimension gives one number."""
        rng = generator(4)
        for lead in [(), (3,), (2, 3)]:
            x = scaled_oracles.make(presets.INT8_ROW, (*lead, 20), rng)
            w = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (20,), rng)
            check(aten.linear.default, torch.float32, scaled_oracles.matmul(x.e, w.e), x, w)


BYTES = {name: q for name, q in INTEGERS.items() if q.format.bits == 8}  # packed ones have no transposed view
# Name: a factor (K, N) in every way in which people have it: quantizer, shape, usages.
RIGHT: dict[str, tuple[Quantizer, str, tuple[str, ...]]] = {
    **{f"{name}_turned": (q, "turned", ("rowwise",)) for name, q in BYTES.items()},
    **{f"{name}_columnwise": (q, "", COLUMNS) for name, q in INTEGERS.items()},
    **{f"{name}_both": (q, "", BOTH) for name, q in INTEGERS.items()},
    "tensor": (Quantizer(INT8), "", ("rowwise",)),
    "column": (Quantizer(INT8, (-1, 1)), "", ("rowwise",)),
    "column_affine": (Quantizer(INT8, (-1, 1), MinMax()), "", ("rowwise",)),
    "uint8_column_affine": (Quantizer(UINT8, (-1, 1), MinMax()), "", ("rowwise",)),
    "columns": (Quantizer(INT8, (-1, 4)), "", ("rowwise",)),
    "groups": (Quantizer(INT8, (32, 1)), "", ("rowwise",)),
    "groups_affine": (Quantizer(UINT8, (20, 1), MinMax()), "", ("rowwise",)),
    "tiles": (Quantizer(INT8, (16, 3)), "", ("rowwise",)),
    "int4_column": (Quantizer(INT4, (-1, 1)), "", ("rowwise",)),
    "uint4_tiles": (Quantizer(UINT4, (16, 2), MinMax()), "", ("rowwise",)),
    "ternary": (Quantizer(TERNARY, (-1, 1), AbsMean()), "", ("rowwise",)),
}


def right_hand_side(name: str, k: int, n: int, rng: np.random.Generator) -> Pair:
    q, as_columns, usages = RIGHT[name]
    made = scaled_oracles.make(q, (n, k) if as_columns else (k, n), rng, usages, usage=usages[-1])
    return made.mT if as_columns else made


LEFT = ["int8_tensor", "int8_row", "int8_row_affine", "uint8_row_affine", "uint8_tensor", "int8_groups_32", "int4_row"]


class TestMatrices(unittest.TestCase):
    """mm, addmm, bmm, baddbmm and matmul of integers."""

    @parameterized.expand([(name,) for name in RIGHT])
    @pytest.mark.quick(4)
    def test_mm(self, name):
        for i, (left, (m, k, n)) in enumerate(itertools.product(LEFT, [(5, 70, 9), (3, 64, 32), (4, 96, 20)])):
            with self.subTest(f"{left} {m, k, n}"):
                rng = generator(i)
                x, w = scaled_oracles.make(INTEGERS[left], (m, k), rng), right_hand_side(name, k, n, rng)
                check(aten.mm.default, DTYPES[i % 4], scaled_oracles.matmul(x.e, w.e), x, w)

    @parameterized.expand([(name,) for name in RIGHT])
    @pytest.mark.full
    @pytest.mark.sampled(8)
    def test_mm_of_many_sizes(self, name):
        for i, (left, (m, k, n)) in enumerate(itertools.product(INTEGERS, [*SIZES, (33, 160, 40), (32, 32, 32)])):
            with self.subTest(f"{left} {m, k, n}"):
                rng = generator(i)
                x, w = scaled_oracles.make(INTEGERS[left], (m, k), rng), right_hand_side(name, k, n, rng)
                y = scaled_oracles.matmul(x.e, w.e)
                for dtype in DTYPES:
                    check(aten.mm.default, dtype, y, x, w)

    def test_turned_left(self):
        """A left factor that is itself a view of a transposed matrix, or has both copies."""
        rng = generator(0)
        w = scaled_oracles.make(presets.INT8_ROW_AFFINE, (7, 40), rng).mT
        lefts = {
            "turned": scaled_oracles.make(presets.INT8_TENSOR, (40, 5), rng).mT,
            "turned_affine": scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (40, 5), rng).mT,
            "turned_columns": scaled_oracles.make(presets.INT8_COLUMN, (40, 5), rng).mT,
            "turned_groups": scaled_oracles.make(Quantizer(INT8, (16, 1)), (40, 5), rng).mT,
            "both": scaled_oracles.make(presets.INT8_ROW, (5, 40), rng, BOTH),
            "columnwise": scaled_oracles.make(presets.INT8_COLUMN, (5, 40), rng, COLUMNS),
            "columnwise_tensor": scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (5, 40), rng, COLUMNS),
        }
        for name, x in lefts.items():
            with self.subTest(name):
                check(aten.mm.default, torch.float32, scaled_oracles.matmul(x.e, w.e), x, w)

    @parameterized.expand(
        [
            ("symmetric", presets.INT8_ROW, presets.INT8_ROW),
            ("affine", presets.UINT8_ROW_AFFINE, presets.INT8_ROW_AFFINE),
            ("groups", Quantizer(INT8, (1, 32)), Quantizer(UINT8, (1, 32), MinMax())),
        ]
    )
    def test_addmm(self, _name, lhs, rhs):
        """Every alpha and beta; beta = 0 ignores even a NaN."""
        rng = generator(5)
        x, w = scaled_oracles.make(lhs, (4, 70), rng), scaled_oracles.make(rhs, (6, 70), rng).mT
        y = scaled_oracles.matmul(x.e, w.e)
        scalars: list[Any] = [1, 0, 2, -1, 0.1, 1 / 3]
        for i, (alpha, beta) in enumerate(itertools.product(scalars, scalars)):
            shape = [(6,), (4, 6), (1, 6), (4, 1), (1,)][i % 5]
            bias = plain(shape, rng, DTYPES[i % 3])
            if beta == 0:
                bias = bias * math.nan
            with self.subTest(f"alpha={alpha} beta={beta} bias{shape} {bias.dtype}"):
                want = scaled_oracles.biased(y, array(bias), alpha, beta)
                kwargs = {name: v for name, v in (("alpha", alpha), ("beta", beta)) if v != 1}
                check(aten.addmm.default, DTYPES[i % 4], want, bias, x, w, **kwargs)

    def test_int32_bias(self):
        rng = generator(6)
        x, w = scaled_oracles.make(presets.INT8_ROW, (4, 30), rng), scaled_oracles.make(presets.INT8_ROW, (6, 30), rng)
        w = w.mT
        for shape in [(6,), (4, 6), (4, 1)]:
            bias = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
            y = scaled_oracles.matmul(x.e, w.e, bias)
            check(aten.addmm.default, torch.float64, y, torch.from_numpy(bias), x, w)

    def batches(self, b: int, m: int, k: int, n: int, rng: np.random.Generator) -> list[tuple[str, Pair, Pair]]:
        make = scaled_oracles.make
        lefts = {
            "tensor": make(Quantizer(INT8), (b, m, k), rng),
            "row": make(Quantizer(INT8, (1, -1)), (b, m, k), rng),
            "matrix": make(Quantizer(INT8, (1, -1, -1)), (b, m, k), rng),
            "affine": make(Quantizer(UINT8, (1, -1), MinMax()), (b, m, k), rng),
            "tensor_affine": make(Quantizer(INT8, scale=MinMax()), (b, m, k), rng),
            "groups": make(Quantizer(INT8, (1, 16)), (b, m, k), rng),
            "turned": make(Quantizer(INT8, (-1, 1)), (b, k, m), rng).mT,
        }
        rights = {
            "tensor": make(Quantizer(INT8), (b, k, n), rng),
            "column": make(Quantizer(INT8, (1, -1, 1)), (b, k, n), rng),
            "column_of_all": make(Quantizer(INT8, (-1, 1)), (b, k, n), rng),
            "turned_row": make(Quantizer(INT8, (1, -1)), (b, n, k), rng).mT,
            "turned_affine": make(Quantizer(INT8, (1, -1), MinMax()), (b, n, k), rng).mT,
            "uint8": make(Quantizer(UINT8, (1, -1, -1)), (b, k, n), rng),
            "groups": make(Quantizer(INT8, (1, 20, 1)), (b, k, n), rng),
            "turned_groups": make(Quantizer(INT8, (1, 32)), (b, n, k), rng).mT,
            "int4": make(Quantizer(INT4, (1, 32, 1)), (b, k, n), rng),
        }
        return [(f"{a} {c}", lefts[a], rights[c]) for a, c in itertools.product(lefts, rights)]

    @parameterized.expand([("few", (3, 4, 50, 5)), ("one", (1, 1, 7, 1)), ("group", (2, 3, 40, 20))])
    @pytest.mark.quick(3)
    def test_bmm(self, _name, size):
        rng = generator(7)
        for i, (name, x, w) in enumerate(self.batches(*size, rng)):
            with self.subTest(name):
                y = scaled_oracles.matmul(x.e, w.e)
                check(aten.bmm.default, DTYPES[i % 4], y, x, w)
                check(aten.matmul.default, DTYPES[i % 4], y, x, w)
                bias = plain([(*size[:1], 1, *size[3:]), (1, *size[1:2], 1)][i % 2], rng)
                want = scaled_oracles.biased(y, array(bias), 0.7, -1.5)
                check(aten.baddbmm.default, torch.float32, want, bias, x, w, alpha=0.7, beta=-1.5)

    def test_matmul(self):
        """Vectors, matrices and batches that broadcast."""
        rng = generator(8)
        shapes = [
            *[((9,), (9,)), ((9,), (9, 4)), ((3, 9), (9,)), ((3, 9), (9, 4)), ((2, 3, 9), (9,)), ((9,), (2, 9, 4))],
            *[((2, 3, 9), (9, 4)), ((3, 9), (2, 9, 4)), ((2, 3, 9), (2, 9, 4)), ((1, 3, 9), (5, 9, 4))],
            *[((5, 3, 9), (1, 9, 4)), ((2, 1, 3, 9), (3, 9, 4)), ((2, 1, 3, 9), (1, 4, 9, 2)), ((1, 9), (9, 1))],
            *[((2, 2, 3, 9), (9, 4)), ((1, 1, 1, 9), (1, 9, 1)), ((0, 3, 9), (9, 4)), ((2, 3, 9), (1, 9, 0))],
        ]
        lefts = [
            Quantizer(INT8),
            Quantizer(INT8, (1, -1)),
            Quantizer(UINT8, (1, -1), MinMax()),
            Quantizer(INT8, scale=MinMax()),
            Quantizer(INT8, (1, 4)),
        ]
        rights = [Quantizer(INT8), Quantizer(UINT8, scale=MinMax()), Quantizer(INT8, (-1, 1)), Quantizer(INT4, (4, 1))]
        for i, ((a, b), left, right) in enumerate(itertools.product(shapes, lefts, rights)):
            if len(b) == 1 and right.block[-1] == 1:
                right = Quantizer(right.format, (right.block[-2],), right.scale)  # along K
            with self.subTest(f"{a} {left} @ {b} {right}"):
                x, w = scaled_oracles.make(left, a, rng), scaled_oracles.make(right, b, rng)
                check(aten.matmul.default, DTYPES[i % 4], scaled_oracles.matmul(x.e, w.e), x, w)
