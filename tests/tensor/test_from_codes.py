"""hop.from_codes: codes that were made elsewhere, in eager mode, compiled, exported and lowered; against numpy."""

import itertools
import unittest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import Quantizer, formats, presets, scale_rules

aten = torch.ops.aten
AFFINE = Quantizer(formats.INT8, scale=scale_rules.Static(affine=True))
ROWS = Quantizer(formats.INT8, (1, -1), scale_rules.Static(affine=True))
CHANNELS = Quantizer(formats.INT8, (1, -1), scale_rules.Static())


class Block(torch.nn.Module):
    """A linear layer and a residual addition, from codes to codes."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(hop.from_codes(CHANNELS, weight, scale, axis=0), requires_grad=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = hop.from_codes(AFFINE, codes, 0.05, 3)
        y = hop.scaled(aten.linear.default, AFFINE, x, self.weight, **output(0.1, -5))
        return hop.scaled(aten.add.Tensor, AFFINE, x, y, **output(0.125, 0)).codes


def output(scale: float, zero_point: int) -> dict[str, Tensor]:
    return {"output_scale": torch.tensor(scale), "output_zero_point": torch.tensor(zero_point, dtype=torch.int8)}


def rounded(y: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    return np.clip(np.rint(y / np.float32(scale)).astype(np.int64) + zero_point, -128, 127)


def block() -> tuple[Block, Tensor, np.ndarray]:
    """The module, an input, and the codes that numpy finds."""
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (4, 16), dtype=np.int8)
    w, scale = rng.integers(-127, 128, (16, 16), dtype=np.int8), (rng.random(16, dtype=np.float32) + 1) / 512
    sums = (x.astype(np.int64) - 3) @ w.T.astype(np.int64)
    y = rounded(sums.astype(np.float32) * (np.float32(0.05) * scale), 0.1, -5)
    z = (x.astype(np.float32) - 3) * np.float32(0.05) + (y.astype(np.float32) + 5) * np.float32(0.1)
    return Block(torch.from_numpy(w), torch.from_numpy(scale)), torch.from_numpy(x), rounded(z, 0.125, 0)


class TestCodesToCodes(unittest.TestCase):
    def test_eager(self):
        module, x, want = block()
        np.testing.assert_array_equal(module(x).numpy(), want)

    @pytest.mark.compiler
    def test_compiled(self):
        module, x, want = block()
        np.testing.assert_array_equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x).numpy(), want)

    @parameterized.expand([(False,), (True,)])
    def test_exported_and_lowered(self, strict):
        module, x, want = block()
        program = torch.export.export(module, (x,), strict=strict)
        for run in (program.module(), hop.export.lower(program).module()):
            np.testing.assert_array_equal(run(x).numpy(), want)


class TestForms(unittest.TestCase):
    def test_takes_what_fits_without_a_copy(self):
        for q in (presets.INT8_ROW, presets.INT4_32, presets.NVFP4, presets.MXFP8, presets.UINT4_32_AFFINE):
            t = hop.quantize(q, torch.randn(8, 64))
            buffers = t.buffers()
            given = {k: v for k, v in buffers.items() if k not in ("codes", "scale")}
            made = hop.from_codes(q, t.codes, t.scale, **given, shape=t.shape, dtype=torch.bfloat16)
            assert made.dtype == torch.bfloat16 and made.quantizer == q
            assert [b.data_ptr() for b in made.buffers().values()] == [b.data_ptr() for b in buffers.values()]
            if q.format.bits < 8:  # one code in each element
                own = hop.from_codes(q, q.format.unpack(t.codes, 64), t.scale, **given)
                for one, other in zip(own.buffers().values(), buffers.values(), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    @parameterized.expand(
        [
            ("numbers", 0.5, 3, None),
            ("zero_dimensions", torch.tensor(0.5), torch.tensor(3), None),
            ("columns", torch.rand(4, 1), torch.randint(-9, 9, (4, 1), dtype=torch.int32), None),
            ("vectors", torch.rand(4), torch.randint(-9, 9, (4,), dtype=torch.int64), 0),
            ("from_the_end", torch.rand(4), torch.randint(-9, 9, (4,), dtype=torch.int16), -2),
        ]
    )
    def test_scales_and_zero_points_of_any_shape(self, _, scale, zero_point, axis):
        codes = torch.randint(-128, 128, (4, 16), dtype=torch.int8)
        got = hop.dequantize(hop.from_codes(ROWS, codes, scale, zero_point, axis=axis))
        s, z = (np.asarray(v, np.float32) for v in (scale, zero_point))
        s, z = (v[:, None] if v.ndim == 1 else v for v in (s, z))
        np.testing.assert_array_equal(got.numpy(), (codes.numpy().astype(np.float32) - z) * s)

    def test_convolution_weights_by_channel(self):
        q = Quantizer(formats.INT8, (1, -1, -1, -1), scale_rules.Static())
        codes, scale = torch.randint(-128, 128, (6, 3, 3, 3), dtype=torch.int8), torch.rand(6)
        assert torch.equal(hop.dequantize(hop.from_codes(q, codes, scale, axis=0)), codes * scale[:, None, None, None])


class TestErrors(unittest.TestCase):
    @parameterized.expand(
        [
            ("quantizer", TypeError, "quantizer must be a Quantizer", {"quantizer": "int8"}),
            ("codes", TypeError, "codes must be a tensor", {"codes": [1]}),
            ("codes_dtype", TypeError, "codes must be of an integer dtype for int8", {"codes": torch.ones(4, 16)}),
            ("codes_beyond", ValueError, "codes must be from -128 to 127.*300", {"codes": torch.full((4, 16), 300)}),
            ("zero_beyond", ValueError, "zero_point must be from -128 to 127 for int8, got 128", {"zero_point": 128}),
            ("zero_float", TypeError, "zero_point must be torch.int8 or another integer dtype", {"zero_point": 0.5}),
            ("zero_missing", ValueError, "zero_point must be given", {"zero_point": None}),
            ("zero_unasked", ValueError, "zero_point must be None", {"quantizer": CHANNELS}),
            ("scale_shape", ValueError, r"scale must broadcast to \(4, 1\).*got \(3,\)", {"scale": torch.ones(3)}),
            ("scale_dtype", TypeError, "scale must be floating point", {"scale": 1}),
            ("axis", ValueError, r"axis must be a dimension of \(4, 16\), got 2", {"axis": 2}),
            ("shape", ValueError, "buffer codes must be torch.int8", {"shape": (4, 8)}),
            ("amax", ValueError, "global_amax must be None", {"global_amax": 1.0}),
            ("dtype", TypeError, "torch.int8", {"dtype": torch.int8}),
        ]
    )  # fmt: skip
    def test_says_what(self, _, error, words, changed):
        good: dict[str, Any] = {"quantizer": ROWS, "codes": torch.zeros(4, 16, dtype=torch.int8), "scale": 1.0}
        good |= {"zero_point": 0} | changed
        quantizer, codes = good.pop("quantizer"), good.pop("codes")
        with pytest.raises(error, match=words):
            hop.from_codes(quantizer, codes, good.pop("scale"), good.pop("zero_point"), **good)

    def test_packed(self):
        q = hop.pack(hop.quantize(presets.INT8_ROW, torch.randn(64, 64))).quantizer
        if q.is_tiled():
            with pytest.raises(ValueError, match=r"then call hop\.pack"):
                hop.from_codes(q, torch.zeros(64, 64, dtype=torch.int8), 1.0)

    def test_codes_of_few_bits(self):
        for fmt, dtype in itertools.product((formats.INT4, formats.UINT2), (torch.uint8, torch.int64)):
            q = replace(CHANNELS, format=fmt)
            with pytest.raises(ValueError, match="codes must be from"):
                hop.from_codes(q, torch.full((2, 8), 9, dtype=dtype), 1.0)
