"""Experts on a GPU, whose kernel of groups stands here in plain torch: what it is asked, and that it means the same."""

import unittest
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized
from torch import Tensor

import hop
from cutlass_kernels import checks, plain
from cutlass_kernels.product import Product
from hop.nn import stacks
from hop.nn.stacks import Stack

SCHEMES = {
    "int8": hop.schemes.INT8_DYNAMIC,
    "affine rows": hop.Scheme(hop.presets.INT8_ROW_AFFINE, hop.presets.INT8_ROW),
    "fp8": hop.schemes.FP8_DYNAMIC_ROW,
    "blocks": hop.Scheme(hop.presets.FP8_1X128, hop.presets.FP8_128X128),
}


class TestExperts(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.asked: list[Product] = []

    def computed(self, on_gpu: bool, x: Tensor, ends: Tensor, given: Any, scheme: Any, columns: bool) -> Tensor:
        def mm(lhs: Tensor, rhs: Tensor, out: torch.dtype, **fused: Any) -> Tensor:
            self.asked.append(Product(lhs, rhs, out, **fused))
            checks.check(self.asked[-1])
            return plain.reference(self.asked[-1])

        rows = torch.arange(x.shape[0]).flip(0)
        with (
            mock.patch("hop.kernels.gpu.product.takes", lambda x: on_gpu),
            mock.patch("hop.kernels.gpu.product.declines", lambda p: None),
            mock.patch("hop.kernels.gpu.product.mm", mm),
        ):
            return stacks.chain(x, rows, ends, given, torch.nn.functional.silu, scheme, columns)

    @parameterized.expand([(name, columns, bias) for name in SCHEMES for columns in (False, True) for bias in (0, 1)])
    def test_the_same_as_group_by_group(self, name, columns, bias):
        scheme = SCHEMES[name]
        assert scheme.rhs is not None and scheme.lhs is not None
        x, ends = torch.randn(20, 144).bfloat16(), torch.tensor([7, 7, 18])
        q = (scheme.rhs.transposed(2) if columns else scheme.rhs).of_batch(2)
        made = []
        for r, k in ((160, 144), (40, 160)):
            weight = torch.randn(3, k, r) if columns else torch.randn(3, r, k)
            made.append(Stack(hop.quantize(q, weight.bfloat16()), torch.randn(3, r).bfloat16() if bias else None))
        wanted = self.computed(False, x, ends, made, scheme, columns)
        assert not self.asked
        got = self.computed(True, x, ends, made, scheme, columns)
        assert len(self.asked) == 2 and all(p.groups == "rows" for p in self.asked)
        assert got.dtype == wanted.dtype and not got[18:].any()
        if scheme.lhs.format.is_integer:
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)

    def test_others_go_group_by_group(self):
        scheme = hop.schemes.INT8_DYNAMIC
        x, ends = torch.randn(9, 48), torch.tensor([4, 9])
        floats = [Stack(torch.randn(2, 16, 48), None)]
        other = hop.schemes.INT8_DA_INT4_W
        assert other.rhs is not None
        nibbles = [Stack(hop.quantize(other.rhs.of_batch(2), torch.randn(2, 16, 64)), None)]
        for given, own, inputs in ((floats, scheme, x), (nibbles, other, torch.randn(9, 64))):
            got = self.computed(True, inputs, ends, given, own, False)
            assert not self.asked and torch.equal(got, self.computed(False, inputs, ends, given, own, False))


if __name__ == "__main__":
    unittest.main()
