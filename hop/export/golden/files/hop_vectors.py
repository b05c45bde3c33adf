"""Read golden vectors in Python, from this file's folder or another one. Needs only numpy.

import hop_vectors

for node in hop_vectors.read("."):
    print(node.name, node.operator, node.arrays["output"].shape)
"""

import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
_LONGEST = 200  # characters of a value in a message


Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
_Types = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


@dataclass(frozen=True)
class Node:
    """A call of the program.

    Attributes:
        name: its name in the program.
        operator: the operator that it calls, such as "aten.conv2d.default".
        about: its entry in vectors.json: arguments, convention and arrays.
        arrays: numpy arrays by name, such as "input", "weight.scale", "sums" and "output".
    """

    name: str
    operator: str
    about: dict[str, Any]
    arrays: dict[str, Array]


def read(folder: str | Path) -> list[Node]:
    """Read the nodes of a folder, in the order in which the program runs them.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged or has another version; the message names the file.
    """
    path = Path(folder) / "vectors.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, nodes = index["hop_vectors"], list(index["nodes"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} lists no golden vectors: {_brief(error)}") from error
    if version != FORMAT:
        raise ValueError(f"{path} has version {_brief(version)}; this reader supports version {FORMAT}")
    files = [_array_types(path, i, node) for i, node in enumerate(nodes)]
    if len({file for file, _ in files}) < len(files):
        raise ValueError(f"{path} lists a file twice; each node needs a separate one")
    return [_node(path, node, *entry) for node, entry in zip(nodes, files, strict=True)]


def arrays(path: Path, compressed: bool = False) -> dict[str, Array]:
    """Read the arrays of an .npz file, by name.

    Headers cannot make it allocate more memory than the file justifies: an array is as long as its part of the file,
    or, if `compressed` allows compressed parts, at most 1,032 times as long, the limit of deflate.

    Raises:
        OSError: there is no such file.
        ValueError: the file is damaged, or has anything other than arrays of numbers.
    """
    kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) if compressed else (zipfile.ZIP_STORED,)
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if any(part.compress_type not in kinds for part in parts):
                raise ValueError("it is compressed")
            if sum(part.compress_size for part in parts) > path.stat().st_size:
                raise ValueError("its parts overlap")
            return {part.filename.removesuffix(".npy"): _array(archive.read(part)) for part in parts}
    except (zipfile.BadZipFile, ValueError, EOFError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {_brief(error)}") from error


def _array(raw: bytes) -> Array:
    """An array of numbers from the content of a .npy file."""
    file = io.BytesIO(raw)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"an array has version {version}")
    shape, is_by_column, dtype = readers[version](file)
    size = dtype.itemsize * math.prod(shape)
    if dtype.hasobject:
        raise ValueError("an array has objects, which are not supported (allow_pickle=False)")
    if not dtype.itemsize or size != len(raw) - file.tell():
        raise ValueError(f"an array of {dtype} of shape {_brief(shape)} has {len(raw) - file.tell()} bytes")
    flat = np.frombuffer(raw[file.tell() :], dtype) if size else np.empty(math.prod(shape), dtype)
    return flat.reshape(shape, order="F" if is_by_column else "C").copy()


def _brief(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _array_types(path: Path, i: int, node: Any) -> tuple[str, _Types]:
    """The file of a node, and the dtypes and shapes of its arrays."""
    try:
        file, expected = node["file"], {n: (d["stored"], tuple(d["shape"])) for n, d in node["arrays"].items()}
        if Path(file).name != file:
            raise ValueError(f"{_brief(file)} is not a plain file name")
        _ = node["name"], node["operator"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the description of node {i} is malformed: {_brief(repr(error))}") from error
    return file, expected


def _node(path: Path, node: Any, file: str, expected: _Types) -> Node:
    found = arrays(path.parent / file)
    shapes = {n: (x.dtype.name, x.shape) for n, x in found.items()}
    if shapes != expected:
        wrong = sorted(n for n in {*shapes, *expected} if shapes.get(n) != expected.get(n))
        raise ValueError(
            f"{path.parent / file} does not match vectors.json: {', '.join(map(str, wrong))[:_LONGEST]} differ"
        )
    return Node(node["name"], node["operator"], node, found)
