"""hop.quantize_weight: the native search against the reference, bit for bit, and the error against exact sums."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import hop
from hop import formats, presets
from hop.impls.quantize import weights
from hop.kernels.cpu import native
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, Microscaling, MinMax, TwoLevel
from tests import levels

QUANTIZERS = {
    "int4": presets.INT4_32,
    "int4_128": presets.INT4_128,
    "uint4_affine": presets.UINT4_32_AFFINE,
    "nvfp4": presets.NVFP4,
    "nvfp4_row": presets.NVFP4_ROW,
    "mxfp4": presets.MXFP4,
    "int3": Quantizer(formats.INT3, (1, 24)),
    "int6": Quantizer(formats.INT6, (1, 40)),
    "ternary": Quantizer(formats.TERNARY, (1, 16)),
    "int4_microscaling": Quantizer(formats.INT4, (1, 16), Microscaling()),
    "int4_two_levels": Quantizer(formats.INT4, (1, 16), TwoLevel()),
    "int2_affine": Quantizer(formats.UINT2, (1, 8), MinMax()),
    "single_elements": Quantizer(formats.INT4, (1, 1)),
    "largest_block": Quantizer(formats.INT4, (1, 1024)),
    "tiles": presets.NVFP4_16X16,
    "columns": Quantizer(formats.INT4, (16, 1)),
    "experts": presets.INT4_32.of_batch(2),
    "experts_nvfp4": presets.NVFP4.of_batch(2),
}
KEPT = {
    "int8": presets.INT8_ROW,
    "int8_groups": presets.INT8_32,
    "rows": Quantizer(formats.INT4, (1, -1)),
    "floor": Quantizer(formats.INT4, (1, 32), Amax(floor=1e-3)),
    "nf4": Quantizer(formats.NF4, (1, 64)),
    "mxfp8": presets.MXFP8,
    "too_large": Quantizer(formats.INT4, (1, 1025)),
    "flat": Quantizer(formats.INT4, (32,), flat=True),
    "ternary_mean": presets.TERNARY_ROW,
}


def inputs(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Numbers, heavy tails, and blocks that cannot be searched."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    odd = x.clone().reshape(-1)
    for i, v in enumerate((0.0, -0.0, math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-40, 1e-30, 2.0**-100)):
        odd[(i * 37) % odd.numel()] = v
    odd = odd.reshape(shape)
    odd[..., : shape[-1] // 2] *= torch.tensor([0.0, 1e-42, 1e-31, 1e30]).repeat(shape[-2])[: shape[-2], None]
    grid = (x * 4).round() / 4  # many ties
    return {"normal": x * 0.05, "tails": x**5, "odd": odd, "grid": grid, "positive": x.abs() + 0.5, "negative": -(x**2)}


def same(a: hop.QuantizedTensor, b: hop.QuantizedTensor) -> bool:
    pairs = zip(a.buffers().items(), b.buffers().items(), strict=True)
    return all(
        n == m and x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for (n, x), (m, y) in pairs
    )


def by_reference(q: Quantizer, x: Tensor) -> hop.QuantizedTensor:
    with native.use("off"):
        return hop.quantize_weight(q, x)


def errors(t: Tensor, x: Tensor, block: tuple[int, ...]) -> np.ndarray:
    """The squared error of each block, in float64; for blocks within rows."""
    off = np.square(hop.dequantize(t).double().numpy() - x.double().numpy()).reshape(-1, x.shape[-1])
    size = block[-1]
    off = np.pad(off, ((0, 0), (0, -off.shape[1] % size)))
    return off.reshape(len(off), -1, size).sum(-1)


@pytest.mark.skipif(native.library().functions is None, reason=str(native.library().missing))
@pytest.mark.parametrize("level", levels.HERE)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_native_search_has_the_bits_of_the_reference(name: str, level: str) -> None:
    q = QUANTIZERS[name]
    shape = (3, 8, 70) if len(q.block) == 3 else (12, 1500) if name == "largest_block" else (13, 200)
    for what, x in inputs(shape).items():
        for dtype in (torch.float32, torch.bfloat16):
            want = by_reference(q, x.to(dtype))
            with native.use(level):
                assert same(hop.quantize_weight(q, x.to(dtype)), want), (what, dtype)


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n not in ("tiles", "columns")])
def test_no_block_gets_worse_and_the_weight_gets_better(name: str) -> None:
    q = QUANTIZERS[name]
    shape = (3, 8, 64) if len(q.block) == 3 else (16, 1024)
    for what, x in inputs(shape).items():
        if what == "odd":
            continue
        rule, searched = (errors(f(q, x), x, q.block) for f in (hop.quantize, hop.quantize_weight))
        # elements are compared as integers of 12 bits at least
        assert (searched <= rule * (1 + 1e-3) + 1e-9 * rule.max()).all(), what
        if name != "single_elements" and what in ("normal", "tails"):
            assert searched.sum() < rule.sum() * 0.985, what


def test_the_scale_is_the_best_of_all_levels() -> None:
    """Against all levels in float64, each with the scale of least squares."""
    x = inputs((64, 96))["normal"]
    q = presets.INT4_32
    found = errors(hop.quantize_weight(q, x), x, q.block)
    cut = x.double().numpy().reshape(64, 3, 32)
    amax = np.abs(cut).max(-1, keepdims=True)
    best = np.full((64, 3), np.inf)
    for level in (7, 6.5, 7.5, 8, 8.5):
        n = np.clip(np.rint(cut * (level / amax)), -8, 7)
        s = (cut * n).sum(-1, keepdims=True) / (n * n).sum(-1, keepdims=True)
        best = np.minimum(best, np.square(cut - s * n).sum(-1))
    assert (found <= best * (1 + 1e-4)).all()  # less, where the fitted scale rounds elements better
    assert found.sum() > 0.97 * best.sum()


def test_scales_that_are_codes_are_the_best_of_their_neighbours() -> None:
    x = inputs((32, 128))["normal"]
    for q, steps in ((presets.NVFP4, (0, -1, 1, 4, 5)), (presets.MXFP4, (0, -1))):
        t = hop.quantize(q, x)
        codes = t.buffers()["scale"].view(torch.uint8).int()
        best = np.full(codes.shape, np.inf)
        for step in steps:
            moved = (codes + step).clamp(0, 126 if q is presets.NVFP4 else 254).to(torch.uint8)
            buffers = t.buffers() | {"scale": moved.view(t.buffers()["scale"].dtype)}
            s = q.scale.scale_of([buffers[n] for n in q.stored_by_rule()], q.format)
            plain = replace(q, scale=hop.scale_rules.Static())
            best = np.minimum(best, errors(hop.quantize(plain, x, scale=s), x, q.block))
        assert errors(hop.quantize_weight(q, x), x, q.block) == pytest.approx(best, rel=1e-4)


def test_a_zero_point_moves_with_the_scale() -> None:
    x = inputs((16, 320))["positive"] * torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    q = presets.UINT4_32_AFFINE
    rule, found = hop.quantize(q, x), hop.quantize_weight(q, x)
    assert found.buffers()["zero_point"].dtype == rule.buffers()["zero_point"].dtype
    assert errors(found, x, q.block).sum() < errors(rule, x, q.block).sum()


@pytest.mark.parametrize("name", KEPT)
def test_other_quantizers_keep_their_rule(name: str) -> None:
    x = inputs((8, 1100))["tails"]
    assert same(hop.quantize_weight(KEPT[name], x), hop.quantize(KEPT[name], x))  # type: ignore[arg-type]


def test_blocks_that_cannot_be_searched_keep_their_scale() -> None:
    q = presets.INT4_32
    x = torch.cat([torch.full((4, 32), v) for v in (0.0, math.nan, math.inf, 1e-38)], 1)
    found, rule = hop.quantize_weight(q, x), hop.quantize(q, x)
    assert same(found, rule)  # type: ignore[arg-type]


def test_a_large_weight_is_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs((13, 200))["normal"]
    for q in (presets.NVFP4_ROW, presets.UINT4_32_AFFINE, presets.NVFP4, presets.NVFP4_16X16):
        whole = hop.quantize_weight(q, x)
        monkeypatch.setattr(weights, "_AT_ONCE", 600)
        assert same(hop.quantize_weight(q, x), whole)
        monkeypatch.undo()


def test_empty_and_meta_weights() -> None:
    for x in (torch.randn(0, 32), torch.randn(4, 0), torch.randn(())):
        assert hop.quantize_weight(presets.INT4_32, x).shape == x.shape
    assert hop.quantize_weight(presets.NVFP4, torch.randn(4, 64, device="meta")).device.type == "meta"
    with pytest.raises(TypeError, match="quantizer must be a Quantizer"):
        hop.quantize_weight("int4", torch.randn(4, 32))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantized_values_keep_their_scales_and_codes(name: str) -> None:
    q = QUANTIZERS[name]
    rule = hop.quantize(q, inputs((3, 32, 64) if len(q.block) == 3 else (32, 1024))["normal"])
    again = hop.quantize(q, hop.dequantize(rule))
    assert same(hop.quantize_weight(q, hop.dequantize(rule)), again)  # type: ignore[arg-type]
