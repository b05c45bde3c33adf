"""hop.quantize_(model, exact=True): the same bits on every route, in every batch, at every level; and
hop.export.check_exact."""

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop.kernels.cpu import native
from hop.nn.models.exact import ExactFunctions
from tests import levels

aten = torch.ops.aten


class Model(nn.Module):
    """Functions and sums of many kinds, outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = functional.gelu(self.linear(x))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        heads = y.unflatten(-1, (4, 16)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        y = self.norm(y + x).cumsum(-1) * x.cos() + x.sin()
        mean = y.mean(1)
        return (
            functional.normalize(mean, dim=-1),
            mean / mean.square().sum(-1, keepdim=True).sqrt(),
            functional.softmax(y, -1, dtype=torch.float32),
            y.sum((1, 2)),
            y.norm(dim=-1),
            functional.silu(y) * torch.sigmoid(y) + torch.tanh(y).exp() + y.abs().log(),
        )


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return hop.quantize_(Model().eval(), "int8", **options)


X = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1))


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


class TestRoutes:
    def test_batches(self) -> None:
        m = model(exact=True)
        with torch.no_grad():
            ones = [m(X[i : i + 1]) for i in range(3)]
            assert_same([torch.cat(parts) for parts in zip(*ones, strict=True)], m(X))

    @pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of strict export: the mode
    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.full
    def test_exported_and_lowered(self, strict: bool) -> None:
        m = model(exact=True)
        with torch.no_grad():
            program = torch.export.export(m, (X,), strict=strict)
            assert hop.export.check_exact(program).exact
            want = m(X)
            assert_same(program.module()(X), want)
            assert_same(program.run_decompositions({}).module()(X), want)

    @pytest.mark.full
    def test_verified(self) -> None:
        """Every node of the exported program equals its counterpart in core ATen."""
        for m, x in ((model(exact=True), X), pools()):
            with torch.no_grad():
                program = torch.export.export(m, (x,))
            found = hop.export.verify(program, hop.export.lower(program), (x,))
            assert found.first is None and found.only_a == 0 and len(found.rows) >= len(m(x)), found

    def test_mapped(self) -> None:
        """vmap gives the bits of a loop."""
        m, x = model(exact=True), torch.stack([X, X.flip(0) * 3])
        with torch.no_grad():
            got = torch.func.vmap(m)(x)
            for i, one in enumerate(x):
                assert_same([t[i] for t in got], m(one))

    @pytest.mark.full
    def test_compiled(self) -> None:
        m = model(exact=True)
        with torch.no_grad():
            assert_same(torch.compile(m, fullgraph=True)(X), m(X))

    @pytest.mark.full
    def test_packaged(self) -> None:
        m = model(exact=True)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            path = torch._inductor.aoti_compile_and_package(
                torch.export.export(m, (X,)), package_path=f"{folder}/model.pt2"
            )
            assert_same(torch._inductor.aoti_load_package(path)(X), m(X))

    def test_traced_by_dynamo(self) -> None:
        m = model(exact=True)
        with torch.no_grad():
            assert_same(torch.compile(m, fullgraph=True, backend="eager")(X), m(X))

    @pytest.mark.parametrize("level", ["off", *native.LEVELS])
    def test_levels(self, level: str) -> None:
        m = model(exact=True)
        with torch.no_grad():
            want = m(X)
            with levels.at(level):
                assert_same(m(X), want)

    def test_fused(self) -> None:
        with torch.no_grad():
            m = model(exact=True, fuse=True)
            m(X)  # layers ask for codes in their first call
            assert_same(m(X), model(exact=True)(X))

    def test_gradients(self) -> None:
        x = X.clone().requires_grad_()
        sum(y.sum() for y in model(exact=True)(x)).backward()
        assert x.grad is not None and x.grad.isfinite().all()


class TestModel:
    def test_copies(self) -> None:
        m = model(exact=True)
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        with torch.no_grad():
            for other in (copy.deepcopy(m), torch.load(file, weights_only=False)):
                assert type(other).__name__ == "Model" and isinstance(other, Model)
                assert_same(other(X), m(X))

    def test_near_the_same_model_without_it(self) -> None:
        with torch.no_grad():
            for got, want in zip(model(exact=True)(X), model(attention="int8")(X), strict=True):
                assert (got - want).abs().mean() < 0.05 * want.abs().mean()

    def test_convolutions_and_batch_norms(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
        x = torch.randn(2, 3, 9, 9)
        net(x)  # running statistics
        m = hop.quantize_(net.eval(), "int8", exact=True)
        with torch.no_grad():
            program = torch.export.export(m, (x,))
            assert hop.export.check_exact(program).exact, hop.export.check_exact(program)
            assert_same([program.run_decompositions({}).module()(x), torch.cat([m(x[:1]), m(x[1:])])], [m(x)] * 2)

    @pytest.mark.parametrize(
        ("scheme", "options", "message"),
        [
            ("fp8", {}, "products sum floats"),
            ("int4", {}, "products sum floats"),
            (hop.Scheme(hop.presets.INT8_TENSOR, hop.presets.INT8_ROW), {}, "rows share a scale"),
            ({"linear": None, "*": "int8"}, {}, r"stay in floats.*linear \(Linear\)"),
            ("int8", {"filter": "other"}, r"stay in floats.*linear \(Linear\)"),
            ("int8", {"attention": "fp8"}, "sums floats"),
            ("int8", {"attention": {"*": None}}, "leaves attention in floats"),
        ],
    )
    def test_refuses(self, scheme: Any, options: dict[str, Any], message: str) -> None:
        m = Model()
        with pytest.raises(ValueError, match=message):
            hop.quantize_(m, scheme, exact=True, **options)
        assert type(m) is Model and type(m.linear) is nn.Linear

    def test_flag(self) -> None:
        with pytest.raises(TypeError, match="exact must be True or False, got 1"):
            hop.quantize_(Model(), "int8", exact=1)  # type: ignore[arg-type]


class TestFunctions:
    def test_leaves_what_it_does_not_know(self) -> None:
        x, wide = torch.randn(4, 8), torch.randn(4, 8, dtype=torch.float64)
        with ExactFunctions(None):
            found = (
                wide.mean(1),
                x.norm(1),
                torch.var_mean(x, 1)[0],
                x.softmax(0).argmax(0),
                torch.arange(3).sum(),
                x.sum(dtype=wide.dtype),
            )
        want = (
            wide.mean(1),
            x.norm(1),
            torch.var_mean(x, 1)[0],
            x.softmax(0).argmax(0),
            torch.arange(3).sum(),
            x.sum(dtype=wide.dtype),
        )
        assert_same(found, want)

    def test_spellings(self) -> None:
        x = torch.randn(3, 4, 5)
        with ExactFunctions(None):
            pairs = [
                (x.mean(), torch.mean(x)),
                (x.mean(dim=1), torch.mean(x, 1)),
                (x.sum([0, 2], keepdim=True), torch.sum(x, axis=(0, 2), keepdims=True)),
                (x.norm(dim=1), torch.linalg.vector_norm(x, dim=1)),
                (torch.norm(x), torch.linalg.norm(x)),
                (x.softmax(-1), functional.softmax(x, dim=-1)),
                (torch.log_softmax(x, 1), functional.log_softmax(x, 1)),
                (x.sqrt(), x**0.5),
                (functional.silu(x), functional.silu(x.clone(), inplace=True)),
                (x.abs() ** x, torch.pow(x.abs(), x)),
                (x.half().softmax(-1, dtype=torch.float32), functional.softmax(x.half(), -1, dtype=torch.float32)),
                (x.var(1), torch.var(x, 1, True)),
                (x.std((0, 1), keepdim=True), torch.std(x, (0, 1), correction=1, keepdim=True)),
                (x.logsumexp(1), torch.logsumexp(x, [1])),
                (x.abs() ** -0.5, x.abs().pow(-0.5)),
                (functional.avg_pool1d(x, 2), nn.AvgPool1d((2,))(x)),
                (functional.instance_norm(x), functional.group_norm(x, 4)),
            ]
        for a, b in pairs:
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and a.dtype == torch.float32
        want = hop.scaled(aten.mean.dim, torch.float32, x, [1])
        assert torch.equal(pairs[1][0], want)

    def test_near_pytorchs(self) -> None:
        """Against PyTorch in float64."""
        x = torch.randn(2, 4, 6, 5)
        weight, bias = torch.randn(2, 4).unbind()
        calls: list[Callable[..., Tensor]] = [
            lambda x, w, b: functional.group_norm(x, 2, w, b),
            lambda x, w, b: functional.instance_norm(x, None, None, w, b),
            lambda x, w, b: functional.instance_norm(x, w, b.abs(), use_input_stats=False),
            lambda x, w, b: functional.avg_pool2d(x, (3, 2), 2, (1, 0), True, False),
            lambda x, w, b: functional.avg_pool2d(x, 3, divisor_override=2),
            lambda x, w, b: functional.avg_pool3d(x, (1, 2, 3)),
            lambda x, w, b: functional.adaptive_avg_pool2d(x, (4, None)),
            lambda x, w, b: functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
            lambda x, w, b: functional.interpolate(x, (9, 3), mode="bilinear", align_corners=True),
            lambda x, w, b: functional.interpolate(x[0], 9, mode="linear"),
            lambda x, w, b: x.var((1, 2), unbiased=False),
            lambda x, w, b: x.std(0),
            lambda x, w, b: torch.logsumexp(x * 100, (0, 3)),
            lambda x, w, b: x**3 + x.pow(4) + x.abs() ** -0.5 + x**2,
        ]
        for call in calls:
            want = call(x.double(), weight.double(), bias.double())
            with ExactFunctions(None):
                got = call(x, weight, bias)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)

    def test_gradients(self) -> None:
        x = torch.randn(2, 4, 6, 5, requires_grad=True)
        with ExactFunctions(None):
            y = functional.group_norm(x, 2).logsumexp(1) + functional.adaptive_avg_pool2d(x, (6, 5)).std(1)
            z = functional.interpolate(functional.avg_pool2d(x, 2), (6, 5), mode="bilinear").pow(3).mean(1)
        (got,) = torch.autograd.grad((y * z).sum(), x)
        w = x.detach().double().requires_grad_()
        y = functional.group_norm(w, 2).logsumexp(1) + functional.adaptive_avg_pool2d(w, (6, 5)).std(1)
        z = functional.interpolate(functional.avg_pool2d(w, 2), (6, 5), mode="bilinear").pow(3).mean(1)
        (want,) = torch.autograd.grad((y * z).sum(), w)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)


class Pools(nn.Module):
    """Averages over windows, and norms of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.group = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.conv(x)).relu()
        y = self.group(y) + self.instance(y)
        line = y.flatten(2)
        return (
            functional.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            functional.adaptive_avg_pool2d(y, (5, 3)),
            functional.adaptive_avg_pool2d(y, 2),
            functional.interpolate(y, scale_factor=2, mode="bilinear"),
            functional.avg_pool1d(line, 5, 3, 2),
            functional.avg_pool3d(y[None], (2, 3, 3)),
            functional.adaptive_avg_pool3d(y, (4, 3, 2)),
            y.var((2, 3)) + y.std((2, 3), unbiased=False) + y.logsumexp((2, 3)) + y.mean((2, 3)).pow(3),
        )


def pools() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    net, x = Pools(), torch.randn(3, 3, 12, 11)
    net(x)  # running statistics
    return hop.quantize_(net.eval(), "int8", exact=True), x


class TestPools:
    def test_exported_lowered_and_batches(self) -> None:
        m, x = pools()
        with torch.no_grad():
            program, want = torch.export.export(m, (x,)), m(x)
            assert hop.export.check_exact(program).exact, hop.export.check_exact(program)
            assert_same(program.module()(x), want)
            assert_same(program.run_decompositions({}).module()(x), want)
            ones = [m(one[None]) for one in x]
            for i, parts in enumerate(zip(*ones, strict=True)):
                assert torch.equal(torch.cat(parts), want[i]) or i == 5  # 3-d pooling goes along the batch

    @pytest.mark.full
    def test_traced_by_dynamo(self) -> None:
        m, x = pools()
        with torch.no_grad():
            assert_same(torch.compile(m, fullgraph=True, backend="eager")(x), m(x))

    @pytest.mark.full
    def test_compiled(self) -> None:
        m, x = pools()
        with torch.no_grad():
            assert_same(torch.compile(m, fullgraph=True)(x), m(x))

    def test_mapped(self) -> None:
        """vmap gives the bits of a loop."""
        m, x = pools()
        x = torch.stack([x, x.flip(0) * 3])
        with torch.no_grad():
            got = torch.func.vmap(m)(x)
            for i, one in enumerate(x):
                assert_same([t[i] for t in got], m(one))


class TestCheck:
    def test_names_what_may_differ(self) -> None:
        m = model()
        report = hop.export.check_exact(torch.export.export(m, (X,)))
        found = {row.operator for row in report.rows}
        assert {"aten.gelu.default", "aten.scaled_dot_product_attention.default", "aten.mean.dim"} <= found
        assert "aten.sqrt.default" in found and "aten.mul.Tensor" not in found and not report.exact
        row = next(row for row in report.rows if row.operator == "aten.gelu.default")
        assert __file__ in row.source and "functional.gelu" in row.source and "exact=True" in row.remedy
        assert f"{report.nodes - len(report.rows)} of {report.nodes} nodes are exact" in str(report)

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda x: x @ x.mT, "float sum"),
            (lambda x: torch.add(x, x, alpha=0.7), "fused multiply-add"),
            (lambda x: x**3, "kernel"),
            (lambda x: torch.fft.rfft(x).real, "not known"),
            (lambda x: functional.dropout(x, 0.5, True), "random"),
            (lambda x: x.index_put((torch.tensor([0, 0]),), x[:2], accumulate=True), "order"),
            (lambda x: hop.fake_quantize(hop.presets.INT8_TENSOR, x), "batch"),
            (lambda x: hop.fake_quantize(hop.presets.NVFP4, x), "batch"),
            (lambda x: functional.avg_pool1d(x, 2), "float sum"),
            (lambda x: hop.scaled(aten.avg_pool1d.default, torch.float32, x, [2]), None),
            (lambda x: hop.scaled(aten.adaptive_avg_pool1d.default, torch.float32, x, [3]), None),
            (lambda x: hop.scaled(aten.upsample_linear1d.vec, torch.float32, x, [5], False, None), None),
            (lambda x: (x[..., :1] @ x[..., :1].mT).repeat(1, 1, 2) + x.sign() * x.clamp(-1, 1) / 3 + x.square(), None),
            (lambda x: x.abs() ** x, "kernel"),
            (lambda x: x.scatter(0, torch.zeros(1, 4, 8, dtype=torch.int64), x[:1]), None),
            (lambda x: torch.where(x > 0, x, -x).amax(-1), None),
            (lambda x: hop.fake_quantize(hop.presets.INT8_ROW, x), None),
            (lambda x: hop.out_dtype(aten.mm.default, torch.int32, x[0].to(torch.int8), x[0].to(torch.int8).t()), None),
        ],
    )
    def test_verdicts(self, function: Any, reason: str | None) -> None:
        class Call(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return function(x)

        report = hop.export.check_exact(torch.export.export(Call(), (torch.randn(4, 4, 8),)))
        assert report.exact == (reason is None) and (reason is None or reason in report.rows[0].reason), report

    def test_what_counts_as_one_rounding_is(self) -> None:
        """Against numpy, whose kernels round as IEEE 754 says."""
        x, y = torch.rand(2, 1 << 16).mul(100).add(0.01).unbind()
        a, b = x.numpy(), y.numpy()
        for got, want in ((x / y, a / b), (x * y, a * b), (x.reciprocal(), 1 / a), (x - y, a - b), (x**2, a * a)):
            assert (got.numpy() == want).all()
        assert (hop.scaled(aten.sqrt.default, torch.float32, x).numpy() == a**0.5).all()

    def test_type(self) -> None:
        with pytest.raises(TypeError, match="check_exact: "):
            hop.export.check_exact(Model())  # type: ignore[arg-type]
