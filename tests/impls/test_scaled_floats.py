"""hop.scaled of floats and codebooks against numpy, within what their sums allow."""

import itertools
import math
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop import presets
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from tests.support import scaled_oracles
from tests.support.scaled_checks import (
    BOOKS,
    BOTH,
    COLUMNS,
    CONVOLUTIONS,
    DTYPES,
    FLOATS,
    INTEGERS,
    PLAIN,
    WEIGHTS,
    aten,
    decoded,
    factor,
    generator,
    plain,
    run,
    whole_but,
)
from tests.support.scaled_oracles import Pair, Plain, array, assert_bits, f32

RATIOS: dict[str, float] = {}
"""The largest error of each kind of operands, in units of its bound: for whoever asks."""


def meets(left: str, right: str) -> bool:
    """Whether a product of floats takes the two."""
    if left in PLAIN or right in PLAIN:
        return not (left in PLAIN and right in PLAIN)
    floats = {**FLOATS, "state_fp8": presets.STATE_FP8}
    return left in floats and right in floats


FLOAT_PAIRS = [(a, b) for a, b in itertools.product([*PLAIN, *WEIGHTS], [*PLAIN, *WEIGHTS]) if meets(a, b)]


class TestFloats(unittest.TestCase):
    """Products of floats against float64, within what sums in float32 allow (scaled_oracles.ratio)."""

    def within(
        self,
        name: str,
        op: Any,
        output: torch.dtype,
        x: Any,
        w: Any,
        product: Callable[[np.ndarray, np.ndarray], np.ndarray],
        terms: int,
        args: Callable[[Any, Any], list[Any]] = lambda x, w: [x, w],
        held: Any = None,
        **options: Any,
    ) -> None:
        """`held` stands for the weight in the call: the same numbers in another form."""
        kwargs = {k: v for k, v in options.items() if k in ("alpha", "beta")}
        got = run(op, output, *args(x, w if held is None else held), exact=False, **kwargs)
        wide = torch.float64 in [p.t.dtype for p in (x, w) if isinstance(p, Plain)]
        found = scaled_oracles.ratio(got, x.values(), w.values(), product, terms, wide=wide, **options)
        key = f"{name} in {output}".replace("torch.", "")
        RATIOS[key] = max(RATIOS.get(key, 0.0), found)
        assert found <= 1, f"{key}: {found} times the bound"

    def linear(self, left: str, right: str, m: int, k: int, n: int, output: torch.dtype, rng: Any) -> None:
        x, w = factor(left, (m, k), rng), factor(right, (n, k), rng)
        forms = {"": None}
        if isinstance(w, Pair):
            forms["packed "] = Pair(hop.pack(w.t), w.e)
            forms["decoded "] = Pair(decoded(w.t), w.e)
        for form, held in forms.items():
            name = f"{left} x {form}{right}"
            with self.subTest(f"{name} in {output}"):
                self.within(name, aten.linear.default, output, x, w, lambda a, b: a @ b.T, k, held=held)
                bias = plain((n,), rng, DTYPES[n % 3])
                options: dict[str, Any] = {"bias": array(bias), "held": held}
                self.within(
                    name,
                    aten.linear.default,
                    output,
                    x,
                    w,
                    lambda a, b: a @ b.T,
                    k,
                    lambda a, b, bias=bias: [a, b, bias],
                    **options,
                )

    @parameterized.expand(WEIGHTS)
    @pytest.mark.quick(7)
    def test_plain(self, right):
        """Activations in every dtype with weights of every quantizer."""
        for i, left in enumerate(PLAIN):
            rng = generator(*right.encode(), i)
            self.linear(left, right, 7, 160, 32, torch.bfloat16, rng)
            self.linear(left, right, 3, 33, 20, DTYPES[i], rng)

    @parameterized.expand(FLOATS)
    @pytest.mark.quick(10)
    def test_pairs(self, right):
        """Every two quantizers of floats."""
        for i, left in enumerate(FLOATS):
            rng = generator(*right.encode(), i)
            self.linear(left, right, 5, [160, 70][i % 2], 20, [torch.bfloat16, torch.float32][i // 2 % 2], rng)

    @parameterized.expand([(f"{a}__{b}", a, b) for a, b in FLOAT_PAIRS])
    @pytest.mark.full
    @pytest.mark.sampled(8)
    def test_many(self, _name, left, right):
        for i, ((m, k, n), output) in enumerate(itertools.product([(1, 1, 1), (17, 256, 32), (4, 300, 128)], DTYPES)):
            self.linear(left, right, m, k, n, output, generator(i))

    @parameterized.expand(FLOATS)
    @pytest.mark.quick(10)
    def test_operators(self, name):
        """mm, addmm, bmm, baddbmm and matmul, of weights that are turned, and packed and turned."""
        rng = generator(1, *name.encode())
        q = FLOATS[name]
        m, k, n = 6, 64, 10
        packs = name != "nvfp4_16x16"  # whose blocks cut its last rows
        for i, left in enumerate(["bfloat16", "fp8_row", "mxfp8", "nvfp4", "float32"]):
            output = [torch.bfloat16, torch.float32, torch.float16][i % 3]
            x = factor(left, (m, k), rng)
            forms: dict[str, tuple[Any, Any]] = {
                "columnwise": (scaled_oracles.make(q, (k, n), rng, COLUMNS), None),
                "both": (scaled_oracles.make(q, (k, n), rng, BOTH, usage="columnwise"), None),
            }
            weight = scaled_oracles.make(q, (n, k), rng)
            if q.format.bits == 8:
                forms["turned"] = weight.mT, None
            for way, pack in (("packed", hop.pack), ("decoded", decoded)):
                forms[way] = (
                    weight.view(lambda t: t, np.transpose),
                    weight.view(lambda t, pack=pack: pack(t).t(), np.transpose),
                )
            if q.hadamard is not None:
                del forms["columnwise"], forms["both"]
            for form, (w, held) in forms.items():
                with self.subTest(f"{left} {form}"):
                    what = f"mm {left} x {form} {name}"
                    self.within(what, aten.mm.default, output, x, w, np.matmul, k, held=held)
                    self.within(what, aten.matmul.default, output, x, w, np.matmul, k, held=held)
                    bias = plain((m, 1), rng)
                    options: dict[str, Any] = {"bias": array(bias), "alpha": 0.5, "beta": -3, "held": held}
                    self.within(
                        what,
                        aten.addmm.default,
                        output,
                        x,
                        w,
                        np.matmul,
                        k,
                        lambda a, b, bias=bias: [bias, a, b],
                        **options,
                    )
            x = factor(left, (2, m, k), rng)
            weight = scaled_oracles.make(q, (2, n, k), rng)
            held = weight.view(lambda t: decoded(t).transpose(1, 2), lambda a: a.swapaxes(1, 2))
            what = f"bmm {left} x packed {name}"
            if packs:
                with self.subTest(what):
                    bias = plain((2, 1, n), rng)
                    self.within(what, aten.bmm.default, output, x, held, np.matmul, k)
                    options = {"bias": array(bias), "alpha": 1.25}
                    self.within(
                        what,
                        aten.baddbmm.default,
                        output,
                        x,
                        held,
                        np.matmul,
                        k,
                        lambda a, b, bias=bias: [bias, a, b],
                        **options,
                    )
                    one = scaled_oracles.make(q, (n, k), rng)
                    one = one.view(lambda t: hop.pack(t).t(), np.transpose)
                    self.within(what, aten.matmul.default, output, x, one, np.matmul, k)

    @parameterized.expand(["float32", "bfloat16", "fp8_row", "mxfp8", "nvfp4"])
    def test_leading_dimensions(self, left):
        rng = generator(2)
        for right, lead in itertools.product(
            ["fp8_row", "mxfp4", "nvfp4", "int4_groups_32"], [(), (2, 3), (2, 1, 3), (0, 2)]
        ):
            if not meets(left, right):
                continue
            for output in (torch.bfloat16, torch.float32):
                x, w = factor(left, (*lead, 64), rng), factor(right, (10, 64), rng)
                with self.subTest(f"{right} {lead} {output}"):
                    self.within(f"lead {left} x {right}", aten.linear.default, output, x, w, lambda a, b: a @ b.T, 64)

    def test_quantized_on_the_left(self):
        """A plain right-hand side: a gradient times a quantized activation, say."""
        rng = generator(3)
        for left, right in itertools.product([*FLOATS, *INTEGERS, *BOOKS], ["bfloat16", "float32", "float64"]):
            x, w = factor(left, (6, 64), rng), factor(right, (64, 5), rng)
            for output in (torch.bfloat16, torch.float32):
                with self.subTest(f"{left} {right} {output}"):
                    self.within(f"mm {left} x {right}", aten.mm.default, output, x, w, np.matmul, 64)

    @parameterized.expand(
        ["two_all", "one_same", "transposed_two_all", "three", "general_two", "two_alone", "two_same_even"]
    )
    @pytest.mark.quick(5)
    def test_convolutions(self, name):
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(4, *name.encode())
        terms = w_shape[0 if g.transposed else 1] * math.prod(w_shape[2:])

        def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
            if "same" in args:
                x = scaled_oracles.same_padding(x, w.shape[2:], g.dilation)
            return g.of(x, w)

        flat = {"int8_channel": Quantizer(INT8, whole_but(0, len(w_shape))), "mxfp8": presets.MXFP8}
        weights = {**{k: FLOATS[k] for k in ("fp8_tensor", "fp8_row", "nvfp4", "mxfp4")}, **flat, **BOOKS}
        channels = w_shape[1] * g.groups if g.transposed else w_shape[0]
        for i, (left, right) in enumerate(itertools.product(["float32", "bfloat16", "float64", "fp8_tensor"], weights)):
            if left == "fp8_tensor" and (right == "int8_channel" or right.startswith("state")):
                continue
            with self.subTest(f"{left} {right}"):
                x, w = factor(left, x_shape, rng), scaled_oracles.make(weights[right], w_shape, rng)
                bias = plain((channels,), rng)
                beside = {"bias": scaled_oracles.of_channels(array(bias), len(w_shape) - 2)}
                held = Pair(hop.pack(w.t), w.e)
                what = f"convolution {left} x {right}"
                for form in (None, held):
                    with_bias = lambda a, b, bias=bias: [a, b, bias, *args]  # noqa: E731
                    self.within(what, op, DTYPES[i % 4], x, w, product, terms, with_bias, form, **beside)
                    self.within(what, op, DTYPES[i % 3], x, w, product, terms, lambda a, b: [a, b, None, *args], form)

    @parameterized.expand(
        ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4_row", "mxfp4", "int8_row", "int4_groups_32", "state8"]
    )
    @pytest.mark.quick(8)
    def test_small_sizes(self, right):
        """Sums of nothing are 0, and what has no elements keeps its shape."""
        rng = generator(7)
        lefts = [a for a in ("float32", "bfloat16", "float64", "fp8_row", "nvfp4") if meets(a, right)]
        for (m, k, n), left in itertools.product(itertools.product((0, 1, 3), (0, 1, 3), (0, 3)), lefts):
            for output in (torch.bfloat16, torch.float32):
                with self.subTest(f"{left} {m, k, n} {output}"):
                    x, w = factor(left, (m, k), rng), factor(right, (n, k), rng)
                    for held in (None, Pair(hop.pack(w.t), w.e)):
                        product = lambda a, b: a @ b.T  # noqa: E731
                        self.within(f"small {left} x {right}", aten.linear.default, output, x, w, product, k, held=held)

    @parameterized.expand(["fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "nvfp4", "mxfp4", "int8_row"])
    @pytest.mark.quick(4)
    def test_strides(self, right):
        """Weights and activations that are views, one after the other: no plan is taken for another layout."""
        rng = generator(8)
        q = WEIGHTS[right]
        w = factor(right, (32, 64), rng)
        packed = w.view(hop.pack, lambda a: a)
        weights = {
            "plain": w,
            "packed": packed,
            "sliced": factor(right, (64, 64), rng).view(lambda t: t[::2], lambda a: a[::2]),
            "packed_sliced": factor(right, (64, 64), rng).view(lambda t: decoded(t)[::2], lambda a: a[::2]),
            "expanded": factor(right, (1, 64), rng).view(
                lambda t: t.expand(32, 64), lambda a: np.broadcast_to(a, (32, 64))
            ),
            "packed_expanded": factor(right, (1, 64), rng).view(
                lambda t: decoded(t).expand(32, 64), lambda a: np.broadcast_to(a, (32, 64))
            ),
        }
        if q.format.bits == 8:
            buffers = w.t.buffers()
            buffers["codes"] = buffers["codes"].view(torch.uint8).t().contiguous().t().view(buffers["codes"].dtype)
            weights["turned"] = Pair(hop.QuantizedTensor(buffers, q, (32, 64), torch.float32), w.e)
        x = torch.from_numpy(array(plain((64, 8), rng)))
        lefts = {"plain": x.t().contiguous(), "turned": x.t(), "sliced": torch.cat([x.t(), x.t()], 1)[:, ::2]}
        lefts |= {f"{name}_bfloat16": t.bfloat16() for name, t in lefts.items()}
        lefts["one"] = x.t()[:1].bfloat16().expand(8, 64)
        for _, (left, x), (name, w), output in itertools.product(range(2), lefts.items(), weights.items(), DTYPES[:2]):
            with self.subTest(f"{left} {name} {output}"):
                self.within(
                    f"strides {left} x {right}", aten.linear.default, output, Plain(x), w, lambda a, b: a @ b.T, 64
                )

    def test_hadamard(self):
        """A column-wise copy is transformed, and its numbers are those before the transform."""
        rng = generator(9)
        weight = plain((64, 24), rng)
        for q in (presets.NVFP4_HADAMARD, presets.NVFP4_GRADIENT):
            for usages in (COLUMNS, BOTH):
                options = {"generator": torch.Generator().manual_seed(0)} if q.stochastic else {}
                t = hop.quantize(q, weight, usages=usages, **options)
                alone = {n: b for n, b in t.buffers().items() if n.startswith("columnwise")}
                numbers = array(hop.dequantize(hop.QuantizedTensor(alone, q, t.shape, t.dtype)))
                for left, output in itertools.product(["float32", "bfloat16", "fp8_row"], DTYPES):
                    x = factor(left, (5, 64), rng)
                    got = run(aten.mm.default, output, x, Pair(t, None), exact=False)  # type: ignore[arg-type]
                    found = scaled_oracles.ratio(got, x.values(), numbers, np.matmul, 64)
                    assert found <= 1, f"{usages} {left} {output}: {found}"

    @parameterized.expand(["fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"])
    def test_no_numbers(self, name):
        """NaN among codes and scales is NaN where a sum holds it, and nowhere else."""
        rng = generator(10)
        w = factor(name, (12, 128), rng)
        buffers = w.t.buffers()
        if FLOATS[name].format.bits == 8:
            buffers["codes"].view(torch.uint8)[3, 5] = 0x7F
        scale = buffers["scale"]
        if scale.shape[0] == 12:
            bad = {torch.uint8: 255, torch.float8_e4m3fn: 0x7F}.get(scale.dtype)
            if bad is None:
                scale[7] = math.nan
            else:
                scale.view(torch.uint8)[7, 0] = bad
        w = Pair(w.t, scaled_oracles.read(w.t))
        rows = np.isnan(w.values()).any(1)
        assert 0 < rows.sum() < 3, rows
        for left, output in itertools.product(["float32", "bfloat16", "fp8_row", "mxfp8", "nvfp4"], DTYPES):
            x = factor(left, (4, 128), rng)
            for held in (w.t, hop.pack(w.t)):
                got = hop.scaled(aten.linear.default, output, x.t, held)
                assert (np.isnan(array(got).astype(f32)) == rows).all(), f"{left} {output}"

    def test_sums_in_float32(self):
        """A sum that float16 or bfloat16 could not hold: large terms that cancel, and one small one."""
        k = 64
        x = torch.ones(1, k)
        w = torch.tensor([448.0, -448.0] * (k // 2 - 1) + [0.25, 0.0]).reshape(1, k)
        for q in (presets.FP8_TENSOR, presets.FP8_ROW, presets.MXFP8):
            held = hop.quantize(q, w)
            for left in (x, x.bfloat16(), hop.quantize(presets.FP8_ROW, x)):
                for output in DTYPES:
                    for form in (held, hop.pack(held)):
                        got = hop.scaled(aten.linear.default, output, left, form)
                        assert got.item() == 0.25, f"{q} {output}: {got}"

    def test_rows_of_their_own(self):
        """A row of huge numbers, of NaN or of infinities leaves the others as they are."""
        rng = generator(5)
        for name in ("fp8_row", "mxfp8", "nvfp4_row", "mxfp4"):
            q = FLOATS[name]
            for bad in (1e30, math.inf, math.nan):
                x, w = torch.randn(4, 64), plain((8, 64), rng)
                x[1] = bad
                alone = hop.quantize(q, torch.cat([x[:1], x[2:]])), hop.quantize(q, w)
                every = hop.quantize(q, x), alone[1]
                for output in DTYPES:
                    a, b = (hop.scaled(aten.linear.default, output, *p) for p in (alone, every))
                    assert_bits(torch.cat([b[:1], b[2:]]), array(a), f"{name} {bad} {output}")

    def test_numbers_as_hop_quantizes_them(self):
        """Real numbers, quantized by hop: the product of what they are dequantized to, in each output."""
        rng = generator(6)
        x, weight = plain((5, 160), rng), plain((24, 160), rng)
        for name, q in {**FLOATS, **BOOKS}.items():
            if name in ("fp8_static", "state4_unsigned", "state8_unsigned"):
                continue
            w = scaled_oracles.quantized(q, weight)
            assert_bits(hop.dequantize(w.t), w.values(), name)
            for left, output in itertools.product((Plain(x), Plain(x.bfloat16())), DTYPES):
                for held in (None, Pair(hop.pack(w.t), w.e)):
                    self.within(
                        f"real {name}", aten.linear.default, output, left, w, lambda a, b: a @ b.T, 160, held=held
                    )
