"""hop.calibration against the definition of each rule, block by block in numpy."""

import itertools
import math
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import calibration, presets
from hop.numerics.formats import E4M3, E5M2, Integer
from hop.numerics.presets import PRESETS
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import MinMax, Static, TwoLevel
from tests.support import numerics

ALL = list(PRESETS.items())
f32 = np.float32


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Heavy tails, a row of zeros, a row of one sign, and a NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-3, 4, shape, generator=g).float())
    if len(shape) > 1 and shape[0] > 3:
        x[1], x[2], x[3, ..., 0] = 0.0, x[2].abs() + 1, math.nan
    return x


def batches(q: Quantizer) -> list[Tensor]:
    """Of one number of blocks, and where the blocks allow of several sizes."""
    block = served(q)
    if len(block) == 4:
        return [draw((5, 3, 3, 3), 0), draw((5, 2, 3, 5), 1)]
    rows, columns = (-1, -1) if len(block) == 1 else block
    if q.flat:
        return [draw((6, 100), seed) for seed in range(3)]
    shapes = [(6 + (rows == -1) * i, 70 + (columns == -1) * i) for i in range(3)]
    return [draw(shape, seed) for seed, shape in enumerate(shapes)]


def served(q: Quantizer) -> tuple[int, ...]:
    return q.scale.outer if isinstance(q.scale, TwoLevel) else q.block


def expected(q: Quantizer, xs: list[Tensor], ends: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """What the rule makes of ends(x), x all numbers of a block of all batches."""
    cut = [x.numpy().reshape(-1) if q.flat else x.numpy() for x in xs]
    shape = numerics.grid(cut[0].shape, served(q))
    scales, zeros = (
        np.zeros(shape, np.uint8 if q.scale.stored(q.format, q.block)["scale"][0] == torch.uint8 else f32),
        None,
    )
    if q.scale.has_zero_point():
        assert isinstance(q.format, Integer)
        zeros = np.zeros(shape, numerics.INTEGERS[q.format.name][4])
    for (index, _), *places in zip(*(list(numerics.blocks(x.shape, served(q))) for x in [cut[0], *cut]), strict=True):
        block = np.concatenate([x[where].reshape(-1) for x, (_, where) in zip(cut, places, strict=True)])
        found = rule(q, ends(block[~np.isnan(block)]).astype(f32))
        scales[index] = found.scale
        if zeros is not None:
            zeros[index] = found.zero_point
    return {"scale": scales} | ({} if zeros is None else {"zero_point": zeros})


def rule(q: Quantizer, x: np.ndarray) -> numerics.Scaled:
    match type(q.scale).__name__:
        case "TwoLevel":
            return numerics.Scaled(numerics.amax(x), x)
        case "Static" if q.scale.has_zero_point():
            return numerics.by_range(x, q.format.name)
        case "Static" | "AbsMean":
            return numerics.by_amax(x, q.format.name, 0.0)
    return numerics.scaled(q, x, None, None, float(numerics.LARGEST))


def assert_equal(got: dict[str, Tensor], want: dict[str, np.ndarray]) -> None:
    assert list(got) == list(want)
    for name, tensor in got.items():
        assert tensor.numpy().dtype == want[name].dtype
        np.testing.assert_array_equal(tensor.numpy(), want[name], name)


def percentile(values: np.ndarray, percent: float) -> Any:
    """The k-th of n numbers in order, k = n · percent / 100 to the nearest, at least 1."""
    return np.sort(values)[max(1, round(len(values) * percent / 100)) - 1] if len(values) else 0.0


def quantized(q: Quantizer, x: Tensor, found: dict[str, Tensor]) -> np.ndarray:
    """What numpy makes of x with this scale."""
    given = {name: t.numpy() for name, t in found.items()}
    noise = np.full(x.shape, 128, np.uint8) if q.stochastic else None
    buffers = numerics.quantize(q, x.numpy(), noise, given["scale"], given.get("zero_point"))
    return numerics.dequantize(q, buffers, x.shape)


def errors(q: Quantizer, xs: list[Tensor], found: dict[str, Tensor]) -> np.ndarray:
    """The squared error of each block of all batches, in float64."""
    total: Any = 0.0
    for x in xs:
        error = np.nan_to_num(quantized(q, x, found).astype(np.float64) - x.numpy()) ** 2
        error = error.reshape(-1) if q.flat else error
        of_blocks = np.zeros(numerics.grid(error.shape, served(q)))
        for index, where in numerics.blocks(error.shape, served(q)):
            of_blocks[index] = error[where].sum()
        total = total + of_blocks
    return total


class TestRules(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(2)
    def test_amax(self, _name, q):
        xs = batches(q)
        assert_equal(calibration.amax(q, *xs), expected(q, xs, lambda x: x))
        assert_equal(calibration.amax(q, xs[0]), expected(q, xs[:1], lambda x: x))

    @parameterized.expand([(name, q) for name, q in ALL if not isinstance(q.scale, Static) and "TERNARY" not in name])
    def test_amax_is_what_the_rule_finds(self, _name, q):
        x = batches(q)[0]
        if q.format not in (E4M3, E5M2) and not isinstance(q.scale, TwoLevel):
            x = x.nan_to_num(0.0)  # the scale of a block with a NaN is NaN; calibration leaves NaN out
        noise = {"generator": torch.Generator().manual_seed(0)} if q.stochastic else {}
        own, found = hop.quantize(q, x, **noise), calibration.amax(q, x)
        for name, tensor in found.items():
            stored = "global_amax" if isinstance(q.scale, TwoLevel) else name
            assert torch.equal(own.buffers()[stored], tensor)

    @parameterized.expand([(f"{name}_{p}", q, p) for name, q in ALL for p in (99.9, 90.0, 50.0, 100)])
    @pytest.mark.quick(4)
    def test_percentile(self, _name, q, percent):
        def ends(x: np.ndarray) -> np.ndarray:
            if q.scale.has_zero_point():
                return np.array([-percentile(-x, percent), percentile(x, percent)])
            return np.array([percentile(np.abs(x), percent)])

        xs = batches(q)
        assert_equal(calibration.percentile(q, *xs, percent=percent), expected(q, xs, ends))

    @parameterized.expand(ALL)
    @pytest.mark.quick(8)
    def test_mse(self, _name, q):
        """Of the scales tried, the one with the least error, block by block, as far as float32 can tell."""
        xs = batches(q)
        got = calibration.mse(q, *xs, steps=9, least=0.4)
        tried = []
        for i in range(9):
            ratio = f32(1 - 0.6 * i / 8)
            tried.append(expected(q, xs, lambda x, ratio=ratio: np.array([x.min(initial=0), x.max(initial=0)]) * ratio))
        error = errors(q, xs, got)
        of_tried = [errors(q, xs, {name: torch.from_numpy(t) for name, t in found.items()}) for found in tried]
        np.testing.assert_array_less(error, np.min(of_tried, 0) * (1 + 1e-5) + 1e-30)
        for index in np.ndindex(*error.shape):
            one = [tuple(t[index] for t in found.values()) for found in tried]
            assert tuple(t[index].item() for t in got.values()) in one

    @parameterized.expand(ALL)
    @pytest.mark.quick(18)
    def test_mse_is_no_worse_than_amax(self, _name, q):
        xs = batches(q)
        largest, best = (errors(q, xs, rule(q, *xs)) for rule in (calibration.amax, calibration.mse))
        assert (best <= largest * (1 + 1e-5)).all()
        if q.format.bits <= 4 and q.format.name != "linear4_unsigned":
            assert best.sum() < largest.sum()

    @parameterized.expand(ALL)
    @pytest.mark.quick(3)
    def test_fits_quantize(self, _name, q):
        """What is found is a scale that quantize takes, of the buffer's shape."""
        xs = batches(q)
        noise = {"generator": torch.Generator().manual_seed(0)} if q.stochastic else {}
        for found in (calibration.amax(q, *xs), calibration.percentile(q, *xs), calibration.mse(q, *xs, steps=3)):
            for x in xs:
                t = hop.quantize(q, x, **found, **noise)
                outer = "global_amax" if isinstance(q.scale, TwoLevel) else "scale"
                assert torch.equal(t.buffers()[outer], found["scale"])


class TestEdges(unittest.TestCase):
    def test_by_hand(self):
        x = torch.tensor([[1.0, -2.0, 3.0, -127.0], [5.0, 10.0, 20.0, 254.0]])
        assert calibration.amax(presets.INT8_ROW, x)["scale"].tolist() == [[1.0], [2.0]]
        assert calibration.amax(presets.INT8_TENSOR_STATIC, x, -2 * x)["scale"].tolist() == [[4.0]]
        found = calibration.amax(presets.INT8_TENSOR_STATIC_AFFINE, x)
        assert found["scale"].item() == f32(381) / f32(255) and found["zero_point"].item() == -43
        # 75 % of 1, 2, 3, 127 and of 5, 10, 20, 254: the third.
        found = calibration.percentile(presets.INT8_ROW, x, percent=75)
        assert found["scale"].tolist() == [[f32(3) / f32(127)], [f32(20) / f32(127)]]
        # Of -127, -2, 1, 3 the third from either end: 1 above, -2 below.
        found = calibration.percentile(presets.UINT8_ROW_AFFINE, x[:1], percent=75)
        assert found["scale"].item() == f32(3) / f32(255) and found["zero_point"].item() == 170

    def test_cut_off_block(self):
        """The percentile of a block is that of its own elements, however few."""
        x = torch.cat([torch.ones(1, 32), torch.full((1, 3), 14.0)], 1)
        assert calibration.percentile(presets.INT4_32, x, percent=50)["scale"].tolist() == [[f32(1) / f32(7), 2.0]]

    @parameterized.expand([(d,) for d in (torch.bfloat16, torch.float16, torch.float64)])
    @pytest.mark.quick(3)
    def test_dtypes(self, dtype):
        """As in float32, for numbers that it has."""
        x = draw((6, 70), 0).nan_to_num(0.0).to(torch.bfloat16)
        for q, rule in itertools.product(
            (presets.INT8_ROW, presets.UINT4_32_AFFINE, presets.MXFP8, presets.NVFP4),
            (calibration.amax, calibration.percentile, calibration.mse),
        ):
            for name, tensor in rule(q, x.to(dtype)).items():
                assert torch.equal(tensor, rule(q, x.float())[name])

    @parameterized.expand([(shape,) for shape in ((), (5,), (0,), (0, 32), (3, 0), (2, 3, 40))])
    @pytest.mark.quick(2)
    def test_shapes(self, shape):
        x = torch.randn(shape)
        for q in (presets.INT8_TENSOR, presets.INT8_ROW, presets.UINT4_32_AFFINE, presets.NVFP4, presets.STATE8):
            for rule in (calibration.amax, calibration.percentile, calibration.mse):
                found = rule(q, x)
                described = q.buffers(shape)
                for name, tensor in found.items():
                    stored = "global_amax" if isinstance(q.scale, TwoLevel) else name
                    assert (tuple(tensor.shape), tensor.dtype) == described[stored]
                    assert not tensor.float().isnan().any()

    def test_nan_and_infinity(self):
        """NaN is ignored; an infinity counts as the largest float32."""
        x = torch.tensor([[math.nan, 1.0, math.nan, -127.0], [math.nan] * 4, [math.inf, 1.0, -1.0, 0.0]])
        largest = numerics.LARGEST / f32(127)
        assert calibration.amax(presets.INT8_ROW, x)["scale"].tolist() == [[1.0], [1.0], [largest]]
        found = calibration.percentile(presets.INT8_ROW, x, percent=100)
        assert found["scale"].tolist() == [[1.0], [1.0], [largest]]
        found = calibration.percentile(presets.INT8_ROW, x, percent=50)  # of two numbers the first, of four the second
        assert found["scale"].tolist() == [[f32(1) / f32(127)], [1.0], [f32(1) / f32(127)]]

    def test_strided(self):
        x = draw((70, 12), 0).t()
        for rule in (calibration.amax, calibration.percentile, calibration.mse):
            for q in (presets.INT8_ROW, presets.INT8_COLUMN, presets.INT4_32):
                assert torch.equal(rule(q, x)["scale"], rule(q, x.contiguous())["scale"])

    @parameterized.expand([("amax",), ("percentile",), ("mse",)])
    def test_errors(self, name):
        rule, q, x = getattr(calibration, name), presets.INT8_ROW, torch.ones(2, 3)
        for error, message, args, kwargs in [
            (TypeError, "q must be a Quantizer, got 'int8'", ("int8", x), {}),
            (ValueError, "batches must contain at least one tensor", (q,), {}),
            (TypeError, r"batches must be floating-point tensors, got \[1.0\]", (q, [1.0]), {}),
            (TypeError, "batches must be floating-point tensors, got a tensor of torch.int64", (q, x, x.long()), {}),
            (
                ValueError,
                r"batches must split into the same number of blocks .*\(2, 3\), \(3, 3\)",
                (q, x, torch.ones(3, 3)),
                {},
            ),
        ]:
            with self.assertRaisesRegex(error, f"^{name}: {message}"):
                rule(*args, **kwargs)

    def test_errors_of_one(self):
        q, x = presets.INT8_ROW, torch.ones(2, 3)
        for percent in (0, -1, 0.999, 100.5, math.nan):
            with self.assertRaisesRegex(ValueError, "^percentile: percent must be from 1 to 100, got"):
                calibration.percentile(q, x, percent=percent)
        with self.assertRaisesRegex(ValueError, "got 0.999; give percent=99.9"):
            calibration.percentile(q, x, percent=0.999)
        for wrong in ({"steps": 1}, {"least": 0.0}, {"least": 1.0}):
            with self.assertRaisesRegex(
                ValueError, "^mse: (steps must be an integer of 2 or more|least must be between 0 and 1), got"
            ):
                calibration.mse(q, x, **wrong)

    def test_affine_range_holds_zero(self):
        found = calibration.amax(Quantizer(presets.INT8_TENSOR.format, scale=MinMax()), torch.tensor([[10.0, 255.0]]))
        assert found["scale"].item() == 1.0 and found["zero_point"].item() == -128
