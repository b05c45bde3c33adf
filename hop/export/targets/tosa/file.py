"""A .tosa file under construction.

The public schema is part of ExecuTorch's wheel, together with flatc, the flatbuffers compiler, which encodes the bytes
and rejects anything that violates the schema.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.integer.model import Names
from hop.numerics.spelling import JsonObject, from_json

DTYPES = {
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT48",  # for sums of 16-bit codes
    torch.bool: "BOOL",
}
_ATTRIBUTES = {  # attribute tables of the schema, by operator
    **{name: f"{name.capitalize()}Attribute" for name in ("ADD", "SUB", "MUL", "CLZ", "TABLE", "CONCAT", "PAD")},
    **{name: f"{name.capitalize()}Attribute" for name in ("RESHAPE", "SLICE", "TRANSPOSE", "RESIZE", "CLAMP")},
    **{name: f"{name.capitalize()}Attribute" for name in ("RESCALE", "CONST", "MAXIMUM", "MINIMUM", "REVERSE")},
    **{name: f"{name.capitalize()}Attribute" for name in ("SELECT", "GREATER")},
    "CONST_SHAPE": "ConstShapeAttribute",
    "CONV2D": "Conv2dAttribute",
    "DEPTHWISE_CONV2D": "DepthwiseConv2dAttribute",
    "TRANSPOSE_CONV2D": "TransposeConv2dAttribute",
    "MATMUL": "MatMulAttribute",
    "AVG_POOL2D": "AvgPool2dAttribute",
    "MAX_POOL2D": "MaxPool2dAttribute",
    "REDUCE_SUM": "ReduceSumAttribute",
    "REDUCE_MAX": "ReduceMaxAttribute",
    "LOGICAL_LEFT_SHIFT": "LogicalLeftShiftAttribute",
    "ARITHMETIC_RIGHT_SHIFT": "ArithmeticRightShiftAttribute",
}
_TEXT = 64  # limit of bytes of JSON per byte of a file; a byte of data takes 21
_VERSION = {"_major": 1, "_minor": 0, "_patch": 0, "_draft": False}


def schema(caller: str) -> tuple[Path, Path]:
    """The paths of flatc and of the schema. Raises ImportError if ExecuTorch is not installed."""
    spec = find_spec("executorch")
    for place in () if spec is None else spec.submodule_search_locations or ():
        paths = Path(place, "data/bin/flatc"), Path(place, "backends/arm/tosa/schemas/tosa_1.0.fbs")
        if all(p.is_file() for p in paths):
            return paths
    raise ImportError(
        f"{caller} needs ExecuTorch, whose wheel has TOSA's schema and flatc: pip install 'torch-hop[executorch]'"
    )


def encode(caller: str, content: Mapping[str, object]) -> bytes:
    """Encode a file from `content`, structured as in the schema."""
    flatc, its = schema(caller)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.json")
        path.write_text(json.dumps(content), encoding="utf-8")
        _run([flatc, "--binary", "-o", folder, its, path])
        return path.with_suffix(".tosa").read_bytes()


def decode(caller: str, buffer: bytes, what: str) -> JsonObject:
    """Decode a file to a structure as in the schema.

    Raises ValueError if it is not a TOSA file, or if it refers to its tables so often that JSON has more than _TEXT
    bytes per byte of the file.
    """
    flatc, its = schema(caller)
    if buffer[4:8] != b"TOSA":
        raise ValueError(f"{caller}: {what} is not a TOSA file: it lacks the identifier; give one that to_tosa wrote")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tosa")
        path.write_bytes(buffer)
        try:
            command = [flatc, "--json", "--strict-json", "--raw-binary", "-o", folder, its, "--", path]
            _run([*_limits_command(_TEXT * len(buffer) + 2**20), *command])
            return from_json(path.with_suffix(".json").read_bytes(), "what flatc made of it")
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(f"{caller}: {what} is a damaged TOSA file: {error}") from error


def _limits_command(size: int) -> list[str]:
    """A command prefix that limits written files to `size` bytes, and memory to four times that plus a fixed amount."""
    if os.name != "posix":
        return []
    return ["sh", "-c", f'ulimit -f {size // 512 + 1}; ulimit -v {4 * size // 1024 + 2**18}; exec "$0" "$@"']


def _run(command: Sequence[object]) -> None:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"flatc: {(done.stdout + done.stderr).strip() or f'exit status {done.returncode}'}")


class File:
    """Tensors and operators, in the order in which they are added. A tensor is identified by its unique name."""

    def __init__(self) -> None:
        schema("to_tosa")
        self.tensors: list[JsonObject] = []
        self.shapes: list[JsonObject] = []
        self.operators: list[JsonObject] = []
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.names = Names()
        self.known: dict[Any, str] = {}  # names of small constants, by value

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int8,
        quantization: Any = None,
        data: Tensor | None = None,
    ) -> str:
        """Add a tensor and return its name. TOSA has no scales, so `quantization` is ignored."""
        entry: JsonObject = {"name": self.names.free(name), "shape": list(shape), "type": DTYPES[dtype]}
        self.tensors.append(entry)
        self.sizes[entry["name"]], self.dtypes[entry["name"]] = tuple(shape), dtype
        if data is not None:
            entry["data"] = _bytes(data.to(dtype).contiguous().reshape(-1))
            self._add("CONST", [], entry["name"], {})
        return entry["name"]

    def constant(self, values: Sequence[int], dtype: torch.dtype, rank: int = 1) -> str:
        """A constant with values along the last of `rank` dimensions."""
        key = (tuple(values), dtype, rank)
        if key not in self.known:
            name = f"{DTYPES[dtype].lower()}_{values[0]}" if len(values) == 1 else f"{DTYPES[dtype].lower()}s"
            shape = (*[1] * (rank - 1), len(values))
            self.known[key] = self.tensor(name, shape, dtype, data=torch.tensor(list(values), dtype=torch.int64))
        return self.known[key]

    def shape(self, values: Sequence[int]) -> str:
        """A constant of sizes, positions or paddings."""
        key = (tuple(values), "shape")
        if key not in self.known:
            name = self.names.free("shape_" + "_".join(map(str, values)))
            data = _bytes(torch.tensor(list(values), dtype=torch.int64), whole=True)
            self.shapes.append({"name": name, "rank": len(values), "data": data})
            self._add("CONST_SHAPE", [], name, {})
            self.known[key] = name
        return self.known[key]

    def name(self, tensor: str) -> str:
        return tensor

    def operator(self, op: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        """Add an operator by its name in the schema; returns `output`."""
        return self._add(op, inputs, output, attributes)

    def made(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int32,
        **attributes: object,
    ) -> str:
        """Add an operator with a new output tensor."""
        return self._add(op, inputs, self.tensor(name, shape, dtype), attributes)

    def renamed(self, tensor: str, name: str) -> str:
        """Rename the output of the last operator if nothing reads it yet."""
        entry, last = self.tensors[-1], self.operators[-1]
        if entry["name"] != tensor or last["outputs"] != [tensor]:
            return tensor
        name = self.names.free(name)
        entry["name"], last["outputs"] = name, [name]
        self.names.discard(tensor)
        self.sizes[name], self.dtypes[name] = self.sizes.pop(tensor), self.dtypes.pop(tensor)
        return name

    def transposed(self, tensor: str, by: Sequence[int], output: str) -> str:
        return self.operator("TRANSPOSE", [tensor], output, perms=list(by))

    def finish(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> bytes:
        """The file's bytes, given the inputs and outputs of the graph."""
        block = {
            "name": "main",
            "operators": self.operators,
            "tensors": self.tensors,
            "shapes": self.shapes,
            "inputs": list(inputs.values()),
            "outputs": list(outputs.values()),
        }
        return encode("to_tosa", {"version": _VERSION, "regions": [{"name": "main", "blocks": [block]}]})

    def _add(self, op: str, inputs: Sequence[str], output: str, attributes: Mapping[str, object]) -> str:
        self.operators.append(
            {
                "op": op,
                "attribute_type": _ATTRIBUTES[op],
                "attribute": dict(attributes),
                "inputs": list(inputs),
                "outputs": [output],
            }
        )
        return output


def _bytes(x: Tensor, whole: bool = False) -> list[int]:
    """The bytes of values; the lower six of int64 unless `whole`, which shapes need."""
    plain = x.contiguous().view(torch.uint8)
    if x.dtype == torch.int64 and not whole:
        plain = plain.reshape(-1, 8)[:, :6].reshape(-1)
    return plain.tolist()


def packed(x: int, dtype: torch.dtype) -> list[int]:
    """A number as the schema's attributes store it."""
    return _bytes(torch.tensor([x], dtype=dtype))
