"""The kernels that quantize, in the emulator, as hop asks for them: the CPU's codes and scales, bit for bit."""

import functools
import re
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cutlass_kernels
import hop
from cutlass_kernels import dequantize, quantize, quantizing
from cutlass_kernels.elements import FORMATS
from cutlass_kernels.quantizing import Largest, Request, Rows
from hop import presets
from hop.impls.scaled.trials import numbers
from hop.kernels.gpu import quantize as gpu
from hop.numerics import copies, formats
from hop.numerics.estimators import QuantNoise
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, CurrentScaling, Microscaling, MinMax

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.mutations.patterns import EARLY
from tests.ptx import Fault, contractable
from tests.support import cubin, matching
from tests.support import emulated_quantize as emulated
from tests.support.contexts import trace_for_hopper

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS = {
    "int8 rows": presets.INT8_ROW,
    "fp8 rows": presets.FP8_ROW,
    "fp8 in 1 x 128": presets.FP8_1X128,
    "mxfp8": presets.MXFP8,
    "mxfp4": presets.MXFP4,
    "nvfp4": presets.NVFP4,
    "int8 tensor": presets.INT8_TENSOR,
    "fp8 tensor": presets.FP8_TENSOR,
    "int8 affine rows": presets.INT8_ROW_AFFINE,
    "uint8 affine tensor": presets.UINT8_TENSOR_AFFINE,
    "uint8 by amax": Quantizer(formats.UINT8, (1, -1)),
    "e5m2 rows": presets.FP8_E5M2_ROW,
    "e5m2 in 1 x 128": presets.FP8_E5M2_1X128,
    "int4 in 32": presets.INT4_32,
    "uint4 affine in 64": presets.UINT4_64_AFFINE,
    "int8 in 256": presets.INT8_256,
    "mxfp8 e5m2, floor": Quantizer(formats.E5M2, (1, 32), Microscaling(rounding="floor")),
    "mxfp8, even": Quantizer(formats.E4M3, (1, 32), Microscaling(rounding="even")),
    "mxfp4, floor": Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="floor")),
    "mxfp4, ceil": Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="ceil")),
    "mxfp4, even": Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="even")),
    "fp8 rows by amax, floor": Quantizer(formats.E4M3, (1, -1), Amax(floor=1e-3)),
    "fp8 rows, powers of two": Quantizer(formats.E4M3, (1, -1), CurrentScaling(power_of_two=True, eps=1e-4)),
    "int8 affine in 16": Quantizer(formats.INT8, (1, 16), MinMax()),
}
AFFINE_COLUMN = Quantizer(formats.INT8, (-1, 1), MinMax())
TRANSPOSED = {
    "fp8 in 128 x 128": presets.FP8_128X128,
    "fp8 in 1 x 128": presets.FP8_1X128,
    "mxfp8": presets.MXFP8,
    "mxfp4": presets.MXFP4,
    "nvfp4": presets.NVFP4,
    "int8 rows": presets.INT8_ROW,
    "fp8 tensor": presets.FP8_TENSOR,
    "int8 affine rows": presets.INT8_ROW_AFFINE,
    "int8 affine tensor": presets.INT8_TENSOR_AFFINE,
    "mxfp8, floor": Quantizer(formats.E4M3, (1, 32), Microscaling(rounding="floor")),
    "int8 affine in 16": Quantizer(formats.INT8, (1, 16), MinMax()),
    "uint4 affine in 64": presets.UINT4_64_AFFINE,
    "int8 in 128 x 128": Quantizer(formats.INT8, (128, 128)),
}
ROW_SCALES = torch.rand(11, 1, generator=torch.Generator().manual_seed(0)) + 0.1
GIVEN = {
    "int8": (presets.INT8_TENSOR_STATIC, torch.tensor(0.37), None),
    "int8 affine": (presets.INT8_TENSOR_STATIC_AFFINE, torch.tensor(0.37), torch.tensor(-3.0)),
    "uint8 affine": (presets.UINT8_TENSOR_STATIC_AFFINE, torch.tensor(0.37), torch.tensor(7, dtype=torch.uint8)),
    "fp8": (presets.FP8_TENSOR_STATIC, torch.tensor(0.37), None),
    "int8 rows": (presets.INT8_ROW, ROW_SCALES, None),
    "int8 affine rows": (presets.INT8_ROW_AFFINE, ROW_SCALES, (ROW_SCALES * 200 - 120).to(torch.int8)),
    "int4 in 32": (presets.INT4_32, ROW_SCALES.expand(11, 17), None),
    "fp8 rows": (presets.FP8_ROW, ROW_SCALES, None),
    "nvfp4": (presets.NVFP4, torch.tensor(5.0), None),
}
RANDOM = ("int8 rows", "fp8 rows", "nvfp4", "mxfp4, floor", "uint8 affine tensor", "int4 in 32", "e5m2 in 1 x 128")


SHAPES = ((11, 528), (10, 77))  # whole chunks, and not
SETTINGS = {True: SHAPES[0], False: SHAPES[1]}


def asked(q: Quantizer, x: Tensor, usages: tuple[str, ...] = ("rowwise",), **given: Any) -> tuple[Any, ...]:
    named = {"scale": None, "zero_point": None, "noise": None} | given
    return (str(q), x, named["scale"], named["zero_point"], named["noise"], list(usages))


def by_kernel(call: tuple[Any, ...], reports: list[Any] | None = None) -> list[Tensor]:
    """The buffers by the emulated kernels, as hop's Kernel runs them."""

    def quantized(r: Request) -> list[Tensor]:
        quantizing.check(r)
        assert quantize.declines(r) is None
        results = quantize.run(r)
        assert [(tuple(t.shape), t.dtype) for t in results] == r.results()
        return results

    with emulated.here(reports), mock.patch.object(gpu.kernels(), "quantized", quantized):
        return gpu.quantized(*call)


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous(), (a.dtype, b.dtype, a.shape, b.shape)
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b), (
            f"{(a != b).sum()} of {len(a)} bytes differ, the first at {int((a != b).nonzero()[0])}"
        )


def check(q: Quantizer, x: Tensor, usages: tuple[str, ...] = ("rowwise",), **given: Any) -> None:
    wanted = hop.quantize(q, x, usages=usages, **given)
    assert_equal(by_kernel(asked(q, x, usages, **given)), list(wanted.buffers().values()))


CASES = [(f"{name}, {i}", q, DTYPES[i % 3], i % 2 == 0) for i, (name, q) in enumerate(ROWS.items())]
EVERY = [
    (f"{name}, {dtype}, {vector}", q, dtype, vector)
    for name, q in ROWS.items()
    for dtype in DTYPES
    for vector in (True, False)
]


class TestRows(unittest.TestCase):
    def test_int8_rows(self):
        check(presets.INT8_ROW, numbers(torch.bfloat16, *SHAPES[0]))

    def test_fp8_rows(self):
        check(presets.FP8_ROW, numbers(torch.bfloat16, *SHAPES[0]))

    @parameterized.expand(CASES)
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_each(self, _, q, dtype, vector):
        check(q, numbers(dtype, *SETTINGS[vector]))

    @parameterized.expand(EVERY)
    @pytest.mark.exhaustive
    def test_each_dtype_and_form(self, _, q, dtype, vector):
        for rows, columns in (SETTINGS[vector], (1, 16 if vector else 1), (3, 2064 if vector else 2061)):
            check(q, numbers(dtype, rows, columns, odd=rows > 9))

    @pytest.mark.full
    def test_zeros_below_zero(self):
        """Are no larger than any number."""
        x = torch.full((3, 64), -0.0)
        x[0, 40], x[1, 3] = 1.0, -1.0
        check(presets.INT8_ROW_AFFINE, x)
        check(presets.INT8_ROW_AFFINE, x.bfloat16())

    @pytest.mark.full
    def test_long_rows_are_read_twice(self):
        x = numbers(torch.bfloat16, 2, 40_000, odd=False)
        x[1, 39_999] = 500.0
        check(presets.INT8_ROW_AFFINE, x)
        assert quantize.variant_of(Request(x, "s8", "amax", (1, -1))).held == 0

    @pytest.mark.full
    def test_rows_of_many_warps(self):
        for columns in (1040, 9216):
            check(presets.INT8_ROW_AFFINE, numbers(torch.bfloat16, 3, columns, odd=False))

    @pytest.mark.full
    def test_other_strides(self):
        wide = numbers(torch.bfloat16, 12, 96)
        for x in (
            wide[:, 16:80],
            wide[:, 3:67],
            wide[::3, :64],
            wide[:, ::2],
            wide[:, :48].t(),
            wide[:1].expand(5, 96),
        ):
            check(presets.MXFP8, x)

    @pytest.mark.full
    def test_other_shapes(self):
        x = numbers(torch.float32, 24, 64)
        for shape in ((64 * 24,), (2, 12, 64), (2, 3, 4, 64), (1, 24, 64)):
            check(presets.MXFP8, x.reshape(shape))
        check(presets.INT8_CONV, x.reshape(8, 3, 8, 8))
        check(presets.FP8_TENSOR, torch.tensor(3.0))
        check(presets.STATE_FP8, x)

    @parameterized.expand([(name, q, DTYPES[i % 2], i % 3 > 0) for i, (name, q) in enumerate(TRANSPOSED.items())])
    @pytest.mark.full
    @pytest.mark.sampled(13)
    def test_transposed_copies(self, _, q, dtype, vector):
        check(q, numbers(dtype, *((144, 272) if vector else (77, 150))), ("rowwise", "columnwise"))

    @parameterized.expand(list(TRANSPOSED.items()))
    @pytest.mark.exhaustive
    def test_transposed_copies_of_each_dtype(self, _, q):
        for dtype in DTYPES:
            for shape in ((144, 272), (77, 150), (16, 400), (300, 16)):
                for usages in (("rowwise",), ("columnwise",), ("rowwise", "columnwise")):
                    check(q, numbers(dtype, *shape), usages)

    @pytest.mark.exhaustive
    def test_copies_that_are_made_one_by_one(self):
        x = numbers(torch.bfloat16, 48, 256)
        check(presets.INT8_256, x, ("rowwise", "columnwise"))
        noise = torch.randint(0, 256, x.shape, dtype=torch.uint8)
        check(replace(presets.MXFP8, stochastic=True), x, ("rowwise", "columnwise"), noise=noise)

    @parameterized.expand([("fp8", presets.FP8_COLUMN), ("int8", presets.INT8_COLUMN), ("affine", AFFINE_COLUMN)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_columns(self, _, q):
        check(q, numbers(torch.bfloat16, 144, 272))

    @parameterized.expand([("fp8", presets.FP8_COLUMN), ("int8", presets.INT8_COLUMN), ("affine", AFFINE_COLUMN)])
    @pytest.mark.exhaustive
    def test_columns_of_each_dtype(self, _, q):
        for dtype in DTYPES:
            check(q, numbers(dtype, 144, 272))
            check(q, numbers(dtype, 77, 150).reshape(7, 11, 150))
            check(q, numbers(dtype, 48, 32), ("rowwise", "columnwise"))

    @pytest.mark.full
    def test_blocks_of_128_by_128(self):
        check(presets.FP8_128X128, numbers(torch.bfloat16, 77, 150))

    @parameterized.expand([(name, ROWS[name], i) for i, name in enumerate(RANDOM)])
    @pytest.mark.full
    @pytest.mark.sampled(7)
    def test_noise(self, _, q, i):
        q = replace(q, stochastic=True)
        x = numbers(DTYPES[i % 3], *SHAPES[i % 2], odd=q.scale != presets.INT8_ROW.scale)
        for bits, dtype in ((8, torch.uint8), (24, torch.int32)):
            check(q, x, noise=torch.randint(0, 2**bits, x.shape, dtype=dtype))
        seed = torch.tensor(0x123456789ABCDEF + i)
        wanted = hop.quantize(q, x, noise=hop.noise(seed, x.shape, stream=5))
        words = gpu.described(str(q), False)
        own = Request(x, block=gpu.matrix_of(q, x.shape)[1], noise=seed, stream=5, **words)
        quantizing.check(own)
        with emulated.here():
            got = quantize.run(own)
        for a, b in zip(got, wanted.buffers().values(), strict=True):
            assert torch.equal(a.view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

    @parameterized.expand(list(GIVEN.items()))
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_given_scales(self, _, given):
        q, scale, zero = given
        check(q, numbers(torch.bfloat16, *SHAPES[0]), scale=scale, zero_point=zero)


def check_numbers(q: Quantizer, x: Tensor, dtype: torch.dtype) -> None:
    """The numbers of x's codes, NaN for NaN."""
    own = hop.quantize(q, x)
    wanted = hop.dequantize(own, dtype)

    def dequantized(c: dequantize.Codes) -> Tensor:
        dequantize.check(c)
        assert dequantize.declines(c) is None
        return dequantize.run(c)

    with emulated.here(), mock.patch.object(gpu.kernels(), "dequantized", dequantized):
        got = gpu.dequantized(str(q), list(own.buffers().values()), ["rowwise"], list(x.shape), dtype)
    assert got.dtype == dtype and got.shape == wanted.shape
    known = ~wanted.isnan()
    assert torch.equal(got.isnan(), wanted.isnan())
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(got[known].view(words), wanted[known].view(words))


class TestNumbers(unittest.TestCase):
    def test_fp8_rows(self):
        check_numbers(presets.FP8_ROW, numbers(torch.bfloat16, *SHAPES[0]), torch.bfloat16)

    @parameterized.expand(CASES)
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_each(self, _, q, dtype, vector):
        check_numbers(q, numbers(torch.float32, *SETTINGS[vector]), dtype)

    @parameterized.expand(EVERY)
    @pytest.mark.exhaustive
    def test_each_dtype_and_form(self, _, q, dtype, vector):
        for rows, columns in (SETTINGS[vector], (1, 16 if vector else 1), (3, 2064 if vector else 2061)):
            check_numbers(q, numbers(torch.float32, rows, columns, odd=rows > 9), dtype)

    @pytest.mark.exhaustive
    def test_other_blocks(self):
        x = numbers(torch.bfloat16, 144, 272)
        check_numbers(presets.FP8_128X128, x, torch.bfloat16)
        for shape in ((144 * 272,), (2, 72, 272), (1, 2, 72, 272)):
            check_numbers(presets.MXFP8, x.reshape(shape), torch.float32)
        check_numbers(presets.STATE_FP8, x, torch.float32)
        check_numbers(presets.INT8_CONV, x.reshape(16, 9, 16, 17), torch.float16)


def check_both_ways(q: Quantizer, x: Tensor, **given: Any) -> None:
    """fake_quantize by the kernels that quantize and dequantize, NaN for NaN."""

    def quantized(r: Request) -> list[Tensor]:
        quantizing.check(r)
        return quantize.run(r)

    def dequantized(c: dequantize.Codes) -> Tensor:
        dequantize.check(c)
        return dequantize.run(c)

    call = (str(q), x, given.get("scale"), given.get("zero_point"), given.get("noise"), "passed")
    with (
        emulated.here(),
        mock.patch.object(gpu.kernels(), "quantized", quantized),
        mock.patch.object(gpu.kernels(), "dequantized", dequantized),
    ):
        got = gpu.fake_quantized(*call)
    wanted = hop.fake_quantize(q, x, **given)
    assert isinstance(got, Tensor) and got.dtype == wanted.dtype and got.shape == wanted.shape
    known, words = ~wanted.isnan(), {2: torch.int16, 4: torch.int32}[x.itemsize]
    assert torch.equal(got.isnan(), ~known)
    assert torch.equal(got[known].view(words), wanted[known].view(words))


class TestFakeQuantize(unittest.TestCase):
    def test_fp8_rows(self):
        check_both_ways(presets.FP8_ROW, numbers(torch.bfloat16, *SHAPES[0]))

    @pytest.mark.full
    def test_each(self):
        noise = torch.randint(0, 256, SHAPES[0], dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        check_both_ways(presets.INT8_ROW_AFFINE, numbers(torch.float32, *SHAPES[1]))
        check_both_ways(presets.MXFP4, numbers(torch.float16, *SHAPES[1]).reshape(2, 5, 77))
        x, (q, scale, zero) = numbers(torch.bfloat16, *SHAPES[0]), GIVEN["int8 affine"]
        check_both_ways(q, x, scale=scale, zero_point=zero)
        check_both_ways(replace(presets.FP8_ROW, stochastic=True), x, noise=noise)

    def test_reasons(self):
        x = torch.zeros(4, 64)
        for q, words in (
            (presets.STATE8, "for int8, int4, fp8 and fp4"),
            (presets.INT8_TENSOR_STATIC, "scale is None"),
        ):
            with mock.patch.object(gpu, "takes", lambda _: True), mock.patch("torch.cuda.is_available", lambda: True):
                assert words in matching.reason(gpu.FAKE_QUANTIZE, (str(q), x, None, None, None, "passed")), q
        for q, words in (
            (presets.INT8_ROW, "for tensors on GPUs"),
            (replace(presets.INT8_ROW, gradient=QuantNoise()), "noise instead of rounding"),
        ):
            assert words in matching.reason(gpu.FAKE_QUANTIZE, (str(q), x, None, None, None, "passed")), q


def code_of(variant: Any) -> None:
    """It compiles without spills, and nothing in it can be fused."""
    made = emulated.compiled(variant)
    assert contractable(made.ptx) == [] and ".ftz" not in made.ptx
    used = cubin.usage(made.cubin)
    assert used.stack_bytes == 0, f"{used.stack_bytes} bytes of registers are spilled"
    assert used.registers * variant.threads <= 65536


class TestCompile(unittest.TestCase):
    @parameterized.expand([
        (Rows(torch.bfloat16, FORMATS["s8"], "amax", threads=1024),),
        (Rows(torch.float32, FORMATS["u8"], "minmax", threads=1024),),
        (Rows(torch.float32, FORMATS["e4m3"], "current", noise="seed"),),
        (Rows(torch.bfloat16, FORMATS["e2m1"], "two_level", 16, reads=True, noise="seed"),),
        (Largest(torch.float32, both=True),),
    ])  # fmt: skip
    @pytest.mark.full
    def test_registers(self, variant):
        code_of(variant)


class TestProgrammaticLaunches(unittest.TestCase):
    @parameterized.expand([("tensor", presets.INT8_TENSOR), ("column", presets.INT8_COLUMN)])
    @pytest.mark.full
    def test_each_kernel_waits_for_the_one_before(self, _, q):
        x = torch.randn(16, 32)
        words = gpu.described(str(q), False)
        assert not isinstance(words, str)
        r = Request(x, block=q.block, **words)
        kernels = {v: emulated.compiled(v).host for v in quantize.kernels_of(r)}
        assert len(kernels) == 2
        for changed, host in kernels.items():
            early, count = re.subn(r"^\tgriddepcontrol\.wait;\n", "", host.ptx, flags=re.MULTILINE)
            assert count == 1
            others = kernels | {changed: host.with_ptx(early)}
            with mock.patch.object(quantize, "compiled", others.__getitem__), self.assertRaisesRegex(Fault, EARLY):
                quantize.run(r)


class TestInPrograms(unittest.TestCase):
    """What our operators ask a GPU for, traced with tensors that have no data."""

    def setUp(self):
        trace_for_hopper(self)

    def test_the_leaves_stand_in_them(self):
        for q, usages in (
            (presets.FP8_ROW, ["rowwise"]),
            (presets.MXFP8, ["rowwise", "columnwise"]),
            (presets.NVFP4, ["columnwise"]),
            (presets.INT8_TENSOR_AFFINE, ["rowwise"]),
        ):

            def quantized(q: Quantizer, usages: list[str], x: Tensor) -> list[Tensor]:
                call = asked(q, x, tuple(usages))
                buffers = matching.computed(gpu.QUANTIZE, call)
                if "rowwise" not in usages:
                    return buffers
                back = (str(q), buffers, usages, list(x.shape), torch.bfloat16)
                return [*buffers, matching.computed(gpu.DEQUANTIZE, back)]

            with FakeTensorMode():
                x = torch.empty(2, 24, 64, device="cuda", dtype=torch.bfloat16)
            graph = make_fx(functools.partial(quantized, q, usages))(x)
            targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
            leaves = [t for t in targets if "cutlass_kernels" in str(t)]
            assert leaves == [torch.ops.cutlass_kernels.quantize.default] + (
                [torch.ops.cutlass_kernels.dequantize.default] if "rowwise" in usages else []
            )
            wanted = [(b.shape, b.dtype) for b in copies.describe(q, (2, 24, 64), tuple(usages))]
            outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            assert [(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in outputs][: len(wanted)] == wanted

    def test_packs_that_lack_a_kernel(self):
        pack = mock.Mock(has=lambda name, _: "tiles" not in name, folder="kernels")
        missing = mock.Mock(return_value="the CuTe DSL is not installed")
        with (
            mock.patch("cutlass_kernels.quantize_operators.missing", missing),
            mock.patch("cutlass_kernels.cache.missing", missing),
            mock.patch("cutlass_kernels.prebuilt.pack", lambda: pack),
        ):
            x = torch.zeros(128, 256)
            operators = gpu.kernels()
            assert operators.declines(Request(x, "s8", "amax", (1, -1)), (9, 0)) is None
            reason = operators.declines(Request(x, "e4m3", "current", (128, 128)), (9, 0))
            assert "kernels has no kernel tiles_f32_e4m3_current_square" in reason


class TestDeclines(unittest.TestCase):
    def test_reasons(self):
        x = torch.zeros(4, 64)
        with mock.patch.object(gpu, "takes", lambda _: True), mock.patch("torch.cuda.is_available", lambda: True):
            for q, words in (
                (presets.STATE8, "for int8, int4, fp8 and fp4"),
                (Quantizer(formats.INT8, (64, 64)), "blocks within rows"),
                (presets.NVFP4_ROW, "with one amax per tensor"),
                (presets.INT8_TENSOR_STATIC, "scale is None"),
                (presets.TERNARY_ROW, "for int8, int4, fp8 and fp4"),
            ):
                assert words in matching.reason(gpu.QUANTIZE, asked(q, x)), q
            with mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 0)):
                assert "compute capability 9.0" in matching.reason(gpu.QUANTIZE, asked(presets.INT8_ROW, x))
            with mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
                assert not matching.reason(gpu.QUANTIZE, asked(presets.INT8_ROW, x))
        assert "for tensors on GPUs" in matching.reason(gpu.QUANTIZE, asked(presets.INT8_ROW, x))

    def test_wrong_calls(self):
        x = torch.zeros(4, 64)
        for error, words, named in (
            (TypeError, "x must be a matrix", {"x": x[0]}),
            (TypeError, "x must be a matrix", {"x": x.double()}),
            (ValueError, "format must be one of", {"format": "s7"}),
            (ValueError, "rule must be one of", {"rule": "mean"}),
            (ValueError, "block must be two sizes", {"block": (1, 0)}),
            (ValueError, "rounding must be one of", {"rounding": "up"}),
            (ValueError, "is not for s8", {"rule": "current"}),
            (ValueError, "scale is for rules given", {"rule": "given"}),
            (ValueError, "scale must be torch.float32", {"rule": "given", "scale": torch.ones(3, 1)}),
            (ValueError, "noise must be torch.uint8", {"noise": torch.zeros(4, 63, dtype=torch.uint8)}),
            (ValueError, "noise must be torch.int64", {"noise": torch.zeros(1), "stream": 0}),
        ):
            made = Request(**({"x": x, "format": "s8", "rule": "amax", "block": (1, -1)} | named))
            with self.assertRaisesRegex(error, words):
                quantizing.check(made)
