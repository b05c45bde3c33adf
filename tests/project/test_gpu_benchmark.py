"""The GPU benchmark without a GPU: its isolation, its budget, its goals, and what it says of made-up rows."""

import contextlib
import importlib
import io
import json
import os
import signal
import time
import unittest
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from parameterized import parameterized

import hop
from benchmarks import (
    gpu,
    gpu_cases,
    gpu_checks,
    gpu_first,
    gpu_groups,
    gpu_instructions,
    gpu_journal,
    gpu_machine,
    gpu_operators,
    gpu_profiles,
    gpu_quantize,
    gpu_quantize_counts,
    gpu_report,
    gpu_run,
    gpu_stages,
    gpu_steps,
    gpu_times,
    isolated,
)
from benchmarks import registry as benchmarks_registry
from cutlass_kernels import forms, hopper, missing, oracle, patches, prebuilt, product, registry, tiles, trust, tune
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Variant
from docs import gpu_tables
from tests.support import stand_in_gpu
from tests.support.contexts import enter
from tests.support.files import InFolder

pytestmark = pytest.mark.full

MODULE = "tests.project.test_gpu_benchmark"


# ---- groups that a child runs


def passing(count="2"):
    for i in range(int(count)):
        yield f"case {i}", lambda i=i: i


def _fail():
    raise AssertionError("7 of 9 elements are wrong")


def failing():
    yield "good", lambda: 1
    yield "bad", _fail
    yield "good again", lambda: 2


def wrong():
    yield "bad", _fail


def noted(path):
    """Cases that note in a file that they ran; the third one ends the process the first time."""

    def ran(i):
        with open(path, "a") as file:
            file.write(f"{i} ")
        if i == 2 and Path(path).read_text().count("2 ") == 1:
            os._exit(7)
        return float(i)

    for i in range(5):
        yield f"case {i}", lambda i=i: ran(i)


def skipped():
    def cannot():
        raise unittest.SkipTest("no such tool")

    yield "good", lambda: 1
    yield "not here", cannot


def nothing():
    return iter(())


def hanging():
    yield "good", lambda: 1
    yield "endless", lambda: time.sleep(600)
    yield "good again", lambda: 2


def dying():
    yield "good", lambda: 1
    yield "killed", lambda: os.kill(os.getpid(), signal.SIGSEGV)
    yield "good again", lambda: 2


def poisoned():
    """As an error of a GPU, after which every call of the process fails."""
    isolated._is_poisoned = lambda: True
    yield "good", lambda: 1
    yield "bad", _fail
    yield "good again", lambda: 2


def all_dying():
    for i in range(9):
        yield f"case {i}", lambda: os._exit(5)


def without_a_start():
    raise OSError("no such device")


def slow():
    for i in range(500):
        yield f"case {i}", lambda: time.sleep(0.5)


def rows():
    yield "a row", lambda: row(m=4096)


def run(group, seconds=600.0, **options):
    found = isolated.run(f"{MODULE}:{group}", time.monotonic() + seconds, **options)
    return [(o.case, o.state, o.value, o.error) for o in found]


class TestIsolation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """How long the start of a process takes, which on a busy machine is many seconds."""
        began = time.monotonic()
        run("passing:0", patience=600.0)
        cls.start = time.monotonic() - began

    def test_cases_pass(self):
        assert run("passing:3") == [(f"case {i}", "passed", i, "") for i in range(3)]

    def test_what_cannot_run_here_says_why(self):
        assert run("skipped") == [("good", "passed", 1, ""), ("not here", "skipped", None, "no such tool")]

    @pytest.mark.full
    def test_a_failure_does_not_stop_the_rest(self):
        first, second, third = run("failing")
        assert (first[:3], third[:3]) == (("good", "passed", 1), ("good again", "passed", 2))
        assert second[1] == "failed" and second[3].startswith("AssertionError: 7 of 9 elements are wrong (test_gpu")

    @parameterized.expand(
        [
            ("hanging", "endless", "hung", "nothing was heard for"),
            ("dying", "killed", "died", f"status {-signal.SIGSEGV}"),
            ("poisoned", "bad", "failed", "AssertionError"),
        ]
    )
    @pytest.mark.full
    def test_a_process_that_cannot_go_on_is_replaced(self, group, case, state, error):
        outcomes = run(group, patience=4 + 4 * self.start)
        assert [o[:2] for o in outcomes] == [("good", "passed"), (case, state), ("good again", "passed")]
        assert error in outcomes[1][3]

    @pytest.mark.full
    def test_not_for_ever(self):
        outcomes = run("all_dying", restarts=2)
        assert [o[1] for o in outcomes] == ["died"] * 3 + ["skipped"] and outcomes[-1][0] == "from case 3 on"

    def test_a_group_that_does_not_start(self):
        ((case, state, _, error),) = run("without_a_start")
        assert (case, state) == ("(start)", "died") and "no such device" in error

    @pytest.mark.full
    def test_time_runs_out(self):
        *done, last = run("slow", seconds=2 + 3 * self.start, patience=600.0)
        assert 0 < len(done) < 500 and last[1] == "skipped"
        assert last[0] == f"{500 - len(done)} cases" and {o[1] for o in done} == {"passed"}

    @pytest.mark.full
    def test_groups_side_by_side(self):
        groups = [f"{MODULE}:{name}" for name in ("passing:2", "failing", "passing:1")]
        outcomes = list(isolated.together(groups, time.monotonic() + 600, workers=2))
        assert sorted(o.state for o in outcomes) == ["failed", *["passed"] * 5]


# ---- made-up results


def row(group="int8", m=4096, n=4096, k=4096, failed=None, **us):
    us = us or {"ours": 100.0, "_int_mm": 110.0}
    return {
        "group": group,
        "m": m,
        "n": n,
        "k": k,
        "bytes": m * k + k * n + 4 * m * n,
        "us": us,
        "failed": failed or {},
    }


def results(*rows, **more):
    return {"rows": list(rows), "limits": {"copy": 4e12}, **more}


def goal(name, *rows, **more):
    return next(g for g in gpu_report.goals(results(*rows, **more)) if g["name"].startswith(name))


class TestReport(unittest.TestCase):
    def test_goals_are_geometric_means(self):
        rows = [row(m=64, ours=1.0, _int_mm=4.0), row(m=1, ours=2.0, _int_mm=1.0)]
        found = goal("int8 to int32, times", *rows)
        assert abs(found["mean"] - 2**0.5) < 1e-9 and found["rows"] == 2 and found["met"]
        assert found["lowest"] == 0.5 and found["lowest_at"] == [1, 4096, 4096]
        assert goal("int8 to int32, times", row(ours=10.0, _int_mm=9.9))["met"] is False

    def test_a_peer_that_took_no_product(self):
        found = goal("int8 to int32, times", row(ours=1.0), row(ours=1.0, _int_mm=1.5))
        assert found["rows"] == 1 and found["mean"] == 1.5

    def test_nothing_was_measured(self):
        assert {g["met"] for g in gpu_report.goals({})} == {None}
        assert all("not measured" in gpu_report.goal_line(g) for g in gpu_report.goals({}))

    def test_operations_and_bytes(self):
        r = row(m=4096, n=4096, k=4096, ours=100.0)
        assert abs(gpu_report.tops(r) - 2 * 4096**3 / 1e-4 / 1e12) < 1e-6
        assert (
            goal("int8 to int32, M >= 4096", r)["met"] and goal("int8 to int32, M >= 4096", row(m=1024))["met"] is None
        )
        few = row("fp8", 16, 8192, 8192, ours=20.0)
        share = goal("fp8, M <= 32", few)["mean"]
        assert abs(share - 100 * few["bytes"] / 20e-6 / 4e12) < 1e-9
        assert gpu_report.of_memory(few, {"rows": []}) is None

    def test_host(self):
        assert goal("host time", host={"ours, scaled": 7.9})["met"]
        assert goal("host time", host={"ours, scaled": 8.1})["met"] is False

    def test_table(self):
        made = results(
            row(ours=100.0, _int_mm=150.0),
            row(n=8192, ours=200.0, _int_mm=200.0),
            row("fp8", 16, **{"ours": 10.0, "ours fast": 8.0, "_scaled_mm": 12.0, "_scaled_mm fast": 12.0}),
            row("fp8 blocks", 64, failed={"scaled_mm": "not there"}, ours=10.0),
        )
        made["goals"] = gpu_report.goals(made)
        header, rule, *lines = gpu_report.table(made).splitlines()
        assert header.count("|") == rule.count("|") == 6 and len(lines) == 4
        assert lines[0].startswith("| int8 | 4096 | 1374 | 69 % of peak | 1.22 _int_mm |")
        assert "| fp8 fast | 16 |" in lines[2] and "1.50 _scaled_mm fast" in lines[2]
        assert lines[3].endswith("| – |")
        assert gpu_report.table(made) in gpu_report.markdown(made)
        assert "not there" in gpu_report.line(made["rows"][3], made)

    def test_tile_line(self):
        timed = row(**{"ours 64x64x128": 2.0, "ours 128x128x128": 1.0}) | {"form": "fp8", "chosen": "ours 64x64x128"}
        assert "2.00 times the time of ours 128x128x128" in gpu_report.tile_line(timed)


class TestOracle(unittest.TestCase):
    def product(self):
        lhs, rhs = torch.full((3, 64), 2, dtype=torch.int8), torch.full((64, 5), -3, dtype=torch.int8)
        return Product(lhs, rhs, torch.int32)

    def test_exact_integers(self):
        good = torch.full((3, 5), -384, dtype=torch.int32)
        oracle.compare(good, self.product(), exact=True)
        good[1, 2] += 1
        with self.assertRaisesRegex(AssertionError, r"1 of 15 elements are wrong, the first at \(1, 2\): -383.0"):
            oracle.compare(good, self.product(), exact=True)

    def test_floats_within_a_bound(self):
        case = gpu_cases.Case(gpu_cases.BASIC[2], None, (40, 48, 512))
        p = case.product("cpu")
        right = oracle._expected(p)[0].to(torch.bfloat16)
        assert oracle.compare(right, p, exact=False) < 1
        for wrong in (right * 1.2, right.roll(1, 0), torch.full_like(right, torch.nan)):
            with self.assertRaisesRegex(AssertionError, "elements are wrong"):
                oracle.compare(wrong, p, exact=False)

    def test_of_plain_torch(self):
        """The reference of the package gives the same."""
        from cutlass_kernels import plain

        for form in gpu_cases.FORMS:
            values = "random" if form.is_integer else "whole"
            p = gpu_cases.Case(form, None, (9, 40, 150), values).product("cpu")
            with self.subTest(form=form.name):
                oracle.compare(plain.reference(p), p, exact=True)


class TestCases(unittest.TestCase):
    def test_every_tile_and_every_form(self):
        every = [case for form in gpu_cases.FORMS for case in gpu_cases.cases(form)]
        assert {case.tile for case in every} == set(tiles.TILES)
        assert {case.form for case in every} == set(gpu_cases.FORMS)
        assert len({form.name for form in gpu_cases.FORMS}) == len(gpu_cases.FORMS)
        assert len({str(case) for case in every}) == len(every)
        assert not [case for case in every if isinstance(case.variant(), str)]
        assert {case.strides for case in every} | {"sliced", "misaligned"} <= set(gpu_cases.STRIDES)

    def test_groups_cover_them(self):
        groups = [name.split(":") for name in gpu_checks.names()]
        firsts = [int(parts[2]) for parts in groups if parts[1] == "check"]
        assert sorted(firsts) == list(range(0, len(gpu_cases.FORMS), gpu_checks.CHUNK))
        timed = [name.split(":") for name in gpu_times.names()]
        assert all(callable(getattr(importlib.import_module(module), name)) for module, name in timed)
        assert {name.split(":")[1] for name in gpu_times.names()} == set(gpu_run.WEIGHTS)

    def test_what_the_registry_compiles(self):
        """The file is of the versions that tests run with, and says what the route says."""
        found = json.loads(benchmarks_registry.OUTPUT.read_text())
        for package in ("nvidia-cutlass-operators", "nvidia-cutlass-dsl"):
            assert found["versions"][package] == ".".join(map(str, patches.TESTED[package][-1])), package
        cases = dict(benchmarks_registry.cases())
        assert set(found["targets"]) == set(benchmarks_registry.TARGETS)
        for target, own in found["targets"].items():
            assert own.keys() == cases.keys()
            for name, case in cases.items():
                is_there = target in registry.TARGETS.values() and not (
                    target in registry._NO_INTEGERS and case.lhs in product.INTEGERS
                )
                assert ("seconds" in own[name]) == is_there, (target, name)

    def test_kernels_to_build(self):
        own = gpu_groups.variants()
        assert len(set(own)) == len(own) and all(v.declines() is None for v in own if isinstance(v, Variant))
        assert set(gpu_quantize.variants()) <= set(own)
        assert {v for v in forms.variants() if v.tma} <= set(own), "what is compiled ahead of time is checked"

    def test_in_turns_on_a_cpu(self):
        x = torch.zeros(4, 4)
        assert tune.in_turns(x) == [x]


class TestRun(InFolder):
    def setUp(self):
        super().setUp()
        self.output = self.folder / "results" / "gpu.json"

    def main(self, *arguments):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = gpu.main([*arguments, "--output", str(self.output)])
        return status, said.getvalue()

    @unittest.skipIf(missing() is not None, str(missing()))
    def test_without_a_gpu(self):
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            status, said = self.main()
        assert status == 3 and "no CUDA device" in said and said.count("\n") == 1 and not self.output.exists()

    def test_without_the_compiler(self):
        with mock.patch.object(gpu, "missing", lambda: "the CuTe DSL is not installed"):
            status, said = self.main()
        assert (status, said) == (3, "nothing to run: the CuTe DSL is not installed; or name kernels in HOP_KERNELS\n")
        with (
            mock.patch.object(gpu, "missing", lambda: "the CuTe DSL is not installed"),
            mock.patch.dict(os.environ, {prebuilt.FOLDER: "/nowhere"}),
        ):
            status, said = self.main()
        assert status == 3 and "/nowhere holds no kernels" in said and "hop kernels build --out" in said

    @unittest.skipIf(missing() is not None, str(missing()))
    @pytest.mark.full
    def test_emulated(self):
        status, said = self.main("--emulated")
        assert status == 0, said
        assert "4 checks passed, 0 cases failed" in said and "host, ours, scaled" in said and not self.output.exists()

    @pytest.mark.full
    def test_results_are_written_when_something_fails(self):
        made = gpu_run.Run(60, self.output)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            gpu_run.check(made, [f"{MODULE}:failing", f"{MODULE}:passing:1"])
            gpu_run.measure(made, [f"{MODULE}:rows"])
            incomplete = json.loads(self.output.read_text())
            status = gpu_run.finish(made)
        assert status == 1 and "FAILED" in said.getvalue() and "int8 to int32, times" in said.getvalue()
        found = json.loads(self.output.read_text())
        assert (incomplete["complete"], found["complete"]) == (False, True)
        assert found["checks"]["passed"] == 3 and found["rows"] == [row(m=4096)]
        assert [(f["case"], f["state"]) for f in found["failed"]] == [("bad", "failed")]
        assert found["goals"][0]["met"] is True

    @pytest.mark.full
    def test_what_no_time_is_left_for_is_named(self):
        made = gpu_run.Run(0.0, None)
        patience = mock.patch.object(isolated, "_GRACE", 120.0)  # a busy machine takes long to start a process
        with patience, contextlib.redirect_stdout(io.StringIO()) as said:
            gpu_run.check(made, [f"{MODULE}:passing:4"])
            gpu_run.measure(made, [f"{MODULE}:rows"])
            assert gpu_run.finish(made) == gpu_run.NOTHING_RAN
        assert [s["case"] for s in made.results["skipped"]] == ["4 cases", "1 cases"]
        assert said.getvalue().count("no time was left") >= 2

    def test_shares_of_the_time(self):
        made, seen = gpu_run.Run(1000.0, None), []
        with mock.patch.object(isolated, "run", lambda group, deadline, **_: seen.append(deadline) or iter(())):
            gpu_run.measure(made, gpu_times.names())
        left = [deadline - made.begin for deadline in seen]
        weights = list(gpu_run.WEIGHTS.values())
        assert abs(left[0] - 970 * weights[0] / sum(weights)) < 1 and abs(left[-1] - 970) < 1, left
        made, seen = gpu_run.Run(60.0, None), []
        with mock.patch.object(isolated, "run", lambda group, deadline, **_: seen.append(deadline) or iter(())):
            gpu_run.measure(made, gpu_times.names())
        assert abs(seen[0] - made.begin - gpu_run.LEAST) < 1 and max(seen) <= made.until(gpu_run.WRITTEN)


class TestStages(InFolder):
    """The order of stages and their results, of groups that need no GPU."""

    VERSIONS: ClassVar = {"device": "a GPU", "torch": "2"}

    def setUp(self):
        super().setUp()
        self.output = self.folder / "gpu.json"

    def run_stages(self, *names, versions=VERSIONS, **groups):
        made = gpu_run.Run(60.0, self.output)
        made.results["versions"] = versions
        first = next(iter(groups))
        stages = {
            name: gpu_stages.Stage(60.0, name, gpu_stages._one_by_one([f"{MODULE}:{group}"], 60.0), first=name == first)
            for name, group in groups.items()
        }
        said = io.StringIO()
        with mock.patch.object(gpu_stages, "STAGES", stages), contextlib.redirect_stdout(said):
            status = gpu_stages.run_all(made, names)
        return status, said.getvalue(), json.loads(self.output.read_text())

    @pytest.mark.full
    def test_each_says_what_ran(self):
        status, said, found = self.run_stages("all", one="passing:1", two="skipped", three="nothing")
        assert status == 0 and "nothing ran of: three" in said and "one: 1 passed" in said
        counts = {name: (s["passed"], s["failed"], s["skipped"]) for name, s in found["stages"].items()}
        assert counts == {"one": (1, 0, 0), "two": (1, 0, 1), "three": (0, 0, 0)}
        assert found["one"]["case 0"]["value"] == 0 and found["skipped"][0]["stage"] == "two"
        page = gpu_tables.measured(self.output)
        assert "On device a GPU, torch 2." in page and "* skipped: two, not here: no such tool" in page

    def test_nothing_ran(self):
        status, said, _ = self.run_stages("one", one="nothing")
        assert status == 3 and "nothing ran of: one" in said

    def test_after_the_first_failed_nothing_runs(self):
        status, said, found = self.run_stages("all", one="wrong", two="passing:1")
        assert status == 1 and "two: did not run: one failed" in said and found["stages"]["two"]["skipped"] == 1
        assert [e["stage"] for e in found["failed"]] == ["one"] and "7 of 9 elements are wrong" in said

    @pytest.mark.full
    def test_results_are_added_up(self):
        self.run_stages("one", one="failing", two="passing:1")
        status, _, found = self.run_stages("two", one="failing", two="passing:1")
        assert status == 0 and list(found["stages"]) == ["one", "two"] and len(found["failed"]) == 1
        _, _, found = self.run_stages("one", one="passing:1", two="passing:1")
        assert found["failed"] == [] and found["stages"]["one"]["passed"] == 1, "what a stage found before is forgotten"
        _, _, found = self.run_stages("two", versions={"device": "another"}, one="passing:1", two="passing:1")
        assert list(found["stages"]) == ["two"], "results of another machine do not stand beside these"


class TestResuming(InFolder):
    """A call that is cut off leaves what it had, and the next one goes on."""

    def setUp(self):
        super().setUp()
        self.output, self.notes = self.folder / "gpu.json", self.folder / "notes"
        self.group = f"{MODULE}:noted:{self.notes}"

    def run_stage(self, seconds=600.0, sources="a", **machine):
        made = gpu_run.Run(600.0, self.output)
        made.results["versions"] = {"device": "a GPU"} | machine
        stage = gpu_stages.Stage(seconds, "noted", gpu_stages._one_by_one([self.group], 600.0), first=True)
        with (
            mock.patch.object(gpu_stages, "STAGES", {"one": stage}),
            mock.patch.object(prebuilt, "sources", lambda: sources),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            status = gpu_stages.run_all(made, ["one"])
        return status, json.loads(self.output.read_text())

    def ran(self):
        return self.notes.read_text().split() if self.notes.exists() else []

    @pytest.mark.full
    def test_cases_that_are_done_are_not_run_again(self):
        journal = gpu_journal.Journal(self.output.with_suffix(".jsonl"), self.machine())
        for i in range(2):
            journal.add(isolated.Outcome(self.group, f"case {i}", "passed", float(i)))
        with journal.path.open("a") as file:
            file.write('{"group": "cut o')
        status, found = self.run_stage()
        assert self.ran() == ["2", "3", "4"] and status == 1
        values = {name: entry["value"] for name, entry in found["one"].items()}
        assert values == {"case 0": 0.0, "case 1": 1.0, "case 3": 3.0, "case 4": 4.0}
        assert [(e["case"], e["state"]) for e in found["failed"]] == [("case 2", "died")]
        assert self.run_stage() == (1, found | {"seconds": mock.ANY, "stages": mock.ANY}) and len(self.ran()) == 3
        self.run_stage(sources="b")
        assert len(self.ran()) == 8, "outcomes of other sources were kept"
        self.run_stage(driver="another", sources="b")
        assert len(self.ran()) == 13, "outcomes of another machine were kept"

    def machine(self, sources="a"):
        return {"machine": gpu_report.machine({"device": "a GPU"}), "sources": sources}

    def test_what_no_time_was_left_for_is_run_by_the_next_call(self):
        _, found = self.run_stage(seconds=0.0)
        assert self.ran() == [] and found["skipped"][0]["error"] == isolated.NO_TIME
        path = self.output.with_suffix(".jsonl")
        journal = gpu_journal.Journal(path, self.machine())
        assert journal.of(self.group) == [] and self.group not in journal.closed

    def test_results_are_written_as_they_come(self):
        made = gpu_run.Run(600.0, self.output)
        made.journal = gpu_journal.Journal(self.output.with_suffix(".jsonl"), {})
        outcomes = [isolated.Outcome("g", f"case {i}", "passed", 1.0) for i in range(3)]
        with (
            mock.patch.object(isolated, "together", lambda *_, **__: iter(outcomes)),
            mock.patch.object(gpu_run, "EVERY", -1.0),
        ):
            cases = made.good(made.cases(["g"], 0.0))
            assert [next(cases).case, next(cases).case] == ["case 0", "case 1"]
            lines = self.output.with_suffix(".jsonl").read_text().splitlines()
        assert self.output.exists() and json.loads(self.output.read_text())["complete"] is False
        assert [json.loads(line)["case"] for line in lines[1:]] == ["case 0", "case 1"]

    def test_a_damaged_journal_is_read_up_to_the_damage(self):
        path = self.folder / "gpu.jsonl"
        journal = gpu_journal.Journal(path, {})
        journal.add(isolated.Outcome("g", "case 0", "passed", 1.0))
        good = path.read_bytes()
        for damage in (b"\xff\n", b"[]\n", b'{"group": "g"', b'{"group": "g"}\n'):
            path.write_bytes(good + damage)
            assert gpu_journal.Journal(path, {}).names("g") == ["case 0"] and path.read_bytes() == good
        for content in (b"", b"nonsense", b"[]"):
            path.write_bytes(content)
            assert gpu_journal.Journal(path, {}).names("g") == []

    def test_stages_fit_a_quarter_of_an_hour(self):
        first, *_ = gpu_stages.STAGES.values()
        assert first.first and first.seconds == 90.0 and sum(s.seconds for s in gpu_stages.STAGES.values()) <= 840.0


class TestFirst(unittest.TestCase):
    """The first stage, on the stand-in for a GPU."""

    def test_a_kernel_of_each_family(self):
        kernels = gpu_first.kernels()
        kinds = {type(k).__name__ for k in kernels}
        assert kinds == {"Variant", "Transposition", "Rows", "Tiles", "Columns", "Largest", "Numbers", "Update"}
        products = [k for k in kernels if isinstance(k, Variant)]
        assert {v.groups for v in products} == {"", "rows", "columns", "k"}
        assert {bool(v.group) for v in products} == {False, True}
        assert set(kernels) <= set(gpu_groups.GROUPS["first"]()) <= set(gpu_groups.variants())
        assert [name for name, _ in gpu_first.families()] == [k.name for k in kernels]

    def test_wrong_kernels_fail(self):
        v = gpu_first.kernels()[0]
        for fault, words in (("", None), ("one bit is wrong", "wrong: its results are wrong")):
            with (
                mock.patch.dict(stand_in_gpu.FAULTS, {v.name: fault}),
                mock.patch.object(hopper, "compiled", stand_in_gpu.compiled),
            ):
                if words is None:
                    gpu_first.tried(trust.trial_of(v), "cpu")
                else:
                    with self.assertRaisesRegex(AssertionError, words):
                        gpu_first.tried(trust.trial_of(v), "cpu")

    def test_groups_are_there(self):
        for group in (*gpu_first.names(), *gpu_first.timings()):
            module, function, *_ = group.split(":")
            assert callable(getattr(importlib.import_module(module), function))


class TestOnTheMachine(InFolder):
    """What is asked of a GPU's machine, here of programs that stand in for its own."""

    def setUp(self):
        super().setUp()
        enter(self, mock.patch.dict(os.environ, {"PATH": f"{self.folder}:{os.environ['PATH']}"}))

    def program(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def test_clocks(self):
        self.program("nvidia-smi", "echo '1980, 3201, 1980, 3201, 700.00, 41'")
        assert gpu_machine.clocks()["clocks.sm"] == "1980" and gpu_machine.clocks()["temperature.gpu"] == "41"
        self.program("nvidia-smi", "exit 9")
        assert gpu_machine.clocks() == {}

    @unittest.skipIf(torch.cuda.is_available(), "the check passes on a GPU")
    def test_sanitizer(self):
        with self.assertRaisesRegex(unittest.SkipTest, "no-such-tool is not installed here"):
            gpu_checks.under(["no-such-tool"])
        self.program("compute-sanitizer", 'shift 4; "$@" 2>/dev/null; echo ERROR SUMMARY; exit 86')
        with self.assertRaisesRegex(AssertionError, "ended with status 86: ERROR SUMMARY"):
            dict(gpu_checks.sanitized())["memcheck"]()

    def test_profile(self):
        args = {"registers per thread": 168, "shared memory": 200000, "grid": [132, 1, 1]}
        events = [{"cat": "kernel", "name": "k", "dur": us, "args": args} for us in (3.0, 1.0, 2.0)]
        found = gpu_profiles.kernels([{"cat": "cpu_op", "name": "mm", "dur": 9.0}, *events])
        assert found == [
            {"name": "k", "times": 3, "us": 2.0, "registers": 168, "shared_bytes": 200000, "grid": [132, 1, 1]}
        ]


class TestOperators(unittest.TestCase):
    """Against the CPU's bits, here on the CPU."""

    def test_every_case_runs(self):
        for group in (gpu_operators.quantizers, gpu_operators.products, gpu_operators.scaled):
            for name, call in group("cpu"):
                if "1024x" not in name:
                    with self.subTest(case=name):
                        call()
        assert [name.split(":")[1] for name in gpu_operators.names()] == ["quantizers", "products", "scaled"]

    def test_other_bits_are_seen(self):
        turn = iter((0.0, 1e-7))
        with self.assertRaisesRegex(AssertionError, "result 0: 3 of 3 elements have other bits"):
            gpu_operators.same(lambda x: x + next(turn), torch.ones(3) / 4, device="cpu")
        x, w = torch.ones(2, 64), torch.ones(3, 64)
        q = hop.presets.FP8_ROW
        with self.assertRaisesRegex(AssertionError, "times the bound"):
            gpu_operators.near(lambda x, w: torch.full((2, 3), 64.2), hop.quantize(q, x), hop.quantize(q, w), "cpu")


if __name__ == "__main__":
    unittest.main()


class TestInstructions(unittest.TestCase):
    SASS = """
.L_x_1:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/              @!P0 SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0020*/              @P1  BRA `(.L_x_3) ;
        /*0030*/                   NANOSLEEP 0x100 ;
.L_x_3:
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*0060*/                   FADD R100, R24, R100 ;
        /*0070*/              @!UP0 BRA.U `(.L_x_2) ;
        /*0080*/                   STS [R3], R100 ;
        /*0090*/              @P2  BRA `(.L_x_1) ;
.L_x_4:
        /*00a0*/                   NOP ;
        /*00b0*/                   BRA `(.L_x_4) ;
"""

    def test_loops_that_multiply(self):
        inner, outer = sorted(gpu_instructions.loops(self.SASS), key=len)
        self.assertEqual((len(inner), len(outer)), (7, 10))
        found = {kind: count for kind, count in gpu_instructions.kinds(inner).items() if count}
        self.assertEqual(found, {"wgmma": 1, "its order": 1, "mbarriers": 1, "float32": 1, "other": 3})

    def test_the_counts_that_are_kept_are_of_the_tiles_that_there_are(self):
        rows = json.loads(gpu_instructions.OUTPUT.read_text())["rows"]
        self.assertEqual(
            {(r["form"], r["tile"]) for r in rows}, {(form, str(tile)) for form, tile, _ in gpu_instructions.cases()}
        )
        for row in rows:
            self.assertEqual((row["step"]["barriers"], row["step"]["spilled"]), (0, 0), row)


class TestCounts(unittest.TestCase):
    """The counts that are kept are those of today's kernels: of all rows by name, of some counted again."""

    def rows(self, path, key):
        found = json.loads(path.read_text())
        for package in ("nvidia-cutlass-operators", "nvidia-cutlass-dsl"):
            assert found["versions"][package] == ".".join(map(str, patches.TESTED[package][-1])), package
        assert all(row["instructions"] > 0 and row["bytes"] > 0 for row in found["rows"])
        return {row[key]: row for row in found["rows"]}

    def test_their_rows(self):
        assert list(self.rows(gpu_quantize_counts.OUTPUT, "name")) == gpu_quantize_counts.names()
        assert list(self.rows(gpu_steps.OUTPUT, "kind")) == list(gpu_steps.COUNTED)

    @unittest.skipIf(missing() is not None, str(missing()))
    @pytest.mark.full
    def test_counted_again(self):
        kept = self.rows(gpu_quantize_counts.OUTPUT, "name")
        for row in (
            *map(gpu_quantize_counts.counted, gpu_quantize_counts.CASES[:2]),
            gpu_quantize_counts.counted_back(gpu_quantize_counts.DEQUANTIZED[0]),
        ):
            assert kept[row["name"]] == row, "run python -m benchmarks.gpu_quantize_counts, and make tables"
        row = gpu_steps.counted_step("momentum")
        assert self.rows(gpu_steps.OUTPUT, "kind")["momentum"] == row, (
            "run python -m benchmarks.gpu_steps, and make tables"
        )
