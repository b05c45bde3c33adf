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
CODES = torch.arange(-32, 32, dtype=torch.int8).view(4, 16)
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
    @pytest.mark.full
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


def made_by_constructor(codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
    return hop.QuantizedTensor({"codes": codes, "scale": scale, "zero_point": zero_point}, ROWS, (4, 16), torch.float32)


def made_by_proto(codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
    return hop.TensorProto((4, 16), quantizer=ROWS).create_tensor([codes, scale, zero_point])


def made_from_codes(codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
    return hop.from_codes(ROWS, codes, scale, zero_point)


def made_by_quantize(codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
    numbers = (codes.float() - float(zero_point)) * float(scale)
    return hop.quantize(ROWS, numbers, scale=scale, zero_point=zero_point)


def made_by_scaled(codes: Tensor, scale: Any, zero_point: Any) -> Tensor:
    numbers = (codes.float() - float(zero_point)) * float(scale)
    return hop.scaled(aten.relu.default, ROWS, numbers, output_scale=scale, output_zero_point=zero_point)


MAKERS = (made_by_constructor, made_by_proto, made_from_codes, made_by_quantize, made_by_scaled)
DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class TestScalars(unittest.TestCase):
    """Scales and zero points as numbers, and zero points of any integer dtype, wherever a tensor is made."""

    def expected(self, make: Any) -> np.ndarray:
        codes = CODES.numpy().astype(np.float32) - 3
        return (np.maximum(codes, 0) if make is made_by_scaled else codes) * np.float32(0.5)

    @parameterized.expand([(make,) for make in MAKERS])
    def test_numbers(self, make):
        for scale, zero_point in ((0.5, 3), (torch.tensor(0.5), torch.tensor(3, dtype=torch.int8)), (0.5, True + 2)):
            t = make(CODES, scale, zero_point)
            assert t.scale.shape == t.zero_point.shape == (4, 1) and t.zero_point.dtype == torch.int8
            np.testing.assert_array_equal(hop.dequantize(t).numpy(), self.expected(make))

    @parameterized.expand(itertools.product(MAKERS, DTYPES))
    def test_integer_zero_points(self, make, dtype):
        t = make(CODES, 0.5, torch.tensor(3, dtype=dtype))
        np.testing.assert_array_equal(hop.dequantize(t).numpy(), self.expected(make))
        if dtype == torch.int8:
            return  # all are codes
        beyond = {torch.uint8: 200, torch.uint64: 2**64 - 3}.get(dtype, 300)
        wrong = [torch.tensor(beyond, dtype=dtype)]
        if make not in (made_by_quantize, made_by_scaled):  # whose own oracle takes one zero point
            wrong.append(torch.tensor([[3], [3], [beyond], [3]], dtype=dtype))
        for each in wrong:
            with pytest.raises(ValueError, match=f"zero_point must be a code of int8, from -128 to 127; got {beyond}"):
                make(CODES, 0.5, each)

    @parameterized.expand([(make,) for make in MAKERS])
    def test_numbers_out_of_range(self, make):
        for wrong in (128, -129, 2**70):
            with pytest.raises(ValueError, match="zero_point must be a code of int8, from -128 to 127; got "):
                make(CODES, 0.5, wrong)
        with pytest.raises(TypeError, match="zero_point must be"):
            make(CODES, 0.5, True)

    def test_one_for_each_block(self):
        zero_points = torch.tensor([[1], [2], [3], [300]], dtype=torch.int16)
        numbers = torch.randn(4, 16)
        for given in (zero_points, zero_points.int()):
            with pytest.raises(ValueError, match="got 300"):
                hop.quantize(ROWS, numbers, scale=0.5, zero_point=given)
        t = hop.quantize(ROWS, numbers, scale=0.5, zero_point=zero_points.clamp(max=127))
        assert t.zero_point.flatten().tolist() == [1, 2, 3, 127]

    def test_own_dtypes_are_not_copied(self):
        scale, zero_point = torch.full((4, 1), 0.5), torch.full((4, 1), 3, dtype=torch.int8)
        for make in (made_by_constructor, made_by_proto, made_from_codes):
            t = make(CODES, scale, zero_point)
            assert [b.data_ptr() for b in t.buffers().values()] == [x.data_ptr() for x in (CODES, scale, zero_point)]

    @parameterized.expand([(make,) for make in MAKERS[:3]])
    @pytest.mark.compiler
    @pytest.mark.quick(3)
    def test_compiled_and_exported(self, make):
        class Module(torch.nn.Module):
            def forward(self, codes: Tensor) -> Tensor:
                return hop.dequantize(make(codes, 0.5, 3))

        want = self.expected(make)
        np.testing.assert_array_equal(torch.compile(Module(), fullgraph=True, backend="aot_eager")(CODES).numpy(), want)
        for strict in (False, True):
            program = torch.export.export(Module(), (CODES,), strict=strict)
            np.testing.assert_array_equal(program.module()(CODES).numpy(), want)

    def test_of_calls_with_gradients(self):
        """Numbers compute what tensors do, also in the backward."""
        numbers = hop.Scales(lhs=1, lhs_zero_point=3, rhs=0.5)
        tensors = hop.Scales(torch.tensor(1.0), torch.tensor(3, dtype=torch.int8), torch.tensor(0.5))
        calls = (
            lambda x, w, c: hop.quantized(aten.linear.default, hop.schemes.INT8_STATIC, x, w, scales=c),
            lambda x, w, c: hop.scaled(
                aten.relu.default, ROWS, x, output_scale=c.lhs, output_zero_point=c.lhs_zero_point
            ),
            lambda x, w, c: hop.quantize(ROWS, x, scale=c.lhs, zero_point=c.lhs_zero_point),
        )
        for call in calls:
            found = []
            for scales in (numbers, tensors):
                torch.manual_seed(0)
                x, w = (torch.randn(4, 16, requires_grad=True) for _ in range(2))
                y = hop.dequantize(y) if isinstance(y := call(x, w, scales), hop.QuantizedTensor) else y
                y.square().sum().backward()
                found.append((y.detach(), x.grad))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    @pytest.mark.compiler
    @pytest.mark.full
    def test_scales_of_operators_compiled(self):
        """Numbers that change become inputs."""
        relu, x = aten.relu.default, torch.randn(4, 16)
        for function in (
            lambda x, s, z: hop.quantize(ROWS, x, scale=s, zero_point=z),
            lambda x, s, z: hop.fake_quantize(ROWS, x, scale=s, zero_point=z),
            lambda x, s, z: hop.scaled(relu, ROWS, x, output_scale=s, output_zero_point=z),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            for s, z in ((0.5, 3), (0.25, -7)):
                one, other = function(x, s, z), compiled(x, s, z)
                one, other = (hop.dequantize(t) if isinstance(t, hop.QuantizedTensor) else t for t in (one, other))
                assert torch.equal(one, other)


class TestErrors(unittest.TestCase):
    @parameterized.expand(
        [
            ("quantizer", TypeError, "quantizer must be a Quantizer", {"quantizer": "int8"}),
            ("codes", TypeError, "codes must be a tensor", {"codes": [1]}),
            ("codes_dtype", TypeError, "codes must be of an integer dtype for int8", {"codes": torch.ones(4, 16)}),
            ("codes_beyond", ValueError, "codes must be from -128 to 127.*300", {"codes": torch.full((4, 16), 300)}),
            ("zero_beyond", ValueError, "zero_point must be a code of int8.*got 128", {"zero_point": 128}),
            ("zero_float", TypeError, "zero_point must be torch.int8 or another integer dtype", {"zero_point": 0.5}),
            ("zero_missing", ValueError, "zero_point must be given", {"zero_point": None}),
            ("zero_unasked", ValueError, "zero_point must be None", {"quantizer": CHANNELS}),
            ("scale_shape", ValueError, r"scale must broadcast to \(4, 1\).*got \(3,\)", {"scale": torch.ones(3)}),
            ("scale_dtype", TypeError, "scale must be floating point", {"scale": torch.tensor(1)}),
            ("scale_text", TypeError, "scale must be a number or a tensor", {"scale": "1"}),
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
