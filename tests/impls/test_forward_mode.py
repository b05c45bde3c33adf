"""Forward mode: a tangent is followed, on every way that a call can take, or refused. None is lost.

Oracles: differences, the backward (⟨J t, u⟩ = ⟨t, Jᵀ u⟩), and the tangent of the operator on fake-quantized floats."""

import functools
import random
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.autograd import forward_ad

import hop
from hop import presets, recipes, schemes
from hop.compat import eager
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.optim import AdamW
from tests.support.schemes import EVERY

aten = torch.ops.aten
linear = aten.linear.default
WEIGHTS = ("INT8_ROW", "INT4_32", "UINT4_32_AFFINE", "FP8_ROW", "MXFP8", "NVFP4", "INT8_TENSOR")
TRAINING = (
    "INT8_DYNAMIC",
    "INT8_TRAINING",
    "FP8_HYBRID",
    "FP8_BLOCKWISE",
    "MXFP8_TRAINING",
    "NVFP4_TRAINING",
    "INT4_WEIGHT_32",
    "INT8_DA_TERNARY_W",
)


def tangent_of(function: Callable[..., Tensor], given: list[Tensor], directions: list[Tensor | None]) -> Tensor | None:
    with forward_ad.dual_level():
        pairs = zip(given, directions, strict=True)
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        return forward_ad.unpack_dual(function(*duals)).tangent


def close(got: Tensor | None, want: Tensor, share: float = 1e-5) -> None:
    assert got is not None, "the tangent is lost"
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=share, atol=share * float(want.abs().max()))


def transposed(function: Callable[..., Tensor], given: list[Tensor], directions: list[Tensor], share: float) -> None:
    """The tangent is the transpose of the backward."""
    t = tangent_of(function, given, directions)  # type: ignore[arg-type]
    assert t is not None
    inputs = [x.detach().requires_grad_() for x in given]
    out = function(*inputs)
    u = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, u)
    left = (t.double() * u.double()).sum()
    right = sum((g.double() * d.double()).sum() for g, d in zip(grads, directions, strict=True))
    size = t.double().norm() * u.double().norm()
    assert abs(float(left - right)) <= share * float(size), (left, right)


class TestScaled(unittest.TestCase):
    """Plain floats beside quantized tensors: the small calls for which eager mode keeps plans."""

    @parameterized.expand([(name, dtype) for name in WEIGHTS for dtype in (torch.float32, torch.float64)])
    @pytest.mark.quick(3)
    def test_random_calls(self, name: str, dtype: torch.dtype):
        rng = random.Random(name)
        for _ in range(4):
            torch.manual_seed(rng.randrange(2**30))
            m, n, k = rng.randint(1, 5), rng.choice([8, 12, 16]), rng.choice([32, 64])
            w = hop.quantize(getattr(presets, name), torch.randn(n, k))
            x, b = torch.randn(m, k, dtype=dtype), torch.randn(n, dtype=dtype)
            t, s = torch.randn_like(x), torch.randn_like(b)
            output = torch.float32 if dtype == torch.float32 else torch.float64

            def call(x: Tensor, b: Tensor, w: Any = w, output: Any = output) -> Tensor:
                return hop.scaled(linear, output, x, w, b)

            numbers = hop.dequantize(w).to(dtype)
            for _ in range(2):
                call(x, b)
                close(tangent_of(call, [x, b], [t, None]), t @ numbers.mT)
                close(tangent_of(call, [x, b], [None, s]), s.expand(m, n))
                close(tangent_of(call, [x, b], [t, s]), t @ numbers.mT + s)
            transposed(call, [x, b], [t, s], 1e-5)

    def test_float64_against_differences(self):
        w = hop.quantize(presets.INT8_ROW, torch.randn(8, 32))
        x, t = torch.randn(3, 32, dtype=torch.float64), torch.randn(3, 32, dtype=torch.float64)

        def call(x: Tensor) -> Tensor:
            return hop.scaled(linear, torch.float64, x, w)

        step = 1e-3
        difference = (call(x + step * t) - call(x - step * t)) / (2 * step)
        close(tangent_of(call, [x], [t]), difference, 1e-9)

    def test_the_bias_of_codes(self):
        x, w = hop.quantize(presets.INT8_ROW, torch.randn(4, 64)), hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        b, s = torch.randn(8), torch.randn(8)
        for _ in range(3):
            close(tangent_of(lambda b: hop.scaled(linear, torch.float32, x, w, b), [b], [s]), s.expand(4, 8))

    def test_convolution(self):
        w = hop.quantize(presets.INT8_CONV, torch.randn(6, 4, 3, 3))
        x, b = hop.quantize(presets.UINT8_TENSOR_AFFINE, torch.randn(2, 4, 6, 6)), torch.randn(6)
        for _ in range(3):
            got = tangent_of(lambda b: hop.scaled(aten.conv2d.default, torch.float32, x, w, b), [b], [torch.ones(6)])
            close(got, torch.ones(2, 6, 4, 4))

    @parameterized.expand([(name,) for name in WEIGHTS])
    @pytest.mark.quick(3)
    def test_a_quantized_tensor_carries_one(self, name: str):
        """From what is quantized, through views and packing, to a quantized result, and out of it."""
        q = getattr(presets, name)
        rows = presets.INT8_ROW if "INT" in name else presets.FP8_ROW
        x, w = torch.randn(4, 64), torch.randn(8, 64)
        t, s = torch.randn_like(x), torch.randn_like(w)

        def call(x: Tensor, w: Tensor) -> Tensor:
            codes = hop.quantize(rows, x)
            y = hop.scaled(linear, presets.INT8_ROW_AFFINE, codes, hop.pack(hop.quantize(q, w)))
            return hop.dequantize(y.view(2, 2, 8))

        def real(x: Tensor, w: Tensor) -> Tensor:
            y = torch.nn.functional.linear(hop.fake_quantize(rows, x), hop.fake_quantize(q, w))
            return hop.fake_quantize(presets.INT8_ROW_AFFINE, y).view(2, 2, 8)

        for directions in ([t, None], [None, s], [t, s]):
            want = tangent_of(real, [x, w], directions)
            assert want is not None
            close(tangent_of(call, [x, w], directions), want, 1e-4)
        transposed(call, [x, w], [t, s], 1e-5)

    def test_static_output(self):
        """By the scale and the zero point of the output too, where codes are clipped."""
        x, w = hop.quantize(presets.INT8_ROW, torch.randn(4, 64)), hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        given = [torch.tensor(0.05), torch.tensor(3.0)]

        def call(scale: Tensor, zero_point: Tensor) -> Tensor:
            q = presets.INT8_TENSOR_STATIC_AFFINE
            return hop.dequantize(hop.scaled(linear, q, x, w, output_scale=scale, output_zero_point=zero_point))

        transposed(call, given, [torch.tensor(0.3), torch.tensor(-0.7)], 1e-5)

    def test_make_dual_of_a_quantized_tensor(self):
        w, t = hop.quantize(presets.MXFP8, torch.randn(8, 64)), torch.randn(8, 64)
        x = torch.randn(4, 64)
        for _ in range(3):
            close(tangent_of(lambda w: hop.scaled(linear, torch.float32, x, w), [w], [t]), x @ t.mT)
            close(tangent_of(hop.dequantize, [w], [t]), t)

    def test_buffers_carry_none(self):
        w = hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        proto = hop.TensorProto.of(w)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a buffer has a tangent"):
            proto.create_tensor([w.codes, forward_ad.make_dual(w.scale, w.scale)])

    def test_buffers_are_assigned_none(self):
        t = hop.quantize(presets.INT8_ROW, torch.randn(4, 64))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a buffer has a tangent"):
            t.scale = forward_ad.make_dual(t.scale.clone(), torch.ones_like(t.scale))

    def test_what_is_not_finite(self):
        """Values are those of eager mode there, and have no tangent."""
        x = torch.randn(4, 64)
        x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, -torch.inf
        for name in WEIGHTS:
            q = getattr(presets, name)
            with forward_ad.dual_level():
                value, tangent = forward_ad.unpack_dual(
                    hop.fake_quantize(q, forward_ad.make_dual(x, torch.ones_like(x)))
                )
            torch.testing.assert_close(value, hop.fake_quantize(q, x), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(tangent, x.isfinite().float()), name

    def test_below_autograd(self):
        """Where the derivative is found by a rule of its own, nothing is asked for, and nothing fails."""
        x, w = torch.randn(4, 64), hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            with eager.below_autograd():
                y = hop.scaled(linear, torch.float32, dual, w)
            assert torch.equal(y, hop.scaled(linear, torch.float32, x, w))


class TestQuantized(unittest.TestCase):
    @parameterized.expand([(name,) for name in TRAINING])
    @pytest.mark.quick(2)
    def test_layers(self, name: str):
        """Of hop.nn, by input, weight and bias: that of hop.quantized, and the transpose of a backward that is that of
        fake quantization."""
        torch.manual_seed(3)
        scheme = EVERY[name]
        layer = hop.nn.Linear(64, 32, scheme=scheme)
        names = ["weight", "bias"]
        given = [torch.randn(16, 64), *(getattr(layer, n).detach() for n in names)]
        directions = [torch.randn_like(x) for x in given]

        def call(x: Tensor, *rest: Tensor) -> Tensor:
            torch.manual_seed(5)  # from which the seeds of stochastic rounding are drawn
            return torch.func.functional_call(layer, dict(zip(names, rest, strict=True)), (x,))

        def real(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            torch.manual_seed(5)
            return hop.quantized(linear, scheme, x, w, b)

        want = tangent_of(real, given, directions)  # type: ignore[arg-type]
        assert want is not None
        close(tangent_of(call, given, directions), want, 0.0)  # type: ignore[arg-type]
        floats = Scheme(scheme.lhs, scheme.rhs)
        if not floats.is_stochastic():
            transposed(functools.partial(hop.quantized, linear, floats), given, directions, 1e-5)
            close(want, tangent_of(functools.partial(hop.quantized, linear, floats), given, directions), 1e-5)  # type: ignore[arg-type]

    def test_delayed_scales(self):
        layer = hop.nn.Linear(64, 32, scheme=recipes.FP8_DELAYED)
        x, t = torch.randn(16, 64), torch.randn(16, 64)
        for state in layer.scales.values():
            state.amax.fill_(4.0)
        want = t @ hop.fake_quantize(recipes.FP8_DELAYED.rhs, layer.weight.detach(), scale=torch.full((1, 1), 4.0)).mT
        close(tangent_of(layer, [x], [t]), want, 1e-4)

    @parameterized.expand([("ste",), ("quantized",)])
    def test_of_a_backward(self, backward: str):
        """A tangent of the gradient of the result, in a backward whose forward had none: the gradient is linear in it,
        straight through its roundings."""
        grad = Quantizer(INT8, (1, -1)) if backward == "quantized" else None
        scheme = Scheme(presets.INT8_ROW, presets.INT8_ROW, grad=grad, backward=backward)
        g, t = torch.randn(6, 8), torch.randn(6, 8)
        layer = hop.nn.Linear(40, 8, bias=False, scheme=scheme)
        layer.save_original = True
        x = torch.randn(6, 40, requires_grad=True)
        floats = hop.fake_quantize(presets.INT8_ROW, layer.weight.detach())

        def of(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            y = forward(x)
            return lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0]

        close(tangent_of(of(lambda x: hop.quantized(linear, scheme, x, layer.weight)), [g], [t]), t @ floats, 1e-4)
        close(tangent_of(of(layer), [g], [t]), t @ floats, 1e-4)

    def test_of_a_backward_that_saved_codes(self):
        layer = hop.nn.Linear(40, 8, scheme=recipes.INT8_TRAINING)
        x = torch.randn(6, 40, requires_grad=True)
        y = layer(x)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="save_original"):
            torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


class TestOthers(unittest.TestCase):
    def test_optimizers_refuse(self):
        p = torch.nn.Parameter(torch.randn(8, 8))
        optimizer = AdamW([p])
        p.grad = torch.randn(8, 8)
        optimizer.step()
        before = p.detach().clone()
        with forward_ad.dual_level(), torch.no_grad():
            p.grad = forward_ad.make_dual(p.grad, torch.ones(8, 8))
            with pytest.raises(NotImplementedError, match="carries a tangent"):
                optimizer.step()
        assert torch.equal(p, before)

    @pytest.mark.full
    def test_a_function_that_torch_compiles(self):
        """A dual tensor that is passed into a program: PyTorch loses it, of its own operators and so of ours. When this
        fails, docs/limits.md has a line less."""
        torch._dynamo.reset()
        x, t = torch.randn(5), torch.randn(5)
        plain = torch.compile(torch.sin, backend="inductor")
        plain(x)
        assert tangent_of(plain, [x], [t]) is None

    def test_a_level_inside_of_a_program(self):
        w = hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        x, t = torch.randn(4, 64), torch.randn(4, 64)

        def inside(x: Tensor, t: Tensor) -> Any:
            with forward_ad.dual_level():
                y = hop.scaled(linear, torch.float32, forward_ad.make_dual(x, t), w)
                return forward_ad.unpack_dual(y).tangent

        torch._dynamo.reset()
        close(torch.compile(inside, backend="aot_eager", fullgraph=True)(x, t), t @ hop.dequantize(w).mT)

    @pytest.mark.compiler
    @pytest.mark.full
    def test_jvp_inside_of_inductor(self):
        w = hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        x, t = torch.randn(4, 64), torch.randn(4, 64)

        def inside(x: Tensor, t: Tensor) -> Any:
            def call(x: Tensor) -> Tensor:
                y = hop.scaled(linear, torch.float32, x, w)
                return hop.quantized(linear, schemes.INT8_DYNAMIC, y, y)

            return torch.func.jvp(call, (x,), (t,))

        torch._dynamo.reset()
        got = torch.compile(inside, fullgraph=True)(x, t)
        for g, want in zip(got, inside(x, t), strict=True):
            close(g, want)

    def test_calls_without_tangents_take_the_kernels(self):
        """In a level of forward mode too: the same bits, and plans."""
        x, w = torch.randn(4, 64), hop.quantize(presets.INT8_ROW, torch.randn(8, 64))
        want = hop.scaled(linear, torch.float32, x, w)
        with forward_ad.dual_level():
            for _ in range(2):
                assert torch.equal(hop.scaled(linear, torch.float32, x, w), want)
