"""Programs in ExecuTorch's runtime: the integers of eager mode, from the portable kernels; and what is refused."""

import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.export import lower, to_executorch
from hop.export.rewrite.folding import fold_constants
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP, Division, FloatMultiplier, Requantization
from hop.numerics.scale_rules import Static
from tests.support.executorch_support import MARKS, SUPPORT, table
from tests.support.vulkan_models import quantized

pytestmark = MARKS
aten = torch.ops.aten
LINEAR = aten.linear.default
STATIC = presets.INT8_TENSOR_STATIC_AFFINE


class Calls(nn.Module):
    """A function of a module and its inputs, and the tensors that it reads."""

    def __init__(self, function: Any, **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, t in tensors.items():
            held = nn.Parameter(t, requires_grad=False) if isinstance(t, hop.QuantizedTensor) else nn.Buffer(t)
            setattr(self, name, held)
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def run(manager: Any, *inputs: Tensor) -> Tensor:
    """What the runtime gives."""
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(manager.buffer).load_method("forward")
    return method.execute(inputs)[0].clone()


def check(module: nn.Module, *inputs: Tensor) -> None:
    want = module(*inputs)
    got = run(to_executorch(torch.export.export(module, inputs)), *inputs)
    assert got.dtype == want.dtype and torch.equal(got, want)


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def linear(activations: Quantizer | None, weight: Quantizer) -> tuple[Calls, Tensor]:
    def f(m: Any, x: Tensor) -> Tensor:
        x = x if activations is None else hop.quantize(activations, x)
        return hop.scaled(LINEAR, torch.float32, x, m.weight, m.bias)

    return Calls(f, weight=hop.quantize(weight, torch.randn(16, 64) / 4), bias=torch.randn(16)), torch.randn(5, 64)


def rules(rule: Requantization) -> dict[float | None, Quantizer]:
    return {low: Quantizer(INT8, scale=Static(affine=True, requantize=replace(rule, low=low))) for low in (None, 0.0)}


def scales() -> dict[str, Tensor]:
    made = {f"s{i}": torch.tensor(s) for i, s in enumerate((2**-5, 2**-5, 2**-6, 2**-5))}
    return made | {f"z{i}": torch.tensor(z, dtype=torch.int8) for i, z in enumerate((3, -100, 7, -2))}


def at(m: Any, i: int) -> dict[str, Tensor]:
    return {"output_scale": getattr(m, f"s{i}"), "output_zero_point": getattr(m, f"z{i}")}


def perceptron(rule: Requantization) -> Calls:
    """Two linear layers with a relu between, and a residual."""
    q = rules(rule)

    def f(m: Any, x: Tensor) -> Tensor:
        x = hop.quantize(STATIC, x, scale=m.s0, zero_point=m.z0)
        h = hop.scaled(LINEAR, q[0.0], x, m.w1, m.b1, **at(m, 1))
        h = hop.scaled(LINEAR, q[None], h, m.w2, m.b2, **at(m, 2))
        return hop.dequantize(hop.scaled(aten.add.Tensor, STATIC, h, x, **at(m, 3)))

    w1, w2 = (hop.quantize(presets.INT8_ROW, torch.randn(s) * 0.3) for s in ((16, 24), (24, 16)))
    return Calls(f, w1=w1, w2=w2, b1=torch.randn(16), b2=torch.randint(-500, 500, (24,), dtype=torch.int32), **scales())


def convolutional(rule: Requantization) -> Calls:
    """Convolutions with padding, stride and groups, both poolings between integers, and a linear layer."""
    q = rules(rule)

    def f(m: Any, x: Tensor) -> Tensor:
        x = hop.quantize(STATIC, x, scale=m.s0, zero_point=m.z0)
        h = hop.scaled(aten.conv2d.default, q[0.0], x, m.w1, m.b1, [1, 1], [1, 1], **at(m, 1))
        h = hop.scaled(aten.max_pool2d.default, q[None], h, [3, 3], [1, 1], [1, 1], **at(m, 1))
        h = hop.scaled(aten.conv2d.default, q[None], h, m.w2, m.b2, [2, 2], [1, 1], [1, 1], 2, **at(m, 2))
        h = hop.scaled(aten.avg_pool2d.default, STATIC, h, [2, 2], [1, 1], **at(m, 2))
        h = hop.scaled(aten.flatten.using_ints, q[None], h, 1, **at(m, 2))
        return hop.dequantize(hop.scaled(LINEAR, q[None], h, m.w3, **at(m, 3)))

    w1, w2 = (hop.quantize(presets.INT8_CONV, torch.randn(s) * 0.3) for s in ((4, 2, 3, 3), (8, 2, 3, 3)))
    w3 = hop.quantize(presets.INT8_ROW, torch.randn(5, 72))
    return Calls(f, w1=w1, w2=w2, w3=w3, b1=torch.randn(4), b2=torch.randn(8), **scales())


class TestIntegers(unittest.TestCase):
    @parameterized.expand(
        [
            ("linear", LINEAR, [(5, 40), (7, 40)]),
            ("mm", aten.mm.default, [(5, 40), (40, 7)]),
            ("bmm", aten.bmm.default, [(2, 5, 40), (2, 40, 7)]),
        ]
    )
    @pytest.mark.full
    def test_out_dtype(self, _name, op, shapes):
        check(Calls(lambda m, *x: hop.out_dtype(op, torch.int32, *x)), *map(codes_of, shapes))

    @pytest.mark.full
    def test_out_dtype_convolution(self):
        def f(m: Any, x: Tensor, w: Tensor) -> Tensor:
            return hop.out_dtype(aten.conv2d.default, torch.int32, x, w, None, [2, 1], [1, 1], [1, 1], 2)

        check(Calls(f), codes(2, 4, 9, 9), codes(6, 2, 3, 3))

    @parameterized.expand(
        [
            ("int8_rows", presets.INT8_ROW_AFFINE, presets.INT8_ROW),
            ("8da4w", presets.INT8_ROW_AFFINE, presets.INT4_32),
            ("ternary", presets.INT8_ROW, presets.TERNARY_ROW),
            ("uint4", presets.INT8_TENSOR, presets.UINT4_32_AFFINE),
        ]
    )
    @pytest.mark.full
    def test_dynamic_linear(self, _name, activations, weight):
        module, x = linear(activations, weight)
        check(module, x)

    @pytest.mark.full
    def test_dynamic_batch(self):
        """Of one linear layer, dynamic activations."""
        module, x = linear(presets.INT8_ROW_AFFINE, presets.INT8_ROW)
        program = torch.export.export(module, (x,), dynamic_shapes=(({0: torch.export.Dim("rows", min=1, max=64)},),))
        manager = to_executorch(program)
        for rows in (1, 5, 64):
            x = torch.randn(rows, 64)
            assert torch.equal(run(manager, x), module(x))

    @parameterized.expand([("division", Division()), ("float", FloatMultiplier()), ("gemmlowp", GEMMLOWP)])
    @pytest.mark.full
    def test_perceptron(self, _name, rule):
        module = perceptron(rule)
        rows = torch.export.Dim("rows", min=1, max=64)
        program = torch.export.export(module, (torch.randn(6, 24),), dynamic_shapes=(({0: rows},),))
        manager = to_executorch(program)
        for n in (1, 6, 64):
            x = torch.randn(n, 24) * 1.5  # some of it beyond the codes
            got, want = run(manager, x), module(x)
            assert torch.equal(got, want) and want.unique().numel() > 10

    @parameterized.expand([("division", Division()), ("float", FloatMultiplier())])
    @pytest.mark.full
    def test_convolutional(self, _name, rule):
        check(convolutional(rule), torch.randn(3, 2, 8, 8) * 1.5)

    @parameterized.expand([("int8", presets.INT8_ROW), ("int4", presets.INT4_32)])
    @pytest.mark.full
    def test_embedding(self, _name, q):
        def f(m: Any, i: Tensor) -> Tensor:
            return hop.scaled(aten.embedding.default, torch.float32, m.weight, i)

        table = hop.quantize(q, torch.randn(10, 64))
        for weight in (table, hop.pack(table, hop.layouts.Tiled())):
            check(Calls(f, weight=weight), torch.tensor([[1, 2], [9, 0]]))

    @pytest.mark.full
    def test_weight_only(self):
        """Sums of floats, in an order of the kernel's own: within the bound of the page on scaled."""
        module, x = linear(None, presets.INT4_32)
        weight = hop.quantize_weight(presets.INT4_32, torch.randn(16, 64) / 4, signed=True)
        assert bool((weight.buffers()["scale"] < 0).any())
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        got, want = run(to_executorch(torch.export.export(module, (x,))), x), module(x)
        bound = (64 + 8) * 2**-24 * (x.abs() @ hop.dequantize(module.weight).abs().t() + module.bias.abs())
        assert ((got - want).abs() <= 2 * bound).all()


def codes_of(shape: tuple[int, ...]) -> Tensor:
    return codes(*shape)


class TestPresets(unittest.TestCase):
    @parameterized.expand([(name,) for name in SUPPORT])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_quantized_there(self, name):
        """quantize and dequantize of each preset: equal, or refused, as the table of the page says."""
        q = presets.PRESETS[name]
        given: dict[str, Tensor] = {}
        if isinstance(q.scale, Static):
            given = {"scale": torch.tensor(0.05)}
            if q.scale.affine:
                given["zero_point"] = torch.tensor(3, dtype=q.format.dtype)

        def f(m: Any, x: Tensor) -> Tensor:
            return hop.dequantize(hop.quantize(q, x, **{k: getattr(m, k) for k in given}))

        module, x = Calls(f, **given), torch.randn(4, 256) * 1.5
        if SUPPORT[name] == "equal":
            check(module, x)
        else:
            with pytest.raises(TypeError, match="float8"):
                to_executorch(torch.export.export(module, (x,)))

    def test_page_has_the_table(self):
        from pathlib import Path

        page = Path(__file__).parents[2] / "docs/export_executorch.md"
        assert table() in page.read_text()


class TestRefused(unittest.TestCase):
    @parameterized.expand([(name,) for name in ("FP8_ROW", "MXFP8", "NVFP4")])
    @pytest.mark.quick(3)
    def test_floats_of_8_bits(self, name):
        module, x = linear(None, presets.PRESETS[name])
        with pytest.raises(TypeError, match=r"weight.*float8_e4m3fn, for which ExecuTorch has no kernels"):
            to_executorch(torch.export.export(module, (x,)))


class TestXnnpack(unittest.TestCase):
    @pytest.mark.full
    def test_4w_is_refused(self):
        """Since XNNPACK leaves out the scales. Where it does no more, the refusal can go."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        model, x = quantized(nn.Sequential(nn.Linear(64, 32, bias=False)).eval(), "4w"), torch.randn(3, 64)
        program = torch.export.export(model, (x,))
        with pytest.raises(
            NotImplementedError, match=r"node 'linear'.*only its weight quantized.*leave XnnpackPartitioner out"
        ):
            to_executorch(program, partitioners=[XnnpackPartitioner()])
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        got, want = run(edge.to_executorch(), x), model(x)
        assert (got - want).abs().max() > 10 * want.abs().max()

    @pytest.mark.full
    def test_8da4w_is_right(self):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        model, x = quantized(nn.Sequential(nn.Linear(64, 32, bias=False)).eval(), "8da4w"), torch.randn(3, 64)
        made = to_executorch(torch.export.export(model, (x,)), partitioners=[XnnpackPartitioner()])
        assert (run(made, x) - model(x)).abs().max() < 0.02 * model(x).abs().max()

    @pytest.mark.full
    def test_transposed_convolution_in_groups(self):
        """Its quantized and dequantized tensors have four dimensions, within the six of XNNPACK."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        module, x = (
            convolution(aten.conv_transpose2d.input, (4, 3, 3, 3), [1, 1], [0, 0], [0, 0], 2),
            torch.randn(1, 4, 6, 6),
        )
        made = to_executorch(torch.export.export(module, (x,)), partitioners=[XnnpackPartitioner()])
        assert torch.equal(run(made, x), module(x))
        check(module, x)

    @pytest.mark.full
    def test_three_dimensions(self):
        """The portable kernels compute them as integer products; they have no float ones, and XNNPACK has none."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        module, x = convolution(aten.conv3d.default, (4, 3, 3, 3, 3)), torch.randn(1, 3, 6, 6, 6)
        program = torch.export.export(module, (x,))
        assert torch.equal(run(to_executorch(program), x), module(x))
        with pytest.raises(NotImplementedError, match=r"three-dimensional convolution.*leave its partitioner out"):
            to_executorch(program, partitioners=(XnnpackPartitioner(),))
        with pytest.raises(NotImplementedError, match=r"three-dimensional convolution.*quantize it"):
            to_executorch(torch.export.export(nn.Conv3d(3, 4, 3), (x,)))


def convolution(op: Any, shape: tuple[int, ...], *options: Any) -> Calls:
    """Of int8, with a scale for each of its output channels."""
    static = Quantizer(INT8, scale=Static())
    block = [-1] * len(shape)
    block[op is aten.conv_transpose2d.input] = 1

    def f(m: Any, x: Tensor) -> Tensor:
        t = hop.quantize(static, x, scale=torch.tensor(0.02))
        return hop.dequantize(hop.scaled(op, static, t, m.weight, None, *options, output_scale=torch.tensor(0.03)))

    return Calls(f, weight=hop.quantize(Quantizer(INT8, block=tuple(block)), torch.randn(shape)))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(self.second(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:.*is an Enum subclass:UserWarning")
class TestXnnpackPictures(unittest.TestCase):
    """Tensors of four dimensions, quantized and dequantized by our decompositions: XNNPACK takes no more than six."""

    @pytest.mark.full
    def test_convolutions_of_pt2e(self):
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        x = torch.randn(2, 3, 12, 12)
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(torch.export.export(Pictures().eval(), (x,)).module(), quantizer)
        prepared(x)
        program = torch.export.export(convert_pt2e(prepared), (x,))
        integers = hop.export.to_integer(program).program
        ndims = [v.dim() for n in lower(integers).graph.nodes if isinstance(v := n.meta.get("val"), Tensor)]
        assert max(ndims) == 4
        with torch.no_grad():
            got = run(to_executorch(integers, partitioners=[XnnpackPartitioner()]), x)
            want = integers.module()(x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class TestFolded(unittest.TestCase):
    @pytest.mark.full
    def test_requantization_is_computed_once(self):
        module, x = perceptron(GEMMLOWP), torch.randn(6, 24)
        low = lower(torch.export.export(module, (x,)))
        less = fold_constants(low)
        assert torch.equal(less.module()(x), module(x))
        assert len(less.graph.nodes) < len(low.graph.nodes) / 3
        doubles = [n for n in less.graph.nodes if n.op == "call_function" and _is_double(n.meta.get("val"))]
        assert any(_is_double(n.meta.get("val")) for n in low.graph.nodes) and not doubles

    @pytest.mark.full
    def test_large_weights_stay_as_they_are(self):
        def f(m: Any, x: Tensor) -> Tensor:
            return hop.out_dtype(LINEAR, torch.int32, x, m.weight)

        for rows, kept in ((64, False), (1024, True)):
            program = lower(torch.export.export(Calls(f, weight=codes(rows, 64)), (codes(2, 64),)))
            less = fold_constants(program)
            x = codes(2, 64)
            assert torch.equal(less.module()(x), program.module()(x))
            held = [less.constants[t] for t in less.graph_signature.lifted_tensor_constants]
            assert all(t.dtype != torch.int32 for t in held) == kept, rows


def _is_double(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


class TestVerify(unittest.TestCase):
    """verify runs a .pte file, as a manager, bytes or a path, and compares outputs."""

    @classmethod
    def setUpClass(cls):
        torch.manual_seed(0)
        module, x = linear(presets.INT8_ROW, presets.INT8_ROW)
        rows = torch.export.Dim("rows", min=1, max=16)
        cls.program = torch.export.export(module, (x,), dynamic_shapes={"inputs": ({0: rows},)})
        cls.manager, cls.x = to_executorch(cls.program), x

    def test_equal(self):
        found = hop.export.verify(self.program, self.manager, [(self.x,), (self.x[:2],)])
        assert found.first is None and found.inputs == 2 and [row.elements for row in found.outputs] == [16 * (5 + 2)]

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "model.bin")).write_bytes(self.manager.buffer)
            for model in (self.manager.buffer, path):
                assert hop.export.verify(self.program, model, (self.x,)).first is None

    def test_other_weights(self):
        torch.manual_seed(1)
        module, x = linear(presets.INT8_ROW, presets.INT8_ROW)
        found = hop.export.verify(torch.export.export(module, (x,)), self.manager, (x,))
        want = module(x) - run(self.manager, x)
        assert found.first is not None and abs(found.outputs[0].largest - want.abs().max().item()) < 1e-5

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, r"'inputs_0' is torch.float32 of \(17, 64\), but the file's 'input_0'"):
            module, x = linear(presets.INT8_ROW, presets.INT8_ROW)
            hop.export.verify(torch.export.export(module, (x := torch.cat([x] * 4)[:17],)), self.manager, (x,))
        damaged = b"\0\0\0\0ET12" + bytes(200)
        with self.assertRaisesRegex(ValueError, "verify: ExecuTorch does not accept model: .*; see stderr"):
            hop.export.verify(self.program, damaged, (self.x,))
        with self.assertRaisesRegex(ValueError, "verify: kernels must be 'reference' for a .pte file, got 'micro'"):
            hop.export.verify(self.program, self.manager, (self.x,), kernels="micro")
