"""The native kernels, built where there is a C++ compiler; without one the package uses PyTorch's own operators."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class BuildNative(build_ext):
    """Builds a plain shared library: it is loaded by its C interface, and is no Python module."""

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        """Build it, and say whether that worked. Why not stands in hop/_native.txt, which `hop info` shows: pip keeps
        what a build prints to itself."""
        library = Path(self.get_ext_fullpath(ext.name))
        why, start = library.with_name("_native.txt"), time.perf_counter()
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.build(ext, library)
        except Exception as error:
            library.unlink(missing_ok=True)  # that of an earlier build
            why.write_text(f"{error}\n", encoding="utf-8")
            print(f"hop: the native kernels were NOT built; hop goes on without them: {error}", flush=True)
            raise  # the extension is optional: setuptools warns, and goes on
        why.unlink(missing_ok=True)
        seconds = time.perf_counter() - start
        print(f"hop: the native kernels were built: {library} in {seconds:.0f} s", flush=True)

    def build(self, ext, library):
        """The files side by side; objects that are newer than all sources stay."""
        if self.compiler.compiler_type == "unix":
            self.compiler.call = self.compiler.spawn = run  # as newer and as older versions of setuptools name it
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
        options = self.torch(folder)
        self.compiler.link_shared_object(objects, str(library), target_lang=ext.language, extra_preargs=options)

    def copy_extensions_to_source(self):
        """For an installation in place, also why there is no library; that of an earlier build goes."""
        place = Path(self.get_ext_fullpath("hop._native")).parent
        for old in place.glob("_native*.*"):
            old.unlink()
        super().copy_extensions_to_source()
        why = Path(self.build_lib, "hop", "_native.txt")
        if why.exists():
            self.copy_file(str(why), str(place / why.name))

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


def run(command, **options):
    """Run a compiler; where it fails, the error holds the first errors that it names."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", **options)
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line or "undefined" in line] or lines
        raise CompileError("\n".join([f"{command[0]}: exit status {done.returncode}", *(e[:300] for e in errors[:3])]))


class Wheel(bdist_wheel):
    """A wheel for any Python: the library in it calls neither Python nor a certain version of PyTorch."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


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

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})
