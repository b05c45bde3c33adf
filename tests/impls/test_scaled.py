"""hop.scaled and hop.pack against numpy: integers bit for bit, floats within what their sums allow.

Operands are made of any codes, scales and zero points, the outermost codes often (scaled_oracles.make), not of numbers
that were quantized: what a product does with them must not depend on how they came about.
"""

import copy
import dataclasses
import itertools
import math
import re
import tempfile
import unittest
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import Tensor

import hop
from hop import presets
from hop.dispatch.operand import encode
from hop.impls.pack import layout_for
from hop.impls.scaled import scaled_buffers
from hop.kernels.cpu import native
from hop.nn import stored
from hop.numerics import blocks
from hop.numerics.formats import E2M1, E4M3, E5M2, INT4, INT8, TERNARY, UINT4, UINT8
from hop.numerics.layouts import Decoded, Summed, Tiled, sums_first
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FixedPoint, FloatMultiplier, Requantization
from hop.numerics.scale_rules import AbsMean, Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel
from hop.tensor.quantized import operand
from tests.support import numerics, scaled_oracles
from tests.support.errors import assert_refused
from tests.support.files import read_back
from tests.support.scaled_oracles import (
    Elements,
    Geometry,
    Pair,
    Plain,
    array,
    assert_bits,
    assert_buffers,
    cast,
    f32,
    f64,
)

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COLUMNS, BOTH = ("columnwise",), ("rowwise", "columnwise")


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng([1, *seed])


def plain(shape: Sequence[int], rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return scaled_oracles.tensor(cast(rng.standard_normal(tuple(shape)), dtype))


def reference(op: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """The meaning, without plans and kernels."""
    if isinstance(output, Quantizer):
        raise TypeError("buffers")
    return scaled_buffers.reference(op, output, None, None, *encode([operand(a) for a in args]), **kwargs)


def unwrapped(args: Sequence[Any]) -> list[Any]:
    """Arguments for the library."""
    return [
        a.t if isinstance(a, Pair | Plain) else unwrapped(a) if isinstance(a, list) and _holds(a) else a for a in args
    ]


def _holds(a: list[Any]) -> bool:
    return any(isinstance(x, Pair | Plain) for x in a)


def decoded(t: Any) -> Any:
    """A tensor of floats as the numbers that they stand for; any other as it is."""
    return hop.pack(t, Decoded()) if t.quantizer.format.name in numerics.FLOATS and not t.quantizer.flat else t


def run(op: Any, output: torch.dtype, *args: Any, exact: bool = True, **kwargs: Any) -> Tensor:
    """The result; the second call, by a plan, has the same bits, and so has the meaning itself where it is `exact`."""
    given = unwrapped(args)
    first = hop.scaled(op, output, *given, **kwargs)
    assert type(first) is Tensor, type(first)
    assert first.dtype == output, f"{first.dtype}, not {output}"
    assert_bits(hop.scaled(op, output, *given, **kwargs), array(first), "the second call")
    if exact:
        assert_bits(reference(op, output, *given, **kwargs), array(first), "the reference")
    return first


def check(op: Any, output: torch.dtype, want: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """`want` is float32, or float64 where a plain operand is."""
    with np.errstate(all="ignore"):
        rounded = cast(want, output)
    assert_bits(run(op, output, *args, **kwargs), rounded, f"{op} in {output}")


# ---- integers


AFFINE = {"scale": MinMax()}
INTEGERS = {
    "int8_tensor": Quantizer(INT8),
    "int8_row": Quantizer(INT8, (1, -1)),
    "int8_groups_32": Quantizer(INT8, (1, 32)),
    "int8_groups_20": Quantizer(INT8, (1, 20)),
    "int8_tiles": Quantizer(INT8, (3, 16)),
    "int8_tensor_affine": Quantizer(INT8, **AFFINE),
    "int8_row_affine": Quantizer(INT8, (1, -1), **AFFINE),
    "int8_groups_32_affine": Quantizer(INT8, (1, 32), **AFFINE),
    "int8_static": Quantizer(INT8, scale=Static(affine=True)),
    "uint8_tensor": Quantizer(UINT8),
    "uint8_row": Quantizer(UINT8, (1, -1)),
    "uint8_tensor_affine": Quantizer(UINT8, **AFFINE),
    "uint8_row_affine": Quantizer(UINT8, (1, -1), **AFFINE),
    "int4_row": Quantizer(INT4, (1, -1)),
    "int4_groups_32": presets.INT4_32,
    "uint4_groups_32_affine": presets.UINT4_32_AFFINE,
    "uint4_groups_16": Quantizer(UINT4, (1, 16)),
    "ternary_tensor": presets.TERNARY_TENSOR,
    "ternary_row": presets.TERNARY_ROW,
    "ternary_groups": Quantizer(TERNARY, (1, 24), AbsMean()),
}
PAIRS = [(f"{a}__{b}", INTEGERS[a], INTEGERS[b]) for a, b in itertools.product(INTEGERS, INTEGERS)]
# The sizes (M, K, N). K is a multiple of no group, of one, of all; and N is a group, as K might be taken for.
SIZES = [(5, 70, 9), (3, 64, 32), (1, 33, 7), (17, 96, 20), (2, 1, 3), (4, 16, 1)]


def sizes(i: int) -> tuple[int, int, int]:
    return SIZES[i % len(SIZES)]


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


# ---- convolutions of integers


def _each(rank: int, v: Any) -> list[int]:
    """A number for each dimension."""
    return [v] * rank if isinstance(v, int) else list(v)


def conv(rank: int, x: Sequence[int], w: Sequence[int], stride=1, padding: Any = 0, dilation=1, groups=1) -> Any:
    """The operator, the shapes of input and weight, the arguments behind the bias, and the oracle's."""
    each = partial(_each, rank)
    op = {1: aten.conv1d, 2: aten.conv2d, 3: aten.conv3d}[rank]
    if isinstance(padding, str):
        g = Geometry(each(stride), [0] * rank, each(dilation), False, [0] * rank, groups)
        return op.padding, x, w, [each(stride), padding, each(dilation), groups], g
    g = Geometry(each(stride), each(padding), each(dilation), False, [0] * rank, groups)
    return op.default, x, w, [each(stride), each(padding), each(dilation), groups], g


def conv_transpose(
    rank: int,
    x: Sequence[int],
    w: Sequence[int],
    stride=1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups=1,
    dilation=1,
) -> Any:
    each = partial(_each, rank)
    ops = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}
    lists = [each(v) for v in (stride, padding, output_padding)]
    g = Geometry(lists[0], lists[1], each(dilation), True, lists[2], groups)
    return ops[rank], x, w, [*lists, groups, each(dilation)], g


def general(x: Sequence[int], w: Sequence[int], *rest: Any) -> Any:
    return aten.convolution.default, x, w, list(rest), Geometry(*rest)


CONVOLUTIONS = {
    "one": conv(1, (2, 3, 11), (4, 3, 3)),
    "one_all": conv(1, (2, 4, 17), (6, 2, 3), 2, 3, 2, 2),
    "one_alone": conv(1, (4, 9), (6, 4, 2)),
    "one_same": conv(1, (2, 3, 11), (4, 3, 3), padding="same"),
    "one_same_even": conv(1, (2, 3, 11), (4, 3, 4), padding="same"),
    "one_same_dilated": conv(1, (2, 4, 11), (4, 2, 2), padding="same", dilation=3, groups=2),
    "one_valid": conv(1, (2, 3, 11), (4, 3, 3), 2, "valid"),
    "two": conv(2, (2, 3, 8, 7), (5, 3, 3, 2)),
    "two_padded": conv(2, (2, 3, 8, 7), (5, 3, 3, 3), padding=1),
    "two_all": conv(2, (2, 6, 9, 8), (4, 3, 3, 2), [2, 1], [1, 2], [1, 2], 2),
    "two_depthwise": conv(2, (1, 6, 8, 7), (6, 1, 3, 3), padding=1, groups=6),
    "two_depthwise_multiplied": conv(2, (3, 3, 8, 7), (6, 1, 3, 3), 2, 1, 1, 3),
    "two_pointwise": conv(2, (2, 8, 5, 5), (4, 8, 1, 1)),
    "two_alone": conv(2, (3, 8, 7), (5, 3, 3, 2), padding=1),
    "two_same": conv(2, (2, 3, 8, 7), (5, 3, 3, 5), padding="same", dilation=[2, 1]),
    "two_same_even": conv(2, (1, 3, 8, 7), (5, 3, 2, 4), padding="same"),
    "two_valid": conv(2, (2, 3, 8, 7), (5, 3, 3, 3), [2, 1], "valid"),
    "three": conv(3, (2, 2, 5, 6, 4), (3, 2, 2, 3, 2), padding=1),
    "three_all": conv(3, (1, 4, 7, 6, 5), (4, 2, 2, 3, 2), [2, 1, 1], [1, 0, 1], [1, 2, 1], 2),
    "three_same": conv(3, (1, 2, 5, 4, 3), (3, 2, 3, 2, 1), padding="same"),
    "transposed_one": conv_transpose(1, (2, 3, 7), (3, 4, 3)),
    "transposed_one_all": conv_transpose(1, (2, 4, 7), (4, 3, 3), 3, 1, 2, 2, 2),
    "transposed_one_alone": conv_transpose(1, (3, 7), (3, 4, 2), 2),
    "transposed_two": conv_transpose(2, (2, 4, 5, 4), (4, 3, 3, 2), 2, 1, 1),
    "transposed_two_all": conv_transpose(2, (2, 4, 5, 4), (4, 3, 3, 2), [2, 3], [1, 0], [1, 2], 2, [1, 2]),
    "transposed_two_cropped": conv_transpose(2, (1, 2, 6, 6), (2, 3, 2, 2), 1, 3),
    "transposed_three": conv_transpose(3, (1, 4, 3, 4, 2), (4, 2, 2, 3, 2), [2, 1, 2], [1, 1, 0], [1, 0, 0], 2),
    "general_one": general((2, 4, 9), (6, 2, 3), [2], [1], [2], False, [0], 2),
    "general_two": general((2, 3, 8, 7), (5, 3, 3, 2), [1, 2], [2, 1], [2, 1], False, [0, 0], 1),
    "general_three": general((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), [1, 1, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    "general_transposed": general((2, 4, 5, 4), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], True, [1, 0], 2),
    "general_transposed_one": general((2, 4, 5), (4, 2, 3), [2], [0], [1], True, [1], 1),
}


def whole_but(dim: int, ndim: int) -> tuple[int, ...]:
    """A block for each index of a dimension."""
    return tuple(1 if d == dim else -1 for d in range(ndim))


class TestConvolutions(unittest.TestCase):
    """Convolutions of integers with a scale for each example and each output channel, or fewer."""

    def inputs(self, shape: Sequence[int], batched: bool, rng: np.random.Generator) -> dict[str, Pair]:
        example = whole_but(0, len(shape)) if batched else (-1,)
        quantizers = {
            "tensor": Quantizer(INT8),
            "affine": Quantizer(INT8, scale=MinMax()),
            "uint8_affine": Quantizer(UINT8, scale=MinMax()),
            "uint8": Quantizer(UINT8),
            "example": Quantizer(INT8, example),
            "example_affine": Quantizer(UINT8, example, MinMax()),
            "int4": Quantizer(INT4, example),
        }
        return {name: scaled_oracles.make(q, shape, rng) for name, q in quantizers.items()}

    def weights(self, shape: Sequence[int], transposed: bool, rng: np.random.Generator) -> dict[str, Pair]:
        channel = whole_but(1 if transposed else 0, len(shape))
        quantizers = {
            "tensor": Quantizer(INT8),
            "channel": Quantizer(INT8, channel),
            "affine": Quantizer(INT8, scale=MinMax()),
            "channel_affine": Quantizer(INT8, channel, MinMax()),
            "uint8": Quantizer(UINT8, channel),
            "uint8_affine": Quantizer(UINT8, channel, MinMax()),
            "int4": Quantizer(INT4, channel),
            "uint4_affine": Quantizer(UINT4, channel, MinMax()),
            "ternary": Quantizer(TERNARY, channel, AbsMean()),
        }
        return {name: scaled_oracles.make(q, shape, rng) for name, q in quantizers.items()}

    def expected(self, x: Elements, w: Elements, args: Sequence[Any], g: Geometry, bias: Any = None) -> np.ndarray:
        if "same" in args:
            x = x._replace(n=scaled_oracles.same_padding(x.n, w.n.shape[2:], g.dilation))
        return scaled_oracles.convolution(x, w, g, bias)

    def formats(self, name: str, every: int) -> None:
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(*name.encode())
        inputs = self.inputs(x_shape, len(x_shape) == len(w_shape), rng)
        weights = self.weights(w_shape, g.transposed, rng)
        channels = w_shape[1] * g.groups if g.transposed else w_shape[0]
        start = list(CONVOLUTIONS).index(name) % every
        for i, (a, b) in list(enumerate(itertools.product(inputs, weights)))[start::every]:
            with self.subTest(f"{a} {b}"):
                x, w = inputs[a], weights[b]
                y = self.expected(x.e, w.e, args, g)
                check(op, DTYPES[i % 4], y, x, w, None, *args)
                bias = plain((channels,), rng, DTYPES[i % 4])
                want = scaled_oracles.biased(y, scaled_oracles.of_channels(array(bias), len(w_shape) - 2))
                check(op, DTYPES[i // 2 % 4], want, x, w, bias, *args)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.quick(3)
    def test_formats(self, name):
        self.formats(name, 11)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.full
    def test_all_formats(self, name):
        self.formats(name, 1)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.quick(2)
    def test_int32_bias(self, name):
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(2, *name.encode())
        x = self.inputs(x_shape, len(x_shape) == len(w_shape), rng)["example_affine"]
        w = self.weights(w_shape, g.transposed, rng)["channel_affine"]
        bias = rng.integers(-(2**31), 2**31, w_shape[1] * g.groups if g.transposed else w_shape[0]).astype(np.int32)
        y = self.expected(x.e, w.e, args, g, bias)
        check(op, torch.float32, y, x, w, torch.from_numpy(bias), *args)

    def test_numbers_for_lists(self):
        """A stride of 2 is [2, 2], as torch.nn.functional has it, and arguments at the end may be missing."""
        rng = generator(3)
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 4, 9, 8), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 2, 3, 3), rng)
        geometry = Geometry([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
        want = scaled_oracles.convolution(x.e, w.e, geometry)
        given = hop.scaled(aten.conv2d.default, torch.float32, x.t, w.t, None, 2, 1, 1, 2)
        assert_bits(given, want)
        named = hop.scaled(aten.conv2d.default, torch.float32, x.t, weight=w.t, stride=2, groups=2, padding=[1, 1])
        assert_bits(named, want)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 4, 3, 3), rng)
        plainly = Geometry([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        want = scaled_oracles.convolution(x.e, w.e, plainly)
        assert_bits(hop.scaled(aten.conv2d.default, torch.float32, x.t, w.t), want)

    def test_layouts(self):
        """Channels last, on either side, changes strides alone."""
        rng = generator(4)
        x = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (2, 4, 6, 5), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 4, 3, 3), rng)
        args = [[1, 1], [1, 1], [1, 1], 1]
        want = scaled_oracles.convolution(x.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))

        def last(p: Pair) -> Pair:
            buffers = p.t.buffers()
            buffers["codes"] = buffers["codes"].contiguous(memory_format=torch.channels_last)
            return Pair(hop.QuantizedTensor(buffers, p.t.quantizer, p.t.shape, p.t.dtype), p.e)

        for a, b in itertools.product((x, last(x)), (w, last(w))):
            check(aten.conv2d.default, torch.float32, want, a, b, None, *args)
        for as_columns in (x.view(lambda t: t.transpose(2, 3), lambda a: a.swapaxes(2, 3)),):
            y = scaled_oracles.convolution(as_columns.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
            check(aten.conv2d.default, torch.float32, y, as_columns, w, None, *args)


# ---- what integers may run into


def extremes(low: int, high: int) -> Callable[..., np.ndarray]:
    """Codes of the two ends of a format."""

    def codes(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.integers(0, 2, shape) == 0, low, high).astype(numerics.INTEGERS[q.format.name][4])

    return codes


def constant(value: int) -> Callable[..., np.ndarray]:
    return extremes(value, value)


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


# ---- floats


RATIOS: dict[str, float] = {}
"""The largest error of each kind of operands, in units of its bound: for whoever asks."""

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FLOATS = {
    "fp8_tensor": presets.FP8_TENSOR,
    "fp8_row": presets.FP8_ROW,
    "fp8_1x128": presets.FP8_1X128,
    "fp8_128x128": presets.FP8_128X128,
    "fp8_static": presets.FP8_TENSOR_STATIC,
    "fp8_e5m2_tensor": presets.FP8_E5M2_TENSOR,
    "fp8_e5m2_row": presets.FP8_E5M2_ROW,
    "fp8_e5m2_1x128": presets.FP8_E5M2_1X128,
    "fp8_row_power": Quantizer(E4M3, (1, -1), CurrentScaling(power_of_two=True)),
    "fp8_1x128_float": Quantizer(E4M3, (1, 128), BlockScaling(power_of_two=False)),
    "fp8_groups": Quantizer(E5M2, (1, 50), Amax()),
    "mxfp8": presets.MXFP8,
    "mxfp8_e5m2": presets.MXFP8_E5M2,
    "mxfp4": presets.MXFP4,
    "mxfp8_tile": Quantizer(E4M3, (8, 32), Microscaling()),
    "nvfp4": presets.NVFP4,
    "nvfp4_16x16": presets.NVFP4_16X16,
    "nvfp4_row": presets.NVFP4_ROW,
    "nvfp4_hadamard": presets.NVFP4_HADAMARD,
    "nvfp4_stochastic": presets.NVFP4_STOCHASTIC,
    "nvfp4_gradient": presets.NVFP4_GRADIENT,
    "nvfp4_outer_group": Quantizer(E2M1, (1, 16), TwoLevel(outer=(-1, 16))),
    "nvfp8": Quantizer(E4M3, (1, 16), TwoLevel()),
    "fp4_row": Quantizer(E2M1, (1, -1), CurrentScaling()),
}
BOOKS = {
    name.lower(): getattr(presets, name) for name in "STATE8 STATE8_UNSIGNED STATE4 STATE4_UNSIGNED STATE_FP8".split()
}
WEIGHTS = {**INTEGERS, **FLOATS, **BOOKS}


def factor(name: str, shape: Sequence[int], rng: np.random.Generator) -> Pair | Plain:
    if name in PLAIN:
        return Plain(plain(shape, rng, PLAIN[name]))
    return scaled_oracles.make(WEIGHTS[name], shape, rng, scales=small_scales)


def small_scales(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Which leave most results below what float16 can hold."""
    return scaled_oracles.random_scales(shape, rng) * f32(2.0**-6)


def meets(left: str, right: str) -> bool:
    """Whether a product of floats takes the two."""
    if left in PLAIN or right in PLAIN:
        return not (left in PLAIN and right in PLAIN)
    floats = {**FLOATS, "state_fp8": presets.STATE_FP8}
    return left in floats and right in floats


FLOAT_PAIRS = [(a, b) for a, b in itertools.product([*PLAIN, *WEIGHTS], [*PLAIN, *WEIGHTS]) if meets(a, b)]


class TestFloats(unittest.TestCase):
    """Products of floats against float64, within what sums in float32 allow (scaled_oracles.ratio)."""

    def within(
        self,
        name: str,
        op: Any,
        output: torch.dtype,
        x: Any,
        w: Any,
        product: Callable[[np.ndarray, np.ndarray], np.ndarray],
        terms: int,
        args: Callable[[Any, Any], list[Any]] = lambda x, w: [x, w],
        held: Any = None,
        **options: Any,
    ) -> None:
        """`held` stands for the weight in the call: the same numbers in another form."""
        kwargs = {k: v for k, v in options.items() if k in ("alpha", "beta")}
        got = run(op, output, *args(x, w if held is None else held), exact=False, **kwargs)
        wide = torch.float64 in [p.t.dtype for p in (x, w) if isinstance(p, Plain)]
        found = scaled_oracles.ratio(got, x.values(), w.values(), product, terms, wide=wide, **options)
        key = f"{name} in {output}".replace("torch.", "")
        RATIOS[key] = max(RATIOS.get(key, 0.0), found)
        assert found <= 1, f"{key}: {found} times the bound"

    def linear(self, left: str, right: str, m: int, k: int, n: int, output: torch.dtype, rng: Any) -> None:
        x, w = factor(left, (m, k), rng), factor(right, (n, k), rng)
        forms = {"": None}
        if isinstance(w, Pair):
            forms["packed "] = Pair(hop.pack(w.t), w.e)
            forms["decoded "] = Pair(decoded(w.t), w.e)
        for form, held in forms.items():
            name = f"{left} x {form}{right}"
            with self.subTest(f"{name} in {output}"):
                self.within(name, aten.linear.default, output, x, w, lambda a, b: a @ b.T, k, held=held)
                bias = plain((n,), rng, DTYPES[n % 3])
                options: dict[str, Any] = {"bias": array(bias), "held": held}
                self.within(
                    name,
                    aten.linear.default,
                    output,
                    x,
                    w,
                    lambda a, b: a @ b.T,
                    k,
                    lambda a, b, bias=bias: [a, b, bias],
                    **options,
                )

    @parameterized.expand(WEIGHTS)
    @pytest.mark.quick(7)
    def test_plain(self, right):
        """Activations in every dtype with weights of every quantizer."""
        for i, left in enumerate(PLAIN):
            rng = generator(*right.encode(), i)
            self.linear(left, right, 7, 160, 32, torch.bfloat16, rng)
            self.linear(left, right, 3, 33, 20, DTYPES[i], rng)

    @parameterized.expand(FLOATS)
    @pytest.mark.quick(10)
    def test_pairs(self, right):
        """Every two quantizers of floats."""
        for i, left in enumerate(FLOATS):
            rng = generator(*right.encode(), i)
            self.linear(left, right, 5, [160, 70][i % 2], 20, [torch.bfloat16, torch.float32][i // 2 % 2], rng)

    @parameterized.expand([(f"{a}__{b}", a, b) for a, b in FLOAT_PAIRS])
    @pytest.mark.full
    @pytest.mark.sampled(8)
    def test_many(self, _name, left, right):
        for i, ((m, k, n), output) in enumerate(itertools.product([(1, 1, 1), (17, 256, 32), (4, 300, 128)], DTYPES)):
            self.linear(left, right, m, k, n, output, generator(i))

    @parameterized.expand(FLOATS)
    @pytest.mark.quick(5)
    def test_operators(self, name):
        """mm, addmm, bmm, baddbmm and matmul, of weights that are turned, and packed and turned."""
        rng = generator(1, *name.encode())
        q = FLOATS[name]
        m, k, n = 6, 64, 10
        packs = name != "nvfp4_16x16"  # whose blocks cut its last rows
        for i, left in enumerate(["bfloat16", "fp8_row", "mxfp8", "nvfp4", "float32"]):
            output = [torch.bfloat16, torch.float32, torch.float16][i % 3]
            x = factor(left, (m, k), rng)
            forms: dict[str, tuple[Any, Any]] = {
                "columnwise": (scaled_oracles.make(q, (k, n), rng, COLUMNS), None),
                "both": (scaled_oracles.make(q, (k, n), rng, BOTH, usage="columnwise"), None),
            }
            weight = scaled_oracles.make(q, (n, k), rng)
            if q.format.bits == 8:
                forms["turned"] = weight.mT, None
            for way, pack in (("packed", hop.pack), ("decoded", decoded)):
                forms[way] = (
                    weight.view(lambda t: t, np.transpose),
                    weight.view(lambda t, pack=pack: pack(t).t(), np.transpose),
                )
            if q.hadamard is not None:
                del forms["columnwise"], forms["both"]
            for form, (w, held) in forms.items():
                with self.subTest(f"{left} {form}"):
                    what = f"mm {left} x {form} {name}"
                    self.within(what, aten.mm.default, output, x, w, np.matmul, k, held=held)
                    self.within(what, aten.matmul.default, output, x, w, np.matmul, k, held=held)
                    bias = plain((m, 1), rng)
                    options: dict[str, Any] = {"bias": array(bias), "alpha": 0.5, "beta": -3, "held": held}
                    self.within(
                        what,
                        aten.addmm.default,
                        output,
                        x,
                        w,
                        np.matmul,
                        k,
                        lambda a, b, bias=bias: [bias, a, b],
                        **options,
                    )
            x = factor(left, (2, m, k), rng)
            weight = scaled_oracles.make(q, (2, n, k), rng)
            held = weight.view(lambda t: decoded(t).transpose(1, 2), lambda a: a.swapaxes(1, 2))
            what = f"bmm {left} x packed {name}"
            if packs:
                with self.subTest(what):
                    bias = plain((2, 1, n), rng)
                    self.within(what, aten.bmm.default, output, x, held, np.matmul, k)
                    options = {"bias": array(bias), "alpha": 1.25}
                    self.within(
                        what,
                        aten.baddbmm.default,
                        output,
                        x,
                        held,
                        np.matmul,
                        k,
                        lambda a, b, bias=bias: [bias, a, b],
                        **options,
                    )
                    one = scaled_oracles.make(q, (n, k), rng)
                    one = one.view(lambda t: hop.pack(t).t(), np.transpose)
                    self.within(what, aten.matmul.default, output, x, one, np.matmul, k)

    @parameterized.expand(["float32", "bfloat16", "fp8_row", "mxfp8", "nvfp4"])
    def test_leading_dimensions(self, left):
        rng = generator(2)
        for right, lead in itertools.product(
            ["fp8_row", "mxfp4", "nvfp4", "int4_groups_32"], [(), (2, 3), (2, 1, 3), (0, 2)]
        ):
            if not meets(left, right):
                continue
            for output in (torch.bfloat16, torch.float32):
                x, w = factor(left, (*lead, 64), rng), factor(right, (10, 64), rng)
                with self.subTest(f"{right} {lead} {output}"):
                    self.within(f"lead {left} x {right}", aten.linear.default, output, x, w, lambda a, b: a @ b.T, 64)

    def test_quantized_on_the_left(self):
        """A plain right-hand side: a gradient times a quantized activation, say."""
        rng = generator(3)
        for left, right in itertools.product([*FLOATS, *INTEGERS, *BOOKS], ["bfloat16", "float32", "float64"]):
            x, w = factor(left, (6, 64), rng), factor(right, (64, 5), rng)
            for output in (torch.bfloat16, torch.float32):
                with self.subTest(f"{left} {right} {output}"):
                    self.within(f"mm {left} x {right}", aten.mm.default, output, x, w, np.matmul, 64)

    @parameterized.expand(
        ["two_all", "one_same", "transposed_two_all", "three", "general_two", "two_alone", "two_same_even"]
    )
    @pytest.mark.quick(5)
    def test_convolutions(self, name):
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(4, *name.encode())
        terms = w_shape[0 if g.transposed else 1] * math.prod(w_shape[2:])

        def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
            if "same" in args:
                x = scaled_oracles.same_padding(x, w.shape[2:], g.dilation)
            return g.of(x, w)

        flat = {"int8_channel": Quantizer(INT8, whole_but(0, len(w_shape))), "mxfp8": presets.MXFP8}
        weights = {**{k: FLOATS[k] for k in ("fp8_tensor", "fp8_row", "nvfp4", "mxfp4")}, **flat, **BOOKS}
        channels = w_shape[1] * g.groups if g.transposed else w_shape[0]
        for i, (left, right) in enumerate(itertools.product(["float32", "bfloat16", "float64", "fp8_tensor"], weights)):
            if left == "fp8_tensor" and (right == "int8_channel" or right.startswith("state")):
                continue
            with self.subTest(f"{left} {right}"):
                x, w = factor(left, x_shape, rng), scaled_oracles.make(weights[right], w_shape, rng)
                bias = plain((channels,), rng)
                beside = {"bias": scaled_oracles.of_channels(array(bias), len(w_shape) - 2)}
                held = Pair(hop.pack(w.t), w.e)
                what = f"convolution {left} x {right}"
                for form in (None, held):
                    with_bias = lambda a, b, bias=bias: [a, b, bias, *args]  # noqa: E731
                    self.within(what, op, DTYPES[i % 4], x, w, product, terms, with_bias, form, **beside)
                    self.within(what, op, DTYPES[i % 3], x, w, product, terms, lambda a, b: [a, b, None, *args], form)

    @parameterized.expand(
        ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4_row", "mxfp4", "int8_row", "int4_groups_32", "state8"]
    )
    @pytest.mark.quick(8)
    def test_small_sizes(self, right):
        """Sums of nothing are 0, and what has no elements keeps its shape."""
        rng = generator(7)
        lefts = [a for a in ("float32", "bfloat16", "float64", "fp8_row", "nvfp4") if meets(a, right)]
        for (m, k, n), left in itertools.product(itertools.product((0, 1, 3), (0, 1, 3), (0, 3)), lefts):
            for output in (torch.bfloat16, torch.float32):
                with self.subTest(f"{left} {m, k, n} {output}"):
                    x, w = factor(left, (m, k), rng), factor(right, (n, k), rng)
                    for held in (None, Pair(hop.pack(w.t), w.e)):
                        product = lambda a, b: a @ b.T  # noqa: E731
                        self.within(f"small {left} x {right}", aten.linear.default, output, x, w, product, k, held=held)

    @parameterized.expand(["fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "nvfp4", "mxfp4", "int8_row"])
    @pytest.mark.quick(2)
    def test_strides(self, right):
        """Weights and activations that are views, one after the other: no plan is taken for another layout."""
        rng = generator(8)
        q = WEIGHTS[right]
        w = factor(right, (32, 64), rng)
        packed = w.view(hop.pack, lambda a: a)
        weights = {
            "plain": w,
            "packed": packed,
            "sliced": factor(right, (64, 64), rng).view(lambda t: t[::2], lambda a: a[::2]),
            "packed_sliced": factor(right, (64, 64), rng).view(lambda t: decoded(t)[::2], lambda a: a[::2]),
            "expanded": factor(right, (1, 64), rng).view(
                lambda t: t.expand(32, 64), lambda a: np.broadcast_to(a, (32, 64))
            ),
            "packed_expanded": factor(right, (1, 64), rng).view(
                lambda t: decoded(t).expand(32, 64), lambda a: np.broadcast_to(a, (32, 64))
            ),
        }
        if q.format.bits == 8:
            buffers = w.t.buffers()
            buffers["codes"] = buffers["codes"].view(torch.uint8).t().contiguous().t().view(buffers["codes"].dtype)
            weights["turned"] = Pair(hop.QuantizedTensor(buffers, q, (32, 64), torch.float32), w.e)
        x = torch.from_numpy(array(plain((64, 8), rng)))
        lefts = {"plain": x.t().contiguous(), "turned": x.t(), "sliced": torch.cat([x.t(), x.t()], 1)[:, ::2]}
        lefts |= {f"{name}_bfloat16": t.bfloat16() for name, t in lefts.items()}
        lefts["one"] = x.t()[:1].bfloat16().expand(8, 64)
        for _, (left, x), (name, w), output in itertools.product(range(2), lefts.items(), weights.items(), DTYPES[:2]):
            with self.subTest(f"{left} {name} {output}"):
                self.within(
                    f"strides {left} x {right}", aten.linear.default, output, Plain(x), w, lambda a, b: a @ b.T, 64
                )

    def test_hadamard(self):
        """A column-wise copy is transformed, and its numbers are those before the transform."""
        rng = generator(9)
        weight = plain((64, 24), rng)
        for q in (presets.NVFP4_HADAMARD, presets.NVFP4_GRADIENT):
            for usages in (COLUMNS, BOTH):
                options = {"generator": torch.Generator().manual_seed(0)} if q.stochastic else {}
                t = hop.quantize(q, weight, usages=usages, **options)
                alone = {n: b for n, b in t.buffers().items() if n.startswith("columnwise")}
                numbers = array(hop.dequantize(hop.QuantizedTensor(alone, q, t.shape, t.dtype)))
                for left, output in itertools.product(["float32", "bfloat16", "fp8_row"], DTYPES):
                    x = factor(left, (5, 64), rng)
                    got = run(aten.mm.default, output, x, Pair(t, None), exact=False)  # type: ignore[arg-type]
                    found = scaled_oracles.ratio(got, x.values(), numbers, np.matmul, 64)
                    assert found <= 1, f"{usages} {left} {output}: {found}"

    @parameterized.expand(["fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"])
    def test_no_numbers(self, name):
        """NaN among codes and scales is NaN where a sum holds it, and nowhere else."""
        rng = generator(10)
        w = factor(name, (12, 128), rng)
        buffers = w.t.buffers()
        if FLOATS[name].format.bits == 8:
            buffers["codes"].view(torch.uint8)[3, 5] = 0x7F
        scale = buffers["scale"]
        if scale.shape[0] == 12:
            bad = {torch.uint8: 255, torch.float8_e4m3fn: 0x7F}.get(scale.dtype)
            if bad is None:
                scale[7] = math.nan
            else:
                scale.view(torch.uint8)[7, 0] = bad
        w = Pair(w.t, scaled_oracles.read(w.t))
        rows = np.isnan(w.values()).any(1)
        assert 0 < rows.sum() < 3, rows
        for left, output in itertools.product(["float32", "bfloat16", "fp8_row", "mxfp8", "nvfp4"], DTYPES):
            x = factor(left, (4, 128), rng)
            for held in (w.t, hop.pack(w.t)):
                got = hop.scaled(aten.linear.default, output, x.t, held)
                assert (np.isnan(array(got).astype(f32)) == rows).all(), f"{left} {output}"

    def test_sums_in_float32(self):
        """A sum that float16 or bfloat16 could not hold: large terms that cancel, and one small one."""
        k = 64
        x = torch.ones(1, k)
        w = torch.tensor([448.0, -448.0] * (k // 2 - 1) + [0.25, 0.0]).reshape(1, k)
        for q in (presets.FP8_TENSOR, presets.FP8_ROW, presets.MXFP8):
            held = hop.quantize(q, w)
            for left in (x, x.bfloat16(), hop.quantize(presets.FP8_ROW, x)):
                for output in DTYPES:
                    for form in (held, hop.pack(held)):
                        got = hop.scaled(aten.linear.default, output, left, form)
                        assert got.item() == 0.25, f"{q} {output}: {got}"

    def test_rows_of_their_own(self):
        """A row of huge numbers, of NaN or of infinities leaves the others as they are."""
        rng = generator(5)
        for name in ("fp8_row", "mxfp8", "nvfp4_row", "mxfp4"):
            q = FLOATS[name]
            for bad in (1e30, math.inf, math.nan):
                x, w = torch.randn(4, 64), plain((8, 64), rng)
                x[1] = bad
                alone = hop.quantize(q, torch.cat([x[:1], x[2:]])), hop.quantize(q, w)
                every = hop.quantize(q, x), alone[1]
                for output in DTYPES:
                    a, b = (hop.scaled(aten.linear.default, output, *p) for p in (alone, every))
                    assert_bits(torch.cat([b[:1], b[2:]]), array(a), f"{name} {bad} {output}")

    def test_numbers_as_hop_quantizes_them(self):
        """Real numbers, quantized by hop: the product of what they are dequantized to, in each output."""
        rng = generator(6)
        x, weight = plain((5, 160), rng), plain((24, 160), rng)
        for name, q in {**FLOATS, **BOOKS}.items():
            if name in ("fp8_static", "state4_unsigned", "state8_unsigned"):
                continue
            w = scaled_oracles.quantized(q, weight)
            assert_bits(hop.dequantize(w.t), w.values(), name)
            for left, output in itertools.product((Plain(x), Plain(x.bfloat16())), DTYPES):
                for held in (None, Pair(hop.pack(w.t), w.e)):
                    self.within(
                        f"real {name}", aten.linear.default, output, left, w, lambda a, b: a @ b.T, 160, held=held
                    )


# ---- operators between products


OUTPUTS: dict[str, Quantizer] = {
    "int8_tensor": presets.INT8_TENSOR,
    "int8_row": presets.INT8_ROW,
    "uint8_row_affine": presets.UINT8_ROW_AFFINE,
    "int8_static": presets.INT8_TENSOR_STATIC,
    "int8_static_affine": presets.INT8_TENSOR_STATIC_AFFINE,
    "uint8_static_rows": Quantizer(UINT8, (1, -1), Static(affine=True)),
    "int4_groups": Quantizer(INT4, (1, 4)),
    "ternary": presets.TERNARY_ROW,
    "fp8_row": presets.FP8_ROW,
    "fp8_static": presets.FP8_TENSOR_STATIC,
    "mxfp8": presets.MXFP8,
    "nvfp4": presets.NVFP4,
    "state8": presets.STATE8,
}


def given_scales(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """scale and zero_point where q wants them of the caller."""
    if not isinstance(q.scale, Static):
        return {}
    sizes = numerics.grid(shape, q.block)
    found = {"scale": (rng.uniform(0.02, 0.2, sizes) * 2.0 ** rng.integers(0, 8)).astype(f32)}
    if q.scale.affine:
        low, high, *_ = numerics.INTEGERS[q.format.name]
        found["zero_point"] = rng.integers(low, high + 1, sizes).astype(numerics.INTEGERS[q.format.name][4])
    return found


def check_quantized(op: Any, name: str, y: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """The result, quantized as numpy quantizes `y`, which is in float32."""
    q = OUTPUTS[name]
    rng = generator(*name.encode(), y.size)
    given = given_scales(q, y.shape, rng)
    with np.errstate(all="ignore"):
        want = numerics.quantize(q, y.astype(f32), **given)
    arguments = unwrapped(args)
    scales = {f"output_{k}": torch.from_numpy(v) for k, v in given.items()}
    got = hop.scaled(op, q, *arguments, **scales, **kwargs)
    assert_buffers(got, q, want, f"{op} in {name}")
    tensors = [a for a in arguments if isinstance(a, Tensor)] or [a for a in arguments[0] if isinstance(a, Tensor)]
    assert got.shape == y.shape
    assert got.dtype == tensors[0].dtype


def check_all(op: Any, y: np.ndarray, *args: Any, outputs: Sequence[str] = tuple(OUTPUTS), **kwargs: Any) -> None:
    """In every dtype, and quantized in every way."""
    for dtype in DTYPES:
        check(op, dtype, y, *args, **kwargs)
    for name in outputs:
        check_quantized(op, name, y, *args, **kwargs)


OTHERS = {**INTEGERS, **{name: FLOATS[name] for name in ("fp8_tensor", "fp8_row", "mxfp8", "mxfp4", "nvfp4")}, **BOOKS}
WEIGHT_PRESETS = [(name, q) for name, q in presets.PRESETS.items() if q.block != (1, -1, -1, -1)]


class TestEmbedding(unittest.TestCase):
    """Rows of a quantized table."""

    @parameterized.expand(WEIGHT_PRESETS)
    @pytest.mark.quick(8)
    def test_presets(self, name, q):
        rng = generator(*name.encode())
        for rows, size in [(40, 96), (33, 130), (5, 1)]:
            w = scaled_oracles.make(q, (rows, size), rng)
            for i, shape in enumerate([(), (7,), (3, 4), (0,), (2, 0), (2, 1, 3)]):
                at = rng.integers(0, rows, shape)
                with self.subTest(f"{rows, size} {shape}"):
                    want = w.values()[at]
                    wide = torch.from_numpy(np.asarray(at))
                    check(aten.embedding.default, DTYPES[(i + size) % 4], want, w, wide)
                    check(aten.embedding.default, DTYPES[(i + size + 1) % 4], want, w, wide, 3)
                    indices = torch.from_numpy(np.asarray(at, np.int32))
                    check(aten.embedding.default, torch.float32, want, w, indices, -1, False, False)

    @parameterized.expand(["int8_row", "uint8_static_rows", "nvfp4", "mxfp8", "int8_static_affine"])
    def test_quantized(self, output):
        rng = generator(1)
        for q in (presets.INT8_ROW_AFFINE, presets.INT4_32, presets.NVFP4_16X16, presets.FP8_128X128):
            w, at = scaled_oracles.make(q, (40, 64), rng), rng.integers(0, 40, (3, 5))
            check_quantized(aten.embedding.default, output, w.values()[at], w, torch.from_numpy(at))

    def test_packed_and_views(self):
        """A table in bfloat16, and one that is a view of a larger one."""
        rng = generator(2)
        at = rng.integers(0, 20, (4, 3))
        for name, q in FLOATS.items():
            with self.subTest(name):
                w = scaled_oracles.make(q, (20, 64), rng)
                check(
                    aten.embedding.default,
                    torch.float32,
                    w.values()[at],
                    Pair(hop.pack(w.t), w.e),
                    torch.from_numpy(at),
                )
        for q in (presets.INT8_ROW, presets.INT4_32, presets.MXFP8, presets.NVFP4):
            w = scaled_oracles.make(q, (40, 64), rng).view(lambda t: t[10:30], lambda a: a[10:30])
            check(aten.embedding.default, torch.float32, w.values()[at], w, torch.from_numpy(at))

    def test_one_bad_row(self):
        """A row of NaN or infinities stays where it is."""
        table = torch.randn(10, 32)
        table[3, 5], table[4, 0] = math.nan, math.inf
        for q in (presets.FP8_ROW, presets.MXFP8, presets.INT8_ROW):
            w = scaled_oracles.quantized(q, table)
            check(aten.embedding.default, torch.float32, w.values()[[3, 4, 5, 3]], w, torch.tensor([3, 4, 5, 3]))


class TestArithmetic(unittest.TestCase):
    """add, sub and mul: in float32 on the numbers, every operation rounded."""

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(6)
    def test_add_and_sub(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        others = {
            "same": scaled_oracles.make(OTHERS[name], (3, 40), rng),
            "int8": scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 40), rng),
            "row": scaled_oracles.make(presets.INT8_ROW, (2, 1, 40), rng),
            "column": scaled_oracles.make(presets.FP8_ROW, (3, 1), rng),
            "float32": Plain(plain((40,), rng)),
            "bfloat16": Plain(plain((3, 1), rng, torch.bfloat16)),
            "number": Plain(plain((), rng, torch.float16)),
        }
        for i, (kind, y) in enumerate(others.items()):
            a, b = x.values(), y.values().astype(f32)
            for alpha in (1, 2, -1, 0.1):
                with self.subTest(f"{kind} alpha={alpha}"):
                    scaled = b if alpha == 1 else b * f32(alpha)
                    kwargs = {} if alpha == 1 else {"alpha": alpha}
                    check(aten.add.Tensor, DTYPES[i % 4], a + scaled, x, y, **kwargs)
                    check(aten.sub.Tensor, DTYPES[i % 4], a - scaled, x, y, **kwargs)
                    as_columns = a if alpha == 1 else a * f32(alpha)
                    check(aten.sub.Tensor, DTYPES[i % 4], b - as_columns, y, x, **kwargs)

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(3)
    def test_mul(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        for i, y in enumerate(
            [
                scaled_oracles.make(OTHERS[name], (3, 40), rng),
                scaled_oracles.make(presets.UINT8_ROW_AFFINE, (2, 3, 1), rng),
                scaled_oracles.make(presets.NVFP4, (40,), rng),
                Plain(plain((3, 40), rng)),
                Plain(plain((), rng, torch.bfloat16)),
            ]
        ):
            want = x.values() * y.values().astype(f32)
            check(aten.mul.Tensor, DTYPES[i % 4], want, x, y)
            check(aten.mul.Tensor, DTYPES[i % 4], want, y, x)

    @parameterized.expand(["int8_row_affine", "int4_groups_32", "nvfp4", "state8"])
    def test_numbers(self, name):
        rng = generator(3)
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        a = x.values()
        for number in (0, 1, -2, 3.5, 0.1, 1e-3):
            check(aten.mul.Scalar, torch.float32, a * f32(number), x, number)
            check(aten.add.Scalar, torch.float32, a + f32(number), x, number)
            check(aten.sub.Scalar, torch.bfloat16, a - f32(number), x, number)
            check(aten.mul.Tensor, torch.float32, a * f32(number), x, Plain(torch.tensor(number, dtype=torch.float32)))
        check(aten.add.Scalar, torch.float32, a + f32(0.75), x, 1.5, 0.5)
        check(aten.sub.Scalar, torch.float32, a - f32(0.75), x, 1.5, 0.5)

    def test_float64(self):
        """Beside a plain float64 everything is float64."""
        rng = generator(4)
        for q in (presets.INT8_ROW_AFFINE, presets.FP8_TENSOR, presets.NVFP4):
            x, y = scaled_oracles.make(q, (3, 32), rng), Plain(plain((3, 32), rng, torch.float64))
            a, b = x.values().astype(f64), y.values()
            for dtype in DTYPES:
                check(aten.add.Tensor, dtype, a + b * 0.1, x, y, alpha=0.1)
                check(aten.sub.Tensor, dtype, b - a, y, x)
                check(aten.mul.Tensor, dtype, a * b, x, y)
                check(aten.cat.default, dtype, np.concatenate([a, b]), [x, y])

    @parameterized.expand(OUTPUTS)
    @pytest.mark.quick(2)
    def test_quantized(self, output):
        rng = generator(5)
        for left, right in [
            (presets.INT8_TENSOR_AFFINE, presets.UINT8_TENSOR_AFFINE),
            (presets.INT8_ROW, presets.INT4_32),
            (presets.FP8_ROW, presets.NVFP4),
        ]:
            x, y = scaled_oracles.make(left, (6, 40), rng), scaled_oracles.make(right, (6, 40), rng)
            a, b = x.values(), y.values()
            check_quantized(aten.add.Tensor, output, a + b * f32(0.3), x, y, alpha=0.3)
            check_quantized(aten.sub.Tensor, output, a - b, x, y)
            check_quantized(aten.mul.Tensor, output, a * b, x, y)
            check_quantized(aten.mul.Scalar, output, a * f32(-0.7), x, -0.7)
            check_quantized(aten.add.Tensor, output, b[0] + a, Plain(torch.from_numpy(b[0].copy())), x)


def without_negative_zero(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """PyTorch leaves the sign of a maximum of zeros open."""
    codes = scaled_oracles.random_codes(q, shape, rng)
    zero = {"e2m1": 0x08, "e4m3": 0x80, "e5m2": 0x80}.get(q.format.name)
    return codes if zero is None else np.where(codes == zero, np.uint8(0), codes).astype(np.uint8)


MAX_POOLS = {
    "one": (aten.max_pool1d.default, (2, 3, 11), [[3]]),
    "one_all": (aten.max_pool1d.default, (2, 3, 11), [[3], [2], [1], [2], True]),
    "one_alone": (aten.max_pool1d.default, (3, 11), [[2], [1]]),
    "two": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 2]]),
    "two_padded": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1]]),
    "two_ceil": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 3], [1, 0], [1, 2], True]),
    "two_alone": (aten.max_pool2d.default, (3, 9, 8), [[2, 2], [], [0, 0]]),
    "three": (aten.max_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 1, 1], True]),
    "three_alone": (aten.max_pool3d.default, (2, 6, 5, 4), [[2, 2, 2]]),
}


VIEWS: dict[str, tuple[Any, list[Any], Callable[[np.ndarray], np.ndarray]]] = {
    "view": (aten.view.default, [[6, 160]], lambda a: a.reshape(6, 160)),
    "view_inferred": (aten.view.default, [[-1, 40]], lambda a: a.reshape(-1, 40)),
    "reshape": (aten.reshape.default, [[4, 6, 40]], lambda a: a.reshape(4, 6, 40)),
    "reshape_cuts": (aten.reshape.default, [[16, 60]], lambda a: a.reshape(16, 60)),
    "flatten": (aten.flatten.using_ints, [], lambda a: a.reshape(-1)),
    "flatten_some": (aten.flatten.using_ints, [1, 2], lambda a: a.reshape(2, 12, 40)),
    "unflatten": (aten.unflatten.int, [3, [5, 8]], lambda a: a.reshape(2, 3, 4, 5, 8)),
    "permute": (aten.permute.default, [[3, 0, 2, 1]], lambda a: a.transpose(3, 0, 2, 1)),
    "transpose": (aten.transpose.int, [-1, 1], lambda a: a.swapaxes(-1, 1)),
    "unsqueeze": (aten.unsqueeze.default, [-1], lambda a: a[..., None]),
    "squeeze": (aten.squeeze.default, [], lambda a: a),
    "squeeze_dim": (aten.squeeze.dim, [0], lambda a: a),
    "squeeze_dims": (aten.squeeze.dims, [[0, 1]], lambda a: a),
    "expand": (aten.expand.default, [[5, 2, 3, 4, 40]], lambda a: np.broadcast_to(a, (5, 2, 3, 4, 40))),
    "slice": (aten.slice.Tensor, [3, 3, 37, 2], lambda a: a[..., 3:37:2]),
    "slice_outer": (aten.slice.Tensor, [1, 1], lambda a: a[:, 1:]),
    "slice_from_behind": (aten.slice.Tensor, [2, -3, -1], lambda a: a[:, :, -3:-1]),
    "select": (aten.select.int, [1, -1], lambda a: a[:, -1]),
    "select_last": (aten.select.int, [3, 7], lambda a: a[..., 7]),
    "narrow": (aten.narrow.default, [2, 1, 2], lambda a: a[:, :, 1:3]),
    "clone": (aten.clone.default, [], lambda a: a),
    "contiguous": (aten.contiguous.default, [], lambda a: a),
    "alias": (aten.alias.default, [], lambda a: a),
    "movedim": (aten.movedim.int, [0, 2], lambda a: np.moveaxis(a, 0, 2)),
    "movedims": (aten.movedim.intlist, [[0, 1], [2, 0]], lambda a: np.moveaxis(a, [0, 1], [2, 0])),
}


class TestValues(unittest.TestCase):
    """cat, activations, maxima and views: numbers that the operand has."""

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(2)
    def test_activations(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (6, 40), rng, codes=without_negative_zero)
        a, top = x.values(), float(np.abs(x.values()).max())
        low, high = -top / 3, top / 4
        outputs = list(OUTPUTS)[len(name) % 3 :: 3]
        check_all(aten.relu.default, np.maximum(a, f32(0)), x, outputs=outputs)
        check_all(aten.clamp.default, np.clip(a, f32(low), f32(high)), x, low, high, outputs=outputs)
        check(aten.clamp.default, torch.float32, np.maximum(a, f32(low)), x, low)
        check(aten.clamp.default, torch.float32, np.minimum(a, f32(high)), x, None, high)
        check(aten.clamp.default, torch.float32, np.minimum(a, f32(high)), x, max=high)
        check(aten.hardtanh.default, torch.bfloat16, np.clip(a, f32(-1), f32(1)), x)
        check(aten.hardtanh.default, torch.float32, np.clip(a, f32(0), f32(6)), x, 0, 6)

    @parameterized.expand([*OTHERS][::3])
    @pytest.mark.quick(2)
    def test_cat(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        y, z = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 40), rng), Plain(plain((3, 40), rng, torch.bfloat16))
        parts = [x, y, z, x]
        arrays = [p.values().astype(f32) for p in parts]
        outputs = list(OUTPUTS)[len(name) % 3 :: 3]
        check_all(aten.cat.default, np.concatenate(arrays), parts, outputs=outputs)
        check_all(aten.cat.default, np.concatenate(arrays[1:], 1), parts[1:], 1, outputs=outputs)
        check_all(aten.cat.default, np.concatenate(arrays[::-1], -1), parts[::-1], -1, outputs=outputs)
        check(aten.cat.default, torch.float32, arrays[0], [x])

    @parameterized.expand(MAX_POOLS)
    @pytest.mark.quick(2)
    def test_max_pool(self, name):
        op, shape, args = MAX_POOLS[name]
        rng = generator(*name.encode())
        for kind in [*OTHERS][len(name) % 4 :: 4]:
            x = scaled_oracles.make(OTHERS[kind], shape, rng, codes=without_negative_zero)
            with self.subTest(kind):
                check_all(op, scaled_oracles.max_pool(x.values(), *args), x, *args, outputs=list(OUTPUTS)[:5])

    @parameterized.expand(VIEWS)
    @pytest.mark.quick(4)
    def test_views(self, name):
        """All are new tensors, of the numbers that the view has."""
        op, args, of_array = VIEWS[name]
        rng = generator(*name.encode())
        start = list(VIEWS).index(name)
        for kind in [*OTHERS][start % 5 :: 5]:
            x = scaled_oracles.make(OTHERS[kind], (2, 3, 4, 40), rng)
            with self.subTest(kind):
                check_all(op, of_array(x.values()), x, *args, outputs=list(OUTPUTS)[start % 4 :: 4])

    @parameterized.expand(["int8_row_affine", "fp8_tensor", "int4_groups_32"])
    @pytest.mark.quick(3)
    def test_views_of_ones(self, name):
        rng = generator(6)
        x = scaled_oracles.make(OTHERS[name], (1, 4, 1, 40), rng)
        a = x.values()
        for op, args, want in [
            (aten.squeeze.default, [], a.reshape(4, 40)),
            (aten.squeeze.dim, [2], a.reshape(1, 4, 40)),
            (aten.squeeze.dims, [[0, 2]], a.reshape(4, 40)),
            (aten.expand.default, [[3, -1, 2, 40]], np.broadcast_to(a, (3, 4, 2, 40))),
            (aten.t.default, [], None),
        ]:
            if op is aten.t.default:
                x = scaled_oracles.make(OTHERS[name], (6, 40), rng)
                want = x.values().T
            check_all(op, want, x, *args)

    def test_new_memory(self):
        """A view is a copy: to write to it changes no operand, be it plain."""
        x, y = hop.quantize(presets.INT8_TENSOR, torch.randn(2, 8)), torch.randn(2, 8)
        before = hop.dequantize(x), y.clone()
        for dtype in (torch.float32, torch.bfloat16):
            hop.scaled(aten.view.default, dtype, x, [16]).zero_()
            hop.scaled(aten.cat.default, dtype, [y, x]).zero_()
        for name in ("int8_row", "fp8_row"):
            made = hop.scaled(aten.alias.default, OUTPUTS[name], x)
            made.codes.view(torch.uint8).zero_()
            made.scale.zero_()
        assert_bits(hop.dequantize(x), array(before[0]))
        assert_bits(y, array(before[1]))

    @parameterized.expand([("columnwise", COLUMNS), ("both", BOTH)])
    def test_usages(self, _name, usages):
        """Tensors with column-wise copies: what is no product reads the row-wise one, if there is one."""
        rng = generator(7)
        for q in (presets.INT8_TENSOR_AFFINE, presets.INT8_ROW, presets.INT4_32, presets.MXFP8, presets.NVFP4):
            x = scaled_oracles.make(q, (32, 64), rng, usages, codes=without_negative_zero)
            a, at = x.values(), rng.integers(0, 32, 5)
            with self.subTest(f"{q}"):
                check(aten.relu.default, torch.float32, np.maximum(a, 0), x)
                check(aten.t.default, torch.float32, a.T, x)
                check(aten.add.Tensor, torch.float32, a + a, x, x)
                check(aten.embedding.default, torch.float32, a[at], x, torch.from_numpy(at))
                check_quantized(aten.mul.Scalar, "int8_row", a * f32(0.5), x, 0.5)
                y = a.mean(1, dtype=f64).astype(f32)
                if usages == BOTH:
                    y = scaled_oracles.mean_of(x.e, lambda a: a.mean(1), [1])
                check(aten.mean.dim, torch.float32, y, x, [1])

    def test_nan(self):
        """NaN and infinities are among the numbers."""
        table = torch.tensor([[math.nan, 1.0, 2.0, math.inf], [0.5, 0.0, -math.inf, 3.0]])
        x = scaled_oracles.quantized(presets.MXFP8, table)
        a = x.values()
        assert np.isnan(a).any()
        check(aten.relu.default, torch.float32, np.where(np.isnan(a), a, np.maximum(a, 0)), x)
        check(aten.clamp.default, torch.float32, np.clip(a, f32(-1), f32(1)), x, -1, 1)
        check(aten.max_pool1d.default, torch.float32, scaled_oracles.max_pool(a, [2]), x, [2])


AVERAGED = {
    "int8_tensor": presets.INT8_TENSOR,
    "int8_tensor_affine": presets.INT8_TENSOR_AFFINE,
    "uint8_tensor_affine": presets.UINT8_TENSOR_AFFINE,
    "uint8_tensor": presets.UINT8_TENSOR,
    "int8_rows": presets.INT8_ROW,
    "int8_examples": Quantizer(INT8, (1, -1, -1, -1), MinMax()),
    "int8_channels": Quantizer(INT8, (-1, 1, -1, -1)),
    "int8_groups": Quantizer(INT8, (1, 4), MinMax()),
    "int4_rows": Quantizer(INT4, (1, -1)),
    "uint4_groups": Quantizer(UINT4, (1, 3), MinMax()),
    "ternary": presets.TERNARY_TENSOR,
    "fp8_tensor": presets.FP8_TENSOR,
    "fp8_row": presets.FP8_ROW,
    "mxfp8": presets.MXFP8,
    "nvfp4": presets.NVFP4,
    "state8": presets.STATE8,
}


AVG_POOLS = {
    "one": (aten.avg_pool1d.default, (2, 3, 11), [[3]]),
    "one_all": (aten.avg_pool1d.default, (2, 3, 11), [[3], [2], [1], True, False]),
    "one_alone": (aten.avg_pool1d.default, (3, 11), [[4], [3], [2]]),
    "two": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 2]]),
    "two_padded": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1]]),
    "two_ceil": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 3], [1, 0], True]),
    "two_uncounted": (aten.avg_pool2d.default, (2, 3, 9, 8), [[4, 3], [3, 2], [2, 1], True, False]),
    "two_divisor": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1], False, True, 7]),
    "two_alone": (aten.avg_pool2d.default, (3, 9, 8), [[2, 2], [], [0, 0]]),
    "three": (aten.avg_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2]]),
    "three_all": (aten.avg_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2], [2, 2, 1], [1, 1, 1], True, False]),
    "three_divisor": (aten.avg_pool3d.default, (2, 6, 5, 4), [[2, 2, 3], [2, 1, 1], [0, 1, 1], False, True, 5]),
    "adaptive_one": (aten.adaptive_avg_pool1d.default, (2, 3, 11), [[4]]),
    "adaptive_one_all": (aten.adaptive_avg_pool1d.default, (3, 11), [[1]]),
    "adaptive_two": (aten.adaptive_avg_pool2d.default, (2, 3, 9, 8), [[4, 3]]),
    "adaptive_two_all": (aten.adaptive_avg_pool2d.default, (2, 3, 9, 8), [[1, 1]]),
    "adaptive_two_alone": (aten.adaptive_avg_pool2d.default, (3, 9, 8), [[9, 5]]),
    "adaptive_three": (aten.adaptive_avg_pool3d.default, (1, 2, 6, 5, 4), [[4, 5, 3]]),
    "adaptive_three_all": (aten.adaptive_avg_pool3d.default, (2, 6, 5, 4), [[1, 1, 1]]),
}


class TestMeans(unittest.TestCase):
    """mean and average pools: of integers float32(mean of code differences) · scale, of others the mean of numbers."""

    @parameterized.expand(AVERAGED)
    @pytest.mark.quick(2)
    def test_mean(self, name):
        rng = generator(*name.encode())
        for shape in [(3, 4, 7, 9), (2, 3, 5), (4, 13), (37,)]:
            if len(shape) < len(AVERAGED[name].block) > 2:
                continue
            x = scaled_oracles.make(AVERAGED[name], shape, rng)
            n = len(shape)
            every = list(range(n))
            outputs = list(OUTPUTS)[:: 4 if n == 4 else 7]
            y = scaled_oracles.mean_of(x.e, lambda a: a.mean(), every)
            check_all(aten.mean.default, y, x, outputs=[])
            for i, dims in enumerate([[0], [-1], [-1, 0], every, [], None, [n - 1, n // 2]]):
                if dims and len({d % n for d in dims}) < len(dims):
                    continue
                for keep in (False, True):
                    with self.subTest(f"{shape} {dims} {keep}"):
                        over = tuple(dims or every)
                        y = scaled_oracles.mean_of(
                            x.e, lambda a, over=over, keep=keep: a.mean(over, keepdims=keep), over
                        )
                        check_all(aten.mean.dim, y, x, dims, keep, outputs=outputs if y.ndim and i == 1 else [])

    def test_dtype_argument(self):
        """mean's own dtype has no say: the output is what scaled was asked for."""
        rng = generator(1)
        x = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 8), rng)
        y = scaled_oracles.mean_of(x.e, lambda a: a.mean(1), [1])
        check(aten.mean.dim, torch.float32, y, x, [1], dtype=torch.float16)

    @parameterized.expand(AVG_POOLS)
    def test_pools(self, name):
        op, shape, args = AVG_POOLS[name]
        rng = generator(*name.encode())
        windows = scaled_oracles.adaptive_avg_pool if name.startswith("adaptive") else scaled_oracles.avg_pool
        reduced = range(-len(args[0]), 0)
        kinds = {**AVERAGED, "int8_channel_rows": Quantizer(INT8, (*[1] * (len(shape) - 1), -1), MinMax())}
        kinds["int8_planes"] = Quantizer(INT8, (1,) * (len(shape) - len(args[0])) + (-1,) * len(args[0]), MinMax())
        for i, (kind, q) in enumerate(kinds.items()):
            if len(q.block) > len(shape):
                continue
            x = scaled_oracles.make(q, shape, rng)
            with self.subTest(kind):
                y = scaled_oracles.mean_of(x.e, lambda a: windows(a, *args), reduced)
                check_all(op, y, x, *args, outputs=list(OUTPUTS)[i % 5 :: 5])

    def test_exact_means(self):
        """A mean whose codes cancel is 0 exactly, whatever the scale; in float32 it would not be."""
        codes = torch.tensor([[127, -127, 3, -3, 101, -101, 77, -77, 1, -1]], dtype=torch.int8)
        scale = torch.tensor([[0.1]])
        x = hop.QuantizedTensor({"codes": codes, "scale": scale}, presets.INT8_TENSOR, (1, 10), torch.float32)
        assert hop.scaled(aten.mean.default, torch.float32, x).item() == 0
        assert hop.scaled(aten.avg_pool1d.default, torch.float32, x, [10]).item() == 0


class TestQuantizedProducts(unittest.TestCase):
    """Products of integers whose result is quantized: what numpy makes of the float32 result."""

    @parameterized.expand(OUTPUTS)
    def test_products(self, output):
        rng = generator(*output.encode())
        for left, right in [
            ("int8_row", "int8_row"),
            ("uint8_row_affine", "int8_row_affine"),
            ("int8_groups_20", "int4_groups_32"),
            ("int8_tensor", "ternary_tensor"),
        ]:
            x, w = (
                scaled_oracles.make(INTEGERS[left], (6, 70), rng),
                scaled_oracles.make(INTEGERS[right], (12, 70), rng),
            )
            y, bias = scaled_oracles.matmul(x.e, w.e.map(np.transpose)), plain((12,), rng)
            check_quantized(aten.linear.default, output, y, x, w)
            check_quantized(aten.linear.default, output, scaled_oracles.biased(y, array(bias)), x, w, bias)
            if right != "int4_groups_32" and right != "ternary_tensor":
                want = scaled_oracles.biased(y, array(bias), 2, 0.5)
                check_quantized(aten.addmm.default, output, want, bias, x, w.mT, alpha=2, beta=0.5)

    @parameterized.expand(OUTPUTS)
    def test_convolutions(self, output):
        rng = generator(*output.encode())
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 4, 6, 7), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (8, 4, 3, 3), rng)
        y = scaled_oracles.convolution(x.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
        bias = plain((8,), rng)
        check_quantized(
            aten.conv2d.default,
            output,
            scaled_oracles.biased(y, scaled_oracles.of_channels(array(bias), 2)),
            *(x, w, bias, [1, 1], [1, 1]),
        )

    def test_floats(self):
        """A product of floats is quantized from its result in float32."""
        rng = generator(2)
        x, w = factor("bfloat16", (6, 64), rng), factor("nvfp4", (12, 64), rng)
        for held in (w, Pair(hop.pack(w.t), w.e)):
            for left in (x, factor("fp8_row", (6, 64), rng)):
                y = array(hop.scaled(aten.linear.default, torch.float32, left.t, held.t))
                for output in OUTPUTS:
                    check_quantized(aten.linear.default, output, y, left, held)

    def test_round_half_to_even(self):
        """Halves between codes, on both sides of the zero point, at both ends."""
        codes = torch.arange(-128, 128, dtype=torch.int8).reshape(1, 256)
        one = torch.ones(1, 1)
        x = hop.QuantizedTensor({"codes": codes, "scale": one}, presets.INT8_TENSOR, (1, 256), torch.float32)
        for zero in (0, 1, -128, 127):
            got = hop.scaled(
                aten.alias.default,
                presets.INT8_TENSOR_STATIC_AFFINE,
                x,
                output_scale=torch.tensor(2.0),
                output_zero_point=torch.tensor(zero, dtype=torch.int8),
            )
            want = [max(-128, min(127, round(c / 2) + zero)) for c in range(-128, 128)]
            assert got.codes.flatten().tolist() == want

    def test_forms_of_given_scales(self):
        """Numbers, rows, other float dtypes; a zero point in floats is rounded to even and clamped."""
        rng = generator(3)
        x, w = scaled_oracles.make(presets.INT8_ROW, (6, 32), rng), scaled_oracles.make(presets.INT8_ROW, (8, 32), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        q = Quantizer(UINT8, (1, -1), Static(affine=True))
        for scale, zero in [
            (torch.tensor(50.0), torch.tensor(3, dtype=torch.uint8)),
            (torch.tensor([50.0], dtype=torch.float64), torch.tensor([2.5])),
            (torch.full((6, 1), 64.0, dtype=torch.bfloat16), torch.tensor([[300.0]])),
            (torch.linspace(20, 90, 6).reshape(6, 1), torch.tensor([-1.5, 0.5, 1.5, 2.5, 254.5, 255.5]).reshape(6, 1)),
        ]:
            given = {
                "scale": np.broadcast_to(array(scale).astype(f32), (6, 1)),
                "zero_point": np.broadcast_to(array(zero), (6, 1)),
            }
            want = numerics.quantize(q, y, **given)
            got = hop.scaled(aten.linear.default, q, x.t, w.t, output_scale=scale, output_zero_point=zero)
            assert_buffers(got, q, want)


CONVENTIONS: dict[str, Requantization] = {
    "float": FloatMultiplier(),
    "float_relu": FloatMultiplier(low=0.0),
    "gemmlowp": FixedPoint(rounding="gemmlowp"),
    "tflite": FixedPoint(rounding="tflite"),
    "away": FixedPoint(),
    "even": FixedPoint(rounding="even"),
    "away_clamped": FixedPoint(low=-3.0, high=6.0),
    "gemmlowp_relu6": FixedPoint(low=0.0, high=6.0, rounding="gemmlowp"),
}


class TestRequantization(unittest.TestCase):
    """From an exact sum to codes, by every convention, against Python's integers and fractions."""

    def check(
        self,
        op: Any,
        rule: Requantization,
        total: np.ndarray,
        lhs: np.ndarray,
        rhs: np.ndarray,
        *args: Any,
        scale: np.ndarray | None = None,
    ) -> np.ndarray:
        rng = generator(total.size)
        found = np.zeros(())
        for fmt, block, unit in [
            (INT8, (-1, -1), 1.0),
            (UINT8, (-1, -1), 4.0),
            (INT8, (1, -1), 0.05),
            (INT4, (-1, -1), 9.0),
        ]:
            q = Quantizer(fmt, block, Static(affine=True, requantize=rule))
            sizes = numerics.grid(total.shape, q.block)
            own = (rng.uniform(0.5, 1, sizes) * unit).astype(f32) if scale is None else np.broadcast_to(scale, sizes)
            kind = numerics.INTEGERS[fmt.name][4]
            zero = rng.integers(fmt.low, fmt.high + 1, sizes).astype(kind)
            with np.errstate(all="ignore"):
                codes = scaled_oracles.requantized(rule, total, lhs, rhs, own, zero, fmt.name)
            want = {"codes": codes if fmt.bits == 8 else numerics.pack(codes, 4), "scale": own, "zero_point": zero}
            given = {"output_scale": torch.from_numpy(np.array(own)), "output_zero_point": torch.from_numpy(zero)}
            got = hop.scaled(op, q, *unwrapped(args), **given)
            assert_buffers(got, q, want, f"{op} {rule} {fmt.name}")
            encoded = encode([operand(a) for a in unwrapped(args)])
            buffers = scaled_buffers.reference(op, q, *(t.expand(sizes) for t in given.values()), *encoded)
            for name, b in zip(want, buffers, strict=True):
                assert_bits(b, want[name], f"{name} of the reference")
            found = codes
        return found

    @parameterized.expand(CONVENTIONS)
    def test_products(self, name):
        rule, rng = CONVENTIONS[name], generator(1)
        for left, right in [
            ("int8_row", "int8_row"),
            ("uint8_tensor_affine", "int8_row_affine"),
            ("int8_tensor", "int4_row"),
        ]:
            x, w = scaled_oracles.make(INTEGERS[left], (5, 40), rng), scaled_oracles.make(INTEGERS[right], (9, 40), rng)
            total, a, b = x.e.n @ w.e.n.T, x.e.step[:, :1], w.e.step[:, 0]
            self.check(aten.linear.default, rule, total, a, b, x, w)
            bias = rng.integers(-(2**20), 2**20, 9).astype(np.int32)
            self.check(aten.linear.default, rule, total + bias, a, b, x, w, torch.from_numpy(bias))
            real = plain((9,), rng)
            in_units = array(real).astype(f64) / (a.astype(f64) * b.astype(f64))
            self.check(aten.linear.default, rule, total + np.rint(in_units).astype(np.int64), a, b, x, w, real)
            if right != "int4_row":
                self.check(aten.mm.default, rule, total, a, b, x, w.mT)

    @parameterized.expand(CONVENTIONS)
    def test_others(self, name):
        rule, rng = CONVENTIONS[name], generator(2)
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 3, 5), rng)
        w = scaled_oracles.make(Quantizer(INT8, (1, -1, -1)), (4, 3, 2), rng)
        g = Geometry([1], [1], [1], False, [0], 1)
        self.check(
            aten.conv1d.default,
            rule,
            g.of(x.e.n, w.e.n),
            x.e.step[:, :1, :1],
            w.e.step[:, :1, 0],
            *(x, w, None, [1], [1]),
        )
        a, b = (
            scaled_oracles.make(presets.INT8_ROW_AFFINE, (4, 6), rng),
            scaled_oracles.make(presets.INT8_COLUMN, (4, 6), rng),
        )
        self.check(aten.mul.Tensor, rule, a.e.n * b.e.n, a.e.step, b.e.step, a, b)
        one = np.ones((1, 1), f32)
        c = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (4, 6), rng)
        self.check(aten.relu.default, rule, np.maximum(c.e.n, 0), c.e.step, one, c)
        self.check(aten.t.default, rule, c.e.n.T, c.e.step.T, one, c)
        self.check(
            aten.max_pool1d.default, rule, np.maximum(c.e.n[:, ::2], c.e.n[:, 1::2]), c.e.step[:, ::2], one, c, [2]
        )

    @parameterized.expand(CONVENTIONS)
    def test_multipliers(self, name):
        """Of all sizes, with sums of all sizes: also where a shift has nothing left, or is to the left."""
        rule, rng = CONVENTIONS[name], generator(3)
        numbers = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 5, 127 * 127, -(2**20), 2**30, 12345678], np.int64)
        seen = set()
        for exponent in range(-60, 40, 3):
            # a sum that is what we say: 0 products of codes, and the bias
            x = scaled_oracles.make(presets.INT8_TENSOR, (1, 1), rng, codes=constant(0))
            w = scaled_oracles.make(presets.INT8_TENSOR, (len(numbers), 1), rng, codes=constant(0))
            x.t.scale.mul_(2.0**exponent)
            x = Pair(x.t, scaled_oracles.read(x.t))
            found = self.check(
                aten.linear.default,
                rule,
                numbers[None],
                x.e.step[:, :1],
                w.e.step[:, 0],
                *(x, w, torch.from_numpy(numbers.astype(np.int32))),
            )
            seen |= set(found.flatten().tolist())
        assert len(seen) > 1, seen

    @parameterized.expand(CONVENTIONS)
    def test_near_ties(self, name):
        """Sums that are next to a half of a code: how a multiplier is rounded, and in which order, shows there."""
        rng = generator(5)
        for _ in range(4):
            near_one: dict[str, Any] = {"codes": constant(0), "scales": lambda n, rng: rng.uniform(1, 2, n).astype(f32)}
            x = scaled_oracles.make(presets.INT8_TENSOR, (1, 1), rng, **near_one)
            w = scaled_oracles.make(presets.INT8_ROW, (250, 1), rng, **near_one)
            x.t.scale.mul_(2.0**-18)
            x = Pair(x.t, scaled_oracles.read(x.t))
            a, b, scale = x.e.step[:, :1], w.e.step[:, 0], rng.uniform(1, 2, (1, 1)).astype(f32)
            halves = np.arange(-125, 125) + 0.5
            numbers = np.rint(halves / (a.astype(f64) * b / scale.astype(f64))).astype(np.int64)
            assert np.abs(numbers).max() > 2**23, numbers
            self.check(aten.linear.default, CONVENTIONS[name], numbers, a, b, x, w, self.int32(numbers[0]), scale=scale)

    def int32(self, numbers: np.ndarray) -> Tensor:
        assert (np.abs(numbers) < 2**31).all()
        return torch.from_numpy(numbers.astype(np.int32))

    def test_ties(self):
        """Halves of both signs, by hand: up, away from zero, to even."""
        totals = torch.tensor([-5, -3, -1, 1, 3, 5], dtype=torch.int32)  # / 2
        want = {
            "tflite": [-2, -1, 0, 1, 2, 3],
            "away": [-3, -2, -1, 1, 2, 3],
            "even": [-2, -2, 0, 0, 2, 2],
            "gemmlowp": [-2, -1, 0, 1, 2, 3],
        }
        x = hop.quantize(presets.INT8_TENSOR_STATIC, torch.zeros(1, 1), scale=torch.tensor(1.0))
        w = hop.quantize(presets.INT8_TENSOR_STATIC, torch.zeros(6, 1), scale=torch.tensor(1.0))
        for rounding, codes in want.items():
            q = Quantizer(INT8, scale=Static(requantize=FixedPoint(rounding=rounding)))
            got = hop.scaled(aten.linear.default, q, x, w, totals, output_scale=torch.tensor(2.0))
            assert got.codes.flatten().tolist() == codes, rounding

    def test_activation_of_a_division(self):
        """Without a convention of integers the result is clamped, and then quantized."""
        rng = generator(4)
        x, w = scaled_oracles.make(presets.INT8_ROW, (4, 32), rng), scaled_oracles.make(presets.INT4_32, (6, 32), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        for low, high in [(0.0, None), (-100.0, 150.0), (None, 10.0)]:
            q = Quantizer(UINT8, scale=Static(affine=True, requantize=hop.requantization.Division(low=low, high=high)))
            given = {"scale": np.full((1, 1), 3.0, f32), "zero_point": np.full((1, 1), 90, np.uint8)}
            clamped = np.clip(y, None if low is None else f32(low), None if high is None else f32(high))
            want = numerics.quantize(q, clamped, **given)
            scales = {f"output_{k}": torch.from_numpy(v) for k, v in given.items()}
            assert_buffers(hop.scaled(aten.linear.default, q, x.t, w.t, **scales), q, want)


# ---- hop.pack


class TestPack(unittest.TestCase):
    def test_tiles_are_of_the_row_wise_copy(self):
        q = dataclasses.replace(presets.INT8_ROW, layout=Tiled())
        for usages in ("columnwise", ("rowwise", "columnwise")):
            with pytest.raises(ValueError, match=r"layout=.* is for the row-wise copy only"):
                hop.quantize(q, torch.randn(32, 64), usages=usages)
        with pytest.raises(ValueError, match="is for matrices"):
            hop.quantize(q, torch.randn(64))

    """hop.pack: the same numbers in a form that products read fast."""

    @parameterized.expand([*presets.PRESETS, *(name for name in WEIGHTS if name not in BOOKS)])
    def test_numbers(self, name):
        """Bit for bit, of any codes, also where blocks are cut off."""
        q = presets.PRESETS.get(name) or WEIGHTS[name]
        for shape in [(24, 160), (7, 33), (2, 3, 40), (5,), (1, 1), (0, 16), (3, 0)]:
            if q.block == (1, -1, -1, -1):
                shape = (4, 3, 2, 2)
            w = scaled_oracles.make(q, shape, generator(*name.encode(), *shape))
            rest = sum(b.numel() * b.element_size() for n, b in w.t.buffers().items() if n != "codes")
            for packed in (hop.pack(w.t), decoded(w.t)):
                layout = packed.quantizer.layout
                with self.subTest(f"{shape} {layout}"):
                    assert_bits(hop.dequantize(packed), w.values(), name)
                    assert (packed.shape, packed.dtype, packed.usages) == (w.t.shape, w.t.dtype, w.t.usages)
                    if isinstance(layout, Tiled):
                        rows, *summed = reversed(shape) if layout.columns else shape
                        tiles = -(-rows // 32) * -(-math.prod(summed) // 64)
                        sums = 4 * rows if layout.sums else 0
                        assert packed.nbytes == tiles * 32 * 64 * q.format.bits // 8 + rest + sums
                        assert_bits(hop.dequantize(hop.unpack(packed)), w.values(), name)
                        assert_buffers(hop.unpack(packed), q, {n: array(b) for n, b in w.t.buffers().items()})
                    elif isinstance(layout, Decoded):
                        assert packed.codes.dtype == torch.bfloat16
                        assert packed.nbytes == 2 * w.t.numel() + rest
                    else:
                        assert packed.quantizer == q
                        assert packed.nbytes == w.t.nbytes
                    if packed.quantizer.layout is None:
                        assert q.flat or q.format.name not in numerics.FLOATS

    @parameterized.expand([name for name, q in WEIGHTS.items() if q.format.is_integer and q.format.bits in (4, 8)])
    def test_sums_of_codes(self, name):
        """Those of whole rows, by each way to them; groups and convolutions have none."""
        q = WEIGHTS[name]
        w = scaled_oracles.make(q, (37, 96), generator(*name.encode())).t
        packed = hop.pack(w)
        if packed.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        columns = packed.quantizer.layout.columns
        grouped = any(size > 1 for _, block in q.stored().values() for size in block)
        assert packed.quantizer.layout.sums == (not grouped)
        if grouped:
            return
        codes = array(q.format.unpack(w.codes, 96) if q.per_byte() > 1 else w.codes).astype(np.int64)
        want = codes.sum(0 if columns else 1, keepdims=True)
        by_reference = q.packed(w.buffers(), w.shape, packed.quantizer.layout)["code_sums"]
        turned = hop.pack(w).t().code_sums.t()
        without = hop.pack(hop.pack(w, Tiled(columns)), Tiled(columns, sums=True))
        for sums in (packed.code_sums, by_reference, turned, without.code_sums, packed.clone().code_sums):
            assert sums.dtype == torch.int32
            np.testing.assert_array_equal(array(sums), want)
        assert not hasattr(hop.unpack(packed), "code_sums")

    @parameterized.expand(["INT8_ROW_AFFINE", "UINT8_TENSOR_AFFINE", "INT8_ROW"])
    def test_products_with_sums(self, name):
        """The same bits as without them, by rows with zero points and without, of weights of either layout."""
        for of_weight in (w for w, q in WEIGHTS.items() if q.format.is_integer and q.format.bits in (4, 8)):
            for m, k, n in ((1, 64, 32), (5, 200, 33), (40, 1088, 70)):
                q = WEIGHTS[of_weight]
                columns = sums_first(blocks.per_dimension(q.block, 2))
                op, shape = (aten.mm.default, (k, n)) if columns else (aten.linear.default, (n, k))
                w = scaled_oracles.make(q, shape, generator(*of_weight.encode(), m)).t
                x = hop.quantize(presets.PRESETS[name], torch.randn(m, k))
                layout = hop.pack(w).quantizer.layout
                if layout is None or not layout.sums:
                    continue
                with self.subTest(f"{of_weight} {m}x{k}x{n}"):
                    want = hop.scaled(op, torch.float32, x, hop.pack(w, Tiled(columns)))
                    assert_bits(hop.scaled(op, torch.float32, x, hop.pack(w)), array(want))

    @pytest.mark.full
    @pytest.mark.compiler
    def test_compiled_products_with_sums(self):
        x, w = (hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(s)) for s in ((5, 200), (33, 200)))
        w = hop.pack(hop.quantize(presets.INT8_ROW, w.dequantize()))

        def product(x, w):
            return hop.scaled(aten.linear.default, torch.float32, x, w)

        assert_bits(torch.compile(product, fullgraph=True)(x, w), array(product(x, w)))

    def test_sums_of_what_is_written(self):
        """Writes in place keep them those of the codes; an assigned buffer has its form."""
        w = hop.pack(hop.quantize(presets.INT8_ROW, torch.randn(40, 64)))
        if w.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        other = hop.quantize(presets.INT8_ROW, torch.randn(40, 64))
        for write in (
            lambda t: t.zero_(),
            *(lambda t, x=x: t.copy_(x) for x in (torch.ones(40, 64), other, hop.pack(other))),
        ):
            t = w.clone()
            write(t)
            assert torch.equal(t.code_sums, hop.unpack(t).codes.sum(1, keepdim=True, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"code_sums must be torch.int32 of \(40, 1\)"):
            w.code_sums = torch.zeros(3, 1, dtype=torch.int32)

    @parameterized.expand(
        [(name, columns) for name in ("INT8_ROW", "UINT8_TENSOR_AFFINE") for columns in (False, True)]
    )
    def test_sums_beside_plain_codes(self, name, columns):
        """Summed: the codes of the plain form, and sums that follow them; on a CPU too, by its reference."""
        plain = hop.quantize(getattr(presets, name), torch.randn(24, 40))
        if columns:
            plain = plain.t()
        packed, along = hop.pack(plain, Summed(columns)), 0 if columns else 1
        assert torch.equal(packed.codes, plain.codes) and packed.codes.data_ptr() != plain.codes.data_ptr()
        assert packed.nbytes == plain.nbytes + 4 * 24

        def check(t, shape=plain.shape):
            assert t.code_sums.dtype == torch.int32 and t.shape == shape
            along = 0 if t.quantizer.layout.columns else 1
            assert torch.equal(t.code_sums, t.codes.sum(along, keepdim=True, dtype=torch.int32))

        other = hop.quantize(getattr(presets, name), torch.randn(24, 40))
        written = packed.clone().copy_(other.t() if columns else other)
        for t in (packed, packed.clone(), packed.detach(), written, packed.clone().zero_(), copy.deepcopy(packed)):
            check(t)
        check(packed.t(), plain.t().shape)
        assert packed.t().quantizer.layout == Summed(not columns) and torch.equal(packed.t().t().codes, packed.codes)
        assert_bits(hop.dequantize(packed), array(hop.dequantize(plain)))
        assert_bits(hop.dequantize(packed.t()), array(hop.dequantize(plain.t())))
        unpacked = hop.unpack(packed)
        assert_buffers(unpacked, plain.quantizer, {n: array(b) for n, b in plain.buffers().items()})
        assert unpacked.codes.data_ptr() != packed.codes.data_ptr()
        for view in (lambda t: t[3:5], lambda t: t[:, :16], lambda t: t.reshape(-1)):  # sums of parts are others
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*layout=hop1:Summed.* is for whole tensors only")
                viewed = view(packed)
            assert not isinstance(viewed, hop.QuantizedTensor)
            assert_bits(viewed, array(view(hop.dequantize(plain))))
        assert hop.pack(packed, Tiled(columns)).quantizer.layout == Tiled(columns)
        x = hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(5, packed.shape[along]))
        op = aten.mm.default if columns else aten.linear.default
        assert_bits(hop.scaled(op, torch.float32, x, packed), array(hop.scaled(op, torch.float32, x, plain)))

    def test_sums_beside_plain_codes_in_programs_and_files(self):
        q = dataclasses.replace(presets.INT8_ROW, layout=Summed())
        w, x = hop.quantize(q, torch.randn(24, 40)), hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(5, 40))
        want = hop.scaled(aten.linear.default, torch.float32, x, hop.unpack(w))

        def linear(x, w):
            return hop.scaled(aten.linear.default, torch.float32, x, w)

        def mm(x, w):
            return hop.scaled(aten.mm.default, torch.float32, x, w.t())

        for product in (linear, mm):
            assert_bits(torch.compile(product, fullgraph=True, backend="aot_eager")(x, w), array(want))
        turned = w.clone().t()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "w.safetensors"))
            hop.storage.save_file({"w": w, "turned": turned}, path)
            of_file = hop.storage.load_file(path)
        for found, t in ((of_file["w"], w), (of_file["turned"], turned), (read_back({"w": w})["w"], w)):
            assert found.quantizer == t.quantizer and torch.equal(found.codes, t.codes)
            assert torch.equal(found.code_sums, t.code_sums)

    def test_what_has_no_sums_beside_it(self):
        for make, words in (
            (lambda: hop.pack(hop.quantize(presets.FP8_ROW, torch.randn(4, 8)), Summed()), "integers of 8 bits"),
            (lambda: hop.pack(hop.quantize(presets.INT8_ROW, torch.randn(2, 4, 8)), Summed()), "is for matrices"),
            (lambda: Summed(columns=1), "columns must be True or False"),
        ):
            with pytest.raises(ValueError, match=words):
                make()

    def test_what_packing_for_a_gpu_is(self):
        """Sums, where all of a row has one scale; a layer's where its scheme has zero points for activations."""
        for q, want in (
            (presets.INT8_ROW, Summed()),
            (presets.INT8_COLUMN, Summed(columns=True)),
            (presets.INT8_TENSOR, Summed()),
            (presets.INT8_256, None),
            (presets.INT4_32, None),
            (presets.FP8_ROW, Decoded()),
        ):
            assert layout_for(q, 2, "cuda") == want, q
        assert layout_for(presets.INT8_ROW, 3, "cuda") is None
        with mock.patch.object(stored, "layout_for", lambda q, ndim, device: layout_for(q, ndim, "cuda")):
            for scheme, want in (
                (hop.Scheme(presets.INT8_ROW_AFFINE, presets.INT8_ROW), Summed()),
                (hop.schemes.INT8_DYNAMIC, None),
                (hop.schemes.INT8_WEIGHT, None),
            ):
                layer = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), scheme)
                x = torch.randn(3, 64)
                assert layer[0].weight.quantizer.layout == want
                state = layer.state_dict()
                assert state["0.weight"].quantizer.layout is None
                again = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), scheme)
                again.load_state_dict(state)
                assert again[0].weight.quantizer.layout == want and torch.equal(again(x), layer(x))

    def test_sums_that_are_none(self):
        """The native operator looks at them before it reads."""
        x, w = (hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(s)) for s in ((3, 64), (40, 64)))
        w = hop.pack(hop.quantize(presets.INT8_ROW, w.dequantize()))
        if w.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        multiply = torch.ops.hop_native.product
        words = "1 lhs int8 zero=stored scale=1,-1 rhs int8 tiled{} output float32"
        args = (x.codes, x.scale, x.zero_point, None, w.codes, None, None, None, None, None, None, 40)
        with torch.no_grad():
            want = multiply(*args, words.format(""))
            assert torch.equal(multiply(*args, words.format(" sums"), w.code_sums), want)
            for sums in (w.code_sums[:-1], w.code_sums.float(), w.code_sums.flatten(), None):
                with pytest.raises(RuntimeError, match="rhs_code_sums must"):
                    multiply(*args, words.format(" sums"), sums)
            with pytest.raises(RuntimeError, match="rhs_code_sums is given, and the description has none"):
                multiply(*args, words.format(""), w.code_sums)

    @parameterized.expand([name for name, q in FLOATS.items()])
    def test_real_numbers(self, name):
        """What hop.quantize makes of numbers of ordinary sizes, with NaN and infinities."""
        q, weight = FLOATS[name], torch.randn(20, 64) * torch.exp2(torch.randint(-20, 20, (20, 1)).float())
        weight[3, 7], weight[4, 9], weight[5], weight[6, 0] = math.nan, math.inf, 0.0, -math.inf
        options = {"scale": torch.tensor(0.125)} if isinstance(q.scale, Static) else {}
        w = scaled_oracles.quantized(q, weight, **options).t
        assert_bits(hop.dequantize(hop.pack(w)), array(hop.dequantize(w)))

    @parameterized.expand(["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128"])
    def test_tiny_and_huge_blocks(self, name):
        """Every power of two as a block's scale: exact where bfloat16 has normal numbers, near below."""
        q = FLOATS[name]
        size = q.block[-1]
        magnitudes = np.exp2(np.arange(-120, 120)).astype(f32)[:, None]
        weight = torch.from_numpy((generator(5).uniform(0.5, 1, (240, size)) * magnitudes).astype(f32))
        if name == "nvfp4":
            q = Quantizer(E2M1, (1, 16), TwoLevel(outer=(1, -1)))
        w = hop.quantize(q, weight)
        before, after = array(hop.dequantize(w)).astype(f64), array(hop.dequantize(decoded(w))).astype(f64)
        outer = array(w.global_amax).astype(f64) / (6 * 448) if name == "nvfp4" else 1.0
        exact = np.abs(before) >= outer * 2.0**-117  # eight bits of a number below the least normal one, 2^-126
        assert (before == after)[exact].all()
        assert exact.mean() > 0.9
        assert (np.abs(before - after) <= outer * 2.0**-134).all()

    def test_views(self):
        """Of packed tensors whatever their unpacked form has, and more: a transposed matrix of 4-bit numbers."""
        rng = generator(1)
        for name in ("fp8_row", "fp8_128x128", "mxfp4", "nvfp4", "nvfp4_row", "mxfp8"):
            w = scaled_oracles.make(FLOATS[name], (256, 256), rng)
            packed, a = decoded(w.t), w.values()
            for view, of_array in [
                (packed.t(), a.T),
                (packed.t().t(), a),
                (packed[128:], a[128:]),
                (packed[:128, 128:], a[:128, 128:]),
                (packed.transpose(0, 1)[:128], a.T[:128]),
                (packed.unsqueeze(0), a[None]),
                (packed.expand(2, 256, 256), np.broadcast_to(a, (2, 256, 256))),
                *(
                    [(packed[3], a[3]), (packed[::2], a[::2]), (packed.view(2, 128, 256), a.reshape(2, 128, 256))]
                    if name != "fp8_128x128"
                    else []
                ),
            ]:
                with self.subTest(f"{name} {tuple(view.shape)}"):
                    assert isinstance(view, hop.QuantizedTensor)
                    assert view.quantizer.layout == Decoded()
                    assert view.codes.untyped_storage().data_ptr() == packed.codes.untyped_storage().data_ptr()
                    assert_bits(hop.dequantize(view), np.ascontiguousarray(of_array))
            x = plain((3, 128), rng, torch.bfloat16)
            for product, half, right in [
                (aten.linear.default, packed[:, :128], a[:, :128].T),
                (aten.mm.default, packed[:128].t()[128:] if name != "x" else packed, a[:128].T[128:]),
            ]:
                got = hop.scaled(product, torch.float32, x, half)
                found = scaled_oracles.ratio(got, array(x).astype(f32), right, np.matmul, 128)
                assert found <= 1, f"{name} {product}: {found}"

    @parameterized.expand(["fp8_row", "mxfp4", "nvfp4_row", "fp8_e5m2_1x128", "int4_groups_32", "int8_row_affine"])
    def test_files(self, name):
        """torch.save, torch.load and state_dict keep every bit and the layout; a copy too."""
        w = scaled_oracles.make(WEIGHTS[name], (8, 128), generator(2)).t
        packed, half = hop.pack(w), decoded(w)[:4]
        loaded = read_back({"weight": packed, "half": half})
        for got, want in [(loaded["weight"], packed), (loaded["half"], half), (packed.clone(), packed)]:
            assert_buffers(got, want.quantizer, {n: array(b) for n, b in want.buffers().items()})
            assert_bits(hop.dequantize(got), array(hop.dequantize(want)))

    @parameterized.expand([name for name, q in presets.PRESETS.items()])
    def test_spelling(self, name):
        """The quantizer of a packed tensor is read back from its text, and is not the plain one."""
        q = presets.PRESETS[name]
        shape = (4, 3, 2, 2) if q.block == (1, -1, -1, -1) else (8, 32)
        packed = hop.pack(scaled_oracles.make(q, shape, generator(3)).t)
        assert Quantizer.parse(str(packed.quantizer)) == packed.quantizer
        held = not q.flat and q.format.bits in (4, 8) and native.library().missing is None
        assert (packed.quantizer == q) == (not held)
        assert ("Tiled" in str(packed.quantizer)) == held

    def test_quantize_to_a_layout(self):
        """A quantizer with a layout makes what pack makes."""
        x = torch.randn(12, 128)
        for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"):
            plainly = hop.quantize(FLOATS[name], x)
            q = hop.pack(plainly).quantizer
            want = {n: array(b) for n, b in hop.pack(plainly).buffers().items()}
            assert_buffers(hop.quantize(q, x), q, want, name)
            got = hop.scaled(aten.alias.default, q, plainly)
            again = hop.pack(hop.quantize(FLOATS[name], hop.dequantize(plainly)))
            assert_buffers(got, q, {n: array(b) for n, b in again.buffers().items()}, f"{name} of scaled")

    @parameterized.expand(["fp8_row", "mxfp4", "nvfp4", "int8_row_affine", "state8"])
    def test_new_memory(self, name):
        """Codes and scales of its own: to overwrite the weight leaves the packed one as it is."""
        w = scaled_oracles.make(WEIGHTS[name], (8, 64), generator(6))
        packed = hop.pack(w.t)
        for buffer in w.t.buffers().values():
            buffer.zero_()
        assert_bits(hop.dequantize(packed), w.values())

    def test_again(self):
        """To pack what is packed changes nothing, and gives a new tensor."""
        once = hop.pack(scaled_oracles.make(presets.MXFP8, (8, 64), generator(4)).t)
        twice = hop.pack(once)
        assert_buffers(twice, once.quantizer, {n: array(b) for n, b in once.buffers().items()})
        assert twice.codes.data_ptr() != once.codes.data_ptr()

    def test_errors(self):
        w = torch.randn(32, 32)
        for usages in (COLUMNS, BOTH):
            for q in (presets.MXFP8, presets.NVFP4, presets.FP8_TENSOR):
                with self.assertRaisesRegex(ValueError, f"pack: weight .*row-wise copy.*{usages[-1]}"):
                    hop.pack(hop.quantize(q, w, usages=usages))
        with self.assertRaisesRegex(
            TypeError, r"pack: weight must be a QuantizedTensor, got a tensor of torch.float32"
        ):
            hop.pack(w)
        with self.assertRaisesRegex(TypeError, r"pack: weight must be a QuantizedTensor, got \[1.0\]"):
            hop.pack([1.0])
        for format in (INT8, INT4):
            with self.assertRaisesRegex(ValueError, f"layout=.*float formats.*{format.name}"):
                Quantizer(format, layout=Decoded())


# ---- errors


def q8(*shape: int, q: Quantizer = presets.INT8_TENSOR, **options: Any) -> Any:
    return scaled_oracles.make(q, shape, generator(0), **options).t


X, W, FP8, BOOK = q8(2, 8), q8(4, 8), q8(4, 8, q=presets.FP8_ROW), q8(4, 8, q=presets.STATE8)
INT_BIAS = torch.zeros(4, dtype=torch.int32)
STATIC, STATIC_AFFINE = presets.INT8_TENSOR_STATIC, presets.INT8_TENSOR_STATIC_AFFINE
ONE = torch.tensor(1.0)
linear, mm, conv2d = aten.linear.default, aten.mm.default, aten.conv2d.default
PLAIN_X = torch.randn(2, 8)
IMAGE, KERNEL = q8(1, 4, 5, 5), q8(6, 4, 3, 3)
FLOAT = torch.float32
# name, error, words that it must hold, positional arguments, keywords
ERRORS: list[tuple[str, type[Exception], list[str], tuple[Any, ...], dict[str, Any]]] = [
    ("operator", ValueError, ["op", "aten.sin.default", " mm, "], (aten.sin.default, FLOAT, X), {}),
    ("in_place", ValueError, ["op", "aten.add_.Tensor"], (aten.add_.Tensor, FLOAT, X, X), {}),
    ("packet", ValueError, ["op", "aten.mm"], (aten.mm, FLOAT, X, W), {}),
    ("function", ValueError, ["op", "mm"], (torch.mm, FLOAT, X, W), {}),
    ("output_int32", TypeError, ["output", "torch.int32", "Quantizer", "out_dtype"], (linear, torch.int32, X, W), {}),
    ("output_int8", TypeError, ["output", "torch.int8"], (linear, torch.int8, X, W), {}),
    ("output_fp8", TypeError, ["output", "torch.float8_e4m3fn"], (linear, torch.float8_e4m3fn, X, W), {}),
    ("output_e5m2", TypeError, ["output", "torch.float8_e5m2"], (linear, torch.float8_e5m2, X, W), {}),
    ("output_none", TypeError, ["output", "None", "Quantizer"], (linear, None, X, W), {}),
    ("output_number", TypeError, ["output", "8"], (linear, 8, X, W), {}),
    ("output_complex", TypeError, ["output", "torch.complex64"], (linear, torch.complex64, X, W), {}),
    (
        "stochastic",
        ValueError,
        ["output", "stochastic", "random", "noise"],
        (linear, presets.NVFP4_STOCHASTIC, X, W),
        {},
    ),
    ("plain_alone", TypeError, ["QuantizedTensor", "aten.linear"], (linear, FLOAT, PLAIN_X, PLAIN_X), {}),
    ("plain_values", TypeError, ["QuantizedTensor", "aten.relu"], (aten.relu.default, FLOAT, PLAIN_X), {}),
    ("plain_list", TypeError, ["QuantizedTensor", "aten.cat"], (aten.cat.default, FLOAT, [PLAIN_X, PLAIN_X]), {}),
    ("int8_fp8", ValueError, ["int8", "e4m3", "integers with integers", "aten.linear"], (linear, FLOAT, X, FP8), {}),
    ("fp8_int8", ValueError, ["int8", "e4m3", "integers with integers"], (linear, FLOAT, FP8, W), {}),
    (
        "int4_mx",
        ValueError,
        ["int4", "e2m1"],
        (linear, FLOAT, q8(2, 64, q=presets.MXFP4), q8(4, 64, q=presets.INT4_64)),
        {},
    ),
    ("codebooks", ValueError, ["dynamic8", "plain floats with codebooks"], (linear, FLOAT, BOOK, BOOK), {}),
    ("int8_codebook", ValueError, ["int8", "dynamic8"], (linear, FLOAT, X, BOOK), {}),
    ("codebook_fp8", ValueError, ["dynamic8", "e4m3"], (linear, FLOAT, FP8, BOOK), {}),
    (
        "conv_pair",
        ValueError,
        ["int8", "e4m3", "conv2d"],
        (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=presets.FP8_TENSOR)),
        {},
    ),
    (
        "scale_of_each_lhs",
        ValueError,
        ["input", "change with each element", "aten.linear", "block=(-1, 1)"],
        (linear, FLOAT, q8(2, 8, q=presets.INT8_COLUMN), W),
        {},
    ),
    (
        "scale_of_each_rhs",
        ValueError,
        ["weight", "change", "linear"],
        (linear, FLOAT, X, q8(4, 8, q=presets.INT8_COLUMN)),
        {},
    ),
    (
        "scale_of_each_mm",
        ValueError,
        ["mat2", "change", "columnwise"],
        (mm, FLOAT, X, q8(8, 4, q=presets.INT8_ROW)),
        {},
    ),
    (
        "scale_of_each_copy",
        ValueError,
        ["weight", "change"],
        (linear, FLOAT, X, q8(4, 8, q=presets.INT8_ROW, usages=COLUMNS)),
        {},
    ),
    ("flat", ValueError, ["flat=True"], (linear, FLOAT, X, q8(4, 8, q=Quantizer(INT8, (16,), flat=True))), {}),
    (
        "input_channels",
        ValueError,
        ["weight", "output channel", "(-1, 1, -1, -1)"],
        (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=Quantizer(INT8, (-1, 1, -1, -1)))),
        {},
    ),
    (
        "channels_of_the_input",
        ValueError,
        ["input", "example", "(-1, 1, -1, -1)"],
        (conv2d, FLOAT, q8(1, 4, 5, 5, q=Quantizer(INT8, (-1, 1, -1, -1))), KERNEL),
        {},
    ),
    (
        "channels_without_a_batch",
        ValueError,
        ["input", "(1, -1, -1)"],
        (conv2d, FLOAT, q8(4, 5, 5, q=Quantizer(INT8, (1, -1, -1))), KERNEL),
        {},
    ),
    (
        "transposed_channels",
        ValueError,
        ["weight", "output channel", "(1, -1, -1, -1)"],
        (aten.conv_transpose2d.input, FLOAT, IMAGE, q8(4, 6, 3, 3, q=presets.INT8_CONV)),
        {},
    ),
    ("kernel_rows", ValueError, ["weight"], (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=presets.INT8_ROW)), {}),
    ("int32_bias_of_floats", ValueError, ["int32 bias", "integers"], (linear, FLOAT, PLAIN_X, W, INT_BIAS), {}),
    ("int32_bias_of_fp8", ValueError, ["int32 bias", "integers"], (linear, FLOAT, FP8, FP8, INT_BIAS), {}),
    (
        "int32_bias_of_groups",
        ValueError,
        ["int32 bias", "groups"],
        (linear, FLOAT, q8(2, 64), q8(4, 64, q=presets.INT4_32), INT_BIAS),
        {},
    ),
    (
        "int32_bias_of_groups_of_lhs",
        ValueError,
        ["int32 bias", "groups"],
        (linear, FLOAT, q8(2, 64, q=Quantizer(INT8, (1, 16))), q8(4, 64), INT_BIAS),
        {},
    ),
    (
        "int32_bias_alpha",
        ValueError,
        ["int32 bias", "alpha", "2"],
        (aten.addmm.default, FLOAT, INT_BIAS, X, W.t()),
        {"alpha": 2},
    ),
    (
        "int32_bias_beta",
        ValueError,
        ["int32 bias", "beta"],
        (aten.addmm.default, FLOAT, INT_BIAS, X, W.t()),
        {"beta": 0.5},
    ),
    ("int64_bias", TypeError, ["'bias'", "int32", "torch.int64"], (linear, FLOAT, X, W, INT_BIAS.long()), {}),
    ("int8_bias", TypeError, ["'self'", "torch.int8"], (aten.addmm.default, FLOAT, INT_BIAS.char(), X, W.t()), {}),
    ("quantized_bias", ValueError, ["'bias'", "bias", "cannot be quantized"], (linear, FLOAT, X, W, q8(4)), {}),
    (
        "quantized_addend",
        ValueError,
        ["'self'", "cannot be quantized"],
        (aten.addmm.default, FLOAT, q8(4), X, W.t()),
        {},
    ),
    (
        "quantized_indices",
        ValueError,
        ["'indices'", "cannot be quantized"],
        (aten.embedding.default, FLOAT, W, q8(4)),
        {},
    ),
    ("int8_operand", TypeError, ["'input'", "torch.int8", "out_dtype"], (linear, FLOAT, X.codes, W), {}),
    ("int32_operand", TypeError, ["'mat2'", "torch.int32"], (mm, FLOAT, X, W.codes.t().int()), {}),
    ("fp8_operand", TypeError, ["'weight'", "torch.float8_e4m3fn"], (linear, FLOAT, PLAIN_X.bfloat16(), FP8.codes), {}),
    ("int8_addend", TypeError, ["'other'", "torch.int8"], (aten.add.Tensor, FLOAT, X, X.codes), {}),
    ("bool_in_cat", TypeError, ["'tensors'", "torch.bool"], (aten.cat.default, FLOAT, [X, PLAIN_X > 0]), {}),
    (
        "scale_without_quantizer",
        ValueError,
        ["output_scale", "torch.float32"],
        (linear, FLOAT, X, W),
        {"output_scale": ONE},
    ),
    ("zero_without_quantizer", ValueError, ["output_zero_point"], (linear, FLOAT, X, W), {"output_zero_point": ONE}),
    ("given_without_scale", ValueError, ["output_scale="], (linear, STATIC, X, W), {}),
    ("given_without_both", ValueError, ["output_scale=", "output_zero_point="], (linear, STATIC_AFFINE, X, W), {}),
    ("scale_alone", ValueError, ["output_zero_point", "needs"], (linear, STATIC_AFFINE, X, W), {"output_scale": ONE}),
    (
        "zero_alone",
        ValueError,
        ["output_zero_point", "output_scale"],
        (linear, STATIC_AFFINE, X, W),
        {"output_zero_point": ONE},
    ),
    (
        "zero_for_symmetric",
        ValueError,
        ["no zero point"],
        (linear, STATIC, X, W),
        {"output_scale": ONE, "output_zero_point": ONE},
    ),
    ("scale_is_a_number", TypeError, ["output_scale", "0.5"], (linear, STATIC, X, W), {"output_scale": 0.5}),
    (
        "scale_of_integers",
        TypeError,
        ["output_scale", "torch.int64"],
        (linear, STATIC, X, W),
        {"output_scale": torch.tensor(1)},
    ),
    (
        "scale_of_a_wrong_shape",
        ValueError,
        ["output_scale", "(1, 1)", "(3,)"],
        (linear, STATIC, X, W),
        {"output_scale": torch.ones(3)},
    ),
    (
        "scale_of_a_wrong_shape_by_sum",
        ValueError,
        ["output_scale", "(1, 1)", "(3,)"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), X, W),
        {"output_scale": torch.ones(3)},
    ),
    (
        "exact_of_groups",
        ValueError,
        ["exact integer sum", "groups", "Division"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), q8(2, 64), q8(4, 64, q=presets.INT4_32)),
        {"output_scale": ONE},
    ),
    (
        "exact_of_floats",
        ValueError,
        ["exact integer sum", "not integers"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), FP8, FP8),
        {"output_scale": ONE},
    ),
    (
        "exact_of_a_plain_factor",
        ValueError,
        ["exact integer sum", "plain"],
        (linear, Quantizer(INT8, scale=Static(requantize=FloatMultiplier())), PLAIN_X, W),
        {"output_scale": ONE},
    ),
    (
        "exact_sum_of_two",
        ValueError,
        ["exact integer sum", "aten.add.Tensor"],
        (aten.add.Tensor, Quantizer(INT8, scale=Static(requantize=FixedPoint())), X, X),
        {"output_scale": ONE},
    ),
    (
        "exact_with_alpha",
        ValueError,
        ["exact integer sum", "alpha"],
        (aten.addmm.default, Quantizer(INT8, scale=Static(requantize=FixedPoint())), torch.zeros(4), X, W.t()),
        {"output_scale": ONE, "alpha": 2},
    ),
    (
        "exact_of_rows",
        ValueError,
        ["exact integer sum", "one scale"],
        (aten.relu.default, Quantizer(INT8, scale=Static(requantize=FixedPoint())), q8(2, 8, q=presets.INT8_ROW)),
        {"output_scale": ONE},
    ),
    ("devices", RuntimeError, ["'weight'", "meta", "cpu"], (linear, FLOAT, X, PLAIN_X.to("meta")), {}),
    ("too_few", RuntimeError, ["'weight'", "aten.linear"], (linear, FLOAT, X), {}),
    ("too_many", RuntimeError, ["aten.mm.default", "2 positional"], (mm, FLOAT, X, W, X), {}),
    ("unknown_argument", RuntimeError, ["'gain'"], (linear, FLOAT, X, W), {"gain": 2}),
    ("twice", RuntimeError, ["'weight'"], (linear, FLOAT, X, W), {"weight": W}),
]
# Calls that the operator itself refuses, whatever its operands are: its own words.
MISFITS: list[tuple[str, Any, list[Any]]] = [
    ("linear", linear, [(2, 8), (4, 7)]),
    ("linear_vector", linear, [(8,), (4, 7)]),
    ("linear_weight", linear, [(2, 8), (3, 4, 8)]),
    ("mm", mm, [(2, 8), (4, 8)]),
    ("mm_rank", mm, [(2, 3, 8), (8, 4)]),
    ("mm_vector", mm, [(2, 8), (8,)]),
    ("bmm", aten.bmm.default, [(2, 3, 8), (3, 8, 4)]),
    ("bmm_inner", aten.bmm.default, [(2, 3, 8), (2, 7, 4)]),
    ("bmm_rank", aten.bmm.default, [(3, 8), (8, 4)]),
    ("matmul", aten.matmul.default, [(2, 3, 8), (3, 8, 4)]),
    ("matmul_inner", aten.matmul.default, [(3, 8), (7, 4)]),
    ("matmul_vectors", aten.matmul.default, [(8,), (7,)]),
    ("conv_channels", conv2d, [(1, 4, 5, 5), (6, 3, 3, 3)]),
    ("conv_kernel", conv2d, [(1, 4, 2, 2), (6, 4, 3, 3)]),
    ("conv_rank", conv2d, [(1, 4, 5), (6, 4, 3)]),
    ("add", aten.add.Tensor, [(2, 8), (3, 8)]),
    ("mul", aten.mul.Tensor, [(2, 8), (2, 7)]),
]


class TestErrors(unittest.TestCase):
    """What cannot be done says so: the argument, what it is, and the rule."""

    @parameterized.expand(ERRORS)
    def test_words(self, _name, error, words, args, kwargs):
        for _ in range(2):  # nothing is remembered of a call that failed
            assert_refused(error, words, lambda: hop.scaled(*args, **kwargs))

    @parameterized.expand([e for e in ERRORS if e[1] is not RuntimeError])
    def test_names_the_operator(self, _name, error, _words, args, kwargs):
        with self.assertRaisesRegex(error, "^scaled: "):
            hop.scaled(*args, **kwargs)

    @parameterized.expand(MISFITS)
    def test_misfits(self, _name, op, shapes):
        """PyTorch's own error, of integers, of floats and of both outputs."""
        with self.assertRaises(RuntimeError) as own:
            op(*(torch.zeros(s) for s in shapes))
        for q, output in itertools.product(
            (presets.INT8_TENSOR, presets.INT8_TENSOR_AFFINE, presets.FP8_TENSOR),
            (torch.float32, torch.bfloat16, presets.INT8_TENSOR),
        ):
            with self.subTest(f"{q} {output}"):
                with self.assertRaises(RuntimeError) as caught:
                    hop.scaled(op, output, *(q8(*s, q=q) for s in shapes))
                words, expected = (set(re.findall(r"[a-z]{4,}|\d+", str(e.exception).lower())) for e in (caught, own))
                assert words & expected, f"{caught.exception} is nothing like {own.exception}"

    def test_bias_that_does_not_fit(self):
        for bias in (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 3)):
            for _ in range(2):
                with self.assertRaises(RuntimeError):
                    hop.scaled(linear, FLOAT, X, W, bias)
                with self.assertRaises(RuntimeError):
                    hop.scaled(aten.addmm.default, FLOAT, bias, X, W.t())
        with self.assertRaises(RuntimeError):
            hop.scaled(conv2d, FLOAT, IMAGE, KERNEL, torch.zeros(5))

    def test_an_operator_that_is_none(self):
        """The one that is meant is named; else all, without overloads."""
        for op in (aten.linear, torch.nn.functional.linear, "aten.linear", "torch.ops.aten.linear.default"):
            with self.assertRaisesRegex(ValueError, "must be an operator overload .*use aten.linear.default$"):
                hop.scaled(op, FLOAT, X, W)
        with self.assertRaisesRegex(ValueError, "an operator that hop.scaled supports, got .*sin.* mm, "):
            hop.scaled(aten.sin.default, FLOAT, X)

    def test_sizes_that_do_not_fit_are_named(self):
        wide = q8(3, 9)
        with self.assertRaisesRegex(
            RuntimeError, "^scaled: aten.linear.default sums over the last dimension of 'input'"
        ):
            hop.scaled(linear, FLOAT, wide, W)
        with self.assertRaisesRegex(RuntimeError, r"'bias' of aten.linear.default must have .* elements for 'weight'"):
            hop.scaled(linear, FLOAT, X, W, torch.zeros(3))

    def test_index_out_of_range(self):
        for q in (presets.INT8_ROW, presets.INT4_32, presets.NVFP4, presets.STATE8, presets.FP8_128X128):
            w = q8(10, 32, q=q)
            for at in (10, -1, 2**40):
                with self.assertRaises((IndexError, RuntimeError)):
                    hop.scaled(aten.embedding.default, FLOAT, w, torch.tensor([0, at]))

    def test_what_is_allowed(self):
        """Neighbours of what is refused: a block along all of the summed dimension, of one element if that has one."""
        for x, w in [
            (q8(2, 1, q=presets.INT8_COLUMN), q8(4, 1)),
            (q8(2, 8, q=Quantizer(INT8, (1, 8))), q8(4, 8, q=Quantizer(INT8, (1, 2)))),
            (q8(2, 8, q=presets.INT8_TENSOR), q8(4, 8, q=Quantizer(INT8, (4, 8)))),
        ]:
            assert hop.scaled(linear, FLOAT, x, w).shape == (2, 4)
        assert hop.scaled(conv2d, FLOAT, q8(1, 1, 5, 5, q=presets.INT8_CONV), q8(2, 1, 3, 3)).shape == (1, 2, 3, 3)
        bias = torch.zeros(4, dtype=torch.int32)
        one_group = q8(4, 8, q=Quantizer(INT8, (1, 8)))
        assert hop.scaled(linear, FLOAT, X, one_group).shape == (2, 4)
        assert hop.scaled(aten.addmm.default, FLOAT, bias, X, W.t(), alpha=1, beta=1).shape == (2, 4)
