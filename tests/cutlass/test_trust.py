"""Trials of GPU kernels before their first use, on a stand-in for a GPU that is right, wrong, late or absent.

The stand-in (tests/support/stand_in_gpu.py) replaces the device and its kernels; what checks them is the real code.
"""

import json
import os
import subprocess
import sys
import threading
import time
import unittest
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from cutlass_kernels import (
    cache,
    forms,
    hopper,
    operators,
    transposing,
    trial_products,
    trials,
    trust,
    verdicts,
)
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from cutlass_kernels.verdicts import Kind, Verdict
from tests.support.contexts import enter
from tests.support.kernel_folder import KernelFolder

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
KIND = Kind("9.0", 132, "13000 580.1", torch.__version__)
S8, BF16 = torch.int8, torch.bfloat16
INT8, SCALED, FP8, FAST, BLOCKS = (replace(form, tile=Tile(64, 64)) for form in forms.MAIN)
STAND_IN = str(ROOT / "tests" / "support" / "stand_in_gpu.py")


class OnStandIn(KernelFolder):
    """`faults` of kernels by name; `spawned` counts processes."""

    def setUp(self) -> None:
        super().setUp()
        self.faults: dict[str, str] = {}
        self.spawned = 0
        for where, name, value in (
            (verdicts, "kind_of", lambda device: KIND),
            (trust, "_command", self.command),
            (trust, "_known", {}),
            (trust, "_decided", {}),
            (trust, "_kinds", {}),
            (trust, "families", []),
            (trust, "is_capturing", lambda: False),
            (trust, "SECONDS", 240.0),  # a busy machine needs many seconds to start a process
        ):
            enter(self, mock.patch.object(where, name, value))
        enter(self, mock.patch.dict(os.environ, {trust.VARIABLE: "verified"}))

    def command(self) -> list[str]:
        self.spawned += 1
        return [sys.executable, STAND_IN, json.dumps(self.faults)]

    def answers(self, code: str, *lines: str) -> None:
        """Let a process answer these lines, and then run code."""
        says = "import os, sys, time; say = lambda line: os.write(int(sys.argv[1]), line.encode() + b'\\n')\n"
        program = says + "".join(f"say({line!r})\n" for line in lines) + code

        def command() -> list[str]:
            self.spawned += 1
            return [sys.executable, "-S", "-c", program]

        enter(self, mock.patch.object(trust, "_command", command))

    def reason(self, kernel: Any = INT8) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trust.declines(kernel, GPU)

    def restart(self) -> None:
        """Forget what this process knows, as a new one."""
        for known in (trust._known, trust._decided):
            known.clear()

    def kept(self) -> dict[str, Verdict]:
        return verdicts.read(KIND)


def stage(name: str, stage: str) -> str:
    return json.dumps({"kernel": name, "stage": stage})


def state(name: str, state: str, reason: str = "") -> str:
    return json.dumps({"kernel": name, "state": state, "reason": reason})


COMPILE, RUN = stage(INT8.name, "compile"), stage(INT8.name, "run")


class TestOnStandIn(OnStandIn):
    @pytest.mark.full
    def test_right_and_wrong_kernels(self) -> None:
        """One process tries all; wrong ones are off, and verdicts are kept."""
        self.faults = {SCALED.name: "one bit is wrong"}
        found = trust.check((INT8, SCALED), GPU, 240.0)
        assert [v.state for v in found.values()] == ["right", "wrong"] and self.kept() == found
        assert "1 of 16 elements are wrong" in found[SCALED.name].reason
        self.restart()
        assert "1 of 16 elements are wrong" in str(self.reason(SCALED)) and self.reason(INT8) is None
        assert self.spawned == 1

    @pytest.mark.full
    def test_another_process_goes_on(self) -> None:
        """After one that ended."""
        self.faults = {SCALED.name: "one bit is wrong", FP8.name: "errors"}
        found = trust.check((INT8, SCALED, FP8, BLOCKS), GPU, 240.0)
        assert [v.state for v in found.values()] == ["right", "wrong", "died", "right"], found
        assert "elements are wrong" in found[SCALED.name].reason and "illegal memory" in found[FP8.name].reason
        assert self.spawned == 2 and self.kept() == found
        self.restart()
        reason = self.reason(SCALED)
        assert reason is not None and SCALED.name in reason and "elements are wrong" in reason
        assert self.reason(INT8) is None and self.spawned == 2

    @parameterized.expand(
        [
            ("writes NaN", BLOCKS, "wrong", "elements are wrong"),
            ("writes garbage", INT8, "wrong", "two runs differ"),
            ("writes outside", INT8, "wrong", "memory outside the result was written"),
            ("faults", INT8, "died", "ended with status -11"),
            ("never ends", INT8, "hung", "may run for ever"),
            ("is killed", INT8, "", "ended with status -9"),
            ("leaves", INT8, "", "ended with status 0"),
            ("has no memory", INT8, "", "found no memory"),
            ("babbles", INT8, "", "senseless answer"),
            ("does not compile", INT8, "", "does not compile: RuntimeError: no such instruction"),
            ("compiles for ever", INT8, "", "took too long while"),
        ]
    )
    @pytest.mark.full
    def test_faults(self, fault: str, kernel: Variant, kept: str, words: str) -> None:
        """Each ends in a reason; only what is the kernel's own fault is kept for other processes."""
        self.faults = {kernel.name: fault}
        trust.SECONDS = 40.0 if fault == "compiles for ever" else 240.0
        with mock.patch.object(trust, "PATIENCE", 3.0), self.assertWarnsRegex(UserWarning, words):
            reason = trust.declines(kernel, GPU)
        assert reason is not None and words in reason and kernel.name in reason, reason
        assert [v.state for v in self.kept().values()] == [kept] * bool(kept)
        spawned = self.spawned
        assert self.reason(kernel) == reason and self.spawned == spawned, "it was tried again"

    @pytest.mark.full
    def test_every_form_can_be_tried(self) -> None:
        """Checks of every form, with one of its tiles each, pass on right kernels."""
        kernels = {}
        for v in forms.variants():
            if not v.group:
                kernels.setdefault(replace(v, tile=forms.MAIN[0].tile, tma=True), v)
        found = trust.check(kernels.values(), GPU, 600.0)
        assert len(found) == len(kernels) > 40 and {v.state for v in found.values()} == {"right"}, found


class TestAnswers(OnStandIn):
    """Processes that answer what they must not, or nothing."""

    @parameterized.expand(
        [
            ("nothing", (), "", "ended with status 0"),
            ("an error", (), "sys.exit('no driver is installed')", "status 1. no driver is installed"),
            ("no_json", ("right",), "", "senseless answer: b'right'"),
            ("a list", ("[]",), "", "senseless answer"),
            ("deep", ("[" * 9000,), "", "senseless answer"),
            ("another kernel", (stage("other", "compile"),), "", "senseless"),
            ("a verdict at once", (state(INT8.name, "right"),), "", "senseless"),
            ("a verdict before it ran", (COMPILE, state(INT8.name, "right")), "", "senseless"),
            ("another verdict", (COMPILE, RUN, state(INT8.name, "fine")), "", "senseless"),
            ("of another kernel", (COMPILE, RUN, state("other", "right")), "", "senseless"),
            ("a number", (COMPILE, RUN, '{"kernel": 1, "state": [], "reason": {}}'), "", "senseless"),
            ("a long reason", (COMPILE, RUN, state(INT8.name, "wrong", "x" * 9999)), "", "senseless"),
            ("too much", (), "[say('x' * 2**16) for _ in range(40)]", "senseless answer"),
            ("the end", ('{"end": true}',), "", "without a verdict"),
            ("half a line", (COMPILE, RUN), "os.write(int(sys.argv[1]), b'{\"kern')", "ended with status 0"),
        ]
    )
    def test_no_answer_is_trusted(self, _: str, lines: tuple[str, ...], code: str, words: str) -> None:
        self.answers(code, *lines)
        reason = self.reason()
        assert reason is not None and words in reason, reason
        assert self.spawned == 1 and not self.kept()

    def test_one_that_says_nothing_is_stopped(self) -> None:
        self.answers("time.sleep(600)")
        began = time.monotonic()
        with mock.patch.object(trust, "SECONDS", 2.0), mock.patch.object(trust, "PATIENCE", 1.0):
            reason = self.reason()
        assert (
            reason is not None and "took too long while its process started" in reason and "hop kernels check" in reason
        )
        assert time.monotonic() - began < 30 and not self.kept()

    def test_right_ones_are_kept(self) -> None:
        self.answers("", COMPILE, RUN, state(INT8.name, "right"), '{"end": true}')
        assert self.reason() is None and [v.state for v in self.kept().values()] == ["right"]

    def test_what_was_found_before_a_fault_is_kept(self) -> None:
        lines = (stage(SCALED.name, "compile"), stage(SCALED.name, "run"), state(SCALED.name, "right"))
        self.answers("os.kill(os.getpid(), 11)", *lines, COMPILE, RUN)
        found = trust.check((SCALED, INT8), GPU, 60.0)
        assert [v.state for v in found.values()] == ["right", "died"] and self.spawned == 1

    def test_no_interpreter(self) -> None:
        enter(self, mock.patch.object(trust, "_command", lambda: ["/nowhere/python"]))
        reason = self.reason()
        assert reason is not None and "did not start" in reason and not self.kept()

    def test_what_nothing_can_check(self) -> None:
        with mock.patch.dict(trust.JUDGES, clear=True):
            reason = self.reason()
        assert reason is not None and "nothing here can check it" in reason and self.spawned == 0


class TestModes(OnStandIn):
    def setUp(self) -> None:
        super().setUp()
        self.answers("", COMPILE, RUN, state(INT8.name, "wrong", "its results are wrong"))

    def test_all_and_off(self) -> None:
        for chosen, reason in (("all", None), ("off", "HOP_GPU_KERNELS=off")):
            with mock.patch.dict(os.environ, {trust.VARIABLE: chosen}):
                assert self.reason() == reason
        assert self.spawned == 0

    def test_verified_is_the_default(self) -> None:
        for chosen in ("", "verified"):
            with mock.patch.dict(os.environ, {trust.VARIABLE: chosen}):
                self.assertIn("its results are wrong", str(self.reason()))
        assert self.spawned == 1

    def test_others_are_errors(self) -> None:
        with (
            mock.patch.dict(os.environ, {trust.VARIABLE: "yes"}),
            self.assertRaisesRegex(ValueError, "HOP_GPU_KERNELS must be one of verified, all, off, got 'yes'"),
        ):
            trust.declines(INT8, GPU)

    def test_one_warning(self) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                trust.declines(INT8, GPU)
        assert len(seen) == 1 and "HOP_GPU_KERNELS=off" in str(seen[0].message) and INT8.name in str(seen[0].message)

    def test_while_a_graph_is_captured_nothing_is_tried(self) -> None:
        with mock.patch.object(trust, "is_capturing", lambda: True):
            assert "while a CUDA graph is captured" in str(self.reason()) and self.spawned == 0
        assert "its results are wrong" in str(self.reason()), "what was said during the capture was kept"
        with mock.patch.object(trust, "is_capturing", lambda: True):
            assert "its results are wrong" in str(self.reason())


class TestKept(OnStandIn):
    """The file of verdicts, and its lock."""

    def setUp(self) -> None:
        super().setUp()
        self.answers("", COMPILE, RUN, state(INT8.name, "right"))

    def write(self, content: bytes) -> None:
        cache.folder()
        assert KIND.path is not None
        KIND.path.write_bytes(content)

    @parameterized.expand(
        [
            (b"",),
            (b"\xff\x00",),
            (b"[]",),
            (b'{"kind": {}, "kernels": {}}',),
            (b"[" * 100_000,),
            (b" " * (2**22 + 1),),
        ]
    )
    def test_damaged_files_are_not_read(self, content: bytes) -> None:
        self.write(content)
        with self.assertWarnsRegex(UserWarning, "holds no verdicts on GPU kernels"):
            assert verdicts.read(KIND) == {}
        assert self.reason() is None and self.spawned == 1 and self.kept()[INT8.name].is_right

    def test_odd_entries_are_not_read(self) -> None:
        self.reason()
        assert KIND.path is not None
        good = json.loads(KIND.path.read_text())
        for entry in ("right", ["right"], ["fine", "", ""], ["right", "x" * 9999, ""], [1, "", ""]):
            self.write(json.dumps(good | {"kernels": {INT8.name: entry}}).encode())
            with self.assertWarns(UserWarning):
                assert verdicts.read(KIND) == {}
        self.write(json.dumps(good | {"kind": good["kind"] | {"driver": "another"}}).encode())
        with self.assertWarns(UserWarning):
            assert verdicts.read(KIND) == {}

    def test_a_kernel_that_changed_is_tried_again(self) -> None:
        self.reason()
        self.restart()
        with mock.patch.object(cache, "_version", lambda: "0" * 16):
            assert self.reason() is None
        assert self.spawned == 2

    def test_each_kind_of_gpu_has_its_own(self) -> None:
        kinds = [replace(KIND, driver="1"), replace(KIND, capability="10.0"), replace(KIND, multiprocessors=78), KIND]
        assert len({kind.path for kind in kinds}) == 4
        self.reason()
        assert verdicts.read(kinds[0]) == {} and verdicts.read(KIND)

    def test_a_folder_that_others_write_is_an_error(self) -> None:
        cache.folder()
        self.folder.chmod(0o777)
        with self.assertRaises(PermissionError):
            trust.declines(INT8, GPU)

    def test_without_a_folder(self) -> None:
        with mock.patch.dict(os.environ, {cache.FOLDER: ""}):
            assert self.reason() is None and self.reason() is None and self.spawned == 1

    @pytest.mark.full
    def test_ranks_share_one_trial(self) -> None:
        """Processes, here of threads with memories of their own, wait for the lock and read the verdict."""
        self.answers("time.sleep(1)", COMPILE, RUN, state(INT8.name, "right"))
        with verdicts.locked(KIND, 1.0) as alone:
            assert alone
            with verdicts.locked(KIND, 0.2) as other:
                assert not other, "two processes hold the lock"
        right = f"Verdict('right', '', {cache.identity(INT8.name, 'sm_90a')!r})"
        code = (
            "import sys, torch; from cutlass_kernels import verdicts; from cutlass_kernels.verdicts import *\n"
            f"kind = {KIND!r}\n"
            "with verdicts.locked(kind, 60):\n"
            "    print('locked', flush=True); sys.stdin.readline()\n"
            f"    verdicts.add(kind, {{{INT8.name!r}: {right}}})\n"
        )
        rank = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert rank.stdin is not None and rank.stdout is not None and rank.stdout.readline() == "locked\n"
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(self.reason()))
        waiting.start()
        time.sleep(0.3)
        assert not found and self.spawned == 0, "it did not wait"
        rank.communicate("\n")
        waiting.join(60)
        assert found == [None] and self.spawned == 0

    def test_a_lock_that_is_never_released(self) -> None:
        with (
            verdicts.locked(KIND, 1.0),
            mock.patch.object(trust, "SECONDS", 0.3),
            mock.patch.object(trust, "PATIENCE", 0),
        ):
            reason = self.reason()
        assert reason is not None and "another process has been checking" in reason and self.spawned == 0

    def test_no_locks_on_the_file_system(self) -> None:
        with mock.patch.object(verdicts.fcntl, "flock", side_effect=OSError(37, "no locks available")):
            assert self.reason() is None

    def test_families_are_tried_beside_the_first(self) -> None:
        self.answers("", COMPILE, RUN, state(INT8.name, "right"), stage(SCALED.name, "compile"),
            stage(SCALED.name, "run"), state(SCALED.name, "right"), '{"end": true}')  # fmt: skip
        trust.families.append(lambda: [SCALED, INT8])
        assert self.reason(INT8) is None and self.spawned == 1
        assert self.reason(SCALED) is None and self.spawned == 1


class TestRoutes(OnStandIn):
    """What kernels that are off, or not yet tried, do to a call."""

    def setUp(self) -> None:
        super().setUp()
        for name, value in (
            ("cutlass_kernels.operators.missing", lambda: None),
            ("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            ("torch.cuda.get_device_name", lambda *_: "a GPU"),
            ("cutlass_kernels.hopper.multiprocessors", lambda device: 132),
        ):
            enter(self, mock.patch(name, value))

    def routes(self) -> list[tuple[str, str | None]]:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, weight = (torch.empty(rows, 128, dtype=S8, device="cuda:0") for rows in (64, 256))
            return operators.routes(Product(x, weight.mT, torch.int32), (9, 0))

    def known(self, name: str, verdict: Verdict) -> None:
        trust._known[KIND, name, cache.identity(name, "sm_90a")] = verdict

    def chosen(self) -> Variant:
        p = Product(torch.empty(64, 128, dtype=S8), torch.empty(256, 128, dtype=S8).mT, torch.int32)
        found = hopper.variant_of(p)
        assert isinstance(found, Variant)
        return found

    def test_a_kernel_that_is_right_runs(self) -> None:
        self.known(self.chosen().name, Verdict("right"))
        assert self.routes() == [("hopper", None)]

    def test_one_that_is_wrong_leaves_the_call_to_pytorch(self) -> None:
        self.known(self.chosen().name, Verdict("wrong", "its results are wrong: 3 of 4"))
        (_, reason), *_, (last, none) = self.routes()
        assert "its results are wrong: 3 of 4" in str(reason) and (last, none) == ("public", None)

    def test_off(self) -> None:
        with mock.patch.dict(os.environ, {trust.VARIABLE: "off"}):
            assert self.routes()[0] == ("hopper", "HOP_GPU_KERNELS=off") and self.spawned == 0

    def test_traces_use_what_is_verified_and_make_no_guards(self) -> None:
        """Symbols stand for the sizes that they were traced with."""
        self.known(self.chosen().name, Verdict("right"))
        real = torch.empty(64, 128)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            rows = mode.from_tensor(real, symbolic_context=context).shape[0]
            assert isinstance(rows, torch.SymInt)
            x = torch.empty(rows, 128, dtype=S8, device="cuda:0")
            weight = torch.empty(256, 128, dtype=S8, device="cuda:0").mT
            assert operators._untrusted(Product(x, weight, torch.int32), operators._hopper_kernel) is None
            guards = [str(guard.expr) for guard in mode.shape_env.guards]
        assert not guards, guards

    def test_other_kernels_ask_too(self) -> None:
        with mock.patch.dict(os.environ, {trust.VARIABLE: "off"}), FakeTensorMode():
            x = torch.empty(64, 128, dtype=torch.uint8, device="cuda:0").mT
            with (
                mock.patch.object(cache, "missing", lambda: None),
                mock.patch.object(torch.Tensor, "data_ptr", lambda _: 0),
            ):
                assert transposing.declines(x) == "HOP_GPU_KERNELS=off"


class TestTrials(unittest.TestCase):
    @pytest.mark.full
    def test_assertions_that_are_left_out_are_no_checks(self) -> None:
        done = subprocess.run(
            [sys.executable, "-O", "-c", "from cutlass_kernels import trials; trials.main()", "1", "0"],
            input=b"",
            capture_output=True,
            cwd=ROOT,
        )
        assert done.returncode == 1 and b"checks are assertions, which this interpreter leaves out" in done.stderr

    def test_no_checks_are_no_verdict(self) -> None:
        judged = trials.Judged(lambda: None, ())
        with mock.patch.object(trial_products, "product", lambda *_: judged):
            trial = trials.Trial("k", "cutlass_kernels.trial_products:product", None)
            assert trials.tried(trial, torch.device("cpu"), lambda **_: None)[0] == verdicts.UNCHECKED

    @pytest.mark.full
    def test_sizes_end_within_tiles_and_chunks(self) -> None:
        for v in list(forms.variants())[::5]:
            if not v.group:
                found = list(trial_products.cases(v))
                assert len(found) >= 4, v
                assert all(case.variant() == v for case in found)
                rows = v.tile.n if v.tile.swap else v.tile.m
                assert any(case.shape[0] % rows for case in found) and any(case.shape[0] > rows for case in found)
