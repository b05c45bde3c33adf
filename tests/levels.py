"""Levels of CPU (hop/kernels/cpu/native.py) in tests: those that this machine lacks are skipped by their names, and
those below its own are forced.

    python -m tests.levels [LEVEL ...]      `make test-levels`: what depends on the level, at each that the machine has,
                                            with PyTorch's and oneDNN's own kernels held to it too
"""

import argparse
import contextlib
import getpass
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator

from hop.kernels.cpu import native

HERE = native.library().levels()
BEST = HERE[-1] if HERE else "off"
OWN = tuple(level for level in native.LEVELS if level != "avx512")
"""Levels to test apart from products and convolutions; in the rest, avx512 runs the code of avx2."""
OWN_HERE = tuple(level for level in OWN if level in HERE)

# What makes PyTorch, oneDNN and MKL (on CPUs of Intel) take the CPU for one of a level.
OTHERS = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx_vnni": ("avx2", "AVX2_VNNI", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
    # there they have no such switch
    **dict.fromkeys(native.LEVELS_OF["aarch64"][1:], ("default", "DEFAULT", "")),
}
FILES = (
    *("kernels/test_native.py", "kernels/test_native_quantize.py", "kernels/test_native_convolution.py"),
    *("numerics/test_quantizer.py", "numerics/test_requantization.py", "tensor/test_noise.py"),
    *("impls/test_fast_path.py", "impls/test_routes.py", "impls/test_scaled.py", "impls/test_scaled_graph.py"),
    *("impls/test_scaled_convolutions.py", "impls/test_scaled_limits.py", "impls/test_scaled_floats.py"),
    *("impls/test_scaled_values.py", "impls/test_scaled_codes.py", "impls/test_scaled_errors.py", "impls/test_pack.py"),
    *("impls/test_quantized.py", "impls/test_integer_chain.py", "optim/test_optimizers.py"),
    *("export/test_integer.py", "checkpoint/test_corpus.py"),
)


@contextlib.contextmanager
def at(level: str) -> Iterator[None]:
    """As native.use; skips the test where this CPU does not have the level."""
    if level != "off" and level not in HERE:
        raise unittest.SkipTest(f"needs the CPU level {level}; this CPU's is {BEST}")
    with native.use(level):
        yield


def environment(level: str) -> dict[str, str]:
    """The variables under which a process takes this CPU for one of `level`."""
    aten, onednn, mkl = OTHERS[level]
    # Inductor keeps generated code by the graph, not by the level for which it was generated.
    cache = os.path.join(tempfile.gettempdir(), f"hop_inductor_{getpass.getuser()}_{level}")
    own = {"HOP_NATIVE": level, "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    if mkl:
        own["MKL_ENABLE_INSTRUCTIONS"] = mkl
    return {**os.environ, **own, "TORCHINDUCTOR_CACHE_DIR": cache}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.levels")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(native.LEVELS)}; by default all")
    parser.add_argument("-k", default="", help="as pytest's")
    arguments = parser.parse_args()
    if unknown := set(arguments.levels) - set(native.LEVELS):
        parser.error(f"LEVEL must be of {', '.join(native.LEVELS)}; got {', '.join(sorted(unknown))}")
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    command += ["-m", "not full and not exhaustive", "-k", arguments.k, *(f"tests/{name}" for name in FILES)]
    failed = []
    for level in arguments.levels or native.LEVELS:
        if level not in HERE:
            print(f"skipped: needs the CPU level {level}; this CPU's is {BEST}", flush=True)
            continue
        print(f"== {level}", flush=True)
        if subprocess.run(command, env=environment(level), check=False).returncode:
            failed.append(level)
    sys.exit(f"failed at {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
