"""PyTorch's higher-order operators of control flow, with quantized tensors: every operator on every route, with the
bits of the same function without the operator."""

import itertools
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import hop
from hop.compat.versions import LACKS
from hop.tensor import control_flow
from tests.support.files import reloaded

aten = torch.ops.aten
ROWS = hop.presets.INT8_ROW
Function = Callable[[Tensor, Any], Tensor]


def linear(x: Tensor, w: Any) -> Tensor:
    """Integers, multiplied as integers: the same bits on every route."""
    return hop.scaled(aten.linear.default, torch.float32, hop.quantize(ROWS, x), w)


def conditional(x: Tensor, w: Any) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: linear(x, w), lambda x: linear(x, w) * 2, (x,))


def conditional_passed(x: Tensor, w: Any) -> Tensor:
    return torch.cond(x.sum() > 0, linear, lambda x, w: linear(x, w) * 2, (x, w))


def conditional_plainly(x: Tensor, w: Any) -> Tensor:
    return linear(x, w) if x.sum() > 0 else linear(x, w) * 2


class Layer(torch.nn.Module):
    """A region that captures its weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return linear(x, self.weight).relu()


def region(x: Tensor, w: Any) -> Tensor:
    layers = [Layer(w), Layer(w)]
    return layers[1](layers[0](x))


@torch.compiler.nested_compile_region
def layer(x: Tensor, w: Any) -> Tensor:
    return linear(x, w).relu()


def region_passed(x: Tensor, w: Any) -> Tensor:
    return layer(layer(x, w), w)


def region_plainly(x: Tensor, w: Any) -> Tensor:
    return linear(linear(x, w).relu(), w).relu()


def mapped(x: Tensor, w: Any) -> Tensor:
    return map_over(lambda row: linear(row, w).relu(), x)


def mapped_passed(x: Tensor, w: Any) -> Tensor:
    return map_over(lambda row, w: linear(row, w).relu(), x, w)


def mapped_plainly(x: Tensor, w: Any) -> Tensor:
    return torch.stack([linear(row, w).relu() for row in x])


def scanned(x: Tensor, w: Any) -> Tensor:
    carry, rows = scan(lambda c, row: (c + linear(row, w), c * 2), torch.zeros_like(x[0]), x)
    return torch.cat([carry[None], rows])


def scanned_passed(x: Tensor, w: Any) -> Tensor:
    (carry, _), rows = scan(
        lambda c, row: ((c[0] + linear(row, c[1]), c[1].clone()), c[0] * 2), (torch.zeros_like(x[0]), w), x
    )
    return torch.cat([carry[None], rows])


def scanned_plainly(x: Tensor, w: Any) -> Tensor:
    carry, rows = torch.zeros_like(x[0]), []
    for row in x:
        rows.append(carry * 2)
        carry = carry + linear(row, w)
    return torch.stack([carry, *rows])


def looped(x: Tensor, w: Any) -> Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, linear(x, w)), (torch.tensor(0), x))[1]


def looped_passed(x: Tensor, w: Any) -> Tensor:
    start = (torch.tensor(0), x, w)
    return while_loop(lambda i, x, w: i < 3, lambda i, x, w: (i + 1, linear(x, w), w.clone()), start)[1]


def looped_plainly(x: Tensor, w: Any) -> Tensor:
    for _ in range(3):
        x = linear(x, w)
    return x


def combined(x: Tensor, w: Any) -> Tensor:
    """Sums of integers, which any order gives."""

    def combine(a: Tensor, b: Tensor) -> Tensor:
        return a + b + linear(torch.ones(1, 64), w)[0].round()

    return associative_scan(combine, x.round(), 0, combine_mode="generic")


def combined_plainly(x: Tensor, w: Any) -> Tensor:
    rows = [x[0].round()]
    for row in x[1:]:
        rows.append(rows[-1] + row.round() + linear(torch.ones(1, 64), w)[0].round())
    return torch.stack(rows)


def checkpointed(x: Tensor, w: Any) -> Tensor:
    return checkpoint(lambda x: linear(x, w).relu(), x, use_reentrant=False)


def checkpointed_passed(x: Tensor, w: Any) -> Tensor:
    return checkpoint(lambda x, w: linear(x, w).relu(), x, w, use_reentrant=False)


def checkpointed_plainly(x: Tensor, w: Any) -> Tensor:
    return linear(x, w).relu()


@dataclass(frozen=True)
class Operator:
    """A higher-order operator: what captures its weight, what passes it on, and the same without the operator."""

    captured: Function
    passed: Function | None
    plain: Function
    rows: bool = False  # whether it runs over the first of three dimensions


OPERATORS = {
    "cond": Operator(conditional, conditional_passed, conditional_plainly),
    "nested_compile_region": Operator(region, region_passed, region_plainly),
    "map": Operator(mapped, mapped_passed, mapped_plainly, rows=True),
    "scan": Operator(scanned, scanned_passed, scanned_plainly, rows=True),
    "while_loop": Operator(looped, looped_passed, looped_plainly),
    "associative_scan": Operator(combined, None, combined_plainly, rows=True),  # takes nothing that it does not combine
    "checkpoint": Operator(checkpointed, checkpointed_passed, checkpointed_plainly),
}


class Model(torch.nn.Module):
    def __init__(self, function: Function, weight: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


# What each route makes of a function and its weight, with an example of the other operand.
Made = Callable[[Tensor], Tensor]


def eagerly(function: Function, x: Tensor, w: Any) -> Made:
    return lambda x: function(x, w)


def compiled(backend: str) -> Callable[[Function, Tensor, Any], Made]:
    def made(function: Function, x: Tensor, w: Any) -> Made:
        program = torch.compile(function, backend=backend, fullgraph=True)
        return lambda x: program(x, w)

    return made


def exported(function: Function, x: Tensor, w: Any, *, strict: bool = False) -> Made:
    return torch.export.export(Model(function, w), (x,), strict=strict).module()


def saved(function: Function, x: Tensor, w: Any) -> Made:
    return reloaded(torch.export.export(Model(function, w), (x,))).module()


def lowered(function: Function, x: Tensor, w: Any) -> Made:
    program = torch.export.export(Model(function, w), (x,)).run_decompositions(hop.decompositions())
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    assert not [n for g in graphs for n in g.nodes if str(n.target).startswith("hop_")]
    return program.module()


VALUES = {
    "eager": eagerly,
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
    "exported": exported,
    "exported strictly": lambda function, x, w: exported(function, x, w, strict=True),
    "saved": saved,
    "lowered": lowered,
}
GRADIENTS = {"eager": eagerly, "aot_eager": compiled("aot_eager"), "inductor": compiled("inductor")}


QUICK = {("plain", "captured", route) for route in ("eager", "aot_eager", "exported", "lowered")} | {
    ("packed", "passed", "eager")
}
"""The cells that stand for the others where there is little time."""


def cells(routes: Any, quick: bool) -> list[tuple[str, str, str, str, str]]:
    """Operator x weight x way x route, each with a name: those of QUICK, or the others."""
    found = []
    for (name, o), weight, way, route in itertools.product(
        OPERATORS.items(), ("plain", "packed"), ("captured", "passed"), routes
    ):
        refused = (name, route) == ("checkpoint", "exported strictly")  # by PyTorch, of floats too
        is_there = (way == "captured" or o.passed is not None) and not refused
        if is_there and quick == ((weight, way, route) in QUICK):
            found.append((f"{name}_{weight}_{way}_{route}", name, weight, way, route))
    return found


def of(name: str, weight: str, way: str) -> tuple[Operator, Function, Tensor, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    row = OPERATORS[name]
    function = row.captured if way == "captured" else row.passed
    assert function is not None
    w = hop.quantize(ROWS, torch.randn(64, 64) / 8)
    return row, function, torch.randn((3, 4, 64) if row.rows else (4, 64)), hop.pack(w) if weight == "packed" else w


# What some version of torch does not do, by the name of the lack: operators and routes.
LACKING = {
    "saved_associative_scans": {("associative_scan", "saved")},
    "scan_gradients": {("scan", f"{route} gradient") for route in ("eager", "aot_eager", "inductor")},
}


def skip_what_lacks(name: str, route: str) -> None:
    """Skip what the torch that runs does not do, of float tensors neither."""
    for lack, where in LACKING.items():
        if (name, route) in where and LACKS[lack].shows():
            pytest.skip(LACKS[lack].what)


def check_values(name: str, weight: str, way: str, route: str) -> None:
    skip_what_lacks(name, route)
    row, function, x, w = of(name, weight, way)
    made = VALUES[route](function, x, w)
    for signed in (x, x - 1):
        want = row.plain(signed, w)
        assert want.any()
        assert torch.equal(made(signed), want)


def check_gradients(name: str, weight: str, way: str, route: str) -> None:
    skip_what_lacks(name, f"{route} gradient")
    row, function, x, w = of(name, weight, way)
    trained = weight == "plain"

    def gradients(run: Callable[[Tensor, Any], Tensor]) -> list[Tensor]:
        own, parameter = x.clone().requires_grad_(), torch.nn.Parameter(w.detach(), requires_grad=trained)
        out = run(own, parameter)
        (out * torch.linspace(1, 2, out.numel()).reshape(out.shape)).sum().backward()
        assert trained == (parameter.grad is not None)
        return [out, own.grad, *([parameter.grad] if trained else [])]  # type: ignore[list-item]

    got, want = gradients(lambda x, w: GRADIENTS[route](function, x, w)(x)), gradients(row.plain)
    assert torch.equal(got[0], want[0])
    for g, expected in zip(got[1:], want[1:], strict=True):
        assert type(g) is Tensor and g.any() == expected.any()
        torch.testing.assert_close(g, expected, rtol=1e-5, atol=1e-5)


class TestValues(unittest.TestCase):
    @parameterized.expand(cells(VALUES, quick=True))
    @pytest.mark.quick(24)
    def test_equal_bits(self, _name, *cell):
        check_values(*cell)

    @parameterized.expand(cells([r for r in VALUES if r != "inductor"], quick=False))
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_equal_bits_elsewhere(self, _name, *cell):
        check_values(*cell)

    @parameterized.expand(cells(["inductor"], quick=False))
    @pytest.mark.compiler
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_equal_bits_compiled(self, _name, *cell):
        check_values(*cell)


class TestGradients(unittest.TestCase):
    @parameterized.expand(cells([r for r in GRADIENTS if r != "inductor"], quick=True))
    @pytest.mark.quick(14)
    def test_those_of_the_plain_function(self, _name, *cell):
        check_gradients(*cell)

    @parameterized.expand(cells([r for r in GRADIENTS if r != "inductor"], quick=False))
    @pytest.mark.full
    def test_those_of_the_plain_function_elsewhere(self, _name, *cell):
        check_gradients(*cell)

    @parameterized.expand(cells(["inductor"], quick=False))
    @pytest.mark.compiler
    @pytest.mark.full
    @pytest.mark.sampled(4)
    def test_those_of_the_plain_function_compiled(self, _name, *cell):
        check_gradients(*cell)


@torch.compiler.nested_compile_region
def widened(x: Tensor, w: Any) -> Tensor:
    return x.mean() + hop.dequantize(w)


class TestOperands(unittest.TestCase):
    """Quantized tensors as results, as what a loop runs over, and in regions of other formats."""

    def setUp(self):
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.w, self.x = hop.quantize(ROWS, torch.randn(64, 64)), torch.randn(4, 64)

    def test_branches_return_them(self):
        for backend in ("eager", "aot_eager"):
            double = torch.compile(
                lambda x, w: torch.cond(
                    x.sum() > 0, lambda w: w.clone(), lambda w: hop.quantize(ROWS, hop.dequantize(w) * 2), (w,)
                ),
                backend=backend,
                fullgraph=True,
            )
            made = double(self.x.abs(), self.w)
            assert type(made) is hop.QuantizedTensor
            assert made.quantizer == self.w.quantizer
            assert torch.equal(made.codes, self.w.codes)

    @pytest.mark.full
    def test_loops_run_over_stacked_weights(self):
        layers = [hop.quantize(ROWS, torch.randn(64, 64) / 8) for _ in range(3)]
        stack = hop.quantize(ROWS, torch.stack([hop.dequantize(w) for w in layers]))
        want = self.x
        for i in range(3):
            want = linear(want, stack[i])
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            run = torch.compile(
                lambda x, w: scan(lambda c, w: (linear(c, w), c * 1), x, w)[0], backend=backend, fullgraph=True
            )
            assert torch.equal(run(self.x, stack), want)

    def test_a_scale_of_the_whole_serves_each_slice(self):
        whole = hop.quantize(hop.Quantizer(hop.formats.INT8, block=(-1, -1, -1)), torch.randn(3, 64, 64))
        got = map_over(lambda w: hop.dequantize(w) * 2, whole)
        assert torch.equal(got, hop.dequantize(whole) * 2)

    def test_a_block_across_slices_is_an_error(self):
        cut = hop.quantize(hop.Quantizer(hop.formats.INT8, block=(2, 1, -1)), torch.randn(4, 8, 64))
        with pytest.raises(ValueError, match="has no slices along its first dimension"):
            control_flow.slices(cut)

    def test_regions_of_equal_layers_are_traced_once(self):
        graphs = []

        def keep(graph, inputs):
            graphs.append(graph)
            return graph

        model = torch.nn.Sequential(*(Layer(hop.quantize(ROWS, torch.randn(64, 64) / 8)) for _ in range(3)))
        with torch.no_grad():
            got = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(self.x)
        want = self.x
        for layer_ in model:
            want = linear(want, layer_.weight).relu()
        assert torch.equal(got, want)
        regions = [n for n in graphs[0].graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]
        assert len(regions) == 3
        assert len({n.args[0].target for n in regions}) == 1

    def test_regions_of_other_formats_are_others(self):
        quantizers = [hop.Quantizer(f, block=(1, -1)) for f in (hop.formats.INT4, hop.formats.E2M1)]
        weights = [hop.quantize(q, torch.randn(64, 64) / 8) for q in quantizers]
        run = torch.compile(lambda x, a, b: widened(widened(x, a), b), backend="aot_eager", fullgraph=True)
        want = self.x.mean() + hop.dequantize(weights[0])
        want = want.mean() + hop.dequantize(weights[1])
        assert {w.codes.dtype for w in weights} == {torch.uint8}
        assert torch.equal(run(self.x, *weights), want)
