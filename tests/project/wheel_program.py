"""What wheel.py runs beside an installed wheel: the native kernels are there, take the layers of the demo, and
give what PyTorch's own operators give."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import hop
from hop import presets
from hop.kernels.cpu import native

aten = torch.ops.aten
LAYERS = {  # quantizers of activations and weights, the dtype around, whether sums are of integers
    "int8": (presets.INT8_ROW, presets.INT8_ROW, torch.float32, True),
    "8da4w": (presets.INT8_ROW_AFFINE, presets.INT4_32, torch.float32, True),
    "fp8": (presets.FP8_ROW, presets.FP8_ROW, torch.bfloat16, False),
}


def is_near(got: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> bool:
    """Whether a result is within what docs/scaled.md says of floats."""
    wide, weight = (t.codes.double() * t.scale.double() for t in (x, w))  # type: ignore[attr-defined]
    exact, size = wide @ weight.T + bias.double(), wide.abs() @ weight.abs().T + bias.double().abs()
    bound = (wide.shape[-1] + 8) * 2**-24 * size + torch.finfo(got.dtype).eps / 2 * exact.abs()
    return bool(((got.double() - exact).abs() <= bound).all())


def check_layer(name: str) -> None:
    activations, weights, dtype, of_integers = LAYERS[name]
    for m in (1, 7, 200):
        x = hop.quantize(activations, torch.randn(m, 384).to(dtype))
        w, bias = hop.quantize(weights, torch.randn(1536, 384) / 20), torch.randn(1536).to(dtype)
        call = aten.linear.default, dtype, x
        for weight in (w, hop.pack(w)):
            explained = hop.explain(*call, weight, bias)
            assert "native product: chosen" in explained, explained
            got = hop.scaled(*call, weight, bias)
            if of_integers:
                with native.use("off"):
                    assert torch.equal(got, hop.scaled(*call, w, bias)), f"{name}, {m} rows"
            else:
                assert is_near(got, x, w, bias), f"{name}, {m} rows"


def check_model() -> None:
    """A converted model, whose codes are quantized natively too."""
    model = nn.Sequential(nn.Linear(384, 1536), nn.ReLU(), nn.Linear(1536, 384)).eval()
    hop.nn.convert(model, hop.schemes.INT8_DYNAMIC)
    x = torch.randn(5, 384)
    with torch.inference_mode():
        got = model(x)
        with native.use("off"):
            assert torch.equal(got, model(x))


def main() -> None:
    version = sys.argv[1]
    assert torch.__version__.partition("+")[0] == version, f"torch is {torch.__version__}, not {version}"
    assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang++"))), "a compiler is on the path"
    command = Path(sys.executable).with_name("hop")
    info = json.loads(subprocess.run([command, "info", "--json"], check=True, capture_output=True).stdout)
    kernels = info["kernels"]["native, on CPU"]
    assert kernels["available"], kernels["reason"]
    files = {str(file) for file in importlib.metadata.files("torch-hop") or ()}
    wanted = {"hop/py.typed", "hop/report/page.html", "hop/report/page.js", "hop/_native.abi3.so"}
    wanted |= {f"hop/export/golden/files/{name}" for name in ("README.md", "hop_vectors.py", "hop_vectors.h")}
    assert wanted <= files and not [f for f in files if f.split("/")[0] in ("tests", "native", "benchmarks", "docs")]
    assert any("licenses/LICENSE" in file for file in files) and "cutlass_kernels/__init__.py" in files
    print(f"{hop.__file__}: torch {torch.__version__}, native kernels of {kernels['detail']}")
    torch.manual_seed(0)
    for level in native.library().levels():
        with native.use(level):
            for name in LAYERS:
                check_layer(name)
            check_model()
        print(f"{level}: {', '.join(LAYERS)} and hop.nn run natively, and are what PyTorch's operators give")


if __name__ == "__main__":
    main()
