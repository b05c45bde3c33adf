"""Golden vectors: what a folder says, recomputed from its own numbers in numpy's and Python's integers; its readers;
and folders that are damaged."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
import unittest
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE
from tests.cli.test_cli import run
from tests.support.tflite_models import Head, Layer, MaximumPool, Network, Point, both

FILES = Path(hop.__file__).parent / "export" / "golden" / "files"
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def reader() -> Any:
    """The reader that lies in every folder."""
    spec = importlib.util.spec_from_file_location("hop_vectors", FILES / "hop_vectors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hop_vectors"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def network() -> tuple[Any, Tensor]:
    """An integer program with strided, padded and depthwise convolutions, and its input."""
    torch.manual_seed(5)
    model = Network(
        Layer(3, 8, stride=2), Layer(8, 8, groups=8, high=0.0), MaximumPool(2, 2), Head(8, per_channel=False)
    )
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        model(x)
    return hop.export.to_integer(torch.export.export(model, (x,)), target=TFLITE).program, x


def convolved(x: Any, w: Any, stride: Any, padding: Any, groups: int) -> Any:
    """Sums of products, in int64."""
    x = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, :: stride[0], :: stride[1]]
    parts = [
        np.einsum("nchwij,ocij->nohw", a, b)
        for a, b in zip(np.split(windows, groups, 1), np.split(w, groups, 0), strict=True)
    ]
    return np.concatenate(parts, 1)


def divided(n: int, bits: int) -> int:
    """n / 2^bits to the nearest, ties away from zero."""
    whole, rest = divmod(abs(n), 2**bits)
    return (whole + (2 * rest >= 2**bits)) * (1 if n >= 0 else -1)


def requantized(n: int, multiplier: int, shift: int, rounding: str) -> int:
    if rounding == "tflite":
        return (n * multiplier + (1 << (30 - shift))) >> (31 - shift)
    assert rounding == "gemmlowp"
    return divided((n * 2 ** max(shift, 0) * multiplier + 2**30) >> 31, max(-shift, 0))


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = Path(held.name)


class TestNumbers(Folder):
    @pytest.mark.full
    def test_network(self) -> None:
        """Sums are those of the codes; codes are those that fixed point makes of the sums."""
        program, x = network()
        out = self.folder / "out"
        names = hop.export.vectors(program, out, (x,))
        nodes = reader().read(out)
        self.assertEqual([n.name for n in nodes], names)
        self.assertEqual((out / "nodes.txt").read_text().split(), [n.about["file"] for n in nodes])
        products = 0
        for node in nodes:
            a = node.arrays
            if node.operator.endswith(("conv2d.default", "linear.default")):
                codes, w = (a[n].astype(np.int64) - a[f"{n}.zero_point"] for n in ("input", "weight"))
                if "conv2d" in node.operator:
                    sums = convolved(codes, w, a["stride"], a["padding"], int(a["groups"]))
                else:
                    sums = codes @ w.T
                units = a["input.scale"].reshape(-1).astype(np.float64) * a["weight.scale"].reshape(-1)
                steps = np.round(a["bias"] / units).astype(np.int64)
                np.testing.assert_array_equal(steps, a["bias.steps"].reshape(-1))
                np.testing.assert_array_equal(sums + a["bias.steps"], a["sums"])
                rounding = "gemmlowp" if 'rounding="gemmlowp"' in node.about["convention"] else "tflite"
                own = np.broadcast_arrays(a["sums"], a["multiplier"], a["shift"])
                flat = [requantized(*map(int, v), rounding) for v in zip(*(v.reshape(-1) for v in own), strict=True)]
                low, high = map(int, a["output.range"])
                zero = int(a["output.zero_point"].reshape(()))
                found = np.clip(np.array(flat) + zero, low, high).reshape(a["output"].shape)
                np.testing.assert_array_equal(found, a["output"])
                products += 1
        self.assertEqual(products, 3)
        relu6, relu = (n.arrays["output.range"].tolist() for n in nodes if n.operator.endswith("conv2d.default"))
        self.assertTrue(relu6[0] == relu[0] == -128 and relu6[1] <= 127 == relu[1])

    @pytest.mark.full
    def test_from(self) -> None:
        """What is said to come from a node is what that node gave."""
        program, x = network()
        hop.export.vectors(program, self.folder, {"input": x})
        nodes = {n.name: n for n in reader().read(self.folder)}
        links = 0
        for node in nodes.values():
            for name, argument in node.about["arguments"].items():
                if isinstance(argument, dict) and argument["from"] in nodes:
                    np.testing.assert_array_equal(node.arrays[name], nodes[argument["from"]].arrays["output"])
                    links += 1
        self.assertGreaterEqual(links, 7)
        listed = json.loads((self.folder / "vectors.json").read_text())
        (output,) = listed["outputs"]
        np.testing.assert_array_equal(nodes[output].arrays["output"], program.module()(x).numpy())
        np.testing.assert_array_equal(nodes["hop_quantize_buffers"].arrays["input"], x.numpy())

    @pytest.mark.full
    def test_two_operands(self) -> None:
        """Concatenations and products of tensors: an argument that is a list, and sums without a bias."""

        class Pair(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                x, y = both(x, 0.05, 3), both(y, 0.02, -7)
                return both(torch.cat([both(x * y, 0.01, 2), y], 1), 0.03, 1)

        given = torch.randn(3, 5), torch.randn(3, 5)
        program = hop.export.to_integer(torch.export.export(Pair(), given), target=TFLITE).program
        hop.export.vectors(program, self.folder, given)
        *_, product, joined = [n for n in reader().read(self.folder) if "hop_scaled" in n.operator]
        a = product.arrays
        wanted = (a["self"].astype(np.int32) - 3) * (a["other"].astype(np.int32) + 7)
        np.testing.assert_array_equal(a["sums"], wanted)
        self.assertEqual(product.about["sums"], {"count": 1, "has_bias": False})
        self.assertEqual(joined.arrays["tensors.0"].shape, (3, 5))
        np.testing.assert_array_equal(joined.arrays["tensors.0"], a["output"])
        self.assertEqual(joined.arrays["dim"], 1)
        self.assertNotIn("sums", joined.arrays)

    def test_groups_and_bfloat16(self) -> None:
        """Scales that change along the sum give a sum for each group; bfloat16 is stored as float32."""
        q = hop.Quantizer(hop.formats.INT8, (1, 8), hop.scale_rules.Amax())
        weight = nn.Parameter(hop.quantize(q, torch.randn(4, 24)), requires_grad=False)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = weight

            def forward(self, x: Tensor) -> Tensor:
                codes = hop.quantize(hop.presets.INT8_ROW, x)
                return hop.scaled(torch.ops.aten.linear.default, torch.bfloat16, codes, self.weight)

        x = torch.randn(3, 24)
        hop.export.vectors(torch.export.export(Net(), (x,)), self.folder, (x,))
        (node,) = [n for n in reader().read(self.folder) if n.operator.endswith("linear.default")]
        a = node.arrays
        self.assertEqual(node.about["sums"], {"count": 3, "has_bias": False})
        y = np.zeros((3, 4), np.float32)
        for g in range(3):
            part = slice(8 * g, 8 * g + 8)
            sums = a["input"][:, part].astype(np.int32) @ a["weight"][:, part].astype(np.int32).T
            np.testing.assert_array_equal(sums, a[f"sums.{g}"])
            y = y + (sums.astype(np.float32) * a["input.scale"]) * a["weight.scale"][:, g]
        self.assertEqual((node.about["arrays"]["output"]["dtype"], a["output"].dtype), ("bfloat16", np.float32))
        np.testing.assert_array_equal(torch.from_numpy(y).bfloat16().float().numpy(), a["output"])

    def test_floats_of_8_bits(self) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return hop.dequantize(hop.quantize(hop.presets.MXFP8, x)).half()

        x = torch.randn(2, 64)
        hop.export.vectors(torch.export.export(Net(), (x,)), self.folder, (x,))
        first, *_, last = reader().read(self.folder)
        codes = hop.quantize(hop.presets.MXFP8, x).codes
        self.assertEqual(first.about["arrays"]["output"]["dtype"], "float8_e4m3fn")
        np.testing.assert_array_equal(first.arrays["output"], codes.view(torch.uint8).numpy())
        self.assertEqual(last.about["arrays"]["output"]["dtype"], "float16")


class TestReaders(Folder):
    def setUp(self) -> None:
        super().setUp()
        self.out = self.folder / "out"
        x = torch.randn(2, 6)
        model = nn.Sequential(Point(0.03, -5), nn.ReLU(), Point(0.02, -128))
        self.program = hop.export.to_integer(torch.export.export(model, (x,)), target=TFLITE).program
        hop.export.vectors(self.program, self.out, (x,))
        self.nodes = reader().read(self.out)

    @pytest.mark.full
    def test_python_without_torch(self) -> None:
        words = "import sys; sys.modules['torch'] = None; import hop_vectors; print(len(hop_vectors.read('.')))"
        done = subprocess.run([sys.executable, "-c", words], cwd=self.out, capture_output=True, text=True, check=True)
        self.assertEqual(int(done.stdout), len(self.nodes))

    @pytest.mark.full
    def test_damaged_folders(self) -> None:
        path = self.out / "vectors.json"
        text = path.read_text()
        listed = json.loads(text)

        def refused(words: str, **changes: Any) -> None:
            path.write_text(json.dumps({**listed, **changes}))
            with pytest.raises(ValueError, match=words):
                reader().read(self.out)

        refused("version 2; this reader supports version 1", hop_vectors=2)
        node = listed["nodes"][0]
        refused("not a plain file name", nodes=[{**node, "file": "../x.npz"}])
        refused("node 0 is malformed", nodes=[{"name": "x"}])
        refused(
            "output differ", nodes=[{**node, "arrays": {**node["arrays"], "output": {"stored": "int8", "shape": []}}}]
        )
        path.write_text(text[:-5])
        with pytest.raises(ValueError, match="lists no golden vectors"):
            reader().read(self.out)
        path.write_text(text)
        file = self.out / node["file"]
        whole = file.read_bytes()
        data = self.nodes[0].arrays["output"].tobytes()
        at = whole.index(data)
        for wrong in (whole[:-30], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], b""):
            file.write_bytes(wrong)
            with pytest.raises(ValueError, match=f"{file.name} is damaged"):
                reader().read(self.out)
        file.unlink()
        with pytest.raises(FileNotFoundError):
            reader().read(self.out)

    @pytest.mark.full
    def test_large_on_the_word_of_a_file(self) -> None:
        """Nothing is made of compressed, overlapping and lying parts, nor of one file many times."""
        listed = json.loads((self.out / "vectors.json").read_text())
        node = listed["nodes"][0]
        file = self.out / node["file"]
        zeros = io.BytesIO()
        np.save(zeros, np.zeros(2**23, np.int8))

        def header(shape: bytes, dtype: bytes = b"|i1") -> bytes:
            text = zeros.getvalue()[:128].replace(b"(8388608,)", shape).replace(b"|i1", dtype)
            return text.rstrip().ljust(127) + b"\n"

        one, lies, texts = header(b"(1,)") + b"1", header(b"(10000000000000,)"), header(b"(10000000000000,)", b"|S0")
        for name, parts, kind, words in (
            ("bomb", [zeros.getvalue()], zipfile.ZIP_DEFLATED, "it is compressed"),
            ("lzma", [zeros.getvalue()], zipfile.ZIP_LZMA, "it is compressed"),
            ("lies", [lies], zipfile.ZIP_STORED, "of shape"),
            ("texts", [texts], zipfile.ZIP_STORED, "of shape"),
            ("overlap", [one] * 3, zipfile.ZIP_STORED, "its parts overlap"),
        ):
            with zipfile.ZipFile(file, "w", kind) as archive:
                for i, part in enumerate(parts):
                    archive.writestr(f"{i}.npy", part)
                if name == "overlap":
                    first = archive.infolist()[0]
                    for other in archive.infolist():
                        other.compress_size, other.header_offset = first.compress_size + 10**6, first.header_offset
            tracemalloc.start()
            try:
                with pytest.raises(ValueError, match=f"{file.name} is damaged: .*{words}"):
                    reader().read(self.out)
                assert tracemalloc.get_traced_memory()[1] < 10**6, name
            finally:
                tracemalloc.stop()
        path = self.out / "vectors.json"
        path.write_text(json.dumps({**listed, "nodes": [node] * 1000}))
        with pytest.raises(ValueError, match="lists a file twice"):
            reader().read(self.out)
        for text in ("[" * 10**5, '{"hop_vectors": "' + "x" * 10**5 + '", "nodes": []}'):
            path.write_text(text)
            with pytest.raises(ValueError, match=r"vectors\.json") as caught:
                reader().read(self.out)
            assert len(str(caught.value)) < 500 + len(str(path))

    @pytest.mark.compiler
    @pytest.mark.full
    def test_c(self) -> None:
        """C99 without a warning; each array as numpy reads it; damage of every kind, in front of sanitizers."""
        compiler = os.environ.get("CC", "cc")
        program = self.folder / "read_vectors"
        flags = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", *SANITIZE, f"-I{self.out}")
        source = Path(__file__).with_name("read_vectors.c")
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)

        def called(*words: Any) -> tuple[int, str, str]:
            done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, done.stderr

        for node in self.nodes:
            for name, x in node.arrays.items():
                status, text, error = called("show", self.out / node.about["file"], name)
                head, *lines = text.splitlines()
                self.assertEqual((status, error, head.split()), (0, "", [x.dtype.str[1:], *map(str, x.shape)]))
                numbers = list(map(float if x.dtype.kind == "f" else int, lines))
                np.testing.assert_array_equal(np.array(numbers, x.dtype).reshape(x.shape), x)
        file = self.out / self.nodes[-1].about["file"]
        self.assertEqual(called("show", file, "out")[::2], (1, "there is no array of that name\n"))
        self.assertEqual(called("show", self.folder / "none.npz", "output")[0], 1)
        status, text, error = called("damage", file, "output")
        self.assertEqual((status, error), (0, ""))
        self.assertGreater(int(text.split()[0]), 1000)

        odd = self.folder / "odd.npz"
        extreme = np.array([[-(2**63), -1], [2**63 - 1, 0]])
        np.savez(odd, a=extreme, b=np.array([], np.int8), d=np.array([-128, 127], np.int8))
        self.assertEqual(called("show", odd, "a")[1].split()[3:], [str(n) for n in extreme.reshape(-1)])
        self.assertEqual((called("show", odd, "b")[1], called("show", odd, "d")[1]), ("i1 0\n", "i1 2\n-128\n127\n"))
        for words, x in (("C order", np.ones((2, 3), order="F")), ("numbers", np.array(["text"]))):
            np.savez(odd, a=x)
            self.assertIn(words, called("show", odd, "a")[2])
        np.savez_compressed(odd, a=extreme)
        self.assertIn("compressed", called("show", odd, "a")[2])


class TestCalls(Folder):
    def test_wrong_calls(self) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        x = torch.ones(2)
        program: Any = torch.export.export(Net(), (x,))
        with pytest.raises(TypeError, match=r"vectors: program must be a torch.export.ExportedProgram"):
            hop.export.vectors(program.module(), self.folder, (x,))
        with pytest.raises(ValueError, match="must be those of one run, got 2"):
            hop.export.vectors(program, self.folder, [(x,), (x,)])
        with pytest.raises(ValueError, match="takes 1 tensors or numbers, but inputs have 2"):
            hop.export.vectors(program, self.folder / "new", (x, x))
        file = self.folder / "kept"
        file.write_text("")
        for folder in (self.folder, file):
            with pytest.raises(FileExistsError, match="folder must be new or empty"):
                hop.export.vectors(program, folder, (x,))

    @pytest.mark.full
    def test_command(self) -> None:
        program, x = network()
        saved, data, out = (self.folder / name for name in ("model.pt2", "one.npz", "out"))
        torch.export.save(program, saved)
        np.savez(data, input=x.numpy())
        status, text, error = run("vectors", str(saved), str(out), "--data", str(data))
        nodes = reader().read(out)
        self.assertEqual((status, text, error), (0, f"wrote {len(nodes)} nodes to {out}\n", ""))
        np.testing.assert_array_equal(nodes[0].arrays["input"], x.numpy())
        status, _, error = run("vectors", str(saved), str(out))
        self.assertEqual(status, 1)
        self.assertIn("folder must be new or empty", error)
