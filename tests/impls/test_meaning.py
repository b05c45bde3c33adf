"""What out_dtype computes: against numpy, against stock, and over shapes, strides and values that are nasty."""

import itertools
import math
import unittest
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop.compat import eager
from hop.impls.out_dtype import out_dtype_operator
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.promotion import DTYPES, FLOAT8, common_dtype
from hop.kernels.aten import float8
from tests.support import routes
from tests.support.cases import FORMATS, GRADIENT, OPERATORS, arguments, assert_right, draw
from tests.support.tensors import channels_last

aten = torch.ops.aten
stock = torch.ops.higher_order.out_dtype

PAIRS = list(itertools.product(OPERATORS, FORMATS))


class TestAgainstOracle(unittest.TestCase):
    """Every operator in every format, fast path and reference, and the same strides from both."""

    @parameterized.expand([(f"{o.name}_{f.name}", o, f) for o, f in PAIRS])
    @pytest.mark.quick(4)
    def test_value(self, _name, op, fmt):
        args, kwargs = arguments(op, fmt, seed=1)
        got = hop.out_dtype(op.op, fmt.output, *args, **kwargs)
        assert_right(op, fmt, args, kwargs, got)
        reference = out_dtype_operator.reference(op.op, fmt.output, *args, **kwargs)
        assert_right(op, fmt, args, kwargs, reference)
        assert got.stride() == reference.stride()

    def test_keyword_arguments_mean_the_same(self):
        a, b = draw((3, 4), torch.int8, RNG), draw((4, 5), torch.int8, RNG)
        c = draw((5,), torch.int32, RNG)
        got = hop.out_dtype(aten.addmm.default, torch.int32, mat2=b, self=c, mat1=a, alpha=2)
        assert torch.equal(got, c + 2 * (a.int() @ b.int()))


RNG = np.random.default_rng(7)
STOCK = [
    ("linear", aten.linear.default, [(2, 3, 8), (5, 8), (5,)]),
    ("mm", aten.mm.default, [(3, 8), (8, 5)]),
    ("conv2d", aten.conv2d.default, [(1, 3, 6, 5), (4, 3, 3, 2), (4,)]),
    ("convolution", aten.convolution.default, [(1, 3, 6, 5), (4, 3, 3, 2), None]),
    ("mul", aten.mul.Tensor, [(3, 4), (4,)]),
    ("mul_scalar", aten.mul.Scalar, [(3, 4)]),
    ("div", aten.div.Tensor, [(3, 4), (4,)]),
    ("div_scalar", aten.div.Scalar, [(3, 4)]),
]
STOCK_DTYPES = [
    (torch.int8, torch.int32),
    (torch.uint8, torch.int32),
    (torch.int16, torch.int32),
    (torch.int32, torch.int32),
    (torch.int32, torch.int64),
    (torch.int8, torch.float32),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.int32),
]


class TestAgainstStock(unittest.TestCase):
    """The eight operators that torch.ops.higher_order.out_dtype takes."""

    @parameterized.expand(
        [(f"{name}_{i}_{o}", op, s, i, o) for (name, op, s), (i, o) in itertools.product(STOCK, STOCK_DTYPES)]
    )
    @pytest.mark.quick(2)
    def test_equal(self, _name, op, shapes, input_dtype, output_dtype):
        args: list[Any] = [None if s is None else draw(s, input_dtype, RNG, full_range=False) for s in shapes]
        if op is aten.convolution.default:
            args += [[1, 2], [1, 0], [1, 1], False, [0, 0], 1]
        if op in (aten.mul.Scalar, aten.div.Scalar):
            args.append(3)
        if op is aten.div.Tensor:
            args[1] = torch.where(args[1] == 0, torch.ones_like(args[1]), args[1])
        got, want = hop.out_dtype(op, output_dtype, *args), stock(op, output_dtype, *args)
        if output_dtype.is_floating_point:
            torch.testing.assert_close(got, want)
        else:
            assert torch.equal(got, want)
        assert got.dtype == want.dtype


class TestPromotion(unittest.TestCase):
    def promote(self, *operands, output):
        args = tuple(torch.zeros(2, dtype=x) if isinstance(x, torch.dtype) else x for x in operands)
        return common_dtype(describe(aten.add.Tensor), output, args, {})

    @parameterized.expand(
        [
            (str(a), str(b), str(o), a, b, o)
            for a, b, o in itertools.product(
                [torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float64],
                [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32, torch.complex64],
                [torch.int32, torch.bfloat16, torch.float64],
            )
        ]
    )
    @pytest.mark.quick(2)
    def test_is_torch_result_type(self, _a, _b, _o, a, b, output):
        want = torch.promote_types(torch.promote_types(a, b), output)
        want = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(want, want)
        assert self.promote(a, b, output=output) == want

    @parameterized.expand(
        [
            ("zero_dim_weak", torch.tensor(2, dtype=torch.int64), torch.int32, torch.int32),
            ("zero_dim_category", torch.tensor(2.0, dtype=torch.float64), torch.int32, torch.float64),
            ("python_int", 2, torch.int16, torch.int16),
            ("python_float", 2.5, torch.int32, torch.float32),
            ("python_bool", True, torch.int8, torch.int8),
            ("python_complex", 1j, torch.float64, torch.complex128),
        ]
    )
    def test_numbers_count_less(self, _name, other, output, want):
        if want == torch.complex128:
            want = torch.complex64 if output != torch.float64 else want
        assert self.promote(torch.int8, other, output=output) == want

    @parameterized.expand([(str(d), d) for d in sorted(FLOAT8, key=str)])
    def test_float8_computes_in_float32(self, _name, dtype):
        for other in (dtype, torch.int8, torch.bfloat16, torch.float8_e5m2):
            assert self.promote(dtype, other, output=torch.float16) == torch.float32
        assert self.promote(dtype, dtype, output=torch.float64) == torch.float64
        assert self.promote(dtype, dtype, output=dtype) == torch.float32

    @parameterized.expand(
        [
            (torch.uint16, torch.int8, torch.int32),
            (torch.uint16, torch.int32, torch.int32),
            (torch.uint16, torch.uint8, torch.uint16),
            (torch.uint16, torch.uint32, torch.uint32),
            (torch.uint32, torch.int32, torch.int64),
            (torch.uint64, torch.int8, torch.int64),
            (torch.uint32, torch.float32, torch.float32),
        ]
    )
    def test_unsigned(self, a, b, want):
        assert self.promote(a, b, output=a) == self.promote(b, a, output=b) == want

    def test_default_dtype_decides_for_python_floats(self):
        torch.set_default_dtype(torch.float64)
        try:
            assert self.promote(torch.int8, 0.5, output=torch.int32) == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    def test_index_keeps_its_dtype(self):
        weight, index = torch.randn(5, 3), torch.tensor([1, 4])
        got = hop.out_dtype(aten.embedding.default, torch.bfloat16, weight, index)
        assert torch.equal(got, weight[index].bfloat16())
        got = hop.out_dtype(aten.index_select.default, torch.float64, weight, 0, index)
        assert torch.equal(got, weight[index].double())
        mask = torch.tensor([True, False, True])
        got = hop.out_dtype(
            aten.where.self, torch.int32, mask, torch.ones(3, dtype=torch.int8), torch.zeros(3, dtype=torch.int16)
        )
        assert torch.equal(got, mask.int())

    def test_target_is_an_index_where_it_holds_integers(self):
        """Class indices keep their dtype, class probabilities are promoted."""
        loss, x = torch.ops.aten.cross_entropy_loss.default, torch.randn(4, 3)
        classes, shares = torch.tensor([0, 2, 1, 1]), torch.softmax(torch.randn(4, 3), 1)
        for target in (classes, shares):
            want = torch.nn.functional.cross_entropy(x, target)
            torch.testing.assert_close(hop.out_dtype(loss, torch.float32, x, target), want)

    def test_list_of_tensors(self):
        x, y = torch.ones(2, dtype=torch.int8), torch.full((2,), 300, dtype=torch.int16)
        got = hop.out_dtype(aten.cat.default, torch.int32, [x, y])
        assert torch.equal(got, torch.tensor([1, 1, 300, 300], dtype=torch.int32))

    def test_view_operator_gives_a_new_tensor(self):
        x = torch.randn(3, 4)
        got = hop.out_dtype(aten.t.default, torch.float32, x)
        got.zero_()
        assert x.abs().min() > 0

    def test_factory(self):
        assert torch.equal(
            hop.out_dtype(aten.full.default, torch.int8, [3], 300), torch.full((3,), 44, dtype=torch.int8)
        )

    def test_conjugate_view(self):
        x = torch.randn(3, dtype=torch.complex64).conj()
        y = x.clone().requires_grad_()
        torch.testing.assert_close(hop.out_dtype(aten.mul.Tensor, torch.complex64, x, y), x * y)

    def test_every_dtype_is_reachable(self):
        for dtype in DTYPES - {torch.complex32}:  # of which torch warns
            assert hop.out_dtype(aten.add.Tensor, dtype, torch.ones(2, dtype=torch.int8), 1).dtype == dtype


class TestFloat8(unittest.TestCase):
    @parameterized.expand([(str(d), d) for d in sorted(FLOAT8 - {torch.float8_e8m0fnu}, key=str)])
    def test_every_code(self, _name, dtype):
        """All 256 codes, NaN and infinities among them, times one."""
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(32).view(64, 128)
        one = torch.eye(128).to(dtype)
        got = hop.out_dtype(aten.mm.default, torch.float32, codes[:, :], one)
        finite = codes.float().nan_to_num(0, 0, 0)
        clean = hop.out_dtype(aten.mm.default, torch.float32, finite.to(dtype), one)
        assert torch.equal(clean, finite)
        assert torch.equal(got.isnan().all(dim=1), codes.float().isfinite().logical_not().any(dim=1))

    @parameterized.expand(
        [
            ("sliced", lambda x: x[:, ::2]),
            ("offset", lambda x: x[1:, 3:]),
            ("permuted", lambda x: x.view(4, 32, 256).permute(1, 0, 2)),
            ("turned", lambda x: x.view(4, 32, 256).mT),
            ("sliced and turned", lambda x: x[:, ::2].mT),
            ("expanded", lambda x: x[:1].expand(64, 256)),
            ("one dimension", lambda x: x.flatten()[::3]),
        ]
    )
    def test_strides(self, _name, change):
        """More numbers than the few that ATen converts one by one."""
        codes = torch.randint(0, 256, (128, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        x = change(codes.view(torch.float8_e4m3fn))
        assert x.numel() >= float8._SMALL
        got = float8.decode(x)
        want = x.to(torch.float32)
        assert got.shape == want.shape and torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(got.isnan(), want.isnan())

    def test_result_is_accumulated_in_float32(self):
        rng = np.random.default_rng(0)
        a, b = draw((8, 4096), torch.float8_e4m3fn, rng), draw((4096, 8), torch.float8_e4m3fn, rng)
        exact = a.double() @ b.double()
        bound = 4096 * 2**-24 * (a.double().abs() @ b.double().abs())
        for output in (torch.float32, torch.bfloat16, torch.float16):
            got = hop.out_dtype(aten.mm.default, output, a, b)
            rounding = exact.abs() * torch.finfo(output).eps / 2 + 1e-7
            assert ((got.double() - exact).abs() <= bound + rounding).all()


class TestBfloat16(unittest.TestCase):
    def test_within_the_bound_of_sums_in_float32(self):
        """Exact products, summed in float32 in any order, rounded once; NaN and infinities as theirs."""
        if not eager.multiplies_bfloat16():
            self.skipTest("the CPU has no instructions for bfloat16")
        generator = torch.Generator().manual_seed(0)
        bfloat16 = torch.bfloat16
        for batch, m, k, n in (((), 1, 1, 1), ((), 33, 700, 17), ((), 64, 2048, 48), ((3,), 5, 130, 9), ((), 4, 0, 3)):
            a = torch.randn(*batch, m, k, generator=generator).to(bfloat16)
            b = torch.randn(*batch, n, k, generator=generator).to(bfloat16).mT
            op = aten.bmm.default if batch else aten.mm.default
            assert hop.explain(op, bfloat16, a, b).endswith("bfloat16 product: chosen")
            exact = a.double() @ b.double()
            bound = (k + 8) * 2**-24 * (a.double().abs() @ b.double().abs()) + exact.abs() * 2**-8 + 2.0**-126
            assert ((hop.out_dtype(op, bfloat16, a, b).double() - exact).abs() <= bound).all()
        a = torch.ones(3, 4, dtype=bfloat16)
        a[0, 0], a[1, 1], a[2, 2] = math.nan, math.inf, -math.inf
        got = hop.out_dtype(aten.mm.default, bfloat16, a, torch.ones(4, 2, dtype=bfloat16))
        assert got[0].isnan().all() and (got[1] == math.inf).all() and (got[2] == -math.inf).all()

    def test_declines(self):
        a, b, bias = (torch.ones(s, dtype=torch.bfloat16) for s in ((3, 4), (4, 2), (2,)))
        for op, output, args, reason in (
            (aten.mm.default, torch.float32, (a, b), "the output torch.float32; takes only bfloat16"),
            (aten.mm.default, torch.bfloat16, (a, b.float()), "operands are torch.bfloat16 and torch.float32"),
            (aten.addmm.default, torch.bfloat16, (bias, a, b), "bfloat16 product: adds a summand before"),
        ):
            assert reason in hop.explain(op, output, *args)


SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 16, 17, 33, 65])
INTS = st.sampled_from([torch.int8, torch.uint8, torch.int16])
LAYOUTS = st.sampled_from(["row", "column", "strided", "expanded", "offset"])


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (but for "expanded", which repeats the first row) in other strides."""
    if layout == "column":
        return values.mT.contiguous().mT
    if layout == "strided":
        wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "expanded" and values.shape[-2] > 0:
        return values[..., :1, :].expand(values.shape)
    if layout == "offset":
        return torch.cat([values[..., :1, :], values], -2)[..., 1:, :] if values.shape[-2] else values
    return values


def extreme(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:  # all at one end: the largest sums
        info = torch.iinfo(dtype)
        return torch.full(shape, (info.min, info.max)[seed % 2], dtype=dtype)
    return draw(shape, dtype, rng)


class TestIntegerProducts(unittest.TestCase):
    @settings(max_examples=150, deadline=None)
    @given(SIZES, SIZES, SIZES, INTS, INTS, LAYOUTS, LAYOUTS, st.integers(0, 10**6))
    def test_mm(self, m, k, n, a_dtype, b_dtype, a_layout, b_layout, seed):
        a = lay_out(extreme((m, k), a_dtype, seed), a_layout)
        b = lay_out(extreme((k, n), b_dtype, seed + 1), b_layout)
        want = torch.from_numpy(a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)).to(torch.int32)
        got = hop.out_dtype(aten.mm.default, torch.int32, a, b)
        assert torch.equal(got, want) and got.is_contiguous()
        assert hop.explain(aten.mm.default, torch.int32, a, b) == "integer product: chosen"

    @settings(max_examples=100, deadline=None)
    @given(SIZES, SIZES, SIZES, SIZES, INTS, INTS, LAYOUTS, LAYOUTS, st.integers(0, 10**6))
    def test_bmm(self, batch, m, k, n, a_dtype, b_dtype, a_layout, b_layout, seed):
        a = lay_out(extreme((batch, m, k), a_dtype, seed), a_layout)
        b = lay_out(extreme((batch, k, n), b_dtype, seed + 1), b_layout)
        want = torch.from_numpy(a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)).to(torch.int32)
        assert torch.equal(hop.out_dtype(aten.bmm.default, torch.int32, a, b), want)

    def test_bmm_larger_than_float32_is_exact(self):
        for k in (512, 513, 1024, 2048):
            a, b = torch.full((2, 3, k), 255, dtype=torch.uint8), torch.full((2, k, 3), -128, dtype=torch.int8)
            want = torch.full((2, 3, 3), -255 * 128 * k, dtype=torch.int32)
            assert torch.equal(hop.out_dtype(aten.bmm.default, torch.int32, a, b), want)
            symbolic = routes.make_fx(
                lambda a, b: out_dtype_operator._run(aten.bmm.default, torch.int32, a, b), tracing_mode="symbolic"
            )
            assert torch.equal(symbolic(a, b)(a, b), want)

    @settings(max_examples=100, deadline=None)
    @given(
        st.integers(1, 2),
        st.sampled_from([1, 2, 4]),
        st.integers(1, 3),
        st.tuples(st.integers(5, 9), st.integers(5, 9)),
        st.tuples(st.integers(1, 3), st.integers(1, 3)),
        st.tuples(*[st.integers(1, 3)] * 2),
        st.tuples(*[st.integers(0, 2)] * 2),
        st.tuples(*[st.integers(1, 2)] * 2),
        st.booleans(),
        INTS,
        st.sampled_from(["row", "column", "strided", "expanded"]),
        st.integers(0, 10**6),
    )
    def test_convolution(
        self, n, groups, per, size, kernel, stride, padding, dilation, transposed, dtype, layout, seed
    ):
        x = lay_out(extreme((n, groups * per, *size), dtype, seed), layout)
        shape = (groups * per, 2, *kernel) if transposed else (2 * groups, per, *kernel)
        w = extreme(shape, torch.int8, seed + 1)
        lists = [list(stride), list(padding), list(dilation)]
        args = (x, w, None, *lists, transposed, [0, 0], groups)
        if transposed and any(
            (s - 1) * st - 2 * p + d * (k - 1) + 1 < 1
            for s, st, p, d, k in zip(size, stride, padding, dilation, kernel, strict=True)
        ):
            return
        got = hop.out_dtype(aten.convolution.default, torch.int32, *args)
        want = out_dtype_operator.reference(aten.convolution.default, torch.int32, *args)
        assert torch.equal(got, want) and layout_of(got) == layout_of(want)

    @parameterized.expand(
        [
            (f"{len(size)}d_{dtype}_{groups}_{n}".replace("torch.", ""), size, dtype, groups, n)
            for size in ((9,), (8, 7), (4, 5, 6))
            for dtype in (torch.int8, torch.uint8, torch.int16)
            for groups in (1, 2)
            for n in (1, 2)
        ]
    )
    @pytest.mark.quick(10)
    def test_channels_last(self, _name, size, dtype, groups, n):
        """Channels last if the input or the weight is: on the kernel, the reference and fakes."""
        op = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}[len(size)]
        lists = [[1] * len(size)] * 3
        x = draw((n, 6, *size), dtype, RNG)
        for x_last, w_last, channels in itertools.product((False, True), (False, True), (groups, 4)):
            w = draw((channels, 6 // groups, *[3] * len(size)), torch.int8, RNG)
            args = (channels_last(x) if x_last else x, channels_last(w) if w_last else w, None, *lists, groups)
            assert hop.explain(op, torch.int32, *args) == "integer convolution: chosen"
            got = hop.out_dtype(op, torch.int32, *args)
            want = out_dtype_operator.reference(op, torch.int32, *args)
            with FakeTensorMode() as mode:
                fake = hop.out_dtype(op, torch.int32, *(mode.from_tensor(v) for v in args[:2]), *args[2:])
            assert torch.equal(got, want) and layout_of(got) == layout_of(want) == layout_of(fake)
            assert (got.movedim(1, -1) if x_last or w_last else got).is_contiguous()


def layout_of(x: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


class TestEmpty(unittest.TestCase):
    @parameterized.expand([(f"{m}_{k}_{n}", m, k, n) for m, k, n in itertools.product((0, 3), repeat=3)])
    def test_products(self, _name, m, k, n):
        for dtype, output in (
            (torch.int8, torch.int32),
            (torch.int16, torch.int32),
            (torch.bfloat16, torch.float32),
            (torch.float8_e4m3fn, torch.float32),
        ):
            a, b = torch.zeros(m, k).to(dtype), torch.zeros(k, n).to(dtype)
            bias = torch.arange(n).to(output)
            want = bias.expand(m, n)
            assert torch.equal(hop.out_dtype(aten.addmm.default, output, bias, a, b), want)
            assert torch.equal(hop.out_dtype(aten.linear.default, output, a, b.t(), bias), want)
            got = hop.out_dtype(aten.bmm.default, output, a.expand(2, m, k), b.expand(2, k, n))
            assert torch.equal(got, torch.zeros(2, m, n, dtype=output))


class TestTransforms(unittest.TestCase):
    """Cases that the operators of the list do not have."""

    @parameterized.expand(
        [
            (f"{op}_{dims}_{keep}", op, dims, keep)
            for op in (aten.sum.dim_IntList, aten.mean.dim)
            for dims in ([], [0], [-1])
            for keep in (False, True)
        ]
    )
    def test_gradient_of_a_reduction_without_dimensions(self, _name, op, dims, keep):
        x = torch.tensor(3.0, requires_grad=True)
        (grad,) = torch.autograd.grad(hop.out_dtype(op, torch.float32, x, dims, keep), x)
        assert grad == 1 and grad.shape == ()

    @parameterized.expand([("both", (-1.0, 1.0)), ("low", (-1.0, None)), ("high", (None, 1.0)), ("none", (1.0, -1.0))])
    def test_gradient_of_clamp_at_its_bounds(self, _name, bounds):
        """1, in both modes and on all versions of torch."""
        x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, math.nan])
        low, high = bounds
        kept = [(low is None or v >= low) and (high is None or v <= high) for v in x.tolist()]
        want = torch.tensor(kept).float()

        def clamp(x):
            return hop.out_dtype(aten.clamp.default, torch.float32, x, low, high)

        assert torch.equal(torch.func.vjp(clamp, x)[1](torch.ones_like(x))[0], want)
        made: Any = torch.func.jvp(clamp, (x,), (torch.ones_like(x),))
        y, tangent = made
        assert torch.equal(tangent, want) and torch.equal(y.nan_to_num(9), x.clamp(low, high).nan_to_num(9))

    def test_vmap_keeps_masks(self):
        mask, x, y = torch.tensor([True, False]), torch.randn(2), torch.randn(2, 3)
        got = torch.vmap(lambda m, a, b: hop.out_dtype(aten.where.self, torch.float32, m, a, b))(mask, x, y)
        assert torch.equal(got, torch.where(mask[:, None], x[:, None], y))
        got = torch.vmap(lambda a, m: hop.out_dtype(aten.masked_fill.Scalar, torch.float32, a, m, 2.0))(x, mask)
        assert torch.equal(got, x.masked_fill(mask, 2.0))


class TestDivision(unittest.TestCase):
    def test_pairs_of_bytes(self):
        """Each quotient, towards zero, from one division in float32."""
        codes = torch.arange(-128, 128, dtype=torch.int8)
        a, b = codes.repeat_interleave(255), codes[codes != 0].repeat(256)
        want = [math.trunc(Fraction(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert hop.out_dtype(aten.div.Tensor, torch.int32, a, b).tolist() == want
        graph = make_fx(lambda a, b: out_dtype_operator.reference(aten.div.Tensor, torch.int32, a, b))(a, b).graph
        (node,) = graph.find_nodes(op="call_function", target=aten.div.Tensor)
        assert node.meta["tensor_meta"].dtype is torch.float32


class TestNonFinite(unittest.TestCase):
    def test_floats_pass_through(self):
        x = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0]])
        got = hop.out_dtype(aten.mul.Tensor, torch.bfloat16, x, torch.ones(1, 4, dtype=torch.int8))
        assert torch.equal(got.isnan(), x.isnan()) and torch.equal(got.isinf(), x.isinf())
        assert torch.equal(got.signbit()[~x.isnan()], x.signbit()[~x.isnan()])

    def test_float8_output_saturates_as_the_cast_does(self):
        x = torch.tensor([1e6, -1e6, float("nan"), 0.1])
        got = hop.out_dtype(aten.mul.Tensor, torch.float8_e4m3fn, x, 1.0)
        assert torch.equal(got.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.full
class TestEveryFormatOnEveryRoute(unittest.TestCase):
    """The full product of operators, formats and routes; of routes that trace programs, diagonals of it."""

    @parameterized.expand([(f"{r.name}_{o.name}", r, o) for r, o in itertools.product(routes.SINGLE, OPERATORS)])
    @pytest.mark.sampled(8)
    def test_single(self, _name, route, op):
        route.run([op.case(f) for f in FORMATS], [op.case(GRADIENT)])

    @parameterized.expand(
        [
            (f"{r.name}_{i}", r, i)
            for r, i in itertools.product(routes.BATCHED, range(6))
            if not r.compiler and not r.differentiates
        ]
    )
    @pytest.mark.sampled(6)
    def test_program(self, _name, route, i):
        route.run(_diagonal(3 * i), [])

    @parameterized.expand(
        [
            (f"{r.name}_{i}", r, i)
            for r, i in itertools.product(routes.BATCHED, range(2))
            if r.compiler and not r.differentiates and (r.name == "inductor" or i == 0)
        ]
    )
    @pytest.mark.compiler
    @pytest.mark.sampled(2)
    def test_compiled_program(self, _name, route, i):
        route.run(_diagonal(10 * i + 1), [])


def _diagonal(first: int) -> list[Any]:
    """Every operator, each in the next format: tracing and compiling the whole product takes hours."""
    return [o.case(FORMATS[(first + j) % len(FORMATS)]) for j, o in enumerate(OPERATORS)]
