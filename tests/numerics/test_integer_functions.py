"""Integer functions against Python's own integers (tests/support/integer_functions.py): every code equal."""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop.numerics import spelling
from hop.numerics.formats import INT4, INT8, UINT8
from hop.numerics.integer.functions import (
    IBertLayerNorm,
    IBertSoftmax,
    TfliteHardSwish,
    TfliteLeakyRelu,
    TfliteLogSoftmax,
    TflitePrelu,
    TfliteRsqrt,
    TfliteSigmoid,
    TfliteSoftmax,
    TfliteTable,
    TosaSoftmax,
)
from hop.numerics.integer.norms import square_root
from hop.numerics.integer.tables import FUNCTIONS
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import TFLITE, Division
from hop.numerics.scale_rules import Static
from hop.tensor.proto import TensorProto
from tests.support import integer_functions as exact

FORMATS = {torch.int8: INT8, torch.uint8: UINT8, torch.int16: torch.int16}
ONE = torch.tensor(1.0)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows(dtype: torch.dtype, seed: int, lengths: tuple[int, ...]) -> Iterator[tuple[Tensor, float]]:
    """Rows of codes, random and nasty, with a scale each."""
    info, draw = torch.iinfo(dtype), rng(seed)
    for n in lengths:
        for scale in (0.003, 0.05, 0.1, 0.7, float(np.exp(draw.uniform(-9, 3)))):
            x = torch.from_numpy(draw.integers(info.min, info.max + 1, (6, n))).to(dtype)
            x[1] = int(draw.integers(info.min, info.max + 1))  # all equal
            x[2] = info.min
            x[2, int(draw.integers(n))] = info.max  # one huge
            x[3] = (x[3].to(torch.int64) // 16 + info.max - (info.max - info.min) // 16).to(
                dtype
            )  # close to each other
            yield x, scale


def codes(convention: Any, x: Tensor, scale: float, **options: Any) -> Tensor:
    low = torch.iinfo(x.dtype).min
    return convention.codes(x, torch.tensor(scale), low // 2, ONE, 0, FORMATS[x.dtype], **options)


LENGTHS = (1, 2, 3, 7, 33, 128, 511)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.quick(4)
def test_tflite_softmax_of_8_bits(dtype: torch.dtype, beta: float) -> None:
    low = torch.iinfo(dtype).min
    for x, scale in rows(dtype, 1, LENGTHS):
        table = exact.exp_table(scale, beta)
        want = [exact.tflite_8(row, scale, beta, low, 8, table) for row in x.tolist()]
        assert codes(TfliteSoftmax(beta=beta), x, scale).tolist() == want
        wide = TfliteSoftmax(beta=beta).codes(x, torch.tensor(scale), 0, ONE, 0, torch.int16)
        assert wide.tolist() == [exact.tflite_8(row, scale, beta, -32768, 16, table) for row in x.tolist()]


@pytest.mark.parametrize("beta", [1.0, 2.5])
def test_tflite_softmax_of_16_bits(beta: float) -> None:
    for x, scale in rows(torch.int16, 2, LENGTHS):
        small = scale / 256
        want = [exact.tflite_16(row, small, beta) for row in x.tolist()]
        assert codes(TfliteSoftmax(beta=beta), x, small).tolist() == want


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.quick(2)
def test_tosa_softmax(beta: float) -> None:
    for x, scale in rows(torch.int8, 3, LENGTHS):
        table = exact.exp_table(scale, beta)
        want = [exact.tosa_8(row, scale, beta, table) for row in x.tolist()]
        assert codes(TosaSoftmax(beta=beta), x, scale).tolist() == want


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("exp_max", [1.0, 0.97])
@pytest.mark.quick(3)
def test_ibert_softmax(dtype: torch.dtype, exp_max: float) -> None:
    low = torch.iinfo(dtype).min
    for x, scale in rows(dtype, 4, LENGTHS):
        want = [exact.ibert_8(row, scale, exp_max, low) for row in x.tolist()]
        assert codes(IBertSoftmax(exp_max=exp_max), x, scale).tolist() == want


@pytest.mark.full
def test_softmax_of_long_rows() -> None:
    """Where TFLite stops, sums of 512 times the largest and more, up to the longest rows."""
    for n in (512, 4095, 4096):
        for scale in (0.002, 0.1):
            x = torch.from_numpy(rng(14).integers(-128, 128, (3, n))).to(torch.int8)
            x[1], x[2], x[2, 5] = 77, -128, 127
            table, listed = exact.exp_table(scale, 1.0), x.tolist()
            want = [exact.tflite_8(row, scale, 1.0, -128, 8, table) for row in listed]
            assert codes(TfliteSoftmax(), x, scale).tolist() == want
            want = [exact.ibert_8(row, scale, 1.0, -128) for row in listed]
            assert codes(IBertSoftmax(), x, scale).tolist() == want
            if n < 4096:
                want = [exact.tosa_8(row, scale, 1.0, table) for row in listed]
                assert codes(TosaSoftmax(), x, scale).tolist() == want
            wide = x.to(torch.int16) * 199
            want = [exact.tflite_16(row, scale / 256, 1.0) for row in wide.tolist()]
            assert codes(TfliteSoftmax(), wide, scale / 256).tolist() == want
    for convention, dtype in (
        (TfliteSoftmax(), torch.int8),
        (TfliteSoftmax(), torch.uint8),
        (TosaSoftmax(), torch.int8),
    ):
        with pytest.raises(ValueError, match=r"must have at most 409[56] elements"):
            codes(convention, torch.zeros(4097, dtype=dtype), 0.1)


@pytest.mark.parametrize("convention", [TfliteSoftmax(), TosaSoftmax(), IBertSoftmax()])
def test_softmax_along_another_dimension(convention: Any) -> None:
    x = torch.from_numpy(rng(5).integers(-128, 128, (3, 5, 4))).to(torch.int8)
    got = codes(convention, x, 0.1, dim=1)
    assert torch.equal(got, codes(convention, x.movedim(1, -1), 0.1).movedim(-1, 1))
    scale, zero = convention.output_units(INT8)
    near = torch.softmax(x.float() * 0.1, 1)
    assert float(((got.float() - zero) * scale - near).abs().max()) < (
        0.03 if isinstance(convention, IBertSoftmax) else 0.006
    )


# ---- tables


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.quick(2)
def test_tables_of_8_bits(name: str, dtype: torch.dtype) -> None:
    info, draw = torch.iinfo(dtype), rng(6)
    every = torch.arange(info.min, info.max + 1).to(dtype)
    for _ in range(40):
        scale, out = (float(np.float32(np.exp(draw.uniform(-8, 0)))) for _ in "ab")
        zero, out_zero = (int(draw.integers(info.min, info.max + 1)) for _ in "ab")
        got = TfliteTable(function=name).codes(
            every, torch.tensor(scale), zero, torch.tensor(out), out_zero, FORMATS[dtype]
        )
        assert got.tolist() == exact.table_256(name, scale, zero, out, out_zero, info.min)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.quick(2)
def test_tables_of_16_bits(name: str) -> None:
    draw = rng(7)
    x = torch.from_numpy(draw.integers(-32768, 32768, 3000)).to(torch.int16)
    x[:3] = torch.tensor([-32768, 32767, 0])
    for _ in range(6):
        scale, out = (float(np.float32(np.exp(draw.uniform(-11, -7)))) for _ in "ab")
        table = exact.table_512(name, scale, 0, out, 0)
        got = TfliteTable(function=name).codes(x, torch.tensor(scale), 0, torch.tensor(out), 0, torch.int16)
        assert got.tolist() == [exact.lut_lookup(table, code) for code in x.tolist()]


def test_reciprocal_roots_of_16_bits() -> None:
    every = torch.arange(32768).to(torch.int16)

    def root(most: Any, x: Any) -> Any:
        return 1 / np.sqrt(x) if x > 0 else most

    for scale, out in ((1e-3, 1e-3), (2.37e-4, 5e-7), (3e-6, 0.09)):
        own, most = np.float32(scale), np.float32(out) * np.float32(32767)
        table = exact.lut_513(partial(root, most), scale, 0, out, 0)
        got = TfliteRsqrt().codes(every, torch.tensor(scale), 0, torch.tensor(out), 0, torch.int16)
        assert got.tolist() == [exact.lut_lookup(table, code) for code in every.tolist()]
        real = 1 / np.sqrt(np.arange(1, 32768) * float(own)) / out
        near = real * 3 / 32 * (128 / np.arange(1, 32768)) ** 2 + 2  # of a straight line, and roundings
        held = (np.arange(1, 32768) > 512) & (real < 32000)
        assert (np.abs(got.numpy()[1:] - real) <= near)[held].all()


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
@pytest.mark.quick(2)
def test_sigmoids_of_16_bits(name: str) -> None:
    every = torch.arange(-32768, 32768).to(torch.int16)
    for scale in (2.0**-12, 2.0**-11, 0.0003, 0.002, 0.02):
        got = TfliteSigmoid(function=name).codes(every, torch.tensor(scale), 0, ONE, 0, torch.int16)
        assert got.tolist() == [exact.sigmoid_16(name, code, scale) for code in every.tolist()]
        near = getattr(torch, name)(every.double() * scale)
        assert float((got.double() * 2.0**-15 - near).abs().max()) < 3e-4


def test_the_published_table() -> None:
    assert zlib.crc32(np.array(exact.SIGMOIDS, dtype="<u2").tobytes()) == exact.SIGMOIDS_CRC


# ---- layer norm


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.quick(2)
def test_ibert_layer_norm(dtype: torch.dtype, shift: int) -> None:
    info, draw = torch.iinfo(dtype), rng(8)
    for x, _ in rows(dtype, 9, (1, 2, 16, 384)):
        n = x.shape[-1]
        zero, out_zero, out = int(draw.integers(info.min, info.max + 1)), int(draw.integers(-128, 128)), 0.03
        weight, bias = (torch.from_numpy(draw.standard_normal(n)).float() for _ in "ab")
        weight[0] = 0
        got = IBertLayerNorm(shift=shift).codes(
            x, ONE, zero, torch.tensor(out), out_zero, INT8, weight=weight, bias=bias
        )
        want = [
            exact.ibert_norm(row, zero, weight.tolist(), bias.tolist(), out, out_zero, -128, 127, shift)
            for row in x.tolist()
        ]
        assert got.tolist() == want


def test_square_roots() -> None:
    x = torch.cat(
        [torch.arange(5000), torch.tensor([2**k + d for k in range(13, 63) for d in (-1, 0, 1) if 2**k + d <= 2**62])]
    )
    squares = torch.arange(1, 2**31, 10**6 + 3) ** 2
    x = torch.cat([x, squares, squares - 1, squares + 1])
    assert square_root(x).tolist() == [math.isqrt(v) for v in x.tolist()]


# ---- values


VALUES = [
    *(TfliteSoftmax(), TfliteSoftmax(beta=0.5), TosaSoftmax(), IBertSoftmax(exp_max=0.9), IBertLayerNorm(shift=2)),
    *(TfliteTable(function="tanh"), TfliteTable(function="elu", low=-0.5, high=0.5), TfliteSigmoid(function="tanh")),
    *(TfliteRsqrt(), TfliteHardSwish(), TfliteLeakyRelu(), TfliteLogSoftmax(), TflitePrelu()),
]


def test_values_are_spelled_and_read() -> None:
    assert len({*VALUES, *VALUES}) == len(VALUES)
    for value in VALUES:
        assert spelling.read(str(value)) == value and hash(spelling.read(str(value))) == hash(value)


def programs() -> list[tuple[str, Callable[[Tensor], Tensor], torch.dtype]]:
    def of(convention: Any, format: Any, **options: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: convention.codes(x, torch.full((), 0.05), 1, torch.full((), 0.05), 0, format, **options)

    return [
        *((type(c).__name__, of(c, INT8), torch.int8) for c in VALUES[1:5]),
        *((type(c).__name__, of(c, INT8), torch.int8) for c in VALUES[5:7]),
        ("TfliteSoftmax16", of(VALUES[1], torch.int16), torch.int16),
        ("TfliteTable16", of(VALUES[5], torch.int16), torch.int16),
        ("TfliteSigmoid", of(VALUES[7], torch.int16), torch.int16),
        ("TfliteRsqrt", of(VALUES[8], torch.int16), torch.int16),
        *((type(c).__name__, of(c, INT8), torch.int8) for c in VALUES[9:12]),
    ]


@pytest.mark.parametrize(
    ("name", "function", "dtype"), programs(), ids=[f"{p[0]}_{i}" for i, p in enumerate(programs())]
)
@pytest.mark.full
def test_programs_give_the_same(name: str, function: Any, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    info = torch.iinfo(dtype)
    x = torch.from_numpy(rng(10).integers(info.min, info.max + 1, (2, 5, 40))).to(dtype)
    model, want = Model(), function(x)
    dims = {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("n", min=2)}
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,)).run_decompositions()
    assert torch.equal(program.module()(x), want)
    assert torch.equal(make_fx(function)(x)(x), want)
    rows = torch.stack([torch.stack([function(row) for row in part]) for part in x])
    assert torch.equal(rows, want)
    assert torch.equal(torch.func.vmap(function)(x), want)


def test_activations_clamp_the_codes() -> None:
    x = torch.arange(-128, 128).to(torch.int8)
    free, bound = (TfliteTable(function="tanh", low=low, high=high) for low, high in ((None, None), (-0.5, 0.25)))
    units = (torch.tensor(0.05), 0, torch.tensor(0.01), 3, INT8)
    assert torch.equal(bound.codes(x, *units), free.codes(x, *units).clamp(3 - 50, 3 + 25))


def test_what_they_do_not_take() -> None:
    x, s = torch.zeros(4, dtype=torch.int8), torch.tensor(0.1)
    for convention, error, message in (
        (lambda: TfliteSoftmax(beta=0.0), ValueError, "beta must be above 0, got 0"),
        (lambda: IBertSoftmax(exp_max=-1.0), ValueError, "exp_max must be above 0"),
        (lambda: TfliteTable(function="cosh"), ValueError, "function must be one of"),
        (lambda: IBertLayerNorm(shift=40), ValueError, "shift must be from 0 to 31"),
        (lambda: TosaSoftmax().codes(x.to(torch.int16), s, 0, s, 0, INT8), TypeError, "codes must be torch.int8"),
        (lambda: TosaSoftmax().codes(x, s.expand(4), 0, s, 0, INT8), ValueError, "scale must be one number"),
        (lambda: TosaSoftmax().codes(x, s, 0, s, 0, UINT8), ValueError, "format must have all codes"),
        (lambda: TosaSoftmax().codes(x.expand(1024, 4).reshape(-1), s, 0, s, 0, INT8), ValueError, "at most 4095"),
        (lambda: TfliteTable().codes(x, s, 0, s, 0, "int8"), TypeError, "format must be a format of integers"),
        (lambda: IBertLayerNorm().codes(x, s, 0, s, 0, INT8, weight=s.expand(3)), ValueError, "weight must have shape"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            convention()


# ---- as the output of hop.scaled

aten = torch.ops.aten
SCALE, OUT = torch.tensor(0.07), torch.tensor(1 / 256)


def output(convention: Any) -> Quantizer:
    return Quantizer(INT8, (-1,), Static(affine=True, requantize=convention))


CALLS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    *((c, aten.softmax.int, (-1,)) for c in (TfliteSoftmax(beta=0.5), TosaSoftmax(), IBertSoftmax())), (TfliteSoftmax(),
    aten._softmax.default, (1, False)), *((TfliteTable(function=name), getattr(aten, name).default, ()) for name in
    ("tanh", "sigmoid", "silu", "exp", "gelu")), (IBertLayerNorm(), aten.layer_norm.default, ([24], torch.linspace(-1,
    2, 24), torch.linspace(1, -1, 24))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("convention", "op", "args"), CALLS, ids=[type(c[0]).__name__ + str(i) for i, c in enumerate(CALLS)]
)
@pytest.mark.quick(12)
def test_scaled_gives_their_codes(convention: Any, op: Any, args: Any) -> None:
    q, zero, out_zero = output(convention), torch.tensor(5, dtype=torch.int8), torch.tensor(-128, dtype=torch.int8)

    class Model(torch.nn.Module):
        def forward(self, codes: Tensor) -> Tensor:
            x = TensorProto(codes.shape, torch.float32, quantizer=INPUT).create_tensor([codes, *stored(codes)])
            return hop.scaled(op, q, x, *args, output_scale=OUT, output_zero_point=out_zero).codes

    def stored(codes: Tensor) -> list[Tensor]:
        one = [1] * codes.dim()
        return [SCALE.reshape(one), zero.reshape(one)]

    options = {"dim": args[0]} if op in (aten.softmax.int, aten._softmax.default) else {}
    options |= dict(zip(("weight", "bias"), args[1:], strict=False)) if op is aten.layer_norm.default else {}
    codes = torch.from_numpy(rng(11).integers(-128, 128, (6, 9, 24))).to(torch.int8)
    want = convention.codes(codes, SCALE, 5, OUT, -128, INT8, **options)
    model = Model()
    assert torch.equal(model(codes), want)
    program = torch.export.export(model, (codes,))
    for route in (program.module(), program.run_decompositions(hop.decompositions()).module()):
        assert torch.equal(route(codes), want)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(codes), want)
    assert torch.equal(make_fx(model)(codes)(codes), want)


INPUT = Quantizer(INT8, (-1,), Static(affine=True))


@pytest.mark.parametrize("convention", [TfliteTable(), IBertLayerNorm()])
def test_packed_codes(convention: Any) -> None:
    """Codes of less than a byte, on either side."""
    op, args = (aten.gelu.default, ()) if isinstance(convention, TfliteTable) else (aten.layer_norm.default, ([24],))
    for format in (INT8, INT4):
        x = hop.quantize(Quantizer(format, (-1,)), torch.from_numpy(rng(15).normal(size=(5, 24))).float())
        own, scale = torch.round(hop.dequantize(x) / x.scale).to(torch.int8), torch.tensor(0.2)
        y = hop.scaled(op, Quantizer(INT4, (-1,), Static(requantize=convention)), x, *args, output_scale=scale)
        want = convention.codes(own, x.scale, 0, scale, 0, INT4)
        assert torch.equal(y.codes, INT4.pack(want)) and len(want.unique()) > 4
        assert torch.equal(hop.dequantize(y), want * scale)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_codes(shape: tuple[int, int]) -> None:
    x = hop.quantize(hop.presets.INT8_TENSOR, torch.zeros(shape))
    units = {"output_scale": OUT, "output_zero_point": torch.tensor(-128, dtype=torch.int8)}
    for convention, op, args in CALLS:
        given = ([shape[-1]],) if op is aten.layer_norm.default else args
        assert hop.scaled(op, output(convention), x, *given, **units).codes.shape == shape


def test_their_gradients_are_the_functions() -> None:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(12)).requires_grad_()
    units = {"output_scale": OUT, "output_zero_point": torch.tensor(-128, dtype=torch.int8)}
    grads = []
    for rule in (TfliteSoftmax(), Division()):
        y = hop.scaled(aten.softmax.int, output(rule), hop.quantize(hop.presets.INT8_TENSOR, x), -1, **units)
        grads.append(torch.autograd.grad((hop.dequantize(y) ** 2).sum(), x)[0])
    assert torch.allclose(*grads, atol=2e-3) and float(grads[0].abs().max()) > 1e-3


def test_what_scaled_does_not_take() -> None:
    x = hop.quantize(hop.presets.INT8_TENSOR, torch.randn(4, 24))
    rows = hop.quantize(hop.presets.INT8_ROW, torch.randn(4, 24))
    units = {"output_scale": OUT, "output_zero_point": torch.tensor(0, dtype=torch.int8)}
    for op, rule, args, message in (
        (aten.linear.default, TfliteSoftmax(), (x, rows), "does not support aten.linear.default"),
        (aten.gelu.default, TfliteTable(function="tanh"), (x,), "does not support aten.gelu.default"),
        (aten.softmax.int, TfliteSoftmax(), (rows, -1), "found from integers with one scale"),
        (aten.softmax.int, TFLITE, (x, -1), "found from an exact integer sum"),
        (aten.layer_norm.default, IBertLayerNorm(), (x, [4, 24]), "of the last dimension only"),
    ):
        with pytest.raises(ValueError, match=message):
            hop.scaled(op, output(rule), *args, **units)


def test_units_are_those_of_the_convention() -> None:
    """A softmax gives shares of 256 from the least code on: by any other scale they would be other numbers."""
    x = hop.quantize(hop.presets.INT8_TENSOR, torch.randn(4, 24))
    for rule in (TfliteSoftmax(), TosaSoftmax(), IBertSoftmax()):
        for scale, zero in ((0.1, -128), (1 / 256, 0)):
            given = {"output_scale": torch.tensor(scale), "output_zero_point": torch.tensor(zero, dtype=torch.int8)}
            for _ in "ab":
                with pytest.raises(ValueError, match=r"must be 0.00390625 and -128, the units of .*Softmax codes"):
                    hop.scaled(aten.softmax.int, output(rule), x, -1, **given)
        symmetric = Quantizer(INT8, (-1,), Static(requantize=rule))
        with pytest.raises(ValueError, match=r"got 0.00390625 and 0; give these by Static\(affine=True"):
            hop.scaled(aten.softmax.int, symmetric, x, -1, output_scale=OUT)
        with pytest.raises(ValueError, match="format must have all codes"):
            hop.scaled(aten.softmax.int, Quantizer(INT4, (-1,), Static(requantize=rule)), x, -1, output_scale=OUT)
