"""A program of C++, without Python, runs a package whose products are operators of the native library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hop.kernels.cpu import native

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.full,
    pytest.mark.skipif(native.library().missing is not None, reason=str(native.library().missing)),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the commands are those of Linux"),
]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "package"
LIBRARY = ROOT / "hop" / "_native.abi3.so"
COLUMNS = "64"
# A program that knows nothing of PyTorch, and loads one that does as a plug-in, so that no symbol of it is global. It
# says how many threads there are in the end.
PLUGGED = """
#include <dlfcn.h>
#include <dirent.h>
#include <cstdio>
int main(int count, char** arguments) {
    void* plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) return std::puts(dlerror()), 1;
    const int status = reinterpret_cast<int (*)(int, char**)>(dlsym(plugin, "main"))(count - 1, arguments + 1);
    int threads = -2;  // without . and ..
    for (DIR* tasks = opendir("/proc/self/task"); readdir(tasks);) ++threads;
    std::printf("%d\\n", threads);
    std::fflush(stdout);
    _exit(status);
}
"""


class Host:
    """The programs, the package, and what Python makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        call([sys.executable, EXAMPLE / "make.py", folder / "made"], environment)
        self.wanted = (folder / "made" / "output.bin").read_bytes()
        compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
        torch_folder = Path(torch.__path__[0])
        includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
        links = [f"-L{torch_folder}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
        links += [f"-Wl,-rpath,{torch_folder}/lib", "-ldl"]
        call([compiler, "-std=c++20", "-O1", "-fPIC", *includes, "-c", EXAMPLE / "main.cpp", "-o", folder / "main.o"])
        call([compiler, folder / "main.o", "-o", folder / "run", *links])
        call([compiler, folder / "main.o", "-shared", "-o", folder / "plugin.so", *links])
        (folder / "plugged.cpp").write_text(PLUGGED)
        call([compiler, "-include", "unistd.h", folder / "plugged.cpp", "-o", folder / "plugged", "-ldl"])

    def run(self, *program: str, threads: int, library: Path = LIBRARY, columns: str = COLUMNS) -> tuple[bytes, str]:
        """The output, and what is printed."""
        output = self.folder / "output.bin"
        output.unlink(missing_ok=True)
        made = self.folder / "made"
        words = [library, made / "model.pt2", made / "input.bin", columns, output, threads]
        printed = call([*(self.folder / name for name in program), *words], {"PATH": os.defpath})
        return output.read_bytes(), printed


def call(words: list, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Host:
    return Host(tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits(host, threads):
    got, printed = host.run("run", threads=threads)
    assert got == host.wanted and f"{threads} threads" in printed


@pytest.mark.parametrize("threads", [1, 2])
def test_plugged_in(host, threads):
    """Where libtorch was loaded by itself; with one thread, no other is started."""
    got, printed = host.run("plugged", "plugin.so", threads=threads)
    assert got == host.wanted
    assert (int(printed.split()[-1]) == 1) == (threads == 1), printed


def test_inputs_are_checked(host):
    """Rows of another width raise, instead of results from other memory."""
    with pytest.raises(AssertionError, match=r"input_handles|dim"):
        host.run("run", threads=1, columns="32")


def test_without_the_library(host):
    """It says which operator is missing."""
    with pytest.raises(AssertionError, match="hop_native::"):
        host.run("run", threads=1, library=Path("libm.so.6"))
