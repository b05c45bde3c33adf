"""Package a model whose products run on the native kernels, for a program without Python: main.cpp.

    python examples/package/make.py FOLDER

writes model.pt2, an input, and Python's output for it, both as float32 without a header. The package calls the
operators hop_native::*, so the program must load hop/_native.abi3.so first. Needs a C++ compiler.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import hop
import hop.export
from hop import presets
from hop.kernels.cpu import native


class Linear(nn.Module):
    """int8 rows, quantized in each call, times packed int8 rows: (..., in) -> (..., out)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        packed = hop.pack(hop.quantize(presets.INT8_ROW, weight))
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        codes = hop.quantize(presets.INT8_ROW, x)
        return hop.scaled(torch.ops.aten.linear.default, torch.float32, codes, self.weight, self.bias)


def model_and_input() -> tuple[nn.Module, Tensor]:
    """The model to package; replace it with your own."""
    torch.manual_seed(0)
    first, second = (Linear(torch.randn(n, k) / 8, torch.randn(n)) for n, k in ((256, 64), (40, 256)))
    return nn.Sequential(first, nn.ReLU(), second).eval(), torch.randn(33, 64)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # torch.export warns about its own code
    if (missing := native.library().missing) is not None:
        sys.exit(missing)
    folder.mkdir(parents=True, exist_ok=True)
    model, x = model_and_input()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=4096)},))
    program = hop.export.lower(program, native=True)
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        # Otherwise torch 2.11 fixes the number of threads of Inductor's loops to that of this process.
        inductor_configs={"cpp.dynamic_threads": True},
    )
    output = torch._inductor.aoti_load_package(path)(x)
    x.numpy().tofile(folder / "input.bin")
    output.numpy().tofile(folder / "output.bin")
    largest = (output - model(x)).abs().max().item()
    print(f"{path}: {[*x.shape]} to {[*output.shape]}, at most {largest} from eager mode")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
