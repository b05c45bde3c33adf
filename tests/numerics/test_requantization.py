"""Requantization: each convention against plain integers, bit for bit, by itself and through hop.scaled.

The oracles are written from what others published, on int64, and hop.requantization is not asked how:

    quantize_multiplier     QuantizeMultiplier of TFLite's quantization_util.cc, as built for a single rounding
    gemmlowp                SaturatingRoundingDoublingHighMul and RoundingDivideByPOT of gemmlowp's fixedpoint.h, in the
                            order of TFLite's MultiplyByQuantizedMultiplier, after gemmlowp's saturating ShiftLeft
    tflite                  MultiplyByQuantizedMultiplier of TFLite's common.cc with TFLITE_SINGLE_ROUNDING
    ruy                     the same as gemmlowp, its second rounding with ties up (RoundingRightShift of ruy's
                            apply_multiplier.cc), written as an addition of half and a shift
    away, even              the exact product, by sign and magnitude
    float_multiplier        xnn_qs8_requantize_fp32__scalar_lrintf of XNNPACK

They are themselves held against Python's fractions.
"""

import itertools
import math
import pickle
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from parameterized import parameterized
from torch import Tensor

import hop
from hop.compat.export import as_decomposition
from hop.numerics.formats import DYNAMIC8, E4M3, INT4, INT8, TERNARY, UINT4, UINT8, Float, Format, Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import (
    GEMMLOWP,
    TFLITE,
    Division,
    FixedPoint,
    FloatMultiplier,
    Reciprocal,
    Requantization,
    fixed_point,
)
from hop.numerics.scale_rules import Amax, Static
from tests.support import numerics
from tests.support.conventions import CONVENTIONS
from tests.support.errors import assert_refused

aten = torch.ops.aten
Array = np.ndarray
f32, f64, i64 = np.float32, np.float64, np.int64

INT32 = (-(2**31), 2**31 - 1)
UINT7 = Integer("uint7", 8, torch.uint8, 0, 127)
SINT7 = Integer("sint7", 8, torch.int8, 0, 127)
FORMATS = (INT8, UINT8, INT4, UINT4, TERNARY, UINT7, SINT7)
EXACT = [(name,) for name in CONVENTIONS]
FIXED = [(name,) for name in CONVENTIONS if name != "float_multiplier"]
ACTIVATIONS = ((None, None), (0.0, None), (0.0, 6.0), (-1.0, 1.0), (None, 0.5), (2.5, 2.5))


# ---- the oracles


def quantize_multiplier(real: Array) -> tuple[Array, Array]:
    """The mantissa and the shift of positive multipliers, float64."""
    fraction, exponent = np.frexp(real)  # real = fraction · 2^exponent, 0.5 <= fraction < 1
    scaled, shift = fraction * 2.0**31, exponent.astype(i64)
    whole = np.trunc(scaled)
    fixed = whole.astype(i64) + (scaled - whole >= 0.5)
    full = fixed == 2**31
    fixed, shift = np.where(full, fixed // 2, fixed), shift + full
    tiny = shift < -31
    fixed, shift = np.where(tiny, 0, fixed), np.where(tiny, 0, shift)
    large = shift > 30
    return np.where(large, 2**31 - 1, fixed), np.where(large, 30, shift)


def gemmlowp(n: Array, fixed: Array, shift: Array) -> Array:
    left = np.clip(n << np.maximum(shift, 0), *INT32)
    product = left * fixed
    nudged = product + np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = np.sign(nudged) * (np.abs(nudged) // (1 << 31))  # C's division, toward zero
    high = np.where((left == fixed) & (left == INT32[0]), INT32[1], high)
    exponent = np.maximum(-shift, 0)
    mask = (1 << exponent) - 1
    threshold = (mask >> 1) + (high < 0)
    return (high >> exponent) + ((high & mask) > threshold)


def ruy(n: Array, fixed: Array, shift: Array) -> Array:
    high = (np.clip(n << np.maximum(shift, 0), *INT32) * fixed + (1 << 30)) >> 31
    right = np.maximum(-shift, 0)
    return (high + ((1 << right) >> 1)) >> right


def tflite(n: Array, fixed: Array, shift: Array) -> Array:
    total_shift = 31 - shift
    return (n * fixed + (1 << (total_shift - 1))) >> total_shift


def away(n: Array, fixed: Array, shift: Array) -> Array:
    magnitude, half = np.abs(n * fixed), 1 << (30 - shift)
    return np.sign(n) * ((magnitude + half) // (2 * half))


def even(n: Array, fixed: Array, shift: Array) -> Array:
    magnitude, half = np.abs(n * fixed), 1 << (30 - shift)
    whole, rest = np.divmod(magnitude, 2 * half)
    return np.sign(n) * (whole + ((rest > half) | ((rest == half) & (whole % 2 == 1))))


FIXED_STEPS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "gemmlowp": gemmlowp,
    "tflite": tflite,
    "away": away,
    "even": even,
    "ruy": ruy,
}


def fixed_steps(name: str, n: Array, lhs: Array, rhs: Array, scale: Array) -> Array:
    real = lhs.astype(f64) * rhs.astype(f64) / scale.astype(f64)
    return FIXED_STEPS[name](n, *quantize_multiplier(real))


def float_multiplier(n: Array, multiplier: Array, zero: Array, least: Array, most: Array) -> Array:
    """Codes within `least` and `most`."""
    scaled = n.astype(f32) * multiplier
    scaled = np.minimum(np.maximum(scaled, (least - zero).astype(f32)), (most - zero).astype(f32))
    return np.rint(scaled).astype(i64) + zero


def activation_range(
    convention: Requantization, scale: Array, zero: Array, format: Integer
) -> tuple[Array | int, Array | int]:
    """The least and the most code: the range of the activation is quantized by division, ties to even."""

    def quantized(bound: float) -> Array:
        steps = np.clip(np.rint(f32(bound) / scale), -1e6, 1e6)
        return np.clip(steps.astype(i64) + zero, format.low, format.high)

    low, high = convention.low, convention.high
    return format.low if low is None else quantized(low), format.high if high is None else quantized(high)


def requantized(
    name: str,
    n: Array,
    lhs: Array,
    rhs: Array,
    scale: Array,
    zero: Array | int,
    format: Integer,
    convention: Requantization | None = None,
) -> Array:
    """The codes of the sums n, int64, with the activation of `convention`."""
    convention = convention or CONVENTIONS[name]
    zero = np.asarray(zero, i64)
    with np.errstate(over="ignore", under="ignore"):
        least, most = activation_range(convention, scale, zero, format)
        if name == "float_multiplier":
            return float_multiplier(n, (lhs * rhs) / scale, zero, np.asarray(least), np.asarray(most))
        return np.minimum(np.maximum(fixed_steps(name, n, lhs, rhs, scale) + zero, least), most)


# ---- the same once more, in fractions


def exact_multiplier(lhs: float, rhs: float, scale: float) -> tuple[int, int]:
    """As quantize_multiplier, with integers of any size."""
    fraction, shift = math.frexp(lhs * rhs / scale)
    fixed = math.floor(Fraction(fraction) * 2**31 + Fraction(1, 2))
    if fixed == 2**31:
        fixed, shift = fixed // 2, shift + 1
    if shift < -31:
        return 0, 0
    return (2**31 - 1, 30) if shift > 30 else (fixed, shift)


def nearest(x: Fraction, ties: str) -> int:
    if ties == "even":
        return round(x)
    up = math.floor(x + Fraction(1, 2))
    return up if ties == "up" or x >= 0 else math.ceil(x - Fraction(1, 2))


def exact_steps(name: str, n: int, fixed: int, shift: int) -> int:
    if name in ("gemmlowp", "ruy"):
        left = min(max(n * 2 ** max(shift, 0), INT32[0]), INT32[1])
        ties = "away" if name == "gemmlowp" else "up"
        return nearest(Fraction(nearest(Fraction(left * fixed, 2**31), "up"), 2 ** max(-shift, 0)), ties)
    return nearest(Fraction(n * fixed * 2**31, 2 ** (62 - shift)), "up" if name == "tflite" else name)


# ---- cases


class Case(NamedTuple):
    """Sums, and scales that broadcast with them."""

    n: Array  # int64, within int32
    lhs: Array  # float32
    rhs: Array
    scale: Array

    @property
    def real(self) -> Array:
        return self.lhs.astype(f64) * self.rhs.astype(f64) / self.scale.astype(f64)


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(rng: np.random.Generator, shape: Any, low: int, high: int) -> Array:
    """float32 of random mantissas, and of exponents from low to high - 1."""
    return np.ldexp(rng.uniform(1, 2, shape), rng.integers(low, high, shape)).astype(f32)


def log_uniform(rng: np.random.Generator, shape: Any) -> Array:
    """int32 of all sizes and both signs."""
    return np.clip(np.exp2(rng.uniform(0, 31.01, shape)) * rng.choice([-1, 1], shape), *INT32).astype(i64)


def scales(rng: np.random.Generator, shape: Any, low: int, high: int) -> tuple[Array, Array, Array]:
    """Scales of a product around 2^low to 2^high."""
    lhs, rhs = floats(rng, shape, -20, 10), floats(rng, shape, -20, 10)
    target = np.exp2(rng.uniform(low, high, shape))
    return lhs, rhs, (lhs.astype(f64) * rhs / target).astype(f32)


def everywhere(rows: int, columns: int) -> Case:
    """Multipliers from 2^-40 to 2^38; half of the sums are of all sizes, half give steps about as large as codes."""
    rng = generator(1)
    lhs, rhs, scale = scales(rng, (rows, 1), -40, 38)
    case = Case(np.empty(0), lhs, rhs, scale)
    visible = np.clip(rng.uniform(-300, 300, (rows, columns // 2)) / case.real, *INT32).astype(i64)
    return case._replace(n=np.concatenate([log_uniform(rng, (rows, columns - columns // 2)), visible], 1))


def one_by_one(count: int) -> Case:
    """A scale for each sum."""
    rng = generator(2)
    lhs, rhs, scale = scales(rng, (count,), -31, 1)
    return Case(np.clip(rng.uniform(-300, 300, count) * scale / (lhs * rhs), *INT32).astype(i64), lhs, rhs, scale)


def beside(case: Case, rng: np.random.Generator, columns: int) -> Case:
    """`case` with the two sums beside points (k + 1/2) / M, at which codes change."""
    half = rng.integers(-280, 280, (len(case.scale), columns)) + 0.5
    n = np.floor(half / case.real)
    n = np.concatenate([n, n + 1], 1)
    return case._replace(n=np.clip(n, *INT32).astype(i64))


def near_ties(rows: int, columns: int) -> Case:
    rng = generator(3)
    return beside(Case(np.empty(0), *scales(rng, (rows, 1), -31, 1)), rng, columns)


def odd_multipliers(rows: int, columns: int) -> Case:
    """Multipliers of 32 bits with the last one set, so that their mantissas are ties, beside which sums lie."""
    rng = generator(4)
    a, b = (rng.integers(2**15, 2**16, (4 * rows, 1)) | 1 for _ in range(2))
    kept = (a * b >= 2**31)[:, 0]
    a, b = a[kept][:rows], b[kept][:rows]
    lhs, rhs = (np.ldexp(x.astype(f64), -24).astype(f32) for x in (a, b))
    scale = np.exp2(rng.integers(4, 8, lhs.shape)).astype(f32)
    return beside(Case(np.empty(0), lhs, rhs, scale), rng, columns)


def exact_ties() -> Iterator[Case]:
    """(2k + 1) · a / 2: all multipliers a · 2^-s for some odd a, and sums up to two from the ties."""
    odd, around = np.arange(-301, 302, 2), np.arange(-2, 3)
    for s in range(1, 32):
        n = (odd[:, None] * 2 ** (s - 1) + around).reshape(-1)
        n = n[(n >= INT32[0]) & (n <= INT32[1])]
        a = np.arange(1, 16, 2).reshape(-1, 1)
        yield Case(n[None], a.astype(f32), np.full_like(a, 2.0**-3, f32), np.full_like(a, 2.0 ** (s - 3), f32))


def extremes() -> Case:
    """Sums at the ends of int32, around powers of two and 0, by multipliers just beside powers of two: 2^-45 to 2^45.

    (1 + 2^-23) · (1 - 2^-23) is 2^-46 below 1, and rounds to a mantissa of 2^31."""
    powers = 2 ** np.arange(32)
    n = np.concatenate([m + d for m in (powers, -powers) for d in np.arange(-3, 4)[:, None]])
    n = np.unique(np.clip(n, *INT32)).astype(i64)
    up, down = f32(1 + 2**-23), f32(1 - 2**-23)
    pairs = [(1, 1), (up, 1), (down, 1), (up, down), (up, up), (down, down), (1.5, 1), (1.25, up)]
    exponents = np.arange(-45, 46)
    lhs, rhs = (np.repeat([p[i] for p in pairs], len(exponents)).astype(f32)[:, None] for i in (0, 1))
    return Case(n[None], lhs, rhs, np.tile(np.exp2(exponents), len(pairs)).astype(f32)[:, None])


def zeros(case: Case, format: Integer, seed: int = 5) -> Array:
    """A zero point for each multiplier; a third at either end."""
    rng, shape = generator(seed), case.scale.shape
    ends = rng.choice([format.low, format.high], shape)
    return np.where(rng.random(shape) < 2 / 3, ends, rng.integers(format.low, format.high + 1, shape))


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, *rest = (torch.from_numpy(np.ascontiguousarray(x)) for x in case)
    return (n.to(torch.int32), *rest)  # type: ignore[return-value]


def assert_equal(got: Array, want: Array, what: str, *beside: Array) -> None:
    """Equal numbers; an error shows what stands `beside` the first that differs."""
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    wrong = got != want
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        shown = [np.broadcast_to(x, want.shape)[at] for x in beside]
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size}; at {at} {got[at]}, not {want[at]}; {shown}")


def assert_codes(
    name: str, case: Case, zero: Array | int, format: Integer, convention: Requantization | None = None
) -> int:
    """How many codes of the convention are those of its oracle: all."""
    convention = convention or CONVENTIONS[name]
    n, lhs, rhs, scale = tensors(case)
    own = zero if isinstance(zero, int) else torch.from_numpy(zero).to(torch.int32)
    got = convention.codes(n, lhs, rhs, scale, own, format)
    assert got.dtype == format.dtype
    want = requantized(name, *case, zero, format, convention)
    assert want.min() >= format.low and want.max() <= format.high
    assert_equal(got.numpy().astype(i64), want, f"{convention!r} {format.name}", *case, np.asarray(zero))
    return want.size


# ---- tests of the oracles


class TestOracles(unittest.TestCase):
    """The oracles say what fractions say, and tell conventions apart on the cases here."""

    @parameterized.expand(FIXED)
    @pytest.mark.quick(2)
    def test_fractions(self, name):
        rng = generator(0)
        for case in (everywhere(300, 4), near_ties(200, 2), odd_multipliers(200, 2), extremes(), *exact_ties()):
            shape = np.broadcast_shapes(case.n.shape, case.scale.shape)
            at = np.unravel_index(rng.choice(math.prod(shape), 150), shape)
            n, lhs, rhs, scale = (np.broadcast_to(x, shape)[at] for x in case)
            fixed, shift = quantize_multiplier(Case(n, lhs, rhs, scale).real)
            got = FIXED_STEPS[name](n, fixed, shift)
            for i in range(len(n)):
                want = exact_multiplier(float(lhs[i]), float(rhs[i]), float(scale[i]))
                assert (fixed[i], shift[i]) == want, (lhs[i], rhs[i], scale[i])
                assert got[i] == exact_steps(name, int(n[i]), *want), (n[i], want)

    def test_multiplier(self):
        """By hand: QuantizeMultiplier's cases."""
        given = {
            1.0: (2**30, 1),
            0.5: (2**30, 0),
            0.75: (3 * 2**29, 0),
            1 - 2.0**-31: (2**31 - 1, 0),
            1 - 2.0**-32: (2**30, 1),  # a tie, away from zero, to 2^31
            1 - 3 * 2.0**-32: (2**31 - 1, 0),  # a tie
            2.0**-32: (2**30, -31),
            2.0**-33: (0, 0),
            2.0**-32 - 2.0**-65: (2**30, -31),
            2.0**29: (2**30, 30),
            2.0**30: (2**31 - 1, 30),
            2.0**90: (2**31 - 1, 30),
        }
        fixed, shift = quantize_multiplier(np.array(list(given)))
        assert list(zip(fixed, shift, strict=True)) == list(given.values())

    def test_by_hand(self):
        """n / 4, as the five ways to round have it."""
        n = np.array([-7, -6, -5, -3, -2, -1, 1, 2, 3, 5, 6, 7])
        want = {
            # first n / 2 with ties up, then half of it with ties away from zero
            "gemmlowp": [-2, -2, -1, -1, -1, 0, 1, 1, 1, 2, 2, 2],
            "tflite": [-2, -1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2],
            "ruy": [-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2],
            "away": [-2, -2, -1, -1, -1, 0, 0, 1, 1, 1, 2, 2],
            "even": [-2, -2, -1, -1, 0, 0, 0, 0, 1, 1, 2, 2],
        }
        one = np.ones(1, f32)
        for name, codes in want.items():
            assert requantized(name, n, one, one, 4 * one, 0, INT8).tolist() == codes, name

    def test_conventions_differ(self):
        """On ties each convention has codes of its own, so that none of the tests below can take one for another."""
        cases = list(exact_ties())
        codes = {
            name: np.concatenate([requantized(name, *case, 0, INT8).reshape(-1) for case in cases])
            for name in CONVENTIONS
        }
        for a, b in itertools.combinations(codes, 2):
            assert (codes[a] != codes[b]).sum() > 1000, (a, b)


# ---- tests of conventions


class TestCodes(unittest.TestCase):
    """Codes of millions of sums."""

    @parameterized.expand(EXACT)
    @pytest.mark.quick(2)
    def test_everywhere(self, name):
        case = everywhere(1500, 1000)
        assert assert_codes(name, case, zeros(case, INT8), INT8) == 1_500_000
        few = case._replace(n=case.n[:, ::5])
        for format in FORMATS[1:]:
            assert_codes(name, few, zeros(few, format), format)

    @parameterized.expand(EXACT)
    def test_one_by_one(self, name):
        case = one_by_one(100_000)
        for format in (INT8, UINT8):
            assert_codes(name, case, zeros(case, format), format)

    @parameterized.expand(EXACT)
    def test_near_ties(self, name):
        case = near_ties(2000, 200)
        for format in (INT8, UINT8):
            assert assert_codes(name, case, zeros(case, format), format) == 800_000

    @parameterized.expand(EXACT)
    def test_mantissas_that_are_ties(self, name):
        case = odd_multipliers(2000, 100)
        for zero in (format_end for format_end in (INT8.low, 0, INT8.high)):
            assert assert_codes(name, case, zero, INT8) == 400_000

    @parameterized.expand(EXACT)
    def test_exact_ties(self, name):
        count = 0
        for case in exact_ties():
            for format in (INT8, UINT8):
                count += assert_codes(name, case, zeros(case, format), format)
        assert count > 500_000

    @parameterized.expand(EXACT)
    @pytest.mark.quick(3)
    def test_extremes(self, name):
        case = extremes()
        for format in FORMATS:
            for zero in (format.low, format.zero, format.high):
                assert_codes(name, case, zero, format)
                assert_codes(name, case, np.full(case.scale.shape, zero), format)

    @parameterized.expand(FIXED)
    def test_steps(self, name):
        """All 32 bits of results, of which codes show 8."""
        for case in (everywhere(1000, 400), near_ties(500, 100), odd_multipliers(1000, 100), extremes(), *exact_ties()):
            n, lhs, rhs, scale = tensors(case)
            got = CONVENTIONS[name].steps(n, lhs, rhs, scale).numpy()
            assert got.dtype == i64
            assert_equal(got, fixed_steps(name, *case), name, *case)

    @parameterized.expand(EXACT)
    @pytest.mark.quick(2)
    def test_in_decompositions(self, name):
        """What exported programs take apart is written in other operators."""
        codes, steps = map(as_decomposition, (CONVENTIONS[name].codes, CONVENTIONS[name].steps))
        for case in (one_by_one(50_000), near_ties(500, 100), odd_multipliers(1000, 100), extremes(), *exact_ties()):
            n, lhs, rhs, scale = tensors(case)
            zero = zeros(case, UINT8)
            got = codes(n, lhs, rhs, scale, torch.from_numpy(zero), UINT8)
            assert_equal(got.numpy().astype(i64), requantized(name, *case, zero, UINT8), name, *case)
            if name != "float_multiplier":
                assert_equal(steps(n, lhs, rhs, scale).numpy(), fixed_steps(name, *case), name, *case)

    @parameterized.expand(FIXED)
    def test_saturating_shift(self, name):
        """Only the first shift of gemmlowp and ruy saturates, which codes cannot show."""
        one = torch.ones(())
        got = CONVENTIONS[name].steps(torch.tensor([2**29, -(2**29)], dtype=torch.int32), one, one, one / 8)
        assert got.tolist() == ([2**30, -(2**30)] if name in ("gemmlowp", "ruy") else [2**32, -(2**32)])

    def test_float_multiplier_rounds_sums(self):
        """float32 holds 24 bits of a sum: 2^24 + 1 is 2^24, and by 2^-25 a tie."""
        n = torch.tensor([2**24 + 1, 2**24 + 2, -(2**24) - 1, 3 * 2**24, 3 * 2**24 - 1], dtype=torch.int32)
        one = torch.ones(())
        got = FloatMultiplier().codes(n, one, one, one * 2.0**25, 0, INT8)
        assert got.tolist() == [0, 1, 0, 2, 2]
        assert FixedPoint(rounding="even").codes(n, one, one, one * 2.0**25, 0, INT8).tolist() == [1, 1, -1, 2, 1]

    def test_float_multiplier_rounds_its_product(self):
        """(s_lhs · s_rhs) / s is rounded twice: s_lhs · (s_rhs / s), or once, are others."""
        rng = generator(6)
        case = beside(Case(np.empty(0), *scales(rng, (3000, 1), -25, -20)), rng, 50)
        want = requantized("float_multiplier", *case, 0, INT8)
        n, lhs, rhs, scale = case
        others = {"reassociated": lhs * (rhs / scale), "once": case.real.astype(f32)}
        for what, multiplier in others.items():
            other = float_multiplier(n, multiplier, *map(np.asarray, (0, INT8.low, INT8.high)))
            assert (other != want).sum() > 1000, what
        assert_codes("float_multiplier", case, 0, INT8)

    def test_float_multiplier_out_of_range(self):
        """A multiplier that is 0 or infinite in float32: 0 times either is 0."""
        n = torch.tensor([-5, 0, 5], dtype=torch.int32)
        tiny, huge = torch.tensor(2.0**-140), torch.tensor(2.0**100)
        assert FloatMultiplier().codes(n, huge, huge, tiny, 3, INT8).tolist() == [-128, 3, 127]
        assert FloatMultiplier().codes(n, tiny, tiny, huge, 3, INT8).tolist() == [3, 3, 3]

    @parameterized.expand(EXACT)
    def test_scale_of_zero(self, name):
        """A tensor of zeros may have a scale of 0, and then its products are 0."""
        n, one = torch.tensor([*INT32, -1, 0, 1], dtype=torch.int32), torch.ones(())
        for lhs, rhs, zero in itertools.product((0.0, 1.0), (0.0, 2.0**-149), (-128, 0, 127)):
            if lhs * rhs == 0:
                assert CONVENTIONS[name].codes(n, lhs * one, rhs * one, one, zero, INT8).tolist() == [zero] * 5

    @hypothesis.settings(max_examples=400, deadline=None)
    @hypothesis.given(
        st.sampled_from(list(FIXED_STEPS)),
        st.integers(*INT32) | st.integers(-1000, 1000),
        *[st.floats(width=32, min_value=2.0**-149, max_value=2.0**127)] * 3,
        st.sampled_from(FORMATS),
        st.floats(0, 1),
    )
    @pytest.mark.full
    def test_any_scales(self, name, n, lhs, rhs, scale, format, place):
        """Subnormal scales and huge ones, in fractions."""
        zero = round(format.low + place * (format.high - format.low))
        own = [torch.tensor(s, dtype=torch.float32) for s in (lhs, rhs, scale)]
        codes = CONVENTIONS[name].codes
        steps = exact_steps(name, n, *exact_multiplier(lhs, rhs, scale))
        for made in (codes, as_decomposition(codes)):
            got = made(torch.tensor(n, dtype=torch.int32), *own, zero, format)
            assert got.item() == min(max(steps + zero, format.low), format.high)


class TestActivation(unittest.TestCase):
    """low and high are quantized by division, ties to even, and clamp the codes."""

    @parameterized.expand(EXACT)
    @pytest.mark.quick(3)
    def test_ranges(self, name):
        rng = generator(7)
        lhs, rhs, scale = scales(rng, (600, 1), -20, 0)
        scale[:300] = np.exp2(rng.uniform(-6, 3, (300, 1)))  # so that the bounds lie among the codes
        lhs[:300], rhs[:300] = np.exp2(rng.integers(-10, -2, (2, 300, 1)))
        case = Case(np.empty(0), lhs, rhs, scale)
        case = case._replace(n=np.clip(rng.uniform(-300, 300, (600, 200)) / case.real, *INT32).astype(i64))
        moved = 0
        for (low, high), format in itertools.product(ACTIVATIONS, FORMATS):
            zero = zeros(case, format)
            assert_codes(name, case, zero, format, replace(CONVENTIONS[name], low=low, high=high))
            bounded = requantized(name, *case, zero, format, replace(CONVENTIONS[name], low=low, high=high))
            moved += (bounded != requantized(name, *case, zero, format)).any()
        assert moved == (len(ACTIVATIONS) - 1) * len(FORMATS)

    @parameterized.expand(EXACT)
    def test_by_hand(self, name):
        """relu's bound is the zero point; 6 / 4 and 6 / 12 are ties, to 2 and to 0; a bound beyond the codes is one."""
        n = torch.arange(-300, 301, dtype=torch.int32)
        one = torch.ones(())

        def ends(zero: int, scale: float, format: Integer = INT8, **bounds: float) -> list[int]:
            codes = replace(CONVENTIONS[name], **bounds).codes(n, scale * one, one, scale * one, zero, format)
            return [int(codes.min()), int(codes.max())]

        for zero in (-128, -5, 0, 5, 127):
            assert ends(zero, 0.3, low=0.0) == [zero, 127]
            assert ends(zero, 0.3, high=0.0) == [-128, zero]
        assert ends(-128, 4.0, low=0.0, high=6.0) == [-128, -126]
        assert ends(3, 4.0, low=0.0, high=6.0) == [3, 5]
        assert ends(3, 12.0, low=0.0, high=6.0) == [3, 3]
        assert ends(3, 12.0, low=-18.0, high=30.0) == [1, 5]  # -1.5 and 2.5
        assert ends(0, 0.1, low=-1.0, high=1.0) == [-10, 10]
        assert ends(120, 0.1, low=0.0, high=6.0) == [120, 127]
        assert ends(-128, 0.1, low=-1.0, high=1.0) == [-128, -118]
        assert ends(0, 0.1, low=100.0) == [127, 127]
        assert ends(0, 0.1, high=-100.0) == [-128, -128]
        assert ends(0, 1e-30, low=0.0, high=6.0) == [0, 127]
        assert ends(0, 2.0**-140, low=-6.0, high=6.0) == [-128, 127]
        assert ends(15, 1.0, UINT4, high=-3.0) == [0, 12]
        assert ends(0, 1.0, UINT7, low=3.5) == [4, 127]

    def test_bounds_divide_in_float32(self):
        """Quotients that are ties in float32 alone."""
        n, one, found = torch.tensor([300], dtype=torch.int32), torch.ones(()), 0
        for k, bound in itertools.product(range(127), (0.1, 0.7, 6.0)):
            scale = f32(bound / (k + 0.5))
            quotient = f32(bound) / scale
            if quotient != k + 0.5 or np.rint(quotient) == np.rint(f64(f32(bound)) / f64(scale)):
                continue
            found += 1
            for name, convention in CONVENTIONS.items():
                own = torch.tensor(scale)
                got = replace(convention, high=bound).codes(n, own, one, own, 0, INT8)
                assert got.item() == np.rint(quotient), (name, bound, scale)
        assert found > 20


# ---- through the operator


class Side(NamedTuple):
    """An operand: a quantized tensor, and what it holds."""

    tensor: Any
    codes: Array  # each less its zero point
    scale: Array


def side(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    format: Integer,
    block: tuple[int, ...] = (-1, -1),
    powers: bool = False,
    affine: bool = False,
) -> Side:
    """Random codes, a third of them at the ends, with random scales and zero points for each block."""
    codes = rng.integers(format.low, format.high + 1, shape)
    codes = np.where(rng.random(shape) < 1 / 3, rng.choice([format.low, format.high], shape), codes)
    q = Quantizer(format, block, Static(affine=affine))
    of_blocks = q.buffers(shape)["scale"][0]
    scale = floats(rng, of_blocks, -8, -3)
    scale = np.exp2(np.floor(np.log2(scale))).astype(f32) if powers else scale
    given: dict[str, Tensor] = {"scale": torch.from_numpy(scale)}
    zero: Any = format.zero
    if affine:
        ends = rng.choice([format.low, format.high], of_blocks)
        zero = np.where(rng.random(of_blocks) < 0.5, ends, rng.integers(format.low, format.high + 1, of_blocks))
        given["zero_point"] = torch.from_numpy(zero).to(format.dtype)
        zero = wide(zero, block, shape)
    real = ((codes - zero) * wide(scale, block, shape)).astype(f32)
    made = hop.quantize(q, torch.from_numpy(real), **given)
    assert_equal(unpacked(made), codes, "codes of an operand")
    return Side(made, codes - zero, scale)


def wide(x: Array, block: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """What x has for each block, for each element."""
    for dim in range(1, len(block) + 1):
        size = shape[-dim]
        x = np.repeat(x, size if block[-dim] == -1 else block[-dim], -dim).take(np.arange(size), -dim)
    return x


def unpacked(quantized: Any) -> Array:
    """The codes of a quantized tensor."""
    codes, format = quantized.codes.numpy(), quantized.quantizer.format
    if format.bits in (2, 4):
        dtype = np.int8 if format.dtype == torch.int8 else np.uint8
        shape = tuple(quantized.shape)
        codes = numerics.unpack(codes, format.bits, shape[-1] if shape else 1, dtype).reshape(shape)
    assert codes.dtype == (np.int8 if format.dtype == torch.int8 else np.uint8)
    return codes.astype(i64)


def convolved(x: Array, w: Array, stride: int, padding: int, dilation: int, groups: int) -> Array:
    """conv2d of integers."""
    x = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    outs = []
    for a, b in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True):
        height, width = ((a.shape[2 + i] - dilation * (b.shape[2 + i] - 1) - 1) // stride + 1 for i in (0, 1))
        total = np.zeros((a.shape[0], b.shape[0], height, width), i64)
        for i, j in np.ndindex(*b.shape[2:]):
            rows = slice(i * dilation, i * dilation + (height - 1) * stride + 1, stride)
            columns = slice(j * dilation, j * dilation + (width - 1) * stride + 1, stride)
            total += np.einsum("nchw,oc->nohw", a[:, :, rows, columns], b[:, :, i, j])
        outs.append(total)
    return np.concatenate(outs, 1)


class Product(NamedTuple):
    """A call of an operator: its sums without bias, and the scales that broadcast with them."""

    run: Callable[..., Any]  # (output, bias, **output scales)
    total: Array
    lhs: Array
    rhs: Array
    bias_shape: tuple[int, ...] | None  # in which it broadcasts with the sums; None where there is none
    given_shape: tuple[int, ...] = ()  # in which the operator takes it


def _linear(x: Any, w: Any) -> Callable[..., Any]:
    def run(output: Any, bias: Any, **given: Any) -> Any:
        return hop.scaled(aten.linear.default, output, x.tensor, w.tensor, bias, **given)

    return run


def linear(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (6, 40), format, powers=powers, affine=True)
    w = side(rng, (24, 40), INT8, (1, -1) if per_channel else (-1, -1), powers)
    return Product(_linear(x, w), x.codes @ w.codes.T, x.scale, w.scale.T, (24,), (24,))


def linear_of_rows(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    """A scale and a zero point for each row of a batch, and a weight with zero points too."""
    x = side(rng, (2, 5, 33), format, (1, -1), powers, affine=True)
    w = side(rng, (10, 33), UINT8 if per_channel else INT8, (1, -1) if per_channel else (-1, -1), powers, affine=True)
    return Product(_linear(x, w), x.codes @ w.codes.T, x.scale, w.scale.T, (10,), (10,))


def mm(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (8, 32), format, powers=powers, affine=True)
    w = side(rng, (32, 16), INT8, (-1, 1) if per_channel else (-1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        assert bias is None
        return hop.scaled(aten.mm.default, output, x.tensor, w.tensor, **given)

    return Product(run, x.codes @ w.codes, x.scale, w.scale, None)


def addmm(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (8, 32), format, (1, -1), powers=powers, affine=True)
    w = side(rng, (32, 16), INT8, (-1, 1) if per_channel else (-1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        bias = torch.zeros(16) if bias is None else bias
        return hop.scaled(aten.addmm.default, output, bias, x.tensor, w.tensor, **given)

    return Product(run, x.codes @ w.codes, x.scale, w.scale, (8, 16), (8, 16))


def bmm(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (3, 4, 20), format, powers=powers, affine=True)
    w = side(rng, (3, 20, 6), INT8, (1, -1, 1) if per_channel else (-1, -1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        assert bias is None
        return hop.scaled(aten.bmm.default, output, x.tensor, w.tensor, **given)

    return Product(run, x.codes @ w.codes, x.scale, w.scale, None)


def baddbmm(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (3, 4, 20), format, powers=powers, affine=True)
    w = side(rng, (3, 20, 6), INT8, (1, -1, 1) if per_channel else (-1, -1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        bias = torch.zeros(6) if bias is None else bias
        return hop.scaled(aten.baddbmm.default, output, bias, x.tensor, w.tensor, **given)

    return Product(run, x.codes @ w.codes, x.scale, w.scale, (6,), (6,))


def conv2d(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    x = side(rng, (2, 4, 7, 8), format, powers=powers, affine=True)
    w = side(rng, (6, 4, 3, 3), INT8, (1, -1, -1, -1) if per_channel else (-1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        return hop.scaled(aten.conv2d.default, output, x.tensor, w.tensor, bias, [1, 1], [1, 1], **given)

    total = convolved(x.codes, w.codes, 1, 1, 1, 1)
    return Product(run, total, x.scale, w.scale.reshape(-1, 1, 1), (6, 1, 1), (6,))


def grouped_conv2d(rng: np.random.Generator, format: Integer, per_channel: bool, powers: bool) -> Product:
    """Strided, dilated and in groups, with a scale and a zero point for each example."""
    x = side(rng, (3, 4, 9, 9), format, (1, -1, -1, -1), powers, affine=True)
    w = side(rng, (8, 2, 3, 2), INT8, (1, -1, -1, -1) if per_channel else (-1, -1), powers)

    def run(output: Any, bias: Any, **given: Any) -> Any:
        rest = ([2, 2], [1, 1], [2, 2], False, [0, 0], 2)
        return hop.scaled(aten.convolution.default, output, x.tensor, w.tensor, bias, *rest, **given)

    total = convolved(x.codes, w.codes, 2, 1, 2, 2)
    return Product(run, total, x.scale, w.scale.reshape(-1, 1, 1), (8, 1, 1), (8,))


PRODUCTS = (linear, linear_of_rows, mm, addmm, bmm, baddbmm, conv2d, grouped_conv2d)
BIASES = ("none", "float32", "float64", "bfloat16", "int32")


def biases(rng: np.random.Generator, product: Product, kind: str) -> tuple[Tensor | None, Array]:
    """A bias, and what it adds to the sums: a float one is rounded to its unit, ties to even."""
    if kind == "none" or product.bias_shape is None:
        return None, np.zeros((), i64)
    most = max(int(np.abs(product.total).max()), 8)
    steps = rng.integers(-most, most, product.bias_shape)
    if kind == "int32":
        return torch.from_numpy(steps.astype(np.int32)).reshape(product.given_shape), steps
    unit = product.lhs.astype(f64) * product.rhs.astype(f64)
    # Of the first rows or examples, where it is not one for all of them.
    near = np.broadcast_to(unit, product.total.shape)[(0,) * (product.total.ndim - len(product.bias_shape))]
    near = near[tuple(slice(n) for n in product.bias_shape)]
    bias = (steps + rng.choice([0, 0.5, 0.25, 0.7], steps.shape)) * near
    given = torch.from_numpy(bias).to(getattr(torch, kind))
    held = given.to(torch.float64).numpy()  # which is exact
    return given.reshape(product.given_shape), np.clip(np.rint(held / unit), *INT32).astype(i64)


def output_scale(rng: np.random.Generator, product: Product, powers: bool, shape: tuple[int, ...] = ()) -> Array:
    """Scales with which most codes lie within their range."""
    real = product.total * product.lhs.astype(f64) * product.rhs.astype(f64)
    scale = max(float(np.abs(real).mean()), 1e-6) / 60 * rng.uniform(0.5, 2, shape)
    return np.asarray(np.exp2(np.round(np.log2(scale))) if powers else scale, f32)


def given_for(scale: Array, zero: Array, format: Integer) -> dict[str, Tensor]:
    return {
        "output_scale": torch.from_numpy(np.asarray(scale)),
        "output_zero_point": torch.from_numpy(np.asarray(zero)).to(format.dtype),
    }


def check_output(made: Any, want: Array, scale: Array, zero: Array, what: str) -> None:
    assert_equal(unpacked(made), want, what)
    assert_equal(made.scale.numpy(), np.broadcast_to(scale, made.scale.shape), f"{what}: scale")
    if "zero_point" in made.buffers():
        assert_equal(
            made.zero_point.numpy().astype(i64), np.broadcast_to(zero, made.scale.shape), f"{what}: zero point"
        )


MATRIX_OF_CASES = [(f"{name}_{make.__name__}", name, make) for name in CONVENTIONS for make in PRODUCTS]


class TestScaled(unittest.TestCase):
    """hop.scaled on codes that numpy sums."""

    @parameterized.expand(MATRIX_OF_CASES)
    @pytest.mark.quick(12)
    def test_products(self, _test, name, make):
        """int8 and uint8 activations with zero points, weights by tensor and by channel, all kinds of bias."""
        distinct = set()
        for i, (format, per_channel, powers, bias) in enumerate(
            itertools.product((INT8, UINT8), (False, True), (False, True), BIASES)
        ):
            rng = generator(8, i)
            product = make(rng, format, per_channel, powers)
            if bias != "none" and (product.bias_shape is None or (bias == "int32" and make in (addmm, baddbmm))):
                continue
            given, steps = biases(rng, product, bias)
            total = product.total + steps
            assert total.min() >= INT32[0] and total.max() <= INT32[1]
            scale = output_scale(rng, product, powers)
            for j, out in enumerate((INT8, UINT8)):
                zero = rng.choice([out.low, out.high, out.zero, out.zero + 20])
                low, high = (None if b is None else b * float(scale) * 10 for b in ACTIVATIONS[(i + j) % 4])
                convention = replace(CONVENTIONS[name], low=low, high=high)
                q = Quantizer(out, scale=Static(affine=True, requantize=convention))
                made = product.run(q, given, **given_for(scale, zero, out))
                want = requantized(name, total, product.lhs, product.rhs, scale, zero, out, convention)
                what = f"{convention!r} {format.name} {out.name} {per_channel} {powers} {bias}"
                check_output(made, want, scale, zero, what)
                distinct.update(want.reshape(-1).tolist())
        assert len(distinct) > 150

    @parameterized.expand(EXACT)
    def test_output_formats(self, name):
        """Narrow formats, whose codes share bytes, and formats without a zero point, whose middle stands for 0."""
        rng = generator(9)
        product = linear(rng, UINT8, True, True)
        scale = output_scale(rng, product, True)
        for format in FORMATS:
            steep = np.asarray(scale * f32(256 / (format.high - format.low + 1)), f32)
            for zero in (format.low, format.high, (format.low + format.high) // 2):
                q = Quantizer(format, scale=Static(affine=True, requantize=CONVENTIONS[name]))
                made = product.run(q, None, **given_for(steep, np.asarray(zero), format))
                want = requantized(name, product.total, product.lhs, product.rhs, steep, zero, format)
                check_output(made, want, steep, np.asarray(zero), f"{format.name} {zero}")
            q = Quantizer(format, scale=Static(requantize=CONVENTIONS[name]))
            made = product.run(q, None, output_scale=torch.from_numpy(steep))
            middle = {"int8": 0, "uint8": 128, "int4": 0, "uint4": 8, "ternary": 0, "uint7": 64, "sint7": 64}
            want = requantized(name, product.total, product.lhs, product.rhs, steep, middle[format.name], format)
            check_output(made, want, steep, np.asarray(0), f"{format.name} without a zero point")
            assert len(np.unique(want)) > min(50, (format.high - format.low) // 2)

    @parameterized.expand(EXACT)
    @pytest.mark.quick(3)
    def test_output_blocks(self, name):
        """A scale and a zero point for each row, column or group of the output."""
        rng = generator(10)
        for make, block in itertools.product((linear, mm), ((1, -1), (-1, 1), (1, 8), (3, 5), (-1, -1))):
            product = make(rng, INT8, True, True)
            for format in (INT8, UINT8, INT4):
                convention = replace(CONVENTIONS[name], low=0.0, high=1.0)
                q = Quantizer(format, block, Static(affine=True, requantize=convention))
                of_blocks = q.buffers(product.total.shape)["scale"][0]
                scale = output_scale(rng, product, True, of_blocks)
                zero = rng.integers(format.low, format.high + 1, of_blocks)
                made = product.run(q, None, **given_for(scale, zero, format))
                own = (wide(x, block, product.total.shape) for x in (scale, zero))
                want = requantized(name, product.total, product.lhs, product.rhs, *own, format, convention)
                check_output(made, want, scale, zero, f"{q}")

    @parameterized.expand(EXACT)
    def test_float_zero_point(self, name):
        """It is rounded, ties to even, and brought into the range of the format."""
        rng = generator(11)
        product = linear(rng, UINT8, False, True)
        scale = output_scale(rng, product, True)
        for given, zero in ((3.4, 3), (2.5, 2), (3.5, 4), (-0.5, 0), (1e9, 127), (-1e9, -128)):
            q = Quantizer(INT8, scale=Static(affine=True, requantize=CONVENTIONS[name]))
            own = {"output_scale": torch.from_numpy(np.asarray(scale)), "output_zero_point": torch.tensor(given)}
            want = requantized(name, product.total, product.lhs, product.rhs, scale, zero, INT8)
            check_output(product.run(q, None, **own), want, scale, np.asarray(zero), f"zero point {given}")

    @parameterized.expand(EXACT)
    def test_bias_is_clamped(self, name):
        """A float bias beyond int32 is its end, from which the sums here lead back."""
        one = torch.tensor(1.0)
        x = hop.quantize(Quantizer(INT8, scale=Static()), torch.full((4, 16), 9.0), scale=one)
        q = Quantizer(INT8, scale=Static(affine=True, requantize=CONVENTIONS[name]))
        for sign, end in ((1, INT32[1]), (-1, INT32[0])):
            w = hop.quantize(Quantizer(INT8, scale=Static()), torch.full((5, 16), -7.0 * sign), scale=one)
            total, zero, unit = np.full((4, 5), end - sign * 9 * 7 * 16), np.asarray(-3), np.ones((), f32)
            for bias, exponent in itertools.product((3e9, 1e30, math.inf), (23, 24, 25)):  # 2^31 / 2^24 is 128
                scale = np.asarray(2.0**exponent, f32)
                given = torch.full((5,), sign * bias)
                made = hop.scaled(aten.linear.default, q, x, w, given, **given_for(scale, zero, INT8))
                want = requantized(name, total, unit, unit, scale, zero, INT8)
                check_output(made, want, scale, zero, f"{sign * bias} 2^{exponent}")

    @parameterized.expand(EXACT)
    def test_bias_ties(self, name):
        """A float bias halfway between units goes to the even one, whatever the convention."""
        one, q = torch.tensor(1.0), Quantizer(INT8, scale=Static())
        x, w = hop.quantize(q, torch.ones(1, 2), scale=one / 4), hop.quantize(q, torch.ones(6, 2), scale=one / 8)
        out = Quantizer(INT8, scale=Static(affine=True, requantize=CONVENTIONS[name]))
        bias = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]) / 32
        given = given_for(np.asarray(1 / 32, f32), np.asarray(-60), INT8)
        made = hop.scaled(aten.linear.default, out, x, w, bias, **given)
        assert made.codes.tolist() == [[2, 2, 4, 4, 6, 6]]  # 2 · 4 · 8 - 60 and these

    @parameterized.expand(EXACT)
    def test_vectors(self, name):
        """Products of vectors, one of which is a single number."""
        rng = generator(13)
        a, b = side(rng, (48,), INT8, (-1,), True, affine=True), side(rng, (48,), INT8, (-1,), True)
        m = side(rng, (48, 7), INT8, (-1, 1), True)
        for format in (INT8, INT4):
            q = Quantizer(format, scale=Static(affine=True, requantize=CONVENTIONS[name]))
            for rhs, of_rhs in ((b, b.scale.reshape(())), (m, m.scale[0])):
                scale, zero = np.asarray(2.0**-1 if format is INT8 else 8.0, f32), np.asarray(-3)
                given = given_for(scale, zero, format)
                made = hop.scaled(aten.matmul.default, q, a.tensor, rhs.tensor, **given)
                want = requantized(
                    name, np.asarray(a.codes @ rhs.codes), a.scale.reshape(()), of_rhs, scale, -3, format
                )
                check_output(made, want, scale, zero, f"{rhs.codes.shape}")

    @parameterized.expand(EXACT)
    @pytest.mark.quick(2)
    def test_multiply(self, name):
        """mul of two quantized tensors, which broadcast, with scales for groups too."""
        rng = generator(14)
        for (a_format, b_format), block, powers in itertools.product(
            ((INT8, INT8), (UINT8, INT8), (UINT8, UINT8), (INT4, UINT8)), ((-1, -1), (1, 8)), (False, True)
        ):
            a = side(rng, (20, 30), a_format, block, powers, affine=True)
            b = side(rng, (1, 30), b_format, (-1, -1), powers, affine=True)
            of_a = wide(a.scale, block, a.codes.shape)
            scale = output_scale(rng, Product(lambda: None, a.codes * b.codes, of_a, b.scale, None), powers)
            for out, bounds in itertools.product((INT8, UINT8, UINT7), ((None, None), (0.0, 3.0))):
                zero = np.asarray(rng.integers(out.low, out.high + 1))
                convention = replace(CONVENTIONS[name], low=bounds[0], high=bounds[1])
                q = Quantizer(out, scale=Static(affine=True, requantize=convention))
                made = hop.scaled(aten.mul.Tensor, q, a.tensor, b.tensor, **given_for(scale, zero, out))
                want = requantized(name, a.codes * b.codes, of_a, b.scale, scale, zero, out, convention)
                check_output(made, want, scale, zero, f"{convention!r} {a_format.name} {b_format.name} {out.name}")

    @parameterized.expand(EXACT)
    @pytest.mark.quick(5)
    def test_values(self, name):
        """view, relu, max pooling, embedding and the like of a tensor with one scale: the other is 1."""
        rng = generator(15)
        calls: dict[str, tuple[Callable[..., Any], Callable[[Array], Array]]] = {
            "view": (lambda *a, **k: hop.scaled(aten.view.default, *a, [2, 24, 4], **k), lambda x: x.reshape(2, 24, 4)),
            "relu": (lambda *a, **k: hop.scaled(aten.relu.default, *a, **k), lambda x: np.maximum(x, 0)),
            "max_pool2d": (
                lambda *a, **k: hop.scaled(aten.max_pool2d.default, *a, [2, 2], [2, 2], **k),
                lambda x: x.reshape(2, 3, 4, 2, 4, 2).max((3, 5)),
            ),
            "permute": (
                lambda *a, **k: hop.scaled(aten.permute.default, *a, [0, 2, 3, 1], **k),
                lambda x: x.transpose(0, 2, 3, 1),
            ),
            "slice": (lambda *a, **k: hop.scaled(aten.slice.Tensor, *a, 2, 1, 7, 2, **k), lambda x: x[:, :, 1:7:2]),
            "select": (lambda *a, **k: hop.scaled(aten.select.int, *a, 1, 2, **k), lambda x: x[:, 2]),
            "embedding": (
                lambda *a, **k: hop.scaled(aten.embedding.default, *a, torch.tensor([[3, 0], [3, 5]]), **k),
                lambda x: x[[[3, 0], [3, 5]]],
            ),
        }
        shapes = {"max_pool2d": (2, 3, 8, 8), "embedding": (6, 32)}
        for powers, format in itertools.product((False, True), (INT8, UINT8, UINT4)):
            for what, (run, meant) in calls.items():
                x = side(rng, shapes.get(what, (2, 3, 4, 8)), format, (-1, -1), powers, affine=True)
                held, one = x.scale.reshape(()), np.ones((), f32)
                for out, ratio in itertools.product((INT8, UINT8, INT4), (0.25, 1.0, 2.0, 3.7)):
                    scale = np.asarray(held * f32(ratio), f32)
                    zero = np.asarray(rng.integers(out.low, out.high + 1))
                    q = Quantizer(out, scale=Static(affine=True, requantize=CONVENTIONS[name]))
                    made = run(q, x.tensor, **given_for(scale, zero, out))
                    want = requantized(name, meant(x.codes), held, one, scale, zero, out)
                    check_output(made, want, scale, zero, f"{what} {format.name} {out.name} {ratio}")

    def test_int32_bias(self):
        """addmm and baddbmm take the bias before the operands; and a convolution to 4 bits."""
        rng = generator(20)
        for name, (make, out) in itertools.product(CONVENTIONS, ((addmm, INT8), (baddbmm, INT8), (conv2d, INT4))):
            product = make(rng, INT8, True, True)
            given, steps = biases(rng, product, "int32")
            scale, zero = output_scale(rng, product, True) * f32(2 ** (8 - out.bits)), np.asarray(3)
            q = Quantizer(out, scale=Static(affine=True, requantize=CONVENTIONS[name]))
            made = product.run(q, given, **given_for(scale, zero, out))
            want = requantized(name, product.total + steps, product.lhs, product.rhs, scale, zero, out)
            check_output(made, want, scale, zero, f"{name} {make.__name__}")

    def test_zero_point_beyond_the_format(self):
        """An integer zero point that is no code of the format is refused, as quantize refuses it."""
        rng = generator(22)
        product = linear(rng, UINT8, False, True)
        for name, format in itertools.product(CONVENTIONS, (INT4, UINT4, UINT7)):
            scale, zero = output_scale(rng, product, True) * np.asarray(8, f32), np.asarray(format.high)
            q = Quantizer(format, scale=Static(affine=True, requantize=CONVENTIONS[name]))
            with pytest.raises(ValueError, match="output_zero_point must be a code of"):
                product.run(q, None, **given_for(scale, zero + 20 if format is UINT7 else zero + 100, format))
            made = product.run(q, None, **given_for(scale, zero, format))
            want = requantized(name, product.total, product.lhs, product.rhs, scale, zero, format)
            check_output(made, want, scale, zero, f"{name} {format.name}")

    @parameterized.expand(EXACT)
    def test_empty(self, name):
        """No rows, and a sum of nothing, which is 0."""
        q = Quantizer(INT8, scale=Static(affine=True, requantize=CONVENTIONS[name]))
        held = Quantizer(INT8, scale=Static())
        one, given = torch.tensor(0.5), given_for(np.asarray(0.25, f32), np.asarray(7), INT8)
        for m, k in ((0, 4), (3, 0)):
            x, w = (hop.quantize(held, torch.zeros(n, k), scale=one) for n in (m, 2))
            made = hop.scaled(aten.linear.default, q, x, w, torch.tensor([0.0, 1.0]), **given)
            assert made.codes.tolist() == [[7, 11]] * m


# ---- Division and Reciprocal


class TestDivision(unittest.TestCase):
    """What quantize gives for the result in float32."""

    def test_reciprocal_is_torch(self):
        """What PyTorch's quantize operators give, ties and clipped values included, which a division does not."""
        x = torch.cat([torch.arange(-600, 600) * 0.05, torch.randn(2000) * 9, torch.tensor([torch.inf, -torch.inf])])
        q = Quantizer(INT8, scale=Static(affine=True, requantize=Reciprocal()))
        for scale in (0.1, 0.3, 0.7, 1.1, 2.0**-3):
            given = {"scale": torch.tensor(scale), "zero_point": torch.tensor(3, dtype=torch.int8)}
            got = hop.quantize(q, x, **given)
            inverse = float(f32(1) / f32(scale))
            want = torch.fake_quantize_per_tensor_affine(x, scale, 3, -128, 127)
            assert torch.equal(got.codes, ((x * inverse).round() + 3).clamp(-128, 127).to(torch.int8))
            assert torch.equal(hop.dequantize(got), want)
        middles, scale = torch.arange(0.5, 127) * 0.7, torch.tensor(0.7)
        both = [
            hop.quantize(Quantizer(INT8, scale=Static(False, r)), middles, scale=scale)
            for r in (Division(), Reciprocal())
        ]
        assert not torch.equal(both[0].codes, both[1].codes)

    @parameterized.expand([(make.__name__, make) for make in PRODUCTS])
    @pytest.mark.quick(3)
    def test_is_quantize(self, _name, make):
        for i, (format, per_channel, powers, bias) in enumerate(
            itertools.product((INT8, UINT8), (False, True), (False, True), ("none", "float32", "int32"))
        ):
            rng = generator(16, i)
            product = make(rng, format, per_channel, powers)
            if bias != "none" and (product.bias_shape is None or (bias == "int32" and make in (addmm, baddbmm))):
                continue
            given, _ = biases(rng, product, bias)
            y = product.run(torch.float32, given)
            scale = output_scale(rng, product, powers)
            for j, out in enumerate((INT8, UINT8, UINT7, UINT8 if bias == "int32" else INT4)):
                low, high = ACTIVATIONS[(i + j) % len(ACTIVATIONS)]
                zero = np.asarray(rng.integers(out.low, out.high + 1))
                own = given_for(scale, zero, out)
                rule = (Division, Reciprocal)[(i + j) % 2]
                made = product.run(
                    Quantizer(out, scale=Static(affine=True, requantize=rule(low=low, high=high))), given, **own
                )
                active = y if (low, high) == (None, None) else y.clamp(low, high)
                plain = {name.removeprefix("output_"): t for name, t in own.items()}
                want = hop.quantize(Quantizer(out, scale=Static(affine=True, requantize=rule())), active, **plain)
                for name, buffer in want.buffers().items():
                    assert torch.equal(made.buffers()[name], buffer), (name, out.name, low, high, bias)
                # and in numpy
                steps = active.numpy() / scale if rule is Division else active.numpy() * (f32(1) / scale)
                steps = np.clip(np.rint(steps), -1e6, 1e6).astype(i64)
                assert_equal(unpacked(made), np.clip(steps + zero, out.low, out.high), "numpy")

    def test_float32_sums(self):
        """The result is (float32(sum) · s_lhs) · s_rhs + bias, in this order."""
        rng = generator(17)
        product = linear(rng, UINT8, True, False)
        bias = rng.normal(size=24).astype(f32)
        scale, zero = np.asarray(0.03, f32), np.asarray(5)
        q = Quantizer(INT8, scale=Static(affine=True))
        made = product.run(q, torch.from_numpy(bias), **given_for(scale, zero, INT8))
        y = product.total.astype(f32) * product.lhs * product.rhs + bias
        check_output(made, np.clip(np.rint(y / scale) + 5, -128, 127).astype(i64), scale, zero, "numpy")

    def test_where_others_cannot(self):
        """Division takes what has no exact sum."""
        q = Quantizer(INT8, scale=Static(affine=True, requantize=Division(low=0.0)))
        given = given_for(np.asarray(0.1, f32), np.asarray(-4), INT8)
        for what, (op, args, kwargs, _) in refused().items():
            made = hop.scaled(op, q, *args, **kwargs, **given)
            y = hop.scaled(op, torch.float32, *args, **kwargs).clamp(min=0.0)
            plain = {name.removeprefix("output_"): t for name, t in given.items()}
            want = hop.quantize(Quantizer(INT8, scale=Static(affine=True)), y, **plain)
            assert torch.equal(made.codes, want.codes), what


# ---- errors and spellings


def quantized(q: Quantizer, *shape: int) -> Any:
    return hop.quantize(q, torch.from_numpy(generator(18).normal(size=shape).astype(f32)))


def refused() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]]:
    """Calls that have no single exact sum, and words that say why."""
    row, group, whole = Quantizer(INT8, (1, -1)), Quantizer(INT8, (1, 16)), Quantizer(INT8)
    fp8 = Quantizer(E4M3, (1, -1), Amax())
    x, w = quantized(row, 4, 32), quantized(row, 8, 32)
    plain = torch.ones(8, 32)
    return {
        "groups of the weight": (aten.linear.default, (x, quantized(group, 8, 32)), {}, "groups"),
        "groups of the input": (aten.linear.default, (quantized(group, 4, 32), w), {}, "groups"),
        "groups of mm": (aten.mm.default, (x, quantized(Quantizer(INT8, (16, 1)), 32, 8)), {}, "groups"),
        "plain weight": (aten.linear.default, (x, plain), {}, "one factor is not quantized"),
        "plain input": (aten.linear.default, (plain, x), {}, "one factor is not quantized"),
        "floats": (aten.linear.default, (quantized(fp8, 4, 32), quantized(fp8, 8, 32)), {}, "not integers"),
        "alpha": (
            aten.addmm.default,
            (torch.ones(8), x, quantized(Quantizer(INT8, (-1, 1)), 32, 8)),
            {"alpha": 2},
            "alpha",
        ),
        "beta": (
            aten.addmm.default,
            (torch.ones(8), x, quantized(Quantizer(INT8, (-1, 1)), 32, 8)),
            {"beta": 0.5},
            "beta",
        ),
        "add": (aten.add.Tensor, (x, x), {}, "aten.add.Tensor"),
        "sub": (aten.sub.Tensor, (x, x), {}, "aten.sub.Tensor"),
        "mul by a number": (aten.mul.Scalar, (x, 2.0), {}, "one factor is not quantized"),
        "mul by a plain tensor": (aten.mul.Tensor, (x, torch.ones(32)), {}, "one factor is not quantized"),
        "mean": (aten.mean.dim, (x, [1]), {}, "aten.mean.dim"),
        "average": (aten.avg_pool2d.default, (quantized(whole, 1, 2, 4, 4), [2, 2]), {}, "aten.avg_pool2d.default"),
        "embedding": (aten.embedding.default, (w, torch.tensor([1, 2])), {}, "one scale"),
        "cat": (aten.cat.default, ([quantized(whole, 2, 3), quantized(whole, 2, 3)],), {}, "aten.cat.default"),
        "clamp": (aten.clamp.default, (quantized(whole, 2, 3), -1.0, 1.0), {}, "aten.clamp.default"),
        "view of rows": (aten.view.default, (x, [8, 16]), {}, "one scale"),
    }


REFUSED = [(f"{name}_{what.replace(' ', '_')}", name, what) for name in CONVENTIONS for what in refused()]


class TestErrors(unittest.TestCase):
    """What cannot be says which rule it breaks."""

    @parameterized.expand(REFUSED)
    @pytest.mark.quick(2)
    def test_no_exact_sum(self, _test, name, what):
        op, args, kwargs, words = refused()[what]
        convention = CONVENTIONS[name]
        q = Quantizer(INT8, scale=Static(affine=True, requantize=convention))
        given = given_for(np.asarray(0.1, f32), np.asarray(0), INT8)
        said = ("exact integer sum", "Static(requantize=Division())", repr(convention), words)
        assert_refused(ValueError, said, lambda: hop.scaled(op, q, *args, **kwargs, **given))

    @parameterized.expand([("bad", "nearest"), ("upper", "GEMMLOWP"), ("none", None), ("number", 1)])
    def test_rounding(self, _name, rounding):
        with self.assertRaisesRegex(ValueError, "FixedPoint: rounding .*'gemmlowp', 'tflite', 'away', 'even', 'ruy'"):
            FixedPoint(rounding=rounding)

    @parameterized.expand([(cls.__name__, cls) for cls in (Division, Reciprocal, FloatMultiplier, FixedPoint)])
    def test_range(self, name, cls):
        with self.assertRaisesRegex(ValueError, f"{name}: low must not be above high, got 1.0 and 0.5"):
            cls(low=1, high=0.5)
        for bound in ("low", "high"):
            for bad in (math.inf, -math.inf, math.nan, True, "0", torch.tensor(0.0)):
                with self.assertRaisesRegex(ValueError, f"{name}: {bound} must be a finite number"):
                    cls(**{bound: bad})
        assert (cls(low=1, high=1).low, cls(high=3).high, cls().low) == (1.0, 3.0, None)

    @parameterized.expand(
        [("name", "gemmlowp", INT8), ("class", FixedPoint, INT8), ("none", None, INT8)]
        + [(f.name, c, f) for f, c in itertools.product((E4M3, DYNAMIC8), (FixedPoint(), Division(low=0.0)))],
        name_func=lambda f, i, p: f"{f.__name__}_{i}_{p.args[0]}",
    )
    def test_quantizer(self, _name, convention, format: Format):
        error, words = (
            (ValueError, "returns integers")
            if isinstance(convention, Requantization)
            else (TypeError, "a convention of hop.requantization")
        )
        with self.assertRaisesRegex(error, f"Static: requantize.*{words}"):
            Quantizer(format, scale=Static(requantize=convention))

    def test_floats_divide(self):
        for format in (E4M3, DYNAMIC8):
            assert isinstance(Quantizer(format, scale=Static()).format, Float) == (format is E4M3)

    @parameterized.expand(EXACT)
    def test_scales(self, name):
        """What must be given, is."""
        x, w = (quantized(Quantizer(INT8), n, 8) for n in (2, 3))
        affine = Quantizer(INT8, scale=Static(affine=True, requantize=CONVENTIONS[name]))
        plain = Quantizer(INT8, scale=Static(requantize=CONVENTIONS[name]))
        one, zero = torch.tensor(0.1), torch.tensor(0, dtype=torch.int8)
        for q, given, word in (
            (affine, {}, "output_scale= and output_zero_point="),
            (affine, {"output_scale": one}, "output_zero_point"),
            (affine, {"output_zero_point": zero}, "output_scale"),
            (plain, {}, "output_scale="),
            (plain, {"output_scale": one, "output_zero_point": zero}, "zero point"),
            (plain, {"output_scale": torch.ones(2, 2)}, "broadcasts"),
        ):
            with self.assertRaisesRegex(ValueError, word):
                hop.scaled(aten.linear.default, q, x, w, **given)


SPELLED = [
    Division(),
    Division(low=0.0),
    Reciprocal(),
    Reciprocal(high=6.0),
    FloatMultiplier(),
    FloatMultiplier(0, 6),
    FloatMultiplier(low=-1.0, high=1.0),
    GEMMLOWP,
    TFLITE,
    FixedPoint(),
    FixedPoint(rounding="even", low=0.0),
    FixedPoint(rounding="gemmlowp", low=-1e-30, high=1e30),
    FixedPoint(high=0.1),
]


class TestSpelling(unittest.TestCase):
    """A convention is part of what a quantizer is."""

    def test_round_trip(self):
        made = [
            Quantizer(format, block, Static(affine=affine, requantize=convention))
            for format, block, affine, convention in itertools.product(
                (INT8, UINT8, INT4, UINT7), ((-1, -1), (1, -1)), (False, True), SPELLED
            )
        ]
        for q in made:
            read = Quantizer.parse(str(q))
            assert read == q and hash(read) == hash(q) and str(read) == str(q)
            assert isinstance(read.scale, Static) and isinstance(q.scale, Static)
            assert type(read.scale.requantize) is type(q.scale.requantize)
            assert vars(replace(read.scale.requantize)) == vars(replace(q.scale.requantize))
            assert pickle.loads(pickle.dumps(q)) == q
        assert len(set(made)) == len({str(q) for q in made}) == len(made)

    def test_spelled(self):
        for convention, text in {
            Division(): "Static()",
            FloatMultiplier(0, 6): "Static(requantize=FloatMultiplier(low=0.0, high=6.0))",
            GEMMLOWP: 'Static(requantize=FixedPoint(rounding="gemmlowp"))',
            FixedPoint(low=-0.0): "Static(requantize=FixedPoint(low=0.0))",
        }.items():
            assert repr(Static(requantize=convention)) == text
        assert FixedPoint(rounding="away") == FixedPoint() != GEMMLOWP != TFLITE
        assert FixedPoint(rounding="gemmlowp") == GEMMLOWP and FixedPoint(rounding="tflite") == TFLITE
        assert FloatMultiplier(low=0) == FloatMultiplier(low=0.0) != FloatMultiplier()

    def test_bad_text(self):
        for inner, word in (
            ('FixedPoint(rounding="up")', "rounding must be"),
            ("FixedPoint(low=2.0, high=1.0)", "above"),
            ("FloatMultiplier(high=inf)", "finite"),
            ("FloatMultiplier(rounding=1)", "is not a field"),
            ('"gemmlowp"', "convention"),
        ):
            with self.assertRaisesRegex(ValueError, f"position .*{word}"):
                Quantizer.parse(f"hop1:Quantizer(format=int8, scale=Static(requantize={inner}))")


class TestFixedPoint(unittest.TestCase):
    def test_in_a_decomposition(self):
        """Without the bits of the number: the same mantissa and shift, at and beside every power of two too."""
        powers = 2.0 ** torch.arange(-60, 60, dtype=torch.float64)
        ends = [torch.nextafter(powers, torch.tensor(to, dtype=torch.float64)) for to in (0.0, math.inf)]
        odd = torch.tensor([0.0, math.inf, math.nan, -1.0, 5e-324, 1e308, -math.inf], dtype=torch.float64)
        torch.manual_seed(0)
        many = torch.ldexp(torch.rand(100_000, dtype=torch.float64) + 0.5, torch.randint(-50, 50, (100_000,)))
        x = torch.cat([many, powers, *ends, odd])
        want, got = fixed_point(x), as_decomposition(fixed_point)(x)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert len(want[1].unique()) > 50
