"""Files and folders of checkpoints, and those that are not what they say."""

import json
import struct

import numpy as np
import torch

import hop
from hop.interchange import open_checkpoint
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, pack_words, tensors_of


def gptq() -> tuple[dict[str, object], dict[str, torch.Tensor], torch.Tensor]:
    """A configuration, tensors, and the numbers of the weight."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (64, 8)), rng.integers(0, 16, (2, 8))
    scales = rng.random((2, 8)).astype(np.float32)
    want = (codes - zeros.repeat(32, 0)).astype(np.float32) * scales.repeat(32, 0)
    words = {"qweight": pack_words(codes.T, 4).T, "qzeros": pack_words(zeros, 4), "scales": scales}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    return config, tensors_of("a.", **words), torch.from_numpy(want.T.copy())


class TestFiles(InCheckpoint):
    def test_plain(self):
        """Without a quantization_config, and without a config.json; of a folder and of a file."""
        tensors = {"a.weight": torch.ones(2, 3), "b": torch.arange(4)}
        found = self.written(None, tensors)
        assert dict(found).keys() == tensors.keys() and len(found) == 2 and found.config == {}
        (self.folder / "config.json").unlink()
        assert torch.equal(open_checkpoint(self.folder / "model.safetensors")["b"], tensors["b"])
        assert "b" in open_checkpoint(str(self.folder)) and "c" not in found

    def test_shards(self):
        """A weight whose parts are in two files."""
        config, tensors, want = gptq()
        names, index = sorted(tensors), {}
        for i, some in enumerate((names[:2], names[2:]), 1):
            file = f"model-{i:05}-of-00002.safetensors"
            self.written(config, {name: tensors[name] for name in some}, file)
            index |= dict.fromkeys(some, file)
        path = self.folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": index}))
        found = open_checkpoint(self.folder)
        assert list(found) == ["a.weight"]
        assert_bits(found["a.weight"], want)
        for held in ({"a": "../x.safetensors"}, {"a": 3}, {"a": ["x"]}, {"a": "none.safetensors"}, [], None):
            path.write_text(json.dumps({"weight_map": held}))
            with self.assertRaisesRegex(ValueError, "weight_map must map names to files in the same folder"):
                open_checkpoint(self.folder)
        path.write_text(json.dumps({"weight_map": {**index, "a.other": index["a.scales"]}}))
        with self.assertRaisesRegex(ValueError, "tensor 'a.other'"):
            open_checkpoint(self.folder)

    def test_cut_off(self):
        config, tensors, _ = gptq()
        self.written(config, tensors)
        file = self.folder / "model.safetensors"
        content = file.read_bytes()
        for size in range(len(content)):
            file.write_bytes(content[:size])
            with self.assertRaisesRegex(ValueError, "is not a complete safetensors file"):
                open_checkpoint(self.folder)

    def test_headers(self):
        """What the package takes and PyTorch does not have."""
        file = self.folder / "model.safetensors"
        for kind, shape, size, message in (
            ("F32", [0, 2**63], 0, "tensor 'a' has shape [0, 9223372036854775808]; PyTorch supports up to 64 sizes"),
            ("I8", [1] * 10**5, 1, "tensor 'a' has shape [1, 1,"),
            ("F6_E2M3", [4], 3, "tensor 'a' cannot be read"),
            ("x" * 10**5, [4], 3, "is not a complete safetensors file"),
            ("F32", [2**40, 2**40], 3, "is not a complete safetensors file"),
        ):
            header = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}).encode()
            file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
            for read in (lambda: dict(open_checkpoint(self.folder)), lambda: hop.storage.load_file(file)):
                with self.assertRaises(ValueError) as caught:
                    read()
                text = str(caught.exception)
                assert message in text and str(self.folder) in text and len(text) < len(str(file)) + 300, text

    def test_integers_that_are_no_codes(self):
        """Integers beside names that only look like their scales' are tensors of the model; int8 codes are refused."""
        config, tensors, want = gptq()
        plain = torch.arange(-4, 4, dtype=torch.int16).reshape(2, 4)
        names = ("ids", "places", "b.qzeros")
        others = ("ids_scale", "places_scaled_by.weight", "b.scales")
        held = {**tensors, **dict.fromkeys(names, plain), **dict.fromkeys(others, torch.ones(2))}
        found = self.written(config, {name: t.clone() for name, t in held.items()})
        assert_bits(found["a.weight"], want)
        assert all(torch.equal(found[name], plain) and found[name].dtype == torch.int16 for name in names)
        held = {**tensors, "places": plain.to(torch.int8), "places_scaled_by.weight": torch.ones(2)}
        assert torch.equal(self.written(config, held)["places"], held["places"])
        codes = {**tensors, "ids": plain.to(torch.int8), "ids_scale": torch.ones(2)}
        self.fails(config, codes, "'ids' would be read as codes without their scale, 'ids_scale'")
        codes = {"b.qweight": plain, "b.scales": torch.ones(2, 4), "b.scaled_zeros": torch.ones(2, 4)}
        self.fails(config, {**tensors, **codes}, "'qweight' is torch.int16 of (2, 4)")

    def test_no_elements(self):
        """A shape such as (2^57, 0) takes no byte of a file, and must not count rows to read."""
        many, words = 2**57, torch.int32
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
        packed = {"a.qweight": (0, many), "a.qzeros": (0, many // 8)}
        rows = {"a.qweight": (many, 0), "a.qzeros": (many, 0)}
        for config, shapes, scales in (
            (gptq, packed, (0, many)),
            ({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}, packed, (0, 8 * many)),
            ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 32}, rows, (many, 0)),
        ):
            tensors = {name: torch.empty(shape, dtype=words) for name, shape in shapes.items()}
            self.fails(config, {**tensors, "a.scales": torch.empty(scales)}, "and must have elements")

    def test_refused(self):
        with self.assertRaisesRegex(TypeError, "path must be text or a Path, got 3"):
            open_checkpoint(3)
        with self.assertRaisesRegex(FileNotFoundError, "path must be an existing file or folder"):
            open_checkpoint(self.folder / "none")
        with self.assertRaisesRegex(FileNotFoundError, "has no files"):
            open_checkpoint(self.folder)
        self.fails({"quant_method": "none"}, {"a": torch.ones(1)}, "quant_method of config.json is 'none'")
        self.fails({"quant_method": ["gptq"]}, {"a": torch.ones(1)}, "quant_method of config.json is ['gptq']")
        self.fails([1], {"a": torch.ones(1)}, "quantization_config must be an object")
        for config in ({"quant_method": "x" * 10**5}, ["x" * 10**5], {"quant_method": "gptq", "bits": "x" * 10**5}):
            with self.assertRaises(ValueError) as caught:
                dict(self.written(config, gptq()[1]))
            assert len(str(caught.exception)) < 500 + len(str(self.folder)), caught.exception
        (self.folder / "config.json").write_text('{"a":' * 200 + "1" + "}" * 200)
        with self.assertRaisesRegex(ValueError, "nested more than 64 deep"):
            open_checkpoint(self.folder)
        (self.folder / "config.json").write_text("{")
        with self.assertRaisesRegex(ValueError, "is not JSON"):
            open_checkpoint(self.folder)
