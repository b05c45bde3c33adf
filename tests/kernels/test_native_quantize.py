"""The native kernels of quantize and dequantize against the reference, bit for bit, at each level of instructions."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hop
from hop import formats, presets
from hop.impls.quantize import fake_quantize_operator
from hop.kernels.cpu import native
from hop.kernels.cpu import quantize as native_quantize
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, CurrentScaling, Microscaling, MinMax, Static, TwoLevel
from hop.tensor.buffers.operators import dequantize_buffers, quantize_buffers
from tests import levels
from tests.numerics.test_quantizer import KINDS, generator, operands, same_bits
from tests.support.matching import computed
from tests.support.matching import reason as reason_of
from tests.support.tensors import channels_last

pytestmark = pytest.mark.skipif(native.library().functions is None, reason=str(native.library().missing))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWWISE = (copies.ROWWISE,)
SHAPES = ((), (1,), (5,), (3, 1), (7, 33), (3, 5, 40), (2, 3, 4, 6), (33, 130), (2, 16, 32), (257,))
LARGE = ((3, 70000), (300, 260), (129, 1, 513), (5000, 3), (2, 130, 128))
# Formats, blocks and rules beside those of the presets.
OTHERS = {
    "int8_groups_of_24": Quantizer(formats.INT8, (1, 24)),
    "int4_groups_of_3": Quantizer(formats.INT4, (1, 3)),
    "int4_columns_affine": Quantizer(formats.UINT4, (-1, 1), MinMax()),
    "int8_elements": Quantizer(formats.INT8, (1, 1)),
    "int3": Quantizer(formats.Integer("int3", 3, torch.int8, -4, 3), (1, 16)),
    "bits": Quantizer(formats.Integer("bit", 1, torch.uint8, 0, 1), (1, 16), MinMax()),
    "e3m2": Quantizer(formats.Float("e3m2", 6, torch.uint8, 3, 2, bias=3, largest=31), (1, 32), Microscaling()),
    "e2m1_amax": Quantizer(formats.E2M1, (1, 16), Amax(floor=1e-3)),
    "e4m3_stochastic": Quantizer(formats.E4M3, (1, 32), CurrentScaling(eps=0.5), stochastic=True),
    "int8_stochastic_affine": Quantizer(formats.INT8, (8, 8), MinMax(), stochastic=True),
    "int8_row_stochastic": Quantizer(formats.INT8, (1, -1), stochastic=True),
    "uint8_row_stochastic_affine": Quantizer(formats.UINT8, (1, -1), MinMax(), stochastic=True),
    "int4_groups_stochastic": Quantizer(formats.INT4, (1, 64), stochastic=True),
    "ternary_columns": Quantizer(formats.TERNARY, (-1, 4), AbsMean()),
    "odd_tiles": Quantizer(formats.E5M2, (3, 5), Microscaling()),
    "nvfp4_row_tiles": Quantizer(formats.E2M1, (1, 32), TwoLevel(outer=(1, -1))),
    "close_book": Quantizer(formats.Codebook("close", 6, torch.uint8, tuple(1 + i / 4096 for i in range(33))), (1, 32)),
}
QUANTIZERS = {**{name.lower(): q for name, q in presets.PRESETS.items()}, **OTHERS}


def check(q: Quantizer, x: Tensor, options: dict[str, Any], what: str, out: torch.dtype = torch.float32) -> None:
    """quantize and dequantize of x at each level and number of threads."""
    given = [options.get(name) for name in ("scale", "zero_point", "noise")]
    call = (str(q), x, *given, ROWWISE)
    buffers = quantize_buffers.reference(*call)
    back = (str(q), buffers, ROWWISE, list(x.shape), out)
    numbers = dequantize_buffers.reference(*back)
    if x.numel() == 0:
        assert reason_of(native_quantize.QUANTIZE, call) and reason_of(native_quantize.DEQUANTIZE, back)
        return
    for level, threads in itertools.product(levels.OWN_HERE, (1, 2) if x.numel() >= 2**16 else (1,)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with native.use(level):
                got = computed(native_quantize.QUANTIZE, call)
                for name, own, want in zip(("codes", *q.stored()), got, buffers, strict=True):
                    same_bits(own, want, f"{name} of {what} at {level} with {threads} threads")
                same_bits(computed(native_quantize.DEQUANTIZE, back), numbers, f"numbers of {what} at {level}")
        finally:
            torch.set_num_threads(before)


def one(name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype, given: bool, seed: int = 0) -> None:
    q, g = QUANTIZERS[name], generator(seed)
    x = KINDS[kind](shape, g).to(dtype)
    out = DTYPES[(seed + len(kind) + len(shape)) % 3]
    check(q, x, operands(q, x, g, given), f"{name}, {dtype} {kind} {shape}, given={given}", out)


# ---- the product of quantizers, shapes and values


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.quick(18)
def test_quantizer(name):
    for i, (shape, kind) in enumerate(itertools.product(SHAPES, KINDS)):
        one(name, shape, kind, DTYPES[(i + len(name)) % 3], given=i % 4 == 3)


@pytest.mark.full
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizer_in_full(name):
    product = itertools.product(SHAPES, KINDS, DTYPES, (False, True))
    for seed, (shape, kind, dtype, given_scale) in enumerate(product):
        one(name, shape, kind, dtype, given_scale, seed)


@pytest.mark.parametrize(
    "name", ["int8_tensor", "int8_row_affine", "ternary_row", "mxfp8", "nvfp4", "state4", "int8_column"]
)
@pytest.mark.quick(2)
def test_threads(name):
    for i, shape in enumerate(LARGE):
        one(name, shape, ("normal", "blocky", "nan")[i % 3], DTYPES[i % 3], given=False)


@pytest.mark.full
@pytest.mark.parametrize("name", QUANTIZERS)
def test_threads_in_full(name):
    for seed, (shape, kind) in enumerate(itertools.product(LARGE, ("normal", "blocky", "sizes"))):
        one(name, shape, kind, DTYPES[seed % 3], given=seed % 5 == 4, seed=seed)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(QUANTIZERS)),
    st.lists(st.integers(0, 40), max_size=4),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
@pytest.mark.full
def test_drawn(name, shape, kind, dtype, given_scale, seed):
    one(name, tuple(shape), kind, dtype, given_scale, seed)


# ---- ties: where a product with a reciprocal is not the quotient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8_row", "int4_32", "uint8_row_affine", "int8_row_static", "ternary_row"])
def test_ties(name, dtype):
    q = QUANTIZERS.get(name) or Quantizer(formats.INT8, (1, -1), Static())
    g = generator(3)
    scale = torch.rand(64, 1, generator=g) + 0.1
    steps = torch.randint(-260, 261, (64, 512), generator=g) / 2
    nudged = (steps * scale).view(torch.int32) + torch.randint(-2, 3, (64, 512), generator=g, dtype=torch.int32)
    x = nudged.view(torch.float32).to(dtype)
    check(q, x, {"scale": scale} if isinstance(q.scale, Static) else {}, f"{name} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.quick(2)
def test_all_half_floats(dtype):
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = (words.view(dtype) if dtype != torch.float32 else words.view(torch.bfloat16).float()).reshape(-1, 32)
    for name in ("mxfp8", "mxfp4", "mxfp8_e5m2", "nvfp4_row", "int8_row", "int4_32", "fp8_1x128", "state8"):
        check(QUANTIZERS[name], x, {}, f"{name} of all {dtype}")
        shuffled = x.reshape(-1)[torch.randperm(2**16, generator=generator(1))].reshape(-1, 64)
        check(QUANTIZERS[name], shuffled, {}, f"{name} of all {dtype}, shuffled")


def test_all_codes():
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    for name, dtype in itertools.product(("fp8_row", "fp8_e5m2_row", "int8_row", "state8", "mxfp8", "mxfp4"), DTYPES):
        q = QUANTIZERS[name]
        described = q.buffers((4, 64))
        shape, held = described["codes"]
        scale = torch.tensor([1.0, 0.3, 1e-30, 1e30]).repeat(256)
        scales = [
            (scale if kind == torch.float32 else torch.arange(1024)).to(kind)[: math.prod(size)].reshape(size)
            for size, kind in list(described.values())[1:]
        ]
        call = (
            str(q),
            [codes.reshape(-1)[: math.prod(shape)].reshape(shape).view(held), *scales],
            ROWWISE,
            [4, 64],
            dtype,
        )
        for level in levels.OWN_HERE:
            with native.use(level):
                same_bits(
                    computed(native_quantize.DEQUANTIZE, call),
                    dequantize_buffers.reference(*call),
                    f"{name} {level}",
                )


# ---- strides, copies, and what is declined


def test_given_scales_of_no_power():
    """Scales that a rule brings to powers of two: by the fast path, and by each level. Others than numbers above 0
    are refused."""
    q, x = Quantizer(formats.E4M3, (1, -1), CurrentScaling(power_of_two=True)), torch.randn(5, 40)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale must be above 0 and finite"):
            hop.quantize(q, x, scale=torch.full((5, 1), wrong))
    scale = torch.tensor([[torch.finfo(torch.float32).max], [1.0], [0.75], [2.0**-149], [3.0]])
    check(q, x, {"scale": scale}, "native")
    want = quantize_buffers.reference(str(q), x, scale, None, None, ROWWISE)
    with native.use("off"):
        got = hop.quantize(q, x, scale=scale)
    for name, found, wanted in zip(q.buffers(x.shape), got.buffers().values(), want, strict=True):
        same_bits(found, wanted, name)


@pytest.mark.parametrize(
    "name", ["int8_row", "int8_tensor", "mxfp8", "nvfp4_row", "int8_column", "state8", "uint4_32_affine"]
)
def test_strides(name):
    q, x = QUANTIZERS[name], torch.randn(6, 40, 96)
    views = (x[:, :, :64], x[:, ::2], x.transpose(0, 1), x[:, :, ::3], x[:1].expand(5, 40, 96), x[..., 1:], x.mT)
    for i, view in enumerate(views):
        check(q, view, {}, f"{name}, view {i}")


@pytest.mark.parametrize("name", [name for name, q in QUANTIZERS.items() if isinstance(q.format, formats.Codebook)])
def test_near_thresholds(name):
    """Numbers a few units of their last place above and below what divides two codes, of small and large blocks."""
    q = QUANTIZERS[name]
    (size,) = q.block[-1:]
    bounds = torch.tensor([t for t in q.format._thresholds if abs(t) < 1e30], dtype=torch.float64)
    for amax in (1.0, 0.37, 3.3e7, 5.1e-9, 2.9e31, 1.7e-33, 3e-40):
        near = (bounds * amax / q.format.max).to(torch.float32)
        up = down = near
        found = [near]
        for _ in range(7):
            up, down = up.nextafter(torch.tensor(torch.inf)), down.nextafter(torch.tensor(-torch.inf))
            found += [up, down]
        x = torch.cat(found)
        x = torch.nn.functional.pad(x, (0, -len(x) % (size - 1))).view(-1, size - 1)
        x = torch.cat([torch.full((len(x), 1), amax), x], 1)
        check(q, x, {}, f"{name}, amax {amax}")


# Whether codes keep the memory format.
CHANNELS_LAST = {
    presets.INT8_TENSOR: True,
    presets.UINT8_TENSOR_AFFINE: True,
    presets.INT8_CONV: True,
    Quantizer(formats.INT8, (1, -1, -1, -1, -1), MinMax()): True,
    Quantizer(formats.INT8, (1, 1, -1, -1), MinMax()): True,
    Quantizer(formats.INT8, (1, 8, -1, -1)): True,
    Quantizer(formats.INT8, (8, 8), MinMax(), stochastic=True): True,
    Quantizer(formats.INT8, (1, -1), AbsMean()): True,
    presets.FP8_ROW: True,
    presets.INT4_32: False,
    presets.STATE8: False,
}


@pytest.mark.parametrize("q", CHANNELS_LAST, ids=str)
@pytest.mark.parametrize("size", [(6, 8), (3, 4, 5)], ids=str)
@pytest.mark.quick(2)
def test_channels_last(q, size):
    """Codes and numbers lie as what they were made from, and are the same."""
    g = generator(1)
    x = channels_last(torch.randn(2, 16, *size, generator=g))
    options = operands(q, x, g)
    check(q, x, options, f"{q}, channels last")

    def run(x: Tensor, options: dict[str, Tensor]) -> list[Tensor]:
        t = hop.quantize(q, x, **options)
        return [t.codes, t, hop.dequantize(t), hop.fake_quantize(q, x, **options)]

    def lies(made: list[Tensor]) -> list[tuple[int, ...]]:
        return [t.stride() for t in made]

    want = [x.stride()] * 4 if CHANNELS_LAST[q] else lies(run(x.contiguous(), options))
    for level in ("off", *levels.OWN_HERE):
        with native.use(level):
            assert lies(run(x, options)) == want, level
    with torch._subclasses.fake_tensor.FakeTensorMode() as fake:
        made = run(fake.from_tensor(x), {k: fake.from_tensor(t) for k, t in options.items()})
        assert lies(made) == want


@pytest.mark.compiler
@pytest.mark.parametrize("level", ["off", levels.BEST])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.full
def test_channels_last_in_programs(level, dynamic):
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = hop.quantize(presets.UINT8_TENSOR_AFFINE, x.relu())
        return t.codes, hop.dequantize(t), hop.fake_quantize(presets.INT8_CONV, x)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    with native.use(level):
        for n in (2, 3):
            x = channels_last(torch.randn(n, 6, 5, 7))
            for got, want in zip(compiled(x), run(x), strict=True):
                assert torch.equal(got, want) and got.stride() == want.stride() == x.stride()


@pytest.mark.parametrize("name", sorted(n for n, q in QUANTIZERS.items() if not q.flat))
@pytest.mark.quick(2)
def test_copies(name):
    q, g = QUANTIZERS[name], generator(0)
    x = torch.randn(32, 48, generator=g)
    options = operands(q, x, g)
    usages = copies.USAGES if "scale" not in options or q.shares_scale() else ROWWISE
    call = (str(q), x, options.get("scale"), options.get("zero_point"), options.get("noise"), usages)
    want = quantize_buffers.reference(*call)
    for own, other in zip(computed(native_quantize.QUANTIZE, call), want, strict=True):
        same_bits(own.contiguous(), other.contiguous(), name)
    for wise in (usages, (copies.COLUMNWISE,)):
        if copies.COLUMNWISE not in wise:
            continue
        names = [b.name for b in copies.describe(q, x.shape, copies.USAGES)]
        own = [b.name for b in copies.describe(q, x.shape, wise)]
        buffers = [want[names.index(n)] for n in own]
        back = (str(q), buffers, wise, list(x.shape), torch.bfloat16)
        same_bits(
            computed(native_quantize.DEQUANTIZE, back).contiguous(),
            dequantize_buffers.reference(*back).contiguous(),
            name,
        )


PRODUCTS = {
    "int8_row": presets.INT8_ROW,
    "int8_row_stochastic": OTHERS["int8_row_stochastic"],
    "int4_groups_stochastic": OTHERS["int4_groups_stochastic"],
    "affine": OTHERS["uint8_row_stochastic_affine"],
    "e4m3_stochastic": OTHERS["e4m3_stochastic"],
    "mxfp8": presets.MXFP8,
    "fp8_row": presets.FP8_ROW,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.quick(8)
def test_product(name):
    """x times a factor of each column, lying as it is and turned, with noise that is given or found from a seed."""
    q, g = PRODUCTS[name], generator(0)
    shapes = ((1, 1), (7, 33), (33, 130), (64, 128), (130, 96), (3, 5000), (2, 40, 64), (3, 17000))
    for i, (shape, kind, transposed) in enumerate(itertools.product(shapes, KINDS, (False, True))):
        if shape[-1] > 1000 and i % 5:
            continue
        x = KINDS[kind](shape, g).to(DTYPES[i % 3])
        x = x.mT.contiguous().mT if transposed else x
        factor = torch.randn(1, shape[-1], generator=g).exp() * (0.0 if i % 11 == 0 else 1.0)
        noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
        wide = torch.randint(0, 2**24, shape, dtype=torch.int32, generator=g)
        random = [(noise, None), (wide, None), (torch.tensor(i), 5)] if q.stochastic else [(None, None)]
        for own, stream in random:
            call = (str(q), x, None, None, own, list(ROWWISE), factor, stream)
            want = quantize_buffers.reference(*call)
            for level in levels.OWN_HERE:
                with native.use(level):
                    for own, other in zip(computed(native_quantize.QUANTIZE, call), want, strict=True):
                        same_bits(own, other, f"{name}, {kind} {shape}, turned={transposed} at {level}")


def test_product_without_the_kernel():
    """What it declines, and what is given instead."""
    x, factor = torch.randn(4, 64), torch.rand(1, 64)
    for q, own, options, reason in (
        (presets.NVFP4, factor, (None, list(ROWWISE)), "one scale for each"),
        (presets.FP8_TENSOR, factor, (None, list(ROWWISE)), "blocks within rows"),
        (presets.INT8_TENSOR_STATIC, factor, (torch.ones(1, 1), list(ROWWISE)), "with scales from a rule"),
        (presets.INT8_ROW, torch.rand(4, 1), (None, list(ROWWISE)), "for a float32 factor per column"),
        (presets.INT8_ROW, factor.double().float()[:, :1], (None, list(ROWWISE)), "for a float32 factor"),
    ):
        scale, usages = options
        call = (str(q), x, scale, None, None, usages, own)
        assert reason in reason_of(native_quantize.QUANTIZE, call)
        want = quantize_buffers(str(q), x * own, scale, None, None, usages)
        for got, other in zip(quantize_buffers(*call), want, strict=True):
            same_bits(got, other, reason)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_that_lie_transposed(dtype):
    for shape in ((1, 5), (33, 64), (64, 96), (130, 257), (2, 3, 64, 70)):
        x = torch.randn(shape).to(dtype).mT
        for q in (presets.INT8_ROW, presets.MXFP8, presets.STATE8):
            call = (str(q), x, None, None, None, ROWWISE)
            for own, want in zip(
                computed(native_quantize.QUANTIZE, call), quantize_buffers.reference(*call), strict=True
            ):
                same_bits(own, want, f"{q} of {shape}")


@pytest.mark.parametrize("name", ["int8_row", "nvfp4_stochastic", "uint4_32_affine", "state8"])
def test_operators(name):
    """The public functions take the kernels."""
    q, g = QUANTIZERS[name], generator(0)
    x = torch.randn(8, 96, generator=g)
    options = operands(q, x, g)
    want = q.fake_quantize(x, **options)
    assert torch.equal(hop.fake_quantize(q, x, **options), want)
    assert torch.equal(hop.dequantize(hop.quantize(q, x, **options)), want)
    call = (str(q), x, None, None, options.get("noise"))
    assert quantize_buffers.explain(*call, ROWWISE) == "native: chosen"
    assert fake_quantize_operator.explain(*call, "clipped") == "native: chosen"


def test_declines():
    x = torch.randn(4, 64)
    q = str(presets.INT8_ROW)

    def reason(*call: Any) -> str:
        return reason_of(native_quantize.QUANTIZE, call)

    assert "float64" in reason(q, x.double(), None, None, None, ROWWISE)
    assert "non-empty" in reason(q, x[:0], None, None, None, ROWWISE)
    assert "meta" in reason(q, x.to("meta"), None, None, None, ROWWISE)
    assert "needs a scale" in reason(str(presets.INT8_TENSOR_STATIC), x, None, None, None, ROWWISE)
    assert "a scale in" in reason(q, x, torch.ones(1), None, None, ROWWISE)
    blocks = str(Quantizer(formats.INT8, (1, -1, 1, -1)))
    assert "two dimensions" in reason(blocks, torch.randn(2, 3, 4, 5), None, None, None, ROWWISE)
    with native.use("off"):
        assert "switched off" in reason(q, x, None, None, None, ROWWISE)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert "eager" in reason(q, torch.randn(4, 64), None, None, None, ROWWISE)
