"""What torch.compile makes of our node: the kernels' own operators, without recompiling for new sizes."""

import unittest

import pytest
import torch
from parameterized import parameterized
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop.impls.out_dtype import out_dtype_operator
from tests.support.routes import nodes

aten = torch.ops.aten


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


def linear(x, weight, bias):
    return hop.out_dtype(aten.linear.default, torch.int32, x, weight, bias)


@pytest.mark.compiler
class TestInductor(unittest.TestCase):
    @parameterized.expand([
        ("linear_int8", linear, (integers(3, 5, 16), integers(8, 16), integers(8, dtype=torch.int16))),
        ("linear_int16", linear, (integers(5, 16, dtype=torch.int16), integers(8, 16), integers(8))),
        ("convolution", lambda x, w: hop.out_dtype(aten.conv2d.default, torch.int32, x, w),
            (integers(2, 3, 6, 6), integers(4, 3, 3, 3))),
        ("bmm", lambda a, b: hop.out_dtype(aten.bmm.default, torch.int32, a, b),
            (integers(2, 3, 600), integers(2, 600, 4))),
    ])  # fmt: skip
    @pytest.mark.full
    def test_code_calls_the_integer_kernel(self, _name, function, args):
        from torch._inductor.utils import run_and_get_code

        got, code = run_and_get_code(torch.compile(function, fullgraph=True), *args)
        assert torch.equal(got, function(*args))
        assert any("_int_mm" in c or "hop_native.product" in c for c in code), code

    @pytest.mark.full
    def test_expanded_and_strided_operands_made_inside(self):
        """Strides that torch._int_mm reads wrong, which only the compiled program knows."""

        def function(row, w):
            x = row.expand(5, -1)[:, ::2]
            return hop.out_dtype(aten.mm.default, torch.int32, x, w[:, :1].expand(-1, 7))

        row, w = integers(1, 32), integers(16, 3)
        want = row.long().expand(5, -1)[:, ::2] @ w.long()[:, :1].expand(-1, 7)
        assert torch.equal(torch.compile(function, fullgraph=True)(row, w).long(), want)

    @pytest.mark.full
    def test_sizes_of_one_in_views_made_inside(self):
        """Inductor gives such views stride 0, which torch._int_mm reads wrong."""
        shapes = [(1, 1, 3), (3, 1, 1), (1, 3, 1), (3, 3, 3)]  # each size 1 beside others that are and are not

        def function(lhs, rhs):
            out = []
            for a, b in zip(lhs, rhs, strict=True):
                out.append(hop.out_dtype(aten.bmm.default, torch.int32, a, b))
                out.append(hop.out_dtype(aten.bmm.default, torch.int32, a, b.view(torch.uint8)))
                out.append(hop.out_dtype(aten.mm.default, torch.int32, (a + 1)[0], (b ^ 1)[1]))
                out.append(hop.out_dtype(aten.mm.default, torch.int32, (b + 1)[0].t(), (a ^ 1)[1].t()))
            return out

        lhs, rhs = [integers(2, m, k) for m, k, _ in shapes], [integers(2, k, n) for _, k, n in shapes]
        for got, want in zip(torch.compile(function, fullgraph=True)(lhs, rhs), function(lhs, rhs), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()

    @pytest.mark.full
    def test_view_with_an_offset(self):
        """A convolution's patches are a view by strides, of the operand itself where nothing is padded."""

        def function(x, w):
            return hop.out_dtype(aten.conv2d.default, torch.int32, x, w)

        def inside(base, w):
            return function(base[2:].permute(0, 3, 1, 2), w)

        base, w = integers(4, 7, 7, 4), integers(5, 4, 3, 3)
        x = base[2:].permute(0, 3, 1, 2)
        want = out_dtype_operator.reference(aten.conv2d.default, torch.int32, x, w)
        compiled = torch.compile(function, fullgraph=True), torch.compile(inside, fullgraph=True)
        for got in (function(x, w), compiled[0](x, w), compiled[1](base, w)):
            assert torch.equal(got, want) and got.stride() == want.stride()


class TestDynamicShapes(unittest.TestCase):
    @parameterized.expand([
        ("mm", lambda a, b: hop.out_dtype(aten.mm.default, torch.int32, a, b), [(m, 16) for m in (2, 3, 64, 129)]),
        ("linear_of_3_dims", lambda a, b: hop.out_dtype(aten.linear.default, torch.int32, a, b.t()),
            [(3, m, 16) for m in (2, 5, 64)]),
        ("matmul_of_uint8", lambda a, b: hop.out_dtype(aten.matmul.default, torch.int32, a.view(torch.uint8), b),
            [(m, 16) for m in (2, 9)]),
    ])  # fmt: skip
    @pytest.mark.quick(3)
    def test_one_compilation_serves_all_sizes(self, _name, function, shapes):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
        b = integers(16, 8)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in shapes:
                a = integers(*shape)
                assert torch.equal(compiled(a, b), function(a, b))


class TestBackwardGraph(unittest.TestCase):
    @parameterized.expand(
        [
            ("mm", aten.mm.default, (3, 5), (5, 4)),
            ("linear", aten.linear.default, (2, 3, 5), (4, 5)),
            ("bmm", aten.bmm.default, (2, 3, 5), (2, 5, 4)),
            ("conv2d", aten.conv2d.default, (1, 2, 6, 6), (3, 2, 3, 3)),
        ]
    )
    def test_is_made_of_our_nodes(self, _name, op, x_shape, w_shape):
        """One node forward and one for each gradient; low-precision operands are saved as they came."""
        x = torch.randn(x_shape, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(w_shape, dtype=torch.float16, requires_grad=True)

        def step(x, w):
            y = hop.out_dtype(op, torch.float32, x, w)
            return torch.autograd.grad(y, (x, w), torch.ones_like(y))

        graph = make_fx(step)(x, w)
        assert nodes(graph.graph) == 3, graph.code
        inner = [
            n.target for n in graph.graph.nodes if n.target in (aten.mm.default, aten.convolution_backward.default)
        ]
        assert inner == []
        assert [g.dtype for g in graph(x, w)] == [torch.bfloat16, torch.float16]


class TestRounding(unittest.TestCase):
    """Inductor leaves out casts between operators that it fuses; ours see what eager mode sees."""

    @parameterized.expand([(str(d).removeprefix("torch."), d) for d in (torch.bfloat16, torch.float16)])
    @pytest.mark.compiler
    @pytest.mark.full
    def test_chain_of_layers(self, _name, dtype):
        linear, row = torch.ops.aten.linear.default, hop.presets.INT8_ROW_AFFINE
        w1, w2 = (hop.quantize(hop.presets.INT8_ROW, torch.randn(64, 64)) for _ in range(2))
        bias = torch.randn(64)

        def two_layers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = hop.scaled(linear, dtype, hop.quantize(row, x), w1, bias)
            y = torch.relu(h) + h.to(torch.float32).exp().to(dtype)
            codes = hop.quantize(row, y).codes
            return h, y, codes, hop.scaled(linear, dtype, hop.quantize(row, torch.relu(h)), w2, bias)

        x = torch.randn(32, 64).to(dtype)
        h, _, _, z = two_layers(x)
        got = torch.compile(two_layers, fullgraph=True)(x)
        assert torch.equal(got[0], h) and torch.equal(got[3], z)
        assert torch.equal(got[2], hop.quantize(row, got[1]).codes)  # of the sum as it was stored
