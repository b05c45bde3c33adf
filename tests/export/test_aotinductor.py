"""Programs compiled ahead of time by AOTInductor, run in a process that has not imported the library."""

import functools
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.kernels.cpu import native
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP, FloatMultiplier, Requantization
from hop.numerics.scale_rules import Static

aten = torch.ops.aten
STATIC = presets.INT8_TENSOR_STATIC_AFFINE


def static(rule: Requantization) -> Quantizer:
    return Quantizer(INT8, scale=Static(affine=True, requantize=rule))


class Chain(nn.Module):
    """Scales and zero points of a chain of integer layers."""

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        for name, w in weights.items():
            setattr(self, name, nn.Parameter(w, requires_grad=False))
        self.scales = nn.Buffer(torch.tensor([0.03, 0.02, 0.03, 0.05]))
        self.zeros = nn.Buffer(torch.tensor([3, -128, 0, 5], dtype=torch.int8))

    def at(self) -> list[dict[str, Tensor]]:
        pairs = zip(self.scales.unbind(), self.zeros.unbind(), strict=True)
        return [{"output_scale": s, "output_zero_point": z} for s, z in pairs]

    def quantized(self, x: Tensor) -> Tensor:
        return hop.quantize(STATIC, x, scale=self.scales[0], zero_point=self.zeros[0])


class Perceptron(Chain):
    def __init__(self, rule: Requantization) -> None:
        super().__init__(
            first=hop.quantize(presets.INT8_ROW, torch.randn(32, 64) / 8),
            second=hop.quantize(presets.INT8_ROW, torch.randn(16, 32) / 6),
        )
        self.bias = nn.Buffer(torch.randint(-500, 500, (32,), dtype=torch.int32))
        self.rule = rule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at = self.at()
        h = hop.scaled(aten.linear.default, static(self.rule), self.quantized(x), self.first, self.bias, **at[1])
        y = hop.scaled(aten.linear.default, static(self.rule), h, self.second, **at[2])
        return y.codes, hop.dequantize(y)


class Net(Chain):
    def __init__(self) -> None:
        super().__init__(
            first=hop.quantize(presets.INT8_CONV, torch.randn(8, 4, 3, 3) / 6),
            second=hop.quantize(presets.INT8_CONV, torch.randn(6, 4, 3, 3) / 6),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at, conv = self.at(), aten.conv2d.default
        h = hop.scaled(
            conv, static(FloatMultiplier(low=0.0)), self.quantized(x), self.first, None, [1, 1], [1, 1], **at[1]
        )
        h = hop.scaled(aten.max_pool2d.default, static(FloatMultiplier()), h, [2, 2], **at[1])
        h = hop.scaled(conv, static(FloatMultiplier()), h, self.second, None, [2, 1], [1, 1], [1, 1], 2, **at[2])
        y = hop.scaled(aten.avg_pool2d.default, STATIC, h, [2, 2], **at[3])
        return y.codes, hop.dequantize(y)


class Dynamic(Chain):
    """int8 rows with zero points, times int4 groups; the integers that it multiplies, and its result."""

    def __init__(self) -> None:
        super().__init__(weight=hop.quantize(presets.INT4_32, torch.randn(24, 64)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = hop.quantize(presets.INT8_ROW_AFFINE, x)
        return codes.codes, hop.scaled(aten.linear.default, torch.float32, codes, self.weight)


class Packed(nn.Module):
    """Weights in tiles: fp8, int4 under activations of int8, and under plain bfloat16 and float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        for name, q in (("fp8", presets.FP8_ROW), ("int4", presets.INT4_32), ("mx", presets.MXFP8)):
            packed = hop.pack(hop.quantize(q, torch.randn(40, 64) / 8))
            setattr(self, name, nn.Parameter(packed, requires_grad=False))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        linear, codes = aten.linear.default, hop.quantize(presets.INT8_ROW_AFFINE, x)
        return (
            codes.codes,
            hop.scaled(linear, torch.bfloat16, hop.quantize(presets.FP8_ROW, x), self.fp8),
            hop.scaled(linear, torch.float32, codes, self.int4),
            hop.scaled(linear, torch.bfloat16, x.bfloat16(), self.int4),
            hop.scaled(linear, torch.float32, x, self.int4),
            hop.scaled(linear, torch.bfloat16, hop.quantize(presets.MXFP8, x), self.mx),
        )


MODELS = {
    "perceptron": (functools.partial(Perceptron, FloatMultiplier()), (64,)),
    "fixed_point": (functools.partial(Perceptron, GEMMLOWP), (64,)),
    "net": (Net, (4, 12, 12)),
    "8da4w": (Dynamic, (64,)),
}


class All(nn.Module):
    """Models as one program: most of a package's minutes are those of its own C++, whatever is in it."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [y for model, x in zip(self.models, inputs, strict=True) for y in model(x)]


# What a process does that has packages, inputs, and PyTorch alone.
RUN = """
import sys, torch
batches, library, *paths, results = sys.argv[1:]
if library:
    torch.ops.load_library(library)
packages = [torch._inductor.aoti_load_package(path) for path in paths]
torch.save([[list(package(*x)) for x in torch.load(batches)] for package in packages], results)
print("hop" in sys.modules)
"""


class TestPackages(unittest.TestCase):
    @pytest.mark.full
    @pytest.mark.compiler
    def test_equal_in_a_process_without_the_library(self):
        """As exported and as lowered to core ATen, for other batches than that of the example."""
        torch.manual_seed(0)
        model = All(make() for make, _ in MODELS.values()).eval()
        batches = [[torch.randn(n, *shape) for _, shape in MODELS.values()] for n in (3, 8, 1)]
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, tuple(batches[0]), dynamic_shapes=((batch,) * len(MODELS),))
            paths = []
            for form, p in (("exported", program), ("lowered", hop.export.lower(program))):
                path = f"{folder}/{form}.pt2"
                paths.append(torch._inductor.aoti_compile_and_package(p, package_path=path))
            torch.save(batches, f"{folder}/batches")
            command = [sys.executable, "-c", RUN, f"{folder}/batches", "", *paths, f"{folder}/results"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
            assert done.stdout.strip() == "False"
            found = torch.load(f"{folder}/results")
        assert len(found) == 2
        for results in found:
            for got, inputs in zip(results, batches, strict=True):
                want = model(*inputs)
                assert len(got) == len(want) == 2 * len(MODELS)
                for g, w in zip(got, want, strict=True):
                    assert g.dtype == w.dtype and torch.equal(g, w)

    @pytest.mark.full
    @pytest.mark.compiler
    def test_native_operators_in_a_process_without_python_code_of_ours(self):
        """They are what eager mode runs: equal bits, floats included, and with other threads too."""
        if (missing := native.library().declines()) is not None:
            self.skipTest(missing)
        torch.manual_seed(0)
        models = [*(make() for make, _ in MODELS.values()), Packed()]
        shapes = [*(shape for _, shape in MODELS.values()), (64,)]
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        batches = [tuple(torch.randn(n, *shape) for shape in shapes) for n in (3, 8, 1)]

        def kept(model: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
            program = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
            return hop.export.lower(program, native=True)

        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for model, x in zip(models, batches[0], strict=True):
                found = [str(n.target) for n in kept(model, (x,), (batch,)).graph.nodes if n.op == "call_function"]
                assert any(name.startswith("hop_native.") for name in found), found
                others = [name for name in found if "mm" in name or "aten.conv" in name or "higher_order" in name]
                assert not others, others
            whole = All(models)
            program = kept(whole, batches[0], ((batch,) * len(models),))
            path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/all.pt2")
            torch.save(batches, f"{folder}/batches")
            given = [f"{folder}/batches", hop.export.native_library(), path, f"{folder}/results"]
            command = [sys.executable, "-c", RUN, *given]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
            assert done.stdout.strip() == "False"
            for got, inputs in zip(torch.load(f"{folder}/results")[0], batches, strict=True):
                want = whole(*inputs)
                assert len(got) == len(want) == 2 * len(MODELS) + 6
                for i, (g, w) in enumerate(zip(got, want, strict=True)):
                    assert g.dtype == w.dtype and torch.equal(g, w), i

    @parameterized.expand(["int8_weight", "int4", "nvfp4_weight", "mxfp8_weight"])
    def test_embeddings_dequantize_their_rows_alone(self, scheme: str) -> None:
        if (missing := native.library().declines()) is not None:
            self.skipTest(missing)
        model = hop.quantize_(nn.Sequential(nn.Embedding(1000, 64)), {"*": scheme})
        tokens = torch.tensor([[3, 999, 3], [0, 1, 500]])
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        program = hop.export.lower(torch.export.export(model, (tokens,), dynamic_shapes=(batch,)), native=True)
        sizes = [n.meta["val"].shape for n in program.graph.nodes if str(n.target).startswith("hop_native.dequantize")]
        assert sizes and not any(1000 in size for size in sizes), sizes
        for given in (tokens, tokens[:1]):
            assert torch.equal(program.module()(given), model(given))
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            program.module()(tokens + 1)

    @parameterized.expand(MODELS.items())
    def test_models_use_their_range(self, _name, model):
        """So that equal codes are many different ones."""
        torch.manual_seed(0)
        make, shape = model
        codes = make().eval()(torch.randn(8, *shape))[0]
        assert codes.dtype == torch.int8 and len(codes.unique()) > 30
