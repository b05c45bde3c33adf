"""The native products: every set of instructions that this CPU has, against the meaning and against exact sums."""

import concurrent.futures
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameterized import parameterized

import hop
from hop import presets
from hop.dispatch.kernel import Declined
from hop.impls.scaled import meaning
from hop.impls.scaled.calls import Call
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.numerics.formats import E4M3, INT8, UINT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Division, FixedPoint, FloatMultiplier, Reciprocal
from hop.numerics.rule import Found, Rule
from hop.numerics.scale_rules import Microscaling, Static
from hop.tensor.quantized import operand
from tests import levels
from tests.support import forks, scaled_oracles
from tests.support.scaled_oracles import array, assert_bits

aten = torch.ops.aten
MISSING = native.library().missing
_PARTS = (torch.float32, torch.float16)
BUILT = unittest.skipIf(MISSING is not None, MISSING or "")


INTEGERS = [
    ("INT8_ROW", "INT8_ROW"),
    ("INT8_ROW_AFFINE", "INT8_ROW"),
    ("UINT8_ROW_AFFINE", "INT8_TENSOR"),
    ("UINT8_TENSOR_AFFINE", "INT8_ROW_AFFINE"),
    ("INT8_ROW", "INT4_32"),
    ("INT8_ROW_AFFINE", "INT4_128"),
    ("INT8_ROW_AFFINE", "UINT4_64_AFFINE"),
]
FLOATS = [
    ("FP8_ROW", "FP8_ROW"),
    ("FP8_E5M2_ROW", "FP8_TENSOR"),
    ("FP8_1X128", "FP8_128X128"),
    ("MXFP8", "MXFP8"),
    ("MXFP8_E5M2", "MXFP4"),
    ("NVFP4", "NVFP4"),
    ("NVFP4_ROW", "NVFP4_16X16"),
    (None, "INT8_ROW"),
    (None, "INT4_32"),
    (None, "UINT4_32_AFFINE"),
    (None, "FP8_ROW"),
    (None, "MXFP4"),
    (None, "NVFP4"),
    (torch.float32, "INT8_ROW"),
    (torch.float32, "INT4_32"),
    (torch.float32, "MXFP4"),
    (torch.float16, "FP8_ROW"),
    (torch.float16, "UINT4_32_AFFINE"),
]
SIZES = [(1, 64, 32), (1, 200, 65), (3, 7, 5), (16, 128, 33), (17, 100, 64), (33, 192, 31), (70, 321, 97)]


def factors(
    left: str | torch.dtype | None, right: str, m: int, k: int, n: int, spread: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random factors; rows of sizes 2^-spread to 2^spread."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    if spread:
        x *= torch.exp2(torch.randint(-spread, spread + 1, (m, 1)).float())
        w *= torch.exp2(torch.randint(-spread, spread + 1, (n, 1)).float())
    lhs = hop.quantize(presets.PRESETS[left], x) if isinstance(left, str) else x.to(left or torch.bfloat16)
    return lhs, hop.quantize(presets.PRESETS[right], w)


def linear(x, w, bias=None, output=torch.float32, **options):
    return hop.scaled(aten.linear.default, output, x, w, bias, **options)


def reference(x, w, bias=None, output=torch.float32):
    return meaning.reference(Call(aten.linear.default, output, None, None, (operand(x), operand(w), bias), {}))


def takes_native(x, w, bias=None, output=torch.float32) -> bool:
    return hop.explain(aten.linear.default, output, x, w, bias).startswith("native product: chosen")


@BUILT
class TestLevels(unittest.TestCase):
    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in INTEGERS])
    @pytest.mark.quick(6)
    def test_integers(self, level, left, right):
        """Bit for bit the meaning, in every output, plain and packed."""
        torch.manual_seed(0)
        for (m, k, n), bias_dtype in itertools.product(SIZES, (None, torch.float32, torch.bfloat16)):
            k += k % 2  # codes of four bits
            x, w = factors(left, right, m, k, n)
            bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
            for output in (torch.float32, torch.bfloat16, torch.float16):
                want = array(reference(x, w, bias, output))
                with levels.at(level):
                    if k >= 32 and k % 32 == 0:
                        assert takes_native(x, w, bias, output)
                    assert_bits(linear(x, w, bias, output), want, f"{m}x{k}x{n}")
                    assert_bits(linear(x, hop.pack(w), bias, output), want, f"packed {m}x{k}x{n}")

    @parameterized.expand(
        [
            (level, left, right)
            for level in native.LEVELS
            for left in ("INT8_ROW", "INT8_ROW_AFFINE")
            for right in ("INT4_32", "INT4_128", "UINT4_32_AFFINE", "UINT4_128_AFFINE")
        ]
    )
    @pytest.mark.quick(2)
    def test_groups_of_the_largest_codes(self, level, left, right):
        """Few rows and many of codes at both ends, with zero points at both ends: bit for bit the meaning."""
        torch.manual_seed(2)
        for m, k, n in ((1, 32, 40), (2, 224, 33), (5, 896, 32), (6, 256, 70), (7, 4224, 20), (39, 384, 64)):
            x, w = torch.randint(0, 2, (m, k)) - 0.0, torch.randint(0, 2, (n, k)) - 0.0
            x[::2], w[1::2] = -x[::2], -w[1::2]
            x[-1], w[-1] = -1, 1
            x, w = hop.quantize(presets.PRESETS[left], x), hop.quantize(presets.PRESETS[right], w)
            want = array(reference(x, w))
            with levels.at(level):
                for form in (w, hop.pack(w)):
                    assert_bits(linear(x, form), want, f"{m}x{k}x{n}")

    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in FLOATS])
    @pytest.mark.quick(7)
    def test_floats(self, level, left, right):
        """Within what sums in float32 allow, plain and packed."""
        torch.manual_seed(1)
        for (m, k, n), spread in itertools.product(SIZES, (0, 30)):
            k += k % 2
            x, w = factors(left, right, m, k, n, spread // 3 if left == torch.float16 else spread)
            a = array(hop.dequantize(x) if isinstance(left, str) else x).astype(np.float32)
            b = array(hop.dequantize(w)).T
            with levels.at(level):
                for what, rhs in (("plain", w), ("packed", hop.pack(w))):
                    found = scaled_oracles.ratio(linear(x, rhs), a, b, np.matmul, k)
                    assert found <= 1, f"{what} {m}x{k}x{n}: {found}"

    @parameterized.expand(
        [(dtype, right) for dtype in _PARTS for right in ("INT8_ROW", "INT4_32", "FP8_E5M2_ROW", "MXFP8")]
    )
    def test_parts_of_extreme_numbers(self, dtype, right):
        """NaN, infinities and the least numbers, as float32 has them; and every form of a matrix product."""
        torch.manual_seed(6)
        _, w = factors(None, right, 1, 96, 48)
        x = torch.randn(12, 96).to(dtype)
        x[0, 0], x[1, 1], x[2, 5], x[2, 6] = math.inf, math.nan, -math.inf, math.inf
        x[3], x[4], x[5, 3], x[6, :48] = 0, torch.finfo(dtype).tiny, 1e-7, torch.finfo(dtype).eps
        if dtype == torch.float32:
            x[7, 7] = torch.tensor(0x7F800001, dtype=torch.int32).view(dtype)  # a NaN in its last bit alone
            x[8], x[9] = x[8] * 1e30, x[9] * 1e-30
        wide, exact = hop.dequantize(w).double(), x.double()
        bias, as_columns = torch.randn(48), w.t() if w.quantizer.per_byte() == 1 else None
        for op, args, add in (
            (aten.linear.default, (x, w), 0),
            (aten.linear.default, (x, hop.pack(w), bias), bias),
            (aten.addmm.default, (bias, x, as_columns), bias),
            (aten.linear.default, (x.reshape(3, 4, 96), w), 0),
            (aten.linear.default, (x.t().contiguous().t(), w), 0),
            (aten.matmul.default, (x.reshape(2, 6, 96), as_columns), 0),
        ):
            for output in () if None in args else (torch.float32, torch.bfloat16):
                assert hop.explain(op, output, *args).endswith("native product in parts: chosen")
                got = hop.scaled(op, output, *args).reshape(12, 48).double()
                want = torch.nn.functional.linear(x.float(), wide.float()) + add
                assert torch.equal(got.isnan(), want.isnan())
                assert torch.equal(got.isinf(), want.isinf())
                assert torch.equal(got[got.isinf()], want[got.isinf()].double())
                size = exact.abs() @ wide.abs().t() + torch.as_tensor(add).abs()
                near = (97 + 10) * 2.0**-24 * size + torch.finfo(output).eps * size + 96 * 2.0**-126
                off = (got - (exact @ wide.t() + add)).abs() > near
                assert not (off & want.isfinite()).any()

    @parameterized.expand(native.LEVELS)
    def test_parts_of_many_rows(self, level):
        """At levels that split them, cut into pieces of 1024 rows and a rest."""
        torch.manual_seed(7)
        x, w = factors(torch.float32, "INT8_ROW", 2100, 512, 8)
        with levels.at(level):
            told = hop.explain(aten.linear.default, torch.float32, x, w)
            if level.startswith("a"):
                assert told.endswith("native product in parts: chosen")
            else:
                assert "native product in parts: for at most 16 rows of torch.float32 on a CPU" in told
            got = linear(x, w)
            assert scaled_oracles.ratio(got, array(x), array(hop.dequantize(w)).T, np.matmul, 512) <= 1
            assert torch.equal(linear(x[:1500], w), got[:1500])

    @parameterized.expand([("bfloat16", torch.bfloat16), ("float32", torch.float32)])
    def test_views_that_negate(self, _name, dtype):
        """Tensors whose memory holds the negative of their numbers: of x, and of the bias."""
        x, w = factors(dtype, "INT8_ROW", 5, 64, 32)
        bias = torch.randn(32)
        negated, negated_bias = x.neg()._neg_view(), bias.neg()._neg_view()
        assert negated.is_neg() and torch.equal(negated, x)
        for _ in range(2):  # the second call finds the plan of the first
            want = linear(x, w, bias)
            for lhs, added in ((negated, bias), (x, negated_bias), (negated, negated_bias)):
                assert torch.equal(linear(lhs, w, added), want)

    @pytest.mark.full
    def test_parts_of_batches_and_in_compiled_programs(self):
        torch.manual_seed(8)
        x, w = torch.randn(3, 5, 64), hop.quantize(presets.INT8_ROW, torch.randn(3, 48, 64))
        got = hop.scaled(aten.bmm.default, torch.float32, x, w.mT)
        assert hop.explain(aten.bmm.default, torch.float32, x, w.mT).endswith("native product in parts: chosen")
        want = x.double() @ hop.dequantize(w).double().mT
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
        x, w = factors(torch.float32, "INT4_32", 4, 64, 32)
        compiled = torch.compile(linear, fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x, w), linear(x, w))
        assert torch.equal(compiled(x[:3], w), linear(x[:3], w))

    @parameterized.expand(native.LEVELS)
    def test_few_rows_of_extreme_scales(self, level):
        """Products in range, of factors whose codes times the others' numbers leave it."""
        torch.manual_seed(5)
        q = presets.MXFP8
        for m in (1, 2, 3):
            x = hop.quantize(q, torch.randn(m, 256) * 2.0**119)
            w = hop.quantize(q, torch.randn(40, 256) * 2.0**-100)
            a, b = array(hop.dequantize(x)), array(hop.dequantize(w)).T
            with levels.at(level):
                assert scaled_oracles.ratio(linear(x, hop.pack(w)), a, b, np.matmul, 256) <= 1

    @parameterized.expand(
        [(level, name) for level in native.LEVELS for name in ("MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4")]
    )
    def test_blocks_of_zeros(self, level, name):
        """Their scales are the least there are; other blocks count as ever, and what is all zeros gives zeros."""
        torch.manual_seed(4)
        q = presets.PRESETS[name]
        for m in (1, 33):
            x, w = torch.randn(m, 256), torch.randn(40, 256)
            w[:, 32:96], w[7], x[:, 128:160] = 0, 0, 0
            x, w = hop.quantize(q, x), hop.quantize(q, w)
            a, b = array(hop.dequantize(x)), array(hop.dequantize(w)).T
            with levels.at(level):
                for rhs in (w, hop.pack(w)):
                    got = linear(x, rhs)
                    assert scaled_oracles.ratio(got, a, b, np.matmul, 256) <= 1
                    assert not got[:, 7].any()

    @parameterized.expand([(level, name) for level in native.LEVELS for name in ("FP8_ROW", "FP8_E5M2_ROW", "MXFP8")])
    def test_subnormal_codes_where_subnormal_numbers_are_zeros(self, level, name):
        """Codes are numbers like others, whatever the CPU makes of subnormal float32 ones."""
        torch.manual_seed(3)
        least = 2.0**-9 if "E5M2" not in name else 2.0**-16
        w = torch.randint(-3, 4, (40, 192)) * least
        w[:, ::32] = 448.0 if "E5M2" not in name else 57344.0  # so that the scale is 1
        w = hop.quantize(presets.PRESETS[name], w)
        for m in (1, 9):
            x = torch.randn(m, 192).bfloat16()
            with levels.at(level):
                for rhs in (w, hop.pack(w)):
                    want = linear(x, rhs)
                    assert torch.set_flush_denormal(True)
                    try:
                        got = linear(x, rhs)
                    finally:
                        torch.set_flush_denormal(False)
                    assert_bits(got, array(want))
                    a, b = array(x.float()), array(hop.dequantize(w)).T
                    assert scaled_oracles.ratio(got, a, b, np.matmul, 192) <= 1

    @parameterized.expand(native.LEVELS)
    def test_nasty_numbers(self, level):
        """NaN, infinities, the largest and the least codes and scales, where the meaning has them."""
        torch.manual_seed(2)
        for left, right in [
            ("FP8_E5M2_ROW", "FP8_ROW"),
            ("MXFP8_E5M2", "MXFP8"),
            ("MXFP8", "MXFP4"),
            ("NVFP4", "NVFP4"),
        ]:
            x, w = factors(left, right, 9, 128, 40)
            for t in (x, w):
                bits = t.codes.view(torch.uint8)
                bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
                if t.scale.dtype in (torch.uint8, torch.float8_e4m3fn):
                    held = t.scale.view(torch.uint8)
                    held[0, 0], held[1, 0], held[2, 0], held[3, 0] = 0, 255, 254, 127
                    held[4, 0], held[5, 0] = 1, 20
            want = reference(x, w)
            a, b = (hop.dequantize(t, torch.float64).abs() for t in (x, w))
            bound = (128 + 8) * 2.0**-24 * (a @ b.t())  # of each of the two sums
            with levels.at(level):
                for got in (linear(x, w), linear(x, hop.pack(w))):
                    # Sums that overflow on the way may end otherwise in another order; NaN stays NaN.
                    assert torch.equal(got.isnan() | got.isinf(), want.isnan() | want.isinf()), f"{left} x {right}"
                    off = (got.double() - want.double()).abs()[want.isfinite()]
                    assert (off <= 2 * bound[want.isfinite()]).all(), f"{left} x {right}: {off.max()}"

    @parameterized.expand(native.LEVELS)
    @pytest.mark.quick(3)
    def test_requantized(self, level):
        """Codes, by every convention, bit for bit."""
        torch.manual_seed(3)
        conventions = [
            Division(),
            Division(low=0.0),
            Reciprocal(),
            Reciprocal(high=0.9),
            FloatMultiplier(low=-0.5, high=6.0),
        ]
        conventions += [FixedPoint(rounding=r) for r in ("gemmlowp", "tflite", "away", "even")]
        for convention, format, per_channel in itertools.product(conventions, (INT8, UINT8), (False, True)):
            q = hop.Quantizer(format, (-1, 1) if per_channel else (-1, -1), Static(True, convention))
            x, w = factors("INT8_ROW_AFFINE", "INT8_ROW", 37, 100, 41)
            size = (1, 41 if per_channel else 1)
            given = {
                "output_scale": torch.rand(size) * 0.1 + 0.05,
                "output_zero_point": torch.randint(0, 100, size).to(format.dtype),
            }
            for bias in (None, torch.randn(41), torch.randint(-1000, 1000, (41,), dtype=torch.int32)):
                with native.use("off"):
                    want = linear(x, w, bias, q, **given)
                with levels.at(level):
                    got = linear(x, w, bias, q, **given)
                for name, buffer in got.buffers().items():
                    assert_bits(buffer, array(want.buffers()[name]), f"{q} {name}")

    @parameterized.expand(native.LEVELS)
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    @pytest.mark.quick(2)
    def test_bytes(self, level, data):
        """Sums of int8 and uint8 of any sizes and strides, modulo 2^32."""
        m, k, n = (data.draw(st.integers(0, 70)) for _ in range(3))
        batch = data.draw(st.sampled_from([None, 1, 3]))
        seed = data.draw(st.integers(0, 2**31))
        rng = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            dtype = data.draw(st.sampled_from([torch.int8, torch.uint8]))
            step, as_columns = data.draw(st.integers(1, 2)), data.draw(st.booleans())
            sizes = (rows, columns) if not as_columns else (columns, rows)
            lead = () if batch is None else (batch,)
            x = torch.randint(0, 256, (*lead, sizes[0] * step, sizes[1]), generator=rng, dtype=torch.uint8).view(dtype)
            x = x[..., ::step, :]
            return x.mT if as_columns else x

        a, b = matrix(m, k), matrix(k, n)
        with levels.at(level):
            got = native_product.int_mm(a, b)
        assert torch.equal(got, (a.long() @ b.long()).to(torch.int32))

    @parameterized.expand(native.LEVELS)
    def test_overflow(self, level):
        """Sums beyond 2^31 are taken modulo 2^32."""
        a, b = torch.full((3, 140_000), -128, dtype=torch.int8), torch.full((140_000, 2), -128, dtype=torch.int8)
        with levels.at(level):
            assert torch.equal(native_product.int_mm(a, b), torch.full((3, 2), 128 * 128 * 140_000 - 2**32).int())


def _in_child(results, x, w, want) -> None:
    results.put(bool(torch.equal(linear(x, w), want)))


@BUILT
class TestTransposed(unittest.TestCase):
    """Codes of the right factor that lie as those of the transposed matrix are read as they lie."""

    @parameterized.expand(
        [(level, q) for level in native.LEVELS for q in ("INT8_ROW", "UINT8_TENSOR_AFFINE", "FP8_ROW", "MXFP8")]
    )
    def test_linear_and_mm(self, level, name):
        torch.manual_seed(6)
        q = presets.PRESETS[name]
        left = q if name != "UINT8_TENSOR_AFFINE" else presets.INT8_ROW
        for m, k, n in [(1, 64, 64), (3, 96, 40), (40, 128, 64), (33, 192, 130), (70, 320, 200)]:
            x, w = hop.quantize(left, torch.randn(m, k)), hop.quantize(q, torch.randn(n, k))
            as_columns = w.rebuilt(w.buffers() | {"codes": w.codes.t().contiguous().t()})
            assert n == 1 or not as_columns.codes.is_contiguous()
            with levels.at(level):
                want = linear(x, w)
                for _ in range(2):  # by the kernel, then by its plan
                    assert_bits(linear(x, as_columns), array(want), f"{m}x{k}x{n}")
                made = [hop.scaled(aten.mm.default, torch.bfloat16, x, t.t()) for t in (w, as_columns, as_columns)]
                assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])

    def test_bmm(self):
        torch.manual_seed(7)
        x, w = (hop.quantize(presets.INT8_ROW, torch.randn(3, 40, 64)) for _ in range(2))
        q = w.quantizer.transposed(3)
        plain = w.rebuilt({name: b.mT.contiguous() for name, b in w.buffers().items()}, quantizer=q, shape=(3, 64, 40))
        as_columns = plain.rebuilt(plain.buffers() | {"codes": w.codes.mT})
        want = hop.scaled(aten.bmm.default, torch.float32, x, plain)
        assert torch.equal(hop.scaled(aten.bmm.default, torch.float32, x, as_columns), want)


@dataclass(frozen=True, eq=False, repr=False)
class _Halves(Rule):
    """Stores half of the step."""

    def find(self, parts, format):
        half = parts.amax() / (2 * format.max)
        return Found((half,), parts.x / (2 * half))

    def scale_of(self, tensors, format):
        return tensors[0] * 2


@dataclass(frozen=True, eq=False, repr=False)
class _Powers(Microscaling):
    """Twice the power that MX takes, and stores."""

    def scale_of(self, tensors, format):
        return super().scale_of(tensors, format) * 2


@BUILT
class TestRules(unittest.TestCase):
    """A rule of a user, whose step the kernels would not read from what it stores."""

    @parameterized.expand([("int8", INT8, (1, -1), _Halves()), ("e4m3", E4M3, (1, 32), _Powers())])
    def test_a_scale_of_its_own(self, _name, fmt, block, rule):
        torch.manual_seed(9)
        q = Quantizer(fmt, block, rule)
        x, w = torch.randn(8, 64), hop.quantize(q, torch.randn(48, 64))
        with pytest.raises(Declined, match="overrides scale_of"):
            native_product.describe(q, False)
        for lhs in (x, hop.quantize(q, x)):
            numbers = lhs if lhs is x else lhs.dequantize()
            for rhs in (w, hop.pack(w)):
                torch.testing.assert_close(linear(lhs, rhs), torch.nn.functional.linear(numbers, w.dequantize()))


@BUILT
class TestSafety(unittest.TestCase):
    def test_threads_do_not_change_results(self):
        torch.manual_seed(4)
        before = torch.get_num_threads()
        for left, right in [("INT8_ROW", "INT8_ROW"), ("FP8_ROW", "FP8_ROW"), (None, "INT4_32"), ("NVFP4", "NVFP4")]:
            x, w = factors(left, right, 100, 512, 300)
            found = []
            try:
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    found.append(linear(x, w, output=torch.bfloat16))
            finally:
                torch.set_num_threads(before)
            assert all(torch.equal(y, found[0]) for y in found), f"{left} x {right}"

    def test_limits(self):
        """The two limits of a roofline, on one thread and on all."""
        before, memory = torch.get_num_threads(), torch.ones(2**20)
        for threads in (1, before):
            torch.set_num_threads(threads)
            try:
                assert native_product.bandwidth(memory) > 0
                assert (native_product.peak() > 0) == (native.library().path == "amx")
            finally:
                torch.set_num_threads(before)

    def test_python_threads(self):
        """Products at the same time in several threads."""
        torch.manual_seed(5)
        cases = [factors(*pair, 40 + 3 * i, 256, 100 + i) for i, pair in enumerate(INTEGERS + FLOATS)]
        want = [linear(x, w) for x, w in cases]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for got, y in zip(pool.map(lambda case: linear(*case), cases), want, strict=True):
                    assert torch.equal(got, y)

    def test_fork(self):
        """A forked process computes, though the threads of its parent are not in it."""
        x, w = factors("INT8_ROW", "INT8_ROW", 64, 512, 512)
        linear(x, w)  # starts them
        want = reference(x, w)  # here: oneDNN's product waits forever in a forked process
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(results, x, w, want))
        child.start()
        child.join(60)
        assert child.exitcode == 0, child.exitcode
        assert results.get() is True

    def test_off(self):
        x, w = factors("INT8_ROW", "INT8_ROW", 5, 64, 32)
        with native.use("off"):
            assert "native product: native kernels are switched off" in hop.explain(
                aten.linear.default, torch.float32, x, w
            )
            assert not takes_native(x, w)
        assert takes_native(x, w)

    @pytest.mark.full
    def test_environment(self):
        code = "from hop.kernels.cpu import native as n; l = n.library(); print(l.declines(), l.off or l.path)"

        def run(path: str) -> subprocess.CompletedProcess:
            return forks.run(code, env={**os.environ, "HOP_NATIVE": path})

        assert run("off").stdout.strip() == "native kernels are switched off True"
        assert run("portable").stdout.strip() == "None portable"
        assert "HOP_NATIVE must be one of" in run("fast").stderr
        for level in set(native.LEVELS) - set(levels.HERE):
            assert f"HOP_NATIVE is '{level}', which this CPU or build does not have" in run(level).stderr

    def test_levels_of_machines(self):
        """An architecture has levels of its own, counted from 1 on as the library counts them."""
        header = (Path(native.__file__).parents[3] / "native" / "common" / "cpu.h").read_text("utf-8")
        neon, others = (
            [name.strip() for name in line.replace("HOP_PORTABLE = 0", "HOP_PORTABLE").split(",")]
            for line in re.findall(r"enum Cpu \{ (.*) \};", header)
        )
        assert tuple(name.removeprefix("HOP_").lower() for name in neon) == native.levels_of("arm64")
        assert native.levels_of("aarch64") == native.levels_of("arm64")
        assert len(others) == len(native.levels_of("x86_64")) and native.levels_of("AMD64")[0] == "portable"

    def test_levels(self):
        """A level that this CPU has is what kernels take it for; one above raises, and says what there is."""
        library = native.library()
        up_to_best = native.LEVELS[: native.LEVELS.index(library.levels()[-1]) + 1]
        assert library.levels()[-1] == library.best
        assert library.levels() in (up_to_best, tuple(level for level in up_to_best if level != "avx_vnni"))
        for level in library.levels():
            with native.use(level):
                assert library.path == level
        for level in set(native.LEVELS) - set(library.levels()):
            above = (
                f"path is '{level}', which this CPU or build does not have: its level is '{library.best}'; use one of"
            )
            with pytest.raises(ValueError, match=above), native.use(level):
                pass
            with pytest.raises(unittest.SkipTest, match=f"needs the CPU level {level}"), levels.at(level):
                pass

    @pytest.mark.full
    def test_integers_without_vnni(self):
        """Where oneDNN's sums saturate, ours do not: eager, compiled, with and without native kernels."""
        code = (
            "import sys, torch, hop\n"
            "from hop.kernels.cpu import native\n"
            "a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((3, 33, 700), (3, 700, 17)))\n"
            "want = (a.long() @ b.long()).int()\n"
            "aten = torch.ops.aten\n"
            "for path in ('off', sys.argv[1]):\n"
            "    torch._dynamo.reset()\n"
            "    with native.use(path):\n"
            "        for f in (hop.out_dtype, torch.compile(hop.out_dtype, backend='aot_eager')):\n"
            "            assert torch.equal(f(aten.mm.default, torch.int32, a[0], b[0]), want[0])\n"
            "            assert torch.equal(f(aten.bmm.default, torch.int32, a, b), want)\n"
        )
        for level in levels.HERE[1:]:
            command, env = [sys.executable, "-c", code, level], levels.environment(level)
            done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
            assert done.returncode == 0, done.stderr

    def test_every_level_is_described(self):
        assert set(levels.OTHERS) == {level for own in native.LEVELS_OF.values() for level in own}

    @parameterized.expand(
        [
            *itertools.product((torch.float32, torch.float16, "FP8_ROW"), ("FP8_ROW", "MXFP8")),
            (torch.float32, "INT4_32"),
            (torch.float16, "INT8_ROW"),
        ]
    )
    def test_same_bits_where_products_are_of_float32(self, left, right):
        """The number of lanes does not change the order of sums."""
        first, last = "avx2", "avx512_vnni" if left == "FP8_ROW" else "avx512_bf16"
        if first not in levels.HERE:
            raise unittest.SkipTest("no level here multiplies in float32")
        alike = native.LEVELS[native.LEVELS.index(first) : native.LEVELS.index(last) + 1]
        for m in (1, 3, 16, 33):
            x, w = factors(left, right, m, 192, 40)
            found = []
            for level in set(alike) & set(levels.HERE):
                with native.use(level):
                    assert re.search(
                        "native product( in parts)?: chosen",
                        hop.explain(aten.linear.default, torch.float32, x, w, None),
                    )
                    found += [linear(x, w), linear(x, hop.pack(w))]
            assert all(torch.equal(found[0], y) for y in found)

    def test_names(self):
        with pytest.raises(ValueError, match="path must be one of"), native.use("sse"):
            pass


class TestLoading(unittest.TestCase):
    def test_no_library(self):
        with tempfile.TemporaryDirectory() as folder:
            assert "were not built" in str(native.load(Path(folder))[1])
            Path(folder, "_native.so").write_bytes(b"no library")
            assert "cannot be loaded" in str(native.load(Path(folder))[1])


@BUILT
@pytest.mark.compiler
class TestCompiled(unittest.TestCase):
    @parameterized.expand([("INT8_ROW_AFFINE", "INT8_ROW"), ("FP8_ROW", "FP8_ROW"), ("NVFP4", "NVFP4")])
    @pytest.mark.full
    def test_same_kernel(self, left, right):
        """A compiled program runs the kernel of eager mode, for any sizes."""
        from torch._inductor.utils import run_and_get_code

        w, bias = hop.pack(factors(None, right, 1, 128, 64)[1]), torch.randn(64)

        def layer(x):
            return linear(hop.quantize(presets.PRESETS[left], x), w, bias, torch.bfloat16)

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for m in (5, 37):
            x = torch.randn(m, 128).bfloat16()
            got, code = run_and_get_code(compiled, x)
            assert_bits(got, array(layer(x)), f"{m}")
            assert m != 5 or "torch.ops.hop_native.product" in "".join(code)
