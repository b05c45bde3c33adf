"""Norms that are quantized in the same kernel, in the emulator, as hop.scaled asks: the CPU's bits, NaN as one."""

import functools
import math
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
from cutlass_kernels import quantize, quantizing
from cutlass_kernels.elements import FORMATS
from cutlass_kernels.quantizing import LONGEST, Request, Rows
from hop import presets
from hop.impls.scaled.calls import Call
from hop.impls.scaled.gpu_rows import GPU_ROWS, computed
from hop.kernels.cpu import native
from hop.kernels.gpu import quantize as gpu
from hop.kernels.gpu import rows
from hop.numerics import formats
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Microscaling

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.cutlass.test_quantize import code_of
from tests.ptx import Fault, habits
from tests.support import emulated_quantize as emulated
from tests.support import matching
from tests.support.contexts import trace_for_hopper

aten = torch.ops.aten
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F32, F16)
QUANTIZERS = {
    "int8 rows": presets.INT8_ROW,
    "fp8 rows": presets.FP8_ROW,
    "mxfp8": presets.MXFP8,
    "mxfp4": presets.MXFP4,
    "fp8 in 1 x 128": presets.FP8_1X128,
    "int8 affine rows": presets.INT8_ROW_AFFINE,
    "int4 in 32": presets.INT4_32,
    "e5m2 rows": presets.FP8_E5M2_ROW,
    "mxfp8, floor": Quantizer(formats.E4M3, (1, 32), Microscaling(rounding="floor")),
    "int8 tensor": presets.INT8_TENSOR_STATIC_AFFINE,
    "nvfp4": presets.NVFP4,
}
GIVEN: dict[str, tuple[Any, Any]] = {
    "int8 tensor": (torch.tensor(0.02), torch.tensor(3, dtype=torch.int8)),
    "nvfp4": (torch.tensor(5.0), None),
}
COLUMNS = (528, 77)  # whole chunks, and not


def numbers(dtype: torch.dtype, columns: int) -> Tensor:
    """Rows of all kinds: large, small, subnormal, equal, zero, far from their mean, of which one element is most; with
    sums as large as they get, differences that overflow, NaN and infinities."""
    g = torch.Generator().manual_seed(columns)
    info = torch.finfo(dtype)
    x = torch.randn(18, columns, generator=g).clamp(-4, 4)
    big, small = info.max / 8, info.smallest_normal / 4
    scales = {1: big, 2: small, 3: small * 2.0**-6, 4: info.max / 4.5, 5: 2.0**-20, 6: 2.0**-3}
    for row, scale in scales.items():
        x[row] *= scale
    x[7], x[8], x[9] = 3.25, -0.0, x[9] + 1000
    x[10] = torch.where(torch.arange(columns) % 2 == 0, info.max, -info.max)
    x[11] = info.max
    x[12, 1:], x[12, 0] = x[12, 1:] * 2.0**-18, 1.5
    x[13, 1:] = 0
    x[14, columns // 2] = math.nan
    x[15, ::5] = math.inf
    x[16, -1] = -math.inf
    x[17] *= torch.exp2(torch.randint(-12, 6, (columns,), generator=g).float())
    return x.to(dtype)


def vectors(columns: int, *dtypes: torch.dtype | None) -> list[Tensor | None]:
    found = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
    return [None if dtype is None else found[i].to(dtype) for i, dtype in enumerate(dtypes)]


def by_kernel(op: Any, q: Quantizer, args: tuple[Any, ...], *given: Any, **kwargs: Any) -> list[Tensor]:
    """The buffers by the emulated kernel, as hop's Kernel runs it."""

    def quantized(r: Request) -> list[Tensor]:
        quantizing.check(r)
        assert quantize.declines(r) is None
        results = quantize.run(r)
        assert [(tuple(t.shape), t.dtype) for t in results] == r.results()
        return results

    with emulated.here(), mock.patch.object(gpu.kernels(), "quantized", quantized):
        return computed(Call(op, q, *(given or (None, None)), args, kwargs))


def words(x: Tensor) -> Tensor:
    """The bits of x, those of NaNs as one."""
    wide = x.float() if x.dtype.is_floating_point else x.to(torch.int32)
    return torch.where(wide.isnan(), 0x7FC00000, wide.contiguous().view(torch.int32))


def check(op: Any, q: Quantizer, args: tuple[Any, ...], *given: Any, **kwargs: Any) -> None:
    named = dict(zip(("output_scale", "output_zero_point"), given, strict=False))
    wanted = hop.scaled(op, q, *args, **named, **kwargs)
    got = by_kernel(op, q, args, *given, **kwargs)
    for (name, b), a in zip(wanted.buffers().items(), got, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous(), (name, a.dtype, b.dtype, a.shape)
        differ = words(a) != words(b)
        assert not differ.any(), f"{name}: {differ.sum()} differ, in rows {differ.reshape(len(b), -1).any(1).nonzero()}"


def rms(q: Quantizer, x: Tensor, weight: torch.dtype | None = None, *given: Any, eps: float | None = 1e-6) -> None:
    check(aten.rms_norm.default, q, (x, [x.shape[-1]], *vectors(x.shape[-1], weight), eps), *given)


def layer(q: Quantizer, x: Tensor, weight: Any = None, bias: Any = None, *given: Any) -> None:
    check(aten.layer_norm.default, q, (x, [x.shape[-1]], *vectors(x.shape[-1], weight, bias), 1e-5), *given)


CASES = [(f"{name}, {i}", name, DTYPES[i % 3], COLUMNS[i % 2]) for i, name in enumerate(QUANTIZERS)]
EVERY = [
    (f"{name}, {dtype}, {n}", name, dtype, n) for name in QUANTIZERS for dtype in DTYPES for n in (*COLUMNS, 16, 2061)
]


class TestNorms(unittest.TestCase):
    @pytest.mark.full
    def test_int8_rows(self):
        rms(presets.INT8_ROW, numbers(BF16, 528), BF16)

    @parameterized.expand(CASES)
    @pytest.mark.full
    @pytest.mark.sampled(6)
    def test_rms_norm(self, name, key, dtype, columns):
        rms(QUANTIZERS[key], numbers(dtype, columns), (None, dtype, F32)[columns % 3], *GIVEN.get(key, ()))

    @parameterized.expand(CASES)
    @pytest.mark.full
    @pytest.mark.sampled(6)
    def test_layer_norm(self, name, key, dtype, columns):
        layer(QUANTIZERS[key], numbers(dtype, columns), dtype, F32, *GIVEN.get(key, ()))

    @parameterized.expand(EVERY)
    @pytest.mark.exhaustive
    def test_each(self, name, key, dtype, columns):
        x = numbers(dtype, columns)
        for weight in (None, *DTYPES):
            rms(QUANTIZERS[key], x, weight, *GIVEN.get(key, ()), eps=None)
            layer(QUANTIZERS[key], x, weight, None if weight is dtype else weight, *GIVEN.get(key, ()))

    @pytest.mark.full
    def test_rows_of_many_warps(self):
        """Of 16 warps, which exchange sums as large as they get."""
        layer(presets.INT8_ROW_AFFINE, numbers(BF16, LONGEST)[[10, 11]], BF16)

    @pytest.mark.exhaustive
    def test_each_count_of_warps(self):
        for columns in (1040, 2048, 8192, LONGEST):
            x = numbers(BF16, columns)[[0, 4, 10, 11, 12, 14]]
            rms(presets.INT8_ROW, x, BF16)
            layer(presets.INT8_ROW_AFFINE, x, BF16)

    @pytest.mark.full
    def test_other_shapes_and_strides(self):
        wide = numbers(BF16, 96)[:12]
        for x in (wide[:, 16:80], wide[:6, 3:67].t()[:16].t(), wide[:4, :48].reshape(2, 2, 48), wide[0]):
            rms(presets.MXFP8, x, BF16)

    @pytest.mark.full
    def test_eps(self):
        x = numbers(F32, 64)
        for eps in (0.0, None):
            rms(presets.INT8_ROW, x[[0, 1, 2, 3, 7, 10]], eps=eps)


class TestBarriers(unittest.TestCase):
    """Of a row of three warps, in a block of four: each barrier is needed, and no order of warps changes a bit."""

    def outcome(self, text: str, *names: str) -> list[Tensor] | None:
        """The buffers by the kernel with a PTX in the place of its own; None if the emulator finds a fault."""
        host = self.host.with_ptx(text)
        host.habits = habits(*names)
        with mock.patch.object(quantize, "compiled", lambda _: host):
            try:
                return quantize.run(self.request)
            except Fault:
                return None

    @pytest.mark.full
    def test_each_is_needed(self):
        x = numbers(BF16, 1040)[[4, 11]]
        vector = torch.randn(1040).bfloat16()
        self.request = Request(x, "s8", "minmax", (1, -1), operation="layer_norm", weight=vector, bias=vector, eps=1e-5)
        self.host = emulated.compiled(quantize.variant_of(self.request)).host
        text, orders = self.host.ptx, ("first_ahead", "last_ahead", "others_stop")
        right = self.outcome(text, "prompt")
        assert right is not None
        for name in orders:
            got = self.outcome(text, name)
            assert got is not None and all(map(torch.equal, got, right)), name
        barriers = list(re.finditer(r"^\tbar\.sync.*\n", text, re.MULTILINE))
        assert len(barriers) == 6  # of two magnitudes, two sums, and the two ends of the results
        for match in barriers:
            without = text[: match.start()] + text[match.end() :]
            found = (self.outcome(without, name) for name in orders)
            assert not all(f is not None and all(map(torch.equal, f, right)) for f in found), match.start()


class TestCompile(unittest.TestCase):
    @parameterized.expand([
        (Rows(BF16, FORMATS["s8"], "amax", threads=512, operation="rms_norm", weight="bf16"),),
        (Rows(F32, FORMATS["u8"], "minmax", threads=512, operation="layer_norm", weight="f32", bias="f32"),),
    ])  # fmt: skip
    @pytest.mark.full
    def test_registers(self, variant):
        code_of(variant)


class TestAsked(unittest.TestCase):
    """What hop.scaled asks a GPU for, with tensors that have no data."""

    def setUp(self):
        trace_for_hopper(self)

    def test_the_leaf_stands_in_programs(self):
        for q in (presets.INT8_ROW, presets.MXFP8):

            def quantized(q: Quantizer, x: Tensor, weight: Tensor) -> list[Tensor]:
                call = Call(aten.rms_norm.default, q, None, None, (x, [64], weight, 1e-6), {})
                return matching.computed(GPU_ROWS, call)

            with FakeTensorMode():
                x = torch.empty(2, 24, 64, device="cuda", dtype=BF16)
                weight = torch.empty(64, device="cuda", dtype=BF16)
            graph = make_fx(functools.partial(quantized, q))(x, weight)
            leaves = [n.target for n in graph.graph.nodes if "cutlass_kernels" in str(n.target)]
            assert leaves == [torch.ops.cutlass_kernels.quantize.default]
            outputs: Any = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            wanted = [(tuple(shape), dtype) for shape, dtype in q.buffers((2, 24, 64)).values()]
            assert [(tuple(o.meta["val"].shape), o.meta["val"].dtype) for o in outputs] == wanted

    def declined(self, op: Any, q: Any, *args: Any, **named: Any) -> str:
        with mock.patch.object(rows, "takes", lambda _: True), mock.patch.object(Call, "device", torch.device("cuda")):
            return matching.reason(GPU_ROWS, Call(op, q, named.get("scale"), None, args, {}))

    def test_reasons(self):
        x, norm = torch.zeros(4, 64), aten.rms_norm.default
        assert self.declined(norm, presets.INT8_ROW, x, [64]) == ""
        assert self.declined(aten.layer_norm.default, presets.FP8_1X128, x, [64]) == ""
        for words, op, q, *args in (
            ("for quantized results", norm, BF16, x, [64]),
            ("an operand is float64", norm, presets.INT8_ROW, x.double(), [64]),
            ("for norms of the last dimension", norm, presets.INT8_ROW, x, [4, 64]),
            ("batch_norm does not reduce rows", aten.batch_norm.default, presets.INT8_ROW, x),
            ("an operand is quantized", norm, presets.INT8_ROW, hop.quantize(presets.INT8_ROW, x).operand, [64]),
            ("groups within them", norm, presets.INT8_TENSOR, x, [64]),
            ("not of blocks of", norm, presets.FP8_128X128, x, [64]),
            ("not of blocks of", norm, presets.INT8_COLUMN, x, [64]),
            ("which must be given", norm, presets.NVFP4, x, [64]),
            ("of at most 16384 elements", norm, presets.INT8_ROW, torch.zeros(1, LONGEST + 16), [LONGEST + 16]),
            ("for int8, int4, fp8 and fp4", norm, presets.TERNARY_ROW, x, [64]),
            ("non-empty tensors of known sizes", norm, presets.INT8_ROW, x[:0], [64]),
            ("for two factors of one shape", torch.ops.hop.silu_mul.default, presets.INT8_ROW, x, x[:1]),
            ("not exp", aten.exp.default, presets.INT8_ROW, x),
            ("weight is not float32", norm, presets.INT8_ROW, x, [64], torch.zeros(64, dtype=torch.int8)),
        ):
            assert words in self.declined(op, q, *args), (words, self.declined(op, q, *args))
        assert "for GPUs" in matching.reason(GPU_ROWS, Call(norm, presets.INT8_ROW, None, None, (x, [64]), {}))
        with native.use("off"):
            assert "GPU rows: for GPUs" in hop.explain(norm, presets.INT8_ROW, x, [64])

    def test_wrong_calls(self):
        made = Request(torch.zeros(4, 64), "s8", "amax", (1, -1), operation="rms_norm")
        quantizing.check(made)
        for words, named in (
            ("operation must be empty or one of", {"operation": "mean"}),
            ("copies must be 'rowwise'", {"copies": "both"}),
            ("noise None", {"noise": torch.zeros(4, 64, dtype=torch.uint8)}),
            ("weight is for operations", {"operation": "", "weight": torch.zeros(64)}),
            ("weight must be float32", {"weight": torch.zeros(63)}),
            ("bias must be float32", {"bias": torch.zeros(64, dtype=torch.float64)}),
            ("other is for operations", {"other": torch.zeros(4, 64)}),
            ("other must be float32", {"operation": "silu", "other": torch.zeros(4, 63)}),
        ):
            with self.assertRaisesRegex(ValueError, words):
                quantizing.check(replace(made, **named))
