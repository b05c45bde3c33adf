"""What an installation says of the native kernels: whether they were built, and why not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hop.kernels.cpu import native

pytest.importorskip("setuptools.command.bdist_wheel", reason="the build needs a newer setuptools")
ROOT = Path(__file__).parents[2]
GOOD = 'extern "C" __attribute__((visibility("default"))) int hop_version() { return 0; }\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with one file of C++."""
    (tmp_path / "hop").mkdir()
    (tmp_path / "native" / "one").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "hop/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(project: Path, source: str, **environment: str) -> tuple[str, str | None]:
    """What the build prints, and why there is no library."""
    (project / "native" / "one" / "one.cpp").write_text(source)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=project,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr  # the package is installed either way
    return done.stdout, native.load(project / "hop")[1]


@pytest.mark.compiler
def test_says_why(project):
    """Errors of the compiler reach the reason, and no library of an earlier build is left beside it."""
    printed, reason = build(project, GOOD)
    assert "the native kernels were built" in printed
    assert reason is not None and "have version 0" in reason  # loaded
    printed, reason = build(project, "int wrong() { return missing; }\n")
    assert "the native kernels were NOT built" in printed
    assert reason is not None and "were not built (" in reason and "one.cpp:1" in reason and "missing" in reason
    assert "\n" not in reason and not list((project / "hop").glob("*.so"))
    assert "were built" in build(project, GOOD)[0] and not (project / "hop" / "_native.txt").exists()


@pytest.mark.parametrize(
    ("compiler", "words"), [("/bin/false", "/bin/false: exit status 1"), ("no-compiler", "no-compiler: No such file")]
)
def test_without_a_compiler(project, compiler, words):
    printed, reason = build(project, GOOD, CC=compiler, CXX=compiler)
    assert f"the native kernels were NOT built; hop goes on without them: {words}" in printed
    assert reason is not None and f"were not built ({words}" in reason
