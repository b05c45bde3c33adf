"""The routes beside our own kernel: what PyTorch has, and NVIDIA's registry, against numpy's sums."""

import io
import itertools
import unittest
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch._subclasses import FakeTensorMode

from cutlass_kernels import layouts, plain, public, registry
from cutlass_kernels.product import INTEGERS, REALS, Product

E4M3, E5M2, E8M0, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E8M0: ml_dtypes.float8_e8m0fnu}
CPU, AMPERE, ADA, HOPPER, BLACKWELL, SMALL_BLACKWELL = (0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
SIZES = [(1, 1, 1), (3, 5, 7), (16, 64, 32), (17, 24, 9), (33, 200, 65), (0, 8, 4), (4, 0, 3), (5, 9, 0)]
LAYOUTS = ["rows", "columns", "steps", "same"]

int_mm = torch._int_mm


# ---- inputs


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x in other strides; "same" repeats its first row, with stride 0."""
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "steps":
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x[..., :1, :].expand(x.shape) if layout == "same" else x


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random codes; the extremes of integers among them."""
    if dtype.is_floating_point:
        return (torch.randn(shape) * 4).to(dtype)
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, shape).to(dtype)
    return torch.where(torch.rand(shape) < 0.1, torch.full_like(x, info.min), x)


def vectors(m: int, n: int, **which: str) -> dict[str, Any]:
    """Values for the rows and columns; "one" makes one for all."""
    found: dict[str, Any] = {}
    for name, shape in which.items():
        size = 1 if shape == "one" else m if name.startswith("lhs") else n
        if name.endswith("scale"):
            value = torch.rand(size) * 0.1 + 0.01
        elif name == "bias_int":
            value = torch.randint(-(2**31), 2**31, (size,)).to(torch.int32)
        elif name == "bias":
            value = torch.randn(size)
        else:
            value = torch.randint(0, 128, (size,), dtype=torch.int32)
        column = name.startswith("lhs")
        found["bias" if name == "bias_int" else name] = {
            "matrix": lambda v=value, column=column: v.reshape(-1, 1) if column else v.reshape(1, -1),
            "one": lambda v=value: v.reshape(()),
        }.get(shape, lambda v=value: v)()
    return found


# ---- numpy's answer


def number(t: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor, by numpy: int64, or float64."""
    if t.dtype in NUMPY:
        return t.contiguous().view(torch.uint8).numpy().view(NUMPY[t.dtype]).astype(np.float64)
    if t.dtype.is_floating_point:
        return t.double().numpy()
    return t.numpy().astype(np.int64)


def unpacked(t: torch.Tensor, axis: int) -> np.ndarray:
    """The numbers of fp4 codes, two a byte along an axis, the low bits first."""
    halves = np.moveaxis(t.view(torch.uint8).numpy(), axis, -1)
    pairs = np.stack([halves & 15, halves >> 4], -1).reshape(*halves.shape[:-1], -1)
    return np.moveaxis(pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float64), -1, axis)


def row(t: Any) -> np.ndarray:
    return number(t).reshape(-1, 1)


def column(t: Any) -> np.ndarray:
    return number(t).reshape(1, -1)


def integer_oracle(p: Product) -> torch.Tensor:
    """Exact sums of centered codes, then float32, one operation at a time."""
    lhs, rhs = number(p.lhs), number(p.rhs)
    lhs = lhs if p.lhs_zero is None else lhs - row(p.lhs_zero)
    rhs = rhs if p.rhs_zero is None else rhs - column(p.rhs_zero)
    total = lhs @ rhs
    if p.bias is not None and p.bias.dtype == torch.int32:
        total = total + column(p.bias)
    total = total.astype(np.int32)  # wraps
    f = np.float32
    if p.out == torch.int32:
        return torch.from_numpy(total)
    y = total.astype(f)
    if p.requantize != "multiplier":
        if p.lhs_scale is not None:
            y = (y * row(p.lhs_scale).astype(f)) * column(p.rhs_scale).astype(f)
        if p.bias is not None and p.bias.dtype != torch.int32:
            y = y + column(p.bias).astype(f)
    if not p.requantize:
        return torch.from_numpy(np.ascontiguousarray(y)).to(p.out)
    step, zero = column(p.out_scale).astype(f), column(p.out_zero)
    low, high = -np.inf if p.low is None else p.low, np.inf if p.high is None else p.high
    least, most = torch.iinfo(p.out).min, torch.iinfo(p.out).max
    if p.requantize == "division":
        steps = np.clip(y, f(low), f(high)) / step
    else:
        steps = y * ((row(p.lhs_scale).astype(f) * column(p.rhs_scale).astype(f)) / step)
    found = np.clip(np.rint(steps.astype(np.float64)) + zero, least, most)
    if p.requantize == "multiplier":
        ends = [np.clip(np.rint((f(b) / step).astype(np.float64)) + zero, least, most) for b in (low, high)]
        found = np.minimum(np.maximum(found, ends[0]), ends[1])
    return torch.from_numpy(found.astype(np.int64)).to(p.out)


def float_oracle(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and how far float32 sums may be from it."""
    lhs = unpacked(p.lhs, -1) if p.lhs.dtype == FP4 else number(p.lhs)
    rhs = unpacked(p.rhs, -2) if p.rhs.dtype == FP4 else number(p.rhs)
    if p.lhs_scale is not None:
        if (kind := p.scaling) == "vector":
            lhs, rhs = lhs * row(p.lhs_scale), rhs * column(p.rhs_scale)
        else:
            inner = {E8M0: 32, E4M3: 16}.get(p.lhs_scale.dtype, 128)
            k, n = np.arange(lhs.shape[1]) // inner, np.arange(p.n) // (128 if kind == "block" else 1)
            lhs, rhs = lhs * number(p.lhs_scale)[:, k], rhs * number(p.rhs_scale)[k][:, n]
    y, size = lhs @ rhs, np.abs(lhs) @ np.abs(rhs)
    if p.global_scale is not None:
        y, size = y * p.global_scale.item(), size * abs(p.global_scale.item())
    if p.bias is not None:
        y, size = y + column(p.bias), size + np.abs(column(p.bias))
    return y, size * (lhs.shape[-1] + 8) * 2.0**-24


def assert_integers(p: Product, **options: Any) -> None:
    for found in (public.run(p, **options), plain.reference(p)):
        wanted = integer_oracle(p)
        assert found.dtype == p.out and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
        assert torch.equal(found, wanted), (found, wanted)


def assert_floats(p: Product, found: torch.Tensor) -> None:
    wanted, error = float_oracle(p)
    assert found.dtype == p.out and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
    if wanted.size == 0:
        return
    info = torch.finfo(p.out)
    gap = np.maximum(np.abs(wanted) * info.eps, 2.0 * info.smallest_normal * info.eps)
    lost = ~np.isfinite(number(found))  # as a cast may leave what is too large, or bring it to the largest
    assert (np.abs(wanted[lost]) + error[lost] > info.max).all(), (found, wanted)
    distance = np.abs(number(found) - np.clip(wanted, -info.max, info.max))
    assert (lost | (distance <= error + gap / 2)).all(), distance.max()


# ---- stand-ins for what only a GPU has: they check what it wants, and multiply in float64


def unswizzled(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first rows and columns of swizzled scales, each found by its index."""
    across = -(-columns // 4)
    found = torch.empty((rows, columns), dtype=torch.uint8)
    for r, c in itertools.product(range(rows), range(columns)):
        tile = (r // 128) * across + c // 4
        found[r, c] = scales.view(torch.uint8)[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]
    return found.view(scales.dtype)


def wants_factors(lhs: torch.Tensor, rhs: torch.Tensor, multiple: int) -> None:
    packing = 2 if lhs.dtype == FP4 else 1
    assert lhs.stride() == (lhs.shape[1], 1) and rhs.stride() == (1, rhs.shape[0]), (lhs.stride(), rhs.stride())
    assert lhs.shape[1] * packing % multiple == 0 and rhs.shape[1] % multiple == 0, (lhs.shape, rhs.shape)
    assert not lhs.dtype == rhs.dtype == E5M2


def gpu_int_mm(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    wants_factors(lhs, rhs, 8)
    assert lhs.shape[0] > 16 and lhs.dtype == rhs.dtype == torch.int8
    assert lhs.shape[1] < 2**17, "sums may saturate"
    return int_mm(lhs, rhs)


def gpu_scaled_mm(lhs, rhs, lhs_scale, rhs_scale, *, bias, out_dtype, use_fast_accum) -> torch.Tensor:
    wants_factors(lhs, rhs, 16)
    m, n = lhs.shape[0], rhs.shape[1]
    assert out_dtype in REALS and not (use_fast_accum and lhs.dtype == FP4)
    assert bias is None or (bias.shape == (n,) and bias.dtype == out_dtype != torch.float32)
    assert lhs_scale.is_contiguous() and rhs_scale.is_contiguous()
    if lhs_scale.dtype != torch.float32:
        k = lhs.shape[1] * (2 if lhs.dtype == FP4 else 1)
        assert (lhs_scale.dtype, lhs.dtype == FP4) in [(E8M0, False), (E4M3, True)]
        blocks = -(-k // (16 if lhs.dtype == FP4 else 32))
        assert [s.numel() for s in (lhs_scale, rhs_scale)] == [
            -(-s // 128) * 128 * (-(-blocks // 4) * 4) for s in (m, n)
        ]
        lhs_scale, rhs_scale = unswizzled(lhs_scale, m, blocks), unswizzled(rhs_scale, n, blocks).mT
    elif lhs_scale.numel() > 1 or rhs_scale.numel() > 1:
        assert (lhs_scale.shape, rhs_scale.shape) == ((m, 1), (1, n))
        assert (lhs.dtype, rhs.dtype, out_dtype) == (E4M3, E4M3, torch.bfloat16)
    p = Product(lhs, rhs, out_dtype, lhs_scale=lhs_scale, rhs_scale=rhs_scale, bias=bias)
    return torch.from_numpy(float_oracle(p)[0]).to(out_dtype)


def gpu_block_mm(lhs, rhs, lhs_scale, lhs_kind, rhs_scale, rhs_kind, *, output_dtype, use_fast_accum) -> torch.Tensor:
    wants_factors(lhs, rhs, 128)
    (m, k), n = lhs.shape, rhs.shape[1]
    kinds = torch.nn.functional.ScalingType
    assert (lhs_kind, rhs_kind) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    fours = -(-(k // 128) // 4) * 4
    for scale, rows, columns in ((lhs_scale, m, k // 128), (rhs_scale, fours, n // 128)):
        assert scale.shape == (rows, columns) and rows % 4 == 0
        assert scale.stride(0) == 1 and (columns == 1 or scale.stride(1) == rows), scale.stride()
    assert output_dtype in (torch.bfloat16, torch.float32)
    p = Product(lhs, rhs, output_dtype, lhs_scale=lhs_scale, rhs_scale=rhs_scale[: k // 128])
    return torch.from_numpy(float_oracle(p)[0]).to(output_dtype)


class OnGpu(unittest.TestCase):
    """The functions of PyTorch want what they want on a GPU."""

    def setUp(self):
        self.int_mm = self.patch(torch, "_int_mm", gpu_int_mm)
        self.scaled_mm = self.patch(torch, "_scaled_mm", gpu_scaled_mm)
        self.block_mm = self.patch(torch.nn.functional, "scaled_mm", gpu_block_mm)

    def patch(self, target: Any, name: str, stand_in: Any) -> Any:
        patch = mock.patch.object(target, name, side_effect=stand_in)
        self.addCleanup(patch.stop)
        return patch.start()


# ---- tests


class TestIntegers(OnGpu):
    @parameterized.expand(
        itertools.product((torch.int8, torch.uint8), (torch.int8, torch.uint8), LAYOUTS, range(len(SIZES)))
    )
    @pytest.mark.quick(3)
    def test_sums(self, lhs, rhs, layout, size):
        m, k, n = SIZES[size]
        p = Product(laid_out(codes(lhs, m, k), layout), laid_out(codes(rhs, k, n), layout), torch.int32)
        assert_integers(p)

    def test_long_sums_wrap(self):
        lhs, rhs = (torch.full(shape, -128, dtype=torch.int8) for shape in ((2, 300_001), (300_001, 3)))
        assert_integers(Product(lhs, rhs, torch.int32))

    @parameterized.expand(itertools.product((torch.int8, torch.uint8), (torch.int8, torch.uint8), (0, 1, 3)))
    def test_batches(self, lhs, rhs, batch):
        p = Product(codes(lhs, batch, 4, 9), codes(rhs, batch, 9, 5), torch.int32)
        assert_integers(p)
        given = vectors(4, 5, lhs_scale="each", rhs_scale="each", lhs_zero="each", rhs_zero="each", bias="each")
        assert_integers(Product(p.lhs, p.rhs, torch.float32, **given))

    def test_wraps(self):
        k = 40000  # 255 · 255 · k > 2^31
        p = Product(torch.full((2, k), 255, dtype=torch.uint8), torch.full((k, 3), 255, dtype=torch.uint8), torch.int32)
        assert_integers(p)
        far = torch.full((1,), -(2**31), dtype=torch.int32)
        ones = torch.ones((2, k), dtype=torch.int8), torch.ones((k, 3), dtype=torch.int8)
        assert_integers(Product(*ones, torch.int32, lhs_zero=far + 5, rhs_zero=far, bias=far))

    @parameterized.expand(
        itertools.product(
            (torch.float32, torch.bfloat16, torch.float16),
            ("one", "each", "matrix"),
            ("", "lhs", "rhs", "both"),
            ("", "bias", "bias_int"),
        )
    )
    @pytest.mark.quick(2)
    def test_epilogues(self, out, shape, zeros, bias):
        m, k, n = 9, 50, 19
        wanted = {"lhs_scale": shape, "rhs_scale": "each" if shape == "one" else shape}
        wanted |= {name: shape for name in ("lhs_zero", "rhs_zero") if zeros in (name[:3], "both")}
        wanted |= {bias: "each"} if bias else {}
        lhs, rhs = codes(torch.uint8, m, k), codes(torch.int8, k, n)
        given = vectors(m, n, **wanted)
        assert_integers(Product(lhs, rhs, out, **given))
        known = rhs.sum(0, dtype=torch.int32)
        assert_integers(Product(lhs, rhs, out, rhs_sum=known, **given))

    @parameterized.expand(
        itertools.product(
            ("division", "multiplier"),
            (torch.int8, torch.uint8),
            ("one", "each"),
            ((None, None), (0.0, None), (-3.0, 2.5)),
        )
    )
    def test_requantized(self, how, out, shape, bounds):
        m, k, n = 7, 33, 21
        lhs, rhs = codes(torch.int8, m, k), codes(torch.int8, k, n)
        given = vectors(
            *(m, n),
            lhs_scale="each",
            rhs_scale="each",
            lhs_zero="each",
            out_zero=shape,
            bias_int="each",
            out_scale=shape,
        )
        given["bias"] = given["bias"] % 1000
        p = Product(lhs, rhs, out, requantize=how, low=bounds[0], high=bounds[1], **given)
        assert_integers(p)
        assert_integers(Product(**{**vars(p), "out_scale": given["out_scale"] * 30}))

    @parameterized.expand([("division",), ("multiplier",)])
    def test_each_operation_rounds(self, how):
        """Of a million results some lie where the order of operations decides."""
        m, k, n = 1000, 4, 1000
        given = vectors(m, n, lhs_scale="each", rhs_scale="each", out_zero="one", out_scale="each")
        p = Product(codes(torch.int8, m, k), codes(torch.int8, k, n), torch.int8, requantize=how, **given)
        assert_integers(Product(**{**vars(p), "out_scale": given["out_scale"] * 10}))

    def test_nan_is_the_zero_point(self):
        one = torch.ones(1)
        p = Product(
            *(codes(torch.int8, 3, 4), codes(torch.int8, 4, 5), torch.int8),
            lhs_scale=one * torch.nan,
            rhs_scale=one,
            out_scale=one,
            out_zero=torch.tensor(7),
        )
        for how in ("division", "multiplier"):
            assert (public.run(Product(**{**vars(p), "requantize": how})) == 7).all()

    def test_the_zero_point_keeps_its_place_beside_the_largest(self):
        """An infinite quotient and a far zero point do not wrap."""
        one = torch.ones(1)
        for sign, wanted in ((1, 127), (-1, -128)):
            p = Product(
                *(torch.full((1, 4), sign, dtype=torch.int8), torch.ones((4, 1), dtype=torch.int8), torch.int8),
                lhs_scale=one * 3e38,
                rhs_scale=one * 3e38,
                out_scale=one,
                out_zero=torch.tensor(100 * sign),
                requantize="division",
            )
            assert public.run(p).item() == wanted


FLOAT_PAIRS = list(itertools.product((E4M3, E5M2), (E4M3, E5M2)))


class TestFloats(OnGpu):
    @parameterized.expand(itertools.product(FLOAT_PAIRS, (CPU, AMPERE, ADA, HOPPER, BLACKWELL), range(len(SIZES))))
    @pytest.mark.quick(3)
    def test_products(self, pair, capability, size):
        m, k, n = SIZES[size]
        for layout in LAYOUTS:
            lhs, rhs = (laid_out(codes(t, *shape), layout) for t, shape in zip(pair, ((m, k), (k, n)), strict=True))
            p = Product(lhs, rhs, torch.float32)
            assert_floats(p, public.run(p, capability))
            assert_floats(p, plain.reference(p))

    @parameterized.expand(
        itertools.product(
            (torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2),
            ("one", "each", "matrix"),
            (None, torch.float32, torch.bfloat16, torch.float16),
            (CPU, ADA, HOPPER, BLACKWELL),
        )
    )
    @pytest.mark.quick(6)
    def test_scales(self, out, shape, bias, capability):
        m, k, n = 19, 40, 23
        given = vectors(m, n, lhs_scale=shape, rhs_scale=shape, **({} if bias is None else {"bias": "each"}))
        given = {name: t.to(bias) if name == "bias" else t for name, t in given.items()}
        for pair in FLOAT_PAIRS[:2]:
            p = Product(codes(pair[0], m, k), codes(pair[1], k, n), out, **given)
            assert_floats(p, public.run(p, capability))
            assert_floats(p, plain.reference(p))

    def test_scales_are_in_the_product_where_they_can_be(self):
        given = vectors(19, 23, lhs_scale="each", rhs_scale="each", bias="each")
        given["bias"] = given["bias"].bfloat16()
        p = Product(codes(E4M3, 19, 40), codes(E4M3, 40, 23), torch.bfloat16, **given)
        for capability, is_fused in ((ADA, False), (HOPPER, True), (BLACKWELL, True)):
            self.scaled_mm.reset_mock()
            public.run(p, capability)
            assert self.scaled_mm.call_count == (capability != CPU)
            assert (self.scaled_mm.call_args.kwargs["bias"] is not None) == is_fused

    def test_batches(self):
        given = vectors(5, 6, lhs_scale="each", rhs_scale="each")
        lhs, rhs = codes(E4M3, 3, 5, 7), codes(E4M3, 3, 7, 6)
        for capability in (CPU, HOPPER):
            found = public.run(Product(lhs, rhs, torch.float32, **given), capability)
            for i in range(3):
                assert_floats(Product(lhs[i], rhs[i], torch.float32, **given), found[i])

    def test_overflow_is_that_of_a_cast(self):
        """As that of PyTorch 2.13: to the largest number, or to infinity where the format has one."""
        x = torch.full((1, 16), 448.0).to(E4M3)
        for (out, largest), capability in itertools.product(((E4M3, 448.0), (E5M2, torch.inf)), (CPU, HOPPER)):
            assert public.run(Product(x, x.mT, out), capability).float().item() == largest

    @parameterized.expand(
        itertools.product(
            ((5, 128, 128), (4, 300, 200), (1, 1000, 130), (3, 64, 300), (8, 256, 1)),
            (torch.bfloat16, torch.float16, torch.float32, E4M3),
            (CPU, ADA, HOPPER, BLACKWELL),
            (False, True),
        )
    )
    @pytest.mark.quick(8)
    def test_blocks(self, size, out, capability, has_bias):
        m, k, n = size
        scales = torch.rand(m, -(-k // 128)) * 0.01, torch.rand(-(-k // 128), -(-n // 128))
        bias = torch.randn(n) if has_bias else None
        p = Product(codes(E4M3, m, k), codes(E4M3, k, n), out, lhs_scale=scales[0], rhs_scale=scales[1], bias=bias)
        assert public.declines(p, capability) is None
        assert_floats(p, plain.reference(p))
        for version in ((12, 8), (12, 9)):
            with mock.patch.object(public, "_cuda_version", return_value=version):
                assert_floats(p, public.run(p, capability))

    def test_blocks_are_in_one_product_on_hopper(self):
        x = codes(E4M3, 4, 300)
        p = Product(x, x.mT, torch.float32, lhs_scale=torch.rand(4, 3), rhs_scale=torch.rand(3, 1))
        for capability, version, calls in ((HOPPER, (12, 9), 1), (HOPPER, (12, 8), 0), (BLACKWELL, (13, 0), 0)):
            self.block_mm.reset_mock()
            with mock.patch.object(public, "_cuda_version", return_value=version):
                public.run(p, capability)
            assert self.block_mm.call_count == calls, capability


def group_product(kind: str, m: int, k: int, n: int, out: torch.dtype, **more: Any) -> Product:
    """A product of MXFP8, MXFP4 or NVFP4 with random scales; K in elements."""
    types = {"MXFP8": (E4M3, E5M2, E8M0), "MXFP8_E5M2": (E5M2, E5M2, E8M0)}.get(kind, (FP4, FP4, E4M3))
    if kind == "MXFP4":
        types = (FP4, FP4, E8M0)
    group = {E8M0: 32, E4M3: 16}[types[2]]
    packing = 2 if types[0] == FP4 else 1

    def scales(*shape: int) -> torch.Tensor:
        return (
            torch.exp2(torch.randint(-4, 5, shape).float()).to(E8M0) if types[2] == E8M0 else torch.rand(shape).to(E4M3)
        )

    def factor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(FP4) if dtype == FP4 else codes(dtype, *shape)

    blocks = -(-k // group)
    return Product(
        *(factor(types[0], m, k // packing), factor(types[1], k // packing, n), out),
        lhs_scale=scales(m, blocks),
        rhs_scale=scales(blocks, n),
        **more,
    )


class TestGroups(OnGpu):
    def test_fp4_has_the_first_of_two_in_the_low_bits(self):
        x = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(FP4)
        for along in (-1, -2):
            assert np.array_equal(plain.decoded(x, torch.float32, along).numpy(), unpacked(x, along))

    @parameterized.expand(
        itertools.product(
            ("MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"),
            ((1, 32, 1), (130, 96, 40), (5, 160, 129), (3, 50, 7), (2, 40, 9)),
            (torch.bfloat16, torch.float32, E4M3),
            (CPU, HOPPER, BLACKWELL, SMALL_BLACKWELL),
        )
    )
    @pytest.mark.quick(10)
    def test_products(self, kind, size, out, capability):
        for more in ({}, {"bias": torch.randn(size[2]), "global_scale": torch.tensor(0.25)}):
            p = group_product(kind, *size, out, **more)
            assert public.declines(p, capability) is None
            found = public.run(p, capability)
            assert_floats(p, found)
            assert_floats(p, plain.reference(p))
        assert self.scaled_mm.called == (capability >= BLACKWELL and kind in ("MXFP8", "NVFP4"))

    @parameterized.expand([((1, 1),), ((128, 4),), ((129, 5),), ((300, 7),), ((32, 12),)])
    def test_swizzle(self, shape):
        scales = torch.randint(0, 256, shape, dtype=torch.uint8).view(E4M3)
        found = layouts.swizzled(scales)
        rows, columns = -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
        assert found.shape == (rows * columns,) and found.dtype == E4M3
        back = unswizzled(found, rows, columns).view(torch.uint8)
        assert torch.equal(back[: shape[0], : shape[1]], scales.view(torch.uint8))
        assert back[shape[0] :].sum() == 0 and back[:, shape[1] :].sum() == 0


# ---- the registry


def stand_in(call: registry.Call) -> None:
    """Write what a kernel would, in float64."""
    case, (lhs, rhs), vectors = call.case, (call.lhs, call.rhs), call.vectors
    for t in (lhs, rhs.mT, call.out):
        assert t.is_contiguous() and t.data_ptr() % 16 == 0 and t.stride(-2) * t.itemsize % 16 == 0
    if case.lhs in INTEGERS:
        call.out.copy_(torch.from_numpy((number(lhs) @ number(rhs)).astype(np.int32)))
        return
    names = ("lhs_scale", "rhs_scale") * (case.scaled or case.group > 0) + ("bias",) * case.biased
    given: dict[str, Any] = dict(zip(names, vectors, strict=True))
    if case.group:
        blocks = lhs.shape[1] * (2 if case.lhs == FP4 else 1) // case.group
        given["lhs_scale"] = unswizzled(given["lhs_scale"], lhs.shape[0], blocks)
        given["rhs_scale"] = unswizzled(given["rhs_scale"], rhs.shape[1], blocks).mT
    elif case.scaled:
        assert lhs.shape[-2] % 4 == 0 and given["lhs_scale"].stride() == (1, lhs.shape[-2])
    for i in range(lhs.shape[0]) if case.batched else (...,):
        call.out[i] = torch.from_numpy(float_oracle(Product(lhs[i], rhs[i], case.out, **given))[0]).to(case.out)


def by_registry(p: Product) -> torch.Tensor:
    call = registry.prepared(p, 148)
    stand_in(call)
    return registry.finished(p, call)


def odd(x: torch.Tensor) -> torch.Tensor:
    """x at an address that is no multiple of 16 bytes."""
    room = torch.zeros(x.numel() * x.itemsize + 16, dtype=torch.uint8)
    found = room[x.itemsize :][: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
    return found.copy_(x)


REGISTRY_CASES = [
    ("s8", registry.Case(torch.int8, torch.int8, torch.int32)),
    ("u8", registry.Case(torch.uint8, torch.uint8, torch.int32)),
    ("s8 batch", registry.Case(torch.int8, torch.int8, torch.int32, batched=True)),
    *((f"{lhs} {out} {scaled} {biased}", registry.Case(lhs, lhs, out, scaled=scaled, biased=biased)) for lhs,
        out in (*itertools.product((E4M3,), (torch.bfloat16, torch.float16, torch.float32)),
        (E5M2, torch.bfloat16)) for scaled, biased in itertools.product((False, True), repeat=2)),
    ("e4m3 batch", registry.Case(E4M3, E4M3, torch.bfloat16, batched=True, scaled=True, biased=True)),
    *((f"{lhs} {rhs} {group} {out}", registry.Case(lhs, rhs, out, group=group)) for lhs, rhs,
        group in ((E4M3, E4M3, 32), (E4M3, E5M2, 32), (E5M2, E5M2, 32), (FP4, FP4, 32),
        (FP4, FP4, 16)) for out in (torch.bfloat16, torch.float32)),
]  # fmt: skip
TILES = {"few rows": (16, 512), "small": (256, 512), "large": (8192, 8192)}
REGISTRY = unittest.skipIf(registry.missing() is not None, registry.missing() or "")


class TestRegistry(unittest.TestCase):
    @parameterized.expand(
        itertools.product(
            (torch.int8, torch.uint8), (torch.int8, torch.uint8), LAYOUTS, ((1, 1, 1), (5, 33, 7), (130, 16, 8))
        )
    )
    def test_integers(self, lhs, rhs, layout, size):
        m, k, n = size
        given = vectors(m, n, lhs_scale="each", rhs_scale="matrix", lhs_zero="one", rhs_zero="each", bias="each")
        for out, more in ((torch.int32, {}), (torch.bfloat16, given)):
            p = Product(laid_out(codes(lhs, m, k), layout), laid_out(codes(rhs, k, n), layout), out, **more)
            assert torch.equal(by_registry(p), integer_oracle(p))
        p = Product(codes(lhs, 3, m, k), codes(rhs, 3, k, n), torch.int32)
        assert torch.equal(by_registry(p), integer_oracle(p))

    @parameterized.expand(
        itertools.product(
            (torch.float32, torch.bfloat16, torch.float16, E4M3), ("", "one", "each"), (False, True), (False, True)
        )
    )
    def test_floats(self, out, shape, has_bias, has_global):
        for m, k, n in ((1, 1, 1), (5, 33, 7), (130, 16, 8)):
            names = {name: shape for name in ("lhs_scale", "rhs_scale") if shape} | (
                {"bias": "each"} if has_bias else {}
            )
            given = vectors(m, n, **names) | ({"global_scale": torch.tensor(0.5)} if has_global else {})
            p = Product(odd(codes(E4M3, m, k)), odd(codes(E4M3, k, n)), out, **given)
            assert_floats(p, by_registry(p))
        fused = registry.prepared(p, 148).case
        assert (fused.scaled, fused.biased) == (shape != "", has_bias and not has_global)

    @parameterized.expand(
        itertools.product(
            ("MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"),
            ((1, 32, 1), (130, 96, 40), (3, 50, 7), (2, 40, 9)),
            (torch.bfloat16, E5M2),
        )
    )
    def test_groups(self, kind, size, out):
        for more in ({}, {"bias": torch.randn(size[2]), "global_scale": torch.tensor(0.25)}):
            p = group_product(kind, *size, out, **more)
            assert_floats(p, by_registry(p))

    def test_tiles_fit_the_device(self):
        case = registry.Case(E4M3, E4M3, torch.bfloat16)
        assert registry.tiled(case, 4096, 4096, 148).tile == (256, 256)
        assert registry.tiled(case, 4096, 1024, 148).tile == (128, 128)
        assert registry.tiled(case, 16, 65536, 148).tile == (256, 256)
        assert registry.tiled(case, 16, 4096, 148).tile == (64, 64)

    def test_declines(self):
        with FakeTensorMode(), mock.patch.object(registry, "missing", return_value=None):

            def of(lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, k: int = 64, **more: Any) -> Product:
                factors = [torch.empty(shape, dtype=t, device="cuda") for t, shape in ((lhs, (64, k)), (rhs, (k, 64)))]
                return Product(*factors, out, **more)

            scales = [torch.empty(64, 2, device="cuda"), torch.empty(2, 1, device="cuda")]
            cpu = torch.empty(4, 4, dtype=E4M3)
            for p, capability, reason in (
                (of(E4M3, E4M3, torch.bfloat16), BLACKWELL, None),
                (of(torch.int8, torch.uint8, torch.int32), BLACKWELL, None),
                (of(torch.int8, torch.int8, torch.int32), (10, 3), "sm_103a has no products of 8-bit integers"),
                (of(torch.int8, torch.int8, torch.int32, 2**17), BLACKWELL, "K must be at most 131071"),
                (of(torch.uint8, torch.uint8, torch.int32, 33026), BLACKWELL, "K must be at most 33025"),
                (of(E4M3, E5M2, torch.bfloat16), BLACKWELL, "float8 of one dtype"),
                (of(E4M3, E4M3, torch.bfloat16, 256, lhs_scale=scales[0], rhs_scale=scales[1]), BLACKWELL, "blocks"),
                (of(E4M3, E4M3, torch.bfloat16), HOPPER, "capability"),
                (of(E4M3, E4M3, torch.bfloat16), SMALL_BLACKWELL, "capability"),
                (Product(cpu, cpu, torch.bfloat16), BLACKWELL, "run on CUDA devices, got cpu"),
            ):
                found = registry.declines(p, capability)
                assert found is None if reason is None else reason in str(found), (found, reason)

    def test_declines_where_it_is_not_installed(self):
        x = codes(E4M3, 4, 4)
        with mock.patch.object(registry, "missing", return_value="not installed"):
            assert registry.declines(Product(x, x, torch.bfloat16), BLACKWELL) == "not installed"


@REGISTRY
class TestRegistryKernels(unittest.TestCase):
    @parameterized.expand(itertools.product(range(0, len(REGISTRY_CASES), 5), ("small",)))
    @pytest.mark.full
    def test_compiles(self, index, size):
        self.compiles("100a", REGISTRY_CASES[index][1], size)

    @parameterized.expand(zip(range(len(REGISTRY_CASES)), itertools.cycle(TILES)))
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_case_compiles(self, index, size):
        self.compiles("100a", REGISTRY_CASES[index][1], size)

    @parameterized.expand([(i, ("103a", "110a")[i % 2]) for i in range(len(REGISTRY_CASES))])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_target_compiles(self, index, target):
        case = REGISTRY_CASES[index][1]
        if target == "103a" and case.lhs in INTEGERS:
            with self.assertRaisesRegex(RuntimeError, "has no kernel"):
                self.compiles(target, case, "small")
        else:
            self.compiles(target, case, "small")

    def compiles(self, target: str, case: registry.Case, size: str) -> None:
        kernel = registry.compile_for(target, registry.tiled(case, *TILES[size], 148), 148)
        module = io.BytesIO()
        kernel.ir_module.operation.write_bytecode(
            module
        )  # with the device's code, in an ELF file that names its target
        assert b"\x7fELF" in module.getvalue() and b"sm_" + target.encode() in module.getvalue()

    @parameterized.expand([(name,) for name in ("plain", "vector", "bias", "batch", "MXFP8", "NVFP4", "integers")])
    def test_is_called_as_the_registry_calls_it(self, name):
        import cuda.bindings.driver as cuda  # pyright: ignore[reportMissingImports]
        from cutlass import operators  # pyright: ignore[reportMissingImports]

        given = vectors(7, 9, lhs_scale="each", rhs_scale="each", bias="each")
        x, y = codes(E4M3, 7, 33), codes(E4M3, 33, 9)
        p = {
            "plain": lambda: Product(x, y, torch.bfloat16),
            "vector": lambda: Product(x, y, torch.bfloat16, **given),
            "bias": lambda: Product(x, y, torch.float32, bias=given["bias"]),
            "batch": lambda: Product(codes(E4M3, 2, 7, 33), codes(E4M3, 2, 33, 9), torch.float16, **given),
            "integers": lambda: Product(codes(torch.int8, 7, 33), codes(torch.int8, 33, 9), torch.int32),
        }.get(name, lambda: group_product(name, 7, 50, 9, torch.bfloat16))()
        call = registry.prepared(p, 148)
        args = registry.arguments(call.case, call.lhs, call.rhs, call.out, *call.vectors)
        found = operators.get_operators(args, lambda metadata: registry._is_chosen(call.case, metadata), "100a")
        assert len(found) == 1 and found[0].supports(args, "100a"), found
        theirs, ours = mock.Mock(), mock.Mock()
        artifact = operators.CompiledArtifact(theirs, found[0], operators.TargetSm("100a"))
        found[0].run(args, artifact, stream=cuda.CUstream(5), assume_supported_args=True)
        registry.launch(ours, call, 5)
        for wanted, got in zip(theirs.call_args.args, ours.call_args.args, strict=True):
            assert same(wanted, got), (wanted, got)


def same(a: Any, b: Any) -> bool:
    """Whether two arguments of a kernel are one tensor, pointer, stream or value."""
    if isinstance(a, torch.Tensor):
        return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
    if type(a) is not type(b):
        return False
    return (
        str(a) == str(b)
        if hasattr(a, "memspace")
        else tuple(a) == tuple(b)
        if isinstance(a, tuple)
        else int(a) == int(b)
    )
