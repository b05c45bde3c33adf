"""Packages a model whose products run on the native kernels, for a program without Python: main.cpp.

    python examples/package/make.py FOLDER

writes model.pt2, and an input and the output that Python gives for it, as float32 without a header. The package calls
the operators hop_native::*, so whoever runs it loads hop/_native.abi3.so first. It needs a C++ compiler.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import hop
from hop import presets
from hop.compat import versions
from hop.kernels import native


class Linear(nn.Module):
    """int8 rows, quantized in each call, times int8 rows in tiles: (..., in) -> (..., out)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        w = hop.quantize(presets.INT8_ROW, weight)
        self.n = len(weight)
        self.tiles = nn.Buffer(torch.ops.hop_native.pack.default(w.codes, "1 lhs int8 rhs int8"))
        self.scale, self.bias = nn.Buffer(w.scale), nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        q = hop.quantize(presets.INT8_ROW, x)
        words = "1 lhs int8 scale=1,-1 rhs int8 tiled scale=1,-1"
        left, right = (q.codes, q.scale, None, None), (self.tiles, self.scale, None, None)
        return torch.ops.hop_native.product.default(
            *left, *right, self.bias, None, None, self.n, torch.float32, words
        )  # fmt: skip


def model_and_input() -> tuple[nn.Module, Tensor]:
    """What is packaged: exchange it for another one."""
    torch.manual_seed(0)
    first, second = (Linear(torch.randn(n, k) / 8, torch.randn(n)) for n, k in ((256, 64), (40, 256)))
    return nn.Sequential(first, nn.ReLU(), second).eval(), torch.randn(33, 64)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # of export, about itself
    if (missing := native.library().missing) is not None:
        sys.exit(missing)
    if versions.version() < (2, 13):
        sys.exit("packages of torch 2.11 hand operators another dtype than that of the call: take torch 2.13 or later")
    folder.mkdir(parents=True, exist_ok=True)
    model, x = model_and_input()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=4096)},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    output = torch._inductor.aoti_load_package(path)(x)
    x.numpy().tofile(folder / "input.bin")
    output.numpy().tofile(folder / "output.bin")
    largest = (output - model(x)).abs().max().item()
    print(f"{path}: {[*x.shape]} to {[*output.shape]}, at most {largest} from eager mode")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
