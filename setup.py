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
        linked = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, linked, target_lang=ext.language, extra_preargs=self.torch(folder))

    def torch(self, folder):
        """The options that make the library look for PyTorch's functions in the libtorch_cpu of the process that loads
        it, whichever it is: one that is empty stands for it here."""
        if sys.platform == "darwin":
            return ["-undefined", "dynamic_lookup"]
        source = folder / "nothing.cpp"
        folder.mkdir(parents=True, exist_ok=True)
        source.write_text("")
        (empty,) = self.compiler.compile([str(source)], output_dir=str(folder))
        name = "libtorch_cpu.so"
        self.compiler.link_shared_object([empty], str(folder / name), extra_preargs=[f"-Wl,-soname,{name}"])
        return ["-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu"]


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
    sources=sorted(set(glob("native/*/*.cpp")) - set(glob("native/tests/*"))),
    depends=sorted(glob("native/**/*.h", recursive=True)),
    language="c++",
    optional=True,
    py_limited_api=True,
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
