"""quantize, dequantize, fake_quantize: gradients against PyTorch's own, errors, and every preset on every route."""

import itertools
import unittest

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop import formats, presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, Static
from tests.support import routes
from tests.support.errors import assert_refused
from tests.support.leaves import ALL_SETTINGS, BOTH, DEQUANTIZE, LEAVES, QUANTIZE, Setting

I8, AFFINE = presets.INT8_TENSOR_STATIC, presets.INT8_TENSOR_STATIC_AFFINE
ROW_STATIC = Quantizer(formats.INT8, (1, -1), Static(affine=True))


def spread(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


class TestGradientsAgainstTorch(unittest.TestCase):
    """PyTorch has fake quantization with straight-through gradients of x, and with learned scales and zero points."""

    @parameterized.expand([("tensor", AFFINE, 5, 1, ()), ("channel", ROW_STATIC, -8, 16, (0,))])
    def test_of_each(self, kind, q, least, blocks, axis):
        """PyTorch truncates a learned zero point of a tensor below 0 in the forward, but not one of a channel."""
        x, direction = spread((16, 96)).requires_grad_(), spread((16, 96), 1)
        scale = torch.linspace(0.05, 0.01, blocks)
        zero = torch.arange(least, least + blocks, dtype=torch.int32)
        want = getattr(torch, f"fake_quantize_per_{kind}_affine")(x, scale, zero, *axis, -128, 127)
        got = hop.fake_quantize(q, x, scale=scale[:, None], zero_point=zero[:, None].to(torch.int8))
        torch.testing.assert_close(got, want)
        assert torch.equal(*(torch.autograd.grad(y, x, direction)[0] for y in (got, want)))
        scale, zero = scale.requires_grad_(), zero.float().requires_grad_()
        learned = getattr(torch, f"_fake_quantize_learnable_per_{kind}_affine")
        want = learned(x, scale, zero, *axis, -128, 127, 1.0)
        got = hop.fake_quantize(q, x, scale=scale[:, None], zero_point=zero[:, None])
        grads = [torch.autograd.grad(y, (x, scale, zero), direction) for y in (got, want)]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_quantize_has_the_gradient_of_fake_quantize(self):
        x = spread((8, 96)).requires_grad_()
        scale = torch.full((8, 1), 0.02, requires_grad=True)
        zero = torch.full((8, 1), 3.0, requires_grad=True)
        direction = spread((8, 96), 1)
        given = {"scale": scale, "zero_point": zero}
        through = hop.dequantize(hop.quantize(ROW_STATIC, x, **given))
        fake = hop.fake_quantize(ROW_STATIC, x, **given)
        assert torch.equal(through, fake)
        for ours, theirs in zip(
            *(torch.autograd.grad(y, (x, scale, zero), direction) for y in (through, fake)), strict=True
        ):
            assert torch.equal(ours, theirs)


class TestGradients(unittest.TestCase):
    def test_clipped_and_plain(self):
        """By hand: 3 codes, of which 1.0 lies in range and 9.0 is clipped."""
        q = Quantizer(formats.TERNARY, scale=Static())
        for gradient, want in (("clipped", [1.0, 0.0, 0.0]), ("plain", [1.0, 1.0, 1.0])):
            x = torch.tensor([[1.0, 9.0, -9.0]], requires_grad=True)
            hop.fake_quantize(q, x, scale=torch.full((1, 1), 2.0), gradient=gradient).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [want]

    def test_a_scale_by_hand(self):
        """x / s = 1.2, 0.7 and 4.5 give codes 1, 1 and 1 (clipped): (1 - 1.2) + (1 - 0.7) + 1."""
        q = Quantizer(formats.TERNARY, scale=Static())
        scale = torch.tensor([[2.0]], requires_grad=True)
        hop.fake_quantize(q, torch.tensor([[2.4, 1.4, 9.0]]), scale=scale).sum().backward()
        assert scale.grad is not None
        torch.testing.assert_close(scale.grad, torch.tensor([[1.1]]))

    @parameterized.expand([("tensor", (1, 1)), ("scalar", ()), ("row", (4, 1)), ("one number", (1,))])
    def test_the_scale_has_its_own_shape(self, _name, shape):
        """A scale that is broadcast collects the sum over what it serves."""
        q = Quantizer(formats.INT8, (1, -1), Static())
        x = spread((4, 32))
        scale = torch.full(shape, 0.05, requires_grad=True)
        hop.dequantize(hop.quantize(q, x, scale=scale)).sum().backward()
        per_row = torch.full((4, 1), 0.05, requires_grad=True)
        hop.fake_quantize(q, x, scale=per_row).sum().backward()
        assert scale.grad is not None and per_row.grad is not None and scale.grad.shape == shape
        torch.testing.assert_close(scale.grad, per_row.grad.sum_to_size(shape))

    def test_abs_mean_clips(self):
        x = torch.tensor([[0.1, 0.1, 0.1, 9.0]], requires_grad=True)
        hop.fake_quantize(Quantizer(formats.TERNARY, scale=AbsMean()), x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[1.0, 1.0, 1.0, 0.0]]

    def test_a_quantized_tensor_as_leaf(self):
        w = hop.quantize(presets.INT8_ROW, spread((4, 32))).requires_grad_()
        (hop.dequantize(w) * 3).sum().backward()
        assert type(w.grad) is Tensor and w.grad.dtype == torch.float32 and bool((w.grad == 3).all())

    def test_learned_scale_descends(self):
        """A scale that starts far off ends near the one with the least error."""
        x, q = spread((1, 4096)) / 3, Quantizer(formats.INT4, scale=Static())
        scale = torch.full((1, 1), 2.0, requires_grad=True)
        optimizer = torch.optim.Adam([scale], 0.02)

        def loss() -> Tensor:
            return (hop.fake_quantize(q, x, scale=scale) - x).square().mean()

        for _ in range(200):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        found = hop.calibration.mse(q, x, steps=200, least=0.1)["scale"]
        best = (hop.fake_quantize(q, x, scale=found) - x).square().mean()
        assert loss() <= 1.1 * best, (loss(), best)


class TestStochastic(unittest.TestCase):
    def test_generator_draws_a_seed(self):
        x = spread((32, 64))
        seed = torch.randint(-(2**63), 2**63 - 1, (), generator=torch.Generator().manual_seed(7))
        want = hop.quantize(presets.NVFP4_STOCHASTIC, x, noise=hop.noise(seed, x.shape))
        got = hop.quantize(presets.NVFP4_STOCHASTIC, x, generator=torch.Generator().manual_seed(7))
        assert torch.equal(got.codes, want.codes)

    def test_noise_made_in_a_compiled_graph(self):
        q = Quantizer(formats.INT8, (1, -1), stochastic=True)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def f(x):
            return hop.fake_quantize(q, x, noise=torch.randint(0, 256, x.shape, dtype=torch.uint8))

        x = spread((8, 64))
        torch.manual_seed(3)
        got = f(x)
        step = hop.quantize(q, x, noise=torch.zeros_like(x, dtype=torch.uint8)).scale
        assert bool(((got - x).abs() <= step * 1.001).all()) and not torch.equal(got, f(x))


X = torch.ones(4, 32)
NOISE = torch.zeros(4, 32, dtype=torch.uint8)
SCALE, ZERO = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int8)
STATIC = Quantizer(formats.INT8, (1, -1), Static())
STOCHASTIC = Quantizer(formats.INT8, (1, -1), stochastic=True)
# name, error, words that it must hold, quantizer, x, options
ERRORS = [
    ("integers", TypeError, ["x must be", "torch.int32", "cast"], presets.INT8_ROW, X.int(), {}),
    ("float8", TypeError, ["x must be", "float8"], presets.INT8_ROW, X.to(torch.float8_e4m3fn), {}),
    ("no_scale", ValueError, ["no rule", "scale="], STATIC, X, {}),
    ("no_scale_affine", ValueError, ["scale= and zero_point="], ROW_STATIC, X, {}),
    ("zero_alone", ValueError, ["zero_point must be given with scale"], ROW_STATIC, X, {"zero_point": ZERO}),
    ("no_zero", ValueError, ["needs zero_point in addition to scale"], ROW_STATIC, X, {"scale": SCALE}),
    ("zero_too_many", ValueError, ["has no zero point"], STATIC, X, {"scale": SCALE, "zero_point": ZERO}),
    ("scale_shape", ValueError, ["(4, 1)", "(3, 1)"], STATIC, X, {"scale": torch.ones(3, 1)}),
    ("scale_dtype", TypeError, ["scale must be floating point", "int64"], STATIC, X, {"scale": SCALE.long()}),
    ("zero_dtype", TypeError, ["zero_point", "bool"], ROW_STATIC, X, {"scale": SCALE, "zero_point": ZERO.bool()}),
    ("gradient", ValueError, ["gradient must be one of", "'ste'"], presets.INT8_ROW, X, {"gradient": "ste"}),
    ("no_noise", ValueError, ["rounds at random", "hop.noise(seed, x.shape)"], STOCHASTIC, X, {}),
    ("noise_unasked", ValueError, ["rounds to the nearest"], presets.INT8_ROW, X, {"noise": NOISE}),
    ("noise_shape", ValueError, ["noise must be uint8", "(2, 32)"], STOCHASTIC, X, {"noise": NOISE[:2]}),
    ("noise_dtype", ValueError, ["noise must be uint8", "int64"], STOCHASTIC, X, {"noise": NOISE.long()}),
]


class TestErrors(unittest.TestCase):
    @parameterized.expand([(f"{n}_{f.__name__}", f, *rest) for (n, *rest), f in
                           itertools.product(ERRORS, (hop.quantize, hop.fake_quantize))])  # fmt: skip
    @pytest.mark.quick(3)
    def test_everywhere(self, _name, function, error, words, q, x, options):
        """The same type and words in eager, with fakes, under make_fx, torch.compile and torch.export."""
        assert_refused(error, [*words, function.__name__], lambda: function(q, x, **options))
        assert_refused(error, words, lambda: make_fx(lambda x: function(q, x, **options))(x))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert_refused(error, words, lambda: function(q, mode.from_tensor(x), **options))

        class Model(torch.nn.Module):
            def forward(self, x):
                return hop.dequantize(function(q, x, **options))

        for route in (
            lambda: torch.compile(Model(), backend="aot_eager", fullgraph=True)(x),
            lambda: torch.export.export(Model(), (x,)),
        ):
            with self.assertRaises(Exception) as caught:
                route()
            assert all(word.strip("'") in str(caught.exception) for word in words), caught.exception

    def test_sparse(self):
        for function in (hop.quantize, hop.fake_quantize):
            assert_refused(
                TypeError,
                ["x must be dense", "sparse_coo", "to_dense"],
                lambda f=function: f(presets.INT8_ROW, X.to_sparse()),
            )

    def test_no_quantizer(self):
        assert_refused(TypeError, ["q must be a Quantizer", "'int8'"], lambda: hop.quantize("int8", X))

    def test_no_tensor(self):
        assert_refused(TypeError, ["x must be a tensor", "[1.0]"], lambda: hop.quantize(presets.INT8_ROW, [1.0]))
        assert_refused(TypeError, ["x must be a QuantizedTensor"], lambda: hop.dequantize(X))
        assert_refused(TypeError, ["x must be a QuantizedTensor", "[1.0]"], lambda: hop.dequantize([1.0]))

    def test_noise_and_generator(self):
        both = {"noise": NOISE, "generator": torch.Generator()}
        assert_refused(ValueError, ["noise and generator"], lambda: hop.quantize(STOCHASTIC, X, **both))

    def test_usages(self):
        assert_refused(
            ValueError, ["usages", "'sideways'"], lambda: hop.quantize(presets.INT8_ROW, X, usages=["sideways"])
        )
        assert_refused(ValueError, ["flat=True"], lambda: hop.quantize(presets.STATE8, X, usages=BOTH))
        assert_refused(
            ValueError, ["rows must be a multiple"], lambda: hop.quantize(presets.NVFP4_HADAMARD, X, usages=BOTH)
        )
        assert_refused(
            ValueError, ["scale belongs to one copy"], lambda: hop.quantize(STATIC, X, scale=SCALE, usages=BOTH)
        )

    def test_vmap_across_blocks(self):
        batch = torch.ones(3, 100)
        with self.assertRaisesRegex(NotImplementedError, "share blocks"):
            torch.vmap(lambda x: hop.dequantize(hop.quantize(presets.STATE8, x)))(batch)
        got = torch.vmap(lambda x: hop.fake_quantize(presets.STATE8, x))(batch)
        assert torch.equal(got, torch.stack([hop.fake_quantize(presets.STATE8, x) for x in batch]))

    def test_nothing_is_corrupted(self):
        x, scale, noise = X.clone(), SCALE.clone(), NOISE.clone()
        for _, error, _, q, given, options in ERRORS:
            with self.assertRaises(error):
                hop.quantize(q, given, **options)
        assert torch.equal(x, X) and torch.equal(scale, SCALE) and torch.equal(noise, NOISE)


class TestCopies(unittest.TestCase):
    """Tensors with a column-wise copy, on the routes that make them."""

    SETTINGS = (
        Setting("int8", presets.INT8_TENSOR, usages=BOTH),
        Setting("mxfp8", presets.MXFP8, usages=BOTH),
        Setting("nvfp4_columns", presets.NVFP4_HADAMARD, shape=(4, 8, 48), usages=("columnwise",)),
        Setting("int4_columns", presets.INT4_32, usages=("columnwise",)),
    )

    @parameterized.expand([(r.name, r) for r in routes.ROUTES if not r.compiler and r.name not in ("vmap", "func")])
    @pytest.mark.sampled(3)
    @pytest.mark.quick(10)
    def test_routes(self, _name, route):
        cases = [leaf.case(s) for leaf, s in itertools.product((QUANTIZE, DEQUANTIZE), self.SETTINGS)]
        gradients = [QUANTIZE.case(s) for s in self.SETTINGS]
        route.run(cases, gradients)


def _cases(settings):
    pairs = list(itertools.product(LEAVES, settings))
    return [leaf.case(s) for leaf, s in pairs], [leaf.gradient_case(s) for leaf, s in pairs]


PROGRAMS = [r for r in routes.BATCHED if not r.compiler]
COMPILERS = [r for r in routes.BATCHED if r.compiler for _ in range(4 if r.name == "inductor" else 1)]


@pytest.mark.full
class TestEveryPresetOnEveryRoute(unittest.TestCase):
    @parameterized.expand([(f"{r.name}_{s.name}", r, s) for r, s in itertools.product(routes.SINGLE, ALL_SETTINGS)])
    @pytest.mark.sampled(6)
    def test_single(self, _name, route, setting):
        route.run(*_cases([setting]))

    # Tracing and compiling take long: each such route runs some of the settings, and together they run all.
    @parameterized.expand([(r.name, i, r) for i, r in enumerate(PROGRAMS)])
    @pytest.mark.sampled(2)
    def test_program(self, _name, i, route):
        route.run(*_cases(ALL_SETTINGS[i :: len(PROGRAMS)]))

    @parameterized.expand([(f"{r.name}_{i}", i, r) for i, r in enumerate(COMPILERS)])
    @pytest.mark.compiler
    @pytest.mark.sampled(3)
    def test_compiled_program(self, _name, i, route):
        route.run(*_cases(ALL_SETTINGS[i::16]))


class TestAmaxFloor(unittest.TestCase):
    def test_floor(self):
        got = hop.quantize(Quantizer(formats.INT8, (1, -1), Amax(floor=1.0)), torch.full((1, 4), 0.5))
        assert got.scale.item() == torch.tensor(1.0).div(127).item()
