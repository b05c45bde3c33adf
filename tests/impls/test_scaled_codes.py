"""hop.scaled of products that return codes, by a scale that is found or given, against numpy."""

import unittest
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import presets
from hop.dispatch.operand import encode
from hop.impls.scaled import scaled_buffers
from hop.numerics.formats import INT4, INT8, UINT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FixedPoint, FloatMultiplier, Requantization
from hop.numerics.scale_rules import Static
from hop.tensor.quantized import operand
from tests.support import numerics, scaled_oracles
from tests.support.scaled_checks import (
    INTEGERS,
    OUTPUTS,
    aten,
    check_quantized,
    constant,
    factor,
    generator,
    plain,
    unwrapped,
)
from tests.support.scaled_oracles import Geometry, Pair, array, assert_bits, assert_buffers, f32, f64


class TestQuantizedProducts(unittest.TestCase):
    """Products of integers whose result is quantized: what numpy makes of the float32 result."""

    @parameterized.expand(OUTPUTS)
    def test_products(self, output):
        rng = generator(*output.encode())
        for left, right in [
            ("int8_row", "int8_row"),
            ("uint8_row_affine", "int8_row_affine"),
            ("int8_groups_20", "int4_groups_32"),
            ("int8_tensor", "ternary_tensor"),
        ]:
            x, w = (
                scaled_oracles.make(INTEGERS[left], (6, 70), rng),
                scaled_oracles.make(INTEGERS[right], (12, 70), rng),
            )
            y, bias = scaled_oracles.matmul(x.e, w.e.map(np.transpose)), plain((12,), rng)
            check_quantized(aten.linear.default, output, y, x, w)
            check_quantized(aten.linear.default, output, scaled_oracles.biased(y, array(bias)), x, w, bias)
            if right != "int4_groups_32" and right != "ternary_tensor":
                want = scaled_oracles.biased(y, array(bias), 2, 0.5)
                check_quantized(aten.addmm.default, output, want, bias, x, w.mT, alpha=2, beta=0.5)

    @parameterized.expand(OUTPUTS)
    def test_convolutions(self, output):
        rng = generator(*output.encode())
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 4, 6, 7), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (8, 4, 3, 3), rng)
        y = scaled_oracles.convolution(x.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
        bias = plain((8,), rng)
        check_quantized(
            aten.conv2d.default,
            output,
            scaled_oracles.biased(y, scaled_oracles.of_channels(array(bias), 2)),
            *(x, w, bias, [1, 1], [1, 1]),
        )

    def test_floats(self):
        """A product of floats is quantized from its result in float32."""
        rng = generator(2)
        x, w = factor("bfloat16", (6, 64), rng), factor("nvfp4", (12, 64), rng)
        for held in (w, Pair(hop.pack(w.t), w.e)):
            for left in (x, factor("fp8_row", (6, 64), rng)):
                y = array(hop.scaled(aten.linear.default, torch.float32, left.t, held.t))
                for output in OUTPUTS:
                    check_quantized(aten.linear.default, output, y, left, held)

    def test_round_half_to_even(self):
        """Halves between codes, on both sides of the zero point, at both ends."""
        codes = torch.arange(-128, 128, dtype=torch.int8).reshape(1, 256)
        one = torch.ones(1, 1)
        x = hop.QuantizedTensor({"codes": codes, "scale": one}, presets.INT8_TENSOR, (1, 256), torch.float32)
        for zero in (0, 1, -128, 127):
            got = hop.scaled(
                aten.alias.default,
                presets.INT8_TENSOR_STATIC_AFFINE,
                x,
                output_scale=torch.tensor(2.0),
                output_zero_point=torch.tensor(zero, dtype=torch.int8),
            )
            want = [max(-128, min(127, round(c / 2) + zero)) for c in range(-128, 128)]
            assert got.codes.flatten().tolist() == want

    def test_forms_of_given_scales(self):
        """Numbers, rows, other float dtypes; a zero point in floats is rounded to even and clamped."""
        rng = generator(3)
        x, w = scaled_oracles.make(presets.INT8_ROW, (6, 32), rng), scaled_oracles.make(presets.INT8_ROW, (8, 32), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        q = Quantizer(UINT8, (1, -1), Static(affine=True))
        for scale, zero in [
            (torch.tensor(50.0), torch.tensor(3, dtype=torch.uint8)),
            (torch.tensor([50.0], dtype=torch.float64), torch.tensor([2.5])),
            (torch.full((6, 1), 64.0, dtype=torch.bfloat16), torch.tensor([[300.0]])),
            (torch.linspace(20, 90, 6).reshape(6, 1), torch.tensor([-1.5, 0.5, 1.5, 2.5, 254.5, 255.5]).reshape(6, 1)),
        ]:
            given = {
                "scale": np.broadcast_to(array(scale).astype(f32), (6, 1)),
                "zero_point": np.broadcast_to(array(zero), (6, 1)),
            }
            want = numerics.quantize(q, y, **given)
            got = hop.scaled(aten.linear.default, q, x.t, w.t, output_scale=scale, output_zero_point=zero)
            assert_buffers(got, q, want)


CONVENTIONS: dict[str, Requantization] = {
    "float": FloatMultiplier(),
    "float_relu": FloatMultiplier(low=0.0),
    "gemmlowp": FixedPoint(rounding="gemmlowp"),
    "tflite": FixedPoint(rounding="tflite"),
    "away": FixedPoint(),
    "even": FixedPoint(rounding="even"),
    "away_clamped": FixedPoint(low=-3.0, high=6.0),
    "gemmlowp_relu6": FixedPoint(low=0.0, high=6.0, rounding="gemmlowp"),
}


class TestRequantization(unittest.TestCase):
    """From an exact sum to codes, by every convention, against Python's integers and fractions."""

    def check(
        self,
        op: Any,
        rule: Requantization,
        total: np.ndarray,
        lhs: np.ndarray,
        rhs: np.ndarray,
        *args: Any,
        scale: np.ndarray | None = None,
    ) -> np.ndarray:
        rng = generator(total.size)
        found = np.zeros(())
        for fmt, block, unit in [
            (INT8, (-1, -1), 1.0),
            (UINT8, (-1, -1), 4.0),
            (INT8, (1, -1), 0.05),
            (INT4, (-1, -1), 9.0),
        ]:
            q = Quantizer(fmt, block, Static(affine=True, requantize=rule))
            sizes = numerics.grid(total.shape, q.block)
            own = (rng.uniform(0.5, 1, sizes) * unit).astype(f32) if scale is None else np.broadcast_to(scale, sizes)
            kind = numerics.INTEGERS[fmt.name][4]
            zero = rng.integers(fmt.low, fmt.high + 1, sizes).astype(kind)
            with np.errstate(all="ignore"):
                codes = scaled_oracles.requantized(rule, total, lhs, rhs, own, zero, fmt.name)
            want = {"codes": codes if fmt.bits == 8 else numerics.pack(codes, 4), "scale": own, "zero_point": zero}
            given = {"output_scale": torch.from_numpy(np.array(own)), "output_zero_point": torch.from_numpy(zero)}
            got = hop.scaled(op, q, *unwrapped(args), **given)
            assert_buffers(got, q, want, f"{op} {rule} {fmt.name}")
            encoded = encode([operand(a) for a in unwrapped(args)])
            buffers = scaled_buffers.reference(op, q, *(t.expand(sizes) for t in given.values()), *encoded)
            for name, b in zip(want, buffers, strict=True):
                assert_bits(b, want[name], f"{name} of the reference")
            found = codes
        return found

    @parameterized.expand(CONVENTIONS)
    @pytest.mark.quick(2)
    def test_products(self, name):
        rule, rng = CONVENTIONS[name], generator(1)
        for left, right in [
            ("int8_row", "int8_row"),
            ("uint8_tensor_affine", "int8_row_affine"),
            ("int8_tensor", "int4_row"),
        ]:
            x, w = scaled_oracles.make(INTEGERS[left], (5, 40), rng), scaled_oracles.make(INTEGERS[right], (9, 40), rng)
            total, a, b = x.e.n @ w.e.n.T, x.e.step[:, :1], w.e.step[:, 0]
            self.check(aten.linear.default, rule, total, a, b, x, w)
            bias = rng.integers(-(2**20), 2**20, 9).astype(np.int32)
            self.check(aten.linear.default, rule, total + bias, a, b, x, w, torch.from_numpy(bias))
            real = plain((9,), rng)
            in_units = array(real).astype(f64) / (a.astype(f64) * b.astype(f64))
            self.check(aten.linear.default, rule, total + np.rint(in_units).astype(np.int64), a, b, x, w, real)
            if right != "int4_row":
                self.check(aten.mm.default, rule, total, a, b, x, w.mT)

    @parameterized.expand(CONVENTIONS)
    def test_others(self, name):
        rule, rng = CONVENTIONS[name], generator(2)
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 3, 5), rng)
        w = scaled_oracles.make(Quantizer(INT8, (1, -1, -1)), (4, 3, 2), rng)
        g = Geometry([1], [1], [1], False, [0], 1)
        self.check(
            aten.conv1d.default,
            rule,
            g.of(x.e.n, w.e.n),
            x.e.step[:, :1, :1],
            w.e.step[:, :1, 0],
            *(x, w, None, [1], [1]),
        )
        a, b = (
            scaled_oracles.make(presets.INT8_ROW_AFFINE, (4, 6), rng),
            scaled_oracles.make(presets.INT8_COLUMN, (4, 6), rng),
        )
        self.check(aten.mul.Tensor, rule, a.e.n * b.e.n, a.e.step, b.e.step, a, b)
        one = np.ones((1, 1), f32)
        c = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (4, 6), rng)
        self.check(aten.relu.default, rule, np.maximum(c.e.n, 0), c.e.step, one, c)
        self.check(aten.t.default, rule, c.e.n.T, c.e.step.T, one, c)
        self.check(
            aten.max_pool1d.default, rule, np.maximum(c.e.n[:, ::2], c.e.n[:, 1::2]), c.e.step[:, ::2], one, c, [2]
        )

    @parameterized.expand(CONVENTIONS)
    @pytest.mark.quick(4)
    def test_multipliers(self, name):
        """Of all sizes, with sums of all sizes: also where a shift has nothing left, or is to the left."""
        rule, rng = CONVENTIONS[name], generator(3)
        numbers = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 5, 127 * 127, -(2**20), 2**30, 12345678], np.int64)
        seen = set()
        for exponent in range(-60, 40, 3):
            # a sum that is what we say: 0 products of codes, and the bias
            x = scaled_oracles.make(presets.INT8_TENSOR, (1, 1), rng, codes=constant(0))
            w = scaled_oracles.make(presets.INT8_TENSOR, (len(numbers), 1), rng, codes=constant(0))
            x.t.scale.mul_(2.0**exponent)
            x = Pair(x.t, scaled_oracles.read(x.t))
            found = self.check(
                aten.linear.default,
                rule,
                numbers[None],
                x.e.step[:, :1],
                w.e.step[:, 0],
                *(x, w, torch.from_numpy(numbers.astype(np.int32))),
            )
            seen |= set(found.flatten().tolist())
        assert len(seen) > 1, seen

    @parameterized.expand(CONVENTIONS)
    @pytest.mark.quick(2)
    def test_near_ties(self, name):
        """Sums that are next to a half of a code: how a multiplier is rounded, and in which order, shows there."""
        rng = generator(5)
        for _ in range(4):
            near_one: dict[str, Any] = {"codes": constant(0), "scales": lambda n, rng: rng.uniform(1, 2, n).astype(f32)}
            x = scaled_oracles.make(presets.INT8_TENSOR, (1, 1), rng, **near_one)
            w = scaled_oracles.make(presets.INT8_ROW, (250, 1), rng, **near_one)
            x.t.scale.mul_(2.0**-18)
            x = Pair(x.t, scaled_oracles.read(x.t))
            a, b, scale = x.e.step[:, :1], w.e.step[:, 0], rng.uniform(1, 2, (1, 1)).astype(f32)
            halves = np.arange(-125, 125) + 0.5
            numbers = np.rint(halves / (a.astype(f64) * b / scale.astype(f64))).astype(np.int64)
            assert np.abs(numbers).max() > 2**23, numbers
            self.check(aten.linear.default, CONVENTIONS[name], numbers, a, b, x, w, self.int32(numbers[0]), scale=scale)

    def int32(self, numbers: np.ndarray) -> Tensor:
        assert (np.abs(numbers) < 2**31).all()
        return torch.from_numpy(numbers.astype(np.int32))

    def test_ties(self):
        """Halves of both signs, by hand: up, away from zero, to even."""
        totals = torch.tensor([-5, -3, -1, 1, 3, 5], dtype=torch.int32)  # / 2
        want = {
            "tflite": [-2, -1, 0, 1, 2, 3],
            "away": [-3, -2, -1, 1, 2, 3],
            "even": [-2, -2, 0, 0, 2, 2],
            "gemmlowp": [-2, -1, 0, 1, 2, 3],
        }
        x = hop.quantize(presets.INT8_TENSOR_STATIC, torch.zeros(1, 1), scale=torch.tensor(1.0))
        w = hop.quantize(presets.INT8_TENSOR_STATIC, torch.zeros(6, 1), scale=torch.tensor(1.0))
        for rounding, codes in want.items():
            q = Quantizer(INT8, scale=Static(requantize=FixedPoint(rounding=rounding)))
            got = hop.scaled(aten.linear.default, q, x, w, totals, output_scale=torch.tensor(2.0))
            assert got.codes.flatten().tolist() == codes, rounding

    def test_activation_of_a_division(self):
        """Without a convention of integers the result is clamped, and then quantized."""
        rng = generator(4)
        x, w = scaled_oracles.make(presets.INT8_ROW, (4, 32), rng), scaled_oracles.make(presets.INT4_32, (6, 32), rng)
        y = scaled_oracles.matmul(x.e, w.e.map(np.transpose))
        for low, high in [(0.0, None), (-100.0, 150.0), (None, 10.0)]:
            q = Quantizer(UINT8, scale=Static(affine=True, requantize=hop.requantization.Division(low=low, high=high)))
            given = {"scale": np.full((1, 1), 3.0, f32), "zero_point": np.full((1, 1), 90, np.uint8)}
            clamped = np.clip(y, None if low is None else f32(low), None if high is None else f32(high))
            want = numerics.quantize(q, clamped, **given)
            scales = {f"output_{k}": torch.from_numpy(v) for k, v in given.items()}
            assert_buffers(hop.scaled(aten.linear.default, q, x.t, w.t, **scales), q, want)
