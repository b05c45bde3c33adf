"""hop.quantize_weight: the native search against the reference, bit for bit, and the error against exact sums."""

import math
from collections.abc import Sequence
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
    "mxfp4_floor": Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="floor")),
    "mxfp4_ceil": Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="ceil")),
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


SIGNED = [name for name, q in QUANTIZERS.items() if isinstance(q.scale, Amax) and -q.format.min > q.format.max]


def same(a: hop.QuantizedTensor, b: hop.QuantizedTensor) -> bool:
    pairs = zip(a.buffers().items(), b.buffers().items(), strict=True)
    return all(
        n == m and x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for (n, x), (m, y) in pairs
    )


def by_reference(q: Quantizer, x: Tensor, signed: bool = False) -> hop.QuantizedTensor:
    with native.use("off"):
        return hop.quantize_weight(q, x, signed=signed)


def errors(t: Tensor, x: Tensor, block: tuple[int, ...]) -> np.ndarray:
    """The squared error of each block, in float64; for blocks within rows."""
    off = np.square(hop.dequantize(t).double().numpy() - x.double().numpy()).reshape(-1, x.shape[-1])
    size = block[-1]
    off = np.pad(off, ((0, 0), (0, -off.shape[1] % size)))
    return off.reshape(len(off), -1, size).sum(-1)


@pytest.mark.skipif(native.library().functions is None, reason=str(native.library().missing))
@pytest.mark.parametrize("level", levels.HERE)
@pytest.mark.parametrize(
    ("name", "signed"), [*((name, False) for name in QUANTIZERS), *((name, True) for name in SIGNED)]
)
@pytest.mark.quick(6)
def test_native_search_has_the_bits_of_the_reference(name: str, signed: bool, level: str) -> None:
    q = QUANTIZERS[name]
    shape = (3, 8, 70) if len(q.block) == 3 else (12, 1500) if name == "largest_block" else (13, 200)
    for what, x in inputs(shape).items():
        for dtype in (torch.float32, torch.bfloat16):
            want = by_reference(q, x.to(dtype), signed)
            with native.use(level):
                assert same(hop.quantize_weight(q, x.to(dtype), signed=signed), want), (what, dtype)


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n not in ("tiles", "columns")])
def test_no_block_gets_worse_and_the_weight_gets_better(name: str) -> None:
    q = QUANTIZERS[name]
    shape = (3, 8, 64) if len(q.block) == 3 else (16, 1024)
    for what, x in inputs(shape).items():
        if what == "odd":
            continue
        rule, searched = (errors(f(q, x), x, q.block) for f in (hop.quantize, hop.quantize_weight))
        # elements are compared as integers of 12 bits at least
        slack = 1.5 if isinstance(q.scale, Microscaling) and not q.scale.clips() else 1.0
        assert (searched <= rule * (slack + 1e-3) + 1e-9 * rule.max()).all(), what
        if name != "single_elements" and what in ("normal", "tails") and not isinstance(q.scale, Microscaling):
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


def least_errors(x: Tensor, q: Quantizer, levels: Sequence[float]) -> np.ndarray:
    """The least squared error of each block, in float64: the largest magnitude at each level, the scale fitted."""
    cut = x.double().numpy().reshape(len(x), -1, q.block[-1])
    amax = np.abs(cut).max(-1, keepdims=True)
    best = np.full(cut.shape[:2], np.inf)
    for level in levels:
        n = np.clip(np.rint(cut * (level / amax)), q.format.min, q.format.max)
        s = (cut * n).sum(-1, keepdims=True) / (n * n).sum(-1, keepdims=True)
        best = np.minimum(best, np.square(cut - s * n).sum(-1))
    return best


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.quick(4)
def test_signed_scales_are_near_the_best_of_many(name: str) -> None:
    """Against 800 levels of both signs, and better than positive scales, except for int6 with heavy tails."""
    q = QUANTIZERS[name]
    cols = 2 * q.block[-1]
    for x in (t if t.dim() == 2 else t.flatten(0, 1) for t in (inputs((64, cols))[n] for n in ("normal", "tails"))):
        q = replace(q, block=(1, q.block[-1]))
        t = hop.quantize_weight(q, x, signed=True)
        rule, positive = (errors(f(q, x), x, q.block) for f in (hop.quantize, hop.quantize_weight))
        found = errors(t, x, q.block)
        assert (found <= rule * (1 + 1e-3) + 1e-9 * rule.max()).all()
        if q.block[-1] == 1:
            continue
        low = -q.format.min
        own = (q.format.max, low, -low, low + 0.5, -low - 0.5)
        of_own = least_errors(x, q, own)
        assert (found <= of_own * 1.02).all()  # elements are compared in units
        assert found.sum() <= of_own.sum() * (1 + 1e-3)
        many = np.linspace(0.6 * low, 1.4 * low, 400)
        # Large blocks gain from clipping their largest elements, and one more code counts for less there.
        margin, gain = (1.07, 0.95) if q.block[-1] <= 128 else (1.25, 0.99)
        assert found.sum() <= margin * least_errors(x, q, [*many, *-many]).sum()
        assert found.sum() < positive.sum() * (1.005 if name == "int6" else gain)
        scale = t.buffers()["scale"]
        assert 0.2 < (scale < 0).float().mean() < 0.8
        largest = x.reshape(len(x), -1, q.block[-1]).abs().argmax(-1, keepdim=True)
        at = x.reshape(len(x), -1, q.block[-1]).gather(-1, largest).squeeze(-1)
        assert (at[scale < 0] > 0).all() or q.block[-1] > 128


def test_signed_scales_only_where_a_negative_code_is_left() -> None:
    x = inputs((8, 256))["tails"]
    for name in set(QUANTIZERS) - set(SIGNED) - {"experts_nvfp4", "tiles"}:
        assert same(hop.quantize_weight(QUANTIZERS[name], x, signed=True), hop.quantize_weight(QUANTIZERS[name], x))
    assert bool((hop.quantize_weight(presets.INT4_32, x).buffers()["scale"] > 0).all())
    with pytest.raises(ValueError, match="quantize_weight: signed must be True or False, got 1"):
        hop.quantize_weight(presets.INT4_32, x, signed=1)  # type: ignore[arg-type]


def test_negative_scales_stay_when_quantized_again() -> None:
    t = hop.quantize_weight(presets.INT4_32, inputs((32, 256))["normal"], signed=True)
    assert same(hop.quantize_weight(presets.INT4_32, hop.dequantize(t), signed=True), t)


def test_scales_that_are_codes_are_the_best_of_their_neighbours() -> None:
    x = inputs((32, 128))["normal"]
    clipping = Quantizer(formats.E2M1, (1, 32), Microscaling(rounding="floor"))
    for q, steps, slack in (
        (presets.NVFP4, (-1, 1, 4, 5), 1.0),
        (presets.MXFP4, (-1,), 1.5),
        (clipping, (1,), 1 / 1.5),
    ):
        t = hop.quantize(q, x)
        codes = t.buffers()["scale"].view(torch.uint8).int()
        others = []
        for step in steps:
            moved = (codes + step).clamp(0, 126 if q is presets.NVFP4 else 254).to(torch.uint8)
            buffers = t.buffers() | {"scale": moved.view(t.buffers()["scale"].dtype)}
            s = q.scale.scale_of([buffers[n] for n in q.stored_by_rule()], q.format)
            plain = replace(q, scale=hop.scale_rules.Static())
            others.append(errors(hop.quantize(plain, x, scale=s), x, q.block))
        rule, other = errors(t, x, q.block), np.min(others, 0)
        best = np.where(other < slack * rule, other, rule)
        assert 0.02 < (best == other).mean() < 0.98
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
