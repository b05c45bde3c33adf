"""Small .tflite and .tosa files of which one table or text is in many places: each is refused, or costs what it has."""

import resource
import time
import tracemalloc
import unittest
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

flatbuffers: Any = pytest.importorskip("flatbuffers", reason="LiteRT is missing")
S: Any = pytest.importorskip("ai_edge_litert.schema_py_generated", reason="LiteRT is missing")

import hop  # noqa: E402  it needs LiteRT
from hop.export.targets.tflite.reading import read_graph  # noqa: E402
from hop.export.targets.tosa.file import File, decode  # noqa: E402

Offset = int


class Builder:
    """A file, table by table."""

    def __init__(self) -> None:
        self.b: Any = flatbuffers.Builder(1 << 16)

    def table(self, kind: str, **fields: Any) -> Offset:
        """A table; a field is an offset, or a number of the kind that the schema says."""
        getattr(S, f"{kind}Start")(self.b)
        for name, value in fields.items():
            getattr(S, f"{kind}Add{name}")(self.b, value)
        return getattr(S, f"{kind}End")(self.b)

    def text(self, length: int, letter: str = "x") -> Offset:
        return self.b.CreateString(letter * length)

    def offsets(self, *items: Offset) -> Offset:
        self.b.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.b.PrependUOffsetTRelative(item)
        return self.b.EndVector()

    def numbers(self, *items: int) -> Offset:
        return self.b.CreateNumpyVector(np.array(items, np.int32))

    def finish(self, *, codes: tuple[Offset, ...] = (), signatures: tuple[Offset, ...] = (), **graph: Offset) -> bytes:
        fields = {
            "Subgraphs": self.offsets(self.table("SubGraph", **graph)),
            "Buffers": self.offsets(self.table("Buffer")),
        }
        fields |= {"OperatorCodes": self.offsets(*codes)} if codes else {}
        fields |= {"SignatureDefs": self.offsets(*signatures)} if signatures else {}
        self.b.Finish(self.table("Model", Version=3, **fields), file_identifier=b"TFL3")
        return bytes(self.b.Output())


def names(count: int, length: int) -> bytes:
    """Tensors that are one."""
    f = Builder()
    tensor = f.table("Tensor", Name=f.text(length))
    return f.finish(Tensors=f.offsets(*[tensor] * count))


def codes(count: int, length: int) -> bytes:
    """Codes of custom operators that are one, and operators of them."""
    f = Builder()
    code = f.table("OperatorCode", CustomCode=f.text(length), BuiltinCode=S.BuiltinOperator.CUSTOM)
    operator = f.table("Operator")
    return f.finish(codes=(code,) * count, Operators=f.offsets(*[operator] * count))


def one_code(count: int, length: int) -> bytes:
    """Operators of one code with a long name."""
    f = Builder()
    code = f.table("OperatorCode", CustomCode=f.text(length), BuiltinCode=S.BuiltinOperator.CUSTOM)
    operator = f.table("Operator")
    return f.finish(codes=(code,), Operators=f.offsets(*[operator] * count))


def signatures(count: int, length: int) -> bytes:
    """A signature whose inputs are one."""
    f = Builder()
    entry = f.table("TensorMap", Name=f.text(length), TensorIndex=0)
    tensors, entries = f.offsets(f.table("Tensor", Name=f.text(1))), f.offsets(*[entry] * count)
    return f.finish(signatures=(f.table("SignatureDef", Inputs=entries),), Tensors=tensors, Inputs=f.numbers(0))


def shapes(count: int, length: int) -> bytes:
    """Tensors that share a long shape."""
    f = Builder()
    tensor = f.table("Tensor", Shape=f.numbers(*[1] * length))
    return f.finish(Tensors=f.offsets(*[tensor] * count))


def sizes(count: int, length: int) -> bytes:
    """One tensor, of so many large sizes that their product takes minutes."""
    f = Builder()
    return f.finish(Tensors=f.offsets(f.table("Tensor", Shape=f.numbers(*[2**31 - 1] * count * length))))


def ends(count: int, length: int) -> bytes:
    """As many inputs as a signature names, in the other order."""
    f = Builder()
    tensors = [f.table("Tensor", Name=f.b.CreateString(f"{i}")) for i in range(count)]
    entries = [f.table("TensorMap", Name=f.b.CreateString(f"s{i}"), TensorIndex=i) for i in range(count)]
    signature = f.table("SignatureDef", Inputs=f.offsets(*reversed(entries)))
    return f.finish(signatures=(signature,), Tensors=f.offsets(*tensors), Inputs=f.numbers(*range(count)))


class TestHostile(unittest.TestCase):
    def read(self, data: bytes) -> Any:
        """The error of a file, or None; time and memory are those of its size."""
        start = time.process_time()
        tracemalloc.start()
        try:
            read_graph("from_tflite", data)
            error = None
        except (ValueError, NotImplementedError) as raised:
            error = raised
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 2_000_000 + 300 * len(data), (peak, len(data))
        assert time.process_time() - start < 2 + 2e-5 * len(data)
        return error

    @parameterized.expand(
        [
            ("names", names, 20_000, 100_000, "which the file refers to more often than its size allows"),
            ("codes", codes, 20_000, 100_000, "which the file refers to more often than its size allows"),
            ("one code", one_code, 2_000, 300_000, None),
            ("signatures", signatures, 20_000, 100_000, "which the file refers to more often than its size allows"),
            ("shapes", shapes, 10_000, 60, "more than"),
            ("sizes", sizes, 1000, 400, "tensor 0 '' has 400000 dimensions; at most 64 are supported"),
            ("ends", ends, 1_500, 0, None),
            ("tensors", names, 2**17 + 1, 0, "the graph has 131073 tensors; up to 131072 are supported"),
        ]
    )
    @pytest.mark.quick(2)
    def test_reading(self, _name, make, count, length, message):
        error = self.read(make(count, length))
        if message is None:
            assert error is None, error
        else:
            assert message in str(error) and len(str(error)) < 400, error

    def test_long_names_in_errors(self):
        f = Builder()
        tensor = f.table("Tensor", Name=f.text(10**6), Shape=f.numbers(-1))
        error = self.read(f.finish(Tensors=f.offsets(tensor)))
        assert "has shape (-1,)" in str(error) and len(str(error)) < 400

    def test_inputs(self):
        """Together no larger than one may be: an export holds them all."""
        f = Builder()
        shape, zero = f.numbers(2**20), f.table("QuantizationParameters")
        tensors = [
            f.table("Tensor", Name=f.b.CreateString(f"x{i}"), Shape=shape, Quantization=zero) for i in range(100)
        ]
        data = f.finish(Tensors=f.offsets(*tensors), Inputs=f.numbers(*range(100)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(
            NotImplementedError,
            match=r"'x64' has the shape \(1048576,\); all inputs together may have up to 67108864 elements",
        ):
            hop.export.from_tflite(data)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.skipif(find_spec("executorch") is None, reason="needs ExecuTorch, which has flatc")
class TestTosa(unittest.TestCase):
    @pytest.mark.full
    def test_tables_in_many_places(self) -> None:
        """100 regions that are one, of 100 blocks that are one, of 100 tensors that are one, with a name of
        1,000 letters: a gigabyte of JSON, of a file of 2 KB. A file of data alone is read."""
        b: Any = flatbuffers.Builder(1 << 12)
        inner = b.CreateString("x" * 1000)
        for fields, slot in ((6, 0), (6, 2), (2, 1)):  # of a tensor, a block, a region: its name, or its tables
            b.StartObject(fields)
            b.PrependUOffsetTRelativeSlot(slot, inner, 0)
            table = b.EndObject()
            b.StartVector(4, 100, 4)
            for _ in range(100):
                b.PrependUOffsetTRelative(table)
            inner = b.EndVector()
        b.StartObject(4)
        b.PrependInt32Slot(0, 1, 0)
        version = b.EndObject()
        b.StartObject(2)
        b.PrependUOffsetTRelativeSlot(0, version, 0)
        b.PrependUOffsetTRelativeSlot(1, inner, 0)
        b.Finish(b.EndObject(), file_identifier=b"TOSA")
        data = bytes(b.Output())
        assert len(data) < 3000
        with pytest.raises(ValueError, match="model is a damaged TOSA file: flatc"):
            decode("test", data, "model")
        file = File()
        codes = torch.randint(-128, 128, (1024, 256), dtype=torch.int8)
        file.tensor("codes", codes.shape, data=codes)
        found = decode("test", file.finish({}, {"codes": "codes"}), "model")
        (tensor,) = found["regions"][0]["blocks"][0]["tensors"]
        assert torch.equal(torch.tensor(tensor["data"], dtype=torch.uint8).view(torch.int8), codes.flatten())
