"""hop kernels."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from parameterized import parameterized

import cutlass_kernels
from cutlass_kernels import ahead, cache
from cutlass_kernels.variants import Tile, Variant
from hop import cli as command
from tests.support.kernel_folder import KernelFolder

ROOT = Path(__file__).parents[2]
NAME = "s8_s8_s32_128x64x128"
needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))


class TestKernels(KernelFolder):
    def run_it(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command.main(arguments)
            except SystemExit as exit:
                status = int(str(exit.code))
        return status, out.getvalue(), err.getvalue()

    def test_list(self):
        status, out, _ = self.run_it("kernels", "list")
        assert status == 0 and len(out.splitlines()) == len(ahead.matching()) > 400
        status, out, _ = self.run_it("kernels", "list", "e4m3_*_scales-block*")
        assert status == 0 and all(line.split()[1].startswith("e4m3_") for line in out.splitlines())

    @needs_dsl
    @pytest.mark.full
    def test_build(self):
        status, out, _ = self.run_it("kernels", "build", NAME)
        assert status == 0 and out.splitlines() == ["0 of 1 kernels are compiled; compiling 1", f"1/1 {NAME}"]
        assert self.run_it("kernels", "list", NAME)[1].split() == ["compiled", NAME]
        assert self.run_it("kernels", "build", NAME)[1].splitlines() == ["1 of 1 kernels are compiled; compiling 0"]

    @needs_dsl
    @pytest.mark.full
    def test_several_processes(self):
        status, out, _ = self.run_it("kernels", "build", "s8_?8_s32_128x64x128", "--processes", "2")
        assert status == 0 and out.count("\n") == 3 and len(list(self.folder.glob("*.o"))) == 2

    @needs_dsl
    @pytest.mark.full
    def test_what_does_not_compile_is_named(self):
        odd = Variant(torch.int8, torch.int8, torch.int32, Tile(64, 40), tma=False)  # no such instruction
        good = ahead.matching(NAME)[0]
        for processes in ("1", "2"):
            with mock.patch.object(ahead, "matching", lambda _: [odd, good]):
                status, out, err = self.run_it("kernels", "build", "--processes", processes)
            assert status == 1 and f"{odd.name}: DSL" in out and "Traceback" not in out + err
            assert ahead.is_built(good) and not ahead.is_built(odd)
            next(self.folder.glob("*.o")).unlink()

    @parameterized.expand(
        [
            (("kernels", "list", "nothing"), 1, "no kernel is named 'nothing'"),
            (("kernels", "build", "--arch", "sm_80"), 2, "must be one of sm_90a, got 'sm_80'"),
            (("kernels", "build", "--processes", "0"), 2, "'--processes'"),
            (("kernels", "make"), 2, "No such command 'make'"),
        ]
    )
    def test_errors_are_one_line(self, arguments, status, words):
        found, _, err = self.run_it(*arguments)
        assert found == status and words in err and err.count("\n") == 1

    def test_a_folder_of_others_is_refused(self):
        self.folder.mkdir(mode=0o755)
        self.folder.chmod(0o755)
        status, _, err = self.run_it("kernels", "list")
        assert status == 1 and "mode 755" in err and err.count("\n") == 1

    def test_nowhere_to_keep(self):
        with mock.patch.dict(os.environ, {cache.FOLDER: ""}), mock.patch.object(ahead, "missing", lambda: None):
            status, _, err = self.run_it("kernels", "build", NAME)
        assert status == 1 and "HOP_CACHE_DIR is empty" in err

    def test_without_the_dsl(self):
        with mock.patch.object(ahead, "missing", lambda: "the CuTe DSL is not installed"):
            status, _, err = self.run_it("kernels", "build", NAME)
        assert status == 1 and "not installed" in err

    @pytest.mark.full
    def test_as_a_program(self):
        listing = subprocess.run(
            f"{sys.executable} -m hop kernels list | head -n 1", shell=True, capture_output=True, text=True, cwd=ROOT
        )
        assert listing.stdout.count("\n") == 1 and listing.stderr == ""
