"""Programs compiled ahead of time by AOTInductor, run in a process that has not imported the library."""

import json
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.formats import INT8
from hop.quantizer import Quantizer
from hop.requantization import FixedPoint
from hop.scaling import Given

aten = torch.ops.aten
HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
STATIC = presets.INT8_TENSOR_STATIC_AFFINE


def fixed(low: float | None = None) -> Quantizer:
    return Quantizer(INT8, scale=Given(affine=True, requantize=FixedPoint(rounding="gemmlowp", low=low)))


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
    def __init__(self) -> None:
        super().__init__(
            first=hop.quantize(presets.INT8_ROW, torch.randn(32, 64) / 8),
            second=hop.quantize(presets.INT8_ROW, torch.randn(16, 32) / 6),
        )
        self.bias = nn.Buffer(torch.randint(-500, 500, (32,), dtype=torch.int32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at = self.at()
        h = hop.scaled(aten.linear.default, fixed(0.0), self.quantized(x), self.first, self.bias, **at[1])
        y = hop.scaled(aten.linear.default, fixed(), h, self.second, **at[2])
        return y.codes, hop.dequantize(y)


class Net(Chain):
    def __init__(self) -> None:
        super().__init__(
            first=hop.quantize(presets.INT8_CONV, torch.randn(8, 4, 3, 3) / 6),
            second=hop.quantize(presets.INT8_CONV, torch.randn(6, 4, 3, 3) / 6),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at, conv = self.at(), aten.conv2d.default
        h = hop.scaled(conv, fixed(0.0), self.quantized(x), self.first, None, [1, 1], [1, 1], **at[1])
        h = hop.scaled(aten.max_pool2d.default, fixed(), h, [2, 2], **at[1])
        h = hop.scaled(conv, fixed(), h, self.second, None, [2, 1], [1, 1], [1, 1], 2, **at[2])
        y = hop.scaled(aten.avg_pool2d.default, STATIC, h, [2, 2], **at[3])
        return y.codes, hop.dequantize(y)


class Dynamic(Chain):
    """int8 rows with zero points, times int4 groups; the integers that it multiplies, and its result."""

    def __init__(self) -> None:
        super().__init__(weight=hop.quantize(presets.INT4_32, torch.randn(24, 64)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = hop.quantize(presets.INT8_ROW_AFFINE, x)
        return codes.codes, hop.scaled(aten.linear.default, torch.float32, codes, self.weight)


MODELS = {"perceptron": (Perceptron, (64,)), "net": (Net, (4, 12, 12)), "8da4w": (Dynamic, (64,))}

# What a process does that has a package, inputs, and PyTorch alone.
RUN = """
import json, sys, torch
packages, inputs, results = sys.argv[1:]
found = {}
for name, path in json.loads(packages).items():
    package = torch._inductor.aoti_load_package(path)
    found[name] = [list(package(x)) for x in torch.load(inputs)[name.split(".")[0]]]
torch.save(found, results)
print("hop" in sys.modules)
"""


@unittest.skipUnless(HAS_COMPILER, "needs a C++ compiler")
class TestPackages(unittest.TestCase):
    @pytest.mark.full
    def test_equal_in_a_process_without_the_library(self):
        """As exported and as lowered to core ATen, for other batches than that of the example."""
        torch.manual_seed(0)
        wanted: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        packages: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, (make, shape) in MODELS.items():
                model = make().eval()
                inputs[name] = [torch.randn(n, *shape) for n in (3, 8, 1)]
                batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
                program = torch.export.export(model, (inputs[name][0],), dynamic_shapes=batch)
                wanted[name] = [model(x) for x in inputs[name]]
                for form, p in (("exported", program), ("lowered", hop.export.lower(program))):
                    path = str(Path(folder) / f"{name}.{form}.pt2")
                    packages[f"{name}.{form}"] = torch._inductor.aoti_compile_and_package(p, package_path=path)
            torch.save(inputs, f"{folder}/inputs")
            command = [sys.executable, "-c", RUN, json.dumps(packages), f"{folder}/inputs", f"{folder}/results"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
            assert done.stdout.strip() == "False"
            found = torch.load(f"{folder}/results")
        assert len(found) == 2 * len(MODELS)
        for name, results in found.items():
            for got, want in zip(results, wanted[name.split(".")[0]], strict=True):
                for g, w in zip(got, want, strict=True):
                    assert g.dtype == w.dtype and torch.equal(g, w), name

    @parameterized.expand(MODELS.items())
    def test_models_use_their_range(self, _name, model):
        """So that equal codes are many different ones."""
        torch.manual_seed(0)
        make, shape = model
        codes = make().eval()(torch.randn(8, *shape))[0]
        assert codes.dtype == torch.int8 and len(codes.unique()) > 30
