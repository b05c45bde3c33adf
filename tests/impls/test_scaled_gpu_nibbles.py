"""How scaled asks the GPU for bfloat16 and 8 bits by weights of 4 bits, whose kernel stands here in plain torch."""

import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from cutlass_kernels import nibbles
from hop import presets
from hop.dispatch.kernel import Declined
from hop.impls.scaled import gpu_nibbles, meaning
from hop.impls.scaled.gpu_nibbles import NIBBLES
from tests.impls.test_scaled_gpu import call
from tests.support import matching

aten = torch.ops.aten
WEIGHTS = (presets.INT4_32, presets.INT4_128, presets.UINT4_32_AFFINE, presets.UINT4_64_AFFINE)


LEFT = (presets.INT8_ROW, presets.INT8_ROW_AFFINE, presets.UINT8_ROW_AFFINE, presets.INT8_TENSOR, presets.UINT8_TENSOR)
FLOATS = (presets.FP8_ROW, presets.FP8_TENSOR, presets.FP8_E5M2_ROW)


def computed(asked: Any) -> Tensor:
    def mm(*args: Any, group: int, out_dtype: torch.dtype) -> Tensor:
        given = nibbles.Asked(*args, group, out_dtype)
        nibbles.check(given)
        return nibbles.reference(given)

    with mock.patch("hop.kernels.gpu.product.nibble_mm", mm):
        found = gpu_nibbles.computed(asked)
        assert isinstance(found, Tensor)
        return found


class TestNibbles(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(str(i), q) for i, q in enumerate(WEIGHTS)])
    def test_near_the_meaning(self, _, q):
        w = hop.quantize(q, torch.randn(48, 256))
        for shape in ((5, 256), (2, 3, 256), (256,), (0, 256)):
            x = torch.randn(shape).bfloat16()
            for out in (torch.bfloat16, torch.float32, torch.float64):
                for bias in ((), (torch.randn(48).bfloat16(),)):
                    asked = call(aten.linear.default, out, x, w, *bias)
                    gpu_nibbles.check_form(asked)
                    got, wanted = computed(asked), meaning.reference(asked)
                    assert got.shape == wanted.shape and got.dtype == wanted.dtype
                    magnitude = x.float().abs() @ w.dequantize().float().abs().mT + 4
                    assert ((got.double() - wanted.double()).abs() <= magnitude * 2.0**-7).all()

    @parameterized.expand([(f"{i}_{j}", p, q) for i, p in enumerate(LEFT) for j, q in enumerate(WEIGHTS)])
    @pytest.mark.quick(4)
    def test_of_integers_the_meaning(self, _, p, q):
        """Bit for bit."""
        w = hop.quantize(q, torch.randn(48, 256))
        for shape in ((5, 256), (2, 3, 256), (256,), (0, 256)):
            x = hop.quantize(p, torch.randn(shape))
            for out in (torch.bfloat16, torch.float32, torch.float64):
                for bias in ((), (torch.randn(48),)):
                    asked = call(aten.linear.default, out, x, w, *bias)
                    gpu_nibbles.check_form(asked)
                    got, wanted = computed(asked), meaning.reference(asked)
                    assert got.dtype == wanted.dtype and torch.equal(got, wanted)

    @parameterized.expand([(f"{i}_{j}", p, q) for i, p in enumerate(FLOATS) for j, q in enumerate(WEIGHTS)])
    def test_of_floats_near_the_meaning(self, _, p, q):
        w, x = hop.quantize(q, torch.randn(48, 256)), hop.quantize(p, torch.randn(5, 256))
        asked = call(aten.linear.default, torch.float32, x, w, torch.randn(48))
        gpu_nibbles.check_form(asked)
        torch.testing.assert_close(computed(asked), meaning.reference(asked), rtol=1e-5, atol=1e-4)

    def test_what_it_declines(self):
        w, x = hop.quantize(presets.INT4_32, torch.randn(48, 256)), torch.randn(5, 256)
        half = x.bfloat16()
        for args, words in (
            ((x, w), "bfloat16 or 8 bits"),
            ((hop.quantize(presets.INT4_32, x), w), "bfloat16 or 8 bits"),
            ((hop.quantize(presets.INT8_32, x), w), "one scale per row"),
            ((hop.quantize(presets.MXFP8, x), w), "scales in float32"),
            ((hop.quantize(presets.FP8_1X128, x), w), "one scale per row"),
            ((half, hop.quantize(presets.INT8_ROW, torch.randn(48, 256))), "codes of 4 bits"),
            ((half[:, :250], hop.quantize(presets.INT4_32, torch.randn(48, 250))), "a multiple"),
            ((half, w, torch.randn(48).double()), "a bias with one value"),
        ):
            with self.assertRaisesRegex(Declined, words):
                gpu_nibbles.check_form(call(aten.linear.default, torch.bfloat16, *args))
        asked = call(aten.linear.default, torch.bfloat16, half, w)
        assert "for GPUs" in matching.reason(NIBBLES, asked)
