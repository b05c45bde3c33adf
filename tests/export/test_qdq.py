"""Programs of integers as programs of quantize and dequantize: back again, and in XNNPACK."""

import unittest
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.export import ExportedProgram

import hop
from hop import presets
from hop.export import to_executorch, to_integer, to_qdq
from hop.export.rewrite import encodings
from hop.numerics.formats import INT4, INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP, Division, FloatMultiplier, Reciprocal, Requantization
from hop.numerics.scale_rules import Static
from tests.export.test_executorch import Calls, at, run
from tests.support.executorch_support import MARKS

aten = torch.ops.aten
LINEAR = aten.linear.default
RULES = [("division", Division()), ("reciprocal", Reciprocal()), ("float", FloatMultiplier())]
TORCH = Quantizer(INT8, scale=Static(affine=True, requantize=Reciprocal()))  # quantizes as torch's operators do
STEP = 0.0371  # of the last codes


def code(rule: Requantization, low: float | None = None, high: float | None = None) -> Quantizer:
    return Quantizer(INT8, scale=Static(affine=True, requantize=replace(rule, low=low, high=high)))


def scales() -> dict[str, Tensor]:
    made = {f"s{i}": torch.tensor(s) for i, s in enumerate((0.0293, 0.0217, STEP))}
    return made | {f"z{i}": torch.tensor(z, dtype=torch.int8) for i, z in enumerate((5, -100, 3))}


def weights(q: Quantizer, *shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {f"w{i}": hop.quantize(q, torch.randn(s) * 0.2) for i, s in enumerate(shapes, 1)}


def perceptron(rule: Requantization, bias: str = "float") -> Calls:
    """linear, relu, linear."""

    def f(m: Any, x: Tensor) -> Tensor:
        x = hop.quantize(TORCH, x, scale=m.s0, zero_point=m.z0)
        h = hop.scaled(LINEAR, code(rule, 0.0), x, m.w1, m.b1, **at(m, 1))
        return hop.dequantize(hop.scaled(LINEAR, code(rule), h, m.w2, m.b2, **at(m, 2)))

    b1, b2 = (
        torch.randn(n) if bias == "float" else torch.randint(-5000, 5000, (n,), dtype=torch.int32) for n in (64, 32)
    )
    return Calls(f, **weights(presets.INT8_ROW, (64, 48), (32, 64)), b1=b1, b2=b2, **scales())


def convolutional(rule: Requantization) -> Calls:
    """Convolutions with padding, stride and groups, one of them depthwise, and max_pool; relu and hardtanh."""

    def f(m: Any, x: Tensor) -> Tensor:
        x = hop.quantize(TORCH, x, scale=m.s0, zero_point=m.z0)
        conv = aten.conv2d.default
        h = hop.scaled(conv, code(rule, 0.0), x, m.w1, m.b1, [1, 1], [1, 1], **at(m, 1))
        h = hop.scaled(aten.max_pool2d.default, code(rule), h, [2, 2], [2, 2], [0, 0], **at(m, 1))
        h = hop.scaled(conv, code(rule, -2.0, 3.0), h, m.w2, m.b2, [2, 2], [1, 1], [1, 1], 4, **at(m, 2))
        return hop.dequantize(hop.scaled(conv, code(rule), h, m.w3, None, [1, 1], [1, 1], [1, 1], 8, **at(m, 2)))

    held = weights(presets.INT8_CONV, (8, 3, 3, 3), (8, 2, 3, 3), (8, 1, 3, 3))
    return Calls(f, **held, b1=torch.randn(8), b2=torch.randn(8), **scales())


def layer(
    op: Any,
    weight: Quantizer,
    shape: tuple[int, ...],
    *rest: Any,
    x: Quantizer = TORCH,
    output: Any = None,
    bias: int | None = None,
) -> Calls:
    """One operator of x, a weight, and `rest`."""
    output = code(FloatMultiplier()) if output is None else output

    def f(m: Any, values: Tensor) -> Tensor:
        given = {"scale": m.s0, "zero_point": m.z0} if isinstance(x.scale, Static) else {}
        values = hop.quantize(x, values, **given)
        factors = [m.b, values, m.w1] if op is aten.addmm.default else [values, m.w1]
        factors += [m.b] if bias and op is not aten.addmm.default else []
        if isinstance(output, torch.dtype):
            return hop.scaled(op, output, *factors, *rest)
        return hop.dequantize(hop.scaled(op, output, *factors, *rest, **at(m, 2)))

    return Calls(f, **weights(weight, shape), b=torch.randn(bias or 1), **scales())


def exported(module: Calls, *inputs: Tensor) -> ExportedProgram:
    return torch.export.export(module, inputs)


def operators(program: ExportedProgram) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


def round_trip(module: Calls, rule: Requantization, *inputs: Tensor) -> ExportedProgram:
    """The written program, which makes the integers again."""
    written = to_qdq(exported(module, *inputs))
    assert not written.report.left, written.report
    assert not any("hop" in name for name in operators(written.program))
    back = to_integer(written.program, requantize=rule)
    assert not back.report.left, back.report
    want = module(*inputs)
    assert torch.equal(back.program.module()(*inputs), want) and want.unique().numel() > 10
    floats = written.program.module()(*inputs)  # sums of floats, which may fall on the other side of a tie
    assert (floats - want).abs().max() <= 1.01 * STEP and (floats != want).double().mean() < 0.05
    return written.program


class TestBackAgain(unittest.TestCase):
    @parameterized.expand([*RULES, ("gemmlowp", GEMMLOWP)])
    @pytest.mark.full
    def test_perceptron(self, _name, rule):
        program = round_trip(perceptron(rule), rule, torch.randn(200, 48) * 1.5)
        want = {"quantize_per_tensor": 3, "dequantize_per_tensor": 3, "dequantize_per_channel": 2}
        found = operators(program)
        assert all(found[f"quantized_decomposed.{name}.default"] == n for name, n in want.items()), found
        assert found["aten.linear.default"] == 2 and found["aten.relu.default"] == 1 and found.total() == 11

    @parameterized.expand(RULES)
    @pytest.mark.full
    def test_convolutional(self, _name, rule):
        program = round_trip(convolutional(rule), rule, torch.randn(4, 3, 16, 16) * 1.5)
        found = operators(program)
        assert found["aten.hardtanh.default"] == 1 and found["aten.max_pool2d.default"] == 1

    @pytest.mark.full
    def test_bias_of_integers(self):
        round_trip(perceptron(FloatMultiplier(), "int"), FloatMultiplier(), torch.randn(200, 48) * 1.5)

    @parameterized.expand(
        [
            ("mm", aten.mm.default, presets.INT8_COLUMN, (64, 32), None),
            ("addmm", aten.addmm.default, presets.INT8_COLUMN, (64, 32), 32),
            ("tensor", LINEAR, presets.INT8_TENSOR, (32, 64), 32),
            ("int4_rows", LINEAR, Quantizer(INT4, (1, -1)), (32, 64), 32),
            ("ternary", LINEAR, presets.TERNARY_ROW, (32, 64), 32),
        ]
    )
    @pytest.mark.full
    def test_weights(self, _name, op, weight, shape, bias):
        program = round_trip(layer(op, weight, shape, bias=bias), FloatMultiplier(), torch.randn(50, 64))
        assert operators(program)["aten.linear.default"] == 1

    @pytest.mark.full
    def test_scales_that_are_inputs(self):
        def f(m: Any, x: Tensor, scale: Tensor) -> Tensor:
            x = hop.quantize(TORCH, x, scale=scale, zero_point=m.z0)
            return hop.dequantize(hop.scaled(LINEAR, code(Reciprocal()), x, m.w1, **at(m, 2)))

        module = Calls(f, **weights(presets.INT8_ROW, (32, 64)), **scales())
        program = round_trip(module, Reciprocal(), torch.randn(50, 64), torch.tensor(0.03))
        found = operators(program)
        assert found["quantized_decomposed.quantize_per_tensor.tensor"] == 1
        assert found["quantized_decomposed.dequantize_per_tensor.tensor"] == 1
        assert found["quantized_decomposed.quantize_per_tensor.default"] == 1

    def test_what_is_written_is_read(self):
        """Each encoding of a program means what it is written from."""
        program = to_qdq(exported(perceptron(Division()), torch.randn(3, 48))).program
        for node in program.graph.nodes:
            read = encodings.quantizing(node) or encodings.dequantizing(node)
            if read is not None:
                verb = "quantize" if encodings.quantizing(node) else "dequantize"
                assert encodings.operator_call(verb, read) == (node.target, node.args)

    @parameterized.expand(
        [("int4_groups", presets.INT4_32, "per_channel_group"), ("int8", presets.INT8_ROW, "channel")]
    )
    @pytest.mark.quick(2)
    def test_rows(self, _name, weight, kind):
        """Scales that are found while running: torch's operator finds the same but for roundings."""
        module = layer(LINEAR, weight, (32, 64), x=presets.INT8_ROW_AFFINE, output=torch.float32, bias=32)
        x = torch.randn(50, 64)
        written = to_qdq(exported(module, x))
        assert not written.report.left
        found = operators(written.program)
        assert found["quantized_decomposed.choose_qparams_per_token_asymmetric.default"] == 1
        assert any(kind in name for name in found)
        got, want = written.program.module()(x), module(x)
        assert (got - want).abs().max() < 0.02 * want.abs().max() and torch.allclose(got, want, atol=1e-5)


class TestLeft(unittest.TestCase):
    @parameterized.expand(
        [
            ("groups", {"weight": presets.INT4_32, "output": torch.float32}, "scales of blocks (1, 32)"),
            ("rows", {"x": presets.INT8_ROW, "output": torch.float32}, "supported rows are int8"),
        ]
    )
    @pytest.mark.quick(2)
    def test_reasons(self, _name, given, reason):
        module = layer(LINEAR, given.pop("weight", presets.INT8_ROW), (32, 64), bias=32, **given)
        x = torch.randn(5, 64)
        written = to_qdq(exported(module, x))
        assert not written.report.rewritten and reason in str(written.report)
        assert torch.equal(written.program.module()(x), module(x))

    @pytest.mark.full
    def test_negative_scales(self):
        """XNNPACK needs positive ones."""
        module = layer(LINEAR, presets.INT4_32, (32, 64), x=presets.INT8_ROW_AFFINE, output=torch.float32, bias=32)
        weight = hop.quantize_weight(presets.INT4_32, torch.randn(32, 64), signed=True)
        module.w1 = torch.nn.Parameter(weight, requires_grad=False)
        written = to_qdq(exported(module, torch.randn(5, 64)))
        assert not written.report.rewritten
        assert "a scale of its weight is not a positive, normal number" in str(written.report)

    @pytest.mark.full
    def test_floats_for_xnnpack(self):
        program = exported(layer(LINEAR, presets.INT8_ROW, (32, 64), output=torch.float32), torch.randn(5, 64))
        assert not to_qdq(program).report.left
        assert "it returns floats" in str(to_qdq(program, target="xnnpack").report)

    def test_errors(self):
        program = exported(perceptron(Division()), torch.randn(3, 48))
        with pytest.raises(ValueError, match="target must be"):
            to_qdq(program, target="vulkan")
        with pytest.raises(TypeError, match=r"must be a torch\.export\.ExportedProgram, got "):
            to_qdq(3)  # type: ignore[arg-type]


class TestXnnpack(unittest.TestCase):
    pytestmark = MARKS

    def compared(self, module: Calls, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return run(self.taken_over(exported(module, *inputs)), *inputs), module(*inputs)

    def taken_over(self, program: ExportedProgram) -> Any:
        """The program, all of it XNNPACK's."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        manager = to_executorch(program, partitioners=[XnnpackPartitioner()])
        nodes = [str(n.target) for n in manager.exported_program().graph.nodes if n.op == "call_function"]
        assert len(nodes) == 2 and nodes[0] == "executorch_call_delegate" and "getitem" in nodes[1], nodes
        return manager

    @parameterized.expand(
        [
            ("float", "float", 0),
            ("float_int_bias", "int", 0),
            ("division", "float", 0.01),
            ("reciprocal", "float", 0.01),
        ]
    )
    @pytest.mark.full
    def test_perceptron(self, name, bias, most):
        """FloatMultiplier is XNNPACK's arithmetic; the others differ by one where the sum is near a tie."""
        rule = dict(RULES)[name.split("_")[0]]
        got, want = self.compared(perceptron(rule, bias), torch.randn(5000, 48) * 1.5)
        assert (got - want).abs().max() <= 1.01 * STEP and (got != want).double().mean() <= most
        assert want.unique().numel() > 100

    @parameterized.expand([("float", FloatMultiplier(), 0), ("division", Division(), 0.02)])
    @pytest.mark.full
    def test_convolutional(self, _name, rule, most):
        got, want = self.compared(convolutional(rule), torch.randn(16, 3, 32, 32) * 1.5)
        assert (got - want).abs().max() <= 1.01 * STEP and (got != want).double().mean() <= most

    @pytest.mark.full
    def test_dynamic_batch(self):
        module = perceptron(FloatMultiplier())
        rows = torch.export.Dim("rows", min=1, max=64)
        program = torch.export.export(module, (torch.randn(5, 48),), dynamic_shapes=(({0: rows},),))
        manager = self.taken_over(program)
        for n in (1, 5, 64):
            x = torch.randn(n, 48)
            assert torch.equal(run(manager, x), module(x))

    def test_rows_of_a_dynamic_batch(self):
        """Their scales have a symbol in their shape."""
        module = layer(LINEAR, presets.INT8_ROW, (8, 16), x=presets.INT8_ROW_AFFINE, output=torch.float32)
        rows = torch.export.Dim("rows", min=2, max=64)
        program = torch.export.export(module, (torch.randn(4, 16),), dynamic_shapes=(({0: rows},),))
        written = to_qdq(program)
        assert not written.report.left
        x = torch.randn(7, 16)
        want = module(x)
        assert (written.program.module()(x) - want).abs().max() < 1e-5 * want.abs().max()

    @parameterized.expand([("exact", True), ("any", False)])
    @pytest.mark.full
    def test_int4_in_groups(self, _name, is_bfloat16):
        """XNNPACK holds the scales of groups in bfloat16."""
        module = layer(LINEAR, presets.INT4_32, (32, 64), x=presets.INT8_ROW_AFFINE, output=torch.float32, bias=32)
        if is_bfloat16:
            w: Any = module.w1
            held = w.buffers() | {"scale": w.buffers()["scale"].bfloat16().float()}
            module.w1 = torch.nn.Parameter(
                hop.QuantizedTensor(held, presets.INT4_32, (32, 64), torch.float32), requires_grad=False
            )
        got, want = self.compared(module, torch.randn(50, 64))
        error = (got - want).abs().max() / want.abs().max()
        assert error < 1e-6 if is_bfloat16 else 1e-5 < error < 2**-8

    @pytest.mark.full
    def test_floats_stay_sums_of_integers(self):
        """A static layer that gives floats is none that XNNPACK computes in integers."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        module, x = layer(LINEAR, presets.INT8_ROW, (32, 64), output=torch.float32, bias=32), torch.randn(50, 64)
        manager = to_executorch(exported(module, x), partitioners=[XnnpackPartitioner()])
        assert torch.equal(run(manager, x), module(x))
