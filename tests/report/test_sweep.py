"""What a sweep says of a scheme is what running it gives; stopping one loses nothing; the command."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parameterized import parameterized

import hop
import hop.export
import hop.report
from hop.cli import main
from hop.report import CANDIDATES, Options
from hop.report.rows import Candidate
from hop.report.sweep_result import Sweep
from tests.support.files import InFolder
from tests.support.report_models import Small, small

ONCE = Options(rounds=1)
TWO = {name: CANDIDATES[name] for name in ("int8", "mxfp4")}
BASE = Candidate("float", "", math.inf, 1.0, None, 100, 1.0, 1.0, 0, 0)


class Stopped(Exception):
    """What a test raises in the middle of a sweep."""


def candidate(name: str, sqnr: float, size: int, seconds: float) -> Candidate:
    return replace(BASE, name=name, scheme=name, sqnr=sqnr, parameter_bytes=size, seconds=seconds, rewritten=1)


class TestSweep(unittest.TestCase):
    def test_figures(self):
        program, (x,) = small()
        found = hop.report.sweep(program, (x,), TWO, options=ONCE)
        assert [row.name for row in found.rows] == ["float", "int8", "mxfp4"]
        wanted = program.module()(x).double()
        for row, scheme in zip(found.rows[1:], TWO.values(), strict=True):
            made = hop.export.to_scheme(program, scheme).program
            got = made.module()(x).double()
            noise = (got - wanted).square().sum()
            assert row.sqnr == pytest.approx(10 * (wanted.square().sum() / noise).log10().item())
            assert row.cosine == pytest.approx(torch.cosine_similarity(got, wanted).mean().item())
            assert row.parameter_bytes == sum(t.nbytes for t in made.state_dict.values())
            assert row.seconds > 0 and (row.rewritten, row.left) == (2, 0)
        first = found.rows[0]
        assert first.seconds == first.float_seconds and first.slowdown == 1
        head, *lines = [line.split() for line in str(found).splitlines()[:-1]]
        assert head[-4:] == ["float", "ms", "×", "float"]
        for *_, ours, plain, quotient in lines:
            assert abs(float(ours) / float(plain) - float(quotient)) < 0.005 + 2e-3 * float(quotient)
        assert first.sqnr == math.inf and first.cosine == pytest.approx(1) and first in found.pareto

    def test_arguments_by_name(self):
        module, (x,) = Small().eval(), small()[1]
        wanted = hop.report.sweep(module, (x,), TWO, options=ONCE)
        named = torch.export.export(module, (), {"x": x})
        for args in ((named,), (named, {"x": x}), (module, {"x": x}), (torch.export.export(module, (x,)), {"x": x})):
            found = hop.report.sweep(*args, candidates=TWO, options=ONCE)
            assert [(row.name, row.sqnr) for row in found.rows] == [(row.name, row.sqnr) for row in wanted.rows]

    def test_loss(self):
        """A module, arguments of several shapes, and a loss that all outputs go into."""
        _, (x,) = small()
        data, seen = [(x,), (x[:3],)], []

        def loss(outputs):
            seen.append([tuple(y.shape) for y in outputs])
            return torch.cat(outputs).square().mean()

        found = hop.report.sweep(Small().eval(), data, TWO, loss=loss, options=ONCE)
        assert seen == [[(16, 8), (3, 8)]] * 3 and found.inputs == 2
        assert all(row.loss and row.quality == -row.loss for row in found.rows) and "loss" in found.summary

    def test_pareto(self):
        """The first is better in nothing, the others are each best in something."""
        bad = candidate("bad", 10.0, 60, 0.9)
        small, fast, good = (
            candidate("small", 10.0, 20, 0.9),
            candidate("fast", 10.0, 50, 0.4),
            candidate("good", 30.0, 50, 0.9),
        )
        found = Sweep((BASE, bad, small, fast, good), 1)
        assert found.pareto == (BASE, small, fast, good) and found.front == (small, good, BASE)
        assert "good is nearest" in found.summary and "small is the smallest" in found.summary
        rows = {row["name"]: row for row in found.to_dict()["rows"]}
        assert rows["fast"]["pareto"] and not rows["fast"]["front"] and rows["float"]["sqnr"] == "inf"

    def test_picture_and_frame(self):
        pytest.importorskip("pandas")
        found = Sweep((BASE, candidate("a", 10.0, 20, 0.5), candidate("b", 20.0, 40, 0.5)), 1)
        assert list(found.to_dataframe().pareto) == [True, True, True]
        assert len(found.plot().axes[0].texts) == 2

    @parameterized.expand(
        [
            ({"model": 3}, TypeError, "sweep: model must be"),
            ({"candidates": {"x": 3}}, TypeError, r"candidates\['x'\] must be a hop.Scheme"),
            ({"candidates": [hop.recipes.MXFP8_TRAINING]}, TypeError, "candidates must be a dict of schemes by name"),
        ]
    )
    def test_errors(self, options, error, words):
        with pytest.raises(error, match=words):
            hop.report.sweep(**({"model": small()[0]} | options))

    def test_a_quantized_program_is_refused(self):
        low = hop.export.to_scheme(small()[0], hop.schemes.INT8_DYNAMIC).program
        with pytest.raises(ValueError, match="must be a float model, but this one calls hop_quantize, hop_scaled"):
            hop.report.sweep(low)

    def test_what_no_scheme_changes(self):
        """A candidate that rewrites nothing is as good as the model, which says nothing of it."""
        same = Candidate("mxfp4", "x", math.inf, 1.0, None, 100, 1.0, 1.0, 0, 2)
        nothing = "No candidate changes the model: none of its operators supports these schemes."
        assert Sweep((BASE, same), 1).summary == nothing
        assert "mxfp4" not in Sweep((BASE, same, candidate("a", 10.0, 20, 0.5)), 1).summary

    def test_says_whether_one_is_faster(self):
        slow, slower = (candidate(name, 10.0, 20, seconds) for name, seconds in (("a", 1.66), ("b", 3.0)))
        said = Sweep((BASE, slower, slow), 1).summary
        assert "None is faster than the float model: the fastest, a, takes 1.66 times as long" in said
        fast = Sweep((BASE, slow, candidate("c", 10.0, 20, 0.5)), 1).summary
        assert "c is the fastest: it takes 0.50 times as long as the float model" in fast
        assert "None is faster" not in fast


class TestJournal(InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "sweep.jsonl"

    def sweep(self, model=None, told=None):
        return hop.report.sweep(model or small()[0], None, TWO, journal=self.path, options=Options(1, "", told))

    def test_goes_on_where_it_stopped(self):
        def stop(what, _done, _of):
            if what == "mxfp4":
                raise Stopped

        with pytest.raises(Stopped):
            self.sweep(told=stop)
        before = self.path.read_text()
        assert [json.loads(line).get("name") for line in before.splitlines()] == [None, "float", "int8"]
        found = self.sweep()
        after = self.path.read_text()
        assert after.startswith(before) and len(after.splitlines()) == 4
        assert self.sweep() == found and self.path.read_text() == after  # nothing was measured again

    def test_a_line_that_was_cut_off(self):
        whole = self.sweep()
        text = self.path.read_text()
        self.path.write_text(text[:-20])
        again = self.sweep()
        assert again.rows[:2] == whole.rows[:2] and again.rows[2].sqnr == whole.rows[2].sqnr
        assert len(self.path.read_text().splitlines()) == 4

    def test_of_another_model(self):
        self.sweep()
        other = Small().eval()
        other.first.weight.data[0, 0] += 1
        with pytest.raises(ValueError, match="another model, other data or other options"):
            self.sweep(torch.export.export(other, small()[1]))

    @parameterized.expand([("[]\n",), ("no json\n",), ("3",), ("[" * 10**5 + "\n",), ('{"sweep": "x"}\n3\n',)])
    def test_another_file(self, text):
        self.path.write_text(text)
        with pytest.raises(ValueError, match="is not a sweep journal"):
            self.sweep()


class TestCommand(InFolder):
    def setUp(self):
        super().setUp()
        program, _ = small()
        torch.export.save(program, self.folder / "float.pt2")
        torch.export.save(hop.export.to_scheme(program, hop.schemes.INT8_DYNAMIC).program, self.folder / "int8.pt2")

    def run_command(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["report", *map(str, words)])
        return status, out.getvalue(), err.getvalue()

    def test_page_beside_a_reference(self):
        page = self.folder / "page.html"
        status, out, err = self.run_command(
            self.folder / "int8.pt2", "--reference", self.folder / "float.pt2", "--runs", 1, "-o", page
        )
        assert status == 0 and out.startswith("The error enters first at hop_scaled (first)")
        assert "inputs are random" in err and page.read_text().startswith("<!doctype html>")

    def test_json_and_a_sweep(self):
        page = self.folder / "page.html"
        words = (self.folder / "float.pt2", "--runs", 1, "--sweep", "--schemes", "int8,nvfp4", "-o", page, "--json")
        status, out, _ = self.run_command(*words)
        found = json.loads(out)
        assert status == 0 and [row["name"] for row in found["sweep"]["rows"]] == ["float", "int8", "nvfp4"]
        assert len(found["report"]["rows"]) == 4 and page.exists()
        assert len((self.folder / "page.sweep.jsonl").read_text().splitlines()) == 4

    @parameterized.expand(
        [(("--schemes", "int8"), "needs --sweep"), (("--sweep", "--schemes", "x"), "no scheme is called 'x'")]
    )
    def test_wrong_schemes(self, words, message):
        status, _, err = self.run_command(self.folder / "float.pt2", *words)
        assert status == 2 and message in err

    def test_the_folder_of_the_page_is_looked_for_first(self):
        status, out, err = self.run_command(self.folder / "float.pt2", "-o", self.folder / "none" / "page.html")
        assert status == 2 and out == "" and "there is no folder" in err

    @unittest.skipIf(os.name == "nt", "it sends a signal")
    @pytest.mark.full
    def test_interrupted(self):
        """Ctrl-C in the middle of a sweep: what is done stays."""
        page = self.folder / "page.html"
        journal = page.with_suffix(".sweep.jsonl")
        program = (
            "import os, signal, sys, hop.report.sweeps as t; from hop.cli import main; own = t.to_scheme\n"
            "def stop(program, scheme):\n"
            "    if 'e2m1' in str(scheme): os.kill(os.getpid(), signal.SIGINT)\n"
            "    return own(program, scheme)\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job in the background ignores it
            "t.to_scheme = stop; sys.exit(main(sys.argv[1:]))"
        )
        words = ("report", self.folder / "float.pt2", "--sweep", "--schemes", "int8,mxfp4", "--runs", "1", "-o", page)
        command = [sys.executable, "-c", program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == 130 and "the same command resumes from them" in done.stderr, done.stderr
        assert len(journal.read_text().splitlines()) == 3
