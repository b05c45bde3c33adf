"""What an installation says of the native kernels, whether they were built and why not; and what is in a wheel."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from hop.kernels.cpu import native

pytest.importorskip("scikit_build_core", minversion="1.1", reason="it builds hop")
ROOT = Path(__file__).parents[2]
PACKAGES = ("hop", "cutlass_kernels")
SOURCES = ("CMakeLists.txt", "native/build.cmake", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
GOOD = 'extern "C" __attribute__((visibility("default"))) int hop_version() { return 0; }\n'
LEVELS = """extern "C" __attribute__((visibility("default"))) const char hop_levels[] =
#ifdef HOP_WITHOUT_AVX512
    "without AVX-512";
#else
    "with AVX-512";
#endif
"""
BAD = "int wrong() { return missing; }\n"
HOOK = "import sys, scikit_build_core.build as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with one file of C++."""
    made = tmp_path / "project"
    (made / "native" / "one").mkdir(parents=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, made / package, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, made / name)
    return made


def build(project: Path, hook: str, source: str | None = GOOD, **environment: str) -> tuple[str, Path]:
    """What pip would print with -v, and the file that the build makes."""
    if source is not None:
        (project / "native" / "one" / "one.cpp").write_text(source)
    out = project.parent / hook
    words = [sys.executable, "-c", HOOK, f"build_{hook}", str(out)]
    own = {name: value for name, value in os.environ.items() if name not in ("HOP_AVX512", "HOP_NATIVE")}
    done = subprocess.run(words, cwd=project, env={**own, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr  # the package is installed either way
    return done.stdout, out / done.stdout.splitlines()[-1]


def reason(project: Path, source: str = GOOD, **environment: str) -> str:
    """What an installation in place makes `hop info` say; of the version, if the library was built and loaded."""
    build(project, "editable", source, **environment)
    said = native.load(project / "hop")[1]
    assert said is not None and "\n" not in said
    return said


@pytest.mark.compiler
@pytest.mark.full
def test_says_why(project):
    """Errors of the compiler reach the reason, and no library of an earlier build is left beside it. What was compiled
    is not compiled again."""
    (project / "native" / "one" / "two.cpp").write_text("int two() { return 2; }\n")
    assert "have version 0" in reason(project, HOP_AVX512="ON")
    (two,) = (project / "build" / "native").rglob("two.cpp.o")
    made = two.stat().st_mtime_ns
    said = reason(project, BAD, HOP_AVX512="ON")
    assert "were not built (" in said and "one.cpp:1" in said and "missing" in said
    assert not list((project / "hop").glob("*.so"))
    assert "have version 0" in reason(project, HOP_AVX512="ON") and not (project / "hop" / "_native.txt").exists()
    printed, _ = build(project, "wheel", None)
    assert "ninja: no work to do." in printed.splitlines() and two.stat().st_mtime_ns == made


@pytest.mark.compiler
@pytest.mark.full
def test_without_a_compiler(project):
    """Nor with one that fails, and with one afterwards."""
    for compiler, words in (("no-compiler", "no-compiler"), ("/bin/false", "is not able to compile")):
        said = reason(project, CXX=compiler)
        assert "were not built (" in said and compiler in said and words in said
    assert "have version 0" in reason(project)


@pytest.mark.compiler
@pytest.mark.full
def test_wheel(project):
    """One of an sdist has the packages with their data, the library, and nothing else, for any Python."""
    (project / "native" / "one" / "one.cpp").write_text(GOOD)
    (project / "hop" / "_native.of_another_build.so").write_text("")
    shutil.unpack_archive(build(project, "sdist")[1], project.parent, filter="data")
    (unpacked,) = project.parent.glob("torch_hop-*")
    wheel = build(unpacked, "wheel", None)[1]
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        library = Path(archive.extract("hop/_native.abi3.so", project.parent / "extracted"))
    sources = {str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*") if f.is_file()}
    assert found == {f for f in sources if "_native." not in f and "__pycache__" not in f} | {"hop/_native.abi3.so"}
    assert {"hop/py.typed", "hop/report/page.html", "hop/export/golden/files/hop_vectors.h"} <= found
    assert "have version 0" in str(native.load(library.parent)[1])


@pytest.mark.compiler
@pytest.mark.full
def test_levels_of_builds(project):
    """A checkout has the code for its own CPU and a wheel that for all, unless HOP_AVX512 says otherwise."""
    library, cpu = project / "hop" / "_native.abi3.so", Path("/proc/cpuinfo")
    has = platform.machine() != "x86_64" or not cpu.exists() or "avx512f" in cpu.read_text()
    for asked, want in (({}, has), ({"HOP_AVX512": "OFF"}, False), ({"HOP_AVX512": "ON"}, True)):
        build(project, "editable", LEVELS, **asked)
        assert (b"without AVX-512" in library.read_bytes()) is not want
    with ZipFile(build(project, "wheel", LEVELS)[1]) as archive:
        assert b"without AVX-512" not in archive.read("hop/_native.abi3.so")


USES = """
import hop, torch
from hop.kernels.cpu.native import library
a, b = torch.full((2, 64), 127, dtype=torch.int8), torch.full((64, 64), 127, dtype=torch.int8)
y = hop.out_dtype(torch.ops.aten.mm.default, torch.int32, a, b)
print(library().file, library().missing, library().levels(), y.unique().item())
"""


@pytest.mark.compiler
@pytest.mark.full
@pytest.mark.skipif("avx512" not in native.library().levels(), reason="needs a CPU with AVX-512")
def test_kernels_without_avx512(project):
    """Built for another CPU, they run on this one, and say so."""
    shutil.copytree(ROOT / "native", project / "native", dirs_exist_ok=True)
    build(project, "editable", None, HOP_AVX512="OFF")
    done = subprocess.run(
        [sys.executable, "-c", USES],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project), "HOP_NATIVE": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(project)) and "'avx512'" not in done.stdout and "'avx2'" in done.stdout
    assert done.stdout.split()[-1] == str(64 * 127 * 127)
    assert "built without AVX-512" in done.stderr


def test_without_cmake_errors():
    """What is said of output in which nothing is marked as an error."""
    assert native._errors("a\nb\nc\nd\n") == "b; c; d"
