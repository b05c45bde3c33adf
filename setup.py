"""The native kernels, built where there is a C++ compiler; without one the package uses PyTorch's own operators."""

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Builds a plain shared library: it is loaded by its C interface, and is no Python module."""

    def get_export_symbols(self, ext):
        return []


FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",  # each operation is rounded by itself, as the reference does
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-uninitialized",  # of GCC's own intrinsics
    "-Wno-maybe-uninitialized",
]

native = Extension(
    "hop._native",
    sources=sorted(glob("native/*.cpp")),
    depends=sorted(glob("native/*.h")),
    language="c++",
    optional=True,
    py_limited_api=True,
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
