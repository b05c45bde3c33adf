"""The way around the dispatcher gives what the way through it gives, and is not taken where somebody watches."""

import contextlib
import math
import sys
import unittest
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hop
from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.dispatch import plan
from hop.impls.out_dtype import out_dtype_operator
from hop.impls.quantize.operator import quantize_operator
from hop.kernels.cpu import native
from tests.support.routes import nodes

aten = torch.ops.aten
MM = aten.mm.default


def operands(m: int = 5, k: int = 8, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-128, 128, (m, k), dtype=torch.int8), torch.randint(-128, 128, (k, n), dtype=torch.int8)


def route(call: Callable[[], Any]) -> list[str]:
    """Where `call` passes: the dispatcher, the reference, or neither when it goes to a kernel directly."""
    seen: list[str] = []
    full, reference = eager.HigherOrderOperator.__call__, out_dtype_operator.reference

    def watch_full(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        seen.append("dispatcher")
        return full(self, *args, **kwargs)

    def watch_reference(*args: Any, **kwargs: Any) -> Any:
        seen.append("reference")
        return reference(*args, **kwargs)

    with (
        mock.patch.object(eager.HigherOrderOperator, "__call__", watch_full),
        mock.patch.object(out_dtype_operator, "reference", watch_reference),
    ):
        call()
    return seen


def through_the_dispatcher(call: Callable[[], Any]) -> bool:
    return route(call) != []


def _filled(given: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the operator hop_quantize after x."""
    return given["scale"], given.get("zero_point"), None, ["rowwise"], "clipped"


class Sees:
    """A mode that keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def see(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesAten(Sees, TorchDispatchMode):
    """Knows nothing of higher-order operators."""

    __torch_dispatch__ = Sees.see  # type: ignore[assignment]


class SeesFunctions(Sees, TorchFunctionMode):
    __torch_function__ = Sees.see  # type: ignore[assignment]


class TestTaken(unittest.TestCase):
    def test_plain_eager(self):
        a, b = operands()
        assert not through_the_dispatcher(lambda: hop.out_dtype(MM, torch.int32, a, b))

    @parameterized.expand(
        [
            ("inference_mode", torch.inference_mode),
            ("no_grad", torch.no_grad),
            ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
        ]
    )
    def test_under(self, _name, context):
        a, b = operands()
        want = a.int() @ b.int()
        with context():
            assert not through_the_dispatcher(lambda: hop.out_dtype(MM, torch.int32, a, b))
            assert torch.equal(hop.out_dtype(MM, torch.int32, a, b), want)

    def test_parameters(self):
        a, b = operands()
        b = torch.nn.Parameter(b, requires_grad=False)
        assert not through_the_dispatcher(lambda: hop.out_dtype(MM, torch.int32, a, b))

    def test_float_without_gradient(self):
        a, b = torch.randn(3, 4), torch.randn(4, 5)
        assert route(lambda: hop.out_dtype(MM, torch.float32, a, b)) == ["reference"]
        a.requires_grad_()
        with torch.no_grad():
            assert route(lambda: hop.out_dtype(MM, torch.float32, a, b)) == ["reference"]


class TestNotTaken(unittest.TestCase):
    """Each of these changes what a call means, and must be seen by the dispatcher."""

    def check_full(self, call: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
        assert through_the_dispatcher(call)
        assert torch.equal(call(), want)

    @parameterized.expand(
        [
            ("dispatch", SeesAten, lambda mode: aten.mm.default in mode.seen),
            ("function", SeesFunctions, lambda mode: out_dtype_operator in mode.seen),
            ("default_device", lambda: torch.device("cpu"), lambda _: True),
            (
                "flop_counter",
                lambda: FlopCounterMode(display=False),
                lambda c: c.get_total_flops() == 2 * 2 * 5 * 8 * 6,
            ),
        ]
    )
    def test_modes(self, _name, make, has_seen):
        a, b = operands()
        want = hop.out_dtype(MM, torch.int32, a, b)
        with make() as mode:
            self.check_full(lambda: hop.out_dtype(MM, torch.int32, a, b), want)
        assert has_seen(mode)

    def test_fake_tensors(self):
        """In their mode, and outside."""
        mode, (a, b) = FakeTensorMode(), operands()
        for around in (mode, contextlib.nullcontext()):
            with around:
                out = hop.out_dtype(MM, torch.int32, mode.from_tensor(a), mode.from_tensor(b))
            assert type(out).__name__ == "FakeTensor"

    def test_make_fx(self):
        a, b = operands()
        graph = make_fx(lambda a, b: hop.out_dtype(MM, torch.int32, a, b))(a, b)
        assert nodes(graph.graph) == 1
        assert not through_the_dispatcher(lambda: graph(a, b))

    def test_vmap(self):
        a, b = operands()
        batch = a.expand(3, 5, 8)
        call = torch.func.vmap(lambda a: hop.out_dtype(MM, torch.int32, a, b))
        self.check_full(lambda: call(batch), hop.out_dtype(MM, torch.int32, a, b).expand(3, 5, 6))

    def test_func_levels(self):
        a, b = operands()
        x = torch.randn(3)
        want = hop.out_dtype(MM, torch.int32, a, b)

        def f(x):
            assert through_the_dispatcher(lambda: hop.out_dtype(MM, torch.int32, a, b))
            assert torch.equal(hop.out_dtype(MM, torch.int32, a, b), want)
            return x.sum()

        torch.func.grad(f)(x)
        torch.func.jvp(f, (x,), (x,))
        torch.func.functionalize(f)(x)

    def test_jit_trace(self):
        """Refused: it would keep what the operators do for one input."""
        layer, quantizer = hop.nn.Linear(4, 2, scheme=hop.schemes.INT8_DYNAMIC), hop.presets.INT8_ROW
        x, t = torch.randn(3, 4), hop.quantize(quantizer, torch.randn(3, 4))
        for function, args in (
            (lambda a, b: hop.out_dtype(MM, torch.int32, a, b), operands()),
            (lambda x: hop.dequantize(hop.quantize(quantizer, x)), (x,)),
            (lambda x: hop.fake_quantize(quantizer, x), (x,)),
            (layer, (x,)),
            (lambda x: hop.dequantize(t) + x, (x,)),
        ):
            with warnings.catch_warnings(), pytest.raises(NotImplementedError, match=r"use torch\.export"):
                warnings.simplefilter("ignore")  # deprecated from torch 2.13 on
                torch.jit.trace(function, args, check_trace=False)

    def test_gradient(self):
        a, b = torch.randn(3, 4, requires_grad=True), torch.randint(-5, 5, (4, 2), dtype=torch.int8)
        out = hop.out_dtype(MM, torch.float32, a, b)
        (grad,) = torch.autograd.grad(out.sum(), a)
        torch.testing.assert_close(grad, b.float().sum(1).expand(3, 4))

    def test_forward_ad(self):
        a, t, b = torch.randn(3, 4), torch.randn(3, 4), torch.randint(-5, 5, (4, 2), dtype=torch.int8)
        with torch.autograd.forward_ad.dual_level():
            out = hop.out_dtype(MM, torch.float32, torch.autograd.forward_ad.make_dual(a, t), b)
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, t @ b.float())

    def test_subclass(self):
        class Marked(torch.Tensor):
            pass

        a, b = operands()
        out = hop.out_dtype(MM, torch.int32, a.as_subclass(Marked), b)
        assert type(out) is Marked
        assert torch.equal(out.as_subclass(torch.Tensor), hop.out_dtype(MM, torch.int32, a, b))

    def test_wrapper_subclass(self):
        """A subclass with its own __torch_dispatch__ and no rule for us gets the ATen of the reference."""
        from torch.testing._internal.two_tensor import TwoTensor

        a, b = operands()
        out = hop.out_dtype(MM, torch.int32, TwoTensor(a, a.clone()), b)
        assert type(out) is TwoTensor and torch.equal(out.a, hop.out_dtype(MM, torch.int32, a, b))

    def test_meta(self):
        a, b = operands()
        out = hop.out_dtype(MM, torch.int32, a.to("meta"), b.to("meta"))
        assert out.is_meta and out.shape == (5, 6) and out.dtype == torch.int32

    def test_sparse(self):
        a, b = torch.randn(3, 4), torch.randn(4, 5)
        torch.testing.assert_close(hop.out_dtype(MM, torch.float32, a.to_sparse(), b), a @ b)

    @parameterized.expand(
        [
            ("expanded", lambda a, b: (a[:1].expand(5, 8), b)),
            ("strided", lambda a, b: (a[:, ::2], b[::2])),
            ("flipped_strides", lambda a, b: (a.t().contiguous().t(), b)),
            ("one_row", lambda a, b: (a[0].as_strided((1, 8), (1, 1)), b)),
            ("one_column", lambda a, b: (a[:, :1], b[:1].t().contiguous().t())),
        ]
    )
    def test_layouts_that_the_kernel_misreads(self, _name, change):
        a, b = change(*operands())
        want = torch.from_numpy(a.numpy().astype("int64") @ b.numpy().astype("int64")).int()
        assert torch.equal(hop.out_dtype(MM, torch.int32, a, b), want)


def vmapped(call: Callable[[], Any]) -> Any:
    return torch.vmap(lambda _: call() or torch.zeros(()))(torch.zeros(1))


class TestOnePlace(unittest.TestCase):
    """hop.dispatch.plan says which calls skip the dispatcher: the same for those that have plans and for others."""

    def setUp(self):
        self.x, self.codes = torch.randn(4, 64), torch.randint(-8, 8, (4, 64), dtype=torch.int8)
        self.q = hop.quantize(hop.presets.INT8_ROW, self.x)

    def asked(self, *given: Any) -> tuple[bool, bool]:
        classes = PLAIN | {hop.QuantizedTensor}
        return plan.key(("op",), given) is not None, plan.is_plain(classes, given, {})

    def test_plain(self):
        for given in ((self.x,), (self.codes, None, 3, "same"), (self.q, self.x), (torch.nn.Parameter(self.x, False),)):
            assert self.asked(*given) == (True, True)

    def test_watched(self):
        leaf, dual_x = self.x.clone().requires_grad_(), self.x.clone()
        with torch.no_grad():
            assert self.asked(leaf) == (True, True)
        parameter = torch.nn.Parameter(self.q)
        of_fakes = hop.quantize(hop.presets.INT8_ROW, FakeTensorMode().from_tensor(self.x))
        for given in ((leaf,), (self.q, leaf), (parameter,), (of_fakes,)):
            assert self.asked(*given) == (False, False), given
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(dual_x, torch.ones_like(dual_x))
            assert self.asked(dual) == (False, False) and self.asked(self.x) == (True, True)

    def test_transformed(self):
        for context in (SeesAten, SeesFunctions, FakeTensorMode, lambda: torch.device("meta")):
            with context():
                assert self.asked(self.codes) == (False, False)
        seen = []
        vmapped(lambda: seen.append(self.asked(self.codes)))
        assert seen == [(False, False)]
        with torch.autocast("cpu", torch.bfloat16):  # which operators switch off, and ask again
            assert plan.key(("op",), (self.x,)) is None

    def test_what_makes_another_plan(self):
        """Each of these changes the key, and equal calls have equal ones."""
        q, x = self.q, self.x
        image, narrow = torch.randn(2, 3, 4, 4), hop.quantize(hop.presets.INT4_32, x)
        given = (
            *((x,), (x.bfloat16(),), (x[:3],), (x, None), (x, 1), (x, "a"), (x, [1, 2]), (x, (1, 3)), (q,), (narrow,)),
            *((image,), (image.to(memory_format=torch.channels_last),), (hop.quantize(hop.presets.INT8_ROW, x[:2]),)),
            *((hop.quantize(hop.presets.INT8_ROW, image),), (hop.pack(hop.quantize(hop.presets.INT8_ROW, x)),)),
        )
        keys = [plan.key(("op",), g) for g in given]
        assert None not in keys and len(set(keys)) == len(keys)
        assert plan.key(("op",), (q.clone(), x.clone())) == plan.key(("op",), (q, x))
        assert plan.key(("op", 1), (x,)) != plan.key(("op", 2), (x,))
        numbers = (0.0, -0.0, 0, False, 1.0, 1, True, float("nan"), "1", None)
        of_numbers = [plan.key((), (x, g)) for n in numbers for g in (n, [n], [2, n])]
        of_names = [plan.named({"alpha": n}) for n in numbers]
        assert len(set(of_numbers)) == len(of_numbers) and len(set(of_names)) == len(of_names)
        assert plan.key((), (x, float("nan"))) == plan.key((), (x, float("nan")))
        assert plan.named({"alpha": x}) is None
        for odd in ([x], [[1]], [torch.float32], object(), torch.float32):
            assert plan.key((), (odd,)) is None, odd

    def test_a_changed_quantizer_or_buffer_makes_another_plan(self):
        before = plan.key((), (self.q,))
        self.q.codes = self.q.codes.clone()
        assert plan.key((), (self.q,)) == before
        self.q.quantizer = hop.Quantizer(hop.formats.INT8, (1, -1), hop.scale_rules.AbsMean())
        assert plan.key((), (self.q,)) not in (before, None)

    def test_levels_forget(self):
        hop.scaled(torch.ops.aten.mm.default, torch.float32, self.q, hop.quantize(hop.presets.INT8_ROW, self.x).t())
        assert plan._plans
        with native.use("off"):
            assert not plan._plans

    def test_plans_of_every_operator(self):
        """A first call, which makes the plan, and a second one, which takes it, give what the dispatcher gives."""
        aten, x, w = torch.ops.aten, self.x, torch.randn(32, 64)
        q, codes, codes_t = hop.quantize(hop.presets.INT8_ROW, w), self.codes, self.codes.t()
        biased = (aten.linear.default, hop.schemes.INT8_DYNAMIC, x, w, torch.randn(32))
        static = hop.presets.INT8_TENSOR_STATIC
        calls = {
            "out_dtype": (
                (aten.mm.default, torch.int32, codes, codes_t),
                (aten.linear.default, torch.float32, codes, codes),
                (aten.add.Tensor, torch.int16, codes, codes),
            ),
            "quantize": ((hop.presets.MXFP8, x), (hop.presets.INT4_32, x), (hop.presets.INT8_ROW, x[None, None])),
            "dequantize": ((q,), (q, torch.bfloat16), (hop.pack(q),)),
            "scaled": ((aten.linear.default, torch.bfloat16, self.q, q), (aten.t.default, torch.float32, q)),
            "quantized": (biased, (aten.mm.default, hop.recipes.FP8_HYBRID, x, w.t()), biased[:4]),
        }
        for name, every in calls.items():
            function = getattr(hop, name)
            module = sys.modules[function.__module__]
            for args in every:
                with mock.patch.object(module, "_key", lambda *_: None):
                    want = function(*args)
                plan.forget()
                first, count = function(*args), len(plan._plans)
                second = function(*args)
                assert count >= 1 and len(plan._plans) == count, name
                for got in (first, second):
                    assert type(got) is type(want) and got.dtype == want.dtype and got.stride() == want.stride(), name
                    assert torch.equal(*(t.dequantize() if name == "quantize" else t for t in (got, want))), name
        out = hop.scaled(aten.linear.default, static, self.q, q, output_scale=torch.tensor(0.1))
        again = hop.scaled(aten.linear.default, static, self.q, q, output_scale=torch.tensor(0.1))
        assert torch.equal(out.codes, again.codes) and again.quantizer == static

    def test_given_scales(self):
        """The second call takes a plan, with numbers and with tensors of any shape that fits."""
        affine, rows = hop.presets.INT8_TENSOR_STATIC_AFFINE, hop.presets.INT8_ROW
        number = {"scale": 0.1, "zero_point": 3}
        tensor = {"scale": torch.tensor(0.1), "zero_point": torch.tensor(3, dtype=torch.int8)}
        wide = {"scale": torch.full((1, 1), 0.1, dtype=torch.float64), "zero_point": torch.tensor(3)}
        calls: Any = [(affine, given) for given in (number, tensor, wide, number | {"scale": 0.2})]
        calls += [(rows, {"scale": torch.rand(len(self.x), 1) + 1}), (rows, {"scale": 0.5})]
        for q, given in calls * 2:
            first, want = hop.quantize(q, self.x, **given), quantize_operator(str(q), self.x, *_filled(given))
            with mock.patch.object(sys.modules[hop.quantize.__module__], "_planned", None):
                got = hop.quantize(q, self.x, **given)
            for name, buffer in want.buffers().items():
                assert torch.equal(getattr(first, name), buffer) and torch.equal(getattr(got, name), buffer)
                getattr(got, name).zero_()  # must not change the plan
        assert wide["scale"].item() == torch.tensor(0.1, dtype=torch.float64) and tensor["zero_point"] == 3
        for wrong in ({"scale": 0.0}, {"scale": torch.tensor(-1.0)}, {"zero_point": 300}, {"zero_point": None}):
            for _ in range(2):
                with pytest.raises(ValueError, match="|".join(wrong)):
                    hop.quantize(affine, self.x, **(number | wrong))

    def test_numbers_as_output_scales(self):
        """The second call takes a plan; other numbers are other calls, and results share no memory."""
        q, affine = hop.quantize(hop.presets.INT8_ROW, torch.randn(32, 64)), hop.presets.INT8_TENSOR_STATIC_AFFINE
        for number, zero in ((0.1, 3), (0.2, 3), (0.2, -3), (0.2, 3.0), (0.1, 3)):
            given = {"output_scale": number, "output_zero_point": zero}
            tensors = {"output_scale": torch.tensor(number), "output_zero_point": torch.tensor(zero)}
            want = hop.scaled(aten.linear.default, affine, self.q, q, **tensors)
            first = hop.scaled(aten.linear.default, affine, self.q, q, **given)
            with mock.patch.object(sys.modules[hop.scaled.__module__], "_planned", None):
                got = hop.scaled(aten.linear.default, affine, self.q, q, **given)
            for name, buffer in want.buffers().items():
                assert torch.equal(getattr(first, name), buffer) and torch.equal(getattr(got, name), buffer)
                assert getattr(first, name).data_ptr() != getattr(got, name).data_ptr()
                getattr(got, name).zero_()  # must not change the plan
        for wrong in ({"output_scale": 0.0}, {"output_scale": math.inf}, {"output_zero_point": 300}):
            for _ in range(2):
                with pytest.raises(ValueError, match="|".join(wrong)):
                    hop.scaled(
                        aten.linear.default, affine, self.q, q, **{"output_scale": 0.1, "output_zero_point": 0, **wrong}
                    )

    def test_equal_numbers_that_are_not_the_same(self):
        """Calls with 0.0 and -0.0, or 1, 1.0 and True, give or raise what each does alone, in any order."""
        x = hop.quantize(hop.presets.INT8_ROW, torch.tensor([[-1.0, 0.0, 2.0, -3.0]]))
        zero = hop.quantize(hop.presets.INT8_TENSOR, torch.zeros(1, 4))
        floats, image = torch.tensor([[-1.0, 0.0, 2.0]]), torch.tensor([[[[-3, 1, 2]]]], dtype=torch.int8)
        pictures = [hop.quantize(hop.presets.INT8_TENSOR, torch.randn(1, 1, 3, 3)) for _ in range(2)]
        calls = {
            "mul": lambda v: hop.scaled(aten.mul.Scalar, torch.float32, x, v),
            "add": lambda v: hop.scaled(aten.add.Scalar, torch.float32, zero, v),
            "leaky_relu": lambda v: hop.scaled(aten.leaky_relu.default, torch.float32, floats, v),
            "clamp": lambda v: hop.scaled(aten.clamp.default, torch.float32, x, v),
            "alpha": lambda v: hop.scaled(aten.add.Tensor, torch.float32, x, zero, alpha=v),
            "conv2d": lambda v: hop.scaled(aten.conv2d.default, torch.float32, *pictures, None, [v, v]),
            "groups": lambda v: hop.scaled(aten.conv2d.default, torch.float32, *pictures, None, [1], [0], [1], v),
            "out_dtype": lambda v: hop.out_dtype(aten.mul.Tensor, torch.float32, floats, v),
            "conv of integers": lambda v: hop.out_dtype(aten.conv2d.default, torch.int32, image, image, None, [v, v]),
        }

        def outcome(call: Any, value: Any) -> Any:
            try:
                result = call(value)
            except (TypeError, ValueError, RuntimeError) as error:
                return str(error)
            return result.dtype, result.contiguous().view(torch.uint8).tolist()  # the bits, for the sign of 0

        pairs = ((0.0, -0.0), (1, True), (1.0, 1), (1.0, True), (0, False), (0, 0.0), (0.0, False), (0, -0.0))
        for name, call in calls.items():
            alone = {}
            for value in {repr(v): v for pair in pairs for v in pair}.values():
                plan.forget()
                alone[repr(value)] = outcome(call, value)
            for a, b in (*pairs, *(pair[::-1] for pair in pairs)):
                plan.forget()
                outcome(call, a)
                assert outcome(call, b) == alone[repr(b)], (name, a, b)
        for signed in (-0.0, 0.0):  # the values alone differ in the sign of 0: equal bits would prove nothing
            assert math.copysign(1, calls["mul"](signed)[0, 2].item()) == math.copysign(1, signed)

    def test_booleans_as_sizes_of_a_convolution(self):
        """Kernels are told sizes in words, in which True would be no number."""
        for first, second in ((True, 1), (1, True)):
            x, w = (hop.quantize(hop.presets.INT8_TENSOR, torch.randn(1, 1, 3, 3)) for _ in range(2))
            results = [
                hop.scaled(aten.conv2d.default, torch.float32, x, w, None, [v, v], [0, 0], [v, v], v)
                for v in (first, second)
            ]
            assert torch.equal(*results)

    def test_nan_makes_one_plan(self):
        counts = []
        for _ in range(3):
            hop.scaled(aten.mul.Scalar, torch.float32, self.q, float("nan"))
            hop.scaled(aten.add.Tensor, torch.float32, self.q, self.q, alpha=float("nan"))
            counts.append(len(plan._plans))
        assert counts[0] == counts[2]

    def test_what_has_no_hash_is_refused_by_name(self):
        linear = torch.ops.aten.linear.default
        for call in (
            lambda: hop.dequantize(self.q, ["float32"]),
            lambda: hop.dequantize(self.q, 0),
            lambda: hop.quantized(linear, hop.schemes.INT8_DYNAMIC, self.x, self.x, dtype=["float32"]),
            lambda: hop.scaled(linear, ["float32"], self.q, self.q),
            lambda: hop.out_dtype(linear, ["float32"], self.x, self.x),
        ):
            with self.assertRaisesRegex(TypeError, "(dtype|output).*must be"):
                call()
        for call in (
            lambda: hop.scaled([linear], torch.float32, self.q, self.q),
            lambda: hop.out_dtype([linear], torch.float32, self.x, self.x),
            lambda: hop.quantized([linear], hop.schemes.INT8_DYNAMIC, self.x, self.x),
        ):
            with self.assertRaisesRegex(ValueError, "op must be"):
                call()
