"""Rows by the native kernels: the bits of the reference, NaNs as one."""

import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import presets
from hop.impls.scaled.native_rows import rounded_and_quantized
from hop.kernels.cpu import native, operators
from hop.numerics.hadamard import SIZES
from tests import levels

aten = torch.ops.aten

OUTPUTS: dict[str, Any] = {
    **{str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)},
    **{
        name: getattr(presets, name)
        for name in "INT8_ROW INT8_ROW_AFFINE INT4_32 UINT4_32_AFFINE FP8_ROW MXFP8 MXFP4 NVFP4 INT8_TENSOR".split()
    },
    "static": presets.INT8_TENSOR_STATIC_AFFINE,
}
SHAPES = ((6, 40), (3, 5, 64), (2, 700), (1, 4100), (3, 512), (7,), (4, 1))


def nasty(shape: tuple[int, ...], kind: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if kind == 1:
        return x * 1e30
    if kind == 2:
        return x * 1e-38
    if kind == 3:
        x.view(-1)[0] = float("nan")
    if kind == 4:
        x.view(-1)[::5] = float("inf")
    if kind == 5:
        return torch.full(shape, 3.25)
    if kind == 6:
        return x * 0 - 0.0
    if kind == 7:
        return x + 1000
    return x


def calls(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[Any, Any, dict[str, Any]]]:
    weight, bias = torch.randn(2, shape[-1], generator=generator)
    last = [shape[-1]]
    sizes = [size for size in SIZES if shape[-1] % size == 0]
    return [
        *((torch.ops.hop.hadamard.default, (size,), {}) for size in {*sizes[:1], *sizes[-1:]}),
        (aten.gelu.default, (), {}),
        (aten.gelu.default, (), {"approximate": "tanh"}),
        (aten.exp.default, (), {}),
        (aten.rsqrt.default, (), {}),
        (aten.hardswish.default, (), {}),
        (aten.hardsigmoid.default, (), {}),
        (aten.leaky_relu.default, (0.1,), {}),
        (torch.ops.hop.silu_mul.default, (torch.randn(shape, generator=generator).to(dtype),), {}),
        (aten.layer_norm.default, (last, weight.to(dtype), bias), {}),
        (aten.layer_norm.default, (list(shape[-2:]), None, None, 1e-3), {}),
        (aten.rms_norm.default, (last, weight), {}),
        (aten.softmax.int, (-1,), {}),
        (aten.log_softmax.int, (len(shape) - 1,), {}),
    ]


def near_middles(of: Any, top: float, scale: float) -> Tensor:
    """The float32 numbers around those from 0 to top whose function is in the middle of two multiples of scale."""
    want = (torch.arange(128, dtype=torch.float64) + 0.5) * scale
    want = want[(want > of(torch.zeros((), dtype=torch.float64))) & (want < of(torch.tensor(top, dtype=torch.float64)))]
    low, high = torch.zeros_like(want), torch.full_like(want, top)
    for _ in range(80):
        middle = (low + high) / 2
        below = of(middle) < want
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    around = torch.arange(-40, 41, dtype=torch.int32)
    return (low.float().view(torch.int32)[:, None] + around).view(torch.float32).flatten()


def _gelu(how: str) -> tuple[Any, dict[str, Any], Any]:
    return aten.gelu.default, {"approximate": how}, lambda x: torch.nn.functional.gelu(x, approximate=how)


FUNCTIONS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "silu": (aten.silu.default, {}, torch.nn.functional.silu),
    "sigmoid": (aten.sigmoid.default, {}, torch.sigmoid),
    "tanh": (aten.tanh.default, {}, torch.tanh),
}


def words(x: Tensor) -> Tensor:
    """The bits of x, those of NaNs as one."""
    wide = x.float() if x.dtype.is_floating_point else x.to(torch.int32)
    return torch.where(wide.isnan(), 0x7FC00000, wide.contiguous().view(torch.int32))


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, hop.QuantizedTensor):
        return a.dtype == b.dtype and torch.equal(words(a), words(b))
    pairs = zip(a.buffers().values(), b.buffers().values(), strict=True)
    return a.shape == b.shape and all(x.shape == y.shape and torch.equal(words(x), words(y)) for x, y in pairs)


def of(op: Any, output: Any, x: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    scale = {"output_scale": torch.tensor(0.02), "output_zero_point": torch.tensor(3, dtype=torch.int8)}
    if isinstance(output, torch.dtype):  # then an operand is quantized
        return hop.scaled(op, output, hop.quantize(presets.FP8_ROW, x), *args, **kwargs)
    return hop.scaled(op, output, x, *args, **kwargs, **(scale if output is OUTPUTS["static"] else {}))


@unittest.skipUnless(levels.HERE, "needs the native kernels")
class TestRows(unittest.TestCase):
    @parameterized.expand([(name, level) for name in OUTPUTS for level in levels.OWN])
    @pytest.mark.quick(90)
    def test_the_bits_of_the_reference(self, name, level):
        output, generator, kind = OUTPUTS[name], torch.Generator().manual_seed(len(name)), 0
        with levels.at(level):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for shape in SHAPES:
                    for op, args, kwargs in calls(shape, dtype, generator):
                        kind += 1
                        x = nasty(shape, kind % 8, generator).to(dtype)
                        got = of(op, output, x, args, kwargs)
                        with native.use("off"):
                            want = of(op, output, x, args, kwargs)
                        assert same(got, want), (op, kwargs, dtype, shape, kind % 8)

    @parameterized.expand([(how, level) for how in ("none", "tanh") for level in levels.OWN])
    def test_gelu_of_every_bfloat16(self, how, level):
        """Codes of int8, that need not come from results in float32: those of the results."""
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
        every = every[every.isfinite()]
        every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
        with levels.at(level):
            for top in (0.1, 0.3, 0.332, 0.5, 0.871, 1.5, 3.3, 4.9, 8, 100, 3e8, 3e38):
                own = every[every <= top]
                x = own[: len(own) // 613 * 613].view(-1, 613).clone()
                x[:, 0] = top
                want = hop.quantize(presets.INT8_ROW, hop.scaled(aten.gelu.default, torch.float32, x, approximate=how))
                assert same(hop.scaled(aten.gelu.default, presets.INT8_ROW, x, approximate=how), want), top

    @parameterized.expand([(name, level) for name in FUNCTIONS for level in levels.OWN])
    def test_codes_of_functions_near_their_middles(self, name, level):
        """Codes of int8, that need not come from results in float32: those of the results."""
        op, kwargs, of = FUNCTIONS[name]
        static = {"output_scale": torch.tensor(0.011), "output_zero_point": torch.tensor(-5, dtype=torch.int8)}
        with levels.at(level):
            for top in (0.05, 0.4, 0.75, 1.9, 3.3, 6.1, 40.0):
                scale = float(of(torch.tensor(top, dtype=torch.float64))) / 127
                middles = [near_middles(of, top, scale), near_middles(of, top, 0.011)]
                x = torch.cat([torch.tensor([top]), *middles, -middles[0], torch.randn(99)]).clamp(-3e38, top)[None]
                y = hop.scaled(op, torch.float32, x, **kwargs)
                want = hop.quantize(presets.INT8_ROW, y)
                assert same(hop.scaled(op, presets.INT8_ROW, x, **kwargs), want), top
                q = presets.INT8_TENSOR_STATIC_AFFINE
                given = {"scale": static["output_scale"], "zero_point": static["output_zero_point"]}
                want = hop.quantize(q, y, **given)
                assert same(hop.scaled(op, q, x, **kwargs, **static), want), top

    @parameterized.expand([(name, level) for name in ("INT8_ROW", "INT4_32", "MXFP8") for level in levels.OWN])
    @pytest.mark.quick(2)
    def test_floats_and_their_codes(self, name, level):
        q, generator, kind = OUTPUTS[name], torch.Generator().manual_seed(5), 0
        with levels.at(level):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for shape in SHAPES[:5]:
                    for op, args, kwargs in calls(shape, dtype, generator):
                        kind += 1
                        x = nasty(shape, kind % 8, generator).to(dtype)
                        found = rounded_and_quantized(op, q, (x, *args), kwargs)
                        if found is None:
                            assert q is not OUTPUTS["INT8_ROW"]
                            continue
                        assert same(found[0], hop.scaled(op, dtype, x, *args, **kwargs)), (op, kwargs, dtype, shape)
                        assert same(found[1], hop.quantize(q, found[0])), (op, kwargs, dtype, shape, kind % 8)

    def test_it_is_taken(self):
        x = torch.randn(4, 64)
        for op, args, _ in calls((4, 64), torch.float32, torch.Generator()):
            said = hop.explain(op, presets.INT8_ROW, x, *args)
            assert "native rows: chosen" in said, (op, said)
        said = hop.explain(aten.softmax.int, presets.INT8_ROW, x, 0)
        assert "native rows: for softmax of the last dimension" in said
        said = hop.explain(aten.gelu.default, presets.INT8_TENSOR, x)
        assert "native rows: for given scales, or scales of a row or less" in said

    def test_threads_do_not_matter(self):
        generator = torch.Generator().manual_seed(1)
        x, before = torch.randn(333, 1000, generator=generator), torch.get_num_threads()
        results: list[Any] = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(
                    [
                        hop.scaled(o, presets.INT8_ROW, x, *a, **k)
                        for o, a, k in calls((333, 1000), x.dtype, torch.Generator().manual_seed(2))
                    ]
                )
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(map(same, results[0], other))

    def test_a_row_does_not_depend_on_its_neighbours(self):
        x = torch.randn(50, 384, generator=torch.Generator().manual_seed(3))
        for op, args in ((aten.layer_norm.default, ([384],)), (aten.softmax.int, (-1,))):
            whole = hop.scaled(op, presets.INT8_ROW, x, *args)
            for i in (0, 17, 49):
                assert torch.equal(hop.scaled(op, presets.INT8_ROW, x[i : i + 1], *args).codes, whole.codes[i : i + 1])

    def test_what_the_operator_does_not_take(self):
        x, other = torch.randn(3, 8), torch.randn(3, 7)
        for given, words, message in (
            ((x, None, None, None, None, None), "1 tanh", "not understood"),
            ((x, other, None, None, None, None), "1 gated function=silu", "shape"),
            ((x, None, None, None, None, None), "1 gated function=silu", "a gated product needs other"),
            ((x, None, other[0], None, None, None), "1 rms_norm number=0 sums=1", "as many elements as a row"),
            ((x, None, None, None, None, None), "1 softmax", "sums= is for norms and softmax"),
            ((x, None, None, None, None, None), "1 softmax sums=3", "fewer dimensions than sums= counts"),
            ((x.double(), None, None, None, None, None), "1 softmax sums=1", "float32, bfloat16 or float16"),
            ((x[:0], None, None, None, None, None), "1 softmax sums=1", "must not be empty"),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                operators.rows(*given, words)
