"""Sums of 64 bits as codes: conventions against Python's integers, which have any size."""

import math
import unittest
from fractions import Fraction
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from parameterized import parameterized

import hop
from hop.numerics.formats import INT8, INT16
from hop.numerics.integer.functions import TfliteSoftmax
from hop.numerics.requantization import DoubleMultiplier, FixedPoint, WideFixedPoint

ROUNDINGS = ("tflite", "away", "even")
ONE = torch.ones(())


def mantissa_of(m: float) -> tuple[int, int]:
    """TFLite's QuantizeMultiplier."""
    fraction, shift = math.frexp(m)
    mantissa = math.floor(Fraction(fraction) * 2**31 + Fraction(1, 2))
    return (mantissa // 2, shift + 1) if mantissa == 2**31 else (mantissa, shift)


def reduced(n: int, m: float) -> int:
    """TFLite's MultiplyByQuantizedMultiplier of int64, on int16 mantissas."""
    mantissa, shift = mantissa_of(m)
    narrow = (mantissa + (1 << 15)) >> 16 if mantissa < 0x7FFF0000 else 0x7FFF
    right = 15 - shift
    return (n * narrow + (1 << (right - 1))) >> right


def nearest(x: Fraction, ties: str) -> int:
    if ties == "even":
        return round(x)
    up = math.floor(x + Fraction(1, 2))
    return up if ties == "tflite" or x >= 0 else math.ceil(x - Fraction(1, 2))


def steps(rule: Any, n: list[int], scale: float) -> list[int]:
    return rule.steps(torch.tensor(n), ONE, ONE, torch.tensor(scale)).tolist()


SCALES = st.floats(2.0**4, 2.0**28, width=32)
SUMS = st.lists(st.integers(-(2**46), 2**46), min_size=1, max_size=40)


class TestConventions(unittest.TestCase):
    @hypothesis.given(SUMS, SCALES)
    def test_wide(self, n: list[int], scale: float) -> None:
        assert steps(WideFixedPoint(), n, scale) == [reduced(x, 1 / scale) for x in n]

    @hypothesis.given(SUMS, SCALES, st.sampled_from(ROUNDINGS))
    def test_thirty_one_bits(self, n: list[int], scale: float, rounding: str) -> None:
        """The exact product with a mantissa of 31 bits takes 78."""
        mantissa, shift = mantissa_of(1 / scale)
        want = [nearest(Fraction(x * mantissa, 2 ** (31 - shift)), rounding) for x in n]
        assert steps(FixedPoint(rounding=rounding), n, scale) == want

    @hypothesis.given(SUMS, SCALES)
    def test_double(self, n: list[int], scale: float) -> None:
        products = [Fraction(float(x) * (1 / scale)) for x in n]
        bounded = [min(max(p, Fraction(-(2**30))), Fraction(2**30)) for p in products]
        assert steps(DoubleMultiplier(), n, scale) == [nearest(p, "away") for p in bounded]
        halves = [s * (2 * k + 1) for s in (1, -1) for k in (0, 1, 2, 2**20)]
        assert steps(DoubleMultiplier(), halves, 2.0) == [nearest(Fraction(x, 2), "away") for x in halves]

    @parameterized.expand(ROUNDINGS)
    def test_ties(self, rounding: str) -> None:
        n = [s * (2 * k + 1) * 2**19 for s in (1, -1) for k in (0, 1, 2, 2**20, 2**20 + 1)]
        want = [nearest(Fraction(x, 2**20), rounding) for x in n]
        assert steps(FixedPoint(rounding=rounding), n, 2.0**20) == want
        beside = [x + d for x in n for d in (-1, 1)]
        assert steps(FixedPoint(rounding=rounding), beside, 2.0**20) == [round(Fraction(x, 2**20)) for x in beside]

    def test_largest_mantissa(self) -> None:
        """A multiplier just below a power of two has 2^15 - 1."""
        below = float(torch.tensor(2.0**10).nextafter(torch.tensor(2.0**11)))
        assert steps(WideFixedPoint(), [2**30], below) == [reduced(2**30, 1 / below)] == [(2**30 * 0x7FFF) >> 25]

    def test_multipliers_above_one_saturate(self) -> None:
        n = [1, 100, 2**40, -(2**40)]
        codes = FixedPoint(rounding="tflite").codes(torch.tensor(n), ONE, ONE, torch.tensor(2.0**-3), 0, INT16)
        assert codes.tolist() == [8, 800, 2**15 - 1, -(2**15)]


class TestScaled(unittest.TestCase):
    @parameterized.expand(["linear", "conv2d", "bmm"])
    @pytest.mark.quick(3)
    def test_sums(self, name: str) -> None:
        """Each operator's sums, beyond 32 bits, on all routes."""
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "linear": ((3, 70000), (4, 70000)),
            "conv2d": ((1, 8000, 3, 3), (2, 8000, 3, 3)),
            "bmm": ((2, 2, 40000), (2, 40000, 3)),
        }[name]
        op = getattr(torch.ops.aten, name).default
        of_a, of_b = (hop.Quantizer(f, scale=hop.scale_rules.Static()) for f in (INT16, INT8))
        a = torch.randint(0, 2**15, shapes[0], generator=generator).to(torch.float32)
        b = torch.randint(64, 128, shapes[1], generator=generator).to(torch.float32)
        out = hop.Quantizer(INT16, scale=hop.scale_rules.Static(requantize=FixedPoint(rounding="even")))

        def codes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            x, y = hop.quantize(of_a, a, scale=ONE), hop.quantize(of_b, b, scale=ONE)
            return hop.scaled(op, out, x, y, output_scale=torch.tensor(2.0**23)).codes  # type: ignore[attr-defined]

        exact = op(a.double(), b.double())
        assert exact.abs().max() > 2**34
        want = (exact * 2.0**-23).round().clamp(max=2**15 - 1)

        class Module(torch.nn.Module):
            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return codes(a, b)

        program = torch.export.export(Module(), (a, b))
        for found in (codes(a, b), program.module()(a, b), hop.export.lower(program).module()(a, b)):
            assert found.dtype == torch.int16 and torch.equal(found.double(), want)

    def test_refused(self) -> None:
        with pytest.raises(ValueError, match="int16 does not support zero points"):
            hop.Quantizer(INT16, scale=hop.scale_rules.MinMax())
        x = hop.quantize(hop.Quantizer(INT8, scale=hop.scale_rules.Static()), torch.ones(2, 4), scale=ONE)
        shares = hop.Quantizer(INT16, scale=hop.scale_rules.Static(requantize=TfliteSoftmax()))
        with pytest.raises(ValueError, match="TfliteSoftmax: format must have a zero point of -32768"):
            hop.scaled(torch.ops.aten.softmax.int, shares, x, -1, output_scale=torch.tensor(2.0**-15))
        bias = torch.ones(2, dtype=torch.int64)
        with pytest.raises(TypeError, match="or int32 in units"):
            hop.scaled(torch.ops.aten.linear.default, torch.float32, x, x, bias)
