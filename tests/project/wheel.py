"""Installs the wheel of dist/ as a user does, where there is no compiler, and runs its kernels: `make test-wheel`.

    python tests/project/wheel.py [2.15.0 ...]    beside these versions of torch, else beside the one that is pinned

Needs Python alone. Each version has an environment of its own, in a temporary folder.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pinned() -> str:
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    return version


def check(wheel: Path, version: str) -> int:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "environment")
        venv.create(made, with_pip=True)
        python = str(made / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"torch=={version}", "numpy"], check=True)
        subprocess.run([*install, str(wheel)], check=True)
        # No compiler, none of the variables that name one, and nothing of this checkout.
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "HOP_NATIVE")}
        program = [python, "-I", str(Path(__file__).with_name("wheel_program.py")), version]
        done = subprocess.run(program, env={**kept, "PATH": str(made / "bin")}, cwd=folder)
        failed = done.returncode != 0
    print(f"{'FAILED' if failed else 'passed'}: {wheel.name}, torch {version}, {time.perf_counter() - start:.0f} s")
    return failed


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ must hold one wheel, and holds {len(wheels)}: make wheel")
    sys.exit(sum(check(wheels[0], version) for version in sys.argv[1:] or [pinned()]))


if __name__ == "__main__":
    main()
