"""Convolutions of integers by the native kernels: bit for bit the reference, at every level, by one thread or two."""

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop import presets
from hop.dispatch.operand import Operand
from hop.impls.scaled import meaning
from hop.impls.scaled.calls import Call
from hop.impls.scaled.native_convolution import NATIVE_CONVOLUTION
from hop.kernels.cpu import native
from hop.numerics.formats import INT4, INT8, TERNARY, UINT8
from hop.numerics.layouts import Tiled
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP, Division, FixedPoint, FloatMultiplier, Reciprocal
from hop.numerics.scale_rules import MinMax, Static
from tests import levels
from tests.support import matching

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(native.library().missing is not None, reason=str(native.library().missing))
_OPS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


def _random_codes(shape: tuple[int, ...], dtype: torch.dtype, lay: str = "plain") -> Tensor:
    codes = torch.randint(-128, 128, shape).to(torch.int8).view(dtype)
    if lay == "last":
        return codes.movedim(1, -1).contiguous().movedim(-1, 1)
    if lay == "cut":  # out of the middle of a larger tensor
        wide = torch.randint(-128, 128, tuple(n + 3 for n in shape)).to(torch.int8).view(dtype)
        return wide[tuple(slice(1, 1 + n) for n in shape)]
    return codes


def _operand(quantizer: Quantizer, codes: Tensor) -> Operand:
    """Codes with random scales and zero points."""
    shape = tuple(codes.shape)
    scales = [torch.rand(s) + 0.5 for s in (hop.numerics.blocks.counts(shape, quantizer.block),)]
    zeros = []
    if quantizer.scale.has_zero_point():
        dtype = quantizer.format.dtype
        zeros = [torch.randint(-128, 128, scales[0].shape).to(torch.int8).view(dtype)]
    return Operand(quantizer, (codes, *scales, *zeros), ("rowwise",), shape)


def _packed(x: Operand) -> Operand:
    q = replace(x.quantizer, layout=Tiled())
    return x._replace(quantizer=q, tensors=(Tiled().arrange(x.tensors[0], q.format), *x.tensors[1:]))


def _steps(x: Tensor) -> list[int]:
    return [step for n, step in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else []


def _same(call: Call) -> None:
    """The kernel gives what the reference gives, for one and for two threads."""
    want = meaning.reference(call)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            got = matching.computed(NATIVE_CONVOLUTION, call)
            for a, b in zip(*(x if isinstance(x, list) else [x] for x in (got, want)), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ: {call.args[3:]}"
                assert _steps(a) == _steps(b)
    finally:
        torch.set_num_threads(threads)


def _drawn(seed: int) -> Call:
    r = random.Random(seed)
    torch.manual_seed(seed)
    ndim = r.choice([1, 2, 2, 2, 3])
    groups = r.choice([1, 1, 1, 2, 3, 40])
    inputs = r.choice([1, 3, 5, 16, 64, 128] if groups == 1 else [1, 1, 4, 17, 64] if groups < 9 else [1, 4])
    outputs = r.choice([1, 2, 33, 64, 100] if groups == 1 else [1, 2, 20] if groups < 9 else [1, 4])
    kernel = [r.choice([1, 1, 2, 3, 5]) for _ in range(ndim)]
    stride, dilation = ([r.choice([1, 1, 1, 2, 3]) for _ in range(ndim)] for _ in range(2))
    padding = [r.choice([0, 0, 1, 2, 7]) for _ in range(ndim)]
    most = {1: 200, 2: 25, 3: 8}[ndim]
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, padding, strict=True)]
    size = [r.randint(low, max(low, r.choice([most, most // 4]))) for low in least]
    dtype = r.choice([torch.int8, torch.uint8])
    format = INT8 if dtype == torch.int8 else UINT8
    block = r.choice([(-1,), (1, *[-1] * (ndim + 1))])
    affine = r.choice([True, False])
    x = _operand(
        Quantizer(format, block, MinMax() if affine else Static()),
        _random_codes((r.choice([1, 1, 2, 5]), inputs * groups, *size), dtype, r.choice(["plain", "last", "cut"])),
    )
    of_weight = Quantizer(INT8, r.choice([(-1,), (1, *[-1] * (ndim + 1))]), Static())
    lies = r.choice(["plain", "plain", "last", "cut"])
    weight = _operand(of_weight, _random_codes((outputs * groups, inputs, *kernel), torch.int8, lies))
    weight = _packed(weight) if r.choice([True, False]) else weight
    bias = r.choice([None, torch.randn(outputs * groups), torch.randint(-(2**31), 2**31, (outputs * groups,)).int()])
    output = r.choice([torch.float32, torch.bfloat16, torch.float16])
    return Call(_OPS[ndim], output, None, None, (x, weight, bias, stride, padding, dilation, groups), {})


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.quick(2)
def test_random(seed: int) -> None:
    call = _drawn(seed)
    for level in levels.HERE[::-1] if seed % 4 == 0 else levels.HERE[-1:]:
        with levels.at(level):
            _same(call)


def _call(
    x: Any = None, weight: Any = None, bias: Any = None, rest: Any = (), output: Any = torch.float32, op: Any = None
) -> Call:
    torch.manual_seed(0)
    x = _operand(presets.UINT8_TENSOR_AFFINE, _random_codes((2, 64, 9, 7), torch.uint8)) if x is None else x
    weight = _operand(presets.INT8_CONV, _random_codes((40, 64, 3, 3), torch.int8)) if weight is None else weight
    scale = zero = None
    if isinstance(output, Quantizer):
        shape = meaning.real(
            Call(op or aten.conv2d.default, torch.float32, None, None, (x, weight, bias, *rest), {})
        ).shape
        scale = torch.rand(hop.numerics.blocks.counts(shape, output.block)) * 30000 + 5000
        if output.scale.has_zero_point():
            zero = torch.randint(0, 100, scale.shape).to(output.format.dtype)
    return Call(op or aten.conv2d.default, output, scale, zero, (x, weight, bias, *rest), {})


_BLOCKS = [(-1,), (1, -1, -1, -1), (-1, 1, -1, -1)]
_CONVENTIONS = [
    Division(),
    Division(low=0.0),
    Reciprocal(),
    Reciprocal(low=0.0, high=9e5),
    FloatMultiplier(),
    FloatMultiplier(low=0.0, high=9e5),
    GEMMLOWP,
    FixedPoint(),
]


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("convention", _CONVENTIONS, ids=str)
@pytest.mark.parametrize("block", _BLOCKS)
@pytest.mark.quick(3)
def test_codes(level: str, convention: Any, block: tuple[int, ...]) -> None:
    """Requantized, beside each kind of bias, with each kind of scale."""
    torch.manual_seed(1)
    biases = (None, torch.randn(40) * 1e4, torch.randint(-9999, 9999, (40,)).int())
    for bias, format in zip(biases, (INT8, UINT8, INT8), strict=True):
        with levels.at(level):
            _same(_call(bias=bias, output=Quantizer(format, block, Static(affine=True, requantize=convention))))


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.quick(3)
def test_read_in_place(level: str) -> None:
    """Kernels of one element over channels in whole slices, which lie last: any number of pixels, groups, and examples
    with scales of their own, and more slices than are multiplied at once."""
    for pixels, (batch, channels, groups), block in itertools.product(
        (1, 11, 13, 16, 31, 33, 49, 65), ((1, 64, 1), (2, 128, 1), (1, 64, 2), (1, 1408, 1)), _BLOCKS[:2]
    ):
        torch.manual_seed(pixels)
        codes = _random_codes((batch, channels * groups, 1, pixels), torch.uint8, "last")
        x = _operand(Quantizer(UINT8, block, MinMax()), codes)
        weight = _operand(presets.INT8_CONV, _random_codes((40 * groups, channels, 1, 1), torch.int8))
        with levels.at(level):
            _same(_call(x, _packed(weight), torch.randn(40 * groups), ([1, 1], [0, 0], [1, 1], groups), torch.bfloat16))


@pytest.mark.parametrize("requantize", [Division(), GEMMLOWP], ids=str)
def test_channels_last(requantize: Any) -> None:
    """The result lies as the input does, through a chain of operators."""
    output = Quantizer(UINT8, scale=Static(affine=True, requantize=requantize))
    weight = hop.pack(hop.quantize(presets.INT8_CONV, torch.randn(8, 8, 3, 3)))
    scale, zero = torch.tensor(0.1), torch.tensor(3, dtype=torch.uint8)

    def run(x: Tensor) -> list[Tensor]:
        given = {"output_scale": scale, "output_zero_point": zero}
        t = hop.quantize(presets.UINT8_TENSOR_AFFINE, x)
        y = hop.scaled(aten.conv2d.default, output, t, weight, None, [1, 1], [1, 1], **given)
        z = hop.scaled(aten.add.Tensor, Quantizer(UINT8, scale=Static(affine=True)), y, t, **given)
        p = hop.scaled(aten.max_pool2d.default, output, z, [2, 2], **given)
        return [y.codes, z.codes, p.codes, hop.scaled(aten.conv2d.default, torch.bfloat16, p, weight)]

    x = torch.randn(2, 8, 8, 10)
    plain = run(x)
    assert all(t.is_contiguous() for t in plain)
    for level in ("off", levels.BEST):
        with levels.at(level):
            for got, want in zip(run(x.contiguous(memory_format=torch.channels_last)), plain, strict=True):
                assert torch.equal(got, want) and got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.compiler
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.full
def test_in_programs(format: Any, dynamic: bool) -> None:
    """A compiled program runs the kernel of eager mode, for any sizes, and its results lie as they do there."""
    from torch._inductor.utils import run_and_get_code

    output = Quantizer(UINT8, scale=Static(affine=True, requantize=FloatMultiplier()))
    weight, bias = hop.pack(hop.quantize(presets.INT8_CONV, torch.randn(8, 8, 3, 3))), torch.randn(8)
    given = {"output_scale": torch.tensor(0.1), "output_zero_point": torch.tensor(3, dtype=torch.uint8)}

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        t = hop.quantize(presets.UINT8_TENSOR_AFFINE, x)
        y = hop.scaled(aten.conv2d.default, output, t, weight, bias, [2, 2], [1, 1], **given)
        return y.codes, hop.scaled(aten.conv2d.default, torch.bfloat16, y, weight)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    for n, size in ((2, 11), (3, 16)):
        x = torch.randn(n, 8, size, 14).contiguous(memory_format=format)
        found, code = run_and_get_code(compiled, x)
        calls = re.findall(r"= torch\.ops\.hop_native\.\w+\.default\(", "".join(code))
        assert n != 2 or len(calls) == 3, calls
        for got, want in zip(found, run(x), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
            assert got.is_contiguous(memory_format=format)


@pytest.mark.parametrize("output", [torch.bfloat16, Quantizer(UINT8, scale=Static(affine=True))], ids=str)
@pytest.mark.quick(2)
def test_plans(output: Any) -> None:
    """Calls that differ in one thing alone, one after the other, twice: each gives what it gives without a plan."""
    given = [torch.full(s, 0.1) for s in ((), (1, 1, 1, 1))]
    zeros = [torch.tensor(3, dtype=torch.uint8), torch.full((1, 1, 1, 1), 5, dtype=torch.uint8)]
    x = torch.randn(2, 8, 6, 7)
    inputs = [
        hop.quantize(presets.UINT8_TENSOR_AFFINE, x),
        hop.quantize(presets.UINT8_TENSOR_AFFINE, x.contiguous(memory_format=torch.channels_last)),
        hop.quantize(presets.INT8_TENSOR, x),
        hop.quantize(presets.INT8_TENSOR, x)[:, :, ::2],
        hop.quantize(presets.INT8_TENSOR, x[:1]),
    ]
    plain = hop.quantize(presets.INT8_CONV, torch.randn(4, 8, 3, 3))
    weights = [plain, hop.pack(plain), hop.quantize(presets.INT8_TENSOR, torch.randn(4, 8, 3, 3))]
    biases = [None, torch.randn(4), torch.randn(8)[::2], torch.randint(-99, 99, (4,)).int()]
    lists = [(), ([1, 1], [1, 1]), (1, 1), ((2, 1), "valid")]
    stored = itertools.product(given, zeros) if isinstance(output, Quantizer) else [(None, None)]
    for _, t, w, bias, rest, (scale, zero) in itertools.product(range(2), inputs, weights, biases, lists, [*stored]):
        op = aten.conv2d.padding if rest and rest[1] == "valid" else aten.conv2d.default
        args = (op, output, t, w, bias, *rest)
        with torch.device("cpu"):  # around plans
            want = hop.scaled(*args, output_scale=scale, output_zero_point=zero)
        got = hop.scaled(*args, output_scale=scale, output_zero_point=zero)
        if isinstance(output, Quantizer):
            assert got.dtype == want.dtype and got.quantizer == want.quantizer
            assert all(map(torch.equal, got.buffers().values(), want.buffers().values()))
            assert got.scale.data_ptr() != scale.data_ptr()
        else:
            assert torch.equal(got, want)
        assert got.stride() == want.stride() and got.shape == want.shape


def test_codes_halfway() -> None:
    """Quotients in the middle of two integers, and next to it."""
    x = _operand(presets.INT8_TENSOR_STATIC, torch.arange(-128, 128).to(torch.int8).reshape(1, 1, 16, 16))
    x = x._replace(tensors=(x.tensors[0], torch.tensor([[[[1.0]]]])))
    weight = _operand(presets.INT8_TENSOR_STATIC, torch.ones(32, 1, 1, 1, dtype=torch.int8))
    for step in (1.0, 0.1, 1 / 3, 2**-120):
        weight = weight._replace(tensors=(weight.tensors[0], torch.full((1, 1, 1, 1), step)))
        for requantize in (Division(), FloatMultiplier()):
            call = _call(x, weight, output=Quantizer(INT8, scale=Static(requantize=requantize)))
            _same(call._replace(output_scale=torch.tensor([[[[2 * step]]]])))


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("lies", ["plain", "last", "cut"])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 7), (5, 5), (2, 3, 2)], ids=str)
@pytest.mark.quick(3)
def test_plain_weights(level: str, lies: str, kernel: tuple[int, ...]) -> None:
    """Weights that are brought to tiles in the call, of 128 channels and a number of outputs that fills no panel."""
    torch.manual_seed(0)
    ones = [1] * len(kernel)
    x = _operand(presets.UINT8_TENSOR_AFFINE, _random_codes((1, 128, *(n + 2 for n in kernel)), torch.uint8))
    weight = _operand(presets.INT8_TENSOR, _random_codes((40, 128, *kernel), torch.int8, lies))
    with levels.at(level):
        _same(_call(x, weight, None, (ones, ones), op=_OPS[len(kernel)]))


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.quick(3)
def test_large_results(level: str, output: torch.dtype) -> None:
    """Results that go past the cache, one of whose panels is not full."""
    x = _operand(presets.UINT8_TENSOR_AFFINE, _random_codes((2, 3, 150, 151), torch.uint8, "last"))
    weight = _operand(presets.INT8_CONV, _random_codes((72, 3, 2, 2), torch.int8))
    with levels.at(level):
        _same(_call(x, weight, torch.randn(72), output=output))


@pytest.mark.parametrize("level", native.LEVELS)
def test_modulo(level: str) -> None:
    """Sums beyond 2^31 wrap around."""
    x = _operand(presets.UINT8_TENSOR, torch.full((1, 65600, 1, 1), 255, dtype=torch.uint8))
    weight = _operand(presets.INT8_TENSOR, torch.full((2, 65600, 1, 1), -128, dtype=torch.int8))
    with levels.at(level):
        _same(_call(x, weight))
        _same(_call(x, weight, output=Quantizer(INT8, scale=Static(requantize=FloatMultiplier()))))


def test_infinite_numbers() -> None:
    """Scales and biases that are no finite numbers."""
    for value in (torch.inf, torch.nan, 1e38, 1e-45):
        for output in (torch.float32, torch.bfloat16, Quantizer(INT8, scale=Static())):
            call = _call(bias=torch.full((40,), value), output=output)
            _check_numbers(call)
            x = call.args[0]
            x = x._replace(tensors=(x.tensors[0], torch.full_like(x.tensors[1], value), *x.tensors[2:]))
            _check_numbers(call._replace(args=(x, *call.args[1:])))


def _check_numbers(call: Call) -> None:
    got, want = matching.computed(NATIVE_CONVOLUTION, call), meaning.reference(call)
    for a, b in zip(*(x if isinstance(x, list) else [x] for x in (got, want)), strict=True):
        assert torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) if a.is_floating_point() else torch.equal(a, b)


@pytest.mark.parametrize("format", [INT4, TERNARY], ids=str)
@pytest.mark.parametrize("level", native.LEVELS)
def test_narrow_weights(format: Any, level: str) -> None:
    weight = hop.quantize(Quantizer(format, (1, -1, -1, -1)), torch.randn(40, 64, 3, 3))
    for t in (weight, hop.pack(weight)) if format == INT4 else (weight,):
        with levels.at(level):
            _same(_call(weight=Operand(t.quantizer, tuple(t.buffers().values()), t.usages, tuple(t.shape))))


def test_shapes() -> None:
    """Without a batch dimension, without examples, padding as a name."""
    one = _operand(presets.INT8_TENSOR_AFFINE, _random_codes((64, 9, 7), torch.int8))
    none = _operand(presets.INT8_TENSOR_AFFINE, _random_codes((0, 64, 9, 7), torch.int8))
    static = Quantizer(INT8, scale=Static())
    for x in (one, none):
        _same(_call(x))
        _same(_call(x, output=static))
    for padding in ("same", "valid"):
        _same(_call(rest=([1, 1], padding), op=aten.conv2d.padding))
    even = _operand(presets.INT8_CONV, _random_codes((40, 64, 4, 2), torch.int8))
    _same(_call(weight=even, rest=([1, 1], "same", [2, 3]), op=aten.conv2d.padding))
    _same(_call(rest=([2, 2], [1, 1], [1, 1], False, [0, 0], 1), op=aten.convolution.default))


def test_outputs_of_other_quantizers() -> None:
    _same(_call(output=presets.INT8_TENSOR))
    _same(_call(output=presets.INT8_ROW_AFFINE))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: _call(op=aten.conv_transpose2d.input), "transposed"),
        (lambda: _call(output=torch.float64), "float64"),
        (lambda: _call(x=torch.randn(2, 64, 9, 7)), "two integer operands"),
        (lambda: _call(weight=_operand(presets.INT8_TENSOR_AFFINE, _random_codes((4, 64, 3, 3), torch.int8))), "zero"),
        (lambda: _call(weight=_operand(presets.INT8_TENSOR, _random_codes((4, 60, 3, 3), torch.int8))), "fit together"),
        (
            lambda: _call(weight=_operand(presets.INT8_TENSOR, _random_codes((4, 64, 11, 3), torch.int8))),
            "fit together",
        ),
        (lambda: _call(bias=torch.randn(3)), "bias"),
        (lambda: _call(bias=torch.randn(40, dtype=torch.float64)), "bias"),
    ],
)
def test_declines(call: Any, reason: str) -> None:
    assert reason in matching.reason(NATIVE_CONVOLUTION, call())


def test_switched_off() -> None:
    with native.use("off"):
        assert "switched off" in matching.reason(NATIVE_CONVOLUTION, _call())
