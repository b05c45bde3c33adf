"""Codes, scales and zero points of every quantizer: against numpy, torchao and gfloat, bit for bit, and by hand."""

import contextlib
import itertools
import math
import unittest
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torchao.optim import quant_utils
from torchao.optim.subclass_fp8 import quantize_fp8
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

import hop
from hop import presets
from hop.impls.quantize import fake_quantize_operator
from hop.kernels.aten.quantize import FastBlocks
from hop.kernels.cpu import native
from hop.numerics.formats import E2M1, E4M3, E5M2, INT4, INT8, UINT4, UINT8, Float, Integer
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import (
    MX_ROUNDINGS,
    AbsMean,
    Amax,
    Blocks,
    BlockScaling,
    CurrentScaling,
    Microscaling,
    MinMax,
    Static,
    TwoLevel,
)
from hop.tensor.buffers import operators as leaves
from tests import levels
from tests.support import numerics, scaled_oracles
from tests.support.scaled_oracles import array

# What the presets leave out: other blocks, powers of two, e5m2, eps, floor, and pairs of a format and a rule.
OTHERS = {
    "int8_tile": Quantizer(INT8, (4, 8), Amax(floor=1e-3)),
    "int8_lead": Quantizer(INT8, (-1, 5)),
    "int8_stochastic": Quantizer(INT8, (1, -1), stochastic=True),
    "int8_affine_stochastic": Quantizer(INT8, (1, 16), MinMax(), stochastic=True),
    "int8_mean": Quantizer(INT8, (1, -1), AbsMean()),
    "uint8_column": Quantizer(UINT8, (-1, 1)),
    "int4_symmetric_7": Quantizer(INT4, (1, 7)),
    "int4_affine": Quantizer(INT4, (3, 32), MinMax()),
    "uint4_symmetric": Quantizer(UINT4, (1, 32)),
    "uint4_stochastic": Quantizer(UINT4, (1, 32), MinMax(), stochastic=True),
    "fp8_tensor_power": Quantizer(E4M3, scale=CurrentScaling(power_of_two=True)),
    "fp8_row_power": Quantizer(E4M3, (1, -1), CurrentScaling(power_of_two=True, eps=1e-12)),
    "fp8_eps": Quantizer(E5M2, (1, -1), CurrentScaling(eps=0.5)),
    "fp8_floats": Quantizer(E4M3, (1, 128), BlockScaling(power_of_two=False)),
    "fp8_stochastic": Quantizer(E4M3, (1, 32), BlockScaling(eps=1e-30), stochastic=True),
    "fp8_e5m2_column": Quantizer(E5M2, (-1, 1), CurrentScaling(power_of_two=True)),
    "fp8_e5m2_tile": Quantizer(E5M2, (128, 128), BlockScaling(power_of_two=False)),
    "fp8_e5m2_stochastic": Quantizer(E5M2, (1, 128), BlockScaling(), stochastic=True),
    "fp8_amax": Quantizer(E5M2, (1, 64), Amax()),
    "fp4_current": Quantizer(E2M1, (1, -1), CurrentScaling()),
    "mx_16": Quantizer(E4M3, (1, 16), Microscaling()),
    "mx_tile": Quantizer(E5M2, (32, 32), Microscaling()),
    "mx_stochastic": Quantizer(E2M1, (1, 32), Microscaling(), stochastic=True),
    "mx_floor": Quantizer(E4M3, (1, 32), Microscaling(rounding="floor")),
    "mx_ceil": Quantizer(E5M2, (16, 16), Microscaling(rounding="ceil")),
    "mx_even": Quantizer(E2M1, (1, 32), Microscaling(rounding="even")),
    "mx_floor_stochastic": Quantizer(E2M1, (1, 16), Microscaling(rounding="floor"), stochastic=True),
    "mx_even_flat": Quantizer(E4M3, (100,), Microscaling(rounding="even"), flat=True),
    "nvfp4_row_stochastic": Quantizer(E2M1, (1, 16), TwoLevel(outer=(1, -1)), stochastic=True),
    "nvfp4_32": Quantizer(E2M1, (2, 32), TwoLevel(outer=(-1, 32))),
    "nvfp8": Quantizer(E4M3, (1, 16), TwoLevel()),
    "flat_int8": Quantizer(INT8, (100,), flat=True),
    "flat_uint4": Quantizer(UINT4, (31,), MinMax(), flat=True),
    "flat_mx": Quantizer(E2M1, (32,), Microscaling(), flat=True),
    "static_fp4": Quantizer(E2M1, (1, -1), Static()),
}
QUANTIZERS = {**presets.PRESETS, **OTHERS}
ALL = list(QUANTIZERS.items())
PRESETS = list(presets.PRESETS.items())
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# ---- inputs


def exponents(shape: tuple[int, ...], low: int, high: int, g: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(low, high, shape, generator=g).float())


def blocky(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Runs of 40 elements, each of a size of its own from subnormal to huge, or zeros, NaN, infinities, or mixed."""
    n = math.prod(shape)
    count = -(-n // 40)
    x = torch.randn(count, 40, generator=g) * exponents((count, 1), -149, 127, g)
    kind = torch.randint(0, 40, (count, 1), generator=g)
    x = torch.where(kind == 0, 0.0, x)
    x = torch.where(kind == 1, math.nan, x)
    x = torch.where((kind == 2) & (x > 0), math.nan, x)
    x = torch.where((kind == 3) & (x > 0), math.inf, x)
    x = torch.where((kind == 4) & (x < 0), -math.inf, x)
    x = torch.where(kind == 5, -0.0, x)
    return x.reshape(-1)[:n].reshape(shape)


def sprinkled(shape: tuple[int, ...], value: float, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g)
    return torch.where(torch.rand(shape, generator=g) < 0.02, math.copysign(1.0, -0.5) * value * x.sign(), x)


KINDS = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "sizes": lambda shape, g: torch.randn(shape, generator=g) * exponents(shape, -40, 40, g),
    "blocky": blocky,
    "bits": lambda shape, g: torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int32).view(torch.float32),
    "subnormal": lambda shape, g: torch.randint(-(2**22), 2**22, shape, generator=g).float() * 2.0**-149,
    "huge": lambda shape, g: (torch.rand(shape, generator=g) * 2 - 1) * torch.finfo(torch.float32).max,
    "halves": lambda shape, g: torch.randint(-254, 255, shape, generator=g) / 2,  # ties, where the scale is 1
    "quarters": lambda shape, g: torch.randint(-24, 25, shape, generator=g) / 4,
    "nan": lambda shape, g: sprinkled(shape, math.nan, g),
    "inf": lambda shape, g: sprinkled(shape, math.inf, g),
    "positive": lambda shape, g: torch.rand(shape, generator=g) + 1,
    "zeros": lambda shape, g: torch.zeros(shape) * torch.randn(shape, generator=g),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operands(q: Quantizer, x: Tensor, g: torch.Generator, given: bool = False) -> dict[str, Any]:
    """noise (of 24 or 8 bits), scale and zero_point as q needs them; a scale of the buffer's shape where `given`."""
    found: dict[str, Any] = {}
    if q.stochastic:
        bits, dtype = ((24, torch.int32), (8, torch.uint8))[x.numel() % 3 == 0]
        found["noise"] = torch.randint(0, 2**bits, x.shape, dtype=dtype, generator=g)
    if isinstance(q.scale, Static) or given:
        described = q.buffers(x.shape)
        name = "global_amax" if "global_amax" in described else "scale"
        shape = described[name][0]
        found["scale"] = (torch.rand(shape, generator=g) + 0.1) * exponents(shape, -6, 3, g)
        if q.scale.has_zero_point():
            assert isinstance(q.format, Integer)
            shape = described["zero_point"][0]
            found["zero_point"] = torch.randint(q.format.low, q.format.high + 1, shape, generator=g).float() + 0.3
    return found


# ---- comparing


FP8 = {name: numerics.FLOATS[name] for name in ("e4m3", "e5m2")}


def assert_bits(got: Tensor, want: np.ndarray, what: str) -> None:
    """Codes of four bits are bytes in PyTorch."""
    scaled_oracles.assert_bits(got, want.view(np.uint8) if want.dtype == ml_dtypes.float4_e2m1fn else want, what)


def same_bits(a: Tensor, b: Tensor, what: str) -> None:
    """Equal bits, one NaN for all, the same dtype, shape and strides."""
    assert a.stride() == b.stride(), f"{what}: strides {a.stride()}, not {b.stride()}"
    assert_bits(a, array(b), what)


def buffers_of(q: Quantizer, x: Tensor, given: dict[str, Any], usages: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The buffers of all copies that numpy makes, by the names that copies have."""
    found: dict[str, np.ndarray] = {}
    rest = {name: None if t is None else array(t) for name, t in given.items()}
    shared = all(b == -1 for _, block in q.stored().values() for b in block) and not q.flat and q.hadamard is None
    if "rowwise" in usages:
        found |= numerics.quantize(q, array(x), **rest)
    if "columnwise" in usages:
        k = x.shape[-1] if x.dim() else 1
        rows = x.reshape(math.prod(x.shape[:-1]), k).t()
        if q.hadamard is not None:
            rows = q.hadamard.apply(rows)  # of its own test
        if "noise" in rest:
            rest["noise"] = rest["noise"].reshape(rows.shape[::-1]).T
        for name in ("scale", "zero_point"):
            if rest.get(name) is not None:
                rest[name] = rest[name].reshape(1, 1)  # shared by both
        for name, buffer in numerics.quantize(q, array(rows), **rest).items():
            found.setdefault(name if shared and name != "codes" else f"columnwise_{name}", buffer)
    return found


def assert_right(q: Quantizer, x: Tensor, given: dict[str, Any], usages: tuple[str, ...] = ("rowwise",)) -> None:
    """What hop computes, fast and by reference, are the bits that numpy computes."""
    want = buffers_of(q, x, given, usages)
    got = hop.quantize(q, x, **given, usages=usages)
    assert list(got.buffers()) == list(want)
    for name, buffer in got.buffers().items():
        assert_bits(buffer, want[name], name)
    by_name = [given.get(name) for name in ("scale", "zero_point", "noise")]
    reference = leaves.quantize_buffers.reference(str(q), x, *by_name, usages)
    for name, buffer in zip(want, reference, strict=True):
        assert_bits(buffer, want[name], f"{name} of the reference")
    if "rowwise" not in usages:
        return
    numbers = numerics.dequantize(q, want, x.shape)
    with np.errstate(all="ignore"):
        numbers = numbers.astype(array(x).dtype)
    assert_bits(hop.dequantize(got), numbers, "dequantize")
    made = list(got.buffers().values())
    assert_bits(leaves.dequantize_buffers.reference(str(q), made, usages, x.shape, x.dtype), numbers, "its reference")
    assert_bits(hop.fake_quantize(q, x, **given), numbers, "fake_quantize")
    fake = fake_quantize_operator.reference(str(q), x, *by_name, "clipped")
    assert_bits(fake, numbers, "fake_quantize's reference")


def usages_of(q: Quantizer, x: Tensor, given: dict[str, Any]) -> tuple[str, ...]:
    """Both copies where q can make them of x and what is given."""
    rows = math.prod(x.shape[:-1])
    if q.flat or (q.hadamard is not None and rows % 16) or (given.get("scale") is not None and not q.shares_scale()):
        return ("rowwise",)
    return ("rowwise", "columnwise")


class TestValues(unittest.TestCase):
    """Every quantizer on numbers of all sizes, fast and by reference."""

    @parameterized.expand(ALL)
    @pytest.mark.quick(23)
    def test_bits(self, _name, q):
        for seed, (kind, make) in enumerate(KINDS.items()):
            with self.subTest(kind):
                g = generator(seed)
                x = make((20, 200), g)
                given = operands(q, x, g)
                assert_right(q, x, given, usages_of(q, x, given))

    @parameterized.expand([("MXFP8",), ("MXFP8_E5M2",), ("MXFP4",)])
    def test_around_powers_of_two(self, name):
        """Blocks whose amax is a few float32 off from where the scale steps up."""
        q = presets.PRESETS[name]
        amax = torch.tensor([q.format.max * 2.0**k for k in range(-140, 112)])
        for end in (0.0, math.inf):
            for _ in range(4):
                assert_right(q, amax.reshape(-1, 1).expand(-1, 32), {})
                amax = torch.nextafter(amax, torch.tensor(end))

    @parameterized.expand(ALL)
    @pytest.mark.quick(4)
    def test_given(self, _name, q):
        for kind in ("normal", "sizes", "blocky", "halves"):
            with self.subTest(kind):
                g = generator(1)
                x = KINDS[kind]((12, 150), g)
                assert_right(q, x, operands(q, x, g, given=True))

    @parameterized.expand(ALL)
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_many(self, _name, q):
        for kind, dtype in itertools.product(KINDS, DTYPES[:2]):
            with self.subTest(f"{kind} {dtype}"):
                g = generator(2)
                x = KINDS[kind]((64, 272), g).to(dtype)
                given = operands(q, x, g)
                assert_right(q, x, given, usages_of(q, x, given))


SHAPES = [(), (1,), (5,), (33,), (300,), (3, 5), (17, 31), (16, 16), (129, 2), (2, 3, 40), (2, 3, 5, 34), (1, 1, 1, 1)]
EMPTY = [(0,), (0, 0), (0, 32), (3, 0), (2, 0, 5), (0, 16, 16), (2, 3, 0)]
STRIDED = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1::2, 3::3],
    "expanded": lambda x: x[:, :1].expand(-1, 40),
    "from_a_row": lambda x: x[0].expand(16, -1),
    "permuted": lambda x: x.reshape(-1, 4, 8).permute(2, 0, 1),
    "channels_last": lambda x: x.reshape(2, 4, 8, -1).to(memory_format=torch.channels_last),
    "offset": lambda x: x.reshape(-1)[7:],
    "diagonal": lambda x: x.diagonal(),
}


class TestEdges(unittest.TestCase):
    """Shapes, dtypes and strides that nothing is a multiple of."""

    def check(self, q: Quantizer, x: Tensor, g: torch.Generator, given: bool = False) -> None:
        with self.subTest(f"{tuple(x.shape)} {x.dtype} given={given}"):
            others = operands(q, x, g, given)
            assert_right(q, x, others, usages_of(q, x, others))

    @parameterized.expand(ALL)
    @pytest.mark.quick(14)
    def test_shapes(self, name, q):
        """Each shape in one dtype and of one kind, which differ from quantizer to quantizer."""
        g = generator(3)
        start = list(QUANTIZERS).index(name)
        for i, shape in enumerate(SHAPES, start):
            self.check(q, list(KINDS.values())[5 * i % 12](shape, g).to(DTYPES[i % 4]), g, given=i % 3 == 0)

    @parameterized.expand(ALL)
    @pytest.mark.full
    def test_shapes_and_dtypes(self, _name, q):
        g = generator(3)
        kinds = itertools.cycle(KINDS.values())
        for i, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
            self.check(q, next(kinds)(shape, g).to(dtype), g, given=i % 2 == i // len(DTYPES) % 2)

    def empty(self, q: Quantizer) -> None:
        for i, shape in enumerate(EMPTY):
            self.check(q, torch.empty(shape, dtype=DTYPES[i % 4]), generator(4), given=i % 2 == 0)

    def strides(self, q: Quantizer) -> None:
        for i, (name, change) in enumerate(STRIDED.items()):
            with self.subTest(name):
                g = generator(5)
                x = change(blocky((16, 48), g).to(DTYPES[i % 4]))
                given = operands(q, x, g)
                if q.stochastic and name in ("transposed", "sliced"):
                    given["noise"] = change(torch.randint(0, 256, (16, 48), dtype=torch.uint8, generator=g))
                assert_right(q, x, given, usages_of(q, x, given))

    def alone(self, q: Quantizer) -> None:
        """What a block makes of each nasty number beside an ordinary one, or none."""
        tiny, largest = 2.0**-149, torch.finfo(torch.float32).max
        for value in [0.0, -0.0, -tiny, 2.0**-127, 1e-12, largest, -math.inf, math.nan]:
            for other in (1.0, value):
                with self.subTest(f"{value} {other}"):
                    x = torch.tensor([[value, other]]).repeat(2, 20)
                    assert_right(q, x, operands(q, x, generator(6)))

    @parameterized.expand(PRESETS)
    @pytest.mark.quick(4)
    def test_empty(self, _name, q):
        self.empty(q)

    @parameterized.expand(PRESETS)
    @pytest.mark.quick(8)
    def test_strides(self, _name, q):
        self.strides(q)

    @parameterized.expand(PRESETS)
    @pytest.mark.quick(8)
    def test_alone(self, _name, q):
        self.alone(q)

    @parameterized.expand(list(OTHERS.items()))
    @pytest.mark.full
    def test_others(self, _name, q):
        for test in (self.empty, self.strides, self.alone):
            test(q)


TORCHAO_MX = {
    "e4m3": (E4M3, torch.float8_e4m3fn),
    "e5m2": (E5M2, torch.float8_e5m2),
    "e2m1": (E2M1, torch.float4_e2m1fn_x2),
    "e3m2": (Float("e3m2", 6, torch.uint8, exponent_bits=3, mantissa_bits=2, bias=3, largest=0x1F), DTYPE_FP6_E3M2),
    "e2m3": (Float("e2m3", 6, torch.uint8, exponent_bits=2, mantissa_bits=3, bias=1, largest=0x1F), DTYPE_FP6_E2M3),
}


def with_amax(magnitudes: Tensor, g: torch.Generator) -> Tensor:
    """Blocks of 32, in rows, whose largest magnitudes are these."""
    x = (torch.rand(len(magnitudes), 32, generator=g) * 2 - 1) * magnitudes[:, None]
    x[:, 7] = torch.where(torch.rand(len(magnitudes), generator=g) < 0.5, -magnitudes, magnitudes)
    return x


def beside_powers() -> Tensor:
    """Every power of two of float32, the numbers beside it, and those beside what mantissas of few bits round at."""
    mantissas = [n << 23 - bits for bits in range(1, 6) for n in range(2**bits)]
    near = {m + d for m in mantissas for d in (-1, 0, 1)} & set(range(2**23))
    exponents = torch.arange(255, dtype=torch.int32) << 23
    return (exponents[:, None] | torch.tensor(sorted(near), dtype=torch.int32)).view(torch.float32).reshape(-1)


def mx(format: Float, rounding: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and codes, a byte for each."""
    t = hop.quantize(Quantizer(format, (1, 32), Microscaling(rounding=rounding)), x)
    return t.scale, unpacked(t.codes, x)


def torchao_mx(dtype: Any, rounding: str, x: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode[rounding.upper()])
    return scale.view(torch.uint8), unpacked(codes, x)


def unpacked(codes: Tensor, x: Tensor) -> Tensor:
    codes = codes.view(torch.uint8)
    return codes if codes.shape == x.shape else torch.stack([codes & 15, codes >> 4], -1).reshape(x.shape)


class TestMicroscaling(unittest.TestCase):
    """The scale rules of torchao's to_mx, its formats, over all sizes of numbers."""

    def _inputs(self) -> list[tuple[str, Tensor]]:
        kinds = [(kind, make((64, 256), generator(i))) for i, (kind, make) in enumerate(KINDS.items())]
        return [*kinds, ("beside powers", with_amax(beside_powers(), generator(9)))]

    @parameterized.expand(list(itertools.product(TORCHAO_MX, MX_ROUNDINGS[1:])))
    @pytest.mark.quick(15)
    def test_equals_torchao(self, name, rounding):
        """Bit for bit, except codes of NaN: torchao keeps its sign, and defines none in formats without a NaN."""
        format, dtype = TORCHAO_MX[name]
        for (kind, x), as_dtype in itertools.product(self._inputs(), DTYPES[:2]):
            x = x.to(as_dtype)
            scale, codes = mx(format, rounding, x)
            want_scale, want = torchao_mx(dtype, rounding, x)
            assert torch.equal(scale, want_scale), (kind, as_dtype)
            if format.dtype.is_floating_point:  # a NaN keeps its sign there
                nan = want.view(format.dtype).float().isnan()
                assert torch.equal(codes.view(format.dtype).float().isnan(), nan), (kind, as_dtype)
                codes, want = (torch.where(nan, 0, c) for c in (codes, want))
            else:
                divided = x.float() / torch.where(scale == 255, math.inf, 1.0).repeat_interleave(32, -1)
                codes, want = (torch.where(divided.isnan(), 0, c) for c in (codes, want))
            assert torch.equal(codes, want), (kind, as_dtype)

    @parameterized.expand(list(itertools.product(TORCHAO_MX, MX_ROUNDINGS)))
    @pytest.mark.sampled(4)
    @pytest.mark.quick(20)
    def test_every_way(self, name, rounding):
        """Native kernels of each level, PyTorch's operators and fake_quantize give what the reference gives."""
        format, _ = TORCHAO_MX[name]
        q = Quantizer(format, (1, 32), Microscaling(rounding=rounding))
        assert Quantizer.parse(str(q)) == q and (rounding == "rceil") != (rounding in str(q))
        for kind, x in self._inputs():
            x = x[:: 1 + len(x) // 2000]
            want = q.quantize(x)
            numbers = q.dequantize(want, x.shape)
            for level in ("off", *levels.OWN_HERE):
                with native.use(level):
                    t = hop.quantize(q, x)
                    same_bits(t.codes, want["codes"], (kind, level))
                    assert torch.equal(t.scale, want["scale"]), (kind, level)
                    for got in (hop.dequantize(t), hop.fake_quantize(q, x)):
                        assert torch.equal(got.nan_to_num(7.0), numbers.nan_to_num(7.0)), (kind, level)

    def test_clips(self):
        """Elements beyond the largest number have no gradient, as they are clipped."""
        for rounding, clips in (("rceil", False), ("floor", True), ("ceil", False), ("even", True)):
            x = torch.full((1, 32), 1.0)
            x[0, 3] = 1.9
            x.requires_grad_()
            hop.fake_quantize(Quantizer(E4M3, (1, 32), Microscaling(rounding=rounding)), x).sum().backward()
            gradient = x.grad
            assert gradient is not None and gradient[0, 0] == 1 and (gradient[0, 3] == 0) == clips, rounding

    def test_products(self):
        """hop.scaled is the product of the numbers."""
        linear = torch.ops.aten.linear.default
        for rounding in MX_ROUNDINGS:
            q = Quantizer(E4M3, (1, 32), Microscaling(rounding=rounding))
            x, w = (hop.quantize(q, torch.randn(n, 64, generator=generator(n))) for n in (5, 9))
            want = hop.dequantize(x).double() @ hop.dequantize(w).double().t()
            torch.testing.assert_close(hop.scaled(linear, torch.float32, x, w).double(), want, rtol=1e-5, atol=1e-5)

    def test_refuses(self):
        with pytest.raises(ValueError, match=r"rounding must be one of .*, got 'down'"):
            Microscaling(rounding="down")


class TestWhereTorchaoDiffers(unittest.TestCase):
    """What docs/numerics.md lists, and that there is nothing else."""

    @parameterized.expand(list(TORCHAO_MX))
    @pytest.mark.quick(5)
    def test_rceil(self, name):
        format, dtype = TORCHAO_MX[name]
        seen = dict.fromkeys(("nan", "least", "logarithm"), 0)
        inputs = [make((64, 256), generator(i)) for i, make in enumerate(KINDS.values())]
        for x in (*inputs, with_amax(beside_powers() * format.max, generator(9)).nan_to_num(1.0, 1.0, -1.0)):
            (scale, codes), (other, others) = mx(format, "rceil", x), torchao_mx(dtype, "rceil", x)
            blocks = x.reshape(-1, 32)
            scale, other = scale.reshape(-1), other.reshape(-1)
            nan = blocks.isnan().any(-1)
            assert bool((other[nan] == 255).all())
            assert bool(((scale[nan] == 255) == (not format.has_nan)).all())
            amax = torch.where(nan, 1.0, blocks.abs().amax(-1)).double() / format.max
            differs = (scale != other) & ~nan
            # One more here, as the quotient lies above a power of two by less than its logarithm in float32 shows.
            excess = amax / torch.exp2(other.double() - 127) - 1
            assert torch.equal(scale[differs], other[differs] + 1)
            assert bool(((excess[differs] > 0) & (excess[differs] < 2**-15)).all())
            alike = ((codes == others) | (x.isnan() & (not format.dtype.is_floating_point))).reshape(-1, 32).all(-1)
            least = (scale == 0) & ~nan
            assert bool((alike | differs | nan | least).all())
            if bool((wrong := least & ~alike).any()):  # torchao takes x itself, and not x · 2^127
                assert torch.equal(others.reshape(-1, 32)[wrong], unit_codes(format, blocks[wrong]))
            for key, mask in (("nan", nan), ("logarithm", differs), ("least", wrong)):
                seen[key] += int(mask.sum())
        assert all(seen.values()), seen

    def test_just_above_the_largest(self):
        """448 · 2^k is the largest number of a block of scale 2^k; the next float32 is not. From k = 4 on torchao's
        logarithm of it is k."""
        x = torch.zeros(1, 32)
        for k in (-100, -8, 4, 8, 100):
            x[0, 0] = torch.nextafter(torch.tensor(448.0 * 2.0**k), torch.tensor(math.inf))
            assert mx(E4M3, "rceil", x)[0].item() == 128 + k
            assert torchao_mx(torch.float8_e4m3fn, "rceil", x)[0].item() == 127 + k

    def test_nvfp4(self):
        """Of two float32 roundings another: block scales and codes differ at ties alone, and blocks of zeros."""
        seen = dict.fromkeys(("scale", "code", "zero"), 0)
        for kind in ("normal", "halves", "quarters", "positive", "zeros"):
            x = KINDS[kind]((256, 512), generator(3))
            x[0, :16] = 0.0
            outer = x.abs().amax()
            outer = outer if outer else torch.tensor(1.0)
            t = hop.quantize(presets.NVFP4, x, scale=outer)
            other, codes = nvfp4_quantize(x, 16, outer / (448 * 6))
            scale, other = t.scale.float().reshape(-1), other.float().reshape(-1)
            amax = x.reshape(-1, 16).abs().amax(-1)
            zero = amax == 0
            assert bool((scale[zero] == 0).all()) and bool((other[zero] == 2.0**-6).all())
            exact = amax.double() * 448 / outer.double()  # what is rounded to e4m3, but for float32's roundings
            differs = (scale != other) & ~zero & (exact >= 2.0**-6)
            middle = (scale.double() + other.double()) / 2
            assert bool(((exact / middle - 1).abs() < 2**-21)[differs].all())
            rest = ~differs & ~zero & (exact >= 2.0**-6)
            mine, theirs = (unpacked(c, x).reshape(-1, 16)[rest] for c in (t.codes, codes))
            exact = x.reshape(-1, 16)[rest].double() * (448 * 6 / outer.double()) / scale[rest, None].double()
            numbers = torch.tensor(E2M1._decoded, dtype=torch.float64)
            middle = (numbers[mine.long()] + numbers[theirs.long()]) / 2
            assert bool(((exact / middle - 1).abs() < 2**-20)[mine != theirs].all())
            for key, mask in (("scale", differs), ("code", mine != theirs), ("zero", zero)):
                seen[key] += int(mask.sum())
        assert all(seen.values()), seen


def unit_codes(format: Float, x: Tensor) -> Tensor:
    """The codes of x with a scale of 1, a byte for each."""
    return format.encode(x).view(torch.uint8)


class TestTorchao(unittest.TestCase):
    """The states of torchao's low-bit optimizers."""

    def test_books(self):
        maps = {
            "STATE8": quant_utils.create_dynamic_map(True),
            "STATE8_UNSIGNED": quant_utils.create_dynamic_map(False),
            "STATE4": quant_utils.create_dynamic_map(True, 3, 4),
            "STATE4_UNSIGNED": torch.linspace(0, 1, 17)[1:].tolist(),
        }
        # Without vector instructions torch.linspace, of which torchao's are made, rounds otherwise.
        ulps = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        for name, book in maps.items():
            own = np.float32(presets.PRESETS[name].format.numbers)
            np.testing.assert_allclose(own, np.float32(book), rtol=2**-22 if ulps else 0, atol=0, err_msg=name)

    @parameterized.expand(["STATE8", "STATE8_UNSIGNED", "STATE4", "STATE4_UNSIGNED", "STATE_FP8"])
    def test_states(self, name):
        q = presets.PRESETS[name]
        for kind in ("normal", "sizes", "subnormal", "halves", "positive", "zeros"):
            x = KINDS[kind]((512, 512), generator(1))
            got = hop.quantize(q, x)
            if name == "STATE_FP8":
                codes, scale = quantize_fp8(x.reshape(-1), 256)
                codes = codes.reshape(x.shape)
                mine = got.codes
            else:
                encode = (
                    quant_utils.quantize_4bit_with_qmap if q.format.bits == 4 else quant_utils.quantize_8bit_with_qmap
                )
                y, scale = quant_utils.scale_tensor(x.reshape(-1), q.block[0])
                codes = encode(y, torch.tensor(q.format.numbers)).reshape(x.shape)
                mine = (
                    got.codes
                    if q.format.bits == 8
                    else torch.stack([got.codes & 15, got.codes >> 4], -1).reshape(x.shape)
                )
            assert_bits(got.scale, scale.numpy(), f"{kind}: scale")
            same_bits(mine, codes, f"{kind}: codes")

    @parameterized.expand([("STATE8",), ("STATE8_UNSIGNED",), ("STATE4",), ("STATE4_UNSIGNED",)])
    def test_halfway(self, name):
        """A tie goes up. But for ±1.9e-6, where torchao rounds the differences that it compares, it agrees."""
        format = presets.PRESETS[name].format
        book = torch.tensor(format.numbers)
        encode = quant_utils.quantize_4bit_with_qmap if format.bits == 4 else quant_utils.quantize_8bit_with_qmap
        middle = ((book[1:].double() + book[:-1].double()) / 2).float()
        y = torch.cat([torch.nextafter(middle, torch.tensor(end)) for end in (-math.inf, math.inf)] + [middle])
        exact = torch.from_numpy(numerics.encode(y.numpy(), format.name, format.numbers, 0, None))
        assert torch.equal(format.encode(y), exact)
        np.testing.assert_allclose(y[encode(y, book) != exact].abs(), 1.9e-6, rtol=2**-22)


class TestGfloat(unittest.TestCase):
    """Elements as gfloat rounds and encodes them."""

    @parameterized.expand(
        [
            ("MXFP8", gfloat.formats.format_info_ocp_e4m3),
            ("MXFP8_E5M2", gfloat.formats.format_info_ocp_e5m2),
            ("MXFP4", gfloat.formats.format_info_ocp_e2m1),
            ("FP8_ROW", gfloat.formats.format_info_ocp_e4m3),
            ("FP8_E5M2_ROW", gfloat.formats.format_info_ocp_e5m2),
            ("NVFP4", gfloat.formats.format_info_ocp_e2m1),
        ]
    )
    def test_elements(self, name, info):
        q = presets.PRESETS[name]
        for kind in ("normal", "sizes", "halves", "inf", "huge"):
            x = KINDS[kind]((64, 512), generator(2))
            _, found = q.find(x)
            y = found.y.reshape(-1).numpy().astype(np.float64)
            rounded = gfloat.round_ndarray(info, y, gfloat.RoundMode.TiesToEven, sat=True)
            codes = gfloat.encode_ndarray(info, rounded).astype(np.uint8).reshape(x.shape)
            if isinstance(q.scale, CurrentScaling):  # a row with an infinity is NaN, of which hop has one code
                codes[x.isinf().any(1).numpy()] = 0x7F
            got = hop.quantize(q, x).codes.view(torch.uint8)
            if q.format.bits == 4:
                got = torch.stack([got & 15, got >> 4], -1).reshape(x.shape)
            assert_bits(got, codes, kind)


TINY = 2.0**-149
MAX32 = (2 - 2.0**-23) * 2.0**127
INF, NAN = math.inf, math.nan

# A preset or quantizer, x, and what is stored; a float's codes are its bits. Shorter than a block: x ends there.
BY_HAND: list[tuple[str, list[Any], dict[str, list[Any]]]] = [
    # amax 127: scale 1, ties to even.
    ("INT8_TENSOR", [63.5, -127, 0.5, 1.5, -2.5], {"codes": [64, -127, 0, 2, -2], "scale": [1.0]}),
    # 9 / 127 is rounded up, so 4.5 is a little less than 63.5 of it; a product with 1 / scale says 64.
    ("INT8_TENSOR", [9, 4.5, -4.5], {"codes": [127, 63, -63], "scale": [float.fromhex("0x1.22448ap-4")]}),
    ("INT8_TENSOR", [0.0, -0.0], {"codes": [0, 0], "scale": [1.0]}),
    ("INT8_TENSOR", [NAN, 254, -1], {"codes": [0, 0, 0], "scale": [NAN]}),
    (
        "INT4_32",
        [1.0] * 32 + [NAN, 7],
        {"codes": [0x77] * 16 + [0], "scale": [float(np.float32(1) / np.float32(7)), NAN]},
    ),
    ("INT8_TENSOR", [INF, -1, 1e30], {"codes": [0, 0, 0], "scale": [NAN]}),
    ("INT8_TENSOR", [63 * TINY, -TINY], {"codes": [0, 0], "scale": [1.0]}),  # 63 / 127 of the least float is 0
    ("INT8_TENSOR", [127 * TINY, -TINY], {"codes": [127, -1], "scale": [TINY]}),
    ("UINT8_TENSOR", [63.5, -127, 0.5, 1.5], {"codes": [192, 1, 128, 130], "scale": [1.0]}),
    # amax 14: scale 2. Codes 7, -7, -2, 0, 2, 2, the first of a pair in the low half.
    ("INT4_32", [14, -14, -3, 1, 3, 5], {"codes": [0x97, 0x0E, 0x22], "scale": [2.0]}),
    ("INT4_32", [14, -14, -3], {"codes": [0x97, 0x0E], "scale": [2.0]}),
    ("INT4_32", [7.0] * 32 + [-3.5, 0.25], {"codes": [0x77] * 16 + [0x09], "scale": [1.0, 0.5]}),
    # -55 to 200 is 255: scale 1, zero point -128 + 55.
    (
        "INT8_TENSOR_AFFINE",
        [-55, 200, 0, 72.5],
        {"codes": [-128, 127, -73, -1], "scale": [1.0], "zero_point": [-73]},
    ),
    ("UINT8_TENSOR_AFFINE", [-55, 200, 0, 72.5], {"codes": [0, 255, 55, 127], "scale": [1.0], "zero_point": [55]}),
    ("UINT8_TENSOR_AFFINE", [10, 255], {"codes": [10, 255], "scale": [1.0], "zero_point": [0]}),
    ("INT8_TENSOR_AFFINE", [-255, -10], {"codes": [-128, 117], "scale": [1.0], "zero_point": [127]}),
    ("INT8_TENSOR_AFFINE", [5.0, NAN], {"codes": [-128, -128], "scale": [NAN], "zero_point": [-128]}),
    ("UINT8_TENSOR_AFFINE", [5.0, -INF], {"codes": [0, 0], "scale": [NAN], "zero_point": [0]}),
    ("UINT4_32_AFFINE", [-5, 10, 2.5], {"codes": [0xF0, 0x07], "scale": [1.0], "zero_point": [5]}),
    # mean 2: 1, -1, 0.5, -1.5 are codes 1, -1, 0, -1 of two bits.
    ("TERNARY_TENSOR", [2, -2, 1, -3], {"codes": [0b11_00_11_01], "scale": [2.0]}),
    ("TERNARY_TENSOR", [NAN, -3, 1], {"codes": [0b00_11_00], "scale": [2.0]}),
    # 448 / 7 = 64: 448, -224, 64.
    ("FP8_TENSOR", [7, -3.5, 1, -0.0], {"codes": [0x7E, 0xF6, 0x68, 0x80], "scale": [2.0**-6]}),
    # 448 / 5 = 89.6, of which the power of two below is 64: 320, -64.
    ("fp8_tensor_power", [5, -1], {"codes": [0x7A, 0xE8], "scale": [2.0**-6]}),
    ("FP8_TENSOR", [0.0, -0.0], {"codes": [0, 0x80], "scale": [1.0]}),
    ("FP8_TENSOR", [INF, 1, -INF], {"codes": [0x7F, 0x7F, 0x7F], "scale": [NAN]}),
    ("FP8_TENSOR", [NAN, 3.5], {"codes": [0x7F, 0x7E], "scale": [2.0**-7]}),
    # 448 / amax is infinite: the largest float32, whose inverse is 2^-128 to the nearest.
    ("FP8_TENSOR", [TINY], {"codes": [0], "scale": [2.0**-128]}),
    ("fp8_tensor_power", [TINY], {"codes": [0], "scale": [2.0**-127]}),
    ("FP8_TENSOR", [MAX32, -MAX32], {"codes": [0x7E, 0xFE], "scale": [float(np.float32(1) / np.float32(448 / MAX32))]}),
    ("FP8_E5M2_TENSOR", [3.5, 1], {"codes": [0x7B, 0x74], "scale": [2.0**-14]}),
    # amax is at least 0.5: 57344 / 0.5 = 114688.
    ("fp8_eps", [0.125], {"codes": [0x73], "scale": [float(np.float32(1) / np.float32(114688))]}),
    # Blocks of 128: amax 448 and 3.5.
    ("FP8_1X128", [448.0] * 128 + [-3.5, 1], {"codes": [0x7E] * 128 + [0xFE, 0x70], "scale": [1.0, 2.0**-7]}),
    ("fp8_floats", [TINY], {"codes": [0], "scale": [2.0**-128]}),
    # v = amax / 448 is 1, a little more, 2^-127, infinite, 0.
    ("MXFP8", [448, 1, -0.0], {"codes": [0x7E, 0x38, 0x80], "scale": [127]}),
    ("MXFP8", [450, 1], {"codes": [0x76, 0x30], "scale": [128]}),
    ("MXFP8", [448 * 2.0**-127, -(2.0**-127)], {"codes": [0x7E, 0xB8], "scale": [0]}),
    ("MXFP8", [449 * 2.0**-127], {"codes": [0x76], "scale": [1]}),
    ("MXFP8", [INF, 1, -INF], {"codes": [0x7E, 0, 0xFE], "scale": [254]}),
    ("MXFP8", [MAX32], {"codes": [0x78], "scale": [247]}),  # 2^128 / 448 is 2^119.2; 2^128 / 2^120 = 256 · (1 - 2^-24)
    ("MXFP8", [0.0, -0.0, NAN], {"codes": [0, 0x80, 0x7F], "scale": [0]}),
    ("MXFP8_E5M2", [57344, 1, -57344], {"codes": [0x7B, 0x3C, 0xFB], "scale": [127]}),
    ("MXFP8", [448.0] * 32 + [14], {"codes": [0x7E] * 33, "scale": [127, 122]}),
    # Codes 7, 9, 4 (2.5 to 2), 6 (5 to 4), 8, 0 (0.25 to 0).
    ("MXFP4", [6, -0.5, 2.5, 5, -0.0, 0.25], {"codes": [0x97, 0x64, 0x08], "scale": [127]}),
    ("MXFP4", [6, -0.5, NAN], {"codes": [0x77, 0x07], "scale": [255]}),
    # amax 2688: S = 1. The blocks' amax are 6 and 2688: scales 1 and 448.
    (
        "NVFP4",
        [6, -0.5, 2.5, 5] + [-0.0] * 12 + [2688, -1344],
        {"codes": [0x97, 0x64] + [0x88] * 6 + [0xD7], "scale": [0x38, 0x7E], "global_amax": [2688.0]},
    ),
    # amax 5.25: S = 512. The blocks' amax are 5.25, 0.75, 0: scales 448, 64, 0. One has a NaN.
    (
        "NVFP4",
        [5.25] * 16 + [0.75, -0.375, 0.0625, 0.75] * 4 + [NAN, *[3.0] * 15] + [0.0, -0.0],
        {
            "codes": [0x77] * 8 + [0xD7, 0x71] * 4 + [0x77] * 8 + [0x80],
            "scale": [0x7E, 0x68, 0x7F, 0],
            "global_amax": [5.25],
        },
    ),
    ("NVFP4", [0.0, -0.0], {"codes": [0x80], "scale": [0], "global_amax": [0.0]}),
    ("NVFP4", [NAN, NAN], {"codes": [0x77], "scale": [0x7F], "global_amax": [0.0]}),
    # An infinity: S = 0 is taken for 1; the scale saturates.
    ("NVFP4", [INF, 1344], {"codes": [0x57], "scale": [0x7E], "global_amax": [INF]}),
    # Divided by amax 16, or by 2. Ties go up: 1.5 / 16 is between codes 0 and 1.
    ("STATE4_UNSIGNED", [16, 1, 0, 1.5, -4, 16], {"codes": [0x0F, 0x10, 0xF0], "scale": [16.0]}),
    ("STATE8", [2, -2, 0, NAN], {"codes": [127, 127, 127, 127], "scale": [NAN]}),
    ("STATE8", [0.0, 1e-13], {"codes": [127, 127 + 63], "scale": [float(np.float32(1e-12))]}),
    ("STATE_FP8", [896.0] * 256 + [448], {"codes": [0x7E] * 257, "scale": [2.0, 1.0]}),
]


class TestByHand(unittest.TestCase):
    @parameterized.expand([(f"{i}_{case[0]}", *case) for i, case in enumerate(BY_HAND)])
    def test_vector(self, _name, preset, x, want):
        got = hop.quantize(QUANTIZERS[preset], torch.tensor(x, dtype=torch.float32)).buffers()
        assert list(got) == list(want)
        for name, buffer in got.items():
            if buffer.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                buffer = buffer.view(torch.uint8)
            np.testing.assert_array_equal(buffer.tolist(), want[name], name)  # NaN equals NaN

    @parameterized.expand([(torch.float32, 2.0**-128), (torch.bfloat16, 2105376 * TINY), (torch.float64, 2.0**-128)])
    def test_largest_of_the_dtype(self, dtype, scale):
        """448 / 2^-133 is infinite: blockwise the largest of x's dtype, here 1 / ((2 - 2^-7) · 2^127) in bfloat16."""
        got = hop.quantize(QUANTIZERS["fp8_floats"], torch.tensor([2.0**-133], dtype=dtype))
        assert got.scale.tolist() == [scale]
        power = hop.quantize(presets.FP8_1X128, torch.tensor([2.0**-133], dtype=dtype))
        assert power.scale.tolist() == [2.0**-127]


ROUNDED = [E2M1, E4M3, E5M2, INT8, UINT8, INT4, UINT4]
STOCHASTIC = [(name, q) for name, q in ALL if q.stochastic]


class TestStochastic(unittest.TestCase):
    def mean(self, q: Quantizer, x: Tensor) -> Tensor:
        """The mean of what x becomes, under a scale of 1, over all 256 values of noise, in float64."""
        noise = torch.arange(256, dtype=torch.uint8).reshape(-1, 1).expand(-1, x.numel())
        made = hop.fake_quantize(q, x.reshape(1, -1).expand(256, -1), noise=noise, scale=torch.ones(()))
        return made.double().mean(0).reshape(x.shape)

    @parameterized.expand([(f.name, f) for f in ROUNDED])
    def test_unbiased(self, _name, fmt):
        """Exactly so, for numbers that are a multiple of 1 / 256 of the way to the next."""
        q = Quantizer(fmt, scale=Static(), stochastic=True)
        gaps = list(itertools.pairwise(n - fmt.zero for n in fmt.numbers))
        near = len(gaps) // 2
        gaps = gaps[:2] + gaps[max(near - 20, 0) : near + 20] + gaps[-2:]
        x = torch.tensor([[low + (high - low) * i / 256 for i in range(256)] for low, high in gaps])
        assert self.mean(q, x).equal(x.double())

    @parameterized.expand([(f.name, f) for f in ROUNDED])
    def test_bias_of_others(self, _name, fmt):
        """At most 1 / 256 of a gap, toward zero."""
        q = Quantizer(fmt, scale=Static(), stochastic=True)
        largest = min(fmt.max - fmt.zero, 400.0)
        x = (torch.rand(3000, generator=generator()) * 2 - 1) * largest
        magnitude = torch.tensor(sorted({abs(n - fmt.zero) for n in fmt.numbers}))
        at = torch.searchsorted(magnitude, x.abs(), right=True)
        gap = magnitude[at.clamp(max=len(magnitude) - 1)] - magnitude[at - 1]
        less = (x.double() - self.mean(q, x)) * x.sign()
        assert ((less >= 0) & (less < gap / 256)).all()

    @parameterized.expand([(f.name, f) for f in ROUNDED])
    @pytest.mark.quick(9)
    def test_all_24_bits(self, _name, fmt):
        """Of all 2^24 integers as many round up as the place in the gap says, rounded down to a multiple of 2^-24."""
        q = Quantizer(fmt, scale=Static(), stochastic=True)
        noise = torch.arange(2**24, dtype=torch.int32).reshape(2**12, 2**12)
        low, high = fmt.numbers[-3] - fmt.zero, fmt.numbers[-2] - fmt.zero
        for part in (1e-5, 0.7):
            x = torch.tensor(low + (high - low) * part)
            got = hop.fake_quantize(q, x.expand(noise.shape), scale=torch.ones(()), noise=noise)
            up = int((got == high).sum())
            assert up == math.floor((float(x) - low) / (high - low) * 2**24) and int((got == low).sum()) == 2**24 - up

    @parameterized.expand([(f.name, f) for f in (INT8, E4M3, E2M1)])
    @pytest.mark.quick(3)
    def test_mean_of_draws(self, _name, fmt):
        """Of 10^7 draws within four standard deviations; a bias of 2^-9 of a gap would be 15 of them and more."""
        q = Quantizer(fmt, scale=Static(), stochastic=True)
        x = torch.rand(10_000_000, generator=generator(1)) * fmt.max
        numbers = torch.tensor(fmt.numbers, dtype=torch.float64)
        at = torch.searchsorted(numbers, x.double(), right=True).clamp(max=len(numbers) - 1)
        gap = numbers[at] - numbers[at - 1]
        part = (x - numbers[at - 1]) / gap
        error = (hop.fake_quantize(q, x, scale=torch.ones(()), generator=generator(2)) - x.double()) / gap
        assert abs(float(error.mean())) < 4 * float((part * (1 - part)).mean() / x.numel()) ** 0.5
        assert float(error.var()) == pytest.approx(float((part * (1 - part)).mean()), rel=0.01)

    @parameterized.expand([(Q, Q) for Q in ("INT8_TRAINING", "NVFP4_STOCHASTIC")])
    def test_small_gradients_stay(self, _name, which):
        """Elements that are less than 1/256 of a gap are rounded up as often as they should be."""
        q = hop.recipes.INT8_TRAINING.grad if which == "INT8_TRAINING" else presets.NVFP4_STOCHASTIC
        x = torch.full((1000, 16), 1e-5)
        x[:, 0] = 1.0
        draws = [hop.dequantize(hop.quantize(q, x, generator=generator(i)))[:, 1:].double() for i in range(100)]
        mean, count = torch.stack(draws).mean(), 100 * 15_000
        gap = float(torch.stack(draws).max())
        assert gap > 256e-5 and abs(float(mean) - 1e-5) < 4 * (1e-5 * gap / count) ** 0.5

    def test_nan_has_one_code(self):
        """On every route, with either sign, rounded to the nearest or stochastically."""
        x = torch.tensor([[math.nan, -math.nan, 1.0, -2.0] * 16])
        x[0, 1].copysign_(torch.tensor(-1.0))
        noise = torch.zeros(x.shape, dtype=torch.int32)
        for fmt, stochastic, level in itertools.product((E4M3, E5M2), (False, True), (None, "portable", "off")):
            q = Quantizer(fmt, scale=Static(), stochastic=stochastic)
            with native.use(level) if level else contextlib.nullcontext():
                t = hop.quantize(q, x, scale=torch.ones(1), noise=noise if stochastic else None)
            assert t.codes.view(torch.uint8)[0, :2].tolist() == [0x7F, 0x7F]

    def test_by_hand(self):
        """r / 256 of a step is added, 0.5 below 2, 1 below 4, else 2, and the sum rounded toward zero."""
        q = Quantizer(E2M1, scale=Static(), stochastic=True)
        x = torch.tensor([0.25, 0.25, -0.25, -0.25, 1.75, 1.75, 3.0, 3.5, 3.5, 5, 5, 5.5, -0.0, 7, -1e-9, NAN, INF])
        noise = torch.tensor([127, 128, 127, 128, 127, 128, 255, 127, 128, 127, 128, 63, 255, 0, 255, 9, 9])
        got = hop.quantize(q, x, scale=torch.ones(1), noise=noise.to(torch.uint8)).codes
        # 0, .5, -0, -.5, 1.5, 2, 3, 3, 4, 4, 6, 4, -0, 6, -0, NaN to 6, 6
        codes = [0, 1, 8, 9, 3, 4, 5, 5, 6, 6, 7, 6, 8, 7, 8, 7, 7]
        assert got.tolist() == numerics.pack(np.array(codes, np.uint8), 4).tolist()

    @parameterized.expand(STOCHASTIC)
    def test_generator(self, _name, q):
        """It draws a seed from it, and leaves the global generator alone."""
        x = torch.randn(16, 40)
        for shaped in (x, x.t(), x[0], x.reshape(2, 8, 40), torch.tensor(0.3), torch.empty(0, 32)):
            seed = torch.randint(-(2**63), 2**63 - 1, (), generator=generator(5))
            want = hop.quantize(q, shaped, noise=hop.noise(seed, shaped.shape))
            before = torch.get_rng_state()
            got = hop.quantize(q, shaped, generator=generator(5))
            fake = hop.fake_quantize(q, shaped, generator=generator(5))
            assert torch.equal(before, torch.get_rng_state())
            for name, buffer in got.buffers().items():
                same_bits(buffer, want.buffers()[name], name)
            assert torch.equal(fake, hop.dequantize(want))
        assert not torch.equal(got_codes(q, x, 5), got_codes(q, x, 6))

    @parameterized.expand(STOCHASTIC)
    def test_one_generator_goes_on(self, _name, q):
        g, x = generator(5), torch.randn(16, 40)
        first, second = (hop.quantize(q, x, generator=g).codes for _ in range(2))
        assert not torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def got_codes(q: Quantizer, x: Tensor, seed: int) -> Tensor:
    return hop.quantize(q, x, generator=generator(seed)).codes.view(torch.uint8)


class TestHadamard(unittest.TestCase):
    @parameterized.expand([(k,) for k in (1, 5, 15, 17, 40, 64)])
    def test_any_length_is_orthogonal(self, k):
        """Whole blocks are transformed, the rest stays: products over the dimension are kept."""
        transform, (a, b) = Hadamard(), torch.randn(2, 6, k)
        torch.testing.assert_close(transform.apply(a) @ transform.apply(b).mT, a @ b.mT, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(transform.invert(transform.apply(a)), a, rtol=1e-5, atol=1e-5)
        whole = k - k % 16
        assert torch.equal(transform.apply(a)[:, whole:], a[:, whole:])
        if whole:
            torch.testing.assert_close(transform.apply(a)[:, :whole], transform.apply(a[:, :whole]), rtol=0, atol=1e-6)

    SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])

    def matrix(self, signs: np.ndarray) -> np.ndarray:
        """diag(signs) · H / √n, H the Kronecker product of [[1, 1], [1, -1]] with itself."""
        h = np.ones((1, 1))
        while len(h) < len(signs):
            h = np.kron(h, [[1, 1], [1, -1]])
        return np.diag(signs) @ h / math.sqrt(len(signs))

    @parameterized.expand([(4,), (16,), (64,), (256,)])
    def test_matrix(self, n):
        signs = np.random.default_rng(n).choice([-1, 1], n) if n != 16 else self.SIGNS
        transform = Hadamard(tuple(int(s) for s in signs)) if n != 16 else Hadamard()
        got = transform.apply(torch.eye(n)).double().numpy()
        np.testing.assert_array_equal(got, self.matrix(signs))
        np.testing.assert_array_equal(got @ got.T, np.eye(n))
        np.testing.assert_array_equal(transform.invert(torch.eye(n)).numpy(), got.T)

    @parameterized.expand([(d,) for d in DTYPES])
    def test_product(self, dtype):
        """Exact for integers, up to the one rounding to x's dtype; within float32's rounding for others."""
        whole = torch.randint(-1000, 1000, (32, 48), generator=generator()).to(dtype)
        transform = Hadamard()
        for shape in ((32, 48), (2, 16, 48), (48 * 32,), (0, 16)):
            x = whole.reshape(-1)[: math.prod(shape)].reshape(shape)
            product = x.double().numpy().reshape(-1, 16) @ self.matrix(self.SIGNS)
            want = torch.from_numpy(product.reshape(shape)).float().to(dtype)
            assert torch.equal(transform.apply(x), want) and transform.apply(x).dtype == dtype
        x = torch.randn(64, 64, generator=generator()).to(dtype)
        product = torch.from_numpy(x.double().numpy().reshape(-1, 16) @ self.matrix(self.SIGNS)).reshape(64, 64)
        half_an_ulp = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps / 2
        error = (transform.apply(x).double() - product).abs()
        assert (error <= product.abs() * half_an_ulp * 1.01 + 1e-6).all()
        back = transform.invert(transform.apply(x.float()))
        np.testing.assert_allclose(back, x.float(), atol=2e-6)

    @parameterized.expand([("NVFP4_HADAMARD",), ("NVFP4_GRADIENT",)])
    @pytest.mark.quick(2)
    def test_column_wise_copy(self, name):
        """The transform of the transposed rows, and of them alone; its own amax; dequantizing inverts it."""
        q = presets.PRESETS[name]
        plain = Quantizer(q.format, q.block, q.scale, q.stochastic)
        for dtype, shape in itertools.product(DTYPES[:3], [(32, 40), (2, 16, 24), (16,) * 4]):
            g = generator()
            x = torch.randint(-50, 50, shape, generator=g).to(dtype)  # whose products are exact
            noise = operands(q, x, g)
            got = hop.quantize(q, x, **noise, usages=("rowwise", "columnwise"))
            untouched = hop.quantize(plain, x, **noise).buffers()
            for part, buffer in untouched.items():
                same_bits(got.buffers()[part], buffer, part)
            k = shape[-1]
            matrix = self.matrix(self.SIGNS)
            rows = (x.reshape(-1, k).t().double().numpy().reshape(-1, 16) @ matrix).reshape(k, -1)
            rows = rows.astype(np.float32).astype(array(x).dtype)
            own = {} if not noise else {"noise": noise["noise"].numpy().reshape(-1, k).T}
            want = numerics.quantize(plain, rows, **own)
            for part, buffer in want.items():
                assert_bits(got.buffers()[f"columnwise_{part}"], buffer, part)
            assert np.asarray(want["global_amax"]).item() == np.abs(rows.astype(np.float32)).max()
            numbers = numerics.dequantize(plain, want, rows.shape).astype(np.float64)
            inverse = (numbers.reshape(-1, 16) @ matrix.T).reshape(k, -1).T.reshape(shape)
            alone = hop.quantize(q, x, **noise, usages=("columnwise",))
            rounding = 2e-6 if dtype == torch.float32 else 2**-8
            np.testing.assert_allclose(hop.dequantize(alone).double(), inverse, rtol=rounding, atol=1e-4)


# ---- the fast kernels


class TestFast(unittest.TestCase):
    """The kernels give the bits of the reference, on more numbers than the comparison with numpy can take."""

    def check(self, q: Quantizer, x: Tensor, given: dict[str, Any], usages: tuple[str, ...]) -> None:
        by_name = [given.get(name) for name in ("scale", "zero_point", "noise")]
        got = hop.quantize(q, x, **given, usages=usages)
        want = leaves.quantize_buffers.reference(str(q), x, *by_name, usages)
        for (name, buffer), other in zip(got.buffers().items(), want, strict=True):
            same_bits(buffer, other, name)
        numbers = leaves.dequantize_buffers.reference(str(q), want, usages, x.shape, x.dtype)
        same_bits(hop.dequantize(got), numbers, "dequantize")
        fake = fake_quantize_operator.reference(str(q), x, *by_name, "clipped")
        same_bits(hop.fake_quantize(q, x, **given), fake, "fake_quantize")

    @parameterized.expand(PRESETS)
    @pytest.mark.quick(4)
    def test_reference(self, _name, q):
        for seed, kind in enumerate(("sizes", "blocky", "bits")):
            g = generator(seed)
            x = KINDS[kind]((128, 512), g).to(DTYPES[seed])
            given = operands(q, x, g)
            self.check(q, x, given, usages_of(q, x, given))

    def test_floor_power_of_two(self):
        """Of all sizes, and at the powers themselves."""
        x = torch.cat([KINDS["bits"]((100_000,), generator()), torch.exp2(torch.arange(-149.0, 128.0))])
        x = x[(x > 0) & x.isfinite()]
        slow, fast = (kind(x, [], [], x.dtype, ()).floor_power_of_two(x) for kind in (Blocks, FastBlocks))
        assert torch.equal(slow, fast)
        want = np.ldexp(1.0, np.maximum(np.frexp(x.double().numpy())[1] - 1, -128))
        np.testing.assert_array_equal(fast.double(), want)

    @parameterized.expand(ALL)
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_all_kinds(self, _name, q):
        for kind, dtype in itertools.product(KINDS, DTYPES[:2]):
            with self.subTest(f"{kind} {dtype}"):
                g = generator(7)
                x = KINDS[kind]((96, 1040), g).to(dtype)
                given = operands(q, x, g)
                self.check(q, x, given, usages_of(q, x, given))

    @parameterized.expand([(f.name, f) for f in ROUNDED[:3]])
    def test_every_bfloat16(self, _name, fmt):
        q = Quantizer(fmt, scale=Static(), stochastic=True)
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        for dtype, values in ((torch.uint8, (0, 1, 127, 128, 255)), (torch.int32, (0, 1, 2**23 - 1, 2**23, 2**24 - 1))):
            for r in values:
                noise = torch.full(patterns.shape, r, dtype=dtype)
                self.check(q, patterns, {"scale": torch.ones(1), "noise": noise}, ("rowwise",))


@pytest.mark.compiler
class TestCompiled(unittest.TestCase):
    """Inductor's program gives the bits of eager mode."""

    def check(
        self,
        chosen: dict[str, Quantizer],
        kinds: list[str],
        usages: tuple[str, ...] | None = None,
        shape: tuple[int, ...] = (48, 272),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        g = generator(8)
        inputs = [KINDS[kind](shape, g).to(dtype) for kind in kinds]
        given = {name: operands(q, inputs[0], g) for name, q in chosen.items()}
        made_for = {name: usages or usages_of(q, inputs[0], given[name]) for name, q in chosen.items()}

        def run(x: Tensor) -> Any:
            made = {name: hop.quantize(q, x, **given[name], usages=made_for[name]) for name, q in chosen.items()}
            fakes = {name: hop.fake_quantize(q, x, **given[name]) for name, q in chosen.items()}
            return made, fakes, {name: hop.dequantize(t) for name, t in made.items()}

        compiled = torch.compile(run, fullgraph=True)
        for kind, x in zip(kinds, inputs, strict=True):
            for name in chosen:
                with self.subTest(f"{name} {kind}"):
                    made, fakes, numbers = (part[name] for part in compiled(x))
                    want, other, back = (part[name] for part in run(x))
                    for part, buffer in want.buffers().items():
                        assert_bits(made.buffers()[part], array(buffer), part)
                    assert_bits(fakes, array(other), "fake_quantize")
                    assert_bits(numbers, array(back), "dequantize")

    @pytest.mark.full
    def test_some(self):
        names = ["UINT4_32_AFFINE", "FP8_E5M2_1X128", "MXFP8", "NVFP4_STOCHASTIC", "STATE8"]
        self.check({name: QUANTIZERS[name] for name in names}, ["normal", "blocky", "bits", "subnormal"], ("rowwise",))

    @parameterized.expand([("INT4_32",), ("FP8_128X128",), ("MXFP4",), ("NVFP4",)])
    @pytest.mark.full
    def test_both_copies(self, name):
        """Of a tensor that the blocks divide, in a program of their own: the loops of the two go different ways."""
        self.check({name: QUANTIZERS[name]}, ["normal", "blocky"], ("rowwise", "columnwise"), (128, 384))

    @parameterized.expand([(i,) for i in range(12)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_all(self, i):
        """Twelve programs, in one dtype each, row-wise and column-wise."""
        chosen = dict(ALL[i::12])
        # A transform is a product, whose sum has another order in a program: numbers with an exact one.
        exact = any(q.hadamard is not None for q in chosen.values())
        self.check(chosen, ["halves", "quarters", "zeros"] if exact else list(KINDS), dtype=DTYPES[i % 4])
