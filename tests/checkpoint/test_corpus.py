"""What every version has written is read by this one, and means the same numbers, bit for bit.

A folder of tests/corpus is written by its version, once (tests/corpus/write.py), and never changed: where a test here
fails, the library has to read what it wrote. Its programs were saved by torch 2.13.
"""

import json
import operator
import subprocess
import sys
import unittest
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from parameterized import parameterized
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hop
import hop.checkpoint
import hop.nn
import hop.optim
from hop import formats, layouts, presets, recipes, requantization, scale_rules, schemes
from hop.dispatch import hop as _hop
from hop.numerics import spelling
from hop.numerics.quantizer import Quantizer
from tests.corpus import contents, write

VERSIONS = sorted(p.name for p in contents.FOLDER.iterdir() if p.is_dir() and p.name[0].isdigit())


@cache
def numbers(version: str) -> dict[str, Tensor]:
    return safetensors.torch.load_file(contents.FOLDER / version / "numbers.safetensors")


@cache
def spelled(version: str) -> Any:
    return json.loads((contents.FOLDER / version / "spellings.json").read_text())


def under(version: str, prefix: str) -> dict[str, Tensor]:
    """The numbers whose names begin so."""
    return {key.removeprefix(prefix): x for key, x in numbers(version).items() if key.startswith(prefix)}


def files(kind: str) -> list[tuple[str, str, Path]]:
    return [
        (f"{version}_{path.stem}", version, path)
        for version in VERSIONS
        for path in sorted((contents.FOLDER / version).glob(kind))
    ]


def loaded(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return hop.storage.load_file(path)
    return torch.load(path, weights_only=True)


def assert_bits(got: Tensor, want: Tensor, where: Any = None) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, where
    got, want = (x.contiguous().reshape(-1).view(torch.uint8) for x in (got, want))
    assert torch.equal(got, want), where


def subclasses(base: type) -> set[type]:
    return {c for cls in base.__subclasses__() for c in (cls, *subclasses(cls))}


def versions() -> Any:
    return parameterized.expand([(version,) for version in VERSIONS])


class TestSpellings(unittest.TestCase):
    @versions()
    def test_formats(self, version):
        for name, entry in spelled(version)["formats"].items():
            found = spelling.read(entry["text"], formats.Format)
            assert (
                found.name in (name, contents.custom().get(name, found).name)
                and list(found.numbers) == entry["numbers"]
            )

    @versions()
    def test_values(self, version):
        """Read back, they are what their names say now, spelled as before or at least equal."""
        texts = spelled(version)
        for kind, cls, now in (
            ("quantizers", Quantizer, presets.PRESETS),
            ("schemes", hop.Scheme, contents.NAMED),
            ("conventions", requantization.Requantization, {}),
        ):
            for name, text in texts[kind].items():
                found = spelling.read(text, cls)
                assert spelling.read(str(found), cls) == found, name
                assert name not in now or now[name] == found, name
            assert len(texts[kind]) > len(now)

    @versions()
    @pytest.mark.full
    def test_reads_in_a_new_process(self, version):
        """`import hop` is enough to read every text, wherever its class is defined."""
        kinds = ("formats", "quantizers", "schemes", "conventions")
        texts = [x["text"] if kind == "formats" else x for kind in kinds for x in spelled(version)[kind].values()]
        code = "import json, sys, hop.numerics.spelling as s\nfor text in json.load(sys.stdin): s.read(text)"
        subprocess.run([sys.executable, "-c", code], input=json.dumps(texts), text=True, check=True)

    @versions()
    def test_public_names(self, version):
        for name in spelled(version)["names"]:
            assert operator.attrgetter(name.removeprefix("hop."))(hop), name


class TestTensors(unittest.TestCase):
    @parameterized.expand(files("tensors.*"))
    def test_numbers(self, _name, version, path):
        want, found = under(version, "tensor."), loaded(path)
        assert found.keys() == want.keys()
        for name, t in found.items():
            assert type(t) is hop.QuantizedTensor
            assert str(t.quantizer) == str(Quantizer.parse(spelled(version)["quantizers"][name.split(".")[0]]))
            assert_bits(hop.dequantize(t), want[name], name)

    @versions()
    def test_quantized_again(self, version):
        """The same codes and scales come of the same numbers."""
        found = loaded(contents.FOLDER / version / "tensors.pt")
        cases = {name: (q, usages) for name, q, usages in contents.tensor_cases()}
        for name in found.keys() & cases.keys():
            own = contents.tensor(*cases[name], numbers(version))
            assert own.buffers().keys() == found[name].buffers().keys()
            for key, buffer in own.buffers().items():
                assert_bits(buffer, found[name].buffers()[key], (name, key))


class TestLayers(unittest.TestCase):
    @parameterized.expand(files("layers.*"))
    @pytest.mark.quick(2)
    def test_outputs(self, _name, version, path):
        found, inputs = loaded(path), numbers(version)
        if path.suffix == ".safetensors":  # one dictionary of all, by their names
            flat, found = found, {}
            for key, t in flat.items():
                found.setdefault(key.split("/")[0], {})[key.split("/")[1]] = t
        assert found
        for key, state in found.items():
            scheme, kind, how = key.split(".")
            x, read = inputs[f"layer.{kind}"], hop.Scheme.parse(spelled(version)["schemes"][scheme])
            layer = contents.ready(kind, read, x + x, is_frozen=how == "frozen", is_trained=False)
            with torch.no_grad():
                for p in layer.parameters():
                    p.zero_()
                layer.load_state_dict(state)
                got, want = contents.plain(layer(x)), inputs[f"output.{scheme}.{kind}"]
                if "conv" in kind and read.lhs is None:  # PyTorch's own, whose sums differ from CPU to CPU
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * want.abs().max().item(), msg=key)
                else:
                    assert_bits(got, want, key)


class TestOptimizers(unittest.TestCase):
    @versions()
    def test_next_step(self, version):
        inputs = numbers(version)
        found = loaded(contents.FOLDER / version / "optimizers.pt")
        for name, state in found.items():
            params = contents.parameters(inputs)
            with torch.no_grad():
                for i, p in enumerate(params):
                    p.copy_(inputs[f"optimizer.{name}.{i}.before"])
            optimizer = contents.OPTIMIZERS[name](params)
            optimizer.load_state_dict(state)
            contents.step(optimizer, inputs, 2)
            for i, p in enumerate(params):
                assert_bits(p.detach(), inputs[f"optimizer.{name}.{i}.after"], name)


class TestCheckpoints(unittest.TestCase):
    """Read by this process alone, of whatever processes they are."""

    @versions()
    def test_of_one_process(self, version):
        folder, inputs = contents.FOLDER / version / "checkpoint", numbers(version)
        want = loaded(contents.FOLDER / version / "tensors.pt")
        tensors = {name: emptied(want[name]) for name in write.CHECKPOINTED}
        model = contents.Trained(inputs)
        optimizer = contents.OPTIMIZERS[contents.CHECKPOINTED](model.parameters())
        contents.step(optimizer, inputs, 0)
        trained, states = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"tensors": tensors, "note": None, "model": trained, "optimizer": states}
        assert hop.checkpoint.load(state, folder, step=1) == 1
        assert state["note"] == [1, "x"]
        for name, t in state["tensors"].items():
            assert_bits(hop.dequantize(t), inputs[f"tensor.{name}"], name)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        contents.step(optimizer, inputs, 2)
        for i, p in enumerate(model.parameters()):
            assert_bits(p.detach(), inputs[f"optimizer.{contents.CHECKPOINTED}.{i}.after"], i)

    @versions()
    def test_of_two_processes(self, version):
        x = numbers(version)["x.grouped"].to(torch.bfloat16)
        want = {name: hop.quantize(presets.PRESETS[name], x) for name in write.SHARDED}
        state = {"tensors": {name: emptied(t) for name, t in want.items()}}
        assert hop.checkpoint.load(state, contents.FOLDER / version / "checkpoint") == 2
        for name, t in state["tensors"].items():
            assert_bits(hop.dequantize(t), hop.dequantize(want[name]), name)


def emptied(t: Any) -> Any:
    """A tensor like t, whose buffers hold something else."""
    return t.rebuilt({name: torch.zeros_like(b) for name, b in t.buffers().items()})


class TestPrograms(unittest.TestCase):
    @parameterized.expand(files("programs/*.pt2"))
    @pytest.mark.quick(3)
    def test_outputs(self, _name, version, path):
        name = path.stem.removesuffix("_lowered")
        inputs, want = numbers(version), under(version, f"program.{name}.")
        keys = spelled(version)["inputs"][name]
        got = torch.export.load(path).module()(*(inputs[key] for key in keys))
        assert len(got) == len(want) > 0
        for i, y in enumerate(got):
            assert_bits(y, want[str(i)], i)


class TestComplete(unittest.TestCase):
    """All that files hold stands in the corpus of some version: what is new, in that of the version that brings it."""

    def _missing(self, kind: str, public: Any) -> list[str]:
        return sorted(set(public) - {name for version in VERSIONS for name in spelled(version)[kind]})

    def test_spellings(self):
        known = {f.name: f for f in formats.FORMATS}
        for kind, public in (("formats", known), ("quantizers", presets.PRESETS)):
            missing = self._missing(kind, public)
            assert not missing, f"no corpus has {kind} {missing}: python -m tests.corpus.write with the next version"

    def test_schemes(self):
        """Files hold them as quantizers; each of those is spelled in a corpus, by itself or in a scheme."""
        texts = [text for version in VERSIONS for text in spelled(version)["quantizers"].values()]
        older = [text for version in VERSIONS for text in spelled(version)["schemes"].values()]
        known = {Quantizer.parse(text) for text in texts}
        for scheme in map(hop.Scheme.parse, older):
            known |= {scheme.lhs, scheme.rhs, scheme.output, scheme.grad}
        for name, scheme in {**schemes.SCHEMES, **recipes.RECIPES}.items():
            assert {scheme.lhs, scheme.rhs, scheme.output, scheme.grad} <= known, name

    def test_classes(self):
        """Each rule, layout and convention of requantization is spelled in a quantizer."""
        texts = " ".join(text for version in VERSIONS for text in spelled(version)["quantizers"].values())
        for old, new in spelling.EARLIER.items():
            texts = texts.replace(f"{old}(", f"{new}(")
        bases = {scale_rules.Rule: "Amax", layouts.Layout: "", requantization.Requantization: "Division"}  # the default
        for base, default in bases.items():
            for cls in subclasses(base):
                if cls.__module__.startswith("hop.") and cls.__name__ != default and not cls.__name__.startswith("_"):
                    assert f"{cls.__name__}(" in texts, cls

    def test_tensors_layers_and_optimizers(self):
        found = {name for version in VERSIONS for name in under(version, "tensor.")}
        assert {f"{name}.rowwise" for name in presets.PRESETS} <= found
        found = {name for version in VERSIONS for name in under(version, "output.")}
        assert {name for name, _, _ in contents.layer_cases()} <= found
        own = [
            cls for cls in vars(hop.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        ]
        assert {cls.__name__ for cls in own} == {
            type(make([torch.ones(1)])).__name__ for make in contents.OPTIMIZERS.values()
        }
        own = [cls for cls in subclasses(hop.nn.Layer) if "float_type" in vars(cls)]
        assert {cls.float_type for cls in own} == {type(make()) for make in contents.LAYERS.values()} | contents.ALIKE

    @pytest.mark.full
    def test_operators(self):
        found = {name for _, _, path in files("programs/*.pt2") for name in contents.operators(torch.export.load(path))}
        assert found == {str(op) for op in _hop.hops if op.__class__.__module__.startswith("hop.")} - contents.UNSAVED
