"""Attention by the native kernel: the bits of the reference, at every level, for any number of threads."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop import Quantizer, presets
from hop.dispatch.operand import encode
from hop.impls.scaled import scaled_buffers
from hop.numerics.formats import INT8
from hop.tensor.quantized import operand
from tests import levels

SDPA = torch.ops.aten.scaled_dot_product_attention.default
CHANNEL = Quantizer(INT8, (1, -1, 1))
pytestmark = pytest.mark.skipif(not levels.HERE, reason="needs the native kernels")

# query, key, value: shapes of one call, with and without groups of heads
SHAPES = (
    ((1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 1)),
    ((2, 3, 7, 20), (2, 3, 33, 20), (2, 3, 33, 18)),
    ((1, 6, 31, 64), (1, 2, 130, 64), (1, 2, 130, 80)),
    ((5, 65, 33), (5, 65, 33), (5, 65, 33)),
    ((40, 16), (100, 16), (100, 130)),
    ((1, 8, 1, 128), (1, 2, 700, 128), (1, 2, 700, 128)),
    ((2, 3, 1, 32), (2, 3, 35, 32), (2, 3, 35, 80)),
    ((2, 1, 3, 16), (2, 1, 50, 16), (2, 1, 50, 20)),
)


def random_codes(shape: tuple[int, ...], rule: Quantizer, generator: torch.Generator, kind: int) -> Any:
    """Codes of the whole range, and scales of which some are none that a rule finds."""
    t = hop.quantize(rule, torch.randn(shape, generator=generator))
    t.codes.copy_(torch.randint(-128, 128, t.codes.shape, generator=generator))
    t.scale.copy_(torch.rand(t.scale.shape, generator=generator) * 0.02)
    if kind == 1:
        t.codes.fill_(-128)
    if kind == 2:
        t.scale.view(-1)[:: max(1, t.scale.numel() // 3)] = math.nan
    if kind == 3:
        t.scale.view(-1)[::5] = math.inf
    if kind == 4:
        t.scale.neg_()
    if kind == 5:
        t.scale.zero_()
    if kind == 6:
        t.scale.mul_(1e-4)
    return t


def masks(shape: tuple[int, ...], generator: torch.Generator) -> list[tuple[Any, ...]]:
    values = torch.randn(shape, generator=generator)
    odd = torch.where(values > 1, -math.inf, values)
    odd[..., :1, :] = -math.inf
    odd[..., -1:, :1] = math.nan
    last = values[..., :1, :] > 0
    seen = torch.randint(0, shape[-1] + 1, (*shape[:-1], 1), generator=generator)
    seen[..., :1, :] = 0
    return [
        (),
        (None, 0.0, True),
        (values > 0.5,),
        (last,),
        (odd,),
        (values[..., :1] > 0,),
        (values.to(torch.bfloat16),),
        (torch.arange(shape[-1]) < seen,),
    ]


def reference(operands: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    encoded = encode([operand(x) for x in operands])
    return scaled_buffers.reference(SDPA, torch.float32, None, None, *encoded, *args, **kwargs)


def assert_same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan()), "NaN"
    assert torch.equal(got.nan_to_num(0, 1, -1), want.nan_to_num(0, 1, -1)), float((got - want).abs().max())


@pytest.mark.parametrize("level", levels.OWN)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.quick(4)
def test_bits(shapes: tuple[tuple[int, ...], ...], level: str) -> None:
    generator = torch.Generator().manual_seed(len(shapes[0]) + shapes[1][-2])
    grouped = {"enable_gqa": True} if shapes[0][:-2] != shapes[1][:-2] else {}
    for kind in range(7):
        q, k = (random_codes(s, presets.INT8_ROW, generator, kind) for s in shapes[:2])
        for rule in (CHANNEL, presets.INT8_ROW, presets.INT8_TENSOR):
            v = random_codes(shapes[2], rule, generator, kind)
            given = masks((*shapes[0][:-1], shapes[1][-2]), generator)
            for args in given if kind == 0 else given[:1] + given[4:5]:
                want = reference([q, k, v], args, grouped)
                with levels.at(level):
                    assert "native attention: chosen" in hop.explain(SDPA, torch.float32, q, k, v, *args, **grouped)
                    assert_same(hop.scaled(SDPA, torch.float32, q, k, v, *args, **grouped), want)


@pytest.mark.parametrize("level", levels.OWN)
@pytest.mark.quick(3)
def test_outputs_strides_and_threads(level: str) -> None:
    generator = torch.Generator().manual_seed(2)
    floats = [torch.randn(2, 300, 6, 32, generator=generator) for _ in range(3)]
    rules = (presets.INT8_ROW, presets.INT8_ROW, presets.INT8_ROW)
    q, k, v = (hop.quantize(r, x).transpose(1, 2) for r, x in zip(rules, floats, strict=True))
    want = reference([q, k, v], (None, 0.0, True), {})
    threads = torch.get_num_threads()
    with levels.at(level):
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            try:
                got = hop.scaled(SDPA, torch.float32, q, k, v, is_causal=True)
            finally:
                torch.set_num_threads(threads)
            assert_same(got, want)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert torch.equal(hop.scaled(SDPA, dtype, q, k, v, is_causal=True), want.to(dtype))
        codes = hop.scaled(SDPA, presets.INT8_ROW, q, k, v, is_causal=True)
    assert torch.equal(codes.codes, hop.quantize(presets.INT8_ROW, want).codes)


@pytest.mark.parametrize("level", levels.OWN)
def test_ties(level: str) -> None:
    """Scores near those at which a probability lies between two codes: float32s around each, all of them."""
    middles = -torch.log(255 / (torch.arange(255, dtype=torch.float64) + 0.5)).to(torch.float32)
    steps = torch.arange(-24, 25, dtype=torch.int32)
    bias = (middles.view(torch.int32).unsqueeze(1) + steps).view(torch.float32)
    bias = torch.cat([torch.zeros(255, 1), bias], 1)
    q = hop.quantize(presets.INT8_ROW, torch.zeros(255, 4))
    k = hop.quantize(presets.INT8_ROW, torch.zeros(50, 4))
    v = hop.quantize(presets.INT8_TENSOR, torch.eye(50))
    want = reference([q, k, v], (bias,), {})
    with levels.at(level):
        assert_same(hop.scaled(SDPA, torch.float32, q, k, v, bias), want)


def test_declines() -> None:
    q = hop.quantize(presets.INT8_ROW, torch.randn(2, 4, 8))
    affine = hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(2, 4, 8))
    for args, words in (((q, q, affine), "without zero points"), ((q, q[:1], q[:1]), "leading dimensions")):
        assert words in hop.explain(SDPA, torch.float32, *args)


def test_bad_tensors_are_refused() -> None:
    """The operator itself looks at what it reads."""
    codes, scale = torch.zeros(1, 1, 4, 8, dtype=torch.int8), torch.ones(1, 1, 4, 1)
    good = [codes, scale, codes, scale, codes, scale, None, 1.0, False, "1 result=float32 per=token"]
    attention = torch.ops.hop_native.attention.default
    assert attention(*good).shape == (1, 1, 4, 8)
    bad: list[tuple[int, Any]] = [
        (0, codes.float()), (0, codes[0]), (1, scale[:, :, :3]), (2, codes[..., :4]), (3, scale.double()),
        (4, codes[:, :, :3]), (5, torch.ones(1, 1, 1, 8)), (6, torch.zeros(4, 4)), (9, "1 result=int8 per=token"),
        (9, "1 per=row"), (0, codes[:, :, :0]),
    ]  # fmt: skip
    for place, value in bad:
        given = list(good)
        given[place] = value
        with pytest.raises(RuntimeError):
            attention(*given)
