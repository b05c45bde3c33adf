"""Experts on a GPU, whose kernel of groups stands here in plain torch: what it is asked, and that it means the same."""

import contextlib
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cutlass_kernels
import hop
from cutlass_kernels import checks, plain
from cutlass_kernels.product import Product
from cutlass_kernels.tiles import SMALLEST
from hop import presets
from hop.dispatch.kernel import Declined
from hop.nn.layers import stack_kernels, stacks
from hop.nn.layers.stack_kernels import Groups
from hop.nn.layers.stacks import Stack
from tests.support import emulated

SCHEMES = {
    "int8": hop.schemes.INT8_DYNAMIC,
    "affine rows": hop.Scheme(presets.INT8_ROW_AFFINE, presets.INT8_ROW),
    "fp8": hop.schemes.FP8_DYNAMIC_ROW,
    "blocks": hop.Scheme(presets.FP8_1X128, presets.FP8_128X128),
}


QUANTIZED = hop.numerics.schemes.QUANTIZED
TRAINED = {
    "int8": hop.Scheme(presets.INT8_ROW, presets.INT8_ROW, grad=presets.INT8_ROW, backward=QUANTIZED),
    "int8 tensors": hop.Scheme(presets.INT8_TENSOR, presets.INT8_TENSOR, grad=presets.INT8_TENSOR, backward=QUANTIZED),
    "int8 mixed": hop.Scheme(presets.INT8_TENSOR, presets.INT8_ROW, grad=presets.INT8_ROW, backward=QUANTIZED),
    "int8 mixed otherwise": hop.Scheme(
        presets.INT8_ROW, presets.INT8_TENSOR, grad=presets.INT8_TENSOR, backward=QUANTIZED
    ),
    "fp8 rows": hop.Scheme(presets.FP8_ROW, presets.FP8_ROW, grad=presets.FP8_E5M2_ROW, backward=QUANTIZED),
    "hybrid": hop.recipes.FP8_HYBRID,
    "blocks": hop.recipes.FP8_BLOCKWISE,
}
ENDS = ([7, 7, 18], [0, 150, 300], [1, 1, 1])


class OnGpu(unittest.TestCase):
    """The kernels' products, in plain torch."""

    def setUp(self):
        torch.manual_seed(0)
        self.asked: list[Product] = []

    def multiply(self, p: Product) -> Tensor:
        return plain.reference(p)

    @contextlib.contextmanager
    def kernels(self, on_gpu: bool = True) -> Iterator[None]:
        def mm(lhs: Tensor, rhs: Tensor, out: torch.dtype, **fused: Any) -> Tensor:
            self.asked.append(Product(lhs, rhs, out, **fused))
            checks.check(self.asked[-1])
            return self.multiply(self.asked[-1])

        with (
            mock.patch("hop.kernels.gpu.product.takes", lambda x: on_gpu),
            mock.patch("hop.kernels.gpu.product.is_hopper", lambda device: on_gpu),
            mock.patch("hop.kernels.gpu.product.declines", lambda p: None),
            mock.patch("hop.kernels.gpu.product.mm", mm),
        ):
            yield

    def computed(self, on_gpu: bool, x: Tensor, ends: Tensor, given: Any, scheme: Any, columns: bool) -> Tensor:
        rows = torch.arange(x.shape[0]).flip(0)
        with self.kernels(on_gpu):
            return stacks.chain(x, rows, ends, given, torch.nn.functional.silu, scheme, columns)


class TestExperts(OnGpu):
    @parameterized.expand([(name, columns, bias) for name in SCHEMES for columns in (False, True) for bias in (0, 1)])
    def test_the_same_as_group_by_group(self, name, columns, bias):
        scheme = SCHEMES[name]
        assert scheme.rhs is not None and scheme.lhs is not None
        x, ends = torch.randn(20, 144).bfloat16(), torch.tensor([7, 7, 18])
        q = (scheme.rhs.transposed(2) if columns else scheme.rhs).of_batch(2)
        made = []
        for r, k in ((160, 144), (40, 160)):
            weight = torch.randn(3, k, r) if columns else torch.randn(3, r, k)
            made.append(Stack(hop.quantize(q, weight.bfloat16()), torch.randn(3, r).bfloat16() if bias else None))
        wanted = self.computed(False, x, ends, made, scheme, columns)
        assert not self.asked
        got = self.computed(True, x, ends, made, scheme, columns)
        assert len(self.asked) == 2 and all(p.groups == "rows" for p in self.asked)
        assert got.dtype == wanted.dtype and not got[18:].any()
        if scheme.lhs.format.is_integer:
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)

    def test_others_go_group_by_group(self):
        scheme = hop.schemes.INT8_DYNAMIC
        x, ends = torch.randn(9, 48), torch.tensor([4, 9])
        floats = [Stack(torch.randn(2, 16, 48).double(), None)]
        other = hop.schemes.INT8_DA_INT4_W
        assert other.rhs is not None
        nibbles = [Stack(hop.quantize(other.rhs.of_batch(2), torch.randn(2, 16, 64)), None)]
        for given, own, inputs in ((floats, scheme, x), (nibbles, other, torch.randn(9, 64))):
            got = self.computed(True, inputs, ends, given, own, False)
            assert all(p.groups != "rows" for p in self.asked)
            assert torch.equal(got, self.computed(False, inputs, ends, given, own, False))

    @parameterized.expand([(name, columns) for name in TRAINED for columns in (False, True)])
    def test_float_weights_are_quantized_in_the_call(self, name, columns):
        x, ends = torch.randn(20, 144), torch.tensor([7, 7, 18])
        given = made(columns, 3, (160, 144), (40, 160))
        with torch.no_grad():
            wanted, got = (self.computed(on_gpu, x, ends, given, TRAINED[name], columns) for on_gpu in (False, True))
        assert len(self.asked) == 2
        if TRAINED[name].lhs.format.is_integer:
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def made(columns: bool, count: int, *sizes: tuple[int, int], bias: bool = False) -> list[Stack]:
    """Stacks of floats that need gradients."""
    found = []
    for r, k in sizes:
        weight = torch.randn(count, *((k, r) if columns else (r, k)))
        found.append(Stack(weight.requires_grad_(), torch.randn(count, r).requires_grad_() if bias else None))
    return found


class TestGradients(OnGpu):
    def gradients(
        self, on_gpu: bool, x: Tensor, rows: Tensor, ends: Tensor, given: list[Stack], scheme: Any, columns: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The result, and by their names the gradients of all that needs one."""
        x = x.detach().requires_grad_()
        inputs = {"x": x}
        for i, (weight, bias) in enumerate(given):
            inputs |= {f"weight {i}": weight} if weight.requires_grad else {}
            inputs |= {} if bias is None else {f"bias {i}": bias}
        with self.kernels(on_gpu):
            y = stacks.chain(x, rows, ends, given, torch.nn.functional.silu, scheme, columns)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
            found = torch.autograd.grad(y, list(inputs.values()), grad, materialize_grads=True)
        return y.detach(), dict(zip(inputs, found, strict=True))

    def compare(self, x: Tensor, rows: Tensor, ends: Tensor, given: list[Stack], scheme: Any, columns: bool) -> None:
        """Those of each group by itself: of integers the same bits, of floats but for the order of their sums."""
        y, wanted = self.gradients(False, x, rows, ends, given, scheme, columns)
        assert not self.asked
        z, got = self.gradients(True, x, rows, ends, given, scheme, columns)
        assert [p.groups for p in self.asked] == ["rows"] * len(given) + ["rows", "k"] * len(given)
        wanted, got = wanted | {"y": y}, got | {"y": z}
        for name, of in wanted.items():
            assert got[name].dtype == of.dtype and got[name].shape == of.shape and not got[name].isnan().any()
            if scheme.lhs.format.is_integer and "bias" not in name:
                assert torch.equal(got[name], of), f"{name}: {int((got[name] != of).sum())} of {of.numel()} differ"
            torch.testing.assert_close(
                got[name], of, rtol=1e-4, atol=1e-4 * float(of.abs().max()), msg=lambda m, name=name: f"{name}: {m}"
            )

    @parameterized.expand([(name, columns, bias) for name in TRAINED for columns in (False, True) for bias in (0, 1)])
    @pytest.mark.quick(4)
    def test_the_same_as_group_by_group(self, name, columns, bias):
        """Of rows that are in several groups, or in none."""
        x, rows, ends = torch.randn(20, 144), torch.randint(0, 20, (30,)), torch.tensor([7, 7, 25])
        self.compare(x, rows, ends, made(columns, 3, (160, 144), (40, 160), bias=bool(bias)), TRAINED[name], columns)

    @parameterized.expand([(name, str(ends), ends) for name in ("int8", "hybrid", "blocks") for ends in ENDS])
    def test_groups_of_many_sizes(self, name, _, ends):
        x, rows = torch.randn(40, 64), torch.randint(0, 40, (300,))
        self.compare(x, rows, torch.tensor(ends), made(False, 3, (48, 64)), TRAINED[name], False)

    def test_no_rows_in_any_group(self):
        x, rows, ends = torch.randn(9, 64), torch.arange(9), torch.zeros(3, dtype=torch.int64)
        for name, scheme in TRAINED.items():
            y, got = self.gradients(True, x, rows, ends, made(False, 3, (48, 64), bias=True), scheme, False)
            for found in (y, *got.values()):
                assert torch.equal(found, torch.zeros_like(found)), name

    @parameterized.expand([(name,) for name in ("int8", "int8 tensors", "hybrid")])
    def test_numbers_that_are_none(self, name):
        """What is in no group changes nothing, and a group keeps its own to itself."""
        x, rows, ends = torch.randn(30, 64), torch.arange(30), torch.tensor([9, 20, 25])
        x[3, 5], x[27] = torch.nan, torch.inf
        given, scheme = made(False, 3, (48, 64)), TRAINED[name]
        (y, wanted), (z, got) = (
            self.gradients(on_gpu, x, rows, ends, given, scheme, False) for on_gpu in (False, True)
        )
        for one, other in ((y, z), *((wanted[name], got[name]) for name in wanted)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert got["weight 0"][1:].isfinite().all() and torch.equal(z[25:], torch.zeros_like(z[25:]))

    @parameterized.expand([(columns,) for columns in (False, True)])
    def test_codes_in_the_place_of_weights(self, columns):
        """Their rows alone have a gradient."""
        for scheme in (TRAINED["int8"], TRAINED["blocks"]):
            self.asked.clear()
            q = stack_kernels.stack_quantizer(scheme.rhs, columns)
            ((weight, _),) = made(columns, 3, (160, 144))
            given = [Stack(hop.quantize(q, weight.detach()), None)]
            x, rows, ends = torch.randn(20, 144), torch.arange(20), torch.tensor([7, 7, 18])
            _, wanted = self.gradients(False, x, rows, ends, given, scheme, columns)
            _, got = self.gradients(True, x, rows, ends, given, scheme, columns)
            assert [p.groups for p in self.asked] == ["rows", "rows"]
            torch.testing.assert_close(got["x"], wanted["x"], rtol=1e-4, atol=1e-4 * float(wanted["x"].abs().max()))

    def test_in_programs(self):
        x, rows, ends = torch.randn(20, 144), torch.arange(20), torch.tensor([7, 7, 18])
        given, scheme = made(False, 3, (160, 144), bias=True), TRAINED["int8"]
        _, wanted = self.gradients(False, x, rows, ends, given, scheme, False)

        def program(x: Tensor) -> Tensor:
            return stacks.chain(x, rows, ends, given, torch.nn.functional.silu, scheme, False)

        x.requires_grad_()
        with self.kernels():
            y = torch.compile(program, fullgraph=True, backend="aot_eager")(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        assert [p.groups for p in self.asked] == ["rows", "rows", "k"]
        assert torch.equal(x.grad, wanted["x"]) and torch.equal(given[0].weight.grad, wanted["weight 0"])

    def test_gradients_of_gradients(self):
        """They go group by group, in operators that have derivatives."""
        x, rows, ends = torch.randn(20, 64, requires_grad=True), torch.arange(20), torch.tensor([7, 7, 18])
        given, scheme = made(False, 3, (48, 64)), TRAINED["int8"]
        found = []
        for on_gpu in (False, True):
            with self.kernels(on_gpu):
                y = stacks.chain(x, rows, ends, given, torch.nn.functional.silu, scheme, False)
                (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                found.append(torch.autograd.grad(dx.square().sum(), [x, given[0].weight]))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))

    def test_the_host_learns_no_sizes(self):
        """What reads them on the host fails on tensors without data."""
        for name, scheme in TRAINED.items():
            with self.subTest(name), self.kernels(), FakeTensorMode():
                x, grad, ends = torch.empty(20, 144), torch.empty(20, 160), torch.empty(3, dtype=torch.int64)
                stack = Stack(torch.empty(3, 160, 144), torch.empty(3, 160))
                with mock.patch("hop.kernels.gpu.product.mm", lambda *args, **fused: Product(*args, **fused).lhs):
                    found = stack_kernels.asked_for_gradients(grad, x, ends, stack, scheme, False)
                assert not [p for p in found.values() if isinstance(p, Declined)]
                assert Groups.of(ends, 20).reduced(grad, "sum").shape == (3, 160)

    def test_what_is_said_of_it(self):
        def said(scheme: Any, weight: Tensor) -> list[str]:
            text = "" if scheme is None else str(scheme)
            x, ends, shape = torch.randn(20, 144), torch.tensor([7, 7, 18]), [3, 160, 144]
            given = (x, None, ends, [weight], None, text, "", shape, False)
            return hop.explain(torch.ops.hop.stacked.default, *given).splitlines()

        weight = torch.randn(3, 160, 144)
        assert said(TRAINED["int8"], weight)[0].startswith("product: GPU groups: for GPUs")
        with self.kernels():
            names = ("product", "gradient of x", "gradient of weight")
            assert said(TRAINED["blocks"], weight) == [f"{name}: GPU groups: chosen" for name in names]
            product, *others = said(hop.schemes.INT8_DYNAMIC, weight)
            assert product == "product: GPU groups: chosen"
            assert all("for backward='quantized'" in line and "group by group: chosen" in line for line in others)
            assert "for scales by ['Amax'" in said(hop.recipes.MXFP8_TRAINING, weight)[1]
            assert "dtype of the rows" in said(TRAINED["int8"], weight.double())[1]
            assert "rows that are quantized" in said(None, weight)[0]


@pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
class TestEmulated(OnGpu):
    """By the kernels of groups in the emulator of tests.ptx."""

    compare, gradients = TestGradients.compare, TestGradients.gradients

    def multiply(self, p: Product) -> Tensor:
        return emulated.run(p, SMALLEST)

    @parameterized.expand([(name,) for name in ("int8", "hybrid", "blocks")])
    @pytest.mark.full
    def test_the_same_as_group_by_group(self, name):
        x, rows, ends = torch.randn(20, 64), torch.randint(0, 20, (30,)), torch.tensor([7, 7, 25])
        self.compare(x, rows, ends, made(False, 3, (48, 64)), TRAINED[name], False)
