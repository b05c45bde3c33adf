"""Eager quantize and dequantize by a GPU's kernel, which stands here in plain torch: it is asked once for calls alike,
and explain says so."""

import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hop
from hop import presets
from hop.dispatch import plan
from hop.dispatch.kernel import Kernel, decline
from hop.kernels.cpu import native
from hop.kernels.gpu import quantize as gpu
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from tests.support.contexts import enter


class TestPlans(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.asked = self.ran = 0
        self.reason: str | None = None
        enter(
            self,
            native.use("off"),
            mock.patch.object(gpu, "QUANTIZE", Kernel("GPU", lambda call: self.matched(self.quantize))),
            mock.patch.object(gpu, "DEQUANTIZE", Kernel("GPU", lambda call: self.matched(self.dequantize))),
        )
        plan.forget()
        self.addCleanup(plan.forget)

    def matched(self, compute: Any) -> Any:
        self.asked += 1
        decline(self.reason)
        return compute

    def quantize(self, q: str, x: Tensor, *given: Any) -> list[Tensor]:
        self.ran += 1
        return list(copies.quantize(Quantizer.parse(q), x, tuple(given[-1]), *given[:-1]).values())

    def dequantize(self, q: str, buffers: Any, usages: Any, shape: Any, dtype: torch.dtype) -> Tensor:
        self.ran += 1
        parsed = Quantizer.parse(q)
        named = dict(zip(copies.names(parsed, tuple(usages)), buffers, strict=True))
        return copies.dequantize(parsed, named, shape).to(dtype)

    def test_a_kernel_is_asked_once(self):
        for q in (presets.INT8_ROW, presets.INT4_32, presets.MXFP8, presets.INT8_ROW_AFFINE):
            x, self.asked, self.ran = torch.randn(4, 64), 0, 0
            with native.use("off"), mock.patch.object(self, "reason", "not yet"):
                wanted = hop.quantize(q, x + 0)  # leaves a plan that a kernel declined
            plan.forget()
            self.asked = 0
            got = wanted
            for i in range(3):
                got = hop.quantize(q, x)
                assert (self.asked, self.ran) == (1, i + 1)
                assert got.dtype == x.dtype and got.quantizer == q
                for name, buffer in wanted.buffers().items():
                    assert torch.equal(getattr(got, name).view(torch.uint8), buffer.view(torch.uint8)), name
            self.asked = 0
            numbers = [hop.dequantize(got) for _ in range(3)]
            assert self.asked == 1 and self.ran == 6
            assert torch.equal(numbers[0], numbers[2])

    def test_what_a_plan_does_not_take(self):
        """A negated view and freed memory go the general way, as does what draws random bits."""
        q, x = presets.INT8_ROW, torch.randn(4, 64)
        wanted = hop.quantize(q, -x).codes
        hop.quantize(q, x)
        assert torch.equal(hop.quantize(q, torch._neg_view(x)).codes, wanted)
        freed = torch.randn(4, 64)
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="is too small for it"):
            hop.quantize(q, freed)
        with pytest.raises(ValueError, match="noise"):
            hop.quantize(presets.NVFP4_GRADIENT, x)
        self.reason = "for others"
        assert torch.equal(hop.quantize(presets.FP8_ROW, x).codes.view(torch.uint8), _fp8(x))

    def test_explain(self):
        x = torch.randn(4, 64)
        own = hop.quantize(presets.INT8_ROW, x)
        for said in (
            hop.explain(hop.quantize, presets.INT8_ROW, x, usages=["rowwise", "columnwise"]),
            hop.explain(hop.fake_quantize, presets.INT8_ROW, x),
            hop.explain(hop.dequantize, own),
        ):
            assert said.endswith(": chosen") and "native: " in said
        assert hop.explain(hop.quantize, presets.INT8_ROW, x).endswith("\nGPU: chosen")
        self.reason = "for others"
        assert "\nGPU: for others\n" in hop.explain(hop.dequantize, own)


def _fp8(x: Tensor) -> Tensor:
    return presets.FP8_ROW.quantize(x)["codes"].view(torch.uint8)
