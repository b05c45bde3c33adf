"""The native kernels, built where there is a C++ compiler; without one the package uses PyTorch's own operators."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Builds a plain shared library: it is loaded by its C interface, and is no Python module."""

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        """The files side by side; objects that are newer than all sources stay."""
        folder = Path(__file__).parent / "build" / "native"
        newest = max(Path(f).stat().st_mtime for f in (*ext.sources, *ext.depends, __file__))

        def compiled(source):
            (target,) = self.compiler.object_filenames([source], output_dir=str(folder))
            if Path(target).exists() and Path(target).stat().st_mtime > newest:
                return target
            self.compiler.compile([source], output_dir=str(folder), extra_postargs=ext.extra_compile_args)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, ext.sources))
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), target_lang=ext.language)


FLAGS = [
    "-std=c++17",
    "-Inative",
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
    sources=sorted(glob("native/[!t]*/*.cpp") + glob("native/torch/*.cpp")),
    depends=sorted(glob("native/**/*.h", recursive=True)),
    language="c++",
    optional=True,
    py_limited_api=True,
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
