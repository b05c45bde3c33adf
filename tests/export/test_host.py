"""A package of an exact model in a program without Python, examples/package/main.cpp: the bytes of eager mode."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop.kernels.cpu import native

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(native.library().file is None, reason="the native library was not built"),
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
]


class Encoder(nn.Module):
    """Products, attention, a norm, functions and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).reshape(1, x.shape[0], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads.unbind()).transpose(1, 2).reshape(-1, 64)
        y = self.norm(x + functional.gelu(self.second(y)))
        y = functional.avg_pool1d(y, 3, 1, 1) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return functional.normalize(y.softmax(-1) + torch.cos(y) + y.std(-1, keepdim=True), dim=-1)


def built(folder: Path) -> Path:
    """The program, compiled as its first comment says."""
    torch_folder, program = Path(torch.__path__[0]), folder / "run"
    includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch_folder}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    source = str(ROOT / "examples/package/main.cpp")
    command = [str(COMPILER), "-std=c++20", "-O1", *includes, source, "-o", str(program), *libraries]
    subprocess.run([*command, f"-Wl,-rpath,{torch_folder}/lib", "-ldl"], check=True)
    return program


def test_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = hop.quantize_(Encoder().eval(), "int8", exact=True), torch.randn(33, 64)
    with torch.no_grad():
        want = model(x)
        program = torch.export.export(model, (x,))
        assert hop.export.check_exact(program).exact
        package: Any = torch._inductor.aoti_compile_and_package(
            hop.export.lower(program, native=True),
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs={"cpp.dynamic_threads": True},  # as in make.py
        )
    x.numpy().tofile(tmp_path / "input.bin")
    run = built(tmp_path)
    for threads in ("1", "3"):
        out = tmp_path / f"{threads}.bin"
        given = [str(native.library().file), package, str(tmp_path / "input.bin"), "64", str(out), threads]
        subprocess.run([str(run), *given], check=True)
        assert out.read_bytes() == want.numpy().tobytes()
