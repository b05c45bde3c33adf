"""hop.calibration's rules that look at more than ranges, against numpy in float64: moving averages, and entropy."""

import functools
import math
import unittest
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from tests.numerics.test_calibration import assert_equal, batches, rule, served
from tests.support import numerics

AFFINE = presets.INT8_TENSOR_STATIC_AFFINE
SEVERAL = {
    name: presets.PRESETS[name]
    for name in (
        "INT8_TENSOR",
        "INT8_ROW",
        "INT8_TENSOR_STATIC_AFFINE",
        "UINT8_ROW_AFFINE",
        "FP8_ROW",
        "INT8_TENSOR_STATIC",
    )
}


def blocks_of(q: Quantizer, xs: list[Tensor]) -> Any:
    """The numbers of each block, batch by batch, without NaN."""
    cut = [x.numpy().reshape(-1) if q.flat else x.numpy() for x in xs]
    for (index, _), *places in zip(*(list(numerics.blocks(x.shape, served(q))) for x in [cut[0], *cut]), strict=True):
        found = [x[where].reshape(-1) for x, (_, where) in zip(cut, places, strict=True)]
        yield index, [x[~np.isnan(x)] for x in found]


def from_ends(q: Quantizer, shape: Any, ends: dict[Any, np.ndarray]) -> dict[str, np.ndarray]:
    """What q's rule makes of the ends of each block."""
    dtype = np.uint8 if q.scale.stored(q.format, q.block)["scale"][0] == torch.uint8 else np.float32
    scales = np.zeros(numerics.grid(shape, served(q)), dtype)
    zeros = None
    if q.scale.has_zero_point():
        zeros = np.zeros(scales.shape, numerics.INTEGERS[q.format.name][4])
    for index, own in ends.items():
        found = rule(q, own.astype(np.float32))
        scales[index] = found.scale
        if zeros is not None:
            zeros[index] = found.zero_point
    return {"scale": scales} | ({} if zeros is None else {"zero_point": zeros})


class TestMovingAverage(unittest.TestCase):
    @parameterized.expand([(f"{name}_{m}", q, m) for name, q in presets.PRESETS.items() for m in (0.1, 0.7, 1)])
    @pytest.mark.quick(2)
    def test_is_its_formula(self, _name, q, momentum):
        xs = batches(q)
        ends = {}
        for index, parts in blocks_of(q, xs):
            own: Any = None
            for part in parts:
                new = np.array([part.min(initial=0), part.max(initial=0)]).astype(np.float32)
                own = new if own is None else own + np.float32(momentum) * (new - own)
            ends[index] = own
        wanted = from_ends(q, xs[0].reshape(-1).shape if q.flat else xs[0].shape, ends)
        got = calibration.moving_average(q, *xs, momentum=momentum)
        for name, tensor in got.items():
            atol = 1 if name == "zero_point" or tensor.dtype == torch.uint8 else 0  # where a float is near a half
            np.testing.assert_allclose(tensor.double().numpy(), wanted[name].astype(np.float64), rtol=3e-6, atol=atol)

    def test_of_one_batch_is_amax(self):
        for q in (AFFINE, presets.INT8_ROW):
            x = batches(q)[:1]
            assert_equal(calibration.moving_average(q, *x), {n: t.numpy() for n, t in calibration.amax(q, *x).items()})

    def test_of_a_model(self):
        """Of the ranges of calls, through functools.partial too."""
        data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(4)]
        for momentum in (0.1, 0.5):
            model: Any = hop.nn.convert(nn.Sequential(nn.Linear(8, 4)), "int8_static")
            method = calibration.moving_average
            hop.nn.calibrate(model, data, functools.partial(method, momentum=momentum) if momentum != 0.1 else method)
            wanted = calibration.moving_average(AFFINE, *data, momentum=momentum)
            assert torch.equal(model[0].scales["input"].scale, wanted["scale"].view(1))
            assert torch.equal(model[0].scales["input"].zero_point, wanted["zero_point"].view(1).float())

    def test_errors(self):
        for momentum in (0, -1, 1.5, math.nan, True, "a"):
            with pytest.raises(ValueError, match="momentum must be above 0"):
                calibration.moving_average(AFFINE, torch.ones(3), momentum=momentum)


def divergence(q: Quantizer, numbers: np.ndarray, low: float, high: float, ratio: float, bins: int) -> float:
    """Σ p log(p / p̂) by loops, of the histogram of a block's numbers."""
    width = max((high - low) / bins, 2.0**-126)
    counts = np.zeros(bins)
    for x in numbers:
        counts[min(bins - 1, max(0, math.floor((x - low) / width)))] += 1
    centres = (low + (np.arange(bins) + 0.5) * width).astype(np.float32)
    own = Quantizer(q.format, (1, -1), q.scale)
    found = calibration._from_range(own, torch.tensor([[low * ratio]]), torch.tensor([[high * ratio]]))
    got = own.fake_quantize(torch.from_numpy(centres)[None], found["scale"], found.get("zero_point"))[0].numpy()
    if not q.scale.has_zero_point():
        high = max(high, -low)
        low = high * q.format.min / q.format.max
    inside = [i for i in range(bins) if np.float32(low * ratio) <= centres[i] <= np.float32(high * ratio)]
    if not inside:
        return math.inf
    p, spread = np.zeros(bins), np.zeros(bins)
    for i in range(bins):
        p[min(max(i, inside[0]), inside[-1])] += counts[i]
    for value in set(got[inside].tolist()):
        own_bins = [i for i in inside if got[i] == value and counts[i] > 0]
        for i in own_bins:
            spread[i] = sum(counts[own_bins]) / len(own_bins)
    p, spread = p / p.sum(), spread / max(spread.sum(), 1e-300)
    return float(sum(a * math.log(a / (b if b > 0 else 1e-4)) for a, b in zip(p, spread, strict=True) if a > 0))


class TestEntropy(unittest.TestCase):
    @parameterized.expand([*SEVERAL.items()])
    @pytest.mark.quick(2)
    def test_loses_the_least(self, _name, q):
        xs = [
            torch.from_numpy(np.random.default_rng(seed).standard_t(3, (3, 400)).astype(np.float32)) for seed in (1, 2)
        ]
        got = calibration.entropy(q, *xs, bins=256, steps=7, least=0.1)
        for index, parts in blocks_of(q, xs):
            numbers = np.concatenate(parts)
            low, high = float(numbers.min()), float(numbers.max())
            ratios = [1 - 0.9 * i / 6 for i in range(7)]
            lost = [divergence(q, numbers, low, high, ratio, 256) for ratio in ratios]
            own = Quantizer(q.format, (1, -1), q.scale)
            scales = [
                float(
                    calibration._from_range(own, torch.tensor([[low * r]]), torch.tensor([[high * r]]))["scale"].float()
                )
                for r in ratios
            ]
            chosen = float(got["scale"].float()[index])
            place = min(range(7), key=lambda i: abs(scales[i] - chosen))
            assert abs(scales[place] / chosen - 1) < 1e-5
            assert lost[place] <= min(lost) + 1e-3 * abs(min(lost)) + 1e-9, (lost, place)

    def test_clips_outliers(self):
        """One number far away is given up, where amax keeps it."""
        x = torch.cat([torch.randn(20_000, generator=torch.Generator().manual_seed(0)), torch.tensor([60.0])])
        amax, entropy = (method(presets.INT8_TENSOR, x)["scale"] for method in (calibration.amax, calibration.entropy))
        assert float(entropy) < 0.3 * float(amax)

    def test_of_a_model(self):
        data = [torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        model: Any = hop.nn.convert(nn.Sequential(nn.Linear(8, 4)), "int8_static")
        hop.nn.calibrate(model, data, calibration.entropy)
        wanted = calibration.entropy(AFFINE, torch.cat(data).flatten())
        assert torch.allclose(model[0].scales["input"].scale, wanted["scale"].view(1))

    def test_numbers_that_are_none(self):
        x = torch.tensor([1.0, math.nan, 2.0, -3.0, 0.5] * 50)
        assert torch.equal(
            calibration.entropy(presets.INT8_TENSOR, x)["scale"],
            calibration.entropy(presets.INT8_TENSOR, x[x == x])["scale"],
        )
        for zeros in (torch.zeros(5), torch.full((5,), math.nan)):
            assert bool(calibration.entropy(AFFINE, zeros)["scale"].isfinite().all())

    def test_errors(self):
        for given, said in (
            ({"bins": 3}, "bins must be"),
            ({"steps": 1}, "steps must be"),
            ({"steps": 2.5}, "steps must be"),
            ({"least": 1}, "least must be"),
        ):
            with pytest.raises(ValueError, match=said):
                calibration.entropy(AFFINE, torch.ones(3), **given)
        with pytest.raises(ValueError, match="two levels"):
            calibration.entropy(presets.NVFP4, torch.ones(2, 16))
