"""quantize_folder: what from_pretrained makes of the same folder, in little memory; killed, and finished."""

import contextlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized

import hop
from hop.cli import main
from hop.nn.models.exact import is_exact
from tests.integrations.gguf_files import MODELS, write
from tests.integrations.models import IDS, NEEDED, QUIET, ROOT, llama
from tests.support import forks
from tests.support.files import InFolder

for name in NEEDED:
    pytest.importorskip(name, reason=f"{name} is not installed")
transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")

from hop import load_model  # noqa: E402
from hop.integrations import HopConfig, quantize_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)

MODEL_OPTIONS: dict[str, Any] = {"bert": {"add_pooling_layer": False}}


def quantizing(folder: Path, out: Path, started: Any) -> None:
    """What a process does that is killed."""
    torch.set_num_threads(1)
    started.set()
    quantize_folder(folder, out, "int8")


def at_once(folder: Path, out: Path, scheme: str, start: Any) -> None:
    """What a process does that begins together with another one."""
    torch.set_num_threads(1)
    start.wait(60)
    try:
        quantize_folder(folder, out, scheme)
    except FileExistsError:
        sys.exit(3)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestFolders(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.floats, self.out, self.other = (self.folder / name for name in ("floats", "out", "other"))

    def written(self, scheme: Any, shards: str = "50KB", tie: bool = False, **options: Any) -> Any:
        llama(tie=tie).save_pretrained(self.floats, max_shard_size=shards)
        (self.floats / "tokenizer.json").write_text("{}")
        return quantize_folder(self.floats, self.out, scheme, **options)

    @parameterized.expand(
        [
            ("int8", "int8", {}),
            ("int4", "int4", {}),
            ("one file", "int8", {"shards": "5GB"}),
            ("everything tied", "int8", {"tie": True, "modules_to_not_convert": []}),
            ("mxfp8", "mxfp8", {}),
            ("nvfp4", "nvfp4", {}),
            ("several", {"*.mlp.*": "int4", "*": "int8"}, {"modules_to_not_convert": ["q_proj"]}),
            ("blocks of rows", hop.presets.FP8_128X128, {}),
        ]
    )
    @pytest.mark.quick(4)
    def test_equals_from_pretrained(self, _name, scheme, options):
        report = self.written(scheme, **options)
        names = options.get("modules_to_not_convert")
        config = HopConfig(scheme, modules_to_not_convert=names)
        want = transformers.LlamaForCausalLM.from_pretrained(self.floats, quantization_config=config)
        want.save_pretrained(self.other)
        got, expected = ({}, {})
        for held, place in ((got, self.out), (expected, self.other)):
            for file in place.glob("*.safetensors"):
                held |= safetensors.load_file(file)
        assert got.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(got[key].view(torch.uint8), tensor.view(torch.uint8)), key
        again = transformers.LlamaForCausalLM.from_pretrained(self.out)
        ids = torch.arange(8)[None]
        assert torch.equal(again(ids).logits, want(ids).logits)
        if not options.get("tie"):  # there from_pretrained counts what is tied twice
            assert report.summary == want.hop_report.summary
        assert (self.out / "tokenizer.json").read_text() == "{}"
        for file in self.out.glob("*.safetensors"):
            described = hop.storage.load_file(file)  # needs no transformers
            assert not any(":" in name for name in described)

    def test_errors_and_bytes(self):
        """Of each row, from the files."""
        report = self.written({"*.mlp.*": "int4_weight_32", "*": "int8"})
        floats, codes = {}, {}
        for file in self.floats.glob("*.safetensors"):
            floats |= safetensors.load_file(file)
        for file in self.out.glob("*.safetensors"):
            codes |= hop.storage.load_file(file)
        for row in report.rows:
            if row.scheme is None or row.quantized == 0:
                assert row.error is None
                continue
            w, q = floats[f"{row.name}.weight"].double(), codes[f"{row.name}.weight"]
            want = float((hop.dequantize(q).double() - w).norm() / w.norm())
            assert abs(row.error - want) < 1e-9 and 0 < row.error < 0.2
            assert row.bytes == sum(t.numel() * t.element_size() for t in q.buffers().values())
        size = sum(os.path.getsize(file) for file in self.out.glob("*.safetensors"))
        total = sum(row.bytes for row in report.rows)
        assert 0.5 * size < total < size
        lines = str(report).splitlines()
        assert lines[0].split() == ["layer", "type", "parameters", "bytes", "error", "scheme"]
        assert len({line.index("%  ") if "%  " in line else 0 for line in lines[1:3]}) <= 2

    @parameterized.expand([(name, name) for name in ("llama tied", "mixtral", "gpt-oss", "bert")])
    @pytest.mark.quick(4)
    def test_gguf(self, _name, named):
        """As the folder of the dequantized model."""
        pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")
        file = self.folder / "model.gguf"
        write(MODELS[named](), file, "Q8_0")
        model = load_model(file).dequantize()
        model.save_pretrained(self.floats)
        seen = []
        report = quantize_folder(file, self.out, "int8", progress=lambda *x: seen.append(x))
        assert seen[-1][1] == seen[-1][2] and all(row.error for row in report.rows if row.quantized)
        again = type(model).from_pretrained(self.out, **MODEL_OPTIONS.get(named, {}))
        want = type(model).from_pretrained(
            self.floats, quantization_config=HopConfig("int8"), **MODEL_OPTIONS.get(named, {})
        )
        own, state = again.state_dict(), want.state_dict()
        assert own.keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(
                hop.dequantize(own[key]) if isinstance(own[key], hop.QuantizedTensor) else own[key],
                hop.dequantize(tensor) if isinstance(tensor, hop.QuantizedTensor) else tensor,
            ), key
        assert main(["quantize", str(file), str(self.out), "--scheme", "int8"]) == 0  # finished already

    def test_gguf_raises(self):
        pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")
        file = self.folder / "model.gguf"
        for changes, message in (
            ({"leave": "blk.1.ffn_up.weight"}, "and the model by its configuration"),
            ({"feed_forward_length": 2**30}, "and the model by its configuration"),
            ({"feed_forward_length": 96}, "and the model by its configuration has"),
            ({"add": "blk.0.attn_q_norm.weight"}, "has no place in the model"),
        ):
            write(MODELS["llama"](), file, "Q8_0", **changes)
            with self.assertRaisesRegex(ValueError, message):
                quantize_folder(file, self.out, "int8")
            assert not list(self.out.glob("*.safetensors")) and not (self.out / "config.json").exists()
            shutil.rmtree(self.out, ignore_errors=True)

    def test_command(self):
        llama().save_pretrained(self.floats)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["quantize", str(self.floats), str(self.out), "--scheme", "int8"]) == 0
        text = out.getvalue()
        assert "81,920 of 90,432 parameters quantized" in text and f"wrote {self.out}: " in text
        command = text.partition("next: ")[2].strip()
        python, option, code = shlex.split(command)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, {})
        assert (python, option) == ("python", "-c") and "81,920 of 90,432 parameters quantized" in out.getvalue()

    def test_exact(self):
        self.written("int8", modules_to_not_convert=[], exact=True)
        assert main(["quantize", str(self.floats), str(self.other), "--scheme", "int8", "--exact"]) == 0
        assert contents(self.other) == contents(self.out)
        model = transformers.LlamaForCausalLM.from_pretrained(self.out)
        assert is_exact(model) and model.config.quantization_config.exact
        want = hop.quantize_(transformers.LlamaForCausalLM.from_pretrained(self.floats), "int8", exact=True)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, want(IDS).logits)
        with self.assertRaisesRegex(ValueError, r"stay in floats.*lm_head \(Linear\).*modules_to_not_convert=\[\]"):
            quantize_folder(self.floats, self.folder / "heads", "int8", exact=True)
        with self.assertRaisesRegex(ValueError, "exact=True, and in the scheme .* products sum floats"):
            quantize_folder(self.floats, self.folder / "fp8", "fp8", exact=True)

    def test_goes_on(self):
        """A run that stops at any tensor leaves no config.json, and the next one does not do whole files again."""

        class Stop(Exception):
            pass

        for after in (1, 5, 9, 20):
            out, seen = self.folder / f"out{after}", list[str]()

            def stop(name: str, done: int, total: int, seen: list[str] = seen, after: int = after) -> None:
                seen.append(name)
                assert 0 < done <= total
                if len(seen) == after:
                    raise Stop

            llama().save_pretrained(self.floats, max_shard_size="50KB")
            files = {path: path.stat().st_mtime_ns for path in self.floats.iterdir()}
            with self.assertRaises(Stop):
                quantize_folder(self.floats, out, "int8", progress=stop)
            assert not (out / "config.json").exists() and files
            whole = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
            with self.assertRaisesRegex(FileExistsError, "was started with another"):
                quantize_folder(self.floats, out, "int4")
            names = list[str]()
            quantize_folder(self.floats, out, "int8", progress=lambda name, *_, names=names: names.append(name))
            assert all(path.stat().st_mtime_ns == at for path, at in whole.items())
            assert len(names) < 21 or not whole
            assert not list(out.glob("*.part")) and (out / "config.json").exists()
            transformers.LlamaForCausalLM.from_pretrained(out)
            quantize_folder(self.floats, out, "int8", progress=lambda *_: self.fail("nothing is left to do"))

    @pytest.mark.full
    def test_killed(self):
        """The command, killed at some moments, and then let be."""
        llama().save_pretrained(self.floats, max_shard_size="50KB")
        code = (
            "import sys, time, hop.integrations as i; pause = lambda *_: (print('.', flush=True), time.sleep(0.02)); "
            "i.quantize_folder(sys.argv[1], sys.argv[2], 'int8', progress=pause)"
        )
        for _ in range(3):
            run = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code, str(self.floats), str(self.out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
            )
            assert run.stdout is not None
            for _ in range(4):
                run.stdout.readline()
            run.kill()
            run.communicate()
            assert not (self.out / "config.json").exists() or run.returncode == 0
        command = [sys.executable, "-W", "ignore", "-m", "hop", "quantize"]
        done = subprocess.run(
            [*command, str(self.floats), str(self.out), "--scheme", "int8"], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0 and "81,920 of 90,432 parameters quantized" in done.stdout, done.stderr
        want = transformers.LlamaForCausalLM.from_pretrained(self.floats, quantization_config=HopConfig("int8"))
        got = transformers.LlamaForCausalLM.from_pretrained(self.out)
        assert torch.equal(got(IDS).logits, want(IDS).logits)

    def killed(self, times: int, seed: int) -> None:
        """Processes killed at random moments, each in a folder of its own and all in one: what is there is whole, or
        the next run makes it so, with the bytes of a run that nobody disturbs."""
        rng = random.Random(seed)
        self.written("int8", shards="20KB")
        want = contents(self.out)

        def run(out: Path, seconds: float | None) -> float:
            started = forks.context.Event()
            process = forks.context.Process(target=quantizing, args=(self.floats, out, started))
            process.start()
            assert started.wait(120)
            begin = time.perf_counter()
            process.join(seconds)
            taken = time.perf_counter() - begin
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            return taken

        seconds = min(run(self.folder / f"timed{i}", None) for i in range(2))
        unfinished = 0
        for i in range(times):
            for out in (self.folder / f"out{i}", self.folder / "all"):
                run(out, rng.uniform(0, seconds))
                if (out / "config.json").exists():
                    assert contents(out) == want, "it says that it is whole, and is not"
                    continue
                unfinished += 1
                if out.name != "all":
                    quantize_folder(self.floats, out, "int8")
                    assert contents(out) == want, i
        assert unfinished > times // 4, (unfinished, times, seconds)
        quantize_folder(self.floats, self.folder / "all", "int8")
        assert contents(self.folder / "all") == want

    @pytest.mark.full
    def test_killed_at_random(self):
        self.killed(4, seed=0)

    @pytest.mark.exhaustive
    def test_killed_at_many_moments(self):
        self.killed(20, seed=1)

    def test_raises(self):
        with self.assertRaisesRegex(FileNotFoundError, "has no config.json"):
            quantize_folder(self.folder, self.out, "int8")
        self.written("int8")
        with self.assertRaisesRegex(ValueError, "is quantized already"):
            quantize_folder(self.out, self.other, "int8")
        with self.assertRaisesRegex(FileExistsError, "holds other files"):
            quantize_folder(self.floats, self.floats, "int8")
        config = json.loads((self.floats / "config.json").read_text())
        (self.floats / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
        with self.assertRaisesRegex(ValueError, "tensor 'model.*' is torch.float32 of .*, and the model has"):
            quantize_folder(self.floats, self.other, "int8")
        for key in ("num_hidden_layers", "num_labels", "n_layer", "num_local_experts"):
            (self.floats / "config.json").write_text(json.dumps({**config, "text_config": {key: 10**9}}))
            with self.assertRaisesRegex(
                ValueError, f"{key} of config.json must be an integer up to .*, got 1000000000"
            ):
                quantize_folder(self.floats, self.other, "int8")
        for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"):  # which size layers
            for number, message in (
                (10**9, "the files have .* elements, and the model by"),
                (10**15, "quantize_folder"),
            ):
                (self.floats / "config.json").write_text(json.dumps({**config, key: number}))
                began = time.process_time()
                with self.assertRaisesRegex(ValueError, message):
                    quantize_folder(self.floats, self.other, "int8")
                assert time.process_time() - began < 10, f"{key} of {number} took time"
        for key, number in (("num_attention_heads", 10**9), ("rms_norm_eps", 10**9), ("hidden_size", "64")):
            (self.floats / "config.json").write_text(json.dumps({**config, key: number}))
            with self.assertRaisesRegex(ValueError, "transformers cannot read config.json"):
                quantize_folder(self.floats, self.other, "int8")
        (self.floats / "config.json").write_text(json.dumps({**config, "architectures": ["Path"]}))
        with self.assertRaisesRegex(ValueError, "must name a model of transformers, got 'Path'"):
            quantize_folder(self.floats, self.other, "int8")
        (self.floats / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
        with self.assertRaisesRegex(ValueError, "got 'BertModel'; give one of model_type 'llama'"):
            quantize_folder(self.floats, self.other, "int8")
        (self.floats / "config.json").write_text(json.dumps(config))
        file = next(self.floats.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-8])
        with self.assertRaisesRegex(ValueError, "is not a complete safetensors file"):
            quantize_folder(self.floats, self.other, "int8")

    def test_code_of_the_folder(self):
        """It is not run, and nobody is asked whether to run it."""
        self.floats.mkdir()
        mark = self.folder / "ran"
        (self.floats / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
        config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}, "architectures": ["Mine"]}
        (self.floats / "config.json").write_text(json.dumps(config))
        with mock.patch("builtins.input", return_value="y") as asked, self.assertRaisesRegex(ValueError, "code"):
            quantize_folder(self.floats, self.out, "int8")
        assert not mark.exists() and not asked.called and not self.out.exists()

    @pytest.mark.full
    def test_at_once(self):
        """Two processes that do the same give what one gives; of two that do something else one goes on."""
        llama().save_pretrained(self.floats, max_shard_size="50KB")
        want = {}
        for scheme in ("int8", "int4"):
            quantize_folder(self.floats, self.folder / scheme, scheme)
            want[scheme] = contents(self.folder / scheme)
        for turn, pair in enumerate((("int8", "int8"), ("int8", "int4"), ("int4", "int8"))):
            out = self.folder / str(turn)
            start = forks.context.Barrier(2)
            running = [forks.context.Process(target=at_once, args=(self.floats, out, s, start)) for s in pair]
            for process in running:
                process.start()
            for process in running:
                process.join(120)
                process.kill()
            ends = {scheme: process.exitcode for scheme, process in zip(pair, running, strict=True)}
            assert sorted(ends.values()) == ([0] if len(ends) == 1 else [0, 3]), ends
            assert contents(out) == want[next(scheme for scheme, end in ends.items() if end == 0)]
