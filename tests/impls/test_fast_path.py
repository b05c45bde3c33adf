"""The way around the dispatcher gives what the way through it gives, and is not taken where somebody watches."""

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hop
from hop.compat import eager
from hop.impls.out_dtype import out_dtype_operator
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

    __torch_dispatch__ = Sees.see


class SeesFunctions(Sees, TorchFunctionMode):
    __torch_function__ = Sees.see


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

    def test_dispatch_mode(self):
        a, b = operands()
        want = hop.out_dtype(MM, torch.int32, a, b)
        with SeesAten() as mode:
            self.check_full(lambda: hop.out_dtype(MM, torch.int32, a, b), want)
        assert aten.mm.default in mode.seen

    def test_function_mode(self):
        a, b = operands()
        want = hop.out_dtype(MM, torch.int32, a, b)
        with SeesFunctions() as mode:
            self.check_full(lambda: hop.out_dtype(MM, torch.int32, a, b), want)
        assert out_dtype_operator in mode.seen

    def test_default_device(self):
        a, b = operands()
        want = hop.out_dtype(MM, torch.int32, a, b)
        with torch.device("cpu"):
            self.check_full(lambda: hop.out_dtype(MM, torch.int32, a, b), want)

    def test_flop_counter(self):
        a, b = operands()
        want = hop.out_dtype(MM, torch.int32, a, b)
        with FlopCounterMode(display=False) as counter:
            self.check_full(lambda: hop.out_dtype(MM, torch.int32, a, b), want)
        assert counter.get_total_flops() == 2 * 2 * 5 * 8 * 6

    def test_fake_mode(self):
        a, b = operands()
        with FakeTensorMode() as mode:
            out = hop.out_dtype(MM, torch.int32, mode.from_tensor(a), mode.from_tensor(b))
        assert type(out).__name__ == "FakeTensor"

    def test_fake_tensors_outside_their_mode(self):
        a, b = operands()
        mode = FakeTensorMode()
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
        a, b = operands()
        graph = torch.jit.trace(lambda a, b: hop.out_dtype(MM, torch.int32, a, b), (a, b), check_trace=False)
        assert "aten::mm" in str(graph.graph)
        c, d = operands(5, 8, 6)
        assert torch.equal(graph(c, d), hop.out_dtype(MM, torch.int32, c, d))

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
