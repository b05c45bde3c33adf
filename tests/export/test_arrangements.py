"""Quantized tensors wherever a module can have them: exported, saved, loaded, lowered and packaged."""

import io
import itertools
import unittest
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets

aten = torch.ops.aten
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


def weight(packed: bool) -> Any:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    return hop.pack(hop.quantize(presets.INT4_32, w)) if packed else hop.quantize(presets.INT8_ROW, w)


class Products(nn.Module):
    """The sum of products of x with the weights that `weights` finds."""

    def __init__(self, weights: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        results = [hop.scaled(aten.linear.default, torch.float32, x, w) for w in self.weights(self)]
        return torch.stack(results).sum(0)


def parameter(w: Any, trains: bool = False) -> Any:
    return nn.Parameter(w, requires_grad=trains)


def arranged(how: str, w: Any) -> nn.Module:
    if how == "constant":
        return Products(lambda m: [w])
    if how in ("list", "dict"):
        model: Any = Products((lambda m: m.ws) if how == "list" else lambda m: [m.ws["a"]])
        model.ws = [w, w.clone()] if how == "list" else {"a": w}
        return model
    if how == "parameters":
        model = Products(lambda m: list(m.ws))
        model.ws = nn.ParameterList([parameter(w)])
        return model
    if how == "submodule":
        model = Products(lambda m: [m.inner.w])
        model.inner = nn.Module()
        model.inner.w = parameter(w)
        return model
    if how == "tied":
        model = Products(lambda m: [m.w, m.other])
        model.other = model.w = parameter(w)
        return model
    model = Products(lambda m: [m.w])
    if how in ("buffer", "unsaved buffer"):
        model.register_buffer("w", w, persistent=how == "buffer")
    else:
        model.w = {"parameter": parameter, "trained": lambda w: parameter(w, True), "attribute": lambda w: w}[how](w)
    return model


ARRANGEMENTS = (
    *("parameter", "trained", "buffer", "unsaved buffer", "attribute", "list", "dict", "parameters", "submodule"),
    *("tied", "constant"),
)


def copied(program: Any) -> Any:
    """The program after it was saved and loaded."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


class TestArrangements(unittest.TestCase):
    @parameterized.expand(list(itertools.product(ARRANGEMENTS, ("plain", "packed"), ("strict", "traced"))))
    @pytest.mark.quick(24)
    def test_every_stage(self, how, form, mode):
        """Exported, saved and loaded, lowered, and that saved and loaded: each gives the results of eager mode."""
        model = arranged(how, weight(form == "packed")).eval()
        with torch.no_grad():
            want = model(X)
        program = torch.export.export(model, (X,), strict=mode == "strict")
        keys = set(program.state_dict)
        lowered = program.run_decompositions(hop.decompositions())
        assert set(program.state_dict) == keys  # as it was
        for stage in (program, copied(program)):
            assert torch.equal(stage.module()(X).detach(), want)
        for stage in (lowered, copied(lowered)):
            torch.testing.assert_close(stage.module()(X).detach(), want, rtol=1e-5, atol=1e-5)
        assert all(not node.op.startswith("get") for node in lowered.graph.nodes)

    @pytest.mark.full
    def test_package(self):
        """All of them in one program of AOTInductor, which takes a minute to compile, also with codes in and out."""
        model = Every().eval()
        codes = torch.randint(-128, 128, (3, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
        with TemporaryDirectory() as folder, torch.no_grad():
            program = copied(torch.export.export(model, (X, codes)))
            path = str(Path(folder) / "model.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            found, want = torch._inductor.aoti_load_package(path)(X, codes), model(X, codes)
            assert len(found) == len(want) == 2 * len(ARRANGEMENTS) + 2
            for y, expected in zip(found, want, strict=True):
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


class Every(nn.Module):
    """All arrangements, plain and packed, and codes from outside."""

    def __init__(self) -> None:
        super().__init__()
        each = itertools.product(ARRANGEMENTS, (False, True))
        self.each = nn.ModuleList([arranged(how, weight(packed)) for how, packed in each])
        self.weight = parameter(weight(False))

    def forward(self, x: Tensor, codes: Tensor) -> list[Tensor]:
        static = presets.INT8_TENSOR_STATIC_AFFINE
        y = hop.scaled(aten.linear.default, torch.float32, hop.from_codes(static, codes, 0.1, 3), self.weight)
        return [*(m(x) for m in self.each), y, hop.quantize(static, x, scale=0.1, zero_point=3).codes]


class TestZeroPoints(unittest.TestCase):
    @parameterized.expand([(torch.uint8,), (torch.int16,), (torch.int32,), (torch.int64,), (torch.float32,)])
    @pytest.mark.quick(5)
    def test_dtypes(self, dtype):
        """Zero points of any integer dtype give the codes of those of the format's, eager and lowered."""
        static, w = presets.INT8_TENSOR_STATIC_AFFINE, weight(False)

        class Linear(nn.Module):
            def forward(self, x: Tensor, zero_point: Tensor) -> Tensor:
                given = {"output_scale": torch.tensor(0.1), "output_zero_point": zero_point}
                return hop.scaled(aten.linear.default, static, hop.quantize(presets.INT8_ROW, x), w, **given).codes

        want = Linear()(X, torch.tensor(3, dtype=torch.int8))
        args = (X, torch.tensor(3, dtype=dtype))
        lowered = torch.export.export(Linear(), args).run_decompositions(hop.decompositions()).module()
        assert torch.equal(Linear()(*args), want) and torch.equal(lowered(*args), want)
        if not dtype.is_floating_point:
            with pytest.raises(ValueError, match="output_zero_point must be a code of int8, from -128 to 127; got 200"):
                Linear()(X, torch.tensor(200, dtype=dtype))


class Dequantizes(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return hop.dequantize(x)


class Quantizes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return hop.quantize(presets.INT8_ROW, x)


class TestSignatures(unittest.TestCase):
    @parameterized.expand([(True,), (False,)])
    @pytest.mark.quick(2)
    def test_inputs_and_outputs(self, strict):
        """Lowering refuses quantized inputs and names the remedy; quantized outputs become their buffers."""
        q = hop.quantize(presets.INT8_ROW, X)
        program = torch.export.export(Dequantizes(), (q,), strict=strict)
        assert torch.equal(program.module()(q), hop.dequantize(q))
        with pytest.raises(TypeError, match=r"the input 'x' .* QuantizedTensor, .*make the tensor .* hop\.from_codes"):
            program.run_decompositions(hop.decompositions())
        program = torch.export.export(Quantizes(), (X,), strict=strict)
        assert torch.equal(program.module()(X).codes, q.codes)
        lowered = program.run_decompositions(hop.decompositions())
        outputs: Any = lowered.graph.output_node().args[0]
        assert [node.meta["val"].dtype for node in outputs] == [torch.int8, torch.float32]

    @parameterized.expand(list(itertools.product(("from_codes", "create_tensor"), (True, False))))
    @pytest.mark.quick(4)
    def test_codes_in_codes_out(self, how, strict):
        """The remedy: codes as input and output, with either way to make a tensor of them."""
        static = presets.INT8_TENSOR_STATIC_AFFINE

        class Linear(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Buffer(torch.tensor([[0.1]]))
                self.zero_point = nn.Buffer(torch.tensor([[3]], dtype=torch.int8))
                self.weight = nn.Parameter(weight(False), requires_grad=False)

            def forward(self, codes: Tensor) -> Tensor:
                if how == "from_codes":
                    x: Any = hop.from_codes(static, codes, self.scale, self.zero_point)
                else:
                    proto = hop.TensorProto(codes.shape, torch.float32, quantizer=static)
                    x = proto.create_tensor([codes, self.scale, self.zero_point])
                given = {"output_scale": self.scale, "output_zero_point": self.zero_point}
                return hop.scaled(aten.linear.default, static, x, self.weight, **given).codes

        codes = torch.randint(-128, 128, (4, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
        want = Linear()(codes)
        program = torch.export.export(Linear(), (codes,), strict=strict)
        for stage in (program, copied(program), program.run_decompositions(hop.decompositions())):
            assert torch.equal(stage.module()(codes), want)
