"""hop.export.ranges: bounds hold for any input, are reached where they can be, and never hide an overflow.

The oracle is the lowered program itself, run node by node: beside each sum or product that has a row, the same operator
runs on the same operands in int64, which no sum here exceeds, or in Python's integers.
"""

import itertools
import unittest
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor, fx, nn
from torch.export import Dim, export

import hop
from hop import presets
from hop.export import lower, ranges
from hop.export.analysis.ranges import MAY_OVERFLOW, PROVEN, UNKNOWN, Ranges
from hop.numerics.formats import INT4, INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from tests.support.conventions import RULES

aten = torch.ops.aten
STATIC = presets.INT8_TENSOR_STATIC_AFFINE
CHANNELS = Quantizer(INT8, (1, -1, -1, -1))
STEP = 0.125  # of activations: a power of two, so that codes are met exactly


class Function(nn.Module):
    """A function of tensors, with tensors that it holds."""

    def __init__(self, function: Callable[..., Any], **held: Tensor) -> None:
        super().__init__()
        self.function, self.names = function, list(held)
        for name, t in held.items():
            setattr(self, name, nn.Parameter(t, requires_grad=False))

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args, **{name: getattr(self, name) for name in self.names})


def program(function: Callable[..., Any], *args: Tensor, shapes: Any = None, **held: Tensor) -> Any:
    return export(Function(function, **held).eval(), args, dynamic_shapes=None if shapes is None else (shapes,))


class Recorder(fx.Interpreter):
    """Runs a lowered program and keeps, for the nodes named, what they give and what they mean: the same operator on
    the same operands in int64."""

    def __init__(self, lowered: Any, names: set[str]) -> None:
        super().__init__(lowered.graph_module)
        self.names, self.got, self.meant = names, {}, {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.name in self.names:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            wide = [a.to(torch.int64) if isinstance(a, Tensor) else a for a in args]
            if n.target is aten._to_copy.default:
                self.got[n.name] = self.meant[n.name] = wide[0]
            else:
                self.got[n.name], self.meant[n.name] = out, n.target(*wide, **kwargs)  # type: ignore[operator]
        return out


def run(lowered: Any, found: Ranges, *args: Tensor) -> Recorder:
    recorder = Recorder(lowered, {row.inner for row in found.rows})
    given, held = iter(args), {**lowered.constants, **lowered.state_dict}
    specs = lowered.graph_signature.input_specs
    inputs = [held[s.target] if s.target is not None else next(given) for s in specs]
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder


def check(lowered: Any, found: Ranges, *args: Tensor) -> Recorder:
    """Each value lies in its bounds, and is what it means where that is proven."""
    recorder = run(lowered, found, *args)
    for row in found.rows:
        meant, got = recorder.meant[row.inner], recorder.got[row.inner]
        if row.status != UNKNOWN and meant.numel():
            assert row.low is not None and row.high is not None and row.bits is not None
            assert row.low <= int(meant.min()) and int(meant.max()) <= row.high, row
            assert -(2 ** (row.bits - 1)) <= row.low and row.high < 2 ** (row.bits - 1), row
        if row.status == PROVEN:
            assert torch.equal(got.to(torch.int64), meant), row
            low, high = (torch.iinfo(row.accumulator).min, torch.iinfo(row.accumulator).max)
            assert meant.numel() == 0 or (low <= int(meant.min()) and int(meant.max()) <= high), row
    return recorder


def only(found: Ranges) -> Any:
    (row,) = found.products
    return row


def weights(seed: int, *shape: int) -> Tensor:
    """Codes, as a quantized tensor whose scales are 1."""
    codes = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).float()
    codes[(slice(None), *[0] * (len(shape) - 1))] = 127.0  # the scale of each channel is 1
    q = presets.INT8_ROW if len(shape) == 2 else CHANNELS
    made = hop.quantize(q, codes)
    assert torch.equal(made.codes.float(), codes)  # type: ignore[attr-defined]
    return made


def activation(x: Tensor, zero: int) -> Any:
    return hop.quantize(STATIC, x, scale=torch.tensor(STEP), zero_point=torch.tensor(float(zero)))


def extreme(signs: np.ndarray, zero: int, *, largest: bool) -> Tensor:
    """The input whose codes make the sum with weights of these signs as large, or as small, as it gets."""
    codes = np.where((signs > 0) == largest, 127, -128)
    return torch.from_numpy((codes - zero) * STEP).float()


class TestProducts(unittest.TestCase):
    @parameterized.expand([(z,) for z in (-128, -3, 0, 90, 127)])
    @pytest.mark.full
    def test_of_known_weights_are_reached(self, zero):
        w = weights(zero + 200, 6, 40)
        codes = w.codes.numpy().astype(np.int64)  # type: ignore[attr-defined]
        p = program(
            lambda x, w: hop.scaled(aten.linear.default, torch.float32, activation(x, zero), w), torch.zeros(2, 40), w=w
        )
        found, lowered = ranges(p), lower(p)
        row = only(found)
        assert (row.node, row.operator, row.accumulator) == ("hop_scaled", "aten.mm.default", torch.int32)
        assert row.status == PROVEN and found.proven
        # the oracle: every code of every channel chosen by itself
        ends = np.stack([codes * (c - zero) for c in (-128, 127)])
        assert (row.low, row.high) == (int(ends.min(0).sum(1).min()), int(ends.max(0).sum(1).max()))
        for largest, bound, channel in (
            (True, row.high, ends.max(0).sum(1).argmax()),
            (False, row.low, ends.min(0).sum(1).argmin()),
        ):
            x = extreme(codes[channel], zero, largest=largest)[None]
            recorder = check(lowered, found, x.expand(2, 40).contiguous())
            assert int(recorder.got[row.inner][0, channel]) == bound

    @parameterized.expand([("", 0, 1, 1), ("padded", 1, 1, 1), ("strided", 0, 2, 1), ("grouped", 1, 1, 2)])
    @pytest.mark.full
    def test_of_convolutions_are_reached(self, _name, padding, stride, groups):
        zero, w = 5, weights(3, 4, 4 // groups, 3, 3)
        bias = torch.tensor([1000, -20000, 7, 30000], dtype=torch.int32)

        def convolve(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
            geometry = ([stride] * 2, [padding] * 2, [1, 1], groups)
            return hop.scaled(aten.conv2d.default, torch.float32, activation(x, zero), w, bias, *geometry)

        p = program(convolve, torch.zeros(1, 4, 7, 7), w=w, bias=bias)
        found, lowered = ranges(p), lower(p)
        row = only(found)
        (with_bias,) = (r for r in found.rows if r.operator == "aten.add.Tensor" and r.accumulator == torch.int32)
        assert row.status == with_bias.status == PROVEN
        assert row.accumulator == torch.int32  # it sums in int64, and is cast to int32
        codes = w.codes.numpy().astype(np.int64)  # type: ignore[attr-defined]
        reached: dict[str, list[int]] = {row.inner: [], with_bias.inner: []}
        for channel, largest in itertools.product(range(4), (True, False)):
            patch = extreme(codes[channel], zero, largest=largest)
            x = torch.zeros(1, 4, 7, 7)
            start = channel // (4 // groups) * (4 // groups) if groups > 1 else 0
            x[0, start : start + 4 // groups, 2:5, 2:5] = patch
            recorder = check(lowered, found, x)
            for name, values in reached.items():
                values += [int(recorder.meant[name].min()), int(recorder.meant[name].max())]
        for r in (row, with_bias):
            assert (min(reached[r.inner]), max(reached[r.inner])) == (r.low, r.high)

    @pytest.mark.full
    def test_of_two_inputs_are_reached(self):
        p = program(
            lambda a, b: hop.out_dtype(aten.bmm.default, torch.int32, a, b),
            torch.zeros(2, 3, 9, dtype=torch.int8),
            torch.zeros(2, 9, 4, dtype=torch.int8),
        )
        found, lowered = ranges(p), lower(p)
        row = only(found)
        assert (row.low, row.high, row.status) == (-128 * 127 * 9, 128 * 128 * 9, PROVEN)
        assert row.known == "9 products, -128..127 by -128..127"
        low = torch.full((2, 3, 9), -128, dtype=torch.int8)
        for b, bound in ((-128, row.high), (127, row.low)):
            recorder = check(lowered, found, low, torch.full((2, 9, 4), b, dtype=torch.int8))
            assert set(recorder.got[row.inner].flatten().tolist()) == {bound}
        narrow = ranges(p, {"args_0": (-7, 7), "args_1": (0, 3)})
        assert (only(narrow).low, only(narrow).high) == (-7 * 3 * 9, 7 * 3 * 9)

    @pytest.mark.full
    def test_a_known_left_factor(self):
        w = torch.randint(-128, 128, (5, 12), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
        x = torch.zeros(12, 3, dtype=torch.int8)
        p = program(lambda x, w: hop.out_dtype(aten.mm.default, torch.int32, w, x), x, w=w)
        found, lowered = ranges(p), lower(p)
        row = only(found)
        n = w.long()
        ends = torch.stack([n * -128, n * 127])
        assert (row.low, row.high) == (int(ends.amin(0).sum(1).min()), int(ends.amax(0).sum(1).max()))
        best = int(ends.amax(0).sum(1).argmax())
        x = torch.where(n[best] > 0, 127, -128).to(torch.int8)[:, None].expand(12, 3).contiguous()
        assert int(check(lowered, found, x).got[row.inner][best, 0]) == row.high

    @pytest.mark.full
    def test_groups_have_sums_of_their_own(self):
        """8da4w: 4-bit weights in groups of 32, activations with a zero point for each row."""
        w = hop.quantize(Quantizer(INT4, (1, 32)), torch.randn(6, 96, generator=torch.Generator().manual_seed(4)))
        p = program(
            lambda x, w: hop.scaled(aten.linear.default, torch.float32, hop.quantize(presets.INT8_ROW_AFFINE, x), w),
            torch.zeros(3, 96),
            w=w,
        )
        found, lowered = ranges(p), lower(p)
        codes = hop.dequantize(w).reshape(6, 3, 32) / w.scale.reshape(6, 3, 1)  # type: ignore[attr-defined]
        sums = codes.round().long().abs().sum(-1).amax(0) * 255  # codes and zero points in -128..127
        assert [(r.low, r.high) for r in found.products] == [(-int(n), int(n)) for n in sums]
        assert found.proven and {r.node for r in found.rows} >= {"hop_scaled"}
        widest = next(line for line in str(found).splitlines() if line.startswith("hop_scaled "))
        assert f"{int(sums.max()):,}" in widest and widest.endswith(" 3")
        for scale in (1.0, 1e30, 1e-30):
            check(lowered, found, torch.randn(3, 96) * scale)

    @pytest.mark.full
    def test_transposed_convolution(self):
        w = torch.randint(-128, 128, (4, 3, 2, 2), dtype=torch.int8, generator=torch.Generator().manual_seed(5))
        p = program(
            lambda x, w: hop.out_dtype(aten.convolution.default, torch.int32, x, w, None, [1, 1], [0, 0], [1, 1], True,
                                       [0, 0], 2),
            torch.zeros(1, 4, 5, 5, dtype=torch.int8),
            w=w,
        )  # fmt: skip
        found, lowered = ranges(p), lower(p)
        row = only(found)
        n = w.long().reshape(2, 2, 3, 4)  # groups, inputs, outputs, kernel
        ends = torch.stack([n * -128, n * 127])
        assert row.high == int(ends.amax(0).sum((1, 3)).max()) and row.low == int(ends.amin(0).sum((1, 3)).min())
        for _ in range(5):
            check(lowered, found, torch.randint(-128, 128, (1, 4, 5, 5), dtype=torch.int8))

    @pytest.mark.full
    def test_an_empty_sum(self):
        zeros = torch.zeros(2, 0, dtype=torch.int8), torch.zeros(0, 3, dtype=torch.int8)
        p = program(lambda a, b: hop.out_dtype(aten.mm.default, torch.int32, a, b), *zeros)
        assert (only(ranges(p)).low, only(ranges(p)).high) == (0, 0)


class TestOverflow(unittest.TestCase):
    @parameterized.expand([("largest_that_fits", 33025, PROVEN), ("one_more", 33026, MAY_OVERFLOW)])
    @pytest.mark.quick(2)
    def test_of_a_long_sum(self, _name, k, status):
        """Of products of 255 by 255, K = 33025 is the longest sum that int32 holds."""
        w = torch.full((k, 2), 255, dtype=torch.uint8)
        p = program(
            lambda x, w: hop.out_dtype(aten.mm.default, torch.int32, x, w), torch.zeros(1, k, dtype=torch.uint8), w=w
        )
        found = ranges(p)
        row = only(found)
        assert (row.low, row.high, row.status) == (0, 255 * 255 * k, status)
        recorder = check(lower(p), found, torch.full((1, k), 255, dtype=torch.uint8))
        wrapped = int(recorder.got[row.inner].min()) < 0
        assert wrapped == (status == MAY_OVERFLOW) and found.proven != wrapped
        assert row.bits == (32 if status == PROVEN else 33)
        assert status in str(found)

    @pytest.mark.full
    def test_of_a_bias(self):
        w = weights(8, 2, 8)
        bias = torch.tensor([2**31 - 1, 0], dtype=torch.int32)
        p = program(
            lambda x, w, b: hop.scaled(aten.linear.default, torch.float32, activation(x, 0), w, b),
            torch.zeros(1, 8),
            w=w,
            b=bias,
        )
        found = ranges(p)
        assert only(found).status == PROVEN and not found.proven
        (row,) = (r for r in found.rows if r.status != PROVEN)
        assert (row.operator, row.accumulator, row.node) == ("aten.add.Tensor", torch.int32, "hop_scaled")
        x = extreme(w.codes[0].numpy(), 0, largest=True)[None]  # type: ignore[attr-defined]
        recorder = check(lower(p), found, x)
        assert row.high is not None and int(recorder.meant[row.inner].max()) == row.high > 2**31 - 1
        assert int(recorder.got[row.inner][0, 0]) < 0  # it wraps

    def test_of_a_sum_in_int8(self):
        p = program(lambda a: a + a.flip(0), torch.zeros(4, dtype=torch.int8))
        (row,) = ranges(p).rows
        assert (row.low, row.high, row.bits, row.status) == (-256, 254, 9, MAY_OVERFLOW)

    @pytest.mark.full
    def test_of_a_cast(self):
        p = program(lambda a: (a.to(torch.int32) * 3).to(torch.int8) + 0, torch.zeros(4, dtype=torch.int8))
        found = ranges(p)
        assert [(r.operator, r.status) for r in found.rows][:2] == [
            ("aten.mul.Tensor", PROVEN),
            ("aten._to_copy.default", MAY_OVERFLOW),
        ]
        check(lower(p), found, torch.tensor([-128, 127, 5, -6], dtype=torch.int8))

    @pytest.mark.full
    def test_beyond_64_bits(self):
        p = program(lambda a: a * a.flip(0), torch.zeros(4, dtype=torch.int64))
        (row,) = ranges(p).rows
        assert (row.low, row.high, row.bits) == (-(2**63) * (2**63 - 1), 2**126, 128)
        assert row.status == MAY_OVERFLOW


class TestUnknown(unittest.TestCase):
    def test_operator(self):
        p = program(lambda a: a.to(torch.int32).cumsum(0), torch.zeros(4, dtype=torch.int8))
        found = ranges(p)
        assert [(r.status, r.known, r.high) for r in found.rows] == [(UNKNOWN, "no rule for this operator", None)]
        assert not found.proven and "no rule for this operator" in str(found)

    def test_what_follows_has_the_range_of_its_dtype(self):
        p = program(lambda a: a.to(torch.int32).cumsum(0) + 1, torch.zeros(4, dtype=torch.int8))
        row = ranges(p).rows[-1]
        assert (row.low, row.high, row.status) == (-(2**63) + 1, 2**63, MAY_OVERFLOW)

    @pytest.mark.full
    def test_program_in_a_program(self):
        def function(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.mm(x).float(), lambda x: x.float(), (x,))

        found = ranges(program(function, torch.zeros(3, 3, dtype=torch.int32)))
        assert not found.proven and UNKNOWN in {r.status for r in found.rows}

    @pytest.mark.full
    def test_sizes(self):
        """A summed dimension without an upper bound, with one, and a batch without one."""
        dtype = torch.int8

        def product(a: Tensor, b: Tensor) -> Tensor:
            return hop.out_dtype(aten.mm.default, torch.int32, a, b)

        a, b = torch.zeros(4, 20, dtype=dtype), torch.zeros(20, 5, dtype=dtype)
        (row,) = ranges(program(product, a, b, shapes=({1: Dim("k")}, {0: Dim("k")}))).rows
        assert row.status == UNKNOWN and "without an upper bound" in row.known, row
        k = Dim("k", max=1000)
        (row,) = ranges(program(product, a, b, shapes=({1: k}, {0: k}))).rows
        assert (row.low, row.high, row.status) == (-128 * 127 * 1000, 128 * 128 * 1000, PROVEN)
        assert row.known.startswith("1,000 at most products")
        (row,) = ranges(program(product, a, b, shapes=({0: Dim("m")}, {}))).rows
        assert (row.high, row.status) == (128 * 128 * 20, PROVEN)


class TestInputs(unittest.TestCase):
    @pytest.mark.full
    def test_bounds_of_floats(self):
        w = weights(9, 3, 16)
        p = program(
            lambda x, w: hop.scaled(aten.linear.default, torch.float32, activation(x, 0), w), torch.zeros(2, 16), w=w
        )
        found = ranges(p, {"args_0": (-1.0, 2.0)})
        assert only(found).known.endswith("factors -8..16")
        recorder = check(lower(p), found, torch.where(w.codes[0] > 0, 2.0, -1.0).expand(2, 16).contiguous())  # type: ignore[attr-defined]
        assert int(recorder.meant[only(found).inner].max()) <= only(found).high
        assert (only(ranges(p)).high or 0) > (only(found).high or 0)

    @pytest.mark.full
    def test_a_buffer_that_is_written_to_is_unknown(self):
        class Counter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fixed = nn.Buffer(torch.tensor([3], dtype=torch.int32))
                self.count = nn.Buffer(torch.tensor([3], dtype=torch.int32))

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                self.count.add_(1)
                return x * self.fixed, x * self.count

        found = ranges(export(Counter(), (torch.zeros(2, dtype=torch.int8),)))
        assert [r.status for r in found.rows if r.operator == "aten.mul.Tensor"] == [PROVEN, MAY_OVERFLOW]

    @pytest.mark.full
    def test_errors(self):
        p = program(lambda a: a + 1, torch.zeros(4, dtype=torch.int8))
        with pytest.raises(ValueError, match=r"inputs must name inputs of the program, got 'x'; take one of args_0"):
            ranges(p, {"x": (0, 1)})
        for wrong in ((1, 0), (0.5, 1), (0, 1, 2), 3):
            with pytest.raises(ValueError, match=r"inputs\['args_0'\] must be a pair of ascending numbers"):
                ranges(p, {"args_0": wrong})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match=r"torch.int8 ranges from -128 to 127"):
            ranges(p, {"args_0": (0, 200)})
        with pytest.raises(TypeError, match=r"must be a torch.export.ExportedProgram, got Linear"):
            ranges(nn.Linear(2, 2))  # type: ignore[arg-type]


def squared(n: Tensor) -> Tensor:
    return n * n


def rest(n: Tensor, by: int) -> Tensor:
    """As requantization has it."""
    return n - torch.div(n, by, rounding_mode="floor") * by


# Integer operators on two int8 tensors.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a.int() + b,
    "sub": lambda a, b: a.int() - b,
    "alpha": lambda a, b: torch.sub(a.int(), b, alpha=3),
    "mul": lambda a, b: a.int() * b,
    "square": lambda a, b: squared(a.int()),
    "neg": lambda a, b: -(a.int()),
    "abs": lambda a, b: (a.int() + 3).abs(),
    "floor": lambda a, b: torch.div(a.int(), 7, rounding_mode="floor"),
    "floor_of_negative": lambda a, b: torch.div(a.int(), -7, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a.int(), 7, rounding_mode="trunc"),
    "remainder": lambda a, b: (a.int() % 7) * b,
    "rest": lambda a, b: rest(a.int(), 7) * b,
    "clamp": lambda a, b: a.int().clamp(-5, 50) * b,
    "relu": lambda a, b: a.int().relu() * b,
    "maximum": lambda a, b: torch.maximum(a.int(), b.int().clamp(min=4)) * 2,
    "minimum": lambda a, b: torch.minimum(a.int(), b.int().clamp(max=4)) * 2,
    "where": lambda a, b: torch.where(a > 0, b.int() + 1000, b.int() - 1) * 1,
    "and": lambda a, b: (a.int() & 15) * b,
    "padded": lambda a, b: torch.nn.functional.pad(a.int() + 300, (1, 1)) * 1,
    "float": lambda a, b: (a.float() * 0.37).round().clamp(-20, 31).to(torch.int32) * b,
    "hardtanh": lambda a, b: torch.nn.functional.hardtanh(a.float() * 0.37, -20, 31).round().to(torch.int32) * b,
    "numbers": lambda a, b: aten.sub.Scalar(aten.div.Scalar(aten.add.Scalar(a.float(), 3), 0.5), 1).to(torch.int32) * b,
    "int8": lambda a, b: a + b,
    "uint8": lambda a, b: a.to(torch.uint8).int() * b,
}


class TestElementwise(unittest.TestCase):
    @parameterized.expand(list(ELEMENTWISE))
    @pytest.mark.sampled(2)
    @pytest.mark.full
    def test_every_pair(self, name):
        """All 65 536 pairs: the last result has the bounds that it takes."""
        values = torch.arange(-128, 128, dtype=torch.int8)
        a, b = torch.meshgrid(values, values, indexing="ij")
        p = program(lambda a, b: ELEMENTWISE[name](a, b), a.flatten(), b.flatten())
        found = ranges(p)
        recorder = check(lower(p), found, a.flatten(), b.flatten())
        row = found.rows[-1]
        meant = recorder.meant[row.inner]
        assert (row.low, row.high) == (int(meant.min()), int(meant.max())), row
        assert row.status == (MAY_OVERFLOW if name == "int8" else PROVEN)
        assert found.proven == (name not in ("int8", "uint8"))


def chain(rule: str, seed: int, low: float | None) -> tuple[Any, list[Tensor]]:
    """Two layers and a relu of random sizes, weights, scales and zero points."""
    rng = np.random.default_rng(seed)
    k, n, m = (int(v) for v in rng.integers(1, 40, 3))
    zeros = [int(z) for z in rng.integers(-128, 128, 3)]
    scales = [float(s) for s in 2.0 ** rng.uniform(-6, 2, 3)]
    q = Quantizer(INT8, scale=Static(affine=True, requantize=replace(RULES[rule], low=low)))

    def function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        at = [
            {"output_scale": torch.tensor(s), "output_zero_point": torch.tensor(z, dtype=torch.int8)}
            for s, z in zip(scales, zeros, strict=True)
        ]
        h = hop.quantize(STATIC, x, scale=torch.tensor(scales[0]), zero_point=torch.tensor(float(zeros[0])))
        h = hop.scaled(aten.linear.default, q, h, w, b, **at[1])
        return hop.dequantize(hop.scaled(aten.linear.default, q, h, v, **at[2]))

    bias = torch.from_numpy(rng.integers(-(10**6), 10**6, n).astype(np.int32))
    held = {"w": weights(seed, n, k), "v": weights(seed + 1, m, n), "b": bias}
    x = torch.from_numpy(rng.normal(size=(4, k))).float()
    inputs = [x * s for s in (1.0, 1e3, 1e30)] + [torch.full((4, k), v) for v in (torch.inf, -torch.inf, torch.nan)]
    codes = held["w"].codes.numpy()  # type: ignore[attr-defined]
    for largest in (True, False):
        ends = np.where((codes > 0) == largest, 127, -128) - zeros[0]
        inputs.append(torch.from_numpy(ends[rng.integers(0, n, 4)] * scales[0]).float())
    return program(function, x, **held), inputs


class TestRandomPrograms(unittest.TestCase):
    @parameterized.expand([(rule, i) for i, rule in enumerate(RULES)])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_bounds_hold(self, rule, i):
        p, inputs = chain(rule, i, low=None if i % 2 else 0.0)
        found, lowered = ranges(p), lower(p)
        assert found.proven and len(found.products) == 2, str(found)
        for x in inputs:
            check(lowered, found, x)

    @pytest.mark.full
    def test_a_relu_bounds_what_follows(self):
        """The codes after it begin at the zero point: what the next layer sums has no negative factor."""
        p, inputs = chain("gemmlowp", 7, 0.0)
        found, lowered = ranges(p), lower(p)
        second = found.products[1]
        low, high = (int(n) for n in second.known.split("factors ")[1].split(".."))
        assert low == 0 < high <= 255
        for x in inputs:
            check(lowered, found, x)
