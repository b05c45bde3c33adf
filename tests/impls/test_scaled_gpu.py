"""How scaled asks the GPU kernels: what a call becomes as a product of cutlass_kernels, and that it means the same."""

import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from cutlass_kernels import checks, plain
from hop import presets
from hop.dispatch.kernel import Declined
from hop.impls.scaled import gpu, meaning
from hop.impls.scaled.calls import Call
from hop.numerics.formats import E2M1, E4M3, E5M2, INT8, UINT8, Float, PowerOfTwo
from hop.numerics.layouts import Summed
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP, Division, FloatMultiplier
from hop.numerics.scale_rules import Microscaling, Static, TwoLevel
from hop.tensor.quantized import operand
from tests.support import matching

aten = torch.ops.aten
STATIC = Quantizer(INT8, scale=Static(affine=True))
RELU = Quantizer(UINT8, scale=Static(affine=True, requantize=Division(low=0.0, high=6.0)))
COLUMNS = Quantizer(INT8, (-1, 1), scale=Static())
MULTIPLIER = Quantizer(INT8, scale=Static(affine=True, requantize=FloatMultiplier(low=-1.0)))
FIXED = Quantizer(INT8, scale=Static(affine=True, requantize=GEMMLOWP))

# lhs, rhs (as of a linear layer, (N, K)), outputs
INTEGERS = (
    ("rows by channels", presets.INT8_ROW, presets.INT8_ROW),
    ("tensors", presets.INT8_TENSOR, presets.INT8_TENSOR),
    ("affine rows", presets.INT8_ROW_AFFINE, presets.INT8_ROW),
    ("unsigned, both affine", presets.UINT8_ROW_AFFINE, presets.UINT8_TENSOR_AFFINE),
    ("unsigned weight", presets.INT8_TENSOR, presets.UINT8_ROW_AFFINE),
    ("four bits by channels", presets.INT8_ROW, Quantizer(hop.formats.INT4, (1, -1))),
    ("a format with a zero of its own", presets.INT8_ROW, presets.UINT8_TENSOR),
)
FLOATS = (
    ("rows by channels", presets.FP8_ROW, presets.FP8_ROW),
    ("tensors", presets.FP8_TENSOR, presets.FP8_TENSOR),
    ("e5m2 by e4m3", presets.FP8_E5M2_ROW, presets.FP8_TENSOR),
    ("blocks", presets.FP8_1X128, presets.FP8_128X128),
    ("mxfp8", presets.MXFP8, presets.MXFP8),
    ("mxfp4", presets.MXFP4, presets.MXFP4),
    ("nvfp4", presets.NVFP4, presets.NVFP4),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def call(op: object, output: object, *args: object, scale: Tensor | None = None, zero: Tensor | None = None) -> Call:
    return Call(op, output, scale, zero, tuple(operand(x) for x in args), {})


def factors(lhs: Quantizer, rhs: Quantizer, shape: tuple[int, ...] = (5, 256), n: int = 48) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(shape, generator=g), torch.randn(n, shape[-1], generator=g)
    return hop.quantize(lhs, x), hop.quantize(rhs, w)


def by_product(asked: Call) -> list[Tensor] | Tensor:
    """The call by its product, in plain torch."""

    def mm(lhs: Tensor, rhs: Tensor, out: torch.dtype, **fused: object) -> Tensor:
        product = gpu_product(lhs, rhs, out, **fused)
        checks.check(product)
        return plain.reference(product)

    with mock.patch("hop.kernels.gpu.product.mm", mm):
        return gpu.computed(asked)


def gpu_product(*args: object, **fused: object) -> object:
    from cutlass_kernels.product import Product

    return Product(*args, **fused)


def flat(x: Any) -> list[Tensor]:
    return list(x) if isinstance(x, list) else [x]


class TestMeaning(unittest.TestCase):
    def same(self, asked: Call) -> None:
        for got, wanted in zip(flat(by_product(asked)), flat(meaning.reference(asked)), strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            assert torch.equal(got, wanted), (got.double() - wanted.double()).abs().max()

    @parameterized.expand(INTEGERS)
    def test_integers_are_equal(self, _, lhs, rhs):
        x, w = factors(lhs, rhs)
        bias = torch.randn(48)
        for dtype in DTYPES:
            self.same(call(aten.linear.default, dtype, x, w))
            self.same(call(aten.linear.default, dtype, x, w, bias))
            self.same(call(aten.linear.default, dtype, x, w, torch.arange(48, dtype=torch.int32)))

    @parameterized.expand(INTEGERS)
    def test_sums_that_a_weight_has(self, _, lhs, rhs):
        """A product reads them where zero points are multiplied by them, of the dimension that is summed over."""
        x, w = factors(lhs, rhs)
        if w.quantizer.format.bits != 8:
            with self.assertRaisesRegex(ValueError, "keeps sums of 8-bit integers"):
                hop.pack(w, Summed())
            return
        m, packed = hop.quantize(lhs, torch.randn(7, 48)), hop.pack(w, Summed())
        for op, left, weight, reads in (
            (aten.linear.default, x, packed, True),
            (aten.mm.default, x, packed.t(), True),
            (aten.mm.default, m, packed, False),  # the sums of another dimension
        ):
            asked = call(op, torch.float32, left, weight)
            if not reads and rhs.block[0] == 1:
                with self.assertRaisesRegex(Declined, "a scale of integers changes along the summed dimension"):
                    gpu.asked(asked)
                continue
            self.same(asked)
            has_zero = lhs.scale.has_zero_point() or lhs.format.zero
            product = gpu.asked(asked).product
            assert (product.rhs_sum is not None) == bool(reads and has_zero)
            plainly = Call(op, torch.float32, None, None, (asked.args[0], operand(hop.unpack(weight))), {})
            assert torch.equal(by_product(asked), by_product(plainly))

    @parameterized.expand(INTEGERS)
    def test_requantized_integers_are_equal(self, _, lhs, rhs):
        x, w = factors(lhs, rhs)
        for output, scale, zero in (
            (STATIC, torch.tensor(0.3), torch.tensor(3.0)),
            (RELU, torch.tensor(0.05), torch.tensor(2.0)),
            (MULTIPLIER, torch.tensor(0.3), torch.tensor(-7.0)),
            (COLUMNS, torch.rand(1, 48) + 0.1, None),
        ):
            self.same(call(aten.linear.default, output, x, w, scale=scale, zero=zero))
        self.same(call(aten.linear.default, presets.INT8_ROW, x, w))

    @parameterized.expand(INTEGERS)
    def test_matrices_and_batches_of_rows(self, _, lhs, rhs):
        x, w = factors(lhs, rhs, (2, 3, 64))
        self.same(call(aten.linear.default, torch.bfloat16, x, w))
        m, _ = factors(lhs, rhs)
        b = hop.quantize(presets.INT8_COLUMN, torch.randn(256, 40))
        self.same(call(aten.mm.default, torch.bfloat16, m, b))

    @parameterized.expand(FLOATS)
    def test_floats_are_close(self, _, lhs, rhs):
        for shape in ((5, 256), (2, 3, 256)):
            x, w = factors(lhs, rhs, shape, n=160)
            for asked in (
                call(aten.linear.default, torch.float32, x, w),
                call(aten.linear.default, torch.float32, x, w, torch.randn(160)),
            ):
                got, wanted = by_product(asked), meaning.reference(asked)
                assert isinstance(got, Tensor) and isinstance(wanted, Tensor)
                magnitude = x.dequantize().abs() @ w.dequantize().abs().mT  # rounding errors grow with it
                assert ((got - wanted).abs() <= magnitude * 2.0**-20 + 1e-30).all()

    def test_a_product_of_columns(self):
        x = hop.quantize(presets.FP8_ROW, torch.randn(6, 128))
        w = hop.quantize(presets.FP8_COLUMN, torch.randn(128, 32))
        asked = call(aten.mm.default, torch.float32, x, w)
        torch.testing.assert_close(by_product(asked), meaning.reference(asked), rtol=1e-5, atol=1e-4)


class TestBatches(unittest.TestCase):
    """Two batches, and blocks of 1 x 128 on both sides."""

    @parameterized.expand(
        [
            ("integers", presets.INT8_ROW, presets.INT8_COLUMN),
            ("floats", presets.FP8_ROW, presets.FP8_COLUMN),
            ("one scale", presets.INT8_TENSOR, presets.INT8_TENSOR),
            ("blocks", presets.FP8_1X128, presets.FP8_128X128),
            ("blocks of rows", presets.FP8_1X128, presets.FP8_1X128.transposed(2)),
        ]
    )
    def test_bmm(self, name, lhs, rhs):
        x, y = torch.randn(3, 5, 256), torch.randn(3, 256, 144)
        if name != "one scale":
            lhs, rhs = lhs.of_batch(2), rhs.of_batch(2)
        asked = call(aten.bmm.default, torch.float32, hop.quantize(lhs, x), hop.quantize(rhs, y))
        got, wanted = by_product(asked), meaning.reference(asked)
        if lhs.format.is_integer:
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-3)

    def test_blocks_of_rows_on_both_sides(self):
        x, w = factors(presets.FP8_1X128, presets.FP8_1X128)
        asked = call(aten.linear.default, torch.float32, x, w)
        torch.testing.assert_close(by_product(asked), meaning.reference(asked), rtol=1e-5, atol=1e-3)

    def test_zero_points_of_batches_go_elsewhere(self):
        x, y = torch.randn(3, 5, 64), torch.randn(3, 64, 8)
        asked = call(aten.bmm.default, torch.float32, *(hop.quantize(presets.INT8_TENSOR_AFFINE, t) for t in (x, y)))
        with self.assertRaisesRegex(Declined, "zero points"):
            gpu.asked(asked)


def planned(op: Any, output: Any, args: Any) -> Any:
    """The plan that runs the kernel on buffers as they lie, None if there is none."""
    scales = {} if isinstance(output, torch.dtype) else {"scale": torch.tensor(0.3), "zero": torch.tensor(3.0)}
    own = call(op, output, *args, **scales)
    try:
        return gpu.direct(own, gpu.asked(own).product)
    except Declined:
        return None


class TestPlans(unittest.TestCase):
    """Calls like one before, of which nothing is asked again."""

    @parameterized.expand([*INTEGERS[:5], *FLOATS[:4], ("blocks of rows", Quantizer(INT8, (2, -1)), presets.INT8_ROW)])
    def test_direct_plans_are_equal(self, name, lhs, rhs):
        x, w = factors(lhs, rhs, (6, 256))
        bias = torch.randn(48)

        def prepared(p: Any) -> Any:
            checks.check(p)
            return lambda a, b, out, **fused: plain.reference(gpu_product(a, b, out, **fused))

        with mock.patch("hop.kernels.gpu.product.prepared", prepared):
            for args in ((x, w), (x, w, bias)):
                plan = planned(aten.linear.default, torch.float32, args)
                assert (plan is None) == (name == "blocks of rows")
                if plan is not None:
                    asked = call(aten.linear.default, torch.float32, *args)
                    assert torch.equal(plan(*args), by_product(asked))

    def test_what_is_not_direct(self):
        x, w = factors(presets.INT8_ROW, presets.INT8_ROW)
        for op, output, args in (
            (aten.matmul.default, torch.float32, (x, w)),
            (aten.linear.default, STATIC, (x, w)),
            (aten.linear.default, torch.float64, (x, w)),
            (aten.linear.default, torch.float32, factors(presets.INT8_ROW, presets.INT8_ROW, (2, 3, 64))),
            (aten.linear.default, torch.float32, factors(presets.MXFP8, presets.MXFP8)),
            (aten.linear.default, torch.float32, factors(presets.INT8_ROW, presets.UINT8_TENSOR)),
        ):
            assert planned(op, output, args) is None


class TestDeclines(unittest.TestCase):
    def reason(self, *args: object, **kwargs: object) -> str:
        with pytest.raises(Declined) as declined:
            gpu.asked(call(*args, **kwargs))
        return declined.value.reason

    def test_what_is_no_product_of_a_kernel(self):
        x, w = factors(presets.INT8_ROW, presets.INT8_ROW)
        assert "transformed" in self.reason(
            aten.linear.default, torch.float32, *factors(presets.NVFP4_HADAMARD, presets.NVFP4)
        )
        assert "summed" in self.reason(aten.linear.default, torch.float32, x, factors(x.quantizer, presets.INT4_32)[1])
        assert "two quantized factors" in self.reason(aten.linear.default, torch.float32, torch.randn(5, 256), w)
        assert "integers or of floats" in self.reason(
            aten.linear.default, torch.float32, x, factors(presets.FP8_ROW, presets.FP8_ROW)[1]
        )
        assert "requantizes by" in self.reason(
            aten.linear.default, FIXED, x, w, scale=torch.tensor(0.3), zero=torch.tensor(3.0)
        )
        assert "unit of the sum" in self.reason(
            aten.linear.default, MULTIPLIER, x, w, torch.randn(48), scale=torch.tensor(0.3), zero=torch.tensor(3.0)
        )
        assert "one value for each column" in self.reason(
            aten.linear.default, torch.float32, x, w, torch.randn(48, dtype=torch.float64)
        )
        assert "blocks of 1 x 128" in self.reason(
            aten.linear.default, torch.float32, *factors(presets.FP8_128X128, presets.FP8_128X128)
        )

    @parameterized.expand(
        [
            ("exponents", E4M3, Microscaling(exponent=PowerOfTwo("e7", 7, torch.uint8, bias=63))),
            ("scales", E2M1, TwoLevel(inner=E5M2)),
            ("elements", Float("e3m0", 4, torch.uint8, exponent_bits=3, bias=3, largest=7), Microscaling()),
        ]
    )
    def test_other_formats_of_the_same_bits(self, _name, fmt, rule):
        """A kernel would read them as those that it knows."""
        q = Quantizer(fmt, (1, 32), rule)
        assert "scales in e8m0" in self.reason(aten.linear.default, torch.float32, *factors(q, q))

    def test_the_cpu_is_told_so(self):
        asked = call(aten.linear.default, torch.float32, *factors(presets.INT8_ROW, presets.INT8_ROW))
        assert matching.reason(gpu.GPU, asked) == "for GPUs, but the operands are on cpu"
