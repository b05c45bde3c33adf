"""GGUF files: every type of block against the package gguf, bit for bit; and files that are not what they say."""

import struct
import subprocess
import sys
import tracemalloc
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop.interchange import load_gguf, open_gguf, save_gguf
from hop.interchange.gguf_types import PLAIN, TYPES, BlockType
from tests.support.files import InFolder

BY_NAME = {t.name: (number, t) for number, t in TYPES.items()}
# Where floats of 16 bits lie in a block, and the bytes of a block of ours over those of the file.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
BYTES = {"Q2_K": 100, "Q3_K": 114, "Q4_K": 148, "Q5_K": 180, "IQ4_XS": 138, "TQ1_0": 66}
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")  # gguf has quantizers of these


def gguf() -> Any:
    return pytest.importorskip("gguf", reason="the package gguf, the oracle, is missing")


def dequantized(raw: np.ndarray, number: int) -> np.ndarray:
    """What the package makes of bytes."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return gguf().quants.dequantize(raw, gguf().GGMLQuantizationType(number))


def random_blocks(t: BlockType, shape: tuple[int, ...], seed: int, finite: bool = True) -> np.ndarray:
    """Bytes of a tensor of `shape`, whose floats are finite, or any."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // t.elements, t.bytes), dtype=np.uint8)
    for at in HALVES[t.name] if finite else ():
        half = raw[..., at : at + 2].copy().view(np.float16)
        raw[..., at : at + 2] = np.where(np.isfinite(half), half, np.float16(-0.37)).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def assert_bits(got: Any, want: np.ndarray) -> None:
    numbers = hop.dequantize(got).numpy()
    assert numbers.shape == want.shape and numbers.dtype == want.dtype
    equal = (numbers.view(np.int32) == want.view(np.int32)) | (np.isnan(numbers) & np.isnan(want))
    assert equal.all(), f"{int((~equal).sum())} of {equal.size} numbers differ"


# ---- a writer of files, right and wrong


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    tensors: list[bytes],
    data: bytes = b"",
    *,
    keys: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    start: bytes = b"GGUF\x03\x00\x00\x00",
    alignment: int = 32,
) -> bytes:
    head = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys)))) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % alignment) + data


def small() -> bytes:
    """A file of three tensors and metadata."""
    raw = random_blocks(BY_NAME["Q4_K"][1], (2, 256), 1).tobytes() + bytes(-288 % 32)
    other = random_blocks(BY_NAME["Q5_0"][1], (64,), 2).tobytes() + bytes(-44 % 32)
    tensors = [info("blk.0.w", (2, 256), 12), info("b", (64,), 6, len(raw)), info("n", (3,), 0, len(raw) + len(other))]
    names = struct.pack("<IQ", 8, 2) + text("a") + text("bc")
    keys = (key("general.architecture", 8, text("llama")), key("names", 9, names), key("n", 4, struct.pack("<I", 7)))
    return file_of(tensors, raw + other + np.float32([1, 2, 3]).tobytes(), keys=keys)


class InFile(InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "model.gguf"

    def written(self, content: bytes) -> Any:
        self.path.write_bytes(content)
        return open_gguf(self.path)

    def one(self, t: BlockType, shape: tuple[int, ...], raw: np.ndarray) -> Any:
        """A tensor of a file that has it alone."""
        return self.written(file_of([info("w", shape, BY_NAME[t.name][0])], raw.tobytes()))["w"]


class TestTypes(InFile):
    """Each type of blocks."""

    @parameterized.expand([(name, *pair) for name, pair in BY_NAME.items()])
    def test_random_blocks(self, _name, number, t):
        for seed, (shape, finite) in enumerate(
            [((3, 512), True), ((256,), True), ((2, 3, 256), True), ((4, 768), False)]
        ):
            raw = random_blocks(t, shape, seed, finite)
            got = self.one(t, shape, raw)
            assert got.quantizer == t.quantizer and got.shape == shape and got.dtype == torch.float32
            assert_bits(got, dequantized(raw, number))

    @parameterized.expand([(name, *BY_NAME[name]) for name in WRITTEN])
    def test_what_gguf_writes(self, name, number, t):
        """Numbers that it quantizes, in a file of its writer beside others."""
        package, rng = gguf(), np.random.default_rng(3)
        writer = package.GGUFWriter(self.path, "llama")
        x = (rng.standard_normal((6, 512)) * np.exp(rng.standard_normal((6, 512)))).astype(np.float32)
        raw = package.quants.quantize(x, package.GGMLQuantizationType(number))
        writer.add_tensor("w", raw, raw_dtype=package.GGMLQuantizationType(number))
        writer.add_tensor("norm", x[0])
        writer.add_uint32("llama.block_count", 5)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        file = open_gguf(self.path)
        assert list(file) == ["w", "norm"] and file.metadata["llama.block_count"] == 5
        assert_bits(file["w"], dequantized(raw, number))
        assert torch.equal(file["norm"], torch.from_numpy(x[0]))
        error = (hop.dequantize(file["w"]) - torch.from_numpy(x)).norm() / torch.from_numpy(x).norm()
        assert error < (1.0 if name.startswith("TQ") else 0.15), error  # what was written is what was read

    def test_every_code_of_a_scale(self):
        """All bytes as the scale of MXFP4 and NVFP4, the last of e8m0 and the sign of e4m3 included."""
        for name, count in (("MXFP4", 1), ("NVFP4", 4)):
            number, t = BY_NAME[name]
            raw = random_blocks(t, (256, t.elements), 5).reshape(256, -1)
            raw[:, :count] = np.arange(256)[:, None]
            assert_bits(self.one(t, (256, t.elements), raw), dequantized(raw, number))

    @parameterized.expand([(name, *pair) for name, pair in BY_NAME.items()])
    def test_bytes(self, name, _number, t):
        """What a block takes here."""
        got = self.one(t, (4, 512), random_blocks(t, (4, 512), 0))
        assert got.nbytes == 2048 // t.elements * BYTES.get(name, t.bytes)

    @parameterized.expand(["Q4_0", "Q5_K", "Q6_K"])
    def test_large(self, name):
        """More blocks than are unpacked at once; and none of its floats is made."""
        number, t = BY_NAME[name]
        shape = (4500, 256)
        raw = random_blocks(t, shape, 4)
        made: list[Any] = []

        class Watching(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                made.extend(x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, torch.Tensor))
                return out

        file = self.written(file_of([info("w", shape, number)], raw.tobytes()))
        with Watching():
            got = file["w"]
        plain = [x for x in made if type(x) is torch.Tensor]
        assert len(plain) > 10 and all(x.numel() <= 4500 * 256 // 32 for x in plain if x.is_floating_point())
        assert_bits(got, dequantized(raw, number))

    @pytest.mark.full
    @unittest.skipUnless(sys.platform == "linux", "/proc says how much memory a process took")
    def test_memory(self):
        """Of a file whose tensors are read one after the other, one tensor is in memory, and not the file."""
        number, t = BY_NAME["Q8_0"]
        size = 4096 * 4096 // t.elements * t.bytes  # 17.8 MB
        tensors = [info(f"w{i}", (4096, 4096), number, i * size) for i in range(8)]
        head = file_of(tensors)
        with open(self.path, "wb") as file:
            file.write(head)
            file.truncate(len(head) + 8 * size)
        code = (  # the peak of the process's own memory; getrusage has that of its parent too
            "import re, sys, hop.interchange; "
            "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1]); "
            "file = hop.interchange.open_gguf(sys.argv[1]); file['w0']; before = peak(); "
            "rows = sum(len(file[name]) for name in file); print(rows, peak() - before)"
        )
        out = subprocess.run([sys.executable, "-c", code, self.path], capture_output=True, text=True, check=True).stdout
        rows, grown = map(int, out.split())
        assert rows == 8 * 4096 and grown * 1024 < 3 * size, f"{grown / 1024:.0f} MB more than after one of eight"

    def test_empty(self):
        for number, t in TYPES.items():
            file = self.written(file_of([info("w", (0, 256), number)]))
            assert file["w"].shape == (0, 256) and hop.dequantize(file["w"]).shape == (0, 256), t.name

    def test_products(self):
        """A weight of each type beside floats and as a table of rows, as its dequantized numbers give it."""
        x, rows = torch.randn(3, 512), torch.tensor([2, 0, 2])
        for t in TYPES.values():
            raw = random_blocks(t, (4, 512), 6)
            for at in HALVES[t.name]:  # of moderate size
                raw.reshape(-1, t.bytes)[:, at : at + 2] = np.float16([0.01]).view(np.uint8)
            if t.name == "MXFP4":
                raw.reshape(-1, t.bytes)[:, 0] = 120
            w = self.one(t, (4, 512), raw)
            numbers = hop.dequantize(w)
            y = hop.scaled(torch.ops.aten.linear.default, torch.float32, x, w)
            bound = 512 * 2.0**-23 * float((x.abs() @ numbers.abs().t()).max())
            assert (y.double() - x.double() @ numbers.double().t()).abs().max() <= bound, t.name
            got = hop.scaled(torch.ops.aten.embedding.default, torch.float32, w, rows)
            assert torch.equal(got, numbers[rows]), t.name


class TestPlain(InFile):
    @parameterized.expand([(str(dtype).removeprefix("torch."), number, dtype) for number, dtype in PLAIN.items()])
    def test_plain(self, _name, number, dtype):
        """Tensors that are not quantized, where their bytes are aligned and where they are not."""
        x = torch.arange(-6, 6).to(dtype).reshape(2, 2, 3)
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        for alignment, offset in ((32, 32), (1, 5)):
            data = bytes(offset) + raw
            keys = (key("general.alignment", 4, struct.pack("<I", alignment)),)
            tensors = [info("w", (2, 2, 3), number, offset)]
            file = self.written(file_of(tensors, data, keys=keys, alignment=alignment))
            assert file["w"].dtype == dtype and torch.equal(file["w"], x)
            file["w"].zero_()  # in private memory
            assert self.path.read_bytes().endswith(raw)

    def test_metadata(self):
        kinds = {0: ("B", 200), 1: ("b", -3), 2: ("H", 50000), 3: ("h", -300), 4: ("I", 2**31), 5: ("i", -5)}
        kinds |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**62)), 12: ("d", 0.1)}
        keys = [key(f"k{n}", n, struct.pack(f"<{code}", value)) for n, (code, value) in kinds.items()]
        lists = {n: struct.pack(f"<IQ2{code}", n, 2, value, value) for n, (code, value) in kinds.items()}
        keys += [key(f"l{n}", 9, value) for n, value in lists.items()]
        keys.append(key("nested", 9, struct.pack("<IQ", 9, 2) + lists[5] + struct.pack("<IQ", 8, 1) + text("ü")))
        got = self.written(file_of([], keys=tuple(keys))).metadata
        assert [got[f"k{n}"] for n in kinds] == [value for _, value in kinds.values()]
        assert [got[f"l{n}"] for n in kinds] == [[value] * 2 for _, value in kinds.values()]
        assert got["nested"] == [[-5, -5], ["ü"]]

    def test_pairs(self):
        self.path.write_bytes(small())
        file = open_gguf(self.path)
        assert [name for name, _ in load_gguf(self.path)] == list(file) == ["blk.0.w", "b", "n"]
        assert file.metadata == {"general.architecture": "llama", "names": ["a", "bc"], "n": 7}
        assert "3 tensors" in repr(file) and len(file) == 3 and "c" not in file


Q = 12  # the number of Q4_K
DATA = bytes(288)
WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it has 0 bytes"),
    "another": (lambda: b"PK\x03\x04" + bytes(99), "does not begin with GGUF"),
    "big_endian": (lambda: file_of([], start=b"GGUF\x00\x00\x00\x03"), "is of version 0x3000000"),
    "version_1": (lambda: file_of([], start=b"GGUF\x01\x00\x00\x00"), "is of version 0x1"),
    "tensors_10_9": (lambda: file_of([info("w", (256,), Q)], DATA, counts=(10**9, 0)), "counts 1000000000 items"),
    "keys_2_64": (lambda: file_of([], counts=(0, 2**64 - 1)), "counts 18446744073709551615 items"),
    "name_beyond": (lambda: file_of([struct.pack("<Q", 2**40)], bytes(64), counts=(1, 0)), "tensor 0: needs"),
    "name_no_text": (lambda: file_of([info(b"\xff\xfe", (256,), Q)], DATA), "tensor 0: has a text that is not UTF-8"),
    "beyond": (lambda: file_of([info("blk.7.w", (10**6, 256), Q)], DATA), "tensor 'blk.7.w': of sizes (1000000, 256)"),
    "offset_beyond": (lambda: file_of([info("w", (256,), Q, 320)], DATA),
        "tensor 'w': of sizes (256,) and type Q4_K is at bytes"),
    "offset_2_64": (lambda: file_of([info("w", (256,), Q, 2**64 - 32)], DATA), "tensor 'w': of sizes"),
    "offset_odd": (lambda: file_of([info("w", (256,), Q, 8)], DATA), "tensor 'w': begins at 8"),
    "sizes_2_64": (lambda: file_of([info("w", (2**40, 2**40), Q)], DATA), "tensor 'w': has sizes"),
    "sizes_wrap": (lambda: file_of([info("w", (2**32, 2**32, 256), Q)], DATA), "tensor 'w': has sizes"),
    "dimensions": (lambda: file_of([info("w", (1,) * 5, 0)], DATA), "tensor 'w': has 5 dimensions"),
    "dimensions_2_32": (lambda: file_of([text("w") + struct.pack("<I", 2**32 - 1)], DATA, counts=(1, 0)),
        "tensor 'w': has 4294967295 dimensions"),
    "ragged": (lambda: file_of([info("w", (2, 100), Q)], DATA), "tensor 'w': of type Q4_K has sizes (2, 100)"),
    "number": (lambda: file_of([info("w", (), Q)], DATA), "tensor 'w': of type Q4_K has sizes ()"),
    "twice": (lambda: file_of([info("w", (256,), Q)] * 2, DATA), "tensor 'w': is there twice"),
    "shared": (lambda: file_of([info("a", (2, 256), Q), info("b", (256,), Q, 32)], DATA, alignment=32),
        "tensor 'b': begins at byte"),
    "long_name": (lambda: file_of([info("x" * 10**5, (256,), 77)], DATA), "tensor 'xxx"),
    "key_twice": (lambda: file_of([], keys=(key("k", 0, b"1"),) * 2), "key 'k' of the metadata: is there twice"),
    "key_type": (lambda: file_of([], keys=(key("k", 99, b"1"),)), "key 'k' of the metadata: has a value of type 99"),
    "key_deep": (lambda: file_of([], keys=(key("k", 9, struct.pack("<IQ", 9, 1) * 50),)),
        "key 'k' of the metadata: has a value of type 9, 4 arrays deep"),
    "list_beyond": (lambda: file_of([], keys=(key("k", 9, struct.pack("<IQ", 12, 2**60)),)),
        "key 'k' of the metadata: counts 1152921504606846976 items of 8 bytes"),
    "alignment": (lambda: file_of([], keys=(key("general.alignment", 4, struct.pack("<I", 24)),)),
        "key 'general.alignment' of the metadata: must be a power of two"),
    "unknown_type": (lambda: file_of([info("blk.1.w", (256,), 77)], DATA), "tensor 'blk.1.w' is of type number 77"),
    "other_type": (lambda: file_of([info("blk.1.w", (256,), 16)], DATA), "tensor 'blk.1.w' is of type IQ2_XXS"),
}  # fmt: skip


class TestSplit(InFolder):
    """Models in several files, as llama.cpp's gguf-split and the package gguf write them."""

    def setUp(self):
        super().setUp()
        self.tensors = {f"blk.{i}.w": np.random.default_rng(i).random((i + 1, 32), np.float32) for i in range(7)}
        writer = gguf().GGUFWriter(self.folder / "model.gguf", "llama", split_max_tensors=3)
        writer.add_block_count(7)
        for name, array in self.tensors.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.files = sorted(self.folder.glob("*.gguf"))
        assert [file.name for file in self.files] == [f"model-{i:05}-of-00003.gguf" for i in (1, 2, 3)]

    def fails(self, message: str, path: Any = None) -> None:
        with self.assertRaises(ValueError) as caught:
            open_gguf(path or self.files[0])
        assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception

    def test_all_are_read(self):
        file = open_gguf(self.files[0])
        assert list(file) == list(self.tensors)
        for name, tensor in load_gguf(self.files[0]):
            assert np.array_equal(tensor.numpy(), self.tensors[name]) and file.shape(name) == tensor.shape
        assert file.metadata == {"general.architecture": "llama", "llama.block_count": 7}
        save_gguf(self.folder / "whole.gguf", file, file.metadata, like=file)
        whole = open_gguf(self.folder / "whole.gguf")
        assert list(whole) == list(self.tensors) and whole.metadata == file.metadata

    def test_written_again(self):
        """Files by size, which both readers and the package gguf put together; the first has the metadata."""
        file = open_gguf(self.files[0])
        metadata = file.metadata | {"general.alignment": 64}
        out = self.folder / "new"
        out.mkdir()
        paths = save_gguf(out / "new.gguf", file, metadata, like=file, shard_size=1024)
        assert [path.name for path in paths] == [f"new-{i:05}-of-00005.gguf" for i in range(1, 6)]
        assert sorted(out.iterdir()) == paths
        again = open_gguf(paths[0])
        assert list(again) == list(file) and again.metadata == metadata
        assert all(torch.equal(again[name], file[name]) for name in file)
        read: dict[str, Any] = {}
        for i, path in enumerate(paths):
            reader = gguf().GGUFReader(path)
            assert reader.alignment == 64 and path.stat().st_size % 64 == 0
            for name, want, kind in (("no", i, 2), ("count", 5, 2), ("tensors.count", 7, 5)):
                field = reader.fields[f"split.{name}"]
                assert field.contents() == want and int(field.types[0]) == kind
            assert sum(int(t.n_bytes) for t in reader.tensors) <= 1024
            read |= {t.name: np.array(t.data) for t in reader.tensors}
        assert all(np.array_equal(read[name], self.tensors[name]) for name in self.tensors)
        (whole,) = save_gguf(out / "whole.gguf", file, metadata, shard_size=2**20)
        assert whole.name == "whole.gguf" and open_gguf(whole).metadata == metadata
        paths = save_gguf(out / "each.gguf", file, shard_size=1)
        assert len(paths) == 7 and list(open_gguf(paths[0])) == list(file)

    def test_sizes_and_keys_of_shards(self):
        file = open_gguf(self.files[0])
        for size, error, message in (
            ("2GB", TypeError, "shard_size must be an int or None, got '2GB'"),
            (0, ValueError, "shard_size must be above 0, got 0"),
        ):
            with self.assertRaisesRegex(error, message):
                save_gguf(self.folder / "new.gguf", file, shard_size=size)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, r"metadata\['split.no'\] describes other files than shard_size"):
            save_gguf(self.folder / "new.gguf", file, {"split.no": 0}, shard_size=1)
        with self.assertRaisesRegex(ValueError, "shard_size=1 needs 70000 files, and a model has at most 65535"):
            save_gguf(self.folder / "new.gguf", {str(i): torch.zeros(1) for i in range(70_000)}, shard_size=1)
        assert sorted(self.folder.glob("*.gguf")) == self.files

    def test_missing(self):
        self.fails("is file 2 of 3 of a model; open the first, 'model-00001-of-00003.gguf'", self.files[1])
        self.files[2].rename(self.folder / "away")
        self.fails("'model-00003-of-00003.gguf' is missing; download it")
        self.files[2].write_bytes((self.folder / "away").read_bytes()[:100])
        self.fails("model-00003-of-00003.gguf")

    def test_others(self):
        """Files that are not what their names say."""
        second = self.files[1].read_bytes()
        self.files[1].write_bytes(self.files[2].read_bytes())
        self.fails("split.no and split.count are (2, 3), not (1, 3)")
        self.files[1].write_bytes(second.replace(b"blk.3.w", b"blk.0.w"))
        self.fails("tensor 'blk.0.w' is in 'model-00001-of-00003.gguf' too")
        alone = self.folder / "model.gguf"
        alone.write_bytes(self.files[0].read_bytes())
        self.fails("must be called NAME-00001-of-00003.gguf", alone)
        keys = [key("split.no", 2, b"\0\0"), key("split.count", 2, b"\2\0")]
        for name, tensors in (("a-00001-of-00002.gguf", 3), ("a-00002-of-00002.gguf", 3)):
            keys[0] = key("split.no", 2, bytes([int(name[6]) - 1, 0]))
            (self.folder / name).write_bytes(
                file_of([], keys=(*keys, key("split.tensors.count", 5, bytes([tensors, 0, 0, 0]))))
            )
        self.fails("split.tensors.count is 3, and the 2 files have 0 tensors", self.folder / "a-00001-of-00002.gguf")
        for number, count in ((2, 2), (70000, 70001), (0, 70000)):
            split = (key("split.no", 4, struct.pack("<I", number)), key("split.count", 4, struct.pack("<I", count)))
            alone.write_bytes(file_of([], keys=split))
            self.fails(f"split.no is {number} and split.count {count}", alone)
        alone.write_bytes(file_of([], keys=(key("split.no", 2, b"\0\0"), key("split.count", 2, b"\1\0"))))
        assert not open_gguf(alone)


class TestDamaged(InFile):
    def read(self, content: bytes) -> int:
        """How many tensors a file has, each of which is read; at most as much memory is taken as the file justifies."""
        self.path.write_bytes(content)
        tracemalloc.start()
        try:
            found = dict(load_gguf(self.path))
            return len(found)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1_000_000 + 200 * len(content), peak

    @parameterized.expand([(name, *row) for name, row in WRONG.items()])
    def test_wrong(self, _name, made, message):
        with self.assertRaises(ValueError) as caught:
            self.read(made())
        assert message in str(caught.exception) and str(self.path) in str(caught.exception), caught.exception
        assert len(str(caught.exception)) < len(str(self.path)) + 600, len(str(caught.exception))

    def test_many_of_one(self):
        """2,000 tensors, each of which would be the whole of the file's data, a megabyte."""
        with self.assertRaisesRegex(ValueError, "within tensor"):
            self.read(file_of([info(f"t{i}", (2**20,), 24) for i in range(2000)], bytes(2**20)))

    def test_cut_off(self):
        """At every byte."""
        content = small()
        assert self.read(content) == 3
        for size in range(len(content)):
            with self.assertRaises(ValueError):
                self.read(content[:size])

    def test_no_file(self):
        with self.assertRaisesRegex(FileNotFoundError, "path must be an existing file"):
            open_gguf(self.folder / "none.gguf")
        with self.assertRaisesRegex(TypeError, "path must be text or a Path, got 3"):
            open_gguf(3)
