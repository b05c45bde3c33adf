"""quantized against numpy: its values in exact integers, its gradients in float64 and in exact integers."""

import itertools
import math
import unittest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hop
from hop import presets, recipes, schemes
from hop.compat import eager
from hop.kernels.cpu import native
from hop.numerics.formats import INT4, INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import Scheme
from tests.support import numerics
from tests.support.schemes import CROSSED

aten = torch.ops.aten
linear = aten.linear.default
f32 = np.float32
LHS, RHS, ROWS, COLUMNS = 0, 1, 4, 5  # streams of random bits


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(q: Quantizer, x: Any, **options: Any) -> np.ndarray:
    """What x is once it is quantized, by numpy."""
    x = x.detach().numpy() if isinstance(x, Tensor) else x
    return numerics.dequantize(q, numerics.quantize(q, x, **options), x.shape)


def bits(seed: int, shape: tuple[int, ...], stream: int) -> np.ndarray:
    return hop.noise(torch.tensor(seed), shape, stream=stream).numpy()


class TestValues(unittest.TestCase):
    def test_int8_rows_are_exact_integers(self):
        x, w, b = normal(5, 7, 96), normal(33, 96, seed=1), normal(33, seed=2)
        codes, steps = [], []
        for t in (x, w):
            a = t.numpy()
            s = np.abs(a).max(-1, keepdims=True) / f32(127)
            codes.append(np.rint(a / s).astype(np.int64))
            steps.append(s)
        sums = codes[0] @ codes[1].T
        want = (sums.astype(f32) * steps[0]) * steps[1][:, 0] + b.numpy()
        got = hop.quantized(linear, schemes.INT8_DYNAMIC, x, w, b)
        assert np.array_equal(got.numpy(), want)
        got = hop.quantized(aten.mm.default, schemes.INT8_DYNAMIC, x[0], w.t())
        assert np.array_equal(got.numpy(), (sums[0].astype(f32) * steps[0][0]) * steps[1][:, 0])

    @parameterized.expand([(name,) for name in CROSSED])
    def test_equals_scaled_of_quantized_operands(self, name):
        """Each operator as the linear layer that it is; every scheme."""
        scheme = CROSSED[name]
        x, w = normal(48, 64), normal(32, 64, seed=1)
        scales = given(name)
        options = [scales[:2], scales[2:4]]
        quantized = []
        for q, t, (s, z) in zip((scheme.lhs, scheme.rhs), (x, w), options, strict=True):
            quantized.append(t if q is None else hop.quantize(q, t, scale=s, zero_point=z))
        want = hop.scaled(linear, torch.float32, *quantized)
        seed = torch.tensor(3)
        for op, args in (
            (linear, (x, w)),
            (aten.mm.default, (x, w.t())),
            (aten.addmm.default, (torch.zeros(32), x, w.t())),
            (aten.bmm.default, (x[None], w.t()[None])),
        ):
            got = hop.quantized(op, scheme, *args, scales=scales, seed=seed)
            assert torch.equal(got.reshape(want.shape), want) or not_exact(scheme, got, want), op

    def test_rows_of_a_convolution(self):
        """Examples of the input and output channels of the weight, by a loop in exact integers."""
        x, w = normal(2, 3, 6, 5), normal(4, 3, 3, 2, seed=1)
        (cx, sx), (cw, sw) = (rows_by_hand(t.numpy()) for t in (x, w))
        want = np.zeros((2, 4, 4, 4), f32)
        for n, o, i, j in np.ndindex(*want.shape):
            total = (cx[n, :, i : i + 3, j : j + 2] * cw[o]).sum()
            want[n, o, i, j] = (f32(total) * sx[n]) * sw[o]
        got = hop.quantized(aten.conv2d.default, schemes.INT8_DYNAMIC, x, w)
        assert np.array_equal(got.numpy(), want)

    def test_output(self):
        scheme = replace(schemes.INT8_DYNAMIC, output=presets.INT8_TENSOR_STATIC_AFFINE)
        x, w = normal(6, 64), normal(8, 64, seed=1)
        scales = hop.Scales(output=torch.tensor(0.2), output_zero_point=torch.tensor(3.0))
        got = hop.quantized(linear, scheme, x, w, scales=scales, dtype=torch.bfloat16)
        assert isinstance(got, hop.QuantizedTensor) and got.dtype == torch.bfloat16
        y = hop.quantized(linear, schemes.INT8_DYNAMIC, x, w).numpy()
        assert np.array_equal(got.codes.numpy(), np.clip(np.rint(y / f32(0.2)) + 3, -128, 127))

    def test_operands_that_are_quantized_already(self):
        x, w = normal(6, 64), normal(8, 64, seed=1)
        want = hop.quantized(linear, recipes.INT8_TRAINING, x, w)
        xq, wq = (hop.quantize(presets.INT8_ROW, t) for t in (x, w))
        for a, b in itertools.product((x, xq), (w, wq)):
            assert torch.equal(hop.quantized(linear, recipes.INT8_TRAINING, a, b), want)
        for as_columns in (wq.t(), hop.quantize(presets.INT8_ROW, w.t(), usages="columnwise")):
            assert torch.equal(hop.quantized(aten.mm.default, schemes.INT8_DYNAMIC, x, as_columns), want)

    def test_dtype(self):
        x, w = normal(4, 32, dtype=torch.bfloat16), normal(8, 32, seed=1, dtype=torch.bfloat16)
        run = hop.quantized
        assert run(linear, schemes.INT8_DYNAMIC, x, w).dtype == torch.bfloat16
        assert run(linear, schemes.INT8_DYNAMIC, x, w.float()).dtype == torch.float32
        assert run(linear, schemes.INT8_DYNAMIC, x, w, dtype=torch.float16).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            got = run(linear, schemes.INT8_DYNAMIC, x.float(), w.float())
        assert torch.equal(got, run(linear, schemes.INT8_DYNAMIC, x.float(), w.float(), dtype=torch.bfloat16))

    def test_empty(self):
        for m, k, n in ((0, 8, 4), (3, 8, 0), (3, 0, 4)):
            x, w = torch.zeros(m, k, requires_grad=True), torch.zeros(n, k, requires_grad=True)
            for scheme in (schemes.INT8_DYNAMIC, recipes.INT8_TRAINING):
                y = hop.quantized(linear, scheme, x, w, seed=torch.tensor(0))
                assert y.shape == (m, n) and not y.any()
                dx, dw = torch.autograd.grad(y.sum(), (x, w))
                assert dx.shape == x.shape and dw.shape == w.shape and not dx.any() and not dw.any()


def given(name: str) -> hop.Scales:
    """The scales that a scheme needs."""
    if name == "INT8_STATIC":
        return hop.Scales(lhs=torch.tensor(0.02), lhs_zero_point=torch.tensor(5.0))
    if name == "FP8_DELAYED":
        return hop.Scales(lhs=torch.tensor(3.0), rhs=torch.tensor(2.5), grad=torch.tensor(4.0))
    return hop.Scales()


def not_exact(scheme: Scheme, got: Tensor, want: Tensor) -> bool:
    """Products of floats: sums of float32 in another order."""
    exact = scheme.lhs is not None and scheme.lhs.format == INT8
    return not exact and float((got.reshape(want.shape) - want).abs().max()) <= 1e-5 * float(want.abs().max())


def rows_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = x.reshape(len(x), -1)
    scale = np.abs(flat).max(-1) / f32(127)
    return np.rint(flat / scale[:, None]).astype(np.int64).reshape(x.shape), scale


# ---- ste and original


def fake(x: Any, s: Any, z: Any, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fake quantization in float64: what x becomes, where it is not clipped, and its codes less the zero point."""
    codes = np.rint(x / s) + z
    inside = (codes >= low) & (codes <= high)
    n = np.clip(codes, low, high) - z
    return n * s, inside, n


class TestStraightThrough(unittest.TestCase):
    """Against the gradient of fake quantization in float64, with what is clipped, and against LSQ's formulas."""

    def operands(self) -> tuple[Tensor, ...]:
        x, w, b = normal(24, 64) * 1.5, normal(16, 64, seed=1), normal(16, seed=2)
        return tuple(t.requires_grad_() for t in (x, w, b))

    def check(self, backward: str, rhs: Quantizer, scale_w: Tensor, per_channel: Any) -> None:
        scheme = Scheme(presets.INT8_TENSOR_STATIC_AFFINE, rhs, backward=backward)
        x, w, b = self.operands()
        sx, zx = torch.tensor(0.02, requires_grad=True), torch.tensor(11.0, requires_grad=True)
        sw = scale_w.clone().requires_grad_()
        y = hop.quantized(linear, scheme, x, w, b, scales=hop.Scales(sx, zx, sw))
        g = normal(24, 16, seed=3)
        got = torch.autograd.grad(y, (x, w, b, sx, zx, sw), g)

        X, W, G = (t.detach().double().numpy() for t in (x, w, g))
        # Codes are found in float32: the division is the only rounding that can move one.
        SX, SW = np.float64(f32(0.02)), per_channel(scale_w.double().numpy())
        xh, inside_x, nx = fake(X.astype(f32) / f32(0.02), 1.0, 11, -128, 127)
        xh = nx * SX
        low, high = (-8, 7) if rhs.format == INT4 else (-128, 127)
        _, inside_w, nw = fake(W.astype(f32) / SW.astype(f32), 1.0, 0, low, high)
        wh = nw * SW
        assert 0.01 < 1 - inside_x.mean() < 0.5 and 0.005 < 1 - inside_w.mean() < 0.5, "some must be clipped"
        dxh, dwh = (G @ W, G.T @ X) if backward == "original" else (G @ wh, G.T @ xh)
        step_x = np.where(inside_x, nx - X / SX, nx)
        step_w = np.where(inside_w, nw - W / SW, nw)
        want = (
            dxh * inside_x,
            dwh * inside_w,
            G.sum(0),
            (dxh * step_x).sum(),
            np.where(inside_x, 0, -SX * dxh).sum(),
            summed_like(dwh * step_w, scale_w.shape),
        )
        for mine, one in zip(got, want, strict=True):
            np.testing.assert_allclose(mine.numpy(), one, rtol=2e-5, atol=2e-5 * np.abs(one).max())
        clipped = torch.from_numpy(~inside_x)
        assert not got[0][clipped].any() and got[0][~clipped].abs().min() > 0

    @parameterized.expand([("ste",), ("original",)])
    def test_per_tensor(self, backward):
        self.check(backward, presets.INT8_TENSOR_STATIC, torch.tensor(0.015), lambda s: s)

    @parameterized.expand([("ste",), ("original",)])
    def test_per_channel(self, backward):
        q = Quantizer(INT8, (1, -1), Static())
        self.check(backward, q, torch.linspace(0.012, 0.02, 16)[:, None], lambda s: s)

    @parameterized.expand([("ste",), ("original",)])
    def test_per_group(self, backward):
        q = Quantizer(INT4, (1, 32), Static())
        self.check(backward, q, torch.linspace(0.2, 0.3, 32).reshape(16, 2), lambda s: np.repeat(s, 32, 1))

    def test_scales_that_are_found_clip_nothing(self):
        """The gradient of the rows of int8, with the quantizers of numpy."""
        x, w, b = self.operands()
        g = normal(24, 16, seed=3)
        got = torch.autograd.grad(hop.quantized(linear, schemes.INT8_DYNAMIC, x, w, b), (x, w, b), g)
        xh, wh = (numbers(presets.INT8_ROW, t).astype(np.float64) for t in (x, w))
        G = g.double().numpy()
        for mine, one in zip(got, (G @ wh, G.T @ xh, G.sum(0)), strict=True):
            np.testing.assert_allclose(mine.numpy(), one, rtol=2e-5, atol=2e-5 * np.abs(one).max())

    def test_of_other_operators(self):
        """mm, bmm, addmm, convolutions and embedding: PyTorch's own gradient at the fake-quantized operands."""
        index = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(0))
        q = presets.INT8_ROW
        as_columns = lambda t: hop.fake_quantize(q, t.mT).mT  # noqa: E731
        conv = lambda t: hop.fake_quantize(Quantizer(INT8, (1,) + (-1,) * (t.dim() - 1)), t)  # noqa: E731
        turned = lambda t: hop.fake_quantize(Quantizer(INT8, (-1, 1) + (-1,) * (t.dim() - 2)), t)  # noqa: E731
        plain = lambda t: hop.fake_quantize(q, t)  # noqa: E731
        for op, shapes, faked, rest in (
            (aten.mm.default, ((6, 32), (32, 5)), (plain, as_columns), ()),
            (aten.bmm.default, ((2, 6, 32), (2, 32, 5)), (plain, as_columns), ()),
            (aten.addmm.default, ((5,), (6, 32), (32, 5)), (None, plain, as_columns), ()),
            (aten.conv1d.default, ((2, 3, 9), (4, 3, 3), (4,)), (conv, conv, None), ([2], [1])),
            (aten.conv2d.default, ((2, 4, 6, 5), (6, 2, 3, 3)), (conv, conv), (None, [1, 2], [1, 0], [1, 1], 2)),
            (aten.conv3d.default, ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2)), (conv, conv), ()),
            (aten.conv_transpose1d.default, ((2, 3, 9), (3, 4, 3), (4,)), (conv, turned, None), ([2], [1], [1])),
            (
                aten.conv_transpose2d.input,
                ((2, 4, 6, 5), (4, 3, 3, 3)),
                (conv, turned),
                (None, [1, 2], [0, 0], [0, 0], 2),
            ),
            (aten.conv_transpose3d.input, ((1, 2, 4, 5, 4), (2, 3, 2, 3, 2)), (conv, turned), ()),
            (aten.embedding.default, ((10, 32),), (plain,), (index,)),
        ):
            args = [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
            y = hop.quantized(op, schemes.INT8_DYNAMIC, *args, *rest)
            g = normal(*y.shape, seed=9)
            got = torch.autograd.grad(y, args, g)
            doubles = [a if f is None else f(a) for f, a in zip(faked, args, strict=True)]
            doubles = [t.detach().double().requires_grad_() for t in doubles]
            want = torch.autograd.grad(op(*doubles, *rest), doubles, g.double())
            for mine, one in zip(got, want, strict=True):
                torch.testing.assert_close(mine.double(), one, rtol=2e-5, atol=2e-5 * float(one.abs().max()))


def summed_like(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sums over the blocks of scales of `shape`."""
    if not shape:
        return x.sum()
    return x.reshape(shape[0], shape[1], -1).sum(-1)


# ---- products of codes


class TestProductsOfCodes(unittest.TestCase):
    """backward="quantized" against the formulas in numpy; of int8 bit for bit."""

    @parameterized.expand([("nearest", False), ("stochastic", True)])
    def test_int8_rows(self, _name, stochastic):
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1), stochastic=stochastic))
        x, w, g = normal(24, 64).requires_grad_(), normal(16, 64, seed=1).requires_grad_(), normal(24, 16, seed=3)
        seed = torch.tensor(1234)
        y = hop.quantized(linear, scheme, x, w, seed=seed if stochastic else None)
        dx, dw = torch.autograd.grad(y, (x, w), g)
        X, W, G = x.detach().numpy(), w.detach().numpy(), g.numpy()
        (cx, sx), (cw, sw) = codes_of_rows(X), codes_of_rows(W)
        first, second = G * sw.T, (G * sx).T
        gx = codes_of_rows(first, bits(1234, first.shape, ROWS) if stochastic else None)
        gw = codes_of_rows(second, bits(1234, second.shape, COLUMNS) if stochastic else None)
        assert np.array_equal(dx.numpy(), (gx[0] @ cw).astype(f32) * gx[1])
        assert np.array_equal(dw.numpy(), (gw[0] @ cx).astype(f32) * gw[1])

    def test_one_scale_for_the_tensor(self):
        x, w, g = normal(24, 64).requires_grad_(), normal(16, 64, seed=1).requires_grad_(), normal(24, 16, seed=3)
        for name in ("FP8_HYBRID", "FP8_DELAYED"):
            scheme, scales = CROSSED[name], given(name)
            got = torch.autograd.grad(hop.quantized(linear, scheme, x, w, scales=scales), (x, w), g)
            q, e = presets.FP8_TENSOR, presets.FP8_E5M2_TENSOR
            xs, ws, gs = (
                (numbers(q, x), numbers(q, w), numbers(e, g))
                if name == "FP8_HYBRID"
                else (delayed(x, 3.0, 448.0), delayed(w, 2.5, 448.0), delayed(g, 4.0, 57344.0))
            )
            for mine, one in zip(got, (gs.astype(np.float64) @ ws, gs.T.astype(np.float64) @ xs), strict=True):
                np.testing.assert_allclose(mine.numpy(), one, rtol=1e-5, atol=1e-6 * np.abs(one).max())

    def test_blocks_are_made_along_the_columns(self):
        """MX, and FP8 in blocks: every operand once more, transposed."""
        for name in ("MXFP8_TRAINING", "FP8_BLOCKWISE"):
            scheme = CROSSED[name]
            x, w = normal(160, 192).requires_grad_(), normal(144, 192, seed=1).requires_grad_()
            g = normal(160, 144, seed=3)
            got = torch.autograd.grad(hop.quantized(linear, scheme, x, w), (x, w), g)
            G, X, W = g.numpy(), x.detach().numpy(), w.detach().numpy()
            grad, lhs, rhs = scheme.grad, scheme.lhs, scheme.rhs
            want = (
                numbers(grad, G).astype(np.float64) @ numbers(rhs, W.T.copy()).T,
                numbers(grad, G.T.copy()).astype(np.float64) @ numbers(lhs, X.T.copy()).T,
            )
            for mine, one in zip(got, want, strict=True):
                np.testing.assert_allclose(mine.numpy(), one, rtol=1e-5, atol=1e-6 * np.abs(one).max())

    def test_nvfp4_is_the_contract_of_columnwise_copies(self):
        """The weight in tiles of 16; x and the gradient, columns transformed: what hop.quantize makes column-wise."""
        scheme, seed = recipes.NVFP4_TRAINING, torch.tensor(5)
        x, w, g = normal(64, 96).requires_grad_(), normal(48, 96, seed=1).requires_grad_(), normal(64, 48, seed=3)
        got = torch.autograd.grad(hop.quantized(linear, scheme, x, w, seed=seed), (x, w), g)
        rows = hop.noise(seed, g.shape, stream=ROWS)
        columns = hop.noise(seed, g.t().shape, stream=COLUMNS).t().contiguous()
        g_rows = hop.quantize(scheme.grad, g, noise=rows)
        w_columns = hop.quantize(scheme.rhs, w.detach(), usages="columnwise")
        want = [hop.dequantize(g_rows).double() @ hop.dequantize(w_columns).double()]
        g_columns = hop.quantize(scheme.grad, g, noise=columns, usages="columnwise")
        x_columns = hop.quantize(scheme.lhs, x.detach(), usages="columnwise")
        # Both are dequantized without their transform, which is orthogonal, so that it cancels.
        want.append(hop.dequantize(g_columns).double().t() @ hop.dequantize(x_columns).double())
        for mine, one in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))

    def test_convolution(self):
        """Products of codes as loops over positions, in exact integers."""
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        x, w = normal(2, 3, 6, 5).requires_grad_(), normal(4, 3, 3, 2, seed=1).requires_grad_()
        y = hop.quantized(aten.conv2d.default, scheme, x, w)
        g = normal(*y.shape, seed=3)
        dx, dw = torch.autograd.grad(y, (x, w), g)
        G = g.numpy()
        (cx, sx), (cw, sw) = (rows_by_hand(t.detach().numpy()) for t in (x, w))
        (cg, sg) = rows_by_hand(G * sw[None, :, None, None])
        sums = np.zeros(x.shape, np.int64)
        for i, j in itertools.product(range(3), range(2)):
            sums[:, :, i : i + 4, j : j + 4] += np.einsum("noij,oc->ncij", cg, cw[:, :, i, j])
        assert np.array_equal(dx.numpy(), sums.astype(f32) * sg[:, None, None, None])
        (cg, sg) = rows_by_hand((G * sx[:, None, None, None]).transpose(1, 0, 2, 3))
        sums = np.zeros(w.shape, np.int64)
        for i, j in itertools.product(range(3), range(2)):
            sums[:, :, i, j] = np.einsum("onij,ncij->oc", cg, cx[:, :, i : i + 4, j : j + 4])
        assert np.array_equal(dw.numpy(), sums.astype(f32) * sg[:, None, None, None])

    def test_strided_padded_dilated_grouped_convolutions(self):
        """Near the gradient of PyTorch, for every way to slide the kernel."""
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        for stride, padding, dilation, groups in itertools.product((1, 2), (0, 1), (1, 2), (1, 2)):
            x, w = normal(3, 4, 9, 8).requires_grad_(), normal(6, 4 // groups, 3, 2, seed=1).requires_grad_()
            rest = (None, [stride] * 2, [padding] * 2, [dilation] * 2, groups)
            y = hop.quantized(aten.conv2d.default, scheme, x, w, *rest)
            g = normal(*y.shape, seed=3)
            got = torch.autograd.grad(y, (x, w), g)
            want = torch.autograd.grad(aten.conv2d.default(x, w, *rest), (x, w), g)
            for mine, one in zip(got, want, strict=True):
                error = float((mine - one).norm() / one.norm())
                assert error < 0.02, (stride, padding, dilation, groups, error)

    def test_transposed_convolution(self):
        """Products of codes as loops over positions, in exact integers; channels of groups share their scales."""
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        x, w = normal(2, 4, 6, 5).requires_grad_(), normal(4, 3, 3, 2, seed=1).requires_grad_()
        y = hop.quantized(aten.conv_transpose2d.input, scheme, x, w, groups=2)
        g = normal(*y.shape, seed=3)
        dx, dw = torch.autograd.grad(y, (x, w), g)
        G, (cx, sx) = g.numpy(), rows_by_hand(x.detach().numpy())
        cw, sw = rows_by_hand(w.detach().numpy().transpose(1, 0, 2, 3))
        cw = cw.transpose(1, 0, 2, 3)
        sums = np.zeros(y.shape, np.int64)
        for i, j, k in itertools.product(range(3), range(2), range(2)):
            part = np.einsum("ncij,co->noij", cx[:, 2 * k : 2 * k + 2], cw[2 * k : 2 * k + 2, :, i, j])
            sums[:, 3 * k : 3 * k + 3, i : i + 6, j : j + 5] += part
        of_channels = np.concatenate([sw, sw])
        want = sums.astype(f32) * sx[:, None, None, None] * of_channels[:, None, None]
        assert np.array_equal(y.detach().numpy(), want)
        cg, sg = rows_by_hand(G * of_channels[None, :, None, None])
        sums = np.zeros(x.shape, np.int64)
        for i, j, k in itertools.product(range(3), range(2), range(2)):
            window = cg[:, 3 * k : 3 * k + 3, i : i + 6, j : j + 5]
            sums[:, 2 * k : 2 * k + 2] += np.einsum("noij,co->ncij", window, cw[2 * k : 2 * k + 2, :, i, j])
        assert np.array_equal(dx.numpy(), sums.astype(f32) * sg[:, None, None, None])
        by_place = (G * sx[:, None, None, None]).reshape(2, 2, 3, 8, 6)  # (N, groups, O / groups, ...)
        cg, sg = rows_by_hand(by_place.transpose(2, 1, 0, 3, 4))
        sums = np.zeros(w.shape, np.int64)
        for i, j, k in itertools.product(range(3), range(2), range(2)):
            window = cg[:, k, :, i : i + 6, j : j + 5]
            sums[2 * k : 2 * k + 2, :, i, j] = np.einsum("onij,ncij->co", window, cx[:, 2 * k : 2 * k + 2])
        assert np.array_equal(dw.numpy(), sums.astype(f32) * sg[:, None, None])

    def test_transposed_convolutions_of_every_geometry(self):
        """Near the gradient of PyTorch, for every way to slide the kernel."""
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        for stride, padding, dilation, groups in itertools.product((1, 2), (0, 1), (1, 2), (1, 2)):
            w, more = normal(4, 6 // groups, 3, 2, seed=1).requires_grad_(), max(stride, dilation) - 1
            rest = (None, [stride] * 2, [padding] * 2, [more, 0], groups, [dilation] * 2)
            x = normal(3, 4, 9, 8).requires_grad_()
            y = hop.quantized(aten.conv_transpose2d.input, scheme, x, w, *rest)
            floats = aten.conv_transpose2d.input(x, w, *rest)
            assert y.shape == floats.shape
            assert float(((y - floats).norm() / floats.norm()).detach()) < 0.02
            g = normal(*y.shape, seed=3)
            got, want = (torch.autograd.grad(of, (x, w), g) for of in (y, floats))
            for mine, one in zip(got, want, strict=True):
                error = float((mine - one).norm() / one.norm())
                assert error < 0.02, (stride, padding, dilation, groups, error)

    @pytest.mark.full
    def test_unbiased(self):
        """The mean over many seeds is the product with the gradient as it was."""
        x, w, g = normal(8, 32).requires_grad_(), normal(8, 32, seed=1).requires_grad_(), normal(8, 8, seed=3)
        draws = 2000
        sums = [torch.zeros(8, 32, dtype=torch.float64) for _ in range(2)]
        squares = [torch.zeros(8, 32, dtype=torch.float64) for _ in range(2)]
        for seed in range(draws):
            y = hop.quantized(linear, recipes.INT8_TRAINING, x, w, seed=torch.tensor(seed))
            for i, d in enumerate(torch.autograd.grad(y, (x, w), g)):
                sums[i] += d
                squares[i] += d.double() ** 2
        xh, wh = (hop.fake_quantize(presets.INT8_ROW, t.detach()) for t in (x, w))
        want = (g @ wh, g.t() @ xh)
        for total, square, one in zip(sums, squares, want, strict=True):
            mean = total / draws
            deviation = (square / draws - mean**2).clamp(min=0).sqrt() / math.sqrt(draws)
            # r / 256 of a gap, r in 0..255, lies 1/512 of a gap below uniform: far below the deviation of 2000 draws
            assert float(((mean - one.double()).abs() / deviation).max()) < 5
        nearest = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        biased = torch.autograd.grad(hop.quantized(linear, nearest, x, w), (x, w), g)
        assert float((biased[0] - want[0]).norm()) > 5 * float((sums[0] / draws - want[0]).norm())

    def test_reproducible(self):
        x, w = normal(8, 32).requires_grad_(), normal(8, 32, seed=1).requires_grad_()

        def run(seed: int | None) -> tuple[Tensor, ...]:
            made = None if seed is None else torch.tensor(seed)
            y = hop.quantized(linear, recipes.INT8_TRAINING, x, w, seed=made)
            return torch.autograd.grad(y.square().sum(), (x, w))

        first, again, other = run(1), run(1), run(2)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        torch.manual_seed(7)
        first, second = run(None), run(None)
        torch.manual_seed(7)
        again = run(None)
        assert torch.equal(first[0], again[0]) and not torch.equal(first[0], second[0])

    def test_operands_that_are_quantized_already(self):
        """The codes are taken as they are, with the same products."""
        scheme = replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))
        x, w, g = normal(24, 64).requires_grad_(), normal(16, 64, seed=1).requires_grad_(), normal(24, 16, seed=3)
        want = torch.autograd.grad(hop.quantized(linear, scheme, x, w), (x, w), g)
        xq, wq = (hop.quantize(presets.INT8_ROW, t) for t in (x, w))
        got = torch.autograd.grad(hop.quantized(linear, scheme, xq, wq), (x, w), g, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        as_columns = hop.quantize(presets.INT8_ROW, w.t(), usages="columnwise")
        got = torch.autograd.grad(hop.quantized(aten.mm.default, scheme, xq, as_columns), (x, w), g)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def codes_of_rows(x: np.ndarray, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes of rows, and their scales as a column."""
    scale = np.abs(x).max(-1, keepdims=True) / f32(127)
    y = x / scale
    if noise is None:
        return np.rint(y).astype(np.int64), scale
    return np.clip(np.copysign(numerics.stochastic_steps(np.abs(y), noise), y), -128, 127).astype(np.int64), scale


def delayed(x: Tensor, amax: float, largest: float) -> np.ndarray:
    """FP8 by a given amax, as NVIDIA Transformer Engine has it: codes of x · S, read as code · (1 / S)."""
    factor = f32(largest) / f32(amax)
    fmt = {448.0: "e4m3", 57344.0: "e5m2"}[largest]
    codes = numerics.encode(x.detach().numpy() * factor, fmt, (), 0, None)
    return numerics.decode(codes.view(numerics.FLOATS[fmt]), fmt, (), 0) * (f32(1) / factor)


# ---- how it behaves as an operator of autograd


class TestAutograd(unittest.TestCase):
    def test_only_what_is_asked_for(self):
        for flags in itertools.product((False, True), repeat=3):
            args = [
                normal(*s, seed=i).requires_grad_(f)
                for i, (s, f) in enumerate(zip(((4, 32), (8, 32), (8,)), flags, strict=True))
            ]
            for scheme in (schemes.INT8_DYNAMIC, recipes.INT8_TRAINING):
                y = hop.quantized(linear, scheme, *args)
                assert y.requires_grad == any(flags)
                if any(flags):
                    y.sum().backward()
                assert [a.grad is not None for a in args] == list(flags)

    def test_no_grad(self):
        x, w = normal(4, 32).requires_grad_(), normal(8, 32, seed=1).requires_grad_()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert not hop.quantized(linear, recipes.INT8_TRAINING, x, w).requires_grad

    def test_one_tensor_twice(self):
        x = normal(6, 32).requires_grad_()
        for scheme in (schemes.INT8_DYNAMIC, replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))):
            a, b = (x.detach().clone().requires_grad_() for _ in range(2))
            g = normal(6, 6, seed=3)
            (both,) = torch.autograd.grad(hop.quantized(linear, scheme, x, x), x, g)
            one, other = torch.autograd.grad(hop.quantized(linear, scheme, a, b), (a, b), g)
            assert torch.equal(both, one + other)

    @parameterized.expand([(use,) for use in (False, True)])
    def test_checkpointing(self, use_reentrant):
        """What is computed again is the same, random bits included."""
        w = normal(32, 32, seed=1).requires_grad_()
        scheme = replace(recipes.INT8_TRAINING, rhs=Quantizer(INT8, (1, -1), stochastic=True))

        def layer(x: Tensor) -> Tensor:
            return hop.quantized(linear, scheme, x, w).relu()

        results = []
        for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
            x = normal(8, 32).requires_grad_()
            torch.manual_seed(3)
            y = run(x)
            state = torch.get_rng_state()
            results.append((y.detach(), *grads(y, x, w)))
            assert torch.equal(state, torch.get_rng_state())
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    def test_second_derivatives(self):
        """Straight through the roundings of the backward, whichever it is."""
        x, w = normal(4, 32).requires_grad_(), normal(8, 32, seed=1).requires_grad_()
        for scheme in (schemes.INT8_DYNAMIC, replace(recipes.INT8_TRAINING, grad=Quantizer(INT8, (1, -1)))):
            y = hop.quantized(linear, scheme, x, w)
            (dx,) = torch.autograd.grad(y.square().sum() / 2, x, create_graph=True)
            v = normal(4, 32, seed=5)
            (got,) = torch.autograd.grad(dx, x, v)
            wh = hop.fake_quantize(presets.INT8_ROW, w)
            want = (v @ wh.t() @ wh).detach()
            error = float((got - want).detach().norm() / want.norm())
            assert error < (0.02 if scheme.grad else 1e-5), error  # which quantizes the direction too


def grads(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    y.square().sum().backward()
    return [leaf.grad.clone() for leaf in leaves]


class Deployed(torch.nn.Module):
    """A linear layer of codes."""

    def __init__(self, scheme: Scheme, scales: hop.Scales, w: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lhs, self.scales, self.bias = scheme.lhs, scales, b
        self.w = torch.nn.Parameter(hop.quantize(scheme.rhs, w), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        xq = hop.quantize(self.lhs, x, scale=self.scales.lhs, zero_point=self.scales.lhs_zero_point)
        return hop.scaled(linear, torch.float32, xq, self.w, self.bias)


class TestDeployment(unittest.TestCase):
    @pytest.mark.compiler
    @pytest.mark.full
    def test_what_trains_is_what_is_deployed(self):
        """A trained layer, and the exported program of its codes: the same bits, on each route."""
        for name in ("INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_INT4_W", "INT8_TRAINING", "INT8_DA_TERNARY_W"):
            scheme, scales = CROSSED[name], given(name)
            x, w, b = normal(6, 64), normal(8, 64, seed=1), normal(8, seed=2)
            want = hop.quantized(linear, scheme, x, w, b, scales=scales, seed=torch.tensor(0))
            model = Deployed(scheme, scales, w, b)
            program = torch.export.export(model, (x,))
            low = program.run_decompositions(hop.decompositions())
            for run in (model, program.module(), low.module(), torch.compile(model, fullgraph=True)):
                assert torch.equal(run(x), want), name

    @pytest.mark.compiler
    @pytest.mark.full
    def test_gradients_of_codes_compile(self):
        """Bit for bit those of eager mode, static and dynamic."""
        seed = torch.tensor(11)

        def loss(x: Tensor, w: Tensor) -> Tensor:
            return hop.quantized(linear, recipes.INT8_TRAINING, x, w, seed=seed)

        for backend, dynamic in (("aot_eager", None), ("inductor", None), ("inductor", True)):
            torch._dynamo.reset()
            run = torch.compile(loss, backend=backend, dynamic=dynamic, fullgraph=True)
            for m, dtype in ((24, torch.float32), (40, torch.float32), (40, torch.bfloat16)):
                x, w = (normal(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate(((m, 64), (16, 64))))
                g = normal(m, 16, seed=3, dtype=dtype)
                found = [torch.autograd.grad(f(x, w), (x, w), g) for f in (run, loss)]
                with native.use("off"):
                    found.append(torch.autograd.grad(loss(x, w), (x, w), g))
                for a, b, c in zip(*found, strict=True):
                    assert torch.equal(a, b) and torch.equal(a, c), (backend, dynamic, m, dtype)

    @pytest.mark.compiler
    @pytest.mark.full
    def test_gradients_of_fake_quantization_compile_in_bfloat16(self):
        """Products of bfloat16, compiled as in eager mode, without a copy of what lies in memory."""
        from torch._inductor.utils import run_and_get_code

        x, w = (normal(*s, seed=i, dtype=torch.bfloat16).requires_grad_() for i, s in enumerate(((40, 64), (16, 64))))
        g = normal(40, 16, seed=3, dtype=torch.bfloat16)

        def gradients(f: Any) -> Any:
            return torch.autograd.grad(f(x, w), (x, w), g)

        def loss(x: Tensor, w: Tensor) -> Tensor:
            return hop.quantized(linear, schemes.INT8_DYNAMIC, x, w)

        torch._dynamo.reset()
        got, code = run_and_get_code(lambda: gradients(torch.compile(loss, fullgraph=True)))
        for a, b in zip(got, gradients(loss), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * float(b.abs().max()) * 2**-7)
        if eager.multiplies_bfloat16() and native.library().declines() is None:
            assert "torch.float32" not in code[-1].split("def call")[1].split("return")[0]


class TestSchemes(unittest.TestCase):
    def test_spelling(self):
        for name, scheme in CROSSED.items():
            again = Scheme.parse(str(scheme))
            assert again == scheme and hash(again) == hash(scheme) and repr(again) == repr(scheme), name
        assert len({str(s) for s in CROSSED.values()}) == len(CROSSED)

    def test_errors(self):
        row, affine = presets.INT8_ROW, presets.INT8_ROW_AFFINE
        for error, message, fields in (
            (TypeError, "lhs must be a Quantizer or None, got 'int8'", {"lhs": "int8", "rhs": row}),
            (ValueError, "lhs, rhs and output are None", {"lhs": None, "rhs": None}),
            (ValueError, "flat=True or a layout", {"lhs": presets.STATE8, "rhs": row}),
            (
                ValueError,
                "output=.* rounds at random",
                {"lhs": row, "rhs": row, "output": Quantizer(INT8, stochastic=True)},
            ),
            (ValueError, "backward must be one of .* got 'none'", {"lhs": row, "rhs": row, "backward": "none"}),
            (
                ValueError,
                "grad is the quantizer of gradients for backward='quantized'",
                {"lhs": row, "rhs": row, "grad": row},
            ),
            (
                ValueError,
                "grad is the quantizer of gradients for backward='quantized'",
                {"lhs": row, "rhs": row, "backward": "quantized"},
            ),
            (
                ValueError,
                "multiplies codes, but lhs is None",
                {"lhs": None, "rhs": row, "grad": row, "backward": "quantized"},
            ),
            (ValueError, "whose zero points differ", {"lhs": affine, "rhs": row, "grad": row, "backward": "quantized"}),
            (
                ValueError,
                "hadamard of lhs and grad must be the same",
                {"lhs": presets.NVFP4_HADAMARD, "rhs": presets.NVFP4, "grad": presets.NVFP4, "backward": "quantized"},
            ),
        ):
            with pytest.raises(error, match=message):
                Scheme(**fields)
        with pytest.raises(ValueError, match="Scheme"):
            Scheme.parse(str(presets.INT8_ROW))


class TestNames(unittest.TestCase):
    def test_name_of_a_scheme(self):
        """The names that hop.quantize_ takes; compiled too."""
        x, w = torch.randn(4, 64), torch.randn(8, 64)
        for name, scheme in (("int8", schemes.INT8_DYNAMIC), ("8da4w", schemes.INT8_DA_INT4_W)):
            want = hop.quantized(linear, scheme, x, w)
            assert torch.equal(hop.quantized(linear, name, x, w), want)
            compiled = torch.compile(
                lambda x, w, n=name: hop.quantized(linear, n, x, w), backend="eager", fullgraph=True
            )
            assert torch.equal(compiled(x, w), want)


class TestErrors(unittest.TestCase):
    def test_messages(self):
        x, w, dynamic, static = torch.randn(4, 32), torch.randn(8, 32), schemes.INT8_DYNAMIC, schemes.INT8_STATIC
        s = torch.tensor(0.1)
        tensor, conv = hop.quantize(presets.INT8_TENSOR, x), (torch.randn(2, 3, 8, 32), torch.randn(4, 3, 3, 3))
        embedding, left = aten.embedding.default, Scheme(presets.INT8_ROW, None)
        cases: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = [
            (TypeError, "scheme must be a hop.Scheme", (linear, presets.INT8_ROW, x, w), {}),
            (ValueError, "no scheme is called 'in8'", (linear, "in8", x, w), {}),
            (ValueError, "op must be one of .*got aten.add.Tensor", (aten.add.Tensor, dynamic, x, w), {}),
            (RuntimeError, "missing a value for argument 'weight'", (linear, dynamic, x), {}),
            (TypeError, "argument 'weight' of aten.linear.default must be a tensor", (linear, dynamic, x, 3), {}),
            (TypeError, "argument 'input' .*must be float16.*got torch.int8", (linear, dynamic, x.to(torch.int8), w),
                {"dtype": torch.float32}),
            (TypeError, "dtype must be float16", (linear, dynamic, x, w), {"dtype": torch.int8}),
            (TypeError, "scales must be hop.Scales, got {'lhs'", (linear, dynamic, x, w), {"scales": {"lhs": s}}),
            (ValueError, r"lhs=.* pass scales=hop.Scales\(lhs=..., lhs_zero_point=...\)", (linear, static, x, w), {}),
            (ValueError, "lhs_zero_point", (linear, static, x, w), {"scales": hop.Scales(lhs=s)}),
            (ValueError, "scales.output is given, .* but the scheme's output is None", (linear, dynamic, x, w),
                {"scales": hop.Scales(output=s)}),
            (ValueError, "scales.grad is given", (linear, dynamic, x, w), {"scales": hop.Scales(grad=s)}),
            (ValueError, "scales.rhs must have a shape that broadcasts", (linear, dynamic, x, w),
                {"scales": hop.Scales(rhs=torch.ones(3, 1))}),
            (ValueError, "seed must be an int64 tensor", (linear, recipes.INT8_TRAINING, x, w), {"seed": 3}),
            (ValueError, "is quantized by .*but the scheme says", (linear, dynamic, tensor, w), {}),
            (ValueError, "one scale for each example at most", (aten.conv2d.default, recipes.MXFP8_TRAINING, *conv),
                {}),
            (ValueError, "leaves in floats", (embedding, left, w, torch.tensor([1])), {}),
        ]  # fmt: skip
        for error, message, args, options in cases:
            with pytest.raises(error, match=message):
                hop.quantized(*args, **options)

    def test_the_same_when_traced(self):
        x, w = torch.randn(4, 32), torch.randn(8, 32)
        run = torch.compile(lambda x, w: hop.quantized(linear, schemes.INT8_STATIC, x, w), backend="aot_eager")
        with pytest.raises(Exception, match=r"pass scales=hop.Scales\(lhs=..., lhs_zero_point=...\)"):
            run(x, w)


class TestRowsOfNvfp4(unittest.TestCase):
    """The weight's gradient sums over rows, which the Hadamard transform of the scheme takes in blocks of 16."""

    @parameterized.expand([(rows,) for rows in (1, 5, 7, 16, 20, 33)])
    @pytest.mark.quick(5)
    def test_any_number_of_rows(self, rows):
        torch.manual_seed(1)
        layer = hop.nn.Linear(64, 32, bias=False, scheme=recipes.NVFP4_TRAINING)
        torch._dynamo.reset()
        x, g = torch.randn(rows, 64) + 0.3, torch.randn(rows, 32)
        want = g.mT @ x
        for function in (
            layer,
            lambda x: hop.quantized(linear, recipes.NVFP4_TRAINING, x, layer.weight),
            torch.compile(layer, dynamic=True, backend="aot_eager", fullgraph=True),
        ):
            layer.weight.grad = None
            function(x).backward(g)
            assert layer.weight.grad is not None
            error = float((layer.weight.grad - want).norm() / want.norm())
            # two operands of 4 bits, one of them rounded at random: each is off by 1/8 of a number at most
            assert error < 0.25, error
