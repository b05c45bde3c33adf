"""How scaled asks the GPU for bfloat16 by weights of 4 bits, whose kernel stands here in plain torch."""

import unittest
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized
from torch import Tensor

import hop
from cutlass_kernels import nibbles
from hop import presets
from hop.impls.scaled import gpu_nibbles, meaning
from hop.impls.scaled.gpu_nibbles import NIBBLES
from tests.impls.test_scaled_gpu import call

aten = torch.ops.aten
WEIGHTS = (presets.INT4_32, presets.INT4_128, presets.UINT4_32_AFFINE, presets.UINT4_64_AFFINE)


def computed(asked: Any) -> Tensor:
    def mm(x: Any, codes: Any, scale: Any, zero: Any, bias: Any, *, group: int, out_dtype: torch.dtype) -> Tensor:
        nibbles.check(x, codes, scale, zero, bias, group, out_dtype)
        return nibbles.reference(x, codes, scale, zero, bias, group, out_dtype)

    with mock.patch("hop.kernels.gpu.product.nibble_mm", mm):
        found = NIBBLES.run(asked)
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
                    assert gpu_nibbles.form_declines(asked) is None
                    got, wanted = computed(asked), meaning.reference(asked)
                    assert got.shape == wanted.shape and got.dtype == wanted.dtype
                    magnitude = x.float().abs() @ w.dequantize().float().abs().mT + 4
                    assert ((got.double() - wanted.double()).abs() <= magnitude * 2.0**-7).all()

    def test_what_it_declines(self):
        w, x = hop.quantize(presets.INT4_32, torch.randn(48, 256)), torch.randn(5, 256)
        half = x.bfloat16()
        for args, words in (
            ((x, w), "bfloat16 beside"),
            ((hop.quantize(presets.INT8_ROW, x), w), "bfloat16 beside"),
            ((half, hop.quantize(presets.INT8_ROW, torch.randn(48, 256))), "codes of 4 bits"),
            ((half[:, :250], hop.quantize(presets.INT4_32, torch.randn(48, 250))), "a multiple"),
            ((half, w, torch.randn(48).double()), "a bias with one value"),
        ):
            assert words in (gpu_nibbles.form_declines(call(aten.linear.default, torch.bfloat16, *args)) or "")
        asked = call(aten.linear.default, torch.bfloat16, half, w)
        assert "for GPUs" in (NIBBLES.declines(asked) or "")


if __name__ == "__main__":
    unittest.main()
