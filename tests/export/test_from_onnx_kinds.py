"""ONNX files with packed weights, 16-bit codes, float16, products quantized at run time, and loops."""

import copy
import logging
import platform
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere onnxruntime has other kernels")

from tests.export.test_from_onnx import calls  # noqa: E402
from tests.support.onnx_models import Graph, dynamic, run  # noqa: E402

KINDS = onnx.TensorProto


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(k: int, n: int = 24) -> Any:
    """A float file: a product with a constant matrix."""
    g = Graph()
    return g.model(g.node("MatMul", g.input("x", (3, k)), g.constant(random(k, n, seed=1))))


def packed(model: Any, bits: int, symmetric: bool, block: int, operators: bool = True) -> Any:
    """A file as onnxruntime's quantizer of weights writes it, by MatMulNBits or DequantizeLinear."""
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization import matmul_nbits_quantizer as quantizers

    logging.disable(logging.WARNING)
    try:
        config = quantizers.DefaultWeightOnlyQuantConfig(
            block_size=block,
            is_symmetric=symmetric,
            accuracy_level=0,
            quant_format=QuantFormat.QOperator if operators else QuantFormat.QDQ,
            bits=bits,
        )
        quantizer = quantizers.MatMulNBitsQuantizer(copy.deepcopy(model), algo_config=config)
        quantizer.process()
    finally:
        logging.disable(logging.NOTSET)
    return quantizer.model.model


def ordered(model: Any, groups: Tensor) -> Any:
    """The file with a group for each column."""
    (node,) = model.graph.node
    result = copy.deepcopy(model)
    result.graph.node[0].input.extend([""] * (4 - len(node.input)) + ["groups"])
    result.graph.initializer.append(onnx.numpy_helper.from_array(groups.to(torch.int32).numpy(), "groups"))
    return result


class TestPackedWeights(unittest.TestCase):
    @parameterized.expand(
        [(4, True, 64, 16), (4, False, 72, 32), (4, False, 80, 16), (8, True, 72, 32), (8, False, 64, 16)]
    )
    @pytest.mark.quick(3)
    def test_product(self, bits: int, symmetric: bool, k: int, block: int) -> None:
        """Symmetric or with zero points, of which an odd number has half a byte left; blocks that are not full."""
        model = packed(product(k), bits, symmetric, block)
        assert [node.op_type for node in model.graph.node] == ["MatMulNBits"]
        program, x = hop.export.from_onnx(model), random(3, k, seed=2)
        torch.testing.assert_close(program.module()(x), run(model, x)[0], rtol=1e-5, atol=1e-4)
        assert calls(program) == ["aten.linear.default"]
        assert {b.dtype for b in program.buffers()} >= {torch.int8, torch.float32}

    @pytest.mark.full
    def test_blocks_that_are_not_full(self) -> None:
        model = packed(product(72), 4, False, 32, operators=False)
        program, x = hop.export.from_onnx(model), random(3, 72, seed=2)
        # By default onnxruntime makes it MatMulNBits with accuracy level 4, whose activations have 8 bits.
        torch.testing.assert_close(program.module()(x), run(model, x, optimized=False)[0], rtol=1e-5, atol=1e-4)

    @parameterized.expand([(64, 16), (72, 32)])
    @pytest.mark.quick(2)
    def test_groups_in_another_order(self, k: int, block: int) -> None:
        """onnxruntime's sums of columns whose groups are not next to each other (act-order)."""
        groups = (torch.arange(k) // block)[torch.randperm(k, generator=torch.Generator().manual_seed(0))]
        plain = packed(product(k), 4, True, block)
        model, x = ordered(plain, groups), random(3, k, seed=2)
        program, want = hop.export.from_onnx(model), run(model, x)[0]
        torch.testing.assert_close(program.module()(x), want, rtol=1e-5, atol=1e-4)
        assert (want - run(plain, x)[0]).abs().max() > 0.1
        assert calls(program) == ["aten.linear.default"]

    def changed(self, **attributes: Any) -> Any:
        model = packed(product(64), 4, False, 16)
        (node,) = model.graph.node
        kept = [a for a in node.attribute if a.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(n, v) for n, v in attributes.items())])
        return model

    def test_refused(self) -> None:
        for attributes, error, message in (
            ({"bits": 3}, NotImplementedError, r"node 0 com.microsoft.MatMulNBits .* bits may be 2, 4 or 8"),
            ({"K": 65}, ValueError, r"MatMulNBits .* is invalid: its codes are UINT8 with 768 elements, and must be"),
            ({"K": 2**40}, ValueError, r"MatMulNBits .* is invalid: its codes are UINT8 with 768 elements"),
            ({"N": -4}, ValueError, r"its K, N and block_size are 64, -4 and 16"),
            ({"block_size": 24}, ValueError, r"the block's size is a power of 2 from 16"),
            ({"weight_prepacked": 1}, NotImplementedError, r"weight_prepacked is 1, and only 0 is supported"),
        ):
            with pytest.raises(error, match=message):
                hop.export.from_onnx(self.changed(**attributes))
        for groups, symmetric, error, message in (
            (torch.arange(64) // 16, False, NotImplementedError, "both g_idx and zero points other than 8; quantize"),
            (torch.arange(64) // 32, True, NotImplementedError, "g_idx does not assign 16 columns to each group"),
            (torch.arange(64) // 16 - 1, True, NotImplementedError, "g_idx does not assign 16 columns to each group"),
            (torch.arange(63) // 16, True, ValueError, "g_idx is torch.int32 with 63 elements, and must be int32 with"),
        ):
            with pytest.raises(error, match=message):
                hop.export.from_onnx(ordered(packed(product(64), 4, symmetric, 16), groups))
        with pytest.raises(NotImplementedError, match="it has g_idx and 8 bits, which onnxruntime does not run"):
            hop.export.from_onnx(ordered(packed(product(64), 8, True, 16), torch.arange(64) // 16))


class TestWideCodes(unittest.TestCase):
    """Activations of 16 bits, around a product, and as input and output."""

    @parameterized.expand([("INT16", 0), ("UINT16", 2**15), ("INT16", -300), ("UINT16", 30000)])
    @pytest.mark.quick(4)
    def test_codes(self, kind: str, zero: int) -> None:
        g = Graph()
        dtype = torch.int16 if kind == "INT16" else torch.uint16

        def units(scale: float) -> tuple[str, str]:
            return g.constant(torch.tensor(scale)), g.constant(torch.tensor(zero, dtype=dtype))

        x, codes = g.input("x", (3, 16)), g.input("codes", (3, 16), getattr(KINDS, kind))
        w = g.constant(torch.randint(-64, 64, (16, 6), generator=torch.Generator().manual_seed(0)).to(torch.int8))
        w = g.node("DequantizeLinear", w, g.constant(torch.tensor(0.01)), g.constant(torch.tensor(0, dtype=torch.int8)))
        read = g.node("DequantizeLinear", g.node("QuantizeLinear", x, *units(1e-4)), *units(1e-4))
        more = g.node("DequantizeLinear", codes, *units(3e-5))
        y = g.node("QuantizeLinear", g.node("MatMul", g.node("Add", read, more), w), *units(3e-4))
        turned = g.node("Transpose", y, perm=[1, 0])
        outputs = (y, turned, g.node("DequantizeLinear", turned, *units(3e-4)))
        model = g.model(*outputs, kinds=(getattr(KINDS, kind),) * 2)
        program = hop.export.from_onnx(model)
        info = torch.iinfo(dtype)
        given = torch.randint(info.min, info.max, (3, 16), generator=torch.Generator().manual_seed(1)).to(dtype)
        own, its = program.module()(random(3, 16), given), run(model, random(3, 16), given, optimized=False)
        for a, b in zip(own, its, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            difference = (a.double() - b.double()).abs()
            step = 1 if a.dtype == dtype else 3e-4
            assert difference.max() <= 1.01 * step and (difference > 0).double().mean() < 0.06  # float sums
        assert len(own[0].to(torch.int32).unique()) > 10

    def test_product_of_codes(self) -> None:
        """uint16 codes with the zero point 2^15 are int16 codes for hop.scaled."""
        g = Graph()
        units = g.constant(torch.tensor(1e-4)), g.constant(torch.tensor(2**15, dtype=torch.uint16))
        out = g.constant(torch.tensor(3e-4)), units[1]
        w = g.constant(torch.randint(-64, 64, (16, 6), generator=torch.Generator().manual_seed(0)).to(torch.int8))
        w = g.node("DequantizeLinear", w, g.constant(torch.tensor(0.01)), g.constant(torch.tensor(0, dtype=torch.int8)))
        x = g.node("DequantizeLinear", g.node("QuantizeLinear", g.input("x", (3, 16)), *units), *units)
        y = g.node("DequantizeLinear", g.node("QuantizeLinear", g.node("MatMul", x, w), *out), *out)
        model = g.model(y)
        program = hop.export.from_onnx(model)
        assert calls(program) == ["aten.linear.default"]
        torch.testing.assert_close(
            program.module()(random(3, 16)), run(model, random(3, 16), optimized=False)[0], rtol=0, atol=3.01e-4
        )


class TestOthers(unittest.TestCase):
    def test_float16(self) -> None:
        """Scales and values of float16, which onnxruntime computes in float32."""
        g = Graph()
        scale = g.constant(torch.tensor(0.05, dtype=torch.float16))
        zero = g.constant(torch.tensor(3, dtype=torch.int8))
        x = g.input("x", (3, 16), KINDS.FLOAT16)
        codes = g.node("QuantizeLinear", x, scale, zero)
        scales = g.constant((torch.rand(16, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.01).to(torch.float16))
        by_column = g.node("DequantizeLinear", codes, scales, axis=1)
        outputs = codes, g.node("DequantizeLinear", codes, scale, zero), by_column
        model = g.model(*outputs, kinds=(KINDS.INT8, KINDS.FLOAT16, KINDS.FLOAT16))
        given = (random(3, 16) * 2).to(torch.float16)
        for a, b in zip(hop.export.from_onnx(model).module()(given), run(model, given), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)

    @parameterized.expand([("QInt8",), ("QUInt8",)])
    @pytest.mark.quick(2)
    def test_products_quantized_at_run_time(self, weights: str) -> None:
        """DynamicQuantizeMatMul, which onnxruntime's optimizer makes of files of its quantizer."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            content = dynamic(product(48), weights).SerializeToString()
            ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            model = onnx.load(options.optimized_model_filepath)
        assert [node.op_type for node in model.graph.node] == ["DynamicQuantizeMatMul"]
        program, x = hop.export.from_onnx(model), random(3, 48)
        torch.testing.assert_close(program.module()(x), run(model, x)[0], rtol=1e-5, atol=1e-5)
        assert calls(program) == ["aten.linear.default"]

    def test_loops(self) -> None:
        body = onnx.helper.make_graph([], "body", [], [])
        for op, attributes in (("Loop", {"body": body}), ("Scan", {"body": body, "num_scan_inputs": 1})):
            g = Graph()
            model = g.model(g.node(op, "", "", g.input("x", (3,)), **attributes))
            with pytest.raises(NotImplementedError, match=rf"node 0 {op} '\w+' runs its body as often .* unroll it"):
                hop.export.from_onnx(model)
