"""What calls of scaled are in graphs, under transforms of whole quantized tensors, in files, and between threads."""

import copy
import functools
import itertools
import pickle
import threading
import unittest
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop import presets
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import kernels, scaled_buffers, scaled_operator
from hop.kernels.cpu import native
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FixedPoint
from hop.numerics.scale_rules import Static
from hop.tensor.quantized import operand
from tests.support.files import read_back, reloaded
from tests.support.scaled import SCALED

aten = torch.ops.aten
LINEAR = aten.linear.default
# Every kind of operand that a linear layer takes; None is a plain tensor.
OPERANDS = {
    name: q
    for name, q in presets.PRESETS.items()
    if not (q.stochastic or isinstance(q.scale, Static) or q.hadamard is not None or len(q.block) > 2 or q.flat)
} | {"PLAIN": None}


def made(q: Quantizer | None, x: Tensor, *, packed: bool = False) -> Tensor:
    if q is None:
        return x
    return hop.pack(hop.quantize(q, x)) if packed else hop.quantize(q, x)


@functools.cache
def pairs() -> list[tuple[str, Any, Any]]:
    """Those that are supported."""
    found = []
    for (a, lhs), (b, rhs) in itertools.product(OPERANDS.items(), repeat=2):
        try:
            hop.scaled(LINEAR, torch.float32, made(lhs, torch.ones(2, 40)), made(rhs, torch.ones(3, 40)))
        except (ValueError, TypeError):
            continue
        found.append((f"{a}_{b}", lhs, rhs))
    return found


class TestOperand(unittest.TestCase):
    def test_attributes(self):
        t = hop.quantize(presets.NVFP4, torch.randn(4, 64), usages=("rowwise", "columnwise"))
        x = operand(t)
        assert x.columnwise_codes is t.columnwise_codes and x.global_amax is t.global_amax
        assert x.of("columnwise").tensors[0] is t.columnwise_codes
        with self.assertRaisesRegex(AttributeError, "has no buffer 'zero_point'"):
            _ = x.zero_point
        assert not hasattr(
            tuple.__new__(Operand, ()), "__dict__"
        )  # as Dynamo and pickle ask of one that is not made yet
        assert copy.copy(x).scale is t.scale
        plain = operand(hop.quantize(presets.INT8_ROW, torch.randn(4, 64)))
        assert torch.equal(pickle.loads(pickle.dumps(plain)).codes, plain.codes)


class TestGraphForm(unittest.TestCase):
    """The public call and the node that it is in a graph."""

    @parameterized.expand([(str(output).replace(".", "_"), output) for output in (torch.bfloat16, presets.INT8_ROW)])
    @pytest.mark.quick(2)
    def test_equal_for_every_pair(self, _name, output):
        x, w, bias = torch.randn(2, 5, 40), torch.randn(7, 40), torch.randn(7)
        spelled = str(output) if isinstance(output, Quantizer) else output
        count = 0
        for name, lhs, rhs in pairs():
            a, b = made(lhs, x), made(rhs, w)
            with torch.device("cpu"):  # the kernels that the graph form has, not a plan
                want = hop.scaled(LINEAR, output, a, b, bias)
            got = scaled_buffers(LINEAR, spelled, None, None, *encode([operand(a), operand(b), bias]))
            buffers = list(want.buffers().values()) if isinstance(output, Quantizer) else [want]
            for mine, other in zip(got if isinstance(got, list) else [got], buffers, strict=True):
                assert torch.equal(mine.float(), other.float()) and mine.dtype == other.dtype, name
            count += 1
        assert count > 250

    @parameterized.expand([(packed, biased) for packed in (False, True) for biased in (False, True)])
    @pytest.mark.full
    def test_plans_give_the_same(self, packed, biased):
        """A call the first time, as a plan, and around both: equal bits, for every pair."""
        x, w, bias = torch.randn(5, 40).bfloat16(), torch.randn(7, 40).bfloat16(), torch.randn(7).bfloat16()
        for name, lhs, rhs in pairs():
            args = made(lhs, x, packed=packed), made(rhs, w, packed=packed), *[bias] * biased
            first, planned = (hop.scaled(LINEAR, torch.bfloat16, *args) for _ in range(2))
            with torch.device("cpu"):
                around = hop.scaled(LINEAR, torch.bfloat16, *args)
            assert torch.equal(first, planned) and torch.equal(first, around), name

    def test_one_node_of_plain_values(self):
        q = hop.quantize(presets.UINT4_32_AFFINE, torch.randn(7, 40))

        def f(x: Tensor) -> Tensor:
            return hop.scaled(LINEAR, torch.float32, hop.quantize(presets.INT8_ROW_AFFINE, x), q)

        graph = make_fx(f)(torch.randn(5, 40)).graph
        (node,) = (n for n in graph.nodes if n.target is scaled_buffers)
        flat = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
        allowed = (torch.fx.Node, str, int, float, torch.dtype, torch._ops.OpOverload, type(None))
        assert all(isinstance(v, allowed) for v in flat), flat
        assert [v for v in flat if isinstance(v, str) and v.startswith("hop1:")] == [
            str(presets.INT8_ROW_AFFINE),
            str(presets.UINT4_32_AFFINE),
        ]

    def test_spelled_by_name_or_position(self):
        a, b, c = torch.randn(5, 7), *(hop.quantize(presets.INT8_TENSOR, torch.randn(*s)) for s in ((5, 8), (8, 7)))
        want = hop.scaled(aten.addmm.default, torch.float32, a, b, c, alpha=2)
        got = hop.scaled(aten.addmm.default, torch.float32, mat2=c, self=a, mat1=b, alpha=2)
        assert torch.equal(got, want)


class TestTransforms(unittest.TestCase):
    """Of whole quantized tensors."""

    @parameterized.expand(
        [
            ("rows", presets.INT8_ROW, aten.linear.default, (7, 40)),
            ("affine", presets.UINT8_ROW_AFFINE, aten.linear.default, (7, 40)),
            ("nvfp4", presets.NVFP4_ROW, aten.linear.default, (7, 40)),
            ("mm", presets.INT8_ROW, aten.mm.default, (40, 7)),
        ]
    )
    def test_vmap(self, _name, q, op, shape):
        """Either factor, or both, batched along their first dimension, against a loop."""
        right = presets.INT8_TENSOR if op is aten.mm.default else q
        if isinstance(q.format, type(presets.NVFP4.format)):
            right = q
        xs, ws = hop.quantize(q, torch.randn(3, 5, 40)), hop.quantize(right, torch.randn(*shape))
        many = hop.quantize(q if op is aten.linear.default else presets.INT8_ROW, torch.randn(3, *shape))

        def f(x: Tensor, w: Tensor) -> Tensor:
            return hop.scaled(op, torch.float32, x, w)

        got = torch.func.vmap(f, in_dims=(0, None))(xs, ws)
        want = torch.stack([f(xs[i], ws) for i in range(3)])
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5) if q is presets.NVFP4_ROW else torch.equal(got, want)
        if op is aten.linear.default:
            got = torch.func.vmap(f)(xs, many)
            assert torch.equal(got, torch.stack([f(xs[i], many[i]) for i in range(3)]))

    def test_vmap_to_quantized(self):
        xs, w = (
            hop.quantize(presets.INT8_ROW, torch.randn(3, 5, 40)),
            hop.quantize(presets.INT8_ROW, torch.randn(7, 40)),
        )

        def f(x: Tensor) -> Tensor:
            return hop.dequantize(hop.scaled(LINEAR, presets.INT8_TENSOR, x, w))

        assert torch.equal(torch.func.vmap(f)(xs), torch.stack([f(xs[i]) for i in range(3)]))

    def test_vmap_over_a_shared_block_is_refused(self):
        tiles = hop.quantize(Quantizer(INT8, (2, 2, -1)), torch.randn(4, 4, 8))
        with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="shares blocks"):
            warnings.simplefilter("ignore")  # of the part that would be plain
            torch.func.vmap(lambda x: hop.scaled(aten.relu.default, torch.float32, x))(tiles)
        w = hop.quantize(presets.INT8_ROW, torch.randn(3, 8))
        got = torch.func.vmap(lambda x: hop.scaled(LINEAR, torch.float32, x, w))(tiles)  # members need no cutting
        assert torch.equal(got, hop.scaled(LINEAR, torch.float32, tiles, w))

    def test_gradients_of_everything(self):
        """Through two quantized layers, to the floats, the biases and the scales: those of fake quantization."""
        torch.manual_seed(0)
        static = presets.INT8_TENSOR_STATIC_AFFINE
        tensors = [torch.randn(6, 40), torch.randn(8, 40), torch.randn(8), torch.randn(3, 8), torch.randn(3)]
        given = [torch.tensor(0.25), torch.tensor(4.0)]

        def ours(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, s: Any, z: Any) -> Tensor:
            lhs, rhs = hop.quantize(presets.INT8_ROW, x), hop.quantize(presets.INT8_ROW, w1)
            h = hop.scaled(LINEAR, static, lhs, rhs, b1, output_scale=s, output_zero_point=z)
            return hop.scaled(LINEAR, torch.float32, h, hop.quantize(presets.INT8_ROW, w2), b2)

        def fake(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, s: Any, z: Any) -> Tensor:
            linear, row = torch.nn.functional.linear, presets.INT8_ROW
            h = linear(hop.fake_quantize(row, x), hop.fake_quantize(row, w1), b1)
            h = hop.fake_quantize(static, h, scale=s, zero_point=z)
            return linear(h, hop.fake_quantize(row, w2), b2)

        def grads(f: Any) -> list[Tensor]:
            inputs = [t.clone().requires_grad_() for t in (*tensors, *given)]
            f(*inputs).square().sum().backward()
            return [t.grad for t in inputs]  # type: ignore[misc]

        program = torch.compile(ours, backend="aot_eager", fullgraph=True)
        for got in (grads(ours), grads(program)):
            for g, w in zip(got, grads(fake), strict=True):
                torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3 * float(w.abs().max()))

    def test_gradient_stops_at_a_fused_activation(self):
        q = Quantizer(INT8, scale=Static(requantize=FixedPoint(low=0.0)))
        x = torch.tensor([[-3.0, 1.0, 2.0]], requires_grad=True)
        eye = hop.quantize(presets.INT8_ROW, torch.eye(3))
        out = hop.scaled(LINEAR, q, hop.quantize(presets.INT8_ROW, x), eye, output_scale=torch.tensor(0.5))
        hop.dequantize(out).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[0.0, 1.0, 1.0]]

    def test_autocast_changes_nothing(self):
        x, w = (hop.quantize(presets.FP8_ROW, torch.randn(*s)) for s in ((5, 40), (7, 40)))
        want = hop.scaled(LINEAR, torch.float32, x, w)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(hop.scaled(LINEAR, torch.float32, x, w), want)
            half = hop.scaled(LINEAR, torch.bfloat16, x, w)
        assert torch.equal(half, hop.scaled(LINEAR, torch.bfloat16, x, w))


class Layer(torch.nn.Module):
    """A linear layer whose weight is a quantized parameter."""

    def __init__(self, weight: Quantizer, activations: Quantizer) -> None:
        super().__init__()
        packed = hop.pack(hop.quantize(weight, torch.randn(7, 40)))
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        return hop.scaled(LINEAR, torch.bfloat16, hop.quantize(self.activations, x), self.weight)


class TestModules(unittest.TestCase):
    @parameterized.expand(
        [
            ("int8", presets.INT8_ROW, presets.INT8_ROW_AFFINE),
            ("w4", presets.INT4_32, presets.INT8_ROW),
            ("fp8", presets.FP8_ROW, presets.FP8_ROW),
            ("nvfp4", presets.NVFP4, presets.NVFP4),
        ]
    )
    @pytest.mark.full
    def test_saved_exported_and_loaded(self, _name, weight, activations):
        layer, x = Layer(weight, activations).eval(), torch.randn(5, 40)
        want = layer(x)
        read = read_back(layer.state_dict(), weights_only=True)
        other = Layer(weight, activations).eval()
        other.load_state_dict(read)
        assert torch.equal(other(x), want)
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
        loaded = reloaded(program).module()
        assert torch.equal(loaded(x), want)
        more = torch.randn(9, 40)
        assert torch.equal(loaded(more), layer(more))
        low = program.run_decompositions(hop.decompositions()).module()(x)
        if activations.format is INT8:
            assert torch.equal(low, want)
        else:
            torch.testing.assert_close(low, want, rtol=2**-6, atol=1e-2)

    def test_threads(self):
        """Several threads at once, and any number of threads of one call: the same bits."""
        x, w = (
            hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(64, 256)),
            hop.quantize(presets.INT8_ROW, torch.randn(96, 256)),
        )
        want = hop.scaled(LINEAR, torch.float32, x, w)
        got: list[Tensor] = []
        workers = [
            threading.Thread(target=lambda: got.append(hop.scaled(LINEAR, torch.float32, x, w))) for _ in range(4)
        ]
        for t in workers:
            t.start()
        for t in workers:
            t.join()
        before = torch.get_num_threads()
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            got.append(hop.scaled(LINEAR, torch.float32, x, w))
        torch.set_num_threads(before)
        assert len(got) == 7 and all(torch.equal(y, want) for y in got)


class TestExplain(unittest.TestCase):
    def test_names_who_was_asked_and_why_not(self):
        x, w = (hop.quantize(presets.INT8_ROW, torch.randn(*s)) for s in ((5, 40), (7, 40)))
        with native.use("off"):
            lines = hop.explain(LINEAR, torch.bfloat16, x, w).splitlines()
            assert lines[0].startswith("native product: ") and lines[-1] == "integer product: chosen"
        if native.library().missing is None:
            assert hop.explain(LINEAR, torch.bfloat16, x, w) == "native product: chosen"
        lines = hop.explain(LINEAR, torch.float32, torch.randn(5, 40).double(), w).splitlines()
        assert "integer product: for two integer operands" in lines
        assert lines[-1] == "reference: chosen" and len(lines) == len(kernels.TABLE) + 1
        assert hop.explain(aten.relu.default, presets.INT8_ROW, x).endswith("reference: chosen")

    def test_every_case_is_explained(self):
        for o in SCALED:
            lines = o.explained().splitlines()
            assert lines[-1].endswith(": chosen") and all(not line.endswith(": chosen") for line in lines[:-1]), o.name

    def test_the_operator_explains_the_same(self):
        x, w = (hop.quantize(presets.FP8_ROW, torch.randn(*s)) for s in ((5, 40), (7, 40)))
        assert hop.explain(LINEAR, torch.bfloat16, x, w) == scaled_operator.explain(
            LINEAR, torch.bfloat16, None, None, x, w
        )
