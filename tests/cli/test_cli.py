"""The command line."""

import contextlib
import importlib.util
import io
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from benchmarks import running
from benchmarks.timing import Row
from cutlass_kernels import verdicts
from hop import cli, presets
from hop.cli import data, inputs
from hop.compat import versions
from hop.kernels.cpu import native
from hop.numerics.formats import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command_line.md"
COMMANDS = (*([c.__name__] for c in cli.COMMANDS), ["kernels", "list"], ["kernels", "build"], ["kernels", "check"])
COLOURS = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")  # what they mean for colours is tested alone
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if k not in COLOURS}, "PYTHONPATH": str(ROOT)}


def run(*arguments: str) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    plain = {k: v for k, v in os.environ.items() if k not in COLOURS}
    with (
        mock.patch.dict(os.environ, plain, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.main(arguments)
    return status, out.getvalue(), err.getvalue()


def as_json(*arguments: str) -> Any:
    status, out, err = run(*arguments, "--json")
    assert status in (0, 1) and err == "", err

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(out, parse_constant=refuse)


class Layers(nn.Module):
    """An embedding, a mask, and a linear layer in int8 or, without a preset, in float32."""

    def __init__(self, preset: hop.Quantizer | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        w = torch.randn(8, 16)
        self.weight = nn.Parameter(w if preset is None else hop.quantize(preset, w), requires_grad=False)
        self.preset = preset

    def forward(self, ids: Tensor, mask: Tensor, more: dict[str, Tensor]) -> Tensor:
        h = self.table(ids) * mask[..., None] + more["x"]
        if self.preset is None:
            return torch.ops.aten.linear.default(h, self.weight)
        codes = hop.quantize(presets.INT8_ROW_AFFINE, h)
        return hop.scaled(torch.ops.aten.linear.default, torch.float32, codes, self.weight)


def exported(preset: hop.Quantizer | None, is_dynamic: bool = True) -> torch.export.ExportedProgram:
    ids, mask = (torch.ones(4, 6, dtype=torch.int64) for _ in range(2))
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    shapes = (batch, batch, {"x": batch}) if is_dynamic else None
    return torch.export.export(
        Layers(preset).eval().requires_grad_(False), (ids, mask, {"x": torch.randn(4, 6, 16)}), dynamic_shapes=shapes
    )


class Files(unittest.TestCase):
    """A folder with programs."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        for name, preset in (("float", None), ("int8", presets.INT8_ROW)):
            torch.export.save(exported(preset), cls.folder / f"{name}.pt2")
        torch.export.save(exported(presets.INT8_ROW, is_dynamic=False), cls.folder / "static.pt2")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def savez(self, name: str, **arrays: np.ndarray) -> str:
        np.savez(self.folder / name, **arrays)
        return self.path(name)


class TestHelp(unittest.TestCase):
    @parameterized.expand([("_".join(c), c, width) for c in COMMANDS for width in (80, 120)])
    @pytest.mark.quick(2)
    def test_has_examples_and_fits(self, _name, command, width):
        with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
            status, out, _ = run(*command, "--help")
        assert status == 0 and f"hop {' '.join(command)}" in out.partition("Examples")[2]
        assert max(map(len, out.splitlines())) <= width

    def test_all_commands_are_listed(self):
        status, out, _ = run("--help")
        assert status == 0 and "Exit status" in out
        assert all(re.search(rf"│ {c[0]} ", out) for c in COMMANDS)
        status, shown, _ = run()
        assert status == 2 and shown.strip() == out.strip()

    def test_version(self):
        assert run("--version")[:2] == (0, f"hop {hop.__version__}\n")

    def test_examples_of_explain_and_formats(self):
        for command in cli.COMMANDS:
            if command.__name__ in ("explain", "formats"):
                lines = (command.__doc__ or "").partition("Examples:")[2].strip().splitlines()
                for line in lines:
                    words = shlex.split(re.split(r" {3,}", line.strip())[0])
                    assert run(*words[1:])[0] == 0, line


class TestFormats(unittest.TestCase):
    def test_list(self):
        _, out, _ = run("formats")
        assert [line.split()[0] for line in out.splitlines()[1:]] == [f.name for f in FORMATS]
        found = as_json("formats")
        assert [f["name"] for f in found] == [f.name for f in FORMATS]
        assert {f["name"]: f["largest"] for f in found}["e4m3"] == 448.0

    def test_presets(self):
        _, out, _ = run("formats", "--presets")
        assert [line.split()[0] for line in out.splitlines()[1:]] == list(presets.PRESETS)
        found = {row["name"]: row for row in as_json("formats", "--presets")}
        assert found["INT4_32"] == {"name": "INT4_32", "format": "int4", "block": [1, 32], "scale": "Amax()"}
        for words, said in (
            (("mxfp8",), "'mxfp8' is a preset"),
            (("int8", "--presets"), "it does not combine with the format name 'int8'"),
        ):
            status, out, err = run("formats", *words)
            assert status == 2 and out == "" and said in err and err.count("\n") == 1

    @parameterized.expand([(f.name, f) for f in FORMATS])
    def test_codes(self, name, fmt):
        """Each finite number is there, and its code is the one that encode gives."""
        found = as_json("formats", name)["codes"]
        numbers = {row["code"]: float(row["number"]) for row in found}
        assert {n for n in numbers.values() if math.isfinite(n)} == set(fmt.numbers)
        codes = fmt.encode(torch.tensor(fmt.numbers))
        held = codes.view(torch.uint8).to(torch.int64) & (2**fmt.bits - 1)
        assert [numbers[c] for c in held.tolist()] == list(fmt.numbers)

    def test_as_text(self):
        _, out, _ = run("formats", "E2M1")
        assert out.splitlines()[1:3] == ["0x00  0 00 0  0", "0x01  0 00 1  0.5"] and len(out.splitlines()) == 17
        _, out, _ = run("formats", "e5m2")
        assert "0x7c  0 11111 00  inf" in out and "0x7f  0 11111 11  nan" in out
        assert len(run("formats", "ternary")[1].splitlines()) == 4


class TestExplain(unittest.TestCase):
    def test_says_what_explain_says(self):
        x, w = (hop.quantize(presets.INT8_ROW, torch.randn(s)) for s in ((16, 64), (32, 64)))
        said = hop.explain(torch.ops.aten.linear.default, torch.bfloat16, x, w)
        status, out, _ = run("explain", "aten.linear.default", "bf16", "INT8_ROW:16x64", "int8_row:32x64")
        assert status == 0 and out.rstrip("\n") == said

    def test_json(self):
        words = "explain aten.conv2d f32 INT8_TENSOR:1x8x9x9 INT8_CONV:16x8x3x3 none [2,2] padding=[1,1]"
        found = as_json(*words.split())
        assert found["op"] == "aten.conv2d.default" and found["arguments"][2:] == ["None", "[2, 2]", "padding=[1, 1]"]
        assert [k["chosen"] for k in found["kernels"]] == [k["reason"] is None for k in found["kernels"]]
        assert found["kernels"][-1]["chosen"]

    def test_strides_and_layouts_reach_the_kernels(self):
        op = torch.ops.aten.mm.default
        seen = []

        def explained(*args: Any, **kwargs: Any) -> str:
            seen.append((args, kwargs))
            return "it: chosen"

        with mock.patch.object(hop, "explain", explained):
            run("explain", "aten.mm", "int32", "int8:4x8", "int8:6x8.t")
            run("explain", "aten.linear", "INT8_TENSOR_STATIC_AFFINE", "INT8_ROW:4x64", "INT4_32:8x64.pack")
            run("explain", "aten.abs", "f32", "int8:2x4x3x3.channels_last")
        (mm, _), (linear, given), (_, _) = seen
        assert mm[0] is op and mm[3].shape == (8, 6) and mm[3].stride() == (1, 8)
        assert linear[3].quantizer == hop.pack(hop.quantize(presets.INT4_32, torch.ones(8, 64))).quantizer
        assert given["output_scale"].shape == () and given["output_zero_point"].dtype == torch.int8
        assert seen[2][0][2].is_contiguous(memory_format=torch.channels_last)

    @parameterized.expand(
        [
            ("aten.nothing int8 int8:2x2", "torch.ops has no operator aten.nothing"),
            ("aten.mm.many int8 int8:2x2", "take one of default"),
            ("__import__('os') int8 int8:2x2", "is not an operator"),
            ("aten.mm int9 int8:2x2", "'int9' is neither a dtype"),
            ("aten.mm int32 int9:2x2", "'int9' is neither a dtype"),
            ("aten.mm int32 int8:2x2.u int8:2x2", "'u' must be one of t, pack, channels_last"),
            ("aten.mm int32 os.getcwd() int8:2x2", "'os.getcwd()' is not an argument"),
            ("aten.mm int32 mat2=int8:2x2 int8:2x2", "follows a named argument"),
            ("aten.mm int32 int8:2x2 int8:2x2 --device gpu", "'gpu' is not a device"),
            ("aten.mm int32 int8:2x2 int8:2x2 --device xla", "'xla' is not available"),
            ("aten.mm int32 int8:2x2 int8:2x2 --devce cpu", "'--devce' is not an argument"),
            ("aten.mm int32 INT8ROW:2x2 int8:2x2", "did you mean INT8_ROW"),
        ]
    )
    def test_what_is_not_understood(self, words, said):
        status, out, err = run("explain", *words.split())
        assert status == 2 and out == "" and said in err and err.count("\n") == 1

    def test_what_the_operator_refuses(self):
        status, _, err = run("explain", "aten.linear", "bf16", "INT8_ROW:4x8")
        assert status == 1 and err.startswith("hop: ") and err.count("\n") == 1
        status, out, err = run("explain", "aten.mm", "int32", "int8:4x4", "int8:5x4")
        assert status == 1 and out == "" and "(4, 4) and (5, 4)" in err and err.count("\n") == 1

    def test_numbers_below_0(self):
        status, out, _ = run("explain", "aten.sum.dim_IntList", "int32", "int8:4x8", "-1")
        assert status == 0 and out.endswith("chosen\n")

    def test_says_what_the_call_gives(self):
        assert as_json("explain", "aten.mm", "i32", "int8:4x8", "int8:6x8.t")["result"] == "int32:4x6"
        static = as_json("explain", "aten.linear", "INT8_TENSOR_STATIC", "INT8_ROW:4x8", "INT8_ROW:6x8.pack")
        assert static["result"] == "INT8_TENSOR_STATIC:4x6"


class TestInfo(unittest.TestCase):
    def test_json_and_text_agree(self):
        found = as_json("info")
        _, out, _ = run("info")
        assert found["versions"]["torch"] == torch.__version__ and torch.__version__ in out
        assert found["cpu"]["threads"] == torch.get_num_threads()
        assert all(case in out and kernel in out for case, kernel in found["cases"].items())
        assert found["lacks"].keys() == {name for name, lack in versions.LACKS.items() if lack.shows()}
        assert all(f"{lack['what']}: {lack['instead']}" in out for lack in found["lacks"].values())

    @pytest.mark.full
    def test_says_why_not(self):
        with native.use("off"):
            kernel = as_json("info")["kernels"]["native, on CPU"]
            assert not kernel["available"] and "native product" not in run("info")[1]
        if native.library().missing is None:
            assert kernel["reason"] == "native kernels are switched off"
            assert as_json("info")["kernels"]["native, on CPU"]["available"]

    def test_kernels_on_gpus(self):
        """Without a GPU there is nothing to check; with one, info shows what its checks found."""
        with mock.patch("torch.cuda.is_available", lambda: False):
            status, _, err = run("kernels", "check")
        assert status == 1 and "PyTorch finds no GPU here" in err
        right, wrong = verdicts.Verdict("right"), verdicts.Verdict("wrong", "its results are wrong: 3 of 4")
        with (
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.device_count", lambda: 1),
            mock.patch("torch.cuda.get_device_name", lambda i: "H100"),
            mock.patch("torch.cuda.get_device_capability", lambda i: (9, 0)),
            mock.patch("cutlass_kernels.trust.known", lambda device: {"a": right, "b": wrong}),
        ):
            out = run("info")[1]
            for arguments, found, status in ((("kernels", "check"), right, 0), (("kernels", "check"), wrong, 1)):
                with mock.patch("cutlass_kernels.trust.check", lambda *_, found=found: {"s8": found}):
                    assert run(*arguments)[0] == status
        assert "H100, capability 9.0: 1 kernels checked and right, 1 off" in out
        assert "off: b: its results are wrong: 3 of 4" in out

    def test_every_extra_is_listed(self):
        text = (ROOT / "pyproject.toml").read_text()
        extras = text.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
        known = {(p.extra, p.name) for p in importlib.import_module("hop.cli.info").PACKAGES}
        for extra, packages in re.findall(r"^(\w+) = \[(.*)\]$", extras, re.M):
            if extra not in ("demo",):
                assert extra in {e for e, _ in known}, extra
                for package in re.findall(r'"([\w-]+)', packages):
                    assert (extra, package) in known, (extra, package)


class TestInputs(Files):
    def test_random_ones_fit_and_repeat(self):
        program = inputs.load_program(self.path("int8.pt2"))
        (found,) = inputs.load_inputs(program)
        ids, mask, more = found.args
        assert ids.shape == mask.shape == (4, 6) and more["x"].shape == (4, 6, 16)
        assert ids.max() > 1 and ids.min() >= 0 and ids.max() < 50 and set(mask.unique().tolist()) == {0, 1}
        assert torch.equal(inputs.load_inputs(program)[0].args[0], ids)
        assert not torch.equal(inputs.load_inputs(program, seed=1)[0].args[0], ids)
        program.module()(*found.args, **found.kwargs)

    def test_without_what_it_was_exported_with(self):
        program = exported(None)
        program._example_inputs = None
        assert inputs.load_inputs(program)[0].args[0].shape == (4, 6)

    def test_numbers_and_small_integers(self):
        class Mixed(nn.Module):
            def forward(self, x: Tensor, n: int, y: Tensor) -> Tensor:
                return (x.float() * n + y.float()).sum()

        arguments = torch.ones(999, dtype=torch.int8), 3, torch.ones(999, dtype=torch.bool)
        x, n, y = inputs.load_inputs(torch.export.export(Mixed(), arguments))[0].args
        assert n == 3 and x.dtype == torch.int8 and (x.min(), x.max()) == (-128, 127) and y.dtype == torch.bool

    def test_names_places_and_several(self):
        program = inputs.load_program(self.path("int8.pt2"))
        ids, mask, x = np.ones((3, 2, 6), np.int64), np.ones((2, 6), np.int64), np.ones((3, 2, 6, 16), np.float32)
        ids[1] = 7
        found = inputs.load_inputs(program, self.savez("named.npz", ids=ids, mask=mask, more_x=x))
        assert len(found) == 3 and [int(i.args[0][0, 0]) for i in found] == [1, 7, 1]
        assert all(torch.equal(i.args[1], torch.ones(2, 6, dtype=torch.int64)) for i in found)
        np.savez(self.folder / "placed.npz", ids, mask, x)
        placed = inputs.load_inputs(program, self.path("placed.npz"))
        assert all(torch.equal(a.args[0], b.args[0]) for a, b in zip(found, placed, strict=True))
        pytest.importorskip("safetensors")
        hop.storage.save_file(
            {"0": torch.from_numpy(ids[0]), "1": torch.ones(2, 6, dtype=torch.int64), "more_x": torch.ones(2, 6, 16)},
            self.folder / "d.safetensors",
        )
        assert len(inputs.load_inputs(program, self.path("d.safetensors"))) == 1

    @parameterized.expand(
        [
            ("lacks", {"ids": np.ones((2, 6), np.int64)}, "lacks 'mask'"),
            ("dtype", {"ids": np.ones((2, 6))}, "'ids' is torch.float64, but the program takes torch.int64"),
            ("shape", {"ids": np.ones((2, 7), np.int64)}, r"'ids' has shape \(2, 7\)"),
            ("object", {"ids": np.array([{}], dtype=object)}, "allow_pickle"),
            (
                "counts",
                {
                    "ids": np.ones((2, 2, 6), np.int64),
                    "mask": np.ones((3, 2, 6), np.int64),
                    "2": np.ones((2, 6, 16), np.float32),
                },
                r"different numbers of inputs: \[2, 3\]",
            ),
        ]
    )
    @pytest.mark.quick(2)
    def test_data_that_do_not_fit(self, name, arrays, words):
        path = self.savez(f"{name}.npz", **arrays)
        with self.assertRaisesRegex(ValueError, words):
            inputs.load_inputs(inputs.load_program(self.path("int8.pt2")), path)

    def test_files_that_are_none(self):
        (self.folder / "text.pt2").write_text("not a program")
        whole = (self.folder / "int8.pt2").read_bytes()
        (self.folder / "cut.pt2").write_bytes(whole[: len(whole) // 2])
        np.savez(self.folder / "zip.pt2.npz", np.ones(2))
        for name in ("text.pt2", "cut.pt2", "zip.pt2.npz"):
            with self.assertRaisesRegex(ValueError, re.escape(name)):
                inputs.load_program(self.path(name))
        program = inputs.load_program(self.path("int8.pt2"))
        for name in ("text.npz", "text.safetensors"):
            (self.folder / name).write_text("no data")
            with self.assertRaisesRegex(ValueError, re.escape(name)):
                inputs.load_inputs(program, self.path(name))
        with self.assertRaisesRegex(ValueError, "data must be in a .npz or .safetensors file"):
            inputs.load_inputs(program, self.path("data.pkl"))
        np.savez_compressed(self.folder / "small.npz", a=np.arange(6).reshape(2, 3), b=np.asfortranarray(np.eye(3, 4)))
        found = data.read(self.folder / "small.npz")
        assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].equal(torch.eye(3, 4, dtype=torch.float64))

    @pytest.mark.full
    def test_arguments_by_name(self):
        program = torch.export.export(
            Layers(None),
            (),
            {"ids": torch.ones(2, 6, dtype=torch.int64), "mask": torch.ones(2, 6), "more": {"x": torch.ones(16)}},
        )
        torch.export.save(program, self.path("named.pt2"))
        (found,) = inputs.load_inputs(program)
        assert found.args == () and list(found.kwargs) == ["ids", "mask", "more"]
        more = found.kwargs["more"]
        assert isinstance(more, dict)
        shapes = [tuple(x.shape) for x in (found.kwargs["ids"], found.kwargs["mask"], more["x"])]
        assert shapes == [(2, 6), (2, 6), (16,)]
        given = {"ids": np.ones((2, 6), np.int64), "mask": np.full((2, 6), 0.5, np.float32), "more_x": np.ones(16)}
        np.savez(self.folder / "named.npz", **{**given, "more_x": given["more_x"].astype(np.float32)})
        (found,) = inputs.load_inputs(program, self.path("named.npz"))
        more = found.kwargs["more"]
        assert isinstance(more, dict) and found.kwargs["mask"].eq(0.5).all() and more["x"].eq(1).all()
        torch.export.save(torch.export.export(Layers(None), tuple(found.kwargs.values())), self.path("placed.pt2"))
        for a, b in (("named.pt2", "named.pt2"), ("named.pt2", "placed.pt2"), ("placed.pt2", "named.pt2")):
            status, out, err = run("verify", self.path(a), self.path(b), "--data", self.path("named.npz"))
            assert status == 0 and out.splitlines()[-1] == "the outputs are equal", err
            assert run("verify", self.path(a), self.path(b))[0] == 0
        page = self.path("named.html")
        status, _, err = run("report", self.path("named.pt2"), "--sweep", "--schemes", "int8", "-o", page)
        assert status == 0 and "int8" in Path(page).read_text(), err

    def test_other_modules_are_not_imported(self):
        """A file names classes; those alone of modules that define outputs and caches are imported."""
        pytest.importorskip("transformers")
        for module in ("transformers.time_series_utils", "transformers.models.bert.tokenization_bert_legacy"):
            with zipfile.ZipFile(self.path("evil.pt2"), "w") as archive:
                archive.writestr("evil/models/model.json", f'{{"x": "{{\\"type\\": \\"{module}.X\\"}}"}}')
            with self.assertRaisesRegex(ValueError, "cannot be read as an exported program"):
                inputs.load_program(self.path("evil.pt2"))
            assert module not in sys.modules

    @pytest.mark.full
    def test_classes_of_transformers(self):
        """A program that returns them, in a process that has not imported them."""
        made = pytest.importorskip("transformers")
        config = made.BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        model = made.BertModel(config).eval()
        given = {name: torch.ones(2, 6, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        path = self.path("bert.pt2")
        torch.export.save(torch.export.export(model, (), given), path)
        words = [sys.executable, "-m", "hop", "verify", path, path]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)
        assert done.returncode == 0 and done.stdout.endswith("the outputs are equal\n"), done.stderr
        with (
            mock.patch.dict(sys.modules, {"transformers": None, "transformers.modeling_outputs": None}),
            self.assertRaisesRegex(ValueError, "takes or returns classes of transformers.* pip install transformers"),
        ):
            inputs.load_program(path)


class TestVerify(Files):
    def test_equal(self):
        status, out, err = run("verify", self.path("int8.pt2"), self.path("int8.pt2"))
        assert status == 0 and err == "" and out.splitlines()[-1] == "the outputs are equal"

    def test_differs_and_how_much_may(self):
        both = "verify", self.path("float.pt2"), self.path("int8.pt2")
        status, out, _ = run(*both)
        assert status == 1 and out.splitlines()[-1] == "the outputs differ"
        found = as_json(*both)
        (output,) = [row for row in found["rows"] if row["output"] == 0]
        sqnr = output["sqnr"]
        assert not found["holds"] and 30 < sqnr < 50 and output["differing"] > 0
        assert run(*both, "--at-least", str(sqnr - 0.1))[0] == 0
        assert run(*both, "--at-least", str(sqnr + 0.1))[0] == 1

    def test_json_has_no_infinities(self):
        found = as_json("verify", self.path("int8.pt2"), self.path("int8.pt2"))
        assert found["holds"] and found["first"] is None and found["rows"][-1]["sqnr"] == "inf"

    def test_data(self):
        data = self.savez(
            "v.npz",
            ids=np.ones((5, 2, 6), np.int64),
            mask=np.ones((2, 6), np.int64),
            more_x=np.ones((2, 6, 16), np.float32),
        )
        assert as_json("verify", self.path("float.pt2"), self.path("int8.pt2"), "--data", data)["inputs"] == 5

    @parameterized.expand(
        [
            (("verify", "no.pt2", "no.pt2"), 2, "'no.pt2' does not exist"),
            (("verify", __file__, __file__), 1, "is not a program saved by torch.export.save"),
            (("verify", __file__), 2, "Missing argument"),
        ]
    )
    def test_errors_are_one_line(self, arguments, status, words):
        found, out, err = run(*arguments)
        assert found == status and out == "" and words in err and err.count("\n") == 1


class TestExport(Files):
    @pytest.mark.full
    def test_to_aten(self):
        out = self.path("lowered.pt2")
        status, said, _ = run("export", self.path("int8.pt2"), "-o", out, "--to", "aten")
        assert status == 0 and said.startswith(f"wrote {out}, ")
        assert not [n for n in inputs.load_program(out).graph.nodes if "hop" in str(n.target)]
        assert run("verify", self.path("int8.pt2"), out)[0] == 0

    @pytest.mark.full
    def test_to_integers_and_back(self):
        qdq, integers, report = self.path("qdq.pt2"), self.path("integers.pt2"), []
        for source, out, more in (
            ("static.pt2", qdq, ["--to", "qdq"]),
            ("qdq.pt2", integers, ["--requantize", "tflite"]),
        ):
            found = as_json("export", self.path(source), "-o", out, *more)
            assert found["bytes"] == Path(out).stat().st_size
            report.append({row["operator"] for row in found["rows"] if row["is_rewritten"]})
        assert "aten.linear.default" in report[1]
        assert run("verify", self.path("static.pt2"), integers, "--at-least", "35")[0] == 0
        _, said, _ = run("export", qdq, "-o", integers)
        assert re.match(r"\d+ rewritten, \d+ left\n", said)

    @pytest.mark.full
    def test_what_is_left(self):
        """Operators that stay in floats are listed with the reason; a program with nothing quantized is refused."""
        a, b = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8)

        class Sums(torch.nn.Module):
            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return torch._int_mm(a, b)

        torch.export.save(torch.export.export(Sums(), (a, b)), source := self.path("sums.pt2"))
        status, said, _ = run("export", source, "-o", self.path("out.pt2"))
        assert status == 0 and said.startswith("0 rewritten, 1 left\n")
        assert "left: its sums are not cast to float32: they stay int32" in said
        torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), source)
        status, _, err = run("export", source, "-o", self.path("out.pt2"))
        assert status == 1 and "found no quantized operator in the program, which has aten.linear.default" in err

    @pytest.mark.full
    def test_to_onnx(self):
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
        out = self.path("model.onnx")
        assert run("export", self.path("int8.pt2"), "-o", out, "--weights", "uint8")[0] == 0
        program = inputs.load_program(self.path("int8.pt2"))
        ids, mask, more = inputs.load_inputs(program)[0].args
        session = runtime.InferenceSession(out, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        (y,) = session.run(None, dict(zip(names, (ids.numpy(), mask.numpy(), more["x"].numpy()), strict=True)))
        np.testing.assert_allclose(y, program.module()(ids, mask, more).numpy(), rtol=1e-6, atol=1e-6)

    @pytest.mark.full
    @pytest.mark.skipif(importlib.util.find_spec("executorch") is None, reason="ExecuTorch is not installed")
    @pytest.mark.filterwarnings("ignore:(open_text|read_text|read_binary) is deprecated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:This API is experimental and subject to change")
    def test_to_executorch(self):
        status, _, _ = run("export", self.path("int8.pt2"), "-o", self.path("model.pte"))
        assert status == 0 and (self.folder / "model.pte").read_bytes()[4:6] == b"ET"

    @parameterized.expand(
        [
            (["-o", "x.txt"], "x.txt must end in one of .onnx, .pt2, .pte"),
            (["-o", "x.pt2", "--to", "onnx"], "--to onnx writes files that end in .onnx"),
            (["-o", "x.onnx", "--requantize", "tflite"], "applies to --to integer, not to --to onnx"),
            (["-o", "x.pt2", "--target", "xnnpack"], "applies to --to qdq and --to executorch"),
            (["-o", "nowhere/x.pt2"], "there is no folder nowhere"),
            (["-o", "SAME"], "is the input file"),
            ([], "--output"),
        ]
    )
    @pytest.mark.quick(2)
    def test_usage(self, words, said):
        model = self.path("int8.pt2")
        status, out, err = run("export", model, *(model if w == "SAME" else w for w in words))
        assert status == 2 and out == "" and said in err and err.count("\n") == 1

    def test_usage_names_the_value(self):
        """Where the library that reads options leaves it out too, once, and without its name of the error's class."""
        page = str(PAGE)
        for words, said in (
            (("report", page, "--runs", "0"), r"'--runs': Input should be greater than or equal to 1; got '0' \("),
            (
                ("verify", page, page, "--at-least", "x"),
                r"'--at-least': Input should be a valid number.*; got 'x' \(",
            ),
            (
                ("export", page, "-o", "x.pt2", "--to", "x"),
                r"'--to': 'x' is not one of 'integer'.*'executorch'\. \(",
            ),
        ):
            status, out, err = run(*words)
            assert status == 2 and out == "" and err.count("\n") == 1
            self.assertRegex(err, said)


class TestBench(Files):
    def results(self, name: str, *rows: Row, **more: object) -> str:
        (self.folder / name).write_text(json.dumps({**running.here(), "rows": [asdict(r) for r in rows], **more}))
        return self.path(name)

    def test_compare(self):
        """What counts is the time in proportion to the peer, where the peer has one."""
        old = self.results(
            "old.json", Row("g", "a", 1.0, "p", 2.0), Row("g", "b", 1.0, "p", 2.0), Row("g", "c", 1.0, "", 0.0)
        )
        same = self.results("same.json", Row("g", "a", 2.0, "p", 4.0), Row("g", "new", 9.0, "p", 1.0))
        worse = self.results("worse.json", Row("g", "b", 1.2, "p", 2.0), Row("g", "c", 0.5, "", 0.0))
        slow = self.results("slow.json", Row("g", "c", 1.2, "", 0.0), torch="0.1")
        status, out, err = run("bench", "--results", same, "--compare", old)
        assert status == 0 and "0 of 1 cases" in out and err == ""
        status, out, _ = run("bench", "--results", worse, "--compare", old)
        assert status == 1 and [line[-6:] for line in out.splitlines()[1:3]] == ["SLOWER", "faster"]
        assert run("bench", "--results", worse, "--compare", old, "--slower", "1.25")[0] == 0
        status, _, err = run("bench", "--results", slow, "--compare", old)
        assert status == 1 and err.startswith("measured under other conditions: torch was ")

    def test_runs_groups(self):
        def mine():
            yield Row("g", "a", 1.0, "p", 2.0, "<= 0.7")
            yield Row("g", "a", 1.0, "q", 0.5, "<= 0.7")

        def stops():
            yield Row("g", "z", 1.0, "p", 2.0)
            raise KeyboardInterrupt

        named = {"GROUPS": [mine, stops], "NAMES": ["mine", "stops"]}
        with mock.patch.multiple(running, **named):
            assert run("bench", "--list")[1] == "mine\nstops\n"
            status, out, _ = run("bench", "mine", "--json", self.path("new.json"))
            assert status == 0 and out.endswith("1 targets met, 1 missed\n") and "MISSED" in out
            assert len(as_json_file(self.path("new.json"))["rows"]) == 2
            status, out, err = run("bench", "mine", "--json", "-")
            assert status == 0 and len(json.loads(out)["rows"]) == 2 and "MISSED" in err
            status, out, err = run("bench", "mine", "--json", "-", "--compare", self.path("new.json"))
            assert status == 0 and len(json.loads(out)["rows"]) == 2 and "0 of 2 cases" in err
            assert run("bench", "--json", self.path("part.json"))[0] == 130
            assert len(as_json_file(self.path("part.json"))["rows"]) == 3

    def test_errors_are_one_line(self):
        none, text = self.results("none.json"), self.path("text.json")
        Path(text).write_text("{")
        for words, status, said in (
            (["nothing"], 2, "no group of benchmarks is named 'nothing'; there are mm, "),
            (["--results", none, "--compare", none], 1, "no case in common"),
            (["--results", text], 1, "text.json is not JSON"),
            (["--json", "nowhere/new.json"], 2, "there is no folder nowhere"),
        ):
            found, _, err = run("bench", *words)
            assert found == status and said in err and err.count("\n") == 1

    def test_without_a_source_tree(self):
        with mock.patch.object(hop, "__file__", self.path("hop/__init__.py")):
            status, _, err = run("bench")
        assert status == 1 and "the benchmarks are part of the source tree" in err and err.count("\n") == 1


def as_json_file(path: str) -> dict:
    return json.loads(Path(path).read_text())


def on_terminal(words: list[str], **environment: str) -> str:
    """What a program writes to a terminal."""
    mine, theirs = pty.openpty()
    more = {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    subprocess.run(words, stdout=theirs, stderr=theirs, cwd=ROOT, env={**ENVIRONMENT, **more}, check=True)
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError):  # which says that the other side is closed
        while part := os.read(mine, 65536):
            found += part
    os.close(mine)
    return found.decode()


@pytest.mark.full
class TestAsAProgram(unittest.TestCase):
    def start(self, command: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, shell=True, capture_output=True, text=True, cwd=ROOT, env={**ENVIRONMENT, **environment}
        )

    def test_a_closed_pipe(self):
        done = self.start(f"{sys.executable} -m hop formats int8 | head -n 1")
        assert done.stdout.count("\n") == 1 and done.stderr == ""

    def test_errors_with_and_without_debug(self):
        command = f"{sys.executable} -m hop verify {PAGE} {PAGE}"
        done = self.start(command)
        assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
        assert done.stderr.startswith("python -m hop: ")
        done = self.start(f"{command} --debug")
        assert done.returncode == 1 and "Traceback" in done.stderr and "hop/cli/inputs.py" in done.stderr

    def test_the_script_completes_in_a_shell(self):
        ((module, function),) = re.findall(r'^hop = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
        script = f"import sys; from {module} import {function}; sys.argv = ['hop']; sys.exit({function}())"
        done = self.start(
            f'{sys.executable} -c "{script}"', _HOP_COMPLETE="complete_bash", COMP_WORDS="hop formats e", COMP_CWORD="2"
        )
        assert done.stdout.split() == ["e4m3", "e5m2", "e2m1", "e8m0"], done.stderr

    def test_starts_with_little_more_than_torch(self):
        code = (
            "import sys, torch; before = set(sys.modules); from hop import cli; cli.main(['formats']);"
            "print(*set(sys.modules) - before)"
        )
        new = {m.split(".")[0] for m in self.start(f'{sys.executable} -c "{code}"').stdout.splitlines()[-1].split()}
        assert "typer" in new and not new & {"torchao", "onnx", "cutlass", "benchmarks", "executorch", "numpy", "sympy"}

    def test_rows_stand_above_a_bar(self):
        """On a terminal, each on a line of its own, and the bar is gone at the end."""
        code = (
            "import time; from hop.cli.output import Bar\n"
            "with Bar(2, 'work', ticks=False) as bar:\n"
            "    for i in range(2): bar.doing(f'part {i}'); bar.show(f'row {i}', style='red'); bar.step()\n"
        )
        shown = on_terminal([sys.executable, "-c", code])
        assert "part 1" in shown and "2/2" in shown
        rows = [line for line in shown.splitlines() if "row " in line]
        assert [line[line.index("row ") :][:5] for line in rows] == ["row 0", "row 1"]
        assert all("\x1b[2K" in line.partition("row ")[0] for line in rows) and shown.rstrip().endswith("\x1b[2K")

    def test_colours_on_a_terminal_alone(self):
        words = [sys.executable, "-m", "hop", "explain", "aten.mm", "int32", "int8:4x4", "int8:4x4"]
        plain = "integer product: chosen"
        for more, shown in (({}, f"\x1b[32m{plain}\x1b[0m"), ({"NO_COLOR": "1"}, plain)):
            assert on_terminal(words, **more).strip() == shown


@pytest.mark.full
class TestPage(unittest.TestCase):
    def test_prints_what_it_says(self):
        """The programs of the page are made, and its commands run among them, one after the other."""
        text = PAGE.read_text()
        (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
        sessions = "".join(re.findall(r"```console\n(.*?)```", text, re.S))
        steps = re.findall(r"^\$ hop (.*)\n((?:(?!\$ ).*\n)*)", sessions, re.M)
        assert len(steps) > 8
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        exec(compile(code, str(PAGE), "exec"), {})  # it changes to a folder of its own
        for command, shown in steps:
            _, out, err = run(*shlex.split(command))
            lines = shown.splitlines()
            assert lines, command
            for line in lines:
                assert line == "..." or line in (out + err).splitlines(), f"{command}: {line!r} not in {out + err}"
