"""Golden vectors in Python: reads the folder that this file lies in, or another one. It needs numpy alone.

import hop_vectors

for node in hop_vectors.read("."):
    print(node.name, node.operator, node.arrays["output"].shape)
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


@dataclass(frozen=True)
class Node:
    """A call of the program.

    Attributes:
        name: in the program.
        operator: what it calls, such as "aten.conv2d.default".
        about: what vectors.json says of it: its arguments, its convention, its arrays.
        arrays: numpy's arrays by name, such as "input", "weight.scale", "sums" and "output".
    """

    name: str
    operator: str
    about: dict[str, Any]
    arrays: dict[str, Any]


def read(folder: str | Path) -> list[Node]:
    """The nodes of a folder, in the order in which the program runs them.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged, or of another version; the message names it.
    """
    path = Path(folder) / "vectors.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, nodes = index["hop_vectors"], index["nodes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} lists no golden vectors: {error!r}") from error
    if version != FORMAT:
        raise ValueError(f"{path} is of version {version!r}; this reader knows {FORMAT}")
    return [_node(path, i, node) for i, node in enumerate(nodes)]


def _node(path: Path, i: int, node: Any) -> Node:
    try:
        name, operator, file, described = node["name"], node["operator"], node["file"], node["arrays"]
        if Path(file).name != file:
            raise ValueError(f"{file!r} is no plain name of a file")
        expected = {n: (d["stored"], tuple(d["shape"])) for n, d in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: node {i} is not described as it should be: {error!r}") from error
    try:
        with (path.parent / file).open("rb") as opened, np.load(opened, allow_pickle=False) as held:
            arrays = {n: held[n] for n in held.files}
    except (zipfile.BadZipFile, ValueError, EOFError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path.parent / file} is damaged: {error}") from error
    own = {n: (x.dtype.name, x.shape) for n, x in arrays.items()}
    if own != expected:
        wrong = sorted(n for n in {*own, *expected} if own.get(n) != expected.get(n))
        raise ValueError(f"{path.parent / file} does not hold what vectors.json says: {', '.join(wrong)} differ")
    return Node(name, operator, node, arrays)
