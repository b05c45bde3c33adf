"""Kernels that were built ahead: what is packed, that it loads without the compiler, and what is refused."""

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import site
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from parameterized import parameterized

from cutlass_kernels import ahead, cache, hopper, operators, packing, prebuilt, tiles, transposing
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from hop import cli as command
from tests.cli.test_command import needs_dsl
from tests.support.contexts import enter
from tests.support.files import InFolder

ROOT = Path(__file__).parents[2]
VARIANT = Variant(torch.int8, torch.int8, torch.bfloat16, Tile(128, 64), scales="vector")
OTHER = Variant(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, Tile(64, 8, swap=True), tma=False)
DSL = ("cutlass", "nvidia_cutlass", "tvm_ffi", "apache_tvm_ffi", "cuda", "__editable__")
LOADS = """
import sys, torch
from cutlass_kernels import hopper, missing, prebuilt
from tests.cutlass.test_prebuilt import OTHER, VARIANT
assert "not installed" in missing() and "cutlass" not in sys.modules
kernel = hopper.compiled(VARIANT)
assert sys.modules["tvm_ffi"].__file__.startswith(str(prebuilt.pack().folder))
a, b = torch.ones(16, 64, dtype=torch.int8), torch.ones(32, 64, dtype=torch.int8).mT
for call in (lambda: kernel(a, b, torch.empty(16, 32, dtype=torch.bfloat16), (torch.ones(16), torch.ones(32)), None, 1),
             lambda: hopper.compiled(OTHER)):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        print(error)
"""


def product(out=torch.bfloat16):
    lhs, rhs = torch.zeros(100, 256, dtype=torch.int8), torch.zeros(512, 256, dtype=torch.int8).mT
    return Product(lhs, rhs, out, lhs_scale=torch.ones(100, 1), rhs_scale=torch.ones(1, 512))


def without_dsl():
    """The compiler counts as missing."""
    return [
        mock.patch.object(m, "missing", lambda: "the CuTe DSL is not installed") for m in (cache, hopper, operators)
    ]


class Written(InFolder):
    """`folder` is a folder of kernels whose files hold other bytes than code; HOP_KERNELS names it."""

    def setUp(self):
        super().setUp()
        self.folder = self.folder.resolve() / "pack"
        files = {f"kernels/{v.name}.so": v.name.encode() for v in (VARIANT, OTHER)}
        files |= {"runtime/libcute_dsl_runtime.so": b"no library", "runtime/tvm_ffi/__init__.py": b"raise ImportError"}
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        digests = {Path(name): prebuilt.digest_of(content) for name, content in files.items()}
        self.content = {
            "format": prebuilt.FORMAT,
            "target": hopper.TARGET,
            "python": prebuilt.python(),
            "machine": platform.machine(),
            "sources": prebuilt.sources(),
            "versions": {name: prebuilt.installed(name) for name in prebuilt.PACKAGES},
            "groups": ["some"],
            "kernels": {p.stem: d for p, d in digests.items() if p.parts[0] == "kernels"},
            "runtime": {str(p.relative_to("runtime")): d for p, d in digests.items() if p.parts[0] == "runtime"},
        }
        self.write()
        for path in (self.folder, *self.folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        enter(self, mock.patch.dict(os.environ, {prebuilt.FOLDER: str(self.folder)}))
        self.addCleanup(prebuilt._opened.cache_clear)

    def write(self, **changed):
        path = self.folder / "manifest.json"
        path.write_text(json.dumps(self.content | changed))
        path.chmod(0o644)


class TestFolder(Written):
    def test_is_read(self):
        found = prebuilt.pack()
        assert found is not None and found.folder == self.folder and found.groups == ["some"]
        assert found.has(VARIANT.name, "sm_90a") and not found.has(VARIANT.name, "sm_100a")
        assert not found.has("s8_s8_s32_64x64x128", "sm_90a")
        with mock.patch.dict(os.environ, {prebuilt.FOLDER: ""}):
            assert prebuilt.pack() is None

    @parameterized.expand(
        [
            ("python", "3.1", "it is for Python 3.1, and here is"),
            ("machine", "vax", "it is for a processor vax"),
            ("sources", "0" * 16, "sources of cutlass_kernels with digest 0000"),
            ("format", 2, "it has the format 2"),
            ("kernels", ["a"], r"damaged: kernels is \['a'\]"),
            ("kernels", {"a": 1}, "damaged: kernels is"),
            ("runtime", {}, "damaged: runtime is"),
            ("versions", {}, "damaged: versions is"),
            (
                "versions",
                {"torch": "0.1", prebuilt.LAUNCHER: prebuilt.installed(prebuilt.LAUNCHER)},
                "made by torch 0.1, and 2.* is installed here",
            ),
            ("another", 1, "damaged: TypeError"),
        ]
    )
    def test_is_for_something_else(self, field, value, words):
        self.write(**{field: value})
        with self.assertRaisesRegex(RuntimeError, f"{self.folder}.*HOP_KERNELS.*{words}.*hop kernels build --out DIR"):
            prebuilt.pack()

    @parameterized.expand([("cut", lambda text: text[:40]), ("empty", lambda text: ""), ("list", lambda text: "[1]")])
    def test_is_damaged(self, _name, change):
        path = self.folder / "manifest.json"
        path.write_text(change(path.read_text()))
        with self.assertRaisesRegex(RuntimeError, "manifest.json is damaged"):
            prebuilt.pack()

    def test_is_not_there(self):
        words = "/nowhere/at/all holds no kernels.*hop kernels build"
        with mock.patch.dict(os.environ, {prebuilt.FOLDER: "/nowhere/at/all"}), self.assertRaisesRegex(OSError, words):
            prebuilt.pack()

    @parameterized.expand([("", 0o775), ("", 0o757), ("manifest.json", 0o666)])
    def test_others_may_write_it(self, name, mode):
        (self.folder / name).chmod(mode)
        with self.assertRaisesRegex(PermissionError, f"mode {mode:o}.*chmod -R go-w"):
            prebuilt.pack()

    def test_is_anothers(self):
        for owner, allowed in ((os.getuid(), True), (0, True), (os.getuid() + 1, False)):
            with mock.patch.object(
                Path, "lstat", lambda self, owner=owner: os.stat_result((0o40755, *[0] * 3, owner, *[0] * 5))
            ):
                if allowed:
                    prebuilt.described(self.folder)
                else:
                    with self.assertRaisesRegex(PermissionError, f"has owner {owner}"):
                        prebuilt.described(self.folder)


class TestFiles(Written):
    """Each file is looked at when it is loaded."""

    def load(self):
        pack = prebuilt.pack()
        assert pack is not None
        return pack._checked(f"kernels/{VARIANT.name}.so", pack.kernels[VARIANT.name])

    def test_is_as_it_was_made(self):
        assert self.load().read_bytes() == VARIANT.name.encode()

    def test_is_changed(self):
        self.load().write_bytes(b"other code")
        with self.assertRaisesRegex(RuntimeError, f"{VARIANT.name}.so has the SHA-256 .* and the manifest says"):
            self.load()

    def test_is_missing(self):
        self.load().unlink()
        with self.assertRaisesRegex(RuntimeError, f"{VARIANT.name}.so is missing"):
            self.load()

    def test_is_a_link(self):
        path = self.load()
        path.rename(self.folder / "elsewhere")
        path.symlink_to(self.folder / "elsewhere")
        with self.assertRaisesRegex(PermissionError, "is a link"):
            self.load()

    @parameterized.expand([("kernels",), (f"kernels/{VARIANT.name}.so",)])
    def test_others_may_write_it(self, name):
        (self.folder / name).chmod(0o777)
        with self.assertRaisesRegex(PermissionError, "mode 777"):
            self.load()

    def test_lies_outside(self):
        self.write(runtime=self.content["runtime"] | {"../manifest.json": "0"})
        with self.assertRaisesRegex(RuntimeError, "names runtime/../manifest.json, which lies outside"):
            prebuilt.pack().start()

    def test_runtime_does_not_load(self):
        with self.assertRaisesRegex(RuntimeError, "its runtime does not load"):
            prebuilt.pack().load(VARIANT.name)


class TestWithoutTheCompiler(Written):
    """Products take the kernels that are there."""

    def setUp(self):
        super().setUp()
        enter(self, *without_dsl())

    def test_the_tile_is_one_that_is_there(self):
        p = product()
        assert hopper.variant_of(p) == VARIANT and operators.routes(p, (9, 0)) == [("hopper", None)]
        best = tiles.best(
            [v for t in tiles.TILES if isinstance(v := hopper.variant_of(p, t), Variant)], 100, 512, 256, 132
        )
        assert best != VARIANT, "else this shows nothing"

    def test_without_one_another_route_is_taken(self):
        asked = operators.routes(product(torch.float32), (9, 0))
        assert [name for name, _ in asked] == ["hopper", "registry", "public"]
        reason = str(asked[0][1])
        assert "has no kernel for it, as s8_s8_f32_" in reason and "not installed" in reason

    def test_a_kernel_that_is_not_there(self):
        with self.assertRaisesRegex(
            RuntimeError, "has no kernel .* for sm_90a, and it cannot be compiled here: the CuTe"
        ):
            hopper.compiled(Variant(torch.int8, torch.int8, torch.int32, Tile(64, 64)))

    def test_no_folder(self):
        with mock.patch.dict(os.environ, {prebuilt.FOLDER: ""}):
            assert operators.routes(product(), (9, 0))[0] == ("hopper", "the CuTe DSL is not installed")


@needs_dsl
@pytest.mark.full
class TestPack(unittest.TestCase):
    """A kernel is compiled, packed, and loaded by a process that has no DSL."""

    @classmethod
    def setUpClass(cls):
        parent = tempfile.TemporaryDirectory()
        cls.addClassCleanup(parent.cleanup)
        cls.parent, cls.out = Path(parent.name), Path(parent.name) / "packs" / "pack"
        patched = mock.patch.dict(os.environ, {cache.FOLDER: str(cls.parent / "cache")})
        patched.start()
        cls.addClassCleanup(patched.stop)
        assert [error for _, error in ahead.build([VARIANT], 1)] == [None]
        assert cls.pack() == [VARIANT.name]

    @classmethod
    def pack(cls, python=None):
        return list(packing.write([VARIANT], cls.out, python or prebuilt.python(), ["one"]))

    def in_a_bare_environment(self, code: str) -> "subprocess.CompletedProcess[str]":
        """Run in a process whose packages are those of this environment without the DSL and tvm_ffi."""
        packages = self.parent / "site"
        packages.mkdir()
        for path in {p.resolve() for base in site.getsitepackages() for p in Path(base).iterdir()}:
            if not path.name.startswith(DSL) and path.suffix != ".pth":
                (packages / path.name).symlink_to(path)
        variables = os.environ | {"PYTHONPATH": f"{ROOT}:{packages}", prebuilt.FOLDER: str(self.out)}
        return subprocess.run(
            [sys.executable, "-S", "-c", code], env=variables, capture_output=True, text=True, cwd=self.parent
        )

    def test_loads_without_the_dsl(self):
        done = self.in_a_bare_environment(LOADS)
        assert done.returncode == 0, done.stderr
        own, other = done.stdout.splitlines()
        assert "expected device_type=cuda" in own and f"no kernel {OTHER.name} for sm_90a" in other

    def test_loads_beside_the_dsl(self):
        code = "from tests.cutlass import test_prebuilt as t; print(t.hopper.compiled(t.VARIANT), t.hopper.missing())"
        variables = os.environ | {prebuilt.FOLDER: str(self.out), cache.FOLDER: ""}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and "Function None" in done.stdout, done.stderr

    def test_the_kernel_that_transposes(self):
        kernel, out, x = transposing.KERNEL, self.parent / "other", torch.zeros(128, 64, dtype=torch.int8).mT
        assert [error for _, error in ahead.build([kernel], 1)] == [None]
        assert list(packing.write([kernel], out, prebuilt.python(), ["transpose"])) == [kernel.name]
        for folder, taken in ((out, True), (self.out, False)):
            environment = mock.patch.dict(os.environ, {prebuilt.FOLDER: str(folder)})
            with environment, mock.patch.object(cache, "missing", lambda: "the CuTe DSL is not installed"):
                assert (transposing.declines(x) is None) == taken

    def test_an_older_folder_is_replaced_and_nothing_else(self):
        (self.out / "kernels" / "old.so").write_bytes(b"")
        self.pack()
        assert [p.name for p in (self.out / "kernels").iterdir()] == [f"{VARIANT.name}.so"]
        assert [p.name for p in self.out.parent.iterdir() if not p.name.endswith(".gz")] == ["pack"], "left over"

    def test_one_file(self):
        path = packing.archive(self.out)
        assert path.name == "pack.tar.gz" and path.stat().st_size < 50e6
        with tarfile.open(path) as file:
            members = file.getmembers()
            assert {(m.uid, m.gid, m.mode & 0o022) for m in members} == {(0, 0, 0)}
            assert {m.name.split("/")[0] for m in members} == {"pack"}

    def test_for_another_python(self):
        """pip takes the wheel for it; here from a folder, since the wheels themselves are elsewhere."""
        version, other = importlib.metadata.version("apache-tvm-ffi"), "3.9"
        wheels = self.parent / "wheels"
        wheels.mkdir()
        with zipfile.ZipFile(wheels / f"apache_tvm_ffi-{version}-cp39-none-any.whl", "w") as wheel:
            info = f"apache_tvm_ffi-{version}.dist-info"
            wheel.writestr("tvm_ffi/__init__.py", "of another Python")
            wheel.writestr("tvm_ffi/include/tvm.h", "no code")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp39-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        with mock.patch.dict(
            os.environ, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
        ):
            out = self.parent / "other"
            assert list(packing.write([VARIANT], out, other, [])) == [VARIANT.name]
            found = prebuilt.described(out)
            assert found.python == other and set(found.runtime) == {"libcute_dsl_runtime.so", "tvm_ffi/__init__.py"}
            with self.assertRaisesRegex(RuntimeError, f"no wheel of apache-tvm-ffi=={version} for Python 3.8"):
                list(packing.write([VARIANT], out, "3.8", []))

    def test_a_kernel_that_is_not_compiled(self):
        with self.assertRaisesRegex(FileNotFoundError, f"hop kernels build {OTHER.name}"):
            list(packing.write([OTHER], self.parent / "none", prebuilt.python(), []))
        assert not (self.parent / "none").exists()

    def test_the_command(self):
        out = self.parent / "by_command"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert command.main(["kernels", "build", "--only", "first-tile", "--out", str(out)]) == 0
        assert f"{out}: 1 kernels for Python {prebuilt.python()}" in said.getvalue()
        found = prebuilt.described(out)
        assert list(found.kernels) == [VARIANT.name] and found.groups == ["first-tile"]
        assert (self.parent / "by_command.tar.gz").is_file()


class TestCommand(unittest.TestCase):
    @parameterized.expand(
        [
            (("--python", "3.12"), 2, "needs --out; got '3.12'"),
            (("--out", "build/x", "--python", "twelve"), 1, "python must be a version such as 3.12, got 'twelve'"),
            (("--out", str(ROOT / "docs")), 1, "docs is there, and holds no kernels"),
            (("--only", "nothing"), 1, "no group and no kernel is named 'nothing'; the groups are first-tile"),
        ]
    )
    @pytest.mark.quick(4)
    def test_errors_are_one_line(self, arguments, status, words):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert command.main(["kernels", "build", *arguments]) == status
        assert words in said.getvalue() and said.getvalue().count("\n") == 1
