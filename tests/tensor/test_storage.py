"""Quantized tensors in safetensors files: every quantizer there and back, and files that are not what they say."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from parameterized import parameterized
from torch import nn

import hop
from hop import QuantizedTensor, TensorProto
from hop import presets as P
from hop.numerics.scale_rules import Static
from hop.tensor.storage import load_file, save_file
from tests.support.files import InFolder


def made(name: str, *shape: int, dtype: torch.dtype = torch.float32, usages: Any = ("rowwise",)) -> QuantizedTensor:
    q = P.PRESETS[name]
    scale = zero_point = None
    if isinstance(q.scale, Static):
        scale = torch.tensor(0.05)
        zero_point = torch.tensor(3, dtype=q.format.dtype) if q.scale.affine else None
    x = torch.randn(shape).to(dtype)
    noise = torch.randint(0, 256, x.shape, dtype=torch.uint8) if q.stochastic else None
    return hop.quantize(q, x, scale=scale, zero_point=zero_point, noise=noise, usages=usages)


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is QuantizedTensor and TensorProto.of(got) == TensorProto.of(want.detach())
    for (name, mine), (other, its) in zip(got.buffers().items(), want.buffers().items(), strict=True):
        assert name == other and mine.dtype == its.dtype
        assert torch.equal(mine.to(torch.float32), its.to(torch.float32)), name
    assert torch.equal(hop.dequantize(got), hop.dequantize(want.detach()))


class InFile(InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "tensors.safetensors"

    def there_and_back(self, tensors: dict[str, Any], **options: Any) -> dict[str, Any]:
        save_file(tensors, self.path, **options)
        return load_file(self.path)


class TestThereAndBack(InFile):
    @parameterized.expand([(name,) for name in P.PRESETS])
    @pytest.mark.quick(3)
    def test_preset(self, name):
        q = P.PRESETS[name]
        usages = [("rowwise",)] if q.flat else [("rowwise",), ("columnwise",), ("rowwise", "columnwise")]
        shapes = [(32, 70), (2, 16, 33)] if q.hadamard else [(33, 70), (64,), (), (2, 3, 5, 32), (0, 4)]
        dtypes = [torch.bfloat16, torch.float16, torch.float32]
        tensors = {
            f"layer.{i}.{'+'.join(u)}": made(name, *shape, dtype=dtypes[i % 3], usages=u)
            for i, shape in enumerate(shapes)
            for u in usages
        }
        found = self.there_and_back(tensors)
        assert found.keys() == tensors.keys()
        for key, b in tensors.items():
            with self.subTest(tensor=key):
                assert_same(found[key], b)

    def test_beside_plain_tensors(self):
        tensors = {
            "w": made("MXFP8", 4, 64),
            "w.bias": torch.randn(4).bfloat16(),
            "w:other": torch.arange(3),
            "empty": torch.empty(0, 3),
            "turned": torch.randn(4, 5).t(),
        }
        found = self.there_and_back(tensors)
        assert found.keys() == tensors.keys()
        assert_same(found.pop("w"), tensors.pop("w"))
        for key, x in tensors.items():
            assert type(found[key]) is torch.Tensor and found[key].dtype == x.dtype and torch.equal(found[key], x)

    def test_state_dict(self):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).bfloat16()
        for linear, name in zip(model, ("INT4_32", "NVFP4"), strict=True):
            linear.weight = nn.Parameter(hop.quantize(P.PRESETS[name], linear.weight.detach()))
        save_file(model.state_dict(), self.path)
        twin = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).bfloat16()
        twin.load_state_dict(load_file(self.path), assign=True)
        for mine, its in zip(twin, model, strict=True):
            assert_same(mine.weight.data, its.weight)
            assert torch.equal(mine.bias, its.bias)

    def test_parts_and_views(self):
        b = made("INT8_ROW", 8, 64)
        tensors = {"rows": b[2:4], "turned": made("INT8_ROW", 8, 64).t(), "group": made("INT4_32", 4, 128)[:, 32:64]}
        found = self.there_and_back(tensors)
        for key, view in tensors.items():
            assert_same(found[key], view)
            assert found[key].codes.is_contiguous()

    def test_parameters_come_back_as_tensors(self):
        found = self.there_and_back({"w": nn.Parameter(made("INT8_ROW", 4, 64))})["w"]
        assert not isinstance(found, nn.Parameter) and not found.requires_grad

    def test_metadata(self):
        save_file({"w": made("INT8_ROW", 4, 64)}, str(self.path), {"author": "somebody"})
        with safetensors.safe_open(str(self.path), "pt") as file:
            metadata = file.metadata()
            assert sorted(file.keys()) == ["w:codes", "w:scale"]
        assert metadata["author"] == "somebody"
        assert json.loads(metadata["hop"]) == {
            "w": {
                "quantizer": str(P.INT8_ROW),
                "shape": [4, 64],
                "dtype": "torch.float32",
                "usages": ["rowwise"],
            }
        }

    def test_files_of_others(self):
        """Without an entry of ours they are read as they are, whatever the names."""
        tensors = {"a": torch.randn(3), "a:codes": torch.arange(4)}
        for metadata in (None, {"format": "pt"}):
            safetensors.torch.save_file(tensors, str(self.path), metadata)
            found = load_file(self.path)
            assert found.keys() == tensors.keys() and all(torch.equal(found[k], x) for k, x in tensors.items())

    def test_device(self):
        save_file({"w": made("INT8_ROW", 4, 64), "x": torch.ones(2)}, self.path)
        for device in ("cpu", torch.device("cpu")):
            assert load_file(self.path, device)["w"].codes.device.type == "cpu"
        if torch.cuda.is_available():
            found = load_file(self.path, "cuda")
            assert found["w"].device.type == found["w"].codes.device.type == found["x"].device.type == "cuda"


class TestRefused(InFile):
    @parameterized.expand(
        [
            ("quantized_first", lambda: {"w": made("INT8_ROW", 4, 64), "w:codes": torch.ones(2)}),
            ("plain_first", lambda: {"w:codes": torch.ones(2), "w": made("INT8_ROW", 4, 64)}),
        ]
    )
    def test_names_that_collide(self, _name, tensors):
        with self.assertRaisesRegex(ValueError, "two tensors would be called 'w:codes'; rename 'w"):
            save_file(tensors(), self.path)
        assert not self.path.exists()

    def test_shared_memory(self):
        """A file has no ties between tensors; safetensors says which share memory."""
        b = made("INT8_TENSOR", 4, 64)
        for tensors in ({"a": b, "b": b}, {"a": b[:2], "b": b[2:]}):  # two parts share a scale
            with self.assertRaisesRegex(RuntimeError, "a:scale"):
                save_file(tensors, self.path)
        found = self.there_and_back({"a": b, "b": b.clone()})
        assert_same(found["a"], b)
        assert_same(found["b"], b)

    @parameterized.expand(
        [
            ("no_json", lambda d: "{", "its metadata is not JSON"),
            ("nested", lambda d: "[" * 100_000, "its metadata is not JSON"),
            ("list", lambda d: "[1]", "its metadata is not a JSON object"),
            ("number", lambda d: "3", "its metadata is not a JSON object"),
            ("entry", lambda d: {"w": 3}, "'w' .* must have the fields"),
            ("no_fields", lambda d: {"w": {}}, "'w' .* must have the fields"),
            ("more_fields", lambda d: {"w": {**d, "more": 1}}, "'w' .* must have the fields"),
            ("shape", lambda d: {"w": {**d, "shape": [4, 65]}}, r"'w' .* codes must be torch.int8 of \(4, 65\)"),
            ("rank", lambda d: {"w": {**d, "shape": [4, 8, 8]}}, "'w' .* codes must be"),
            ("text_shape", lambda d: {"w": {**d, "shape": "46"}}, "'w' .* shape must be a list of sizes"),
            ("float_shape", lambda d: {"w": {**d, "shape": [4.0, 64]}}, "'w' .* shape must be a list of sizes"),
            ("negative", lambda d: {"w": {**d, "shape": [-4, -64]}}, "'w' .* shape must be a list of sizes"),
            ("true", lambda d: {"w": {**d, "shape": [True, 64]}}, "'w' .* shape must be a list of sizes"),
            (
                "long",
                lambda d: {"w": {**d, "shape": [2**62] * 10**5}},
                "'w' .* shape must be a list of sizes, at most 64",
            ),
            ("huge", lambda d: {"w": {**d, "shape": [2**200, 64]}}, "'w' .* codes must be"),
            ("dtype", lambda d: {"w": {**d, "dtype": "torch.int8"}}, "'w' .* must be floating point"),
            ("no_dtype", lambda d: {"w": {**d, "dtype": "torch.nn"}}, "'w' .* is not a dtype"),
            ("dtype_number", lambda d: {"w": {**d, "dtype": 3}}, "'w' .* is not a dtype"),
            ("quantizer", lambda d: {"w": {**d, "quantizer": "hop1:Quantizer(format=int9)"}}, "'w' .* 'int9'"),
            ("version", lambda d: {"w": {**d, "quantizer": "hop9:Quantizer(format=int8)"}}, "'w' .* the version"),
            ("code", lambda d: {"w": {**d, "quantizer": "__import__('os').abort()"}}, "'w' .* position 0"),
            ("deep", lambda d: {"w": {**d, "quantizer": "hop1:" + "(" * 100_000}}, "'w' does not match"),
            ("no_quantizer", lambda d: {"w": {**d, "quantizer": None}}, "'w' .* text must be a str"),
            ("other_quantizer", lambda d: {"w": {**d, "quantizer": str(P.MXFP8)}}, "'w' .* buffer codes must be"),
            ("other_block", lambda d: {"w": {**d, "quantizer": str(P.INT8_TENSOR)}}, "'w' .* buffer scale must be"),
            ("more_buffers", lambda d: {"w": {**d, "quantizer": str(P.INT8_ROW_AFFINE)}}, r"'w' .* \['w:zero_point'\]"),
            ("usages", lambda d: {"w": {**d, "usages": ["sideways"]}}, "'w' .* usages must name"),
            ("usages_number", lambda d: {"w": {**d, "usages": 1}}, "'w' does not match"),
            ("columns", lambda d: {"w": {**d, "usages": ["columnwise"]}}, r"'w' .* lacks \['w:columnwise_codes'"),
            ("other_name", lambda d: {"v": d}, r"'v' .* lacks \['v:codes', 'v:scale'\]"),
            ("plain_name", lambda d: {"w": d, "plain": d}, "'plain' .* lacks"),
            ("twice", lambda d: {"w": d, "w:codes": d}, "'w:codes' .* lacks"),
        ]
    )
    def test_metadata(self, _name, change, message):
        save_file({"w": made("INT8_ROW", 4, 64), "plain": torch.ones(2)}, self.path)
        self.rewrite(lambda flat: flat, change)
        with self.assertRaisesRegex(ValueError, f"load_file: .*{self.path.name}.*{message}"):
            load_file(self.path)

    def test_messages_are_short(self):
        for change in (
            lambda d: {"w" * 10**5: d},
            lambda d: {"w": {**d, "shape": [10**4000] * 60}},
            lambda d: {"w": {**d, "quantizer": "hop1:" + "x" * 10**5}},
            lambda d: {"w": {**d, "dtype": "torch." + "x" * 10**5}},
            lambda d: {"w": {**d, "usages": ["x" * 10**5]}},
            lambda d: {"w": {**d, "x" * 10**5: 1}},
        ):
            save_file({"w": made("INT8_ROW", 4, 64)}, self.path)
            self.rewrite(lambda flat: flat, change)
            with self.assertRaises(ValueError) as caught:
                load_file(self.path)
            message = str(caught.exception).partition("; known are")[0]
            assert len(message) < 800 and message.count("x") < 260, message

    @parameterized.expand(
        [
            ("missing", lambda flat: {k: x for k, x in flat.items() if k != "w:scale"}, r"lacks \['w:scale'\]"),
            ("shape", lambda flat: flat | {"w:scale": torch.ones(5, 1)}, "buffer scale must be"),
            ("dtype", lambda flat: flat | {"w:codes": flat["w:codes"].float()}, "buffer codes must be torch.int8"),
            ("plain_too", lambda flat: flat | {"w": torch.ones(3)}, "a plain tensor of that name"),
        ]
    )
    def test_tensors(self, _name, change, message):
        save_file({"w": made("INT8_ROW", 4, 64)}, self.path)
        self.rewrite(change, lambda d: {"w": d})
        expected = f"load_file: .*{self.path.name}: 'w' does not match the metadata: .*{message}"
        with self.assertRaisesRegex(ValueError, expected):
            load_file(self.path)

    def rewrite(self, change: Callable[[dict[str, Any]], dict[str, Any]], describe: Callable[[Any], Any]) -> None:
        """Write the file anew, with other tensors, and with another text or object as our metadata."""
        with safetensors.safe_open(str(self.path), "pt") as file:
            entry = json.loads(file.metadata()["hop"])["w"]
        described = describe(entry)
        text = described if isinstance(described, str) else json.dumps(described)
        flat = change(safetensors.torch.load_file(str(self.path)))
        safetensors.torch.save_file(flat, str(self.path), {"hop": text})

    def test_damaged_files(self):
        save_file({"w": made("INT8_ROW", 64, 64)}, self.path)
        data = self.path.read_bytes()
        for damaged in (data[:-100], data[:20], b"", b"\xff" * 64):
            self.path.write_bytes(damaged)
            with self.assertRaisesRegex(
                ValueError, f"load_file: .*{self.path.name} is not a complete safetensors file"
            ):
                load_file(self.path)
        self.path.unlink()
        with self.assertRaises(FileNotFoundError):
            load_file(self.path)

    def test_what_is_no_tensor(self):
        with self.assertRaisesRegex(TypeError, r"save_file: tensors\['a'\] must be a tensor, got 1"):
            save_file({"a": 1}, self.path)

    @pytest.mark.full
    def test_without_safetensors(self):
        code = """
import sys
sys.modules["safetensors"] = None
import torch, hop, hop.storage
for call in (lambda: hop.storage.save_file({"x": torch.ones(2)}, "x"), lambda: hop.storage.load_file("x")):
    try:
        call()
    except ImportError as error:
        assert "torch-hop[safetensors]" in str(error), error
    else:
        raise SystemExit("no error")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
