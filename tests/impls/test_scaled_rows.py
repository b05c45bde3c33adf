"""scaled between products: functions of each element, gated products, softmax and norms, held against exact arithmetic
in Python's rational numbers and against mpmath."""

import math
import tempfile
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hop
from hop import Quantizer, presets
from hop.compat.export import as_decomposition
from hop.impls.scaled import scaled_buffers
from hop.numerics import functions, row_sums
from hop.numerics.formats import E4M3, INT8, UINT8
from hop.numerics.scale_rules import CurrentScaling, Static

aten = torch.ops.aten
STATIC = Quantizer(INT8, (-1,), Static(affine=True))

EXACT = {
    "exp": mpmath.exp,
    "exp2": lambda x: mpmath.power(2, x),
    "log": mpmath.log,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
}


def float32(x: Any) -> float:
    """The nearest float32 of an exact number, ties to even."""
    if not isinstance(x, Fraction):
        if not mpmath.isfinite(x):
            return float(x)
        sign, mantissa, exponent, _ = x._mpf_
        x = Fraction(-mantissa if sign else mantissa) * (Fraction(2) ** exponent)
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 24, -149)
    while size / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while exponent > -149 and size / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    found = Fraction(round(size / Fraction(2) ** exponent)) * Fraction(2) ** exponent
    return math.copysign(float(found) if found < 2**128 else math.inf, x)


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0x7FC00000, x.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", sorted(EXACT))
@pytest.mark.quick(2)
def test_functions_are_rounded_once(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(300, generator=generator) * scale for scale in (1e-6, 1e-2, 1, 10)]
    x = torch.cat([*parts, torch.tensor([2.0**-126, -(2.0**-126), 1e-41, 87.0, -87.0, 1.0, -1.0])])
    x = x.abs() if name in ("log", "rsqrt") else x
    with mpmath.workprec(400):
        want = torch.tensor([float32(EXACT[name](mpmath.mpf(v))) for v in x.tolist()])
    assert torch.equal(functions.apply(name, x), want)


def test_functions_at_the_ends() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([inf, -inf, nan, 0.0, -0.0])
    want = {
        "exp": [inf, 0.0, nan, 1.0, 1.0],
        "exp2": [inf, 0.0, nan, 1.0, 1.0],
        "log": [inf, nan, nan, -inf, -inf],
        "tanh": [1.0, -1.0, nan, 0.0, -0.0],
        "erf": [1.0, -1.0, nan, 0.0, -0.0],
        "sigmoid": [1.0, 0.0, nan, 0.5, 0.5],
        "rsqrt": [0.0, nan, nan, inf, -inf],
        "gelu": [inf, -0.0, nan, 0.0, -0.0],
        "gelu_tanh": [inf, -0.0, nan, 0.0, -0.0],
        "silu": [inf, -0.0, nan, 0.0, -0.0],
        "sqrt": [inf, nan, nan, 0.0, -0.0],
        "sin": [nan, nan, nan, 0.0, -0.0],
        "cos": [nan, nan, nan, 1.0, 1.0],
    }
    assert want.keys() == set(functions.NAMES)
    for name, values in want.items():
        assert torch.equal(bits(functions.apply(name, x)), bits(torch.tensor(values))), name


# ---- sums of rows


def unit(row: list[float]) -> Fraction:
    """The power of two below the largest magnitude of a row."""
    return Fraction(2) ** max(-126, math.frexp(max(map(abs, row)))[1] - 1)


def exact_sum(row: list[float]) -> Fraction:
    u = unit(row)
    return Fraction(sum(round(Fraction(x) / u * 2**40) for x in row)) * u / 2**40


def exact_sum_of_squares(row: list[float]) -> Fraction:
    u = unit(row)
    squares = [Fraction(float32((Fraction(x) / u * 2**20) ** 2)) for x in row]
    return Fraction(sum(map(round, squares))) * u * u / 2**40


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(12, 37, generator=generator)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] = 1.25
    x[4] = 0
    x[5, 3] = 3e4
    x[6] = 2.0**-140
    x[7] = x[7] + 1000
    return x


def test_sums_of_rows() -> None:
    x = rows()
    for found, exact in ((row_sums.row_sum, exact_sum), (row_sums.row_sum_of_squares, exact_sum_of_squares)):
        assert found(x, [-1])[:, 0].tolist() == [float(exact(row)) for row in x.tolist()]
    x[0, 0], x[1, 1] = math.nan, -math.inf
    assert row_sums.row_sum(x, [-1])[:, 0].isnan().tolist() == [True, True] + [False] * 10


def test_sums_do_not_depend_on_the_order() -> None:
    x = torch.randn(50, 4096, generator=torch.Generator().manual_seed(7)) * 100
    for found in (row_sums.row_sum, row_sums.row_sum_of_squares):
        want = found(x, [-1])
        for i in range(5):
            shuffled = x[:, torch.randperm(4096, generator=torch.Generator().manual_seed(i))]
            assert torch.equal(found(shuffled, [-1]), want)


# ---- norms and softmax


def root(x: Fraction | float, eps: float) -> float:
    return float32(Fraction(1 / math.sqrt(float(x) + eps)))


def multiplied(a: float, b: float) -> float:
    return float32(Fraction(a) * Fraction(b))


def added(a: float, b: float) -> float:
    return float32(Fraction(a) + Fraction(b))


def layer_norm(row: list[float], weight: list[float], bias: list[float], eps: float) -> list[float]:
    n = len(row)
    mean = float32(Fraction(float(exact_sum(row)) / n))
    d = [added(x, -mean) for x in row]
    r = root(float(exact_sum_of_squares(d)) / n, eps)
    return [added(multiplied(multiplied(x, r), w), b) for x, w, b in zip(d, weight, bias, strict=True)]


def rms_norm(row: list[float], weight: list[float], eps: float) -> list[float]:
    r = root(float(exact_sum_of_squares(row)) / len(row), eps)
    return [multiplied(multiplied(x, r), w) for x, w in zip(row, weight, strict=True)]


def codes_of(x: Tensor) -> Any:
    return hop.quantize(presets.INT8_ROW_AFFINE, x)


def test_norms_are_what_they_say() -> None:
    x, generator = rows(), torch.Generator().manual_seed(8)
    x = x[[0, 3, 4, 5, 7, 8]]
    weight, bias = torch.randn(2, 37, generator=generator)
    q = codes_of(x)
    values = q.dequantize().tolist()
    got = hop.scaled(aten.layer_norm.default, torch.float32, q, [37], weight, bias, 1e-5)
    assert got.tolist() == [layer_norm(row, weight.tolist(), bias.tolist(), 1e-5) for row in values]
    got = hop.scaled(aten.rms_norm.default, torch.float32, q, [37], weight, 1e-6)
    assert got.tolist() == [rms_norm(row, weight.tolist(), 1e-6) for row in values]


def softmax(row: list[float]) -> tuple[list[float], float]:
    """e and the sum in fixed point."""
    most = max(row)
    with mpmath.workprec(400):
        e = [float32(mpmath.exp(mpmath.mpf(added(x, -most)))) for x in row]
    return e, float(Fraction(sum(round(Fraction(v) * 2**40) for v in e)) / 2**40)


def test_softmax_is_what_it_says() -> None:
    x = rows()[[0, 3, 5, 7, 8]] * 3
    q = codes_of(x)
    values = q.dequantize().tolist()
    found = [softmax(row) for row in values]
    got = hop.scaled(aten.softmax.int, torch.float32, q, -1)
    assert got.tolist() == [[multiplied(v, float32(Fraction(1 / s))) for v in e] for e, s in found]
    got = hop.scaled(aten.log_softmax.int, torch.float32, q, -1)
    with mpmath.workprec(400):
        logs = [float32(mpmath.log(mpmath.mpf(float32(Fraction(s))))) for _, s in found]
    want = [[added(added(v, -max(row)), -log) for v in row] for row, log in zip(values, logs, strict=True)]
    assert got.tolist() == want


def test_along_another_dimension_and_of_one_number() -> None:
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(9))
    q = hop.quantize(presets.INT8_TENSOR, x)
    got = hop.scaled(aten.softmax.int, torch.float32, q, 1)
    moved = hop.quantize(presets.INT8_TENSOR, x.movedim(1, -1).contiguous())
    assert torch.equal(got.movedim(1, -1), hop.scaled(aten.softmax.int, torch.float32, moved, -1))
    one = hop.quantize(presets.INT8_TENSOR, torch.tensor(3.0))
    assert hop.scaled(aten.softmax.int, torch.float32, one, 0) == 1


def test_not_finite_rows_are_as_attens() -> None:
    x = torch.zeros(5, 4)
    x[0, 1], x[1, 2], x[2] = math.nan, math.inf, -math.inf
    x[3, 0] = -math.inf
    got = hop.scaled(aten.softmax.int, Quantizer(E4M3, (1, -1), CurrentScaling()), x, -1)
    assert torch.equal(got.dequantize().isnan(), torch.softmax(x, -1).isnan())


# ---- close to ATen's, and its gradients


def cases() -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    weight, bias = torch.randn(2, 16, generator=torch.Generator().manual_seed(10))
    mean, var = torch.randn(16, generator=torch.Generator().manual_seed(11)), torch.rand(16) + 0.5
    return [
        *((name, getattr(aten, name).default, (), {}) for name in ("exp", "exp2", "tanh", "erf", "sigmoid", "silu")),
        ("gelu", aten.gelu.default, (), {}),
        ("gelu_tanh", aten.gelu.default, (), {"approximate": "tanh"}),
        ("hardswish", aten.hardswish.default, (), {}),
        ("hardsigmoid", aten.hardsigmoid.default, (), {}),
        ("leaky_relu", aten.leaky_relu.default, (0.2,), {}),
        ("div", aten.div.Tensor, (var,), {}),
        ("div_scalar", aten.div.Scalar, (3.0,), {}),
        ("maximum", aten.maximum.default, (bias,), {}),
        ("minimum", aten.minimum.default, (bias,), {}),
        ("silu_mul", torch.ops.hop.silu_mul.default, (bias,), {}),
        ("gelu_mul", torch.ops.hop.gelu_mul.default, (bias,), {"approximate": "tanh"}),
        ("softmax", aten.softmax.int, (-1,), {}),
        ("_softmax", aten._softmax.default, (0, False), {}),
        ("log_softmax", aten.log_softmax.int, (1,), {}),
        ("layer_norm", aten.layer_norm.default, ([16], weight, bias), {}),
        ("rms_norm", aten.rms_norm.default, ([16], weight), {}),
        ("batch_norm", aten.batch_norm.default, (weight, bias, mean, var, False, 0.1, 1e-5, True), {}),
    ]


@pytest.mark.parametrize(("name", "op", "args", "kwargs"), cases(), ids=[c[0] for c in cases()])
def test_near_atens_with_its_gradients(name: str, op: Any, args: Any, kwargs: Any) -> None:
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(12)).requires_grad_()
    q = presets.INT8_ROW
    want = op(hop.fake_quantize(q, x), *args, **kwargs)
    got = hop.scaled(op, torch.float32, hop.quantize(q, x), *args, **kwargs)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(13))
    assert torch.allclose(*(torch.autograd.grad(y, x, grad)[0] for y in (got, want)), rtol=1e-5, atol=1e-6)
    if name == "log":
        return
    wide = hop.scaled(op, torch.float64, *_doubled((hop.quantize(q, x.detach()), *args)), **kwargs)
    assert torch.allclose(wide, op(*_doubled((hop.fake_quantize(q, x.detach()), *args)), **kwargs), rtol=1e-6)
    plain = x.detach()
    codes = hop.scaled(op, q, plain, *args, **kwargs)
    real = hop.scaled(op, torch.float32, hop.quantize(presets.INT8_ROW, plain), *args, **kwargs)
    assert codes.quantizer == q and codes.shape == real.shape and codes.dtype == torch.float32
    assert float((codes.dequantize() - op(plain, *args, **kwargs)).abs().max()) <= float(codes.scale.max()) * 0.51
    through = hop.scaled(op, q, x, *args, **kwargs)
    assert torch.autograd.grad(hop.dequantize(through).sum(), x)[0].isfinite().all()


def _doubled(args: Any) -> tuple[Any, ...]:
    return tuple(a.double() if isinstance(a, Tensor) and not hasattr(a, "quantizer") else a for a in args)


def test_where_takes_its_condition_as_it_is() -> None:
    a, b = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(14))
    q, kept = hop.quantize(presets.INT8_ROW, a), a > 0
    got = hop.scaled(aten.where.self, torch.float32, kept, q, b)
    assert torch.equal(got, torch.where(kept, q.dequantize(), b))


# ---- tables of codes


@pytest.mark.parametrize("op", [aten.gelu.default, aten.tanh.default, aten.hardswish.default, aten.leaky_relu.default])
@pytest.mark.parametrize("format", [INT8, UINT8])
def test_codes_with_one_scale_are_a_table(op: Any, format: Any) -> None:
    """The results of all 256 codes are those of the numbers that they stand for, quantized."""
    generator = torch.Generator().manual_seed(15)
    for _ in range(20):
        scale, out = (torch.rand(2, generator=generator) * 0.1 + 1e-3).unbind()
        zeros = torch.randint(format.low, format.high, (2,), generator=generator).to(format.dtype)
        zero, out_zero = zeros.unbind()
        q = Quantizer(format, (-1,), Static(affine=True))
        numbers = (torch.arange(format.low, format.high + 1).float() - zero.float()) * scale
        x = hop.quantize(q, numbers.reshape(16, 16), scale=scale, zero_point=zero)
        assert x.codes.flatten().tolist() == list(range(format.low, format.high + 1))
        got = hop.scaled(op, q, x, output_scale=out, output_zero_point=out_zero)
        y = hop.scaled(op, torch.float32, x)
        assert torch.equal(got.codes, hop.quantize(q, y, scale=out, zero_point=out_zero).codes)
        scales = {"scale": scale.expand(16, 1).contiguous(), "zero_point": zero.expand(16, 1).contiguous()}
        rows = hop.quantize(Quantizer(format, (1, -1), Static(affine=True)), x.dequantize(), **scales)
        assert torch.equal(hop.scaled(op, torch.float32, rows), y)  # by no table


def test_a_lowered_table_is_an_index() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(0.05))
            self.register_buffer("zero", torch.tensor(3, dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            q = hop.quantize(STATIC, x, scale=self.scale, zero_point=self.zero)
            y = hop.scaled(aten.gelu.default, STATIC, q, output_scale=self.scale, output_zero_point=self.zero)
            return y.codes

    model, x = Model(), torch.randn(7, 33, generator=torch.Generator().manual_seed(16)) * 2
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    lowered = program.run_decompositions(hop.decompositions())
    found = [n for n in lowered.graph.nodes if n.target is aten.exp.default]
    assert found and all(n.meta["val"].numel() == 256 for n in found)
    assert torch.equal(lowered.module()(x), model(x))


@pytest.mark.full
def test_equal_on_every_route_over_many() -> None:
    """Eager, compiled, lowered: the same codes, dynamic lengths too."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            q = presets.INT8_ROW
            a = hop.scaled(aten.layer_norm.default, q, x, [64], w, w)
            b = hop.scaled(aten.softmax.int, q, x, 0)
            c = hop.scaled(aten.gelu.default, q, x)
            return a.codes, a.scale, b.codes, b.scale, c.codes, c.scale

    generator = torch.Generator().manual_seed(17)
    model, w = Model(), torch.randn(64, generator=generator)
    x = torch.randn(1000, 64, generator=generator) * 3
    program = torch.export.export(model, (x, w), dynamic_shapes=({0: torch.export.Dim("n", min=2)}, None))
    routes = [program.module(), program.run_decompositions(hop.decompositions()).module()]
    routes.append(torch.compile(model, backend="aot_eager", fullgraph=True))
    for n in (1000, 77):
        for route in routes:
            assert all(map(torch.equal, route(x[:n], w), model(x[:n], w)))


@pytest.mark.exhaustive
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "q", [presets.INT8_ROW, presets.FP8_ROW, presets.INT8_ROW_AFFINE], ids=["int8", "fp8", "affine"]
)
def test_equal_on_every_route_over_ten_million(q: Any, dtype: torch.dtype) -> None:
    """Of each function: eager, compiled, packaged, lowered, one thread and two: no code and no scale differs."""
    names = list(q.quantize(torch.ones(1, 64)))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            calls = [
                hop.scaled(aten.layer_norm.default, q, x, [64], w, w),
                hop.scaled(aten.rms_norm.default, q, x, [64], w),
                hop.scaled(aten.softmax.int, q, x, -1),
                hop.scaled(aten.log_softmax.int, q, x, -1),
                hop.scaled(aten.gelu.default, q, x),
                hop.scaled(aten.silu.default, q, x),
                hop.scaled(aten.tanh.default, q, x),
            ]
            return tuple(getattr(c, name) for c in calls for name in names)

    generator = torch.Generator().manual_seed(29)
    model, w = Model(), torch.randn(64, generator=generator).to(dtype)
    spread = torch.logspace(-3, 1.5, 160_000)[:, None]
    x = (torch.randn(160_000, 64, generator=generator) * spread).to(dtype)
    program = torch.export.export(model, (x, w))
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/p.pt2")
        routes = [program.module(), program.run_decompositions(hop.decompositions()).module()]
        routes += [torch.compile(model, fullgraph=True), torch._inductor.aoti_load_package(path)]
        want, threads = model(x, w), torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                for route in [model, *routes]:
                    for got, expected in zip(route(x, w), want, strict=True):
                        assert got.dtype == expected.dtype
                        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        finally:
            torch.set_num_threads(threads)


# ---- errors


def test_what_cannot_be_asked() -> None:
    x = torch.randn(4, 6)
    q = hop.quantize(presets.INT8_ROW, x)
    with pytest.raises(TypeError, match="give a Quantizer as output"):
        hop.scaled(aten.add.Tensor, torch.float32, x, x)
    assert torch.equal(hop.scaled(aten.exp.default, torch.bfloat16, x), x.double().exp().float().bfloat16())
    with pytest.raises(IndexError, match=r"argument 'dim' of aten\.softmax\.int must be from -2 to 1"):
        hop.scaled(aten.softmax.int, torch.float32, q, 2)
    with pytest.raises(RuntimeError, match=r"'normalized_shape' of aten\.layer_norm\.default must be the last sizes"):
        hop.scaled(aten.layer_norm.default, torch.float32, q, [5])
    with pytest.raises(ValueError, match="training=True"):
        hop.scaled(aten.batch_norm.default, torch.float32, q, None, None, x[0], x[0], True, 0.1, 1e-5, True)
    with pytest.raises(TypeError, match=r"must be floating point; got torch\.int32"):
        hop.scaled(aten.layer_norm.default, torch.float32, q, [6], None, torch.zeros(6, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"at most 2\^22 elements"):
        hop.scaled(aten.softmax.int, torch.float32, hop.quantize(presets.INT8_TENSOR, torch.zeros(2**22 + 1)), 0)


def test_gated_products_by_themselves() -> None:
    a, b = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(18)).double().requires_grad_().unbind()
    assert torch.equal(torch.ops.hop.silu_mul(a, b), functional.silu(a) * b)
    assert torch.equal(torch.ops.hop.gelu_mul(a, b, approximate="tanh"), functional.gelu(a, approximate="tanh") * b)


def test_accuracy_of_norms_with_outliers() -> None:
    """As near to the exact norm as float32 is, where one element is thousands of times the others."""
    x = np.random.default_rng(19).standard_normal((50, 4096)).astype(np.float32)
    x[:, 7] *= 6000
    got = scaled_buffers(aten.layer_norm.default, torch.float32, None, None, torch.from_numpy(x), [4096]).numpy()
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.max(np.abs(got - want)[:, 7] / np.abs(want[:, 7])) < 2.0**-22
    assert np.max(np.abs(got - want)) < 2.0**-22 * np.abs(want).max()
    sums = row_sums.row_sum_of_squares(torch.from_numpy(x), [-1])[:, 0].numpy()
    assert np.max(np.abs(sums / (wide**2).sum(1) - 1)) < 2.0**-23


# ---- sums, means and lengths of floats


SUMS: list[tuple[Any, tuple[Any, ...], Any]] = [
    (torch.ops.aten.sum.dim_IntList, ([1],), lambda row: exact_sum(row)),
    (torch.ops.aten.mean.dim, ([1],), lambda row: exact_sum(row) / len(row)),
    (torch.ops.aten.linalg_vector_norm.default, (2, [1]), lambda row: math.sqrt(exact_sum_of_squares(row))),
]


@pytest.mark.parametrize(("op", "args", "exact"), SUMS)
def test_sums_of_floats(op: Any, args: Any, exact: Any) -> None:
    x = rows()
    found = hop.scaled(op, torch.float32, x, *args)
    assert found.tolist() == [float32(Fraction(exact(row))) for row in x.tolist()]
    for i in range(3):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(i))
        assert torch.equal(hop.scaled(op, torch.float32, x[:, order], *args), found)
    assert torch.equal(as_decomposition(hop.scaled)(op, torch.float32, x, *args), found)


def test_running_sums() -> None:
    x = rows()
    found = hop.scaled(torch.ops.aten.cumsum.default, torch.float32, x, 1)
    for row, got in zip(x.tolist(), found.tolist(), strict=True):
        u = unit(row)
        parts = [round(Fraction(v) / u * 2**40) for v in row]
        assert got == [float32(Fraction(sum(parts[: i + 1])) * u / 2**40) for i in range(len(row))]


def test_sums_of_integers_are_exact() -> None:
    x = torch.randint(-8, 9, (6, 5, 7)).float() / 4
    q = hop.quantize(presets.INT8_TENSOR, x)
    codes, scale = q.codes.to(torch.int64), q.scale.reshape(())
    for dims in ([0], [1, 2], [-1, 0], []):
        want = codes.sum(dims or None, keepdim=True).float() * scale
        found = hop.scaled(torch.ops.aten.sum.dim_IntList, torch.float32, q, dims, True)
        assert torch.equal(found, want.reshape(found.shape))
    found = hop.scaled(torch.ops.aten.cumsum.default, torch.float32, q, 1)
    assert torch.equal(found, codes.cumsum(1).float() * scale)


def test_sums_of_more_than_2_22_elements() -> None:
    assert (row_sums._bits([2**22]), row_sums._bits([2**22 + 1])) == (row_sums.BITS, row_sums.BITS - 1)
    x = torch.ones(2**22 + 5)
    assert hop.scaled(torch.ops.aten.sum.default, torch.float32, x).item() == float(2**22 + 5)
    assert hop.scaled(torch.ops.aten.mean.default, torch.float32, x * 3).item() == 3


def test_sums_refuse() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"argument 'ord' of .* must be 2, got 1"):
        hop.scaled(torch.ops.aten.linalg_vector_norm.default, torch.float32, x, 1)
    with pytest.raises(ValueError, match=r"argument 'dtype' of .* must be left out"):
        hop.scaled(torch.ops.aten.sum.dim_IntList, torch.float32, x, [1], dtype=torch.float64)
