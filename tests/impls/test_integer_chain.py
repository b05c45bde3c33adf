"""Chains of quantized layers: integers alone flow between them, on every route, and gradients flow back through them.

A network is written once, as a function of a reader, and read three ways:

    Ours      hop.scaled from layer to layer, with a quantizer as output
    Numpy     the integers that it means, by the oracles of scaled, which call nothing of the library's arithmetic
    Fake      plain torch in float64: quantized where the chain is, straight through every rounding
"""

import math
import operator
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hop
from hop import presets
from hop.impls.quantize import quantize_operator
from hop.impls.scaled import scaled_buffers, scaled_operator
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Division, FixedPoint
from hop.numerics.scale_rules import Static
from hop.tensor.buffers.operators import dequantize_buffers, dequantize_operator, quantize_buffers
from tests.support import oracles
from tests.support import scaled_oracles as oracle
from tests.support.conventions import RULES
from tests.support.files import read_back, reloaded

aten = torch.ops.aten
f32, f64, i64 = np.float32, np.float64, np.int64
FIXED = [name for name, rule in RULES.items() if isinstance(rule, FixedPoint)]
# Weights, one scale for each channel, by how many dimensions they have.
FOUND = {2: presets.INT8_ROW, 4: Quantizer(INT8, (1, -1, -1, -1))}
GIVEN = {ndim: replace(q, scale=Static()) for ndim, q in FOUND.items()}


# One scale and one zero point for the tensor, which are given; for each convention without and with a relu.
STATIC = {
    name: {low: Quantizer(INT8, scale=Static(affine=True, requantize=replace(rule, low=low))) for low in (None, 0.0)}
    for name, rule in RULES.items()
}
PLAIN = STATIC["division"][None]


# ---- the networks. Numbers name the scale and the zero point of what a layer gives.


def perceptron(k: Any, x: Any) -> Any:
    """Two layers, the relu fused with the first, and a residual."""
    x = k.quantize(x, 0)
    h = k.linear(x, "w1", "b1", 1, low=0.0)
    h = k.linear(h, "w2", "b2", 2)
    return k.add(h, x, 3)


def unfused(k: Any, x: Any) -> Any:
    """The same, with a relu of its own."""
    x = k.quantize(x, 0)
    h = k.linear(x, "w1", "b1", 2)
    h = k.relu(h, 1)
    h = k.linear(h, "w2", "b2", 2)
    return k.add(h, x, 3)


def convolutional(k: Any, x: Any) -> Any:
    """Two convolutions, a relu and a pooling between them, a residual, and a linear layer."""
    x = k.quantize(x, 0)
    h = k.conv2d(x, "w1", "b1", 2)
    h = k.relu(h, 1)
    h = k.max_pool2d(h, 2)
    h = k.add(k.conv2d(h, "w2", "b2", 2), h, 3)
    return k.linear(k.flatten(h, 4), "w3", "b3", 5)


NETWORKS: dict[str, Callable[[Any, Any], Any]] = {
    "perceptron": perceptron,
    "unfused": unfused,
    "convolutional": convolutional,
}
ALL = [(f"{network}_{rule}", network, rule) for network in NETWORKS for rule in RULES]
EXACT = [(name, network, rule) for name, network, rule in ALL if rule != "division"]


def inputs(network: str) -> Tensor:
    """Some of which are beyond the codes."""
    shape = (3, 2, 8, 8) if network == "convolutional" else (6, 24)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1.5


def parameters(network: str) -> dict[str, Tensor]:
    """Floats: weights and biases, and the scale and the zero point of each activation."""
    rng = torch.Generator().manual_seed(2)
    if network == "convolutional":
        shapes = {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3), "b2": (4,), "w3": (5, 64), "b3": (5,)}
    else:
        shapes = {"w1": (16, 24), "b1": (16,), "w2": (24, 16), "b2": (24,)}
    made = {name: torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}
    scales, zeros = (2**-5, 2**-5, 2**-6, 2**-5, 2**-4, 2**-3), (3, -100, 7, -2, 1, 0)  # powers of two give ties
    made |= {f"s{i}": torch.tensor(s) for i, s in enumerate(scales)}
    return made | {f"z{i}": torch.tensor(float(z)) for i, z in enumerate(zeros)}


def held(network: str) -> dict[str, Tensor]:
    """What a deployed network holds: weights as codes for each channel, the first bias in units of the sum, int32, and
    the others as floats."""
    p = parameters(network)
    for name in [n for n in p if n.startswith("w")]:
        p[name] = hop.quantize(FOUND[p[name].dim()], p[name])
    unit = p["s0"] * p["w1"].scale.flatten()  # type: ignore[attr-defined]
    p["b1"] = (p["b1"] / unit).round().to(torch.int32)
    return p | {name: t.to(torch.int8) for name, t in p.items() if name.startswith("z")}


# ---- three readers


class Ours:
    """Layers of quantized tensors."""

    def __init__(self, p: dict[str, Any], rule: str) -> None:
        self.p, self.q = p, STATIC[rule]

    def quantize(self, x: Tensor, i: int) -> Any:
        return hop.quantize(PLAIN, x, scale=self.p[f"s{i}"], zero_point=self.p[f"z{i}"])

    def run(self, op: Any, q: Quantizer, i: int, *args: Any) -> Any:
        return hop.scaled(op, q, *args, output_scale=self.p[f"s{i}"], output_zero_point=self.p[f"z{i}"])

    def linear(self, x: Any, w: str, b: str, i: int, low: float | None = None) -> Any:
        return self.run(aten.linear.default, self.q[low], i, x, self.p[w], self.p[b])

    def conv2d(self, x: Any, w: str, b: str, i: int) -> Any:
        return self.run(aten.conv2d.default, self.q[None], i, x, self.p[w], self.p[b], [1, 1], [1, 1])

    def relu(self, x: Any, i: int) -> Any:
        return self.run(aten.relu.default, self.q[None], i, x)

    def max_pool2d(self, x: Any, i: int) -> Any:
        return self.run(aten.max_pool2d.default, self.q[None], i, x, [3, 3], [2, 2], [1, 1])

    def flatten(self, x: Any, i: int) -> Any:
        return self.run(aten.flatten.using_ints, self.q[None], i, x, 1)

    def add(self, x: Any, y: Any, i: int) -> Any:
        return self.run(aten.add.Tensor, PLAIN, i, x, y)  # two sums, of two units: it has no exact one


class Recorded(Ours):
    """And the numbers after each layer."""

    def __init__(self, p: dict[str, Any], rule: str) -> None:
        super().__init__(p, rule)
        self.numbers: list[Tensor] = []

    def quantize(self, x: Tensor, i: int) -> Any:
        return self.recorded(super().quantize(x, i))

    def run(self, op: Any, q: Quantizer, i: int, *args: Any) -> Any:
        return self.recorded(super().run(op, q, i, *args))

    def recorded(self, t: Any) -> Any:
        self.numbers.append(hop.dequantize(t.detach()))
        return t


class Codes(NamedTuple):
    """Codes less their zero point, and their scale."""

    n: np.ndarray
    scale: f32

    def real(self) -> np.ndarray:
        return self.n.astype(f32) * self.scale


class Numpy:
    """The integers of the same layers; `codes` are those of the last one."""

    codes: np.ndarray

    def __init__(self, p: dict[str, Any], rule: str) -> None:
        self.p, self.rule = p, RULES[rule]

    def quantize(self, x: Tensor, i: int) -> Codes:
        return self.divided(x.numpy(), i)

    def divided(self, y: np.ndarray, i: int) -> Codes:
        scale, zero = f32(self.p[f"s{i}"].item()), int(self.p[f"z{i}"].item())
        self.codes = np.clip(np.rint(y.astype(f32) / scale).astype(i64) + zero, -128, 127)
        return Codes(self.codes - zero, scale)

    def requantized(
        self, n: np.ndarray, lhs: Any, rhs: Any, i: int, low: float | None = None, bias: np.ndarray | None = None
    ) -> Codes:
        """A sum in units of lhs · rhs, with a bias of int32 or of floats."""
        n = oracle.wrapped(n + bias) if bias is not None and bias.dtype == np.int32 else oracle.wrapped(n)
        added = None if bias is None or bias.dtype == np.int32 else bias
        if isinstance(self.rule, Division):
            y = (n.astype(f32) * lhs) * rhs
            y = y if added is None else y + added
            return self.divided(y if low is None else np.maximum(y, f32(low)), i)
        if added is not None:
            steps = np.rint(added.astype(f64) / (np.asarray(lhs, f64) * np.asarray(rhs, f64)))
            n = np.clip(n + steps.astype(i64), -(2**31), 2**31 - 1)
        scale, zero = f32(self.p[f"s{i}"].item()), int(self.p[f"z{i}"].item())
        lhs, rhs, *out = (np.asarray(v) for v in (lhs, rhs, scale, zero))
        self.codes = oracle.requantized(replace(self.rule, low=low), n, lhs, rhs, *out, "int8").astype(i64)
        return Codes(self.codes - zero, scale)

    def linear(self, x: Codes, w: str, b: str, i: int, low: float | None = None) -> Codes:
        weight = self.p[w]
        total = x.n @ weight.codes.numpy().astype(i64).T
        return self.requantized(total, x.scale, weight.scale.numpy()[:, 0], i, low, self.p[b].numpy())

    def conv2d(self, x: Codes, w: str, b: str, i: int) -> Codes:
        weight = self.p[w]
        total = oracles.convolution(
            x.n, weight.codes.numpy().astype(i64), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        )
        of_channels = weight.scale.numpy()[:, 0]
        return self.requantized(total, x.scale, of_channels, i, None, self.p[b].numpy()[:, None, None])

    def relu(self, x: Codes, i: int) -> Codes:
        return self.requantized(np.maximum(x.n, 0), x.scale, f32(1), i)

    def max_pool2d(self, x: Codes, i: int) -> Codes:
        return self.requantized(oracle.max_pool(x.n, [3, 3], [2, 2], [1, 1]), x.scale, f32(1), i)

    def flatten(self, x: Codes, i: int) -> Codes:
        return self.requantized(x.n.reshape(len(x.n), -1), x.scale, f32(1), i)

    def add(self, x: Codes, y: Codes, i: int) -> Codes:
        return self.divided(x.real() + y.real(), i)


class Fake:
    """The same layers on plain floats in float64, each operator's gradient PyTorch's own.

    `taken` are the numbers that another reader had after each layer. Where a convention rounds the bias too, or twice,
    they are a code apart now and then: `moved` of `count`. The next layer gets what was taken."""

    def __init__(self, p: dict[str, Any], taken: Iterable[Tensor]) -> None:
        self.p, self.taken, self.moved = {name: t.to(torch.float64) for name, t in p.items()}, iter(taken), 0
        self.count = 0

    def quantize(self, x: Tensor, i: int, low: float | None = None) -> Tensor:
        """Straight through both roundings; of the clamp, 0 for what is clipped."""
        scale, zero = self.p[f"s{i}"], rounded(self.p[f"z{i}"])
        y = x.to(torch.float64) if low is None else kept(x, low, math.inf)
        own = (kept(rounded(y / scale) + zero, -128, 127) - zero) * scale
        apart = (next(self.taken) - own).detach()
        assert bool((apart.abs() < 1.01 * scale).all())
        self.moved += int((apart.abs() > scale / 2).sum())
        self.count += apart.numel()
        return own + apart

    def weight(self, name: str) -> Tensor:
        """By scales that are given, or by the largest of each channel, which clips nothing and counts as a constant."""
        w = self.p[name]
        if (given := self.p.get(f"scale_{name}")) is not None:
            return kept(rounded(w / given), -128, 127) * given
        scale = w.detach().abs().amax(list(range(1, w.dim())), keepdim=True) / 127
        return rounded(w / scale) * scale

    def linear(self, x: Tensor, w: str, b: str, i: int, low: float | None = None) -> Tensor:
        return self.quantize(F.linear(x, self.weight(w), self.p[b]), i, low)

    def conv2d(self, x: Tensor, w: str, b: str, i: int) -> Tensor:
        return self.quantize(F.conv2d(x, self.weight(w), self.p[b], padding=1), i)

    def relu(self, x: Tensor, i: int) -> Tensor:
        return self.quantize(x.relu(), i)

    def max_pool2d(self, x: Tensor, i: int) -> Tensor:
        return self.quantize(F.max_pool2d(x, 3, 2, 1), i)

    def flatten(self, x: Tensor, i: int) -> Tensor:
        return self.quantize(x.flatten(1), i)

    def add(self, x: Tensor, y: Tensor, i: int) -> Tensor:
        return self.quantize(x + y, i)


def rounded(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def kept(x: Tensor, low: float, high: float) -> Tensor:
    """x within bounds; its gradient is 1 on them, where versions of torch differ about that of clamp."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


# ---- modules


class Network(torch.nn.Module):
    """From floats to floats, its weights quantized parameters."""

    def __init__(self, network: str, rule: str) -> None:
        super().__init__()
        self.network, self.rule = network, rule
        self.names = []
        for name, t in held(network).items():
            self.names.append(name)
            self.register_parameter(name, torch.nn.Parameter(t, requires_grad=False))

    def chain(self, x: Tensor) -> Any:
        reader = Ours({name: getattr(self, name) for name in self.names}, self.rule)
        return NETWORKS[self.network](reader, x)

    def forward(self, x: Tensor) -> Tensor:
        return hop.dequantize(self.chain(x))


class ToCodes(Network):
    """From floats to the codes of the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x).codes


class TestValues(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(3)
    def test_are_those_of_integers(self, _name, network, rule):
        """Bit for bit, by layers of every convention, and with codes at both ends."""
        model, x = Network(network, rule), inputs(network)
        got, by = model.chain(x), Numpy(held(network), rule)
        want = NETWORKS[network](by, x)
        oracle.assert_bits(got.codes, by.codes.astype(np.int8), "codes")
        oracle.assert_bits(model(x), want.real(), "numbers")
        assert len(np.unique(by.codes)) > 10

    @parameterized.expand([(rule,) for rule in RULES])
    def test_codes_pass_unchanged_without_a_change_of_scale(self, rule):
        p = held("perceptron") | {"s0": torch.tensor(0.0237)}
        k = Ours(p, rule)
        x = k.quantize(torch.linspace(-4, 4, 512).reshape(2, 1, 16, 16), 0)
        assert len(x.codes.unique()) == 256
        assert torch.equal(k.flatten(x, 0).codes, x.codes.flatten(1))
        pooled = F.max_pool2d(x.codes.to(torch.float32), 3, 2, 1).to(torch.int8)
        assert torch.equal(k.max_pool2d(x, 0).codes, pooled)

    def test_conventions_differ(self):
        """Where ties are, which scales that are powers of two give."""
        x = inputs("convolutional")
        found = {rule: Network("convolutional", rule).chain(x).codes.numpy().tobytes() for rule in RULES}
        to_even, up, away = ("division", "float_multiplier", "even"), ("gemmlowp", "tflite"), ("away",)
        assert len(set(found.values())) == 3, found
        assert all(len({found[rule] for rule in alike}) == 1 for alike in (to_even, up, away))


class TestRoutes(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_equal_on_each(self, _name, network, rule):
        """Compiled, exported, lowered by a step and to core ATen, saved and loaded: the same bits."""
        model, x = Network(network, rule).eval(), inputs(network)
        want = model(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
        program = torch.export.export(model, (x,))
        core = program.run_decompositions(hop.decompositions())
        assert torch.equal(core.module()(x), want)
        for each in (program, program.run_decompositions({})):
            assert torch.equal(each.module()(x), want)
            assert torch.equal(reloaded(each).module()(x), want)
        read = read_back(model.state_dict(), weights_only=True)
        other = Network(network, rule)
        for t in other.parameters():
            t.zero_()
        other.load_state_dict(read)
        assert torch.equal(other(x), want)

    @parameterized.expand([(name, network, rule) for name, network, rule in ALL if rule in ("division", "gemmlowp")])
    @pytest.mark.full
    def test_equal_by_inductor(self, _name, network, rule):
        model, x = Network(network, rule).eval(), inputs(network)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))


# ---- dtypes


def descendants(graph: torch.fx.Graph, roots: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """`roots` and what depends on them, but for the scales and zero points beside codes."""
    found = dict.fromkeys(roots)
    for node in graph.nodes:
        beside = node.target is operator.getitem and node.args[0].target in (quantize_buffers, scaled_buffers)
        if any(source in found for source in node.all_input_nodes) and not (beside and node.args[1] > 0):
            found[node] = None
    return list(found)


def of_input(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The nodes that depend on the one input, it and the output left out."""
    (name,) = program.graph_signature.user_inputs
    (x,) = (node for node in program.graph.nodes if node.name == name)
    return [node for node in descendants(program.graph, [x]) if node.op == "call_function"]


def exported(module: torch.nn.Module, *args: Tensor) -> torch.export.ExportedProgram:
    program = torch.export.export(module.eval(), args)
    assert torch.equal(program.module()(*args), module(*args))
    return program


def floats(program: torch.export.ExportedProgram) -> list[str]:
    """The ATen operators whose results depend on the first codes of the input, and are floats."""
    of_x = of_input(program)
    codes = next(node for node in of_x if node.meta["val"].dtype == torch.int8)
    after = [node for node in descendants(program.graph, [codes]) if node.op == "call_function"]
    assert all(isinstance(node.target, torch._ops.OpOverload | type(operator.getitem)) for node in after)
    return [
        node.target.__name__
        for node in after
        if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_floating_point()
    ]


class One(torch.nn.Module):
    """One layer, from a quantized input to codes."""

    def __init__(self, rule: str, layer: Callable[[Any, Any], Any], network: str) -> None:
        super().__init__()
        self.layer, self.network, self.whole = layer, network, Network(network, rule)

    def forward(self, x: Tensor) -> Tensor:
        reader = Ours(dict(self.whole.named_parameters()), self.whole.rule)
        return self.layer(reader, reader.quantize(x, 0)).codes


# The layers, and the network whose parameters they have.
LAYERS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "linear": ("perceptron", lambda k, x: k.linear(x, "w1", "b1", 1)),
    "linear_relu": ("perceptron", lambda k, x: k.linear(x, "w1", "b1", 1, low=0.0)),
    "conv2d": ("convolutional", lambda k, x: k.conv2d(x, "w1", "b1", 2)),
    "relu": ("convolutional", lambda k, x: k.relu(x, 1)),
    "max_pool2d": ("convolutional", lambda k, x: k.max_pool2d(x, 2)),
    "flatten": ("convolutional", lambda k, x: k.flatten(x, 4)),
    "add": ("convolutional", lambda k, x: k.add(x, x, 3)),
}
# The floats of one requantization of a sum, in order, without views; and of what goes through real numbers.
MULTIPLIED = ["_to_copy.default", "mul.Tensor", "round.default", "clamp.default", "where.self"]
READ = ["_to_copy.default", "sub.Tensor", "mul.Tensor"]
DIVIDED = ["div.Tensor", "round.default", "where.self", "add.Tensor", "clamp.default"]
SUMMED = ["_to_copy.default", "mul.Tensor", "mul.Tensor"]
BY_DIVISION = {
    "linear": SUMMED + DIVIDED,
    "linear_relu": [*SUMMED, "clamp.default", *DIVIDED],
    "conv2d": SUMMED + DIVIDED,
    "relu": [*READ, "relu.default", *DIVIDED],
    "max_pool2d": [*READ, "getitem", *DIVIDED],
    "flatten": READ + DIVIDED,
    "add": [*READ, *READ, "add.Tensor", *DIVIDED],
}


class TestDtypes(unittest.TestCase):
    """What depends on the input, between quantize and dequantize, node by node."""

    @parameterized.expand(ALL)
    @pytest.mark.quick(10)
    def test_exported(self, _name, network, rule):
        """Quantized tensors, whose codes are int8."""
        program = exported(Network(network, rule), inputs(network))
        first, *between, last = of_input(program)
        assert (first.target, last.target) == (quantize_operator, dequantize_operator)
        layers = {"perceptron": 3, "unfused": 4, "convolutional": 7}[network]
        assert len(between) == layers and all(node.target is scaled_operator for node in between)
        for node in (first, *between):
            value = node.meta["val"]
            assert isinstance(value, hop.QuantizedTensor) and value.codes.dtype == torch.int8
        assert type(last.meta["val"]) is not hop.QuantizedTensor and last.meta["val"].dtype == torch.float32

    @parameterized.expand(ALL)
    @pytest.mark.full
    def test_lowered_one_step(self, _name, network, rule):
        """Codes, int8; beside them their scale and zero point, one of each."""
        program = exported(Network(network, rule), inputs(network)).run_decompositions({})
        first, *between, last = of_input(program)
        assert first.target is quantize_buffers and last.target is dequantize_buffers
        count = 0
        for node in (first, *between):
            codes, *stored = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
            assert codes.dtype == torch.int8, node
            assert all(t.numel() == 1 for t in stored) and len(stored) in (0, 2)
            count += node.target is scaled_buffers
            assert node.target in (quantize_buffers, scaled_buffers, operator.getitem)
        assert count == {"perceptron": 3, "unfused": 4, "convolutional": 7}[network]

    @parameterized.expand([(f"{layer}_{rule}", layer, rule) for layer in LAYERS for rule in RULES])
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_lowered_to_aten(self, _name, layer, rule):
        """From codes to codes: integers alone by the conventions of fixed point. By the others exactly the floats that
        the convention names; and an addition, which has two units, goes through real numbers."""
        network, of_layer = LAYERS[layer]
        module, x = One(rule, of_layer, network), inputs(network)
        core = exported(module, x).run_decompositions(hop.decompositions())
        assert torch.equal(core.module()(x), module(x))
        found = [name for name in floats(core) if name != "view.default"]
        if rule == "division" or layer == "add":
            assert found == BY_DIVISION[layer]
        else:
            assert found == ([] if rule in FIXED else MULTIPLIED)

    @parameterized.expand(
        [
            ("max_pool1d", aten.max_pool1d.default, (2, 3, 9), ([3], [2], [1])),
            ("max_pool3d", aten.max_pool3d.default, (2, 3, 4, 6, 5), ([2, 3, 2], [2, 2, 1], [1, 1, 1])),
            ("ceil_mode", aten.max_pool2d.default, (3, 9, 8), ([3, 3], [2, 2], [1, 1], [1, 1], True)),
            ("permute", aten.permute.default, (2, 3, 4), ([2, 0, 1],)),
            ("select", aten.select.int, (2, 3, 4), (1, 2)),
            ("expand", aten.expand.default, (2, 1, 4), ([2, 3, 4],)),
        ]
    )
    @pytest.mark.full
    def test_what_only_chooses_lowered(self, _name, op, shape, rest):
        module = One("even", lambda k, x: k.run(op, k.q[None], 2, x, *rest), "perceptron")
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        core = exported(module, x).run_decompositions(hop.decompositions())
        assert torch.equal(core.module()(x), module(x)) and floats(core) == []

    @parameterized.expand([(network,) for network in NETWORKS])
    @pytest.mark.full
    def test_whole_networks_lowered(self, network):
        """With fixed point, what is float is the residual's addition and nothing else."""
        core = exported(ToCodes(network, "gemmlowp"), inputs(network)).run_decompositions(hop.decompositions())
        found = Counter(name for name in floats(core) if name != "view.default")
        assert found == Counter(BY_DIVISION["add"])


# ---- gradients


class Trained:
    """A network as a function of floats, which are quantized inside; the second weight by scales that are given."""

    def __init__(self, network: str, rule: str) -> None:
        self.network, self.rule = network, rule
        made = parameters(network)
        for name in [n for n in made if n[0] in "sz"]:  # no ties; zero points are rounded
            made[name] = made[name] + 0.3 if name[0] == "z" else made[name] * 1.0717 ** (1 + int(name[1]))
        w = made["w2"]
        made["scale_w2"] = w.abs().amax(list(range(1, w.dim())), keepdim=True) / 160  # what is beyond 127 is clipped
        for name in [n for n in made if n[0] in "wb"]:
            made[name] = made[name].to(torch.float64)
        self.names = list(made)
        self.tensors = [inputs(network).to(torch.float64), *made.values()]

    def inputs(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in self.tensors]

    def __call__(self, x: Tensor, *floats: Tensor) -> Tensor:
        return hop.dequantize(NETWORKS[self.network](Ours(self.quantized(floats), self.rule), x))

    def quantized(self, floats: Iterable[Tensor]) -> dict[str, Any]:
        p: dict[str, Any] = dict(zip(self.names, floats, strict=True))
        for name in [n for n in p if n.startswith("w")]:
            given = p.get(f"scale_{name}")
            q = (FOUND if given is None else GIVEN)[p[name].dim()]
            p[name] = hop.quantize(q, p[name], scale=given)
        return p

    def fake(self, x: Tensor, *floats: Tensor) -> Tensor:
        ours = Recorded(self.quantized(floats), self.rule)
        NETWORKS[self.network](ours, x)
        fake = Fake(dict(zip(self.names, floats, strict=True)), ours.numbers)
        out = NETWORKS[self.network](fake, x)
        twice = dict.fromkeys(("gemmlowp", "ruy"), 0.1)  # round twice, and so to another code more often
        assert fake.moved <= fake.count * {"division": 0, **twice}.get(self.rule, 0.01)
        return out


def vjp(function: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradients of a direction in which no two elements are alike; None where it does not reach."""
    out = function(*given)
    direction = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out, list(torch.autograd.grad(out, given, direction, allow_unused=True))


class TestGradients(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(4)
    def test_straight_through(self, _name, network, rule):
        """Of the input, weights, biases, scales and zero points, which are computed in float32: sums of some hundred
        terms, to 1e-5 of the largest. The gradient of a scale sums differences of numbers up to 128, round(y) - y,
        each off by 2^-17."""
        net = Trained(network, rule)
        given = net.inputs()
        (out, got), (want_out, want) = vjp(net, given), vjp(net.fake, given)
        torch.testing.assert_close(out, want_out, rtol=1e-6, atol=1e-6)
        reached = [w is not None for w in want]
        assert [g is not None for g in got] == reached and sum(reached) >= 14
        for name, t, g, w in zip(["x", *net.names], given, got, want, strict=True):
            if g is None or w is None:
                continue
            assert (g.dtype, g.shape) == (t.dtype, t.shape), name
            slack = 2**-17 * given[0].numel() if name.startswith("s") else 0.0
            bounds = {"rtol": 1e-5, "atol": 1e-5 * float(w.abs().max()) + slack}
            torch.testing.assert_close(g, w, **bounds, msg=lambda m, n=name: f"{n}: {m}")
            assert w.any() or name.startswith("z"), name  # those move only what is clipped
        assert any(w.any() for name, w in zip(["x", *net.names], want, strict=True) if name[0] == "z" and w is not None)

    @parameterized.expand([(network,) for network in NETWORKS])
    def test_nothing_where_clipped(self, network):
        net = Trained(network, "gemmlowp")
        p = dict(zip(["x", *net.names], given := net.inputs(), strict=True))
        _, got = vjp(net, given)
        grads = dict(zip(p, got, strict=True))
        for name, steps in (("x", p["x"] / p["s0"] + p["z0"].round()), ("w2", p["w2"] / p["scale_w2"])):
            clipped, grad = (steps.round() > 127) | (steps.round() < -128), grads[name]
            assert clipped.any() and not grad[clipped].any() and grad[~clipped].any(), name  # type: ignore[index]

    @parameterized.expand(ALL)
    @pytest.mark.sampled(3)
    @pytest.mark.full
    def test_equal_compiled_and_checkpointed(self, _name, network, rule):
        """The gradients of eager, bit for bit: from a compiled program, and computed again in the backward pass."""
        net = Trained(network, rule)
        given = net.inputs()
        out, want = vjp(net, given)
        torch._dynamo.reset()
        program = torch.compile(lambda *tensors: net(*tensors), backend="aot_eager", fullgraph=True)
        again: Callable[..., Any] = lambda *tensors: checkpoint(net, *tensors, use_reentrant=False)  # noqa: E731
        for function in (program, again):
            same, got = vjp(function, given)
            assert torch.equal(same, out)
            for name, g, w in zip(["x", *net.names], got, want, strict=True):
                assert (g is None) == (w is None), name
                assert g is None or w is None or torch.equal(g, w), name

    def test_of_a_leaf(self):
        """A quantized tensor that requires a gradient collects a plain one, of its shape and dtype, and sums those of
        two uses."""
        p = held("perceptron")
        for dtype in (torch.float32, torch.bfloat16):
            x = inputs("perceptron").to(dtype)
            leaf = Ours(p, "gemmlowp").quantize(x, 0).detach().requires_grad_()
            assert leaf.is_leaf and leaf.codes.dtype == torch.int8

            def used(h: Any, times: int) -> Any:
                k = Ours(p, "gemmlowp")
                once = k.linear(k.linear(h, "w1", "b1", 1, low=0.0), "w2", "b2", 2)
                return k.add(once, h, 3) if times == 2 else once

            grads = []
            for times in (1, 2):
                leaf.grad = None
                hop.dequantize(used(leaf, times)).sum().backward()
                grad = leaf.grad
                assert type(grad) is Tensor and (grad.shape, grad.dtype) == (leaf.shape, dtype)
                grads.append(grad)
            assert grads[0].any() and not torch.equal(*grads)
            # The residual's gradient is 1 where the sum was not clipped, and passes to both operands of the sum.
            numbers = hop.dequantize(leaf.detach()).to(torch.float32).requires_grad_()
            once = hop.dequantize(used(leaf.detach(), 1)).to(torch.float32)
            y = (once + numbers.detach()) / p["s3"] + p["z3"]
            inside = ((y.round() <= 127) & (y.round() >= -128)).to(dtype)
            through = leaf.detach().requires_grad_()
            hop.dequantize(used(through, 1)).backward(inside)
            assert through.grad is not None
            torch.testing.assert_close(grads[1], through.grad + inside)

    def test_none_is_recorded_without_need(self):
        net = Trained("perceptron", "gemmlowp")
        with torch.no_grad():
            out = net(*net.inputs())
        assert out.grad_fn is None and not out.requires_grad
        assert net(*net.tensors).grad_fn is None
        k = Ours(held("perceptron"), "gemmlowp")
        x = k.quantize(inputs("perceptron").requires_grad_(), 0)
        assert x.requires_grad and k.linear(x, "w1", "b1", 1).requires_grad
        with torch.no_grad():
            assert not k.linear(x, "w1", "b1", 1).requires_grad
