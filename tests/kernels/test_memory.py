"""What is read lies inside its memory: buffers are checked when they are assigned, memory when it is read."""

import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized

import hop
from hop import QuantizedTensor, TensorProto
from hop import presets as P
from hop.compat import memory
from hop.kernels.cpu import forms, native
from hop.numerics.copies import Buffer
from hop.numerics.formats import E8M0, INT8, Codebook, Float, Integer, PowerOfTwo
from hop.numerics.hadamard import Hadamard
from hop.numerics.layouts import Decoded, Tiled
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed, Microscaling, Static, TwoLevel
from tests import fuzz

ROOT = Path(__file__).parents[2]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]
aten = torch.ops.aten


def child(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


# ---- one change each, in a process of its own

SETUP = """
import torch, hop
from hop import presets as P
from hop.kernels.cpu import native
from hop.layouts import Decoded
aten, T = torch.ops.aten, hop.QuantizedTensor
torch.manual_seed(0)
x, w = hop.quantize(P.INT8_ROW, torch.randn(16, 256)), hop.quantize(P.INT8_ROW, torch.randn(64, 256))
p = hop.pack(w)
image = hop.quantize(P.UINT8_TENSOR_AFFINE, torch.randn(2, 16, 8, 8))
kernel = hop.quantize(P.INT8_CONV, torch.randn(8, 16, 3, 3))
affine, number = hop.quantize(P.INT8_TENSOR_AFFINE, torch.randn(4, 8)), torch.randn(512, 512)
linear = lambda a, b: hop.scaled(aten.linear.default, torch.float32, a, b)
convolve = lambda a, b: hop.scaled(aten.conv2d.default, torch.float32, a, b)
one, q = torch.ones(1), torch.nn.Parameter(torch.randn(64, 64))
q.grad, optimizer = torch.randn(64, 64), hop.optim.AdamW8bit([q])
linear(x, w), linear(x, p), convolve(image, kernel)  # so that plans are known
free = lambda t: t.untyped_storage().resize_(0)
"""

CHANGES = {
    "short_scale": 'T({"codes": x.codes, "scale": x.scale[:1]}, x.quantizer, x.shape, x.dtype)',
    "short_codes": 'T({"codes": x.codes[:2], "scale": x.scale}, x.quantizer, x.shape, x.dtype)',
    "float_codes": 'T({"codes": x.codes.float(), "scale": x.scale}, x.quantizer, x.shape, x.dtype)',
    "resize": "x.codes.resize_(2, 2); linear(x, w)",
    "scale_set": "x.scale.set_(torch.zeros(1)); linear(x, w)",
    "assigned": "x.codes = x.codes[:1]; linear(x, w)",
    "freed_codes": "free(x.codes); linear(x, w)",
    "freed_weight": "free(w.codes); linear(x, w)",
    "freed_packed_weight": "free(p.codes); linear(x, p)",
    "freed_kernel": "free(kernel.codes); convolve(image, kernel)",
    "dequantize_freed": "free(x.codes); hop.dequantize(x)",
    "quantize_freed": "free(number); hop.quantize(P.INT8_ROW, number)",
    "negative_shape": "hop.TensorProto((-1, 4), quantizer=P.INT8_ROW)",
    "float_zero_point": "affine.zero_point = torch.full((1, 1), 7.4)",
    # and further ones
    "part_of_a_storage": "w.codes.untyped_storage().resize_(4096); linear(x, w)",
    "freed_scale": "free(w.scale); linear(x, w)",
    "freed_bias": "b = torch.randn(64); free(b); hop.scaled(aten.linear.default, torch.float32, x, w, b)",
    "meta_swapped_in": "torch.utils.swap_tensors(w.codes, w.codes.to('meta')); linear(x, w)",
    "another_dtype": "x.scale.data = x.scale.double(); linear(x, w)",
    "view_of_freed": "free(x.codes); hop.dequantize(x.t())",
    "clone_of_freed": "free(x.codes); x.clone()",
    "freed_output_scale": "free(one); hop.scaled(aten.linear.default, P.INT8_TENSOR_STATIC, x, w, output_scale=one)",
    "freed_state": "optimizer.step(); free(optimizer.state[q]['exp_avg'].codes); optimizer.step()",
    "freed_gradient": "optimizer.step(); free(q.grad); optimizer.step()",
    "freed_bias_of_a_plan": """
with native.use("off"):
    b = torch.randn(64)
    call = lambda: hop.scaled(aten.linear.default, torch.float32, x, w, b)
    call(), free(b), call()""",
    "freed_bias_of_bfloat16": """
d, b = hop.pack(hop.quantize(P.FP8_ROW, torch.randn(64, 256)), Decoded()), torch.randn(64)
call = lambda: hop.scaled(aten.linear.default, torch.bfloat16, torch.randn(16, 256).bfloat16(), d, b)
call(), free(b), call()""",
    "padded_codes": "free(x.codes); torch.nn.functional.pad(x, (0, 0, 0, 3))",
    "padded_scale": "x.scale.resize_(3, 1); torch.nn.functional.pad(x, (0, 0, 0, 3))",
    "calibrated": "free(number); hop.calibration.amax(P.INT8_ROW, number)",
    "gathered": """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
free(x.codes), dist.all_gather([x.clone()], x)""",
    "gathered_into": """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
y = x.clone()
free(y.codes), dist.all_gather([y], x)""",
    "freed_seed": "s = torch.tensor(3); free(s); hop.noise(s, (4096,))",
}


RUN = """
import os, sys
sys.stdout.flush()
for name, code in CHANGES.items():
    if not (pid := os.fork()):
        try:
            exec(code)
            print(name, "gave a result", flush=True)
        except (TypeError, ValueError, RuntimeError):
            os._exit(0)
        os._exit(1)
    print(name, os.waitpid(pid, 0)[1], flush=True)
"""


class TestChanges(unittest.TestCase):
    @pytest.mark.full
    def test_each_raises(self):
        """An error, and no signal; each in a process of its own."""
        done = child("-c", f"{SETUP}torch.set_num_threads(1)\nCHANGES = {CHANGES!r}\n{RUN}")
        assert done.stdout.split("\n")[:-1] == [f"{name} 0" for name in CHANGES], (done.stdout, done.stderr)


# ---- many at random


class TestFuzz(unittest.TestCase):
    @pytest.mark.full
    def test_few(self):
        assert not fuzz.faults("tests.fuzz", 0, 60)

    @pytest.mark.full
    def test_some(self):
        assert not fuzz.faults("tests.fuzz", 60, 1000)

    @pytest.mark.exhaustive
    def test_many(self):
        assert not fuzz.faults("tests.fuzz", 10**6, 20_000)


# ---- form


class TestForm(unittest.TestCase):
    def setUp(self):
        self.t = hop.quantize(P.INT8_ROW, torch.randn(4, 8))

    def test_buffers_of_the_form_are_taken(self):
        codes, expected = torch.ones(4, 8, dtype=torch.int8), self.t.scale.expand(4, 8)
        self.t.codes = codes
        assert self.t.codes is codes and torch.equal(hop.dequantize(self.t), expected)
        self.t.scale = torch.full((4, 1), 2.0)
        assert torch.equal(hop.dequantize(self.t), torch.full((4, 8), 2.0))
        self.t.quantizer = Quantizer(INT8, (1, -1), Static())
        assert torch.equal(hop.dequantize(self.t), torch.full((4, 8), 2.0))

    def test_others_are_refused(self):
        codes = self.t.codes
        for value, error, words in (
            (codes[:1], ValueError, r"codes must be torch.int8 of \(4, 8\), got torch.int8 of \(1, 8\)"),
            (codes.float(), ValueError, "got torch.float32"),
            (codes.to("meta"), ValueError, "codes must be on cpu, got one on meta"),
            (codes.to_sparse(), ValueError, "must be dense, got one of layout torch.sparse_coo"),
            (None, TypeError, "codes must be a tensor, got None"),
        ):
            with self.assertRaisesRegex(error, words):
                self.t.codes = value
        assert self.t.codes is codes
        with self.assertRaisesRegex(AttributeError, "none named 'zero_point'"):
            self.t.zero_point = torch.zeros(4, 1, dtype=torch.int8)
        with self.assertRaisesRegex(ValueError, "buffers must be"):
            self.t.quantizer = P.NVFP4
        with self.assertRaisesRegex(TypeError, "quantizer must be a Quantizer"):
            self.t.quantizer = None

    @parameterized.expand(
        [
            ("names", lambda b: {"codes": b["codes"]}, ValueError, r"buffers must be \['codes', 'scale'\]"),
            ("order", lambda b: {"scale": b["scale"], "codes": b["codes"]}, ValueError, "in this order"),
            ("no_mapping", lambda b: [*b.values()], TypeError, "buffers must be a mapping"),
            ("none", lambda b: {}, ValueError, r"got \[\]"),
            ("device", lambda b: {**b, "scale": b["scale"].to("meta")}, ValueError, "scale must be on cpu"),
            ("text", lambda b: {**b, "scale": "1"}, TypeError, "scale must be a tensor, got '1'"),
            ("number", lambda b: {**b, "codes": 1.0}, TypeError, "codes must be a tensor, got 1.0"),
        ]
    )
    def test_constructor(self, _: str, change: Callable[..., Any], error: type[Exception], words: str):
        with self.assertRaisesRegex(error, words):
            QuantizedTensor(change(self.t.buffers()), self.t.quantizer, self.t.shape, self.t.dtype)

    def test_traced_alike(self):
        def make(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return hop.dequantize(QuantizedTensor({"codes": codes, "scale": scale}, P.INT8_ROW, (4, 8), torch.float32))

        compiled = torch.compile(make, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(self.t.codes, self.t.scale), hop.dequantize(self.t))
        words = r"scale must be torch.float32 of \(4, 1\), got torch.float32 of \(1, 1\)"
        for function in (make, compiled):
            with self.assertRaisesRegex(Exception, words):
                function(self.t.codes, self.t.scale[:1])

    def test_a_lost_form_is_said(self):
        hop.scaled(aten.linear.default, torch.float32, self.t, self.t)
        self.t.scale.t_()
        for call in (
            lambda: hop.scaled(aten.linear.default, torch.float32, self.t, self.t),
            lambda: hop.dequantize(self.t),
            lambda: hop.pack(self.t),
            lambda: self.t + 1,
        ):
            with self.assertRaisesRegex(ValueError, r"buffer scale must be torch.float32 of \(4, 1\)"):
                call()


class TestPrograms(unittest.TestCase):
    @parameterized.expand(
        [
            ("resized", lambda t: t.scale.resize_(1, 1)),
            ("wider", lambda t: setattr(t.scale, "data", t.scale.double())),
            ("floats", lambda t: setattr(t.codes, "data", t.codes.float())),
        ]
    )
    def test_buffers_that_lost_their_form(self, _name, change):
        """Are refused where they are traced too."""
        t = hop.quantize(P.INT8_ROW, torch.randn(16, 64))
        change(t)
        x = torch.randn(2, 64)
        for call in (lambda t: hop.dequantize(t), lambda t: hop.scaled(aten.linear.default, torch.float32, x, t)):
            with pytest.raises(ValueError, match=r"buffer (scale|codes) must be"):
                call(t)
            with pytest.raises(Exception, match=r"buffer (scale|codes) must be"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(t)


class TestHolds(unittest.TestCase):
    def test_by_offset_and_strides(self):
        x = torch.zeros(4, 6)
        cut = [x, x[1:], x.t(), x[3:, 5:], x.expand(3, 4, 6), x[:, 5], x[:, 1::2]]
        whole = [x[:3], x[:0], x[:, :5], x[0, 0], x[:, ::2], x[:, 4], x[4:, 5]]
        assert all(map(memory.holds, (*cut, *whole)))
        x.untyped_storage().resize_(4 * 24 - 1)
        assert not any(map(memory.holds, cut)) and all(map(memory.holds, whole))
        with self.assertRaisesRegex(RuntimeError, r"shape \(4, 6\).* has a storage of 95 bytes"):
            memory.check([x[:0], x])

    @parameterized.expand([(str(dtype).removeprefix("torch."), dtype) for dtype in DTYPES])
    @pytest.mark.skipif(native.library().functions is None, reason="needs the native library")
    def test_natively(self, _name, dtype):
        """Which calls the same tensors short, of each dtype; those that it does not know are left to Python."""
        known = dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
        x = torch.empty(4, 6, dtype=dtype)
        views = [x, x[1:], x.t(), x[3:, 5:], x.expand(3, 4, 6), x[:3], x[:0], x[0, 0], x[:, ::2], x[4:, 5]]
        for size in (24, 23, 18, 0):
            x.untyped_storage().resize_(size * x.itemsize)
            for v in views:
                empty = v.numel() == 0
                assert forms._all_fit(None, [v]) == (memory.holds(v) and (known or empty)), (size, v.shape)
            assert forms._all_fit(None, views[5:]) == (known and all(map(memory.holds, views[5:])))

    @pytest.mark.skipif(native.library().functions is None, reason="needs the native library")
    def test_forms(self):
        form = forms.Form([Buffer("codes", (4, 6), torch.int8), Buffer("scale", (4, 1), torch.float32)])
        codes, scale = torch.zeros(4, 6, dtype=torch.int8), torch.ones(4, 1)
        assert form.fits([codes, scale]) and form.fits([codes.t().contiguous().t(), scale[:1].expand(4, 1)])
        others = [codes.t(), codes[:3], codes.view(torch.uint8), codes.to("meta"), codes.view(4, 2, 3), scale]
        assert not any(form.fits([other, scale]) for other in others)
        scale.untyped_storage().resize_(15)
        assert not form.fits([codes, scale])
        assert not forms.Form([Buffer("codes", (1,) * 9, torch.int8)]).fits([codes.new_zeros((1,) * 9)])  # has no room


# ---- constructors and given scales


class TestConstructors(unittest.TestCase):
    @parameterized.expand([
        ("proto_positional", lambda: TensorProto((4, 4), torch.float32, P.INT8_ROW), TypeError,
            "as quantizer="),
        ("proto_sizes", lambda: TensorProto((4, -4)), ValueError, "0 or more"),
        ("proto_float_size", lambda: TensorProto((4, 4.0)), TypeError, "integers"),
        ("proto_no_shape", lambda: TensorProto(4), TypeError, "tuple of integers"),
        ("proto_dtype", lambda: TensorProto((4,), "float32"), TypeError, "dtype must be a torch.dtype"),
        ("proto_device", lambda: TensorProto((4,), device="gpu"), ValueError, "device must be .* got 'gpu'"),
        ("proto_grad", lambda: TensorProto((4,), requires_grad=1), TypeError,
            "requires_grad must be True or False"),
        ("proto_int_grad", lambda: TensorProto((4,), torch.int8, requires_grad=True), ValueError, "for floats"),
        ("proto_quantizer", lambda: TensorProto((4,), quantizer="int8"), TypeError,
            "quantizer must be a Quantizer"),
        ("proto_usages", lambda: TensorProto((4,), usages=7), TypeError, "usages must be a tuple"),
        ("stochastic", lambda: Quantizer(INT8, stochastic="no"), ValueError, "stochastic must be True or False"),
        ("flat", lambda: Quantizer(INT8, flat=None), ValueError, "flat must be True or False"),
        ("hadamard", lambda: Quantizer(INT8, hadamard=True), TypeError, "hadamard must be"),
        ("block", lambda: Quantizer(INT8, (1, 2**31)), ValueError, "block must be"),
        ("affine", lambda: Static(affine="x"), ValueError, "affine must be True or False"),
        ("exponent", lambda: Microscaling(exponent=INT8), TypeError, "exponent must be"),
        ("inner", lambda: TwoLevel(inner=E8M0), TypeError, "inner must be"),
        ("decoded", lambda: Decoded(dtype="bfloat16"), TypeError, "dtype must be torch.bfloat16"),
        ("tiled", lambda: Tiled(columns=1), ValueError, "columns must be True or False"),
        ("name", lambda: Integer(None, 8, torch.int8, -128, 127), ValueError, "name must be text"),
        ("low", lambda: Integer("i", 8, torch.int8, -1.5, 127), ValueError, "low must be an integer"),
        ("bits", lambda: Float("f", True, torch.uint8), ValueError, "bits must be an integer"),
        ("bias", lambda: PowerOfTwo("p", 8, torch.uint8, 1.0), ValueError, "bias must be an integer"),
        ("book", lambda: Codebook("c", 4, torch.uint8, "ab"), ValueError, "book must be a tuple of numbers"),
        ("signs", lambda: Hadamard((1, 2, 1, 1)), ValueError, "signs must be"),
        ("noise_shape", lambda: hop.noise(torch.tensor(1), (-1,)), ValueError, "0 or more"),
    ])  # fmt: skip
    def test_refuse(self, _: str, make: Callable[[], Any], error: type[Exception], words: str):
        with self.assertRaisesRegex(error, words):
            make()

    @parameterized.expand([(str(v), v) for v in (0.0, -1.0, float("nan"), float("inf"), -0.0)])
    def test_given_scales(self, _: str, value: float):
        q, x = P.INT8_TENSOR_STATIC, torch.randn(4, 8)
        t = hop.quantize(P.INT8_ROW, x)
        good = torch.full((1, 1), 0.5)
        hop.scaled(aten.linear.default, q, t, t, output_scale=good)  # its plan is known then
        for scale in (torch.tensor(value), torch.full((1, 1), value), torch.full((1, 1), value).double()):
            for call in (
                lambda scale=scale: hop.quantize(q, x, scale=scale),
                lambda scale=scale: hop.fake_quantize(q, x, scale=scale),
                lambda scale=scale: hop.scaled(aten.linear.default, q, t, t, output_scale=scale),
            ):
                with self.assertRaisesRegex(ValueError, "scale must be above 0 and finite"):
                    call()
        rows = torch.tensor([[1.0], [2.0], [value], [1.0]])
        with self.assertRaisesRegex(ValueError, f"scale must be above 0 and finite.*; got {value}"):
            hop.quantize(Quantizer(INT8, (1, -1), Static()), x, scale=rows)

    def test_given_amax(self):
        """0 and infinity are what a tensor can have."""
        x = torch.randn(4, 32)
        for q in (P.NVFP4, Quantizer(P.FP8_TENSOR.format, scale=Delayed()), P.MXFP8):
            name = "global_amax" if q == P.NVFP4 else "scale"
            shape = q.buffers(x.shape)[name][0]
            for value in (0.0, float("inf"), 1.0):
                hop.quantize(q, x, scale=torch.full(shape, value))
            for value in (-1.0, float("nan")):
                with self.assertRaisesRegex(ValueError, "scale must be 0 or more"):
                    hop.quantize(q, x, scale=torch.full(shape, value))

    def test_given_zero_points(self):
        q, x = P.INT8_TENSOR_STATIC_AFFINE, torch.randn(4, 8)
        one = torch.ones(1, 1)
        found = hop.quantize(q, x, scale=one, zero_point=torch.full((1, 1), 7.4))  # learned ones are rounded
        assert found.zero_point.item() == 7
        for value in (float("nan"), float("inf")):
            with self.assertRaisesRegex(ValueError, "zero_point must be finite"):
                hop.quantize(q, x, scale=one, zero_point=torch.full((1, 1), value))
        assert torch.equal(hop.quantize(q, x, scale=1, zero_point=7.4).codes, found.codes)
        with self.assertRaisesRegex(TypeError, "zero_point must be a number or a tensor, got "):
            hop.quantize(q, x, scale=one, zero_point="7")
