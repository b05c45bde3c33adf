"""PyTorch's own out_dtype: its nodes and ours, exchanged; and its calls, run by ours."""

import copy
import itertools
import random
import threading
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop.export import from_torch, to_torch
from hop.impls.out_dtype import out_dtype_operator as ours
from tests.support import oracles
from tests.support.files import reloaded

aten = torch.ops.aten
stock = torch.ops.higher_order.out_dtype
STOCK_CLASS = type(stock)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.bool, torch.int64, torch.uint16, torch.float8_e4m3fn)
CONV = (None, [2, 1], [1, 0], [1, 1])
# The shapes of the operands, the rest of the arguments, and what they mean in numpy.
KINDS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], tuple[Any, ...], Callable[..., Any]]] = {
    "mm": (aten.mm.default, ((3, 40), (40, 4)), (), oracles.mm),
    "linear": (aten.linear.default, ((2, 3, 40), (4, 40)), (), oracles.linear),
    "linear_bias": (aten.linear.default, ((3, 40), (4, 40), (4,)), (), oracles.linear),
    "conv2d": (
        aten.conv2d.default,
        ((2, 4, 5, 6), (6, 2, 3, 3)),
        (*CONV, 2),
        lambda x, w: oracles.convolution(x, w, None, (2, 1), (1, 0), (1, 1), False, (0, 0), 2),
    ),
    "conv2d_dilated": (
        aten.conv2d.default,
        ((2, 3, 6, 6), (4, 3, 2, 2)),
        (None, [1, 1], [0, 0], [2, 2]),
        lambda x, w: oracles.convolution(x, w, None, (1, 1), (0, 0), (2, 2), False, (0, 0), 1),
    ),
    "convolution": (
        aten.convolution.default,
        ((2, 3, 5, 6), (4, 3, 3, 3)),
        (*CONV, False, [0, 0], 1),
        lambda x, w: oracles.convolution(x, w, None, (2, 1), (1, 0), (1, 1), False, (0, 0), 1),
    ),
    "convolution_1d": (
        aten.convolution.default,
        ((2, 3, 7), (4, 3, 3)),
        (None, [1], [1], [1], False, [0], 1),
        lambda x, w: oracles.convolution(x, w, None, (1,), (1,), (1,), False, (0,), 1),
    ),
    "convolution_transposed": (
        aten.convolution.default,
        ((2, 3, 5, 6), (3, 4, 3, 3)),
        (*CONV, True, [0, 0], 1),
        lambda x, w: oracles.convolution(x, w, None, (2, 1), (1, 0), (1, 1), True, (0, 0), 1),
    ),
    "mul": (aten.mul.Tensor, ((3, 5), (5,)), (), np.multiply),
    "mul_zero_dim": (aten.mul.Tensor, ((3, 5), ()), (), np.multiply),
    "div": (aten.div.Tensor, ((3, 5), (5,)), (), oracles.div),
    "mul_scalar": (aten.mul.Scalar, ((3, 5),), (-3,), lambda x: x * -3),
    "mul_fraction": (aten.mul.Scalar, ((3, 5),), (0.25,), lambda x: np.trunc(x * 0.25).astype(np.int64)),
    "div_scalar": (aten.div.Scalar, ((3, 5),), (7,), lambda x: oracles.div(x, np.int64(7))),
}
MISSING = {"conv2d_dilated", "convolution_transposed"}  # ATen has none for integers of 32 bits
assert {op for op, *_ in KINDS.values()} == set(hop.compat.stock.stock_operators)


def tensor(dtype: torch.dtype, shape: tuple[int, ...], *, zeros: bool = True) -> Tensor:
    """All values of an 8-bit integer, as `dtype` has them."""
    low = 0 if dtype in (torch.uint8, torch.uint16) else -128
    x = torch.randint(low, low + 256, shape)
    return (x if zeros else torch.where(x == 0, 1, x)).to(dtype)


class Calls(torch.nn.Module):
    """Calls of one kind in many dtypes: (operands' dtypes, output dtype) each, by `operator`."""

    def __init__(self, kind: str, formats: list[tuple[tuple[torch.dtype, ...], torch.dtype]], call: Any) -> None:
        super().__init__()
        self.op, self.shapes, self.rest, self.oracle = KINDS[kind]
        self.formats, self.call = formats, call
        names = sorted({(i, d) for dtypes, _ in formats for i, d in enumerate(dtypes)}, key=str)
        self.places = {name: i for i, name in enumerate(names)}
        self.inputs = tuple(
            tensor(d, self.shapes[i], zeros=self.op not in (aten.div.Tensor, aten.div.Scalar) or i == 0)
            for i, d in names
        )

    def arguments(self, dtypes: tuple[torch.dtype, ...], inputs: Any) -> list[Any]:
        return [*(inputs[self.places[i, d]] for i, d in enumerate(dtypes)), *self.rest]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [self.call(self.op, out, *self.arguments(dtypes, inputs)) for dtypes, out in self.formats]

    def runnable(self) -> "Calls":
        """Without the calls that raise."""

        def runs(dtypes: tuple[torch.dtype, ...], out: torch.dtype) -> bool:
            try:
                self.call(self.op, out, *self.arguments(dtypes, self.inputs))
            except (RuntimeError, NotImplementedError, ValueError):
                return False
            return True

        self.formats = [f for f in self.formats if runs(*f)]
        return self

    def exported(self) -> ExportedProgram:
        return torch.export.export(self, self.inputs)


def formats(
    kind: str, dtypes: tuple[torch.dtype, ...], some: int = 40
) -> list[tuple[tuple[torch.dtype, ...], torch.dtype]]:
    """Mixtures of dtypes of operands and output: all of them if they are few, else some."""
    count = min(2, len(KINDS[kind][1]))
    extra = (torch.int32,) * (len(KINDS[kind][1]) - count)
    every = [((*given, *extra), out) for *given, out in itertools.product(dtypes, repeat=count + 1)]
    return random.Random(kind).sample(every, min(some, len(every)))


def graphs(module: GraphModule) -> Iterator[torch.fx.Graph]:
    yield module.graph
    for child in module.children():
        if isinstance(child, GraphModule):
            yield from graphs(child)


def count(program: ExportedProgram, target: Any) -> int:
    found = (g.find_nodes(op="call_function", target=target) for g in graphs(program.graph_module))
    return sum(map(len, found))


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(a.double(), b.double()) or torch.equal(
            a.double().nan_to_num(nan=12345), b.double().nan_to_num(nan=12345)
        )


class TestExchange(unittest.TestCase):
    @parameterized.expand([(k,) for k in ("mm", "div", "mul_scalar")])
    @pytest.mark.quick(3)
    def test_integers_quick(self, kind):
        self._integers(kind, (torch.int8, torch.int32))

    @parameterized.expand([(k,) for k in KINDS])
    @pytest.mark.full
    def test_integers(self, kind):
        self._integers(kind, INTEGERS)

    def _integers(self, kind: str, dtypes: tuple[torch.dtype, ...]) -> None:
        """What numpy says in exact integers, before and after, there and back, and from a file."""
        calls = Calls(kind, formats(kind, dtypes), stock)
        if kind in MISSING:
            assert not calls.runnable().formats
            return
        program, inputs = calls.exported(), calls.inputs
        before = program.module()(*inputs)
        for (given, out), got in zip(calls.formats, before, strict=True):
            operands = [x.numpy().astype(np.int64) for x in calls.arguments(given, inputs)[: len(given)]]
            want = torch.from_numpy(np.asarray(calls.oracle(*operands)).astype(np.int64)).to(out)
            assert got.dtype == out and torch.equal(got, want), (given, out)
        total = len(calls.formats)
        mine = from_torch(program)
        assert (count(mine, stock), count(mine, ours)) == (0, total)
        back = to_torch(mine)
        assert (count(back, stock), count(back, ours)) == (total, 0)
        assert (count(program, stock), count(mine, ours)) == (total, total)  # what was given stays
        for changed in (mine, back, reloaded(mine), reloaded(back), from_torch(reloaded(program))):
            same(changed.module()(*inputs), before)

    @parameterized.expand([(k,) for k in KINDS])
    @pytest.mark.full
    def test_any_dtype(self, kind):
        """Whatever is exchanged gives equal results; whatever would not is named."""
        every = (*INTEGERS, *FLOATS, *OTHERS)
        for call, there, back in ((stock, from_torch, to_torch), (hop.out_dtype, to_torch, from_torch)):
            calls = Calls(kind, formats(kind, every), call).runnable()
            program = calls.exported()
            with torch.no_grad():
                before = program.module()(*calls.inputs)
                changed = there(program, strict=False)
                same(changed.module()(*calls.inputs), before)
                same(back(changed, strict=False).module()(*calls.inputs), before)
            target = ours if call is hop.out_dtype else stock
            left = [n for n in changed.graph.nodes if n.target is target]
            if not left:
                there(program)
                continue
            with self.assertRaises(ValueError) as raised:
                there(program)
            said = str(raised.exception).splitlines()[1:]
            assert [line.split(" ")[0] for line in said] == [n.name for n in left]
            # The dtypes that PyTorch's operators are used with are all exchanged, where ATen can run them.
            for node in left:
                given = {x.meta["val"].dtype for x in node.all_input_nodes} | {node.args[1]}
                assert given & {*OTHERS} - {torch.int64} or (kind in MISSING and call is hop.out_dtype), (
                    node.format_node()
                )

    def test_left_where_meaning_differs(self):
        """PyTorch multiplies float8 by float32 in float8, so that 1.0625 is rounded to 1: such a node stays."""
        x, y = torch.tensor([[1.0]]).to(torch.float8_e4m3fn), torch.tensor([[1.0625]])

        class Model(torch.nn.Module):
            def forward(self, x, y):
                return stock(aten.mm.default, torch.float32, x, y)

        program = torch.export.export(Model(), (x, y))
        with self.assertRaisesRegex(ValueError, r"out_dtype \(aten.mm.default to torch.float32\).*float8_e4m3fn"):
            from_torch(program)
        kept = from_torch(program, strict=False)
        assert count(kept, stock) == 1 and kept.module()(x, y).item() == 1.0
        assert hop.out_dtype(aten.mm.default, torch.float32, x, y).item() == 1.0625

    def test_to_torch_says_what_it_cannot_express(self):
        class Model(torch.nn.Module):
            def forward(self, x, w):
                bmm = hop.out_dtype(aten.bmm.default, torch.int32, x[None], w[None])
                mm = hop.out_dtype(aten.mm.default, torch.int32, x, w)
                return bmm, mm, hop.out_dtype(aten.mm.default, torch.bool, x, w)

        x, w = torch.full((2, 16), 16, dtype=torch.int8), torch.ones(16, 2, dtype=torch.int8)
        program = torch.export.export(Model(), (x, w))
        with self.assertRaises(ValueError) as raised:
            to_torch(program)
        words = str(raised.exception)
        assert "strict=False" in words and "aten.bmm.default to torch.int32" in words and "aten.div.Scalar" in words
        assert "exact sums" in words and len(words.splitlines()) == 3
        partly = to_torch(program, strict=False)
        assert (count(partly, stock), count(partly, ours)) == (1, 2)
        same(partly.module()(x, w), program.module()(x, w))
        assert bool(program.module()(x, w)[2].all())  # 256, which is 0 in int8

    def test_divisions_under_another_default_dtype(self):
        class Model(torch.nn.Module):
            def forward(self, x):
                return hop.out_dtype(aten.div.Scalar, torch.int32, x, 7)

        program = torch.export.export(Model(), (torch.ones(2, 3, dtype=torch.int32),))
        torch.set_default_dtype(torch.float64)
        try:
            with self.assertRaisesRegex(ValueError, "default dtype, now torch.float64"):
                to_torch(program)
        finally:
            torch.set_default_dtype(torch.float32)
        assert count(to_torch(program), stock) == 1

    @parameterized.expand([(from_torch,), (to_torch,)])
    def test_takes_exported_programs(self, exchange):
        with self.assertRaisesRegex(TypeError, f"{exchange.__name__}: program .* got Linear"):
            exchange(torch.nn.Linear(2, 2))

    @pytest.mark.full
    def test_dynamic_shapes_and_symbolic_numbers(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("weight", tensor(torch.int8, (4, 8)))
                self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

            def forward(self, x):
                self.calls.add_(1)
                y = stock(aten.linear.default, torch.int32, x, self.weight)
                return stock(aten.mul.Scalar, torch.int32, y, x.shape[0])

        program = torch.export.export(
            Model(), (tensor(torch.int8, (3, 8)),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},)
        )
        x = tensor(torch.int8, (17, 8))
        want = program.module()(x)
        weight = program.state_dict["weight"].numpy().astype(np.int64)
        assert np.array_equal(want.numpy(), 17 * (x.numpy().astype(np.int64) @ weight.T))
        mine = from_torch(program)
        for changed in (mine, to_torch(mine), reloaded(mine), mine.run_decompositions(hop.decompositions())):
            module = changed.module()
            calls = module.calls.item()
            assert torch.equal(module(x), want)
            assert module.calls.item() == calls + 1
            with self.assertRaises(AssertionError):
                module(tensor(torch.int8, (65, 8)))
        assert [n.name for n in mine.graph.nodes] == [n.name for n in program.graph.nodes]
        assert mine.state_dict["weight"] is program.state_dict["weight"]

    @parameterized.expand([(False,), (True,)])
    @pytest.mark.full
    def test_nested_graphs(self, strict):
        class Model(torch.nn.Module):
            def forward(self, x, w):
                def product(x, w):
                    return stock(aten.mm.default, torch.int32, x, w)

                def twice(x, w):
                    return torch.cond(
                        x.sum() > 0, lambda x, w: product(x, w) * 2, lambda x, w: product(x, w) * 4, (x, w)
                    )

                with torch.no_grad():
                    y = product(x, w)
                return y + torch.cond(w.sum() > 0, product, twice, (x, w))

        x, w = tensor(torch.int8, (3, 8)), tensor(torch.int8, (8, 4))
        program = torch.export.export(Model(), (x, w), strict=strict)
        signs = [(a * x.abs().clamp(max=127), b * w.abs().clamp(max=127)) for a in (1, -1) for b in (1, -1)]
        assert count(program, stock) == 4
        mine = from_torch(program)
        assert (count(mine, stock), count(mine, ours), count(program, stock)) == (0, 4, 4)
        back = to_torch(mine)
        assert (count(back, stock), count(back, ours)) == (4, 0)
        for changed in (mine, back, reloaded(mine), from_torch(reloaded(program))):
            for a, b in signs:
                exact = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)
                factor = 1 + (1 if b.sum() > 0 else 2 if a.sum() > 0 else 4)
                assert np.array_equal(changed.module()(a, b).numpy(), factor * exact)

    def test_gradient_after_the_exchange(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(4, 8))

            def forward(self, x):
                return stock(aten.linear.default, torch.float32, x, self.weight)

        model, x = Model(), torch.randn(3, 8)
        program = torch.export.export(model, (x,))
        with self.assertRaisesRegex(RuntimeError, "Autograd not implemented"):
            program.module()(x).sum().backward()
        module = from_torch(program).module()
        module(x).square().sum().backward()
        want = 2 * (x.double() @ model.weight.detach().double().T).T @ x.double()
        torch.testing.assert_close(module.weight.grad.double(), want, rtol=1e-5, atol=1e-5)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.beside = torch.nn.Linear(32, 48), torch.nn.Linear(48, 10), torch.nn.Linear(32, 10)

    def forward(self, input):
        return self.last(self.first(input)) + self.beside(input)


class TestReferenceRepresentation(unittest.TestCase):
    """Programs that PT2E writes in integers, with PyTorch's operator."""

    @pytest.mark.full
    def test_runs_with_equal_integers(self):
        quantizers = pytest.importorskip(
            "executorch.backends.xnnpack.quantizer.xnnpack_quantizer", reason="needs executorch"
        )
        pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="needs torchao")
        model, x = Network().eval().requires_grad_(False), torch.randn(16, 32)
        quantizer = quantizers.XNNPACKQuantizer()
        quantizer.set_global(quantizers.get_symmetric_quantization_config(is_per_channel=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torchao uses of torch
            prepared = pt2e.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
            prepared(x)
            written = pt2e.convert_pt2e(prepared, use_reference_representation=True)
        program = torch.export.export(written, (x,))
        products = [n.args[0] for n in program.graph.find_nodes(op="call_function", target=stock)]
        assert products.count(aten.linear.default) == 3 and {aten.mul.Tensor, aten.div.Tensor} < set(products)
        mine = from_torch(program)
        assert (count(mine, stock), count(mine, ours)) == (0, len(products))
        chosen = [
            hop.explain(op, out, *(torch.zeros_like(a.meta["val"], device="cpu") for a in args if a is not None))
            for op, out, *args in (n.args for n in mine.graph.nodes if n.target is ours)
            if op is aten.linear.default
        ]
        assert all(text == "integer product: chosen" for text in chosen), chosen
        for inputs in (x, torch.randn(16, 32) * 3):
            values, wants = Integers(mine), Integers(program)
            got, want = values.run(inputs), wants.run(inputs)
            assert torch.equal(got[0], want[0]) and float(want[0].abs().max()) > 0
            assert len(wants.seen) == len(products) and all(
                torch.equal(values.seen[name], y) for name, y in wants.seen.items()
            )
        assert torch.equal(to_torch(mine).module()(x), program.module()(x))


class Integers(torch.fx.Interpreter):
    """Runs a program and keeps what its out_dtype nodes gave."""

    def __init__(self, program: ExportedProgram) -> None:
        module = program.module()
        super().__init__(module)
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in (stock, ours):
            self.seen[n.name] = result
        return result


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.higher_order.out_dtype(aten.mm.default, torch.float32, x, w)


FLOAT_CALLS = {
    "mm": (aten.mm.default, ((3, 5), (5, 4)), ()),
    "linear": (aten.linear.default, ((3, 5), (4, 5), (4,)), ()),
    "conv2d": (aten.conv2d.default, ((2, 3, 6, 6), (4, 3, 3, 3), (4,)), ([2, 1], [1, 1], [2, 1])),
    "convolution": (
        aten.convolution.default,
        ((2, 3, 6, 6), (3, 4, 3, 3), (4,)),
        ([2, 1], [1, 1], [1, 1], True, [0, 0], 1),
    ),
    "mul": (aten.mul.Tensor, ((3, 5), (5,)), ()),
    "mul_scalar": (aten.mul.Scalar, ((3, 5),), (-2.5,)),
    "div": (aten.div.Tensor, ((3, 5), (5,)), ()),
    "div_scalar": (aten.div.Scalar, ((3, 5),), (7,)),
}
assert {op for op, *_ in FLOAT_CALLS.values()} == set(hop.compat.stock.stock_operators)


class TestPatch(unittest.TestCase):
    def setUp(self):
        self.before = (type(stock), dict(vars(stock)), dict(stock.py_kernels), dict(stock.python_key_table))

    def tearDown(self):
        after = (type(stock), dict(vars(stock)), dict(stock.py_kernels), dict(stock.python_key_table))
        assert after[0] is STOCK_CLASS and torch.ops.higher_order.out_dtype is stock
        for was, now in zip(self.before[2:], after[2:], strict=True):
            assert was.items() <= now.items()  # of its rules, nothing is replaced
        assert self.before[1].keys() == after[1].keys()

    @parameterized.expand([(k,) for k in FLOAT_CALLS])
    def test_gradient(self, kind):
        """That of hop.out_dtype, bit for bit, and near that of float64."""
        op, shapes, rest = FLOAT_CALLS[kind]
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            tensors = [torch.randn(s).abs().add(0.5).to(dtype) for s in shapes]

            def gradients(call, dtype, out):
                leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]  # noqa: B023
                y = call(op, out, *leaves, *rest)
                y.square().sum().backward()
                return [y.detach(), *(x.grad for x in leaves)]

            with hop.patch_torch():
                got = gradients(stock, dtype, torch.float32)
            for a, b in zip(got, gradients(hop.out_dtype, dtype, torch.float32), strict=True):
                assert torch.equal(a, b)
            exact = gradients(lambda op, out, *args: op(*args), torch.float64, torch.float64)
            for a, b in zip(got, exact, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound * float(b.abs().max()))
            with self.assertRaisesRegex(RuntimeError, "Autograd not implemented"):
                gradients(stock, dtype, torch.float32)

    def test_transforms(self):
        """What PyTorch's operator has no rules for: vmap and torch.func."""
        x, w = torch.randn(6, 3, 5), torch.randn(5, 4)
        with hop.patch_torch():
            batched = torch.func.vmap(product, in_dims=(0, None))(x, w)
            tangent = torch.func.jvp(lambda w: product(x[0], w), (w,), (torch.ones_like(w),))[1]
        torch.testing.assert_close(batched, x @ w)
        torch.testing.assert_close(tangent, x[0] @ torch.ones_like(w))

    @parameterized.expand([(k,) for k in KINDS if k not in MISSING])
    def test_integers(self, kind):
        calls = Calls(kind, formats(kind, (torch.int8, torch.uint8, torch.int32)), stock)
        want = calls(*calls.inputs)
        with hop.patch_torch():
            same(calls(*calls.inputs), want)

    def test_what_is_traced_inside_is_ours(self):
        x, w = torch.randn(3, 5), torch.randn(5, 4)
        with hop.patch_torch():
            graph = make_fx(product)(x, w).graph
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [ours]
        assert any(n.target is stock for n in make_fx(product)(x, w).graph.nodes)

    def test_calls_that_mean_something_else_stay_theirs(self):
        x, y = torch.tensor([[1.0]]).to(torch.float8_e4m3fn), torch.tensor([[1.0625]])
        many, ones = torch.full((1, 16), 16, dtype=torch.int8), torch.ones(16, 1, dtype=torch.int8)
        for call in (
            lambda: stock(aten.mm.default, torch.float32, x, y),  # 1.0625 in float8 is 1
            lambda: stock(aten.mm.default, torch.bool, many, ones),  # 256 in int8 is 0
        ):
            want = call()
            with hop.patch_torch():
                assert torch.equal(call(), want)
        with hop.patch_torch():
            hop.compat.stock._one_of.cache_clear()
            graph = make_fx(lambda x, y: stock(aten.mm.default, torch.bool, x, y))(many, ones).graph
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [stock]

    @parameterized.expand(
        [
            ("operator", lambda: stock(aten.add.Tensor, torch.int32, torch.ones(2), 1)),
            ("packet", lambda: stock(aten.mm, torch.int32, torch.ones(2, 2), torch.ones(2, 2))),
            ("no_operator", lambda: stock([], torch.int32)),
        ]
    )
    def test_refuses_what_they_refuse(self, _name, call):
        with self.assertRaises(ValueError) as want:
            call()
        with hop.patch_torch(), self.assertRaises(ValueError) as got:
            call()
        assert str(got.exception) == str(want.exception)

    def test_leaves_on_exceptions_and_nests(self):
        inside = []
        with self.assertRaisesRegex(KeyError, "on purpose"), hop.patch_torch():
            with hop.patch_torch():
                inside.append(type(stock))
            inside.append(type(stock))
            raise KeyError("on purpose")
        assert inside[0] is inside[1] and inside[0] is not STOCK_CLASS and type(stock) is STOCK_CLASS

        @hop.patch_torch()
        def decorated():
            return type(stock)

        assert decorated() is decorated() is inside[0]
        assert isinstance(stock, STOCK_CLASS)
        assert copy.deepcopy(stock) is stock

    def test_threads(self):
        """It holds in all of them while one is inside, whoever leaves first."""
        entered, leave, errors = threading.Barrier(5), [threading.Event() for _ in range(4)], []
        x = torch.randn(3, 5)

        def work(event):
            try:
                with hop.patch_torch():
                    entered.wait(10)
                    event.wait(10)
                    w = torch.randn(5, 4, requires_grad=True)
                    product(x, w).sum().backward()
                    torch.testing.assert_close(w.grad, x.sum(0)[:, None].expand(5, 4))
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(e,)) for e in leave]
        for t in threads:
            t.start()
        entered.wait(10)
        for t, event in zip(threads, leave, strict=True):
            assert type(stock) is not STOCK_CLASS
            event.set()
            t.join(10)
        assert not errors and type(stock) is STOCK_CLASS

    def test_compiled_functions_are_guarded(self):
        """A program is traced once inside and once outside; each is taken again where it belongs."""
        x, w, counter = torch.randn(3, 5), torch.randn(5, 4), CompileCounter()
        holder, exported = Holder(), torch.export.export(Holder(), (x, w)).module()
        captured = stock
        for function in (product, holder, exported, lambda x, w: captured(aten.mm.default, torch.float32, x, w)):
            torch._dynamo.reset()
            counter.clear()
            compiled, counts = torch.compile(function, backend=counter), []
            for _ in range(2):
                for context in (hop.patch_torch, torch.enable_grad, hop.patch_torch):
                    with context():
                        torch.testing.assert_close(compiled(x, w), x @ w)
                        counts.append(counter.frame_count)
            assert counts == [1, 2, 2, 2, 2, 2], counts

    @parameterized.expand([("aot_eager",), ("inductor",)])
    @pytest.mark.full
    @pytest.mark.compiler
    def test_compiled_gradient(self, backend):
        """Inside a program has a gradient, later too; outside it loses it, as it does without hop."""
        torch._dynamo.utils.counters.clear()
        x = torch.randn(3, 5)
        w = torch.randn(5, 4)
        compiled = torch.compile(product, backend=backend, fullgraph=True)

        def gradient(patched: bool, leaf: Tensor) -> Tensor | None:
            leaf.requires_grad_()
            if patched:
                with hop.patch_torch():
                    y = compiled(leaf, w)
            else:
                y = compiled(leaf, w)
            torch.testing.assert_close(y.detach(), x @ w)
            y.square().sum().backward()
            return leaf.grad

        want = 2 * (x @ w) @ w.T
        assert gradient(False, x.clone()) is None
        torch.testing.assert_close(gradient(True, x.clone()), want)
        assert gradient(False, x.clone()) is None
        torch.testing.assert_close(gradient(True, x.clone()), want)
        caches = torch._dynamo.utils.counters["aot_autograd"]
        if backend == "inductor":  # the cache on disk, which knows nothing of the patch, is asked for none of them
            assert caches["autograd_cache_bypass"] == 2 and not caches["autograd_cache_hit"], caches
        assert not caches["autograd_cache_saved"]
        with hop.patch_torch():  # dtypes that PyTorch's own would promote
            codes = tensor(torch.int8, (5, 4))
            leaf = x.clone().requires_grad_()
            compiled(leaf, codes).sum().backward()
        torch.testing.assert_close(leaf.grad, codes.float().sum(1).expand(3, 5))

    def test_entered_in_a_compiled_function(self):
        def function(x, w):
            with hop.patch_torch():
                return product(x, w)

        x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4)
        y = torch.compile(function, backend="aot_eager")(x, w)
        y.sum().backward()
        torch.testing.assert_close(x.grad, w.sum(1).expand(3, 5))

    def test_loaded_programs(self):
        x, w = torch.randn(3, 8), torch.randn(8, 4, requires_grad=True)
        program = reloaded(torch.export.export(Holder(), (x, w)))
        with hop.patch_torch():
            program.module()(x, w).sum().backward()
        torch.testing.assert_close(w.grad, x.sum(0)[:, None].expand(8, 4))


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.op = stock

    def forward(self, x, w):
        return self.op(aten.mm.default, torch.float32, x, w)
