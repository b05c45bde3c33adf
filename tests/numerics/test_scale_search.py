"""Scales of least squared error: against numpy, a block after the other; on every route; and what they keep."""

import math
import unittest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import Quantizer, formats
from hop.kernels.aten.quantize import fast_format
from hop.kernels.cpu import native
from hop.numerics.formats import INT3, INT5, INT6, INT8, IQ4_NL, UINT2, UINT4, UINT5, UINT6, UTERNARY
from hop.numerics.scale_rules import StoredScales
from hop.numerics.stored_scales import E2M1_DOUBLED, E8M0_HALF, UE4M3_HALF
from tests.numerics.test_quantizer import KINDS, generator

CASES = {
    "int4": Quantizer(formats.INT4, (1, 32), StoredScales(search=3)),
    "one": Quantizer(INT5, (1, 32), StoredScales(torch.float32, search=1)),
    "codebook": Quantizer(IQ4_NL, (1, 32), StoredScales(torch.bfloat16, search=5)),
    "ternary": Quantizer(UTERNARY, (1, 256), StoredScales(search=3)),
    "offset": Quantizer(UINT4, (1, 32), StoredScales(offset=True, search=3)),
    "offset_float32": Quantizer(UINT5, (1, 16), StoredScales(torch.float32, offset=True, search=9)),
    "outer": Quantizer(INT6, (1, 16), StoredScales(INT8, (1, 64), search=9)),
    "outer_unsigned": Quantizer(INT3, (1, 16), StoredScales(UINT6, (1, 64), torch.float32, search=3)),
    "outer_divided": Quantizer(formats.INT4, (1, 16), StoredScales(INT6, (1, 64), divided=True, search=3)),
    "outer_codebook": Quantizer(IQ4_NL, (1, 32), StoredScales(INT6, (1, 256), search=3)),
    "outer_offset": Quantizer(UINT4, (1, 32), StoredScales(UINT6, (1, 256), offset=True, search=9)),
    "outer_offset_row": Quantizer(UINT2, (1, 16), StoredScales(UINT4, (1, -1), torch.float32, True, search=3)),
    "power_of_two": Quantizer(E2M1_DOUBLED, (1, 32), StoredScales(E8M0_HALF, search=3)),
    "coded": Quantizer(E2M1_DOUBLED, (1, 16), StoredScales(UE4M3_HALF, search=5)),
}
ALL = list(CASES.items())


def rule_of(q: Quantizer) -> StoredScales:
    assert isinstance(q.scale, StoredScales)
    return q.scale


# ---- the searches, in numpy

f32, f64 = np.float32, np.float64


def nearest(q: Quantizer, y: np.ndarray) -> np.ndarray:
    """y rounded to the values of q's format, as float64; elements have tests of their own (test_formats)."""
    zero = rule_of(q).zero(q.format)
    own = (zero,) if q.format.is_integer else ()
    codes = q.format.encode(torch.from_numpy(np.asarray(y, f32)), None, *own)
    return q.format.decode(codes, *own).numpy().astype(f64)


def shifts(count: int) -> list[float]:
    return sorted((0.8 * i / max(count // 2, 1) for i in range(-(count // 2), count // 2 + 1)), key=abs)


def scale_of(q: Quantizer, x: np.ndarray) -> np.float32:
    """The scale of one block, without an offset."""
    rule, zero = rule_of(q), rule_of(q).zero(q.format)
    values = np.array(q.format.numbers) - zero if q.format.is_integer else np.array(q.format.numbers)
    may_be_negative = isinstance(rule.scale, torch.dtype) or (rule.scale.min < 0 and not rule.divided)
    last, step = values[-1], values[-1] - values[-2]
    if may_be_negative and -values[0] > values[-1]:
        last, step = values[0], values[0] - values[1]
    above, below = max(x.max(), f32(0)), max((-x).max(), f32(0))
    e = max(above, below) if last > 0 or above > below else -below
    power = 2.0 ** math.floor(24 - math.log2(len(x) * np.abs(values).max()))
    unit = f32(e / power)
    units = np.rint(x / (unit or f32(1))).astype(f64)
    best, scale = -math.inf, f32(e / f32(last))
    for c in shifts(rule.search):
        rounded = nearest(q, units * ((last + c * step) / power))
        with np.errstate(all="ignore"):
            fitted = (units @ rounded) / (rounded @ rounded)
            gain = fitted * (units @ rounded)
        if gain > best:
            best, scale = gain, f32(f64(unit) * fitted)
    return scale


def code_of(q: Quantizer, x: np.ndarray) -> np.float32:
    """The scale of one block, among the values of a format."""
    format, last = rule_of(q).scale, q.format.max
    assert isinstance(format, formats.Format)
    values = np.array([v for v in format.numbers if v >= 0])
    amax = np.abs(x).max()
    power = 2.0 ** math.floor(24 - math.log2(len(x) * last))
    unit = f32(amax / power)
    units = np.rint(x / (unit or f32(1))).astype(f64)
    start = int(format.encode(torch.tensor(amax / f32(last))))
    best, found = -math.inf, values[start]
    for step in sorted(range(-(rule_of(q).search // 2), rule_of(q).search // 2 + 1), key=abs):
        s = f32(values[min(max(start + step, 0), len(values) - 1)])
        rounded = nearest(q, x / (s or f32(1)))
        with np.errstate(all="ignore"):
            part = f64(s) / f64(unit)
            gain = part * (2 * (units @ rounded) - part * (rounded @ rounded))
        if gain > best:
            best, found = gain, s
    return f32(found)


def range_of(q: Quantizer, x: np.ndarray) -> tuple[np.float32, np.float32]:
    """The scale and the offset of one block."""
    rule, last = rule_of(q), int(q.format.max)
    has_zero = not isinstance(rule.scale, torch.dtype)
    low, high = (min(x.min(), f32(0)), max(x.max(), f32(0))) if has_zero else (x.min(), x.max())
    with np.errstate(over="ignore"):
        width = min(high - low, np.finfo(f32).max)
        power = 2.0 ** math.floor(24 - math.log2(len(x) * last))
        unit = f32(width / power)
        units = np.rint((x - low) / (unit or f32(1))).astype(f64)
    best, found = -math.inf, (f32(width / f32(last)), f32(-low))
    for c in shifts(rule.search):
        codes = nearest(q, units * ((last + c) / power))
        n, sx, sq, xq, qq = len(x), units.sum(), codes.sum(), units @ codes, codes @ codes
        with np.errstate(all="ignore"):
            slope, start = (n * xq - sx * sq) / (n * qq - sq * sq), (qq * sx - sq * xq) / (n * qq - sq * sq)
            if has_zero and start > -low / f64(unit):
                start = -low / f64(unit)
                slope = (xq - start * sq) / qq
            gain = slope * (2 * xq - slope * qq - 2 * start * sq) + start * (2 * sx - n * start)
            if gain > best:
                best, found = gain, (f32(f64(unit) * slope), f32(-(f64(low) + f64(unit) * start)))
    return found


def stored(q: Quantizer, x: np.ndarray) -> np.ndarray:
    """Numbers of the blocks of a row as their stored form represents them."""
    rule, out = rule_of(q), x.copy()
    if isinstance(rule.scale, torch.dtype):
        most = torch.finfo(rule.scale).max
        return torch.from_numpy(x).clamp(-most, most).to(rule.scale).float().numpy()
    if rule.outer is None:
        return rule.scale.decode(rule.scale.encode(torch.from_numpy(x))).numpy()
    count = len(x) if rule.outer[-1] == -1 else rule.outer[-1] // q.block[-1]
    most = torch.finfo(rule.outer_dtype).max
    for i in range(0, len(x), count):
        group = x[i : i + count]
        outer, zero = f32(group.max() / f32(rule.scale.max)), (0,) if rule.scale.is_integer else ()
        if rule.scale.min < 0 and not rule.divided and -group.min() > max(group.max(), 0):
            outer = f32(group.min() / f32(rule.scale.min))
        elif rule.scale.min < 0 and not rule.divided:
            outer = f32(group.max() / f32(rule.scale.min))
        if rule.divided:
            outer = max(f32(1) / outer if outer else f32(1), f32(torch.finfo(rule.outer_dtype).tiny))
        outer = f32(torch.tensor(outer).clamp(-most, most).to(rule.outer_dtype).float().item())
        by = f32(1) / outer if rule.divided else outer
        codes = rule.scale.encode(torch.from_numpy(group / by if by else np.zeros_like(group)), None, *zero)
        numbers = rule.scale.decode(codes, *zero).numpy()
        out[i : i + count] = numbers / outer if rule.divided else outer * numbers
    return out


def expected(q: Quantizer, x: np.ndarray) -> np.ndarray:
    """A row once it is quantized."""
    rule, parts = rule_of(q), x.reshape(-1, q.block[-1])
    if not rule.offset:
        find = code_of if not isinstance(rule.scale, torch.dtype) and rule.outer is None else scale_of
        s = stored(q, np.array([find(q, part) for part in parts], f32))
        y = [part / (scale or f32(1)) * f32(scale != 0) for part, scale in zip(parts, s, strict=True)]
        return np.concatenate([f32(nearest(q, part)) * scale for part, scale in zip(y, s, strict=True)])
    pairs = [range_of(q, part) for part in parts]
    s, m = stored(q, np.array([p[0] for p in pairs], f32)), np.array([p[1] for p in pairs], f32)
    if rule.outer is not None:
        for i, part in enumerate(parts):
            y = (part + m[i]) / (s[i] or f32(1))
            unit = 2.0 ** math.floor(24 - math.log2(len(part) * 8))
            off = np.rint(np.clip(f32(nearest(q, y)) - y, -8, 8) * f32(unit)).astype(f64)
            m[i] = max(f32(f64(m[i]) + f64(s[i]) * (off.sum() / (len(part) * unit))), f32(0))
    m = stored(q, m)
    rows = zip(parts, s, m, strict=True)
    y = [(part + b) / (a or f32(1)) * f32(a != 0) for part, a, b in rows]
    return np.concatenate([f32(nearest(q, part)) * a - b for part, a, b in zip(y, s, m, strict=True)])


class TestValues(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(5)
    def test_bits(self, _name, q):
        for seed, kind in enumerate(("normal", "small", "halves", "quarters", "positive", "zeros")):
            x = KINDS["normal" if kind == "small" else kind]((2, 512), generator(seed)) * (
                2.0**-30 if kind == "small" else 1
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                want = np.stack([expected(q, row.numpy()) for row in x])
            got = hop.dequantize(hop.quantize(q, x)).numpy()
            assert np.array_equal(got, want), f"{kind}: {int((got != want).sum())} of {got.size} differ"

    @parameterized.expand(ALL)
    def test_less_error(self, _name, q):
        """Than without a search, and at most that of more scales; each by sums over all blocks."""
        for kind in ("normal", "positive", "halves"):
            x = KINDS[kind]((32, 1024), generator())
            errors = [error(replace(q, scale=replace(rule_of(q), search=n)), x) for n in (0, rule_of(q).search, 19)]
            assert errors[1] <= errors[0] and errors[2] <= errors[1] * 1.001, (kind, errors)

    def test_negative_scales(self):
        """A block of which the element of largest magnitude is positive has the code -8 for it."""
        x = torch.linspace(-0.6, 1.0, 32).reshape(1, 32)
        t = hop.quantize(CASES["int4"], x)
        assert t.scale.item() < 0 and error(CASES["int4"], x) < 0.8 * error(Quantizer(formats.INT4, (1, 32)), x)

    def test_offsets_away_from_zero(self):
        """The range of a block is its own, on either side of 0."""
        x = torch.rand(16, 64, generator=generator()) + 5
        for sign in (1, -1):
            assert error(CASES["offset_float32"], sign * x) < 0.2 * error(replace_search(CASES["offset_float32"], 0), x)

    @parameterized.expand([(name, q) for name, q in ALL if rule_of(q).outer is None])
    def test_quantized_numbers_stay(self, _name, q):
        """What has been quantized is its own best approximation: codes that reach the ends, at any scale."""
        numbers = torch.tensor(q.format.numbers) - (rule_of(q).zero(q.format) if q.format.is_integer else 0)
        at = torch.randint(0, len(numbers), (64, q.block[-1]), generator=generator())
        at[:, :2] = torch.tensor([0, len(numbers) - 1])
        s = torch.tensor([[0.25], [0.5], [1.0], [2.0]]).repeat(16, 1)
        x = numbers[at] * s + (3 * s if rule_of(q).offset else 0)
        torch.testing.assert_close(hop.fake_quantize(q, x), x, rtol=1e-4, atol=0)

    @parameterized.expand(ALL)
    def test_numbers_that_are_not_finite(self, _name, q):
        """As without a search: their block, or outer block, is NaN; or about 0 where scales have no NaN."""
        for kind in ("nan", "inf", "bits"):
            x = KINDS[kind]((6, 512), generator())
            got, plain = (hop.fake_quantize(replace_search(q, n), x) for n in (rule_of(q).search, 0))
            assert torch.equal(got.isnan(), plain.isnan()), kind

    @parameterized.expand(ALL)
    def test_large_and_small(self, _name, q):
        """Numbers far from 1 stay finite."""
        for kind in ("huge", "sizes"):
            assert hop.fake_quantize(q, KINDS[kind]((6, 512), generator()) / 16).isfinite().all(), kind


class TestRoutes(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(3)
    def test_routes_agree(self, _name, q):
        """Eager mode, a part at a time or at once, the reference, and compiled programs."""
        x = torch.randn(300, 512, generator=generator())  # more than is searched at a time
        t = hop.quantize(q, x)
        made = t.buffers()
        for name, buffer in q.quantize(x).items():
            assert torch.equal(buffer.view(torch.uint8), made[name].view(torch.uint8)), name
        few = hop.quantize(q, x[:7]).buffers()
        for name, buffer in few.items():
            assert torch.equal(buffer, made[name][:7]), name
        torch.compiler.reset()
        call: Any = torch.compile(lambda x: hop.fake_quantize(q, x), backend="aot_eager", fullgraph=True)
        assert torch.equal(call(x), hop.dequantize(t))

    @parameterized.expand(["int4", "codebook"])
    def test_decomposed(self, name):
        """Scales of 16 bits are rounded through their bits for Inductor, which core ATen cannot express."""
        q, x = CASES[name], torch.randn(6, 512, generator=generator())

        class Fake(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return hop.fake_quantize(q, x)

        program = torch.export.export(Fake(), (x,))
        low = program.run_decompositions(hop.decompositions())
        targets = [node.target for node in low.graph.nodes if node.op == "call_function"]
        assert targets and all(torch.Tag.core in getattr(target, "tags", ()) for target in targets), targets
        assert torch.equal(low.module()(x), hop.fake_quantize(q, x))
        with native.use("off"):
            kept = program.run_decompositions(hop.decompositions(native=True))
        assert torch.ops.aten.view.dtype in {node.target for node in kept.graph.nodes}

    @parameterized.expand(ALL)
    @pytest.mark.full
    def test_inductor(self, _name, q):
        """Scales of 16 bits, too, which Inductor keeps in float32 unless it must round them."""
        x = torch.randn(40, 512, generator=generator())
        for quantizer in (q, replace_search(q, 0)):
            torch.compiler.reset()
            call: Any = torch.compile(lambda x, q=quantizer: hop.fake_quantize(q, x), fullgraph=True)
            assert torch.equal(call(x), hop.fake_quantize(quantizer, x))

    @parameterized.expand(ALL)
    def test_shapes(self, _name, q):
        """Blocks that are incomplete, in any number of dimensions, and along the first."""
        for shape in [(7,), (1,), (2, 3, 5, 34), (0,), (3, 0), (2, 2, 300)]:
            x = torch.randn(shape, generator=generator())
            assert torch.equal(hop.dequantize(hop.quantize(q, x)), hop.fake_quantize(q, x))
        x = torch.randn(12, 512, generator=generator())
        assert torch.equal(hop.fake_quantize(q.transposed(2), x.t().contiguous()), hop.fake_quantize(q, x).t())

    @parameterized.expand(ALL)
    def test_text(self, _name, q):
        assert Quantizer.parse(str(q)) == q and q != replace_search(q, 0)

    @parameterized.expand([(f.name, f) for f in (*formats.FORMATS, E2M1_DOUBLED, UE4M3_HALF) if not f.is_for_scales])
    def test_nearest(self, _name, format):
        """Format.nearest is decode(encode), ties included."""
        x = torch.cat([torch.randn(1000, generator=generator()) * k for k in (0.1, 1, 10, 100)])
        x = torch.cat([x, torch.arange(-400, 401) / 4, torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-40])])
        zero = (format.zero,) if format.is_integer else ()
        for each in (format, fast_format(format)):
            assert torch.equal(each.nearest(x, *zero), format.decode(format.encode(x, None, *zero), *zero))


class TestErrors(unittest.TestCase):
    def test_search(self):
        for n in (-1, 2, 101, True, 3.0):
            with self.assertRaisesRegex(ValueError, "StoredScales: search must be"):
                StoredScales(search=n)  # type: ignore[arg-type]

    def test_formats_and_blocks(self):
        third = formats.Codebook("third", 2, torch.uint8, (-1 / 3, 0, 1 / 3, 1))
        with self.assertRaisesRegex(ValueError, "search is for formats of integers, but third"):
            Quantizer(third, (1, 32), StoredScales(search=3))
        for block in ((1, -1), (1, 128), (-1, 1)):
            with self.assertRaisesRegex(ValueError, "search is for int8 in blocks of up to 64 elements"):
                Quantizer(INT8, block, StoredScales(search=3))
        Quantizer(INT8, (1, 64), StoredScales(search=3))


def error(q: Quantizer, x: Tensor) -> float:
    return (hop.fake_quantize(q, x) - x).double().square().sum().item()


def replace_search(q: Quantizer, search: int) -> Quantizer:
    return replace(q, scale=replace(rule_of(q), search=search))
